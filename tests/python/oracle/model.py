"""The whole model in float64: a token sequence at once, with no cache, no pages and no ranks.

Written from the order and the formulas of a step, from the operations of this package and from the
published tensor names. Values are rounded where a stored format or the serving path rounds them
(bf16 tensors between stages, e4m3 rows of keys, FP4 round trips), so that what is left between
this and a kernel is the order and precision of sums.

``config`` has the fields of ``lowlat_model_config`` (``layers`` as dicts); ``weights`` maps a
published name to the whole tensor in its stored form: bf16 as uint16 bits; e4m3, ue8m0 and packed
fp4 as uint8.
"""

from dataclasses import dataclass, field

import numpy as np

from oracle.attention import SOFTMAX_SCALE
from oracle.compress import latents
from oracle.draft import MIN_TEMPERATURE
from oracle.engram import engram_apply, engram_hash, engram_lookup
from oracle.formats import (
    bf,
    bf16_bits,
    bf16_value,
    e4m3_value,
    f32,
    fp4_round_trip_e4m3,
    ue8m0_value,
)
from oracle.index import best_ascending, index_key, index_query, key_values
from oracle.linear import fp8_linear
from oracle.mix import hc_post, hc_stats, norm, rank_sum, sigmoid
from oracle.moe import ROUTED_SCALING, SWIGLU_LIMIT, mxfp4, scores
from oracle.rope_kv import NOPE_DIM, kv_pack, rotate, unpack

NUM_STREAMS = 4
MARKOV = ("embed", "head")


@dataclass
class Selection:
    """Picks of one layer, and how far each row was from another answer."""

    picks: list
    # [T]: how far the best score left out is below the worst one picked, inf where none is left
    # out. Of experts as it is; of entries and blocks over the row's largest |score|.
    margin: np.ndarray


@dataclass
class Trace:
    """What a run of the target leaves behind, rows in the order of the tokens."""

    logits: np.ndarray | None = None  # [T, vocab]
    features: np.ndarray | None = None  # [T, layers of the draft * hidden]
    swa: dict = field(default_factory=dict)  # layer: [T, 512] window keys as they are read back
    extra: dict = field(default_factory=dict)  # kv source: [T / ratio, 512] compressed keys
    index: dict = field(default_factory=dict)  # kv source: [T / ratio, 128] index keys
    gates: dict = field(default_factory=dict)  # layer: Selection
    entries: dict = field(default_factory=dict)  # index source: Selection
    blocks: dict = field(default_factory=dict)  # candidate layer: Selection


def stored(keys):
    """Keys through the bytes of a cache row."""
    return unpack(kv_pack({"kv": f32(keys)})["rows"])


def philox(counter, key):
    """Philox4x32-10 of counters [..., 4] under one 64-bit key: [..., 4] words."""
    c = [np.asarray(counter[..., i], np.uint64) for i in range(4)]
    low32 = np.uint64(0xFFFFFFFF)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        high_a, high_b = a >> np.uint64(32), b >> np.uint64(32)
        c = [high_b ^ c[1] ^ np.uint64(k0), b & low32, high_a ^ c[3] ^ np.uint64(k1), a & low32]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, axis=-1)


def draft_uniform(vocab, num_steps, row, offset, key):
    """The uniforms of one sampled request, float64 [num_steps, vocab]."""
    ids = np.arange(vocab)
    out = np.empty((num_steps, vocab))
    for step in range(num_steps):
        counter = np.stack(
            [ids >> 2, np.full(vocab, row), np.full(vocab, step), np.full(vocab, offset)], -1
        )
        words = philox(counter & 0xFFFFFFFF, key)
        bits = np.take_along_axis(words, (ids & 3)[:, None], -1)[:, 0]
        out[step] = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return out


class Model:
    """The target and its draft. Ranks differ in the order of sums and in what each rounds alone."""

    def __init__(self, config, weights, tp_size=1):
        self.config = config
        self.weights = weights
        self.tp_size = tp_size
        self.expanded = {}  # experts as float64, by name

    # ------------------------------------------------------------------ tensors

    def bf16(self, name):
        return bf16_value(self.weights[name])

    def f64(self, name):
        return self.weights[name].astype(np.float64)

    def fp8(self, x, name, columns=slice(None)):
        """x [T,K] by (some columns of) a block-fp8 linear, float64 [T,N], not rounded."""
        block = self.config["scale_block"]
        weight, scale = self.weights[name + ".weight"], ue8m0_value(self.weights[name + ".scale"])
        if columns != slice(None):
            blocks = slice(columns.start // block, columns.stop // block)
            x, weight, scale = x[:, columns], weight[:, columns], scale[:, blocks]
        return fp8_linear(x, weight, scale, block)

    def rank_columns(self, width):
        """Each rank's columns of a linear whose input is split over the ranks."""
        each = width // self.tp_size
        return [slice(rank * each, (rank + 1) * each) for rank in range(self.tp_size)]

    def over_ranks(self, partial, width):
        """The sum of partial(columns) in rank order: fp32, rounded once, at the end."""
        partials = [f32(partial(columns)) for columns in self.rank_columns(width)]
        return bf16_value(rank_sum({"partial": np.stack(partials)})["y"])

    def fp4(self, name):
        """The stacked experts' weight [E,N,K], expanded."""
        if name not in self.expanded:
            packed, scale = self.weights[name + ".weight"], self.weights[name + ".scale"]
            self.expanded[name] = mxfp4(packed, scale)
        return self.expanded[name]

    def fp8_as_bf16(self, name):
        """A block-fp8 weight expanded, exact in bf16."""
        scale = ue8m0_value(self.weights[name + ".scale"])
        block = self.config["scale_block"]
        scale = np.repeat(np.repeat(scale, block, 0), block, 1)
        return e4m3_value(self.weights[name + ".weight"]) * scale

    # ------------------------------------------------------------------ parts of a layer

    def mix(self, residual, name):
        return hc_stats(
            {
                "residual": bf16_bits(residual),
                "fn": self.weights[name + "_fn"],
                "base": self.weights[name + "_base"],
                "scale": self.weights[name + "_scale"],
            }
        )

    def combine(self, residual, pre):
        """The mix of the streams, rounded. Before the first sublayer there is no pre: stream 0."""
        if pre is None:
            return residual[:, 0]
        return bf(np.einsum("tk,tkh->th", pre.astype(np.float64), residual))

    def post(self, residual, y, stats):
        bits = hc_post(
            {
                "residual": bf16_bits(residual),
                "y": bf16_bits(y),
                "post": stats["post"],
                "comb": stats["comb"],
            }
        )["residual"]
        return bf16_value(bits)

    def window_keys(self, kv, prefix, pos, yarn):
        """kv [T,512] of the projection, rounded to bf16, to keys as the cache gives them back."""
        keys = norm(kv, self.bf16(prefix + "attn.kv_norm.weight"))
        keys[:, NOPE_DIM:] = rotate(keys[:, NOPE_DIM:], pos, yarn)
        return stored(keys)

    def queries(self, ql, prefix, pos, yarn):
        q = bf(self.fp8(ql, prefix + "attn.wq_b")).reshape(len(ql), -1, 512)
        q[..., NOPE_DIM:] = bf(rotate(q[..., NOPE_DIM:], pos, yarn))
        return q

    def core(self, q, keys, allowed, sink, pos, yarn):
        """q [T,h,512], keys [S,512], allowed bool [T,S]; output rotated back, bf16 [T,h,512]."""
        score = np.einsum("thd,sd->ths", q, keys) * SOFTMAX_SCALE
        score = np.where(allowed[:, None, :], score, -np.inf)
        shift = np.maximum(score.max(-1), sink)[..., None]
        p = np.exp(score - shift)
        o = bf(p @ keys / (p.sum(-1, keepdims=True) + np.exp(sink[None, :, None] - shift)))
        o[..., NOPE_DIM:] = bf(rotate(o[..., NOPE_DIM:], pos, yarn, inverse=True))
        return o

    def project_out(self, o, prefix):
        groups, lora = self.config["o_groups"], self.config["o_lora"]
        wo_a = self.fp8_as_bf16(prefix + "attn.wo_a").reshape(groups, lora, -1)
        u = bf(np.einsum("tgi,goi->tgo", o.reshape(len(o), groups, -1), wo_a))
        u = u.reshape(len(o), -1)
        return self.over_ranks(lambda c: self.fp8(u, prefix + "attn.wo_b", c), u.shape[1])

    def query_latent(self, x, prefix):
        return bf(
            norm(bf(self.fp8(x, prefix + "attn.wq_a")), self.bf16(prefix + "attn.q_norm.weight"))
        )

    def compress(self, x, layer, ratio, trace):
        """Entries of a kv source: compressed keys and index keys, from the whole history."""
        prefix = f"layers.{layer}.attn."
        wgate = self.bf16(prefix + "compressor.wgate.weight") if ratio == 2 else None
        latent = latents(
            x,
            self.bf16(prefix + "compressor.wkv.weight"),
            wgate,
            self.bf16(prefix + "compressor.norm.weight"),
            ratio,
        )
        pos = np.arange(len(latent)) * ratio
        rows = index_key(
            {
                "latent": bf16_bits(latent),
                "wk": self.weights[prefix + "indexer.wk.weight"],
                "norm": self.weights[prefix + "indexer.k_norm.weight"],
                "pos": pos,
            }
        )["rows"]
        trace.index[layer] = key_values(rows)
        z = latent.copy()
        z[:, NOPE_DIM:] = bf(rotate(z[:, NOPE_DIM:], pos, yarn=True))
        trace.extra[layer] = stored(fp4_round_trip_e4m3(z))

    def index_scores(self, x, ql, layer, pos, trace):
        """float64 [T,N] over the entries of the layer's kv source, -inf where not yet there."""
        prefix = f"layers.{layer}.attn.indexer."
        heads = self.config["index_heads"]
        q = bf(self.fp8(ql, prefix + "wq_b")).reshape(len(x), heads, 128)
        iq = bf16_value(index_query({"q": bf16_bits(q), "pos": pos})["iq"])
        w = bf(x @ self.bf16(prefix + "weights_proj.weight").T) * 128.0**-0.5 * heads**-0.5
        plan = self.config["layers"][layer]
        keys = trace.index[plan["kv_source"]]
        score = np.einsum("th,thn->tn", w, np.maximum(np.einsum("thd,nd->thn", iq, keys), 0.0))
        count = (pos + 1) // plan["ratio"]
        return np.where(np.arange(len(keys))[None, :] < count[:, None], score, -np.inf)

    def select(self, x, ql, layer, pos, trace):
        """Which entries each row of an index source attends to, and candidate blocks."""
        plan, block = self.config["layers"][layer], self.config["candidate_block_size"]
        score = self.index_scores(x, ql, layer, pos, trace)
        entry = np.arange(score.shape[1])
        if layer == self.config["candidate_layer"]:
            best = np.full((len(x), -(-len(entry) // block)), -np.inf)
            for t in range(len(x)):
                count = (pos[t] + 1) // plan["ratio"]
                for b in range(-(-count // block)):
                    best[t, b] = score[t, b * block : min((b + 1) * block, count)].max()
                if count > 0:
                    best[t, (count - 1) // block] = np.inf  # the block of the newest entry
            trace.blocks[layer] = choose(best, self.config["candidate_blocks"])
        if plan["candidate_source"] >= 0:
            for t, blocks in enumerate(trace.blocks[plan["candidate_source"]].picks):
                score[t, ~np.isin(entry // block, blocks)] = -np.inf
        trace.entries[layer] = choose(score, self.config["index_topk"])

    def attention(self, x, layer, pos, trace):
        prefix = f"layers.{layer}."
        plan = self.config["layers"][layer]
        yarn = plan["ratio"] > 0
        kv = bf(self.fp8(x, prefix + "attn.wkv"))
        keys = trace.swa[layer] = self.window_keys(kv, prefix, pos, yarn)
        ql = self.query_latent(x, prefix)
        age = pos[:, None] - pos[None, :]
        allowed = (age >= 0) & (age < self.config["window"])
        if plan["ratio"] > 0:
            if plan["kv_source"] == layer:
                self.compress(x, layer, plan["ratio"], trace)
            if plan["index_source"] == layer:
                self.select(x, ql, layer, pos, trace)
            extra = trace.extra[plan["kv_source"]]
            picked = np.zeros((len(x), len(extra)), bool)
            for t, picks in enumerate(trace.entries[plan["index_source"]].picks):
                picked[t, picks] = True
            keys, allowed = np.concatenate([keys, extra]), np.concatenate([allowed, picked], 1)
        q = self.queries(ql, prefix, pos, yarn)
        o = self.core(q, keys, allowed, self.f64(prefix + "attn.attn_sink"), pos, yarn)
        return self.project_out(o, prefix)

    def experts(self, x, prefix, num_picks, bias, floor_sum):
        """bias [T,E]. The routed path's roundings are those of a W4A16 kernel with bf16 tiles."""
        score = scores(x, self.bf16(prefix + "ffn.gate.weight"))
        rank = score + bias
        ids = np.argsort(-rank, axis=1, kind="stable")[:, :num_picks]
        ordered = np.sort(rank, axis=1)[:, ::-1]
        margin = np.full(len(x), np.inf)
        if num_picks < rank.shape[1]:
            margin = ordered[:, num_picks - 1] - ordered[:, num_picks]
        picked = np.take_along_axis(score, ids, 1)
        total = picked.sum(1, keepdims=True)
        total = total + 1e-20 if floor_sum else np.where(total <= 0, 1.0, total)
        weight = f32(picked / total * ROUTED_SCALING).astype(np.float64)
        w1, w3, w2 = (self.fp4(f"{prefix}ffn.experts.{w}") for w in ("w1", "w3", "w2"))
        shared = prefix + "ffn.shared_experts."
        g = np.minimum(bf(self.fp8(x, shared + "w1")), SWIGLU_LIMIT)
        u = np.clip(bf(self.fp8(x, shared + "w3")), -SWIGLU_LIMIT, SWIGLU_LIMIT)
        shared_h = bf(g * sigmoid(g) * u)

        def partial(columns):
            routed = np.zeros(x.shape)
            for e in np.unique(ids):
                rows, slots = np.nonzero(ids == e)
                g = np.minimum(bf(x[rows] @ w1[e, columns].T), SWIGLU_LIMIT)
                u = np.clip(bf(x[rows] @ w3[e, columns].T), -SWIGLU_LIMIT, SWIGLU_LIMIT)
                h = bf(bf(g * sigmoid(g)) * u)
                routed[rows] += bf(weight[rows, slots][:, None] * (h @ w2[e, :, columns].T))
            return bf(routed) + bf(self.fp8(shared_h, shared + "w2", columns))

        return self.over_ranks(partial, w1.shape[1]), Selection(list(ids), margin)

    def layer(self, residual, pre, prefix, attention, experts):
        """Both sublayers. Each takes the pre of the sublayer before it."""
        stats = self.mix(residual, prefix + "hc_attn")
        x = bf(norm(self.combine(residual, pre), self.bf16(prefix + "attn_norm.weight")))
        residual = self.post(residual, attention(x), stats)
        pre = stats["pre"]
        stats = self.mix(residual, prefix + "hc_ffn")
        x = bf(norm(self.combine(residual, pre), self.bf16(prefix + "ffn_norm.weight")))
        residual = self.post(residual, experts(x), stats)
        return residual, stats["pre"]

    def engram(self, residual, tokens, layer):
        table, config = self.config["layers"][layer]["engram"], self.config
        name = f"layers.{layer}.engram."
        shifted = np.concatenate([np.zeros(3, np.int64), tokens])
        ids = engram_hash(
            {
                "token": tokens,
                "history": np.stack([shifted[i : i + len(tokens)] for i in range(3)], 1),
                "pos": np.arange(len(tokens)),
                "map": self.weights["engram.token_map"],
                "mult": np.array(config["engram_multipliers"][table]),
                "prime": np.array(config["engram_primes"][table]),
                "image_token": np.array(config["image_token"]),
            }
        )["ids"]
        e = engram_lookup(
            {
                "ids": ids,
                "table": self.weights[name + "embed.weight"],
                "table_scale": self.weights[name + "embed.scale"],
            }
        )["e"]
        out = engram_apply(
            {
                "residual": bf16_bits(residual),
                "e": e,
                "wkv": self.weights[name + "wkv.weight"],
                "wkv_scale": ue8m0_value(self.weights[name + "wkv.scale"]),
                "q_weight": self.weights[name + "q_weight"],
                "k_weight": self.weights[name + "k_weight"],
            }
        )["residual"]
        image = tokens == config["image_token"]
        return np.where(image[:, None, None], residual, bf16_value(out))

    def head(self, residual, pre, norm_name):
        h = norm(self.combine(residual, pre), self.bf16(norm_name))
        return bf(bf(h) @ self.bf16("head.weight").T)

    def embed(self, tokens):
        return np.repeat(self.bf16("embed.weight")[tokens][:, None, :], NUM_STREAMS, axis=1)

    # ------------------------------------------------------------------ target

    def run(self, tokens):
        """The target over tokens at positions 0 .. T-1."""
        tokens = np.asarray(tokens, np.int64)
        pos = np.arange(len(tokens))
        image = (tokens == self.config["image_token"])[:, None]
        trace, features = Trace(), {}
        residual, pre = self.embed(tokens), None
        for layer in range(self.config["num_layers"]):
            prefix = f"layers.{layer}."
            if self.config["layers"][layer]["engram"] >= 0:
                residual = self.engram(residual, tokens, layer)
            if layer in self.config["draft_target_layers"]:
                features[layer] = bf(residual.sum(1) * 0.25)
            bias = np.where(
                image, self.f64(prefix + "ffn.gate.bias_vl"), self.f64(prefix + "ffn.gate.bias")
            )

            def experts(x, prefix=prefix, bias=bias, layer=layer):
                y, trace.gates[layer] = self.experts(
                    x, prefix, self.config["experts_per_token"], bias, floor_sum=True
                )
                return y

            residual, pre = self.layer(
                residual,
                pre,
                prefix,
                lambda x, layer=layer: self.attention(x, layer, pos, trace),
                experts,
            )
        trace.features = np.concatenate(
            [features[layer] for layer in self.config["draft_target_layers"]], 1
        )
        trace.logits = self.head(residual, pre, "norm.weight")
        return trace

    # ------------------------------------------------------------------ draft

    def draft_context(self, features):
        """Keys of every stage for the tokens whose features are given, from position 0."""
        main = bf(
            norm(bf(self.fp8(features, "mtp.0.main_proj")), self.bf16("mtp.0.main_norm.weight"))
        )
        pos = np.arange(len(features))
        return [
            self.window_keys(bf(self.fp8(main, f"mtp.{s}.attn.wkv")), f"mtp.{s}.", pos, False)
            for s in range(self.config["num_draft_stages"])
        ]

    def draft(self, features, anchor):
        """Logits before the Markov bias, [block, vocab], of the rows that follow the tokens whose
        features are given; and the margins of the gates' selections, [block]."""
        config = self.config
        prefix_len, block = len(features), config["draft_block"]
        tokens = np.array([anchor] + [config["draft_mask_token"]] * (block - 1))
        pos = prefix_len + np.arange(block)
        first = max(0, prefix_len - config["window"])
        context = [keys[first:] for keys in self.draft_context(features)]
        residual, pre = self.embed(tokens), None
        margins = []
        for stage in range(config["num_draft_stages"]):
            prefix = f"mtp.{stage}."

            def attention(x, stage=stage, prefix=prefix):
                kv = bf(self.fp8(x, prefix + "attn.wkv"))
                keys = np.concatenate([context[stage], self.window_keys(kv, prefix, pos, False)])
                q = self.queries(self.query_latent(x, prefix), prefix, pos, False)
                every = np.ones((block, len(keys)), bool)
                sink = self.f64(prefix + "attn.attn_sink")
                return self.project_out(self.core(q, keys, every, sink, pos, False), prefix)

            def experts(x, prefix=prefix):
                bias = np.tile(self.f64(prefix + "ffn.gate.bias"), (block, 1))
                num_picks = config["draft_experts_per_token"]
                y, selection = self.experts(x, prefix, num_picks, bias, floor_sum=False)
                margins.append(selection.margin)
                return y

            residual, pre = self.layer(residual, pre, prefix, attention, experts)
        base = self.head(residual, pre, self.last_stage + "norm.weight")
        return base, np.min(margins, axis=0)

    @property
    def last_stage(self):
        return f"mtp.{self.config['num_draft_stages'] - 1}."

    def markov(self, base, anchor, tokens, temperature, noise):
        """Logits and keys of every step where `tokens` are the proposals, [block, vocab] each.

        A proposal is the best key of its step. noise is (row, offset, key) of a sampled request.
        """
        embed, head = (self.bf16(f"{self.last_stage}markov_head.{n}.weight") for n in MARKOV)
        before = np.concatenate([[anchor], tokens[:-1]])
        logits = f32(base + bf(embed[before] @ head.T)).astype(np.float64)
        if temperature == 0:
            return logits, logits
        u = draft_uniform(base.shape[1], len(base), *noise)
        return logits, logits / max(temperature, MIN_TEMPERATURE) - np.log(-np.log1p(-u))


def choose(score, k):
    """The k best of each row of score [T,N], and how clear the choice was."""
    picks, margin = [], np.full(len(score), np.inf)
    for t, row in enumerate(score):
        best = best_ascending(row, k)
        picks.append(best[best >= 0])
        finite = np.sort(row[np.isfinite(row)])[::-1]
        forced = np.isposinf(row).sum()
        room = k - forced
        if 0 < room < len(finite):
            scale = np.abs(finite).max()
            margin[t] = (finite[room - 1] - finite[room]) / scale if scale > 0 else 0.0
    return Selection(picks, margin)

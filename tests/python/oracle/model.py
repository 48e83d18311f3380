"""The whole model in float64: a token sequence at once, with no cache, no pages and no ranks.

Written from the order and the formulas of a step, from the operations of this package and from the
published tensor names. Values are rounded where a stored format or the serving path rounds them
(bf16 tensors between stages, e4m3 rows of keys, FP4 round trips), so that what is left between
this and a kernel is the order and precision of sums.

Here is what the models share, and the order of a step; ``model_v41`` and ``model_v4`` add what is
each one's own, and ``models`` picks. ``config`` has the fields of ``lowlat_model_config``
(``layers`` as dicts); ``weights`` maps a published name to the whole tensor in its stored form:
bf16 as uint16 bits; e4m3, ue8m0 and packed fp4 as uint8.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np

from oracle import mix
from oracle.attention import SOFTMAX_SCALE
from oracle.draft import MIN_TEMPERATURE
from oracle.formats import bf, bf16_bits, bf16_value, e4m3_value, f32, ue8m0_value
from oracle.index import best_ascending
from oracle.linear import fp8_linear
from oracle.mix import NORM_EPS, norm, rank_sum, sigmoid
from oracle.moe import ROUTED_SCALING, SWIGLU_LIMIT, mxfp4, scores
from oracle.rope_kv import NOPE_DIM, kv_pack, rotate, unpack

NUM_STREAMS = 4


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


class Model(ABC):
    """The target and its draft. Ranks differ in the order of sums and in what each rounds alone."""

    name: str  # of the model in oracle.OPS
    markov_names: tuple  # of the two Markov tensors
    lagged_pre: bool  # a sublayer's input is mixed by the pre of the sublayer before it
    features_after: bool  # the draft's features are taken after their layers, not before

    def __init__(self, config, weights, tp_size=1):
        self.config = config
        self.weights = weights
        self.tp_size = tp_size
        self.eps = NORM_EPS[self.name]
        self.expanded = {}  # experts as float64, by name

    # ------------------------------------------------------------------ tensors

    def bf16(self, name):
        return bf16_value(self.weights[name])

    def f64(self, name):
        return self.weights[name].astype(np.float64)

    def fp8(self, x, name, columns=slice(None), rows=slice(None)):
        """x [T,K] by (some columns or rows of) a block-fp8 linear, float64 [T,N], not rounded."""
        block = self.config["scale_block"]
        weight, scale = self.weights[name + ".weight"], ue8m0_value(self.weights[name + ".scale"])

        def blocks(part):
            if part == slice(None):
                return part
            assert part.start % block == 0 and part.stop % block == 0, f"{name} cuts a block"
            return slice(part.start // block, part.stop // block)

        return fp8_linear(
            x[:, columns], weight[rows, columns], scale[blocks(rows), blocks(columns)], block
        )

    def norm(self, x, name):
        """x by the gain of that name, rounded."""
        return bf(norm(x, self.bf16(name), self.eps))

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
        return mix.hc_stats(
            {
                "residual": bf16_bits(residual),
                "fn": self.weights[name + "_fn"],
                "base": self.weights[name + "_base"],
                "scale": self.weights[name + "_scale"],
            },
            self.name,
        )

    def sublayer_input(self, residual, pre, name):
        """The normed mix of the streams; where there is no pre yet, stream 0 by itself."""
        if pre is None:
            return self.norm(residual[:, 0], name)
        arrays = {"residual": bf16_bits(residual), "pre": pre, "gain": self.weights[name]}
        return bf16_value(mix.hc_combine_norm(arrays, self.name)["x"])

    def post(self, residual, y, stats):
        bits = mix.hc_post(
            {
                "residual": bf16_bits(residual),
                "y": bf16_bits(y),
                "post": stats["post"],
                "comb": stats["comb"],
            }
        )["residual"]
        return bf16_value(bits)

    def layer(self, residual, pre, prefix, attention, experts):
        """Both sublayers. Gives the residual and the pre of the last one."""
        for part, run in (("attn", attention), ("ffn", experts)):
            stats = self.mix(residual, f"{prefix}hc_{part}")
            given = pre if self.lagged_pre else stats["pre"]
            x = self.sublayer_input(residual, given, f"{prefix}{part}_norm.weight")
            residual, pre = self.post(residual, run(x), stats), stats["pre"]
        return residual, pre

    def window_keys(self, kv, prefix, pos, yarn):
        """kv [T,512] of the projection, rounded to bf16, to keys as the cache gives them back."""
        keys = norm(kv, self.bf16(prefix + "attn.kv_norm.weight"), self.eps)
        keys[:, NOPE_DIM:] = rotate(keys[:, NOPE_DIM:], pos, yarn)
        return stored(keys)

    def query_latent(self, x, prefix):
        return self.norm(bf(self.fp8(x, prefix + "attn.wq_a")), prefix + "attn.q_norm.weight")

    def head_queries(self, q):
        """What a model makes of the projected queries [T,h,512] before they are rotated."""
        return q

    def queries(self, ql, prefix, pos, yarn):
        q = self.head_queries(bf(self.fp8(ql, prefix + "attn.wq_b")).reshape(len(ql), -1, 512))
        q[..., NOPE_DIM:] = bf(rotate(q[..., NOPE_DIM:], pos, yarn))
        return q

    def core(self, q, keys, allowed, sink, pos, yarn):
        """q [T,h,512], keys [S,512], allowed bool [T,S]; output rotated back, bf16 [T,h,512]."""
        score = np.einsum("thd,sd->ths", q, keys, optimize=True) * SOFTMAX_SCALE
        score = np.where(allowed[:, None, :], score, -np.inf)
        shift = np.maximum(score.max(-1), sink)[..., None]
        p = np.exp(score - shift)
        o = bf(p @ keys / (p.sum(-1, keepdims=True) + np.exp(sink[None, :, None] - shift)))
        o[..., NOPE_DIM:] = bf(rotate(o[..., NOPE_DIM:], pos, yarn, inverse=True))
        return o

    def group_outputs(self, o, prefix):
        """o [T,groups,K] by each group's wo_a, its activations in bf16: float64 [T,groups,lora]."""
        groups, lora = self.config["o_groups"], self.config["o_lora"]
        wo_a = self.fp8_as_bf16(prefix + "attn.wo_a").reshape(groups, lora, -1)
        return np.einsum("tgi,goi->tgo", o, wo_a, optimize=True)

    def project_out(self, o, prefix, group_outputs):
        o = o.reshape(len(o), self.config["o_groups"], -1)
        u = bf(group_outputs(o, prefix)).reshape(len(o), -1)
        return self.over_ranks(lambda c: self.fp8(u, prefix + "attn.wo_b", c), u.shape[1])

    def target_group_outputs(self, o, prefix):
        return self.group_outputs(o, prefix)

    @abstractmethod
    def compress(self, x, layer, ratio, trace):
        """Entries of a kv source into the trace, from the whole history."""

    @abstractmethod
    def select(self, x, ql, layer, pos, trace):
        """Which entries each row of an index source attends to, into the trace."""

    def picked(self, layer, pos, num_entries, trace):
        """bool [T, entries]: which of them each row attends to."""
        plan = self.config["layers"][layer]
        if plan["index_source"] < 0:  # all there are
            return np.arange(num_entries)[None, :] < ((pos + 1) // plan["ratio"])[:, None]
        picked = np.zeros((len(pos), num_entries), bool)
        for t, picks in enumerate(trace.entries[plan["index_source"]].picks):
            picked[t, picks] = True
        return picked

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
            picked = self.picked(layer, pos, len(extra), trace)
            keys, allowed = np.concatenate([keys, extra]), np.concatenate([allowed, picked], 1)
        q = self.queries(ql, prefix, pos, yarn)
        o = self.core(q, keys, allowed, self.f64(prefix + "attn.attn_sink"), pos, yarn)
        return self.project_out(o, prefix, self.target_group_outputs)

    def route(self, x, prefix, num_picks, bias, floor_sum):
        """bias [T,E]: (experts of each row, their weights, Selection)."""
        score = scores(x, self.bf16(prefix + "ffn.gate.weight"), self.name)
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
        return ids, weight, Selection(list(ids), margin)

    def experts(self, x, prefix, ids, weight):
        """The routed path's roundings are those of a W4A16 kernel with bf16 tiles."""
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

        return self.over_ranks(partial, w1.shape[1])

    def embed(self, tokens):
        return np.repeat(self.bf16("embed.weight")[tokens][:, None, :], NUM_STREAMS, axis=1)

    @abstractmethod
    def collapse(self, residual, pre, prefix):
        """The streams as one, rounded; prefix is the draft's last stage or "" for the target."""

    def head(self, residual, pre, prefix):
        x = self.norm(self.collapse(residual, pre, prefix), prefix + "norm.weight")
        return bf(x @ self.bf16("head.weight").T)

    # ------------------------------------------------------------------ target

    def before_layer(self, residual, tokens, layer):
        """What is added to the residual before a layer."""
        return residual

    @abstractmethod
    def route_target(self, x, tokens, layer):
        """(experts, weights, Selection) of a layer of the target."""

    def run(self, tokens):
        """The target over tokens at positions 0 .. T-1."""
        tokens = np.asarray(tokens, np.int64)
        pos = np.arange(len(tokens))
        trace, features = Trace(), {}
        residual, pre = self.embed(tokens), None
        for layer in range(self.config["num_layers"]):
            prefix = f"layers.{layer}."
            residual = before = self.before_layer(residual, tokens, layer)

            def experts(x, prefix=prefix, layer=layer):
                ids, weight, trace.gates[layer] = self.route_target(x, tokens, layer)
                return self.experts(x, prefix, ids, weight)

            residual, pre = self.layer(
                residual,
                pre,
                prefix,
                lambda x, layer=layer: self.attention(x, layer, pos, trace),
                experts,
            )
            features[layer] = bf((residual if self.features_after else before).sum(1) * 0.25)
        if self.config["num_draft_stages"] > 0:
            trace.features = np.concatenate(
                [features[layer] for layer in self.config["draft_target_layers"]], 1
            )
        trace.logits = self.head(residual, pre, "")
        return trace

    # ------------------------------------------------------------------ draft

    def draft_context(self, features):
        """Keys of every stage for the tokens whose features are given, from position 0."""
        main = self.norm(bf(self.fp8(features, "mtp.0.main_proj")), "mtp.0.main_norm.weight")
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
                o = self.core(q, keys, every, sink, pos, False)
                return self.project_out(o, prefix, self.group_outputs)

            def experts(x, prefix=prefix):
                bias = np.tile(self.f64(prefix + "ffn.gate.bias"), (block, 1))
                num_picks = config["draft_experts_per_token"]
                ids, weight, selection = self.route(x, prefix, num_picks, bias, floor_sum=False)
                margins.append(selection.margin)
                return self.experts(x, prefix, ids, weight)

            residual, pre = self.layer(residual, pre, prefix, attention, experts)
        return self.head(residual, pre, self.last_stage), np.min(margins, axis=0)

    @property
    def last_stage(self):
        return f"mtp.{self.config['num_draft_stages'] - 1}."

    def markov(self, base, anchor, tokens, temperature, noise):
        """Logits and keys of every step where `tokens` are the proposals, [block, vocab] each.

        A proposal is the best key of its step. noise is (row, offset, key) of a sampled request.
        """
        names = (f"{self.last_stage}markov_head.{n}.weight" for n in self.markov_names)
        embed, head = (self.bf16(name) for name in names)
        before = np.concatenate([[anchor], tokens[:-1]])
        logits = f32(base + bf(embed[before] @ head.T)).astype(np.float64)
        if temperature == 0:
            return logits, logits
        u = draft_uniform(base.shape[1], len(base), *noise)
        return logits, logits / max(temperature, MIN_TEMPERATURE) - np.log(-np.log1p(-u))


def reachable(score, pos, ratio):
    """score [T,N] with -inf at the entries that are not yet there at a row's position."""
    count = (pos + 1) // ratio
    return np.where(np.arange(score.shape[1])[None, :] < count[:, None], score, -np.inf)


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

"""Every operation of `lowlat op` as launches of cpp_kernels/host/amd/stages.hip, on a machine of
tests/tools/amd: the same steps as host/nvidia's launches, stage by stage.
"""

import numpy as np
from oracle.formats import e4m3_value
from oracle.rope_kv import inverse_frequencies

from support.amd_machine import code_object, machine

THREADS = 256
ROWS_OF_BLOCK = 16  # weight rows that a block of a linear takes
HC_EPS, SINKHORN, ROUTED_SCALING, SWIGLU_LIMIT = 1e-6, 20, 1.5, 10.0
IMAGE_TOKEN, PAD_TOKEN, CANDIDATE_BLOCK = 129264, 2, 8
NORM_EPS = {"v41": 1e-20, "v4": 1e-6}
SCALE_BLOCK = {"v41": 32, "v4": 128}


def f32(value: float) -> np.float32:
    return np.float32(value)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """bf16 bits of fp32 values, to the nearest."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Stages:
    """The stages' kernels on one rank of a machine of their part."""

    def __init__(self, code: code_object.CodeObject, seed: int = 1, approximate: int = 0) -> None:
        self.machine = machine.Machine(code.isa, seed=seed, approximate=approximate)
        self.code = self.machine.load(code)

    def give(self, values: np.ndarray, name: str = "input") -> machine.Buffer:
        return self.machine.array(values, name, read_only=True)

    def get(self, shape, dtype, name: str = "output") -> machine.Buffer:
        return self.machine.poisoned(shape, dtype, name)

    def run(self, kernel: str, blocks: int, *arguments) -> None:
        if blocks == 0:
            return
        arguments = [
            self.give(one) if isinstance(one, np.ndarray) and one.ndim else one for one in arguments
        ]
        self.machine.launch(self.code, f"lowlat_stage_{kernel}", blocks, THREADS, arguments)
        self.machine.run()

    # Parts that several operations share.

    def expanded(self, x: np.ndarray) -> machine.Buffer:
        rows = x.reshape(-1, x.shape[-1])
        out = self.get(rows.shape, np.float32)
        self.run("expand", len(rows), out, rows, rows.shape[1])
        return out

    def quantized(self, x: np.ndarray, group: int) -> machine.Buffer:
        out = self.get(x.shape, np.float32)
        self.run("quantize", len(x), out, x, x.shape[1], group)
        return out

    def linear(self, kernel: str, x, rows: int, k: int, outputs: int, *weights) -> np.ndarray:
        """fp32 [rows, outputs]; kernel and weights of one of the stage_linear_*."""
        y = self.get((rows, outputs), np.float32)
        blocks = -(-outputs // ROWS_OF_BLOCK)
        plain = [one for one in weights if isinstance(one, np.ndarray)]
        rest = [one for one in weights if not isinstance(one, np.ndarray)]
        self.run(f"linear_{kernel}", blocks, y, x, *plain, rows, k, outputs, *rest)
        return y.read()

    def bf16_linear(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        return self.linear("bf16", self.expanded(x), len(x), x.shape[1], len(w), w)

    def fp8_linear(self, x: np.ndarray, w, scales, group: int) -> np.ndarray:
        """bf16 bits of quantised rows times block-scaled e4m3."""
        rows = self.quantized(x, group)
        y = self.linear("fp8_f32", rows, len(x), x.shape[1], len(w), w, scales, group)
        return to_bf16(y)

    def table(self, yarn: bool) -> bytes:
        return inverse_frequencies(yarn).astype("<f4").tobytes()

    # Operations.

    def hc_stats(self, a, model):
        T, _, H = a["residual"].shape
        pre, post = self.get((T, 4), np.float32), self.get((T, 4), np.float32)
        comb, memory = self.get((T, 4, 4), np.float32), self.get((T, 4 * H), np.float32)
        given = (a["residual"], a["fn"], a["base"], a["scale"])
        eps = f32(NORM_EPS[model])
        self.run("hc_stats", T, pre, post, comb, memory, *given, H, eps, f32(HC_EPS), SINKHORN)
        return {"pre": pre.read(), "post": post.read(), "comb": comb.read()}

    def hc_combine_norm(self, a, model):
        T, _, H = a["residual"].shape
        out, memory = self.get((T, H), np.uint16), self.get((T, H), np.float32)
        given = (a["residual"], a["pre"], a["gain"])
        unrounded = int(model == "v4")
        self.run("hc_combine_norm", T, out, memory, *given, H, f32(NORM_EPS[model]), unrounded)
        return {"x": out.read()}

    def hc_post(self, a, model):
        T, _, H = a["residual"].shape
        out = self.get((T, 4, H), np.uint16)
        self.run("hc_post", T, out, a["residual"], a["y"], a["post"], a["comb"], H)
        return {"residual": out.read()}

    def hc_head(self, a, model):
        T, _, H = a["residual"].shape
        out, memory = self.get((T, H), np.uint16), self.get((T, 4 * H), np.float32)
        given = (a["residual"], a["fn"], a["base"], a["scale"])
        self.run("hc_head", T, out, memory, *given, H, f32(NORM_EPS[model]), f32(HC_EPS))
        return {"h": out.read()}

    def rms_norm(self, a, model):
        T, H = a["x"].shape
        out, memory = self.get((T, H), np.uint16), self.get((T, H), np.float32)
        self.run("rms_norm", T, out, memory, a["x"], a["gain"], H, f32(NORM_EPS[model]))
        return {"y": out.read()}

    def head_norm(self, a, model):
        T, h, D = a["x"].shape
        out, memory = self.get((T, h, D), np.uint16), self.get((T * h, D), np.float32)
        self.run("rms_norm", T * h, out, memory, a["x"], 0, D, f32(NORM_EPS[model]))
        return {"x": out.read()}

    def rank_sum(self, a, model):
        R, T, H = a["partial"].shape
        out = self.get((T, H), np.uint16)
        self.run("rank_sum", T, out, a["partial"], R, T * H, H)
        return {"y": out.read()}

    def block_linear(self, a, model):
        return {"y": self.fp8_linear(a["x"], a["w"], a["w_scale"], int(a["block"]))}

    def lm_head(self, a, model):
        return {"logits": to_bf16(self.bf16_linear(a["x"], a["w"]))}

    def rope(self, a, model):
        T, h, D = a["x"].shape
        out = self.get((T, h, D), np.uint16)
        table = self.table(bool(a["yarn"]))
        self.run("rope", T * h, out, a["x"], a["pos"], table, h, D, int(a["inverse"]))
        return {"x": out.read()}

    def kv_pack(self, a, model):
        out = self.get((len(a["kv"]), 584), np.uint8)
        self.run("kv_pack", len(a["kv"]), out, a["kv"])
        return {"rows": out.read()}

    def kv_unpack(self, a, model):
        out = self.get((len(a["rows"]), 512), np.float32)
        self.run("kv_unpack", len(a["rows"]), out, a["rows"])
        return {"kv": out.read()}

    def sparse_attention(self, a, model):
        T, h, _ = a["q"].shape
        out = self.get(a["q"].shape, np.uint16)
        window = (a["swa"], a["swa_idx"], a["swa_idx"].shape[1])
        extra = (a["extra"], a["extra_idx"], a["extra_idx"].shape[1])
        self.run("attention", T * h, out, a["q"], *window, *extra, a["sink"], h)
        return {"o": out.read()}

    def compress(self, a, model):
        ratio = int(a["ratio"])
        entries = len(a["x"]) // ratio
        x = a["x"][: entries * ratio]
        out, eps = self.get((entries, 512), np.float32), f32(NORM_EPS[model])
        value = self.bf16_linear(x, a["wkv"])
        if model == "v4":
            step = np.concatenate([value, self.bf16_linear(x, a["wgate"])], axis=1)
            given = (ratio, step, a["ape"], a["norm"], self.table(True), eps)
            self.run("pooled_key", entries, out, *given)
        else:
            score = self.bf16_linear(x, a["wgate"]) if ratio == 2 else 0
            given = (value, score, a["norm"], self.table(True), ratio, eps)
            self.run("compress", entries, out, *given)
        return {"kv": out.read()}

    def index_query(self, a, model):
        T, h, _ = a["q"].shape
        queries, table = self.expanded(a["q"]), self.table(True)
        if model == "v4":
            codes, scales = self.get((T, h, 128), np.uint8), self.get((T, h), np.float32)
            self.run("index_query_fp8", T, codes, scales, queries, a["pos"], table, h)
            return {"iq": codes.read(), "qs": scales.read()}
        out = self.get((T, h, 128), np.uint16)
        self.run("index_query", T, out, queries, a["pos"], table, h)
        return {"iq": out.read()}

    def index_key(self, a, model):
        table, eps = self.table(True), f32(NORM_EPS[model])
        if model == "v4":
            entries = len(a["x"]) // 4
            x = a["x"][: 4 * entries]
            parts = [self.bf16_linear(x, a[name]) for name in ("wkv", "wgate")]
            step = np.concatenate(parts, axis=1)
            out = self.get((entries, 132), np.uint8)
            self.run("index_key_fp8", entries, out, step, a["ape"], a["norm"], table, eps)
            return {"rows": out.read()}
        keys = self.machine.array(self.bf16_linear(a["latent"], a["wk"]), "keys")
        out = self.get((len(a["latent"]), 68), np.uint8)
        self.run("index_key", len(a["latent"]), out, keys, a["norm"], a["pos"], table, eps)
        return {"rows": out.read()}

    def index_select(self, a, model):
        """Rows see different numbers of entries, so each row is a launch of its own."""
        T, h, _ = a["iq"].shape
        k, out = int(a["k"]), np.empty((T, int(a["k"])), np.int32)
        if model == "v4":
            queries = self.give(e4m3_value(a["iq"]).astype(np.float32))
        else:
            queries = self.expanded(a["iq"])
        values = queries.read().reshape(T, h, 128)
        kernel = "index_scores_fp8" if model == "v4" else "index_scores"
        for t in range(T):
            n = int(a["count"][t])
            scores, row = self.get((1, max(n, 1)), np.float32), self.get((1, k), np.int32)
            if n > 0:
                self.run(kernel, 1, scores, values[t], a["weights"][t], h, a["ik"], n)
            self.run("select", 1, row, scores, n, k)
            out[t] = row.read()[0]
        return {"idx": out}

    def candidate_blocks(self, a, model):
        T = len(a["score"])
        k, size = int(a["k"]), int(a.get("block", CANDIDATE_BLOCK))
        out = np.empty((T, k), np.int32)
        for t in range(T):
            n = int(a["count"][t])
            row, memory = self.get((1, k), np.int32), self.get((n // size + 1,), np.float32)
            self.run("candidate_blocks", 1, row, memory, a["score"][t], n, size, k)
            out[t] = row.read()[0]
        return {"blocks": out}

    def gate(self, a, model):
        T, E, k = len(a["x"]), len(a["w"]), int(a.get("k", 6))
        logits = self.bf16_linear(a["x"], a["w"])
        ids, weight = self.get((T, k), np.int32), self.get((T, k), np.float32)
        memory = self.get((T, 2 * E), np.float32)
        sum_rule = 1 if k != 6 or model == "v4" else 0
        rules = (E, k, sum_rule, int(model == "v4"), f32(ROUTED_SCALING))
        self.run("gate", T, ids, weight, memory, logits, a["bias"], *rules)
        return {"ids": ids.read(), "weight": weight.read()}

    def hash_gate(self, a, model):
        chosen = a["table"][a["token"]]
        T, k = chosen.shape
        logits = np.take_along_axis(self.bf16_linear(a["x"], a["w"]), chosen, axis=1)
        weight = self.get((T, k), np.float32)
        self.run("gate_hash", T, weight, logits, k, f32(ROUTED_SCALING), int(model == "v4"))
        return {"ids": chosen.astype(np.int32), "weight": weight.read()}

    def experts(self, a, model):
        T, H = a["x"].shape
        E, inner, slots = len(a["w1"]), a["w1"].shape[1], a["ids"].shape[1]
        group = H // a["shared_w1_scale"].shape[1]
        offsets, pairs = self.get((E + 1,), np.int32), self.get((T * slots,), np.int32)
        self.run("group_pairs", 1, offsets, pairs, a["ids"], T, slots, E)
        h, d = self.get((T * slots, inner), np.float32), self.get((T * slots, H), np.uint16)
        up = [a[name] for name in ("w1", "w1_scale", "w3", "w3_scale")]
        sizes = (slots, H, inner, f32(SWIGLU_LIMIT))
        self.run("gate_up", E, h, self.expanded(a["x"]), *up, offsets, pairs, *sizes)
        given = (a["w2"], a["w2_scale"], offsets, pairs, a["weight"], H, inner)
        self.run("down", E, d, h, *given)

        def shared(x, name):
            return self.fp8_linear(x, a[f"shared_{name}"], a[f"shared_{name}_scale"], group)

        hidden = self.get((T, inner), np.uint16)
        gate, up = shared(a["x"], "w1"), shared(a["x"], "w3")
        self.run("shared_swiglu", T, hidden, gate, up, inner, f32(SWIGLU_LIMIT))
        y = self.get((T, H), np.float32)
        self.run("expert_sum", T, y, d, shared(hidden.read(), "w2"), slots, H)
        return {"y": y.read()}

    def engram_hash(self, a, model):
        T = len(a["token"])
        out = self.get((T, 3, 8), np.int64)
        names = ("token", "history", "pos", "map", "mult", "prime")
        given = [a[name] for name in names]
        image = int(a.get("image_token", IMAGE_TOKEN))
        self.run("engram_hash", T, out, *given, image, PAD_TOKEN)
        return {"ids": out.read().reshape(T, 24)}

    def engram_lookup(self, a, model):
        T, D = len(a["ids"]), a["table"].shape[1]
        out = self.get((T, 24 * D), np.uint16)
        self.run("engram_lookup", T, out, a["ids"], a["table"], a["table_scale"], D)
        return {"e": out.read()}

    def engram_apply(self, a, model):
        T, _, H = a["residual"].shape
        kv = self.fp8_linear(a["e"], a["wkv"], a["wkv_scale"], SCALE_BLOCK[model])
        out = self.machine.array(a["residual"], "residual")
        weights = (a["q_weight"], a["k_weight"])
        self.run("engram_apply", T, out, kv, *weights, H, f32(NORM_EPS[model]))
        return {"residual": out.read()}

    def markov_draft(self, a, model):
        B, g, V = a["base"].shape
        R = a["w1"].shape[1]
        tokens, logits = np.empty((B, g), np.int64), np.empty((B, g, V), np.float32)
        previous = a["anchor"]
        for step in range(g):
            z, ids = self.get((B, V), np.float32), self.get((B,), np.int32)
            embedding = self.expanded(a["w1"][previous])
            base = np.ascontiguousarray(a["base"][:, step])
            self.run("markov_logits", 1, z, base, embedding, a["w2"], B, R, V)
            noise = np.ascontiguousarray(a["uniform"][:, step])
            self.run("draft_select", B, ids, z, a["temp"], noise, V)
            logits[:, step], tokens[:, step] = z.read(), ids.read()
            previous = tokens[:, step]
        return {"tokens": tokens, "logits": logits}

    def accept(self, a, model):
        B, g, V = a["draft_logits"].shape
        accepted, following = self.get((B,), np.int32), self.get((B,), np.int32)
        memory = self.get((B, 2 * V + -(-V // 1024)), np.float32)
        given = (a["draft"].astype(np.int32), a["target_logits"], a["draft_logits"])
        given += (a["temp"], a["coins"])
        self.run("accept", B, accepted, following, memory, *given, g, V)
        return {
            "accepted": accepted.read().astype(np.int64),
            "next": following.read().astype(np.int64),
        }

"""DeepSeek-V4-Flash: own mixing, normed heads, hash layers, entries of 4 and of 128 tokens."""

import numpy as np

from oracle.compress import compress_v4
from oracle.formats import bf, bf16_bits, bf16_value, e4m3_value
from oracle.index import index_key_v4, index_query_v4, key_values
from oracle.mix import hc_head, norm
from oracle.model import Model, Selection, choose, reachable, stored
from oracle.moe import hash_gate

SELECTED_RATIO = 4  # entries of the other, 128, are all attended to


class ModelV4(Model):
    name = "v4"
    markov_names = ("markov_w1", "markov_w2")
    lagged_pre = False
    features_after = True

    def head_queries(self, q):
        """Each head normed by itself, and rounded before it is rotated."""
        return bf(norm(q, 1.0, self.eps))

    def target_group_outputs(self, o, prefix):
        """The target quantises the input of wo_a; the draft does not."""
        lora = self.config["o_lora"]
        rows = [slice(g * lora, (g + 1) * lora) for g in range(self.config["o_groups"])]
        return np.stack(
            [self.fp8(o[:, g], prefix + "attn.wo_a", rows=part) for g, part in enumerate(rows)], 1
        )

    def compressor(self, x, prefix):
        names = ("wkv.weight", "wgate.weight", "ape", "norm.weight")
        arrays = {name.split(".")[0]: self.weights[prefix + name] for name in names}
        return {"x": bf16_bits(x), **arrays}

    def compress(self, x, layer, ratio, trace):
        """The indexer's compressor reads the same rows as the layer's own."""
        prefix = f"layers.{layer}.attn."
        arrays = self.compressor(x, prefix + "compressor.") | {"ratio": ratio}
        trace.extra[layer] = stored(compress_v4(arrays)["kv"])
        if ratio == SELECTED_RATIO:
            arrays = self.compressor(x, prefix + "indexer.compressor.")
            trace.index[layer] = key_values(index_key_v4(arrays)["rows"])

    def select(self, x, ql, layer, pos, trace):
        prefix = f"layers.{layer}.attn.indexer."
        heads = self.config["index_heads"]
        q = bf(self.fp8(ql, prefix + "wq_b")).reshape(len(x), heads, 128)
        query = index_query_v4({"q": bf16_bits(q), "pos": pos})
        w = x @ self.bf16(prefix + "weights_proj.weight").T * 128.0**-0.5 * heads**-0.5
        w = w * query["qs"].astype(np.float64)
        dots = np.einsum("thd,nd->thn", e4m3_value(query["iq"]), trace.index[layer], optimize=True)
        score = np.einsum("th,thn->tn", w, np.maximum(dots, 0.0))
        score = reachable(score, pos, self.config["layers"][layer]["ratio"])
        trace.entries[layer] = choose(score, self.config["index_topk"])

    def route_target(self, x, tokens, layer):
        prefix = f"layers.{layer}."
        if not self.config["layers"][layer]["hash_gate"]:
            bias = np.tile(self.f64(prefix + "ffn.gate.bias"), (len(x), 1))
            num_picks = self.config["experts_per_token"]
            return self.route(x, prefix, num_picks, bias, floor_sum=False)
        out = hash_gate(
            {
                "token": tokens,
                "table": self.weights[prefix + "ffn.gate.tid2eid"],
                "x": bf16_bits(x),
                "w": self.weights[prefix + "ffn.gate.weight"],
            }
        )
        # No score had a part in the choice.
        selection = Selection(list(out["ids"]), np.full(len(x), np.inf))
        return out["ids"], out["weight"].astype(np.float64), selection

    def collapse(self, residual, pre, prefix):
        """By weights of its own, not by any sublayer's."""
        arrays = {p: self.weights[f"{prefix}hc_head_{p}"] for p in ("fn", "base", "scale")}
        return bf16_value(hc_head({"residual": bf16_bits(residual), **arrays})["h"])

"""DeepSeek-V4.1-Flash: lagged mixing, Engram, FP4 entries that layers share, candidate blocks."""

import numpy as np

from oracle.compress import latents
from oracle.engram import engram_apply, engram_hash, engram_lookup
from oracle.formats import bf, bf16_bits, bf16_value, fp4_round_trip_e4m3, ue8m0_value
from oracle.index import index_key, index_query, key_values
from oracle.model import Model, choose, reachable, stored
from oracle.rope_kv import NOPE_DIM, rotate


class ModelV41(Model):
    name = "v41"
    markov_names = ("embed", "head")
    lagged_pre = True
    features_after = False

    def compress(self, x, layer, ratio, trace):
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
        return reachable(score, pos, plan["ratio"])

    def select(self, x, ql, layer, pos, trace):
        """Publishes the candidate blocks too."""
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

    def before_layer(self, residual, tokens, layer):
        if self.config["layers"][layer]["engram"] < 0:
            return residual
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

    def route_target(self, x, tokens, layer):
        gate = f"layers.{layer}.ffn.gate."
        image = (tokens == self.config["image_token"])[:, None]
        bias = np.where(image, self.f64(gate + "bias_vl"), self.f64(gate + "bias"))
        return self.route(
            x, f"layers.{layer}.", self.config["experts_per_token"], bias, floor_sum=True
        )

    def collapse(self, residual, pre, prefix):
        """By the pre of the last sublayer, the experts'."""
        return bf(np.einsum("tk,tkh->th", pre.astype(np.float64), residual))

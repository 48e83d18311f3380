"""An independent oracle: every operation of ``lowlat op`` in numpy float64.

Written from the model's formulas alone. It shares nothing with the C++ ``reference`` platform, so
that the two check each other; ``scalar`` is held to it by the bounds that ``scalar`` declares.

Each function takes and returns arrays by name in the conventions of ``lowlat op``: bf16 as uint16
bits; e4m3, ue8m0 and packed fp4 as uint8. ``OPS[model][name](inputs)`` gives the outputs.
"""

from functools import partial

from oracle import attention, compress, draft, engram, index, linear, mix, moe, rope_kv

# The same in both models.
SHARED = {
    "hc_post": mix.hc_post,
    "rank_sum": mix.rank_sum,
    "block_linear": linear.block_linear,
    "lm_head": linear.lm_head,
    "rope": rope_kv.rope,
    "kv_pack": rope_kv.kv_pack,
    "kv_unpack": rope_kv.kv_unpack,
    "sparse_attention": attention.sparse_attention,
    "index_select": index.index_select,
    "experts": moe.experts,
    "markov_draft": draft.markov_draft,
    "accept": draft.accept,
}

OPS = {
    "v41": SHARED
    | {
        "hc_stats": mix.hc_stats,
        "hc_combine_norm": mix.hc_combine_norm,
        "rms_norm": mix.rms_norm,
        "compress": compress.compress,
        "index_query": index.index_query,
        "index_key": index.index_key,
        "candidate_blocks": index.candidate_blocks,
        "gate": moe.gate,
        "engram_hash": engram.engram_hash,
        "engram_lookup": engram.engram_lookup,
        "engram_apply": engram.engram_apply,
    },
    "v4": SHARED
    | {
        "hc_stats": partial(mix.hc_stats, model="v4"),
        "hc_combine_norm": partial(mix.hc_combine_norm, model="v4"),
        "hc_head": mix.hc_head,
        "rms_norm": partial(mix.rms_norm, model="v4"),
        "head_norm": mix.head_norm,
        "compress": compress.compress_v4,
        "index_query": index.index_query_v4,
        "index_key": index.index_key_v4,
        "gate": partial(moe.gate, model="v4"),
        "hash_gate": moe.hash_gate,
    },
}
MODELS = tuple(OPS)

__all__ = ["MODELS", "OPS"]

"""An independent oracle: every operation of ``lowlat op`` in numpy float64.

Written from the model's formulas alone. It shares nothing with the C++ ``reference`` platform, so
that the two check each other; ``scalar`` is held to it by the bounds that ``scalar`` declares.

Each function takes and returns arrays by name in the conventions of ``lowlat op``: bf16 as uint16
bits; e4m3, ue8m0 and packed fp4 as uint8. ``OPS[name](inputs)`` gives the outputs.
"""

from oracle import attention, draft, engram, index, linear, mix, moe, rope_kv

OPS = {
    "hc_stats": mix.hc_stats,
    "hc_combine_norm": mix.hc_combine_norm,
    "hc_post": mix.hc_post,
    "rms_norm": mix.rms_norm,
    "rank_sum": mix.rank_sum,
    "block_linear": linear.block_linear,
    "lm_head": linear.lm_head,
    "rope": rope_kv.rope,
    "kv_pack": rope_kv.kv_pack,
    "kv_unpack": rope_kv.kv_unpack,
    "sparse_attention": attention.sparse_attention,
    "compress": attention.compress,
    "index_query": index.index_query,
    "index_key": index.index_key,
    "index_select": index.index_select,
    "candidate_blocks": index.candidate_blocks,
    "gate": moe.gate,
    "experts": moe.experts,
    "engram_hash": engram.engram_hash,
    "engram_lookup": engram.engram_lookup,
    "engram_apply": engram.engram_apply,
    "markov_draft": draft.markov_draft,
    "accept": draft.accept,
}

__all__ = ["OPS"]

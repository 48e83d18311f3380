"""Sparse attention with a sink."""

import numpy as np

from oracle.formats import bf16_bits, bf16_value
from oracle.rope_kv import unpack

SOFTMAX_SCALE = 512.0**-0.5


def sparse_attention(a):
    q = bf16_value(a["q"])
    swa, extra = unpack(a["swa"]), unpack(a["extra"])
    out = np.zeros(q.shape)
    for t in range(q.shape[0]):
        swa_idx, extra_idx = a["swa_idx"][t], a["extra_idx"][t]
        keys = np.concatenate([swa[swa_idx[swa_idx >= 0]], extra[extra_idx[extra_idx >= 0]]])
        if len(keys) == 0:
            continue
        for h in range(q.shape[1]):
            score = SOFTMAX_SCALE * (keys @ q[t, h])
            sink = np.float64(a["sink"][h])
            shift = max(score.max(), sink)
            p = np.exp(score - shift)
            out[t, h] = p @ keys / (p.sum() + np.exp(sink - shift))
    return {"o": bf16_bits(out)}

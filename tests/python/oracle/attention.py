"""Sparse attention with a sink, and the compressor of the keys."""

import numpy as np

from oracle.formats import bf, bf16_bits, bf16_value, f32, fp4_round_trip_e4m3
from oracle.mix import norm
from oracle.rope_kv import NOPE_DIM, rotate, unpack

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


def latents(x, wkv, wgate, gain, ratio):
    """Pooled and normed latents before rotation, bf16 values: float64 [floor(L/ratio),512]."""
    kv = x @ wkv.T
    if ratio == 2:
        num_pairs = len(x) // 2
        kv = kv[: 2 * num_pairs].reshape(num_pairs, 2, 512)
        score = (x @ wgate.T)[: 2 * num_pairs].reshape(num_pairs, 2, 512)
        weight = np.exp(score - score.max(1, keepdims=True))
        kv = (kv * weight).sum(1) / weight.sum(1)
    # Rounded before the statistic.
    return bf(norm(bf(kv), gain))


def compress(a):
    ratio = int(a["ratio"])
    wgate = bf16_value(a["wgate"]) if ratio == 2 else None
    z = latents(bf16_value(a["x"]), bf16_value(a["wkv"]), wgate, bf16_value(a["norm"]), ratio)
    pos = np.arange(len(z)) * ratio
    z[:, NOPE_DIM:] = bf(rotate(z[:, NOPE_DIM:], pos, yarn=True))
    return {"kv": f32(fp4_round_trip_e4m3(z))}

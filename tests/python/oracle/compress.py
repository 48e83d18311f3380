"""The compressors: how the tokens of a block become one key."""

import numpy as np

from oracle.formats import bf, bf16_value, f32, fp4_round_trip_e4m3
from oracle.mix import NORM_EPS, norm
from oracle.rope_kv import ROPE_DIM, rotate

# Stands for the score of a token before the first.
NO_SCORE = -float(np.finfo(np.float32).max)
OVERLAPPING_RATIO = 4


def softmax_pool(kv, score):
    """Channel by channel over the candidates (axis 1) of each block."""
    weight = np.exp(score - score.max(1, keepdims=True))
    return (kv * weight).sum(1) / weight.sum(1)


def blocks(values, ratio):
    """[L,W] to whole blocks [n, ratio, W]."""
    n = len(values) // ratio
    return values[: n * ratio].reshape(n, ratio, values.shape[1])


# ------------------------------------------------------------------ V4


def pooled_v4(x, wkv, wgate, ape, ratio):
    """Pooled latents of V4, nothing rounded: float64 [floor(L/ratio), D].

    At ratio 4 the rows of the projections are two halves: what a token gives to the next block (its
    overlap) and what it gives to its own. A block pools the overlaps of the four tokens before it,
    then its own four.
    """
    kv, score = blocks(x @ wkv.T, ratio), blocks(x @ wgate.T, ratio) + ape
    if ratio == OVERLAPPING_RATIO:
        width = wkv.shape[0] // 2
        before_kv, before_score = np.roll(kv, 1, 0), np.roll(score, 1, 0)
        before_kv[:1], before_score[:1] = 0.0, NO_SCORE
        kv = np.concatenate([before_kv[..., :width], kv[..., width:]], 1)
        score = np.concatenate([before_score[..., :width], score[..., width:]], 1)
    return softmax_pool(kv, score)


def finished_v4(pooled, gain, ratio):
    """Normed and rotated at the first token of each block, nothing rounded."""
    z = norm(pooled, gain, NORM_EPS["v4"])
    pos = np.arange(len(z)) * ratio
    z[:, -ROPE_DIM:] = rotate(z[:, -ROPE_DIM:], pos, yarn=True)
    return z


def compress_v4(a):
    ratio = int(a["ratio"])
    x, wkv, wgate = (bf16_value(a[name]) for name in ("x", "wkv", "wgate"))
    pooled = pooled_v4(x, wkv, wgate, a["ape"].astype(np.float64), ratio)
    return {"kv": f32(bf(finished_v4(pooled, bf16_value(a["norm"]), ratio)))}


# ------------------------------------------------------------------ V4.1


def latents(x, wkv, wgate, gain, ratio):
    """Pooled and normed latents before rotation, bf16 values: float64 [floor(L/ratio),512]."""
    kv = x @ wkv.T
    if ratio == 2:
        kv = softmax_pool(blocks(kv, 2), blocks(x @ wgate.T, 2))
    # Rounded before the statistic.
    return bf(norm(bf(kv), gain))


def compress(a):
    ratio = int(a["ratio"])
    wgate = bf16_value(a["wgate"]) if ratio == 2 else None
    z = latents(bf16_value(a["x"]), bf16_value(a["wkv"]), wgate, bf16_value(a["norm"]), ratio)
    pos = np.arange(len(z)) * ratio
    z[:, -ROPE_DIM:] = bf(rotate(z[:, -ROPE_DIM:], pos, yarn=True))
    return {"kv": f32(fp4_round_trip_e4m3(z))}

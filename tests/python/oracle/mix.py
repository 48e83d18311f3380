"""Hyper-connections, norms and the sum over ranks."""

import numpy as np

from oracle.formats import bf, bf16_bits, bf16_value, f32

NORM_EPS = {"v4": 1e-6, "v41": 1e-20}
HC_EPS = 1e-6
SINKHORN_ITERS = 20


def sigmoid(x):
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-np.asarray(x, np.float64)))


def sinkhorn(logits):
    """[..., 4, 4] logits, input stream then output stream, to the mixing matrix."""
    c = np.exp(logits - logits.max(-1, keepdims=True))
    c = c / c.sum(-1, keepdims=True) + HC_EPS
    c = c / (c.sum(-2, keepdims=True) + HC_EPS)
    for _ in range(SINKHORN_ITERS - 1):
        c = c / (c.sum(-1, keepdims=True) + HC_EPS)
        c = c / (c.sum(-2, keepdims=True) + HC_EPS)
    return c


def rms(x, eps):
    return np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)


def mixed(a, eps):
    """fn . x / rms(x) of the flattened streams, float64 [T, rows of fn]."""
    x = bf16_value(a["residual"]).reshape(a["residual"].shape[0], -1)
    return x @ a["fn"].astype(np.float64).T / rms(x, eps)


def hc_stats(a, model="v41"):
    num_rows = a["residual"].shape[0]
    base = a["base"].astype(np.float64)
    scale = a["scale"].astype(np.float64)
    m = mixed(a, NORM_EPS[model])
    logits = (m[:, 8:] * scale[2] + base[8:]).reshape(num_rows, 4, 4)
    return {
        "pre": f32(sigmoid(m[:, :4] * scale[0] + base[:4]) + HC_EPS),
        "post": f32(2.0 * sigmoid(m[:, 4:8] * scale[1] + base[4:8])),
        "comb": f32(sinkhorn(logits)),
    }


def hc_head(a):
    """V4's collapse of the four streams: weights of its own, and no norm."""
    scale, base = a["scale"].astype(np.float64).reshape(()), a["base"].astype(np.float64)
    pre = sigmoid(mixed(a, NORM_EPS["v4"]) * scale + base) + HC_EPS
    return {"h": bf16_bits(np.einsum("tk,tkh->th", pre, bf16_value(a["residual"])))}


def norm(x, gain, eps=NORM_EPS["v41"]):
    return x / rms(x, eps) * gain


def hc_combine_norm(a, model="v41"):
    exact = np.einsum("tk,tkh->th", a["pre"].astype(np.float64), bf16_value(a["residual"]))
    # V4.1 takes the statistic of the rounded combination, V4 of the exact one; both scale the
    # rounded one.
    statistic = bf(exact) if model == "v41" else exact
    normed = bf(exact) / rms(statistic, NORM_EPS[model])
    return {"x": bf16_bits(normed * bf16_value(a["gain"]))}


def hc_post(a):
    residual = bf16_value(a["residual"])
    mixed = np.einsum("tjk,tjh->tkh", a["comb"].astype(np.float64), residual)
    added = a["post"].astype(np.float64)[:, :, None] * bf16_value(a["y"])[:, None, :]
    return {"residual": bf16_bits(mixed + added)}


def rms_norm(a, model="v41"):
    return {"y": bf16_bits(norm(bf16_value(a["x"]), bf16_value(a["gain"]), NORM_EPS[model]))}


def head_norm(a):
    """V4: each head of each row by itself, no weight."""
    return {"x": bf16_bits(norm(bf16_value(a["x"]), 1.0, NORM_EPS["v4"]))}


def rank_sum(a):
    # The one place where fp32 is the meaning: summed in rank order in fp32.
    total = a["partial"][0]
    for partial in a["partial"][1:]:
        total = total + partial
    return {"y": bf16_bits(total)}

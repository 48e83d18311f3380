"""Hyper-connections, norms and the sum over ranks."""

import numpy as np

from oracle.formats import bf, bf16_bits, bf16_value, f32

NORM_EPS = 1e-20
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


def hc_stats(a):
    num_rows = a["residual"].shape[0]
    x = bf16_value(a["residual"]).reshape(num_rows, -1)
    base = a["base"].astype(np.float64)
    scale = a["scale"].astype(np.float64)
    m = x @ a["fn"].astype(np.float64).T
    m = m / np.sqrt(np.mean(x * x, -1, keepdims=True) + NORM_EPS)
    logits = (m[:, 8:] * scale[2] + base[8:]).reshape(num_rows, 4, 4)
    return {
        "pre": f32(sigmoid(m[:, :4] * scale[0] + base[:4]) + HC_EPS),
        "post": f32(2.0 * sigmoid(m[:, 4:8] * scale[1] + base[4:8])),
        "comb": f32(sinkhorn(logits)),
    }


def norm(x, gain):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + NORM_EPS) * gain


def hc_combine_norm(a):
    # V4.1: the combination is rounded before its statistic is taken.
    combined = bf(np.einsum("tk,tkh->th", a["pre"].astype(np.float64), bf16_value(a["residual"])))
    return {"x": bf16_bits(norm(combined, bf16_value(a["gain"])))}


def hc_post(a):
    residual = bf16_value(a["residual"])
    mixed = np.einsum("tjk,tjh->tkh", a["comb"].astype(np.float64), residual)
    added = a["post"].astype(np.float64)[:, :, None] * bf16_value(a["y"])[:, None, :]
    return {"residual": bf16_bits(mixed + added)}


def rms_norm(a):
    return {"y": bf16_bits(norm(bf16_value(a["x"]), bf16_value(a["gain"])))}


def rank_sum(a):
    # The one place where fp32 is the meaning: summed in rank order in fp32.
    total = a["partial"][0]
    for partial in a["partial"][1:]:
        total = total + partial
    return {"y": bf16_bits(total)}

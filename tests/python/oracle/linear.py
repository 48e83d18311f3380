"""Products with weights."""

import numpy as np

from oracle.formats import bf16_bits, bf16_value, e4m3_value, quantise_e4m3

ACTIVATION_FLOOR = 1e-10


def fp8_linear(x, w, w_scale, block):
    """x [T,K] float64 (bf16 values), quantised per row and group; w e4m3 [N,K]; float64 [T,N]."""
    codes, exponent = quantise_e4m3(x, block, ACTIVATION_FLOOR)
    activation = np.ldexp(codes, exponent[..., None]).reshape(x.shape)
    scale = np.repeat(np.repeat(w_scale.astype(np.float64), block, 0), block, 1)
    return activation @ (e4m3_value(w) * scale).T


def block_linear(a):
    y = fp8_linear(bf16_value(a["x"]), a["w"], a["w_scale"], int(a["block"]))
    return {"y": bf16_bits(y)}


def lm_head(a):
    return {"logits": bf16_bits(bf16_value(a["x"]) @ bf16_value(a["w"]).T)}

"""Rotation and the 584-byte rows of the KV cache."""

import numpy as np

from oracle.formats import (
    bf16_bits,
    bf16_value,
    e4m3_bits,
    e4m3_value,
    f32,
    quantise_e4m3,
    ue8m0_value,
)

ROPE_DIM = 64
NOPE_DIM = 448
KV_GROUP = 64
KV_FLOOR = 1e-4
THETA = 10000.0
COMPRESS_THETA = 160000.0
YARN_FACTOR, YARN_LOW, YARN_HIGH = 16.0, 15.0, 25.0


def inverse_frequencies(yarn):
    """fp32 [32]: the table is built in fp32, and at a position of a million that shows."""
    i = np.arange(ROPE_DIM // 2)
    power = f32((COMPRESS_THETA if yarn else THETA) ** (2.0 * i / ROPE_DIM))
    frequency = np.float32(1.0) / power
    if not yarn:
        return frequency
    ramp = (i.astype(np.float32) - np.float32(YARN_LOW)) / np.float32(YARN_HIGH - YARN_LOW)
    ramp = np.clip(ramp, np.float32(0.0), np.float32(1.0))
    interpolated = frequency / np.float32(YARN_FACTOR) * ramp
    return interpolated + frequency * (np.float32(1.0) - ramp)


def rotate(x, pos, yarn, inverse=False):
    """[T, ..., 64] float64, pos [T]: interleaved pairs; angle, cos and sin in fp32."""
    angle = np.asarray(pos).astype(np.float32)[:, None] * inverse_frequencies(yarn)[None, :]
    cos = f32(np.cos(angle.astype(np.float64))).astype(np.float64)
    sin = f32(np.sin(angle.astype(np.float64))).astype(np.float64)
    if inverse:
        sin = -sin
    shape = (len(angle),) + (1,) * (x.ndim - 2) + (ROPE_DIM // 2,)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty(x.shape)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


def rope(a):
    out = a["x"].copy()
    yarn, inverse = (bool(a[name]) for name in ("yarn", "inverse"))
    tail = bf16_value(a["x"])[..., -ROPE_DIM:]
    out[..., -ROPE_DIM:] = bf16_bits(rotate(tail, a["pos"], yarn, inverse))
    return {"x": out}


def kv_pack(a):
    kv = a["kv"].astype(np.float64)
    num_rows = len(kv)
    codes, exponent = quantise_e4m3(kv[:, :NOPE_DIM], KV_GROUP, np.float64(np.float32(KV_FLOOR)))
    rows = np.zeros((num_rows, 584), np.uint8)
    rows[:, :NOPE_DIM] = e4m3_bits(codes).reshape(num_rows, NOPE_DIM)
    rows[:, NOPE_DIM:576] = bf16_bits(kv[:, NOPE_DIM:]).astype("<u2").view(np.uint8)
    rows[:, 576:583] = exponent + 127
    return {"rows": rows}


def unpack(rows):
    """u8 [S,584] to float64 [S,512]."""
    rows = np.ascontiguousarray(rows)
    scale = np.repeat(ue8m0_value(rows[:, 576:583]), KV_GROUP, axis=1)
    nope = e4m3_value(rows[:, :NOPE_DIM]) * scale
    tail = np.ascontiguousarray(rows[:, NOPE_DIM:576]).view("<u2")
    return np.concatenate([nope, bf16_value(tail)], axis=1)


def kv_unpack(a):
    return {"kv": f32(unpack(a["rows"]))}

"""Number formats, rounded once from float64: casts of ml_dtypes round to float32 first."""

import ml_dtypes
import numpy as np

E4M3_MAX = 448.0
E2M1_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def round_float(x, bits, min_exponent):
    """Nearest value (ties to even) with `bits` significant bits, subnormal below 2^min_exponent."""
    x = np.asarray(x, np.float64)
    _, exponent = np.frexp(x)
    quantum = np.maximum(exponent - 1, min_exponent) - (bits - 1)
    with np.errstate(invalid="ignore"):
        rounded = np.ldexp(np.rint(np.ldexp(x, -quantum)), quantum)
    return np.where(np.isfinite(x), rounded, x)


def f32(x):
    """float64 to float32, one rounding."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float64).astype(np.float32)


def bf(x):
    """Rounded to bf16, as float64. Past the largest finite value: infinity."""
    y = round_float(x, 8, -126)
    return np.where(
        np.abs(y) > float(ml_dtypes.finfo(ml_dtypes.bfloat16).max), np.copysign(np.inf, y), y
    )


def bf16_bits(x):
    """Rounded to bf16, as uint16 bits."""
    return (f32(bf(x)).view(np.uint32) >> 16).astype(np.uint16)


def bf16_value(bits):
    return np.ascontiguousarray(bits, np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)


def e4m3(x):
    """Clamped to +-448 and rounded to e4m3, as float64."""
    return round_float(np.clip(np.asarray(x, np.float64), -E4M3_MAX, E4M3_MAX), 4, -6)


def e4m3_bits(x):
    return f32(e4m3(x)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def e4m3_value(bits):
    return np.ascontiguousarray(bits, np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def e2m1(x):
    """Clamped to +-6 and rounded to e2m1 (ties to the even code), -0 cleared, as float64."""
    return round_float(np.clip(np.asarray(x, np.float64), -6.0, 6.0), 2, 0) + 0.0


def e2m1_code(x):
    """Four-bit codes of e2m1(x), one a uint8."""
    value = e2m1(x)
    code = np.searchsorted(E2M1_VALUES, np.abs(value)).astype(np.uint8)
    return code | np.where(value < 0, 8, 0).astype(np.uint8)


def fp4_pack(codes):
    """[..., n] codes to [..., n/2] bytes, the even index in the low nibble."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def fp4_value(packed):
    """[..., n/2] bytes to [..., n] values."""
    packed = np.asarray(packed, np.uint8)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return np.where(codes & 8, -1.0, 1.0) * E2M1_VALUES[codes & 7]


def ue8m0_value(byte):
    return np.ldexp(1.0, np.asarray(byte, np.int64) - 127)


def ceil_power_of_two(x):
    """Exponent of the smallest power of two that is not below x > 0."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.where(mantissa == 0.5, exponent - 1, exponent).astype(np.int64)


def quantise_e4m3(x, group, floor):
    """Groups of `group` along the last axis: (codes as float64, exponents of their scales)."""
    grouped = np.asarray(x, np.float64).reshape(*x.shape[:-1], x.shape[-1] // group, group)
    amax = np.maximum(np.abs(grouped).max(-1), floor)
    exponent = ceil_power_of_two(f32(amax / E4M3_MAX))
    return e4m3(np.ldexp(grouped, -exponent[..., None])), exponent


def quantise_e4m3_f32(x, floor):
    """The whole last axis under one fp32 scale of amax/448: (codes as uint8, scales as float32)."""
    amax = np.maximum(np.abs(x).max(-1), np.float64(np.float32(floor)))
    scale = f32(amax / E4M3_MAX)
    return e4m3_bits(x / scale.astype(np.float64)[..., None]), scale


def fp4_round_trip_ue8m0(x, floor):
    """FP4 per 32 along the last axis with ue8m0 scales: (values, codes, scale bytes)."""
    grouped = np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, 32)
    amax = np.maximum(np.abs(grouped).max(-1), floor)
    exponent = ceil_power_of_two(f32(amax / 6.0))
    scaled = np.ldexp(grouped, -exponent[..., None])
    values = np.ldexp(e2m1(scaled), exponent[..., None]).reshape(x.shape)
    return values, e2m1_code(scaled).reshape(x.shape), (exponent + 127).astype(np.uint8)


def fp4_round_trip_e4m3(x):
    """FP4 per 16 along the last axis with e4m3 scales of amax/6."""
    grouped = np.asarray(x, np.float64).reshape(*x.shape[:-1], x.shape[-1] // 16, 16)
    amax = np.abs(grouped).max(-1, keepdims=True)
    scale = e4m3(np.clip(amax / 6.0, 2.0**-9, E4M3_MAX))
    return (scale * e2m1(grouped / scale)).reshape(x.shape)

"""Instructions one by one: assembled by LLVM, decoded by tinygrad, run by our engine, and compared
with numpy and ml_dtypes.

Every case is a body that reads columns a .. h (v8 .. v15) of 64 lanes and writes v16 .. v23.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from support import amd_machine as amd

LANES = 64
LDS_BYTES, PRIVATE_BYTES = 16384, 64
LIMIT = 100_000  # instructions of a case, with room
FIRST_IN, FIRST_OUT, COLUMNS = 8, 16, 8
FRAME = """
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  v_lshlrev_b32 v1, 5, v0
  s_waitcnt lgkmcnt(0)
  global_load_dwordx4 v[8:11], v1, s[4:5]
  global_load_dwordx4 v[12:15], v1, s[4:5] offset:16
  v_mov_b32 v16, 0
  v_mov_b32 v17, 0
  v_mov_b32 v18, 0
  v_mov_b32 v19, 0
  v_mov_b32 v20, 0
  v_mov_b32 v21, 0
  v_mov_b32 v22, 0
  v_mov_b32 v23, 0
  s_waitcnt vmcnt(0)
{body}
  global_store_dwordx4 v1, v[16:19], s[6:7]
  global_store_dwordx4 v1, v[20:23], s[6:7] offset:16
"""
U32, I32, F32, U64, I64 = np.uint32, np.int32, np.float32, np.uint64, np.int64
FLOATS = np.array(
    [
        *(0.0, -0.0, 1.0, -1.0, 0.5, 3.0, -7.25, 1e-30, 1e30, 1e-40, -1e-42, 65504.0, 65536.0),
        *(448.0, 464.0, 480.0, 57344.0, 240.0, np.inf, -np.inf, np.nan, 1.17549435e-38),
    ],
    F32,
)


def bits(values) -> np.ndarray:
    return np.ascontiguousarray(values).view(U32)


def pair(values) -> tuple[np.ndarray, np.ndarray]:
    """Low and high words of 64-bit values."""
    wide = np.ascontiguousarray(values).view(U64)
    return (wide & U64(0xFFFFFFFF)).astype(U32), (wide >> U64(32)).astype(U32)


def wide(low, high) -> np.ndarray:
    return low.astype(U64) | high.astype(U64) << U64(32)


def halves(word, dtype):
    """The two 16-bit values of a word."""
    low = (word & U32(0xFFFF)).astype(np.uint16).view(dtype)
    return low, (word >> U32(16)).astype(np.uint16).view(dtype)


def packed(low, high) -> np.ndarray:
    low, high = (np.ascontiguousarray(one).view(np.uint16).astype(U32) for one in (low, high))
    return low | high << U32(16)


def byte(word, which):
    return ((word >> U32(8 * which)) & U32(0xFF)).astype(np.uint8)


def fp8(isa):
    return ml_dtypes.float8_e4m3fn if isa == "gfx950" else ml_dtypes.float8_e4m3fnuz


def bf8(isa):
    return ml_dtypes.float8_e5m2 if isa == "gfx950" else ml_dtypes.float8_e5m2fnuz


def f64_of(*words):
    return wide(*words).view(np.float64)


@dataclass(frozen=True)
class Case:
    body: str
    want: object  # of columns and the part: a list of output columns, from v16 on
    kind: str = "bits"  # of the inputs: bits, floats, halves, bf16, small
    isas: tuple = amd.ISAS
    nan_equal: str = ""  # "f32", "f16", "f64": NaNs of any payload are equal; "zero": zeros too
    tolerance: float = 0.0  # relative, of f32 outputs


def case(body, want, **options):
    return Case("\n".join(f"  {line.strip()}" for line in body.split(";")), want, **options)


def f(x):
    return x.view(F32)


def i(x):
    return x.view(I32)


def float_case(op, want, equal="f32"):
    return case(
        op, lambda c, _: [bits(want(*map(f, c[:3])).astype(F32))], kind="floats", nan_equal=equal
    )


def f64_case(op, want):
    def result(c, _):
        return list(pair(want(f64_of(c[0], c[1]), f64_of(c[2], c[3]), f64_of(c[4], c[5]))))

    return case(op, result, kind="doubles", nan_equal="f64")


def half_case(op, want):
    def result(c, _):
        a, b, d = (halves(x, np.float16)[0].astype(np.float64) for x in c[:3])
        return [packed(want(a, b, d).astype(np.float16), np.zeros(LANES, np.uint16))]

    return case(op, result, kind="halves", nan_equal="f16")


def packed_case(op, want):
    def result(c, _):
        out = [
            want(*(halves(x, np.float16)[k].astype(np.float64) for x in c[:3])).astype(np.float16)
            for k in (0, 1)
        ]
        return [packed(*out)]

    return case(op, result, kind="halves", nan_equal="f16")


def exec_lanes(c):
    return np.arange(LANES) % 3 == 0


def fma32(a, b, c):
    """Rounded once, for inputs whose product fits double exactly."""
    return np.array([float_of_fraction(x, y, z) for x, y, z in zip(a, b, c, strict=True)], F32)


def float_of_fraction(a, b, c):
    if not np.isfinite([a, b, c]).all():
        with np.errstate(all="ignore"):
            return np.float64(a) * np.float64(b) + np.float64(c)
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if exact == 0:
        return np.float64(a) * np.float64(b) + np.float64(c)
    return nearest_float(exact)


def nearest_float(exact):
    """The float32 nearest to a fraction, ties to even."""
    sign, exact = (-1.0, -exact) if exact < 0 else (1.0, exact)
    exponent = 0
    while exact >= 2 ** (exponent + 1):
        exponent += 1
    while exact < 2**exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    units = exact / unit
    floor = units.numerator // units.denominator
    rest = units - floor
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and floor % 2):
        floor += 1
    value = floor * unit
    return sign * (float(value) if value < 2**128 else np.inf)


def bfe(value, first, width):
    return (value >> first) & ((U32(1) << width) - U32(1))


def dpp(c, source):
    """Lanes of a moved by a map; -1 keeps the old value (0)."""
    return [np.array([c[0][s] if s >= 0 else 0 for s in source], U32)]


def row(lane):
    return lane & ~15


LANE = np.arange(LANES)
CASES = [
    # Integers.
    case("v_add_u32 v16, v8, v9", lambda c, _: [c[0] + c[1]]),
    case("v_sub_u32 v16, v8, v9", lambda c, _: [c[0] - c[1]]),
    case("v_subrev_u32 v16, v8, v9", lambda c, _: [c[1] - c[0]]),
    case(
        "v_sub_u32 v16, v8, v9 clamp",
        lambda c, _: [np.where(c[0] > c[1], c[0] - c[1], 0).astype(U32)],
    ),
    case(
        "v_add_co_u32 v16, vcc, v8, v9; v_addc_co_u32 v17, vcc, v10, v11, vcc",
        lambda c, _: pair(wide(c[0], c[2]) + wide(c[1], c[3])),
    ),
    case(
        "v_sub_co_u32 v16, s[20:21], v8, v9; v_subb_co_u32 v17, s[20:21], v10, v11, s[20:21]",
        lambda c, _: pair(wide(c[0], c[2]) - wide(c[1], c[3])),
    ),
    case(
        "v_mad_u64_u32 v[16:17], s[20:21], v8, v9, v[10:11]",
        lambda c, _: pair(c[0].astype(U64) * c[1].astype(U64) + wide(c[2], c[3])),
    ),
    case(
        "v_mad_i64_i32 v[16:17], s[20:21], v8, v9, v[10:11]",
        lambda c, _: pair(i(c[0]).astype(I64) * i(c[1]).astype(I64) + wide(c[2], c[3]).view(I64)),
    ),
    case("v_mul_lo_u32 v16, v8, v9", lambda c, _: [c[0] * c[1]]),
    case(
        "v_mul_hi_u32 v16, v8, v9; v_mul_hi_i32 v17, v8, v9",
        lambda c, _: [
            pair(c[0].astype(U64) * c[1])[1],
            pair(i(c[0]).astype(I64) * i(c[1]).astype(I64))[1],
        ],
    ),
    case(
        "v_mul_u32_u24 v16, v8, v9; v_mad_u32_u24 v17, v8, v9, v10",
        lambda c, _: [
            (c[0] & U32(0xFFFFFF)) * (c[1] & U32(0xFFFFFF)),
            (c[0] & U32(0xFFFFFF)) * (c[1] & U32(0xFFFFFF)) + c[2],
        ],
    ),
    case(
        "v_lshlrev_b32 v16, v8, v9; v_lshrrev_b32 v17, v8, v9; v_ashrrev_i32 v18, v8, v9",
        lambda c, _: [
            c[1] << (c[0] & U32(31)),
            c[1] >> (c[0] & U32(31)),
            bits(i(c[1]) >> i(c[0] & U32(31))),
        ],
    ),
    case(
        "v_lshlrev_b64 v[16:17], v8, v[10:11]; v_lshrrev_b64 v[18:19], v8, v[10:11]; "
        "v_ashrrev_i64 v[20:21], v8, v[10:11]",
        lambda c, _: [
            *pair(wide(c[2], c[3]) << (c[0] & U32(63)).astype(U64)),
            *pair(wide(c[2], c[3]) >> (c[0] & U32(63)).astype(U64)),
            *pair(wide(c[2], c[3]).view(I64) >> (c[0] & U32(63)).astype(I64)),
        ],
    ),
    case(
        "v_lshl_add_u64 v[16:17], v[8:9], 3, v[10:11]",
        lambda c, _: pair((wide(c[0], c[1]) << U64(3)) + wide(c[2], c[3])),
    ),
    case(
        "v_bfe_u32 v16, v8, 5, 9; v_bfe_i32 v17, v8, 5, 9; v_bfi_b32 v18, v8, v9, v10",
        lambda c, _: [
            bfe(c[0], U32(5), U32(9)),
            bits(i(c[0] << U32(18)) >> I32(23)),
            (c[0] & c[1]) | (~c[0] & c[2]),
        ],
    ),
    case(
        "v_and_or_b32 v16, v8, v9, v10; v_or3_b32 v17, v8, v9, v10; "
        "v_lshl_or_b32 v18, v8, 7, v9; v_lshl_add_u32 v19, v8, 7, v9; "
        "v_add_lshl_u32 v20, v8, v9, 3; v_add3_u32 v21, v8, v9, v10; v_xad_u32 v22, v8, v9, v10",
        lambda c, _: [
            (c[0] & c[1]) | c[2],
            c[0] | c[1] | c[2],
            (c[0] << U32(7)) | c[1],
            (c[0] << U32(7)) + c[1],
            (c[0] + c[1]) << U32(3),
            c[0] + c[1] + c[2],
            (c[0] ^ c[1]) + c[2],
        ],
    ),
    case(
        "v_min_u32 v16, v8, v9; v_max_i32 v17, v8, v9; v_min3_u32 v18, v8, v9, v10; "
        "v_med3_i32 v19, v8, v9, v10",
        lambda c, _: [
            np.minimum(c[0], c[1]),
            bits(np.maximum(i(c[0]), i(c[1]))),
            np.minimum(np.minimum(c[0], c[1]), c[2]),
            bits(np.sort(np.stack([i(c[0]), i(c[1]), i(c[2])]), axis=0)[1].copy()),
        ],
    ),
    case(
        "v_bcnt_u32_b32 v16, v8, v9; v_ffbl_b32 v17, v8; v_ffbh_u32 v18, v8; v_bfrev_b32 v19, v8",
        lambda c, _: [
            np.array([int(x).bit_count() for x in c[0]], U32) + c[1],
            np.array([(int(x) & -int(x)).bit_length() - 1 for x in c[0]], I32).view(U32),
            np.array([32 - int(x).bit_length() if x else -1 for x in c[0]], I32).view(U32),
            np.array([int(f"{int(x):032b}"[::-1], 2) for x in c[0]], U32),
        ],
    ),
    case(
        "v_alignbit_b32 v16, v8, v9, v10; v_alignbyte_b32 v17, v8, v9, v10",
        lambda c, _: [
            pair(wide(c[1], c[0]) >> (c[2] & U32(31)).astype(U64))[0],
            pair(wide(c[1], c[0]) >> (U32(8) * (c[2] & U32(3))).astype(U64))[0],
        ],
    ),
    case(
        "s_mov_b32 s20, 0x0c070401; v_perm_b32 v16, v8, v9, s20",
        lambda c, _: [
            (byte(c[1], 1).astype(U32))
            | byte(c[0], 0).astype(U32) << U32(8)
            | byte(c[0], 3).astype(U32) << U32(16)
        ],
    ),
    case(
        "v_mbcnt_lo_u32_b32 v16, -1, 0; v_mbcnt_hi_u32_b32 v16, -1, v16",
        lambda c, _: [LANE.astype(U32)],
    ),
    case(
        "v_bitop3_b32 v16, v8, v9, v10 bitop3:0x96; v_bitop3_b32 v17, v8, v9, v10 bitop3:0xe8",
        lambda c, _: [
            c[0] ^ c[1] ^ c[2],
            (c[0] & c[1]) | (c[1] & c[2]) | (c[0] & c[2]),
        ],
        isas=("gfx950",),
    ),
    # 16-bit and packed integers.
    case(
        "v_pk_add_u16 v16, v8, v9; v_pk_sub_i16 v17, v8, v9; v_pk_mul_lo_u16 v18, v8, v9; "
        "v_pk_max_i16 v19, v8, v9; v_pk_lshlrev_b16 v20, 3, v8 op_sel_hi:[0,1]",
        lambda c, _: [
            packed(*(x + y for x, y in zip(*map(u16s, c[:2]), strict=True))),
            packed(*(x - y for x, y in zip(*map(u16s, c[:2]), strict=True))),
            packed(*(x * y for x, y in zip(*map(u16s, c[:2]), strict=True))),
            packed(*(np.maximum(x, y) for x, y in zip(*map(i16s, c[:2]), strict=True))),
            packed(*(x << np.uint16(3) for x in u16s(c[0]))),
        ],
    ),
    # An inline constant is that of a word: 0.5 is 0x3f000000. The second takes its high half twice.
    case(
        "v_pk_add_u16 v16, v8, 0.5; v_pk_add_u16 v17, v8, 0.5 op_sel:[0,1]",
        lambda c, _: [
            packed(u16s(c[0])[0], u16s(c[0])[1] + np.uint16(0x3F00)),
            packed(*(x + np.uint16(0x3F00) for x in u16s(c[0]))),
        ],
    ),
    case(
        "v_add_u16 v16, v8, v9; v_mul_lo_u16 v17, v8, v9; v_mad_u16 v18, v8, v9, v10",
        lambda c, _: [
            (c[0] + c[1]) & U32(0xFFFF),
            (c[0] * c[1]) & U32(0xFFFF),
            (c[0] * c[1] + c[2]) & U32(0xFFFF),
        ],
    ),
    case(
        "v_add_u16_sdwa v16, v8, v9 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:WORD_1 "
        "src1_sel:BYTE_2; v_lshlrev_b32_sdwa v17, v8, v9 dst_sel:DWORD dst_unused:UNUSED_PAD "
        "src0_sel:BYTE_0 src1_sel:WORD_1; v_cvt_f32_i32_sdwa v18, sext(v8) dst_sel:DWORD "
        "dst_unused:UNUSED_PAD src0_sel:BYTE_3",
        lambda c, _: [
            ((c[0] >> U32(16)) + byte(c[1], 2)) << U32(16),
            (c[1] >> U32(16)) << (c[0] & U32(31)),
            bits(byte(c[0], 3).view(np.int8).astype(F32)),
        ],
    ),
    case(
        "v_mov_b32_dpp v16, v8 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf",
        lambda c, _: dpp(c, LANE ^ 1),
    ),
    case(
        "v_mov_b32_dpp v16, v8 row_shr:3 row_mask:0xf bank_mask:0xf bound_ctrl:0",
        lambda c, _: dpp(c, [x - 3 if x % 16 >= 3 else -1 for x in LANE]),
    ),
    case(
        "v_mov_b32_dpp v16, v8 row_ror:5 row_mask:0xf bank_mask:0xf",
        lambda c, _: dpp(c, [row(x) | ((x - 5) & 15) for x in LANE]),
    ),
    case(
        "v_mov_b32_dpp v16, v8 row_bcast:31 row_mask:0xc bank_mask:0xf",
        lambda c, _: dpp(c, [31 if x >= 32 else -1 for x in LANE]),
    ),
    case(
        "v_mov_b32_dpp v16, v8 row_half_mirror row_mask:0xf bank_mask:0xf",
        lambda c, _: dpp(c, [(x & ~7) | (7 - (x & 7)) for x in LANE]),
    ),
    case(
        "v_mov_b32_dpp v16, v8 row_newbcast:6 row_mask:0xf bank_mask:0xf",
        lambda c, _: dpp(c, [row(x) | 6 for x in LANE]),
    ),
    # Lanes.
    case(
        "s_mov_b32 m0, 0; v_readlane_b32 s20, v8, 17; v_readfirstlane_b32 s21, v9; "
        "v_mov_b32 v16, s20; v_mov_b32 v17, s21; v_writelane_b32 v18, s20, 5",
        lambda c, _: [
            np.full(LANES, c[0][17]),
            np.full(LANES, c[1][0]),
            np.where(LANE == 5, c[0][17], 0).astype(U32),
        ],
    ),
    case(
        "v_and_b32 v2, 63, v9; v_lshlrev_b32 v2, 2, v2; ds_bpermute_b32 v16, v2, v8; "
        "s_waitcnt lgkmcnt(0)",
        lambda c, _: [c[0][c[1] & U32(63)]],
    ),
    case(
        "v_xor_b32 v2, 21, v0; v_lshlrev_b32 v2, 2, v2; ds_permute_b32 v16, v2, v8; "
        "s_waitcnt lgkmcnt(0)",
        lambda c, _: [c[0][LANE ^ 21]],
    ),
    case(
        "ds_swizzle_b32 v16, v8 offset:swizzle(SWAP,4); s_waitcnt lgkmcnt(0)",
        lambda c, _: [c[0][LANE ^ 4]],
    ),
    case(
        "v_mov_b32 v16, v8; v_mov_b32 v17, v9; s_nop 1; v_permlane32_swap_b32 v16, v17",
        lambda c, _: [
            np.where(LANE >= 32, c[1][LANE - 32], c[0]),
            np.where(LANE < 32, c[0][(LANE + 32) % 64], c[1]),
        ],
        isas=("gfx950",),
    ),
    # EXEC: only every third lane runs; comparisons give 0 for the others.
    case(
        "s_mov_b32 s20, 0x49249249; s_mov_b32 s21, 0x92492492; "
        "s_and_saveexec_b64 s[22:23], s[20:21]; v_add_u32 v16, v8, v9; "
        "v_cmp_gt_u32 vcc, v8, v9; s_mov_b64 exec, s[22:23]; v_cndmask_b32 v17, 0, 1, vcc",
        lambda c, _: [
            np.where(exec_lanes(c), c[0] + c[1], 0).astype(U32),
            (exec_lanes(c) & (c[0] > c[1])).astype(U32),
        ],
    ),
    case(
        "v_cmp_lt_f32 s[20:21], v8, v9; v_cndmask_b32 v16, 0, 1, s[20:21]; "
        "v_cmp_nge_f32 vcc, v8, v9; v_cndmask_b32 v17, 0, 1, vcc; "
        "v_cmp_u_f32 vcc, v8, v9; v_cndmask_b32 v18, 0, 1, vcc; "
        "v_cmp_lg_f32 vcc, v8, v9; v_cndmask_b32 v19, v10, -v11, vcc",
        lambda c, _: [
            (f(c[0]) < f(c[1])).astype(U32),
            (~(f(c[0]) >= f(c[1]))).astype(U32),
            (np.isnan(f(c[0])) | np.isnan(f(c[1]))).astype(U32),
            np.where((f(c[0]) < f(c[1])) | (f(c[0]) > f(c[1])), c[3] ^ U32(1 << 31), c[2]),
        ],
        kind="floats",
    ),
    case(
        "v_cmp_class_f32 vcc, v8, v9; v_cndmask_b32 v16, 0, 1, vcc",
        lambda c, _: [float_class(f(c[0])) & c[1] != 0],
        kind="floats then bits",
    ),
    # Floats, rounded once.
    float_case("v_add_f32 v16, v8, v9", lambda a, b, c: a + b),
    float_case("v_sub_f32 v16, v8, v9", lambda a, b, c: a - b),
    float_case("v_mul_f32 v16, v8, v9", lambda a, b, c: a * b),
    float_case("v_fma_f32 v16, v8, v9, v10", fma32),
    float_case("v_fma_f32 v16, -v8, |v9|, v10", lambda a, b, c: fma32(-a, np.abs(b), c)),
    float_case("v_mov_b32 v16, v10; v_fmac_f32 v16, v8, v9", fma32),
    float_case(
        "v_fmaak_f32 v16, v8, v9, 0x40490fdb",
        lambda a, b, c: fma32(a, b, np.full(LANES, np.float32(np.pi))),
    ),
    float_case(
        "v_fmamk_f32 v16, v8, 0x40490fdb, v9",
        lambda a, b, c: fma32(a, np.full(LANES, np.float32(np.pi)), b),
    ),
    float_case(
        "v_add_f32 v16, v8, v9 clamp", lambda a, b, c: np.nan_to_num(np.clip(a + b, 0, 1), nan=0.0)
    ),
    float_case("v_mul_f32 v16, v8, v9 mul:2", lambda a, b, c: (a * b) * F32(2)),
    float_case("v_max_f32 v16, v8, v9", lambda a, b, c: np.fmax(a, b), "f32 zero"),
    float_case(
        "v_min3_f32 v16, v8, v9, v10", lambda a, b, c: np.fmin(np.fmin(a, b), c), "f32 zero"
    ),
    float_case("v_floor_f32 v16, v8", lambda a, b, c: np.floor(a)),
    float_case("v_rndne_f32 v16, v8", lambda a, b, c: np.rint(a)),
    float_case("v_trunc_f32 v16, v8", lambda a, b, c: np.trunc(a)),
    case(
        "v_pk_fma_f32 v[16:17], v[8:9], v[10:11], v[12:13]",
        lambda c, _: [
            bits(fma32(f(c[0]), f(c[2]), f(c[4]))),
            bits(fma32(f(c[1]), f(c[3]), f(c[5]))),
        ],
        kind="floats",
        nan_equal="f32",
    ),
    case(
        "v_pk_mul_f32 v[16:17], v[8:9], v[10:11] op_sel:[1,0] op_sel_hi:[0,1] neg_lo:[1,0]",
        lambda c, _: [bits(-f(c[1]) * f(c[2])), bits(f(c[0]) * f(c[3]))],
        kind="floats",
        nan_equal="f32",
    ),
    case(
        "v_pk_add_f32 v[16:17], v[8:9], 1.0",
        lambda c, _: [bits(f(c[0]) + F32(1)), bits(f(c[1]) + F32(1))],
        kind="floats",
        nan_equal="f32",
    ),
    case("v_pk_mov_b32 v[16:17], v[8:9], v[10:11] op_sel:[1,0]", lambda c, _: [c[1], c[2]]),
    # Functions within one unit of the last place.
    case(
        "v_rcp_f32 v16, v8; v_sqrt_f32 v17, v9; v_rsq_f32 v18, v9; v_exp_f32 v19, v10; "
        "v_log_f32 v20, v9",
        lambda c, _: [
            bits(one.astype(F32))
            for one in (
                1 / f(c[0]).astype(np.float64),
                np.sqrt(f(c[1]).astype(np.float64)),
                1 / np.sqrt(f(c[1]).astype(np.float64)),
                np.exp2(f(c[2]).astype(np.float64)),
                np.log2(f(c[1]).astype(np.float64)),
            )
        ],
        kind="small",
        tolerance=1.2e-7,
    ),
    # The division that compilers write out, on numbers that need every step of it.
    case(
        "v_div_scale_f32 v2, s[20:21], v9, v9, v8; v_div_scale_f32 v3, vcc, v8, v9, v8; "
        "v_rcp_f32 v4, v2; v_fma_f32 v5, -v2, v4, 1.0; v_fma_f32 v4, v5, v4, v4; "
        "v_mul_f32 v5, v3, v4; v_fma_f32 v6, -v2, v5, v3; v_fma_f32 v5, v6, v4, v5; "
        "v_fma_f32 v2, -v2, v5, v3; v_div_fmas_f32 v2, v2, v4, v5; "
        "v_div_fixup_f32 v16, v2, v9, v8",
        lambda c, _: [bits(f(c[0]) / f(c[1]))],
        kind="floats",
        nan_equal="f32",
    ),
    f64_case(
        "v_fma_f64 v[16:17], v[8:9], v[10:11], v[12:13]",
        lambda a, b, c: np.array(
            [
                np.float64(x) * y + z if not np.isfinite([x, y, z]).all() else exact_fma64(x, y, z)
                for x, y, z in zip(a, b, c, strict=True)
            ]
        ),
    ),
    f64_case("v_add_f64 v[16:17], v[8:9], v[10:11]", lambda a, b, c: a + b),
    f64_case("v_mul_f64 v[16:17], v[8:9], -v[10:11]", lambda a, b, c: a * -b),
    # Halves.
    half_case("v_add_f16 v16, v8, v9", lambda a, b, c: a + b),
    half_case("v_mul_f16 v16, v8, v9", lambda a, b, c: a * b),
    half_case("v_fma_f16 v16, v8, v9, v10", lambda a, b, c: a * b + c),
    packed_case("v_pk_add_f16 v16, v8, v9", lambda a, b, c: a + b),
    packed_case("v_pk_mul_f16 v16, v8, v9", lambda a, b, c: a * b),
    packed_case("v_pk_fma_f16 v16, v8, v9, v10", lambda a, b, c: a * b + c),
    case(
        "v_cvt_f16_f32 v16, v8; v_cvt_f32_f16 v17, v9; v_cvt_f32_f16_sdwa v18, v9 "
        "dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1",
        lambda c, _: [
            packed(f(c[0]).astype(np.float16), np.zeros(LANES, np.uint16)),
            bits(halves(c[1], np.float16)[0].astype(F32)),
            bits(halves(c[1], np.float16)[1].astype(F32)),
        ],
        kind="floats then halves",
        nan_equal="f16 or f32",
    ),
    # Conversions.
    case(
        "v_cvt_f32_u32 v16, v8; v_cvt_f32_i32 v17, v8; v_cvt_f32_ubyte2 v18, v8",
        lambda c, _: [
            bits(c[0].astype(F32)),
            bits(i(c[0]).astype(F32)),
            bits(byte(c[0], 2).astype(F32)),
        ],
    ),
    case(
        "v_cvt_u32_f32 v16, v8; v_cvt_i32_f32 v17, v8",
        lambda c, _: [
            clip_to(f(c[0]), 0, 2**32 - 1).astype(U32),
            bits(clip_to(f(c[0]), -(2**31), 2**31 - 1).astype(I32)),
        ],
        kind="floats",
    ),
    case(
        "v_cvt_pk_bf16_f32 v16, v8, v9",
        lambda c, _: [
            packed(f(c[0]).astype(ml_dtypes.bfloat16), f(c[1]).astype(ml_dtypes.bfloat16))
        ],
        kind="finite",
        isas=("gfx950",),
    ),
    case(
        "v_cvt_f32_fp8 v16, v8; v_cvt_f32_fp8_sdwa v17, v8 src0_sel:BYTE_3; "
        "v_cvt_f32_bf8 v18, v8; v_cvt_pk_f32_fp8 v[20:21], v8",
        lambda c, isa: [
            bits(byte(c[0], 0).view(fp8(isa)).astype(F32)),
            bits(byte(c[0], 3).view(fp8(isa)).astype(F32)),
            bits(byte(c[0], 0).view(bf8(isa)).astype(F32)),
            np.zeros(LANES, U32),
            bits(byte(c[0], 0).view(fp8(isa)).astype(F32)),
            bits(byte(c[0], 1).view(fp8(isa)).astype(F32)),
        ],
        nan_equal="f32",
    ),
    case(
        "v_mov_b32 v16, v10; v_cvt_pk_fp8_f32 v16, v8, v9; v_mov_b32 v17, v10; "
        "v_cvt_pk_fp8_f32 v17, v8, v9 op_sel:[0,0,1]",
        lambda c, isa: [
            fp8_pair(c, isa) | (c[2] & U32(0xFFFF0000)),
            fp8_pair(c, isa) << U32(16) | (c[2] & U32(0xFFFF)),
        ],
        kind="within fp8",
    ),
    case(
        "v_cvt_scalef32_pk_f32_fp4 v[16:17], v8, v9 op_sel:[1,0,0]; "
        "v_cvt_scalef32_pk_bf16_fp4 v18, v8, v9",
        lambda c, _: [
            bits(fp4_of(c[0], 2) * scale_of(c[1])),
            bits(fp4_of(c[0], 3) * scale_of(c[1])),
            packed(
                (fp4_of(c[0], 0) * scale_of(c[1])).astype(ml_dtypes.bfloat16),
                (fp4_of(c[0], 1) * scale_of(c[1])).astype(ml_dtypes.bfloat16),
            ),
        ],
        kind="bits then scales",
        isas=("gfx950",),
    ),
    case(
        "v_mov_b32 v16, v11; v_cvt_scalef32_pk_fp4_f32 v16, v8, v9, v10 op_sel:[0,0,1,0]",
        lambda c, _: [
            (c[3] & U32(0xFFFF00FF))
            | (fp4_code(f(c[0]), c[2]) | fp4_code(f(c[1]), c[2]) << U32(4)) << U32(8)
        ],
        kind="small then scales",
        isas=("gfx950",),
    ),
    case(
        "v_dot2_f32_bf16 v16, v8, v9, v10",
        lambda c, _: [
            bits(
                sum(
                    x.astype(np.float64) * y.astype(np.float64)
                    for x, y in zip(
                        halves(c[0], ml_dtypes.bfloat16),
                        halves(c[1], ml_dtypes.bfloat16),
                        strict=True,
                    )
                )
                .astype(np.float64)
                .__add__(f(c[2]).astype(np.float64))
                .astype(F32)
            )
        ],
        kind="bf16",
        tolerance=1e-5,
        isas=("gfx950",),
    ),
    case(
        "v_dot4_i32_i8 v16, v8, v9, v10",
        lambda c, _: [
            bits(
                (
                    sum(
                        byte(c[0], k).view(np.int8).astype(I64) * byte(c[1], k).view(np.int8)
                        for k in range(4)
                    )
                    + i(c[2])
                ).astype(I32)
            )
        ],
    ),
    # Paths to memory. v1 is 32 times the lane, s[4:5] the inputs.
    case(
        "v_lshlrev_b32 v2, 3, v0; ds_write_b64 v2, v[8:9]; v_add_u32 v3, 1024, v2; "
        "ds_write2_b32 v3, v10, v11 offset0:0 offset1:1; s_waitcnt lgkmcnt(0); "
        "v_xor_b32 v4, 8, v2; ds_read_b64 v[16:17], v4; ds_read2_b32 v[18:19], v4 offset0:1 "
        "offset1:0; ds_read2st64_b32 v[20:21], v4 offset0:0 offset1:4; ds_read_i8 v22, v4 "
        "offset:3; ds_read_u16 v23, v4 offset:6; s_waitcnt lgkmcnt(0)",
        lambda c, _: [
            *(c[k][LANE ^ 1] for k in (0, 1, 1, 0, 0, 2)),
            byte(c[0][LANE ^ 1], 3).view(np.int8).astype(I32).view(U32),
            c[1][LANE ^ 1] >> U32(16),
        ],
    ),
    case(
        "v_lshlrev_b32 v2, 4, v0; ds_write_b128 v2, v[8:11]; v_mov_b32 v20, v12; "
        "s_waitcnt lgkmcnt(0); ds_read_b128 v[16:19], v2; ds_read_u16_d16_hi v20, v2; "
        "s_waitcnt lgkmcnt(0)",
        lambda c, _: [*c[:4], (c[4] & U32(0xFFFF)) | c[0] << U32(16)],
    ),
    case(
        "v_mov_b32 v2, 0; v_mov_b32 v3, 0; ds_write_b32 v2, v3; s_waitcnt lgkmcnt(0); "
        "v_mov_b32 v4, 2; ds_add_rtn_u32 v16, v2, v4; s_waitcnt lgkmcnt(0); "
        "ds_read_b32 v17, v2; v_lshlrev_b32 v5, 2, v0; ds_write_b32 v5, v8 offset:256; "
        "s_waitcnt lgkmcnt(0); ds_cmpst_rtn_b32 v18, v5, v8, v9 offset:256; "
        "s_waitcnt lgkmcnt(0); ds_read_b32 v19, v5 offset:256; s_waitcnt lgkmcnt(0)",
        lambda c, _: [2 * LANE, np.full(LANES, 128), c[0], c[1]],
    ),
    case(
        "s_mov_b64 s[20:21], src_shared_base; v_lshlrev_b32 v2, 2, v0; v_mov_b32 v3, s21; "
        "ds_write_b32 v2, v8; s_waitcnt lgkmcnt(0); flat_load_dword v16, v[2:3]; "
        "s_waitcnt vmcnt(0) lgkmcnt(0); v_mov_b32 v5, s5; v_add_co_u32 v4, vcc, s4, v1; "
        "v_addc_co_u32 v5, vcc, 0, v5, vcc; flat_load_dword v17, v[4:5] offset:8; "
        "s_waitcnt vmcnt(0) lgkmcnt(0)",
        lambda c, _: [c[0], c[2]],
    ),
    case(
        "global_load_ubyte v16, v1, s[4:5] offset:5; global_load_sbyte v17, v1, s[4:5] offset:3; "
        "global_load_sshort v18, v1, s[4:5] offset:10; v_mov_b32 v19, v8; "
        "global_load_short_d16_hi v19, v1, s[4:5] offset:4; "
        "global_load_dwordx3 v[20:22], v1, s[4:5] offset:12; s_waitcnt vmcnt(0)",
        lambda c, _: [
            byte(c[1], 1),
            byte(c[0], 3).view(np.int8).astype(I32).view(U32),
            (c[2] >> U32(16)).astype(np.uint16).view(np.int16).astype(I32).view(U32),
            (c[0] & U32(0xFFFF)) | c[1] << U32(16),
            c[3],
            c[4],
            c[5],
        ],
    ),
    case(
        "s_mov_b32 s8, s4; s_and_b32 s9, s5, 0xffff; s_movk_i32 s10, 1024; "
        "s_mov_b32 s11, 0x00027000; buffer_load_dword v16, v1, s[8:11], 0 offen offset:4; "
        "s_mov_b32 s20, 8; buffer_load_dwordx2 v[18:19], v1, s[8:11], s20 offen; "
        "s_buffer_load_dword s21, s[8:11], 0x24; s_waitcnt vmcnt(0) lgkmcnt(0); "
        "v_mov_b32 v20, s21",
        lambda c, _: [
            np.where(LANE < 32, c[1], 0),
            np.zeros(LANES),
            np.where(LANE < 32, c[2], 0),
            np.where(LANE < 32, c[3], 0),
            np.full(LANES, c[1][1]),
        ],
    ),
    case(
        "scratch_store_dwordx2 off, v[8:9], off offset:16; v_mov_b32 v2, 12; "
        "scratch_load_dword v16, v2, off offset:8; scratch_load_dword v17, off, off offset:16; "
        "s_waitcnt vmcnt(0)",
        lambda c, _: [c[1], c[0]],
    ),
    case(
        "s_movk_i32 m0, 512; s_nop 0; global_load_lds_dword v1, s[4:5] offset:4; "
        "s_waitcnt vmcnt(0); v_lshlrev_b32 v2, 2, v0; ds_read_b32 v16, v2 offset:516; "
        "s_waitcnt lgkmcnt(0)",
        lambda c, _: [c[1]],
    ),
    # Scalars, seen through a vector register.
    case(
        "s_mov_b32 s20, 0x80000001; s_mov_b32 s21, 0x7fffffff; s_add_u32 s22, s20, s20; "
        "s_addc_u32 s23, s21, 0; s_mul_hi_u32 s24, s20, s21; s_ashr_i32 s25, s20, 4; "
        "s_bfe_u32 s26, s21, 0x00080004; s_bcnt1_i32_b32 s27, s21; s_cselect_b32 s28, 7, 9; "
        "v_mov_b32 v16, s22; v_mov_b32 v17, s23; v_mov_b32 v18, s24; v_mov_b32 v19, s25; "
        "v_mov_b32 v20, s26; v_mov_b32 v21, s27; v_mov_b32 v22, s28",
        lambda c, _: [
            np.full(LANES, x & 0xFFFFFFFF, U32)
            for x in (
                2,
                0x80000000,
                (0x80000001 * 0x7FFFFFFF) >> 32,
                -(0x7FFFFFFF >> 4) - 1,
                0xFF,
                31,
                7,
            )
        ],
    ),
    case(
        "s_mov_b64 s[20:21], 0x12345678; s_lshl_b64 s[22:23], s[20:21], 36; "
        "s_ff1_i32_b32 s24, s20; s_flbit_i32_b32 s25, s20; s_cmp_lt_i32 s24, s25; "
        "s_cselect_b64 s[26:27], s[20:21], s[22:23]; s_movk_i32 s28, 0x8000; "
        "v_mov_b32 v16, s22; v_mov_b32 v17, s23; v_mov_b32 v18, s24; v_mov_b32 v19, s25; "
        "v_mov_b32 v20, s26; v_mov_b32 v21, s28",
        lambda c, _: [
            np.full(LANES, x & 0xFFFFFFFF, U32)
            for x in (0, (0x12345678 << 4) & 0xFFFFFFFF, 3, 3, 0, -32768)
        ],
    ),
    case(
        "s_mov_b32 s20, 0; s_mov_b32 s21, 0\nagain:\n s_add_i32 s20, s20, 3; "
        "s_addk_i32 s21, 0x1; s_cmp_lt_u32 s21, 10; s_cbranch_scc1 again; v_mov_b32 v16, s20",
        lambda c, _: [np.full(LANES, 30, U32)],
    ),
]


# ------------------------------------------------------------------ matrices


@dataclass(frozen=True)
class Product:
    """C [M, M] = A [M, K] B [M, K]^T + C by one instruction."""

    name: str
    size: int
    depth: int
    dtype: object  # of the elements, by the part
    integers: bool = False
    isas: tuple = amd.ISAS


PRODUCTS = [
    Product("v_mfma_f32_32x32x8_bf16", 32, 8, lambda _: ml_dtypes.bfloat16),
    Product("v_mfma_f32_16x16x16_f16", 16, 16, lambda _: np.float16),
    Product("v_mfma_f32_16x16x4_f32", 16, 4, lambda _: F32),
    Product("v_mfma_f32_32x32x2_f32", 32, 2, lambda _: F32),
    Product("v_mfma_f32_32x32x16_fp8_fp8", 32, 16, fp8),
    Product("v_mfma_f32_16x16x32_bf8_bf8", 16, 32, bf8),
    Product("v_mfma_i32_16x16x32_i8", 16, 32, lambda _: np.int8, integers=True),
    Product("v_mfma_f32_32x32x16_bf16", 32, 16, lambda _: ml_dtypes.bfloat16, isas=("gfx950",)),
    Product("v_mfma_f32_16x16x32_f16", 16, 32, lambda _: np.float16, isas=("gfx950",)),
    Product("v_mfma_i32_16x16x64_i8", 16, 64, lambda _: np.int8, integers=True, isas=("gfx950",)),
]
# Accumulators are in the second half of the registers, by way of v_accvgpr_write and read.
PRODUCT = """
  s_load_dwordx8 s[4:11], s[0:1], 0x0
  v_lshlrev_b32 v1, 4, v0
  v_lshlrev_b32 v2, 6, v0
  s_waitcnt lgkmcnt(0)
  global_load_dwordx4 v[4:7], v1, s[4:5]
  global_load_dwordx4 v[8:11], v1, s[6:7]
{load}
  s_waitcnt vmcnt(0)
{enter}
  s_nop 7
  {instruction}
  s_nop 15
  s_nop 15
{leave}
{store}
"""


def product_text(product: Product) -> str:
    count = product.size * product.size // LANES
    lines = {"load": [], "enter": [], "leave": [], "store": []}
    for at in range(0, count, 4):
        span = f"v[{32 + at}:{35 + at}]"
        lines["load"].append(f"  global_load_dwordx4 {span}, v2, s[8:9] offset:{4 * at}")
        lines["store"].append(f"  global_store_dwordx4 v2, {span}, s[10:11] offset:{4 * at}")
    for at in range(count):
        lines["enter"].append(f"  v_accvgpr_write_b32 a{at}, v{32 + at}")
        lines["leave"].append(f"  v_accvgpr_read_b32 v{32 + at}, a{at}")
    bits_a_lane = 8 * np.dtype(product.dtype("gfx950")).itemsize * product.size * product.depth
    words = max(bits_a_lane // LANES // 32, 1)
    span = [f"v[{at}:{at + words - 1}]" if words > 1 else f"v{at}" for at in (4, 8)]
    sums = f"a[0:{count - 1}]"
    instruction = f"{product.name} {sums}, {span[0]}, {span[1]}, {sums}"
    return PRODUCT.format(instruction=instruction, **{k: "\n".join(v) for k, v in lines.items()})


def lane_rows(matrix: np.ndarray) -> np.ndarray:
    """[64, 16] bytes: lane l has row l % M, and of its elements the run that l // M numbers."""
    size, depth = matrix.shape
    run = depth * size // LANES
    out = np.zeros((LANES, 16), np.uint8)
    for lane in range(LANES):
        first = lane // size * run
        raw = np.ascontiguousarray(matrix[lane % size, first : first + run]).view(np.uint8)
        out[lane, : len(raw)] = raw
    return out


def lane_sums(matrix: np.ndarray) -> np.ndarray:
    """[64, 16] words: lane l has column l % M; registers go down the rows in fours."""
    size = len(matrix)
    out = np.zeros((LANES, 16), matrix.dtype)
    for lane in range(LANES):
        for reg in range(size * size // LANES):
            row = reg // 4 * (LANES // size) * 4 + lane // size * 4 + reg % 4
            out[lane, reg] = matrix[row, lane % size]
    return out


@pytest.mark.parametrize("isa", amd.ISAS)
def test_products_of_small_matrices(isa, tmp_path):
    try:
        amd.compiler()
    except amd.NoToolsError as error:
        pytest.skip(str(error))
    products = [one for one in PRODUCTS if isa in one.isas]
    text = f'.amdgcn_target "amdgcn-amd-amdhsa--{isa}"\n.amdhsa_code_object_version 6\n'
    for number, product in enumerate(products):
        text += amd.kernel_text(f"product_{number}", product_text(product))
    machine = amd.machine.Machine(isa)
    code = machine.load(amd.assembled(text, isa, tmp_path))
    rng = np.random.default_rng(11)
    for number, product in enumerate(products):
        kind, shape = product.dtype(isa), (product.size, product.depth)
        if product.integers:
            a, b = (rng.integers(-128, 128, shape).astype(np.int8) for _ in range(2))
            c = rng.integers(-1000, 1000, (product.size, product.size)).astype(I32)
            want = a.astype(I64) @ b.astype(I64).T + c
        else:
            a, b = (rng.standard_normal(shape).astype(kind) for _ in range(2))
            c = rng.standard_normal((product.size, product.size)).astype(F32)
            want = a.astype(np.float64) @ b.astype(np.float64).T + c
        out = machine.poisoned((LANES, 16), c.dtype, "sums")
        given = [machine.array(x, "matrix") for x in (lane_rows(a), lane_rows(b), lane_sums(c))]
        arguments = b"".join(one.address.to_bytes(8, "little") for one in (*given, out))
        machine.launch(code, f"product_{number}", 1, LANES, arguments)
        machine.run(LIMIT, LIMIT)
        used = product.size * product.size // LANES
        seen, expected = out.read()[:, :used], lane_sums(want)[:, :used]
        np.testing.assert_allclose(seen, expected, rtol=1e-5, atol=1e-5, err_msg=product.name)


SCALED = """
  s_load_dwordx8 s[4:11], s[0:1], 0x0
  v_lshlrev_b32 v1, 5, v0
  v_lshlrev_b32 v2, 4, v0
  v_lshlrev_b32 v3, 3, v0
  s_waitcnt lgkmcnt(0)
  global_load_dwordx4 v[4:7], v1, s[4:5]
  global_load_dwordx4 v[8:11], v1, s[4:5] offset:16
  global_load_dwordx4 v[12:15], v1, s[6:7]
  global_load_dwordx4 v[16:19], v1, s[6:7] offset:16
  global_load_dwordx2 v[20:21], v3, s[8:9]
  s_waitcnt vmcnt(0)
  v_mfma_scale_f32_16x16x128_f8f6f4 v[24:27], v[4:11], {b}, 0, v20, v21 op_sel_hi:[0,0,0] {formats}
  s_nop 15
  global_store_dwordx4 v2, v[24:27], s[10:11]
"""


@pytest.mark.parametrize("b_is_fp4", [False, True])
def test_a_scaled_product_of_eight_and_four_bits(tmp_path, b_is_fp4):
    """Scales belong to runs of 32; 8-bit operands lie in two runs of 16 a lane, half apart."""
    try:
        amd.compiler()
    except amd.NoToolsError as error:
        pytest.skip(str(error))
    body = SCALED.format(
        b="v[12:15]" if b_is_fp4 else "v[12:19]", formats="blgp:4" if b_is_fp4 else ""
    )
    text = '.amdgcn_target "amdgcn-amd-amdhsa--gfx950"\n.amdhsa_code_object_version 6\n'
    machine = amd.machine.Machine("gfx950")
    code = machine.load(amd.assembled(text + amd.kernel_text("scaled", body), "gfx950", tmp_path))
    rng = np.random.default_rng(12)
    a = rng.standard_normal((16, 128)).astype(ml_dtypes.float8_e4m3fn)
    b = rng.standard_normal((16, 128)).astype(
        ml_dtypes.float4_e2m1fn if b_is_fp4 else ml_dtypes.float8_e4m3fn
    )
    scales = rng.integers(120, 135, (2, 16, 4))
    lanes = np.zeros((2, LANES, 32), np.uint8)
    words = np.zeros((LANES, 2), U32)
    for lane in range(LANES):
        row, group = lane % 16, lane // 16
        split = [*range(16 * group, 16 * group + 16), *range(64 + 16 * group, 80 + 16 * group)]
        lanes[0, lane] = a[row, split].view(np.uint8)
        if b_is_fp4:
            run = b[row, 32 * group : 32 * group + 32].view(np.uint8)
            lanes[1, lane, :16] = run[0::2] | run[1::2] << 4
        else:
            lanes[1, lane] = b[row, split].view(np.uint8)
        words[lane] = scales[:, row, group]
    out = machine.poisoned((LANES, 4), F32, "sums")
    given = [machine.array(x, "operand") for x in (lanes[0], lanes[1], words)]
    arguments = b"".join(one.address.to_bytes(8, "little") for one in (*given, out))
    machine.launch(code, "scaled", 1, LANES, arguments)
    machine.run(LIMIT, LIMIT)
    whole = [np.repeat(np.exp2(one - 127.0), 32, axis=1) for one in scales]
    want = (a.astype(np.float64) * whole[0]) @ (b.astype(np.float64) * whole[1]).T
    seen = np.zeros((16, 16))
    for lane in range(LANES):
        seen[4 * (lane // 16) : 4 * (lane // 16) + 4, lane % 16] = out.read()[lane]
    np.testing.assert_allclose(seen, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def u16s(word):
    return halves(word, np.uint16)


def i16s(word):
    return halves(word, np.int16)


def clip_to(values, low, high):
    return np.clip(np.nan_to_num(np.trunc(values.astype(np.float64)), nan=0.0), low, high)


def float_class(values):
    """The bit of v_cmp_class of each value; NaNs here are quiet."""
    negative = np.signbit(values)
    tiny = np.abs(values) < np.finfo(F32).tiny
    bit = np.where(negative, 3, 8)
    bit = np.where(tiny, np.where(negative, 4, 7), bit)
    bit = np.where(values == 0, np.where(negative, 5, 6), bit)
    bit = np.where(np.isinf(values), np.where(negative, 2, 9), bit)
    return U32(1) << np.where(np.isnan(values), 1, bit).astype(U32)


def fp8_pair(c, isa):
    low, high = (f(x).astype(fp8(isa)).view(np.uint8).astype(U32) for x in c[:2])
    return low | high << U32(8)


def fp4_of(word, which):
    codes = ((word >> U32(4 * which)) & U32(15)).astype(np.uint8)
    return codes.view(ml_dtypes.float4_e2m1fn).astype(F32)


def fp4_code(values, scales):
    return (values / scale_of(scales)).astype(ml_dtypes.float4_e2m1fn).view(np.uint8).astype(U32)


def scale_of(word):
    """The power of two that a float's exponent says."""
    return np.exp2(((word >> U32(23)) & U32(0xFF)).astype(np.float64) - 127).astype(F32)


def exact_fma64(a, b, c):
    return float(Fraction(a) * Fraction(b) + Fraction(c))


def inputs(kind: str) -> np.ndarray:
    """[lanes, columns] of words."""
    rng = np.random.default_rng([7, *kind.encode()])
    words = rng.integers(0, 1 << 32, (LANES, COLUMNS), U32)
    words[:4, :] = [[0], [1], [0xFFFFFFFF], [0x80000000]]
    floats = (
        rng.standard_normal((LANES, COLUMNS)) * 2.0 ** rng.integers(-20, 20, (LANES, COLUMNS))
    ).astype(F32)
    special = floats.copy()
    special[:48] = rng.choice(FLOATS, (48, COLUMNS))
    half = rng.standard_normal((LANES, COLUMNS, 2)).astype(np.float16)
    half[:8] = rng.choice(np.array([0, 1, -2, np.inf, 65504, 6e-8], np.float16), (8, COLUMNS, 2))
    scales = (2.0 ** rng.integers(-6, 7, (LANES, COLUMNS))).astype(F32).view(U32)
    if kind == "bits":
        return words
    if kind == "floats":
        return special.view(U32)
    if kind == "finite":
        return floats.view(U32)
    if kind == "doubles":
        doubles = rng.standard_normal((LANES, COLUMNS // 2)) * 2.0 ** rng.integers(
            -50, 50, (LANES, COLUMNS // 2)
        )
        return doubles.view(U32)
    if kind == "halves":
        return half.view(U32)[..., 0]
    if kind == "bf16":
        values = rng.standard_normal((LANES, COLUMNS, 2)).astype(ml_dtypes.bfloat16)
        out = values.view(U32)[..., 0].copy()
        out[:, 2] = floats[:, 2].view(U32) & U32(0x3FFFFFFF)
        return out
    if kind == "small":
        return rng.uniform(0.1, 9.0, (LANES, COLUMNS)).astype(F32).view(U32)
    if kind == "within fp8":
        out = rng.uniform(-200, 200, (LANES, COLUMNS)).astype(F32)
        out[::5] *= F32(2.0**-12)
        return out.view(U32)
    if kind == "floats then bits":
        return np.concatenate([special.view(U32)[:, :1], words[:, 1:]], axis=1)
    if kind == "floats then halves":
        return np.concatenate([floats.view(U32)[:, :1], half.view(U32)[:, 1:, 0]], axis=1)
    if kind == "bits then scales":
        return np.concatenate([words[:, :1], scales[:, 1:]], axis=1)
    if kind == "small then scales":
        values = (rng.standard_normal((LANES, 2)) * 2).astype(F32)
        return np.concatenate([values.view(U32), scales[:, 2:3], words[:, 3:]], axis=1)
    raise ValueError(kind)


@pytest.fixture(scope="module", params=amd.ISAS)
def machine(request, tmp_path_factory):
    """A machine with every case of its part as a kernel case_N."""
    try:
        amd.compiler()
    except amd.NoToolsError as error:
        pytest.skip(str(error))
    isa = request.param
    text = f'.amdgcn_target "amdgcn-amd-amdhsa--{isa}"\n.amdhsa_code_object_version 6\n'
    for number, one in enumerate(CASES):
        if isa in one.isas:
            body = one.body.replace("again", f"again_{number}")
            text += amd.kernel_text(
                f"case_{number}", FRAME.format(body=body), LDS_BYTES, PRIVATE_BYTES
            )
    made = amd.machine.Machine(isa)
    code = amd.assembled(text, isa, tmp_path_factory.mktemp("instructions"))
    kernels = {
        name: amd.code_object.Kernel(
            **{
                **{key: getattr(one, key) for key in one.__dataclass_fields__},
                "arguments": (
                    amd.code_object.Argument(0, 8, "global_buffer"),
                    amd.code_object.Argument(8, 8, "global_buffer"),
                ),
            }
        )
        for name, one in code.kernels.items()
    }
    code.kernels.update(kernels)
    return made, made.load(code)


def equal(got, want, nan_equal):
    same = got == want
    if "f32" in nan_equal:
        same |= np.isnan(got.view(F32)) & np.isnan(want.view(F32))
    if "zero" in nan_equal:
        same |= (got << U32(1) == 0) & (want << U32(1) == 0)
    if "f16" in nan_equal:
        parts = zip(halves(got, np.float16), halves(want, np.float16), strict=True)
        each = [(x == y) | (np.isnan(x) & np.isnan(y)) for x, y in parts]
        same |= each[0] & each[1]
    return same


@pytest.mark.parametrize("number", range(len(CASES)))
def test_instruction(machine, number):
    engine, code = machine
    one = CASES[number]
    if engine.isa not in one.isas:
        return
    given = inputs(one.kind)
    out = engine.poisoned((LANES, COLUMNS), U32, "out")
    engine.launch(code, f"case_{number}", 1, LANES, [engine.array(given, "in"), out])
    engine.run(LIMIT, LIMIT)
    columns = [given[:, k].copy() for k in range(COLUMNS)]
    with np.errstate(all="ignore"):
        want = [np.asarray(x).astype(U32) for x in one.want(columns, engine.isa)]
    seen = out.read()
    if one.nan_equal == "f64":
        a, b = (wide(*x).view(np.float64) for x in ((seen[:, 0], seen[:, 1]), want))
        assert np.array_equal(a, b, equal_nan=True)
        return
    for column, expected in enumerate(want):
        got = seen[:, column].copy()
        if one.tolerance:
            np.testing.assert_allclose(f(got), f(expected), rtol=one.tolerance)
            continue
        wrong = ~equal(got, expected, one.nan_equal)
        assert not wrong.any(), (
            f"{one.body.strip()}: v{FIRST_OUT + column} lane {np.argmax(wrong)}: "
            f"{got[wrong][0]:#x}, needed {expected[wrong][0]:#x}, of "
            f"{[hex(x) for x in given[np.argmax(wrong)]]}"
        )


def test_every_case_says_what_it_reads_and_writes():
    for one in CASES:
        registers = {int(x) for x in re.findall(r"\bv\[?(\d+)", one.body)}
        assert registers & set(range(FIRST_OUT, FIRST_OUT + COLUMNS)), one.body

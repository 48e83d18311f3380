// vector_ops.cpp: what vector instructions compute, lane by lane.
#include <bit>
#include <cmath>

#include "machine.hpp"
#include "operands.hpp"

namespace amd {

LaneMap dpp_lanes(const Wave& w, const Inst& i) {
  const int control = i.at(kF_dpp);
  LaneMap map;
  map.writes = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int row = lane & ~15, in_row = lane & 15;
    int from = lane;
    bool valid = true;
    if (control <= 0xff) {
      from = (lane & ~3) | ((control >> (2 * (lane & 3))) & 3);
    } else if (control >= 0x101 && control <= 0x10f) {  // row_shl
      from = lane + (control & 15);
      valid = in_row + (control & 15) < 16;
    } else if (control >= 0x111 && control <= 0x11f) {  // row_shr
      from = lane - (control & 15);
      valid = in_row >= (control & 15);
    } else if (control >= 0x121 && control <= 0x12f) {  // row_ror
      from = row | ((in_row - (control & 15)) & 15);
    } else if (control == 0x130) {  // wave_shl:1
      from = lane + 1;
      valid = from < kLanes;
    } else if (control == 0x134) {  // wave_rol:1
      from = (lane + 1) & 63;
    } else if (control == 0x138) {  // wave_shr:1
      from = lane - 1;
      valid = from >= 0;
    } else if (control == 0x13c) {  // wave_ror:1
      from = (lane - 1) & 63;
    } else if (control == 0x140) {  // row_mirror
      from = row | (15 - in_row);
    } else if (control == 0x141) {  // row_half_mirror
      from = (lane & ~7) | (7 - (lane & 7));
    } else if (control == 0x142) {  // row_bcast:15
      from = row - 1;
      valid = row != 0;
    } else if (control == 0x143) {  // row_bcast:31
      from = 31;
      valid = lane >= 32;
    } else if (control >= 0x150 && control <= 0x15f) {  // row_newbcast
      from = row | (control & 15);
    } else {
      w.fault("DPP control " + std::to_string(control) + " is not modelled");
    }
    if (valid && ((w.exec >> from) & 1) == 0) valid = false;
    map.from[lane] = valid ? from : lane;
    const bool zeroes = i.bit(kF_bc) != 0;
    if (!valid && zeroes) map.zero |= 1ull << lane;
    const bool row_on = (i.at(kF_row_mask) >> (lane / 16)) & 1;
    const bool bank_on = (i.at(kF_bank_mask) >> ((lane & 15) / 4)) & 1;
    if (row_on && bank_on && (valid || zeroes)) map.writes |= 1ull << lane;
  }
  return map;
}

namespace {

template <class F>
void approximate(Wave& w, const Inst& i, F f) {
  float a[kLanes], d[kLanes];
  read(w, i, 0, a);
  for (int lane = 0; lane < kLanes; ++lane)
    d[lane] = nearly(w, f(static_cast<double>(a[lane])), float_bits(a[lane]));
  write(w, i, d);
}

float quiet_min(float a, float b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  if (a == 0 && b == 0) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}
float quiet_max(float a, float b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  if (a == 0 && b == 0) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}
float middle(float a, float b, float c) {
  if (std::isnan(a) || std::isnan(b) || std::isnan(c)) return quiet_min(quiet_min(a, b), c);
  return std::max(std::min(a, b), std::min(std::max(a, b), c));
}
template <class T>
T middle_int(T a, T b, T c) {
  return std::max(std::min(a, b), std::min(std::max(a, b), c));
}
template <class I, class F>
I to_integer(F value) {
  if (std::isnan(value)) return 0;
  const double x = std::trunc(static_cast<double>(value));
  if (x <= static_cast<double>(std::numeric_limits<I>::min())) return std::numeric_limits<I>::min();
  if (x >= static_cast<double>(std::numeric_limits<I>::max())) return std::numeric_limits<I>::max();
  return static_cast<I>(x);
}
template <class T>
T saturating(i64 value) {
  return static_cast<T>(
      std::clamp<i64>(value, std::numeric_limits<T>::min(), std::numeric_limits<T>::max()));
}
template <class T, class F>
void saturates(Wave& w, const Inst& i, F f) {
  T a[kLanes], b[kLanes], d[kLanes];
  read(w, i, 0, a);
  read(w, i, 1, b);
  for (int lane = 0; lane < kLanes; ++lane) {
    const i64 wide = f(static_cast<i64>(a[lane]), static_cast<i64>(b[lane]));
    d[lane] = i.clamp != 0 ? saturating<T>(wide) : static_cast<T>(wide);
  }
  write(w, i, d, false, true);
}
u32 low24(u32 a) { return a & 0xff'ffff; }
i32 signed24(i32 a) { return static_cast<i32>(static_cast<u32>(a) << 8) >> 8; }
int exponent_of(float x) { return static_cast<int>((float_bits(x) >> 23) & 0xff); }
int exponent_of(double x) { return static_cast<int>((std::bit_cast<u64>(x) >> 52) & 0x7ff); }
bool subnormal(double x, double smallest) { return x != 0 && std::fabs(x) < smallest; }

// The destination of a carry or of a comparison: VCC, or the scalar pair that the encoding names.
int mask_destination(const Inst& i) {
  if (i.has(kF_sdst)) return i.sdwa && i.bit(kF_sd) == 0 ? kVcc : i.at(kF_sdst);
  return kVcc;
}
u64 carry_in(const Wave& w, const Inst& i) {
  return i.vop3 ? read_scalar<u64>(w, i.src[2]) : w.scalar64(kVcc);
}
template <class F>
void with_carry(Wave& w, const Inst& i, bool takes, F f) {
  u32 a[kLanes], b[kLanes], d[kLanes];
  read(w, i, 0, a);
  read(w, i, 1, b);
  const u64 in = takes ? carry_in(w, i) : 0;
  u64 out = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const u64 wide = f(u64{a[lane]}, u64{b[lane]}, (in >> lane) & 1);
    d[lane] = static_cast<u32>(wide);
    if ((wide >> 32) != 0) out |= 1ull << lane;
  }
  u64 writes = w.exec;
  if (i.dpp) writes &= dpp_lanes(w, i).writes;
  write(w, i, d);
  w.set_scalar64(mask_destination(i), out & writes);
}

template <class F>
void div_scale(Wave& w, const Inst& i, int near_top, int far, int low, double smallest) {
  F a[kLanes], b[kLanes], c[kLanes], d[kLanes];
  read(w, i, 0, a);
  read(w, i, 1, b);
  read(w, i, 2, c);
  u64 flags = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const F value = a[lane], denominator = b[lane], numerator = c[lane];
    const double one_over = 1.0 / static_cast<double>(denominator);
    const F quotient = numerator / denominator;
    const auto up = [&] { return static_cast<F>(std::ldexp(value, far)); };
    const auto same = [](F x, F y) { return std::memcmp(&x, &y, sizeof x) == 0; };
    F scaled = value;
    bool flag = false;
    const bool tiny_inverse = subnormal(one_over, smallest);
    const bool tiny_quotient = subnormal(static_cast<double>(numerator) / denominator, smallest) ||
                               (quotient == 0 && numerator != 0);
    if (numerator == 0 || denominator == 0) {
      scaled = std::numeric_limits<F>::quiet_NaN();
    } else if (exponent_of(numerator) - exponent_of(denominator) >= near_top) {
      flag = true;
      if (same(value, denominator)) scaled = up();
    } else if (exponent_of(denominator) == 0) {
      scaled = up();
    } else if (tiny_inverse && tiny_quotient) {
      flag = true;
      if (same(value, denominator)) scaled = up();
    } else if (tiny_inverse) {
      scaled = static_cast<F>(std::ldexp(value, -far));
    } else if (tiny_quotient) {
      flag = true;
      if (same(value, numerator)) scaled = up();
    } else if (exponent_of(numerator) <= low) {
      scaled = up();
    }
    d[lane] = scaled;
    if (flag) flags |= 1ull << lane;
  }
  write(w, i, d);
  w.set_scalar64(mask_destination(i), flags & w.exec);
}
template <class F>
void div_fmas(Wave& w, const Inst& i, int scale, int middle_exponent) {
  F a[kLanes], b[kLanes], c[kLanes], d[kLanes];
  read(w, i, 0, a);
  read(w, i, 1, b);
  read(w, i, 2, c);
  const u64 flags = w.scalar64(kVcc);
  for (int lane = 0; lane < kLanes; ++lane) {
    d[lane] = std::fma(a[lane], b[lane], c[lane]);
    if ((flags >> lane) & 1)
      d[lane] = std::ldexp(d[lane], exponent_of(c[lane]) > middle_exponent ? scale : -scale);
  }
  write(w, i, d);
}
template <class F>
F div_fixup(F quotient, F denominator, F numerator, int too_small, int top) {
  const bool negative = std::signbit(denominator) != std::signbit(numerator);
  const F sign = negative ? F{-1} : F{1};
  if (std::isnan(numerator)) return numerator;
  if (std::isnan(denominator)) return denominator;
  if (numerator == 0 && denominator == 0) return -std::numeric_limits<F>::quiet_NaN();
  if (std::isinf(numerator) && std::isinf(denominator)) return -std::numeric_limits<F>::quiet_NaN();
  if (denominator == 0 || std::isinf(numerator)) return sign * std::numeric_limits<F>::infinity();
  if (std::isinf(denominator) || numerator == 0) return std::copysign(F{0}, sign);
  const int difference = exponent_of(numerator) - exponent_of(denominator);
  if (difference < -too_small) return std::copysign(F{0}, sign);
  if (exponent_of(denominator) == top) return sign * std::numeric_limits<F>::infinity();
  return std::copysign(quotient, sign);
}

u32 permuted(u32 high, u32 low, u32 selectors) {
  const u64 all = static_cast<u64>(high) << 32 | low;
  u32 out = 0;
  for (int byte = 0; byte < 4; ++byte) {
    const u32 sel = (selectors >> (8 * byte)) & 0xff;
    u32 part = 0;
    if (sel >= 13) {
      part = 0xff;
    } else if (sel == 12) {
      part = 0;
    } else if (sel >= 8) {
      part = (all >> (16 * (sel - 8) + 15)) & 1 ? 0xff : 0;
    } else {
      part = static_cast<u32>(all >> (8 * sel)) & 0xff;
    }
    out |= part << (8 * byte);
  }
  return out;
}

enum Compare { kNever, kLess, kEqual, kLessEqual, kGreater, kNotEqual, kGreaterEqual, kAlways };
template <class T>
void compare(Wave& w, const Inst& i) {
  T a[kLanes], b[kLanes];
  read(w, i, 0, a);
  read(w, i, 1, b);
  const int which = i.note & 15;
  u64 out = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto x = number(a[lane]);
    const auto y = number(b[lane]);
    bool yes = false;
    if constexpr (kIsFloat<T>) {
      // Of 16: never, lt, eq, le, gt, lg, ge, ordered, unordered, and the first eight negated.
      const bool unordered = std::isnan(x) || std::isnan(y);
      const int base = which < 8 ? which : 15 - which;
      switch (base) {
        case 1: yes = x < y; break;
        case 2: yes = x == y; break;
        case 3: yes = x <= y; break;
        case 4: yes = x > y; break;
        case 5: yes = x < y || x > y; break;
        case 6: yes = x >= y; break;
        case 7: yes = !unordered; break;
        default: break;
      }
      if (which >= 8) yes = !yes;
    } else {
      switch (which) {
        case kLess: yes = x < y; break;
        case kEqual: yes = x == y; break;
        case kLessEqual: yes = x <= y; break;
        case kGreater: yes = x > y; break;
        case kNotEqual: yes = x != y; break;
        case kGreaterEqual: yes = x >= y; break;
        case kAlways: yes = true; break;
        default: break;
      }
    }
    if (yes) out |= 1ull << lane;
  }
  out &= w.exec;
  w.set_scalar64(mask_destination(i), out);
  if ((i.note & 16) != 0) w.exec = out;
}
template <class F, class Bits>
void compare_class(Wave& w, const Inst& i) {
  F a[kLanes];
  u32 b[kLanes];
  read(w, i, 0, a);
  read(w, i, 1, b);
  u64 out = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const F x = a[lane];
    const bool negative = std::signbit(x);
    const Bits quiet = Bits{1} << (std::numeric_limits<F>::digits - 2);
    int bit = 0;
    if (std::isnan(x)) {
      bit = (std::bit_cast<Bits>(x) & quiet) != 0 ? 1 : 0;
    } else if (std::isinf(x)) {
      bit = negative ? 2 : 9;
    } else if (x == 0) {
      bit = negative ? 5 : 6;
    } else if (exponent_of(x) == 0) {
      bit = negative ? 4 : 7;
    } else {
      bit = negative ? 3 : 8;
    }
    if ((b[lane] >> bit) & 1) out |= 1ull << lane;
  }
  out &= w.exec;
  w.set_scalar64(mask_destination(i), out);
  if ((i.note & 16) != 0) w.exec = out;
}

// Conversions of small formats. gfx942 has FNUZ, gfx950 the open standard's.
const Format& fp8(const Wave& w) {
  return w.group->launch->machine->is_gfx950 ? kE4m3Fn : kE4m3Fnuz;
}
const Format& bf8(const Wave& w) { return w.group->launch->machine->is_gfx950 ? kE5m2 : kE5m2Fnuz; }
const Format& eight(const Wave& w, const Inst& i) { return (i.note & 1) != 0 ? bf8(w) : fp8(w); }

// Which byte of a source an 8-bit conversion reads: SDWA's selection.
int byte_of(const Wave& w, const Inst& i) {
  if (i.sdwa) {
    const int sel = i.at(kF_src0_sel);
    return sel < 4 ? sel : sel == 5 ? 2 : 0;
  }
  if (i.opsel != 0) w.fault("op_sel of a conversion from one byte is not modelled");
  return 0;
}
void raw(const Wave& w, const Inst& i, int k, u32 (&out)[kLanes]) {
  const Source& s = i.src[k];
  if (s.kind == Kind::vector) {
    u32 words[1][kLanes];
    read_words(w, s, words);
    std::memcpy(out, words[0], sizeof words[0]);
  } else {
    const u32 value =
        s.kind == Kind::scalar ? w.scalar(s.index) : static_cast<u32>(constant_bits<u32>(w, s));
    for (auto& one : out) one = value;
  }
}
void float_of_byte(Wave& w, const Inst& i) {
  u32 a[kLanes];
  float d[kLanes];
  raw(w, i, 0, a);
  const int shift = 8 * byte_of(w, i);
  for (int lane = 0; lane < kLanes; ++lane)
    d[lane] = static_cast<float>(decode(eight(w, i), (a[lane] >> shift) & 0xff));
  write(w, i, d);
}
void floats_of_pair(Wave& w, const Inst& i) {
  u32 a[kLanes];
  u64 d[kLanes];
  raw(w, i, 0, a);
  const bool high = i.sdwa ? i.at(kF_src0_sel) == 5 : (i.opsel & 1) != 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const u32 pair = high ? a[lane] >> 16 : a[lane];
    const auto one = [&](u32 bits) {
      return u64{float_bits(static_cast<float>(decode(eight(w, i), bits & 0xff)))};
    };
    d[lane] = one(pair) | one(pair >> 8) << 32;
  }
  write(w, i, d);
}
// Parts of 32-bit destinations; the rest is kept.
void write_part(Wave& w, const Inst& i, const u32 (&value)[kLanes], int shift, u32 ones) {
  w.touch_vector(i.vdst, 1, true);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (((w.exec >> lane) & 1) == 0) continue;
    u32& word = w.v[i.vdst][lane];
    word = (word & ~(ones << shift)) | (value[lane] & ones) << shift;
  }
}
// Bit FP16_OVFL of the mode register: clamp to the largest instead of infinity or NaN.
bool fp8_saturates(const Wave& w) { return ((w.mode >> 23) & 1) != 0; }
void pair_of_floats(Wave& w, const Inst& i) {
  float a[kLanes], b[kLanes];
  u32 d[kLanes];
  read(w, i, 0, a);
  read(w, i, 1, b);
  for (int lane = 0; lane < kLanes; ++lane) {
    d[lane] = encode(eight(w, i), a[lane], fp8_saturates(w)) |
              encode(eight(w, i), b[lane], fp8_saturates(w)) << 8;
  }
  write_part(w, i, d, (i.opsel & 8) != 0 ? 16 : 0, 0xffff);
}
void byte_of_float(Wave& w, const Inst& i) {
  float a[kLanes];
  u32 b[kLanes], d[kLanes];
  read(w, i, 0, a);
  read(w, i, 1, b);
  for (int lane = 0; lane < kLanes; ++lane)
    d[lane] = encode(eight(w, i), a[lane], fp8_saturates(w), b[lane]);
  write_part(w, i, d, 8 * ((i.opsel >> 2) & 3), 0xff);
}

// gfx950's conversions with a scale: a power of two, whose exponent is that of a float.
double scale_of(float s) { return std::ldexp(1.0, exponent_of(s) - 127); }
enum Wide : u8 { kToF32, kToF16, kToBf16 };
u32 narrow(int to, double value) {
  return to == kToF16 ? float_half(value) : float_bfloat(static_cast<float>(value));
}
double widen(int from, u32 bits) {
  return from == kToF16 ? static_cast<double>(half_float(bits))
                        : static_cast<double>(bfloat_float(bits & 0xffff));
}
// note: bits 0 .. 1 the small format (0 fp8, 1 bf8, 2 fp4), 2 .. 3 the wide one.
const Format& small_format(const Wave& w, const Inst& i) {
  const int which = i.note & 3;
  return which == 2 ? kE2m1 : which == 1 ? bf8(w) : fp8(w);
}
void scaled_pair_out(Wave& w, const Inst& i) {
  u32 a[kLanes];
  float s[kLanes];
  raw(w, i, 0, a);
  read(w, i, 1, s);
  const Format& format = small_format(w, i);
  const bool fp4 = (i.note & 3) == 2;
  const int to = (i.note >> 2) & 3;
  const int shift = fp4 ? 8 * (i.opsel & 3) : 16 * (i.opsel & 1);
  const int bits = fp4 ? 4 : 8;
  u64 wide[kLanes];
  u32 both[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    const u32 part = a[lane] >> shift, ones = (1u << bits) - 1;
    const double scale = scale_of(s[lane]);
    const double low = decode(format, part & ones) * scale;
    const double high = decode(format, (part >> bits) & ones) * scale;
    if (to == kToF32) {
      wide[lane] = float_bits(static_cast<float>(low)) | u64{float_bits(static_cast<float>(high))}
                                                             << 32;
    } else {
      both[lane] = narrow(to, low) | narrow(to, high) << 16;
    }
  }
  if (to == kToF32) {
    write(w, i, wide);
  } else {
    write(w, i, both);
  }
}
void scaled_one_out(Wave& w, const Inst& i) {
  u32 a[kLanes];
  float s[kLanes], d[kLanes];
  raw(w, i, 0, a);
  read(w, i, 1, s);
  const int shift = 8 * (i.opsel & 3);
  for (int lane = 0; lane < kLanes; ++lane) {
    d[lane] = static_cast<float>(decode(small_format(w, i), (a[lane] >> shift) & 0xff) *
                                 scale_of(s[lane]));
  }
  write(w, i, d);
}
void scaled_pair_in(Wave& w, const Inst& i) {
  const bool fp4 = (i.note & 3) == 2;
  const int from = (i.note >> 2) & 3;
  const Format& format = small_format(w, i);
  float a[kLanes], b[kLanes], s[kLanes];
  u32 packed[kLanes], d[kLanes];
  if (from == kToF32) {
    read(w, i, 0, a);
    read(w, i, 1, b);
    read(w, i, 2, s);
  } else {
    raw(w, i, 0, packed);
    read(w, i, 1, s);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const double scale = scale_of(s[lane]);
    const double low = from == kToF32 ? a[lane] : widen(from, packed[lane]);
    const double high = from == kToF32 ? b[lane] : widen(from, packed[lane] >> 16);
    const bool saturates = fp4 || fp8_saturates(w);
    d[lane] = encode(format, low / scale, saturates) | encode(format, high / scale, saturates)
                                                           << (fp4 ? 4 : 8);
  }
  if (fp4) {
    write_part(w, i, d, 8 * ((i.opsel >> 2) & 3), 0xff);
  } else {
    write_part(w, i, d, (i.opsel & 8) != 0 ? 16 : 0, 0xffff);
  }
}

// Packed operations. A half of a 32-bit source each, chosen by opsel and opsel_hi.
bool high_for(const Inst& i, int k, bool of_high) {
  if (!of_high) return (i.opsel >> k) & 1;
  return k == 2 ? i.bit(kF_opsel_hi2) != 0 : ((i.at(kF_opsel_hi) >> k) & 1) != 0;
}
bool negated(const Inst& i, int k, bool of_high) {
  return ((of_high ? i.at(kF_neg_hi) : i.at(kF_neg)) >> k) & 1;
}
u32 word_of(const Wave& w, const Source& s, int lane, int word) {
  if (s.kind == Kind::vector) return w.v[s.index + word][lane];
  if (s.kind == Kind::scalar) return w.scalar(s.index + word);
  return word == 0 ? static_cast<u32>(constant_bits<u32>(w, s)) : 0;
}
template <int kSources, class F>
void packed_floats(Wave& w, const Inst& i, F f) {
  for (int k = 0; k < kSources; ++k)
    if (i.src[k].kind == Kind::vector) w.touch_vector(i.src[k].index, 2, false);
  u64 d[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    u32 halves[2];
    for (int half = 0; half < 2; ++half) {
      float x[3] = {0, 0, 0};
      for (int k = 0; k < kSources; ++k) {
        // A constant is the same in both halves.
        const bool constant = i.src[k].kind == Kind::constant;
        const int word = !constant && high_for(i, k, half == 1) ? 1 : 0;
        x[k] = bits_float(word_of(w, i.src[k], lane, word));
        if (negated(i, k, half == 1)) x[k] = -x[k];
      }
      float y = f(x[0], x[1], x[2]);
      if (i.clamp != 0) y = y > 0 ? std::min(y, 1.0f) : 0.0f;
      halves[half] = float_bits(y);
    }
    d[lane] = halves[0] | u64{halves[1]} << 32;
  }
  write(w, i, d, false, true);
}
template <class T>
u32 half_of(const Wave& w, const Inst& i, int k, int lane, bool of_high) {
  const Source& s = i.src[k];
  if (s.kind == Kind::constant && s.index != 255) {
    // An inline constant of halves lies in the low one, the high one is 0; of integers it is the
    // same 32 bits as for a word, so 0.5 has its bits in the high half.
    const u32 bits =
        static_cast<u32>(kIsFloat<T> ? constant_bits<u16>(w, s) : constant_bits<u32>(w, s));
    return (high_for(i, k, of_high) ? bits >> 16 : bits) & 0xffff;
  }
  const u32 word = word_of(w, s, lane, 0);
  return (high_for(i, k, of_high) ? word >> 16 : word) & 0xffff;
}
template <class T, int kSources, class F>
void packed_halves(Wave& w, const Inst& i, F f) {
  for (int k = 0; k < kSources; ++k)
    if (i.src[k].kind == Kind::vector) w.touch_vector(i.src[k].index, 1, false);
  u32 d[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    u32 out = 0;
    for (int half = 0; half < 2; ++half) {
      decltype(number(T{})) x[3] = {};
      for (int k = 0; k < kSources; ++k) {
        x[k] = number(of_bits<T>(half_of<T>(w, i, k, lane, half == 1)));
        if constexpr (kIsFloat<T>) {
          if (negated(i, k, half == 1)) x[k] = -x[k];
        }
      }
      auto y = f(x[0], x[1], x[2]);
      if constexpr (kIsFloat<T>) {
        if (i.clamp != 0) y = y > 0 ? std::min(y, decltype(y){1}) : decltype(y){0};
      }
      const u32 bits = static_cast<u32>(to_bits(result<T>(y))) & 0xffff;
      out |= half == 0 ? bits : bits << 16;
    }
    d[lane] = out;
  }
  if (!kIsFloat<T> && i.clamp != 0) w.fault("clamp is not modelled here");
  write(w, i, d, false, true);
}
// f32 or f16 sources, by opsel_hi, and an fma of them.
void mixed(Wave& w, const Inst& i) {
  for (int k = 0; k < 3; ++k)
    if (i.src[k].kind == Kind::vector) w.touch_vector(i.src[k].index, 1, false);
  float d[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    float x[3];
    for (int k = 0; k < 3; ++k) {
      const bool half = high_for(i, k, true);
      const u32 word = word_of(w, i.src[k], lane, 0);
      x[k] = half ? half_float((i.opsel >> k) & 1 ? word >> 16 : word) : bits_float(word);
      if ((i.at(kF_neg_hi) >> k) & 1) x[k] = std::fabs(x[k]);  // the field means abs here
      if ((i.at(kF_neg) >> k) & 1) x[k] = -x[k];
    }
    d[lane] = std::fma(x[0], x[1], x[2]);
    if (i.clamp != 0) d[lane] = d[lane] > 0 ? std::min(d[lane], 1.0f) : 0.0f;
  }
  if (i.note == 0) {
    Inst plain = i;
    plain.clamp = 0;
    write(w, plain, d);
    return;
  }
  u32 bits[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) bits[lane] = float_half(d[lane]);
  write_part(w, i, bits, i.note == 2 ? 16 : 0, 0xffff);
}
template <class F>
void dot2(Wave& w, const Inst& i, F of_bits16, bool into_destination) {
  u32 a[kLanes], b[kLanes];
  float c[kLanes];
  raw(w, i, 0, a);
  raw(w, i, 1, b);
  if (into_destination) {
    read_destination(w, i, c);
  } else {
    u32 words[kLanes];
    raw(w, i, 2, words);
    for (int lane = 0; lane < kLanes; ++lane) c[lane] = bits_float(words[lane]);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const double low = static_cast<double>(of_bits16(a[lane] & 0xffff)) *
                       static_cast<double>(of_bits16(b[lane] & 0xffff));
    const double high = static_cast<double>(of_bits16(a[lane] >> 16)) *
                        static_cast<double>(of_bits16(b[lane] >> 16));
    c[lane] = static_cast<float>(low + high + static_cast<double>(c[lane]));
  }
  write(w, i, c);
}
template <class T, int kBits>
void dot_ints(Wave& w, const Inst& i, bool into_destination) {
  u32 a[kLanes], b[kLanes], d[kLanes];
  raw(w, i, 0, a);
  raw(w, i, 1, b);
  if (into_destination) {
    read_destination(w, i, d);
  } else {
    raw(w, i, 2, d);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int at = 0; at < 32; at += kBits) {
      const auto part = [&](u32 word) -> i64 {
        const u32 top = word << (32 - kBits - at);
        return std::is_signed_v<T> ? i64{static_cast<i32>(top) >> (32 - kBits)}
                                   : i64{top >> (32 - kBits)};
      };
      d[lane] += static_cast<u32>(part(a[lane]) * part(b[lane]));
    }
  }
  write(w, i, d);
}

void read_lane(Wave& w, const Inst& i) {
  const Source& s = i.src[0];
  const int lane = static_cast<int>(read_scalar<u32>(w, i.src[1]) & 63);
  if (s.kind != Kind::vector) w.fault("v_readlane_b32 of no vector register");
  w.touch_vector(s.index, 1, false);
  w.set_scalar(i.vdst, w.v[s.index][lane]);
}
void read_first_lane(Wave& w, const Inst& i) {
  const Source& s = i.src[0];
  const int lane = w.exec == 0 ? 0 : std::countr_zero(w.exec);
  if (s.kind != Kind::vector) {
    w.set_scalar(i.vdst, read_scalar<u32>(w, s));
    return;
  }
  w.touch_vector(s.index, 1, false);
  w.set_scalar(i.vdst, w.v[s.index][lane]);
}
void write_lane(Wave& w, const Inst& i) {
  const int lane = static_cast<int>(read_scalar<u32>(w, i.src[1]) & 63);
  w.touch_vector(i.vdst, 1, true);
  w.v[i.vdst][lane] = read_scalar<u32>(w, i.src[0]);
}
void swap_lanes(Wave& w, const Inst& i, int step) {
  const int other = i.src[0].index;
  w.touch_vector(i.vdst, 1, true);
  w.touch_vector(other, 1, true);
  for (int lane = 0; lane < kLanes; ++lane)
    if ((lane & step) == 0) std::swap(w.v[other][lane], w.v[i.vdst][lane + step]);
}
void count_bits_below(Wave& w, const Inst& i, bool high) {
  u32 a[kLanes], b[kLanes], d[kLanes];
  read(w, i, 0, a);
  read(w, i, 1, b);
  for (int lane = 0; lane < kLanes; ++lane) {
    const u64 below = (1ull << lane) - 1;
    const u32 mask = static_cast<u32>(high ? below >> 32 : below);
    d[lane] = b[lane] + static_cast<u32>(std::popcount(a[lane] & mask));
  }
  write(w, i, d);
}
template <class T>
void select(Wave& w, const Inst& i) {
  T a[kLanes], b[kLanes], d[kLanes];
  read(w, i, 0, a);
  read(w, i, 1, b);
  const u64 mask = carry_in(w, i);
  for (int lane = 0; lane < kLanes; ++lane) d[lane] = (mask >> lane) & 1 ? b[lane] : a[lane];
  write(w, i, d);
}
template <class T, class Wide>
void multiply_add_wide(Wave& w, const Inst& i) {
  T a[kLanes], b[kLanes];
  Wide c[kLanes], d[kLanes];
  read(w, i, 0, a);
  read(w, i, 1, b);
  read(w, i, 2, c);
  u64 carry = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const __int128 wide = static_cast<__int128>(a[lane]) * b[lane] + c[lane];
    d[lane] = static_cast<Wide>(wide);
    if (wide != static_cast<__int128>(d[lane])) carry |= 1ull << lane;
  }
  write(w, i, d);
  w.set_scalar64(mask_destination(i), carry & w.exec);
}
template <class T>
void bit_operation(Wave& w, const Inst& i) {
  const u32 table = static_cast<u32>(i.omod) << 6 | static_cast<u32>(i.at(kF_abs)) << 3 |
                    static_cast<u32>(i.at(kF_neg));
  Inst plain = i;
  plain.omod = 0;
  for (auto& s : plain.src) s.neg = s.abs = false;
  ternary<T, T, T, T>(w, plain, [&](u32 a, u32 b, u32 c) {
    u32 out = 0;
    for (u32 row = 0; row < 8; ++row) {
      if (((table >> row) & 1) == 0) continue;
      out |= ((row & 4) != 0 ? a : ~a) & ((row & 2) != 0 ? b : ~b) & ((row & 1) != 0 ? c : ~c);
    }
    return out;
  });
}
u32 byte_difference(u32 a, u32 b) {
  u32 sum = 0;
  for (int at = 0; at < 32; at += 8) {
    const i32 d = static_cast<i32>((a >> at) & 0xff) - static_cast<i32>((b >> at) & 0xff);
    sum += static_cast<u32>(d < 0 ? -d : d);
  }
  return sum;
}
float fraction(float x) {
  const float f = x - std::floor(x);
  return std::min(f, bits_float(0x3f7fffff));
}
u32 toward_zero_half(float x) {
  u32 code = float_half(x);
  if (std::isfinite(x) && std::fabs(half_float(code)) > std::fabs(x)) --code;
  return code;
}

#define UN(name, D, A, expression) \
  add(name, [](Wave& w, const Inst& i) { unary<D, A>(w, i, [](auto a) { return expression; }); })
#define BIN(name, D, A, B, expression)                                \
  add(name, [](Wave& w, const Inst& i) {                              \
    binary<D, A, B>(w, i, [](auto a, auto b) { return expression; }); \
  })
#define TER(name, D, A, B, C, expression)                                         \
  add(name, [](Wave& w, const Inst& i) {                                          \
    ternary<D, A, B, C>(w, i, [](auto a, auto b, auto c) { return expression; }); \
  })
#define TER_KEEPS(name, D, A, B, C, expression)                                         \
  add(name, [](Wave& w, const Inst& i) {                                                \
    ternary<D, A, B, C>(w, i, [](auto a, auto b, auto c) { return expression; }, true); \
  })
#define SAT(name, T, expression) \
  add(name,                      \
      [](Wave& w, const Inst& i) { saturates<T>(w, i, [](i64 a, i64 b) { return expression; }); })
#define CARRY(name, takes, expression)                                                        \
  add(name, [](Wave& w, const Inst& i) {                                                      \
    with_carry(w, i, takes, [](u64 a, u64 b, [[maybe_unused]] u64 c) { return expression; }); \
  })
#define APPROX(name, expression) \
  add(name, [](Wave& w, const Inst& i) { approximate(w, i, [](double a) { return expression; }); })

void add_moves() {
  UN("v_mov_b32", u32, u32, a);
  UN("v_mov_b64", u64, u64, a);
  UN("v_accvgpr_read", u32, u32, a);
  UN("v_accvgpr_write", u32, u32, a);
  UN("v_accvgpr_mov_b32", u32, u32, a);
  add("v_nop", [](Wave&, const Inst&) {});
  add("v_readfirstlane_b32", read_first_lane);
  add("v_readlane_b32", read_lane);
  add("v_writelane_b32", write_lane);
  add("v_swap_b32", [](Wave& w, const Inst& i) {
    const int other = i.src[0].index;
    w.touch_vector(i.vdst, 1, true);
    w.touch_vector(other, 1, true);
    for (int lane = 0; lane < kLanes; ++lane)
      if ((w.exec >> lane) & 1) std::swap(w.v[other][lane], w.v[i.vdst][lane]);
  });
  add("v_permlane16_swap_b32", [](Wave& w, const Inst& i) { swap_lanes(w, i, 16); });
  add("v_permlane32_swap_b32", [](Wave& w, const Inst& i) { swap_lanes(w, i, 32); });
  // Read as floats: the encodings allow abs and neg.
  add("v_cndmask_b32", select<float>);
  add("v_mbcnt_lo_u32_b32", [](Wave& w, const Inst& i) { count_bits_below(w, i, false); });
  add("v_mbcnt_hi_u32_b32", [](Wave& w, const Inst& i) { count_bits_below(w, i, true); });
  add("v_pk_mov_b32", [](Wave& w, const Inst& i) {
    for (int k = 0; k < 2; ++k)
      if (i.src[k].kind == Kind::vector) w.touch_vector(i.src[k].index, 2, false);
    u64 d[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto part = [&](int k) {
        const bool high = i.src[k].kind != Kind::constant && ((i.opsel >> k) & 1);
        return u64{word_of(w, i.src[k], lane, high ? 1 : 0)};
      };
      d[lane] = part(0) | part(1) << 32;
    }
    write(w, i, d);
  });
}

void add_integers() {
  SAT("v_add_u32", u32, a + b);
  SAT("v_sub_u32", u32, a - b);
  SAT("v_subrev_u32", u32, b - a);
  SAT("v_add_i32", i32, a + b);
  SAT("v_sub_i32", i32, a - b);
  SAT("v_add_u16", u16, a + b);
  SAT("v_sub_u16", u16, a - b);
  SAT("v_subrev_u16", u16, b - a);
  SAT("v_add_i16", i16, a + b);
  SAT("v_sub_i16", i16, a - b);
  CARRY("v_add_co_u32", false, a + b);
  CARRY("v_sub_co_u32", false, a - b);
  CARRY("v_subrev_co_u32", false, b - a);
  CARRY("v_addc_co_u32", true, a + b + c);
  CARRY("v_subb_co_u32", true, a - b - c);
  CARRY("v_subbrev_co_u32", true, b - a - c);
  BIN("v_mul_lo_u32", u32, u32, u32, a * b);
  BIN("v_mul_hi_u32", u32, u32, u32, (u64{a} * u64{b}) >> 32);
  BIN("v_mul_hi_i32", i32, i32, i32, (i64{a} * i64{b}) >> 32);
  BIN("v_mul_u32_u24", u32, u32, u32, low24(a) * low24(b));
  BIN("v_mul_i32_i24", i32, i32, i32, i64{signed24(a)} * signed24(b));
  BIN("v_mul_hi_u32_u24", u32, u32, u32, (u64{low24(a)} * low24(b)) >> 32);
  BIN("v_mul_hi_i32_i24", i32, i32, i32, (i64{signed24(a)} * signed24(b)) >> 32);
  BIN("v_mul_lo_u16", u16, u16, u16, u32{a} * u32{b});
  BIN("v_min_i32", i32, i32, i32, std::min(a, b));
  BIN("v_max_i32", i32, i32, i32, std::max(a, b));
  BIN("v_min_u32", u32, u32, u32, std::min(a, b));
  BIN("v_max_u32", u32, u32, u32, std::max(a, b));
  BIN("v_min_i16", i16, i16, i16, std::min(a, b));
  BIN("v_max_i16", i16, i16, i16, std::max(a, b));
  BIN("v_min_u16", u16, u16, u16, std::min(a, b));
  BIN("v_max_u16", u16, u16, u16, std::max(a, b));
  BIN("v_and_b32", u32, u32, u32, a & b);
  BIN("v_or_b32", u32, u32, u32, a | b);
  BIN("v_xor_b32", u32, u32, u32, a ^ b);
  BIN("v_xnor_b32", u32, u32, u32, ~(a ^ b));
  BIN("v_lshlrev_b32", u32, u32, u32, b << (a & 31));
  BIN("v_lshrrev_b32", u32, u32, u32, b >> (a & 31));
  BIN("v_ashrrev_i32", i32, u32, i32, b >> (a & 31));
  BIN("v_lshlrev_b64", u64, u32, u64, b << (a & 63));
  BIN("v_lshrrev_b64", u64, u32, u64, b >> (a & 63));
  BIN("v_ashrrev_i64", i64, u32, i64, b >> (a & 63));
  BIN("v_lshlrev_b16", u16, u16, u16, b << (a & 15));
  BIN("v_lshrrev_b16", u16, u16, u16, b >> (a & 15));
  BIN("v_ashrrev_i16", i16, u16, i16, b >> (a & 15));
  BIN("v_bcnt_u32_b32", u32, u32, u32, static_cast<u32>(std::popcount(a)) + b);
  BIN("v_bfm_b32", u32, u32, u32, ((1u << (a & 31)) - 1) << (b & 31));
  BIN("v_cvt_pk_u16_u32", u32, u32, u32, std::min(a, u32{0xffff}) | std::min(b, u32{0xffff}) << 16);
  BIN("v_cvt_pk_i16_i32", u32, i32, i32,
      (static_cast<u32>(std::clamp(a, -32768, 32767)) & 0xffff) |
          static_cast<u32>(std::clamp(b, -32768, 32767)) << 16);
  UN("v_not_b32", u32, u32, ~a);
  UN("v_bfrev_b32", u32, u32, ([](u32 x) {
       u32 out = 0;
       for (int bit = 0; bit < 32; ++bit) out |= ((x >> bit) & 1) << (31 - bit);
       return out;
     })(a));
  UN("v_ffbh_u32", u32, u32, a == 0 ? ~0u : static_cast<u32>(std::countl_zero(a)));
  UN("v_ffbl_b32", u32, u32, a == 0 ? ~0u : static_cast<u32>(std::countr_zero(a)));
  UN("v_ffbh_i32", u32, u32,
     static_cast<i32>(a) == 0 || static_cast<i32>(a) == -1
         ? ~0u
         : static_cast<u32>(std::countl_zero(static_cast<i32>(a) < 0 ? ~a : a)));
  TER("v_bfe_u32", u32, u32, u32, u32, (a >> (b & 31)) & ((1u << (c & 31)) - 1));
  TER("v_bfe_i32", i32, i32, u32, u32,
      (c & 31) == 0 ? 0
                    : static_cast<i32>(static_cast<u32>(a >> (b & 31)) << (32 - (c & 31))) >>
                          (32 - (c & 31)));
  TER("v_bfi_b32", u32, u32, u32, u32, (a & b) | (~a & c));
  TER("v_alignbit_b32", u32, u32, u32, u32,
      static_cast<u32>((static_cast<u64>(a) << 32 | b) >> (c & 31)));
  TER("v_alignbyte_b32", u32, u32, u32, u32,
      static_cast<u32>((static_cast<u64>(a) << 32 | b) >> (8 * (c & 3))));
  TER("v_perm_b32", u32, u32, u32, u32, permuted(a, b, c));
  TER("v_min3_i32", i32, i32, i32, i32, std::min(std::min(a, b), c));
  TER("v_max3_i32", i32, i32, i32, i32, std::max(std::max(a, b), c));
  TER("v_med3_i32", i32, i32, i32, i32, middle_int(a, b, c));
  TER("v_min3_u32", u32, u32, u32, u32, std::min(std::min(a, b), c));
  TER("v_max3_u32", u32, u32, u32, u32, std::max(std::max(a, b), c));
  TER("v_med3_u32", u32, u32, u32, u32, middle_int(a, b, c));
  TER("v_min3_i16", i16, i16, i16, i16, std::min(std::min(a, b), c));
  TER("v_max3_i16", i16, i16, i16, i16, std::max(std::max(a, b), c));
  TER("v_med3_i16", i16, i16, i16, i16, middle_int(a, b, c));
  TER("v_min3_u16", u16, u16, u16, u16, std::min(std::min(a, b), c));
  TER("v_max3_u16", u16, u16, u16, u16, std::max(std::max(a, b), c));
  TER("v_med3_u16", u16, u16, u16, u16, middle_int(a, b, c));
  TER("v_lshl_add_u32", u32, u32, u32, u32, (a << (b & 31)) + c);
  TER("v_add_lshl_u32", u32, u32, u32, u32, (a + b) << (c & 31));
  TER("v_lshl_or_b32", u32, u32, u32, u32, (a << (b & 31)) | c);
  TER("v_and_or_b32", u32, u32, u32, u32, (a & b) | c);
  TER("v_or3_b32", u32, u32, u32, u32, a | b | c);
  TER("v_add3_u32", u32, u32, u32, u32, a + b + c);
  TER("v_xad_u32", u32, u32, u32, u32, (a ^ b) + c);
  TER("v_mad_u32_u24", u32, u32, u32, u32, low24(a) * low24(b) + c);
  TER("v_mad_i32_i24", u32, i32, i32, u32, static_cast<u32>(i64{signed24(a)} * signed24(b)) + c);
  TER("v_mad_u32_u16", u32, u16, u16, u32, u32{a} * u32{b} + c);
  TER("v_mad_i32_i16", u32, i16, i16, u32, static_cast<u32>(i32{a} * i32{b}) + c);
  TER_KEEPS("v_mad_u16", u16, u16, u16, u16, u32{a} * u32{b} + c);
  TER_KEEPS("v_mad_i16", i16, i16, i16, i16, i32{a} * i32{b} + c);
  TER("v_mad_legacy_u16", u16, u16, u16, u16, u32{a} * u32{b} + c);
  TER("v_mad_legacy_i16", i16, i16, i16, i16, i32{a} * i32{b} + c);
  TER("v_sad_u8", u32, u32, u32, u32, byte_difference(a, b) + c);
  TER("v_sad_u32", u32, u32, u32, u32, (a > b ? a - b : b - a) + c);
  TER("v_lshl_add_u64", u64, u64, u32, u64, (a << (b & 7)) + c);
  add("v_mad_u64_u32", multiply_add_wide<u32, u64>);
  add("v_mad_i64_i32", multiply_add_wide<i32, i64>);
  add("v_bitop3_b32", bit_operation<u32>);
  add("v_bitop3_b16", bit_operation<u16>);
  UN("v_prng_b32", u32, u32, (a << 1) ^ ((a >> 31) != 0 ? 197u : 0u));
}

void add_floats() {
  BIN("v_add_f32", float, float, float, a + b);
  BIN("v_sub_f32", float, float, float, a - b);
  BIN("v_subrev_f32", float, float, float, b - a);
  BIN("v_mul_f32", float, float, float, a* b);
  BIN("v_mul_legacy_f32", float, float, float, a == 0 || b == 0 ? 0.0f : a * b);
  BIN("v_min_f32", float, float, float, quiet_min(a, b));
  BIN("v_max_f32", float, float, float, quiet_max(a, b));
  BIN("v_add_f64", double, double, double, a + b);
  BIN("v_mul_f64", double, double, double, a* b);
  BIN("v_min_f64", double, double, double, std::fmin(a, b));
  BIN("v_max_f64", double, double, double, std::fmax(a, b));
  BIN("v_ldexp_f32", float, float, i32, std::ldexp(a, std::clamp(b, -10000, 10000)));
  BIN("v_ldexp_f64", double, double, i32, std::ldexp(a, std::clamp(b, -10000, 10000)));
  BIN("v_add_f16", Half, Half, Half, a + b);
  BIN("v_sub_f16", Half, Half, Half, a - b);
  BIN("v_subrev_f16", Half, Half, Half, b - a);
  BIN("v_mul_f16", Half, Half, Half, a * b);
  BIN("v_min_f16", Half, Half, Half, quiet_min(a, b));
  BIN("v_max_f16", Half, Half, Half, quiet_max(a, b));
  BIN("v_ldexp_f16", Half, Half, i16, std::ldexp(a, b));
  TER("v_fma_f32", float, float, float, float, std::fma(a, b, c));
  TER("v_fma_f64", double, double, double, double, std::fma(a, b, c));
  TER_KEEPS("v_fma_f16", Half, Half, Half, Half, std::fma(a, b, c));
  TER("v_min3_f32", float, float, float, float, quiet_min(quiet_min(a, b), c));
  TER("v_max3_f32", float, float, float, float, quiet_max(quiet_max(a, b), c));
  TER("v_med3_f32", float, float, float, float, middle(a, b, c));
  TER("v_min3_f16", Half, Half, Half, Half, quiet_min(quiet_min(a, b), c));
  TER("v_max3_f16", Half, Half, Half, Half, quiet_max(quiet_max(a, b), c));
  TER("v_med3_f16", Half, Half, Half, Half, middle(a, b, c));
  TER("v_minimum3_f32", float, float, float, float,
      std::isnan(a + b + c) ? std::numeric_limits<float>::quiet_NaN()
                            : quiet_min(quiet_min(a, b), c));
  TER("v_maximum3_f32", float, float, float, float,
      std::isnan(a + b + c) ? std::numeric_limits<float>::quiet_NaN()
                            : quiet_max(quiet_max(a, b), c));
  add("v_fmac_f32", [](Wave& w, const Inst& i) {
    float a[kLanes], b[kLanes], c[kLanes];
    read(w, i, 0, a);
    read(w, i, 1, b);
    read_destination(w, i, c);
    for (int lane = 0; lane < kLanes; ++lane) c[lane] = std::fma(a[lane], b[lane], c[lane]);
    write(w, i, c);
  });
  add("v_fmac_f64", [](Wave& w, const Inst& i) {
    double a[kLanes], b[kLanes], c[kLanes];
    read(w, i, 0, a);
    read(w, i, 1, b);
    read_destination(w, i, c);
    for (int lane = 0; lane < kLanes; ++lane) c[lane] = std::fma(a[lane], b[lane], c[lane]);
    write(w, i, c);
  });
  add("v_fmamk_f32", [](Wave& w, const Inst& i) {  // a * literal + b
    float a[kLanes], b[kLanes];
    read(w, i, 0, a);
    read(w, i, 1, b);
    const float k = bits_float(static_cast<u32>(i.at(kF_literal)));
    for (int lane = 0; lane < kLanes; ++lane) b[lane] = std::fma(a[lane], k, b[lane]);
    write(w, i, b);
  });
  add("v_fmaak_f32", [](Wave& w, const Inst& i) {  // a * b + literal
    float a[kLanes], b[kLanes];
    read(w, i, 0, a);
    read(w, i, 1, b);
    const float k = bits_float(static_cast<u32>(i.at(kF_literal)));
    for (int lane = 0; lane < kLanes; ++lane) b[lane] = std::fma(a[lane], b[lane], k);
    write(w, i, b);
  });
  UN("v_trunc_f32", float, float, std::trunc(a));
  UN("v_ceil_f32", float, float, std::ceil(a));
  UN("v_floor_f32", float, float, std::floor(a));
  UN("v_rndne_f32", float, float, std::nearbyint(a));
  UN("v_fract_f32", float, float, fraction(a));
  UN("v_trunc_f64", double, double, std::trunc(a));
  UN("v_ceil_f64", double, double, std::ceil(a));
  UN("v_floor_f64", double, double, std::floor(a));
  UN("v_rndne_f64", double, double, std::nearbyint(a));
  UN("v_trunc_f16", Half, Half, std::trunc(a));
  UN("v_ceil_f16", Half, Half, std::ceil(a));
  UN("v_floor_f16", Half, Half, std::floor(a));
  UN("v_rndne_f16", Half, Half, std::nearbyint(a));
  UN("v_sqrt_f16", Half, Half, std::sqrt(a));
  UN("v_rcp_f16", Half, Half, 1.0 / a);
  UN("v_rsq_f16", Half, Half, 1.0 / std::sqrt(static_cast<double>(a)));
  UN("v_exp_f16", Half, Half, std::exp2(static_cast<double>(a)));
  UN("v_log_f16", Half, Half, std::log2(static_cast<double>(a)));
  APPROX("v_exp_f32", std::exp2(a));
  APPROX("v_log_f32", std::log2(a));
  APPROX("v_rcp_f32", 1.0 / a);
  APPROX("v_rcp_iflag_f32", 1.0 / a);
  APPROX("v_rsq_f32", 1.0 / std::sqrt(a));
  APPROX("v_sqrt_f32", std::sqrt(a));
  APPROX("v_sin_f32", std::sin((a - std::floor(a)) * 6.283185307179586477));
  APPROX("v_cos_f32", std::cos((a - std::floor(a)) * 6.283185307179586477));
  UN("v_rcp_f64", double, double, 1.0 / a);
  UN("v_rsq_f64", double, double, 1.0 / std::sqrt(a));
  UN("v_sqrt_f64", double, double, std::sqrt(a));
  UN("v_frexp_mant_f32", float, float, ([](float x) {
       int e = 0;
       return std::isfinite(x) ? std::frexp(x, &e) : x;
     })(a));
  UN("v_frexp_exp_i32_f32", i32, float, ([](float x) {
       int e = 0;
       if (std::isfinite(x)) std::frexp(x, &e);
       return e;
     })(a));
  UN("v_frexp_mant_f64", double, double, ([](double x) {
       int e = 0;
       return std::isfinite(x) ? std::frexp(x, &e) : x;
     })(a));
  UN("v_frexp_exp_i32_f64", i32, double, ([](double x) {
       int e = 0;
       if (std::isfinite(x)) std::frexp(x, &e);
       return e;
     })(a));
  add("v_div_scale_f32", [](Wave& w, const Inst& i) {
    div_scale<float>(w, i, 96, 64, 23, std::numeric_limits<float>::min());
  });
  add("v_div_scale_f64", [](Wave& w, const Inst& i) {
    div_scale<double>(w, i, 768, 128, 53, std::numeric_limits<double>::min());
  });
  add("v_div_fmas_f32", [](Wave& w, const Inst& i) { div_fmas<float>(w, i, 64, 127); });
  add("v_div_fmas_f64", [](Wave& w, const Inst& i) { div_fmas<double>(w, i, 128, 1023); });
  TER("v_div_fixup_f32", float, float, float, float, div_fixup(a, b, c, 150, 255));
  TER("v_div_fixup_f64", double, double, double, double, div_fixup(a, b, c, 1075, 2047));
}

void add_conversions() {
  UN("v_cvt_f32_i32", float, i32, a);
  UN("v_cvt_f32_u32", float, u32, a);
  UN("v_cvt_i32_f32", i32, float, to_integer<i32>(a));
  UN("v_cvt_u32_f32", u32, float, to_integer<u32>(a));
  UN("v_cvt_flr_i32_f32", i32, float, to_integer<i32>(std::floor(a)));
  UN("v_cvt_rpi_i32_f32", i32, float, to_integer<i32>(std::floor(a + 0.5)));
  UN("v_cvt_f64_f32", double, float, a);
  UN("v_cvt_f32_f64", float, double, a);
  UN("v_cvt_f64_i32", double, i32, a);
  UN("v_cvt_f64_u32", double, u32, a);
  UN("v_cvt_i32_f64", i32, double, to_integer<i32>(a));
  UN("v_cvt_u32_f64", u32, double, to_integer<u32>(a));
  UN("v_cvt_f16_f32", Half, float, a);
  UN("v_cvt_f32_f16", float, Half, a);
  UN("v_cvt_f16_u16", Half, u16, a);
  UN("v_cvt_f16_i16", Half, i16, a);
  UN("v_cvt_u16_f16", u16, Half, to_integer<u16>(a));
  UN("v_cvt_i16_f16", i16, Half, to_integer<i16>(a));
  UN("v_cvt_f32_ubyte0", float, u32, a & 0xff);
  UN("v_cvt_f32_ubyte1", float, u32, (a >> 8) & 0xff);
  UN("v_cvt_f32_ubyte2", float, u32, (a >> 16) & 0xff);
  UN("v_cvt_f32_ubyte3", float, u32, a >> 24);
  UN("v_cvt_f32_bf16", u32, u16, static_cast<u32>(a) << 16);
  BIN("v_cvt_pk_bf16_f32", u32, float, float, float_bfloat(a) | float_bfloat(b) << 16);
  BIN("v_cvt_pk_f16_f32", u32, float, float, float_half(a) | float_half(b) << 16);
  BIN("v_cvt_pkrtz_f16_f32", u32, float, float, toward_zero_half(a) | toward_zero_half(b) << 16);
  BIN("v_pack_b32_f16", u32, u16, u16, u32{a} | u32{b} << 16);
  add("v_cvt_f32_fp8", float_of_byte, 0);
  add("v_cvt_f32_bf8", float_of_byte, 1);
  add("v_cvt_pk_f32_fp8", floats_of_pair, 0);
  add("v_cvt_pk_f32_bf8", floats_of_pair, 1);
  add("v_cvt_pk_fp8_f32", pair_of_floats, 0);
  add("v_cvt_pk_bf8_f32", pair_of_floats, 1);
  add("v_cvt_sr_fp8_f32", byte_of_float, 0);
  add("v_cvt_sr_bf8_f32", byte_of_float, 1);
  static const char* const kSmall[] = {"fp8", "bf8", "fp4"};
  static const char* const kWide[] = {"f32", "f16", "bf16"};
  for (u8 small = 0; small < 3; ++small) {
    for (u8 wide = 0; wide < 3; ++wide) {
      const u8 note = static_cast<u8>(small | wide << 2);
      const std::string s = kSmall[small], l = kWide[wide];
      add(("v_cvt_scalef32_pk_" + l + "_" + s).c_str(), scaled_pair_out, note);
      add(("v_cvt_scalef32_pk_" + s + "_" + l).c_str(), scaled_pair_in, note);
    }
    if (small != 2) {
      add((std::string("v_cvt_scalef32_f32_") + kSmall[small]).c_str(), scaled_one_out, small);
    }
  }
}

void add_packed() {
  add("v_pk_fma_f32", [](Wave& w, const Inst& i) {
    packed_floats<3>(w, i, [](float a, float b, float c) { return std::fma(a, b, c); });
  });
  add("v_pk_mul_f32", [](Wave& w, const Inst& i) {
    packed_floats<2>(w, i, [](float a, float b, float) { return a * b; });
  });
  add("v_pk_add_f32", [](Wave& w, const Inst& i) {
    packed_floats<2>(w, i, [](float a, float b, float) { return a + b; });
  });
#define PACKED(name, T, n, expression)                                                             \
  add(name, [](Wave& w, const Inst& i) {                                                           \
    packed_halves<T, n>(w, i, [](auto a, auto b, [[maybe_unused]] auto c) { return expression; }); \
  })
  PACKED("v_pk_fma_f16", Half, 3, std::fma(a, b, c));
  PACKED("v_pk_add_f16", Half, 2, a + b);
  PACKED("v_pk_mul_f16", Half, 2, a * b);
  PACKED("v_pk_min_f16", Half, 2, quiet_min(a, b));
  PACKED("v_pk_max_f16", Half, 2, quiet_max(a, b));
  PACKED("v_pk_add_u16", u16, 2, a + b);
  PACKED("v_pk_sub_u16", u16, 2, a - b);
  PACKED("v_pk_add_i16", i16, 2, a + b);
  PACKED("v_pk_sub_i16", i16, 2, a - b);
  PACKED("v_pk_mul_lo_u16", u16, 2, u32{a} * u32{b});
  PACKED("v_pk_mad_u16", u16, 3, u32{a} * u32{b} + c);
  PACKED("v_pk_mad_i16", i16, 3, i32{a} * i32{b} + c);
  PACKED("v_pk_min_u16", u16, 2, std::min(a, b));
  PACKED("v_pk_max_u16", u16, 2, std::max(a, b));
  PACKED("v_pk_min_i16", i16, 2, std::min(a, b));
  PACKED("v_pk_max_i16", i16, 2, std::max(a, b));
  PACKED("v_pk_lshlrev_b16", u16, 2, b << (a & 15));
  PACKED("v_pk_lshrrev_b16", u16, 2, b >> (a & 15));
  PACKED("v_pk_ashrrev_i16", i16, 2, b >> (a & 15));
#undef PACKED
  add("v_mad_mix_f32", mixed, 0);
  add("v_mad_mixlo_f16", mixed, 1);
  add("v_mad_mixhi_f16", mixed, 2);
  add("v_dot2_f32_bf16", [](Wave& w, const Inst& i) { dot2(w, i, bfloat_float, false); });
  add("v_dot2_f32_f16", [](Wave& w, const Inst& i) { dot2(w, i, half_float, false); });
  add("v_dot2c_f32_bf16", [](Wave& w, const Inst& i) { dot2(w, i, bfloat_float, true); });
  add("v_dot2c_f32_f16", [](Wave& w, const Inst& i) { dot2(w, i, half_float, true); });
  add("v_dot4_i32_i8", [](Wave& w, const Inst& i) { dot_ints<i32, 8>(w, i, false); });
  add("v_dot4_u32_u8", [](Wave& w, const Inst& i) { dot_ints<u32, 8>(w, i, false); });
  add("v_dot4c_i32_i8", [](Wave& w, const Inst& i) { dot_ints<i32, 8>(w, i, true); });
  add("v_dot8_i32_i4", [](Wave& w, const Inst& i) { dot_ints<i32, 4>(w, i, false); });
  add("v_dot8_u32_u4", [](Wave& w, const Inst& i) { dot_ints<u32, 4>(w, i, false); });
  add("v_dot2_i32_i16", [](Wave& w, const Inst& i) { dot_ints<i32, 16>(w, i, false); });
  add("v_dot2_u32_u16", [](Wave& w, const Inst& i) { dot_ints<u32, 16>(w, i, false); });
}

template <class T>
void add_compares(const std::string& type) {
  static const char* const kFloats[] = {"f", "lt",  "eq",  "le",  "gt",  "lg",  "ge",  "o",
                                        "u", "nge", "nlg", "ngt", "nle", "neq", "nlt", "tru"};
  static const char* const kInts[] = {"f", "lt", "eq", "le", "gt", "ne", "ge", "t"};
  const int count = kIsFloat<T> ? 16 : 8;
  for (int which = 0; which < count; ++which) {
    const std::string word = kIsFloat<T> ? kFloats[which] : kInts[which];
    add(("v_cmp_" + word + "_" + type).c_str(), compare<T>, static_cast<u8>(which));
    add(("v_cmpx_" + word + "_" + type).c_str(), compare<T>, static_cast<u8>(which | 16));
  }
}

}  // namespace

void add_vector_operations() {
  add_moves();
  add_integers();
  add_floats();
  add_conversions();
  add_packed();
  add_compares<float>("f32");
  add_compares<double>("f64");
  add_compares<Half>("f16");
  add_compares<i32>("i32");
  add_compares<u32>("u32");
  add_compares<i64>("i64");
  add_compares<u64>("u64");
  add_compares<i16>("i16");
  add_compares<u16>("u16");
  add("v_cmp_class_f32", compare_class<float, u32>, 0);
  add("v_cmpx_class_f32", compare_class<float, u32>, 16);
  add("v_cmp_class_f64", compare_class<double, u64>, 0);
  add("v_cmpx_class_f64", compare_class<double, u64>, 16);
}

}  // namespace amd

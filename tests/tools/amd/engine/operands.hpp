// operands.hpp: vector operands, as 64 lanes of a type, with all that an encoding can do to them.
#pragma once

#include <type_traits>

#include "numbers.hpp"
#include "wave.hpp"

namespace amd {

// Types of operands beside the plain ones. Half: an f16, which is computed as a float.
struct Half {
  float value;
};

template <class T>
inline constexpr bool kIsFloat = std::is_floating_point_v<T> || std::is_same_v<T, Half>;
template <class T>
inline constexpr int kWords = std::is_same_v<T, Half> ? 1 : (sizeof(T) + 3) / 4;
template <class T>
inline constexpr bool kIs16 = std::is_same_v<T, Half> || sizeof(T) == 2;

// Bits of the inline constants 240 .. 248: 0.5, -0.5, 1, -1, 2, -2, 4, -4, 1 / (2 pi).
inline constexpr u32 kFloatConstants[] = {0x3f000000, 0xbf000000, 0x3f800000,
                                          0xbf800000, 0x40000000, 0xc0000000,
                                          0x40800000, 0xc0800000, 0x3e22f983};
inline constexpr u32 kHalfConstants[] = {0x3800, 0xb800, 0x3c00, 0xbc00, 0x4000,
                                         0xc000, 0x4400, 0xc400, 0x3118};
inline constexpr u64 kDoubleConstants[] = {
    0x3fe0000000000000, 0xbfe0000000000000, 0x3ff0000000000000,
    0xbff0000000000000, 0x4000000000000000, 0xc000000000000000,
    0x4010000000000000, 0xc010000000000000, 0x3fc45f306dc9c882};

// The value of a source that is no register, as bits of T.
template <class T>
u64 constant_bits(const Wave& w, const Source& s) {
  const int n = s.index;
  if (n >= 128 && n <= 192) return static_cast<u64>(n - 128);
  if (n >= 193 && n <= 208) return static_cast<u64>(static_cast<i64>(192 - n));
  if (n >= 240 && n <= 248) {
    if constexpr (kIs16<T>) return kHalfConstants[n - 240];
    if constexpr (sizeof(T) == 8) return kDoubleConstants[n - 240];
    return kFloatConstants[n - 240];
  }
  switch (n) {
    case 235: return kSharedAperture;
    case 236: return kSharedAperture + 0xffff'ffffull;
    case 237: return kPrivateAperture;
    case 238: return kPrivateAperture + 0xffff'ffffull;
    case 251: return w.vcc() == 0 ? 1 : 0;
    case 252: return w.exec == 0 ? 1 : 0;
    case 253: return w.scc ? 1 : 0;
    case 255:
      if constexpr (std::is_same_v<T, double>) return static_cast<u64>(s.literal) << 32;
      if constexpr (std::is_same_v<T, i64>)
        return static_cast<u64>(static_cast<i64>(static_cast<i32>(s.literal)));
      return s.literal;
    default: w.fault("source " + std::to_string(n) + " is not modelled");
  }
}

template <class T>
T of_bits(u64 bits) {
  if constexpr (std::is_same_v<T, Half>) {
    return Half{half_float(static_cast<u32>(bits))};
  } else if constexpr (sizeof(T) == 8) {
    return std::bit_cast<T>(bits);
  } else if constexpr (sizeof(T) == 4) {
    return std::bit_cast<T>(static_cast<u32>(bits));
  } else {
    return static_cast<T>(bits);
  }
}
template <class T>
u64 to_bits(T value) {
  if constexpr (std::is_same_v<T, Half>) {
    return float_half(value.value);
  } else if constexpr (sizeof(T) == 8) {
    return std::bit_cast<u64>(value);
  } else if constexpr (sizeof(T) == 4) {
    return std::bit_cast<u32>(value);
  } else {
    return static_cast<u16>(value);
  }
}

// A scalar source.
template <class T>
T read_scalar(const Wave& w, const Source& s) {
  if (s.kind == Kind::scalar) {
    if constexpr (sizeof(T) == 8) {
      return of_bits<T>(w.scalar64(s.index));
    } else {
      return of_bits<T>(w.scalar(s.index));
    }
  }
  if (s.kind == Kind::constant) return of_bits<T>(constant_bits<T>(w, s));
  w.fault("a vector register where a scalar is needed");
}

// What hardware rounds in a way of its own, less than one unit in the last place off: functions of
// one argument, and a matrix product's sums. They give one of the two floats around the exact
// value. Which one is a choice of the run, so that no result hangs on it.
inline float nearly(const Wave& w, double exact, u32 input) {
  const float value = static_cast<float>(exact);
  const u64 seed = w.group->launch->machine->approximation_seed;
  if (seed == 0 || value == 0 || !std::isfinite(value)) return value;
  if (static_cast<double>(value) == exact) return value;
  u64 mixed = (seed ^ input) * 0x9e37'79b9'7f4a'7c15ull;
  mixed ^= mixed >> 29;
  const bool up = ((mixed * 0xbf58'476d'1ce4'e5b9ull) >> 40 & 1) != 0;
  if (up == (static_cast<double>(value) > exact)) return value;
  return std::nextafter(
      value, up ? std::numeric_limits<float>::infinity() : -std::numeric_limits<float>::infinity());
}
// Which lane a lane's source comes from under DPP, and which lanes may write.
struct LaneMap {
  int from[kLanes];
  u64 zero = 0;  // lanes that read 0
  u64 writes = ~0ull;
};
LaneMap dpp_lanes(const Wave& w, const Inst& i);

// Words of a source: [word][lane], before modifiers.
template <int kCount>
void read_words(const Wave& w, const Source& s, u32 (&out)[kCount][kLanes]) {
  w.touch_vector(s.index, kCount, false);
  for (int word = 0; word < kCount; ++word)
    std::memcpy(out[word], w.v[s.index + word], sizeof out[word]);
}

inline u32 select_part(u32 bits, int sel, bool sext) {
  switch (sel) {
    case 0:
    case 1:
    case 2:
    case 3: {
      const u32 part = (bits >> (8 * sel)) & 0xff;
      return sext ? static_cast<u32>(static_cast<i32>(static_cast<i8>(part))) : part;
    }
    case 4:
    case 5: {
      const u32 part = (bits >> (16 * (sel - 4))) & 0xffff;
      return sext ? static_cast<u32>(static_cast<i32>(static_cast<i16>(part))) : part;
    }
    default: return bits;
  }
}

template <class T>
void read(const Wave& w, const Inst& i, int k, T (&out)[kLanes]) {
  const Source& s = i.src[k];
  if (s.kind == Kind::vector) {
    if constexpr (sizeof(T) == 8) {
      w.touch_vector(s.index, 2, false);
      const u32* low = w.v[s.index];
      const u32* high = w.v[s.index + 1];
      for (int lane = 0; lane < kLanes; ++lane)
        out[lane] = of_bits<T>(low[lane] | static_cast<u64>(high[lane]) << 32);
    } else {
      w.touch_vector(s.index, 1, false);
      u32 moved[kLanes];
      const u32* words = w.v[s.index];
      if (i.dpp && k == 0) {
        const LaneMap map = dpp_lanes(w, i);
        for (int lane = 0; lane < kLanes; ++lane)
          moved[lane] = (map.zero >> lane) & 1 ? 0 : words[map.from[lane]];
        words = moved;
      }
      if (i.sdwa && k < 2) {
        const int sel = i.at(k == 0 ? kF_src0_sel : kF_src1_sel);
        const bool sext = i.bit(k == 0 ? kF_src0_sext : kF_src1_sext) != 0;
        for (int lane = 0; lane < kLanes; ++lane) moved[lane] = select_part(words[lane], sel, sext);
        words = moved;
      }
      if constexpr (kIs16<T>) {
        const int shift = (i.opsel >> k) & 1 ? 16 : 0;
        for (int lane = 0; lane < kLanes; ++lane) out[lane] = of_bits<T>(words[lane] >> shift);
      } else {
        std::memcpy(out, words, sizeof(u32) * kLanes);
      }
    }
  } else {
    T value = s.kind == Kind::scalar ? read_scalar<T>(w, s) : of_bits<T>(constant_bits<T>(w, s));
    if constexpr (kIs16<T>) {
      if ((i.opsel >> k) & 1) {
        value = s.kind == Kind::scalar ? of_bits<T>(w.scalar(s.index) >> 16)
                                       : of_bits<T>(constant_bits<T>(w, s) >> 16);
      }
    }
    if (i.sdwa && s.kind == Kind::scalar) {
      const u32 part = select_part(w.scalar(s.index), i.at(k == 0 ? kF_src0_sel : kF_src1_sel),
                                   i.bit(k == 0 ? kF_src0_sext : kF_src1_sext) != 0);
      value = of_bits<T>(part);
    }
    for (int lane = 0; lane < kLanes; ++lane) out[lane] = value;
  }
  if (s.abs || s.neg) {
    if constexpr (std::is_same_v<T, Half>) {
      for (auto& one : out) {
        if (s.abs) one.value = std::fabs(one.value);
        if (s.neg) one.value = -one.value;
      }
    } else if constexpr (std::is_floating_point_v<T>) {
      for (auto& one : out) {
        if (s.abs) one = std::fabs(one);
        if (s.neg) one = -one;
      }
    } else {
      w.fault("abs or neg of an operand that is no float");
    }
  }
}

// Writes the lanes that may write. What an encoding does to results is done here.
template <class T>
void write(Wave& w, const Inst& i, T (&value)[kLanes], bool keeps_other_half = false,
           bool saturated = false) {
  if (!kIsFloat<T> && i.clamp != 0 && !saturated) w.fault("clamp is not modelled here");
  u64 mask = w.exec;
  if (i.dpp) mask &= dpp_lanes(w, i).writes;
  if constexpr (kIsFloat<T>) {
    if (i.omod != 0 || i.clamp != 0) {
      for (auto& one : value) {
        double x = 0;
        if constexpr (std::is_same_v<T, Half>) {
          x = one.value;
        } else {
          x = one;
        }
        if (i.omod == 1) x *= 2;
        if (i.omod == 2) x *= 4;
        if (i.omod == 3) x /= 2;
        if (i.clamp != 0) x = x > 0 ? std::min(x, 1.0) : 0.0;
        if constexpr (std::is_same_v<T, Half>) {
          one.value = static_cast<float>(x);
        } else {
          one = static_cast<T>(x);
        }
      }
    }
  }
  if constexpr (sizeof(T) == 8) {
    w.touch_vector(i.vdst, 2, true);
    for (u64 left = mask; left != 0; left &= left - 1) {
      const int lane = std::countr_zero(left);
      const u64 bits = to_bits(value[lane]);
      w.v[i.vdst][lane] = static_cast<u32>(bits);
      w.v[i.vdst + 1][lane] = static_cast<u32>(bits >> 32);
    }
    return;
  } else {
    w.touch_vector(i.vdst, 1, true);
    u32* words = w.v[i.vdst];
    if (i.sdwa && i.has(kF_dst_sel) && i.at(kF_dst_sel) != 6) {
      const int sel = i.at(kF_dst_sel);
      const int shift = sel < 4 ? 8 * sel : 16 * (sel - 4);
      const u32 ones = (sel < 4 ? 0xffu : 0xffffu);
      const int unused = i.at(kF_dst_unused);
      for (u64 left = mask; left != 0; left &= left - 1) {
        const int lane = std::countr_zero(left);
        const u32 part = static_cast<u32>(to_bits(value[lane])) & ones;
        u32 rest = 0;
        if (unused == 2) rest = words[lane] & ~(ones << shift);
        if (unused == 1 && (part & (ones ^ (ones >> 1))) != 0)
          rest = ~((ones << shift) | ((1u << shift) - 1));
        words[lane] = part << shift | rest;
      }
      return;
    }
    if constexpr (kIs16<T>) {
      const bool high = (i.opsel & 8) != 0;
      for (u64 left = mask; left != 0; left &= left - 1) {
        const int lane = std::countr_zero(left);
        const u32 bits = static_cast<u32>(to_bits(value[lane])) & 0xffff;
        if (high) {
          words[lane] = (words[lane] & 0xffff) | bits << 16;
        } else {
          words[lane] = keeps_other_half ? (words[lane] & 0xffff'0000) | bits : bits;
        }
      }
    } else if (mask == ~0ull) {
      std::memcpy(words, value, sizeof(u32) * kLanes);
    } else {
      for (u64 left = mask; left != 0; left &= left - 1) {
        const int lane = std::countr_zero(left);
        words[lane] = static_cast<u32>(to_bits(value[lane]));
      }
    }
  }
}

template <class T>
auto number(T value) {
  if constexpr (std::is_same_v<T, Half>) {
    return value.value;
  } else {
    return value;
  }
}
template <class D, class V>
D result(V value) {
  if constexpr (std::is_same_v<D, Half>) {
    return Half{static_cast<float>(value)};
  } else {
    return static_cast<D>(value);
  }
}

template <class D, class A, class F>
void unary(Wave& w, const Inst& i, F f, bool keeps = false) {
  A a[kLanes];
  D d[kLanes];
  read(w, i, 0, a);
  for (int lane = 0; lane < kLanes; ++lane) d[lane] = result<D>(f(number(a[lane])));
  write(w, i, d, keeps);
}
template <class D, class A, class B, class F>
void binary(Wave& w, const Inst& i, F f, bool keeps = false) {
  A a[kLanes];
  B b[kLanes];
  D d[kLanes];
  read(w, i, 0, a);
  read(w, i, 1, b);
  for (int lane = 0; lane < kLanes; ++lane) {
    d[lane] = result<D>(f(number(a[lane]), number(b[lane])));
  }
  write(w, i, d, keeps);
}
template <class D, class A, class B, class C, class F>
void ternary(Wave& w, const Inst& i, F f, bool keeps = false) {
  A a[kLanes];
  B b[kLanes];
  C c[kLanes];
  D d[kLanes];
  read(w, i, 0, a);
  read(w, i, 1, b);
  read(w, i, 2, c);
  for (int lane = 0; lane < kLanes; ++lane) {
    d[lane] = result<D>(f(number(a[lane]), number(b[lane]), number(c[lane])));
  }
  write(w, i, d, keeps);
}
// The destination as it was, for operations that add to it.
template <class T>
void read_destination(const Wave& w, const Inst& i, T (&out)[kLanes]) {
  w.touch_vector(i.vdst, kWords<T>, false);
  const int shift = kIs16<T> && (i.opsel & 8) != 0 ? 16 : 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    u64 bits = w.v[i.vdst][lane] >> shift;
    if constexpr (sizeof(T) == 8) bits |= static_cast<u64>(w.v[i.vdst + 1][lane]) << 32;
    out[lane] = of_bits<T>(bits);
  }
}

// Names to handlers. `note` is handed to the handler in the instruction.
void add(const char* name, Handler handler, u8 note = 0);
Handler find(const std::string& name, u8* out_note);

}  // namespace amd

// isa.hpp: one decoded instruction, as the decoder hands it over.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace amd {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i8 = std::int8_t;
using i16 = std::int16_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

inline constexpr int kLanes = 64;

// Anything that ends a run: an instruction that is not modelled, a broken rule, no progress.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Fields of all encodings, by the decoder's names. Registers are numbers of the one source space:
// 0 .. 127 scalar, 128 .. 255 constants, 256 .. 511 vector. The decoder asks for this list.
#define AMD_FIELDS(X) \
  X(sdst)             \
  X(ssrc0)            \
  X(ssrc1)            \
  X(simm16)           \
  X(literal)          \
  X(sdata)            \
  X(sbase)            \
  X(soffset)          \
  X(soffset_en)       \
  X(imm)              \
  X(glc)              \
  X(offset)           \
  X(vdst)             \
  X(src0)             \
  X(src1)             \
  X(src2)             \
  X(vsrc0)            \
  X(vsrc1)            \
  X(neg)              \
  X(neg_hi)           \
  X(abs)              \
  X(clmp)             \
  X(omod)             \
  X(opsel)            \
  X(opsel_hi)         \
  X(opsel_hi2)        \
  X(dpp)              \
  X(bc)               \
  X(row_mask)         \
  X(bank_mask)        \
  X(src0_neg)         \
  X(src0_abs)         \
  X(src1_neg)         \
  X(src1_abs)         \
  X(dst_sel)          \
  X(dst_unused)       \
  X(src0_sel)         \
  X(src1_sel)         \
  X(src0_sext)        \
  X(src1_sext)        \
  X(s0)               \
  X(s1)               \
  X(sd)               \
  X(addr)             \
  X(data)             \
  X(saddr)            \
  X(sve)              \
  X(acc)              \
  X(sc0)              \
  X(sc1)              \
  X(nt)               \
  X(data0)            \
  X(data1)            \
  X(offset0)          \
  X(offset1)          \
  X(vdata)            \
  X(vaddr)            \
  X(srsrc)            \
  X(offen)            \
  X(idxen)            \
  X(lds)              \
  X(cbsz)             \
  X(abid)             \
  X(acc_cd)           \
  X(blgp)             \
  X(scale_src0)       \
  X(scale_src1)
enum Field : int {
#define AMD_FIELD(name) kF_##name,
  AMD_FIELDS(AMD_FIELD)
#undef AMD_FIELD
      kNumFields
};

enum class Kind : u8 { none, scalar, vector, constant };
// A source. Vector registers 256 .. 511 are accumulators. A constant keeps its number, because its
// bits depend on the type that reads it.
struct Source {
  Kind kind = Kind::none;
  u16 index = 0;
  u32 literal = 0;
  bool neg = false, abs = false;
};

struct Wave;
struct Inst;
using Handler = void (*)(Wave&, const Inst&);

struct Inst {
  std::string name;  // without _e32 and _e64
  Handler run = nullptr;
  u32 offset = 0, size = 0;             // in the code, bytes
  std::array<i32, kNumFields> field{};  // -1: the encoding has none
  std::array<Source, 3> src{};
  u16 vdst = 0;  // vector destination, 0 .. 511
  u8 clamp = 0, omod = 0, opsel = 0;
  bool sdwa = false, dpp = false, vop3 = false, vop3p = false;
  u8 note = 0;  // what its handler wants to know, see add()

  i32 at(Field which) const { return field[which]; }
  bool has(Field which) const { return field[which] >= 0; }
  // 1 where the encoding has the bit and it is set.
  int bit(Field which) const { return field[which] > 0 ? 1 : 0; }
};

}  // namespace amd

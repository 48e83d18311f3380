// scalar_ops.cpp: scalar instructions, branches and what the schedule sees of a wave.
#include <bit>

#include "machine.hpp"
#include "operands.hpp"

namespace amd {
namespace {

u32 source32(const Wave& w, const Inst& i, int k) { return read_scalar<u32>(w, i.src[k]); }
i32 source_signed(const Wave& w, const Inst& i, int k) {
  return static_cast<i32>(source32(w, i, k));
}
u64 source64(const Wave& w, const Inst& i, int k) { return read_scalar<u64>(w, i.src[k]); }
void put(Wave& w, const Inst& i, u32 value) { w.set_scalar(i.at(kF_sdst), value); }
void put64(Wave& w, const Inst& i, u64 value) { w.set_scalar64(i.at(kF_sdst), value); }
i32 immediate(const Inst& i) { return static_cast<i16>(i.at(kF_simm16)); }

// Results whose SCC says whether they are not zero.
#define LOGIC32(name, expression)                                                       \
  add(name, [](Wave& w, const Inst& i) {                                                \
    const u32 a = source32(w, i, 0);                                                    \
    [[maybe_unused]] const u32 b = i.src[1].kind == Kind::none ? 0 : source32(w, i, 1); \
    const u32 d = expression;                                                           \
    put(w, i, d);                                                                       \
    w.scc = d != 0;                                                                     \
  })
#define LOGIC64(name, expression)                                                       \
  add(name, [](Wave& w, const Inst& i) {                                                \
    const u64 a = source64(w, i, 0);                                                    \
    [[maybe_unused]] const u64 b = i.src[1].kind == Kind::none ? 0 : source64(w, i, 1); \
    const u64 d = expression;                                                           \
    put64(w, i, d);                                                                     \
    w.scc = d != 0;                                                                     \
  })
#define SHIFT64(name, T, expression)               \
  add(name, [](Wave& w, const Inst& i) {           \
    const T a = static_cast<T>(source64(w, i, 0)); \
    const u32 b = source32(w, i, 1);               \
    const u64 d = static_cast<u64>(expression);    \
    put64(w, i, d);                                \
    w.scc = d != 0;                                \
  })
#define PLAIN32(name, expression)                                                       \
  add(name, [](Wave& w, const Inst& i) {                                                \
    const u32 a = source32(w, i, 0);                                                    \
    [[maybe_unused]] const u32 b = i.src[1].kind == Kind::none ? 0 : source32(w, i, 1); \
    put(w, i, expression);                                                              \
  })
#define SAVE_EXEC(name, expression)                 \
  add(name, [](Wave& w, const Inst& i) {            \
    const u64 s = source64(w, i, 0), exec = w.exec; \
    w.exec = expression;                            \
    put64(w, i, exec);                              \
    w.scc = w.exec != 0;                            \
  })
#define COMPARE(word, expression)                                                 \
  add("s_cmp_" word "_i32", [](Wave& w, const Inst& i) {                          \
    const i32 a = source_signed(w, i, 0), b = source_signed(w, i, 1);             \
    w.scc = expression;                                                           \
  });                                                                             \
  add("s_cmp_" word "_u32", [](Wave& w, const Inst& i) {                          \
    const u32 a = source32(w, i, 0), b = source32(w, i, 1);                       \
    w.scc = expression;                                                           \
  });                                                                             \
  add("s_cmpk_" word "_i32", [](Wave& w, const Inst& i) {                         \
    const i32 a = static_cast<i32>(w.scalar(i.at(kF_sdst))), b = immediate(i);    \
    w.scc = expression;                                                           \
  });                                                                             \
  add("s_cmpk_" word "_u32", [](Wave& w, const Inst& i) {                         \
    const u32 a = w.scalar(i.at(kF_sdst)), b = static_cast<u32>(i.at(kF_simm16)); \
    w.scc = expression;                                                           \
  })
#define BRANCH(name, condition)                                                    \
  add(name, [](Wave& w, const Inst& i) {                                           \
    if (condition) w.next_pc = w.pc + 4 + static_cast<u64>(i64{immediate(i)} * 4); \
  })

u32 bit_reversed(u32 x) {
  u32 out = 0;
  for (int bit = 0; bit < 32; ++bit) out |= ((x >> bit) & 1) << (31 - bit);
  return out;
}
template <class T>
T field_of(T value, u32 spec, int bits_mask) {
  const u32 first = spec & static_cast<u32>(bits_mask);
  const u32 width = (spec >> 16) & 0x7f;
  constexpr u32 kBits = sizeof(T) * 8;
  if (width == 0) return 0;
  using U = std::make_unsigned_t<T>;
  const T shifted = value >> first;
  if (width >= kBits) return shifted;
  return static_cast<T>(static_cast<U>(shifted) << (kBits - width)) >> (kBits - width);
}

// Hardware registers that s_getreg and s_setreg reach.
constexpr int kRegMode = 1, kRegStatus = 2, kRegTrapStatus = 3, kRegHwId = 4, kRegXccId = 20;

void add_moves() {
  add("s_mov_b32", [](Wave& w, const Inst& i) { put(w, i, source32(w, i, 0)); });
  add("s_mov_b64", [](Wave& w, const Inst& i) { put64(w, i, source64(w, i, 0)); });
  add("s_cmov_b32", [](Wave& w, const Inst& i) {
    if (w.scc) put(w, i, source32(w, i, 0));
  });
  add("s_cmov_b64", [](Wave& w, const Inst& i) {
    if (w.scc) put64(w, i, source64(w, i, 0));
  });
  add("s_movk_i32", [](Wave& w, const Inst& i) { put(w, i, static_cast<u32>(immediate(i))); });
  add("s_cmovk_i32", [](Wave& w, const Inst& i) {
    if (w.scc) put(w, i, static_cast<u32>(immediate(i)));
  });
  add("s_cselect_b32", [](Wave& w, const Inst& i) { put(w, i, source32(w, i, w.scc ? 0 : 1)); });
  add("s_cselect_b64", [](Wave& w, const Inst& i) { put64(w, i, source64(w, i, w.scc ? 0 : 1)); });
  PLAIN32("s_brev_b32", bit_reversed(a));
  PLAIN32("s_sext_i32_i8", static_cast<u32>(i32{static_cast<i8>(a)}));
  PLAIN32("s_sext_i32_i16", static_cast<u32>(i32{static_cast<i16>(a)}));
  PLAIN32("s_ff1_i32_b32", a == 0 ? ~0u : static_cast<u32>(std::countr_zero(a)));
  PLAIN32("s_ff0_i32_b32", ~a == 0 ? ~0u : static_cast<u32>(std::countr_one(a)));
  PLAIN32("s_flbit_i32_b32", a == 0 ? ~0u : static_cast<u32>(std::countl_zero(a)));
  PLAIN32("s_flbit_i32",
          a == 0 || a == ~0u ? ~0u : static_cast<u32>(std::countl_zero((a >> 31) != 0 ? ~a : a)));
  PLAIN32("s_pack_ll_b32_b16", (a & 0xffff) | b << 16);
  PLAIN32("s_pack_lh_b32_b16", (a & 0xffff) | (b & 0xffff'0000));
  PLAIN32("s_pack_hh_b32_b16", a >> 16 | (b & 0xffff'0000));
  add("s_ff1_i32_b64", [](Wave& w, const Inst& i) {
    const u64 a = source64(w, i, 0);
    put(w, i, a == 0 ? ~0u : static_cast<u32>(std::countr_zero(a)));
  });
  add("s_flbit_i32_b64", [](Wave& w, const Inst& i) {
    const u64 a = source64(w, i, 0);
    put(w, i, a == 0 ? ~0u : static_cast<u32>(std::countl_zero(a)));
  });
  add("s_brev_b64", [](Wave& w, const Inst& i) {
    const u64 a = source64(w, i, 0);
    put64(w, i,
          static_cast<u64>(bit_reversed(static_cast<u32>(a))) << 32 |
              bit_reversed(static_cast<u32>(a >> 32)));
  });
  add("s_bitset0_b32", [](Wave& w, const Inst& i) {
    put(w, i, w.scalar(i.at(kF_sdst)) & ~(1u << (source32(w, i, 0) & 31)));
  });
  add("s_bitset1_b32", [](Wave& w, const Inst& i) {
    put(w, i, w.scalar(i.at(kF_sdst)) | 1u << (source32(w, i, 0) & 31));
  });
  add("s_bitset0_b64", [](Wave& w, const Inst& i) {
    put64(w, i, w.scalar64(i.at(kF_sdst)) & ~(1ull << (source32(w, i, 0) & 63)));
  });
  add("s_bitset1_b64", [](Wave& w, const Inst& i) {
    put64(w, i, w.scalar64(i.at(kF_sdst)) | 1ull << (source32(w, i, 0) & 63));
  });
}

void add_arithmetic() {
  add("s_add_u32", [](Wave& w, const Inst& i) {
    const u64 d = u64{source32(w, i, 0)} + source32(w, i, 1);
    put(w, i, static_cast<u32>(d));
    w.scc = (d >> 32) != 0;
  });
  add("s_addc_u32", [](Wave& w, const Inst& i) {
    const u64 d = u64{source32(w, i, 0)} + source32(w, i, 1) + (w.scc ? 1 : 0);
    put(w, i, static_cast<u32>(d));
    w.scc = (d >> 32) != 0;
  });
  add("s_sub_u32", [](Wave& w, const Inst& i) {
    const u32 a = source32(w, i, 0), b = source32(w, i, 1);
    put(w, i, a - b);
    w.scc = b > a;
  });
  add("s_subb_u32", [](Wave& w, const Inst& i) {
    const u64 a = source32(w, i, 0), b = u64{source32(w, i, 1)} + (w.scc ? 1 : 0);
    put(w, i, static_cast<u32>(a - b));
    w.scc = b > a;
  });
  const auto signed_sum = [](Wave& w, const Inst& i, bool minus) {
    const i64 a = source_signed(w, i, 0), b = source_signed(w, i, 1);
    const i64 d = minus ? a - b : a + b;
    put(w, i, static_cast<u32>(d));
    w.scc = d != static_cast<i32>(d);
  };
  static const auto kSum = signed_sum;
  add("s_add_i32", [](Wave& w, const Inst& i) { kSum(w, i, false); });
  add("s_sub_i32", [](Wave& w, const Inst& i) { kSum(w, i, true); });
  add("s_addk_i32", [](Wave& w, const Inst& i) {
    const i64 d = i64{static_cast<i32>(w.scalar(i.at(kF_sdst)))} + immediate(i);
    put(w, i, static_cast<u32>(d));
    w.scc = d != static_cast<i32>(d);
  });
  add("s_mulk_i32", [](Wave& w, const Inst& i) {
    put(w, i, w.scalar(i.at(kF_sdst)) * static_cast<u32>(immediate(i)));
  });
  PLAIN32("s_mul_i32", a * b);
  PLAIN32("s_mul_hi_u32", static_cast<u32>((u64{a} * b) >> 32));
  PLAIN32("s_mul_hi_i32", static_cast<u32>((i64{static_cast<i32>(a)} * static_cast<i32>(b)) >> 32));
#define EXTREME(name, T, chooses_first)                                                   \
  add(name, [](Wave& w, const Inst& i) {                                                  \
    const T a = static_cast<T>(source32(w, i, 0)), b = static_cast<T>(source32(w, i, 1)); \
    const bool first = chooses_first;                                                     \
    put(w, i, static_cast<u32>(first ? a : b));                                           \
    w.scc = first;                                                                        \
  })
  EXTREME("s_min_i32", i32, a < b);
  EXTREME("s_min_u32", u32, a < b);
  EXTREME("s_max_i32", i32, a > b);
  EXTREME("s_max_u32", u32, a > b);
#undef EXTREME
  LOGIC32("s_abs_i32", static_cast<i32>(a) < 0 ? 0 - a : a);
  LOGIC32("s_absdiff_i32", static_cast<i32>(a) > static_cast<i32>(b) ? a - b : b - a);
#define SHIFT_ADD(n)                                                 \
  add("s_lshl" #n "_add_u32", [](Wave& w, const Inst& i) {           \
    const u64 d = (u64{source32(w, i, 0)} << n) + source32(w, i, 1); \
    put(w, i, static_cast<u32>(d));                                  \
    w.scc = (d >> 32) != 0;                                          \
  })
  SHIFT_ADD(1);
  SHIFT_ADD(2);
  SHIFT_ADD(3);
  SHIFT_ADD(4);
#undef SHIFT_ADD
}

void add_logic() {
  LOGIC32("s_not_b32", ~a);
  LOGIC32("s_and_b32", a & b);
  LOGIC32("s_or_b32", a | b);
  LOGIC32("s_xor_b32", a ^ b);
  LOGIC32("s_andn2_b32", a & ~b);
  LOGIC32("s_orn2_b32", a | ~b);
  LOGIC32("s_nand_b32", ~(a & b));
  LOGIC32("s_nor_b32", ~(a | b));
  LOGIC32("s_xnor_b32", ~(a ^ b));
  LOGIC64("s_not_b64", ~a);
  LOGIC64("s_and_b64", a & b);
  LOGIC64("s_or_b64", a | b);
  LOGIC64("s_xor_b64", a ^ b);
  LOGIC64("s_andn2_b64", a & ~b);
  LOGIC64("s_orn2_b64", a | ~b);
  LOGIC64("s_nand_b64", ~(a & b));
  LOGIC64("s_nor_b64", ~(a | b));
  LOGIC64("s_xnor_b64", ~(a ^ b));
  LOGIC64("s_wqm_b64", ([](u64 x) {
            u64 out = 0;
            for (int quad = 0; quad < 64; quad += 4)
              if (((x >> quad) & 15) != 0) out |= 15ull << quad;
            return out;
          })(a));
  LOGIC32("s_lshl_b32", a << (b & 31));
  LOGIC32("s_lshr_b32", a >> (b & 31));
  LOGIC32("s_ashr_i32", static_cast<u32>(static_cast<i32>(a) >> (b & 31)));
  SHIFT64("s_lshl_b64", u64, a << (b & 63));
  SHIFT64("s_lshr_b64", u64, a >> (b & 63));
  SHIFT64("s_ashr_i64", i64, a >> (b & 63));
  LOGIC32("s_bfe_u32", field_of<u32>(a, b, 31));
  LOGIC32("s_bfe_i32", static_cast<u32>(field_of<i32>(static_cast<i32>(a), b, 31)));
  SHIFT64("s_bfe_u64", u64, field_of<u64>(a, b, 63));
  SHIFT64("s_bfe_i64", i64, field_of<i64>(a, b, 63));
  PLAIN32("s_bfm_b32", ((1u << (a & 31)) - 1) << (b & 31));
  add("s_bfm_b64", [](Wave& w, const Inst& i) {
    put64(w, i, ((1ull << (source32(w, i, 0) & 63)) - 1) << (source32(w, i, 1) & 63));
  });
  LOGIC32("s_bcnt1_i32_b32", static_cast<u32>(std::popcount(a)));
  LOGIC32("s_bcnt0_i32_b32", static_cast<u32>(32 - std::popcount(a)));
  add("s_bcnt1_i32_b64", [](Wave& w, const Inst& i) {
    const u32 d = static_cast<u32>(std::popcount(source64(w, i, 0)));
    put(w, i, d);
    w.scc = d != 0;
  });
  add("s_bcnt0_i32_b64", [](Wave& w, const Inst& i) {
    const u32 d = static_cast<u32>(64 - std::popcount(source64(w, i, 0)));
    put(w, i, d);
    w.scc = d != 0;
  });
  SAVE_EXEC("s_and_saveexec_b64", s & exec);
  SAVE_EXEC("s_or_saveexec_b64", s | exec);
  SAVE_EXEC("s_xor_saveexec_b64", s ^ exec);
  SAVE_EXEC("s_andn2_saveexec_b64", s & ~exec);
  SAVE_EXEC("s_orn2_saveexec_b64", s | ~exec);
  SAVE_EXEC("s_nand_saveexec_b64", ~(s & exec));
  SAVE_EXEC("s_nor_saveexec_b64", ~(s | exec));
  SAVE_EXEC("s_xnor_saveexec_b64", ~(s ^ exec));
  SAVE_EXEC("s_andn1_saveexec_b64", ~s & exec);
  SAVE_EXEC("s_orn1_saveexec_b64", ~s | exec);
  add("s_andn1_wrexec_b64", [](Wave& w, const Inst& i) {
    w.exec = ~source64(w, i, 0) & w.exec;
    put64(w, i, w.exec);
    w.scc = w.exec != 0;
  });
  add("s_andn2_wrexec_b64", [](Wave& w, const Inst& i) {
    w.exec = source64(w, i, 0) & ~w.exec;
    put64(w, i, w.exec);
    w.scc = w.exec != 0;
  });
}

void add_compares() {
  COMPARE("eq", a == b);
  COMPARE("lg", a != b);
  COMPARE("gt", a > b);
  COMPARE("ge", a >= b);
  COMPARE("lt", a < b);
  COMPARE("le", a <= b);
  add("s_cmp_eq_u64",
      [](Wave& w, const Inst& i) { w.scc = source64(w, i, 0) == source64(w, i, 1); });
  add("s_cmp_lg_u64",
      [](Wave& w, const Inst& i) { w.scc = source64(w, i, 0) != source64(w, i, 1); });
  add("s_bitcmp0_b32", [](Wave& w, const Inst& i) {
    w.scc = ((source32(w, i, 0) >> (source32(w, i, 1) & 31)) & 1) == 0;
  });
  add("s_bitcmp1_b32", [](Wave& w, const Inst& i) {
    w.scc = ((source32(w, i, 0) >> (source32(w, i, 1) & 31)) & 1) != 0;
  });
  add("s_bitcmp0_b64", [](Wave& w, const Inst& i) {
    w.scc = ((source64(w, i, 0) >> (source32(w, i, 1) & 63)) & 1) == 0;
  });
  add("s_bitcmp1_b64", [](Wave& w, const Inst& i) {
    w.scc = ((source64(w, i, 0) >> (source32(w, i, 1) & 63)) & 1) != 0;
  });
}

void add_control() {
  BRANCH("s_branch", true);
  BRANCH("s_cbranch_scc0", !w.scc);
  BRANCH("s_cbranch_scc1", w.scc);
  BRANCH("s_cbranch_vccz", w.scalar64(kVcc) == 0);
  BRANCH("s_cbranch_vccnz", w.scalar64(kVcc) != 0);
  BRANCH("s_cbranch_execz", w.exec == 0);
  BRANCH("s_cbranch_execnz", w.exec != 0);
  BRANCH("s_cbranch_cdbgsys", false);
  BRANCH("s_cbranch_cdbguser", false);
  add("s_getpc_b64", [](Wave& w, const Inst& i) { put64(w, i, w.pc + 4); });
  add("s_setpc_b64", [](Wave& w, const Inst& i) { w.next_pc = source64(w, i, 0); });
  add("s_swappc_b64", [](Wave& w, const Inst& i) {
    const u64 target = source64(w, i, 0);
    put64(w, i, w.pc + 4);
    w.next_pc = target;
  });
  add("s_call_b64", [](Wave& w, const Inst& i) {
    put64(w, i, w.pc + 4);
    w.next_pc = w.pc + 4 + static_cast<u64>(i64{immediate(i)} * 4);
  });
  for (const char* name : {"s_nop", "s_setprio", "s_icache_inv", "s_inst_prefetch", "s_wakeup",
                           "s_ttracedata", "s_incperflevel", "s_decperflevel"}) {
    add(name, [](Wave&, const Inst&) {});
  }
  add("s_sleep", [](Wave& w, const Inst&) { w.gives_way = true; });
  add("s_endpgm", [](Wave& w, const Inst&) {
    w.ended = true;
    w.gives_way = true;
  });
  add("s_barrier", [](Wave& w, const Inst&) {
    w.at_barrier = true;
    w.gives_way = true;
  });
  add("s_trap", [](Wave& w, const Inst& i) {
    w.fault("s_trap " + std::to_string(i.at(kF_simm16)) + ": the program gave up");
  });
  add("s_sethalt", [](Wave& w, const Inst&) { w.fault("s_sethalt: the program gave up"); });
  add("s_waitcnt", [](Wave& w, const Inst& i) {
    const u32 bits = static_cast<u32>(i.at(kF_simm16));
    const std::size_t left = (bits & 15) | ((bits >> 14) & 3) << 4;
    if (w.waits_for_stores(left)) {
      w.group->perform_some();
      w.next_pc = w.pc;
      w.gives_way = true;
      return;
    }
    w.wait(Counter::vm, left);
    w.wait(Counter::lgkm, (bits >> 8) & 15);
  });
  add("s_getreg_b32", [](Wave& w, const Inst& i) {
    const u32 spec = static_cast<u32>(i.at(kF_simm16));
    const u32 first = (spec >> 6) & 31, width = ((spec >> 11) & 31) + 1;
    u32 value = 0;
    switch (spec & 63) {
      case kRegMode: value = w.mode; break;
      case kRegTrapStatus: value = w.trap_status; break;
      case kRegHwId: value = w.index; break;
      case kRegXccId: value = static_cast<u32>(w.group->view.part); break;
      case kRegStatus: value = (w.scc ? 1u : 0u) | (w.exec == 0 ? 1u << 9 : 0u); break;
      default: w.fault("s_getreg of register " + std::to_string(spec & 63) + " is not modelled");
    }
    put(w, i, width == 32 ? value >> first : (value >> first) & ((1u << width) - 1));
  });
  static const auto kSetRegister = [](Wave& w, u32 spec, u32 value) {
    const u32 first = (spec >> 6) & 31, width = ((spec >> 11) & 31) + 1;
    const u32 ones = width == 32 ? ~0u : (1u << width) - 1;
    u32* place = nullptr;
    if ((spec & 63) == kRegMode) place = &w.mode;
    if ((spec & 63) == kRegTrapStatus) place = &w.trap_status;
    if (place == nullptr) {
      w.fault("s_setreg of register " + std::to_string(spec & 63) + " is not modelled");
    }
    *place = (*place & ~(ones << first)) | (value & ones) << first;
    // Bits 0 .. 3 round, 4 .. 7 keep subnormals.
    if ((w.mode & 0xff) != 0xf0) {
      w.fault("a mode that rounds otherwise or flushes subnormals is not modelled");
    }
  };
  add("s_setreg_b32", [](Wave& w, const Inst& i) {
    kSetRegister(w, static_cast<u32>(i.at(kF_simm16)), w.scalar(i.at(kF_sdst)));
  });
  add("s_setreg_imm32_b32", [](Wave& w, const Inst& i) {
    kSetRegister(w, static_cast<u32>(i.at(kF_simm16)), static_cast<u32>(i.at(kF_literal)));
  });
}

}  // namespace

void add_scalar_operations() {
  add_moves();
  add_arithmetic();
  add_logic();
  add_compares();
  add_control();
}

}  // namespace amd

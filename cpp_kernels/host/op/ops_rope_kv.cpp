// Operations on positions and on stored key-value rows.
#include <algorithm>
#include <cmath>
#include <limits>

#include "host/op/models.hpp"
#include "host/op/registry.hpp"
#include "host/op/rope_tables.hpp"
#include "platform/scalar.hpp"
#include "reference/format.hpp"
#include "reference/kv.hpp"
#include "reference/rope.hpp"
#include "stages/kv.hpp"
#include "stages/rope.hpp"

namespace lowlat::host {
namespace {

namespace stages = lowlat::scalar::stages;
using Block = lowlat::scalar::plat::Block<256>;

OpSpec rope() {
  OpSpec op;
  op.name = "rope";
  op.models = "v4 v41";
  op.about =
      "turns the last 64 of each head by pos * f_i, interleaved pairs; f_i = 1 / base^(2i/64), "
      "base 10000, or with yarn 160000 and its ramp; frequencies, angles, cos, sin in fp32";
  op.in = {{"x", LOWLAT_BF16, "bf16", "T,h,D", false, "heads; D is 64 or more"},
           {"pos", LOWLAT_I64, "i64", "T", false, "0 .. 1048575"},
           {"yarn", LOWLAT_I64, "i64", "", false, "1: a compressed layer's table"},
           {"inverse", LOWLAT_I64, "i64", "", false, "1: turns back"}};
  op.out = {{"x", LOWLAT_BF16, "bf16", "T,h,D", false, "turned heads"}};
  op.numerics = {{"scalar nvidia", "x", "rel_l2 <= 4e-3"}};
  op.check = [op](OpArgs& a) {
    require_dim(a, "h", 1, 1);
    require_dim(a, "D", stages::kRopeDim, 1);
    require_range(a, "pos", 0, kMaxPositions - 1, "");
    require_range(a, "yarn", 0, 1, "");
    require_range(a, "inverse", 0, 1, "");
    require_all_finite(a, op);
  };
  op.reference = [](const OpArgs& a) {
    const std::span<const std::uint16_t> in = a.in<std::uint16_t>("x");
    std::vector<double> x(in.size());
    for (std::size_t i = 0; i < in.size(); ++i) x[i] = reference::from_bf16(in[i]);
    reference::rope(x.data(), a.in<std::int64_t>("pos").data(), a.dim("T"), a.dim("h"), a.dim("D"),
                    a.scalar("yarn", 0) == 1, a.scalar("inverse", 0) == 1);
    for (std::size_t i = 0; i < in.size(); ++i) {
      a.out<std::uint16_t>("x")[i] = reference::to_bf16(x[i]);
    }
  };
  op.scalar = [](const OpArgs& a) {
    const stages::RopeTable table =
        a.scalar("yarn", 0) == 1 ? compressed_rope_table() : window_rope_table();
    const std::span<std::uint16_t> out = a.out<std::uint16_t>("x");
    std::copy_n(a.in<std::uint16_t>("x").begin(), out.size(), out.begin());
    const std::int64_t heads = a.dim("h"), dim = a.dim("D");
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      stages::RopeTurn turn = stages::rope_turn(table, a.in<std::int64_t>("pos")[t]);
      if (a.scalar("inverse", 0) == 1) turn = stages::rope_inverse(turn);
      for (std::int64_t head = 0; head < heads; ++head) {
        stages::Rope<Block>::rotate(out.data() + (t * heads + head + 1) * dim - stages::kRopeDim,
                                    turn);
      }
    }
  };
  return op;
}

OpSpec kv_pack() {
  OpSpec op;
  op.name = "kv_pack";
  op.models = "v4 v41";
  op.about =
      "stored row of a normed and turned kv: 448 e4m3 codes, 64 bf16, a ue8m0 a 64 codes "
      "(2^ceil(log2(max(amax, 1e-4) / 448))), a padding byte 0; magnitudes up to 1e38";
  op.in = {{"kv", LOWLAT_F32, "f32", "T,512", false, "448 values, then the 64 that are turned"}};
  op.out = {{"rows", LOWLAT_U8, "u8", "T,584", false, "576 data, 7 scale and 1 padding bytes"}};
  op.numerics = {{"scalar nvidia", "rows", "bitwise"}};
  // A row of larger numbers may round to what fp32 cannot hold.
  op.check = [op](OpArgs& a) { require_all_finite(a, op, 1e38); };
  op.reference = [](const OpArgs& a) {
    reference::kv_pack(a.out<std::uint8_t>("rows").data(), a.in<float>("kv").data(), a.dim("T"));
  };
  op.scalar = [](const OpArgs& a) {
    const stages::KvFlat<std::uint8_t> rows{a.out<std::uint8_t>("rows").data()};
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      const stages::KvRow<std::uint8_t> row = rows.row(t);
      stages::KvPack<Block>::run(row, a.in<float>("kv").data() + t * stages::kKvDim);
      row.scales[stages::kKvNumGroups] = 0;  // the stage leaves the padding alone
    }
  };
  return op;
}

// A row that fp32 cannot hold was not written by kv_pack.
void check_rows(const OpArgs& args) {
  const std::span<const std::uint8_t> rows = args.in<std::uint8_t>("rows");
  const auto refuse = [&](std::int64_t idx, const std::string& what) {
    throw OpError(element_name(args, "rows", idx) + " is " + std::to_string(rows[idx]) + ", " +
                  what);
  };
  for (std::int64_t t = 0; t < args.dim("T"); ++t) {
    const std::int64_t base = t * stages::kKvRowBytes;
    for (int group = 0; group < stages::kKvNumGroups; ++group) {
      const std::int64_t at = base + stages::kKvDataBytes + group;
      if (rows[at] == 255) refuse(at, "a scale of nan; needed 0 .. 254");
    }
    for (int i = 0; i < stages::kKvNopeDim; ++i) {
      const double value = reference::from_e4m3(rows[base + i]);
      const double scale =
          reference::from_ue8m0(rows[base + stages::kKvDataBytes + i / stages::kKvGroup]);
      if (std::isnan(value)) refuse(base + i, "a code of nan; needed a finite value");
      if (std::abs(value * scale) > std::numeric_limits<float>::max()) {
        refuse(base + i, "with its scale beyond fp32; needed a finite value");
      }
    }
    for (int i = 0; i < stages::kKvRopeDim; ++i) {
      const std::int64_t at = base + stages::kKvNopeDim + 2 * i;
      const auto code = static_cast<std::uint16_t>(rows[at] | rows[at + 1] << 8);
      if (!std::isfinite(reference::from_bf16(code))) {
        refuse(at + 1, "of a bf16 that is nan or infinite; needed a finite value");
      }
    }
  }
}

OpSpec kv_unpack() {
  OpSpec op;
  op.name = "kv_unpack";
  op.models = "v4 v41";
  op.about = "values of stored rows, exactly: code * 2^(scale - 127) and bf16";
  op.in = {{"rows", LOWLAT_U8, "u8", "T,584", false, "576 data, 7 scale and 1 padding bytes"}};
  op.out = {{"kv", LOWLAT_F32, "f32", "T,512", false, "448 values, then the 64 that are turned"}};
  op.numerics = {{"scalar nvidia", "kv", "bitwise"}};
  op.check = [](OpArgs& a) { check_rows(a); };
  op.reference = [](const OpArgs& a) {
    reference::kv_unpack(a.out<float>("kv").data(), a.in<std::uint8_t>("rows").data(), a.dim("T"));
  };
  op.scalar = [](const OpArgs& a) {
    const stages::KvFlat<const std::uint8_t> rows{a.in<std::uint8_t>("rows").data()};
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      stages::KvUnpack<Block>::run(a.out<float>("kv").data() + t * stages::kKvDim, rows.row(t));
    }
  };
  return op;
}

}  // namespace

std::vector<OpSpec> ops_rope_kv() { return {rope(), kv_pack(), kv_unpack()}; }

}  // namespace lowlat::host

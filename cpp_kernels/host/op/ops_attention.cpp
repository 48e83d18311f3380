// Operations of the attention core: sparse attention over stored rows, and the compressor.
#include <algorithm>
#include <limits>
#include <string>

#include "host/op/models.hpp"
#include "host/op/pooling.hpp"
#include "host/op/registry.hpp"
#include "host/op/rope_tables.hpp"
#include "platform/scalar.hpp"
#include "reference/attention.hpp"
#include "reference/compress.hpp"
#include "reference/pool.hpp"
#include "stages/attention.hpp"
#include "stages/compress.hpp"
#include "stages/linear.hpp"

namespace lowlat::host {
namespace {

namespace stages = lowlat::scalar::stages;
using Block = lowlat::scalar::plat::Block<256>;

// Refuses rows that hold a NaN code, or an infinity.
void require_finite_rows(const OpArgs& a, const char* name, std::int64_t rows) {
  const stages::KvFlat<const std::uint8_t> flat{a.in<std::uint8_t>(name).data()};
  float values[stages::kKvDim];
  for (std::int64_t i = 0; i < rows; ++i) {
    stages::KvUnpack<Block>::run(values, flat.row(i));
    for (int d = 0; d < stages::kKvDim; ++d) {
      require(values[d] - values[d] == 0.0f, std::string(name) + " row " + std::to_string(i) +
                                                 " holds no finite number at element " +
                                                 std::to_string(d) + "; needed finite keys");
    }
  }
}

OpSpec sparse_attention() {
  OpSpec op;
  op.name = "sparse_attention";
  op.models = "v4 v41";
  op.about =
      "softmax(512^-0.5 q k) over the stored rows that two index lists name, keys as values, a "
      "sink "
      "in the denominator; before the inverse rotation; an empty row gives 0";
  op.in = {{"q", LOWLAT_BF16, "bf16", "T,h,512", false, "queries, rotated"},
           {"swa", LOWLAT_U8, "u8", "S,584", false, "stored rows of the window"},
           {"swa_idx", LOWLAT_I32, "i32", "T,s", false, "rows of swa, -1 pads"},
           {"extra", LOWLAT_U8, "u8", "E,584", false, "stored rows of the compressed set"},
           {"extra_idx", LOWLAT_I32, "i32", "T,n", false, "rows of extra, -1 pads; n may be 0"},
           {"sink", LOWLAT_F32, "f32", "h", false, "logit of each head's sink, -inf: none"}};
  op.out = {{"o", LOWLAT_BF16, "bf16", "T,h,512", false, "outputs"}};
  op.numerics = {{"scalar nvidia", "o", "rel_l2 <= 5e-4"}};
  op.check = [spec = op](OpArgs& a) {
    require_dim(a, "h", 1, 1);
    require_finite(a, spec, "q");
    require_range(a, "swa_idx", -1, a.dim("S") - 1, "S = " + std::to_string(a.dim("S")));
    require_range(a, "extra_idx", -1, a.dim("E") - 1, "E = " + std::to_string(a.dim("E")));
    require_finite_rows(a, "swa", a.dim("S"));
    require_finite_rows(a, "extra", a.dim("E"));
    const auto sink = a.in<float>("sink");
    for (std::size_t h = 0; h < sink.size(); ++h) {
      require(sink[h] < std::numeric_limits<float>::infinity(),
              "sink[" + std::to_string(h) + "] is " + std::to_string(sink[h]) +
                  "; needed a finite logit or -inf for none");
    }
  };
  op.reference = [](const OpArgs& a) {
    reference::sparse_attention(
        a.out<std::uint16_t>("o").data(), a.in<std::uint16_t>("q").data(), a.dim("T"), a.dim("h"),
        {a.in<std::uint8_t>("swa").data(), a.in<std::int32_t>("swa_idx").data(), a.dim("s")},
        {a.in<std::uint8_t>("extra").data(), a.in<std::int32_t>("extra_idx").data(), a.dim("n")},
        a.in<float>("sink").data());
  };
  op.scalar = [](const OpArgs& a) {
    using Attention = stages::SparseAttention<Block>;
    using Rows = stages::KvFlat<const std::uint8_t>;
    const auto heads = static_cast<int>(a.dim("h"));
    const auto num_window = static_cast<int>(a.dim("s")), num_extra = static_cast<int>(a.dim("n"));
    const std::int64_t pitch = std::int64_t{heads} * stages::kKvDim;
    std::vector<float> memory(Attention::memory_floats(heads));
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      const stages::KeySet<Rows> window{a.in<std::int32_t>("swa_idx").data() + t * num_window,
                                        num_window,
                                        {a.in<std::uint8_t>("swa").data()}};
      const stages::KeySet<Rows> extra{a.in<std::int32_t>("extra_idx").data() + t * num_extra,
                                       num_extra,
                                       {a.in<std::uint8_t>("extra").data()}};
      Attention::run(a.out<std::uint16_t>("o").data() + t * pitch,
                     a.in<std::uint16_t>("q").data() + t * pitch, heads, window, extra,
                     a.in<float>("sink").data(), memory.data());
    }
  };
  return op;
}

OpSpec compress_v4() {
  OpSpec op;
  op.name = "compress";
  op.models = "v4";
  op.about =
      "compressed keys of one sequence from position 0: projection in fp32, a channel's softmax "
      "pooling by score + ape (ratio 4: of eight candidates, the overlap halves of the block "
      "before and the own halves of this; ratio 128: of the block), norm, RoPE at the block's "
      "first position, bf16";
  op.in = {{"x", LOWLAT_BF16, "bf16", "L,H", false, "inputs of the sequence"},
           {"wkv", LOWLAT_BF16, "bf16", "W,H", false,
            "projection to values; W = 1024 at ratio 4, 512 at 128"},
           {"wgate", LOWLAT_BF16, "bf16", "W,H", false, "projection to scores"},
           {"ape", LOWLAT_F32, "f32", "R,W", false, "added to the scores; R = ratio"},
           {"norm", LOWLAT_BF16, "bf16", "512", false, "weight of the norm"},
           {"ratio", LOWLAT_I64, "i64", "", false, "4 or 128"}};
  op.out = {{"kv", LOWLAT_F32, "f32", "N,512", false, "N = L / ratio entries, ready for kv_pack"}};
  op.numerics = {{"scalar nvidia", "kv", "rel_l2 <= 4e-3"}};
  op.check = [spec = op](OpArgs& a) {
    const std::int64_t ratio = a.scalar("ratio", 0);
    require(ratio == stages::kOverlapRatio || ratio == stages::kBlockRatio,
            "ratio is " + std::to_string(ratio) + "; v4 has ratios 4 and 128 only");
    require_pooling(a, {static_cast<int>(ratio), stages::kKvDim});
    require_sequence(a, spec, ratio);
  };
  op.reference = [](const OpArgs& a) {
    reference::compress_pooled(a.out<float>("kv").data(), a.in<std::uint16_t>("x").data(),
                               a.in<std::uint16_t>("wkv").data(),
                               a.in<std::uint16_t>("wgate").data(), a.in<float>("ape").data(),
                               a.in<std::uint16_t>("norm").data(), a.dim("L"), a.dim("H"),
                               a.scalar("ratio", 0), model_rules(a.model()).norm_eps);
  };
  op.scalar = [](const OpArgs& a) {
    using Key = stages::PooledKey<Block>;
    const stages::PoolLayout layout{static_cast<int>(a.scalar("ratio", 0)), stages::kKvDim};
    const auto eps = static_cast<float>(model_rules(a.model()).norm_eps);
    const stages::RopeTable rope = compressed_rope_table();
    typename Key::Scratch scratch;
    pool_sequence(a, layout, [&](std::int64_t n, float* c) {
      Key::entry(c, a.in<std::uint16_t>("norm").data(), eps,
                 stages::rope_turn(rope, n * layout.ratio), scratch);
      std::copy(c, c + stages::kKvDim, a.out<float>("kv").data() + n * stages::kKvDim);
    });
  };
  return op;
}

OpSpec compress_v41() {
  OpSpec op;
  op.name = "compress";
  op.models = "v41";
  op.about =
      "compressed keys of one sequence from position 0: projection in fp32, at ratio 2 pooling of "
      "pairs, bf16, norm, RoPE at the group's first position, four bits a value";
  op.in = {{"x", LOWLAT_BF16, "bf16", "L,H", false, "inputs of the sequence"},
           {"wkv", LOWLAT_BF16, "bf16", "512,H", false, "projection to values"},
           {"wgate", LOWLAT_BF16, "bf16", "512,H", true, "projection to scores, at ratio 2"},
           {"norm", LOWLAT_BF16, "bf16", "512", false, "weight of the norm"},
           {"ratio", LOWLAT_I64, "i64", "", false, "1 or 2"}};
  op.out = {{"kv", LOWLAT_F32, "f32", "N,512", false, "N = L / ratio entries, ready for kv_pack"}};
  // Seen: equal in 2e5 values. The room is for one code of a single entry on the other side of a
  // tie, after fp32 and float64 fell on two sides of a bf16 tie.
  op.numerics = {{"scalar nvidia", "kv", "rel_l2 <= 4e-2"}};
  op.check = [spec = op](OpArgs& a) {
    const std::int64_t ratio = a.scalar("ratio", 0);
    require(ratio == 1 || ratio == 2,
            "ratio is " + std::to_string(ratio) + "; v41 has ratios 1 and 2 only");
    require(ratio == 1 || a.has("wgate"), "wgate is missing; ratio 2 pools by its scores");
    require(ratio == 2 || !a.has("wgate"), "wgate is given; ratio 1 pools nothing");
    require_sequence(a, spec, ratio);
  };
  op.reference = [](const OpArgs& a) {
    reference::compress(a.out<float>("kv").data(), a.in<std::uint16_t>("x").data(),
                        a.in<std::uint16_t>("wkv").data(),
                        a.has("wgate") ? a.in<std::uint16_t>("wgate").data() : nullptr,
                        a.in<std::uint16_t>("norm").data(), a.dim("L"), a.dim("H"),
                        a.scalar("ratio", 0), model_rules(a.model()).norm_eps);
  };
  op.scalar = [](const OpArgs& a) {
    using Compressed = stages::CompressedKey<Block>;
    constexpr int kDim = stages::kKvDim;
    const auto hidden = static_cast<int>(a.dim("H"));
    const auto ratio = static_cast<int>(a.scalar("ratio", 0));
    const auto length = static_cast<int>(a.dim("N")) * ratio;  // the rows that make entries
    std::vector<float> x(static_cast<std::size_t>(length) * hidden), weight_row(hidden);
    stages::expand_bf16(x.data(), a.in<std::uint16_t>("x").data(), length * hidden);
    const auto project = [&](const char* name) {
      std::vector<float> y(static_cast<std::size_t>(length) * kDim);
      const stages::Bf16Weights weights{a.in<std::uint16_t>(name).data(), hidden};
      stages::linear(x.data(), hidden, length, hidden, weights, 0, kDim, weight_row.data(),
                     [&](int t, int n, float v) { y[static_cast<std::size_t>(t) * kDim + n] = v; });
      return y;
    };
    const std::vector<float> value = project("wkv");
    const std::vector<float> score = ratio == 2 ? project("wgate") : std::vector<float>{};
    const stages::RopeTable rope = compressed_rope_table();
    typename Compressed::Scratch scratch;
    for (std::int64_t n = 0; n < a.dim("N"); ++n) {
      float c[kDim];
      for (int i = 0; i < kDim; ++i) {
        const std::int64_t even = n * ratio * kDim + i, odd = even + kDim;
        c[i] = ratio == 2 ? stages::pool_pair(value[even], score[even], value[odd], score[odd])
                          : value[even];
      }
      std::uint16_t latent[kDim];
      Compressed::latent(latent, c, a.in<std::uint16_t>("norm").data(),
                         static_cast<float>(model_rules(a.model()).norm_eps), scratch);
      Compressed::entry(a.out<float>("kv").data() + n * kDim, latent,
                        stages::rope_turn(rope, n * ratio));
    }
  };
  return op;
}

}  // namespace

std::vector<OpSpec> ops_attention() { return {sparse_attention(), compress_v4(), compress_v41()}; }

}  // namespace lowlat::host

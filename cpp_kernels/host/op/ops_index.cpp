// Operations of the index: queries, keys, the selection of entries and the candidate blocks.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "host/op/models.hpp"
#include "host/op/pooling.hpp"
#include "host/op/registry.hpp"
#include "host/op/rope_tables.hpp"
#include "platform/scalar.hpp"
#include "reference/index.hpp"
#include "reference/select.hpp"
#include "stages/index.hpp"
#include "stages/linear.hpp"
#include "stages/select.hpp"

namespace lowlat::host {
namespace {

namespace stages = lowlat::scalar::stages;
using Block = lowlat::scalar::plat::Block<256>;

// More are a wrong number, not a case to run.
constexpr std::int64_t kMaxSelected = kMaxPositions;

template <class Byte>
using Fp8Rows = stages::IndexFlat<Byte, stages::kIndexFp8DataBytes>;

constexpr stages::PoolLayout kIndexPool{stages::kOverlapRatio, stages::kIndexDim};

void require_positions(const OpArgs& a) {
  require_range(a, "pos", 0, kMaxPositions - 1, std::to_string(kMaxPositions) + " positions");
}

// Binds k, the width of a selection.
void bind_selected(OpArgs& a) {
  require_range(a, "k", 1, kMaxSelected, "");
  a.set_dim("k", a.scalar("k", 0));
}

std::int64_t block_size(const OpArgs& a) { return a.scalar("block", kCandidateBlock); }

void require_count_and_block(const OpArgs& a) {
  require(a.dim("N") <= kMaxPositions, "N is " + std::to_string(a.dim("N")) + "; needed at most " +
                                           std::to_string(kMaxPositions));
  require_range(a, "count", 0, a.dim("N"), "N = " + std::to_string(a.dim("N")));
  if (a.has("block")) require_range(a, "block", 1, kMaxPositions, "");
}

// A row's blocks must be as candidate_blocks writes them.
void require_blocks(const OpArgs& a) {
  const auto blocks = a.in<std::int32_t>("blocks");
  const std::int64_t width = a.dim("M");
  for (std::int64_t i = 0; i < a.dim("T") * width; ++i) {
    const std::int64_t count = a.in<std::int64_t>("count")[i / width];
    const std::int64_t block = blocks[i];
    const std::int64_t num_blocks = (count + block_size(a) - 1) / block_size(a);
    require(block >= -1 && block < num_blocks,
            element_name(a, "blocks", i) + " is " + std::to_string(block) + "; needed -1 .. " +
                std::to_string(num_blocks - 1) + " (count = " + std::to_string(count) + ")");
    require(i % width == 0 || block == -1 || (blocks[i - 1] >= 0 && blocks[i - 1] < block),
            element_name(a, "blocks", i) + " is " + std::to_string(block) + " after " +
                std::to_string(blocks[i > 0 ? i - 1 : 0]) +
                "; needed ascending blocks with -1 at the end");
  }
}

OpSpec index_query_v4() {
  OpSpec op;
  op.name = "index_query";
  op.models = "v4";
  op.about =
      "RoPE of dimensions 64..127, Hadamard-128 (Sylvester's order) * 128^-0.5, then e4m3 codes "
      "under one fp32 scale a row and head, max(1e-4, amax) / 448, which belongs in "
      "index_select's weights";
  op.in = {{"q", LOWLAT_BF16, "bf16", "T,h,128", false, "projected queries"},
           {"pos", LOWLAT_I64, "i64", "T", false, "positions"}};
  op.out = {{"iq", LOWLAT_U8, "e4m3", "T,h,128", false, "codes for index_select"},
            {"qs", LOWLAT_F32, "f32", "T,h", false, "scale of each head's codes"}};
  // The room is for all codes of one magnitude that lie on a tie, as of a query of two channels.
  op.numerics = {{"scalar nvidia", "iq", "values rel_l2 <= 1e-1"},
                 {"scalar nvidia", "qs", "rel_l2 <= 1e-6"}};
  op.check = [spec = op](OpArgs& a) {
    require_dim(a, "h", 1, 1);
    require_all_finite(a, spec);
    require_positions(a);
  };
  op.reference = [](const OpArgs& a) {
    const std::int64_t heads = a.dim("h"), pitch = heads * stages::kIndexDim;
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      reference::index_query_fp8(
          a.out<std::uint8_t>("iq").data() + t * pitch, a.out<float>("qs").data() + t * heads,
          a.in<std::uint16_t>("q").data() + t * pitch, heads, a.in<std::int64_t>("pos")[t]);
    }
  };
  op.scalar = [](const OpArgs& a) {
    const auto heads = static_cast<int>(a.dim("h"));
    const int pitch = heads * stages::kIndexDim;
    const stages::RopeTable rope = compressed_rope_table();
    std::vector<float> query(pitch);
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      stages::expand_bf16(query.data(), a.in<std::uint16_t>("q").data() + t * pitch, pitch);
      stages::index_query_fp8<Block>(a.out<std::uint8_t>("iq").data() + t * pitch,
                                     a.out<float>("qs").data() + t * heads, query.data(), heads,
                                     stages::rope_turn(rope, a.in<std::int64_t>("pos")[t]));
    }
  };
  return op;
}

OpSpec index_query_v41() {
  OpSpec op;
  op.name = "index_query";
  op.models = "v41";
  op.about =
      "RoPE of dimensions 64..127, bf16, then every 32 channels through four bits and a power of "
      "two";
  op.in = {{"q", LOWLAT_BF16, "bf16", "T,h,128", false, "projected queries"},
           {"pos", LOWLAT_I64, "i64", "T", false, "positions"}};
  op.out = {{"iq", LOWLAT_BF16, "bf16", "T,h,128", false, "queries for index_select"}};
  // Seen: equal in 2e6 values. The room is for one code of a single head on the other side of a
  // tie, after fp32 and float64 fell on two sides of a bf16 tie in the rotation.
  op.numerics = {{"scalar nvidia", "iq", "rel_l2 <= 1e-1"}};
  op.check = [spec = op](OpArgs& a) {
    require_dim(a, "h", 1, 1);
    require_all_finite(a, spec);
    require_positions(a);
  };
  op.reference = [](const OpArgs& a) {
    const std::int64_t pitch = a.dim("h") * stages::kIndexDim;
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      reference::index_query(a.out<std::uint16_t>("iq").data() + t * pitch,
                             a.in<std::uint16_t>("q").data() + t * pitch, a.dim("h"),
                             a.in<std::int64_t>("pos")[t]);
    }
  };
  op.scalar = [](const OpArgs& a) {
    const auto heads = static_cast<int>(a.dim("h"));
    const int pitch = heads * stages::kIndexDim;
    const stages::RopeTable rope = compressed_rope_table();
    std::vector<float> query(pitch);
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      stages::expand_bf16(query.data(), a.in<std::uint16_t>("q").data() + t * pitch, pitch);
      stages::index_query<Block>(query.data(), heads,
                                 stages::rope_turn(rope, a.in<std::int64_t>("pos")[t]));
      std::uint16_t* out = a.out<std::uint16_t>("iq").data() + t * pitch;
      for (int i = 0; i < pitch; ++i) out[i] = stages::to_bf16(query[i]);
    }
  };
  return op;
}

OpSpec index_key_v4() {
  OpSpec op;
  op.name = "index_key";
  op.models = "v4";
  op.about =
      "stored index keys of one sequence from position 0: pooled as compress does at ratio 4, "
      "norm, RoPE of dimensions 64..127 at the block's first position, Hadamard-128 * 128^-0.5, "
      "e4m3 under one fp32 scale, max(1e-4, amax) / 448";
  op.in = {{"x", LOWLAT_BF16, "bf16", "L,H", false, "inputs of the sequence"},
           {"wkv", LOWLAT_BF16, "bf16", "W,H", false, "projection to values; W = 256"},
           {"wgate", LOWLAT_BF16, "bf16", "W,H", false, "projection to scores"},
           {"ape", LOWLAT_F32, "f32", "R,W", false, "added to the scores; R = 4"},
           {"norm", LOWLAT_BF16, "bf16", "128", false, "weight of the norm"}};
  op.out = {{"rows", LOWLAT_U8, "u8", "N,132", false,
             "N = L / 4 keys: 128 e4m3 codes, then the fp32 scale, low byte first"}};
  op.numerics = {{"scalar nvidia", "rows", "values rel_l2 <= 1e-1"}};
  op.check = [spec = op](OpArgs& a) {
    require_pooling(a, kIndexPool);
    require_sequence(a, spec, kIndexPool.ratio);
  };
  op.reference = [](const OpArgs& a) {
    reference::index_keys_fp8(a.out<std::uint8_t>("rows").data(), a.in<std::uint16_t>("x").data(),
                              a.in<std::uint16_t>("wkv").data(),
                              a.in<std::uint16_t>("wgate").data(), a.in<float>("ape").data(),
                              a.in<std::uint16_t>("norm").data(), a.dim("L"), a.dim("H"),
                              model_rules(a.model()).norm_eps);
  };
  op.scalar = [](const OpArgs& a) {
    using Key = stages::IndexKeyFp8<Block>;
    const auto eps = static_cast<float>(model_rules(a.model()).norm_eps);
    const stages::RopeTable rope = compressed_rope_table();
    const Fp8Rows<std::uint8_t> out{a.out<std::uint8_t>("rows").data()};
    typename Key::Scratch scratch;
    pool_sequence(a, kIndexPool, [&](std::int64_t n, float* c) {
      Key::run(out.row(n), c, a.in<std::uint16_t>("norm").data(), eps,
               stages::rope_turn(rope, n * kIndexPool.ratio), scratch);
    });
  };
  return op;
}

OpSpec index_key_v41() {
  OpSpec op;
  op.name = "index_key";
  op.models = "v41";
  op.about =
      "stored index keys from latents before RoPE: projection, bf16, norm, bf16, RoPE of "
      "dimensions "
      "64..127 at the group's first position, bf16, four bits with a power of two a 32";
  op.in = {{"latent", LOWLAT_BF16, "bf16", "T,512", false, "normed latents before RoPE"},
           {"wk", LOWLAT_BF16, "bf16", "128,512", false, "projection"},
           {"norm", LOWLAT_BF16, "bf16", "128", false, "weight of the norm"},
           {"pos", LOWLAT_I64, "i64", "T", false, "first position of each group"}};
  op.out = {{"rows", LOWLAT_U8, "u8", "T,68", false, "64 bytes of codes, then 4 ue8m0 scales"}};
  // Seen: equal in 6e4 bytes. The room is for one code of a single row, as for queries.
  op.numerics = {{"scalar nvidia", "rows", "values rel_l2 <= 1e-1"}};
  op.check = [spec = op](OpArgs& a) {
    require_all_finite(a, spec);
    require_positions(a);
  };
  op.reference = [](const OpArgs& a) {
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      reference::index_key(a.out<std::uint8_t>("rows").data() + t * stages::kIndexRowBytes,
                           a.in<std::uint16_t>("latent").data() + t * stages::kKvDim,
                           a.in<std::uint16_t>("wk").data(), a.in<std::uint16_t>("norm").data(),
                           a.in<std::int64_t>("pos")[t], model_rules(a.model()).norm_eps);
    }
  };
  op.scalar = [](const OpArgs& a) {
    const auto rows = static_cast<int>(a.dim("T"));
    std::vector<float> latent(static_cast<std::size_t>(rows) * stages::kKvDim);
    stages::expand_bf16(latent.data(), a.in<std::uint16_t>("latent").data(), rows * stages::kKvDim);
    std::vector<float> key(static_cast<std::size_t>(rows) * stages::kIndexDim);
    std::vector<float> weight_row(stages::kKvDim);
    const stages::Bf16Weights weights{a.in<std::uint16_t>("wk").data(), stages::kKvDim};
    stages::linear(latent.data(), stages::kKvDim, rows, stages::kKvDim, weights, 0,
                   stages::kIndexDim, weight_row.data(),
                   [&](int t, int n, float v) { key[t * stages::kIndexDim + n] = v; });
    const stages::IndexFlat<std::uint8_t> out{a.out<std::uint8_t>("rows").data()};
    const stages::RopeTable rope = compressed_rope_table();
    stages::IndexKey<Block>::Scratch scratch;
    for (int t = 0; t < rows; ++t) {
      stages::IndexKey<Block>::run(out.row(t), &key[t * stages::kIndexDim],
                                   a.in<std::uint16_t>("norm").data(),
                                   static_cast<float>(model_rules(a.model()).norm_eps),
                                   stages::rope_turn(rope, a.in<std::int64_t>("pos")[t]), scratch);
    }
  };
  return op;
}

// Refuses stored keys with a value that is no number. Rows of V4.1: scales; of V4: codes and scale.
void require_keys(const OpArgs& a) {
  const auto rows = a.in<std::uint8_t>("ik");
  const bool fp8 = a.model() == "v4";
  const std::int64_t data_bytes = fp8 ? stages::kIndexFp8DataBytes : stages::kIndexDataBytes;
  const std::int64_t row_bytes = data_bytes + stages::kIndexScaleBytes;
  for (std::int64_t i = 0; i < a.dim("N"); ++i) {
    const std::int64_t row = i * row_bytes, scales = row + data_bytes;
    for (std::int64_t at = row; fp8 && at < scales; ++at) {
      require((rows[at] & 0x7fu) != 0x7fu, element_name(a, "ik", at) + " is " +
                                               std::to_string(rows[at]) +
                                               ", a code that is no number; needed a finite value");
    }
    if (fp8) {
      // Finite fp32: not all exponent bits are set.
      const bool finite = (rows[scales + 3] & 0x7fu) != 0x7fu || (rows[scales + 2] & 0x80u) == 0u;
      require(finite, element_name(a, "ik", scales) +
                          " begins a scale that is nan or infinite; needed a finite fp32");
    }
    for (std::int64_t at = scales; !fp8 && at < row + row_bytes; ++at) {
      require(rows[at] != 255u,
              element_name(a, "ik", at) + " is 255, the scale that is no number; needed 0 .. 254");
    }
  }
}

std::vector<double> reference_scores(const OpArgs& a, std::int64_t t) {
  const std::int64_t heads = a.dim("h"), count = a.in<std::int64_t>("count")[t];
  const float* weights = a.in<float>("weights").data() + t * heads;
  const std::uint8_t* rows = a.in<std::uint8_t>("ik").data();
  const std::int64_t first = t * heads * stages::kIndexDim;
  return a.model() == "v4" ? reference::index_scores_fp8(a.in<std::uint8_t>("iq").data() + first,
                                                         weights, heads, rows, count)
                           : reference::index_scores(a.in<std::uint16_t>("iq").data() + first,
                                                     weights, heads, rows, count);
}

// out: k entries a row. Rows is how keys lie; expand(query, first, n) gives n values of iq in fp32.
template <class Rows, class Expand>
void scalar_select(const OpArgs& a, const Rows& rows, const Expand& expand) {
  const auto heads = static_cast<int>(a.dim("h")), k = static_cast<int>(a.dim("k"));
  const int pitch = heads * stages::kIndexDim;
  std::vector<float> query(pitch), scores(a.dim("N"));
  stages::SelectScratch scratch;
  for (std::int64_t t = 0; t < a.dim("T"); ++t) {
    const auto count = static_cast<int>(a.in<std::int64_t>("count")[t]);
    const float* weights = a.in<float>("weights").data() + t * heads;
    std::int32_t* out = a.out<std::int32_t>("idx").data() + t * k;
    expand(query.data(), t * pitch, pitch);
    const auto select = [&](const auto& position_of, int n) {
      stages::index_scores<Block>(scores.data(), query.data(), weights, heads, rows, position_of, 0,
                                  n);
      stages::select_top(out, scores.data(), n, k, position_of, scratch);
    };
    if (a.has("blocks")) {
      const auto width = static_cast<int>(a.dim("M"));
      const stages::BlockPositions positions{a.in<std::int32_t>("blocks").data() + t * width, width,
                                             static_cast<int>(block_size(a)), count};
      select(positions, positions.size());
    } else {
      select(stages::AllPositions{}, count);
    }
  }
}

OpSpec index_select(bool fp8) {
  OpSpec op;
  op.name = "index_select";
  op.models = fp8 ? "v4" : "v41";
  op.about =
      fp8 ? "the k entries of highest sum_h weights_h * relu(iq_h . ik_n) among a row's first "
            "count "
            "entries, ties to the lower entry; iq are codes, ik codes times their scale"
          : "the k entries of highest sum_h weights_h * relu(iq_h . ik_n) among a row's first "
            "count "
            "entries, ties to the lower entry; with blocks, among the entries of those blocks only";
  if (fp8) {
    op.in = {{"iq", LOWLAT_U8, "e4m3", "T,h,128", false, "codes of the queries"},
             {"ik", LOWLAT_U8, "u8", "N,132", false, "stored index keys"},
             {"weights", LOWLAT_F32, "f32", "T,h", false,
              "weight of each head, its codes' scale in it"}};
  } else {
    op.in = {{"iq", LOWLAT_BF16, "bf16", "T,h,128", false, "queries"},
             {"ik", LOWLAT_U8, "u8", "N,68", false, "stored index keys"},
             {"weights", LOWLAT_F32, "f32", "T,h", false, "weight of each head"}};
  }
  op.in.push_back({"count", LOWLAT_I64, "i64", "T", false, "entries that a row may see, 0 .. N"});
  op.in.push_back({"k", LOWLAT_I64, "i64", "", false, "entries to select"});
  if (!fp8) {
    op.in.push_back(
        {"blocks", LOWLAT_I32, "i32", "T,M", true, "candidate blocks, ascending, -1 at the end"});
    op.in.push_back({"block", LOWLAT_I64, "i64", "", true, "entries of a candidate block (8)"});
  }
  op.out = {{"idx", LOWLAT_I32, "i32", "T,k", false, "ascending, -1 at the end"}};
  op.numerics = {{"scalar nvidia", "idx",
                  "equal as sets but for entries whose float64 scores are within "
                  "1e-5 * max_n sum_h |weights_h * relu(iq_h . ik_n)| of the k-th best"}};
  op.check = [spec = op](OpArgs& a) {
    require_dim(a, "h", 1, 1);
    require_all_finite(a, spec);
    require_count_and_block(a);
    bind_selected(a);
    require_keys(a);
    if (a.has("blocks")) require_blocks(a);
  };
  op.reference = [](const OpArgs& a) {
    const std::int64_t k = a.dim("k");
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      const std::int64_t count = a.in<std::int64_t>("count")[t];
      const std::vector<double> scores = reference_scores(a, t);
      std::vector<std::int32_t> entries;
      std::vector<double> candidates;
      for (std::int64_t n = 0; n < count; ++n) {
        const auto first = a.has("blocks") ? a.in<std::int32_t>("blocks").begin() + t * a.dim("M")
                                           : std::span<const std::int32_t>::iterator{};
        if (a.has("blocks") &&
            std::find(first, first + a.dim("M"), n / block_size(a)) == first + a.dim("M")) {
          continue;
        }
        entries.push_back(static_cast<std::int32_t>(n));
        candidates.push_back(scores[n]);
      }
      std::int32_t* out = a.out<std::int32_t>("idx").data() + t * k;
      std::fill(out, out + k, -1);
      for (const std::int32_t i : reference::select_top(candidates, k)) *out++ = entries[i];
    }
  };
  op.scalar = [](const OpArgs& a) {
    const std::uint8_t* rows = a.in<std::uint8_t>("ik").data();
    if (a.model() == "v4") {
      scalar_select(a, Fp8Rows<const std::uint8_t>{rows}, [&](float* query, auto first, int n) {
        stages::expand_e4m3(query, a.in<std::uint8_t>("iq").data() + first, 1.0f, n);
      });
    } else {
      scalar_select(a, stages::IndexFlat<const std::uint8_t>{rows},
                    [&](float* query, auto first, int n) {
                      stages::expand_bf16(query, a.in<std::uint16_t>("iq").data() + first, n);
                    });
    }
  };
  return op;
}

OpSpec candidate_blocks() {
  OpSpec op;
  op.name = "candidate_blocks";
  op.models = "v41";
  op.about =
      "the k blocks of highest score among a row's first count entries, a block's score being its "
      "best entry's and the newest block always taken; ties to the lower block; all when no more "
      "than k";
  op.in = {{"score", LOWLAT_F32, "f32", "T,N", false, "index scores"},
           {"count", LOWLAT_I64, "i64", "T", false, "entries that a row may see, 0 .. N"},
           {"k", LOWLAT_I64, "i64", "", false, "blocks to select"},
           {"block", LOWLAT_I64, "i64", "", true, "entries of a block (8)"}};
  op.out = {{"blocks", LOWLAT_I32, "i32", "T,k", false, "ascending, -1 at the end"}};
  op.numerics = {{"scalar nvidia", "blocks", "bitwise"}};
  op.check = [spec = op](OpArgs& a) {
    require_all_finite(a, spec);
    require_count_and_block(a);
    bind_selected(a);
  };
  op.reference = [](const OpArgs& a) {
    const std::int64_t k = a.dim("k");
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      const float* score = a.in<float>("score").data() + t * a.dim("N");
      const std::vector<double> seen(score, score + a.in<std::int64_t>("count")[t]);
      std::int32_t* out = a.out<std::int32_t>("blocks").data() + t * k;
      std::fill(out, out + k, -1);
      for (const std::int32_t b : reference::candidate_blocks(seen, block_size(a), k)) *out++ = b;
    }
  };
  op.scalar = [](const OpArgs& a) {
    const auto k = static_cast<int>(a.dim("k")), size = static_cast<int>(block_size(a));
    std::vector<float> block_scores(a.dim("N") / size + 1);
    stages::SelectScratch scratch;
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      stages::candidate_blocks(a.out<std::int32_t>("blocks").data() + t * k,
                               a.in<float>("score").data() + t * a.dim("N"),
                               static_cast<int>(a.in<std::int64_t>("count")[t]), size, k,
                               block_scores.data(), scratch);
    }
  };
  return op;
}

}  // namespace

std::vector<OpSpec> ops_index() {
  return {index_query_v4(),   index_query_v41(),   index_key_v4(),    index_key_v41(),
          index_select(true), index_select(false), candidate_blocks()};
}

}  // namespace lowlat::host

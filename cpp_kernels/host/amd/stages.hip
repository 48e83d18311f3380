// Every stage as a kernel of its own, for the platform amd: what runs a code object stage by stage
// (a test's interpreter, or an owner of such a GPU) compares each with reference/.
//
// Arrays and sizes are arguments, as they are in the stage; a block has 256 threads. Where not said
// otherwise, block t takes row t. `memory` is fp32 scratch, in device memory, of the size that is
// said. See host/nvidia/ops_*.cu for the same operations as they are launched there.
#include "platform/amd.hpp"
#include "platform/contract.hpp"
// The platform comes first.
#include "persistent/grid.hpp"
#include "platform/amd_mfma.hpp"
#include "stages/accept.hpp"
#include "stages/attention.hpp"
#include "stages/compress.hpp"
#include "stages/draft.hpp"
#include "stages/engram.hpp"
#include "stages/exchange.hpp"
#include "stages/experts.hpp"
#include "stages/gate.hpp"
#include "stages/hc.hpp"
#include "stages/index.hpp"
#include "stages/kv.hpp"
#include "stages/linear.hpp"
#include "stages/norm.hpp"
#include "stages/pool.hpp"
#include "stages/rank_sum.hpp"
#include "stages/rope.hpp"
#include "stages/select.hpp"

namespace persistent = lowlat::amd::persistent;
namespace plat = lowlat::amd::plat;
namespace stages = lowlat::amd::stages;

namespace {

using Block = plat::Block<256>;
using Bf16 = std::uint16_t;
using Byte = std::uint8_t;
constexpr int kThreads = Block::kNumThreads;
// Weight rows that a block takes.
constexpr int kRowsOfBlock = stages::DotTeam<Block>::kNum;

LOWLAT_DEVICE std::int64_t block() { return plat::block_idx(); }
LOWLAT_DEVICE int least(int a, int b) { return a < b ? a : b; }

// body(i) for 0 .. n - 1, split over the threads of the block.
template <class Body>
LOWLAT_DEVICE void spread(std::int64_t n, Body&& body) {
  for (std::int64_t i = plat::thread_idx(); i < n; i += kThreads) body(i);
}

// Block b takes kRowsOfBlock weight rows of num_outputs: y[t, n].
template <class Weights>
LOWLAT_DEVICE void linear_rows(float* y, const float* x, int num_rows, int k,
                               const Weights& weights, int num_outputs) {
  const int begin = kRowsOfBlock * plat::block_idx();
  stages::linear<Block>(x, k, num_rows, k, weights, begin, least(begin + kRowsOfBlock, num_outputs),
                        nullptr,
                        [&](int t, int n, float v) { y[std::int64_t{t} * num_outputs + n] = v; });
}

}  // namespace

// ------------------------------------------------------------------ arithmetic and formats

// out[i] of `function`: 0 exp, 1 log, 2 log1p, 3 sin, 4 cos, 5 sqrt, 6 rsqrt, 7 x / other,
// 8 pow(x, other), 9 fma(x, other, x), 10 x * other + x in two roundings. Block b takes values
// 256 b and on.
LOWLAT_KERNEL(kThreads)
lowlat_stage_math(float* out, const float* x, const float* other, int function, std::int64_t n) {
  const std::int64_t i = block() * kThreads + plat::thread_idx();
  if (i >= n) return;
  const float v = x[i];
  switch (function) {
    case 0: out[i] = plat::exp(v); break;
    case 1: out[i] = plat::log(v); break;
    case 2: out[i] = plat::log1p(v); break;
    case 3: out[i] = plat::sin(v); break;
    case 4: out[i] = plat::cos(v); break;
    case 5: out[i] = plat::sqrt(v); break;
    case 6: out[i] = plat::rsqrt(v); break;
    case 7: out[i] = v / other[i]; break;
    case 8: out[i] = plat::pow(v, other[i]); break;
    case 9: out[i] = plat::fma(v, other[i], v); break;
    default: out[i] = v * other[i] + v;
  }
}

// Codes of every format of x[i]: bf16, e4m3 and e2m1; and back. Block b takes values 256 b and on.
LOWLAT_KERNEL(kThreads)
lowlat_stage_formats(Bf16* out_bf16, Byte* out_e4m3, Byte* out_e2m1, float* out_back,
                     const float* x, std::int64_t n) {
  const std::int64_t i = block() * kThreads + plat::thread_idx();
  if (i >= n) return;
  out_bf16[i] = stages::to_bf16(x[i]);
  out_e4m3[i] = stages::to_e4m3(x[i]);
  out_e2m1[i] = stages::to_e2m1(x[i]);
  out_back[3 * i] = stages::from_bf16(out_bf16[i]);
  out_back[3 * i + 1] = stages::from_e4m3(out_e4m3[i]);
  out_back[3 * i + 2] = stages::from_e2m1(out_e2m1[i]);
}

// Collectives of the block: out[0] the sum and out[1] the maximum of x[256], out[2] whether one is
// negative; out_warp[w, 0 .. 2] sum, maximum and ballot (its two halves' popcount) of a wave.
LOWLAT_KERNEL(kThreads)
lowlat_stage_collectives(float* out, float* out_warp, std::uint64_t* out_ballot, const float* x) {
  using Sum = stages::BlockSum<Block>;
  using Max = stages::BlockMax<Block>;
  LOWLAT_SHARED(Sum::Scratch, scratch);
  const int thread = plat::thread_idx(), warp = thread / plat::kWarpLanes;
  const float v = x[thread];
  const float sum = Sum::run(v, scratch), max = Max::run(v, scratch);
  const bool any = plat::block_any(v < 0.0f);
  const float warp_sum = plat::warp_sum(v), warp_max = plat::warp_max(v);
  const std::uint64_t ballot = plat::warp_ballot(v < 0.0f);
  if (thread % plat::kWarpLanes == 0) {
    out_warp[2 * warp] = warp_sum;
    out_warp[2 * warp + 1] = warp_max;
    out_ballot[warp] = ballot;
  }
  if (thread == 0) {
    out[0] = sum;
    out[1] = max;
    out[2] = any ? 1.0f : 0.0f;
    out[3] = static_cast<float>(plat::popcount(ballot));
  }
}

// ------------------------------------------------------------------ linears

LOWLAT_KERNEL(kThreads)
lowlat_stage_expand(float* out, const Bf16* x, int n) {
  stages::expand_bf16<Block>(out + block() * n, x + block() * n, n);
}
LOWLAT_KERNEL(kThreads)
lowlat_stage_quantize(float* out, const Bf16* x, int n, int group) {
  stages::quantize_row<Block>(out + block() * n, x + block() * n, n, group);
}
// Of the linears block b takes 16 weight rows: y fp32 [num_rows, num_outputs]. x holds bf16 values,
// but for linear_fp8_f32.
LOWLAT_KERNEL(kThreads)
lowlat_stage_linear_bf16(float* y, const float* x, const Bf16* w, int num_rows, int k,
                         int num_outputs) {
  linear_rows(y, x, num_rows, k, stages::Bf16Weights{w, k}, num_outputs);
}
LOWLAT_KERNEL(kThreads)
lowlat_stage_linear_fp8(float* y, const float* x, const Byte* w, const Byte* scales, int num_rows,
                        int k, int num_outputs, int scale_block) {
  linear_rows(y, x, num_rows, k,
              stages::E4m3Weights<stages::ScaleUe8m0>{w, k, {scales, k / scale_block}, scale_block},
              num_outputs);
}
LOWLAT_KERNEL(kThreads)
lowlat_stage_linear_fp8_f32(float* y, const float* x, const Byte* w, const float* scales,
                            int num_rows, int k, int num_outputs, int scale_block) {
  linear_rows(y, x, num_rows, k,
              stages::E4m3Weights<stages::ScaleF32>{w, k, {scales, k / scale_block}, scale_block},
              num_outputs);
}
LOWLAT_KERNEL(kThreads)
lowlat_stage_linear_fp4(float* y, const float* x, const Byte* w, const Byte* scales, int num_rows,
                        int k, int num_outputs) {
  linear_rows(y, x, num_rows, k, stages::Fp4Weights{w, k / 2, scales, k / 32}, num_outputs);
}

// The matrix unit's: wave w of block b makes y[0 .. 15, 16 (4 b + w) ..] of 16 rows of x; y fp32
// [16, num_outputs], num_outputs a multiple of 64, k of 128.
namespace {

template <class Multiply>
LOWLAT_DEVICE void tile_rows(float* y, int num_outputs, Multiply&& multiply) {
  const int first = 16 * (4 * plat::block_idx() + plat::thread_idx() / plat::kWarpLanes);
  lowlat::amd::mfma::Tile tile;
  multiply(tile, first);
  for (int i = 0; i < 4; ++i) y[tile.row(i) * num_outputs + first + tile.col()] = tile.sums[i];
}

}  // namespace

LOWLAT_KERNEL(kThreads)
lowlat_stage_tile_fp8(float* y, const Byte* x, const Byte* w, int k, int num_outputs) {
  tile_rows(y, num_outputs, [&](auto& tile, std::int64_t first) {
    lowlat::amd::mfma::multiply_fp8(tile, x, k, w + first * k, k, k);
  });
}
LOWLAT_KERNEL(kThreads)
lowlat_stage_tile_fp4(float* y, const Byte* x, const Byte* x_scales, const Byte* w,
                      const Byte* w_scales, int k, int num_outputs) {
  tile_rows(y, num_outputs, [&](auto& tile, std::int64_t first) {
    lowlat::amd::mfma::multiply_fp4(tile, x, k / 2, x_scales, k / 32, w + first * (k / 2), k / 2,
                                    w_scales + first * (k / 32), k / 32, k);
  });
}

// ------------------------------------------------------------------ norms and hyper-connections

// memory: n floats a row; gain may be null.
LOWLAT_KERNEL(kThreads)
lowlat_stage_rms_norm(Bf16* out, float* memory, const Bf16* x, const Bf16* gain, int n, float eps) {
  using Norm = stages::RmsNorm<Block>;
  LOWLAT_SHARED(Norm::Scratch, scratch);
  const std::int64_t first = block() * n;
  stages::expand_bf16<Block>(memory + first, x + first, n);
  plat::block_sync();
  if (gain == nullptr) {
    Norm::run(out + first, memory + first, n, eps, scratch);
  } else {
    Norm::run(out + first, memory + first, gain, n, eps, scratch);
  }
}
// memory: 4 hidden floats a row.
LOWLAT_KERNEL(kThreads)
lowlat_stage_hc_stats(float* out_pre, float* out_post, float* out_comb, float* memory,
                      const Bf16* residual, const float* fn, const float* base, const float* scale,
                      int hidden, float eps, float hc_eps, int num_iters) {
  using Stats = stages::HcStats<Block>;
  LOWLAT_SHARED(Stats::Scratch, scratch);
  LOWLAT_SHARED(stages::HcParams, params);
  const std::int64_t t = block(), n = std::int64_t{4} * hidden;
  float* row = memory + t * n;
  stages::expand_bf16<Block>(row, residual + t * n, static_cast<int>(n));
  plat::block_sync();
  float mix[stages::kHcOutputs];
  Stats::mix(mix, row, fn, hidden, eps, scratch);
  Stats::params(params, mix, base, scale, hc_eps, num_iters);
  plat::block_sync();
  const int i = plat::thread_idx();
  if (i < stages::kHcStreams) {
    out_pre[4 * t + i] = params.pre[i];
    out_post[4 * t + i] = params.post[i];
  }
  if (i < 16) out_comb[16 * t + i] = params.comb[i / 4][i % 4];
}
// memory: hidden floats a row. unrounded: V4's statistic of the norm, else V4.1's.
LOWLAT_KERNEL(kThreads)
lowlat_stage_hc_combine_norm(Bf16* out, float* memory, const Bf16* residual, const float* pre,
                             const Bf16* gain, int hidden, float eps, int unrounded) {
  using Norm = stages::RmsNorm<Block>;
  LOWLAT_SHARED(Norm::Scratch, scratch);
  const std::int64_t t = block();
  stages::hc_combine_norm<Block>(
      out + t * hidden, residual + 4 * t * hidden, pre + 4 * t, gain, hidden, eps,
      memory + t * hidden, scratch,
      unrounded != 0 ? stages::HcStatistic::unrounded : stages::HcStatistic::rounded);
}
LOWLAT_KERNEL(kThreads)
lowlat_stage_hc_post(Bf16* out, const Bf16* residual, const Bf16* y, const float* post,
                     const float* comb, int hidden) {
  const std::int64_t t = block();
  float streams[stages::kHcStreams][stages::kHcStreams];
  for (int i = 0; i < 16; ++i) streams[i / 4][i % 4] = comb[16 * t + i];
  stages::hc_post<Block>(out + 4 * t * hidden, residual + 4 * t * hidden, y + t * hidden,
                         post + 4 * t, streams, hidden, 0, hidden);
}
// memory: 4 hidden floats a row.
LOWLAT_KERNEL(kThreads)
lowlat_stage_hc_head(Bf16* out, float* memory, const Bf16* residual, const float* fn,
                     const float* base, const float* scale, int hidden, float eps, float hc_eps) {
  using Stats = stages::HcStats<Block>;
  LOWLAT_SHARED(Stats::Scratch, scratch);
  const std::int64_t t = block(), n = std::int64_t{4} * hidden;
  float* row = memory + t * n;
  stages::expand_bf16<Block>(row, residual + t * n, static_cast<int>(n));
  plat::block_sync();
  float mix[stages::kHcStreams], pre[stages::kHcStreams];
  Stats::mix(mix, row, fn, hidden, eps, scratch, stages::kHcStreams);
  Stats::pre(pre, mix, base, scale[0], hc_eps);
  stages::hc_combine<Block>(residual + t * n, pre, hidden,
                            [&](int h, float v) { out[t * hidden + h] = stages::to_bf16(v); });
}
// Partials [num_ranks, rows, n], `total` = rows * n.
LOWLAT_KERNEL(kThreads)
lowlat_stage_rank_sum(Bf16* out, const float* partial, int num_ranks, std::int64_t total, int n) {
  const std::int64_t first = block() * n;
  stages::rank_sum<Block>(out + first, num_ranks, 0, n,
                          [=](int rank, int i) { return partial[rank * total + first + i]; });
}

// ------------------------------------------------------------------ positions and stored rows

// Block b: head b % heads of row b / heads. x and out bf16 [rows, heads, dim].
LOWLAT_KERNEL(kThreads)
lowlat_stage_rope(Bf16* out, const Bf16* x, const std::int64_t* pos, stages::RopeTable table,
                  int heads, int dim, int inverse) {
  LOWLAT_SHARED(stages::RopeTurn, turn);
  const std::int64_t first = block() * dim;
  stages::rope_turn<Block>(turn, table, pos[block() / heads]);
  spread(dim, [&](std::int64_t i) { out[first + i] = x[first + i]; });
  plat::block_sync();
  if (inverse != 0 && plat::thread_idx() == 0) turn = stages::rope_inverse(turn);
  plat::block_sync();
  stages::Rope<Block>::rotate(out + first + dim - stages::kRopeDim, turn);
}
LOWLAT_KERNEL(kThreads)
lowlat_stage_kv_pack(Byte* out, const float* kv) {
  const stages::KvRow<Byte> row = stages::KvFlat<Byte>{out}.row(block());
  stages::KvPack<Block>::run(row, kv + block() * stages::kKvDim);
  if (plat::thread_idx() == 0) row.scales[stages::kKvNumGroups] = 0;  // the padding
}
LOWLAT_KERNEL(kThreads)
lowlat_stage_kv_unpack(float* out, const Byte* rows) {
  stages::KvUnpack<Block>::run(out + block() * stages::kKvDim,
                               stages::KvFlat<const Byte>{rows}.row(block()));
}

// ------------------------------------------------------------------ attention and its keys

// Block b: head b % heads of row b / heads. Stored rows (KV_FLAT) and, a row, the ids of its keys.
LOWLAT_KERNEL(kThreads)
lowlat_stage_attention(Bf16* out, const Bf16* q, const Byte* window, const std::int32_t* window_ids,
                       int num_window, const Byte* extra, const std::int32_t* extra_ids,
                       int num_extra, const float* sink, int heads) {
  using Attention = stages::SparseAttention<Block>;
  using Memory = float[Attention::memory_floats(1)];
  using Rows = stages::KvFlat<const Byte>;
  LOWLAT_SHARED(Memory, memory);
  const std::int64_t t = block() / heads, head = block() % heads, at = block() * stages::kKvDim;
  Attention::run(
      out + at, q + at, 1, stages::KeySet<Rows>{window_ids + t * num_window, num_window, {window}},
      stages::KeySet<Rows>{extra_ids + t * num_extra, num_extra, {extra}}, sink + head, memory);
}
// V4.1's compressed key of `ratio` projected tokens: value, score fp32 [entries ratio, 512]; score
// is null at ratio 1.
LOWLAT_KERNEL(kThreads)
lowlat_stage_compress(float* out, const float* value, const float* score, const Bf16* gain,
                      stages::RopeTable table, int ratio, float eps) {
  using Compressed = stages::CompressedKey<Block>;
  using Floats = float[stages::kKvDim];
  using Codes = Bf16[stages::kKvDim];
  LOWLAT_SHARED(Floats, c);
  LOWLAT_SHARED(Codes, latent);
  LOWLAT_SHARED(stages::RopeTurn, turn);
  LOWLAT_SHARED(Compressed::Scratch, scratch);
  const std::int64_t n = block();
  spread(stages::kKvDim, [&](std::int64_t i) {
    const std::int64_t even = n * ratio * stages::kKvDim + i, odd = even + stages::kKvDim;
    c[i] = score == nullptr ? value[even]
                            : stages::pool_pair(value[even], score[even], value[odd], score[odd]);
  });
  stages::rope_turn<Block>(turn, table, n * ratio);
  plat::block_sync();
  Compressed::latent(latent, c, gain, eps, scratch);
  Compressed::entry(out + n * stages::kKvDim, latent, turn);
}

namespace {

struct NoRing {
  LOWLAT_DEVICE const float* operator()(std::int64_t) const { return nullptr; }
};
// c of entry `n` of a sequence that is one step. Syncs at the end.
LOWLAT_DEVICE void pool_entry(float* c, const stages::PoolLayout& layout, const float* step,
                              const float* ape, std::int64_t n,
                              stages::PoolEntry<Block>::Scratch& scratch) {
  const stages::PoolRows<NoRing> rows{step, 0, layout.width(), {}};
  stages::PoolEntry<Block>::run(c, layout, ape, n, rows, 0, layout.dim, scratch);
}

}  // namespace

// V4's pooled key: step fp32 [entries ratio, width], values then scores.
LOWLAT_KERNEL(kThreads)
lowlat_stage_pooled_key(float* out, int ratio, const float* step, const float* ape,
                        const Bf16* gain, stages::RopeTable table, float eps) {
  using Key = stages::PooledKey<Block>;
  using Floats = float[stages::kKvDim];
  LOWLAT_SHARED(Floats, c);
  LOWLAT_SHARED(stages::RopeTurn, turn);
  LOWLAT_SHARED(stages::PoolEntry<Block>::Scratch, pool_scratch);
  LOWLAT_SHARED(Key::Scratch, scratch);
  const stages::PoolLayout layout{ratio, stages::kKvDim};
  pool_entry(c, layout, step, ape, block(), pool_scratch);
  stages::rope_turn<Block>(turn, table, block() * ratio);
  plat::block_sync();
  Key::entry(c, gain, eps, turn, scratch);
  spread(stages::kKvDim, [&](std::int64_t i) { out[block() * stages::kKvDim + i] = c[i]; });
}

// ------------------------------------------------------------------ index

// queries fp32 [rows, heads, 128], bf16 values; used as memory.
LOWLAT_KERNEL(kThreads)
lowlat_stage_index_query(Bf16* out, float* queries, const std::int64_t* pos,
                         stages::RopeTable table, int heads) {
  LOWLAT_SHARED(stages::RopeTurn, turn);
  const std::int64_t pitch = std::int64_t{heads} * stages::kIndexDim, first = block() * pitch;
  stages::rope_turn<Block>(turn, table, pos[block()]);
  plat::block_sync();
  stages::index_query<Block>(queries + first, heads, turn);
  spread(pitch, [&](std::int64_t i) { out[first + i] = stages::to_bf16(queries[first + i]); });
}
LOWLAT_KERNEL(kThreads)
lowlat_stage_index_query_fp8(Byte* out_codes, float* out_scales, float* queries,
                             const std::int64_t* pos, stages::RopeTable table, int heads) {
  LOWLAT_SHARED(stages::RopeTurn, turn);
  const std::int64_t first = block() * heads * stages::kIndexDim;
  stages::rope_turn<Block>(turn, table, pos[block()]);
  plat::block_sync();
  stages::index_query_fp8<Block>(out_codes + first, out_scales + block() * heads, queries + first,
                                 heads, turn);
}
// keys fp32 [rows, 128], the projections; used as memory.
LOWLAT_KERNEL(kThreads)
lowlat_stage_index_key(Byte* out, float* keys, const Bf16* gain, const std::int64_t* pos,
                       stages::RopeTable table, float eps) {
  using Key = stages::IndexKey<Block>;
  LOWLAT_SHARED(stages::RopeTurn, turn);
  LOWLAT_SHARED(Key::Scratch, scratch);
  stages::rope_turn<Block>(turn, table, pos[block()]);
  plat::block_sync();
  Key::run(stages::IndexFlat<Byte>{out}.row(block()), keys + block() * stages::kIndexDim, gain, eps,
           turn, scratch);
}
LOWLAT_KERNEL(kThreads)
lowlat_stage_index_key_fp8(Byte* out, const float* step, const float* ape, const Bf16* gain,
                           stages::RopeTable table, float eps) {
  using Key = stages::IndexKeyFp8<Block>;
  using Floats = float[stages::kIndexDim];
  LOWLAT_SHARED(Floats, c);
  LOWLAT_SHARED(stages::RopeTurn, turn);
  LOWLAT_SHARED(stages::PoolEntry<Block>::Scratch, pool_scratch);
  LOWLAT_SHARED(Key::Scratch, scratch);
  const stages::PoolLayout layout{stages::kOverlapRatio, stages::kIndexDim};
  pool_entry(c, layout, step, ape, block(), pool_scratch);
  stages::rope_turn<Block>(turn, table, block() * layout.ratio);
  plat::block_sync();
  Key::run(stages::IndexFlat<Byte, stages::kIndexFp8DataBytes>{out}.row(block()), c, gain, eps,
           turn, scratch);
}
// Scores fp32 [rows, n] of entries 0 .. n - 1 with V4.1's keys, or V4's. One block a row.
LOWLAT_KERNEL(kThreads)
lowlat_stage_index_scores(float* scores, const float* queries, const float* weights, int heads,
                          const Byte* keys, int n) {
  stages::index_scores<Block>(scores + block() * n, queries + block() * heads * stages::kIndexDim,
                              weights + block() * heads, heads, stages::IndexFlat<const Byte>{keys},
                              stages::AllPositions{}, 0, n);
}
LOWLAT_KERNEL(kThreads)
lowlat_stage_index_scores_fp8(float* scores, const float* queries, const float* weights, int heads,
                              const Byte* keys, int n) {
  stages::index_scores<Block>(scores + block() * n, queries + block() * heads * stages::kIndexDim,
                              weights + block() * heads, heads,
                              stages::IndexFlat<const Byte, stages::kIndexFp8DataBytes>{keys},
                              stages::AllPositions{}, 0, n);
}
LOWLAT_KERNEL(kThreads)
lowlat_stage_select(std::int32_t* out, const float* scores, int n, int k) {
  LOWLAT_SHARED(stages::SelectScratch, scratch);
  stages::select_top<Block>(out + block() * k, scores + block() * n, n, k, stages::AllPositions{},
                            scratch);
}
// memory: n / block_size + 1 floats a row.
LOWLAT_KERNEL(kThreads)
lowlat_stage_candidate_blocks(std::int32_t* out, float* memory, const float* scores, int n,
                              int block_size, int k) {
  LOWLAT_SHARED(stages::SelectScratch, scratch);
  stages::candidate_blocks<Block>(out + block() * k, scores + block() * n, n, block_size, k,
                                  memory + block() * (n / block_size + 1), scratch);
}

// ------------------------------------------------------------------ router and experts

// logits fp32 [rows, num_experts]; memory: 2 num_experts floats a row. Rules: their enums' values.
LOWLAT_KERNEL(kThreads)
lowlat_stage_gate(std::int32_t* ids, float* weights, float* memory, const float* logits,
                  const float* bias, int num_experts, int k, int sum_rule, int rule,
                  float scaling) {
  using Best = stages::BlockBest<Block>;
  LOWLAT_SHARED(Best::Scratch, scratch);
  stages::gate_select<Block>(
      ids + block() * k, weights + block() * k, logits + block() * num_experts, bias, num_experts,
      k, static_cast<stages::GateSum>(sum_rule), scaling, memory + 2 * block() * num_experts,
      static_cast<stages::GateRule>(rule), scratch);
}
// The weights of given experts: logits fp32 [rows, k]. Thread 0 of each block works.
LOWLAT_KERNEL(kThreads)
lowlat_stage_gate_hash(float* weights, const float* logits, int k, float scaling, int rule) {
  if (plat::thread_idx() != 0) return;
  stages::gate_hash(weights + block() * k, logits + block() * k, k, scaling,
                    static_cast<stages::GateRule>(rule));
}
// One block.
LOWLAT_KERNEL(kThreads)
lowlat_stage_group_pairs(std::int32_t* offsets, std::int32_t* pairs, const std::int32_t* ids,
                         int num_rows, int slots, int num_experts) {
  stages::group_pairs<Block>(offsets, pairs, ids, num_rows, slots, num_experts);
}
// Block b: expert b, all of its rows: h fp32 [pairs, inner].
LOWLAT_KERNEL(kThreads)
lowlat_stage_gate_up(float* h, const float* x, const Byte* w1, const Byte* w1_scales,
                     const Byte* w3, const Byte* w3_scales, const std::int32_t* offsets,
                     const std::int32_t* pairs, int slots, int hidden, int inner, float limit) {
  const std::int64_t first = block() * inner;
  const auto weights = [&](const Byte* codes, const Byte* scales) {
    return stages::Fp4Weights{codes + first * (hidden / 2), hidden / 2,
                              scales + first * (hidden / 32), hidden / 32};
  };
  const std::int32_t begin = offsets[block()];
  stages::expert_gate_up<Block>(h, x, weights(w1, w1_scales), weights(w3, w3_scales), pairs + begin,
                                offsets[block() + 1] - begin, slots, hidden, inner, 0, inner, limit,
                                nullptr);
}
// Block b: expert b: d bf16 [pairs, hidden].
LOWLAT_KERNEL(kThreads)
lowlat_stage_down(Bf16* d, const float* h, const Byte* w2, const Byte* w2_scales,
                  const std::int32_t* offsets, const std::int32_t* pairs, const float* weights,
                  int hidden, int inner) {
  const std::int64_t first = block() * hidden;
  const stages::Fp4Weights rows{w2 + first * (inner / 2), inner / 2,
                                w2_scales + first * (inner / 32), inner / 32};
  const std::int32_t begin = offsets[block()];
  stages::expert_down<Block>(d, h, rows, pairs + begin, offsets[block() + 1] - begin, weights,
                             inner, hidden, 0, hidden, nullptr);
}
LOWLAT_KERNEL(kThreads)
lowlat_stage_shared_swiglu(Bf16* h, const Bf16* gate, const Bf16* up, int n, float limit) {
  spread(n, [&](std::int64_t i) {
    const std::int64_t at = block() * n + i;
    h[at] = stages::shared_swiglu(gate[at], up[at], limit);
  });
}
LOWLAT_KERNEL(kThreads)
lowlat_stage_expert_sum(float* out, const Bf16* d, const Bf16* shared, int slots, int hidden) {
  stages::expert_sum<Block>(out + block() * hidden, d + block() * slots * hidden,
                            shared + block() * hidden, slots, hidden, 0, hidden);
}

// ------------------------------------------------------------------ n-gram memory

LOWLAT_KERNEL(kThreads)
lowlat_stage_engram_hash(std::int64_t* out, const std::int64_t* token, const std::int64_t* history,
                         const std::int64_t* pos, const std::int64_t* map, const std::int64_t* mult,
                         const std::int64_t* prime, std::int64_t image_token,
                         std::int64_t pad_token) {
  using Ids = std::int64_t[stages::kEngramColumns];
  LOWLAT_SHARED(Ids, ids);
  const std::int64_t t = block();
  const std::int64_t tokens[stages::kEngramShifts] = {token[t], history[3 * t + 2],
                                                      history[3 * t + 1], history[3 * t]};
  stages::engram_hash<Block>(ids, tokens, pos[t], map, mult, prime, image_token, pad_token);
  plat::block_sync();
  spread(stages::kEngramColumns,
         [&](std::int64_t i) { out[t * stages::kEngramColumns + i] = ids[i]; });
}
LOWLAT_KERNEL(kThreads)
lowlat_stage_engram_lookup(Bf16* out, const std::int64_t* ids, const Byte* table,
                           const Byte* scales, int dim) {
  stages::engram_lookup<Block>(out + block() * stages::kEngramColumns * dim,
                               ids + block() * stages::kEngramColumns, 0, stages::kEngramColumns,
                               table, scales, 0, dim);
}
// In place on the streams, bf16 [rows, 4, hidden]; kv bf16 [rows, 5, hidden].
LOWLAT_KERNEL(kThreads)
lowlat_stage_engram_apply(Bf16* residual, const Bf16* kv, const Bf16* q_weight,
                          const Bf16* k_weight, int hidden, float eps) {
  using Apply = stages::EngramApply<Block>;
  LOWLAT_SHARED(Apply::Scratch, scratch);
  Apply::run(residual + 4 * block() * hidden, kv + 5 * block() * hidden, q_weight, k_weight, hidden,
             eps, scratch);
}

// ------------------------------------------------------------------ draft and acceptance

LOWLAT_KERNEL(kThreads)
lowlat_stage_draft_feature(Bf16* out, const Bf16* residual, int hidden) {
  stages::draft_feature<Block>(out + block() * hidden, residual + 4 * block() * hidden, hidden);
}
// One block: z fp32 [batch, vocab] = base + embedding [batch, rank] . w2 [vocab, rank].
LOWLAT_KERNEL(kThreads)
lowlat_stage_markov_logits(float* z, const float* base, const float* embedding, const Bf16* w2,
                           int batch, int rank, int vocab) {
  stages::markov_logits<Block>(z, base, vocab, embedding, stages::Bf16Weights{w2, rank}, batch,
                               rank, 0, vocab, nullptr);
}
LOWLAT_KERNEL(kThreads)
lowlat_stage_draft_select(std::int32_t* tokens, const float* z, const float* temperature,
                          const float* uniform, int vocab) {
  using Best = stages::BlockBest<Block>;
  LOWLAT_SHARED(Best::Scratch, scratch);
  const float* noise = uniform + block() * vocab;
  const stages::Best best = stages::draft_select<Block>(
      z + block() * vocab, vocab, 0, temperature[block()],
      [=](std::int32_t id) { return noise[id]; }, scratch);
  if (plat::thread_idx() == 0) tokens[block()] = best.id;
}
// memory: Acceptance's floats a request.
LOWLAT_KERNEL(kThreads)
lowlat_stage_accept(std::int32_t* accepted, std::int32_t* next, float* memory,
                    const std::int32_t* drafts, const float* target_logits,
                    const float* draft_logits, const float* temperature, const float* coins, int g,
                    int vocab) {
  using Acceptance = stages::Acceptance<Block>;
  LOWLAT_SHARED(Acceptance::Scratch, scratch);
  const std::int64_t b = block();
  const float* target = target_logits + b * (g + 1) * vocab;
  const stages::Accepted result =
      temperature[b] == 0.0f
          ? Acceptance::greedy(drafts + b * g, target, g, vocab, scratch)
          : Acceptance::sampled(drafts + b * g, target, draft_logits + b * g * vocab, g, vocab,
                                temperature[b], coins + b * (g + 1),
                                memory + b * Acceptance::memory_floats(vocab), scratch);
  if (plat::thread_idx() != 0) return;
  accepted[b] = result.num_drafts;
  next[b] = result.next;
}

// ------------------------------------------------------------------ exchange and hand-off

// One block a rank: sends num_words floats to every rank and sums what all sent, for the epochs
// first_epoch and on; out bf16 [num_epochs, num_words], in[e, i] is sent in epoch first_epoch + e.
// Leaves at the first wait that ends badly.
LOWLAT_KERNEL(kThreads)
lowlat_stage_exchange(Bf16* out, const float* in, stages::ExchangePort port,
                      std::uint64_t first_epoch, int num_epochs, int num_words) {
  for (int e = 0; e < num_epochs; ++e) {
    const std::int64_t first = std::int64_t{e} * num_words;
    stages::publish<Block>(port, first_epoch + e, 0, in + first, num_words);
    if (!stages::receive_sum<Block>(port, first_epoch + e, 0, out + first, num_words, 0,
                                    stages::StageId::moe_sum)) {
      return;
    }
  }
}
// Blocks of one rank: block b writes its number into words[b] before hand-off n (1 .. num) and adds
// up everybody's after it; out[b, n - 1] is the sum, num_blocks * n when nobody was too early.
LOWLAT_KERNEL(kThreads)
lowlat_stage_hand_off(std::uint32_t* out, std::uint32_t* words, std::uint32_t* arrived,
                      int num_blocks, stages::FaultPort fault, int num) {
  const persistent::Grid grid{arrived, plat::block_idx(), num_blocks};
  std::uint32_t number = 0;
  for (int n = 1; n <= num; ++n) {
    if (plat::thread_idx() == 0) words[plat::block_idx()] = static_cast<std::uint32_t>(n);
    if (!persistent::hand_off(grid, ++number, fault, 0, 1)) return;
    if (plat::thread_idx() == 0) {
      std::uint32_t sum = 0;
      for (int b = 0; b < num_blocks; ++b) sum += words[b];
      out[plat::block_idx() * num + n - 1] = sum;
    }
    if (!persistent::hand_off(grid, ++number, fault, 0, 1)) return;
  }
}

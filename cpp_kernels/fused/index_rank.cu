// index_rank_sm90: the best 512 of a row's few scores, by counting for each how many are better.
//
// Math         rank[e] = how many scores are larger, or equal with a lower entry; the entries of
//              ranks 0 .. 511, best first (a row of 512 entries and less: all of them, ascending)
// Shapes       scores fp32 [T,pitch], 4,096 a row at most · entries and slots i32 [T,512]
// Rounding     none
// Bytes        4 a score and block, from the second-level cache
// Launch       64 entries of a row a block of 256 threads, which takes little of a multiprocessor,
//              so that it finds room beside the front's kernels
// Ordering     gates (exchange_gate.cuh) or kernels' ends
// Determinism  ranks are unique: bitwise run to run and rank to rank
// Meaning      reference/select.cpp, as sets
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/exchange_gate.cuh"
#include "fused/exchange_hop.cuh"
#include "fused/front_launch.cuh"
#include "fused/index.hpp"
#include "fused/index_place.cuh"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kThreads = 256, kParts = kThreads / kRankEntries;  // parts of the scores

struct Shared {
  alignas(16) float score[kIndexRanked];  // -inf: none, or a NaN
  int better[kParts][kRankEntries];
};

// Scores of [begin, end) that come before `mine` of `entry`, in fours; whether equal ones do.
template <bool kEqual>
LOWLAT_DEVICE int count_better(const Shared& shared, int begin, int end, float mine) {
  int count = 0;
#pragma unroll 4
  for (int i = begin; i < end; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(shared.score + i);
    count += (kEqual ? four.x >= mine : four.x > mine) ? 1 : 0;
    count += (kEqual ? four.y >= mine : four.y > mine) ? 1 : 0;
    count += (kEqual ? four.z >= mine : four.z > mine) ? 1 : 0;
    count += (kEqual ? four.w >= mine : four.w > mine) ? 1 : 0;
  }
  return count;
}

__global__ void __launch_bounds__(kThreads)
    index_rank_sm90(const __grid_constant__ IndexParams params) {
  __shared__ Shared shared;
  sm90::launch_dependents();
  Stamps stamps(stamp_sink(params.hop),
                params.hop.id + static_cast<std::uint32_t>(HopKernel::select));
  const int row = static_cast<int>(blockIdx.y), thread_idx = plat::thread_idx();
  const int count = min(index_count(params.rows, params.ratio, row), params.max_entries);
  const int base = static_cast<int>(blockIdx.x) * kRankEntries;
  const int local = thread_idx % kRankEntries, part = thread_idx / kRankEntries;
  const int entry = base + local;
  const std::int32_t* page_row =
      params.pages.page_table +
      static_cast<std::int64_t>(row / params.rows.tokens) * params.pages.stride;
  std::int32_t* entries = params.entries != nullptr ? params.entries + row * kIndexTopk : nullptr;
  std::int32_t* entry_slots = params.entry_slots + row * kIndexTopk;
  const int shift = 31 - __clz(params.pages.per_page);
  // Before the wait: it is read from memory.
  const int slot = entry < count ? (__ldg(page_row + (entry >> shift)) << shift) +
                                       (entry & (params.pages.per_page - 1))
                                 : -1;
  const auto store = [&](int place) {
    if (entries != nullptr) entries[place] = slot < 0 ? -1 : entry;
    entry_slots[place] = slot;
  };
  wait_at(params.scores_done);
  stamps.mark(StampStage::wait);
  if (count <= kIndexTopk) {
    // No block but those of the first 512 places has any.
    if (part == 0 && entry < kIndexTopk) store(entry);
    for (int i = base + thread_idx; blockIdx.x + 1 == gridDim.x && i < kIndexTopk; i += kThreads) {
      if (i < base + kRankEntries) continue;
      if (entries != nullptr) entries[i] = -1;
      entry_slots[i] = -1;
    }
  } else if (base < count) {
    const float* from = params.scores + row * params.pitch;
    const int padded = (count + kRankEntries - 1) / kRankEntries * kRankEntries;
    for (int i = 4 * thread_idx; i < padded; i += 4 * kThreads) {
      const float4 four = __ldcg(reinterpret_cast<const float4*>(from + i));
      const float v[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        shared.score[i + j] = i + j < count && v[j] == v[j] ? v[j] : -INFINITY;
      }
    }
    plat::block_sync();
    const float mine = shared.score[entry];
    // A part of the scores before the block's entries, of those after, and of its own.
    const auto part_of = [&](int begin, int end, int which) {
      const int pieces = (end - begin) / 4;
      return begin + pieces * which / kParts * 4;
    };
    int better =
        count_better<true>(shared, part_of(0, base, part), part_of(0, base, part + 1), mine);
    const int after = base + kRankEntries;
    better += count_better<false>(shared, part_of(after, padded, part),
                                  part_of(after, padded, part + 1), mine);
    constexpr int kOwn = kRankEntries / kParts;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int other = base + part * kOwn + i;
      const float v = shared.score[other];
      better += v > mine || (v == mine && other < entry) ? 1 : 0;
    }
    shared.better[part][local] = better;
    plat::block_sync();
    if (part == 0 && entry < count) {
      int rank = 0;
#pragma unroll
      for (int i = 0; i < kParts; ++i) rank += shared.better[i][local];
      if (rank < kIndexTopk) store(rank);
    }
  }
  stamps.mark(StampStage::store);
  open_gate(params.done);
}

}  // namespace

cudaError_t launch_index_rank(const IndexParams& params, bool programmatic, cudaStream_t stream,
                              cudaEvent_t started) {
  const auto rows = static_cast<unsigned>(params.rows.num_rows);
  return launch_kernel(index_rank_sm90, dim3(index_select_blocks(params) / rows, rows), kThreads, 0,
                       1, programmatic, stream, params, started);
}

}  // namespace lowlat::nvidia::fused

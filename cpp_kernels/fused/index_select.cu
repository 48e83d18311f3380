// index_select_sm90: the best 512 of a row's scores, exactly, and the candidate blocks.
//
// Math         the k largest scores of a row, the lower entry first among equals; ascending entries
// Shapes       scores fp32 [T,pitch] · entries and slots i32 [T,512], or blocks i32 [T,2048]
// Rounding     none
// Bytes        4 a score, from the second-level cache
// Launch       a block takes 16,384 scores of a row into shared memory, 1,024 threads. A row with
//              more has several blocks, each of which leaves its best; the last to end selects from
//              those: the order is strict, so the best of a row are among the best of its parts
// Ordering     gates (exchange_gate.cuh) or kernels' ends; `found` is written, then the row's
//              ticket is taken (fence, atomic add; the last one fences again before it reads and
//              puts the ticket back to 0)
// Determinism  the set is unique and ascends: bitwise run to run and rank to rank
// Meaning      reference/select.cpp, exactly
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/exchange_gate.cuh"
#include "fused/exchange_hop.cuh"
#include "fused/front_launch.cuh"
#include "fused/front_weights.cuh"
#include "fused/index.hpp"
#include "fused/index_place.cuh"
#include "stages/select.hpp"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / plat::kWarpLanes;
constexpr int kStripe = 4 * kThreads;  // scores from a thread's piece of four to its next
constexpr int kQuads = kIndexChunk / kStripe;
constexpr int kBins = 2048, kBinsOfWarp = kBins / kWarps;
constexpr int kList = plat::kWarpLanes;
constexpr int kPages = 512;  // of a request, whose numbers lie in shared memory
static_assert(kWarps == plat::kWarpLanes && kBinsOfWarp == 2 * plat::kWarpLanes);
static_assert(kQuads * kWarps == 4 * plat::kWarpLanes);

// Everything loops over shared memory instead of registers, so that the code is short: it runs
// once. A thread's pieces are its own until the selection is placed.
struct SelectShared {
  alignas(16) float score[kIndexChunk];  // NaN: none (a NaN that comes counts as -infinity)
  alignas(16) std::uint32_t bins[kBins];
  alignas(16) std::uint32_t counts[kQuads * kWarps];  // above << 16 | ties, of a warp's piece
  std::uint32_t low[kWarps], high[kWarps], sums[kWarps];
  float list[kList];  // the scores of the bin where the threshold is
  std::uint32_t listed, ticket;
  // What says where entries lie, asked for before there are scores.
  std::int32_t pages[kPages], blocks[kIndexMaxBlocks];
};

// Taken: scores above `score` and, of those equal to it, the first `ties`.
struct Threshold {
  float score;
  std::uint32_t ties;
};

// What stages::score_order came from.
LOWLAT_DEVICE float score_of(std::uint32_t order) {
  return plat::bits_float((order & 0x8000'0000u) != 0u ? order ^ 0x8000'0000u : ~order);
}

// The sum of the lanes before this one.
LOWLAT_DEVICE std::uint32_t lanes_before(std::uint32_t own, int lane_idx) {
  std::uint32_t sum = own;
#pragma unroll
  for (int distance = 1; distance < plat::kWarpLanes; distance *= 2) {
    const std::uint32_t before = __shfl_up_sync(plat::kAllLanes, sum, distance);
    if (lane_idx >= distance) sum += before;
  }
  return sum - own;
}

// visit(number, four) of a thread's pieces of n scores.
template <class Visit>
LOWLAT_DEVICE void visit_pieces(SelectShared& shared, int n, Visit visit) {
#pragma unroll 1
  for (int number = 4 * plat::thread_idx(); number < n; number += kStripe) {
    visit(number, *reinterpret_cast<float4*>(shared.score + number));
  }
}
// visit(score) of those that are not below `low` nor above `high`.
template <class Visit>
LOWLAT_DEVICE void visit_scores(SelectShared& shared, int n, float low, float high, Visit visit) {
  visit_pieces(shared, n, [&](int, const float4& four) {
    for (const float v : {four.x, four.y, four.z, four.w}) {
      if (v >= low && v <= high) visit(v);
    }
  });
}

// Numbers over the block: the least of `low` and the largest of `high`. Syncs.
LOWLAT_DEVICE void block_bounds(SelectShared& shared, float& low, float& high) {
  const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
  const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
  const std::uint32_t least = __reduce_min_sync(plat::kAllLanes, stages::score_order(low));
  const std::uint32_t most = __reduce_max_sync(plat::kAllLanes, stages::score_order(high));
  if (lane_idx == 0) shared.low[warp_idx] = least, shared.high[warp_idx] = most;
  plat::block_sync();
  low = score_of(__reduce_min_sync(plat::kAllLanes, shared.low[lane_idx]));
  high = score_of(__reduce_max_sync(plat::kAllLanes, shared.high[lane_idx]));
}

// Scores into shared memory; `most` and `least` are the thread's.
LOWLAT_DEVICE void load_scores(SelectShared& shared, const float* scores, int n, float& most,
                               float& least) {
  visit_pieces(shared, n,
               [&](int number, const float4&) { copy_16(shared.score + number, scores + number); });
  wait_for_copies();
  visit_pieces(shared, n, [&](int number, float4& four) {
    float v[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (v[e] != v[e]) v[e] = -INFINITY;
      if (number + e >= n) v[e] = NAN;
      most = fmaxf(most, v[e]);
      least = fminf(least, v[e]);
    }
    four = make_float4(v[0], v[1], v[2], v[3]);
  });
}
// The same of what the row's blocks have found.
LOWLAT_DEVICE void load_found(SelectShared& shared, const uint2* found, int n, float& most,
                              float& least) {
  visit_pieces(shared, n, [&](int number, float4& four) {
    float v[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      v[e] = number + e < n ? plat::bits_float(__ldcg(&found[number + e].x)) : NAN;
      most = fmaxf(most, v[e]);
      least = fminf(least, v[e]);
    }
    four = make_float4(v[0], v[1], v[2], v[3]);
  });
}

// The threshold of the k best of n > k scores: a histogram of 2,048 equal steps of the score finds
// the step where the k-th is; commonly a handful of scores are in it, and each warp ranks those. If
// it has more than 32, it is divided again. All threads of the block call.
LOWLAT_DEVICE Threshold threshold_of(SelectShared& shared, int n, int k, float most, float least) {
  const int thread_idx = plat::thread_idx();
  const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
  // Every thread's largest is one of kThreads scores that are not below the least of them.
  float low = n >= kStripe && k <= kThreads ? most : least, high = most;
  auto missing = static_cast<std::uint32_t>(k);
  *reinterpret_cast<uint2*>(shared.bins + 2 * thread_idx) = make_uint2(0u, 0u);
  if (thread_idx == 0) shared.listed = 0u;
  block_bounds(shared, low, high);
#pragma unroll 1
  for (;;) {
    // Infinite bounds, or a range that overflows: one bin, whose finite members are next.
    const float per_score = static_cast<float>(kBins) / (high - low);
    const bool divides = per_score > 0.0f && per_score < 3e38f;
    const auto bin_of = [&](float v) {
      return divides   ? min(static_cast<std::uint32_t>((v - low) * per_score), kBins - 1u)
             : v > low ? 1u
                       : 0u;
    };
    visit_scores(shared, n, low, high,
                 [&](float v) { atomicAdd_block(&shared.bins[bin_of(v)], 1u); });
    plat::block_sync();
    // Warps and lanes count from the top.
    const int first = kBins - kBinsOfWarp * (warp_idx + 1);
    const std::uint32_t sum = __reduce_add_sync(
        plat::kAllLanes, shared.bins[first + lane_idx] + shared.bins[first + 32 + lane_idx]);
    if (lane_idx == 0) shared.sums[warp_idx] = sum;
    plat::block_sync();
    // The 64 bins, then the bin, where the sum from the top reaches what is missing.
    std::uint32_t own = shared.sums[lane_idx], before = lanes_before(own, lane_idx);
    int found = __ffs(static_cast<int>(
                    __ballot_sync(plat::kAllLanes, before < missing && missing <= before + own))) -
                1;
    missing -= __shfl_sync(plat::kAllLanes, before, found);
    const int top = kBins - 1 - kBinsOfWarp * found;
    const std::uint32_t upper = shared.bins[top - 2 * lane_idx];
    const std::uint32_t lower = shared.bins[top - 2 * lane_idx - 1];
    own = upper + lower;
    before = lanes_before(own, lane_idx);
    found = __ffs(static_cast<int>(
                __ballot_sync(plat::kAllLanes, before < missing && missing <= before + own))) -
            1;
    const bool is_upper = missing <= before + upper;
    const std::uint32_t here = __shfl_sync(plat::kAllLanes, is_upper ? upper : lower, found);
    const std::uint32_t bin = static_cast<std::uint32_t>(
        __shfl_sync(plat::kAllLanes, top - 2 * lane_idx - (is_upper ? 0 : 1), found));
    missing -= __shfl_sync(plat::kAllLanes, is_upper ? before : before + upper, found);
    const bool listed = here <= static_cast<std::uint32_t>(kList);
    float bin_low = INFINITY, bin_high = -INFINITY;
    visit_scores(shared, n, low, high, [&](float v) {
      if (bin_of(v) != bin) return;
      if (listed) shared.list[atomicAdd_block(&shared.listed, 1u)] = v;
      bin_low = fminf(bin_low, v);
      bin_high = fmaxf(bin_high, v);
    });
    plat::block_sync();
    if (listed) {
      const float mine = lane_idx < static_cast<int>(here) ? shared.list[lane_idx] : NAN;
      std::uint32_t greater = 0u, equal = 0u;
#pragma unroll 1
      for (int i = 0; i < static_cast<int>(here); ++i) {
        const float other = __shfl_sync(plat::kAllLanes, mine, i);
        greater += other > mine ? 1u : 0u;
        equal += other == mine ? 1u : 0u;
      }
      const int lane = __ffs(static_cast<int>(__ballot_sync(
                           plat::kAllLanes, greater < missing && missing <= greater + equal))) -
                       1;
      return {__shfl_sync(plat::kAllLanes, mine, lane),
              missing - __shfl_sync(plat::kAllLanes, greater, lane)};
    }
    *reinterpret_cast<uint2*>(shared.bins + 2 * thread_idx) = make_uint2(0u, 0u);
    block_bounds(shared, bin_low, bin_high);
    if (bin_low == bin_high) return {bin_low, missing};
    low = bin_low, high = bin_high;
  }
}

// put(place, number, score) for every taken score of n; places ascend with the numbers. All threads
// of the block call.
template <class Put>
LOWLAT_DEVICE void place_selection(SelectShared& shared, int n, const Threshold& threshold,
                                   Put put) {
  const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
  const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
  // above << 16 | ties of a score.
  const auto count = [&](float v) {
    return v > threshold.score ? 0x1'0000u : v == threshold.score ? 1u : 0u;
  };
  const auto count_of = [&](const float4& four) {
    return count(four.x) + count(four.y) + count(four.z) + count(four.w);
  };
  // Whole warps go through the pieces.
  const int all = (n + kStripe - 1) / kStripe * kWarps;
  const auto piece_of = [&](int number) {
    return number < n ? *reinterpret_cast<const float4*>(shared.score + number)
                      : make_float4(NAN, NAN, NAN, NAN);
  };
#pragma unroll 1
  for (int piece = warp_idx; piece < kQuads * kWarps; piece += kWarps) {
    std::uint32_t sum = 0u;
    if (piece < all) {
      sum = __reduce_add_sync(plat::kAllLanes,
                              count_of(piece_of(4 * (piece * plat::kWarpLanes + lane_idx))));
    }
    if (lane_idx == 0) shared.counts[piece] = sum;
  }
  plat::block_sync();
  // Four pieces a lane: sums before each.
  const uint4 counts = *reinterpret_cast<const uint4*>(shared.counts + 4 * lane_idx);
  std::uint32_t sums[4] = {0u, counts.x, counts.x + counts.y, counts.x + counts.y + counts.z};
  const std::uint32_t base = lanes_before(sums[3] + counts.w, lane_idx);
#pragma unroll 1
  for (int piece = warp_idx; piece < all; piece += kWarps) {
    const int part = piece % 4;
    std::uint32_t place = __shfl_sync(plat::kAllLanes,
                                      base + (part == 0   ? sums[0]
                                              : part == 1 ? sums[1]
                                              : part == 2 ? sums[2]
                                                          : sums[3]),
                                      piece / 4);
    const int number = 4 * (piece * plat::kWarpLanes + lane_idx);
    const float4 four = piece_of(number);
    const std::uint32_t own = count_of(four);
    if (!__any_sync(plat::kAllLanes, own != 0u)) continue;
    place += lanes_before(own, lane_idx);
    int e = 0;
    for (const float v : {four.x, four.y, four.z, four.w}) {
      const std::uint32_t here = count(v), ties = place & 0xffffu;
      if (here == 0x1'0000u || (here == 1u && ties < threshold.ties)) {
        put(static_cast<int>((place >> 16) + min(ties, threshold.ties)), number + e, v);
      }
      place += here;
      ++e;
    }
  }
}

// Whether `pieces` blocks of the row have left what they found: true in the last of them. The
// block calls, after its stores to global memory.
LOWLAT_DEVICE bool is_last(std::uint32_t* ticket, int pieces, SelectShared& shared) {
  __threadfence();
  plat::block_sync();
  if (plat::thread_idx() == 0) {
    const std::uint32_t taken = atomicAdd(ticket, 1u);
    shared.ticket = taken;
    if (taken + 1u == static_cast<std::uint32_t>(pieces)) *ticket = 0u;
  }
  plat::block_sync();
  __threadfence();
  return shared.ticket + 1u == static_cast<std::uint32_t>(pieces);
}

// The k best of `count` scores of a row, this block's part of the work; store(place, number) once
// for each, by the row's last block. Nothing is stored for count <= k. All blocks of the row call.
template <class Store>
LOWLAT_DEVICE void select_row(const float* scores, int count, int k, uint2* found,
                              std::uint32_t* ticket, SelectShared& shared, Store store) {
  const int chunk = static_cast<int>(blockIdx.x);
  const int pieces = (count + kIndexChunk - 1) / kIndexChunk;
  if (count <= k || chunk >= pieces) return;
  const int first = chunk * kIndexChunk;
  int n = min(count - first, kIndexChunk);
  // One round for a row of one piece; else one for the piece and, in the row's last block, one for
  // what all have found.
  const uint2* from = nullptr;
  float most = -INFINITY, least = INFINITY;
  load_scores(shared, scores + first, n, most, least);
#pragma unroll 1
  for (;;) {
    // A part that has no more than k gives all.
    Threshold threshold = {-INFINITY, static_cast<std::uint32_t>(k)};
    if (n > k) threshold = threshold_of(shared, n, k, most, least);
    const bool finishes = pieces == 1 || from != nullptr;
    place_selection(shared, n, threshold, [&](int place, int number, float score) {
      if (!finishes) {
        found[chunk * k + place] =
            make_uint2(plat::float_bits(score), static_cast<std::uint32_t>(first + number));
      } else {
        store(place, from != nullptr ? static_cast<int>(__ldcg(&from[number].y)) : number);
      }
    });
    if (finishes || !is_last(ticket, pieces, shared)) return;
    from = found;
    n = (pieces - 1) * k + min(count - (pieces - 1) * kIndexChunk, k);
    most = -INFINITY, least = INFINITY;
    load_found(shared, found, n, most, least);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    index_select_sm90(const __grid_constant__ IndexParams params) {
  extern __shared__ __align__(16) unsigned char memory[];
  SelectShared& shared = *reinterpret_cast<SelectShared*>(memory);
  sm90::launch_dependents();
  Stamps stamps(stamp_sink(params.hop),
                params.hop.id + static_cast<std::uint32_t>(HopKernel::select));
  const int row = static_cast<int>(blockIdx.y), thread_idx = plat::thread_idx();
  const int all_entries = min(index_count(params.rows, params.ratio, row), params.max_entries);
  int count = all_entries;
  const std::int32_t* blocks = nullptr;
  if (params.blocks != nullptr) {
    count = index_candidates(count);
    blocks = params.blocks + static_cast<std::int64_t>(row) * kIndexMaxBlocks;
  }
  const std::int32_t* page_row =
      params.pages.page_table +
      static_cast<std::int64_t>(row / params.rows.tokens) * params.pages.stride;
  std::int32_t* entries = params.entries != nullptr ? params.entries + row * kIndexTopk : nullptr;
  std::int32_t* entry_slots = params.entry_slots + row * kIndexTopk;
  const int shift = 31 - __clz(params.pages.per_page);
  const auto store = [&](int place, int number) {
    const int entry = blocks != nullptr
                          ? shared.blocks[number / kIndexBlock] * kIndexBlock + number % kIndexBlock
                          : number;
    if (entries != nullptr) entries[place] = entry;
    const int page = entry >> shift;
    entry_slots[place] = ((page < kPages ? shared.pages[page] : __ldg(page_row + page)) << shift) +
                         (entry & (params.pages.per_page - 1));
  };
  // Where the row has no scores for it a block leaves its place to the kernels that are next; the
  // row's first waits for all.
  if (blockIdx.x != 0 && static_cast<int>(blockIdx.x) * kIndexChunk >= count) {
    open_gate(params.done);
    return;
  }
  for (int i = thread_idx; i < min((all_entries + params.pages.per_page - 1) >> shift, kPages);
       i += kThreads) {
    shared.pages[i] = __ldg(page_row + i);
  }
  if (blocks != nullptr) {
    for (int i = thread_idx; i * kIndexBlock < count; i += kThreads) {
      shared.blocks[i] = __ldcg(blocks + i);
    }
  }
  plat::block_sync();
  wait_at(params.scores_done);
  stamps.mark(StampStage::wait);
  if (blockIdx.x == 0) {
    const int all = count <= kIndexTopk ? count : 0;
    for (int i = thread_idx; i < kIndexTopk; i += kThreads) {
      if (i < all) {
        store(i, i);
      } else if (count <= kIndexTopk) {
        if (entries != nullptr) entries[i] = -1;
        entry_slots[i] = -1;
      }
    }
  }
  select_row(params.scores + row * params.pitch, count, kIndexTopk,
             params.found + static_cast<std::int64_t>(row) * index_found_count(params.max_entries),
             params.tickets + row, shared, store);
  stamps.mark(StampStage::store);
  open_gate(params.done);
}

__global__ void __launch_bounds__(kThreads, 1)
    index_blocks_sm90(const __grid_constant__ IndexParams params) {
  extern __shared__ __align__(16) unsigned char memory[];
  SelectShared& shared = *reinterpret_cast<SelectShared*>(memory);
  sm90::launch_dependents();
  const int row = static_cast<int>(blockIdx.y), thread_idx = plat::thread_idx();
  const int count = min(index_count(params.rows, params.ratio, row), params.max_entries);
  const int num_blocks = (count + kIndexBlock - 1) / kIndexBlock;
  std::int32_t* out = params.out_blocks + row * kIndexMaxBlocks;
  wait_at(params.scores_done);
  // The newest block takes a place whatever its scores; the others compete for what is left.
  const bool all = num_blocks <= kIndexMaxBlocks;
  if (blockIdx.x == 0) {
    if (all) {
      for (int i = thread_idx; i < kIndexMaxBlocks; i += kThreads) out[i] = i < num_blocks ? i : -1;
    } else if (thread_idx == 0) {
      out[kIndexMaxBlocks - 1] = num_blocks - 1;
    }
  }
  if (all) {
    open_gate(params.done);
    return;
  }
  select_row(params.block_scores + row * (params.pitch / kIndexBlock), num_blocks - 1,
             kIndexMaxBlocks - 1,
             params.found + static_cast<std::int64_t>(row) * index_found_count(params.max_entries) +
                 index_chunks(params.max_entries) * kIndexTopk,
             params.tickets + params.rows.num_rows + row, shared,
             [&](int place, int number) { out[place] = number; });
  open_gate(params.done);
}

bool valid(const IndexParams& params) {
  return params.rows.num_rows >= 1 && params.rows.num_rows <= kMaxFusedRows &&
         params.rows.tokens >= 1 && params.rows.num_rows % params.rows.tokens == 0 &&
         params.max_entries >= 0 && params.max_entries <= kIndexMaxEntries &&
         params.pitch % 64 == 0;
}

}  // namespace

cudaError_t launch_index_select(const IndexParams& params, bool programmatic, cudaStream_t stream) {
  if (!valid(params)) return cudaErrorInvalidValue;
  const auto blocks = index_select_blocks(params);
  const auto rows = static_cast<unsigned>(params.rows.num_rows);
  return launch_kernel(index_select_sm90, dim3(blocks / rows, rows), kThreads, sizeof(SelectShared),
                       1, programmatic, stream, params);
}

cudaError_t launch_index_blocks(const IndexParams& params, bool programmatic, cudaStream_t stream) {
  if (!valid(params) || params.block_scores == nullptr) return cudaErrorInvalidValue;
  const auto rows = static_cast<unsigned>(params.rows.num_rows);
  return launch_kernel(index_blocks_sm90, dim3(index_blocks_blocks(params) / rows, rows), kThreads,
                       sizeof(SelectShared), 1, programmatic, stream, params);
}

}  // namespace lowlat::nvidia::fused

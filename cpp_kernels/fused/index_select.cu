// index_select_sm90: the best 512 of a row's scores, exactly, and the candidate blocks.
//
// Math         the k largest scores of a row, the lower entry first among equals; ascending entries
// Shapes       scores fp32 [T,pitch] · entries and slots i32 [T,512], or blocks i32 [T,2048]
// Rounding     none
// Bytes        4 a score, from the second-level cache
// Launch       a block takes 8,192 scores of a row into shared memory, 512 threads. A row with more
//              has several blocks, each of which leaves its best; the last to end selects from
//              those: the order is strict, so the best of a row are among the best of its parts
// Ordering     gates (exchange_gate.cuh) or kernels' ends; `found` is written, then the row's
//              ticket is taken (fence, atomic add; the last one fences again before it reads and
//              puts the ticket back to 0)
// Determinism  the set is unique and ascends: bitwise run to run and rank to rank
// Meaning      reference/select.cpp, exactly
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/exchange_gate.cuh"
#include "fused/front_launch.cuh"
#include "fused/front_weights.cuh"
#include "fused/index.hpp"
#include "fused/index_place.cuh"
#include "stages/select.hpp"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / plat::kWarpLanes;
constexpr int kQuads = kIndexChunk / kThreads / 4;  // a thread's pieces of four scores
constexpr int kStripe = 4 * kThreads;               // scores that lie between a thread's pieces
static_assert(kWarps <= plat::kWarpLanes);
static_assert(kQuads * kWarps == 2 * plat::kWarpLanes);

// Everything loops over shared memory instead of registers, so that the code is short: it runs
// once.
struct SelectShared {
  // Scores as unsigned numbers of the same order (a NaN is 1, below every number); 0: none. A
  // thread's pieces are those at i * kStripe + 4 * thread.
  alignas(16) std::uint32_t order[kIndexChunk];
  std::uint32_t low[kWarps], high[kWarps], sums[2][kWarps];
  std::uint32_t counts[kQuads * kWarps];  // above << 16 | ties, of a warp's piece
  std::uint32_t ticket;
};

// Which of them are the k best:
struct Selection {
  std::uint32_t above;  // taken from here on,
  std::uint32_t tie;    // and of those equal to this, if ties > 0,
  std::uint32_t ties;   // so many, the lowest numbers first
};

// The sum of the lanes before this one, and of all.
LOWLAT_DEVICE std::uint32_t warp_before(std::uint32_t own, int lane_idx, std::uint32_t& total) {
  std::uint32_t sum = own;
#pragma unroll
  for (int distance = 1; distance < plat::kWarpLanes; distance *= 2) {
    const std::uint32_t before = __shfl_up_sync(plat::kAllLanes, sum, distance);
    if (lane_idx >= distance) sum += before;
  }
  total = __shfl_sync(plat::kAllLanes, sum, plat::kWarpLanes - 1);
  return sum - own;
}

// Orders of n scores into shared memory; `most` and `least` are the thread's. The pieces that a
// thread reads are its own until place_selection.
LOWLAT_DEVICE void load_scores(SelectShared& shared, const float* scores, int n,
                               std::uint32_t& most, std::uint32_t& least) {
  const int first = 4 * plat::thread_idx();
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int number = i * kStripe + first;
    if (number < n) copy_16(shared.order + number, scores + number);
  }
  wait_for_copies();
#pragma unroll 1
  for (int number = first; number < kIndexChunk; number += kStripe) {
    auto* at = reinterpret_cast<uint4*>(shared.order + number);
    const uint4 raw = *at;
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    std::uint32_t order[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool there = number + e < n;
      const std::uint32_t value = max(stages::score_order(plat::bits_float(words[e])), 1u);
      order[e] = there ? value : 0u;
      most = max(most, order[e]);
      least = min(least, there ? value : ~0u);
    }
    *at = make_uint4(order[0], order[1], order[2], order[3]);
  }
}

// The same of what the row's blocks have found.
LOWLAT_DEVICE void load_found(SelectShared& shared, const uint2* found, int n, std::uint32_t& most,
                              std::uint32_t& least) {
#pragma unroll 1
  for (int number = 4 * plat::thread_idx(); number < kIndexChunk; number += kStripe) {
    std::uint32_t order[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool there = number + e < n;
      order[e] = there ? __ldcg(&found[number + e].x) : 0u;
      most = max(most, order[e]);
      least = min(least, there ? order[e] : ~0u);
    }
    *reinterpret_cast<uint4*>(shared.order + number) =
        make_uint4(order[0], order[1], order[2], order[3]);
  }
}

// What stages::score_order came from.
LOWLAT_DEVICE float score_of(std::uint32_t order) {
  return plat::bits_float((order & 0x8000'0000u) != 0u ? order ^ 0x8000'0000u : ~order);
}

// The threshold of the k best of n > k orders, by counting how many are not below a guess. All
// threads of the block call.
//
// Between bounds whose counts are known the next guess is where the score would be if the logarithm
// of the count fell evenly; every third guess halves the orders that are left, so that there are 96
// at the most. Commonly six or seven do: any order between the k-th and the next is right.
LOWLAT_DEVICE Selection threshold_of(SelectShared& shared, int n, int k, std::uint32_t most,
                                     std::uint32_t least) {
  const int thread_idx = plat::thread_idx();
  const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
  std::uint32_t order[4 * kQuads];
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const uint4 four =
        *reinterpret_cast<const uint4*>(shared.order + i * kStripe + 4 * thread_idx);
    order[4 * i] = four.x, order[4 * i + 1] = four.y;
    order[4 * i + 2] = four.z, order[4 * i + 3] = four.w;
  }
  // Every thread's largest is one of kThreads orders that are not below the least of them.
  const bool all_have_one = n >= kStripe && k <= kThreads;
  std::uint32_t low = __reduce_min_sync(plat::kAllLanes, all_have_one ? most : least);
  std::uint32_t high = __reduce_max_sync(plat::kAllLanes, most);
  if (lane_idx == 0) shared.low[warp_idx] = low, shared.high[warp_idx] = high;
  plat::block_sync();
  // At least k are not below `low`, fewer are not below `high`.
  low = __reduce_min_sync(plat::kAllLanes, shared.low[lane_idx % kWarps]);
  high = __reduce_max_sync(plat::kAllLanes, shared.high[lane_idx % kWarps]) + 1u;
  auto low_count = static_cast<std::uint32_t>(n), high_count = 0u;
  const auto wanted = static_cast<std::uint32_t>(k);
  std::uint32_t guess = low;  // how many it has is not known where all have one
#pragma unroll 1
  for (int step = 0;; ++step) {
    std::uint32_t count = 0u;
#pragma unroll
    for (const std::uint32_t own : order) count += own >= guess ? 1u : 0u;
    count = __reduce_add_sync(plat::kAllLanes, count);
    std::uint32_t* sums = shared.sums[step % 2];
    if (lane_idx == 0) sums[warp_idx] = count;
    plat::block_sync();
    count = __reduce_add_sync(plat::kAllLanes, lane_idx < kWarps ? sums[lane_idx] : 0u);
    if (count == wanted) return {guess, 0u, 0u};
    if (count > wanted) {
      low = guess, low_count = count;
    } else {
      high = guess, high_count = count;
    }
    if (high - low <= 1u) return {high, low, wanted - high_count};
    guess = low + (high - low) / 2u;
    if (step % 3 == 2) continue;
    const float log_low = __log2f(static_cast<float>(low_count));
    const float log_high = __log2f(static_cast<float>(high_count) + 0.5f);
    const float part = (log_low - __log2f(static_cast<float>(wanted))) / (log_low - log_high);
    const float from = score_of(low), to = score_of(high - 1u);
    const float between = from + (to - from) * part;
    if (between > from && between < to) {
      guess = min(max(stages::score_order(between), low + 1u), high - 1u);
    }
  }
}

// put(place, number) for every taken order of n; places ascend with the numbers. All threads of the
// block call.
template <class Put>
LOWLAT_DEVICE void place_selection(SelectShared& shared, const Selection& selection, Put put) {
  const int thread_idx = plat::thread_idx();
  const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
  // above << 16 | ties of a thread's piece.
  const auto count = [&](const uint4& piece) {
    const std::uint32_t order[4] = {piece.x, piece.y, piece.z, piece.w};
    std::uint32_t sum = 0u;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (order[e] >= selection.above) sum += 0x1'0000u;
      if (order[e] == selection.tie && selection.ties != 0u) sum += 1u;
    }
    return sum;
  };
#pragma unroll 1
  for (int i = 0; i < kQuads; ++i) {
    const uint4 piece =
        *reinterpret_cast<const uint4*>(shared.order + i * kStripe + 4 * thread_idx);
    const std::uint32_t sum = __reduce_add_sync(plat::kAllLanes, count(piece));
    if (lane_idx == 0) shared.counts[i * kWarps + warp_idx] = sum;
  }
  plat::block_sync();
  // Two pieces a lane: sums before each.
  const std::uint32_t first = shared.counts[2 * lane_idx], second = shared.counts[2 * lane_idx + 1];
  std::uint32_t total;
  const std::uint32_t sum = warp_before(first + second, lane_idx, total);
#pragma unroll 1
  for (int i = 0; i < kQuads; ++i) {
    const int piece_idx = i * kWarps + warp_idx;
    std::uint32_t base =
        __shfl_sync(plat::kAllLanes, piece_idx % 2 == 0 ? sum : sum + first, piece_idx / 2);
    const int number = i * kStripe + 4 * thread_idx;
    const uint4 piece = *reinterpret_cast<const uint4*>(shared.order + number);
    const std::uint32_t own = count(piece);
    if (!__any_sync(plat::kAllLanes, own != 0u)) continue;
    base += warp_before(own, lane_idx, total);
    const std::uint32_t order[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool above = order[e] >= selection.above;
      const bool tie = selection.ties != 0u && order[e] == selection.tie;
      const std::uint32_t ties_before = base & 0xffffu;
      if (above || (tie && ties_before < selection.ties)) {
        put(static_cast<int>((base >> 16) + min(ties_before, selection.ties)), number + e);
      }
      base += above ? 0x1'0000u : tie ? 1u : 0u;
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
  std::uint32_t most = 0u, least = ~0u;
  load_scores(shared, scores + first, n, most, least);
#pragma unroll 1
  for (;;) {
    const Selection selection =
        n > k ? threshold_of(shared, n, k, most, least) : Selection{1u, 0u, 0u};
    const bool finishes = pieces == 1 || from != nullptr;
    place_selection(shared, selection, [&](int place, int number) {
      if (!finishes) {
        found[chunk * k + place] =
            make_uint2(shared.order[number], static_cast<std::uint32_t>(first + number));
      } else {
        store(place, from != nullptr ? static_cast<int>(__ldcg(&from[number].y)) : number);
      }
    });
    if (finishes || !is_last(ticket, pieces, shared)) return;
    from = found;
    n = (pieces - 1) * k + min(count - (pieces - 1) * kIndexChunk, k);
    most = 0u, least = ~0u;
    load_found(shared, found, n, most, least);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    index_select_sm90(const __grid_constant__ IndexParams params) {
  extern __shared__ __align__(16) unsigned char memory[];
  SelectShared& shared = *reinterpret_cast<SelectShared*>(memory);
  sm90::launch_dependents();
  const int row = static_cast<int>(blockIdx.y), thread_idx = plat::thread_idx();
  int count = min(index_count(params.rows, params.ratio, row), params.max_entries);
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
  const auto store = [&](int place, int number) {
    const int entry = blocks != nullptr ? __ldcg(blocks + number / kIndexBlock) * kIndexBlock +
                                              number % kIndexBlock
                                        : number;
    if (entries != nullptr) entries[place] = entry;
    entry_slots[place] = __ldg(page_row + entry / params.pages.per_page) * params.pages.per_page +
                         entry % params.pages.per_page;
  };
  wait_at(params.scores_done);
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
  if (all) return;
  select_row(params.block_scores + row * (params.pitch / kIndexBlock), num_blocks - 1,
             kIndexMaxBlocks - 1,
             params.found + static_cast<std::int64_t>(row) * index_found_count(params.max_entries) +
                 index_chunks(params.max_entries) * kIndexTopk,
             params.tickets + params.rows.num_rows + row, shared,
             [&](int place, int number) { out[place] = number; });
}

bool valid(const IndexParams& params) {
  return params.rows.num_rows >= 1 && params.rows.num_rows <= kMaxFusedRows &&
         params.rows.tokens >= 1 && params.rows.num_rows % params.rows.tokens == 0 &&
         params.max_entries >= 0 && params.max_entries <= kIndexMaxEntries &&
         params.pitch % 64 == 0;
}

}  // namespace

cudaError_t launch_index_select(const IndexParams& params, bool programmatic, cudaStream_t stream,
                                cudaEvent_t started) {
  if (!valid(params)) return cudaErrorInvalidValue;
  const auto blocks = index_select_blocks(params);
  const auto rows = static_cast<unsigned>(params.rows.num_rows);
  return launch_kernel(index_select_sm90, dim3(blocks / rows, rows), kThreads, sizeof(SelectShared),
                       1, programmatic, stream, params, started);
}

cudaError_t launch_index_blocks(const IndexParams& params, bool programmatic, cudaStream_t stream) {
  if (!valid(params) || params.block_scores == nullptr) return cudaErrorInvalidValue;
  const int blocks = (params.max_entries + kIndexBlock - 1) / kIndexBlock;
  return launch_kernel(index_blocks_sm90,
                       dim3(static_cast<unsigned>(index_chunks(blocks)),
                            static_cast<unsigned>(params.rows.num_rows)),
                       kThreads, sizeof(SelectShared), 1, programmatic, stream, params);
}

}  // namespace lowlat::nvidia::fused

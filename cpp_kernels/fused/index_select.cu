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
#include "fused/index_select.cuh"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kThreads = 1024;
using Shared = SelectShared<kThreads, kIndexChunk, 2048>;

// Whether `pieces` blocks of the row have left what they found: true in the last of them. The
// block calls, after its stores to global memory.
LOWLAT_DEVICE bool is_last(std::uint32_t* ticket, int pieces, Shared& shared) {
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
                              std::uint32_t* ticket, Shared& shared, Store store) {
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
    SelectThreshold threshold = {-INFINITY, static_cast<std::uint32_t>(k)};
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
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  sm90::launch_dependents();
  Stamps stamps(stamp_sink(params.hop),
                params.hop.id + static_cast<std::uint32_t>(HopKernel::select));
  const int row = static_cast<int>(blockIdx.y), thread_idx = plat::thread_idx();
  const RowCandidates candidates = candidates_of(params, row);
  const int count = candidates.count;
  std::int32_t* entries = params.entries != nullptr ? params.entries + row * kIndexTopk : nullptr;
  std::int32_t* entry_slots = params.entry_slots + row * kIndexTopk;
  const auto store = [&](int place, int number) {
    const int entry = candidates.entry(number);
    if (entries != nullptr) entries[place] = entry;
    entry_slots[place] = candidates.slot(entry);
  };
  wait_at(params.scores_done);
  stamps.mark(StampStage::wait);
  if (count <= params.left_to_attention) {
    open_gate(params.done);
    return;
  }
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
  Shared& shared = *reinterpret_cast<Shared*>(memory);
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
  return launch_kernel(index_select_sm90, dim3(blocks / rows, rows), kThreads, sizeof(Shared), 1,
                       programmatic, stream, params, started);
}

cudaError_t launch_index_blocks(const IndexParams& params, bool programmatic, cudaStream_t stream) {
  if (!valid(params) || params.block_scores == nullptr) return cudaErrorInvalidValue;
  const int blocks = (params.max_entries + kIndexBlock - 1) / kIndexBlock;
  return launch_kernel(index_blocks_sm90,
                       dim3(static_cast<unsigned>(index_chunks(blocks)),
                            static_cast<unsigned>(params.rows.num_rows)),
                       kThreads, sizeof(Shared), 1, programmatic, stream, params);
}

}  // namespace lowlat::nvidia::fused

// index_select_sm90: the best 512 of a row's scores, exactly, and the candidate blocks.
//
// Math         the k largest scores of a row, the lower entry first among equals; ascending entries
// Shapes       scores fp32 [T,pitch] · entries and slots i32 [T,512], or blocks i32 [T,2048]
// Rounding     none
// Bytes        4 a score, from the second-level cache
// Launch       a block takes 11,776 scores of a row into shared memory, 512 threads, so that it
//              has room beside other kernels' blocks before there are scores. A row with more has
//              several blocks, each of which leaves its best; the last to end selects from those:
//              the order is strict, so the best of a row are among the best of its parts
// Ordering     gates (exchange_gate.cuh) or kernels' ends; of few rows a slot goes with its tag in
//              one access (HopBuffers::selected). `found` is written, then the row's ticket taken
//              (fence, atomic add; the last one fences again before it reads and puts the ticket
//              back to 0)
// Determinism  the set is unique and ascends: bitwise run to run and rank to rank
// Meaning      reference/select.cpp, exactly
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/exchange_gate.cuh"
#include "fused/exchange_hop.cuh"
#include "fused/front_launch.cuh"
#include "fused/front_weights.cuh"
#include "fused/index.hpp"
#include "fused/index_pick.cuh"
#include "fused/index_place.cuh"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kThreads = 512, kBlocksTogether = 2;
constexpr int kPages = 512;  // of a request, whose numbers lie in shared memory
static_assert(index_chunks(kIndexMaxEntries) * kIndexTopk <= kIndexChunk);
static_assert(index_chunks(kIndexMaxEntries / kIndexBlock) * kIndexMaxBlocks <= kIndexChunk);

template <int kMostTaken>
struct SelectShared {
  using Best = Pick<kThreads, kIndexChunk, kMostTaken>;
  typename Best::Shared best;
  std::uint32_t ticket;
};
struct EntryShared : SelectShared<kIndexTopk> {
  // What says where entries lie, asked for before there are scores.
  std::int32_t pages[kPages];
  alignas(16) std::int32_t blocks[kIndexMaxBlocks];
};

// Whether `pieces` blocks of the row have left what they found: true in the last of them. The
// block calls, after its stores to global memory.
LOWLAT_DEVICE bool is_last(std::uint32_t* ticket, int pieces, std::uint32_t& shared_ticket) {
  __threadfence();
  plat::block_sync();
  if (plat::thread_idx() == 0) {
    const std::uint32_t taken = atomicAdd(ticket, 1u);
    shared_ticket = taken;
    if (taken + 1u == static_cast<std::uint32_t>(pieces)) *ticket = 0u;
  }
  plat::block_sync();
  __threadfence();
  return shared_ticket + 1u == static_cast<std::uint32_t>(pieces);
}

// The k best of `count` > k scores of a row, this block's part of the work: store(place, number)
// once for each, by the row's last block, place `thread_idx` and every kThreads-th. All blocks of
// the row that have scores call, a barrier behind Pick::clear.
template <int kMostTaken, class Store>
LOWLAT_DEVICE void select_row(const float* scores, int count, int k, uint2* found,
                              std::uint32_t* ticket, SelectShared<kMostTaken>& shared,
                              Stamps& stamps, Store store) {
  using Best = typename SelectShared<kMostTaken>::Best;
  const int thread_idx = plat::thread_idx(), chunk = static_cast<int>(blockIdx.x);
  const int pieces = (count + kIndexChunk - 1) / kIndexChunk;
  const int first = chunk * kIndexChunk, n = min(count - first, kIndexChunk);
  // One round for a row of one piece; else one for the piece and, in the row's last block, one for
  // what all have found. A part that has no more than k gives all.
  bool all_found = false;
#pragma unroll 1
  for (int all = n;;) {
    const bool picks = all > k;
    if (picks) {
      if (all_found) {
        for (int i = thread_idx; i < all; i += kThreads) {
          shared.best.score[i] = plat::bits_float(__ldcg(&found[i].x));
        }
      } else {
        // Up to three behind the last, of which nothing is taken.
        for (int i = 4 * thread_idx; i < all; i += 4 * kThreads) {
          copy_16(shared.best.score + i, scores + first + i);
        }
        wait_for_copies();
      }
      plat::block_sync();
      Best::run(shared.best, all, k, stamps);
    }
    const bool finishes = pieces == 1 || all_found;
    for (int place = thread_idx; place < min(all, k); place += kThreads) {
      const int number = picks ? shared.best.picked[place] : place;
      if (all_found) {
        store(place, static_cast<int>(__ldcg(&found[number].y)));
      } else if (finishes) {
        store(place, number);
      } else {
        found[chunk * k + place] = make_uint2(plat::float_bits(__ldcg(scores + first + number)),
                                              static_cast<std::uint32_t>(first + number));
      }
    }
    if (finishes || !is_last(ticket, pieces, shared.ticket)) return;
    all_found = true;
    all = (pieces - 1) * k + min(count - (pieces - 1) * kIndexChunk, k);
    Best::clear(shared.best);
    plat::block_sync();
  }
}

// A row's slots: to memory and, of few rows, with the tag that attention waits for.
class SelectedSlots {
 public:
  LOWLAT_DEVICE SelectedSlots(const IndexParams& params, int row)
      : slots_(params.entry_slots + row * kIndexTopk) {
    if (params.hop.port == nullptr || params.rows.num_rows > kHopRows) return;
    tagged_ = static_cast<std::uint64_t*>(params.packets.selected) + row * kIndexTopk;
    tag_ = hop_tag(params.hop, params.hop.index, HopKernel::select).tag;
  }
  LOWLAT_DEVICE void put(int place, std::int32_t slot) const {
    if (tagged_ != nullptr) {
      const std::uint64_t pair =
          static_cast<std::uint64_t>(tag_) << 32 | static_cast<std::uint32_t>(slot);
      asm volatile(
          "st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(tagged_ + place)),
          "l"(pair)
          : "memory");
    }
    slots_[place] = slot;
  }

 private:
  std::int32_t* slots_;
  std::uint64_t* tagged_ = nullptr;
  std::uint32_t tag_ = 0;
};

__global__ void __launch_bounds__(kThreads, kBlocksTogether)
    index_select_sm90(const __grid_constant__ IndexParams params) {
  extern __shared__ __align__(16) unsigned char memory[];
  EntryShared& shared = *reinterpret_cast<EntryShared*>(memory);
  sm90::launch_dependents();
  Stamps stamps(stamp_sink(params.hop),
                params.hop.id + static_cast<std::uint32_t>(HopKernel::select));
  const int row = static_cast<int>(blockIdx.y), thread_idx = plat::thread_idx();
  const std::int32_t* page_row =
      params.pages.page_table +
      static_cast<std::int64_t>(row / params.rows.tokens) * params.pages.stride;
  const int shift = 31 - __clz(params.pages.per_page);
  // All is asked for at once, before it is known how much of it the row sees.
  const bool by_blocks = params.blocks != nullptr;
  static_assert(kPages == kThreads && kIndexMaxBlocks == 4 * kThreads);
  std::int32_t page = 0;
  uint4 blocks = {};
  if (thread_idx <
      min((params.max_entries + params.pages.per_page - 1) >> shift, params.pages.stride)) {
    page = __ldg(page_row + thread_idx);
  }
  if (by_blocks) {
    blocks = __ldcg(reinterpret_cast<const uint4*>(params.blocks + static_cast<std::int64_t>(row) *
                                                                       kIndexMaxBlocks) +
                    thread_idx);
  }
  int count = min(index_count(params.rows, params.ratio, row), params.max_entries);
  if (by_blocks) count = index_candidates(count);
  // Where the row has no scores for it a block leaves its place to the kernels that are next; the
  // row's first waits for all.
  if (blockIdx.x != 0 && static_cast<int>(blockIdx.x) * kIndexChunk >= count) {
    open_gate(params.done);
    return;
  }
  const SelectedSlots slots(params, row);
  shared.pages[thread_idx] = page;
  if (by_blocks) reinterpret_cast<uint4*>(shared.blocks)[thread_idx] = blocks;
  const auto store = [&](int place, int number) {
    int entry = number;
    if (by_blocks && number >= 0) {
      entry = shared.blocks[number / kIndexBlock] * kIndexBlock + number % kIndexBlock;
    }
    if (params.entries != nullptr) params.entries[row * kIndexTopk + place] = entry;
    if (entry < 0) {
      slots.put(place, -1);
      return;
    }
    const int number_of_page = entry >> shift;
    const std::int32_t in_pool =
        number_of_page < kPages ? shared.pages[number_of_page] : __ldg(page_row + number_of_page);
    slots.put(place, (in_pool << shift) + (entry & (params.pages.per_page - 1)));
  };
  SelectShared<kIndexTopk>::Best::clear(shared.best);
  plat::block_sync();
  stamps.mark(StampStage::ask);
  wait_at(params.scores_done);
  stamps.mark(StampStage::wait);
  if (count > kIndexTopk) {
    select_row(
        params.scores + row * params.pitch, count, kIndexTopk,
        params.found + static_cast<std::int64_t>(row) * index_found_count(params.max_entries),
        params.tickets + row, shared, stamps, store);
  } else if (blockIdx.x == 0) {
    for (int i = thread_idx; i < kIndexTopk; i += kThreads) store(i, i < count ? i : -1);
  }
  stamps.mark(StampStage::store);
  open_gate(params.done);
}

__global__ void __launch_bounds__(kThreads, kBlocksTogether)
    index_blocks_sm90(const __grid_constant__ IndexParams params) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<SelectShared<kIndexMaxBlocks>*>(memory);
  sm90::launch_dependents();
  Stamps stamps({}, 0);
  const int row = static_cast<int>(blockIdx.y), thread_idx = plat::thread_idx();
  const int count = min(index_count(params.rows, params.ratio, row), params.max_entries);
  const int num_blocks = (count + kIndexBlock - 1) / kIndexBlock;
  std::int32_t* out = params.out_blocks + row * kIndexMaxBlocks;
  // The newest block takes a place whatever its scores; the others compete for what is left.
  const bool all = num_blocks <= kIndexMaxBlocks;
  const int num_others = num_blocks - 1;
  if (blockIdx.x != 0 && (all || static_cast<int>(blockIdx.x) * kIndexChunk >= num_others)) {
    open_gate(params.done);
    return;
  }
  SelectShared<kIndexMaxBlocks>::Best::clear(shared.best);
  plat::block_sync();
  wait_at(params.scores_done);
  if (blockIdx.x == 0) {
    if (all) {
      for (int i = thread_idx; i < kIndexMaxBlocks; i += kThreads) out[i] = i < num_blocks ? i : -1;
    } else if (thread_idx == 0) {
      out[kIndexMaxBlocks - 1] = num_others;
    }
  }
  if (!all) {
    select_row(
        params.block_scores + row * (params.pitch / kIndexBlock), num_others, kIndexMaxBlocks - 1,
        params.found + static_cast<std::int64_t>(row) * index_found_count(params.max_entries) +
            index_chunks(params.max_entries) * kIndexTopk,
        params.tickets + params.rows.num_rows + row, shared, stamps,
        [&](int place, int number) { out[place] = number; });
  }
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
  return launch_kernel(index_select_sm90, dim3(blocks / rows, rows), kThreads, sizeof(EntryShared),
                       1, programmatic, stream, params);
}

cudaError_t launch_index_blocks(const IndexParams& params, bool programmatic, cudaStream_t stream) {
  if (!valid(params) || params.block_scores == nullptr) return cudaErrorInvalidValue;
  const auto rows = static_cast<unsigned>(params.rows.num_rows);
  return launch_kernel(index_blocks_sm90, dim3(index_blocks_blocks(params) / rows, rows), kThreads,
                       sizeof(SelectShared<kIndexMaxBlocks>), 1, programmatic, stream, params);
}

}  // namespace lowlat::nvidia::fused

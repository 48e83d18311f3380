// sparse_attention_wide_bf16_sm90: attention of 9 to 48 rows over gathered keys of 584 bytes, where
// a block has several tiles of them.
//
// Math         as attention.cu
// Shapes       q [T,heads,512] bf16 · keys e4m3 under a power of two a 64, and 64 bf16 ·
//              o [T,heads·512] f16 under a power of two a 32 (V4: 128) · 9 ≤ T ≤ 48
// Rounding     as attention.cu
// Bytes        T = 48, 16 heads, 640 keys a row: 17.9 MB of keys, 1.6 MB of q and o; mostly L2
// Floor        4.2 us at 4.65 TB/s
// Launch       a cluster a row and 16 heads, its blocks share the keys; 256 threads. The first keys
//              are gathered and expanded before q is there, except those that the step writes.
//              Where the extra keys are selected meanwhile a block has its part of the window first
// Ordering     gates (exchange_gate.cuh) or kernels' ends; a stored key is brought and expanded by
//              the eight threads that have it, so that only its readers wait for the block; inside
//              a cluster a block's partials (max, sum, o) of a head go to the block that finishes
//              it, which its barrier tells when all are there
// Determinism  fixed order: keys by index in tiles, tiles, blocks; bitwise run to run
// Meaning      reference/attention.cpp and rope.cpp. Bound: rel_l2 ≤ 5e-3.
#include "platform/nvidia.hpp"
// The platform comes first.
#include <climits>

#include "fused/attention_parts.cuh"
#include "fused/attention_wide.hpp"
#include "fused/exchange.hpp"
#include "fused/exchange_gate.cuh"
#include "fused/exchange_hop.cuh"
#include "fused/front_launch.cuh"
#include "fused/front_quant.cuh"
#include "platform/nvidia_sm90.cuh"
#include "platform/nvidia_sm90_cluster.cuh"
#include "platform/nvidia_sm90_fp8.cuh"
#include "stages/kv.hpp"

namespace lowlat::nvidia::fused {
namespace {

using namespace attention;

constexpr int kListed = kThreads;  // keys that are looked up together
constexpr int kAtOnce = kKeysAtOnce;
// Pieces of 16 bytes change places within 128 bytes by their key's number, so that neither the
// eight keys of a matrix nor two keys and four pieces of a score's operands meet in a bank.
constexpr int kKeyPitch = kDim;
LOWLAT_DEVICE int turn_of_key(int key) { return (key & 1) << 2 | (key >> 1 & 3); }
constexpr int kScoreGroups = 4;  // groups of warps that share the 512 dimensions of a score
// Sums on their way over the keys' memory; the pitch keeps eight heads in different banks.
constexpr int kSumPitch = kDim + 8;

// Where a key is stored; NULL: a pad, or none.
struct alignas(16) Place {
  const std::uint8_t* data;
  const std::uint8_t* scales;
};

// Keys that are in shared memory together: a step of the second product for each sixteen.
constexpr int kTile = 32;
constexpr int kProbPitch = kTile + 8, kScorePitch = kTile + 8;
static_assert(kTile % 16 == 0 && kHeads <= kTile && kTile <= kListed);

struct Shared {
  union {
    alignas(16) std::uint16_t key[kTile * kKeyPitch];
    alignas(16) std::uint16_t sum[kHeads * kSumPitch];  // bf16
  };
  struct Work {
    float score[kScoreGroups][kHeads][kScorePitch];      // four heads in different banks
    alignas(16) unsigned char data[kTile * kDataBytes];  // the next tile's stored rows
    alignas(16) unsigned char scales[kTile * kScaleBytes];
  };
  // In place of the work, when every block of the cluster has used up its own, what the cluster
  // sends: by block and then by head of this one, its part of the sums under the largest score that
  // it saw, that score and its weight.
  union {
    Work work;
    alignas(16) std::uint16_t part[kHeads][kDim];  // bf16
  };
  float2 part_weight[kHeads];
  std::uint64_t parts, weights;  // barriers
  std::uint16_t prob[kHeads * kProbPitch];
  float top[kHeads], weight[kHeads], rescale[kHeads], sink[kHeads];
  float factor[kHeads][kHeads];  // of a block's head and a block's part of it
  float2 turn[shape::kRopeDim / 2];
  // Of the block's keys, so many at a time: where they are, and which of them are used, as bits.
  Place place[kListed];
  std::uint32_t used[kListed / plat::kWarpLanes];
  // The first tile's slots (-1: a pad), and those that the step writes (-2: none).
  std::int32_t slot[kTile], written[kMaxFusedRows];
  bool selected;  // already, when q is there
};
static_assert(2 * (sizeof(Shared) + 1024) <= 228 * 1024);

// A block's keys by numbers of its own, whole tiles of the window's and then the extra set's, where
// these are selected while the block works; else all that it has, one after the other.
struct Keys {
  int count;    // and pads between
  int first;    // place of number 0: through the window's and then the extra set's indices
  int ungated;  // keys that are known from the begin on
  int first_extra, gated;  // place of the first other key, and its number; of a block that has none
                           // the count
  LOWLAT_DEVICE int place(int number) const {
    return number < ungated                    ? first + number
           : number >= gated && number < count ? first_extra + number - gated
                                               : INT_MAX;
  }
  // From a tile's first number on, of its kind.
  LOWLAT_DEVICE int left(int number) const {
    return number < gated ? ungated - number : count - number;
  }
};
LOWLAT_DEVICE Keys number_keys(const AttentionParams& params, const KeySpan& span, int block_idx,
                               int num_blocks) {
  const bool divides = params.selected.word != nullptr && params.extra_ratio == 0 &&
                       params.num_extra > 0 && params.num_window > 0 &&
                       params.num_window % (8 * num_blocks) == 0;
  const int all = span.end - span.first;
  if (!divides) return {all, span.first, all, 0, all};
  const int window = params.num_window / num_blocks;
  const int gated = (window + kTile - 1) / kTile * kTile;
  const int per_block = keys_per_block(params.num_extra, num_blocks);
  const int first = min(block_idx * per_block, params.num_extra);
  const int extra = min(per_block, params.num_extra - first);
  return {gated + extra, block_idx * window, window, params.num_window + first, gated};
}

// The keys of numbers `first` and on, as far as `end`. A thread a key, whose slot is returned as
// well. All threads call.
LOWLAT_DEVICE std::int32_t list_keys(Shared& shared, const AttentionParams& params, int row_idx,
                                     const Keys& keys, int first, int end) {
  const int number = first + plat::thread_idx(), all = params.num_window + params.num_extra;
  const int place = number < end ? keys.place(number) : INT_MAX;
  const std::int32_t slot = slot_at(params, row_idx, place, all);
  const stages::KvRow<std::uint8_t> row = key_at(params, place, slot);
  shared.place[plat::thread_idx()] = {row.data, row.scales};
  const unsigned used = __ballot_sync(plat::kAllLanes, slot >= 0);
  if (plat::thread_idx() % plat::kWarpLanes == 0) {
    shared.used[plat::thread_idx() / plat::kWarpLanes] = used;
  }
  return slot;
}

// Asks for the calling thread's pieces of a key of the tile. What is not used is zeros.
LOWLAT_DEVICE void ask_for_key(Shared& shared, int key, const Place& place, bool used,
                               const void* any) {
  ask_for_pieces(shared.work.data + key * kDataBytes, shared.work.scales + key * kScaleBytes,
                 place.data, place.scales, used, any);
}
// The calling thread's part of a key, as it came, to bf16.
LOWLAT_DEVICE void expand_key(Shared& shared, int key, bool high_half) {
  std::uint16_t* to =
      shared.key + key * kKeyPitch + (plat::thread_idx() % kKeyThreads ^ turn_of_key(key & 7)) * 8;
  expand_pieces(shared.work.data + key * kDataBytes, shared.work.scales + key * kScaleBytes,
                high_half, [&](int group, const uint4& values) {
                  *reinterpret_cast<uint4*>(to + group * kKeyThreads * 8) = values;
                });
}

template <class M>
__global__ void __launch_bounds__(kThreads, 2)
    sparse_attention_wide_bf16_sm90(const __grid_constant__ AttentionParams params) {
  constexpr int kTurns = (kTile + kAtOnce - 1) / kAtOnce;
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  auto& scores = shared.work.score;
  sm90::launch_dependents();
  const int thread_idx = plat::thread_idx();
  const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
  const int g = lane_idx / 4, t = lane_idx % 4;
  const int num_blocks = sm90::cluster_size(), block_idx = sm90::cluster_rank();
  const int row_idx = static_cast<int>(blockIdx.y);
  const int first_head = static_cast<int>(blockIdx.z) * kHeads;
  Stamps stamps(stamp_sink(params.hop),
                params.hop.id + static_cast<std::uint32_t>(HopKernel::attention));
  const KeySpan span = keys_of_block(params, row_idx, block_idx, num_blocks);
  const Keys keys = number_keys(params, span, block_idx, num_blocks);
  // Of those that wait before they know a key.
  bool selected = keys.gated == keys.count;
  if (selected && span.selects) wait_at(params.selected);

  if (thread_idx == 0) {
    sm90::barrier_init(&shared.parts, 1);
    sm90::barrier_init(&shared.weights, 1);
    sm90::fence_barrier_init();
    sm90::barrier_arrive_expect(&shared.parts, sizeof shared.part);
    sm90::barrier_arrive_expect(&shared.weights, sizeof shared.part_weight);
  }
  const std::int32_t slot = list_keys(shared, params, row_idx, keys, 0, keys.gated);
  if (thread_idx < kTile) {
    shared.slot[thread_idx] = keys.place(thread_idx) < params.num_window ? slot : -1;
  }
  if (thread_idx < kMaxFusedRows) {
    shared.written[thread_idx] =
        thread_idx < params.num_rows ? __ldg(params.kv_slots + thread_idx) : -2;
  }
  if (thread_idx < kHeads) {
    shared.sink[thread_idx] = __ldg(params.sink + first_head + thread_idx);
    shared.top[thread_idx] = -INFINITY;
    shared.weight[thread_idx] = 0.0f;
  }
  plat::block_sync();
  // Of the first tile, the calling thread's keys; those of the step's own rows are stored long
  // before q is there.
  const int own_key = thread_idx / kKeyThreads;
  const auto place_at = [&](int turn, int from) -> Place {
    return shared.place[from + turn * kAtOnce + own_key];
  };
  const auto has = [&](int turn) { return turn * kAtOnce + own_key < kTile; };
  // Of the last tile, those warps' keys that are not there stay what they were.
  const auto turns_of = [&](int count) {
    unsigned turns = 0;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (turn * kAtOnce + warp_idx * (kAtOnce / kWarps) < count) turns |= 1u << turn;
    }
    return turns;
  };
  const auto half_of = [](const Place& place) { return in_high_half(place.scales); };
  bool late = false;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    if (!has(turn)) continue;
    const std::int32_t own_slot = shared.slot[turn * kAtOnce + own_key];
#pragma unroll
    for (int i = 0; i < kMaxFusedRows / kKeyThreads; ++i) {
      const std::int32_t written = shared.written[i * kKeyThreads + thread_idx % kKeyThreads];
      late |= own_slot >= 0 && written == own_slot;
    }
  }
  if (__any_sync(plat::kAllLanes, late)) {
    warp_wait_at(params.keys_done.word != nullptr ? params.keys_done : params.before);
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    if (!has(turn)) continue;
    const Place place = place_at(turn, 0);
    ask_for_key(shared, turn * kAtOnce + own_key, place, place.data != nullptr, params.q);
  }
  if (warp_idx == kWarps - 1) {
    static_assert(shape::kRopeDim / 2 == plat::kWarpLanes);
    const float angle =
        static_cast<float>(params.positions[row_idx]) * params.rope.values[lane_idx];
    shared.turn[lane_idx] = turn_by(angle);
  }
  const auto expand_tile = [&](int from, unsigned which) {
    wait_for_copies();
    __syncwarp();  // a key's threads are of one warp
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (!has(turn) || (which >> turn & 1u) == 0u) continue;
      expand_key(shared, turn * kAtOnce + own_key, half_of(place_at(turn, from)));
    }
    __syncwarp();  // what was copied is used up
  };
  constexpr unsigned kAll = (1u << kTurns) - 1u;
  expand_tile(0, kAll);
  stamps.mark(StampStage::ask);

  if (!selected && params.before.word != nullptr) {
    poll_gates(params.before, params.keys_done);
    if (thread_idx == 0) {
      shared.selected = passes_gate(params.selected);
    }
    plat::block_sync();
    selected = shared.selected;
  } else {
    poll_gates(params.before, params.keys_done);  // of later tiles keys too
    plat::block_sync();
  }
  stamps.mark(StampStage::wait);
  // Fragments of q: a warp has 128 of the dimensions, in four steps of 32. Within a step a thread
  // takes 8 dimensions in one piece, and the keys are read the same way, so the order of K inside
  // a step is that of the pieces.
  const int score_group = warp_idx % kScoreGroups, key_half = warp_idx / kScoreGroups;
  uint4 query[4][2];
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t head =
          static_cast<std::int64_t>(row_idx) * params.num_heads + first_head + g + 8 * half;
      query[step][half] = __ldcg(reinterpret_cast<const uint4*>(
          params.q + head * kDim + score_group * 128 + step * 32 + 8 * t));
    }
  }
  stamps.mark(StampStage::read);

  float sum[8][4] = {};              // of a warp's 64 dimensions
  constexpr int kKeys = kTile / 16;  // of a thread's, in the softmax
  const int head = thread_idx / 16, first_of_head = thread_idx % 16 * kKeys;
  int listed = 0, listed_end = keys.gated == keys.count ? kListed : min(keys.gated, kListed);
  // Asks for the tile of numbers `next` and on, of which the list may have to be made first.
  const auto ask_for_tile = [&](int next) {
    if (next + kTile > listed_end) {
      // The list ends before the tile does: the next list begins with that tile's keys.
      plat::block_sync();
      list_keys(shared, params, row_idx, keys, next, selected ? keys.count : keys.gated);
      listed = next;
      listed_end = next + kListed;
      plat::block_sync();
    }
    const unsigned turns = turns_of(keys.left(next));
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (!has(turn) || (turns >> turn & 1u) == 0u) continue;
      const Place place = place_at(turn, next - listed);
      ask_for_key(shared, turn * kAtOnce + own_key, place, place.data != nullptr, params.q);
    }
  };
  for (int first = 0; first < keys.count; first += kTile) {
    const int count = keys.left(first);
    if (first != 0) expand_tile(first - listed, turns_of(count));
    bool used[kKeys];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int number = first - listed + first_of_head + i;
      used[i] = (shared.used[number / plat::kWarpLanes] >> number % plat::kWarpLanes & 1u) != 0u;
    }
    const int next = first + kTile;
    // Its rows are on their way over the products, if it is known.
    const bool waits = !selected && next == keys.gated;
    if (next < keys.count && !waits) ask_for_tile(next);
    plat::block_sync();

    constexpr int kScoreTiles = kTile / 16;  // of eight keys, a warp
    float score[kScoreTiles][4] = {};
    const bool any_keys = key_half * (kTile / 2) < count;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if (!any_keys) break;
      const uint4 &low = query[step][0], &high = query[step][1];
      const std::uint32_t a[2][4] = {{low.x, high.x, low.y, high.y},
                                     {low.z, high.z, low.w, high.w}};
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
        const uint4 b = *reinterpret_cast<const uint4*>(
            shared.key + (key_half * (kTile / 2) + n * 8 + g) * kKeyPitch + score_group * 128 +
            step / 2 * 64 + (step % 2 * 4 + t ^ turn_of_key(g)) * 8);
        const std::uint32_t b_low[2] = {b.x, b.y}, b_high[2] = {b.z, b.w};
        sm90::mma_bf16(score[n], a[0], b_low);
        sm90::mma_bf16(score[n], a[1], b_high);
      }
    }
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      float* to = &scores[score_group][g][key_half * (kTile / 2) + n * 8 + 2 * t];
      *reinterpret_cast<float2*>(to) = make_float2(score[n][0], score[n][1]);
      *reinterpret_cast<float2*>(to + 8 * kScorePitch) = make_float2(score[n][2], score[n][3]);
    }
    plat::block_sync();

    // Softmax of the tile: 16 threads a head.
    {
      constexpr float kScale = 0.04419417382415922f;  // 512^-0.5
      float s[kKeys] = {}, top = -INFINITY;
#pragma unroll
      for (int group = 0; group < kScoreGroups; ++group) {
        const float* from = &scores[group][head][first_of_head];
        static_assert(kKeys == 2);
        const float2 two = *reinterpret_cast<const float2*>(from);
        s[0] += two.x, s[1] += two.y;
      }
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        s[i] = used[i] ? s[i] * kScale : -INFINITY;
        top = plat::max(s[i], top);
      }
#pragma unroll
      for (int mask = 1; mask < 16; mask *= 2) {
        top = plat::max(__shfl_xor_sync(plat::kAllLanes, top, mask), top);
      }
      const float old_top = shared.top[head];
      top = plat::max(old_top, top);
      // Nothing but pads so far: every probability is 0, and no infinity is taken from another.
      const float base = top == -INFINITY ? 0.0f : top;
      float weight = 0.0f;
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const float p = quick_bf16(quick_exp(s[i] - base));
        shared.prob[head * kProbPitch + first_of_head + i] =
            static_cast<std::uint16_t>(plat::float_bits(p) >> 16);
        weight += p;
      }
#pragma unroll
      for (int mask = 1; mask < 16; mask *= 2) {
        weight += __shfl_xor_sync(plat::kAllLanes, weight, mask);
      }
      if (first_of_head == 0) {
        const float rescale = quick_exp(old_top - base);
        shared.rescale[head] = rescale;
        shared.weight[head] = plat::fma(shared.weight[head], rescale, weight);
        shared.top[head] = top;
      }
    }
    plat::block_sync();
    if (next >= keys.count) sm90::cluster_arrive_relaxed();  // the block's work is used up

    if (first != 0) {
      const float low = shared.rescale[g], high = shared.rescale[g + 8];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        sum[n][0] *= low, sum[n][1] *= low;
        sum[n][2] *= high, sum[n][3] *= high;
      }
    }
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) {
      if (step * 16 >= count) break;
      const std::uint16_t* prob = shared.prob + g * kProbPitch + step * 16 + 2 * t;
      const auto pair = [](const std::uint16_t* at) {
        return *reinterpret_cast<const std::uint32_t*>(at);
      };
      const std::uint32_t a[4] = {pair(prob), pair(prob + 8 * kProbPitch), pair(prob + 8),
                                  pair(prob + 8 * kProbPitch + 8)};
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        std::uint32_t b[4];
        sm90::load_matrices_turned(b, shared.key + (step * 16 + lane_idx % 16) * kKeyPitch +
                                          warp_idx * 64 +
                                          (n + lane_idx / 16 ^ turn_of_key(lane_idx % 8)) * 8);
        const std::uint32_t b_low[2] = {b[0], b[1]}, b_high[2] = {b[2], b[3]};
        sm90::mma_bf16(sum[n], a, b_low);
        sm90::mma_bf16(sum[n + 1], a, b_high);
      }
    }
    plat::block_sync();  // the tile's memory is free
    if (waits) {
      wait_at(params.selected);
      selected = true;
      ask_for_tile(next);
    }
  }

  plat::block_sync();  // also where there was no tile: the keys' stores are over
  if (keys.count == 0) sm90::cluster_arrive_relaxed();
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    std::uint16_t* to = shared.sum + g * kSumPitch + warp_idx * 64 + n * 8 + 2 * t;
    *reinterpret_cast<std::uint32_t*>(to) = sm90::to_bf16_pair(sum[n][0], sum[n][1]);
    *reinterpret_cast<std::uint32_t*>(to + 8 * kSumPitch) =
        sm90::to_bf16_pair(sum[n][2], sum[n][3]);
  }
  plat::block_sync();
  stamps.mark(StampStage::compute);
  // Each head's part goes to the block that finishes it.
  const int heads_per_block = kHeads / num_blocks;
  sm90::cluster_wait();
  if (thread_idx < kHeads) {
    const int to = block_idx * heads_per_block + thread_idx % heads_per_block;
    const int owner = thread_idx / heads_per_block;
    sm90::send_to_peer(sm90::peer_address(&shared.part_weight[to], owner), shared.top[thread_idx],
                       shared.weight[thread_idx], sm90::peer_address(&shared.weights, owner));
  }
  constexpr int kChunks = kDim / 8;
#pragma unroll 1
  for (int i = thread_idx; i < kHeads * kChunks; i += kThreads) {
    const int of = i / kChunks, chunk = i % kChunks * 8;
    const int to = block_idx * heads_per_block + of % heads_per_block;
    const int owner = of / heads_per_block;
    sm90::send_to_peer(sm90::peer_address(&shared.part[to][chunk], owner),
                       *reinterpret_cast<const uint4*>(shared.sum + of * kSumPitch + chunk),
                       sm90::peer_address(&shared.parts, owner));
  }
  finish_heads<M, false>(shared, params, HopTag{}, stamps, row_idx, first_head, block_idx,
                         num_blocks, heads_per_block);
  stamps.mark(StampStage::store);
  open_gate(params.done);
}

}  // namespace

cudaError_t launch_attention_wide(const AttentionParams& params, int blocks_per_row,
                                  bool programmatic, cudaStream_t stream) {
  return with_model(params.model, [&]<class M>() {
    return launch_kernel(sparse_attention_wide_bf16_sm90<M>,
                         dim3(blocks_per_row, params.num_rows, params.num_heads / kHeads), kThreads,
                         sizeof(Shared), blocks_per_row, programmatic, stream, params);
  });
}

}  // namespace lowlat::nvidia::fused

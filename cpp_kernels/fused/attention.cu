// sparse_attention_bf16_sm90: attention of few rows over gathered keys of 584 bytes.
//
// Math         V4: few rows' heads of q normed and rotated first, as front.cu says
//              s_j = 512^-0.5·(q·k_j) over the window and the extra set, o = Σ e^(s_j - M) k_j /
//              (Σ e^(s_j - M) + e^(sink - M)); o to bf16, its last 64 rotated back at the row's
//              position, to bf16; a row without keys gives 0; index -1 and nothing else is left out
// Shapes       q [T,heads,512] bf16 · keys e4m3 under a power of two a 64, and 64 bf16 ·
//              o [T,heads·512] f16 under a power of two a 32 (V4: 128) · 1 ≤ T ≤ 48
// Rounding     keys to bf16 exactly; probabilities to bf16 (the denominator adds the rounded ones);
//              sums fp32, a block's part of them to bf16; o as above; to f16 without loss but for
//              values 2^-24 of their group's largest and below (V4's target: to e4m3 codes' values)
// Bytes        T = 6, 16 heads, 640 keys a row: 2.24 MB of keys, 0.2 MB of q and o; mostly L2
// Floor        0.5 us at 4.65 TB/s
// Launch       a cluster a row and 16 heads, its blocks share the keys; 256 threads. The first keys
//              are gathered and expanded before q is there, except those that the step writes
// Ordering     gates (exchange_gate.cuh) or kernels' ends; inside a cluster a block's
//              partials (max, sum, o) of a head go to the block that finishes it, which its barrier
//              tells when all are there
// Determinism  fixed order: keys by index in tiles, tiles, blocks; bitwise run to run
// Meaning      reference/attention.cpp and rope.cpp. Bound: rel_l2 ≤ 5e-3.
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/attention.hpp"
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

constexpr int kThreads = 256;
constexpr int kHeads = 16;  // of a cluster: one tile of mma
constexpr int kDim = shape::kHeadDim;
constexpr int kNope = kDim - shape::kRopeDim;
// Pieces of 16 bytes of a stored row: 28 of codes, 8 of bf16.
constexpr int kPieces = stages::kKvDataBytes / 16;
constexpr int kCodePieces = kNope / 16;
constexpr int kListed = kThreads;  // keys that are looked up together
// A pitch of 16 more than a multiple of 128 bytes: eight keys' pieces lie in different banks.
constexpr int kKeyPitch = kDim + 8;
constexpr int kScoreGroups = 4;  // groups of warps that share the 512 dimensions of a score
// Sums on their way over the keys' memory; the pitch keeps eight heads in different banks.
constexpr int kSumPitch = kDim + 8;

// kTile keys are in shared memory together: a step of the second product for each sixteen.
template <int kTile_, bool kHops>
struct Shared {
  static constexpr int kTile = kTile_, kProbPitch = kTile + 8;
  static constexpr int kPerThread = (kTile * kPieces + kThreads - 1) / kThreads;  // pieces
  // q where it comes by packets, then scores [kScoreGroups][kHeads][kTile]. A tile's stored rows
  // and their scale bytes lie over both where nothing of the next tile comes meanwhile, else
  // behind.
  static constexpr int kQueryBytes = kHops ? kHeads * kKeyPitch * 2 : 0;
  static constexpr int kScoreBytes = kScoreGroups * kHeads * kTile * 4;
  static constexpr bool kAhead = !kHops && kTile == 32;  // a block has several tiles
  static constexpr int kRawAt = kAhead ? kScoreBytes : 0;
  static constexpr int kRawScales = kRawAt + kTile * stages::kKvDataBytes;
  static constexpr int kRawEnd = kRawScales + kTile * 8;
  static_assert(kTile % 16 == 0 && kHeads <= kTile && kListed >= kTile);
  union {
    std::uint16_t key[kTile * kKeyPitch];
    std::uint16_t sum[kHeads * kSumPitch];  // bf16
  };
  // In place of the work, when every block of the cluster has used up its own, what the cluster
  // sends: by block and then by head of this one, its part of the sums under the largest score that
  // it saw, that score and its weight.
  union {
    alignas(16) unsigned char work[kRawEnd > kQueryBytes + kScoreBytes ? kRawEnd
                                                                       : kQueryBytes + kScoreBytes];
    alignas(16) std::uint16_t part[kHeads][kDim];  // bf16
  };
  float2 part_weight[kHeads];
  std::uint64_t parts;  // barrier
  std::uint16_t prob[kHeads * kProbPitch];
  float top[kHeads], weight[kHeads], rescale[kHeads], sink[kHeads];
  float factor[kHeads][kHeads];  // of a block's head and a block's part of it
  float2 turn[shape::kRopeDim / 2];
  std::int32_t slot[kListed];  // of the block's keys, so many at a time; -1: a pad, or none
  // Where the keys of a tile, and of the next, are stored; NULL: a pad, or none. `late`: of the
  // first tile, rows that may not be read yet.
  const std::uint8_t* data[2][kTile];
  const std::uint8_t* scales[2][kTile];
  const std::uint8_t* late[kTile];
  // Whose key it is among the step's rows (one of those that are read from packets), or -1.
  std::int8_t late_row[kTile];
};

// Slots of the keys from `first` on: places count through the window's and then the extra set's
// indices. A thread a key, whose slot is returned as well.
template <class Shared>
LOWLAT_DEVICE std::int32_t list_keys(Shared& shared, const AttentionParams& params, int row_idx,
                                     int first, int end) {
  const int place = first + plat::thread_idx();
  std::int32_t slot = -1;
  if (place < end) {
    slot = place < params.num_window
               ? __ldg(params.window_idx + row_idx * params.num_window + place)
               : __ldg(params.extra_idx + static_cast<std::int64_t>(row_idx) * params.num_extra +
                       place - params.num_window);
  }
  shared.slot[plat::thread_idx()] = slot;
  return slot;
}

// Where the key of a place is.
LOWLAT_DEVICE stages::KvRow<std::uint8_t> key_at(const AttentionParams& params, int place,
                                                 std::int32_t slot) {
  if (slot < 0) return {nullptr, nullptr};
  const KvPages& pages = place < params.num_window ? params.window : params.extra;
  return stages::KvPaged<std::uint8_t>{pages.base, pages.slots_per_page, pages.page_bytes}.row(
      slot);
}

static_assert(2 * (sizeof(Shared<48, true>) + 1024) <= 228 * 1024 &&
              2 * (sizeof(Shared<48, false>) + 1024) <= 228 * 1024 &&
              2 * (sizeof(Shared<32, false>) + 1024) <= 228 * 1024);

LOWLAT_DEVICE int piece_of(int i) { return i * kThreads + plat::thread_idx(); }
template <int kTile>
LOWLAT_DEVICE int key_of(int i) {
  return min(piece_of(i) / kPieces, kTile - 1);
}

LOWLAT_DEVICE void copy_8(void* dst_shared, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(sm90::shared_address(dst_shared)),
               "l"(__cvta_generic_to_global(src))
               : "memory");
}

// Asks for the stored rows in data[]; those of none are zeros (kFill), or nothing. All threads
// call. kEarly: some of the step's own keys may not be stored yet, and be read later. Four keys'
// scales lie in 32 bytes, and copies of eight bytes go through the first-level cache, which would
// keep what the late ones had been: here they are read past it.
template <bool kFill, bool kEarly, class Shared>
LOWLAT_DEVICE void ask_for_tile(Shared& shared, const std::uint8_t* const* data,
                                const std::uint8_t* const* scales) {
#pragma unroll 1
  for (int i = plat::thread_idx(); i < Shared::kTile * kPieces; i += kThreads) {
    const std::uint8_t* row = data[i / kPieces];
    unsigned char* to = shared.work + Shared::kRawAt + 16 * i;
    if (row != nullptr) {
      copy_16(to, row + 16 * (i % kPieces));
    } else if constexpr (kFill) {
      *reinterpret_cast<uint4*>(to) = make_uint4(0u, 0u, 0u, 0u);
    }
  }
  const int key = plat::thread_idx();
  if (key < Shared::kTile) {
    unsigned char* to = shared.work + Shared::kRawScales + 8 * key;
    if (data[key] != nullptr) {
      if constexpr (kEarly) {
        *reinterpret_cast<uint2*>(to) = __ldcg(reinterpret_cast<const uint2*>(scales[key]));
      } else {
        copy_8(to, scales[key]);
      }
    } else if constexpr (kFill) {
      *reinterpret_cast<std::uint64_t*>(to) = 0x7f7f'7f7f'7f7f'7f7full;
    }
  }
}

// Two bf16 of two e4m3 codes (bytes 0 and 2 of `codes`): sign to bit 15, the rest to bits 10 .. 4
// is the value times 2^-120, subnormal codes too; the product is exact.
LOWLAT_DEVICE std::uint32_t codes_to_bf16(std::uint32_t codes) {
  constexpr std::uint32_t kPower120 = 0x7b80'7b80u;
  const std::uint32_t bits = (codes << 4 & 0x07f0'07f0u) | (codes << 8 & 0x8000'8000u);
  return sm90::multiply_bf16_pairs(bits, kPower120);
}

LOWLAT_DEVICE void store_piece(std::uint16_t* keys, const uint4& data, std::uint32_t scale_code,
                               int number) {
  const int key = number / kPieces, piece = number % kPieces;
  std::uint16_t* to = keys + key * kKeyPitch;
  if (piece >= kCodePieces) {
    *reinterpret_cast<uint4*>(to + kNope + (piece - kCodePieces) * 8) = data;
    return;
  }
  // ue8m0 as bf16: the byte is the exponent; byte 0 is the subnormal 2^-127.
  const std::uint32_t one = scale_code == 0u ? 0x40u : scale_code << 7;
  const std::uint32_t scale = one | one << 16;
  const std::uint32_t words[4] = {data.x, data.y, data.z, data.w};
  std::uint32_t out[8];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const std::uint32_t even = codes_to_bf16(words[j]);      // codes 0 and 2
    const std::uint32_t odd = codes_to_bf16(words[j] >> 8);  // codes 1 and 3
    out[2 * j] = sm90::multiply_bf16_pairs(__byte_perm(even, odd, 0x5410), scale);
    out[2 * j + 1] = sm90::multiply_bf16_pairs(__byte_perm(even, odd, 0x7632), scale);
  }
  uint4* place = reinterpret_cast<uint4*>(to + piece * 16);
  place[0] = make_uint4(out[0], out[1], out[2], out[3]);
  place[1] = make_uint4(out[4], out[5], out[6], out[7]);
}

// Keys of what was asked for: of all rows, or of those in only[]. All threads call. Short code: it
// is the longest of the kernel.
template <class Shared>
LOWLAT_DEVICE void expand_tile(Shared& shared, const std::uint8_t* const* only) {
  wait_for_copies();
  plat::block_sync();
#pragma unroll 1
  for (int i = plat::thread_idx(); i < Shared::kTile * kPieces; i += kThreads) {
    const int key = i / kPieces, piece = i % kPieces;
    if (only != nullptr && only[key] == nullptr) continue;
    store_piece(shared.key, *reinterpret_cast<const uint4*>(shared.work + Shared::kRawAt + 16 * i),
                shared.work[Shared::kRawScales + 8 * key + min(piece, kCodePieces - 1) / 4], i);
  }
}

// A group of 32 values as f16 under a power of two. The group's largest goes to 2^13 .. 2^14;
// exponents are kept where both factors are normal; what is smaller than that is 0 in any fp32 sum.
LOWLAT_DEVICE PowerScale half_scale(float amax) {
  int exponent = static_cast<int>(plat::float_bits(amax) >> 23) - 127;
  exponent = max(min(exponent, 127), -100);
  return {plat::bits_float(static_cast<std::uint32_t>(127 + exponent - 13) << 23),
          plat::bits_float(static_cast<std::uint32_t>(127 + 13 - exponent) << 23)};
}

// V4: packets of q as they are sent become those of normed and rotated heads. All threads call; a
// thread has packet thread_idx % 128 of every second head. shared.factor is free until the end.
template <int kPackets, class Memory>
LOWLAT_DEVICE void norm_heads(HopWords (&words)[kPackets], Memory& shared, float norm_eps) {
  constexpr int kPacketsAHead = kDim / 4, kPacketsATile = 16, kAtOnce = kThreads / kPacketsAHead;
  static_assert(kPackets * kAtOnce == kHeads && 2 * kPacketsATile == plat::kWarpLanes);
  constexpr int kWarpsAHead = kPacketsAHead / plat::kWarpLanes;
  const int packet = plat::thread_idx() % kPacketsAHead, half = plat::thread_idx() / kPacketsAHead;
  const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const float own = plat::bits_float(words[i].third);
    const float other = plat::warp_shuffle_xor(own, kPacketsATile);
    if (lane_idx == 0) {
      shared.factor[i * kAtOnce + half][packet / plat::kWarpLanes] = own + other;
    }
  }
  plat::block_sync();
  const int turned = 4 * packet - kNope;  // among the head's rotating dimensions
#pragma unroll
  for (int i = 0; i < kPackets; ++i) {
    const float* parts = shared.factor[i * kAtOnce + half];
    float squares = parts[0];
#pragma unroll
    for (int j = 1; j < kWarpsAHead; ++j) squares += parts[j];
    const float norm = quick_rsqrt(squares / static_cast<float>(kDim) + norm_eps);
    std::uint32_t pairs[2] = {low_word(words[i].pair), high_word(words[i].pair)};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float a = quick_bf16(sm90::low_bf16(pairs[j]) * norm);
      float b = quick_bf16(sm90::high_bf16(pairs[j]) * norm);
      if (turned >= 0) {
        const float2 turn = shared.turn[turned / 2 + j];
        const float first = a * turn.x - b * turn.y;
        b = a * turn.y + b * turn.x;
        a = first;
      }
      pairs[j] = sm90::to_bf16_pair(a, b);
    }
    words[i].pair = static_cast<std::uint64_t>(pairs[1]) << 32 | pairs[0];
  }
}

// kHops: q, the step's own keys and o are packets.
template <class M, bool kHops, int kTile>
__global__ void __launch_bounds__(kThreads, 2)
    sparse_attention_bf16_sm90(const __grid_constant__ AttentionParams params) {
  using Memory = Shared<kTile, kHops>;
  constexpr int kPerThread = Memory::kPerThread, kProbPitch = Memory::kProbPitch;
  extern __shared__ __align__(128) unsigned char memory[];
  Memory& shared = *reinterpret_cast<Memory*>(memory);
  [[maybe_unused]] auto* const query_of_heads = reinterpret_cast<std::uint16_t*>(shared.work);
  auto* const scores =
      reinterpret_cast<float (*)[kHeads][kTile]>(shared.work + Memory::kQueryBytes);
  sm90::launch_dependents();
  const int thread_idx = plat::thread_idx();
  const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
  const int g = lane_idx / 4, t = lane_idx % 4;
  const int num_blocks = sm90::cluster_size(), block_idx = sm90::cluster_rank();
  const int row_idx = static_cast<int>(blockIdx.y);
  const int first_head = static_cast<int>(blockIdx.z) * kHeads;

  HopTag hop = {};
  if constexpr (kHops) hop = hop_tag(params.hop, params.hop.index, HopKernel::attention);
  Stamps stamps(stamp_sink(params.hop),
                params.hop.id + static_cast<std::uint32_t>(HopKernel::attention));
  int num_keys = params.num_window + params.num_extra;
  bool completes = true;
  if (params.extra_ratio > 0) {
    const int count = __ldg(params.positions + row_idx) + 1, seen = count / params.extra_ratio;
    num_keys = params.num_window + min(seen, params.num_extra);
    // A request has at most the step's rows.
    completes = count - seen * params.extra_ratio < params.num_rows;
  }
  const int per_block = ((num_keys + num_blocks - 1) / num_blocks + 7) / 8 * 8;
  const int first_key = min(block_idx * per_block, num_keys);
  const int end_key = min(first_key + per_block, num_keys);
  // Of all that a row sees only the last entry may be the step's own. Where entries are selected, a
  // row's last block waits also if the row sees none: what opens the gate has read x by then, which
  // a later kernel of the chain overwrites.
  const bool selects = params.selected.word != nullptr && completes &&
                       (end_key > params.num_window || end_key == num_keys);
  // Fragments of q: a warp has 128 of the dimensions, in four steps of 32. Within a step a thread
  // takes 8 dimensions in one piece, and the keys are read the same way, so the order of K inside
  // a step is that of the pieces.
  const int score_group = warp_idx % kScoreGroups, key_half = warp_idx / kScoreGroups;
  uint4 query[4][2];
  const auto take_query = [&] {
    if constexpr (kHops) {
      wait_for_signs(hop,
                     {static_cast<const plat::TaggedWords*>(params.packets.qa) + block_idx, hop.tag,
                      static_cast<const plat::TaggedWords*>(params.packets.q) +
                          (row_idx * params.num_heads + first_head) * (kDim / 4),
                      kHeads * (kDim / 4) / plat::kWarpLanes});
      stamps.mark(StampStage::wait);
      // The cluster's head rows come once a block, by way of shared memory: packets lie as they are
      // read, and two warps have the same fragments.
      constexpr int kPackets = kHeads * (kDim / 4) / kThreads;
      HopWords words[kPackets];
      const auto* from = static_cast<const plat::TaggedWords*>(params.packets.q) +
                         (row_idx * params.num_heads + first_head) * (kDim / 4) + thread_idx;
      take_packets(words, hop, (1u << kPackets) - 1u, [&](int i) { return from + i * kThreads; });
      if constexpr (M::kNormsHeads) norm_heads(words, shared, params.norm_eps);
#pragma unroll
      for (int i = 0; i < kPackets; ++i) {
        const int packet = thread_idx + i * kThreads;
        *reinterpret_cast<uint2*>(query_of_heads + packet / (kDim / 4) * kKeyPitch +
                                  packet % (kDim / 4) * 4) =
            make_uint2(low_word(words[i].pair), high_word(words[i].pair));
      }
      plat::block_sync();
      stamps.mark(StampStage::read);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          query[step][half] = *reinterpret_cast<const uint4*>(
              query_of_heads + (g + 8 * half) * kKeyPitch + score_group * 128 + step * 32 + 8 * t);
        }
      }
    } else {
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
    }
  };
  const auto make_turn = [&] {
    if (thread_idx < shape::kRopeDim / 2) {
      const float angle =
          static_cast<float>(params.positions[row_idx]) * params.rope.values[thread_idx];
      shared.turn[thread_idx] = turn_by(angle);
    }
  };
  // A selection comes later than q does, all that a row sees earlier.
  const bool query_first = kHops && selects && params.extra_ratio == 0;
  if (query_first) {
    make_turn();
    plat::block_sync();
    take_query();
  }
  if (selects) wait_at(params.selected);
  if (query_first) stamps.mark(StampStage::ask);

  if (thread_idx == 0) {
    sm90::barrier_init(&shared.parts, 1);
    sm90::fence_barrier_init();
    sm90::barrier_arrive_expect(&shared.parts, sizeof shared.part + sizeof shared.part_weight);
  }
  const std::int32_t slot = list_keys(shared, params, row_idx, first_key, end_key);
  if (thread_idx < kHeads) {
    shared.sink[thread_idx] = __ldg(params.sink + first_head + thread_idx);
    shared.top[thread_idx] = -INFINITY;
    shared.weight[thread_idx] = 0.0f;
  }
  bool any_late = false;
  if (thread_idx < kTile) {
    const int place = first_key + thread_idx;
    const stages::KvRow<std::uint8_t> row = key_at(params, place, slot);
    bool late = false;
    int late_row = -1;
    if (place < params.num_window) {
#pragma unroll 4
      for (int i = 0; i < params.num_rows; ++i) {
        if (__ldg(params.kv_slots + i) == slot) late_row = i;
      }
      late = late_row >= 0;
    }
    const bool there = row.data != nullptr;
    shared.late_row[thread_idx] = static_cast<std::int8_t>(there ? late_row : -1);
    shared.data[0][thread_idx] = late ? nullptr : row.data;
    shared.late[thread_idx] = late ? row.data : nullptr;
    shared.scales[0][thread_idx] = row.scales;
    any_late = late && there;
  }
  any_late = __syncthreads_or(any_late ? 1 : 0) != 0;
  ask_for_tile<true, !kHops>(shared, shared.data[0], shared.scales[0]);
  if (!query_first) make_turn();
  expand_tile(shared, nullptr);
  plat::block_sync();
  if (!query_first) stamps.mark(StampStage::ask);

  if constexpr (!kHops) {
    wait_at(params.before);
    stamps.mark(StampStage::wait);
  }
  if (kHops && any_late) {
    // Keys of the step's rows, which are there before q is. Few threads have such pieces, and few
    // of them more than one.
#pragma unroll 1
    for (int i = 0; i < kPerThread; ++i) {
      const int row = piece_of(i) < kTile * kPieces ? shared.late_row[key_of<kTile>(i)] : -1;
      if (__all_sync(plat::kAllLanes, row < 0)) continue;
      const auto* from = static_cast<const plat::TaggedWords*>(params.packets.keys) +
                         max(row, 0) * kHopKeyPackets + 2 * (piece_of(i) % kPieces);
      HopWords words[2];
      take_packets(words, hop, row >= 0 ? 3u : 0u, [&](int j) { return from + j; });
      if (row < 0) continue;
      store_piece(shared.key,
                  make_uint4(low_word(words[0].pair), high_word(words[0].pair),
                             low_word(words[1].pair), high_word(words[1].pair)),
                  words[0].third, piece_of(i));
    }
  }
  if (!query_first) take_query();
  if (!kHops && any_late) {
    if (thread_idx < kTile) shared.data[1][thread_idx] = shared.late[thread_idx];
    plat::block_sync();
    ask_for_tile<false, false>(shared, shared.data[1], shared.scales[0]);
    expand_tile(shared, shared.data[1]);
    plat::block_sync();
  }

  if (!kHops || query_first) stamps.mark(StampStage::read);
  float sum[8][4] = {};  // of a warp's 64 dimensions
  int side = 0, listed = first_key;
  for (int first = first_key; first < end_key; first += kTile, side ^= 1) {
    if (first != first_key) {
      if constexpr (!Memory::kAhead)
        ask_for_tile<true, false>(shared, shared.data[side], shared.scales[side]);
      expand_tile(shared, nullptr);
    }
    const int next = first + kTile;
    if (next < end_key && next + kTile > listed + kListed) {
      // The list ends before the next tile does: the next list begins with that tile's keys.
      plat::block_sync();
      list_keys(shared, params, row_idx, next, end_key);
      listed = next;
      plat::block_sync();
    }
    if (thread_idx < kTile && next < end_key) {
      // None is late any more: the kernels before have ended.
      const stages::KvRow<std::uint8_t> row =
          key_at(params, next + thread_idx, shared.slot[next + thread_idx - listed]);
      shared.data[side ^ 1][thread_idx] = row.data;
      shared.scales[side ^ 1][thread_idx] = row.scales;
    }
    plat::block_sync();
    if (Memory::kAhead &&
        next < end_key) {  // the next tile's rows are on their way over the products
      ask_for_tile<true, false>(shared, shared.data[side ^ 1], shared.scales[side ^ 1]);
    }

    constexpr int kScoreTiles = kTile / 16;  // of eight keys, a warp
    float score[kScoreTiles][4] = {};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint4 &low = query[step][0], &high = query[step][1];
      const std::uint32_t a[2][4] = {{low.x, high.x, low.y, high.y},
                                     {low.z, high.z, low.w, high.w}};
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
        const uint4 b = *reinterpret_cast<const uint4*>(
            shared.key + (key_half * (kTile / 2) + n * 8 + g) * kKeyPitch + score_group * 128 +
            step * 32 + 8 * t);
        const std::uint32_t b_low[2] = {b.x, b.y}, b_high[2] = {b.z, b.w};
        sm90::mma_bf16(score[n], a[0], b_low);
        sm90::mma_bf16(score[n], a[1], b_high);
      }
    }
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      float* to = &scores[score_group][g][key_half * (kTile / 2) + n * 8 + 2 * t];
      *reinterpret_cast<float2*>(to) = make_float2(score[n][0], score[n][1]);
      *reinterpret_cast<float2*>(to + 8 * kTile) = make_float2(score[n][2], score[n][3]);
    }
    plat::block_sync();

    // Softmax of the tile: 16 threads a head.
    {
      constexpr float kScale = 0.04419417382415922f;  // 512^-0.5
      constexpr float kLog2e = 1.4426950408889634f;
      const int head = thread_idx / 16, first_of_thread = thread_idx % 16;
      constexpr int kKeys = kTile / 16;  // of a thread
      float s[kKeys], top = -INFINITY;
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const int key = first_of_thread + 16 * i;
        float total = scores[0][head][key];
#pragma unroll
        for (int group = 1; group < kScoreGroups; ++group) {
          total += scores[group][head][key];
        }
        const bool used = shared.data[side][key] != nullptr ||
                          (first == first_key && shared.late[key] != nullptr);
        s[i] = used ? total * kScale : -INFINITY;
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
        const float p = quick_bf16(exp2f((s[i] - base) * kLog2e));
        shared.prob[head * kProbPitch + first_of_thread + 16 * i] =
            static_cast<std::uint16_t>(plat::float_bits(p) >> 16);
        weight += p;
      }
#pragma unroll
      for (int mask = 1; mask < 16; mask *= 2) {
        weight += __shfl_xor_sync(plat::kAllLanes, weight, mask);
      }
      if (first_of_thread == 0) {
        const float rescale = exp2f((old_top - base) * kLog2e);
        shared.rescale[head] = rescale;
        shared.weight[head] = plat::fma(shared.weight[head], rescale, weight);
        shared.top[head] = top;
      }
    }
    plat::block_sync();
    if (next >= end_key) sm90::cluster_arrive_relaxed();  // the block's work is used up

    if (first != first_key) {
      const float low = shared.rescale[g], high = shared.rescale[g + 8];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        sum[n][0] *= low, sum[n][1] *= low;
        sum[n][2] *= high, sum[n][3] *= high;
      }
    }
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) {
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
                                          warp_idx * 64 + n * 8 + lane_idx / 16 * 8);
        const std::uint32_t b_low[2] = {b[0], b[1]}, b_high[2] = {b[2], b[3]};
        sm90::mma_bf16(sum[n], a, b_low);
        sm90::mma_bf16(sum[n + 1], a, b_high);
      }
    }
    plat::block_sync();  // the tile's memory is free
  }

  plat::block_sync();  // also where there was no tile: the pieces' stores are over
  if (first_key >= end_key) sm90::cluster_arrive_relaxed();
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
    const int slot = block_idx * heads_per_block + thread_idx % heads_per_block;
    const int owner = thread_idx / heads_per_block;
    sm90::send_to_peer(sm90::peer_address(&shared.part_weight[slot], owner), shared.top[thread_idx],
                       shared.weight[thread_idx], sm90::peer_address(&shared.parts, owner));
  }
  constexpr int kChunks = kDim / 8;
#pragma unroll 1
  for (int i = thread_idx; i < kHeads * kChunks; i += kThreads) {
    const int head = i / kChunks, chunk = i % kChunks * 8;
    const int slot = block_idx * heads_per_block + head % heads_per_block;
    const int owner = head / heads_per_block;
    sm90::send_to_peer(sm90::peer_address(&shared.part[slot][chunk], owner),
                       *reinterpret_cast<const uint4*>(shared.sum + head * kSumPitch + chunk),
                       sm90::peer_address(&shared.parts, owner));
  }
  wait_for_cluster(&shared.parts, 0);
  stamps.mark(StampStage::sum);

  // Each block finishes its heads. The weight of each block's part of a head comes from 16 threads
  // a head.
  constexpr float kLog2e = 1.4426950408889634f;
  [[maybe_unused]] const int padded = padded_rows(params.num_rows);
  const int part = thread_idx % kHeads, local = thread_idx / kHeads;
  if (local < heads_per_block) {
    const bool there = part < num_blocks;
    const float2 from = shared.part_weight[(there ? part : 0) * heads_per_block + local];
    const float top = there ? from.x : -INFINITY;
    float weight = there ? from.y : 0.0f;
    const float sink = shared.sink[block_idx * heads_per_block + local];
    float most = plat::max(top, sink);
    // Lanes of a half warp alone, where the block has one head.
    const unsigned lanes = heads_per_block > 1 ? plat::kAllLanes : 0xffffu;
#pragma unroll
    for (int mask = 1; mask < kHeads; mask *= 2) {
      most = plat::max(__shfl_xor_sync(lanes, most, mask), most);
    }
    const float base = most == -INFINITY ? 0.0f : most;
    const float factor = exp2f((top - base) * kLog2e);
    weight *= factor;
#pragma unroll
    for (int mask = 1; mask < kHeads; mask *= 2) {
      weight += __shfl_xor_sync(lanes, weight, mask);
    }
    weight += exp2f((sink - base) * kLog2e);
    shared.factor[local][part] = weight > 0.0f ? factor * (1.0f / weight) : 0.0f;
  }
  plat::block_sync();
  // A thread has so many dimensions that a group lies in one warp: all threads have a head (V4:
  // half of them each).
  constexpr int kGroup = M::kScaleBlock, kDims = kGroup > 64 ? 4 : 2;
  constexpr int kAtOnce = kThreads * kDims / kDim, kLanes = kGroup / kDims;
  static_assert(kAtOnce >= 1 && kLanes <= plat::kWarpLanes);
  const int dim = thread_idx * kDims % kDim;
#pragma unroll 1
  for (int i = thread_idx * kDims / kDim; i < heads_per_block; i += kAtOnce) {
    const int head = block_idx * heads_per_block + i;
    float v[kDims] = {};
#pragma unroll 4
    for (int block = 0; block < num_blocks; ++block) {
      const std::uint16_t* part = &shared.part[block * heads_per_block + i][dim];
      const float factor = shared.factor[i][block];
#pragma unroll
      for (int j = 0; j < kDims; j += 2) {
        const std::uint32_t pair = *reinterpret_cast<const std::uint32_t*>(part + j);
        v[j] = plat::fma(sm90::low_bf16(pair), factor, v[j]);
        v[j + 1] = plat::fma(sm90::high_bf16(pair), factor, v[j + 1]);
      }
    }
    float amax = 0.0f;
#pragma unroll
    for (int j = 0; j < kDims; j += 2) {
      v[j] = quick_bf16(v[j]);
      v[j + 1] = quick_bf16(v[j + 1]);
      if (dim >= kNope) {
        const float2 turn = shared.turn[(dim + j - kNope) / 2];
        const float turned = v[j] * turn.x + v[j + 1] * turn.y;
        v[j + 1] = quick_bf16(v[j + 1] * turn.x - v[j] * turn.y);
        v[j] = quick_bf16(turned);
      }
      amax = plat::max(plat::max(plat::abs(v[j]), plat::abs(v[j + 1])), amax);
    }
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) {
      amax = plat::max(__shfl_xor_sync(plat::kAllLanes, amax, mask), amax);
    }
    const bool quantizes = M::kQuantizedO && !params.plain_o;
    const PowerScale group = quantizes ? power_scale(amax) : half_scale(amax);
    std::uint32_t pairs[kDims / 2];
#pragma unroll
    for (int j = 0; j < kDims; j += 2) {
      float a = v[j] * group.inverse, b = v[j + 1] * group.inverse;
      if (quantizes) {
        std::uint32_t values[2];
        sm90::e4m3_to_f16(values, sm90::to_e4m3_pair(a, b));
        pairs[j / 2] = values[0];
      } else {
        pairs[j / 2] = sm90::to_f16_pair(a, b);
      }
    }
    const std::int64_t place =
        (static_cast<std::int64_t>(row_idx) * params.num_heads + first_head + head) * kDim + dim;
    if constexpr (kHops) {
      std::uint32_t next = pairs[kDims / 2 - 1];
      if constexpr (kDims == 2) {
        next = __shfl_down_sync(plat::kAllLanes, pairs[0], 1);
        if (thread_idx % 2 != 0) continue;
      }
      send_packet(static_cast<plat::TaggedWords*>(params.packets.o) + place / 4, hop.tag, pairs[0],
                  next, plat::float_bits(group.scale));
    } else {
#pragma unroll
      for (int j = 0; j < kDims; j += 2) {
        *reinterpret_cast<std::uint32_t*>(params.o + place + j) = pairs[j / 2];
      }
      if (dim % kGroup == 0) {
        params.o_scale[((first_head + head) * (kDim / kGroup) + dim / kGroup) * padded + row_idx] =
            group.scale;
      }
    }
  }
  stamps.mark(StampStage::store);
  if constexpr (!kHops) open_gate(params.done);
}

}  // namespace

cudaError_t launch_sparse_attention(const AttentionParams& params, bool programmatic,
                                    cudaStream_t stream) {
  if (params.num_rows < 1 || params.num_rows > kMaxFusedRows) return cudaErrorInvalidValue;
  if (params.num_heads < kHeads || params.num_heads % kHeads != 0) return cudaErrorInvalidValue;
  if (params.num_window < 0 || params.num_extra < 0) return cudaErrorInvalidValue;
  const int blocks = params.blocks_per_row == 0
                         ? attention_blocks_per_row(params.num_rows, params.num_heads)
                         : params.blocks_per_row;
  if (blocks < 2 || blocks > kHeads || kHeads % blocks != 0) return cudaErrorInvalidValue;
  if (params.num_rows > kHopRows) {
    return launch_attention_wide(params, blocks, programmatic, stream);
  }
  return with_model(params.model, [&]<class M>() {
    const auto launch = [&]<bool kHops, int kTile>() {
      return launch_kernel(sparse_attention_bf16_sm90<M, kHops, kTile>,
                           dim3(blocks, params.num_rows, params.num_heads / kHeads), kThreads,
                           sizeof(Shared<kTile, kHops>), blocks, programmatic, stream, params);
    };
    return launch.template operator()<true, 48>();
  });
}

}  // namespace lowlat::nvidia::fused

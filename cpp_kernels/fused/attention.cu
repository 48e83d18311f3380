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
// Launch       a cluster a row and 16 heads (of V4.1's few rows 32, where a rank has them), its
//              blocks share the keys; 256 threads. The first tile of keys is gathered, expanded
//              and in the registers of the products before q is there, except those that the step
//              writes, of few rows. A warp has 64 dimensions of q, of scores and of o: q's packets
//              are operands as they come. More than eight rows: clusters of half as many blocks
//              have room beside q's, one a multiprocessor, and a second tile is in shared memory
//              by then; of more tiles a block: attention_wide.cu
// Ordering     gates (exchange_gate.cuh) or kernels' ends; of few rows packets, and a selected slot
//              with its tag (HopBuffers::selected). Inside a cluster a block's partials (max, sum,
//              o) of a head go from registers to the block that finishes it, whose barriers tell
//              when all are there
// Determinism  fixed order: keys by index in tiles, tiles, blocks; bitwise run to run
// Meaning      reference/attention.cpp and rope.cpp. Bound: rel_l2 ≤ 5e-3.
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/attention.hpp"
#include "fused/attention_parts.cuh"
#include "fused/attention_wide.hpp"
#include "fused/exchange.hpp"
#include "fused/exchange_gate.cuh"
#include "fused/exchange_hop.cuh"
#include "fused/front_launch.cuh"
#include "fused/front_quant.cuh"
#include "fused/index.hpp"
#include "platform/nvidia_sm90.cuh"
#include "platform/nvidia_sm90_cluster.cuh"
#include "platform/nvidia_sm90_fp8.cuh"
#include "stages/kv.hpp"

namespace lowlat::nvidia::fused {
namespace {

using namespace attention;

// A warp has so many dimensions of every score and of every output.
constexpr int kWarpDims = kDim / kWarps;
static_assert(kWarpDims == 64 && shape::kRopeDim == kWarpDims);
// Pieces of 16 bytes of a stored row: 28 of codes, 8 of bf16.
constexpr int kPieces = stages::kKvDataBytes / 16;
constexpr int kCodePieces = kNope / 16;
constexpr int kListed = kThreads;  // keys that are looked up together
// A pitch of 16 more than a multiple of 128 bytes: eight keys' pieces lie in different banks.
constexpr int kKeyPitch = kDim + 8;
// Keys that are in shared memory together: two steps of the second product and one of half the
// length. Of their scores and probabilities, a head's after the other, eight heads' first ones are
// a quarter of the banks apart, and the heads that share a warp in the softmax half of them.
constexpr int kTile = 40, kScorePitch = kTile;
constexpr int kWarpKeys = kTile / kWarps;  // that a warp asks for and expands
constexpr int kPerThread = (kTile * kPieces + kThreads - 1) / kThreads;  // pieces
static_assert(kTile % kWarps == 0 && kHeads <= kTile && kListed >= kTile);

constexpr int kRawScales = kTile * stages::kKvDataBytes;  // of a tile's stored rows

// kHeadTiles: sixteens of heads of a cluster. kKeyTiles: tiles of keys that are there before q is.
template <int kHeadTiles, int kKeyTiles = 1>
struct Shared {
  static constexpr int kAllHeads = kHeadTiles * kHeads;
  static constexpr int kProbs = kHeadTiles > kKeyTiles ? kHeadTiles : kKeyTiles;
  static_assert(kHeadTiles == 1 || kKeyTiles == 1);
  // A tile's stored rows and their scale bytes, then in their place scores
  // [kWarps][kHeads][kScorePitch], each warp's part; the second sixteen heads' in the keys' place.
  static constexpr int kScoreBytes = kWarps * kHeads * kScorePitch * 4;
  static constexpr int kRawBytes = kRawScales + kTile * kScaleBytes;
  static constexpr int kWorkBytes = kRawBytes > kScoreBytes ? kRawBytes : kScoreBytes;
  static_assert(kWorkBytes % 16 == 0);
  // Of two tiles the second, when the first is in registers.
  alignas(16) std::uint16_t key[kTile * kKeyPitch];
  static_assert(sizeof key >= kScoreBytes);
  // What the cluster sends: by block and then by head of this one, its part of the sums under the
  // largest score that it saw; that score and its weight.
  alignas(16) std::uint16_t part[kAllHeads][kDim];  // bf16
  alignas(16) unsigned char work[kKeyTiles * kWorkBytes];
  float2 part_weight[kAllHeads];
  std::uint64_t parts, weights;  // barriers
  alignas(16) std::uint16_t prob[kProbs][kHeads * kScorePitch];
  float rescale[kHeads], sink[kAllHeads];
  alignas(16) float factor[kHeads][kHeads];  // of a warp's head and a block's part of it
  float2 turn[shape::kRopeDim / 2];
  std::int32_t slot[kListed];  // of the block's keys, so many at a time; -1: a pad, or none
  // Where the keys of a tile, and of the next, are stored; NULL: a pad, none, or of a late row.
  const std::uint8_t* data[2][kTile];
  const std::uint8_t* scales[2][kTile];
  // Of the first tile's keys that are read from packets: whose it is among the step's rows; or -1.
  std::int8_t late_row[kTile];
  // Where all keys come by their eight threads: whether it is one.
  bool used[kKeyTiles * kTile];
};

// Slots of the keys from `first` on, a thread a key.
template <class Memory>
LOWLAT_DEVICE void list_keys(Memory& shared, const AttentionParams& params, int row_idx, int first,
                             int end) {
  shared.slot[plat::thread_idx()] = slot_at(params, row_idx, first + plat::thread_idx(), end);
}

static_assert(2 * (sizeof(Shared<1>) + 1024) <= 228 * 1024);
// Beside a block of q of sixteen rows (front.cu), and two of them.
static_assert(sizeof(Shared<1, 2>) <= 112 * 1024);

LOWLAT_DEVICE int piece_of(int i) { return i * kThreads + plat::thread_idx(); }
LOWLAT_DEVICE int key_of(int i) { return min(piece_of(i) / kPieces, kTile - 1); }

LOWLAT_DEVICE void copy_8(void* dst_shared, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(sm90::shared_address(dst_shared)),
               "l"(__cvta_generic_to_global(src))
               : "memory");
}

// Asks for the stored rows in data[], a warp for its keys, which it expands too; those of none are
// zeros. Whole warps call, each with its own keys' data[] in sight.
LOWLAT_DEVICE void ask_for_tile(unsigned char* work, const std::uint8_t* const* data,
                                const std::uint8_t* const* scales) {
  const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
  const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
  constexpr int kWarpPieces = kWarpKeys * kPieces;
#pragma unroll 1
  for (int i = warp_idx * kWarpPieces + lane_idx; i < (warp_idx + 1) * kWarpPieces;
       i += plat::kWarpLanes) {
    const std::uint8_t* row = data[i / kPieces];
    unsigned char* to = work + 16 * i;
    if (row != nullptr) {
      copy_16(to, row + 16 * (i % kPieces));
    } else {
      *reinterpret_cast<uint4*>(to) = make_uint4(0u, 0u, 0u, 0u);
    }
  }
  if (lane_idx < kWarpKeys) {
    const int key = warp_idx * kWarpKeys + lane_idx;
    unsigned char* to = work + kRawScales + 8 * key;
    if (data[key] != nullptr) {
      copy_8(to, scales[key]);
    } else {
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

// Keys lie in shared memory so that a thread's sums are 16 dimensions in a row and its packets of q
// are what meets sixteen bytes of a key: of 64 dimensions, pair 8 u + n (eight of u's) is word u of
// chunk n, and chunks are turned by the number of the 64, so that pieces of a key that are stored
// together lie in different banks.
LOWLAT_DEVICE int chunk_of(int block, int n) { return (n ^ block) * 8; }

LOWLAT_DEVICE void store_piece(std::uint16_t* keys, const uint4& data, std::uint32_t scale_code,
                               int number) {
  const int key = number / kPieces, piece = number % kPieces;
  const bool coded = piece < kCodePieces;
  const int half = piece - kCodePieces;  // of 16 dimensions, where they are bf16
  const int block = coded ? piece / 4 : kCodePieces / 4;
  std::uint16_t* to =
      keys + key * kKeyPitch + block * kWarpDims + 2 * (coded ? piece % 4 : half / 2);
  const std::uint32_t words[4] = {data.x, data.y, data.z, data.w};
  if (!coded) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      *reinterpret_cast<std::uint32_t*>(to + chunk_of(block, half % 2 * 4 + j)) = words[j];
    }
    return;
  }
  // ue8m0 as bf16: the byte is the exponent; byte 0 is the subnormal 2^-127.
  const std::uint32_t one = scale_code == 0u ? 0x40u : scale_code << 7;
  const std::uint32_t scale = one | one << 16;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const std::uint32_t even = codes_to_bf16(words[j]);      // codes 0 and 2
    const std::uint32_t odd = codes_to_bf16(words[j] >> 8);  // codes 1 and 3
    *reinterpret_cast<std::uint32_t*>(to + chunk_of(block, 2 * j)) =
        sm90::multiply_bf16_pairs(__byte_perm(even, odd, 0x5410), scale);
    *reinterpret_cast<std::uint32_t*>(to + chunk_of(block, 2 * j + 1)) =
        sm90::multiply_bf16_pairs(__byte_perm(even, odd, 0x7632), scale);
  }
}

// Keys of what the warp has asked for. Whole warps call. Short code: it is the longest of the
// kernel.
LOWLAT_DEVICE void expand_tile(std::uint16_t* keys, const unsigned char* work) {
  constexpr int kWarpPieces = kWarpKeys * kPieces;
  const int first = plat::thread_idx() / plat::kWarpLanes * kWarpPieces;
  wait_for_copies();
  __syncwarp();
#pragma unroll 1
  for (int i = first + plat::thread_idx() % plat::kWarpLanes; i < first + kWarpPieces;
       i += plat::kWarpLanes) {
    const int key = i / kPieces, piece = i % kPieces;
    store_piece(keys, *reinterpret_cast<const uint4*>(work + 16 * i),
                work[kRawScales + 8 * key + min(piece, kCodePieces - 1) / 4], i);
  }
}

// V4: packets of q as they are sent, of the calling thread's two heads, become those of normed and
// rotated ones. All threads call; shared.factor is free until the end.
template <int kPackets>
LOWLAT_DEVICE void norm_heads(HopWords (&words)[2 * kPackets], Shared<1>& shared, float norm_eps) {
  const int warp_idx = plat::thread_idx() / plat::kWarpLanes;
  const int g = plat::thread_idx() % plat::kWarpLanes / 4, t = plat::thread_idx() % 4;
  // Every packet has the squares of its warp's dimensions.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (t == 0)
      shared.factor[g + 8 * half][warp_idx] = plat::bits_float(words[half * kPackets].third);
  }
  plat::block_sync();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* parts = shared.factor[g + 8 * half];
    float squares = parts[0];
#pragma unroll
    for (int j = 1; j < kWarps; ++j) squares += parts[j];
    const float norm = quick_rsqrt(squares / static_cast<float>(kDim) + norm_eps);
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      std::uint64_t& both = words[half * kPackets + i].pair;
      std::uint32_t pairs[2] = {low_word(both), high_word(both)};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float a = quick_bf16(sm90::low_bf16(pairs[j]) * norm);
        float b = quick_bf16(sm90::high_bf16(pairs[j]) * norm);
        if (warp_idx == kWarps - 1) {
          const float2 turn = shared.turn[8 * i + 2 * t + j];
          const float first = a * turn.x - b * turn.y;
          b = a * turn.y + b * turn.x;
          a = first;
        }
        pairs[j] = sm90::to_bf16_pair(a, b);
      }
      both = static_cast<std::uint64_t>(pairs[1]) << 32 | pairs[0];
    }
  }
}

// The slot of a selected key, when it is there; -1 where it is not `wanted` or the wait has ended
// otherwise. Whole warps call.
template <class Ended>
LOWLAT_DEVICE std::int32_t take_selected(const AttentionParams& params, const HopTag& hop,
                                         int row_idx, int place, bool wanted, Ended ended) {
  constexpr int kPollsPerLook = 64;
  const int number = place - params.num_window;
  const std::uint64_t* from = static_cast<const std::uint64_t*>(params.packets.selected) +
                              row_idx * params.num_extra + max(number, 0);
  bool missing = wanted && number >= 0;
  std::uint64_t pair = ~std::uint64_t{0}, deadline_ns = 0;
#pragma unroll 1
  for (int polls = 1; __any_sync(plat::kAllLanes, missing); ++polls) {
    if (missing) {
      asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];"
                   : "=l"(pair)
                   : "l"(__cvta_generic_to_global(from))
                   : "memory");
      missing = static_cast<std::uint32_t>(pair >> 32) != hop.tag;
    }
    if (polls % kPollsPerLook == 0 &&
        __any_sync(plat::kAllLanes,
                   plat::thread_idx() % plat::kWarpLanes == 0 && ended(hop, deadline_ns))) {
      break;
    }
  }
  return missing ? -1 : static_cast<std::int32_t>(static_cast<std::uint32_t>(pair));
}

// kHops: q, the step's own keys and o are packets. kOnce: no block has more keys than one tile, and
// may have twice the heads, whose registers leave room for a block of q or of wo_a; or than two
// (kKeyTiles), the first of which is in registers before q is there, the second in shared memory.
// kTagged: AttentionParams::tagged; a kernel of its own, so that others' code stays as short.
template <class M, bool kHops, bool kOnce, int kHeadTiles, bool kTagged, int kKeyTiles>
__global__ void __maxnreg__(kHeadTiles == 1 ? 128 : 160)
    sparse_attention_bf16_sm90(const __grid_constant__ AttentionParams params) {
  static_assert(kHeadTiles == 1 || (kHops && kOnce && !M::kNormsHeads));
  static_assert(kHops || kOnce);
  static_assert(kKeyTiles == 1 || (!kHops && kKeyTiles == 2));
  extern __shared__ __align__(128) unsigned char memory[];
  using Memory = Shared<kHeadTiles, kKeyTiles>;
  auto& shared = *reinterpret_cast<Memory*>(memory);
  const auto work = [&](int tile) { return shared.work + tile * Memory::kWorkBytes; };
  const auto scores = [&](int tile) {
    void* const place = kHeadTiles == 1 || tile == 0 ? static_cast<void*>(work(tile)) : shared.key;
    return static_cast<float (*)[kHeads][kScorePitch]>(place);
  };
  sm90::launch_dependents();
  const int thread_idx = plat::thread_idx();
  const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
  const int g = lane_idx / 4, t = lane_idx % 4;
  const int num_blocks = sm90::cluster_size(), block_idx = sm90::cluster_rank();
  const int row_idx = static_cast<int>(blockIdx.y);
  constexpr int kAllHeads = kHeadTiles * kHeads;
  const int first_head = static_cast<int>(blockIdx.z) * kAllHeads;

  HopTag hop = {};
  if constexpr (kHops) hop = hop_tag(params.hop, params.hop.index, HopKernel::attention);
  Stamps stamps(stamp_sink(params.hop),
                params.hop.id + static_cast<std::uint32_t>(HopKernel::attention));
  const KeySpan keys = keys_of_block(params, row_idx, block_idx, num_blocks);
  const int first_key = keys.first, end_key = keys.end;
  const bool selects = keys.selects;
  // Fragments of q: of a warp's 64 dimensions, in four steps of sixteen, a thread has four in a row
  // of heads g and g + 8: a packet each.
  constexpr int kSteps = kWarpDims / 16, kOfTile = 2 * kSteps;
  uint2 query[kHeadTiles * kOfTile];
  // Reported when few registers are in use.
  [[maybe_unused]] HopEnd end = HopEnd::none;
  [[maybe_unused]] GateEnd gate_end = GateEnd::open;
  const auto gate_of_warp = [&]() -> const Gate& {
    return warp_idx == 0 || params.keys_done.word == nullptr ? params.before : params.keys_done;
  };
  const auto take_query = [&] {
    const std::int64_t head =
        static_cast<std::int64_t>(row_idx) * params.num_heads + first_head + g;
    const int first_packet = warp_idx * (kWarpDims / 4) + t;
    if constexpr (kHops) {
      const auto* q = static_cast<const plat::TaggedWords*>(params.packets.q);
      wait_for_signs(hop,
                     {static_cast<const plat::TaggedWords*>(params.packets.qa) + block_idx, hop.tag,
                      q + (head - g) * (kDim / 4), kAllHeads * (kDim / 4) / plat::kWarpLanes},
                     HopKeeps{end});
      stamps.mark(StampStage::wait);
      HopWords words[kHeadTiles * kOfTile];
      const auto* from = q + head * (kDim / 4) + first_packet;
      take_packets(
          words, hop, (1u << kHeadTiles * kOfTile) - 1u,
          [&](int i) { return from + i / kSteps * (8 * kDim / 4) + i % kSteps * 4; },
          HopKeeps{end});
      if constexpr (M::kNormsHeads) norm_heads<kSteps>(words, shared, params.norm_eps);
#pragma unroll
      for (int i = 0; i < kHeadTiles * kOfTile; ++i) {
        query[i] = make_uint2(low_word(words[i].pair), high_word(words[i].pair));
      }
      stamps.mark(StampStage::read);
    } else {
      const std::uint16_t* from = params.q + head * kDim + 4 * first_packet;
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        query[i] = __ldcg(
            reinterpret_cast<const uint2*>(from + i / kSteps * (8 * kDim) + i % kSteps * 16));
      }
    }
  };
  const auto make_turn = [&] {  // by the last warp
    const int pair = thread_idx - (kThreads - shape::kRopeDim / 2);
    if (pair >= 0) {
      const float angle = static_cast<float>(params.positions[row_idx]) * params.rope.values[pair];
      shared.turn[pair] = turn_by(angle);
    }
  };
  // A selection comes later than q does, all that a row sees earlier.
  const bool query_first = kHops && selects && params.extra_ratio == 0;
  static_assert(!kTagged || (kHops && kOnce));
  const bool by_tags = kTagged && query_first;
  if (query_first) {
    make_turn();
    // What the tagged slots name; stored long before.
    if (by_tags && thread_idx == 0 && params.rows_done.word != nullptr) poll_gate(params.rows_done);
    plat::block_sync();
    take_query();
  }
  if (selects && !by_tags) {
    if constexpr (kHops) {
      poll_gates(params.selected, params.rows_done);
      plat::block_sync();
    } else {
      wait_at(params.selected);
    }
  }
  if (query_first) stamps.mark(StampStage::ask);

  if (thread_idx == 0) {
    sm90::barrier_init(&shared.parts, 1);
    sm90::barrier_init(&shared.weights, 1);
    sm90::fence_barrier_init();
    sm90::barrier_arrive_expect(&shared.parts, sizeof shared.part);
    sm90::barrier_arrive_expect(&shared.weights, sizeof shared.part_weight);
  }
  sm90::cluster_arrive_relaxed();  // the block takes what the others send
  if constexpr (!kOnce) list_keys(shared, params, row_idx, first_key, end_key);
  [[maybe_unused]] bool any_late = false;
  [[maybe_unused]] std::int32_t tagged_slot = -1;
  if constexpr (kTagged) {
    if (by_tags) {
      const int place = first_key + warp_idx * kWarpKeys + lane_idx;
      tagged_slot = take_selected(params, hop, row_idx, place,
                                  lane_idx < kWarpKeys && place < end_key, HopKeeps{end});
    }
  }
  // By gates a key's eight threads look it up, ask for it and expand it; so many keys a turn.
  constexpr int kAllKeys = kKeyTiles * kTile;
  constexpr int kTurns = (kAllKeys + kKeysAtOnce - 1) / kKeysAtOnce;
  const int own_key = thread_idx / kKeyThreads;
  [[maybe_unused]] unsigned high_halves = 0;  // by turn
  const auto raw_scales = [&](int key) {
    return shared.work + kAllKeys * kDataBytes + key * kScaleBytes;
  };
  if constexpr (!kHops) {
    static_assert(kAllKeys % (plat::kWarpLanes / kKeyThreads) == 0, "whole warps have a turn");
    std::int32_t slot[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int key = turn * kKeysAtOnce + own_key;
      slot[turn] = key < kAllKeys ? slot_at(params, row_idx, first_key + key, end_key) : -1;
    }
#pragma unroll 1
    for (int i = thread_idx % kKeyThreads; i < params.num_rows; i += kKeyThreads) {
      const std::int32_t written = __ldg(params.kv_slots + i);
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int place = first_key + turn * kKeysAtOnce + own_key;
        any_late |= slot[turn] >= 0 && slot[turn] == written && place < params.num_window;
      }
    }
    // The step's own keys are stored long before q is there.
    if (__any_sync(plat::kAllLanes, any_late)) {
      warp_wait_at(params.keys_done.word != nullptr ? params.keys_done : params.before);
    }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int key = turn * kKeysAtOnce + own_key;
      if (key >= kAllKeys) continue;
      const stages::KvRow<std::uint8_t> row = key_at(params, first_key + key, slot[turn]);
      if (in_high_half(row.scales)) high_halves |= 1u << turn;
      if (thread_idx % kKeyThreads == 0) shared.used[key] = row.data != nullptr;
      ask_for_pieces(shared.work + key * kDataBytes, raw_scales(key), row.data, row.scales,
                     row.data != nullptr, params.q);
    }
  } else if (lane_idx < kWarpKeys) {
    const int key = warp_idx * kWarpKeys + lane_idx, place = first_key + key;
    std::int32_t slot = tagged_slot;
    if (!by_tags || place < params.num_window) slot = slot_at(params, row_idx, place, end_key);
    int late_row = -1;
    // A selected key is none of the step's: it does not wait for their slots.
    const int num_late = kTagged && place >= params.num_window ? 0 : params.num_rows;
    constexpr int kAtOnce = 8;
#pragma unroll 1
    for (int first = 0; first < num_late; first += kAtOnce) {
      std::int32_t written[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        written[i] = __ldg(params.kv_slots + min(first + i, params.num_rows - 1));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (written[i] == slot) late_row = min(first + i, params.num_rows - 1);
      }
    }
    const stages::KvRow<std::uint8_t> row = key_at(params, place, slot);
    const bool late = late_row >= 0 && place < params.num_window && row.data != nullptr;
    shared.late_row[key] = static_cast<std::int8_t>(late ? late_row : -1);
    shared.data[0][key] = late ? nullptr : row.data;
    shared.scales[0][key] = row.scales;
    any_late = late;
  }
  __syncwarp();
  if constexpr (kHops) ask_for_tile(shared.work, shared.data[0], shared.scales[0]);
  // For all that the selection has read and written, while the keys are on their way.
  if (by_tags && end_key == params.num_window + params.num_extra && thread_idx == 0) {
    poll_gate(params.selected);
  }
  if (thread_idx < kAllHeads) {
    shared.sink[thread_idx] = __ldg(params.sink + first_head + thread_idx);
  }
  if (!query_first) make_turn();
  // Keys of a tile by their threads.
  const auto expand_keys = [&](int tile) {
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      const int key = turn * kKeysAtOnce + own_key, of_tile = key - tile * kTile;
      if (of_tile < 0 || of_tile >= kTile) continue;
      const int own = thread_idx % kKeyThreads;
      std::uint16_t* const to = shared.key + of_tile * kKeyPitch + own / 2 * 2;
      expand_pieces(shared.work + key * kDataBytes, raw_scales(key),
                    (high_halves >> turn & 1u) != 0u, [&](int block, const uint4& values) {
                      const std::uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
                      for (int j = 0; j < 4; ++j) {
                        *reinterpret_cast<std::uint32_t*>(
                            to + block * kWarpDims + chunk_of(block, own % 2 * 4 + j)) = words[j];
                      }
                    });
    }
  };
  if constexpr (!kHops) {
    wait_for_copies();
    __syncwarp();
    expand_keys(0);
  } else {
    expand_tile(shared.key, shared.work);
    any_late = __syncthreads_or(any_late ? 1 : 0) != 0;
    if (!query_first) stamps.mark(StampStage::ask);
  }
  if (kHops && any_late) {
    // Keys of the step's rows, which are there before q is. Few threads have such pieces, and few
    // of them more than one.
#pragma unroll 1
    for (int i = 0; i < kPerThread; ++i) {
      const int row = piece_of(i) < kTile * kPieces ? shared.late_row[key_of(i)] : -1;
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
  if (query_first) stamps.mark(StampStage::read);
  if constexpr (kHops) sm90::cluster_wait();
  // Of a warp's 64 dimensions: heads g and g + 8, dimensions 16 t and on.
  float sum[8][4] = {};
  // The softmax has 16 threads a head; the largest score so far, and the sum of probabilities.
  const int head = warp_idx / 2 * 4 + warp_idx % 2 + lane_idx / 16 * 2;
  const int first_of_thread = lane_idx % 16;
  float top[kHeadTiles], weight[kHeadTiles];
#pragma unroll
  for (int tile = 0; tile < kHeadTiles; ++tile) top[tile] = -INFINITY, weight[tile] = 0.0f;
  // Each head's part goes to the block that finishes it: where to, in that block.
  const int heads_per_block = kAllHeads >> (31 - __clz(num_blocks));
  const auto owner_of = [&](int of) { return of * num_blocks / kAllHeads; };
  const auto slot_of = [&](int of) {
    return block_idx * heads_per_block + (of & (heads_per_block - 1));
  };
  std::uint32_t to[2], barrier[2], weight_to, weight_barrier;
  const auto find_owners = [&](int tile) {
    const int first = tile * kHeads;
    // Head g + 8 has the same place as head g, in another block.
    const std::uint16_t* place = &shared.part[slot_of(first + g)][warp_idx * kWarpDims + 16 * t];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int owner = owner_of(first + g) + half * (num_blocks / (2 * kHeadTiles));
      to[half] = sm90::peer_address(place, owner);
      barrier[half] = sm90::peer_address(&shared.parts, owner);
    }
    weight_to =
        sm90::peer_address(&shared.part_weight[slot_of(first + head)], owner_of(first + head));
    weight_barrier = sm90::peer_address(&shared.weights, owner_of(first + head));
  };
  const auto send_parts = [&](int tile) {
    if (first_of_thread == 0) {
      sm90::send_to_peer(weight_to, top[tile], weight[tile], weight_barrier);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto pair = [&](int n) {
          return sm90::to_bf16_pair(sum[4 * i + n][2 * half], sum[4 * i + n][2 * half + 1]);
        };
        sm90::send_to_peer(to[half] + 16 * i, make_uint4(pair(0), pair(1), pair(2), pair(3)),
                           barrier[half]);
      }
    }
  };
  int side = 0, listed = first_key;
  for (int first = first_key; !kHops || first < end_key; first += kTile, side ^= 1) {
    if (first != first_key) {
      ask_for_tile(shared.work, shared.data[side], shared.scales[side]);
      expand_tile(shared.key, shared.work);
    }
    const int next = first + kTile;
    if constexpr (!kOnce) {
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
    }
    plat::block_sync();

    // What the products need of the first keys is in registers before q is there.
    constexpr int kScoreTiles = kTile / 8;   // of eight keys
    constexpr int kValueSteps = kTile / 16;  // of sixteen keys; eight are left
    const std::uint16_t* const own_dims = shared.key + warp_idx * kWarpDims;
    uint4 key[kScoreTiles][2];
    const auto load_keys = [&] {
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          key[n][j] = *reinterpret_cast<const uint4*>(own_dims + (8 * n + g) * kKeyPitch +
                                                      chunk_of(warp_idx, 2 * t + j));
        }
      }
    };
    load_keys();
    std::uint32_t value[kValueSteps][8][2];
    std::uint32_t half_value[8];
    const auto load_values = [&] {
#pragma unroll
      for (int step = 0; step < kValueSteps; ++step) {
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
          std::uint32_t b[4];
          sm90::load_matrices_turned(b, own_dims + (step * 16 + lane_idx % 16) * kKeyPitch +
                                            chunk_of(warp_idx, n + lane_idx / 16));
          value[step][n][0] = b[0], value[step][n][1] = b[1];
          value[step][n + 1][0] = b[2], value[step][n + 1][1] = b[3];
        }
      }
    };
    const auto load_half_values = [&] {
#pragma unroll
      for (int n = 0; n < 8; n += 4) {
        std::uint32_t b[4];
        sm90::load_matrices_turned(b, own_dims + (kValueSteps * 16 + lane_idx % 8) * kKeyPitch +
                                          chunk_of(warp_idx, n + lane_idx / 8));
#pragma unroll
        for (int j = 0; j < 4; ++j) half_value[n + j] = b[j];
      }
    };
    if constexpr (kOnce) load_values();
    if constexpr (kKeyTiles > 1) load_half_values();
    // Of the softmax a thread has two keys side by side, and one of the last eight.
    constexpr int kKeys = 3;
    static_assert(kTile == 32 + 8);
    const auto place_of = [&](int i) {
      return i < 2 ? 2 * first_of_thread + i : 32 + first_of_thread % 8;
    };
    std::uint32_t used = 0;
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const int place = place_of(i);
        bool is_used = false;
        if constexpr (kHops) {
          is_used = shared.data[side][place] != nullptr ||
                    (first == first_key && shared.late_row[place] >= 0);
        } else {
          is_used = shared.used[tile * kTile + place];
        }
        if ((i < 2 || first_of_thread < 8) && is_used) used |= 1u << tile * kKeys + i;
      }
    }
    if constexpr (kKeyTiles > 1) {
      plat::block_sync();  // all warps have the first tile in registers
      expand_keys(1);
    }
    if constexpr (!kHops) {
      stamps.mark(StampStage::ask);
      // Also whose key nobody looks at is stored before this kernel's end.
      if (params.before.word == nullptr) {
        sm90::wait_for_predecessors();
      } else if (lane_idx == 0 && warp_idx < 2) {
        gate_end = poll_gate_quietly(gate_of_warp());
      }
      plat::block_sync();
      stamps.mark(StampStage::wait);
    }
    if (first == first_key && !query_first) take_query();
    if constexpr (!kHops) {
      stamps.mark(StampStage::read);
      sm90::cluster_wait();
    }

    const auto score_tile = [&](int tile) {
      const uint2* const of_tile = query + (kHeadTiles > 1 ? tile : 0) * kOfTile;
      float score[kScoreTiles][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int word = step / 2, u = step % 2 * 2;
        const auto of = [&](int i) { return word == 0 ? of_tile[i].x : of_tile[i].y; };
        const std::uint32_t a[4] = {of(u), of(kSteps + u), of(u + 1), of(kSteps + u + 1)};
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) {
          const uint4& chunk = key[n][word];
          const std::uint32_t b[2] = {u == 0 ? chunk.x : chunk.z, u == 0 ? chunk.y : chunk.w};
          sm90::mma_bf16(score[n], a, b);
        }
      }
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
        float* to = &scores(tile)[warp_idx][g][8 * n + 2 * t];
        *reinterpret_cast<float2*>(to) = make_float2(score[n][0], score[n][1]);
        *reinterpret_cast<float2*>(to + 8 * kScorePitch) = make_float2(score[n][2], score[n][3]);
      }
    };
    constexpr int kOwnKeys = kKeyTiles * kKeys;
    float p[kHeadTiles][kOwnKeys], rescale = 0.0f;
    const auto soften_tile = [&](int tile) {
      constexpr float kScale = 0.04419417382415922f;  // 512^-0.5
      const float old_top = top[tile];
      float (&own)[kOwnKeys] = p[tile];
#pragma unroll
      for (int i = 0; i < kOwnKeys; ++i) own[i] = 0.0f;
#pragma unroll
      for (int keys = 0; keys < kKeyTiles; ++keys) {
        float* const sums = own + keys * kKeys;
#pragma unroll
        for (int part = 0; part < kWarps; ++part) {
          const float* of = scores(tile + keys)[part][head];
          const float2 two = *reinterpret_cast<const float2*>(of + place_of(0));
          sums[0] += two.x, sums[1] += two.y;
          sums[2] += of[place_of(2)];
        }
      }
#pragma unroll
      for (int i = 0; i < kOwnKeys; ++i) {
        own[i] = (used >> i & 1u) != 0u ? own[i] * kScale : -INFINITY;
        top[tile] = fmaxf(own[i], top[tile]);
      }
#pragma unroll
      for (int mask = 1; mask < 16; mask *= 2) {
        top[tile] = fmaxf(__shfl_xor_sync(plat::kAllLanes, top[tile], mask), top[tile]);
      }
      // Nothing but pads so far: every probability is 0, and no infinity is taken from another.
      const float base = top[tile] == -INFINITY ? 0.0f : top[tile];
#pragma unroll
      for (int i = 0; i < kOwnKeys; ++i) own[i] = quick_exp(own[i] - base);
      const auto keep = [&](int i, float other) {
        const std::uint32_t pair = sm90::to_bf16_pair(own[i], other);
        own[i] = sm90::low_bf16(pair);
        return pair;
      };
#pragma unroll
      for (int keys = 0; keys < kKeyTiles; ++keys) {
        const int i = keys * kKeys;
        std::uint16_t* const prob = shared.prob[tile + keys] + head * kScorePitch;
        const std::uint32_t pair = keep(i, own[i + 1]);
        own[i + 1] = sm90::high_bf16(pair);
        *reinterpret_cast<std::uint32_t*>(prob + place_of(0)) = pair;
        const std::uint32_t last = keep(i + 2, 0.0f);
        if (first_of_thread < 8) prob[place_of(2)] = static_cast<std::uint16_t>(last);
      }
      if constexpr (!kOnce) {
        rescale = quick_exp(old_top - base);
        if (first_of_thread == 0) shared.rescale[head] = rescale;
      }
    };
    const auto add_values = [&](int tile) {
      std::uint32_t a[kValueSteps][4];
#pragma unroll
      for (int step = 0; step < kValueSteps; ++step) {
        sm90::load_matrices(a[step], shared.prob[tile] + lane_idx % 16 * kScorePitch + step * 16 +
                                         lane_idx / 16 * 8);
      }
      std::uint32_t half_a[2];
      sm90::load_matrices(half_a,
                          shared.prob[tile] + lane_idx % 16 * kScorePitch + kValueSteps * 16);
#pragma unroll
      for (int step = 0; step < kValueSteps; ++step) {
#pragma unroll
        for (int n = 0; n < 8; ++n) sm90::mma_bf16(sum[n], a[step], value[step][n]);
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) sm90::mma_bf16_half(sum[n], half_a, half_value[n]);
    };
    const auto add_weights = [&](int tile) {
      float added = p[tile][0];
#pragma unroll
      for (int i = 1; i < kOwnKeys; ++i) added += p[tile][i];
#pragma unroll
      for (int mask = 1; mask < 16; mask *= 2) {
        added += __shfl_xor_sync(plat::kAllLanes, added, mask);
      }
      weight[tile] = plat::fma(weight[tile], rescale, added);
    };

    score_tile(0);
    if constexpr (kKeyTiles > 1) {
      load_keys();
      score_tile(1);
    } else if constexpr (kOnce) {
      load_half_values();
    }
    plat::block_sync();

    // All warps have the keys in registers.
    if constexpr (kHeadTiles > 1) score_tile(1);
    soften_tile(0);
    plat::block_sync();

    if constexpr (!kOnce) {
      load_values();
      load_half_values();
      if (first != first_key) {
        const float low = shared.rescale[g], high = shared.rescale[g + 8];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          sum[n][0] *= low, sum[n][1] *= low;
          sum[n][2] *= high, sum[n][3] *= high;
        }
      }
    }
    if constexpr (kHeadTiles > 1) soften_tile(1);
    find_owners(0);
    add_values(0);
    if constexpr (kKeyTiles > 1) {
      load_values();
      load_half_values();
      add_values(1);
    }
    add_weights(0);
    if constexpr (kHeadTiles > 1) {
      send_parts(0);
      plat::block_sync();
#pragma unroll
      for (auto& of : sum) {
#pragma unroll
        for (float& v : of) v = 0.0f;
      }
      find_owners(1);
      add_values(1);
      add_weights(1);
    }
    if constexpr (kOnce) break;
    plat::block_sync();  // the tile's memory is free
  }
  if (kHops && first_key >= end_key) {
    find_owners(0);
    if constexpr (kHeadTiles > 1) {
      send_parts(0);
      find_owners(1);
    }
  }
  stamps.mark(StampStage::compute);

  send_parts(kHeadTiles - 1);

  finish_heads<M, kHops>(shared, params, hop, stamps, row_idx, first_head, block_idx, num_blocks,
                         heads_per_block);
  stamps.mark(StampStage::store);
  if (kHops && end != HopEnd::none) report_end(hop, end);
  if constexpr (!kHops) {
    if (gate_end != GateEnd::open) report_gate(gate_of_warp(), gate_end);
    open_gate(params.done);
  }
}

}  // namespace

cudaError_t launch_sparse_attention(const AttentionParams& params, bool programmatic,
                                    cudaStream_t stream) {
  if (params.num_rows < 1 || params.num_rows > kMaxFusedRows) return cudaErrorInvalidValue;
  if (params.num_heads < kHeads || params.num_heads % kHeads != 0) return cudaErrorInvalidValue;
  if (params.num_window < 0 || params.num_extra < 0) return cudaErrorInvalidValue;
  // Few rows by clusters of 32 heads, where so many clusters have room with a block a
  // multiprocessor: the keys are there once, and what comes before and after has room beside.
  constexpr int kMostAtOnce = 7;
  const int num_keys = params.num_window + params.num_extra;
  const bool pairs_tiles = params.model == FusedModel::v41 && params.num_rows <= kHopRows &&
                           params.num_heads % (2 * kHeads) == 0 &&
                           params.num_rows * (params.num_heads / (2 * kHeads)) <= kMostAtOnce &&
                           (params.blocks_per_row == 0 || params.blocks_per_row == kHeads) &&
                           keys_per_block(num_keys, kHeads) <= kTile;
  const int blocks = pairs_tiles ? kHeads : attention_blocks_per_row(params);
  if (blocks < 2 || blocks > kHeads || kHeads % blocks != 0) return cudaErrorInvalidValue;
  return with_model(params.model, [&]<class M>() {
    const auto launch =
        [&]<bool kHops, bool kOnce, int kHeadTiles = 1, bool kTagged = false, int kKeyTiles = 1>() {
          return launch_kernel(
              sparse_attention_bf16_sm90<M, kHops, kOnce, kHeadTiles, kTagged, kKeyTiles>,
              dim3(blocks, params.num_rows, params.num_heads / (kHeadTiles * kHeads)), kThreads,
              sizeof(Shared<kHeadTiles, kKeyTiles>), blocks, programmatic, stream, params);
        };
    // A plain layer's have one tile of few rows, and two up to sixteen rows.
    const bool once = keys_per_block(num_keys, blocks) <= kTile;
    if (params.num_rows > kHopRows) {
      if (once) return launch.template operator()<false, true>();
      // V4.1's where no multiprocessor has two blocks: measured.
      constexpr int kMostAtOnce = 132;
      const bool twice =
          keys_per_block(num_keys, blocks) <= 2 * kTile && !attention_waits_for_keys(params) &&
          (M::kNormsHeads || blocks * params.num_rows * (params.num_heads / kHeads) <= kMostAtOnce);
      return twice ? launch.template operator()<false, true, 1, false, 2>()
                   : launch_attention_wide(params, blocks, programmatic, stream);
    }
    const bool by_tags = params.tagged && once && params.num_extra == kIndexTopk;
    if constexpr (!M::kNormsHeads) {
      if (pairs_tiles) {
        return by_tags ? launch.template operator()<true, true, 2, true>()
                       : launch.template operator()<true, true, 2>();
      }
    }
    if (by_tags) return launch.template operator()<true, true, 1, true>();
    return once ? launch.template operator()<true, true>()
                : launch.template operator()<true, false>();
  });
}

}  // namespace lowlat::nvidia::fused

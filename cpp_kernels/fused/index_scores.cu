// index_scores_sm90: scores of stored index keys for the rows of each request.
//
// Math         score[t,n] = Σ_h w[t,h] · max(0, iq[t,h]·ik[n]) of the entries that row t sees, or
//              of those in its candidate blocks; w = bf( x·weights_projᵀ ) · (128·32)^-0.5, V4:
//              unrounded, times the scale of the query; beside them the largest of every eight
// Shapes       V4.1: iq [T,32·128] bf16 values of four bits · ik e2m1 under four powers of two, 68
//              bytes an entry. V4: iq [T,64·128] f16 values of e4m3 codes, whose scale is in w · ik
//              e4m3 under one fp32 scale, 132 bytes. scores fp32 [T,pitch]; past a row's last entry
//              they mean nothing
// Rounding     keys and queries are exact in bf16 (f16); sums fp32
// Bytes        68 (132) an entry and request; 128K entries: 8.9 MB
// Floor        1.9 us at 4.65 TB/s for them, 5 us of products for six rows
// Launch       264 blocks of 256 threads (of up to eight rows two a row fewer, which leave their
//              places to the selection, of more than 24 half where that is enough) share the
//              requests (rows, with candidate blocks), and each request's rows where it has few
//              keys; four warps take 64 keys, expand them once and keep them in registers for all
//              their rows. The first keys are read before the queries are there
// Ordering     gates (exchange_gate.cuh) or kernels' ends; keys that the step writes are read after
//              keys_done
// Determinism  an entry's score depends on its row and key; bitwise run to run and rank to rank
// Meaning      reference/index.cpp. Bound: 1e-5 of Σ_h |w·match|
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/exchange_gate.cuh"
#include "fused/exchange_hop.cuh"
#include "fused/front_launch.cuh"
#include "fused/front_weights.cuh"
#include "fused/index.hpp"
#include "fused/index_place.cuh"
#include "platform/nvidia_sm90_fp8.cuh"
#include "platform/nvidia_sm90_products.cuh"
#include "stages/kv.hpp"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kGroupWarps = 4;
// Groups of warps of a block, with a tile each.
template <class Keys>
constexpr int kGroups = Keys::kThreads / plat::kWarpLanes / kGroupWarps;
constexpr int kTileKeys = 64, kOctets = kTileKeys / kIndexBlock;
constexpr int kWarpOctets = kOctets / kGroupWarps;
constexpr int kHeadsTogether = 32, kSteps = 8;
static_assert(kWarpOctets == 2);

// Which entries a unit (a request, or a row with its candidate blocks) scores.
struct Unit {
  const std::int32_t* page_row;  // of the request's page table
  const std::int32_t* blocks;    // of the row, or NULL
  int count;                     // entries
  int first_new;                 // entries from here on are written by this step
};

// Where the key of a lane lies: of an octet of the candidates, number lane / 4.
struct KeyPlace {
  const std::uint8_t* page;
  int row;
};
LOWLAT_DEVICE KeyPlace find_key(const IndexParams& params, const Unit& unit, int number,
                                int lane_idx) {
  const int known = min(number, (unit.count - 1) / kIndexBlock);
  const int octet = unit.blocks != nullptr ? __ldcg(unit.blocks + known) : known;
  const int entry = octet * kIndexBlock + lane_idx / 4;
  const int shift = 31 - __clz(params.pages.per_page);
  const int page = __ldg(unit.page_row + (entry >> shift));
  const int place = entry & (params.pages.per_page - 1);
  static_assert(stages::kIndexSlotsPerPage == 64);
  const std::int64_t index_page = (static_cast<std::int64_t>(page) << (shift - 6)) + (place >> 6);
  return {params.keys.base + index_page * params.keys.page_bytes,
          place % stages::kIndexSlotsPerPage};
}

// A warp's sixteen keys as rows of products: [step][register].
struct KeyRows {
  std::uint32_t a[kSteps][4];
};

// V4.1: e2m1 codes under a power of two for each 32 channels; a lane has one such group of a key.
struct Fp4Keys {
  // Half a multiprocessor's registers, so that a block may begin beside one of the front.
  static constexpr int kThreads = 256, kBlocks = 2;
  static constexpr int kHeads = kFp4IndexHeads, kRowsTogether = 8;
  static constexpr sm90::Half kHalf = sm90::Half::bf16;
  struct Raw {
    uint4 codes[kWarpOctets];
    std::uint32_t scale[kWarpOctets];
  };
  // octet: the first of the warp's two.
  LOWLAT_DEVICE static void load(Raw& raw, const IndexParams& params, const Unit& unit, int octet,
                                 int lane_idx) {
#pragma unroll
    for (int i = 0; i < kWarpOctets; ++i) {
      const KeyPlace at = find_key(params, unit, octet + i, lane_idx);
      const int group = lane_idx % 4;
      raw.codes[i] = __ldcg(
          reinterpret_cast<const uint4*>(at.page + at.row * stages::kIndexDataBytes + 16 * group));
      raw.scale[i] = __ldcg(at.page + stages::kIndexSlotsPerPage * stages::kIndexDataBytes +
                            at.row * stages::kIndexScaleBytes + group);
    }
  }
  // The eight codes of a word as four pairs of bf16 values: magnitude bits to bits 8 .. 6 and the
  // sign to bit 15 is the value times 2^-126, subnormal code too, and the product is exact.
  LOWLAT_DEVICE static void expand_word(std::uint32_t (&out)[4], std::uint32_t word,
                                        std::uint32_t factor) {
    const std::uint32_t shifted[4][2] = {
        {word << 6, word << 12}, {word << 2, word << 8}, {word >> 2, word << 4}, {word >> 6, word}};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t bits = (shifted[i][0] & 0x01c0'01c0u) | (shifted[i][1] & 0x8000'8000u);
      out[i] = sm90::multiply_bf16_pairs(bits, factor);
    }
  }
  LOWLAT_DEVICE static void expand(KeyRows& out, const Raw& raw) {
#pragma unroll
    for (int half = 0; half < kWarpOctets; ++half) {
      const uint4& codes = raw.codes[half];
      // 2^(byte - 127 + 126 - 8) as bf16: 2^-8 smaller than the scale is, so that the factor is a
      // bf16 number up to scales of 2^9; the head weights make up for it.
      const std::uint32_t one = (min(raw.scale[half], 136u) + 118u) << 7;
      const std::uint32_t factor = one | one << 16;
      const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        std::uint32_t pairs[4];
        expand_word(pairs, words[j], factor);
        out.a[2 * j][half] = pairs[0];
        out.a[2 * j][2 + half] = pairs[1];
        out.a[2 * j + 1][half] = pairs[2];
        out.a[2 * j + 1][2 + half] = pairs[3];
      }
    }
  }
  LOWLAT_DEVICE static float factor(const Raw&, int) { return 1.0f; }
  LOWLAT_DEVICE static float weight(const IndexParams&, float sum, int, int) {
    constexpr float kFactor = 256.0f / 64.0f;  // with (128 * 32)^-0.5
    static_assert(kHeads * kIndexDim == 4096);
    return quick_bf16(sum) * kFactor;
  }
};

// V4: e4m3 codes, exact as f16, under one fp32 scale a key.
template <int kRowsTogether_>
struct Fp8Keys {
  static constexpr int kThreads = 256, kBlocks = 2;
  static constexpr int kHeads = kFp8IndexHeads, kRowsTogether = kRowsTogether_;
  static constexpr sm90::Half kHalf = sm90::Half::f16;
  struct Raw {
    uint4 codes[kWarpOctets][2];
    float scale[kWarpOctets];
  };
  LOWLAT_DEVICE static void load(Raw& raw, const IndexParams& params, const Unit& unit, int octet,
                                 int lane_idx) {
#pragma unroll
    for (int i = 0; i < kWarpOctets; ++i) {
      const KeyPlace at = find_key(params, unit, octet + i, lane_idx);
      const auto* codes = reinterpret_cast<const uint4*>(
          at.page + at.row * stages::kIndexFp8DataBytes + 32 * (lane_idx % 4));
      raw.codes[i][0] = __ldcg(codes);
      raw.codes[i][1] = __ldcg(codes + 1);
      raw.scale[i] = __ldcg(reinterpret_cast<const float*>(
          at.page + stages::kIndexSlotsPerPage * stages::kIndexFp8DataBytes +
          at.row * stages::kIndexScaleBytes));
    }
  }
  LOWLAT_DEVICE static void expand(KeyRows& out, const Raw& raw) {
#pragma unroll
    for (int half = 0; half < kWarpOctets; ++half) {
      const uint4(&codes)[2] = raw.codes[half];
      const std::uint32_t words[kSteps] = {codes[0].x, codes[0].y, codes[0].z, codes[0].w,
                                           codes[1].x, codes[1].y, codes[1].z, codes[1].w};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        std::uint32_t pair[2];
        sm90::e4m3_to_f16(pair, words[step]);
        out.a[step][half] = pair[0];
        out.a[step][2 + half] = pair[1];
      }
    }
  }
  LOWLAT_DEVICE static float factor(const Raw& raw, int half) {
    return half != 0 ? raw.scale[1] : raw.scale[0];
  }
  LOWLAT_DEVICE static float weight(const IndexParams& params, float sum, int row, int head) {
    constexpr float kRoot = 0.011048543456039806f;  // (128 * 64)^-0.5
    static_assert(kHeads * kIndexDim == 8192);
    return sum * kRoot * __ldcg(params.query_scale + row * kHeads + head);
  }
};

template <class Keys>
struct ScoreShared {
  alignas(128) unsigned char query[Keys::kRowsTogether][2 * Keys::kHeads * kIndexDim];
  float weight[Keys::kRowsTogether][Keys::kHeads];
};

// Scores of the warp's keys for one row; lanes with an even t get that of key g, the others that of
// key g + 8. weights: of the row, from the lane's first head on. A group of warps calls.
template <class Keys>
LOWLAT_DEVICE float score_of(const KeyRows& keys, sm90::Columns query, const float* weights,
                             int lane_idx) {
  float score[2] = {};
#pragma unroll 1
  for (int heads = 0; heads < Keys::kHeads; heads += kHeadsTogether) {
    float sum[16];
    const sm90::Columns columns = query + heads / 8 * kIndexAlongHeads;
    sm90::rows_fence();
    sm90::multiply_rows<Keys::kHalf, false>(sum, keys.a[0], columns);
#pragma unroll
    for (int step = 1; step < kSteps; ++step) {
      sm90::multiply_rows<Keys::kHalf, true>(sum, keys.a[step], columns + 256u * step);
    }
    sm90::rows_commit();
    sm90::rows_wait();
#pragma unroll
    for (int n = 0; n < kHeadsTogether / 8; ++n) {
      const float2 w = *reinterpret_cast<const float2*>(weights + heads + 8 * n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& to = score[half];
        to = plat::fma(w.x, plat::max(sum[4 * n + 2 * half], 0.0f), to);
        to = plat::fma(w.y, plat::max(sum[4 * n + 2 * half + 1], 0.0f), to);
      }
    }
  }
  // Four lanes have parts of two keys' scores; each keeps one key.
  const bool odd = (lane_idx & 1) != 0;
  const float pair =
      (odd ? score[1] : score[0]) + plat::warp_shuffle_xor(odd ? score[0] : score[1], 1);
  return pair + plat::warp_shuffle_xor(pair, 2);
}

// Into how many parts the rows of a request are split: what costs least, as keys are expanded for
// each part again; of equals the fewest. Costs are in rows; expanding, for so many rows together,
// takes about one. Whole warps call, and a lane looks at one way.
template <class Keys>
LOWLAT_DEVICE int row_parts(int tokens, int num_tiles, int num_blocks, int lane_idx) {
  const int parts = lane_idx + 1;
  unsigned own = ~0u;
  if (parts <= tokens && parts <= num_blocks) {
    const int groups = num_blocks / parts * kGroups<Keys>;
    const int rows = (tokens + parts - 1) / parts;
    const int expands = (rows + Keys::kRowsTogether - 1) / Keys::kRowsTogether;
    const int cost = (num_tiles + groups - 1) / groups * (rows + expands);
    own = static_cast<unsigned>(cost) << 8 | static_cast<unsigned>(parts);
  }
  return static_cast<int>(__reduce_min_sync(plat::kAllLanes, own) & 0xffu);
}

template <class Keys>
__global__ void __launch_bounds__(Keys::kThreads, Keys::kBlocks)
    index_scores_sm90(const __grid_constant__ IndexParams params) {
  constexpr int kHeads = Keys::kHeads, kThreads = Keys::kThreads;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<ScoreShared<Keys>*>(memory);
  sm90::launch_dependents();
  Stamps stamps(stamp_sink(params.hop),
                params.hop.id + static_cast<std::uint32_t>(HopKernel::scores));
  const int thread_idx = plat::thread_idx();
  const int warp_idx = thread_idx / plat::kWarpLanes, lane_idx = thread_idx % plat::kWarpLanes;
  const bool by_row = params.blocks != nullptr;
  const int tokens = by_row ? 1 : params.rows.tokens;
  const int num_units = params.rows.num_rows / tokens;
  // Of few rows two blocks a row leave their places to the selection, which begins meanwhile.
  const int num_rows = params.rows.num_rows;
  const int idle = num_rows <= kHopRows ? 2 * num_rows : 0;
  const int per_unit = (static_cast<int>(gridDim.x) - idle) / num_units;
  const int unit_idx = static_cast<int>(blockIdx.x) / per_unit;
  const int block_of_unit = static_cast<int>(blockIdx.x) % per_unit;
  if (unit_idx >= num_units) {  // what is left over when the blocks do not divide
    open_gate(params.scores_done);
    return;
  }
  const int first_row = unit_idx * tokens, request = first_row / params.rows.tokens;
  Unit unit;
  unit.page_row =
      params.pages.page_table + static_cast<std::int64_t>(request) * params.pages.stride;
  unit.blocks =
      by_row ? params.blocks + static_cast<std::int64_t>(first_row) * kIndexMaxBlocks : nullptr;
  unit.count = 0;
  for (int i = lane_idx; i < tokens; i += plat::kWarpLanes) {
    unit.count = max(unit.count, index_count(params.rows, params.ratio, first_row + i));
  }
  unit.count = __reduce_max_sync(plat::kAllLanes, unit.count);
  unit.count = min(unit.count, params.max_entries);
  if (by_row) unit.count = index_candidates(unit.count);
  unit.first_new = params.new_keys
                       ? __ldg(params.rows.positions + request * params.rows.tokens) / params.ratio
                       : unit.count;
  const int num_tiles = (unit.count + kTileKeys - 1) / kTileKeys;
  // So do half of the blocks of many rows, if the others take all of a unit's keys at once: all
  // would take all registers of every multiprocessor, and the last wait for other kernels' blocks.
  const int half = per_unit / 2;
  const int used = num_rows > 24 && num_tiles <= half * kGroups<Keys> ? half : per_unit;
  const int num_parts = row_parts<Keys>(tokens, num_tiles, used, lane_idx);
  const int per_part = used / num_parts;
  const int part = block_of_unit % num_parts, block_of_part = block_of_unit / num_parts;
  const int rows_of_part = (tokens + num_parts - 1) / num_parts;
  const int begin_row = min(part * rows_of_part, tokens);
  const int end_row = min(begin_row + rows_of_part, tokens);
  const int first_of_block = block_of_part * kGroups<Keys>;
  // Blocks without work, which are a unit's last, leave their place to the kernels that are next.
  // Whoever waits for the scores waits for all that they wait for: the first block always does.
  if (blockIdx.x != 0 &&
      (first_of_block >= num_tiles || begin_row >= end_row || block_of_part >= per_part)) {
    open_gate(params.scores_done);
    return;
  }
  const int first_tile = first_of_block + warp_idx / kGroupWarps;
  const int tile_step = kGroups<Keys> * per_part;
  const int own_octet = warp_idx % kGroupWarps * kWarpOctets;

  // Who scores the step's own keys waits for them.
  bool has_new = params.new_keys && blockIdx.x == 0;
  const int first_new_tile = params.new_keys ? unit.first_new / kTileKeys : num_tiles;
  for (int tile = first_new_tile; tile < num_tiles; ++tile) {
    has_new = has_new || tile / kGroups<Keys> % per_part == block_of_part;
  }
  const bool loads = first_tile < num_tiles;
  const bool loads_late = loads && has_new && (first_tile + 1) * kTileKeys > unit.first_new;
  typename Keys::Raw raw;
  KeyRows keys;
  float factor = 1.0f;
  // The first keys are expanded before the queries are there. Keys that come late are asked for a
  // second time, by the same code, and expanded further below: what few blocks run comes from
  // memory, a line after the other.
#pragma unroll 1
  for (int turn = 0; turn < (loads_late ? 2 : 1); ++turn) {
    if (loads) Keys::load(raw, params, unit, first_tile * kOctets + own_octet, lane_idx);
    if (turn == 0) {
      stamps.mark(StampStage::ask);
      poll_gates(params.query_done, params.heads_done, has_new ? params.keys_done : Gate{});
    }
    if (loads && !loads_late) {
      Keys::expand(keys, raw);
      factor = Keys::factor(raw, lane_idx % 2);
    }
    if (turn == 0) {
      plat::block_sync();
      stamps.mark(StampStage::wait);
    }
  }
  stamps.mark(StampStage::read);
  for (int base = begin_row; base < end_row; base += Keys::kRowsTogether) {
    const int num = min(end_row - base, Keys::kRowsTogether);
    constexpr int kPieces = kHeads * kIndexDim / 8;
    const auto* query = reinterpret_cast<const uint4*>(params.query) +
                        static_cast<std::int64_t>(first_row + base) * kPieces;
    for (int i = thread_idx; i < num * kPieces; i += kThreads) {
      copy_16(&shared.query[0][16 * i], query + i);
    }
    for (int i = thread_idx; i < num * kHeads; i += kThreads) {
      const float* sums =
          params.head_sums +
          static_cast<std::int64_t>(first_row + base + i / kHeads) * params.head_stride +
          i % kHeads;
      const float other =
          __ldcg(sums + static_cast<std::int64_t>(params.rows.num_rows) * params.head_stride);
      shared.weight[i / kHeads][i % kHeads] =
          Keys::weight(params, __ldcg(sums) + other, first_row + base + i / kHeads, i % kHeads);
    }
    wait_for_copies();
    sm90::fence_async_shared();
    plat::block_sync();
#pragma unroll 1
    for (int tile = first_tile; tile < num_tiles; tile += tile_step) {
      if (base != begin_row || tile != first_tile || loads_late) {
        if (base != begin_row && tile == first_tile) {
          Keys::load(raw, params, unit, tile * kOctets + own_octet, lane_idx);
        }
        Keys::expand(keys, raw);
        factor = Keys::factor(raw, lane_idx % 2);
      }
      if (tile + tile_step < num_tiles) {
        Keys::load(raw, params, unit, (tile + tile_step) * kOctets + own_octet, lane_idx);
      }
      const int octet = tile * kOctets + own_octet + lane_idx % 2;
      const std::int64_t first = first_row + base;
      float* out = params.scores + first * params.pitch + octet * kIndexBlock + lane_idx / 4;
      float* out_block = params.block_scores;
      if (out_block != nullptr) out_block += first * (params.pitch / kIndexBlock) + octet;
      sm90::Columns query = sm90::columns_at(shared.query, kIndexAlongHeads);
      const float* weights = shared.weight[0] + lane_idx % 4 * 2;
#pragma unroll 1
      for (int i = 0; i < num; ++i) {
        const float score = score_of<Keys>(keys, query, weights, lane_idx) * factor;
        if ((lane_idx & 2) == 0) *out = score;
        out += params.pitch;
        query = query + sizeof shared.query[0];
        weights += kHeads;
        if (out_block == nullptr) continue;
        float most = score;
#pragma unroll
        for (int mask = 4; mask < plat::kWarpLanes; mask *= 2) {
          most = plat::max(plat::warp_shuffle_xor(most, mask), most);
        }
        if (lane_idx < 2) *out_block = most;
        out_block += params.pitch / kIndexBlock;
      }
    }
    plat::block_sync();  // the queries' memory is free
  }
  stamps.mark(StampStage::store);
  open_gate(params.scores_done);
}

}  // namespace

cudaError_t launch_index_scores(const IndexParams& params, bool programmatic, cudaStream_t stream) {
  const StepRows& rows = params.rows;
  if (rows.num_rows < 1 || rows.num_rows > kMaxFusedRows) return cudaErrorInvalidValue;
  if (rows.tokens < 1 || rows.num_rows % rows.tokens != 0) return cudaErrorInvalidValue;
  if (params.max_entries < 0 || params.max_entries > kIndexMaxEntries || params.pitch % 64 != 0) {
    return cudaErrorInvalidValue;
  }
  if (params.pages.per_page < 64 || (params.pages.per_page & (params.pages.per_page - 1)) != 0)
    return cudaErrorInvalidValue;
  const auto launch = [&]<class Keys>() {
    return launch_kernel(index_scores_sm90<Keys>, dim3(kIndexScoreBlocks), Keys::kThreads,
                         sizeof(ScoreShared<Keys>), 1, programmatic, stream, params);
  };
  if (params.format == IndexFormat::fp4) return launch.template operator()<Fp4Keys>();
  if (params.blocks != nullptr || params.block_scores != nullptr) return cudaErrorInvalidValue;
  // Of many rows all of a request's; else less memory, beside other kernels' blocks.
  return rows.num_rows > 24 ? launch.template operator()<Fp8Keys<6>>()
                            : launch.template operator()<Fp8Keys<4>>();
}

}  // namespace lowlat::nvidia::fused

// draft_proposals_bf16_sm90: the five proposals of a draft, each fed by the one before it.
//
// Math         prev = anchor; for s = 0 .. 4:
//                bias[v] = bf( w1[prev] · w2[v] )       fp32 sums by the tensor cores
//                z[v] = base[s][v] + bias[v]            fp32
//                prev = token[s] = argmax z                            temperature 0
//                                = argmax z / max(T, 1e-5) + g[v]      else
//              over the ids of all ranks, ties to the lowest id, a NaN before every number
//              g[v]: stages/philox.hpp of (v / 4, request, s, offset), as SGLang's sampler
// Shapes       w1 [V,256] bf16 · w2 [V/R,256] bf16 · base [B,5,V/R] fp32 · tokens [B,5] int64
//              logits [B,5,V] fp32, optional · 1 ≤ B ≤ 8 · R = 1, 2 or 4 ranks
// Rounding     where bf( ) stands, nearest-even; z and its quotient to fp32, once each
// Bytes        w2 once: V/R · 512 (V = 129280: 33.1 MB at R = 2, 16.5 MB at R = 4), B · 20 · V/R of
//              base; w1 5 rows a request
// Floor        the bytes at 4.65 TB/s (7.4 us at R = 2, B = 1), and five hops of 1.3 us each
// Launch       up to 128 blocks of 512 threads, all resident: ranks and blocks wait for each other.
//              Warp w of a block holds tile w of its ids (16 ids) in registers and tile 16 + w in
//              shared memory, for all steps; more tiles (R = 1, or small grids) are read again from
//              the second-level cache. Weights are on their way before the predecessor has ended.
// Ordering     box[e & 1][p][copy][block][pair]  packets of exchange e = step_epoch +
//                       exchange_index + s from that block of rank p, in the reader's memory: {best
//                       score of request 2 pair, of 2 pair + 1, their ids in the block, tag}.
//                       Written by that block (one access), read by every block of the owner: each
//                       by the copy of its number, because a line that all ask for is a queue.
//              edge     a packet with e's tag is e's payload; nothing else is published by it.
//              reuse    box[e & 1] is written again at e + 2 by a block that has all packets of
//                       e + 1; a block sends e + 1 after its last read of e. Between launches:
//                       fused/exchange.cuh, because the stream's order holds there.
//              tags     low 32 bits of the epoch with bit 0 set, which the parity of the box says
//                       already: never 0, so zeroed memory is no packet, whatever the epoch.
//              logits   stores to all ranks' arrays; then each block: barrier, fence.system, packet
//                       of the sixth exchange to the block of its number on every rank, which
//                       waits for it and fences: a launch ends after all that it was sent.
//              late     every wait has the budget of the port and ends when the abort word is up;
//                       the first thread of the rank reports. The block sends nothing more then;
//                       its tokens from there on are 0 and its logits NaN.
// Determinism  a bias has one order of summation on all ranks of a launch; tokens are equal on all,
//              because all see the same packets and the rule is a total order. Bitwise run to run.
// Meaning      reference/draft.cpp; stages/draft.hpp. Bound: docs/numerics.md, markov_draft
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/draft.hpp"
#include "fused/draft_key.cuh"
#include "fused/exchange.cuh"
#include "fused/front_launch.cuh"
#include "fused/front_weights.cuh"
#include "fused/stream.cuh"
#include "platform/nvidia_sm90.cuh"
#include "stages/draft.hpp"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / plat::kWarpLanes;
constexpr int kTileIds = 16;               // ids of one tensor-core product
constexpr int kPieces = kMarkovRank / 32;  // of 16 bytes, that a lane has of a row
constexpr int kPollers = kMaxDraftBlocks;  // threads that ask for the packets of one rank
constexpr int kPollGroups = kThreads / kPollers;
constexpr int kMostTilesOfBlock = 0x10000 / kTileIds;  // a packet has 16 bits for an id
// From where a block has its best to the first poll, see docs/bench/draft-hopper.md.
constexpr int kCyclesToPacket = 850;
static_assert(kWarps == 8 && kPollGroups == 2, "see the lanes that join what the warps heard");

// kTiles: consecutive tiles that a warp keeps on chip, 2 or 4.
template <int kTiles>
struct Shared {
  static constexpr int kIds = kTiles * kTileIds;
  static constexpr int kInRegisters = kTiles == 4 ? 3 : kTiles;
  static constexpr int kInShared = kTiles - kInRegisters;
  // 4 mod 32 words: lanes that store sums, or score ids of several requests, are in different
  // banks, and rows stay aligned to 16 bytes.
  static constexpr int kPitch = kIds + 4;

  // Of a warp, in the order in which its lanes read: operands of the first products, of the second.
  uint4 tiles[kWarps][kInShared > 0 ? 2 * kPieces : 1][plat::kWarpLanes];
  float noise[kWarps][kMaxDraftBatch][kDraftSteps][kPitch];
  float base[kWarps][kMaxDraftBatch][kPitch];   // of the step
  float sums[kWarps][kMaxDraftBatch][kPitch];   // products, then z
  std::uint64_t best[kWarps][kMaxDraftBatch];   // of the warp's ids
  std::uint64_t heard[kWarps][kMaxDraftBatch];  // of the packets that the warp asked for
  float temperature[kMaxDraftBatch];
  std::uint32_t touched[kWarps][plat::kWarpLanes];  // nobody reads it
  std::uint32_t stopped;                            // a wait ended without its packet
};

// Sixteen bytes of weights that are read once a launch.
LOWLAT_DEVICE uint4 load_weights(const uint4* src) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(__cvta_generic_to_global(src)));
  return v;
}
LOWLAT_DEVICE void prefetch_row(const std::uint16_t* w1, std::uint32_t id, int line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(
      __cvta_generic_to_global(w1 + std::uint64_t{id} * kMarkovRank + 64 * line)));
}
// As copy_16, of one word, and through the first-level cache, where its line stays.
LOWLAT_DEVICE void copy_word(void* dst_shared, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(sm90::shared_address(dst_shared)),
               "l"(__cvta_generic_to_global(src))
               : "memory");
}

// The noise of ids 4 quad .. + 3: one Philox call.
LOWLAT_DEVICE float4 noise_of(std::uint64_t key, std::uint32_t quad, int request, int step,
                              std::uint32_t offset) {
  const stages::PhiloxWords words = stages::philox4x32_10(
      {quad, static_cast<std::uint32_t>(request), static_cast<std::uint32_t>(step), offset},
      static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32));
  const auto noise = [&](int i) { return stages::gumbel(stages::noise_uniform(words.word[i])); };
  return make_float4(noise(0), noise(1), noise(2), noise(3));
}

LOWLAT_DEVICE int first_tile_of(int block, int num_tiles) {
  return static_cast<int>(static_cast<std::uint32_t>(block) * num_tiles / gridDim.x);
}

// A lane's pieces of rows g and g + 8 of a tile, as the operands of two products.
struct Operands {
  uint4 first, second;
  LOWLAT_DEVICE Operands(uint4 low, uint4 high)
      : first(make_uint4(low.x, high.x, low.y, high.y)),
        second(make_uint4(low.z, high.z, low.w, high.w)) {}
};
// sums += their products with the lane's piece of w1's row, see sm90::mma_bf16. The order along K
// is the same for all: a lane's 16 bytes are two products' worth of its own elements.
LOWLAT_DEVICE void add_products(float (&sums)[4], uint4 first, uint4 second, uint4 row) {
  const std::uint32_t a0[4] = {first.x, first.y, first.z, first.w}, b0[2] = {row.x, row.y};
  const std::uint32_t a1[4] = {second.x, second.y, second.z, second.w}, b1[2] = {row.z, row.w};
  sm90::mma_bf16(sums, a0, b0);
  sm90::mma_bf16(sums, a1, b1);
}

// The order in which pieces are multiplied: the first half touches every line of a row, so that the
// second finds its own near.
LOWLAT_DEVICE constexpr int piece_of(int half, int i) { return 2 * i + half; }

// As report_fault, out of the way of the code that runs each time.
__device__ __noinline__ void report_late(const ExchangePort& port, stages::StageId stage, int peer,
                                         std::uint64_t epoch, bool aborted) {
  report_fault(port, port.kernel, stage, peer, epoch, aborted);
}

// kMore: a block has more tiles than stay on chip.
template <int kRanks, int kTiles, bool kMore, bool kStamped>
__global__ void __launch_bounds__(kThreads, 1)
    draft_proposals_bf16_sm90(const __grid_constant__ DraftProposalsParams params) {
  using Memory = Shared<kTiles>;
  constexpr int kInRegisters = Memory::kInRegisters, kIds = Memory::kIds;
  extern __shared__ __align__(128) unsigned char memory[];
  Memory& shared = *reinterpret_cast<Memory*>(memory);
  const int warp = plat::thread_idx() / plat::kWarpLanes;
  const int lane = plat::thread_idx() % plat::kWarpLanes;
  const int g = lane / 4, t = lane % 4;  // of the products: row of a tile, and request; columns
  const int num_tiles = (params.vocab_shard + kTileIds - 1) / kTileIds;
  const int first_tile = first_tile_of(static_cast<int>(blockIdx.x), num_tiles);
  const int end_tile = first_tile_of(static_cast<int>(blockIdx.x) + 1, num_tiles);
  const int warp_tile = first_tile + warp * kTiles;
  const std::uint32_t first_id = static_cast<std::uint32_t>(params.port.tp_rank) *
                                 static_cast<std::uint32_t>(params.vocab_shard);
  const std::uint32_t vocab = static_cast<std::uint32_t>(kRanks * params.vocab_shard);
  const int batch = params.batch_size, num_pairs = (batch + 1) / 2;
  const auto stamp = [&](int step, int i) {
    if constexpr (kStamped) {
      if (plat::thread_idx() == 0) {
        params.stamps[(blockIdx.x * (kDraftSteps + 1) + step + 1) * kDraftStamps + i] =
            plat::clock_ns();
      }
    }
  };
  // A lane's pieces of row g (and g + 8: half 1) of a tile are at [4 * piece]. Ids past the shard's
  // end are read as its last one, and never chosen.
  const auto row_of = [&](int tile, int half) {
    const int id = min(tile * kTileIds + g + 8 * half, params.vocab_shard - 1);
    return reinterpret_cast<const uint4*>(params.w2 + std::int64_t{id} * kMarkovRank) + t;
  };

  stamp(-1, 0);
  // Half of the weights, or so, are on their way while the rest of this is done.
  if constexpr (Memory::kInShared > 0) {
#pragma unroll
    for (int i = 0; i < 2 * kPieces; ++i) {
      copy_16(&shared.tiles[warp][i][lane],
              row_of(warp_tile + kInRegisters, i / kPieces) + 4 * (i % kPieces));
    }
  }
  uint4 held[kInRegisters][2 * kPieces];
  const auto load_slots = [&](int begin, int end) {
#pragma unroll
    for (int slot = begin; slot < end; ++slot) {
#pragma unroll
      for (int i = 0; i < 2 * kPieces; ++i) {
        held[slot][i] = load_weights(row_of(warp_tile + slot, i / kPieces) + 4 * (i % kPieces));
      }
    }
  };
  // The others follow once the noise is made: a thread that asks for more than may be on its way
  // waits, and could not make it meanwhile.
  load_slots(0, 1);
  if (plat::thread_idx() == 0) shared.stopped = 0;
  if (plat::thread_idx() < kWarps * kMaxDraftBatch) {
    shared.heard[plat::thread_idx() / kMaxDraftBatch][plat::thread_idx() % kMaxDraftBatch] = 0;
  }
  sm90::wait_for_predecessors();

  const std::uint32_t offset =
      params.noise_offset == nullptr
          ? 0u
          : static_cast<std::uint32_t>(__ldcg(reinterpret_cast<long long*>(params.noise_offset)));
  const std::uint64_t epoch = exchange_epoch(params.port, params.exchange_index);
  // Of request g: every warp follows all requests.
  std::int64_t previous = -1;
  if (g < batch) {
    previous = __ldcg(reinterpret_cast<const long long*>(params.anchors + g * params.anchor_pitch));
    // Near by the time the weights are here.
    if (warp == 0 && static_cast<std::uint64_t>(previous) < vocab) {
      prefetch_row(params.w1, static_cast<std::uint32_t>(previous), t);
    }
  }
  if (plat::thread_idx() < kMaxDraftBatch) {
    shared.temperature[plat::thread_idx()] =
        params.temperatures != nullptr && plat::thread_idx() < batch
            ? __ldcg(params.temperatures + plat::thread_idx())
            : 0.0f;
  }

  // Lanes share what a step needs of the ids of `tile` on, the warp's, and not of the token before
  // it. Four ids a lane, for several requests (or steps) at a time.
  constexpr int kQuads = kIds / 4, kRowsAtOnce = plat::kWarpLanes / kQuads;
  const int quad = lane % kQuads, first_row = lane / kQuads;
  const auto copy_base = [&](int step, int tile) {
    const int id = tile * kTileIds + 4 * quad;
    if (id >= params.vocab_shard) return;
#pragma unroll 1
    for (int request = first_row; request < batch; request += kRowsAtOnce) {
      copy_16(&shared.base[warp][request][4 * quad],
              params.base + (request * kDraftSteps + step) * params.base_pitch + id);
    }
  };
  const auto make_noise = [&](int begin_step, int num_steps, int tile) {
    const std::uint32_t ids = (first_id + static_cast<std::uint32_t>(tile * kTileIds)) / 4 + quad;
#pragma unroll 1
    for (int row = first_row; row < batch * num_steps; row += kRowsAtOnce) {
      const int request = row / num_steps, step = begin_step + row % num_steps;
      if (shared.temperature[request] == 0.0f) continue;
      *reinterpret_cast<float4*>(&shared.noise[warp][request][step][4 * quad]) =
          noise_of(params.noise_key, ids, request, step, offset);
    }
  };
  copy_base(0, warp_tile);
  plat::block_sync();
  stamp(-1, 1);
  if (params.temperatures != nullptr) make_noise(0, kDraftSteps, warp_tile);
  stamp(-1, 2);
  load_slots(1, kInRegisters);

  // The sums of one of the warp's tiles, to where the lanes that score their ids find them.
  const auto hand_over = [&](const float (&sums)[4], int slot) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int request = 2 * t + i % 2;
      if (request < batch) shared.sums[warp][request][slot * kTileIds + g + i / 2 * 8] = sums[i];
    }
  };
  // The best of the warp's ids from `tile` on; `first`: and of none before. Lanes are shared out to
  // the requests.
  const int lanes_of_request = plat::kWarpLanes / (batch == 1   ? 1
                                                   : batch == 2 ? 2
                                                   : batch <= 4 ? 4
                                                                : 8);
  const int scored_request = lane / lanes_of_request, scored_from = lane % lanes_of_request;
  const auto choose = [&](int step, int tile, bool first) {
    wait_for_copies();  // of the base
    plat::warp_sync();
    std::uint64_t best = 0;
    if (scored_request < batch) {
      const float temperature = shared.temperature[scored_request];
      const float tau = stages::clamp_temperature(temperature);
      const float* base = shared.base[warp][scored_request];
      const float* noise = shared.noise[warp][scored_request][step];
      float* sums = shared.sums[warp][scored_request];
      const int first_of_tiles = tile * kTileIds;
      const int num_ids = min(min(end_tile * kTileIds, params.vocab_shard) - first_of_tiles, kIds);
#pragma unroll 2
      for (int i = scored_from; i < num_ids; i += lanes_of_request) {
        const float z = base[i] + round_to_bf16(sums[i]);
        sums[i] = z;
        const float score = temperature == 0.0f ? z : z / tau + noise[i];
        best = better(best, candidate(score_key(score), static_cast<unsigned>(first_of_tiles + i)));
      }
    }
    if (batch == 1) {
      best = best_of_warp(best);
    } else {
#pragma unroll 1
      for (int mask = lanes_of_request / 2; mask > 0; mask /= 2) best = better_of_lanes(best, mask);
    }
    if (scored_from == 0 && scored_request < batch) {
      std::uint64_t& kept = shared.best[warp][scored_request];
      kept = first ? best : better(kept, best);
    }
  };
  // z of the warp's ids from `tile` on, to all ranks that want it.
  const auto store_logits = [&](int step, int tile) {
    if (params.temperatures == nullptr) return;
    const int id = tile * kTileIds + 4 * quad;
    plat::warp_sync();
    if (id >= min(end_tile * kTileIds, params.vocab_shard)) return;
#pragma unroll 1
    for (int request = first_row; request < batch; request += kRowsAtOnce) {
      if (shared.temperature[request] == 0.0f) continue;
      const float4 z = *reinterpret_cast<const float4*>(&shared.sums[warp][request][4 * quad]);
      const std::int64_t at =
          static_cast<std::int64_t>(request * kDraftSteps + step) * vocab + first_id + id;
#pragma unroll
      for (int rank = 0; rank < kRanks; ++rank) {
        if (params.logits[rank] == nullptr) continue;
        *reinterpret_cast<float4*>(params.logits[rank] + at) = z;
      }
    }
  };

  // Where the packets of an even epoch go and come from; of an odd one, `odd` further.
  const std::int64_t odd = kRanks * params.port.box_packets;
  // Each rank begins with another reader, as publish_quad.
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  plat::TaggedWords* const outbox =
      quads_of(params.port, (lane + params.port.tp_rank) % kRanks, 0, params.port.tp_rank,
               lane / kRanks % kDraftCopies * blocks + block, num_pairs) +
      warp;
  // A thread asks for the packets of block `source`: for one pair of some ranks, or for pairs
  // `group` and group + 2 of all ranks, together where registers are left. Bit kRanks * slot +
  // rank.
  constexpr int kPairSlots = kTiles == 2 ? kMaxDraftBatch / 2 / kPollGroups : 1;
  const int group = plat::thread_idx() / kPollers, source = plat::thread_idx() % kPollers;
  const int first_pair = num_pairs > 1 ? group : 0;
  const plat::TaggedWords* const inbox =
      quads_of(params.port, params.port.tp_rank, 0, 0, block % kDraftCopies * blocks + source,
               num_pairs) +
      first_pair;
  std::uint32_t asked = 0;
  for (int i = 0; i < kPairSlots * kRanks; ++i) {
    const int pair = first_pair + i / kRanks * kPollGroups, rank = i % kRanks;
    const bool mine = num_pairs > 1 || rank % kPollGroups == group;
    if (mine && pair < num_pairs && source < blocks) asked |= 1u << i;
  }
  const std::uint32_t source_id =
      static_cast<std::uint32_t>(first_tile_of(source, num_tiles) * kTileIds);

  // Once: operands instead of pieces.
  wait_for_copies();
  if constexpr (Memory::kInShared > 0) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const Operands operands(shared.tiles[warp][i][lane], shared.tiles[warp][kPieces + i][lane]);
      shared.tiles[warp][i][lane] = operands.first;
      shared.tiles[warp][kPieces + i][lane] = operands.second;
    }
  }
#pragma unroll
  for (int slot = 0; slot < kInRegisters; ++slot) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const Operands operands(held[slot][i], held[slot][kPieces + i]);
      held[slot][i] = operands.first;
      held[slot][kPieces + i] = operands.second;
    }
  }

  stamp(-1, 3);

  bool stopped = false;
#pragma unroll 1
  for (int step = 0; step < kDraftSteps; ++step) {
    const std::uint64_t now = epoch + static_cast<std::uint64_t>(step);
    const std::uint32_t tag = static_cast<std::uint32_t>(now) | 1u;
    const std::int64_t parity = (now & 1u) != 0u ? odd : 0;
    {
      // The lane's pieces of w1's row of request g's token, four at a time. One that is no token
      // has a row of NaN: nothing is read past the end, and it shows.
      const std::uint32_t fill = g < batch ? 0x7fff'7fffu : 0u;
      const bool valid = static_cast<std::uint64_t>(previous) < vocab;
      const auto* from =
          reinterpret_cast<const uint4*>(params.w1 + (valid ? previous : 0) * kMarkovRank) + t;
      const auto load_row = [&](uint4(&row)[kPieces / 2], int half) {
#pragma unroll
        for (int i = 0; i < kPieces / 2; ++i) {
          row[i] = valid ? __ldg(from + 4 * piece_of(half, i)) : make_uint4(fill, fill, fill, fill);
        }
      };
      // The registers are few: the last line's pieces follow the first products, but it is asked
      // for with the others.
      if (valid) copy_word(&shared.touched[warp][lane], from + 4 * (kPieces - 1));
      // A chain of sums for each half where a warp has few tiles, so that products overlap.
      constexpr int kChains = kTiles == 2 ? 2 : 1;
      float sums[kTiles][kChains][4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 row[kPieces / 2];
        load_row(row, half);
        if (half == 0) stamp(step, 0);
#pragma unroll
        for (int i = 0; i < kPieces / 2; ++i) {
          const int piece = piece_of(half, i);
#pragma unroll
          for (int slot = 0; slot < kInRegisters; ++slot) {
            add_products(sums[slot][half % kChains], held[slot][piece], held[slot][kPieces + piece],
                         row[i]);
          }
          if constexpr (Memory::kInShared > 0) {
            add_products(sums[kInRegisters][half % kChains], shared.tiles[warp][piece][lane],
                         shared.tiles[warp][kPieces + piece][lane], row[i]);
          }
        }
      }
#pragma unroll
      for (int slot = 0; slot < kTiles; ++slot) {
        if constexpr (kChains == 2) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[slot][0][i] += sums[slot][1][i];
        }
        hand_over(sums[slot][0], slot);
      }
      choose(step, warp_tile, true);
      if constexpr (kMore) {
        store_logits(step, warp_tile);
#pragma unroll 1
        for (int tile = warp_tile + kWarps * kTiles; tile < end_tile; tile += kWarps * kTiles) {
          plat::warp_sync();  // what the tiles before left has been read
          copy_base(step, tile);
          if (params.temperatures != nullptr) make_noise(step, 1, tile);
#pragma unroll 1
          for (int slot = 0; slot < kTiles; ++slot) {
            const uint4* low = row_of(tile + slot, 0);
            const uint4* high = row_of(tile + slot, 1);
            float more[4] = {};
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
              uint4 row[kPieces / 2];
              load_row(row, half);
#pragma unroll
              for (int i = 0; i < kPieces / 2; ++i) {
                const int piece = piece_of(half, i);
                const Operands operands(__ldg(low + 4 * piece), __ldg(high + 4 * piece));
                add_products(more, operands.first, operands.second, row[i]);
              }
            }
            hand_over(more, slot);
          }
          choose(step, tile, false);
          store_logits(step, tile);
        }
      }
    }
    stamp(step, 1);
    plat::block_sync();
    const long long sent_at = clock64();
    stamp(step, 2);

    if (warp < num_pairs && !stopped) {
      const bool two = 2 * warp + 1 < batch;
      const std::uint64_t a = best_of_warp(lane < kWarps ? shared.best[lane][2 * warp] : 0);
      std::uint64_t b = 0;
      if (two) b = best_of_warp(lane < kWarps ? shared.best[lane][2 * warp + 1] : 0);
      const std::uint32_t begin = static_cast<std::uint32_t>(first_tile * kTileIds);
      if (lane < kRanks * kDraftCopies) {
        const std::uint32_t ids = (id_of(a) - begin & 0xffffu) | id_of(b) - begin << 16;
        store_packet(outbox + parity, make_uint4(key_of(a), key_of(b), ids, tag));
      }
      // Where the choice falls on this block's id, its row is near then.
      if (lane < 8) {
        const std::uint64_t c = lane < 4 ? a : b;
        if (c != 0) prefetch_row(params.w1, first_id + id_of(c), lane % 4);
      }
    }
    stamp(step, 3);
    if constexpr (!kMore) store_logits(step, warp_tile);
    if (step + 1 < kDraftSteps) {
      copy_base(step + 1, warp_tile);
    } else {
      sm90::launch_dependents();
    }
    stamp(step, 4);

    // A poll is a long way while all blocks ask, and one that comes too early makes the next one
    // wait for it. No packet is here sooner.
    while (clock64() - sent_at < kCyclesToPacket) {
    }
#pragma unroll 1
    for (int pair = first_pair; pair < num_pairs; pair += kPairSlots * kPollGroups) {
      // Abort word and clock are read once in so many polls: a look takes longer than a poll.
      constexpr int kPollsPerLook = 32;
      std::uint64_t heard[kPairSlots][2] = {};
      std::uint32_t missing = stopped ? 0u : asked;
      std::uint64_t deadline_ns = 0;
      const plat::TaggedWords* box = inbox + parity + pair - first_pair;
      for (int polls = 1; missing != 0; ++polls) {
        uint4 packet[kPairSlots * kRanks];
#pragma unroll
        for (int i = 0; i < kPairSlots * kRanks; ++i) {
          if ((missing >> i & 1u) == 0u) continue;
          packet[i] =
              load_packet(box + i % kRanks * params.port.box_packets + i / kRanks * kPollGroups);
        }
#pragma unroll
        for (int i = 0; i < kPairSlots * kRanks; ++i) {
          if ((missing >> i & 1u) == 0u || packet[i].w != tag) continue;
          missing &= ~(1u << i);
          const std::uint32_t begin =
              static_cast<std::uint32_t>(i % kRanks * params.vocab_shard) + source_id;
          const std::uint32_t ids[2] = {packet[i].z & 0xffffu, packet[i].z >> 16};
          const std::uint32_t keys[2] = {packet[i].x, packet[i].y};
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            std::uint64_t& best = heard[i / kRanks][c];
            if (keys[c] != 0) best = better(best, candidate(keys[c], begin + ids[c]));
          }
        }
        if (missing == 0u || polls % kPollsPerLook != 0) continue;
        const std::uint64_t now_ns = plat::clock_ns();
        if (deadline_ns == 0) deadline_ns = now_ns + params.port.budget_ns;
        const bool aborted = plat::load_acquire<plat::Scope::system>(
                                 params.port.abort_words[params.port.tp_rank]) != 0u;
        if (!aborted && now_ns <= deadline_ns) continue;
        report_late(params.port, stages::StageId::draft_token_gather,
                    (__ffs(static_cast<int>(missing)) - 1) % kRanks, now, aborted);
        shared.stopped = 1;
        break;
      }
      plat::warp_sync();
#pragma unroll
      for (int slot = 0; slot < kPairSlots; ++slot) {
        const int request = 2 * (pair + slot * kPollGroups);
        if (request < batch) {
          const std::uint64_t best = best_of_warp(heard[slot][0]);
          if (lane == 0) shared.heard[warp][request] = best;
        }
        if (request + 1 < batch) {
          const std::uint64_t best = best_of_warp(heard[slot][1]);
          if (lane == 0) shared.heard[warp][request + 1] = best;
        }
      }
    }
    plat::block_sync();
    stamp(step, 5);

    // Lanes 4 g .. 4 g + 3 join what two warps each heard of request g.
    std::uint64_t winner = better(shared.heard[2 * t][g], shared.heard[2 * t + 1][g]);
    winner = better_of_lanes(better_of_lanes(winner, 1), 2);
    stopped = shared.stopped != 0;
    previous = stopped || g >= batch ? -1 : static_cast<std::int64_t>(id_of(winner));
    if (blockIdx.x == 0 && warp == 0 && t == 0 && g < batch) {
      params.tokens[g * kDraftSteps + step] = previous < 0 ? 0 : previous;
    }
  }

  if (params.share_logits) {
    const std::uint64_t now = epoch + kDraftSteps;
    const std::uint32_t tag = static_cast<std::uint32_t>(now) | 1u;
    const int peer = plat::thread_idx();
    plat::block_sync();  // the whole block's stores come before the fence
    if (peer < kRanks && peer != params.port.tp_rank && !stopped) {
      __threadfence_system();
      store_packet(quads_of(params.port, peer, now, params.port.tp_rank, block, num_pairs),
                   make_uint4(0, 0, 0, tag));
      const plat::TaggedWords* box =
          quads_of(params.port, params.port.tp_rank, now, peer, block, num_pairs);
      const std::uint64_t deadline_ns = plat::clock_ns() + params.port.budget_ns;
      while (load_packet(box).w != tag) {
        const bool aborted = plat::load_acquire<plat::Scope::system>(
                                 params.port.abort_words[params.port.tp_rank]) != 0u;
        if (!aborted && plat::clock_ns() <= deadline_ns) continue;
        report_late(params.port, stages::StageId::draft_logits_gather, peer, now, aborted);
        break;
      }
      __threadfence_system();
    }
  }
  if (blockIdx.x == 0 && plat::thread_idx() == 0 && params.noise_offset != nullptr) {
    ++*params.noise_offset;  // every block has read it: all have sent packets since
  }
}

template <int kRanks, int kTiles, bool kMore, bool kStamped>
cudaError_t launch_for(const DraftProposalsParams& params, int blocks, bool programmatic,
                       cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared<kTiles>);
  const auto kernel = draft_proposals_bf16_sm90<kRanks, kTiles, kMore, kStamped>;
  // Blocks wait for each other, so a grid that is not resident as a whole would meet its deadline.
  int device = 0, multiprocessors = 0, per_multiprocessor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &per_multiprocessor, reinterpret_cast<const void*>(kernel), kThreads, kBytes);
  }
  if (error != cudaSuccess) return error;
  if (blocks > multiprocessors * per_multiprocessor) return cudaErrorCooperativeLaunchTooLarge;
  return launch_kernel(kernel, dim3(static_cast<unsigned>(blocks)), kThreads, kBytes, 1,
                       programmatic, stream, params);
}

template <int kTiles, bool kMore, bool kStamped>
cudaError_t launch_ranks(const DraftProposalsParams& params, int blocks, bool programmatic,
                         cudaStream_t stream) {
  switch (params.port.tp_size) {
    case 1: return launch_for<1, kTiles, kMore, kStamped>(params, blocks, programmatic, stream);
    case 2: return launch_for<2, kTiles, kMore, kStamped>(params, blocks, programmatic, stream);
    case 4: return launch_for<4, kTiles, kMore, kStamped>(params, blocks, programmatic, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <bool kStamped>
cudaError_t launch_tiles(const DraftProposalsParams& params, int blocks, bool programmatic,
                         cudaStream_t stream) {
  const int tiles = (params.vocab_shard + kTileIds - 1) / kTileIds;
  const int of_block = (tiles + blocks - 1) / blocks;
  if (of_block <= 2 * kWarps) {
    return launch_ranks<2, false, kStamped>(params, blocks, programmatic, stream);
  }
  if (of_block <= 4 * kWarps) {
    return launch_ranks<4, false, kStamped>(params, blocks, programmatic, stream);
  }
  return launch_ranks<4, true, kStamped>(params, blocks, programmatic, stream);
}

}  // namespace

cudaError_t launch_draft_proposals(const DraftProposalsParams& params, int blocks,
                                   bool programmatic, cudaStream_t stream) {
  const bool sizes = params.batch_size >= 1 && params.batch_size <= kMaxDraftBatch && blocks >= 1 &&
                     blocks <= kMaxDraftBlocks && params.vocab_shard >= 1 &&
                     params.vocab_shard <= blocks * (kMostTilesOfBlock - 1) * kTileIds &&
                     params.vocab_shard % 4 == 0 && params.base_pitch % 4 == 0 &&
                     params.port.box_packets >= draft_packets(blocks, params.batch_size);
  const bool aligned = reinterpret_cast<std::uintptr_t>(params.base) % 16 == 0 &&
                       reinterpret_cast<std::uintptr_t>(params.w1) % 16 == 0 &&
                       reinterpret_cast<std::uintptr_t>(params.w2) % 16 == 0;
  if (!sizes || !aligned) return cudaErrorInvalidValue;
  for (int rank = 0; rank < params.port.tp_size; ++rank) {
    if (reinterpret_cast<std::uintptr_t>(params.logits[rank]) % 16 != 0) {
      return cudaErrorInvalidValue;
    }
    const bool own = rank == params.port.tp_rank;
    if ((params.logits[rank] != nullptr) != params.share_logits && !own) {
      return cudaErrorInvalidValue;
    }
  }
  if (params.share_logits && params.logits[params.port.tp_rank] == nullptr) {
    return cudaErrorInvalidValue;
  }
  return params.stamps != nullptr ? launch_tiles<true>(params, blocks, programmatic, stream)
                                  : launch_tiles<false>(params, blocks, programmatic, stream);
}

}  // namespace lowlat::nvidia::fused

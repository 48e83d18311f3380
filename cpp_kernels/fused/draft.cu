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
// Ordering     box[e & 1][p][block][pair]  packets of exchange e = step_epoch + exchange_index + s
//                       from that block of rank p, in the reader's memory: {best score of request
//                       2 pair, of 2 pair + 1, their ids in the block, tag}. Written by that block
//                       (one access), read by every block of the owner.
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
// Determinism  a bias has one order of summation, whatever block, slot or rank it is in; tokens are
//              equal on all ranks, because all see the same packets and the rule is a total order.
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

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / plat::kWarpLanes;
constexpr int kTileIds = 16;               // ids of one tensor-core product
constexpr int kPieces = kMarkovRank / 32;  // of 16 bytes, that a lane has of a row
constexpr int kPollers = kMaxDraftBlocks;  // threads that ask for the packets of one rank
constexpr int kTilesOfBlock = 2 * kWarps;  // that stay on chip: a pair a warp
constexpr int kMostTilesOfBlock = 0x10000 / kTileIds;  // a packet has 16 bits for an id
// Pitches that keep the lanes of a phase in different banks: 64 mod 128 bytes; 4 mod 32 words.
constexpr int kRowPitch = 2 * kMarkovRank + 64, kSumPitch = plat::kWarpLanes + 4;
static_assert(kThreads % kPollers == 0 && kMaxDraftBatch <= kWarps);
static_assert(kTileIds * 2 == plat::kWarpLanes, "a lane scores one id of its warp's pair of tiles");

struct Shared {
  uint4 tiles[kWarps][2 * kPieces][plat::kWarpLanes];  // of a warp, in the order its lanes read
  unsigned char rows[kMaxDraftBatch][kRowPitch];       // w1's row of each request
  float base[kWarps][kMaxDraftBatch][plat::kWarpLanes];
  float noise[kWarps][kMaxDraftBatch][plat::kWarpLanes];
  float sums[kWarps][kMaxDraftBatch][kSumPitch];
  std::uint64_t best[kWarps][kMaxDraftBatch];  // of the warp's ids
  std::uint64_t heard[kWarps][2];              // of the packets that the warp asked for
  float temperature[kMaxDraftBatch];
  std::uint32_t stopped;  // a wait ended without its packet
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
// As copy_16, of one word.
LOWLAT_DEVICE void copy_word(float* dst_shared, const float* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(sm90::shared_address(dst_shared)),
               "l"(__cvta_generic_to_global(src))
               : "memory");
}

LOWLAT_DEVICE float noise_of(std::uint64_t key, std::uint32_t id, int request, int step,
                             std::uint32_t offset) {
  const stages::PhiloxWords words = stages::philox4x32_10(
      {id >> 2, static_cast<std::uint32_t>(request), static_cast<std::uint32_t>(step), offset},
      static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32));
  // No array: an index that only the lane knows would put it into memory.
  const std::uint32_t low = (id & 1u) == 0u ? words.word[0] : words.word[1];
  const std::uint32_t high = (id & 1u) == 0u ? words.word[2] : words.word[3];
  return stages::gumbel(stages::noise_uniform((id & 2u) == 0u ? low : high));
}

// What the threads of a block know from the start.
struct Place {
  int warp, lane, row, pair;  // row: of the products, lane / 4; pair of columns, lane % 4
  int num_tiles;              // of the rank
  int first_tile, end_tile;   // of this block
  std::uint32_t first_id;     // of the rank
};

LOWLAT_DEVICE int first_tile_of(int block, int num_tiles) {
  return static_cast<int>(static_cast<std::uint32_t>(block) * num_tiles / gridDim.x);
}

// The lane's pieces of a tile's two rows are at row_of(..)[4 * piece].
LOWLAT_DEVICE const uint4* row_of(const DraftProposalsParams& params, const Place& place, int tile,
                                  int half) {
  int id = tile * kTileIds + place.row + 8 * half;
  // Ids past the shard's end are read as its last one and never chosen.
  id = id < params.vocab_shard ? id : params.vocab_shard - 1;
  return reinterpret_cast<const uint4*>(params.w2 + std::int64_t{id} * kMarkovRank) + place.pair;
}

// Sums of a tile's ids with up to eight requests, see sm90::mma_bf16. The order along K is the same
// for all: a lane's 16 bytes are two products' worth of its own elements.
struct Sums {
  float even[4], odd[4];
  LOWLAT_DEVICE void add(uint4 low, uint4 high, uint4 row) {
    const std::uint32_t a0[4] = {low.x, high.x, low.y, high.y}, b0[2] = {row.x, row.y};
    const std::uint32_t a1[4] = {low.z, high.z, low.w, high.w}, b1[2] = {row.z, row.w};
    sm90::mma_bf16(even, a0, b0);
    sm90::mma_bf16(odd, a1, b1);
  }
};

// kMore: a block has more tiles than stay on chip.
template <int kRanks, bool kMore, bool kStamped>
__global__ void __launch_bounds__(kThreads, 1)
    draft_proposals_bf16_sm90(const __grid_constant__ DraftProposalsParams params) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  Place place;
  place.warp = plat::thread_idx() / plat::kWarpLanes;
  place.lane = plat::thread_idx() % plat::kWarpLanes;
  place.row = place.lane / 4;
  place.pair = place.lane % 4;
  place.num_tiles = (params.vocab_shard + kTileIds - 1) / kTileIds;
  place.first_tile = first_tile_of(static_cast<int>(blockIdx.x), place.num_tiles);
  place.end_tile = first_tile_of(static_cast<int>(blockIdx.x) + 1, place.num_tiles);
  place.first_id = static_cast<std::uint32_t>(params.port.tp_rank) *
                   static_cast<std::uint32_t>(params.vocab_shard);
  const std::uint32_t vocab = static_cast<std::uint32_t>(kRanks * params.vocab_shard);
  const int batch = params.batch_size, num_pairs = (batch + 1) / 2;
  const auto stamp = [&](int step, int i) {
    if constexpr (kStamped) {
      if (plat::thread_idx() == 0) {
        params.stamps[(blockIdx.x * kDraftSteps + step) * kDraftStamps + i] = plat::clock_ns();
      }
    }
  };

  // All weights at once: a block's share is in flight as a whole.
  const int held_tile = place.first_tile + place.warp, shared_tile = held_tile + kWarps;
  if (shared_tile < place.end_tile) {
#pragma unroll
    for (int i = 0; i < 2 * kPieces; ++i) {
      copy_16(&shared.tiles[place.warp][i][place.lane],
              row_of(params, place, shared_tile, i / kPieces) + 4 * (i % kPieces));
    }
  }
  uint4 held[2 * kPieces] = {};
  if (held_tile < place.end_tile) {
#pragma unroll
    for (int i = 0; i < 2 * kPieces; ++i) {
      held[i] = load_weights(row_of(params, place, held_tile, i / kPieces) + 4 * (i % kPieces));
    }
  }
  if (plat::thread_idx() == 0) shared.stopped = 0;
  sm90::wait_for_predecessors();

  const std::uint32_t offset =
      params.noise_offset == nullptr
          ? 0u
          : static_cast<std::uint32_t>(__ldcg(reinterpret_cast<long long*>(params.noise_offset)));
  const std::uint64_t epoch = exchange_epoch(params.port, params.exchange_index);
  std::int64_t previous = -1;  // of the request of the warp's number
  if (place.warp < batch) {
    previous = __ldcg(
        reinterpret_cast<const long long*>(params.anchors + place.warp * params.anchor_pitch));
  }
  if (plat::thread_idx() < kMaxDraftBatch) {
    shared.temperature[plat::thread_idx()] =
        params.temperatures != nullptr && plat::thread_idx() < batch
            ? __ldcg(params.temperatures + plat::thread_idx())
            : 0.0f;
  }
  plat::block_sync();

  // A lane's id of a pair of tiles, the second of which is kWarps after `first`.
  const auto id_of_lane = [&](int first) {
    const int tile = first + place.lane / kTileIds * kWarps;
    const int id = tile * kTileIds + place.lane % kTileIds;
    return tile < place.end_tile && id < params.vocab_shard ? id : -1;
  };
  // What a step needs of a pair of tiles and not of the token before it: logits and noise.
  const auto prepare = [&](int step, int first) {
    const int id = id_of_lane(first);
    if (id < 0) return;
#pragma unroll 1
    for (int request = 0; request < batch; ++request) {
      copy_word(&shared.base[place.warp][request][place.lane],
                params.base + (request * kDraftSteps + step) * params.base_pitch + id);
      if (shared.temperature[request] == 0.0f) continue;
      shared.noise[place.warp][request][place.lane] = noise_of(
          params.noise_key, place.first_id + static_cast<std::uint32_t>(id), request, step, offset);
    }
  };
  // A tile's sums to where the lane of each id finds them; `slot` of its pair.
  const auto hand_over = [&](const Sums& sums, int slot) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int request = 2 * place.pair + i % 2;
      if (request >= batch) continue;
      shared.sums[place.warp][request][slot * kTileIds + place.row + i / 2 * 8] =
          sums.even[i] + sums.odd[i];
    }
  };
  // The best of a pair of tiles and of those before it.
  const auto choose = [&](int step, int first) {
    const int id = id_of_lane(first);
    wait_for_copies();
    plat::warp_sync();
#pragma unroll 1
    for (int request = 0; request < batch; ++request) {
      std::uint64_t best = 0;
      if (id >= 0) {
        const float z = shared.base[place.warp][request][place.lane] +
                        round_to_bf16(shared.sums[place.warp][request][place.lane]);
        float score = z;
        const float temperature = shared.temperature[request];
        if (temperature != 0.0f) {
          const std::int64_t at =
              static_cast<std::int64_t>(request * kDraftSteps + step) * vocab + place.first_id + id;
#pragma unroll
          for (int rank = 0; rank < kRanks; ++rank) {
            if (params.logits[rank] != nullptr) params.logits[rank][at] = z;
          }
          score = z / stages::clamp_temperature(temperature) +
                  shared.noise[place.warp][request][place.lane];
        }
        best = candidate(score_key(score), static_cast<std::uint32_t>(id));
      }
      best = best_of_warp(best);
      if (place.lane == 0) {
        std::uint64_t& kept = shared.best[place.warp][request];
        kept = first == held_tile ? best : better(kept, best);
      }
    }
  };

  // Which packets a thread asks for: those of block `source` from some ranks, for one pair.
  const int group = plat::thread_idx() / kPollers, source = plat::thread_idx() % kPollers;
  const int pair_places = num_pairs == 3 ? 4 : num_pairs;  // a power of two
  const int asked_pair = group % pair_places;
  std::uint32_t asked = 0;
  if (asked_pair < num_pairs && source < static_cast<int>(gridDim.x)) {
    for (int rank = group / pair_places; rank < kRanks; rank += kThreads / kPollers / pair_places) {
      asked |= 1u << rank;
    }
  }
  const std::uint32_t source_id =
      static_cast<std::uint32_t>(first_tile_of(source, place.num_tiles) * kTileIds);

#pragma unroll 1
  for (int step = -1; step < kDraftSteps; ++step) {
    const std::uint64_t now = epoch + static_cast<std::uint64_t>(step);
    const std::uint32_t tag = static_cast<std::uint32_t>(now) | 1u;
    bool stopped = false;
    if (step >= 0) {
      if (place.warp < batch) {
        // A token that is none has a row of NaN: nothing is read past the end, and it shows.
        uint4 row = make_uint4(0x7fff'7fffu, 0x7fff'7fffu, 0x7fff'7fffu, 0x7fff'7fffu);
        if (static_cast<std::uint64_t>(previous) < vocab) {
          row = __ldcg(reinterpret_cast<const uint4*>(params.w1 + previous * kMarkovRank) +
                       place.lane);
        }
        *reinterpret_cast<uint4*>(shared.rows[place.warp] + 16 * place.lane) = row;
      }
      wait_for_copies();
      plat::block_sync();
      stamp(step, 0);

      const auto row_piece = [&](int piece) {
        return place.row < batch ? *reinterpret_cast<const uint4*>(shared.rows[place.row] +
                                                                   16 * place.pair + 64 * piece)
                                 : make_uint4(0, 0, 0, 0);
      };
      {
        Sums first = {}, second = {};
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          const uint4 row = row_piece(piece);
          first.add(held[piece], held[kPieces + piece], row);
          if (shared_tile < place.end_tile) {
            second.add(shared.tiles[place.warp][piece][place.lane],
                       shared.tiles[place.warp][kPieces + piece][place.lane], row);
          }
        }
        hand_over(first, 0);
        hand_over(second, 1);
        choose(step, held_tile);
      }
      if constexpr (kMore) {
#pragma unroll 1
        for (int tile = held_tile + kTilesOfBlock; tile < place.end_tile; tile += kTilesOfBlock) {
          plat::warp_sync();  // the sums have been read
          prepare(step, tile);
#pragma unroll 1
          for (int slot = 0; slot < 2; ++slot) {
            const uint4* low = row_of(params, place, tile + slot * kWarps, 0);
            const uint4* high = row_of(params, place, tile + slot * kWarps, 1);
            Sums sums = {};
#pragma unroll 2
            for (int piece = 0; piece < kPieces; ++piece) {
              sums.add(__ldg(low + 4 * piece), __ldg(high + 4 * piece), row_piece(piece));
            }
            hand_over(sums, slot);
          }
          choose(step, tile);
        }
      }
      stamp(step, 1);
      plat::block_sync();
      stamp(step, 2);

      stopped = shared.stopped != 0;
      if (place.warp < num_pairs && !stopped) {
        const int request = 2 * place.warp + place.lane / kWarps;
        std::uint64_t of_block = request < batch ? shared.best[place.lane % kWarps][request] : 0;
        for (int mask = 1; mask < kWarps; mask *= 2) of_block = better_of_lanes(of_block, mask);
        const std::uint64_t a = __shfl_sync(plat::kAllLanes, of_block, 0);
        const std::uint64_t b = __shfl_sync(plat::kAllLanes, of_block, kWarps);
        const std::uint32_t begin = static_cast<std::uint32_t>(place.first_tile * kTileIds);
        if (place.lane < kRanks) {
          // Each rank begins with another reader, as publish_quad.
          const int reader = (place.lane + params.port.tp_rank) % kRanks;
          const std::uint32_t ids = (id_of(a) - begin & 0xffffu) | id_of(b) - begin << 16;
          store_packet(quads_of(params.port, reader, now, params.port.tp_rank,
                                static_cast<int>(blockIdx.x), num_pairs) +
                           place.warp,
                       make_uint4(key_of(a), key_of(b), ids, tag));
        }
        // Where the choice falls on this block's id, its row is near then.
        if (place.lane < 8) {
          const std::uint64_t c = place.lane < 4 ? a : b;
          if (c != 0) prefetch_row(params.w1, place.first_id + id_of(c), place.lane % 4);
        }
      }
      stamp(step, 3);
    }
    if (step + 1 < kDraftSteps) {
      prepare(step + 1, held_tile);
    } else {
      sm90::launch_dependents();
    }
    if (step < 0) continue;
    stamp(step, 4);

    // Abort word and clock are read once in so many polls: a look takes longer than a poll.
    constexpr int kPollsPerLook = 32;
    std::uint64_t heard[2] = {0, 0};
    std::uint32_t missing = stopped ? 0u : asked;
    std::uint64_t deadline_ns = 0;
    const plat::TaggedWords* box =
        quads_of(params.port, params.port.tp_rank, now, 0, source, num_pairs) + asked_pair;
    for (int polls = 1; missing != 0; ++polls) {
      uint4 packet[kRanks];
#pragma unroll
      for (int rank = 0; rank < kRanks; ++rank) {
        if ((missing >> rank & 1u) == 0u) continue;
        packet[rank] = load_packet(box + rank * params.port.box_packets);
      }
#pragma unroll
      for (int rank = 0; rank < kRanks; ++rank) {
        if ((missing >> rank & 1u) == 0u || packet[rank].w != tag) continue;
        missing &= ~(1u << rank);
        const std::uint32_t begin =
            static_cast<std::uint32_t>(rank * params.vocab_shard) + source_id;
        const std::uint32_t ids[2] = {packet[rank].z & 0xffffu, packet[rank].z >> 16};
        const std::uint32_t keys[2] = {packet[rank].x, packet[rank].y};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (keys[c] != 0) heard[c] = better(heard[c], candidate(keys[c], begin + ids[c]));
        }
      }
      if (missing == 0u || polls % kPollsPerLook != 0) continue;
      const std::uint64_t now_ns = plat::clock_ns();
      if (deadline_ns == 0) deadline_ns = now_ns + params.port.budget_ns;
      const bool aborted = plat::load_acquire<plat::Scope::system>(
                               params.port.abort_words[params.port.tp_rank]) != 0u;
      if (!aborted && now_ns <= deadline_ns) continue;
      report_fault(params.port, stages::StageId::draft_token_gather,
                   __ffs(static_cast<int>(missing)) - 1, now, aborted);
      shared.stopped = 1;
      break;
    }
    plat::warp_sync();
    heard[0] = best_of_warp(heard[0]);
    heard[1] = best_of_warp(heard[1]);
    if (place.lane < 2) {
      shared.heard[place.warp][place.lane] = place.lane == 0 ? heard[0] : heard[1];
    }
    plat::block_sync();
    stamp(step, 5);

    if (place.warp < batch) {
      const int from = place.lane % kWarps;
      const bool mine = from / (kWarps * kPollers / kThreads) % pair_places == place.warp / 2;
      const std::uint64_t winner =
          best_of_warp(mine ? shared.heard[from][place.warp % 2] : std::uint64_t{0});
      previous = shared.stopped != 0 ? -1 : static_cast<std::int64_t>(id_of(winner));
      if (blockIdx.x == 0 && place.lane == 0) {
        params.tokens[place.warp * kDraftSteps + step] = previous < 0 ? 0 : previous;
      }
    }
  }

  if (params.share_logits) {
    const std::uint64_t now = epoch + kDraftSteps;
    const std::uint32_t tag = static_cast<std::uint32_t>(now) | 1u;
    const int peer = plat::thread_idx();
    plat::block_sync();  // the whole block's stores come before the fence
    if (peer < kRanks && peer != params.port.tp_rank && shared.stopped == 0) {
      __threadfence_system();
      const int block = static_cast<int>(blockIdx.x);
      store_packet(quads_of(params.port, peer, now, params.port.tp_rank, block, num_pairs),
                   make_uint4(0, 0, 0, tag));
      const plat::TaggedWords* box =
          quads_of(params.port, params.port.tp_rank, now, peer, block, num_pairs);
      const std::uint64_t deadline_ns = plat::clock_ns() + params.port.budget_ns;
      while (load_packet(box).w != tag) {
        const bool aborted = plat::load_acquire<plat::Scope::system>(
                                 params.port.abort_words[params.port.tp_rank]) != 0u;
        if (!aborted && plat::clock_ns() <= deadline_ns) continue;
        report_fault(params.port, stages::StageId::draft_logits_gather, peer, now, aborted);
        break;
      }
      __threadfence_system();
    }
  }
  if (blockIdx.x == 0 && plat::thread_idx() == 0 && params.noise_offset != nullptr) {
    ++*params.noise_offset;  // every block has read it: all have sent packets since
  }
}

template <int kRanks, bool kMore, bool kStamped>
cudaError_t launch_for(const DraftProposalsParams& params, int blocks, bool programmatic,
                       cudaStream_t stream) {
  const auto kernel = draft_proposals_bf16_sm90<kRanks, kMore, kStamped>;
  // Blocks wait for each other, so a grid that is not resident as a whole would meet its deadline.
  int device = 0, multiprocessors = 0, per_multiprocessor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &per_multiprocessor, reinterpret_cast<const void*>(kernel), kThreads, sizeof(Shared));
  }
  if (error != cudaSuccess) return error;
  if (blocks > multiprocessors * per_multiprocessor) return cudaErrorCooperativeLaunchTooLarge;
  return launch_kernel(kernel, dim3(static_cast<unsigned>(blocks)), kThreads, sizeof(Shared), 1,
                       programmatic, stream, params);
}

template <bool kMore, bool kStamped>
cudaError_t launch_ranks(const DraftProposalsParams& params, int blocks, bool programmatic,
                         cudaStream_t stream) {
  switch (params.port.tp_size) {
    case 1: return launch_for<1, kMore, kStamped>(params, blocks, programmatic, stream);
    case 2: return launch_for<2, kMore, kStamped>(params, blocks, programmatic, stream);
    case 4: return launch_for<4, kMore, kStamped>(params, blocks, programmatic, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <bool kStamped>
cudaError_t launch_tiles(const DraftProposalsParams& params, int blocks, bool programmatic,
                         cudaStream_t stream) {
  const bool more = params.vocab_shard > blocks * kTilesOfBlock * kTileIds;
  return more ? launch_ranks<true, kStamped>(params, blocks, programmatic, stream)
              : launch_ranks<false, kStamped>(params, blocks, programmatic, stream);
}

}  // namespace

cudaError_t launch_draft_proposals(const DraftProposalsParams& params, int blocks,
                                   bool programmatic, cudaStream_t stream) {
  const bool sizes = params.batch_size >= 1 && params.batch_size <= kMaxDraftBatch && blocks >= 1 &&
                     blocks <= kMaxDraftBlocks && params.vocab_shard >= 1 &&
                     params.vocab_shard <= blocks * (kMostTilesOfBlock - 1) * kTileIds &&
                     params.port.box_packets >= draft_packets(blocks, params.batch_size);
  if (!sizes) return cudaErrorInvalidValue;
  for (int rank = 0; rank < params.port.tp_size; ++rank) {
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

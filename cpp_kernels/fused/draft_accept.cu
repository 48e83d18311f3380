// draft_accept_any: how many drafts each request keeps, and the token after them.
//
// Math         temperature 0: a_i = argmax L_i (lowest id); accepted = leading i with draft_i =
//              a_i; next = a_accepted
//              else p_i = softmax(L_i / T), q_i = softmax(z_i / T); draft i is kept while
//              0 < q <= 1 and coin_i q < p; next: the smallest id whose running sum of
//              max(p - q, 0) of the first refused row (of p after the last) exceeds coin_g total
// Shapes       L [B,g+1,V] · z [B,g,V] · drafts [B,g] · 1 ≤ B ≤ 8 · g ≤ 7 · V ≤ 131072
// Rounding     fp32; sums of 32 ids from 0, these carried over a tile of 1024, tiles carried
// Bytes        B = 1, g = 5, V = 129280: 5.7 MB of logits, read once
// Floor        1.2 us at 4.65 TB/s, and three hops between all blocks of 0.9 us
// Launch       a block of 512 threads a tile, all resident; its tile of every row stays in shared
//              memory, so as many requests a launch as fit there (four at g = 5)
// Ordering     between blocks: what a tile gives (maximum, sum, mass) is written once, then the
//              grid's barrier (a count and a generation, device scope), then read. The next launch
//              writes it again after this one has ended.
//              late     a second without an arrival ends the launch without results; blocks are
//              resident together, so only a fault of the device comes there.
// Determinism  one order whatever runs beside; bitwise run to run and rank to rank
// Meaning      reference/accept.cpp. Bound: docs/numerics.md, accept
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/draft_accept.hpp"
#include "fused/draft_key.cuh"
#include "fused/front_launch.cuh"
#include "fused/front_weights.cuh"
#include "stages/accept.hpp"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / plat::kWarpLanes;
constexpr int kMaxTiles = kMaxAcceptVocab / kAcceptTileIds;
constexpr int kMaxRows = 48;  // of the requests of one launch
constexpr int kOfLane = kAcceptTileIds / plat::kWarpLanes;
constexpr int kTilesOfLane = kMaxTiles / plat::kWarpLanes;
static_assert(kOfLane == plat::kWarpLanes && kMaxAcceptBatch <= kWarps);
// Lanes that each add 32 neighbours up, and threads that each add a row of sums up, are in
// different banks.
constexpr int kTilePitch = kMaxTiles + 1, kPitch = kAcceptTileIds + plat::kWarpLanes + 1;

struct Shared {
  float tile[kMaxRows][kPitch];       // quotients, exponentials, then the mass in the place of p
  float parts[kMaxRows][kTilePitch];  // sums of 32 ids, of a tile; then of tiles
  float most[kMaxRows], total[kMaxRows];
  bool keeps[kMaxAcceptBatch][kMaxAcceptDrafts];
  int accepted[kMaxAcceptBatch];
  bool stopped;
};
static_assert(sizeof(Shared) <= 227 * 1024);

// Where an id of the tile lies in its row.
LOWLAT_DEVICE int place_of(int id) { return id + id / plat::kWarpLanes; }

// What blocks tell each other, [row][tile].
struct Workspace {
  std::uint32_t arrived, generation, unused[30];
  std::uint64_t best[kMaxRows][kMaxTiles];
  float most[kMaxRows][kMaxTiles];
  float sum[kMaxRows][kMaxTiles];
  float mass[kMaxAcceptBatch][kMaxTiles];
};
static_assert(sizeof(Workspace) == kAcceptWorkspaceBytes);

// All threads of all blocks call. False: leave.
LOWLAT_DEVICE bool grid_barrier(Workspace& workspace, Shared& shared) {
  plat::block_sync();
  if (plat::thread_idx() == 0) {
    const std::uint32_t before = plat::load_acquire<plat::Scope::device>(&workspace.generation);
    __threadfence();
    if (atomicAdd(&workspace.arrived, 1u) == gridDim.x - 1) {
      workspace.arrived = 0;
      plat::store_release<plat::Scope::device>(&workspace.generation, before + 1);
    } else {
      const std::uint64_t deadline_ns = plat::clock_ns() + kSecondNs;
      for (int polls = 1; plat::load_acquire<plat::Scope::device>(&workspace.generation) == before;
           ++polls) {
        if (polls % 256 == 0 && plat::clock_ns() > deadline_ns) {
          shared.stopped = true;
          break;
        }
      }
    }
    __threadfence();
  }
  plat::block_sync();
  return !shared.stopped;
}

// Row r of a request's 2g + 1: target rows, then the draft's.
struct Row {
  int request;
  bool of_target;
  const float* logits;
};
LOWLAT_DEVICE Row row_of(const DraftAcceptParams& params, int r) {
  const int g = params.num_drafts, request = r / (2 * g + 1), i = r % (2 * g + 1);
  if (i <= g) {
    return {request, true,
            params.target_logits + static_cast<std::int64_t>(request * (g + 1) + i) * params.vocab};
  }
  return {request, false,
          params.draft_logits + static_cast<std::int64_t>(request * g + i - g - 1) * params.vocab};
}
LOWLAT_DEVICE float temperature_of(const DraftAcceptParams& params, int request) {
  return params.temperatures == nullptr ? 0.0f : __ldg(params.temperatures + request);
}

// Of one thread.
LOWLAT_DEVICE float sum_in_order(const float* values, int n) {
  float sum = 0.0f;
#pragma unroll 16
  for (int i = 0; i < n; ++i) sum += values[i];
  return sum;
}

// The warp's row of a tile: sums of each 32 ids to parts, theirs in order to every lane.
LOWLAT_DEVICE float sum_of_tile(const float* row, float* parts, int tile_ids) {
  const int lane = plat::thread_idx() % plat::kWarpLanes;
  const int count = tile_ids - lane * kOfLane;
  parts[lane] = sum_in_order(row + place_of(lane * kOfLane), count < 0         ? 0
                                                             : count < kOfLane ? count
                                                                               : kOfLane);
  plat::warp_sync();
  return sum_in_order(parts, plat::kWarpLanes);
}

// The first of values[0..n) up to which outer + (inner + their running sum) passes `threshold`, n
// where none does; `before`: inner and the sum before it. Sums of sums are searched from the
// outside in: a sum's last value passes where the sum did, because the additions are the same. Of
// one thread.
LOWLAT_DEVICE int first_past(const float* values, int n, float threshold, float outer, float inner,
                             float& before) {
  constexpr int kAtOnce = 8;
  float running = 0.0f;
  for (int begin = 0; begin < n; begin += kAtOnce) {
    float v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) v[i] = begin + i < n ? values[begin + i] : 0.0f;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float next = running + v[i];
      if (begin + i < n && outer + (inner + next) > threshold) {
        before = inner + running;
        return begin + i;
      }
      running = next;
    }
  }
  return n;
}

__global__ void __launch_bounds__(kThreads, 1)
    draft_accept_any(const __grid_constant__ DraftAcceptParams params) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  Workspace& workspace = *static_cast<Workspace*>(params.workspace);
  const int warp = plat::thread_idx() / plat::kWarpLanes,
            lane = plat::thread_idx() % plat::kWarpLanes;
  const int tile = static_cast<int>(blockIdx.x), num_tiles = static_cast<int>(gridDim.x);
  const int g = params.num_drafts, rows_of_request = 2 * g + 1;
  const int num_rows = params.batch_size * rows_of_request;
  const int first_id = tile * kAcceptTileIds;
  const int tile_ids = min(kAcceptTileIds, params.vocab - first_id);
  if (plat::thread_idx() == 0) shared.stopped = false;

  bool any_sampled = false;
  for (int b = 0; b < params.batch_size; ++b) any_sampled |= temperature_of(params, b) != 0.0f;

  // A warp a row: the tile's greatest.
#pragma unroll 1
  for (int r = warp; r < num_rows; r += kWarps) {
    const Row row = row_of(params, r);
    const float temperature = temperature_of(params, row.request);
    if (temperature == 0.0f && !row.of_target) continue;
    const float* logits = row.logits + first_id;
    float v[kOfLane];
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int id = i * plat::kWarpLanes + lane;
      v[i] = id < tile_ids ? __ldg(logits + id) : -HUGE_VALF;
    }
    if (temperature == 0.0f) {
      std::uint64_t best = 0;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        const int id = i * plat::kWarpLanes + lane;
        if (id < tile_ids) {
          best = better(best, candidate(score_key(v[i]), static_cast<unsigned>(first_id + id)));
        }
      }
      best = best_of_warp(best);
      if (lane == 0) workspace.best[r][tile] = best;
    } else {
      const float tau = stages::clamp_temperature(temperature);
      float most = -HUGE_VALF;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        v[i] /= tau;
        most = plat::max(v[i], most);
        shared.tile[r][place_of(i * plat::kWarpLanes + lane)] = v[i];
      }
      most = plat::warp_max(most);
      if (lane == 0) workspace.most[r][tile] = most;
    }
  }
  if (!grid_barrier(workspace, shared)) return;

  if (any_sampled) {
    // The tile's sums of exponentials.
#pragma unroll 1
    for (int r = warp; r < num_rows; r += kWarps) {
      if (temperature_of(params, r / rows_of_request) == 0.0f) continue;
      float most = -HUGE_VALF;
#pragma unroll
      for (int i = 0; i < kTilesOfLane; ++i) {
        const int other = i * plat::kWarpLanes + lane;
        if (other < num_tiles) most = plat::max(__ldcg(&workspace.most[r][other]), most);
      }
      most = plat::warp_max(most);
      if (lane == 0) shared.most[r] = most;
#pragma unroll 4
      for (int id = lane; id < tile_ids; id += plat::kWarpLanes) {
        float& value = shared.tile[r][place_of(id)];
        value = plat::exp(value - most);
      }
      plat::warp_sync();
      const float sum = sum_of_tile(shared.tile[r], shared.parts[r], tile_ids);
      if (lane == 0) workspace.sum[r][tile] = sum;
    }
    if (!grid_barrier(workspace, shared)) return;

    // Every block decides for itself: totals, drafts kept, then its tile of what is drawn from.
#pragma unroll 1
    for (int r = warp; r < num_rows; r += kWarps) {
#pragma unroll
      for (int i = 0; i < kTilesOfLane; ++i) {
        const int other = i * plat::kWarpLanes + lane;
        if (other < num_tiles) shared.parts[r][other] = __ldcg(&workspace.sum[r][other]);
      }
    }
    plat::block_sync();
    const int own_row = lane * kWarps + warp;
    if (own_row < num_rows) {
      shared.total[own_row] = sum_in_order(shared.parts[own_row], num_tiles);
    }
    plat::block_sync();
    if (plat::thread_idx() < params.batch_size * g) {
      const int b = plat::thread_idx() / g, i = plat::thread_idx() % g;
      const float temperature = temperature_of(params, b);
      if (temperature != 0.0f) {
        const float tau = stages::clamp_temperature(temperature);
        const int id = static_cast<int>(params.drafts[b * g + i]);
        const auto probability = [&](int r) {
          return plat::exp(__ldg(row_of(params, r).logits + id) / tau - shared.most[r]) /
                 shared.total[r];
        };
        const float p = probability(b * rows_of_request + i);
        const float q = probability(b * rows_of_request + g + 1 + i);
        shared.keeps[b][i] = 0.0f < q && q <= 1.0f && params.coins[b * (g + 1) + i] * q < p;
      }
    }
    plat::block_sync();
    if (plat::thread_idx() < params.batch_size &&
        temperature_of(params, plat::thread_idx()) != 0.0f) {
      int kept = 0;
      while (kept < g && shared.keeps[plat::thread_idx()][kept]) ++kept;
      shared.accepted[plat::thread_idx()] = kept;
    }
    plat::block_sync();
    // The mass takes the place of p.
    for (int b = 0; b < params.batch_size; ++b) {
      if (temperature_of(params, b) == 0.0f) continue;
      const int kept = shared.accepted[b], r = b * rows_of_request + kept;
#pragma unroll
      for (int i = 0; i < kAcceptTileIds / kThreads; ++i) {
        const int at = place_of(i * kThreads + plat::thread_idx());
        float mass = shared.tile[r][at] / shared.total[r];
        if (kept < g) {
          const float q = shared.tile[r + g + 1][at] / shared.total[r + g + 1];
          mass = plat::max(mass - (q >= 0.0f && q <= 1.0f ? q : 0.0f), 0.0f);
        }
        shared.tile[r][at] = mass;
      }
    }
    plat::block_sync();
    float mass = 0.0f;  // of the warp's request
    const int own_mass = warp * rows_of_request;
    const bool draws = warp < params.batch_size && temperature_of(params, warp) != 0.0f;
    if (draws) {
      mass = sum_of_tile(shared.tile[own_mass + shared.accepted[warp]], shared.parts[own_mass],
                         tile_ids);
      if (lane == 0) workspace.mass[warp][tile] = mass;
    }
    if (!grid_barrier(workspace, shared)) return;

    // The block whose tile holds the drawn id writes it; where none does, the first block.
    if (draws) {
      float* sums = shared.parts[own_mass + 1];
#pragma unroll
      for (int i = 0; i < kTilesOfLane; ++i) {
        const int other = i * plat::kWarpLanes + lane;
        if (other < num_tiles) sums[other] = __ldcg(&workspace.mass[warp][other]);
      }
      plat::warp_sync();
      if (lane == 0) {
        const float threshold = params.coins[warp * (g + 1) + g] * sum_in_order(sums, num_tiles);
        float tiles_before = 0.0f, parts_before = 0.0f, rest = 0.0f;
        const int drawn = first_past(sums, num_tiles, threshold, 0.0f, 0.0f, tiles_before);
        if (drawn == tile) {
          const int part = first_past(shared.parts[own_mass], plat::kWarpLanes, threshold,
                                      tiles_before, 0.0f, parts_before);
          const float* row = shared.tile[own_mass + shared.accepted[warp]];
          const int id = first_past(row + place_of(part * kOfLane), kOfLane, threshold,
                                    tiles_before, parts_before, rest);
          params.next[warp] = first_id + part * kOfLane + id;
        } else if (drawn == num_tiles && tile == 0) {
          params.next[warp] = params.vocab - 1;
        }
        if (tile == 0) params.accepted[warp] = shared.accepted[warp];
      }
    }
  }

  // Greedy requests: the first block, a warp each.
  if (tile != 0) return;
#pragma unroll 1
  for (int b = warp; b < params.batch_size; b += kWarps) {
    if (temperature_of(params, b) != 0.0f) continue;
    for (int i = 0;; ++i) {
      std::uint64_t best = 0;
      for (int other = lane; other < num_tiles; other += plat::kWarpLanes) {
        best = better(best, __ldcg(&workspace.best[b * rows_of_request + i][other]));
      }
      const std::int64_t id = id_of(best_of_warp(best));
      if (i < g && params.drafts[b * g + i] == id) continue;
      if (lane == 0) {
        params.accepted[b] = i;
        params.next[b] = id;
      }
      break;
    }
  }
}

}  // namespace

cudaError_t launch_draft_accept(const DraftAcceptParams& params, cudaStream_t stream) {
  if (params.batch_size < 1 || params.batch_size > kMaxAcceptBatch || params.num_drafts < 1 ||
      params.num_drafts > kMaxAcceptDrafts || params.vocab < 1 || params.vocab > kMaxAcceptVocab) {
    return cudaErrorInvalidValue;
  }
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  const int tiles = (params.vocab + kAcceptTileIds - 1) / kAcceptTileIds;
  // Blocks wait for each other and each takes a multiprocessor's memory.
  if (tiles > multiprocessors) return cudaErrorCooperativeLaunchTooLarge;
  // As many requests at a time as fit into shared memory.
  const int group = kMaxRows / (2 * params.num_drafts + 1);
  for (int first = 0; error == cudaSuccess && first < params.batch_size; first += group) {
    DraftAcceptParams part = params;
    part.batch_size = params.batch_size - first < group ? params.batch_size - first : group;
    const auto skip = [first](auto*& pointer, std::int64_t width) {
      if (pointer != nullptr) pointer += first * width;
    };
    const std::int64_t g = params.num_drafts;
    skip(part.drafts, g);
    skip(part.target_logits, (g + 1) * params.vocab);
    skip(part.draft_logits, g * params.vocab);
    skip(part.temperatures, 1);
    skip(part.coins, g + 1);
    skip(part.accepted, 1);
    skip(part.next, 1);
    error = launch_kernel(draft_accept_any, dim3(static_cast<unsigned>(tiles)), kThreads,
                          sizeof(Shared), 1, false, stream, part);
  }
  return error;
}

}  // namespace lowlat::nvidia::fused

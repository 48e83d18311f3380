// fused/moe_parts.cuh: what the kernels of the mixture-of-experts region share (moe.cuh for few
// rows, moe_wide.cuh for many): the best experts of scores, this rank's sum to where it goes, and
// the report of a fault. `L` is a kernel's layout, `Region<L>` what each of its roles knows.
#pragma once

#include <cuda.h>

#include "fused/stream.cuh"
// The platform comes first.
#include "fused/exchange.cuh"
#include "fused/exchange_gate.cuh"
#include "platform/contract.hpp"
#include "stages/exchange.hpp"
#include "stages/experts.hpp"
#include "stages/gate.hpp"

#include "fused/moe.hpp"

namespace lowlat::nvidia::fused {

namespace moe {

using lowlat::fused::MoeArgs;
using lowlat::fused::MoeRouting;

inline constexpr int kScorers = 128;                    // blocks that score experts
inline constexpr int kColumns = 8;                      // of an mma
inline constexpr std::uint32_t kPoison = 0xffff'ffffu;  // two bf16 NaN that no rounding makes
inline constexpr float kSwigluLimit = 10.0f;
inline constexpr float kRoutedScaling = 1.5f;
inline constexpr int kSmemLimit = 232448;  // 227 KB, the most that a block of sm_90 can have

// What a wait waited for: the event of a fault report.
enum Event : std::uint32_t { kScoresEvent = 1, kHiddenEvent, kRowsEvent };

constexpr int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

// What the host adds to a launch's arguments.
struct Rules {
  stages::GateRule rule;
  stages::GateSum sum_rule;
  std::int32_t first_row;  // of the published packets: rows may be split over launches
};

// ------------------------------------------------------------------------------------ routing

// The scores of a row's experts, in a warp. The scoring blocks have kGateRows experts each, of them
// L::kScoreParts in a row parts of K of the same ones; their packets of up to three scores are
// numbered so that a lane's are those with its number modulo 32, part after part.
template <class L>
struct Scores {
  static constexpr int kOwn = L::kExperts / plat::kWarpLanes;  // experts of a lane
  static constexpr int kWords = L::kGateRows < 3 ? L::kGateRows : 3;
  static constexpr int kPackets = (kOwn + kWords - 1) / kWords;  // a lane, of a row's part
  int lane;
  float score[kOwn], bias[kOwn];

  LOWLAT_DEVICE int own_expert(int i) const {
    return (lane + i / L::kGateRows * plat::kWarpLanes) * L::kGateRows + i % L::kGateRows;
  }

  // Before the scores are there.
  LOWLAT_DEVICE void load_bias(const MoeArgs& a, int row) {
    const bool image = a.image_rows != nullptr && a.image_rows[row] != 0;
    const float* from = image ? a.w.gate_bias_vl : a.w.gate_bias;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) bias[i] = __ldg(from + own_expert(i));
  }

  // As their blocks sent them, the parts' sum; false (all lanes) when they are late.
  template <class Region>
  LOWLAT_DEVICE bool receive(const Region& r, int row) {
#pragma unroll 1
    for (int part = 0; part < L::kScoreParts; ++part) {
      uint4 packets[kPackets];
      for (int tries = 1;; ++tries) {
        bool here = true;
#pragma unroll
        for (int i = 0; i < kPackets; ++i) {
          packets[i] =
              load_packet(r.score_packet(row, lane + (part * kPackets + i) * plat::kWarpLanes));
          here = here && packets[i].w == r.epoch;
        }
        if (__all_sync(plat::kAllLanes, here)) break;
        const bool late = tries % kTriesPerLook == 0 && r.watch.ended(kScoresEvent);
        if (__any_sync(plat::kAllLanes, late)) return false;
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const uint4& packet = packets[i / kWords];
        const std::uint32_t words[3] = {packet.x, packet.y, packet.z};
        const float sum = __uint_as_float(words[i % kWords]);
        score[i] = part == 0 ? sum : score[i] + sum;
      }
    }
    return true;
  }

  // The k best, with their scores. Ranks are compared as integers of the same order.
  LOWLAT_DEVICE void select(std::int32_t* ids, float* scores, float nan_rank) const {
    std::uint32_t rank[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float sum = score[i] + bias[i];
      const std::uint32_t bits = __float_as_uint((sum != sum ? nan_rank : sum) + 0.0f);
      rank[i] = (bits >> 31) != 0u ? ~bits : bits | 0x8000'0000u;  // never 0: that is "taken"
    }
#pragma unroll 1
    for (int slot = 0; slot < L::kSlots; ++slot) {
      std::uint32_t best = 0, id = kPoison;
      float best_score = 0.0f;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {  // ascending ids: the first of equals stays
        if (rank[i] > best) best = rank[i], id = own_expert(i), best_score = score[i];
      }
      const std::uint32_t top = __reduce_max_sync(plat::kAllLanes, best);
      const std::uint32_t chosen = __reduce_min_sync(plat::kAllLanes, best == top ? id : kPoison);
      if (id == chosen) {
        ids[slot] = static_cast<std::int32_t>(chosen);
        scores[slot] = best_score;
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (own_expert(i) == static_cast<int>(chosen)) rank[i] = 0;
      }
    }
  }

  // The scores of ids that are known.
  LOWLAT_DEVICE void find(const std::int32_t* ids, float* scores) const {
    for (int slot = 0; slot < L::kSlots; ++slot) {
      const int id = ids[slot];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (own_expert(i) == id) scores[slot] = score[i];
      }
    }
  }
};

// By a warp: the choice of a row by what its scores are, for all blocks: packets {two ids, their
// weights, epoch}. `store` false: all but the stores.
template <class L, class Region>
LOWLAT_DEVICE void tell_route(const Region& r, int row, const std::int32_t* ids,
                              const float* scores, stages::GateSum sum_rule, bool store) {
  const float total = stages::gate_total(scores, L::kSlots, sum_rule);
  const auto weight = [&](int slot) {
    return __float_as_uint(scores[slot] / total * kRoutedScaling);
  };
  if (r.lane >= L::kRoutePackets) return;
  const int slot = 2 * r.lane, other = slot + 1 < L::kSlots ? slot + 1 : slot;
  const std::uint32_t words[3] = {
      static_cast<std::uint32_t>(ids[slot]) | static_cast<std::uint32_t>(ids[other]) << 16,
      weight(slot), weight(other)};
  if (store) plat::store_tagged(r.route_packet(row * L::kRoutePackets + r.lane), words, r.epoch);
}
// By a warp: ids and weights of all rows into the block's table, in every block the same: as they
// were told, or as they were given; block 0 stores them.
template <class L, class Region>
LOWLAT_DEVICE void take_routes(const Region& r) {
  const int num_pairs = r.a.rows * L::kSlots;
  if (!r.scores) {
    for (int i = r.lane; i < num_pairs; i += plat::kWarpLanes) {
      r.table.ids[i] = __ldg(r.a.ids + i);
      r.table.weights[i] = __ldg(r.a.weights + i);
    }
    __syncwarp();
    return;
  }
  // All packets of a lane are asked for at once.
  constexpr int kAll = L::kMaxRows * L::kRoutePackets,
                kOwn = (kAll + plat::kWarpLanes - 1) / plat::kWarpLanes;
  const int num = r.a.rows * L::kRoutePackets;
  uint4 packets[kOwn] = {};
  bool lost = false;
  for (int tries = 1;; ++tries) {
    bool here = true;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int number = i * plat::kWarpLanes + r.lane;
      if (number >= num) continue;
      packets[i] = load_packet(r.route_packet(number));
      here = here && packets[i].w == r.epoch;
    }
    if (__all_sync(plat::kAllLanes, here)) break;
    lost = tries % kTriesPerLook == 0 && r.watch.ended(kScoresEvent);
    lost = __any_sync(plat::kAllLanes, lost);
    if (lost) break;
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int number = i * plat::kWarpLanes + r.lane;
    if (number >= num) continue;
    const int row = number / L::kRoutePackets, slot = 2 * (number % L::kRoutePackets);
    const std::uint32_t ids[2] = {packets[i].x & 0xffffu, packets[i].x >> 16},
                        weights[2] = {packets[i].y, packets[i].z};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (slot + j >= L::kSlots) continue;
      const int at = row * L::kSlots + slot + j;
      // Where the step is lost, stay inside the arrays.
      const auto id = lost ? slot + j : static_cast<std::int32_t>(ids[j]);
      const float weight = __uint_as_float(weights[j]);
      r.table.ids[at] = id;
      r.table.weights[at] = weight;
      if (r.block_idx != 0) continue;
      if (r.a.out_ids != nullptr) r.a.out_ids[at] = id;
      if (r.a.out_weights != nullptr) r.a.out_weights[at] = weight;
    }
  }
  __syncwarp();
}

// ------------------------------------------------------------------------------------ the sum

// All threads of a block that owns columns: `value(row, n)`, y of the n-th of its band, stored and
// published. A value that has a member quad gives four neighbours at once.
template <class L, class Region, class Value>
LOWLAT_DEVICE void store_band(const Region& r, int first_row, const Value& value) {
  const MoeArgs& a = r.a;
  const stages::FaultPort fault = {a.fault.abort_words,
                                   static_cast<stages::StatusWords*>(a.fault.status),
                                   a.fault.tp_rank, a.fault.tp_size, a.fault.budget_ns};
  const stages::ExchangePort port = {reinterpret_cast<plat::TaggedWords* const*>(a.boxes.outboxes),
                                     fault, a.boxes.box_packets};
  const std::uint64_t epoch = a.boxes.outboxes != nullptr ? *a.boxes.epoch : 0;
  if (a.quads.tp_size > 0) {
    constexpr int kQuads = L::kBandRows / 4;
    const std::uint64_t quads_epoch = exchange_epoch(a.quads, a.quads_index);
#pragma unroll 1
    for (int i = plat::thread_idx(); i < a.rows * kQuads; i += L::kThreads) {
      const int row = i / kQuads, quad = i % kQuads;
      float v[4];
      if constexpr (requires { value.quad(row, 4 * quad, v); }) {
        value.quad(row, 4 * quad, v);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = value(row, 4 * quad + j);
      }
      publish_quad(a.quads, quads_epoch, first_row + row, r.block_idx * kQuads + quad,
                   L::kHidden / 4, v);
    }
  }
  if (a.out == nullptr && a.boxes.outboxes == nullptr) return;
  // A thread a value. Packets of three do not cross a warp: its last two lanes have nothing.
  constexpr int kWarpValues = plat::kWarpLanes / 3 * 3;
  constexpr int kRowValues = 3 * L::kPacketsPerBand;
  const int lane = r.lane, warp = plat::thread_idx() / plat::kWarpLanes;
  const int num_values = a.rows * kRowValues;
  for (int begin = warp * kWarpValues; begin < num_values;
       begin += L::kThreads / plat::kWarpLanes * kWarpValues) {
    const int i = begin + lane, row = i / kRowValues, n = i % kRowValues;
    const bool mine = lane < kWarpValues && i < num_values;
    float y = 0.0f;
    if (mine && n < L::kBandRows) {
      y = value(row, n);
      if (a.out != nullptr) {
        a.out[static_cast<std::size_t>(row) * L::kHidden + r.block_idx * L::kBandRows + n] = y;
      }
    }
    const std::uint32_t words[3] = {__float_as_uint(y),
                                    __float_as_uint(__shfl_down_sync(plat::kAllLanes, y, 1)),
                                    __float_as_uint(__shfl_down_sync(plat::kAllLanes, y, 2))};
    if (a.boxes.outboxes != nullptr && mine && lane % 3 == 0) {
      const std::int64_t packet =
          (static_cast<std::int64_t>(first_row + row) * L::kBands + r.block_idx) *
              L::kPacketsPerBand +
          n / 3;
      stages::publish_packet(port, epoch, packet, words);
    }
  }
}

// ------------------------------------------------------------------------------------ faults

// One thread of a block whose waits have ended without their event: says which and why.
template <class Region>
LOWLAT_DEVICE void report_fault(const Region& r) {
  const auto& fault = r.a.fault;
  if (fault.abort_words == nullptr) return;
  const stages::FaultPort port = {fault.abort_words,
                                  static_cast<stages::StatusWords*>(fault.status), fault.tp_rank,
                                  fault.tp_size, fault.budget_ns};
  const std::uint32_t event = r.table.stop & 0xffffu;
  if (r.table.stop >> 28 == static_cast<std::uint32_t>(Stop::aborted)) {
    // Another block of this rank has already said why.
    const std::uint32_t reason =
        plat::load_acquire<plat::Scope::system>(fault.abort_words[fault.tp_rank]);
    if (reason != 1u + static_cast<std::uint32_t>(fault.tp_rank)) {
      stages::note_abort(port, event, stages::StageId::moe_sum, r.epoch);
    }
  } else {
    stages::raise_fault(port, event, stages::StageId::moe_sum, fault.tp_rank, r.epoch);
  }
}

}  // namespace moe
}  // namespace lowlat::nvidia::fused

// fused/moe_parts.cuh: what the kernels of the mixture-of-experts region share (moe.cuh for few
// rows, moe_wide.cuh for many): the best experts of scores, this rank's sum to where it goes, and
// the report of a fault. `L` is a kernel's layout, `Region<L>` what each of its roles knows.
#pragma once

#include <cuda.h>

#include "fused/stream.cuh"
// The platform comes first.
#include "fused/exchange.cuh"
#include "fused/exchange_gate.cuh"
#include "fused/exchange_hop.cuh"
#include "fused/stamps.cuh"
#include "platform/contract.hpp"
#include "stages/exchange.hpp"
#include "stages/experts.hpp"
#include "stages/gate.hpp"

#include "fused/moe.hpp"

namespace lowlat::nvidia::fused {

namespace moe {

using lowlat::fused::MoeArgs;
using lowlat::fused::MoeLayout;
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

struct NothingChosen {
  LOWLAT_DEVICE void operator()(int, int) const {}
};
// The scores of a row's experts, in a warp: lane's packets are those of blocks lane, lane + 32, ..
template <class L>
struct Scores {
  static constexpr int kPackets = kScorers / plat::kWarpLanes;  // a lane, of a row
  static constexpr int kOwn = kPackets * L::kGateRows;          // experts of a lane
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

  // As their blocks sent them; false (all lanes) when they are late.
  template <class Region>
  LOWLAT_DEVICE bool receive(const Region& r, int row) {
    for (int tries = 1;; ++tries) {
      bool here = true;
#pragma unroll
      for (int i = 0; i < kPackets; ++i) {
        const uint4 packet = load_packet(r.score_packet(row, lane + i * plat::kWarpLanes));
        const std::uint32_t words[3] = {packet.x, packet.y, packet.z};
#pragma unroll
        for (int j = 0; j < L::kGateRows; ++j) {
          score[i * L::kGateRows + j] = __uint_as_float(words[j]);
        }
        here = here && packet.w == r.epoch;
      }
      if (__all_sync(plat::kAllLanes, here)) return true;
      const bool late = tries % kTriesPerLook == 0 && r.watch.ended(kScoresEvent);
      if (__any_sync(plat::kAllLanes, late)) return false;
    }
  }

  // The k best, with their scores; on_chosen(slot, id) is called as soon as one is known, by all
  // lanes. Ranks are compared as integers of the same order.
  template <class Chosen = NothingChosen>
  LOWLAT_DEVICE void select(std::int32_t* ids, float* scores, float nan_rank,
                            Chosen on_chosen = {}) const {
    std::uint32_t rank[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float sum = score[i] + bias[i];
      const std::uint32_t bits = __float_as_uint((sum != sum ? nan_rank : sum) + 0.0f);
      rank[i] = (bits >> 31) != 0u ? ~bits : bits | 0x8000'0000u;  // never 0: that is "taken"
    }
#pragma unroll 1
    for (int slot = 0; slot < L::kSlots; ++slot) {
      std::uint32_t best[3] = {}, id = kPoison;
      float best_score = 0.0f;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) best[i % 3] = max(best[i % 3], rank[i]);
      const std::uint32_t top =
          __reduce_max_sync(plat::kAllLanes, max(max(best[0], best[1]), best[2]));
#pragma unroll
      for (int i = kOwn - 1; i >= 0; --i) {  // ids ascend with i: the lowest of equals stays
        if (rank[i] == top) id = own_expert(i), best_score = score[i];
      }
      const std::uint32_t chosen = __reduce_min_sync(plat::kAllLanes, id);
      on_chosen(slot, static_cast<int>(chosen));
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

// By a warp: ids of a row and the scores that their weights are made of (or their weights, where
// those are given) into the block's table. A rehearsal does it with no scores, waiting for nothing.
// on_chosen: as of Scores::select, where the k best are taken.
template <class L, class Region, class Chosen = NothingChosen>
LOWLAT_DEVICE void route_row(const Region& r, int row, stages::GateRule rule,
                             bool rehearsal = false, Chosen on_chosen = {}) {
  const int at = row * L::kSlots;
  std::int32_t* ids = &r.table.ids[at];
  float* weights = &r.table.weights[at];
  if (r.a.routing != MoeRouting::gate && r.lane < L::kSlots && !rehearsal) {
    ids[r.lane] = __ldg(r.a.ids + at + r.lane);
    weights[r.lane] = r.scores ? 0.0f : __ldg(r.a.weights + at + r.lane);
  }
  if (!r.scores) return;
  Scores<L> scores = {r.lane, {}, {}};
  if (r.a.routing == MoeRouting::gate && !rehearsal) scores.load_bias(r.a, row);
  if (!rehearsal && !scores.receive(r, row)) {  // the step is lost; stay inside the arrays
    if (r.lane < L::kSlots) ids[r.lane] = r.lane;
    return;
  }
  __syncwarp();
  if (r.a.routing == MoeRouting::gate) {
    scores.select(ids, weights,
                  rule == stages::GateRule::v41 ? __int_as_float(0x7f80'0000) : -1e30f, on_chosen);
  } else {
    scores.find(ids, weights);
  }
  __syncwarp();
}

// By the same warp: the scores of a row become weights.
template <class L, class Region>
LOWLAT_DEVICE void weigh_row(const Region& r, int row, stages::GateSum sum_rule,
                             bool rehearsal = false) {
  if (!r.scores) return;
  const int at = row * L::kSlots;
  float* weights = &r.table.weights[at];
  const float total = stages::gate_total(weights, L::kSlots, sum_rule);
  float weight = 0.0f;
  if (r.lane < L::kSlots) weight = weights[r.lane] / total * kRoutedScaling;
  __syncwarp();
  if (r.lane < L::kSlots) {
    weights[r.lane] = weight;
    if (r.block_idx == 0 && !rehearsal) {
      if (r.a.out_ids != nullptr) r.a.out_ids[at + r.lane] = r.table.ids[at + r.lane];
      if (r.a.out_weights != nullptr) r.a.out_weights[at + r.lane] = weight;
    }
  }
  __syncwarp();
}

// ------------------------------------------------------------------------------------ the sum

// All threads of a block that owns columns: `value(row, n)`, y of the n-th of its band, stored and
// published. `quads_epoch`: exchange_epoch of the quads where it has been read before, or 0.
template <class L, class Region, class Value>
LOWLAT_DEVICE void store_band(const Region& r, int first_row, const Value& value,
                              std::uint64_t quads_epoch = 0) {
  const MoeArgs& a = r.a;
  const stages::FaultPort fault = {a.fault.abort_words,
                                   static_cast<stages::StatusWords*>(a.fault.status),
                                   a.fault.tp_rank, a.fault.tp_size, a.fault.budget_ns};
  const stages::ExchangePort port = {reinterpret_cast<plat::TaggedWords* const*>(a.boxes.outboxes),
                                     fault, a.boxes.box_packets};
  const std::uint64_t epoch = a.boxes.outboxes != nullptr ? *a.boxes.epoch : 0;
  if (a.quads.tp_size > 0) {
    static_assert(L::kBandRows % 4 == 0);
    if (quads_epoch == 0) quads_epoch = exchange_epoch(a.quads, a.quads_index);
    // A thread a value: short code, because it runs once.
#pragma unroll 1
    for (int i = plat::thread_idx();
         i / plat::kWarpLanes * plat::kWarpLanes < a.rows * L::kBandRows; i += L::kThreads) {
      const int row = i / L::kBandRows, n = i % L::kBandRows;
      const bool mine = row < a.rows;
      const float y = mine ? value(row, L::published(n)) : 0.0f;
      const float v[4] = {y, __shfl_down_sync(plat::kAllLanes, y, 1),
                          __shfl_down_sync(plat::kAllLanes, y, 2),
                          __shfl_down_sync(plat::kAllLanes, y, 3)};
      if (mine && i % 4 == 0) {
        publish_quad(a.quads, quads_epoch, first_row + row, L::quad_of(r.block_idx, n),
                     L::kHidden / 4, v);
      }
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
        a.out[static_cast<std::size_t>(row) * L::kHidden + L::column_of(r.block_idx, n)] = y;
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

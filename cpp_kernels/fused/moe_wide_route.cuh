// fused/moe_wide_route.cuh: routing of moe_wide.cuh: a row's experts from its scores, the choice of
// all rows, and the table of experts that every block works by.
#pragma once

#include "fused/moe_wide_layout.cuh"

namespace lowlat::nvidia::fused {

namespace moe::wide {

template <class L>
LOWLAT_DEVICE void sync_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(L::kConsumers * plat::kWarpLanes) : "memory");
}

// Block t routes row t for all: a hop more, but one row's selection instead of several, one after
// the other. By all consumers: a thread a packet, then an expert; then one warp chooses.
template <class L>
LOWLAT_DEVICE void route_own_row(const Region<L>& r, int warp, const Rules& rules) {
  const int row = r.block_idx;
  if (!r.scores || row >= r.a.rows) return;
  constexpr int kPackets = kScorers * L::kScorePackets;
  const int thread = warp * plat::kWarpLanes + r.lane;
  std::int32_t* ids = r.table.own_ids;
  Scores<L> scores = {r.lane, {}, {}};
  const bool by_score = r.a.routing == MoeRouting::gate;
  if (warp == 0) {
    if (by_score) {
      scores.load_bias(r.a, row);
    } else if (r.lane < L::kSlots) {
      ids[r.lane] = __ldg(r.a.ids + row * L::kSlots + r.lane);
    }
  }
  uint4 packet = {};
  for (int tries = 1;; ++tries) {
    if (thread < kPackets) packet = load_packet(r.score_packet(row, thread));
    if (__all_sync(plat::kAllLanes, thread >= kPackets || packet.w == r.epoch)) break;
    const bool late = tries % kTriesPerLook == 0 && r.watch.ended(kScoresEvent);
    if (__any_sync(plat::kAllLanes, late)) break;
  }
  // [part][expert], then the experts' scores, where the finisher has read this block's own.
  float* sums = r.partial(0);
  float* score = sums + L::kScoreParts * L::kExperts;
  static_assert((L::kScoreParts + 1) * L::kExperts * 4 <= L::kPartialBytes);
  sync_consumers<L>();
  if (thread < kPackets) {
    const int group = thread % L::kScoreGroups, n = thread / L::kScoreGroups;
    const int first = n % L::kScorePackets * 3;
    float* to = sums + n / L::kScorePackets * L::kExperts + group * L::kScoreRows + first;
    const std::uint32_t words[3] = {packet.x, packet.y, packet.z};
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (first + i < L::kScoreRows) to[i] = __uint_as_float(words[i]);
    }
  }
  sync_consumers<L>();
  if (thread < L::kExperts) {
    float sum = sums[thread];
#pragma unroll
    for (int part = 1; part < L::kScoreParts; ++part) sum += sums[part * L::kExperts + thread];
    score[thread] = stages::gate_score(sum, rules.rule);
  }
  sync_consumers<L>();
  if (warp == 0 && !r.watch.stopped()) {
    float* chosen = r.table.own_weights;
#pragma unroll
    for (int i = 0; i < Scores<L>::kOwn; ++i) scores.score[i] = score[scores.own_expert(i)];
    if (by_score) {
      scores.select(ids, chosen,
                    rules.rule == stages::GateRule::v41 ? __int_as_float(0x7f80'0000) : -1e30f);
    } else {
      scores.find(ids, chosen);
    }
    __syncwarp();
    // Packets {two ids, their weights, epoch}.
    const float total = stages::gate_total(chosen, L::kSlots, rules.sum_rule);
    if (r.lane < L::kRoutePackets) {
      const int slot = 2 * r.lane, other = slot + 1 < L::kSlots ? slot + 1 : slot;
      const auto weight = [&](int of) {
        return __float_as_uint(chosen[of] / total * kRoutedScaling);
      };
      const std::uint32_t words[3] = {
          static_cast<std::uint32_t>(ids[slot]) | static_cast<std::uint32_t>(ids[other]) << 16,
          weight(slot), weight(other)};
      plat::store_tagged(r.route_packet(row * L::kRoutePackets + r.lane), words, r.epoch);
    }
  }
}

// By all consumers: the routes of all rows, and pairs by expert, in entries. A thread a packet of
// two pairs, then a thread an expert. Where an expert has several entries, its pairs' order decides
// which is whose, and has to be the same in all blocks.
template <class L>
LOWLAT_DEVICE void make_table(const Region<L>& r, int warp) {
  auto& table = r.table;
  const int thread = warp * plat::kWarpLanes + r.lane;
  static_assert(L::kMaxRows * L::kRoutePackets <= L::kConsumers * plat::kWarpLanes);
  const int row = thread / L::kRoutePackets, slot = 2 * (thread % L::kRoutePackets);
  const int pair = row * L::kSlots + slot;
  const int own = row >= r.a.rows ? 0 : L::kSlots - slot < 2 ? L::kSlots - slot : 2;  // its pairs
  std::uint32_t id[2] = {}, rank[2] = {};
  if (r.scores) {
    uint4 packet = {};
    bool lost = false;
    for (int tries = 1;; ++tries) {
      if (own > 0) packet = load_packet(r.route_packet(thread));
      if (__all_sync(plat::kAllLanes, own == 0 || packet.w == r.epoch)) break;
      lost = tries % kTriesPerLook == 0 && r.watch.ended(kScoresEvent);
      lost = __any_sync(plat::kAllLanes, lost);
      if (lost) break;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i >= own) continue;
      // Where the step is lost, stay inside the arrays.
      id[i] = lost ? slot + i : packet.x >> 16 * i & 0xffffu;
      const float weight = __uint_as_float(i == 0 ? packet.y : packet.z);
      table.weights[pair + i] = weight;
      if (r.block_idx != 0) continue;
      if (r.a.out_ids != nullptr) r.a.out_ids[pair + i] = static_cast<std::int32_t>(id[i]);
      if (r.a.out_weights != nullptr) r.a.out_weights[pair + i] = weight;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i >= own) continue;
      id[i] = static_cast<std::uint32_t>(__ldg(r.a.ids + pair + i));
      table.weights[pair + i] = __ldg(r.a.weights + pair + i);
    }
  }
  // Which of its expert's pairs a pair is: by tickets, in any order. An expert that gets an entry
  // more has a number among those: in `first`, which is not needed yet.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (i >= own) continue;
    rank[i] = atomicAdd(&table.count[id[i]], 1u);
    if (rank[i] == L::kEntryPairs) {
      table.first[id[i]] = static_cast<std::uint16_t>(atomicAdd(&table.several, 1u));
    }
  }
  sync_consumers<L>();
  if (const int several = static_cast<int>(table.several); several > 0) {
    // In the pairs' order: of each such expert the set of its pairs, where the scores lay: all rows
    // are routed, so the finisher has read them.
    constexpr int kWords = L::kMaxPairs / 32, kMost = L::kMaxPairs / (L::kEntryPairs + 1);
    static_assert(L::kMaxPairs % 32 == 0 && L::kExperts <= L::kMaxPairs &&
                  kMost * kWords * 4 <= L::kPartialBytes);
    auto* sets = reinterpret_cast<std::uint32_t*>(r.partial(0));
    for (int i = thread; i < several * kWords; i += L::kConsumers * plat::kWarpLanes) sets[i] = 0;
    sync_consumers<L>();
    const auto set_of = [&](int i) { return sets + table.first[id[i]] * kWords; };
    const auto counts = [&](int i) { return i < own && table.count[id[i]] > L::kEntryPairs; };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (counts(i)) atomicOr(set_of(i) + (pair + i) / 32, 1u << (pair + i) % 32);
    }
    sync_consumers<L>();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!counts(i)) continue;
      const std::uint32_t* set = set_of(i);
      const int word = (pair + i) / 32;
      rank[i] = __popc(set[word] & ((1u << (pair + i) % 32) - 1));
#pragma unroll 1
      for (int k = 0; k < word; ++k) rank[i] += __popc(set[k]);
    }
  }
  // How many pairs (low half) and entries (high half) lie before an expert.
  const bool is_expert = thread < L::kExperts;
  const std::uint32_t count = is_expert ? table.count[thread] : 0;
  const std::uint32_t mine = count | (count + L::kEntryPairs - 1) / L::kEntryPairs << 16;
  std::uint32_t place = mine;
#pragma unroll
  for (int offset = 1; offset < plat::kWarpLanes; offset *= 2) {
    const std::uint32_t theirs = __shfl_up_sync(plat::kAllLanes, place, offset);
    if (r.lane >= offset) place += theirs;
  }
  if (r.lane == plat::kWarpLanes - 1) table.warp_sums[warp] = place;
  sync_consumers<L>();
  place += __reduce_add_sync(plat::kAllLanes, r.lane < warp ? table.warp_sums[r.lane] : 0u);
  if (thread == L::kExperts - 1) {
    table.num_entries = static_cast<std::int32_t>(place >> 16);
    table.first[place >> 16] = static_cast<std::uint16_t>(place & 0xffffu);
  }
  place -= mine;
  if (is_expert) {
    const std::uint32_t first = place & 0xffffu;
    table.count[thread] = first;  // from here on
#pragma unroll 1
    for (std::uint32_t k = 0, entry = place >> 16; k < count; k += L::kEntryPairs, ++entry) {
      table.expert[entry] = static_cast<std::uint16_t>(thread);
      table.first[entry] = static_cast<std::uint16_t>(first + k);
    }
  }
  sync_consumers<L>();
  if (thread == 0) sm90::barrier_arrive(&r.barriers.entries);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (i < own) table.sorted[table.count[id[i]] + rank[i]] = static_cast<std::uint16_t>(pair + i);
  }
  sync_consumers<L>();
  if (thread == 0) sm90::barrier_arrive(&r.barriers.table);
}

}  // namespace moe::wide
}  // namespace lowlat::nvidia::fused

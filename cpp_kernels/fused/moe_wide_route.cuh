// fused/moe_wide_route.cuh: routing of moe_wide.cuh: a row's experts from its scores, the choice of
// all rows, and the table of experts that every block works by.
#pragma once

#include "fused/moe_wide_layout.cuh"

namespace lowlat::nvidia::fused {

namespace moe::wide {

// Block t routes row t for all: a hop more, but one row's selection instead of several, one after
// the other. By all consumers: a thread a packet, then an expert; then one warp chooses.
template <class L>
LOWLAT_DEVICE void route_own_row(const Region<L>& r, int warp, const Rules& rules) {
  const int row = r.block_idx;
  if (!r.scores || row >= r.a.rows) return;
  const auto sync = [] {
    asm volatile("bar.sync 1, %0;" ::"n"(L::kConsumers * plat::kWarpLanes) : "memory");
  };
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
  sync();
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
  sync();
  if (thread < L::kExperts) {
    float sum = sums[thread];
#pragma unroll
    for (int part = 1; part < L::kScoreParts; ++part) sum += sums[part * L::kExperts + thread];
    score[thread] = stages::gate_score(sum, rules.rule);
  }
  sync();
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
  // The sums' memory is the shared tile's next.
  if (r.shared_tiles() > 0) sync();
}

// By a warp: ids and weights of all rows into the block's table, in every block the same: as they
// were told, or as they were given; block 0 stores them.
template <class L>
LOWLAT_DEVICE void take_routes(const Region<L>& r) {
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

// By a warp: the routes of all rows, and pairs by expert, in entries; an expert's pairs keep their
// order.
template <class L>
LOWLAT_DEVICE void make_table(const Region<L>& r) {
  take_routes(r);
  auto& table = r.table;
  constexpr int kOwnPairs = L::kMaxPairs / plat::kWarpLanes,
                kOwnExperts = L::kExperts / plat::kWarpLanes;
  static_assert(L::kMaxPairs % plat::kWarpLanes == 0 && L::kExperts % plat::kWarpLanes == 0);
  const int num_pairs = r.a.rows * L::kSlots;
  const std::uint32_t before = (1u << r.lane) - 1;
  std::uint32_t place[kOwnPairs];  // expert | rank << 16
#pragma unroll
  for (int i = 0; i < kOwnPairs; ++i) {
    const int pair = i * plat::kWarpLanes + r.lane;
    if (i * plat::kWarpLanes >= num_pairs) break;
    // Lanes without a pair have an expert that nobody has.
    const int id = pair < num_pairs ? table.ids[pair] : L::kExperts + r.lane;
    const std::uint32_t same = __match_any_sync(plat::kAllLanes, id);
    const std::uint32_t count = pair < num_pairs ? table.count[id] : 0;
    __syncwarp();
    if (pair < num_pairs && (same & before) == 0) table.count[id] = count + __popc(same);
    place[i] = static_cast<std::uint32_t>(id) | (count + __popc(same & before)) << 16;
    __syncwarp();
  }
  // How many pairs (low half) and entries (high half) lie before a lane's experts.
  std::uint32_t own = 0;
#pragma unroll
  for (int i = 0; i < kOwnExperts; ++i) {
    const std::uint32_t count = table.count[r.lane * kOwnExperts + i];
    own += count | (count + L::kEntryPairs - 1) / L::kEntryPairs << 16;
  }
  std::uint32_t sum = own;
#pragma unroll
  for (int offset = 1; offset < plat::kWarpLanes; offset *= 2) {
    const std::uint32_t theirs = __shfl_up_sync(plat::kAllLanes, sum, offset);
    if (r.lane >= offset) sum += theirs;
  }
  if (r.lane == plat::kWarpLanes - 1) {
    table.num_entries = static_cast<std::int32_t>(sum >> 16);
    table.first[sum >> 16] = static_cast<std::uint16_t>(num_pairs);
  }
  std::uint32_t first = (sum - own) & 0xffffu, entry = (sum - own) >> 16;
#pragma unroll 1
  for (int i = 0; i < kOwnExperts; ++i) {
    const int expert = r.lane * kOwnExperts + i;
    const std::uint32_t count = table.count[expert];
    table.count[expert] = first;  // from here on: where its pairs begin
    for (std::uint32_t k = 0; k < count; k += L::kEntryPairs, ++entry) {
      table.expert[entry] = static_cast<std::uint16_t>(expert);
      table.first[entry] = static_cast<std::uint16_t>(first + k);
    }
    first += count;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kOwnPairs; ++i) {
    const int pair = i * plat::kWarpLanes + r.lane;
    if (pair >= num_pairs) break;
    table.sorted[table.count[place[i] & 0xffffu] + (place[i] >> 16)] =
        static_cast<std::uint16_t>(pair);
  }
  __syncwarp();
  if (r.lane == 0) sm90::barrier_arrive(&r.barriers.table);
}

}  // namespace moe::wide
}  // namespace lowlat::nvidia::fused

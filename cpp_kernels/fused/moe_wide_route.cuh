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
  if (warp == 0) {
#pragma unroll
    for (int i = 0; i < Scores<L>::kOwn; ++i) scores.score[i] = score[scores.own_expert(i)];
  }
  sync_consumers<L>();  // from here on the sums are others'
  if (warp == 0 && !r.watch.stopped()) {
    float* chosen = r.table.own_weights;
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

// Who makes the table: warps that have nothing else to do meanwhile.
template <class L>
LOWLAT_DEVICE void sync_makers() {
  asm volatile("bar.sync 3, %0;" ::"n"(L::kMakers * plat::kWarpLanes) : "memory");
}

// By the makers, `maker` among them: the routes of all rows, and pairs by expert, in entries. A
// thread has some packets of two pairs, then some experts. Where an expert has several entries, its
// pairs' order decides which is whose, and has to be the same in all blocks.
template <class L>
LOWLAT_DEVICE void make_table(const Region<L>& r, int maker) {
  auto& table = r.table;
  constexpr int kThreads = L::kMakers * plat::kWarpLanes;
  constexpr int kPackets = (L::kMaxRows * L::kRoutePackets + kThreads - 1) / kThreads;
  const int thread = maker * plat::kWarpLanes + r.lane;
  const int num_packets = r.a.rows * L::kRoutePackets;
  // Of this thread's n-th packet: its first pair, and how many it has.
  const auto packet_of = [&](int n) { return thread + n * kThreads; };
  const auto pair_of = [&](int n) {
    return packet_of(n) / L::kRoutePackets * L::kSlots + 2 * (packet_of(n) % L::kRoutePackets);
  };
  const auto pairs_of = [&](int n) {
    const int left = L::kSlots - 2 * (packet_of(n) % L::kRoutePackets);
    return packet_of(n) >= num_packets ? 0 : left < 2 ? left : 2;
  };
  std::uint32_t id[kPackets][2] = {}, rank[kPackets][2] = {};
  if (r.scores) {
    uint4 packet[kPackets] = {};
    bool lost = false;
    for (int tries = 1;; ++tries) {
      bool here = true;
#pragma unroll
      for (int n = 0; n < kPackets; ++n) {
        if (packet_of(n) < num_packets) packet[n] = load_packet(r.route_packet(packet_of(n)));
      }
#pragma unroll
      for (int n = 0; n < kPackets; ++n) {
        here = here && (packet_of(n) >= num_packets || packet[n].w == r.epoch);
      }
      if (__all_sync(plat::kAllLanes, here)) break;
      lost = tries % kTriesPerLook == 0 && r.watch.ended(kScoresEvent);
      lost = __any_sync(plat::kAllLanes, lost);
      if (lost) break;
    }
#pragma unroll
    for (int n = 0; n < kPackets; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i >= pairs_of(n)) continue;
        const int pair = pair_of(n) + i;
        // Where the step is lost, stay inside the arrays.
        id[n][i] = lost ? pair % L::kSlots : packet[n].x >> 16 * i & 0xffffu;
        const float weight = __uint_as_float(i == 0 ? packet[n].y : packet[n].z);
        table.weights[pair] = weight;
        if (r.block_idx != 0) continue;
        if (r.a.out_ids != nullptr) r.a.out_ids[pair] = static_cast<std::int32_t>(id[n][i]);
        if (r.a.out_weights != nullptr) r.a.out_weights[pair] = weight;
      }
    }
  } else {
#pragma unroll
    for (int n = 0; n < kPackets; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i >= pairs_of(n)) continue;
        const int pair = pair_of(n) + i;
        id[n][i] = static_cast<std::uint32_t>(__ldg(r.a.ids + pair));
        table.weights[pair] = __ldg(r.a.weights + pair);
      }
    }
  }
  // Which of its expert's pairs a pair is: by tickets, in any order. An expert that gets an entry
  // more has a number among those: in `first`, which is not needed yet.
#pragma unroll
  for (int n = 0; n < kPackets; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i < pairs_of(n)) rank[n][i] = atomicAdd(&table.count[id[n][i]], 1u);
    }
  }
#pragma unroll
  for (int n = 0; n < kPackets; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i < pairs_of(n) && rank[n][i] == L::kEntryPairs) {
        table.first[id[n][i]] = static_cast<std::uint16_t>(atomicAdd(&table.several, 1u));
      }
    }
  }
  sync_makers<L>();
  if (const int several = static_cast<int>(table.several); several > 0) {
    // In the pairs' order: of each such expert the set of its pairs, where the ring's first use
    // comes later.
    constexpr int kWords = L::kMaxPairs / 32, kMost = L::kMaxPairs / (L::kEntryPairs + 1);
    static_assert(L::kMaxPairs % 32 == 0 && L::kExperts <= L::kMaxPairs &&
                  kMost * kWords * 4 <= L::kSlotBytes && L::kFirstSlot > 0);
    auto* sets = reinterpret_cast<std::uint32_t*>(r.slot(L::slot_of(0)));
    for (int i = thread; i < several * kWords; i += kThreads) sets[i] = 0;
    sync_makers<L>();
    const auto set_of = [&](std::uint32_t expert) { return sets + table.first[expert] * kWords; };
    const auto counts = [&](int n, int i) {
      return i < pairs_of(n) && table.count[id[n][i]] > L::kEntryPairs;
    };
#pragma unroll
    for (int n = 0; n < kPackets; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int pair = pair_of(n) + i;
        if (counts(n, i)) atomicOr(set_of(id[n][i]) + pair / 32, 1u << pair % 32);
      }
    }
    sync_makers<L>();
#pragma unroll
    for (int n = 0; n < kPackets; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!counts(n, i)) continue;
        const std::uint32_t* set = set_of(id[n][i]);
        const int pair = pair_of(n) + i, word = pair / 32;
        rank[n][i] = __popc(set[word] & ((1u << pair % 32) - 1));
#pragma unroll 1
        for (int k = 0; k < word; ++k) rank[n][i] += __popc(set[k]);
      }
    }
    sm90::fence_async_shared();  // the producer's copies come here
  }
  // How many pairs (low half) and entries (high half) lie before a thread's experts.
  constexpr int kOwn = (L::kExperts + kThreads - 1) / kThreads;
  std::uint32_t count[kOwn], mine = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int expert = thread * kOwn + i;
    count[i] = expert < L::kExperts ? table.count[expert] : 0;
    mine += count[i] | (count[i] + L::kEntryPairs - 1) / L::kEntryPairs << 16;
  }
  std::uint32_t place = mine;
#pragma unroll
  for (int offset = 1; offset < plat::kWarpLanes; offset *= 2) {
    const std::uint32_t theirs = __shfl_up_sync(plat::kAllLanes, place, offset);
    if (r.lane >= offset) place += theirs;
  }
  if (r.lane == plat::kWarpLanes - 1) table.warp_sums[maker] = place;
  sync_makers<L>();
#pragma unroll
  for (int i = 0; i < L::kMakers; ++i) place += i < maker ? table.warp_sums[i] : 0u;
  if (thread == kThreads - 1) {
    table.num_entries = static_cast<std::int32_t>(place >> 16);
    table.first[place >> 16] = static_cast<std::uint16_t>(place & 0xffffu);
  }
  place -= mine;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int expert = thread * kOwn + i;
    if (expert >= L::kExperts) break;
    const std::uint32_t first = place & 0xffffu;
    table.count[expert] = first;  // from here on
#pragma unroll 1
    for (std::uint32_t k = 0, entry = place >> 16; k < count[i]; k += L::kEntryPairs, ++entry) {
      table.expert[entry] = static_cast<std::uint16_t>(expert);
      table.first[entry] = static_cast<std::uint16_t>(first + k);
    }
    place += count[i] | (count[i] + L::kEntryPairs - 1) / L::kEntryPairs << 16;
  }
  sync_makers<L>();
  if (thread == 0) sm90::barrier_arrive(&r.barriers.entries);
#pragma unroll
  for (int n = 0; n < kPackets; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i >= pairs_of(n)) continue;
      table.sorted[table.count[id[n][i]] + rank[n][i]] = static_cast<std::uint16_t>(pair_of(n) + i);
    }
  }
  sync_makers<L>();
  if (thread == 0) sm90::barrier_arrive(&r.barriers.table);
}

}  // namespace moe::wide
}  // namespace lowlat::nvidia::fused

// moe_region_mxfp4_sm90: router, routed MXFP4 experts and shared expert for few rows, one launch.
//
// Math         z = x gate^T; ids and weights as stages/gate.hpp. For pair p (a row, a slot) of
//              expert e: h_p = swiglu(bf(w1_e x), bf(w3_e x)), d_p = bf(weight_p * (w2_e h_p));
//              shared: the same with x and h quantised. y = bf(sum of a row's d_p) + bf(shared)
// Shapes       fused/moe.hpp; T 1 .. 8
// Rounding     as stages/experts.hpp (Marlin's): gate, up, silu, h, d and the sum of slots to
//              bf16; all other sums fp32
// Bytes        each weight of a chosen expert once: shape::moe_weight_bytes
// Floor        V4.1, TP4, T = 6: 175 MB, 37.7 us at 4.65 TB/s. The bench prints the share reached.
// Launch       one block an SM (128 at least): kConsumers warps, a producer, a finisher, two
//              routers. Weights are on their way before the kernels before have ended.
// Ordering     below
// Determinism  fixed trees: K of the first product is split over the consumers, of the second over
//              kParts, both added in their order; slots in slot order. Bitwise run to run.
// Meaning      reference/experts.cpp, reference/gate.cpp. Bound: rel_l2 <= 1e-2
//
// How the work lies. First product: a tile is 8 values of h, rows i .. i + 7 of w1 and of w3 as the
// 16 weight rows of an mma, so that gate and up of one value meet in one warp. Blocks draw tiles in
// the order of experts, so that slow ones take fewer; all consumers work on one tile, warp w on the
// w-th slice of K. An mma's columns are the rows, whoever chose the expert, and a warp holds x's
// slice in registers for the whole launch. Codes are placed in fp16 fields by shifts alone; a group
// of 32 is summed by itself and its scale applied to the sums. The finisher adds the slices,
// applies SwiGLU and sends h to all blocks. Second product: block b owns a band of output columns
// for all experts, so a row's slots never leave the block; warps take (expert, part of I). The
// first experts' h was finished while later tiles were multiplied, so the second product starts
// without a wait. Weights that do not depend on the routing (router, shared expert) stream while it
// is being decided.
//
// Ordering     scores   [row][block] packet {3 scores, epoch}: written by its block's finisher,
//                       read by block t for row t. Written again by the next launch, which begins
//                       after this one has ended (wait_for_predecessors).
//              routes   [row] packets {two ids, their weights, epoch}: written by block t's second
//                       router, read by every block's first; again as the scores.
//              ticket   a counter that every block draws from until it draws no tile: 0 between
//                       launches. The tile of a use of the ring is in the table before the use's
//                       `full`; a consumer sees it after that, the finisher after their sums.
//              hidden   [epoch & 1][pair] 16-byte chunks of 8 values: written once by the tile's
//                       finisher over a pattern that no result has (kPoison), read by all blocks
//                       until it is not that pattern: payload and arrival in one access. The other
//                       parity is filled with the pattern meanwhile: its readers ended with the
//                       launch before, its writers begin with the next.
//              epoch    one word a block, read at the start, advanced at the end by its own block.
//              slots    see fused/stream.cuh. The second product's pieces lie in the slots of the
//                       first's ring; a piece is first filled after its slot's last tile was read.
//              sums     partial[] full: every consumer; empty: the finisher's. `second` lies over
//                       them: a warp writes there after it has seen every partial buffer free.
//              late     waits for other blocks watch one deadline and the abort word; nothing is
//                       stored or published after a fault.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "fused/moe_parts.cuh"

namespace lowlat::nvidia::fused {

namespace moe {

inline constexpr int kBands = kScorers;  // blocks that own columns, and that score experts
inline constexpr int kTileRows = 8;
inline constexpr int kHiddenShift = 8;  // of routed h

// Sizes of one compiled shape.
template <class S, int kConsumers_>
struct Layout {
  static constexpr int kConsumers = kConsumers_;  // warps
  static constexpr int kProducer = kConsumers, kFinisher = kConsumers + 1;
  // Two warps route, so that the shared expert's tiles are multiplied meanwhile, and its second
  // product while the routed first one is under way.
  static constexpr int kFirstRouter = kFinisher + 1, kRouters = 2;
  // Registers are given by groups of four warps.
  static constexpr int kThreads = (kConsumers + 4) * plat::kWarpLanes;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8, kOtherRegisters = 64;
  static constexpr int kConsumerRegisters =
      (kLaunchRegisters + (kLaunchRegisters - kOtherRegisters) * 4 / kConsumers) / 8 * 8;
  static_assert(kConsumers % 4 == 0);
  static constexpr int kBands = moe::kBands;
  static constexpr int kHidden = S::kHidden, kInner = S::kIntermediateLocal;
  static constexpr int kExperts = S::kNumExperts, kSlots = S::kExpertsPerToken;
  static constexpr int kBlock = S::kScaleBlock;
  static constexpr int kMaxRows = 8;
  static constexpr int kMaxPairs = kMaxRows * kSlots;

  // First product.
  static constexpr int kSlice = kHidden / kConsumers;                  // of K, a warp
  static constexpr int kBlockK = 32, kSliceBlocks = kSlice / kBlockK;  // groups of one scale
  // A warp's slice is every kConsumers-th scale block of the activations, so that its places in a
  // tile differ by constants: group `block_group(i)` from the warp's first is its block i.
  static constexpr int kSpan = kBlock / kBlockK;  // groups of a scale block
  static constexpr int block_group(int i) { return (i / kSpan * kConsumers) * kSpan + i % kSpan; }
  // A tile's codes lie as the tensor copy leaves them: gate, then up, each [kHidden / 256] chunks
  // of 8 rows of 128 bytes, whose 16-byte units are exchanged: unit u of row i is at u ^ i.
  static constexpr int kChunkUnits = 8, kChunkBytes = kTileRows * 16 * kChunkUnits;
  static constexpr int kHalfTile = kTileRows * kHidden / 2;
  static constexpr int kScaleRow = kHidden / 32;
  static constexpr int kTileBytes = 2 * kTileRows * (kHidden / 2 + kScaleRow);
  static constexpr int kSlotBytes = round_up(kTileBytes, 1024);
  static constexpr int kSharedPitch = kHidden + 32;  // e4m3 row
  static constexpr int kGateRows = kExperts / kBands;
  static constexpr int kGatePitch = 2 * kHidden + 16;  // bf16 row
  static constexpr int kTiles = kInner / kTileRows;    // of an expert
  // A block's first tiles are given, the others it draws, so that blocks whose copies are slow take
  // fewer.
  static constexpr int kGiven = 2;
  static constexpr int kWindow = 16;  // tiles that are remembered, more than ring and sums hold
  // Second product.
  static constexpr int kBandRows = kHidden / kBands;
  static constexpr int kMTiles = (kBandRows + 15) / 16;
  static constexpr int kInnerBlocks = kInner / 64;
  static constexpr int kParts = kInnerBlocks % 3 == 0 ? 3 : 4;
  static constexpr int kPartGroups = 2 * kInnerBlocks / kParts;  // of 32, of one scale each
  static constexpr int kInnerRow = kInner / 2, kInnerScaleRow = kInner / 32;
  static constexpr int kBandBytes = kBandRows * (kInnerRow + kInnerScaleRow);
  static constexpr int kPieceBytes = round_up(kBandBytes, 128);
  static constexpr int kPieces = kSlotBytes / kPieceBytes;  // in a slot
  static constexpr int kPacketsPerBand = (kBandRows + 2) / 3;
  static constexpr int kBandScaleRows = (kBandRows + kBlock - 2) / kBlock + 1;  // at most
  static constexpr int kBandScaleColumns = kInner / kBlock;

  static_assert(kConsumers % 8 == 0 && kHidden % 256 == 0 && (kSpan == 1 || kSpan == 4));
  static_assert(kSlice % (2 * kBlockK) == 0 && kHidden % kConsumers == 0 && kInner % 64 == 0 &&
                kExperts % kBands == 0);
  static_assert(kTiles % 2 == 0 && kInnerBlocks % kParts == 0 && kBandRows % kTileRows == 0 &&
                kPieces >= 1);
  static_assert(kGateRows <= 3, "one packet holds a block's scores of a row");
  static_assert(kTileRows * kSharedPitch <= kSlotBytes && kGateRows * kGatePitch <= kSlotBytes);
  static_assert(kBandRows * kInnerRow % 16 == 0 && kBandRows * kInnerScaleRow % 16 == 0);
  static_assert(kSlice % kBlock == 0, "an activation's scale group is one warp's");

  // Shared memory, in bytes from its start.
  static constexpr int kPartialBytes = kConsumers * kColumns * 2 * kTileRows * 4;
  static constexpr int kBuffers = kConsumers < 16 ? 4 : 2;  // of partial sums
  static constexpr int kSecondRows = kMaxPairs + kMaxRows;  // pairs, then the shared expert's rows
  static constexpr int kPairFloats = kParts * kMaxPairs * kBandRows;
  // The pairs' sums of the second product lie over the partial sums, the shared expert's behind
  // both.
  static constexpr int kPartialFloats = kBuffers * kPartialBytes / 4;
  static constexpr int kSharedSums = kPartialFloats > kPairFloats ? kPartialFloats : kPairFloats;
  static constexpr int kSumsBytes = 4 * (kSharedSums + kParts * kMaxRows * kBandRows);
  static constexpr int kBandOffset = 0;
  static constexpr int kSumsOffset = round_up(kBandOffset + kBandRows * kInner, 128);
  static constexpr int kTableOffset = round_up(kSumsOffset + kSumsBytes, 128);
  struct alignas(16) Table {
    std::int32_t ids[kMaxPairs];
    float weights[kMaxPairs];
    std::int32_t num_experts;
    std::uint32_t stop;  // Watch
    std::uint32_t chosen[kExperts / 32];
    // Masks of an expert's pairs, and a row that this block routes for all.
    std::uint32_t pairs_of[2][kMaxPairs];
    std::int32_t own_ids[kSlots];
    float own_weights[kSlots];
    std::uint16_t expert[kMaxPairs];     // ascending, one entry each
    std::uint16_t first[kMaxPairs + 1];  // of an expert in `sorted`
    std::uint16_t sorted[kMaxPairs];     // pairs by expert, then by pair
    std::uint16_t place[kMaxPairs];      // of a pair in `sorted`
    // Of a use of the ring: its tile, and whether it is one.
    std::int32_t tile[kWindow];
    std::uint8_t is_tile[kWindow];
    std::uint8_t band_scales[kBandScaleRows * kBandScaleColumns];  // of the shared w2 band
  };
  static constexpr int kBarrierOffset =
      round_up(kTableOffset + static_cast<int>(sizeof(Table)), 16);
  static constexpr int kMaxSlots = 3;  // more in flight is slower, see docs/bench
  struct Barriers {
    std::uint64_t full[kMaxSlots], empty[kMaxSlots];
    std::uint64_t piece_full[kMaxSlots * kPieces], piece_empty[kMaxSlots * kPieces];
    std::uint64_t band_full, table, sums_full[kBuffers], sums_empty[kBuffers];
  };
  // Places in them, for loops that address shared memory themselves.
  static constexpr int kStopOffset = offsetof(Table, stop),
                       kIsTileOffset = offsetof(Table, is_tile);
  static constexpr int kFullBarriers = offsetof(Barriers, full);
  static constexpr int kEmptyBarriers = offsetof(Barriers, empty);
  static constexpr int kPieceFullBarriers = offsetof(Barriers, piece_full);
  static constexpr int kPieceEmptyBarriers = offsetof(Barriers, piece_empty);
  static constexpr int kSumsFullBarriers = offsetof(Barriers, sums_full);
  static constexpr int kSumsEmptyBarriers = offsetof(Barriers, sums_empty);
  static constexpr int kRingOffset =
      round_up(kBarrierOffset + static_cast<int>(sizeof(Barriers)), 1024);
  static constexpr int kFit = (kSmemLimit - kRingOffset) / kSlotBytes;
  static constexpr int kRing = kFit < kMaxSlots ? kFit : kMaxSlots;
  static_assert(kRing >= 2, "the shared expert's tile takes two slots");
  static constexpr int kRingPieces = kRing * kPieces;
  // Experts from one item of a warp to its next, at most.
  static constexpr int kReach = (kConsumers + kParts - 1) / kParts;
  static_assert(kReach <= kRingPieces, "a warp is at most one turn of the ring ahead");
  static constexpr int kSmemBytes = kRingOffset + kRing * kSlotBytes;

  // Workspace, in bytes from its start.
  static constexpr int kMaxGrid = 1024;
  static constexpr std::size_t kHiddenRow = kInner * 2;
  static constexpr std::size_t kHiddenBytes = kSecondRows * kHiddenRow;  // of one parity
  static constexpr std::size_t kTicketOffset = 4 * kMaxGrid;             // after the epochs
  static constexpr std::size_t kHiddenOffset = kTicketOffset + 256;
  static constexpr std::size_t kScoresOffset = kHiddenOffset + 2 * kHiddenBytes;
  static constexpr std::size_t kScoresBytes = std::size_t{16} * kBands * kMaxRows;
  static constexpr int kRoutePackets = (kSlots + 1) / 2;  // of a row: two ids and their weights
  static constexpr std::size_t kRoutesOffset = kScoresOffset + kScoresBytes;
  static constexpr std::size_t kRoutesBytes = round_up(16 * kMaxRows * kRoutePackets, 256);
  static constexpr std::size_t kWorkspaceBytes = kRoutesOffset + kRoutesBytes;
};

// The copies of tiles: w1 and w3 as [H / 256][E I][128 bytes].
struct TileMaps {
  CUtensorMap gate, up;
};

// What every role of a block knows.
template <class L>
struct Region {
  const MoeArgs& a;
  unsigned char* smem;
  typename L::Table& table;
  typename L::Barriers& barriers;
  unsigned char* workspace;
  std::uint32_t epoch;
  Watch watch;
  int block_idx, num_blocks, lane;
  bool scores, shared;  // this launch has a router, a shared expert
  bool early;           // this block has begun before x is there

  LOWLAT_DEVICE std::uint32_t slot_address(int slot) const {
    return sm90::shared_address(smem) + L::kRingOffset + slot * L::kSlotBytes;
  }
  LOWLAT_DEVICE float* partial(int buffer) const {
    return reinterpret_cast<float*>(smem + L::kSumsOffset + buffer * L::kPartialBytes);
  }
  // [kParts][kMaxPairs][kBandRows], and at kSharedSums [kParts][kMaxRows][kBandRows].
  LOWLAT_DEVICE float* second() const { return reinterpret_cast<float*>(smem + L::kSumsOffset); }
  // A part's sums of the band for a row of h: a pair in the table's order, or row t of the shared.
  template <bool kShared>
  LOWLAT_DEVICE float* second_sums(int part, int row) const {
    constexpr int kRows = kShared ? L::kMaxRows : L::kMaxPairs;
    return second() + (kShared ? L::kSharedSums : 0) +
           (static_cast<std::size_t>(part) * kRows + row) * L::kBandRows;
  }
  // Row `row` of h: a pair, or kMaxPairs + t of the shared expert.
  LOWLAT_DEVICE unsigned char* hidden(std::uint32_t parity, int row) const {
    return workspace + L::kHiddenOffset + parity * L::kHiddenBytes + row * L::kHiddenRow;
  }
  LOWLAT_DEVICE plat::TaggedWords* score_packet(int row, int block) const {
    return reinterpret_cast<plat::TaggedWords*>(workspace + L::kScoresOffset) + row * kBands +
           block;
  }
  // What only exchanges with other blocks need: not waited for before x is asked for.
  LOWLAT_DEVICE void read_epoch() {
    epoch = *(reinterpret_cast<const std::uint32_t*>(a.workspace) + block_idx) + 1;
    watch.deadline_ns = plat::clock_ns() + a.fault.budget_ns;
    if (a.fault.abort_words != nullptr) watch.abort_word = a.fault.abort_words[a.fault.tp_rank];
  }
  LOWLAT_DEVICE plat::TaggedWords* route_packet(int i) const {
    return reinterpret_cast<plat::TaggedWords*>(workspace + L::kRoutesOffset) + i;
  }
  LOWLAT_DEVICE bool gates() const { return scores && block_idx < kBands; }

  LOWLAT_DEVICE int shared_tiles() const {
    return shared ? (L::kTiles - block_idx + num_blocks - 1) / num_blocks : 0;
  }
};

// Until x is there; all but the producer, who reads none of it.
template <class L>
LOWLAT_DEVICE void wait_for_x(const Region<L>& r) {
  const Gate& gate = r.a.before;
  if (gate.word == nullptr) {
    sm90::wait_for_predecessors();
    return;
  }
  if (plat::thread_idx() == 0) poll_gate(gate);
  asm volatile("bar.sync 2, %0;" ::"n"(L::kThreads - plat::kWarpLanes) : "memory");
}
// Code that runs for the first time is slow, and a block that is early has time: it runs what
// follows on x once before, on other numbers. The first of two passes, or the only one.
template <class L>
LOWLAT_DEVICE int first_pass(const Region<L>& r) {
  return r.early && r.scores ? 0 : 1;
}
LOWLAT_DEVICE void keep(float value) { asm volatile("" ::"f"(value)); }

// ------------------------------------------------------------------------------------ producer

template <class L>
struct Producer {
  const Region<L>& r;
  const TileMaps& maps;
  int uses = 0;    // of the first product's ring
  int pieces = 0;  // of the second's

  // Waits until the next slot is free and says what it will hold.
  LOWLAT_DEVICE bool begin_slot(std::uint32_t bytes) {
    const int slot = uses % L::kRing;
    if (uses >= L::kRing &&
        !barrier_wait(&r.barriers.empty[slot], (uses / L::kRing - 1) & 1, r.watch)) {
      return false;
    }
    if (r.lane == 0) sm90::barrier_arrive_expect(&r.barriers.full[slot], bytes);
    __syncwarp();
    ++uses;
    return true;
  }
  LOWLAT_DEVICE void load(std::uint32_t offset, const void* src, std::uint32_t bytes) const {
    const int slot = (uses - 1) % L::kRing;
    sm90::bulk_load(r.smem + L::kRingOffset + slot * L::kSlotBytes + offset, src, bytes,
                    &r.barriers.full[slot], sm90::CacheHint::evict_first);
  }

  // What does not depend on the routing, or on anything before this kernel.
  LOWLAT_DEVICE bool run_early() {
    const auto& w = r.a.w;
    if (r.lane == 0) {
      sm90::tensor_prefetch(&maps.gate);
      sm90::tensor_prefetch(&maps.up);
    }
    if (r.gates()) {
      if (!begin_slot(L::kGateRows * 2 * L::kHidden)) return false;
      if (r.lane < L::kGateRows) {
        load(r.lane * L::kGatePitch,
             w.gate + (static_cast<std::size_t>(r.block_idx) * L::kGateRows + r.lane) * L::kHidden,
             2 * L::kHidden);
      }
    }
    // The router's rows and x decide when routing ends: nothing competes with them.
    if (r.gates() && !barrier_wait(&r.barriers.full[0], 0, r.watch)) return false;
    for (int n = 0; n < r.shared_tiles(); ++n) {
      const int tile = n * r.num_blocks + r.block_idx;
#pragma unroll 1
      for (int up = 0; up < 2; ++up) {
        if (!begin_slot(kTileRows * L::kHidden)) return false;
        if (r.lane < kTileRows) {
          load(r.lane * L::kSharedPitch,
               (up ? w.shared_w3 : w.shared_w1).codes +
                   static_cast<std::size_t>(tile * kTileRows + r.lane) * L::kHidden,
               L::kHidden);
        }
      }
    }
    if (r.shared && r.block_idx < kBands && r.lane == 0) {
      constexpr std::uint32_t kBytes = L::kBandRows * L::kInner;
      sm90::barrier_arrive_expect(&r.barriers.band_full, kBytes);
      sm90::bulk_load(r.smem + L::kBandOffset,
                      w.shared_w2.codes + static_cast<std::size_t>(r.block_idx) * kBytes, kBytes,
                      &r.barriers.band_full, sm90::CacheHint::evict_first);
    }
    __syncwarp();
    return true;
  }

  // The n-th tile; at least num_tiles: none is left. Every block that has had its given tiles draws
  // until it draws none, so the counter is 0 again when the last has.
  LOWLAT_DEVICE int next_tile(int n, int num_tiles, std::uint32_t& ticket) const {
    const int before = (L::kGiven - 1) * r.num_blocks;
    int number = n * r.num_blocks + r.block_idx;
    if (n >= L::kGiven) {
      number = before + r.num_blocks + static_cast<int>(__shfl_sync(plat::kAllLanes, ticket, 0));
    }
    // The next ticket is on its way while this tile is waited for.
    if (n >= L::kGiven - 1 && number < num_tiles && r.lane == 0) {
      ticket = atomicInc(reinterpret_cast<std::uint32_t*>(r.workspace + L::kTicketOffset),
                         static_cast<std::uint32_t>(num_tiles - before - 1));
    }
    return number;
  }

  LOWLAT_DEVICE bool run_routed() {
    if (!barrier_wait(&r.barriers.table, 0, r.watch)) return false;
    const auto& w = r.a.w;
    const int num_experts = r.table.num_experts, num_tiles = num_experts * L::kTiles;
    std::uint32_t ticket = 0;
    for (int n = 0;; ++n) {
      const int number = next_tile(n, num_tiles, ticket);
      // A use without bytes says that there are no more.
      if (r.lane == 0) {
        r.table.tile[n % L::kWindow] = number;
        r.table.is_tile[n % L::kWindow] = number < num_tiles ? 1 : 0;
      }
      if (!begin_slot(number < num_tiles ? L::kTileBytes : 0)) return false;
      if (number >= num_tiles) break;
      const int expert = r.table.expert[number / L::kTiles];
      const std::size_t row =
          static_cast<std::size_t>(expert) * L::kInner + number % L::kTiles * kTileRows;
      if (r.lane < 2) {
        const int slot = (uses - 1) % L::kRing;
        unsigned char* dst = r.smem + L::kRingOffset + slot * L::kSlotBytes;
        sm90::tensor_load(dst + r.lane * L::kHalfTile, r.lane ? &maps.up : &maps.gate, 0,
                          static_cast<int>(row), 0, &r.barriers.full[slot],
                          sm90::CacheHint::evict_first);
      } else if (r.lane < 4) {
        const int up = r.lane - 2;
        load(2 * L::kHalfTile + up * kTileRows * L::kScaleRow,
             (up ? w.w3 : w.w1).scales + row * L::kScaleRow, kTileRows * L::kScaleRow);
      }
      __syncwarp();
    }
    if (r.block_idx >= kBands) return true;
    for (; pieces < num_experts; ++pieces) {
      const int piece = pieces % L::kRingPieces, slot = (uses + piece / L::kPieces) % L::kRing;
      if (pieces >= L::kRingPieces) {
        if (!barrier_wait(&r.barriers.piece_empty[piece], (pieces / L::kRingPieces - 1) & 1,
                          r.watch)) {
          return false;
        }
      } else if (uses > slot) {
        const int last = (uses - 1 - slot) / L::kRing;
        if (!barrier_wait(&r.barriers.empty[slot], last & 1, r.watch)) return false;
      }
      if (r.lane == 0) {
        constexpr std::uint32_t kCodes = L::kBandRows * L::kInnerRow;
        constexpr std::uint32_t kScales = L::kBandRows * L::kInnerScaleRow;
        const std::size_t row = static_cast<std::size_t>(r.table.expert[pieces]) * L::kHidden +
                                r.block_idx * L::kBandRows;
        unsigned char* dst =
            r.smem + L::kRingOffset + slot * L::kSlotBytes + piece % L::kPieces * L::kPieceBytes;
        std::uint64_t* full = &r.barriers.piece_full[piece];
        sm90::barrier_arrive_expect(full, L::kBandBytes);
        sm90::bulk_load(dst, w.w2.codes + row * L::kInnerRow, kCodes, full,
                        sm90::CacheHint::evict_first);
        sm90::bulk_load(dst + kCodes, w.w2.scales + row * L::kInnerScaleRow, kScales, full,
                        sm90::CacheHint::evict_first);
      }
      __syncwarp();
    }
    return true;
  }

  // After a fault: copies under way must land before the block's memory is another's.
  LOWLAT_DEVICE void drain() const {
    constexpr int kTries = 1 << 12;  // some milliseconds; a copy takes microseconds
    const auto landed = [](std::uint64_t* barrier, int count) {
      for (int i = 0; count > 0 && i < kTries; ++i) {
        if (sm90::barrier_try_wait(barrier, (count - 1) & 1)) return;
      }
    };
#pragma unroll 1
    for (int slot = 0; slot < L::kRing; ++slot) {
      landed(&r.barriers.full[slot], (uses - slot + L::kRing - 1) / L::kRing);
    }
#pragma unroll 1
    for (int piece = 0; piece < L::kRingPieces; ++piece) {
      landed(&r.barriers.piece_full[piece], (pieces - piece + L::kRingPieces - 1) / L::kRingPieces);
    }
    landed(&r.barriers.band_full, r.shared && r.block_idx < kBands ? 1 : 0);
  }
};

// ------------------------------------------------------------------------------------ routers

template <class L>
struct Router {
  Region<L>& r;
  int warp;  // among the routers

  // Block t routes row t for all, by its second router, and tells them: a hop more, but one row's
  // selection instead of several, one after the other.
  LOWLAT_DEVICE void send_route(const Rules& rules, int pass) const {
    static_assert(L::kMaxRows * L::kRoutePackets <= plat::kWarpLanes);
    const int row = r.block_idx;
    if (!r.scores || row >= r.a.rows) return;
    std::int32_t* ids = r.table.own_ids;
    float* weights = r.table.own_weights;
    Scores<L> scores = {r.lane, {}, {}};
    const bool by_score = r.a.routing == MoeRouting::gate;
    if (pass == 1) {
      if (by_score) {
        scores.load_bias(r.a, row);
      } else if (r.lane < L::kSlots) {
        ids[r.lane] = __ldg(r.a.ids + row * L::kSlots + r.lane);
      }
      if (!scores.receive(r, row)) return;
    }
    __syncwarp();
    if (by_score) {
      scores.select(ids, weights,
                    rules.rule == stages::GateRule::v41 ? __int_as_float(0x7f80'0000) : -1e30f);
    } else {
      scores.find(ids, weights);
    }
    __syncwarp();
    const float total = stages::gate_total(weights, L::kSlots, rules.sum_rule);
    const auto weight = [&](int slot) {
      return __float_as_uint(weights[slot] / total * kRoutedScaling);
    };
    if (r.lane >= L::kRoutePackets) return;
    const int slot = 2 * r.lane, other = slot + 1 < L::kSlots ? slot + 1 : slot;
    const std::uint32_t words[3] = {
        static_cast<std::uint32_t>(ids[slot]) | static_cast<std::uint32_t>(ids[other]) << 16,
        weight(slot), weight(other)};
    if (pass == 1) {
      plat::store_tagged(r.route_packet(row * L::kRoutePackets + r.lane), words, r.epoch);
    }
  }
  LOWLAT_DEVICE void receive_routes() const {
    const int row = r.lane / L::kRoutePackets, slot = 2 * (r.lane % L::kRoutePackets);
    const bool mine = row < r.a.rows && row < L::kMaxRows;
    uint4 packet = {};
    bool lost = false;
    for (int tries = 1;; ++tries) {
      if (mine) packet = load_packet(r.route_packet(r.lane));
      if (__all_sync(plat::kAllLanes, !mine || packet.w == r.epoch)) break;
      lost = tries % kTriesPerLook == 0 && r.watch.ended(kScoresEvent);
      lost = __any_sync(plat::kAllLanes, lost);
      if (lost) break;
    }
    if (mine) {
      const std::uint32_t ids[2] = {packet.x & 0xffffu, packet.x >> 16},
                          weights[2] = {packet.y, packet.z};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (slot + i >= L::kSlots) continue;
        const int at =
            row * L::kSlots + slot + i;  // where the step is lost, stay inside the arrays
        r.table.ids[at] = lost ? slot + i : static_cast<std::int32_t>(ids[i]);
        r.table.weights[at] = __uint_as_float(weights[i]);
      }
    }
    __syncwarp();
  }

  // Pairs by expert, by one warp: masks of pairs instead of counts.
  LOWLAT_DEVICE void make_table(int num_rows) const {
    auto& table = r.table;
    constexpr int kOwnPairs = 2, kWords = L::kExperts / 32;
    static_assert(L::kMaxPairs <= kOwnPairs * plat::kWarpLanes);
    const int num_pairs = num_rows * L::kSlots;
    int id[kOwnPairs], rank[kOwnPairs] = {};
    bool valid[kOwnPairs];
#pragma unroll
    for (int k = 0; k < kOwnPairs; ++k) {
      const int pair = k * plat::kWarpLanes + r.lane;
      valid[k] = pair < num_pairs;
      id[k] = valid[k] ? table.ids[pair] : 0;
      if (valid[k]) atomicOr(&table.chosen[id[k] / 32], 1u << id[k] % 32);
    }
    __syncwarp();
    int total = 0;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const std::uint32_t bits = table.chosen[word];
      total += __popc(bits);
#pragma unroll
      for (int k = 0; k < kOwnPairs; ++k) {
        const std::uint32_t below = (1u << id[k] % 32) - 1u;
        const std::uint32_t counted = word < id[k] / 32 ? ~0u : word == id[k] / 32 ? below : 0u;
        rank[k] += __popc(bits & counted);
      }
    }
#pragma unroll
    for (int k = 0; k < kOwnPairs; ++k) {
      if (valid[k]) atomicOr(&table.pairs_of[k][rank[k]], 1u << r.lane);
    }
    __syncwarp();
    // An expert's first pair: the pairs of those before it.
    int before = 0;
#pragma unroll
    for (int k = 0; k < kOwnPairs; ++k) {
      const int expert = k * plat::kWarpLanes + r.lane;
      const int count = expert < total
                            ? __popc(table.pairs_of[0][expert]) + __popc(table.pairs_of[1][expert])
                            : 0;
      int sum = count;
#pragma unroll
      for (int offset = 1; offset < plat::kWarpLanes; offset *= 2) {
        const int lower = __shfl_up_sync(plat::kAllLanes, sum, offset);
        if (r.lane >= offset) sum += lower;
      }
      if (expert <= total) table.first[expert] = static_cast<std::uint16_t>(before + sum - count);
      before += __shfl_sync(plat::kAllLanes, sum, plat::kWarpLanes - 1);
    }
    if (r.lane == 0) table.num_experts = total;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kOwnPairs; ++k) {
      if (!valid[k]) continue;
      const std::uint32_t below = (1u << r.lane) - 1u;
      const int earlier = __popc(table.pairs_of[0][rank[k]] & (k == 0 ? below : ~0u)) +
                          (k == 0 ? 0 : __popc(table.pairs_of[1][rank[k]] & below));
      const int pair = k * plat::kWarpLanes + r.lane, place = table.first[rank[k]] + earlier;
      table.sorted[place] = static_cast<std::uint16_t>(pair);
      table.place[pair] = static_cast<std::uint16_t>(place);
      if (earlier == 0) table.expert[rank[k]] = static_cast<std::uint16_t>(id[k]);
    }
    __syncwarp();
  }

  // Ids and weights of all rows, in every block the same.
  LOWLAT_DEVICE void take_routes() const {
    const int num_pairs = r.a.rows * L::kSlots;
    if (r.scores) {
      receive_routes();
    } else {
      for (int i = r.lane; i < num_pairs; i += plat::kWarpLanes) {
        r.table.ids[i] = __ldg(r.a.ids + i);
        r.table.weights[i] = __ldg(r.a.weights + i);
      }
      __syncwarp();
    }
    if (r.block_idx != 0 || !r.scores) return;
    for (int i = r.lane; i < num_pairs; i += plat::kWarpLanes) {
      if (r.a.out_ids != nullptr) r.a.out_ids[i] = r.table.ids[i];
      if (r.a.out_weights != nullptr) r.a.out_weights[i] = r.table.weights[i];
    }
  }

  LOWLAT_DEVICE void run(const Rules& rules) {
#pragma unroll 1
    for (int pass = first_pass(r); pass < 2; ++pass) {
      if (pass == 1) {
        wait_for_x(r);
        r.read_epoch();
      }
      if (warp != 0) {
        send_route(rules, pass);
        continue;
      }
      if (pass == 1) take_routes();
      make_table(pass == 1 ? r.a.rows : 0);
      if (pass == 1 && r.lane == 0) sm90::barrier_arrive(&r.barriers.table);
    }
  }
};

// ------------------------------------------------------------------------------------ rows of h

// What a warp needs for the second product.
template <class L>
struct SecondWarp {
  const Region<L>& r;
  int g, t;  // place in the fragments

  LOWLAT_DEVICE explicit SecondWarp(const Region<L>& region)
      : r(region), g(region.lane / 4), t(region.lane % 4) {}

  // A part of a row of h: eight elements a thread of each group, in the order of pairs.
  struct Hidden {
    uint4 chunk[L::kPartGroups];
  };
  LOWLAT_DEVICE const unsigned char* hidden_address(int row, int part) const {
    return r.hidden(r.epoch & 1u, row) + part * L::kPartGroups * 64 + t * 16;
  }
  LOWLAT_DEVICE static void load_hidden(Hidden& h, const unsigned char* address) {
#pragma unroll
    for (int group = 0; group < L::kPartGroups; ++group) {
      h.chunk[group] = load_packet(address + group * 64);
    }
  }
  // Until every chunk has arrived; all lanes together.
  LOWLAT_DEVICE bool complete(Hidden& h, const unsigned char* address) const {
    for (int tries = 1;; ++tries) {
      bool here = true;
#pragma unroll
      for (const uint4& chunk : h.chunk) here = here && chunk.w != kPoison;
      if (__all_sync(plat::kAllLanes, here)) return true;
      const bool late = tries % kTriesPerLook == 0 && r.watch.ended(kHiddenEvent);
      if (__any_sync(plat::kAllLanes, late)) return false;
      load_hidden(h, address);
    }
  }

  // Sums of sixteen columns of the band to their place.
  LOWLAT_DEVICE void store_second(float* dst, const float (&acc)[4], int m, int count,
                                  float factor) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = 2 * t + (i & 1), n = 16 * m + (i >> 1) * 8;
      if (n < L::kBandRows && column < count) {
        dst[column * L::kBandRows + n + g] = acc[i] * factor;
      }
    }
  }

  LOWLAT_DEVICE static void unpack(const Hidden& h, int group, std::uint32_t (&out)[4]) {
    const uint4 chunk = h.chunk[group];
    out[0] = chunk.x, out[1] = chunk.y, out[2] = chunk.z, out[3] = chunk.w;
  }

  // Sixteen columns of the band (eight where it ends) of the shared expert, a part of I.
  LOWLAT_DEVICE bool run_shared_item(int part, int m) const {
    if (!barrier_wait(&r.barriers.band_full, 0, r.watch)) return false;
    const std::uint32_t codes = sm90::shared_address(r.smem) + L::kBandOffset +
                                (16 * m + g) * L::kInner + part * L::kPartGroups * 32 + t * 8;
    const bool whole = 16 * m + 8 < L::kBandRows;
    const int band = r.block_idx * L::kBandRows;
    const int low_row = (band + 16 * m) / L::kBlock - band / L::kBlock;
    const int high_row = whole ? (band + 16 * m + 8) / L::kBlock - band / L::kBlock : low_row;
    const unsigned char* address =
        hidden_address(L::kMaxPairs + (g < r.a.rows ? g : r.a.rows - 1), part);
    Hidden h;
    load_hidden(h, address);
    if (!complete(h, address)) return false;
    float acc[4] = {};
    std::uint32_t exponent = 0;
#pragma unroll
    for (int group = 0; group < L::kPartGroups; ++group) {
      std::uint32_t b[4];
      unpack(h, group, b);
      constexpr int kSpan = L::kBlock / 32;  // groups of one scale
      static_assert(L::kPartGroups % kSpan == 0);
      if (group % kSpan == 0) {
        float amax = pairs_amax<4>(b);
#pragma unroll
        for (int i = 1; i < kSpan; ++i) {
          std::uint32_t other[4];
          unpack(h, group + i, other);
          amax = fmaxf(amax, pairs_amax<4>(other));
        }
        exponent = activation_exponent(lanes_max<4>(amax));
      }
      quantize_pairs<4>(b, exponent);
      const std::uint8_t* scales = r.table.band_scales + (part * L::kPartGroups + group) / kSpan;
      const uint2 low = smem_load8(codes + group * 32);
      const uint2 high = whole ? smem_load8(codes + 8 * L::kInner + group * 32) : uint2{};
      std::uint32_t l[4], h_pairs[4];
      expand_e4m3(low.x, low.y, e4m3_factor(scales[low_row * L::kBandScaleColumns]), l);
      expand_e4m3(high.x, high.y, e4m3_factor(scales[high_row * L::kBandScaleColumns]), h_pairs);
      multiply_pairs(acc, l, h_pairs, b);
      multiply_pairs(acc, l + 2, h_pairs + 2, b + 2);
    }
    store_second(r.template second_sums<true>(part, 0), acc, m, r.a.rows, 1.0f);
    return true;
  }

  // The shared expert's part of the band, by `warps` warps of which this is number `warp`.
  LOWLAT_DEVICE bool run_shared(int warp, int warps) const {
    for (int item = warp; item < L::kParts * L::kMTiles; item += warps) {
      if (!run_shared_item(item / L::kMTiles, item % L::kMTiles)) return false;
    }
    return true;
  }
};

// ------------------------------------------------------------------------------------ consumers

template <class L>
struct Consumer {
  Region<L>& r;
  int warp;
  int g = 0, t = 0;  // place in the fragments
  int uses = 0;      // of the ring
  int sums = 0;      // of the partial buffers
  // x of this warp's slice, in the order of pairs, for the whole launch; fp16 where it meets tiles.
  static constexpr int kPairs = 4;  // of a thread's eight elements of a group
  std::uint32_t x[L::kSliceBlocks][kPairs];

  LOWLAT_DEVICE bool wait_slot(int offset) const {
    const int use = uses + offset;
    return barrier_wait(&r.barriers.full[use % L::kRing], use / L::kRing & 1, r.watch);
  }
  LOWLAT_DEVICE void free_slot() {
    __syncwarp();
    if (r.lane == 0) sm90::barrier_arrive(&r.barriers.empty[uses % L::kRing]);
    ++uses;
  }

  // Of this lane, along K.
  LOWLAT_DEVICE int first_element() const { return warp * L::kSpan * L::kBlockK + t * 8; }
  // This lane's part of row `row` of [rows][H].
  LOWLAT_DEVICE void load_rows(const std::uint16_t* rows, int row) {
    const std::uint16_t* src = rows + static_cast<std::size_t>(row) * L::kHidden + first_element();
#pragma unroll
    for (int block = 0; block < L::kSliceBlocks; ++block) {
      const uint4 eight =
          __ldg(reinterpret_cast<const uint4*>(src + L::block_group(block) * L::kBlockK));
      pair_bf16(eight, x[block]);
    }
  }

  // Gives the slice's sums to the finisher, [warp][row][column].
  LOWLAT_DEVICE bool hand_over(const float (&acc)[4]) {
    const int buffer = sums % L::kBuffers;
    if (sums >= L::kBuffers &&
        !barrier_wait(&r.barriers.sums_empty[buffer], (sums / L::kBuffers - 1) & 1, r.watch)) {
      return false;
    }
    store_sums(sm90::shared_address(r.partial(buffer)) + own_sums(), acc);
    __syncwarp();
    if (r.lane == 0) sm90::barrier_arrive(&r.barriers.sums_full[buffer]);
    ++sums;
    return true;
  }
  LOWLAT_DEVICE std::uint32_t own_sums() const {
    return ((warp * 2 * kTileRows + g) * kColumns + 2 * t) * 4;
  }
  LOWLAT_DEVICE static void store_sums(std::uint32_t address, const float (&acc)[4]) {
    smem_store8(address, acc[0], acc[1]);
    smem_store8(address + kTileRows * kColumns * 4, acc[2], acc[3]);
  }
  LOWLAT_DEVICE void multiply_gate(float (&acc)[4]) const {
    const int row = g < L::kGateRows ? g : L::kGateRows - 1;  // other rows: computed, not used
    const std::uint32_t address =
        r.slot_address(uses % L::kRing) + row * L::kGatePitch + first_element() * 2;
    float odd[4] = {};
#pragma unroll
    for (int block = 0; block < L::kSliceBlocks; ++block) {
      const std::uint32_t none[kPairs] = {};
      std::uint32_t low[kPairs];
      pair_bf16(smem_load16(address + L::block_group(block) * L::kBlockK * 2), low);
      multiply_pairs(acc, low, none, x[block]);
      multiply_pairs(odd, low + 2, none, x[block] + 2);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[i] += odd[i];
  }
  // Waits for x and keeps it.
  LOWLAT_DEVICE bool run_gate() {
#pragma unroll 1
    for (int pass = first_pass(r);; ++pass) {
      if (pass == 1) wait_for_x(r);
      // The first pass: rows of the router, and whatever lies in the slot.
      load_rows(pass == 1 ? r.a.x : r.a.w.gate, g < r.a.rows ? g : r.a.rows - 1);
      float acc[4] = {};
      if (r.gates()) {
        if (pass == 1 && !wait_slot(0)) return false;
        multiply_gate(acc);
        for (const float sum : acc) keep(sum);
      }
      if (pass == 0) continue;
      if (!r.gates()) return true;
      if (!hand_over(acc)) return false;
      free_slot();
      return true;
    }
  }

  // Scale bytes of a shared tile's slice, gate and up.
  struct TileScales {
    std::uint8_t gate[L::kSlice / L::kBlock], up[L::kSlice / L::kBlock];
  };
  LOWLAT_DEVICE void load_scales(TileScales& out, int tile) const {
    const std::size_t scale_row =
        static_cast<std::size_t>(tile * kTileRows / L::kBlock) * (L::kHidden / L::kBlock);
#pragma unroll
    for (int i = 0; i < L::kSlice / L::kBlock; ++i) {
      const std::size_t at = scale_row + i * L::kConsumers + warp;
      out.gate[i] = __ldg(r.a.w.shared_w1.scales + at);
      out.up[i] = __ldg(r.a.w.shared_w3.scales + at);
    }
  }

  // Gate in one slot, up in the next; x as the block-fp8 linear sees it.
  LOWLAT_DEVICE bool run_shared_tile(const TileScales& scales) {
    if (!wait_slot(0) || !wait_slot(1)) return false;
    const std::uint32_t offset = g * L::kSharedPitch + first_element();
    const std::uint32_t low_address = r.slot_address(uses % L::kRing) + offset;
    const std::uint32_t high_address = r.slot_address((uses + 1) % L::kRing) + offset;
    float acc[2][4] = {};
    std::uint32_t exponent = 0;
#pragma unroll
    for (int block = 0; block < L::kSliceBlocks; ++block) {
      std::uint32_t b[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) b[i] = x[block][i];
      if (block % L::kSpan == 0) {
        float amax = pairs_amax<kPairs>(b);
#pragma unroll
        for (int i = 1; i < L::kSpan; ++i) {
          amax = fmaxf(amax, pairs_amax<kPairs>(x[block + i]));
        }
        exponent = activation_exponent(lanes_max<4>(amax));
      }
      quantize_pairs<kPairs>(b, exponent);
      const uint2 gate = smem_load8(low_address + L::block_group(block) * L::kBlockK);
      const uint2 up = smem_load8(high_address + L::block_group(block) * L::kBlockK);
      std::uint32_t low[kPairs], high[kPairs];
      expand_e4m3(gate.x, gate.y, e4m3_factor(scales.gate[block / L::kSpan]), low);
      expand_e4m3(up.x, up.y, e4m3_factor(scales.up[block / L::kSpan]), high);
      multiply_pairs(acc[0], low, high, b);
      multiply_pairs(acc[1], low + 2, high + 2, b + 2);
    }
    for (int i = 0; i < 4; ++i) acc[0][i] += acc[1][i];
    if (!hand_over(acc[0])) return false;
    free_slot();
    free_slot();
    return true;
  }

  // ---- routed experts, first product

  // acc = one tile's slice: `codes` and `scales` are a lane's addresses in its slot.
  LOWLAT_DEVICE void multiply_tile(float (&acc)[4], std::uint32_t codes,
                                   std::uint32_t scales) const {
    std::uint32_t words[L::kSliceBlocks / 2][4];  // gate and up of a block, of the next
    constexpr int kStride = L::kConsumers * L::kSpan / L::kChunkUnits * L::kChunkBytes;
    [[maybe_unused]] const std::uint32_t other_half = codes ^ 32u;
#pragma unroll
    for (int i = 0; i < L::kSliceBlocks / 2; ++i) {
      if constexpr (L::kSpan == 1) {
        sm90::load_matrices(words[i], codes + i * 2 * kStride);
      } else {  // the scale block's other half lies two units further, exchanged
        sm90::load_matrices(words[i], (i % 2 ? other_half : codes) + i / 2 * kStride);
      }
    }
#pragma unroll
    for (int block = 0; block < L::kSliceBlocks; ++block) {
      const std::uint32_t scale = scales + L::block_group(block);
      const float low_scale = scale_of(smem_load1(scale));
      const float high_scale = scale_of(smem_load1(scale + kTileRows * L::kScaleRow));
      std::uint32_t low[kPairs], high[kPairs];
      place_fp4(words[block / 2][block % 2 * 2], low);
      place_fp4(words[block / 2][block % 2 * 2 + 1], high);
      float group[4] = {};
      multiply_half_pairs(group, low, high, x[block]);
      multiply_half_pairs(group, low + 2, high + 2, x[block] + 2);
      acc[0] = __fmaf_rn(group[0], low_scale, acc[0]);
      acc[1] = __fmaf_rn(group[1], low_scale, acc[1]);
      acc[2] = __fmaf_rn(group[2], high_scale, acc[2]);
      acc[3] = __fmaf_rn(group[3], high_scale, acc[3]);
    }
  }
  // A lane's places in a slot. A load is four matrices of eight rows: gate and up of a block, then
  // of the next.
  LOWLAT_DEVICE std::uint32_t codes_in_slot() const {
    const int row = r.lane % kTileRows, up = r.lane / kTileRows % 2,
              next = r.lane / (2 * kTileRows);
    const int group = warp * L::kSpan + L::block_group(1) * next;
    return up * L::kHalfTile + group / L::kChunkUnits * L::kChunkBytes + row * 128 +
           ((group % L::kChunkUnits) ^ row) * 16;
  }
  LOWLAT_DEVICE std::uint32_t scales_in_slot() const {
    return 2 * L::kHalfTile + g * L::kScaleRow + warp * L::kSpan;
  }

  // Counters and addresses are kept, not made anew: what a tile takes besides its products is a
  // quarter of its instructions otherwise.
  LOWLAT_DEVICE bool run_tiles() {
    std::uint32_t base;
    asm volatile("mov.u32 %0, %1;" : "=r"(base) : "r"(sm90::shared_address(r.smem)));
    const std::uint32_t codes = base + L::kRingOffset + codes_in_slot();
    const std::uint32_t scales = base + L::kRingOffset + scales_in_slot();
    const std::uint32_t sums_at = base + L::kSumsOffset + own_sums();
    const std::uint32_t barriers = base + L::kBarrierOffset;
    const std::uint32_t stop = base + L::kTableOffset + L::kStopOffset;
    const std::uint32_t is_tile = base + L::kTableOffset + L::kIsTileOffset;
    std::uint32_t slot = static_cast<std::uint32_t>(uses) % L::kRing;
    std::uint32_t phase = static_cast<std::uint32_t>(uses) / L::kRing & 1u;
    auto sum = static_cast<std::uint32_t>(sums);
    for (std::uint32_t n = 0;; ++n) {
      if (!barrier_wait_at(barriers + L::kFullBarriers + slot * 8, phase, stop)) return false;
      const bool done = smem_load1(is_tile + n % L::kWindow) == 0;
      const std::uint32_t at = slot * L::kSlotBytes;
      float acc[4] = {};
      if (!done) multiply_tile(acc, codes + at, scales + at);
      __syncwarp();
      if (r.lane == 0) barrier_arrive_at(barriers + L::kEmptyBarriers + slot * 8);
      const std::uint32_t buffer = sum % L::kBuffers;
      if (sum >= L::kBuffers && !barrier_wait_at(barriers + L::kSumsEmptyBarriers + buffer * 8,
                                                 (sum / L::kBuffers - 1) & 1u, stop)) {
        return false;
      }
      // After the last tile the finisher finds sums of no tile.
      store_sums(sums_at + buffer * L::kPartialBytes, acc);
      __syncwarp();
      if (r.lane == 0) barrier_arrive_at(barriers + L::kSumsFullBarriers + buffer * 8);
      ++sum;
      if (++slot == L::kRing) slot = 0, phase ^= 1u;
      if (done) {
        uses += static_cast<int>(n) + 1;
        sums = static_cast<int>(sum);
        return true;
      }
    }
  }
  // ---- second product

  // Row of h of column g of a group of an expert's pairs (or of rows, for the shared expert).
  LOWLAT_DEVICE int hidden_row(int first, int count) const {
    return r.table.sorted[first + (g < count ? g : count - 1)];
  }

  // acc = sixteen columns (eight when not kWhole) times an expert's rows of h, a part of I. `codes`
  // and `scales`: of the part in the band's first row.
  template <bool kWhole>
  LOWLAT_DEVICE void multiply_second(float (&acc)[4], const typename SecondWarp<L>::Hidden& h,
                                     std::uint32_t codes, std::uint32_t scales, int m) const {
    // A load fetches two groups of sixteen rows, or four of eight. What lies beyond the last group
    // is read and not used.
    constexpr int kRows = kWhole ? 16 : 8, kGroups = kWhole ? 2 : 4;
    const std::uint32_t code =
        codes + (16 * m + r.lane % kRows) * L::kInnerRow + r.lane / kRows * 16;
    const std::uint32_t scale = scales + (16 * m + g) * L::kInnerScaleRow;
    std::uint32_t words[(L::kPartGroups + kGroups - 1) / kGroups][4];
#pragma unroll
    for (int i = 0; i * kGroups < L::kPartGroups; ++i) {
      sm90::load_matrices(words[i], code + i * kGroups * 16);
    }
#pragma unroll
    for (int group = 0; group < L::kPartGroups; ++group) {
      std::uint32_t b[4], low[4], high[4] = {};
      SecondWarp<L>::unpack(h, group, b);
      const std::uint32_t (&four)[4] = words[group / kGroups];
      place_fp4(four[kWhole ? group % 2 * 2 : group % 4], low);
      if constexpr (kWhole) place_fp4(four[group % 2 * 2 + 1], high);
      float sums_of[4] = {};
      multiply_half_pairs(sums_of, low, high, b);
      multiply_half_pairs(sums_of, low + 2, high + 2, b + 2);
      const float low_scale = scale_of(smem_load1(scale + group));
      acc[0] = __fmaf_rn(sums_of[0], low_scale, acc[0]);
      acc[1] = __fmaf_rn(sums_of[1], low_scale, acc[1]);
      if constexpr (kWhole) {
        const float high_scale = scale_of(smem_load1(scale + 8 * L::kInnerScaleRow + group));
        acc[2] = __fmaf_rn(sums_of[2], high_scale, acc[2]);
        acc[3] = __fmaf_rn(sums_of[3], high_scale, acc[3]);
      }
    }
  }

  LOWLAT_DEVICE bool run_second() {
    constexpr float kFactor = 1 << (kPlaceShift - kHiddenShift);
    // `second` may lie over the partial sums: wait as if for every buffer.
    for (int i = 0; i < L::kBuffers; ++i, ++sums) {
      if (sums >= L::kBuffers && !barrier_wait(&r.barriers.sums_empty[sums % L::kBuffers],
                                               (sums / L::kBuffers - 1) & 1, r.watch)) {
        return false;
      }
    }
    if (r.block_idx >= kBands) return true;
    const SecondWarp<L> second(r);
    typename SecondWarp<L>::Hidden h;
    const unsigned char* address = nullptr;
    int expert = warp / L::kParts, part = warp % L::kParts;
    const int num_experts = r.table.num_experts;
    int first = 0, end = 0;
    if (expert < num_experts) {
      first = r.table.first[expert];
      end = r.table.first[expert + 1];
      address = second.hidden_address(hidden_row(first, end - first), part);
      second.load_hidden(h, address);
    }
    std::uint32_t base;
    asm volatile("mov.u32 %0, %1;" : "=r"(base) : "r"(sm90::shared_address(r.smem)));
    const std::uint32_t stop = base + L::kTableOffset + L::kStopOffset;
    const std::uint32_t barriers = base + L::kBarrierOffset;
    int piece = expert;  // the first are in the ring's first turn
    std::uint32_t turn = 0;
    while (expert < num_experts) {
      const int slot = (uses + piece / L::kPieces) % L::kRing;
      const std::uint32_t at =
          base + L::kRingOffset + slot * L::kSlotBytes + piece % L::kPieces * L::kPieceBytes;
      const std::uint32_t codes = at + part * L::kPartGroups * 16;
      const std::uint32_t scales = at + L::kBandRows * L::kInnerRow + part * L::kPartGroups;
      const std::uint32_t empty = barriers + L::kPieceEmptyBarriers + piece * 8;
      // A parity tells a phase from the next only: the piece's use before must be over. Nobody is
      // further ahead, because the producer fills in order (kReach).
      if (turn > 0 && !barrier_wait_at(empty, (turn - 1) & 1u, stop)) return false;
      if (!barrier_wait_at(barriers + L::kPieceFullBarriers + piece * 8, turn & 1u, stop)) {
        return false;
      }
      // The warp's next item.
      int next_expert = expert + L::kConsumers / L::kParts;
      int next_part = part + L::kConsumers % L::kParts;
      if (next_part >= L::kParts) next_part -= L::kParts, ++next_expert;
      const bool more = next_expert < num_experts;
      const int next_begin = more ? r.table.first[next_expert] : 0;
      const int next_end = more ? r.table.first[next_expert + 1] : 0;
      for (;;) {
        if (!second.complete(h, address)) return false;
        // The next columns: more of this expert's, or the next item's.
        const int count = end - first;
        const unsigned char* next = nullptr;
        if (count > kColumns) {
          const int rest = first + kColumns;
          next = second.hidden_address(hidden_row(rest, end - rest), part);
        } else if (more) {
          next = second.hidden_address(hidden_row(next_begin, next_end - next_begin), next_part);
        }
        typename SecondWarp<L>::Hidden ahead = {};
        if (next != nullptr) second.load_hidden(ahead, next);
        // Sixteen columns at a time.
        constexpr int kLast = L::kMTiles - 1;
        constexpr bool kWhole = L::kBandRows % 16 == 0;
        float* sums_at = r.template second_sums<false>(part, first);
#pragma unroll
        for (int m = 0; m < kLast; ++m) {
          float acc[4] = {};
          multiply_second<true>(acc, h, codes, scales, m);
          second.store_second(sums_at, acc, m, count, kFactor);
        }
        float acc[4] = {};
        multiply_second<kWhole>(acc, h, codes, scales, kLast);
        second.store_second(sums_at, acc, kLast, count, kFactor);
        h = ahead;
        address = next;
        if (count <= kColumns) break;
        first += kColumns;
      }
      __syncwarp();
      if (r.lane == 0) barrier_arrive_at(empty);
      piece += next_expert - expert;
      if (piece >= L::kRingPieces) piece -= L::kRingPieces, ++turn;
      expert = next_expert, part = next_part;
      first = next_begin, end = next_end;
    }
    return true;
  }

  // Before the kernels before this one have ended.
  LOWLAT_DEVICE void run_early(TileScales& scales) {
    g = r.lane / 4;
    t = r.lane % 4;
    if (r.shared_tiles() > 0) load_scales(scales, r.block_idx);
  }
  LOWLAT_DEVICE bool run(TileScales& scales) {
    bool going = run_gate();
    for (int n = 0; going && n < r.shared_tiles(); ++n) {
      if (n > 0) load_scales(scales, n * r.num_blocks + r.block_idx);
      going = run_shared_tile(scales);
    }
    r.read_epoch();
#pragma unroll
    for (auto& block : x) {
#pragma unroll
      for (std::uint32_t& pair : block) pair = bf16_to_half(pair);
    }
    return going && barrier_wait(&r.barriers.table, 0, r.watch) && run_tiles() && run_second();
  }
};

// ------------------------------------------------------------------------------------ finisher

// By one warp: rows of scales that the shared w2's band touches, from that of its first row.
template <class L>
LOWLAT_DEVICE void load_band_scales(const Region<L>& r) {
  if (!r.shared || r.block_idx >= kBands) return;
  const int first = r.block_idx * L::kBandRows / L::kBlock * L::kBandScaleColumns;
  constexpr int kAll = L::kHidden / L::kBlock * L::kBandScaleColumns;
  for (int i = r.lane; i < L::kBandScaleRows * L::kBandScaleColumns; i += plat::kWarpLanes) {
    if (first + i < kAll) r.table.band_scales[i] = __ldg(r.a.w.shared_w2.scales + first + i);
  }
}

template <class L>
struct Finisher {
  Region<L>& r;
  int sums = 0;

  LOWLAT_DEVICE bool wait_sums() const {
    return barrier_wait(&r.barriers.sums_full[sums % L::kBuffers], sums / L::kBuffers & 1, r.watch);
  }
  LOWLAT_DEVICE void free_sums() {
    __syncwarp();
    if (r.lane == 0) sm90::barrier_arrive(&r.barriers.sums_empty[sums % L::kBuffers]);
    ++sums;
  }
  // Sum over the slices of K of weight row `row` and a column, by warps `first` and on.
  template <int kCount>
  LOWLAT_DEVICE float slices(int row, int column, int first) const {
    const float* src =
        r.partial(sums % L::kBuffers) + (first * 2 * kTileRows + row) * kColumns + column;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += src[i * kColumns * 2 * kTileRows];
    return sum;
  }

  // Fills the other parity of h with the pattern that says "not yet".
  LOWLAT_DEVICE void clear_hidden() const {
    constexpr int kChunks = static_cast<int>(L::kHiddenBytes / 16);
    unsigned char* dst = r.hidden((r.epoch & 1u) ^ 1u, 0);
    for (int i = r.block_idx * plat::kWarpLanes + r.lane; i < kChunks;
         i += r.num_blocks * plat::kWarpLanes) {
      store_packet(dst + static_cast<std::size_t>(i) * 16,
                   make_uint4(kPoison, kPoison, kPoison, kPoison));
    }
  }

  LOWLAT_DEVICE bool run_gate(stages::GateRule rule, int pass) {
    if (pass == 1 && !wait_sums()) return false;
    const int column = r.lane / L::kGateRows, row = r.lane % L::kGateRows;
    float score = 0.0f;
    if (column < kColumns) {
      score = stages::gate_score(slices<L::kConsumers>(row, column, 0), rule);
    }
    std::uint32_t words[3];
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      const int source = r.lane * L::kGateRows + (j < L::kGateRows ? j : 0);
      words[j] = __float_as_uint(
          __shfl_sync(plat::kAllLanes, score, source < plat::kWarpLanes ? source : 0));
      keep(__uint_as_float(words[j]));
    }
    if (pass == 0) return true;
    free_sums();
    if (r.lane < r.a.rows) {
      plat::store_tagged(r.score_packet(r.lane, r.block_idx), words, r.epoch);
    }
    return true;
  }

  // Eight values of h of one column: bf16 in the order of pairs, one chunk.
  template <bool kShared>
  LOWLAT_DEVICE void finish(int column, unsigned char* row, int tile) const {
    const int weight_row = r.lane % (2 * kTileRows), half = r.lane / (2 * kTileRows);
    float sum = slices<L::kConsumers / 2>(weight_row, column, half * (L::kConsumers / 2));
    sum += __shfl_xor_sync(plat::kAllLanes, sum, 2 * kTileRows);
    if constexpr (!kShared) sum *= static_cast<float>(1 << kPlaceShift);
    const float value = round_to_bf16(sum);
    const float up = __shfl_down_sync(plat::kAllLanes, value, kTileRows);
    const float h = stages::swiglu(value, up, kSwigluLimit, !kShared);
    // Routed h meets fp4 codes in fp16: bf16 values up to SwiGLU's 100, times 2^kHiddenShift.
    const float kept = kShared ? h : round_to_bf16(h) * static_cast<float>(1 << kHiddenShift);
    const float later = __shfl_down_sync(plat::kAllLanes, kept, 4);
    // Lanes 0 .. 3: values i and i + 4.
    const std::uint32_t pair = kShared ? pack_bf16(kept, later) : pack_half(kept, later);
    uint4 chunk;
    chunk.x = __shfl_sync(plat::kAllLanes, pair, 0);
    chunk.y = __shfl_sync(plat::kAllLanes, pair, 1);
    chunk.z = __shfl_sync(plat::kAllLanes, pair, 2);
    chunk.w = __shfl_sync(plat::kAllLanes, pair, 3);
    if (r.lane == 0) store_packet(row + tile * 16, chunk);
  }

  LOWLAT_DEVICE bool run(stages::GateRule rule) {
#pragma unroll 1
    for (int pass = first_pass(r); pass < 2; ++pass) {
      if (pass == 1) {
        wait_for_x(r);
        r.read_epoch();
        clear_hidden();
      }
      if (r.gates() && !run_gate(rule, pass)) return false;
    }
    const std::uint32_t parity = r.epoch & 1u;
    for (int n = 0; n < r.shared_tiles(); ++n) {
      if (!wait_sums()) return false;
      for (int column = 0; column < r.a.rows; ++column) {
        finish<true>(column, r.hidden(parity, L::kMaxPairs + column),
                     n * r.num_blocks + r.block_idx);
      }
      free_sums();
    }
    if (!barrier_wait(&r.barriers.table, 0, r.watch)) return false;
    for (int n = 0;; ++n) {
      if (!wait_sums()) return false;
      const int tile = r.table.tile[n % L::kWindow], expert = tile / L::kTiles;
      if (expert >= r.table.num_experts) break;
      for (int i = r.table.first[expert]; i < r.table.first[expert + 1]; ++i) {
        const int pair = r.table.sorted[i];
        finish<false>(pair / L::kSlots, r.hidden(parity, pair), tile % L::kTiles);
      }
      free_sums();
    }
    free_sums();
    // What follows finds room as soon as blocks end; it waits for their sums.
    sm90::launch_dependents();
    return true;
  }
};

// ------------------------------------------------------------------------------------ epilogue

// All threads, after the block's sync: y of the band, stored and published.
template <class L>
LOWLAT_DEVICE void finish_band(const Region<L>& r, int first_row) {
  const auto parts = [&]<bool kShared>(std::bool_constant<kShared>, int row, int n) {
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < L::kParts; ++part) {
      sum += r.template second_sums<kShared>(part, row)[n];
    }
    return sum;
  };
  const auto of_pair = [&](int pair, int n) {
    return r.table.weights[pair] * parts(std::false_type(), r.table.place[pair], n);
  };
  store_band<L>(r, first_row, [&](int row, int n) {
    float sum = 0.0f;
#pragma unroll
    for (int slot = 0; slot < L::kSlots; ++slot) {
      sum += round_to_bf16(of_pair(row * L::kSlots + slot, n));
    }
    const float y = round_to_bf16(sum);
    return r.shared ? y + round_to_bf16(parts(std::true_type(), row, n)) : y;
  });
}

template <class L>
__global__ void __launch_bounds__(L::kThreads, 1)
    moe_region_mxfp4_sm90(const __grid_constant__ MoeArgs args, const Rules rules,
                          const __grid_constant__ TileMaps maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& table = *reinterpret_cast<typename L::Table*>(smem + L::kTableOffset);
  auto& barriers = *reinterpret_cast<typename L::Barriers*>(smem + L::kBarrierOffset);
  const int thread = plat::thread_idx();
  const int warp = __shfl_sync(plat::kAllLanes, thread / plat::kWarpLanes, 0);
  Region<L> r = {args,
                 smem,
                 table,
                 barriers,
                 static_cast<unsigned char*>(args.workspace),
                 0,
                 {~std::uint64_t{0}, &table.stop, nullptr},
                 static_cast<int>(blockIdx.x),
                 static_cast<int>(gridDim.x),
                 thread % plat::kWarpLanes,
                 args.routing != MoeRouting::given,
                 args.w.shared_w1.codes != nullptr,
                 args.before.word != nullptr && !is_open(args.before.word, args.before.blocks)};
  // A thread a barrier.
  constexpr int kSlotBarriers = 2 * L::kRing, kPieceBarriers = 2 * L::kRingPieces;
  if (thread < kSlotBarriers) {
    const int i = thread / 2;
    sm90::barrier_init(thread % 2 ? &barriers.empty[i] : &barriers.full[i],
                       thread % 2 ? L::kConsumers : 1);
  } else if (thread < kSlotBarriers + kPieceBarriers) {
    const int i = (thread - kSlotBarriers) / 2;
    sm90::barrier_init(thread % 2 ? &barriers.piece_empty[i] : &barriers.piece_full[i],
                       thread % 2 ? L::kParts : 1);
  } else if (thread < kSlotBarriers + kPieceBarriers + 2 * L::kBuffers) {
    const int i = (thread - kSlotBarriers - kPieceBarriers) / 2;
    sm90::barrier_init(thread % 2 ? &barriers.sums_empty[i] : &barriers.sums_full[i],
                       thread % 2 ? 1 : L::kConsumers);
  } else if (thread == L::kThreads - 1) {
    sm90::barrier_init(&barriers.band_full, 1);
    sm90::barrier_init(&barriers.table, 1);
    table.stop = 0;
  }
  sm90::fence_barrier_init();
  static_assert(kSlotBarriers + kPieceBarriers + 2 * L::kBuffers < L::kThreads);

  for (int i = thread; i < L::kExperts / 32; i += L::kThreads) table.chosen[i] = 0;
  for (int i = thread; i < 2 * L::kMaxPairs; i += L::kThreads) (&table.pairs_of[0][0])[i] = 0;
  plat::block_sync();

  Producer<L> producer = {r, maps};
  Consumer<L> consumer = {r, warp};
  typename Consumer<L>::TileScales scales = {};
  bool going = true;
  // Before any wait for the consumers, who wait for these registers.
  if (warp >= L::kConsumers) sm90::fewer_registers<L::kOtherRegisters>();
  // Weights first; everything else has to wait for what came before.
  if (warp == L::kProducer) {
    going = producer.run_early();
  } else if (warp == L::kFinisher) {
    load_band_scales(r);
  } else if (warp < L::kConsumers) {
    consumer.run_early(scales);
  }
  if (warp < L::kConsumers) {
    sm90::more_registers<L::kConsumerRegisters>();
    consumer.run(scales);
  } else {
    if (warp == L::kProducer) {
      if (going) producer.run_routed();
    } else if (warp == L::kFinisher) {
      Finisher<L> finisher = {r};
      finisher.run(rules.rule);
    } else {
      static_assert(L::kThreads == (L::kFirstRouter + L::kRouters) * plat::kWarpLanes);
      const int number = warp - L::kFirstRouter;
      Router<L>{r, number}.run(rules);
      if (r.shared && r.block_idx < kBands) SecondWarp<L>(r).run_shared(number, L::kRouters);
    }
  }
  plat::block_sync();
  if (table.stop == 0) {
    if (r.block_idx < kBands) finish_band(r, rules.first_row);
    if (thread == 0) {
      reinterpret_cast<std::uint32_t*>(args.workspace)[r.block_idx] = r.epoch;
    }
    return;
  }
  if (warp == L::kProducer) producer.drain();
  if (thread == 0) report_fault(r);
}

}  // namespace moe
}  // namespace lowlat::nvidia::fused

// moe_region_mxfp4_sm90: router, routed MXFP4 experts and shared expert for few rows, one launch.
//
// Math         z = x gate^T; ids and weights as stages/gate.hpp. For pair p (a row, a slot) of
//              expert e: h_p = swiglu(bf(w1_e x), bf(w3_e x)), d_p = bf(weight_p * (w2_e h_p));
//              shared: the same with x and h quantised. y = bf(sum of a row's d_p) + bf(shared)
// Shapes       fused/moe.hpp; T 1 .. 8 (kMany false) or 1 .. 64
// Rounding     as stages/experts.hpp (Marlin's): gate, up, silu, h, d and the sum of slots to
//              bf16; all other sums fp32
// Bytes        each weight of a chosen expert once: shape::moe_weight_bytes
// Floor        V4.1, TP4, T = 6: 175 MB, 37.7 us at 4.65 TB/s. The bench prints the share reached.
// Launch       one block an SM (128 at least): kConsumers warps, a producer, a finisher. Weights
//              are on their way before the kernels before have ended.
// Ordering     below
// Determinism  fixed trees: K of the first product is split over the consumers, of the second over
//              kParts, both added in their order; slots in slot order. Bitwise run to run.
// Meaning      reference/experts.cpp, reference/gate.cpp. Bound: rel_l2 <= 1e-2
//
// How the work lies. First product: a tile is 8 values of h, rows i .. i + 7 of w1 and of w3 as the
// 16 weight rows of an mma, so that gate and up of one value meet in one warp. Tiles go around the
// blocks in the order of experts; all consumers work on one tile, warp w on the w-th slice of K.
// With T <= 8 an mma's columns are the rows, whoever chose the expert, and a warp holds x's slice
// in registers for the whole launch. The finisher adds the slices, applies SwiGLU and sends h to
// all blocks. Second product: block b owns a band of output columns for all experts, so a row's
// slots never leave the block; warps take (expert, part of I). The first experts' h was finished
// while later tiles were multiplied, so the second product starts without a wait. Weights that do
// not depend on the routing (router, shared expert) stream while it is being decided.
//
// Ordering     scores   [row][block] packet {3 scores, epoch}: written by its block's finisher,
//                       read by one warp of every block. Written again by the next launch, which
//                       begins after this one has ended (wait_for_predecessors).
//              hidden   [epoch & 1][pair] 16-byte chunks of 8 bf16: written once by the tile's
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

#include <type_traits>

#include "fused/moe_parts.cuh"

namespace lowlat::nvidia::fused {

namespace moe {

inline constexpr int kBands = kScorers;  // blocks that own columns, and that score experts
inline constexpr int kTileRows = 8;
inline constexpr std::int32_t kNobody = 0x7fff'ffff;  // after every expert

// Sizes of one compiled shape. kMany: more than 8 rows.
template <class S, bool kMany_, int kConsumers_>
struct Layout {
  static constexpr int kConsumers = kConsumers_;  // warps
  static constexpr int kProducer = kConsumers, kFinisher = kConsumers + 1;
  // Two warps more than have a role: registers are given by groups of four warps.
  static constexpr int kThreads = (kConsumers + 4) * plat::kWarpLanes;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8, kOtherRegisters = 64;
  static constexpr int kConsumerRegisters =
      (kLaunchRegisters + (kLaunchRegisters - kOtherRegisters) * 4 / kConsumers) / 8 * 8;
  static_assert(kConsumers % 4 == 0);
  static constexpr bool kMany = kMany_;
  static constexpr int kBands = moe::kBands;
  static constexpr int kHidden = S::kHidden, kInner = S::kIntermediateLocal;
  static constexpr int kExperts = S::kNumExperts, kSlots = S::kExpertsPerToken;
  static constexpr int kBlock = S::kScaleBlock;
  static constexpr int kMaxRows = kMany ? 64 : 8;
  static constexpr int kMaxPairs = kMaxRows * kSlots;

  // First product.
  static constexpr int kSlice = kHidden / kConsumers;       // of K, a warp
  static constexpr int kRun = kSlice % 128 == 0 ? 32 : 16;  // consecutive elements of a thread
  static constexpr int kBlockK = 4 * kRun, kSliceBlocks = kSlice / kBlockK;
  static constexpr int kRowPitch = kHidden / 2 + 2 * kRun;  // fp4 row in shared memory
  static constexpr int kScaleRow = kHidden / 32;
  static constexpr int kTileBytes = 2 * kTileRows * (kHidden / 2 + kScaleRow);
  static constexpr int kSlotBytes = 2 * kTileRows * (kRowPitch + kScaleRow);
  static constexpr int kSharedPitch = kHidden + (kRun == 32 ? 16 : 64);  // e4m3 row
  static constexpr int kGateRows = kExperts / kBands;
  static constexpr int kGatePitch = 2 * kHidden + 16;  // bf16 row
  static constexpr int kTiles = kInner / kTileRows;    // of an expert
  // Second product.
  static constexpr int kBandRows = kHidden / kBands;
  static constexpr int kMTiles = (kBandRows + 15) / 16;
  static constexpr int kInnerBlocks = kInner / 64;
  static constexpr int kParts = kInnerBlocks % 3 == 0 ? 3 : 4;
  static constexpr int kPartBlocks = kInnerBlocks / kParts;
  static constexpr int kInnerRow = kInner / 2, kInnerScaleRow = kInner / 32;
  static constexpr int kBandBytes = kBandRows * (kInnerRow + kInnerScaleRow);
  static constexpr int kPieceBytes = round_up(kBandBytes, 128);
  static constexpr int kPieces = kSlotBytes / kPieceBytes;  // in a slot
  static constexpr int kPacketsPerBand = (kBandRows + 2) / 3;
  static constexpr int kBandScaleRows = (kBandRows + kBlock - 2) / kBlock + 1;  // at most
  static constexpr int kBandScaleColumns = kInner / kBlock;

  static_assert(kSlice % kBlockK == 0 && kHidden % kConsumers == 0 && kInner % 64 == 0 &&
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
  static constexpr int kSecondFloats = kParts * kSecondRows * kBandRows;
  static constexpr int kSumsBytes = kMany || kBuffers * kPartialBytes > kSecondFloats * 4
                                        ? kBuffers * kPartialBytes
                                        : kSecondFloats * 4;
  static constexpr int kBandOffset = 0;
  static constexpr int kSumsOffset = round_up(kBandOffset + kBandRows * kInner, 128);
  static constexpr int kTableOffset = round_up(kSumsOffset + kSumsBytes, 128);
  struct alignas(16) Table {
    std::int32_t ids[kMaxPairs];  // kNobody beyond the launch's pairs
    float weights[kMaxPairs];
    std::int32_t num_experts;
    std::uint32_t stop;  // Watch
    std::uint32_t chosen[kExperts / 32];
    std::uint32_t rows_of[kMany ? 1 : kMaxPairs];                  // mask of an expert's rows
    std::uint16_t expert[kMaxPairs];                               // ascending, one entry each
    std::uint16_t first[kMaxPairs + 1];                            // of an expert in `sorted`
    std::uint16_t sorted[kMaxPairs];                               // pairs by expert, then by pair
    std::uint16_t place[kMaxPairs];                                // of a pair in `sorted`
    std::uint8_t band_scales[kBandScaleRows * kBandScaleColumns];  // of the shared w2 band
  };
  static constexpr int kBarrierOffset =
      round_up(kTableOffset + static_cast<int>(sizeof(Table)), 16);
  static constexpr int kMaxSlots = 8;
  struct Barriers {
    std::uint64_t full[kMaxSlots], empty[kMaxSlots];
    std::uint64_t piece_full[kMaxSlots * kPieces], piece_empty[kMaxSlots * kPieces];
    std::uint64_t band_full, table, sums_full[kBuffers], sums_empty[kBuffers];
  };
  static constexpr int kRingOffset =
      round_up(kBarrierOffset + static_cast<int>(sizeof(Barriers)), 128);
  static constexpr int kFit = (kSmemLimit - kRingOffset) / kSlotBytes;
  static constexpr int kRing = kFit < kMaxSlots ? kFit : kMaxSlots;
  static_assert(kRing >= 2, "the shared expert's tile takes two slots");
  static constexpr int kRingPieces = kRing * kPieces;
  // Experts from one item of a warp to its next, at most.
  static constexpr int kReach = (kConsumers + kParts - 1) / kParts;
  static_assert(kReach <= kRingPieces, "a warp is at most one turn of the ring ahead");
  static constexpr int kSmemBytes = kRingOffset + kRing * kSlotBytes;

  // Workspace, in bytes from its start. The kernel of 8 rows and that of 64 have one each.
  static constexpr int kMaxGrid = 1024;
  static constexpr std::size_t kHiddenRow = kInner * 2;
  static constexpr std::size_t kHiddenBytes = kSecondRows * kHiddenRow;  // of one parity
  static constexpr std::size_t kHiddenOffset = 4 * kMaxGrid;             // after the epochs
  static constexpr std::size_t kScoresOffset = kHiddenOffset + 2 * kHiddenBytes;
  static constexpr std::size_t kScoresBytes = std::size_t{16} * kBands * kMaxRows;
  static constexpr std::size_t kSecondOffset = kScoresOffset + kScoresBytes;
  static constexpr std::size_t kWorkspaceBytes =
      kSecondOffset + (kMany ? std::size_t{4} * kBands * kSecondFloats : 0);
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
  int with_more;        // blocks that have one tile of the shared expert more than the others

  LOWLAT_DEVICE std::uint32_t slot_address(int slot) const {
    return sm90::shared_address(smem) + L::kRingOffset + slot * L::kSlotBytes;
  }
  LOWLAT_DEVICE float* partial(int buffer) const {
    return reinterpret_cast<float*>(smem + L::kSumsOffset + buffer * L::kPartialBytes);
  }
  // [kParts][kSecondRows][kBandRows]
  LOWLAT_DEVICE float* second() const {
    if constexpr (L::kMany) {
      return reinterpret_cast<float*>(workspace + L::kSecondOffset) +
             static_cast<std::size_t>(block_idx) * L::kSecondFloats;
    } else {
      return reinterpret_cast<float*>(smem + L::kSumsOffset);
    }
  }
  // Row `row` of h: a pair, or kMaxPairs + t of the shared expert.
  LOWLAT_DEVICE unsigned char* hidden(std::uint32_t parity, int row) const {
    return workspace + L::kHiddenOffset + parity * L::kHiddenBytes + row * L::kHiddenRow;
  }
  LOWLAT_DEVICE plat::TaggedWords* score_packet(int row, int block) const {
    return reinterpret_cast<plat::TaggedWords*>(workspace + L::kScoresOffset) + row * kBands +
           block;
  }
  LOWLAT_DEVICE bool gates() const { return scores && block_idx < kBands; }

  // Shared tiles go to blocks 0, 1, .. first; each is worth two routed ones, so blocks that have
  // one less take two routed tiles more.
  LOWLAT_DEVICE int shared_tiles() const {
    return shared ? (L::kTiles - block_idx + num_blocks - 1) / num_blocks : 0;
  }
  // The n-th routed tile of this block (its number among all, in order of experts). Few rows: one
  // tile goes around at a time; otherwise two of one expert, so that its rows of x serve both.
  LOWLAT_DEVICE int routed_tile(int n) const {
    constexpr int kTurn = L::kMany ? 2 : 1, kExtra = 2 / kTurn;  // tiles; turns of a shared tile
    const int without = num_blocks - with_more;
    int turn = n / kTurn;
    if (block_idx >= with_more) {
      if (turn < kExtra) {
        return (turn * without + block_idx - with_more) * kTurn + n % kTurn;
      }
      turn -= kExtra;
    }
    return (kExtra * without + turn * num_blocks + block_idx) * kTurn + n % kTurn;
  }
  LOWLAT_DEVICE int num_groups() const { return (a.rows + kColumns - 1) / kColumns; }
};

// ------------------------------------------------------------------------------------ producer

template <class L>
struct Producer {
  const Region<L>& r;
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

  LOWLAT_DEVICE bool run_routed() {
    if (!barrier_wait(&r.barriers.table, 0, r.watch)) return false;
    const auto& w = r.a.w;
    const int num_experts = r.table.num_experts, num_tiles = num_experts * L::kTiles;
    for (int n = 0;; ++n) {
      const int number = r.routed_tile(n);
      if (number >= num_tiles) break;
      const int expert = r.table.expert[number / L::kTiles];
      const std::size_t row =
          static_cast<std::size_t>(expert) * L::kInner + number % L::kTiles * kTileRows;
      if (!begin_slot(L::kTileBytes)) return false;
      const int i = r.lane % kTileRows, up = r.lane / kTileRows;
      if (up < 2) {
        load(r.lane * L::kRowPitch, (up ? w.w3 : w.w1).codes + (row + i) * (L::kHidden / 2),
             L::kHidden / 2);
      } else if (i < 2 && up == 2) {
        load(2 * kTileRows * L::kRowPitch + i * kTileRows * L::kScaleRow,
             (i ? w.w3 : w.w1).scales + row * L::kScaleRow, kTileRows * L::kScaleRow);
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

// ------------------------------------------------------------------------------------ steps

// One use of a tile: its routed number and which columns its rows meet. Consumers and the finisher
// walk the same steps. T <= 8: columns are rows and every tile is one step. Otherwise columns are
// the expert's pairs, eight at a time.
template <class L>
struct Steps {
  const Region<L>& r;
  int n, number, expert, group, num_groups;

  LOWLAT_DEVICE explicit Steps(const Region<L>& region) : r(region), n(-1) { next_tile(); }
  LOWLAT_DEVICE bool done() const { return number >= r.table.num_experts * L::kTiles; }
  LOWLAT_DEVICE bool is_last_of_tile() const { return group + 1 == num_groups; }
  LOWLAT_DEVICE void next() {
    if (++group >= num_groups) next_tile();
  }
  LOWLAT_DEVICE int first_pair() const { return r.table.first[expert] + group * kColumns; }
  LOWLAT_DEVICE int num_pairs() const {
    const int left = r.table.first[expert + 1] - first_pair();
    return L::kMany && left > kColumns ? kColumns : left;
  }

 private:
  LOWLAT_DEVICE void next_tile() {
    number = r.routed_tile(++n);
    group = 0;
    num_groups = 1;
    if (done()) return;
    expert = number / L::kTiles;
    if constexpr (L::kMany) {
      const int pairs = r.table.first[expert + 1] - r.table.first[expert];
      num_groups = (pairs + kColumns - 1) / kColumns;
    }
  }
};

// ------------------------------------------------------------------------------------ consumers

// A barrier of the consumers; every one of them comes, also after a fault.
template <class L>
LOWLAT_DEVICE void consumers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(L::kConsumers * plat::kWarpLanes) : "memory");
}

template <class L>
struct Consumer {
  const Region<L>& r;
  int warp;
  int g = 0, t = 0;  // place in the fragments
  int uses = 0;      // of the ring
  int sums = 0;      // of the partial buffers
  // x of this warp's slice: T <= 8: in the order of pairs, for the whole launch; else as loaded.
  static constexpr int kPairs = L::kRun / 2;  // of a run
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

  LOWLAT_DEVICE const unsigned char* x_address(int row) const {
    return reinterpret_cast<const unsigned char*>(r.a.x) +
           (static_cast<std::size_t>(row) * L::kHidden + warp * L::kSlice + t * L::kRun) * 2;
  }
  LOWLAT_DEVICE void load_x(int block, const unsigned char* address) {
    const uint4* src = reinterpret_cast<const uint4*>(address + block * L::kBlockK * 2);
#pragma unroll
    for (int i = 0; i < L::kRun / 8; ++i) {
      const uint4 eight = __ldg(src + i);
      if constexpr (L::kMany) {
        x[block][4 * i] = eight.x, x[block][4 * i + 1] = eight.y;
        x[block][4 * i + 2] = eight.z, x[block][4 * i + 3] = eight.w;
      } else {
        pair(eight, &x[block][4 * i]);
      }
    }
  }
  LOWLAT_DEVICE static void pair(uint4 eight, std::uint32_t* out) {
    std::uint32_t pairs[4];
    pair_bf16(eight, pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = pairs[i];
  }

  LOWLAT_DEVICE void load_group(int group) {
    const int row = group * kColumns + g;
    const unsigned char* address = x_address(row < r.a.rows ? row : r.a.rows - 1);
#pragma unroll
    for (int block = 0; block < L::kSliceBlocks; ++block) load_x(block, address);
  }
  // The fragment of one block of K in the order of pairs.
  LOWLAT_DEVICE void fragment(int block, std::uint32_t (&out)[kPairs]) const {
#pragma unroll
    for (int i = 0; i < kPairs; i += 4) {
      const std::uint32_t* eight = &x[block][i];
      if constexpr (L::kMany) {
        pair(make_uint4(eight[0], eight[1], eight[2], eight[3]), out + i);
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) out[i + k] = eight[k];
      }
    }
  }

  // Gives the slice's sums of the columns in `mask` to the finisher.
  LOWLAT_DEVICE bool hand_over(const float (&acc)[4], std::uint32_t mask) {
    const int buffer = sums % L::kBuffers;
    if (sums >= L::kBuffers &&
        !barrier_wait(&r.barriers.sums_empty[buffer], (sums / L::kBuffers - 1) & 1, r.watch)) {
      return false;
    }
    float* dst = r.partial(buffer) + (warp * kColumns + 2 * t) * 2 * kTileRows + g;
    if (mask >> 2 * t & 1u) {
      dst[0] = acc[0];
      dst[kTileRows] = acc[2];
    }
    if (mask >> 2 * t & 2u) {
      dst[2 * kTileRows] = acc[1];
      dst[3 * kTileRows] = acc[3];
    }
    __syncwarp();
    if (r.lane == 0) sm90::barrier_arrive(&r.barriers.sums_full[buffer]);
    ++sums;
    return true;
  }
  LOWLAT_DEVICE static std::uint32_t first_columns(int count) {
    return count >= kColumns ? 0xffu : (1u << count) - 1u;
  }
  LOWLAT_DEVICE std::uint32_t group_mask(int group) const {
    return first_columns(r.a.rows - group * kColumns);
  }

  LOWLAT_DEVICE bool run_gate() {
    if (!wait_slot(0)) return false;
    const int row = g < L::kGateRows ? g : L::kGateRows - 1;  // other rows: computed, not used
    const std::uint32_t address = r.slot_address(uses % L::kRing) + row * L::kGatePitch +
                                  (warp * L::kSlice + t * L::kRun) * 2;
    for (int group = 0; group < r.num_groups(); ++group) {
      if (L::kMany) load_group(group);
      float acc[2][4] = {};
#pragma unroll
      for (int block = 0; block < L::kSliceBlocks; ++block) {
        std::uint32_t b[kPairs];
        fragment(block, b);
#pragma unroll
        for (int half = 0; half < L::kRun / 16; ++half) {
          const std::uint32_t src = address + block * L::kBlockK * 2 + half * 32;
          const uint4 low[2] = {smem_load16(src), smem_load16(src + 16)};
          const uint4 high[2] = {};
          multiply_bf16(acc[(block + half) & 1], low, high, b + 8 * half);
        }
      }
      for (int i = 0; i < 4; ++i) acc[0][i] += acc[1][i];
      if (!hand_over(acc[0], group_mask(group))) return false;
    }
    free_slot();
    return true;
  }

  // Scale bytes of a shared tile's slice, gate and up.
  struct TileScales {
    std::uint8_t gate[L::kSliceBlocks], up[L::kSliceBlocks];
  };
  LOWLAT_DEVICE void load_scales(TileScales& out, int tile) const {
    const std::size_t scale_row =
        static_cast<std::size_t>(tile * kTileRows / L::kBlock) * (L::kHidden / L::kBlock);
#pragma unroll
    for (int block = 0; block < L::kSliceBlocks; ++block) {
      const std::size_t at =
          scale_row + (warp * L::kSlice + block * L::kBlockK + t * L::kRun) / L::kBlock;
      out.gate[block] = __ldg(r.a.w.shared_w1.scales + at);
      out.up[block] = __ldg(r.a.w.shared_w3.scales + at);
    }
  }

  // Gate in one slot, up in the next; x as the block-fp8 linear sees it.
  LOWLAT_DEVICE bool run_shared_tile(const TileScales& scales) {
    if (!wait_slot(0) || !wait_slot(1)) return false;
    const std::uint32_t offset = g * L::kSharedPitch + warp * L::kSlice + t * L::kRun;
    const std::uint32_t low_address = r.slot_address(uses % L::kRing) + offset;
    const std::uint32_t high_address = r.slot_address((uses + 1) % L::kRing) + offset;
    for (int group = 0; group < r.num_groups(); ++group) {
      if (L::kMany) load_group(group);
      float acc[2][4] = {};
      std::uint32_t exponent = 0;
#pragma unroll
      for (int block = 0; block < L::kSliceBlocks; ++block) {
        std::uint32_t b[kPairs];
        fragment(block, b);
        // A scale group is a run of `kShare` lanes, or two blocks of K where it is longer.
        constexpr int kShare = L::kBlock < 4 * L::kRun ? L::kBlock / L::kRun : 4;
        constexpr int kSpan = L::kBlock / (kShare * L::kRun);
        if (block % kSpan == 0) {
          float amax = pairs_amax<kPairs>(b);
          if constexpr (kSpan == 2) {
            std::uint32_t other[kPairs];
            fragment(block + 1, other);
            amax = fmaxf(amax, pairs_amax<kPairs>(other));
          }
          exponent = activation_exponent(lanes_max<kShare>(amax));
        }
        quantize_pairs<kPairs>(b, exponent);
#pragma unroll
        for (int half = 0; half < L::kRun / 16; ++half) {
          const std::uint32_t at = block * L::kBlockK + half * 16;
          multiply_e4m3(acc[(block + half) & 1], smem_load16(low_address + at),
                        smem_load16(high_address + at), e4m3_factor(scales.gate[block]),
                        e4m3_factor(scales.up[block]), b + 8 * half);
        }
      }

      for (int i = 0; i < 4; ++i) acc[0][i] += acc[1][i];
      if (!hand_over(acc[0], group_mask(group))) return false;
    }
    free_slot();
    free_slot();
    return true;
  }

  // ---- routing

  // Ids and weights of all rows, in every block the same.
  LOWLAT_DEVICE void route(stages::GateRule rule, stages::GateSum sum_rule) {
    for (int row = warp; row < r.a.rows; row += L::kConsumers) {
      route_row<L>(r, row, rule);
      weigh_row<L>(r, row, sum_rule);
    }
    consumers_sync<L>();
  }

  // Pairs by expert: each pair counts those before it, so nobody takes tickets.
  LOWLAT_DEVICE void make_table() {
    auto& table = r.table;
    const int num_pairs = r.a.rows * L::kSlots;
    constexpr int kStride = L::kConsumers * plat::kWarpLanes;
    constexpr int kOwnPairs = (L::kMaxPairs + kStride - 1) / kStride;
    int id[kOwnPairs], lower[kOwnPairs], earlier[kOwnPairs];
#pragma unroll
    for (int k = 0; k < kOwnPairs; ++k) {
      const int pair = k * kStride + warp * plat::kWarpLanes + r.lane;
      id[k] = lower[k] = earlier[k] = 0;
      if (pair >= num_pairs) continue;
      id[k] = table.ids[pair];
#pragma unroll 1
      for (int begin = 0; begin < num_pairs; begin += 4) {  // the rest of the array is kNobody
        const int4 four = *reinterpret_cast<const int4*>(&table.ids[begin]);
        const int theirs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          lower[k] += theirs[i] < id[k] ? 1 : 0;
          earlier[k] += theirs[i] == id[k] && begin + i < pair ? 1 : 0;
        }
      }
      table.sorted[lower[k] + earlier[k]] = static_cast<std::uint16_t>(pair);
      table.place[pair] = static_cast<std::uint16_t>(lower[k] + earlier[k]);
      if (earlier[k] == 0) atomicOr(&table.chosen[id[k] / 32], 1u << id[k] % 32);
    }
    consumers_sync<L>();
#pragma unroll
    for (int k = 0; k < kOwnPairs; ++k) {
      const int pair = k * kStride + warp * plat::kWarpLanes + r.lane;
      if (pair >= num_pairs) continue;
      int before = 0, total = 0;
#pragma unroll 2
      for (int word = 0; word < L::kExperts / 32; ++word) {
        const std::uint32_t bits = table.chosen[word];
        const std::uint32_t below = (1u << id[k] % 32) - 1u;
        total += __popc(bits);
        before += word < id[k] / 32 ? __popc(bits) : word == id[k] / 32 ? __popc(bits & below) : 0;
      }
      if (earlier[k] == 0) {
        table.expert[before] = static_cast<std::uint16_t>(id[k]);
        table.first[before] = static_cast<std::uint16_t>(lower[k]);
      }
      if constexpr (!L::kMany) atomicOr(&table.rows_of[before], 1u << pair / L::kSlots);
      if (pair == 0) {
        table.first[total] = static_cast<std::uint16_t>(num_pairs);
        table.num_experts = total;
      }
    }
    __syncwarp();
    if (r.lane == 0) sm90::barrier_arrive(&r.barriers.table);
  }

  // ---- routed experts, first product

  // A run of fp4 codes.
  using Codes = std::conditional_t<L::kRun == 32, uint4, uint2>;
  LOWLAT_DEVICE static Codes load_codes(std::uint32_t address) {
    if constexpr (L::kRun == 32) {
      return smem_load16(address);
    } else {
      return smem_load8(address);
    }
  }

  LOWLAT_DEVICE const unsigned char* step_x(const Steps<L>& step) const {
    const int pairs = step.num_pairs();
    const int pair = r.table.sorted[step.first_pair() + (g < pairs ? g : pairs - 1)];
    return x_address(pair / L::kSlots);
  }

  LOWLAT_DEVICE bool run_tiles() {
    Steps<L> step(r);
    if constexpr (L::kMany) {
      if (!step.done()) {
        const unsigned char* address = step_x(step);
#pragma unroll
        for (int block = 0; block < L::kSliceBlocks; ++block) load_x(block, address);
      }
    }
    while (!step.done()) {
      const int expert = step.expert, pairs = step.num_pairs();
      const bool last_of_tile = step.is_last_of_tile();
      if (!wait_slot(0)) return false;
      const std::uint32_t slot = r.slot_address(uses % L::kRing);
      const std::uint32_t codes = slot + g * L::kRowPitch + (warp * L::kSlice + t * L::kRun) / 2;
      const std::uint32_t scales = slot + 2 * kTileRows * L::kRowPitch + g * L::kScaleRow +
                                   (warp * L::kSlice + t * L::kRun) / 32;
      // All reads first: the slot is free again before the products are done.
      Codes low[L::kSliceBlocks], high[L::kSliceBlocks];
      std::uint32_t low_scale[L::kSliceBlocks], high_scale[L::kSliceBlocks];
#pragma unroll
      for (int block = 0; block < L::kSliceBlocks; ++block) {
        low[block] = load_codes(codes + block * (L::kBlockK / 2));
        high[block] = load_codes(codes + kTileRows * L::kRowPitch + block * (L::kBlockK / 2));
        low_scale[block] = smem_load1(scales + block * (L::kBlockK / 32));
        high_scale[block] =
            smem_load1(scales + kTileRows * L::kScaleRow + block * (L::kBlockK / 32));
      }

      if (last_of_tile) free_slot();
      const int first_pair = L::kMany ? step.first_pair() : 0;
      step.next();
      const unsigned char* next_x = nullptr;  // where other rows follow
      if constexpr (L::kMany) {
        if (!step.done() && step.first_pair() != first_pair) next_x = step_x(step);
      }
      float acc[2][4] = {};
#pragma unroll
      for (int block = 0; block < L::kSliceBlocks; ++block) {
        std::uint32_t b[kPairs];
        fragment(block, b);
        const std::uint32_t low_factor = fp4_factor(low_scale[block]);
        const std::uint32_t high_factor = fp4_factor(high_scale[block]);
        if constexpr (L::kRun == 16) {
          multiply_fp4(acc[block & 1], low[block], high[block], low_factor, high_factor, b);
        } else {
          const uint4 l = low[block], h = high[block];
          multiply_fp4(acc[0], make_uint2(l.x, l.y), make_uint2(h.x, h.y), low_factor, high_factor,
                       b);
          multiply_fp4(acc[1], make_uint2(l.z, l.w), make_uint2(h.z, h.w), low_factor, high_factor,
                       b + 8);
        }

        if constexpr (L::kMany) {
          if (next_x != nullptr) load_x(block, next_x);
        }
      }
      for (int i = 0; i < 4; ++i) acc[0][i] += acc[1][i];
      const std::uint32_t mask = L::kMany ? first_columns(pairs) : r.table.rows_of[expert];
      if (!hand_over(acc[0], mask)) return false;
    }
    return true;
  }

  // ---- second product

  // A part of a row of h: kPartBlocks blocks of 16 elements a thread, in the order of pairs.
  struct Hidden {
    uint4 chunk[L::kPartBlocks][2];
  };
  LOWLAT_DEVICE const unsigned char* hidden_address(int row, int part) const {
    return r.hidden(r.epoch & 1u, row) + part * L::kPartBlocks * 128 + t * 32;
  }
  LOWLAT_DEVICE static void load_hidden(Hidden& h, int block, const unsigned char* address) {
    h.chunk[block][0] = load_packet(address + block * 128);
    h.chunk[block][1] = load_packet(address + block * 128 + 16);
  }
  // Until every chunk has arrived; all lanes together.
  LOWLAT_DEVICE bool complete(Hidden& h, const unsigned char* address) const {
#pragma unroll
    for (int block = 0; block < L::kPartBlocks; ++block) {
      for (int tries = 1; __any_sync(
               plat::kAllLanes, h.chunk[block][0].w == kPoison || h.chunk[block][1].w == kPoison);
           ++tries) {
        const bool late = tries % kTriesPerLook == 0 && r.watch.ended(kHiddenEvent);
        if (__any_sync(plat::kAllLanes, late)) return false;
        load_hidden(h, block, address);
      }
    }
    return true;
  }

  // Sums of sixteen columns of the band to their place.
  LOWLAT_DEVICE void store_second(const float (&acc)[4], int m, int part, int row, int count,
                                  float factor) const {
    float* dst =
        r.second() + (static_cast<std::size_t>(part) * L::kSecondRows + row) * L::kBandRows;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = 2 * t + (i & 1), n = 16 * m + (i >> 1) * 8;
      if (n < L::kBandRows && column < count) {
        dst[column * L::kBandRows + n + g] = acc[i] * factor;
      }
    }
  }

  // Row of h of column g of a group of an expert's pairs (or of rows, for the shared expert).
  LOWLAT_DEVICE int hidden_row(int first, int count) const {
    return r.table.sorted[first + (g < count ? g : count - 1)];
  }

  // Sixteen columns of the band (eight where it ends) of the shared expert, a part of I.
  LOWLAT_DEVICE bool run_shared_item(int part, int m) {
    if (!barrier_wait(&r.barriers.band_full, 0, r.watch)) return false;
    const std::uint32_t codes = sm90::shared_address(r.smem) + L::kBandOffset +
                                (16 * m + g) * L::kInner + part * L::kPartBlocks * 64 + t * 16;
    const bool whole = 16 * m + 8 < L::kBandRows;
    const int band = r.block_idx * L::kBandRows;
    const int low_row = (band + 16 * m) / L::kBlock - band / L::kBlock;
    const int high_row = whole ? (band + 16 * m + 8) / L::kBlock - band / L::kBlock : low_row;
    for (int group = 0; group < r.num_groups(); ++group) {
      const int row = group * kColumns + g;
      const unsigned char* address =
          hidden_address(L::kMaxPairs + (row < r.a.rows ? row : r.a.rows - 1), part);
      Hidden h;
#pragma unroll
      for (int block = 0; block < L::kPartBlocks; ++block) load_hidden(h, block, address);
      if (!complete(h, address)) return false;
      float acc[4] = {};
      std::uint32_t exponent = 0;
#pragma unroll
      for (int block = 0; block < L::kPartBlocks; ++block) {
        std::uint32_t b[8];
        unpack(h, block, b);
        if constexpr (L::kBlock == 32) {
          exponent = activation_exponent(lanes_max<2>(pairs_amax<8>(b)));
        } else {
          static_assert(L::kBlock == 32 || L::kPartBlocks % 2 == 0);
          if (block % 2 == 0) {
            std::uint32_t other[8];
            unpack(h, block + 1, other);
            exponent =
                activation_exponent(lanes_max<4>(fmaxf(pairs_amax<8>(b), pairs_amax<8>(other))));
          }
        }
        quantize_pairs<8>(b, exponent);
        const int column = ((part * L::kPartBlocks + block) * 64 + t * 16) / L::kBlock;
        const std::uint8_t* scales = r.table.band_scales + column;
        const uint4 low = smem_load16(codes + block * 64);
        const uint4 high = whole ? smem_load16(codes + 8 * L::kInner + block * 64) : uint4{};
        multiply_e4m3(acc, low, high, e4m3_factor(scales[low_row * L::kBandScaleColumns]),
                      e4m3_factor(scales[high_row * L::kBandScaleColumns]), b);
      }
      store_second(acc, m, part, L::kMaxPairs + group * kColumns, r.a.rows - group * kColumns,
                   1.0f);
    }
    return true;
  }
  LOWLAT_DEVICE static void unpack(const Hidden& h, int block, std::uint32_t (&out)[8]) {
    const uint4 a = h.chunk[block][0], b = h.chunk[block][1];
    out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
    out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
  }

  // acc += sixteen columns (eight when not kWhole) times an expert's rows of h; `next`: from where
  // h is loaded anew, block by block, or nullptr.
  template <bool kWhole>
  LOWLAT_DEVICE void multiply_second(float (&acc)[4], Hidden& h, std::uint32_t codes,
                                     std::uint32_t scales, int m, const unsigned char* next) const {
    const std::uint32_t code = codes + 16 * m * L::kInnerRow;
    const std::uint32_t scale = scales + 16 * m * L::kInnerScaleRow;
#pragma unroll
    for (int block = 0; block < L::kPartBlocks; ++block) {
      std::uint32_t b[8];
      unpack(h, block, b);
      const uint2 low = smem_load8(code + block * 32);
      const std::uint32_t low_factor = fp4_factor(smem_load1(scale + block * 2));
      uint2 high = {};
      std::uint32_t high_factor = 0;
      if constexpr (kWhole) {
        high = smem_load8(code + 8 * L::kInnerRow + block * 32);
        high_factor = fp4_factor(smem_load1(scale + 8 * L::kInnerScaleRow + block * 2));
      }
      multiply_fp4(acc, low, high, low_factor, high_factor, b);
      if (next != nullptr) load_hidden(h, block, next);
    }
  }

  LOWLAT_DEVICE bool run_second() {
    constexpr float kFactor = 1 << kFp4Shift;
    // `second` may lie over the partial sums: wait as if for every buffer.
    for (int i = 0; i < L::kBuffers; ++i, ++sums) {
      if (sums >= L::kBuffers && !barrier_wait(&r.barriers.sums_empty[sums % L::kBuffers],
                                               (sums / L::kBuffers - 1) & 1, r.watch)) {
        return false;
      }
    }
    if (r.block_idx >= kBands) return true;
    const int num_items = r.table.num_experts * L::kParts;
    int item = warp;
    if (r.shared) {
      constexpr int kItems = L::kParts * L::kMTiles;
      for (; item < kItems; item += L::kConsumers) {
        if (!run_shared_item(item / L::kMTiles, item % L::kMTiles)) return false;
      }
      item -= kItems;
    }
    Hidden h;
    const unsigned char* address = nullptr;
    if (item < num_items) {
      const int first = r.table.first[item / L::kParts];
      const int count = r.table.first[item / L::kParts + 1] - first;
      address = hidden_address(hidden_row(first, count), item % L::kParts);
#pragma unroll
      for (int block = 0; block < L::kPartBlocks; ++block) load_hidden(h, block, address);
    }
    while (item < num_items) {
      const int expert = item / L::kParts, part = item % L::kParts;
      const int piece = expert % L::kRingPieces;
      const int slot = (uses + piece / L::kPieces) % L::kRing;
      const std::uint32_t base = r.slot_address(slot) + piece % L::kPieces * L::kPieceBytes;
      const std::uint32_t codes = base + g * L::kInnerRow + part * L::kPartBlocks * 32 + t * 8;
      const std::uint32_t scales = base + L::kBandRows * L::kInnerRow + g * L::kInnerScaleRow +
                                   part * L::kPartBlocks * 2 + t / 2;
      const int end = r.table.first[expert + 1];
      int first = r.table.first[expert];
      // A parity tells a phase from the next only: the piece's use before must be over. Nobody is
      // further ahead, because the producer fills in order (kReach).
      if (expert >= L::kRingPieces && !barrier_wait(&r.barriers.piece_empty[piece],
                                                    (expert / L::kRingPieces - 1) & 1, r.watch)) {
        return false;
      }
      if (!barrier_wait(&r.barriers.piece_full[piece], expert / L::kRingPieces & 1, r.watch)) {
        return false;
      }
      for (;;) {
        if (!complete(h, address)) return false;
        // The next columns: more of this expert's, or the warp's next item.
        const int count = end - first, next_first = first + kColumns;
        const unsigned char* next = nullptr;
        if (next_first < end) {
          next = hidden_address(hidden_row(next_first, end - next_first), part);
        } else if (item + L::kConsumers < num_items) {
          const int next_expert = (item + L::kConsumers) / L::kParts;
          const int begin = r.table.first[next_expert];
          next = hidden_address(hidden_row(begin, r.table.first[next_expert + 1] - begin),
                                (item + L::kConsumers) % L::kParts);
        }
        // Sixteen columns at a time, by one piece of code; the last fetch the next columns' h.
        constexpr int kLast = L::kMTiles - 1;
        constexpr bool kWhole = L::kBandRows % 16 == 0;
#pragma unroll 1
        for (int m = 0; m < kLast; ++m) {
          float acc[4] = {};
          multiply_second<true>(acc, h, codes, scales, m, nullptr);
          store_second(acc, m, part, first, count, kFactor);
        }
        float acc[4] = {};
        multiply_second<kWhole>(acc, h, codes, scales, kLast, next);
        store_second(acc, kLast, part, first, count, kFactor);

        address = next;
        if (next_first >= end) break;
        first = next_first;
      }
      __syncwarp();
      if (r.lane == 0) sm90::barrier_arrive(&r.barriers.piece_empty[piece]);
      item += L::kConsumers;
    }
    return true;
  }

  // Before the kernels before this one have ended.
  LOWLAT_DEVICE void run_early(TileScales& scales) {
    g = r.lane / 4;
    t = r.lane % 4;
    if (r.shared_tiles() > 0) load_scales(scales, r.block_idx);
  }
  LOWLAT_DEVICE bool run(stages::GateRule rule, stages::GateSum sum_rule, TileScales& scales) {
    if constexpr (!L::kMany) load_group(0);
    bool going = !r.gates() || run_gate();
    route(rule, sum_rule);  // every consumer comes to its barriers
    make_table();
    // The producer fetches the first experts meanwhile.
    for (int n = 0; going && n < r.shared_tiles(); ++n) {
      if (n > 0) load_scales(scales, n * r.num_blocks + r.block_idx);
      going = run_shared_tile(scales);
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
  const Region<L>& r;
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
        r.partial(sums % L::kBuffers) + (first * kColumns + column) * 2 * kTileRows + row;
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

  LOWLAT_DEVICE bool run_gate(stages::GateRule rule) {
    for (int group = 0; group < r.num_groups(); ++group) {
      if (!wait_sums()) return false;
      const int column = r.lane / L::kGateRows, row = r.lane % L::kGateRows;
      float score = 0.0f;
      if (column < kColumns) {
        score = stages::gate_score(slices<L::kConsumers>(row, column, 0), rule);
      }
      free_sums();
      std::uint32_t words[3];
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        const int source = r.lane * L::kGateRows + (j < L::kGateRows ? j : 0);
        words[j] = __float_as_uint(
            __shfl_sync(plat::kAllLanes, score, source < plat::kWarpLanes ? source : 0));
      }
      const int x_row = group * kColumns + r.lane;
      if (r.lane < kColumns && x_row < r.a.rows) {
        plat::store_tagged(r.score_packet(x_row, r.block_idx), words, r.epoch);
      }
    }
    return true;
  }

  // Eight values of h of one column: bf16 in the order of pairs, one chunk.
  template <bool kShared>
  LOWLAT_DEVICE void finish(int column, unsigned char* row, int tile) const {
    const int weight_row = r.lane % (2 * kTileRows), half = r.lane / (2 * kTileRows);
    float sum = slices<L::kConsumers / 2>(weight_row, column, half * (L::kConsumers / 2));
    sum += __shfl_xor_sync(plat::kAllLanes, sum, 2 * kTileRows);
    if constexpr (!kShared) sum *= static_cast<float>(1 << kFp4Shift);
    const float value = round_to_bf16(sum);
    const float up = __shfl_down_sync(plat::kAllLanes, value, kTileRows);
    const float h = stages::swiglu(value, up, kSwigluLimit, !kShared);
    const float later = __shfl_down_sync(plat::kAllLanes, h, 4);
    const std::uint32_t pair = pack_bf16(h, later);  // lanes 0 .. 3: values i and i + 4
    uint4 chunk;
    chunk.x = __shfl_sync(plat::kAllLanes, pair, 0);
    chunk.y = __shfl_sync(plat::kAllLanes, pair, 1);
    chunk.z = __shfl_sync(plat::kAllLanes, pair, 2);
    chunk.w = __shfl_sync(plat::kAllLanes, pair, 3);
    if (r.lane == 0) store_packet(row + tile * 16, chunk);
  }

  LOWLAT_DEVICE bool run(stages::GateRule rule) {
    clear_hidden();
    if (r.gates() && !run_gate(rule)) return false;
    const std::uint32_t parity = r.epoch & 1u;
    for (int n = 0; n < r.shared_tiles(); ++n) {
      for (int group = 0; group < r.num_groups(); ++group) {
        if (!wait_sums()) return false;
        for (int column = 0; column < kColumns && group * kColumns + column < r.a.rows; ++column) {
          finish<true>(column, r.hidden(parity, L::kMaxPairs + group * kColumns + column),
                       n * r.num_blocks + r.block_idx);
        }
        free_sums();
      }
    }
    if (!barrier_wait(&r.barriers.table, 0, r.watch)) return false;
    for (Steps<L> step(r); !step.done(); step.next()) {
      if (!wait_sums()) return false;
      for (int i = 0; i < step.num_pairs(); ++i) {
        const int pair = r.table.sorted[step.first_pair() + i];
        finish<false>(L::kMany ? i : pair / L::kSlots, r.hidden(parity, pair),
                      step.number % L::kTiles);
      }
      free_sums();
    }
    return true;
  }
};

// ------------------------------------------------------------------------------------ epilogue

// All threads, after the block's sync: y of the band, stored and published.
template <class L>
LOWLAT_DEVICE void finish_band(const Region<L>& r, int first_row) {
  const float* second = r.second();
  const auto parts = [&](int row, int n) {
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < L::kParts; ++part) {
      sum += second[(static_cast<std::size_t>(part) * L::kSecondRows + row) * L::kBandRows + n];
    }
    return sum;
  };
  store_band<L>(r, first_row, [&](int row, int n) {
    float d[L::kSlots];
#pragma unroll
    for (int slot = 0; slot < L::kSlots; ++slot) {
      const int pair = row * L::kSlots + slot;
      d[slot] = round_to_bf16(r.table.weights[pair] * parts(r.table.place[pair], n));
    }
    float sum = 0.0f;
#pragma unroll
    for (int slot = 0; slot < L::kSlots; ++slot) sum += d[slot];
    const float y = round_to_bf16(sum);
    return r.shared ? y + round_to_bf16(parts(L::kMaxPairs + row, n)) : y;
  });
}

template <class L>
__global__ void __launch_bounds__(L::kThreads, 1)
    moe_region_mxfp4_sm90(const __grid_constant__ MoeArgs args, const Rules rules) {
  extern __shared__ __align__(128) unsigned char smem[];
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
                 0};
  r.with_more = r.shared ? L::kTiles % r.num_blocks : 0;
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
    sm90::barrier_init(&barriers.table, L::kConsumers);
    table.stop = 0;
  }
  sm90::fence_barrier_init();
  static_assert(kSlotBarriers + kPieceBarriers + 2 * L::kBuffers < L::kThreads);

  for (int i = thread; i < L::kExperts / 32; i += L::kThreads) table.chosen[i] = 0;
  for (int i = thread; i < L::kMaxPairs; i += L::kThreads) table.ids[i] = kNobody;
  if constexpr (!L::kMany) {
    for (int i = thread; i < L::kMaxPairs; i += L::kThreads) table.rows_of[i] = 0;
  }
  plat::block_sync();

  Producer<L> producer = {r};
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
  wait_at(args.before);
  std::uint32_t* epoch_word = reinterpret_cast<std::uint32_t*>(args.workspace) + r.block_idx;
  r.epoch = *epoch_word + 1;
  r.watch.deadline_ns = plat::clock_ns() + args.fault.budget_ns;
  if (args.fault.abort_words != nullptr) {
    r.watch.abort_word = args.fault.abort_words[args.fault.tp_rank];
  }
  if (warp < L::kConsumers) {
    sm90::more_registers<L::kConsumerRegisters>();
    consumer.run(rules.rule, rules.sum_rule, scales);
  } else {
    if (warp == L::kProducer) {
      if (going) producer.run_routed();
    } else if (warp == L::kFinisher) {
      Finisher<L> finisher = {r};
      finisher.run(rules.rule);
    }
  }
  plat::block_sync();
  if (table.stop == 0) {
    sm90::launch_dependents();
    if (r.block_idx < kBands) finish_band(r, rules.first_row);
    if (thread == 0) *epoch_word = r.epoch;
    return;
  }
  if (warp == L::kProducer) producer.drain();
  if (thread == 0) report_fault(r);
}

}  // namespace moe
}  // namespace lowlat::nvidia::fused

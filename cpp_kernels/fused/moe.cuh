// moe_region_mxfp4_sm90: router, routed MXFP4 experts and shared expert for few rows, one launch.
//
// Math         z = x gate^T; ids and weights as stages/gate.hpp. For pair p (a row, a slot) of
//              expert e: h_p = swiglu(bf(w1_e x), bf(w3_e x)), d_p = bf(weight_p * (w2_e h_p));
//              shared: the same with x and h quantised. y = bf(sum of a row's d_p) + bf(shared)
// Shapes       fused/moe.hpp; T 1 .. kMaxRows of the compiled layout (8 or 64)
// Rounding     as stages/experts.hpp (Marlin's): gate, up, silu, h, d and the sum of slots to
//              bf16; all other sums fp32. x and h enter the routed products as two e4m3 terms under
//              a power of two: 2^-18 of the largest value of 640 (of 32) is the least that counts
// Bytes        each weight of a chosen expert once: shape::moe_weight_bytes
// Floor        V4.1, TP4, T = 6: 175 MB, 37.7 us at 4.65 TB/s. The bench prints the share reached.
// Launch       one block an SM (128 at least): four warp groups that multiply, and one of a
//              producer, a finisher and two gatherers. Weights are on their way before the kernels
//              before have ended.
// Ordering     below
// Determinism  fixed trees: K of the first product is split over the warp groups and added in their
//              order, K of the second lies in one warp; slots in slot order. Bitwise run to run.
// Meaning      reference/experts.cpp, reference/gate.cpp. Bound: rel_l2 <= 1e-2
//
// How the work lies. The products are wgmma's of e4m3: 64 weight rows, whose fp4 codes are moved
// into e4m3's fields in registers (seven instructions for eight codes), times 8 columns in shared
// memory. A group of 32 along K is one product, so its scale multiplies the sums and not the
// weights. bf16 columns keep their eight bits as two e4m3 terms, high and low, added by the same
// sums. An entry is an expert with up to eight of its pairs: its columns.
//
// First product: a tile is 32 values of h, 32 rows of w1 and of w3, so that gate and up of a value
// meet in one block. Tiles go around the blocks in the order of entries, in kChunks pieces along K
// that the warp groups take in turn. The finisher adds their sums, applies SwiGLU and sends h to
// all blocks. Second product: block b owns a band of output columns for all experts, so a row's
// slots never leave the block; warp groups take entries. The first entries' h was finished while
// later tiles were multiplied, so the second product starts without a wait. Router and shared
// expert, which do not depend on the routing, stream while it is being decided; their first product
// is mma.m16n8k16's on rows of x in registers, K split over all warps.
//
// Ordering     scores   [row][block] packet {3 scores, epoch}: written by its block's finisher,
//                       read by one warp of every block. Written again by the next launch, which
//                       begins after this one has ended (wait_at(before)).
//              columns  [epoch & 1] x and h as e4m3 in pieces of 16 bytes, their scales, and the
//                       shared expert's h: each piece or word is written once, over a pattern that
//                       no result has (kPoison), and read by all blocks until it is not that
//                       pattern: payload and arrival in one access. The other parity is filled
//                       with the pattern meanwhile: its readers ended with the launch before, its
//                       writers begin with the next.
//              epoch    one word a block, read at the start, advanced at the end by its own block.
//              ring     slot of use u: full: the producer's copies; here: the gatherer's columns;
//                       empty: the four warps that took it. Uses are filled in order, each by one
//                       warp group taken; a reader of use u first waits for the use before in its
//                       slot to be over, since parity tells a phase from the next only.
//              head     the router's rows lie in slot 0, the shared expert's tile from slot 1 on;
//                       a slot's first use waits for gate_done or shared_done.
//              sums     partial[] full: every consumer; empty: the finisher's.
//              late     waits for other blocks watch one deadline and the abort word; nothing is
//                       stored or published after a fault.
#pragma once

#include <type_traits>

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
using lowlat::fused::MoeLayout;
using lowlat::fused::MoeRouting;

inline constexpr int kScorers = 128;  // blocks that score experts
inline constexpr int kColumns = 8;  // of a product
inline constexpr std::uint32_t kPoison = 0xffff'ffffu;  // no bf16 pair, e4m3 codes or scale here
inline constexpr float kSwigluLimit = 10.0f;
inline constexpr float kRoutedScaling = 1.5f;
inline constexpr int kSmemLimit = 232448;  // 227 KB, the most that a block of sm_90 can have

// What a wait waited for: the event of a fault report.
enum Event : std::uint32_t { kScoresEvent = 1, kHiddenEvent, kRowsEvent };

constexpr int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }
// Rows of shared memory that eight lanes read at once, 16 bytes each, with two at a bank at most.
constexpr int spread_pitch(int row_bytes) {
  return row_bytes % 128 == 32 || row_bytes / 16 % 2 == 1 ? row_bytes : row_bytes + 16;
}

// Sizes of one compiled shape.
template <class S, int kMaxRows_, MoeLayout kLayout>
struct Layout {
  static constexpr bool kMarlin = kLayout == MoeLayout::marlin;
  static constexpr int kWarpGroups = 4, kConsumers = 4 * kWarpGroups;  // warps
  static constexpr int kProducer = kConsumers, kFinisher = kConsumers + 1;
  static constexpr int kGatherer = kConsumers + 2, kGatherers = 2;
  static constexpr int kThreads = (kConsumers + 4) * plat::kWarpLanes;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8, kOtherRegisters = 64;
  static constexpr int kConsumerRegisters =
      (kLaunchRegisters + (kLaunchRegisters - kOtherRegisters) * 4 / kConsumers) / 8 * 8;
  static constexpr int kHidden = S::kHidden, kInner = S::kIntermediateLocal;
  static constexpr int kExperts = S::kNumExperts, kSlots = S::kExpertsPerToken;
  static constexpr int kBlock = S::kScaleBlock;
  static constexpr int kMaxRows = kMaxRows_;
  static constexpr int kMaxPairs = kMaxRows * kSlots;

  // Head: router and the shared expert's first product.
  static constexpr int kSlice = kHidden / kConsumers;       // of K, a warp
  static constexpr int kRun = kSlice % 128 == 0 ? 32 : 16;  // consecutive elements of a thread
  static constexpr int kBlockK = 4 * kRun, kSliceBlocks = kSlice / kBlockK;
  static constexpr int kSharedRows = 8;  // values of h of a tile
  static constexpr int kSharedTiles = kInner / kSharedRows;
  static constexpr int kMostSharedTiles = (kSharedTiles + kScorers - 1) / kScorers;  // of a block
  static constexpr int kSharedPitch = kHidden + (kRun == 32 ? 16 : 64);          // e4m3 row
  static constexpr int kSharedBytes = 2 * kSharedRows * kSharedPitch;
  static constexpr int kGateRows = kExperts / kScorers;
  static constexpr int kGatePitch = 2 * kHidden + 16;  // bf16 row
  // First product. A use of the ring has 64 weight rows: those of w1 and of w3, or one's.
  static constexpr int kUseRows = 64;
  static constexpr int kTileValues = kMarlin ? 64 : 32, kTileGroups = kTileValues / 32;
  static constexpr int kParts = 2 * kTileValues / kUseRows;  // uses of a chunk
  static constexpr int kTiles = kInner / kTileValues;  // of an entry
  static constexpr int kChunks = 8, kChunkK = kHidden / kChunks;
  static constexpr int kChunkGroups = kChunkK / 32, kChunkRow = kChunkK / 2;
  static constexpr int kChunkPitch = kMarlin ? kChunkRow : spread_pitch(kChunkRow);
  static constexpr int kUses = kChunks * kParts;  // of a tile
  static constexpr int kTileBytes = 512;          // of a Marlin tile's codes
  static constexpr int kScaleRow = kHidden / 32;
  static constexpr int kTileScales = kMarlin ? 0 : kUseRows * kScaleRow;  // on their own
  // Second product.
  static constexpr int kBandRows = kMarlin ? 64 : kHidden / 128;
  static constexpr int kBands = kHidden / kBandRows;  // blocks that own columns
  static constexpr int kRowBlocks = (kBandRows + 15) / 16;  // of 16 rows, a warp's
  static constexpr int kInnerGroups = kInner / 32;
  static constexpr int kInnerRow = kInner / 2, kInnerPitch = kMarlin ? kInnerRow : spread_pitch(kInnerRow);
  static constexpr int kBandCodes = kBandRows * kInnerPitch;
  static constexpr int kBandScales = kBandRows * kInnerGroups;
  // Of the shared expert.
  static constexpr int kInnerBlocks = kInner / 64;
  static constexpr int kSharedParts = kInnerBlocks % 3 == 0 ? kInnerBlocks / 3 : kInnerBlocks / 2;
  static constexpr int kPartBlocks = kInnerBlocks / kSharedParts;  // of K, a warp
  static_assert(kBlock == 32 || kPartBlocks % 2 == 0);
  static constexpr int kPacketsPerBand = (kBandRows + 2) / 3;
  static constexpr int kBandScaleRows = (kBandRows + kBlock - 2) / kBlock + 1;  // at most
  static constexpr int kBandScaleColumns = kInner / kBlock;

  static_assert(kSlice % kBlockK == 0 && kHidden % (kChunks * 64) == 0 && kInner % 64 == 0 &&
                kExperts % kScorers == 0 && kChunks % kWarpGroups == 0 && kBands <= kScorers);
  static_assert(kBandRows % 8 == 0 && kRowBlocks <= 4);
  static_assert(kGateRows <= 3, "one packet holds a block's scores of a row");
  static_assert(kBandRows * kInnerRow % 16 == 0 && kBandScales % 16 == 0 && kTileScales % 32 == 0 &&
                kInner % kTileValues == 0);
  static_assert(kSlice % kBlock == 0, "an activation's scale group is one warp's");
  static_assert(kBlock % kSharedRows == 0 && kHidden / kBlock % 16 == 0);
  static_assert(kMostSharedTiles <= 2);

  // A slot of the ring: weights (a chunk, or an entry's band), columns, the columns' scales.
  static constexpr int kGroupBytes = 512;  // of columns: high and low terms, two cores each
  static constexpr int kMostGroups = kChunkGroups > kInnerGroups ? kChunkGroups : kInnerGroups;
  static constexpr int kChunkCodes = kUseRows * kChunkPitch;
  static constexpr int kChunkBytes = kChunkCodes + (kMarlin ? kUseRows * kChunkGroups : 0);
  static constexpr int kBandBytes = kBandCodes + kBandScales;
  static constexpr int kColumnsOffset =
      round_up(kChunkBytes > kBandBytes ? kChunkBytes : kBandBytes, 128);
  static constexpr int kColumnScales = kColumnsOffset + kMostGroups * kGroupBytes;
  static constexpr int kSlotBytes = round_up(kColumnScales + kInnerGroups * kColumns * 4, 128);
  static constexpr int kHeadSlots = (kSharedBytes + kSlotBytes - 1) / kSlotBytes;
  static_assert(kGateRows * kGatePitch <= kSlotBytes);

  // Shared memory, in bytes from its start.
  static constexpr int kSumsPitch = kUseRows + 4;  // floats of a column: lanes on all banks
  static constexpr int kPartialBytes = kWarpGroups * kColumns * kSumsPitch * 4;
  static_assert(kConsumers * kColumns * 2 * kSharedRows * 4 <= kPartialBytes &&
                kSharedParts * kColumns * kBandRows * 4 <= kPartialBytes);
  static constexpr int kBuffers = 2;                        // of partial sums, of scales
  static constexpr int kSecondRows = kMaxPairs + kMaxRows;  // pairs, then the shared expert's rows
  static constexpr int kBandOffset = 0;
  static constexpr int kSumsOffset = round_up(kBandOffset + kBandRows * kInner, 128);
  static constexpr int kScalesOffset = kSumsOffset + kBuffers * kPartialBytes;
  static constexpr int kSecondOffset = kScalesOffset + kBuffers * kTileScales;
  static constexpr int kSecondBytes = kSecondRows * kBandRows * 2;
  // Or in the workspace, where fewer than four slots would be left.
  static constexpr int kTableMost = 7424;
  static constexpr bool kSecondShared =
      (kSmemLimit - kSecondOffset - kSecondBytes - kTableMost) / kSlotBytes >= 4;
  static constexpr int kTableOffset =
      round_up(kSecondOffset + (kSecondShared ? kSecondBytes : 0), 128);
  struct alignas(16) Table {
    std::int32_t ids[kMaxPairs];
    float weights[kMaxPairs];
    std::int32_t num_entries;
    std::uint32_t stop;  // Watch
    std::uint32_t count[kExperts];  // pairs of an expert; then where they begin in `sorted`
    std::uint16_t expert[kMaxPairs];             // of an entry, ascending
    std::uint16_t first[kMaxPairs + 1];          // of an entry in `sorted`
    std::uint16_t sorted[kMaxPairs];             // pairs by expert, then by pair
    std::uint8_t band_scales[kBandScaleRows * kBandScaleColumns];  // of the shared w2 band
    alignas(16) std::uint8_t shared_scales[2][kHidden / kBlock];   // of a shared tile: w1's, w3's
  };
  static constexpr int kBarrierOffset =
      round_up(kTableOffset + static_cast<int>(sizeof(Table)), 16);
  static constexpr int kMaxSlots = 8;
  struct Barriers {
    std::uint64_t full[kMaxSlots], here[kMaxSlots], empty[kMaxSlots];
    std::uint64_t scales_full[kBuffers], scales_empty[kBuffers];
    std::uint64_t sums_full[kBuffers], sums_empty[kBuffers];
    std::uint64_t gate_full, gate_done, shared_full[2], shared_done[2], band_full, table;
  };
  static constexpr int kRingOffset =
      round_up(kBarrierOffset + static_cast<int>(sizeof(Barriers)), 128);
  static constexpr int kFit = (kSmemLimit - kRingOffset) / kSlotBytes;
  static constexpr int kRing = kFit < kMaxSlots ? kFit : kMaxSlots;
  static_assert(kRing >= 1 + kHeadSlots, "the head lies in the ring");
  static constexpr int kSmemBytes = kRingOffset + kRing * kSlotBytes;

  // Workspace, in bytes from its start. The kernel of 8 rows and that of 64 have one each.
  static constexpr int kMaxGrid = 1024;
  static constexpr int kPieceRow = 64;  // of a group: high odd, high even, low odd, low even
  static constexpr std::size_t kPairsOffset = std::size_t{kMaxRows} * kHidden / 32 * kPieceRow;
  static constexpr std::size_t kSharedOffset =
      kPairsOffset + std::size_t{kMaxPairs} * kInnerGroups * kPieceRow;
  static constexpr std::size_t kRowScalesOffset =
      kSharedOffset + std::size_t{kMaxRows} * kInner * 2;
  static constexpr std::size_t kPairScalesOffset =
      kRowScalesOffset + std::size_t{kMaxRows} * kChunks * 4;
  static constexpr std::size_t kHiddenBytes =  // of one parity
      kPairScalesOffset + std::size_t{kMaxPairs} * kInnerGroups * 4;
  static_assert(kHiddenBytes % 16 == 0);
  static constexpr std::size_t kHiddenOffset = 4 * kMaxGrid;  // after the epochs
  static constexpr std::size_t kScoresOffset = kHiddenOffset + 2 * kHiddenBytes;
  static constexpr std::size_t kScoresBytes = std::size_t{16} * kScorers * kMaxRows;
  static constexpr std::size_t kBlockSecondOffset = kScoresOffset + kScoresBytes;
  static constexpr std::size_t kWorkspaceBytes =
      kBlockSecondOffset + (kSecondShared ? 0 : std::size_t{kBands} * kSecondBytes);
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
  LOWLAT_DEVICE unsigned char* slot(int slot) const {
    return smem + L::kRingOffset + slot * L::kSlotBytes;
  }
  LOWLAT_DEVICE float* partial(int buffer) const {
    return reinterpret_cast<float*>(smem + L::kSumsOffset + buffer * L::kPartialBytes);
  }
  // [kSecondRows][kBandRows] bf16: d of a pair, then the shared expert's sums of a row.
  LOWLAT_DEVICE __nv_bfloat16* second(int row) const {
    unsigned char* first =
        L::kSecondShared ? smem + L::kSecondOffset
                         : workspace + L::kBlockSecondOffset +
                               static_cast<std::size_t>(block_idx) * L::kSecondBytes;
    return reinterpret_cast<__nv_bfloat16*>(first) + row * L::kBandRows;
  }
  LOWLAT_DEVICE unsigned char* columns(std::uint32_t parity) const {
    return workspace + L::kHiddenOffset + parity * L::kHiddenBytes;
  }
  LOWLAT_DEVICE unsigned char* here(std::size_t offset) const {
    return columns(epoch & 1u) + offset;
  }
  // [group of 32][64]: pieces of a row of x, of a pair's h.
  LOWLAT_DEVICE unsigned char* row_pieces(int row) const {
    return here(static_cast<std::size_t>(row) * (L::kHidden / 32 * L::kPieceRow));
  }
  LOWLAT_DEVICE unsigned char* pair_pieces(int pair) const {
    return here(L::kPairsOffset) + pair * (L::kInnerGroups * L::kPieceRow);
  }
  LOWLAT_DEVICE std::uint32_t* row_scales(int row) const {  // [kChunks]
    return reinterpret_cast<std::uint32_t*>(here(L::kRowScalesOffset)) + row * L::kChunks;
  }
  LOWLAT_DEVICE std::uint32_t* pair_scales(int pair) const {  // [kInnerGroups]
    return reinterpret_cast<std::uint32_t*>(here(L::kPairScalesOffset)) + pair * L::kInnerGroups;
  }
  // The shared expert's h of a row: bf16 in the order of pairs.
  LOWLAT_DEVICE unsigned char* shared_hidden(int row) const {
    return here(L::kSharedOffset) + row * (L::kInner * 2);
  }
  LOWLAT_DEVICE plat::TaggedWords* score_packet(int row, int block) const {
    return reinterpret_cast<plat::TaggedWords*>(workspace + L::kScoresOffset) + row * kScorers +
           block;
  }
  LOWLAT_DEVICE bool gates() const { return scores && block_idx < kScorers; }

  // Shared tiles go to blocks 0, 1, .. first, so routed ones begin with the blocks after them.
  LOWLAT_DEVICE int shared_tiles() const {
    return shared ? (L::kSharedTiles - block_idx + num_blocks - 1) / num_blocks : 0;
  }
  // The n-th routed tile of this block (its number among all, in order of entries).
  LOWLAT_DEVICE int routed_tile(int n) const {
    const int turn = block_idx - with_more;
    return n * num_blocks + (turn < 0 ? turn + num_blocks : turn);
  }
  LOWLAT_DEVICE int num_tiles() const { return table.num_entries * L::kTiles; }
  LOWLAT_DEVICE int own_tiles() const {
    const int first = routed_tile(0), all = num_tiles();
    return first < all ? (all - first + num_blocks - 1) / num_blocks : 0;
  }
  LOWLAT_DEVICE int num_groups() const { return (a.rows + kColumns - 1) / kColumns; }
  LOWLAT_DEVICE int num_pairs(int entry) const {
    return table.first[entry + 1] - table.first[entry];
  }

  // Until use `use` of the ring may be filled.
  LOWLAT_DEVICE bool wait_free(int use) const {
    const int slot = use % L::kRing;
    if (use >= L::kRing) {
      return barrier_wait(&barriers.empty[slot], (use / L::kRing - 1) & 1, watch);
    }
    if (slot == 0) return !gates() || barrier_wait(&barriers.gate_done, 0, watch);
    const int num = slot <= L::kHeadSlots ? shared_tiles() : 0;
    return num == 0 || barrier_wait(&barriers.shared_done[num - 1], 0, watch);
  }
  // Until use `use` is filled. The use before in its slot was another warp group's, perhaps.
  LOWLAT_DEVICE bool wait_filled(int use) const {
    const int slot = use % L::kRing;
    const std::uint32_t parity = use / L::kRing & 1;
    if (use >= L::kRing && !barrier_wait(&barriers.empty[slot], parity ^ 1u, watch)) return false;
    return barrier_wait(&barriers.full[slot], parity, watch) &&
           barrier_wait(&barriers.here[slot], parity, watch);
  }
};

// ------------------------------------------------------------------------------------ producer

template <class L>
struct Producer {
  const Region<L>& r;
  int uses = 0;   // of the ring
  int tiles = 0;  // whose scales were fetched

  LOWLAT_DEVICE static void load(void* dst, const void* src, std::uint32_t bytes,
                                 std::uint64_t* full) {
    sm90::bulk_load(dst, src, bytes, full, sm90::CacheHint::evict_first);
  }

  // What does not depend on the routing, or on anything before this kernel.
  LOWLAT_DEVICE bool run_early() {
    const auto& w = r.a.w;
    auto& barriers = r.barriers;
    if (r.gates()) {
      if (r.lane == 0) {
        sm90::barrier_arrive_expect(&barriers.gate_full, L::kGateRows * 2 * L::kHidden);
      }
      __syncwarp();
      if (r.lane < L::kGateRows) {
        load(r.slot(0) + r.lane * L::kGatePitch,
             w.gate + (static_cast<std::size_t>(r.block_idx) * L::kGateRows + r.lane) * L::kHidden,
             2 * L::kHidden, &barriers.gate_full);
      }
      // The router's rows and x decide when routing ends: nothing competes with them.
      if (!barrier_wait(&barriers.gate_full, 0, r.watch)) return false;
    }
    for (int n = 0; n < r.shared_tiles(); ++n) {
      if (n > 0 && !barrier_wait(&barriers.shared_done[n - 1], 0, r.watch)) return false;
      if (r.lane == 0) {
        sm90::barrier_arrive_expect(
            &barriers.shared_full[n],
            2 * (L::kSharedRows * L::kHidden + static_cast<int>(sizeof(r.table.shared_scales[0]))));
      }
      __syncwarp();
      const int first = (n * r.num_blocks + r.block_idx) * L::kSharedRows;
      if (r.lane < 2 * L::kSharedRows) {
        load(r.slot(1) + r.lane * L::kSharedPitch,
             (r.lane < L::kSharedRows ? w.shared_w1 : w.shared_w3).codes +
                 static_cast<std::size_t>(first + r.lane % L::kSharedRows) * L::kHidden,
             L::kHidden, &barriers.shared_full[n]);
      } else if (r.lane < 2 * L::kSharedRows + 2) {
        const int up = r.lane % 2;
        constexpr int kRow = L::kHidden / L::kBlock;
        load(r.table.shared_scales[up],
             (up ? w.shared_w3 : w.shared_w1).scales +
                 static_cast<std::size_t>(first / L::kBlock) * kRow,
             kRow, &barriers.shared_full[n]);
      }
    }
    if (r.shared && r.block_idx < L::kBands && r.lane == 0) {
      constexpr std::uint32_t kBytes = L::kBandRows * L::kInner;
      sm90::barrier_arrive_expect(&barriers.band_full, kBytes);
      load(r.smem + L::kBandOffset,
           w.shared_w2.codes + static_cast<std::size_t>(r.block_idx) * kBytes, kBytes,
           &barriers.band_full);
    }
    __syncwarp();
    return true;
  }

  // kRows rows of kRow bytes to shared memory, 16 bytes a lane: a bulk copy costs 31 ns whatever its
  // length, so short rows are not worth one. Eight rows of 64 bytes a step.
  template <int kRows, int kRow, int kPitch>
  LOWLAT_DEVICE void load_rows(std::uint32_t dst, const unsigned char* src,
                               std::int64_t src_pitch) const {
    static_assert(kRows % 8 == 0 && kRow % 64 == 0);
    dst += r.lane / 4 * kPitch + r.lane % 4 * 16;
    src += r.lane / 4 * src_pitch + r.lane % 4 * 16;
#pragma unroll
    for (int row = 0; row < kRows; row += 8) {
#pragma unroll
      for (int i = 0; i < kRow; i += 64) {
        sm90::copy_piece(dst + row * kPitch + i, src + row * src_pitch + i,
                         sm90::CacheHint::evict_first);
      }
    }
  }
  // After the lane's copies to a slot; every lane calls.
  LOWLAT_DEVICE void end_slot(int slot) const {
    sm90::barrier_arrive_copied(&r.barriers.full[slot]);
  }

  LOWLAT_DEVICE bool run_routed() {
    if (!barrier_wait(&r.barriers.table, 0, r.watch)) return false;
    const int own_tiles = r.own_tiles();
    for (int n = 0; n < own_tiles; ++n) {
      const int number = r.routed_tile(n), expert = r.table.expert[number / L::kTiles];
      if (!load_tile(n, expert, number % L::kTiles)) return false;
    }
    if (r.block_idx >= L::kBands) return true;
    for (int entry = 0; entry < r.table.num_entries; ++entry) {
      const int slot = uses % L::kRing;
      if (!r.wait_free(uses)) return false;
      ++uses;
      load_band(slot, r.table.expert[entry]);
      end_slot(slot);
    }
    return true;
  }

 private:
  // kTiles' tile `tile` of an expert, the n-th of this block.
  LOWLAT_DEVICE bool load_tile(int n, int expert, int tile) {
    const auto& w = r.a.w;
    if constexpr (L::kMarlin) {
      // [K / 16][2 I / 64][512] codes, [K / 32][2 I] scales: columns of tiles, w1's, then w3's.
      constexpr int kTilesOfK = 2 * L::kTiles * L::kTileBytes;
      const unsigned char* codes = w.w1.codes + static_cast<std::size_t>(expert) * L::kInner *
                                                    L::kHidden + tile * L::kTileBytes;
      const unsigned char* scales = w.w1.scales + static_cast<std::size_t>(expert) * 2 * L::kInner *
                                                      L::kScaleRow + tile * L::kTileValues;
#pragma unroll 1
      for (int use = 0; use < L::kUses; ++use) {
        const int slot = uses % L::kRing, up = use % L::kParts, chunk = use / L::kParts;
        if (!r.wait_free(uses)) return false;
        ++uses;
        load_tiles<L::kChunkGroups>(
            r.slot_address(slot), L::kChunkCodes,
            codes + static_cast<std::int64_t>(chunk) * 2 * L::kChunkGroups * kTilesOfK +
                up * L::kTiles * L::kTileBytes,
            kTilesOfK, scales + chunk * L::kChunkGroups * 2 * L::kInner + up * L::kInner,
            2 * L::kInner);
        end_slot(slot);
      }
    } else {
      auto& barriers = r.barriers;
      const std::size_t row =
          static_cast<std::size_t>(expert) * L::kInner + tile * L::kTileValues;
      const int buffer = n % L::kBuffers;
      if (n >= L::kBuffers && !barrier_wait(&barriers.scales_empty[buffer],
                                            (n / L::kBuffers - 1) & 1, r.watch)) {
        return false;
      }
      if (r.lane == 0) sm90::barrier_arrive_expect(&barriers.scales_full[buffer], L::kTileScales);
      __syncwarp();
      tiles = n + 1;
      if (r.lane < 2) {
        load(r.smem + L::kScalesOffset + buffer * L::kTileScales + r.lane * (L::kTileScales / 2),
             (r.lane ? w.w3 : w.w1).scales + row * L::kScaleRow, L::kTileScales / 2,
             &barriers.scales_full[buffer]);
      }
      const std::size_t codes = row * (L::kHidden / 2);
#pragma unroll 1
      for (int chunk = 0; chunk < L::kChunks; ++chunk) {
        const int slot = uses % L::kRing;
        if (!r.wait_free(uses)) return false;
        ++uses;
        const std::uint32_t dst = r.slot_address(slot);
#pragma unroll
        for (int up = 0; up < 2; ++up) {
          load_rows<L::kTileValues, L::kChunkRow, L::kChunkPitch>(
              dst + up * L::kTileValues * L::kChunkPitch,
              (up ? w.w3 : w.w1).codes + codes + chunk * L::kChunkRow, L::kHidden / 2);
        }
        end_slot(slot);
      }
    }
    return true;
  }
  // This block's columns of an expert's w2.
  LOWLAT_DEVICE void load_band(int slot, int expert) const {
    const auto& w = r.a.w;
    if constexpr (L::kMarlin) {
      constexpr int kTilesOfK = L::kBands * L::kTileBytes;
      load_tiles<L::kInnerGroups>(
          r.slot_address(slot), L::kBandCodes,
          w.w2.codes + static_cast<std::size_t>(expert) * L::kHidden * L::kInnerRow +
              r.block_idx * L::kTileBytes,
          kTilesOfK,
          w.w2.scales + static_cast<std::size_t>(expert) * L::kHidden * L::kInnerGroups +
              r.block_idx * L::kBandRows,
          L::kHidden);
    } else {
      const std::size_t row =
          static_cast<std::size_t>(expert) * L::kHidden + r.block_idx * L::kBandRows;
      const unsigned char* codes = w.w2.codes + row * L::kInnerRow;
      constexpr bool kWhole = L::kInnerPitch == L::kInnerRow;
      std::uint64_t* full = &r.barriers.full[slot];
      if (r.lane == 0) {
        sm90::barrier_expect(full, L::kBandScales + (kWhole ? L::kBandCodes : 0));
        if (kWhole) load(r.slot(slot), codes, L::kBandCodes, full);
        load(r.slot(slot) + L::kBandCodes, w.w2.scales + row * L::kInnerGroups, L::kBandScales,
             full);
      }
      if constexpr (!kWhole) {
        load_rows<L::kBandRows, L::kInnerRow, L::kInnerPitch>(r.slot_address(slot), codes,
                                                              L::kInnerRow);
      }
    }
  }
  // Two tiles of 16 x 64 and 64 scales a group, one group after the other.
  template <int kGroups>
  LOWLAT_DEVICE void load_tiles(std::uint32_t dst, int scales_at, const unsigned char* codes,
                                std::int64_t code_pitch, const unsigned char* scales,
                                std::int64_t scale_pitch) const {
    codes += r.lane * 16;
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
      sm90::copy_piece(dst + i * L::kTileBytes + r.lane * 16, codes + i * code_pitch,
                       sm90::CacheHint::evict_first);
    }
#pragma unroll
    for (int i = 0; i < 4 * kGroups; i += plat::kWarpLanes) {
      const int piece = i + r.lane;
      if (piece < 4 * kGroups) {
        sm90::copy_piece(dst + scales_at + piece * 16,
                         scales + piece / 4 * scale_pitch + piece % 4 * 16,
                         sm90::CacheHint::evict_first);
      }
    }
  }

 public:
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
    for (int i = 0; i < L::kBuffers; ++i) {
      landed(&r.barriers.scales_full[i], (tiles - i + L::kBuffers - 1) / L::kBuffers);
    }
    landed(&r.barriers.gate_full, r.gates() ? 1 : 0);
    for (int n = 0; n < r.shared_tiles(); ++n) landed(&r.barriers.shared_full[n], 1);
    landed(&r.barriers.band_full, r.shared && r.block_idx < L::kBands ? 1 : 0);
  }
};

// ------------------------------------------------------------------------------------ gatherers

// Makes x ready for the routed products, and brings the columns of each use of the ring.
template <class L>
struct Gatherer {
  const Region<L>& r;
  int which;  // 0 .. kGatherers - 1: takes every kGatherers-th use

  // Eight elements that one lane's codes of two rows meet: neighbours, or four pairs eight apart.
  LOWLAT_DEVICE static uint4 load_octet(const std::uint16_t* src, int i) {
    if constexpr (L::kMarlin) {
      const auto* pair = reinterpret_cast<const std::uint32_t*>(src) + i / 4 * 16 + i % 4;
      return make_uint4(__ldcg(pair), __ldcg(pair + 4), __ldcg(pair + 8), __ldcg(pair + 12));
    } else {
      return __ldcg(reinterpret_cast<const uint4*>(src) + i);
    }
  }
  // The two terms of a chunk of a row of x, for all blocks.
  LOWLAT_DEVICE void split_row(int row, int chunk) const {
    constexpr int kOctets = L::kChunkK / 8, kOwn = (kOctets + plat::kWarpLanes - 1) / plat::kWarpLanes;
    const std::uint16_t* src =
        r.a.x + static_cast<std::size_t>(row) * L::kHidden + chunk * L::kChunkK;
    uint4 eight[kOwn];
    float amax = 0.0f;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const int i = k * plat::kWarpLanes + r.lane;
      eight[k] = i < kOctets ? load_octet(src, i) : uint4{};
      const std::uint32_t words[4] = {eight[k].x, eight[k].y, eight[k].z, eight[k].w};
      amax = fmaxf(amax, pairs_amax<4>(words));
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(plat::kAllLanes, amax, offset));
    }
    const std::uint32_t exponent = activation_exponent(amax);
    const float inverse = __uint_as_float((254u - exponent) << 23);
    unsigned char* dst = r.row_pieces(row) + chunk * (L::kChunkGroups * L::kPieceRow);
    // Which elements of a group meet which codes of a word: see codes().
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const int i = k * plat::kWarpLanes + r.lane;
      const std::uint32_t words[4] = {eight[k].x, eight[k].y, eight[k].z, eight[k].w};
      float odd[4], even[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::uint32_t from_odd = words[L::kMarlin ? j / 2 * 2 + 1 : j];
        const std::uint32_t from_even = words[L::kMarlin ? j / 2 * 2 : j];
        odd[j] = (L::kMarlin && j % 2 == 0 ? low_bf16(from_odd) : high_bf16(from_odd)) * inverse;
        even[j] = (L::kMarlin && j % 2 != 0 ? high_bf16(from_even) : low_bf16(from_even)) * inverse;
      }
      std::uint32_t parts[4];
      split_e4m3(odd, parts[0], parts[2]);
      split_e4m3(even, parts[1], parts[3]);
      transpose_quad(parts, r.lane % 4);
      if (i < kOctets) {
        store_packet(dst + i * 16, make_uint4(parts[0], parts[1], parts[2], parts[3]));
      }
    }
    if (r.lane == 0) store_word(r.row_scales(row) + chunk, (exponent + kFp4E4m3Shift) << 23);
  }
  LOWLAT_DEVICE void split_rows() const {
    const int units = r.a.rows * L::kChunks;
    for (int unit = which * r.num_blocks + r.block_idx; unit < units;
         unit += L::kGatherers * r.num_blocks) {
      split_row(unit / L::kChunks, unit % L::kChunks);
    }
  }

  // Pieces and scales of one column, on their way to a slot: kGroups groups, kWords scales.
  template <int kGroups, int kWords>
  struct Column {
    static constexpr int kPieces = 4 * kGroups;
    static constexpr int kOwn = (kPieces + plat::kWarpLanes - 1) / plat::kWarpLanes;
    static constexpr int kOwnWords = (kWords + plat::kWarpLanes - 1) / plat::kWarpLanes;
    const unsigned char* pieces;
    const std::uint32_t* scales;
    uint4 piece[kOwn];
    std::uint32_t word[kOwnWords];

    LOWLAT_DEVICE void load(int lane) {
#pragma unroll
      for (int k = 0; k < kOwn; ++k) {
        const int i = k * plat::kWarpLanes + lane;
        piece[k] = load_packet(pieces + (i < kPieces ? i : 0) * 16);
      }
#pragma unroll
      for (int k = 0; k < kOwnWords; ++k) {
        const int i = k * plat::kWarpLanes + lane;
        word[k] = load_word(scales + (i < kWords ? i : 0));
      }
    }
    LOWLAT_DEVICE bool here() const {
      bool all = true;
#pragma unroll
      for (int k = 0; k < kOwn; ++k) all = all && piece[k].w != kPoison;
#pragma unroll
      for (int k = 0; k < kOwnWords; ++k) all = all && word[k] != kPoison;
      return __all_sync(plat::kAllLanes, all);
    }
    // To column `column` of a slot, when all have arrived.
    LOWLAT_DEVICE bool store(const Region<L>& r, unsigned char* dst, int column,
                             std::uint32_t event) {
      for (int tries = 1; !here(); ++tries) {
        const bool late = tries % kTriesPerLook == 0 && r.watch.ended(event);
        if (__any_sync(plat::kAllLanes, late)) return false;
        load(r.lane);
      }
#pragma unroll
      for (int k = 0; k < kOwn; ++k) {
        const int i = k * plat::kWarpLanes + r.lane;
        if (i < kPieces) {
          *reinterpret_cast<uint4*>(dst + L::kColumnsOffset + i * 128 + column * 16) = piece[k];
        }
      }
#pragma unroll
      for (int k = 0; k < kOwnWords; ++k) {
        const int i = k * plat::kWarpLanes + r.lane;
        if (i < kWords) {
          reinterpret_cast<std::uint32_t*>(dst + L::kColumnScales)[i * kColumns + column] = word[k];
        }
      }
      return true;
    }
  };
  // Uses `begin` .. end - 1 that are this warp's; `place(column, entry, i, use)` points a column at
  // pair i of the use's entry, `entry_of(use)`. A use's first two columns are loaded while the use
  // before is on its way.
  template <class Col, class EntryOf, class Place>
  LOWLAT_DEVICE bool gather(int begin, int end, std::uint32_t event, const EntryOf& entry_of,
                            const Place& place) const {
    constexpr int kAhead = 2;
    Col ahead[kAhead];
    const auto load = [&](int use) {
      if (use >= end) return;
      const int entry = entry_of(use), num = r.num_pairs(entry);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (i >= num) break;
        place(ahead[i], entry, i, use);
        ahead[i].load(r.lane);
      }
    };
    load(begin);
    for (int use = begin; use < end; use += L::kGatherers) {
      const int slot = use % L::kRing, entry = entry_of(use), num = r.num_pairs(entry);
      if (!r.wait_free(use)) return false;
      unsigned char* dst = r.slot(slot);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (i < num && !ahead[i].store(r, dst, i, event)) return false;
      }
#pragma unroll 1
      for (int i = kAhead; i < num; ++i) {
        place(ahead[0], entry, i, use);
        ahead[0].load(r.lane);
        if (!ahead[0].store(r, dst, i, event)) return false;
      }
      arrive(slot);
      load(use + L::kGatherers);
    }
    return true;
  }
  // The columns are there for the products too, which read past the ordinary path.
  LOWLAT_DEVICE void arrive(int slot) const {
    sm90::fence_async_shared();
    __syncwarp();
    if (r.lane == 0) sm90::barrier_arrive(&r.barriers.here[slot]);
  }

  LOWLAT_DEVICE bool run() const {
    split_rows();
    if (!barrier_wait(&r.barriers.table, 0, r.watch)) return false;
    const int first_uses = r.own_tiles() * L::kUses;
    using Rows = Column<L::kChunkGroups, 1>;
    const bool going = gather<Rows>(
        which, first_uses, kRowsEvent,
        [&](int use) { return r.routed_tile(use / L::kUses) / L::kTiles; },
        [&](Rows& column, int entry, int i, int use) {
          const int row = r.table.sorted[r.table.first[entry] + i] / L::kSlots;
          const int chunk = use % L::kUses / L::kParts;
          column.pieces = r.row_pieces(row) + chunk * (L::kChunkGroups * L::kPieceRow);
          column.scales = r.row_scales(row) + chunk;
        });
    if (!going || r.block_idx >= L::kBands) return going;
    using Pairs = Column<L::kInnerGroups, L::kInnerGroups>;
    return gather<Pairs>(
        first_uses + which, first_uses + r.table.num_entries, kHiddenEvent,
        [&](int use) { return use - first_uses; },
        [&](Pairs& column, int entry, int i, int) {
          const int pair = r.table.sorted[r.table.first[entry] + i];
          column.pieces = r.pair_pieces(pair);
          column.scales = r.pair_scales(pair);
        });
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
  int sums = 0;      // of the partial buffers
  // x of this warp's slice, of eight rows, in the order of pairs.
  static constexpr int kPairs = L::kRun / 2;  // of a run
  std::uint32_t x[L::kSliceBlocks][kPairs];

  LOWLAT_DEVICE const uint4* group_x(int group) const {
    const int row = group * kColumns + g;
    return reinterpret_cast<const uint4*>(
        r.a.x + static_cast<std::size_t>(row < r.a.rows ? row : r.a.rows - 1) * L::kHidden +
        warp * L::kSlice + t * L::kRun);
  }
  LOWLAT_DEVICE void load_block(int block, const uint4* src) {
#pragma unroll
    for (int i = 0; i < L::kRun / 8; ++i) {
      std::uint32_t pairs[4];
      pair_bf16(__ldcg(src + block * (L::kBlockK / 8) + i), pairs);
#pragma unroll
      for (int k = 0; k < 4; ++k) x[block][4 * i + k] = pairs[k];
    }
  }
  LOWLAT_DEVICE void load_x() {
    const uint4* src = group_x(0);
#pragma unroll
    for (int block = 0; block < L::kSliceBlocks; ++block) load_block(block, src);
  }
  // After group `group` comes another: its blocks of x follow as this one's are done. nullptr: one
  // group is all.
  LOWLAT_DEVICE const uint4* next_group_x(int group) const {
    const int num = r.num_groups();
    if (L::kMaxRows <= kColumns || num == 1) return nullptr;
    return group_x(group + 1 < num ? group + 1 : 0);
  }

  // A free buffer of partial sums, or nullptr.
  LOWLAT_DEVICE float* begin_sums() const {
    const int buffer = sums % L::kBuffers;
    if (sums >= L::kBuffers &&
        !barrier_wait(&r.barriers.sums_empty[buffer], (sums / L::kBuffers - 1) & 1, r.watch)) {
      return nullptr;
    }
    return r.partial(buffer);
  }
  LOWLAT_DEVICE void end_sums() {
    __syncwarp();
    if (r.lane == 0) sm90::barrier_arrive(&r.barriers.sums_full[sums % L::kBuffers]);
    ++sums;
  }
  // Gives a slice's sums of eight columns by sixteen rows to the finisher.
  LOWLAT_DEVICE bool hand_over(const float (&acc)[4]) {
    float* dst = begin_sums();
    if (dst == nullptr) return false;
    dst += (warp * kColumns + 2 * t) * 2 * L::kSharedRows + g;
    dst[0] = acc[0];
    dst[L::kSharedRows] = acc[2];
    dst[2 * L::kSharedRows] = acc[1];
    dst[3 * L::kSharedRows] = acc[3];
    end_sums();
    return true;
  }
  LOWLAT_DEVICE void arrive(std::uint64_t* barrier) const {
    __syncwarp();
    if (r.lane == 0) sm90::barrier_arrive(barrier);
  }

  LOWLAT_DEVICE bool run_gate() {
    if (!barrier_wait(&r.barriers.gate_full, 0, r.watch)) return false;
    const int row = g < L::kGateRows ? g : L::kGateRows - 1;  // other rows: computed, not used
    const std::uint32_t address =
        r.slot_address(0) + row * L::kGatePitch + (warp * L::kSlice + t * L::kRun) * 2;
    for (int group = 0; group < r.num_groups(); ++group) {
      const uint4* next = next_group_x(group);
      float acc[2][4] = {};
#pragma unroll
      for (int block = 0; block < L::kSliceBlocks; ++block) {
#pragma unroll
        for (int half = 0; half < L::kRun / 16; ++half) {
          const std::uint32_t src = address + block * L::kBlockK * 2 + half * 32;
          const uint4 low[2] = {smem_load16(src), smem_load16(src + 16)};
          const uint4 high[2] = {};
          multiply_bf16(acc[(block + half) & 1], low, high, x[block] + 8 * half);
        }
        if (next != nullptr) load_block(block, next);
      }
      for (int i = 0; i < 4; ++i) acc[0][i] += acc[1][i];
      if (!hand_over(acc[0])) return false;
    }
    arrive(&r.barriers.gate_done);
    return true;
  }

  // Gate rows, then up rows; x as the block-fp8 linear sees it.
  LOWLAT_DEVICE bool run_shared_tile(int n) {
    if (!barrier_wait(&r.barriers.shared_full[n], 0, r.watch)) return false;
    const std::uint32_t low_address =
        r.slot_address(1) + g * L::kSharedPitch + warp * L::kSlice + t * L::kRun;
    const std::uint32_t high_address = low_address + L::kSharedRows * L::kSharedPitch;
    const auto& scales = r.table.shared_scales;
    for (int group = 0; group < r.num_groups(); ++group) {
      const uint4* next = next_group_x(group);
      float acc[2][4] = {};
      std::uint32_t exponent = 0;
#pragma unroll
      for (int block = 0; block < L::kSliceBlocks; ++block) {
        // A scale group is a run of `kShare` lanes, or two blocks of K where it is longer.
        constexpr int kShare = L::kBlock < 4 * L::kRun ? L::kBlock / L::kRun : 4;
        constexpr int kSpan = L::kBlock / (kShare * L::kRun);
        if (block % kSpan == 0) {
          float amax = pairs_amax<kPairs>(x[block]);
          if constexpr (kSpan == 2) amax = fmaxf(amax, pairs_amax<kPairs>(x[block + 1]));
          exponent = activation_exponent(lanes_max<kShare>(amax));
        }
        std::uint32_t b[kPairs];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) b[i] = x[block][i];
        quantize_pairs<kPairs>(b, exponent);
        const int scale = (warp * L::kSlice + block * L::kBlockK + t * L::kRun) / L::kBlock;
#pragma unroll
        for (int half = 0; half < L::kRun / 16; ++half) {
          const std::uint32_t at = block * L::kBlockK + half * 16;
          multiply_e4m3(acc[(block + half) & 1], smem_load16(low_address + at),
                        smem_load16(high_address + at), e4m3_factor(scales[0][scale]),
                        e4m3_factor(scales[1][scale]), b + 8 * half);
        }
        // A scale group's blocks are looked at together.
        if (next != nullptr && block % kSpan == kSpan - 1) {
          for (int i = kSpan - 1; i >= 0; --i) load_block(block - i, next);
        }
      }
      for (int i = 0; i < 4; ++i) acc[0][i] += acc[1][i];
      if (!hand_over(acc[0])) return false;
    }
    arrive(&r.barriers.shared_done[n]);
    return true;
  }

  // ---- routing

  static constexpr int kPackets = kScorers / plat::kWarpLanes;  // a lane, of a row
  static constexpr int kOwn = kPackets * L::kGateRows;        // experts of a lane
  LOWLAT_DEVICE int own_expert(int i) const {
    return (r.lane + i / L::kGateRows * plat::kWarpLanes) * L::kGateRows + i % L::kGateRows;
  }

  // Scores of the row's experts, as their blocks sent them; false (all lanes) when they are late.
  LOWLAT_DEVICE bool receive_scores(int row, float (&score)[kOwn]) const {
    for (int tries = 1;; ++tries) {
      bool here = true;
#pragma unroll
      for (int i = 0; i < kPackets; ++i) {
        const uint4 packet = load_packet(r.score_packet(row, r.lane + i * plat::kWarpLanes));
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

  // The k best of a row, into the table. Ranks are compared as integers of the same order.
  LOWLAT_DEVICE void select(int row, const float (&score)[kOwn], const float (&bias)[kOwn],
                            float nan_rank) {
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
        r.table.ids[row * L::kSlots + slot] = static_cast<std::int32_t>(chosen);
        r.table.weights[row * L::kSlots + slot] = best_score;
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (own_expert(i) == static_cast<int>(chosen)) rank[i] = 0;
      }
    }
  }

  // Ids of all rows and what their weights are made of, in every block the same.
  LOWLAT_DEVICE void route(stages::GateRule rule) {
    for (int row = warp; row < r.a.rows; row += L::kConsumers) {
      const int at = row * L::kSlots;
      if (r.a.routing != MoeRouting::gate && r.lane < L::kSlots) {
        r.table.ids[at + r.lane] = __ldcg(r.a.ids + at + r.lane);
        r.table.weights[at + r.lane] = r.scores ? 0.0f : __ldcg(r.a.weights + at + r.lane);
      }
      if (!r.scores) continue;
      float score[kOwn], bias[kOwn] = {};
      if (r.a.routing == MoeRouting::gate) {
        const bool image = r.a.image_rows != nullptr && r.a.image_rows[row] != 0;
        const float* from = image ? r.a.w.gate_bias_vl : r.a.w.gate_bias;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) bias[i] = __ldg(from + own_expert(i));
      }
      if (!receive_scores(row, score)) {  // the step is lost; stay inside the arrays
        if (r.lane < L::kSlots) r.table.ids[at + r.lane] = r.lane;
        continue;
      }
      __syncwarp();
      if (r.a.routing == MoeRouting::gate) {
        select(row, score, bias, rule == stages::GateRule::v41 ? __int_as_float(0x7f80'0000) : -1e30f);
      } else {
        for (int slot = 0; slot < L::kSlots; ++slot) {
          const int id = r.table.ids[at + slot];
#pragma unroll
          for (int i = 0; i < kOwn; ++i) {
            if (own_expert(i) == id) r.table.weights[at + slot] = score[i];
          }
        }
      }
    }
    consumers_sync<L>();
  }
  // When the experts are on their way.
  LOWLAT_DEVICE void weigh(stages::GateSum sum_rule) {
    for (int row = warp; r.scores && row < r.a.rows; row += L::kConsumers) {
      const int at = row * L::kSlots;
      const float total = stages::gate_total(&r.table.weights[at], L::kSlots, sum_rule);
      float weight = 0.0f;
      if (r.lane < L::kSlots) weight = r.table.weights[at + r.lane] / total * kRoutedScaling;
      __syncwarp();
      if (r.lane < L::kSlots) {
        r.table.weights[at + r.lane] = weight;
        if (r.block_idx == 0) {
          if (r.a.out_ids != nullptr) r.a.out_ids[at + r.lane] = r.table.ids[at + r.lane];
          if (r.a.out_weights != nullptr) r.a.out_weights[at + r.lane] = weight;
        }
      }
    }
    consumers_sync<L>();
  }

  // Pairs by expert, in entries. Which column a pair gets is a matter of who comes first; no result
  // depends on it.
  LOWLAT_DEVICE void make_table() {
    auto& table = r.table;
    const int num_pairs = r.a.rows * L::kSlots;
    static_assert(L::kMaxPairs <= L::kConsumers * plat::kWarpLanes, "a thread a pair");
    const int pair = warp * plat::kWarpLanes + r.lane;
    int id = 0, rank = 0;
    if (pair < num_pairs) {
      id = table.ids[pair];
      rank = static_cast<int>(atomicAdd(&table.count[id], 1u));
    }
    consumers_sync<L>();
    if (warp == 0) {
      // A lane counts neighbouring experts' pairs and entries.
      constexpr int kOwnExperts = L::kExperts / plat::kWarpLanes;
      std::uint32_t count[kOwnExperts], pairs = 0, entries = 0;
#pragma unroll
      for (int i = 0; i < kOwnExperts; ++i) {
        count[i] = table.count[r.lane * kOwnExperts + i];
        pairs += count[i];
        entries += (count[i] + kColumns - 1) / kColumns;
      }
      std::uint32_t before = pairs | entries << 16;
#pragma unroll
      for (int offset = 1; offset < plat::kWarpLanes; offset *= 2) {
        const std::uint32_t theirs = __shfl_up_sync(plat::kAllLanes, before, offset);
        if (r.lane >= offset) before += theirs;
      }
      if (r.lane == plat::kWarpLanes - 1) {
        table.num_entries = static_cast<std::int32_t>(before >> 16);
        table.first[before >> 16] = static_cast<std::uint16_t>(num_pairs);
      }
      before -= pairs | entries << 16;
      std::uint32_t place = before & 0xffffu, entry = before >> 16;
#pragma unroll
      for (int i = 0; i < kOwnExperts; ++i) {
        if (count[i] == 0) continue;
        const int expert = r.lane * kOwnExperts + i;
        table.count[expert] = place;  // from here on: where its pairs begin
        for (std::uint32_t k = 0; k < count[i]; k += kColumns, ++entry) {
          table.expert[entry] = static_cast<std::uint16_t>(expert);
          table.first[entry] = static_cast<std::uint16_t>(place + k);
        }
        place += count[i];
      }
    }
    consumers_sync<L>();
    if (pair < num_pairs) {
      table.sorted[table.count[id] + rank] = static_cast<std::uint16_t>(pair);
    }
    __syncwarp();
    if (r.lane == 0) sm90::barrier_arrive(&r.barriers.table);
  }

  // ---- the shared expert's second product

  // Sixteen columns of the band (eight where it ends), a part of I, eight rows: while the first
  // experts' weights are on their way. Its h is there by then, or nearly.
  LOWLAT_DEVICE bool multiply_shared(int m, int part, int group, float* dst) const {
    const std::uint32_t codes = sm90::shared_address(r.smem) + L::kBandOffset +
                                (16 * m + g) * L::kInner + part * L::kPartBlocks * 64 + t * 16;
    const bool whole = 16 * m + 8 < L::kBandRows;
    const int band = r.block_idx * L::kBandRows;
    const int low_row = (band + 16 * m) / L::kBlock - band / L::kBlock;
    const int high_row = whole ? (band + 16 * m + 8) / L::kBlock - band / L::kBlock : low_row;
    const int row = group * kColumns + g;
    const unsigned char* hidden = r.shared_hidden(row < r.a.rows ? row : r.a.rows - 1) +
                                  part * L::kPartBlocks * 128 + t * 32;
    std::uint32_t b[L::kPartBlocks][8];
    for (int tries = 1;; ++tries) {
      bool all = true;
#pragma unroll
      for (int i = 0; i < L::kPartBlocks; ++i) {
        const uint4 v = load_packet(hidden + i * 128), w = load_packet(hidden + i * 128 + 16);
        all = all && v.w != kPoison && w.w != kPoison;
        b[i][0] = v.x, b[i][1] = v.y, b[i][2] = v.z, b[i][3] = v.w;
        b[i][4] = w.x, b[i][5] = w.y, b[i][6] = w.z, b[i][7] = w.w;
      }
      if (__all_sync(plat::kAllLanes, all)) break;
      const bool late = tries % kTriesPerLook == 0 && r.watch.ended(kHiddenEvent);
      if (__any_sync(plat::kAllLanes, late)) return false;
    }
    float acc[4] = {};
    std::uint32_t exponent = 0;
#pragma unroll
    for (int i = 0; i < L::kPartBlocks; ++i) {
      // A scale group is two lanes' runs, or two blocks' of four lanes.
      constexpr int kSpan = L::kBlock == 32 ? 1 : 2;
      if (i % kSpan == 0) {
        float amax = pairs_amax<8>(b[i]);
        if constexpr (kSpan == 2) amax = fmaxf(amax, pairs_amax<8>(b[i + 1]));
        exponent = activation_exponent(lanes_max<2 * kSpan>(amax));
      }
      std::uint32_t quantized[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) quantized[k] = b[i][k];
      quantize_pairs<8>(quantized, exponent);
      const int column = ((part * L::kPartBlocks + i) * 64 + t * 16) / L::kBlock;
      const std::uint8_t* scales = r.table.band_scales + column;
      const uint4 low = smem_load16(codes + i * 64);
      const uint4 high = whole ? smem_load16(codes + 8 * L::kInner + i * 64) : uint4{};
      multiply_e4m3(acc, low, high, e4m3_factor(scales[low_row * L::kBandScaleColumns]),
                    e4m3_factor(scales[high_row * L::kBandScaleColumns]), quantized);
    }
    dst += (part * kColumns + 2 * t) * L::kBandRows + 16 * m + g;
    dst[0] = acc[0];
    dst[L::kBandRows] = acc[1];
    if (whole) {
      dst[8] = acc[2];
      dst[L::kBandRows + 8] = acc[3];
    }
    return true;
  }
  LOWLAT_DEVICE bool run_shared_second() {
    if (!r.shared || r.block_idx >= L::kBands) return true;
    if (!barrier_wait(&r.barriers.band_full, 0, r.watch)) return false;
    for (int group = 0; group < r.num_groups(); ++group) {
      float* dst = begin_sums();
      if (dst == nullptr) return false;
#pragma unroll 1
      for (int item = warp; item < L::kSharedParts * L::kRowBlocks; item += L::kConsumers) {
        if (!multiply_shared(item / L::kSharedParts, item % L::kSharedParts, group, dst)) {
          return false;
        }
      }
      end_sums();
    }
    return true;
  }

  // ---- routed experts

  // The codes of a warp's sixteen rows of two groups of 32 along K, as they lie in a slot: `words`
  // are a[0 .. 3]'s of the first, then of the second, before expansion.
  LOWLAT_DEVICE static void load_codes(std::uint32_t (&words)[4], std::uint32_t rows, int group) {
    if constexpr (L::kMarlin) {
      // A tile's word: rows g (even bytes) and g + 8 (odd bytes) at k = 2t, 2t + 1 (bytes 0 1, 2 3),
      // k + 8 in the upper nibbles; a group is two tiles.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const std::uint32_t at = rows + (group + i) * 2 * L::kTileBytes;
        const std::uint32_t first = smem_load4(at), second = smem_load4(at + L::kTileBytes);
        words[2 * i] = __byte_perm(first, second, 0x6420);
        words[2 * i + 1] = __byte_perm(first, second, 0x7531);
      }
    } else {
      sm90::load_matrices(words, rows + group * 16);
    }
  }
  // Where load_codes begins for rows `row` .. + 15 of a slot's 64 (of the band; checkpoint: rows
  // `row` .. + 7 and `high` .. + 7, not beyond `last`).
  LOWLAT_DEVICE std::uint32_t codes_at(int row, int high, int last, int pitch) const {
    if constexpr (L::kMarlin) return r.lane * 16 + row / 16 * 4;
    const int mine = (r.lane / 8 % 2 != 0 ? high : row) + r.lane % 8;
    return (mine < last ? mine : last) * pitch + r.lane / 16 * 16;
  }

  // Products of kGroups groups of this warp's sixteen weight rows with the columns; `add(group, d)`
  // takes each group's sums in order. A warp that rests goes through it with the other three.
  template <int kGroups, int kBatch, bool kMayRest, class Add>
  LOWLAT_DEVICE static void multiply(std::uint32_t rows, std::uint64_t columns, bool rests,
                                     const Add& add) {
    constexpr int kBatches = kGroups / kBatch;
    static_assert(kGroups % kBatch == 0 && kBatch % 2 == 0);
    float d[2][kBatch][4];
    std::uint32_t a[2][kBatch][4] = {};
    const auto finish = [&](int batch) {
      if (kMayRest && rests) return;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) add(batch * kBatch + i, d[batch & 1][i]);
    };
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      if (!kMayRest || !rests) {
#pragma unroll
        for (int i = 0; i < kBatch; i += 2) {
          std::uint32_t codes[4];
          load_codes(codes, rows, batch * kBatch + i);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            std::uint32_t(&to)[4] = a[batch & 1][i + j / 2];
            expand_fp4_e4m3(codes[j], to[j % 2], to[j % 2 + 2]);
          }
        }
      }
      sm90::products_fence();
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const std::uint64_t b = columns + (batch * kBatch + i) * (L::kGroupBytes / 16);
        sm90::product_e4m3<false>(d[batch & 1][i], a[batch & 1][i], b);
        sm90::product_e4m3<true>(d[batch & 1][i], a[batch & 1][i], b + L::kGroupBytes / 32);
      }
      sm90::products_commit();
      if (batch > 0) {
        sm90::products_wait<1>();
        finish(batch - 1);
      }
    }
    sm90::products_wait<0>();
    finish(kBatches - 1);
  }
  LOWLAT_DEVICE static float power(std::uint32_t byte) { return __uint_as_float(byte << 23); }
  // Scales of a Marlin group of 64 rows: of rows 16 w + g and + 8, two bytes apart.
  LOWLAT_DEVICE std::uint32_t scales_at(int w) const { return 8 * g + w / 2 * 4 + w % 2; }
  LOWLAT_DEVICE static std::uint64_t columns_matrix(std::uint32_t slot) {
    return sm90::product_columns(slot + L::kColumnsOffset);
  }

  LOWLAT_DEVICE bool run_tiles() {
    const int group = warp / 4, quarter = warp % 4, own_tiles = r.own_tiles();
    // Checkpoint: eight rows of w1, the same of w3; Marlin: sixteen of either.
    const std::uint32_t rows =
        L::kMarlin ? codes_at(16 * quarter, 0, 0, 0)
                   : codes_at(8 * quarter, L::kTileValues + 8 * quarter, L::kUseRows, L::kChunkPitch);
    for (int n = 0; n < own_tiles; ++n) {
      const int buffer = n % L::kBuffers;
      const std::uint32_t tile_scales = sm90::shared_address(r.smem) + L::kScalesOffset +
                                        buffer * L::kTileScales + (8 * quarter + g) * L::kScaleRow;
      float total[4] = {};
      if (!L::kMarlin &&
          !barrier_wait(&r.barriers.scales_full[buffer], n / L::kBuffers & 1, r.watch)) {
        return false;
      }
#pragma unroll 1
      for (int i = group; i < L::kUses; i += L::kWarpGroups) {
        const int use = n * L::kUses + i, slot = use % L::kRing;
        if (!r.wait_filled(use)) return false;
        const std::uint32_t address = r.slot_address(slot);
        // Of the low and the high rows; from a group to the next, kStep bytes.
        constexpr int kStep = L::kMarlin ? L::kUseRows : 1;
        const std::uint32_t low_scale = L::kMarlin ? address + L::kChunkCodes + scales_at(quarter)
                                                   : tile_scales + i * L::kChunkGroups;
        const std::uint32_t high_scale =
            L::kMarlin ? low_scale + 2 : low_scale + L::kTileValues * L::kScaleRow;
        float acc[4] = {};
        multiply<L::kChunkGroups, L::kMarlin ? 2 : 4, false>(
            address + rows, columns_matrix(address), false, [&](int k, const float(&d)[4]) {
              const float low = power(smem_load1(low_scale + k * kStep));
              const float high = power(smem_load1(high_scale + k * kStep));
              acc[0] = plat::fma(d[0], low, acc[0]);
              acc[1] = plat::fma(d[1], low, acc[1]);
              acc[2] = plat::fma(d[2], high, acc[2]);
              acc[3] = plat::fma(d[3], high, acc[3]);
            });
        const uint2 columns = smem_load8(address + L::kColumnScales + 2 * t * 4);
        const float first = __uint_as_float(columns.x), second = __uint_as_float(columns.y);
        arrive(&r.barriers.empty[slot]);
        total[0] = plat::fma(acc[0], first, total[0]);
        total[1] = plat::fma(acc[1], second, total[1]);
        total[2] = plat::fma(acc[2], first, total[2]);
        total[3] = plat::fma(acc[3], second, total[3]);
      }
      if (!L::kMarlin) arrive(&r.barriers.scales_empty[buffer]);
      float* dst = begin_sums();
      if (dst == nullptr) return false;
      constexpr int kHigh = L::kMarlin ? 8 : L::kTileValues;  // rows from low to high
      dst += (group * kColumns + 2 * t) * L::kSumsPitch + (L::kMarlin ? 16 : 8) * quarter + g;
      dst[0] = total[0];
      dst[kHigh] = total[2];
      dst[L::kSumsPitch] = total[1];
      dst[L::kSumsPitch + kHigh] = total[3];
      end_sums();
    }
    return true;
  }

  LOWLAT_DEVICE bool run_second() const {
    if (r.block_idx >= L::kBands) return true;
    const int group = warp / 4, first_uses = r.own_tiles() * L::kUses;
    // Which warp takes which rows differs by group: where one of four rests, each scheduler has one.
    constexpr bool kMayRest = L::kRowBlocks < 4;
    const int row_block = (warp + group) % 4;
    const bool rests = row_block >= L::kRowBlocks;
    const std::uint32_t rows =
        codes_at(16 * row_block, 16 * row_block + 8, L::kBandRows - 1, L::kInnerPitch);
    const int low_row = 16 * row_block + g, high_row = low_row + 8;
    const bool whole = high_row < L::kBandRows;
    for (int entry = group; entry < r.table.num_entries; entry += L::kWarpGroups) {
      const int use = first_uses + entry, slot = use % L::kRing;
      if (!r.wait_filled(use)) return false;
      const std::uint32_t address = r.slot_address(slot), scales = address + L::kBandCodes;
      constexpr int kStep = L::kMarlin ? L::kBandRows : 1;
      const std::uint32_t low_scale =
          scales + (L::kMarlin ? scales_at(row_block) : low_row * L::kInnerGroups);
      const std::uint32_t high_scale =
          L::kMarlin ? low_scale + 2 : (whole ? low_scale + 8 * L::kInnerGroups : low_scale);
      const std::uint32_t column_scales = address + L::kColumnScales + 2 * t * 4;
      float acc[4] = {};
      multiply<L::kInnerGroups, 2, kMayRest>(
          address + rows, columns_matrix(address), rests, [&](int i, const float(&d)[4]) {
            const uint2 columns = smem_load8(column_scales + i * (kColumns * 4));
            const float first = __uint_as_float(columns.x), second = __uint_as_float(columns.y);
            const float low = power(smem_load1(low_scale + i * kStep));
            const float high = power(smem_load1(high_scale + i * kStep));
            acc[0] = plat::fma(d[0], low * first, acc[0]);
            acc[1] = plat::fma(d[1], low * second, acc[1]);
            acc[2] = plat::fma(d[2], high * first, acc[2]);
            acc[3] = plat::fma(d[3], high * second, acc[3]);
          });
      arrive(&r.barriers.empty[slot]);
      const int begin = r.table.first[entry], num = r.table.first[entry + 1] - begin;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (rests || 2 * t + i >= num) continue;
        const int pair = r.table.sorted[begin + 2 * t + i];
        const float weight = r.table.weights[pair];
        __nv_bfloat16* dst = r.second(pair);
        dst[low_row] = __float2bfloat16_rn(weight * acc[i]);
        if (whole) dst[high_row] = __float2bfloat16_rn(weight * acc[2 + i]);
      }
    }
    return true;
  }

  LOWLAT_DEVICE bool run(stages::GateRule rule, stages::GateSum sum_rule) {
    g = r.lane / 4;
    t = r.lane % 4;
    load_x();
    bool going = !r.gates() || run_gate();
    // While the scores are on their way.
    for (int n = 0; going && n < r.shared_tiles(); ++n) {
      going = run_shared_tile(n);
    }
    route(rule);  // every consumer comes to its barriers
    make_table();
    weigh(sum_rule);
    return going && barrier_wait(&r.barriers.table, 0, r.watch) && run_shared_second() &&
           run_tiles() && run_second();
  }
};

// ------------------------------------------------------------------------------------ finisher

// By one warp: rows of scales that the shared w2's band touches, from that of its first row. Its
// arrival is one of two that end the wait for the band.
template <class L>
LOWLAT_DEVICE void load_band_scales(const Region<L>& r) {
  if (!r.shared || r.block_idx >= L::kBands) return;
  const int first = r.block_idx * L::kBandRows / L::kBlock * L::kBandScaleColumns;
  constexpr int kAll = L::kHidden / L::kBlock * L::kBandScaleColumns;
  for (int i = r.lane; i < L::kBandScaleRows * L::kBandScaleColumns; i += plat::kWarpLanes) {
    if (first + i < kAll) r.table.band_scales[i] = __ldg(r.a.w.shared_w2.scales + first + i);
  }
  __syncwarp();
  if (r.lane == 0) sm90::barrier_arrive(&r.barriers.band_full);
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
    constexpr int kRows = 2 * L::kSharedRows;
    const float* src = r.partial(sums % L::kBuffers) + (first * kColumns + column) * kRows + row;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += src[i * kColumns * kRows];
    return sum;
  }

  // Fills the other parity's columns with the pattern that says "not yet".
  LOWLAT_DEVICE void clear_columns() const {
    constexpr int kPieces = static_cast<int>(L::kHiddenBytes / 16);
    unsigned char* dst = r.columns((r.epoch & 1u) ^ 1u);
    for (int i = r.block_idx * plat::kWarpLanes + r.lane; i < kPieces;
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

  // Eight values of the shared expert's h of four columns, a lane each: bf16 in the order of pairs,
  // a chunk a column.
  LOWLAT_DEVICE void finish_shared(int first_row, int first_column, int tile) const {
    const int value = r.lane % L::kSharedRows, column = first_column + r.lane / L::kSharedRows;
    const float gate = round_to_bf16(slices<L::kConsumers>(value, column, 0));
    const float up = round_to_bf16(slices<L::kConsumers>(L::kSharedRows + value, column, 0));
    const float h = stages::swiglu(gate, up, kSwigluLimit, false);
    const std::uint32_t pair = pack_bf16(h, __shfl_down_sync(plat::kAllLanes, h, 4));
    // Of a column's lanes 0 .. 3: values i and i + 4.
    const int first = r.lane / L::kSharedRows * L::kSharedRows;
    uint4 chunk;
    chunk.x = __shfl_sync(plat::kAllLanes, pair, first);
    chunk.y = __shfl_sync(plat::kAllLanes, pair, first + 1);
    chunk.z = __shfl_sync(plat::kAllLanes, pair, first + 2);
    chunk.w = __shfl_sync(plat::kAllLanes, pair, first + 3);
    if (value == 0 && first_row + column < r.a.rows) {
      store_packet(r.shared_hidden(first_row + column) + tile * 16, chunk);
    }
  }

  // A group of 32 of a tile's values of h of one pair, a lane each, as two e4m3 terms.
  LOWLAT_DEVICE void finish_pair(int column, int pair, int tile, int half) const {
    constexpr int kGroupSums = kColumns * L::kSumsPitch;  // of a warp group
    const float* src =
        r.partial(sums % L::kBuffers) + column * L::kSumsPitch + half * 32 + r.lane;
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (int i = 0; i < L::kWarpGroups; i += L::kParts) {
      gate += src[i * kGroupSums];
      up += src[L::kMarlin ? (i + 1) * kGroupSums : i * kGroupSums + L::kTileValues];
    }
    const float h = round_to_bf16(
        stages::swiglu(round_to_bf16(gate), round_to_bf16(up), kSwigluLimit, true));
    float amax = fabsf(h);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(plat::kAllLanes, amax, offset));
    }
    const std::uint32_t exponent = activation_exponent(amax);
    const float scaled[4] = {h * __uint_as_float((254u - exponent) << 23), 0.0f, 0.0f, 0.0f};
    std::uint32_t high, low;
    split_e4m3(scaled, high, low);
    const std::uint32_t codes = (high & 0xffu) | low << 8;
    // Lane 4 p + i makes word i of part p, of the elements that lane i of four has codes of: in the
    // upper nibbles (even parts) or the lower.
    const int part = r.lane / 4 % 4, upper = part % 2 == 0 ? 1 : 0;
    const int first = L::kMarlin ? r.lane % 4 * 2 + 8 * upper : r.lane % 4 * 8 + upper;
    std::uint32_t word = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const std::uint32_t theirs = __shfl_sync(
          plat::kAllLanes, codes, first + (L::kMarlin ? b / 2 * 16 + b % 2 : 2 * b));
      word |= (part < 2 ? theirs & 0xffu : theirs >> 8 & 0xffu) << 8 * b;
    }
    uint4 piece;
    piece.x = __shfl_sync(plat::kAllLanes, word, r.lane % 4 * 4);
    piece.y = __shfl_sync(plat::kAllLanes, word, r.lane % 4 * 4 + 1);
    piece.z = __shfl_sync(plat::kAllLanes, word, r.lane % 4 * 4 + 2);
    piece.w = __shfl_sync(plat::kAllLanes, word, r.lane % 4 * 4 + 3);
    const int group = tile * L::kTileGroups + half;
    if (r.lane < 4) store_packet(r.pair_pieces(pair) + group * L::kPieceRow + r.lane * 16, piece);
    if (r.lane == 4) store_word(r.pair_scales(pair) + group, (exponent + kFp4E4m3Shift) << 23);
  }

  // The parts of the shared expert's second product, of eight rows.
  LOWLAT_DEVICE void finish_shared_second(int group) const {
    const float* src = r.partial(sums % L::kBuffers);
    const int num = r.a.rows - group * kColumns;
    for (int i = r.lane; i < (num < kColumns ? num : kColumns) * L::kBandRows;
         i += plat::kWarpLanes) {
      float sum = 0.0f;
#pragma unroll
      for (int part = 0; part < L::kSharedParts; ++part) {
        sum += src[part * kColumns * L::kBandRows + i];
      }
      r.second(L::kMaxPairs + group * kColumns)[i] = __float2bfloat16_rn(sum);
    }
  }

  LOWLAT_DEVICE bool run(stages::GateRule rule) {
    if (r.gates() && !run_gate(rule)) return false;
    load_band_scales(r);
    clear_columns();
    for (int n = 0; n < r.shared_tiles(); ++n) {
      for (int group = 0; group < r.num_groups(); ++group) {
        if (!wait_sums()) return false;
        const int first_row = group * kColumns;
#pragma unroll 1
        for (int column = 0; column < kColumns && first_row + column < r.a.rows; column += 4) {
          finish_shared(first_row, column, n * r.num_blocks + r.block_idx);
        }
        free_sums();
      }
    }
    if (!barrier_wait(&r.barriers.table, 0, r.watch)) return false;
    if (r.shared && r.block_idx < L::kBands) {
      for (int group = 0; group < r.num_groups(); ++group) {
        if (!wait_sums()) return false;
        finish_shared_second(group);
        free_sums();
      }
    }
    const int own_tiles = r.own_tiles();
    for (int n = 0; n < own_tiles; ++n) {
      const int number = r.routed_tile(n), entry = number / L::kTiles;
      if (!wait_sums()) return false;
      const int first = r.table.first[entry], num = r.table.first[entry + 1] - first;
#pragma unroll 1
      for (int i = 0; i < num * L::kTileGroups; ++i) {
        const int column = i / L::kTileGroups;
        finish_pair(column, r.table.sorted[first + column], number % L::kTiles,
                    i % L::kTileGroups);
      }
      free_sums();
    }
    return true;
  }
};

// ------------------------------------------------------------------------------------ epilogue

// All threads, after the block's sync: y of the band, stored and published.
template <class L>
LOWLAT_DEVICE void finish_band(const Region<L>& r) {
  const MoeArgs& a = r.a;
  const stages::FaultPort fault = {a.fault.abort_words,
                                   static_cast<stages::StatusWords*>(a.fault.status),
                                   a.fault.tp_rank, a.fault.tp_size, a.fault.budget_ns};
  const stages::ExchangePort port = {reinterpret_cast<plat::TaggedWords* const*>(a.boxes.outboxes),
                                     fault, a.boxes.box_packets};
  const std::uint64_t epoch = a.boxes.outboxes != nullptr ? *a.boxes.epoch : 0;
  // This rank's partial sum.
  const auto value = [&](int row, int n) {
    float sum = 0.0f;
#pragma unroll
    for (int slot = 0; slot < L::kSlots; ++slot) {
      sum += __bfloat162float(r.second(row * L::kSlots + slot)[n]);
    }
    const float y = round_to_bf16(sum);
    return r.shared ? y + __bfloat162float(r.second(L::kMaxPairs + row)[n]) : y;
  };
  if (a.quads.tp_size > 0) {
    constexpr int kQuads = L::kBandRows / 4;
    const std::uint64_t quads_epoch = exchange_epoch(a.quads, a.quads_index);
#pragma unroll 1
    for (int i = plat::thread_idx(); i < a.rows * kQuads; i += L::kThreads) {
      const int row = i / kQuads, quad = i % kQuads;
      const float v[4] = {value(row, 4 * quad), value(row, 4 * quad + 1), value(row, 4 * quad + 2),
                          value(row, 4 * quad + 3)};
      publish_quad(a.quads, quads_epoch, row, r.block_idx * kQuads + quad,
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
          (static_cast<std::int64_t>(row) * L::kBands + r.block_idx) * L::kPacketsPerBand +
          n / 3;
      stages::publish_packet(port, epoch, packet, words);
    }
  }
}

// What the host adds to a launch's arguments.
struct Rules {
  stages::GateRule rule;
  stages::GateSum sum_rule;
};

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
  r.with_more = r.shared ? L::kSharedTiles % r.num_blocks : 0;
  if (thread < L::kRing) {
    sm90::barrier_init(&barriers.full[thread], plat::kWarpLanes);
    sm90::barrier_init(&barriers.here[thread], 1);
    sm90::barrier_init(&barriers.empty[thread], 4);
  } else if (thread >= 32 && thread < 32 + L::kBuffers) {
    const int i = thread - 32;
    sm90::barrier_init(&barriers.scales_full[i], 1);
    sm90::barrier_init(&barriers.scales_empty[i], L::kConsumers);
    sm90::barrier_init(&barriers.sums_full[i], L::kConsumers);
    sm90::barrier_init(&barriers.sums_empty[i], 1);
    sm90::barrier_init(&barriers.shared_full[i], 1);
    sm90::barrier_init(&barriers.shared_done[i], L::kConsumers);
  } else if (thread == 64) {
    sm90::barrier_init(&barriers.gate_full, 1);
    sm90::barrier_init(&barriers.gate_done, L::kConsumers);
    sm90::barrier_init(&barriers.band_full, 2);
    sm90::barrier_init(&barriers.table, L::kConsumers);
    table.stop = 0;
  }
  static_assert(L::kBuffers == 2);
  sm90::fence_barrier_init();

  for (int i = thread; i < L::kExperts; i += L::kThreads) table.count[i] = 0;
  plat::block_sync();

  Producer<L> producer = {r};
  Consumer<L> consumer = {r, warp};
  bool going = true;
  // Weights first; everything else has to wait for what came before.
  if (warp == L::kProducer) {
    going = producer.run_early();
  }
  wait_at(args.before);
  // The next kernel's blocks may take the multiprocessors that are through.
  sm90::launch_dependents();
  std::uint32_t* epoch_word = reinterpret_cast<std::uint32_t*>(args.workspace) + r.block_idx;
  r.epoch = *epoch_word + 1;
  r.watch.deadline_ns = plat::clock_ns() + args.fault.budget_ns;
  if (args.fault.abort_words != nullptr) {
    r.watch.abort_word = args.fault.abort_words[args.fault.tp_rank];
  }
  if (warp < L::kConsumers) {
    sm90::more_registers<L::kConsumerRegisters>();
    consumer.run(rules.rule, rules.sum_rule);
  } else {
    sm90::fewer_registers<L::kOtherRegisters>();
    if (warp == L::kProducer) {
      if (going) producer.run_routed();
    } else if (warp == L::kFinisher) {
      Finisher<L> finisher = {r};
      finisher.run(rules.rule);
    } else {
      const Gatherer<L> gatherer = {r, warp - L::kGatherer};
      gatherer.run();
    }
  }
  plat::block_sync();
  if (table.stop == 0) {
    if (r.block_idx < L::kBands) finish_band(r);
    if (thread == 0) *epoch_word = r.epoch;
    return;
  }
  if (warp == L::kProducer) producer.drain();
  if (thread == 0 && args.fault.abort_words != nullptr) {
    const stages::FaultPort port = {args.fault.abort_words,
                                    static_cast<stages::StatusWords*>(args.fault.status),
                                    args.fault.tp_rank, args.fault.tp_size, args.fault.budget_ns};
    const std::uint32_t event = table.stop & 0xffffu;
    if (table.stop >> 28 == static_cast<std::uint32_t>(Stop::aborted)) {
      // Another block of this rank has already said why.
      const std::uint32_t reason =
          plat::load_acquire<plat::Scope::system>(args.fault.abort_words[args.fault.tp_rank]);
      if (reason != 1u + static_cast<std::uint32_t>(args.fault.tp_rank)) {
        stages::note_abort(port, event, stages::StageId::moe_sum, r.epoch);
      }
    } else {
      stages::raise_fault(port, event, stages::StageId::moe_sum, args.fault.tp_rank, r.epoch);
    }
  }
}

}  // namespace moe
}  // namespace lowlat::nvidia::fused

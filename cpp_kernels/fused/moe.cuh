// moe_region_mxfp4_sm90: router, routed MXFP4 experts and shared expert for few rows, one launch.
//
// Math         z = x gate^T; ids and weights as stages/gate.hpp. For pair p (a row, a slot) of
//              expert e: h_p = swiglu(bf(w1_e x), bf(w3_e x)), d_p = bf(weight_p * (w2_e h_p));
//              shared: the same with x and h quantised. y = bf(sum of a row's d_p) + bf(shared)
// Shapes       fused/moe.hpp, both layouts of the weights; T 1 .. 8
// Rounding     as stages/experts.hpp (Marlin's): gate, up, silu, h, d and the sum of slots to
//              bf16; all other sums fp32. x enters the routed products as two e4m3 terms under a
//              power of two: below 2^-17 of the largest of a row's share of a warp (a sixteenth of
//              it) is lost. h enters as fp16
// Bytes        each weight of a chosen expert once: shape::moe_weight_bytes
// Floor        V4.1, TP4, T = 6: 175 MB, 37.7 us at 4.65 TB/s. The bench prints the share reached.
// Launch       one block an SM (128 at least): kConsumers warps, a producer, a finisher, two
//              routers. Weights are on their way before the kernels before have ended.
// Ordering     below
// Determinism  fixed trees: K of the first product is split over the consumers, of the second over
//              kParts, both added in their order; slots in slot order. Bitwise run to run.
// Meaning      reference/experts.cpp, reference/gate.cpp. Bound: rel_l2 <= 1e-2
//
// How the work lies. First product: a tile is 8 values of h, rows i .. i + 7 of w1 and of w3, so
// that gate and up of one value meet in one warp. Blocks draw tiles in the order of experts, so
// that slow ones take fewer; all consumers work on one tile, warp w on the w-th slice of K. The
// products are wgmma's of e4m3: a warp's 16 weight rows, whose fp4 codes are moved into e4m3's
// fields in registers, times 8 columns in shared memory, two of which are the row's two terms along
// this warp's slice, the other six those of the three warps beside it. So a product is one row
// (an expert's rows are taken one after the other), and any row's columns lie in one place, written
// once. A group of 32 along K is one product and its scale multiplies the sums. The slot is free as
// soon as the codes are in registers. The finisher adds the slices, applies SwiGLU and sends h to
// all blocks. Second product: block b owns a band of output columns for all experts, so a row's
// slots never leave the block; warps take (expert, part of I), a pair at a time. Codes are placed
// in fp16 fields by shifts alone; group j of a pair's h is column j of the products, so that the
// scales are applied once at the end. The first experts' h was finished while later tiles were
// multiplied, so the second product starts without a wait. Weights that do not depend on the
// routing (router, shared expert) stream while it is being decided. Experts are in the order of
// their first pairs: as row 0's become known, every block asks for its first tiles.
//
// Marlin's tiles: a line of 128 bytes holds sixteen rows of sixteen along K, those of two eighths g
// of 64. A tile of the first product is so sixteen values of h, in two uses of the ring, each half
// of K; half of the warps have gate and half up, of two slices of x each, and the second use's sums
// are added to the first's where these lie. Its values of h are two chunks as one lane of the
// second product needs them. A block's band is kBandRows positions of the tiles' order, whose words
// are what mma.m16n8k16 wants (moe_tiles.cuh); of the shared expert's w2 it brings those rows. V4's
// bands hold whole quads of columns; V4.1's, five eighths, do not: quads of positions are published
// and whoever receives them puts them in order (exchange_norm.cuh).
//
// The layer's end: where the sum is published as quads, the first blocks' last warps may do what
// hc_exchange_norm_sm90 does (MoeArgs::exchange), whose blocks would find room, and their inputs,
// when these have ended.
//
// Ordering     scores   [row][packet] {3 scores, epoch}: two packets of each of the first blocks,
//                       written by its finisher, read by one warp of every block. Written again by
//                       the next launch, which begins after this one has ended
//                       (wait_for_predecessors).
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
//                       first's ring (kPacked: over slots, columns and scales); a piece is first
//                       filled after the last tile was read of what lies in its place.
//                       Pieces are filled in any order: piece_expert names what a piece is being
//                       filled with, and only then is its `full` waited for by parity.
//              sums     partial[] full: every consumer; empty: the finisher's. `second` lies over
//                       them: a warp writes there after it has seen every partial buffer free.
//              squares  [row][slice] {sum of squares, epoch of the quads} of the layer's end:
//                       written again a layer later, when every slice of this one has been read.
//              late     waits for other blocks watch one deadline and the abort word; nothing is
//                       stored or published after a fault.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "fused/moe_parts.cuh"
// The parts come first.
#include "fused/exchange_norm.cuh"
#include "fused/moe_tiles.cuh"
#include "fused/moe_wide_numbers.cuh"

namespace lowlat::nvidia::fused {

namespace moe {

inline constexpr int kBands = 128;  // blocks that own columns
inline constexpr int kTileRows = 8;
inline constexpr int kHiddenShift = 8;  // of routed h

// Sizes of one compiled shape.
template <class S, MoeLayout kWeights = MoeLayout::checkpoint>
struct Layout {
  static constexpr bool kMarlin = kWeights == MoeLayout::marlin;
  static constexpr int kConsumers = 16;  // warps that multiply; eight and twenty are slower
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
  static constexpr int kRanks = S::kTpSize;
  // V4.1's; V4's layers end with statistics (exchange_mix.hpp).
  static constexpr bool kEndsLayer = kHidden == 5120;
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
  static constexpr int kTileScales = 2 * kTileRows * kScaleRow;
  static constexpr int kTileBytes = 2 * kHalfTile + kTileScales;
  static constexpr int kSharedPitch = kHidden + 32;  // e4m3 row
  // A slot of the ring: a tile's codes, or one of the shared tile's halves.
  static constexpr int kSlotUsed =
      2 * kHalfTile > kTileRows* kSharedPitch ? 2 * kHalfTile : kTileRows * kSharedPitch;
  static constexpr int kSlotBytes = round_up(kSlotUsed, 1024);
  // Few blocks score experts, the first ones, because late ones begin where others had to end
  // first: two packets' experts each, and a use of the ring for each packet's.
  static constexpr int kGateRows = kExperts / kScorers;  // experts of a packet
  static constexpr int kScorePackets = 2, kScoringBlocks = kScorers / kScorePackets;
  static constexpr int kGatePitch = 2 * kHidden + 16;  // bf16 row
  static constexpr int kSharedTiles = kInner / kTileRows;
  // Values of h of a routed tile, and its uses of the ring, each a part of K. Of Marlin's tiles a
  // line of 128 bytes is sixteen rows.
  static constexpr int kTileValues = kMarlin ? 2 * kTileRows : kTileRows;
  static constexpr int kUses = kTileValues / kTileRows;
  static constexpr int kTiles = kInner / kTileValues;  // of an expert
  // A block's first tiles are given, the others it draws, so that blocks whose copies are slow take
  // fewer.
  static constexpr int kGiven = 2 / kUses;
  // Marlin: a warp has gate or up of two slices of x, of either its blocks of half of K. Of product
  // i of a use: its slice and block, and the group of the use's K, from the warp's first.
  static constexpr int kUseBlocks = kSliceBlocks / kUses;
  static constexpr int slice_of(int i) { return kMarlin ? i / kUseBlocks : 0; }
  static constexpr int columns_place(int i) {
    return kMarlin ? slice_of(i) * kSliceBlocks + i % kUseBlocks : i;
  }
  static constexpr int use_group(int i) {
    return slice_of(i) * 4 * kSpan + block_group(i % kUseBlocks);
  }
  static constexpr int kLineBytes = 128, kLineScales = 16;  // of 16 and of 32 along K
  static_assert(!kMarlin || kSliceBlocks % kSpan == 0);
  static constexpr int kWindow = 16;  // tiles that are remembered, more than ring and sums hold
  // Second product.
  static constexpr int kBandRows = kHidden / kBands;
  static constexpr int kMTiles = (kBandRows + 15) / 16;
  static constexpr int kInnerBlocks = kInner / 64;
  static constexpr int kParts = kInnerBlocks % 3 == 0 ? 3 : 4;
  static constexpr int kPartGroups = 2 * kInnerBlocks / kParts;  // of 32, of one scale each
  // A group of a pair's h is a column of its own: so many at once.
  static constexpr int kPasses = (kPartGroups + 7) / 8, kPassGroups = kPartGroups / kPasses;
  static_assert(kPassGroups * kPasses == kPartGroups && kPassGroups % 2 == 0);
  static constexpr int kInnerRow = kInner / 2, kInnerScaleRow = kInner / 32;
  // Marlin: the band is kBandRows of the tiles' order, whole eighths of tiles.
  static constexpr int kBandLine = kBandRows * 8, kBandScaleLine = round_up(kBandRows, 16);
  // Where the band's scales begin in a line of them, which begins at a multiple of sixteen.
  static constexpr LOWLAT_DEVICE int band_scales_begin(int block) {
    return kMarlin ? block * kBandRows % 16 : 0;
  }
  static_assert(!kMarlin || kBandRows % 16 == 0 || kBandRows % 16 == 8);
  static constexpr int kBandCodes = kBandRows * kInnerRow;
  static constexpr int kBandScaleBytes = kInnerScaleRow * (kMarlin ? kBandScaleLine : kBandRows);
  static constexpr int kBandBytes = kBandCodes + kBandScaleBytes;
  static constexpr int kPieceBytes = round_up(kBandBytes, 128);
  static constexpr int kPieces = kSlotBytes / kPieceBytes;  // in a slot
  static constexpr int kPacketsPerBand = (kBandRows + 2) / 3;
  // At most. Marlin: those of the groups of 64 columns that the band lies in, one or two.
  static constexpr int kBandScaleRows =
      !kMarlin ? (kBandRows + kBlock - 2) / kBlock + 1
               : (64 % kBandRows == 0 ? 1 : 2) * (64 > kBlock ? 64 / kBlock : 1);
  static constexpr int kBandScaleColumns = kInner / kBlock;
  // Of the band's n-th value: its column, and the first of the columns that kBandScaleRows begins
  // with. Marlin's order: position 8 g + j of 64 is column 8 j + g.
  static constexpr LOWLAT_DEVICE int column_of(int block, int n) {
    const int position = block * kBandRows + n;
    if constexpr (!kMarlin) return position;
    return position / 64 * 64 + position % 8 * 8 + position % 64 / 8;
  }
  static constexpr LOWLAT_DEVICE int first_scaled(int block) {
    return kMarlin ? block * kBandRows / 64 * 64 : block * kBandRows;
  }
  // What is published i-th: quads of four columns where the band has such, or of four positions.
  static constexpr bool kTrueQuads = !kMarlin || kBandRows == 32;
  static constexpr LOWLAT_DEVICE int published(int i) {
    return kMarlin && kTrueQuads ? i % 4 * 8 + i / 4 : i;
  }
  static constexpr LOWLAT_DEVICE int quad_of(int block, int i) {
    if constexpr (kMarlin && kTrueQuads) return block / 2 * 16 + i / 4 * 2 + block % 2;
    return (block * kBandRows + i) / 4;
  }

  static_assert(kConsumers >= kMaxRows && kConsumers % 8 == 0 && kHidden % 256 == 0 &&
                (kSpan == 1 || kSpan == 4));
  static_assert(kSlice % (2 * kBlockK) == 0 && kHidden % kConsumers == 0 && kInner % 64 == 0 &&
                kExperts % kScorers == 0 && kScorePackets * kGateRows <= kTileRows);
  static_assert(kTiles % 2 == 0 && kInnerBlocks % kParts == 0 && kBandRows % kTileRows == 0 &&
                kPieces >= 1);
  static_assert(kGateRows <= 3, "one packet holds a block's scores of a row");
  static_assert(kBandRows * kInnerRow % 16 == 0 && kBandRows * kInnerScaleRow % 16 == 0);
  static_assert(kSlice % kBlock == 0, "an activation's scale group is one warp's");

  // Shared memory, in bytes from its start.
  static constexpr int kPartialBytes = kConsumers * kColumns * 2 * kTileRows * 4;
  static constexpr int kBuffers = 2;                        // of partial sums
  static constexpr int kSecondRows = kMaxPairs + kMaxRows;  // pairs, then the shared expert's rows
  static constexpr int kPairFloats = kParts * kMaxPairs * kBandRows;
  // The pairs' sums of the second product lie over the partial sums, the shared expert's behind
  // both.
  static constexpr int kPartialFloats = kBuffers * kPartialBytes / 4;
  static constexpr int kSharedSums = kPartialFloats > kPairFloats ? kPartialFloats : kPairFloats;
  static constexpr int kSumsBytes = 4 * (kSharedSums + kParts * kMaxRows * kBandRows);
  // Columns of e4m3: of each group of four warps, each of their groups of 32, each row: the two
  // terms of the four warps' 32 elements, as two cores of 8 columns. A row's pitch spreads the
  // banks that a warp's stores go to.
  static constexpr int kColumnBytes = 256, kColumnPitch = kColumnBytes + 16;
  static constexpr int kColumnsBytes = kConsumers / 4 * kSliceBlocks * kMaxRows * kColumnPitch;
  // What is as large for any ring: a tile's scales have one place more than its codes, because a
  // slot is free again when its codes are in registers.
  static constexpr int kTableMost = 3072;  // table, barriers, rounding
  static constexpr int kFixed = kSumsBytes + kTableMost + kTileScales + kColumnsBytes;
  static constexpr int kSharedBand = round_up(kBandRows * kInner, 128);  // of the shared w2
  static constexpr int kMaxSlots = 3;  // more in flight is slower, see docs/bench
  static constexpr int slots_beside(int bytes) {
    const int fit = (kSmemLimit - kFixed - bytes) / (kSlotBytes + kTileScales);
    return fit < kMaxSlots ? fit : kMaxSlots;
  }
  // The shared w2's band has a place of its own, or comes by sixteen rows, one after the other,
  // where the second product has its first piece later.
  static constexpr bool kBandStreams = slots_beside(kSharedBand) < 2;
  static constexpr int kBandTurns = kBandStreams ? kMTiles : 1;
  static constexpr int kRing = slots_beside(kBandStreams ? 0 : kSharedBand);
  static_assert(kRing >= 2, "the shared expert's tile takes two slots");
  static constexpr int kSumsOffset = kBandStreams ? 0 : kSharedBand;
  static constexpr int kTableOffset = round_up(kSumsOffset + kSumsBytes, 128);
  struct alignas(16) Table {
    std::int32_t ids[kMaxPairs];
    float weights[kMaxPairs];
    std::int32_t num_experts;
    std::int32_t band_turns;             // copies of the shared w2's band that were asked for
    std::uint32_t stop;                  // Watch
    std::uint32_t lost;                  // scores have not come: no tiles
    std::int32_t asked;                  // given tiles that the first row's router has asked for
    std::uint64_t quads_epoch;           // exchange_epoch of the sum's packets
    std::uint16_t expert[kMaxPairs];     // in the order of their first pairs, one entry each
    std::uint16_t first[kMaxPairs + 1];  // of an expert in `sorted`
    std::uint16_t sorted[kMaxPairs];     // pairs by expert, then by pair
    std::uint16_t place[kMaxPairs];      // of a pair in `sorted`
    // Rows that chose an expert, a bit each. Of a use of the ring: its tile, and those rows (none:
    // it is no tile).
    std::uint32_t rows_of[kMaxPairs];
    std::int32_t tile[kWindow];
    std::uint8_t rows_here[kWindow];
    std::uint32_t
        piece_expert[plat::kWarpLanes];  // number of the expert that a piece is filled with
    std::uint8_t band_scales[kBandScaleRows * kBandScaleColumns];  // of the shared w2 band
    // Of the layer's end: the row's parameters, whether they are there, squares of warps.
    float mix[kMixStride];
    std::uint32_t has_mix;
    std::uint32_t has_shared;  // the launch has a shared expert
    std::uint32_t epoch;       // what one warp has read for all
    std::uint64_t deadline_ns;
    const std::uint32_t* abort_word;
    std::uint32_t arguments[kThreads / plat::kWarpLanes];  // nobody reads them
    float squares[kHidden / kSlicesPerRow / 4 / plat::kWarpLanes];
  };
  static constexpr int kBarrierOffset =
      round_up(kTableOffset + static_cast<int>(sizeof(Table)), 16);
  // Pieces of the second product lie in the slots, and then in the columns' place. Where a slot has
  // room for one, which would leave much of it, they are packed: the first behind everything else,
  // the others one after the other over slots, columns and the tiles' scales.
  static constexpr bool kPacked = kBandStreams;
  // The last slot of packed ones ends with what it holds.
  static constexpr int kSlotsBytes =
      (kRing - 1) * kSlotBytes + (kPacked ? round_up(kSlotUsed, 128) : kSlotBytes);
  static constexpr int kSlotPieces = kPacked ? 0 : kRing * kPieces;
  static constexpr int kPieceRoom =
      kColumnsBytes + (kPacked ? kSlotsBytes + (kRing + 1) * kTileScales : 0);
  static constexpr int kRingPieces = kSlotPieces + kPieceRoom / kPieceBytes + (kPacked ? 1 : 0);
  // Of packed ones the second lies in one slot, the third in both, the fourth in the other.
  static_assert(!kPacked || (kRing == 2 && kPieces == 1 && 2 * kPieceBytes >= kSlotBytes &&
                             3 * kPieceBytes <= kSlotsBytes));
  static_assert(!kBandStreams || 16 * kInner <= kPieceBytes);
  static_assert((kConsumers - 1) / kParts < kRingPieces &&
                    (kConsumers + kParts - 1) / kParts <= kRingPieces,
                "a warp's first expert and its step to the next lie in the ring");
  struct Barriers {
    std::uint64_t full[kRing], empty[kRing];  // full: the first
    std::uint64_t piece_full[kRingPieces], piece_empty[kRingPieces];
    std::uint64_t shared_full, x, epoch, scored, first_routed, routed, table, sums_full[kBuffers],
        sums_empty[kBuffers];
    std::uint64_t band_full[kBandTurns], band_empty[kBandTurns];
  };
  // Arrivals that complete a phase of the barrier number `i`.
  LOWLAT_DEVICE static std::uint32_t arrivals_of(int i) {
    constexpr auto number = [](std::size_t offset) {
      return static_cast<int>(offset / sizeof(std::uint64_t));
    };
    const auto in = [i](int first, int count) { return i >= first && i < first + count; };
    if (in(number(offsetof(Barriers, empty)), kRing) ||
        in(number(offsetof(Barriers, sums_full)), kBuffers)) {
      return kConsumers;
    }
    if (in(number(offsetof(Barriers, piece_empty)), kRingPieces)) return kParts;
    if (in(number(offsetof(Barriers, band_empty)), kBandTurns)) return kParts;
    if (i == number(offsetof(Barriers, routed))) return kMaxRows;
    // The band's first copy, and the finisher with its scales.
    return i == number(offsetof(Barriers, band_full)) ? 2 : 1;
  }
  // The copies before all barriers are made have theirs.
  LOWLAT_DEVICE static bool is_of_first_copies(int i) {
    return i < kRing || i == static_cast<int>(offsetof(Barriers, shared_full) / 8);
  }
  // Places in them, for loops that address shared memory themselves.
  static constexpr int kStopOffset = offsetof(Table, stop),
                       kRowsHereOffset = offsetof(Table, rows_here),
                       kPieceExpertOffset = offsetof(Table, piece_expert);
  static constexpr int kFullBarriers = offsetof(Barriers, full);
  static constexpr int kEmptyBarriers = offsetof(Barriers, empty);
  static constexpr int kPieceFullBarriers = offsetof(Barriers, piece_full);
  static constexpr int kPieceEmptyBarriers = offsetof(Barriers, piece_empty);
  static constexpr int kSumsFullBarriers = offsetof(Barriers, sums_full);
  static constexpr int kSumsEmptyBarriers = offsetof(Barriers, sums_empty);
  static constexpr int kAllTileScales = (kRing + 1) * kTileScales;
  static constexpr int kTableEnd =
      round_up(kBarrierOffset + static_cast<int>(sizeof(Barriers)), 128);
  static constexpr int kRingOffset = round_up(kTableEnd + (kPacked ? 0 : kAllTileScales), 1024);
  static constexpr int kColumnsOffset = kRingOffset + kSlotsBytes;
  static constexpr int kScalesOffset = kPacked ? kColumnsOffset + kColumnsBytes : kTableEnd;
  // The router's rows are the ring's first use; the first shared tile has the columns' place, so
  // that the ring is free for routed tiles as soon as an expert is known.
  static constexpr int kSharedHalf = kTileRows * kSharedPitch;
  static_assert(kGateRows * kGatePitch <= kSlotBytes && kScorePackets <= kRing &&
                2 * kSharedHalf <= kColumnsBytes);
  static constexpr int kPackedEnd = round_up(kScalesOffset + kAllTileScales, 128);
  static constexpr int kBandOffset = kBandStreams ? kPackedEnd : 0;
  static constexpr int kSmemBytes =
      kPacked ? kPackedEnd + kPieceBytes : kColumnsOffset + kColumnsBytes;
  static_assert(kSmemBytes <= kSmemLimit);

  // Workspace, in bytes from its start.
  static constexpr int kMaxGrid = 1024;
  static constexpr std::size_t kHiddenRow = kInner * 2;
  static constexpr std::size_t kHiddenBytes = kSecondRows * kHiddenRow;  // of one parity
  static constexpr std::size_t kTicketOffset = 4 * kMaxGrid;             // after the epochs
  static constexpr std::size_t kHiddenOffset = kTicketOffset + 256;
  static constexpr std::size_t kScoresOffset = kHiddenOffset + 2 * kHiddenBytes;
  static constexpr std::size_t kScoresBytes = std::size_t{16} * kScorers * kMaxRows;
  static constexpr std::size_t kSquaresOffset = kScoresOffset + kScoresBytes;
  static constexpr std::size_t kSquaresBytes = std::size_t{16} * kSlicesPerRow * kMaxRows;
  static constexpr std::size_t kWorkspaceBytes = kSquaresOffset + kSquaresBytes;
};

// The copies of tiles: w1 and w3 as [H / 256][E I][128 bytes].
struct TileMaps {
  CUtensorMap gate, up;
};
// Marlin: w1's (and w3's) codes and scales, w2's, as they lie.
struct MarlinMaps {
  CUtensorMap tiles, tile_scales, bands, band_scales;
};
template <class L>
using Maps = std::conditional_t<L::kMarlin, MarlinMaps, TileMaps>;

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
  bool scores;  // this launch has a router
  int num_shared_tiles;

  // Of the use number `use` of the ring.
  LOWLAT_DEVICE std::uint32_t slot_address(int use) const {
    return sm90::shared_address(smem) + L::kRingOffset + use % L::kRing * L::kSlotBytes;
  }
  // Of a piece of the second product, after so many uses of the ring.
  LOWLAT_DEVICE int piece_offset(int piece, int uses) const {
    if constexpr (L::kPacked) {
      if (piece == 0) return L::kPackedEnd;
      // From the slot on whose last use said that there are no more tiles: it is empty.
      const int place = piece < 4 && (uses - 1) % L::kRing != 0 ? 3 - piece : piece - 1;
      return L::kRingOffset + place * L::kPieceBytes;
    }
    if (piece >= L::kSlotPieces) {
      return L::kColumnsOffset + (piece - L::kSlotPieces) * L::kPieceBytes;
    }
    return L::kRingOffset + piece_slot(piece, uses) * L::kSlotBytes +
           piece % L::kPieces * L::kPieceBytes;
  }
  // The first pieces have the slot of the use that said there are no more tiles: it is empty.
  LOWLAT_DEVICE static int piece_slot(int piece, int uses) {
    return (uses - 1 + piece / L::kPieces) % L::kRing;
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
  LOWLAT_DEVICE plat::TaggedWords* score_packet(int row, int packet) const {
    return reinterpret_cast<plat::TaggedWords*>(workspace + L::kScoresOffset) + row * kScorers +
           packet;
  }
  // Of the shared expert's w2. Kept in shared memory: a flag that lives as long as the block is
  // kept in memory that is farther away.
  LOWLAT_DEVICE bool has_band() const { return table.has_shared != 0 && block_idx < kBands; }
  // What only exchanges with other blocks need: not waited for before x is asked for. By the warp
  // that tells that x is there.
  LOWLAT_DEVICE void tell_epoch() const {
    if (lane == 0) {
      table.epoch = *(reinterpret_cast<const std::uint32_t*>(a.workspace) + block_idx) + 1;
      table.deadline_ns = plat::clock_ns() + a.fault.budget_ns;
      table.abort_word =
          a.fault.abort_words != nullptr ? a.fault.abort_words[a.fault.tp_rank] : nullptr;
      sm90::barrier_arrive(&barriers.epoch);
    }
    __syncwarp();
  }
  LOWLAT_DEVICE void read_epoch() {
    barrier_wait(&barriers.epoch, 0);
    epoch = table.epoch;
    watch.deadline_ns = table.deadline_ns;
    watch.abort_word = table.abort_word;
  }
  LOWLAT_DEVICE bool gates() const { return scores && block_idx < L::kScoringBlocks; }

  // Tiles of the shared expert, by the blocks that do not score first.
  LOWLAT_DEVICE int shared_tile(int n) const {
    constexpr int kFirst = L::kScoringBlocks;
    return n * num_blocks + (block_idx < kFirst ? block_idx + num_blocks : block_idx) - kFirst;
  }
  LOWLAT_DEVICE void count_shared_tiles() {
    while (a.w.shared_w1.codes != nullptr && shared_tile(num_shared_tiles) < L::kSharedTiles) {
      ++num_shared_tiles;
    }
  }

  // The shared w2's band, or sixteen rows of it (eight at its end). A warp calls.
  LOWLAT_DEVICE void load_band(int turn) const {
    constexpr int kRows = L::kBandStreams ? 16 : L::kBandRows;
    if constexpr (L::kMarlin) {  // a row a copy
      const int first = turn * kRows, left = L::kBandRows - first,
                rows = left < kRows ? left : kRows;
      std::uint64_t* const full = &barriers.band_full[turn];
      if (lane == 0) {
        if constexpr (L::kBandStreams) table.band_turns = turn + 1;
        sm90::barrier_arrive_expect(full, static_cast<std::uint32_t>(rows * L::kInner));
      }
      __syncwarp();
#pragma unroll 1
      for (int i = lane; i < rows; i += plat::kWarpLanes) {
        sm90::bulk_load(
            smem + L::kBandOffset + i * L::kInner,
            a.w.shared_w2.codes +
                static_cast<std::size_t>(L::column_of(block_idx, first + i)) * L::kInner,
            L::kInner, full, sm90::CacheHint::evict_first);
      }
      __syncwarp();
      return;
    }
    if (lane == 0) {
      const int first = turn * kRows, left = L::kBandRows - first;
      const std::uint32_t bytes = (left < kRows ? left : kRows) * L::kInner;
      if constexpr (L::kBandStreams) table.band_turns = turn + 1;
      sm90::barrier_arrive_expect(&barriers.band_full[turn], bytes);
      sm90::bulk_load(smem + L::kBandOffset,
                      a.w.shared_w2.codes +
                          (static_cast<std::size_t>(block_idx) * L::kBandRows + first) * L::kInner,
                      bytes, &barriers.band_full[turn], sm90::CacheHint::evict_first);
    }
    __syncwarp();
  }
};

// `kNum` threads of the block; number 0 is the whole block's.
template <int kNumber, int kNum>
LOWLAT_DEVICE void named_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kNumber), "n"(kNum) : "memory");
}
// Until x is there; all but the producer, who reads none of it, and who tells it.
template <class L>
LOWLAT_DEVICE void wait_for_x(const Region<L>& r) {
  if (r.a.before.word == nullptr) sm90::wait_for_predecessors();
  barrier_wait(&r.barriers.x, 0);
}
// By one warp, which has asked for nothing.
template <class L>
LOWLAT_DEVICE void tell_x(const Region<L>& r) {
  if (r.a.before.word == nullptr) {
    sm90::wait_for_predecessors();
  } else if (r.lane == 0) {
    poll_gate(r.a.before);
  }
  __syncwarp();
  if (r.lane == 0) sm90::barrier_arrive(&r.barriers.x);
}
// Code that runs for the first time is slow. Warps that wait for others run what follows on that
// once before, on other numbers, unless x is there already. The first of two passes, or the only
// one.
template <class L>
LOWLAT_DEVICE int first_pass(const Region<L>& r) {
  const Gate& gate = r.a.before;
  return r.scores && (gate.word == nullptr || !is_open(gate.word, gate.blocks)) ? 0 : 1;
}
LOWLAT_DEVICE void keep(float value) { asm volatile("" ::"f"(value)); }

// The n-th use of the ring by tiles: number `tile` in the order of experts, or none.
template <class L>
LOWLAT_DEVICE void describe_use(const Region<L>& r, int n, int tile) {
  const bool is_tile = tile < r.table.num_experts * L::kTiles;
  r.table.tile[n % L::kWindow] = tile;
  r.table.rows_here[n % L::kWindow] =
      static_cast<std::uint8_t>(is_tile ? r.table.rows_of[tile / L::kTiles] : 0u);
}
// By one thread: copies of Marlin's tile `tile` of `expert`, a part of K, which is use number `use`
// of the ring by tiles. `full` of the slot expects them.
template <class L>
LOWLAT_DEVICE void ask_for_use(const Region<L>& r, const MarlinMaps& maps, int slot, int use,
                               int expert, int tile, int part) {
  constexpr int kLines = L::kHidden / 16 / L::kUses;
  std::uint64_t* const full = &r.barriers.full[slot];
  unsigned char* const codes = r.smem + L::kRingOffset + slot * L::kSlotBytes;
  unsigned char* const scales = r.smem + L::kScalesOffset + use % (L::kRing + 1) * L::kTileScales;
  const int line = (expert * L::kUses + part) * kLines;
#pragma unroll
  for (int up = 0; up < 2; ++up) {  // columns of w1, then of w3
    const int column = up * L::kTiles + tile;
    sm90::tensor_load(codes + up * L::kHalfTile, &maps.tiles, column * (L::kLineBytes / 4), line, 0,
                      full, sm90::CacheHint::evict_first);
    sm90::tensor_load(scales + up * (L::kTileScales / 2), &maps.tile_scales,
                      column * (L::kLineScales / 4), line / 2, 0, full,
                      sm90::CacheHint::evict_first);
  }
}
template <class L>
LOWLAT_DEVICE int given_tile(const Region<L>& r, int n) {
  return n * r.num_blocks + r.block_idx;
}
// Uses of the ring before the first tile's.
template <class L>
LOWLAT_DEVICE int uses_before_tiles(const Region<L>& r) {
  return (r.gates() ? L::kScorePackets : 0) +
         (r.num_shared_tiles > 1 ? 2 * (r.num_shared_tiles - 1) : 0);
}

// ------------------------------------------------------------------------------------ producer

template <class L>
struct Producer {
  const Region<L>& r;
  const Maps<L>& maps;
  int uses = 0;   // of the first product's ring
  int turns = 0;  // of this lane's piece of the second's

  // Until use number `use` of the ring, if there was such a one, is over.
  LOWLAT_DEVICE void wait_empty(int use) const {
    if (use >= 0) barrier_wait(&r.barriers.empty[use % L::kRing], use / L::kRing & 1);
  }
  // Waits until the next slot is free and says what it will hold.
  LOWLAT_DEVICE void begin_slot(std::uint32_t bytes) {
    wait_empty(uses - L::kRing);
    if (r.lane == 0) sm90::barrier_arrive_expect(&r.barriers.full[uses % L::kRing], bytes);
    __syncwarp();
    ++uses;
  }
  LOWLAT_DEVICE void load(std::uint32_t offset, const void* src, std::uint32_t bytes) const {
    const int slot = (uses - 1) % L::kRing;
    sm90::bulk_load(r.smem + L::kRingOffset + slot * L::kSlotBytes + offset, src, bytes,
                    &r.barriers.full[slot], sm90::CacheHint::evict_first);
  }

  // Before the block's barriers are made, but for those that these copies take.
  LOWLAT_DEVICE void run_first() {
    const auto& w = r.a.w;
    if (r.gates()) {
#pragma unroll 1
      for (int i = 0; i < L::kScorePackets; ++i) {
        const int packet = r.block_idx * L::kScorePackets + i;
        begin_slot(L::kGateRows * 2 * L::kHidden);
        if (r.lane < L::kGateRows) {
          load(r.lane * L::kGatePitch,
               w.gate + (static_cast<std::size_t>(packet) * L::kGateRows + r.lane) * L::kHidden,
               2 * L::kHidden);
        }
      }
    }
    if (r.num_shared_tiles > 0) {
      std::uint64_t* full = &r.barriers.shared_full;
      if (r.lane == 0) sm90::barrier_arrive_expect(full, 2 * kTileRows * L::kHidden);
      __syncwarp();
      if (r.lane < 2 * kTileRows) {
        sm90::bulk_load(r.smem + L::kColumnsOffset + r.lane * L::kSharedPitch,
                        shared_row(r.shared_tile(0), r.lane / kTileRows), L::kHidden, full,
                        sm90::CacheHint::evict_first);
      }
    }
  }
  // What does not depend on the routing, or on anything before this kernel.
  LOWLAT_DEVICE void run_early() {
    if constexpr (L::kMarlin) {
      if (r.lane < 4) sm90::tensor_prefetch(&maps.tiles + r.lane);
    } else if (r.lane == 0) {
      sm90::tensor_prefetch(&maps.gate);
      sm90::tensor_prefetch(&maps.up);
    }
    // The router's rows and x decide when routing ends: nothing competes with them.
    if (r.gates()) barrier_wait(&r.barriers.full[L::kScorePackets - 1], 0);
    if (r.has_band()) r.load_band(0);
    // Further shared tiles go through the ring, which is free when x has been scored.
    for (int n = 1; n < r.num_shared_tiles; ++n) {
#pragma unroll 1
      for (int up = 0; up < 2; ++up) {
        begin_slot(kTileRows * L::kHidden);
        if (r.lane < kTileRows) {
          load(r.lane * L::kSharedPitch, shared_row(r.shared_tile(n), up), L::kHidden);
        }
      }
    }
  }
  // This lane's row of a shared tile's gate or up.
  LOWLAT_DEVICE const std::uint8_t* shared_row(int tile, int up) const {
    const auto& w = r.a.w;
    return (up ? w.shared_w3 : w.shared_w1).codes +
           static_cast<std::size_t>(tile * kTileRows + r.lane % kTileRows) * L::kHidden;
  }
  // Draws a tile; at least num_tiles: none is left. Every block draws until it draws none, so the
  // counter is 0 again when the last has.
  LOWLAT_DEVICE void draw_tile(std::uint32_t& ticket, int num_tiles) const {
    if (r.lane != 0) return;
    const int drawn = num_tiles - (L::kGiven - 1) * r.num_blocks;
    ticket = atomicInc(reinterpret_cast<std::uint32_t*>(r.workspace + L::kTicketOffset),
                       static_cast<std::uint32_t>(drawn - 1));
  }
  // A tile of `expert`, for the n-th use of the ring by tiles.
  LOWLAT_DEVICE void load_tile(int n, int expert, int tile) {
    if constexpr (L::kMarlin) {
#pragma unroll 1
      for (int part = 0; part < L::kUses; ++part) {
        begin_slot(L::kTileBytes);
        if (r.lane == 0) {
          ask_for_use(r, maps, (uses - 1) % L::kRing, n * L::kUses + part, expert, tile, part);
        }
        __syncwarp();
      }
    } else {
      load_rows(n, expert, tile);
    }
  }
  // The same from the checkpoint's rows.
  LOWLAT_DEVICE void load_rows(int n, int expert, int tile) {
    const auto& w = r.a.w;
    begin_slot(L::kTileBytes);
    const std::size_t row = static_cast<std::size_t>(expert) * L::kInner + tile * kTileRows;
    std::uint64_t* full = &r.barriers.full[(uses - 1) % L::kRing];
    if (r.lane < 2) {
      unsigned char* dst = r.smem + L::kRingOffset + (uses - 1) % L::kRing * L::kSlotBytes;
      sm90::tensor_load(dst + r.lane * L::kHalfTile, r.lane ? &maps.up : &maps.gate, 0,
                        static_cast<int>(row), 0, full, sm90::CacheHint::evict_first);
    } else if (r.lane < 4) {
      const int up = r.lane - 2;
      sm90::bulk_load(r.smem + L::kScalesOffset + n % (L::kRing + 1) * L::kTileScales +
                          up * (L::kTileScales / 2),
                      (up ? w.w3 : w.w1).scales + row * L::kScaleRow, L::kTileScales / 2, full,
                      sm90::CacheHint::evict_first);
    }
    __syncwarp();
  }

  LOWLAT_DEVICE void run_routed() {
    // The first row's experts come first, so the first tiles are known before the other rows' are.
    barrier_wait(&r.barriers.first_routed, 0);
    const int asked = r.table.asked;
    uses += asked * L::kUses;
    const int id = r.table.ids[r.lane < L::kSlots ? r.lane : 0];
    const std::uint32_t same = __match_any_sync(plat::kAllLanes, id);
    const bool is_first = r.lane < L::kSlots && __ffs(static_cast<int>(same)) == r.lane + 1;
    const std::uint32_t firsts = __ballot_sync(plat::kAllLanes, is_first);
    const int own_rank = is_first ? __popc(firsts & ((1u << r.lane) - 1u)) : -1;
    int early = asked;
    for (; early < L::kGiven; ++early) {
      const int number = given_tile(r, early);
      const std::uint32_t lane = __ballot_sync(plat::kAllLanes, own_rank == number / L::kTiles);
      if (lane == 0) break;
      const int expert = __shfl_sync(plat::kAllLanes, id, __ffs(static_cast<int>(lane)) - 1);
      load_tile(early, expert, number % L::kTiles);
    }
    barrier_wait(&r.barriers.table, 0);
    if (r.table.lost != 0) return;
    const auto& w = r.a.w;
    const int num_experts = r.table.num_experts, num_tiles = num_experts * L::kTiles;
    std::uint32_t ticket = 0;
    for (int n = 0;; ++n) {
      int number = given_tile(r, n);
      if (n >= L::kGiven) {
        number =
            L::kGiven * r.num_blocks + static_cast<int>(__shfl_sync(plat::kAllLanes, ticket, 0));
      }
      // The next ticket is on its way while this tile is waited for.
      if (n >= L::kGiven - 1 && number < num_tiles) draw_tile(ticket, num_tiles);
      if (n < early) continue;
      if (n >= L::kGiven && r.lane == 0) describe_use(r, n, number);
      if (number >= num_tiles) {  // a use without bytes says that there are no more
        begin_slot(0);
        break;
      }
      load_tile(n, r.table.expert[number / L::kTiles], number % L::kTiles);
    }
    if (r.block_idx >= kBands) return;
    fill_pieces(num_experts);
  }

  // The bands of w2, an expert's a piece. A lane fills one piece of the ring, turn after turn, with
  // what it copies next ready: one warp that does it piece by piece takes longer than the copies.
  LOWLAT_DEVICE void fill_pieces(int num_experts) {
    static_assert(L::kRingPieces <= plat::kWarpLanes);
    constexpr std::uint32_t kCodes = L::kBandCodes, kScales = L::kBandScaleBytes;
    [[maybe_unused]] const std::size_t band = static_cast<std::size_t>(r.block_idx) * L::kBandRows;
    // The ring's last use has filled nothing: what was in its slot before is over. Of the other
    // slots the use before is waited for, and of what lies beyond the ring the last one. Packed
    // pieces, see piece_offset: the shared band's place, the empty slot, both slots, the other one.
    const int slot = r.lane / L::kPieces;
    int last = slot < L::kRing ? uses - 1 - L::kRing + slot : uses - 1;
    if (L::kPacked) last = r.lane < 2 ? -1 : r.lane < 4 ? uses - 2 : uses - 1;
    bool is_empty = slot == 0 || last < 0;
    std::uint64_t* empty = &r.barriers.empty[is_empty ? 0 : last % L::kRing];
    std::uint32_t parity = static_cast<std::uint32_t>(last / L::kRing) & 1u;
    if (L::kBandStreams && r.has_band() && r.lane == 0) {
      is_empty = false;
      empty = &r.barriers.band_empty[L::kBandTurns - 1];
      parity = 0;
    }
    std::uint64_t* const full = &r.barriers.piece_full[r.lane];
    unsigned char* const dst = r.smem + r.piece_offset(r.lane, uses);
    int expert = r.lane < L::kRingPieces ? r.lane : num_experts;
    const std::uint8_t *codes = nullptr, *scales = nullptr;
    int first_group = 0;  // Marlin: of the expert's K
    const auto find_source = [&] {
      if (expert >= num_experts) return;
      if constexpr (L::kMarlin) {
        first_group = r.table.expert[expert] * L::kInnerScaleRow;
        return;
      }
      const std::size_t row = r.table.expert[expert] * std::size_t{L::kHidden} + band;
      codes = r.a.w.w2.codes + row * L::kInnerRow;
      scales = r.a.w.w2.scales + row * L::kInnerScaleRow;
    };
    find_source();
    while (__any_sync(plat::kAllLanes, expert < num_experts)) {
      if (expert < num_experts && (is_empty || sm90::barrier_test_wait(empty, parity))) {
        // Before anything of the new turn: who sees it may wait for a phase by its parity.
        smem_store4(sm90::shared_address(&r.table.piece_expert[r.lane]),
                    static_cast<std::uint32_t>(expert));
        sm90::barrier_arrive_expect(full, L::kBandBytes);
        if constexpr (L::kMarlin) {
          sm90::tensor_load(dst, &maps.bands, r.block_idx * (L::kBandLine / 4), 2 * first_group, 0,
                            full, sm90::CacheHint::evict_first);
          // Copies begin at multiples of sixteen bytes.
          sm90::tensor_load(dst + kCodes, &maps.band_scales,
                            r.block_idx * L::kBandRows / 16 * (16 / 4), first_group, 0, full,
                            sm90::CacheHint::evict_first);
        } else {
          sm90::bulk_load(dst, codes, kCodes, full, sm90::CacheHint::evict_first);
          sm90::bulk_load(dst + kCodes, scales, kScales, full, sm90::CacheHint::evict_first);
        }
        empty = &r.barriers.piece_empty[r.lane];
        parity = static_cast<std::uint32_t>(turns++) & 1u;
        is_empty = false;
        expert += L::kRingPieces;
        find_source();
      }
      if (__any_sync(plat::kAllLanes, r.watch.stopped())) break;
    }
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
      landed(&r.barriers.piece_full[piece], __shfl_sync(plat::kAllLanes, turns, piece));
    }
    landed(&r.barriers.shared_full, r.num_shared_tiles > 0 ? 1 : 0);
    if constexpr (L::kBandStreams) {
#pragma unroll 1
      for (int turn = 0; turn < r.table.band_turns; ++turn) landed(&r.barriers.band_full[turn], 1);
    } else {
      landed(&r.barriers.band_full[0], r.has_band() ? 1 : 0);
    }
  }
};

// ------------------------------------------------------------------------------------ routers

template <class L>
struct Router {
  Region<L>& r;
  const Maps<L>& maps;
  int warp;  // among the routers

  // The n-th given tile, of `expert`: asked for by one lane as soon as the expert is known.
  LOWLAT_DEVICE void ask_for_given(int n, int expert) const {
    if constexpr (L::kMarlin) {
      static_assert(L::kGiven * L::kUses <= L::kRing);  // no wait for a tile
#pragma unroll 1
      for (int part = 0; part < L::kUses; ++part) {
        const int by_tiles = n * L::kUses + part, use = uses_before_tiles(r) + by_tiles;
        const int slot = use % L::kRing;
        if (use >= L::kRing) barrier_wait(&r.barriers.empty[slot], (use / L::kRing - 1) & 1);
        if (r.lane == 0) {
          sm90::barrier_arrive_expect(&r.barriers.full[slot], L::kTileBytes);
          ask_for_use(r, maps, slot, by_tiles, expert, given_tile(r, n) % L::kTiles, part);
        }
        __syncwarp();
      }
    } else {
      ask_for_rows(n, expert);
    }
  }
  LOWLAT_DEVICE void ask_for_rows(int n, int expert) const {
    const int use = uses_before_tiles(r) + n, slot = use % L::kRing;
    const int row = expert * L::kInner + given_tile(r, n) % L::kTiles * kTileRows;
    if (use >= L::kRing) barrier_wait(&r.barriers.empty[slot], (use / L::kRing - 1) & 1);
    if (r.lane == 0) {
      std::uint64_t* const full = &r.barriers.full[slot];
      unsigned char* const codes = r.smem + L::kRingOffset + slot * L::kSlotBytes;
      unsigned char* const scales = r.smem + L::kScalesOffset + n % (L::kRing + 1) * L::kTileScales;
      const std::size_t at = static_cast<std::size_t>(row) * L::kScaleRow;
      sm90::barrier_arrive_expect(full, L::kTileBytes);
      sm90::tensor_load(codes, &maps.gate, 0, row, 0, full, sm90::CacheHint::evict_first);
      sm90::tensor_load(codes + L::kHalfTile, &maps.up, 0, row, 0, full,
                        sm90::CacheHint::evict_first);
      sm90::bulk_load(scales, r.a.w.w1.scales + at, L::kTileScales / 2, full,
                      sm90::CacheHint::evict_first);
      sm90::bulk_load(scales + L::kTileScales / 2, r.a.w.w3.scales + at, L::kTileScales / 2, full,
                      sm90::CacheHint::evict_first);
    }
    __syncwarp();
  }

  // Pairs by expert, by one warp, which holds all of them: two masks of pairs for each.
  LOWLAT_DEVICE void make_table(int num_rows) const {
    auto& table = r.table;
    constexpr int kOwnPairs = 2, kLanes = plat::kWarpLanes;
    static_assert(L::kMaxPairs <= kOwnPairs * kLanes);
    const int num_pairs = num_rows * L::kSlots;
    int id[kOwnPairs];
    bool valid[kOwnPairs];
    std::uint32_t same[kOwnPairs][kOwnPairs] = {};  // pairs of an own pair's expert
#pragma unroll
    for (int k = 0; k < kOwnPairs; ++k) {
      valid[k] = k * kLanes + r.lane < num_pairs;
      id[k] = valid[k] ? table.ids[k * kLanes + r.lane] : -1;
    }
    same[0][0] = __match_any_sync(plat::kAllLanes, id[0]);
#pragma unroll 1
    for (int i = 0; i < num_pairs - kLanes; ++i) {
      const int other = __shfl_sync(plat::kAllLanes, id[1], i);
      const std::uint32_t first = __ballot_sync(plat::kAllLanes, id[0] == other);
      const std::uint32_t second = __ballot_sync(plat::kAllLanes, id[1] == other);
      if (id[0] == other) same[0][1] = second;
      if (r.lane == i) same[1][0] = first, same[1][1] = second;
    }
    // The first pair of each expert stands for it; experts' pairs follow each other.
    std::uint32_t leaders[kOwnPairs];
    int before[kOwnPairs], total = 0;
    const auto is_first = [&](int k) {
      const std::uint32_t mask = same[k][k];
      return valid[k] && (k == 0 || same[k][0] == 0) && __ffs(static_cast<int>(mask)) == r.lane + 1;
    };
#pragma unroll
    for (int k = 0; k < kOwnPairs; ++k) {
      leaders[k] = __ballot_sync(plat::kAllLanes, is_first(k));
      const int count = is_first(k) ? __popc(same[k][0]) + __popc(same[k][1]) : 0;
      int sum = count;
#pragma unroll
      for (int offset = 1; offset < kLanes; offset *= 2) {
        const int lower = __shfl_up_sync(plat::kAllLanes, sum, offset);
        if (r.lane >= offset) sum += lower;
      }
      before[k] = total + sum - count;
      total += __shfl_sync(plat::kAllLanes, sum, kLanes - 1);
    }
    const int num_experts = __popc(leaders[0]) + __popc(leaders[1]);
#pragma unroll
    for (int k = 0; k < kOwnPairs; ++k) {
      // Of the expert's first pair: where it is, and how many other firsts lie before.
      const bool in_first = k == 0 || same[k][0] != 0;
      const int leader = __ffs(static_cast<int>(in_first ? same[k][0] : same[k][1])) - 1;
      const int low = __shfl_sync(plat::kAllLanes, before[0], leader);
      const int high = __shfl_sync(plat::kAllLanes, before[1], leader);
      if (!valid[k]) continue;
      const std::uint32_t below = (1u << leader) - 1u;
      const int rank =
          in_first ? __popc(leaders[0] & below) : __popc(leaders[0]) + __popc(leaders[1] & below);
      const std::uint32_t earlier = (1u << r.lane) - 1u;
      const int first = in_first ? low : high;
      const int place = first + __popc(same[k][0] & (k == 0 ? earlier : ~0u)) +
                        (k == 0 ? 0 : __popc(same[k][1] & earlier));
      const int pair = k * kLanes + r.lane;
      table.sorted[place] = static_cast<std::uint16_t>(pair);
      table.place[pair] = static_cast<std::uint16_t>(place);
      atomicOr(&table.rows_of[rank], 1u << pair / L::kSlots);
      if (place == first) {
        table.expert[rank] = static_cast<std::uint16_t>(id[k]);
        table.first[rank] = static_cast<std::uint16_t>(first);
      }
    }
    if (r.lane == 0) {
      table.num_experts = num_experts;
      table.first[num_experts] = static_cast<std::uint16_t>(num_pairs);
    }
    __syncwarp();
    // The producer may have taken these before.
    if (r.lane < L::kGiven) describe_use(r, r.lane, given_tile(r, r.lane));
    __syncwarp();
  }

  LOWLAT_DEVICE void run(const Rules& rules) {
    if (warp == 0) {
      tell_x(r);
      r.tell_epoch();
      r.read_epoch();
#pragma unroll 1
      for (int pass = first_pass(r); pass < 2; ++pass) {
        if (pass == 1) {
          barrier_wait(&r.barriers.routed, 0);
          // All roles go on, or none.
          if (r.lane == 0) r.table.lost = r.watch.stopped() ? 1 : 0;
        }
        make_table(pass == 1 ? r.a.rows : 0);
        if (pass == 1 && r.lane == 0) sm90::barrier_arrive(&r.barriers.table);
      }
      // Needed at the end.
#pragma unroll 1
      for (int row = 0; row < r.a.rows; ++row) weigh_row<L>(r, row, rules.sum_rule);
    } else {
      // The first row, whose experts are the first to be asked for.
#pragma unroll 1
      for (int pass = first_pass(r); pass < 2; ++pass) {
        if (pass == 1) {
          wait_for_x(r);
          r.read_epoch();
          // Before the block has sent its own there is nothing to ask for.
          if (r.gates()) barrier_wait(&r.barriers.scored, 0);
        }
        // Experts of a row are different ones, so that of a slot has that number among all.
        int asked = 0;
        route_row<L>(r, 0, rules.rule, pass == 0, [&](int expert_slot, int expert) {
#pragma unroll 1
          while (asked < L::kGiven && given_tile(r, asked) / L::kTiles == expert_slot) {
            if (pass == 1) ask_for_given(asked, expert);
            ++asked;
          }
        });
        if (r.lane == 0) r.table.asked = pass == 1 ? asked : 0;
        __syncwarp();
        if (pass == 1 && r.lane == 0) {
          sm90::barrier_arrive(&r.barriers.first_routed);
          sm90::barrier_arrive(&r.barriers.routed);
        }
      }
    }
  }
};

// ------------------------------------------------------------------------------------ the shared

// Runs of a row as the codes of a block-fp8 linear, in fp16; their scale. kSpan groups of 32, a
// group's eight elements in each of four lanes.
template <int kSpan>
LOWLAT_DEVICE float quantize_span(std::uint32_t (&pairs)[kSpan][4]) {
  const std::uint32_t exponent =
      activation_exponent(lanes_max<4>(pairs_amax<4 * kSpan>(&pairs[0][0])));
  quantize_codes<4 * kSpan>(&pairs[0][0], exponent);
  return __uint_as_float(exponent << 23);
}
// acc += eight e4m3 codes of weight rows g (`low`) and g + 8 times those of activation row g.
LOWLAT_DEVICE void multiply_codes(float (&acc)[4], uint2 low, uint2 high,
                                  const std::uint32_t (&b)[4]) {
  std::uint32_t l[4], h[4];
  unpack_e4m3(low.x, low.y, l);
  unpack_e4m3(high.x, high.y, h);
  multiply_half_pairs(acc, l, h, b);
  multiply_half_pairs(acc, l + 2, h + 2, b + 2);
}
// acc += sums of codes under a lane's row's scale and two weight rows'.
LOWLAT_DEVICE void add_scaled(float (&acc)[4], const float (&sums)[4], float row_scale, float low,
                              float high) {
  const int t = static_cast<int>(threadIdx.x) % 4;
  const float scales[2] = {__shfl_sync(plat::kAllLanes, row_scale, 8 * t),
                           __shfl_sync(plat::kAllLanes, row_scale, 8 * t + 4)};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    acc[i] = __fmaf_rn(sums[i], scales[i % 2] * (i < 2 ? low : high), acc[i]);
  }
}

// ------------------------------------------------------------------------------------ rows of h

// What a warp needs for the second product.
template <class L>
struct SecondWarp {
  const Region<L>& r;
  int g, t;  // place in the fragments

  LOWLAT_DEVICE explicit SecondWarp(const Region<L>& region)
      : r(region), g(region.lane / 4), t(region.lane % 4) {}

  // A part of a row of h: eight elements a thread of each of kChunks groups, in the order of pairs.
  template <int kChunks>
  struct Hidden {
    uint4 chunk[kChunks];
  };
  using Part = Hidden<L::kPartGroups>;
  LOWLAT_DEVICE const unsigned char* hidden_address(int row, int part) const {
    return r.hidden(r.epoch & 1u, row) + part * L::kPartGroups * 64 + t * 16;
  }
  template <int kChunks>
  LOWLAT_DEVICE static void load_hidden(Hidden<kChunks>& h, const unsigned char* address) {
    constexpr int kStep = L::kPartGroups / kChunks * 64;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) h.chunk[i] = load_packet(address + i * kStep);
  }
  // Until every chunk has arrived; all lanes together.
  template <int kChunks>
  LOWLAT_DEVICE bool complete(Hidden<kChunks>& h, const unsigned char* address) const {
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
  LOWLAT_DEVICE void store_second(float* dst, const float (&acc)[4], int m, int count) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = 2 * t + (i & 1), n = 16 * m + (i >> 1) * 8;
      if (n < L::kBandRows && column < count) {
        dst[column * L::kBandRows + n + g] = acc[i];
      }
    }
  }

  LOWLAT_DEVICE static void unpack(const uint4& chunk, std::uint32_t (&out)[4]) {
    out[0] = chunk.x, out[1] = chunk.y, out[2] = chunk.z, out[3] = chunk.w;
  }

  // Sixteen columns of the band (eight where it ends) of the shared expert, a part of I.
  LOWLAT_DEVICE bool run_shared_item(int part, int m) const {
    if (!barrier_wait(&r.barriers.band_full[L::kBandStreams ? m : 0], 0, r.watch)) return false;
    const std::uint32_t codes = sm90::shared_address(r.smem) + L::kBandOffset +
                                ((L::kBandStreams ? 0 : 16 * m) + g) * L::kInner +
                                part * L::kPartGroups * 32 + t * 8;
    const bool whole = 16 * m + 8 < L::kBandRows;
    const int band = L::first_scaled(r.block_idx);
    const int row = L::kMarlin ? g : 0;  // checkpoint: eight rows have one scale
    const auto scale_row = [&](int n) {
      return L::column_of(r.block_idx, n) / L::kBlock - band / L::kBlock;
    };
    const int low_row = scale_row(16 * m + row);
    const int high_row = whole ? scale_row(16 * m + 8 + row) : low_row;
    const unsigned char* address =
        hidden_address(L::kMaxPairs + (g < r.a.rows ? g : r.a.rows - 1), part);
    Part h;
    load_hidden(h, address);
    if (!complete(h, address)) return false;
    float acc[4] = {};
    constexpr int kSpan = L::kBlock / 32;  // groups of one scale
    static_assert(L::kPartGroups % kSpan == 0);
#pragma unroll
    for (int first = 0; first < L::kPartGroups; first += kSpan) {
      std::uint32_t b[kSpan][4];
#pragma unroll
      for (int i = 0; i < kSpan; ++i) unpack(h.chunk[first + i], b[i]);
      const float scale = quantize_span(b);
      float sums_of[4] = {};
#pragma unroll
      for (int i = 0; i < kSpan; ++i) {
        const int group = first + i;
        const uint2 low = smem_load8(codes + group * 32);
        const uint2 high = whole ? smem_load8(codes + 8 * L::kInner + group * 32) : uint2{};
        multiply_codes(sums_of, low, high, b[i]);
      }
      const std::uint8_t* scales =
          r.table.band_scales + part * (L::kPartGroups / kSpan) + first / kSpan;
      add_scaled(acc, sums_of, scale, scale_of(scales[low_row * L::kBandScaleColumns]),
                 scale_of(scales[high_row * L::kBandScaleColumns]));
    }
    store_second(r.template second_sums<true>(part, 0), acc, m, r.a.rows);
    return true;
  }

  // The shared expert's part of the band, by `warps` warps of which this is number `warp`.
  LOWLAT_DEVICE bool run_shared(int warp, int warps) const {
    for (int item = warp; item < L::kParts * L::kMTiles; item += warps) {
      if constexpr (L::kBandStreams) {
        // Sixteen rows' items follow each other; of their first `warps` one is the first warp's.
        const int m = item / L::kParts, part = item % L::kParts;
        if (warp == 0 && m > 0 && part < warps) {
          if (!barrier_wait(&r.barriers.band_empty[m - 1], 0, r.watch)) return false;
          r.load_band(m);
        }
        if (!run_shared_item(part, m)) return false;
        __syncwarp();
        if (r.lane == 0) sm90::barrier_arrive(&r.barriers.band_empty[m]);
      } else {
        if (!run_shared_item(item / L::kMTiles, item % L::kMTiles)) return false;
      }
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
  // x of this warp's slice, in the order of pairs, until it lies in shared memory as columns.
  static constexpr int kPairs = 4;  // of a thread's eight elements of a group
  std::uint32_t x[L::kSliceBlocks][kPairs];
  float column_factor = 0.0f;  // of row g's columns

  // Made anew for each part of the work: kept over all of it, they would be kept in memory.
  LOWLAT_DEVICE void find_place() {
    std::uint32_t lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    g = static_cast<int>(lane / 4u);
    t = static_cast<int>(lane % 4u);
  }
  LOWLAT_DEVICE void wait_slot(int offset) const {
    const int use = uses + offset;
    barrier_wait(&r.barriers.full[use % L::kRing], use / L::kRing & 1);
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
          __ldcg(reinterpret_cast<const uint4*>(src + L::block_group(block) * L::kBlockK));
      pair_bf16(eight, x[block]);
    }
  }

  // Until the buffer of the `sum`-th sums is free.
  LOWLAT_DEVICE void wait_sums_free(int sum) const {
    if (sum < L::kBuffers) return;
    barrier_wait(&r.barriers.sums_empty[sum % L::kBuffers], (sum / L::kBuffers - 1) & 1);
  }
  // Gives the slice's sums to the finisher, [warp][row][column].
  LOWLAT_DEVICE void hand_over(const float (&acc)[4]) {
    const int buffer = sums % L::kBuffers;
    wait_sums_free(sums);
    store_sums(sm90::shared_address(r.partial(buffer)) + own_sums(), acc);
    __syncwarp();
    if (r.lane == 0) sm90::barrier_arrive(&r.barriers.sums_full[buffer]);
    ++sums;
  }
  LOWLAT_DEVICE std::uint32_t own_sums() const {
    return ((warp * 2 * kTileRows + g) * kColumns + 2 * t) * 4;
  }
  LOWLAT_DEVICE static void store_sums(std::uint32_t address, const float (&acc)[4]) {
    smem_store8(address, acc[0], acc[1]);
    smem_store8(address + kTileRows * kColumns * 4, acc[2], acc[3]);
  }
  LOWLAT_DEVICE void multiply_gate(float (&acc)[4]) const {
    constexpr int kRows = L::kScorePackets * L::kGateRows;
    const int row = g < kRows ? g : kRows - 1;  // other rows: computed, not used
    const std::uint32_t address = r.slot_address(row / L::kGateRows) +
                                  row % L::kGateRows * L::kGatePitch + first_element() * 2;
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
  // This block's experts' scores of all rows, to the finisher.
  LOWLAT_DEVICE void run_gate() {
    float acc[4] = {};
    for (int i = 0; i < L::kScorePackets; ++i) wait_slot(i);
    multiply_gate(acc);
    hand_over(acc);
    for (int i = 0; i < L::kScorePackets; ++i) free_slot();
  }
  // A row a warp, in every block the same; the first row is a router's.
  LOWLAT_DEVICE void route(const Rules& rules) const {
    if (warp == 0 || warp >= L::kMaxRows) return;
    if (warp < r.a.rows) route_row<L>(r, warp, rules.rule);
    __syncwarp();
    if (r.lane == 0) sm90::barrier_arrive(&r.barriers.routed);
  }

  // Scale bytes of a shared tile's slice, gate and up: a lane has those of a block of scales.
  struct TileScales {
    std::uint32_t gate, up;
  };
  LOWLAT_DEVICE void load_scales(TileScales& out, int tile) const {
    constexpr int kOwn = L::kSlice / L::kBlock;
    static_assert(kOwn <= plat::kWarpLanes);
    const int at = tile * kTileRows / L::kBlock * (L::kHidden / L::kBlock) +
                   (r.lane < kOwn ? r.lane : 0) * L::kConsumers + warp;
    out.gate = __ldg(r.a.w.shared_w1.scales + at);
    out.up = __ldg(r.a.w.shared_w3.scales + at);
  }

  // The n-th shared tile: the first in a place of its own, others gate in one slot, up in the next.
  // x as the block-fp8 linear sees it.
  LOWLAT_DEVICE void run_shared_tile(const TileScales& scales, int n) {
    const std::uint32_t offset = g * L::kSharedPitch + first_element();
    std::uint32_t low_address = sm90::shared_address(r.smem) + L::kColumnsOffset + offset;
    std::uint32_t high_address = low_address + L::kSharedHalf;
    if (n == 0) {
      barrier_wait(&r.barriers.shared_full, 0);
    } else {
      wait_slot(0);
      wait_slot(1);
      low_address = r.slot_address(uses) + offset;
      high_address = r.slot_address(uses + 1) + offset;
    }
    float acc[4] = {};
#pragma unroll
    for (int first = 0; first < L::kSliceBlocks; first += L::kSpan) {
      std::uint32_t b[L::kSpan][kPairs];
#pragma unroll
      for (int i = 0; i < L::kSpan * kPairs; ++i)
        b[i / kPairs][i % kPairs] = x[first + i / kPairs][i % kPairs];
      const float scale = quantize_span(b);
      float sums_of[4] = {};
#pragma unroll
      for (int i = 0; i < L::kSpan; ++i) {
        const int at = L::block_group(first + i) * L::kBlockK;
        multiply_codes(sums_of, smem_load8(low_address + at), smem_load8(high_address + at), b[i]);
      }
      const int own = first / L::kSpan;
      add_scaled(acc, sums_of, scale, scale_of(__shfl_sync(plat::kAllLanes, scales.gate, own)),
                 scale_of(__shfl_sync(plat::kAllLanes, scales.up, own)));
    }
    hand_over(acc);
    if (n == 0) return;
    free_slot();
    free_slot();
  }

  // ---- routed experts, first product

  // x of the slice as two e4m3 terms under a power of two a row.
  LOWLAT_DEVICE void make_columns() {
    float amax = 0.0f;
#pragma unroll
    for (const auto& block : x) amax = fmaxf(amax, pairs_amax<kPairs>(block));
    const std::uint32_t exponent = activation_exponent(lanes_max<4>(amax));
    const float inverse = __uint_as_float((254u - exponent) << 23);
    column_factor = __uint_as_float((exponent + wide::kFp4E4m3Shift) << 23);
    std::uint32_t at = columns_of(g) + warp % 4 * 32 + t * 4;
#pragma unroll
    for (const auto& block : x) {
      if constexpr (L::kMarlin) {
        store_for_tiles(at, block, inverse);
      } else {
        // The elements that meet the upper nibbles (1 3 5 7), and the lower ones.
#pragma unroll
        for (int even = 0; even < 2; ++even) {
          const std::uint32_t first = block[1 - even], second = block[3 - even];
          const float values[4] = {low_bf16(first) * inverse, low_bf16(second) * inverse,
                                   high_bf16(first) * inverse, high_bf16(second) * inverse};
          std::uint32_t high, low;
          wide::split_e4m3(values, high, low);
          smem_store4(at + even * 128, high);
          smem_store4(at + even * 128 + 16, low);
        }
      }
      at += L::kMaxRows * L::kColumnPitch;
    }
    if constexpr (L::kMarlin) {
      if (t == 0) smem_store4(factor_of(columns_of(g)), __float_as_uint(column_factor));
    }
  }
  // Marlin: lane t's codes are elements 2t and 2t + 1 of sixteen (in the lower nibbles), eight
  // further (in the upper ones), and those of the next sixteen. Here lane t has eight neighbours.
  LOWLAT_DEVICE void store_for_tiles(std::uint32_t at, const std::uint32_t (&block)[kPairs],
                                     float inverse) const {
    const std::uint32_t to = at - t * 4 + t / 2 * 2 + (t % 2 != 0 ? 0 : 128);
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // elements 4 i .. 4 i + 3
      const auto value = [&](int k) {
        return (i == 0 ? low_bf16(block[k]) : high_bf16(block[k])) * inverse;
      };
      const float values[4] = {value(0), value(1), value(2), value(3)};
      std::uint32_t high, low;
      wide::split_e4m3(values, high, low);
      smem_store2(to + 8 * i, high);
      smem_store2(to + 8 * i + 4, high >> 16);
      smem_store2(to + 8 * i + 16, low);
      smem_store2(to + 8 * i + 20, low >> 16);
    }
  }
  // Marlin: a slice's factor of a row lies behind the row's first columns.
  LOWLAT_DEVICE std::uint32_t factor_of(std::uint32_t columns) const {
    return columns + L::kColumnBytes + warp % 4 * 4;
  }
  // A row's columns of this warp's group, at its first group of 32.
  LOWLAT_DEVICE std::uint32_t columns_of(int row) const {
    return sm90::shared_address(r.smem) + L::kColumnsOffset +
           (warp / 4 * L::kSliceBlocks * L::kMaxRows + row) * L::kColumnPitch;
  }

  // A tile's codes of this warp's slice: gate and up of a group of 32, of the next.
  struct TileCodes {
    std::uint32_t words[L::kSliceBlocks / 2][4];
  };
  LOWLAT_DEVICE static void load_codes(TileCodes& out, std::uint32_t codes) {
    if constexpr (L::kMarlin) {
      // A word: rows g (even bytes) and g + 8 (odd bytes) at k = 2t (bytes 0 1) and 2t + 1, k + 8
      // in the upper nibbles; a group is two lines.
#pragma unroll
      for (int i = 0; i < L::kSliceBlocks; ++i) {
        const std::uint32_t at = codes + L::use_group(i) * (2 * L::kLineBytes);
        const std::uint32_t first = wide::smem_load4(at),
                            second = wide::smem_load4(at + L::kLineBytes);
        out.words[i / 2][i % 2 * 2] = __byte_perm(first, second, 0x6420);
        out.words[i / 2][i % 2 * 2 + 1] = __byte_perm(first, second, 0x7531);
      }
      return;
    }
    constexpr int kStride = L::kConsumers * L::kSpan / L::kChunkUnits * L::kChunkBytes;
    [[maybe_unused]] const std::uint32_t other_half = codes ^ 32u;
#pragma unroll
    for (int i = 0; i < L::kSliceBlocks / 2; ++i) {
      if constexpr (L::kSpan == 1) {
        sm90::load_matrices(out.words[i], codes + i * 2 * kStride);
      } else {  // the scale block's other half lies two units further, exchanged
        sm90::load_matrices(out.words[i], (i % 2 ? other_half : codes) + i / 2 * kStride);
      }
    }
  }
  // sums = the tile's slice times one row: of rows g of gate and of up, in the lanes of this warp's
  // two columns. Two groups are in the tensor cores while the next two are expanded.
  // Marlin: of rows g and g + 8 of gate or of up, of each of the warp's two slices of x.
  static constexpr int kSums = L::kMarlin ? 4 : 2;
  LOWLAT_DEVICE void multiply_row(float (&sums_of)[kSums], const TileCodes& codes,
                                  std::uint32_t scales, std::uint32_t columns) const {
    __syncwarp();  // the waits before may have parted the lanes
    constexpr int kBatch = 2, kBatches = L::kSliceBlocks / kBatch;
    constexpr int kStep = L::kMaxRows * L::kColumnPitch / 16;
    const std::uint64_t kMatrix = wide::product_columns(0) >> 32;  // of any columns
    float d[2][kBatch][4], factors[2][kBatch][2];
    std::uint32_t a[2][kBatch][4] = {};
    [[maybe_unused]] std::uint32_t four[2] = {};
    const auto add = [&](int batch) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float (&sums_here)[4] = d[batch & 1][i];
        const float (&factor)[2] = factors[batch & 1][i];
        float* const to = sums_of + 2 * L::slice_of(batch * kBatch + i);
        to[0] = __fmaf_rn(sums_here[0] + sums_here[1], factor[0], to[0]);
        to[1] = __fmaf_rn(sums_here[2] + sums_here[3], factor[1], to[1]);
      }
    };
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
#pragma unroll
      for (int i = 0; i < 2 * kBatch; ++i) {
        std::uint32_t (&to)[4] = a[batch & 1][i / 2];
        wide::expand_fp4_e4m3(codes.words[batch][i], to[i % 2], to[i % 2 + 2]);
      }
      wide::products_fence();
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const std::uint32_t at = columns + L::columns_place(batch * kBatch + i) * kStep;
        wide::product_e4m3(d[batch & 1][i], a[batch & 1][i], kMatrix << 32 | at);
      }
      wide::products_commit();
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {  // while they run
        const int group = batch * kBatch + i;
#pragma unroll
        for (int up = 0; up < 2; ++up) {
          if constexpr (L::kMarlin) {
            factors[batch & 1][i][up] =
                scale_of(smem_load1(scales + L::use_group(group) * L::kLineScales + 2 * up));
            continue;
          }
          const std::uint32_t scale =
              scales + L::block_group(group) + up * (kTileRows * L::kScaleRow);
          if constexpr (L::kSpan == 1) {
            factors[batch & 1][i][up] = scale_of(smem_load1(scale));
          } else {  // four groups' bytes lie together
            if (group % 4 == 0) four[up] = wide::smem_load4(scale);
            factors[batch & 1][i][up] = scale_of(four[up] >> group % 4 * 8 & 0xffu);
          }
        }
      }
      if (batch > 0) {
        wide::products_wait<1>();
        add(batch - 1);
      }
    }
    wide::products_wait<0>();
    add(kBatches - 1);
  }
  // A lane's places in a slot. A load is four matrices of eight rows: gate and up of a block, then
  // of the next.
  LOWLAT_DEVICE std::uint32_t codes_in_slot() const {
    if constexpr (L::kMarlin) {  // a line is two eights of words
      return has_up() * L::kHalfTile + first_group() * (2 * L::kLineBytes) + g / 4 * 64 + t * 16 +
             g % 4 * 4;
    }
    const int row = r.lane % kTileRows, up = r.lane / kTileRows % 2,
              next = r.lane / (2 * kTileRows);
    const int group = warp * L::kSpan + L::block_group(1) * next;
    return up * L::kHalfTile + group / L::kChunkUnits * L::kChunkBytes + row * 128 +
           ((group % L::kChunkUnits) ^ row) * 16;
  }
  // And among a tile's scales.
  LOWLAT_DEVICE std::uint32_t own_scales() const {
    if constexpr (L::kMarlin) {
      return has_up() * (L::kTileScales / 2) + first_group() * L::kLineScales + g / 4 * 8 +
             g / 2 % 2 * 4 + g % 2;
    }
    return g * L::kScaleRow + warp * L::kSpan;
  }
  // Marlin: warp groups 0 and 1 have gate, 2 and 3 up; of each two the first has the first half of
  // the slices. A use's first group of such a warp, and the warp that a slice's sums are handed
  // over as: gate's, then up's.
  LOWLAT_DEVICE int has_up() const { return warp / 8; }
  LOWLAT_DEVICE int first_group() const { return (warp / 4 % 2 * 8 + warp % 4) * L::kSpan; }
  LOWLAT_DEVICE int sums_place() const {
    return L::kMarlin ? (warp / 4 % 2 * 4 + warp % 4) * 2 + has_up() : warp;
  }

  // Counters and addresses are kept, not made anew: what a tile takes besides its products is a
  // quarter of its instructions otherwise.
  LOWLAT_DEVICE void run_tiles() {
    std::uint32_t base;
    asm volatile("mov.u32 %0, %1;" : "=r"(base) : "r"(sm90::shared_address(r.smem)));
    const std::uint32_t codes = base + L::kRingOffset + codes_in_slot();
    const std::uint32_t scales = base + L::kScalesOffset + own_scales();
    const std::uint32_t sums_at =
        base + L::kSumsOffset + (sums_place() * 2 * kTileRows + g) * kColumns * 4;
    const std::uint32_t barriers = base + L::kBarrierOffset;
    const std::uint32_t rows_here = base + L::kTableOffset + L::kRowsHereOffset;
    const std::uint32_t columns_at =
        L::kMarlin ? base + L::kColumnsOffset +
                         warp / 4 % 2 * 2 * (L::kSliceBlocks * L::kMaxRows * L::kColumnPitch)
                   : columns_of(0);
    const auto columns = static_cast<std::uint32_t>(wide::product_columns(columns_at));
    std::uint32_t slot = static_cast<std::uint32_t>(uses) % L::kRing, scales_slot = 0;
    std::uint32_t phase = static_cast<std::uint32_t>(uses) / L::kRing & 1u;
    auto sum = static_cast<std::uint32_t>(sums);
    for (std::uint32_t n = 0;; ++n) {
      barrier_wait_at(barriers + L::kFullBarriers + slot * 8, phase);
      std::uint32_t rows = smem_load1(rows_here + n % L::kWindow);
      const bool done = rows == 0;
      TileCodes tile;
      load_codes(tile, codes + slot * L::kSlotBytes);
      __syncwarp();
      if (r.lane == 0) barrier_arrive_at(barriers + L::kEmptyBarriers + slot * 8);
      const std::uint32_t buffer = sum % L::kBuffers;
      if (sum >= L::kBuffers) {
        barrier_wait_at(barriers + L::kSumsEmptyBarriers + buffer * 8,
                        (sum / L::kBuffers - 1) & 1u);
      }
      // After the last tile the finisher finds sums of no tile.
      if constexpr (L::kMarlin) {
        const std::uint32_t here = sums_at + buffer * L::kPartialBytes;
        multiply_use<0>(rows, tile, scales + scales_slot * L::kTileScales, columns, columns_at,
                        here);
        if (!done) {
          if (++slot == L::kRing) slot = 0, phase ^= 1u;
          if (++scales_slot == L::kRing + 1) scales_slot = 0;
          barrier_wait_at(barriers + L::kFullBarriers + slot * 8, phase);
          load_codes(tile, codes + slot * L::kSlotBytes);
          __syncwarp();
          if (r.lane == 0) barrier_arrive_at(barriers + L::kEmptyBarriers + slot * 8);
          multiply_use<1>(rows, tile, scales + scales_slot * L::kTileScales, columns, columns_at,
                          here);
        }
      } else {
#pragma unroll 1
        while (rows != 0) {
          const int row = __ffs(static_cast<int>(rows)) - 1;
          rows &= rows - 1;
          float acc[kSums] = {};
          // The reduction tells the compiler that all lanes have the same.
          multiply_row(acc, tile, scales + scales_slot * L::kTileScales,
                       __reduce_or_sync(plat::kAllLanes, columns + row * (L::kColumnPitch / 16)));
          const float factor = __shfl_sync(plat::kAllLanes, column_factor, 4 * row);
          if (t == warp % 4) {
            const std::uint32_t at = sums_at + buffer * L::kPartialBytes + row * 4;
            smem_store4(at, __float_as_uint(acc[0] * factor));
            smem_store4(at + kTileRows * kColumns * 4, __float_as_uint(acc[1] * factor));
          }
        }
      }
      __syncwarp();
      if (r.lane == 0) barrier_arrive_at(barriers + L::kSumsFullBarriers + buffer * 8);
      ++sum;
      if (++slot == L::kRing) slot = 0, phase ^= 1u;
      if (++scales_slot == L::kRing + 1) scales_slot = 0;
      if (done) {
        uses += static_cast<int>(n) * L::kUses + 1;
        sums = static_cast<int>(sum);
        return;
      }
    }
  }
  // Marlin: a use's products with each of `rows`, the first half of K's to the sums' place, the
  // other's added there by the same lanes.
  template <int kPart>
  LOWLAT_DEVICE void multiply_use(std::uint32_t rows, const TileCodes& tile, std::uint32_t scales,
                                  std::uint32_t columns, std::uint32_t columns_at,
                                  std::uint32_t sums_at) const {
    constexpr int kBlocks = L::kMaxRows * L::kColumnPitch;  // from a slice's block to the next
    constexpr int kHigh = kTileRows * kColumns * 4;
#pragma unroll 1
    while (rows != 0) {
      const int row = __ffs(static_cast<int>(rows)) - 1;
      rows &= rows - 1;
      const std::uint32_t factors = factor_of(columns_at + row * L::kColumnPitch);
      const std::uint32_t at = sums_at + row * 4;
      float acc[kSums] = {};
      multiply_row(acc, tile, scales,
                   __reduce_or_sync(plat::kAllLanes, columns + row * (L::kColumnPitch / 16) +
                                                         kPart * L::kUseBlocks * (kBlocks / 16)));
      if (t == warp % 4) {
        const float first = __uint_as_float(wide::smem_load4(factors)),
                    second = __uint_as_float(wide::smem_load4(factors + L::kSliceBlocks * kBlocks));
        float low = acc[0] * first, high = acc[1] * first;
        if constexpr (kPart > 0) {
          low += __uint_as_float(wide::smem_load4(at));
          high += __uint_as_float(wide::smem_load4(at + kHigh));
        }
        smem_store4(at, __float_as_uint(__fmaf_rn(acc[2], second, low)));
        smem_store4(at + kHigh, __float_as_uint(__fmaf_rn(acc[3], second, high)));
      }
    }
  }

  // ---- second product

  // What a lane has of a pair's h: column g of a pass is the pass's g-th group, so that each group
  // of 32 is summed by itself without an accumulator of its own.
  using Columns = typename SecondWarp<L>::template Hidden<L::kPasses>;
  LOWLAT_DEVICE const unsigned char* columns_address(const SecondWarp<L>& second, int place,
                                                     int part) const {
    return second.hidden_address(r.table.sorted[place], part) +
           (g < L::kPassGroups ? g : L::kPassGroups - 1) * 64;
  }

  // sums += the band times one pair's part of h, for column 16 m + g (and 8 further) of the band in
  // sums[m][0 .. 1], spread over the lanes t. `codes` and `scales`: of the part in the band's first
  // row.
  LOWLAT_DEVICE void multiply_second(float (&sums_of)[L::kMTiles][2], const Columns& h,
                                     std::uint32_t codes, std::uint32_t scales) const {
#pragma unroll
    for (int pass = 0; pass < L::kPasses; ++pass) {
      std::uint32_t b[L::kPassGroups][4];
#pragma unroll
      for (int group = 0; group < L::kPassGroups; ++group) {
        SecondWarp<L>::unpack(h.chunk[pass], b[group]);
#pragma unroll
        for (std::uint32_t& pair : b[group]) pair = g == group ? pair : 0u;
      }
#pragma unroll
      for (int m = 0; m < L::kMTiles; ++m) {
        const std::uint32_t code = codes + pass * L::kPassGroups * 16;
        // Of columns 2t and 2t + 1. Columns that are none hold zeros: any scale does.
        const int first = 2 * t + 1 < L::kPassGroups ? 2 * t : 0;
        const std::uint32_t scale =
            scales + (16 * m + g) * L::kInnerScaleRow + pass * L::kPassGroups + first;
        if (16 * m + 8 < L::kBandRows) {
          multiply_columns<true>(sums_of[m], b, code, scale, m);
        } else {
          multiply_columns<false>(sums_of[m], b, code, scale, m);
        }
      }
    }
  }
  template <bool kWhole>
  LOWLAT_DEVICE void multiply_columns(float (&sums_of)[2],
                                      const std::uint32_t (&b)[L::kPassGroups][4],
                                      std::uint32_t codes, std::uint32_t scale, int m) const {
    // A load fetches two groups of sixteen rows, or four of eight. What lies beyond the last group
    // is read and not used.
    constexpr int kRows = kWhole ? 16 : 8, kGroups = kWhole ? 2 : 4;
    const std::uint32_t code =
        codes + (16 * m + r.lane % kRows) * L::kInnerRow + r.lane / kRows * 16;
    std::uint32_t words[(L::kPassGroups + kGroups - 1) / kGroups][4];
#pragma unroll
    for (int i = 0; i * kGroups < L::kPassGroups; ++i) {
      sm90::load_matrices(words[i], code + i * kGroups * 16);
    }
    float acc[2][4] = {};
#pragma unroll
    for (int group = 0; group < L::kPassGroups; ++group) {
      std::uint32_t low[4], high[4] = {};
      const std::uint32_t (&four)[4] = words[group / kGroups];
      place_fp4(four[kWhole ? group % 2 * 2 : group % 4], low);
      if constexpr (kWhole) place_fp4(four[group % 2 * 2 + 1], high);
      multiply_half_pairs(acc[0], low, high, b[group]);
      multiply_half_pairs(acc[1], low + 2, high + 2, b[group] + 2);
    }
#pragma unroll
    for (int i = 0; i < (kWhole ? 2 : 1); ++i) {
      const std::uint32_t at = scale + i * 8 * L::kInnerScaleRow;
      sums_of[i] = __fmaf_rn(acc[0][2 * i] + acc[1][2 * i], scale_of(smem_load1(at)), sums_of[i]);
      sums_of[i] = __fmaf_rn(acc[0][2 * i + 1] + acc[1][2 * i + 1], scale_of(smem_load1(at + 1)),
                             sums_of[i]);
    }
  }

  LOWLAT_DEVICE bool run_second() {
    constexpr float kFactor = 1 << (kPlaceShift - kHiddenShift);
    if (r.block_idx >= kBands) return true;
    const SecondWarp<L> second(r);
    int expert = warp / L::kParts, part = warp % L::kParts;
    const int num_experts = r.table.num_experts;
    if (expert >= num_experts) return true;
    int place = r.table.first[expert], end = r.table.first[expert + 1];
    const unsigned char* address = columns_address(second, place, part);
    Columns h;
    second.load_hidden(h, address);
    std::uint32_t base;
    asm volatile("mov.u32 %0, %1;" : "=r"(base) : "r"(sm90::shared_address(r.smem)));
    const std::uint32_t stop = base + L::kTableOffset + L::kStopOffset;
    const std::uint32_t barriers = base + L::kBarrierOffset;
    const std::uint32_t scales_begin = L::kBandCodes + L::band_scales_begin(r.block_idx);
    int sums_left = L::kBuffers;
    int piece = expert;  // the first are in the ring's first turn
    std::uint32_t turn = 0;
    for (;;) {
      const std::uint32_t at = base + r.piece_offset(piece, uses);
      const std::uint32_t codes = at + part * L::kPartGroups * (L::kMarlin ? 2 * L::kBandLine : 16);
      const std::uint32_t scales =
          at + scales_begin + part * L::kPartGroups * (L::kMarlin ? L::kBandScaleLine : 1);
      const std::uint32_t empty = barriers + L::kPieceEmptyBarriers + piece * 8;
      // A parity tells a phase from the next only: the piece's use before must be over.
      const std::uint32_t filled = base + L::kTableOffset + L::kPieceExpertOffset + piece * 4;
      while (wide::smem_load4(filled) != static_cast<std::uint32_t>(expert)) {
        if (r.watch.stopped()) return false;
      }
      if (!barrier_wait_at(barriers + L::kPieceFullBarriers + piece * 8, turn & 1u, stop)) {
        return false;
      }
      // The warp's next item.
      int next_expert = expert + L::kConsumers / L::kParts;
      int next_part = part + L::kConsumers % L::kParts;
      if (next_part >= L::kParts) next_part -= L::kParts, ++next_expert;
      const bool more = next_expert < num_experts;
#pragma unroll 1
      for (;; ++place) {
        const bool last = place + 1 == end;
        const int next = !last ? place + 1 : more ? r.table.first[next_expert] : place;
        const unsigned char* const next_address =
            columns_address(second, next, last && more ? next_part : part);
        if (!second.complete(h, address)) return false;
        Columns ahead;
        second.load_hidden(ahead, next_address);
        __syncwarp();  // or the loads would sink to where they are needed
        // `second` may lie over the partial sums: before the first store, as if for every buffer.
        const auto claim_sums = [&] {
          for (; sums_left > 0; --sums_left) wait_sums_free(sums++);
        };
        if constexpr (L::kMarlin) {
          BandTiles<L> band(r.lane);
          band.multiply(h.chunk, codes, scales);
          claim_sums();
          band.store(r.template second_sums<false>(part, place), kFactor);
        } else {
          float sums_of[L::kMTiles][2] = {};
          multiply_second(sums_of, h, codes, scales);
          claim_sums();
          float* dst = r.template second_sums<false>(part, place) + g;
#pragma unroll
          for (int i = 0; i < L::kBandRows / 8; ++i) {
            float sum = sums_of[i / 2][i % 2];
            sum += __shfl_xor_sync(plat::kAllLanes, sum, 1);
            sum += __shfl_xor_sync(plat::kAllLanes, sum, 2);
            if (t == 0) dst[8 * i] = sum * kFactor;
          }
        }
        h = ahead;
        address = next_address;
        if (last) {
          place = next;
          break;
        }
      }
      __syncwarp();
      if (r.lane == 0) barrier_arrive_at(empty);
      if (!more) return true;
      piece += next_expert - expert;
      if (piece >= L::kRingPieces) piece -= L::kRingPieces, ++turn;
      expert = next_expert, part = next_part;
      end = r.table.first[expert + 1];
    }
  }

  // Before the kernels before this one have ended.
  LOWLAT_DEVICE void run_early(TileScales& scales) {
    if (r.num_shared_tiles > 0) load_scales(scales, r.shared_tile(0));
  }
  LOWLAT_DEVICE void run(TileScales& scales, const Rules& rules, Stamps& stamps) {
    find_place();
    stamps.mark(StampStage::ask);
    wait_for_x(r);
    stamps.mark(StampStage::wait);
    load_rows(r.a.x, g < r.a.rows ? g : r.a.rows - 1);
    if (r.gates()) run_gate();
    for (int n = 0; n < r.num_shared_tiles; ++n) {
      if (n > 0) load_scales(scales, r.shared_tile(n));
      run_shared_tile(scales, n);
    }
    // All have read the shared tile, where the columns come.
    if (r.num_shared_tiles > 0) named_sync<3, L::kConsumers * plat::kWarpLanes>();
    r.read_epoch();
    route(rules);
    find_place();
    make_columns();
    // Products read the columns past the ordinary path.
    sm90::fence_async_shared();
    named_sync<3, L::kConsumers * plat::kWarpLanes>();
    barrier_wait(&r.barriers.table, 0);
    if (r.table.lost != 0) return;
    stamps.mark(StampStage::read);
    find_place();
    run_tiles();
    stamps.mark(StampStage::compute);
    find_place();
    run_second();
  }
};

// ------------------------------------------------------------------------------------ finisher

template <class L>
struct Finisher {
  Region<L>& r;
  int sums = 0;

  // Rows of scales that the shared w2's band touches, from that of its first row: asked for before
  // x is waited for, stored behind that.
  static constexpr int kBandScales = L::kBandScaleRows * L::kBandScaleColumns;
  static constexpr int kOwnScales = (kBandScales + plat::kWarpLanes - 1) / plat::kWarpLanes;
  std::uint8_t band_scales[kOwnScales] = {};

  LOWLAT_DEVICE void run_early() {
    if (!r.has_band()) return;
    const int first = L::first_scaled(r.block_idx) / L::kBlock * L::kBandScaleColumns + r.lane;
    constexpr int kAll = L::kHidden / L::kBlock * L::kBandScaleColumns;
#pragma unroll
    for (int i = 0; i < kOwnScales; ++i) {
      const int at = first + i * plat::kWarpLanes;
      band_scales[i] = __ldg(r.a.w.shared_w2.scales + (at < kAll ? at : kAll - 1));
    }
  }
  LOWLAT_DEVICE void store_band_scales() const {
    if (!r.has_band()) return;
#pragma unroll
    for (int i = 0; i < kOwnScales; ++i) {
      const int at = i * plat::kWarpLanes + r.lane;
      if (at < kBandScales) r.table.band_scales[at] = band_scales[i];
    }
    __syncwarp();
    if (r.lane == 0) sm90::barrier_arrive(&r.barriers.band_full[0]);
  }

  LOWLAT_DEVICE void wait_sums() const {
    barrier_wait(&r.barriers.sums_full[sums % L::kBuffers], sums / L::kBuffers & 1);
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

  LOWLAT_DEVICE void run_gate(stages::GateRule rule, int pass) {
    if (pass == 1) wait_sums();
    const int column = r.lane / L::kGateRows;
#pragma unroll 1
    for (int i = 0; i < L::kScorePackets; ++i) {
      float score = 0.0f;
      if (column < kColumns) {
        const int row = i * L::kGateRows + r.lane % L::kGateRows;
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
      if (pass == 1 && r.lane < r.a.rows) {
        plat::store_tagged(r.score_packet(r.lane, r.block_idx * L::kScorePackets + i), words,
                           r.epoch);
      }
    }
    if (pass == 0) return;
    free_sums();
    if (r.lane == 0) sm90::barrier_arrive(&r.barriers.scored);
  }

  // Eight values of h of one column: bf16 in the order of pairs, one chunk.
  template <bool kShared>
  LOWLAT_DEVICE void finish(int column, unsigned char* row, int tile) const {
    const int weight_row = r.lane % (2 * kTileRows), half = r.lane / (2 * kTileRows);
    float sum = slices<L::kConsumers / 2>(weight_row, column, half * (L::kConsumers / 2));
    sum += __shfl_xor_sync(plat::kAllLanes, sum, 2 * kTileRows);
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

  // Marlin: sixteen values of h of one column. Lane 8 j + 4 i + w of sixteen has row 16 w + 8 j +
  // (2 m + i) of 64, m the tile's number among four: words 2 (w % 2) + j of the chunks that lane m
  // of the second product has of the groups w / 2.
  LOWLAT_DEVICE void finish_tile(int column, unsigned char* row, int tile) const {
    constexpr int kSlices = L::kConsumers / 2;
    const float* src = r.partial(sums % L::kBuffers) + r.lane * kColumns + column;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kSlices; ++i) sum += src[i * 2 * kColumns * 2 * kTileRows];
    const float value = round_to_bf16(sum);
    const float up = __shfl_down_sync(plat::kAllLanes, value, 2 * kTileRows);
    const float h = stages::swiglu(value, up, kSwigluLimit, true);
    const float kept = round_to_bf16(h) * static_cast<float>(1 << kHiddenShift);
    const std::uint32_t pair = pack_half(kept, __shfl_down_sync(plat::kAllLanes, kept, 4));
    const int first = r.lane % 2 * 2;
    uint4 chunk;
    chunk.x = __shfl_sync(plat::kAllLanes, pair, first);
    chunk.y = __shfl_sync(plat::kAllLanes, pair, first + 8);
    chunk.z = __shfl_sync(plat::kAllLanes, pair, first + 1);
    chunk.w = __shfl_sync(plat::kAllLanes, pair, first + 9);
    if (r.lane < 2) store_packet(row + (tile / 4 * 8 + r.lane * 4 + tile % 4) * 16, chunk);
  }

  LOWLAT_DEVICE void run(stages::GateRule rule) {
#pragma unroll 1
    for (int pass = first_pass(r); pass < 2; ++pass) {
      if (pass == 1) {
        wait_for_x(r);
        r.read_epoch();
        clear_hidden();
        store_band_scales();
      }
      if (r.gates()) run_gate(rule, pass);
    }
    const std::uint32_t parity = r.epoch & 1u;
    for (int n = 0; n < r.num_shared_tiles; ++n) {
      wait_sums();
      for (int column = 0; column < r.a.rows; ++column) {
        finish<true>(column, r.hidden(parity, L::kMaxPairs + column), r.shared_tile(n));
      }
      free_sums();
    }
    barrier_wait(&r.barriers.table, 0);
    if (r.table.lost != 0) return;
    for (int n = 0;; ++n) {
      wait_sums();
      const int tile = r.table.tile[n % L::kWindow], expert = tile / L::kTiles;
      if (expert >= r.table.num_experts) break;
      for (int i = r.table.first[expert]; i < r.table.first[expert + 1]; ++i) {
        const int pair = r.table.sorted[i];
        if constexpr (L::kMarlin) {
          finish_tile(pair / L::kSlots, r.hidden(parity, pair), tile % L::kTiles);
        } else {
          finish<false>(pair / L::kSlots, r.hidden(parity, pair), tile % L::kTiles);
        }
      }
      free_sums();
    }
    free_sums();
    if (r.a.quads.tp_size > 0 && r.lane == 0) {
      r.table.quads_epoch = exchange_epoch(r.a.quads, r.a.quads_index);
    }
    // What follows finds room as soon as blocks end; it waits for their sums.
    sm90::launch_dependents();
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
  const bool has_shared = r.table.has_shared != 0;
  const auto of_pair = [&](int pair, int n) {
    return r.table.weights[pair] * parts(std::false_type(), r.table.place[pair], n);
  };
  store_band<L>(
      r, first_row,
      [&](int row, int n) {
        float sum = 0.0f;
#pragma unroll
        for (int slot = 0; slot < L::kSlots; ++slot) {
          sum += round_to_bf16(of_pair(row * L::kSlots + slot, n));
        }
        const float y = round_to_bf16(sum);
        return has_shared ? y + round_to_bf16(parts(std::true_type(), row, n)) : y;
      },
      r.table.quads_epoch);
}

// ------------------------------------------------------------------------------------ layer's end

// The block's last warps, as many threads as a slice of a row has (exchange_norm.cuh). Most of them
// have nothing to publish.
template <class L>
struct LastWarps {
  static constexpr int kNum = L::kHidden / kSlicesPerRow / 4, kFirst = L::kThreads - kNum;
  static_assert(kSlicesPerRow * L::kMaxRows <= kBands);

  LOWLAT_DEVICE static int thread() { return plat::thread_idx() - kFirst; }
  LOWLAT_DEVICE static void sync() { named_sync<4, kNum>(); }
  LOWLAT_DEVICE static bool any(bool value) {
    std::uint32_t out;
    asm volatile(
        "{\n"
        ".reg .pred own, all;\n"
        "setp.ne.u32 own, %1, 0;\n"
        "bar.red.or.pred all, %2, %3, own;\n"
        "selp.u32 %0, 1, 0, all;\n"
        "}"
        : "=r"(out)
        : "r"(static_cast<std::uint32_t>(value)), "n"(4), "n"(kNum)
        : "memory");
    return out != 0;
  }
};

// Whether this block has a slice of a row at the layer's end.
template <class L>
LOWLAT_DEVICE bool has_slice(const Region<L>& r) {
  return L::kEndsLayer && r.block_idx < kSlicesPerRow * r.a.exchange.num_rows;
}

// By one warp, late in the launch: the row's parameters, if they are there. They mostly are, and
// the layer's end does not have to ask for them then.
template <class L>
LOWLAT_DEVICE void take_statistics(const Region<L>& r) {
  const ExchangeNormParams& params = r.a.exchange;
  static_assert(kMixStride == plat::kWarpLanes);
  if (params.mix_done.word == nullptr || !is_open(params.mix_done.word, params.mix_done.blocks)) {
    return;
  }
  pass_gate();
  r.table.mix[r.lane] = __ldcg(params.mix + r.block_idx / kSlicesPerRow * kMixStride + r.lane);
  if (r.lane == 0) r.table.has_mix = 1;
}

// By LastWarps, after the block's sync: what hc_exchange_norm_sm90 does, whose blocks would begin
// when these end. The squares of a row's slices go by packets.
template <class L>
LOWLAT_DEVICE void end_layer(const Region<L>& r) {
  using Team = LastWarps<L>;
  const ExchangeNormParams& params = r.a.exchange;
  Stamps stamps(params.port.stamps, params.kernel, Team::kFirst);
  const int row_idx = r.block_idx / kSlicesPerRow, slice_idx = r.block_idx % kSlicesPerRow;
  ExchangeSlice<L::kHidden, L::kRanks, Team> slice = {params, Team(), r.table.mix, row_idx,
                                                      slice_idx};
  slice.load_gain();
  slice.load_residual();
  // After a fault the finisher may not have asked for it.
  std::uint64_t epoch = r.table.quads_epoch;
  if (r.table.stop != 0) epoch = exchange_epoch(params.port, params.exchange_index);
  __syncwarp();  // or the loads would sink to where they are needed
  if (r.table.has_mix == 0) {
    slice.wait_for_statistics();
    slice.load_statistics();
  }
  stamps.mark(StampStage::ask);
  float y[4] = {};
  slice.receive(y, epoch, !L::kTrueQuads);
  stamps.mark(StampStage::wait);
  const float squares = slice.combine(y);
  stamps.mark(StampStage::compute);
  const float sum = slice.sum_of_warps(squares, r.table.squares);
  const auto tag = static_cast<std::uint32_t>(epoch);
  auto* const packets = reinterpret_cast<plat::TaggedWords*>(r.workspace + L::kSquaresOffset) +
                        row_idx * kSlicesPerRow;
  if (Team::thread() == 0) send_packet(packets + slice_idx, tag, __float_as_uint(sum), 0, 0);
  HopWords words[1];
  const bool there =
      take_packets(words, {&params.port, tag, params.kernel}, r.lane < kSlicesPerRow ? 1u : 0u,
                   [&](int) { return packets + r.lane % kSlicesPerRow; });
  const float part =
      there ? __uint_as_float(low_word(words[0].pair)) : plat::bits_float(0x7fc0'0000u);
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kSlicesPerRow; ++i) total += __shfl_sync(plat::kAllLanes, part, i);
  slice.norm(total, epoch, [&] { stamps.mark(StampStage::sum); });
  stamps.mark(StampStage::store);
  if (params.done.word != nullptr) {
    Team::sync();
    if (Team::thread() == 0) count_at_gate(params.done, 1u);
  }
  // So that this kernel's end says that the kernel before has ended too.
  sm90::wait_for_predecessors();
}

template <class L>
__global__ void __launch_bounds__(L::kThreads, 1)
    moe_region_mxfp4_sm90(const __grid_constant__ MoeArgs args, const Rules rules,
                          const __grid_constant__ Maps<L> maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& table = *reinterpret_cast<typename L::Table*>(smem + L::kTableOffset);
  auto& barriers = *reinterpret_cast<typename L::Barriers*>(smem + L::kBarrierOffset);
  Stamps stamps(args.quads.stamps, args.quads.kernel);
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
                 0};
  // Arguments come from far away, a line at a time: all of them at once, a line a warp.
  constexpr int kLine = 64 / 4, kLines = sizeof(MoeArgs) / 4 / kLine;
  const std::uint32_t argument =
      reinterpret_cast<const std::uint32_t*>(&args)[(warp < kLines ? warp : kLines - 1) * kLine];
  r.count_shared_tiles();
  Producer<L> producer = {r, maps};
  // A barrier is made by a thread whose warp makes no other at once: the assembler makes a loop
  // over the threads of it. The first copies do not wait for the others.
  constexpr int kNumBarriers = sizeof barriers / sizeof(std::uint64_t);
  if (warp == L::kProducer) {
    if (r.lane == 0) {
#pragma unroll
      for (std::uint64_t& full : barriers.full) sm90::barrier_init(&full, 1);
      sm90::barrier_init(&barriers.shared_full, 1);
    }
    sm90::fence_barrier_init();
    __syncwarp();
    producer.run_first();
  }
#pragma unroll 1
  for (int i = warp; i < kNumBarriers; i += L::kThreads / plat::kWarpLanes) {
    if (r.lane == 0 && !L::is_of_first_copies(i)) {
      sm90::barrier_init(reinterpret_cast<std::uint64_t*>(&barriers) + i, L::arrivals_of(i));
    }
  }
  sm90::fence_barrier_init();

  static_assert(L::kMaxPairs <= L::kThreads);
  if (thread < L::kMaxPairs) table.rows_of[thread] = 0;
  if (thread < plat::kWarpLanes) table.piece_expert[thread] = kPoison;
  if (thread == 0) {
    table.stop = table.has_mix = 0;
    table.has_shared = args.w.shared_w1.codes != nullptr ? 1 : 0;
    if constexpr (L::kBandStreams) table.band_turns = 0;
  }
  if (r.lane == 0) table.arguments[warp] = argument;
  plat::block_sync();
  Consumer<L> consumer = {r, warp};
  Finisher<L> finisher = {r};
  typename Consumer<L>::TileScales scales = {};
  // Before any wait for the consumers, who wait for these registers.
  if (warp >= L::kConsumers) sm90::fewer_registers<L::kOtherRegisters>();
  // Weights first; everything else has to wait for what came before.
  if (warp == L::kProducer) {
    producer.run_early();
  } else if (warp == L::kFinisher) {
    finisher.run_early();
  } else if (warp < L::kConsumers) {
    consumer.run_early(scales);
  }
  if (warp < L::kConsumers) {
    sm90::more_registers<L::kConsumerRegisters>();
    consumer.run(scales, rules, stamps);
  } else {
    if (warp == L::kProducer) {
      producer.run_routed();
      if (has_slice(r)) take_statistics(r);
    } else if (warp == L::kFinisher) {
      finisher.run(rules.rule);
    } else {
      static_assert(L::kThreads == (L::kFirstRouter + L::kRouters) * plat::kWarpLanes);
      const int number = warp - L::kFirstRouter;
      Router<L>{r, maps, number}.run(rules);
      if (r.has_band()) SecondWarp<L>(r).run_shared(number, L::kRouters);
    }
  }
  plat::block_sync();
  if (table.stop == 0) {
    stamps.mark(StampStage::sum);
    if (thread == 0) {
      reinterpret_cast<std::uint32_t*>(args.workspace)[r.block_idx] = r.epoch;
    }
    if (r.block_idx < kBands) finish_band(r, rules.first_row);
    stamps.mark(StampStage::store);
  } else {
    if (warp == L::kProducer) producer.drain();
    if (thread == 0) report_fault(r);
  }
  if constexpr (L::kEndsLayer) {
    if (has_slice(r) && thread >= LastWarps<L>::kFirst) end_layer(r);
  }
}

}  // namespace moe
}  // namespace lowlat::nvidia::fused

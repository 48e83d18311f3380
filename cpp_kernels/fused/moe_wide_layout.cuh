// fused/moe_wide_layout.cuh: sizes and places of moe_wide.cuh: what lies where in shared memory,
// the ring's slots, the workspace, and which tiles are whose.
#pragma once

#include "fused/moe_parts.cuh"
// The parts come first.
#include "fused/moe_wide_numbers.cuh"

namespace lowlat::nvidia::fused {

namespace moe::wide {

using lowlat::fused::MoeLayout;

inline constexpr int kLineBytes = 128;

constexpr int most(int a, int b) { return a > b ? a : b; }
// The copies of weights. Checkpoint: codes of w1, w3 and w2; Marlin: codes and scales of w1 and w3,
// of w2.
struct TileMaps {
  CUtensorMap maps[4];
};

// Sizes of one compiled shape.
template <class S, MoeLayout kLayout>
struct Layout {
  static constexpr bool kMarlin = kLayout == MoeLayout::marlin;
  static constexpr int kWarpGroups = 4, kConsumers = 4 * kWarpGroups;  // warps
  static constexpr int kProducer = kConsumers, kFinisher = kConsumers + 1;
  static constexpr int kGatherer = kConsumers + 2, kGatherers = 2;
  static constexpr int kThreads = (kConsumers + 4) * plat::kWarpLanes;
  static constexpr int kMakers = 1 + kGatherers;  // of the table: the producer, the gatherers
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8, kOtherRegisters = 64;
  static constexpr int kConsumerRegisters =
      (kLaunchRegisters + (kLaunchRegisters - kOtherRegisters) * 4 / kConsumers) / 8 * 8;
  static constexpr int kHidden = S::kHidden, kInner = S::kIntermediateLocal;
  static constexpr int kExperts = S::kNumExperts, kSlots = S::kExpertsPerToken;
  static constexpr int kBlock = S::kScaleBlock;
  static constexpr int kMaxRows = 64;
  static constexpr int kMaxPairs = kMaxRows * kSlots;
  // An entry is an expert with up to so many of its pairs: two columns of a product each.
  static constexpr int kEntryPairs = 4;

  // Head: router and the shared expert's first product.
  static constexpr int kSlice = kHidden / kConsumers;       // of K, a warp
  static constexpr int kRun = kSlice % 128 == 0 ? 32 : 16;  // consecutive elements of a thread
  static constexpr int kBlockK = 4 * kRun, kSliceBlocks = kSlice / kBlockK;
  static constexpr int kSharedRows = 8;  // values of h of a tile
  static constexpr int kSharedTiles = kInner / kSharedRows;
  static constexpr int kMostSharedTiles = (kSharedTiles + kScorers - 1) / kScorers;  // of a block
  static constexpr bool kSharedHalves = kMostSharedTiles == 1;
  static constexpr int kSharedPitch = kHidden + 32;  // e4m3 row: four rows' 32 bytes on all banks
  static constexpr int kSharedBytes = 2 * kSharedRows * kSharedPitch;
  // A scoring block has a part of K, so that it reads no more of x than that. Of its warps
  // kScoreSlices share that part, the others have other rows.
  static constexpr int kScoreParts = 4, kScoreSlices = kConsumers / kScoreParts;
  static constexpr int kScoreGroups = kScorers / kScoreParts;  // of experts
  static constexpr int kScoreRows = kExperts / kScoreGroups, kGateK = kHidden / kScoreParts;
  static constexpr int kGateRows = kExperts / kScorers;       // of experts, see Scores
  static constexpr int kGatePitch = 2 * kGateK + 64;          // bf16 row: two rows on all banks
  static constexpr int kScorePackets = (kScoreRows + 2) / 3;  // of a block's scores of a row
  static constexpr int kRoutePackets = (kSlots + 1) / 2;      // of a row: two ids, their weights
  // First product. A use of the ring has 64 weight rows: those of w1 and of w3, or one's.
  static constexpr int kUseRows = 64;
  static constexpr int kTileValues = kMarlin ? 64 : 32, kTileGroups = kTileValues / 32;
  static constexpr int kParts = 2 * kTileValues / kUseRows;  // uses of a chunk
  static constexpr int kTiles = kInner / kTileValues;        // of an entry
  // Checkpoint: a chunk's codes lie as tensor copies leave them: of w1, then of w3, so many lines
  // of 128 bytes of each row: [line][row][128], whose 16-byte units are exchanged: unit u of row i
  // is at u ^ i % 8.
  static constexpr int kLines = 2, kLineGroups = kLineBytes / 16;
  static constexpr int kChunks = kMarlin ? 8 : kHidden / 2 / (kLines * kLineBytes);
  static constexpr int kChunkK = kHidden / kChunks;
  static constexpr int kChunkGroups = kChunkK / 32, kChunkRow = kChunkK / 2;
  static constexpr int kUses = kChunks * kParts;  // of a tile
  static constexpr int kTileBytes = 512;          // of a Marlin tile's codes
  static constexpr int kScaleRow = kHidden / 32;
  static constexpr int kTileScales = kMarlin ? 0 : kUseRows * kScaleRow;  // on their own
  // Second product.
  static constexpr int kBandRows = 64;
  static constexpr int kBands = kHidden / kBandRows;  // blocks that own columns
  static constexpr int kInnerGroups = kInner / 32;
  static constexpr int kInnerRow = kInner / 2;
  // An entry's band comes in parts along K, one where that fits a slot.
  static constexpr int kBandParts = kInnerGroups > 18 ? 2 : 1,
                       kPartGroups = kInnerGroups / kBandParts;
  static constexpr int kPartRow = kInnerRow / kBandParts;
  static constexpr int kBandCodes = kBandRows * kPartRow;
  // Checkpoint: as a chunk's lines; or rows, of which eight have two at a bank at most. An expert's
  // whole band is one piece of memory.
  static constexpr bool kBandInLines = kPartRow % kLineBytes == 0;
  static constexpr bool kBandWhole = !kMarlin && !kBandInLines && kBandParts == 1;
  static_assert(kMarlin || kBandInLines || kPartRow % 128 == 32);
  // Marlin: the part's scales; checkpoint: those of all parts.
  static constexpr int kBandScales = kBandRows * (kMarlin ? kPartGroups : kInnerGroups);
  // Of the shared expert: its band comes in uses of so many rows, one for each warp group.
  static constexpr int kSharedUseRows = 16;
  static constexpr int kSharedUses = kBandRows / kSharedUseRows;
  static constexpr int kInnerBlocks = kInner / 64;
  static constexpr int kSharedParts = kInnerBlocks > 9 ? 2 : 1;
  static constexpr int kPartBlocks = kInnerBlocks / kSharedParts;  // of K, in registers
  static_assert(kInnerBlocks % kSharedParts == 0 && kInner % kBlock == 0);
  // Its h is quantised by warps, so many times eight values of a row each.
  static constexpr int kHiddenSpans = (kInner / 8 + plat::kWarpLanes - 1) / plat::kWarpLanes;
  static constexpr int kPacketsPerBand = (kBandRows + 2) / 3;
  // What store_band asks: a band's columns lie and leave in their order.
  static constexpr LOWLAT_DEVICE int column_of(int block, int n) { return block * kBandRows + n; }
  static constexpr LOWLAT_DEVICE int published(int i) { return i; }
  static constexpr LOWLAT_DEVICE int quad_of(int block, int i) {
    return (block * kBandRows + i) / 4;
  }
  static constexpr int kBandScaleRows = (kBandRows + kBlock - 2) / kBlock + 1;  // at most
  static constexpr int kBandScaleColumns = kInner / kBlock;

  static_assert(kSlice % kBlockK == 0 && kHidden % (kChunks * 64) == 0 && kInner % 64 == 0 &&
                kExperts % kScorers == 0 && kBands <= kScorers);
  static_assert(kMarlin ? kChunks % kWarpGroups == 0 : kChunkRow == kLines * kLineBytes,
                "Marlin: a warp group has one of w1 and w3");
  static_assert(kHidden % kBandRows == 0 && kBandRows == 4 * 16 && kBands < kScorers);
  static_assert(kScoreGroups == plat::kWarpLanes && kScoreRows % 4 == 0 && kScoreRows <= 16 &&
                kMaxRows <= kScorers && kExperts % kScorers == 0);
  static_assert(kScorers * kScorePackets <= kConsumers * plat::kWarpLanes &&
                    kExperts <= kConsumers * plat::kWarpLanes,
                "a thread a packet, an expert");
  static_assert(kPartGroups <= plat::kWarpLanes && kBandScales % 16 == 0 && kTileScales % 32 == 0 &&
                kInner % kTileValues == 0);
  static_assert(kSlice % 64 == 0 && kHidden % 128 == 0);
  static_assert(kBlock % kSharedRows == 0 && kHidden / kBlock % 16 == 0);

  // Scales of a column: words of a part, or one. Copied 16 bytes at a time: what is shorter would
  // pass by the first-level cache, where a neighbour's may lie from before they were there.
  static constexpr int kScaleWords = round_up(kPartGroups, 4);
  // A slot of the ring: weights (a chunk, or an entry's band), columns, the columns' scales.
  static constexpr int kGroupBytes = 256;  // of columns: two cores
  static constexpr int kMostGroups = most(kChunkGroups, kPartGroups);
  static constexpr int kChunkCodes = kUseRows * kChunkRow;
  static constexpr int kChunkBytes = kChunkCodes + (kMarlin ? kUseRows * kChunkGroups : 0);
  static constexpr int kBandBytes = kBandCodes + kBandScales;
  static constexpr int kColumnsOffset =
      round_up(kChunkBytes > kBandBytes ? kChunkBytes : kBandBytes, 128);
  static constexpr int kColumnScales = kColumnsOffset + kMostGroups * kGroupBytes;
  // A tensor copy exchanges by places in 1024 bytes.
  static constexpr int kSlotBytes = round_up(kColumnScales + kEntryPairs * kScaleWords * 4, 1024);
  static_assert(kSharedUseRows * kInner <= kBandCodes);
  // The head's weights lie in the ring, from its start: the router's rows, the shared tile.
  static constexpr int kSharedAt = round_up(kScoreRows * kGatePitch, 128);
  static constexpr int kHeadBytes = kSharedAt + kSharedBytes;

  // Shared memory, in bytes from its start.
  static constexpr int kSumsPitch = kUseRows + 4;  // floats of a column: lanes on all banks
  static constexpr int kRoutedSums = kWarpGroups * kEntryPairs * kSumsPitch;
  static constexpr int kHeadSums = kConsumers * kColumns * 2 * kSharedRows;
  static constexpr int kPartialBytes = 4 * most(kRoutedSums, kHeadSums);
  static constexpr int kBuffers = 2;  // of partial sums, of scales
  // Of a row, results of its slots, then of the shared expert.
  static constexpr int kRowParts = kSlots + 1;
  static constexpr int kSumsOffset = 0;
  static constexpr int kScalesOffset = kSumsOffset + kBuffers * kPartialBytes;
  static constexpr int kMaxSlots = 12;
  static constexpr int kTableOffset = round_up(kScalesOffset + kBuffers * kTileScales, 128);
  // The second product's units, an entry's bands, are drawn in batches of one a warp group. The
  // last kKeptBatches that were drawn are known: a batch's place is another's when all its uses
  // are over, as the producer knows when it has to wait for a slot that a use of kMaxSlots later
  // than its last takes.
  static constexpr int kEntryBatches = kBands / kWarpGroups, kBatchUses = kWarpGroups * kBandParts;
  static constexpr int kKeptBatches = 4;
  static_assert(kBands % kWarpGroups == 0 && kMaxSlots <= (kKeptBatches - 1) * kWarpGroups);
  struct alignas(16) Table {
    float weights[kMaxPairs];
    std::uint64_t quads_epoch;  // exchange_epoch of the sum's packets
    std::int32_t num_entries;
    std::uint32_t stop;     // Watch
    std::uint32_t several;  // experts that have several entries
    std::uint32_t warp_sums[kConsumers];
    alignas(16) std::uint32_t count[kExperts];  // an expert's pairs; then their place in `sorted`
    // Of a row that this block routes for all.
    std::int32_t own_ids[kSlots];
    float own_weights[kSlots];
    std::uint16_t expert[kMaxPairs];                               // of an entry, ascending
    std::uint16_t first[kMaxPairs + 1];                            // of an entry in `sorted`
    std::uint16_t sorted[kMaxPairs];                               // pairs by expert, then by pair
    std::uint8_t band_scales[kBandScaleRows * kBandScaleColumns];  // of the shared w2 band
    alignas(16) std::uint8_t shared_scales[2][kHidden / kBlock];   // of a shared tile: w1's, w3's
    std::int32_t batches[kKeptBatches];
  };
  static constexpr int kBarrierOffset =
      round_up(kTableOffset + static_cast<int>(sizeof(Table)), 16);

  struct Barriers {
    std::uint64_t full[kMaxSlots], empty[kMaxSlots];
    std::uint64_t scales_full[kBuffers], scales_empty[kBuffers];
    std::uint64_t sums_full[kBuffers], sums_empty[kBuffers];
    std::uint64_t gate_full, gate_done, shared_full[2], shared_done[2];
    std::uint64_t open, rows;             // x is there; it is split
    std::uint64_t entries, table;         // who has which entry; all of the table
    std::uint64_t batches[kKeptBatches];  // drawn
  };
  static constexpr int kRingOffset =
      round_up(kBarrierOffset + static_cast<int>(sizeof(Barriers)), 1024);
  static constexpr int kFit = (kSmemLimit - kRingOffset) / kSlotBytes;
  static constexpr int kRing = kFit < kMaxSlots ? kFit : kMaxSlots;
  static_assert(kHeadBytes <= kRing * kSlotBytes);
  // The first uses take the slots that the head leaves free: they are filled while it is worked on.
  static constexpr int kFirstSlot = (kHeadBytes + kSlotBytes - 1) / kSlotBytes % kRing;
  static constexpr LOWLAT_DEVICE int slot_of(int use) { return (use + kFirstSlot) % kRing; }
  static_assert(kRing >= kWarpGroups, "a reader is never a whole turn of the ring behind");
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
      kRowScalesOffset + std::size_t{kMaxRows} * kChunks * 16;
  // Counters: of rows, of batches that are drawn, of the shared expert's h; one an entry.
  static constexpr int kDrawnCounter = 32, kSharedCounter = 64, kEntryCounter = 96;
  static constexpr std::size_t kDoneOffset =
      round_up(static_cast<int>(kPairScalesOffset) + kMaxPairs * kBandParts * kScaleWords * 4, 128);
  // Results of the second product, bf16 [row][slot, or the shared expert][kHidden].
  static constexpr std::size_t kResultsOffset =
      kDoneOffset + std::size_t{4} * round_up(kEntryCounter + kMaxPairs, 32);
  static constexpr std::size_t kRowResults = std::size_t{kRowParts} * kHidden * 2;      // bytes
  static constexpr std::size_t kHiddenBytes = kResultsOffset + kMaxRows * kRowResults;  // a parity
  static_assert(kResultsOffset % 16 == 0 && kRowResults % 16 == 0);
  // How many rows' results each parity holds, after the epochs.
  static constexpr std::size_t kUsedOffset = 4 * kMaxGrid;
  static constexpr std::size_t kHiddenOffset = kUsedOffset + 128;
  static constexpr std::size_t kScoresOffset = kHiddenOffset + 2 * kHiddenBytes;
  static constexpr std::size_t kScoresBytes = std::size_t{16} * kScorers * kScorePackets * kMaxRows;
  static constexpr std::size_t kRoutesOffset = kScoresOffset + kScoresBytes;
  static constexpr std::size_t kRoutesBytes = std::size_t{16} * kMaxRows * kRoutePackets;
  static constexpr std::size_t kSharedXOffset = kRoutesOffset + kRoutesBytes;
  // x as the shared expert sees it, of eight rows: [K / 64][row][K / 8 % 4][K / 32 % 2][8] codes,
  // and scales [K / 64][row / 2][K / 32 % 2][row % 2]: a lane has a piece of 16 bytes and a word.
  static constexpr int kXGroupCodes = 8 * kHidden, kXGroupScales = kHidden / 64 * 16;
  static constexpr std::size_t kXScalesOffset =
      kSharedXOffset + std::size_t{kMaxRows / 8} * kXGroupCodes;
  // Its h, of eight rows, in the same order.
  static constexpr int kHiddenGroupCodes = 8 * kInner, kHiddenGroupScales = kInner / 64 * 16;
  static constexpr std::size_t kHiddenCodesOffset =
      kXScalesOffset + std::size_t{kMaxRows / 8} * kXGroupScales;
  static constexpr std::size_t kHiddenScalesOffset =
      kHiddenCodesOffset + std::size_t{kMaxRows / 8} * kHiddenGroupCodes;
  static constexpr std::size_t kWorkspaceBytes =
      kHiddenScalesOffset + std::size_t{kMaxRows / 8} * kHiddenGroupScales;
};

// What every role of a block knows.
template <class L>
struct Region {
  const MoeArgs& a;
  const TileMaps& maps;
  unsigned char* smem;
  typename L::Table& table;
  typename L::Barriers& barriers;
  unsigned char* workspace;
  std::uint32_t epoch;
  Watch watch;
  int block_idx, num_blocks, lane;
  bool scores, shared;  // this launch has a router, a shared expert

  LOWLAT_DEVICE std::uint32_t slot_address(int slot) const {
    return sm90::shared_address(smem) + L::kRingOffset + slot * L::kSlotBytes;
  }
  LOWLAT_DEVICE unsigned char* slot(int slot) const {
    return smem + L::kRingOffset + slot * L::kSlotBytes;
  }
  LOWLAT_DEVICE float* partial(int buffer) const {
    return reinterpret_cast<float*>(smem + L::kSumsOffset + buffer * L::kPartialBytes);
  }
  LOWLAT_DEVICE unsigned char* columns(std::uint32_t parity) const {
    return workspace + L::kHiddenOffset + parity * L::kHiddenBytes;
  }
  LOWLAT_DEVICE unsigned char* here(std::size_t offset) const {
    return columns(epoch & 1u) + offset;
  }
  // Results of a row's slot (or the shared expert), two columns a word: column `column` and on.
  LOWLAT_DEVICE std::uint32_t* results(int row, int slot, int column) const {
    return reinterpret_cast<std::uint32_t*>(here(L::kResultsOffset)) +
           ((row * L::kRowParts + slot) * L::kHidden + column) / 2;
  }
  LOWLAT_DEVICE std::uint32_t* rows_used(std::uint32_t parity) const {
    return reinterpret_cast<std::uint32_t*>(workspace + L::kUsedOffset) + parity;
  }
  // [group of 32][64]: pieces of a row of x, of a pair's h.
  LOWLAT_DEVICE unsigned char* row_pieces(int row) const {
    return here(static_cast<std::size_t>(row) * (L::kHidden / 32 * L::kPieceRow));
  }
  LOWLAT_DEVICE unsigned char* pair_pieces(int pair) const {
    return here(L::kPairsOffset) + pair * (L::kInnerGroups * L::kPieceRow);
  }
  LOWLAT_DEVICE unsigned char* row_scale(int row, int chunk) const {  // a word, four times
    return here(L::kRowScalesOffset) + (row * L::kChunks + chunk) * 16;
  }
  LOWLAT_DEVICE std::uint32_t* pair_scales(int pair, int part) const {  // [kScaleWords]
    return reinterpret_cast<std::uint32_t*>(here(L::kPairScalesOffset)) +
           (pair * L::kBandParts + part) * L::kScaleWords;
  }
  // Counters of what is there: from kPoison on, so that clearing is the same for all.
  LOWLAT_DEVICE std::uint32_t* rows_done() const {  // chunks of rows
    return reinterpret_cast<std::uint32_t*>(here(L::kDoneOffset));
  }
  LOWLAT_DEVICE std::uint32_t* entry_done(int entry) const {  // tiles of an entry's h
    return rows_done() + L::kEntryCounter + entry;
  }
  LOWLAT_DEVICE std::uint32_t* hidden_done() const {  // spans of the shared expert's h
    return rows_done() + L::kSharedCounter;
  }
  LOWLAT_DEVICE std::uint32_t* drawn() const { return rows_done() + L::kDrawnCounter; }
  // A warp has stored what is counted.
  LOWLAT_DEVICE void add_done(std::uint32_t* counter) const {
    fence_device();
    __syncwarp();
    if (lane == 0) add_word(counter, 1);
  }
  // The shared expert's h of a row: bf16 in the order of pairs.
  LOWLAT_DEVICE unsigned char* shared_hidden(int row) const {
    return here(L::kSharedOffset) + row * (L::kInner * 2);
  }
  // [row][part of K][packet of a block][group of experts].
  LOWLAT_DEVICE plat::TaggedWords* score_packet(int row, int number) const {
    return reinterpret_cast<plat::TaggedWords*>(workspace + L::kScoresOffset) +
           row * (kScorers * L::kScorePackets) + number;
  }
  LOWLAT_DEVICE plat::TaggedWords* route_packet(int number) const {
    return reinterpret_cast<plat::TaggedWords*>(workspace + L::kRoutesOffset) + number;
  }
  // Codes and scales of x as the shared expert sees it, of a group of eight rows.
  LOWLAT_DEVICE unsigned char* shared_x(int group) const {
    return workspace + L::kSharedXOffset + group * L::kXGroupCodes;
  }
  LOWLAT_DEVICE unsigned char* shared_x_scales(int group) const {
    return workspace + L::kXScalesOffset + group * L::kXGroupScales;
  }
  // The same of its h.
  LOWLAT_DEVICE unsigned char* shared_h(int group) const {
    return workspace + L::kHiddenCodesOffset + group * L::kHiddenGroupCodes;
  }
  LOWLAT_DEVICE unsigned char* shared_h_scales(int group) const {
    return workspace + L::kHiddenScalesOffset + group * L::kHiddenGroupScales;
  }
  LOWLAT_DEVICE int score_part() const { return block_idx % L::kScoreParts; }
  LOWLAT_DEVICE int score_group() const { return block_idx / L::kScoreParts; }
  LOWLAT_DEVICE bool gates() const { return scores && block_idx < kScorers; }

  // The shared expert's first product: tiles times groups of eight rows. A block has one tile, or
  // up to two; where there are more blocks than tiles, two blocks share a tile, one with the even
  // groups and one with the odd ones, as long as blocks last. The last block has the first.
  struct SharedWork {
    int first_tile, num_tiles, first_group, num_groups, group_step;
    // Its n-th group: blocks begin at different ones, so that they do not all ask the same part of
    // the cache.
    LOWLAT_DEVICE int group(int n, int block) const {
      return first_group + (n + block) % num_groups * group_step;
    }
  };
  LOWLAT_DEVICE SharedWork shared_work(int block) const {
    const int place = num_blocks - 1 - block, groups = num_groups();
    SharedWork work = {place, 0, 0, groups, 1};
    if (!shared) return work;
    if constexpr (L::kSharedHalves) {
      const int whole = most(2 * L::kSharedTiles - num_blocks, 0), half = place - whole;
      if (half >= 0) {
        work = {whole + half / 2, 0, half % 2, (groups + 1 - half % 2) / 2, 2};
      }
      work.num_tiles = work.first_tile < L::kSharedTiles && work.num_groups > 0 ? 1 : 0;
    } else {
      work.num_tiles = (place < L::kSharedTiles) + (place + num_blocks < L::kSharedTiles);
      static_assert(L::kMostSharedTiles == 2);
    }
    return work;
  }
  LOWLAT_DEVICE int shared_tile(int n) const {
    return shared_work(block_idx).first_tile + n * num_blocks;
  }
  LOWLAT_DEVICE int shared_tiles() const { return shared_work(block_idx).num_tiles; }
  LOWLAT_DEVICE bool has_band() const { return block_idx < L::kBands; }
  // The n-th routed tile of a block (its number among all): they go around in order of entries,
  // from the last block on.
  LOWLAT_DEVICE int routed_tile(int n) const { return (n + 1) * num_blocks - 1 - block_idx; }
  LOWLAT_DEVICE int num_tiles() const { return table.num_entries * L::kTiles; }
  LOWLAT_DEVICE int own_tiles() const { return (num_tiles() + block_idx) / num_blocks; }
  // Uses of the ring by the shared expert's band, between tiles and routed bands.
  LOWLAT_DEVICE int shared_uses() const { return shared && has_band() ? L::kSharedUses : 0; }
  // Batches go four bands of an entry at a time, entry after entry; a warp group has one of them.
  // The uses of a batch go part after part, so that from one use of a warp group to its next there
  // are no more than in the first product: fewer than the ring has slots (see wait_filled).
  LOWLAT_DEVICE int num_batches() const { return table.num_entries * L::kEntryBatches; }
  static constexpr LOWLAT_DEVICE int batch_entry(int batch) { return batch / L::kEntryBatches; }
  static constexpr LOWLAT_DEVICE int batch_band(int batch) {
    return batch % L::kEntryBatches * L::kWarpGroups;
  }
  // The n-th batch of this block, when it is drawn; -1: there are no more. False: the block has to
  // leave.
  LOWLAT_DEVICE bool wait_batch(int n, int* batch) const {
    const int place = n % L::kKeptBatches;
    if (!barrier_wait(&barriers.batches[place], n / L::kKeptBatches & 1, watch)) return false;
    *batch = table.batches[place];
    return true;
  }
  LOWLAT_DEVICE int num_groups() const { return (a.rows + kColumns - 1) / kColumns; }
  LOWLAT_DEVICE int num_pairs(int entry) const {
    return table.first[entry + 1] - table.first[entry];
  }

  // Until a counter is `want`; false (all lanes of the warp) when it is late.
  LOWLAT_DEVICE bool wait_count(const std::uint32_t* counter, std::uint32_t want,
                                std::uint32_t event) const {
    // By a vote: the lanes leave together, for products that want the whole warp.
    for (int tries = 1;; ++tries) {
      const bool here = load_word(counter) == want;
      if (__all_sync(plat::kAllLanes, here)) break;
      const bool late = tries % kTriesPerLook == 0 && watch.ended(event);
      if (__any_sync(plat::kAllLanes, late)) return false;
    }
    fence_device();
    return true;
  }
  // The same, for who is told by another wait of the block that it is late.
  LOWLAT_DEVICE bool wait_count(const std::uint32_t* counter, std::uint32_t want) const {
    while (!__all_sync(plat::kAllLanes, load_word(counter) == want)) {
      if (__any_sync(plat::kAllLanes, watch.stopped())) return false;
    }
    fence_device();
    return true;
  }
  // Until all rows are split.
  LOWLAT_DEVICE bool wait_rows() const {
    return wait_count(rows_done(), counted(a.rows * L::kChunks), kRowsEvent);
  }
  // Until use `use` of the ring may be filled.
  LOWLAT_DEVICE bool wait_free(int use) const {
    const int slot = L::slot_of(use);
    if (use >= L::kRing) {
      return barrier_wait(&barriers.empty[slot], (use / L::kRing - 1) & 1, watch);
    }
    const int begin = slot * L::kSlotBytes;
    if (begin < L::kSharedAt && gates() && !barrier_wait(&barriers.gate_done, 0, watch)) {
      return false;
    }
    const bool over_shared = begin + L::kSlotBytes > L::kSharedAt && begin < L::kHeadBytes;
    const int num = over_shared ? shared_tiles() : 0;
    return num == 0 || barrier_wait(&barriers.shared_done[num - 1], 0, watch);
  }
  // Until use `use` is filled. The use before in its slot was another warp group's, perhaps.
  LOWLAT_DEVICE bool wait_filled(int use) const {
    const int slot = L::slot_of(use);
    const std::uint32_t parity = use / L::kRing & 1;
    if (use >= L::kRing && !barrier_wait(&barriers.empty[slot], parity ^ 1u, watch)) return false;
    return barrier_wait(&barriers.full[slot], parity, watch);
  }
};

}  // namespace moe::wide
}  // namespace lowlat::nvidia::fused

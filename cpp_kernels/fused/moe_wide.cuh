// moe_wide_mxfp4_sm90: router, routed MXFP4 experts and shared expert for many rows, one launch.
//
// Math         z = x gate^T; ids and weights as stages/gate.hpp. For pair p (a row, a slot) of
//              expert e: h_p = swiglu(bf(w1_e x), bf(w3_e x)), d_p = bf(weight_p * (w2_e h_p));
//              shared: the same with x and h quantised. y = bf(sum of a row's d_p) + bf(shared)
// Shapes       fused/moe.hpp, both layouts of the weights; T 1 .. 64
// Rounding     as stages/experts.hpp (Marlin's): gate, up, silu, h, d and the sum of slots to
//              bf16; all other sums fp32. x and h enter the routed products as two e4m3 terms under
//              a power of two: below 2^-17 of the largest of kChunkK of x, of 32 of h, is lost
// Bytes        each weight of a chosen expert once for every four of its pairs: with uniform
//              routing of up to 48 rows that is once (shape::moe_weight_bytes)
// Floor        V4.1, TP4, T = 24: 568 MB, 122 us at 4.65 TB/s. The bench prints the share reached.
// Launch       one block an SM (128 at least): four warp groups that multiply, and one of a
//              producer, a finisher and two gatherers. Weights are on their way before the kernels
//              before have ended.
// Ordering     below
// Determinism  fixed trees: pieces of K of the first product are dealt to the warp groups in turn,
//              each group's added, and these in the order of their first pieces; K of the second
//              lies in one warp; slots in slot order. Bitwise run to run, and whatever the other
//              rows are.
// Meaning      reference/experts.cpp, reference/gate.cpp. Bound: rel_l2 <= 1e-2
//
// How the work lies. The products are wgmma's of e4m3: 64 weight rows, whose fp4 codes are moved
// into e4m3's fields in registers (seven instructions for eight codes), times 8 columns in shared
// memory. A group of 32 along K is one product, so its scale multiplies the sums and not the
// weights. bf16 values keep their eight bits as two e4m3 terms, high and low, two neighbouring
// columns whose sums are added. An entry is an expert with up to four of its pairs.
//
// First product: a tile is 32 values of h, 32 rows of w1 and of w3 (Marlin's tiles: 64 values, in
// two uses), so that gate and up of a value meet in one block. Tiles go around the blocks in the
// order of entries, in kChunks pieces along K that the warp groups take in turn. The finisher adds
// their sums, applies SwiGLU and sends h to all blocks. Second product: its units are an entry's 64
// output columns, a band. Blocks draw them four at a time, one a warp group, entry after entry, so
// that all end together whatever each had to do before and however fast its copies are; a block
// draws while the four before are asked for. The first entries' h was finished while later tiles
// were multiplied, so the second product starts without a wait. Who is through adds rows' results,
// of all blocks, a lane four columns, and sends the sums. Router and shared expert, which do not
// depend on the routing, are fetched while it is being decided; their products are mma.m16n8k16's
// on rows of x in registers. A block scores twelve experts on a quarter of K, so that it reads a
// quarter of x; block t adds the quarters of row t, chooses its experts and tells all blocks.
// Producer and gatherers make each block's table of them. The shared expert's first product goes on
// meanwhile: a block has a tile and half of the rows, or all of them. Its second comes through the
// ring, between tiles and routed units, of codes of h that gatherers have made by then.
//
// Weights come by tensor copies or in one piece: rows' whole lines of 128 bytes. Pieces of half a
// line, by sixteen bytes a lane, reached 0.84 of the bandwidth (docs/bench/moe-hopper.md).
//
// Ordering     scores   [row][part of K][packet][group] {3 sums, epoch}: written by its block's
//                       finisher, read by the block that routes the row. Written again by the next
//                       launch, which begins after this one has ended (wait_at(before)).
//              routes   [row] packets {two ids, their weights, epoch}: written by the row's block,
//                       read by those of every block that make its table; again as the scores.
//              shared_x, shared_h  [eight rows] codes of x and h as the shared expert sees them:
//                       counted as the columns are, again as the scores.
//              results  [epoch & 1][row][slot, or shared expert][column] of units, by whoever has
//                       the unit; two columns are a word that begins as kPoison and is read until
//                       it is something else. Cleared with the columns, as many rows as the launch
//                       before had (rows_used).
//              drawn    [epoch & 1] how many fours of units are drawn; cleared with the columns.
//              batches  the last fours of this block: written by the producer, who counts each by a
//                       phase of its place's barrier. A place is written again when all that read
//                       it have multiplied (kKeptBatches).
//              columns  [epoch & 1] x and h as e4m3 in pieces of 16 bytes and their scales, each
//                       written once by one warp, which then counts (a release); gatherers wait for
//                       the count (an acquire) and copy. Counters and the shared expert's h begin
//                       as a pattern that no result has (kPoison); the latter is read until it is
//                       not that pattern: payload and arrival in one access. The other parity is
//                       filled with the pattern meanwhile: its readers ended with the launch
//                       before, its writers begin with the next.
//              epoch    one word a block, read at the start, advanced at the end by its own block.
//              ring     slot of use u: full: the producer's copies and its gatherer's; empty: the
//                       four warps that took it. Uses are filled in order, each is taken by one
//                       warp group. A parity tells a phase from the next only: the producer and a
//                       slot's gatherer see each phase, and a reader of use u first waits for the
//                       end of the use before in its slot, whose own predecessor is over because
//                       the producer was there since.
//              head     the router's rows and the shared expert's tile lie at the ring's start: a
//                       slot's first use waits for gate_done, shared_done. The ring's first uses
//                       take the slots that are free.
//              sums     partial[] full: every consumer; empty: the finisher's. partial[0] is also
//                       where a row is routed: after the block's own scores have left, before the
//                       next sums. Pairs are put in order where the ring's first use comes.
//              registers  are given back before any wait: consumers wait for them to start.
//              late     waits for other blocks watch one deadline and the abort word; nothing is
//                       stored or published after a fault.
#pragma once

#include "fused/moe_wide_fetch.cuh"
#include "fused/moe_wide_layout.cuh"
#include "fused/moe_wide_multiply.cuh"

namespace lowlat::nvidia::fused {

namespace moe::wide {

// ------------------------------------------------------------------------------------ finisher

// By one warp: rows of scales that the shared w2's band touches, from that of its first row. Its
// arrival is one of two that end the wait for the table.
template <class L>
LOWLAT_DEVICE void load_band_scales(const Region<L>& r) {
  const bool band = r.shared && r.block_idx < L::kBands;
  const int first = r.block_idx * L::kBandRows / L::kBlock * L::kBandScaleColumns;
  constexpr int kAll = L::kHidden / L::kBlock * L::kBandScaleColumns;
  for (int i = r.lane; i < L::kBandScaleRows * L::kBandScaleColumns; i += plat::kWarpLanes) {
    if (band && first + i < kAll)
      r.table.band_scales[i] = __ldg(r.a.w.shared_w2.scales + first + i);
  }
  __syncwarp();
  if (r.lane == 0) sm90::barrier_arrive(&r.barriers.table);
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

  // Fills the other parity's columns with the pattern that says "not yet", and what results it has.
  LOWLAT_DEVICE void clear_columns() const {
    const std::uint32_t other = (r.epoch & 1u) ^ 1u;
    const std::uint32_t used = load_word(r.rows_used(other));
    if (r.block_idx == 0 && r.lane == 0) {
      store_word(r.rows_used(r.epoch & 1u), static_cast<std::uint32_t>(r.a.rows));
    }
    const int pieces =
        static_cast<int>(L::kResultsOffset / 16) + static_cast<int>(used * (L::kRowResults / 16));
    unsigned char* dst = r.columns(other);
    for (int i = r.block_idx * plat::kWarpLanes + r.lane; i < pieces;
         i += r.num_blocks * plat::kWarpLanes) {
      store_packet(dst + static_cast<std::size_t>(i) * 16,
                   make_uint4(kPoison, kPoison, kPoison, kPoison));
    }
  }

  // A block's part of the scores of 32 rows at a time, a lane a row.
  LOWLAT_DEVICE bool run_gate() {
    constexpr int kSums = kColumns * 2 * L::kSharedRows;  // of a warp
    const int group = r.lane / kColumns, column = r.lane % kColumns;
    for (int first_row = 0; first_row < r.a.rows; first_row += plat::kWarpLanes) {
      if (!wait_sums()) return false;
      const float* src = r.partial(sums % L::kBuffers) + group * L::kScoreSlices * kSums +
                         column * 2 * L::kSharedRows;
      float score[round_up(L::kScoreRows, 3)] = {};
#pragma unroll
      for (int slice = 0; slice < L::kScoreSlices; ++slice) {
#pragma unroll
        for (int i = 0; i < L::kScoreRows; i += 4) {
          const float4 v = *reinterpret_cast<const float4*>(src + slice * kSums + i);
          score[i] += v.x, score[i + 1] += v.y, score[i + 2] += v.z, score[i + 3] += v.w;
        }
      }
      free_sums();
      const int row = first_row + r.lane;
      if (row >= r.a.rows) continue;
#pragma unroll
      for (int i = 0; i < L::kScorePackets; ++i) {
        const std::uint32_t words[3] = {__float_as_uint(score[3 * i]),
                                        __float_as_uint(score[3 * i + 1]),
                                        __float_as_uint(score[3 * i + 2])};
        const int number = (r.score_part() * L::kScorePackets + i) * L::kScoreGroups;
        plat::store_tagged(r.score_packet(row, number + r.score_group()), words, r.epoch);
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
    constexpr int kGroupSums = L::kEntryPairs * L::kSumsPitch;  // of a warp group
    const float* src = r.partial(sums % L::kBuffers) + column * L::kSumsPitch + half * 32 + r.lane;
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (int i = 0; i < L::kWarpGroups; i += L::kParts) {
      gate += src[i * kGroupSums];
      up += src[L::kMarlin ? (i + 1) * kGroupSums : i * kGroupSums + L::kTileValues];
    }
    const float h =
        round_to_bf16(stages::swiglu(round_to_bf16(gate), round_to_bf16(up), kSwigluLimit, true));
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
      const std::uint32_t theirs =
          __shfl_sync(plat::kAllLanes, codes, first + (L::kMarlin ? b / 2 * 16 + b % 2 : 2 * b));
      word |= (part < 2 ? theirs & 0xffu : theirs >> 8 & 0xffu) << 8 * b;
    }
    uint4 piece;
    piece.x = __shfl_sync(plat::kAllLanes, word, r.lane % 4 * 4);
    piece.y = __shfl_sync(plat::kAllLanes, word, r.lane % 4 * 4 + 1);
    piece.z = __shfl_sync(plat::kAllLanes, word, r.lane % 4 * 4 + 2);
    piece.w = __shfl_sync(plat::kAllLanes, word, r.lane % 4 * 4 + 3);
    const int group = tile * L::kTileGroups + half;
    if (r.lane < 4) store_packet(r.pair_pieces(pair) + group * L::kPieceRow + r.lane * 16, piece);
    if (r.lane == 4) {
      store_word(r.pair_scales(pair, group / L::kPartGroups) + group % L::kPartGroups,
                 (exponent + kFp4E4m3Shift) << 23);
    }
  }

  LOWLAT_DEVICE bool run() {
    if (r.gates() && !run_gate()) return false;
    if (r.lane == 0 && r.a.quads.tp_size > 0) {
      r.table.quads_epoch = exchange_epoch(r.a.quads, r.a.quads_index);
    }
    load_band_scales(r);
    clear_columns();
    const auto shared = r.shared_work(r.block_idx);
    for (int n = 0; n < shared.num_tiles; ++n) {
      for (int group = 0; group < shared.num_groups; ++group) {
        if (!wait_sums()) return false;
        const int first_row = shared.group(group, r.block_idx) * kColumns;
#pragma unroll 1
        for (int column = 0; column < kColumns && first_row + column < r.a.rows; column += 4) {
          finish_shared(first_row, column, r.shared_tile(n));
        }
        free_sums();
      }
    }
    if (!barrier_wait(&r.barriers.table, 0, r.watch)) return false;
    const int own_tiles = r.own_tiles();
    for (int n = 0; n < own_tiles; ++n) {
      const int number = r.routed_tile(n), entry = number / L::kTiles;
      if (!wait_sums()) return false;
      const int first = r.table.first[entry], num = r.table.first[entry + 1] - first;
#pragma unroll 1
      for (int i = 0; i < num * L::kTileGroups; ++i) {
        const int column = i / L::kTileGroups;
        finish_pair(column, r.table.sorted[first + column], number % L::kTiles, i % L::kTileGroups);
      }
      free_sums();
      r.add_done(r.entry_done(entry));
    }
    return true;
  }
};

// ------------------------------------------------------------------------------------ epilogue

// y of the band, after the block's sync: all results are there.
template <class L>
struct BandValue {
  const Region<L>& r;

  LOWLAT_DEVICE float operator()(int row, int n) const {
    const int column = r.block_idx * L::kBandRows + n;
    const auto load = [&](int slot) {
      const std::uint32_t word = load_word(r.results(row, slot, column));
      return n % 2 == 0 ? low_bf16(word) : high_bf16(word);
    };
    float sum = 0.0f;
#pragma unroll
    for (int slot = 0; slot < L::kSlots; ++slot) sum += load(slot);
    return round_to_bf16(sum) + (r.shared ? load(L::kSlots) : 0.0f);
  }
};

// wait_at(before), but that nobody waits for the producer, who waits for the router's rows: a block
// that begins when x is there asks for it at once.
template <class L>
LOWLAT_DEVICE void wait_for_x(const Region<L>& r, int warp) {
  const Gate& gate = r.a.before;
  if (gate.word == nullptr) {
    wait_at(gate);
  } else if (warp == L::kProducer) {
    barrier_wait(&r.barriers.open, 0);
  } else {
    if (plat::thread_idx() == 0) {
      poll_gate(gate);
      sm90::barrier_arrive(&r.barriers.open);
    }
    asm volatile("bar.sync 2, %0;" ::"n"(L::kThreads - plat::kWarpLanes) : "memory");
  }
}

template <class L>
__global__ void __launch_bounds__(L::kThreads, 1)
    moe_wide_mxfp4_sm90(const __grid_constant__ MoeArgs args, const Rules rules,
                        const __grid_constant__ TileMaps maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Stamps stamps(args.quads.stamps, args.quads.kernel);
  auto& table = *reinterpret_cast<typename L::Table*>(smem + L::kTableOffset);
  auto& barriers = *reinterpret_cast<typename L::Barriers*>(smem + L::kBarrierOffset);
  const int thread = plat::thread_idx();
  const int warp = __shfl_sync(plat::kAllLanes, thread / plat::kWarpLanes, 0);
  Region<L> r = {args,
                 maps,
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
                 args.w.shared_w1.codes != nullptr};
  if (thread < L::kRing) {
    sm90::barrier_init(&barriers.full[thread], 1 + plat::kWarpLanes);
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
    sm90::barrier_init(&barriers.open, 1);
    sm90::barrier_init(&barriers.rows, 1);
    sm90::barrier_init(&barriers.table, 2);
    sm90::barrier_init(&barriers.entries, 1);
    for (int i = 0; i < L::kKeptBatches; ++i) sm90::barrier_init(&barriers.batches[i], 1);
    table.stop = 0;
    table.several = 0;
  }
  static_assert(L::kBuffers == 2);
  sm90::fence_barrier_init();

  for (int i = thread; i < L::kExperts; i += L::kThreads) table.count[i] = 0;
  plat::block_sync();

  Producer<L> producer = {r};
  Consumer<L> consumer = {r, warp};
  bool going = true;
  // Before any wait for the consumers, who wait for these registers.
  if (warp >= L::kConsumers) sm90::fewer_registers<L::kOtherRegisters>();
  // Weights first; everything else has to wait for what came before.
  if (warp == L::kProducer) {
    going = producer.run_early();
  }
  stamps.mark(StampStage::ask);
  wait_for_x(r, warp);
  stamps.mark(StampStage::wait);
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
    consumer.run(rules, stamps);
  } else {
    if (warp == L::kProducer) {
      make_table(r, 0);  // every maker comes to its barriers
      if (going) producer.run_routed();
    } else if (warp == L::kFinisher) {
      Finisher<L> finisher = {r};
      finisher.run();
    } else {
      const Gatherer<L> gatherer = {r, warp - L::kGatherer};
      gatherer.run();
    }
  }
  plat::block_sync();
  if (table.stop == 0) {
    if (args.boxes.outboxes != nullptr && r.has_band()) {
      store_band<L>(r, rules.first_row, BandValue<L>{r});
    }
    stamps.mark(StampStage::store);
    if (thread == 0) *epoch_word = r.epoch;
    return;
  }
  if (warp == L::kProducer) producer.drain();
  if (thread == 0) report_fault(r);
}

}  // namespace moe::wide
}  // namespace lowlat::nvidia::fused

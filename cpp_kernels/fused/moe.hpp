// fused/moe.hpp: the mixture-of-experts region of a layer as one launch: router, routed MXFP4
// experts, shared expert, and this rank's partial sum, stored or published. Host interface.
//
// One call computes, for T rows x (bf16 [T, H], normed):
//   routing   ids and weights of the k experts of each row, by MoeRouting
//   routed    slots of W4A16 experts with Marlin's roundings (stages/experts.hpp), added in slot
//             order
//   shared    the block-fp8 shared expert, its two inputs quantised
//   y[t, n] = bf16(sum of slots) + bf16(shared), fp32: this rank's partial of the layer's output
// y goes to `out`, to the mailboxes of `boxes`, or to both. Bitwise equal run to run.
//
// All pointers are device memory unless said otherwise. Weights are fp4 codes two a byte with ue8m0
// scale bytes, in one of two layouts. Scale bytes of fp4 weights from 10 to 136 and of e4m3 weights
// up to 134 are exact; others are outside what this kernel declares. Of x, the routed products lose
// what is below 2^-17 of the largest in a part of a row, a sixteenth or an eighth of it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fused/exchange.hpp"

namespace lowlat::fused {

// Which compiled shape: a model's target layers at a number of ranks, or V4.1's draft stages (V4's
// are shaped as its target's).
enum class MoeShape { v41_tp2, v41_tp4, v4_tp2, v4_tp4, v41_draft_tp2, v41_draft_tp4 };

// gate: scores of x and the router, the k best. table: `ids` are given (a hash layer's table has
// been read), their weights come from the router's scores. given: `ids` and `weights` are inputs.
enum class MoeRouting : std::int32_t { gate, table, given };

// Where the routed experts' codes and scales lie.
//   checkpoint  codes [N, K / 2], the even column of a row in the low nibble; scales [N, K / 32].
//   marlin      what the Marlin repack of SGLang's Hopper runner leaves. Codes: [K / 16, N / 64]
//               tiles of 512 bytes. With k = 2t, word 4 (4 g + t) + w of a tile holds of rows n =
//               16 w + g and n + 8, nibble after nibble: n at k, k + 8; n + 8 at k, k + 8; n at
//               k + 1, k + 9; n + 8 at k + 1, k + 9. Scales: [K / 32, N]; of each 64 columns,
//               position 8 g + 4 (w / 2) + w % 2 is row 16 w + g, two further is row 16 w + g + 8.
//               w1 and w3 are one matrix of 2 I rows, w1's first.
enum class MoeLayout : std::int32_t { checkpoint, marlin };

// [N, K] codes with their scales.
struct MoeMatrix {
  const std::uint8_t* codes;
  const std::uint8_t* scales;
};

struct MoeWeights {
  const std::uint16_t* gate;  // bf16 [E, H]; unused when the routing is given
  const float* gate_bias;     // [E]; used by MoeRouting::gate only
  const float* gate_bias_vl;  // [E], bias of image rows, or nullptr where the model has none
  MoeLayout layout;           // of w1, w3 and w2
  MoeMatrix w1, w3;           // fp4 of E x [I, H]; marlin: w1 is E x [2 I, H], w3 unused
  MoeMatrix w2;               // fp4 of E x [H, I]
  MoeMatrix shared_w1;        // e4m3 [I, H], ue8m0 [I / b, H / b]; nullptr: no shared expert
  MoeMatrix shared_w3;        // the same
  MoeMatrix shared_w2;        // e4m3 [H, I], ue8m0 [H / b, I / b]
};

// Where a published sum goes: the mailboxes of stages/exchange.hpp, in packets of three values and
// the tag. A block owns a band of columns (moe_box_band), so packets are numbered by band: with
// per_band = (band + 2) / 3, (t, n) is word n % band % 3 of packet
// (t * (H / band) + n / band) * per_band + n % band / 3, with n the place of a column
// (moe_box_column).
struct MoeBoxes {
  void* const* outboxes;       // device array [tp_size] of mailboxes, own rank's included; nullptr:
                               // nothing is published
  std::int64_t box_packets;    // at least moe_box_packets(shape, rows)
  const std::uint64_t* epoch;  // one word: the exchange's epoch, its low half is the tag
};

// Whom to tell when a wait expires (stages/wait.hpp). Without abort words a fault shows only as an
// output that was not written.
struct MoeFault {
  std::uint32_t* const* abort_words;  // device array [tp_size], or nullptr
  void* status;                       // StatusWords
  std::int32_t tp_rank, tp_size;
  std::uint64_t budget_ns;  // of the whole launch, from when its input is there
};

struct MoeArgs {
  std::int32_t rows;  // T, 1 .. 64
  MoeRouting routing;
  const std::uint16_t* x;          // bf16 [T, H]
  const std::uint8_t* image_rows;  // u8 [T], not 0: the row takes gate_bias_vl; or nullptr
  const std::int32_t* ids;         // [T, k], 0 .. E - 1; for table and given
  const float* weights;            // [T, k]; for given
  MoeWeights w;
  std::int32_t* out_ids;  // [T, k] in selection order, or nullptr
  float* out_weights;     // [T, k], or nullptr
  float* out;             // [T, H], or nullptr
  MoeBoxes boxes;
  MoeFault fault;
  // The same sum by another door: to the mailboxes of exchange.cuh, in its packets, as exchange
  // quads_index of the step. tp_size 0: not.
  nvidia::fused::ExchangePort quads;
  std::int32_t quads_index;
  // What ends the layer with that sum: the work of launch_exchange_norm, by the region's own blocks
  // where moe_ends_layer() says so. Its residual was complete when x was, so `before` and `early`
  // are not used; the rest as there, its exchange_index is quads_index. num_rows T; 0: not wanted.
  nvidia::fused::ExchangeNormParams exchange;
  // Of x. word nullptr: the end of the kernels before. With a gate the launch that used the
  // workspace before must have published its sums when the gate opens, as it has when an exchange
  // of them lies between.
  nvidia::fused::Gate before;
  // Multiprocessors that are left to other kernels; the same in all launches that share a
  // workspace, whose blocks count them.
  std::int32_t idle_sms;
  void* workspace;  // moe_workspace_bytes, made ready once by moe_workspace_init
};

// Bytes of the scratch that a launch and its successors on one stream share: 256-byte aligned, for
// one launch at a time. A layer needs none of its own.
std::size_t moe_workspace_bytes(MoeShape shape);
// On `stream`, once, and again after a launch that ended in a fault. Returns a cudaError_t.
int moe_workspace_init(MoeShape shape, void* workspace, void* stream);

// Whether a launch of `rows` rows can end the layer too (MoeArgs::exchange).
bool moe_ends_layer(MoeShape shape, int rows);
// Whether its quads hold four positions of Marlin's order instead of four columns: position 8 g + j
// of 64 is column 8 j + g (ExchangeNormParams::tile_order).
bool moe_tile_order(MoeShape shape, MoeLayout layout, int rows);

// Columns of a band, and packets of one mailbox, of a launch of `rows` rows; the column whose place
// in the packets is `position`.
int moe_box_band(MoeShape shape, int rows);
std::int64_t moe_box_packets(MoeShape shape, int rows);
int moe_box_column(MoeShape shape, MoeLayout layout, int rows, int position);

// Enqueues the region on `stream` (a cudaStream_t); capturable. `overlapped`: a programmatic edge,
// so that weights are on their way before the kernel before has ended; what that kernel writes is
// waited for. Returns a cudaError_t; cudaErrorInvalidValue for rows outside 1 .. 64, for an
// exchange that is not of these rows, this number of ranks and a region that ends layers, or a
// device that cannot hold the grid (one block an SM, 128 at least) at once.
int launch_moe_region(MoeShape shape, const MoeArgs& args, void* stream, bool overlapped);

}  // namespace lowlat::fused

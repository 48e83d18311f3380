// fused/attention.hpp: sparse attention over the window and the selection, with a sink. Every C++
// compiler reads it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fused/front.hpp"

namespace lowlat::nvidia::fused {

struct AttentionParams {
  // V4: o is quantised for wo_a, so what is written are its e4m3 codes' values; but not where
  // plain_o, as in a draft and where an engine hands wo_a over in bf16.
  FusedModel model;
  bool plain_o;
  int num_rows;            // T, 1 .. 48
  int num_heads;           // of this rank, a multiple of 16
  float norm_eps;          // V4
  const std::uint16_t* q;  // bf16 [T, num_heads, 512], rotated
  // Up to kHopRows rows: packets instead of q, o and o_scale, and the keys of kv_slots come by
  // packets too. A row with a slot has that slot among its window_idx.
  Hop hop;
  HopBuffers packets;
  const float* sink;              // [num_heads]; -inf: none
  const std::int32_t* positions;  // [T], for the rotation back
  RopeFrequencies rope;
  // Two sets of keys; index -1 pads. The extra set may be empty (num_extra 0).
  KvPages window, extra;
  const std::int32_t* window_idx;  // [T, num_window] slots of `window`
  const std::int32_t* extra_idx;   // [T, num_extra]
  int num_window, num_extra;
  // Where extra_idx lists every entry of so many positions that a row sees, as far as its own, and
  // -1 behind them: what is behind is not looked at. 0: all of extra_idx is.
  int extra_ratio;
  // Slots of `window` that the two kernels before this one write: their rows are read only after
  // keys_done. Every other row that an index names must have been written before the kernel that
  // starts this sublayer (launch_exchange_norm).
  const std::int32_t* kv_slots;  // [T]
  // Out: the attention output, rotated back, as f16 under powers of two.
  std::uint16_t* o;  // f16 [T, num_heads * 512]
  float* o_scale;    // [num_heads * 512 / group, padded_rows(T)]: one a 32 (V4: 128) values
  // Of more than kHopRows rows: of q and the stored keys; of these alone, which come before (word
  // NULL: `before`); of o.
  Gate before, keys_done, done;
  // Of extra_idx and the rows that it names, where another kernel beside this one's predecessors
  // makes them; word NULL: they are there. With an extra_ratio only of the entries that the step
  // completes: rows that see none of these do not wait, so whoever writes x again has to.
  Gate selected;
  // Of few rows with kIndexTopk of num_extra: each slot of extra_idx comes with its tag
  // (HopBuffers::selected), so that only a row's last block waits for `selected`, when it has its
  // own. rows_done: of what the step stores of `extra`.
  bool tagged;
  Gate rows_done;
  int blocks_per_row;  // that share a row's keys: 2, 4, 8 or 16; 0: chosen by the rows
};

// Whether a selection is waited for before any of the selected keys is known.
constexpr bool attention_waits_for_keys(const AttentionParams& params) {
  return params.selected.word != nullptr && params.extra_ratio == 0;
}
// Blocks that share a row's keys: blocks_per_row, or as many as fit the device at two a
// multiprocessor; of more than kHopRows rows so few that they have room beside q's, but not where
// they wait for their keys when q is there.
constexpr int attention_blocks_per_row(const AttentionParams& params) {
  if (params.blocks_per_row != 0) return params.blocks_per_row;
  const int clusters = params.num_rows * (params.num_heads / 16);
  const int most = params.num_rows <= kHopRows || attention_waits_for_keys(params) ? 16 : 8;
  return clusters <= 12 ? most : clusters <= 24 ? 8 : clusters <= 48 ? 4 : 2;
}
// Blocks that open `done`.
constexpr std::uint32_t attention_blocks(const AttentionParams& params) {
  return static_cast<std::uint32_t>(attention_blocks_per_row(params) * params.num_rows *
                                    (params.num_heads / 16));
}

// cudaErrorInvalidValue for sizes out of range.
cudaError_t launch_sparse_attention(const AttentionParams& params, bool programmatic,
                                    cudaStream_t stream);

}  // namespace lowlat::nvidia::fused

// engram_lookup_sm90: rows of the n-gram tables for the tokens of a step.
//
// Math         id of each of 24 columns: rolling XOR of the mapped tokens' products, modulo a
//              prime, see stages/engram.hpp; then the row's 256 codes and 8 scales
// Shapes       tables e4m3 [rows,256] with ue8m0 [rows,8] · codes e4m3 [T,6144], scales fp32
// Rounding     none: the block-fp8 linear that follows quantises bf( code · scale ) in the same
//              groups of 32, which gives back the same values
// Bytes        6.3 KB a row, wherever the tables lie
// Launch       a block of 256 threads a row
// Ordering     gates (exchange_gate.cuh) or kernels' ends
// Determinism  integers and copies
// Meaning      reference/engram.cpp, exactly
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/engram.hpp"
#include "fused/exchange_gate.cuh"
#include "fused/front_launch.cuh"
#include "stages/engram.hpp"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = stages::kEngramColumns, kDim = kEngramWidth / kColumns, kGroup = 32;

__global__ void __launch_bounds__(kThreads)
    engram_lookup_sm90(const __grid_constant__ EngramParams params) {
  __shared__ std::int64_t ids[kColumns];
  sm90::launch_dependents();
  const int row = static_cast<int>(blockIdx.x), thread_idx = plat::thread_idx();
  const int request = row / params.rows.tokens, request_row = row % params.rows.tokens;
  if (thread_idx < kColumns) {
    std::int64_t tokens[stages::kEngramShifts];
    stages::engram_window(tokens, params.token_ids + row - request_row, request_row,
                          params.history + request * (stages::kEngramShifts - 1));
    stages::engram_hash<plat::Block<kThreads>>(ids, tokens, params.rows.positions[row],
                                               params.token_map, params.multipliers, params.primes,
                                               params.image_token, params.pad_token);
  }
  plat::block_sync();
  const int columns_of_shard = kColumns / params.table.num_shards;
  constexpr int kPieces = kDim / 16, kGroups = kDim / kGroup;
  for (int i = thread_idx; i < kColumns * kPieces; i += kThreads) {
    const int column = i / kPieces, shard = column / columns_of_shard;
    const std::int64_t at = ids[column] - params.table.first_row[shard];
    const uint4 v =
        __ldg(reinterpret_cast<const uint4*>(params.table.codes[shard] + at * kDim) + i % kPieces);
    *(reinterpret_cast<uint4*>(params.codes + static_cast<std::int64_t>(row) * kEngramWidth) + i) =
        v;
  }
  const int padded = padded_rows(params.rows.num_rows);
  for (int i = thread_idx; i < kColumns * kGroups; i += kThreads) {
    const int column = i / kGroups, shard = column / columns_of_shard;
    const std::int64_t at = ids[column] - params.table.first_row[shard];
    params.scale[i * padded + row] =
        stages::from_ue8m0(__ldg(params.table.scales[shard] + at * kGroups + i % kGroups));
  }
  open_gate(params.lookup_done);
}

}  // namespace

cudaError_t launch_engram_lookup(const EngramParams& params, bool programmatic,
                                 cudaStream_t stream) {
  const StepRows& rows = params.rows;
  if (rows.num_rows < 1 || rows.num_rows > kMaxFusedRows) return cudaErrorInvalidValue;
  if (rows.tokens < 1 || rows.num_rows % rows.tokens != 0) return cudaErrorInvalidValue;
  const int shards = params.table.num_shards;
  if (shards < 1 || shards > kEngramMaxShards || kColumns % shards != 0) {
    return cudaErrorInvalidValue;
  }
  return launch_kernel(engram_lookup_sm90, dim3(engram_lookup_blocks(rows.num_rows)), kThreads, 0,
                       1, programmatic, stream, params);
}

}  // namespace lowlat::nvidia::fused

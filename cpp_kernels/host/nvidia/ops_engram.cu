// Launches of the n-gram memory.
#include "host/nvidia/linear.cuh"
#include "host/nvidia/ops.cuh"
#include "host/op/models.hpp"
#include "stages/engram.hpp"

namespace lowlat::host::cuda {
namespace {

// A block a row.
__global__ void hash_kernel(std::int64_t* out, const std::int64_t* token,
                            const std::int64_t* history, const std::int64_t* pos,
                            const std::int64_t* map, const std::int64_t* mult,
                            const std::int64_t* prime, std::int64_t image_token) {
  __shared__ std::int64_t ids[stages::kEngramColumns];
  const std::int64_t t = blockIdx.x;
  const std::int64_t tokens[stages::kEngramShifts] = {token[t], history[3 * t + 2],
                                                      history[3 * t + 1], history[3 * t]};
  stages::engram_hash<Block>(ids, tokens, pos[t], map, mult, prime, image_token, kPadToken);
  plat::block_sync();
  const int i = plat::thread_idx();
  if (i < stages::kEngramColumns) out[t * stages::kEngramColumns + i] = ids[i];
}

// Block (x, y): column x of row y.
__global__ void lookup_kernel(std::uint16_t* out, const std::int64_t* ids,
                              const std::uint8_t* table, const std::uint8_t* scales, int dim) {
  const std::int64_t t = blockIdx.y;
  const auto column = static_cast<int>(blockIdx.x);
  stages::engram_lookup<Block>(out + t * stages::kEngramColumns * dim,
                               ids + t * stages::kEngramColumns, column, column + 1, table, scales,
                               0, dim);
}

// A block a row; out begins as the streams. kv: bf16 [T, 5, hidden].
__global__ void apply_kernel(std::uint16_t* out, const std::uint16_t* residual,
                             const std::uint16_t* kv, const std::uint16_t* q_weight,
                             const std::uint16_t* k_weight, int hidden, float eps) {
  using Apply = stages::EngramApply<Block>;
  __shared__ Apply::Scratch scratch;
  const std::int64_t t = blockIdx.x, n = std::int64_t{4} * hidden;
  for (int i = plat::thread_idx(); i < n; i += kThreads) out[t * n + i] = residual[t * n + i];
  plat::block_sync();
  Apply::run(out + t * n, kv + 5 * t * hidden, q_weight, k_weight, hidden, eps, scratch);
}

}  // namespace

void launch_engram_hash(DeviceCall& call) {
  launch(call, hash_kernel, dim3(call.size("T")), call.out<std::int64_t>("ids"),
         call.in<std::int64_t>("token"), call.in<std::int64_t>("history"),
         call.in<std::int64_t>("pos"), call.in<std::int64_t>("map"), call.in<std::int64_t>("mult"),
         call.in<std::int64_t>("prime"), call.args().scalar("image_token", kImageToken));
}

void launch_engram_lookup(DeviceCall& call) {
  require_at_most(call, "T", kMaxGridY);
  launch(call, lookup_kernel, dim3(stages::kEngramColumns, call.size("T")),
         call.out<std::uint16_t>("e"), call.in<std::int64_t>("ids"), call.in<std::uint8_t>("table"),
         call.in<std::uint8_t>("table_scale"), call.size("D"));
}

void launch_engram_apply(DeviceCall& call) {
  const ModelRules& rules = model_rules(call.model());
  const int rows = call.size("T"), hidden = call.size("H"), block = rules.scale_block;
  const int width = stages::kEngramColumns * call.size("D"), outputs = 5 * hidden;
  const float* x =
      quantized_rows(call, call.in<std::uint16_t>("e"), std::int64_t{rows} * width, block);
  auto* kv = call.scratch<std::uint16_t>(std::int64_t{rows} * outputs);
  const stages::E4m3Weights<stages::ScaleF32> wkv{
      call.in<std::uint8_t>("wkv"), width, {call.in<float>("wkv_scale"), width / block}, block};
  launch_linear(call, x, rows, width, wkv, outputs, StoreBf16{kv, outputs});
  launch(call, apply_kernel, dim3(rows), call.out<std::uint16_t>("residual"),
         call.in<std::uint16_t>("residual"), kv, call.in<std::uint16_t>("q_weight"),
         call.in<std::uint16_t>("k_weight"), hidden, static_cast<float>(rules.norm_eps));
}

}  // namespace lowlat::host::cuda

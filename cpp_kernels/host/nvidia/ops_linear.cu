// Launches of the linears, and the rows that they take.
#include "host/nvidia/linear.cuh"
#include "host/nvidia/ops.cuh"

namespace lowlat::host::cuda {
namespace {

__global__ void expand_kernel(float* out, const std::uint16_t* x, std::int64_t count) {
  const std::int64_t i = global_thread();
  if (i < count) out[i] = stages::from_bf16(x[i]);
}

// Each block has kGroupsOfBlock groups.
constexpr int kGroupsOfBlock = 64;
__global__ void quantize_kernel(float* out, const std::uint16_t* x, std::int64_t num_groups,
                                int group) {
  const std::int64_t first = std::int64_t{blockIdx.x} * kGroupsOfBlock;
  const std::int64_t rest = num_groups - first;
  const int num = rest < kGroupsOfBlock ? static_cast<int>(rest) : kGroupsOfBlock;
  stages::quantize_row<Block>(out + first * group, x + first * group, num * group, group);
}

}  // namespace

float* expanded_rows(DeviceCall& call, const std::uint16_t* x, std::int64_t count) {
  float* rows = call.scratch<float>(count);
  launch(call, expand_kernel, dim3(blocks_for(count)), rows, x, count);
  return rows;
}

float* quantized_rows(DeviceCall& call, const std::uint16_t* x, std::int64_t count, int group) {
  float* rows = call.scratch<float>(count);
  const std::int64_t num_groups = count / group;
  const std::int64_t num_blocks = (num_groups + kGroupsOfBlock - 1) / kGroupsOfBlock;
  launch(call, quantize_kernel, dim3(static_cast<unsigned>(num_blocks)), rows, x, num_groups,
         group);
  return rows;
}

void launch_block_linear(DeviceCall& call) {
  const int block = call.size("b"), k = call.size("K");
  const float* x =
      quantized_rows(call, call.in<std::uint16_t>("x"), call.dim("T") * call.dim("K"), block);
  const stages::E4m3Weights<stages::ScaleF32> weights{
      call.in<std::uint8_t>("w"), k, {call.in<float>("w_scale"), k / block}, block};
  launch_linear(call, x, call.size("T"), k, weights, call.size("N"),
                StoreBf16{call.out<std::uint16_t>("y"), call.dim("N")});
}

void launch_lm_head(DeviceCall& call) {
  const float* x = expanded_rows(call, call.in<std::uint16_t>("x"), call.dim("T") * call.dim("H"));
  launch_linear(call, x, call.size("T"), call.size("H"),
                stages::Bf16Weights{call.in<std::uint16_t>("w"), call.dim("H")}, call.size("V"),
                StoreBf16{call.out<std::uint16_t>("logits"), call.dim("V")});
}

}  // namespace lowlat::host::cuda

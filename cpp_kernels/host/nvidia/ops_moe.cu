// Launches of the router and of the experts.
#include <algorithm>
#include <bit>
#include <optional>

#include "fused/moe.hpp"
#include "host/nvidia/linear.cuh"
#include "host/nvidia/ops.cuh"
#include "host/op/models.hpp"
#include "shape/dsv41_flash.hpp"
#include "shape/dsv4_flash.hpp"
#include "stages/experts.hpp"
#include "stages/gate.hpp"

namespace lowlat::host::cuda {
namespace {

// A block a row. memory: fp32 [T, 2 num_experts].
__global__ void gate_kernel(std::int32_t* ids, float* weights, const float* logits,
                            const float* bias, int num_experts, int k, stages::GateSum sum_rule,
                            stages::GateRule rule, float* memory) {
  __shared__ stages::BlockBest<Block>::Scratch scratch;
  const std::int64_t t = blockIdx.x;
  stages::gate_select<Block>(ids + t * k, weights + t * k, logits + t * num_experts, bias,
                             num_experts, k, sum_rule, kRoutedScaling, memory + 2 * t * num_experts,
                             rule, scratch);
}

// A block a row. x: fp32 [T, hidden].
__global__ void hash_gate_kernel(std::int32_t* ids, float* weights, const std::int64_t* token,
                                 const std::int32_t* table, const float* x, stages::Bf16Weights w,
                                 int hidden, stages::GateRule rule) {
  __shared__ float logits[kTargetExperts];
  const std::int64_t t = blockIdx.x;
  const std::int32_t* chosen = table + token[t] * kTargetExperts;
  for (int slot = 0; slot < kTargetExperts; ++slot) {
    stages::linear<Block>(x + t * hidden, hidden, 1, hidden, w, chosen[slot], chosen[slot] + 1,
                          nullptr, [&](int, int, float z) { logits[slot] = z; });
  }
  plat::block_sync();
  const int slot = plat::thread_idx();
  if (slot < kTargetExperts) ids[t * kTargetExperts + slot] = chosen[slot];
  if (slot != 0) return;
  stages::gate_hash(weights + t * kTargetExperts, logits, kTargetExperts, kRoutedScaling, rule);
}

// Stacked [E, rows, k / 2] weights.
struct ExpertStack {
  const std::uint8_t* codes;
  const std::uint8_t* scales;
  std::int64_t rows;
  int k;

  LOWLAT_DEVICE stages::Fp4Weights of(std::int64_t expert) const {
    return {codes + expert * rows * (k / 2), k / 2, scales + expert * rows * (k / 32), k / 32};
  }
};

ExpertStack stack(const DeviceCall& call, const std::string& name, std::int64_t rows, int k) {
  return {call.in<std::uint8_t>(name.c_str()), call.in<std::uint8_t>((name + "_scale").c_str()),
          rows, k};
}

struct Pairs {
  std::int32_t* offsets;  // [E + 1]
  std::int32_t* pairs;    // [T slots]
};

__global__ void group_kernel(Pairs out, const std::int32_t* ids, int rows, int slots,
                             int num_experts) {
  stages::group_pairs<Block>(out.offsets, out.pairs, ids, rows, slots, num_experts);
}

// Block (x, y): a range of columns of h of expert y's pairs.
__global__ void gate_up_kernel(float* out_h, const float* x, ExpertStack w1, ExpertStack w3,
                               Pairs grouped, int slots, int hidden, int inner) {
  const auto expert = static_cast<int>(blockIdx.y);
  const int first = grouped.offsets[expert], num_own = grouped.offsets[expert + 1] - first;
  const int begin = kRowsOfBlock * static_cast<int>(blockIdx.x);
  const int end = begin + kRowsOfBlock < inner ? begin + kRowsOfBlock : inner;
  stages::expert_gate_up<Block>(out_h, x, w1.of(expert), w3.of(expert), grouped.pairs + first,
                                num_own, slots, hidden, inner, begin, end, kSwigluLimit, nullptr);
}

// Block (x, y): a range of columns of d of expert y's pairs.
__global__ void down_kernel(std::uint16_t* out_d, const float* h, ExpertStack w2, Pairs grouped,
                            const float* weights, int inner, int hidden) {
  const auto expert = static_cast<int>(blockIdx.y);
  const int first = grouped.offsets[expert], num_own = grouped.offsets[expert + 1] - first;
  const int begin = kRowsOfBlock * static_cast<int>(blockIdx.x);
  const int end = begin + kRowsOfBlock < hidden ? begin + kRowsOfBlock : hidden;
  stages::expert_down<Block>(out_d, h, w2.of(expert), grouped.pairs + first, num_own, weights,
                             inner, hidden, begin, end, nullptr);
}

__global__ void swiglu_kernel(std::uint16_t* out_h, const std::uint16_t* gate,
                              const std::uint16_t* up, std::int64_t count) {
  const std::int64_t i = global_thread();
  if (i < count) out_h[i] = stages::shared_swiglu(gate[i], up[i], kSwigluLimit);
}

// A block a row.
__global__ void sum_kernel(float* out, const std::uint16_t* d, const std::uint16_t* shared,
                           int slots, int hidden) {
  const std::int64_t t = blockIdx.x;
  stages::expert_sum<Block>(out + t * hidden, d + t * slots * hidden, shared + t * hidden, slots,
                            hidden, 0, hidden);
}

// The shared expert's output, bf16 [T, H].
std::uint16_t* launch_shared_expert(DeviceCall& call) {
  const int rows = call.size("T"), hidden = call.size("H"), inner = call.size("I");
  const int block = call.size("b");
  const auto product = [&](const float* x, const std::string& name, int n, int k) {
    auto* y = call.scratch<std::uint16_t>(std::int64_t{rows} * n);
    const stages::E4m3Weights<stages::ScaleF32> weights{
        call.in<std::uint8_t>(name.c_str()),
        k,
        {call.in<float>((name + "_scale").c_str()), k / block},
        block};
    launch_linear(call, x, rows, k, weights, n, StoreBf16{y, n});
    return y;
  };
  const std::int64_t count = std::int64_t{rows} * inner;
  const float* x =
      quantized_rows(call, call.in<std::uint16_t>("x"), std::int64_t{rows} * hidden, block);
  const std::uint16_t* gate = product(x, "shared_w1", inner, hidden);
  const std::uint16_t* up = product(x, "shared_w3", inner, hidden);
  auto* h = call.scratch<std::uint16_t>(count);
  launch(call, swiglu_kernel, dim3(blocks_for(count)), h, gate, up, count);
  return product(quantized_rows(call, h, count, block), "shared_w2", hidden, inner);
}

// ------------------------------------------------------------------------------------- fused

template <class S>
bool has_sizes(const DeviceCall& call) {
  return call.dim("H") == S::kHidden && call.dim("I") == S::kIntermediateLocal &&
         call.dim("k") == S::kExpertsPerToken && call.dim("E") <= S::kNumExperts;
}

// The compiled shape of these sizes, or none. Which experts there are beside the chosen ones is
// nothing to a launch whose routing is given.
std::optional<fused::MoeShape> moe_shape(const DeviceCall& call) {
  if (call.model() == "v41") {
    if (has_sizes<shape::Dsv41Flash<4>>(call)) return fused::MoeShape::v41_tp4;
    return {};
  }
  if (has_sizes<shape::Dsv4Flash<2>>(call)) return fused::MoeShape::v4_tp2;
  if (has_sizes<shape::Dsv4Flash<4>>(call)) return fused::MoeShape::v4_tp4;
  return {};
}

// Whether the fused kernel declares its numerics for these values (fused/moe.hpp): scales in its
// range, those of the shared expert powers of two, no expert twice in a row.
bool fused_takes(const OpArgs& args) {
  for (const char* name : {"w1_scale", "w3_scale", "w2_scale"}) {
    const auto codes = args.in<std::uint8_t>(name);
    if (!std::all_of(codes.begin(), codes.end(),
                     [](std::uint8_t code) { return code >= 1 && code <= 254; })) {
      return false;
    }
  }
  for (const char* name : {"shared_w1_scale", "shared_w3_scale", "shared_w2_scale"}) {
    const auto scales = args.in<float>(name);
    if (!std::all_of(scales.begin(), scales.end(), [](float scale) {
          const std::uint32_t bits = std::bit_cast<std::uint32_t>(scale);
          return (bits & 0x807f'ffffu) == 0 && bits >> 23 >= 1 && bits >> 23 <= 134;
        })) {
      return false;
    }
  }
  const auto ids = args.in<std::int32_t>("ids");
  const auto slots = static_cast<std::size_t>(args.dim("k"));
  for (std::size_t row = 0; row < ids.size(); row += slots) {
    for (std::size_t i = row; i < row + slots; ++i) {
      if (std::find(ids.begin() + row, ids.begin() + i, ids[i]) != ids.begin() + i) return false;
    }
  }
  return true;
}

// ue8m0 codes of fp32 powers of two.
__global__ void scale_codes_kernel(std::uint8_t* codes, const float* scales, std::int64_t count) {
  const std::int64_t i = global_thread();
  if (i < count) codes[i] = static_cast<std::uint8_t>(__float_as_uint(scales[i]) >> 23);
}

void launch_fused_experts(DeviceCall& call, fused::MoeShape shape) {
  const auto routed = [&](const char* name) {
    return fused::MoeMatrix{call.in<std::uint8_t>(name),
                            call.in<std::uint8_t>((std::string(name) + "_scale").c_str())};
  };
  const auto shared = [&](const std::string& name) {
    const std::int64_t count = (call.dim("H") / call.dim("b")) * (call.dim("I") / call.dim("b"));
    auto* codes = call.scratch<std::uint8_t>(count);
    launch(call, scale_codes_kernel, dim3(blocks_for(count)), codes,
           call.in<float>((name + "_scale").c_str()), count);
    return fused::MoeMatrix{call.in<std::uint8_t>(name.c_str()), codes};
  };
  fused::MoeArgs args = {};
  args.rows = call.size("T");
  args.routing = fused::MoeRouting::given;
  args.x = call.in<std::uint16_t>("x");
  args.ids = call.in<std::int32_t>("ids");
  args.weights = call.in<float>("weight");
  args.w.w1 = routed("w1");
  args.w.w3 = routed("w3");
  args.w.w2 = routed("w2");
  args.w.shared_w1 = shared("shared_w1");
  args.w.shared_w3 = shared("shared_w3");
  args.w.shared_w2 = shared("shared_w2");
  args.out = call.out<float>("y");
  args.fault.budget_ns = kWorkBudgetNs / 2;
  args.workspace =
      call.scratch<unsigned char>(static_cast<std::int64_t>(fused::moe_workspace_bytes(shape)));
  check(static_cast<cudaError_t>(fused::moe_workspace_init(shape, args.workspace, call.stream())),
        "the experts' workspace");
  check(static_cast<cudaError_t>(fused::launch_moe_region(shape, args, call.stream(), false)),
        "the experts' launch");
}

}  // namespace

void launch_gate(DeviceCall& call) {
  const int rows = call.size("T"), hidden = call.size("H"), num_experts = call.size("E");
  const float* x = expanded_rows(call, call.in<std::uint16_t>("x"), std::int64_t{rows} * hidden);
  float* logits = call.scratch<float>(std::int64_t{rows} * num_experts);
  launch_linear(call, x, rows, hidden, stages::Bf16Weights{call.in<std::uint16_t>("w"), hidden},
                num_experts, StoreF32{logits, num_experts});
  launch(call, gate_kernel, dim3(rows), call.out<std::int32_t>("ids"), call.out<float>("weight"),
         logits, call.in<float>("bias"), num_experts, call.size("k"),
         gate_sum(call.model(), call.dim("k")), model_rules(call.model()).gate_rule,
         call.scratch<float>(2 * std::int64_t{rows} * num_experts));
}

void launch_hash_gate(DeviceCall& call) {
  const int hidden = call.size("H");
  const float* x = expanded_rows(call, call.in<std::uint16_t>("x"), call.dim("T") * hidden);
  launch(call, hash_gate_kernel, dim3(call.size("T")), call.out<std::int32_t>("ids"),
         call.out<float>("weight"), call.in<std::int64_t>("token"), call.in<std::int32_t>("table"),
         x, stages::Bf16Weights{call.in<std::uint16_t>("w"), hidden}, hidden,
         model_rules(call.model()).gate_rule);
}

void launch_experts(DeviceCall& call) {
  const int rows = call.size("T"), hidden = call.size("H"), inner = call.size("I");
  const int slots = call.size("k"), num_experts = call.size("E");
  const std::optional<fused::MoeShape> shape = moe_shape(call);
  if (shape.has_value() && fused_takes(call.args())) {
    launch_fused_experts(call, *shape);
    return;
  }
  require_at_most(call, "E", kMaxGridY);
  const std::int64_t num_pairs = std::int64_t{rows} * slots;
  const float* x = expanded_rows(call, call.in<std::uint16_t>("x"), std::int64_t{rows} * hidden);
  const Pairs grouped{call.scratch<std::int32_t>(num_experts + 1),
                      call.scratch<std::int32_t>(num_pairs)};
  const auto blocks = [](int columns) { return (columns + kRowsOfBlock - 1) / kRowsOfBlock; };
  launch(call, group_kernel, dim3(1), grouped, call.in<std::int32_t>("ids"), rows, slots,
         num_experts);
  float* h = call.scratch<float>(num_pairs * inner);
  launch(call, gate_up_kernel, dim3(blocks(inner), num_experts), h, x,
         stack(call, "w1", inner, hidden), stack(call, "w3", inner, hidden), grouped, slots, hidden,
         inner);
  auto* d = call.scratch<std::uint16_t>(num_pairs * hidden);
  launch(call, down_kernel, dim3(blocks(hidden), num_experts), d, h,
         stack(call, "w2", hidden, inner), grouped, call.in<float>("weight"), inner, hidden);
  const std::uint16_t* shared = launch_shared_expert(call);
  launch(call, sum_kernel, dim3(rows), call.out<float>("y"), d, shared, slots, hidden);
}

}  // namespace lowlat::host::cuda

// Operations of the mixture of experts: the router and the experts.
#include <algorithm>
#include <string>

#include "host/op/models.hpp"
#include "host/op/registry.hpp"
#include "platform/scalar.hpp"
#include "reference/experts.hpp"
#include "reference/gate.hpp"
#include "stages/experts.hpp"
#include "stages/gate.hpp"
#include "stages/linear.hpp"

namespace lowlat::host {
namespace {

namespace stages = lowlat::scalar::stages;

std::vector<float> expand_rows(std::span<const std::uint16_t> rows) {
  std::vector<float> values(rows.size());
  stages::expand_bf16(values.data(), rows.data(), static_cast<int>(rows.size()));
  return values;
}

OpSpec gate() {
  OpSpec op;
  op.name = "gate";
  op.models = "v4 v41";
  op.about =
      "the k experts of greatest sqrt(softplus(x w^T)) + bias, ties to the lowest id, and their "
      "weights: score / sum of the k * 1.5. The sum gets 1e-20 added (v41's target, k = 6), or "
      "counts as 1 where it is 0 (v41's draft, k = 3, and v4). softplus in fp32: v41 z > 20 ? z : "
      "log1p(exp(z)), v4 max(z, 0) + log1p(exp(-|z|))";
  op.in = {{"x", LOWLAT_BF16, "bf16", "T,H", false, "rows"},
           {"w", LOWLAT_BF16, "bf16", "E,H", false, "router"},
           {"bias", LOWLAT_F32, "f32", "E", false, "ranks, does not weigh"},
           {"k", LOWLAT_I64, "i64", "", true, "experts a token: 6 (when absent), v41 also 3"}};
  op.out = {{"ids", LOWLAT_I32, "i32", "T,k", false, "in selection order"},
            {"weight", LOWLAT_F32, "f32", "T,k", false, "the factor 1.5 included"}};
  op.numerics = {
      {"scalar nvidia", "ids", "equal but for experts whose float64 score + bias are within 1e-5"},
      {"scalar nvidia", "weight", "rel_l2 <= 1e-5 over rows without a logit below -80"}};
  op.check = [spec = op](OpArgs& a) {
    const std::int64_t k = a.scalar("k", kTargetExperts);
    const std::int64_t draft = model_rules(a.model()).draft_experts;
    require(k == kTargetExperts || k == draft,
            "k is " + std::to_string(k) + "; needed 6" +
                (draft == kTargetExperts ? ", in v4's target and draft alike"
                                         : " (target) or 3 (draft)"));
    a.set_dim("k", k);
    require_dim(a, "E", kTargetExperts, 1);
    require_dim(a, "H", 1, 1);
    require_all_finite(a, spec);
  };
  op.reference = [](const OpArgs& a) {
    const bool one_for_zero = gate_sum(a.model(), a.dim("k")) == stages::GateSum::draft;
    reference::gate(a.out<std::int32_t>("ids").data(), a.out<float>("weight").data(),
                    a.in<std::uint16_t>("x").data(), a.in<std::uint16_t>("w").data(),
                    a.in<float>("bias").data(), a.dim("T"), a.dim("H"), a.dim("E"), a.dim("k"),
                    one_for_zero);
  };
  op.scalar = [](const OpArgs& a) {
    const auto rows = static_cast<int>(a.dim("T")), hidden = static_cast<int>(a.dim("H"));
    const auto num_experts = static_cast<int>(a.dim("E")), k = static_cast<int>(a.dim("k"));
    const std::vector<float> x = expand_rows(a.in<std::uint16_t>("x"));
    std::vector<float> w_row(hidden), scratch(2 * static_cast<std::size_t>(num_experts));
    std::vector<float> logits(static_cast<std::size_t>(rows) * num_experts);
    const stages::Bf16Weights w = {a.in<std::uint16_t>("w").data(), hidden};
    stages::linear(
        x.data(), hidden, rows, hidden, w, 0, num_experts, w_row.data(),
        [&](int t, int e, float z) { logits[static_cast<std::size_t>(t) * num_experts + e] = z; });
    for (int t = 0; t < rows; ++t) {
      stages::gate_select(
          a.out<std::int32_t>("ids").data() + t * k, a.out<float>("weight").data() + t * k,
          &logits[static_cast<std::size_t>(t) * num_experts], a.in<float>("bias").data(),
          num_experts, k, gate_sum(a.model(), a.dim("k")), kRoutedScaling, scratch.data(),
          model_rules(a.model()).gate_rule);
    }
  };
  return op;
}

OpSpec hash_gate() {
  OpSpec op;
  op.name = "hash_gate";
  op.models = "v4";
  op.about =
      "the six experts that a hash layer's table names for each token, in its order, and their "
      "weights: sqrt(softplus(x w^T)) / (sum of the six + 1e-20) * 1.5";
  op.in = {{"token", LOWLAT_I64, "i64", "T", false, "token of each row, 0 .. V - 1"},
           {"table", LOWLAT_I32, "i32", "V,6", false, "experts of each token, 0 .. E - 1"},
           {"x", LOWLAT_BF16, "bf16", "T,H", false, "rows"},
           {"w", LOWLAT_BF16, "bf16", "E,H", false, "router"}};
  op.out = {{"ids", LOWLAT_I32, "i32", "T,6", false, "in the table's order"},
            {"weight", LOWLAT_F32, "f32", "T,6", false, "the factor 1.5 included"}};
  op.numerics = {{"scalar nvidia", "ids", "bitwise"},
                 {"scalar nvidia", "weight", "rel_l2 <= 1e-5 over rows without a logit below -80"}};
  op.check = [spec = op](OpArgs& a) {
    require_dim(a, "E", kTargetExperts, 1);
    require_dim(a, "H", 1, 1);
    require_dim(a, "V", 1, 1);
    require_all_finite(a, spec);
    require_range(a, "token", 0, a.dim("V") - 1, "V = " + std::to_string(a.dim("V")));
    require_range(a, "table", 0, a.dim("E") - 1, "E = " + std::to_string(a.dim("E")));
  };
  op.reference = [](const OpArgs& a) {
    reference::hash_gate(a.out<std::int32_t>("ids").data(), a.out<float>("weight").data(),
                         a.in<std::int64_t>("token").data(), a.in<std::int32_t>("table").data(),
                         a.in<std::uint16_t>("x").data(), a.in<std::uint16_t>("w").data(),
                         a.dim("T"), a.dim("H"), kTargetExperts);
  };
  op.scalar = [](const OpArgs& a) {
    const auto hidden = static_cast<int>(a.dim("H"));
    const std::vector<float> x = expand_rows(a.in<std::uint16_t>("x"));
    std::vector<float> w_row(hidden);
    const stages::Bf16Weights w = {a.in<std::uint16_t>("w").data(), hidden};
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      const std::int32_t* chosen =
          a.in<std::int32_t>("table").data() + a.in<std::int64_t>("token")[t] * kTargetExperts;
      float logits[kTargetExperts];
      for (int slot = 0; slot < kTargetExperts; ++slot) {
        a.out<std::int32_t>("ids")[t * kTargetExperts + slot] = chosen[slot];
        stages::linear(&x[t * hidden], hidden, 1, hidden, w, chosen[slot], chosen[slot] + 1,
                       w_row.data(), [&](int, int, float z) { logits[slot] = z; });
      }
      stages::gate_hash(a.out<float>("weight").data() + t * kTargetExperts, logits, kTargetExperts,
                        kRoutedScaling, model_rules(a.model()).gate_rule);
    }
  };
  return op;
}

// One expert's rows of a stacked [E, rows, k/2] weight.
stages::Fp4Weights expert_weights(const OpArgs& a, const std::string& name, std::int64_t expert,
                                  std::int64_t rows, std::int64_t k) {
  return {a.in<std::uint8_t>(name).data() + expert * rows * (k / 2), k / 2,
          a.in<std::uint8_t>(name + "_scale").data() + expert * rows * (k / 32), k / 32};
}

stages::E4m3Weights<stages::ScaleF32> shared_weights(const OpArgs& a, const std::string& name,
                                                     std::int64_t k) {
  return {a.in<std::uint8_t>(name).data(),
          k,
          {a.in<float>(name + "_scale").data(), k / a.dim("b")},
          static_cast<int>(a.dim("b"))};
}

// The shared expert's output, bf16 [T, H].
std::vector<std::uint16_t> shared_expert(const OpArgs& a) {
  const auto rows = static_cast<int>(a.dim("T")), hidden = static_cast<int>(a.dim("H"));
  const auto inner = static_cast<int>(a.dim("I"));
  const auto block = static_cast<int>(a.dim("b"));
  const auto quantised = [rows, block](const std::uint16_t* x, int k) {
    std::vector<float> out(static_cast<std::size_t>(rows) * k);
    for (std::int64_t t = 0; t < rows; ++t) {
      stages::quantize_row(&out[t * k], x + t * k, k, block);
    }
    return out;
  };
  const auto product = [rows](const std::vector<float>& x, int k, const auto& weights, int n) {
    std::vector<std::uint16_t> y(static_cast<std::size_t>(rows) * n);
    std::vector<float> w_row(k);
    stages::linear(x.data(), k, rows, k, weights, 0, n, w_row.data(), [&](int t, int col, float v) {
      y[static_cast<std::size_t>(t) * n + col] = stages::to_bf16(v);
    });
    return y;
  };
  const std::vector<float> x = quantised(a.in<std::uint16_t>("x").data(), hidden);
  std::vector<std::uint16_t> h = product(x, hidden, shared_weights(a, "shared_w1", hidden), inner);
  const std::vector<std::uint16_t> up =
      product(x, hidden, shared_weights(a, "shared_w3", hidden), inner);
  for (std::size_t i = 0; i < h.size(); ++i) {
    h[i] = stages::shared_swiglu(h[i], up[i], kSwigluLimit);
  }
  return product(quantised(h.data(), inner), inner, shared_weights(a, "shared_w2", inner), hidden);
}

OpSpec experts() {
  OpSpec op;
  op.name = "experts";
  op.models = "v4 v41";
  op.about =
      "the weighted sum of each row's routed experts plus the shared expert. Routed (W4A16, "
      "Marlin's "
      "roundings): gate and up, silu, their product and weight * down to bf16, the slots added in "
      "fp32 and rounded to bf16. Shared: block-fp8 linears with quantised input, bf16 outputs. "
      "Both are added in fp32 and not rounded again. On nvidia the fused kernel runs it where k is "
      "6, a shape of its is built (v41 H 5120, I 576 or 1152; v4 H 4096, I 512 or 1024), no fp4 "
      "scale is 2^-127 or NaN, shared scales are powers of two up to 2^7, and no row names an "
      "expert twice";
  op.in = {{"x", LOWLAT_BF16, "bf16", "T,H", false, "rows"},
           {"w1", LOWLAT_U8, "fp4", "E,I,H/2", false, "gate; even column in the low nibble"},
           {"w1_scale", LOWLAT_U8, "ue8m0", "E,I,H/32", false, "one a 32 columns"},
           {"w3", LOWLAT_U8, "fp4", "E,I,H/2", false, "up"},
           {"w3_scale", LOWLAT_U8, "ue8m0", "E,I,H/32", false, "one a 32 columns"},
           {"w2", LOWLAT_U8, "fp4", "E,H,I/2", false, "down"},
           {"w2_scale", LOWLAT_U8, "ue8m0", "E,H,I/32", false, "one a 32 columns"},
           {"ids", LOWLAT_I32, "i32", "T,k", false, "experts of each row, 0 .. E - 1"},
           {"weight", LOWLAT_F32, "f32", "T,k", false, "their weights"},
           {"shared_w1", LOWLAT_U8, "e4m3", "I,H", false, "gate of the shared expert"},
           {"shared_w1_scale", LOWLAT_F32, "f32", "I/b,H/b", false, "b is 128 (v4) or 32 (v41)"},
           {"shared_w3", LOWLAT_U8, "e4m3", "I,H", false, "up of the shared expert"},
           {"shared_w3_scale", LOWLAT_F32, "f32", "I/b,H/b", false, "b is 128 (v4) or 32 (v41)"},
           {"shared_w2", LOWLAT_U8, "e4m3", "H,I", false, "down of the shared expert"},
           {"shared_w2_scale", LOWLAT_F32, "f32", "H/b,I/b", false, "one a b x b block"}};
  op.out = {{"y", LOWLAT_F32, "f32", "T,H", false, "routed + shared"}};
  // Marlin's roundings are the routed part's: 4e-3 on average, 8e-3 where T = 1, H = I = 32.
  op.numerics = {{"scalar nvidia", "y", "rel_l2 <= 1e-2"}};
  op.check = [spec = op](OpArgs& a) {
    require_dim(a, "E", kTargetExperts, 1);
    require_dim(a, "k", 1, 1);
    const std::int64_t block = model_rules(a.model()).scale_block;
    require(a.dim("b") == block, "shared_w1_scale has blocks of " + std::to_string(a.dim("b")) +
                                     "; " + a.model() + " has blocks of " + std::to_string(block));
    require_dim(a, "H", block, block);
    require_dim(a, "I", block, block);
    require_all_finite(a, spec);
    require_range(a, "ids", 0, a.dim("E") - 1, "E = " + std::to_string(a.dim("E")));
  };
  op.reference = [](const OpArgs& a) {
    const auto routed = [&a](const std::string& name) {
      return reference::Fp4Stack{a.in<std::uint8_t>(name).data(),
                                 a.in<std::uint8_t>(name + "_scale").data()};
    };
    const auto shared = [&a](const std::string& name) {
      return reference::E4m3Matrix{a.in<std::uint8_t>(name).data(),
                                   a.in<float>(name + "_scale").data()};
    };
    reference::experts(a.out<float>("y").data(), a.in<std::uint16_t>("x").data(), routed("w1"),
                       routed("w3"), routed("w2"), a.in<std::int32_t>("ids").data(),
                       a.in<float>("weight").data(), shared("shared_w1"), shared("shared_w3"),
                       shared("shared_w2"), a.dim("T"), a.dim("H"), a.dim("I"), a.dim("k"),
                       a.dim("b"));
  };
  op.scalar = [](const OpArgs& a) {
    const auto rows = static_cast<int>(a.dim("T")), hidden = static_cast<int>(a.dim("H"));
    const auto inner = static_cast<int>(a.dim("I")), slots = static_cast<int>(a.dim("k"));
    const auto num_experts = static_cast<int>(a.dim("E"));
    const auto num_pairs = static_cast<std::size_t>(rows) * slots;
    const std::vector<float> x = expand_rows(a.in<std::uint16_t>("x"));
    std::vector<std::int32_t> offsets(num_experts + 1), pairs(num_pairs);
    stages::group_pairs(offsets.data(), pairs.data(), a.in<std::int32_t>("ids").data(), rows, slots,
                        num_experts);
    std::vector<float> h(num_pairs * inner), scratch(std::max(2 * hidden, inner));
    std::vector<std::uint16_t> d(num_pairs * hidden);
    for (int e = 0; e < num_experts; ++e) {
      const std::int32_t* own = pairs.data() + offsets[e];
      const int num_own = offsets[e + 1] - offsets[e];
      if (num_own == 0) continue;
      stages::expert_gate_up(h.data(), x.data(), expert_weights(a, "w1", e, inner, hidden),
                             expert_weights(a, "w3", e, inner, hidden), own, num_own, slots, hidden,
                             inner, 0, inner, kSwigluLimit, scratch.data());
      stages::expert_down(d.data(), h.data(), expert_weights(a, "w2", e, hidden, inner), own,
                          num_own, a.in<float>("weight").data(), inner, hidden, 0, hidden,
                          scratch.data());
    }
    const std::vector<std::uint16_t> shared = shared_expert(a);
    for (std::int64_t t = 0; t < rows; ++t) {
      stages::expert_sum(a.out<float>("y").data() + t * hidden, &d[t * slots * hidden],
                         &shared[t * hidden], slots, hidden, 0, hidden);
    }
  };
  return op;
}

}  // namespace

std::vector<OpSpec> ops_moe() { return {gate(), hash_gate(), experts()}; }

}  // namespace lowlat::host

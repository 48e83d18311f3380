// Operations that multiply rows by a weight matrix.
#include "host/op/registry.hpp"
#include "platform/scalar.hpp"
#include "reference/linear.hpp"
#include "stages/linear.hpp"

namespace lowlat::host {
namespace {

namespace stages = lowlat::scalar::stages;

// Products of larger numbers leave fp32 when a row of them is summed.
constexpr double kMaxMagnitude = 1e15;

// y[t, n] = bf16 of every result of the linear stage over all of w's rows.
template <class Weights>
void run_linear(std::span<std::uint16_t> y, const std::vector<float>& x, const Weights& weights,
                std::int64_t num_rows, std::int64_t n, std::int64_t k) {
  std::vector<float> w_row(static_cast<std::size_t>(k));
  stages::linear(x.data(), k, static_cast<int>(num_rows), static_cast<int>(k), weights, 0,
                 static_cast<int>(n), w_row.data(),
                 [&](int t, int out, float v) { y[t * n + out] = stages::to_bf16(v); });
}

OpSpec block_linear() {
  OpSpec op;
  op.name = "block_linear";
  op.models = "v4 v41";
  op.about =
      "y = quantised(x) . (w * scale)^T: x to e4m3 in groups of b along K with a power of two each "
      "(2^ceil(log2(max(amax, 1e-10) / 448))), fp32 sums, y to bf16; magnitudes up to 1e15";
  op.in = {{"x", LOWLAT_BF16, "bf16", "T,K", false, "activations"},
           {"w", LOWLAT_U8, "e4m3", "N,K", false, "weight codes"},
           {"w_scale", LOWLAT_F32, "f32", "N/b,K/b", false, "a scale for each block of w"},
           {"block", LOWLAT_I64, "i64", "", false, "b: 128 (V4's) or 32 (V4.1's)"}};
  op.out = {{"y", LOWLAT_BF16, "bf16", "T,N", false, "rows of results"}};
  op.numerics = {{"scalar nvidia", "y", "rel_l2 <= 4e-3"}};
  op.check = [op](OpArgs& a) {
    const std::int64_t block = a.in<std::int64_t>("block")[0];
    require(block == 32 || block == 128,
            "block is " + std::to_string(block) + "; needed 32 or 128");
    require_dim(a, "N", block, block);
    require_dim(a, "K", block, block);
    require(a.dim("b") == block, "w_scale has blocks of " + std::to_string(a.dim("b")) +
                                     "; needed block = " + std::to_string(block));
    require_all_finite(a, op, kMaxMagnitude);
  };
  op.reference = [](const OpArgs& a) {
    reference::block_linear(a.out<std::uint16_t>("y").data(), a.in<std::uint16_t>("x").data(),
                            a.in<std::uint8_t>("w").data(), a.in<float>("w_scale").data(),
                            a.dim("T"), a.dim("N"), a.dim("K"), a.dim("b"));
  };
  op.scalar = [](const OpArgs& a) {
    const std::int64_t rows = a.dim("T"), k = a.dim("K"), block = a.dim("b");
    std::vector<float> x(static_cast<std::size_t>(rows * k));
    for (std::int64_t t = 0; t < rows; ++t) {
      stages::quantize_row(x.data() + t * k, a.in<std::uint16_t>("x").data() + t * k,
                           static_cast<int>(k), static_cast<int>(block));
    }
    const stages::E4m3Weights<stages::ScaleF32> weights{a.in<std::uint8_t>("w").data(),
                                                        k,
                                                        {a.in<float>("w_scale").data(), k / block},
                                                        static_cast<int>(block)};
    run_linear(a.out<std::uint16_t>("y"), x, weights, rows, a.dim("N"), k);
  };
  return op;
}

OpSpec lm_head() {
  OpSpec op;
  op.name = "lm_head";
  op.models = "v4 v41";
  op.about = "logits = x . w^T, fp32 sums, rounded to bf16; magnitudes up to 1e15";
  op.in = {{"x", LOWLAT_BF16, "bf16", "T,H", false, "normed rows"},
           {"w", LOWLAT_BF16, "bf16", "V,H", false, "head weights, a row a token"}};
  op.out = {{"logits", LOWLAT_BF16, "bf16", "T,V", false, "one for each token"}};
  op.numerics = {{"scalar nvidia", "logits", "rel_l2 <= 4e-3"}};
  op.check = [op](OpArgs& a) {
    require_dim(a, "H", 1, 1);
    require_dim(a, "V", 1, 1);
    require_all_finite(a, op, kMaxMagnitude);
  };
  op.reference = [](const OpArgs& a) {
    reference::bf16_linear(a.out<std::uint16_t>("logits").data(), a.in<std::uint16_t>("x").data(),
                           a.in<std::uint16_t>("w").data(), a.dim("T"), a.dim("V"), a.dim("H"));
  };
  op.scalar = [](const OpArgs& a) {
    const std::int64_t rows = a.dim("T"), k = a.dim("H");
    std::vector<float> x(static_cast<std::size_t>(rows * k));
    stages::expand_bf16(x.data(), a.in<std::uint16_t>("x").data(), static_cast<int>(rows * k));
    run_linear(a.out<std::uint16_t>("logits"), x,
               stages::Bf16Weights{a.in<std::uint16_t>("w").data(), k}, rows, a.dim("V"), k);
  };
  return op;
}

}  // namespace

std::vector<OpSpec> ops_linear() { return {block_linear(), lm_head()}; }

}  // namespace lowlat::host

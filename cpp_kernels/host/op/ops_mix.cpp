// Operations that mix and norm rows: hyper-connections, norms, the sum over ranks. eps of a norm is
// 1e-6 (v4) or 1e-20 (v41).
#include <algorithm>
#include <cmath>
#include <string>

#include "host/op/models.hpp"
#include "host/op/registry.hpp"
#include "platform/scalar.hpp"
#include "reference/format.hpp"
#include "reference/hc.hpp"
#include "reference/norm.hpp"
#include "reference/rank_sum.hpp"
#include "stages/hc.hpp"
#include "stages/norm.hpp"
#include "stages/rank_sum.hpp"

namespace lowlat::host {
namespace {

namespace stages = lowlat::scalar::stages;
using Block = lowlat::scalar::plat::Block<256>;
using RmsNorm = stages::RmsNorm<Block>;

constexpr std::int64_t kMaxRanks = 64;

// Squares and products of larger numbers leave fp32 when a row of them is summed.
constexpr double kMaxMagnitude = 1e15;

void check_rows(const OpArgs& args, const OpSpec& spec) {
  require_dim(args, "H", 1, 1);
  require_all_finite(args, spec, kMaxMagnitude);
}

// The norm squares what a combine gives, which may be the product of two large numbers.
void check_combined(const OpArgs& args) {
  constexpr double kMaxCombined = 1e17;
  const std::int64_t hidden = args.dim("H");
  const auto residual = args.in<std::uint16_t>("residual");
  for (std::int64_t t = 0; t < args.dim("T"); ++t) {
    double sum = 0.0;
    for (std::int64_t k = 4 * t; k < 4 * t + 4; ++k) {
      double most = 0.0;
      for (std::int64_t i = k * hidden; i < (k + 1) * hidden; ++i) {
        most = std::max(most, std::abs(reference::from_bf16(residual[i])));
      }
      sum += std::abs(static_cast<double>(args.in<float>("pre")[k])) * most;
    }
    require(sum <= kMaxCombined, "pre and residual of row " + std::to_string(t) +
                                     " may combine to more than 1e17; needed smaller ones");
  }
}

OpSpec hc_stats() {
  OpSpec op;
  op.name = "hc_stats";
  op.models = "v4 v41";
  op.about =
      "what a sublayer mixes the four residual streams with: m = fn . x / sqrt(mean(x^2) + eps), "
      "eps 1e-6 (v4) or 1e-20 (v41), pre = sigmoid + 1e-6, post = 2 sigmoid, comb = 20 Sinkhorn "
      "passes; magnitudes up to 1e15";
  op.in = {{"residual", LOWLAT_BF16, "bf16", "T,4,H", false, "residual streams"},
           {"fn", LOWLAT_F32, "f32", "24,4H", false, "rows: 4 pre, 4 post, 16 comb (in, out)"},
           {"base", LOWLAT_F32, "f32", "24", false, "added to each of the 24"},
           {"scale", LOWLAT_F32, "f32", "3", false, "factors of pre, post and comb"}};
  op.out = {{"pre", LOWLAT_F32, "f32", "T,4", false, "weights of the next combine"},
            {"post", LOWLAT_F32, "f32", "T,4", false, "weights of the sublayer's output"},
            {"comb", LOWLAT_F32, "f32", "T,4,4", false, "stream j in, stream k out"}};
  op.numerics = {{"scalar nvidia", "pre", "rel_l2 <= 2e-5"},
                 {"scalar nvidia", "post", "rel_l2 <= 2e-5"},
                 {"scalar nvidia", "comb", "rel_l2 <= 2e-5"}};
  op.check = [op](OpArgs& a) { check_rows(a, op); };
  op.reference = [](const OpArgs& a) {
    reference::hc_stats(a.out<float>("pre").data(), a.out<float>("post").data(),
                        a.out<float>("comb").data(), a.in<std::uint16_t>("residual").data(),
                        a.in<float>("fn").data(), a.in<float>("base").data(),
                        a.in<float>("scale").data(), a.dim("T"), a.dim("H"),
                        model_rules(a.model()).norm_eps, kHcEps, kSinkhornIters);
  };
  op.scalar = [](const OpArgs& a) {
    using Stats = stages::HcStats<Block>;
    const auto hidden = static_cast<int>(a.dim("H"));
    const std::int64_t n = 4 * a.dim("H");
    std::vector<float> row(static_cast<std::size_t>(n));
    Stats::Scratch scratch;
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      stages::expand_bf16(row.data(), a.in<std::uint16_t>("residual").data() + t * n,
                          static_cast<int>(n));
      float mix[stages::kHcOutputs];
      Stats::mix(mix, row.data(), a.in<float>("fn").data(), hidden,
                 static_cast<float>(model_rules(a.model()).norm_eps), scratch);
      stages::HcParams params;
      Stats::params(params, mix, a.in<float>("base").data(), a.in<float>("scale").data(),
                    static_cast<float>(kHcEps), kSinkhornIters);
      for (int k = 0; k < stages::kHcStreams; ++k) {
        a.out<float>("pre")[4 * t + k] = params.pre[k];
        a.out<float>("post")[4 * t + k] = params.post[k];
        for (int j = 0; j < stages::kHcStreams; ++j) {
          a.out<float>("comb")[16 * t + 4 * j + k] = params.comb[j][k];
        }
      }
    }
  };
  return op;
}

OpSpec hc_combine_norm() {
  OpSpec op;
  op.name = "hc_combine_norm";
  op.models = "v4 v41";
  op.about =
      "input of a sublayer: v = bf16(sum_k pre[k] residual[k]), then v * rsqrt(mean(v^2) + eps) * "
      "gain, eps 1e-6 (v4) or 1e-20 (v41); the mean is over the rounded v (v41) or over the sums "
      "before they are rounded (v4); magnitudes up to 1e15, of v 1e17";
  op.in = {{"residual", LOWLAT_BF16, "bf16", "T,4,H", false, "residual streams"},
           {"pre", LOWLAT_F32, "f32", "T,4", false, "weights, from hc_stats"},
           {"gain", LOWLAT_BF16, "bf16", "H", false, "weight of the norm"}};
  op.out = {{"x", LOWLAT_BF16, "bf16", "T,H", false, "normed rows"}};
  op.numerics = {{"scalar nvidia", "x", "rel_l2 <= 4e-3"}};
  op.check = [op](OpArgs& a) {
    check_rows(a, op);
    check_combined(a);
  };
  op.reference = [](const OpArgs& a) {
    const ModelRules& rules = model_rules(a.model());
    reference::hc_combine_norm(
        a.out<std::uint16_t>("x").data(), a.in<std::uint16_t>("residual").data(),
        a.in<float>("pre").data(), a.in<std::uint16_t>("gain").data(), a.dim("T"), a.dim("H"),
        rules.norm_eps, rules.hc_statistic == stages::HcStatistic::unrounded);
  };
  op.scalar = [](const OpArgs& a) {
    const ModelRules& rules = model_rules(a.model());
    const auto hidden = static_cast<int>(a.dim("H"));
    std::vector<float> row(static_cast<std::size_t>(hidden));
    RmsNorm::Scratch scratch;
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      stages::hc_combine_norm<Block>(
          a.out<std::uint16_t>("x").data() + t * hidden,
          a.in<std::uint16_t>("residual").data() + 4 * t * hidden,
          a.in<float>("pre").data() + 4 * t, a.in<std::uint16_t>("gain").data(), hidden,
          static_cast<float>(rules.norm_eps), row.data(), scratch, rules.hc_statistic);
    }
  };
  return op;
}

OpSpec hc_post() {
  OpSpec op;
  op.name = "hc_post";
  op.models = "v4 v41";
  op.about =
      "residual after a sublayer: stream k = bf16(post[k] y + sum_j comb[j][k] residual[j]), in "
      "fp32 by fma: comb[0][k] residual[0], post[k] y, then j = 1, 2, 3; magnitudes up to 1e15";
  op.in = {{"residual", LOWLAT_BF16, "bf16", "T,4,H", false, "residual streams"},
           {"y", LOWLAT_BF16, "bf16", "T,H", false, "the sublayer's summed output"},
           {"post", LOWLAT_F32, "f32", "T,4", false, "from hc_stats"},
           {"comb", LOWLAT_F32, "f32", "T,4,4", false, "from hc_stats: stream j in, stream k out"}};
  op.out = {{"residual", LOWLAT_BF16, "bf16", "T,4,H", false, "new residual streams"}};
  op.numerics = {{"scalar nvidia", "residual", "rel_l2 <= 4e-3"}};
  op.check = [op](OpArgs& a) { check_rows(a, op); };
  op.reference = [](const OpArgs& a) {
    reference::hc_post(a.out<std::uint16_t>("residual").data(),
                       a.in<std::uint16_t>("residual").data(), a.in<std::uint16_t>("y").data(),
                       a.in<float>("post").data(), a.in<float>("comb").data(), a.dim("T"),
                       a.dim("H"));
  };
  op.scalar = [](const OpArgs& a) {
    const auto hidden = static_cast<int>(a.dim("H"));
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      float comb[stages::kHcStreams][stages::kHcStreams];
      for (int i = 0; i < 16; ++i) comb[i / 4][i % 4] = a.in<float>("comb")[16 * t + i];
      stages::hc_post<Block>(a.out<std::uint16_t>("residual").data() + 4 * t * hidden,
                             a.in<std::uint16_t>("residual").data() + 4 * t * hidden,
                             a.in<std::uint16_t>("y").data() + t * hidden,
                             a.in<float>("post").data() + 4 * t, comb, hidden, 0, hidden);
    }
  };
  return op;
}

OpSpec rms_norm() {
  OpSpec op;
  op.name = "rms_norm";
  op.models = "v4 v41";
  op.about =
      "x * rsqrt(mean(x^2) + eps) * gain, eps 1e-6 (v4) or 1e-20 (v41), one rounding to bf16; "
      "magnitudes up to 1e15";
  op.in = {{"x", LOWLAT_BF16, "bf16", "T,H", false, "rows"},
           {"gain", LOWLAT_BF16, "bf16", "H", false, "weight of the norm"}};
  op.out = {{"y", LOWLAT_BF16, "bf16", "T,H", false, "normed rows"}};
  op.numerics = {{"scalar nvidia", "y", "max_ulp <= 1"}};
  op.check = [op](OpArgs& a) { check_rows(a, op); };
  op.reference = [](const OpArgs& a) {
    reference::rms_norm(a.out<std::uint16_t>("y").data(), a.in<std::uint16_t>("x").data(),
                        a.in<std::uint16_t>("gain").data(), a.dim("T"), a.dim("H"),
                        model_rules(a.model()).norm_eps);
  };
  op.scalar = [](const OpArgs& a) {
    const auto hidden = static_cast<int>(a.dim("H"));
    std::vector<float> row(static_cast<std::size_t>(hidden));
    RmsNorm::Scratch scratch;
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      stages::expand_bf16(row.data(), a.in<std::uint16_t>("x").data() + t * hidden, hidden);
      RmsNorm::run(a.out<std::uint16_t>("y").data() + t * hidden, row.data(),
                   a.in<std::uint16_t>("gain").data(), hidden,
                   static_cast<float>(model_rules(a.model()).norm_eps), scratch);
    }
  };
  return op;
}

OpSpec head_norm() {
  OpSpec op;
  op.name = "head_norm";
  op.models = "v4";
  op.about =
      "x * rsqrt(mean(x^2) + 1e-6) of each head of each row, without a weight, rounded to bf16 "
      "(before RoPE); magnitudes up to 1e15";
  op.in = {{"x", LOWLAT_BF16, "bf16", "T,h,D", false, "heads of q"}};
  op.out = {{"x", LOWLAT_BF16, "bf16", "T,h,D", false, "normed heads"}};
  op.numerics = {{"scalar nvidia", "x", "max_ulp <= 1"}};
  op.check = [op](OpArgs& a) {
    require_dim(a, "h", 1, 1);
    require_dim(a, "D", 1, 1);
    require_all_finite(a, op, kMaxMagnitude);
  };
  op.reference = [](const OpArgs& a) {
    reference::head_norm(a.out<std::uint16_t>("x").data(), a.in<std::uint16_t>("x").data(),
                         a.dim("T") * a.dim("h"), a.dim("D"), model_rules(a.model()).norm_eps);
  };
  op.scalar = [](const OpArgs& a) {
    const auto dim = static_cast<int>(a.dim("D"));
    const auto eps = static_cast<float>(model_rules(a.model()).norm_eps);
    std::vector<float> head(static_cast<std::size_t>(dim));
    RmsNorm::Scratch scratch;
    for (std::int64_t i = 0; i < a.dim("T") * a.dim("h"); ++i) {
      stages::expand_bf16(head.data(), a.in<std::uint16_t>("x").data() + i * dim, dim);
      RmsNorm::run(a.out<std::uint16_t>("x").data() + i * dim, head.data(), dim, eps, scratch);
    }
  };
  return op;
}

OpSpec hc_head() {
  OpSpec op;
  op.name = "hc_head";
  op.models = "v4";
  op.about =
      "the four streams collapsed before the final norm: h = bf16(sum_k pre[k] residual[k]), pre = "
      "sigmoid(m scale + base) + 1e-6, m = fn . x / sqrt(mean(x^2) + 1e-6); magnitudes up to 1e15";
  op.in = {{"residual", LOWLAT_BF16, "bf16", "T,4,H", false, "residual streams"},
           {"fn", LOWLAT_F32, "f32", "4,4H", false, "a row a stream"},
           {"base", LOWLAT_F32, "f32", "4", false, "added to each of the 4"},
           {"scale", LOWLAT_F32, "f32", "1", false, "factor of m"}};
  op.out = {{"h", LOWLAT_BF16, "bf16", "T,H", false, "rows, not yet normed"}};
  op.numerics = {{"scalar nvidia", "h", "rel_l2 <= 4e-3"}};
  op.check = [op](OpArgs& a) { check_rows(a, op); };
  op.reference = [](const OpArgs& a) {
    reference::hc_head(a.out<std::uint16_t>("h").data(), a.in<std::uint16_t>("residual").data(),
                       a.in<float>("fn").data(), a.in<float>("base").data(),
                       a.in<float>("scale")[0], a.dim("T"), a.dim("H"),
                       model_rules(a.model()).norm_eps, kHcEps);
  };
  op.scalar = [](const OpArgs& a) {
    using Stats = stages::HcStats<Block>;
    const auto hidden = static_cast<int>(a.dim("H"));
    const auto eps = static_cast<float>(model_rules(a.model()).norm_eps);
    std::vector<float> row(4 * static_cast<std::size_t>(hidden)), h(hidden);
    Stats::Scratch scratch;
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      const std::uint16_t* residual = a.in<std::uint16_t>("residual").data() + 4 * t * hidden;
      stages::expand_bf16(row.data(), residual, 4 * hidden);
      float mix[stages::kHcStreams], pre[stages::kHcStreams];
      Stats::mix(mix, row.data(), a.in<float>("fn").data(), hidden, eps, scratch,
                 stages::kHcStreams);
      Stats::pre(pre, mix, a.in<float>("base").data(), a.in<float>("scale")[0],
                 static_cast<float>(kHcEps));
      stages::hc_combine_bf16<Block>(h.data(), residual, pre, hidden);
      for (int i = 0; i < hidden; ++i) {
        a.out<std::uint16_t>("h")[t * hidden + i] = stages::to_bf16(h[i]);
      }
    }
  };
  return op;
}

OpSpec rank_sum() {
  OpSpec op;
  op.name = "rank_sum";
  op.models = "v4 v41";
  op.about = "sum of the ranks' partial rows, in fp32 in rank order, one rounding to bf16";
  op.in = {{"partial", LOWLAT_F32, "f32", "R,T,H", false, "each rank's part; magnitudes to 1e15"}};
  op.out = {{"y", LOWLAT_BF16, "bf16", "T,H", false, "the sum, the same bits on every rank"}};
  op.numerics = {{"scalar nvidia", "y", "bitwise"}};
  op.check = [op](OpArgs& a) {
    check_rows(a, op);
    require(a.dim("R") >= 1 && a.dim("R") <= kMaxRanks,
            "partial has R = " + std::to_string(a.dim("R")) + " ranks; needed 1 .. " +
                std::to_string(kMaxRanks));
  };
  op.reference = [](const OpArgs& a) {
    reference::rank_sum(a.out<std::uint16_t>("y").data(), a.in<float>("partial").data(), a.dim("R"),
                        a.dim("T") * a.dim("H"));
  };
  op.scalar = [](const OpArgs& a) {
    const std::int64_t n = a.dim("T") * a.dim("H");
    const float* partial = a.in<float>("partial").data();
    stages::rank_sum<Block>(a.out<std::uint16_t>("y").data(), static_cast<int>(a.dim("R")), 0,
                            static_cast<int>(n),
                            [&](int rank, int i) { return partial[rank * n + i]; });
  };
  return op;
}

}  // namespace

std::vector<OpSpec> ops_mix() {
  return {hc_stats(), hc_combine_norm(), hc_post(), hc_head(), rms_norm(), head_norm(), rank_sum()};
}

}  // namespace lowlat::host

// Operations that mix and norm rows: hyper-connections, norms, the sum over ranks.
#include "host/op/registry.hpp"
#include "platform/scalar.hpp"
#include "reference/norm.hpp"
#include "stages/norm.hpp"

namespace lowlat::host {
namespace {

namespace stages = lowlat::scalar::stages;
using Block = lowlat::scalar::plat::Block<256>;

OpSpec rms_norm() {
  OpSpec op;
  op.name = "rms_norm";
  op.models = "v41";
  op.about = "x * rsqrt(mean(x^2) + eps) * gain, one rounding to bf16; eps is the model's";
  op.in = {{"x", LOWLAT_BF16, "bf16", "T,H", false, "rows"},
           {"gain", LOWLAT_BF16, "bf16", "H", false, "weight of the norm"}};
  op.out = {{"y", LOWLAT_BF16, "bf16", "T,H", false, "normed rows"}};
  op.numerics = {{"scalar", "y", "max_ulp <= 1"}};
  op.check = [](OpArgs&) {};
  op.reference = [](const OpArgs& a) {
    reference::rms_norm(a.out<std::uint16_t>("y").data(), a.in<std::uint16_t>("x").data(),
                        a.in<std::uint16_t>("gain").data(), a.dim("T"), a.dim("H"), 1e-20);
  };
  op.scalar = [](const OpArgs& a) {
    const auto hidden = static_cast<int>(a.dim("H"));
    std::vector<float> row(hidden);
    stages::RmsNorm<Block>::Scratch scratch;
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      const std::uint16_t* x = a.in<std::uint16_t>("x").data() + t * hidden;
      for (int i = 0; i < hidden; ++i) row[i] = stages::from_bf16(x[i]);
      stages::RmsNorm<Block>::run(a.out<std::uint16_t>("y").data() + t * hidden, row.data(),
                                  a.in<std::uint16_t>("gain").data(), hidden, 1e-20f, scratch);
    }
  };
  return op;
}

}  // namespace

std::vector<OpSpec> ops_mix() { return {rms_norm()}; }

}  // namespace lowlat::host

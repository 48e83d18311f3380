// host/op/pooling.hpp: what the operations over one sequence share: the compressed keys of both
// models and V4's index keys.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "host/op/models.hpp"
#include "host/op/registry.hpp"
#include "platform/scalar.hpp"
#include "stages/linear.hpp"
#include "stages/pool.hpp"

namespace lowlat::host {

// Of x [L, H], one sequence, and every other input of `spec`: sizes and values. Binds N, the
// entries.
inline void require_sequence(OpArgs& a, const OpSpec& spec, std::int64_t ratio) {
  const std::int64_t length = a.dim("L");
  require(
      length >= 1 && length <= kMaxPositions,
      "x has " + std::to_string(length) + " rows; needed 1 .. " + std::to_string(kMaxPositions));
  require_dim(a, "H", 1, 1);
  require_all_finite(a, spec);
  a.set_dim("N", length / ratio);
}

// Holds wkv, wgate [W, H] and ape [R, W] to the layout; wkv's W and ape's R are bound.
inline void require_pooling(const OpArgs& a, const scalar::stages::PoolLayout& layout) {
  const auto refuse = [&](const std::string& name, const std::string& rows, std::int64_t seen,
                          std::int64_t needed) {
    require(seen == needed, name + " has " + std::to_string(seen) + " " + rows + "; needed " +
                                std::to_string(needed) + " at ratio " +
                                std::to_string(layout.ratio));
  };
  refuse("wkv", "rows", a.dim("W"), layout.half_width());
  refuse("ape", "rows", a.dim("R"), layout.ratio);
}

// sink(n, c): the pooled and unrounded channels of entry n, fp32 [layout.dim], memory for the sink
// to use; n ascending. Of x bf16 [L, H], wkv, wgate and ape, in the stages' orders.
template <class Sink>
void pool_sequence(const OpArgs& a, const scalar::stages::PoolLayout& layout, const Sink& sink) {
  namespace stages = scalar::stages;
  using Pool = stages::PoolEntry<scalar::plat::Block<256>>;
  const auto hidden = static_cast<int>(a.dim("H"));
  const std::int64_t num_entries = a.dim("L") / layout.ratio;
  const auto length = static_cast<int>(num_entries) * layout.ratio;  // the rows that make entries
  std::vector<float> x(static_cast<std::size_t>(length) * hidden), weight_row(hidden);
  for (int t = 0; t < length; ++t) {
    const std::int64_t first = std::int64_t{t} * hidden;
    stages::expand_bf16(x.data() + first, a.in<std::uint16_t>("x").data() + first, hidden);
  }
  std::vector<float> step(static_cast<std::size_t>(length) * layout.width());
  const auto project = [&](const char* name, int column) {
    const stages::Bf16Weights weights{a.in<std::uint16_t>(name).data(), hidden};
    stages::linear(x.data(), hidden, length, hidden, weights, 0, layout.half_width(),
                   weight_row.data(), [&](int t, int n, float v) {
                     step[static_cast<std::size_t>(t) * layout.width() + column + n] = v;
                   });
  };
  project("wkv", 0);
  project("wgate", layout.half_width());
  // The whole sequence is one step: no token is older.
  const auto no_ring = [](std::int64_t) -> const float* { return nullptr; };
  const stages::PoolRows<decltype(no_ring)> rows{step.data(), 0, layout.width(), no_ring};
  typename Pool::Scratch scratch;
  std::vector<float> c(layout.dim);
  for (std::int64_t n = 0; n < num_entries; ++n) {
    Pool::run(c.data(), layout, a.in<float>("ape").data(), n, rows, 0, layout.dim, scratch);
    sink(n, c.data());
  }
}

}  // namespace lowlat::host

// declared.hpp: holds an operation's scalar outputs to the bounds that its spec declares.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "check.hpp"
#include "host/op/op_call.hpp"
#include "random_values.hpp"

namespace lowlat::testing {

// Largest |a - b| in units of b's last bf16 place.
inline double max_ulp(const std::vector<double>& a, const std::vector<double>& b) {
  double worst = 0.0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const int exponent = b[i] == 0.0 ? -126 : std::max(std::ilogb(b[i]), -126);
    worst = std::max(worst, std::abs(a.at(i) - b[i]) / std::ldexp(1.0, exponent - 7));
  }
  return worst;
}

inline std::vector<double> values_of(const std::vector<std::uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

// Runs `call` on both platforms and checks output `name` (elements of T) by the declared bound.
template <class T>
void check_declared(const host::OpSpec& op, const OpCall& call, const char* name) {
  const std::vector<T> got = call.run<T>("scalar", name);
  const std::vector<T> want = call.run<T>("reference", name);
  REQUIRE(!want.empty());
  for (const host::OpNumerics& n : op.numerics) {
    if (std::strcmp(n.output, name) != 0) continue;
    const std::string bound = n.bound;
    const std::size_t limit = bound.find("<= ");
    if (bound == "bitwise") {
      CHECK(std::memcmp(got.data(), want.data(), want.size() * sizeof(T)) == 0);
    } else if (bound.rfind("rel_l2", 0) == 0) {
      CHECK_NEAR(rel_l2(values_of(got), values_of(want)), 0.0, std::atof(&bound[limit + 3]));
    } else {
      CHECK(bound.rfind("max_ulp", 0) == 0);
      CHECK_NEAR(max_ulp(values_of(got), values_of(want)), 0.0, std::atof(&bound[limit + 3]));
    }
    return;
  }
  CHECK_EQ(std::string(name), "a declared output");
}

}  // namespace lowlat::testing

// The numbers by which kernels and gates are named, as whoever reads status words has them
// (tests/python/test_watch.py reads the same ones). Planted and seen: one kernel more a layer.
#include "fused/place.hpp"

#include "check.hpp"
#include "fused/exchange_hop.hpp"

namespace fused = lowlat::nvidia::fused;

TEST_CASE(places_are_the_headers_numbers) {
  const auto of = [](int layer_idx, fused::HopKernel kernel) {
    return fused::kernel_place(layer_idx) + static_cast<std::uint32_t>(kernel);
  };
  CHECK_EQ(of(3, fused::HopKernel::exchange), 16u * 3 + 5);
  CHECK_EQ(of(40, fused::HopKernel::select), 16u * 40 + 15);
  CHECK_EQ(fused::gate_place(40) + 7, 0x1000u + 32 * 40 + 7);
  CHECK_EQ(fused::gate_place(0), 0x1000u);
}

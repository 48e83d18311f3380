// fused/moe: the region at true shapes against reference/, replays bit for bit, and its deadline.
#include "bench/moe_case.cuh"

int main() {
  using namespace lowlat::bench;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("skipped: no CUDA device\n");
    return 77;
  }
  int failed = 0;
  const auto check = [&](const Dims& d, const std::vector<std::string>& scenarios) {
    const Layer layer(d);
    for (const int rows : {1, 6, 12, 48}) {
      for (const std::string& scenario : scenarios) {
        failed += check_case(layer, rows, scenario, 20) ? 0 : 1;
      }
    }
    failed += check_fault(layer, 6) ? 0 : 1;
  };
  using lowlat::fused::MoeShape;
  check(dims<lowlat::shape::Dsv41Flash<4>>(MoeShape::v41_tp4, "v41 tp4"), {"gate", "same"});
  check(dims<lowlat::shape::Dsv4Flash<4>>(MoeShape::v4_tp4, "v4 tp4"), {"gate", "table"});
  return failed == 0 ? 0 : 1;
}

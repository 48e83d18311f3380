// A file of its own: a translation unit has one platform, and here it is the host's.
#include "host/nvidia/rope_tables.hpp"

#include <algorithm>
#include <iterator>

#include "host/op/rope_tables.hpp"

namespace lowlat::host::cuda {

RopeFrequencies rope_frequencies(bool compressed) {
  const auto table = compressed ? compressed_rope_table() : window_rope_table();
  RopeFrequencies out;
  static_assert(std::size(decltype(out.values){}) == std::size(decltype(table.values){}));
  std::ranges::copy(table.values, out.values);
  return out;
}

}  // namespace lowlat::host::cuda

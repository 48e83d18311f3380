// A file of its own: a translation unit has one platform, and here it is the host's.
#include "host/nvidia/rope_tables.hpp"

#include <algorithm>

#include "host/op/rope_tables.hpp"

namespace lowlat::host::cuda {

void rope_frequencies(bool compressed, float (&out)[shape::kRopeDim / 2]) {
  const auto table = compressed ? compressed_rope_table() : window_rope_table();
  std::ranges::copy(table.values, out);
}

}  // namespace lowlat::host::cuda

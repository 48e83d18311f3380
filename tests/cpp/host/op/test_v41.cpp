// The numbers that operations take from the model.
#include "host/op/v41.hpp"

#include "check.hpp"

TEST_CASE(compressed_layers_rotate_by_the_published_frequencies) {
  const auto table = lowlat::host::compressed_rope_table();
  CHECK_EQ(table.values[0], 1.0f);
  CHECK_NEAR(table.values[1], 0.687656022, 1e-7);
  CHECK_NEAR(table.values[15], 0.00363553858, 1e-9);
  CHECK_NEAR(table.values[16], 0.002265625, 1e-9);
  CHECK_NEAR(table.values[24], 1.953125e-05, 1e-11);
  CHECK_NEAR(table.values[31], 5.68052904e-07, 1e-13);
}

// What programs and tests share to call models.
#include "bench/model_calls.hpp"

#include "check.hpp"

using lowlat::bench::StepRows;

TEST_CASE(a_tensors_bytes_are_its_elements_times_their_size) {
  const std::pair<int, int> sizes[] = {{LOWLAT_U8, 1},    {LOWLAT_I32, 4},  {LOWLAT_I64, 8},
                                       {LOWLAT_F32, 4},   {LOWLAT_BF16, 2}, {LOWLAT_E4M3, 1},
                                       {LOWLAT_FP4X2, 1}, {LOWLAT_UE8M0, 1}};
  for (const auto& [dtype, bytes] : sizes) {
    lowlat_tensor_spec spec{};
    spec.dtype = static_cast<std::uint32_t>(dtype);
    spec.ndim = 3;
    spec.shape[0] = 3, spec.shape[1] = 5, spec.shape[2] = 7;
    CHECK_EQ(lowlat::bench::count_of(spec), 105);
    CHECK_EQ(lowlat::bench::bytes_of(spec), 105 * bytes);
    const lowlat_tensor tensor = lowlat::bench::dense_tensor(spec, &spec);
    CHECK_EQ(tensor.stride[0], 35);
    CHECK_EQ(tensor.stride[2], 1);
  }
}

TEST_CASE(rows_lie_in_the_pages_of_their_request) {
  StepRows rows(2, 4);
  rows.history.reserve(6);  // so that what is empty lies somewhere
  for (int request = 0; request < 2; ++request) {
    rows.pages.push_back(7 - request);  // 7, 0 and 6, 1
    rows.pages.push_back(request);
    rows.state.push_back(9 - request);
    for (int i = 3; i < 5; ++i) rows.add(100 * request + i, i);
  }
  const auto own = [](const auto& values) { return values.data(); };
  const lowlat_step step = rows.step(2, own);
  CHECK_EQ(step.mode, static_cast<std::uint32_t>(LOWLAT_TARGET_VERIFY));
  CHECK_EQ(step.num_rows, 4);
  CHECK_EQ(step.batch_size, 2);
  CHECK_EQ(step.page_table_stride, 2);
  CHECK(step.history == nullptr);
  const int slots[] = {7 * 4 + 3, 0, 6 * 4 + 3, 4}, requests[] = {0, 0, 1, 1};
  for (int row = 0; row < 4; ++row) {
    CHECK_EQ(step.slots[row], slots[row]);
    CHECK_EQ(step.request_idx[row], requests[row]);
    CHECK_EQ(step.token_ids[row], 100 * requests[row] + step.positions[row]);
  }
  rows.history = {1, 2, 3, 4, 5, 6};
  CHECK(rows.step(2, own).history == rows.history.data());
  CHECK_EQ(rows.step(1, own).mode, static_cast<std::uint32_t>(LOWLAT_DECODE));
}

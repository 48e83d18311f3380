// The acceptance rule in one launch: against reference/, at true and at odd sizes, in replays.
#include "bench/draft_accept_case.cuh"

#include "gpu.cuh"

using namespace lowlat::bench;
using lowlat::testing::need_device;

TEST_CASE(requests_of_all_kinds_at_the_models_vocabulary) {
  need_device();
  for (const int batch : {1, 2, 8}) CHECK(check_accept(batch, 5, 129280, batch));
}

TEST_CASE(a_small_vocabulary) {
  need_device();
  CHECK(check_accept(2, 2, 2500, 1));
}

// A last tile that is not whole, one tile, more rows than are in shared memory at a time.
TEST_CASE(vocabularies_that_are_no_multiple_of_a_tile) {
  need_device();
  CHECK(check_accept(8, 7, 2500, 41));
  CHECK(check_accept(3, 1, 1000, 42));
  CHECK(check_accept(4, 7, 131072, 43));
}

// A hundred requests whose p is any share of q.
TEST_CASE(coins_decide_what_is_kept) {
  need_device();
  for (std::uint64_t seed = 100; seed < 116; ++seed) CHECK(check_accept(8, 5, 1000, seed));
}

TEST_CASE(sizes_that_cannot_be_are_refused) {
  need_device();
  const AcceptCase data(1, 1, 16, 1);
  const auto refused = [&](auto change) {
    lowlat::nvidia::fused::DraftAcceptParams params = data.params();
    change(params);
    return lowlat::nvidia::fused::launch_draft_accept(params, nullptr) == cudaErrorInvalidValue;
  };
  CHECK(refused([](auto& p) { p.batch_size = 0; }));
  CHECK(refused([](auto& p) { p.batch_size = 9; }));
  CHECK(refused([](auto& p) { p.num_drafts = 8; }));
  CHECK(refused([](auto& p) { p.vocab = 131073; }));
}

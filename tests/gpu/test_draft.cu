// The draft's five proposals at true shapes: against float64, with one, two and four ranks on one
// GPU and two on two, ties and NaN, foreign packets, replays and a rank that never comes.
#include "bench/draft_checks.cuh"

#include "gpu.cuh"

using namespace lowlat::bench;
using lowlat::testing::need_device;

namespace {

const DraftWeights& whole() {
  static const DraftWeights weights(kVocab, 11, false);
  return weights;
}
// Ids that two ranks on one GPU hold on chip.
const DraftWeights& small() {
  static const DraftWeights weights(65536, 21, false);
  return weights;
}
// As many as fit into their registers.
const DraftWeights& few() {
  static const DraftWeights weights(32768, 31, false);
  return weights;
}

bool check(const DraftWeights& weights, const DraftSetup& setup, const char* what,
           int late_rank = -1) {
  DraftGroup group(setup, weights);
  group.capture();
  // Twice: the second has another offset and the packets of the first around it.
  return check_draft(group, weights, what, late_rank) && check_draft(group, weights, what);
}

void need_devices(int count) {
  need_device();
  int found = 0;
  if (cudaGetDeviceCount(&found) != cudaSuccess || found < count) {
    SKIP(std::to_string(found) + " GPU(s); this case needs " + std::to_string(count));
  }
}

}  // namespace

// More tiles than stay on chip, four and two a warp.
TEST_CASE(a_small_vocabulary) {
  need_device();
  CHECK(check_small());
}

TEST_CASE(one_rank_proposes_greedily_and_sampled) {
  need_device();
  CHECK(check(whole(), setup_of(kVocab, 1, 1, 1), "greedy"));
  CHECK(check(whole(), setup_of(kVocab, 1, 1, 2, {0.7f, 0.0f}), "sampled and greedy"));
}

TEST_CASE(ranks_agree_on_every_token) {
  need_device();
  for (const int ranks : {2, 4}) {
    CHECK(check(whole(), setup_of(kVocab, ranks, 1, 1), "greedy"));
    CHECK(check(small(), setup_of(65536, ranks, 1, 2, {0.7f, 0.0f}, true), "sampled and greedy"));
  }
}

TEST_CASE(every_batch_size_of_one_to_eight) {
  need_device();
  for (int batch = 1; batch <= fused::kMaxDraftBatch; ++batch) {
    std::vector<float> temperatures(static_cast<std::size_t>(batch), 0.9f);
    temperatures[0] = 0.0f;
    CHECK(check(small(), setup_of(65536, 2, 1, batch, temperatures), "sampled and greedy"));
    CHECK(check(few(), setup_of(32768, 4, 1, batch, temperatures, true), "sampled and greedy"));
  }
}

// At a temperature of a million the noise alone chooses.
TEST_CASE(noise_is_the_samplers) {
  need_device();
  CHECK(check(small(), setup_of(65536, 2, 1, 2, {1e6f, 1e6f}, true), "noise alone"));
}

TEST_CASE(a_rank_may_be_late) {
  need_device();
  CHECK(check(small(), setup_of(65536, 2, 1, 2), "a rank 1 ms late", 1));
}

TEST_CASE(ties_go_to_the_lowest_id_and_nan_before_numbers) {
  need_device();
  CHECK(check_ties_and_nan(1));
}

TEST_CASE(packets_of_other_epochs_are_none) {
  need_device();
  CHECK(check_tags(small(), 1));
}

TEST_CASE(replays_equal_launches) {
  need_device();
  CHECK(check_replays(small(), 1, 1000));
}

TEST_CASE(a_rank_that_never_comes_ends_the_launch_at_its_deadline) {
  need_device();
  CHECK(check_missing_rank(small(), 1));
}

TEST_CASE(two_gpus) {
  need_devices(2);
  CHECK(check(whole(), setup_of(kVocab, 2, 2, 1), "greedy"));
  CHECK(check(whole(), setup_of(kVocab, 2, 2, 8, std::vector<float>(8, 1.0f), true), "sampled"));
  CHECK(check_tags(small(), 2));
  CHECK(check_replays(small(), 2, 1000));
  CHECK(check_missing_rank(small(), 2));
}

TEST_CASE(four_gpus) {
  need_devices(4);
  CHECK(check(whole(), setup_of(kVocab, 4, 4, 1), "greedy"));
  CHECK(check(whole(), setup_of(kVocab, 4, 4, 8, std::vector<float>(8, 1.0f), true), "sampled"));
  CHECK(check(small(), setup_of(65536, 4, 4, 2), "a rank 1 ms late", 3));
}

// A grid that is not resident as a whole, sizes that were not built.
TEST_CASE(launches_that_cannot_be_are_refused) {
  need_device();
  DraftGroup group(setup_of(65536, 2, 1, 2), small());
  const auto refused = [&](auto change, int blocks, cudaError_t with) {
    fused::DraftProposalsParams params = group.params(0, 0);
    change(params);
    return fused::launch_draft_proposals(params, blocks, false, nullptr) == with;
  };
  const auto invalid = cudaErrorInvalidValue;
  CHECK(refused([](auto& p) { p.batch_size = 0; }, 64, invalid));
  CHECK(refused([](auto& p) { p.batch_size = 9; }, 64, invalid));
  CHECK(refused([](auto& p) { p.port.tp_size = 3; }, 64, invalid));
  const int too_few = fused::draft_packets(64, 2) - 1;
  CHECK(refused([=](auto& p) { p.port.box_packets = too_few; }, 64, invalid));
  CHECK(refused([](auto& p) { p.share_logits = true; }, 64, invalid));
  CHECK(refused([](auto& p) { p.vocab_shard = 0; }, 64, invalid));
  CHECK(refused([](auto& p) { p.vocab_shard -= 2; }, 64, invalid));
  CHECK(refused([](auto& p) { ++p.base; }, 64, invalid));
  CHECK(refused([](auto&) {}, 0, invalid));
  CHECK(refused([](auto&) {}, 129, invalid));
}

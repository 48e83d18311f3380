// A whole model on two ranks under ThreadSanitizer: both schedules, the draft, launches, the plain
// path's staging and signals, an abort, and the hand-over between launching threads and resident
// ones. Built a second time with LOWLAT_PLANT, where signals and tags are stored relaxed: that
// build must be caught.
#ifdef LOWLAT_PLANT
#define LOWLAT_CPU_RELEASE_ORDER std::memory_order_relaxed
#endif
#include "check.hpp"
#include "host/tiny_group.hpp"
// The sanitizer sees what it compiles, so the library's sources are part of this program: those of
// one platform.
#undef LOWLAT_HAVE_CUDA
#include "cpp_kernels/host/api.cpp"
#include "cpp_kernels/host/config.cpp"
#include "cpp_kernels/host/error.cpp"
#include "cpp_kernels/host/hosted.cpp"
#include "cpp_kernels/host/model.cpp"
#include "cpp_kernels/host/peer.cpp"
#include "cpp_kernels/host/plain.cpp"
#include "cpp_kernels/host/platforms.cpp"
#include "cpp_kernels/host/rope_frequencies.cpp"
#include "cpp_kernels/host/scalar_model.cpp"
#include "cpp_kernels/host/tensors.cpp"

// One platform a program: this one has no code objects for any other.
std::vector<lowlat::host::hip::CodeObject> lowlat::host::hip::built_code_objects() { return {}; }
std::unique_ptr<lowlat::host::Model> lowlat::host::hip::make_model(const std::string&,
                                                                   const lowlat_model_config&,
                                                                   const lowlat_hosting*,
                                                                   const std::vector<CodeObject>&) {
  throw Error(LOWLAT_UNSUPPORTED, "no AMD code objects");
}

namespace {

using lowlat::testing::StepArrays;
using lowlat::testing::TinyGroup;

std::vector<std::int32_t> text(int n) {
  std::vector<std::int32_t> out(n);
  for (int i = 0; i < n; ++i) out[i] = (7 * i + 3) % 120;
  return out;
}

void run_both_schedules(std::uint32_t kind) {
  TinyGroup group(kind, 2);
  const auto all = text(32);
  const int vocab = group.config().vocab;
  StepArrays prompt(group.config()), verify = prompt;
  prompt.add(0, all, 0, 9);
  verify.add(0, all, 9, 6);
  const std::vector<std::int32_t> anchors = {5}, prefixes = {9}, noise_row = {0};
  const std::vector<std::int64_t> noise_offset = {1};
  const std::vector<float> temperature = {0.7f}, coins(6, 0.5f);
  std::vector<std::int32_t> slots(verify.slots.begin(), verify.slots.begin() + 5);
  struct Out {
    std::vector<float> logits, draft_logits;
    std::vector<std::int32_t> drafts, accepted, next;
  };
  std::vector<Out> out(2);
  group.run([&](lowlat_model* model, int rank) {
    Out& o = out[rank];
    o.logits.resize(6 * vocab);
    o.draft_logits.resize(5 * vocab);
    o.drafts.resize(5);
    o.accepted.resize(1);
    o.next.resize(1);
    lowlat_step step = prompt.step(LOWLAT_EXTEND);
    step.num_logit_rows = 0;
    TinyGroup::must(lowlat_plain_step_launch(model, &step, nullptr));
    lowlat_draft d{};
    d.struct_bytes = sizeof d;
    d.num_inject_rows = 9;
    d.inject_slots = prompt.slots.data();
    d.inject_positions = prompt.positions.data();
    d.batch_size = 1;
    d.page_table_stride = prompt.stride;
    d.anchors = anchors.data();
    d.prefixes = prefixes.data();
    d.slots = slots.data();
    d.page_table = prompt.page_table.data();
    d.temperature = temperature.data();
    d.noise_row = noise_row.data();
    d.noise_offset = noise_offset.data();
    d.noise_key = 99;
    d.draft_tokens = o.drafts.data();
    d.draft_logits = o.draft_logits.data();
    TinyGroup::must(lowlat_draft_launch(model, &d, nullptr));
    d.num_inject_rows = 0;
    TinyGroup::must(lowlat_plain_draft_launch(model, &d, nullptr));
    step = verify.step(LOWLAT_TARGET_VERIFY);
    step.logits = o.logits.data();
    TinyGroup::must(lowlat_step_launch(model, &step, nullptr));
    lowlat_accept a{};
    a.struct_bytes = sizeof a;
    a.batch_size = 1;
    a.num_drafts = 5;
    a.vocab = vocab;
    a.draft_tokens = o.drafts.data();
    a.target_logits = o.logits.data();
    a.draft_logits = o.draft_logits.data();
    a.temperature = temperature.data();
    a.coins = coins.data();
    a.accepted = o.accepted.data();
    a.next_tokens = o.next.data();
    return lowlat_accept_launch(model, &a, nullptr);
  });
  CHECK(out[0].logits == out[1].logits);
  CHECK(out[0].drafts == out[1].drafts);
  CHECK_EQ(out[0].accepted[0], out[1].accepted[0]);
  CHECK_EQ(out[0].next[0], out[1].next[0]);
}

TEST_CASE(steps_and_drafts_of_both_schedules_run_without_a_race_v41) {
  run_both_schedules(LOWLAT_V41);
}
TEST_CASE(steps_and_drafts_of_both_schedules_run_without_a_race_v4) {
  run_both_schedules(LOWLAT_V4);
}

TEST_CASE(an_abort_while_a_rank_waits_is_reported_without_a_race) {
  TinyGroup group(LOWLAT_V41, 2);
  const auto all = text(8);
  StepArrays arrays(group.config());
  arrays.add(0, all, 0, 1);
  const lowlat_step step = arrays.step(LOWLAT_DECODE);
  CHECK_EQ(lowlat_step_launch(group.model(0), &step, nullptr), LOWLAT_OK);
  lowlat_abort(group.model(1));
  CHECK_EQ(lowlat_synchronize(group.model(0), 60'000'000'000ull), LOWLAT_FAULT);
}

}  // namespace

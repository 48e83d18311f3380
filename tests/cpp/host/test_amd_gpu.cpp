// Whole models on AMD GPUs against the same models on scalar: for the owner of such a machine, see
// docs/amd.md. Skipped where there is no HIP runtime, device or code object, which is everywhere
// that it was run so far.
#include <chrono>
#include <cstdio>
#include <functional>

#include "bench/plain_layers.hpp"
#include "check.hpp"
#include "host/amd/hip.hpp"
#include "host/tiny_life.hpp"

namespace {

using namespace lowlat::testing;
namespace bench = lowlat::bench;
namespace hip = lowlat::host::hip;

constexpr std::uint64_t kSecond = 1'000'000'000;

int num_devices() {
  if (hip::built_code_objects().empty()) SKIP("built without AMD code objects (LOWLAT_HIP=ON)");
  try {
    const int count = hip::count_devices();
    if (count == 0) SKIP("HIP sees no device");
    return count;
  } catch (const lowlat::host::Error& error) {
    SKIP(error.what());
  }
}

// The ranks' devices: one for all, or one a rank.
std::string device_of(int rank, bool spread) { return "amd:" + std::to_string(spread ? rank : 0); }

void compare(std::uint32_t kind, int tp_size, int num_requests, bool spread) {
  if (spread && num_devices() < tp_size) SKIP("needs a device a rank");
  num_devices();
  const auto on_amd = [&](int r) { return device_of(r, spread); };
  const auto on_scalar = [](int) { return std::string("scalar"); };
  Side want(kind, tp_size, on_scalar, 60 * kSecond);
  Side got(kind, tp_size, on_amd, 5 * kSecond);
  std::vector<float> first, second;
  Compared c = live(got, want, How::resident, num_requests, &first);
  std::printf(
      "%s tp %d requests %d: rel_l2 median %.2e worst %.2e, flips %d, argmax differs %d of "
      "%d, drafts %d of %d\n",
      kind == LOWLAT_V4 ? "v4" : "v41", tp_size, num_requests, c.median(),
      *std::ranges::max_element(c.errors), c.flips(), c.argmax_differs, c.rows, c.drafts_differ,
      c.drafts);
  CHECK(c.median() < 0.01);
  CHECK(c.flips() * 20 <= static_cast<int>(c.errors.size()));
  CHECK(c.argmax_differs * 20 <= c.rows);
  CHECK(c.drafts_differ * 5 <= c.drafts);
  // Run to run: a fresh group gives the same bits.
  Side again(kind, tp_size, on_amd, 5 * kSecond);
  Side other(kind, tp_size, on_scalar, 60 * kSecond);
  live(again, other, How::resident, num_requests, &second);
  CHECK(std::memcmp(first.data(), second.data(), first.size() * sizeof(float)) == 0);
}

TEST_CASE(one_rank) {
  compare(LOWLAT_V41, 1, 2, false);
  compare(LOWLAT_V4, 1, 2, false);
}
TEST_CASE(two_ranks_of_one_device) {
  compare(LOWLAT_V41, 2, 1, false);
  compare(LOWLAT_V4, 2, 1, false);
}
TEST_CASE(two_ranks_of_two_devices) {
  compare(LOWLAT_V41, 2, 2, true);
  compare(LOWLAT_V4, 2, 2, true);
}
TEST_CASE(four_ranks_of_four_devices) { compare(LOWLAT_V41, 4, 1, true); }

// Rank 1 launches nothing: rank 0's wait ends by its deadline, says for whom it was, and ends rank
// 1's next step too.
TEST_CASE(a_peer_that_does_not_come_is_named_by_the_deadline) {
  const bool spread = num_devices() > 1;
  Side side(LOWLAT_V41, 2, [&](int r) { return device_of(r, spread); }, kSecond / 10);
  StepArrays arrays(side.group.config());
  arrays.add(0, std::vector<std::int32_t>(8, 3), 0, 1);
  Shared shared(side.group.model(0)), peers(side.group.model(1));
  const lowlat_step step = side.placed(arrays, LOWLAT_DECODE, shared);
  TinyGroup::must(lowlat_step_launch(side.group.model(0), &step, nullptr));
  const auto begin = std::chrono::steady_clock::now();
  CHECK_EQ(lowlat_synchronize(side.group.model(0), 10 * kSecond), LOWLAT_FAULT);
  const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("the fault was told after %.3f s, of a wait of 0.1 s\n", s);
  lowlat_status_words words{};
  words.struct_bytes = sizeof words;
  TinyGroup::must(lowlat_status_read(side.group.model(0), &words));
  CHECK_EQ(words.state, 1u);
  CHECK_EQ(words.peer, 1);
  CHECK_EQ(std::string(lowlat_stage_name(words.stage)), "embed_sum");
  const lowlat_step late = side.placed(arrays, LOWLAT_DECODE, peers);
  static_cast<void>(lowlat_step_launch(side.group.model(1), &late, nullptr));
  CHECK_EQ(lowlat_synchronize(side.group.model(1), 10 * kSecond), LOWLAT_FAULT);
  TinyGroup::must(lowlat_status_read(side.group.model(1), &words));
  CHECK_EQ(words.state, 2u);
  CHECK_EQ(words.peer, 0);
}

// A thousand steps whose logits are all the same: a packet that arrived in two pieces, a hand-off
// that came too early or a stale cache line would show as other bits.
TEST_CASE(a_thousand_steps_give_the_same_bits_and_take_this_long) {
  const int count = num_devices();
  const int tp_size = count >= 4 ? 4 : 2;
  const bool spread = count >= tp_size;
  Side side(LOWLAT_V41, tp_size, [&](int r) { return device_of(r, spread); }, kSecond);
  StepArrays arrays(side.group.config());
  arrays.add(0, std::vector<std::int32_t>(8, 3), 0, 6);
  std::vector<float> first, logits;
  std::vector<std::int32_t> argmax;
  side.step(arrays, LOWLAT_TARGET_VERIFY, How::resident, first, argmax);
  const auto begin = std::chrono::steady_clock::now();
  constexpr int kSteps = 1000;
  int num_others = 0;
  for (int i = 0; i < kSteps; ++i) {
    side.step(arrays, LOWLAT_TARGET_VERIFY, How::resident, logits, argmax);
    num_others += std::memcmp(first.data(), logits.data(), first.size() * sizeof(float)) != 0;
  }
  const double us =
      std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
  std::printf("tp %d, six rows, ten small layers: %.1f us a step, %d of %d steps with other bits\n",
              tp_size, us / kSteps, num_others, kSteps);
  CHECK_EQ(num_others, 0);
}

// What the time model of docs/amd.md takes from a data sheet. Read and written bytes both count.
TEST_CASE(memory_is_copied_this_fast) {
  num_devices();
  constexpr std::uint64_t kBytes = std::uint64_t{1} << 30;
  constexpr int kCopies = 20;
  hip::check(hip::runtime().hipSetDevice(0), "hipSetDevice");
  const hip::Memory from(hip::MemoryKind::device, kBytes), to(hip::MemoryKind::device, kBytes);
  const auto copy = [&](void* out, std::uint64_t bytes) {
    hip::check(hip::runtime().hipMemcpy(out, from.data(), bytes, hip::kCopyDefault), "hipMemcpy");
  };
  std::uint32_t word = 0;
  const auto copies = [&](int count) {
    for (int i = 0; i < count; ++i) copy(to.data(), kBytes);
    copy(&word, sizeof word);  // comes after them
  };
  copies(1);
  const auto begin = std::chrono::steady_clock::now();
  copies(kCopies);
  const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("copies of 1 GiB on one device: %.2f TB/s of reads and writes\n",
              2e-12 * kCopies * static_cast<double>(kBytes) / s);
}

// The model's own case: a plain layer of V4.1-Flash, a rank's share of four, whose sums go round
// through its own mailbox.
TEST_CASE(layers_at_the_published_sizes_take_this_long) {
  num_devices();
  constexpr int kFew = 4, kExtra = 4, kSteps = 20, kRepeats = 10;
  bench::HostFill fill;
  const auto layers = [&](int count) {
    return bench::resident_config(bench::v41_sizes<4>(), count);
  };
  bench::PlainLayers few("amd:0", layers(kFew), std::ref(fill));
  bench::PlainLayers many("amd:0", layers(kFew + kExtra), std::ref(fill));
  for (const auto& [rows, model_us] : {std::pair{1, 45.0}, std::pair{6, 62.1}}) {
    const auto a = bench::step_times(few, rows, kSteps, kRepeats);
    const auto b = bench::step_times(many, rows, kSteps, kRepeats);
    const auto layer = [&](double share) { return bench::layer_us(a, b, kExtra, share); };
    std::printf(
        "plain layer of V4.1-Flash, a share of four ranks, %d rows: median %.1f us, low %.1f, high "
        "%.1f; the model says %.1f of an MI355X\n",
        rows, layer(0.5), layer(0.1), layer(0.9), model_us);
  }
}

}  // namespace

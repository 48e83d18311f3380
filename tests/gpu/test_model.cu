// Whole models on CUDA devices against the same models on scalar, in one program: tokens, logits,
// drafts and acceptance, at every width, by one to four ranks on one device (and by two on two),
// eager and captured; replays; faults.
//
// Norms and attention add in another order than one thread does, and what four bits round to may
// flip by it, so logits are near and not equal. Ranks, runs, and eager and captured are equal bit
// for bit.
#include <algorithm>
#include <chrono>

#include "gpu.cuh"
#include "host/tiny_life.hpp"
#include "platform/nvidia.hpp"
// The platform comes before every schedule.
#include "persistent/grid.hpp"

namespace {

using namespace lowlat::testing;

int num_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) cudaGetLastError();
  return count;
}

// A side whose steps may also be captured.
class CudaSide : public Side {
 public:
  using Side::Side;

  void run(How how, const Launch& launch) override {
    if (how != How::captured) {
      Side::run(how, launch);
      return;
    }
    std::vector<lowlat::host::cuda::Graph> graphs;
    std::vector<cudaStream_t> streams;
    for (int r = 0; r < group.tp_size(); ++r) {
      shared_[r].rewind();
      lowlat::host::cuda::check(cudaSetDevice(device_of_rank(r)), "cudaSetDevice");
      cudaStream_t stream;
      lowlat::host::cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                                "cudaStreamCreate");
      graphs.emplace_back(stream,
                          [&] { TinyGroup::must(launch(group.model(r), r, shared_[r], stream)); });
      streams.push_back(stream);
    }
    for (int r = 0; r < group.tp_size(); ++r) {
      lowlat::host::cuda::check(cudaSetDevice(device_of_rank(r)), "cudaSetDevice");
      graphs[r].launch(streams[r]);
    }
    for (int r = 0; r < group.tp_size(); ++r) {
      lowlat::host::cuda::check(cudaStreamSynchronize(streams[r]), "cudaStreamSynchronize");
      cudaStreamDestroy(streams[r]);
      lowlat_status_words words{};
      words.struct_bytes = sizeof words;
      TinyGroup::must(lowlat_status_read(group.model(r), &words));
      CHECK_EQ(words.state, 0u);
    }
    lowlat::host::cuda::check(cudaSetDevice(0), "cudaSetDevice");
  }

  bool spread_ = false;  // ranks are on devices of their own

 private:
  int device_of_rank(int r) const { return spread_ ? r % num_devices() : 0; }
};

constexpr std::uint64_t kSecond = 1'000'000'000;

void compare(std::uint32_t kind, int tp_size, int num_requests, How how, bool spread) {
  const auto on_nvidia = [&](int r) {
    return spread ? "nvidia:" + std::to_string(r) : std::string("nvidia:0");
  };
  Side want(kind, tp_size, [](int) { return "scalar"; }, 60 * kSecond);
  CudaSide got(kind, tp_size, on_nvidia, 5 * kSecond);
  got.spread_ = spread;
  std::vector<float> first, second;
  Compared c = live(got, want, how, num_requests, &first);
  std::printf(
      "%s tp %d requests %d %s%s: rel_l2 median %.2e worst %.2e, flips %d, argmax differs %d "
      "of %d, drafts %d of %d\n",
      kind == LOWLAT_V4 ? "v4" : "v41", tp_size, num_requests,
      how == How::captured ? "captured" : "eager", spread ? " two devices" : "", c.median(),
      *std::ranges::max_element(c.errors), c.flips(), c.argmax_differs, c.rows, c.drafts_differ,
      c.drafts);
  std::fflush(stdout);
  CHECK(c.median() < 0.01);
  CHECK(c.flips() * 20 <= static_cast<int>(c.errors.size()));
  CHECK(c.argmax_differs * 20 <= c.rows);
  CHECK(c.drafts_differ * 5 <= c.drafts);
  // Run to run: a fresh group gives the same bits.
  CudaSide again(kind, tp_size, on_nvidia, 5 * kSecond);
  again.spread_ = spread;
  Side other(kind, tp_size, [](int) { return "scalar"; }, 60 * kSecond);
  live(again, other, How::resident, num_requests, &second);
  CHECK(equal_bytes(first, second));
}

}  // namespace

TEST_CASE(v41_one_rank_eager) {
  need_device();
  compare(LOWLAT_V41, 1, 1, How::resident, false);
}
TEST_CASE(v41_one_rank_captured_two_requests) {
  need_device();
  compare(LOWLAT_V41, 1, 2, How::captured, false);
}
TEST_CASE(v4_one_rank_eager) {
  need_device();
  compare(LOWLAT_V4, 1, 1, How::resident, false);
}
TEST_CASE(v4_one_rank_captured_two_requests) {
  need_device();
  compare(LOWLAT_V4, 1, 2, How::captured, false);
}
TEST_CASE(two_ranks_on_one_device) {
  need_device();
  compare(LOWLAT_V41, 2, 1, How::resident, false);
  compare(LOWLAT_V4, 2, 2, How::captured, false);
}
TEST_CASE(four_ranks_on_one_device) {
  need_device();
  compare(LOWLAT_V41, 4, 2, How::resident, false);
  compare(LOWLAT_V4, 4, 1, How::resident, false);
}
TEST_CASE(two_ranks_on_two_devices) {
  need_device();
  if (num_devices() < 2) SKIP("needs two devices");
  compare(LOWLAT_V41, 2, 1, How::resident, true);
  compare(LOWLAT_V4, 2, 2, How::captured, true);
}
TEST_CASE(four_ranks_on_four_devices) {
  need_device();
  if (num_devices() < 4) SKIP("needs four devices");
  compare(LOWLAT_V41, 4, 1, How::resident, true);
  compare(LOWLAT_V4, 4, 2, How::captured, true);
}

namespace {

namespace persistent = lowlat::nvidia::persistent;

__global__ void hand_offs_kernel(std::uint32_t* arrived, lowlat::nvidia::stages::FaultPort fault,
                                 int count) {
  const persistent::Grid grid{arrived, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
  for (int i = 1; i <= count; ++i) {
    if (!persistent::hand_off(grid, static_cast<std::uint32_t>(i), fault, 0, 0)) return;
  }
}

}  // namespace

TEST_CASE(hand_offs_of_all_blocks_end_and_take_this_long) {
  need_device();
  int num_sms = 0;
  lowlat::host::cuda::check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0),
                            "attribute");
  OnDevice<std::uint32_t> words(std::vector<std::uint32_t>(num_sms + 64, 0u));
  OnDevice<lowlat::nvidia::stages::StatusWords> status(
      std::vector<lowlat::nvidia::stages::StatusWords>(1));
  std::uint32_t* abort_word = words.data() + num_sms + 32;
  OnDevice<std::uint32_t*> aborts(std::vector<std::uint32_t*>{abort_word});
  for (const int count : {1000, 4000}) {
    words.set(std::vector<std::uint32_t>(num_sms + 64, 0u));
    const auto begin = std::chrono::steady_clock::now();
    hand_offs_kernel<<<num_sms, 256>>>(words.data(), {aborts.data(), status.data(), 0, 1, kSecond},
                                       count);
    finish();
    const double us =
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
    std::printf("%d hand-offs of %d blocks: %.2f us each\n", count, num_sms, us / count);
    CHECK_EQ(status.get()[0].state, 0u);
    for (int block = 0; block < num_sms; ++block) {
      CHECK_EQ(words.get()[block], static_cast<std::uint32_t>(count));
    }
  }
}

TEST_CASE(replays_of_one_graph_give_the_same_bits_and_take_this_long) {
  need_device();
  for (const std::uint32_t kind : {LOWLAT_V41, LOWLAT_V4}) {
    Side side(kind, 1, [](int) { return "nvidia:0"; }, kSecond);
    const auto& config = side.group.config();
    Random random(3);
    std::vector<std::int32_t> all(64);
    for (auto& t : all) t = static_cast<std::int32_t>(random.bits() % 127);
    Shared shared(side.group.model(0));
    StepArrays prompt(config), verify(config);
    prompt.add(0, all, 0, 20);
    verify.add(0, all, 20, 6);
    lowlat_step step = side.placed(prompt, LOWLAT_EXTEND, shared);
    step.num_logit_rows = 0;
    TinyGroup::must(lowlat_plain_step_launch(side.group.model(0), &step, nullptr));
    TinyGroup::must(lowlat_synchronize(side.group.model(0), 10 * kSecond));
    step = side.placed(verify, LOWLAT_TARGET_VERIFY, shared);
    float* logits = shared.take<float>(6 * config.vocab);
    step.logits = logits;
    cudaStream_t stream;
    lowlat::host::cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    const lowlat::host::cuda::Graph graph(
        stream, [&] { TinyGroup::must(lowlat_step_launch(side.group.model(0), &step, stream)); });
    std::vector<float> first;
    int differ = 0;
    constexpr int kReplays = 1000;
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kReplays; ++i) {
      graph.launch(stream);
      lowlat::host::cuda::check(cudaStreamSynchronize(stream), "replay");
      const std::vector<float> now(logits, logits + 6 * config.vocab);
      if (i == 0) first = now;
      differ += !equal_bytes(first, now);
      std::fill_n(logits, 6 * config.vocab, -1.0f);
    }
    const double us =
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
            .count() /
        kReplays;
    std::printf("%s: %d replays of a verify step of 6 rows, %.1f us each, %d differ\n",
                kind == LOWLAT_V4 ? "v4" : "v41", kReplays, us, differ);
    CHECK_EQ(differ, 0);
    cudaStreamDestroy(stream);
  }
}

TEST_CASE(a_rank_that_does_not_come_is_a_fault_on_the_other_within_its_budget) {
  need_device();
  Side side(LOWLAT_V41, 2, [](int) { return "nvidia:0"; }, kSecond / 5);
  Shared shared(side.group.model(0));
  std::vector<std::int32_t> all(16, 3);
  StepArrays arrays(side.group.config());
  arrays.add(0, all, 0, 6);
  lowlat_step step = side.placed(arrays, LOWLAT_TARGET_VERIFY, shared);
  step.argmax = shared.take<std::int32_t>(6);
  const auto begin = std::chrono::steady_clock::now();
  TinyGroup::must(lowlat_step_launch(side.group.model(0), &step, nullptr));
  CHECK_EQ(lowlat_synchronize(side.group.model(0), 10 * kSecond), LOWLAT_FAULT);
  const double ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  std::printf("fault after %.1f ms: %s\n", ms, lowlat_last_error());
  CHECK(ms >= 199.0);
  lowlat_status_words words{};
  words.struct_bytes = sizeof words;
  TinyGroup::must(lowlat_status_read(side.group.model(0), &words));
  CHECK_EQ(words.state, 1u);
  CHECK_EQ(words.peer, 1);
  CHECK_EQ(lowlat_step_launch(side.group.model(0), &step, nullptr), LOWLAT_FAULT);
  // The peer was told: what it launches ends at once.
  Shared other(side.group.model(1));
  lowlat_step late = side.placed(arrays, LOWLAT_TARGET_VERIFY, other);
  TinyGroup::must(lowlat_step_launch(side.group.model(1), &late, nullptr));
  CHECK_EQ(lowlat_synchronize(side.group.model(1), 10 * kSecond), LOWLAT_FAULT);
  std::printf("the peer: %s\n", lowlat_last_error());
}

TEST_CASE(the_hosts_abort_ends_a_wait) {
  need_device();
  Side side(LOWLAT_V4, 2, [](int) { return "nvidia:0"; }, 30 * kSecond);
  Shared shared(side.group.model(1));
  std::vector<std::int32_t> all(16, 3);
  StepArrays arrays(side.group.config());
  arrays.add(0, all, 0, 6);
  lowlat_step step = side.placed(arrays, LOWLAT_TARGET_VERIFY, shared);
  TinyGroup::must(lowlat_step_launch(side.group.model(1), &step, nullptr));
  CHECK_EQ(lowlat_synchronize(side.group.model(1), kSecond / 20), LOWLAT_FAULT);  // still running
  const auto begin = std::chrono::steady_clock::now();
  lowlat_abort(side.group.model(0));
  CHECK_EQ(lowlat_synchronize(side.group.model(1), 10 * kSecond), LOWLAT_FAULT);
  const double ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  std::printf("aborted after %.1f ms: %s\n", ms, lowlat_last_error());
  CHECK(ms < 1000.0);
}

TEST_CASE(memory_of_the_host_is_refused) {
  need_device();
  const lowlat_model_config config = tiny_config(LOWLAT_V41, 1, 0);
  lowlat_model* model = nullptr;
  TinyGroup::must(lowlat_model_create("nvidia", &config, &model));
  lowlat_tensor_spec spec{};
  spec.struct_bytes = sizeof spec;
  TinyGroup::must(lowlat_model_tensor(model, 0, &spec));
  std::vector<std::uint8_t> memory(1 << 20);
  const lowlat_tensor tensor = dense_tensor(spec, memory.data());
  CHECK_EQ(lowlat_model_bind(model, spec.name, &tensor), LOWLAT_INVALID);
  CHECK(std::string(lowlat_last_error()).find("host memory") != std::string::npos);
  lowlat_model_destroy(model);
  CHECK_EQ(lowlat_model_create("nvidia:99", &config, &model), LOWLAT_UNSUPPORTED);
  CHECK_EQ(lowlat_model_create("nvidia:x", &config, &model), LOWLAT_INVALID);
}

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
#include "host/tiny_group.hpp"
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

// A rank's arrays and outputs where host and launches both reach them.
class Shared {
 public:
  explicit Shared(lowlat_model* model) {
    TinyGroup::must(lowlat_model_alloc(model, LOWLAT_MEMORY_SHARED, kBytes, &base_));
  }
  template <class T>
  T* take(std::size_t count) {
    next_ = (next_ + 63) / 64 * 64;
    T* out = reinterpret_cast<T*>(static_cast<char*>(base_) + next_);
    next_ += count * sizeof(T);
    REQUIRE(next_ <= kBytes);
    return out;
  }
  template <class T>
  const T* put(const std::vector<T>& values) {
    T* out = take<T>(values.size());
    std::copy(values.begin(), values.end(), out);
    return out;
  }
  void rewind() { next_ = 0; }

 private:
  static constexpr std::size_t kBytes = 1 << 20;
  void* base_ = nullptr;
  std::size_t next_ = 0;
};

enum class How { resident, plain, captured };

// A draft's arrays after a step of one or more requests, sampled where `temperature` is above 0.
struct DraftArrays {
  std::vector<std::int32_t> anchors, prefixes, slots, rows;
  std::vector<std::int64_t> offsets;
  std::vector<float> temperature;
};

class Side {
 public:
  template <class PlatformOf>
  Side(std::uint32_t kind, int tp_size, PlatformOf platform_of, std::uint64_t wait_budget_ns)
      : group(
            kind, tp_size, [&](lowlat_model_config& c) { c.wait_budget_ns = wait_budget_ns; },
            platform_of) {
    for (int r = 0; r < tp_size; ++r) shared_.emplace_back(group.model(r));
  }
  ~Side() {
    for (auto& graph : graphs_) cudaGraphExecDestroy(graph);
  }

  // launch(model, rank, shared, stream) on every rank, by `how`; then all have ended.
  template <class Launch>
  void run(How how, Launch launch) {
    if (how != How::captured) {
      for (auto& shared : shared_) shared.rewind();
      group.run([&](lowlat_model* model, int r) { return launch(model, r, shared_[r], nullptr); });
      return;
    }
    std::vector<cudaGraphExec_t> execs;
    std::vector<cudaStream_t> streams;
    for (int r = 0; r < group.tp_size(); ++r) {
      shared_[r].rewind();
      lowlat::host::cuda::check(cudaSetDevice(device_of_rank(r)), "cudaSetDevice");
      cudaStream_t stream;
      lowlat::host::cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                                "cudaStreamCreate");
      lowlat::host::cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                                "cudaStreamBeginCapture");
      TinyGroup::must(launch(group.model(r), r, shared_[r], stream));
      cudaGraph_t graph;
      lowlat::host::cuda::check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
      cudaGraphExec_t exec;
      lowlat::host::cuda::check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
      cudaGraphDestroy(graph);
      execs.push_back(exec);
      streams.push_back(stream);
    }
    for (int r = 0; r < group.tp_size(); ++r) {
      lowlat::host::cuda::check(cudaSetDevice(device_of_rank(r)), "cudaSetDevice");
      lowlat::host::cuda::check(cudaGraphLaunch(execs[r], streams[r]), "cudaGraphLaunch");
    }
    for (int r = 0; r < group.tp_size(); ++r) {
      lowlat::host::cuda::check(cudaStreamSynchronize(streams[r]), "cudaStreamSynchronize");
      cudaGraphExecDestroy(execs[r]);
      cudaStreamDestroy(streams[r]);
      lowlat_status_words words{};
      words.struct_bytes = sizeof words;
      TinyGroup::must(lowlat_status_read(group.model(r), &words));
      CHECK_EQ(words.state, 0u);
    }
    lowlat::host::cuda::check(cudaSetDevice(0), "cudaSetDevice");
  }

  lowlat_step placed(const StepArrays& arrays, lowlat_step_mode mode, Shared& shared) {
    lowlat_step step = arrays.step(mode);
    step.token_ids = shared.put(arrays.token_ids);
    step.positions = shared.put(arrays.positions);
    step.request_idx = shared.put(arrays.request_idx);
    step.slots = shared.put(arrays.slots);
    step.page_table = shared.put(arrays.page_table);
    step.history = shared.put(arrays.history);
    step.state_slots = shared.put(arrays.state_slots);
    return step;
  }

  // Logits and argmax of every row.
  void step(const StepArrays& arrays, lowlat_step_mode mode, How how,
            std::vector<float>& out_logits, std::vector<std::int32_t>& out_argmax) {
    const std::size_t rows = arrays.slots.size(), vocab = group.config().vocab;
    std::vector<float*> logits(group.tp_size());
    std::vector<std::int32_t*> argmax(group.tp_size());
    run(how, [&](lowlat_model* model, int r, Shared& shared, void* stream) {
      lowlat_step step = placed(arrays, mode, shared);
      step.logits = logits[r] = shared.take<float>(rows * vocab);
      step.argmax = argmax[r] = shared.take<std::int32_t>(rows);
      std::fill_n(logits[r], rows * vocab, std::nanf(""));
      std::fill_n(argmax[r], rows, -7);
      return (how == How::plain ? lowlat_plain_step_launch : lowlat_step_launch)(model, &step,
                                                                                 stream);
    });
    for (int r = 1; r < group.tp_size(); ++r) {
      CHECK(std::memcmp(logits[0], logits[r], rows * vocab * 4) == 0);
      CHECK(std::memcmp(argmax[0], argmax[r], rows * 4) == 0);
    }
    out_logits.assign(logits[0], logits[0] + rows * vocab);
    out_argmax.assign(argmax[0], argmax[0] + rows);
  }

  void draft(const StepArrays& arrays, const DraftArrays& own, How how,
             std::vector<std::int32_t>& out_tokens, std::vector<float>& out_logits) {
    const std::size_t batch = own.anchors.size(), vocab = group.config().vocab;
    std::vector<std::int32_t*> tokens(group.tp_size());
    std::vector<float*> logits(group.tp_size());
    run(how, [&](lowlat_model* model, int r, Shared& shared, void* stream) {
      lowlat_draft d{};
      d.struct_bytes = sizeof d;
      d.num_inject_rows = static_cast<std::int32_t>(arrays.slots.size());
      d.inject_slots = shared.put(arrays.slots);
      d.inject_positions = shared.put(arrays.positions);
      d.batch_size = static_cast<std::int32_t>(batch);
      d.page_table_stride = arrays.stride;
      d.anchors = shared.put(own.anchors);
      d.prefixes = shared.put(own.prefixes);
      d.slots = shared.put(own.slots);
      d.page_table = shared.put(arrays.page_table);
      d.temperature = shared.put(own.temperature);
      d.noise_row = shared.put(own.rows);
      d.noise_offset = shared.put(own.offsets);
      d.noise_key = 77;
      d.draft_tokens = tokens[r] = shared.take<std::int32_t>(5 * batch);
      d.draft_logits = logits[r] = shared.take<float>(5 * batch * vocab);
      return (how == How::plain ? lowlat_plain_draft_launch : lowlat_draft_launch)(model, &d,
                                                                                   stream);
    });
    for (int r = 1; r < group.tp_size(); ++r) {
      CHECK(std::memcmp(tokens[0], tokens[r], 5 * batch * 4) == 0);
      CHECK(std::memcmp(logits[0], logits[r], 5 * batch * vocab * 4) == 0);
    }
    out_tokens.assign(tokens[0], tokens[0] + 5 * batch);
    out_logits.assign(logits[0], logits[0] + 5 * batch * vocab);
  }

  TinyGroup group;

 private:
  int device_of_rank(int r) const { return spread_ ? r % num_devices() : 0; }

 public:
  bool spread_ = false;  // ranks are on devices of their own

 private:
  std::vector<Shared> shared_;
  std::vector<cudaGraphExec_t> graphs_;
};

// What two sides gave, side by side.
struct Compared {
  std::vector<double> errors;  // rel_l2 of each row of logits
  int rows = 0, argmax_differs = 0, drafts = 0, drafts_differ = 0;

  // Rows in which an expert or an entry was chosen otherwise: scores within a rounding of each
  // other, which a random model of a few dozen channels has.
  int flips() const {
    return static_cast<int>(std::ranges::count_if(errors, [](double e) { return !(e < 0.03); }));
  }
  double median() {
    std::ranges::nth_element(errors, errors.begin() + errors.size() / 2);
    return errors[errors.size() / 2];
  }

  void logits(const std::vector<float>& got, const std::vector<float>& want, int vocab) {
    REQUIRE(got.size() == want.size());
    for (std::size_t first = 0; first < got.size(); first += vocab) {
      double error = 0.0, norm = 0.0;
      for (int v = 0; v < vocab; ++v) {
        const double g = got[first + v], w = want[first + v];
        error += (g - w) * (g - w);
        norm += w * w;
      }
      errors.push_back(std::sqrt(error / norm));
    }
  }
};

// A life of one or two requests on both sides: prompt in chunks, then verify, decode and drafts.
// Both sides get the same tokens, whatever they say.
Compared live(Side& got, Side& want, How how, int num_requests, std::vector<float>* out_all) {
  const lowlat_model_config& config = got.group.config();
  const int vocab = config.vocab;
  const bool v4 = config.kind == LOWLAT_V4;
  Random random(11);
  std::vector<std::vector<std::int32_t>> all(num_requests);
  for (auto& tokens : all) {
    tokens.resize(300);
    for (auto& t : tokens) t = static_cast<std::int32_t>(random.bits() % 127);
  }
  Compared out;
  int length = 0;
  const auto take = [&](int count, lowlat_step_mode mode, How by) {
    StepArrays arrays(config);
    if (mode == LOWLAT_EXTEND) {
      for (int q = 0; q < num_requests; ++q) arrays.add(q, all[q], length, count);
    } else {
      for (int q = 0; q < num_requests; ++q) arrays.add(q, all[q], length, count);
    }
    std::vector<float> a, b;
    std::vector<std::int32_t> x, y;
    got.step(arrays, mode, by, a, x);
    want.step(arrays, mode, by == How::plain ? How::plain : How::resident, b, y);
    out.logits(a, b, vocab);
    if (out_all != nullptr) out_all->insert(out_all->end(), a.begin(), a.end());
    for (std::size_t i = 0; i < x.size(); ++i) out.argmax_differs += x[i] != y[i];
    out.rows += static_cast<int>(x.size());
    length += count;
    DraftArrays draft;
    for (int q = 0; q < num_requests; ++q) {
      draft.anchors.push_back(all[q][length]);
      draft.prefixes.push_back(length);
      draft.rows.push_back(q);
      draft.offsets.push_back(length);
      draft.temperature.push_back(q == 0 ? 0.0f : 0.7f);
      for (int i = 0; i < 5; ++i) {
        const int position = length + i;
        draft.slots.push_back(arrays.page_table[q * arrays.stride + position / arrays.page_size] *
                                  arrays.page_size +
                              position % arrays.page_size);
      }
    }
    std::vector<std::int32_t> s, t;
    got.draft(arrays, draft, by, s, a);
    want.draft(arrays, draft, by == How::plain ? How::plain : How::resident, t, b);
    if (out_all != nullptr) out_all->insert(out_all->end(), a.begin(), a.end());
    // A token that differs leads to other logits behind it, so only the first place is compared.
    for (std::size_t i = 0; i < s.size(); ++i) {
      out.drafts_differ += s[i] != t[i];
      ++out.drafts;
    }
  };
  const int per_request = 64 / num_requests;
  for (int left = v4 ? 120 : 21; left > 0; left -= per_request) {
    take(std::min(left, per_request - 1), LOWLAT_EXTEND, How::plain);
  }
  for (int i = 0; i < 4; ++i) {
    take(6, LOWLAT_TARGET_VERIFY, how);
    take(1, LOWLAT_DECODE, how);
  }
  return out;
}

constexpr std::uint64_t kSecond = 1'000'000'000;

void compare(std::uint32_t kind, int tp_size, int num_requests, How how, bool spread) {
  const auto on_nvidia = [&](int r) {
    return spread ? "nvidia:" + std::to_string(r) : std::string("nvidia:0");
  };
  Side want(kind, tp_size, [](int) { return "scalar"; }, 60 * kSecond);
  Side got(kind, tp_size, on_nvidia, 5 * kSecond);
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
  Side again(kind, tp_size, on_nvidia, 5 * kSecond);
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
    lowlat::host::cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                              "capture");
    TinyGroup::must(lowlat_step_launch(side.group.model(0), &step, stream));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    lowlat::host::cuda::check(cudaStreamEndCapture(stream, &graph), "capture");
    lowlat::host::cuda::check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    std::vector<float> first;
    int differ = 0;
    constexpr int kReplays = 1000;
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kReplays; ++i) {
      lowlat::host::cuda::check(cudaGraphLaunch(exec, stream), "launch");
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
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
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

// An engine in miniature: ranks are processes, they vote through shared memory, record what they
// captured, replay it, and go on when one of them is killed. docs/embedding.md walks through it.
//
//   engine_cpp [--ranks N] [--steps N] [--kill STEP] [--record FILE]
//
// --kill STEP: the last rank kills itself there, once. --record FILE: rank 0 writes its record,
// which `lowlat inspect FILE` shows.
#include <lowlat/dispatch.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kMaxRanks = 8;
constexpr int kMaxSteps = 1000;
constexpr int kMaxBatch = 8;
constexpr std::array<std::uint32_t, 3> kWidths{1, 2, 4};  // batch sizes that are captured

// [budgets] How long each wait may take, each shorter than the next.
constexpr std::uint64_t kSecondNs = 1'000'000'000;
constexpr std::uint64_t kVoteNs = 5 * kSecondNs;   // for a peer that is busy, not dead
constexpr std::uint64_t kJoinNs = 30 * kSecondNs;  // for processes to be born
constexpr lowlat_ladder kLadder{kSecondNs, 6 * kSecondNs, 40 * kSecondNs, 120 * kSecondNs};
// [budgets]

struct Options {
  int num_ranks = 2, num_steps = 40, kill_at = -1;
  std::string record_file;
};

// What ranks and supervisor share. Each word has one writer at a time.
struct Shared {
  std::atomic<int> step;    // where a fresh group goes on; written by ranks that saw a fault
  std::atomic<int> killed;  // whether --kill has happened
  std::atomic<int> covered[kMaxRanks], plain[kMaxRanks], groups[kMaxRanks];
  char fault[256];  // what rank 0 saw
  float out[kMaxSteps][kMaxRanks][kMaxBatch];
};

// [handles] A handle frees itself; a handle that is NULL is freed too, and nothing happens.
template <class T, auto destroy>
using Handle = std::unique_ptr<T, decltype([](T* handle) { destroy(handle); })>;
using Servable = Handle<lowlat_servable, lowlat_servable_destroy>;
using Recorder = Handle<lowlat_recorder, lowlat_recorder_destroy>;
using Record = Handle<lowlat_record, lowlat_record_destroy>;
using Seat = Handle<lowlat_seat, lowlat_seat_destroy>;
using Coverage = Handle<lowlat_coverage, lowlat_coverage_destroy>;
using Dispatcher = Handle<lowlat_dispatcher, lowlat_dispatcher_destroy>;

void must(lowlat_dispatch_status status, const char* what) {
  if (status == LOWLAT_DISPATCH_STATUS_OK) return;
  std::fprintf(stderr, "%s: %s\n", what, lowlat_dispatch_last_error());
  std::_Exit(1);
}
// [handles]

// The model: one multiplication a request, by this rank's own weight.
float forward(int rank, int step, int request) {
  return static_cast<float>(rank + 1) * static_cast<float>(step * 10 + request);
}

// A "graph": it reads what it was captured with, at a fixed batch size.
struct Graph {
  std::uint32_t batch_size;
  const float* inputs;
  void replay(int rank, float* out) const {
    for (std::uint32_t idx = 0; idx < batch_size; ++idx) {
      out[idx] = static_cast<float>(rank + 1) * inputs[idx];
    }
  }
};

struct Rank {
  const Options& options;
  const int rank;
  Shared& shared;
  std::array<float, kMaxBatch> inputs{};
  std::vector<Graph> graphs{};
  Servable servable{};
  Record record{};
  Seat seat{};
  Dispatcher dispatcher{};

  void run() {
    must(lowlat_dispatch_check_abi(LOWLAT_DISPATCH_ABI_VERSION), "abi");
    guard();
    capture();
    do {
      form();
    } while (!serve());
  }

  // [guard] May our kernels run here at all? Every reason against it comes at once.
  void guard() {
    const std::string needs =
        R"({"name": "engine_cpp", "isas": ["cpu"], "tp_sizes": [1, 2, 3, 4]})";
    const std::string facts =
        R"({"isa": "cpu", "tp_size": )" + std::to_string(options.num_ranks) + "}";
    lowlat_servable* made = nullptr;
    must(lowlat_guard(needs.c_str(), facts.c_str(), &made), "guard");
    servable.reset(made);
  }
  // [guard]

  // [capture] One graph a batch size, and a note of what each will read when it is replayed.
  void capture() {
    lowlat_recorder* recorder = nullptr;
    must(lowlat_recorder_create(&recorder), "recorder");
    const Recorder owner(recorder);
    for (const std::uint32_t batch_size : kWidths) {
      graphs.push_back({batch_size, inputs.data()});
      const lowlat_graph_key key{
          LOWLAT_FACTS_MODE_DECODE, batch_size, 1, batch_size, "mini", "cpu", 1, 2};
      const lowlat_seal seal = sealed();
      must(lowlat_recorder_note(recorder, &key, LOWLAT_GRAPH_PATH_FUSED, &seal, 1), "note");
    }
    lowlat_record* made = nullptr;
    must(lowlat_recorder_finish(recorder, &made), "finish");
    record.reset(made);
    if (rank == 0 && !options.record_file.empty()) {
      const char* text = nullptr;
      must(lowlat_record_text(made, &text), "text");
      if (!(std::ofstream(options.record_file) << text).flush()) {
        std::fprintf(stderr, "%s: cannot be written\n", options.record_file.c_str());
        std::_Exit(1);
      }
    }
  }

  // What the graphs read, as it lies now.
  lowlat_seal sealed() const {
    static constexpr std::int64_t kShape[] = {kMaxBatch};
    return {"inputs", "float32", reinterpret_cast<std::uintptr_t>(inputs.data()), kShape, 1};
  }
  // [capture]

  // [form] All ranks or none: they meet under a name and agree on what they cover.
  void form() {
    const std::string name = "engine-cpp-" + std::to_string(getppid());
    lowlat_seat* joined = nullptr;
    must(lowlat_group_join(name.c_str(), rank, options.num_ranks, &kLadder, kJoinNs, &joined),
         "join");
    seat.reset(joined);
    lowlat_ballot ballot{};
    ballot.widths = kWidths.data();
    ballot.num_widths = kWidths.size();
    ballot.ladder = kLadder;
    must(lowlat_record_keys_digest(record.get(), &ballot.keys_digest), "digest");
    lowlat_coverage* coverage = nullptr;
    must(lowlat_seat_vote(joined, servable.get(), &ballot, kVoteNs, &coverage), "vote");
    const Coverage owner(coverage);
    lowlat_dispatcher* made = nullptr;
    must(lowlat_dispatcher_create(coverage, record.get(), &made), "dispatcher");
    dispatcher.reset(made);
    ++shared.groups[rank];
  }
  // [form]

  // [serve] Step after step: decide, agree, replay. False when a peer is gone.
  bool serve() {
    for (int step = shared.step; step < options.num_steps; ++step) {
      const bool last = rank == options.num_ranks - 1;
      if (step == options.kill_at && last && !shared.killed++) raise(SIGKILL);
      const std::uint32_t batch = 1 + step % 5;
      const bool prompt = step % 10 == 9;
      const lowlat_step_facts facts{prompt ? LOWLAT_FACTS_MODE_EXTEND : LOWLAT_FACTS_MODE_DECODE,
                                    batch, prompt ? 0u : 1u, batch};
      lowlat_decision decision{};
      std::uint64_t digest = 0;
      must(lowlat_dispatcher_decide(dispatcher.get(), &facts, &decision), "decide");
      must(lowlat_step_digest(&facts, &digest), "digest");
      switch (lowlat_seat_agree_step(seat.get(), digest, kVoteNs)) {
        case LOWLAT_DISPATCH_STATUS_OK: run_step(step, batch, decision); break;
        case LOWLAT_DISPATCH_STATUS_DECLINE:  // ranks are about to run different steps
          run_step(step, batch, {LOWLAT_REASON_VOTE_STEP, 0, 0});
          break;
        default: give_up_group(step); return false;
      }
    }
    return true;
  }

  void run_step(int step, std::uint32_t batch, const lowlat_decision& decision) {
    for (std::uint32_t idx = 0; idx < batch; ++idx) {
      inputs[idx] = static_cast<float>(step * 10 + static_cast<int>(idx));
    }
    std::array<float, kMaxBatch> out{};
    if (decision.reason == 0) {
      const lowlat_seal now = sealed();
      must(lowlat_record_check_seals(record.get(), decision.key_idx, &now, 1), "seals");
      graphs[decision.key_idx].replay(rank, out.data());  // padded to decision.padded_batch
      ++shared.covered[rank];
    } else {
      for (std::uint32_t idx = 0; idx < batch; ++idx) {
        out[idx] = forward(rank, step, static_cast<int>(idx));
      }
      ++shared.plain[rank];
    }
    std::memcpy(shared.out[step][rank], out.data(), batch * sizeof(float));
  }
  // [serve]

  // [fault] A peer is gone: this group never votes again. Its survivors saw it at the same step, so
  // they go on there in a fresh group, with whoever the supervisor starts in its place.
  void give_up_group(int step) {
    if (rank == 0) {
      std::snprintf(shared.fault, sizeof shared.fault, "%s", lowlat_dispatch_last_error());
    }
    must(lowlat_dispatcher_disarm(dispatcher.get(), LOWLAT_REASON_RANK_MISSING), "disarm");
    seat.reset();
    shared.step = step;
  }
  // [fault]
};

pid_t start(const Options& options, int rank, Shared& shared) {
  const pid_t pid = fork();
  if (pid == 0) {
    Rank{options, rank, shared}.run();
    std::_Exit(lowlat_dispatch_num_handles() == 0 ? 0 : 2);
  }
  return pid;
}

bool all_right(const Options& options, const Shared& shared) {
  for (int step = 0; step < options.num_steps; ++step) {
    for (int rank = 0; rank < options.num_ranks; ++rank) {
      for (int idx = 0; idx < 1 + step % 5; ++idx) {
        if (shared.out[step][rank][idx] != forward(rank, step, idx)) return false;
      }
    }
  }
  return true;
}

// Whether the command line is one of ours.
bool read(int argc, char** argv, Options& options) {
  for (int idx = 1; idx < argc; idx += 2) {
    const std::string name = argv[idx];
    if (idx + 1 == argc) return false;
    const char* const value = argv[idx + 1];
    if (name == "--ranks") {
      options.num_ranks = std::atoi(value);
    } else if (name == "--steps") {
      options.num_steps = std::atoi(value);
    } else if (name == "--kill") {
      options.kill_at = std::atoi(value);
    } else if (name == "--record") {
      options.record_file = value;
    } else {
      return false;
    }
  }
  return 1 <= options.num_ranks && options.num_ranks <= kMaxRanks && 1 <= options.num_steps &&
         options.num_steps <= kMaxSteps;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!read(argc, argv, options)) {
    std::fprintf(stderr,
                 "usage: engine [--ranks 1..%d] [--steps 1..%d] [--kill STEP] [--record FILE]\n",
                 kMaxRanks, kMaxSteps);
    return 2;
  }
  void* page =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return 1;
  Shared& shared = *new (page) Shared{};

  // [supervise] A rank that was killed is started again; it joins the fresh group.
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < options.num_ranks; ++rank)
    ranks.push_back(start(options, rank, shared));
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(100);
  int num_running = options.num_ranks, num_failed = 0;
  while (0 < num_running && std::chrono::steady_clock::now() < deadline) {
    for (int rank = 0; rank < options.num_ranks; ++rank) {
      int status = 0;
      if (ranks[rank] == 0 || waitpid(ranks[rank], &status, WNOHANG) != ranks[rank]) continue;
      if (WIFSIGNALED(status)) {
        std::printf("rank %d was killed and is started again\n", rank);
        ranks[rank] = start(options, rank, shared);
        continue;
      }
      num_failed += WEXITSTATUS(status) != 0;
      ranks[rank] = 0;
      --num_running;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  // [supervise]
  if (shared.fault[0] != '\0') std::printf("rank 0 saw: %s\n", shared.fault);
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    std::printf("rank %d: %d steps by graphs, %d by its own forward, %d groups\n", rank,
                shared.covered[rank].load(), shared.plain[rank].load(), shared.groups[rank].load());
  }
  const bool right = num_running == 0 && num_failed == 0 && all_right(options, shared);
  std::printf("%d steps, %s\n", options.num_steps, right ? "every result right" : "WRONG");
  return right ? 0 : 1;
}

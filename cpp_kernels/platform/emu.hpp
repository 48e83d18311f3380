// platform/emu.hpp: a fiber a GPU thread, on the CPU, for functional tests of the block forms.
//
// launch() runs a body as a grid: one OS thread a block (so blocks and ranks wait for each other as
// they do on devices), and on it one fiber a thread of the block. A fiber runs until it meets a
// collective, a barrier or spin_pause; which one runs next is decided by `order`, so a run is
// repeated exactly, and a race inside a block shows as a result that differs between orders.
//
// What is caught, with one line that names the threads, and abort(): a barrier or collective that
// cannot fill because threads have ended or wait elsewhere; lanes of a warp in different
// collectives; a lane that is none; a stack that ran over. Shared memory begins poisoned.
// AddressSanitizer knows the fibers' stacks. Under ThreadSanitizer every fiber counts as a thread
// of its own, and only barriers order them: races inside a block are reported.
//
// What it cannot show: how long anything takes, lanes that run in step, and what a vendor's
// compiler makes of a loop.
//
//   LOWLAT_EMU_WARP_LANES   lanes of a warp: 32 unless set; 64 is AMD's
//   LOWLAT_EMU_TILES        stages multiply tiles, as AMD's do; of warps of 64
//   LOWLAT_EMU_UCONTEXT     switch fibers with swapcontext, as machines other than x86-64 do
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define LOWLAT_PLATFORM emu
#define LOWLAT_DEVICE inline
#define LOWLAT_UNIT inline
#define LOWLAT_SHARED(type, name) \
  static char name##_site;        \
  type& name = *static_cast<type*>(::lowlat::emu::fibers::shared(&name##_site, sizeof(type)))
#if !defined(LOWLAT_EMU_WARP_LANES) && defined(LOWLAT_EMU_TILES)
#define LOWLAT_EMU_WARP_LANES 64
#elif !defined(LOWLAT_EMU_WARP_LANES)
#define LOWLAT_EMU_WARP_LANES 32
#endif

#include "platform/cpu.hpp"

#if !defined(__x86_64__) && !defined(LOWLAT_EMU_UCONTEXT)
#define LOWLAT_EMU_UCONTEXT
#endif
#ifdef LOWLAT_EMU_UCONTEXT
#include <ucontext.h>
#else
// void lowlat_emu_switch(void** out_stack, void* stack): saves what a call must keep, leaves the
// stack pointer in *out_stack and goes on where `stack` was left. swapcontext does the same with
// two system calls for the signal mask, which nobody changes here.
asm(R"(
.pushsection .text
.weak lowlat_emu_switch
.type lowlat_emu_switch, @function
lowlat_emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size lowlat_emu_switch, .-lowlat_emu_switch
.popsection
)");
extern "C" void lowlat_emu_switch(void** out_stack, void* stack);
#endif

#if defined(__SANITIZE_ADDRESS__)
extern "C" {
void __sanitizer_start_switch_fiber(void** out_fake_stack, const void* bottom, std::size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** out_bottom,
                                     std::size_t* out_size);
void __asan_unpoison_memory_region(void const* address, std::size_t size);
}
#endif
#if defined(__SANITIZE_THREAD__)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace lowlat::emu {

// Which ready fiber of a block runs next: in order of threads, against it, or (any other number) in
// a random order that this seed gives anew at every round.
inline constexpr std::uint32_t kAscending = 0, kDescending = 1;

struct Grid {
  int num_threads;  // of a block; a multiple of the warp
  int num_blocks = 1;
  std::uint32_t order = kAscending;
};

namespace fibers {

inline constexpr int kLanes = LOWLAT_EMU_WARP_LANES;
static_assert(kLanes == 32 || kLanes == 64);
inline constexpr std::size_t kStackBytes = 256 << 10;  // touched as far as it is used
// Tops of stacks at a multiple of a page would all want the same lines of a cache.
inline constexpr std::size_t kStackStride = kStackBytes + 17 * 64;
inline constexpr std::uint64_t kStackEnd = 0x5afe'57ac'c0de'e4d5ull;

enum class Meeting : std::uint8_t {
  none,
  block_sync,
  block_any,
  warp_sync,
  warp_sum,
  warp_max,
  warp_shuffle,
  warp_shuffle_xor,
  warp_ballot
};
inline const char* name_of(Meeting meeting) {
  constexpr const char* kNames[] = {"nothing",      "block_sync",       "block_any",
                                    "warp_sync",    "warp_sum",         "warp_max",
                                    "warp_shuffle", "warp_shuffle_xor", "warp_ballot"};
  return kNames[static_cast<int>(meeting)];
}

[[noreturn]] inline void misuse(const std::string& what) {
  std::fprintf(stderr, "lowlat emu: %s\n", what.c_str());
  std::fflush(stderr);
  std::abort();
}

// The platform's own bookkeeping is no part of the program that ThreadSanitizer looks at.
struct Quiet {
#if defined(__SANITIZE_THREAD__)
  Quiet() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Quiet() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  Quiet() {}
#endif
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;
};
inline void happens_before([[maybe_unused]] void* key) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(key);
#endif
}
inline void happens_after([[maybe_unused]] void* key) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(key);
#endif
}

struct Fiber {
  enum class State : std::uint8_t { ready, waits, ended };
  State state = State::ready;
  Meeting meeting = Meeting::none;  // where it waits
  bool spun = false;                // gave way by spin_pause
  char* stack = nullptr;
#ifdef LOWLAT_EMU_UCONTEXT
  ucontext_t context;
#else
  void* saved = nullptr;
#endif
  void* fake_stack = nullptr;  // AddressSanitizer's
  void* tsan = nullptr;
};

// Lanes of a warp, or threads of a block, that come to one place. Values are kept for two meetings
// in turn: nobody comes to the one after the next before everybody has read this one's.
struct Gate {
  Meeting meeting = Meeting::none;
  int num_arrived = 0, num_needed = 0;
  std::uint32_t turn = 0;
  std::uint64_t result[2] = {0, 0};
  char order[2] = {0, 0};  // addresses that ThreadSanitizer knows the two by
};

class BlockRun {
 public:
  BlockRun(int block_idx, const Grid& grid, const std::function<void(int)>& body)
      : block_idx_(block_idx), num_threads_(grid.num_threads), order_(grid.order), body_(body) {}

  void run();
  int thread_idx() const { return current_; }

  // All threads call; true in every one when one said true.
  bool meet_block(Meeting meeting, bool mine) {
    Gate& gate = block_gate_;
    const int place = gate.turn & 1u;
    happens_before(&gate.order[place]);
    {
      const Quiet quiet;
      arrive(gate, meeting, 0, num_threads_);
      any_[place] = any_[place] || mine;
      if (++gate.num_arrived == gate.num_needed) {
        gate.result[place] = any_[place] ? 1u : 0u;
        any_[place] = false;
        open(gate, 0, num_threads_);
      } else {
        wait(meeting);
      }
    }
    happens_after(&gate.order[place]);
    const Quiet quiet;
    return gate.result[place] != 0u;
  }

  // All lanes of a warp call. Gives all lanes' words; the one result of a sum, maximum or ballot is
  // in `out_result`. Only warp_sync orders memory.
  const std::uint32_t* meet_warp(Meeting meeting, std::uint32_t bits,
                                 std::uint64_t* out_result = nullptr) {
    const int warp_idx = current_ / kLanes, first = warp_idx * kLanes;
    Gate& gate = warp_gates_[warp_idx];
    const bool orders = meeting == Meeting::warp_sync;
    const Quiet quiet;
    const int place = gate.turn & 1u;
    std::uint32_t* words = &words_[(warp_idx * 2 + place) * kLanes];
    if (orders) happens_before(&gate.order[place]);
    arrive(gate, meeting, first, kLanes);
    words[current_ - first] = bits;
    if (++gate.num_arrived == kLanes) {
      if (meeting == Meeting::warp_sum) gate.result[place] = sum_of(words);
      if (meeting == Meeting::warp_max) gate.result[place] = max_of(words);
      if (meeting == Meeting::warp_ballot) gate.result[place] = ballot_of(words);
      open(gate, first, kLanes);
    } else {
      wait(meeting);
    }
    if (orders) happens_after(&gate.order[place]);
    if (out_result != nullptr) *out_result = gate.result[place];
    return words;
  }

  void pause() {
    const Quiet quiet;
    Fiber& fiber = fibers_[current_];
    fiber.spun = true;
    leave(fiber);
  }

  void* shared(const void* site, std::size_t bytes) {
    const Quiet quiet;
    auto& memory = shared_[site];
    if (memory.empty()) memory.assign((bytes + 127) / 128 * 16, 0xa5a5'a5a5'a5a5'a5a5ull);
    return memory.data();
  }

  [[noreturn]] void fail(const std::string& what) const {
    misuse("block " + std::to_string(block_idx_) + " of " + std::to_string(num_threads_) +
           " threads: " + what);
  }

 private:
  void arrive(Gate& gate, Meeting meeting, int first, int count) {
    if (gate.num_arrived == 0) {
      gate.meeting = meeting;
      gate.num_needed = count;
    } else if (gate.meeting != meeting) {
      fail("thread " + std::to_string(current_) + " is in " + name_of(meeting) + ", but " +
           threads_where(
               [&](const Fiber& f) {
                 return f.state == Fiber::State::waits && f.meeting == gate.meeting;
               },
               first, count) +
           " in " + name_of(gate.meeting) + "; all must make the same call");
    }
  }
  void open(Gate& gate, int first, int count) {
    gate.num_arrived = 0;
    ++gate.turn;
    for (int i = first; i < first + count; ++i) fibers_[i].state = Fiber::State::ready;
  }
  void wait(Meeting meeting) {
    Fiber& fiber = fibers_[current_];
    fiber.state = Fiber::State::waits;
    fiber.meeting = meeting;
    leave(fiber);
  }

  static float float_of(std::uint32_t bits) { return plat::bits_float(bits); }
  static std::uint32_t sum_of(const std::uint32_t* words) {
    float v[kLanes];
    for (int i = 0; i < kLanes; ++i) v[i] = float_of(words[i]);
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) v[i] += v[i + half];
    }
    return plat::float_bits(v[0]);
  }
  static std::uint32_t max_of(const std::uint32_t* words) {
    float most = float_of(words[0]);
    for (int i = 1; i < kLanes; ++i) {
      const float v = float_of(words[i]);
      if (v > most || most != most) most = v;
    }
    return plat::float_bits(most);
  }

  static std::uint64_t ballot_of(const std::uint32_t* words) {
    std::uint64_t bits = 0u;
    for (int i = 0; i < kLanes; ++i) bits |= std::uint64_t{words[i]} << i;
    return bits;
  }

  // "threads 0-31, 40"
  template <class Where>
  std::string threads_where(const Where& where, int first, int count) const {
    std::string text;
    int num = 0;
    for (int i = first; i < first + count; ++i) {
      if (!where(fibers_[i])) continue;
      int last = i;
      while (last + 1 < first + count && where(fibers_[last + 1])) ++last;
      text += (text.empty() ? "" : ", ") + std::to_string(i);
      if (last > i) text += "-" + std::to_string(last);
      num += last - i + 1;
      i = last;
    }
    return (num == 1 ? "thread " : "threads ") + text;
  }
  [[noreturn]] void fail_stuck() const;

  void enter(Fiber& fiber);
  void leave(Fiber& fiber);
  static void entry();
  void shuffle(std::vector<int>& threads);

  int block_idx_, num_threads_;
  std::uint32_t order_;
  const std::function<void(int)>& body_;
  int current_ = 0;
  std::vector<Fiber> fibers_;
  Gate block_gate_;
  bool any_[2] = {false, false};
  std::vector<Gate> warp_gates_;
  std::vector<std::uint32_t> words_;  // [warps, 2, kLanes]
  std::map<const void*, std::vector<std::uint64_t>> shared_;
  std::uint32_t random_ = 0;
  char begun_ = 0, ended_ = 0;  // addresses for ThreadSanitizer
#ifdef LOWLAT_EMU_UCONTEXT
  ucontext_t scheduler_;
#else
  void* scheduler_ = nullptr;
#endif
  void* scheduler_tsan_ = nullptr;
  void* scheduler_fake_stack_ = nullptr;
  const void* scheduler_bottom_ = nullptr;
  std::size_t scheduler_bytes_ = 0;
};

inline constinit thread_local BlockRun* running = nullptr;

// An OS thread keeps its stacks from one block to the next.
struct Stacks {
  std::unique_ptr<char[]> memory;
  std::size_t count = 0;

  char* of(std::size_t num_threads) {
    if (count < num_threads) {
      memory.reset();
      memory.reset(new char[num_threads * kStackStride]);
      count = num_threads;
    }
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(memory.get(), num_threads * kStackStride);
#endif
    return memory.get();
  }
};
inline thread_local Stacks stacks;

inline BlockRun& here() {
  if (running == nullptr) misuse("a device function was called outside of launch()");
  return *running;
}
inline void* shared(const void* site, std::size_t bytes) { return here().shared(site, bytes); }

// The scheduler's side of a switch.
inline void BlockRun::enter(Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&scheduler_fake_stack_, fiber.stack, kStackBytes);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(fiber.tsan, 1);  // 1: a switch orders nothing
#endif
#ifdef LOWLAT_EMU_UCONTEXT
  swapcontext(&scheduler_, &fiber.context);
#else
  lowlat_emu_switch(&scheduler_, fiber.saved);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler_fake_stack_, nullptr, nullptr);
#endif
}

// The fiber's side. One that has ended does not come back.
inline void BlockRun::leave(Fiber& fiber) {
  [[maybe_unused]] const bool ended = fiber.state == Fiber::State::ended;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(ended ? nullptr : &fiber.fake_stack, scheduler_bottom_,
                                 scheduler_bytes_);
#endif
#if defined(__SANITIZE_THREAD__)
  void* const scheduler_tsan = scheduler_tsan_;
  if (ended) happens_before(&ended_);  // its last access to this object was the line before
  __tsan_switch_to_fiber(scheduler_tsan, 1);
#endif
#ifdef LOWLAT_EMU_UCONTEXT
  swapcontext(&fiber.context, &scheduler_);
#else
  lowlat_emu_switch(&fiber.saved, scheduler_);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &scheduler_bottom_, &scheduler_bytes_);
#endif
}

inline void BlockRun::entry() {
  BlockRun& run = *running;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &run.scheduler_bottom_, &run.scheduler_bytes_);
#endif
  happens_after(&run.begun_);
  // An exception has nowhere to go: as one that leaves a thread, it ends the program.
  const auto guarded = [&run]() noexcept { run.body_(run.block_idx_); };
  guarded();
  Fiber* fiber = nullptr;
  {
    const Quiet quiet;  // not past the end: a thread may not end in it
    fiber = &run.fibers_[run.current_];
    fiber->state = Fiber::State::ended;
  }
  run.leave(*fiber);
  std::abort();  // not reached
}

inline void BlockRun::shuffle(std::vector<int>& threads) {
  for (std::size_t i = threads.size() - 1; i > 0; --i) {
    random_ = random_ * 1664525u + 1013904223u;
    std::swap(threads[i], threads[(random_ >> 8) % (i + 1)]);
  }
}

inline void BlockRun::fail_stuck() const {
  std::string text;
  for (int i = static_cast<int>(Meeting::block_sync); i <= static_cast<int>(Meeting::warp_ballot);
       ++i) {
    const auto waits = [&](const Fiber& f) {
      return f.state == Fiber::State::waits && f.meeting == static_cast<Meeting>(i);
    };
    bool any = false;
    for (const Fiber& fiber : fibers_) any = any || waits(fiber);
    if (!any) continue;
    text += threads_where(waits, 0, num_threads_) + " wait in " + name_of(static_cast<Meeting>(i)) +
            "; ";
  }
  const auto has_ended = [](const Fiber& f) { return f.state == Fiber::State::ended; };
  bool any = false;
  for (const Fiber& fiber : fibers_) any = any || has_ended(fiber);
  if (any) text += threads_where(has_ended, 0, num_threads_) + " have ended; ";
  fail(text + "nobody can go on: all threads of a block (lanes of a warp) must make the call");
}

inline void BlockRun::run() {
  const Quiet quiet;
  if (num_threads_ <= 0 || num_threads_ % kLanes != 0) {
    misuse(std::to_string(num_threads_) + " threads a block; a multiple of " +
           std::to_string(kLanes) + ", the lanes of a warp, is needed");
  }
  const int num_warps = num_threads_ / kLanes;
  fibers_.resize(num_threads_);
  warp_gates_.resize(num_warps);
  words_.resize(static_cast<std::size_t>(num_warps) * 2 * kLanes);
  // A launch inside of a launch would find the stacks in use.
  if (running != nullptr) misuse("launch() was called inside of a launch");
  char* const memory = stacks.of(static_cast<std::size_t>(num_threads_));
  running = this;
  random_ = order_;
#if defined(__SANITIZE_THREAD__)
  scheduler_tsan_ = __tsan_get_current_fiber();
#endif
  happens_before(&begun_);
  std::vector<int> threads(num_threads_);
  for (int i = 0; i < num_threads_; ++i) {
    threads[i] = order_ == kDescending ? num_threads_ - 1 - i : i;
    Fiber& fiber = fibers_[i];
    fiber.stack = memory + i * kStackStride;
    std::memcpy(fiber.stack, &kStackEnd, sizeof kStackEnd);
#ifdef LOWLAT_EMU_UCONTEXT
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, &BlockRun::entry, 0);
#else
    // What lowlat_emu_switch takes: six registers, then where to go, which begins as a function
    // does, eight bytes past a multiple of 16.
    const auto top = reinterpret_cast<std::uintptr_t>(fiber.stack + kStackBytes) / 16 * 16;
    auto** slot = reinterpret_cast<void**>(top - 16);
    slot[1] = nullptr;
    slot[0] = reinterpret_cast<void*>(&BlockRun::entry);
    for (int reg = 1; reg <= 6; ++reg) slot[-reg] = nullptr;
    fiber.saved = slot - 6;
#endif
#if defined(__SANITIZE_THREAD__)
    fiber.tsan = __tsan_create_fiber(0);
#endif
  }
  for (int num_left = num_threads_; num_left > 0;) {
    if (order_ != kAscending && order_ != kDescending) shuffle(threads);
    bool any_ran = false, all_spun = true;
    for (const int thread : threads) {
      Fiber& fiber = fibers_[thread];
      if (fiber.state != Fiber::State::ready) continue;
      fiber.spun = false;
      current_ = thread;
      enter(fiber);
      any_ran = true;
      all_spun = all_spun && fiber.spun;
      if (fiber.state != Fiber::State::ended) continue;
      --num_left;
      if (std::memcmp(fiber.stack, &kStackEnd, sizeof kStackEnd) != 0) {
        fail("thread " + std::to_string(thread) + " used more than its " +
             std::to_string(kStackBytes) + " bytes of stack");
      }
    }
    if (!any_ran) fail_stuck();
    if (all_spun) std::this_thread::yield();  // all wait for somebody else
  }
  happens_after(&ended_);
#if defined(__SANITIZE_THREAD__)
  for (Fiber& fiber : fibers_) __tsan_destroy_fiber(fiber.tsan);
#endif
  running = nullptr;
}

}  // namespace fibers

// Runs body(block_idx) in every thread of every block; back when all have ended. Blocks of a grid
// run at the same time. The body is called through one object: what it captures is the same for all
// threads, as a kernel's arguments are.
inline void launch(const Grid& grid, const std::function<void(int block_idx)>& body) {
  if (grid.num_blocks == 1) {
    fibers::BlockRun(0, grid, body).run();
    return;
  }
  std::vector<std::thread> blocks;
  for (int block_idx = 0; block_idx < grid.num_blocks; ++block_idx) {
    blocks.emplace_back([&, block_idx] { fibers::BlockRun(block_idx, grid, body).run(); });
  }
  for (std::thread& block : blocks) block.join();
}

}  // namespace lowlat::emu

namespace lowlat::emu::plat {

inline constexpr const char* kName = "emu";
inline constexpr int kWarpLanes = fibers::kLanes;
template <int kThreads>
struct Block {
  static constexpr int kNumThreads = kThreads;
  static_assert(kThreads % kWarpLanes == 0, "a block is whole warps");
};

LOWLAT_DEVICE int thread_idx() { return fibers::here().thread_idx(); }
LOWLAT_DEVICE void block_sync() { fibers::here().meet_block(fibers::Meeting::block_sync, false); }
LOWLAT_DEVICE bool block_any(bool mine) {
  return fibers::here().meet_block(fibers::Meeting::block_any, mine);
}
LOWLAT_DEVICE void warp_sync() { fibers::here().meet_warp(fibers::Meeting::warp_sync, 0u); }
LOWLAT_DEVICE float warp_sum(float v) {
  std::uint64_t bits = 0u;
  fibers::here().meet_warp(fibers::Meeting::warp_sum, float_bits(v), &bits);
  return bits_float(static_cast<std::uint32_t>(bits));
}
LOWLAT_DEVICE float warp_max(float v) {
  std::uint64_t bits = 0u;
  fibers::here().meet_warp(fibers::Meeting::warp_max, float_bits(v), &bits);
  return bits_float(static_cast<std::uint32_t>(bits));
}
LOWLAT_DEVICE std::uint32_t warp_shuffle(std::uint32_t v, int lane) {
  fibers::BlockRun& run = fibers::here();
  if (lane < 0 || lane >= kWarpLanes) {
    run.fail("thread " + std::to_string(run.thread_idx()) + " asks warp_shuffle for lane " +
             std::to_string(lane) + " of " + std::to_string(kWarpLanes));
  }
  const std::uint32_t* words = run.meet_warp(fibers::Meeting::warp_shuffle, v);
  const fibers::Quiet quiet;
  return words[lane];
}
LOWLAT_DEVICE float warp_shuffle(float v, int lane) {
  return bits_float(warp_shuffle(float_bits(v), lane));
}
LOWLAT_DEVICE std::uint32_t warp_shuffle_xor(std::uint32_t v, int mask) {
  fibers::BlockRun& run = fibers::here();
  if (mask < 0 || mask >= kWarpLanes) {
    run.fail("thread " + std::to_string(run.thread_idx()) + " gives warp_shuffle_xor the mask " +
             std::to_string(mask) + "; a warp has " + std::to_string(kWarpLanes) + " lanes");
  }
  const std::uint32_t* words = run.meet_warp(fibers::Meeting::warp_shuffle_xor, v);
  const fibers::Quiet quiet;
  return words[run.thread_idx() % kWarpLanes ^ mask];
}
LOWLAT_DEVICE float warp_shuffle_xor(float v, int mask) {
  return bits_float(warp_shuffle_xor(float_bits(v), mask));
}
LOWLAT_DEVICE std::uint64_t warp_ballot(bool mine) {
  std::uint64_t bits = 0u;
  fibers::here().meet_warp(fibers::Meeting::warp_ballot, mine ? 1u : 0u, &bits);
  return bits;
}

LOWLAT_DEVICE void spin_pause() { fibers::here().pause(); }

#ifdef LOWLAT_EMU_TILES
inline constexpr bool kTileProducts = true;
static_assert(kWarpLanes == 64, "LOWLAT_EMU_TILES needs LOWLAT_EMU_WARP_LANES=64");
#else
inline constexpr bool kTileProducts = false;
#endif

}  // namespace lowlat::emu::plat

#include "platform/tile_plain.hpp"

// The platform emu keeps the contract; its collectives give what they say, in any order of the
// fibers; misuse ends the program with a line that names the threads; a missing barrier shows.
//
// Built a second time with LOWLAT_EMU_WARP_LANES=64.
#include "platform/emu.hpp"

#include "platform/contract.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "emu_block.hpp"

namespace {

namespace emu = lowlat::emu;
namespace plat = lowlat::emu::plat;
using lowlat::testing::in_every_order;
using lowlat::testing::same_bits;
constexpr int kLanes = plat::kWarpLanes;

// What a program that runs `body` writes to stderr before it is killed by SIGABRT; "alive" when it
// ends by itself or goes on for ten seconds.
template <class Body>
std::string last_words(Body body) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child < 0) return "no child";
  if (child == 0) {
    close(ends[0]);
    dup2(ends[1], 2);
    std::signal(SIGABRT, SIG_DFL);
    alarm(10);
    body();
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char buffer[512];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;) text.append(buffer, n);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT ? text : "alive";
}

void check_says(const std::string& text, const std::string& part) {
  CHECK(text.find(part) != std::string::npos);
  if (text.find(part) == std::string::npos) std::fprintf(stderr, "it says: %s\n", text.c_str());
}

}  // namespace

TEST_CASE(every_thread_of_every_block_runs_once) {
  std::vector<std::atomic<int>> seen(3 * 2 * kLanes);
  emu::launch({2 * kLanes, 3},
              [&](int block_idx) { ++seen[block_idx * 2 * kLanes + plat::thread_idx()]; });
  for (const auto& count : seen) CHECK_EQ(count.load(), 1);
}

TEST_CASE(blocks_of_a_grid_wait_for_each_other) {
  std::uint32_t words[3] = {};
  std::atomic<int> late{0};
  emu::launch({kLanes, 3}, [&](int block_idx) {
    if (plat::thread_idx() == 0) plat::store_release<plat::Scope::device>(&words[block_idx], 1u);
    const std::uint64_t deadline_ns = plat::clock_ns() + 20'000'000'000ull;
    while (plat::load_acquire<plat::Scope::device>(&words[(block_idx + 1) % 3]) == 0u) {
      if (plat::clock_ns() > deadline_ns) {
        ++late;
        return;
      }
      plat::spin_pause();
    }
  });
  CHECK_EQ(late.load(), 0);
}

TEST_CASE(collectives_of_a_warp_give_what_they_say) {
  constexpr int kThreads = 2 * kLanes;
  struct Seen {
    float sum, most, from, across;
    std::uint64_t ballot;
  };
  const auto seen = in_every_order([&](std::uint32_t order) {
    std::vector<Seen> all(kThreads);
    emu::launch({kThreads, 1, order}, [&](int) {
      const int thread = plat::thread_idx(), lane = thread % kLanes;
      const auto v = static_cast<float>(thread);
      Seen mine{};
      mine.sum = plat::warp_sum(v);
      mine.most = plat::warp_max(lane == 3 ? std::numeric_limits<float>::quiet_NaN() : v);
      mine.from = plat::warp_shuffle(v, (lane + 5) % kLanes);
      mine.across = plat::warp_shuffle_xor(v, 4);
      mine.ballot = plat::warp_ballot(lane % 3 == 0);
      all[thread] = mine;
    });
    return all;
  });
  std::uint64_t thirds = 0;
  for (int lane = 0; lane < kLanes; lane += 3) thirds |= std::uint64_t{1} << lane;
  for (int thread = 0; thread < kThreads; ++thread) {
    const int lane = thread % kLanes, first = thread - lane;
    CHECK_EQ(seen[thread].sum, first * kLanes + kLanes * (kLanes - 1) / 2);
    CHECK_EQ(seen[thread].most, first + kLanes - 1);
    CHECK_EQ(seen[thread].from, first + (lane + 5) % kLanes);
    CHECK_EQ(seen[thread].across, first + (lane ^ 4));
    CHECK_EQ(seen[thread].ballot, thirds);
  }
}

TEST_CASE(a_sum_is_a_butterfly) {
  // 2^24 in lane 0, 1 in all others: halves first, so the ones meet each other before they meet it.
  float sum = 0.0f;
  emu::launch({kLanes}, [&](int) {
    const float v = plat::warp_sum(plat::thread_idx() == 0 ? 16777216.0f : 1.0f);
    if (plat::thread_idx() == 0) sum = v;
  });
  float v[64];
  for (int i = 0; i < kLanes; ++i) v[i] = i == 0 ? 16777216.0f : 1.0f;
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) v[i] = v[i] + v[i + half];
  }
  CHECK_EQ(sum, v[0]);
}

TEST_CASE(any_is_true_everywhere_when_one_says_so) {
  constexpr int kThreads = 4 * kLanes;
  for (const int who : {-1, 0, kThreads - 1, kLanes + 1}) {
    const auto said = in_every_order([&](std::uint32_t order) {
      std::vector<int> all(2 * kThreads, -1);
      emu::launch({kThreads, 1, order}, [&](int) {
        all[2 * plat::thread_idx()] = plat::block_any(plat::thread_idx() == who);
        all[2 * plat::thread_idx() + 1] = plat::block_any(false);
      });
      return all;
    });
    for (int thread = 0; thread < kThreads; ++thread) {
      CHECK_EQ(said[2 * thread], who >= 0 ? 1 : 0);
      CHECK_EQ(said[2 * thread + 1], 0);
    }
  }
}

TEST_CASE(shared_memory_is_one_object_a_block_and_begins_poisoned) {
  std::vector<std::uint32_t> first(2), sums(2);
  emu::launch({2 * kLanes, 2}, [&](int block_idx) {
    LOWLAT_SHARED(std::uint32_t, total);
    LOWLAT_SHARED(std::uint32_t, other);
    if (plat::thread_idx() == 0) {
      first[block_idx] = other;
      total = 0u;
    }
    plat::block_sync();
    plat::atomic_add<plat::Scope::block>(&total, 1u + static_cast<std::uint32_t>(block_idx));
    plat::block_sync();
    if (plat::thread_idx() == 0) sums[block_idx] = total;
  });
  for (const int block_idx : {0, 1}) {
    CHECK_EQ(first[block_idx], 0xa5a5'a5a5u);
    CHECK_EQ(sums[block_idx], 2 * kLanes * (1 + block_idx));
  }
}

TEST_CASE(cas_is_won_by_one_thread) {
  std::uint32_t word = 0, num_winners = 0;
  emu::launch({2 * kLanes, 1, 5}, [&](int) {
    const auto mine = static_cast<std::uint32_t>(plat::thread_idx()) + 1u;
    if (plat::atomic_cas<plat::Scope::device>(&word, 0u, mine) == 0u) ++num_winners;
  });
  CHECK_EQ(num_winners, 1);
  CHECK(word >= 1u && word <= 2u * kLanes);
}

TEST_CASE(a_missing_barrier_gives_other_bits_in_another_order) {
  constexpr int kThreads = 2 * kLanes;
  // Each thread reads what its neighbour wrote; right with the barrier, by chance without.
  const auto neighbours = [&](std::uint32_t order, bool syncs) {
    std::vector<int> memory(kThreads, -1), seen(kThreads);
    emu::launch({kThreads, 1, order}, [&](int) {
      const int thread = plat::thread_idx();
      memory[thread] = thread;
      if (syncs) plat::block_sync();
      seen[thread] = memory[(thread + 1) % kThreads];
    });
    return seen;
  };
  in_every_order([&](std::uint32_t order) { return neighbours(order, true); });
  CHECK(!same_bits(neighbours(emu::kAscending, false), neighbours(emu::kDescending, false)));
  CHECK(!same_bits(neighbours(emu::kDescending, false), neighbours(2, false)));
}

TEST_CASE(a_run_is_repeated_exactly) {
  const auto turns = [](std::uint32_t order) {
    std::vector<int> who;
    emu::launch({2 * kLanes, 1, order}, [&](int) {
      who.push_back(plat::thread_idx());
      plat::block_sync();
      who.push_back(plat::thread_idx());
    });
    return who;
  };
  for (const std::uint32_t order : {0u, 1u, 2u, 77u}) CHECK(turns(order) == turns(order));
  CHECK(turns(2) != turns(77));
  CHECK_EQ(turns(0).front(), 0);
  CHECK_EQ(turns(1).front(), 2 * kLanes - 1);
}

TEST_CASE(a_barrier_that_cannot_fill_names_the_threads) {
  check_says(last_words([] {
               emu::launch({2 * kLanes}, [](int) {
                 if (plat::thread_idx() < kLanes + 1) return;
                 plat::block_sync();
               });
             }),
             "threads " + std::to_string(kLanes + 1) + "-" + std::to_string(2 * kLanes - 1) +
                 " wait in block_sync; threads 0-" + std::to_string(kLanes) + " have ended");
}

TEST_CASE(a_missing_lane_is_named) {
  check_says(last_words([] {
               emu::launch({2 * kLanes}, [](int) {
                 if (plat::thread_idx() != 7) plat::warp_sum(1.0f);
                 plat::block_sync();
               });
             }),
             "threads 0-6, 8-" + std::to_string(kLanes - 1) + " wait in warp_sum");
}

TEST_CASE(lanes_in_different_calls_are_named) {
  check_says(last_words([] {
               emu::launch({kLanes}, [](int) {
                 if (plat::thread_idx() < 2) {
                   plat::warp_ballot(true);
                 } else {
                   plat::warp_sync();
                 }
               });
             }),
             "thread 2 is in warp_sync, but threads 0-1 in warp_ballot");
  check_says(last_words([] {
               emu::launch({2 * kLanes}, [](int) {
                 if (plat::thread_idx() == 0) {
                   plat::block_any(true);
                 } else {
                   plat::block_sync();
                 }
               });
             }),
             "thread 1 is in block_sync, but thread 0 in block_any");
}

TEST_CASE(a_lane_that_is_none_and_a_ragged_block_are_refused) {
  check_says(
      last_words([] { emu::launch({kLanes}, [](int) { plat::warp_shuffle(1.0f, kLanes); }); }),
      "asks warp_shuffle for lane " + std::to_string(kLanes));
  check_says(last_words([] { emu::launch({kLanes + 1}, [](int) {}); }),
             std::to_string(kLanes + 1) + " threads a block; a multiple of");
  check_says(last_words([] { plat::block_sync(); }), "outside of launch()");
}

TEST_CASE(a_payload_is_whole_when_its_tag_is_seen_by_another_block) {
  constexpr std::uint32_t kEpochs = 50;
  std::vector<plat::TaggedWords> words(kLanes);
  std::vector<std::uint32_t> taken(kLanes, 0);
  std::atomic<long> wrong{0};
  emu::launch({kLanes, 2, 3}, [&](int block_idx) {
    const int lane = plat::thread_idx();
    const std::uint64_t deadline_ns = plat::clock_ns() + 30'000'000'000ull;
    for (std::uint32_t epoch = 1; epoch <= kEpochs; ++epoch) {
      if (block_idx == 0) {
        const std::uint32_t payload[plat::kTaggedPayload] = {epoch, epoch * 3, ~epoch};
        plat::store_tagged(&words[lane], payload, epoch);
        while (plat::load_acquire<plat::Scope::device>(&taken[lane]) != epoch) {
          if (plat::clock_ns() > deadline_ns) return;
          plat::spin_pause();
        }
      } else {
        std::uint32_t seen[plat::kTaggedPayload];
        while (!plat::load_tagged(&words[lane], epoch, seen)) {
          if (plat::clock_ns() > deadline_ns) {
            ++wrong;
            return;
          }
          plat::spin_pause();
        }
        wrong += seen[0] != epoch || seen[1] != epoch * 3 || seen[2] != ~epoch;
        plat::store_release<plat::Scope::device>(&taken[lane], epoch);
      }
    }
  });
  CHECK_EQ(wrong.load(), 0);
}

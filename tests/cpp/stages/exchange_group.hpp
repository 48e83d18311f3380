// A group of ranks in one process, each with boxes, an abort word and status words, for tests. On
// scalar unless a platform was included before.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"
#ifndef LOWLAT_PLATFORM
#include "platform/scalar.hpp"
#endif
#include "stages/exchange.hpp"

namespace lowlat::testing {

namespace plat = lowlat::LOWLAT_PLATFORM::plat;
namespace stages = lowlat::LOWLAT_PLATFORM::stages;

class ExchangeGroup {
 public:
  ExchangeGroup(int tp_size, std::int64_t max_words, std::uint64_t budget_ns)
      : tp_size_(tp_size), box_packets_(stages::packets_of(max_words)), ranks_(tp_size) {
    for (auto& rank : ranks_) {
      rank = std::make_unique<Rank>();
      rank->boxes.resize(2 * tp_size * box_packets_);
    }
    for (auto& rank : ranks_) {
      outboxes_.push_back(rank->boxes.data());
      abort_words_.push_back(&rank->abort_word);
    }
    budget_ns_ = budget_ns;
  }

  stages::ExchangePort port(int rank) {
    return {outboxes_.data(),
            {abort_words_.data(), &ranks_[rank]->status, rank, tp_size_, budget_ns_},
            box_packets_};
  }
  std::uint32_t abort_word(int rank) {
    return plat::load_acquire<plat::Scope::system>(&ranks_[rank]->abort_word);
  }
  void abort_by_host(int rank) {
    plat::store_release<plat::Scope::system>(&ranks_[rank]->abort_word, stages::kAbortByHost);
  }
  // Read only after the ranks' threads have ended, or after state was acquired.
  const stages::StatusWords& status(int rank) const { return ranks_[rank]->status; }

  // Runs body(rank) on one thread a rank and joins them.
  template <class Body>
  void run(Body body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < tp_size_; ++rank) threads.emplace_back([=] { body(rank); });
    for (auto& thread : threads) thread.join();
  }

 private:
  struct Rank {
    std::vector<plat::TaggedWords> boxes;
    alignas(64) std::uint32_t abort_word = 0;
    stages::StatusWords status{};
  };
  int tp_size_;
  std::int64_t box_packets_;
  std::uint64_t budget_ns_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<plat::TaggedWords*> outboxes_;
  std::vector<std::uint32_t*> abort_words_;
};

// After receive_sum() of rank 1, which was silent at epoch 9 of kernel 2: every rank is told, at
// least one of the others saw its own deadline pass, and both name rank 1 or the rank that told
// them.
inline void check_rank_1_was_missed(ExchangeGroup& group) {
  bool expired = false;
  for (const int rank : {0, 1, 2}) CHECK(group.abort_word(rank) != 0u);
  for (const int rank : {0, 2}) {
    const auto& status = group.status(rank);
    CHECK(status.state == 1u || status.state == 2u);
    CHECK_EQ(status.kernel, 2u);
    CHECK_EQ(status.epoch, 9u);
    CHECK_EQ(status.stage, static_cast<std::uint32_t>(stages::StageId::moe_sum));
    if (status.state == 1u) {
      expired = true;
      CHECK_EQ(status.peer, 1);
    }
  }
  CHECK(expired);
}

// What rank `rank` sends at word `i` of epoch `e`: no two are equal, so a stale value shows.
inline float exchange_value(int rank, std::uint64_t epoch, std::int64_t i) {
  return static_cast<float>(rank + 1) * 1000.0f + static_cast<float>(epoch % 512) +
         static_cast<float>(i) / 64.0f;
}

}  // namespace lowlat::testing

// The rings of unfinished blocks: addresses, which rows are written, and that whoever finishes a
// block finds every token of it, through chunks, single tokens, rejected drafts and shared pages.
#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "check.hpp"
#include "platform/scalar.hpp"
#include "random_values.hpp"
#include "stages/pool_state.hpp"

namespace {

using lowlat::testing::Random;
namespace stages = lowlat::scalar::stages;
using stages::PoolLayout;

constexpr PoolLayout kOverlap{4, 512}, kBlock{128, 512};

// A request whose window cache lies in pages of a pool, and the rings of a layer. A ring row holds
// who wrote it: (sequence, position, token); tokens of rejected drafts are other tokens.
class Sequence {
 public:
  using Written = std::vector<std::int64_t>;
  Sequence(PoolLayout layout, bool speculates, int page_size,
           std::map<std::int64_t, Written>& rings, std::vector<std::int64_t> pages,
           std::int64_t request_slot)
      : layout_(layout),
        ring_(stages::pool_ring(layout, speculates)),
        page_size_(page_size),
        rings_(rings),
        pages_(std::move(pages)),
        request_slot_(request_slot) {}

  // Rows of `tokens` from position `first` on: completes blocks from the rows of the step and the
  // ring, then writes the ring, as a layer does.
  void step(std::int64_t first, const std::vector<std::int64_t>& tokens) {
    tokens_.resize(first);
    tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
    const auto end = static_cast<std::int64_t>(tokens_.size());
    for (std::int64_t position = first; position < end; ++position) {
      if ((position + 1) % layout_.ratio == 0) complete(position / layout_.ratio, first);
    }
    std::set<std::int64_t> written;
    for (std::int64_t position = first; position < end; ++position) {
      if (!stages::writes_pool_state(layout_, ring_, page_size_, position, end)) continue;
      CHECK(written.insert(row(position)).second);
      rings_[row(position)] = {position, tokens_[position]};
    }
  }

  // Takes over what another sequence has in the shared first pages.
  void share(const std::vector<std::int64_t>& tokens) { tokens_ = tokens; }
  const std::vector<std::int64_t>& tokens() const { return tokens_; }
  int num_from_ring() const { return num_from_ring_; }

 private:
  std::int64_t row(std::int64_t position) const {
    if (!layout_.overlaps()) return stages::block_state_row(request_slot_, position, ring_);
    const std::int64_t slot = pages_.at(position / page_size_) * page_size_ + position % page_size_;
    return stages::overlap_state_row(slot, page_size_, ring_);
  }
  void complete(std::int64_t entry, std::int64_t first) {
    for (int i = 0; i < layout_.num_candidates(); ++i) {
      const std::int64_t position = layout_.position(entry, i);
      if (position < 0 || position >= first) continue;  // missing, or a row of the step
      ++num_from_ring_;
      CHECK(rings_[row(position)] == (Written{position, tokens_[position]}));
    }
  }

  PoolLayout layout_;
  int ring_, page_size_;
  std::map<std::int64_t, Written>& rings_;
  std::vector<std::int64_t> pages_;
  std::int64_t request_slot_;
  std::vector<std::int64_t> tokens_;
  int num_from_ring_ = 0;
};

std::vector<std::int64_t> draw(Random& random, std::int64_t n) {
  std::vector<std::int64_t> tokens(n);
  for (std::int64_t& token : tokens) token = random.integer(0, 1 << 30);
  return tokens;
}

std::vector<std::int64_t> pages(std::int64_t first, std::int64_t step, int count) {
  std::vector<std::int64_t> ids(count);
  for (int i = 0; i < count; ++i) ids[i] = first + step * i;
  return ids;
}

}  // namespace

TEST_CASE(rings_are_twice_as_large_with_speculation) {
  CHECK_EQ(stages::pool_ring(kOverlap, false), 8);
  CHECK_EQ(stages::pool_ring(kOverlap, true), 16);
  CHECK_EQ(stages::pool_ring(kBlock, false), 128);
  CHECK_EQ(stages::pool_ring(kBlock, true), 256);
  for (const PoolLayout& layout : {kOverlap, kBlock, PoolLayout{4, 128}}) {
    CHECK_EQ(stages::pool_ring_rows(layout, 8), stages::pool_ring(layout, false));
    CHECK_EQ(stages::pool_ring_rows(layout, 16), stages::pool_ring(layout, true));
  }
}

TEST_CASE(rows_lie_by_page_or_by_request) {
  CHECK_EQ(stages::overlap_state_row(0, 256, 16), 0);
  CHECK_EQ(stages::overlap_state_row(255, 256, 16), 15);
  CHECK_EQ(stages::overlap_state_row(256, 256, 16), 16);
  CHECK_EQ(stages::overlap_state_row(3 * 256 + 37, 256, 8), 3 * 8 + 5);
  CHECK_EQ(stages::block_state_row(0, 1048575, 256), 255);
  CHECK_EQ(stages::block_state_row(7, 300, 256), 7 * 256 + 44);
  CHECK_EQ(stages::block_state_row(7, 300, 128), 7 * 128 + 44);
}

TEST_CASE(rows_that_a_step_writes_by_hand) {
  const auto from = [](const PoolLayout& layout, int ring, std::int64_t end) {
    // A page so large that its last rows are far away.
    std::int64_t position = 0;
    while (!stages::writes_pool_state(layout, ring, 1 << 20, position, end)) ++position;
    for (std::int64_t p = position; p < end; ++p) {
      CHECK(stages::writes_pool_state(layout, ring, 1 << 20, p, end));
    }
    return position;
  };
  // Ring 8: min(floor(end / 4) 4 - 4, end - 2). Ring 16: the same, end - 10.
  CHECK_EQ(from(kOverlap, 8, 100), 96);
  CHECK_EQ(from(kOverlap, 8, 103), 96);
  CHECK_EQ(from(kOverlap, 16, 100), 90);
  CHECK_EQ(from(kOverlap, 16, 103), 93);
  // Ring 128: min(floor(end / 128) 128, end - 2). Ring 256: end - 130.
  CHECK_EQ(from(kBlock, 128, 1000), 896);
  CHECK_EQ(from(kBlock, 128, 1024), 1022);
  CHECK_EQ(from(kBlock, 256, 1000), 870);
  CHECK_EQ(from(kBlock, 256, 1024), 894);
  // The last four of a page of 256 are kept for whoever shares it, at ratio 4 only.
  for (std::int64_t p = 0; p < 512; ++p) {
    CHECK_EQ(stages::writes_pool_state(kOverlap, 16, 256, p, 100000), p % 256 >= 252);
    CHECK(!stages::writes_pool_state(kBlock, 256, 256, p, 100000));
  }
}

TEST_CASE(verify_rows_are_always_written) {
  for (std::int64_t end = 6; end < 600; ++end) {
    for (std::int64_t p = end - 6; p < end; ++p) {
      CHECK(stages::writes_pool_state(kOverlap, 16, 256, p, end));
      CHECK(stages::writes_pool_state(kBlock, 256, 256, p, end));
    }
  }
}

TEST_CASE(every_block_is_completed_from_what_was_kept) {
  // Planted: half a ring, or no overlap kept for the unfinished block, fails here.
  for (const PoolLayout& layout : {kOverlap, kBlock}) {
    for (const bool speculates : {false, true}) {
      for (const int page_size : {16, 64, 256}) {
        Random random(page_size + layout.ratio);
        std::map<std::int64_t, Sequence::Written> rings;
        const int num_pages = 2048 / page_size;
        // Two requests whose pages and steps alternate.
        Sequence both[2] = {{layout, speculates, page_size, rings, pages(0, 2, num_pages), 3},
                            {layout, speculates, page_size, rings, pages(1, 2, num_pages), 4}};
        std::int64_t committed[2] = {};
        for (int step = 0; step < 500; ++step) {
          const int which = step % 2;
          const bool chunk = random.integer(0, 9) == 0;
          const std::int64_t rows = chunk ? random.integer(1, 200) : speculates ? 6 : 1;
          if (committed[which] + rows > 2048) break;
          both[which].step(committed[which], draw(random, rows));
          committed[which] += chunk || !speculates ? rows : random.integer(1, 6);
        }
        CHECK(both[0].num_from_ring() > 100 && both[1].num_from_ring() > 100);
      }
    }
  }
}

TEST_CASE(a_shared_page_brings_its_overlap) {
  for (const bool speculates : {false, true}) {
    for (const std::int64_t shared : {1, 2, 3}) {
      Random random(shared);
      std::map<std::int64_t, Sequence::Written> rings;
      Sequence first(kOverlap, speculates, 64, rings, pages(0, 1, 8), 0);
      first.step(0, draw(random, 300));
      std::vector<std::int64_t> ids = pages(0, 1, static_cast<int>(shared));
      for (const std::int64_t id : pages(20, 1, 8)) ids.push_back(id);
      Sequence second(kOverlap, speculates, 64, rings, ids, 1);
      second.share({first.tokens().begin(), first.tokens().begin() + 64 * shared});
      second.step(64 * shared, draw(random, 4));
      CHECK_EQ(second.num_from_ring(), 4);
    }
  }
}

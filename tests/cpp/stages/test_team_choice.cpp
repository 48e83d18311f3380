// Block forms of choices on emu: selection, gate, argmax, drafting and acceptance, bit for bit as
// one thread makes them, at ties and at values that are none.
//
// Planted and seen to fail: syncs of the threshold's histogram left out, ties counted from the
// warp's own first instead of all before it, the digit searched from the wrong end, the sync
// between the sums of tiles and their use left out.
//
// Built a second time with LOWLAT_EMU_WARP_LANES=64.
#include <cmath>
#include <limits>

#include "emu_block.hpp"
#include "random_values.hpp"
#include "stages/accept.hpp"
#include "stages/argmax.hpp"
#include "stages/draft.hpp"
#include "stages/gate.hpp"
#include "stages/select.hpp"

namespace {

namespace emu = lowlat::emu;
namespace plat = lowlat::emu::plat;
namespace stages = lowlat::emu::stages;
using namespace lowlat::testing;
using Floats = std::vector<float>;
using Ids = std::vector<std::int32_t>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void check_top(const Floats& scores, int k) {
  const auto position_of = [](int i) { return 3 * i + 1; };
  check_teams([&]<class Block>(std::uint32_t order) {
    Ids ids = poisoned<std::int32_t>(k);
    auto scratch = poisoned<stages::SelectScratch>(1);
    run_team<Block>(order, [&] {
      stages::select_top<Block>(ids.data(), scores.data(), static_cast<int>(scores.size()), k,
                                position_of, scratch[0]);
    });
    return ids;
  });
}

// Scores of many equal values, some of them none.
Floats few_values(Random& random, int n) {
  const float values[] = {0.0f, -0.0f, 1.0f, -1.0f, 1.5f, kNan, -kInfinity, 0x1p-149f};
  Floats scores(n);
  for (float& s : scores) s = values[random.integer(0, 7)];
  return scores;
}

struct Row {
  Floats logits, bias;
};

}  // namespace

TEST_CASE(the_best_are_those_of_one_thread) {
  Random random(1);
  for (int seed = 0; seed < 12; ++seed) {
    const auto n = static_cast<int>(random.integer(1, 1200));
    const auto k = static_cast<int>(random.integer(1, 600));
    check_top(seed % 2 == 0 ? random.f32(n) : few_values(random, n), k);
  }
  check_top(random.f32(20000), 512);         // a long context
  check_top(few_values(random, 5000), 512);  // most are ties
  check_top(Floats(3000, 0.25f), 512);       // all are
  check_top(Floats(700, -kInfinity), 512);
  check_top(Floats(700, kNan), 512);
  check_top({}, 4);
  check_top(random.f32(100), 100);
  check_top(random.f32(101), 100);
}

TEST_CASE(candidate_blocks_are_those_of_one_thread) {
  Random random(2);
  for (int seed = 0; seed < 12; ++seed) {
    const auto count = static_cast<int>(random.integer(1, 3000));
    const auto block_size = static_cast<int>(random.integer(1, 64));
    const auto k = static_cast<int>(random.integer(1, 40));
    const Floats scores = seed % 2 == 0 ? random.f32(count) : few_values(random, count);
    check_teams([&]<class Block>(std::uint32_t order) {
      Ids blocks = poisoned<std::int32_t>(k);
      Floats memory = poisoned<float>(count / block_size + 1);
      auto scratch = poisoned<stages::SelectScratch>(1);
      run_team<Block>(order, [&] {
        stages::candidate_blocks<Block>(blocks.data(), scores.data(), count, block_size, k,
                                        memory.data(), scratch[0]);
      });
      return blocks;
    });
  }
}

TEST_CASE(experts_are_those_of_one_thread) {
  Random random(3);
  const auto check = [&](const Row& row, int k, stages::GateSum sum, stages::GateRule rule) {
    const auto num = static_cast<int>(row.logits.size());
    check_teams([&]<class Block>(std::uint32_t order) {
      Ids ids = poisoned<std::int32_t>(k);
      Floats weights = poisoned<float>(k), memory = poisoned<float>(2 * num);
      typename stages::BlockBest<Block>::Scratch scratch;
      run_team<Block>(order, [&] {
        stages::gate_select<Block>(ids.data(), weights.data(), row.logits.data(), row.bias.data(),
                                   num, k, sum, 1.5f, memory.data(), rule, scratch);
      });
      for (const std::int32_t id : ids) weights.push_back(static_cast<float>(id));
      return weights;
    });
  };
  for (const auto rule : {stages::GateRule::v41, stages::GateRule::v4}) {
    for (const auto sum : {stages::GateSum::target, stages::GateSum::draft}) {
      check({random.f32(384), random.f32(384, 0.1)}, 6, sum, rule);
      check({Floats(384, 0.5f), Floats(384, 0.0f)}, 6, sum, rule);     // all equal
      check({Floats(384, -200.0f), Floats(384, 0.0f)}, 6, sum, rule);  // all scores 0
      check({random.f32(20), Floats(20, -kInfinity)}, 20, sum, rule);  // every rank -infinity
      Row none{random.f32(256), random.f32(256)};
      none.logits[77] = none.logits[200] = kNan;
      none.bias[3] = kInfinity;
      check(none, 8, sum, rule);
    }
  }
}

TEST_CASE(the_greatest_is_that_of_one_thread) {
  Random random(4);
  for (const Floats& values :
       {random.f32(1000), Floats(777, 2.0f), Floats{}, Floats{kNan, 1.0f, kNan},
        few_values(random, 3000), Floats(300, -kInfinity)}) {
    check_teams([&]<class Block>(std::uint32_t order) {
      Ids ids = poisoned<std::int32_t>(Block::kNumThreads);
      typename stages::BlockBest<Block>::Scratch scratch;
      run_team<Block>(order, [&] {
        ids[stages::Team<Block>::thread_idx()] =
            stages::argmax<Block>(values.data(), static_cast<int>(values.size()), 40, scratch).id;
      });
      for (const std::int32_t id : ids) CHECK_EQ(id, ids[0]);
      ids.resize(1);
      return ids;
    });
  }
}

TEST_CASE(proposals_are_those_of_one_thread) {
  Random random(5);
  constexpr int kRank = 64, kBatch = 3, kVocab = 1000;
  const Floats embedding = random.f32(kBatch * kRank), base = random.f32(kBatch * kVocab);
  const auto w2 = random.bf16(kVocab * kRank);
  for (const float temperature : {0.0f, 1e-9f, 0.7f}) {
    for (const std::int32_t first_id : {0, 4000, 4001, 4003}) {
      check_teams([&]<class Block>(std::uint32_t order) {
        Floats z = base, w_row(kRank);
        typename stages::BlockBest<Block>::Scratch scratch;
        run_team<Block>(order, [&] {
          stages::markov_logits<Block>(z.data(), z.data(), kVocab, embedding.data(),
                                       stages::Bf16Weights{w2.data(), kRank}, kBatch, kRank, 10,
                                       kVocab, w_row.data());
          stages::Team<Block>::sync();
          float ids[kBatch];
          for (int b = 0; b < kBatch; ++b) {
            const stages::PhiloxNoise noise{0x123456789abcull, static_cast<std::uint32_t>(b), 2, 9};
            ids[b] = static_cast<float>(stages::draft_select<Block>(z.data() + b * kVocab, kVocab,
                                                                    first_id, temperature, noise,
                                                                    scratch)
                                            .id);
          }
          stages::Team<Block>::sync();
          if (stages::Team<Block>::leads()) {
            for (int b = 0; b < kBatch; ++b) z[b * kVocab] = ids[b];
          }
        });
        return z;
      });
    }
  }
  const auto residual = random.bf16(4 * 5120);
  check_teams([&]<class Block>(std::uint32_t order) {
    auto out = poisoned<std::uint16_t>(5120);
    run_team<Block>(order,
                    [&] { stages::draft_feature<Block>(out.data(), residual.data(), 5120); });
    return out;
  });
}

TEST_CASE(acceptance_is_that_of_one_thread) {
  Random random(6);
  constexpr int kDrafts = 3;
  for (int seed = 0; seed < 14; ++seed) {
    const int vocab = seed < 2 ? 129280 : static_cast<int>(random.integer(1, 5000));
    const float temperature = seed % 5 == 4 ? 1e-3f : 1.0f;
    const double scale = seed % 2 == 0 ? 1.0 : 8.0;
    Floats target = random.f32(static_cast<std::size_t>(kDrafts + 1) * vocab, scale);
    Floats drafts = random.f32(static_cast<std::size_t>(kDrafts) * vocab, scale);
    if (seed % 3 == 0) drafts = Floats(target.begin(), target.begin() + kDrafts * vocab);
    if (seed == 7) target[vocab / 2] = kNan;
    Ids draft(kDrafts);
    for (int i = 0; i < kDrafts; ++i) {
      draft[i] = seed % 2 == 0
                     ? stages::argmax(&target[static_cast<std::size_t>(i) * vocab], vocab).id
                     : static_cast<std::int32_t>(random.integer(0, vocab - 1));
    }
    Floats coins(kDrafts + 1);
    for (float& coin : coins) coin = static_cast<float>(random.integer(0, 999)) / 1000.0f;
    check_teams([&]<class Block>(std::uint32_t order) {
      using Acceptance = stages::Acceptance<Block>;
      Ids out(4);
      Floats memory = poisoned<float>(Acceptance::memory_floats(vocab));
      auto scratch = poisoned<typename Acceptance::Scratch>(1);
      run_team<Block>(order, [&] {
        const auto greedy =
            Acceptance::greedy(draft.data(), target.data(), kDrafts, vocab, scratch[0]);
        const auto sampled =
            Acceptance::sampled(draft.data(), target.data(), drafts.data(), kDrafts, vocab,
                                temperature, coins.data(), memory.data(), scratch[0]);
        if (!stages::Team<Block>::leads()) return;
        out = {greedy.num_drafts, greedy.next, sampled.num_drafts, sampled.next};
      });
      return out;
    });
  }
}

TEST_CASE(draws_are_those_of_one_thread_at_their_edges) {
  Random random(7);
  const auto check = [&](const Floats& mass, float coin) {
    check_teams([&]<class Block>(std::uint32_t order) {
      Ids id(1, -7);
      const auto vocab = static_cast<int>(mass.size());
      Floats tiles = poisoned<float>(stages::accept_tiles(vocab));
      auto scratch = poisoned<typename stages::Acceptance<Block>::Scratch>(1);
      run_team<Block>(order, [&] {
        const auto got = stages::Acceptance<Block>::inverse_cdf(mass.data(), vocab, coin,
                                                                tiles.data(), scratch[0]);
        if (stages::Team<Block>::leads()) id[0] = got;
      });
      return id;
    });
  };
  Floats mass(4096, 0.0f);
  mass[1023] = mass[1024] = mass[3000] = 1.0f;
  for (const float coin : {0.0f, 0.333f, 0.34f, 0.66f, 0.67f, 0x1.fffffep-1f}) check(mass, coin);
  check(Floats(2000, 0.0f), 0.5f);
  check({1.0f}, 0.0f);
  Floats even(3000);
  for (float& m : even) m = static_cast<float>(random.integer(1, 1000));
  for (const float coin : {0.0f, 0.1f, 0.5f, 0.9999f}) check(even, coin);
}

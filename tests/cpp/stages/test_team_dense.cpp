// Block forms of sums, linears, norms, hyper-connections, experts and Engram on emu, against one
// thread: bit for bit where the order of the sum is declared, else within the operation's bound.
//
// Planted and seen to fail: any sync of BlockSum, BlockMax or HcStats::mix left out (orders
// differ), a join of chains that begins at distance 4, Sinkhorn's columns read as rows, results
// past the end of a range written, a pair counted as before itself.
//
// Built a second time with LOWLAT_EMU_WARP_LANES=64.
#include <algorithm>
#include <cmath>
#include <limits>

#include "emu_block.hpp"
#include "random_values.hpp"
#include "stages/engram.hpp"
#include "stages/experts.hpp"
#include "stages/hc.hpp"
#include "stages/linear.hpp"
#include "stages/norm.hpp"
#include "stages/rank_sum.hpp"
#include "stages/sum.hpp"

namespace {

namespace emu = lowlat::emu;
namespace plat = lowlat::emu::plat;
namespace stages = lowlat::emu::stages;
using namespace lowlat::testing;
using Codes = std::vector<std::uint16_t>;
using Floats = std::vector<float>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int kHidden = 5120;  // of V4.1

template <class Weights>
void check_linear(const Weights& weights, int num_rows, int k, int row_begin, int row_end,
                  const Floats& x) {
  const int width = row_end - row_begin;
  check_teams([&]<class Block>(std::uint32_t order) {
    Floats y = poisoned<float>(static_cast<std::size_t>(num_rows) * width), w_row(k);
    run_team<Block>(order, [&] {
      stages::linear<Block>(x.data(), k, num_rows, k, weights, row_begin, row_end, w_row.data(),
                            [&](int t, int n, float v) { y[t * width + n - row_begin] = v; });
    });
    return y;
  });
}

}  // namespace

TEST_CASE(a_block_sums_and_takes_maxima_over_all_threads) {
  const auto run = [&]<class Block>(std::uint32_t order) {
    Floats all(3 * Block::kNumThreads);
    typename stages::BlockSum<Block>::Scratch scratch;
    run_team<Block>(order, [&] {
      const int thread = stages::Team<Block>::thread_idx();
      const float v = thread == 3 ? kNan : static_cast<float>(thread * 7 % 256) - 300.0f;
      all[thread] = stages::BlockSum<Block>::run(static_cast<float>(thread), scratch);
      all[Block::kNumThreads + thread] = stages::BlockMax<Block>::run(v, scratch);
      all[2 * Block::kNumThreads + thread] = stages::BlockSum<Block>::run(1.0f, scratch);
    });
    return all;
  };
  const Floats got =
      in_every_order([&](std::uint32_t order) { return run.template operator()<Block256>(order); });
  for (int i = 0; i < 256; ++i) {
    CHECK_EQ(got[i], 255.0f * 128.0f);
    CHECK_EQ(got[256 + i], 255.0f - 300.0f);
    CHECK_EQ(got[512 + i], 256.0f);
  }
}

TEST_CASE(linears_have_the_bits_of_one_thread) {
  Random random(1);
  for (const int num_rows : {1, 6, 9}) {
    constexpr int kK = kHidden, kN = 37;
    const Floats x = random.f32(static_cast<std::size_t>(num_rows) * kK);
    const Codes w = random.bf16(kN * kK);
    check_linear(stages::Bf16Weights{w.data(), kK}, num_rows, kK, 2, kN, x);
  }
  for (const int block : {32, 128}) {
    constexpr int kK = 1024, kN = 256, kRows = 6;
    const Floats x = random.f32(kRows * kK);
    const auto codes = random.e4m3(kN * kK, 100.0);
    const Floats scales = random.f32(kN / block * (kK / block), 0.01);
    check_linear(
        stages::E4m3Weights<stages::ScaleF32>{codes.data(), kK, {scales.data(), kK / block}, block},
        kRows, kK, 60, 200, x);
    std::vector<std::uint8_t> powers(scales.size());
    for (auto& code : powers) code = static_cast<std::uint8_t>(random.integer(118, 124));
    check_linear(
        stages::E4m3Weights<stages::ScaleUe8m0>{
            codes.data(), kK, {powers.data(), kK / block}, block},
        kRows, kK, 0, 100, x);
  }
  // A K that is no multiple of the 16 chains, and values that are none.
  Floats odd = random.f32(3 * 37);
  odd[40] = std::numeric_limits<float>::infinity();
  const Codes w = random.bf16(20 * 37);
  check_linear(stages::Bf16Weights{w.data(), 37}, 3, 37, 0, 20, odd);
}

TEST_CASE(quantised_rows_have_the_bits_of_one_thread) {
  Random random(2);
  Codes x = random.bf16(kHidden, 3.0);
  for (int i = 0; i < 128; ++i) x[256 + i] = i % 2 == 0 ? 0x0000 : 0x8000;  // zeros of both signs
  for (int i = 0; i < 128; ++i) x[512 + i] = static_cast<std::uint16_t>(1 + i);  // subnormals
  x[700] = 0x7fc0;                                                               // NaN
  x[900] = 0x7f7f;                                                               // the largest
  for (const int group : {16, 32, 64, 128}) {
    check_teams([&]<class Block>(std::uint32_t order) {
      Floats out = poisoned<float>(kHidden);
      run_team<Block>(order,
                      [&] { stages::quantize_row<Block>(out.data(), x.data(), kHidden, group); });
      return out;
    });
  }
}

TEST_CASE(norms_are_within_a_unit_of_one_thread) {
  Random random(3);
  for (const int n : {512, 1024, kHidden, 130}) {
    const Floats x = random.f32(n, 2.0);
    const Codes gain = random.bf16(n);
    check_teams(
        [&]<class Block>(std::uint32_t order) {
          Codes out = poisoned<std::uint16_t>(n);
          typename stages::RmsNorm<Block>::Scratch scratch;
          run_team<Block>(order, [&] {
            stages::RmsNorm<Block>::run(out.data(), x.data(), gain.data(), n, 1e-20f, scratch);
          });
          return out;
        },
        [](const Codes& got, const Codes& alone) {
          for (std::size_t i = 0; i < got.size(); ++i) CHECK(std::abs(got[i] - alone[i]) <= 1);
        });
  }
}

TEST_CASE(mixing_parameters_agree_with_one_thread) {
  Random random(4);
  const Floats row = random.f32(4 * kHidden), fn = random.f32(24 * 4 * kHidden, 0.01);
  const Floats base = random.f32(24), scale = {0.5f, 0.75f, 1.25f};
  check_teams(
      [&]<class Block>(std::uint32_t order) {
        using Stats = stages::HcStats<Block>;
        typename Stats::Scratch scratch;
        Floats out(24 * (Block::kNumThreads + 1));
        stages::HcParams params;
        run_team<Block>(order, [&] {
          float mix[24];
          Stats::mix(mix, row.data(), fn.data(), kHidden, 1e-20f, scratch);
          Stats::params(params, mix, base.data(), scale.data(), 1e-6f, 20);
          std::copy_n(mix, 24, &out[24 * (1 + stages::Team<Block>::thread_idx())]);
        });
        for (int i = 0; i < 24; ++i) {  // the same numbers in every thread
          for (int thread = 1; thread < Block::kNumThreads; ++thread) {
            CHECK_EQ(out[24 * (1 + thread) + i], out[24 + i]);
          }
        }
        out.resize(48);
        std::copy_n(params.pre, 4, &out[0]);
        std::copy_n(params.post, 4, &out[4]);
        std::copy_n(&params.comb[0][0], 16, &out[8]);
        return out;
      },
      [](const Floats& got, const Floats& alone) {
        CHECK(rel_l2(values_of(got), values_of(alone)) <= 2e-5);
      });
}

TEST_CASE(sinkhorn_over_lanes_has_the_bits_of_one_thread) {
  Random random(5);
  for (int seed = 0; seed < 20; ++seed) {
    // Two matrices at a time, one in every other 16 lanes.
    float comb[2][4][4], want[2][4][4];
    for (auto& matrix : comb) {
      for (auto& row : matrix) {
        for (float& v : row) v = static_cast<float>(random.normal() * (seed % 3 == 0 ? 1e30 : 3.0));
      }
    }
    std::memcpy(want, comb, sizeof comb);
    for (auto& matrix : want) stages::hc_sinkhorn(matrix, 1e-6f, 20);
    Floats got = poisoned<float>(32);
    emu::launch({plat::kWarpLanes, 1, static_cast<std::uint32_t>(seed)}, [&](int) {
      const int lane = plat::thread_idx(), which = lane / 16 % 2, i = lane % 16;
      const float v = stages::hc_sinkhorn_lanes(comb[which][i / 4][i % 4], 1e-6f, 20);
      if (lane < 32) got[lane] = v;
    });
    for (int i = 0; i < 32; ++i)
      CHECK(std::memcmp(&got[i], &want[i / 16][i / 4 % 4][i % 4], 4) == 0);
  }
}

TEST_CASE(combine_and_post_agree_with_one_thread) {
  Random random(6);
  const Codes residual = random.bf16(4 * kHidden), gain = random.bf16(kHidden);
  const Codes y = random.bf16(kHidden);
  const Floats pre = random.f32(4), post = random.f32(4);
  float comb[4][4];
  for (auto& row : comb) {
    for (float& v : row) v = static_cast<float>(random.normal());
  }
  for (const auto statistic : {stages::HcStatistic::rounded, stages::HcStatistic::unrounded}) {
    check_teams(
        [&]<class Block>(std::uint32_t order) {
          Codes out = poisoned<std::uint16_t>(kHidden);
          Floats row = poisoned<float>(kHidden);
          typename stages::RmsNorm<Block>::Scratch scratch;
          run_team<Block>(order, [&] {
            stages::hc_combine_norm<Block>(out.data(), residual.data(), pre.data(), gain.data(),
                                           kHidden, 1e-6f, row.data(), scratch, statistic);
          });
          return out;
        },
        [](const Codes& got, const Codes& alone) {
          CHECK(rel_l2(values_of(got), values_of(alone)) <= 4e-3);
        });
  }
  check_teams([&]<class Block>(std::uint32_t order) {
    Codes out = residual;
    run_team<Block>(order, [&] {
      stages::hc_post<Block>(out.data(), out.data(), y.data(), post.data(), comb, kHidden, 3,
                             kHidden);
    });
    return out;
  });
}

TEST_CASE(pairs_are_grouped_as_one_thread_groups_them) {
  Random random(7);
  struct Call {
    int rows, slots, experts;
    bool same;
  };
  for (const Call& call : {Call{6, 6, 384, false}, Call{1, 6, 384, false}, Call{48, 6, 256, false},
                           Call{8, 6, 384, true}, Call{5, 3, 3, false}, Call{0, 6, 16, false}}) {
    std::vector<std::int32_t> ids(call.rows * call.slots);
    for (auto& id : ids) {
      id = call.same ? 5 : static_cast<std::int32_t>(random.integer(0, call.experts - 1));
    }
    check_teams([&]<class Block>(std::uint32_t order) {
      auto out = poisoned<std::int32_t>(call.experts + 1 + ids.size());
      run_team<Block>(order, [&] {
        stages::group_pairs<Block>(out.data(), out.data() + call.experts + 1, ids.data(), call.rows,
                                   call.slots, call.experts);
      });
      return out;
    });
  }
}

TEST_CASE(experts_have_the_bits_of_one_thread) {
  Random random(8);
  constexpr int kInner = 64, kH = 1024, kSlots = 6, kRows = 9;
  const auto bytes = [&](std::size_t n, int low, int high) {
    std::vector<std::uint8_t> v(n);
    for (auto& b : v) b = static_cast<std::uint8_t>(random.integer(low, high));
    return v;
  };
  const auto w1 = bytes(kInner * kH / 2, 0, 255), w3 = bytes(kInner * kH / 2, 0, 255);
  const auto w2 = bytes(kH * kInner / 2, 0, 255);
  const auto s1 = bytes(kInner * kH / 32, 118, 122), s3 = bytes(kInner * kH / 32, 118, 122);
  const auto s2 = bytes(kH * kInner / 32, 118, 122);
  const Floats x = random.f32(kRows * kH), weights = random.f32(kRows * kSlots);
  const Codes shared = random.bf16(kH);
  const stages::Fp4Weights v1{w1.data(), kH / 2, s1.data(), kH / 32};
  const stages::Fp4Weights v3{w3.data(), kH / 2, s3.data(), kH / 32};
  const stages::Fp4Weights v2{w2.data(), kInner / 2, s2.data(), kInner / 32};
  std::vector<std::int32_t> every(kRows * kSlots);
  for (int i = 0; i < kRows * kSlots; ++i) every[i] = i;
  for (const std::vector<std::int32_t>& pairs :
       {std::vector<std::int32_t>{}, {4}, {0, 7, 13, 52}, {1, 2, 3, 20, 53}, every}) {
    const auto num_pairs = static_cast<int>(pairs.size());
    check_teams([&]<class Block>(std::uint32_t order) {
      Floats h(kRows * kSlots * kInner, 0.5f), scratch(2 * kH), out = poisoned<float>(kH);
      Codes d(kRows * kSlots * kH, 0x3f80);
      run_team<Block>(order, [&] {
        // Two ranges: the second begins where no team's share does.
        for (const auto& [begin, end] : {std::pair{0, 19}, std::pair{19, kInner}}) {
          stages::expert_gate_up<Block>(h.data(), x.data(), v1, v3, pairs.data(), num_pairs, kSlots,
                                        kH, kInner, begin, end, 10.0f, scratch.data());
        }
        stages::Team<Block>::sync();
        stages::expert_down<Block>(d.data(), h.data(), v2, pairs.data(), num_pairs, weights.data(),
                                   kInner, kH, 0, kH, scratch.data());
        stages::Team<Block>::sync();
        stages::expert_sum<Block>(out.data(), d.data(), shared.data(), kSlots, kH, 0, kH);
      });
      h.insert(h.end(), out.begin(), out.end());
      for (const std::uint16_t code : d) h.push_back(code);
      return h;
    });
  }
}

TEST_CASE(engram_agrees_with_one_thread) {
  Random random(9);
  constexpr int kDim = 64, kVocab = 1000, kH = 1024;
  std::vector<std::int64_t> map(kVocab), primes(24);
  for (auto& v : map) v = random.integer(0, 400);
  for (auto& v : primes) v = random.integer(50, 99) * 2 + 1;
  const std::int64_t multipliers[4] = {982451653, 67867967, 15485863, 32452843};
  std::int64_t num_rows = 0;
  for (const std::int64_t prime : primes) num_rows += prime;
  const auto codes = random.e4m3(num_rows * kDim, 10.0);
  std::vector<std::uint8_t> scales(num_rows * kDim / 32);
  for (auto& code : scales) code = static_cast<std::uint8_t>(random.integer(110, 130));
  for (int row = 0; row < 12; ++row) {
    std::int64_t tokens[4];
    for (auto& token : tokens) token = random.integer(0, row % 3 == 0 ? 2 : kVocab - 1);
    check_teams([&]<class Block>(std::uint32_t order) {
      std::int64_t ids[24];
      std::memset(ids, 0xff, sizeof ids);
      Codes out = poisoned<std::uint16_t>(24 * kDim);
      run_team<Block>(order, [&] {
        stages::engram_hash<Block>(ids, tokens, row % 5, map.data(), multipliers, primes.data(), 1,
                                   2);
        stages::Team<Block>::sync();
        stages::engram_lookup<Block>(out.data(), ids, 0, 24, codes.data(), scales.data(), 0, kDim);
      });
      return out;
    });
  }
  const Codes start = random.bf16(4 * kH), kv = random.bf16(5 * kH);
  const Codes q = random.bf16(4 * kH, 0.05), k = random.bf16(4 * kH, 0.05);
  check_teams(
      [&]<class Block>(std::uint32_t order) {
        Codes residual = start;
        typename stages::EngramApply<Block>::Scratch scratch;
        run_team<Block>(order, [&] {
          stages::EngramApply<Block>::run(residual.data(), kv.data(), q.data(), k.data(), kH,
                                          1e-20f, scratch);
        });
        return residual;
      },
      [](const Codes& got, const Codes& alone) {
        CHECK(rel_l2(values_of(got), values_of(alone)) <= 4e-3);
      });
}

TEST_CASE(rank_sums_have_the_bits_of_one_thread) {
  Random random(10);
  const Floats partial = random.f32(4 * 700, 100.0);
  check_teams([&]<class Block>(std::uint32_t order) {
    Codes out = poisoned<std::uint16_t>(700);
    run_team<Block>(order, [&] {
      stages::rank_sum<Block>(out.data(), 4, 0, 700,
                              [&](int rank, int i) { return partial[rank * 700 + i]; });
    });
    return out;
  });
}

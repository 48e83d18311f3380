// Products as tiles, as AMD's matrix unit makes them, on emu with warps of 64: against one thread's
// chains within what fp32 sums of another order differ by, and bit for bit between orders of the
// fibers, numbers of rows and ranges. What the unit's own instructions do is the interpreter's
// business (tests/python/test_amd_stages.py).
//
// Planted and seen to fail: a factor's rows in place of the other's, a scale of the run before, the
// last sync of TileTeam::run left out (the first one's absence is a race to the interpreter), a
// last stretch that every warp multiplies, lanes past K that keep their values, a result put twice.
#define LOWLAT_EMU_TILES
#include <algorithm>
#include <cmath>

#include "emu_block.hpp"
#include "random_values.hpp"
#include "stages/experts.hpp"
#include "stages/linear.hpp"

namespace {

namespace emu = lowlat::emu;
namespace plat = lowlat::emu::plat;
namespace stages = lowlat::emu::stages;
using namespace lowlat::testing;
using Bytes = std::vector<std::uint8_t>;
using Codes = std::vector<std::uint16_t>;
using Floats = std::vector<float>;

// Of fp32 sums that hold the same products in two orders, relative to the largest of a row.
constexpr double kOrderBound = 2e-6;

Bytes bytes(Random& random, std::size_t n, int low, int high) {
  Bytes v(n);
  for (auto& b : v) b = static_cast<std::uint8_t>(random.integer(low, high));
  return v;
}
// e4m3 codes without a NaN.
Bytes e4m3_codes(Random& random, std::size_t n) {
  Bytes v = bytes(random, n, 0, 255);
  for (auto& b : v) b = (b & 0x7fu) == 0x7fu ? 0x7eu : b;
  return v;
}
Floats bf16_values(Random& random, std::size_t n) {
  Floats v = random.f32(n);
  for (float& one : v) one = stages::round_bf16(one);
  return v;
}

void check_near(const Floats& got, const Floats& want) {
  float most = 0.0f;
  for (const float v : want) most = std::max(most, std::fabs(v));
  for (std::size_t i = 0; i < want.size(); ++i) {
    CHECK(std::fabs(got[i] - want[i]) <= kOrderBound * most);
  }
}

// y of every row and weight row of row_begin .. row_end - 1, by a team in some order.
template <class Block, class Weights>
Floats product(const Weights& weights, const Floats& x, int num_rows, int k, int row_begin,
               int row_end, std::uint32_t order) {
  const int width = row_end - row_begin;
  Floats y = poisoned<float>(static_cast<std::size_t>(num_rows) * width), w_row(k);
  std::vector<int> times(y.size());
  run_team<Block>(order, [&] {
    stages::linear<Block>(x.data(), k, num_rows, k, weights, row_begin, row_end, w_row.data(),
                          [&](int t, int n, float v) {
                            y[t * width + n - row_begin] = v;
                            ++times[t * width + n - row_begin];
                          });
  });
  CHECK(std::all_of(times.begin(), times.end(), [](int n) { return n == 1; }));
  return y;
}

template <class Weights>
void check_product(const Weights& weights, int k, const Floats& x, int num_weight_rows) {
  const int num_rows = static_cast<int>(x.size()) / k;
  const auto make = [&]<class Block>(std::uint32_t order) {
    return product<Block>(weights, x, num_rows, k, 0, num_weight_rows, order);
  };
  check_teams(make, check_near);
  const Floats all = make.template operator()<Block256>(0u);
  // A row alone, and a range alone, have the same bits.
  const int t = num_rows - 1, begin = 3, end = num_weight_rows - 2;
  const Floats one(x.begin() + std::int64_t{t} * k, x.end());
  const Floats alone = product<Block256>(weights, one, 1, k, begin, end, 0u);
  const float* row = &all[static_cast<std::size_t>(t) * num_weight_rows];
  CHECK(same_bits(alone, Floats(row + begin, row + end)));
}

template <class Codes>
void check_run(const Codes& codes, const plat::TileRun& run) {
  for (int i = 0; i < plat::kTileRun; ++i) {
    const std::uint32_t half = run.words[i / 2] >> 16 * (i % 2) & 0xffffu;
    CHECK_EQ(stages::from_bf16(static_cast<std::uint16_t>(half)), codes(i));
  }
}

// A sink that packs three weight rows: they come to one thread, ascending.
struct Packs {
  static constexpr int kRowsTogether = 3;
  std::vector<int>& thread;  // of row t and weight row n, at t * num + n
  std::vector<int>& last;    // n that the thread of t and a pack had before
  int num;
  void operator()(int t, int n, float) const {
    const int own = stages::Team<Block256>::thread_idx();
    thread[t * num + n] = own;
    int& before = last[t * num + n / 3 * 3];
    CHECK_EQ(before, n % 3 == 0 ? -1 : n - 1);
    before = n;
  }
};

}  // namespace

TEST_CASE(every_code_is_expanded_exactly) {
  for (const int scale : {118, 127, 140}) {
    for (int first = 0; first < 256; first += plat::kTileRun) {
      Bytes codes(plat::kTileRun);
      for (int i = 0; i < plat::kTileRun; ++i) codes[i] = static_cast<std::uint8_t>(first + i);
      for (auto& code : codes) code = (code & 0x7fu) == 0x7fu ? 0u : code;
      const auto scale_code = static_cast<std::uint8_t>(scale);
      const stages::E4m3Weights<stages::ScaleUe8m0> e4m3{
          codes.data(), plat::kTileRun, {&scale_code, 1}, plat::kTileRun};
      check_run([&](int i) { return e4m3.value(0, i); }, e4m3.tile_run(e4m3.tile_codes(0, 0)));
      const stages::Fp4Weights fp4{codes.data(), 16, &scale_code, 1};
      check_run([&](int i) { return fp4.value(0, i); }, fp4.tile_run(fp4.tile_codes(0, 0)));
    }
  }
}

TEST_CASE(linears_are_near_one_thread_s) {
  Random random(1);
  constexpr int kOutputs = 37;
  struct Call {
    int num_rows, k;
  };
  for (const Call& call : {Call{1, 32}, Call{6, 96}, Call{16, 128}, Call{19, 640}, Call{5, 2336}}) {
    const std::size_t size = std::size_t{kOutputs} * call.k;
    const Floats x = bf16_values(random, static_cast<std::size_t>(call.num_rows) * call.k);
    const Codes bf16 = random.bf16(size);
    check_product(stages::Bf16Weights{bf16.data(), call.k}, call.k, x, kOutputs);
    const Bytes e4m3 = e4m3_codes(random, size);
    for (const int block : {32, 128}) {
      if (call.k % block != 0) continue;
      const Bytes scales = bytes(random, size, 120, 130);
      check_product(
          stages::E4m3Weights<stages::ScaleUe8m0>{
              e4m3.data(), call.k, {scales.data(), call.k / block}, block},
          call.k, x, kOutputs);
    }
    const Bytes fp4 = bytes(random, size / 2, 0, 255), scales = bytes(random, size / 32, 118, 124);
    check_product(stages::Fp4Weights{fp4.data(), call.k / 2, scales.data(), call.k / 32}, call.k, x,
                  kOutputs);
  }
}

TEST_CASE(weights_of_other_scales_keep_their_chains) {
  Random random(2);
  constexpr int kK = 256, kOutputs = 20;
  const Bytes codes = e4m3_codes(random, kOutputs * kK);
  const Floats scales = random.f32(kOutputs * kK / 32), x = random.f32(3 * kK);
  const stages::E4m3Weights<stages::ScaleF32> weights{
      codes.data(), kK, {scales.data(), kK / 32}, 32};
  check_teams([&]<class Block>(std::uint32_t order) {
    return product<Block>(weights, x, 3, kK, 0, kOutputs, order);
  });
}

TEST_CASE(packed_rows_come_to_one_thread_in_order) {
  Random random(3);
  constexpr int kK = 160, kOutputs = 96, kRows = 18;
  const Floats x = bf16_values(random, kRows * kK);
  const Codes w = random.bf16(kOutputs * kK);
  std::vector<int> thread(kRows * kOutputs, -1), last(thread.size(), -1);
  emu::launch({256, 1, emu::kAscending}, [&](int) {
    stages::linear<Block256>(x.data(), kK, kRows, kK, stages::Bf16Weights{w.data(), kK}, 0,
                             kOutputs, nullptr, Packs{thread, last, kOutputs});
  });
  for (int t = 0; t < kRows; ++t) {
    for (int n = 0; n < kOutputs; ++n) {
      const int of_pack = thread[t * kOutputs + n / 3 * 3];
      CHECK(of_pack >= 0);
      CHECK_EQ(thread[t * kOutputs + n], of_pack);
    }
  }
}

TEST_CASE(experts_are_near_one_thread_s) {
  Random random(4);
  constexpr int kInner = 96, kH = 288, kSlots = 3, kRows = 9;
  const Bytes w1 = bytes(random, kInner * kH / 2, 0, 255), w3 = bytes(random, w1.size(), 0, 255);
  const Bytes w2 = bytes(random, w1.size(), 0, 255), s1 = bytes(random, kInner * kH / 32, 117, 121);
  const Bytes s3 = bytes(random, s1.size(), 117, 121), s2 = bytes(random, s1.size(), 117, 121);
  const Floats x = bf16_values(random, kRows * kH), weights = random.f32(kRows * kSlots);
  const stages::Fp4Weights v1{w1.data(), kH / 2, s1.data(), kH / 32};
  const stages::Fp4Weights v3{w3.data(), kH / 2, s3.data(), kH / 32};
  const stages::Fp4Weights v2{w2.data(), kInner / 2, s2.data(), kInner / 32};
  std::vector<std::int32_t> every(kRows * kSlots);
  for (int i = 0; i < kRows * kSlots; ++i) every[i] = i;
  for (const std::vector<std::int32_t>& pairs :
       {std::vector<std::int32_t>{}, {4}, {0, 7, 13, 25}, every}) {
    const auto num_pairs = static_cast<int>(pairs.size());
    check_teams(
        [&]<class Block>(std::uint32_t order) {
          Floats h(kRows * kSlots * kInner, 0.5f), scratch(2 * kH);
          Codes d(kRows * kSlots * kH, 0x3f80);
          run_team<Block>(order, [&] {
            // Two ranges: the second begins where no tile does.
            for (const auto& [begin, end] : {std::pair{0, 19}, std::pair{19, kInner}}) {
              stages::expert_gate_up<Block>(h.data(), x.data(), v1, v3, pairs.data(), num_pairs,
                                            kSlots, kH, kInner, begin, end, 10.0f, scratch.data());
            }
            stages::Team<Block>::sync();
            stages::expert_down<Block>(d.data(), h.data(), v2, pairs.data(), num_pairs,
                                       weights.data(), kInner, kH, 0, kH, scratch.data());
          });
          for (const std::uint16_t code : d) h.push_back(stages::from_bf16(code));
          return h;
        },
        [](const Floats& got, const Floats& want) {
          // A bf16 value falls on its neighbour now and then, and what is made of it moves.
          double apart = 0.0, whole = 0.0;
          for (std::size_t i = 0; i < want.size(); ++i) {
            apart += std::pow(got[i] - want[i], 2.0);
            whole += std::pow(want[i], 2.0);
          }
          CHECK(std::sqrt(apart / whole) <= 1e-4);
        });
  }
}

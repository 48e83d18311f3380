// Block forms of what makes, stores, scores and attends keys, on emu, against one thread: bit for
// bit, but for norms (a block's sum of squares has an order of its own) and attention (keys are
// split over warps), which are held to the operation's bound.
//
// Planted and seen to fail: the sync before the join of attention's warps left out, a warp's sum
// not scaled by its maximum at the join, keys handed out by their place among the pads, a candidate
// scored by its neighbour's key.
//
// Built a second time with LOWLAT_EMU_WARP_LANES=64.
#include <algorithm>
#include <cmath>
#include <limits>

#include "emu_block.hpp"
#include "random_values.hpp"
#include "reference/attention.hpp"
#include "stages/attention.hpp"
#include "stages/compress.hpp"
#include "stages/index.hpp"
#include "stages/kv.hpp"
#include "stages/pool.hpp"
#include "stages/rope.hpp"

namespace {

namespace emu = lowlat::emu;
namespace plat = lowlat::emu::plat;
namespace reference = lowlat::reference;
namespace stages = lowlat::emu::stages;
using namespace lowlat::testing;
using Bytes = std::vector<std::uint8_t>;
using Codes = std::vector<std::uint16_t>;
using Floats = std::vector<float>;
using Ids = std::vector<std::int32_t>;

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int kDim = 512;

stages::RopeTable table() {
  return stages::rope_table(160000.0f, stages::yarn_ramp(160000.0, 16.0, 32.0, 1.0, 65536.0));
}

using Flat = stages::KvFlat<const std::uint8_t>;

template <class Block>
Codes attend(std::uint32_t order, const Codes& q, const Bytes& rows, const Ids& first,
             const Ids& second, const Floats& sink) {
  using Attention = stages::SparseAttention<Block>;
  const auto heads = static_cast<int>(sink.size());
  Codes out = q;  // in place
  Floats memory = poisoned<float>(Attention::memory_floats(heads));
  const stages::KeySet<Flat> one{first.data(), static_cast<int>(first.size()), {rows.data()}};
  const stages::KeySet<Flat> two{second.data(), static_cast<int>(second.size()), {rows.data()}};
  run_team<Block>(order, [&] {
    Attention::run(out.data(), out.data(), heads, one, two, sink.data(), memory.data());
  });
  return out;
}

}  // namespace

TEST_CASE(turns_and_rotations_have_the_bits_of_one_thread) {
  Random random(1);
  const stages::RopeTable rope = table();
  for (const std::int64_t position : {0, 77, 65535, 1048575}) {
    const Codes heads = random.bf16(5 * kDim);
    const Floats values = random.f32(64);
    check_teams([&]<class Block>(std::uint32_t order) {
      auto turn = poisoned<stages::RopeTurn>(1);
      Codes x = heads;
      Floats out = values;
      run_team<Block>(order, [&] {
        stages::rope_turn<Block>(turn[0], rope, position);
        stages::Team<Block>::sync();
        stages::Rope<Block>::rotate_heads(x.data() + kDim - 64, 5, kDim, turn[0]);
        stages::Rope<Block>::rotate(out.data(), turn[0]);
      });
      for (const std::uint16_t code : x) out.push_back(code);
      out.insert(out.end(), turn[0].cos, turn[0].cos + 32);
      out.insert(out.end(), turn[0].sin, turn[0].sin + 32);
      return out;
    });
  }
}

TEST_CASE(stored_rows_have_the_bits_of_one_thread) {
  Random random(2);
  Floats kv = random.f32(kDim, 4.0);
  kv[5] = 1e9f;
  std::fill_n(&kv[64], 64, 0.0f);
  std::fill_n(&kv[128], 64, -0.0f);
  kv[200] = std::numeric_limits<float>::quiet_NaN();
  for (int i = 256; i < 320; ++i) kv[i] = static_cast<float>(random.normal() * 1e-6);
  check_teams([&]<class Block>(std::uint32_t order) {
    Bytes row(584, 0);
    Floats out = poisoned<float>(kDim);
    run_team<Block>(order, [&] {
      stages::KvPack<Block>::run({row.data(), row.data() + 576}, kv.data());
      stages::Team<Block>::sync();
      stages::KvUnpack<Block>::run(out.data(),
                                   stages::KvRow<const std::uint8_t>{row.data(), row.data() + 576});
    });
    for (const std::uint8_t byte : row) out.push_back(byte);
    return out;
  });
}

TEST_CASE(compressed_entries_agree_with_one_thread) {
  Random random(3);
  const Floats pooled = random.f32(kDim);
  const Codes gain = random.bf16(kDim), latent = random.bf16(kDim);
  const stages::RopeTurn turn = stages::rope_turn(table(), 4098);
  check_teams(
      [&]<class Block>(std::uint32_t order) {
        Floats c = pooled;
        Codes out = poisoned<std::uint16_t>(kDim);
        typename stages::CompressedKey<Block>::Scratch scratch;
        run_team<Block>(order, [&] {
          stages::CompressedKey<Block>::latent(out.data(), c.data(), gain.data(), 1e-20f, scratch);
        });
        return out;
      },
      [](const Codes& got, const Codes& alone) {
        for (int i = 0; i < kDim; ++i) CHECK(std::abs(got[i] - alone[i]) <= 1);
      });
  check_teams([&]<class Block>(std::uint32_t order) {
    Floats entry = poisoned<float>(kDim);
    run_team<Block>(
        order, [&] { stages::CompressedKey<Block>::entry(entry.data(), latent.data(), turn); });
    return entry;
  });
}

TEST_CASE(pooled_keys_agree_with_one_thread) {
  Random random(4);
  for (const stages::PoolLayout layout :
       {stages::PoolLayout{4, kDim}, stages::PoolLayout{128, 128}}) {
    const Floats rows = random.f32(256 * layout.width());
    const Floats ape = random.f32(layout.ratio * layout.half_width());
    const Codes gain = random.bf16(layout.dim);
    const stages::RopeTurn turn = stages::rope_turn(table(), 128);
    for (const std::int64_t entry : {0, 1}) {
      check_teams([&]<class Block>(std::uint32_t order) {
        Floats c = poisoned<float>(layout.dim);
        auto scratch = poisoned<typename stages::PoolEntry<Block>::Scratch>(1);
        run_team<Block>(order, [&] {
          stages::PoolEntry<Block>::run(
              c.data(), layout, ape.data(), entry,
              [&](std::int64_t position) { return rows.data() + position * layout.width(); }, 0,
              layout.dim, scratch[0]);
        });
        return c;
      });
    }
    const Floats c0 = random.f32(kDim);
    check_teams(
        [&]<class Block>(std::uint32_t order) {
          Floats c = c0;
          typename stages::PooledKey<Block>::Scratch scratch;
          run_team<Block>(order, [&] {
            stages::PooledKey<Block>::finish(c.data(), layout.dim, gain.data(), 1e-6f, turn,
                                             scratch);
          });
          return c;
        },
        [](const Floats& got, const Floats& alone) {
          CHECK(rel_l2(values_of(got), values_of(alone)) <= 1e-6);
        });
  }
}

TEST_CASE(index_queries_have_the_bits_of_one_thread) {
  Random random(5);
  const stages::RopeTurn turn = stages::rope_turn(table(), 1000000);
  constexpr int kHeads = 9;
  Floats query = random.f32(kHeads * 128);
  for (float& v : query) v = stages::round_bf16(v);
  std::fill_n(&query[128], 128, 0.0f);
  check_teams([&]<class Block>(std::uint32_t order) {
    Floats x = query;
    run_team<Block>(order, [&] { stages::index_query<Block>(x.data(), kHeads, turn); });
    return x;
  });
  check_teams([&]<class Block>(std::uint32_t order) {
    Floats x = query, scales = poisoned<float>(kHeads);
    Bytes codes = poisoned<std::uint8_t>(x.size());
    run_team<Block>(order, [&] {
      stages::index_query_fp8<Block>(codes.data(), scales.data(), x.data(), kHeads, turn);
    });
    for (const std::uint8_t code : codes) scales.push_back(code);
    return scales;
  });
}

TEST_CASE(index_keys_agree_with_one_thread) {
  Random random(6);
  const stages::RopeTurn turn = stages::rope_turn(table(), 4096);
  const Codes gain = random.bf16(128);
  for (int seed = 0; seed < 5; ++seed) {
    const Floats x0 = random.f32(128, 3.0);
    check_teams(
        [&]<class Block>(std::uint32_t order) {
          Floats x = x0, out(128);
          Bytes row = poisoned<std::uint8_t>(68);
          auto scratch = poisoned<typename stages::IndexKey<Block>::Scratch>(1);
          run_team<Block>(order, [&] {
            stages::IndexKey<Block>::run({row.data(), row.data() + 64}, x.data(), gain.data(),
                                         1e-20f, turn, scratch[0]);
          });
          stages::index_unpack(
              out.data(), stages::IndexRow<const std::uint8_t, 64>{row.data(), row.data() + 64});
          return out;
        },
        [](const Floats& got, const Floats& alone) {
          CHECK(rel_l2(values_of(got), values_of(alone)) <= 1e-1);
        });
    check_teams(
        [&]<class Block>(std::uint32_t order) {
          Floats x = x0, out(128);
          Bytes row = poisoned<std::uint8_t>(132);
          auto scratch = poisoned<typename stages::IndexKeyFp8<Block>::Scratch>(1);
          run_team<Block>(order, [&] {
            stages::IndexKeyFp8<Block>::run({row.data(), row.data() + 128}, x.data(), gain.data(),
                                            1e-6f, turn, scratch[0]);
          });
          const float factor = stages::index_unpack(
              out.data(), stages::IndexRow<const std::uint8_t, 128>{row.data(), row.data() + 128});
          for (float& v : out) v *= factor;
          return out;
        },
        [](const Floats& got, const Floats& alone) {
          CHECK(rel_l2(values_of(got), values_of(alone)) <= 1e-1);
        });
  }
}

TEST_CASE(index_scores_have_the_bits_of_one_thread) {
  Random random(7);
  constexpr int kHeads = 64, kRows = 45;
  const Floats query = random.f32(kHeads * 128), weights = random.f32(kHeads);
  const Bytes fp4 = random.index_rows(kRows), fp8 = random.index_fp8_rows(kRows);
  const auto reversed = [](int i) { return kRows - 1 - i; };
  const auto check = [&](const auto& rows) {
    check_teams([&]<class Block>(std::uint32_t order) {
      Floats scores = poisoned<float>(kRows);
      run_team<Block>(order, [&] {
        stages::index_scores<Block>(scores.data(), query.data(), weights.data(), kHeads, rows,
                                    reversed, 2, kRows);
      });
      return scores;
    });
  };
  check(stages::IndexFlat<const std::uint8_t>{fp4.data()});
  check(stages::IndexFlat<const std::uint8_t, 128>{fp8.data()});
}

TEST_CASE(attention_is_within_its_bound_of_one_thread_and_of_the_reference) {
  Random random(8);
  constexpr int kHeads = 4, kRows = 300;
  const Bytes rows = random.kv_rows(kRows);
  const auto some = [&](int n, int first) {
    Ids ids(n);
    for (auto& id : ids) id = static_cast<std::int32_t>(random.integer(first, kRows - 1));
    return ids;
  };
  struct Call {
    Ids first, second;
    Floats sink;
  };
  const Call calls[] = {
      {some(128, -1), some(512, -1), {0.5f, kNone, -3.0f, 4.0f}},  // the model's
      {some(20, 0), {}, {0.0f, 0.0f, kNone, 1e4f}},      // fewer keys than lanes, no second
      {some(1, 0), {}, {kNone, 0.0f, 1.0f, kNone}},      // a warp has it, the others none
      {{-1, -1, -1}, {-1}, {kNone, 0.0f, 5.0f, kNone}},  // no key
      {{}, {}, {kNone, 0.0f, 5.0f, kNone}}};
  for (const Call& call : calls) {
    const Codes q = random.bf16(kHeads * kDim, 2.0);
    Codes want(q.size());
    reference::sparse_attention(
        want.data(), q.data(), 1, kHeads,
        {rows.data(), call.first.data(), static_cast<std::int64_t>(call.first.size())},
        {rows.data(), call.second.data(), static_cast<std::int64_t>(call.second.size())},
        call.sink.data());
    check_teams(
        [&]<class Block>(std::uint32_t order) {
          return attend<Block>(order, q, rows, call.first, call.second, call.sink);
        },
        [&](const Codes& got, const Codes& alone) {
          CHECK(rel_l2(values_of(got), values_of(alone)) <= 5e-4);
          CHECK(rel_l2(values_of(got), values_of(want)) <= 5e-4);
        });
  }
}

TEST_CASE(attention_of_a_block_depends_on_the_sequence_of_keys_only) {
  Random random(9);
  // Equal scores, and large values that cancel and take of the small ones what lies between:
  // another order of keys within a warp, or another warp for one of them, is another sum.
  Bytes rows = random.kv_rows(60);
  for (int i = 0; i < 40; ++i) {
    std::fill_n(&rows[i * 584], 448, reference::to_e4m3(i % 2 == 0 ? 256.0 : -256.0));
    std::fill_n(&rows[i * 584 + 576], 7, 140);
  }
  const Codes q(2 * kDim, 0);
  const Floats sink = {0.5f, kNone};
  Ids ids;
  for (std::int32_t i = 0; i < 60; ++i) ids.push_back(i * 7 % 60);
  const Codes whole = attend<Block256>(0, q, rows, ids, {}, sink);
  Ids spread;
  for (const std::int32_t id : ids) {
    for (std::int64_t pads = random.integer(0, 3); pads > 0; --pads) spread.push_back(-1);
    spread.push_back(id);
  }
  CHECK(attend<Block256>(2, q, rows, spread, {}, sink) == whole);
  for (const int cut : {0, 1, 8, 33, 60}) {
    const Ids first(ids.begin(), ids.begin() + cut), second(ids.begin() + cut, ids.end());
    CHECK(attend<Block256>(2, q, rows, first, second, sink) == whole);
  }
  const Codes second_head(q.begin() + kDim, q.end());
  CHECK(attend<Block256>(0, second_head, rows, ids, {}, {kNone}) ==
        Codes(whole.begin() + kDim, whole.end()));
}

TEST_CASE(attention_lets_no_value_that_is_none_vanish) {
  Random random(10);
  Bytes rows = random.kv_rows(40);
  rows[7 * 584 + 3] = 0x7f;  // a NaN in one stored row
  Ids ids(40);
  for (int i = 0; i < 40; ++i) ids[i] = i;
  const Codes q = random.bf16(kDim);
  for (const std::uint16_t code : attend<Block256>(0, q, rows, ids, {}, {0.0f})) {
    CHECK((code & 0x7fffu) > 0x7f80u);
  }
  // Scores far apart: the largest takes all, whichever warp has it.
  for (int winner = 0; winner < 9; ++winner) {
    Bytes far(9 * 584, 0);
    for (int i = 0; i < 9; ++i) {
      std::fill_n(&far[i * 584], 448, reference::to_e4m3(i == winner ? 448.0 : -448.0));
      std::fill_n(&far[i * 584 + 576], 7, 127);
    }
    Codes big(kDim, reference::to_bf16(448.0));
    const Codes o = attend<Block256>(0, big, far, {0, 1, 2, 3, 4, 5, 6, 7, 8}, {}, {0.0f});
    for (int d = 0; d < 448; ++d) CHECK_EQ(reference::from_bf16(o[d]), 448.0);
  }
}

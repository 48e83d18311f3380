// Races inside a block: under ThreadSanitizer every fiber of emu is a thread of its own that only
// barriers order, so each stage's use of its scratch and of shared memory is checked, whatever the
// order in which the fibers happen to run. Built a second time with LOWLAT_PLANT, where the block
// reads what its other threads wrote without a sync between: that build must be caught.
#include "emu_block.hpp"
#include "stages/accept.hpp"
#include "stages/attention.hpp"
#include "stages/compress.hpp"
#include "stages/draft.hpp"
#include "stages/engram.hpp"
#include "stages/exchange_group.hpp"
#include "stages/experts.hpp"
#include "stages/gate.hpp"
#include "stages/hc.hpp"
#include "stages/index.hpp"
#include "stages/linear.hpp"
#include "stages/pool.hpp"
#include "stages/select.hpp"

namespace {

namespace emu = lowlat::emu;
namespace plat = lowlat::emu::plat;
namespace stages = lowlat::emu::stages;
using namespace lowlat::testing;
using Block64 = plat::Block<2 * plat::kWarpLanes>;
using Codes = std::vector<std::uint16_t>;
using Floats = std::vector<float>;

// Some numbers, the same everywhere: values do not matter here.
Floats numbers(std::size_t n) {
  Floats v(n);
  for (std::size_t i = 0; i < n; ++i) v[i] = static_cast<float>(i * 37 % 101) / 50.0f - 1.0f;
  return v;
}
Codes codes_of(std::size_t n) {
  Codes codes;
  for (const float v : numbers(n)) codes.push_back(stages::to_bf16(v));
  return codes;
}
std::vector<std::uint8_t> bytes_of(std::size_t n) {
  std::vector<std::uint8_t> bytes(n);
  for (std::size_t i = 0; i < n; ++i) bytes[i] = static_cast<std::uint8_t>(i * 29 % 120);
  return bytes;
}

template <class Block, class Body>
void run(Body body) {
  emu::launch({Block::kNumThreads}, [&](int) { body(); });
}

template <class Block>
void sums_norms_and_linears() {
  using Threads [[maybe_unused]] = stages::Team<Block>;
  const Floats x = numbers(512);
  const Codes gain = codes_of(512), w = codes_of(512 * 8);
  Codes out(512);
  Floats y(16), q(512);
  typename stages::RmsNorm<Block>::Scratch scratch;
  run<Block>([&] {
    stages::RmsNorm<Block>::run(out.data(), x.data(), gain.data(), 512, 1e-6f, scratch);
#ifndef LOWLAT_PLANT
    Threads::sync();
#endif
    stages::quantize_row<Block>(q.data(), out.data(), 512, 128);
    Threads::sync();
    stages::linear<Block>(q.data(), 256, 2, 256, stages::Bf16Weights{w.data(), 256}, 0, 8, nullptr,
                          [&](int t, int n, float v) { y[t * 8 + n] = v; });
    stages::RmsNorm<Block>::run(out.data(), q.data(), gain.data(), 512, 1e-6f, scratch);
  });
}

template <class Block>
void hyper_connections() {
  using Threads [[maybe_unused]] = stages::Team<Block>;
  constexpr int kHidden = 256;
  const Codes y = codes_of(kHidden), gain = codes_of(kHidden);
  Codes residual = codes_of(4 * kHidden), x(kHidden);
  const Floats fn = numbers(24 * 4 * kHidden), base = numbers(24), scale = numbers(3);
  Floats row(4 * kHidden), memory(kHidden);
  typename stages::HcStats<Block>::Scratch scratch;
  typename stages::RmsNorm<Block>::Scratch norm;
  stages::HcParams params;
  run<Block>([&] {
    for (int layer = 0; layer < 2; ++layer) {
      stages::expand_bf16<Block>(row.data(), residual.data(), 4 * kHidden);
      Threads::sync();
      float mix[24];
      stages::HcStats<Block>::mix(mix, row.data(), fn.data(), kHidden, 1e-6f, scratch);
      stages::HcStats<Block>::params(params, mix, base.data(), scale.data(), 1e-6f, 20);
      Threads::sync();
      stages::hc_combine_norm<Block>(x.data(), residual.data(), params.pre, gain.data(), kHidden,
                                     1e-6f, memory.data(), norm);
      Threads::sync();
      stages::hc_post<Block>(residual.data(), residual.data(), y.data(), params.post, params.comb,
                             kHidden, 0, kHidden);
      Threads::sync();
    }
  });
}

template <class Block>
void keys_and_attention() {
  using Threads [[maybe_unused]] = stages::Team<Block>;
  const Codes gain = codes_of(512);
  const auto table = stages::rope_table(10000.0f, {});
  Floats c = numbers(512), index = numbers(128), query = numbers(4 * 128), scores(8);
  const Floats weights = numbers(4), sink = numbers(2);
  Codes latent(512), q = codes_of(2 * 512);
  std::vector<std::uint8_t> rows(8 * 584), index_rows(8 * 132), query_codes(4 * 128);
  Floats query_scales(4), memory(stages::SparseAttention<Block>::memory_floats(2));
  const std::vector<std::int32_t> ids = {0, 3, -1, 5, 7};
  auto turn = std::vector<stages::RopeTurn>(1);
  typename stages::CompressedKey<Block>::Scratch scratch;
  typename stages::IndexKeyFp8<Block>::Scratch key_scratch;
  typename stages::IndexKey<Block>::Scratch fp4_scratch;
  std::vector<std::uint8_t> fp4(68);
  const stages::KeySet<stages::KvFlat<const std::uint8_t>> keys{ids.data(), 5, {rows.data()}};
  run<Block>([&] {
    stages::rope_turn<Block>(turn[0], table, 9);
    Threads::sync();
    for (int i = 0; i < 8; ++i) {
      stages::CompressedKey<Block>::latent(latent.data(), c.data(), gain.data(), 1e-6f, scratch);
      stages::CompressedKey<Block>::entry(c.data(), latent.data(), turn[0]);
      stages::KvPack<Block>::run({&rows[i * 584], &rows[i * 584 + 576]}, c.data());
      stages::IndexKeyFp8<Block>::run({&index_rows[i * 132], &index_rows[i * 132 + 128]},
                                      index.data(), gain.data(), 1e-6f, turn[0], key_scratch);
    }
    stages::IndexKey<Block>::run({fp4.data(), fp4.data() + 64}, index.data(), gain.data(), 1e-6f,
                                 turn[0], fp4_scratch);
    stages::index_query<Block>(query.data(), 4, turn[0]);
    stages::index_query_fp8<Block>(query_codes.data(), query_scales.data(), query.data(), 4,
                                   turn[0]);
    stages::index_scores<Block>(scores.data(), query.data(), weights.data(), 4,
                                stages::IndexFlat<const std::uint8_t, 128>{index_rows.data()},
                                stages::AllPositions{}, 0, 8);
    stages::SparseAttention<Block>::run(q.data(), q.data(), 2, keys, keys, sink.data(),
                                        memory.data());
    stages::KvUnpack<Block>::run(c.data(), keys.rows.row(3));
  });
}

template <class Block>
void pooled_entries() {
  using Threads [[maybe_unused]] = stages::Team<Block>;
  const stages::PoolLayout layout{4, 128};
  const Floats rows = numbers(32 * layout.width()), ape = numbers(4 * layout.half_width());
  const Codes gain = codes_of(128);
  const auto turn = stages::rope_turn(stages::rope_table(10000.0f, {}), 4);
  Floats c(128);
  typename stages::PoolEntry<Block>::Scratch scratch;
  typename stages::PooledKey<Block>::Scratch key;
  run<Block>([&] {
    for (const std::int64_t entry : {0, 1, 2}) {
      stages::PoolEntry<Block>::run(
          c.data(), layout, ape.data(), entry,
          [&](std::int64_t position) { return rows.data() + position * layout.width(); }, 0, 128,
          scratch);
      stages::PooledKey<Block>::finish(c.data(), 128, gain.data(), 1e-6f, turn, key);
    }
  });
}

template <class Block>
void choices() {
  using Threads [[maybe_unused]] = stages::Team<Block>;
  const Floats scores = numbers(900), bias = numbers(64);
  std::vector<std::int32_t> ids(64), blocks(8);
  Floats weights(8), memory(128), block_scores(900);
  stages::SelectScratch scratch;
  typename stages::BlockBest<Block>::Scratch best;
  constexpr int kVocab = 1500;
  const Floats target = numbers(3 * kVocab), drafts = numbers(2 * kVocab),
               coins = {0.5f, 0.1f, 0.7f};
  const std::vector<std::int32_t> draft = {100, 5};
  Floats room(stages::Acceptance<Block>::memory_floats(kVocab));
  typename stages::Acceptance<Block>::Scratch accept;
  run<Block>([&] {
    stages::select_top<Block>(ids.data(), scores.data(), 900, 64, stages::AllPositions{}, scratch);
    stages::candidate_blocks<Block>(blocks.data(), scores.data(), 900, 8, 8, block_scores.data(),
                                    scratch);
    stages::gate_select<Block>(ids.data(), weights.data(), scores.data(), bias.data(), 64, 6,
                               stages::GateSum::target, 1.5f, memory.data(), stages::GateRule::v41,
                               best);
    stages::draft_select<Block>(scores.data(), 900, 3, 0.8f, stages::PhiloxNoise{1, 2, 3, 4}, best);
    stages::Acceptance<Block>::greedy(draft.data(), target.data(), 2, kVocab, accept);
    stages::Acceptance<Block>::sampled(draft.data(), target.data(), drafts.data(), 2, kVocab, 0.9f,
                                       coins.data(), room.data(), accept);
  });
}

template <class Block>
void experts_and_engram() {
  using Threads [[maybe_unused]] = stages::Team<Block>;
  constexpr int kInner = 32, kHidden = 128, kRows = 3, kSlots = 2, kExperts = 4;
  const auto w = bytes_of(kInner * kHidden / 2), scales = bytes_of(kInner * kHidden / 32);
  const stages::Fp4Weights up{w.data(), kHidden / 2, scales.data(), kHidden / 32};
  const stages::Fp4Weights down{w.data(), kInner / 2, scales.data(), kInner / 32};
  const std::vector<std::int32_t> ids = {0, 2, 2, 1, 0, 0};
  std::vector<std::int32_t> offsets(kExperts + 1), pairs(kRows * kSlots);
  const Floats x = numbers(kRows * kHidden), weights = numbers(kRows * kSlots);
  Floats h(kRows * kSlots * kInner), out(kHidden);
  Codes d(kRows * kSlots * kHidden), residual = codes_of(4 * kHidden);
  const Codes shared = codes_of(kHidden), kv = codes_of(5 * kHidden), gains = codes_of(4 * kHidden);
  typename stages::EngramApply<Block>::Scratch engram;
  run<Block>([&] {
    stages::group_pairs<Block>(offsets.data(), pairs.data(), ids.data(), kRows, kSlots, kExperts);
    Threads::sync();
    for (int expert = 0; expert < kExperts; ++expert) {
      const int num = offsets[expert + 1] - offsets[expert];
      stages::expert_gate_up<Block>(h.data(), x.data(), up, up, &pairs[0] + offsets[expert], num,
                                    kSlots, kHidden, kInner, 0, kInner, 10.0f, nullptr);
      Threads::sync();
      stages::expert_down<Block>(d.data(), h.data(), down, &pairs[0] + offsets[expert], num,
                                 weights.data(), kInner, kHidden, 0, kHidden, nullptr);
    }
    Threads::sync();
    stages::expert_sum<Block>(out.data(), d.data(), shared.data(), kSlots, kHidden, 0, kHidden);
    stages::EngramApply<Block>::run(residual.data(), kv.data(), gains.data(), gains.data(), kHidden,
                                    1e-6f, engram);
  });
}

template <class Block>
void ranks_exchange() {
  using Threads [[maybe_unused]] = stages::Team<Block>;
  ExchangeGroup group(2, 300, 60'000'000'000ull);
  const Floats words = numbers(300);
  std::vector<Codes> out(2, Codes(300));
  emu::launch({Block::kNumThreads, 2}, [&](int rank) {
    for (std::uint64_t epoch = 1; epoch <= 5; ++epoch) {
      stages::publish<Block>(group.port(rank), epoch, 0, words.data(), 300);
      CHECK(stages::receive_sum<Block>(group.port(rank), epoch, 0, out[rank].data(), 300, 0,
                                       stages::StageId::moe_sum));
    }
  });
  CHECK(out[0] == out[1]);
}

template <class Block>
void a_silent_rank_is_reported_by_many_threads() {
  using Threads [[maybe_unused]] = stages::Team<Block>;
  ExchangeGroup group(3, 300, 20'000'000ull);
  const Floats words = numbers(300);
  std::vector<Codes> out(3, Codes(300));
  emu::launch({Block::kNumThreads, 3}, [&](int rank) {
    if (rank == 2) return;
    stages::publish<Block>(group.port(rank), 1, 0, words.data(), 300);
    CHECK(!stages::receive_sum<Block>(group.port(rank), 1, 0, out[rank].data(), 300, 0,
                                      stages::StageId::moe_sum));
    CHECK(group.status(rank).state != 0u);
  });
  for (const int rank : {0, 1, 2}) CHECK(group.abort_word(rank) != 0u);
}

}  // namespace

TEST_CASE(sums_norms_and_linears_of_a_block) { sums_norms_and_linears<Block64>(); }
TEST_CASE(sums_norms_and_linears_of_a_warp) { sums_norms_and_linears<Warp>(); }
TEST_CASE(hyper_connections_of_a_block) { hyper_connections<Block64>(); }
TEST_CASE(hyper_connections_of_a_warp) { hyper_connections<Warp>(); }
TEST_CASE(keys_and_attention_of_a_block) { keys_and_attention<Block64>(); }
TEST_CASE(keys_and_attention_of_a_warp) { keys_and_attention<Warp>(); }
TEST_CASE(pooled_entries_of_a_block) { pooled_entries<Block64>(); }
TEST_CASE(pooled_entries_of_a_warp) { pooled_entries<Warp>(); }
TEST_CASE(choices_of_a_block) { choices<Block64>(); }
TEST_CASE(choices_of_a_warp) { choices<Warp>(); }
TEST_CASE(experts_and_engram_of_a_block) { experts_and_engram<Block64>(); }
TEST_CASE(experts_and_engram_of_a_warp) { experts_and_engram<Warp>(); }
TEST_CASE(ranks_exchange_of_a_block) { ranks_exchange<Block64>(); }
TEST_CASE(ranks_exchange_of_a_warp) { ranks_exchange<Warp>(); }
TEST_CASE(a_silent_rank_is_reported_by_many_threads_of_a_block) {
  a_silent_rank_is_reported_by_many_threads<Block64>();
}
TEST_CASE(a_silent_rank_is_reported_by_many_threads_of_a_warp) {
  a_silent_rank_is_reported_by_many_threads<Warp>();
}

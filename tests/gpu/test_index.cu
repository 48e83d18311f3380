// The compressors, the index and the n-gram memory beside the attention half, at true shapes:
// against reference/, with awkward inputs, and replayed from a graph with changing inputs.
#include "bench/engram_case.cuh"
#include "bench/index_case.cuh"
#include "bench/index_v4_case.cuh"

#include "gpu.cuh"

using lowlat::bench::Activations;
using lowlat::bench::Buffer;
using lowlat::bench::check_engram;
using lowlat::bench::CheckV4;
using lowlat::bench::cuda_must;
using lowlat::bench::DeviceEngram;
using lowlat::bench::DeviceIndexState;
using lowlat::bench::DeviceIndexWeights;
using lowlat::bench::DeviceV4;
using lowlat::bench::Draw;
using lowlat::bench::Graph;
using lowlat::bench::HostEngram;
using lowlat::bench::HostIndexState;
using lowlat::bench::HostIndexWeights;
using lowlat::bench::HostV4;
using lowlat::bench::IndexBuffers;
using lowlat::bench::IndexCheck;
using lowlat::bench::IndexSizes;
using lowlat::bench::Random;
using lowlat::testing::need_device;

namespace fused = lowlat::nvidia::fused;

namespace {

// A layer that stores its own keys, in a graph with programmatic edges and gates, replayed with
// inputs that change, against the same launches one after the other. Failures.
int replays_differ(const IndexSizes& sizes, int replays) {
  Random random(5);
  const HostIndexWeights host(random);
  const DeviceIndexWeights device(host);
  const HostIndexState state(sizes, Draw::random, true, random);
  const DeviceIndexState graph_state(state), eager_state(state);
  Activations act(sizes.rows(), 16, 2);
  IndexBuffers graph_buffers(sizes), eager_buffers(sizes);
  // A word a gate, each on a line of its own; the step's first kernel makes them 0.
  constexpr int kGates = 5, kWords = 32;
  const Buffer<std::uint32_t> words(kGates * kWords);
  const auto gate = [&](int number, std::uint32_t blocks) {
    return fused::Gate{words.get() + number * kWords, blocks, nullptr, 0};
  };
  const Buffer<std::uint64_t> epoch(std::vector<std::uint64_t>{1});
  int failures = 0;
  {
    fused::CompressParams compress = graph_buffers.compress(device, graph_state, act);
    fused::IndexParams index = graph_buffers.index(device, graph_state, act, false, true);
    compress.product_done = gate(0, fused::compress_product_blocks(compress));
    compress.done = gate(1, fused::compress_key_blocks(sizes.rows()));
    index.heads_done = compress.product_done;
    index.keys_done = compress.done;
    index.query_done = gate(2, fused::kIndexQueryBlocks);
    index.scores_done = gate(3, fused::kIndexScoreBlocks);
    Graph graph([&](cudaStream_t stream) {
      cuda_must(fused::launch_begin_step(epoch.get(), 0, words.get(), kGates * kWords, stream),
                "begin step");
      cuda_must(fused::launch_compress_product(compress, lowlat::bench::kHidden, false, stream),
                "product");
      cuda_must(fused::launch_compress_key(compress, true, stream), "key");
      cuda_must(fused::launch_index_query(index, true, stream), "query");
      cuda_must(fused::launch_index_scores(index, true, stream), "scores");
      cuda_must(fused::launch_index_select(index, true, stream), "select");
    });
    for (int replay = 0; replay < replays; ++replay) {
      IndexCheck::draw_inputs(act, Draw::random, random);
      graph_buffers.entries.poison();
      graph.replay();
      graph.wait();
      const fused::CompressParams plain = eager_buffers.compress(device, eager_state, act);
      const fused::IndexParams alone = eager_buffers.index(device, eager_state, act, false, true);
      cuda_must(fused::launch_compress_product(plain, lowlat::bench::kHidden, false, nullptr),
                "product");
      cuda_must(fused::launch_compress_key(plain, false, nullptr), "key");
      cuda_must(fused::launch_index_query(alone, false, nullptr), "query");
      cuda_must(fused::launch_index_scores(alone, false, nullptr), "scores");
      cuda_must(fused::launch_index_select(alone, false, nullptr), "select");
      cuda_must(cudaDeviceSynchronize(), "eager");
      failures += graph_buffers.entries.take() != eager_buffers.entries.take() ? 1 : 0;
      failures += graph_buffers.entry_slots.take() != eager_buffers.entry_slots.take() ? 1 : 0;
    }
    failures += graph_state.keys.take() != eager_state.keys.take() ? 1 : 0;
    failures += graph_state.pool.take() != eager_state.pool.take() ? 1 : 0;
    failures += graph_state.state.take() != eager_state.state.take() ? 1 : 0;
  }
  return failures;
}

struct IndexCase {
  IndexSizes sizes;
  Draw draw = Draw::random;
};

// The cases' kernels with weights drawn once, against reference/. Failures.
template <class Check, class HostPart, class DevicePart>
int check(std::initializer_list<IndexCase> cases) {
  need_device();
  Random random(1);
  const HostPart host(random);
  const DevicePart device(host);
  Check check;
  for (const IndexCase& one : cases) check.run(one.sizes, one.draw, host, device);
  return check.failures;
}
constexpr auto check_v41 = check<IndexCheck, HostIndexWeights, DeviceIndexWeights>;
constexpr auto check_v4 = check<CheckV4, HostV4, DeviceV4>;

struct EngramStep {
  int requests, tokens;
  int slots = 0;  // of the product's ring
};

int check_engrams(std::initializer_list<EngramStep> steps) {
  need_device();
  Random random(1);
  const HostEngram host(random);
  const DeviceEngram device(host);
  int failures = 0;
  for (const EngramStep& step : steps) {
    failures += check_engram(step.requests, step.tokens, step.slots, host, device);
  }
  return failures;
}

}  // namespace

TEST_CASE(v41_compressor_and_index_equal_reference_at_every_kind_of_width) {
  CHECK_EQ(check_v41({{{1, 1, 2, 0}},
                      {{1, 6, 1, 3}},
                      {{2, 6, 2, 8191}},
                      {{8, 6, 1, 1030}},
                      {{48, 1, 1, 600}},
                      {{4, 6, 1, 16386}}}),
           0);
}

TEST_CASE(v41_selection_is_exact_where_a_row_has_several_parts) {
  CHECK_EQ(check_v41({{{1, 6, 1, 131000}}, {{1, 8, 1, 20000}}}), 0);
}

TEST_CASE(equal_scores_go_to_the_lowest_entries_and_padded_rows_see_nothing) {
  CHECK_EQ(check_v41({{{1, 6, 1, 20000}, Draw::equal_scores}, {{2, 6, 2, 3001}, Draw::padded}}), 0);
}

TEST_CASE(v4_pooled_keys_and_index_equal_reference) {
  CHECK_EQ(check_v4({{{1, 6, 4, 0}},
                     {{2, 6, 4, 253}},
                     {{8, 6, 4, 4097}},
                     {{4, 6, 4, 1021}},
                     {{1, 6, 128, 0}},
                     {{8, 6, 128, 125}},
                     {{48, 1, 128, 255}},
                     {{2, 6, 4, 3000}, Draw::padded},
                     {{1, 6, 4, 5000}, Draw::equal_scores}}),
           0);
}

TEST_CASE(engram_equals_reference_at_every_kind_of_width) {
  CHECK_EQ(check_engrams({{1, 6}, {2, 6}, {4, 6}, {8, 6}, {1, 1, 2}}), 0);
}

TEST_CASE(replays_with_changing_inputs_equal_eager_launches) {
  need_device();
  CHECK_EQ(replays_differ({1, 6, 2, 9000}, 200), 0);
  CHECK_EQ(replays_differ({8, 6, 1, 3000}, 50), 0);
}

TEST_CASE(brief_v41_one_row_and_six) {
  CHECK_EQ(check_v41({{{1, 1, 2, 700}}, {{1, 6, 2, 700}}}), 0);
}
TEST_CASE(brief_v4_one_row_and_six) {
  CHECK_EQ(check_v4({{{1, 1, 4, 253}}, {{1, 1, 128, 125}}, {{1, 6, 4, 253}}, {{1, 6, 128, 125}}}),
           0);
}
TEST_CASE(brief_engrams_of_one_row_and_six) { CHECK_EQ(check_engrams({{1, 1, 2}, {1, 6, 2}}), 0); }

TEST_CASE(sizes_that_were_not_built_are_refused) {
  need_device();
  fused::IndexParams index = {};
  index.rows.num_rows = 7;
  index.rows.tokens = 6;
  index.pages.per_page = 128;
  CHECK_EQ(fused::launch_index_scores(index, false, nullptr), cudaErrorInvalidValue);
  CHECK_EQ(fused::launch_index_select(index, false, nullptr), cudaErrorInvalidValue);
  index.rows.num_rows = 49;
  CHECK_EQ(fused::launch_index_query(index, false, nullptr), cudaErrorInvalidValue);
  fused::PoolParams pool = {};
  pool.rows.num_rows = pool.rows.tokens = 6;
  pool.ratio = 4;
  pool.ring = 8;  // too short for six rows
  pool.width = 4096;
  CHECK_EQ(fused::launch_compress_pool(pool, false, nullptr), cudaErrorInvalidValue);
  fused::EngramParams engram = {};
  engram.rows.num_rows = engram.rows.tokens = 6;
  engram.table.num_shards = 5;
  CHECK_EQ(fused::launch_engram_lookup(engram, false, nullptr), cudaErrorInvalidValue);
}

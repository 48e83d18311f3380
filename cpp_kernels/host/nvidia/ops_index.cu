// Launches of the index: queries, keys, the selection of entries and the candidate blocks.
#include "host/nvidia/linear.cuh"
#include "host/nvidia/ops.cuh"
#include "host/nvidia/pool_sequence.cuh"
#include "host/op/models.hpp"

#include "stages/index.hpp"
#include "stages/select.hpp"

namespace lowlat::host::cuda {
namespace {

template <class Byte>
using Fp4Rows = stages::IndexFlat<Byte>;
template <class Byte>
using Fp8Rows = stages::IndexFlat<Byte, stages::kIndexFp8DataBytes>;

float norm_eps(const DeviceCall& call) {
  return static_cast<float>(model_rules(call.model()).norm_eps);
}

// A block a row. queries: fp32 [T, heads, 128], bf16 values, used as memory.
__global__ void query_kernel(std::uint16_t* out, float* queries, const std::int64_t* pos,
                             stages::RopeTable table, int heads) {
  __shared__ stages::RopeTurn turn;
  const std::int64_t t = blockIdx.x, pitch = std::int64_t{heads} * stages::kIndexDim;
  float* query = queries + t * pitch;
  stages::rope_turn<Block>(turn, table, pos[t]);
  plat::block_sync();
  stages::index_query<Block>(query, heads, turn);
  for (int i = plat::thread_idx(); i < pitch; i += kThreads) {
    out[t * pitch + i] = stages::to_bf16(query[i]);
  }
}

__global__ void query_fp8_kernel(std::uint8_t* out_codes, float* out_scales, float* queries,
                                 const std::int64_t* pos, stages::RopeTable table, int heads) {
  __shared__ stages::RopeTurn turn;
  const std::int64_t t = blockIdx.x, pitch = std::int64_t{heads} * stages::kIndexDim;
  stages::rope_turn<Block>(turn, table, pos[t]);
  plat::block_sync();
  stages::index_query_fp8<Block>(out_codes + t * pitch, out_scales + t * heads, queries + t * pitch,
                                 heads, turn);
}

// A block a key. keys: fp32 [T, 128], the projections, used as memory.
__global__ void key_kernel(std::uint8_t* out, float* keys, const std::uint16_t* gain,
                           const std::int64_t* pos, stages::RopeTable table, float eps) {
  using Key = stages::IndexKey<Block>;
  __shared__ stages::RopeTurn turn;
  __shared__ Key::Scratch scratch;
  const std::int64_t t = blockIdx.x;
  stages::rope_turn<Block>(turn, table, pos[t]);
  plat::block_sync();
  Key::run(Fp4Rows<std::uint8_t>{out}.row(t), keys + t * stages::kIndexDim, gain, eps, turn,
           scratch);
}

__global__ void key_fp8_kernel(std::uint8_t* out, stages::PoolLayout layout, const float* step,
                               const float* ape, const std::uint16_t* gain, stages::RopeTable table,
                               float eps) {
  using Key = stages::IndexKeyFp8<Block>;
  __shared__ float c[stages::kIndexDim];
  __shared__ stages::RopeTurn turn;
  __shared__ stages::PoolEntry<Block>::Scratch pool_scratch;
  __shared__ Key::Scratch scratch;
  const std::int64_t n = blockIdx.x;
  pool_entry(c, layout, step, ape, n, pool_scratch);
  stages::rope_turn<Block>(turn, table, n * layout.ratio);
  plat::block_sync();
  Key::run(Fp8Rows<std::uint8_t>{out}.row(n), c, gain, eps, turn, scratch);
}

__global__ void expand_codes_kernel(float* out, const std::uint8_t* codes, std::int64_t count) {
  const std::int64_t i = global_thread();
  if (i < count) out[i] = stages::from_e4m3(codes[i]);
}

// Which entries a row may select: its first `count`, or those of its candidate blocks.
struct Candidates {
  const std::int64_t* count;   // [T]
  const std::int32_t* blocks;  // [T, width], or null
  int width, block_size;

  template <class Use>
  LOWLAT_DEVICE void of(std::int64_t t, const Use& use) const {
    const auto num_seen = static_cast<int>(count[t]);
    if (blocks == nullptr) {
      use(stages::AllPositions{}, num_seen);
    } else {
      const stages::BlockPositions positions{blocks + t * width, width, block_size, num_seen};
      use(positions, positions.size());
    }
  }
};

// Block (x, y): kThreads candidates of row y. scores: fp32 [T, N].
template <class KeyRows>
__global__ void scores_kernel(float* scores, const float* queries, const float* weights, int heads,
                              KeyRows keys, Candidates candidates, std::int64_t pitch) {
  const std::int64_t t = blockIdx.y;
  candidates.of(t, [&](const auto& position_of, int n) {
    const int begin = kThreads * static_cast<int>(blockIdx.x);
    const int end = begin + kThreads < n ? begin + kThreads : n;
    stages::index_scores<Block>(scores + t * pitch, queries + t * heads * stages::kIndexDim,
                                weights + t * heads, heads, keys, position_of, begin, end);
  });
}

__global__ void select_kernel(std::int32_t* out, const float* scores, Candidates candidates,
                              std::int64_t pitch, int k) {
  __shared__ stages::SelectScratch scratch;
  const std::int64_t t = blockIdx.x;
  candidates.of(t, [&](const auto& position_of, int n) {
    stages::select_top<Block>(out + t * k, scores + t * pitch, n, k, position_of, scratch);
  });
}

// block_scores: fp32 [T, num_blocks].
__global__ void blocks_kernel(std::int32_t* out, const float* scores, const std::int64_t* count,
                              std::int64_t pitch, int block_size, int k, float* block_scores,
                              std::int64_t num_blocks) {
  __shared__ stages::SelectScratch scratch;
  const std::int64_t t = blockIdx.x;
  stages::candidate_blocks<Block>(out + t * k, scores + t * pitch, static_cast<int>(count[t]),
                                  block_size, k, block_scores + t * num_blocks, scratch);
}

template <class KeyRows>
void launch_select(DeviceCall& call, const float* queries, const KeyRows& keys) {
  const OpArgs& args = call.args();
  const bool has_blocks = args.has("blocks");
  const Candidates candidates{
      call.in<std::int64_t>("count"), has_blocks ? call.in<std::int32_t>("blocks") : nullptr,
      has_blocks ? call.size("M") : 0, static_cast<int>(args.scalar("block", kCandidateBlock))};
  const std::int64_t num_entries = call.dim("N");
  float* scores = call.scratch<float>(call.dim("T") * num_entries);
  launch(call, scores_kernel<KeyRows>, dim3(blocks_for(num_entries), call.size("T")), scores,
         queries, call.in<float>("weights"), call.size("h"), keys, candidates, num_entries);
  launch(call, select_kernel, dim3(call.size("T")), call.out<std::int32_t>("idx"), scores,
         candidates, num_entries, call.size("k"));
}

}  // namespace

void launch_index_query(DeviceCall& call) {
  const std::int64_t count = call.dim("T") * call.dim("h") * stages::kIndexDim;
  float* queries = expanded_rows(call, call.in<std::uint16_t>("q"), count);
  const dim3 grid(call.size("T"));
  if (call.model() == "v4") {
    launch(call, query_fp8_kernel, grid, call.out<std::uint8_t>("iq"), call.out<float>("qs"),
           queries, call.in<std::int64_t>("pos"), rope_table(true), call.size("h"));
  } else {
    launch(call, query_kernel, grid, call.out<std::uint16_t>("iq"), queries,
           call.in<std::int64_t>("pos"), rope_table(true), call.size("h"));
  }
}

void launch_index_key(DeviceCall& call) {
  if (call.model() == "v4") {
    const stages::PoolLayout layout{stages::kOverlapRatio, stages::kIndexDim};
    const float* step = project_sequence(call, layout);
    launch(call, key_fp8_kernel, dim3(call.size("N")), call.out<std::uint8_t>("rows"), layout, step,
           call.in<float>("ape"), call.in<std::uint16_t>("norm"), rope_table(true), norm_eps(call));
    return;
  }
  const int rows = call.size("T");
  const float* latents =
      expanded_rows(call, call.in<std::uint16_t>("latent"), std::int64_t{rows} * stages::kKvDim);
  float* keys = call.scratch<float>(std::int64_t{rows} * stages::kIndexDim);
  launch_linear(call, latents, rows, stages::kKvDim,
                stages::Bf16Weights{call.in<std::uint16_t>("wk"), stages::kKvDim},
                stages::kIndexDim, StoreF32{keys, stages::kIndexDim});
  launch(call, key_kernel, dim3(rows), call.out<std::uint8_t>("rows"), keys,
         call.in<std::uint16_t>("norm"), call.in<std::int64_t>("pos"), rope_table(true),
         norm_eps(call));
}

void launch_index_select(DeviceCall& call) {
  require_at_most(call, "T", kMaxGridY);
  const std::int64_t count = call.dim("T") * call.dim("h") * stages::kIndexDim;
  const std::uint8_t* keys = call.in<std::uint8_t>("ik");
  if (call.model() == "v4") {
    float* queries = call.scratch<float>(count);
    launch(call, expand_codes_kernel, dim3(blocks_for(count)), queries, call.in<std::uint8_t>("iq"),
           count);
    launch_select(call, queries, Fp8Rows<const std::uint8_t>{keys});
  } else {
    launch_select(call, expanded_rows(call, call.in<std::uint16_t>("iq"), count),
                  Fp4Rows<const std::uint8_t>{keys});
  }
}

void launch_candidate_blocks(DeviceCall& call) {
  const int block_size = static_cast<int>(call.args().scalar("block", kCandidateBlock));
  const std::int64_t num_blocks = call.dim("N") / block_size + 1;
  launch(call, blocks_kernel, dim3(call.size("T")), call.out<std::int32_t>("blocks"),
         call.in<float>("score"), call.in<std::int64_t>("count"), call.dim("N"), block_size,
         call.size("k"), call.scratch<float>(call.dim("T") * num_blocks), num_blocks);
}

}  // namespace lowlat::host::cuda

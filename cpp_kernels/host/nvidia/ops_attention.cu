// Launches of the attention core and of the compressor.
#include "host/nvidia/linear.cuh"
#include "host/nvidia/ops.cuh"
#include "host/nvidia/pool_sequence.cuh"
#include "host/op/models.hpp"
#include "stages/attention.hpp"
#include "stages/compress.hpp"

namespace lowlat::host::cuda {
namespace {

using Attention = stages::SparseAttention<Block>;
using Rows = stages::KvFlat<const std::uint8_t>;

struct RowSets {
  const std::uint8_t* rows;
  const std::int32_t* ids;  // [T, num_ids]
  int num_ids;

  LOWLAT_DEVICE stages::KeySet<Rows> of(std::int64_t t) const {
    return {ids + t * num_ids, num_ids, {rows}};
  }
};

// Block (x, y): head x of row y.
__global__ void attention_kernel(std::uint16_t* out, const std::uint16_t* q, RowSets window,
                                 RowSets extra, const float* sink) {
  __shared__ float memory[Attention::memory_floats(1)];
  const std::int64_t t = blockIdx.y, at = (t * gridDim.x + blockIdx.x) * stages::kKvDim;
  Attention::run(out + at, q + at, 1, window.of(t), extra.of(t), sink + blockIdx.x, memory);
}

// A block an entry. score is null at ratio 1.
__global__ void compress_kernel(float* out, const float* value, const float* score,
                                const std::uint16_t* gain, stages::RopeTable table, int ratio,
                                float eps) {
  using Compressed = stages::CompressedKey<Block>;
  constexpr int kDim = stages::kKvDim;
  __shared__ float c[kDim];
  __shared__ std::uint16_t latent[kDim];
  __shared__ stages::RopeTurn turn;
  __shared__ Compressed::Scratch scratch;
  const std::int64_t n = blockIdx.x;
  for (int i = plat::thread_idx(); i < kDim; i += kThreads) {
    const std::int64_t even = n * ratio * kDim + i, odd = even + kDim;
    c[i] = score == nullptr ? value[even]
                            : stages::pool_pair(value[even], score[even], value[odd], score[odd]);
  }
  stages::rope_turn<Block>(turn, table, n * ratio);
  plat::block_sync();
  Compressed::latent(latent, c, gain, eps, scratch);
  Compressed::entry(out + n * kDim, latent, turn);
}

// A block an entry.
__global__ void pooled_kernel(float* out, stages::PoolLayout layout, const float* step,
                              const float* ape, const std::uint16_t* gain, stages::RopeTable table,
                              float eps) {
  using Key = stages::PooledKey<Block>;
  __shared__ float c[stages::kKvDim];
  __shared__ stages::RopeTurn turn;
  __shared__ stages::PoolEntry<Block>::Scratch pool_scratch;
  __shared__ Key::Scratch scratch;
  const std::int64_t n = blockIdx.x;
  pool_entry(c, layout, step, ape, n, pool_scratch);
  stages::rope_turn<Block>(turn, table, n * layout.ratio);
  plat::block_sync();
  Key::entry(c, gain, eps, turn, scratch);
  for (int i = plat::thread_idx(); i < stages::kKvDim; i += kThreads) {
    out[n * stages::kKvDim + i] = c[i];
  }
}

}  // namespace

void launch_sparse_attention(DeviceCall& call) {
  require_at_most(call, "T", kMaxGridY);
  const RowSets window{call.in<std::uint8_t>("swa"), call.in<std::int32_t>("swa_idx"),
                       call.size("s")};
  const RowSets extra{call.in<std::uint8_t>("extra"), call.in<std::int32_t>("extra_idx"),
                      call.size("n")};
  launch(call, attention_kernel, dim3(call.size("h"), call.size("T")), call.out<std::uint16_t>("o"),
         call.in<std::uint16_t>("q"), window, extra, call.in<float>("sink"));
}

void launch_compress(DeviceCall& call) {
  const auto eps = static_cast<float>(model_rules(call.model()).norm_eps);
  const int ratio = static_cast<int>(call.args().scalar("ratio", 0)), hidden = call.size("H");
  const dim3 grid(call.size("N"));
  if (call.model() == "v4") {
    const stages::PoolLayout layout{ratio, stages::kKvDim};
    const float* step = project_sequence(call, layout);
    launch(call, pooled_kernel, grid, call.out<float>("kv"), layout, step, call.in<float>("ape"),
           call.in<std::uint16_t>("norm"), rope_table(true), eps);
    return;
  }
  const std::int64_t num_rows = call.dim("N") * ratio;
  const float* x = expanded_rows(call, call.in<std::uint16_t>("x"), num_rows * hidden);
  const auto project = [&](const char* name) {
    float* y = call.scratch<float>(num_rows * stages::kKvDim);
    launch_linear(call, x, static_cast<int>(num_rows), hidden,
                  stages::Bf16Weights{call.in<std::uint16_t>(name), hidden}, stages::kKvDim,
                  StoreF32{y, stages::kKvDim});
    return y;
  };
  const float* value = project("wkv");
  const float* score = ratio == 2 ? project("wgate") : nullptr;
  launch(call, compress_kernel, grid, call.out<float>("kv"), value, score,
         call.in<std::uint16_t>("norm"), rope_table(true), ratio, eps);
}

}  // namespace lowlat::host::cuda

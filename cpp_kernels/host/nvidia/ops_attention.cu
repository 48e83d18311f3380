// Launches of the attention core and of the compressor.
#include <algorithm>

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
constexpr int kHeadsOfBlock = 8;  // their queries, sums and the keys of a tile are in shared memory

struct RowSets {
  const std::uint8_t* rows;
  const std::int32_t* ids;  // [T, num_ids]
  int num_ids;

  LOWLAT_DEVICE stages::KeySet<Rows> of(std::int64_t t) const {
    return {ids + t * num_ids, num_ids, {rows}};
  }
};

// Block (x, y): heads from 8 x on of row y.
__global__ void attention_kernel(std::uint16_t* out, const std::uint16_t* q, RowSets window,
                                 RowSets extra, const float* sink, int heads) {
  extern __shared__ float shared[];
  const std::int64_t t = blockIdx.y;
  const int first = kHeadsOfBlock * static_cast<int>(blockIdx.x);
  const int num_heads = heads - first < kHeadsOfBlock ? heads - first : kHeadsOfBlock;
  const std::int64_t at = (t * heads + first) * stages::kKvDim;
  Attention::run(out + at, q + at, num_heads, window.of(t), extra.of(t), sink + first, shared);
}

// A block an entry. score is null at ratio 1.
__global__ void compress_kernel(float* out, const float* value, const float* score,
                                const std::uint16_t* gain, RopeFrequencies table, int ratio,
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
  make_turn(turn, table, n * ratio);
  Compressed::latent(latent, c, gain, eps, scratch);
  Compressed::entry(out + n * kDim, latent, turn);
}

// A block an entry.
__global__ void pooled_kernel(float* out, stages::PoolLayout layout, const float* step,
                              const float* ape, const std::uint16_t* gain, RopeFrequencies table,
                              float eps) {
  using Key = stages::PooledKey<Block>;
  __shared__ float c[stages::kKvDim];
  __shared__ stages::RopeTurn turn;
  __shared__ stages::PoolEntry<Block>::Scratch pool_scratch;
  __shared__ Key::Scratch scratch;
  const std::int64_t n = blockIdx.x;
  pool_entry(c, layout, step, ape, n, pool_scratch);
  make_turn(turn, table, n * layout.ratio);
  Key::entry(c, gain, eps, turn, scratch);
  for (int i = plat::thread_idx(); i < stages::kKvDim; i += kThreads) {
    out[n * stages::kKvDim + i] = c[i];
  }
}

}  // namespace

void launch_sparse_attention(DeviceCall& call) {
  const int heads = call.size("h");
  const RowSets window{call.in<std::uint8_t>("swa"), call.in<std::int32_t>("swa_idx"),
                       call.size("s")};
  const RowSets extra{call.in<std::uint8_t>("extra"), call.in<std::int32_t>("extra_idx"),
                      call.size("n")};
  const dim3 grid((heads + kHeadsOfBlock - 1) / kHeadsOfBlock, call.size("T"));
  launch(call, attention_kernel, grid, Attention::memory_floats(kHeadsOfBlock) * sizeof(float),
         call.out<std::uint16_t>("o"), call.in<std::uint16_t>("q"), window, extra,
         call.in<float>("sink"), heads);
}

void launch_compress(DeviceCall& call) {
  const auto eps = static_cast<float>(model_rules(call.model()).norm_eps);
  const int ratio = static_cast<int>(call.args().scalar("ratio", 0)), hidden = call.size("H");
  const dim3 grid(call.size("N"));
  if (call.model() == "v4") {
    const stages::PoolLayout layout{ratio, stages::kKvDim};
    const float* step = project_sequence(call, layout);
    launch(call, pooled_kernel, grid, 0, call.out<float>("kv"), layout, step, call.in<float>("ape"),
           call.in<std::uint16_t>("norm"), rope_frequencies(true), eps);
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
  launch(call, compress_kernel, grid, 0, call.out<float>("kv"), value, score,
         call.in<std::uint16_t>("norm"), rope_frequencies(true), ratio, eps);
}

}  // namespace lowlat::host::cuda

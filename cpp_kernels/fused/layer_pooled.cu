// fused/layer_pooled.cu: launches of V4's layers, see layer_pooled.hpp.
#include "fused/layer_pooled.hpp"

#include <cuda_runtime.h>

namespace lowlat::nvidia::fused {
namespace {

enum BesideGate {
  gate_product = kLayerFreeGate,
  gate_pool,
  gate_query,
  gate_scores,
  gate_select,
  gate_entries,  // V4 has no n-gram memory
  gate_entry_pool = kLayerMemory
};
static_assert(gate_entries == kLayerExchanged);

}  // namespace

cudaError_t launch_pooled_layer(const PooledLayer& layer, const LayerStep& step, int layer_idx,
                                const LayerParts& parts, cudaStream_t stream) {
  if (layer.ratio == 0) return launch_plain_layer(layer.plain, step, layer_idx, parts, stream);
  const bool selects = layer.ratio == shape::kOverlapRatio;
  if (!selects && layer.ratio != shape::kBlockRatio) return cudaErrorInvalidValue;
  const auto gate = [&](int number, std::uint32_t blocks) {
    return layer_gate(step.memory, layer_idx, number, blocks);
  };
  const StepRows rows = {step.num_rows, layer.tokens, step.positions, layer.slots};
  const Hop hop = {step.memory.port, 2 * layer_idx, kernel_place(layer_idx)};
  BesideLayer beside = {};
  beside.hidden = shape::Dsv4Flash<1>::kHidden;
  CompressParams& compress = beside.compress;
  compress = layer.compress;
  compress.rows = rows;
  compress.ratio = layer.ratio;
  compress.x = step.memory.x;
  compress.hop = hop;
  compress.x_done = layer_x_gate(step, layer_idx);
  CompressParams entry_compress = compress;
  const bool splits =
      selects && beside_splits(beside_order(parts.beside_order, step.num_rows, layer.ratio, true));
  if (splits) {
    entry_compress.some_rows = 4 * shape::kHeadDim;
    // All of its blocks begin at once, so that what follows is launched before it has ended.
    if (step.num_rows <= kHopRows) entry_compress.turns = 2;
    entry_compress.product_done = gate(gate_entries, compress_product_blocks(entry_compress));
    compress.first_row = entry_compress.some_rows;
    compress.some_rows = compress_width(compress) - compress.first_row;
  }
  compress.product_done = gate(gate_product, compress_product_blocks(compress));
  PoolParams pool = layer.pool;
  pool.rows = rows;
  pool.ratio = layer.ratio;
  pool.partial = compress.partial;
  pool.width = compress_width(compress);
  pool.product_done = compress.product_done;
  pool.part = splits ? PoolPart::keys : PoolPart::both;
  const std::uint32_t pool_blocks = compress_pool_blocks(step.num_rows, layer.ratio, pool.part);
  pool.done = gate(gate_pool, pool_blocks);
  beside.pool = &pool;
  PoolParams entry_pool = pool;
  PlainLayer plain = layer.plain;
  plain.beside = &beside;
  IndexParams index = layer.index;
  if (selects) {
    index.format = IndexFormat::fp8;
    index.rows = rows;
    index.ratio = layer.ratio;
    index.head_sums = compress.partial + pool.width - shape::Dsv4Flash<1>::kIndexHeads;
    index.head_stride = pool.width;
    index.new_keys = true;
    index.packets = step.memory.packets;
    index.hop = hop;
    index.x_index = 2 * layer_idx - 1;
    set_index_latent(step.memory, FusedModel::v4, step.num_rows, layer_idx, &index);
    index.heads_done = compress.product_done;
    index.keys_done = pool.done;
    index.query_done = gate(gate_query, kIndexQueryBlocks);
    index.scores_done = gate(gate_scores, kIndexScoreBlocks);
    // Of many rows one gate is of all that attention waits for.
    const bool tags = step.num_rows <= kHopRows;
    index.done =
        gate(gate_select, index_select_blocks(index) + (splits && !tags ? pool_blocks : 0u));
    beside.index = &index;
    if (splits) {
      entry_pool.part = PoolPart::entries;
      entry_pool.product_done = entry_compress.product_done;
      entry_pool.done = tags ? gate(gate_entry_pool, pool_blocks) : index.done;
      beside.entry_compress = &entry_compress;
      beside.entry_pool = &entry_pool;
    }
    plain.extra_idx = layer.index.entry_slots;
  }
  return launch_plain_layer(plain, step, layer_idx, parts, stream);
}

}  // namespace lowlat::nvidia::fused

// Launches of the operations on positions and on stored key-value rows.
#include "host/nvidia/ops.cuh"
#include "stages/kv.hpp"
#include "stages/rope.hpp"

namespace lowlat::host::cuda {
namespace {

// A block a head of a row.
__global__ void rope_kernel(std::uint16_t* out, const std::uint16_t* x, const std::int64_t* pos,
                            stages::RopeTable table, int heads, int dim, bool inverse) {
  __shared__ stages::RopeTurn turn;
  const std::int64_t first = std::int64_t{blockIdx.x} * dim;
  stages::rope_turn<Block>(turn, table, pos[blockIdx.x / heads]);
  for (int i = plat::thread_idx(); i < dim; i += kThreads) out[first + i] = x[first + i];
  plat::block_sync();
  if (inverse && plat::thread_idx() == 0) turn = stages::rope_inverse(turn);
  plat::block_sync();
  stages::Rope<Block>::rotate(out + first + dim - stages::kRopeDim, turn);
}

__global__ void pack_kernel(std::uint8_t* out, const float* kv) {
  const std::int64_t t = blockIdx.x;
  const stages::KvRow<std::uint8_t> row = stages::KvFlat<std::uint8_t>{out}.row(t);
  stages::KvPack<Block>::run(row, kv + t * stages::kKvDim);
  // The stage leaves the padding alone.
  if (plat::thread_idx() == 0) row.scales[stages::kKvNumGroups] = 0;
}

__global__ void unpack_kernel(float* out, const std::uint8_t* rows) {
  const std::int64_t t = blockIdx.x;
  stages::KvUnpack<Block>::run(out + t * stages::kKvDim,
                               stages::KvFlat<const std::uint8_t>{rows}.row(t));
}

}  // namespace

void launch_rope(DeviceCall& call) {
  launch(call, rope_kernel, dim3(static_cast<unsigned>(call.dim("T") * call.dim("h"))),
         call.out<std::uint16_t>("x"), call.in<std::uint16_t>("x"), call.in<std::int64_t>("pos"),
         rope_table(call.args().scalar("yarn", 0) == 1), call.size("h"), call.size("D"),
         call.args().scalar("inverse", 0) == 1);
}

void launch_kv_pack(DeviceCall& call) {
  launch(call, pack_kernel, dim3(call.size("T")), call.out<std::uint8_t>("rows"),
         call.in<float>("kv"));
}

void launch_kv_unpack(DeviceCall& call) {
  launch(call, unpack_kernel, dim3(call.size("T")), call.out<float>("kv"),
         call.in<std::uint8_t>("rows"));
}

}  // namespace lowlat::host::cuda

// One operation on a device: copies in, launches, copies out.
#include "host/nvidia/run.hpp"

#include <iterator>

#include "host/nvidia/ops.cuh"

namespace lowlat::host::cuda {
namespace {

struct Entry {
  std::string_view op;
  Launch launch;
};
constexpr Entry kLaunches[] = {
    {"hc_stats", launch_hc_stats},
    {"hc_combine_norm", launch_hc_combine_norm},
    {"hc_post", launch_hc_post},
    {"hc_head", launch_hc_head},
    {"rms_norm", launch_rms_norm},
    {"head_norm", launch_head_norm},
    {"rank_sum", launch_rank_sum},
    {"block_linear", launch_block_linear},
    {"lm_head", launch_lm_head},
    {"rope", launch_rope},
    {"kv_pack", launch_kv_pack},
    {"kv_unpack", launch_kv_unpack},
    {"sparse_attention", launch_sparse_attention},
    {"compress", launch_compress},
    {"index_query", launch_index_query},
    {"index_key", launch_index_key},
    {"index_select", launch_index_select},
    {"candidate_blocks", launch_candidate_blocks},
    {"gate", launch_gate},
    {"hash_gate", launch_hash_gate},
    {"experts", launch_experts},
    {"engram_hash", launch_engram_hash},
    {"engram_lookup", launch_engram_lookup},
    {"engram_apply", launch_engram_apply},
    {"markov_draft", launch_markov_draft},
    {"accept", launch_accept},
};

// In the call's stream, which waits for no other: cudaMemcpy's stream would not be ordered with it,
// and may still be writing when it returns. From ordinary host memory both directions are done with
// the host's side on return.
void copy(void* dst, const void* src, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (bytes > 0) check(cudaMemcpyAsync(dst, src, bytes, kind, stream), "cudaMemcpyAsync");
}

}  // namespace

Launch find_launch(std::string_view op) {
  for (const Entry& entry : kLaunches) {
    if (entry.op == op) return entry.launch;
  }
  return nullptr;
}

DeviceCall::DeviceCall(const OpSpec& op, const OpArgs& args, cudaStream_t stream)
    : args_(args), stream_(stream) {
  for (const ArgSpec& spec : op.in) {
    if (args_.has(spec.name)) inputs_.try_emplace(spec.name, num_bytes(args_.input(spec.name)));
  }
  for (const ArgSpec& spec : op.out) {
    outputs_.try_emplace(spec.name, num_bytes(args_.output(spec.name)));
  }
  upload_from(args_);
}

void DeviceCall::upload_from(const OpArgs& args) {
  for (const auto& [name, memory] : inputs_) {
    copy(memory.data(), args.input(name).data, memory.bytes(), cudaMemcpyHostToDevice, stream_);
  }
  for (const auto& [name, memory] : outputs_) {
    copy(memory.data(), args.output(name).data, memory.bytes(), cudaMemcpyHostToDevice, stream_);
  }
}

void DeviceCall::download_to(const OpArgs& args) const {
  for (const auto& [name, memory] : outputs_) {
    copy(args.output(name).data, memory.data(), memory.bytes(), cudaMemcpyDeviceToHost, stream_);
  }
}

}  // namespace lowlat::host::cuda

namespace lowlat::host {

void run_on_nvidia(const OpSpec& op, const OpArgs& args) {
  cuda::open_first_device();
  const cuda::Launch launch = cuda::find_launch(op.name);
  if (launch == nullptr) {
    throw Error(LOWLAT_UNSUPPORTED, std::string(op.name) + " has no kernels for platform nvidia");
  }
  const cuda::Stream stream;
  cuda::DeviceCall call(op, args, stream.get());
  launch(call);
  stream.wait();
  call.download();
}

}  // namespace lowlat::host

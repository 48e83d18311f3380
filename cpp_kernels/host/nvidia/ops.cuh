// host/nvidia/ops.cuh: the launches, one an operation; find_launch knows them by name.
#pragma once

#include "host/nvidia/common.cuh"

namespace lowlat::host::cuda {

// ops_mix.cu
void launch_hc_stats(DeviceCall& call);
void launch_hc_combine_norm(DeviceCall& call);
void launch_hc_post(DeviceCall& call);
void launch_hc_head(DeviceCall& call);
void launch_rms_norm(DeviceCall& call);
void launch_head_norm(DeviceCall& call);
void launch_rank_sum(DeviceCall& call);
// ops_linear.cu
void launch_block_linear(DeviceCall& call);
void launch_lm_head(DeviceCall& call);
// ops_rope_kv.cu
void launch_rope(DeviceCall& call);
void launch_kv_pack(DeviceCall& call);
void launch_kv_unpack(DeviceCall& call);
// ops_attention.cu
void launch_sparse_attention(DeviceCall& call);
void launch_compress(DeviceCall& call);
// ops_index.cu
void launch_index_query(DeviceCall& call);
void launch_index_key(DeviceCall& call);
void launch_index_select(DeviceCall& call);
void launch_candidate_blocks(DeviceCall& call);
// ops_moe.cu
void launch_gate(DeviceCall& call);
void launch_hash_gate(DeviceCall& call);
void launch_experts(DeviceCall& call);
// ops_engram.cu
void launch_engram_hash(DeviceCall& call);
void launch_engram_lookup(DeviceCall& call);
void launch_engram_apply(DeviceCall& call);
// ops_draft.cu
void launch_markov_draft(DeviceCall& call);
void launch_accept(DeviceCall& call);

}  // namespace lowlat::host::cuda

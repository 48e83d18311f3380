// fused/instances.hpp: which fused kernels are built, for which shapes. Every C++ compiler reads
// it; lowlat_devices() and `lowlat doctor` show it.
#pragma once

#include <iterator>

namespace lowlat::nvidia::fused {

// A line of the catalogue: one kernel, or one that shapes have several instances of.
struct FusedInstance {
  const char* kernel;
  const char* shapes;  // models and ranks
  const char* rows;    // token rows of a launch, or requests
};

inline constexpr FusedInstance kFusedInstances[] = {
    {"front_qkv_fp8_sm90", "v4 v41 tp2 tp4", "1..48"},
    {"front_q_fp8_sm90", "v4 v41 tp2 tp4", "1..48"},
    {"front_q_pair_fp8_sm90", "v41 tp2", "1..8"},
    {"sparse_attention_bf16_sm90", "v4 v41 tp1 tp2 tp4", "1..48"},
    {"sparse_attention_wide_bf16_sm90", "v4 v41 tp1 tp2 tp4", "9..48"},
    {"oproj_few_fp8_sm90", "v41 tp4", "1..8"},
    {"oproj_a_fp8_sm90", "v4 v41 tp2 tp4", "1..48"},
    {"oproj_b_fp8_sm90", "v4 v41 tp2 tp4", "1..48"},
    {"hc_exchange_norm_sm90", "v41 tp1 tp2 tp4", "1..48"},
    {"hc_exchange_mix_sm90", "v4 tp1 tp2 tp4", "1..8"},
    {"hc_exchange_mix_wide_sm90", "v4 tp1 tp2 tp4", "8..48"},
    {"hc_mix_sm90", "v41", "1..48"},
    {"moe_region_mxfp4_sm90", "v4 v41 tp2 tp4", "1..8"},
    {"moe_wide_mxfp4_sm90", "v4 v41 v41-draft tp2 tp4", "1..64"},
    {"compress_product_bf16_sm90", "v4 v41", "1..48"},
    {"compress_product_wide_bf16_sm90", "v4 v41", "9..48"},
    {"compress_key_fp4_sm90", "v41", "1..48"},
    {"compress_pool_sm90", "v4", "1..48"},
    {"index_query_fp4_sm90", "v41", "1..48"},
    {"index_query_fp8_sm90", "v4", "1..48"},
    {"index_scores_sm90", "v4 v41", "1..48"},
    {"index_select_sm90", "v4 v41", "1..48"},
    {"index_blocks_sm90", "v41", "1..48"},
    {"engram_lookup_sm90", "v41", "1..48"},
    {"engram_product_fp8_sm90", "v41", "1..48"},
    {"engram_apply_sm90", "v41", "1..48"},
    {"inject_product_fp8_sm90", "v4 v41", "1..48"},
    {"inject_keys_fp8_sm90", "v4 v41", "1..48"},
    {"draft_proposals_bf16_sm90", "v4 v41 tp1 tp2 tp4", "1..8 requests"},
};
inline constexpr int kNumFusedInstances = static_cast<int>(std::size(kFusedInstances));

}  // namespace lowlat::nvidia::fused

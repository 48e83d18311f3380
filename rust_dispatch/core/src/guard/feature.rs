//! Features of a server that kernels must accept by name, or they are refused.

use serde::{Deserialize, Serialize};

/// A server feature that changes what a step means or where its data lives.
///
/// ```
/// use lowlat_core::guard::Feature;
/// assert_eq!(Feature::Lora.name(), "lora");
/// assert_eq!(Feature::from_name("lora"), Some(Feature::Lora));
/// assert_eq!(Feature::from_name("teleport"), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Feature {
    /// Layers split over stages of ranks.
    PipelineParallel,
    /// A tensor-parallel group over more than one host.
    MultiNodeTp,
    /// Attention replicated over data-parallel ranks.
    DpAttention,
    /// Experts split over ranks.
    ExpertParallel,
    /// Expert placement that moves while serving.
    Eplb,
    /// A context split over ranks.
    ContextParallel,
    /// Drafts and their verification.
    SpeculativeDecoding,
    /// Verify steps whose requests have different numbers of rows.
    RaggedVerify,
    /// Two half batches that overlap.
    TwoBatchOverlap,
    /// Low-rank adapters.
    Lora,
    /// Prefill and decode on different servers.
    PdDisaggregation,
    /// Returning which experts a token took.
    ReturnRoutedExperts,
    /// Returning which positions the indexer chose.
    ReturnIndexerTopk,
    /// KV cache in host memory or on disk.
    KvOffload,
    /// Host-side sparse KV.
    Hisparse,
    /// Giving memory back while idle.
    MemoryRelease,
    /// Weights in host memory.
    CpuOffload,
    /// A compiled forward.
    TorchCompile,
    /// Bitwise repeatable inference.
    DeterministicInference,
    /// A slice of a device.
    PartitionedGpu,
}

/// Every feature, its name, and how to switch it off.
const FEATURES: [(Feature, &str, &str); 20] = [
    (
        Feature::PipelineParallel,
        "pipeline_parallel",
        "--pp-size 1",
    ),
    (Feature::MultiNodeTp, "multi_node_tp", "--nnodes 1"),
    (
        Feature::DpAttention,
        "dp_attention",
        "leave out --enable-dp-attention",
    ),
    (Feature::ExpertParallel, "expert_parallel", "--ep-size 1"),
    (Feature::Eplb, "eplb", "leave out --enable-eplb"),
    (
        Feature::ContextParallel,
        "context_parallel",
        "--attn-cp-size 1",
    ),
    (
        Feature::SpeculativeDecoding,
        "speculative_decoding",
        "leave out --speculative-algorithm",
    ),
    (
        Feature::RaggedVerify,
        "ragged_verify",
        "SGLANG_RAGGED_VERIFY_MODE=static",
    ),
    (
        Feature::TwoBatchOverlap,
        "two_batch_overlap",
        "leave out --enable-two-batch-overlap",
    ),
    (
        Feature::Lora,
        "lora",
        "leave out --enable-lora and --lora-paths",
    ),
    (
        Feature::PdDisaggregation,
        "pd_disaggregation",
        "--disaggregation-mode null",
    ),
    (
        Feature::ReturnRoutedExperts,
        "return_routed_experts",
        "leave out --enable-return-routed-experts",
    ),
    (
        Feature::ReturnIndexerTopk,
        "return_indexer_topk",
        "leave out --enable-return-indexer-topk",
    ),
    (
        Feature::KvOffload,
        "kv_offload",
        "leave out --enable-hierarchical-cache",
    ),
    (Feature::Hisparse, "hisparse", "leave out --enable-hisparse"),
    (
        Feature::MemoryRelease,
        "memory_release",
        "leave out --enable-memory-saver",
    ),
    (Feature::CpuOffload, "cpu_offload", "--cpu-offload-gb 0"),
    (
        Feature::TorchCompile,
        "torch_compile",
        "leave out --enable-torch-compile",
    ),
    (
        Feature::DeterministicInference,
        "deterministic_inference",
        "leave out --enable-deterministic-inference",
    ),
    (
        Feature::PartitionedGpu,
        "partitioned_gpu",
        "serve on a whole device, not on a slice of one",
    ),
];

impl Feature {
    /// Every feature.
    pub fn all() -> impl Iterator<Item = Self> {
        FEATURES.iter().map(|&(feature, _, _)| feature)
    }

    /// The name, lower case with underscores.
    pub fn name(self) -> &'static str {
        FEATURES[self as usize].1
    }

    /// The setting that switches it off.
    pub fn off(self) -> &'static str {
        FEATURES[self as usize].2
    }

    /// The feature of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::all().find(|feature| feature.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum_and_names_are_those_of_json() {
        for (idx, (feature, name, _)) in FEATURES.into_iter().enumerate() {
            assert_eq!(feature as usize, idx);
            assert_eq!(
                serde_json::to_string(&feature).unwrap(),
                format!("{name:?}")
            );
        }
    }
}

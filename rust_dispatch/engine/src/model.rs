//! What a model is to the kernels: its configuration as the C ABI wants it, the graph keys that
//! it can cover, and digests of both for the vote.

use lowlat_core::config::{ModelConfig, ModelFamily};
use lowlat_core::digest::Fnv1a;
use lowlat_core::plan;
use lowlat_core::{GraphKey, GraphMode};

use crate::kernels::{TensorInfo, abi};

/// What is built beside the model itself; the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Ranks.
    pub tp_size: u32,
    /// Rows of the steps that are built, ascending.
    pub widths: Vec<u32>,
    /// Requests of a step.
    pub max_batch: u32,
    /// Rows of a plain step.
    pub max_rows: u32,
    /// Tokens a page.
    pub page_size: u32,
    /// Pages of every pool.
    pub num_pages: u32,
    /// Every wait for a peer ends within it.
    pub wait_budget_ns: u64,
}

/// The configuration of one rank's kernels.
#[must_use]
pub fn abi_config(config: &ModelConfig, geometry: &Geometry, tp_rank: u32) -> abi::ModelConfig {
    let id = |id: Option<u32>| id.map_or(-1, |id| id as i32);
    let no_layer = abi::Layer {
        ratio: 0,
        kv_source: -1,
        index_source: -1,
        candidate_source: -1,
        engram: -1,
        hash_gate: 0,
    };
    let mut layers = [no_layer; abi::MAX_LAYERS];
    for (to, from) in layers.iter_mut().zip(&config.layers) {
        *to = abi::Layer {
            ratio: from.ratio as i32,
            kv_source: id(from.kv_source),
            index_source: id(from.index_source),
            candidate_source: id(from.candidate_source),
            engram: id(from.engram),
            hash_gate: from.hash_gate.into(),
        };
    }
    let mut engram_primes = [[[0; abi::ENGRAM_HEADS]; abi::ENGRAM_NGRAMS]; abi::MAX_ENGRAMS];
    let mut engram_multipliers = [[0; abi::ENGRAM_SHIFTS]; abi::MAX_ENGRAMS];
    for (table_idx, table) in config.engram.iter().flat_map(|e| &e.tables).enumerate() {
        engram_primes[table_idx] = table.primes.map(|heads| heads.map(|prime| prime as i64));
        engram_multipliers[table_idx] = table.multipliers.map(|factor| factor as i64);
    }
    let mut draft_target_layers = [-1; abi::MAX_DRAFT_STAGES];
    for (to, from) in draft_target_layers
        .iter_mut()
        .zip(config.draft.iter().flat_map(|d| &d.target_layers))
    {
        *to = *from as i32;
    }
    let mut widths = [0; abi::MAX_WIDTHS];
    for (to, from) in widths.iter_mut().zip(&geometry.widths) {
        *to = *from as i32;
    }
    let engram = config.engram.as_ref();
    let draft = config.draft.as_ref();
    abi::ModelConfig {
        struct_bytes: size_of::<abi::ModelConfig>() as u32,
        kind: match config.family {
            ModelFamily::V4 => abi::KIND_V4,
            ModelFamily::V41 => abi::KIND_V41,
        },
        hidden: config.hidden as i32,
        num_layers: config.layers.len() as i32,
        vocab: config.vocab as i32,
        num_heads: config.num_heads as i32,
        head_dim: config.head_dim as i32,
        rope_dim: config.rope_dim as i32,
        q_lora: config.q_lora as i32,
        o_groups: config.o_groups as i32,
        o_lora: config.o_lora as i32,
        window: config.window as i32,
        num_experts: config.num_experts as i32,
        experts_per_token: config.experts_per_token as i32,
        moe_intermediate: config.moe_intermediate as i32,
        index_heads: config.index_heads as i32,
        index_dim: config.index_dim as i32,
        index_topk: config.index_topk as i32,
        candidate_layer: id(config.candidates.map(|candidates| candidates.layer)),
        candidate_blocks: config.candidates.map_or(0, |c| c.num_blocks as i32),
        candidate_block_size: config.candidates.map_or(0, |c| c.block_size as i32),
        scale_block: config.scale_block as i32,
        sinkhorn_iters: config.sinkhorn_iters as i32,
        norm_eps: config.norm_eps,
        hc_eps: config.hc_eps,
        swiglu_limit: config.swiglu_limit,
        routed_scaling: config.routed_scaling,
        rope_theta: config.rope_theta,
        compress_rope_theta: config.compress_rope_theta,
        yarn_factor: config.yarn.factor,
        yarn_beta_fast: config.yarn.beta_fast,
        yarn_beta_slow: config.yarn.beta_slow,
        yarn_original_positions: config.yarn.original_positions,
        max_positions: config.max_positions as i64,
        layers,
        num_engrams: engram.map_or(0, |engram| engram.tables.len() as i32),
        engram_head_dim: engram.map_or(0, |engram| engram.head_dim as i32),
        engram_pad_token: engram.map_or(0, |engram| engram.pad_token as i32),
        image_token: id(config.image_token),
        engram_primes,
        engram_multipliers,
        num_draft_stages: draft.map_or(0, |draft| draft.num_stages as i32),
        draft_block: draft.map_or(0, |draft| draft.block as i32),
        draft_mask_token: draft.map_or(0, |draft| draft.mask_token as i32),
        markov_rank: draft.map_or(0, |draft| draft.markov_rank as i32),
        draft_experts: draft.map_or(0, |draft| draft.num_experts as i32),
        draft_experts_per_token: draft.map_or(0, |draft| draft.experts_per_token as i32),
        draft_target_layers,
        tp_rank: tp_rank as i32,
        tp_size: geometry.tp_size as i32,
        num_widths: geometry.widths.len() as i32,
        max_batch: geometry.max_batch as i32,
        max_rows: geometry.max_rows as i32,
        widths,
        page_size: geometry.page_size as i32,
        num_pages: geometry.num_pages as i32,
        state_ring: plan::state_ring(config) as i32,
        wait_budget_ns: geometry.wait_budget_ns,
    }
}

/// Digest of what steps are laid out by: max_batch, max_rows, page_size, num_pages. Widths and
/// deadlines go into the ballot by value.
#[must_use]
pub fn geometry_digest(geometry: &Geometry) -> u64 {
    Fnv1a::new()
        .u32(geometry.max_batch)
        .u32(geometry.max_rows)
        .u32(geometry.page_size)
        .u32(geometry.num_pages)
        .finish()
}

/// Digest of how tensors are handed over: of each its name, dtype, layout and split dimension
/// (plus 1; 0 for none). Shapes differ between ranks where columns of different length are split.
#[must_use]
pub fn layout_digest(tensors: &[TensorInfo]) -> u64 {
    let digest = Fnv1a::new().u64(tensors.len() as u64);
    let fed = tensors.iter().fold(digest, |digest, tensor| {
        let split = tensor.shard_dim.map_or(0, |dim| dim as u32 + 1);
        digest
            .text(&tensor.name)
            .u32(tensor.dtype as u32)
            .u32(tensor.layout)
            .u32(split)
    });
    fed.finish()
}

/// What graph keys have in common.
#[derive(Clone, Debug)]
pub struct KeyTraits {
    /// The model's name.
    pub shape: String,
    /// The platform's.
    pub isa: String,
    /// Digest of the catalogue's words, which declare the numerics.
    pub numerics_digest: u64,
    /// [`layout_digest`].
    pub layout_digest: u64,
}

/// The keys that `widths` cover: with drafts a verify key and a draft key for every width that is
/// whole requests, without them a decode key for every width.
#[must_use]
pub fn graph_keys(traits: &KeyTraits, widths: &[u32], num_drafts: u32) -> Vec<GraphKey> {
    let key = |mode, batch_size, tokens_per_request, width| GraphKey {
        mode,
        batch_size,
        tokens_per_request,
        width,
        shape: traits.shape.clone(),
        isa: traits.isa.clone(),
        numerics_digest: traits.numerics_digest,
        layout_digest: traits.layout_digest,
    };
    if num_drafts == 0 {
        return widths
            .iter()
            .map(|&width| key(GraphMode::Decode, width, 1, width))
            .collect();
    }
    let rows = num_drafts + 1;
    let whole = widths.iter().filter(|width| **width % rows == 0);
    whole
        .flat_map(|&width| {
            let batch_size = width / rows;
            // The draft has a row less a request and runs at the width of its verify step.
            [
                key(GraphMode::TargetVerify, batch_size, rows, width),
                key(GraphMode::Draft, batch_size, num_drafts, width),
            ]
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowlat_core::config::built_in;

    fn flash(name: &str) -> abi::ModelConfig {
        let config = ModelConfig::from_json(built_in(name).unwrap()).unwrap();
        let geometry = Geometry {
            tp_size: 4,
            widths: vec![6, 12],
            max_batch: 2,
            max_rows: 128,
            page_size: 256,
            num_pages: 40,
            wait_budget_ns: 5,
        };
        abi_config(&config, &geometry, 3)
    }

    #[test]
    fn every_size_reaches_the_kernels() {
        let abi = flash("v41-flash");
        assert_eq!((abi.kind, abi.scale_block), (abi::KIND_V41, 32));
        assert_eq!((abi.tp_rank, abi.tp_size, abi.num_layers), (3, 4, 40));
        assert_eq!((abi.num_widths, &abi.widths[..3]), (2, &[6, 12, 0][..]));
        assert_eq!(abi.state_ring, 8);
        assert_eq!((abi.candidate_layer, abi.candidate_blocks), (20, 2048));
        assert_eq!(abi.draft_target_layers, [37, 38, 39, -1]);
        assert_eq!(abi.engram_primes[1][2][7], 16_000_889);
        assert_eq!(abi.engram_multipliers[0][1], 4_839_876_093_313);
        let layer = abi.layers[24];
        assert_eq!(
            (layer.ratio, layer.kv_source, layer.candidate_source),
            (1, 20, 20)
        );
        assert_eq!(abi.layers[0].index_source, -1);
        assert_eq!((abi.layers[0].hash_gate, abi.image_token), (0, 129_264));
    }

    #[test]
    fn v4_reaches_the_kernels_with_rules_of_its_own() {
        let abi = flash("v4-flash");
        assert_eq!((abi.kind, abi.scale_block), (abi::KIND_V4, 128));
        assert_eq!((abi.num_layers, abi.hidden, abi.state_ring), (43, 4096, 16));
        assert_eq!((abi.draft_experts, abi.draft_experts_per_token), (256, 6));
        assert_eq!(abi.draft_target_layers, [40, 41, 42, -1]);
        assert_eq!(
            (abi.num_engrams, abi.candidate_layer, abi.image_token),
            (0, -1, -1)
        );
        let sources = |layer: usize| {
            let layer = abi.layers[layer];
            (
                layer.ratio,
                layer.kv_source,
                layer.index_source,
                layer.hash_gate,
            )
        };
        assert_eq!(sources(1), (0, -1, -1, 1));
        assert_eq!(sources(2), (4, 2, 2, 1));
        assert_eq!(sources(3), (128, 3, -1, 0));
        assert_eq!(sources(42), (4, 42, 42, 0));
    }

    #[test]
    fn keys_are_whole_requests() {
        let traits = KeyTraits {
            shape: "tiny".into(),
            isa: "scalar".into(),
            numerics_digest: 1,
            layout_digest: 2,
        };
        let names = |widths: &[u32], num_drafts| -> Vec<_> {
            let keys = graph_keys(&traits, widths, num_drafts);
            keys.iter()
                .map(|key| (key.mode, key.batch_size, key.tokens_per_request))
                .collect()
        };
        assert_eq!(
            names(&[6, 7, 12], 5),
            [
                (GraphMode::TargetVerify, 1, 6),
                (GraphMode::Draft, 1, 5),
                (GraphMode::TargetVerify, 2, 6),
                (GraphMode::Draft, 2, 5),
            ]
        );
        assert_eq!(
            names(&[1, 4], 0),
            [(GraphMode::Decode, 1, 1), (GraphMode::Decode, 4, 1)]
        );
    }
}

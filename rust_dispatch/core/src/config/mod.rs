//! `config`: what model was asked for, read from the published `config.json` and checked whole.
//!
//! The fields are named as the checkpoint's configuration names them; the text part of a
//! multimodal configuration may be nested under `text_config`. Fields that decide nothing here
//! are ignored. What is wrong is reported all at once, one clear line a field.

mod engram;
mod numpy_rng;
mod read;
mod strict;

pub use engram::{EngramConfig, EngramTable, HEADS, NGRAM_SIZES, SHIFTS};

use std::fmt;

use crate::words::one_line;

/// Configurations that come with the library, in the published form: name and text.
pub const BUILT_IN: [(&str, &str); 4] = [
    ("tiny-v4", include_str!("tiny_v4.json")),
    ("v4-flash", include_str!("v4_flash.json")),
    ("tiny-v41", include_str!("tiny_v41.json")),
    ("v41-flash", include_str!("v41_flash.json")),
];

/// Text of a built-in configuration.
///
/// ```
/// use lowlat_core::config::{built_in, ModelConfig};
/// let config = ModelConfig::from_json(built_in("tiny-v41").unwrap()).unwrap();
/// assert_eq!((config.hidden, config.layers.len()), (128, 10));
/// assert!(built_in("tiny").is_none());
/// ```
#[must_use]
pub fn built_in(name: &str) -> Option<&'static str> {
    BUILT_IN
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, text)| *text)
}

/// Everything that is wrong with a configuration, one clear line a field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    problems: Vec<String>,
}

impl ConfigError {
    /// The lines, in the order in which the fields are read; never empty.
    #[must_use]
    pub fn problems(&self) -> &[String] {
        &self.problems
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problems.join("; "))
    }
}

impl std::error::Error for ConfigError {}

/// Whose rules the model follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelFamily {
    /// DeepSeek-V4-Flash.
    V4,
    /// DeepSeek-V4.1-Flash.
    V41,
}

impl ModelFamily {
    /// What the published configuration calls it.
    ///
    /// ```
    /// use lowlat_core::config::ModelFamily;
    /// assert_eq!(ModelFamily::V4.model_type(), "deepseek_v4");
    /// ```
    #[must_use]
    pub fn model_type(self) -> &'static str {
        match self {
            Self::V4 => "deepseek_v4",
            Self::V41 => "deepseek_v41",
        }
    }

    /// The model in words, for people.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::V4 => "DeepSeek-V4",
            Self::V41 => "DeepSeek-V4.1",
        }
    }

    /// Edge of the square block of an fp8 weight that has one scale.
    #[must_use]
    pub fn scale_block(self) -> u32 {
        match self {
            Self::V4 => 128,
            Self::V41 => 32,
        }
    }

    /// Ratios that a layer's compressed set may have; 0 is none.
    #[must_use]
    pub fn ratios(self) -> &'static [u32] {
        match self {
            Self::V4 => &[0, 4, 128],
            Self::V41 => &[0, 1, 2],
        }
    }

    /// A page holds a multiple of so many tokens, so that what is compressed never lies across
    /// two pages.
    #[must_use]
    pub fn page_unit(self) -> u32 {
        self.ratios().iter().copied().max().unwrap_or(1)
    }
}

/// One target layer's place in the pattern of shared caches. All fields are layer numbers but
/// `ratio` and `engram`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerConfig {
    /// 0: the sliding window only; 1, 2 (V4.1), 4, 128 (V4): also a compressed set of that ratio.
    pub ratio: u32,
    /// Whose compressed cache is read: the nearest source at or before this layer.
    pub kv_source: Option<u32>,
    /// Whose selection is used: the nearest index source at or before this layer; none where every
    /// entry is used (ratio 128).
    pub index_source: Option<u32>,
    /// Whose candidate blocks restrict this index source.
    pub candidate_source: Option<u32>,
    /// Which of the Engram tables is applied before this layer.
    pub engram: Option<u32>,
    /// Whether a table says which experts a token goes to, and the gate only weighs them (V4).
    pub hash_gate: bool,
}

/// YaRN, for the compressed layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Context stretch.
    pub factor: f64,
    /// Rotations above which a frequency is kept.
    pub beta_fast: f64,
    /// Rotations below which a frequency is divided by `factor`.
    pub beta_slow: f64,
    /// Positions of the unstretched model.
    pub original_positions: f64,
}

/// Candidate blocks: index sources behind `layer` score only the blocks that it publishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CandidateConfig {
    /// The layer that publishes.
    pub layer: u32,
    /// Blocks published at most.
    pub num_blocks: u32,
    /// Positions a block.
    pub block_size: u32,
}

/// The DSpark draft.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftConfig {
    /// Layers of the draft.
    pub num_stages: u32,
    /// Proposals a step.
    pub block: u32,
    /// Token that stands for a proposal not made yet.
    pub mask_token: u32,
    /// Target layers that feed the draft: their input (V4.1) or their output (V4).
    pub target_layers: Vec<u32>,
    /// Rank of the Markov head.
    pub markov_rank: u32,
    /// Routed experts of a stage.
    pub num_experts: u32,
    /// Experts a row.
    pub experts_per_token: u32,
}

/// A model's sizes and rules, of the whole model before tensor parallelism. Sizes are elements.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Whose rules.
    pub family: ModelFamily,
    /// Width of the residual.
    pub hidden: u32,
    /// Token ids are below it.
    pub vocab: u32,
    /// Query heads.
    pub num_heads: u32,
    /// Width of a head and of the shared latent key.
    pub head_dim: u32,
    /// Last dimensions of a head that rotate.
    pub rope_dim: u32,
    /// Rank of the query bottleneck.
    pub q_lora: u32,
    /// Groups of the output projection.
    pub o_groups: u32,
    /// Rank of the output projection, a group.
    pub o_lora: u32,
    /// Positions of the sliding window, the row's own counted.
    pub window: u32,
    /// Routed experts of a target layer.
    pub num_experts: u32,
    /// Experts a row.
    pub experts_per_token: u32,
    /// Width inside an expert.
    pub moe_intermediate: u32,
    /// Heads of the indexer.
    pub index_heads: u32,
    /// Width of an index key.
    pub index_dim: u32,
    /// Compressed entries that a row attends to, at most.
    pub index_topk: u32,
    /// Candidate blocks, where the model has them.
    pub candidates: Option<CandidateConfig>,
    /// fp8 weights have one scale a square block of this edge.
    pub scale_block: u32,
    /// Passes of the Sinkhorn normalisation.
    pub sinkhorn_iters: u32,
    /// Added to mean squares.
    pub norm_eps: f32,
    /// Added in the hyper-connection's normalisations.
    pub hc_eps: f32,
    /// Clamp of the gated product's two factors.
    pub swiglu_limit: f32,
    /// Factor of the routed experts' sum.
    pub routed_scaling: f32,
    /// Rotary base of layers without a compressed set, and of the draft.
    pub rope_theta: f64,
    /// Rotary base of layers with one.
    pub compress_rope_theta: f64,
    /// Stretch of the latter.
    pub yarn: Yarn,
    /// Positions are below it.
    pub max_positions: u64,
    /// Target layers in order.
    pub layers: Vec<LayerConfig>,
    /// n-gram memory, where the model has it.
    pub engram: Option<EngramConfig>,
    /// Token id of an image patch.
    pub image_token: Option<u32>,
    /// Ids that are no ordinary word: begin, end, padding, image and mask, ascending.
    pub special_tokens: Vec<u32>,
    /// The draft, where the model has one.
    pub draft: Option<DraftConfig>,
}

impl ModelConfig {
    /// Reads a published `config.json`.
    ///
    /// ```
    /// use lowlat_core::config::ModelConfig;
    /// let error = ModelConfig::from_json("{\"model_type\": \"deepseek_v3\"}").unwrap_err();
    /// assert!(error.to_string().contains("deepseek_v3"));
    /// ```
    ///
    /// # Errors
    /// Lists every field that is missing, there twice, of another type or out of range, and a
    /// model of a family that this version does not serve.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let lines = |problems: Vec<String>| problems.iter().map(|words| one_line(words)).collect();
        read::model_config(text).map_err(|problems| ConfigError {
            problems: lines(problems),
        })
    }

    /// Layers that own a compressed cache, ascending.
    pub fn kv_sources(&self) -> impl Iterator<Item = u32> + '_ {
        self.own(|layer| layer.kv_source)
    }

    /// Layers that make a selection of their own, ascending.
    pub fn index_sources(&self) -> impl Iterator<Item = u32> + '_ {
        self.own(|layer| layer.index_source)
    }

    fn own(
        &self,
        source: impl Fn(&LayerConfig) -> Option<u32> + 'static,
    ) -> impl Iterator<Item = u32> + '_ {
        (0u32..)
            .zip(&self.layers)
            .filter_map(move |(layer_idx, layer)| {
                source(layer).filter(|source_idx| *source_idx == layer_idx)
            })
    }
}

#[cfg(test)]
mod tests;

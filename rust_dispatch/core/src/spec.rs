//! The built-in kernels' requirements, and the question "could they serve this?" as text in and
//! text out, for a shell that has neither a GPU nor an engine.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use crate::config::{HEADS, ModelConfig, NGRAM_SIZES};
use crate::guard::{Decline, Divides, Facts, Feature, OneOf, Requirements, Servable, Value, guard};
use crate::reason::Reason;

/// Sizes that every V4.1 kernel splits over the ranks, whatever the platform.
fn v41_divides() -> Vec<Divides> {
    vec![
        Divides::new("num_attention_heads", 1),
        Divides::new("o_groups", 1),
        Divides::new("vocab_size", 1),
        // A scale group of 32 along the expert's width must be whole on one rank.
        Divides::new("moe_intermediate_size", 32),
        Divides::new("engram_columns", 1),
    ]
}

/// What DeepSeek-V4.1-Flash's rules fix, whatever the sizes.
fn v41_model() -> Vec<OneOf> {
    vec![
        OneOf::new("model_type", ["deepseek_v41"]),
        OneOf::new("head_dim", [512]),
        OneOf::new("qk_rope_head_dim", [64]),
        OneOf::new("weight_block_size", [32]),
    ]
}

/// DeepSeek-V4.1-Flash on the `scalar` platform: any size that divides over 1, 2, 4 or 8 ranks.
///
/// ```
/// use lowlat_core::spec::v41_scalar;
/// assert_eq!(v41_scalar().tp_sizes, [1, 2, 4, 8]);
/// ```
#[must_use]
pub fn v41_scalar() -> Requirements {
    Requirements {
        tp_sizes: vec![1, 2, 4, 8],
        dtypes: vec!["bfloat16".to_owned()],
        model: v41_model(),
        divides: v41_divides(),
        features: BTreeSet::from([Feature::SpeculativeDecoding]),
        ..Requirements::new("lowlat_v41_scalar", &["scalar"])
    }
}

/// DeepSeek-V4.1-Flash on Hopper: the published sizes, on 1, 2, 4 or 8 ranks (1 is the shard of one
/// rank alone, for tests), in the expert layout of the Marlin runner.
///
/// ```
/// use lowlat_core::spec::v41_nvidia;
/// assert_eq!(v41_nvidia().isas, ["sm_90"]);
/// ```
#[must_use]
pub fn v41_nvidia() -> Requirements {
    let mut model = v41_model();
    model.extend([
        OneOf::new("hidden_size", [5120]),
        OneOf::new("num_hidden_layers", [40]),
        OneOf::new("num_attention_heads", [64]),
        OneOf::new("q_lora_rank", [1280]),
        OneOf::new("o_groups", [8]),
        OneOf::new("o_lora_rank", [1024]),
        OneOf::new("sliding_window", [128]),
        OneOf::new("n_routed_experts", [384]),
        OneOf::new("num_experts_per_tok", [6]),
        OneOf::new("moe_intermediate_size", [2304]),
        OneOf::new("index_n_heads", [32]),
        OneOf::new("index_head_dim", [128]),
        OneOf::new("index_topk", [512]),
    ]);
    Requirements {
        tp_sizes: vec![1, 2, 4, 8],
        dtypes: vec!["bfloat16".to_owned()],
        model,
        divides: v41_divides(),
        server_args: vec![
            OneOf::new("moe_runner_backend", ["marlin"]),
            OneOf::new("page_size", [256]),
        ],
        env: vec![
            // 584 bytes a token; the other layout has rows that these kernels do not read.
            OneOf::new("SGLANG_DSV4_KV_LAYOUT", ["v4"]).or_unset(),
            OneOf::new("SGLANG_DSV4_FP4_DEQUANT", [false]).or_unset(),
        ],
        // One block a multiprocessor of an H100 SXM or H200.
        resident_blocks: 132,
        features: BTreeSet::from([Feature::SpeculativeDecoding]),
        ..Requirements::new("lowlat_v41_nvidia", &["sm_90"])
    }
}

/// Every set of built-in requirements.
#[must_use]
pub fn built_in() -> [Requirements; 2] {
    [v41_scalar(), v41_nvidia()]
}

/// A model's configuration as facts for the guard, by the names of the published `config.json`.
/// `weight_block_size` is the edge of a square block, and `engram_columns`, which has no name
/// there, the number of hash columns of one Engram table: n-gram sizes times heads.
///
/// ```
/// use lowlat_core::config::{ModelConfig, built_in};
/// use lowlat_core::spec::model_facts;
/// let config = ModelConfig::from_json(built_in("v41-flash").unwrap()).unwrap();
/// let facts = model_facts(&config);
/// assert_eq!(facts["hidden_size"].to_string(), "5120");
/// assert_eq!(facts["engram_columns"].to_string(), "24");
/// ```
#[must_use]
pub fn model_facts(config: &ModelConfig) -> BTreeMap<String, Value> {
    let crate::config::ModelFamily::V41 = config.family;
    let mut facts: BTreeMap<String, Value> = [
        ("hidden_size", config.hidden),
        ("vocab_size", config.vocab),
        ("num_attention_heads", config.num_heads),
        ("head_dim", config.head_dim),
        ("qk_rope_head_dim", config.rope_dim),
        ("q_lora_rank", config.q_lora),
        ("o_groups", config.o_groups),
        ("o_lora_rank", config.o_lora),
        ("sliding_window", config.window),
        ("n_routed_experts", config.num_experts),
        ("num_experts_per_tok", config.experts_per_token),
        ("moe_intermediate_size", config.moe_intermediate),
        ("index_n_heads", config.index_heads),
        ("index_head_dim", config.index_dim),
        ("index_topk", config.index_topk),
        ("weight_block_size", config.scale_block),
        ("num_hidden_layers", config.layers.len() as u32),
        ("engram_columns", (NGRAM_SIZES * HEADS) as u32),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), Value::from(value)))
    .collect();
    facts.insert("model_type".to_owned(), Value::from("deepseek_v41"));
    facts
}

/// What `check` is asked beside the model. In JSON every field may be left out, and a field that
/// is not listed here is refused.
///
/// ```
/// use lowlat_core::spec::CheckOptions;
/// let options = CheckOptions::from_json(r#"{"tp_size": 4, "isa": "sm_90"}"#).unwrap();
/// assert_eq!((options.tp_size, options.isa.as_str()), (4, "sm_90"));
/// let error = CheckOptions::from_json(r#"{"tpp": 4}"#).unwrap_err();
/// assert!(error.to_string().starts_with("options: unknown field `tpp`"), "{error}");
/// ```
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckOptions {
    /// Ranks of the tensor-parallel group; 1 when left out.
    pub tp_size: u32,
    /// The device's machine code; `scalar` when left out.
    pub isa: String,
    /// The model's dtype; what the configuration says when left out.
    pub dtype: Option<String>,
    /// The server's `--page-size`, in tokens.
    pub page_size: Option<Value>,
    /// The server's `--moe-runner-backend`.
    pub moe_runner_backend: Option<Value>,
    /// Other server arguments by name, such as `swa_full_tokens_ratio`.
    pub server_args: BTreeMap<String, Value>,
    /// Environment variables by name.
    pub env: BTreeMap<String, Value>,
    /// Features in use, by name.
    pub features: BTreeSet<Feature>,
    /// Blocks that the device runs at the same time; not checked when left out.
    pub resident_blocks: Option<u32>,
}

impl Default for CheckOptions {
    fn default() -> Self {
        Self {
            tp_size: 1,
            isa: "scalar".to_owned(),
            dtype: None,
            page_size: None,
            moe_runner_backend: None,
            server_args: BTreeMap::new(),
            env: BTreeMap::new(),
            features: BTreeSet::new(),
            resident_blocks: None,
        }
    }
}

/// Options that cannot be read, in one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("options: {0}")]
pub struct OptionsError(String);

impl CheckOptions {
    /// Reads options from a JSON object.
    ///
    /// # Errors
    /// The first field that is unknown or of another type, by name.
    pub fn from_json(text: &str) -> Result<Self, OptionsError> {
        let fields: serde_json::Map<String, serde_json::Value> = serde_json::from_str(text)
            .map_err(|error| OptionsError(format!("not a JSON object: {error}")))?;
        // One field at a time first: only so does the error know which field it is.
        for (name, value) in &fields {
            let field = serde_json::Map::from_iter([(name.clone(), value.clone())]);
            serde_json::from_value::<Self>(field.into()).map_err(|error| {
                let words = error.to_string();
                let unknown = words.starts_with("unknown field");
                OptionsError(if unknown {
                    words
                } else {
                    format!("{name}: {words}")
                })
            })?;
        }
        serde_json::from_value(fields.into()).map_err(|error| OptionsError(error.to_string()))
    }
}

/// Every reason why no built-in kernels can serve this model under these options; empty when some
/// can.
///
/// ```
/// use lowlat_core::config::built_in;
/// use lowlat_core::spec::{CheckOptions, check};
/// let tiny = built_in("tiny-v41").unwrap();
/// assert!(check(tiny, &CheckOptions { tp_size: 2, ..CheckOptions::default() }).is_empty());
/// let declines = check(tiny, &CheckOptions { tp_size: 3, ..CheckOptions::default() });
/// assert_eq!(
///     declines[0].to_string(),
///     "[102] tp_size is 3; these kernels need 1, 2, 4 or 8 (change: --tp)"
/// );
/// ```
#[must_use]
pub fn check(config_json: &str, options: &CheckOptions) -> Vec<Decline> {
    serve(config_json, options).err().unwrap_or_default()
}

/// The same question with the proof as its answer, for who goes on to vote.
///
/// # Errors
/// Every reason why no built-in kernels can serve this.
pub fn serve(config_json: &str, options: &CheckOptions) -> Result<Servable, Vec<Decline>> {
    let config = ModelConfig::from_json(config_json).map_err(|error| {
        let problems = error.problems().iter();
        problems
            .map(|line| Decline::in_words(Reason::ModelConfig, line))
            .collect::<Vec<_>>()
    })?;
    let specs = built_in();
    let Some(requirements) = specs.iter().find(|spec| spec.isas.contains(&options.isa)) else {
        let isas: Vec<_> = specs.iter().flat_map(|spec| spec.isas.clone()).collect();
        let decline = Decline::new(Reason::Isa, "isa", &options.isa, isas.join(" or "));
        return Err(vec![decline.change("--isa")]);
    };
    let mut server_args = options.server_args.clone();
    let named = [
        ("page_size", &options.page_size),
        ("moe_runner_backend", &options.moe_runner_backend),
    ];
    for (name, value) in named {
        server_args.extend(value.clone().map(|value| (name.to_owned(), value)));
    }
    let facts = Facts {
        isa: options.isa.clone(),
        tp_size: options.tp_size,
        dtype: options.dtype.clone().or_else(|| dtype_of(config_json)),
        model: model_facts(&config),
        server_args,
        env: options.env.clone(),
        resident_blocks: options.resident_blocks,
        features: options.features.clone(),
    };
    guard(&facts, requirements)
}

/// The dtype that a configuration names, which may lie in its text part.
fn dtype_of(config_json: &str) -> Option<String> {
    let config: serde_json::Value = serde_json::from_str(config_json).ok()?;
    let parts = [config.get("text_config"), Some(&config)];
    let names = ["torch_dtype", "dtype"];
    let mut fields = parts
        .into_iter()
        .flatten()
        .flat_map(|part| names.map(|name| part.get(name)));
    fields.find_map(|field| Some(field?.as_str()?.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    fn texts(model: &str, options: &str) -> Vec<String> {
        let options = CheckOptions::from_json(options).unwrap();
        let declines = check(config::built_in(model).unwrap(), &options);
        declines.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_published_model_is_served_on_hopper_with_marlin() {
        let options = r#"{"tp_size": 4, "isa": "sm_90", "resident_blocks": 132,
            "server_args": {"moe_runner_backend": "marlin", "page_size": 256},
            "features": ["speculative_decoding"]}"#;
        assert!(texts("v41-flash", options).is_empty());
        for tp in [1, 2, 4, 8] {
            assert!(texts("v41-flash", &format!("{{\"tp_size\": {tp}}}")).is_empty());
        }
    }

    #[test]
    fn everything_that_is_wrong_on_hopper_is_told_at_once() {
        let options = r#"{"tp_size": 3, "isa": "sm_90", "dtype": "float16", "resident_blocks": 66,
            "page_size": 64, "features": ["lora"],
            "env": {"SGLANG_DSV4_KV_LAYOUT": "v41"}}"#;
        assert_eq!(
            texts("v41-flash", options),
            [
                "[102] tp_size is 3; these kernels need 1, 2, 4 or 8 (change: --tp)",
                "[103] dtype is float16; these kernels need bfloat16 (change: --dtype bfloat16)",
                "[105] num_attention_heads is 64; these kernels need a multiple of tp_size (3) \
                 (change: --tp)",
                "[105] o_groups is 8; these kernels need a multiple of tp_size (3) (change: --tp)",
                "[105] vocab_size is 129280; these kernels need a multiple of tp_size (3) \
                 (change: --tp)",
                "[106] moe_runner_backend is not set; these kernels need marlin \
                 (change: --moe-runner-backend marlin)",
                "[106] page_size is 64; these kernels need 256 (change: --page-size 256)",
                "[107] SGLANG_DSV4_KV_LAYOUT is v41; these kernels need v4 \
                 (change: SGLANG_DSV4_KV_LAYOUT=v4)",
                "[108] resident_blocks is 66; these kernels need at least 132 \
                 (change: serve on a whole device, not on a slice of one)",
                "[109] lora is in use; these kernels need it off \
                 (change: leave out --enable-lora and --lora-paths)",
            ]
        );
    }

    #[test]
    fn a_small_model_says_which_size_stops_eight_ranks() {
        assert_eq!(
            texts("tiny-v41", r#"{"tp_size": 8}"#),
            [
                "[105] o_groups is 4; these kernels need a multiple of tp_size (8) (change: --tp)",
                "[105] moe_intermediate_size is 128; these kernels need a multiple of \
                 32 x tp_size (32 x 8 = 256) (change: --tp)",
            ]
        );
    }

    #[test]
    fn a_device_without_kernels_and_a_config_of_another_model_are_declines() {
        assert_eq!(
            texts("tiny-v41", r#"{"isa": "gfx950"}"#),
            ["[101] isa is gfx950; these kernels need scalar or sm_90 (change: --isa)"]
        );
        let declines = check("{\"model_type\": \"llama\"}", &CheckOptions::default());
        assert!(!declines.is_empty());
        assert!(
            declines
                .iter()
                .all(|decline| decline.reason == Reason::ModelConfig)
        );
    }

    #[test]
    fn an_option_of_another_type_is_named() {
        let refused = |text| CheckOptions::from_json(text).unwrap_err().to_string();
        let text = r#"{"isa": "scalar", "tp_size": -1}"#;
        assert_eq!(
            refused(text),
            "options: tp_size: invalid value: integer `-1`, expected u32"
        );
        assert!(refused(r#"{"features": ["teleport"]}"#).contains("features: unknown variant"));
        assert!(refused("[1]").starts_with("options: not a JSON object: "));
        assert!(refused(r#"{"tp": 2}"#).contains("unknown field `tp`"));
    }

    #[test]
    fn the_dtype_is_found_in_the_text_part_too() {
        assert_eq!(
            dtype_of(r#"{"text_config": {"dtype": "bfloat16"}}"#).unwrap(),
            "bfloat16"
        );
        assert_eq!(
            dtype_of(r#"{"torch_dtype": "float32"}"#).unwrap(),
            "float32"
        );
        assert_eq!(dtype_of("{}"), None);
    }
}

//! The built-in kernels' requirements, and the question "could they serve this?" as text in and
//! text out, for a shell that has neither a GPU nor an engine.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use crate::config::{HEADS, ModelConfig, ModelFamily, NGRAM_SIZES};
use crate::guard::{Decline, Divides, Facts, Feature, OneOf, Requirements, Servable, Value, guard};
use crate::reason::Reason;
use crate::words::one_line;

/// Sizes that every kernel splits over the ranks, whatever the platform.
fn divides(family: ModelFamily) -> Vec<Divides> {
    let mut divides = vec![
        Divides::new("num_attention_heads", 1),
        Divides::new("o_groups", 1),
        Divides::new("vocab_size", 1),
        // A scale block along the expert's width must be whole on one rank.
        Divides::new("moe_intermediate_size", u64::from(family.scale_block())),
    ];
    if family == ModelFamily::V41 {
        divides.push(Divides::new("engram_columns", 1));
    }
    divides
}

/// Sizes of DeepSeek-V4-Flash that compiled kernels are for.
const V4_SIZES: [(&str, u32); 13] = [
    ("hidden_size", 4096),
    ("num_hidden_layers", 43),
    ("num_attention_heads", 64),
    ("q_lora_rank", 1024),
    ("o_groups", 8),
    ("o_lora_rank", 1024),
    ("sliding_window", 128),
    ("n_routed_experts", 256),
    ("num_experts_per_tok", 6),
    ("moe_intermediate_size", 2048),
    ("index_n_heads", 64),
    ("index_head_dim", 128),
    ("index_topk", 512),
];

/// Sizes of DeepSeek-V4.1-Flash that compiled kernels are for.
const V41_SIZES: [(&str, u32); 13] = [
    ("hidden_size", 5120),
    ("num_hidden_layers", 40),
    ("num_attention_heads", 64),
    ("q_lora_rank", 1280),
    ("o_groups", 8),
    ("o_lora_rank", 1024),
    ("sliding_window", 128),
    ("n_routed_experts", 384),
    ("num_experts_per_tok", 6),
    ("moe_intermediate_size", 2304),
    ("index_n_heads", 32),
    ("index_head_dim", 128),
    ("index_topk", 512),
];

/// What the family's rules fix, whatever the sizes.
fn model_rules(family: ModelFamily) -> Vec<OneOf> {
    vec![
        OneOf::new("model_type", [family.model_type()]),
        OneOf::new("head_dim", [512]),
        OneOf::new("qk_rope_head_dim", [64]),
        OneOf::new("weight_block_size", [family.scale_block()]),
    ]
}

/// A family on the `scalar` platform: any size that divides over 1, 2, 4 or 8 ranks.
fn scalar(family: ModelFamily, name: &str) -> Requirements {
    Requirements {
        tp_sizes: vec![1, 2, 4, 8],
        dtypes: vec!["bfloat16".to_owned()],
        model: model_rules(family),
        divides: divides(family),
        features: BTreeSet::from([Feature::SpeculativeDecoding]),
        ..Requirements::new(name, &["scalar"])
    }
}

/// A family on GPUs, inside a server: the published sizes, and the caches and metadata that the
/// kernels read there. What is the vendor's own comes on top.
fn served(family: ModelFamily, name: &str, isa: &str, resident_blocks: u32) -> Requirements {
    let sizes = match family {
        ModelFamily::V4 => V4_SIZES,
        ModelFamily::V41 => V41_SIZES,
    };
    let sizes = sizes.map(|(field, size)| OneOf::new(field, [size]));
    Requirements {
        tp_sizes: vec![1, 2, 4, 8],
        dtypes: vec!["bfloat16".to_owned()],
        model: [model_rules(family), sizes.into()].concat(),
        divides: divides(family),
        server_args: vec![
            OneOf::new("page_size", [256]),
            OneOf::new("kv_cache_dtype", ["fp8_e4m3"]).or_unset(),
            OneOf::new("attention_backend", ["dsv4"]).or_unset(),
            // Verify steps of other algorithms are not tested.
            OneOf::new("speculative_algorithm", ["DSPARK"]).or_unset(),
        ],
        env: vec![
            // 584 bytes a token; the other layout has rows that these kernels do not read.
            OneOf::new("SGLANG_DSV4_KV_LAYOUT", ["v4"]).or_unset(),
            OneOf::new("SGLANG_DSV4_COMPRESS_STATE_DTYPE", ["float32"]).or_unset(),
            OneOf::new("SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE", [false]).or_unset(),
            // It would move the draft's context KV to another time of the step.
            OneOf::new("SGLANG_DSPARK_DEFER_CONTEXT_KV", [false]).or_unset(),
        ],
        resident_blocks,
        features: BTreeSet::from([Feature::SpeculativeDecoding]),
        ..Requirements::new(name, &[isa])
    }
}

/// A family on Hopper: weights are read where the server keeps them, experts in the layout of the
/// Marlin runner. One block a multiprocessor of an H100 SXM or H200.
fn nvidia(family: ModelFamily, name: &str) -> Requirements {
    let mut needs = served(family, name, "sm_90", 132);
    let runner = OneOf::new("moe_runner_backend", ["marlin"]);
    needs.server_args.insert(0, runner);
    needs.env.extend([
        OneOf::new("SGLANG_DSV4_FP4_DEQUANT", [false]).or_unset(),
        OneOf::new("SGLANG_DSV4_FP4_EXPERTS", [true]).or_unset(),
        // The query's and the key's first projection are read as one matrix.
        OneOf::new("SGLANG_OPT_FUSE_WQA_WKV", [true]).or_unset(),
        OneOf::new("SGLANG_DSPARK_OPT_MARKOV_W2_BF16", [true]).or_unset(),
    ]);
    needs
}

/// A family on a CDNA part: weights are copies of the checkpoint's tensors, so that no setting of
/// their layout matters. One block a compute unit of a whole part.
fn amd(family: ModelFamily, name: &str, isa: &str, resident_blocks: u32) -> Requirements {
    let mut needs = served(family, name, isa, resident_blocks);
    // The index keys' pages have a layout of their own behind it.
    let indexer = OneOf::new("enable_deepseek_v4_fp4_indexer", [false]).or_unset();
    needs.server_args.push(indexer);
    needs.env.extend([
        // Every value but unified_kv_triton, which keeps no pages.
        OneOf::new(
            "SGLANG_HACK_FLASHMLA_BACKEND",
            ["auto", "aiter_sparse", "tilelang", "triton", "torch"],
        )
        .or_unset(),
        OneOf::new("SGLANG_HIP_DSV41_INDEX_K_PAGE8", [false]).or_unset(),
    ]);
    needs
}

/// DeepSeek-V4-Flash on the `scalar` platform: any size that divides over 1, 2, 4 or 8 ranks.
///
/// ```
/// use lowlat_core::spec::v4_scalar;
/// assert_eq!(v4_scalar().isas, ["scalar"]);
/// ```
#[must_use]
pub fn v4_scalar() -> Requirements {
    scalar(ModelFamily::V4, "lowlat_v4_scalar")
}

/// DeepSeek-V4.1-Flash on the `scalar` platform: any size that divides over 1, 2, 4 or 8 ranks.
///
/// ```
/// use lowlat_core::spec::v41_scalar;
/// assert_eq!(v41_scalar().tp_sizes, [1, 2, 4, 8]);
/// ```
#[must_use]
pub fn v41_scalar() -> Requirements {
    scalar(ModelFamily::V41, "lowlat_v41_scalar")
}

/// DeepSeek-V4-Flash on Hopper: the published sizes, on 1, 2, 4 or 8 ranks (1 is the shard of one
/// rank alone, for tests), in the expert layout of the Marlin runner.
///
/// ```
/// use lowlat_core::spec::v4_nvidia;
/// assert_eq!(v4_nvidia().isas, ["sm_90"]);
/// ```
#[must_use]
pub fn v4_nvidia() -> Requirements {
    nvidia(ModelFamily::V4, "lowlat_v4_nvidia")
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
    nvidia(ModelFamily::V41, "lowlat_v41_nvidia")
}

/// A family on each CDNA part that there are code objects for: the published sizes on 1, 2, 4 or 8
/// ranks. They never ran on one.
///
/// ```
/// use lowlat_core::config::ModelFamily;
/// use lowlat_core::spec::amd_parts;
/// let [first, second] = amd_parts(ModelFamily::V4);
/// assert_eq!((first.isas[0].as_str(), first.resident_blocks), ("gfx950", 256));
/// assert_eq!((second.isas[0].as_str(), second.resident_blocks), ("gfx942", 304));
/// ```
#[must_use]
pub fn amd_parts(family: ModelFamily) -> [Requirements; 2] {
    // MI350X and MI355X; MI300X and MI325X.
    [("gfx950", 256), ("gfx942", 304)].map(|(isa, resident_blocks)| {
        let name = match family {
            ModelFamily::V4 => format!("lowlat_v4_{isa}"),
            ModelFamily::V41 => format!("lowlat_v41_{isa}"),
        };
        amd(family, &name, isa, resident_blocks)
    })
}

/// Every set of built-in requirements, with the family that it is for.
#[must_use]
pub fn built_in() -> Vec<(ModelFamily, Requirements)> {
    let [v4, v41] = [ModelFamily::V4, ModelFamily::V41].map(|family| {
        let parts = amd_parts(family).into_iter();
        parts.map(move |part| (family, part))
    });
    [
        (ModelFamily::V4, v4_scalar()),
        (ModelFamily::V4, v4_nvidia()),
    ]
    .into_iter()
    .chain(v4)
    .chain([
        (ModelFamily::V41, v41_scalar()),
        (ModelFamily::V41, v41_nvidia()),
    ])
    .chain(v41)
    .collect()
}

/// The requirements of a family on a device's machine code; `None` where there are no kernels.
///
/// ```
/// use lowlat_core::config::ModelFamily;
/// use lowlat_core::spec::requirements;
/// assert_eq!(requirements(ModelFamily::V4, "scalar").unwrap().name, "lowlat_v4_scalar");
/// assert!(requirements(ModelFamily::V4, "sm_70").is_none());
/// ```
#[must_use]
pub fn requirements(family: ModelFamily, isa: &str) -> Option<Requirements> {
    let mut specs = built_in().into_iter();
    let fits = |(of, spec): &(ModelFamily, Requirements)| {
        *of == family && spec.isas.iter().any(|own| own == isa)
    };
    specs.find(fits).map(|(_, spec)| spec)
}

/// A model's configuration as facts for the guard, by the names of the published `config.json`.
/// `weight_block_size` is the edge of a square block, and `engram_columns`, which has no name
/// there, the number of hash columns of one Engram table (V4.1): n-gram sizes times heads.
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
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), Value::from(value)))
    .collect();
    if config.family == ModelFamily::V41 {
        let columns = (NGRAM_SIZES * HEADS) as u32;
        facts.insert("engram_columns".to_owned(), Value::from(columns));
    }
    let model_type = Value::from(config.family.model_type());
    facts.insert("model_type".to_owned(), model_type);
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
#[error("options: {}", one_line(.0))]
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
    let Some(requirements) = requirements(config.family, &options.isa) else {
        let specs = built_in().into_iter();
        let specs = specs.filter(|(family, _)| *family == config.family);
        let isas: Vec<_> = specs.flat_map(|(_, spec)| spec.isas).collect();
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
    guard(&facts, &requirements)
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
    fn v4_has_the_same_platforms_and_its_own_sizes() {
        for tp in [1, 2, 4, 8] {
            assert!(texts("v4-flash", &format!("{{\"tp_size\": {tp}}}")).is_empty());
            let options = format!(
                "{{\"tp_size\": {tp}, \"isa\": \"sm_90\", \"moe_runner_backend\": \"marlin\",
                  \"page_size\": 256}}"
            );
            assert!(texts("v4-flash", &options).is_empty());
        }
        assert_eq!(
            texts("tiny-v4", r#"{"tp_size": 8}"#),
            [
                "[105] o_groups is 4; these kernels need a multiple of tp_size (8) (change: --tp)",
                "[105] moe_intermediate_size is 512; these kernels need a multiple of \
                 128 x tp_size (128 x 8 = 1024) (change: --tp)",
            ]
        );
        let small = texts(
            "tiny-v4",
            r#"{"isa": "sm_90", "moe_runner_backend": "marlin", "page_size": 256}"#,
        );
        assert!(
            small[0].starts_with("[104] hidden_size is 128; these kernels need 4096"),
            "{small:?}"
        );
        for (family, spec) in built_in() {
            let isa = &spec.isas[0];
            assert_eq!(requirements(family, isa).unwrap().name, spec.name);
        }
    }

    #[test]
    fn cdna_parts_take_any_expert_runner_and_no_layout_of_their_own() {
        for (isa, blocks) in [("gfx950", 256), ("gfx942", 304)] {
            for model in ["v4-flash", "v41-flash"] {
                let options = format!(
                    r#"{{"tp_size": 4, "isa": "{isa}", "resident_blocks": {blocks},
                    "page_size": 256, "moe_runner_backend": "aiter",
                    "features": ["speculative_decoding"]}}"#
                );
                assert!(texts(model, &options).is_empty(), "{model} {isa}");
            }
            let options = format!(
                r#"{{"tp_size": 4, "isa": "{isa}", "resident_blocks": {}, "page_size": 256,
                "server_args": {{"enable_deepseek_v4_fp4_indexer": true}},
                "env": {{"SGLANG_HACK_FLASHMLA_BACKEND": "unified_kv_triton",
                         "SGLANG_DSV4_FP4_DEQUANT": true}}}}"#,
                blocks / 2
            );
            let need = format!("[108] resident_blocks is {}", blocks / 2);
            let told = texts("v4-flash", &options);
            assert_eq!(told.len(), 3, "{told:?}");
            let indexer = "[106] enable_deepseek_v4_fp4_indexer is true; these kernels need false \
                           (change: leave out --enable-deepseek-v4-fp4-indexer)";
            assert_eq!(told[0], indexer);
            let backend = "[107] SGLANG_HACK_FLASHMLA_BACKEND is unified_kv_triton; these kernels";
            assert!(told[1].starts_with(backend));
            assert!(told[2].starts_with(&need));
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
            texts("tiny-v41", r#"{"isa": "gfx90a"}"#),
            [
                "[101] isa is gfx90a; these kernels need scalar or sm_90 or gfx950 or gfx942 \
                 (change: --isa)"
            ]
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

//! The reader of `config.json`: every field by name, every problem kept.

use serde_json::{Map, Value};

use super::engram::{self, HEADS, NGRAM_SIZES};
use super::{
    CandidateConfig, DraftConfig, EngramConfig, LayerConfig, ModelConfig, ModelFamily, Yarn, strict,
};

/// Most layers and draft stages that the kernels' interface has room for.
const MAX_LAYERS: u32 = 64;
const MAX_DRAFT_STAGES: u32 = 4;
const MAX_ENGRAMS: usize = 4;
/// Fields of the DSpark draft that every published file with one has.
const DSPARK_FIELDS: [&str; 4] = [
    "dspark_block_size",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
    "dspark_markov_rank",
];
/// Sizes are held to what an i32 carries, with room to multiply a few of them in 64 bits.
const MAX_SIZE: u64 = 1 << 30;

pub(super) fn model_config(text: &str) -> Result<ModelConfig, Vec<String>> {
    let (root, twice) =
        strict::parse(text).map_err(|error| vec![format!("config.json is not JSON: {error}")])?;
    let Value::Object(root) = &root else {
        return Err(vec![format!(
            "config.json holds {}; needs an object",
            words(&root)
        )]);
    };
    let mut fields = Fields::new(root)?;
    let family = family(&fields)?;
    for name in twice {
        fields.problem(format!("{name} is there twice; needs to be there once"));
    }
    let config = read(&mut fields, family);
    if fields.problems.is_empty() {
        // Every accessor that found no value left a problem, so the fields are all there.
        Ok(config)
    } else {
        Err(fields.problems)
    }
}

/// What a value is, in a few words and without its contents where they could be long.
fn words(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(_) => "an object".into(),
        Value::String(text) if text.len() > 40 => "a long string".into(),
        other => other.to_string(),
    }
}

/// Neither an object nor, as null is, left out.
fn is_odd_object(value: &Value) -> bool {
    !value.is_object() && !value.is_null()
}

/// The objects that a field may be in, and what was wrong so far.
struct Fields<'a> {
    /// Innermost first: `text_config` where there is one, then the whole file.
    scopes: Vec<(&'static str, &'a Map<String, Value>)>,
    problems: Vec<String>,
}

impl<'a> Fields<'a> {
    fn new(root: &'a Map<String, Value>) -> Result<Self, Vec<String>> {
        let mut scopes = vec![("", root)];
        match root.get("text_config") {
            None | Some(Value::Null) => {}
            Some(Value::Object(text)) => scopes.insert(0, ("text_config.", text)),
            Some(other) => {
                return Err(vec![format!(
                    "text_config is {}; needs an object",
                    words(other)
                )]);
            }
        }
        Ok(Self {
            scopes,
            problems: Vec::new(),
        })
    }

    /// The innermost value that is not null. A name with a dot looks inside an object.
    fn find(&self, name: &str) -> Option<(String, &'a Value)> {
        self.scopes.iter().find_map(|(prefix, scope)| {
            let mut value = None;
            let mut object = Some(*scope);
            for part in name.split('.') {
                value = object?.get(part);
                object = value.and_then(Value::as_object);
            }
            value
                .filter(|value| !value.is_null())
                .map(|value| (format!("{prefix}{name}"), value))
        })
    }

    fn problem(&mut self, line: String) {
        self.problems.push(line);
    }

    /// An object, where the file has one; of another type, the fields in it are not missing too.
    fn object(&mut self, name: &str) {
        let mut odd = Vec::new();
        for (prefix, scope) in &self.scopes {
            if let Some(value) = scope.get(name).filter(|value| is_odd_object(value)) {
                odd.push(format!(
                    "{prefix}{name} is {}; needs an object",
                    words(value)
                ));
            }
        }
        self.problems.extend(odd);
    }

    /// Whether the field lies in an object that [`Self::object`] refuses.
    fn is_in_odd_object(&self, name: &str) -> bool {
        name.split_once('.').is_some_and(|(parent, _)| {
            let mut parents = self.scopes.iter().filter_map(|(_, map)| map.get(parent));
            parents.any(is_odd_object)
        })
    }

    /// `read`'s value of the field, or `placeholder` after noting what is wrong.
    fn need<T>(
        &mut self,
        name: &str,
        needed: &str,
        placeholder: T,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> T {
        match self.find(name) {
            None if self.is_in_odd_object(name) => {}
            None => self.problem(format!("{name} is missing; needs {needed}")),
            Some((path, value)) => match read(value) {
                Some(read) => return read,
                None => self.problem(format!("{path} is {}; needs {needed}", words(value))),
            },
        }
        placeholder
    }

    fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// A size: a whole number from 1 to [`MAX_SIZE`].
    fn size(&mut self, name: &str) -> u32 {
        self.int(name, 1, MAX_SIZE) as u32
    }

    fn int(&mut self, name: &str, least: u64, most: u64) -> u64 {
        let needed = format!("a whole number from {least} to {most}");
        let in_range = |value: &u64| (least..=most).contains(value);
        self.need(name, &needed, least, |value| {
            value.as_u64().filter(in_range)
        })
    }

    fn multiple(&mut self, name: &str, unit: u32) -> u32 {
        let needed = format!("a multiple of {unit} from {unit} to {MAX_SIZE}");
        self.need(name, &needed, unit, |value| {
            let size = value
                .as_u64()
                .filter(|size| (1..=MAX_SIZE).contains(size))? as u32;
            (size % unit == 0).then_some(size)
        })
    }

    fn positive(&mut self, name: &str) -> f64 {
        self.need(name, "a number over 0", 1.0, |value| {
            value
                .as_f64()
                .filter(|number| *number > 0.0 && number.is_finite())
        })
    }

    /// The same, where it must stay over 0 as an f32.
    fn positive_f32(&mut self, name: &str) -> f32 {
        self.need(name, "a number over 0 that fits 32 bits", 1.0, |value| {
            let number = value.as_f64()? as f32;
            (number > 0.0 && number.is_finite()).then_some(number)
        })
    }

    fn ids(&mut self, name: &str, bound: u32) -> Vec<u32> {
        let needed = format!("an ascending list of layers below {bound}");
        self.need(name, &needed, Vec::new(), |value| {
            let ids: Vec<u32> = value
                .as_array()?
                .iter()
                .map(|id| {
                    id.as_u64()
                        .filter(|id| *id < u64::from(bound))
                        .map(|id| id as u32)
                })
                .collect::<Option<_>>()?;
            ids.is_sorted_by(|a, b| a < b).then_some(ids)
        })
    }

    /// A part that the family does not have: left out, or said to be none.
    fn absent(&mut self, name: &str, family: ModelFamily) {
        if let Some((path, value)) = self.find(name) {
            let is_none = value.as_i64() == Some(-1)
                || value.as_array().is_some_and(|items| items.is_empty());
            if !is_none {
                self.problem(format!(
                    "{path} is {}; {} has none, needs it left out",
                    words(value),
                    family.words()
                ));
            }
        }
    }

    /// A rule that these kernels fix. Where the file says nothing, the family's rule is meant.
    fn fixed(&mut self, name: &str, needed: &Value) {
        if let Some((path, value)) = self.find(name) {
            let same = match (value.as_f64(), needed.as_f64()) {
                (Some(value), Some(needed)) => value == needed,
                _ => value == needed,
            };
            if !same {
                let seen = match value {
                    Value::Array(items) if items.len() <= 4 => value.to_string(),
                    _ => words(value),
                };
                self.problem(format!("{path} is {seen}; these kernels need {needed}"));
            }
        }
    }
}

/// Whose rules, or one line that names the family that it is instead.
fn family(fields: &Fields) -> Result<ModelFamily, Vec<String>> {
    let scalar = |name: &str| {
        fields
            .scopes
            .iter()
            .rev()
            .find_map(|(_, map)| map.get(name)?.as_str())
    };
    let model_type = scalar("model_type").unwrap_or("");
    let architecture = fields
        .find("architectures")
        .and_then(|(_, list)| list.as_array()?.first()?.as_str())
        .unwrap_or("");
    // SGLang rewrites V4.1's architecture to V4's name, so the model type decides first.
    let is_v4_type = model_type == ModelFamily::V4.model_type();
    let unsaid = model_type.is_empty();
    if model_type.starts_with(ModelFamily::V41.model_type())
        || ((unsaid || is_v4_type) && architecture.starts_with("DeepseekV41"))
    {
        return Ok(ModelFamily::V41);
    }
    if is_v4_type || (unsaid && architecture.starts_with("DeepseekV4For")) {
        return Ok(ModelFamily::V4);
    }
    let needed = "deepseek_v4 (architecture DeepseekV4ForCausalLM) or deepseek_v41 \
                  (DeepseekV41ForCausalLM)";
    Err(vec![if model_type.is_empty() && architecture.is_empty() {
        format!("model_type and architectures are missing; needs {needed}")
    } else {
        format!("model_type is {model_type:?}, architecture {architecture:?}; needs {needed}")
    }])
}

fn read(fields: &mut Fields, family: ModelFamily) -> ModelConfig {
    check_fixed(fields, family);
    let num_layers = fields.int("num_hidden_layers", 1, u64::from(MAX_LAYERS)) as u32;
    let vocab = fields.multiple("vocab_size", 4);
    let num_experts = fields.size("n_routed_experts");
    let experts_per_token = fields.int("num_experts_per_tok", 1, u64::from(num_experts)) as u32;
    let num_stages = num_stages(fields, family, num_layers);
    let ratios = ratios(fields, family, num_layers, num_stages);
    let (mut layers, candidates, engram) = match family {
        ModelFamily::V4 => (v4_layers(fields, &ratios), None, None),
        ModelFamily::V41 => {
            let (layers, candidates) = v41_layers(fields, &ratios);
            (layers, candidates, engram(fields, num_layers, vocab))
        }
    };
    let target_experts = (num_experts, experts_per_token);
    let draft = draft(
        fields,
        family,
        num_stages,
        num_layers,
        vocab,
        target_experts,
    );
    // Only V4.1 has parts that see images.
    let image_token = match family == ModelFamily::V41 && fields.has("image_token_id") {
        true => Some(fields.int("image_token_id", 0, u64::from(vocab) - 1) as u32),
        false => None,
    };
    for (table_idx, table) in (0u32..).zip(engram.iter().flat_map(|engram| &engram.tables)) {
        if let Some(layer) = layers.get_mut(table.layer as usize) {
            layer.engram = Some(table_idx);
        }
    }
    let mut special_tokens: Vec<u32> = ["bos_token_id", "eos_token_id", "pad_token_id"]
        .iter()
        .filter_map(|name| fields.find(name)?.1.as_u64())
        .filter(|id| *id < u64::from(vocab))
        .map(|id| id as u32)
        .chain(image_token)
        .chain(draft.as_ref().map(|draft| draft.mask_token))
        .collect();
    special_tokens.sort_unstable();
    special_tokens.dedup();
    let block = family.scale_block();
    let step_rows = draft.as_ref().map_or(1, |draft| u64::from(draft.block) + 1);
    let config = ModelConfig {
        family,
        hidden: fields.multiple("hidden_size", block),
        vocab,
        num_heads: fields.size("num_attention_heads"),
        head_dim: fields.size("head_dim"),
        rope_dim: fields.size("qk_rope_head_dim"),
        q_lora: fields.multiple("q_lora_rank", block),
        o_groups: fields.size("o_groups"),
        o_lora: fields.multiple("o_lora_rank", block),
        window: fields.size("sliding_window"),
        num_experts,
        experts_per_token,
        moe_intermediate: fields.multiple("moe_intermediate_size", block),
        index_heads: fields.size("index_n_heads"),
        index_dim: fields.size("index_head_dim"),
        index_topk: fields.size("index_topk"),
        candidates,
        scale_block: block,
        sinkhorn_iters: fields.int("hc_sinkhorn_iters", 1, 1000) as u32,
        norm_eps: fields.positive_f32("rms_norm_eps"),
        hc_eps: fields.positive_f32("hc_eps"),
        swiglu_limit: fields.positive_f32("swiglu_limit"),
        routed_scaling: fields.positive_f32("routed_scaling_factor"),
        rope_theta: fields.positive("rope_theta"),
        compress_rope_theta: fields.positive("compress_rope_theta"),
        yarn: Yarn {
            factor: fields.positive("rope_scaling.factor"),
            beta_fast: fields.positive("rope_scaling.beta_fast"),
            beta_slow: fields.positive("rope_scaling.beta_slow"),
            original_positions: fields.positive("rope_scaling.original_max_position_embeddings"),
        },
        // One step at least.
        max_positions: fields.int("max_position_embeddings", step_rows, i32::MAX as u64),
        layers,
        engram,
        image_token,
        special_tokens,
        draft,
    };
    if config.num_heads % config.o_groups != 0 {
        fields.problem(format!(
            "num_attention_heads is {}; needs a multiple of o_groups, {}",
            config.num_heads, config.o_groups
        ));
    }
    config
}

/// Rules and sizes that are one in this family, where the file names them.
fn check_fixed(fields: &mut Fields, family: ModelFamily) {
    let (lagging, head_norm) = match family {
        ModelFamily::V4 => (false, true),
        ModelFamily::V41 => (true, false),
    };
    let block = family.scale_block();
    for name in ["rope_scaling", "quantization_config"] {
        fields.object(name);
    }
    for (name, needed) in [
        ("head_dim", Value::from(512)),
        ("qk_rope_head_dim", Value::from(64)),
        ("index_head_dim", Value::from(128)),
        ("num_key_value_heads", Value::from(1)),
        ("n_shared_experts", Value::from(1)),
        ("hc_mult", Value::from(4)),
        ("tie_word_embeddings", Value::from(false)),
        ("norm_topk_prob", Value::from(true)),
        ("hc_pre_from_prev_sublayer", Value::from(lagging)),
        ("q_head_norm", Value::from(head_norm)),
        ("scoring_func", Value::from("sqrtsoftplus")),
        ("topk_method", Value::from("noaux_tc")),
        ("expert_dtype", Value::from("fp4")),
        ("quantization_config.quant_method", Value::from("fp8")),
        ("quantization_config.scale_fmt", Value::from("ue8m0")),
        (
            "quantization_config.weight_block_size",
            Value::from(vec![block, block]),
        ),
    ] {
        fields.fixed(name, &needed);
    }
    // Older files say `type`, newer ones `rope_type`.
    fields.fixed("rope_scaling.type", &Value::from("yarn"));
    fields.fixed("rope_scaling.rope_type", &Value::from("yarn"));
    match family {
        ModelFamily::V4 => {
            for name in [
                "kv_source_layer_ids",
                "index_source_layer_ids",
                "candidate_source_layer_id",
                "engram_layer_ids",
            ] {
                fields.absent(name, family);
            }
        }
        ModelFamily::V41 => {
            fields.fixed("num_hash_layers", &Value::from(0));
            fields.fixed("engram_max_ngram_size", &Value::from(NGRAM_SIZES + 1));
            fields.fixed("engram_n_heads", &Value::from(HEADS));
        }
    }
}

/// Stages of the draft. V4's first files count the one layer of another kind of draft in
/// `num_nextn_predict_layers`: without a field of DSpark they have no draft that is served, and
/// with one the entries of `compress_ratios` behind the target's layers are the stages.
fn num_stages(fields: &mut Fields, family: ModelFamily, num_layers: u32) -> u32 {
    let most = u64::from(MAX_DRAFT_STAGES);
    let field = "num_nextn_predict_layers";
    let counted = match fields.has(field) {
        true => fields.int(field, 0, most) as u32,
        false => 0,
    };
    if family == ModelFamily::V41 {
        return counted;
    }
    let is_dspark = DSPARK_FIELDS.iter().any(|name| fields.has(name));
    let listed = fields
        .find("compress_ratios")
        .and_then(|(_, value)| value.as_array())
        .map_or(0, |ratios| ratios.len() as u64)
        .saturating_sub(u64::from(num_layers));
    if !is_dspark {
        return 0;
    }
    if listed == 0 {
        if counted == 0 {
            fields.problem(format!(
                "{field} is missing or 0; needs the draft's stages, 1 to {most}, as dspark_ fields \
                 are there"
            ));
        }
        return counted;
    }
    if listed > most || (counted > 1 && u64::from(counted) != listed) {
        fields.problem(format!(
            "compress_ratios has {listed} entries behind the {num_layers} layers, {field} is \
             {counted}; needs one number of the draft's stages, at most {most}"
        ));
    }
    listed.min(most) as u32
}

/// Every target layer's ratio.
fn ratios(fields: &mut Fields, family: ModelFamily, num_layers: u32, num_stages: u32) -> Vec<u32> {
    let allowed = family.ratios();
    let [first, second, third] = [0, 1, 2].map(|idx| allowed[idx]);
    let needed = format!(
        "{num_layers} ratios of {first}, {second} or {third}, then {num_stages} of 0 for the \
         draft's stages"
    );
    let num_layers = num_layers as usize;
    // A draft that is not served may have its entries.
    let most = match (family, num_stages) {
        (ModelFamily::V4, 0) => num_layers + MAX_DRAFT_STAGES as usize,
        _ => num_layers + num_stages as usize,
    };
    fields.need("compress_ratios", &needed, vec![0; num_layers], |value| {
        let ratios: Vec<u32> = value
            .as_array()?
            .iter()
            .map(|ratio| {
                let ratio = u32::try_from(ratio.as_u64()?).ok()?;
                allowed.contains(&ratio).then_some(ratio)
            })
            .collect::<Option<_>>()?;
        let (layers, rest) = ratios.split_at_checked(num_layers)?;
        // The draft's entries may be left away.
        let complete = rest.is_empty() || ratios.len() == most || num_stages == 0;
        let fits = complete && ratios.len() <= most && rest.iter().all(|ratio| *ratio == 0);
        fits.then(|| layers.to_vec())
    })
}

/// V4: every compressed layer has a cache of its own, and of ratio 4 an indexer.
fn v4_layers(fields: &mut Fields, ratios: &[u32]) -> Vec<LayerConfig> {
    let num_hashed = fields.int("num_hash_layers", 0, ratios.len() as u64) as u32;
    (0u32..)
        .zip(ratios)
        .map(|(layer_idx, &ratio)| LayerConfig {
            ratio,
            kv_source: (ratio != 0).then_some(layer_idx),
            index_source: (ratio == 4).then_some(layer_idx),
            candidate_source: None,
            engram: None,
            hash_gate: layer_idx < num_hashed,
        })
        .collect()
}

/// V4.1: sources of caches and selections are listed, the other layers read the nearest one.
fn v41_layers(fields: &mut Fields, ratios: &[u32]) -> (Vec<LayerConfig>, Option<CandidateConfig>) {
    let num_layers = ratios.len() as u32;
    let kv_sources = fields.ids("kv_source_layer_ids", num_layers);
    let index_sources = fields.ids("index_source_layer_ids", num_layers);
    let candidates = candidates(fields, num_layers);
    let mut layers = Vec::new();
    for layer_idx in 0..num_layers {
        let ratio = ratios[layer_idx as usize];
        let mut layer = LayerConfig {
            ratio,
            kv_source: None,
            index_source: None,
            candidate_source: None,
            engram: None,
            hash_gate: false,
        };
        if ratio == 0 {
            for (name, sources) in [
                ("kv_source_layer_ids", &kv_sources),
                ("index_source_layer_ids", &index_sources),
            ] {
                if sources.contains(&layer_idx) {
                    fields.problem(format!(
                        "{name} names layer {layer_idx}, whose compress_ratios entry is 0; needs 1 \
                         or 2"
                    ));
                }
            }
        } else {
            let nearest = |sources: &[u32]| {
                let same_ratio = |source: &u32| ratios[*source as usize] == ratio;
                sources
                    .iter()
                    .rev()
                    .copied()
                    .find(|s| *s <= layer_idx && same_ratio(s))
            };
            layer.kv_source = nearest(&kv_sources);
            layer.index_source = nearest(&index_sources);
            for (name, source) in [
                ("kv_source_layer_ids", layer.kv_source),
                ("index_source_layer_ids", layer.index_source),
            ] {
                if source.is_none() {
                    fields.problem(format!(
                        "{name} names no layer of ratio {ratio} at or before layer {layer_idx}; \
                         needs one"
                    ));
                }
            }
            // A selection is entries of the cache that its source scored.
            if layer.index_source < layer.kv_source {
                fields.problem(format!(
                    "index_source_layer_ids names no layer between layer {layer_idx} and its KV \
                     source {}; needs one",
                    layer.kv_source.unwrap_or_default()
                ));
            }
        }
        layers.push(layer);
    }
    if let Some(candidates) = candidates {
        let publisher = candidates.layer;
        if layers[publisher as usize].index_source != Some(publisher) {
            fields.problem(format!(
                "candidate_source_layer_id is {publisher}; needs one of index_source_layer_ids"
            ));
        }
        for source in index_sources.iter().filter(|source| **source > publisher) {
            let same_cache =
                layers[*source as usize].kv_source == layers[publisher as usize].kv_source;
            layers[*source as usize].candidate_source = same_cache.then_some(publisher);
        }
    }
    (layers, candidates)
}

fn candidates(fields: &mut Fields, num_layers: u32) -> Option<CandidateConfig> {
    // -1 is how files say that there is none.
    match fields.find("candidate_source_layer_id") {
        None => return None,
        Some((_, value)) if value.as_i64() == Some(-1) => return None,
        Some(_) => {}
    }
    Some(CandidateConfig {
        layer: fields.int("candidate_source_layer_id", 0, u64::from(num_layers) - 1) as u32,
        num_blocks: fields.size("candidate_topk_blocks"),
        block_size: fields.size("candidate_block_size"),
    })
}

fn engram(fields: &mut Fields, num_layers: u32, vocab: u32) -> Option<EngramConfig> {
    if !fields.has("engram_layer_ids") {
        return None;
    }
    let layers = fields.ids("engram_layer_ids", num_layers);
    if layers.is_empty() {
        return None;
    }
    if layers.len() > MAX_ENGRAMS {
        fields.problem(format!(
            "engram_layer_ids names {} layers; needs at most {MAX_ENGRAMS}",
            layers.len()
        ));
        return None;
    }
    let vocab_size = fields.int("engram_vocab_size", 1, MAX_SIZE);
    let compressed_vocab = fields.int("engram_compressed_vocab_size", 1, MAX_SIZE - 1) as u32;
    let config = EngramConfig {
        tables: engram::tables(&layers, vocab_size, compressed_vocab),
        head_dim: fields.multiple("engram_head_dim", 32),
        pad_token: fields.int("engram_pad_token_id", 0, u64::from(vocab) - 1) as u32,
        compressed_vocab,
    };
    // The sizes in the file prove that the primes are the ones that the tables were built with.
    if let Some((path, value)) = fields.find("engram_num_embeddings") {
        let rows: Vec<u64> = config.tables.iter().map(|table| table.num_rows()).collect();
        let seen: Option<Vec<u64>> = value
            .as_array()
            .and_then(|rows| rows.iter().map(Value::as_u64).collect());
        if seen.as_ref() != Some(&rows) {
            let seen = seen.map_or_else(|| words(value), |seen| format!("{seen:?}"));
            fields.problem(format!(
                "{path} is {seen}; needs {rows:?}, the sums of the primes from engram_vocab_size \
                 {vocab_size} on"
            ));
        }
    }
    Some(config)
}

/// The draft. V4's has the target's experts, `(routed, a row)`, where its file does not say
/// otherwise.
fn draft(
    fields: &mut Fields,
    family: ModelFamily,
    num_stages: u32,
    num_layers: u32,
    vocab: u32,
    target_experts: (u32, u32),
) -> Option<DraftConfig> {
    if num_stages == 0 {
        return None;
    }
    let own = |fields: &Fields, name| family == ModelFamily::V41 || fields.has(name);
    let num_experts = match own(fields, "dspark_n_routed_experts") {
        true => fields.size("dspark_n_routed_experts"),
        false => target_experts.0,
    };
    let experts_per_token = match own(fields, "dspark_num_experts_per_tok") {
        true => fields.int("dspark_num_experts_per_tok", 1, u64::from(num_experts)) as u32,
        false => target_experts.1,
    };
    if experts_per_token > num_experts {
        fields.problem(format!(
            "dspark_n_routed_experts is {num_experts}; needs num_experts_per_tok, \
             {experts_per_token}, or dspark_num_experts_per_tok beside it"
        ));
    }
    let block = fields.int("dspark_block_size", 1, 15) as u32;
    let mask_token = fields.int("dspark_noise_token_id", 0, u64::from(vocab) - 1) as u32;
    let num_problems = fields.problems.len();
    let target_layers = fields.ids("dspark_target_layer_ids", num_layers);
    if fields.problems.len() == num_problems && target_layers.len() != num_stages as usize {
        fields.problem(format!(
            "dspark_target_layer_ids names {} layers; needs {num_stages}, one for each stage of \
             the draft",
            target_layers.len()
        ));
    }
    Some(DraftConfig {
        num_stages,
        block,
        mask_token,
        target_layers,
        markov_rank: fields.size("dspark_markov_rank"),
        num_experts,
        experts_per_token,
    })
}

//! Weights and caches of a rank in bytes.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::tensors::{WeightGroup, tensors};
use crate::config::{ModelConfig, ModelFamily};
use crate::words::one_line;

/// Stored bytes of one latent or window row: 448 codes, 64 bf16 numbers, 7 scales and a pad.
const KV_ROW_BYTES: u64 = 584;
/// A page of rows is padded to a multiple of it.
const KV_PAGE_ALIGN: u64 = 576;
/// Keys of one page of the index pool.
const INDEX_SLOTS_PER_PAGE: u64 = 64;
/// Bytes that a compressor keeps a row and channel: a latent and its gate, fp32.
const STATE_CHANNEL_BYTES: u64 = 2 * 4;
/// What `--context` and `--requests` may ask for.
const MAX_LOAD: u64 = 1 << 32;
const MAX_PAGE: u64 = 1 << 20;

/// Rows that a request brings to a verify step: the anchor and its drafts.
#[must_use]
pub fn verify_rows(config: &ModelConfig) -> u32 {
    config.draft.as_ref().map_or(1, |draft| draft.block + 1)
}

/// Rows of a compressor's state ring, a power of two. V4.1, of a request: the even row of a pair
/// that straddles two steps, and the rows of the step. V4, ratio 4, of a page: the two blocks that
/// an entry is made of, and drafts that were rejected; the ring of ratio 128, of a request, has
/// `REQUEST_RINGS` times as many.
///
/// ```
/// use lowlat_core::config::{ModelConfig, built_in};
/// use lowlat_core::plan::state_ring;
/// let ring = |name| state_ring(&ModelConfig::from_json(built_in(name).unwrap()).unwrap());
/// assert_eq!((ring("v41-flash"), ring("v4-flash")), (8, 16));
/// ```
#[must_use]
pub fn state_ring(config: &ModelConfig) -> u32 {
    let rows = match config.family {
        ModelFamily::V4 => 8 + verify_rows(config) - 1,
        ModelFamily::V41 => 2 + verify_rows(config),
    };
    rows.next_power_of_two()
}

/// Rows of V4's ring of ratio 128 for one of [`state_ring`].
pub const REQUEST_RINGS: u32 = 16;

/// Tokens a page where nobody says otherwise: 256, and for models with a small window 64 (V4.1) or
/// 128 (V4).
#[must_use]
pub fn default_page_size(config: &ModelConfig) -> u32 {
    if config.window <= 64 {
        config.family.page_unit().max(64)
    } else {
        256
    }
}

/// What the plan is asked beside the model. In JSON every field may be left out, and a field that
/// is not listed here is refused.
///
/// ```
/// use lowlat_core::plan::PlanOptions;
/// let options = PlanOptions::from_json(r#"{"tp_size": 4, "context": 131072}"#).unwrap();
/// assert_eq!((options.tp_size, options.context, options.requests), (4, Some(131_072), 1));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PlanOptions {
    /// Ranks; 1 when left out.
    pub tp_size: u32,
    /// Tokens a page; [`default_page_size`] when left out.
    pub page_size: Option<u64>,
    /// Tokens of each request; no load is planned when left out.
    pub context: Option<u64>,
    /// Requests at a time; 1 when left out.
    pub requests: u64,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self {
            tp_size: 1,
            page_size: None,
            context: None,
            requests: 1,
        }
    }
}

/// Why there is no plan, in one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", one_line(.0))]
pub struct PlanError(String);

impl PlanOptions {
    /// Reads options from a JSON object.
    ///
    /// # Errors
    /// A field that is unknown or of another type.
    pub fn from_json(text: &str) -> Result<Self, PlanError> {
        serde_json::from_str(text).map_err(|error| PlanError(format!("options: {error}")))
    }
}

/// One rank's weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankWeights {
    /// The rank.
    pub tp_rank: u32,
    /// Bytes of each group that the model has.
    pub groups: BTreeMap<WeightGroup, u64>,
    /// Their sum.
    pub weight_bytes: u64,
}

/// What a token and a request take in the caches. Every rank holds all of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KvPlan {
    /// Tokens a page.
    pub page_size: u64,
    /// Compressed latents, a token of context.
    pub latent_bytes_per_token: f64,
    /// Index keys, a token of context.
    pub index_bytes_per_token: f64,
    /// Rows of the target layers' sliding windows, a token that is kept.
    pub window_bytes_per_token: f64,
    /// The same of the draft's layers.
    pub draft_window_bytes_per_token: f64,
    /// Compressor state, a request.
    pub state_bytes_per_request: u64,
    /// Compressor state that lies in the pages of the windows, a token that is kept (V4).
    pub state_bytes_per_token: f64,
}

/// Cache bytes that a step reads; weights are apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct KvReads {
    /// Window rows of one layer, a request: all its rows of a verify step share them.
    pub window_bytes_per_layer: u64,
    /// Selected latents of one compressed layer, a row of the step.
    pub selected_bytes_per_layer: u64,
    /// Latents of all the layers that attend to every one of theirs, a request (V4, ratio 128).
    pub whole_bytes: u64,
    /// Index keys that all index sources score, a request.
    pub index_bytes: u64,
}

/// The caches under a load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KvLoad {
    /// Tokens of each request.
    pub context: u64,
    /// Requests.
    pub requests: u64,
    /// Compressed latents.
    pub latent_bytes: u64,
    /// Index keys.
    pub index_bytes: u64,
    /// Compressor state of the requests.
    pub state_bytes: u64,
    /// Window rows, and the compressor state in their pages, where they are kept for the whole
    /// context, as `lowlat replay` does.
    pub window_bytes_whole: u64,
    /// The same where a server keeps only the pages that a window touches.
    pub window_bytes_least: u64,
    /// All caches with whole windows.
    pub total_bytes_whole: u64,
    /// All caches with the pages of a window only.
    pub total_bytes_least: u64,
    /// What one step reads of them.
    pub reads: KvReads,
}

/// What a model takes of each rank's memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryPlan {
    /// Ranks.
    pub tp_size: u32,
    /// Weights of each rank, by rank. They differ where Engram columns have different lengths.
    pub ranks: Vec<RankWeights>,
    /// Weights before any split.
    pub checkpoint_bytes: u64,
    /// Caches, a token and a request.
    pub kv: KvPlan,
    /// Caches under the load that was asked for.
    pub load: Option<KvLoad>,
}

impl MemoryPlan {
    /// The plan of `config` under `options`.
    ///
    /// ```
    /// use lowlat_core::config::{ModelConfig, built_in};
    /// use lowlat_core::plan::{MemoryPlan, PlanOptions};
    /// let config = ModelConfig::from_json(built_in("tiny-v41").unwrap()).unwrap();
    /// let plan = MemoryPlan::new(&config, &PlanOptions::default()).unwrap();
    /// assert_eq!(plan.ranks[0].weight_bytes, plan.checkpoint_bytes);
    /// let odd = PlanOptions { tp_size: 3, ..PlanOptions::default() };
    /// let error = MemoryPlan::new(&config, &odd).unwrap_err().to_string();
    /// assert_eq!(error, "tp_size is 3; embed.weight [512, 128] needs one that divides its parts");
    /// ```
    ///
    /// # Errors
    /// Ranks that do not divide a tensor, a page or a load that is out of range.
    pub fn new(config: &ModelConfig, options: &PlanOptions) -> Result<Self, PlanError> {
        let refuse = |words: String| Err(PlanError(words));
        let tp_size = options.tp_size;
        if !(1..=64).contains(&tp_size) {
            return refuse(format!("tp_size is {tp_size}; needs 1 to 64"));
        }
        let tensors = tensors(config);
        if let Some(odd) = tensors.iter().find(|tensor| !tensor.divides(tp_size)) {
            return refuse(format!(
                "tp_size is {tp_size}; {} {:?} needs one that divides its parts",
                odd.name, odd.shape
            ));
        }
        let page_size = options
            .page_size
            .unwrap_or_else(|| u64::from(default_page_size(config)));
        let unit = u64::from(config.family.page_unit());
        if page_size % unit != 0 || !(unit..=MAX_PAGE).contains(&page_size) {
            return refuse(format!(
                "page_size is {page_size}; needs a multiple of {unit} from {unit} to {MAX_PAGE}"
            ));
        }
        for (name, value) in [
            ("context", options.context),
            ("requests", Some(options.requests)),
        ] {
            if let Some(value) = value.filter(|value| !(1..=MAX_LOAD).contains(value)) {
                return refuse(format!("{name} is {value}; needs 1 to {MAX_LOAD}"));
            }
        }
        let ranks = (0..tp_size)
            .map(|tp_rank| {
                let bytes = |group: WeightGroup| {
                    let of_group = tensors.iter().filter(|tensor| tensor.group == group);
                    saturating_sum(of_group.map(|tensor| tensor.rank_bytes(tp_rank, tp_size)))
                };
                let groups: BTreeMap<_, _> = WeightGroup::ALL
                    .iter()
                    .map(|group| (*group, bytes(*group)))
                    .filter(|(_, bytes)| *bytes > 0)
                    .collect();
                let weight_bytes = saturating_sum(groups.values().copied());
                RankWeights {
                    tp_rank,
                    groups,
                    weight_bytes,
                }
            })
            .collect();
        let caches = Caches { config, page_size };
        Ok(Self {
            tp_size,
            ranks,
            checkpoint_bytes: saturating_sum(tensors.iter().map(|tensor| tensor.bytes())),
            kv: caches.plan(),
            load: options
                .context
                .map(|context| caches.load(context, options.requests)),
        })
    }

    /// The plan as JSON.
    ///
    /// # Panics
    /// Never: it is plain data.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain data")
    }

    /// The plan as a table of at most 100 columns: the rank with the most weights, and the caches.
    ///
    /// ```
    /// use lowlat_core::config::{ModelConfig, built_in};
    /// use lowlat_core::plan::{MemoryPlan, PlanOptions};
    /// let config = ModelConfig::from_json(built_in("v41-flash").unwrap()).unwrap();
    /// let options = PlanOptions { tp_size: 4, ..PlanOptions::default() };
    /// let text = MemoryPlan::new(&config, &options).unwrap().to_text();
    /// assert!(text.starts_with("memory of a rank (4 ranks)\n"), "{text}");
    /// ```
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        let ranks = match self.tp_size {
            1 => "1 rank".to_owned(),
            ranks => format!("{ranks} ranks"),
        };
        let mut line = |words: &str, value: String, note: &str| {
            let row = format!("  {words:<28}{value:>12}  {note}");
            // A String takes everything.
            let _ = writeln!(text, "{}", row.trim_end());
        };
        // The last of equals would be as good; there is at least one rank.
        if let Some(most) = self.ranks.iter().max_by_key(|rank| rank.weight_bytes) {
            for (group, bytes) in &most.groups {
                line(group.words(), size(*bytes as f64), "");
            }
            let note = match self
                .ranks
                .iter()
                .all(|r| r.weight_bytes == most.weight_bytes)
            {
                true => "",
                false => "on the rank with the longest engram columns",
            };
            line("weights", size(most.weight_bytes as f64), note);
        }
        let kv = &self.kv;
        let compressed = kv.latent_bytes_per_token + kv.index_bytes_per_token;
        line(
            "kv a context token",
            size(compressed),
            "compressed latents and index keys",
        );
        let window = kv.window_bytes_per_token + kv.draft_window_bytes_per_token;
        line(
            "kv a token in the window",
            size(window),
            "target and draft layers",
        );
        if kv.state_bytes_per_token > 0.0 {
            let note = "in the pages of the windows";
            line(
                "compressor state a token",
                size(kv.state_bytes_per_token),
                note,
            );
        }
        let state = kv.state_bytes_per_request as f64;
        line("compressor state a request", size(state), "");
        if let Some(load) = &self.load {
            let words = format!("kv of {} x {}", load.requests, load.context);
            let whole = "windows kept for the whole context (lowlat replay)";
            line(&words, size(load.total_bytes_whole as f64), whole);
            let least = "only the pages that a window touches";
            line("", size(load.total_bytes_least as f64), least);
        }
        format!("memory of a rank ({ranks})\n{text}")
    }
}

/// Bytes in a unit that leaves one to three digits before the point.
fn size(bytes: f64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    let mut value = bytes;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    match unit {
        0 => format!("{value:.0} B"),
        _ => format!("{value:.2} {}", units[unit]),
    }
}

fn saturating_sum(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

struct Caches<'a> {
    config: &'a ModelConfig,
    page_size: u64,
}

impl Caches<'_> {
    /// Bytes of a page of `slots` rows.
    fn page_bytes(slots: u64) -> u64 {
        (slots * KV_ROW_BYTES).next_multiple_of(KV_PAGE_ALIGN)
    }

    /// Ratio of every layer that owns a compressed cache.
    fn ratios(&self) -> impl Iterator<Item = u64> + '_ {
        let ratio = |layer: u32| u64::from(self.config.layers[layer as usize].ratio.max(1));
        self.config.kv_sources().map(ratio)
    }

    /// The ratios of those that have index keys.
    fn index_ratios(&self) -> impl Iterator<Item = u64> + '_ {
        let layers = &self.config.layers;
        let sources = self
            .config
            .kv_sources()
            .map(|layer| &layers[layer as usize]);
        let indexed = sources.filter(|layer| layer.index_source.is_some());
        indexed.map(|layer| u64::from(layer.ratio.max(1)))
    }

    /// Stored bytes of one index key: 128 codes, V4.1 of four bits with 4 scales, V4 of eight with
    /// one.
    fn index_row_bytes(&self) -> u64 {
        match self.config.family {
            ModelFamily::V4 => 128 + 4,
            ModelFamily::V41 => 64 + 4,
        }
    }

    fn num_stages(&self) -> u64 {
        let draft = self.config.draft.as_ref();
        draft.map_or(0, |draft| u64::from(draft.num_stages))
    }

    /// Compressors of that ratio.
    fn num_of(&self, ratio: u64) -> u64 {
        self.ratios().filter(|of| *of == ratio).count() as u64
    }

    fn state_bytes_per_request(&self) -> u64 {
        let (rings, ratio) = match self.config.family {
            ModelFamily::V4 => (REQUEST_RINGS, 128),
            ModelFamily::V41 => (1, 2),
        };
        let rows = u64::from(rings * state_ring(self.config));
        self.num_of(ratio) * rows * u64::from(self.config.head_dim) * STATE_CHANNEL_BYTES
    }

    /// V4, ratio 4: each page has a ring, of the latents' compressor and the index keys'. Blocks
    /// overlap, so a token has two of each.
    fn state_page_bytes(&self) -> u64 {
        if self.config.family != ModelFamily::V4 {
            return 0;
        }
        let channels = 2 * u64::from(self.config.head_dim + self.config.index_dim);
        let rows = u64::from(state_ring(self.config));
        self.num_of(4) * rows * channels * STATE_CHANNEL_BYTES
    }

    fn latent_page_bytes(&self) -> u64 {
        self.ratios()
            .map(|ratio| Self::page_bytes(self.page_size / ratio))
            .sum()
    }

    fn plan(&self) -> KvPlan {
        let a_token = |page_bytes: u64| page_bytes as f64 / self.page_size as f64;
        let window = a_token(Self::page_bytes(self.page_size));
        let index: f64 = self
            .index_ratios()
            .map(|ratio| self.index_row_bytes() as f64 / ratio as f64)
            .sum();
        KvPlan {
            page_size: self.page_size,
            latent_bytes_per_token: a_token(self.latent_page_bytes()),
            index_bytes_per_token: index,
            window_bytes_per_token: window * self.config.layers.len() as f64,
            draft_window_bytes_per_token: window * self.num_stages() as f64,
            state_bytes_per_request: self.state_bytes_per_request(),
            state_bytes_per_token: a_token(self.state_page_bytes()),
        }
    }

    fn load(&self, context: u64, requests: u64) -> KvLoad {
        let pages_each = context.div_ceil(self.page_size);
        let pages = pages_each.saturating_mul(requests);
        let layers = self.config.layers.len() as u64 + self.num_stages();
        let window_page = layers * Self::page_bytes(self.page_size) + self.state_page_bytes();
        // A step's rows see a window before the first of them; where it begins within a page
        // nobody knows, so one more page may be touched.
        let seen = u64::from(self.config.window) + u64::from(verify_rows(self.config)) - 1;
        let touched = (seen.div_ceil(self.page_size) + 1).min(pages_each);
        let index_pages = |ratio| {
            let slots = pages.saturating_mul(self.page_size / ratio);
            slots.div_ceil(INDEX_SLOTS_PER_PAGE)
        };
        let index_page = INDEX_SLOTS_PER_PAGE * self.index_row_bytes();
        let index_bytes = saturating_sum(
            self.index_ratios()
                .map(|ratio| index_pages(ratio).saturating_mul(index_page)),
        );
        let latent_bytes = pages.saturating_mul(self.latent_page_bytes());
        let state_bytes = requests.saturating_mul(self.state_bytes_per_request());
        let window_bytes_whole = pages.saturating_mul(window_page);
        let window_bytes_least = requests.saturating_mul(touched).saturating_mul(window_page);
        let total =
            |window| saturating_sum([latent_bytes, index_bytes, state_bytes, window].into_iter());
        KvLoad {
            context,
            requests,
            latent_bytes,
            index_bytes,
            state_bytes,
            window_bytes_whole,
            window_bytes_least,
            total_bytes_whole: total(window_bytes_whole),
            total_bytes_least: total(window_bytes_least),
            reads: self.reads(context),
        }
    }

    fn reads(&self, context: u64) -> KvReads {
        let rows = u64::from(self.config.window) + u64::from(verify_rows(self.config)) - 1;
        let index_bytes = self.config.index_sources().map(|layer| {
            let layer = &self.config.layers[layer as usize];
            let keys = context / u64::from(layer.ratio.max(1));
            let scored = match (layer.candidate_source, self.config.candidates) {
                (Some(_), Some(blocks)) => {
                    keys.min(u64::from(blocks.num_blocks) * u64::from(blocks.block_size))
                }
                _ => keys,
            };
            scored * self.index_row_bytes()
        });
        let layers = self.config.layers.iter();
        let whole =
            layers.filter(|layer| layer.kv_source.is_some() && layer.index_source.is_none());
        let whole_bytes = whole.map(|layer| context / u64::from(layer.ratio) * KV_ROW_BYTES);
        KvReads {
            window_bytes_per_layer: rows.min(context) * KV_ROW_BYTES,
            selected_bytes_per_layer: u64::from(self.config.index_topk) * KV_ROW_BYTES,
            whole_bytes: whole_bytes.sum(),
            index_bytes: index_bytes.sum(),
        }
    }
}

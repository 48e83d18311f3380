//! Which tensors a checkpoint of a model has, and what of each a rank holds.

use serde::Serialize;

use crate::config::{ModelConfig, ModelFamily};

/// Codes that share one scale in the four-bit experts.
const FP4_GROUP: u64 = 32;
/// What one layer's hyper-connection computes: 4 pre, 4 post and 16 mixing numbers.
const HC_OUTPUTS: u64 = 24;
/// Copies of the residual stream.
const NUM_STREAMS: u64 = 4;

/// Element type of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightDtype {
    /// Signed 32 bits.
    I32,
    /// Signed 64 bits.
    I64,
    /// IEEE single.
    F32,
    /// bfloat16.
    Bf16,
    /// OCP e4m3fn codes.
    E4m3,
    /// Powers of two, `2^(byte - 127)`.
    Ue8m0,
    /// Two e2m1 codes a byte; shapes count bytes.
    Fp4x2,
}

impl WeightDtype {
    /// Bytes of one element as shapes count them.
    ///
    /// ```
    /// use lowlat_core::plan::WeightDtype;
    /// assert_eq!((WeightDtype::Bf16.bytes(), WeightDtype::Fp4x2.bytes()), (2, 1));
    /// ```
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::E4m3 | Self::Ue8m0 | Self::Fp4x2 => 1,
            Self::Bf16 => 2,
            Self::I32 | Self::F32 => 4,
            Self::I64 => 8,
        }
    }
}

/// What a weight is for. The draft's layers count as [`WeightGroup::Draft`] whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightGroup {
    /// Projections into queries and keys, compressors, indexers.
    Attention,
    /// `wo_a` and `wo_b`.
    OProjection,
    /// Routed experts.
    Experts,
    /// Shared experts.
    SharedExpert,
    /// The gate in front of the experts, and V4's table of experts by token.
    Gate,
    /// Hyper-connections and the norms of a sublayer's input.
    Mixing,
    /// Rows of the n-gram memory.
    EngramTables,
    /// What turns a looked-up row into a part of the residual, and the token map.
    EngramProjection,
    /// The input embedding.
    Embedding,
    /// The output head and the norm before it.
    Head,
    /// The draft's stages and its Markov head.
    Draft,
}

impl WeightGroup {
    /// Every group, in the order of reports.
    pub const ALL: [Self; 11] = [
        Self::Attention,
        Self::OProjection,
        Self::Experts,
        Self::SharedExpert,
        Self::Gate,
        Self::Mixing,
        Self::EngramTables,
        Self::EngramProjection,
        Self::Embedding,
        Self::Head,
        Self::Draft,
    ];

    /// The group in words.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Attention => "attention",
            Self::OProjection => "o-projection",
            Self::Experts => "experts",
            Self::SharedExpert => "shared expert",
            Self::Gate => "gate",
            Self::Mixing => "mHC and norms",
            Self::EngramTables => "engram tables",
            Self::EngramProjection => "engram projection",
            Self::Embedding => "embedding",
            Self::Head => "head",
            Self::Draft => "draft",
        }
    }
}

/// How a tensor is split over the ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Split {
    /// Every rank has all of it.
    Whole,
    /// Equal parts of this dimension.
    Dim(usize),
    /// Whole columns of an Engram table, equally many a rank: dimension 0 has so many rows of
    /// each column, one column after the other.
    Columns(Vec<u64>),
}

/// One weight of a checkpoint, with the experts of a layer stacked in its first dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedTensor {
    /// Published name; of stacked experts the one without the expert's number.
    pub name: String,
    /// Element type.
    pub dtype: WeightDtype,
    /// Element type on a rank: where it is another one, every element fits it.
    pub rank_dtype: WeightDtype,
    /// What it is for.
    pub group: WeightGroup,
    /// Elements of each dimension before any split.
    pub shape: Vec<u64>,
    /// How it is split.
    pub split: Split,
}

impl PlannedTensor {
    /// The experts that are stacked here: a checkpoint has a tensor for each.
    #[must_use]
    pub fn num_experts(&self) -> Option<u64> {
        self.name.contains(".ffn.experts.").then(|| self.shape[0])
    }

    /// Published name of one expert's tensor; the tensor's own where no experts are stacked.
    ///
    /// ```
    /// use lowlat_core::config::{ModelConfig, built_in};
    /// let config = ModelConfig::from_json(built_in("tiny-v41").unwrap()).unwrap();
    /// let tensors = lowlat_core::plan::tensors(&config);
    /// let name = "layers.3.ffn.experts.w1.scale";
    /// let w1 = tensors.iter().find(|tensor| tensor.name == name).unwrap();
    /// assert_eq!(w1.expert_name(12), "layers.3.ffn.experts.12.w1.scale");
    /// ```
    #[must_use]
    pub fn expert_name(&self, expert: u64) -> String {
        match self.num_experts() {
            Some(_) => {
                let numbered = format!(".ffn.experts.{expert}.");
                self.name.replace(".ffn.experts.", &numbered)
            }
            None => self.name.clone(),
        }
    }

    /// Elements of each dimension of one tensor of the checkpoint: without the experts'.
    #[must_use]
    pub fn file_shape(&self) -> &[u64] {
        match self.num_experts() {
            Some(_) => &self.shape[1..],
            None => &self.shape,
        }
    }

    /// Indexes of the split dimension that a rank holds: first and behind the last; `None` where
    /// nothing is split. `tp_size` divides the dimension, or the number of columns.
    #[must_use]
    pub fn rank_range(&self, tp_rank: u32, tp_size: u32) -> Option<(usize, u64, u64)> {
        let (rank, size) = (u64::from(tp_rank), u64::from(tp_size));
        match &self.split {
            Split::Whole => None,
            Split::Dim(dim) => {
                let local = self.shape[*dim] / size;
                Some((*dim, rank * local, (rank + 1) * local))
            }
            Split::Columns(rows) => {
                let until = |rank: u64| {
                    let columns = rank * rows.len() as u64 / size;
                    rows[..columns as usize].iter().sum()
                };
                Some((0, until(rank), until(rank + 1)))
            }
        }
    }

    /// Elements of each dimension on a rank.
    #[must_use]
    pub fn rank_shape(&self, tp_rank: u32, tp_size: u32) -> Vec<u64> {
        let mut shape = self.shape.clone();
        if let Some((dim, first, last)) = self.rank_range(tp_rank, tp_size) {
            shape[dim] = last - first;
        }
        shape
    }

    /// Bytes before any split; `u64::MAX` where they are more.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        product(&self.shape, self.dtype)
    }

    /// Bytes on a rank; `u64::MAX` where they are more.
    #[must_use]
    pub fn rank_bytes(&self, tp_rank: u32, tp_size: u32) -> u64 {
        product(&self.rank_shape(tp_rank, tp_size), self.rank_dtype)
    }

    /// Whether equal parts come out for `tp_size` ranks, in whole scale groups.
    pub(super) fn divides(&self, tp_size: u32) -> bool {
        let size = u64::from(tp_size);
        match &self.split {
            Split::Whole => true,
            Split::Dim(dim) => self.shape[*dim] % size == 0,
            Split::Columns(rows) => rows.len() as u64 % size == 0,
        }
    }
}

fn product(shape: &[u64], dtype: WeightDtype) -> u64 {
    shape
        .iter()
        .fold(dtype.bytes(), |bytes, dim| bytes.saturating_mul(*dim))
}

/// Every weight of the model, layer after layer. `engram.token_map`, which is made from the
/// tokenizer, is among them.
///
/// ```
/// use lowlat_core::config::{ModelConfig, built_in};
/// let config = ModelConfig::from_json(built_in("v41-flash").unwrap()).unwrap();
/// let tensors = lowlat_core::plan::tensors(&config);
/// assert_eq!(tensors[0].name, "embed.weight");
/// assert_eq!(tensors[0].shape, [129_280, 5120]);
/// ```
#[must_use]
pub fn tensors(config: &ModelConfig) -> Vec<PlannedTensor> {
    let mut list = List {
        config,
        tensors: Vec::new(),
    };
    let (vocab, hidden) = (u64::from(config.vocab), u64::from(config.hidden));
    let split = Split::Dim(0);
    list.bf16(
        "embed.weight",
        WeightGroup::Embedding,
        &[vocab, hidden],
        split.clone(),
    );
    list.bf16("head.weight", WeightGroup::Head, &[vocab, hidden], split);
    list.bf16("norm.weight", WeightGroup::Head, &[hidden], Split::Whole);
    list.collapse("", WeightGroup::Head);
    if config.engram.is_some() {
        let (group, dtype) = (WeightGroup::EngramProjection, WeightDtype::I64);
        list.add("engram.token_map", dtype, group, &[vocab], Split::Whole);
    }
    for layer_idx in 0..config.layers.len() {
        list.target_layer(layer_idx);
    }
    list.draft();
    list.tensors
}

struct List<'a> {
    config: &'a ModelConfig,
    tensors: Vec<PlannedTensor>,
}

impl List<'_> {
    fn add(
        &mut self,
        name: &str,
        dtype: WeightDtype,
        group: WeightGroup,
        shape: &[u64],
        split: Split,
    ) {
        self.tensors.push(PlannedTensor {
            name: name.to_owned(),
            dtype,
            rank_dtype: dtype,
            group,
            shape: shape.to_vec(),
            split,
        });
    }

    /// What V4 collapses the residual's streams with, for a head; V4.1 has nothing of its own.
    fn collapse(&mut self, prefix: &str, group: WeightGroup) {
        if self.config.family == ModelFamily::V4 {
            let name = |tail: &str| format!("{prefix}hc_head_{tail}");
            let shape = [NUM_STREAMS, NUM_STREAMS * u64::from(self.config.hidden)];
            self.f32(&name("fn"), group, &shape, Split::Whole);
            self.f32(&name("base"), group, &[NUM_STREAMS], Split::Whole);
            self.f32(&name("scale"), group, &[1], Split::Whole);
        }
    }

    /// V4's compressor: both projections, an offset for each place of a block, a norm. Blocks of
    /// ratio 4 overlap, so each token is projected twice.
    fn pooling(&mut self, prefix: &str, group: WeightGroup, ratio: u32, dim: u64) {
        let name = |tail: &str| format!("{prefix}compressor.{tail}");
        let width = if ratio == 4 { 2 * dim } else { dim };
        let projection = [width, u64::from(self.config.hidden)];
        self.bf16(&name("wkv.weight"), group, &projection, Split::Whole);
        self.bf16(&name("wgate.weight"), group, &projection, Split::Whole);
        let places = [u64::from(ratio), width];
        self.f32(&name("ape"), group, &places, Split::Whole);
        self.bf16(&name("norm.weight"), group, &[dim], Split::Whole);
    }

    fn bf16(&mut self, name: &str, group: WeightGroup, shape: &[u64], split: Split) {
        self.add(name, WeightDtype::Bf16, group, shape, split);
    }

    fn f32(&mut self, name: &str, group: WeightGroup, shape: &[u64], split: Split) {
        self.add(name, WeightDtype::F32, group, shape, split);
    }

    /// Codes and a scale for every square block.
    fn fp8(&mut self, name: &str, group: WeightGroup, shape: [u64; 2], split: Split) {
        let block = u64::from(self.config.scale_block);
        let scales = shape.map(|dim| dim / block);
        let (weight, scale) = (format!("{name}.weight"), format!("{name}.scale"));
        self.add(&weight, WeightDtype::E4m3, group, &shape, split.clone());
        self.add(&scale, WeightDtype::Ue8m0, group, &scales, split);
    }

    /// Codes and a scale for every 32 of a row, of all experts.
    fn fp4(&mut self, name: &str, group: WeightGroup, shape: [u64; 3], split: Split) {
        let [experts, n, k] = shape;
        let (weight, scale) = (format!("{name}.weight"), format!("{name}.scale"));
        let codes = [experts, n, k / 2];
        let scales = [experts, n, k / FP4_GROUP];
        self.add(&weight, WeightDtype::Fp4x2, group, &codes, split.clone());
        self.add(&scale, WeightDtype::Ue8m0, group, &scales, split);
    }

    /// What target layers and draft stages have in common. `draft` takes the place of every
    /// group where it is given.
    fn layer(
        &mut self,
        prefix: &str,
        num_experts: u32,
        hash_gate: bool,
        draft: Option<WeightGroup>,
    ) {
        let group = |own| draft.unwrap_or(own);
        let config = self.config;
        let hidden = u64::from(config.hidden);
        let (q_lora, head_dim) = (u64::from(config.q_lora), u64::from(config.head_dim));
        let (heads, experts) = (u64::from(config.num_heads), u64::from(num_experts));
        let inner = u64::from(config.moe_intermediate);
        let groups_out = u64::from(config.o_groups) * u64::from(config.o_lora);
        let group_in = heads / u64::from(config.o_groups).max(1) * head_dim;
        let name = |tail: &str| format!("{prefix}{tail}");

        let mixing = group(WeightGroup::Mixing);
        for sublayer in ["attn", "ffn"] {
            let name = |tail: &str| format!("{prefix}hc_{sublayer}_{tail}");
            let shape = [HC_OUTPUTS, NUM_STREAMS * hidden];
            self.f32(&name("fn"), mixing, &shape, Split::Whole);
            self.f32(&name("base"), mixing, &[HC_OUTPUTS], Split::Whole);
            self.f32(&name("scale"), mixing, &[3], Split::Whole);
        }
        self.bf16(&name("attn_norm.weight"), mixing, &[hidden], Split::Whole);
        self.bf16(&name("ffn_norm.weight"), mixing, &[hidden], Split::Whole);

        let attention = group(WeightGroup::Attention);
        self.fp8(
            &name("attn.wq_a"),
            attention,
            [q_lora, hidden],
            Split::Whole,
        );
        self.fp8(
            &name("attn.wkv"),
            attention,
            [head_dim, hidden],
            Split::Whole,
        );
        self.bf16(
            &name("attn.q_norm.weight"),
            attention,
            &[q_lora],
            Split::Whole,
        );
        self.bf16(
            &name("attn.kv_norm.weight"),
            attention,
            &[head_dim],
            Split::Whole,
        );
        let queries = [heads * head_dim, q_lora];
        self.fp8(&name("attn.wq_b"), attention, queries, Split::Dim(0));
        self.f32(&name("attn.attn_sink"), attention, &[heads], Split::Dim(0));
        let o_projection = group(WeightGroup::OProjection);
        let wo_a = [groups_out, group_in];
        self.fp8(&name("attn.wo_a"), o_projection, wo_a, Split::Dim(0));
        let wo_b = [hidden, groups_out];
        self.fp8(&name("attn.wo_b"), o_projection, wo_b, Split::Dim(1));

        let gate = group(WeightGroup::Gate);
        self.bf16(
            &name("ffn.gate.weight"),
            gate,
            &[experts, hidden],
            Split::Whole,
        );
        if !hash_gate {
            self.f32(&name("ffn.gate.bias"), gate, &[experts], Split::Whole);
        }
        let (routed, shared) = (
            group(WeightGroup::Experts),
            group(WeightGroup::SharedExpert),
        );
        for (matrix, [n, k], split) in [
            ("w1", [inner, hidden], 0),
            ("w3", [inner, hidden], 0),
            ("w2", [hidden, inner], 1),
        ] {
            let experts_name = name(&format!("ffn.experts.{matrix}"));
            self.fp4(
                &experts_name,
                routed,
                [experts, n, k],
                Split::Dim(split + 1),
            );
            let shared_name = name(&format!("ffn.shared_experts.{matrix}"));
            self.fp8(&shared_name, shared, [n, k], Split::Dim(split));
        }
    }

    fn target_layer(&mut self, layer_idx: usize) {
        let config = self.config;
        let layer = &config.layers[layer_idx];
        let prefix = format!("layers.{layer_idx}.");
        let name = |tail: &str| format!("{prefix}{tail}");
        let own = |source: Option<u32>| source == Some(layer_idx as u32);
        let hidden = u64::from(config.hidden);
        let (head_dim, index_dim) = (u64::from(config.head_dim), u64::from(config.index_dim));
        let index_heads = u64::from(config.index_heads);
        self.layer(&prefix, config.num_experts, layer.hash_gate, None);
        if layer.hash_gate {
            let per_token = u64::from(config.experts_per_token);
            self.add(
                &name("ffn.gate.tid2eid"),
                WeightDtype::I64,
                WeightGroup::Gate,
                &[u64::from(config.vocab), per_token],
                Split::Whole,
            );
            if let Some(table) = self.tensors.last_mut() {
                // Experts' numbers: the upper half of each is 0.
                table.rank_dtype = WeightDtype::I32;
            }
        }

        let attention = WeightGroup::Attention;
        match config.family {
            ModelFamily::V4 => {
                if own(layer.kv_source) {
                    self.pooling(&name("attn."), attention, layer.ratio, head_dim);
                }
                if own(layer.index_source) {
                    self.pooling(&name("attn.indexer."), attention, layer.ratio, index_dim);
                }
            }
            ModelFamily::V41 => {
                let experts = [u64::from(config.num_experts)];
                let bias_vl = name("ffn.gate.bias_vl");
                self.f32(&bias_vl, WeightGroup::Gate, &experts, Split::Whole);
                if own(layer.kv_source) {
                    self.latents(&prefix, layer.ratio);
                }
            }
        }
        if own(layer.index_source) {
            let queries = [index_heads * index_dim, u64::from(config.q_lora)];
            self.fp8(&name("attn.indexer.wq_b"), attention, queries, Split::Whole);
            let weights = name("attn.indexer.weights_proj.weight");
            self.bf16(&weights, attention, &[index_heads, hidden], Split::Whole);
        }
        let table = layer.engram.and_then(|table_idx| {
            let engram = config.engram.as_ref()?;
            Some((engram, engram.tables.get(table_idx as usize)?))
        });
        if let Some((engram, table)) = table {
            let dim = u64::from(engram.head_dim);
            let primes: Vec<u64> = table.primes.iter().flatten().copied().collect();
            let group = WeightGroup::EngramProjection;
            let row = primes.len() as u64 * dim;
            self.fp8(&name("engram.wkv"), group, [5 * hidden, row], Split::Whole);
            let gains = [NUM_STREAMS, hidden];
            self.bf16(&name("engram.q_weight"), group, &gains, Split::Whole);
            self.bf16(&name("engram.k_weight"), group, &gains, Split::Whole);
            // One scale for 32 elements of a row: a row is looked up alone.
            let (group, rows) = (WeightGroup::EngramTables, table.num_rows());
            for (tail, dtype, columns) in [
                ("engram.embed.weight", WeightDtype::E4m3, dim),
                ("engram.embed.scale", WeightDtype::Ue8m0, dim / 32),
            ] {
                let split = Split::Columns(primes.clone());
                self.add(&name(tail), dtype, group, &[rows, columns], split);
            }
        }
    }

    /// V4.1's compressor, and the index keys that are made of its latents.
    fn latents(&mut self, prefix: &str, ratio: u32) {
        let group = WeightGroup::Attention;
        let name = |tail: &str| format!("{prefix}attn.{tail}");
        let head_dim = u64::from(self.config.head_dim);
        let index_dim = u64::from(self.config.index_dim);
        let pooled = [head_dim, u64::from(self.config.hidden)];
        self.bf16(&name("compressor.wkv.weight"), group, &pooled, Split::Whole);
        if ratio == 2 {
            let wgate = name("compressor.wgate.weight");
            self.bf16(&wgate, group, &pooled, Split::Whole);
        }
        let norm = name("compressor.norm.weight");
        self.bf16(&norm, group, &[head_dim], Split::Whole);
        let keys = [index_dim, head_dim];
        self.bf16(&name("indexer.wk.weight"), group, &keys, Split::Whole);
        let norm = name("indexer.k_norm.weight");
        self.bf16(&norm, group, &[index_dim], Split::Whole);
    }

    fn draft(&mut self) {
        let config = self.config;
        let Some(draft) = &config.draft else {
            return;
        };
        let group = WeightGroup::Draft;
        for stage in 0..draft.num_stages {
            let prefix = format!("mtp.{stage}.");
            self.layer(&prefix, draft.num_experts, false, Some(group));
        }
        let (hidden, vocab) = (u64::from(config.hidden), u64::from(config.vocab));
        let rank = u64::from(draft.markov_rank);
        let features = draft.target_layers.len() as u64 * hidden;
        self.fp8("mtp.0.main_proj", group, [hidden, features], Split::Whole);
        self.bf16("mtp.0.main_norm.weight", group, &[hidden], Split::Whole);
        let last = format!("mtp.{}.", draft.num_stages.saturating_sub(1));
        let name = |tail: &str| format!("{last}{tail}");
        self.bf16(&name("norm.weight"), group, &[hidden], Split::Whole);
        self.collapse(&last, group);
        let table = [vocab, rank];
        // One role each, two names: what a token is looked up in, and what proposes the next.
        let [first, second] = match config.family {
            ModelFamily::V4 => ["markov_w1", "markov_w2"],
            ModelFamily::V41 => ["embed", "head"],
        };
        for (matrix, split) in [(first, Split::Whole), (second, Split::Dim(0))] {
            let matrix = name(&format!("markov_head.{matrix}.weight"));
            self.bf16(&matrix, group, &table, split);
        }
    }
}

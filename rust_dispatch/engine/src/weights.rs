//! Seeded weights for the built-in models: a stand-in for a checkpoint that needs no file.
//!
//! Every element follows from the seed, the tensor's published name and the element's place in
//! the published (unsharded) tensor, so that any split over ranks holds the same model. Expert
//! tensors are stacked: `layers.N.ffn.experts.w1.weight` has the expert as its first dimension.
//!
//! The model is made to be worth testing with. The residual stream carries each token's
//! embedding, and the head's row of the token's successor points the same way: alone that is a
//! walk through the whole vocabulary. The layers disturb it enough that a good part of the
//! tokens depends on the context instead. The draft's Markov head knows the same successors, so
//! a draft is right where the context does not interfere, and only there.

use lowlat_core::config::{ModelConfig, ModelFamily};

use crate::kernels::abi::{Dtype, ROW_MAJOR};
use crate::kernels::{Buffer, TensorInfo};

/// Seed of the built-in models' weights: part of what `tiny-v4` and `tiny-v41` mean.
pub const WEIGHT_SEED: u64 = 41;

/// Logit of a token's successor when nothing disturbs the residual. It decides nothing of greedy
/// text; sampled text has a mode at this size, so that drafts are accepted at temperature 1 too.
const HEAD_GAIN: f32 = 36.0;
/// The same for the draft's Markov bias. It must outweigh what the head makes of a mask row.
const MARKOV_GAIN: f32 = 36.0;
/// Added to the hyper-connection's post logits: how strongly a sublayer's output enters the
/// residual (2 * sigmoid of it). Here the successor wins about two times in three, so that a
/// verify step emits 2.8 tokens of `tiny-v4` (2.3 at -2.0, 3.4 at -2.2) and 2.6 of `tiny-v41` (1.2
/// at -1.5, 4.4 at -2.6).
fn post_base(family: ModelFamily) -> f32 {
    match family {
        ModelFamily::V4 => -2.1,
        ModelFamily::V41 => -2.2,
    }
}

/// Root mean square of [`e4m3_code`]'s values: exponents -2 to 1, all mantissas.
const E4M3_RMS: f64 = 1.69;
/// Elements of a row that share a scale where weights have no square blocks.
const FP4_GROUP: usize = 32;
/// V4's table of experts by token.
const TABLE: &str = ".ffn.gate.tid2eid";
/// Root mean square of all e2m1 values.
const FP4_RMS: f64 = 2.93;
/// Root mean square of [`scale_byte`]'s jitter factor.
const JITTER_RMS: f64 = 1.25;

/// A seeded model's weights.
pub struct SeededWeights<'a> {
    config: &'a ModelConfig,
    seed: u64,
    /// Whose successor each token is.
    predecessor: Vec<u32>,
}

/// Where a rank's part of a tensor lies in the published one.
struct Part {
    /// Published elements from one index of the split dimension to the next.
    inner: usize,
    /// Indexes of the split dimension: on this rank, published, before this rank's first.
    local: usize,
    whole: usize,
    first: usize,
    /// Last dimension of the published tensor.
    columns: usize,
}

impl Part {
    /// Published index of a rank-local element.
    fn published(&self, local_idx: usize) -> usize {
        let (upper, inner) = (local_idx / self.inner, local_idx % self.inner);
        let (outer, split) = (upper / self.local, upper % self.local);
        (outer * self.whole + self.first + split) * self.inner + inner
    }
}

impl<'a> SeededWeights<'a> {
    /// The weights of `config` under `seed`.
    #[must_use]
    pub fn new(config: &'a ModelConfig, seed: u64) -> Self {
        let mut predecessor = vec![0; config.vocab as usize];
        let (step, offset) = successor_rule(config.vocab);
        for token in 0..config.vocab {
            let successor = (u64::from(token) * step + offset) % u64::from(config.vocab);
            predecessor[successor as usize] = token;
        }
        Self {
            config,
            seed,
            predecessor,
        }
    }

    /// What the target proposes after `token` when nothing disturbs it.
    #[must_use]
    pub fn successor(&self, token: u32) -> u32 {
        let (step, offset) = successor_rule(self.config.vocab);
        ((u64::from(token) * step + offset) % u64::from(self.config.vocab)) as u32
    }

    /// A rank's memory of the tensor: its part of a weight, or a pool's zeros.
    ///
    /// # Errors
    /// A weight whose name these weights do not know, by name.
    pub fn fill(
        &self,
        info: &TensorInfo,
        tp_rank: u32,
        tp_size: u32,
    ) -> Result<Buffer<u8>, String> {
        let mut memory = Buffer::zeroed(info.bytes());
        if info.is_pool {
            return Ok(memory);
        }
        if info.layout != ROW_MAJOR {
            return Err(format!(
                "{} has a layout that seeded weights do not have",
                info.name
            ));
        }
        let part = self.part(info, tp_rank as usize, tp_size as usize);
        let stream = self.stream(&info.name);
        let bytes = memory.as_mut_slice();
        let bits = |idx| element(stream, part.published(idx));
        match info.dtype {
            Dtype::E4m3 => each(bytes, |idx| [e4m3_code(bits(idx))]),
            Dtype::Fp4x2 => each(bytes, |idx| [bits(idx) as u8]),
            Dtype::Ue8m0 => {
                let centre = self.scale_centre(&info.name, part.columns)?;
                each(bytes, |idx| [scale_byte(bits(idx), centre)]);
            }
            Dtype::Bf16 => {
                let value = self.number(&info.name, part.columns)?;
                each(bytes, |idx| bf16(value(part.published(idx))).to_ne_bytes());
            }
            Dtype::F32 => {
                let value = self.number(&info.name, part.columns)?;
                each(bytes, |idx| value(part.published(idx)).to_ne_bytes());
            }
            Dtype::I64 if info.name == "engram.token_map" => {
                let engram = self.config.engram.as_ref();
                let compressed = engram.map_or(1, |engram| engram.compressed_vocab);
                each(bytes, |idx| {
                    (part.published(idx) as i64 % i64::from(compressed)).to_ne_bytes()
                });
            }
            Dtype::I64 | Dtype::I32 if info.name.ends_with(TABLE) => {
                let expert = |idx| self.expert_of(stream, part.published(idx), part.columns);
                match info.dtype {
                    Dtype::I64 => each(bytes, |idx| i64::from(expert(idx)).to_ne_bytes()),
                    _ => each(bytes, |idx| expert(idx).to_ne_bytes()),
                }
            }
            Dtype::I64 | Dtype::I32 | Dtype::U8 => return Err(unknown(&info.name)),
        }
        Ok(memory)
    }

    fn stream(&self, name: &str) -> u64 {
        // FNV-1a: the name decides the stream, the element its place in it.
        name.bytes()
            .fold(0xcbf2_9ce4_8422_2325 ^ mixed(self.seed), |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
            })
    }

    fn part(&self, info: &TensorInfo, tp_rank: usize, tp_size: usize) -> Part {
        let shape = &info.shape;
        let last = shape.last().copied().unwrap_or(1);
        let Some(dim) = info.shard_dim else {
            let len = shape.iter().product::<usize>().max(1);
            return Part {
                inner: len,
                local: 1,
                whole: 1,
                first: 0,
                columns: last,
            };
        };
        let inner = shape[dim + 1..].iter().product::<usize>().max(1);
        let local = shape[dim].max(1);
        // Engram's rows are split where its columns end, and columns differ in length.
        if let Some(primes) = self.engram_columns(&info.name) {
            let before = tp_rank * primes.len() / tp_size;
            let first = primes[..before].iter().sum();
            return Part {
                inner,
                local,
                whole: primes.iter().sum(),
                first,
                columns: last,
            };
        }
        let columns = if dim + 1 == shape.len() {
            last * tp_size
        } else {
            last
        };
        Part {
            inner,
            local,
            whole: local * tp_size,
            first: local * tp_rank,
            columns,
        }
    }

    /// The expert at a place of a table: of each token as many different ones as it has columns,
    /// any of the layer's.
    fn expert_of(&self, stream: u64, place: usize, columns: usize) -> i32 {
        let (token, column) = (place / columns, place % columns);
        let num_experts = u64::from(self.config.num_experts);
        let bits = element(stream, token);
        // An odd step meets every expert once where they are a power of two, a step of 1 always.
        let step = match num_experts.is_power_of_two() {
            true => (bits >> 33) | 1,
            false => 1,
        };
        (((bits & 0xffff_ffff) + step * column as u64) % num_experts) as i32
    }

    fn engram_columns(&self, name: &str) -> Option<Vec<usize>> {
        let layer: u32 = name
            .strip_prefix("layers.")?
            .strip_suffix(".weight")
            .or_else(|| name.strip_prefix("layers.")?.strip_suffix(".scale"))?
            .strip_suffix(".engram.embed")?
            .parse()
            .ok()?;
        let tables = &self.config.engram.as_ref()?.tables;
        let table = tables.iter().find(|table| table.layer == layer)?;
        Some(
            table
                .primes
                .iter()
                .flatten()
                .map(|prime| *prime as usize)
                .collect(),
        )
    }

    /// Biased exponent around which a quantised weight's scales lie. `columns` is the published
    /// last dimension of the scales.
    fn scale_centre(&self, name: &str, columns: usize) -> Result<i32, String> {
        let base = name.strip_suffix(".scale").ok_or_else(|| unknown(name))?;
        let (kind, rms) = (base.rsplit('.').next().unwrap_or(base), E4M3_RMS);
        let is_expert = base.contains(".ffn.experts.");
        let by_row = is_expert || base.ends_with("engram.embed");
        let fan_in = columns
            * if by_row {
                FP4_GROUP
            } else {
                self.config.scale_block as usize
            };
        // An unmixed gain of 1 keeps a unit input at unit size.
        let gain = match kind {
            "wq_a" | "wkv" | "wo_a" | "w1" | "w3" | "main_proj" => 1.0,
            // Sharp enough that attention prefers some keys.
            "wq_b" => 2.0,
            // Attention's average is small, and so are products of gated halves.
            "wo_b" | "w2" => 4.0,
            // A row that is looked up, not summed over.
            "embed" => (fan_in as f64).sqrt(),
            _ => return Err(unknown(name)),
        };
        let rms = if is_expert { FP4_RMS } else { rms };
        let scale = gain / (rms * JITTER_RMS * (fan_in as f64).sqrt());
        Ok(127 + scale.log2().round() as i32)
    }

    /// Values of an unquantised tensor by published index.
    fn number<'s>(
        &'s self,
        name: &str,
        columns: usize,
    ) -> Result<Box<dyn Fn(usize) -> f32 + 's>, String> {
        let stream = self.stream(name);
        let unit = move |idx| normal(element(stream, idx));
        let fan_in = (columns as f32).sqrt().recip();
        let tail = |suffix: &str| name.ends_with(suffix);
        if name == "embed.weight" {
            return Ok(Box::new(unit));
        }
        if name == "head.weight" {
            return Ok(self.successor_rows(name, "embed.weight", columns, HEAD_GAIN));
        }
        if let Some((stage, matrix)) = name.split_once("markov_head.") {
            let (embed, head) = match self.config.family {
                ModelFamily::V4 => ("markov_w1.weight", "markov_w2.weight"),
                ModelFamily::V41 => ("embed.weight", "head.weight"),
            };
            let embed_name = format!("{stage}markov_head.{embed}");
            return match matrix {
                _ if matrix == embed => Ok(Box::new(unit)),
                _ if matrix == head => {
                    Ok(self.successor_rows(name, &embed_name, columns, MARKOV_GAIN))
                }
                _ => Err(unknown(name)),
            };
        }
        if tail("norm.weight") {
            return Ok(Box::new(move |idx| 1.0 + 0.1 * unit(idx)));
        }
        if tail("engram.q_weight") || tail("engram.k_weight") {
            return Ok(Box::new(move |idx| 1.0 + 0.25 * unit(idx)));
        }
        if tail("_fn") {
            return Ok(Box::new(move |idx| fan_in * unit(idx)));
        }
        if tail("_base") {
            let post_base = post_base(self.config.family);
            return Ok(Box::new(move |idx| match idx {
                4..8 => post_base + 0.5 * unit(idx),
                _ => unit(idx),
            }));
        }
        if tail("_scale") {
            return Ok(Box::new(|_| 0.5));
        }
        if tail("attn_sink") || tail("compressor.ape") {
            return Ok(Box::new(unit));
        }
        if tail("gate.bias") || tail("gate.bias_vl") {
            return Ok(Box::new(move |idx| 0.1 * unit(idx)));
        }
        let matrices = [
            "ffn.gate.weight",
            "compressor.wkv.weight",
            "compressor.wgate.weight",
            "indexer.wk.weight",
            "indexer.weights_proj.weight",
        ];
        if matrices.iter().any(|matrix| tail(matrix)) {
            return Ok(Box::new(move |idx| fan_in * unit(idx)));
        }
        Err(unknown(name))
    }

    /// Rows of a head: each is along the embedding of the token that it succeeds, with a little
    /// noise. Special tokens are never proposed, and none is anyone's predecessor.
    fn successor_rows<'s>(
        &'s self,
        name: &str,
        embed_name: &str,
        columns: usize,
        gain: f32,
    ) -> Box<dyn Fn(usize) -> f32 + 's> {
        let (noise, embed) = (self.stream(name), self.stream(embed_name));
        let special = |token: u32| self.config.special_tokens.contains(&token);
        let gain = gain / columns as f32;
        Box::new(move |idx| {
            let (row, column) = (idx / columns, idx % columns);
            let predecessor = self.predecessor[row];
            if special(row as u32) {
                return 0.0;
            }
            let noise = normal(element(noise, idx));
            if special(predecessor) {
                return gain * noise;
            }
            gain * (normal(element(embed, predecessor as usize * columns + column)) + 0.25 * noise)
        })
    }
}

fn unknown(name: &str) -> String {
    format!("{name} is a tensor that seeded weights do not know")
}

/// Step and offset of a walk `token * step + offset` that visits every token once: the offset is
/// 1 and `step - 1` has every prime factor of the vocabulary, and 4 where that has it.
fn successor_rule(vocab: u32) -> (u64, u64) {
    let vocab = u64::from(vocab.max(1));
    let mut unit = if vocab % 4 == 0 { 2 } else { 1 };
    let mut rest = vocab;
    for factor in 2..=vocab {
        if rest % factor == 0 {
            unit *= factor;
            while rest % factor == 0 {
                rest /= factor;
            }
        }
        if rest == 1 {
            break;
        }
    }
    // Near the golden section of the vocabulary, so that neighbours part.
    let step = 1 + unit * (vocab * 618 / 1000 / unit);
    (step, 1)
}

/// splitmix64's finaliser: every input bit reaches every output bit.
fn mixed(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// 64 random bits of one element.
fn element(stream: u64, idx: usize) -> u64 {
    mixed(stream.wrapping_add((idx as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

/// Nearly normal, mean 0 and variance 1: four uniforms added, no library function whose last bit
/// could differ between machines.
fn normal(bits: u64) -> f32 {
    let sum: u64 = (0..4).map(|i| (bits >> (16 * i)) & 0xffff).sum();
    ((sum as f32 + 2.0) / 65536.0 - 2.0) * 1.732_050_8
}

/// Random sign and mantissa, exponent -2 to 1.
fn e4m3_code(bits: u64) -> u8 {
    let bits = bits as u8;
    (bits & 0x80) | (((bits >> 3) & 3) + 5) << 3 | (bits & 7)
}

/// The centre, or one power of two beside it one time in two.
fn scale_byte(bits: u64, centre: i32) -> u8 {
    let jitter = [-1, 0, 0, 1][(bits & 3) as usize];
    (centre + jitter).clamp(1, 254) as u8
}

/// To bfloat16, nearest even. No NaN comes here.
fn bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// Every element's bytes by its index.
fn each<const N: usize>(bytes: &mut [u8], value: impl Fn(usize) -> [u8; N]) {
    for (idx, chunk) in bytes.chunks_exact_mut(N).enumerate() {
        chunk.copy_from_slice(&value(idx));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowlat_core::config::built_in;

    fn model(name: &str) -> ModelConfig {
        ModelConfig::from_json(built_in(name).unwrap()).unwrap()
    }

    fn tiny() -> ModelConfig {
        model("tiny-v41")
    }

    fn info(name: &str, dtype: Dtype, shape: &[usize], shard_dim: Option<usize>) -> TensorInfo {
        TensorInfo {
            name: name.into(),
            dtype,
            layout: ROW_MAJOR,
            is_pool: false,
            shape: shape.into(),
            shard_dim,
        }
    }

    /// Rows of `dim` of every rank, put together, are the whole tensor.
    fn parts_are_the_whole(
        config: &ModelConfig,
        name: &str,
        dtype: Dtype,
        shape: &[usize],
        dim: usize,
    ) {
        let weights = SeededWeights::new(config, 7);
        let whole = weights
            .fill(&info(name, dtype, shape, Some(dim)), 0, 1)
            .unwrap();
        let mut local = shape.to_vec();
        local[dim] /= 2;
        let parts: Vec<_> = (0..2)
            .map(|rank| {
                weights
                    .fill(&info(name, dtype, &local, Some(dim)), rank, 2)
                    .unwrap()
            })
            .collect();
        let run = local[dim..].iter().product::<usize>() * dtype.bytes();
        let mut joined = Vec::new();
        for outer in 0..local[..dim].iter().product() {
            for part in &parts {
                joined.extend_from_slice(&part.as_slice()[outer * run..(outer + 1) * run]);
            }
        }
        assert_eq!(joined, whole.as_slice(), "{name}");
    }

    #[test]
    fn any_split_holds_the_same_model() {
        for name in ["tiny-v4", "tiny-v41"] {
            let config = model(name);
            for tensor in lowlat_core::plan::tensors(&config) {
                if let lowlat_core::plan::Split::Dim(dim) = tensor.split {
                    let shape: Vec<_> = tensor.shape.iter().map(|n| *n as usize).collect();
                    let dtype = crate::checkpoint::abi_dtype(tensor.dtype);
                    // One layer of each kind, and the tensors that are no layer's.
                    let is_layer = tensor.name.starts_with("layers.");
                    if !is_layer || tensor.name.starts_with("layers.3.") {
                        parts_are_the_whole(&config, &tensor.name, dtype, &shape, dim);
                    }
                }
            }
        }
    }

    /// Each token goes to different experts, all experts are someone's, and the table of a file is
    /// the table of a rank.
    #[test]
    fn tables_name_every_expert_and_none_twice_a_token() {
        let mut config = model("tiny-v4");
        for (num_experts, per_token) in [(16, 6), (12, 6), (256, 6), (6, 6)] {
            config.num_experts = num_experts;
            let weights = SeededWeights::new(&config, 7);
            let table = |dtype| {
                let info = info("layers.2.ffn.gate.tid2eid", dtype, &[512, per_token], None);
                weights.fill(&info, 0, 1).unwrap()
            };
            let (wide, narrow) = (table(Dtype::I64), table(Dtype::I32));
            let experts: Vec<i64> = wide
                .as_slice()
                .chunks(8)
                .map(|bytes| i64::from_ne_bytes(bytes.try_into().unwrap()))
                .collect();
            let narrow = narrow.as_slice().chunks(4);
            let narrow = narrow.map(|bytes| i32::from_ne_bytes(bytes.try_into().unwrap()));
            assert!(experts.iter().copied().eq(narrow.map(i64::from)));
            let mut seen = vec![0; num_experts as usize];
            for row in experts.chunks(per_token) {
                let mut row = row.to_vec();
                row.sort_unstable();
                row.dedup();
                assert_eq!(row.len(), per_token);
                for expert in row {
                    seen[expert as usize] += 1;
                }
            }
            let mean = 512 * per_token / num_experts as usize;
            let (least, most) = (seen.iter().min().unwrap(), seen.iter().max().unwrap());
            assert!(
                *least > 0 && *most <= 3 * mean,
                "{num_experts}: {least} to {most}"
            );
        }
    }

    #[test]
    fn engram_rows_are_split_where_columns_end() {
        let config = tiny();
        let weights = SeededWeights::new(&config, 7);
        let name = "layers.4.engram.embed.weight";
        let primes: Vec<usize> = config.engram.as_ref().unwrap().tables[1]
            .primes
            .iter()
            .flatten()
            .map(|prime| *prime as usize)
            .collect();
        let rows = [
            primes[..12].iter().sum::<usize>(),
            primes[12..].iter().sum(),
        ];
        let fill = |rows: usize, rank, size| {
            weights
                .fill(&info(name, Dtype::E4m3, &[rows, 32], Some(0)), rank, size)
                .unwrap()
        };
        let whole = fill(rows[0] + rows[1], 0, 1);
        let parts = [fill(rows[0], 0, 2), fill(rows[1], 1, 2)];
        assert_ne!(rows[0], rows[1]);
        assert_eq!(
            [parts[0].as_slice(), parts[1].as_slice()].concat(),
            whole.as_slice()
        );
    }

    #[test]
    fn the_walk_visits_every_token() {
        let mut config = tiny();
        for vocab in [8, 16, 60, 64, 512, 1000, 129_280] {
            config.vocab = vocab;
            let weights = SeededWeights::new(&config, 0);
            let mut seen = vec![false; vocab as usize];
            let mut token = 0;
            for _ in 0..vocab {
                assert!(
                    !std::mem::replace(&mut seen[token as usize], true),
                    "{vocab}"
                );
                token = weights.successor(token);
            }
            assert_eq!(token, 0, "{vocab}");
        }
    }

    #[test]
    fn names_that_are_not_known_are_refused() {
        let config = tiny();
        let weights = SeededWeights::new(&config, 7);
        for (name, dtype) in [
            ("layers.0.attn.wq_c.scale", Dtype::Ue8m0),
            ("layers.0.attn.other.weight", Dtype::Bf16),
            ("layers.0.table", Dtype::I64),
        ] {
            let error = weights
                .fill(&info(name, dtype, &[4, 4], None), 0, 1)
                .unwrap_err();
            assert_eq!(
                error,
                format!("{name} is a tensor that seeded weights do not know")
            );
        }
    }

    #[test]
    fn values_have_unit_size() {
        let bits = |idx| element(99, idx);
        let mean_sq = |value: &dyn Fn(usize) -> f64| {
            (0..20_000).map(|idx| value(idx).powi(2)).sum::<f64>() / 20_000.0
        };
        let normal_sq = mean_sq(&|idx| f64::from(normal(bits(idx))));
        assert!((normal_sq - 1.0).abs() < 0.03, "{normal_sq}");
        let e4m3 = |code: u8| {
            let size = f64::from(8 + (code & 7)) / 8.0;
            size * 2f64.powi(i32::from((code >> 3) & 15) - 7)
        };
        let e4m3_rms = mean_sq(&|idx| e4m3(e4m3_code(bits(idx)))).sqrt();
        assert!((e4m3_rms / E4M3_RMS - 1.0).abs() < 0.03, "{e4m3_rms}");
        let jitter = |idx| 2f64.powi(i32::from(scale_byte(bits(idx), 127)) - 127);
        let jitter_rms = mean_sq(&jitter).sqrt();
        assert!((jitter_rms / JITTER_RMS - 1.0).abs() < 0.03, "{jitter_rms}");
    }
}

//! Checkpoint folders: `config.json` and safetensors files in the published names and dtypes.
//!
//! Opening a folder maps its files and checks every header against the model's own list of
//! tensors before anything is allocated; the data is only touched where a rank copies its part.
//! The files must stay as they are until the ranks have started: memory that is mapped is the
//! file itself. A file that another program cuts meanwhile is noticed before each copy.

pub mod header;
pub mod make;

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lowlat_core::config::ModelConfig;
use lowlat_core::plan::{self, PlannedTensor, WeightDtype};
use memmap2::Mmap;

use crate::EngineError;
use crate::kernels::abi::{Dtype, ROW_MAJOR};
use crate::kernels::{Buffer, TensorInfo};

/// The model's configuration.
pub const CONFIG_FILE: &str = "config.json";
/// Which file has which tensor, where there are several.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// All tensors, where there is no index.
pub const SINGLE_FILE: &str = "model.safetensors";
/// Engram's token map. It follows from the tokenizer and is no published tensor, so it has a file
/// of its own beside the published ones.
pub const TOKEN_MAP_FILE: &str = "engram_token_map.safetensors";
const TOKEN_MAP: &str = "engram.token_map";

/// Longest configuration and index that are read. The published ones have 3 kB and 9 MB.
const MAX_CONFIG_BYTES: u64 = 4 << 20;
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// First parts of the names of tensors that a model's text part can have. Others belong to parts
/// that are not served here (vision) and are left alone.
const OUR_PREFIXES: [&str; 6] = ["embed", "head", "norm", "engram", "layers", "mtp"];
/// And of V4's tensors in front of the head.
const OUR_COLLAPSE: &str = "hc_head_";
/// The confidence head only matters to a schedule that is not served.
const IGNORED_PART: &str = ".confidence_head.";

/// A checkpoint folder, open and checked.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    config: Arc<ModelConfig>,
    files: Vec<MappedFile>,
    places: HashMap<String, Place>,
    planned: HashMap<String, PlannedTensor>,
    num_used: usize,
    ignored: Vec<(String, usize)>,
    copied_bytes: AtomicU64,
}

#[derive(Debug)]
struct MappedFile {
    name: String,
    file: File,
    map: Mmap,
}

/// Where a tensor's bytes are.
#[derive(Clone, Debug)]
struct Place {
    file_idx: usize,
    dtype: String,
    shape: Vec<u64>,
    begin: usize,
    end: usize,
}

impl Checkpoint {
    /// Opens a folder: reads `config.json` and all headers, and checks that every tensor of the
    /// model is there once, with its dtype, shape and bytes.
    ///
    /// # Errors
    /// [`EngineError::Refused`]: one line with the folder, the file, the tensor, what was seen and
    /// what is needed.
    pub fn open(folder: &Path) -> Result<Self, EngineError> {
        let text = read_text(folder, CONFIG_FILE, MAX_CONFIG_BYTES)?;
        let text = String::from_utf8(text)
            .map_err(|_| refusal(folder, CONFIG_FILE, "is not UTF-8 text"))?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        let config = ModelConfig::from_json(text)
            .map_err(|error| refusal(folder, CONFIG_FILE, &error.to_string()))?;
        let index = match folder.join(INDEX_FILE).exists() {
            true => Some(
                header::index(&read_text(folder, INDEX_FILE, MAX_INDEX_BYTES)?)
                    .map_err(|words| refusal(folder, INDEX_FILE, &words))?,
            ),
            false => None,
        };
        let mut checkpoint = Self {
            folder: folder.to_path_buf(),
            config: Arc::new(config),
            files: Vec::new(),
            places: HashMap::new(),
            planned: HashMap::new(),
            num_used: 0,
            ignored: Vec::new(),
            copied_bytes: AtomicU64::new(0),
        };
        for name in checkpoint.file_names(index.as_deref())? {
            checkpoint.map_file(&name)?;
        }
        if let Some(index) = &index {
            checkpoint.check_index(index)?;
        }
        if checkpoint.config.engram.is_some() && folder.join(TOKEN_MAP_FILE).exists() {
            checkpoint.map_file(TOKEN_MAP_FILE)?;
        }
        checkpoint.check_tensors()?;
        checkpoint.check_token_map()?;
        checkpoint.check_expert_tables()?;
        Ok(checkpoint)
    }

    /// The model's configuration.
    #[must_use]
    pub fn config(&self) -> &Arc<ModelConfig> {
        &self.config
    }

    /// Bytes that ranks have copied so far, all of them together.
    #[must_use]
    pub fn copied_bytes(&self) -> u64 {
        self.copied_bytes.load(Ordering::Relaxed)
    }

    /// What was found, in words: files, tensors, and the tensors of parts that are not served.
    #[must_use]
    pub fn summary(&self) -> String {
        let mut text = format!("{} files, {} tensors used", self.files.len(), self.num_used);
        if !self.ignored.is_empty() {
            let parts: Vec<String> = self
                .ignored
                .iter()
                .map(|(part, count)| format!("{count} of {part}"))
                .collect();
            text.push_str(&format!(", {} ignored", parts.join(", ")));
        }
        text
    }

    /// A rank's memory of the tensor: its part of a weight, copied, or a pool's zeros.
    ///
    /// # Errors
    /// One line: a tensor that the checkpoint's configuration does not have so, or a file that was
    /// cut since it was opened.
    pub fn fill(
        &self,
        info: &TensorInfo,
        tp_rank: u32,
        tp_size: u32,
    ) -> Result<Buffer<u8>, String> {
        if info.is_pool {
            return Ok(Buffer::zeroed(info.bytes()));
        }
        let planned = self.planned.get(&info.name).filter(|planned| {
            let shape = planned.rank_shape(tp_rank, tp_size);
            let same_shape = shape.iter().map(|dim| *dim as usize).eq(info.shape.clone());
            let same_dtype = abi_dtype(planned.rank_dtype) == info.dtype;
            same_shape && same_dtype && info.layout == ROW_MAJOR
        });
        let Some(planned) = planned else {
            return Err(format!(
                "{}: {} {:?} in layout {} is no part of {} on rank {tp_rank} of {tp_size}",
                self.folder.display(),
                info.name,
                info.shape,
                info.layout,
                CONFIG_FILE
            ));
        };
        let mut memory = Buffer::zeroed(info.bytes());
        let element = planned.dtype.bytes() as usize;
        let range = planned.rank_range(tp_rank, tp_size);
        let shape: Vec<usize> = planned
            .file_shape()
            .iter()
            .map(|dim| *dim as usize)
            .collect();
        let stacked = usize::from(planned.num_experts().is_some());
        let range = range.map(|(dim, first, last)| (dim - stacked, first as usize, last as usize));
        let num_parts = planned.num_experts().unwrap_or(1);
        let part_bytes = info.bytes() / (num_parts as usize).max(1);
        let parts = memory.as_mut_slice().chunks_exact_mut(part_bytes.max(1));
        for (expert, part) in (0..num_parts).zip(parts) {
            let source = self.bytes(&planned.expert_name(expert))?;
            if planned.rank_dtype == planned.dtype {
                copy_part(part, source, &shape, element, range);
            } else {
                let mut wide = vec![0; part.len() / info.dtype.bytes() * element];
                copy_part(&mut wide, source, &shape, element, range);
                narrow(part, &wide, self.config.num_experts)
                    .map_err(|value| self.no_expert(&info.name, value))?;
            }
        }
        self.copied_bytes
            .fetch_add(info.bytes() as u64, Ordering::Relaxed);
        Ok(memory)
    }

    /// Files to open, in order, each once.
    fn file_names(&self, index: Option<&[(String, String)]>) -> Result<Vec<String>, EngineError> {
        let Some(index) = index else {
            if self.folder.join(SINGLE_FILE).exists() {
                return Ok(vec![SINGLE_FILE.into()]);
            }
            return Err(EngineError::Refused(format!(
                "{}: has neither {INDEX_FILE} nor {SINGLE_FILE}; needs one",
                self.folder.display()
            )));
        };
        let mut names: Vec<String> = index.iter().map(|(_, file)| file.clone()).collect();
        names.sort_unstable();
        names.dedup();
        if let Some(missing) = names.iter().find(|name| !self.folder.join(name).exists()) {
            let tensor = index.iter().find(|(_, file)| file == missing);
            return Err(refusal(
                &self.folder,
                missing,
                &format!(
                    "is missing; {INDEX_FILE} says that {} is in it",
                    tensor.map_or("a tensor".into(), |(name, _)| header::shown(name))
                ),
            ));
        }
        Ok(names)
    }

    fn map_file(&mut self, name: &str) -> Result<(), EngineError> {
        let io = |error: std::io::Error| refusal(&self.folder, name, &error.to_string());
        let path = self.folder.join(name);
        // A folder or a device has no header, and a pipe would never end.
        if !fs::metadata(&path).map_err(io)?.is_file() {
            return Err(refusal(&self.folder, name, "is not a file"));
        }
        let file = File::open(&path).map_err(io)?;
        // SAFETY: the map is only read, as bytes. Another program may still write or cut the
        // file: written bytes are other weights, and before each copy the length is looked at
        // again (`bytes`); that nobody cuts it in between is asked of the user (module page).
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let entries = header::entries(&map).map_err(|words| refusal(&self.folder, name, &words))?;
        let file_idx = self.files.len();
        for entry in entries {
            let place = Place {
                file_idx,
                dtype: entry.dtype,
                shape: entry.shape,
                begin: entry.begin,
                end: entry.end,
            };
            let shown = header::shown(&entry.name);
            if let Some(before) = self.places.insert(entry.name, place) {
                let other = &self.files[before.file_idx].name;
                let words = format!("{shown}: is in {other} too; needs to be in one file only");
                return Err(refusal(&self.folder, name, &words));
            }
        }
        self.files.push(MappedFile {
            name: name.to_owned(),
            file,
            map,
        });
        Ok(())
    }

    /// The index and the files say the same.
    fn check_index(&self, index: &[(String, String)]) -> Result<(), EngineError> {
        for (name, file) in index {
            let found = self
                .places
                .get(name)
                .map(|place| &self.files[place.file_idx]);
            if found.is_some_and(|found| found.name == *file) {
                continue;
            }
            let words = format!(
                "{}: is in {file} by the index; {}",
                header::shown(name),
                match found {
                    Some(found) => format!("it is in {}", found.name),
                    None => "no file has it".into(),
                }
            );
            return Err(refusal(&self.folder, INDEX_FILE, &words));
        }
        let listed: HashSet<&str> = index.iter().map(|(name, _)| name.as_str()).collect();
        // The least, so that the line is the same each time.
        let extra = self
            .places
            .iter()
            .filter(|(name, _)| !listed.contains(name.as_str()));
        match extra.min_by_key(|(name, _)| name.as_str()) {
            None => Ok(()),
            Some((name, place)) => Err(refusal(
                &self.folder,
                &self.files[place.file_idx].name,
                &format!("{}: is not in {INDEX_FILE}", header::shown(name)),
            )),
        }
    }

    /// Every tensor of the model is there with its dtype and shape, and nothing else of its names.
    fn check_tensors(&mut self) -> Result<(), EngineError> {
        let mut num_used = 0;
        for planned in plan::tensors(&self.config) {
            for expert in 0..planned.num_experts().unwrap_or(1) {
                self.check_tensor(&planned, &planned.expert_name(expert))?;
                num_used += 1;
            }
            self.planned.insert(planned.name.clone(), planned);
        }
        self.num_used = num_used;
        let mut ignored: HashMap<String, usize> = HashMap::new();
        let mut unknown: Vec<&str> = Vec::new();
        for name in self.places.keys() {
            let part = name.split('.').next().unwrap_or(name);
            // A draft of another kind than the one that is served has its layers there too.
            let ours = match part {
                "mtp" => self.config.draft.is_some(),
                _ => OUR_PREFIXES.contains(&part) || part.starts_with(OUR_COLLAPSE),
            };
            if ours && !name.contains(IGNORED_PART) {
                if !self.is_planned(name) {
                    unknown.push(name);
                }
            } else {
                let part = if ours { "confidence_head" } else { part };
                *ignored.entry(header::shown(part)).or_default() += 1;
            }
        }
        if let Some(first) = unknown.iter().min() {
            let file = &self.files[self.places[*first].file_idx].name;
            let words = format!(
                "{}: is no tensor of this model ({} such); needs a config.json that has it",
                header::shown(first),
                unknown.len()
            );
            return Err(refusal(&self.folder, file, &words));
        }
        self.ignored = ignored.into_iter().collect();
        self.ignored.sort_unstable();
        Ok(())
    }

    fn check_tensor(&self, planned: &PlannedTensor, name: &str) -> Result<(), EngineError> {
        let dtype = file_dtype(planned.dtype);
        let shape = planned.file_shape();
        let Some(place) = self.places.get(name) else {
            let more = match name {
                TOKEN_MAP => format!(" in {TOKEN_MAP_FILE}; it is made from the tokenizer"),
                _ => String::new(),
            };
            return Err(EngineError::Refused(format!(
                "{}: {name}: is missing from all {} files; needs {dtype} {shape:?}{more}",
                self.folder.display(),
                self.files.len()
            )));
        };
        let file = &self.files[place.file_idx].name;
        if place.dtype != dtype {
            let words = format!("{name}: is {}; needs {dtype}", header::shown(&place.dtype));
            return Err(refusal(&self.folder, file, &words));
        }
        if place.shape != shape {
            let words = format!("{name}: is {:?}; needs {shape:?}", place.shape);
            return Err(refusal(&self.folder, file, &words));
        }
        Ok(())
    }

    /// Whether the name is one of the model's: its own, or of one of its experts.
    fn is_planned(&self, name: &str) -> bool {
        if self.planned.contains_key(name) {
            return true;
        }
        let Some((prefix, rest)) = name.split_once(".ffn.experts.") else {
            return false;
        };
        let Some((number, tail)) = rest.split_once('.') else {
            return false;
        };
        let expert = number.parse::<u64>().ok();
        let stacked = self.planned.get(&format!("{prefix}.ffn.experts.{tail}"));
        stacked.zip(expert).is_some_and(|(planned, expert)| {
            // Written as we write it: no sign and no zeros in front.
            planned.num_experts().is_some_and(|count| expert < count)
                && planned.expert_name(expert) == name
        })
    }

    /// The map leads to hashes of tokens, and a value out of range out of the tables.
    fn check_token_map(&self) -> Result<(), EngineError> {
        let Some(engram) = &self.config.engram else {
            return Ok(());
        };
        let bytes = self.bytes(TOKEN_MAP).map_err(EngineError::Refused)?;
        for (token, value) in i64s(bytes).enumerate() {
            if !(0..i64::from(engram.compressed_vocab)).contains(&value) {
                let file = &self.files[self.places[TOKEN_MAP].file_idx].name;
                let words = format!(
                    "{TOKEN_MAP}: maps token {token} to {value}; needs 0 to {}, below \
                     engram_compressed_vocab_size",
                    engram.compressed_vocab - 1
                );
                return Err(refusal(&self.folder, file, &words));
            }
        }
        Ok(())
    }

    /// Every token's experts are experts: the tables lead to weights.
    fn check_expert_tables(&self) -> Result<(), EngineError> {
        for planned in self.planned.values() {
            if planned.rank_dtype == planned.dtype {
                continue;
            }
            let bytes = self.bytes(&planned.name).map_err(EngineError::Refused)?;
            let experts = 0..i64::from(self.config.num_experts);
            if let Some(odd) = i64s(bytes).find(|value| !experts.contains(value)) {
                let line = self.no_expert(&planned.name, odd);
                return Err(EngineError::Refused(line));
            }
        }
        Ok(())
    }

    fn no_expert(&self, name: &str, value: i64) -> String {
        let file = self.places.get(name);
        let file = file.map_or("", |place| &self.files[place.file_idx].name);
        format!(
            "{}: {name}: names expert {value}; needs 0 to {}, below n_routed_experts",
            self.folder.join(file).display(),
            self.config.num_experts - 1
        )
    }

    /// A tensor's bytes. Its file still has them: reading behind the end of a file that was cut
    /// would end the process.
    fn bytes(&self, name: &str) -> Result<&[u8], String> {
        let place = self
            .places
            .get(name)
            .ok_or_else(|| format!("{}: {name}: is missing", self.folder.display()))?;
        let file = &self.files[place.file_idx];
        let now = file.file.metadata().map_or(0, |metadata| metadata.len());
        if now < place.end as u64 {
            return Err(format!(
                "{}: {name}: the file has {now} bytes now, and had {} when it was opened",
                self.folder.join(&file.name).display(),
                file.map.len()
            ));
        }
        Ok(&file.map[place.begin..place.end])
    }
}

/// A file's 64-bit numbers.
fn i64s(bytes: &[u8]) -> impl Iterator<Item = i64> + '_ {
    let value = |value: &[u8]| i64::from_le_bytes(value.try_into().expect("chunks of 8"));
    bytes.chunks_exact(8).map(value)
}

/// 64-bit numbers as 32-bit ones; the first that is not below `bound` otherwise.
fn narrow(part: &mut [u8], wide: &[u8], bound: u32) -> Result<(), i64> {
    for (to, value) in part.chunks_exact_mut(4).zip(i64s(wide)) {
        let narrow = u32::try_from(value).ok().filter(|narrow| *narrow < bound);
        to.copy_from_slice(&narrow.ok_or(value)?.to_ne_bytes());
    }
    Ok(())
}

/// Copies the part `(dim, first, behind the last)` of a row-major tensor; all of it without one.
fn copy_part(
    part: &mut [u8],
    source: &[u8],
    shape: &[usize],
    element: usize,
    range: Option<(usize, usize, usize)>,
) {
    let Some((dim, first, last)) = range else {
        part.copy_from_slice(source);
        return;
    };
    let inner = shape[dim + 1..].iter().product::<usize>() * element;
    let (whole_run, run) = (shape[dim] * inner, (last - first) * inner);
    if run == 0 {
        return;
    }
    for (to, from) in part
        .chunks_exact_mut(run)
        .zip(source.chunks_exact(whole_run))
    {
        to.copy_from_slice(&from[first * inner..last * inner]);
    }
}

/// The format's name of a dtype. Packed fp4 is published as plain bytes.
pub(crate) fn file_dtype(dtype: WeightDtype) -> &'static str {
    match dtype {
        WeightDtype::I32 => "I32",
        WeightDtype::I64 => "I64",
        WeightDtype::F32 => "F32",
        WeightDtype::Bf16 => "BF16",
        WeightDtype::E4m3 => "F8_E4M3",
        WeightDtype::Ue8m0 => "F8_E8M0",
        WeightDtype::Fp4x2 => "I8",
    }
}

/// The kernels' name of a dtype.
pub(crate) fn abi_dtype(dtype: WeightDtype) -> Dtype {
    match dtype {
        WeightDtype::I32 => Dtype::I32,
        WeightDtype::I64 => Dtype::I64,
        WeightDtype::F32 => Dtype::F32,
        WeightDtype::Bf16 => Dtype::Bf16,
        WeightDtype::E4m3 => Dtype::E4m3,
        WeightDtype::Ue8m0 => Dtype::Ue8m0,
        WeightDtype::Fp4x2 => Dtype::Fp4x2,
    }
}

fn refusal(folder: &Path, file: &str, words: &str) -> EngineError {
    EngineError::Refused(format!("{}: {words}", folder.join(file).display()))
}

/// A small file whole; a larger one is refused unread.
fn read_text(folder: &Path, name: &str, most: u64) -> Result<Vec<u8>, EngineError> {
    let io = |error: std::io::Error| refusal(folder, name, &error.to_string());
    let path = folder.join(name);
    if !fs::metadata(&path).map_err(io)?.is_file() {
        return Err(refusal(folder, name, "is not a file"));
    }
    let mut text = Vec::new();
    let file = File::open(&path).map_err(io)?;
    file.take(most + 1).read_to_end(&mut text).map_err(io)?;
    if text.len() as u64 > most {
        let words = format!("has more than {most} bytes; needs at most that");
        return Err(refusal(folder, name, &words));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::copy_part;

    #[test]
    fn a_part_is_cut_out_of_any_dimension() {
        let source: Vec<u8> = (0..24).collect();
        let part = |shape: &[usize], dim, first, last, bytes| {
            let mut part = vec![0; bytes];
            copy_part(&mut part, &source, shape, 2, Some((dim, first, last)));
            part
        };
        assert_eq!(part(&[3, 4], 0, 1, 2, 8), (8..16).collect::<Vec<u8>>());
        assert_eq!(
            part(&[3, 4], 1, 2, 4, 12),
            [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]
        );
        let mut whole = vec![0; 24];
        copy_part(&mut whole, &source, &[3, 4], 2, None);
        assert_eq!(whole, source);
    }
}

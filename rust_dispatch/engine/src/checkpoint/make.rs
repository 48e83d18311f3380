//! `lowlat make-checkpoint`: writes a built-in model's seeded weights as a checkpoint folder.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::{CommandFactory, Parser, ValueHint};
use lowlat_core::config::{self, ModelConfig};
use lowlat_core::plan::{self, PlannedTensor};
use serde_json::{Map, Value, json};

use super::{
    CONFIG_FILE, INDEX_FILE, SINGLE_FILE, TOKEN_MAP, TOKEN_MAP_FILE, abi_dtype, file_dtype,
};
use crate::EngineError;
use crate::cli::{finish, parse};
use crate::kernels::abi::ROW_MAJOR;
use crate::kernels::{Buffer, TensorInfo};
use crate::weights::{SeededWeights, WEIGHT_SEED};

const NAME: &str = "lowlat make-checkpoint";
/// Most bytes that are written: a model of true size would fill the disk with noise.
const MAX_BYTES: u64 = 8_000_000_000;
const MAX_SHARDS: u32 = 999;

const ABOUT: &str = "\
Write a built-in model as a checkpoint folder: config.json and safetensors files in the published
tensor names and dtypes.

The weights are those that `lowlat replay --model NAME` serves, so replaying the folder gives the
same tokens. DIR appears when it is complete; when something fails, nothing is left of it.";

const EXAMPLES: &str = "\
Examples:
  Write the small model in two files and serve it from there:
    lowlat make-checkpoint tiny-v4 ./tiny --shards 2
    lowlat replay examples/traces/small.json --model ./tiny

Exit codes:
  0  done
  1  refused: no such model, a folder that is not empty, a disk that is full; nothing was written
  2  the command line is wrong";

#[derive(Debug, Parser)]
#[command(name = "make-checkpoint", bin_name = "lowlat make-checkpoint", version)]
#[command(about = ABOUT, after_help = EXAMPLES, max_term_width = 100)]
struct Options {
    /// Built-in model: tiny-v4 or tiny-v41
    #[arg(value_name = "NAME")]
    model: String,

    /// Folder to make
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    folder: PathBuf,

    /// Files to spread the tensors over, with an index beside them; 1: a single file without one
    #[arg(long, value_name = "N", default_value_t = 4)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_SHARDS)))]
    shards: u32,

    /// Replace DIR where it is a checkpoint folder already
    #[arg(long)]
    force: bool,
}

/// The command's own words, for completion.
pub(crate) fn command() -> clap::Command {
    Options::command()
}

/// Runs the command with its arguments (its own name first) and gives its exit code.
pub fn run(
    args: impl IntoIterator<Item = OsString>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> u8 {
    let options = match parse::<Options>(NAME, args, out, err) {
        Ok(options) => options,
        Err(code) => return code,
    };
    let made = make(
        &options.model,
        &options.folder,
        options.shards,
        options.force,
    );
    let text = made.map(|made| {
        format!(
            "{}: {}, {} tensors in {} files, {} bytes\n",
            options.folder.display(),
            options.model,
            made.num_tensors,
            made.num_files,
            made.bytes
        )
    });
    finish(NAME, text, out, err)
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Made {
    /// Tensors.
    pub num_tensors: usize,
    /// Files that hold them.
    pub num_files: usize,
    /// Bytes of the tensors.
    pub bytes: u64,
}

/// Writes the built-in model `name` to `folder` in `num_shards` files, all or nothing. `force`
/// replaces a folder that holds a checkpoint and nothing else.
///
/// # Errors
/// [`EngineError::Refused`] with the folder or the model, what was seen and what is needed.
pub fn make(name: &str, folder: &Path, num_shards: u32, force: bool) -> Result<Made, EngineError> {
    let refuse = |words: String| EngineError::Refused(words);
    let Some(text) = config::built_in(name) else {
        let known: Vec<_> = config::BUILT_IN.iter().map(|(name, _)| *name).collect();
        return Err(refuse(format!(
            "{name} is no built-in model; needs one of {}",
            known.join(", ")
        )));
    };
    let config = ModelConfig::from_json(text)
        .map_err(|error| EngineError::Bug(format!("the built-in {name}: {error}")))?;
    let tensors = plan::tensors(&config);
    let bytes: u64 = tensors.iter().map(PlannedTensor::bytes).sum();
    if bytes > MAX_BYTES {
        return Err(refuse(format!(
            "{name} has {:.0} GB of weights; make-checkpoint writes at most {:.0} GB (tiny-v4, \
             tiny-v41)",
            bytes as f64 / 1e9,
            MAX_BYTES as f64 / 1e9
        )));
    }
    let target = Target::prepare(folder, force)?;
    let made = Writer::new(&config, &tensors, &target.partial)
        .write(text, num_shards as usize)
        .map_err(|error| cannot_write(folder, &error))?;
    target.finish()?;
    Ok(made)
}

fn cannot_write(folder: &Path, error: &io::Error) -> EngineError {
    EngineError::Refused(format!("{}: cannot be written: {error}", folder.display()))
}

/// The folder to be, under another name beside its place until it is complete.
struct Target {
    folder: PathBuf,
    partial: PathBuf,
    /// Where the folder that is replaced goes meanwhile.
    replaced: Option<PathBuf>,
}

impl Target {
    fn prepare(folder: &Path, force: bool) -> Result<Self, EngineError> {
        let refuse = |words: &str| {
            Err(EngineError::Refused(format!(
                "{}: {words}",
                folder.display()
            )))
        };
        let Some(name) = folder.file_name().map(|name| name.to_string_lossy()) else {
            return refuse("is no name for a new folder");
        };
        let beside =
            |tail: &str| folder.with_file_name(format!(".{name}.{}.{tail}", std::process::id()));
        let mut replaced = None;
        match fs::symlink_metadata(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(cannot_write(folder, &error)),
            Ok(metadata) if !metadata.is_dir() => {
                return refuse("is there and is no folder; needs a new or empty folder");
            }
            Ok(_) => {
                let files = names(folder).map_err(|error| cannot_write(folder, &error))?;
                if !files.is_empty() && !force {
                    return refuse("is not empty; needs a new or empty folder, or --force");
                }
                if let Some(other) = files.iter().find(|name| !is_checkpoint_file(name)) {
                    return refuse(&format!(
                        "has {other}, which is no part of a checkpoint; --force replaces \
                         checkpoint folders only"
                    ));
                }
                replaced = Some(beside("replaced"));
            }
        }
        let partial = beside("partial");
        fs::create_dir(&partial).map_err(|error| cannot_write(folder, &error))?;
        Ok(Self {
            folder: folder.to_path_buf(),
            partial,
            replaced,
        })
    }

    /// Gives the folder its name.
    fn finish(mut self) -> Result<(), EngineError> {
        let error = |error: io::Error| cannot_write(&self.folder, &error);
        if let Some(replaced) = &self.replaced {
            fs::rename(&self.folder, replaced).map_err(error)?;
        }
        if let Err(first) = fs::rename(&self.partial, &self.folder) {
            if let Some(replaced) = &self.replaced {
                // What was there comes back; the first error is the one that matters.
                let _ = fs::rename(replaced, &self.folder);
            }
            return Err(error(first));
        }
        if let Some(replaced) = self.replaced.take() {
            fs::remove_dir_all(&replaced).map_err(|error| cannot_write(&replaced, &error))?;
        }
        Ok(())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // Gone already when it got its name; else what was begun is of no use to anyone.
        let _ = fs::remove_dir_all(&self.partial);
    }
}

fn names(folder: &Path) -> io::Result<Vec<String>> {
    fs::read_dir(folder)?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect()
}

fn is_checkpoint_file(name: &str) -> bool {
    name == CONFIG_FILE || name == INDEX_FILE || name.ends_with(".safetensors")
}

/// One tensor of a file: of stacked experts one.
struct Item<'a> {
    planned: &'a PlannedTensor,
    /// Which one of the stack; 0 where nothing is stacked.
    part_idx: usize,
    name: String,
    bytes: u64,
}

struct Writer<'a> {
    weights: SeededWeights<'a>,
    folder: &'a Path,
    items: Vec<Item<'a>>,
    token_map: Option<Item<'a>>,
    /// The tensor that was made last: the experts of a stack follow each other.
    made: Option<(&'a str, Buffer<u8>)>,
}

impl<'a> Writer<'a> {
    fn new(config: &'a ModelConfig, tensors: &'a [PlannedTensor], folder: &'a Path) -> Self {
        let mut items = Vec::new();
        for planned in tensors {
            let parts = planned.num_experts().unwrap_or(1);
            items.extend((0..parts).map(|expert| Item {
                planned,
                part_idx: expert as usize,
                name: planned.expert_name(expert),
                bytes: planned.bytes() / parts,
            }));
        }
        let token_map = items.iter().position(|item| item.name == TOKEN_MAP);
        let token_map = token_map.map(|place| items.remove(place));
        Self {
            weights: SeededWeights::new(config, WEIGHT_SEED),
            folder,
            items,
            token_map,
            made: None,
        }
    }

    fn write(mut self, config_text: &str, num_shards: usize) -> io::Result<Made> {
        self.write_text(CONFIG_FILE, config_text)?;
        let items = std::mem::take(&mut self.items);
        let total: u64 = items.iter().map(|item| item.bytes).sum();
        let num_shards = num_shards.min(items.len());
        let mut made = Made {
            num_tensors: items.len(),
            num_files: num_shards,
            bytes: total,
        };
        let mut weight_map = Map::new();
        let mut rest = &items[..];
        let mut written = 0;
        for shard_idx in 0..num_shards {
            // Up to this shard's share of all bytes, at least one, and one left for each other.
            let share = total * (shard_idx as u64 + 1) / num_shards as u64;
            let most = rest.len() - (num_shards - shard_idx - 1);
            let mut count = 0;
            while count < most && (count == 0 || written + rest[count].bytes <= share) {
                written += rest[count].bytes;
                count += 1;
            }
            let (shard, later) = match shard_idx + 1 == num_shards {
                true => (rest, &rest[..0]),
                false => rest.split_at(count),
            };
            rest = later;
            let name = match num_shards {
                1 => SINGLE_FILE.to_owned(),
                _ => format!("model-{:05}-of-{num_shards:05}.safetensors", shard_idx + 1),
            };
            self.write_shard(&name, shard)?;
            weight_map.extend(
                shard
                    .iter()
                    .map(|item| (item.name.clone(), Value::from(name.as_str()))),
            );
        }
        if num_shards > 1 {
            let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
            self.write_text(INDEX_FILE, &format!("{index:#}\n"))?;
        }
        if let Some(token_map) = self.token_map.take() {
            made.num_tensors += 1;
            made.num_files += 1;
            made.bytes += token_map.bytes;
            self.write_shard(TOKEN_MAP_FILE, &[token_map])?;
        }
        Ok(made)
    }

    fn write_text(&self, name: &str, text: &str) -> io::Result<()> {
        let mut file = File::create_new(self.folder.join(name))?;
        file.write_all(text.as_bytes())?;
        file.sync_all()
    }

    fn write_shard(&mut self, name: &str, items: &[Item<'a>]) -> io::Result<()> {
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!({"format": "pt"}));
        let mut at = 0;
        for item in items {
            let entry = json!({
                "dtype": file_dtype(item.planned.dtype),
                "shape": item.planned.file_shape(),
                "data_offsets": [at, at + item.bytes],
            });
            header.insert(item.name.clone(), entry);
            at += item.bytes;
        }
        let mut header = Value::from(header).to_string();
        // Data begins at a multiple of 8, as the format's own writer has it.
        header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
        let mut file = BufWriter::new(File::create_new(self.folder.join(name))?);
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        for item in items {
            let first = item.part_idx * item.bytes as usize;
            let whole = self.made_tensor(item.planned)?;
            file.write_all(&whole[first..first + item.bytes as usize])?;
        }
        file.into_inner()
            .map_err(io::IntoInnerError::into_error)?
            .sync_all()
    }

    fn made_tensor(&mut self, planned: &'a PlannedTensor) -> io::Result<&[u8]> {
        if self
            .made
            .as_ref()
            .is_none_or(|(name, _)| *name != planned.name)
        {
            let info = TensorInfo {
                name: planned.name.clone(),
                dtype: abi_dtype(planned.dtype),
                layout: ROW_MAJOR,
                is_pool: false,
                shape: planned.shape.iter().map(|dim| *dim as usize).collect(),
                shard_dim: None,
            };
            let memory = self.weights.fill(&info, 0, 1).map_err(io::Error::other)?;
            self.made = Some((&planned.name, memory));
        }
        let (_, memory) = self.made.as_ref().expect("made above");
        Ok(memory.as_slice())
    }
}

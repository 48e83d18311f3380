//! Checkpoint folders: what is written can be read, by us and by the format's own crate; what is
//! wrong with a folder is one clear line; and a model from a folder is the built-in one bit for
//! bit, on 1, 2 and 4 ranks.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use lowlat_core::config::{ModelConfig, built_in};
use lowlat_core::plan::{self, MemoryPlan, PlanOptions, WeightDtype};
use lowlat_engine::EngineError;
use lowlat_engine::checkpoint::{Checkpoint, make};
use lowlat_engine::kernels::TensorInfo;
use lowlat_engine::kernels::abi::{Dtype, ROW_MAJOR};
use lowlat_engine::model::{Geometry, abi_config};
use lowlat_engine::step::{RuntimeSettings, StepRunner};
use lowlat_engine::weights::{SeededWeights, WEIGHT_SEED};
use serde_json::{Value, json};

#[path = "support/command.rs"]
mod command;
#[path = "support/engine.rs"]
mod support;
use command::folder_of;
use support::{Request, kernels, library, prompt, serve, settings, start};

const SHARD_2: &str = "model-00002-of-00003.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const TOKEN_MAP: &str = "engram_token_map.safetensors";

/// A folder of this test's own, empty.
fn folder(name: &str) -> PathBuf {
    folder_of("checkpoint", name)
}

const MODELS: [&str; 2] = ["tiny-v4", "tiny-v41"];

/// The test, of each model.
fn on_each(test: impl Fn(&str)) {
    for model in MODELS {
        println!("{model}");
        test(model);
    }
}

/// Which of two values the model has.
fn of<T>(model: &str, v4: T, v41: T) -> T {
    match model {
        "tiny-v4" | "v4-flash" => v4,
        _ => v41,
    }
}

/// The small model in three files (and a token map), made once.
fn tiny(model: &str) -> &'static Path {
    static TINY: [OnceLock<PathBuf>; 2] = [const { OnceLock::new() }; 2];
    TINY[of(model, 0, 1)].get_or_init(|| {
        let folder = folder(model).join("made");
        make::make(model, &folder, 3, false).unwrap();
        folder
    })
}

/// A copy of it that a test may break. Weights that stay as they are share their bytes.
fn broken(model: &str, name: &str) -> PathBuf {
    let copy = folder(&format!("{name}_{model}"));
    for entry in fs::read_dir(tiny(model)).unwrap() {
        let entry = entry.unwrap();
        let to = copy.join(entry.file_name());
        match entry.file_name().to_string_lossy().ends_with(".json") {
            true => drop(fs::copy(entry.path(), to).unwrap()),
            false => fs::hard_link(entry.path(), to).unwrap(),
        }
    }
    copy
}

/// The line with which the folder is refused, without the folder.
#[track_caller]
fn refused(folder: &Path) -> String {
    match Checkpoint::open(folder) {
        Ok(checkpoint) => panic!("opened: {}", checkpoint.summary()),
        Err(EngineError::Refused(line)) => {
            assert!(!line.contains('\n'), "{line}");
            let start = format!("{}", folder.display());
            let rest = line
                .strip_prefix(&start)
                .unwrap_or_else(|| panic!("{line}"));
            rest.trim_start_matches(['/', ':', ' ']).to_owned()
        }
        Err(other) => panic!("{other:?}"),
    }
}

fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    edit(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

/// Header and data of a safetensors file.
fn parts(path: &Path) -> (Value, Vec<u8>) {
    let bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    (header, bytes[8 + length..].to_vec())
}

fn write_parts(path: &Path, header: &Value, data: &[u8]) {
    let text = header.to_string();
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes.extend_from_slice(data);
    // The file may be shared with the folder that it was copied from.
    fs::remove_file(path).unwrap();
    fs::write(path, bytes).unwrap();
}

fn edit_header(path: &Path, edit: impl FnOnce(&mut Value)) {
    let (mut header, data) = parts(path);
    edit(&mut header);
    write_parts(path, &header, &data);
}

fn config(model: &str) -> ModelConfig {
    ModelConfig::from_json(built_in(model).unwrap()).unwrap()
}

/// Name of some tensor in the second file that `pick` likes.
fn in_shard_2(folder: &Path, pick: impl Fn(&str) -> bool) -> String {
    let (header, _) = parts(&folder.join(SHARD_2));
    let mut names = header.as_object().unwrap().keys();
    let found = names.find(|name| *name != "__metadata__" && pick(name));
    found.unwrap().clone()
}

#[test]
fn the_files_are_what_the_published_crate_reads() {
    on_each(|model| {
        let config = config(model);
        let weights = SeededWeights::new(&config, WEIGHT_SEED);
        let mut seen = 0;
        for entry in fs::read_dir(tiny(model)).unwrap() {
            let path = entry.unwrap().path();
            if path
                .extension()
                .is_none_or(|ending| ending != "safetensors")
            {
                continue;
            }
            let bytes = fs::read(&path).unwrap();
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            seen += file.len();
            for (name, dtype, shape) in [
                ("embed.weight", safetensors::Dtype::BF16, vec![512, 128]),
                (
                    "layers.3.ffn.experts.15.w2.weight",
                    safetensors::Dtype::I8,
                    of(model, vec![128, 256], vec![128, 64]),
                ),
                (
                    "layers.3.ffn.experts.15.w2.scale",
                    safetensors::Dtype::F8_E8M0,
                    of(model, vec![128, 16], vec![128, 4]),
                ),
                (
                    "mtp.2.attn.wo_b.weight",
                    safetensors::Dtype::F8_E4M3,
                    of(model, vec![128, 512], vec![128, 128]),
                ),
                (
                    of(model, "layers.2.ffn.gate.tid2eid", "engram.token_map"),
                    safetensors::Dtype::I64,
                    of(model, vec![512, 6], vec![512]),
                ),
            ] {
                let Ok(tensor) = file.tensor(name) else {
                    continue;
                };
                assert_eq!(
                    (tensor.dtype(), tensor.shape()),
                    (dtype, &shape[..]),
                    "{name}"
                );
                // Its bytes are the built-in model's: of an expert those behind 15 others.
                let stacked = name.replace(".15.", ".");
                let info = TensorInfo {
                    dtype: match dtype {
                        safetensors::Dtype::BF16 => Dtype::Bf16,
                        safetensors::Dtype::I8 => Dtype::Fp4x2,
                        safetensors::Dtype::F8_E8M0 => Dtype::Ue8m0,
                        safetensors::Dtype::I64 => Dtype::I64,
                        _ => Dtype::E4m3,
                    },
                    layout: ROW_MAJOR,
                    is_pool: false,
                    shape: match stacked == name {
                        true => shape,
                        false => [vec![16], shape].concat(),
                    },
                    shard_dim: None,
                    name: stacked,
                };
                let whole = weights.fill(&info, 0, 1).unwrap();
                let first = whole.len() - tensor.data().len();
                assert_eq!(tensor.data(), &whole.as_slice()[first..], "{name}");
                seen += 1000;
            }
        }
        // Five that were looked at; each layer's 96 expert tensors and some 30 others, and so on.
        let ours: u64 = plan::tensors(&config)
            .iter()
            .map(|tensor| tensor.num_experts().unwrap_or(1))
            .sum();
        assert_eq!(seen as u64, 5000 + ours);
    });
}

/// Every rank's part of every tensor is the part that the built-in model has.
#[test]
fn every_part_is_the_built_in_models() {
    let Some(kernels) = kernels() else { return };
    on_each(|model| {
        let config = config(model);
        let weights = SeededWeights::new(&config, WEIGHT_SEED);
        let checkpoint = Checkpoint::open(tiny(model)).unwrap();
        assert_eq!(**checkpoint.config(), config);
        let mut expected_bytes = 0;
        for tp_size in [1, 2, 4] {
            for rank in 0..tp_size {
                let abi = abi_config(&config, &geometry(&config, tp_size), rank);
                let model = kernels.create_model("scalar", &abi).unwrap();
                for info in model.tensors().unwrap() {
                    let ours = checkpoint.fill(&info, rank, tp_size).unwrap();
                    let theirs = weights.fill(&info, rank, tp_size).unwrap();
                    let same = ours.as_slice() == theirs.as_slice();
                    assert!(same, "{} on rank {rank} of {tp_size}", info.name);
                    if !info.is_pool {
                        expected_bytes += info.bytes() as u64;
                    }
                }
            }
        }
        assert_eq!(checkpoint.copied_bytes(), expected_bytes);
    });
}

fn geometry(config: &ModelConfig, tp_size: u32) -> Geometry {
    Geometry {
        tp_size,
        widths: vec![6],
        max_batch: 3,
        max_rows: 32,
        page_size: plan::default_page_size(config),
        num_pages: 3 * 5,
        wait_budget_ns: 1_000_000_000,
    }
}

/// The plan, which knows no kernels, and the kernels, which know no plan, have one list: names,
/// dtypes, shapes and splits of all tensors, on every rank; and the pools that the plan counts.
#[test]
fn the_plan_is_the_kernels_own_list() {
    let Some(kernels) = kernels() else { return };
    on_each(|model| {
        let config = config(model);
        for tp_size in [1, 2, 4] {
            let options = PlanOptions {
                tp_size,
                page_size: None,
                context: Some(5 * u64::from(plan::default_page_size(&config)) - 3),
                requests: 3,
            };
            let memory = MemoryPlan::new(&config, &options).unwrap();
            for rank in 0..tp_size {
                let abi = abi_config(&config, &geometry(&config, tp_size), rank);
                let model = kernels.create_model("scalar", &abi).unwrap();
                let (pools, theirs): (Vec<TensorInfo>, Vec<_>) = model
                    .tensors()
                    .unwrap()
                    .into_iter()
                    .partition(|info| info.is_pool);
                let mut theirs: Vec<_> = theirs
                    .into_iter()
                    .map(|info| {
                        let shape: Vec<u64> = info.shape.iter().map(|dim| *dim as u64).collect();
                        (
                            info.name,
                            format!("{:?}", info.dtype),
                            shape,
                            info.shard_dim,
                        )
                    })
                    .collect();
                let mut ours: Vec<_> = plan::tensors(&config)
                    .iter()
                    .map(|tensor| {
                        (
                            tensor.name.clone(),
                            format!("{:?}", tensor.rank_dtype),
                            tensor.rank_shape(rank, tp_size),
                            tensor.rank_range(rank, tp_size).map(|range| range.0),
                        )
                    })
                    .collect();
                theirs.sort();
                ours.sort();
                for (ours, theirs) in ours.iter().zip(&theirs) {
                    assert_eq!(ours, theirs);
                }
                assert_eq!(ours.len(), theirs.len());
                let pool_bytes: usize = pools.iter().map(TensorInfo::bytes).sum();
                let load = memory.load.as_ref().unwrap();
                assert_eq!(load.total_bytes_whole, pool_bytes as u64);
            }
        }
    });
}

/// Tokens, drafts and logits of every step, and the record's digest, from the folder and from the
/// built-in. Proved by another seed of the weights in the folder.
#[test]
fn serving_a_folder_is_serving_the_built_in() {
    let Some(library) = library() else { return };
    on_each(|model| {
        let requests: Vec<Request> = (0..2)
            .map(|uid| Request {
                prompt: prompt(u64::from(uid) + 5, 40, 500),
                output: 10,
                temperature: [0.0, 0.8][uid as usize],
                uid,
            })
            .collect();
        for tp_size in [1, 2, 4] {
            let run = |served: &str| {
                let mut runtime = start(RuntimeSettings {
                    model: served.into(),
                    tp_size,
                    max_batch: 2,
                    ..settings(&library)
                });
                let run = serve(&mut runtime, &requests, 2, 32, |_| None);
                let facts = runtime.info().facts.clone();
                let fact = |name: &str| {
                    let fact = facts.iter().find(|fact| fact.0 == name);
                    fact.map(|fact| fact.1.clone())
                };
                let number = |name| fact(name).map(|text| text.parse::<f64>().unwrap());
                (
                    (run, runtime.steps_digest(), fact("record_digest")),
                    number("checkpoint_bytes_copied"),
                    number("weight_bytes_per_rank"),
                )
            };
            let (ours, copied, rank_bytes) = run(tiny(model).to_str().unwrap());
            let (theirs, none, _) = run(model);
            assert_eq!(ours, theirs, "{model}, {tp_size} ranks");
            assert_ne!(ours.1, 0);
            assert_eq!(none, None);
            // Ranks differ only by Engram's columns, so all is near the first one's times all.
            let ratio = copied.unwrap() / (rank_bytes.unwrap() * f64::from(tp_size));
            assert!((0.9..1.1).contains(&ratio), "{ratio}");
        }
    });
}

/// Every routed expert matters, of layers whose gate chooses and of layers whose table does: with
/// one expert's last matrix set to 0, the same prompt gives other logits.
#[test]
fn every_expert_of_the_small_models_is_used() {
    let Some(library) = library() else { return };
    on_each(|model| {
        let folder = folder(&format!("experts_{model}")).join("made");
        make::make(model, &folder, 1, false).unwrap();
        let path = folder.join("model.safetensors");
        let (header, _) = parts(&path);
        let first = fs::metadata(&path).unwrap().len();
        let file = fs::OpenOptions::new().read(true).write(true).open(&path);
        let file = file.unwrap();
        let data = |name: &str| {
            let offsets = &header[name]["data_offsets"];
            let [begin, end] = [0, 1].map(|at| offsets[at].as_u64().unwrap());
            (begin, (end - begin) as usize)
        };
        let data_bytes = header
            .as_object()
            .unwrap()
            .values()
            .filter_map(|entry| entry["data_offsets"][1].as_u64())
            .max();
        let first = first - data_bytes.unwrap();
        let requests = [Request {
            prompt: prompt(5, 40, 500),
            output: 1,
            temperature: 0.0,
            uid: 0,
        }];
        let digest = || {
            let mut runtime = start(RuntimeSettings {
                model: folder.to_str().unwrap().into(),
                max_batch: 1,
                kv_tokens: 128,
                speculative: false,
                ..settings(&library)
            });
            serve(&mut runtime, &requests, 1, 40, |_| None);
            runtime.steps_digest()
        };
        let whole = digest();
        let num_layers = config(model).layers.len();
        let num_hashed = of(model, 3, 0);
        for layers in [0..num_hashed, num_hashed..num_layers] {
            for expert in 0..16 {
                if layers.is_empty() {
                    continue;
                }
                let names = layers
                    .clone()
                    .map(|layer| format!("layers.{layer}.ffn.experts.{expert}.w2.weight"));
                let mut kept = Vec::new();
                for name in names {
                    let (begin, bytes) = data(&name);
                    let mut weight = vec![0; bytes];
                    file.read_exact_at(&mut weight, first + begin).unwrap();
                    file.write_all_at(&vec![0; bytes], first + begin).unwrap();
                    kept.push((first + begin, weight));
                }
                assert_ne!(digest(), whole, "expert {expert} of layers {layers:?}");
                for (at, weight) in kept {
                    file.write_all_at(&weight, at).unwrap();
                }
            }
        }
        assert_eq!(digest(), whole, "put back");
    });
}

#[test]
fn one_file_without_an_index_is_read_too() {
    on_each(|model| {
        let folder = folder(&format!("single_{model}")).join("made");
        let made = make::make(model, &folder, 1, false).unwrap();
        assert!(folder.join("model.safetensors").is_file());
        assert!(!folder.join(INDEX).exists());
        let checkpoint = Checkpoint::open(&folder).unwrap();
        assert_eq!(
            checkpoint.summary(),
            format!(
                "{} files, {} tensors used",
                of(model, 1, 2),
                made.num_tensors
            )
        );
    });
}

#[test]
fn parts_that_are_not_served_are_counted_and_left_alone() {
    on_each(|model| {
        let folder = broken(model, "vision");
        let extra = folder.join("model-vision.safetensors");
        let entry =
            |begin: u64| json!({"dtype": "F16", "shape": [2], "data_offsets": [begin, begin + 4]});
        let header = json!({
            "vision.blocks.0.weight": entry(0),
            "vision.blocks.1.weight": entry(4),
            "aligner.weight": entry(8),
            "mtp.2.confidence_head.proj.weight": entry(12),
        });
        fs::write(&extra, "").unwrap();
        write_parts(&extra, &header, &[0; 16]);
        edit_json(&folder.join(INDEX), |index| {
            for name in header.as_object().unwrap().keys() {
                index["weight_map"][name] = "model-vision.safetensors".into();
            }
        });
        let summary = Checkpoint::open(&folder).unwrap().summary();
        assert!(
            summary.ends_with(", 1 of aligner, 1 of confidence_head, 2 of vision ignored"),
            "{summary}"
        );
    });
}

/// The published model's tensors in one file of its size, of which only the header was ever
/// written: opening it touches no weight. Its header is longer than any shard's.
#[test]
fn a_checkpoint_of_true_size_opens_without_reading_its_data() {
    true_size("v41-flash");
    true_size("v4-flash");
}

fn true_size(model: &str) {
    let folder = folder(&format!("true_size_{model}"));
    let text = built_in(model).unwrap();
    fs::write(folder.join("config.json"), text).unwrap();
    let config = ModelConfig::from_json(text).unwrap();
    let mut header = serde_json::Map::new();
    let mut at = 0;
    let mut add = |name: String, dtype: &str, shape: &[u64], bytes: u64| {
        let offsets = [at, at + bytes];
        at += bytes;
        header.insert(
            name,
            json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}),
        );
    };
    for tensor in plan::tensors(&config) {
        let dtype = match tensor.dtype {
            WeightDtype::I64 if tensor.name == "engram.token_map" => continue,
            WeightDtype::I64 => "I64",
            WeightDtype::I32 => "I32",
            WeightDtype::F32 => "F32",
            WeightDtype::Bf16 => "BF16",
            WeightDtype::E4m3 => "F8_E4M3",
            WeightDtype::Ue8m0 => "F8_E8M0",
            WeightDtype::Fp4x2 => "I8",
        };
        let experts = tensor.num_experts().unwrap_or(1);
        for expert in 0..experts {
            let (name, bytes) = (tensor.expert_name(expert), tensor.bytes() / experts);
            add(name, dtype, tensor.file_shape(), bytes);
        }
    }
    add(
        "mtp.2.confidence_head.proj.weight".into(),
        "BF16",
        &[1, 5376],
        10752,
    );
    let vision = of(model, 0, 269);
    for number in 0..vision {
        add(format!("vision.{number}"), "BF16", &[1], 2);
    }
    // As published; V4's is not known. A layer has 15 tensors of attention and its norms, 6 of the
    // hyper-connection, 6 of the shared expert, a gate with a bias or a table, and the experts'.
    let (layers, experts) = (43 + 3, 6 * 256);
    let ours = layers * (10 + 3 + 2 + 6 + 6 + 2 + experts)
        + 20 * 4
        + 21 * (4 + 4 + 3)
        + 3
        + 3
        + 3
        + 1
        + 3
        + 2;
    assert_eq!(header.len(), of(model, ours + 1, 96_085));
    let token_map = json!({"engram.token_map":
        {"dtype": "I64", "shape": [129_280], "data_offsets": [0, 129_280 * 8]}});
    let files = [
        ("model.safetensors", Value::from(header), at),
        (TOKEN_MAP, token_map, 129_280 * 8),
    ];
    for (name, header, data) in files.into_iter().take(of(model, 1, 2)) {
        let path = folder.join(name);
        fs::write(&path, "").unwrap();
        write_parts(&path, &header, &[]);
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        let length = file.metadata().unwrap().len() + data;
        if let Err(error) = file.set_len(length) {
            println!("skipped: no file of {length} bytes here: {error}");
            return;
        }
    }
    let checkpoint = Checkpoint::open(&folder);
    // Tools that copy folders may not know that the file is empty.
    let _ = fs::remove_dir_all(&folder);
    let summary = checkpoint.unwrap().summary();
    let (used, v41) = (ours, "2 files, 95816 tensors used");
    let expected = of(
        model,
        format!("1 files, {used} tensors used"),
        v41.to_owned(),
    );
    let vision = of(model, "", ", 269 of vision");
    assert_eq!(
        summary,
        format!("{expected}, 1 of confidence_head{vision} ignored")
    );
}

#[test]
fn missing_pieces_are_named() {
    on_each(|model| {
        let none = folder(&format!("none_{model}"));
        assert!(
            refused(&none).starts_with("config.json: No such file"),
            "{}",
            refused(&none)
        );
        fs::write(none.join("config.json"), built_in(model).unwrap()).unwrap();
        assert_eq!(
            refused(&none),
            "has neither model.safetensors.index.json nor model.safetensors; needs one"
        );

        let shard = broken(model, "shard");
        fs::remove_file(shard.join(SHARD_2)).unwrap();
        let line = refused(&shard);
        assert!(
            line.starts_with(&format!("{SHARD_2}: is missing; {INDEX} says that ")),
            "{line}"
        );

        let tensor = broken(model, "tensor");
        let name = in_shard_2(&tensor, |name| name.contains(".experts.7.w3.weight"));
        let (mut header, data) = parts(&tensor.join(SHARD_2));
        let entry = header.as_object_mut().unwrap().remove(&name).unwrap();
        // The bytes stay owned, by a tensor of a part that is not served.
        header["vision.filler"] = entry;
        write_parts(&tensor.join(SHARD_2), &header, &data);
        edit_json(&tensor.join(INDEX), |index| {
            let map = index["weight_map"].as_object_mut().unwrap();
            let file = map.remove(&name).unwrap();
            map.insert("vision.filler".into(), file);
        });
        assert_eq!(
            refused(&tensor),
            format!(
                "{name}: is missing from all {} files; needs I8 {}",
                of(model, 3, 4),
                of(model, "[512, 64]", "[128, 64]")
            )
        );

        if model == "tiny-v4" {
            return;
        }
        let map = broken(model, "map");
        fs::remove_file(map.join(TOKEN_MAP)).unwrap();
        assert_eq!(
            refused(&map),
            format!(
                "engram.token_map: is missing from all 3 files; needs I64 [512] in {TOKEN_MAP}; it \
                 is made from the tokenizer"
            )
        );
    });
}

#[test]
fn wrong_dtypes_and_shapes_are_named() {
    on_each(|model| {
        let folder = broken(model, "dtype");
        let name = in_shard_2(&folder, |name| name.ends_with(".shared_experts.w1.weight"));
        edit_header(&folder.join(SHARD_2), |header| {
            header[&name]["dtype"] = "I8".into()
        });
        assert_eq!(
            refused(&folder),
            format!("{SHARD_2}: {name}: is I8; needs F8_E4M3")
        );
        edit_header(&folder.join(SHARD_2), |header| {
            header[&name]["dtype"] = "F8_E4M3".into();
            header[&name]["shape"] = json!([of(model, 256, 64), 256]);
        });
        assert_eq!(
            refused(&folder),
            format!(
                "{SHARD_2}: {name}: is {}; needs {}",
                of(model, "[256, 256]", "[64, 256]"),
                of(model, "[512, 128]", "[128, 128]")
            )
        );
    });
}

#[test]
fn files_that_lie_are_named() {
    on_each(|model| {
        let folder = broken(model, "lies");
        let path = folder.join(SHARD_2);
        let whole = fs::read(&path).unwrap();
        let cut = |keep: usize| {
            fs::remove_file(&path).unwrap();
            fs::write(&path, &whole[..keep]).unwrap();
            refused(&folder)
        };
        let line = cut(whole.len() - 1);
        assert!(
            line.starts_with(&format!("{SHARD_2}: ends after ")),
            "{line}"
        );
        assert!(cut(100).starts_with(&format!("{SHARD_2}: ends 92 bytes into its header")));
        assert_eq!(
            cut(0),
            format!("{SHARD_2}: has 0 bytes; a safetensors file has at least 8")
        );

        let (header, data) = (broken(model, "overlap"), in_shard_2(tiny(model), |_| true));
        edit_header(&header.join(SHARD_2), |header| {
            let begin = header[&data]["data_offsets"][0].as_u64().unwrap();
            let end = header[&data]["data_offsets"][1].as_u64().unwrap();
            header["x"] =
                json!({"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]});
        });
        let line = refused(&header);
        assert!(
            line.starts_with(&format!("{SHARD_2}: ")) && line.contains("overlaps"),
            "{line}"
        );

        let pipe = broken(model, "folder_as_file");
        fs::remove_file(pipe.join(SHARD_2)).unwrap();
        fs::create_dir(pipe.join(SHARD_2)).unwrap();
        assert_eq!(refused(&pipe), format!("{SHARD_2}: is not a file"));
    });
}

#[test]
fn duplicates_and_a_lying_index_are_named() {
    on_each(|model| {
        let folder = broken(model, "duplicate");
        let name = in_shard_2(&folder, |_| true);
        let third = "model-00003-of-00003.safetensors";
        let (mut header, mut data) = parts(&folder.join(third));
        header[&name] = json!({
            "dtype": "U8", "shape": [8], "data_offsets": [data.len(), data.len() + 8]
        });
        data.extend_from_slice(&[0; 8]);
        write_parts(&folder.join(third), &header, &data);
        assert_eq!(
            refused(&folder),
            format!("{third}: {name}: is in {SHARD_2} too; needs to be in one file only")
        );

        let folder = broken(model, "wrong_file");
        edit_json(&folder.join(INDEX), |index| {
            index["weight_map"][&name] = third.into()
        });
        assert_eq!(
            refused(&folder),
            format!("{INDEX}: {name}: is in {third} by the index; it is in {SHARD_2}")
        );
        edit_json(&folder.join(INDEX), |index| {
            index["weight_map"][&name] = SHARD_2.into();
            index["weight_map"]["layers.77.x"] = third.into();
        });
        assert_eq!(
            refused(&folder),
            format!("{INDEX}: layers.77.x: is in {third} by the index; no file has it")
        );
        edit_json(&folder.join(INDEX), |index| {
            let map = index["weight_map"].as_object_mut().unwrap();
            map.remove("layers.77.x");
            map.remove(&name);
        });
        assert_eq!(
            refused(&folder),
            format!("{SHARD_2}: {name}: is not in {INDEX}")
        );
        edit_json(&folder.join(INDEX), |index| {
            index["weight_map"][&name] = "../model.safetensors".into();
        });
        assert!(
            refused(&folder).contains("needs the name of a .safetensors file beside the index")
        );
        fs::write(folder.join(INDEX), "{\"weight_map\": 3}").unwrap();
        assert!(refused(&folder).starts_with(&format!("{INDEX}: is no index: invalid type")));
    });
}

/// A tensor under the model's own names that it does not have means another model.
#[test]
fn tensors_of_another_model_are_named() {
    on_each(|model| {
        let folder = broken(model, "other");
        for (from, to) in [
            (
                "layers.5.attn_norm.weight",
                of(
                    model,
                    "layers.5.attn.indexer.wk.weight",
                    "layers.5.attn.compressor.ape",
                ),
            ),
            (
                "layers.5.ffn.experts.3.w1.scale",
                "layers.5.ffn.experts.16.w1.scale",
            ),
            (
                "layers.5.ffn.experts.3.w1.scale",
                "layers.5.ffn.experts.03.w1.scale",
            ),
        ] {
            let index: Value =
                serde_json::from_str(&fs::read_to_string(tiny(model).join(INDEX)).unwrap())
                    .unwrap();
            let file = index["weight_map"][from].as_str().unwrap().to_owned();
            let extra = folder.join("model-extra.safetensors");
            fs::write(&extra, "").unwrap();
            let header = json!({to: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}});
            write_parts(&extra, &header, &[0; 4]);
            let mut index = index;
            index["weight_map"][to] = "model-extra.safetensors".into();
            fs::write(folder.join(INDEX), index.to_string()).unwrap();
            assert!(folder.join(file).exists());
            assert_eq!(
                refused(&folder),
                format!(
                    "model-extra.safetensors: {to}: is no tensor of this model (1 such); needs a \
                 config.json that has it"
                )
            );
        }
    });
}

#[test]
fn configurations_that_cannot_be_served_are_named() {
    on_each(|model| {
        let folder = broken(model, "config");
        let path = folder.join("config.json");
        let with = |edit: &dyn Fn(&mut Value)| {
            fs::copy(tiny(model).join("config.json"), &path).unwrap();
            edit_json(&path, edit);
            refused(&folder)
        };
        let line = with(&|config| config["quantization_config"]["quant_method"] = "awq".into());
        assert_eq!(
            line,
            "config.json: quantization_config.quant_method is \"awq\"; these kernels need \"fp8\""
        );
        let line = with(&|config| {
            config["model_type"] = "llama".into();
            config["architectures"] = json!(["LlamaForCausalLM"]);
        });
        assert!(
            line.starts_with("config.json: model_type is \"llama\""),
            "{line}"
        );
        let line = with(&|config| config["hidden_size"] = "128".into());
        assert!(
            line.starts_with("config.json: hidden_size is \"128\"; needs"),
            "{line}"
        );
        // Sizes that no file has are found by the first tensor, before anything is allocated.
        let line = with(&|config| config["n_routed_experts"] = (1u64 << 30).into());
        assert!(
            line.contains("layers.0.ffn.gate.weight: is [16, 128]; needs [1073741824, 128]"),
            "{line}"
        );
        let line = with(&|config| config["hidden_size"] = (1u64 << 30).into());
        assert!(
            line.contains("embed.weight: is [512, 128]; needs [512, 1073741824]"),
            "{line}"
        );
        let line = with(&|config| config["num_hidden_layers"] = 1_000_000.into());
        assert!(
            line.starts_with("config.json: num_hidden_layers is 1000000"),
            "{line}"
        );
        fs::write(&path, "{").unwrap();
        assert!(refused(&folder).starts_with("config.json: config.json is not JSON"));
        fs::write(&path, [0xff, 0xfe]).unwrap();
        assert_eq!(refused(&folder), "config.json: is not UTF-8 text");
        fs::write(&path, vec![b' '; 5 << 20]).unwrap();
        assert_eq!(
            refused(&folder),
            "config.json: has more than 4194304 bytes; needs at most that"
        );
    });
}

#[test]
fn a_nested_configuration_is_served_too() {
    on_each(|model| {
        let folder = broken(model, "nested");
        edit_json(&folder.join("config.json"), |config| {
            let mut text = config.clone();
            let quantization = text
                .as_object_mut()
                .unwrap()
                .remove("quantization_config")
                .unwrap();
            *config = json!({
                "model_type": of(model, "deepseek_v4", "deepseek_v41"),
                "architectures": [of(model, "DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM")],
                "text_config": text,
                "quantization_config": quantization,
            });
        });
        let checkpoint = Checkpoint::open(&folder).unwrap();
        assert_eq!(**checkpoint.config(), config(model));
    });
}

/// A value out of range would lead out of the Engram tables.
#[test]
fn a_token_map_that_leads_nowhere_is_named() {
    let folder = broken("tiny-v41", "token_map");
    let path = folder.join(TOKEN_MAP);
    for (value, words) in [(400i64, "400"), (-1, "-1")] {
        let (header, mut data) = parts(&path);
        data[8 * 7..8 * 8].copy_from_slice(&value.to_le_bytes());
        write_parts(&path, &header, &data);
        assert_eq!(
            refused(&folder),
            format!(
                "{TOKEN_MAP}: engram.token_map: maps token 7 to {words}; needs 0 to 399, below \
                 engram_compressed_vocab_size"
            )
        );
    }
}

/// An expert out of range would lead out of the weights.
#[test]
fn a_table_of_experts_that_leads_nowhere_is_named() {
    let name = "layers.2.ffn.gate.tid2eid";
    let folder = broken("tiny-v4", "tid2eid");
    let index = fs::read_to_string(folder.join(INDEX)).unwrap();
    let index: Value = serde_json::from_str(&index).unwrap();
    let file = index["weight_map"][name].as_str().unwrap();
    let path = folder.join(file);
    // The last would be expert 0 if only its lower half were looked at.
    for value in [16i64, -1, 1 << 32] {
        let (header, mut data) = parts(&path);
        let first = header[name]["data_offsets"][0].as_u64().unwrap() as usize;
        data[first + 8 * 100..first + 8 * 101].copy_from_slice(&value.to_le_bytes());
        write_parts(&path, &header, &data);
        assert_eq!(
            refused(&folder),
            format!("{file}: {name}: names expert {value}; needs 0 to 15, below n_routed_experts")
        );
    }
    // Written while the folder is open, it is found when a rank takes its part.
    let (header, mut data) = parts(&path);
    let first = header[name]["data_offsets"][0].as_u64().unwrap() as usize;
    data[first + 8 * 100..first + 8 * 101].copy_from_slice(&0i64.to_le_bytes());
    write_parts(&path, &header, &data);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let info = TensorInfo {
        name: name.into(),
        dtype: Dtype::I32,
        layout: ROW_MAJOR,
        is_pool: false,
        shape: vec![512, 6],
        shard_dim: None,
    };
    let narrowed = checkpoint.fill(&info, 0, 1).unwrap();
    let wide = &data[first..first + 512 * 6 * 8];
    for (ours, theirs) in narrowed.as_slice().chunks(4).zip(wide.chunks(8)) {
        assert_eq!((ours, &[0; 4][..]), (&theirs[..4], &theirs[4..]));
    }
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    let header_bytes = fs::metadata(&path).unwrap().len() - data.len() as u64;
    file.write_all_at(&(1i64 << 32).to_le_bytes(), header_bytes + first as u64)
        .unwrap();
    let line = checkpoint.fill(&info, 0, 1).unwrap_err();
    assert!(line.ends_with("names expert 4294967296; needs 0 to 15, below n_routed_experts"));
}

/// V4 as it was first published has one layer of another kind of draft, which is left alone.
#[test]
fn a_draft_of_another_kind_is_left_alone() {
    let folder = broken("tiny-v4", "first");
    edit_json(&folder.join("config.json"), |config| {
        let fields = config.as_object_mut().unwrap();
        fields.retain(|name, _| !name.starts_with("dspark_"));
        fields.insert("num_nextn_predict_layers".into(), 1.into());
    });
    let checkpoint = Checkpoint::open(&folder).unwrap();
    assert_eq!(checkpoint.config().draft, None);
    let summary = checkpoint.summary();
    assert!(summary.ends_with(" of mtp ignored"), "{summary}");
}

#[test]
fn a_file_that_is_cut_while_it_is_open_is_a_refusal() {
    on_each(|model| {
        let folder = folder(&format!("cut_{model}")).join("made");
        make::make(model, &folder, 1, false).unwrap();
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let path = folder.join("model.safetensors");
        fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(4096)
            .unwrap();
        let info = TensorInfo {
            name: "norm.weight".into(),
            dtype: Dtype::Bf16,
            layout: ROW_MAJOR,
            is_pool: false,
            shape: vec![128],
            shard_dim: None,
        };
        let line = checkpoint.fill(&info, 0, 1).unwrap_err();
        assert!(
            line.contains("norm.weight: the file has 4096 bytes now"),
            "{line}"
        );
        // Nor is a tensor filled that the configuration has another way.
        let other = TensorInfo {
            shape: vec![64],
            ..info
        };
        let line = checkpoint.fill(&other, 0, 1).unwrap_err();
        assert!(
            line.contains("norm.weight [64] in layout 0 is no part"),
            "{line}"
        );
    });
}

/// Names in `folder`, sorted.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_folder_that_is_there_stays_as_it_is() {
    let (model, room) = ("tiny-v41", folder("make"));
    let made = room.join("made");
    let fails = |name: &str, folder: &Path, force: bool| {
        make::make(name, folder, 2, force).unwrap_err().to_string()
    };
    fs::create_dir(&made).unwrap();
    make::make(model, &made, 2, false).unwrap();
    let files = names(&made);
    assert_eq!(
        files,
        [
            "config.json",
            TOKEN_MAP,
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            INDEX,
        ]
    );
    assert!(
        fails("tiny-v41", &made, false)
            .ends_with("made: is not empty; needs a new or empty folder, or --force")
    );
    make::make(model, &made, 5, true).unwrap();
    assert_eq!(names(&made).len(), 8);
    assert_eq!(names(&room), ["made"], "nothing is left beside it");

    fs::write(made.join("notes.txt"), "mine").unwrap();
    assert!(fails("tiny-v41", &made, true).ends_with(
        "made: has notes.txt, which is no part of a checkpoint; --force replaces checkpoint \
         folders only"
    ));
    fs::write(room.join("file"), "").unwrap();
    assert!(fails("tiny-v41", &room.join("file"), true).contains("is there and is no folder"));
    assert!(fails("tiny-v41", &room.join("no/such"), false).contains("cannot be written: No such"));
    assert!(
        fails("tiny", &room.join("new"), false).starts_with("tiny is no built-in model; needs")
    );
    assert!(
        fails("v41-flash", &room.join("new"), false).contains("GB of weights; make-checkpoint")
    );
    assert!(fails("v4-flash", &room.join("new"), false).contains("v4-flash has 167 GB of weights"));
    assert_eq!(names(&room), ["file", "made"]);
}

#[test]
fn the_command_line_ends_as_it_says() {
    let room = folder("command");
    let run = |words: &[&str]| {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let words = std::iter::once("make-checkpoint").chain(words.iter().copied());
        let code = make::run(words.map(Into::into), &mut out, &mut err);
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (code, text(out), text(err))
    };
    let made = room.join("made");
    let made = made.to_str().unwrap();
    let (code, out, err) = run(&["tiny-v41", made, "--shards", "2"]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.starts_with(&format!("{made}: tiny-v41, ")), "{out}");
    let (code, out, err) = run(&["tiny-v41", made]);
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(
        err.starts_with("lowlat make-checkpoint: refused: "),
        "{err}"
    );
    assert_eq!(err.lines().count(), 1);
    let (code, _, err) = run(&["tiny-v41", made, "--shards", "0"]);
    assert_eq!((code, err.lines().count()), (2, 1));
    let (code, out, _) = run(&["--help"]);
    assert!(code == 0 && out.contains("lowlat replay"), "{out}");
    assert!(out.lines().all(|line| line.len() <= 100), "{out}");
}

/// What `lowlat check` asks of a folder: a line of what is there, or the refusal.
#[test]
fn a_folder_is_checked_without_being_served() {
    on_each(|model| {
        let run = |folder: &Path| {
            let (mut out, mut err) = (Vec::new(), Vec::new());
            let words = [
                "lowlat-engine",
                "check-checkpoint",
                "--",
                folder.to_str().unwrap(),
            ];
            let code = lowlat_engine::commands::run(
                words.map(Into::into),
                &mut |_| panic!("nothing is served"),
                &mut std::io::empty(),
                &mut out,
                &mut err,
            );
            (code, String::from_utf8([out, err].concat()).unwrap())
        };
        let (code, words) = run(tiny(model));
        assert_eq!(code, 0, "{words}");
        let files = of(model, 3, 4);
        assert!(words.starts_with(&format!("{files} files, ")), "{words}");
        let shard = broken(model, "checked");
        fs::remove_file(shard.join(SHARD_2)).unwrap();
        let (code, words) = run(&shard);
        assert_eq!((code, words.lines().count()), (1, 1), "{words}");
        assert!(words.contains(&format!("{SHARD_2}: is missing")), "{words}");
    });
}

/// The disk is full after a megabyte, as far as the program can tell: nothing is left.
#[test]
#[cfg(unix)]
fn a_full_disk_leaves_nothing() {
    let room = folder("full");
    let script = "trap '' XFSZ; ulimit -f 1024; exec \"$0\" make-checkpoint tiny-v41 \"$1\"";
    let output = std::process::Command::new("bash")
        .args(["-c", script, env!("CARGO_BIN_EXE_lowlat-engine")])
        .arg(room.join("made"))
        .output()
        .unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(
        err.contains("made: cannot be written: File too large"),
        "{err}"
    );
    assert_eq!(err.lines().count(), 1, "{err}");
    assert!(names(&room).is_empty(), "{:?}", names(&room));
}

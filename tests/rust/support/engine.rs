//! What the engine's tests with a real kernel library have in common.
#![allow(dead_code)] // Each test uses its part.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use lowlat_core::DeadlineLadder;
use lowlat_core::config::{ModelConfig, built_in};
use lowlat_engine::checkpoint::make;
use lowlat_engine::kernels::{KERNELS_VARIABLE, Kernels};
use lowlat_engine::runtime::{Runtime, RuntimeOptions};
use lowlat_engine::step::{
    RuntimeSettings, StepMode, StepPath, StepPlan, StepRequest, StepResult, StepRunner,
};

/// Where the library is, or `None` after saying that the test is skipped.
pub fn library() -> Option<PathBuf> {
    let path = std::env::var_os(KERNELS_VARIABLE).filter(|path| !path.is_empty());
    if path.is_none() {
        println!("skipped: {KERNELS_VARIABLE} does not name a kernel library");
    }
    path.map(PathBuf::from)
}

/// The library, open; `None` as above.
pub fn kernels() -> Option<Kernels> {
    library().map(|path| Kernels::open(Some(&path)).unwrap())
}

/// The built-in models that tests serve.
pub const MODELS: [&str; 2] = ["tiny-v4", "tiny-v41"];

/// The same and their checkpoint folders: what `--model` takes, and the model's name. The folders
/// are made once a program.
pub fn sources() -> [(String, &'static str); 4] {
    static MADE: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let mut made = MADE.lock().unwrap();
    if made.is_empty() {
        let program = std::env::current_exe().unwrap();
        let program = program.file_name().unwrap().to_string_lossy().into_owned();
        let room = Path::new(env!("CARGO_TARGET_TMPDIR")).join(program);
        for model in MODELS {
            let folder = room.join(model);
            let _ = std::fs::remove_dir_all(&folder);
            std::fs::create_dir_all(&room).unwrap();
            make::make(model, &folder, 2, false).unwrap();
            made.push(folder.to_str().unwrap().to_owned());
        }
    }
    [
        (MODELS[0].to_owned(), MODELS[0]),
        (made[0].clone(), MODELS[0]),
        (MODELS[1].to_owned(), MODELS[1]),
        (made[1].clone(), MODELS[1]),
    ]
}

/// The settings of a small run; tests change what they are about.
pub fn settings(library: &std::path::Path) -> RuntimeSettings {
    RuntimeSettings {
        model: "tiny-v41".into(),
        platform: "scalar".into(),
        tp_size: 1,
        plugin: true,
        widths: Vec::new(),
        max_batch: 8,
        max_rows: 128,
        speculative: true,
        kv_tokens: 8 * 1024,
        seed: 7,
        kernels: Some(library.to_path_buf()),
        inject_fault: None,
    }
}

/// Deadlines for tests of faults: short where ranks wait for each other, long for the work.
pub fn short_ladder() -> DeadlineLadder {
    let ms = |ms: u64| ms * 1_000_000;
    DeadlineLadder::new(ms(2_000), ms(15_000), ms(20_000), ms(30_000)).unwrap()
}

/// A request of a test: its prompt and how much it emits.
#[derive(Clone, Debug)]
pub struct Request {
    pub prompt: Vec<i32>,
    pub output: usize,
    pub temperature: f32,
    pub uid: u32,
}

/// A prompt that is no pattern: ids in `[3, bound)` from a counter.
pub fn prompt(seed: u64, len: usize, bound: i32) -> Vec<i32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |state: &mut u64| {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        *state
    };
    (0..len)
        .map(|_| 3 + (next(&mut state) >> 33) as i32 % (bound - 3))
        .collect()
}

/// What a run of the driver gave.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// Each request's tokens, cut at its output.
    pub tokens: Vec<Vec<i32>>,
    /// Tokens of each verify step and request, before the cut.
    pub step_counts: Vec<u32>,
    /// Target launches: covered, plain and why.
    pub paths: Vec<StepPath>,
}

/// A request on its way.
struct Live {
    request_idx: usize,
    tokens: Vec<i32>,
    /// Tokens in the cache.
    start: usize,
    state_slot: i32,
    draw: u64,
}

/// Serves requests without a scheduler: pages are fixed, no cache is shared. `together` requests
/// run side by side; prompts are cut into chunks of `chunk` rows.
pub fn serve(
    runtime: &mut Runtime,
    requests: &[Request],
    together: usize,
    chunk: usize,
    simulated: impl Fn(usize) -> Option<u32>,
) -> Run {
    let info = runtime.info().clone();
    let pages_each = info.num_pages / together;
    let mut run = Run {
        tokens: vec![Vec::new(); requests.len()],
        ..Run::default()
    };
    let mut waiting: Vec<usize> = (0..requests.len()).rev().collect();
    let mut live: Vec<Live> = Vec::new();
    let mut plan = StepPlan::new();
    let mut result = StepResult::new();
    let mut num_verify = 0;
    loop {
        while live.len() < together {
            let Some(request_idx) = waiting.pop() else {
                break;
            };
            let taken: Vec<i32> = live.iter().map(|one| one.state_slot).collect();
            let state_slot = (0..).find(|slot| !taken.contains(slot)).unwrap();
            let tokens = requests[request_idx].prompt.clone();
            live.push(Live {
                request_idx,
                tokens,
                start: 0,
                state_slot,
                draw: 0,
            });
        }
        if live.is_empty() {
            return run;
        }
        // One request's chunk a step, until all prompts are in; then everybody emits.
        let prompting = live
            .iter()
            .position(|one| one.start < requests[one.request_idx].prompt.len());
        let members: Vec<usize> = match prompting {
            Some(idx) => vec![idx],
            None => (0..live.len()).collect(),
        };
        plan.mode = match (prompting, info.num_drafts) {
            (Some(_), _) => StepMode::Extend,
            (None, 0) => StepMode::Decode,
            (None, _) => StepMode::Verify,
        };
        plan.requests.clear();
        plan.token_ids.clear();
        plan.page_table.clear();
        plan.page_table_stride = pages_each;
        plan.simulated_accept = None;
        if plan.mode == StepMode::Verify {
            plan.simulated_accept = simulated(num_verify);
            num_verify += 1;
        }
        for &idx in &members {
            let one = &live[idx];
            let request = &requests[one.request_idx];
            let num_rows = match prompting {
                Some(_) => (request.prompt.len() - one.start).min(chunk),
                None => 1,
            };
            let history = std::array::from_fn(|i| {
                (one.start + i)
                    .checked_sub(3)
                    .map_or(0, |at| one.tokens[at])
            });
            plan.requests.push(StepRequest {
                uid: request.uid,
                first_row: plan.token_ids.len(),
                num_rows,
                start: one.start as i32,
                history,
                state_slot: one.state_slot,
                temperature: request.temperature,
                draw: one.draw,
                wants_token: one.start + num_rows >= request.prompt.len(),
            });
            plan.token_ids
                .extend_from_slice(&one.tokens[one.start..one.start + num_rows]);
            let first_page = one.state_slot as usize * pages_each;
            plan.page_table
                .extend((first_page..first_page + pages_each).map(|page| page as i32));
        }
        runtime.run(&plan, &mut result).unwrap();
        run.paths.push(result.target);
        let mut emitted = result.tokens.iter();
        for (place, &idx) in members.iter().enumerate() {
            let one = &mut live[idx];
            let count = result.counts[place] as usize;
            match prompting {
                Some(_) => one.start += plan.requests[place].num_rows,
                None => one.start += count,
            }
            if plan.mode == StepMode::Verify {
                run.step_counts.push(count as u32);
            }
            if count > 0 {
                one.draw += 1;
            }
            for token in emitted.by_ref().take(count) {
                one.tokens.push(*token);
                let out = &mut run.tokens[one.request_idx];
                if out.len() < requests[one.request_idx].output {
                    out.push(*token);
                }
            }
        }
        live.retain(|one| run.tokens[one.request_idx].len() < requests[one.request_idx].output);
    }
}

/// Starts a runtime that compares logits, or says why not.
pub fn start(settings: RuntimeSettings) -> Runtime {
    let options = RuntimeOptions {
        compare_logits: true,
        ..RuntimeOptions::new(settings)
    };
    Runtime::start_with(options).unwrap_or_else(|error| panic!("{error}"))
}

/// A built-in model with fields replaced, for tests that need many steps.
pub fn edited(model: &str, fields: &[(&str, serde_json::Value)]) -> ModelConfig {
    let text = built_in(model).unwrap();
    let mut map: serde_json::Map<String, serde_json::Value> = serde_json::from_str(text).unwrap();
    for (name, value) in fields {
        assert!(
            map.insert((*name).into(), value.clone()).is_some(),
            "{name}"
        );
    }
    ModelConfig::from_json(&serde_json::Value::from(map).to_string()).unwrap()
}

/// A model of four layers and 32 tokens that still has every kind of layer, for statistics.
pub fn pocket(model: &str) -> ModelConfig {
    use serde_json::json;
    let mut fields = vec![
        ("vocab_size", json!(32)),
        ("num_hidden_layers", json!(4)),
        ("num_attention_heads", json!(2)),
        ("o_groups", json!(2)),
        ("sliding_window", json!(8)),
        ("n_routed_experts", json!(4)),
        ("num_experts_per_tok", json!(2)),
        ("index_n_heads", json!(1)),
        ("index_topk", json!(8)),
        ("dspark_noise_token_id", json!(30)),
    ];
    match model {
        "tiny-v4" => fields.extend([
            ("moe_intermediate_size", json!(256)),
            ("compress_ratios", json!([0, 4, 128, 4, 0])),
            ("num_nextn_predict_layers", json!(1)),
            ("dspark_target_layer_ids", json!([1])),
            ("num_hash_layers", json!(1)),
        ]),
        _ => fields.extend([
            ("hidden_size", json!(64)),
            ("q_lora_rank", json!(32)),
            ("moe_intermediate_size", json!(64)),
            ("compress_ratios", json!([0, 2, 1, 1, 0, 0, 0])),
            ("kv_source_layer_ids", json!([1, 2])),
            ("index_source_layer_ids", json!([1, 2, 3])),
            ("candidate_source_layer_id", json!(2)),
            ("image_token_id", json!(31)),
            ("engram_layer_ids", json!([1])),
            ("engram_num_embeddings", json!([3828])),
            ("engram_vocab_size", json!(100)),
            ("engram_compressed_vocab_size", json!(24)),
            ("dspark_target_layer_ids", json!([1, 2, 3])),
            ("dspark_n_routed_experts", json!(4)),
            ("dspark_num_experts_per_tok", json!(2)),
        ]),
    }
    edited(model, &fields)
}

/// Starts a runtime of `config`.
pub fn start_config(settings: RuntimeSettings, config: ModelConfig) -> Runtime {
    let options = RuntimeOptions {
        config: Some(config),
        ..RuntimeOptions::new(settings)
    };
    Runtime::start_with(options).unwrap_or_else(|error| panic!("{error}"))
}

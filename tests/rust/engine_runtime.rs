//! The runtime's own promises: what is covered and what is not and why, settings refused in one
//! line, and facts for the report.

use lowlat_engine::EngineError;
use lowlat_engine::runtime::{ROWS_OF_DEFAULT_LADDER, Runtime, RuntimeOptions};
use lowlat_engine::step::{
    RuntimeSettings, StepMode, StepPath, StepPlan, StepRequest, StepResult, StepRunner,
};

#[path = "support/engine.rs"]
mod support;
use support::{
    MODELS, Request, edited, library, pocket, prompt, serve, settings, start, start_config,
};

fn requests(num: u32, output: usize) -> Vec<Request> {
    (0..num)
        .map(|uid| Request {
            prompt: prompt(u64::from(uid) + 1, 12, 29),
            output,
            temperature: 0.0,
            uid,
        })
        .collect()
}

fn paths(model: &str, settings: RuntimeSettings, num_requests: u32) -> Vec<StepPath> {
    let mut runtime = start_config(settings, pocket(model));
    serve(
        &mut runtime,
        &requests(num_requests, 3),
        num_requests as usize,
        8,
        |_| Some(0),
    )
    .paths
}

#[test]
fn steps_run_covered_or_say_why_not() {
    let Some(library) = library() else { return };
    for model in MODELS {
        let extend = StepPath::Plain("step_is_extend");
        // Three requests with 12 prompt rows in chunks of 8; then everybody emits twice.
        let prompts = [extend; 6];
        let all = |verify: StepPath| [&prompts[..], &[verify; 2]].concat();

        assert_eq!(paths(model, settings(&library), 3), all(StepPath::Covered));
        // Batches of 1 and 4 are built: three requests are padded to four.
        let widths = RuntimeSettings {
            widths: vec![6, 24],
            ..settings(&library)
        };
        assert_eq!(paths(model, widths, 3), all(StepPath::Covered));
        let widths = RuntimeSettings {
            widths: vec![6, 12],
            ..settings(&library)
        };
        assert_eq!(
            paths(model, widths, 3),
            all(StepPath::Plain("batch_too_large"))
        );
        let off = RuntimeSettings {
            plugin: false,
            ..settings(&library)
        };
        assert!(
            paths(model, off, 3)
                .iter()
                .all(|path| *path == StepPath::Plain("plugin_off"))
        );
        let decode = RuntimeSettings {
            speculative: false,
            ..settings(&library)
        };
        assert_eq!(paths(model, decode, 3), all(StepPath::Covered));
    }
}

/// A padded batch gives each request what it gets alone.
#[test]
fn padding_changes_no_token() {
    let Some(library) = library() else { return };
    for model in MODELS {
        let alone = RuntimeSettings {
            widths: vec![6],
            ..settings(&library)
        };
        let padded = RuntimeSettings {
            widths: vec![48],
            ..settings(&library)
        };
        let run = |settings, together| {
            let mut runtime = start_config(settings, pocket(model));
            serve(&mut runtime, &requests(3, 30), together, 8, |_| None)
        };
        let (alone, padded) = (run(alone, 1), run(padded, 3));
        assert_eq!(alone.tokens, padded.tokens);
        assert!(padded.paths.contains(&StepPath::Covered));
    }
}

/// Requests that sample draw by their own number alone, not by who shares the batch, whether the
/// schedule is persistent, or whether drafts of others were accepted.
#[test]
fn sampled_tokens_are_a_requests_own() {
    let Some(library) = library() else { return };
    for model in MODELS {
        let mut sampled = requests(5, 24);
        for request in &mut sampled {
            request.temperature = 0.9;
        }
        let run = |plugin, together, uid: u32| {
            let settings = RuntimeSettings {
                plugin,
                tp_size: 2,
                ..settings(&library)
            };
            let mut runtime = start_config(settings, pocket(model));
            let mut requests = sampled.clone();
            requests[4].uid += uid;
            serve(&mut runtime, &requests, together, 8, |_| None).tokens
        };
        let alone = run(true, 1, 0);
        assert_eq!(run(true, 5, 0), alone);
        assert_eq!(run(false, 3, 0), alone);
        let renumbered = run(true, 5, 1);
        assert_eq!(renumbered[..4], alone[..4]);
        assert_ne!(renumbered[4], alone[4]);
    }
}

#[test]
fn settings_are_refused_in_one_line() {
    let Some(library) = library() else { return };
    let base = settings(&library);
    let line = |settings: RuntimeSettings| -> String {
        match Runtime::start(&settings).err() {
            Some(EngineError::Refused(line)) => {
                assert!(!line.contains('\n'), "{line}");
                line
            }
            other => panic!("{other:?}"),
        }
    };
    let refused = [
        (
            RuntimeSettings {
                model: "tiny".into(),
                ..base.clone()
            },
            "--model is tiny; needs a built-in model (tiny-v4, v4-flash, tiny-v41, v41-flash) or a \
             checkpoint folder",
        ),
        (
            RuntimeSettings {
                platform: "tpu".into(),
                ..base.clone()
            },
            "--platform is tpu; needs scalar, or nvidia or amd, with :N for device N",
        ),
        (
            RuntimeSettings {
                tp_size: 3,
                ..base.clone()
            },
            "[102] tp_size is 3; these kernels need 1, 2, 4 or 8",
        ),
        (
            RuntimeSettings {
                tp_size: 8,
                ..base.clone()
            },
            "[105] o_groups is 4; these kernels need a multiple of tp_size (8)",
        ),
        (
            RuntimeSettings {
                widths: vec![6, 13],
                ..base.clone()
            },
            "--widths is [6, 13]; needs at most 32 ascending multiples of 6 up to 48",
        ),
        (
            RuntimeSettings {
                widths: vec![54],
                ..base.clone()
            },
            "--widths is [54]; needs at most 32 ascending multiples of 6 up to 48",
        ),
        (
            RuntimeSettings {
                max_batch: 0,
                ..base.clone()
            },
            "--max-batch is 0; needs 1 to 64",
        ),
        (
            RuntimeSettings {
                kernels: Some("/no/such.so".into()),
                ..base.clone()
            },
            "--kernels is /no/such.so, which is no file",
        ),
    ];
    for (settings, expected) in refused {
        let line = line(settings);
        assert!(line.starts_with(expected), "{line}");
    }
}

/// The sizes of such a model fit no tensor, only the kernels' own buffers.
#[test]
fn buffers_that_this_machine_cannot_hold_are_refused_before_they_are_made() {
    let Some(library) = library() else { return };
    for model in MODELS {
        let options = RuntimeOptions {
            config: Some(edited(model, &[("index_topk", (1 << 24).into())])),
            ..RuntimeOptions::new(RuntimeSettings {
                tp_size: 4,
                max_rows: 4096,
                ..settings(&library)
            })
        };
        let error = Runtime::start_with(options).err().unwrap().to_string();
        // 4 ranks x 4096 rows x 2^24 entries x 4 bytes, and the small rest.
        assert!(error.contains("needs 110"), "{error}");
        assert!(error.contains(" GB of memory with --tp 4"), "{error}");
    }
}

/// V4 with one kind of layer alone: what the others would need is not there, and not missed.
#[test]
fn layers_of_one_kind_alone_run_the_same_in_both_schedules() {
    let Some(library) = library() else { return };
    for (ratios, num_hashed) in [
        ([0, 0, 0, 0, 0], 0),
        ([4, 4, 4, 4, 0], 4),
        ([128, 128, 128, 128, 0], 0),
    ] {
        let run = |plugin: bool| {
            let mut config = pocket("tiny-v4");
            config.layers = edited(
                "tiny-v4",
                &[
                    ("num_hidden_layers", 4.into()),
                    ("compress_ratios", ratios.to_vec().into()),
                    ("num_nextn_predict_layers", 1.into()),
                    ("dspark_target_layer_ids", vec![1].into()),
                    ("num_hash_layers", num_hashed.into()),
                ],
            )
            .layers;
            let settings = RuntimeSettings {
                plugin,
                ..settings(&library)
            };
            let mut runtime = start_config(settings, config);
            let requests: Vec<Request> = (0..2)
                .map(|request| Request {
                    prompt: prompt(request, 125, 29),
                    output: 12,
                    temperature: 0.0,
                    uid: request as u32,
                })
                .collect();
            serve(&mut runtime, &requests, 2, 48, |_| None).tokens
        };
        assert_eq!(run(true), run(false), "{ratios:?}");
    }
}

#[test]
fn a_model_without_a_draft_decodes() {
    let Some(library) = library() else { return };
    for model in MODELS {
        let mut config = pocket(model);
        config.draft = None;
        let settings = settings(&library);
        let options = RuntimeOptions {
            config: Some(config.clone()),
            ..RuntimeOptions::new(settings.clone())
        };
        let error = Runtime::start_with(options).err().unwrap();
        assert!(
            error
                .to_string()
                .contains("has no draft (--speculative off)"),
            "{error}"
        );
        let plain = RuntimeSettings {
            speculative: false,
            ..settings
        };
        let mut runtime = start_config(plain, config);
        let run = serve(&mut runtime, &requests(2, 5), 2, 16, |_| None);
        assert!(run.tokens.iter().all(|tokens| tokens.len() == 5));
    }
}

#[test]
fn info_tells_what_was_built() {
    let Some(library) = library() else { return };
    let runtime = start(RuntimeSettings {
        tp_size: 2,
        kv_tokens: 1000,
        ..settings(&library)
    });
    let info = runtime.info();
    assert_eq!((info.vocab, info.first_token, info.num_drafts), (512, 3, 5));
    assert_eq!(info.special_tokens, [500, 501]);
    assert_eq!((info.page_size, info.num_pages), (64, 16));
    let fact = |name: &str| {
        let found = info.facts.iter().find(|(known, _)| known == name);
        found
            .map(|(_, value)| value.clone())
            .unwrap_or_else(|| panic!("no fact {name}"))
    };
    assert_eq!(fact("graph_keys"), "16");
    assert_eq!(fact("widths"), "[6, 12, 18, 24, 30, 36, 42, 48]");
    assert_eq!(fact("vote_epoch"), "1");
    assert!(fact("weight_bytes_per_rank").parse::<u64>().unwrap() > 1_000_000);
    let record = runtime.record().expect("steps were captured");
    assert_eq!(record.entries().len(), 16);
    assert_eq!(fact("record_digest"), format!("{:#018x}", record.digest()));
}

/// Rows of verify steps wait to be injected into the draft's context; a prompt step of somebody
/// else comes between. Proved by letting the prompt step note its own rows for injection while
/// that injection runs: the drafts then differ.
#[test]
fn prompt_steps_between_verify_steps_change_no_draft() {
    let Some(library) = library() else { return };
    const USERS: usize = 7;
    const PROMPT: usize = 20;
    const PAGES: i32 = 4;
    let step = |mode, users: std::ops::Range<usize>, tokens: &[Vec<i32>], at: &[usize]| {
        let mut plan = StepPlan::new();
        plan.mode = mode;
        plan.page_table_stride = PAGES as usize;
        // Fixed, so that every round commits drafts and shows three of each request's tokens.
        plan.simulated_accept = (mode == StepMode::Verify).then_some(2);
        for user in users {
            let rows = &tokens[user][at[user]..];
            plan.requests.push(StepRequest {
                uid: user as u32,
                first_row: plan.token_ids.len(),
                num_rows: rows.len(),
                start: at[user] as i32,
                history: std::array::from_fn(|i| {
                    let place = (at[user] + i).checked_sub(3);
                    place.map_or(0, |place| tokens[user][place])
                }),
                state_slot: user as i32,
                temperature: 0.0,
                draw: 0,
                wants_token: true,
            });
            plan.token_ids.extend_from_slice(rows);
            let first_page = user as i32 * PAGES;
            plan.page_table.extend(first_page..first_page + PAGES);
        }
        plan
    };
    let run = |prompts_between: bool| {
        let mut runtime = start(settings(&library));
        let mut result = StepResult::new();
        let mut tokens: Vec<_> = (0..=USERS)
            .map(|user| prompt(user as u64 + 1, PROMPT, 500))
            .collect();
        let mut at = vec![0; USERS + 1];
        for user in 0..USERS {
            let plan = step(StepMode::Extend, user..user + 1, &tokens, &at);
            runtime.run(&plan, &mut result).unwrap();
            at[user] = PROMPT;
            tokens[user].extend(&result.tokens);
        }
        let guest = std::mem::take(&mut tokens[USERS]);
        for token in guest.into_iter().take(6) {
            let plan = step(StepMode::Verify, 0..USERS, &tokens, &at);
            runtime.run(&plan, &mut result).unwrap();
            for (user, three) in result.tokens.chunks(3).enumerate() {
                at[user] += three.len();
                tokens[user].extend(three);
            }
            if prompts_between {
                tokens[USERS].push(token);
                let plan = step(StepMode::Extend, USERS..USERS + 1, &tokens, &at);
                runtime.run(&plan, &mut result).unwrap();
                at[USERS] += 1;
            }
        }
        tokens.truncate(USERS);
        tokens
    };
    assert_eq!(run(true), run(false));
}

/// The program alone, as it would be found in a broken installation.
#[test]
fn a_missing_kernel_library_is_a_fault_and_a_wrong_one_is_refused() {
    let folder = std::env::temp_dir().join(format!("lowlat-alone-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let alone = folder.join("lowlat-engine");
    std::fs::copy(env!("CARGO_BIN_EXE_lowlat-engine"), &alone).unwrap();
    let trace = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../examples/traces/small.json"
    );
    let ends = |args: &[&str]| {
        let mut command = std::process::Command::new(&alone);
        let done = command
            .args(["replay", trace])
            .args(args)
            .env_remove("LOWLAT_KERNELS");
        let done = done.output().unwrap();
        let words = String::from_utf8(done.stderr).unwrap();
        assert_eq!(words.lines().count(), 1, "{words}");
        (done.status.code().unwrap(), words)
    };
    let (code, words) = ends(&[]);
    assert!(
        code == 3 && words.contains("fault: no liblowlat_kernels.so in ../_lib"),
        "{words}"
    );
    let (code, words) = ends(&["--kernels", "no/such.so"]);
    assert!(
        code == 1 && words.contains("refused: --kernels is no/such.so"),
        "{words}"
    );
    std::fs::remove_dir_all(folder).unwrap();
}

/// A chunk of 4096 rows takes 25 s on two cores: a rank that works is not a rank that hangs.
#[test]
fn deadlines_give_large_prompt_steps_more_time() {
    let budgets_s = |max_rows| {
        let settings = RuntimeSettings {
            max_rows,
            ..settings(std::path::Path::new("none"))
        };
        let ladder = RuntimeOptions::new(settings).ladder;
        ladder.budgets_ns().map(|ns| ns / 1_000_000_000)
    };
    for max_rows in [0, 1, 128, ROWS_OF_DEFAULT_LADDER] {
        assert_eq!(budgets_s(max_rows), [10, 20, 30, 60]);
    }
    assert_eq!(budgets_s(ROWS_OF_DEFAULT_LADDER + 1), [20, 40, 60, 120]);
    assert_eq!(budgets_s(4096), [160, 320, 480, 960]);
    // More rows than any step may have are refused later, in words.
    assert!(budgets_s(usize::MAX)[3] > 960);
}

//! The report: its figures, its schema, and that a file is whole or not there.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use lowlat_engine::metrics::{Metrics, percentile};
use lowlat_engine::replay::{Outcome, ReplaySettings};
use lowlat_engine::report::{self, OutputFile, Report};
use lowlat_engine::sched::{Finished, Progress, SchedulerSettings};
use lowlat_engine::session::Pace;
use lowlat_engine::step::{
    RunnerInfo, RuntimeSettings, StepMode, StepPath, StepPlan, StepResult, StepRunner,
};
use lowlat_engine::trace::{self, Trace};
use serde_json::Value;

#[path = "support/command.rs"]
mod command;
#[path = "support/fake_model.rs"]
mod fake_model;
use command::folder_of;

const MS: u64 = 1_000_000;

fn replay_settings() -> ReplaySettings {
    ReplaySettings {
        limit_input: Some(100),
        limit_output: None,
        sessions: 1,
        pace: Pace::Asap,
        seed: 3,
        scheduler: SchedulerSettings {
            max_batch: 8,
            prefill_chunk: 128,
            prefix_cache: true,
            temperature: 0.0,
            simulate_acceptance: None,
            seed: 3,
        },
    }
}

fn runtime_settings() -> RuntimeSettings {
    RuntimeSettings {
        model: "fake".into(),
        platform: "test".into(),
        tp_size: 1,
        plugin: true,
        widths: vec![6],
        max_batch: 8,
        max_rows: 128,
        speculative: true,
        kv_tokens: 1024,
        seed: 3,
        kernels: None,
        inject_fault: None,
    }
}

fn traces() -> Vec<Trace> {
    let text = r#"{"id": "a", "requests": [{"type": "n", "in": 120, "out": 4},
                   {"type": "subagent", "requests": [{"type": "n", "in": 7, "out": 1}]}]}"#;
    vec![trace::parse("a.json", "a", text.as_bytes()).unwrap()]
}

/// A prompt step for both requests at 10 ms, a verify step for the first at 25 ms that accepts
/// four drafts of which the last and the next token are cut.
fn outcome() -> Outcome {
    let mut metrics = Metrics::new(2, 5);
    let mut plan = StepPlan::new();
    let mut result = StepResult::new();
    metrics.requests[1].submitted_at = 2 * MS;
    plan.token_ids = vec![5; 107];
    let progress = |uid, prompt_rows, new_tokens, accepted, finished| Progress {
        uid,
        prompt_rows,
        new_tokens,
        accepted,
        finished,
    };
    let both = [
        progress(0, 100, 1, None, false),
        progress(1, 7, 1, None, true),
    ];
    metrics.step(&plan, &result, &both, 10 * MS, 8 * MS);
    metrics.finish(Finished {
        uid: 1,
        cached_tokens: 0,
        output: vec![11],
    });
    plan.mode = StepMode::Verify;
    plan.token_ids = vec![6];
    result.target = StepPath::Covered;
    result.draft = Some(StepPath::Plain("width_not_built"));
    metrics.step(
        &plan,
        &result,
        &[progress(0, 0, 3, Some(4), true)],
        25 * MS,
        15 * MS,
    );
    metrics.finish(Finished {
        uid: 0,
        cached_tokens: 64,
        output: vec![1, 2, 3, 4],
    });
    metrics.wall_ns = 26 * MS;
    Outcome {
        metrics,
        evicted_pages: 2,
        cached_pages: 1,
    }
}

fn info() -> RunnerInfo {
    fake_model::FakeModel::new(16, 64, 5).info().clone()
}

fn report() -> Report {
    Report::new(
        &traces(),
        &replay_settings(),
        &runtime_settings(),
        &info(),
        &outcome(),
    )
}

#[test]
fn figures_are_those_of_the_steps() {
    let json: Value = serde_json::from_str(&report().to_json()).unwrap();
    let at = |path: &str| {
        json.pointer(path)
            .unwrap_or_else(|| panic!("{path} is there"))
            .clone()
    };
    let near = |path: &str, expected: f64| {
        let value = at(path).as_f64().unwrap();
        assert!(
            (value - expected).abs() < 1e-12,
            "{path} is {value}, not {expected}"
        );
    };
    assert_eq!(at("/totals/requests"), 2);
    assert_eq!(at("/totals/input_tokens"), 107);
    assert_eq!(at("/totals/output_tokens"), 5);
    assert_eq!(at("/totals/trace_input_tokens"), 127);
    assert_eq!(at("/totals/trace_output_tokens"), 5);
    near("/totals/wall_s", 0.026);
    near("/totals/output_tokens_per_s", 5.0 / 0.026);
    // Request 0: 25 ms for 4 tokens; request 1: 8 ms for 1.
    near("/latency/e2e_s_per_output_token/p50", 0.00625);
    near("/latency/e2e_s_per_output_token/p90", 0.008);
    near("/latency/user_rate_tokens_per_s/p50", 160.0);
    near("/latency/user_rate_tokens_per_s/p90", 125.0);
    near("/latency/ttft_s/p50", 0.008);
    near("/latency/ttft_s/p90", 0.010);
    near("/latency/inter_token_s/p50", 0.005);
    near("/latency/inter_token_s/p90", 0.005);
    assert_eq!(
        at("/steps/extend"),
        serde_json::json!({"steps": 1, "rows": 107, "busy_s": 0.008})
    );
    assert_eq!(
        at("/steps/verify"),
        serde_json::json!({"steps": 1, "rows": 6, "busy_s": 0.015})
    );
    assert_eq!(
        at("/steps/target"),
        serde_json::json!({"covered": 1, "plain": {"extend": 1}})
    );
    let draft = serde_json::json!({"covered": 0, "plain": {"width_not_built": 1}});
    assert_eq!(at("/steps/draft"), draft);
    assert_eq!(
        at("/speculation/accepted_histogram"),
        serde_json::json!([0, 0, 0, 0, 1, 0])
    );
    near("/speculation/acceptance_length", 5.0);
    let all_but_the_last = serde_json::json!([1.0, 1.0, 1.0, 1.0, 0.0]);
    assert_eq!(at("/speculation/accepted_by_position"), all_but_the_last);
    // Three tokens came 15 ms after the first: 5 ms each, in a bucket at most 5.93 % wide.
    assert_eq!(at("/distributions/inter_token_s/count"), 3);
    for name in ["p50", "p90", "p99", "buckets/0/up_to_s"] {
        let edge = at(&format!("/distributions/inter_token_s/{name}"))
            .as_f64()
            .unwrap();
        assert!((0.005..0.0053).contains(&edge), "{name} is {edge}");
    }
    assert_eq!(at("/distributions/inter_token_s/buckets/0/count"), 3);
    near("/traces/0/user_rate_tokens_per_s/p50", 160.0);
    near("/traces/0/user_rate_tokens_per_s/p90", 125.0);
    assert_eq!(at("/traces/0/cached_tokens"), 64);
    assert_eq!(at("/speculation/cut_tokens"), 2);
    assert_eq!(at("/cache/hit_tokens"), 64);
    near("/cache/hit_share", 64.0 / 107.0);
    assert_eq!(at("/traces/0/subagents"), 1);
    assert_eq!(at("/requests/0/input_tokens"), 100);
    assert_eq!(at("/requests/0/trace_input_tokens"), 120);
    assert_eq!(at("/requests/1/path"), "requests[1].requests[0]");
    near("/requests/1/submitted_s", 0.002);
    assert_eq!(at("/requests/1/inter_token_s"), Value::Null);
    // FNV-1a of the bytes 0b 00 00 00, computed apart.
    assert_eq!(at("/requests/1/output_digest"), "0xecf582caa5b1b50e");
    assert_eq!(at("/model/facts/kind"), "hash");
}

/// Checks `value` against `schema`: types, fields, no field too many. Gathers the paths of all
/// properties that the schema describes.
fn check(
    schema: &Value,
    value: &Value,
    root: &Value,
    path: &str,
    described: &mut BTreeSet<String>,
) {
    let schema = match schema.get("$ref").and_then(Value::as_str) {
        Some(link) => root
            .pointer(link.trim_start_matches('#'))
            .expect("the link leads somewhere"),
        None => schema,
    };
    if let Some(wanted) = schema.get("const") {
        assert_eq!(value, wanted, "{path}");
        return;
    }
    if let Some(wanted) = schema.get("enum").and_then(Value::as_array) {
        assert!(wanted.contains(value), "{path}");
        return;
    }
    let types: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one],
        Value::Array(several) => several.iter().map(|one| one.as_str().unwrap()).collect(),
        _ => panic!("{path} has a type in the schema"),
    };
    let fits = types.iter().any(|name| match *name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("{other} is a type"),
    });
    assert!(fits, "{path} is {value}, not {types:?}");
    if let (Some(items), Some(list)) = (schema.get("items"), value.as_array()) {
        assert!(
            !list.is_empty() || path.ends_with("notes"),
            "{path} shows an item"
        );
        for item in list {
            check(items, item, root, &format!("{path}[]"), described);
        }
    }
    let Some(fields) = value.as_object() else {
        return;
    };
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else {
        return;
    };
    let names = |fields: &serde_json::Map<String, Value>| -> BTreeSet<String> {
        fields.keys().cloned().collect()
    };
    assert_eq!(
        names(fields),
        names(properties),
        "{path} has the schema's fields and no other"
    );
    let required: BTreeSet<String> = schema["required"]
        .as_array()
        .unwrap()
        .iter()
        .map(|name| name.as_str().unwrap().to_string())
        .collect();
    assert_eq!(
        required,
        names(properties),
        "{path}: every field is always there"
    );
    assert_eq!(schema["additionalProperties"], false, "{path}");
    for (name, value) in fields {
        let property = &properties[name];
        assert!(
            property["description"].is_string(),
            "{path}.{name} is described"
        );
        described.insert(name.clone());
        check(property, value, root, &format!("{path}.{name}"), described);
    }
}

#[test]
fn the_report_is_what_its_schema_says_and_the_docs_name_every_field() {
    let schema: Value = serde_json::from_str(report::SCHEMA).unwrap();
    let json: Value = serde_json::from_str(&report().to_json()).unwrap();
    let mut described = BTreeSet::new();
    check(&schema, &json, &schema, "report", &mut described);
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/report.md");
    let docs = fs::read_to_string(docs).unwrap();
    for name in described {
        assert!(
            docs.contains(&format!("`{name}`")),
            "docs/report.md tells what `{name}` is"
        );
    }
}

#[test]
fn the_table_fits_100_columns() {
    let table = report().to_table();
    for line in table.lines() {
        assert!(line.chars().count() <= 100, "{line}");
    }
    for words in [
        "160.00",
        "125.00",
        "1 covered, 1 plain (extend 1)",
        "5.00 tokens",
        "59.8 %",
    ] {
        assert!(table.contains(words), "{words} in\n{table}");
    }
}

#[test]
fn percentiles_are_nearest_ranks() {
    let values: Vec<f64> = (1..=10).rev().map(f64::from).collect();
    assert_eq!(percentile(&values, 50), Some(5.0));
    assert_eq!(percentile(&values, 90), Some(9.0));
    assert_eq!(percentile(&values, 91), Some(10.0));
    assert_eq!(percentile(&[4.0], 1), Some(4.0));
}

/// A folder of this test's own, empty.
fn folder(name: &str) -> PathBuf {
    folder_of("report", name)
}

fn files_of(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn a_file_is_whole_or_not_there() {
    let folder = folder("whole");
    let path = folder.join("new/deep/report.json");
    drop(OutputFile::prepare(&path).unwrap());
    assert_eq!(
        files_of(&folder),
        Vec::<String>::new(),
        "unwritten, it leaves no folder either"
    );
    // As a program that is interrupted would.
    std::mem::forget(OutputFile::prepare(&path).unwrap());
    assert_eq!(files_of(&folder), Vec::<String>::new());
    OutputFile::prepare(&path).unwrap().write("whole").unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "whole");
    assert_eq!(
        files_of(path.parent().unwrap()),
        ["report.json"],
        "no temporary file is left"
    );

    // An earlier report survives a replay that fails, and one that is written replaces it.
    drop(OutputFile::prepare(&path).unwrap());
    assert_eq!(fs::read_to_string(&path).unwrap(), "whole");
    OutputFile::prepare(&path).unwrap().write("next").unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "next");

    // What cannot be renamed into place is taken away again.
    let late = OutputFile::prepare(&folder.join("late.json")).unwrap();
    fs::create_dir(folder.join("late.json")).unwrap();
    let error = late.write("text").unwrap_err().to_string();
    assert!(error.contains("late.json: cannot be written"), "{error}");
    assert!(files_of(&folder).iter().all(|name| !name.ends_with(".tmp")));
}

#[test]
fn several_files_are_all_written_or_none_is() {
    let folder = folder("several");
    let prepare = |name: &str| OutputFile::prepare(&folder.join(name)).unwrap();
    let write = |names: [&str; 3], text: &str| {
        OutputFile::write_all(names.map(|name| (prepare(name), text.to_owned())).into())
    };
    let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
    write(["a", "b", "c"], "one").unwrap();
    assert_eq!(
        (read("a"), read("b"), read("c")),
        ("one".into(), "one".into(), "one".into())
    );
    write(["a", "b", "c"], "two").unwrap();
    assert_eq!((read("a"), read("c")), ("two".into(), "two".into()));

    // The last one cannot take its place: the first two are as before, a new one is gone.
    let files: Vec<_> = ["new", "a", "late"].map(prepare).into_iter().collect();
    fs::create_dir(folder.join("late")).unwrap();
    let texts = files
        .into_iter()
        .map(|file| (file, "three".to_owned()))
        .collect();
    let error = OutputFile::write_all(texts).unwrap_err().to_string();
    assert!(error.contains("late: cannot be written"), "{error}");
    assert_eq!(read("a"), "two");
    let mut left = files_of(&folder);
    left.sort();
    assert_eq!(left, ["a", "b", "c", "late"]);
}

#[test]
fn a_device_is_no_place_for_a_file() {
    let error = OutputFile::prepare(Path::new("/dev/null"))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("/dev/null: is a pipe or a device"),
        "{error}"
    );
}

#[test]
fn a_disk_that_is_full_leaves_nothing() {
    // Writing there fails as on a full disk; a place for it is not needed.
    if !Path::new("/dev/full").exists() {
        println!("skipped: no /dev/full");
        return;
    }
    let folder = folder("full");
    let file = OutputFile::prepare(&folder.join("new/report.json")).unwrap();
    fs::create_dir(folder.join("new")).unwrap();
    // The temporary name leads to a device that has no room.
    let name = format!(".report.json.{}.tmp", std::process::id());
    std::os::unix::fs::symlink("/dev/full", folder.join("new").join(name)).unwrap();
    let error = file.write("text").unwrap_err().to_string();
    assert!(error.contains("No space left"), "{error}");
    assert_eq!(files_of(&folder.join("new")), Vec::<String>::new());
}

#[test]
fn a_place_that_cannot_be_written_is_refused_at_the_start() {
    let folder = folder("refused");
    fs::write(folder.join("file"), "x").unwrap();
    let refused = |path: PathBuf| OutputFile::prepare(&path).unwrap_err().to_string();
    assert!(
        refused(folder.join("file/report.json")).contains("file/report.json: cannot be written")
    );
    assert!(refused(folder.clone()).contains("is a folder"));
    assert_eq!(files_of(&folder), ["file"]);
}

#[cfg(unix)]
#[test]
fn nothing_but_a_file_is_replaced() {
    let folder = folder("replaced");
    // A socket stands for what a rename must not replace: devices, pipes.
    let socket = folder.join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let error = OutputFile::prepare(&socket).unwrap_err().to_string();
    assert!(error.contains("socket: is a pipe or a device"), "{error}");

    // A link stays one, and the file behind it is written.
    let (link, real) = (folder.join("link.json"), folder.join("real.json"));
    fs::write(&real, "old").unwrap();
    std::os::unix::fs::symlink("real.json", &link).unwrap();
    OutputFile::prepare(&link).unwrap().write("new").unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(fs::read_to_string(&real).unwrap(), "new");
}

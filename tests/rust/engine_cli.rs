//! The command line, run in this process on the fake model.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use lowlat_engine::EngineError;
use lowlat_engine::cli;
use lowlat_engine::report;
use lowlat_engine::step::{FaultKind, InjectedFault, RuntimeSettings, StepRunner};
use serde_json::Value;

#[path = "support/command.rs"]
mod command;
#[path = "support/fake_model.rs"]
mod fake_model;
#[path = "support/traces.rs"]
mod traces;

use command::{folder_of, ran, small, text};
use fake_model::FakeModel;

struct Ran {
    code: u8,
    out: String,
    err: String,
    /// What the runtime was asked for, where it came so far.
    asked: Option<RuntimeSettings>,
}

/// Runs `lowlat replay ARGS` on a model made by `start`.
fn run_on(
    args: &[&str],
    mut start: impl FnMut(&RuntimeSettings) -> Result<Box<dyn StepRunner>, EngineError>,
) -> Ran {
    let mut asked = None;
    let command::Ran { code, out, err } = ran("lowlat replay", args, |all, out, err| {
        let mut start = |settings: &RuntimeSettings| {
            asked = Some(settings.clone());
            start(settings)
        };
        cli::run(all, &mut start, out, err)
    });
    Ran {
        code,
        out,
        err,
        asked,
    }
}

fn run(args: &[&str]) -> Ran {
    run_on(args, |settings| {
        let num_drafts = if settings.speculative { 5 } else { 0 };
        Ok(Box::new(FakeModel::new(
            settings.kv_tokens.div_ceil(64),
            64,
            num_drafts,
        )))
    })
}

/// A folder of this test's own, empty.
fn folder(name: &str) -> PathBuf {
    folder_of("cli", name)
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn replays_the_small_trace_and_reports() {
    let folder = folder("small");
    let (dir, tokens) = (folder.join("out"), folder.join("tokens.json"));
    let ran = run(&[
        &small(),
        "--report",
        text(&dir),
        "--tokens-out",
        text(&tokens),
        "--seed",
        "9",
    ]);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    assert!(
        ran.out.contains("12 requests of 1 trace on fake"),
        "{}",
        ran.out
    );
    assert!(
        ran.out.ends_with(&format!(
            "report: {0}/report.json\npage: {0}/report.html\n",
            text(&dir)
        )),
        "{}",
        ran.out
    );
    let report = json(&dir.join("report.json"));
    let page = fs::read_to_string(dir.join("report.html")).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("Replay of 12 requests on fake"));
    assert_eq!(report["totals"]["requests"], 12);
    assert_eq!(report["totals"]["input_tokens"], 7647);
    assert_eq!(report["totals"]["output_tokens"], 360);
    assert_eq!(report["settings"]["seed"], 9);
    let tokens = json(&tokens);
    let lengths: u64 = tokens
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["tokens"].as_array().unwrap().len() as u64)
        .sum();
    assert_eq!(lengths, 360);
    assert_eq!(tokens[4]["path"], "requests[4].requests[0]");
}

#[test]
fn totals_of_the_real_traces_agree_with_the_files() {
    let Some(traces) = traces::real_traces() else {
        return;
    };
    let mut files: Vec<String> = fs::read_dir(traces)
        .unwrap()
        .map(|entry| entry.unwrap().path().to_str().unwrap().to_string())
        .filter(|path| path.ends_with(".json"))
        .collect();
    files.sort();
    let folder = folder("real");
    let mut args: Vec<&str> = files.iter().map(String::as_str).collect();
    args.extend([
        "--limit-input",
        "512",
        "--limit-output",
        "64",
        "--report",
        text(&folder),
    ]);
    let ran = run(&args);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    let report = json(&folder.join("report.json"));
    // Summed from the files themselves, by another reader.
    let (mut input, mut output, mut capped_input, mut capped_output) = (0, 0, 0, 0);
    let mut add = |request: &Value| {
        let (tokens_in, tokens_out) = (
            request["in"].as_u64().unwrap(),
            request["out"].as_u64().unwrap(),
        );
        input += tokens_in;
        output += tokens_out;
        capped_input += tokens_in.min(512);
        capped_output += tokens_out.min(64);
    };
    for file in &files {
        for request in json(Path::new(file))["requests"].as_array().unwrap() {
            match request["requests"].as_array() {
                Some(inner) => inner.iter().for_each(&mut add),
                None => add(request),
            }
        }
    }
    let totals = &report["totals"];
    assert_eq!(totals["trace_input_tokens"], input);
    assert_eq!(totals["trace_output_tokens"], output);
    assert_eq!(totals["input_tokens"], capped_input);
    assert_eq!(totals["output_tokens"], capped_output);
}

#[test]
fn options_reach_the_runtime() {
    let ran = run(&[&small(), "--limit-input", "64", "--limit-output", "4"]);
    let asked = ran.asked.unwrap();
    assert_eq!(
        (asked.model.as_str(), asked.platform.as_str(), asked.tp_size),
        ("tiny-v41", "scalar", 1)
    );
    assert!(asked.plugin && asked.speculative && asked.widths.is_empty());
    assert_eq!(
        (asked.max_batch, asked.max_rows, asked.kv_tokens),
        (8, 128, 16 * 1024)
    );
    assert_eq!((asked.kernels, asked.inject_fault), (None, None));

    let ran = run(&[
        &small(),
        "--model",
        "m",
        "--tp",
        "4",
        "--platform",
        "p",
        "--plugin",
        "off",
        "--widths",
        "6,12",
        "--max-batch",
        "2",
        "--prefill-chunk",
        "16",
        "--speculative",
        "off",
        "--kv-tokens",
        "2048",
        "--seed",
        "5",
        "--kernels",
        "k.so",
        "--inject-fault",
        "1:silent",
    ]);
    let asked = ran.asked.unwrap();
    assert_eq!(
        (asked.model.as_str(), asked.platform.as_str(), asked.tp_size),
        ("m", "p", 4)
    );
    assert!(!asked.plugin && !asked.speculative);
    assert_eq!(
        (asked.widths, asked.max_batch, asked.max_rows),
        (vec![6, 12], 2, 16)
    );
    assert_eq!((asked.kv_tokens, asked.seed), (2048, 5));
    assert_eq!(asked.kernels, Some(PathBuf::from("k.so")));
    assert_eq!(
        asked.inject_fault,
        Some(InjectedFault {
            tp_rank: 1,
            kind: FaultKind::Silent
        })
    );
}

#[test]
fn tokens_do_not_depend_on_options_that_only_schedule() {
    let digest = |args: &[&str]| {
        let folder = folder(&format!("digest{}", args.join("")));
        let mut all = vec![small(), small()];
        all.extend(args.iter().map(|arg| (*arg).to_string()));
        all.extend(["--report".into(), text(&folder).into()]);
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        assert_eq!(run(&all).code, 0);
        json(&folder.join("report.json"))["output_digest"].clone()
    };
    let first = digest(&[]);
    for args in [
        &["--sessions", "8"][..],
        &["--prefill-chunk", "16"],
        &["--prefix-cache", "off"],
        &["--speculative", "off"],
        &["--max-batch", "1"],
    ] {
        assert_eq!(digest(args), first, "{args:?}");
    }
    assert_ne!(digest(&["--seed", "1"]), first);
}

#[test]
fn wrong_command_lines_are_one_line_and_exit_2() {
    let cases: &[(&[&str], &str)] = &[
        (&[], "<TRACE>"),
        (&["t.json", "--sessions", "9"], "--sessions"),
        (&["t.json", "--sessions", "0"], "--sessions"),
        (&["t.json", "--max-batch", "9"], "--max-batch"),
        (&["t.json", "--tp", "0"], "--tp"),
        (&["t.json", "--tp", "two"], "--tp"),
        (&["t.json", "--limit-output", "0"], "--limit-output"),
        (&["t.json", "--limit-input", "-1"], "-1"),
        (&["t.json", "--prefill-chunk", "0"], "--prefill-chunk"),
        (&["t.json", "--plugin", "maybe"], "--plugin"),
        (&["t.json", "--pace", "fast"], "--pace"),
        (&["t.json", "--temperature", "NaN"], "from 0 to 100"),
        (&["t.json", "--temperature", "-1"], "-1"),
        (&["t.json", "--inject-fault", "1:loud"], "RANK:silent"),
        (&["t.json", "--widths", "6,x"], "--widths"),
        (&["t.json", "--frobnicate"], "--frobnicate"),
    ];
    for (args, word) in cases {
        let ran = run(args);
        assert_eq!(ran.code, 2, "{args:?}: {}", ran.err);
        assert_eq!(ran.err.lines().count(), 1, "{args:?}: {}", ran.err);
        assert!(
            ran.err.starts_with("lowlat replay: error: ") && ran.err.contains(word),
            "{}",
            ran.err
        );
        assert!(ran.out.is_empty() && ran.asked.is_none());
    }
}

#[test]
fn bad_input_is_one_line_and_exit_1_and_leaves_no_report() {
    let folder = folder("bad");
    let zero = folder.join("zero.json");
    fs::write(
        &zero,
        r#"{"id": "a", "requests": [{"type": "n", "in": 4, "out": 0}]}"#,
    )
    .unwrap();
    let huge = folder.join("huge.json");
    let ids: Vec<u32> = (0..30).collect();
    let request = format!(r#"{{"type": "n", "in": 2000000, "out": 1, "hash_ids": {ids:?}}}"#);
    let file = format!(r#"{{"id": "a", "block_size": 65536, "requests": [{request}]}}"#);
    fs::write(&huge, file).unwrap();
    let out = folder.join("out");
    let report = out.join("../out/report.json");
    let small = small();
    let (record, again) = (folder.join("record"), folder.join("./record"));
    let page = out.join("report.html");
    let (copy, link) = (folder.join("copy.json"), folder.join("link.json"));
    fs::copy(&small, &copy).unwrap();
    std::os::unix::fs::symlink("copy.json", &link).unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&[text(&zero)], "zero.json: requests[0].out is 0"),
        (&[&small, text(&zero)], "zero.json: requests[0].out is 0"),
        (
            &[text(&huge)],
            "huge.json: requests[0]: 2000000 prompt and 1 output tokens need",
        ),
        (&[text(&folder)], "is a folder"),
        (&["none.json"], "none.json: cannot be read"),
        (
            &[&small, "--widths", "12,6"],
            "--widths is 12,6; rows from 1, ascending",
        ),
        (&[&small, "--widths", "0,6"], "--widths is 0,6"),
        (
            &[&small, "--inject-fault", "2:silent", "--tp", "2"],
            "with --tp 2 the ranks are 0 to 1",
        ),
        (
            &[&small, "--kv-tokens", "832"],
            "requests[5]: 790 prompt and 64 output tokens need 14 pages",
        ),
        (
            &[&small, "--simulate-acceptance", "7"],
            "--simulate-acceptance is 7",
        ),
        (&[&small, "--tokens-out", text(&folder)], "is a folder"),
        (&[&small, "--record", text(&record)], "captures no graphs"),
        (&[&small, "--record", "/dev/null"], "is a pipe or a device"),
        (&[&small, "--tokens-out", text(&page)], "written twice"),
        (
            &[
                &small,
                "--tokens-out",
                text(&record),
                "--record",
                text(&again),
            ],
            "written twice",
        ),
        (&[&small, "--tokens-out", text(&report)], "written twice"),
        (
            &[text(&copy), "--tokens-out", text(&link)],
            "would overwrite the trace",
        ),
    ];
    for (args, words) in cases {
        let mut all = args.to_vec();
        all.extend(["--report", text(&out)]);
        let ran = run(&all);
        assert_eq!(ran.code, 1, "{args:?}: {}", ran.err);
        assert!(
            ran.err.starts_with("lowlat replay: refused: ") && ran.err.contains(words),
            "{}",
            ran.err
        );
        assert_eq!(
            (ran.err.lines().count(), ran.out.as_str()),
            (1, ""),
            "{args:?}"
        );
        let kv_tokens = ran.asked.map_or(0, |asked| asked.kv_tokens);
        assert!(
            kv_tokens <= 256 * 1024,
            "an enormous number makes no enormous pool"
        );
        assert!(!out.exists(), "{args:?} leaves nothing");
    }
    assert_eq!(fs::read(&copy).unwrap(), fs::read(&small).unwrap());
}

/// A standard output that fails.
struct Broken(std::io::ErrorKind);

impl std::io::Write for Broken {
    fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
        Err(self.0.into())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn output_that_is_lost_is_a_fault_and_a_reader_that_left_is_not() {
    use std::io::ErrorKind;
    let small = small();
    for words in ["--report-schema", "--help", &small] {
        for (kind, code, lines) in [
            (ErrorKind::StorageFull, 3, 1),
            (ErrorKind::BrokenPipe, 0, 0),
        ] {
            let mut err = Vec::new();
            let ended = cli::run(
                ["lowlat replay", words].map(OsString::from),
                &mut |_| Ok(Box::new(FakeModel::new(300, 64, 5))),
                &mut Broken(kind),
                &mut err,
            );
            let err = String::from_utf8(err).unwrap();
            assert_eq!(
                (ended, err.lines().count()),
                (code, lines),
                "{words}: {err}"
            );
            assert!(lines == 0 || err.contains("fault: standard output cannot be written"));
        }
    }
}

#[test]
fn a_runtime_that_refuses_or_fails_ends_with_its_line_and_code() {
    let folder = folder("fails");
    let out = folder.join("out");
    let small = small();
    let args = [small.as_str(), "--report", text(&out)];
    let refuses = run_on(&args, |_| {
        Err(EngineError::Refused("tp is 3;\n  heads are 8".into()))
    });
    assert_eq!(refuses.code, 1);
    assert_eq!(
        refuses.err,
        "lowlat replay: refused: tp is 3; heads are 8\n"
    );
    let fails = run_on(&args, |_| {
        let mut model = FakeModel::new(300, 64, 5);
        model.fails_at = Some(20);
        Ok(Box::new(model))
    });
    assert_eq!(fails.code, 3);
    assert_eq!(
        fails.err,
        "lowlat replay: fault: rank 1 did not answer in 100 ms\n"
    );
    assert!(!out.exists() && fails.out.is_empty());
}

#[test]
fn notes_are_told_and_the_replay_goes_on() {
    let folder = folder("notes");
    let odd = folder.join("odd.json");
    fs::write(
        &odd,
        "\u{feff}{\"requests\": [{\"in\": 70, \"out\": 2, \"new\": 1}]}",
    )
    .unwrap();
    let ran = run(&[text(&odd)]);
    assert_eq!(ran.code, 0);
    let notes: Vec<&str> = ran.err.lines().collect();
    assert_eq!(notes.len(), 6, "{}", ran.err);
    assert!(
        notes
            .iter()
            .all(|note| note.starts_with(&format!("{}: note: ", text(&odd))))
    );
}

#[test]
fn help_and_schema_are_printed() {
    let help = run(&["--help"]);
    assert_eq!((help.code, help.err.as_str()), (0, ""));
    for words in [
        "lowlat replay",
        "--simulate-acceptance",
        "Examples:",
        "Exit codes:",
    ] {
        assert!(help.out.contains(words), "{words}");
    }
    assert!(help.out.lines().all(|line| line.chars().count() <= 100));
    let schema = run(&["--report-schema"]);
    assert_eq!((schema.code, schema.out.as_str()), (0, report::SCHEMA));
}

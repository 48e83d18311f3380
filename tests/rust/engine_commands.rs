//! The commands beside `replay`: trace info, trace synth, inspect, completion.

use std::fs;
use std::path::PathBuf;

use lowlat_core::graph_key::{GraphKey, GraphMode, Path as GraphPath, Record, Recorder, SealView};
use lowlat_engine::commands;
use lowlat_engine::inspect;
use lowlat_engine::trace;
use lowlat_engine::trace_info;
use lowlat_engine::trace_synth;
use serde_json::Value;

#[path = "support/command.rs"]
mod command;
#[path = "support/fake_model.rs"]
mod fake_model;
#[path = "support/traces.rs"]
mod traces;

use command::{Ran, folder_of, ran, small, text};

fn run_with(input: &str, args: &[&str]) -> Ran {
    ran("lowlat-engine", args, |all, out, err| {
        let mut start = |_: &_| {
            let mut model = fake_model::FakeModel::new(256, 64, 5);
            let json = record(&[1, 4], GraphPath::Persistent);
            model.record = Some(Record::from_json(&json).unwrap());
            Ok(Box::new(model) as Box<_>)
        };
        commands::run(all, &mut start, &mut input.as_bytes(), out, err)
    })
}

fn run(args: &[&str]) -> Ran {
    run_with("", args)
}

/// A folder of this test's own, empty.
fn folder(name: &str) -> PathBuf {
    folder_of("commands", name)
}

#[test]
fn commands_are_told_apart_and_wrong_ones_are_one_line() {
    let ran = run(&["replay", &small()]);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    assert!(ran.out.contains("12 requests of 1 trace on fake"));
    for args in [&["--help"][..], &["replay", "--help"], &["trace", "--help"]] {
        let help = run(args);
        assert_eq!((help.code, help.err.as_str()), (0, ""), "{args:?}");
        assert!(help.out.contains("Usage: lowlat"), "{args:?}: {}", help.out);
        assert!(help.out.lines().all(|line| line.chars().count() <= 100));
    }
    let cases: &[(&[&str], &str)] = &[
        (
            &[],
            "no command; replay, trace, inspect, bench, make-checkpoint, check-checkpoint or \
             completion",
        ),
        (&["measure"], "\"measure\""),
        (&["bench"], "requires a subcommand"),
        (&["replay", "--temperature", "-1", "x"], "from 0 to 100"),
        (&["replay", "--tp", "-2", "x"], "'-2' for '--tp <N>'"),
        (&["bench", "step"], "lowlat bench: error: "),
        (&["trace"], "requires a subcommand"),
        (&["trace", "info"], "lowlat trace: error: "),
        (&["trace", "synth"], "--out"),
        (
            &["trace", "synth", "--out", "x", "--input", "9..2"],
            "LOW..HIGH",
        ),
        (
            &["trace", "synth", "--out", "x", "--input", "0"],
            "from 1 to 1048576",
        ),
        (
            &["trace", "synth", "--out", "x", "--prefix-sharing", "1.5"],
            "from 0 to 1",
        ),
        (
            &["trace", "synth", "--out", "x", "--prefix-sharing", "-1"],
            "from 0 to 1",
        ),
        (
            &["trace", "synth", "--out", "x", "--sessions", "0"],
            "--sessions",
        ),
        (&["inspect"], "lowlat inspect: error: "),
        (&["check-checkpoint"], "lowlat check-checkpoint: error: "),
        (&["completion", "tcsh"], "bash, zsh or fish"),
    ];
    for (args, words) in cases {
        let ran = run(args);
        assert_eq!(
            (ran.code, ran.err.lines().count()),
            (2, 1),
            "{args:?}: {}",
            ran.err
        );
        assert!(
            ran.err.contains(words) && ran.out.is_empty(),
            "{args:?}: {}",
            ran.err
        );
    }
}

// ------------------------------------------------------------------------------- trace info

/// Two sessions with the same first blocks; the first has a subagent that repeats its parent.
fn two_sessions(scope: &str) -> Vec<trace::Trace> {
    let first = format!(
        r#"{{"id": "a", "block_size": 10, "hash_id_scope": "{scope}", "requests": [
            {{"t": 0, "type": "n", "in": 25, "out": 3, "hash_ids": [1, 2, 3]}},
            {{"t": 2, "type": "subagent", "requests": [
                {{"t": 0, "type": "n", "in": 40, "out": 4, "hash_ids": [1, 2, 3, 4]}},
                {{"t": 1, "type": "n", "in": 20, "out": 1, "hash_ids": [1, 9]}}]}},
            {{"t": 9, "type": "n", "in": 30, "out": 5, "hash_ids": [1, 7, 7]}},
            {{"t": 8, "type": "n", "in": 6, "out": 5}}]}}"#
    );
    let second = format!(
        r#"{{"id": "b", "block_size": 10, "hash_id_scope": "{scope}", "requests": [
            {{"t": 0, "type": "n", "in": 43, "out": 2, "hash_ids": [1, 2, 3, 4]}}]}}"#
    );
    [("a", first), ("b", second)]
        .map(|(name, text)| trace::parse(name, name, text.as_bytes()).unwrap())
        .into()
}

#[test]
fn sharing_is_by_where_the_prefix_was_seen_first() {
    let survey = trace_info::survey(&two_sessions("global"));
    let first = &survey.files[0].sums;
    assert_eq!(
        (first.requests, first.subagents, first.subagent_requests),
        (5, 1, 2)
    );
    assert_eq!((first.input_tokens, first.output_tokens), (121, 18));
    assert_eq!((first.input_tokens_most, first.output_tokens_most), (40, 5));
    let sharing = first.sharing;
    // The subagent's second prompt shares block 1 with its first; the agent's request at 9 s shares
    // block 1 with the agent's first.
    assert_eq!(sharing.own_agent_tokens, 10 + 10);
    // The subagent's first prompt: two blocks of its parent's, and of the third the 5 tokens that
    // its parent had.
    assert_eq!(sharing.other_agent_tokens, 25);
    assert_eq!(sharing.other_session_tokens, 0);
    assert_eq!(sharing.unhashed_tokens, 6);
    assert_eq!(sharing.repeated_in_prompt_tokens, 10);
    assert_eq!(
        sharing.shared_tokens() + sharing.new_tokens + sharing.unhashed_tokens,
        121
    );
    assert_eq!(survey.files[0].span_s, 9.0);

    let second = survey.files[1].sums.sharing;
    assert_eq!(
        (second.other_session_tokens, second.unhashed_tokens),
        (40, 3)
    );
    assert_eq!(survey.totals.input_tokens, 164);

    let local = trace_info::survey(&two_sessions("local"));
    assert_eq!(local.files[1].sums.sharing.other_session_tokens, 0);
    assert_eq!(local.files[1].sums.sharing.new_tokens, 40);
}

#[test]
fn info_is_a_table_of_100_columns_or_json() {
    let folder = folder("info");
    let odd = folder.join("a-rather-long-name-of-a-file-\u{1b}[31m-that-does-not-fit.json");
    fs::write(
        &odd,
        r#"{"id": "a", "requests": [{"in": 9000000, "out": 2, "new": 1}]}"#,
    )
    .unwrap();
    let ran = run(&["trace", "info", &small(), text(&odd)]);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    for line in ran.out.lines().filter(|line| !line.contains("note: ")) {
        assert!(line.chars().count() <= 100, "{line}");
    }
    for words in [
        "7,647",
        "9,000,000",
        "all",
        "unknown field \"new\"",
        "have no hash id",
    ] {
        assert!(ran.out.contains(words), "{words} in\n{}", ran.out);
    }
    assert!(
        !ran.out.contains('\u{1b}'),
        "a file's name does not colour the terminal"
    );

    let json: Value =
        serde_json::from_str(&run(&["trace", "info", "--json", &small()]).out).unwrap();
    assert_eq!(json["schema"], "lowlat.trace.info");
    assert_eq!(json["totals"]["requests"], 12);
    assert_eq!(json["files"][0]["sums"]["subagents"], 1);
}

#[test]
fn info_names_every_bad_file_and_shows_nothing_then() {
    let folder = folder("info_bad");
    let bad = folder.join("bad.json");
    fs::write(&bad, "{").unwrap();
    let ran = run(&["trace", "info", text(&bad), &small(), "none.json"]);
    assert_eq!((ran.code, ran.out.as_str()), (1, ""));
    let lines: Vec<&str> = ran.err.lines().collect();
    assert_eq!(lines.len(), 2, "{}", ran.err);
    assert!(lines[0].contains("bad.json: ends in the middle") && lines[1].contains("none.json"));
}

#[test]
fn info_agrees_with_the_real_traces() {
    let Some(folder) = traces::real_traces() else {
        return;
    };
    let mut files: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "json"))
        .collect();
    files.sort();
    let mut args = vec!["trace", "info", "--json"];
    args.extend(files.iter().map(|file| text(file)));
    let survey: Value = serde_json::from_str(&run(&args).out).unwrap();
    for (file, seen) in files.iter().zip(survey["files"].as_array().unwrap()) {
        // Read apart: prompts one after the other share all blocks up to the first that differs.
        let json: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
        let requests = json["requests"].as_array().unwrap();
        if requests.iter().any(|request| request["type"] == "subagent") {
            continue;
        }
        let block = json["block_size"].as_u64().unwrap();
        let ids: Vec<Vec<i64>> = requests
            .iter()
            .map(|request| serde_json::from_value(request["hash_ids"].clone()).unwrap())
            .collect();
        let mut shared = 0;
        for (place, prompt) in ids.iter().enumerate() {
            let common = |other: &Vec<i64>| {
                prompt
                    .iter()
                    .zip(other)
                    .take_while(|(one, two)| one == two)
                    .count() as u64
            };
            shared += ids[..place].iter().map(common).max().unwrap_or(0) * block;
        }
        assert_eq!(
            seen["sums"]["sharing"]["own_agent_tokens"],
            shared,
            "{}",
            file.display()
        );
    }
}

// ------------------------------------------------------------------------------- trace synth

fn synth_args<'a>(out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["trace", "synth", "--out", out];
    args.extend(more);
    args
}

#[test]
fn a_synthetic_trace_reads_back_clean_and_is_what_was_asked_for() {
    let folder = folder("synth");
    let out = folder.join("new");
    let ran = run(&synth_args(
        text(&out),
        &[
            "--sessions",
            "3",
            "--requests",
            "20",
            "--input",
            "1000..3000",
            "--output",
            "7",
            "--prefix-sharing",
            "0.75",
            "--system-tokens",
            "128",
            "--subagents",
            "2",
            "--subagent-requests",
            "4",
            "--seed",
            "11",
        ],
    ));
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    let files: Vec<PathBuf> = ran.out.lines().map(PathBuf::from).collect();
    assert_eq!(files.len(), 3);
    assert_eq!(files[2], out.join("session-0002.json"));
    let traces: Vec<trace::Trace> = files
        .iter()
        .map(|file| trace::read(file).unwrap())
        .collect();
    for trace in &traces {
        assert_eq!(trace.notes, Vec::<String>::new());
        let requests = trace.agent.requests();
        assert_eq!(
            (requests.len(), trace.agent.num_subagents()),
            (20 + 2 * 4, 2)
        );
        for request in requests {
            assert!((1000..=3000).contains(&request.input_tokens));
            assert_eq!(request.output_tokens, 7);
        }
    }
    let sums = trace_info::survey(&traces).totals;
    let share = sums.sharing.shared_tokens() as f64 / sums.input_tokens as f64;
    // Less than asked for: first prompts have nothing to repeat, short ones not enough.
    assert!((0.55..0.75).contains(&share), "{share}");
    assert!(
        sums.sharing.other_session_tokens > 0,
        "sessions share the system's tokens"
    );
    assert_eq!(sums.sharing.repeated_in_prompt_tokens, 0);
}

#[test]
fn equal_parameters_give_equal_bytes_and_more_sessions_keep_the_first() {
    let folder = folder("synth_twice");
    let make = |name: &str, more: &[&str]| {
        let out = folder.join(name);
        assert_eq!(run(&synth_args(text(&out), more)).code, 0);
        fs::read(out.join("session-0000.json")).unwrap()
    };
    let first = make("a", &["--seed", "4"]);
    assert_eq!(make("b", &["--seed", "4"]), first);
    assert_eq!(make("c", &["--seed", "4", "--sessions", "3"]), first);
    assert_ne!(make("d", &["--seed", "5"]), first);
    // What the draws are is fixed for good: a changed draw would change everyone's traces.
    let trace = trace::parse("a", "a", &first).unwrap();
    let counts: Vec<usize> = trace
        .agent
        .requests()
        .iter()
        .map(|one| one.input_tokens)
        .collect();
    assert_eq!(counts.len(), 12);
}

#[test]
fn lengths_are_spread_as_asked_for() {
    let folder = folder("synth_spread");
    let more = [
        "--requests",
        "4000",
        "--input",
        "lognormal:800,0.5",
        "--output",
        "1..3",
    ];
    let out = folder.join("x");
    assert_eq!(run(&synth_args(text(&out), &more)).code, 0);
    let trace = trace::read(&out.join("session-0000.json")).unwrap();
    let requests = trace.agent.requests();
    let below = |limit: f64| {
        let count = requests
            .iter()
            .filter(|one| (one.input_tokens as f64) < limit)
            .count();
        count as f64 / requests.len() as f64
    };
    // The normal distribution at 0, -1 and +1 sigma; three standard errors of 4,000 draws.
    assert!((below(800.0) - 0.5).abs() < 0.024, "{}", below(800.0));
    assert!((below(800.0 * (-0.5f64).exp()) - 0.1587).abs() < 0.018);
    assert!((below(800.0 * 0.5f64.exp()) - 0.8413).abs() < 0.018);
    for wanted in 1..=3 {
        let count = requests
            .iter()
            .filter(|one| one.output_tokens == wanted)
            .count();
        assert!(
            (count as f64 / 4000.0 - 1.0 / 3.0).abs() < 0.023,
            "{wanted}: {count}"
        );
    }
}

#[test]
fn a_trace_that_would_be_too_large_is_refused_and_leaves_nothing() {
    let folder = folder("synth_large");
    let out = folder.join("new");
    let cases: &[(&[&str], &str)] = &[
        (
            &[
                "--requests",
                "1000000",
                "--input",
                "1000000",
                "--block-size",
                "1",
            ],
            "10000000 hash ids",
        ),
        (
            &[
                "--requests",
                "1000000",
                "--input",
                "1",
                "--think-time",
                "3600",
            ],
            "a session would last more than 1000000000 s",
        ),
    ];
    for (more, words) in cases {
        let ran = run(&synth_args(text(&out), more));
        assert_eq!(ran.code, 1);
        assert!(
            ran.err.contains(words) && ran.err.lines().count() == 1,
            "{}",
            ran.err
        );
        assert!(!out.exists());
    }
    let synth = trace_synth::Synth {
        sessions: 1,
        requests: trace_synth::Spread::Fixed(1),
        input: trace_synth::Spread::Fixed(1),
        output: trace_synth::Spread::Fixed(1),
        prefix_sharing: 1.0,
        system_tokens: 0,
        subagents: 0,
        subagent_requests: trace_synth::Spread::Fixed(1),
        think_time_s: 0.0,
        block_size: 64,
        seed: 0,
    };
    let texts = trace_synth::synthesise(&synth).unwrap();
    assert!(
        trace::parse("a", "a", texts[0].as_bytes())
            .unwrap()
            .notes
            .is_empty()
    );
}

// ------------------------------------------------------------------------------- inspect

fn record(batch_sizes: &[u32], path: GraphPath) -> String {
    let mut recorder = Recorder::new();
    for &batch_size in batch_sizes {
        let key = GraphKey {
            mode: GraphMode::TargetVerify,
            batch_size,
            tokens_per_request: 6,
            width: batch_size * 6,
            shape: "tiny".into(),
            isa: "scalar".into(),
            numerics_digest: 0xabc,
            layout_digest: 0xdef,
        };
        let seals = [
            SealView {
                name: "page_table",
                address: 0x1000,
                shape: &[8, 4],
                dtype: "i32",
            },
            SealView {
                name: "logits",
                address: 0x2000 + u64::from(batch_size),
                shape: &[],
                dtype: "f32",
            },
        ];
        recorder.note(key, path, &seals).unwrap();
    }
    recorder.finish().to_json()
}

#[test]
fn a_record_is_shown_with_its_keys_paths_seals_and_digests() {
    let folder = folder("inspect");
    let file = folder.join("a.json");
    let json = record(&[2, 1], GraphPath::Persistent);
    fs::write(&file, &json).unwrap();
    let ran = run(&["inspect", text(&file)]);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    assert!(ran.out.lines().all(|line| line.chars().count() <= 100));
    let digest = format!("{:#018x}", inspect::read(&file).unwrap().digest());
    for words in [
        "target_verify",
        "1 x 6",
        "12",
        "persistent",
        "tiny",
        "scalar",
        "0x0000000000000abc",
        "0x0000000000000def",
        "8 x 4",
        "0x1000",
        "0x2001",
        "0-1",
        digest.as_str(),
    ] {
        assert!(ran.out.contains(words), "{words} in\n{}", ran.out);
    }
    let as_json = run(&["inspect", "--json", text(&file)]).out;
    assert_eq!(as_json, format!("{json}\n"));
}

#[test]
fn a_replay_writes_the_record_that_inspect_reads() {
    let folder = folder("record");
    let file = folder.join("new/record.json");
    let ran = run(&["replay", &small(), "--record", text(&file)]);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    let expected = record(&[1, 4], GraphPath::Persistent);
    assert_eq!(fs::read_to_string(&file).unwrap(), format!("{expected}\n"));
    assert!(run(&["inspect", text(&file)]).out.contains("4 x 6"));
}

#[test]
fn two_records_are_compared_and_a_difference_is_exit_1() {
    let folder = folder("inspect_two");
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let first = write("a", &record(&[1, 2], GraphPath::Persistent));
    let same = write("b", &record(&[1, 2], GraphPath::Persistent));
    let other = write("c", &record(&[1], GraphPath::Plain));
    let ran = run(&["inspect", text(&first), text(&same)]);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    assert!(ran.out.starts_with("no difference"));
    let ran = run(&["inspect", text(&first), text(&other)]);
    assert_eq!((ran.code, ran.out.lines().count()), (1, 2));
    assert!(
        ran.out
            .contains("path is persistent in the first record, plain in the second")
    );
    assert!(ran.out.contains("only in the first record"));
    let ran = run(&["inspect", "--json", text(&first), text(&other)]);
    let json: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(
        (ran.code, json["differences"].as_array().unwrap().len()),
        (1, 2)
    );
}

#[test]
fn what_is_no_record_is_refused_by_name() {
    let folder = folder("inspect_bad");
    let good = record(&[1], GraphPath::Persistent);
    let damaged = good.replace("persistent", "fused");
    let cases: &[(&str, &[u8], &str)] = &[
        (
            "cut",
            &good.as_bytes()[..good.len() / 2],
            "the file looks truncated",
        ),
        ("empty", b"", "the file looks truncated"),
        (
            "trace",
            br#"{"id": "a", "requests": []}"#,
            "not a graph record: missing field",
        ),
        (
            "binary",
            &[0x7f, b'E', b'L', b'F', 0xff],
            "it is no text in UTF-8",
        ),
        (
            "newer",
            br#"{"version": 3, "entries": {}, "x": 1}"#,
            "version is 3 (it is of a newer",
        ),
        (
            "damaged",
            damaged.as_bytes(),
            "the file is damaged or was edited",
        ),
        (
            "twice",
            br#"{"version": 1, "version": 1, "entries": []}"#,
            "duplicate field",
        ),
    ];
    for (name, bytes, words) in cases {
        let path = folder.join(name);
        fs::write(&path, bytes).unwrap();
        let ran = run(&["inspect", text(&path)]);
        assert_eq!((ran.code, ran.out.as_str()), (1, ""), "{name}");
        assert_eq!(ran.err.lines().count(), 1, "{name}");
        let begins = format!("lowlat inspect: refused: {}: ", path.display());
        assert!(
            ran.err.starts_with(&begins) && ran.err.contains(words),
            "{}",
            ran.err
        );
    }
    assert!(run(&["inspect", text(&folder)]).err.contains("is a folder"));
    let device = run(&["inspect", "/dev/null"]);
    assert!(
        device.err.contains("is a pipe or a device"),
        "{}",
        device.err
    );
    assert_eq!(device.code, 1);
    let large = folder.join("large");
    fs::File::create(&large)
        .unwrap()
        .set_len(inspect::MAX_BYTES + 1)
        .unwrap();
    assert!(
        run(&["inspect", text(&large)])
            .err
            .contains("is larger than 67,108,864 bytes")
    );
}

// ------------------------------------------------------------------------------- completion

#[test]
fn completion_knows_the_engines_commands_and_the_others() {
    let others = r#"[{"name": "op", "about": "Run one", "options": [
        {"name": "platform", "about": "Where", "kind": "value", "choices": ["reference", "scalar"]},
        {"name": "NAME", "about": "Which", "kind": "positional", "choices": []},
        {"name": "list", "about": "List", "kind": "flag", "choices": []}]}]"#;
    for shell in ["bash", "zsh", "fish"] {
        let ran = run_with(others, &["completion", shell, "--commands", "-"]);
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{shell}");
        for words in [
            "prefix-sharing",
            "simulate-acceptance",
            "inspect",
            "reference",
            "list",
        ] {
            assert!(ran.out.contains(words), "{words} for {shell}");
        }
    }
    let bad = run_with("[{}]", &["completion", "bash", "--commands", "-"]);
    assert_eq!((bad.code, bad.err.lines().count()), (1, 1));
    assert!(
        bad.err
            .contains("is no list of commands: missing field `name`"),
        "{}",
        bad.err
    );
}

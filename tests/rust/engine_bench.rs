//! `lowlat bench dispatch` at a tiny size: every arm runs, what is missing says why, and nothing
//! that it prints is a timing that this test would judge.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

fn run(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lowlat-engine"));
    command.args(["bench", "dispatch"]).args(words);
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn file(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("lowlat-engine-bench-{}-{name}", std::process::id()))
}

#[test]
fn every_arm_runs_and_one_that_is_not_here_says_why() {
    let path = file("all.json");
    let ran = run(&[
        "--ranks",
        "1,2,3",
        "--votes",
        "20",
        "--decisions",
        "640",
        "--python",
        "/no/such/python",
        "--json",
        path.to_str().unwrap(),
    ]);
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    let out = text(&ran.stdout);
    assert!(out.contains("a vote by") && out.contains("goal "), "{out}");
    assert!(
        out.contains("no gloo: /no/such/python does not start: "),
        "{out}"
    );
    let report: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    fs::remove_file(&path).unwrap();
    let decisions = report["decisions"].as_array().unwrap();
    assert_eq!(decisions.len(), 3);
    for line in decisions {
        assert_eq!(line["allocations"], 0);
        assert_eq!(line["samples"], 20);
        assert!(line["ns_median"].as_f64().unwrap() <= line["ns_p99"].as_f64().unwrap());
        // One of the two, whatever this machine counts.
        assert_ne!(
            line["instructions"].is_null(),
            line["why_no_instructions"].is_null()
        );
    }
    let votes = report["votes"].as_array().unwrap();
    let of = |transport: &str| {
        let lines = votes.iter().filter(|line| line["transport"] == transport);
        lines.collect::<Vec<_>>()
    };
    for transport in ["threads", "processes"] {
        let ranks: Vec<_> = of(transport)
            .iter()
            .map(|line| line["ranks"].clone())
            .collect();
        assert_eq!(ranks, [1, 2, 3]);
        assert!(of(transport).iter().all(|line| line["samples"] == 20));
    }
    assert!(of("python").iter().all(|line| line["why"].is_string()));
}

/// With any Python the `plan` call is timed; without torch the rest of that arm says so.
#[test]
fn a_python_without_torch_times_its_plan() {
    let folder = file("no-torch");
    fs::create_dir_all(folder.join("torch")).unwrap();
    fs::write(
        folder.join("torch/__init__.py"),
        "raise ImportError('no torch here')\n",
    )
    .unwrap();
    let path = file("plan.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_lowlat-engine"));
    command
        .args(["bench", "dispatch", "--ranks", "2", "--votes", "10"])
        .args(["--decisions", "320", "--transports", "python", "--json"])
        .arg(&path)
        .env("PYTHONPATH", &folder);
    let ran = command.output().unwrap();
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    let report: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    fs::remove_file(&path).unwrap();
    fs::remove_dir_all(&folder).unwrap();
    let why = report["votes"][0]["why"].as_str().unwrap();
    if why.contains("does not start") {
        println!("skipped: {why}");
        return;
    }
    assert!(why.ends_with("no torch here"), "{why}");
    assert!(0.0 < report["plan"]["ns_median"].as_f64().unwrap());
}

#[test]
fn bad_words_end_in_one_line_and_write_nothing() {
    let cases: &[(&[&str], i32, &str)] = &[
        (&["--ranks", "0"], 2, "0 is not in 1..=64"),
        (&["--ranks", "65"], 2, "65 is not in 1..=64"),
        (&["--transports", "pigeons"], 2, "pigeons"),
        (&["--votes", "1"], 2, "1 is not in"),
        (
            &["--as-rank", "a:b"],
            1,
            "--as-rank is \"a:b\"; NAME:RANK:SIZE:VOTES is needed",
        ),
        (
            &["--as-rank", "a/b:0:1:10"],
            3,
            "group name is \"a/b\"; 1 to 64 letters",
        ),
        (&["--json", "/proc/no/file"], 1, "/proc/no: "),
    ];
    for (words, code, expected) in cases {
        let ran = run(words);
        let err = text(&ran.stderr);
        assert_eq!(ran.status.code(), Some(*code), "{err}");
        assert!(
            err.lines().count() == 1 && err.contains(expected) && ran.stdout.is_empty(),
            "{err}"
        );
    }
}

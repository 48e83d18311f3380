//! Reading traces, the order of a session's requests, and the prompts made from them.

use std::path::{Path, PathBuf};

use lowlat_engine::session::{Pace, Session};
use lowlat_engine::step::StepRunner;
use lowlat_engine::tokens::Tokens;
use lowlat_engine::trace::{self, Entry, Trace};

#[path = "support/fake_model.rs"]
mod fake_model;
#[path = "support/traces.rs"]
mod traces;

use fake_model::FakeModel;

const S: u64 = 1_000_000_000;

fn parse(text: &str) -> Result<Trace, String> {
    trace::parse("t.json", "t", text.as_bytes()).map_err(|error| error.to_string())
}

/// A file with the given requests, all else in order.
fn with_requests(requests: &str) -> String {
    format!(r#"{{"id": "a", "block_size": 4, "hash_id_scope": "local", "requests": [{requests}]}}"#)
}

fn check_refused(text: impl AsRef<[u8]>, words: &[&str]) {
    let error = trace::parse("t.json", "t", text.as_ref()).unwrap_err();
    assert_eq!(error.exit_code(), 1);
    let line = error.to_string();
    assert!(
        line.starts_with("t.json: ") && !line.contains('\n'),
        "one line with the file: {line}"
    );
    for word in words {
        assert!(line.contains(word), "{word:?} is in: {line}");
    }
}

fn check_noted(text: &str, words: &str) {
    let trace = parse(text).unwrap();
    assert!(
        trace.notes.iter().any(|note| note.contains(words)),
        "{words:?} in {:?}",
        trace.notes
    );
}

#[test]
fn refuses_what_is_not_one_json_object() {
    check_refused("", &["is empty", "one JSON object is needed"]);
    check_refused(" \n\t", &["is empty"]);
    check_refused("hello", &["is not JSON", "line 1 column 1"]);
    check_refused(
        "[1, 2]",
        &["holds a list of 2", "one JSON object is needed"],
    );
    check_refused("7", &["holds 7"]);
    check_refused(
        r#"{"id": "a", "requests": [{"t": 0, "type"#,
        &["truncated", "line 1"],
    );
    check_refused(
        "{\"id\": \"a\"}\n{\"id\": \"b\"}\n",
        &["JSON lines", "line 2"],
    );
    check_refused("{\"id\": \"a\"} x", &["is not JSON", "trailing"]);
    check_refused(b"\xff\xfe{\0}\0", &["UTF-16", "UTF-8 is needed"]);
    check_refused(b"{\"id\": \"\xff\"}", &["byte 8 is not UTF-8"]);
    check_refused("[".repeat(100_000), &["is not JSON", "recursion"]);
}

#[test]
fn refuses_wrong_fields_by_path() {
    let cases: &[(&str, &[&str])] = &[
        (
            r#"{"type": "n", "in": 8, "out": 0}"#,
            &["requests[0].out is 0", "from 1 to 2147483647"],
        ),
        (
            r#"{"type": "n", "in": 0, "out": 1}"#,
            &["requests[0].in is 0"],
        ),
        (
            r#"{"type": "n", "in": -8, "out": 1}"#,
            &["requests[0].in is -8"],
        ),
        (r#"{"type": "n", "in": 8}"#, &["requests[0].out is missing"]),
        (
            r#"{"type": "n", "in": null, "out": 1}"#,
            &["requests[0].in is missing"],
        ),
        (
            r#"{"type": "n", "in": "8", "out": 1}"#,
            &["requests[0].in is \"8\"", "whole number"],
        ),
        (
            r#"{"type": "n", "in": 8.5, "out": 1}"#,
            &["requests[0].in is 8.5"],
        ),
        (
            r#"{"type": "n", "in": 2147483648, "out": 1}"#,
            &["requests[0].in is 2147483648"],
        ),
        (
            r#"{"type": "n", "in": 99999999999999999999, "out": 1}"#,
            &["requests[0].in is 1e20"],
        ),
        (
            r#"{"type": "n", "in": 1e400, "out": 1}"#,
            &["requests[0].in at line 1", "out of range"],
        ),
        (
            r#"{"type": "n", "in": NaN, "out": 1}"#,
            &["is not JSON", "requests[0].in at line 1"],
        ),
        (
            r#"{"type": "n", "in": 8, "in": 8, "out": 1}"#,
            &["requests[0].in", "twice"],
        ),
        (
            r#"{"t": -1, "type": "n", "in": 8, "out": 1}"#,
            &["requests[0].t is -1", "from 0"],
        ),
        (
            r#"{"t": 1e300, "type": "n", "in": 8, "out": 1}"#,
            &["requests[0].t is 1e300"],
        ),
        (
            r#"{"t": "0", "type": "n", "in": 8, "out": 1}"#,
            &["requests[0].t is \"0\""],
        ),
        (
            r#"{"type": "n", "in": 8, "out": 1, "think_time": -2}"#,
            &["requests[0].think_time is -2"],
        ),
        (
            r#"{"type": "x", "in": 8, "out": 1}"#,
            &["requests[0].type is \"x\"", "\"subagent\""],
        ),
        (
            r#"{"type": 3, "in": 8, "out": 1}"#,
            &["requests[0].type is 3"],
        ),
        (
            r#"{"type": "n", "in": 8, "out": 1, "requests": []}"#,
            &["requests[0].requests is a list"],
        ),
        (
            r#"{"type": "n", "in": 8, "out": 1, "hash_ids": [1]}"#,
            &["has 1 ids but in is 8", "2 ids"],
        ),
        (
            r#"{"type": "n", "in": 9, "out": 1, "hash_ids": []}"#,
            &["has 0 ids", "2 ids", "(or 3)"],
        ),
        (
            r#"{"type": "n", "in": 8, "out": 1, "hash_ids": [1, 2, 3]}"#,
            &["has 3 ids"],
        ),
        (
            r#"{"type": "n", "in": 8, "out": 1, "hash_ids": [1, "b"]}"#,
            &["requests[0].hash_ids[1]"],
        ),
        (
            r#"{"type": "n", "in": 8, "out": 1, "hash_ids": 5}"#,
            &["requests[0].hash_ids is 5"],
        ),
        (
            r#"{"type": "subagent", "t": 1}"#,
            &["requests[0].requests is missing"],
        ),
        (
            r#"{"type": "subagent", "requests": []}"#,
            &["requests[0].requests is empty"],
        ),
        (
            r#"{"type": "subagent", "requests": null}"#,
            &["requests[0].requests is missing"],
        ),
        (
            r#"{"type": "subagent", "requests": [{"type": "n", "in": 8, "out": 0}]}"#,
            &["requests[0].requests[0].out is 0"],
        ),
        (
            r#"{"type": "subagent", "duration_ms": -1, "requests": [{"in": 8, "out": 1}]}"#,
            &["requests[0].duration_ms is -1"],
        ),
        ("7", &["requests[0] is 7", "an object is needed"]),
    ];
    for (request, words) in cases {
        check_refused(with_requests(request), words);
    }
    check_refused(with_requests(""), &["requests is empty"]);
    check_refused(r#"{"id": "a"}"#, &["requests is missing"]);
    check_refused(r#"{"id": "a", "requests": {}}"#, &["requests is an object"]);
    check_refused(r#"{"id": 7, "requests": []}"#, &["id is 7"]);
    check_refused(
        r#"{"id": "a", "block_size": 0, "requests": []}"#,
        &["block_size is 0"],
    );
    check_refused(
        r#"{"id": "a", "hash_id_scope": 1, "requests": []}"#,
        &["hash_id_scope is 1"],
    );
}

#[test]
fn refuses_what_is_no_readable_file() {
    let refused = |path: &Path| trace::read(path).unwrap_err().to_string();
    assert!(refused(Path::new("/")).contains("is a folder"));
    assert!(refused(Path::new("no/such/file.json")).contains("cannot be read"));
    // A pipe without a writer would hold the reader for ever.
    let pipe = Path::new(env!("CARGO_TARGET_TMPDIR")).join("trace_pipe");
    let _ = std::fs::remove_file(&pipe);
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    assert!(refused(&pipe).contains("trace_pipe: is a pipe or a device"));
    assert!(refused(Path::new("/dev/zero")).contains("is a pipe or a device"));
    // All holes, so that it takes no disk.
    let large = Path::new(env!("CARGO_TARGET_TMPDIR")).join("trace_large.json");
    let file = std::fs::File::create(&large).unwrap();
    file.set_len(trace::MAX_FILE_BYTES + 1).unwrap();
    assert!(refused(&large).contains("has more than 268435456 bytes"));
    std::fs::remove_file(&large).unwrap();
}

#[test]
fn a_file_that_is_odd_throughout_does_not_flood() {
    let fields: String = (0..500).map(|n| format!(r#""field{n}": 1, "#)).collect();
    let text = format!(r#"{{{fields}"id": "a", "requests": [{{"in": 8, "out": 1}}]}}"#);
    let notes = parse(&text).unwrap().notes;
    assert_eq!(notes.len(), 20);
    // 500 fields, no type, no hash_ids, no block_size.
    assert_eq!(notes[19], "484 more notes like these");

    let long = "x".repeat(100_000);
    let unknown = parse(&format!(
        r#"{{"{long}": 1, "id": "a", "requests": [{{"in": 8, "out": 1}}]}}"#
    ));
    assert!(unknown.unwrap().notes.iter().all(|note| note.len() < 300));
    let twice = parse(&format!(r#"{{"{long}": 1, "{long}": 2}}"#)).unwrap_err();
    assert!(
        twice.len() < 300 && twice.contains("is there twice"),
        "{twice}"
    );
}

#[test]
fn accepts_oddities_with_a_note() {
    let request = r#"{"t": 0, "type": "n", "in": 8, "out": 1, "hash_ids": [1, 2]}"#;
    check_noted(
        &format!("\u{feff}{}", with_requests(request)),
        "byte order mark",
    );
    check_noted(
        &format!(r#"{{"requests": [{request}], "block_size": 4}}"#),
        "has no id",
    );
    check_noted(
        r#"{"id": "a", "requests": [{"type": "n", "in": 70, "out": 1, "hash_ids": [4]}]}"#,
        "has no block_size; 64",
    );
    check_noted(
        &with_requests(r#"{"type": "n", "in": 8, "out": 1}"#),
        "1 request(s) without hash_ids",
    );
    check_noted(
        &with_requests(r#"{"type": "n", "in": 8, "out": 1, "hash_ids": null}"#),
        "hash_ids",
    );
    check_noted(
        &with_requests(r#"{"in": 8, "out": 1, "hash_ids": [1, 2]}"#),
        "has no type",
    );
    check_noted(
        &with_requests(r#"{"type": "n", "in": 8, "out": 1, "mood": 3}"#),
        "unknown field \"mood\" is ignored (1 x, first at requests[0])",
    );
    check_noted(
        r#"{"id": "a", "hash_id_scope": "galaxy", "requests": [{"type": "n", "in": 8, "out": 1}]}"#,
        "hash_id_scope \"galaxy\"",
    );
    check_noted(
        r#"{"id": "a", "totals": {"combined_tokens": {"input": 9}},
            "requests": [{"type": "n", "in": 8, "out": 1}]}"#,
        "totals.combined_tokens.input is 9, but the requests sum to 8",
    );
    let whole_real = parse(&with_requests(r#"{"type": "n", "in": 8.0, "out": 1}"#)).unwrap();
    assert_eq!(whole_real.agent.requests()[0].input_tokens, 8);
    let clean = parse(&with_requests(request)).unwrap();
    assert_eq!(clean.notes, Vec::<String>::new());
}

#[test]
fn sorts_by_time_and_keeps_the_files_order_where_t_is_missing() {
    let text = with_requests(
        r#"{"t": 5, "type": "n", "in": 1, "out": 1}, {"type": "n", "in": 2, "out": 1},
           {"t": 3, "type": "n", "in": 3, "out": 1}"#,
    );
    let trace = parse(&text).unwrap();
    let order: Vec<&str> = trace
        .agent
        .requests()
        .iter()
        .map(|one| one.path.as_str())
        .collect();
    assert_eq!(order, ["requests[2]", "requests[0]", "requests[1]"]);
    check_noted(&text, "not in order of t");
}

/// Runs a session by hand: what starts when each of `finishes` (request, second) has finished.
fn starts(trace: &Trace, pace: Pace, finishes: &[(usize, u64)]) -> Vec<(usize, u64)> {
    let mut session = Session::new(trace, pace, 0);
    let mut all = Vec::new();
    let mut take = |session: &mut Session, until: u64| {
        while let Some(at) = session.next_ready_at().filter(|&at| at <= until) {
            let mut ready = Vec::new();
            session.take_ready(at, &mut ready);
            all.extend(ready.into_iter().map(|(idx, ready_at)| (idx, ready_at / S)));
        }
    };
    for &(request, second) in finishes {
        take(&mut session, second * S);
        session.finish(request, second * S);
    }
    take(&mut session, u64::MAX / 2);
    assert!(session.is_over(), "every request was finished by the test");
    all
}

/// Parent requests 0 and 3, 4; subagents of one request each, 1 (ends at 9) and 2 (ends at 32).
fn parent_with_two_subagents() -> Trace {
    parse(&with_requests(
        r#"{"t": 2, "type": "n", "in": 8, "out": 1, "think_time": 0},
           {"t": 6, "type": "subagent", "duration_ms": 3000,
            "requests": [{"t": 1, "type": "n", "in": 8, "out": 1}]},
           {"t": 7, "type": "subagent", "duration_ms": 25000,
            "requests": [{"t": 0, "type": "n", "in": 8, "out": 1}]},
           {"t": 11, "type": "n", "in": 8, "out": 1, "think_time": 6},
           {"t": 42, "type": "n", "in": 8, "out": 1}"#,
    ))
    .unwrap()
}

#[test]
fn subagents_run_side_by_side_and_the_parent_waits_for_those_that_ended() {
    let trace = parent_with_two_subagents();
    assert_eq!(
        starts(
            &trace,
            Pace::Asap,
            &[(0, 2), (1, 20), (3, 21), (2, 50), (4, 60)]
        ),
        // 3 waits for 1, which ended at 9 in the trace, not for 2; 4 waits for both.
        [(0, 0), (1, 2), (2, 2), (3, 20), (4, 50)]
    );
    let unknown = parse(&with_requests(
        r#"{"type": "subagent", "requests": [{"type": "n", "in": 8, "out": 1}]},
           {"type": "n", "in": 8, "out": 1}"#,
    ))
    .unwrap();
    assert_eq!(
        starts(&unknown, Pace::Asap, &[(0, 9), (1, 10)]),
        [(0, 0), (1, 9)]
    );
}

#[test]
fn the_traces_timing_is_kept() {
    let trace = parent_with_two_subagents();
    assert_eq!(
        starts(
            &trace,
            Pace::Trace,
            &[(0, 4), (1, 8), (2, 12), (3, 13), (4, 60)]
        ),
        // 1: 4 + 1 s after the start of 0; 2: 5 s after it; 3: 6 s after 0 finished; 4 has no
        // think time: 31 s after the start of 3, as in the trace.
        [(0, 2), (1, 7), (2, 7), (3, 10), (4, 41)]
    );
    // A late answer delays what follows; the think time counts from it.
    assert_eq!(
        starts(
            &trace,
            Pace::Trace,
            &[(0, 100), (1, 101), (2, 102), (3, 200), (4, 300)]
        ),
        [(0, 2), (1, 100), (2, 100), (3, 106), (4, 200)]
    );
}

#[test]
fn a_time_beyond_the_clock_comes_never_and_not_at_once() {
    let depth = 25;
    let subagent = r#"{"t": 1e9, "type": "subagent", "requests": ["#;
    let request = r#"{"t": 1e9, "type": "n", "in": 8, "out": 1}"#;
    let nested = format!("{}{request}{}", subagent.repeat(depth), "]}".repeat(depth));
    let trace = parse(&with_requests(&nested)).unwrap();
    // 26e9 s are more nanoseconds than 64 bits hold.
    let session = Session::new(&trace, Pace::Trace, 5 * S);
    assert_eq!(session.next_ready_at(), Some(u64::MAX));
}

#[test]
fn equal_hashes_give_equal_tokens_and_nothing_else_does() {
    let text = |id: &str, scope: &str, hashes: &str| {
        format!(
            r#"{{"id": "{id}", "block_size": 4, "hash_id_scope": "{scope}", "requests": [
                {{"type": "n", "in": 10, "out": 1, "hash_ids": {hashes}}},
                {{"type": "n", "in": 10, "out": 1, "hash_ids": [1, 9]}}]}}"#
        )
    };
    let model = FakeModel::new(4, 4, 0);
    let tokens = Tokens::new(model.info(), 5);
    let prompt = |trace: &Trace, idx: usize, copy: usize| {
        tokens.prompt(trace, copy, trace.agent.requests()[idx], 100)
    };
    let a = parse(&text("a", "local", "[1, 2]")).unwrap();
    let (first, second) = (prompt(&a, 0, 0), prompt(&a, 1, 0));
    assert_eq!(first.len(), 10);
    assert_eq!(first[..4], second[..4], "hash 1 in both");
    assert_ne!(first[4..8], second[4..8], "hashes 2 and 9");
    assert_ne!(first[8..], second[8..], "tails belong to their requests");
    assert_eq!(prompt(&a, 0, 0), first, "the same again");
    assert_ne!(
        prompt(&a, 0, 1)[..4],
        first[..4],
        "a second copy of the file is another user"
    );
    let b = parse(&text("b", "local", "[1, 2]")).unwrap();
    assert_ne!(
        prompt(&b, 0, 0)[..4],
        first[..4],
        "local ids mean nothing in another file"
    );
    let (c, d) = (
        parse(&text("c", "global", "[1, 2]")),
        parse(&text("d", "global", "[1, 3]")),
    );
    let (c, d) = (prompt(&c.unwrap(), 0, 0), prompt(&d.unwrap(), 0, 0));
    assert_eq!(c[..4], d[..4], "global ids do");
    assert_ne!(c[4..8], d[4..8]);
    let other_seed = Tokens::new(model.info(), 6).prompt(&a, 0, a.agent.requests()[0], 100);
    assert_ne!(other_seed, first);
    assert_eq!(
        tokens.prompt(&a, 0, a.agent.requests()[0], 7),
        first[..7],
        "a cap keeps the first"
    );
    // A third hash for the started block gives its first tokens.
    let started = parse(&text("a", "local", "[1, 2, 8]")).unwrap();
    assert_eq!(prompt(&started, 0, 0)[..8], first[..8]);
    assert_ne!(prompt(&started, 0, 0)[8..], first[8..]);
}

#[test]
fn tokens_are_ordinary_and_spread() {
    let model = FakeModel::new(4, 4, 0);
    let text = r#"{"id": "a", "requests": [{"type": "n", "in": 50000, "out": 1}]}"#;
    let trace = parse(text).unwrap();
    let prompt = Tokens::new(model.info(), 0).prompt(&trace, 0, trace.agent.requests()[0], 50_000);
    let mut counts = vec![0; 500];
    prompt.iter().for_each(|&token| counts[token as usize] += 1);
    for special in [0, 1, 2, 7, 499] {
        assert_eq!(counts[special], 0, "{special} is special");
    }
    // 495 ids, 101 each on the mean with a deviation of 10: five deviations either way.
    assert!(
        (3..499)
            .filter(|&id| id != 7)
            .all(|id| (50..152).contains(&counts[id]))
    );
}

#[test]
fn reads_the_small_trace_of_the_project() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/traces/small.json");
    let trace = trace::read(&path).unwrap();
    assert_eq!(trace.notes, Vec::<String>::new());
    assert_eq!(
        (trace.agent.requests().len(), trace.agent.num_subagents()),
        (12, 1)
    );
    let subagent = trace.agent.entries.iter().find_map(|entry| match entry {
        Entry::Subagent(subagent) => Some(subagent),
        Entry::Request(_) => None,
    });
    assert_eq!(subagent.unwrap().agent.requests().len(), 3);
}

#[test]
fn reads_the_real_traces() {
    let Some(folder) = traces::real_traces() else {
        return;
    };
    // File, requests, output tokens, largest input: the table that comes with the traces.
    let table = [
        ("trace_0504", 3, 337, 11_306),
        ("trace_0187", 3, 788, 14_126),
        ("trace_0026", 3, 5_294, 20_068),
        ("trace_0242", 3, 5_027, 20_068),
        ("trace_0613", 4, 502, 19_204),
        ("trace_0057", 8, 1_821, 15_225),
        ("trace_0165", 7, 1_545, 21_214),
        ("trace_0291", 32, 19_504, 101_059),
    ];
    for (name, num_requests, output_tokens, largest_input) in table {
        let path: PathBuf = folder.join(format!("{name}.json"));
        let trace = trace::read(&path).unwrap();
        let requests = trace.agent.requests();
        assert_eq!(trace.id, name);
        assert_eq!(trace.notes, Vec::<String>::new(), "{name}");
        assert_eq!(requests.len(), num_requests, "{name}");
        assert_eq!(
            requests.iter().map(|one| one.output_tokens).sum::<usize>(),
            output_tokens
        );
        assert_eq!(
            requests.iter().map(|one| one.input_tokens).max(),
            Some(largest_input)
        );
    }
}

//! report.html: what it shows, what it may not do, and that foreign text stays text.

use std::collections::BTreeMap;

use lowlat_engine::page::meaning::Meanings;
use lowlat_engine::page::{self, MAX_REQUESTS};
use lowlat_engine::report::{
    Cache, Distribution, Distributions, Latency, Mode, Model, Paths, Percentiles, Report,
    RequestReport, Settings, Speculation, Steps, Totals, TraceReport,
};
use serde_json::Value;

const NONE: Percentiles = Percentiles {
    p50: None,
    p90: None,
};

fn request(path: &str, submitted_s: f64) -> RequestReport {
    RequestReport {
        trace: 0,
        path: path.into(),
        input_tokens: 1200,
        cached_tokens: 64,
        output_tokens: 5,
        trace_input_tokens: 1200,
        trace_output_tokens: 5,
        submitted_s,
        ttft_s: 0.5,
        e2e_s: 1.5,
        inter_token_s: Some(0.25),
        verify_steps: 2,
        acceptance_length: Some(2.5),
        output_digest: "0x00000000000000aa".into(),
    }
}

fn report(file: &str, requests: Vec<RequestReport>) -> Report {
    let mode = Mode {
        steps: 4,
        rows: 24,
        busy_s: 2.0,
    };
    Report {
        schema: "lowlat.replay.report",
        schema_version: 1,
        lowlat_version: "0",
        settings: Settings {
            plugin: true,
            speculative: true,
            prefix_cache: false,
            sessions: 1,
            max_batch: 8,
            prefill_chunk: 128,
            pace: "asap",
            temperature: 0.7,
            seed: 9,
            simulate_acceptance: None,
            limit_input: None,
            limit_output: Some(7),
        },
        model: Model {
            name: "tiny".into(),
            platform: "scalar".into(),
            tp_size: 2,
            vocab: 500,
            num_drafts: 2,
            page_size: 64,
            num_pages: 10,
            max_batch: 8,
            max_rows: 128,
            max_positions: 4096,
            facts: BTreeMap::from([("widths".into(), "[6, 12]".into())]),
        },
        totals: Totals {
            traces: 1,
            requests: requests.len(),
            input_tokens: 1200 * requests.len(),
            output_tokens: 5 * requests.len(),
            trace_input_tokens: 1200,
            trace_output_tokens: 5,
            wall_s: 10.0,
            output_tokens_per_s: 12.5,
        },
        latency: Latency {
            e2e_s_per_output_token: Percentiles {
                p50: Some(0.3),
                p90: Some(0.4),
            },
            user_rate_tokens_per_s: Percentiles {
                p50: Some(3.3333),
                p90: Some(2.5),
            },
            ttft_s: Percentiles {
                p50: Some(0.5),
                p90: Some(0.5),
            },
            inter_token_s: NONE,
        },
        steps: Steps {
            extend: mode,
            decode: mode,
            verify: mode,
            target: Paths {
                covered: 30,
                plain: BTreeMap::from([("step_is_extend", 10)]),
            },
            draft: Paths {
                covered: 7,
                plain: BTreeMap::new(),
            },
        },
        distributions: Distributions {
            inter_token_s: Distribution {
                count: 0,
                p50: None,
                p90: None,
                p99: None,
                buckets: Vec::new(),
            },
        },
        speculation: Some(Speculation {
            request_steps: 8,
            acceptance_length: Some(1.75),
            accepted_histogram: vec![4, 2, 2],
            accepted_by_position: vec![0.5, 0.25],
            cut_tokens: 0,
        }),
        cache: Cache {
            hit_tokens: 64,
            hit_share: 0.25,
            cached_pages: 3,
            evicted_pages: 0,
        },
        traces: vec![TraceReport {
            file: file.into(),
            id: "id".into(),
            requests: requests.len(),
            subagents: 1,
            input_tokens: 1200,
            output_tokens: 5,
            trace_input_tokens: 1200,
            trace_output_tokens: 5,
            cached_tokens: 300,
            user_rate_tokens_per_s: Percentiles {
                p50: Some(3.3333),
                p90: Some(2.5),
            },
            notes: vec!["odd <b>".into()],
        }],
        requests,
        output_digest: "0x00000000000000bb".into(),
    }
}

fn two() -> Vec<RequestReport> {
    vec![
        request("requests[0]", 0.0),
        request("requests[1].requests[0]", 2.5),
    ]
}

/// Values of every `data-field`, by pointer.
fn fields(page: &str) -> Vec<(String, f64)> {
    let attribute = |text: &str, name: &str| {
        let (_, rest) = text.split_once(&format!("{name}=\""))?;
        Some(rest.split_once('"')?.0.to_owned())
    };
    let tags = page.split("data-field=\"").skip(1).map(|rest| {
        let tag = rest.split_once('>').expect("a tag ends").0;
        (
            rest.split_once('"').expect("a value ends").0.to_owned(),
            attribute(tag, "data-value"),
        )
    });
    tags.filter_map(|(field, value)| Some((field, value?.parse().ok()?)))
        .collect()
}

#[test]
fn every_number_that_names_its_field_is_that_fields() {
    let report = report("a.json", two());
    let json: Value = serde_json::from_str(&report.to_json()).unwrap();
    let fields = fields(&page::to_html(&report));
    for (pointer, value) in &fields {
        let expected = json.pointer(pointer).and_then(Value::as_f64);
        assert_eq!(Some(*value), expected, "{pointer}");
    }
    for pointer in [
        "/totals/requests",
        "/latency/user_rate_tokens_per_s/p90",
        "/speculation/accepted_histogram/2",
        "/speculation/accepted_by_position/1",
        "/steps/target/covered",
        "/steps/target/plain/step_is_extend",
        "/steps/draft/covered",
        "/cache/hit_share",
        "/traces/0/cached_tokens",
        "/traces/0/user_rate_tokens_per_s/p50",
        "/requests/1/ttft_s",
    ] {
        assert!(
            fields.iter().any(|(field, _)| field == pointer),
            "{pointer} is shown"
        );
    }
}

/// Calls `visit` with the JSON pointer of every number.
fn each_number(value: &Value, pointer: &str, visit: &mut impl FnMut(&str)) {
    match value {
        Value::Number(_) => visit(pointer),
        Value::Array(items) => {
            for (place, item) in items.iter().enumerate() {
                each_number(item, &format!("{pointer}/{place}"), visit);
            }
        }
        Value::Object(fields) => {
            for (name, value) in fields {
                each_number(value, &format!("{pointer}/{name}"), visit);
            }
        }
        _ => {}
    }
}

#[test]
fn every_number_of_the_report_has_a_unit_and_a_sentence() {
    let json = serde_json::to_value(report("a.json", two())).unwrap();
    let meanings = Meanings::read();
    each_number(&json, "", &mut |pointer| {
        let meaning = meanings.of(pointer);
        let sentence = &meaning.sentence;
        assert!(
            sentence.ends_with('.') || sentence.ends_with("null"),
            "{pointer}: {sentence}"
        );
        let none = pointer == "/schema_version";
        assert_eq!(meaning.unit.is_empty(), none, "{pointer} has a unit");
    });
}

#[test]
fn numbers_have_units_and_sentences_and_what_is_missing_is_said() {
    let page = page::to_html(&report("a.json", two()));
    for words in [
        ">3.33</span> <span class=\"unit\">tokens/s</span>",
        ">500</span> <span class=\"unit\">ms</span>",
        ">25.0</span> <span class=\"unit\">%</span>",
        ">300</span> <span class=\"unit\">ms/token</span>",
        ">none</span>",
        "2,400</span> <span class=\"unit\">tokens</span>",
        "10 (25.0 %)",
        "300 of 1,200 (25.0 %)",
        "0.7",
        "7 tokens",
        "not set",
        "0x00000000000000bb",
        "[6, 12]",
        "Row counts that kernels were built for.",
        "subagent requests[1]",
        "requests[1].requests[0]: at 2.50 s, first token after 500 ms, all 5 after 1.50 s",
        "odd &lt;b&gt;",
    ] {
        assert!(page.contains(words), "{words}");
    }
    // A request's bar: from 2.5 s, of 10 s, half a second until its first token, then a second.
    assert!(
        page.contains(r#"x="25.000%" y="3" height="12" width="5.000%""#),
        "{page}"
    );
    assert!(page.contains(r#"x="30.000%" y="3" height="12" width="10.000%""#));
}

#[test]
fn the_page_fetches_and_runs_nothing() {
    let page = page::to_html(&report("a.json", two())).to_lowercase();
    for word in [
        "<script", "<link", "<img", "<iframe", "http:", "https:", "url(", "@import", " on",
    ] {
        let count = match word {
            // Words of ours that begin so.
            " on" => page.matches(" onload").count() + page.matches(" onclick").count(),
            word => page.matches(word).count(),
        };
        assert_eq!(count, 0, "{word}");
    }
    assert!(page.contains("default-src 'none'"));
    assert!(page.contains("prefers-color-scheme: dark"));
    assert!(page.contains("width=device-width"));
}

#[test]
fn foreign_text_stays_text() {
    let hostile = "a\"><script>alert(1)</script>&\u{202e}\n\u{1b}[31m.json";
    let mut requests = two();
    requests[0].path = "requests[<i>]".into();
    let mut report = report(hostile, requests);
    report.model.name = "<u>".into();
    report.model.facts.insert("</style>".into(), "'\"".into());
    report.traces[0].id = "<s>".into();
    let page = page::to_html(&report);
    for word in ["<script", "<i>", "<u>", "<s>", "\u{202e}", "\u{1b}"] {
        assert!(!page.contains(word), "{word:?}");
    }
    assert_eq!(page.matches("</style>").count(), 1);
    assert!(page.contains("a&quot;&gt;&lt;script&gt;alert(1)&lt;/script&gt;&amp;\\u{202e}\\u{a}"));
}

#[test]
fn a_long_replay_is_cut_and_says_so() {
    let requests = (0..MAX_REQUESTS + 3)
        .map(|place| request(&format!("requests[{place}]"), place as f64))
        .collect();
    let page = page::to_html(&report("a.json", requests));
    let last = MAX_REQUESTS - 1;
    assert!(page.contains(&format!("/requests/{last}/ttft_s")));
    assert!(!page.contains(&format!("/requests/{MAX_REQUESTS}/ttft_s")));
    assert!(page.contains("The first 2,000 requests are shown; the other 3 are in report.json."));
}

#[test]
fn a_replay_without_speculation_or_time_has_a_page_too() {
    let mut report = report("a.json", two());
    report.speculation = None;
    report.totals.wall_s = 0.0;
    report.latency.user_rate_tokens_per_s = NONE;
    for request in &mut report.requests {
        (request.ttft_s, request.e2e_s, request.submitted_s) = (0.0, 0.0, 0.0);
    }
    let page = page::to_html(&report);
    assert!(!page.contains("plot-acceptance") && page.contains("plot-timeline-0"));
    assert!(!page.contains("NaN") && !page.contains("inf%"));
}

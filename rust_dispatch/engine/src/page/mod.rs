//! The report as one page for a browser: `report.html`.
//!
//! Made from the same [`Report`] as `report.json`. It holds all that it shows: no script, no font,
//! nothing that a browser would fetch, and a policy that forbids it to. Numbers carry the JSON
//! pointer of what they show (`data-field`), so that a test compares the two files. All text goes
//! through maud, which escapes it: names of files are other people's.

pub mod meaning;
pub mod plot;

use maud::{DOCTYPE, Markup, PreEscaped, html};
use serde_json::Value;

use crate::histogram::{Bucket, Histogram};
use crate::report::{Mode, Paths, Report, RequestReport, Speculation, TraceReport};
use crate::words::{count, short, time, visible};
use meaning::Meanings;
use plot::{Bar, Column, Lane, Mark, Part, Scale, Span};

const STYLE: &str = include_str!("page.css");

/// Nothing is fetched and nothing runs; only the page's own style counts.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; \
                      form-action 'none'";

/// Requests that the table and the timeline show; `report.json` has them all.
pub const MAX_REQUESTS: usize = 2000;
/// Users that have a bar of their own.
pub const MAX_USERS: usize = 60;

/// The whole page.
#[must_use]
pub fn to_html(report: &Report) -> String {
    let page = Page {
        report,
        json: serde_json::to_value(report).expect("a report is plain data"),
        meanings: Meanings::read(),
    };
    let mut text = page.document().into_string();
    text.push('\n');
    text
}

struct Page<'a> {
    report: &'a Report,
    json: Value,
    meanings: Meanings,
}

/// How a number is written.
#[derive(Clone, Copy)]
enum Form {
    Count,
    Short,
    /// Seconds, in the unit that suits them.
    Time,
    /// A share, as per cent.
    Share,
}

impl Page<'_> {
    fn document(&self) -> Markup {
        let totals = &self.report.totals;
        let title = format!(
            "Replay of {} request{} on {}",
            count(totals.requests as u64),
            plural(totals.requests),
            visible(&self.report.model.name)
        );
        html! {
            (DOCTYPE)
            html lang="en" {
                head {
                    meta charset="utf-8";
                    meta http-equiv="Content-Security-Policy" content=(POLICY);
                    meta name="viewport" content="width=device-width, initial-scale=1";
                    title { (title) }
                    style { (PreEscaped(STYLE)) }
                }
                body {
                    main {
                        h1 { (title) }
                        (self.under_title())
                        (self.in_short())
                        (self.users())
                        (self.speculation())
                        (self.steps())
                        (self.cache())
                        (self.timeline())
                        (self.requests())
                        (self.settings())
                        footer {
                            "lowlat " (self.report.lowlat_version) ", report version "
                            (self.report.schema_version) ". Everything here is in report.json "
                            "beside this page; docs/report.md explains each field."
                        }
                    }
                }
            }
        }
    }

    fn under_title(&self) -> Markup {
        let Report {
            model,
            totals,
            settings,
            ..
        } = self.report;
        html! {
            p class="soft" {
                (count(totals.traces as u64)) " trace" (plural(totals.traces)) ", "
                (count(settings.sessions as u64)) " at a time; platform "
                (visible(&model.platform)) ", " (model.tp_size) " rank"
                (plural(model.tp_size as usize)) "; plugin " (on_off(settings.plugin))
                ", speculation " (on_off(settings.speculative)) ", prefix cache "
                (on_off(settings.prefix_cache)) "; pace " (settings.pace) "."
            }
            @if settings.simulate_acceptance.is_some() {
                p class="warn" {
                    "Acceptance was simulated (--simulate-acceptance): work and times are real, "
                    "the tokens mean nothing."
                }
            }
        }
    }

    /// The number at `pointer` with its unit; "none" where it is null.
    fn number(&self, pointer: &str, form: Form) -> Markup {
        let value = self.json.pointer(pointer).and_then(Value::as_f64);
        let unit = self.meanings.of(pointer).unit;
        let (text, unit) = match value {
            None => ("none".to_owned(), String::new()),
            Some(value) => written(value, form, &unit),
        };
        html! {
            span class="number" data-field=(pointer) data-value=[value] data-text=(text) {
                (text)
            }
            @if !unit.is_empty() { " " span class="unit" { (unit) } }
        }
    }

    fn tile(&self, name: &str, pointer: &str, form: Form) -> Markup {
        html! {
            div class="tile" {
                div class="tile-name" { (name) }
                div { (self.number(pointer, form)) }
                p class="what" { (self.meanings.of(pointer).sentence) }
            }
        }
    }

    fn pair(&self, name: &str, pointer: &str, form: Form) -> Markup {
        html! {
            div class="tile" {
                div class="tile-name" { (name) }
                div class="pair" {
                    @for percentile in ["p50", "p90"] {
                        div {
                            (self.number(&format!("{pointer}/{percentile}"), form))
                            div class="tile-name" { (percentile.to_uppercase()) }
                        }
                    }
                }
                p class="what" { (self.meanings.of(pointer).sentence) }
            }
        }
    }

    fn in_short(&self) -> Markup {
        html! {
            h2 { "In short" }
            div class="tiles" {
                (self.pair("Rate that a user saw", "/latency/user_rate_tokens_per_s", Form::Short))
                (self.pair("Time to first token", "/latency/ttft_s", Form::Time))
                (self.pair("Time between tokens", "/latency/inter_token_s", Form::Time))
                (self.pair("End to end a token", "/latency/e2e_s_per_output_token", Form::Time))
                (self.tile("Requests", "/totals/requests", Form::Count))
                (self.tile("Prompt tokens", "/totals/input_tokens", Form::Count))
                (self.tile("Output tokens", "/totals/output_tokens", Form::Count))
                (self.tile("Whole time", "/totals/wall_s", Form::Time))
                (self.tile("The server's rate", "/totals/output_tokens_per_s", Form::Short))
                @if self.report.speculation.is_some() {
                    (self.tile("Acceptance length", "/speculation/acceptance_length", Form::Short))
                }
                (self.tile("Covered steps", "/steps/target/covered", Form::Count))
                (self.tile("Found in the prefix cache", "/cache/hit_share", Form::Share))
            }
        }
    }

    fn users(&self) -> Markup {
        let rates: Vec<f64> = self
            .report
            .requests
            .iter()
            .filter(|request| request.e2e_s > 0.0)
            .map(|request| request.output_tokens as f64 / request.e2e_s)
            .collect();
        let mut ttft = Histogram::default();
        for request in &self.report.requests {
            ttft.add(request.ttft_s, 1);
        }
        let latency = &self.report.latency;
        let between = &self.report.distributions.inter_token_s;
        let buckets: Vec<Bucket> = between
            .buckets
            .iter()
            .map(|bucket| Bucket {
                above_s: bucket.above_s,
                up_to_s: bucket.up_to_s,
                count: bucket.count,
            })
            .collect();
        let rate = latency.user_rate_tokens_per_s;
        html! {
            h2 { "What users saw" }
            div class="grid" {
                (self.user_bars())
                (figure("plot-rates", "Rate of each request, tokens/s",
                    "How many requests got which rate: output tokens over the time from when a \
                     request could start to its last token. 90 % reach the line P90.",
                    &plot::histogram("Requests by rate", "requests", "tokens/s", Scale::Linear,
                        &plot::linear_bins(&rates),
                        &marks(&[("P50", rate.p50), ("P90", rate.p90)]))))
                (figure("plot-ttft", "Time to first token",
                    "How many requests waited how long for their first token, queueing and the \
                     prompt included.",
                    &plot::histogram("Requests by time to first token", "requests", "s",
                        Scale::Times, &plot::time_bins(&ttft.buckets()),
                        &marks(&[("P50", latency.ttft_s.p50), ("P90", latency.ttft_s.p90)]))))
                (figure("plot-inter-token", "Time between tokens",
                    "How many tokens came how long after the one before; tokens of one step share \
                     its time. Percentiles here are over tokens, above over requests.",
                    &plot::histogram("Tokens by time since the one before", "tokens", "s",
                        Scale::Times, &plot::time_bins(&buckets),
                        &marks(&[("P50", between.p50), ("P90", between.p90),
                                 ("P99", between.p99)]))))
            }
        }
    }

    fn user_bars(&self) -> Markup {
        let traces = &self.report.traces;
        let top = traces
            .iter()
            .filter_map(|trace| trace.user_rate_tokens_per_s.p50)
            .fold(0.0, f64::max);
        let bars: Vec<Bar> = traces
            .iter()
            .take(MAX_USERS)
            .enumerate()
            .map(user_bar)
            .collect();
        html! {
            figure class="card whole" id="plot-users" {
                h3 { "Rate of each user, tokens/s" }
                p class="what" {
                    "One bar a trace, as long as the rate that half of the user's requests reach "
                    "(P50); the line across it is the rate that 90 % reach (P90)."
                }
                (plot::bars("Rate of each user", &bars, top))
                @if traces.len() > MAX_USERS {
                    p class="what" {
                        (count((traces.len() - MAX_USERS) as u64)) " more users are in report.json."
                    }
                }
            }
        }
    }

    fn speculation(&self) -> Markup {
        let Some(speculation) = &self.report.speculation else {
            return html! {};
        };
        html! {
            h2 { "Speculation" }
            div class="grid" {
                (acceptance_figure(speculation))
                (position_figure(speculation))
                div class="card" {
                    (self.small_table("Counts", &[
                        ("/speculation/request_steps", Form::Count),
                        ("/speculation/acceptance_length", Form::Short),
                        ("/speculation/cut_tokens", Form::Count),
                    ]))
                }
            }
        }
    }

    fn steps(&self) -> Markup {
        let steps = &self.report.steps;
        html! {
            h2 { "Steps" }
            div class="grid" {
                (paths_figure("plot-target", "Runs of the target, steps", &steps.target,
                    "/steps/target"))
                @if self.report.speculation.is_some() {
                    (paths_figure("plot-draft", "Runs of the draft, steps", &steps.draft,
                        "/steps/draft"))
                }
                div class="card" {
                    h3 { "Steps by mode" }
                    p class="what" {
                        "Steps, the rows that the target ran in them (drafts included), and the "
                        "time from plan to result."
                    }
                    div class="scroll" tabindex="0" {
                        table {
                            thead {
                                tr {
                                    th scope="col" { "mode" }
                                    th scope="col" class="n" { "steps" }
                                    th scope="col" class="n" { "rows" }
                                    th scope="col" class="n" { "busy" }
                                    th scope="col" class="n" { "a step" }
                                }
                            }
                            tbody {
                                (self.mode_row("extend", steps.extend))
                                (self.mode_row("decode", steps.decode))
                                (self.mode_row("verify", steps.verify))
                            }
                        }
                    }
                    (self.sentences(&["/steps/extend", "/steps/decode", "/steps/verify"]))
                }
            }
        }
    }

    fn mode_row(&self, name: &str, mode: Mode) -> Markup {
        let at = |field: &str| format!("/steps/{name}/{field}");
        html! {
            tr {
                th scope="row" { (name) }
                (self.cell(&at("steps"), Form::Count, false))
                (self.cell(&at("rows"), Form::Count, false))
                (self.cell(&at("busy_s"), Form::Time, true))
                td class="n" {
                    @if mode.steps == 0 {
                        "–"
                    } @else {
                        (time_text(mode.busy_s / mode.steps as f64))
                    }
                }
            }
        }
    }

    /// Names and sentences of fields, as a list.
    fn sentences(&self, pointers: &[&str]) -> Markup {
        html! {
            p class="what" {
                @for (idx, pointer) in pointers.iter().enumerate() {
                    @if idx > 0 { " " }
                    b { (field_name(pointer)) } ": " (self.meanings.of(pointer).sentence)
                }
            }
        }
    }

    /// A table cell with the number at `pointer`; `own_unit` where the column has none.
    fn cell(&self, pointer: &str, form: Form, own_unit: bool) -> Markup {
        let value = self.json.pointer(pointer).and_then(Value::as_f64);
        let unit = self.meanings.of(pointer).unit;
        let text = match value {
            None => "–".to_owned(),
            Some(value) => {
                let (text, unit) = written(value, form, &unit);
                if own_unit {
                    format!("{text} {unit}")
                } else {
                    text
                }
            }
        };
        html! { td class="n" data-field=(pointer) data-value=[value] { (text) } }
    }

    fn small_table(&self, title: &str, rows: &[(&str, Form)]) -> Markup {
        html! {
            h3 { (title) }
            table {
                tbody {
                    @for &(pointer, form) in rows {
                        tr {
                            td {
                                (field_name(pointer).replace('_', " "))
                                p class="what" { (self.meanings.of(pointer).sentence) }
                            }
                            (self.cell(pointer, form, true))
                        }
                    }
                }
            }
        }
    }

    fn cache(&self) -> Markup {
        let report = self.report;
        let tokens = |trace: &TraceReport| trace.input_tokens as f64;
        let top = report.traces.iter().map(tokens).fold(0.0, f64::max);
        let shown = &report.traces[..report.traces.len().min(MAX_USERS)];
        let bars: Vec<Bar> = shown.iter().enumerate().map(cache_bar).collect();
        html! {
            h2 { "Prefix cache" }
            div class="grid" {
                figure class="card" id="plot-cache" {
                    h3 { "Prompt tokens, by where they came from" }
                    p class="what" {
                        "Tokens of a user's prompts that the cache had and that were not run "
                        "again, and tokens that were computed."
                    }
                    p class="key" { (key("c3", "from the cache")) (key("c1", "computed")) }
                    (plot::bars("Prompt tokens by source", &bars, top))
                }
                div class="card" {
                    (self.small_table("Counts", &[
                        ("/cache/hit_tokens", Form::Count),
                        ("/cache/hit_share", Form::Share),
                        ("/cache/cached_pages", Form::Count),
                        ("/cache/evicted_pages", Form::Count),
                    ]))
                }
            }
        }
    }

    fn timeline(&self) -> Markup {
        let shown = self.shown_requests();
        html! {
            h2 { "Timeline" }
            p class="what" {
                "When each request ran, in time since the first one; subagents stand below the "
                "agent that started them. A request starts when it could, whether it was served "
                "at once or not."
            }
            p class="key" {
                (key("wait", "waiting and prompt, until the first token"))
                (key("c1", "generating"))
            }
            @for (idx, trace) in self.report.traces.iter().enumerate() {
                @let lanes = lanes(shown, idx);
                @if !lanes.is_empty() {
                    figure class="card" id=(format!("plot-timeline-{idx}"))
                        style="margin-bottom:12px" {
                        h3 { (visible(&trace.file)) }
                        (plot::timeline(&format!("Requests of {}", visible(&trace.file)), &lanes,
                            self.report.totals.wall_s))
                    }
                }
            }
            (self.left_out())
        }
    }

    fn shown_requests(&self) -> &[RequestReport] {
        let requests = &self.report.requests;
        &requests[..requests.len().min(MAX_REQUESTS)]
    }

    fn left_out(&self) -> Markup {
        let left_out = self.report.requests.len().saturating_sub(MAX_REQUESTS);
        html! {
            @if left_out > 0 {
                p class="what" {
                    "The first " (count(MAX_REQUESTS as u64)) " requests are shown; the other "
                    (count(left_out as u64)) " are in report.json."
                }
            }
        }
    }

    fn requests(&self) -> Markup {
        const COLUMNS: [(&str, Form); 9] = [
            ("input_tokens", Form::Count),
            ("cached_tokens", Form::Count),
            ("output_tokens", Form::Count),
            ("submitted_s", Form::Time),
            ("ttft_s", Form::Time),
            ("inter_token_s", Form::Time),
            ("e2e_s", Form::Time),
            ("verify_steps", Form::Count),
            ("acceptance_length", Form::Short),
        ];
        let heads = [
            "prompt tokens",
            "cached tokens",
            "output tokens",
            "start",
            "first token",
            "between tokens",
            "end to end",
            "verify steps",
            "accepted, tokens",
        ];
        html! {
            h2 { "Requests" }
            details open[self.report.requests.len() <= 100] {
                summary { (count(self.report.requests.len() as u64)) " requests" }
                div class="scroll" tabindex="0" {
                    table class="requests" {
                        thead {
                            tr {
                                th scope="col" { "trace" }
                                th scope="col" { "request" }
                                @for head in heads { th scope="col" class="n" { (head) } }
                                th scope="col" { "digest" }
                            }
                        }
                        tbody {
                            @for (idx, request) in self.shown_requests().iter().enumerate() {
                                tr {
                                    td { (visible(&self.report.traces[request.trace].id)) }
                                    td class="path" { (visible(&request.path)) }
                                    @for (field, form) in COLUMNS {
                                        (self.cell(&format!("/requests/{idx}/{field}"), form,
                                            matches!(form, Form::Time)))
                                    }
                                    td class="digest" { (request.output_digest) }
                                }
                            }
                        }
                    }
                }
                (self.left_out())
                table class="meanings" {
                    tbody {
                        @for (head, (field, _)) in heads.iter().zip(COLUMNS) {
                            tr {
                                th scope="row" { (head) }
                                td { (self.meanings.of(&format!("/requests/0/{field}")).sentence) }
                            }
                        }
                        tr {
                            th scope="row" { "digest" }
                            td { (self.meanings.of("/requests/0/output_digest").sentence) }
                        }
                    }
                }
            }
        }
    }

    fn settings(&self) -> Markup {
        let notes: Vec<(&TraceReport, &String)> = self
            .report
            .traces
            .iter()
            .flat_map(|trace| trace.notes.iter().map(move |note| (trace, note)))
            .collect();
        html! {
            h2 { "Settings and digests" }
            div class="grid" {
                div class="card" { (self.all_of("Asked for", "/settings")) }
                div class="card" { (self.all_of("What served", "/model")) }
                div class="card" {
                    h3 { "Digests and facts" }
                    table class="facts" {
                        tbody {
                            tr {
                                td {
                                    "output digest"
                                    p class="what" { (self.meanings.of("/output_digest").sentence) }
                                }
                                td class="digest" data-text-field="/output_digest" {
                                    (self.report.output_digest)
                                }
                            }
                            @for (name, value) in &self.report.model.facts {
                                tr {
                                    td {
                                        (visible(&name.replace('_', " ")))
                                        p class="what" { (fact(name)) }
                                    }
                                    td class="digest" { (visible(value)) }
                                }
                            }
                        }
                    }
                }
            }
            @if !notes.is_empty() {
                h2 { "Odd in the traces, and accepted" }
                ul {
                    @for (trace, note) in notes {
                        li { (visible(&trace.file)) ": " (visible(note)) }
                    }
                }
            }
        }
    }

    /// Every plain field below `pointer`, with its sentence.
    fn all_of(&self, title: &str, pointer: &str) -> Markup {
        let fields = self.json.pointer(pointer).and_then(Value::as_object);
        html! {
            h3 { (title) }
            table class="facts" {
                tbody {
                    @for (name, value) in fields.into_iter().flatten() {
                        @let meaning = self.meanings.of(&format!("{pointer}/{name}"));
                        @if !value.is_object() {
                            tr {
                                td {
                                    (name.replace('_', " "))
                                    p class="what" { (meaning.sentence) }
                                }
                                td { (plain_words(value, &meaning.unit)) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

fn on_off(value: bool) -> &'static str {
    if value { "on" } else { "off" }
}

/// A number and its unit, as written.
fn written(value: f64, form: Form, unit: &str) -> (String, String) {
    match form {
        Form::Count => (count(value as u64), unit.to_owned()),
        Form::Short => (short(value), unit.to_owned()),
        Form::Share => (short(value * 100.0), "%".to_owned()),
        Form::Time => {
            let (text, short_unit) = time(value);
            // A rate's unit keeps what follows the seconds: s/token.
            (
                text,
                format!("{short_unit}{}", unit.strip_prefix('s').unwrap_or("")),
            )
        }
    }
}

fn time_text(seconds: f64) -> String {
    let (text, unit) = time(seconds);
    format!("{text} {unit}")
}

fn plain_words(value: &Value, unit: &str) -> String {
    let unit = if unit == "1" { "" } else { unit };
    match value {
        Value::Null => "not set".into(),
        Value::Bool(value) => on_off(*value).into(),
        Value::String(text) => visible(text),
        Value::Number(number) if number.is_f64() => {
            // A temperature of 0.7 is read from single precision.
            let value = number.as_f64().unwrap_or(0.0) as f32;
            format!("{value} {unit}").trim_end().to_owned()
        }
        other => format!("{other} {unit}").trim_end().to_owned(),
    }
}

fn field_name(pointer: &str) -> &str {
    pointer.rsplit('/').next().unwrap_or(pointer)
}

fn figure(id: &str, title: &str, sentence: &str, plot: &Markup) -> Markup {
    html! {
        figure class="card" id=(id) {
            h3 { (title) }
            p class="what" { (sentence) }
            (plot)
        }
    }
}

/// A colour and what it stands for.
fn key(class: &str, words: &str) -> Markup {
    html! {
        span {
            svg viewBox="0 0 12 12" aria-hidden="true" {
                rect class=(class) width="12" height="12" rx="2" {}
            }
            (words)
        }
    }
}

fn marks(marks: &[(&'static str, Option<f64>)]) -> Vec<Mark> {
    marks
        .iter()
        .filter_map(|&(name, value)| value.map(|value| Mark { name, value }))
        .collect()
}

fn user_bar((idx, trace): (usize, &TraceReport)) -> Bar {
    let rate = trace.user_rate_tokens_per_s;
    let say = |value: Option<f64>| value.map_or("none".into(), short);
    let value = format!("P50 {}, P90 {}", say(rate.p50), say(rate.p90));
    Bar {
        label: visible(&trace.file),
        parts: vec![Part {
            class: "c1",
            value: rate.p50.unwrap_or(0.0),
            words: format!("{}: {value} tokens/s", visible(&trace.file)),
            field: rate
                .p50
                .map(|_| format!("/traces/{idx}/user_rate_tokens_per_s/p50")),
        }],
        value,
        mark: rate.p90,
    }
}

fn cache_bar((idx, trace): (usize, &TraceReport)) -> Bar {
    let (all, cached) = (trace.input_tokens as u64, trace.cached_tokens as u64);
    let computed = all.saturating_sub(cached);
    let share = if all > 0 {
        100.0 * cached as f64 / all as f64
    } else {
        0.0
    };
    Bar {
        label: visible(&trace.file),
        value: format!("{} of {} ({share:.1} %)", count(cached), count(all)),
        parts: vec![
            Part {
                class: "c3",
                value: cached as f64,
                words: format!("{} tokens from the cache", count(cached)),
                field: Some(format!("/traces/{idx}/cached_tokens")),
            },
            Part {
                class: "c1",
                value: computed as f64,
                words: format!("{} tokens computed", count(computed)),
                field: None,
            },
        ],
        mark: None,
    }
}

fn acceptance_figure(speculation: &Speculation) -> Markup {
    let columns: Vec<Column> = speculation
        .accepted_histogram
        .iter()
        .enumerate()
        .map(|(drafts, &steps)| Column {
            label: (drafts + 1).to_string(),
            value: steps as f64,
            words: format!("{} steps gained {} tokens", count(steps), drafts + 1),
            field: Some(format!("/speculation/accepted_histogram/{drafts}")),
        })
        .collect();
    figure(
        "plot-acceptance",
        "Acceptance length, tokens",
        "How many verify steps of a request gained how many tokens: the accepted drafts and the \
         model's own next token.",
        &plot::columns(
            "Verify steps by tokens gained",
            "steps",
            "tokens a step",
            &columns,
            None,
        ),
    )
}

fn position_figure(speculation: &Speculation) -> Markup {
    let columns: Vec<Column> = speculation
        .accepted_by_position
        .iter()
        .enumerate()
        .map(|(place, &share)| Column {
            label: (place + 1).to_string(),
            value: share,
            words: format!("draft {}: accepted in {:.1} %", place + 1, share * 100.0),
            field: Some(format!("/speculation/accepted_by_position/{place}")),
        })
        .collect();
    figure(
        "plot-positions",
        "Acceptance of each draft, share",
        "In which share of the verify steps the 1st, 2nd, ... draft was accepted; a draft counts \
         only with all before it.",
        &plot::columns(
            "Share accepted by the draft's place",
            "share of steps",
            "draft",
            &columns,
            Some(1.0),
        ),
    )
}

fn paths_figure(id: &str, title: &str, paths: &Paths, pointer: &str) -> Markup {
    let plain: u64 = paths.plain.values().sum();
    let all = paths.covered + plain;
    let bar = |label: String, class, steps: u64, field: String| {
        let share = if all > 0 {
            100.0 * steps as f64 / all as f64
        } else {
            0.0
        };
        Bar {
            value: format!("{} ({share:.1} %)", count(steps)),
            parts: vec![Part {
                class,
                value: steps as f64,
                words: format!("{label}: {} steps", count(steps)),
                field: Some(field),
            }],
            label,
            mark: None,
        }
    };
    let mut bars = vec![bar(
        "covered".into(),
        "c1",
        paths.covered,
        format!("{pointer}/covered"),
    )];
    bars.extend(paths.plain.iter().map(|(reason, &steps)| {
        let label = format!("plain: {}", reason.replace('_', " "));
        bar(label, "c2", steps, format!("{pointer}/plain/{reason}"))
    }));
    html! {
        figure class="card" id=(id) {
            h3 { (title) }
            p class="what" {
                "Covered runs went by the persistent kernels; plain ones stage after stage, for "
                "the reason beside them."
            }
            p class="key" { (key("c1", "covered")) (key("c2", "plain")) }
            (plot::bars(title, &bars, all as f64))
        }
    }
}

/// The agents of a trace, each with its requests, in the order in which they first ask.
fn lanes(requests: &[RequestReport], trace: usize) -> Vec<Lane> {
    let mut lanes: Vec<(String, Lane)> = Vec::new();
    for request in requests.iter().filter(|request| request.trace == trace) {
        let agent = match request.path.rsplit_once('.') {
            Some((agent, _)) => agent,
            None => "",
        };
        let at = lanes.iter().position(|(name, _)| name == agent);
        let at = at.unwrap_or_else(|| {
            let lane = match agent {
                "" => ("agent".to_owned(), 0),
                agent => (
                    format!("subagent {}", visible(agent)),
                    agent.split('.').count(),
                ),
            };
            lanes.push((
                agent.to_owned(),
                Lane {
                    label: lane.0,
                    depth: lane.1,
                    spans: Vec::new(),
                },
            ));
            lanes.len() - 1
        });
        lanes[at].1.spans.push(Span {
            begin_s: request.submitted_s,
            middle_s: request.submitted_s + request.ttft_s,
            end_s: request.submitted_s + request.e2e_s,
            words: format!(
                "{}: at {}, first token after {}, all {} after {}",
                visible(&request.path),
                time_text(request.submitted_s),
                time_text(request.ttft_s),
                count(request.output_tokens as u64),
                time_text(request.e2e_s)
            ),
        });
    }
    lanes.into_iter().map(|(_, lane)| lane).collect()
}

/// What a fact of the model says.
fn fact(name: &str) -> &'static str {
    match name {
        "widths" => "Row counts that kernels were built for.",
        "num_drafts" => "Drafts a verify step.",
        "graph_keys" => "Different steps that were captured.",
        "catalogue_digest" => "Of the kernels: equal on all ranks, or nothing runs.",
        "record_digest" => "Of what was captured: equal on all ranks, or nothing runs.",
        "vote_epoch" => "Votes that the ranks have held.",
        "weight_bytes_per_rank" => "Bytes of weights that a rank holds.",
        "pool_bytes_per_rank" => "Bytes of a rank's KV pool.",
        "kernel_bytes_per_rank" => "Bytes that a rank's kernels hold beside both.",
        _ => "Said by the model that served.",
    }
}

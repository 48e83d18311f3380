//! The report of a replay: `report.json`, whose schema is documented, and a table.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use comfy_table::{Cell, CellAlignment, Table, presets};
use lowlat_core::digest::Fnv1a;
use serde::Serialize;

use crate::EngineError;
use crate::histogram::{Bucket, Histogram};
use crate::metrics::{Metrics, ModeCount, PathCount, RequestMetrics, percentile, seconds};
use crate::replay::{Outcome, ReplaySettings};
use crate::session::Pace;
use crate::step::{RunnerInfo, RuntimeSettings};
use crate::trace::Trace;

/// Grows when a field changes its meaning or goes; new fields leave it.
pub const SCHEMA_VERSION: u32 = 1;
/// JSON schema of `report.json`.
pub const SCHEMA: &str = include_str!("report.schema.json");
/// Name of the report in its folder.
pub const FILE_NAME: &str = "report.json";

/// Name of the page that shows it, in the same folder.
pub const PAGE_NAME: &str = "report.html";

const TABLE_COLUMNS: u16 = 100;

/// The whole report. Times are seconds, counts are whole numbers, digests 0x and 16 digits.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)] // The schema describes every field, and a test holds the two together.
pub struct Report {
    pub schema: &'static str,
    pub schema_version: u32,
    pub lowlat_version: &'static str,
    pub settings: Settings,
    pub model: Model,
    pub totals: Totals,
    pub latency: Latency,
    pub steps: Steps,
    pub distributions: Distributions,
    pub speculation: Option<Speculation>,
    pub cache: Cache,
    pub traces: Vec<TraceReport>,
    pub requests: Vec<RequestReport>,
    pub output_digest: String,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Settings {
    pub plugin: bool,
    pub speculative: bool,
    pub prefix_cache: bool,
    pub sessions: usize,
    pub max_batch: usize,
    pub prefill_chunk: usize,
    pub pace: &'static str,
    pub temperature: f32,
    pub seed: u64,
    pub simulate_acceptance: Option<f64>,
    pub limit_input: Option<usize>,
    pub limit_output: Option<usize>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Model {
    pub name: String,
    pub platform: String,
    pub tp_size: u32,
    pub vocab: u32,
    pub num_drafts: usize,
    pub page_size: usize,
    pub num_pages: usize,
    pub max_batch: usize,
    pub max_rows: usize,
    pub max_positions: usize,
    pub facts: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Totals {
    pub traces: usize,
    pub requests: usize,
    pub input_tokens: usize,
    pub output_tokens: usize,
    pub trace_input_tokens: usize,
    pub trace_output_tokens: usize,
    pub wall_s: f64,
    pub output_tokens_per_s: f64,
}

/// Two percentiles of one measure over all requests; null where no request has it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Percentiles {
    pub p50: Option<f64>,
    pub p90: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Latency {
    pub e2e_s_per_output_token: Percentiles,
    pub user_rate_tokens_per_s: Percentiles,
    pub ttft_s: Percentiles,
    pub inter_token_s: Percentiles,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Steps {
    pub extend: Mode,
    pub decode: Mode,
    pub verify: Mode,
    pub target: Paths,
    pub draft: Paths,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Mode {
    pub steps: u64,
    pub rows: u64,
    pub busy_s: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Paths {
    pub covered: u64,
    pub plain: BTreeMap<&'static str, u64>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Distributions {
    pub inter_token_s: Distribution,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Distribution {
    pub count: u64,
    pub p50: Option<f64>,
    pub p90: Option<f64>,
    pub p99: Option<f64>,
    pub buckets: Vec<BucketReport>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct BucketReport {
    pub above_s: f64,
    pub up_to_s: f64,
    pub count: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Speculation {
    pub request_steps: u64,
    pub acceptance_length: Option<f64>,
    pub accepted_histogram: Vec<u64>,
    pub accepted_by_position: Vec<f64>,
    pub cut_tokens: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Cache {
    pub hit_tokens: usize,
    pub hit_share: f64,
    pub cached_pages: usize,
    pub evicted_pages: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct TraceReport {
    pub file: String,
    pub id: String,
    pub requests: usize,
    pub subagents: usize,
    pub input_tokens: usize,
    pub output_tokens: usize,
    pub trace_input_tokens: usize,
    pub trace_output_tokens: usize,
    pub cached_tokens: usize,
    pub user_rate_tokens_per_s: Percentiles,
    pub notes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct RequestReport {
    pub trace: usize,
    pub path: String,
    pub input_tokens: usize,
    pub cached_tokens: usize,
    pub output_tokens: usize,
    pub trace_input_tokens: usize,
    pub trace_output_tokens: usize,
    pub submitted_s: f64,
    pub ttft_s: f64,
    pub e2e_s: f64,
    pub inter_token_s: Option<f64>,
    pub verify_steps: u64,
    pub acceptance_length: Option<f64>,
    pub output_digest: String,
}

impl Report {
    /// Puts together what was asked for and what came of it.
    #[must_use]
    pub fn new(
        traces: &[Trace],
        replay: &ReplaySettings,
        runtime: &RuntimeSettings,
        info: &RunnerInfo,
        outcome: &Outcome,
    ) -> Self {
        let metrics = &outcome.metrics;
        let requests = request_reports(traces, replay, metrics);
        let trace_reports: Vec<TraceReport> = traces
            .iter()
            .scan(0, |first, trace| {
                let end = *first + trace.agent.requests().len();
                let measured = &metrics.requests[*first..end];
                *first = end;
                Some(trace_report(trace, replay, measured))
            })
            .collect();
        let wall_s = seconds(metrics.wall_ns);
        let output_tokens = requests.iter().map(|request| request.output_tokens).sum();
        let input_tokens: usize = requests.iter().map(|request| request.input_tokens).sum();
        let hit_tokens: usize = requests.iter().map(|request| request.cached_tokens).sum();
        let totals = Totals {
            traces: traces.len(),
            requests: requests.len(),
            input_tokens,
            output_tokens,
            trace_input_tokens: trace_reports
                .iter()
                .map(|trace| trace.trace_input_tokens)
                .sum(),
            trace_output_tokens: trace_reports
                .iter()
                .map(|trace| trace.trace_output_tokens)
                .sum(),
            wall_s,
            output_tokens_per_s: if wall_s > 0.0 {
                output_tokens as f64 / wall_s
            } else {
                0.0
            },
        };
        Self {
            schema: "lowlat.replay.report",
            schema_version: SCHEMA_VERSION,
            lowlat_version: env!("CARGO_PKG_VERSION"),
            settings: Settings {
                plugin: runtime.plugin,
                speculative: runtime.speculative,
                prefix_cache: replay.scheduler.prefix_cache,
                sessions: replay.sessions,
                max_batch: replay.scheduler.max_batch,
                prefill_chunk: replay.scheduler.prefill_chunk,
                pace: match replay.pace {
                    Pace::Asap => "asap",
                    Pace::Trace => "trace",
                },
                temperature: replay.scheduler.temperature,
                seed: runtime.seed,
                simulate_acceptance: replay.scheduler.simulate_acceptance,
                limit_input: replay.limit_input,
                limit_output: replay.limit_output,
            },
            model: Model {
                name: info.model.clone(),
                platform: info.platform.clone(),
                tp_size: info.tp_size,
                vocab: info.vocab,
                num_drafts: info.num_drafts,
                page_size: info.page_size,
                num_pages: info.num_pages,
                max_batch: info.max_batch,
                max_rows: info.max_rows,
                max_positions: info.max_positions,
                facts: info.facts.iter().cloned().collect(),
            },
            totals,
            latency: latency(metrics),
            steps: Steps {
                extend: mode(metrics.extend),
                decode: mode(metrics.decode),
                verify: mode(metrics.verify),
                target: paths(&metrics.target),
                draft: paths(&metrics.draft),
            },
            distributions: Distributions {
                inter_token_s: distribution(&metrics.inter_token),
            },
            speculation: (info.num_drafts > 0).then(|| Speculation {
                request_steps: metrics.accepted_histogram.iter().sum(),
                acceptance_length: metrics.acceptance_length(),
                accepted_histogram: metrics.accepted_histogram.clone(),
                accepted_by_position: metrics.accepted_by_position(),
                cut_tokens: metrics.cut_tokens,
            }),
            cache: Cache {
                hit_tokens,
                hit_share: hit_tokens as f64 / input_tokens as f64,
                cached_pages: outcome.cached_pages,
                evicted_pages: outcome.evicted_pages,
            },
            traces: trace_reports,
            output_digest: hex(metrics
                .requests
                .iter()
                .fold(Fnv1a::new(), |digest, request| {
                    tokens_digest(digest, &request.output)
                })),
            requests,
        }
    }

    /// The report as JSON, two spaces a level, with a line feed at its end.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("a report is plain data");
        text.push('\n');
        text
    }

    /// The report's main figures for a terminal of 100 columns.
    #[must_use]
    pub fn to_table(&self) -> String {
        let (totals, model) = (&self.totals, &self.model);
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        let mut out = format!(
            "{} request{} of {} trace{} on {} ({}, {} rank{})\n\
             {} prompt and {} output tokens in {:.1} s\n",
            totals.requests,
            plural(totals.requests),
            totals.traces,
            plural(totals.traces),
            model.name,
            model.platform,
            model.tp_size,
            plural(model.tp_size as usize),
            totals.input_tokens,
            totals.output_tokens,
            totals.wall_s,
        );
        out.push_str(&self.latency_table().to_string());
        out.push('\n');
        out.push_str(&self.facts_table().to_string());
        out.push('\n');
        out
    }

    fn latency_table(&self) -> Table {
        let mut table = new_table();
        table.set_header(vec!["per request", "P50", "P90"]);
        let latency = &self.latency;
        let rows = [
            (
                "user rate, tokens/s (P90: 90 % are at least as fast)",
                latency.user_rate_tokens_per_s,
                1.0,
            ),
            (
                "end to end per output token, ms",
                latency.e2e_s_per_output_token,
                1e3,
            ),
            ("time to first token, ms", latency.ttft_s, 1e3),
            ("between tokens, ms", latency.inter_token_s, 1e3),
        ];
        for (name, percentiles, factor) in rows {
            let cell = |value: Option<f64>| {
                let text = value.map_or("-".into(), |value| format!("{:.2}", value * factor));
                Cell::new(text).set_alignment(CellAlignment::Right)
            };
            table.add_row(vec![
                Cell::new(name),
                cell(percentiles.p50),
                cell(percentiles.p90),
            ]);
        }
        table
    }

    fn facts_table(&self) -> Table {
        let mut table = new_table();
        let steps = &self.steps;
        table.add_row(vec![
            "steps".into(),
            format!(
                "{} extend, {} decode, {} verify",
                steps.extend.steps, steps.decode.steps, steps.verify.steps
            ),
        ]);
        table.add_row(vec!["target steps".into(), path_words(&steps.target)]);
        if let Some(speculation) = &self.speculation {
            table.add_row(vec!["draft steps".into(), path_words(&steps.draft)]);
            let length = speculation.acceptance_length.map_or("-".into(), |length| {
                format!("{length:.2} tokens a request and step")
            });
            table.add_row(vec!["acceptance".into(), length]);
            let histogram: Vec<String> = speculation
                .accepted_histogram
                .iter()
                .enumerate()
                .map(|(drafts, count)| format!("{drafts}: {count}"))
                .collect();
            table.add_row(vec!["accepted drafts".into(), histogram.join("  ")]);
        }
        table.add_row(vec![
            "prefix cache".into(),
            format!(
                "{} prompt tokens found ({:.1} %), {} pages evicted",
                self.cache.hit_tokens,
                100.0 * self.cache.hit_share,
                self.cache.evicted_pages
            ),
        ]);
        table.add_row(vec!["output digest".into(), self.output_digest.clone()]);
        table
    }
}

pub(crate) fn new_table() -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_content_arrangement(comfy_table::ContentArrangement::Dynamic);
    table.set_width(TABLE_COLUMNS);
    table
}

fn path_words(paths: &Paths) -> String {
    let plain: u64 = paths.plain.values().sum();
    let reasons: Vec<String> = paths
        .plain
        .iter()
        .map(|(reason, count)| format!("{reason} {count}"))
        .collect();
    if plain == 0 {
        format!("{} covered, 0 plain", paths.covered)
    } else {
        format!(
            "{} covered, {plain} plain ({})",
            paths.covered,
            reasons.join(", ")
        )
    }
}

fn request_reports(
    traces: &[Trace],
    replay: &ReplaySettings,
    metrics: &Metrics,
) -> Vec<RequestReport> {
    let began_at = metrics
        .requests
        .iter()
        .map(|request| request.submitted_at)
        .min()
        .unwrap_or(0);
    let of_traces = traces.iter().enumerate().flat_map(|(trace_idx, trace)| {
        trace
            .agent
            .requests()
            .into_iter()
            .map(move |request| (trace_idx, request))
    });
    of_traces
        .zip(&metrics.requests)
        .map(|((trace, request), measured)| RequestReport {
            trace,
            path: request.path.clone(),
            input_tokens: replay.input_tokens(request),
            cached_tokens: measured.cached_tokens,
            output_tokens: measured.output.len(),
            trace_input_tokens: request.input_tokens,
            trace_output_tokens: request.output_tokens,
            submitted_s: seconds(measured.submitted_at - began_at),
            ttft_s: measured.ttft_s(),
            e2e_s: measured.e2e_s(),
            inter_token_s: measured.inter_token_s(),
            verify_steps: measured.verify_steps,
            acceptance_length: measured.acceptance_length(),
            output_digest: hex(tokens_digest(Fnv1a::new(), &measured.output)),
        })
        .collect()
}

fn trace_report(
    trace: &Trace,
    replay: &ReplaySettings,
    measured: &[RequestMetrics],
) -> TraceReport {
    let requests = trace.agent.requests();
    TraceReport {
        file: trace.file.clone(),
        id: trace.id.clone(),
        requests: requests.len(),
        subagents: trace.agent.num_subagents(),
        input_tokens: requests
            .iter()
            .map(|request| replay.input_tokens(request))
            .sum(),
        output_tokens: requests
            .iter()
            .map(|request| replay.output_tokens(request))
            .sum(),
        trace_input_tokens: requests.iter().map(|request| request.input_tokens).sum(),
        trace_output_tokens: requests.iter().map(|request| request.output_tokens).sum(),
        cached_tokens: measured.iter().map(|request| request.cached_tokens).sum(),
        user_rate_tokens_per_s: user_rate(e2e_per_token(measured)),
        notes: trace.notes.clone(),
    }
}

fn percentiles(values: &[f64]) -> Percentiles {
    Percentiles {
        p50: percentile(values, 50),
        p90: percentile(values, 90),
    }
}

/// Percentiles of the seconds that an output token of these requests took, end to end.
fn e2e_per_token(requests: &[RequestMetrics]) -> Percentiles {
    let values: Vec<f64> = requests
        .iter()
        .map(RequestMetrics::e2e_s_per_output_token)
        .collect();
    percentiles(&values)
}

/// The same as a rate. A replay without measurable time has none; null says so better than
/// infinity, which JSON has not.
fn user_rate(e2e_s_per_output_token: Percentiles) -> Percentiles {
    let inverse = |value: Option<f64>| value.filter(|&value| value > 0.0).map(|value| 1.0 / value);
    Percentiles {
        p50: inverse(e2e_s_per_output_token.p50),
        p90: inverse(e2e_s_per_output_token.p90),
    }
}

fn latency(metrics: &Metrics) -> Latency {
    let requests = &metrics.requests;
    let e2e_s_per_output_token = e2e_per_token(requests);
    let ttft: Vec<f64> = requests.iter().map(RequestMetrics::ttft_s).collect();
    let inter_token: Vec<f64> = requests
        .iter()
        .filter_map(RequestMetrics::inter_token_s)
        .collect();
    Latency {
        e2e_s_per_output_token,
        user_rate_tokens_per_s: user_rate(e2e_s_per_output_token),
        ttft_s: percentiles(&ttft),
        inter_token_s: percentiles(&inter_token),
    }
}

fn distribution(times: &Histogram) -> Distribution {
    let bucket = |bucket: Bucket| BucketReport {
        above_s: bucket.above_s,
        up_to_s: bucket.up_to_s,
        count: bucket.count,
    };
    Distribution {
        count: times.count(),
        p50: times.percentile(50),
        p90: times.percentile(90),
        p99: times.percentile(99),
        buckets: times.buckets().into_iter().map(bucket).collect(),
    }
}

fn mode(count: ModeCount) -> Mode {
    Mode {
        steps: count.steps,
        rows: count.rows,
        busy_s: seconds(count.busy_ns),
    }
}

fn paths(count: &PathCount) -> Paths {
    Paths {
        covered: count.covered,
        plain: count.plain.clone(),
    }
}

/// FNV-1a over the token ids, each as four little-endian bytes.
fn tokens_digest(digest: Fnv1a, tokens: &[i32]) -> Fnv1a {
    tokens
        .iter()
        .fold(digest, |digest, token| digest.bytes(&token.to_le_bytes()))
}

fn hex(digest: Fnv1a) -> String {
    format!("{:#018x}", digest.finish())
}

/// A file that will be written at the end. Its folder is made and tried at the start, so that a
/// long replay does not end with nowhere to write; dropped unwritten, it leaves nothing behind.
#[derive(Debug)]
pub struct OutputFile {
    /// As it was asked for.
    path: PathBuf,
    /// The file itself, behind every link.
    target: PathBuf,
    /// Folders that we made, outermost first.
    made: Vec<PathBuf>,
    written: bool,
}

impl OutputFile {
    /// Sees that a file can be made at `path`, in a folder that may be missing: it is made and
    /// goes again, so that nothing is left behind by a program that is interrupted before it
    /// writes.
    ///
    /// # Errors
    /// [`EngineError::Refused`] with the path and the reason.
    pub fn prepare(path: &Path) -> Result<Self, EngineError> {
        // The rename at the end would put a file in the place of a pipe or a device.
        let seen = match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => Some("a folder"),
            Ok(metadata) if !metadata.is_file() => Some("a pipe or a device"),
            _ => None,
        };
        if let Some(seen) = seen {
            return Err(EngineError::Refused(format!(
                "{}: is {seen}; a file is to be written there",
                path.display()
            )));
        }
        let mut file = Self {
            path: path.to_path_buf(),
            target: path.to_path_buf(),
            made: Vec::new(),
            written: false,
        };
        file.make_folder()?;
        let folder = file.folder();
        let name = path.file_name().unwrap_or_default();
        let target = fs::canonicalize(path)
            .or_else(|_| fs::canonicalize(folder).map(|folder| folder.join(name)));
        file.target = target.map_err(|error| refusal(path, "be written", &error))?;
        let probe = file.temporary("tmp");
        fs::File::create(&probe).map_err(|error| refusal(path, "be written", &error))?;
        fs::remove_file(&probe).map_err(|error| refusal(path, "be written", &error))?;
        file.remove_folder();
        Ok(file)
    }

    /// Makes the folder where it is missing.
    fn make_folder(&mut self) -> Result<(), EngineError> {
        let folder = self.folder();
        let missing: Vec<PathBuf> = folder
            .ancestors()
            .take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists())
            .map(Path::to_path_buf)
            .collect();
        for folder in missing.into_iter().rev() {
            // `new/..` is there as soon as `new` is.
            if folder.exists() {
                continue;
            }
            fs::create_dir(&folder).map_err(|error| refusal(&folder, "make the folder", &error))?;
            self.made.push(folder);
        }
        Ok(())
    }

    /// Removes the folders that we made. Only empty ones go; one that someone has used since
    /// stays.
    fn remove_folder(&mut self) {
        for folder in self.made.drain(..).rev() {
            let _ = fs::remove_dir(folder);
        }
    }

    /// Writes the whole file, or leaves what was there.
    ///
    /// # Errors
    /// [`EngineError::Refused`] with the path and the reason.
    pub fn write(self, text: &str) -> Result<(), EngineError> {
        Self::write_all(vec![(self, text.to_owned())])
    }

    /// Writes all of these files, or leaves what was there: a failure on one, also the last, puts
    /// back those before it.
    ///
    /// # Errors
    /// [`EngineError::Refused`] with the path of the file that failed, and the reason.
    pub fn write_all(mut files: Vec<(Self, String)>) -> Result<(), EngineError> {
        let result = Self::place_all(&mut files);
        for (file, _) in &mut files {
            // Most of these are gone already.
            for ending in ["tmp", "old"] {
                let _ = fs::remove_file(file.temporary(ending));
            }
            file.written = result.is_ok();
        }
        result
    }

    fn place_all(files: &mut [(Self, String)]) -> Result<(), EngineError> {
        for (file, _) in files.iter_mut() {
            file.make_folder()?;
        }
        let files = &*files;
        // All that can take long or run out of space comes before the first rename.
        for (file, text) in files {
            let write = || {
                let mut temporary = fs::File::create(file.temporary("tmp"))?;
                temporary.write_all(text.as_bytes())?;
                temporary.sync_all()
            };
            write().map_err(|error| refusal(&file.path, "be written", &error))?;
        }
        for (place, (file, _)) in files.iter().enumerate() {
            if let Err(error) = file.take_place() {
                for (earlier, _) in files[..place].iter().rev() {
                    earlier.give_back();
                }
                return Err(refusal(&file.path, "be written", &error));
            }
        }
        Ok(())
    }

    /// Renames the written file into place; what was there stays beside it under another name, and
    /// at no moment is there nothing.
    fn take_place(&self) -> std::io::Result<()> {
        let old = self.temporary("old");
        // One of a process of our number that died here may be a second name of the same file,
        // which a copy would empty.
        let _ = fs::remove_file(&old);
        if self.target.exists() {
            // A second name costs nothing, but not every file system has such.
            fs::hard_link(&self.target, &old)
                .or_else(|_| fs::copy(&self.target, &old).map(|_| ()))?;
        }
        fs::rename(self.temporary("tmp"), &self.target)
    }

    /// Undoes [`Self::take_place`].
    fn give_back(&self) {
        // Nothing better can be done about a second failure; the first one is reported.
        if fs::rename(self.temporary("old"), &self.target).is_err() {
            let _ = fs::remove_file(&self.target);
        }
    }

    /// Whether the file at `path`, if there is one, is the one to be written.
    #[must_use]
    pub fn is(&self, path: &Path) -> bool {
        fs::canonicalize(path).is_ok_and(|path| path == self.target)
    }

    /// Whether both are one file.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.target == other.target
    }

    fn folder(&self) -> PathBuf {
        match self.target.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.to_path_buf(),
            _ => PathBuf::from("."),
        }
    }

    /// A hidden name beside the file, of this process only.
    fn temporary(&self, ending: &str) -> PathBuf {
        let mut name = OsString::from(".");
        name.push(self.target.file_name().unwrap_or_default());
        name.push(format!(".{}.{ending}", std::process::id()));
        self.folder().join(name)
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if !self.written {
            self.remove_folder();
        }
    }
}

fn refusal(path: &Path, what: &str, error: &std::io::Error) -> EngineError {
    EngineError::Refused(format!("{}: cannot {what}: {error}", path.display()))
}

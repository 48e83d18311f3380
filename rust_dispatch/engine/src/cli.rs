//! The command line of `lowlat replay`.

use std::ffi::OsString;
use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{CommandFactory, Parser, ValueEnum, ValueHint};
use lowlat_core::graph_key::Record;
use serde::Serialize;

use crate::EngineError;
use crate::page;
use crate::progress::ProgressMeter;
use crate::replay::{self, Clock, Outcome, ReplaySettings};
use crate::report::{self, OutputFile, Report};
use crate::sched::SchedulerSettings;
use crate::session::Pace;
use crate::step::{FaultKind, InjectedFault, RuntimeSettings, StepRunner};
use crate::trace::{self, Trace};

/// Exit code of a command line that is wrong.
pub(crate) const USAGE: u8 = 2;

const NAME: &str = "lowlat replay";

/// Pool sizes that are chosen where `--kv-tokens` is not given.
const KV_TOKENS_LEAST: usize = 16 * 1024;
const KV_TOKENS_MOST: usize = 64 * 1024;
/// A single request may need more, up to this: a file with an enormous number in it must end in a
/// refusal, not in an enormous allocation. `--kv-tokens` goes further.
const KV_TOKENS_LARGEST: usize = 256 * 1024;
/// What `--kv-tokens` may ask for.
const KV_TOKENS_LIMIT: i64 = 16 * 1024 * 1024;
/// What a request may take beyond its tokens: drafts, and the rest of a page of up to 256.
const KV_TOKENS_SLACK: usize = 512;

/// Makes the runner that the settings ask for.
pub type Start<'a> = dyn FnMut(&RuntimeSettings) -> Result<Box<dyn StepRunner>, EngineError> + 'a;

const ABOUT: &str = "\
Replay agent traces on an engine that serves a model with the lowlat kernels.

Each TRACE is one user's session: its requests run one after the other, its subagents beside
them. Prompts are synthesised from the trace's hash ids, so that prefixes are shared as in the
trace; every request generates as many tokens as it did in the trace. What was measured is
printed as a table and, with --report, written as DIR/report.json and, for a browser, as
DIR/report.html.";

const EXAMPLES: &str = "\
Examples:
  Replay the small trace that comes with lowlat, on two ranks:
    lowlat replay examples/traces/small.json --tp 2

  Eight sessions at a time, prompts and answers capped, with a report:
    lowlat replay traces/*.json --sessions 8 --limit-input 512 --limit-output 64 --report out

  The baseline: the same stages one by one, without the kernels of the plugin:
    lowlat replay traces/*.json --plugin off --report baseline

  A steady load with the published acceptance length of agentic coding:
    lowlat replay traces/*.json --simulate-acceptance 3.51

Exit codes:
  0  done
  1  refused: a trace, an option or the model cannot be served; nothing was written
  2  the command line is wrong
  3  a fault while it ran: a deadline passed or a rank was lost; nothing was written";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OnOff {
    On,
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PaceArg {
    /// As fast as possible.
    Asap,
    /// With the trace's think times and starts.
    Trace,
}

/// `lowlat replay`.
#[derive(Clone, Debug, Parser)]
#[command(name = "lowlat replay", bin_name = "lowlat replay", version, about = ABOUT)]
#[command(after_help = EXAMPLES, max_term_width = 100, allow_negative_numbers = true)]
struct Options {
    /// Trace files, one session each
    #[arg(required_unless_present = "report_schema", value_name = "TRACE")]
    #[arg(value_hint = ValueHint::FilePath)]
    traces: Vec<PathBuf>,

    /// Print the JSON schema of report.json and stop
    #[arg(long)]
    report_schema: bool,

    /// Model to serve: a built-in one (tiny-v4, v4-flash, tiny-v41, v41-flash) or a checkpoint
    /// folder
    #[arg(
        long,
        value_name = "NAME|DIR",
        default_value = "tiny-v41",
        help_heading = "Model"
    )]
    model: String,

    /// Tensor-parallel ranks
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Model")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=64))]
    tp: u32,

    /// Where the kernels run
    #[arg(
        long,
        value_name = "NAME",
        default_value = "scalar",
        help_heading = "Model"
    )]
    platform: String,

    /// Run covered steps by the persistent kernels; off: every step one stage after another
    #[arg(
        long,
        value_name = "on|off",
        default_value = "on",
        hide_possible_values = true
    )]
    #[arg(help_heading = "Model")]
    plugin: OnOff,

    /// Rows of the steps to build kernels for, ascending [default: every batch size]
    #[arg(
        long,
        value_name = "ROWS,...",
        value_delimiter = ',',
        help_heading = "Model"
    )]
    widths: Vec<u32>,

    /// Kernel library to load [default: the one that lowlat was installed with]
    #[arg(long, value_name = "FILE", help_heading = "Model", value_hint = ValueHint::FilePath)]
    kernels: Option<PathBuf>,

    /// Tokens that the KV pool must hold [default: by the traces, at most 262144]
    #[arg(long, value_name = "N", help_heading = "Model")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=KV_TOKENS_LIMIT))]
    kv_tokens: Option<u32>,

    /// Keep the first N tokens of each prompt
    #[arg(long, value_name = "N", help_heading = "Load")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    limit_input: Option<u32>,

    /// Generate at most N tokens a request
    #[arg(long, value_name = "N", help_heading = "Load")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    limit_output: Option<u32>,

    /// Traces that are replayed at a time, 1 to 8
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Load")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=8))]
    sessions: u32,

    /// asap: as fast as possible; trace: with the trace's think times
    #[arg(
        long,
        value_name = "asap|trace",
        default_value = "asap",
        hide_possible_values = true
    )]
    #[arg(help_heading = "Load")]
    pace: PaceArg,

    /// Requests of one step at most, 1 to 8
    #[arg(
        long,
        value_name = "N",
        default_value_t = 8,
        help_heading = "Scheduling"
    )]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=8))]
    max_batch: u32,

    /// Prompt rows of one step at most, 1 to 4096
    #[arg(
        long,
        value_name = "ROWS",
        default_value_t = 128,
        help_heading = "Scheduling"
    )]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4096))]
    prefill_chunk: u32,

    /// Share the pages of equal prefixes
    #[arg(
        long,
        value_name = "on|off",
        default_value = "on",
        hide_possible_values = true
    )]
    #[arg(help_heading = "Scheduling")]
    prefix_cache: OnOff,

    /// Draft and verify five tokens a step; off: one token a step
    #[arg(
        long,
        value_name = "on|off",
        default_value = "on",
        hide_possible_values = true
    )]
    #[arg(help_heading = "Sampling")]
    speculative: OnOff,

    /// 0: greedy; above: sample
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature)]
    #[arg(help_heading = "Sampling")]
    temperature: f32,

    /// Seed of the prompts and of every random draw
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Sampling")]
    seed: u64,

    /// Count so many tokens a verify step as accepted, on the mean (1 to 6); the tokens then
    /// mean nothing, the work and the times are real
    #[arg(long, value_name = "LENGTH", help_heading = "Sampling")]
    simulate_acceptance: Option<f64>,

    /// Write DIR/report.json, and DIR/report.html that shows it
    #[arg(long, value_name = "DIR", help_heading = "Output", value_hint = ValueHint::DirPath)]
    report: Option<PathBuf>,

    /// Write every request's generated tokens as JSON
    #[arg(long, value_name = "FILE", help_heading = "Output", value_hint = ValueHint::FilePath)]
    tokens_out: Option<PathBuf>,

    /// Write rank 0's graph record, for `lowlat inspect`
    #[arg(long, value_name = "FILE", help_heading = "Output", value_hint = ValueHint::FilePath)]
    record: Option<PathBuf>,

    /// Make one rank misbehave while the ranks come to agree, to see them refuse together: widths
    /// (covers others), catalogue (carries other kernels), silent (does not answer) or capture
    /// (fails after its last launch was recorded)
    #[arg(long, value_name = "RANK:KIND", value_parser = injected_fault)]
    #[arg(help_heading = "Tests of the agreement")]
    inject_fault: Option<InjectedFault>,
}

fn temperature(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(value) if (0.0..=100.0).contains(&value) => Ok(value),
        _ => Err("a number from 0 to 100 is needed".into()),
    }
}

fn injected_fault(text: &str) -> Result<InjectedFault, String> {
    let fault = text.split_once(':').and_then(|(rank, kind)| {
        let kind = match kind {
            "widths" => FaultKind::Widths,
            "catalogue" => FaultKind::Catalogue,
            "silent" => FaultKind::Silent,
            "capture" => FaultKind::Capture,
            _ => return None,
        };
        Some(InjectedFault {
            tp_rank: rank.parse().ok()?,
            kind,
        })
    });
    fault.ok_or_else(|| "RANK:widths, RANK:catalogue, RANK:silent or RANK:capture is needed".into())
}

impl Options {
    fn replay_settings(&self) -> ReplaySettings {
        ReplaySettings {
            limit_input: self.limit_input.map(|limit| limit as usize),
            limit_output: self.limit_output.map(|limit| limit as usize),
            sessions: self.sessions as usize,
            pace: match self.pace {
                PaceArg::Asap => Pace::Asap,
                PaceArg::Trace => Pace::Trace,
            },
            seed: self.seed,
            scheduler: SchedulerSettings {
                max_batch: self.max_batch as usize,
                prefill_chunk: self.prefill_chunk as usize,
                prefix_cache: self.prefix_cache == OnOff::On,
                temperature: self.temperature,
                simulate_acceptance: self.simulate_acceptance,
                seed: self.seed,
            },
        }
    }

    fn runtime_settings(&self, kv_tokens: usize) -> RuntimeSettings {
        RuntimeSettings {
            model: self.model.clone(),
            platform: self.platform.clone(),
            tp_size: self.tp,
            plugin: self.plugin == OnOff::On,
            widths: self.widths.clone(),
            max_batch: self.max_batch as usize,
            max_rows: self.prefill_chunk as usize,
            speculative: self.speculative == OnOff::On,
            kv_tokens,
            seed: self.seed,
            kernels: self.kernels.clone(),
            inject_fault: self.inject_fault,
        }
    }

    /// A pool for the largest request at least, and for a full batch of it within reason: more
    /// pages than the traces can fill would only cost memory.
    fn kv_tokens(&self, traces: &[Trace], settings: &ReplaySettings) -> usize {
        if let Some(kv_tokens) = self.kv_tokens {
            return kv_tokens as usize;
        }
        let largest = traces
            .iter()
            .flat_map(|trace| trace.agent.requests())
            .map(|request| settings.input_tokens(request) + settings.output_tokens(request))
            .max()
            .unwrap_or(0)
            + KV_TOKENS_SLACK;
        (largest * settings.scheduler.max_batch)
            .clamp(KV_TOKENS_LEAST, KV_TOKENS_MOST)
            .max(largest.min(KV_TOKENS_LARGEST))
    }
}

/// Runs `lowlat replay` with its arguments (the program's name first) and gives its exit code.
pub fn run(
    args: impl IntoIterator<Item = OsString>,
    start: &mut Start,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> u8 {
    let options: Options = match parse(NAME, args, out, err) {
        Ok(options) => options,
        Err(code) => return code,
    };
    if options.report_schema {
        return finish(NAME, Ok(report::SCHEMA.to_owned()), out, err);
    }
    let result = replay_files(&options, start, err);
    finish(NAME, result, out, err)
}

/// The options of `lowlat replay`, for its completion.
#[must_use]
pub fn command() -> clap::Command {
    Options::command()
}

/// Reads a command's options. `Err` is the exit code of a command line that is wrong or asks for
/// help; either has been answered then.
pub(crate) fn parse<T: Parser>(
    name: &str,
    args: impl IntoIterator<Item = OsString>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> Result<T, u8> {
    T::try_parse_from(args).map_err(|error| {
        if error.use_stderr() {
            let _ = writeln!(err, "{name}: {} (see --help)", usage_words(&error));
            return USAGE;
        }
        print(name, &error.to_string(), out, err)
    })
}

/// Ends a command: its text, or one line; and the exit code.
pub(crate) fn finish(
    name: &str,
    result: Result<String, EngineError>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> u8 {
    match result {
        Ok(text) => print(name, &text, out, err),
        Err(error) => {
            let kind = if error.exit_code() == 1 {
                "refused"
            } else {
                "fault"
            };
            // One line, whatever a library put into its message.
            let words = error
                .to_string()
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" ");
            let _ = writeln!(err, "{name}: {kind}: {words}");
            error.exit_code()
        }
    }
}

/// Writes what was asked for. A reader that left (`| head`) has what it wanted; any other failure
/// is a fault, for a half schema in a file must not look whole.
fn print(name: &str, text: &str, out: &mut dyn Write, err: &mut dyn Write) -> u8 {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            let error = EngineError::Fault(format!("standard output cannot be written: {error}"));
            let _ = writeln!(err, "{name}: fault: {error}");
            error.exit_code()
        }
        _ => 0,
    }
}

/// The parser's message as one line, without its hints.
fn usage_words(error: &clap::Error) -> String {
    let text = error.to_string();
    let message = text.split("\n\n").next().unwrap_or_default();
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn replay_files(
    options: &Options,
    start: &mut Start,
    err: &mut dyn Write,
) -> Result<String, EngineError> {
    if !options.widths.is_sorted_by(|a, b| a < b) || options.widths.first() == Some(&0) {
        return Err(EngineError::Refused(format!(
            "--widths is {}; rows from 1, ascending, are needed",
            options
                .widths
                .iter()
                .map(u32::to_string)
                .collect::<Vec<_>>()
                .join(",")
        )));
    }
    if let Some(fault) = options
        .inject_fault
        .filter(|fault| fault.tp_rank >= options.tp)
    {
        return Err(EngineError::Refused(format!(
            "--inject-fault names rank {}; with --tp {} the ranks are 0 to {}",
            fault.tp_rank,
            options.tp,
            options.tp - 1
        )));
    }
    let traces: Vec<Trace> = options
        .traces
        .iter()
        .map(|path| trace::read(path))
        .collect::<Result<_, _>>()?;
    for trace in &traces {
        for note in &trace.notes {
            let _ = writeln!(err, "{}: note: {note}", trace.file);
        }
    }
    let outputs = prepare_outputs(options)?;

    let settings = options.replay_settings();
    let runtime = options.runtime_settings(options.kv_tokens(&traces, &settings));
    let mut runner = start(&runtime)?;
    if options.record.is_some() && runner.record().is_none() {
        return Err(EngineError::Refused(format!(
            "--record: {} on {} captures no graphs, so there is no record to write",
            runtime.model, runtime.platform
        )));
    }
    let total_tokens = traces
        .iter()
        .flat_map(|trace| trace.agent.requests())
        .map(|request| settings.input_tokens(request) + settings.output_tokens(request))
        .sum::<usize>();
    let mut meter = ProgressMeter::new(total_tokens as u64);
    let outcome = replay::replay(
        &traces,
        &settings,
        runner.as_mut(),
        &mut WallClock::new(),
        &mut |tokens| {
            meter.add(tokens);
        },
    );
    meter.finish();
    let outcome = outcome?;

    let report = Report::new(&traces, &settings, &runtime, runner.info(), &outcome);
    let mut table = report.to_table();
    if let Some(folder) = &options.report {
        let page = folder.join(report::PAGE_NAME);
        let report = folder.join(report::FILE_NAME);
        table.push_str(&format!("report: {}\n", report.display()));
        table.push_str(&format!("page: {}\n", page.display()));
    }
    let mut record = runner.record().map(Record::to_json).unwrap_or_default();
    record.push('\n');
    let texts = outputs.into_iter().map(|(output, file)| {
        let text = match output {
            Output::Report => report.to_json(),
            Output::Page => page::to_html(&report),
            Output::Tokens => tokens_json(&traces, &outcome),
            Output::Record => record.clone(),
        };
        (file, text)
    });
    OutputFile::write_all(texts.collect())?;
    Ok(table)
}

/// What a replay may write; all of it or nothing.
#[derive(Clone, Copy, Debug)]
enum Output {
    Report,
    Page,
    Tokens,
    Record,
}

/// Sees before the replay that every file that was asked for can be written.
fn prepare_outputs(options: &Options) -> Result<Vec<(Output, OutputFile)>, EngineError> {
    let folder = options.report.as_ref();
    let paths = [
        (
            Output::Report,
            folder.map(|folder| folder.join(report::FILE_NAME)),
        ),
        (
            Output::Page,
            folder.map(|folder| folder.join(report::PAGE_NAME)),
        ),
        (Output::Tokens, options.tokens_out.clone()),
        (Output::Record, options.record.clone()),
    ];
    let mut outputs: Vec<(Output, OutputFile)> = Vec::new();
    for (output, path) in paths {
        let Some(path) = path else {
            continue;
        };
        let file = OutputFile::prepare(&path)?;
        if let Some(trace) = options.traces.iter().find(|trace| file.is(trace)) {
            return Err(EngineError::Refused(format!(
                "{}: would overwrite the trace {}; another file is needed",
                path.display(),
                trace.display()
            )));
        }
        if outputs.iter().any(|(_, earlier)| earlier.is_same(&file)) {
            return Err(EngineError::Refused(format!(
                "{}: would be written twice; --report, --tokens-out and --record need files of \
                 their own",
                path.display()
            )));
        }
        outputs.push((output, file));
    }
    Ok(outputs)
}

#[derive(Serialize)]
struct TokensOfRequest<'a> {
    file: &'a str,
    path: &'a str,
    tokens: &'a [i32],
}

/// Every request's generated tokens, one request a line.
fn tokens_json(traces: &[Trace], outcome: &Outcome) -> String {
    let requests = traces.iter().flat_map(|trace| {
        trace
            .agent
            .requests()
            .into_iter()
            .map(move |request| (&trace.file, &request.path))
    });
    let lines: Vec<String> = requests
        .zip(&outcome.metrics.requests)
        .map(|((file, path), measured)| {
            let line = TokensOfRequest {
                file,
                path,
                tokens: &measured.output,
            };
            serde_json::to_string(&line).expect("plain data")
        })
        .collect();
    format!("[\n{}\n]\n", lines.join(",\n"))
}

struct WallClock {
    began_at: Instant,
}

impl WallClock {
    fn new() -> Self {
        Self {
            began_at: Instant::now(),
        }
    }
}

impl Clock for WallClock {
    fn now_ns(&mut self) -> u64 {
        self.began_at.elapsed().as_nanos() as u64
    }

    fn sleep_until(&mut self, at_ns: u64) {
        let now_ns = self.now_ns();
        std::thread::sleep(Duration::from_nanos(at_ns.saturating_sub(now_ns)));
    }
}

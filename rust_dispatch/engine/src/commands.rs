//! The commands of the engine's binary, `lowlat-engine COMMAND`; `lowlat COMMAND` hands over to
//! it. Each refuses in one line and ends with the exit codes of `lowlat replay`.

use std::ffi::OsString;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory, Parser, Subcommand, ValueHint};
use clap_complete::Shell;
use serde::Deserialize;

use crate::EngineError;
#[cfg(target_os = "linux")]
use crate::bench;
use crate::checkpoint::{Checkpoint, make};
use crate::cli::{self, Start, USAGE, finish, parse};
use crate::report::OutputFile;
use crate::trace::{self, Trace};
use crate::trace_synth::{self, Spread, Synth};
use crate::{inspect, trace_info};

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  refused; nothing was written
  2  the command line is wrong";

const TRACE_EXAMPLES: &str = "\
Examples:
  What is in some traces:
    lowlat trace info traces/*.json

  Eight sessions whose prompts repeat four fifths of the one before, with two subagents each:
    lowlat trace synth --out synth --sessions 8 --prefix-sharing 0.8 --subagents 2 --seed 1

Exit codes:
  0  done
  1  refused; nothing was written
  2  the command line is wrong";

// One line each: it stands in the list of the commands too.
const INFO_ABOUT: &str =
    "Show what is in trace files: sessions, requests, tokens, prefix sharing, subagents, oddities";
const INFO_MORE: &str = "\
Prefix sharing is that of an unbounded cache that serves the requests in the files' order: tokens
that a prompt has in common, from its first on, with an earlier prompt.";

const SYNTH_ABOUT: &str = "Write synthetic traces from a few parameters and a seed";
const SYNTH_MORE: &str = "\
DIR gets a file a session, in the format that `lowlat replay` reads. Equal parameters give equal
bytes, and more sessions leave the first ones as they were. A SPREAD is a number (512), a range
that is drawn from evenly (100..900) or a log-normal by its median (lognormal:800,0.7).";

const INSPECT_ABOUT: &str = "\
Show a graph record: the keys that were captured, the path that runs each, what each reads
(sealed), and the digests that ranks must have in common.

A record is written by `lowlat replay --record FILE`. With OTHER, show what the two differ in, and
end with exit code 1 when they do; addresses are each rank's own and are not compared.";

const INSPECT_EXAMPLES: &str = "\
Examples:
  lowlat replay trace.json --record record.json
  lowlat inspect record.json
  lowlat inspect record.json other.json

Exit codes:
  0  done; of two records: they agree
  1  refused: a file is truncated, damaged, of another kind or newer; or two records differ
  2  the command line is wrong";

/// `lowlat trace`.
#[derive(Debug, Parser)]
#[command(name = "trace", bin_name = "lowlat trace", max_term_width = 100)]
#[command(about = "Look into traces, or make some", after_help = TRACE_EXAMPLES)]
#[command(arg_required_else_help = false)]
struct TraceOptions {
    #[command(subcommand)]
    command: TraceCommand,
}

#[derive(Debug, Subcommand)]
enum TraceCommand {
    #[command(about = INFO_ABOUT, after_help = format!("{INFO_MORE}\n\n{EXIT_CODES}"))]
    Info(InfoOptions),
    #[command(about = SYNTH_ABOUT, after_help = format!("{SYNTH_MORE}\n\n{EXIT_CODES}"))]
    #[command(allow_negative_numbers = true)]
    Synth(SynthOptions),
}

#[derive(Debug, Args)]
struct InfoOptions {
    /// Trace files, one session each
    #[arg(required = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    files: Vec<PathBuf>,

    /// Print JSON instead of tables
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct SynthOptions {
    /// Folder for the files session-0000.json and so on; made where it is missing
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    out: PathBuf,

    /// Sessions, a file each
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10_000))]
    sessions: u32,

    /// Requests of a session's own agent
    #[arg(long, value_name = "SPREAD", default_value = "12")]
    requests: Spread,

    /// Prompt tokens of a request
    #[arg(long, value_name = "SPREAD", default_value = "lognormal:2000,0.8")]
    input: Spread,

    /// Tokens that a request generates
    #[arg(long, value_name = "SPREAD", default_value = "lognormal:150,0.9")]
    output: Spread,

    /// Share of a prompt that repeats the start of the agent's prompt before, 0 to 1
    #[arg(long, value_name = "SHARE", default_value_t = 0.8, value_parser = share)]
    prefix_sharing: f64,

    /// First tokens of every prompt, the same in all sessions and subagents
    #[arg(long, value_name = "N", default_value_t = 0)]
    #[arg(value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    system_tokens: u32,

    /// Subagents of a session
    #[arg(long, value_name = "N", default_value_t = 0)]
    #[arg(value_parser = clap::value_parser!(u32).range(0..=1000))]
    subagents: u32,

    /// Requests of a subagent
    #[arg(long, value_name = "SPREAD", default_value = "3")]
    subagent_requests: Spread,

    /// Mean seconds between an answer and the next request, 0 to 3600
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = think_time)]
    think_time: f64,

    /// Tokens that a hash id stands for
    #[arg(long, value_name = "N", default_value_t = 64)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    block_size: u32,

    /// Seed of every draw
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

/// `lowlat inspect`.
#[derive(Debug, Parser)]
#[command(name = "inspect", bin_name = "lowlat inspect", max_term_width = 100)]
#[command(about = INSPECT_ABOUT, after_help = INSPECT_EXAMPLES)]
struct InspectOptions {
    /// Graph record
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    file: PathBuf,

    /// Another, to compare with
    #[arg(value_name = "OTHER", value_hint = ValueHint::FilePath)]
    other: Option<PathBuf>,

    /// Print JSON instead of tables: the record, or {"differences": [...]}
    #[arg(long)]
    json: bool,
}

/// `lowlat-engine check-checkpoint`: what `lowlat check` asks of a folder.
#[derive(Debug, Parser)]
#[command(
    name = "check-checkpoint",
    bin_name = "lowlat-engine check-checkpoint",
    max_term_width = 100
)]
#[command(about = "Check every header of a checkpoint folder against its config.json")]
#[command(after_help = EXIT_CODES)]
struct CheckCheckpointOptions {
    /// Checkpoint folder
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    folder: PathBuf,
}

/// `lowlat-engine completion`: what `lowlat completion` is made with.
#[derive(Debug, Parser)]
#[command(
    name = "completion",
    bin_name = "lowlat-engine completion",
    max_term_width = 100
)]
#[command(about = "Print the completion of `lowlat` for a shell")]
struct CompletionOptions {
    /// bash, zsh or fish
    #[arg(value_name = "SHELL", value_parser = shell)]
    shell: Shell,

    /// Other commands of `lowlat` as a JSON list, `-` for standard input
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    commands: Option<PathBuf>,
}

fn shell(name: &str) -> Result<Shell, String> {
    match name {
        "bash" => Ok(Shell::Bash),
        "zsh" => Ok(Shell::Zsh),
        "fish" => Ok(Shell::Fish),
        _ => Err("bash, zsh or fish is needed".into()),
    }
}

fn number(text: &str, most: f64) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.0..=most).contains(&value) => Ok(value),
        _ => Err(format!("a number from 0 to {most} is needed")),
    }
}

fn share(text: &str) -> Result<f64, String> {
    number(text, 1.0)
}

fn think_time(text: &str) -> Result<f64, String> {
    number(text, 3600.0)
}

const HELP: &str = "\
The engine of lowlat. `lowlat COMMAND` hands over to it.

Usage: lowlat-engine COMMAND [OPTIONS]

Commands:
  replay           replay agent traces
  trace            look into traces, or make some
  inspect          show a graph record
  bench            measure the dispatcher
  make-checkpoint  write a built-in model as a checkpoint folder
  check-checkpoint check the headers of a checkpoint folder
  completion       print the completion of `lowlat` for a shell

lowlat-engine COMMAND --help tells more.
";

/// Runs a command with its arguments (the program's name first) and gives its exit code. `start`
/// makes the runner of a replay, `input` is standard input.
pub fn run(
    args: impl IntoIterator<Item = OsString>,
    start: &mut Start,
    input: &mut dyn Read,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> u8 {
    // What is left begins with the command's name, where a parser expects the program's.
    let words: Vec<OsString> = args.into_iter().skip(1).collect();
    let command = words
        .first()
        .map(|word| word.to_string_lossy().into_owned());
    match command.as_deref() {
        Some("replay") => cli::run(words, start, out, err),
        Some("trace") => run_trace(words, out, err),
        Some("inspect") => run_inspect(words, out, err),
        #[cfg(target_os = "linux")]
        Some("bench") => bench::run(words, out, err),
        Some("make-checkpoint") => make::run(words, out, err),
        Some("check-checkpoint") => check_checkpoint(words, out, err),
        Some("completion") => run_completion(words, input, out, err),
        Some("--help" | "-h" | "help") => {
            let _ = write!(out, "{HELP}");
            0
        }
        Some("--version" | "-V") => {
            let _ = writeln!(out, "lowlat-engine {}", env!("CARGO_PKG_VERSION"));
            0
        }
        other => {
            let seen = other.map_or("no command".into(), |word| format!("{word:?}"));
            let _ = writeln!(
                err,
                "lowlat-engine: error: {seen}; replay, trace, inspect, bench, \
                 make-checkpoint, check-checkpoint or completion is needed (see --help)"
            );
            USAGE
        }
    }
}

fn run_trace(words: Vec<OsString>, out: &mut dyn Write, err: &mut dyn Write) -> u8 {
    match parse::<TraceOptions>("lowlat trace", words, out, err) {
        Err(code) => code,
        Ok(options) => match options.command {
            TraceCommand::Info(options) => trace_info(&options, out, err),
            TraceCommand::Synth(options) => {
                finish("lowlat trace synth", trace_synth(&options), out, err)
            }
        },
    }
}

/// Says of every bad file what is wrong with it, and shows nothing then.
fn trace_info(options: &InfoOptions, out: &mut dyn Write, err: &mut dyn Write) -> u8 {
    const NAME: &str = "lowlat trace info";
    let mut traces: Vec<Trace> = Vec::new();
    let mut code = 0;
    for file in &options.files {
        match trace::read(file) {
            Ok(trace) => traces.push(trace),
            Err(error) => code = finish(NAME, Err(error), out, err),
        }
    }
    if code != 0 {
        return code;
    }
    let survey = trace_info::survey(&traces);
    let text = match options.json {
        true => survey.to_json(),
        false => survey.to_table(),
    };
    finish(NAME, Ok(text), out, err)
}

fn trace_synth(options: &SynthOptions) -> Result<String, EngineError> {
    let synth = Synth {
        sessions: options.sessions,
        requests: options.requests,
        input: options.input,
        output: options.output,
        prefix_sharing: options.prefix_sharing,
        system_tokens: u64::from(options.system_tokens),
        subagents: options.subagents,
        subagent_requests: options.subagent_requests,
        think_time_s: options.think_time,
        block_size: u64::from(options.block_size),
        seed: options.seed,
    };
    let paths: Vec<PathBuf> = (0..synth.sessions)
        .map(|number| options.out.join(format!("session-{number:04}.json")))
        .collect();
    let files = paths
        .iter()
        .map(|path| OutputFile::prepare(path))
        .collect::<Result<Vec<_>, _>>()?;
    let texts = trace_synth::synthesise(&synth)?;
    OutputFile::write_all(files.into_iter().zip(texts).collect())?;
    let lines: Vec<String> = paths
        .iter()
        .map(|path| format!("{}\n", path.display()))
        .collect();
    Ok(lines.concat())
}

/// What is in the folder, in words, or the line with which it would be refused.
fn check_checkpoint(words: Vec<OsString>, out: &mut dyn Write, err: &mut dyn Write) -> u8 {
    const NAME: &str = "lowlat check-checkpoint";
    match parse::<CheckCheckpointOptions>(NAME, words, out, err) {
        Err(code) => code,
        Ok(options) => {
            let text = Checkpoint::open(&options.folder).map(|checkpoint| checkpoint.summary());
            finish(NAME, text.map(|summary| summary + "\n"), out, err)
        }
    }
}

fn run_inspect(words: Vec<OsString>, out: &mut dyn Write, err: &mut dyn Write) -> u8 {
    const NAME: &str = "lowlat inspect";
    let options = match parse::<InspectOptions>(NAME, words, out, err) {
        Ok(options) => options,
        Err(code) => return code,
    };
    let Some(other) = &options.other else {
        let text = inspect::read(&options.file).map(|record| match options.json {
            true => format!("{}\n", record.to_json()),
            false => inspect::to_text(&record),
        });
        return finish(NAME, text, out, err);
    };
    let both = inspect::read(&options.file).and_then(|first| Ok((first, inspect::read(other)?)));
    let differences = match both {
        Ok((first, second)) => first.differences(&second),
        Err(error) => return finish(NAME, Err(error), out, err),
    };
    let text = if options.json {
        format!("{:#}\n", serde_json::json!({ "differences": differences }))
    } else if differences.is_empty() {
        "no difference: ranks could replay both together\n".to_owned()
    } else {
        let lines: Vec<String> = differences
            .iter()
            .map(|line| format!("{}\n", crate::words::visible(line)))
            .collect();
        lines.concat()
    };
    finish(NAME, Ok(text), out, err);
    u8::from(!differences.is_empty())
}

/// A command of `lowlat` that is not the engine's, as `lowlat completion` describes it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct OtherCommand {
    name: String,
    about: String,
    options: Vec<OtherOption>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct OtherOption {
    /// Without its dashes; of a positional, its place's name.
    name: String,
    about: String,
    /// `flag`, `value`, `file`, `folder` or `positional`.
    kind: String,
    /// What it may be, where that is known.
    choices: Vec<String>,
}

impl OtherCommand {
    fn to_command(&self) -> clap::Command {
        let options = self.options.iter().enumerate().map(|(place, option)| {
            let id = format!("{place}{}", option.name);
            let arg = clap::Arg::new(id).help(option.about.clone());
            let arg = match option.kind.as_str() {
                "flag" => arg
                    .long(option.name.clone())
                    .action(clap::ArgAction::SetTrue),
                "positional" => arg,
                _ => arg.long(option.name.clone()).num_args(1),
            };
            match option.kind.as_str() {
                "file" => arg.value_hint(ValueHint::FilePath),
                "folder" => arg.value_hint(ValueHint::DirPath),
                _ if option.choices.is_empty() => arg,
                _ => arg.value_parser(clap::builder::PossibleValuesParser::new(
                    option.choices.clone(),
                )),
            }
        });
        clap::Command::new(self.name.clone())
            .about(self.about.clone())
            .args(options)
    }
}

fn run_completion(
    words: Vec<OsString>,
    input: &mut dyn Read,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> u8 {
    const NAME: &str = "lowlat completion";
    let options = match parse::<CompletionOptions>(NAME, words, out, err) {
        Ok(options) => options,
        Err(code) => return code,
    };
    finish(NAME, completion(&options, input), out, err)
}

fn completion(options: &CompletionOptions, input: &mut dyn Read) -> Result<String, EngineError> {
    let others = match &options.commands {
        Some(path) => read_commands(path, input)?,
        None => Vec::new(),
    };
    let mut all = clap::Command::new("lowlat")
        .version(env!("CARGO_PKG_VERSION"))
        .subcommand(cli::command().name("replay"))
        .subcommand(TraceOptions::command())
        .subcommand(InspectOptions::command())
        .subcommand(make::command());
    for other in &others {
        all = all.subcommand(other.to_command());
    }
    let mut script = Vec::new();
    clap_complete::generate(options.shell, &mut all, "lowlat", &mut script);
    String::from_utf8(script).map_err(|_| EngineError::Bug("the completion is no text".into()))
}

fn read_commands(path: &Path, input: &mut dyn Read) -> Result<Vec<OtherCommand>, EngineError> {
    let refuse = |words: String| EngineError::Refused(format!("{}: {words}", path.display()));
    let mut text = String::new();
    let read = match path.as_os_str() == "-" {
        true => input.read_to_string(&mut text),
        false => fs::File::open(path).and_then(|mut file| file.read_to_string(&mut text)),
    };
    read.map_err(|error| refuse(format!("cannot be read: {error}")))?;
    serde_json::from_str(&text).map_err(|error| refuse(format!("is no list of commands: {error}")))
}

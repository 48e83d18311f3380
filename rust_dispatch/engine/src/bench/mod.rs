//! `lowlat bench dispatch`: what a decision and a vote cost, beside the way that engines take both
//! in Python today.

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use lowlat_core::DeadlineLadder;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::Serialize;

use crate::EngineError;
use crate::cli::{finish, parse};
use crate::report::{OutputFile, new_table};
use crate::words::{count, short};

pub mod count;
mod decision;
mod stats;
mod votes;

use stats::Stats;

/// No arm of the bench takes longer.
const BUDGET: Duration = Duration::from_secs(180);

/// What is aimed at, as the table says it.
const GOAL_DECISION_NS: f64 = 1_000.0;
const GOAL_VOTE_NS: f64 = 2_000.0;
const GOAL_RATIO: f64 = 50.0;

// One line: it stands in the list of the commands too.
const ABOUT: &str = "Time the dispatcher: a decision, and a vote of all ranks by transport";

const MORE: &str = "\
A decision says which captured graph runs a step, and whether its seals hold; a vote is on one step.
Beside them, in the same run, stands the way that engines take both in Python: a `plan` call, and
`all_gather_object` over gloo, where --python finds torch.

Examples:
  lowlat bench dispatch
  lowlat bench dispatch --ranks 2 --python ENVIRONMENT/bin/python --json dispatch.json

Each rank is pinned to a core, rank modulo cores; Python's are not, since a gloo rank has threads of
its own and would only lose by it. Ranks that share a core wait for each other.

Exit codes:
  0  done; an arm that this machine does not have says why
  1  refused; nothing was written
  2  the command line is wrong
  3  a fault: ranks did not agree or did not end";

#[derive(Debug, Parser)]
#[command(name = "bench", bin_name = "lowlat bench", max_term_width = 100)]
#[command(about = "Measure the dispatcher", arg_required_else_help = false)]
struct BenchOptions {
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Debug, Subcommand)]
enum BenchCommand {
    #[command(about = ABOUT, after_help = MORE, allow_negative_numbers = true)]
    Dispatch(DispatchOptions),
}

/// Who votes with whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
enum Transport {
    /// Threads of one process.
    Threads,
    /// Processes, through shared memory and futex.
    Processes,
    /// Python processes: a `plan` call, and all_gather_object over gloo.
    Python,
}

#[derive(Debug, Args)]
struct DispatchOptions {
    /// Ranks of the groups that are timed
    #[arg(
        long,
        value_name = "N,...",
        value_delimiter = ',',
        default_value = "2,4,8"
    )]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: Vec<u32>,

    /// Who votes: threads, processes, python
    #[arg(
        long,
        value_name = "NAME,...",
        value_delimiter = ',',
        hide_possible_values = true
    )]
    #[arg(default_value = "threads,processes,python")]
    transports: Vec<Transport>,

    /// Votes that are timed; over gloo a tenth of them
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(10..=10_000_000))]
    votes: u64,

    /// Decisions that are timed
    #[arg(long, value_name = "N", default_value_t = 200_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(100..=100_000_000))]
    decisions: u64,

    /// Python of the baseline
    #[arg(long, value_name = "FILE", default_value = "python3", value_hint = ValueHint::FilePath)]
    python: String,

    /// Write what was measured as JSON
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    json: Option<PathBuf>,

    /// One rank of a group of processes: NAME:RANK:SIZE:VOTES
    #[arg(long, hide = true)]
    as_rank: Option<String>,
}

/// Deadlines of the votes, far beyond what any takes.
fn ladder() -> DeadlineLadder {
    let second_ns = 1_000_000_000;
    let ladder = DeadlineLadder::new(second_ns, 30 * second_ns, 60 * second_ns, 120 * second_ns);
    ladder.expect("it ascends")
}

/// Cores that this process may use.
fn cores() -> Result<Vec<usize>, String> {
    let set = sched_getaffinity(None).map_err(|error| error.to_string())?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|&core| set.is_set(core))
        .collect())
}

/// Pins this thread to the core of `rank`.
fn pin(rank: u32) -> Result<(), String> {
    let cores = cores()?;
    let mut set = CpuSet::new();
    set.set(cores[rank as usize % cores.len()]);
    sched_setaffinity(None, &set).map_err(|error| format!("a thread cannot be pinned: {error}"))
}

#[derive(Debug, Serialize)]
struct Report {
    version: u32,
    cores: usize,
    /// Processes that wanted a core in the minute before, on the mean.
    load_before: Option<f64>,
    decisions: Vec<DecisionLine>,
    plan: Option<Stats>,
    votes: Vec<VoteLine>,
}

#[derive(Debug, Serialize)]
struct DecisionLine {
    ranks: u32,
    #[serde(flatten)]
    ns: Stats,
    allocations: Option<u64>,
    instructions: Option<f64>,
    why_no_instructions: Option<String>,
}

#[derive(Debug, Serialize)]
struct VoteLine {
    transport: Transport,
    ranks: u32,
    #[serde(flatten)]
    ns: Option<Stats>,
    /// Why it was not measured.
    why: Option<String>,
    /// How many times faster than over gloo, by the medians.
    below_gloo: Option<f64>,
}

/// Runs `lowlat bench` with its arguments (the command's name first) and gives its exit code.
pub(crate) fn run(words: Vec<OsString>, out: &mut dyn Write, err: &mut dyn Write) -> u8 {
    const NAME: &str = "lowlat bench dispatch";
    match parse::<BenchOptions>("lowlat bench", words, out, err) {
        Err(code) => code,
        Ok(options) => {
            let BenchCommand::Dispatch(options) = options.command;
            let result = match &options.as_rank {
                Some(spec) => be_rank(spec),
                None => dispatch(&options),
            };
            finish(NAME, result, out, err)
        }
    }
}

fn be_rank(spec: &str) -> Result<String, EngineError> {
    let parts: Vec<&str> = spec.split(':').collect();
    let number = |text: &str| text.parse::<u32>().ok();
    let parsed = match parts[..] {
        [name, rank, size, votes] => number(rank)
            .zip(number(size))
            .zip(number(votes))
            .map(|((rank, size), votes)| votes::be_rank(name, rank, size, u64::from(votes))),
        _ => None,
    };
    let ended = parsed.ok_or_else(|| {
        EngineError::Refused(format!(
            "--as-rank is {spec:?}; NAME:RANK:SIZE:VOTES is needed"
        ))
    })?;
    let stats = ended.map_err(EngineError::Fault)?;
    Ok(serde_json::to_string(&stats).expect("plain data") + "\n")
}

fn dispatch(options: &DispatchOptions) -> Result<String, EngineError> {
    let output = match &options.json {
        Some(path) => Some(OutputFile::prepare(path)?),
        None => None,
    };
    let mut report = Report {
        version: 1,
        cores: cores().map_err(EngineError::Fault)?.len(),
        load_before: load(),
        decisions: Vec::new(),
        plan: None,
        votes: Vec::new(),
    };
    for &ranks in &options.ranks {
        let cost = decision::measure(ranks, options.decisions)?;
        let (instructions, why) = match cost.instructions {
            Ok(count) => (Some(count), None),
            Err(why) => (None, Some(why)),
        };
        report.decisions.push(DecisionLine {
            ranks,
            ns: cost.ns,
            allocations: cost.allocations,
            instructions,
            why_no_instructions: why,
        });
        for &transport in &options.transports {
            report.measure(transport, ranks, options)?;
        }
        report.compare(ranks);
    }
    if let Some(output) = output {
        let json = serde_json::to_string_pretty(&report).expect("plain data");
        OutputFile::write_all(vec![(output, json + "\n")])?;
    }
    Ok(report.to_text())
}

fn load() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    text.split(' ').next()?.parse().ok()
}

impl Report {
    fn measure(
        &mut self,
        transport: Transport,
        ranks: u32,
        options: &DispatchOptions,
    ) -> Result<(), EngineError> {
        let (ns, why) = match transport {
            Transport::Threads => (Some(votes::threads(ranks, options.votes)), None),
            Transport::Processes => (Some(votes::processes(ranks, options.votes)), None),
            Transport::Python => {
                // A gloo vote takes as long as a thousand of ours.
                let votes = (options.votes / 10).max(10);
                match votes::baseline(&options.python, ranks, votes) {
                    Ok(baseline) => {
                        self.plan.get_or_insert(baseline.plan);
                        (baseline.gloo.map(Ok), baseline.why)
                    }
                    // Without a baseline the rest is measured all the same.
                    Err(why) => (None, Some(why)),
                }
            }
        };
        self.votes.push(VoteLine {
            transport,
            ranks,
            ns: ns.transpose().map_err(EngineError::Fault)?,
            why,
            below_gloo: None,
        });
        Ok(())
    }

    /// Puts the ratio to gloo beside the other transports of the same group.
    fn compare(&mut self, ranks: u32) {
        let same = |line: &&mut VoteLine| line.ranks == ranks;
        let mut gloo = None;
        for line in self.votes.iter_mut().filter(same) {
            if line.transport == Transport::Python {
                gloo = line.ns;
            }
        }
        for line in self.votes.iter_mut().filter(same) {
            if line.transport != Transport::Python {
                let pair = gloo.zip(line.ns);
                line.below_gloo = pair.map(|(gloo, ns)| gloo.ns_median / ns.ns_median);
            }
        }
    }

    fn to_text(&self) -> String {
        let mut decisions = new_table();
        decisions.set_header(vec![
            "a decision, of ranks",
            "median ns",
            "p99 ns",
            "instructions",
            "allocations in all",
        ]);
        for line in &self.decisions {
            decisions.add_row(vec![
                line.ranks.to_string(),
                short(line.ns.ns_median),
                short(line.ns.ns_p99),
                line.instructions.map_or("-".into(), short),
                line.allocations.map_or("-".into(), count),
            ]);
        }
        if let Some(plan) = self.plan {
            decisions.add_row(vec![
                "Python `plan`".into(),
                short(plan.ns_median),
                short(plan.ns_p99),
                "-".into(),
                "-".into(),
            ]);
        }
        let mut votes = new_table();
        votes.set_header(vec![
            "a vote by",
            "ranks",
            "median ns",
            "p99 ns",
            "below gloo",
        ]);
        for line in &self.votes {
            let name = match line.transport {
                Transport::Threads => "threads",
                Transport::Processes => "processes, shared memory",
                Transport::Python => "Python, gloo",
            };
            let ns = |of: fn(&Stats) -> f64| line.ns.as_ref().map_or("-".into(), |s| short(of(s)));
            votes.add_row(vec![
                name.to_owned(),
                line.ranks.to_string(),
                ns(|stats| stats.ns_median),
                ns(|stats| stats.ns_p99),
                line.below_gloo
                    .map_or("-".into(), |r| format!("{} x", short(r))),
            ]);
        }
        let load = self.load_before.map_or("unknown".into(), short);
        let mut text = format!(
            "{decisions}\n{votes}\n{} cores, load before {load}; ranks are pinned, Python's are \
             not; decisions are timed {} at a time\n",
            self.cores,
            decision::BATCH
        );
        for line in self.goals().into_iter().chain(self.whys()) {
            text.push_str(&line);
            text.push('\n');
        }
        text
    }

    fn goals(&self) -> Vec<String> {
        let mut lines = Vec::new();
        let mut say = |what: &str, met: bool| {
            let word = if met { "met" } else { "missed" };
            lines.push(format!("goal {word}: {what}"));
        };
        let slowest = self.decisions.iter().map(|line| line.ns.ns_median);
        if let Some(ns) = slowest.max_by(f64::total_cmp) {
            say("a decision in at most 1,000 ns", ns <= GOAL_DECISION_NS);
        }
        let two = self.votes.iter().find(|line| {
            line.ranks == 2 && line.transport == Transport::Processes && 2 <= self.cores
        });
        if let Some(ns) = two.and_then(|line| line.ns) {
            say(
                "a vote of 2 processes in at most 2,000 ns",
                ns.ns_median <= GOAL_VOTE_NS,
            );
        }
        if let Some(ratio) = two.and_then(|line| line.below_gloo) {
            say("at least 50 x below gloo", GOAL_RATIO <= ratio);
        }
        lines
    }

    /// What is not in the tables, and why.
    fn whys(&self) -> Vec<String> {
        let mut lines: Vec<String> = Vec::new();
        let mut say = |line: String| {
            if !lines.contains(&line) {
                lines.push(line);
            }
        };
        for line in &self.decisions {
            if let Some(why) = &line.why_no_instructions {
                say(format!("no instructions: {why}"));
            }
            if line.allocations.is_none() {
                say("no allocations: this program does not count them".into());
            }
        }
        for line in &self.votes {
            if let Some(why) = &line.why {
                say(format!(
                    "no gloo: {why} (--python FILE picks another Python)"
                ));
            }
        }
        lines
    }
}

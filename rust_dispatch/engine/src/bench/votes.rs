//! What one vote on a step costs, by transport: every rank votes on one step after the other, as
//! fast as its peers let it, and rank 0 takes the time.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use lowlat_core::vote::Decision;
use lowlat_core::{Board, InstantNs, TpRank};
use lowlat_host::{GroupSettings, join};
use serde::Deserialize;

use super::stats::Stats;
use super::{BUDGET, ladder, pin};

/// Votes before those that are timed.
pub(crate) const WARM_UP: u64 = 200;

const VOTE_BUDGET_NS: u64 = 20_000_000_000;

/// Votes and times `votes` of them; `agree` gives whether all ranks agreed on a step.
fn time(votes: u64, mut agree: impl FnMut(u64) -> Result<(), String>) -> Result<Stats, String> {
    let mut samples = Vec::with_capacity(votes as usize);
    for step in 0..WARM_UP + votes {
        let began_at = Instant::now();
        agree(step)?;
        if WARM_UP <= step {
            samples.push(began_at.elapsed().as_nanos() as f64);
        }
    }
    Ok(Stats::of(samples))
}

fn agreed(decision: Decision) -> Result<(), String> {
    match decision {
        Decision::Agreed => Ok(()),
        other => Err(format!("the ranks did not agree: {other:?}")),
    }
}

/// Ranks that are threads of this process.
pub(crate) fn threads(tp_size: u32, votes: u64) -> Result<Stats, String> {
    let board = Board::new(tp_size).map_err(|error| error.to_string())?;
    let began_at = Instant::now();
    let board = &board;
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..tp_size)
            .map(|rank| {
                scope.spawn(move || {
                    pin(rank)?;
                    let seat = board.seat(TpRank(rank));
                    let mut seat = seat.map_err(|error| error.to_string())?;
                    time(votes, |step| {
                        let now = || InstantNs(began_at.elapsed().as_nanos() as u64);
                        agreed(seat.agree_step(step, VOTE_BUDGET_NS, now))
                    })
                })
            })
            .collect();
        let mut ended = handles.into_iter().map(|handle| match handle.join() {
            Ok(ended) => ended,
            Err(_) => Err("a rank's thread ended badly".to_owned()),
        });
        let first = ended.next().expect("a group has a rank 0");
        ended.try_fold(first?, |first, other| other.map(|_| first))
    })
}

/// One rank that is this process, of [`processes`].
pub(crate) fn be_rank(name: &str, rank: u32, tp_size: u32, votes: u64) -> Result<Stats, String> {
    pin(rank)?;
    let settings = GroupSettings::new(name, TpRank(rank), tp_size, ladder());
    let mut seat = join(&settings, VOTE_BUDGET_NS).map_err(|error| error.to_string())?;
    time(votes, |step| {
        let ended = seat.agree_step(step, VOTE_BUDGET_NS);
        agreed(ended.map_err(|error| error.to_string())?)
    })
}

/// Children that are killed when they are not ended.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What the first of these commands prints, when all have ended well, in [`BUDGET`].
fn run_all(commands: impl Iterator<Item = Command>) -> Result<String, String> {
    let mut children = Children(Vec::new());
    for mut command in commands {
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command.stderr(Stdio::piped());
        let program = command.get_program().to_string_lossy().into_owned();
        let child = command.spawn();
        children
            .0
            .push(child.map_err(|error| format!("{program} does not start: {error}"))?);
    }
    let deadline = Instant::now() + BUDGET;
    for idx in 0..children.0.len() {
        loop {
            let ended = children.0[idx].try_wait();
            if let Some(status) = ended.map_err(|error| error.to_string())? {
                if status.success() {
                    break;
                }
                let mut words = String::new();
                if let Some(mut stderr) = children.0[idx].stderr.take() {
                    let _ = stderr.read_to_string(&mut words);
                }
                let last = words.lines().rfind(|line| !line.trim().is_empty());
                let last = last.unwrap_or("no word").trim().to_owned();
                return Err(format!("rank {idx} ended with {status}: {last}"));
            }
            if deadline < Instant::now() {
                return Err(format!("rank {idx} did not end in {} s", BUDGET.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    // A line or two, which fit in the pipe, so that nobody had to read while they ran.
    let mut text = String::new();
    if let Some(stdout) = &mut children.0[0].stdout {
        stdout
            .read_to_string(&mut text)
            .map_err(|error| error.to_string())?;
    }
    Ok(text)
}

fn parse<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|error| format!("rank 0 said {text:?}: {error}"))
}

/// Ranks that are processes and vote in shared memory; each is this program.
pub(crate) fn processes(tp_size: u32, votes: u64) -> Result<Stats, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let name = format!("bench-{}", std::process::id());
    let commands = (0..tp_size).map(|rank| {
        let mut command = Command::new(&program);
        let spec = format!("{name}:{rank}:{tp_size}:{votes}");
        command.args(["bench", "dispatch", "--as-rank", &spec]);
        command
    });
    parse(&run_all(commands)?)
}

/// What Python takes for the same.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Baseline {
    pub plan: Stats,
    /// `all_gather_object` over gloo.
    pub gloo: Option<Stats>,
    /// Why there is no such time.
    pub why: Option<String>,
}

/// The same decision and the same vote the way engines take them in Python today.
pub(crate) fn baseline(python: &str, tp_size: u32, votes: u64) -> Result<Baseline, String> {
    let folder = std::env::temp_dir().join(format!("lowlat-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let store = folder.join(format!("store-{tp_size}"));
    let commands = (0..tp_size).map(|rank| {
        let mut command = Command::new(python);
        command.args(["-c", include_str!("baseline.py")]);
        command.args([rank, tp_size].map(|number| number.to_string()));
        command.args([votes, WARM_UP].map(|number| number.to_string()));
        command.arg(&store);
        command
    });
    let ended = run_all(commands);
    let _ = std::fs::remove_dir_all(&folder);
    parse(&ended?)
}

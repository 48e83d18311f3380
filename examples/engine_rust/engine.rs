//! An engine in miniature whose ranks are threads: they vote on a board, record what they captured,
//! replay it, and go on when one of them dies. docs/embedding.md walks through it.
//!
//! ```text
//! engine-rust [--ranks N] [--steps N] [--kill STEP]
//! ```
//!
//! `--kill STEP`: the last rank's thread ends there, once, without a word to its peers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use lowlat_core::graph_key::{GraphKey, GraphMode, KeyIdx, Path, Record, Recorder, SealView};
use lowlat_core::vote::{Ballot, BallotParts, Board, Decision as Vote};
use lowlat_core::{
    DeadlineLadder, Decision, DispatchReport, Dispatcher, Facts, InstantNs, Reason, Requirements,
    Seat, Servable, StepFacts, StepMode, TpRank, guard,
};

// [budgets] How long each wait may take, each shorter than the next.
const SECOND_NS: u64 = 1_000_000_000;
/// For a peer that is busy, not dead.
const VOTE_NS: u64 = 5 * SECOND_NS;

fn ladder() -> DeadlineLadder {
    DeadlineLadder::new(SECOND_NS, 6 * SECOND_NS, 40 * SECOND_NS, 120 * SECOND_NS)
        .expect("each is shorter than the next")
}
// [budgets]

/// Batch sizes that are captured.
const WIDTHS: [u32; 3] = [1, 2, 4];
const MAX_BATCH: usize = 8;

#[derive(Clone, Copy)]
struct Options {
    num_ranks: u32,
    num_steps: u32,
    kill_at: Option<u32>,
}

/// The model: one multiplication a request, by this rank's own weight.
fn forward(rank: TpRank, input: f32) -> f32 {
    (rank.0 + 1) as f32 * input
}

fn input(step: u32, request: u32) -> f32 {
    (step * 10 + request) as f32
}

/// Why a rank stopped.
enum Stopped {
    /// All steps ran.
    Done(DispatchReport),
    /// A peer was missing at this step, in these words.
    PeerLost(u32, String),
    /// The rank itself died.
    Died,
}

struct Rank {
    tp_rank: TpRank,
    options: Options,
    seat: Seat,
    record: Record,
    dispatcher: Dispatcher,
    inputs: Box<[f32; MAX_BATCH]>,
    clock: Instant,
}

/// What a graph of `inputs` reads, as it lies now.
fn sealed(inputs: &[f32; MAX_BATCH]) -> SealView<'_> {
    SealView {
        name: "inputs",
        address: inputs.as_ptr().addr() as u64,
        shape: &[MAX_BATCH as i64],
        dtype: "float32",
    }
}

// [guard] May our kernels run here at all? Every reason against it comes at once.
fn may_serve(options: Options) -> Result<Servable, String> {
    let mut needs = Requirements::new("engine_rust", &["cpu"]);
    needs.tp_sizes = vec![1, 2, 3, 4];
    let facts = Facts {
        isa: "cpu".into(),
        tp_size: options.num_ranks,
        ..Facts::default()
    };
    guard(&facts, &needs).map_err(|declines| {
        let lines: Vec<String> = declines.iter().map(ToString::to_string).collect();
        lines.join("; ")
    })
}
// [guard]

// [capture] One graph a batch size, and a note of what each will read when it is replayed.
fn capture(inputs: &[f32; MAX_BATCH]) -> Record {
    let mut recorder = Recorder::new();
    for batch_size in WIDTHS {
        let key = GraphKey {
            mode: GraphMode::Decode,
            batch_size,
            tokens_per_request: 1,
            width: batch_size,
            shape: "mini".into(),
            isa: "cpu".into(),
            numerics_digest: 1,
            layout_digest: 2,
        };
        let noted = recorder.note(key, Path::Fused, &[sealed(inputs)]);
        noted.expect("a key is noted once");
    }
    recorder.finish()
}
// [capture]

impl Rank {
    // [form] All ranks or none: they agree by value on what they cover.
    fn form(options: Options, mut seat: Seat, servable: &Servable) -> Result<Self, String> {
        let inputs = Box::new([0.0; MAX_BATCH]);
        let record = capture(&inputs);
        let parts = BallotParts {
            widths: &WIDTHS,
            keys_digest: record.keys_digest(),
            geometry_digest: 0,
            catalogue_digest: 0,
            ladder: ladder(),
        };
        let tp_rank = seat.tp_rank();
        let ballot = Ballot::new(servable, tp_rank, parts).map_err(|error| error.to_string())?;
        let clock = Instant::now();
        let coverage = seat
            .agree(&ballot, VOTE_NS, || now(clock))
            .map_err(|refusal| refusal.to_string())?;
        let dispatcher = Dispatcher::new(&coverage, record.clone());
        Ok(Self {
            tp_rank,
            options,
            seat,
            record,
            dispatcher: dispatcher.map_err(|error| error.to_string())?,
            inputs,
            clock,
        })
    }
    // [form]

    // [serve] Step after step: decide, agree, replay.
    fn serve(&mut self, from: u32, results: &Results, died: &AtomicBool) -> Stopped {
        for step in from..self.options.num_steps {
            let last = self.tp_rank.0 + 1 == self.options.num_ranks;
            let dies = self.options.kill_at == Some(step) && last;
            if dies && !died.swap(true, Ordering::Relaxed) {
                return Stopped::Died;
            }
            let batch = 1 + step % 5;
            let facts = match step % 10 {
                9 => StepFacts::uniform(StepMode::Extend, batch, 0),
                _ => StepFacts::uniform(StepMode::Decode, batch, 1),
            };
            let decision = self.dispatcher.decide(&facts);
            let clock = self.clock;
            let vote = self.seat.agree_step(facts.digest(), VOTE_NS, || now(clock));
            match vote {
                Vote::Agreed => self.run_step(step, batch, decision, results),
                // Ranks are about to run different steps: each runs its own forward.
                Vote::Differs { .. } | Vote::Declines { .. } => {
                    self.run_step(step, batch, Decision::Plain(Reason::VoteStep), results);
                }
                Vote::Missing { .. } => {
                    self.dispatcher.disarm(Reason::RankMissing);
                    let words = self.seat.step_refusal(vote).to_string();
                    return Stopped::PeerLost(step, words);
                }
            }
        }
        Stopped::Done(self.dispatcher.report())
    }

    fn run_step(&mut self, step: u32, batch: u32, decision: Decision, results: &Results) {
        for request in 0..batch {
            self.inputs[request as usize] = input(step, request);
        }
        let padded = match decision {
            Decision::Replay { key, padded_batch } => self.replay(key, padded_batch),
            Decision::Plain(_) => (0..batch)
                .map(|idx| forward(self.tp_rank, input(step, idx)))
                .collect(),
        };
        let place = (step * self.options.num_ranks + self.tp_rank.0) as usize;
        results.lock().expect("no rank panics")[place] = padded[..batch as usize].to_vec();
    }

    /// A "graph": it reads what it was captured with, at its own batch size.
    fn replay(&self, key: KeyIdx, padded_batch: u32) -> Vec<f32> {
        let unchanged = self.record.check_seals(key, [sealed(&self.inputs)]);
        unchanged.expect("the inputs never move");
        let inputs = &self.inputs[..padded_batch as usize];
        inputs
            .iter()
            .map(|input| forward(self.tp_rank, *input))
            .collect()
    }
    // [serve]
}

/// What each rank gave at each step.
type Results = Mutex<Vec<Vec<f32>>>;

fn now(clock: Instant) -> InstantNs {
    InstantNs(clock.elapsed().as_nanos() as u64)
}

type Ended = Result<Vec<Stopped>, String>;

/// One group from step `from` on; how each rank ended, in rank order.
fn run_group(options: Options, from: u32, results: &Results, died: &AtomicBool) -> Ended {
    let servable = may_serve(options)?;
    let board: Arc<Board> = Board::new(options.num_ranks).map_err(|error| error.to_string())?;
    std::thread::scope(|scope| {
        let start = |rank| {
            let seat = board.seat(TpRank(rank)).expect("each rank asks once");
            let servable = &servable;
            scope.spawn(move || {
                Rank::form(options, seat, servable).map(|mut rank| rank.serve(from, results, died))
            })
        };
        let ranks: Vec<_> = (0..options.num_ranks).map(start).collect();
        let ended = ranks.into_iter().map(|rank| rank.join());
        ended.map(|rank| rank.expect("no rank panics")).collect()
    })
}

fn options() -> Result<Options, String> {
    let mut options = Options {
        num_ranks: 2,
        num_steps: 40,
        kill_at: None,
    };
    let words: Vec<String> = std::env::args().skip(1).collect();
    for pair in words.chunks(2) {
        let number = pair.get(1).and_then(|word| word.parse().ok());
        let number = number.ok_or_else(|| format!("{} needs a number", pair[0]))?;
        match pair[0].as_str() {
            "--ranks" => options.num_ranks = number,
            "--steps" => options.num_steps = number,
            "--kill" => options.kill_at = Some(number),
            other => return Err(format!("{other} is no option")),
        }
    }
    Ok(options)
}

// [supervise] After a fault every rank starts again at the step that nobody ran, in a fresh group.
fn run(options: Options) -> Result<(), String> {
    let results = Mutex::new(vec![
        Vec::new();
        (options.num_steps * options.num_ranks) as usize
    ]);
    let (mut from, died) = (0, AtomicBool::new(false));
    loop {
        let ended = run_group(options, from, &results, &died)?;
        let next = from;
        for (rank, stopped) in ended.into_iter().enumerate() {
            match stopped {
                Stopped::Done(report) => println!(
                    "rank {rank}: {} steps by graphs, {} by its own forward in its last group",
                    report.covered, report.uncovered
                ),
                Stopped::PeerLost(step, words) => {
                    println!("rank {rank} saw at step {step}: {words}");
                    from = step;
                }
                Stopped::Died => println!("rank {rank} died"),
            }
        }
        if from == next {
            break;
        }
    }
    // [supervise]
    let results = results.into_inner().expect("no rank panics");
    for (place, out) in (0..).zip(&results) {
        let (step, rank) = (place / options.num_ranks, TpRank(place % options.num_ranks));
        let right = (0..1 + step % 5).map(|request| forward(rank, input(step, request)));
        if !right.eq(out.iter().copied()) {
            return Err(format!("step {step} of {rank} is wrong: {out:?}"));
        }
    }
    println!("{} steps, every result right", options.num_steps);
    Ok(())
}

fn main() -> Result<(), String> {
    options().and_then(run)
}

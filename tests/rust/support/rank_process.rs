//! Ranks that are processes: the test's own program, started again to be one.
//!
//! A test file that uses this has a test `rank_process` which calls [`be_one_if_asked`]; started
//! with [`SPEC`] in its environment it is a rank and says on its output what it sees, a line each.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use lowlat_core::vote::Decision;
use lowlat_core::{DeadlineLadder, TpRank};
use lowlat_host::{GroupSettings, join};

/// What the rank is: name, number, size, budget of joining and of a vote in ms, a seed.
pub const SPEC: &str = "LOWLAT_TEST_RANK";

/// No answer of a process takes longer, however loaded the machine is.
pub const PATIENCE: Duration = Duration::from_secs(60);

const MS: u64 = 1_000_000;

/// Deadlines that bound nothing which a test does.
pub fn ladder() -> DeadlineLadder {
    DeadlineLadder::new(MS, 30_000 * MS, 60_000 * MS, 120_000 * MS).unwrap()
}

/// SplitMix64: small, and good enough to draw schedules.
pub struct Draw(pub u64);

impl Draw {
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

/// A rank as a process of its own; killed when dropped.
pub struct RankProcess {
    pub child: Child,
    lines: Receiver<String>,
}

impl RankProcess {
    pub fn spawn(
        name: &str,
        rank: u32,
        tp_size: u32,
        join_ms: u64,
        vote_ms: u64,
        seed: u64,
    ) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let spec = format!("{name} {rank} {tp_size} {join_ms} {vote_ms} {seed}");
        command
            .args(["--exact", "rank_process", "--nocapture", "--test-threads=1"])
            .env(SPEC, spec);
        Self::of(command)
    }

    /// Any command whose lines are of interest.
    pub fn of(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            // Only our own: the test harness talks too.
            let lines = stdout.lines().map_while(Result::ok);
            for line in lines.filter_map(|line| Some(line.split_once("rank> ")?.1.to_owned())) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self { child, lines }
    }

    /// The next line; `None` when it ended without one.
    ///
    /// # Panics
    /// When neither happens in [`PATIENCE`].
    pub fn line(&self) -> Option<String> {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => {
                panic!("process {} said nothing for {PATIENCE:?}", self.child.id())
            }
        }
    }

    /// Kills it, and comes back when nothing is left of it.
    pub fn end(self) {
        drop(self);
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        // Not yet waited for, so the number is its own; it may have ended.
        let _ = rustix::process::kill_process(pid, signal);
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One line to the test.
pub fn say(words: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "rank> {words}");
    let _ = out.flush();
}

/// Joins, votes until a vote does not agree, and leaves: "joined", then "ended DECISION after N
/// agreed, T us over its budget", or "refused NUMBER WORDS".
pub fn be_one_if_asked() {
    let Ok(spec) = std::env::var(SPEC) else {
        return;
    };
    let mut words = spec.split(' ');
    let name = words.next().unwrap();
    let numbers: Vec<u64> = words.map(|word| word.parse().unwrap()).collect();
    let [rank, tp_size, join_ms, vote_ms, seed] = numbers[..] else {
        panic!("{SPEC} is {spec:?}");
    };
    let settings = GroupSettings::new(name, TpRank(rank as u32), tp_size as u32, ladder());
    let mut seat = match join(&settings, join_ms * MS) {
        Ok(seat) => seat,
        Err(error) => {
            let number = error.reason().map_or(0, |reason| reason.number());
            return say(&format!("refused {number} {error}"));
        }
    };
    say("joined");
    let mut draw = Draw(seed);
    let mut agreed = 0;
    let (decision, over_us) = loop {
        // Mostly the next step at once, sometimes some work before it.
        if draw.below(8) == 0 {
            std::thread::sleep(Duration::from_micros(draw.below(2_000)));
        }
        let began_at = seat.now();
        match seat.agree_step(agreed, vote_ms * MS).unwrap() {
            Decision::Agreed => agreed += 1,
            decision => {
                let took_ns = seat.now().since(began_at);
                break (decision, took_ns.saturating_sub(vote_ms * MS) / 1_000);
            }
        }
    };
    drop(seat);
    say(&format!(
        "ended {decision:?} after {agreed} agreed, {over_us} us over its budget"
    ));
}

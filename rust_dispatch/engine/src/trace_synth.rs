//! Traces out of a few parameters and a seed: `lowlat trace synth`.
//!
//! A session depends on the seed and its own number alone, so that asking for more sessions
//! leaves the first ones as they were. The draws are SplitMix64's and the distributions plain
//! formulas: equal parameters give equal bytes, whatever the version.

use std::f64::consts::TAU;
use std::fmt;
use std::str::FromStr;

use serde_json::json;

use crate::EngineError;
use crate::tokens::mix;
use crate::trace::MAX_SECONDS;

/// Largest prompt and answer, tokens.
pub const MAX_TOKENS: u64 = 1 << 20;
/// Hash ids of all files together: what 100 megabytes of text hold.
pub const MAX_BLOCKS: u64 = 10_000_000;
/// What a request takes in a file beside its ids, in ids.
const REQUEST_COST: u64 = 10;
/// Seconds that an answer takes in the trace, and more a token of it.
const ANSWER_S: f64 = 0.5;
const ANSWER_S_PER_TOKEN: f64 = 0.02;

/// How a count is drawn; never below 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Spread {
    /// Always the same.
    Fixed(u64),
    /// Any from the first to the second, alike.
    Uniform(u64, u64),
    /// Log-normal: half are below the median; `sigma` is that of the logarithm.
    LogNormal {
        /// Half are below it.
        median: f64,
        /// Spread of the logarithm.
        sigma: f64,
    },
}

impl FromStr for Spread {
    type Err = String;

    /// ```
    /// use lowlat_engine::trace_synth::Spread;
    /// assert_eq!("512".parse(), Ok(Spread::Fixed(512)));
    /// assert_eq!("100..900".parse(), Ok(Spread::Uniform(100, 900)));
    /// let wide = Spread::LogNormal { median: 800.0, sigma: 0.7 };
    /// assert_eq!("lognormal:800,0.7".parse(), Ok(wide));
    /// assert!("900..100".parse::<Spread>().is_err() && "0".parse::<Spread>().is_err());
    /// ```
    fn from_str(text: &str) -> Result<Self, String> {
        let needed = || {
            format!(
                "N, LOW..HIGH or lognormal:MEDIAN,SIGMA is needed, numbers from 1 to {MAX_TOKENS}, \
                 SIGMA from 0 to 4"
            )
        };
        let count = |text: &str| {
            let count = text.parse::<u64>().ok();
            count.filter(|count| (1..=MAX_TOKENS).contains(count))
        };
        let spread = if let Some(rest) = text.strip_prefix("lognormal:") {
            rest.split_once(',').and_then(|(median, sigma)| {
                let sigma = sigma.parse::<f64>().ok();
                Some(Self::LogNormal {
                    median: count(median)? as f64,
                    sigma: sigma.filter(|sigma| (0.0..=4.0).contains(sigma))?,
                })
            })
        } else if let Some((low, high)) = text.split_once("..") {
            let both = count(low)
                .zip(count(high))
                .filter(|(low, high)| low <= high);
            both.map(|(low, high)| Self::Uniform(low, high))
        } else {
            count(text).map(Self::Fixed)
        };
        spread.ok_or_else(needed)
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(count) => write!(f, "{count}"),
            Self::Uniform(low, high) => write!(f, "{low}..{high}"),
            Self::LogNormal { median, sigma } => write!(f, "lognormal:{median},{sigma}"),
        }
    }
}

/// What to make.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Synth {
    /// Files.
    pub sessions: u32,
    /// Requests of a session's own agent.
    pub requests: Spread,
    /// Prompt tokens of a request.
    pub input: Spread,
    /// Tokens that a request generates.
    pub output: Spread,
    /// Share of a prompt that repeats the start of the agent's prompt before, 0 to 1.
    pub prefix_sharing: f64,
    /// First tokens of every prompt of all sessions and subagents.
    pub system_tokens: u64,
    /// Subagents of a session.
    pub subagents: u32,
    /// Requests of a subagent.
    pub subagent_requests: Spread,
    /// Mean seconds between an answer and the next request.
    pub think_time_s: f64,
    /// Tokens that a hash id stands for.
    pub block_size: u64,
    /// Of every draw.
    pub seed: u64,
}

/// The files' texts, one a session.
///
/// # Errors
/// [`EngineError::Refused`] when they would hold more than [`MAX_BLOCKS`] hash ids.
pub fn synthesise(synth: &Synth) -> Result<Vec<String>, EngineError> {
    let mut blocks_left = MAX_BLOCKS;
    (0..synth.sessions)
        .map(|number| {
            let mut session = Session {
                synth,
                draws: Draws::new(synth.seed, number),
                // Ids of other sessions are other numbers, below what a double holds exactly.
                next_id: (i64::from(number) + 1) << 32,
                blocks_left,
                sums: (0, 0),
            };
            let text = session.text(number)?;
            blocks_left = session.blocks_left;
            Ok(text)
        })
        .collect()
}

struct Draws {
    state: u64,
}

impl Draws {
    fn new(seed: u64, session: u32) -> Self {
        Self {
            state: mix(seed ^ mix(u64::from(session))),
        }
    }

    /// Above 0 and below 1.
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        ((mix(self.state) >> 12) as f64 + 0.5) / (1u64 << 52) as f64
    }

    /// From 0, below `count`.
    fn below(&mut self, count: u64) -> u64 {
        ((self.uniform() * count as f64) as u64).min(count - 1)
    }

    fn count(&mut self, spread: Spread) -> u64 {
        match spread {
            Spread::Fixed(count) => count,
            Spread::Uniform(low, high) => low + self.below(high - low + 1),
            Spread::LogNormal { median, sigma } => {
                let radius = (-2.0 * self.uniform().ln()).sqrt();
                let normal = radius * (TAU * self.uniform()).cos();
                let value = (median * (sigma * normal).exp()).round();
                (value as u64).clamp(1, MAX_TOKENS)
            }
        }
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * self.uniform().ln()
    }
}

struct Session<'a> {
    synth: &'a Synth,
    draws: Draws,
    next_id: i64,
    blocks_left: u64,
    /// Prompt and output tokens so far.
    sums: (u64, u64),
}

impl Session<'_> {
    fn text(&mut self, number: u32) -> Result<String, EngineError> {
        let num_requests = self.draws.count(self.synth.requests);
        // After which of the agent's requests each subagent starts.
        let mut starts: Vec<u64> = (0..self.synth.subagents)
            .map(|_| self.draws.below(num_requests))
            .collect();
        starts.sort_unstable();
        let mut context = self.system();
        let mut entries = Vec::new();
        let mut now_s = 0.0;
        for place in 0..num_requests {
            let think_s = if place == 0 { 0.0 } else { self.think() };
            now_s += think_s;
            let (request, answer_s) = self.request(now_s, think_s, &mut context)?;
            entries.push(request);
            now_s += answer_s;
            let mut ends_s = now_s;
            for _ in starts.iter().filter(|&&start| start == place) {
                let (subagent, duration_s) = self.subagent(now_s)?;
                entries.push(subagent);
                ends_s = f64::max(ends_s, now_s + duration_s);
            }
            now_s = milliseconds(ends_s);
        }
        let scope = if self.synth.system_tokens > 0 {
            "global"
        } else {
            "local"
        };
        let head = [
            (
                "id",
                json!(format!("synth-{}-{number:04}", self.synth.seed)),
            ),
            ("block_size", json!(self.synth.block_size)),
            ("hash_id_scope", json!(scope)),
            ("system_tokens", json!(self.synth.system_tokens)),
            (
                "totals",
                json!({"combined_tokens": {"input": self.sums.0, "output": self.sums.1}}),
            ),
        ];
        let head: Vec<String> = head
            .iter()
            .map(|(name, value)| format!("\"{name}\": {value}"))
            .collect();
        Ok(format!(
            "{{{}, \"requests\": [\n{}\n]}}\n",
            head.join(", "),
            entries.join(",\n")
        ))
    }

    fn system(&self) -> Vec<i64> {
        (1..=(self.synth.system_tokens / self.synth.block_size) as i64).collect()
    }

    fn think(&mut self) -> f64 {
        milliseconds(self.draws.exponential(self.synth.think_time_s))
    }

    /// A request at `t`, and how long its answer takes. Its prompt becomes `context`.
    fn request(
        &mut self,
        t: f64,
        think_s: f64,
        context: &mut Vec<i64>,
    ) -> Result<(String, f64), EngineError> {
        let (input, output) = (
            self.draws.count(self.synth.input),
            self.draws.count(self.synth.output),
        );
        self.sums.0 += input;
        self.sums.1 += output;
        let num_blocks = input / self.synth.block_size;
        let cost = num_blocks + REQUEST_COST;
        self.blocks_left = self.blocks_left.checked_sub(cost).ok_or_else(|| {
            EngineError::Refused(format!(
                "the traces would be larger than {MAX_BLOCKS} hash ids; fewer or shorter requests, \
                 or a larger --block-size, are needed"
            ))
        })?;
        if t > MAX_SECONDS {
            return Err(EngineError::Refused(format!(
                "a session would last more than {MAX_SECONDS:.0} s, which no reader of traces \
                 takes; fewer --requests or less --think-time are needed"
            )));
        }
        let system = self.synth.system_tokens / self.synth.block_size;
        let shared = (self.synth.prefix_sharing * num_blocks as f64).round() as u64;
        let shared = shared.max(system).min(num_blocks) as usize;
        context.truncate(shared);
        while context.len() < num_blocks as usize {
            context.push(self.next_id);
            self.next_id += 1;
        }
        let answer_s = milliseconds(ANSWER_S + ANSWER_S_PER_TOKEN * output as f64);
        // As text at once: a tree of the ids would take several times the memory.
        let ids: Vec<String> = context.iter().map(i64::to_string).collect();
        let t = milliseconds(t);
        let request = format!(r#"{{"t": {t}, "type": "s", "in": {input}, "out": {output}, "#)
            + &format!(
                r#""think_time": {think_s}, "api_time": {answer_s}, "hash_ids": [{}]}}"#,
                ids.join(", ")
            );
        Ok((request, answer_s))
    }

    /// A subagent that starts at `t`, and how long it takes.
    fn subagent(&mut self, t: f64) -> Result<(String, f64), EngineError> {
        let mut context = self.system();
        let mut requests = Vec::new();
        let mut now_s = 0.0;
        for place in 0..self.draws.count(self.synth.subagent_requests) {
            let think_s = if place == 0 { 0.0 } else { self.think() };
            now_s += think_s;
            let (request, answer_s) = self.request(now_s, think_s, &mut context)?;
            requests.push(request);
            now_s = milliseconds(now_s + answer_s);
        }
        let subagent = format!(
            "{{\"t\": {}, \"type\": \"subagent\", \"duration_ms\": {}, \"requests\": [\n  {}]}}",
            milliseconds(t),
            (now_s * 1e3).round() as u64,
            requests.join(",\n  ")
        );
        Ok((subagent, now_s))
    }
}

fn milliseconds(seconds: f64) -> f64 {
    (seconds * 1e3).round() / 1e3
}

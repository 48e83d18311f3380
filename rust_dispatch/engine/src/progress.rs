//! Shows how far a replay has come, once it has lasted over a second.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Shorter replays show nothing.
const QUIET: Duration = Duration::from_secs(1);
/// Between two lines where stderr is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// A bar on a terminal; a line now and then where stderr is a file.
#[derive(Debug)]
pub struct ProgressMeter {
    count: Count,
    began_at: Instant,
    is_terminal: bool,
    bar: Option<ProgressBar>,
}

impl ProgressMeter {
    /// Nothing done yet of `total_tokens`.
    #[must_use]
    pub fn new(total_tokens: u64) -> Self {
        Self {
            count: Count::new(total_tokens),
            began_at: Instant::now(),
            is_terminal: std::io::stderr().is_terminal(),
            bar: None,
        }
    }

    /// Adds `tokens` of prompts and outputs.
    pub fn add(&mut self, tokens: u64) {
        self.count.done_tokens += tokens;
        let elapsed = self.began_at.elapsed();
        if elapsed < QUIET {
            return;
        }
        if self.is_terminal {
            let total_tokens = self.count.total_tokens;
            let bar = self.bar.get_or_insert_with(|| {
                let style =
                    "{elapsed_precise} {bar:40} {human_pos} of {human_len} tokens, {eta} left";
                let style = ProgressStyle::with_template(style);
                ProgressBar::new(total_tokens)
                    .with_style(style.expect("the template is fixed and right"))
                    .with_elapsed(elapsed)
            });
            bar.set_position(self.count.done_tokens);
        } else if let Some(line) = self.count.line(elapsed) {
            // A closed stderr is no reason to stop a replay.
            let _ = writeln!(std::io::stderr(), "{line}");
        }
    }

    /// Takes the bar away.
    pub fn finish(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Tokens done, and when that was last told.
#[derive(Debug)]
struct Count {
    total_tokens: u64,
    done_tokens: u64,
    next_line: Duration,
}

impl Count {
    fn new(total_tokens: u64) -> Self {
        Self {
            total_tokens,
            done_tokens: 0,
            next_line: LINE_EVERY,
        }
    }

    /// The line that is due after `elapsed`, if one is.
    fn line(&mut self, elapsed: Duration) -> Option<String> {
        if elapsed < self.next_line {
            return None;
        }
        self.next_line = elapsed + LINE_EVERY;
        Some(format!(
            "{} s: {} of {} tokens",
            elapsed.as_secs(),
            self.done_tokens,
            self.total_tokens
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_told_every_ten_seconds() {
        let mut count = Count::new(500);
        let mut line = |done_tokens, seconds| {
            count.done_tokens = done_tokens;
            count.line(Duration::from_secs(seconds))
        };
        assert_eq!(line(10, 9), None);
        assert_eq!(line(20, 12).as_deref(), Some("12 s: 20 of 500 tokens"));
        assert_eq!(line(30, 21), None);
        assert_eq!(line(40, 22).as_deref(), Some("22 s: 40 of 500 tokens"));
    }
}

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
    total_tokens: u64,
    done_tokens: u64,
    began_at: Instant,
    is_terminal: bool,
    bar: Option<ProgressBar>,
    last_line_at: Instant,
}

impl ProgressMeter {
    /// Nothing done yet of `total_tokens`.
    #[must_use]
    pub fn new(total_tokens: u64) -> Self {
        let now = Instant::now();
        Self {
            total_tokens,
            done_tokens: 0,
            began_at: now,
            is_terminal: std::io::stderr().is_terminal(),
            bar: None,
            last_line_at: now,
        }
    }

    /// Adds `tokens` of prompts and outputs.
    pub fn add(&mut self, tokens: u64) {
        self.done_tokens += tokens;
        if self.began_at.elapsed() < QUIET {
            return;
        }
        if self.is_terminal {
            let total_tokens = self.total_tokens;
            let bar = self.bar.get_or_insert_with(|| {
                let style =
                    "{elapsed_precise} {bar:40} {human_pos} of {human_len} tokens, {eta} left";
                ProgressBar::new(total_tokens).with_style(
                    ProgressStyle::with_template(style).expect("the template is fixed and right"),
                )
            });
            bar.set_position(self.done_tokens);
        } else if self.last_line_at.elapsed() >= LINE_EVERY {
            self.last_line_at = Instant::now();
            let seconds = self.began_at.elapsed().as_secs();
            // A closed stderr is no reason to stop a replay.
            let _ = writeln!(
                std::io::stderr(),
                "{seconds} s: {} of {} tokens",
                self.done_tokens,
                self.total_tokens
            );
        }
    }

    /// Takes the bar away.
    pub fn finish(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}

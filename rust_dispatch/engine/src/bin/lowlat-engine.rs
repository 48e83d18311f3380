//! The engine as a program: `lowlat replay` and the commands beside it.

use std::panic;
use std::process::ExitCode;

use lowlat_engine::runtime::Runtime;
use lowlat_engine::step::RuntimeSettings;
use lowlat_engine::{EngineError, commands};

/// So that `lowlat bench dispatch` can say how often a decision allocates.
#[cfg(target_os = "linux")]
#[global_allocator]
static ALLOCATOR: lowlat_engine::bench::count::Counting = lowlat_engine::bench::count::Counting;

fn main() -> ExitCode {
    // A broken rule of ours is one line and exit code 3 like any fault, never a trace of calls.
    panic::set_hook(Box::new(|info| {
        let words = info
            .to_string()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ");
        eprintln!("lowlat: fault: {}", EngineError::Bug(words));
    }));
    let code = panic::catch_unwind(|| {
        commands::run(
            std::env::args_os(),
            &mut |settings: &RuntimeSettings| Ok(Box::new(Runtime::start(settings)?)),
            &mut std::io::stdin(),
            &mut std::io::stdout(),
            &mut std::io::stderr(),
        )
    });
    ExitCode::from(code.unwrap_or(EngineError::Bug(String::new()).exit_code()))
}

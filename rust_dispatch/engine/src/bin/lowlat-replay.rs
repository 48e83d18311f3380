//! `lowlat replay`: the engine on the kernels, as a program.

use std::panic;
use std::process::ExitCode;

use lowlat_engine::checkpoint::make;
use lowlat_engine::runtime::Runtime;
use lowlat_engine::step::RuntimeSettings;
use lowlat_engine::{EngineError, cli};

fn main() -> ExitCode {
    // A broken rule of ours is one line and exit code 3 like any fault, never a trace of calls.
    panic::set_hook(Box::new(|info| {
        let words = info
            .to_string()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ");
        eprintln!("lowlat replay: fault: {}", EngineError::Bug(words));
    }));
    let code = panic::catch_unwind(|| {
        let args: Vec<_> = std::env::args_os().collect();
        if args.get(1).is_some_and(|word| word == "make-checkpoint") {
            let words = args.into_iter().skip(1);
            return make::run(words, &mut std::io::stdout(), &mut std::io::stderr());
        }
        cli::run(
            args,
            &mut |settings: &RuntimeSettings| Ok(Box::new(Runtime::start(settings)?)),
            &mut std::io::stdout(),
            &mut std::io::stderr(),
        )
    });
    ExitCode::from(code.unwrap_or(EngineError::Bug(String::new()).exit_code()))
}

//! A small serving engine that embeds lowlat-core and calls the kernels by their C ABI.
#![deny(missing_docs)]

#[cfg(target_os = "linux")]
pub mod bench;
pub mod cache;
pub mod checkpoint;
pub mod cli;
pub mod commands;
pub mod error;
pub mod histogram;
pub mod inspect;
pub mod json;
pub mod kernels;
pub mod metrics;
pub mod model;
pub mod page;
pub mod progress;
mod rank;
pub mod replay;
pub mod report;
pub mod runtime;
pub mod sched;
pub mod session;
pub mod step;
pub mod tokens;
pub mod trace;
pub mod trace_info;
pub mod trace_synth;
pub mod weights;
pub mod words;

pub use error::EngineError;

//! A small serving engine that embeds lowlat-core and calls the kernels by their C ABI.
#![deny(missing_docs)]

pub mod cache;
pub mod checkpoint;
pub mod cli;
pub mod error;
pub mod json;
pub mod kernels;
pub mod metrics;
pub mod model;
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
pub mod weights;

pub use error::EngineError;

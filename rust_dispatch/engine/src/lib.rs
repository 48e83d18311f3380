//! A small serving engine that embeds lowlat-core and calls the kernels by their C ABI.

pub mod error;
pub mod step;

pub use error::EngineError;

//! The Python face of lowlat-core: module `lowlat._dispatch`. Thin: text and numbers in, text and
//! numbers out; every decision is core's.
#![deny(missing_docs)]

#[cfg(feature = "python")]
mod group;
#[cfg(feature = "python")]
mod module;

//! What can end a replay, in the engine's words.

use thiserror::Error;

/// Why the engine stopped. The text is one clear line: what was seen, what was needed and which
/// setting changes it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum EngineError {
    /// Bad input, or a server that these settings cannot give: exit code 1.
    #[error("{0}")]
    Refused(String),
    /// The world failed while a step ran (a deadline passed, a rank was lost): exit code 3.
    #[error("{0}")]
    Fault(String),
    /// We broke a rule of our own: exit code 3, and a report is wanted.
    #[error("bug in lowlat, please report it: {0}")]
    Bug(String),
}

impl EngineError {
    /// Exit code of the program that ends with this error.
    ///
    /// ```
    /// use lowlat_engine::EngineError;
    /// assert_eq!(EngineError::Refused("no such file".into()).exit_code(), 1);
    /// assert_eq!(EngineError::Fault("rank 1 did not answer".into()).exit_code(), 3);
    /// ```
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Refused(_) => 1,
            Self::Fault(_) | Self::Bug(_) => 3,
        }
    }
}

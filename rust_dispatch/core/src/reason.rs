//! Every reason why something was not run, or went wrong. A number is given once and never reused.
//!
//! | numbers | who says it | what it means |
//! |---|---|---|
//! | 100 to 199 | `guard` | decline: these kernels cannot serve this server |
//! | 200 to 299 | the dispatcher | decline: this step is not covered |
//! | 300 to 399 | the vote | decline: the ranks do not agree |
//! | 400 to 499 | any wait, the device | fault: the step is invalid, we disarm for good |
//! | 500 to 599 | ourselves | bug: we broke our own rule; handled as a fault |

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a reason is: something that is not ours, a failed world, or our own mistake.
///
/// ```
/// use lowlat_core::{Reason, ReasonKind};
/// assert_eq!(Reason::TpSize.kind(), ReasonKind::CannotServe);
/// assert_eq!(Reason::StepIsExtend.kind(), ReasonKind::NotCovered);
/// assert!(Reason::RankMissing.kind().is_fault());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReasonKind {
    /// A decline of the whole server, before anything was built.
    CannotServe,
    /// A decline of one step; the next may be covered.
    NotCovered,
    /// A decline of all ranks together, because they differ.
    RanksDiffer,
    /// The world failed. The step is invalid and the plugin disarms for good.
    Fault,
    /// We broke our own rule. What follows is the same as for a fault.
    Bug,
}

impl ReasonKind {
    /// Whether the plugin is disarmed for good afterwards.
    pub fn is_fault(self) -> bool {
        matches!(self, Self::Fault | Self::Bug)
    }
}

/// A numbered reason. The numbers are the same in the C header and in Python.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// The machine code of this device is not built.
    Isa = 101,
    /// The tensor-parallel size is not built.
    TpSize = 102,
    /// The model's dtype is not built.
    Dtype = 103,
    /// A field of the model has another value.
    ModelField = 104,
    /// A size does not divide over the ranks.
    Divides = 105,
    /// A server argument has another value.
    ServerArgument = 106,
    /// An environment variable has another value.
    Environment = 107,
    /// The device has too few blocks that run at the same time.
    ResidentBlocks = 108,
    /// A feature is in use that these kernels do not accept.
    Feature = 109,
    /// A loaded tensor is missing.
    TensorMissing = 110,
    /// A loaded tensor has another dtype.
    TensorDtype = 111,
    /// A loaded tensor has another shape.
    TensorShape = 112,
    /// A loaded tensor is laid out otherwise.
    TensorLayout = 113,
    /// The model's configuration cannot be read as one that these kernels know.
    ModelConfig = 114,
    /// The engine is of a release that this plugin was not made for.
    EngineVersion = 115,
    /// The installed kernel library has no kernels for this device.
    KernelsMissing = 116,
    /// A living group has this name.
    GroupInUse = 117,
    /// Shared memory is full, or not permitted.
    SharedMemory = 118,

    /// The step runs prompt rows.
    StepIsExtend = 201,
    /// The step mixes prompt rows and decode rows.
    StepIsMixed = 202,
    /// The step runs no rows.
    StepIsIdle = 203,
    /// No graph of this mode was captured.
    ModeNotCaptured = 204,
    /// The step has another number of tokens a request than the graphs of its mode.
    TokensPerRequest = 205,
    /// The batch is larger than every captured one.
    BatchTooLarge = 206,
    /// The rows are not batch size times tokens a request.
    RowsRagged = 207,
    /// The plain path was chosen for this step at capture.
    PlainAtCapture = 208,
    /// The plugin is switched off.
    PluginOff = 209,
    /// A fault happened before; the plugin is disarmed for good.
    Disarmed = 210,

    /// Ranks cover other widths.
    VoteWidths = 301,
    /// Ranks cover other graph keys.
    VoteKeys = 302,
    /// Ranks have another launch geometry.
    VoteGeometry = 303,
    /// Ranks carry another kernel catalogue.
    VoteCatalogue = 304,
    /// Ranks have another deadline ladder.
    VoteLadder = 305,
    /// Ranks believe in another tensor-parallel size, or not every rank voted once.
    VoteGroup = 306,
    /// A rank declines; all decline with it.
    VoteRankDeclines = 307,
    /// Ranks are about to run other steps.
    VoteStep = 308,
    /// Ranks checked against other requirements or another model.
    VoteRequirements = 309,
    /// Two processes have one rank's number.
    RankTaken = 310,

    /// A rank did not answer by the deadline.
    RankMissing = 401,
    /// A wait in a kernel passed its deadline.
    WaitExpired = 402,
    /// A peer raised the abort word.
    AbortedByPeer = 403,
    /// The host raised the abort word.
    AbortedByHost = 404,
    /// What a captured graph reads was moved, reshaped or retyped since capture.
    SealChanged = 405,
    /// A step did not end within its budget.
    StepOverdue = 406,
    /// The device reported an error.
    Device = 407,
    /// This rank is behind the others, or joined a group that has faulted.
    EpochStale = 408,

    /// An assertion of ours failed.
    Bug = 501,
}

impl Reason {
    /// Every reason, by ascending number.
    pub const ALL: [Reason; 47] = [
        Self::Isa,
        Self::TpSize,
        Self::Dtype,
        Self::ModelField,
        Self::Divides,
        Self::ServerArgument,
        Self::Environment,
        Self::ResidentBlocks,
        Self::Feature,
        Self::TensorMissing,
        Self::TensorDtype,
        Self::TensorShape,
        Self::TensorLayout,
        Self::ModelConfig,
        Self::EngineVersion,
        Self::KernelsMissing,
        Self::GroupInUse,
        Self::SharedMemory,
        Self::StepIsExtend,
        Self::StepIsMixed,
        Self::StepIsIdle,
        Self::ModeNotCaptured,
        Self::TokensPerRequest,
        Self::BatchTooLarge,
        Self::RowsRagged,
        Self::PlainAtCapture,
        Self::PluginOff,
        Self::Disarmed,
        Self::VoteWidths,
        Self::VoteKeys,
        Self::VoteGeometry,
        Self::VoteCatalogue,
        Self::VoteLadder,
        Self::VoteGroup,
        Self::VoteRankDeclines,
        Self::VoteStep,
        Self::VoteRequirements,
        Self::RankTaken,
        Self::RankMissing,
        Self::WaitExpired,
        Self::AbortedByPeer,
        Self::AbortedByHost,
        Self::SealChanged,
        Self::StepOverdue,
        Self::Device,
        Self::EpochStale,
        Self::Bug,
    ];

    /// The number, given once.
    pub fn number(self) -> u32 {
        self as u32
    }

    /// The reason of a number, or none.
    ///
    /// ```
    /// use lowlat_core::Reason;
    /// assert_eq!(Reason::TpSize as u32, 102);
    /// assert_eq!(Reason::from_number(102), Some(Reason::TpSize));
    /// assert_eq!(Reason::from_number(9999), None);
    /// assert_eq!(Reason::TpSize.name(), "tp_size");
    /// assert_eq!(Reason::TpSize.to_string(), "the tensor-parallel size is not built");
    /// ```
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|reason| *reason as u32 == number)
    }

    /// Where this reason stands in [`Reason::ALL`].
    pub(crate) fn idx(self) -> usize {
        let found = Self::ALL.binary_search(&self);
        found.expect("every reason is in ALL; a test holds it")
    }

    /// Decline, fault or bug.
    pub fn kind(self) -> ReasonKind {
        match self as u32 / 100 {
            1 => ReasonKind::CannotServe,
            2 => ReasonKind::NotCovered,
            3 => ReasonKind::RanksDiffer,
            4 => ReasonKind::Fault,
            _ => ReasonKind::Bug,
        }
    }

    /// A name for JSON, Python and C: lower case with underscores.
    pub fn name(self) -> &'static str {
        match self {
            Self::Isa => "isa",
            Self::TpSize => "tp_size",
            Self::Dtype => "dtype",
            Self::ModelField => "model_field",
            Self::Divides => "divides",
            Self::ServerArgument => "server_argument",
            Self::Environment => "environment",
            Self::ResidentBlocks => "resident_blocks",
            Self::Feature => "feature",
            Self::TensorMissing => "tensor_missing",
            Self::TensorDtype => "tensor_dtype",
            Self::TensorShape => "tensor_shape",
            Self::TensorLayout => "tensor_layout",
            Self::ModelConfig => "model_config",
            Self::EngineVersion => "engine_version",
            Self::KernelsMissing => "kernels_missing",
            Self::GroupInUse => "group_in_use",
            Self::SharedMemory => "shared_memory",
            Self::StepIsExtend => "step_is_extend",
            Self::StepIsMixed => "step_is_mixed",
            Self::StepIsIdle => "step_is_idle",
            Self::ModeNotCaptured => "mode_not_captured",
            Self::TokensPerRequest => "tokens_per_request",
            Self::BatchTooLarge => "batch_too_large",
            Self::RowsRagged => "rows_ragged",
            Self::PlainAtCapture => "plain_at_capture",
            Self::PluginOff => "plugin_off",
            Self::Disarmed => "disarmed",
            Self::VoteWidths => "vote_widths",
            Self::VoteKeys => "vote_keys",
            Self::VoteGeometry => "vote_geometry",
            Self::VoteCatalogue => "vote_catalogue",
            Self::VoteLadder => "vote_ladder",
            Self::VoteGroup => "vote_group",
            Self::VoteRankDeclines => "vote_rank_declines",
            Self::VoteStep => "vote_step",
            Self::VoteRequirements => "vote_requirements",
            Self::RankTaken => "rank_taken",
            Self::RankMissing => "rank_missing",
            Self::WaitExpired => "wait_expired",
            Self::AbortedByPeer => "aborted_by_peer",
            Self::AbortedByHost => "aborted_by_host",
            Self::SealChanged => "seal_changed",
            Self::StepOverdue => "step_overdue",
            Self::Device => "device",
            Self::EpochStale => "epoch_stale",
            Self::Bug => "bug",
        }
    }

    /// The reason in words, without the values of one case.
    pub fn words(self) -> &'static str {
        match self {
            Self::Isa => "the machine code of this device is not built",
            Self::TpSize => "the tensor-parallel size is not built",
            Self::Dtype => "the model's dtype is not built",
            Self::ModelField => "a field of the model has another value",
            Self::Divides => "a size does not divide over the ranks",
            Self::ServerArgument => "a server argument has another value",
            Self::Environment => "an environment variable has another value",
            Self::ResidentBlocks => "the device has too few blocks that run at the same time",
            Self::Feature => "a feature is in use that these kernels do not accept",
            Self::TensorMissing => "a loaded tensor is missing",
            Self::TensorDtype => "a loaded tensor has another dtype",
            Self::TensorShape => "a loaded tensor has another shape",
            Self::TensorLayout => "a loaded tensor is laid out otherwise",
            Self::ModelConfig => "the model's configuration is not one that these kernels know",
            Self::EngineVersion => "the engine is of a release that this plugin was not made for",
            Self::KernelsMissing => "the installed library has no kernels for this device",
            Self::GroupInUse => "a living group has this name",
            Self::SharedMemory => "shared memory is full, or not permitted",
            Self::StepIsExtend => "the step runs prompt rows",
            Self::StepIsMixed => "the step mixes prompt rows and decode rows",
            Self::StepIsIdle => "the step runs no rows",
            Self::ModeNotCaptured => "no graph of this mode was captured",
            Self::TokensPerRequest => "the graphs of this mode have other tokens a request",
            Self::BatchTooLarge => "the batch is larger than every captured one",
            Self::RowsRagged => "the rows are not batch size times tokens a request",
            Self::PlainAtCapture => "the plain path was chosen for this step at capture",
            Self::PluginOff => "the plugin is switched off",
            Self::Disarmed => "a fault happened before; the plugin is disarmed for good",
            Self::VoteWidths => "ranks cover other widths",
            Self::VoteKeys => "ranks cover other graph keys",
            Self::VoteGeometry => "ranks have another launch geometry",
            Self::VoteCatalogue => "ranks carry another kernel catalogue",
            Self::VoteLadder => "ranks have another deadline ladder",
            Self::VoteGroup => "not every rank of one group voted once",
            Self::VoteRankDeclines => "a rank declines, so all do",
            Self::VoteStep => "ranks are about to run other steps",
            Self::VoteRequirements => "ranks checked other requirements or another model",
            Self::RankTaken => "two processes have one rank's number",
            Self::RankMissing => "a rank did not answer by the deadline",
            Self::WaitExpired => "a wait in a kernel passed its deadline",
            Self::AbortedByPeer => "a peer raised the abort word",
            Self::AbortedByHost => "the host raised the abort word",
            Self::SealChanged => "what a captured graph reads has changed since capture",
            Self::StepOverdue => "a step did not end within its budget",
            Self::Device => "the device reported an error",
            Self::EpochStale => "this rank is behind its group, or the group has faulted",
            Self::Bug => "an assertion of ours failed",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words())
    }
}

/// In JSON a reason is its name.
impl Serialize for Reason {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Reason {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Self::ALL
            .into_iter()
            .find(|reason| reason.name() == name)
            .ok_or_else(|| serde::de::Error::custom(format!("{name:?} is no reason's name")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_ascending_and_names_are_unique() {
        for pair in Reason::ALL.windows(2) {
            assert!(pair[0].number() < pair[1].number(), "{pair:?}");
        }
        let mut names: Vec<_> = Reason::ALL.iter().map(|reason| reason.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Reason::ALL.len());
    }

    /// The compiler knows every variant; a number that only the enum has would be skipped here.
    #[test]
    fn every_number_of_the_source_is_in_all() {
        let source = include_str!("reason.rs");
        let numbers: Vec<u32> = source
            .lines()
            .filter_map(|line| line.trim().strip_suffix(',')?.split_once(" = "))
            .filter_map(|(_, number)| number.parse().ok())
            .collect();
        let all: Vec<u32> = Reason::ALL.iter().map(|reason| reason.number()).collect();
        assert_eq!(numbers, all);
    }

    #[test]
    fn index_and_number_lead_back() {
        for (idx, reason) in Reason::ALL.into_iter().enumerate() {
            assert_eq!(reason.idx(), idx);
            assert_eq!(Reason::from_number(reason.number()), Some(reason));
            let json = serde_json::to_string(&reason).unwrap();
            assert_eq!(serde_json::from_str::<Reason>(&json).unwrap(), reason);
        }
    }
}

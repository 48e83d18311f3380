//! The flow in types: each step's output is the only way into the next.
//!
//! ```text
//! Facts --guard--> Servable --vote--> Coverage --build--> Built<T> --capture--> Captured<T>
//! ```
//!
//! `T` is whatever the engine builds: a model with its weights bound, memory, streams. Nothing
//! here looks into it.

use crate::dispatch::{Decision, Dispatcher, StepFacts};
use crate::graph_key::{RecordError, Recorder, SealFault, SealView};
use crate::reason::Reason;
use crate::vote::Coverage;

/// Something built under a coverage that all ranks agreed on.
///
/// ```
/// # use lowlat_core::{DeadlineLadder, Facts, Requirements, TpRank, guard};
/// # use lowlat_core::vote::{Ballot, BallotParts, agree};
/// # use lowlat_core::graph_key::keys_digest;
/// use lowlat_core::graph_key::RecordError;
/// use lowlat_core::{Built, Decision, Reason, StepFacts, StepMode};
/// # let facts = Facts { isa: "scalar".into(), tp_size: 1, ..Facts::default() };
/// # let servable = guard(&facts, &Requirements::new("toy", &["scalar"])).unwrap();
/// # let coverage = agree(TpRank(0), &[Ballot::new(&servable, TpRank(0), BallotParts {
/// #     widths: &[6], keys_digest: keys_digest([]), geometry_digest: 0, catalogue_digest: 0,
/// #     ladder: DeadlineLadder::new(1, 2, 3, 4).unwrap(),
/// # }).unwrap()]).unwrap();
/// let built = Built::new(coverage, |coverage| {
///     Ok::<_, String>(format!("memory for {:?} rows", coverage.widths()))
/// }).unwrap();
/// let mut captured = built.capture(|_memory, _recorder| Ok::<_, RecordError>(())).unwrap();
/// let decision = captured.decide(&StepFacts::uniform(StepMode::Decode, 1, 1));
/// assert_eq!(decision, Decision::Plain(Reason::ModeNotCaptured));
/// assert_eq!(captured.payload(), "memory for [6] rows");
/// ```
#[derive(Debug)]
pub struct Built<T> {
    coverage: Coverage,
    payload: T,
}

impl<T> Built<T> {
    /// Builds what `coverage` promises. The coverage goes in by value: one vote, one build.
    ///
    /// # Errors
    /// Those of `build`.
    pub fn new<E>(
        coverage: Coverage,
        build: impl FnOnce(&Coverage) -> Result<T, E>,
    ) -> Result<Self, E> {
        let payload = build(&coverage)?;
        Ok(Self { coverage, payload })
    }

    /// What all ranks agreed on.
    pub fn coverage(&self) -> &Coverage {
        &self.coverage
    }

    /// What was built.
    pub fn payload(&self) -> &T {
        &self.payload
    }

    /// What was built, to be changed.
    pub fn payload_mut(&mut self) -> &mut T {
        &mut self.payload
    }

    /// Captures every graph that the coverage promises: `capture` notes each in the recorder.
    ///
    /// # Errors
    /// Those of `capture`, and when the record is not what was agreed on.
    pub fn capture<E: From<RecordError>>(
        mut self,
        capture: impl FnOnce(&mut T, &mut Recorder) -> Result<(), E>,
    ) -> Result<Captured<T>, E> {
        let mut recorder = Recorder::new();
        capture(&mut self.payload, &mut recorder)?;
        let dispatcher = Dispatcher::new(&self.coverage, recorder.finish())?;
        Ok(Captured {
            built: self,
            dispatcher,
        })
    }
}

/// Something whose graphs are captured and sealed, ready to replay.
#[derive(Debug)]
pub struct Captured<T> {
    built: Built<T>,
    dispatcher: Dispatcher,
}

impl<T> Captured<T> {
    /// What runs this step ([`Dispatcher::decide`]).
    pub fn decide(&mut self, step: &StepFacts) -> Decision {
        self.dispatcher.decide(step)
    }

    /// Decides, and where a graph runs the step also checks its seals. A broken seal disarms for
    /// good. `seals` gives what the graph of a key reads now, in the order of capture.
    ///
    /// # Errors
    /// The seal that changed.
    pub fn decide_sealed<'a, I: IntoIterator<Item = SealView<'a>>>(
        &mut self,
        step: &StepFacts,
        seals: impl FnOnce(crate::graph_key::KeyIdx) -> I,
    ) -> Result<Decision, SealFault> {
        let decision = self.dispatcher.decide(step);
        if let Decision::Replay { key, .. } = decision {
            if let Err(fault) = self.dispatcher.record().check_seals(key, seals(key)) {
                self.dispatcher.disarm(Reason::SealChanged);
                return Err(fault);
            }
        }
        Ok(decision)
    }

    /// Disarms for good after a fault.
    pub fn disarm(&mut self, fault: Reason) {
        self.dispatcher.disarm(fault);
    }

    /// Switches the plugin on or off between steps; all ranks do it together.
    pub fn switch(&mut self, on: bool) {
        self.dispatcher.switch(on);
    }

    /// The dispatcher, to read its record and its counts.
    pub fn dispatcher(&self) -> &Dispatcher {
        &self.dispatcher
    }

    /// What all ranks agreed on.
    pub fn coverage(&self) -> &Coverage {
        self.built.coverage()
    }

    /// What was built.
    pub fn payload(&self) -> &T {
        self.built.payload()
    }

    /// What was built, to be run.
    pub fn payload_mut(&mut self) -> &mut T {
        self.built.payload_mut()
    }
}

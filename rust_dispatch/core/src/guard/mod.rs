//! Can this server be served? Every reason at once, numbered, in words that say what was seen,
//! what is needed and which setting changes it.
//!
//! [`guard`] looks at plain [`Facts`] before any weight is loaded; [`check_loaded`] looks at the
//! loaded tensors. Both answer for the whole server. Whether one *step* is covered is the
//! dispatcher's question, with reasons of its own ([`crate::ReasonKind::NotCovered`]).

mod feature;
mod loaded;
mod read;
mod value;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

pub use feature::Feature;
pub use loaded::{TensorFact, TensorNeed, check_loaded};
pub use read::ReadError;
pub use value::Value;

use crate::digest::Fnv1a;
use crate::reason::Reason;
use crate::words::one_line;

/// One reason why this server cannot be served.
///
/// ```
/// use lowlat_core::{Decline, Reason};
/// let decline = Decline::new(Reason::ServerArgument, "page_size", "64", "256")
///     .change("--page-size 256");
/// assert_eq!(
///     decline.to_string(),
///     "[106] page_size is 64; these kernels need 256 (change: --page-size 256)"
/// );
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Decline {
    /// Which of the numbered reasons.
    pub reason: Reason,
    /// What was seen and what is needed.
    pub words: String,
    /// The setting that changes it, where there is one.
    pub change: Option<String>,
}

impl Decline {
    /// "`subject` is `seen`; these kernels need `needed`".
    pub fn new(
        reason: Reason,
        subject: impl fmt::Display,
        seen: impl fmt::Display,
        needed: impl fmt::Display,
    ) -> Self {
        Self::in_words(
            reason,
            format!("{subject} is {seen}; these kernels need {needed}"),
        )
    }

    /// A decline whose words are not of that form.
    pub fn in_words(reason: Reason, words: impl Into<String>) -> Self {
        Self {
            reason,
            words: one_line(&words.into()),
            change: None,
        }
    }

    /// The same decline, with the setting that changes it.
    #[must_use]
    pub fn change(mut self, setting: impl Into<String>) -> Self {
        self.change = Some(one_line(&setting.into()));
        self
    }
}

impl fmt::Display for Decline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}] {}", self.reason.number(), self.words)?;
        match &self.change {
            Some(setting) => write!(f, " (change: {setting})"),
            None => Ok(()),
        }
    }
}

/// A named setting and the values that are accepted.
#[derive(Clone, Debug, PartialEq)]
pub struct OneOf {
    /// The setting's name, as in the model's config, the server's arguments or the environment.
    pub name: String,
    /// The accepted values, at least one.
    pub accepted: Vec<Value>,
    /// Whether leaving it unset is accepted, because the default is an accepted value.
    pub unset_accepted: bool,
}

impl OneOf {
    /// `name` must be one of `accepted`.
    pub fn new(name: &str, accepted: impl IntoIterator<Item = impl Into<Value>>) -> Self {
        let accepted = accepted.into_iter().map(Into::into).collect();
        Self {
            name: name.to_owned(),
            accepted,
            unset_accepted: false,
        }
    }

    /// The same, where leaving it unset is accepted too.
    #[must_use]
    pub fn or_unset(mut self) -> Self {
        self.unset_accepted = true;
        self
    }
}

/// A model size that must be a multiple of `unit * tp_size`, so that every rank gets whole units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Divides {
    /// The model field, an integer.
    pub field: String,
    /// Elements that stay together on one rank: 1 for heads, 32 where a scale group must be whole.
    pub unit: u64,
}

impl Divides {
    /// `field` must be a multiple of `unit * tp_size`.
    pub fn new(field: &str, unit: u64) -> Self {
        Self {
            field: field.to_owned(),
            unit,
        }
    }
}

/// What one set of kernels needs. An empty field accepts anything, except `isas`, where empty
/// matches nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Requirements {
    /// The kernels' name, as in messages.
    pub name: String,
    /// Built machine codes, such as `sm_90`; empty matches nothing.
    pub isas: Vec<String>,
    /// Built tensor-parallel sizes.
    pub tp_sizes: Vec<u32>,
    /// Built model dtypes, such as `bfloat16`.
    pub dtypes: Vec<String>,
    /// Fields of the model's configuration.
    pub model: Vec<OneOf>,
    /// Sizes that must divide over the ranks.
    pub divides: Vec<Divides>,
    /// Server arguments, after the server has resolved its defaults.
    pub server_args: Vec<OneOf>,
    /// Environment variables, parsed.
    pub env: Vec<OneOf>,
    /// Blocks that must be able to run at the same time; 0 accepts anything.
    pub resident_blocks: u32,
    /// Features that may be in use; every other one is refused by name.
    pub features: BTreeSet<Feature>,
}

impl Requirements {
    /// Requirements of that name that accept any server on one of `isas`.
    pub fn new(name: &str, isas: &[&str]) -> Self {
        Self {
            name: name.to_owned(),
            isas: isas.iter().map(|&isa| isa.to_owned()).collect(),
            tp_sizes: Vec::new(),
            dtypes: Vec::new(),
            model: Vec::new(),
            divides: Vec::new(),
            server_args: Vec::new(),
            env: Vec::new(),
            resident_blocks: 0,
            features: BTreeSet::new(),
        }
    }

    /// Digest of everything that is required, in the order of the fields of this struct.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let texts = |digest: Fnv1a, list: &[String]| {
            list.iter()
                .fold(digest.u64(list.len() as u64), |digest, text| {
                    digest.text(text)
                })
        };
        let settings = |digest: Fnv1a, list: &[OneOf]| {
            list.iter()
                .fold(digest.u64(list.len() as u64), |digest, setting| {
                    let accepted = &setting.accepted;
                    let digest = digest.text(&setting.name).u8(setting.unset_accepted.into());
                    let digest = digest.u64(accepted.len() as u64);
                    accepted
                        .iter()
                        .fold(digest, |digest, value| digest.text(&value.to_string()))
                })
        };
        let mut digest = texts(Fnv1a::new().text(&self.name), &self.isas);
        digest = digest.u64(self.tp_sizes.len() as u64);
        digest = self
            .tp_sizes
            .iter()
            .fold(digest, |digest, &size| digest.u32(size));
        digest = settings(texts(digest, &self.dtypes), &self.model);
        digest = digest.u64(self.divides.len() as u64);
        for divides in &self.divides {
            digest = digest.text(&divides.field).u64(divides.unit);
        }
        digest = settings(settings(digest, &self.server_args), &self.env);
        digest = digest
            .u32(self.resident_blocks)
            .u64(self.features.len() as u64);
        self.features
            .iter()
            .fold(digest, |digest, feature| digest.text(feature.name()))
            .finish()
    }
}

/// What was seen: plain text and numbers, gathered by whoever can see them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// The device's machine code, such as `sm_90` or `scalar`.
    pub isa: String,
    /// Ranks of the tensor-parallel group.
    pub tp_size: u32,
    /// The model's dtype, such as `bfloat16`; `None` when nobody said.
    pub dtype: Option<String>,
    /// The model's configuration by field.
    pub model: BTreeMap<String, Value>,
    /// Server arguments by name (`page_size`), after the server has resolved its defaults.
    pub server_args: BTreeMap<String, Value>,
    /// Environment variables by name, parsed.
    pub env: BTreeMap<String, Value>,
    /// Blocks that can run at the same time; `None` where there is no device to ask yet, and then
    /// it is not checked.
    pub resident_blocks: Option<u32>,
    /// Features in use.
    pub features: BTreeSet<Feature>,
}

/// Proof that the guard found nothing against this server on this rank. Only [`guard`] makes one,
/// and a vote can be cast only with one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Servable {
    name: String,
    isa: String,
    tp_size: u32,
    requirements_digest: u64,
    model_digest: u64,
}

impl Servable {
    /// The name of the kernels that will serve.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The machine code of this rank's device.
    pub fn isa(&self) -> &str {
        &self.isa
    }

    /// Ranks of the group.
    pub fn tp_size(&self) -> u32 {
        self.tp_size
    }

    /// Digest of what was checked: the requirements, then the machine code, then the model's
    /// fields in ascending order of name. Ranks must have the same.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let digest = Fnv1a::new().u64(self.requirements_digest).text(&self.isa);
        digest.u64(self.model_digest).finish()
    }
}

/// Checks `facts` against `requirements`.
///
/// # Errors
/// Every reason against serving, in the order of the fields of [`Requirements`], never just the
/// first one.
///
/// ```
/// use lowlat_core::{Facts, Requirements, guard};
/// let mut requirements = Requirements::new("toy", &["sm_90"]);
/// requirements.tp_sizes = vec![2, 4];
/// let facts = Facts { isa: "sm_90".into(), tp_size: 4, ..Facts::default() };
/// assert!(guard(&facts, &requirements).is_ok());
///
/// let facts = Facts { isa: "sm_80".into(), tp_size: 3, ..facts };
/// let declines = guard(&facts, &requirements).unwrap_err();
/// assert_eq!(declines[0].to_string(), "[101] isa is sm_80; these kernels need sm_90");
/// assert_eq!(
///     declines[1].to_string(),
///     "[102] tp_size is 3; these kernels need 2 or 4 (change: --tp)"
/// );
/// ```
pub fn guard(facts: &Facts, requirements: &Requirements) -> Result<Servable, Vec<Decline>> {
    let mut declines = Vec::new();
    if !requirements.isas.contains(&facts.isa) {
        let needed = match requirements.isas.as_slice() {
            [] => "one that is built, and none is".to_owned(),
            isas => one_of(isas),
        };
        declines.push(Decline::new(Reason::Isa, "isa", &facts.isa, needed));
    }
    check_tp_size(facts, requirements, &mut declines);
    check_dtype(facts, requirements, &mut declines);
    for setting in &requirements.model {
        let seen = facts.model.get(&setting.name);
        declines.extend(check_setting(Reason::ModelField, setting, seen, |_| None));
    }
    for divides in &requirements.divides {
        declines.extend(check_divides(facts, divides));
    }
    for setting in &requirements.server_args {
        let seen = facts.server_args.get(&setting.name);
        let flag = |value: &Value| Some(value.as_flag(&setting.name));
        declines.extend(check_setting(Reason::ServerArgument, setting, seen, flag));
    }
    for setting in &requirements.env {
        let seen = facts.env.get(&setting.name);
        let assignment = |value: &Value| Some(format!("{}={value}", setting.name));
        declines.extend(check_setting(
            Reason::Environment,
            setting,
            seen,
            assignment,
        ));
    }
    if let Some(resident) = facts.resident_blocks {
        if resident < requirements.resident_blocks {
            let needed = format!("at least {}", requirements.resident_blocks);
            let seen = resident.to_string();
            let decline = Decline::new(Reason::ResidentBlocks, "resident_blocks", seen, needed);
            declines.push(decline.change("serve on a whole device, not on a slice of one"));
        }
    }
    for &feature in facts.features.difference(&requirements.features) {
        let subject = feature.name().replace('_', " ");
        let decline = Decline::new(Reason::Feature, subject, "in use", "it off");
        declines.push(decline.change(feature.off()));
    }
    if declines.is_empty() {
        Ok(Servable {
            name: requirements.name.clone(),
            isa: facts.isa.clone(),
            tp_size: facts.tp_size,
            requirements_digest: requirements.digest(),
            model_digest: model_digest(facts),
        })
    } else {
        Err(declines)
    }
}

fn model_digest(facts: &Facts) -> u64 {
    let digest = Fnv1a::new().u64(facts.model.len() as u64);
    let fields = facts.model.iter();
    fields
        .fold(digest, |digest, (name, value)| {
            digest.text(name).text(&value.to_string())
        })
        .finish()
}

fn check_tp_size(facts: &Facts, requirements: &Requirements, declines: &mut Vec<Decline>) {
    let sizes = &requirements.tp_sizes;
    let built = sizes.is_empty() || sizes.contains(&facts.tp_size);
    if built && facts.tp_size != 0 {
        return;
    }
    let needed = if sizes.is_empty() {
        "at least 1".to_owned()
    } else {
        one_of(sizes)
    };
    let seen = facts.tp_size.to_string();
    declines.push(Decline::new(Reason::TpSize, "tp_size", seen, needed).change("--tp"));
}

fn check_dtype(facts: &Facts, requirements: &Requirements, declines: &mut Vec<Decline>) {
    let seen = facts.dtype.as_deref().unwrap_or("not set");
    if requirements.dtypes.is_empty() || requirements.dtypes.iter().any(|dtype| dtype == seen) {
        return;
    }
    let change = format!("--dtype {}", requirements.dtypes[0]);
    let needed = one_of(&requirements.dtypes);
    declines.push(Decline::new(Reason::Dtype, "dtype", seen, needed).change(change));
}

fn check_setting(
    reason: Reason,
    setting: &OneOf,
    seen: Option<&Value>,
    change: impl Fn(&Value) -> Option<String>,
) -> Option<Decline> {
    if seen.map_or(setting.unset_accepted, |value| {
        setting.accepted.contains(value)
    }) {
        return None;
    }
    let seen = seen.map_or_else(|| "not set".to_owned(), Value::to_string);
    let decline = Decline::new(reason, &setting.name, seen, one_of(&setting.accepted));
    Some(match setting.accepted.first().and_then(change) {
        Some(words) => decline.change(words),
        None => decline,
    })
}

fn check_divides(facts: &Facts, divides: &Divides) -> Option<Decline> {
    // A size of 0 ranks is refused above; here it would only divide by 0.
    let tp_size = u64::from(facts.tp_size.max(1));
    let unit = divides.unit.max(1);
    let multiple = unit.saturating_mul(tp_size);
    let (seen, size) = match facts.model.get(&divides.field) {
        Some(Value::Int(size)) => (size.to_string(), u64::try_from(*size).ok()),
        Some(other) => (other.to_string(), None),
        None => ("not set".to_owned(), None),
    };
    if size.is_some_and(|size| 0 < size && size % multiple == 0) {
        return None;
    }
    let needed = match unit {
        1 => format!("a multiple of tp_size ({tp_size})"),
        _ => format!("a multiple of {unit} x tp_size ({unit} x {tp_size} = {multiple})"),
    };
    Some(Decline::new(Reason::Divides, &divides.field, seen, needed).change("--tp"))
}

/// "a", "a or b", "a, b or c".
fn one_of(values: &[impl fmt::Display]) -> String {
    let texts: Vec<String> = values.iter().map(ToString::to_string).collect();
    match texts.split_last() {
        None => "nothing that exists".to_owned(),
        Some((last, [])) => last.clone(),
        Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
    }
}

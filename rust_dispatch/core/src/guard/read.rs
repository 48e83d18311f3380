//! Requirements and facts as JSON, for engines in other languages that bring kernels of their own.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::{Divides, Facts, Feature, OneOf, Requirements, Value};
use crate::words::one_line;

/// What is wrong with a JSON text of requirements or facts, in one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", one_line(.0))]
pub struct ReadError(String);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OneOfText {
    name: String,
    accepted: Vec<Value>,
    #[serde(default)]
    unset_accepted: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DividesText {
    field: String,
    unit: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RequirementsText {
    name: String,
    isas: Vec<String>,
    #[serde(default)]
    tp_sizes: Vec<u32>,
    #[serde(default)]
    dtypes: Vec<String>,
    #[serde(default)]
    model: Vec<OneOfText>,
    #[serde(default)]
    divides: Vec<DividesText>,
    #[serde(default)]
    server_args: Vec<OneOfText>,
    #[serde(default)]
    env: Vec<OneOfText>,
    #[serde(default)]
    resident_blocks: u32,
    #[serde(default)]
    features: BTreeSet<Feature>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FactsText {
    isa: String,
    tp_size: u32,
    dtype: Option<String>,
    #[serde(default)]
    model: BTreeMap<String, Value>,
    #[serde(default)]
    server_args: BTreeMap<String, Value>,
    #[serde(default)]
    env: BTreeMap<String, Value>,
    resident_blocks: Option<u32>,
    #[serde(default)]
    features: BTreeSet<Feature>,
}

impl Requirements {
    /// Reads requirements from JSON: "name" and "isas", and any of "tp_sizes", "dtypes", "model",
    /// "divides", "server_args", "env", "resident_blocks", "features". Settings are lists of
    /// {"name", "accepted", "unset_accepted"}, divisions of {"field", "unit"}.
    ///
    /// # Errors
    /// What is wrong with the text, in one line.
    ///
    /// ```
    /// use lowlat_core::Requirements;
    /// let text = r#"{"name": "toy", "isas": ["sm_90"], "tp_sizes": [2]}"#;
    /// let requirements = Requirements::from_json(text).unwrap();
    /// assert_eq!(requirements.tp_sizes, [2]);
    /// let error = Requirements::from_json(r#"{"name": "toy"}"#).unwrap_err().to_string();
    /// assert!(error.starts_with("requirements: missing field `isas`"), "{error}");
    /// ```
    pub fn from_json(text: &str) -> Result<Self, ReadError> {
        let read: RequirementsText = serde_json::from_str(text)
            .map_err(|error| ReadError(format!("requirements: {error}")))?;
        let settings = |list: Vec<OneOfText>| {
            let setting = |text: OneOfText| OneOf {
                name: text.name,
                accepted: text.accepted,
                unset_accepted: text.unset_accepted,
            };
            list.into_iter().map(setting).collect()
        };
        if let Some(none) = read.divides.iter().find(|text| text.unit == 0) {
            return Err(ReadError(format!(
                "requirements: divides: the unit of {} is 0; at least 1 is needed",
                none.field
            )));
        }
        let divides = read.divides.into_iter().map(|text| Divides {
            field: text.field,
            unit: text.unit,
        });
        Ok(Self {
            name: read.name,
            isas: read.isas,
            tp_sizes: read.tp_sizes,
            dtypes: read.dtypes,
            model: settings(read.model),
            divides: divides.collect(),
            server_args: settings(read.server_args),
            env: settings(read.env),
            resident_blocks: read.resident_blocks,
            features: read.features,
        })
    }
}

impl Facts {
    /// Reads facts from JSON: "isa" and "tp_size", and any of "dtype", "model", "server_args",
    /// "env", "resident_blocks", "features".
    ///
    /// # Errors
    /// What is wrong with the text, in one line.
    ///
    /// ```
    /// use lowlat_core::Facts;
    /// use lowlat_core::guard::Value;
    /// let text = r#"{"isa": "sm_90", "tp_size": 2, "model": {"num_heads": 64}}"#;
    /// assert_eq!(Facts::from_json(text).unwrap().model["num_heads"], Value::from(64));
    /// ```
    pub fn from_json(text: &str) -> Result<Self, ReadError> {
        let read: FactsText =
            serde_json::from_str(text).map_err(|error| ReadError(format!("facts: {error}")))?;
        Ok(Self {
            isa: read.isa,
            tp_size: read.tp_size,
            dtype: read.dtype,
            model: read.model,
            server_args: read.server_args,
            env: read.env,
            resident_blocks: read.resident_blocks,
            features: read.features,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard::guard;

    /// Both were found by `tests/fuzz`.
    #[test]
    fn a_unit_of_nothing_is_refused_and_divides_nothing() {
        let text = r#"{"name": "a", "isas": ["b"], "divides": [{"field": "heads", "unit": 0}]}"#;
        assert_eq!(
            Requirements::from_json(text).unwrap_err().to_string(),
            "requirements: divides: the unit of heads is 0; at least 1 is needed"
        );
        let mut requirements = Requirements::new("a", &["b"]);
        requirements.divides.push(Divides::new("heads", 0));
        let facts = r#"{"isa": "b", "tp_size": 2, "model": {"heads": 7}}"#;
        let declines = guard(&Facts::from_json(facts).unwrap(), &requirements).unwrap_err();
        assert!(
            declines[0].to_string().starts_with("[105] heads is 7;"),
            "{declines:?}"
        );
    }

    #[test]
    fn what_an_error_quotes_is_one_line() {
        let error = Requirements::from_json("{\"a\\nb\": 1}")
            .unwrap_err()
            .to_string();
        assert!(error.contains("unknown field `a\\nb`"), "{error}");
        let text = r#"{"isa": "x\u0000y", "tp_size": 1}"#;
        let facts = Facts::from_json(text).unwrap();
        let declines = guard(&facts, &Requirements::new("a", &["b"])).unwrap_err();
        assert_eq!(
            declines[0].to_string(),
            "[101] isa is x\\u{0}y; these kernels need b"
        );
    }
}

//! What a number of the report means: its unit and its sentence, from the report's schema.

use serde_json::Value;

use crate::report::SCHEMA;

/// The schema, read once a page.
pub struct Meanings {
    schema: Value,
}

/// One number's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meaning {
    /// `tokens`, `s`; empty for what is no number.
    pub unit: String,
    /// One sentence.
    pub sentence: String,
}

impl Meanings {
    /// Reads the schema.
    ///
    /// # Panics
    /// Never: the schema is built in, and a test reads it.
    #[must_use]
    pub fn read() -> Self {
        Self {
            schema: serde_json::from_str(SCHEMA).expect("the schema is JSON"),
        }
    }

    /// Of the field at a JSON pointer into the report (`/totals/requests`, `/requests/3/ttft_s`).
    ///
    /// ```
    /// use lowlat_engine::page::meaning::Meanings;
    /// let p90 = Meanings::read().of("/latency/ttft_s/p90");
    /// assert_eq!(p90.unit, "s");
    /// assert!(p90.sentence.starts_with("90 % of the requests"));
    /// assert_eq!(Meanings::read().of("/requests/12/output_tokens").unit, "tokens");
    /// ```
    ///
    /// # Panics
    /// When the report has no such field.
    #[must_use]
    pub fn of(&self, pointer: &str) -> Meaning {
        let mut node = &self.schema;
        let mut unit = "";
        let mut sentence = "";
        for name in pointer.split('/').skip(1) {
            node = self.step(node, name);
            let word = |key: &str| node.get(key).and_then(Value::as_str);
            unit = word("unit").unwrap_or(unit);
            sentence = word("description").unwrap_or(sentence);
        }
        Meaning {
            unit: unit.into(),
            sentence: sentence.into(),
        }
    }

    fn step<'a>(&'a self, node: &'a Value, name: &str) -> &'a Value {
        let node = match node.get("$ref").and_then(Value::as_str) {
            Some(link) => self.schema.pointer(link.trim_start_matches('#')),
            None => Some(node),
        };
        let inner = node.and_then(|node| {
            let field = node.get("properties").and_then(|fields| fields.get(name));
            let item = || node.get("items").filter(|_| name.parse::<usize>().is_ok());
            let other = || {
                node.get("additionalProperties")
                    .filter(|node| node.is_object())
            };
            field.or_else(item).or_else(other)
        });
        inner.unwrap_or_else(|| panic!("the report's schema has {name}"))
    }
}

//! JSON in which no object has a name twice. The published reader keeps the last of the two, so a
//! field that was edited in one place only would decide silently.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Most names that are listed.
const MAX_LISTED: usize = 16;
/// Most characters of a path that are shown.
const MAX_SHOWN: usize = 120;

/// The value, and the path of every field that is there twice, in the file's order.
pub(super) fn parse(text: &str) -> Result<(Value, Vec<String>), serde_json::Error> {
    let mut twice = Vec::new();
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let seed = Seed {
        path: String::new(),
        twice: &mut twice,
    };
    let value = seed.deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok((value, twice))
}

/// Reads one value, whose fields' paths begin with `path`.
struct Seed<'a> {
    path: String,
    twice: &'a mut Vec<String>,
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        let number = Number::from_f64(value).ok_or_else(|| E::custom("a number out of range"))?;
        Ok(number.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(Seed {
            path: format!("{}{}.", self.path, list.len()),
            twice: &mut *self.twice,
        })? {
            list.push(item);
        }
        Ok(list.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(name) = fields.next_key::<String>()? {
            let path = format!("{}{name}", self.path);
            if map.contains_key(&name) {
                // A name may be anything; a line stays a line, and not too long.
                let shown: String = path.escape_default().take(MAX_SHOWN).collect();
                if self.twice.len() < MAX_LISTED && !self.twice.contains(&shown) {
                    self.twice.push(shown);
                }
            }
            let value = fields.next_value_seed(Seed {
                path: format!("{path}."),
                twice: &mut *self.twice,
            })?;
            map.insert(name, value);
        }
        Ok(map.into())
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn every_value_is_read_as_the_published_reader_reads_it() {
        for text in [
            r#"{"a": [1, -2, 3.5, 1e300, "x\n", null, true, {}], "b": {"a": {"a": []}}}"#,
            "18446744073709551615",
            "\"text\"",
        ] {
            let (value, twice) = parse(text).unwrap();
            assert_eq!(
                value,
                serde_json::from_str::<serde_json::Value>(text).unwrap()
            );
            assert!(twice.is_empty(), "{twice:?}");
        }
        for text in ["", "{", "{\"a\" 1}", "1 2", "[1,]", "1e999"] {
            let ours = parse(text).unwrap_err().to_string();
            let theirs = serde_json::from_str::<serde_json::Value>(text).unwrap_err();
            assert_eq!(ours, theirs.to_string());
        }
        let deep = "[".repeat(100_000);
        assert!(
            parse(&deep)
                .unwrap_err()
                .to_string()
                .contains("recursion limit")
        );
    }

    #[test]
    fn names_that_are_there_twice_are_listed_once_each() {
        let text = r#"{"a": 1, "b": {"c": 1, "c": 2, "c": 3}, "a": 2, "d": [{"e": 1, "e": 1}]}"#;
        let (value, twice) = parse(text).unwrap();
        assert_eq!(twice, ["b.c", "a", "d.0.e"]);
        assert_eq!(value["a"], 2);
    }
}

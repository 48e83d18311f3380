//! JSON as a tree that remembers where it failed.
//!
//! `serde_json::Value` silently keeps the last of two fields of one name and knows no path; a
//! trace reader must name the field that is wrong.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

/// One JSON value.
#[derive(Clone, Debug, PartialEq)]
pub enum Node {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A whole number that fits.
    Whole(i64),
    /// Any other number; never NaN or infinite.
    Real(f64),
    /// A string.
    Text(String),
    /// An array.
    List(Vec<Node>),
    /// An object, in the file's order, no name twice.
    Object(Vec<(String, Node)>),
}

impl Node {
    /// The value in words, short enough for an error line.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::Null => "null".into(),
            Self::Bool(value) => value.to_string(),
            Self::Whole(value) => value.to_string(),
            Self::Real(value) => format!("{value:?}"),
            Self::Text(text) if text.chars().count() <= 40 => format!("{text:?}"),
            Self::Text(text) => format!("a string of {} bytes", text.len()),
            Self::List(items) => format!("a list of {}", items.len()),
            Self::Object(_) => "an object".into(),
        }
    }
}

/// A name or a path out of a file, short enough for an error line: its two ends.
///
/// ```
/// use lowlat_engine::json::shortened;
/// assert_eq!(shortened("requests[3].in"), "requests[3].in");
/// assert_eq!(shortened(&"x".repeat(1000)).len(), 163);
/// ```
#[must_use]
pub fn shortened(text: &str) -> Cow<'_, str> {
    const END: usize = 80;
    let num_chars = text.chars().count();
    if num_chars <= 2 * END {
        return text.into();
    }
    let first: String = text.chars().take(END).collect();
    let last: String = text.chars().skip(num_chars - END).collect();
    format!("{first}...{last}").into()
}

/// Why a text is not one JSON value, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// Path of the value that was being read (`requests[3].in`), empty at the top.
    pub path: String,
    /// 1-based.
    pub line: usize,
    /// 1-based, in bytes.
    pub column: usize,
    /// Whether the text ended too early.
    pub truncated: bool,
    /// What the parser saw.
    pub words: String,
}

/// Reads one JSON value. What follows it in `text` must be white space.
///
/// # Errors
/// [`ParseError`] with path, line and column; also for an object that has a name twice.
///
/// ```
/// use lowlat_engine::json::{parse, Node};
/// assert_eq!(parse("[1, 2.5]").unwrap(), Node::List(vec![Node::Whole(1), Node::Real(2.5)]));
/// let error = parse(r#"{"requests": [{"in": 1e400}]}"#).unwrap_err();
/// assert_eq!(error.path, "requests[0].in");
/// ```
pub fn parse(text: &str) -> Result<Node, ParseError> {
    let path = RefCell::new(Vec::new());
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let result = NodeSeed { path: &path }
        .deserialize(&mut deserializer)
        .and_then(|node| deserializer.end().map(|()| node));
    result.map_err(|error| {
        let words = error.to_string();
        let place = format!(" at line {} column {}", error.line(), error.column());
        ParseError {
            path: path_text(&path.borrow()),
            line: error.line(),
            column: error.column(),
            truncated: error.is_eof(),
            words: words.strip_suffix(&place).unwrap_or(&words).to_string(),
        }
    })
}

enum PathPart {
    Field(String),
    Index(usize),
}

fn path_text(parts: &[PathPart]) -> String {
    let mut text = String::new();
    for part in parts {
        match part {
            PathPart::Field(name) if text.is_empty() => text.push_str(name),
            PathPart::Field(name) => {
                text.push('.');
                text.push_str(name);
            }
            PathPart::Index(index) => text.push_str(&format!("[{index}]")),
        }
    }
    text
}

/// Reads one value; `path` is left at the failing value when it fails.
#[derive(Clone, Copy)]
struct NodeSeed<'a> {
    path: &'a RefCell<Vec<PathPart>>,
}

impl<'de> DeserializeSeed<'de> for NodeSeed<'_> {
    type Value = Node;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Node, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for NodeSeed<'_> {
    type Value = Node;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Node, E> {
        Ok(Node::Whole(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Node, E> {
        // Above i64 no field of ours has a meaning, so the rounding only shows in an error line.
        Ok(i64::try_from(value).map_or(Node::Real(value as f64), Node::Whole))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Node, E> {
        Ok(Node::Real(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Node, E> {
        Ok(Node::Text(value.to_string()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Node, A::Error> {
        let mut items = Vec::new();
        loop {
            self.path.borrow_mut().push(PathPart::Index(items.len()));
            let Some(item) = seq.next_element_seed(self)? else {
                break;
            };
            self.path.borrow_mut().pop();
            items.push(item);
        }
        self.path.borrow_mut().pop();
        Ok(Node::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let mut names = HashSet::new();
        let mut fields = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            self.path.borrow_mut().push(PathPart::Field(name.clone()));
            if !names.insert(name.clone()) {
                return Err(A::Error::custom("the field is there twice"));
            }
            let value = map.next_value_seed(self)?;
            self.path.borrow_mut().pop();
            fields.push((name, value));
        }
        Ok(Node::Object(fields))
    }
}

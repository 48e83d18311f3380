//! A value of a configuration field, a server argument or an environment variable.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A plain value, as it was seen. Numbers compare by value: 10 equals 10.0.
///
/// ```
/// use lowlat_core::guard::Value;
/// assert_eq!(Value::from(10), Value::Float(10.0));
/// assert_ne!(Value::from("10"), Value::from(10));
/// assert_eq!(Value::from(true).to_string(), "true");
/// ```
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Value {
    /// True or false.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// Any other number.
    Float(f64),
    /// Text.
    Text(String),
    /// A list.
    List(Vec<Value>),
}

impl Value {
    /// How a server takes this value of `argument` on its command line.
    pub(crate) fn as_flag(&self, argument: &str) -> String {
        let flag = argument.replace('_', "-");
        match self {
            Self::Bool(true) => format!("--{flag}"),
            Self::Bool(false) => format!("leave out --{flag}"),
            other => format!("--{flag} {other}"),
        }
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Bool(a), Self::Bool(b)) => a == b,
            (Self::Int(a), Self::Int(b)) => a == b,
            (Self::Float(a), Self::Float(b)) => a == b,
            // Configuration numbers are far below 2^53, where the conversion is exact.
            (Self::Int(int), Self::Float(float)) | (Self::Float(float), Self::Int(int)) => {
                *int as f64 == *float
            }
            (Self::Text(a), Self::Text(b)) => a == b,
            (Self::List(a), Self::List(b)) => a == b,
            _ => false,
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool(value) => write!(f, "{value}"),
            Self::Int(value) => write!(f, "{value}"),
            Self::Float(value) => write!(f, "{value}"),
            Self::Text(value) => f.write_str(value),
            Self::List(values) => {
                f.write_str("[")?;
                for (idx, value) in values.iter().enumerate() {
                    if 0 < idx {
                        f.write_str(", ")?;
                    }
                    write!(f, "{value}")?;
                }
                f.write_str("]")
            }
        }
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<i64> for Value {
    fn from(value: i64) -> Self {
        Self::Int(value)
    }
}

impl From<i32> for Value {
    fn from(value: i32) -> Self {
        Self::Int(value.into())
    }
}

impl From<u32> for Value {
    fn from(value: u32) -> Self {
        Self::Int(value.into())
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Self::Text(value.to_owned())
    }
}

impl From<String> for Value {
    fn from(value: String) -> Self {
        Self::Text(value)
    }
}

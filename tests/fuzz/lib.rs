//! Inputs that are almost right: a good one, changed a few times. Changes are data, so that a
//! failing case shrinks to few of them; the seed is fixed, so that a run is the same everywhere.
//!
//! `PROPTEST_CASES` makes a run longer, `PROPTEST_RNG_SEED` another one.
#![deny(missing_docs)]

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed};
use serde_json::Value;

/// Numbers at which readers break: signs, widths of integers, exactness of floats, sizes.
const NUMBERS: [&str; 24] = [
    "0",
    "-0",
    "1",
    "-1",
    "2",
    "3",
    "63",
    "64",
    "65",
    "127",
    "255",
    "256",
    "65536",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "9007199254740993",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "1e-9",
    "0.5",
];

/// Whole values that stand where another kind is expected.
const VALUES: [&str; 12] = [
    "null",
    "true",
    "false",
    "\"\"",
    "\"x\"",
    "[]",
    "{}",
    "[[]]",
    "[0]",
    "{\"a\":1}",
    "\"0x0000000000000000\"",
    "\"\\u0000\\ud83d\\ude00\"",
];

/// Bytes that mean something to some reader.
const BYTES: &[u8] = b"{}[]\",:\\0123456789-+.eExnul \n\t\x00\x7f\x80\xc3\xff";

/// One change: what, where, and with what. The numbers are taken modulo what there is.
pub type Change = (u8, u32, u32);

/// A few changes.
pub fn changes() -> impl Strategy<Value = Vec<Change>> {
    prop::collection::vec(any::<Change>(), 0..8)
}

/// `cases` in CI, or as many as `PROPTEST_CASES` says; always the same ones unless
/// `PROPTEST_RNG_SEED` says otherwise.
pub fn config(cases: u32) -> Config {
    let default = Config::default();
    let asked = std::env::var_os("PROPTEST_CASES").is_some();
    Config {
        cases: if asked { default.cases } else { cases },
        rng_seed: match default.rng_seed {
            RngSeed::Random => RngSeed::Fixed(0),
            fixed => fixed,
        },
        failure_persistence: None,
        ..default
    }
}

/// Changes bytes: flips, replaces, inserts, removes, repeats, cuts.
pub fn change_bytes(seed: &[u8], changes: &[Change]) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for &(kind, place, with) in changes {
        let at = place as usize % (bytes.len() + 1);
        let length = (with as usize >> 8) % 64;
        let end = (at + length).min(bytes.len());
        let byte = BYTES[with as usize % BYTES.len()];
        match kind % 8 {
            0 => {
                if let Some(seen) = bytes.get_mut(at) {
                    *seen ^= 1 << (with % 8);
                }
            }
            1 => {
                if let Some(seen) = bytes.get_mut(at) {
                    *seen = byte;
                }
            }
            2 => bytes.insert(at, byte),
            3 => drop(bytes.drain(at..end)),
            4 => {
                let again = bytes[at..end].to_vec();
                bytes.splice(at..at, again);
            }
            5 => bytes.truncate(at),
            6 => {
                // A number that is there becomes another.
                let digit = |byte: &u8| byte.is_ascii_digit();
                if let Some(start) = bytes[at..].iter().position(digit) {
                    let start = at + start;
                    let length = bytes[start..].iter().take_while(|byte| digit(byte)).count();
                    let number = NUMBERS[with as usize % NUMBERS.len()];
                    bytes.splice(start..start + length, number.bytes());
                }
            }
            _ => drop(bytes.splice(at..end, vec![byte; length])),
        }
    }
    bytes
}

/// Changes a JSON value as a value: other kinds, other numbers, fields gone, repeated or nested.
pub fn change_json(seed: &Value, changes: &[Change]) -> Value {
    let mut value = seed.clone();
    for &(kind, place, with) in changes {
        let count = count(&value);
        let mut left = place as usize % count;
        change_node(&mut value, &mut left, kind, with);
    }
    value
}

fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(list) => list.iter().map(count).sum::<usize>(),
        Value::Object(fields) => fields.values().map(count).sum(),
        _ => 0,
    }
}

/// Changes the node that is `left` places from here, depth first.
fn change_node(value: &mut Value, left: &mut usize, kind: u8, with: u32) -> bool {
    if *left == 0 {
        change_here(value, kind, with);
        return true;
    }
    *left -= 1;
    match value {
        Value::Array(list) => list
            .iter_mut()
            .any(|value| change_node(value, left, kind, with)),
        Value::Object(fields) => fields
            .values_mut()
            .any(|value| change_node(value, left, kind, with)),
        _ => false,
    }
}

fn change_here(value: &mut Value, kind: u8, with: u32) {
    let read = |text: &str| serde_json::from_str(text).unwrap_or(Value::Null);
    let with = with as usize;
    match (kind % 8, &mut *value) {
        (0, Value::Array(list)) if !list.is_empty() => drop(list.remove(with % list.len())),
        (0, Value::Object(fields)) if !fields.is_empty() => {
            let name = fields.keys().nth(with % fields.len()).cloned();
            name.and_then(|name| fields.remove(&name));
        }
        (1, Value::Array(list)) if !list.is_empty() => {
            let again = list[with % list.len()].clone();
            list.push(again);
        }
        (1, Value::Object(fields)) => drop(fields.insert(format!("new{with}"), Value::Null)),
        (2, Value::Array(list)) => {
            let long = list.first().cloned().unwrap_or(Value::from(with));
            list.resize(with % 300, long);
        }
        (2, Value::String(text)) => *text = text.repeat(with % 200),
        (3, Value::String(text)) => text.insert(0, char::from_u32(with as u32).unwrap_or('\n')),
        (4, _) => {
            for _ in 0..with % 200 {
                *value = Value::Array(vec![value.take()]);
            }
        }
        (5, _) => *value = read(VALUES[with % VALUES.len()]),
        _ => *value = read(NUMBERS[with % NUMBERS.len()]),
    }
}

//! Every golden vector through the engine's own binding: `reference` gives the same bytes and
//! `scalar` meets the bound that its case declares.

use std::fs;
use std::path::{Path, PathBuf};

use lowlat_engine::kernels::Kernels;
use lowlat_engine::kernels::abi::Dtype;
use lowlat_engine::kernels::ops::OpArray;
use serde::Deserialize;

#[path = "support/engine.rs"]
mod support;
use support::kernels;

#[derive(Deserialize)]
struct Case {
    op: String,
    models: Vec<String>,
    inputs: Vec<Entry>,
    outputs: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    file: String,
    fnv1a64: String,
    #[serde(default)]
    bounds: std::collections::BTreeMap<String, String>,
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

fn folders() -> Vec<PathBuf> {
    let entries = fs::read_dir(golden()).expect("tests/golden");
    let mut all: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    all.retain(|path| path.is_dir());
    all.sort();
    assert!(!all.is_empty(), "tests/golden is empty");
    all
}

fn read_case(folder: &Path) -> Case {
    let text = fs::read_to_string(folder.join("case.json")).unwrap();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
}

fn read_bytes(folder: &Path, entry: &Entry) -> Vec<u8> {
    let data = fs::read(folder.join(&entry.file)).unwrap();
    let digest = data.iter().fold(0xcbf2_9ce4_8422_2325_u64, |digest, byte| {
        (digest ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    });
    let seen = format!("{digest:016x}");
    assert_eq!(seen, entry.fnv1a64, "{}/{}", folder.display(), entry.file);
    data
}

fn dtype(word: &str) -> Dtype {
    match word {
        "u8" => Dtype::U8,
        "i32" => Dtype::I32,
        "i64" => Dtype::I64,
        "f32" => Dtype::F32,
        "bf16" => Dtype::Bf16,
        other => panic!("no dtype {other}"),
    }
}

fn run(kernels: &Kernels, folder: &Path, case: &Case, model: &str, platform: &str) -> Vec<OpArray> {
    let inputs = case.inputs.iter().map(|entry| {
        let mut array = OpArray::zeroed(&entry.name, dtype(&entry.dtype), &entry.shape);
        array
            .data
            .as_mut_slice()
            .copy_from_slice(&read_bytes(folder, entry));
        array
    });
    let inputs: Vec<OpArray> = inputs.collect();
    kernels.op_run(&case.op, model, platform, &inputs).unwrap()
}

/// Bits of each element, widened.
fn bits(data: &[u8], word: &str) -> Vec<u32> {
    match word {
        "bf16" => data
            .chunks_exact(2)
            .map(|two| u32::from(u16::from_le_bytes([two[0], two[1]])))
            .collect(),
        _ => data
            .chunks_exact(4)
            .map(|four| u32::from_le_bytes(four.try_into().unwrap()))
            .collect(),
    }
}

/// A float's place among the floats of its format; both zeros are 0.
fn place(bits: u32, word: &str) -> i64 {
    let sign = if word == "bf16" { 0x8000 } else { 0x8000_0000 };
    let size = i64::from(bits & (sign - 1));
    if bits & sign == 0 { size } else { -size }
}

fn measure(metric: &str, word: &str, got: &[u8], want: &[u8]) -> f64 {
    let value = |bits: u32| {
        let shift = if word == "bf16" { 16 } else { 0 };
        f64::from(f32::from_bits(bits << shift))
    };
    let (mut diff_sq, mut want_sq, mut worst) = (0.0, 0.0, 0.0_f64);
    for (a_bits, b_bits) in bits(got, word).into_iter().zip(bits(want, word)) {
        let (a, b) = (value(a_bits), value(b_bits));
        if !b.is_finite() || a.is_nan() {
            if a.is_nan() != b.is_nan() || (b.is_infinite() && a != b) {
                return f64::INFINITY;
            }
            continue;
        }
        diff_sq += (a - b) * (a - b);
        want_sq += b * b;
        worst = worst.max(match metric {
            "max_ulp" => (place(a_bits, word) - place(b_bits, word)).abs() as f64,
            "max_rel" if a != b => (a - b).abs() / b.abs(),
            "max_rel" => 0.0,
            _ => (a - b).abs(),
        });
    }
    match metric {
        "rel_l2" if want_sq > 0.0 => (diff_sq / want_sq).sqrt(),
        "rel_l2" => diff_sq.sqrt(),
        "max_ulp" | "max_abs" | "max_rel" => worst,
        other => panic!("no rule for the metric {other}"),
    }
}

fn e4m3_value(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match exponent {
        15 if code & 7 == 7 => f32::NAN,
        0 => mantissa * 2_f32.powi(-9),
        _ => (8.0 + mantissa) * 2_f32.powi(exponent - 10),
    };
    if code & 0x80 == 0 { size } else { -size }
}

/// V4's index keys, 128 e4m3 codes and an fp32 scale a row, as the bytes of fp32 values.
fn key_values(rows: &[u8]) -> Vec<u8> {
    let row_values = |row: &[u8]| {
        let (codes, scale) = row.split_at(128);
        let scale = f32::from_le_bytes(scale.try_into().unwrap());
        codes
            .iter()
            .flat_map(|code| (e4m3_value(*code) * scale).to_le_bytes())
            .collect::<Vec<u8>>()
    };
    rows.chunks_exact(132).flat_map(row_values).collect()
}

fn meets(bound: &str, word: &str, got: &[u8], want: &[u8]) -> bool {
    if bound == "bitwise" || got.len() != want.len() {
        return got == want;
    }
    if let Some(of_values) = bound.strip_prefix("values ") {
        return meets(of_values, "f32", &key_values(got), &key_values(want));
    }
    let (metric, limit) = bound.split_once(" <= ").expect("metric <= bound");
    measure(metric, word, got, want) <= limit.parse().unwrap()
}

#[test]
fn vectors_are_whole_and_name_known_operations() {
    // Runs without the kernels, too.
    for folder in folders() {
        let case = read_case(&folder);
        let name = folder.file_name().unwrap().to_str().unwrap();
        // The operation alone where V4.1 has it; V4's own cases say so.
        let suffix = name.strip_prefix(&case.op).expect("an operation's name");
        let of_v41 = case.models.iter().any(|model| model == "v41");
        assert_eq!(of_v41, suffix.is_empty(), "{name}");
        assert!(of_v41 || suffix.starts_with("_v4"), "{name}");
        for entry in case.inputs.iter().chain(&case.outputs) {
            let elements: usize = entry.shape.iter().product();
            let bytes = read_bytes(&folder, entry).len();
            assert_eq!(
                bytes,
                elements * dtype(&entry.dtype).bytes(),
                "{}",
                entry.file
            );
        }
    }
}

#[test]
fn platforms_meet_the_golden_vectors() {
    let Some(kernels) = kernels() else { return };
    for folder in folders() {
        let case = read_case(&folder);
        let runs = case
            .models
            .iter()
            .flat_map(|model| ["reference", "scalar"].map(|platform| (model, platform)));
        for (model, platform) in runs {
            let got = run(&kernels, &folder, &case, model, platform);
            assert_eq!(got.len(), case.outputs.len(), "{}", case.op);
            for want in &case.outputs {
                let array = got.iter().find(|array| array.name == want.name).unwrap();
                assert_eq!(array.shape, want.shape, "{}: {}", case.op, want.name);
                let bound = match platform {
                    "reference" => "bitwise",
                    _ => want.bounds[platform].as_str(),
                };
                assert!(
                    meets(
                        bound,
                        &want.dtype,
                        array.data.as_slice(),
                        &read_bytes(&folder, want)
                    ),
                    "{} on {platform}: {} misses {bound}",
                    folder.display(),
                    want.name
                );
            }
        }
    }
}

#[test]
fn the_comparison_sees_a_wrong_element() {
    let want = [0x80, 0x3f, 0x00, 0x00];
    let next = [0x81, 0x3f, 0x00, 0x00];
    let negative_zero = [0x80, 0x3f, 0x00, 0x80];
    let nan = [0x80, 0x3f, 0xff, 0xff];
    assert!(meets("max_ulp <= 0", "bf16", &want, &want));
    assert!(
        !meets("bitwise", "bf16", &next, &want) && !meets("max_ulp <= 0", "bf16", &next, &want)
    );
    assert!(meets("max_ulp <= 1", "bf16", &next, &want));
    assert!(meets("rel_l2 <= 8e-3", "bf16", &next, &want));
    assert!(!meets("rel_l2 <= 7e-3", "bf16", &next, &want));
    assert!(meets("max_ulp <= 0", "bf16", &negative_zero, &want));
    assert!(!meets("rel_l2 <= 9", "bf16", &nan, &want));
    // A key of ones under the scale 2; a code one step up; a scale one step up.
    let mut key = [0x38_u8; 132];
    key[128..].copy_from_slice(&2.0_f32.to_le_bytes());
    assert!(meets("values rel_l2 <= 0", "u8", &key, &key));
    let mut other = key;
    other[7] = 0x39;
    assert!(!meets("values rel_l2 <= 1e-2", "u8", &other, &key));
    assert!(meets("values rel_l2 <= 2e-2", "u8", &other, &key));
    other = key;
    other[128] = 1;
    assert!(!meets("values rel_l2 <= 1e-7", "u8", &other, &key));
    assert!(meets("values rel_l2 <= 2e-7", "u8", &other, &key));
}

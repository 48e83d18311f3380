//! The Rust mirror of `lowlat/kernels.h` against what a C compiler makes of the header: sizes,
//! offsets, the order and number of fields, and the constants. (Proved by swapping two fields of
//! `Draft` and by leaving the last one of `Accept` out: both were named.)

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use lowlat_engine::kernels::abi;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn header() -> String {
    std::fs::read_to_string(root().join("cpp_kernels/include/lowlat/kernels.h")).unwrap()
}

/// Text without `/* */`; the header has no other comments.
fn without_comments(text: &str) -> String {
    let mut kept = String::new();
    let mut rest = text;
    while let Some(start) = rest.find("/*") {
        kept.push_str(&rest[..start]);
        let end = rest[start..].find("*/").expect("a comment ends") + start;
        rest = &rest[end + 2..];
    }
    kept + rest
}

/// Structs of the header with their fields in order. Arrays lose their sizes, pointers their stars.
fn header_structs() -> BTreeMap<String, Vec<String>> {
    let text = without_comments(&header());
    let mut structs = BTreeMap::new();
    for part in text.split("typedef struct ").skip(1) {
        let Some((name, rest)) = part.split_once(" {") else {
            continue; // An opaque handle has no body.
        };
        if name.contains(';') {
            continue;
        }
        let (body, _) = rest.split_once('}').expect("a struct's body ends");
        let mut fields = Vec::new();
        for declaration in body
            .split(';')
            .map(str::trim)
            .filter(|text| !text.is_empty())
        {
            for (index, word) in declaration.split(',').enumerate() {
                let word = if index == 0 {
                    word.split_whitespace()
                        .last()
                        .expect("a declaration has a name")
                } else {
                    word.trim()
                };
                let name = word.trim_start_matches('*').split('[').next().unwrap();
                fields.push(name.to_owned());
            }
        }
        structs.insert(name.to_owned(), fields);
    }
    structs
}

/// Compiles `expressions` as C11 against the header and returns their values in order. None where
/// there is no C compiler.
fn values_in_c(expressions: &[String]) -> Option<Vec<u64>> {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed); // Only a name hangs on it.
    let folder = std::env::temp_dir().join(format!("lowlat-layout-{}-{call}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut source = String::from(
        "#include <lowlat/kernels.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n",
    );
    for expression in expressions {
        writeln!(
            source,
            "  printf(\"%llu\\n\", (unsigned long long)({expression}));"
        )
        .unwrap();
    }
    source.push_str("  return 0;\n}\n");
    let (file, program) = (folder.join("layout.c"), folder.join("layout"));
    std::fs::write(&file, source).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let built = Command::new(&compiler)
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(root().join("cpp_kernels/include"))
        .arg(&file)
        .arg("-o")
        .arg(&program)
        .output();
    let values = match built {
        Err(error) => {
            println!("skipped: no C compiler ({compiler}: {error})");
            None
        }
        Ok(built) => {
            assert!(
                built.status.success(),
                "{}",
                String::from_utf8_lossy(&built.stderr)
            );
            let ran = Command::new(&program).output().unwrap();
            let text = String::from_utf8(ran.stdout).unwrap();
            Some(text.lines().map(|line| line.parse().unwrap()).collect())
        }
    };
    std::fs::remove_dir_all(&folder).unwrap();
    values
}

#[test]
fn every_struct_of_the_header_is_mirrored_field_for_field() {
    let mirrored: BTreeMap<String, Vec<String>> = abi::layout()
        .into_iter()
        .map(|layout| {
            let fields = layout
                .fields
                .iter()
                .map(|(name, _)| (*name).to_owned())
                .collect();
            (layout.c_name.to_owned(), fields)
        })
        .collect();
    let in_header = header_structs();
    assert!(
        in_header.len() >= 8,
        "the header was read: {:?}",
        in_header.keys()
    );
    for (name, fields) in &in_header {
        assert_eq!(mirrored.get(name), Some(fields), "{name}");
    }
    for name in mirrored.keys() {
        assert!(in_header.contains_key(name), "{name} is not in the header");
    }
}

#[test]
fn sizes_and_offsets_are_what_the_c_compiler_says() {
    let layouts = abi::layout();
    let (mut expressions, mut expected) = (Vec::new(), Vec::new());
    for layout in &layouts {
        let name = layout.c_name;
        expressions.push(format!("sizeof({name})"));
        expected.push(layout.bytes as u64);
        for (field, offset) in &layout.fields {
            expressions.push(format!("offsetof({name}, {field})"));
            expected.push(*offset as u64);
        }
    }
    let Some(seen) = values_in_c(&expressions) else {
        return;
    };
    assert_eq!(seen.len(), expected.len());
    for ((expression, seen), expected) in expressions.iter().zip(seen).zip(expected) {
        assert_eq!(
            expected, seen,
            "{expression}: Rust has the first, C the second"
        );
    }
}

#[test]
fn constants_are_the_headers() {
    let pairs: Vec<(&str, u64)> = vec![
        ("LOWLAT_KERNELS_ABI_VERSION", abi::ABI_VERSION.into()),
        ("LOWLAT_MAX_DIMS", abi::MAX_DIMS as u64),
        ("LOWLAT_MAX_LAYERS", abi::MAX_LAYERS as u64),
        ("LOWLAT_MAX_WIDTHS", abi::MAX_WIDTHS as u64),
        // A ballot holds as many as a model can be built for.
        ("LOWLAT_MAX_WIDTHS", lowlat_core::vote::MAX_WIDTHS as u64),
        ("LOWLAT_MAX_DRAFT_STAGES", abi::MAX_DRAFT_STAGES as u64),
        ("LOWLAT_MAX_ENGRAMS", abi::MAX_ENGRAMS as u64),
        ("LOWLAT_ENGRAM_NGRAMS", abi::ENGRAM_NGRAMS as u64),
        ("LOWLAT_ENGRAM_HEADS", abi::ENGRAM_HEADS as u64),
        ("LOWLAT_ENGRAM_SHIFTS", abi::ENGRAM_SHIFTS as u64),
        ("LOWLAT_PEER_HANDLE_BYTES", abi::PEER_HANDLE_BYTES as u64),
        ("LOWLAT_MAX_OP_OUTPUTS", abi::MAX_OP_OUTPUTS as u64),
        ("LOWLAT_V41", abi::KIND_V41.into()),
        ("LOWLAT_ROW_MAJOR", abi::ROW_MAJOR.into()),
        ("LOWLAT_WEIGHT", abi::ROLE_WEIGHT.into()),
        ("LOWLAT_POOL", abi::ROLE_POOL.into()),
        ("LOWLAT_MEMORY_DEVICE", abi::MEMORY_DEVICE.into()),
        ("LOWLAT_MEMORY_SHARED", abi::MEMORY_SHARED.into()),
        ("LOWLAT_OK", abi::STATUS_OK as u64),
        ("LOWLAT_U8", abi::Dtype::U8 as u64),
        ("LOWLAT_I32", abi::Dtype::I32 as u64),
        ("LOWLAT_I64", abi::Dtype::I64 as u64),
        ("LOWLAT_F32", abi::Dtype::F32 as u64),
        ("LOWLAT_BF16", abi::Dtype::Bf16 as u64),
        ("LOWLAT_E4M3", abi::Dtype::E4m3 as u64),
        ("LOWLAT_UE8M0", abi::Dtype::Ue8m0 as u64),
        ("LOWLAT_FP4X2", abi::Dtype::Fp4x2 as u64),
        ("LOWLAT_DECODE", abi::StepMode::Decode as u64),
        ("LOWLAT_TARGET_VERIFY", abi::StepMode::TargetVerify as u64),
        ("LOWLAT_EXTEND", abi::StepMode::Extend as u64),
    ];
    let names: Vec<String> = pairs.iter().map(|(name, _)| (*name).to_owned()).collect();
    let Some(seen) = values_in_c(&names) else {
        return;
    };
    for ((name, expected), seen) in pairs.iter().zip(seen) {
        assert_eq!(*expected, seen, "{name}: Rust has the first, C the second");
    }
}

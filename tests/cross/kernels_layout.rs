//! The Rust mirror of `lowlat/kernels.h` against what a C compiler makes of the header: sizes,
//! offsets, the order and number of fields, and the constants. (Proved by swapping two fields of
//! `Draft` and by leaving the last one of `Accept` out: both were named.)

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use lowlat_engine::kernels::abi;

#[path = "../rust/support/c_header.rs"]
mod c_header;

fn include() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../cpp_kernels/include")
}

fn values_in_c(expressions: &[String]) -> Option<Vec<u64>> {
    c_header::values_in_c(&include(), "kernels.h", expressions)
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
    let text = std::fs::read_to_string(include().join("lowlat/kernels.h")).unwrap();
    let in_header = c_header::structs(&text);
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

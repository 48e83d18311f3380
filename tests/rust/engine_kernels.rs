//! The binding of the kernels' C ABI: refusals, and single operations through a real library.
//! `tests/cross/kernels_layout.rs` holds its structs to the header.

use std::path::{Path, PathBuf};

use lowlat_engine::kernels::abi::Dtype;
use lowlat_engine::kernels::ops::OpArray;
use lowlat_engine::kernels::{Kernels, Status};

#[path = "support/engine.rs"]
mod support;
use support::kernels;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn a_library_that_is_none_is_refused_by_name() {
    let line = |path: &Path| Kernels::open(Some(path)).err().unwrap();
    let error = line(Path::new("/no/such/library.so"));
    assert_eq!(error.status, Status::Unavailable);
    assert!(
        error
            .message
            .contains("/no/such/library.so, which is no file"),
        "{error}"
    );
    let error = line(&repository().join("Cargo.toml"));
    assert!(
        error.message.contains("Cargo.toml cannot be opened"),
        "{error}"
    );
    assert!(
        error.message.contains("--kernels PATH or LOWLAT_KERNELS"),
        "{error}"
    );
    // A shared library that is not ours.
    let other = ["/lib/x86_64-linux-gnu/libm.so.6", "/usr/lib64/libm.so.6"].map(Path::new);
    if let Some(other) = other.into_iter().find(|path| path.exists()) {
        let error = line(other);
        assert!(
            error
                .message
                .contains("it has no lowlat_kernels_abi_version"),
            "{error}"
        );
    }
}

#[test]
fn an_operation_runs_and_refuses_by_name() {
    let Some(kernels) = kernels() else { return };
    assert!(kernels.op_list().contains("\"rank_sum\""));
    let mut partial = OpArray::zeroed("partial", Dtype::F32, &[2, 1, 4]);
    for (chunk, value) in partial
        .data
        .as_mut_slice()
        .chunks_exact_mut(4)
        .zip([1.0f32, 2.0, -3.5, 0.25, 0.5, -2.0, 4.0, 0.25])
    {
        chunk.copy_from_slice(&value.to_ne_bytes());
    }
    let outputs = kernels
        .op_run("rank_sum", "v41", "scalar", &[partial])
        .unwrap();
    assert_eq!(
        (outputs[0].name.as_str(), outputs[0].shape.as_slice()),
        ("y", &[1, 4][..])
    );
    let y: Vec<f32> = outputs[0]
        .data
        .as_slice()
        .chunks_exact(2)
        .map(|bits| f32::from_bits(u32::from(u16::from_ne_bytes([bits[0], bits[1]])) << 16))
        .collect();
    assert_eq!(y, [1.5, 0.0, 0.5, 0.5]);

    let wrong = OpArray::zeroed("parts", Dtype::F32, &[2, 1, 4]);
    let error = kernels
        .op_run("rank_sum", "v41", "scalar", &[wrong])
        .unwrap_err();
    assert_eq!(error.status, Status::Invalid);
    assert!(error.message.contains("part"), "{error}");
    let error = kernels
        .op_run("no_such_op", "v41", "scalar", &[])
        .unwrap_err();
    assert!(error.message.contains("no_such_op"), "{error}");
}

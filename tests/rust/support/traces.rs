//! Where tests find real traces.

use std::path::{Path, PathBuf};

/// The folder of the real traces, or `None` with a printed reason.
pub fn real_traces() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder = std::env::var_os("LOWLAT_TRACES")
        .map_or_else(|| root.join("../shared/data/traces"), PathBuf::from);
    if folder.is_dir() {
        return Some(folder);
    }
    println!(
        "skipped: no real traces in {} (LOWLAT_TRACES)",
        folder.display()
    );
    None
}

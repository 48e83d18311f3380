//! A command line that is run in this process, and the folders of its files. Not every test uses
//! all of it.
#![allow(dead_code)]

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// What a command line came to.
pub struct Ran {
    pub code: u8,
    pub out: String,
    pub err: String,
}

/// `run` takes the words, standard output and standard error, and gives the exit status.
pub fn ran(
    program: &str,
    args: &[&str],
    run: impl FnOnce(Vec<OsString>, &mut Vec<u8>, &mut Vec<u8>) -> u8,
) -> Ran {
    let words = std::iter::once(program).chain(args.iter().copied());
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let code = run(words.map(Into::into).collect(), &mut out, &mut err);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ran {
        code,
        out: text(out),
        err: text(err),
    }
}

/// An empty folder of a test's own, of those of `room`.
pub fn folder_of(room: &str, name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{room}_{name}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// The path as text.
pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The small trace of `examples/traces`.
pub fn small() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/traces/small.json");
    text(&path).to_owned()
}

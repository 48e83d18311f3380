//! The C face's ABI as a committed text: exported symbols, prototypes, sizes, offsets, numbers. An
//! engine that was compiled against one version must work with the library of the same version, so
//! each change here is seen, meant, and raises `LOWLAT_DISPATCH_ABI_VERSION` where it is no
//! addition. `make abi` writes the text. (Proved by adding a field in the middle of
//! `lowlat_step_facts` and by exporting one more function: both were named.)

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

#[path = "support/c_header.rs"]
mod c_header;

fn room() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

fn header() -> String {
    std::fs::read_to_string(room().join("include/lowlat/dispatch.h")).unwrap()
}

/// What the shared library that cargo built with this test exports. None without nm.
fn exported() -> Option<BTreeSet<String>> {
    let beside = std::env::current_exe().unwrap();
    let library = beside.with_file_name("liblowlat_capi.so");
    assert!(library.is_file(), "{} is not there", library.display());
    let listed = Command::new("nm")
        .args(["--dynamic", "--defined-only"])
        .arg(&library)
        .output();
    let listed = match listed {
        Ok(listed) if listed.status.success() => String::from_utf8(listed.stdout).unwrap(),
        other => {
            println!("skipped: nm does not run ({other:?})");
            return None;
        }
    };
    let names = listed.lines().filter_map(|line| line.split(' ').nth(2));
    Some(names.map(str::to_owned).collect())
}

/// Every prototype of the header on one line, ascending by name.
fn prototypes(code: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for declaration in code.split(';') {
        // Lines of the preprocessor and what opens `extern "C"` are no part of a declaration.
        let lines = declaration.lines().filter(|line| {
            !line.starts_with('#') && !line.starts_with("extern") && !line.starts_with('}')
        });
        let text: Vec<&str> = lines.flat_map(str::split_whitespace).collect();
        let text = text.join(" ");
        if let Some((before, _)) = text.split_once('(') {
            let name = before.rsplit([' ', '*']).next().unwrap().to_owned();
            found.push((name, text));
        }
    }
    found.sort();
    found
}

/// Names of the enums' constants, in the header's order.
fn constants(code: &str) -> Vec<String> {
    let names = code.lines().filter_map(|line| {
        let (name, value) = line.trim().split_once(" = ")?;
        (name.starts_with("LOWLAT_") && value.ends_with(',')).then(|| name.to_owned())
    });
    names.collect()
}

/// The text that is committed; None where a tool is missing.
fn snapshot() -> Option<String> {
    let header = header();
    let code = c_header::without_comments(&header);
    let mut lines = Vec::new();
    let mut expressions = Vec::new();
    for name in ["LOWLAT_DISPATCH_ABI_VERSION", "LOWLAT_BALLOT_WORDS"] {
        lines.push(name.to_owned());
        expressions.push(name.to_owned());
    }
    for (name, fields) in c_header::structs(&header) {
        lines.push(format!("sizeof {name}"));
        expressions.push(format!("sizeof({name})"));
        lines.push(format!("alignof {name}"));
        expressions.push(format!("_Alignof({name})"));
        for field in fields {
            lines.push(format!("offsetof {name}.{field}"));
            expressions.push(format!("offsetof({name}, {field})"));
            lines.push(format!("sizeof {name}.{field}"));
            expressions.push(format!("sizeof((({name}*)0)->{field})"));
        }
    }
    for name in constants(&code) {
        lines.push(name.clone());
        expressions.push(name);
    }
    let values = c_header::values_in_c(&room().join("include"), "dispatch.h", &expressions)?;
    let mut text = String::from("The ABI of lowlat/dispatch.h. Written by `make abi`.\n\n");
    for (line, value) in lines.iter().zip(values) {
        writeln!(text, "{line} = {value}").unwrap();
    }
    text.push('\n');
    for (_, prototype) in prototypes(&code) {
        writeln!(text, "{prototype}").unwrap();
    }
    text.push_str("\nexported:\n");
    for name in exported()? {
        writeln!(text, "{name}").unwrap();
    }
    Some(text)
}

#[test]
fn the_abi_is_the_committed_one() {
    let Some(text) = snapshot() else { return };
    let path = room().join("abi.txt");
    if std::env::var_os("LOWLAT_WRITE_ABI").is_some() {
        std::fs::write(&path, text).unwrap();
        return;
    }
    let committed = std::fs::read_to_string(&path).unwrap();
    let (old, new): (BTreeSet<_>, BTreeSet<_>) =
        (committed.lines().collect(), text.lines().collect());
    let gone: Vec<_> = old.difference(&new).collect();
    let come: Vec<_> = new.difference(&old).collect();
    assert!(
        committed == text,
        "the ABI changed; if that is meant, raise its version where it is no addition, and run \
         `make abi`\ngone: {gone:#?}\nnew: {come:#?}"
    );
}

#[test]
fn the_library_exports_the_header_and_nothing_else() {
    let declared: BTreeSet<String> = prototypes(&c_header::without_comments(&header()))
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    assert!(40 < declared.len(), "the header was read: {declared:?}");
    if let Some(exported) = exported() {
        assert_eq!(exported, declared);
    }
}

//! A C header as text, and what a C compiler makes of it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Text without `/* */`; the headers have no other comments among their declarations.
pub fn without_comments(text: &str) -> String {
    let mut kept = String::new();
    let mut rest = text;
    while let Some(start) = rest.find("/*") {
        kept.push_str(&rest[..start]);
        let end = rest[start..].find("*/").expect("a comment ends") + start;
        rest = &rest[end + 2..];
    }
    kept + rest
}

/// Structs of a header with their fields in order. Arrays lose their sizes, pointers their stars.
pub fn structs(header: &str) -> BTreeMap<String, Vec<String>> {
    let text = without_comments(header);
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

/// Compiles `expressions` as C11 against `lowlat/<header>` below `include` and returns their values
/// in order. None where there is no C compiler.
pub fn values_in_c(include: &Path, header: &str, expressions: &[String]) -> Option<Vec<u64>> {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed); // Only a name hangs on it.
    let folder = std::env::temp_dir().join(format!("lowlat-layout-{}-{call}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut source = format!(
        "#include <lowlat/{header}>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {{\n"
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
        .arg(include)
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

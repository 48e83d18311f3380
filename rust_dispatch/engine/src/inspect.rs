//! A graph record as tables, and what two of them differ in: `lowlat inspect`.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;

use comfy_table::Table;
use lowlat_core::graph_key::{Entry, GraphKey, Record, Seal};

use crate::EngineError;
use crate::report::new_table;
use crate::words::{count, visible};

/// A record is some kilobytes; a file beyond this is none, and is not read.
pub const MAX_BYTES: u64 = 64 << 20;

/// Reads the record in the file at `path`.
///
/// # Errors
/// [`EngineError::Refused`]: one line with the file, and whether it is truncated, of another kind
/// or of a newer version.
pub fn read(path: &Path) -> Result<Record, EngineError> {
    let refuse = |words: String| EngineError::Refused(format!("{}: {words}", path.display()));
    let unreadable = |error: std::io::Error| refuse(format!("cannot be read: {error}"));
    let metadata = fs::metadata(path).map_err(unreadable)?;
    if metadata.is_dir() {
        return Err(refuse("is a folder; a graph record is needed".into()));
    }
    // A pipe may never end, or never begin.
    if !metadata.is_file() {
        return Err(refuse(
            "is a pipe or a device; a graph record is needed".into(),
        ));
    }
    let file = fs::File::open(path).map_err(unreadable)?;
    let mut bytes = Vec::new();
    let read = file.take(MAX_BYTES + 1).read_to_end(&mut bytes);
    if read.map_err(unreadable)? as u64 > MAX_BYTES {
        return Err(refuse(format!(
            "is larger than {} bytes, which no graph record is",
            count(MAX_BYTES)
        )));
    }
    let text = String::from_utf8(bytes)
        .map_err(|_| refuse("not a graph record: it is no text in UTF-8".into()))?;
    Record::from_json(&text).map_err(|error| refuse(error.to_string()))
}

/// The record for a terminal of 100 columns: digests, what graphs were built from, keys with
/// their paths, and what each reads.
#[must_use]
pub fn to_text(record: &Record) -> String {
    let entries = record.entries();
    let mut digests = new_table();
    digests.add_row(vec!["graphs".into(), count(entries.len() as u64)]);
    digests.add_row(vec!["digest of the keys".into(), hex(record.keys_digest())]);
    digests.add_row(vec![
        "digest of the record (no addresses)".into(),
        hex(record.digest()),
    ]);
    let mut builds: Vec<Build> = Vec::new();
    let mut keys = new_table();
    keys.set_header(vec![
        "graph",
        "mode",
        "requests x rows",
        "width",
        "path",
        "build",
        "seals",
    ]);
    for (idx, Entry { key, path, seals }) in entries.iter().enumerate() {
        let build = Build::of(key);
        let place = builds
            .iter()
            .position(|known| *known == build)
            .unwrap_or_else(|| {
                builds.push(build);
                builds.len() - 1
            });
        keys.add_row(vec![
            idx.to_string(),
            key.mode.to_string(),
            format!("{} x {}", key.batch_size, key.tokens_per_request),
            key.width.to_string(),
            path.name().to_owned(),
            place.to_string(),
            seals.len().to_string(),
        ]);
    }
    let mut built = new_table();
    built.set_header(vec![
        "build",
        "shape",
        "isa",
        "numerics digest",
        "layout digest",
    ]);
    for (place, build) in builds.iter().enumerate() {
        built.add_row(vec![
            place.to_string(),
            visible(build.shape),
            visible(build.isa),
            hex(build.numerics_digest),
            hex(build.layout_digest),
        ]);
    }
    format!("{digests}\n{built}\n{keys}\n{}\n", seals_table(entries))
}

/// What the keys of one build have in common.
#[derive(PartialEq, Eq)]
struct Build<'a> {
    shape: &'a str,
    isa: &'a str,
    numerics_digest: u64,
    layout_digest: u64,
}

impl<'a> Build<'a> {
    fn of(key: &'a GraphKey) -> Self {
        Self {
            shape: &key.shape,
            isa: &key.isa,
            numerics_digest: key.numerics_digest,
            layout_digest: key.layout_digest,
        }
    }
}

/// What graphs read, by name; graphs that read the same thing stand in one line.
fn seals_table(entries: &[Entry]) -> Table {
    let mut order: Vec<&Seal> = Vec::new();
    let mut readers: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (graph, entry) in entries.iter().enumerate() {
        for seal in &entry.seals {
            let place = order.iter().position(|known| *known == seal);
            let place = place.unwrap_or_else(|| {
                order.push(seal);
                order.len() - 1
            });
            readers.entry(place).or_default().push(graph);
        }
    }
    let mut table = new_table();
    table.set_header(vec![
        "sealed",
        "dtype",
        "shape",
        "address",
        "read by graphs",
    ]);
    for (place, seal) in order.iter().enumerate() {
        let shape: Vec<String> = seal.shape.iter().map(i64::to_string).collect();
        table.add_row(vec![
            visible(&seal.name),
            visible(&seal.dtype),
            shape.join(" x "),
            format!("{:#x}", seal.address),
            ranges(&readers[&place]),
        ]);
    }
    table
}

/// `0-7, 9` for ascending numbers.
fn ranges(numbers: &[usize]) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 >= number => *last = number,
            _ => parts.push((number, number)),
        }
    }
    let words: Vec<String> = parts
        .into_iter()
        .map(|(first, last)| match first == last {
            true => first.to_string(),
            false => format!("{first}-{last}"),
        })
        .collect();
    words.join(", ")
}

fn hex(digest: u64) -> String {
    format!("{digest:#018x}")
}

#[cfg(test)]
mod tests {
    use super::ranges;

    #[test]
    fn numbers_in_a_row_are_a_range() {
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
        assert_eq!(ranges(&[]), "");
    }
}

//! Headers of safetensors files and the index beside them, read from bytes that nobody trusts.
//!
//! A file is the header's length (8 bytes, little endian), the header (JSON: each tensor's dtype,
//! shape and place) and the data. The published reader keeps the last of two entries of one name
//! and names no tensor in some of its errors, so this one is our own; a test reads the same files
//! with both.

use std::collections::HashSet;
use std::fmt;
use std::marker::PhantomData;

use lowlat_core::words::one_line;
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

/// Bytes in front of the header.
const LENGTH_BYTES: usize = 8;
/// Longest header that is read. A whole V4.1 in one file needs 13 MB.
const MAX_HEADER_BYTES: u64 = 64 << 20;
/// Most dimensions of a tensor.
const MAX_DIMS: usize = 8;
/// Free words of the writer; no tensor has this name.
const METADATA: &str = "__metadata__";
/// Characters of a name that an error shows.
const SHOWN: usize = 120;

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Element type by the format's name, such as `BF16`.
    pub dtype: String,
    /// Elements of each dimension.
    pub shape: Vec<u64>,
    /// Place of its first byte in the file.
    pub begin: usize,
    /// Place behind its last byte.
    pub end: usize,
}

/// The tensors of a file, in the order of their bytes. Every place is inside the file, and no two
/// overlap.
///
/// ```
/// use lowlat_engine::checkpoint::header;
/// let text = br#"{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}"#;
/// let mut file = (text.len() as u64).to_le_bytes().to_vec();
/// file.extend_from_slice(text);
/// assert_eq!(
///     header::entries(&file).unwrap_err(),
///     "ends after 0 bytes of data; a needs 4"
/// );
/// file.extend_from_slice(&[0; 4]);
/// assert_eq!(header::entries(&file).unwrap()[0].begin, file.len() - 4);
/// ```
///
/// # Errors
/// One line: the tensor where one is to blame, what was seen and what is needed.
pub fn entries(file: &[u8]) -> Result<Vec<Entry>, String> {
    let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(format!(
            "has {} bytes; a safetensors file has at least {LENGTH_BYTES}",
            file.len()
        ));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(format!(
            "says that its header has {length} bytes; a safetensors header has at most \
             {MAX_HEADER_BYTES}"
        ));
    }
    let Some((text, data)) = rest.split_at_checked(length as usize) else {
        return Err(format!(
            "ends {} bytes into its header; the header needs {length}",
            rest.len()
        ));
    };
    let text = std::str::from_utf8(text).map_err(|_| "has a header that is not UTF-8 text")?;
    let header: UniqueMap<RawEntry> = serde_json::from_str(text)
        .map_err(|error| format!("has a bad header: {}", one_line(&error.to_string())))?;
    let last = header.0.iter().max_by_key(|(_, raw)| raw.data_offsets.1);
    if let Some((name, raw)) = last.filter(|(_, raw)| raw.data_offsets.1 > data.len() as u64) {
        return Err(format!(
            "ends after {} bytes of data; {} needs {}",
            data.len(),
            shown(name),
            raw.data_offsets.1
        ));
    }
    let first = LENGTH_BYTES + length as usize;
    let mut entries = header
        .0
        .into_iter()
        .map(|(name, raw)| {
            raw.check()
                .map_err(|words| format!("{}: {words}", shown(&name)))
                .map(|(begin, end)| Entry {
                    name,
                    dtype: raw.dtype,
                    shape: raw.shape,
                    begin: first + begin,
                    end: first + end,
                })
        })
        .collect::<Result<Vec<_>, _>>()?;
    entries.sort_by(|a, b| (a.begin, a.end, &a.name).cmp(&(b.begin, b.end, &b.name)));
    let mut at = first;
    for entry in &entries {
        if entry.begin < at {
            return Err(format!(
                "{}: overlaps the tensor before it by {} bytes",
                shown(&entry.name),
                at - entry.begin
            ));
        }
        if entry.begin > at {
            return Err(format!(
                "{}: begins {} bytes behind the tensor before it; no tensor owns the bytes between",
                shown(&entry.name),
                entry.begin - at
            ));
        }
        at = entry.end;
    }
    if at != file.len() {
        return Err(format!(
            "has {} bytes behind its last tensor; needs none",
            file.len() - at
        ));
    }
    Ok(entries)
}

/// The index of a sharded checkpoint: each tensor's file.
///
/// ```
/// let text = br#"{"metadata": {}, "weight_map": {"norm.weight": "model-00001.safetensors"}}"#;
/// let map = lowlat_engine::checkpoint::header::index(text).unwrap();
/// assert_eq!(map, [("norm.weight".to_owned(), "model-00001.safetensors".to_owned())]);
/// ```
///
/// # Errors
/// One line: text that is no index, a name twice, a file that is not beside the index.
pub fn index(text: &[u8]) -> Result<Vec<(String, String)>, String> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: UniqueMap<String>,
    }
    let text = std::str::from_utf8(text).map_err(|_| "is not UTF-8 text")?;
    let index: Index = serde_json::from_str(text)
        .map_err(|error| format!("is no index: {}", one_line(&error.to_string())))?;
    let map = index.weight_map.0;
    if map.is_empty() {
        return Err("weight_map is empty; needs every tensor's file".into());
    }
    for (name, file) in &map {
        let plain = !file.contains(['/', '\\', '\0']) && file.ends_with(".safetensors");
        if !plain {
            return Err(format!(
                "{}: is in {}; needs the name of a .safetensors file beside the index",
                shown(name),
                shown(file)
            ));
        }
    }
    Ok(map)
}

/// A name as error lines show it: without control characters and not too long.
pub(super) fn shown(name: &str) -> String {
    let plain = |c: char| !c.is_control() && c != '\u{202e}';
    let mut text: String = name.chars().filter(|c| plain(*c)).take(SHOWN).collect();
    if text.len() < name.len() {
        text.push('…');
    }
    text
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl RawEntry {
    /// The place in the data, once it is known to hold what dtype and shape say.
    fn check(&self) -> Result<(usize, usize), String> {
        let (begin, end) = self.data_offsets;
        let Some(bits) = bits_of(&self.dtype) else {
            return Err(format!("has the unknown dtype {}", shown(&self.dtype)));
        };
        if self.shape.len() > MAX_DIMS {
            return Err(format!(
                "has {} dimensions; needs at most {MAX_DIMS}",
                self.shape.len()
            ));
        }
        if begin > end {
            return Err(format!("begins at {begin} and ends at {end}, before it"));
        }
        let needed = self
            .shape
            .iter()
            .try_fold(bits, |bits, dim| bits.checked_mul(*dim))
            .filter(|bits| bits % 8 == 0)
            .map(|bits| bits / 8);
        if needed != Some(end - begin) {
            let needed = needed.map_or("no whole number of".into(), |bytes| bytes.to_string());
            return Err(format!(
                "has {} bytes; {} {:?} needs {needed}",
                end - begin,
                self.dtype,
                self.shape
            ));
        }
        Ok((begin as usize, end as usize))
    }
}

/// Bits of an element of the format's dtypes.
fn bits_of(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ"
        | "F8_E5M2FNUZ" => 8,
        "I16" | "U16" | "F16" | "BF16" => 16,
        "I32" | "U32" | "F32" => 32,
        "I64" | "U64" | "F64" | "C64" => 64,
        _ => return None,
    })
}

/// An object of which every value is a `T`, no name twice, in the file's order. The format's
/// metadata is left out.
struct UniqueMap<T>(Vec<(String, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for UniqueMap<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UniqueMapVisitor(PhantomData))
    }
}

struct UniqueMapVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for UniqueMapVisitor<T> {
    type Value = UniqueMap<T>;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut names = HashSet::new();
        let mut fields = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if !names.insert(name.clone()) {
                return Err(A::Error::custom(format!("{} is there twice", shown(&name))));
            }
            if name == METADATA {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let value = map
                .next_value()
                .map_err(|error| A::Error::custom(format!("{}: {error}", shown(&name))))?;
            fields.push((name, value));
        }
        Ok(UniqueMap(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(header.as_bytes());
        file.extend_from_slice(data);
        file
    }

    const TWO: &str = r#"{"__metadata__": {"format": "pt"},
        "b": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [4, 16]},
        "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}"#;

    #[test]
    fn tensors_come_in_the_order_of_their_bytes() {
        let bytes = file(TWO, &[0; 16]);
        let found = entries(&bytes).unwrap();
        let names: Vec<_> = found.iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(
            (found[1].begin, found[1].end),
            (bytes.len() - 12, bytes.len())
        );
        assert_eq!(found[1].shape, [2, 3]);
    }

    /// The crate of the format's makers reads the same.
    #[test]
    fn the_published_reader_sees_the_same_tensors() {
        let bytes = file(TWO, &[7; 16]);
        let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for entry in entries(&bytes).unwrap() {
            let tensor = theirs.tensor(&entry.name).unwrap();
            assert_eq!(tensor.data(), &bytes[entry.begin..entry.end]);
            let shape: Vec<u64> = tensor.shape().iter().map(|dim| *dim as u64).collect();
            assert_eq!(shape, entry.shape);
        }
    }

    #[test]
    fn every_lie_is_named() {
        let refused =
            |header: &str, data: usize| entries(&file(header, &vec![0; data])).unwrap_err();
        let one = |entry: &str| format!("{{\"x\": {entry}}}");
        let cases = [
            (
                one(r#"{"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}"#),
                "x: has 4 bytes; F32 [2] needs 8",
            ),
            (
                one(r#"{"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}"#),
                "x: begins at 4 and ends at 0, before it",
            ),
            (
                one(r#"{"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}"#),
                "ends after 4 bytes of data; x needs 12",
            ),
            (
                one(r#"{"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}"#),
                "x: has the unknown dtype F33",
            ),
            (
                one(r#"{"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}"#),
                "x: has 1 bytes; F4 [1] needs no whole number of",
            ),
            (
                one(
                    r#"{"dtype": "U8", "shape": [4294967296, 4294967296, 4294967296],
                        "data_offsets": [0, 4]}"#,
                ),
                "x: has 4 bytes; U8 [4294967296, 4294967296, 4294967296] needs no whole number of",
            ),
            (
                one(r#"{"dtype": "U8", "shape": [1,1,1,1,1,1,1,1,4], "data_offsets": [0, 4]}"#),
                "x: has 9 dimensions; needs at most 8",
            ),
            (
                one(r#"{"dtype": "U8", "shape": [1], "data_offsets": [3, 4]}"#),
                "x: begins 3 bytes behind the tensor before it; no tensor owns the bytes between",
            ),
            (
                one(r#"{"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}"#),
                "has 3 bytes behind its last tensor; needs none",
            ),
            (
                "{}".into(),
                "has 4 bytes behind its last tensor; needs none",
            ),
        ];
        for (header, expected) in cases {
            assert_eq!(refused(&header, 4), expected);
        }
        let overlap = r#"{"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
            "b": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}"#;
        assert_eq!(
            refused(overlap, 4),
            "b: overlaps the tensor before it by 1 bytes"
        );
        for (header, start) in [
            (
                "[1]",
                "has a bad header: invalid type: sequence, expected an object",
            ),
            (
                "{\"x\": 3}",
                "has a bad header: x: invalid type: integer `3`",
            ),
            (
                "{\"x\": {\"shape\": []}}",
                "has a bad header: x: missing field `dtype`",
            ),
            (
                r#"{"x": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 4]}}"#,
                "has a bad header: x: invalid value: integer `-1`",
            ),
            ("{\"x\"", "has a bad header: x: EOF"),
        ] {
            let error = refused(header, 4);
            assert!(error.starts_with(start), "{error}");
        }
        let twice = r#"{"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
            "x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}"#;
        let error = refused(twice, 4);
        assert!(
            error.starts_with("has a bad header: x is there twice"),
            "{error}"
        );
    }

    #[test]
    fn a_length_that_lies_is_refused_before_anything_is_read() {
        assert_eq!(
            entries(&[1, 2, 3]).unwrap_err(),
            "has 3 bytes; a safetensors file has at least 8"
        );
        let mut bytes = u64::MAX.to_le_bytes().to_vec();
        assert!(
            entries(&bytes)
                .unwrap_err()
                .contains("18446744073709551615 bytes")
        );
        bytes = 100u64.to_le_bytes().to_vec();
        bytes.extend_from_slice(b"{}");
        assert_eq!(
            entries(&bytes).unwrap_err(),
            "ends 2 bytes into its header; the header needs 100"
        );
        assert_eq!(
            entries(&[2, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]).unwrap_err(),
            "has a header that is not UTF-8 text"
        );
    }

    #[test]
    fn names_in_error_lines_stay_on_the_line() {
        let name = "a\\nb".repeat(200);
        let header =
            format!(r#"{{"{name}": {{"dtype": "?", "shape": [], "data_offsets": [0, 0]}}}}"#);
        let error = entries(&file(&header, &[])).unwrap_err();
        assert!(error.starts_with("abab") && error.len() < 200, "{error}");
        assert!(error.contains('…') && !error.contains('\n'), "{error}");
    }

    #[test]
    fn an_index_names_files_beside_it() {
        let refused = |text: &str| index(text.as_bytes()).unwrap_err();
        assert!(refused("[]").starts_with("is no index: "));
        assert!(refused("{}").contains("missing field `weight_map`"));
        assert!(refused(r#"{"weight_map": {}}"#).starts_with("weight_map is empty"));
        assert!(refused(r#"{"weight_map": {"a": 1}}"#).contains("a: invalid type"));
        for path in ["../a.safetensors", "/a.safetensors", "a.bin"] {
            let text = format!(r#"{{"weight_map": {{"a": "{path}"}}}}"#);
            assert_eq!(
                refused(&text),
                format!("a: is in {path}; needs the name of a .safetensors file beside the index")
            );
        }
        let twice = r#"{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}"#;
        assert!(refused(twice).contains("a is there twice"));
    }

    /// Whatever was read: every place lies in the file, in order, and is as long as it says.
    fn holds(bytes: &[u8]) {
        let Ok(found) = entries(bytes) else {
            return;
        };
        let mut at = 0;
        for entry in &found {
            assert!(at <= entry.begin && entry.begin <= entry.end, "{entry:?}");
            at = entry.end;
            let bits = entry.shape.iter().product::<u64>() * bits_of(&entry.dtype).unwrap();
            assert_eq!(bits, 8 * (entry.end - entry.begin) as u64);
        }
        assert!(at <= bytes.len());
    }

    proptest! {
        #[test]
        fn no_bytes_break_the_reader(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            holds(&bytes);
        }

        #[test]
        fn a_cut_file_is_refused(keep in 0usize..208) {
            let whole = file(TWO, &[0; 16]);
            prop_assert!(entries(&whole).is_ok());
            let keep = keep.min(whole.len() - 1);
            prop_assert!(entries(&whole[..keep]).is_err());
        }

        #[test]
        fn flipped_bits_never_reach_outside(
            flips in proptest::collection::vec((0usize..220, 0u8..8), 1..4)
        ) {
            let mut bytes = file(TWO, &[0; 16]);
            for (at, bit) in flips {
                let at = at % bytes.len();
                bytes[at] ^= 1 << bit;
            }
            holds(&bytes);
        }

        #[test]
        fn any_offsets_and_shapes_are_safe(
            begin in any::<u64>(),
            end in any::<u64>(),
            dims in proptest::collection::vec(any::<u64>(), 0..4)
        ) {
            let entry = format!(r#""shape": {dims:?}, "data_offsets": [{begin}, {end}]"#);
            let header = format!(r#"{{"x": {{"dtype": "F32", {entry}}}}}"#);
            holds(&file(&header, &[0; 16]));
        }
    }
}

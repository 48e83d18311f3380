//! Graph keys, and the record of what was captured for each: the path, and the seals of what the
//! graph reads. A captured graph replays the addresses that it saw; when one has changed since, a
//! replay is a fault, not a wrong token.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::digest::{Fnv1a, hex};
use crate::reason::Reason;
use crate::words::one_line;

/// Which step a graph runs.
///
/// ```
/// assert_eq!(lowlat_core::GraphMode::TargetVerify.to_string(), "target_verify");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GraphMode {
    /// One row a request.
    Decode,
    /// The anchor and its drafts, `tokens_per_request` rows a request.
    TargetVerify,
    /// The draft's proposals.
    Draft,
}

impl GraphMode {
    /// Every mode.
    pub const ALL: [Self; 3] = [Self::Decode, Self::TargetVerify, Self::Draft];

    /// The name, lower case with underscores.
    pub fn name(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::TargetVerify => "target_verify",
            Self::Draft => "draft",
        }
    }
}

impl fmt::Display for GraphMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Everything that a captured graph fixes.
///
/// ```
/// use lowlat_core::{GraphKey, GraphMode};
/// let key = GraphKey {
///     mode: GraphMode::TargetVerify,
///     batch_size: 2,
///     tokens_per_request: 6,
///     width: 12,
///     shape: "v41-flash".into(),
///     isa: "sm_90".into(),
///     numerics_digest: 1,
///     layout_digest: 2,
/// };
/// assert_eq!(key.rows(), 12);
/// assert_eq!(key.to_string(), "target_verify 2 x 6 rows at width 12 (v41-flash, sm_90)");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GraphKey {
    /// Which step.
    pub mode: GraphMode,
    /// Requests of the step.
    pub batch_size: u32,
    /// Rows a request.
    pub tokens_per_request: u32,
    /// The built row count that runs it, at least `rows()`.
    pub width: u32,
    /// The shape's name.
    pub shape: String,
    /// The machine code.
    pub isa: String,
    /// Digest of the declared numerics.
    #[serde(with = "hex")]
    pub numerics_digest: u64,
    /// Digest of the weights' layout.
    #[serde(with = "hex")]
    pub layout_digest: u64,
}

impl GraphKey {
    /// Rows of the step: `batch_size * tokens_per_request`.
    pub fn rows(&self) -> u32 {
        self.batch_size.saturating_mul(self.tokens_per_request)
    }

    /// Feeds mode name, batch size, tokens a request, width, shape, ISA, numerics, layout.
    fn feed(&self, digest: Fnv1a) -> Fnv1a {
        let digest = digest.text(self.mode.name()).u32(self.batch_size);
        let digest = digest.u32(self.tokens_per_request).u32(self.width);
        let digest = digest.text(&self.shape).text(&self.isa);
        digest.u64(self.numerics_digest).u64(self.layout_digest)
    }

    fn problem(&self) -> Option<String> {
        if self.batch_size == 0 || self.tokens_per_request == 0 {
            return Some(format!(
                "{self}: batch size and tokens a request must be above 0"
            ));
        }
        (self.width < self.rows())
            .then(|| format!("{self}: width must be at least {} rows", self.rows()))
    }
}

impl fmt::Display for GraphKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            mode,
            batch_size,
            tokens_per_request,
            width,
            shape,
            isa,
            ..
        } = self;
        write!(
            f,
            "{mode} {batch_size} x {tokens_per_request} rows at width {width}"
        )?;
        write!(f, " ({shape}, {isa})")
    }
}

/// Digest of a set of graph keys and what runs each, whatever their order: the number of keys, then
/// each key's fields in their order and its path's name, by ascending keys. It goes into the
/// ballot: ranks with the same keys and another path would decide differently.
///
/// ```
/// use lowlat_core::graph_key::{GraphKey, GraphMode, Path, keys_digest};
/// assert_eq!(keys_digest([]), 0xa8c7f832281a39c5); // FNV-1a of eight zero bytes
/// let key = GraphKey {
///     mode: GraphMode::Decode, batch_size: 1, tokens_per_request: 1, width: 1,
///     shape: "mini".into(), isa: "cpu".into(), numerics_digest: 0, layout_digest: 0,
/// };
/// assert_ne!(keys_digest([(&key, Path::Fused)]), keys_digest([(&key, Path::Plain)]));
/// ```
#[must_use]
pub fn keys_digest<'a>(keys: impl IntoIterator<Item = (&'a GraphKey, Path)>) -> u64 {
    let mut sorted: Vec<(&GraphKey, Path)> = keys.into_iter().collect();
    sorted.sort_unstable_by_key(|(key, path)| (*key, path.name()));
    sorted.dedup();
    let digest = Fnv1a::new().u64(sorted.len() as u64);
    sorted
        .into_iter()
        .fold(digest, |digest, (key, path)| {
            key.feed(digest).text(path.name())
        })
        .finish()
}

/// What runs for a key, chosen at capture and fixed from then on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Path {
    /// A few resident kernels a layer.
    Persistent,
    /// Chains of kernels with programmatic launch.
    Fused,
    /// The engine's own forward: captured, but not ours.
    Plain,
}

impl Path {
    /// The name, lower case.
    pub fn name(self) -> &'static str {
        match self {
            Self::Persistent => "persistent",
            Self::Fused => "fused",
            Self::Plain => "plain",
        }
    }
}

/// Something that a captured graph reads, as it was at capture.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seal {
    /// What it is, such as `page_table`.
    pub name: String,
    /// Where it lies.
    #[serde(with = "hex")]
    pub address: u64,
    /// Elements of each dimension.
    pub shape: Vec<i64>,
    /// Its dtype.
    pub dtype: String,
}

/// The same thing as it is now, borrowed: making one allocates nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealView<'a> {
    /// What it is.
    pub name: &'a str,
    /// Where it lies now.
    pub address: u64,
    /// Its shape now.
    pub shape: &'a [i64],
    /// Its dtype now.
    pub dtype: &'a str,
}

impl Seal {
    /// Seals what `view` shows.
    pub fn of(view: SealView<'_>) -> Self {
        Self {
            name: view.name.to_owned(),
            address: view.address,
            shape: view.shape.to_vec(),
            dtype: view.dtype.to_owned(),
        }
    }

    /// This seal, borrowed.
    pub fn view(&self) -> SealView<'_> {
        SealView {
            name: &self.name,
            address: self.address,
            shape: &self.shape,
            dtype: &self.dtype,
        }
    }
}

impl fmt::Display for SealView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {} {:?} at {:#x}",
            self.name, self.dtype, self.shape, self.address
        )
    }
}

/// A seal that is broken: the graph would read something else than at capture.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("[{}] {}: sealed {}, now {}; capture again after a reallocation",
        Reason::SealChanged.number(), one_line(key), one_line(sealed), one_line(seen))]
pub struct SealFault {
    /// The graph's key.
    pub key: String,
    /// What was sealed.
    pub sealed: String,
    /// What is there now.
    pub seen: String,
}

/// One captured graph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Which step it runs.
    pub key: GraphKey,
    /// What runs for it.
    pub path: Path,
    /// What it reads.
    pub seals: Vec<Seal>,
}

/// A captured graph's place in the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyIdx(pub u32);

/// What a record cannot hold or a text does not hold, in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", one_line(.0))]
pub struct RecordError(pub(crate) String);

/// Notes each graph while it is captured.
///
/// ```
/// use lowlat_core::graph_key::{GraphKey, GraphMode, KeyIdx, Path, Recorder, SealView};
/// let key = GraphKey {
///     mode: GraphMode::Decode, batch_size: 1, tokens_per_request: 1, width: 1,
///     shape: "tiny".into(), isa: "scalar".into(), numerics_digest: 0, layout_digest: 0,
/// };
/// let logits = SealView { name: "logits", address: 0x1000, shape: &[1, 8], dtype: "f32" };
/// let mut recorder = Recorder::new();
/// recorder.note(key.clone(), Path::Persistent, &[logits]).unwrap();
/// assert!(recorder.note(key, Path::Plain, &[]).is_err()); // captured twice
/// let record = recorder.finish();
///
/// assert!(record.check_seals(KeyIdx(0), [logits]).is_ok());
/// let moved = SealView { address: 0x2000, ..logits };
/// assert_eq!(
///     record.check_seals(KeyIdx(0), [moved]).unwrap_err().to_string(),
///     "[405] decode 1 x 1 rows at width 1 (tiny, scalar): sealed logits f32 [1, 8] at 0x1000, \
///      now logits f32 [1, 8] at 0x2000; capture again after a reallocation"
/// );
/// ```
#[derive(Clone, Debug, Default)]
pub struct Recorder {
    entries: Vec<Entry>,
}

impl Recorder {
    /// A recorder that has seen no capture.
    pub fn new() -> Self {
        Self::default()
    }

    /// Notes one captured graph.
    ///
    /// # Errors
    /// When the key was noted before, or is none that can be captured.
    pub fn note(
        &mut self,
        key: GraphKey,
        path: Path,
        seals: &[SealView<'_>],
    ) -> Result<(), RecordError> {
        if let Some(problem) = key.problem() {
            return Err(RecordError(problem));
        }
        if self.entries.iter().any(|entry| entry.key == key) {
            return Err(RecordError(format!("{key}: captured twice")));
        }
        let seals = seals.iter().copied().map(Seal::of).collect();
        self.entries.push(Entry { key, path, seals });
        Ok(())
    }

    /// Ends the capture.
    pub fn finish(mut self) -> Record {
        self.entries.sort_by(|a, b| a.key.cmp(&b.key));
        Record {
            entries: self.entries,
        }
    }
}

/// Version of the record's JSON that is written: with a checksum over all that it holds.
const RECORD_VERSION: u32 = 2;

/// Version without a checksum, as an engine writes it that hands its record over in memory.
const PLAIN_VERSION: u32 = 1;

/// What a record of any version has.
#[derive(Deserialize)]
struct Head {
    version: u32,
    #[allow(dead_code)] // That it is there tells a record from other JSON with a version.
    entries: serde::de::IgnoredAny,
}

/// A record as text.
#[derive(Serialize, Deserialize)]
struct RecordText {
    version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    checksum: Option<Checksum>,
    entries: Vec<Entry>,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
struct Checksum(#[serde(with = "hex")] u64);

/// What was captured, by ascending key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    entries: Vec<Entry>,
}

impl Record {
    /// Reads a record that [`Record::to_json`] wrote, or one of version 1, which has no checksum.
    ///
    /// ```
    /// use lowlat_core::graph_key::Record;
    /// let read = |text| Record::from_json(text).map(|record| record.entries().len());
    /// assert_eq!(read(r#"{"version": 1, "entries": []}"#).unwrap(), 0);
    /// assert_eq!(
    ///     read(r#"{"version": 3, "entries": []}"#).unwrap_err().to_string(),
    ///     "version is 3 (it is of a newer lowlat); this reads graph records of version 1 and 2"
    /// );
    /// ```
    ///
    /// # Errors
    /// What is wrong with the text, in one line.
    pub fn from_json(text: &str) -> Result<Self, RecordError> {
        let broken = |error: serde_json::Error| {
            RecordError(match error.is_eof() {
                true => {
                    "not a graph record: it ends in the middle; the file looks truncated".into()
                }
                false => format!("not a graph record: {error}"),
            })
        };
        // The version first: what else a newer record holds is not ours to judge.
        let head: Head = serde_json::from_str(text).map_err(broken)?;
        let seen = head.version;
        if !(PLAIN_VERSION..=RECORD_VERSION).contains(&seen) {
            let who = if seen > RECORD_VERSION {
                " (it is of a newer lowlat)"
            } else {
                ""
            };
            return Err(RecordError(format!(
                "version is {seen}{who}; this reads graph records of version {PLAIN_VERSION} and \
                 {RECORD_VERSION}"
            )));
        }
        let text: RecordText = serde_json::from_str(text).map_err(broken)?;
        // Noting the entries again holds a text to the same rules as a capture.
        let mut recorder = Recorder::new();
        for Entry { key, path, seals } in text.entries {
            let views: Vec<_> = seals.iter().map(Seal::view).collect();
            recorder.note(key, path, &views)?;
        }
        let record = recorder.finish();
        let own = record.checksum();
        match text.checksum {
            None if seen == PLAIN_VERSION => Ok(record),
            None => Err(RecordError(format!(
                "not a graph record: version {seen} needs a checksum, and there is none"
            ))),
            Some(_) if seen == PLAIN_VERSION => Err(RecordError(format!(
                "not a graph record: version {seen} has no checksum, and there is one"
            ))),
            Some(Checksum(stated)) if stated != own => Err(RecordError(format!(
                "checksum is {stated:#018x}, the entries give {own:#018x}; the file is damaged or \
                 was edited"
            ))),
            Some(_) => Ok(record),
        }
    }

    /// The record as JSON, keys ascending, digests and addresses as "0x…", with a checksum.
    ///
    /// # Panics
    /// Never: a record holds nothing that JSON cannot.
    #[must_use]
    pub fn to_json(&self) -> String {
        let text = RecordText {
            version: RECORD_VERSION,
            checksum: Some(Checksum(self.checksum())),
            entries: self.entries.clone(),
        };
        serde_json::to_string_pretty(&text).expect("a record is plain data")
    }

    /// The captured graphs, by ascending key.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Digest of the captured keys and what runs each, equal to [`keys_digest`] of the same.
    #[must_use]
    pub fn keys_digest(&self) -> u64 {
        keys_digest(self.entries.iter().map(|entry| (&entry.key, entry.path)))
    }

    /// Digest of what ranks must have in common: the number of graphs, then for each its key, its
    /// path's name, the number of seals, and for each seal name, dtype, number of dimensions and
    /// dimensions. Addresses are each rank's own and stay out.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.feed(|digest, _| digest)
    }

    /// The same with each seal's address after its name: everything that the record's text holds.
    fn checksum(&self) -> u64 {
        self.feed(|digest, seal| digest.u64(seal.address))
    }

    fn feed(&self, address: impl Fn(Fnv1a, &Seal) -> Fnv1a) -> u64 {
        let mut digest = Fnv1a::new().u64(self.entries.len() as u64);
        for Entry { key, path, seals } in &self.entries {
            digest = key.feed(digest).text(path.name()).u64(seals.len() as u64);
            for seal in seals {
                digest = address(digest.text(&seal.name), seal)
                    .text(&seal.dtype)
                    .u64(seal.shape.len() as u64);
                digest = seal
                    .shape
                    .iter()
                    .fold(digest, |digest, &dim| digest.u64(dim as u64));
            }
        }
        digest.finish()
    }

    /// Whether what the graph of `key` reads is as it was at capture. `seen` lists it in the order
    /// of capture. Allocates nothing unless a seal is broken.
    ///
    /// # Errors
    /// The first seal that changed, with both values.
    ///
    /// # Panics
    /// When `key` is not of this record.
    pub fn check_seals<'a>(
        &self,
        key: KeyIdx,
        seen: impl IntoIterator<Item = SealView<'a>>,
    ) -> Result<(), SealFault> {
        let entry = &self.entries[key.0 as usize];
        let mut sealed = entry.seals.iter().map(Seal::view);
        let mut seen = seen.into_iter();
        loop {
            match (sealed.next(), seen.next()) {
                (None, None) => return Ok(()),
                (sealed, seen) if sealed == seen => {}
                (sealed, seen) => {
                    let words = |view: Option<SealView<'_>>| {
                        view.map_or_else(|| "nothing".to_owned(), |view| view.to_string())
                    };
                    return Err(SealFault {
                        key: entry.key.to_string(),
                        sealed: words(sealed),
                        seen: words(seen),
                    });
                }
            }
        }
    }

    /// How `other` differs, one line a difference; empty when ranks could replay both together.
    /// Addresses are not compared.
    #[must_use]
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let find = |record: &Self, key: &GraphKey| {
            record.entries.iter().position(|entry| entry.key == *key)
        };
        let mut lines = Vec::new();
        for Entry { key, path, seals } in &self.entries {
            let Some(idx) = find(other, key) else {
                lines.push(format!("{key}: only in the first record"));
                continue;
            };
            let second = &other.entries[idx];
            if *path != second.path {
                let (first, second) = (path.name(), second.path.name());
                lines.push(format!(
                    "{key}: path is {first} in the first record, {second} in \
                                    the second"
                ));
            }
            for idx in 0..seals.len().max(second.seals.len()) {
                let words = |seals: &[Seal]| match seals.get(idx) {
                    Some(seal) => format!("{} {} {:?}", seal.name, seal.dtype, seal.shape),
                    None => "nothing".to_owned(),
                };
                let (first, second) = (words(seals), words(&second.seals));
                if first != second {
                    lines.push(format!(
                        "{key}: seal {idx} is {first} in the first record, {second} in the second"
                    ));
                }
            }
        }
        for Entry { key, .. } in &other.entries {
            if find(self, key).is_none() {
                lines.push(format!("{key}: only in the second record"));
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(mode: GraphMode, batch_size: u32) -> GraphKey {
        GraphKey {
            mode,
            batch_size,
            tokens_per_request: 6,
            width: batch_size * 6,
            shape: "tiny".into(),
            isa: "scalar".into(),
            numerics_digest: u64::MAX,
            layout_digest: 2,
        }
    }

    fn record(batch_sizes: &[u32], path: Path, address: u64) -> Record {
        let mut recorder = Recorder::new();
        for &batch_size in batch_sizes {
            let shape = [i64::from(batch_size), 4];
            let view = SealView {
                name: "page_table",
                address,
                shape: &shape,
                dtype: "i32",
            };
            recorder
                .note(key(GraphMode::TargetVerify, batch_size), path, &[view])
                .unwrap();
        }
        recorder.finish()
    }

    #[test]
    fn the_keys_digest_does_not_depend_on_order_and_depends_on_every_field() {
        let (a, b) = (key(GraphMode::Decode, 1), key(GraphMode::Draft, 2));
        let path = Path::Fused;
        let base = keys_digest([(&a, path), (&b, path)]);
        assert_eq!(base, keys_digest([(&b, path), (&a, path)]));
        assert_ne!(base, keys_digest([(&a, path), (&b, Path::Plain)]));
        let changes: [fn(&mut GraphKey); 8] = [
            |key| key.mode = GraphMode::TargetVerify,
            |key| key.batch_size += 1,
            |key| key.tokens_per_request += 1,
            |key| key.width += 1,
            |key| key.shape.push('x'),
            |key| key.isa.push('x'),
            |key| key.numerics_digest ^= 1,
            |key| key.layout_digest ^= 1,
        ];
        for change in changes {
            let mut changed = a.clone();
            change(&mut changed);
            assert_ne!(base, keys_digest([(&changed, path), (&b, path)]));
        }
    }

    #[test]
    fn a_record_survives_json_and_keeps_every_bit() {
        let record = record(&[4, 1, 2], Path::Persistent, 0xdead_beef_0000_0001);
        let read = Record::from_json(&record.to_json()).unwrap();
        assert_eq!(read, record);
        assert_eq!(read.digest(), record.digest());
        let keys = read.entries().iter();
        let digest = keys_digest(keys.map(|entry| (&entry.key, Path::Persistent)));
        assert_eq!(record.keys_digest(), digest);
    }

    #[test]
    fn a_text_that_is_no_record_is_refused_in_one_line() {
        let good = record(&[1], Path::Persistent, 1).to_json();
        let cases = [
            ("", "not a graph record"),
            ("[]", "not a graph record"),
            (r#"{"id": "a", "requests": []}"#, "missing field `version`"),
            (r#"{"version": 1}"#, "missing field `entries`"),
            (&good[..good.len() / 2], "the file looks truncated"),
            (
                &good.replace("\"version\": 2", "\"version\": 9"),
                "version is 9 (it is of a newer lowlat)",
            ),
            (r#"{"version": 3, "entries": "x"}"#, "newer lowlat"),
            (
                &good.replace("\"version\": 2", "\"version\": 1"),
                "version 1 has no checksum",
            ),
            (
                r#"{"version": 2, "entries": []}"#,
                "version 2 needs a checksum",
            ),
            (
                r#"{"version": 0, "entries": []}"#,
                "version is 0; this reads",
            ),
            (
                &good.replace("\"width\": 6", "\"width\": 5"),
                "width must be at least 6 rows",
            ),
            (&good.replace("0xffffffffffffffff", "-1"), "is no digest"),
        ];
        for (text, expected) in cases {
            let error = Record::from_json(text).unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn no_damaged_byte_gives_another_record() {
        let good = record(&[1, 2], Path::Persistent, 0x1000);
        let text = good.to_json();
        let mut told_by_checksum = 0;
        for idx in 0..text.len() {
            for other in *b"07afx \"}" {
                let mut damaged = text.clone().into_bytes();
                damaged[idx] = other;
                match Record::from_json(&String::from_utf8(damaged).unwrap()) {
                    // White space, or the same byte again.
                    Ok(record) => assert_eq!(record, good, "byte {idx} is {other}"),
                    Err(error) => {
                        told_by_checksum += u32::from(error.to_string().contains("is damaged"));
                    }
                }
            }
        }
        assert!(100 < told_by_checksum, "{told_by_checksum}");
    }

    #[test]
    fn addresses_are_each_ranks_own_and_everything_else_is_compared() {
        let first = record(&[1, 2], Path::Persistent, 0x1000);
        let moved = record(&[1, 2], Path::Persistent, 0x2000);
        assert_eq!(first.digest(), moved.digest());
        assert!(first.differences(&moved).is_empty());
        let other = record(&[2, 3], Path::Fused, 0x1000);
        assert_ne!(first.digest(), other.digest());
        let name = |batch_size| key(GraphMode::TargetVerify, batch_size);
        assert_eq!(
            first.differences(&other),
            [
                format!("{}: only in the first record", name(1)),
                format!(
                    "{}: path is persistent in the first record, fused in the second",
                    name(2)
                ),
                format!("{}: only in the second record", name(3)),
            ]
        );
    }

    #[test]
    fn each_property_of_a_seal_and_their_number_are_checked() {
        let record = record(&[1], Path::Persistent, 0x1000);
        let good = SealView {
            name: "page_table",
            address: 0x1000,
            shape: &[1, 4],
            dtype: "i32",
        };
        assert!(record.check_seals(KeyIdx(0), [good]).is_ok());
        let changed = [
            vec![SealView {
                name: "slots",
                ..good
            }],
            vec![SealView {
                address: 0x1001,
                ..good
            }],
            vec![SealView {
                shape: &[4, 1],
                ..good
            }],
            vec![SealView {
                dtype: "i64",
                ..good
            }],
            vec![good, good],
            vec![],
        ];
        for seen in changed {
            assert!(record.check_seals(KeyIdx(0), seen).is_err());
        }
    }
}

//! Reads agent traces in the Weka format: who asked how much, when, sharing which prefix.
//!
//! A file is one user session. What a replay needs is checked here, field by field, so that a bad
//! file ends in one line that names file and field; what is merely odd is accepted with a note.
//! The format, and what is refused, noted and ignored, is documented in `docs/trace-format.md`.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::path::Path;

use lowlat_core::words::one_line;

use crate::EngineError;
use crate::json::{self, Node};

/// Counts above it are taken for a mistake in the file: no model here has such a context.
pub const MAX_TOKENS: i64 = (1 << 31) - 1;
/// Seconds above it (31 years) are taken for a mistake in the file.
pub const MAX_SECONDS: f64 = 1.0e9;
/// Tokens a hash id stands for where the file does not say.
pub const DEFAULT_BLOCK_SIZE: usize = 64;

/// Bytes above it are taken for another kind of file; read whole, they would need ten times the
/// memory.
pub const MAX_FILE_BYTES: u64 = 1 << 28;

const MAX_BLOCK_SIZE: i64 = 1 << 16;
/// Notes that are told one by one; a file with more is odd throughout.
const MAX_NOTES: usize = 20;

const FILE_FIELDS: [&str; 8] = [
    "id",
    "models",
    "block_size",
    "hash_id_scope",
    "tool_tokens",
    "system_tokens",
    "requests",
    "totals",
];
const REQUEST_FIELDS: [&str; 13] = [
    "t",
    "type",
    "model",
    "in",
    "out",
    "hash_ids",
    "input_types",
    "output_types",
    "stop",
    "api_time",
    "think_time",
    "ttft",
    "requests",
];
const SUBAGENT_FIELDS: [&str; 12] = [
    "t",
    "type",
    "requests",
    "duration_ms",
    "agent_id",
    "subagent_type",
    "total_tokens",
    "tool_use_count",
    "status",
    "models",
    "tool_tokens",
    "system_tokens",
];

/// One session.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// The file as it was named to us.
    pub file: String,
    /// The file's `id`, or its name without ending.
    pub id: String,
    /// Tokens that a hash id stands for.
    pub block_size: usize,
    /// Whether hash ids mean nothing outside this file.
    pub local_hashes: bool,
    /// The user's own requests and subagents, in order of time.
    pub agent: Agent,
    /// What was odd, one line each.
    pub notes: Vec<String>,
}

/// Someone whose requests run one after the other: the user, or a subagent.
#[derive(Clone, Debug, PartialEq)]
pub struct Agent {
    /// In order of `t`, seconds since the agent began.
    pub entries: Vec<Entry>,
}

/// What an agent does at a time.
#[derive(Clone, Debug, PartialEq)]
pub enum Entry {
    /// It asks the model.
    Request(TraceRequest),
    /// It starts a subagent.
    Subagent(Subagent),
}

/// One call of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceRequest {
    /// Where it stands in the file: `requests[3]`.
    pub path: String,
    /// Seconds since its agent began.
    pub t: f64,
    /// Seconds between the answer before and this request, where the file says.
    pub think_time: Option<f64>,
    /// Tokens of the prompt, at least 1.
    pub input_tokens: usize,
    /// Tokens to generate, at least 1.
    pub output_tokens: usize,
    /// One id a block of the prompt, in order; empty where the file has none.
    pub hash_ids: Vec<i64>,
}

/// An agent started by another.
#[derive(Clone, Debug, PartialEq)]
pub struct Subagent {
    /// Where it stands in the file: `requests[16]`.
    pub path: String,
    /// Seconds since its parent began.
    pub t: f64,
    /// How long it took in the trace, where the file says.
    pub duration_s: Option<f64>,
    /// Its own requests; their `t` count from its start.
    pub agent: Agent,
}

impl Entry {
    fn t(&self) -> f64 {
        match self {
            Self::Request(request) => request.t,
            Self::Subagent(subagent) => subagent.t,
        }
    }
}

impl Agent {
    /// All requests, the subagents' included, in order of the entries.
    #[must_use]
    pub fn requests(&self) -> Vec<&TraceRequest> {
        let mut all = Vec::new();
        for entry in &self.entries {
            match entry {
                Entry::Request(request) => all.push(request),
                Entry::Subagent(subagent) => all.extend(subagent.agent.requests()),
            }
        }
        all
    }

    /// Subagents below this agent, nested ones included.
    #[must_use]
    pub fn num_subagents(&self) -> usize {
        let below = |entry: &Entry| match entry {
            Entry::Request(_) => 0,
            Entry::Subagent(subagent) => 1 + subagent.agent.num_subagents(),
        };
        self.entries.iter().map(below).sum()
    }
}

/// Reads the trace in the file at `path`.
///
/// # Errors
/// [`EngineError::Refused`]: one line with file, field, what was seen and what is needed.
pub fn read(path: &Path) -> Result<Trace, EngineError> {
    let file = path.display().to_string();
    let refuse = |words: String| EngineError::Refused(format!("{file}: {words}"));
    let unread = |error: std::io::Error| refuse(format!("cannot be read: {error}"));
    let metadata = fs::metadata(path).map_err(unread)?;
    if metadata.is_dir() {
        return Err(refuse(
            "is a folder; a trace file is needed (FOLDER/*.json)".into(),
        ));
    }
    // A pipe may never end, or never begin, and a device has no end.
    if !metadata.is_file() {
        return Err(refuse(
            "is a pipe or a device; a regular file is needed".into(),
        ));
    }
    let mut bytes = Vec::new();
    fs::File::open(path)
        .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes))
        .map_err(unread)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(refuse(format!(
            "has more than {MAX_FILE_BYTES} bytes; a trace of at most that is needed"
        )));
    }
    let name = path
        .file_stem()
        .map_or("trace".into(), |stem| stem.to_string_lossy().into_owned());
    parse(&file, &name, &bytes)
}

/// Reads a trace from a file's `bytes`. `file` is for error lines, `name` is the trace's id where
/// the file has none.
///
/// # Errors
/// As [`read`].
///
/// ```
/// use lowlat_engine::trace;
/// let text = br#"{"id": "a", "requests": [{"t": 0, "type": "n", "in": 9, "out": 2}]}"#;
/// let trace = trace::parse("a.json", "a", text).unwrap();
/// assert_eq!(trace.agent.requests()[0].input_tokens, 9);
///
/// let zero = br#"{"id": "a", "requests": [{"t": 0, "type": "n", "in": 9, "out": 0}]}"#;
/// let error = trace::parse("a.json", "a", zero).unwrap_err().to_string();
/// assert!(error.starts_with("a.json: requests[0].out is 0"));
/// ```
pub fn parse(file: &str, name: &str, bytes: &[u8]) -> Result<Trace, EngineError> {
    let mut reader = Reader {
        notes: Vec::new(),
        unknown: BTreeMap::new(),
        unhashed: Vec::new(),
    };
    reader
        .file(name, bytes)
        .map(|mut trace| {
            trace.file = file.to_string();
            trace
        })
        .map_err(|words| EngineError::Refused(format!("{file}: {}", one_line(&words))))
}

/// What reading gathers besides the trace. Errors are words without the file's name.
struct Reader {
    notes: Vec<String>,
    /// Unknown field → where it was first seen, how often.
    unknown: BTreeMap<String, (String, usize)>,
    /// Requests with no hash ids.
    unhashed: Vec<String>,
}

impl Reader {
    fn file(&mut self, name: &str, bytes: &[u8]) -> Result<Trace, String> {
        let text = self.text(bytes)?;
        let root = json::parse(text).map_err(|error| syntax_words(text, &error))?;
        let Node::Object(fields) = &root else {
            return Err(format!(
                "holds {}; one JSON object is needed",
                root.describe()
            ));
        };
        let root = Fields {
            path: String::new(),
            fields,
        };
        self.note_unknown(&root, &FILE_FIELDS);

        let id = match root.get("id") {
            None => {
                self.notes
                    .push(format!("has no id; {name:?} is taken from the file's name"));
                name.to_string()
            }
            Some(Node::Text(id)) => id.clone(),
            Some(other) => return Err(root.wrong("id", other, "a string")),
        };
        let block_size = match root.whole("block_size", 1, MAX_BLOCK_SIZE)? {
            Some(block_size) => block_size as usize,
            None => {
                self.notes
                    .push(format!("has no block_size; {DEFAULT_BLOCK_SIZE} is taken"));
                DEFAULT_BLOCK_SIZE
            }
        };
        let local_hashes = match root.get("hash_id_scope") {
            None => true,
            Some(Node::Text(scope)) if scope == "local" => true,
            Some(Node::Text(scope)) => {
                if scope != "global" {
                    self.notes
                        .push(format!("hash_id_scope {scope:?} is taken as \"global\""));
                }
                false
            }
            Some(other) => return Err(root.wrong("hash_id_scope", other, "a string")),
        };
        let agent = self.agent(&root, block_size)?;
        self.compare_totals(&root, &agent);

        for (field, (first, count)) in &self.unknown {
            let field = json::shortened(field);
            self.notes.push(format!(
                "unknown field {field:?} is ignored ({count} x, first at {first})"
            ));
        }
        if let Some(first) = self.unhashed.first() {
            self.notes.push(format!(
                "{} request(s) without hash_ids share no prefix (first: {first})",
                self.unhashed.len()
            ));
        }
        let mut notes = std::mem::take(&mut self.notes);
        if notes.len() > MAX_NOTES {
            let left_out = notes.len() - (MAX_NOTES - 1);
            notes.truncate(MAX_NOTES - 1);
            notes.push(format!("{left_out} more notes like these"));
        }
        Ok(Trace {
            file: String::new(),
            id,
            block_size,
            local_hashes,
            agent,
            notes,
        })
    }

    fn text<'a>(&mut self, bytes: &'a [u8]) -> Result<&'a str, String> {
        if bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]) {
            return Err("begins with a UTF-16 byte order mark; UTF-8 is needed".into());
        }
        let body = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
        if body.len() < bytes.len() {
            self.notes
                .push("begins with a UTF-8 byte order mark, which is ignored".into());
        }
        let text = std::str::from_utf8(body).map_err(|error| {
            let offset = bytes.len() - body.len() + error.valid_up_to();
            format!("byte {offset} is not UTF-8; a JSON text in UTF-8 is needed")
        })?;
        if text.trim().is_empty() {
            return Err("is empty; one JSON object is needed".into());
        }
        Ok(text)
    }

    fn agent(&mut self, holder: &Fields, block_size: usize) -> Result<Agent, String> {
        let path = holder.path_of("requests");
        let items = match holder.get("requests") {
            Some(Node::List(items)) if !items.is_empty() => items,
            Some(Node::List(_)) => return Err(format!("{path} is empty; a request is needed")),
            None => return Err(format!("{path} is missing; a list of requests is needed")),
            Some(other) => return Err(holder.wrong("requests", other, "a list of requests")),
        };
        let mut entries = Vec::with_capacity(items.len());
        let mut last_t = 0.0;
        for (index, item) in items.iter().enumerate() {
            let path = format!("{path}[{index}]");
            let Node::Object(fields) = item else {
                return Err(format!(
                    "{path} is {}; an object is needed",
                    item.describe()
                ));
            };
            let fields = Fields { path, fields };
            // A missing time is the time of the entry before: they then keep the file's order.
            let t = fields.seconds("t")?.unwrap_or(last_t);
            last_t = t;
            entries.push(self.entry(&fields, t, block_size)?);
        }
        if !entries.is_sorted_by(|a, b| a.t() <= b.t()) {
            self.notes.push(format!(
                "{path} is not in order of t; it is replayed in that order"
            ));
            entries.sort_by(|a, b| a.t().total_cmp(&b.t()));
        }
        Ok(Agent { entries })
    }

    fn entry(&mut self, fields: &Fields, t: f64, block_size: usize) -> Result<Entry, String> {
        match fields.get("type") {
            Some(Node::Text(kind)) if kind == "subagent" => {
                self.subagent(fields, t, block_size).map(Entry::Subagent)
            }
            Some(Node::Text(kind)) if kind == "n" || kind == "s" => {
                self.request(fields, t, block_size).map(Entry::Request)
            }
            None if fields.get("requests").is_some() => {
                self.notes.push(format!(
                    "{} has no type; its requests make it a subagent",
                    fields.path
                ));
                self.subagent(fields, t, block_size).map(Entry::Subagent)
            }
            None => {
                self.notes
                    .push(format!("{} has no type; \"n\" is taken", fields.path));
                self.request(fields, t, block_size).map(Entry::Request)
            }
            Some(other) => Err(fields.wrong("type", other, "\"n\", \"s\" or \"subagent\"")),
        }
    }

    fn subagent(&mut self, fields: &Fields, t: f64, block_size: usize) -> Result<Subagent, String> {
        self.note_unknown(fields, &SUBAGENT_FIELDS);
        let duration_s = fields
            .number("duration_ms", MAX_SECONDS * 1e3)?
            .map(|ms| ms / 1e3);
        let agent = self.agent(fields, block_size)?;
        Ok(Subagent {
            path: fields.path.clone(),
            t,
            duration_s,
            agent,
        })
    }

    fn request(
        &mut self,
        fields: &Fields,
        t: f64,
        block_size: usize,
    ) -> Result<TraceRequest, String> {
        self.note_unknown(fields, &REQUEST_FIELDS);
        if let Some(other) = fields.get("requests") {
            return Err(fields.wrong("requests", other, "no such field (only a subagent has it)"));
        }
        let tokens = |name: &str| {
            fields
                .whole(name, 1, MAX_TOKENS)?
                .map(|count| count as usize)
                .ok_or_else(|| {
                    format!(
                        "{} is missing; 1 to {MAX_TOKENS} tokens are needed",
                        fields.path_of(name)
                    )
                })
        };
        let input_tokens = tokens("in")?;
        let output_tokens = tokens("out")?;
        let think_time = fields.seconds("think_time")?;
        let hash_ids = self.hash_ids(fields, input_tokens, block_size)?;
        Ok(TraceRequest {
            path: fields.path.clone(),
            t,
            think_time,
            input_tokens,
            output_tokens,
            hash_ids,
        })
    }

    fn hash_ids(
        &mut self,
        fields: &Fields,
        input_tokens: usize,
        block_size: usize,
    ) -> Result<Vec<i64>, String> {
        let items = match fields.get("hash_ids") {
            None => {
                self.unhashed.push(fields.path.clone());
                return Ok(Vec::new());
            }
            Some(Node::List(items)) => items,
            Some(other) => return Err(fields.wrong("hash_ids", other, "a list of whole numbers")),
        };
        let (floor, ceil) = (input_tokens / block_size, input_tokens.div_ceil(block_size));
        if items.len() != floor && items.len() != ceil {
            return Err(format!(
                "{} has {} ids but in is {input_tokens}; at block_size {block_size} that needs \
                 {floor} ids, one a whole block{}",
                fields.path_of("hash_ids"),
                items.len(),
                if ceil == floor {
                    String::new()
                } else {
                    format!(" (or {ceil})")
                },
            ));
        }
        let mut ids = Vec::with_capacity(items.len());
        for (index, item) in items.iter().enumerate() {
            let Node::Whole(id) = item else {
                return Err(format!(
                    "{}[{index}] is {}; a whole number is needed",
                    fields.path_of("hash_ids"),
                    item.describe()
                ));
            };
            ids.push(*id);
        }
        Ok(ids)
    }

    fn note_unknown(&mut self, fields: &Fields, known: &[&str]) {
        for (name, _) in fields.fields {
            if !known.contains(&name.as_str()) {
                let first = if fields.path.is_empty() {
                    "the top"
                } else {
                    &fields.path
                };
                let seen = self
                    .unknown
                    .entry(name.clone())
                    .or_insert((first.to_string(), 0));
                seen.1 += 1;
            }
        }
    }

    /// The file's own sums are not ours to trust: they are compared, and a difference is noted.
    fn compare_totals(&mut self, root: &Fields, agent: &Agent) {
        let Some(Node::Object(fields)) = root.get("totals") else {
            return;
        };
        let totals = Fields {
            path: "totals".into(),
            fields,
        };
        let Some(Node::Object(fields)) = totals.get("combined_tokens") else {
            return;
        };
        let combined = Fields {
            path: totals.path_of("combined_tokens"),
            fields,
        };
        let requests = agent.requests();
        let sums = [
            (
                "input",
                requests
                    .iter()
                    .map(|request| request.input_tokens)
                    .sum::<usize>(),
            ),
            (
                "output",
                requests.iter().map(|request| request.output_tokens).sum(),
            ),
        ];
        for (name, sum) in sums {
            match combined.get(name) {
                Some(Node::Whole(stated)) if *stated != sum as i64 => self.notes.push(format!(
                    "{} is {stated}, but the requests sum to {sum}; the requests count",
                    combined.path_of(name)
                )),
                _ => {}
            }
        }
    }
}

/// An object's fields, and where it stands.
struct Fields<'a> {
    path: String,
    fields: &'a [(String, Node)],
}

impl Fields<'_> {
    /// The field's value; a null is as good as none.
    fn get(&self, name: &str) -> Option<&Node> {
        let (_, value) = self.fields.iter().find(|(field, _)| field == name)?;
        (*value != Node::Null).then_some(value)
    }

    fn path_of(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_string()
        } else {
            format!("{}.{name}", self.path)
        }
    }

    fn wrong(&self, name: &str, seen: &Node, needed: &str) -> String {
        format!(
            "{} is {}; needed: {needed}",
            self.path_of(name),
            seen.describe()
        )
    }

    /// A whole number from `least` to `most`; a real with no fraction counts as whole.
    fn whole(&self, name: &str, least: i64, most: i64) -> Result<Option<i64>, String> {
        let Some(node) = self.get(name) else {
            return Ok(None);
        };
        let value = match node {
            Node::Whole(value) => Some(*value),
            Node::Real(value) if value.fract() == 0.0 && value.abs() < 1e15 => Some(*value as i64),
            _ => None,
        };
        match value {
            Some(value) if (least..=most).contains(&value) => Ok(Some(value)),
            _ => Err(self.wrong(
                name,
                node,
                &format!("a whole number from {least} to {most}"),
            )),
        }
    }

    fn seconds(&self, name: &str) -> Result<Option<f64>, String> {
        self.number(name, MAX_SECONDS)
    }

    /// A number from 0 to `most`.
    fn number(&self, name: &str, most: f64) -> Result<Option<f64>, String> {
        let Some(node) = self.get(name) else {
            return Ok(None);
        };
        let value = match node {
            Node::Whole(value) => *value as f64,
            Node::Real(value) => *value,
            _ => f64::NAN,
        };
        if (0.0..=most).contains(&value) {
            Ok(Some(value))
        } else {
            Err(self.wrong(name, node, &format!("a number from 0 to {most:.0}")))
        }
    }
}

/// One line for a text that is not one JSON value, telling the usual accidents apart.
fn syntax_words(text: &str, error: &json::ParseError) -> String {
    let place = format!("line {} column {}", error.line, error.column);
    let at = if error.path.is_empty() {
        String::new()
    } else {
        format!("{} at ", json::shortened(&error.path))
    };
    if error.truncated {
        return format!("ends in the middle of the JSON ({at}{place}); the file looks truncated");
    }
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<serde::de::IgnoredAny>();
    if matches!(values.next(), Some(Ok(_))) && matches!(values.next(), Some(Ok(_))) {
        return format!(
            "holds a second JSON value at {place}: it looks like JSON lines; one JSON object a \
             file is needed"
        );
    }
    format!("is not JSON: {at}{place}: {}", error.words)
}

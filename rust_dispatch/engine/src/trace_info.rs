//! What is in trace files: `lowlat trace info`.
//!
//! Prefix sharing is that of an unbounded cache which serves the requests in the order in which
//! the files give them: what a prompt has in common, from its first token on, with any prompt
//! before it.

use std::collections::HashMap;

use comfy_table::{Cell, CellAlignment, Table};
use lowlat_core::digest::Fnv1a;
use serde::Serialize;

use crate::report::new_table;
use crate::trace::{Trace, TraceRequest};
use crate::words::{count, visible};

/// Grows when a field changes its meaning or goes; new fields leave it.
pub const SCHEMA_VERSION: u32 = 1;
/// A file's name in the table, in columns.
const NAME_COLUMNS: usize = 30;

/// What is in some traces. Token counts are those of the files.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Survey {
    /// `lowlat.trace.info`.
    pub schema: &'static str,
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// All files together.
    pub totals: Sums,
    /// File by file, in the order given.
    pub files: Vec<FileSurvey>,
}

/// Sums of one or more files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sums {
    /// Files; each is one session.
    pub sessions: usize,
    /// Requests, the subagents' included.
    pub requests: usize,
    /// Subagents, nested ones included.
    pub subagents: usize,
    /// Requests of subagents.
    pub subagent_requests: usize,
    /// Prompt tokens.
    pub input_tokens: u64,
    /// Longest prompt, tokens.
    pub input_tokens_most: u64,
    /// Generated tokens.
    pub output_tokens: u64,
    /// Longest answer, tokens.
    pub output_tokens_most: u64,
    /// Where prompt tokens come from.
    pub sharing: Sharing,
}

/// Prompt tokens by what they repeat; the first five sum to the prompt tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sharing {
    /// Of a prefix of an earlier prompt of the same agent.
    pub own_agent_tokens: u64,
    /// Further ones, of a prefix of an earlier prompt of another agent of the session.
    pub other_agent_tokens: u64,
    /// Further ones, of a prefix of a prompt of an earlier session.
    pub other_session_tokens: u64,
    /// Of prompts with hash ids, but of no earlier prefix.
    pub new_tokens: u64,
    /// Without a hash id, so that nothing can be said.
    pub unhashed_tokens: u64,
    /// In blocks that stand more than once in their own prompt (and count above as well).
    pub repeated_in_prompt_tokens: u64,
}

/// What is in one file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FileSurvey {
    /// As it was named.
    pub file: String,
    /// The session's id.
    pub id: String,
    /// Tokens a hash id stands for.
    pub block_size: usize,
    /// Whether hash ids mean nothing outside the file.
    pub local_hashes: bool,
    /// Seconds from the first to the last request's start, in the trace.
    pub span_s: f64,
    /// Its sums.
    pub sums: Sums,
    /// What was odd and accepted.
    pub notes: Vec<String>,
}

impl Sharing {
    /// Tokens that a cache could have had.
    #[must_use]
    pub fn shared_tokens(&self) -> u64 {
        self.own_agent_tokens + self.other_agent_tokens + self.other_session_tokens
    }
}

impl Sums {
    fn add(&mut self, other: &Self) {
        self.sessions += other.sessions;
        self.requests += other.requests;
        self.subagents += other.subagents;
        self.subagent_requests += other.subagent_requests;
        self.input_tokens += other.input_tokens;
        self.input_tokens_most = self.input_tokens_most.max(other.input_tokens_most);
        self.output_tokens += other.output_tokens;
        self.output_tokens_most = self.output_tokens_most.max(other.output_tokens_most);
        let (sharing, other) = (&mut self.sharing, &other.sharing);
        sharing.own_agent_tokens += other.own_agent_tokens;
        sharing.other_agent_tokens += other.other_agent_tokens;
        sharing.other_session_tokens += other.other_session_tokens;
        sharing.new_tokens += other.new_tokens;
        sharing.unhashed_tokens += other.unhashed_tokens;
        sharing.repeated_in_prompt_tokens += other.repeated_in_prompt_tokens;
    }
}

/// Prefixes that were seen: digest of the block ids from the first on, and how many tokens of the
/// last block.
type Seen = HashMap<u64, usize>;

/// Looks through `traces`.
///
/// ```
/// use lowlat_engine::{trace, trace_info};
/// let text = br#"{"id": "a", "block_size": 4, "requests": [
///     {"t": 0, "type": "n", "in": 8, "out": 2, "hash_ids": [1, 2]},
///     {"t": 1, "type": "n", "in": 13, "out": 2, "hash_ids": [1, 2, 3]}]}"#;
/// let survey = trace_info::survey(&[trace::parse("a.json", "a", text).unwrap()]);
/// assert_eq!(survey.totals.input_tokens, 21);
/// assert_eq!(survey.totals.sharing.own_agent_tokens, 8);
/// assert_eq!(survey.totals.sharing.new_tokens, 8 + 4);
/// assert_eq!(survey.totals.sharing.unhashed_tokens, 1);
/// ```
#[must_use]
pub fn survey(traces: &[Trace]) -> Survey {
    let mut totals = Sums::default();
    let mut earlier = Seen::new();
    let files: Vec<FileSurvey> = traces
        .iter()
        .map(|trace| {
            let file = survey_file(trace, &mut earlier);
            totals.add(&file.sums);
            file
        })
        .collect();
    Survey {
        schema: "lowlat.trace.info",
        schema_version: SCHEMA_VERSION,
        totals,
        files,
    }
}

fn survey_file(trace: &Trace, earlier: &mut Seen) -> FileSurvey {
    let requests = trace.agent.requests();
    let mut sums = Sums {
        sessions: 1,
        requests: requests.len(),
        subagents: trace.agent.num_subagents(),
        ..Sums::default()
    };
    let mut of_agents: HashMap<&str, Seen> = HashMap::new();
    let mut of_file = Seen::new();
    for request in &requests {
        let (input, output) = (request.input_tokens as u64, request.output_tokens as u64);
        sums.input_tokens += input;
        sums.output_tokens += output;
        sums.input_tokens_most = sums.input_tokens_most.max(input);
        sums.output_tokens_most = sums.output_tokens_most.max(output);
        let agent = request.path.rsplit_once('.').map_or("", |(agent, _)| agent);
        sums.subagent_requests += usize::from(!agent.is_empty());

        let prefixes = prefixes(trace, request);
        let own_seen = of_agents.entry(agent).or_default();
        let own = common_tokens(&prefixes, own_seen);
        let session = common_tokens(&prefixes, &of_file).max(own);
        let any = common_tokens(&prefixes, earlier).max(session);
        let hashed: usize = prefixes.iter().map(|prefix| prefix.block_tokens).sum();
        let sharing = &mut sums.sharing;
        sharing.own_agent_tokens += own as u64;
        sharing.other_agent_tokens += (session - own) as u64;
        sharing.other_session_tokens += (any - session) as u64;
        sharing.new_tokens += (hashed - any) as u64;
        sharing.unhashed_tokens += (request.input_tokens - hashed) as u64;
        sharing.repeated_in_prompt_tokens += repeated_tokens(request, &prefixes);
        for prefix in &prefixes {
            note(own_seen, prefix);
            note(&mut of_file, prefix);
        }
    }
    // Only now: a session's own prompts are no other session's.
    if !trace.local_hashes {
        for (digest, tokens) in of_file {
            let known = earlier.entry(digest).or_default();
            *known = (*known).max(tokens);
        }
    }
    FileSurvey {
        file: trace.file.clone(),
        id: trace.id.clone(),
        block_size: trace.block_size,
        local_hashes: trace.local_hashes,
        span_s: span_s(&requests),
        sums,
        notes: trace.notes.clone(),
    }
}

struct Prefix {
    /// Of all block ids up to this one.
    digest: u64,
    /// Tokens of this block that the prompt has.
    block_tokens: usize,
}

fn prefixes(trace: &Trace, request: &TraceRequest) -> Vec<Prefix> {
    // Blocks of another size hold other tokens.
    let mut digest = Fnv1a::new().u64(trace.block_size as u64);
    let of_block = |(place, id): (usize, &i64)| {
        digest = digest.u64(*id as u64);
        let first = place * trace.block_size;
        Prefix {
            digest: digest.finish(),
            block_tokens: trace.block_size.min(request.input_tokens - first),
        }
    };
    request.hash_ids.iter().enumerate().map(of_block).collect()
}

/// Tokens of the longest prefix that has been seen.
fn common_tokens(prefixes: &[Prefix], seen: &Seen) -> usize {
    let mut tokens = 0;
    for prefix in prefixes {
        let known = seen.get(&prefix.digest).copied().unwrap_or(0);
        tokens += known.min(prefix.block_tokens);
        if known < prefix.block_tokens {
            break;
        }
    }
    tokens
}

fn note(seen: &mut Seen, prefix: &Prefix) {
    let known = seen.entry(prefix.digest).or_default();
    *known = (*known).max(prefix.block_tokens);
}

fn repeated_tokens(request: &TraceRequest, prefixes: &[Prefix]) -> u64 {
    let mut ids = std::collections::HashSet::new();
    let blocks = request.hash_ids.iter().zip(prefixes);
    let repeated = blocks.filter(|(id, _)| !ids.insert(**id));
    repeated.map(|(_, prefix)| prefix.block_tokens as u64).sum()
}

/// Starts are counted from each agent's own beginning, so only the session's own are compared.
fn span_s(requests: &[&TraceRequest]) -> f64 {
    let own = requests
        .iter()
        .filter(|request| !request.path.contains('.'));
    let (first, last) = own.fold((f64::INFINITY, 0.0), |(first, last), request| {
        (request.t.min(first), request.t.max(last))
    });
    (last - first).max(0.0)
}

impl Survey {
    /// As JSON, with a line feed at its end.
    ///
    /// # Panics
    /// Never: a survey is plain data.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("plain data");
        text.push('\n');
        text
    }

    /// For a terminal of 100 columns.
    #[must_use]
    pub fn to_table(&self) -> String {
        let mut table = new_table();
        table.set_header(vec![
            "session",
            "requests",
            "subagents",
            "prompt",
            "longest",
            "output",
            "shared",
        ]);
        for file in &self.files {
            add_row(&mut table, &shortened(&visible(&file.file)), &file.sums);
        }
        if self.files.len() > 1 {
            add_row(&mut table, "all", &self.totals);
        }
        align_right(&mut table, 1..7);
        let totals = &self.totals;
        let sharing = &totals.sharing;
        let mut shares = new_table();
        shares.set_header(vec!["prompt tokens", "tokens", "share"]);
        let rows = [
            (
                "repeat the agent's own earlier prompts",
                sharing.own_agent_tokens,
            ),
            (
                "repeat other agents' of the session",
                sharing.other_agent_tokens,
            ),
            ("repeat earlier sessions'", sharing.other_session_tokens),
            ("are new", sharing.new_tokens),
            ("have no hash id", sharing.unhashed_tokens),
            (
                "stand more than once in their prompt",
                sharing.repeated_in_prompt_tokens,
            ),
        ];
        for (name, tokens) in rows {
            shares.add_row(vec![
                name.into(),
                count(tokens),
                percent(tokens, totals.input_tokens),
            ]);
        }
        align_right(&mut shares, 1..3);
        let mut out = format!("{table}\n{shares}\n");
        for file in &self.files {
            for note in &file.notes {
                out.push_str(&format!(
                    "{}: note: {}\n",
                    visible(&file.file),
                    visible(note)
                ));
            }
        }
        out
    }
}

fn add_row(table: &mut Table, name: &str, sums: &Sums) {
    let cells = [
        name.to_owned(),
        count(sums.requests as u64),
        count(sums.subagents as u64),
        count(sums.input_tokens),
        count(sums.input_tokens_most),
        count(sums.output_tokens),
        percent(sums.sharing.shared_tokens(), sums.input_tokens),
    ];
    table.add_row(cells.map(Cell::new));
}

fn align_right(table: &mut Table, columns: std::ops::Range<usize>) {
    for column in columns {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

fn percent(part: u64, whole: u64) -> String {
    let share = if whole > 0 {
        part as f64 / whole as f64
    } else {
        0.0
    };
    format!("{:.1} %", 100.0 * share)
}

/// The end of a long name tells files apart better than its beginning.
fn shortened(name: &str) -> String {
    let length = name.chars().count();
    if length <= NAME_COLUMNS {
        return name.to_owned();
    }
    let end: String = name.chars().skip(length - NAME_COLUMNS + 3).collect();
    format!("...{end}")
}

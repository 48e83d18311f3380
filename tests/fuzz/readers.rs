//! Everything that reads a text or a file: whatever it holds, the answer is a value that can be
//! used, or one clear line. Each finding became a test of its reader.

use std::fs::{self, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use lowlat_core::config::{self, ModelConfig};
use lowlat_core::graph_key::{KeyIdx, Record};
use lowlat_core::plan::{MemoryPlan, PlanOptions};
use lowlat_core::spec::{self, CheckOptions};
use lowlat_core::vote::{BALLOT_WORDS, Ballot, agree};
use lowlat_core::{Facts, Requirements, TpRank, guard};
use lowlat_engine::checkpoint::{self, Checkpoint, header};
use lowlat_engine::{trace, trace_info};
use lowlat_fuzz::{Change, change_bytes, change_json, changes, config as cases};
use proptest::prelude::*;
use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn corpus(name: &str) -> String {
    fs::read_to_string(root().join("tests/fuzz/corpus").join(name)).unwrap()
}

/// A refusal is one line that a terminal can show.
#[track_caller]
fn one_line(words: &str) {
    assert!(!words.is_empty());
    assert!(words.chars().count() <= 2000, "{} characters", words.len());
    let odd = words.chars().find(|letter| letter.is_control());
    assert_eq!(odd, None, "{words:?}");
}

/// The text changed as a value, or as bytes.
fn changed(text: &str, as_bytes: bool, changes: &[Change]) -> Vec<u8> {
    match serde_json::from_str::<Value>(text) {
        Ok(value) if !as_bytes => change_json(&value, changes).to_string().into_bytes(),
        _ => change_bytes(text.as_bytes(), changes),
    }
}

/// The same as text; what is no UTF-8 never reaches a reader of text.
fn changed_text(text: &str, as_bytes: bool, changes: &[Change]) -> String {
    String::from_utf8_lossy(&changed(text, as_bytes, changes)).into_owned()
}

fn config_text(idx: usize) -> &'static str {
    config::BUILT_IN[idx % config::BUILT_IN.len()].1
}

/// What was found by the tests below, each once more as it was found. Errors carried control
/// characters and names of any length out of what they read; a unit of 0 was divided by.
#[test]
fn findings() {
    let feature = r#"{"features": ["\nlora"]}"#;
    one_line(&CheckOptions::from_json(feature).unwrap_err().to_string());
    let page = CheckOptions::from_json(r#"{"page_size": "\u0000x"}"#);
    one_line(&page.map_or_else(|error| error.to_string(), |_| "read".to_owned()));
    let long = "x".repeat(5000);
    let record = corpus("record.json").replace("target_verify", &long);
    one_line(&Record::from_json(&record).unwrap_err().to_string());
    let config = config_text(0).replace("hidden_size", &format!("\\u001b{long}"));
    for problem in ModelConfig::from_json(&config).unwrap_err().problems() {
        one_line(problem);
    }
    let mut file = br#"........{"a": {"\u007ftype": 1}}"#.to_vec();
    let length = file.len() as u64 - 8;
    file[..8].copy_from_slice(&length.to_le_bytes());
    one_line(&header::entries(&file).unwrap_err());
    let trace = trace::parse("a.json", "a", b"{\"models\x7f\": [");
    one_line(&trace.unwrap_err().to_string());
    let unit = corpus("requirements.json").replace("\"unit\": 2", "\"unit\": 0");
    one_line(&Requirements::from_json(&unit).unwrap_err().to_string());
}

proptest! {
    #![proptest_config(cases(600))]

    #[test]
    fn traces(as_bytes: bool, changes in changes()) {
        let text = fs::read_to_string(root().join("examples/traces/small.json")).unwrap();
        match trace::parse("a.json", "a", &changed(&text, as_bytes, &changes)) {
            Err(error) => one_line(&error.to_string()),
            Ok(trace) => {
                for note in &trace.notes {
                    one_line(note);
                }
                for request in trace.agent.requests() {
                    prop_assert!(0 < request.input_tokens && 0 < request.output_tokens);
                    prop_assert!(request.t.is_finite());
                }
                let survey = trace_info::survey(std::slice::from_ref(&trace));
                serde_json::from_str::<Value>(&survey.to_json()).unwrap();
                prop_assert!(!survey.to_table().is_empty());
            }
        }
    }

    #[test]
    fn configurations(idx: usize, as_bytes: bool, changes in changes()) {
        let text = changed_text(config_text(idx), as_bytes, &changes);
        match ModelConfig::from_json(&text) {
            Err(error) => {
                prop_assert!(!error.problems().is_empty());
                for problem in error.problems() {
                    one_line(problem);
                }
            }
            Ok(config) => {
                match MemoryPlan::new(&config, &PlanOptions::default()) {
                    Err(error) => one_line(&error.to_string()),
                    Ok(plan) => {
                        serde_json::from_str::<Value>(&plan.to_json()).unwrap();
                        prop_assert!(!plan.to_text().is_empty());
                    }
                }
            }
        }
        for decline in spec::check(&text, &CheckOptions::default()) {
            one_line(&decline.to_string());
        }
    }

    #[test]
    fn options(as_bytes: bool, changes in changes()) {
        let text = changed_text(&corpus("options.json"), as_bytes, &changes);
        match CheckOptions::from_json(&text) {
            Err(error) => one_line(&error.to_string()),
            Ok(options) => {
                for decline in spec::check(config_text(0), &options) {
                    one_line(&decline.to_string());
                }
            }
        }
        let text = changed_text(r#"{"tp_size": 2, "page_size": 256, "context": 4096}"#, as_bytes,
                                &changes);
        match PlanOptions::from_json(&text) {
            Err(error) => one_line(&error.to_string()),
            Ok(options) => {
                let config = ModelConfig::from_json(config_text(1)).unwrap();
                if let Err(error) = MemoryPlan::new(&config, &options) {
                    one_line(&error.to_string());
                }
            }
        }
    }

    #[test]
    fn own_kernels(as_bytes: bool, changes in changes()) {
        let requirements = changed_text(&corpus("requirements.json"), as_bytes, &changes);
        let facts = changed_text(&corpus("facts.json"), as_bytes, &changes);
        match (Requirements::from_json(&requirements), Facts::from_json(&facts)) {
            (Ok(requirements), Ok(facts)) => {
                if let Err(declines) = guard(&facts, &requirements) {
                    prop_assert!(!declines.is_empty());
                    for decline in declines {
                        one_line(&decline.to_string());
                    }
                }
            }
            (Err(error), _) | (_, Err(error)) => one_line(&error.to_string()),
        }
    }

    #[test]
    fn records(as_bytes: bool, changes in changes()) {
        let text = changed_text(&corpus("record.json"), as_bytes, &changes);
        match Record::from_json(&text) {
            Err(error) => one_line(&error.to_string()),
            Ok(record) => {
                let again = Record::from_json(&record.to_json()).unwrap();
                prop_assert_eq!(&again, &record);
                prop_assert!(record.differences(&again).is_empty());
                prop_assert_eq!(record.digest(), again.digest());
                for idx in 0..record.entries().len() {
                    let views = record.entries()[idx].seals.iter().map(|seal| seal.view());
                    prop_assert!(record.check_seals(KeyIdx(idx as u32), views).is_ok());
                }
            }
        }
    }

    #[test]
    fn ballots(words in prop::collection::vec(any::<[u64; BALLOT_WORDS]>(), 0..4),
               changes in changes(), own in 0..5u32) {
        // Ballots of nothing, and a good one that was changed on its way.
        let good = Ballot::declining(TpRank(0), 2, lowlat_core::Reason::Feature).unwrap();
        let bytes: Vec<u8> = good.to_words().iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut bytes = change_bytes(&bytes, &changes);
        bytes.resize(8 * BALLOT_WORDS, 0);
        let mut close = [0; BALLOT_WORDS];
        for (word, bytes) in close.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().unwrap());
        }
        let ballots: Vec<Ballot> =
            words.iter().chain([&close]).map(Ballot::from_words).collect();
        if let Err(refusal) = agree(TpRank(own), &ballots) {
            one_line(&refusal.to_string());
        }
    }

    #[test]
    fn headers(as_bytes: bool, length_lies: bool, changes in changes()) {
        let text = changed(&corpus("header.json"), as_bytes, &changes);
        let length = if length_lies { changes.len() as u64 * 7919 } else { text.len() as u64 };
        let mut file = length.to_le_bytes().to_vec();
        file.extend_from_slice(&text);
        file.resize(file.len() + 64, 0);
        match header::entries(&file) {
            Err(words) => one_line(&words),
            Ok(entries) => {
                let mut at = 8;
                for entry in entries {
                    prop_assert!(at <= entry.begin && entry.begin <= entry.end);
                    prop_assert!(entry.end <= file.len());
                    at = entry.end;
                }
            }
        }
        let index = changed(&corpus("index.json"), as_bytes, &changes);
        if let Err(words) = header::index(&index) {
            one_line(&words);
        }
    }
}

/// A whole folder, in which one file's head was changed.
fn opened(folder: &Path, file: &str, head: &[u8], good: &[u8]) {
    let path = folder.join(file);
    let write = |bytes: &[u8]| {
        let mut open = OpenOptions::new().write(true).open(&path).unwrap();
        open.seek(SeekFrom::Start(0)).unwrap();
        open.write_all(bytes).unwrap();
    };
    // A head of the same length, so that the bytes behind it stay where they are.
    let mut head = head.to_vec();
    head.resize(good.len(), b' ');
    write(&head);
    let result = Checkpoint::open(folder);
    write(good);
    if let Err(error) = result {
        one_line(&error.to_string());
    }
}

#[test]
fn folders() {
    let folder = std::env::temp_dir().join(format!("lowlat-fuzz-{}", std::process::id()));
    checkpoint::make::make("tiny-v4", &folder, 2, false).unwrap();
    assert!(Checkpoint::open(&folder).is_ok());
    let files: Vec<String> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let heads: Vec<(String, Vec<u8>)> = files
        .into_iter()
        .map(|file| {
            let mut bytes = fs::read(folder.join(&file)).unwrap();
            if file.ends_with(".safetensors") {
                let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                bytes.truncate(8 + length as usize);
            }
            (file, bytes)
        })
        .collect();
    proptest!(cases(120), |(idx: usize, changes in changes())| {
        let (file, good) = &heads[idx % heads.len()];
        opened(&folder, file, &change_bytes(good, &changes), good);
    });
    assert!(Checkpoint::open(&folder).is_ok(), "every file is as it was");
    fs::remove_dir_all(&folder).unwrap();
}

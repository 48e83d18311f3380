//! Against the published sizes of DeepSeek-V4.1-Flash, in MB unless said otherwise. None of them
//! was computed by this code; they are rounded to two digits behind the point, so 1 % it is.

use super::*;
use crate::config::{ModelConfig, built_in};

fn config(name: &str) -> ModelConfig {
    ModelConfig::from_json(built_in(name).unwrap()).unwrap()
}

fn plan(tp_size: u32) -> MemoryPlan {
    let options = PlanOptions {
        tp_size,
        ..PlanOptions::default()
    };
    MemoryPlan::new(&config("v41-flash"), &options).unwrap()
}

#[track_caller]
fn near(seen: f64, published: f64) {
    let off = (seen / published - 1.0).abs();
    assert!(off < 0.01, "{seen} is {:.2} % off {published}", 100.0 * off);
}

/// MB on rank 0 of the tensors whose names start so.
fn mb(tp_size: u32, starts: &[&str]) -> f64 {
    let config = config("v41-flash");
    let bytes: u64 = tensors(&config)
        .iter()
        .filter(|tensor| starts.iter().any(|start| tensor.name.starts_with(start)))
        .map(|tensor| tensor.rank_bytes(0, tp_size))
        .sum();
    bytes as f64 / 1e6
}

/// MB on rank 0 of four of a layer's tensors of one group.
fn layer_mb(layer: u32, group: WeightGroup) -> f64 {
    let config = config("v41-flash");
    let prefix = format!("layers.{layer}.");
    let bytes: u64 = tensors(&config)
        .iter()
        .filter(|tensor| tensor.group == group && tensor.name.starts_with(&prefix))
        .map(|tensor| tensor.rank_bytes(0, 4))
        .sum();
    bytes as f64 / 1e6
}

#[test]
fn pieces_of_a_layer_have_the_published_sizes() {
    let pieces: [(&[&str], [f64; 4]); 8] = [
        (
            &["layers.3.attn.wq_a.", "layers.3.attn.wkv."],
            [9.19, 9.19, 9.19, 9.19],
        ),
        (&["layers.3.attn.wq_b."], [41.98, 20.99, 10.50, 5.25]),
        // Published for bf16 in memory; the checkpoint's fp8 is half, with its scales.
        (
            &["layers.3.attn.wo_a."],
            [67.11 / 2.0, 33.55 / 2.0, 16.78 / 2.0, 8.39 / 2.0],
        ),
        (&["layers.3.attn.wo_b."], [41.98, 20.99, 10.50, 5.25]),
        (
            &["layers.3.ffn.shared_experts."],
            [35.42, 17.71, 8.86, 4.43],
        ),
        (
            &["layers.3.ffn.experts."],
            [18.80, 9.40, 4.70, 2.35].map(|one| one * 384.0),
        ),
        (&["layers.3.ffn.gate.weight"], [3.93, 3.93, 3.93, 3.93]),
        (&["head.weight"], [1323.8, 661.9, 331.0, 165.5]),
    ];
    for (starts, published) in pieces {
        for (tp_size, published) in [1, 2, 4, 8].into_iter().zip(published) {
            near(mb(tp_size, starts), published);
        }
    }
    near(layer_mb(3, WeightGroup::Mixing), 3.95);
    near(mb(4, &["layers.1.engram.wkv."]), 157.4);
    near(mb(4, &["mtp.0.main_proj."]), 78.7);
    near(mb(4, &["mtp.2.markov_head.head."]), 16.5);
}

#[test]
fn layers_of_every_kind_have_the_published_attention() {
    let attention = |layer| layer_mb(layer, WeightGroup::Attention);
    near(attention(0), 19.68);
    near(attention(24), 25.26);
    near(attention(2), 35.88);
    near(attention(20), 30.63);
    near(layer_mb(3, WeightGroup::OProjection), 27.27 - 16.78 / 2.0);
}

#[test]
fn the_whole_model_has_the_published_size() {
    let gb = |tp_size, group: WeightGroup| plan(tp_size).ranks[0].groups[&group] as f64 / 1e9;
    for (tp_size, published) in [(2, 1.289), (4, 0.869), (8, 0.659)] {
        near(gb(tp_size, WeightGroup::Attention), published);
    }
    // What every row reads beside experts and tables: mHC, norms, Engram's projections.
    let other = gb(4, WeightGroup::Mixing) + gb(4, WeightGroup::EngramProjection);
    near(other, 0.473);
    near(gb(1, WeightGroup::Experts), 289.0);
    near(gb(1, WeightGroup::EngramTables), 202.8);
    near(gb(4, WeightGroup::EngramTables), 202.8 / 4.0);
    let checkpoint = plan(4).checkpoint_bytes as f64 / 1e9;
    assert!((475.0..=510.0).contains(&checkpoint), "{checkpoint} GB");
}

/// 96085 tensors are published. Ours, with one for each expert and without the token map, and the
/// confidence head leave what a vision tower of 32 layers and an aligner have: 8 a layer and 13.
#[test]
fn the_checkpoint_has_the_published_number_of_tensors() {
    let config = config("v41-flash");
    let ours: u64 = tensors(&config)
        .iter()
        .filter(|tensor| tensor.name != "engram.token_map")
        .map(|tensor| tensor.num_experts().unwrap_or(1))
        .sum();
    assert_eq!(96_085 - ours - 1, 32 * 8 + 13);
}

#[test]
fn ranks_hold_all_of_the_model_together() {
    for name in ["tiny-v41", "v41-flash"] {
        let config = config(name);
        for tp_size in [1, 2, 4] {
            for tensor in tensors(&config) {
                let parts: u64 = (0..tp_size)
                    .map(|rank| tensor.rank_bytes(rank, tp_size))
                    .sum();
                let copies = match tensor.split {
                    Split::Whole => u64::from(tp_size),
                    _ => 1,
                };
                assert_eq!(parts, copies * tensor.bytes(), "{}", tensor.name);
            }
        }
    }
    // Columns of rows: the first six primes of layer 1 and of layer 14 are the first rank's.
    let plan = plan(4);
    let tables: Vec<u64> = plan
        .ranks
        .iter()
        .map(|rank| rank.groups[&WeightGroup::EngramTables])
        .collect();
    assert!(tables.is_sorted_by(|a, b| a < b), "{tables:?}");
}

#[test]
fn caches_grow_as_published() {
    let kv = plan(4).kv;
    near(kv.latent_bytes_per_token, 1463.0);
    near(kv.index_bytes_per_token, 170.0);
    near(kv.window_bytes_per_token, 40.0 * 585.0);
    near(kv.draft_window_bytes_per_token, 3.0 * 585.0);
    // Three sources of ratio 2, eight rows of 2 x 512 numbers.
    assert_eq!(kv.state_bytes_per_request, 3 * 8 * 2 * 512 * 4);
}

#[test]
fn a_load_takes_its_pages_and_a_step_reads_the_published_bytes() {
    let options = PlanOptions {
        tp_size: 4,
        context: Some(128 * 1024),
        requests: 8,
        ..PlanOptions::default()
    };
    let config = config("v41-flash");
    let load = MemoryPlan::new(&config, &options).unwrap().load.unwrap();
    let tokens = 8.0 * 131_072.0;
    near(load.latent_bytes as f64, 1463.0 * tokens);
    near(load.index_bytes as f64, 170.0 * tokens);
    near(load.window_bytes_whole as f64, 43.0 * 585.0 * tokens);
    // 133 rows touch two pages of 149760 bytes in each of 43 layers.
    assert_eq!(load.window_bytes_least, 8 * 2 * 43 * 149_760);
    let (latent, index, state) = (load.latent_bytes, load.index_bytes, load.state_bytes);
    assert_eq!(
        load.total_bytes_whole,
        latent + index + state + load.window_bytes_whole
    );
    assert_eq!(
        load.total_bytes_least,
        latent + index + state + load.window_bytes_least
    );
    assert_eq!(load.reads.window_bytes_per_layer, 133 * 584);
    near(load.reads.selected_bytes_per_layer as f64, 299e3);
    // Three sources of half the positions, one of all, four of the candidate blocks' 16384.
    let keys = 3 * 65_536 + 131_072 + 4 * 16_384;
    assert_eq!(load.reads.index_bytes, keys * 68);
    // A page is taken whole, and a short context has no more window than itself.
    let short = PlanOptions {
        context: Some(1),
        requests: 1,
        ..options
    };
    let load = MemoryPlan::new(&config, &short).unwrap().load.unwrap();
    assert_eq!(load.window_bytes_least, 43 * 149_760);
    assert_eq!(load.window_bytes_whole, 43 * 149_760);
    assert_eq!(load.latent_bytes, 3 * 74_880 + 149_760);
    assert_eq!(load.reads.index_bytes, 5 * 68);
}

#[test]
fn the_table_fits_a_terminal_and_the_json_names_every_group() {
    let options = PlanOptions {
        tp_size: 8,
        context: Some(1 << 20),
        requests: 64,
        ..PlanOptions::default()
    };
    let plan = MemoryPlan::new(&config("v41-flash"), &options).unwrap();
    let text = plan.to_text();
    assert!(text.lines().all(|line| line.len() <= 100), "{text}");
    for words in [
        "o-projection",
        "engram tables",
        "draft",
        "kv of 64 x 1048576",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let json: serde_json::Value = serde_json::from_str(&plan.to_json()).unwrap();
    let groups = json["ranks"][7]["groups"].as_object().unwrap();
    assert_eq!(groups.len(), WeightGroup::ALL.len());
    assert!(groups["o_projection"].as_u64().unwrap() > 0);
    assert_eq!(json["load"]["requests"], 64);
}

#[test]
fn options_out_of_range_are_refused_by_name() {
    let config = config("tiny-v41");
    let refused = |options: &str| {
        PlanOptions::from_json(options)
            .and_then(|options| MemoryPlan::new(&config, &options))
            .unwrap_err()
            .to_string()
    };
    assert_eq!(refused(r#"{"tp_size": 0}"#), "tp_size is 0; needs 1 to 64");
    assert!(refused(r#"{"tp_size": 8}"#).contains("layers.0.attn.wo_a.scale [4, 32]"));
    assert!(refused(r#"{"page_size": 7}"#).starts_with("page_size is 7; needs an even number"));
    assert!(refused(r#"{"context": 0}"#).starts_with("context is 0; needs 1 to"));
    assert!(refused(r#"{"requests": 9000000000}"#).starts_with("requests is 9000000000"));
    assert!(refused(r#"{"contexts": 1}"#).contains("unknown field `contexts`"));
}

/// The largest sizes that the reader lets through neither overflow nor take time.
#[test]
fn absurd_sizes_saturate() {
    let mut text: serde_json::Value = serde_json::from_str(built_in("tiny-v41").unwrap()).unwrap();
    for name in [
        "vocab_size",
        "hidden_size",
        "n_routed_experts",
        "moe_intermediate_size",
        "q_lora_rank",
    ] {
        text[name] = (1u64 << 30).into();
    }
    let config = ModelConfig::from_json(&text.to_string()).unwrap();
    let plan = MemoryPlan::new(&config, &PlanOptions::default()).unwrap();
    assert_eq!(plan.checkpoint_bytes, u64::MAX);
    assert!(plan.to_text().contains("TB"));
}

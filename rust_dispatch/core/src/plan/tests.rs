//! Against the published sizes of DeepSeek-V4-Flash and V4.1-Flash, in MB unless said otherwise.
//! None of them was computed by this code; they are rounded to two digits behind the point, so 1 %
//! it is.

use super::*;
use crate::config::{ModelConfig, built_in};

fn config(name: &str) -> ModelConfig {
    ModelConfig::from_json(built_in(name).unwrap()).unwrap()
}

fn plan_of(name: &str, tp_size: u32) -> MemoryPlan {
    let options = PlanOptions {
        tp_size,
        ..PlanOptions::default()
    };
    MemoryPlan::new(&config(name), &options).unwrap()
}

fn plan(tp_size: u32) -> MemoryPlan {
    plan_of("v41-flash", tp_size)
}

#[track_caller]
fn near(seen: f64, published: f64) {
    let off = (seen / published - 1.0).abs();
    assert!(off < 0.01, "{seen} is {:.2} % off {published}", 100.0 * off);
}

/// MB on rank 0 of the tensors that `wanted` lets pass.
fn mb_of(name: &str, tp_size: u32, wanted: impl Fn(&PlannedTensor) -> bool) -> f64 {
    let tensors = tensors(&config(name));
    let wanted = tensors.iter().filter(|tensor| wanted(tensor));
    let bytes: u64 = wanted.map(|tensor| tensor.rank_bytes(0, tp_size)).sum();
    bytes as f64 / 1e6
}

/// The same of those whose names start so.
fn mb_named(name: &str, tp_size: u32, starts: &[&str]) -> f64 {
    mb_of(name, tp_size, |tensor| {
        starts.iter().any(|start| tensor.name.starts_with(start))
    })
}

fn mb(tp_size: u32, starts: &[&str]) -> f64 {
    mb_named("v41-flash", tp_size, starts)
}

/// MB on rank 0 of four of a layer's tensors of one group.
fn group_mb(name: &str, layer: u32, group: WeightGroup) -> f64 {
    let prefix = format!("layers.{layer}.");
    mb_of(name, 4, |tensor| {
        tensor.group == group && tensor.name.starts_with(&prefix)
    })
}

fn layer_mb(layer: u32, group: WeightGroup) -> f64 {
    group_mb("v41-flash", layer, group)
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

#[test]
fn pieces_of_a_v4_layer_have_the_published_sizes() {
    let pieces: [(&[&str], [f64; 4]); 7] = [
        (
            &["layers.3.attn.wq_a.", "layers.3.attn.wkv."],
            [6.30, 6.30, 6.30, 6.30],
        ),
        (&["layers.3.attn.wq_b."], [33.56, 16.78, 8.39, 4.20]),
        (&["layers.3.attn.wo_a."], [33.56, 16.78, 8.39, 4.20]),
        (&["layers.3.attn.wo_b."], [33.56, 16.78, 8.39, 4.20]),
        (
            &["layers.3.ffn.shared_experts."],
            [25.17, 12.59, 6.29, 3.15],
        ),
        (
            &["layers.3.ffn.experts."],
            [13.37, 6.69, 3.34, 1.67].map(|one| one * 256.0),
        ),
        (&["head.weight"], [1059.1, 529.5, 264.8, 132.4]),
    ];
    let flash = "v4-flash";
    for (starts, published) in pieces {
        for (tp_size, published) in [1, 2, 4, 8].into_iter().zip(published) {
            near(mb_named(flash, tp_size, starts), published);
        }
    }
    near(group_mb(flash, 3, WeightGroup::Mixing), 3.16);
    near(group_mb(flash, 3, WeightGroup::Gate), 2.10);
    // Four bytes an entry on a rank, eight in the file.
    let table = mb_named(flash, 4, &["layers.2.ffn.gate.tid2eid"]);
    near(table, 129_280.0 * 6.0 * 4.0 / 1e6);
    near(group_mb(flash, 2, WeightGroup::Gate), 2.10 + table);
    let tensors = tensors(&config(flash));
    let in_file = tensors.iter().find(|t| t.name.ends_with("tid2eid"));
    assert_eq!(in_file.unwrap().bytes(), 129_280 * 6 * 8);
    near(mb_named(flash, 4, &["layers.2.attn.compressor."]), 16.80);
    near(mb_named(flash, 4, &["layers.2.attn.indexer."]), 13.11);
    let indexer = |tail: &str| mb_named(flash, 4, &[&format!("layers.2.attn.indexer.{tail}")]);
    near(indexer("wq_b."), 8.39);
    near(indexer("compressor."), 4.20);
    near(indexer("weights_proj."), 0.52);
    near(mb_named(flash, 4, &["layers.3.attn.compressor."]), 8.65);
    near(mb_named(flash, 4, &["mtp.0.main_proj."]), 50.3);
    near(mb_named(flash, 4, &["mtp.2.markov_head.markov_w2."]), 16.5);
}

/// The formulas of bytes a layer, worked out here: heads, ranks and blocks as they are published.
#[test]
fn layers_of_every_v4_kind_have_the_bytes_of_the_formulas() {
    let (hidden, q_lora, inner) = (4096.0, 1024.0, 2048.0);
    let (s8, s4) = (1.0 + 1.0 / 16384.0, 0.5 + 1.0 / 32.0);
    for tp in [1u32, 2, 4, 8] {
        let ranks = f64::from(tp);
        let group = |layer: u32, wanted: WeightGroup| {
            let prefix = format!("layers.{layer}.");
            1e6 * mb_of("v4-flash", tp, |tensor| {
                tensor.group == wanted && tensor.name.starts_with(&prefix)
            })
        };
        let projections = (q_lora + 512.0) * hidden * s8 + 64.0 * 512.0 * q_lora * s8 / ranks;
        let pooled = |width: f64, ratio: f64| 2.0 * width * hidden * 2.0 + ratio * width * 4.0;
        let indexer = 64.0 * 128.0 * q_lora * s8 + 64.0 * hidden * 2.0 + pooled(256.0, 4.0);
        for (layer, extra) in [
            (0, 0.0),
            (2, pooled(1024.0, 4.0) + indexer),
            (3, pooled(512.0, 128.0)),
            (42, pooled(1024.0, 4.0) + indexer),
        ] {
            near(group(layer, WeightGroup::Attention), projections + extra);
            let o_projection = (8192.0 * 4096.0 + hidden * 8192.0) * s8 / ranks;
            near(group(layer, WeightGroup::OProjection), o_projection);
            let experts = 256.0 * 3.0 * hidden * inner * s4 / ranks;
            near(group(layer, WeightGroup::Experts), experts);
            let shared = 3.0 * hidden * inner * s8 / ranks;
            near(group(layer, WeightGroup::SharedExpert), shared);
            let mixing = 2.0 * 24.0 * 4.0 * hidden * 4.0 + 2.0 * 2.0 * hidden;
            near(group(layer, WeightGroup::Mixing), mixing);
        }
    }
}

#[test]
fn the_whole_v4_model_has_the_published_size() {
    let gb = |tp_size, group: WeightGroup| {
        plan_of("v4-flash", tp_size).ranks[0].groups[&group] as f64 / 1e9
    };
    for (tp_size, attention, o_projection) in
        [(2, 1.793, 1.443), (4, 1.433, 0.722), (8, 1.252, 0.361)]
    {
        near(gb(tp_size, WeightGroup::Attention), attention);
        near(gb(tp_size, WeightGroup::OProjection), o_projection);
        near(gb(tp_size, WeightGroup::Mixing), 0.136);
    }
    // Published for the files as they first came, with one layer behind the target's instead of
    // the draft's three stages.
    let tensors = tensors(&config("v4-flash"));
    let first = tensors.iter().filter(|tensor| {
        !["mtp.1.", "mtp.2."]
            .iter()
            .any(|stage| tensor.name.starts_with(stage))
    });
    let bytes: u64 = first.map(PlannedTensor::bytes).sum();
    near(bytes as f64 / 1e9, 159.6);
    assert_eq!(
        gb(1, WeightGroup::Experts),
        gb(8, WeightGroup::Experts) * 8.0
    );
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
    for (name, _) in crate::config::BUILT_IN {
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
                let whole = match tensor.rank_dtype == tensor.dtype {
                    true => tensor.bytes(),
                    false => tensor.bytes() / tensor.dtype.bytes() * tensor.rank_dtype.bytes(),
                };
                assert_eq!(parts, copies * whole, "{}", tensor.name);
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
fn v4_caches_grow_as_published() {
    let kv = plan_of("v4-flash", 4).kv;
    near(kv.latent_bytes_per_token, 3206.0);
    near(kv.index_bytes_per_token, 693.0);
    near(kv.window_bytes_per_token, 43.0 * 585.0);
    near(kv.draft_window_bytes_per_token, 3.0 * 585.0);
    // 20 compressors of ratio 128: 256 rows of 2 x 512 numbers a request.
    assert_eq!(kv.state_bytes_per_request, 20 * 256 * 2 * 512 * 4);
    // 21 of ratio 4: 16 rows of 4 x 512 and 4 x 128 numbers a page of 256 tokens.
    let page = 21.0 * 16.0 * 4.0 * (512.0 + 128.0) * 4.0;
    assert_eq!(kv.state_bytes_per_token, page / 256.0);
    let tiny = plan_of("tiny-v4", 1).kv;
    assert_eq!(tiny.page_size, 128);
    assert_eq!(tiny.state_bytes_per_request, 3 * 256 * 2 * 512 * 4);
}

#[test]
fn a_v4_load_takes_its_pages_and_a_step_reads_the_published_bytes() {
    let context = 128 * 1024;
    let options = PlanOptions {
        tp_size: 4,
        context: Some(context),
        ..PlanOptions::default()
    };
    let config = config("v4-flash");
    let load = MemoryPlan::new(&config, &options).unwrap().load.unwrap();
    near(load.latent_bytes as f64, 3206.0 * context as f64);
    near(load.index_bytes as f64, 693.0 * context as f64);
    let page = 46 * 149_760 + 21 * 16 * 4 * (512 + 128) * 4;
    assert_eq!(load.window_bytes_whole, context / 256 * page);
    // A window of 133 rows touches two pages, each with its state.
    assert_eq!(load.window_bytes_least, 2 * page);
    near(load.reads.index_bytes as f64, 90.8e6);
    near(load.reads.whole_bytes as f64, 12.0e6);
    near(load.reads.selected_bytes_per_layer as f64, 299e3);
    assert_eq!(load.reads.window_bytes_per_layer, 133 * 584);
    // A block of 128 that is not whole has no entry yet.
    let short = PlanOptions {
        context: Some(127),
        ..options
    };
    let load = MemoryPlan::new(&config, &short).unwrap().load.unwrap();
    assert_eq!(load.reads.whole_bytes, 0);
    assert_eq!(load.reads.index_bytes, 21 * 31 * 132);
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
    assert!(refused(r#"{"page_size": 7}"#).starts_with("page_size is 7; needs a multiple of 2 "));
    let v4 = PlanOptions {
        page_size: Some(64),
        ..PlanOptions::default()
    };
    let error = MemoryPlan::new(&self::config("tiny-v4"), &v4).unwrap_err();
    assert_eq!(
        error.to_string(),
        "page_size is 64; needs a multiple of 128 from 128 to 1048576"
    );
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

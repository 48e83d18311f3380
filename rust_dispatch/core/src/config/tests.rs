use serde_json::{Value, json};

use super::*;

type Fields = serde_json::Map<String, Value>;

fn edited_of(name: &str, edit: impl FnOnce(&mut Fields)) -> String {
    let mut value: Value = serde_json::from_str(built_in(name).unwrap()).unwrap();
    edit(value.as_object_mut().unwrap());
    value.to_string()
}

fn edited(edit: impl FnOnce(&mut Fields)) -> String {
    edited_of("tiny-v41", edit)
}

fn problems_of(name: &str, edit: impl FnOnce(&mut Fields)) -> Vec<String> {
    ModelConfig::from_json(&edited_of(name, edit))
        .unwrap_err()
        .problems()
        .to_vec()
}

fn problems(edit: impl FnOnce(&mut Fields)) -> Vec<String> {
    problems_of("tiny-v41", edit)
}

fn model(name: &str) -> ModelConfig {
    ModelConfig::from_json(built_in(name).unwrap()).unwrap()
}

fn flash() -> ModelConfig {
    model("v41-flash")
}

/// model.md 10.2 and 10.3: values published with the model, not computed by this code.
#[test]
fn engram_constants_are_the_published_ones() {
    let engram = flash().engram.unwrap();
    let [first, second] = &engram.tables[..] else {
        panic!("two tables")
    };
    assert_eq!((first.layer, first.num_rows()), (1, 384_006_168));
    assert_eq!((second.layer, second.num_rows()), (14, 384_016_682));
    assert_eq!(first.primes[0][..3], [16_000_057, 16_000_079, 16_000_081]);
    assert_eq!(first.primes[2][7], 16_000_463);
    assert_eq!(second.primes[0][..3], [16_000_477, 16_000_487, 16_000_499]);
    assert_eq!(second.primes[2][7], 16_000_889);
    assert_eq!(
        first.multipliers,
        [
            76_632_096_046_245,
            4_839_876_093_313,
            35_959_672_319_349,
            73_987_337_458_391
        ]
    );
    assert_eq!(
        second.multipliers,
        [
            67_716_810_739_261,
            51_510_806_800_915,
            30_921_347_202_721,
            82_619_226_485_591
        ]
    );
}

#[test]
fn layers_read_the_nearest_source_at_or_before_them() {
    let config = flash();
    assert_eq!(config.kv_sources().collect::<Vec<_>>(), [2, 8, 14, 20]);
    assert_eq!(
        config.index_sources().collect::<Vec<_>>(),
        [2, 8, 14, 20, 24, 28, 32, 36]
    );
    let layer = |ratio, kv, index| LayerConfig {
        ratio,
        kv_source: Some(kv),
        index_source: Some(index),
        candidate_source: None,
        engram: None,
        hash_gate: false,
    };
    assert_eq!(config.layers[7], layer(2, 2, 2));
    assert_eq!(
        config.layers[14],
        LayerConfig {
            engram: Some(1),
            ..layer(2, 14, 14)
        }
    );
    assert_eq!(config.layers[20], layer(1, 20, 20));
    assert_eq!(
        config.layers[28],
        LayerConfig {
            candidate_source: Some(20),
            ..layer(1, 20, 28)
        }
    );
    assert_eq!(config.layers[39], layer(1, 20, 36));
    assert_eq!(config.layers[1].kv_source, None);
    assert_eq!(config.layers[1].engram, Some(0));
}

/// The published pattern: two layers without a compressed set, then ratios 4 and 128 by turns.
#[test]
fn v4_layers_own_what_they_read() {
    let config = model("v4-flash");
    assert_eq!(config.layers.len(), 43);
    for (layer_idx, layer) in (0u32..).zip(&config.layers) {
        let ratio = match layer_idx {
            0 | 1 => 0,
            even if even % 2 == 0 => 4,
            _ => 128,
        };
        let expected = LayerConfig {
            ratio,
            kv_source: (ratio != 0).then_some(layer_idx),
            index_source: (ratio == 4).then_some(layer_idx),
            candidate_source: None,
            engram: None,
            hash_gate: layer_idx < 3,
        };
        assert_eq!(*layer, expected, "layer {layer_idx}");
    }
    assert_eq!(
        (config.kv_sources().count(), config.index_sources().count()),
        (41, 21)
    );
    assert!(config.engram.is_none() && config.candidates.is_none());
    let draft = config.draft.unwrap();
    assert_eq!(
        (draft.num_stages, draft.block, draft.mask_token),
        (3, 5, 128_799)
    );
    // The file has no experts of the draft's own: they are as many as the target's.
    assert_eq!((draft.num_experts, draft.experts_per_token), (256, 6));
    assert_eq!(draft.target_layers, [40, 41, 42]);
}

#[test]
fn v4_drafts_experts_may_be_its_own() {
    let own = edited_of("tiny-v4", |map| {
        map.insert("dspark_n_routed_experts".into(), json!(8));
        map.insert("dspark_num_experts_per_tok".into(), json!(3));
    });
    let draft = ModelConfig::from_json(&own).unwrap().draft.unwrap();
    assert_eq!((draft.num_experts, draft.experts_per_token), (8, 3));
    let lines = problems_of("tiny-v4", |map| {
        map.insert("dspark_n_routed_experts".into(), json!(4));
    });
    assert_eq!(
        lines,
        [
            "dspark_n_routed_experts is 4; needs num_experts_per_tok, 6, or \
             dspark_num_experts_per_tok beside it"
        ]
    );
}

/// How many stages a V4 file has: by its ratios, which a first file counts as one next-token layer.
#[test]
fn v4_stages_are_counted_by_the_ratios() {
    let stages = |edit: fn(&mut Fields)| {
        let config = ModelConfig::from_json(&edited_of("tiny-v4", edit)).unwrap();
        config.draft.map_or(0, |draft| draft.num_stages)
    };
    let ratios = |tail: usize| {
        let layers = [0, 0, 4, 128, 4, 128, 4, 128];
        json!([&layers[..], &vec![0; tail]].concat())
    };
    assert_eq!(stages(|_| {}), 3);
    assert_eq!(
        stages(|map| {
            map.insert("num_nextn_predict_layers".into(), json!(1));
        }),
        3
    );
    assert_eq!(
        stages(|map| {
            map.remove("num_nextn_predict_layers");
        }),
        3
    );
    // The model as it was first published: one next-token layer of another kind, not served.
    let mut base: Value = serde_json::from_str(built_in("tiny-v4").unwrap()).unwrap();
    base["num_nextn_predict_layers"] = json!(1);
    base["compress_ratios"] = ratios(1);
    let map = base.as_object_mut().unwrap();
    map.retain(|name, _| !name.starts_with("dspark_"));
    assert_eq!(
        ModelConfig::from_json(&base.to_string()).unwrap().draft,
        None
    );
    let lines = problems_of("tiny-v4", |map| {
        map.insert("num_nextn_predict_layers".into(), json!(2));
    });
    assert_eq!(
        lines,
        [
            "compress_ratios has 3 entries behind the 8 layers, num_nextn_predict_layers is 2; \
             needs one number of the draft's stages, at most 4"
        ]
    );
    let lines = problems_of("tiny-v4", |map| {
        map.insert("compress_ratios".into(), ratios(0));
        map.remove("num_nextn_predict_layers");
    });
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].starts_with("num_nextn_predict_layers is missing or 0"));
}

#[test]
fn a_nested_text_config_reads_the_same() {
    for (name, model_type, architecture) in [
        ("v41-flash", "deepseek_v41", "DeepseekV41ForCausalLM"),
        ("v4-flash", "deepseek_v4", "DeepseekV4ForCausalLM"),
    ] {
        let mut text: Value = serde_json::from_str(built_in(name).unwrap()).unwrap();
        let quantization = text
            .as_object_mut()
            .unwrap()
            .remove("quantization_config")
            .unwrap();
        let nested = json!({
            "model_type": model_type,
            "architectures": [architecture],
            "text_config": text,
            "quantization_config": quantization,
            "vision_config": {"num_hidden_layers": 32},
        });
        let read = ModelConfig::from_json(&nested.to_string()).unwrap();
        assert_eq!(read, model(name));
    }
}

#[test]
fn every_problem_is_listed_and_named() {
    let lines = problems(|map| {
        map.remove("hidden_size");
        map.insert("q_lora_rank".into(), json!("64"));
        map.insert("rope_scaling".into(), json!({"type": "yarn", "factor": -1}));
        map.insert("hc_mult".into(), json!(2));
    });
    let expected = [
        "hc_mult is 2; these kernels need 4",
        "hidden_size is missing; needs a multiple of 32 from 32 to 1073741824",
        "q_lora_rank is \"64\"; needs a multiple of 32 from 32 to 1073741824",
        "rope_scaling.factor is -1; needs a number over 0",
        "rope_scaling.beta_fast is missing; needs a number over 0",
        "rope_scaling.beta_slow is missing; needs a number over 0",
        "rope_scaling.original_max_position_embeddings is missing; needs a number over 0",
    ];
    assert_eq!(lines, expected);
}

#[test]
fn an_object_of_another_type_is_told_once_for_all_its_fields() {
    for name in ["tiny-v4", "tiny-v41"] {
        let lines = problems_of(name, |map| {
            map.insert("quantization_config".into(), json!("fp8"));
            map.insert("rope_scaling".into(), json!([16]));
        });
        let expected = [
            "rope_scaling is a list of 1; needs an object",
            "quantization_config is \"fp8\"; needs an object",
        ];
        assert_eq!(lines, expected);
        // A good one in the whole file does not hide a bad one in the text part.
        let lines = problems_of(name, |map| {
            map.insert("text_config".into(), json!({"quantization_config": 8}));
        });
        let expected = ["text_config.quantization_config is 8; needs an object"];
        assert_eq!(lines, expected);
        let absent = edited_of(name, |map| {
            map.insert("quantization_config".into(), Value::Null);
        });
        assert_eq!(ModelConfig::from_json(&absent).unwrap(), model(name));
    }
}

#[test]
fn each_stage_of_the_draft_is_fed_by_a_layer() {
    for name in ["tiny-v4", "tiny-v41"] {
        for layers in [json!([1, 2]), json!([1, 2, 3, 4]), json!([])] {
            let lines = problems_of(name, |map| {
                map.insert("dspark_target_layer_ids".into(), layers.clone());
            });
            let expected = format!(
                "dspark_target_layer_ids names {} layers; needs 3, one for each stage of the draft",
                layers.as_array().unwrap().len()
            );
            assert_eq!(lines, [expected]);
        }
        // A list that is none is told once.
        let lines = problems_of(name, |map| {
            map.insert("dspark_target_layer_ids".into(), json!([3, 2, 1]));
        });
        assert_eq!(lines.len(), 1, "{lines:?}");
    }
}

#[test]
fn a_model_has_the_positions_of_a_step() {
    for name in ["tiny-v4", "tiny-v41"] {
        let lines = problems_of(name, |map| {
            map.insert("max_position_embeddings".into(), json!(5));
        });
        let expected = "max_position_embeddings is 5; needs a whole number from 6 to 2147483647";
        assert_eq!(lines, [expected]);
    }
}

#[test]
fn bad_files_end_in_one_line() {
    let line = |text: &str| ModelConfig::from_json(text).unwrap_err().to_string();
    assert!(line("").starts_with("config.json is not JSON"));
    assert!(line("{\"a\": 1").starts_with("config.json is not JSON"));
    assert_eq!(
        line("[1, 2]"),
        "config.json holds a list of 2; needs an object"
    );
    assert_eq!(
        line("{\"text_config\": 3}"),
        "text_config is 3; needs an object"
    );
    assert!(line("{}").starts_with("model_type and architectures are missing"));
    assert!(line("{\"model_type\": \"llama\"}").contains("\"llama\""));
}

#[test]
fn every_problem_of_a_v4_file_is_listed_and_named() {
    let lines = problems_of("tiny-v4", |map| {
        map.insert(
            "compress_ratios".into(),
            json!([0, 0, 2, 128, 4, 128, 4, 128]),
        );
        map.insert("engram_layer_ids".into(), json!([1]));
        map.insert("candidate_source_layer_id".into(), json!(-1));
        map.insert("hc_pre_from_prev_sublayer".into(), json!(true));
        map.insert("q_lora_rank".into(), json!(64));
        map.insert("num_hash_layers".into(), json!(9));
        map.remove("dspark_markov_rank");
        map.insert(
            "quantization_config".into(),
            json!({"weight_block_size": [32, 32]}),
        );
    });
    let expected = [
        "hc_pre_from_prev_sublayer is true; these kernels need false",
        "quantization_config.weight_block_size is [32,32]; these kernels need [128,128]",
        "engram_layer_ids is a list of 1; DeepSeek-V4 has none, needs it left out",
        "compress_ratios is a list of 8; needs 8 ratios of 0, 4 or 128, then 3 of 0 for the \
         draft's stages",
        "num_hash_layers is 9; needs a whole number from 0 to 8",
        "dspark_markov_rank is missing; needs a whole number from 1 to 1073741824",
        "q_lora_rank is 64; needs a multiple of 128 from 128 to 1073741824",
    ];
    assert_eq!(lines, expected);
}

/// Without the reader's own look the last of two would count, as in the published readers.
#[test]
fn a_field_that_is_there_twice_is_refused_by_name() {
    let text = built_in("tiny-v4").unwrap();
    let twice = text.replace(
        "\"hidden_size\": 128,",
        "\"hidden_size\": 256, \"hidden_size\": 128,",
    );
    let twice = twice.replace("\"factor\": 16,", "\"factor\": 16, \"factor\": 16,");
    let lines = ModelConfig::from_json(&twice).unwrap_err();
    assert_eq!(
        lines.problems(),
        [
            "hidden_size is there twice; needs to be there once",
            "rope_scaling.factor is there twice; needs to be there once",
        ]
    );
}

#[test]
fn the_model_type_decides_whose_rules_they_are() {
    // SGLang's own configuration object carries V4's architecture name for V4.1.
    let renamed = edited(|map| {
        map.insert("architectures".into(), json!(["DeepseekV4ForCausalLM"]));
    });
    let config = ModelConfig::from_json(&renamed).unwrap();
    assert_eq!(config.family, ModelFamily::V41);
    // Either of the two is enough.
    for name in ["model_type", "architectures"] {
        let one = edited_of("tiny-v4", |map| {
            map.remove(name);
        });
        assert_eq!(ModelConfig::from_json(&one).unwrap(), model("tiny-v4"));
    }
    for text in [
        json!({"model_type": "deepseek_v42", "hidden_size": 4096}),
        json!({"model_type": "deepseek_v3", "architectures": ["DeepseekV4ForCausalLM"]}),
        json!({"model_type": "deepseek_v3", "architectures": ["DeepseekV41ForCausalLM"]}),
        json!({"architectures": ["DeepseekV3ForCausalLM"]}),
    ] {
        let lines = ModelConfig::from_json(&text.to_string()).unwrap_err();
        let [line] = lines.problems() else {
            panic!("{lines}")
        };
        assert!(
            line.contains("needs deepseek_v4 (architecture DeepseekV4ForCausalLM) or deepseek_v41"),
            "{line}"
        );
    }
}

#[test]
fn patterns_that_name_no_source_are_refused() {
    let lines = problems(|map| {
        map.insert("kv_source_layer_ids".into(), json!([2, 4]));
    });
    assert_eq!(lines.len(), 4, "{lines:?}");
    assert!(
        lines[0].contains("no layer of ratio 1 at or before layer 6"),
        "{}",
        lines[0]
    );
    let lines = problems(|map| {
        map.insert("index_source_layer_ids".into(), json!([2, 6, 8]));
    });
    assert!(
        lines[0].contains("between layer 4 and its KV source 4"),
        "{lines:?}"
    );
    let lines = problems(|map| {
        map.insert("candidate_source_layer_id".into(), json!(7));
    });
    assert_eq!(
        lines,
        ["candidate_source_layer_id is 7; needs one of index_source_layer_ids"]
    );
}

#[test]
fn table_sizes_that_other_primes_made_are_refused() {
    let lines = problems(|map| {
        map.insert("engram_num_embeddings".into(), json!([25874, 30059]));
    });
    assert_eq!(lines.len(), 1);
    assert!(
        lines[0].contains("[25874, 30059]; needs [25874, 30058]"),
        "{}",
        lines[0]
    );
}

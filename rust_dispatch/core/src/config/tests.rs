use serde_json::{Value, json};

use super::*;

fn edited(edit: impl FnOnce(&mut serde_json::Map<String, Value>)) -> String {
    let mut value: Value = serde_json::from_str(built_in("tiny-v41").unwrap()).unwrap();
    edit(value.as_object_mut().unwrap());
    value.to_string()
}

fn problems(edit: impl FnOnce(&mut serde_json::Map<String, Value>)) -> Vec<String> {
    ModelConfig::from_json(&edited(edit))
        .unwrap_err()
        .problems()
        .to_vec()
}

fn flash() -> ModelConfig {
    ModelConfig::from_json(built_in("v41-flash").unwrap()).unwrap()
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

#[test]
fn a_nested_text_config_reads_the_same() {
    let flat: Value = serde_json::from_str(built_in("v41-flash").unwrap()).unwrap();
    let mut text = flat.clone();
    let quantization = text
        .as_object_mut()
        .unwrap()
        .remove("quantization_config")
        .unwrap();
    let nested = json!({
        "model_type": "deepseek_v41",
        "architectures": ["DeepseekV41ForCausalLM"],
        "text_config": text,
        "quantization_config": quantization,
        "vision_config": {"num_hidden_layers": 32},
    });
    assert_eq!(
        ModelConfig::from_json(&nested.to_string()).unwrap(),
        flash()
    );
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
fn v4_is_named_and_refused() {
    for text in [
        json!({"model_type": "deepseek_v4", "hidden_size": 4096}),
        json!({"architectures": ["DeepseekV4ForCausalLM"]}),
    ] {
        let error = ModelConfig::from_json(&text.to_string())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("DeepSeek-V4, which this version does not serve"),
            "{error}"
        );
    }
    // SGLang's own configuration object carries V4's architecture name for V4.1.
    let renamed = edited(|map| {
        map.insert("architectures".into(), json!(["DeepseekV4ForCausalLM"]));
    });
    assert!(ModelConfig::from_json(&renamed).is_ok());
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

//! Configurations that omit the defaults of their class, as saved by transformers 4.45 to 4.49 for
//! fine-tunes of Qwen2-VL and Qwen2.5-VL.

use serde_json::{Value, json};
use vlm_models::{Activation, VlmConfig, VlmError};

fn read(config: &Value) -> VlmConfig {
    let config = VlmConfig::from_hf_config(&config.to_string());
    config.unwrap_or_else(|error| panic!("{error}"))
}

fn refuse(config: &Value) -> VlmError {
    VlmConfig::from_hf_config(&config.to_string()).expect_err("it is wrong")
}

fn qwen2_5_vl() -> Value {
    json!({
        "model_type": "qwen2_5_vl", "hidden_size": 3584, "num_attention_heads": 28,
        "num_key_value_heads": 4, "num_hidden_layers": 28, "intermediate_size": 18944,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 152_064,
        "max_position_embeddings": 128_000, "image_token_id": 151_655, "video_token_id": 151_656,
        "vision_start_token_id": 151_652, "rope_theta": 1e6,
        "rope_scaling": {
            "mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"
        },
        "use_sliding_window": false, "tie_word_embeddings": false,
        "vision_config": {
            "hidden_size": 1280, "in_chans": 3, "model_type": "qwen2_5_vl",
            "spatial_patch_size": 14, "tokens_per_second": 2
        }
    })
}

fn qwen2_vl() -> Value {
    let mut config = qwen2_5_vl();
    for (key, value) in [
        ("model_type", json!("qwen2_vl")),
        ("hidden_size", json!(1536)),
        ("num_attention_heads", json!(12)),
        ("num_key_value_heads", json!(2)),
        ("intermediate_size", json!(8960)),
        ("max_position_embeddings", json!(32_768)),
        ("tie_word_embeddings", json!(true)),
    ] {
        config[key] = value;
    }
    config["vision_config"] = json!({
        "hidden_size": 1536, "in_chans": 3, "model_type": "qwen2_vl", "spatial_patch_size": 14
    });
    config
}

#[test]
fn a_tower_of_three_keys_is_that_of_its_class() {
    let config = read(&qwen2_5_vl());
    let vision = config.vision.as_ref().expect("a tower");
    assert_eq!(
        (vision.depth, vision.hidden_size, vision.heads),
        (32, 1280, 16)
    );
    assert_eq!(
        (vision.intermediate_size, vision.out_hidden_size),
        (3420, 3584)
    );
    assert_eq!((vision.patch, vision.spatial_merge), ([3, 2, 14, 14], 2));
    let windows = vision.windows.as_ref().expect("it has windows");
    assert_eq!(windows.side, 112 / 2 / 14);
    assert_eq!(windows.full_attention_blocks, [7, 15, 23, 31]);
    assert_eq!(vision.activation, Activation::Silu);
    assert_eq!(vision.rotation.head_dim(), 80);
    assert_eq!(vision.rotation.frequencies().theta(), Some(1e4));
    assert_eq!((config.text.kv_heads, config.text.rms_norm_eps), (4, 1e-6));

    let config = read(&qwen2_vl());
    let vision = config.vision.as_ref().expect("a tower");
    assert_eq!(
        (vision.depth, vision.hidden_size, vision.heads),
        (32, 1280, 16)
    );
    assert_eq!(
        (vision.intermediate_size, vision.out_hidden_size),
        (5120, 1536)
    );
    assert_eq!((vision.patch, vision.spatial_merge), ([3, 2, 14, 14], 2));
    assert!(vision.windows.is_none());
    assert_eq!(vision.activation, Activation::QuickGelu);
    assert_eq!(vision.rotation.head_dim(), 80);
    assert!(config.tied);
}

/// All but the widths, which the classes' defaults contradict.
#[test]
fn every_key_with_a_default_can_be_left_out() {
    for (family, text, heads, rms_norm_eps) in [
        ("qwen2_vl", [152_064, 29_568, 80], [32, 8], 1e-5),
        ("qwen2_5_vl", [152_064, 29_568, 80], [32, 8], 1e-5),
        ("qwen3_vl", [151_936, 22_016, 32], [32, 32], 1e-6),
    ] {
        let (is_striped, head_dim) = match family {
            "qwen3_vl" => (true, 128),
            _ => (false, 3584 / 32),
        };
        let sections = if is_striped {
            [24, 20, 20]
        } else {
            [14, 21, 21]
        };
        let rope = json!({
            "mrope_section": sections, "mrope_interleaved": is_striped, "rope_theta": 1e6,
            "rope_type": "default"
        });
        let mut stated = json!({ "hidden_size": 3584, "rope_parameters": rope });
        if !is_striped {
            stated["num_attention_heads"] = json!(32);
        }
        let nested = json!({ "model_type": family, "text_config": stated, "vision_config": {} });
        let config = read(&nested);
        let vision = config.vision.as_ref().expect("a tower");
        assert_eq!((vision.image_token, vision.video_token), (151_655, 151_656));
        assert!(!config.tied);
        let found = &config.text;
        assert_eq!(
            [found.vocab_size, found.intermediate_size, found.layers],
            text
        );
        assert_eq!([found.heads, found.kv_heads], heads);
        assert_eq!(
            (found.rms_norm_eps, found.rotation.head_dim()),
            (rms_norm_eps, head_dim)
        );
        assert_eq!(found.attention_bias, !is_striped);

        let sizes = [
            vision.depth,
            vision.hidden_size,
            vision.intermediate_size,
            vision.patch[2],
        ];
        assert_eq!(vision.out_hidden_size, 3584);
        match family {
            "qwen2_vl" => assert_eq!(sizes, [32, 1280, 5120, 14]),
            // The class's width is the decoder's.
            "qwen2_5_vl" => assert_eq!(sizes, [32, 3584, 3420, 14]),
            _ => {
                assert_eq!(sizes, [27, 1152, 4304, 16]);
                assert_eq!(
                    (vision.position_grid, &vision.deepstack[..]),
                    (Some(48), &[8, 16, 24][..])
                );
                assert_eq!(vision.activation, Activation::GeluTanh);
            }
        }

        // The decoder's keys at the top.
        let mut flat = stated.clone();
        flat["model_type"] = json!(family);
        flat["vision_config"] = json!({});
        let flat = read(&flat);
        assert_eq!(format!("{:?}", flat.text), format!("{:?}", config.text));
    }
}

#[test]
fn what_glm_and_qwen3_5_leave_out_is_that_of_their_class() {
    let rope = json!({ "mrope_section": [8, 12, 12], "rope_type": "default", "rope_theta": 1e4 });
    let config = read(&json!({
        "model_type": "glm4v", "text_config": { "rope_parameters": rope },
        "vision_config": { "image_size": 336 }
    }));
    let (text, vision) = (&config.text, config.vision.as_ref().expect("a tower"));
    assert_eq!((text.layers, text.heads, text.kv_heads), (40, 32, 2));
    assert_eq!((text.rms_norm_eps, vision.norm_eps), (1e-5, 1e-5));
    assert_eq!(
        (text.rotation.head_dim(), text.rotation.rotary_dim()),
        (128, 64)
    );
    assert!(text.attention_bias && !text.output_bias && !vision.qkv_bias);
    assert_eq!(
        (vision.intermediate_size, vision.merger_size),
        (4096, 13_696)
    );
    assert_eq!(vision.position_grid, Some(24));
    assert_eq!(vision.image_token, 151_343);

    let rope = json!({
        "mrope_section": [11, 11, 10], "mrope_interleaved": true, "rope_type": "default",
        "rope_theta": 1e7
    });
    let qwen = |text: Value| {
        let mut config = json!({
            "model_type": "qwen3_5",
            "text_config": { "hidden_size": 3584, "rope_parameters": rope },
            "vision_config": { "deepstack_visual_indexes": [3] }
        });
        let text_config = config["text_config"].as_object_mut().expect("an object");
        text_config.extend(text.as_object().expect("an object").clone());
        read(&config)
    };
    let config = qwen(json!({}));
    let delta = config.text.delta.as_ref().expect("it has states");
    assert_eq!(delta.full_attention_layers, [3, 7, 11, 15, 19, 23, 27, 31]);
    assert_eq!((delta.key_heads, delta.heads, delta.taps), (16, 32, 4));
    assert_eq!(
        (
            config.text.rotation.head_dim(),
            config.text.rotation.rotary_dim()
        ),
        (256, 64)
    );
    assert!(!config.text.attention_bias && config.vision.expect("a tower").deepstack.is_empty());
    assert!(qwen(json!({ "attention_bias": true })).text.output_bias);
    let few = qwen(json!({ "num_hidden_layers": 4, "full_attention_interval": 2 }));
    assert_eq!(
        few.text.delta.expect("it has states").full_attention_layers,
        [1, 3]
    );
}

#[test]
fn a_null_for_the_key_heads_means_those_of_the_queries() {
    let mut config = qwen2_5_vl();
    config["num_key_value_heads"] = Value::Null;
    assert_eq!(read(&config).text.kv_heads, 28);
}

#[test]
fn what_has_no_default_is_an_error() {
    for (key, value, named) in [
        ("model_type", None, "model_type"),
        ("vision_config", None, "vision_config"),
        ("rope_scaling", None, "mrope_section"),
        ("hidden_size", Some(json!("wide")), "hidden_size"),
        ("hidden_size", Some(Value::Null), "hidden_size"),
    ] {
        let mut config = qwen2_5_vl();
        let object = config.as_object_mut().expect("an object");
        object.remove(key);
        object.extend(value.map(|value| (key.to_owned(), value)));
        let error = refuse(&config).to_string();
        assert!(error.contains(named), "{error}");
    }
}

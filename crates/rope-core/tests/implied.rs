//! Parameters that configurations leave to their classes, state twice, or state wrongly: the
//! rotation of transformers, or one clear error, and never another rotation.

use rope_core::hf::{ConfigError, LayerSpecs};
use rope_core::position_ids::{PositionRules, Prompt};
use rope_core::{AxisLayout, Pairing, RopeError, RotarySpec, Scaling};
use serde_json::{Value, json};

fn specs(config: &Value) -> LayerSpecs {
    LayerSpecs::from_hf_config(&config.to_string())
        .unwrap_or_else(|error| panic!("{config}: {error}"))
}

fn error(config: &Value) -> ConfigError {
    match LayerSpecs::from_hf_config(&config.to_string()) {
        Err(RopeError::Config(error)) => error,
        Err(other) => panic!("{config}: {other}"),
        Ok(_) => panic!("{config}: was accepted"),
    }
}

/// The keys that a contradiction names.
fn contradiction(config: &Value) -> [String; 2] {
    match error(config) {
        ConfigError::Contradiction { left, right, .. } => [left.key, right.key],
        other => panic!("{config}: {other}"),
    }
}

/// Theta and scaling of one layer type.
fn frequencies(specs: &LayerSpecs, name: &str) -> (f64, Scaling) {
    let spec = specs.named(name).unwrap_or_else(|| panic!("no {name}"));
    let frequencies = spec.frequencies();
    let theta = frequencies.theta().expect("a progression");
    (theta, frequencies.scaling().clone())
}

fn rotating(config: &Value) -> Vec<bool> {
    let specs = specs(config);
    (0..specs.layers())
        .map(|layer| specs.layer(layer).is_some())
        .collect()
}

const LINEAR: Scaling = Scaling::Linear { factor: 8.0 };

/// `hidden_size / num_attention_heads` is another number in every one of these.
#[test]
fn the_class_states_the_width_of_a_head() {
    let widths = [
        ("gemma", 256),
        ("gemma2", 256),
        ("gemma3_text", 256),
        ("gemma3n_text", 256),
        ("qwen3", 128),
        ("qwen3_next", 256),
        ("gpt_oss", 64),
        ("llama4_text", 128),
        ("ministral3", 128),
        ("glm", 128),
        ("glm4", 128),
        ("ernie4_5", 128),
        ("deepseek_v3", 64),
        ("deepseek_v2", 64),
        ("qwen3_vl_text", 128),
        ("paddleocr_vl_text", 128),
        ("qwen2_5_omni_talker", 128),
        ("qwen3_5_text", 256),
        ("qwen3_5_moe_text", 256),
        // Classes without a width of their own divide.
        ("llama", 240),
        ("qwen3_moe", 240),
        ("glm4_moe", 240),
    ];
    for (model_type, head_dim) in widths {
        let mut config = json!({"model_type": model_type, "hidden_size": 3840,
            "num_attention_heads": 16,
            "rope_theta": 1e6});
        let sections = match model_type {
            "paddleocr_vl_text" | "qwen2_5_omni_talker" => Some([16, 24, 24]),
            _ => None,
        };
        if let Some(sections) = sections {
            config["rope_scaling"] = json!({"type": "default", "mrope_section": sections});
        }
        if ["gpt_oss", "ministral3"].contains(&model_type) {
            config["rope_parameters"] = json!({"rope_type": "default"});
        }
        let found = specs(&config);
        let found: Vec<usize> = found.specs().map(|(_, spec)| spec.head_dim()).collect();
        assert!(
            found.iter().all(|found| *found == head_dim),
            "{model_type}: {found:?}"
        );
    }
}

#[test]
fn a_stated_width_goes_before_the_class_and_null_asks_for_the_division() {
    let with = |head_dim: Value| {
        let config = json!({"model_type": "ernie4_5", "hidden_size": 1024,
            "num_attention_heads": 16,
            "head_dim": head_dim});
        specs(&config).into_single().expect("alike").head_dim()
    };
    assert_eq!([with(json!(32)), with(Value::Null)], [32, 64]);
}

/// gemma-3-4b-it states neither heads nor their width.
#[test]
fn gemma_3_without_heads() {
    let config = json!({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text",
        "hidden_size": 2560, "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}});
    let specs = specs(&config);
    assert_eq!(specs.layer(0).map(RotarySpec::head_dim), Some(256));
    assert_eq!(frequencies(&specs, "full_attention"), (1e6, LINEAR));
    assert_eq!(
        frequencies(&specs, "sliding_attention"),
        (1e4, Scaling::Default)
    );
}

#[test]
fn gemma_4_global_heads_are_wider_by_default() {
    let config = json!({"model_type": "gemma4_text", "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": {"rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 1e4}}});
    let specs = specs(&config);
    let widths = [0, 1].map(|layer| specs.layer(layer).map(RotarySpec::head_dim));
    assert_eq!(widths, [Some(256), Some(512)]);
}

fn qwen2_5_vl(outer: Value, inner: Value) -> Value {
    let mut config = json!({"model_type": "qwen2_5_vl",
        "text_config": {"model_type": "qwen2_5_vl_text",
        "hidden_size": 2048, "num_attention_heads": 16, "rope_theta": 1e6,
        "max_position_embeddings": 128_000, "rope_scaling": inner}});
    config["rope_scaling"] = outer;
    config
}

#[test]
fn a_scaling_around_text_config_does_not_go_unnoticed() {
    let mrope = json!({"type": "mrope", "mrope_section": [16, 24, 24]});
    let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
        "mrope_section": [16, 24, 24]});
    let refused = [
        (yarn.clone(), mrope.clone()),
        (mrope.clone(), yarn.clone()),
        (
            json!({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32768}),
            yarn.clone(),
        ),
        (json!({"rope_theta": 5e5}), mrope.clone()),
        (json!({"partial_rotary_factor": 0.5}), mrope.clone()),
    ];
    for (outer, inner) in refused {
        let found = contradiction(&qwen2_5_vl(outer, inner));
        assert_eq!(found, ["rope_scaling", "text_config.rope_scaling"]);
    }
    // Two spellings of one meaning, and keys that leave the scaling to text_config.
    let same = [
        (json!({"rope_type": "default"}), mrope.clone()),
        (yarn.clone(), yarn.clone()),
        (json!({"mrope_section": [16, 24, 24]}), yarn.clone()),
    ];
    for (outer, inner) in same {
        specs(&qwen2_5_vl(outer, inner));
    }
    // The old key around the new one, and a scaling that text_config does not have at all.
    let plain = json!({"model_type": "llava", "text_config": {"model_type": "llama",
        "head_dim": 128},
        "rope_scaling": {"type": "linear", "factor": 8.0}});
    assert_eq!(
        contradiction(&plain),
        ["rope_scaling", "text_config.rope_parameters"]
    );
}

fn gemma3(rope_parameters: Value, extra: &[(&str, Value)]) -> Value {
    let mut config = json!({"model_type": "gemma3_text", "head_dim": 256, "num_hidden_layers": 6});
    config["rope_parameters"] = rope_parameters;
    for (key, value) in extra {
        config[*key] = value.clone();
    }
    config
}

#[test]
fn layer_types_fall_back_to_their_own_theta() {
    let stated = json!({"sliding_attention": {"rope_type": "default"},
        "full_attention": {"rope_type": "linear", "factor": 8.0}});
    for (key, local) in [
        (None, 1e4),
        (Some(("rope_local_base_freq", json!(2e4))), 2e4),
    ] {
        let extra: Vec<_> = key.into_iter().collect();
        let specs = specs(&gemma3(stated.clone(), &extra));
        assert_eq!(
            frequencies(&specs, "sliding_attention"),
            (local, Scaling::Default)
        );
        assert_eq!(frequencies(&specs, "full_attention"), (1e6, LINEAR));
    }
}

#[test]
fn a_null_layer_type_takes_the_defaults() {
    let full = json!({"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6});
    let found = specs(&gemma3(
        json!({"sliding_attention": null, "full_attention": full}),
        &[],
    ));
    assert_eq!(
        frequencies(&found, "sliding_attention"),
        (1e4, Scaling::Default)
    );
    let sliding = json!({"rope_theta": 3e4});
    let found = specs(&gemma3(
        json!({"sliding_attention": sliding, "full_attention": null}),
        &[("rope_theta", json!(2e6))],
    ));
    assert_eq!(
        frequencies(&found, "full_attention"),
        (2e6, Scaling::Default)
    );
    // Where no default is known, the layers that would need one are refused.
    let unknown = json!({"model_type": "gemma4_text", "layer_types": ["sliding_attention"],
        "rope_parameters": {"sliding_attention": null, "full_attention": {"rope_theta": 1e6}}});
    assert!(matches!(
        error(&unknown),
        ConfigError::LayerWithoutParameters { layer: 0, .. }
    ));
}

#[test]
fn what_stands_beside_layer_types_must_agree_with_them() {
    let stated = json!({"sliding_attention": {"rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}});
    let refused = [
        (
            ("rope_scaling", json!({"type": "linear", "factor": 4.0})),
            ["rope_scaling", "rope_parameters.full_attention"],
        ),
        (
            ("rope_local_base_freq", json!(2e4)),
            [
                "rope_local_base_freq",
                "rope_parameters.sliding_attention.rope_theta",
            ],
        ),
        (
            ("rope_theta", json!(2e6)),
            ["rope_theta", "rope_parameters.full_attention.rope_theta"],
        ),
    ];
    for (extra, keys) in refused {
        assert_eq!(contradiction(&gemma3(stated.clone(), &[extra])), keys);
    }
    let same = [
        ("rope_scaling", json!({"type": "linear", "factor": 8.0})),
        ("rope_local_base_freq", json!(1e4)),
        ("rope_theta", json!(1e6)),
    ];
    specs(&gemma3(stated, &same));

    // Layer by layer around text_config as inside it.
    let around = json!({"model_type": "gemma3",
        "rope_parameters": {"sliding_attention": {"rope_theta": 1e4},
        "full_attention": {"rope_theta": 5e6}},
        "text_config": gemma3(json!({"sliding_attention": {}, "full_attention": {}}), &[])});
    assert_eq!(
        contradiction(&around),
        [
            "rope_parameters.full_attention",
            "text_config.rope_parameters.full_attention"
        ]
    );
}

#[test]
fn lists_of_layers_must_be_equally_long() {
    let config = json!({"model_type": "smollm3", "head_dim": 128, "rope_theta": 1e6,
        "layer_types": ["full_attention", "full_attention"], "no_rope_layers": [1]});
    assert_eq!(contradiction(&config), ["layer_types", "no_rope_layers"]);
}

#[test]
fn layers_between_full_ones_follow_from_the_interval() {
    let config = |extra: Value| {
        let mut config =
            json!({"model_type": "qwen3_5_text", "rope_theta": 1e7, "num_hidden_layers": 5});
        if let (Some(config), Some(extra)) = (config.as_object_mut(), extra.as_object()) {
            config.extend(extra.clone());
        }
        config
    };
    let every_fourth = [false, false, false, true, false];
    assert_eq!(rotating(&config(json!({}))), every_fourth);
    assert_eq!(
        rotating(&config(json!({"full_attention_interval": 2}))),
        [false, true, false, true, false]
    );
    // A list goes before the interval.
    let types = json!([
        "full_attention",
        "linear_attention",
        "full_attention",
        "full_attention",
        "full_attention"
    ]);
    let listed = config(json!({"full_attention_interval": 2, "layer_types": types}));
    assert_eq!(rotating(&listed), [true, false, true, true, true]);
    assert_eq!(
        rotating(&json!({"model_type": "qwen3_next", "rope_theta": 1e7, "num_hidden_layers": 5})),
        every_fourth
    );
    assert!(matches!(
        error(&config(json!({"full_attention_interval": 0}))),
        ConfigError::WrongType { key, .. } if key == "full_attention_interval"
    ));
}

#[test]
fn a_scaling_without_its_type_is_refused() {
    let qwen2 = |rope: Value| json!({"model_type": "qwen2", "head_dim": 128, "rope_scaling": rope});
    let untyped = qwen2(json!({"factor": 4.0, "original_max_position_embeddings": 32768}));
    assert_eq!(
        error(&untyped),
        ConfigError::MissingKey {
            key: "rope_scaling.rope_type".to_owned(),
            needed_by: "rope_scaling.factor".to_owned(),
        }
    );
    let mrope = json!({"model_type": "qwen2_vl", "head_dim": 128,
        "rope_scaling": {"type": "mrope", "factor": 4.0, "mrope_section": [16, 24, 24]}});
    assert_eq!(
        contradiction(&mrope),
        ["rope_scaling.type", "rope_scaling.factor"]
    );
    // Parameters that scale nothing may stay.
    for rope in [
        json!({"type": "default", "factor": 1.0}),
        json!({"factor": 1.0, "alpha": 0.0}),
        json!({"rope_type": "default", "factor": null}),
    ] {
        specs(&qwen2(rope));
    }
}

/// OLMo 3 as published: YaRN on the full layers alone.
#[test]
fn olmo_3_scales_full_layers_alone() {
    let config = json!({"model_type": "olmo3", "hidden_size": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 8, "max_position_embeddings": 65536, "rope_theta": 500_000,
        "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0,
        "beta_slow": 1.0,
            "factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "yarn"}});
    let specs = specs(&config);
    assert_eq!(
        frequencies(&specs, "sliding_attention"),
        (5e5, Scaling::Default)
    );
    let (theta, scaling) = frequencies(&specs, "full_attention");
    assert!(matches!(scaling, Scaling::Yarn(yarn) if yarn.factor == 8.0 && theta == 5e5));
    for layer in 0..8 {
        let name = if layer % 4 == 3 {
            "full_attention"
        } else {
            "sliding_attention"
        };
        assert_eq!(specs.layer(layer), specs.named(name), "layer {layer}");
    }
}

/// Step 3.5 with one theta: its scaling is that of full layers, which all are if none are listed.
#[test]
fn step_3_5_scales_full_layers_alone() {
    let mut config = json!({"model_type": "step3p5", "num_hidden_layers": 2, "rope_theta": 5e6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}});
    let alike = specs(&config);
    assert_eq!(alike.layer(0), alike.named("full_attention"));
    assert_eq!(alike.layer(1), alike.named("full_attention"));
    config["layer_types"] = json!(["full_attention", "sliding_attention"]);
    let found = specs(&config);
    assert_eq!(frequencies(&found, "full_attention"), (5e6, LINEAR));
    assert_eq!(
        frequencies(&found, "sliding_attention"),
        (5e6, Scaling::Default)
    );
    assert_eq!(found.layer(1), found.named("sliding_attention"));
}

/// Transformers 4 and 5 fall back to different ones: either guess could be wrong.
#[test]
fn a_theta_on_which_versions_differ_must_be_stated() {
    for model_type in ["olmo3", "cohere"] {
        let config = json!({"model_type": model_type, "head_dim": 128});
        assert!(matches!(
            error(&config),
            ConfigError::MissingKey { key, .. } if key.ends_with("rope_theta")
        ));
    }
}

/// Without a rope object these classes take a scaling of their own, whatever theta is stated.
#[test]
fn a_class_that_scales_by_default_needs_the_rope_object() {
    let model_types = "gpt_oss apertus apertus1p5_text cwm higgs_audio_v2 ministral3 mistral4 \
        openai_privacy_filter laguna lfm3 mellum zaya neomme beam gemma4_text diffusion_gemma_text \
        embedding_gemma2_text";
    for model_type in model_types.split_whitespace() {
        let config = json!({"model_type": model_type, "head_dim": 64, "rope_theta": 1.5e5});
        match error(&config) {
            ConfigError::MissingKey { key, needed_by } => {
                assert_eq!(key, "rope_parameters", "{model_type}");
                assert!(needed_by.contains("scaling"), "{needed_by}");
            }
            other => panic!("{model_type}: {other}"),
        }
    }
    let old = json!({"model_type": "gpt_oss", "rope_theta": 1.5e5,
        "rope_scaling": {"rope_type": "default"}});
    assert_eq!(specs(&old).specs().count(), 1);
}

fn rotary_dim(config: &Value) -> usize {
    let specs = specs(config);
    let dims: Vec<usize> = specs.specs().map(|(_, spec)| spec.rotary_dim()).collect();
    assert!(dims.windows(2).all(|pair| pair[0] == pair[1]), "{config}");
    dims[0]
}

/// Rotated channels as transformers 5.24.0 has them.
#[test]
fn a_share_counts_where_the_modelling_code_reads_it() {
    let cases = [
        // Not read.
        (
            json!({"model_type": "llama", "head_dim": 128, "partial_rotary_factor": 0.5}),
            128,
        ),
        (
            json!({"model_type": "qwen3", "head_dim": 128,
                "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}),
            128,
        ),
        (
            json!({"model_type": "mistral", "rope_theta": 1e4, "head_dim": 64, "rotary_pct": 0.5}),
            64,
        ),
        (
            json!({"model_type": "stablelm", "head_dim": 80, "rope_pct": 0.5}),
            20,
        ),
        (
            json!({"model_type": "bamba", "head_dim": 128, "partial_rotary_factor": 0.25}),
            64,
        ),
        (
            json!({"model_type": "dots3_note_text", "rope_theta": 1e6, "qk_rope_head_dim": 64,
                "partial_rotary_factor": 0.25}),
            64,
        ),
        (
            json!({"model_type": "mistral4", "qk_rope_head_dim": 64, "qk_nope_head_dim": 64,
                "max_position_embeddings": 32768,
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                    "partial_rotary_factor": 0.5}}),
            64,
        ),
        (
            json!({"model_type": "mellum", "layer_types": ["full_attention"],
                "partial_rotary_factor": 0.5,
                "rope_parameters": {"full_attention": {"rope_theta": 5e5}}}),
            128,
        ),
        // Without an object the class takes its own.
        (
            json!({"model_type": "moonshine_streaming", "head_dim": 40,
                "partial_rotary_factor": 0.5}),
            32,
        ),
        // Read.
        (
            json!({"model_type": "glm4_moe_lite", "qk_rope_head_dim": 64, "qk_nope_head_dim": 192,
                "partial_rotary_factor": 0.25}),
            16,
        ),
        (
            json!({"model_type": "phi3", "head_dim": 128, "partial_rotary_factor": 0.75}),
            96,
        ),
        (
            json!({"model_type": "stablelm", "head_dim": 80, "partial_rotary_factor": 0.5}),
            40,
        ),
        (
            json!({"model_type": "gpt_neox_japanese", "head_dim": 64, "rotary_pct": 0.5}),
            32,
        ),
        (json!({"model_type": "minimax_m2", "rotary_dim": 64}), 64),
        // The class states the share in an object of its own, and an object without one means all.
        (
            json!({"model_type": "moonshine_streaming", "head_dim": 40}),
            32,
        ),
        (
            json!({"model_type": "moonshine_streaming", "head_dim": 40,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
            40,
        ),
        (
            json!({"model_type": "nemotron3_5_transcribe_asr_audio", "head_dim": 64,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
            64,
        ),
    ];
    for (config, expected) in cases {
        assert_eq!(rotary_dim(&config), expected, "{config}");
    }
    let neomme = json!({"model_type": "neomme", "head_dim": 64, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}});
    let specs = specs(&neomme);
    let dim = |name| specs.named(name).map(RotarySpec::rotary_dim);
    assert_eq!(dim("full_attention"), Some(16));
    assert_eq!(dim("sliding_attention"), Some(64));
}

/// Thetas of sliding and full layers, which older configurations state beside each other.
#[test]
fn sliding_layers_have_a_theta_of_their_own() {
    let layers = |kinds: [&str; 2]| json!(kinds.map(|kind| format!("{kind}_attention")));
    let cases = [
        (
            json!({"model_type": "mimo_v2_flash", "rope_theta": 5_000_000, "swa_rope_theta": 10_000,
                "hybrid_layer_pattern": [0, 1], "partial_rotary_factor": 0.334}),
            (1e4, 5e6),
        ),
        (
            json!({"model_type": "dots3_note_text", "qk_rope_head_dim": 64,
                "rope_theta": 1e6, "swa_rope_theta": 3e4,
                "layer_types": layers(["indexed", "sliding"])}),
            (3e4, 1e6),
        ),
        (
            json!({"model_type": "dots3_note_text", "qk_rope_head_dim": 64, "rope_theta": 1e6,
                "layer_types": layers(["full", "sliding"])}),
            (5e4, 1e6),
        ),
        (
            json!({"model_type": "t5gemma2_text", "rope_theta": 1e6, "rope_local_base_freq": 2e4,
                "layer_types": layers(["full", "sliding"])}),
            (2e4, 1e6),
        ),
        (
            json!({"model_type": "t5gemma2_decoder", "layer_types": layers(["full", "sliding"])}),
            (1e4, 1e6),
        ),
        (
            json!({"model_type": "dory", "layer_types": layers(["full", "sliding"])}),
            (1e4, 1e7),
        ),
        (
            json!({"model_type": "modernbert", "hidden_size": 768, "num_attention_heads": 12,
                "global_rope_theta": 160_000.0, "local_rope_theta": 20_000.0}),
            (2e4, 1.6e5),
        ),
    ];
    for (mut config, (sliding, full)) in cases {
        config["num_hidden_layers"] = json!(2);
        let specs = specs(&config);
        let theta = |name| frequencies(&specs, name).0;
        assert_eq!(theta("sliding_attention"), sliding, "{config}");
        assert_eq!(theta("full_attention"), full, "{config}");
        assert_eq!(specs.layer(0), specs.named("full_attention"), "{config}");
        assert_eq!(specs.layer(1), specs.named("sliding_attention"), "{config}");
    }
    // One object of Dots 3 is that of all layers.
    let shared = json!({"model_type": "dots3_note_text", "qk_rope_head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}});
    assert_eq!(
        specs(&shared)
            .into_single()
            .map(|spec| spec.frequencies().theta()),
        Ok(Some(1e6))
    );
}

/// Keys beside objects of layer types are not read for them, except max_position_embeddings.
#[test]
fn layer_types_do_not_take_the_outer_original_length() {
    let config = json!({"model_type": "olmo3", "head_dim": 128, "max_position_embeddings": 65536,
        "original_max_position_embeddings": 512, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0}}});
    let (_, scaling) = frequencies(&specs(&config), "full_attention");
    let Scaling::Yarn(yarn) = scaling else {
        panic!("{scaling:?}");
    };
    assert_eq!(yarn.original_max_position_embeddings, 65536);
}

#[test]
fn a_null_interleave_is_none() {
    let pairing = |model_type: &str, value: Value| {
        let config = json!({"model_type": model_type, "rope_theta": 1e4, "rope_interleave": value,
            "rope_parameters": {"rope_type": "default"}});
        specs(&config).into_single().expect("alike").pairing()
    };
    for model_type in ["deepseek_v3", "axk1", "mistral4", "youtu", "sarvam_mla"] {
        assert_eq!(
            pairing(model_type, Value::Null),
            Pairing::Half,
            "{model_type}"
        );
        assert_eq!(
            pairing(model_type, json!(true)),
            Pairing::InterleaveHalf,
            "{model_type}"
        );
    }
    // Its code always interleaves.
    assert_eq!(
        pairing("deepseek_v32", json!(false)),
        Pairing::InterleaveHalf
    );
}

/// Ids of the first two frames of a video of `seconds` per temporal patch.
fn frame_ids(config: &Value, seconds: f64) -> [f64; 2] {
    let rules = PositionRules::from_hf_config(&config.to_string()).expect("reads");
    let prompt = Prompt {
        input_ids: &[1, 8, 8],
        video_grids: &[[2, 2, 2]],
        seconds_per_grid: Some(&[seconds]),
        ..Prompt::default()
    };
    let ids = rules.position_ids(&prompt).expect("fits");
    [ids.axis(0)[1], ids.axis(0)[2]]
}

/// Qwen3-Omni's published configuration has `tokens_per_second` in its tower, which is not read.
#[test]
fn ids_per_second_are_those_that_the_model_reads() {
    let omni = |model_type: &str, stated: Value, tower: Value| {
        let mut thinker = json!({"image_token_id": 7, "video_token_id": 8, "vision_config": tower});
        if !stated.is_null() {
            thinker["position_id_per_seconds"] = stated;
        }
        json!({"model_type": model_type, "thinker_config": thinker})
    };
    let tower = json!({"tokens_per_second": 2, "spatial_merge_size": 2});
    let cases = [
        (omni("qwen3_omni_moe", json!(13), tower.clone()), 13.0),
        (omni("qwen2_5_omni", json!(25), tower.clone()), 25.0),
        (omni("qwen3_omni_moe", Value::Null, tower.clone()), 25.0),
        (omni("qwen2_5_omni", Value::Null, tower.clone()), 25.0),
        (
            json!({"model_type": "qwen2_5_vl", "image_token_id": 7, "video_token_id": 8,
                "vision_config": tower, "position_id_per_seconds": 13}),
            2.0,
        ),
        (
            json!({"model_type": "qwen2_5_vl", "image_token_id": 7, "video_token_id": 8,
                "vision_config": {"spatial_merge_size": 2}}),
            4.0,
        ),
    ];
    for (config, per_second) in cases {
        assert_eq!(frame_ids(&config, 1.0), [1.0, 1.0 + per_second], "{config}");
    }
}

/// Their code is that of Qwen3-VL and GLM-4.1V: a block per frame, with text between.
#[test]
fn position_ids_of_models_that_share_qwen3_vls_code() {
    for model_type in [
        "qwen3_vl",
        "cohere_compass",
        "cosmos3_omni",
        "qwen4_exp",
        "glm46v",
    ] {
        let config = json!({"model_type": model_type, "image_token_id": 7, "video_token_id": 8,
            "vision_config": {"spatial_merge_size": 2}});
        let rules = PositionRules::from_hf_config(&config.to_string()).expect(model_type);
        assert!(rules.block_per_frame(), "{model_type}");
        assert_eq!(rules.video_merge(), [1, 2, 2], "{model_type}");
    }
}

#[test]
fn deepseek_v2_turns_adjacent_channels() {
    let config = json!({"model_type": "deepseek_v2", "hidden_size": 5120,
        "num_attention_heads": 128,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "max_position_embeddings": 163_840,
        "rope_theta": 10000, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40,
            "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
            "type": "yarn"}});
    let spec = specs(&config).into_single().expect("alike");
    let found = (spec.head_dim(), spec.pairing(), spec.attention_scaling());
    assert_eq!(found, (64, Pairing::Adjacent, 1.0));
}

/// ERNIE-4.5-VL as Baidu publishes it: one placeholder, and the merger beside the tower.
#[test]
fn ernie_vl_in_its_own_format() {
    let config =
        json!({"model_type": "ernie4_5_moe_vl", "hidden_size": 2560, "num_attention_heads": 20,
        "rope_theta": 500_000, "freq_allocation": 20, "im_patch_id": 7, "spatial_conv_size": 2,
        "temporal_conv_size": 2, "vision_config": {"model_type": "DFNRope_vision_transformer",
            "depth": 32, "embed_dim": 1280, "hidden_size": 1280, "num_heads": 16, "mlp_ratio": 4,
            "patch_size": 14, "spatial_merge_size": 2}})
        .to_string();
    let tower = RotarySpec::from_hf_vision_config(&config).expect("reads");
    assert_eq!(
        (tower.head_dim(), tower.axis_layout()),
        (80, &AxisLayout::PerAxis(vec![20, 20]))
    );

    let rules = PositionRules::from_hf_config(&config).expect("reads");
    assert_eq!(rules.video_merge(), [2, 2, 2]);
    let prompt = Prompt {
        input_ids: &[1, 7, 1, 7, 7, 1],
        mm_token_type_ids: Some(&[0, 1, 0, 2, 2, 0]),
        image_grids: &[[1, 2, 2]],
        video_grids: &[[4, 2, 2]],
        ..Prompt::default()
    };
    let ids = rules.position_ids(&prompt).expect("fits");
    assert_eq!(ids.axis(0), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    assert_eq!(ids.axis(1), [0.0, 1.0, 2.0, 3.0, 3.0, 5.0]);
    // Without types the one placeholder cannot tell a video: refused, not guessed.
    let untyped = Prompt {
        mm_token_type_ids: None,
        ..prompt
    };
    assert!(rules.position_ids(&untyped).is_err());

    // The merger beside the tower is the one that holds.
    let coarse = config.replace(r#""spatial_conv_size":2"#, r#""spatial_conv_size":4"#);
    let rules = PositionRules::from_hf_config(&coarse).expect("reads");
    assert_eq!(rules.video_merge(), [2, 4, 4]);
}

//! Configurations of public reports and published files, made small. Expected values come from
//! transformers 5.24.0.

use rope_core::hf::{Component, ConfigError, LayerSpecs, parse_config};
use rope_core::position_ids::{PositionRules, Prompt};
use rope_core::{AxisLayout, Pairing, RopeError, RotarySpec};
use serde_json::{Value, json};

fn text(config: &str) -> RotarySpec {
    RotarySpec::from_hf_config(config).unwrap_or_else(|error| panic!("{config}: {error}"))
}

fn tower(config: &str) -> RotarySpec {
    RotarySpec::from_hf_vision_config(config).unwrap_or_else(|error| panic!("{config}: {error}"))
}

fn error(config: &str) -> ConfigError {
    match LayerSpecs::from_hf_config(config) {
        Err(RopeError::Config(error)) => error,
        other => panic!("{config}: expected a configuration error, found {other:?}"),
    }
}

/// Channels of a head and theta of a rotation of one axis that pairs halves and is not scaled.
fn plain(spec: &RotarySpec) -> (usize, Option<f64>) {
    assert_eq!(spec.pairing(), Pairing::Half);
    assert_eq!(spec.axis_layout(), &AxisLayout::Single);
    assert_eq!(spec.rotary_dim(), spec.head_dim());
    (spec.head_dim(), spec.frequencies().theta())
}

/// Python's json writes these, and hybrids publish them.
#[test]
fn constants_of_python_under_keys_that_are_not_read() {
    let falcon = r#"{"model_type":"falcon_h1","hidden_size":256,"num_attention_heads":4,
        "head_dim":64,"num_hidden_layers":2,
        "rope_theta":1e11,"time_step_limit":[0.0,Infinity],"time_step_max":0.1}"#;
    assert_eq!(plain(&text(falcon)), (64, Some(1e11)));
    assert_eq!(
        LayerSpecs::from_hf_config(falcon).expect("reads").layers(),
        2
    );

    let granite = r#"{"model_type":"granitemoehybrid","position_embedding_type":"rope",
        "hidden_size":256,"num_attention_heads":4,"num_hidden_layers":2,
        "layer_types":["mamba","attention"],"rope_theta":10000,"time_step_limit":[0.0,Infinity]}"#;
    let specs = LayerSpecs::from_hf_config(granite).expect("reads");
    assert!(specs.layer(0).is_none() && specs.layer(1).is_some());
    assert_eq!(plain(&text(granite)), (64, Some(1e4)));

    let deep = format!("{}0{}", "[".repeat(5000), "]".repeat(5000));
    for unread in [
        r#""a":NaN,"b":{"c":[-Infinity]}"#,
        r#""a": {"__float__": "Infinity"}"#,
        r#""a": 1e400, "b": [-1e400, 1E+999]"#,
        r#""a": "\ud800", "b": "x\udc00\\\"", "\udfff": "\ud83d\ude00""#,
        r#""a": "NaN, Infinity and \\", "b": NaN"#,
        &format!(r#""a": {deep}"#),
        &format!(r#""a": {{"b": {deep}}}, "c": NaN"#),
    ] {
        let llama = format!(
            r#"{{"model_type":"llama","hidden_size":256,"num_attention_heads":4,
                "num_hidden_layers":2,"rope_theta":10000.0, {unread}}}"#
        );
        assert_eq!(plain(&text(&llama)), (64, Some(1e4)));
    }
    // Strings stay unchanged.
    let config = parse_config(r#"{"a": "NaN \ud83d\ude00 \\u", "b": NaN}"#).expect("reads");
    assert_eq!(
        config,
        json!({"a": "NaN \u{1f600} \\u", "b": {"__float__": "NaN"}})
    );
}

#[test]
fn constants_of_python_under_keys_that_are_read() {
    for (fields, key, found) in [
        (
            r#""rope_scaling":{"type":"linear","factor":NaN}"#,
            "rope_scaling.factor",
            "NaN",
        ),
        (r#""rope_theta": Infinity"#, "rope_theta", "Infinity"),
        (r#""rope_theta": -1e400"#, "rope_theta", "-1e400"),
        (r#""head_dim": -Infinity"#, "head_dim", "-Infinity"),
        (r#""head_dim": {"__float__": "NaN"}"#, "head_dim", "NaN"),
        (r#""rope_scaling": NaN"#, "rope_scaling", "NaN"),
        (
            r#""position_embedding_type": NaN"#,
            "position_embedding_type",
            "NaN",
        ),
    ] {
        let config = format!(
            r#"{{"model_type":"llama","hidden_size":256,"num_attention_heads":4,{fields}}}"#
        );
        match error(&config) {
            ConfigError::WrongType {
                key: of, found: is, ..
            } => assert_eq!((&of[..], &is[..]), (key, found)),
            other => panic!("{config}: {other}"),
        }
    }
    let half = r#"{"model_type": "llama\ud800", "head_dim": 64}"#;
    assert!(matches!(
        error(half),
        ConfigError::UnknownModelType { found, .. } if found == ["llama\u{fffd}"]
    ));
    // The reason of a refusal comes before keys that nobody reads.
    let refused = r#"{"model_type":"nemotron_h","hidden_size":256,"num_attention_heads":4,
        "time_step_limit":[0.0,Infinity]}"#;
    assert!(matches!(
        error(refused),
        ConfigError::UnsupportedModelType { model_type, reason }
            if model_type == "nemotron_h" && reason.contains("does not rotate")
    ));
}

#[test]
fn what_is_no_json_of_python_either() {
    for (broken, at) in [
        ("{\"a\": NaN,\n\"b\": }", "line 2"),
        ("{\"a\": nan}", "line 1 column 8"),
        ("{\"a\": +Infinity}", "line 1 column 7"),
        ("{\"a\": 01e400}", "line 1 column"),
        ("{NaN: 1}", "line 1"),
        ("{\"a\": NaN, \"b\": \"", "line 1"),
        ("{\"a\": \"\\ud80", "line 1"),
        (&format!("{{\"a\": {}", "[".repeat(5000)), "line 1"),
        (
            &format!("{{\"a\": NaN, \"b\": {}}}", "[".repeat(101)),
            "line 1",
        ),
    ] {
        match error(broken) {
            ConfigError::Json { detail } => assert!(detail.contains(at), "{broken}: {detail}"),
            other => panic!("{broken}: {other}"),
        }
    }
}

/// Transformers 4.36 to 4.51 wrote nested configurations as their differences from the class.
#[test]
fn keys_that_are_the_defaults_of_the_class() {
    let llava = r#"{"model_type": "llava", "image_token_index": 32000,
        "text_config": {"model_type": "llama", "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-05, "vocab_size": 32064},
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024,
            "num_attention_heads": 16}}"#;
    assert_eq!(plain(&text(llava)), (128, Some(1e4)));
    assert_eq!(
        LayerSpecs::from_hf_config(llava).expect("reads").layers(),
        32
    );
    let mistral = r#"{"model_type": "llava_next", "text_config": {"model_type": "mistral",
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_key_value_heads": 8,
        "rope_theta": 1000000.0, "sliding_window": null}}"#;
    assert_eq!(plain(&text(mistral)), (128, Some(1e6)));
    // The class around it says which class an unnamed one is of.
    let unnamed = r#"{"model_type": "llava", "text_config": {"vocab_size": 32064}}"#;
    assert_eq!(plain(&text(unnamed)), (128, Some(1e4)));
    // A stated value holds, under any of its names.
    let stated = r#"{"model_type": "llava", "text_config": {"model_type": "llama",
        "n_embd": 2048, "n_head": 8, "num_hidden_layers": 3}}"#;
    assert_eq!(plain(&text(stated)), (256, Some(1e4)));
    assert_eq!(
        LayerSpecs::from_hf_config(stated).expect("reads").layers(),
        3
    );
    // The length that a scaling falls back to is the class's, unless the rope object states it.
    let phi3 = |rope: &str| {
        let config = format!(
            r#"{{"model_type": "llava", "text_config": {{"model_type": "phi3",
                "hidden_size": 16, "num_attention_heads": 4, "max_position_embeddings": 131072,
                "rope_scaling": {{"type": "su", "long_factor": [2, 4], "short_factor": [1, 1]
                {rope}}}}}}}"#
        );
        text(&config).attention_scaling()
    };
    let scaling = |ratio: f64, original: f64| (1.0 + ratio.ln() / original.ln()).sqrt();
    assert!((phi3("") - scaling(32.0, 4096.0)).abs() < 1e-12);
    let stated = phi3(r#", "original_max_position_embeddings": 8192"#);
    assert!((stated - scaling(16.0, 8192.0)).abs() < 1e-12);

    // A null is no default, and a class that is not known has none.
    for (inner, key) in [
        (
            r#""model_type": "llama", "hidden_size": null"#,
            "text_config.hidden_size",
        ),
        (r#""model_type": "kimi_vl""#, "model_type"),
    ] {
        let config = format!(r#"{{"model_type": "llava", "text_config": {{{inner}}}}}"#);
        let error = error(&config).to_string();
        assert!(
            error.contains(key) || error.contains("kimi_vl / llava"),
            "{error}"
        );
    }
    // Alone, a configuration is whole.
    assert!(matches!(
        error(r#"{"model_type": "llama", "num_attention_heads": 32}"#),
        ConfigError::MissingKey { key, .. } if key == "hidden_size"
    ));
}

#[test]
fn towers_without_the_defaults_of_their_class() {
    let model = |model_type: &str, hidden_size: usize, heads: usize, vision: Value| {
        json!({"model_type": model_type, "hidden_size": hidden_size, "num_attention_heads": heads,
            "image_token_id": 7, "video_token_id": 8, "rope_theta": 1_000_000.0,
            "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default",
                "type": "default"},
            "vision_config": vision})
    };
    let two = json!({"hidden_size": 1536, "in_chans": 3, "model_type": "qwen2_vl",
        "spatial_patch_size": 14});
    let two_five = json!({"hidden_size": 1280, "in_chans": 3, "model_type": "qwen2_5_vl",
        "spatial_patch_size": 14, "tokens_per_second": 2});
    for config in [
        model("qwen2_vl", 1536, 12, two),
        model("qwen2_5_vl", 3584, 28, two_five),
    ] {
        let config = config.to_string();
        let spec = tower(&config);
        assert_eq!(
            (spec.head_dim(), spec.frequencies().theta()),
            (80, Some(1e4))
        );
        assert_eq!(spec.axis_layout(), &AxisLayout::PerAxis(vec![20, 20]));
        assert_eq!(text(&config).head_dim(), 128);
    }
    let read =
        parse_config(&model("qwen2_5_vl", 3584, 28, json!({"hidden_size": 1280})).to_string())
            .expect("reads");
    let vision = &read["vision_config"];
    for (key, expected) in [
        ("depth", json!(32)),
        ("hidden_size", json!(1280)),
        ("num_heads", json!(16)),
        ("intermediate_size", json!(3420)),
        ("out_hidden_size", json!(3584)),
        ("patch_size", json!(14)),
        ("window_size", json!(112)),
        ("fullatt_block_indexes", json!([7, 15, 23, 31])),
    ] {
        assert_eq!(vision[key], expected, "{key}");
    }
}

/// The defaults are those of classes that exist here, and no type that they name contradicts the
/// model type around it.
#[test]
fn the_table_of_defaults_is_read() {
    let table: Value = serde_json::from_str(include_str!("../src/hf/defaults.json")).expect("JSON");
    let rows = |key: &str| table[key].as_object().expect("a table").clone();
    assert!(
        rows("classes").len() > 150,
        "{} classes",
        rows("classes").len()
    );
    let composites = rows("fixed").into_iter().chain(rows("unnamed"));
    let composites: Vec<_> = composites.collect();
    assert!(composites.len() > 50, "{} composites", composites.len());
    for (outer, inner) in composites {
        for key in inner.as_object().expect("a table").keys() {
            let config = json!({"model_type": outer, key: {}}).to_string();
            for found in [
                LayerSpecs::from_hf_config(&config).map(|_| ()),
                RotarySpec::from_hf_vision_config(&config).map(|_| ()),
            ] {
                // The widths of some classes do not divide into their heads.
                if let Err(RopeError::Config(ConfigError::Contradiction { left, .. })) = found {
                    assert!(!left.key.ends_with("model_type"), "{config}: {left}");
                }
            }
        }
    }
}

/// deepseek-ai/dspark_gemma4_12b_block7 and others.
#[test]
fn keys_beside_layer_types() {
    let gemma = |stray: &str| {
        format!(
            r#"{{"model_type": "gemma4_text", "head_dim": 64, "global_head_dim": 128,
                "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {{
                    "full_attention": {{"rope_type": "proportional", "rope_theta": 1000000.0,
                        "partial_rotary_factor": 0.25}},
                    "sliding_attention": {{"rope_type": "default", "rope_theta": 10000.0}}
                    {stray}}}}}"#
        )
    };
    let expected = LayerSpecs::from_hf_config(&gemma("")).expect("reads");
    let full = expected.layer(1).expect("rotates");
    assert_eq!(full.head_dim(), 128);
    let inv_freq = full.inv_freq(None).expect("a progression");
    for (found, right) in inv_freq.iter().zip([1.0, 0.805842, 0.649382]) {
        assert!((found - right).abs() < 1e-6, "{found} for {right}");
    }
    let sliding = expected.layer(0).expect("rotates");
    assert_eq!(plain(sliding), (64, Some(1e4)));
    for stray in [
        r#", "rope_type": "default", "rope_theta": null"#,
        r#", "type": "default""#,
        r#", "rope_theta": 10000, "partial_rotary_factor": 0.25"#,
    ] {
        assert_eq!(
            LayerSpecs::from_hf_config(&gemma(stray)).as_ref(),
            Ok(&expected),
            "{stray}"
        );
    }
    for stray in [
        r#", "rope_theta": 500000.0"#,
        r#", "rope_type": "yarn""#,
        r#", "factor": 8.0"#,
        r#", "rope_theta": NaN"#,
    ] {
        assert!(
            matches!(error(&gemma(stray)), ConfigError::MixedParameters { .. }),
            "{stray}"
        );
    }
}

#[test]
fn names_of_the_language_model() {
    let qwen = json!({"model_type": "qwen2_vl", "hidden_size": 3584, "num_attention_heads": 28,
        "rope_theta": 1_000_000.0, "image_token_id": 7, "video_token_id": 8,
        "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
        "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16,
            "spatial_merge_size": 2}});
    let alone = qwen.to_string();
    let inside = json!({"model_type": "colqwen2", "vlm_config": qwen}).to_string();
    let spec = text(&inside);
    assert_eq!(spec, text(&alone));
    assert_eq!(
        spec.axis_layout(),
        &AxisLayout::Contiguous(vec![16, 24, 24])
    );
    assert_eq!(
        (spec.head_dim(), spec.frequencies().theta()),
        (128, Some(1e6))
    );
    assert_eq!(tower(&inside).head_dim(), 80);
    let prompt = Prompt {
        input_ids: &[1, 7, 7, 1],
        image_grids: &[[1, 2, 4]],
        ..Prompt::default()
    };
    let ids = |config: &str| {
        let rules = PositionRules::from_hf_config(config).expect("rules");
        let ids = rules.position_ids(&prompt).expect("fits");
        [0, 1, 2].map(|axis| ids.axis(axis).to_vec())
    };
    assert_eq!(ids(&inside), ids(&alone));
    assert_eq!(ids(&inside)[2], [0.0, 1.0, 2.0, 3.0]);

    let llama = json!({"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 30, "max_position_embeddings": 16384, "rope_theta": 10000.0});
    for (model_type, key) in [
        ("multi_modality", "language_config"),
        ("internvl_chat", "llm_config"),
        ("llava", "text_config"),
    ] {
        let config = json!({"model_type": model_type, key: llama}).to_string();
        assert_eq!(plain(&text(&config)), (128, Some(1e4)), "{key}");
    }
    // As published: the keys that are Llama's own are left out.
    let janus = r#"{"model_type": "multi_modality", "language_config": {"model_type": "llama",
        "max_position_embeddings": 16384, "num_hidden_layers": 30}}"#;
    assert_eq!(plain(&text(janus)), (128, Some(1e4)));
    let two = json!({"model_type": "llava", "text_config": llama,
        "language_config": {"model_type": "llama", "head_dim": 64}});
    assert!(matches!(
        error(&two.to_string()),
        ConfigError::Contradiction { left, right, .. }
            if left.key == "text_config" && right.key == "language_config"
    ));
}

#[test]
fn parts_that_are_known_by_the_model_around_them() {
    let kimi = r#"{"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2",
            "hidden_size": 7168, "num_attention_heads": 64, "qk_rope_head_dim": 64,
            "num_hidden_layers": 2, "rope_theta": 50000.0},
        "vision_config": {"model_type": "", "vt_hidden_size": 1152, "vt_num_attention_heads": 16,
            "vt_num_hidden_layers": 27, "patch_size": 14, "merge_kernel_size": [2, 2]}}"#;
    let spec = tower(kimi);
    assert_eq!((spec.head_dim(), spec.pairing()), (72, Pairing::Half));
    assert_eq!(
        spec.axis_layout(),
        &AxisLayout::PerAxisStriped(vec![18, 18])
    );
    assert_eq!(spec.frequencies().theta(), Some(1e4));
    let narrow = kimi.replace("1152", "1024");
    assert_eq!(tower(&narrow).head_dim(), 64);

    let minimax = r#"{"model_type": "minimax_m3_vl", "text_config": {"hidden_size": 6144},
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1280,
            "num_attention_heads": 16}}"#;
    let named = minimax.replace("clip_vision_model", "minimax_m3_vl_vision");
    assert_eq!(tower(minimax), tower(&named));
    assert_eq!(
        tower(minimax).axis_layout(),
        &AxisLayout::PerAxis(vec![13; 3])
    );
    assert!(matches!(
        error(minimax),
        ConfigError::UnsupportedModelType { model_type, reason }
            if model_type == "minimax_m3_vl_text" && reason.contains("rotary_dim")
    ));

    // GLM-4.6V, whose decoder is one of two.
    let glm = |text: &str| {
        format!(
            r#"{{"model_type": "glm46v", "text_config": {{{text} "hidden_size": 4096,
                "num_attention_heads": 32, "rope_theta": 10000.0}},
                "vision_config": {{"hidden_size": 1536, "num_heads": 12}}}}"#
        )
    };
    for (named, pairing) in [
        (r#""model_type": "glm4v_text","#, Pairing::Adjacent),
        (r#""model_type": "glm4v_moe_text","#, Pairing::Half),
        ("", Pairing::Adjacent),
    ] {
        let spec = text(&glm(named));
        assert_eq!((spec.rotary_dim(), spec.pairing()), (64, pairing));
        assert_eq!(tower(&glm(named)).head_dim(), 128);
    }
}

#[test]
fn a_null_factor_of_yarn_is_the_ratio_of_the_lengths() {
    let yarn = |factor: &str| {
        format!(
            r#"{{"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4,
                "max_position_embeddings": 4096, "rope_theta": 10000.0,
                "rope_scaling": {{"rope_type": "yarn", {factor}
                    "original_max_position_embeddings": 1024}}}}"#
        )
    };
    let spec = text(&yarn(r#""factor": null,"#));
    assert_eq!(spec, text(&yarn(r#""factor": 4.0,"#)));
    assert!((spec.attention_scaling() - 1.138_629_4).abs() < 1e-7);
    let unknown = yarn(r#""factor": null,"#).replace("\"max_position_embeddings\": 4096,", "");
    for config in [yarn(""), unknown] {
        assert!(matches!(
            error(&config),
            ConfigError::MissingKey { key, .. } if key == "rope_scaling.factor"
        ));
    }
}

/// Refusals of a golden file's parameters give their reason too.
#[test]
fn refusals_of_rope_parameters_give_their_reason() {
    let read = |model_type: &str| {
        RotarySpec::from_rope_parameters(model_type, Component::Text, r#"{"rope_theta": 1e4}"#, 64)
    };
    for (model_type, because) in [
        ("MochiTransformer3DModel", "TokenAngles::per_head"),
        ("nemotron_h", "does not rotate"),
        ("glm46v", "glm4v_moe_text"),
    ] {
        let error = read(model_type).expect_err("is refused").to_string();
        assert!(error.contains(because), "{error}");
        assert!(!error.contains("RotarySpec::builder"), "{error}");
    }
    assert!(matches!(
        read("mamba3"),
        Err(RopeError::Config(ConfigError::UnknownModelType { .. }))
    ));
}

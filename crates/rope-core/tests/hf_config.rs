//! Hugging Face configurations: every family by its real keys, and every contradiction with its own
//! error.

use rope_core::hf::{Component, ConfigError, LayerSpecs};
use rope_core::{AxisLayout, Pairing, RopeError, RotarySpec, Scaling};

use AxisLayout::{
    Balanced, Contiguous, Ernie, PerAxis, PerAxisStriped, PerChannel, Single, Striped,
};
use Pairing::{Adjacent, Half};

/// Expected fields of a specification: head_dim, rotary_dim, pairing, axis layout, theta.
type Expected = (usize, usize, Pairing, AxisLayout, f64);

fn check(name: &str, spec: &RotarySpec, expected: Expected) {
    let found = (
        spec.head_dim(),
        spec.rotary_dim(),
        spec.pairing(),
        spec.axis_layout().clone(),
        spec.frequencies().theta().expect("a progression"),
    );
    assert_eq!(found, expected, "{name}");
}

fn error(json: &str) -> ConfigError {
    match LayerSpecs::from_hf_config(json) {
        Err(RopeError::Config(error)) => error,
        other => panic!("{json}: expected a configuration error, found {other:?}"),
    }
}

/// The parameters that the golden vectors record, by file.
#[test]
fn rope_parameters_of_every_golden_vector() {
    let text = Component::Text;
    let cases = [
        (
            "ernie4_5_vl_moe",
            text,
            r#"{"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [22, 22, 20]}"#,
            (128, 128, Adjacent, Ernie(vec![22, 22, 20]), 5e5),
        ),
        (
            "glm4v",
            text,
            r#"{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}"#,
            (128, 64, Adjacent, Contiguous(vec![8, 12, 12]), 1e4),
        ),
        (
            "hunyuan_vl",
            text,
            r#"{"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 16, 16, 16]}"#,
            (128, 128, Half, PerChannel(vec![16; 4]), 1e4),
        ),
        (
            "llama4_text",
            text,
            r#"{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 16.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}"#,
            (128, 128, Adjacent, Single, 5e5),
        ),
        (
            "llama",
            text,
            r#"{"rope_type": "default", "rope_theta": 10000.0}"#,
            (128, 128, Half, Single, 1e4),
        ),
        (
            "qwen2_vl",
            text,
            r#"{"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]}"#,
            (128, 128, Half, Contiguous(vec![16, 24, 24]), 1e6),
        ),
        (
            "qwen3_5",
            text,
            r#"{"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10], "mrope_interleaved": true}"#,
            (256, 64, Half, Striped(vec![11, 11, 10]), 1e7),
        ),
        (
            "qwen3_vl",
            text,
            r#"{"rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [24, 20, 20], "mrope_interleaved": true}"#,
            (128, 128, Half, Striped(vec![24, 20, 20]), 5e6),
        ),
        (
            "qwen2_vl",
            Component::Vision,
            r#"{"rope_theta": 10000.0, "rope_type": "axial"}"#,
            (80, 80, Half, PerAxis(vec![20, 20]), 1e4),
        ),
    ];
    for (model_type, component, parameters, expected) in cases {
        let spec = RotarySpec::from_rope_parameters(model_type, component, parameters, expected.0);
        check(model_type, &spec.expect(model_type), expected);
    }
}

/// Families with the keys of their checkpoints, where the fixture of `configurations` has none: models
/// of which transformers has no class or no published file, and diffusers'.
#[test]
fn every_family_by_its_real_keys() {
    let cases: &[(&str, &str, Expected)] = &[
        (
            "Mistral, transformers 5",
            r#"{"model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32,
                "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}}"#,
            (128, 128, Half, Single, 1e6),
        ),
        (
            "Phi-4-mini",
            r#"{"model_type": "phi3", "hidden_size": 96, "num_attention_heads": 6, "partial_rotary_factor": 0.75,
                "rope_theta": 10000.0, "original_max_position_embeddings": 4096,
                "max_position_embeddings": 131072,
                "rope_scaling": {"type": "longrope", "long_factor": [1, 2, 3, 4, 5, 6],
                                 "short_factor": [1, 1, 1, 1, 1, 1]}}"#,
            (16, 12, Half, Single, 1e4),
        ),
        (
            "Qwen2.5-VL stretched by YaRN, as its README says",
            r#"{"model_type": "qwen2_5_vl", "hidden_size": 2048, "num_attention_heads": 16, "rope_theta": 1000000.0,
                "max_position_embeddings": 128000,
                "rope_scaling": {"type": "yarn", "mrope_section": [16, 24, 24], "factor": 4,
                                 "original_max_position_embeddings": 32768}}"#,
            (128, 128, Half, Contiguous(vec![16, 24, 24]), 1e6),
        ),
        (
            "Qwen2.5-Omni",
            r#"{"model_type": "qwen2_5_omni", "thinker_config": {"model_type": "qwen2_5_omni_thinker",
                "text_config": {"model_type": "qwen2_5_omni_text", "hidden_size": 3584, "num_attention_heads": 28,
                    "rope_theta": 1000000.0,
                    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}}}}"#,
            (128, 128, Half, Contiguous(vec![16, 24, 24]), 1e6),
        ),
        (
            "PaddleOCR-VL",
            r#"{"model_type": "paddleocr_vl", "hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128,
                "rope_theta": 500000,
                "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}}"#,
            (128, 128, Half, Contiguous(vec![16, 24, 24]), 5e5),
        ),
        (
            "Qwen3-Omni",
            r#"{"model_type": "qwen3_omni_moe", "thinker_config": {"model_type": "qwen3_omni_moe_thinker",
                "text_config": {"model_type": "qwen3_omni_moe_text", "head_dim": 128, "hidden_size": 2048,
                    "num_attention_heads": 32, "rope_theta": 1000000,
                    "rope_scaling": {"interleaved": true, "mrope_interleaved": true,
                                     "mrope_section": [24, 20, 20], "rope_type": "default", "type": "default"}}}}"#,
            (128, 128, Half, Striped(vec![24, 20, 20]), 1e6),
        ),
        (
            "GLM-4.1V",
            r#"{"model_type": "glm4v", "text_config": {"model_type": "glm4v_text", "hidden_size": 4096,
                "num_attention_heads": 32, "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
                "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]}}}"#,
            (128, 64, Adjacent, Contiguous(vec![8, 12, 12]), 1e4),
        ),
        (
            "GLM-4.5V",
            r#"{"model_type": "glm4v_moe", "text_config": {"model_type": "glm4v_moe_text", "hidden_size": 4096,
                "num_attention_heads": 96, "head_dim": 128, "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
                "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]}}}"#,
            (128, 64, Half, Contiguous(vec![8, 12, 12]), 1e4),
        ),
        (
            "GLM-OCR",
            r#"{"model_type": "glm_ocr", "text_config": {"model_type": "glm_ocr_text", "hidden_size": 1536,
                "num_attention_heads": 16, "head_dim": 128,
                "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24],
                    "partial_rotary_factor": 1.0, "rope_theta": 10000}}}"#,
            (128, 128, Adjacent, Contiguous(vec![16, 24, 24]), 1e4),
        ),
        (
            "ERNIE-4.5-VL",
            r#"{"model_type": "ernie4_5_vl_moe", "text_config": {"model_type": "ernie4_5_vl_moe_text",
                "hidden_size": 2560, "num_attention_heads": 20,
                "rope_parameters": {"mrope_section": [22, 22, 20], "rope_theta": 500000.0, "rope_type": "default"}}}"#,
            (128, 128, Adjacent, Ernie(vec![22, 22, 20]), 5e5),
        ),
        (
            "ERNIE-4.5-VL, as its makers wrote it",
            r#"{"model_type": "ernie4_5_moe_vl", "hidden_size": 2560, "num_attention_heads": 20,
                "rope_theta": 500000, "rope_3d": true, "freq_allocation": 20}"#,
            (128, 128, Adjacent, Ernie(vec![22, 22, 20]), 5e5),
        ),
        (
            "HunyuanOCR",
            r#"{"model_type": "hunyuan_vl", "hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128,
                "attention_head_dim": 128, "rope_theta": 10000.0, "max_position_embeddings": 32768,
                "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                    "mscale_all_dim": 1.0, "type": "xdrope", "xdrope_section": [16, 16, 16, 16]}}"#,
            (128, 128, Half, PerChannel(vec![16; 4]), 1e4),
        ),
        (
            "openPangu-VL",
            r#"{"model_type": "openpangu_vl", "hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128,
                "rope_theta": 5000000.0, "rope_scaling": {"mrope_section": [24, 20, 20], "mrope_interleaved": true,
                    "rope_type": "default"}}"#,
            (128, 128, Half, Balanced(vec![24, 20, 20]), 5e6),
        ),
        (
            "FLUX.1",
            r#"{"_class_name": "FluxTransformer2DModel", "attention_head_dim": 128, "num_attention_heads": 24,
                "axes_dims_rope": [16, 56, 56]}"#,
            (128, 128, Adjacent, PerAxis(vec![8, 28, 28]), 1e4),
        ),
        (
            "Wan 2.1",
            r#"{"_class_name": "WanTransformer3DModel", "attention_head_dim": 128, "num_attention_heads": 12,
                "rope_max_seq_len": 1024}"#,
            (128, 128, Adjacent, PerAxis(vec![22, 21, 21]), 1e4),
        ),
        (
            "HunyuanVideo",
            r#"{"_class_name": "HunyuanVideoTransformer3DModel", "attention_head_dim": 128,
                "num_attention_heads": 24, "rope_axes_dim": [16, 56, 56], "rope_theta": 256.0}"#,
            (128, 128, Adjacent, PerAxis(vec![8, 28, 28]), 256.0),
        ),
    ];
    for (name, json, expected) in cases {
        let spec =
            RotarySpec::from_hf_config(json).unwrap_or_else(|error| panic!("{name}: {error}"));
        check(name, &spec, expected.clone());
    }
}

#[test]
fn vision_towers() {
    let cases = [
        (
            "Qwen2-VL",
            r#"{"model_type": "qwen2_vl", "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4,
                "num_heads": 16, "hidden_size": 3584, "spatial_merge_size": 2}}"#,
            (80, 80, Half, PerAxis(vec![20, 20]), 1e4),
        ),
        (
            "Qwen2.5-VL",
            r#"{"model_type": "qwen2_5_vl", "vision_config": {"model_type": "qwen2_5_vl", "depth": 32,
                "hidden_size": 1280, "num_heads": 16, "out_hidden_size": 2048, "window_size": 112}}"#,
            (80, 80, Half, PerAxis(vec![20, 20]), 1e4),
        ),
        (
            "Qwen3-VL, the tower alone",
            r#"{"model_type": "qwen3_vl_vision", "hidden_size": 1152, "num_heads": 16,
                "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"}}"#,
            (72, 72, Half, PerAxis(vec![18, 18]), 1e4),
        ),
        (
            "PaddleOCR-VL",
            r#"{"model_type": "paddleocr_vl", "vision_config": {"model_type": "paddleocr_vl",
                "hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 27}}"#,
            (72, 72, Half, PerAxis(vec![18, 18]), 1e4),
        ),
        (
            "Kimi-VL",
            r#"{"model_type": "kimi_vl", "vision_config": {"model_type": "moonvit", "hidden_size": 1152,
                "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14}}"#,
            (72, 72, Adjacent, PerAxisStriped(vec![18, 18]), 1e4),
        ),
        (
            "Qwen2.5-Omni",
            r#"{"model_type": "qwen2_5_omni", "thinker_config": {"model_type": "qwen2_5_omni_thinker",
                "vision_config": {"model_type": "qwen2_5_omni_vision_encoder", "hidden_size": 1280, "num_heads": 16}}}"#,
            (80, 80, Half, PerAxis(vec![20, 20]), 1e4),
        ),
    ];
    for (name, json, expected) in cases {
        check(
            name,
            &RotarySpec::from_hf_vision_config(json).expect(name),
            expected,
        );
    }
    // Theta beside the object is the one of the object, if that states none.
    let beside = |rope: &str| {
        format!(
            r#"{{"model_type": "qwen2_vl_vision", "embed_dim": 1280, "num_heads": 16,
                "rope_theta": 20000, "rope_parameters": {{"rope_type": "axial"{rope}}}}}"#
        )
    };
    let spec = RotarySpec::from_hf_vision_config(&beside("")).expect("reads");
    check("beside", &spec, (80, 80, Half, PerAxis(vec![20, 20]), 2e4));
    assert!(matches!(
        RotarySpec::from_hf_vision_config(&beside(r#", "rope_theta": 10000"#)),
        Err(RopeError::Config(ConfigError::Contradiction { left, right, .. }))
            if left.key == "rope_theta" && right.key == "rope_parameters.rope_theta"
    ));
    // Hunyuan's tower has learned positions; there is nothing to rotate.
    let learned = r#"{"model_type": "hunyuan_vl", "vision_config": {"hidden_size": 1152, "num_attention_heads": 16}}"#;
    assert!(matches!(
        RotarySpec::from_hf_vision_config(learned),
        Err(RopeError::Config(ConfigError::UnknownModelType {
            component: Component::Vision,
            ..
        }))
    ));
    // A head of 2 x 9 channels per axis cannot turn in pairs.
    let odd = r#"{"model_type": "qwen2_vl", "vision_config": {"embed_dim": 72, "num_heads": 4, "hidden_size": 64}}"#;
    assert!(matches!(
        RotarySpec::from_hf_vision_config(odd),
        Err(RopeError::Config(ConfigError::OddAxis { odd: 9, .. }))
    ));
}

#[test]
fn scalings_reach_the_specification() {
    let hunyuan = r#"{"model_type": "hunyuan_v1_dense", "head_dim": 128, "max_position_embeddings": 262144,
        "rope_theta": 10000.0, "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}}"#;
    let spec = RotarySpec::from_hf_config(hunyuan).expect("reads");
    assert_eq!(
        spec.frequencies().scaling(),
        &Scaling::NtkAlpha { alpha: 1000.0 }
    );

    let dynamic = r#"{"model_type": "llama", "head_dim": 128, "max_position_embeddings": 2048,
        "rope_scaling": {"factor": 2.0, "type": "dynamic"}}"#;
    let spec = RotarySpec::from_hf_config(dynamic).expect("reads");
    assert_eq!(
        spec.frequencies().scaling(),
        &Scaling::Dynamic {
            factor: 2.0,
            max_position_embeddings: 2048
        }
    );

    // Other models' code does not read alpha.
    let alpha = dynamic.replace("2.0", "2.0, \"alpha\": 1000.0");
    let read = RotarySpec::from_hf_config(&alpha).expect("reads");
    assert_eq!(read, spec);

    // Phi-3 states both context lengths beside rope_scaling; the attention scaling follows from
    // them.
    let phi3 = r#"{"model_type": "phi3", "hidden_size": 16, "num_attention_heads": 4,
        "original_max_position_embeddings": 4096, "max_position_embeddings": 131072,
        "rope_scaling": {"type": "su", "long_factor": [2, 4], "short_factor": [1, 1]}}"#;
    let spec = RotarySpec::from_hf_config(phi3).expect("reads");
    let expected = (1.0 + 32.0_f64.ln() / 4096.0_f64.ln()).sqrt();
    assert!((spec.attention_scaling() - expected).abs() < 1e-12);
}

#[test]
fn gemma_3_turns_local_and_global_layers_differently() {
    let old = r#"{"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560,
        "head_dim": 256, "num_attention_heads": 8, "num_hidden_layers": 12, "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}}"#;
    let new = r#"{"model_type": "gemma3_text", "head_dim": 256, "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention",
                        "sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"factor": 8.0, "rope_theta": 1000000.0, "rope_type": "linear"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}}"#;
    for (json, layers) in [(old, 12), (new, 6)] {
        let specs = LayerSpecs::from_hf_config(json).expect("reads");
        assert_eq!(specs.layers(), layers);
        let local = specs.named("sliding_attention").expect("named");
        let global = specs.named("full_attention").expect("named");
        check("local", local, (256, 256, Half, Single, 1e4));
        check("global", global, (256, 256, Half, Single, 1e6));
        assert_eq!(local.frequencies().scaling(), &Scaling::Default);
        assert_eq!(
            global.frequencies().scaling(),
            &Scaling::Linear { factor: 8.0 }
        );
        for layer in 0..layers {
            let expected = if layer % 6 == 5 { global } else { local };
            assert_eq!(specs.layer(layer), Some(expected), "layer {layer}");
        }
        assert_eq!(specs.layer(layers), None);
        assert!(matches!(
            RotarySpec::from_hf_config(json),
            Err(RopeError::Config(ConfigError::SeveralRotations { names })) if names.len() == 2
        ));
    }
}

#[test]
fn gemma_4_has_wider_proportional_global_heads() {
    let json = r#"{"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", "head_dim": 256,
        "global_head_dim": 512, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}}}"#;
    let specs = LayerSpecs::from_hf_config(json).expect("reads");
    check(
        "local",
        specs.layer(0).expect("rotates"),
        (256, 256, Half, Single, 1e4),
    );
    let global = specs.layer(1).expect("rotates");
    check("global", global, (512, 512, Half, Single, 1e6));
    let inv_freq = global.inv_freq(None).expect("frequencies");
    assert_eq!(
        inv_freq.iter().filter(|inv_freq| **inv_freq != 0.0).count(),
        64
    );
}

#[test]
fn layers_without_rotation() {
    let rotating = |json: &str| -> Vec<bool> {
        let specs = LayerSpecs::from_hf_config(json).expect("reads");
        (0..specs.layers())
            .map(|layer| specs.layer(layer).is_some())
            .collect()
    };
    let listed = r#"{"model_type": "smollm3", "head_dim": 128, "rope_theta": 5000000.0, "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 1]}"#;
    assert_eq!(rotating(listed), [true, false, true, true]);
    let every_fourth = r#"{"model_type": "llama4_text", "head_dim": 128, "num_hidden_layers": 5, "no_rope_layers": []}"#;
    assert_eq!(rotating(every_fourth), [true, true, true, false, true]);
    let sliding_only = r#"{"model_type": "cohere2", "head_dim": 128, "num_hidden_layers": 4, "sliding_window_pattern": 4}"#;
    assert_eq!(rotating(sliding_only), [true, true, true, false]);
    let linear = r#"{"model_type": "qwen3_next", "head_dim": 256, "rope_theta": 10000000, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"]}"#;
    assert_eq!(rotating(linear), [false, true]);
    // The layers that rotate are alike, so one specification serves.
    assert!(RotarySpec::from_hf_config(linear).is_ok());
}

/// A list of layers is as long as the file; a number of layers need not be.
#[test]
fn more_layers_than_a_model_has_are_refused() {
    let config = |layers: u64| {
        format!(
            r#"{{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": {layers}}}"#
        )
    };
    for layers in [65_537, 1 << 31, u64::MAX] {
        let refused = LayerSpecs::from_hf_config(&config(layers)).expect_err("too many");
        let expected = ConfigError::WrongType {
            key: "num_hidden_layers".to_owned(),
            expected: "a number of layers, at most 65536",
            found: layers.to_string(),
        };
        assert_eq!(refused, RopeError::from(expected));
    }
    let most = LayerSpecs::from_hf_config(&config(65_536)).expect("reads");
    assert_eq!(most.layers(), 65_536);
}

fn qwen2_vl(extra: &str) -> String {
    format!(
        r#"{{"model_type": "qwen2_vl", "hidden_size": 1536, "num_attention_heads": 12, "rope_theta": 1000000.0 {extra}}}"#
    )
}

/// The mistake that elsewhere shows as a missing attribute deep in the model.
#[test]
fn an_mrope_model_on_the_plain_path_is_refused() {
    let scaling = r#", "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}"#;
    let plain = qwen2_vl(&format!(r#"{scaling}, "position_embedding_type": "rope""#));
    let found = error(&plain);
    assert!(matches!(
        &found,
        ConfigError::PlainPath { model_type: "qwen2_vl", axes: 3, plain }
            if plain.key == "position_embedding_type" && plain.value == "\"rope\""
    ));
    let message = found.to_string();
    for part in [
        "mrope_section",
        "position_embedding_type = \"rope\"",
        "set it to \"mrope\"",
    ] {
        assert!(message.contains(part), "{message}");
    }
    // Also where the type is stated around or inside the text configuration.
    let nested = r#"{"model_type": "qwen3_vl", "position_embedding_type": "rope", "text_config": {
        "model_type": "qwen3_vl_text", "head_dim": 128, "rope_theta": 5000000}}"#;
    assert!(matches!(error(nested), ConfigError::PlainPath { .. }));

    assert!(matches!(
        error(&qwen2_vl("")),
        ConfigError::MissingSections { axes: 3, key, .. } if key == "mrope_section"
    ));
    let as_text_model = plain
        .replace("qwen2_vl", "qwen2")
        .replace("\"rope\"", "\"mrope\"");
    assert!(matches!(
        error(&as_text_model),
        ConfigError::Contradiction { left, right, .. }
            if left.key == "position_embedding_type" && right.key == "model_type"
    ));
    assert!(matches!(
        error(&plain.replace("qwen2_vl", "qwen2")),
        ConfigError::SectionsOnPlainModel { sections, model_type, axes: 1 }
            if sections.key == "rope_scaling.mrope_section" && model_type.value == "\"qwen2\""
    ));
}

#[test]
fn contradictions_name_both_sides() {
    let cases = [
        // theta inside and outside
        (
            r#"{"model_type": "qwen3", "head_dim": 128, "rope_theta": 1000000.0,
                "rope_parameters": {"rope_theta": 5000000.0, "rope_type": "default"}}"#,
            "rope_theta",
            "rope_parameters.rope_theta",
        ),
        // theta around and inside text_config
        (
            r#"{"model_type": "qwen3_vl", "rope_theta": 10000.0, "text_config": {"head_dim": 128,
                "rope_parameters": {"rope_theta": 5000000.0}}}"#,
            "rope_theta",
            "text_config.rope_parameters.rope_theta",
        ),
        // old and new object
        (
            r#"{"model_type": "llama", "head_dim": 128, "rope_parameters": {"rope_type": "default"},
                "rope_scaling": {"type": "linear", "factor": 2.0}}"#,
            "rope_parameters",
            "rope_scaling",
        ),
        // two spellings of the type
        (
            r#"{"model_type": "llama", "head_dim": 128, "rope_scaling":
                {"rope_type": "linear", "type": "default", "factor": 2.0}}"#,
            "rope_scaling.rope_type",
            "rope_scaling.type",
        ),
        // share inside and outside
        (
            r#"{"model_type": "glm4", "head_dim": 128, "partial_rotary_factor": 0.5,
                "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}}"#,
            "rope_parameters.partial_rotary_factor",
            "partial_rotary_factor",
        ),
        // share and channels
        (
            r#"{"model_type": "minimax_m2", "head_dim": 128, "partial_rotary_factor": 0.5,
                "rotary_dim": 128}"#,
            "partial_rotary_factor",
            "rotary_dim",
        ),
        // channels of a model type that transformers rotates whole
        (
            r#"{"model_type": "minimax", "head_dim": 128, "rotary_dim": 64}"#,
            "rotary_dim",
            "model_type",
        ),
        // a share of such a model type under a scaling, which makes too few frequencies
        (
            r#"{"model_type": "llama", "head_dim": 128, "rope_parameters":
                {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}"#,
            "rope_parameters.partial_rotary_factor",
            "model_type",
        ),
        // the original length inside and outside
        (
            r#"{"model_type": "llama", "head_dim": 128, "original_max_position_embeddings": 4096,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0,
                    "original_max_position_embeddings": 32768}}"#,
            "original_max_position_embeddings",
            "rope_parameters.original_max_position_embeddings",
        ),
        // a theta that the class does not read
        (
            r#"{"model_type": "gpt_neox", "head_dim": 64, "rope_theta": 777.0}"#,
            "rope_theta",
            "model_type",
        ),
        (
            r#"{"model_type": "mimo_v2_flash", "rope_theta": 1000000.0}"#,
            "rope_theta",
            "model_type",
        ),
        (
            r#"{"model_type": "mimo_v2_flash", "swa_rope_theta": 20000.0}"#,
            "swa_rope_theta",
            "model_type",
        ),
        (
            r#"{"model_type": "cosmos3_edge_text", "rope_theta": 777.0}"#,
            "rope_theta",
            "model_type",
        ),
        // one object where the class reads them by layer type
        (
            r#"{"model_type": "laguna", "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5,
                "factor": 32.0, "original_max_position_embeddings": 4096}}"#,
            "rope_parameters",
            "model_type",
        ),
        (
            r#"{"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 777.0}}"#,
            "rope_parameters",
            "model_type",
        ),
        (
            r#"{"model_type": "dory", "rope_parameters": {"rope_theta": 1000000.0}}"#,
            "rope_parameters",
            "model_type",
        ),
        // stripes in a contiguous family
        (
            r#"{"model_type": "qwen2_vl", "head_dim": 128,
                "rope_scaling": {"mrope_section": [16, 24, 24], "mrope_interleaved": true}}"#,
            "rope_scaling.mrope_interleaved",
            "model_type",
        ),
        // runs in a striped family
        (
            r#"{"model_type": "qwen3_vl", "head_dim": 128, "rope_theta": 5000000,
                "rope_scaling": {"mrope_section": [24, 20, 20], "mrope_interleaved": false}}"#,
            "rope_scaling.mrope_interleaved",
            "model_type",
        ),
        // two families
        (
            r#"{"model_type": "qwen2_vl", "text_config": {"model_type": "qwen3_vl_text", "head_dim": 128}}"#,
            "text_config.model_type",
            "model_type",
        ),
        // sections around and inside text_config
        (
            r#"{"model_type": "qwen2_vl", "rope_scaling": {"mrope_section": [24, 20, 20]}, "text_config": {
                "head_dim": 128, "rope_scaling": {"mrope_section": [16, 24, 24]}}}"#,
            "rope_scaling",
            "text_config.rope_scaling",
        ),
        // width and heads
        (
            r#"{"model_type": "llama", "hidden_size": 100, "num_attention_heads": 3}"#,
            "hidden_size",
            "num_attention_heads",
        ),
        // layers listed and counted
        (
            r#"{"model_type": "llama", "head_dim": 128, "num_hidden_layers": 2, "layer_types": ["full_attention"]}"#,
            "layer_types",
            "num_hidden_layers",
        ),
        (
            r#"{"model_type": "smollm3", "head_dim": 128, "rope_theta": 1e6, "num_hidden_layers": 2, "no_rope_layers": [1]}"#,
            "no_rope_layers",
            "num_hidden_layers",
        ),
    ];
    for (json, left_key, right_key) in cases {
        match error(json) {
            ConfigError::Contradiction {
                left,
                right,
                remedy,
            } => {
                assert_eq!(
                    (&left.key[..], &right.key[..]),
                    (left_key, right_key),
                    "{json}"
                );
                assert_ne!(left.value, right.value, "{json}");
                assert!(!remedy.is_empty());
            }
            other => panic!("{json}: {other:?}"),
        }
    }
}

#[test]
fn broken_configurations_have_their_own_errors() {
    assert!(matches!(error("config.json"), ConfigError::Json { .. }));
    assert!(matches!(
        error("[]"),
        ConfigError::WrongType {
            expected: "an object",
            ..
        }
    ));
    assert!(matches!(
        error(r#"{"model_type": "mamba3", "head_dim": 128}"#),
        ConfigError::UnknownModelType { found, component: Component::Text } if found == ["mamba3"]
    ));
    assert!(matches!(
        error(r#"{"head_dim": 128}"#),
        ConfigError::MissingKey { key, .. } if key == "model_type"
    ));
    assert!(matches!(
        error(r#"{"model_type": "llama"}"#),
        ConfigError::MissingKey { key, .. } if key == "hidden_size"
    ));
    assert!(matches!(
        error(r#"{"model_type": "qwen3_vl", "head_dim": 128}"#),
        ConfigError::MissingKey { key, .. } if key == "rope_theta"
    ));
    assert!(matches!(
        error(r#"{"model_type": "llama", "head_dim": 128, "position_embedding_type": "alibi"}"#),
        ConfigError::NotRotary { stated } if stated.value == "\"alibi\""
    ));
    assert!(matches!(
        error(r#"{"model_type": "llama", "head_dim": 128, "rope_scaling": {"type": "yarn"}}"#),
        ConfigError::MissingKey { key, needed_by } if key == "rope_scaling.factor" && needed_by.contains("yarn")
    ));
    assert!(matches!(
        error(r#"{"model_type": "llama", "head_dim": 128, "rope_scaling": {"type": "yern"}}"#),
        ConfigError::UnknownRopeType { key, .. } if key == "rope_scaling.type"
    ));
    assert!(matches!(
        error(r#"{"model_type": "llama", "head_dim": "128"}"#),
        ConfigError::WrongType { key, .. } if key == "head_dim"
    ));
    assert!(matches!(
        error(r#"{"model_type": "glm4", "head_dim": 128, "partial_rotary_factor": 1.5}"#),
        ConfigError::PartialRotary { head_dim: 128, .. }
    ));
    assert!(matches!(
        error(&qwen2_vl(r#", "rope_scaling": {"mrope_section": [32, 32]}"#)),
        ConfigError::SectionAxes { axes: 3, found, .. } if found == [32, 32]
    ));
    assert!(matches!(
        error(&qwen2_vl(r#", "mrope_section": [16, 24, 24]"#)),
        ConfigError::MisplacedKey { key, belongs_in }
            if key == "mrope_section" && belongs_in == "rope_parameters.mrope_section"
    ));
    // The share of a proportional scaling is stated in its object.
    assert!(matches!(
        error(
            r#"{"model_type": "gemma4_text", "partial_rotary_factor": 0.5, "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0}}}"#
        ),
        ConfigError::MisplacedKey { key, belongs_in }
            if key == "partial_rotary_factor"
                && belongs_in == "rope_parameters.full_attention.partial_rotary_factor"
    ));
    // The thetas of a class are not those of the objects of layer types.
    assert!(matches!(
        error(
            r#"{"model_type": "dory",
                "rope_parameters": {"full_attention": {"rope_type": "default"}}}"#
        ),
        ConfigError::MissingKey { key, .. } if key == "rope_parameters.full_attention.rope_theta"
    ));
    assert!(matches!(
        error(r#"{"model_type": "dots3_note_text", "rope_theta": 1e6}"#),
        ConfigError::MissingKey { key, .. } if key == "qk_rope_head_dim"
    ));
    let gemma = |parameters: &str| {
        format!(
            r#"{{"model_type": "gemma3_text", "head_dim": 256, "num_hidden_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {{
                    "full_attention": {{"rope_theta": 1000000.0}} {parameters}}}}}"#
        )
    };
    assert!(matches!(
        error(&gemma(r#", "rope_theta": 10000.0"#)),
        ConfigError::MixedParameters { key } if key == "rope_parameters"
    ));
    assert!(matches!(
        RotarySpec::from_rope_parameters(
            "gemma3",
            Component::Text,
            r#"{"full_attention": {"rope_theta": 1e6}}"#,
            256
        ),
        Err(RopeError::Config(ConfigError::PerLayerParameters { .. }))
    ));
    assert!(matches!(
        error(&gemma("")),
        ConfigError::LayerWithoutParameters { layer: 0, layer_type, known }
            if layer_type == "sliding_attention" && known == ["full_attention"]
    ));
    assert!(matches!(
        "audio".parse::<Component>(),
        Err(ConfigError::UnknownComponent { found }) if found == "audio"
    ));
}

/// Errors of the specification itself come through as they are.
#[test]
fn sections_that_do_not_fit_the_head() {
    let json = qwen2_vl(r#", "head_dim": 64, "rope_scaling": {"mrope_section": [16, 24, 24]}"#);
    assert!(matches!(
        RotarySpec::from_hf_config(&json),
        Err(RopeError::SectionSum {
            sum: 64,
            expected: 32,
            ..
        })
    ));
    let factors = r#"{"model_type": "phi3", "head_dim": 8, "max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "long_factor": [2, 4], "short_factor": [1, 1]}}"#;
    assert!(matches!(
        RotarySpec::from_hf_config(factors),
        Err(RopeError::FactorCount {
            expected: 4,
            found: 2,
            ..
        })
    ));
}

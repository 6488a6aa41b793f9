//! The rows of the families beyond pairing and axes: layers that rotate, separate sizes of heads,
//! and refusals. Expected values come from transformers 5.24.0.

use rope_core::hf::{ConfigError, LayerSpecs, model_tables};
use rope_core::{AxisLayout, Lane, Pairing, RopeError, RotarySpec};

fn layers(json: &str) -> Vec<bool> {
    let specs = LayerSpecs::from_hf_config(json).unwrap_or_else(|error| panic!("{json}: {error}"));
    (0..specs.layers())
        .map(|layer| specs.layer(layer).is_some())
        .collect()
}

fn refusal(json: &str) -> ConfigError {
    match LayerSpecs::from_hf_config(json) {
        Err(RopeError::Config(error)) => error,
        other => panic!("{json}: expected a configuration error, found {other:?}"),
    }
}

#[test]
fn layers_that_do_not_rotate() {
    let windows = r#""layer_types": ["sliding_attention", "full_attention"]"#;
    let heads = r#""hidden_size": 256, "num_attention_heads": 4, "rope_theta": 1e4"#;
    for (json, expected) in [
        // Full layers rotate where there is no window; unstated, the class has one.
        (
            format!(r#"{{"model_type": "exaone4", {windows}, {heads}}}"#),
            [true, false],
        ),
        (
            format!(r#"{{"model_type": "exaone4", "sliding_window": 16, {windows}, {heads}}}"#),
            [true, false],
        ),
        (
            format!(r#"{{"model_type": "exaone4", "sliding_window": null, {windows}, {heads}}}"#),
            [true, true],
        ),
        (
            format!(r#"{{"model_type": "afmoe", {windows}, {heads}}}"#),
            [true, false],
        ),
        // A layer type without parameters.
        (
            format!(
                r#"{{"model_type": "beam", "head_dim": 64, {windows}, "rope_parameters":
                {{"full_attention": null, "sliding_attention": {{"rope_theta": 1e4}}}}}}"#
            ),
            [true, false],
        ),
        // A theta of 0.
        (
            format!(
                r#"{{"model_type": "granite_swa", "layer_rope_theta": [0, 10000.0], {heads}}}"#
            ),
            [false, true],
        ),
        (
            format!(
                r#"{{"model_type": "mllama_text_model", "cross_attention_layers": [0],
                "num_hidden_layers": 2, {heads}}}"#
            ),
            [false, true],
        ),
    ] {
        assert_eq!(layers(&json), expected, "{json}");
    }
}

/// The indices of the layers that rotate, of `count`.
fn rotating(fields: &str, count: usize) -> Vec<usize> {
    let json = format!(
        r#"{{{fields}, "num_hidden_layers": {count}, "hidden_size": 256,
            "num_attention_heads": 4}}"#
    );
    let found = layers(&json);
    assert_eq!(found.len(), count, "{json}");
    (0..count).filter(|layer| found[*layer]).collect()
}

/// Configurations that do not list the types of their layers.
#[test]
fn layers_that_rotate_where_none_are_listed() {
    let but_every = |every: usize, count: usize| -> Vec<usize> {
        (0..count).filter(|i| (i + 1) % every != 0).collect()
    };
    for (fields, count, expected) in [
        (
            r#""model_type": "bamba", "attn_layer_indices": [9, 18, 27]"#,
            32,
            vec![9, 18, 27],
        ),
        (r#""model_type": "bamba""#, 4, vec![]),
        (r#""model_type": "recurrent_gemma""#, 8, vec![2, 5]),
        (
            r#""model_type": "recurrent_gemma", "block_types": ["recurrent", "attention"]"#,
            5,
            vec![1, 3],
        ),
        (r#""model_type": "afmoe""#, 8, but_every(4, 8)),
        (
            r#""model_type": "afmoe", "global_attn_every_n_layers": 3"#,
            7,
            but_every(3, 7),
        ),
        (r#""model_type": "exaone4""#, 8, but_every(4, 8)),
        (
            r#""model_type": "exaone_moe", "sliding_window_pattern": 2"#,
            5,
            but_every(2, 5),
        ),
        (r#""model_type": "kolibri1""#, 11, but_every(5, 11)),
        // Full: the first two, one in four from index 1 on, and the last.
        (r#""model_type": "flint""#, 9, vec![2, 3, 4, 6, 7]),
        (r#""model_type": "lara_mini""#, 10, vec![1, 4, 6, 9]),
        (
            r#""model_type": "zamba2", "use_mem_rope": true,
                "layers_block_type": ["mamba", "hybrid", "linear_attention", "hybrid"]"#,
            4,
            vec![1, 3],
        ),
        // No window: the sliding layers of Command R7B do not rotate either.
        (
            r#""model_type": "cohere2", "sliding_window": null"#,
            8,
            vec![],
        ),
        (r#""model_type": "cohere2""#, 8, but_every(4, 8)),
    ] {
        assert_eq!(rotating(fields, count), expected, "{fields}");
    }
    // A published list goes before a pattern, whatever that looks like.
    let exaone = r#""model_type": "exaone4", "sliding_window_pattern": "LLLG",
        "layer_types": ["sliding_attention", "full_attention"]"#;
    assert_eq!(rotating(exaone, 2), [0]);
    let json = r#"{"model_type": "zamba2", "use_mem_rope": true, "num_hidden_layers": 54,
        "hidden_size": 256, "num_attention_heads": 4}"#;
    let error = refusal(json);
    assert!(
        matches!(&error, ConfigError::MissingKey { key, .. } if key == "layers_block_type"),
        "{error}"
    );
}

/// The layers of full and sliding attention of models that rotate them by other thetas.
#[test]
fn layers_of_two_thetas_where_none_are_listed() {
    for (model_type, count, full) in [
        ("mimo_v2_flash", 13, vec![0, 5, 11]),
        ("modernbert", 7, vec![0, 3, 6]),
        ("t5gemma2_text", 12, vec![5, 11]),
        ("dory", 8, vec![3, 7]),
    ] {
        let json = format!(
            r#"{{"model_type": "{model_type}", "num_hidden_layers": {count}, "hidden_size": 256,
                "num_attention_heads": 4}}"#
        );
        let specs = LayerSpecs::from_hf_config(&json).expect("valid");
        let is_full = |layer: &usize| specs.layer(*layer) == specs.named("full_attention");
        let found: Vec<usize> = (0..count).filter(is_full).collect();
        assert_eq!(found, full, "{model_type}");
    }
}

/// Model types that are new in transformers 5.24.0.
#[test]
fn new_model_types_of_5_24() {
    let json = r#"{"model_type": "exaone", "hidden_size": 4096, "num_attention_heads": 32,
        "num_layers": 32}"#;
    let specs = LayerSpecs::from_hf_config(json).expect("valid");
    assert_eq!(specs.layers(), 32);
    let spec = specs.into_single().expect("alike");
    assert_eq!(
        (spec.pairing(), spec.frequencies().theta()),
        (Pairing::Half, Some(5e5))
    );

    let sarvam = r#"{"model_type": "sarvam_moe", "hidden_size": 4096, "num_attention_heads": 64}"#;
    let spec = RotarySpec::from_hf_config(sarvam).expect("valid");
    assert_eq!((spec.head_dim(), spec.rotary_dim()), (64, 64));
    assert_eq!(spec.frequencies().theta(), Some(8e6));

    // The published head_dim is the width of the compressed keys.
    let mla = |name: &str| {
        format!(
            r#"{{"model_type": "sarvam_mla", "head_dim": 576, "qk_rope_head_dim": 64,
                "rope_theta": 10000.0, "max_position_embeddings": 131072, "rope_scaling":
                {{"type": "{name}", "factor": 40, "original_max_position_embeddings": 4096,
                  "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}}}}"#
        )
    };
    let spec = RotarySpec::from_hf_config(&mla("deepseek_yarn")).expect("valid");
    assert_eq!(
        (spec.head_dim(), spec.pairing()),
        (64, Pairing::InterleaveHalf)
    );
    assert_eq!(Ok(spec), RotarySpec::from_hf_config(&mla("yarn")));

    // Its published layers are listed as attention and mlp.
    let dory = r#"{"model_type": "dory", "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"]}"#;
    assert_eq!(layers(dory), [true, false, true, false]);

    let hy = r#"{"model_type": "hy_v4_vl", "text_config": {"model_type": "hy_v4_vl_text",
        "qk_rope_head_dim": 64, "head_dim": 64}}"#;
    let spec = RotarySpec::from_hf_config(hy).expect("valid");
    assert_eq!((spec.head_dim(), spec.pairing()), (64, Pairing::Adjacent));
    assert_eq!(spec.axis_layout(), &AxisLayout::Striped(vec![12, 10, 10]));
}

#[test]
fn what_a_configuration_must_state_or_must_not() {
    let heads = r#""hidden_size": 256, "num_attention_heads": 4, "rope_theta": 1e4"#;
    let of = |fields: &str| format!("{{{fields}, {heads}}}");
    for fields in [
        r#""model_type": "falcon", "alibi": true"#,
        r#""model_type": "zamba2""#,
        r#""model_type": "deepseek_v4""#,
        r#""model_type": "t5gemma2""#,
    ] {
        let error = refusal(&of(fields));
        assert!(
            matches!(error, ConfigError::UnsupportedModelType { .. }),
            "{fields}: {error}"
        );
    }
    let error = refusal(&of(r#""model_type": "granitemoehybrid""#));
    assert!(
        matches!(&error, ConfigError::MissingKey { key, .. } if key == "position_embedding_type"),
        "{error}"
    );
    let error = refusal(&of(
        r#""model_type": "granite_swa", "layer_rope_theta": [10000.0, 5000.0]"#,
    ));
    assert!(
        matches!(error, ConfigError::Contradiction { .. }),
        "{error}"
    );
    for accepted in [
        r#""model_type": "falcon", "alibi": false"#,
        r#""model_type": "zamba2", "use_mem_rope": true"#,
        r#""model_type": "granitemoehybrid", "position_embedding_type": "rope""#,
    ] {
        assert!(
            LayerSpecs::from_hf_config(&of(accepted)).is_ok(),
            "{accepted}"
        );
    }
}

#[test]
fn heads_of_full_layers_are_read_layer_by_layer() {
    let json = r#"{
        "model_type": "gemma4_text", "head_dim": 64,
        "per_layer_config": {"1": {"head_dim": 96}, "3": {"head_dim": 96}},
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 1e4},
            "full_attention": {
                "rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25
            }
        }
    }"#;
    let specs = LayerSpecs::from_hf_config(json).expect("valid");
    let head_dim = |name| specs.named(name).map(RotarySpec::head_dim);
    assert_eq!(head_dim("sliding_attention"), Some(64));
    assert_eq!(head_dim("full_attention"), Some(96));
    let error = refusal(&json.replace("\"3\": {\"head_dim\": 96}", "\"3\": {\"head_dim\": 80}"));
    assert!(
        matches!(error, ConfigError::Contradiction { .. }),
        "{error}"
    );
}

#[test]
fn nanochat_rotates_the_other_way() {
    let json = r#"{
        "model_type": "nanochat", "hidden_size": 16, "num_attention_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}
    }"#;
    let spec = RotarySpec::from_hf_config(json).expect("valid");
    assert_eq!(spec.inv_freq(None).expect("listed"), [-1.0, -0.01]);
    let scaled = json.replace(
        "\"default\"",
        "\"dynamic\", \"factor\": 2.0, \"max_position_embeddings\": 32",
    );
    let error = refusal(&scaled);
    assert!(
        matches!(error, ConfigError::UnsupportedModelType { .. }),
        "{error}"
    );
}

#[test]
fn lanes_of_vision_towers() {
    let lane = |(axis, frequency)| Lane { axis, frequency };
    let lanes = |lanes: &[(u8, u32)]| AxisLayout::Lanes(lanes.iter().copied().map(lane).collect());
    let pixtral = r#"{"model_type": "pixtral", "head_dim": 8, "rope_theta": 10000.0}"#;
    let spec = RotarySpec::from_hf_vision_config(pixtral).expect("valid");
    assert_eq!(
        spec.axis_layout(),
        &lanes(&[(0, 0), (0, 2), (1, 1), (1, 3)])
    );
    assert_eq!(spec.inv_freq(None).expect("valid"), [1.0, 0.1, 0.01, 0.001]);

    // 14 channels: 4 for each axis, 2 that do not rotate.
    let vjepa2 = r#"{"model_type": "vjepa2", "hidden_size": 28, "num_attention_heads": 2}"#;
    let spec = RotarySpec::from_hf_vision_config(vjepa2).expect("valid");
    assert_eq!((spec.rotary_dim(), spec.pairing()), (12, Pairing::Adjacent));
    assert_eq!(spec.inv_freq(None).expect("valid"), [1.0, 0.01]);
    // Channels 0, 1, 2, 3 of an axis rotate at frequencies 0, 1, 0, 1.
    let first = [(0, 0), (0, 0), (1, 0), (1, 0), (2, 0), (2, 0)];
    let second = first.map(|(axis, _)| (axis, 1));
    assert_eq!(spec.axis_layout(), &lanes(&[first, second].concat()));
}

/// Set to write the tables of the page instead of comparing them.
const WRITE: &str = "MROPE_WRITE_TABLES";

#[test]
fn the_page_lists_the_rows() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/tables/model-types.md"
    );
    let page = std::fs::read_to_string(path).expect("the page is there");
    let (prose, _) = page.split_once("| component |").expect("it has tables");
    let expected = prose.to_owned() + &model_tables();
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(path, expected).expect("the page can be written");
    } else {
        assert!(
            page == expected,
            "docs/tables/model-types.md: run this test with {WRITE}=1"
        );
    }
}

/// A model type in two rows of a component would be read by the first alone.
#[test]
fn each_model_type_has_one_row() {
    let tables = model_tables();
    let mut seen = std::collections::BTreeSet::new();
    for line in tables.lines().filter(|line| line.matches('|').count() == 6) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        for name in cells[5].split(", ").filter(|name| !name.starts_with("--")) {
            assert!(
                seen.insert((cells[1], name)),
                "hf/family.rs: {name} is in two rows of {}; only the first is read",
                cells[1].to_uppercase()
            );
        }
    }
    assert!(seen.len() > 200, "{} model types", seen.len());
}

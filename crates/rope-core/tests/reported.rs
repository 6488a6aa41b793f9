//! Configurations of public reports and published files, made small. The right values are those of
//! transformers 5.24.0.

use rope_core::hf::{ConfigError, LayerSpecs, parse_config};
use rope_core::{AxisLayout, Pairing, RopeError, RotarySpec};
use serde_json::json;

fn text(config: &str) -> RotarySpec {
    RotarySpec::from_hf_config(config).unwrap_or_else(|error| panic!("{config}: {error}"))
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
    assert!(specs.of_layer(0).is_none() && specs.of_layer(1).is_some());
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
    // Strings stay what they are.
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
    // The reason of a refusal comes before what nobody reads.
    let refused = r#"{"model_type":"nemotron_h","hidden_size":256,"num_attention_heads":4,
        "time_step_limit":[0.0,Infinity]}"#;
    assert!(matches!(
        error(refused),
        ConfigError::UnsupportedModelType { model_type, reason }
            if model_type == "nemotron_h" && reason.contains("does not turn")
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

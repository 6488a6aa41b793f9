//! Frequency scalings against the tables of Hugging Face transformers, and every way to get one
//! wrong.

use rope_core::hf::{ConfigError, RopeContext, RopeParameters, Stated};
use rope_core::{Frequencies, Llama3Scaling, LongRopeScaling, RopeError, Scaling, YarnScaling};
use serde::Deserialize;

const TABLES: &str = include_str!("fixtures/inv_freq_tables.json");
/// The bound that the project promises on frequencies and attention scaling.
const RELATIVE: f64 = 1e-7;

#[derive(Deserialize)]
struct Tables {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    seq_len: Option<u64>,
    head_dim: usize,
    max_position_embeddings: u64,
    rope_parameters: serde_json::Value,
    attention_scaling: f64,
    inv_freq_f64: Vec<f64>,
}

fn close(found: f64, expected: f64) -> bool {
    (found - expected).abs() <= RELATIVE * expected.abs()
}

fn read(json: &str) -> Result<RopeParameters, RopeError> {
    let context = RopeContext {
        theta: Some(1e4),
        ..RopeContext::default()
    };
    RopeParameters::from_json(json, context)
}

fn config_error(json: &str) -> ConfigError {
    match read(json) {
        Err(RopeError::Config(error)) => error,
        other => panic!("expected a configuration error, found {other:?}"),
    }
}

#[test]
fn every_published_table_is_met() {
    let tables: Tables = serde_json::from_str(TABLES).expect("fixture parses");
    assert!(!tables.cases.is_empty());
    for case in tables.cases {
        let context = RopeContext {
            max_position_embeddings: Some(case.max_position_embeddings),
            ..RopeContext::default()
        };
        let parameters = RopeParameters::from_json(&case.rope_parameters.to_string(), context)
            .expect(&case.name);
        let dims = parameters.rotary_dim(case.head_dim).expect(&case.name);
        let inv_freq = parameters
            .frequencies
            .inv_freq(dims, case.seq_len)
            .expect(&case.name);
        assert_eq!(inv_freq.len(), case.inv_freq_f64.len(), "{}", case.name);
        for (pair, (found, expected)) in inv_freq.iter().zip(&case.inv_freq_f64).enumerate() {
            assert!(
                close(*found, *expected),
                "{} (seq_len {:?}), pair {pair}: found {found:e}, expected {expected:e}",
                case.name,
                case.seq_len
            );
        }
        let found = parameters.frequencies.attention_scaling();
        assert!(
            close(found, case.attention_scaling),
            "{}: attention scaling {found}, expected {}",
            case.name,
            case.attention_scaling
        );
    }
}

/// Hunyuan's alpha: theta * alpha^(dims / (dims - 2)), computed here from that formula.
#[test]
fn ntk_alpha_raises_theta() {
    let (theta, alpha, dims) = (1e4_f64, 1000.0_f64, 128);
    let parameters = read(r#"{"type": "xdrope", "alpha": 1000.0, "factor": 1.0}"#).expect("reads");
    let raised = theta * alpha.powf(dims as f64 / (dims as f64 - 2.0));
    let found = parameters
        .frequencies
        .inv_freq(dims, None)
        .expect("frequencies");
    for (pair, found) in found.iter().enumerate() {
        let expected = raised.powf(-2.0 * pair as f64 / dims as f64);
        assert!(
            close(*found, expected),
            "pair {pair}: {found:e}, expected {expected:e}"
        );
    }
}

#[test]
fn a_single_pair_has_frequency_one_under_ntk_scalings() {
    let dynamic = Scaling::Dynamic {
        factor: 2.0,
        max_position_embeddings: 8,
    };
    for scaling in [dynamic, Scaling::NtkAlpha { alpha: 4.0 }] {
        let frequencies = Frequencies::new(1e4).and_then(|f| f.with_scaling(scaling));
        let inv_freq = frequencies.and_then(|f| f.inv_freq(2, Some(64)));
        assert_eq!(inv_freq, Ok(vec![1.0]));
    }
}

#[test]
fn yarn_attention_scaling_follows_what_is_stated() {
    let scaled = |change: fn(&mut YarnScaling)| {
        let mut yarn = YarnScaling::new(40.0, 4096);
        change(&mut yarn);
        let frequencies = Frequencies::new(1e4).and_then(|f| f.with_scaling(Scaling::Yarn(yarn)));
        frequencies.expect("valid").attention_scaling()
    };
    let ln_40 = 40.0_f64.ln();
    assert!(close(scaled(|_| ()), 0.1 * ln_40 + 1.0));
    assert!(close(scaled(|yarn| yarn.attention_factor = Some(0.5)), 0.5));
    let both = scaled(|yarn| (yarn.mscale, yarn.mscale_all_dim) = (Some(0.707), Some(1.0)));
    assert!(close(both, (0.0707 * ln_40 + 1.0) / (0.1 * ln_40 + 1.0)));
    // A zero is not a statement, and one of the two alone is not used.
    let one = scaled(|yarn| (yarn.mscale, yarn.mscale_all_dim) = (Some(0.707), Some(0.0)));
    assert!(close(one, 0.1 * ln_40 + 1.0));
}

#[test]
fn serialized_frequencies_come_back_and_are_checked() {
    let yarn = Scaling::Yarn(YarnScaling::new(4.0, 32768));
    let frequencies = Frequencies::new(1e6)
        .and_then(|f| f.with_scaling(yarn))
        .expect("valid");
    let json = serde_json::to_string(&frequencies).expect("serializes");
    assert_eq!(
        serde_json::from_str::<Frequencies>(&json).expect("reads"),
        frequencies
    );
    assert!(json.contains(r#""rope_type":"yarn""#), "{json}");
    let broken = json.replace(r#""factor":4.0"#, r#""factor":-4.0"#);
    assert!(serde_json::from_str::<Frequencies>(&broken).is_err());
}

#[test]
fn theta_must_be_positive_and_finite() {
    for theta in [0.0, -1.0, f64::INFINITY] {
        assert_eq!(
            Frequencies::new(theta),
            Err(RopeError::Theta { found: theta })
        );
    }
    assert!(matches!(
        Frequencies::new(f64::NAN),
        Err(RopeError::Theta { .. })
    ));
}

#[test]
fn channels_must_be_even() {
    let frequencies = Frequencies::new(1e4).expect("valid");
    for dims in [0, 7] {
        let found = frequencies.inv_freq(dims, None);
        assert_eq!(found, Err(RopeError::OddRotaryDim { found: dims }));
    }
}

#[test]
fn parameters_out_of_range_are_named() {
    let yarn = |change: fn(&mut YarnScaling)| {
        let mut yarn = YarnScaling::new(4.0, 4096);
        change(&mut yarn);
        Scaling::Yarn(yarn)
    };
    let longrope = |change: fn(&mut LongRopeScaling)| {
        let mut longrope = LongRopeScaling {
            short_factor: vec![1.0, 1.0],
            long_factor: vec![2.0, 2.0],
            original_max_position_embeddings: 4096,
            factor: 2.0,
            attention_factor: None,
        };
        change(&mut longrope);
        Scaling::LongRope(longrope)
    };
    let llama3 = |change: fn(&mut Llama3Scaling)| {
        let mut llama3 = Llama3Scaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        change(&mut llama3);
        Scaling::Llama3(llama3)
    };
    let dynamic = |factor, max_position_embeddings| Scaling::Dynamic {
        factor,
        max_position_embeddings,
    };
    let proportional = |partial_rotary_factor, factor| Scaling::Proportional {
        partial_rotary_factor,
        factor,
    };
    let original = "original_max_position_embeddings";
    let cases = [
        (Scaling::Linear { factor: 0.0 }, "linear", "factor"),
        (Scaling::Linear { factor: f64::NAN }, "linear", "factor"),
        (
            Scaling::Linear {
                factor: f64::INFINITY,
            },
            "linear",
            "factor",
        ),
        (dynamic(0.5, 4096), "dynamic", "factor"),
        (dynamic(2.0, 0), "dynamic", "max_position_embeddings"),
        (Scaling::NtkAlpha { alpha: -1.0 }, "ntk_alpha", "alpha"),
        (yarn(|y| y.factor = -4.0), "yarn", "factor"),
        (yarn(|y| y.beta_slow = 0.0), "yarn", "beta_slow"),
        (yarn(|y| y.beta_fast = 0.5), "yarn", "beta_fast"),
        (
            yarn(|y| y.original_max_position_embeddings = 0),
            "yarn",
            original,
        ),
        (
            yarn(|y| y.attention_factor = Some(0.0)),
            "yarn",
            "attention_factor",
        ),
        (yarn(|y| y.mscale = Some(-1.0)), "yarn", "mscale"),
        (
            yarn(|y| y.mscale_all_dim = Some(f64::NAN)),
            "yarn",
            "mscale_all_dim",
        ),
        (
            longrope(|l| l.short_factor[1] = 0.0),
            "longrope",
            "short_factor",
        ),
        (
            longrope(|l| l.long_factor[0] = -2.0),
            "longrope",
            "long_factor",
        ),
        (longrope(|l| l.factor = 0.0), "longrope", "factor"),
        (
            longrope(|l| l.original_max_position_embeddings = 1),
            "longrope",
            original,
        ),
        (
            longrope(|l| l.attention_factor = Some(-1.0)),
            "longrope",
            "attention_factor",
        ),
        (llama3(|l| l.factor = 0.0), "llama3", "factor"),
        (
            llama3(|l| l.low_freq_factor = 0.0),
            "llama3",
            "low_freq_factor",
        ),
        (
            llama3(|l| l.high_freq_factor = 0.5),
            "llama3",
            "high_freq_factor",
        ),
        (
            llama3(|l| l.original_max_position_embeddings = 0),
            "llama3",
            original,
        ),
        (
            proportional(0.0, 1.0),
            "proportional",
            "partial_rotary_factor",
        ),
        (
            proportional(1.5, 1.0),
            "proportional",
            "partial_rotary_factor",
        ),
        (proportional(0.5, 0.0), "proportional", "factor"),
    ];
    for (scaling, rope_type, parameter) in cases {
        let shown = format!("{scaling:?}");
        match Frequencies::new(1e4).and_then(|frequencies| frequencies.with_scaling(scaling)) {
            Err(RopeError::ScalingParameter {
                rope_type: of,
                parameter: named,
                ..
            }) => {
                assert_eq!((of, named), (rope_type, parameter), "{shown}");
            }
            other => panic!("{shown}: {other:?}"),
        }
    }
    let below_one = Frequencies::new(0.5).and_then(|f| f.with_scaling(yarn(|_| ())));
    assert!(matches!(
        below_one,
        Err(RopeError::ScalingParameter {
            parameter: "rope_theta",
            ..
        })
    ));
}

#[test]
fn longrope_lists_must_fit() {
    let json = r#"{"rope_type": "longrope", "short_factor": [1, 1], "long_factor": [2, 2],
                   "original_max_position_embeddings": 4096}"#;
    let frequencies = read(json).expect("reads").frequencies;
    assert_eq!(
        frequencies.inv_freq(8, None),
        Err(RopeError::FactorCount {
            list: "short_factor",
            expected: 4,
            found: 2
        })
    );
    assert_eq!(
        frequencies.inv_freq(8, Some(4097)),
        Err(RopeError::FactorCount {
            list: "long_factor",
            expected: 4,
            found: 2
        })
    );
    let unequal = json.replace("[2, 2]", "[2, 2, 2]");
    assert_eq!(
        read(&unequal),
        Err(RopeError::FactorCount {
            list: "long_factor",
            expected: 2,
            found: 3
        })
    );
}

#[test]
fn rope_types_are_checked() {
    assert!(matches!(
        config_error(r#"{"rope_type": "yarm", "factor": 4.0}"#),
        ConfigError::UnknownRopeType { key, found, .. } if key == "rope_parameters.rope_type" && found == "yarm"
    ));
    assert_eq!(
        config_error(r#"{"rope_type": "yarn", "type": "linear", "factor": 4.0}"#),
        ConfigError::Contradiction {
            left: Stated {
                key: "rope_parameters.rope_type".to_owned(),
                value: "\"yarn\"".to_owned()
            },
            right: Stated {
                key: "rope_parameters.type".to_owned(),
                value: "\"linear\"".to_owned()
            },
            remedy: "two spellings of one key: keep the one that the model was trained with",
        }
    );
    // The parameters that transformers itself writes for Qwen2-VL: two spellings of one thing.
    let both = read(r#"{"rope_type": "default", "type": "mrope", "mrope_section": [16, 24, 24]}"#);
    assert_eq!(both.expect("reads").mrope_section, Some(vec![16, 24, 24]));
}

#[test]
fn keys_that_a_rope_type_needs_are_named() {
    let cases = [
        (r#"{"rope_type": "linear"}"#, "factor"),
        (
            r#"{"rope_type": "dynamic", "factor": 2.0}"#,
            "max_position_embeddings",
        ),
        (
            r#"{"type": "yarn", "original_max_position_embeddings": 4096}"#,
            "factor",
        ),
        (
            r#"{"type": "yarn", "factor": 4.0}"#,
            "original_max_position_embeddings",
        ),
        (
            r#"{"type": "su", "long_factor": [1], "original_max_position_embeddings": 4096}"#,
            "short_factor",
        ),
        (
            r#"{"rope_type": "llama3", "factor": 8, "low_freq_factor": 1}"#,
            "high_freq_factor",
        ),
    ];
    for (json, missing) in cases {
        match config_error(json) {
            ConfigError::MissingKey { key, .. } => {
                assert_eq!(
                    key.trim_start_matches("rope_parameters."),
                    missing,
                    "{json}"
                );
            }
            other => panic!("{json}: {other:?}"),
        }
    }
    let no_theta = RopeParameters::from_json("{}", RopeContext::default());
    assert!(matches!(
        no_theta,
        Err(RopeError::Config(ConfigError::MissingKey { key, .. })) if key == "rope_parameters.rope_theta"
    ));
}

#[test]
fn json_of_the_wrong_kind_is_refused() {
    assert!(matches!(config_error("{"), ConfigError::Json { .. }));
    // As Python writes it: it is named where a number is read.
    assert!(matches!(
        config_error("{\"rope_theta\": NaN}"),
        ConfigError::WrongType { key, expected: "a number", .. } if key == "rope_parameters.rope_theta"
    ));
    assert!(matches!(config_error("[1]"), ConfigError::WrongType { .. }));
    assert!(matches!(
        config_error(r#"{"rope_theta": "ten thousand"}"#),
        ConfigError::WrongType { key, expected: "a number", .. } if key == "rope_parameters.rope_theta"
    ));
}

#[test]
fn the_rotated_share_must_give_pairs() {
    for (share, head_dim) in [("0", 128), ("1.5", 128), ("-0.5", 128), ("0.5", 10)] {
        let json = format!(r#"{{"partial_rotary_factor": {share}}}"#);
        let found = read(&json).and_then(|parameters| parameters.rotary_dim(head_dim));
        assert!(
            matches!(
                found,
                Err(RopeError::Config(ConfigError::PartialRotary { .. }))
            ),
            "{share} of {head_dim}: {found:?}"
        );
    }
}

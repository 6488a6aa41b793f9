//! Default configurations of transformers and files of published checkpoints: the rotation that
//! transformers computes, or a refusal, and never another rotation.
//!
//! `tests/fixtures/generate/configurations.py` writes the fixture.

use std::collections::BTreeMap;

use rope_core::hf::LayerSpecs;
use rope_core::{Pairing, RotarySpec};
use serde::Deserialize;
use serde_json::{Map, Value};

/// Two units of f32, in which RoFormer's table is made.
const RELATIVE: f64 = 2e-7;

#[derive(Deserialize)]
struct Fixture {
    inv_freq: Vec<Vec<f64>>,
    rotations: Vec<Rotation>,
    defaults: Vec<OfClass>,
    published: Vec<Published>,
}

#[derive(Deserialize)]
struct OfClass {
    config: Map<String, Value>,
    /// The components whose rotation follows from model types alone.
    #[serde(default)]
    bare: Vec<String>,
    #[serde(default)]
    text: Computed,
    #[serde(default)]
    vision: Computed,
}

impl OfClass {
    fn name(&self) -> &str {
        self.config["model_type"].as_str().expect("a string")
    }
}

#[derive(Deserialize)]
struct Published {
    path: String,
    config: Value,
    #[serde(default)]
    text: Computed,
    #[serde(default)]
    vision: Computed,
}

/// The result of transformers for one component.
#[derive(Default, Deserialize)]
#[serde(untagged)]
enum Computed {
    /// Indices of rotations by layer type.
    Rotations(BTreeMap<String, usize>),
    /// Its module cannot be built.
    Fails(#[allow(dead_code, reason = "the message is for readers of the fixture")] String),
    /// It does not rotate, or has no class for it.
    #[default]
    Nothing,
}

#[derive(Deserialize)]
struct Rotation {
    head_dim: usize,
    rotary_dim: usize,
    pairing: String,
    /// One digit for each lane; none if all are on the first axis.
    #[serde(default)]
    axes: String,
    inv_freq: usize,
    #[serde(default = "one")]
    attention_scaling: f64,
}

fn one() -> f64 {
    1.0
}

fn close(found: f64, expected: f64) -> bool {
    (found - expected).abs() <= RELATIVE * expected.abs()
}

fn fixture() -> Fixture {
    let path = "/../../tests/fixtures/configurations.json";
    let path = format!("{}{path}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).expect("the fixture is there");
    let mut value: Value = serde_json::from_str(&text).expect("JSON");
    let lists = value["lists"].take();
    for rows in ["defaults", "published"] {
        put_lists(&mut value[rows], &lists);
    }
    serde_json::from_value(value).expect("the fixture parses")
}

/// Puts the long lists of configurations where they are referred to: elements, and runs `[x, n]`.
fn put_lists(value: &mut Value, lists: &Value) {
    match value {
        Value::Object(map) => match map.get("list").and_then(Value::as_u64) {
            Some(index) => {
                let runs = lists[index as usize].as_array().expect("a list");
                let run = |run: &Value| match run.as_array().map(Vec::as_slice) {
                    Some([element, count]) => {
                        vec![element.clone(); count.as_u64().unwrap_or_default() as usize]
                    }
                    _ => vec![run.clone()],
                };
                *value = runs.iter().flat_map(run).collect();
            }
            None => map.values_mut().for_each(|inner| put_lists(inner, lists)),
        },
        Value::Array(rows) => rows.iter_mut().for_each(|inner| put_lists(inner, lists)),
        _ => {}
    }
}

/// The model types of a configuration and of those in it.
fn bare(config: &Map<String, Value>) -> Value {
    let inner = |(key, value): (&String, &Value)| {
        let object = value.as_object().filter(|of| of.contains_key("model_type"));
        let kept = match object {
            Some(object) => Some(bare(object)),
            None => (key == "model_type").then(|| value.clone()),
        };
        kept.map(|kept| (key.clone(), kept))
    };
    Value::Object(config.iter().filter_map(inner).collect())
}

fn read(config: &Value, component: &str) -> rope_core::Result<Vec<(String, RotarySpec)>> {
    let config = config.to_string();
    if component == "vision" {
        let spec = RotarySpec::from_hf_vision_config(&config)?;
        return Ok(vec![("attention".to_owned(), spec)]);
    }
    let specs = LayerSpecs::from_hf_config(&config)?;
    Ok(specs
        .specs()
        .map(|(name, spec)| (name.to_owned(), spec.clone()))
        .collect())
}

/// Where two rotations differ.
fn difference(fixture: &Fixture, rotation: &Rotation, spec: &RotarySpec) -> Option<String> {
    let pairing: Pairing = serde_json::from_value(rotation.pairing.clone().into()).expect("known");
    let expected = (rotation.head_dim, rotation.rotary_dim, pairing);
    let found = (spec.head_dim(), spec.rotary_dim(), spec.pairing());
    if found != expected || spec.rotary_offset() != 0 {
        return Some(format!("{found:?}, not {expected:?}"));
    }
    if !close(spec.attention_scaling(), rotation.attention_scaling) {
        let (found, expected) = (spec.attention_scaling(), rotation.attention_scaling);
        return Some(format!("attention scaling {found}, not {expected}"));
    }
    let inv_freq = spec.inv_freq(None).expect("frequencies");
    let lanes = spec.lane_map().lanes();
    let expected = &fixture.inv_freq[rotation.inv_freq];
    let axes = rotation.axes.as_bytes();
    // The members of a pair share a lane where only one is listed.
    (0..spec.rotary_dim()).find_map(|channel| {
        let lane = lanes[channel % lanes.len()];
        let index = channel % expected.len();
        let found = (lane.axis, inv_freq[lane.frequency as usize]);
        let axis = axes.get(index).map_or(0, |digit| digit - b'0');
        let expected = (axis, expected[index]);
        let is_same = close(found.1, expected.1) && (found.0 == expected.0 || expected.1 == 0.0);
        (!is_same)
            .then(|| format!("channel {channel}: axis and frequency {found:?}, not {expected:?}"))
    })
}

#[derive(Debug, PartialEq)]
enum Outcome {
    Agrees,
    Differs(String),
    /// Refused, though transformers computes a rotation.
    Refused(String),
    /// Refused, as transformers does.
    RefusedByBoth,
    /// Read, though transformers computes none.
    Alone,
}

fn outcome(fixture: &Fixture, config: &Value, component: &str, computed: &Computed) -> Outcome {
    match (read(config, component), computed) {
        (Err(error), Computed::Rotations(_)) => Outcome::Refused(error.to_string()),
        (Err(_), _) => Outcome::RefusedByBoth,
        (Ok(specs), Computed::Rotations(rotations)) => {
            for (name, rotation) in rotations {
                // Layers that are alike have one rotation, of that name.
                let is_of_layer = |(layer, _): &&(String, RotarySpec)| {
                    layer == name || layer == "attention" || name == "attention"
                };
                let mut specs = specs.iter().filter(is_of_layer).peekable();
                if specs.peek().is_none() {
                    return Outcome::Differs(format!("{name} is not read"));
                }
                let rotation = &fixture.rotations[*rotation];
                let difference = specs.find_map(|(_, spec)| difference(fixture, rotation, spec));
                if let Some(difference) = difference {
                    return Outcome::Differs(format!("{name}: {difference}"));
                }
            }
            Outcome::Agrees
        }
        (Ok(_), _) => Outcome::Alone,
    }
}

/// Refusals where transformers computes a rotation: part of the message, and the names.
type Refused = &'static [(&'static str, &'static str)];

#[derive(Default)]
struct Tally {
    agree: usize,
    refused: Vec<(String, String)>,
    alone: Vec<String>,
}

impl Tally {
    fn add(&mut self, name: &str, outcome: Outcome) {
        match outcome {
            Outcome::Agrees => self.agree += 1,
            Outcome::RefusedByBoth => {}
            Outcome::Refused(error) => self.refused.push((name.to_owned(), error)),
            Outcome::Alone => self.alone.push(name.to_owned()),
            Outcome::Differs(difference) => panic!("{name}: {difference}"),
        }
    }

    fn check(mut self, agree: usize, refused: Refused, alone: &str) {
        for (part, names) in refused {
            let is_of = |(_, error): &(String, String)| error.contains(part);
            let (matching, others) = self.refused.into_iter().partition::<Vec<_>, _>(is_of);
            self.refused = others;
            let found: Vec<String> = matching.into_iter().map(|(name, _)| name).collect();
            assert_eq!(
                found.join(" "),
                *names,
                "refused with {part:?}; if the message has other words now, state them here"
            );
        }
        assert_eq!(self.refused, [], "refused for another reason");
        assert_eq!(self.alone.join(" "), alone, "read, but not by transformers");
        assert_eq!(self.agree, agree);
    }
}

const REFUSED: Refused = &[
    // The modules fall back to sections of their own.
    (
        "mrope_section is missing",
        "colqwen2 paddleocr_vl_text paddleocr_vl qwen2_5_omni_text qwen2_5_omni_thinker \
         qwen2_5_omni_talker qwen2_5_omni qwen2_5_vl_text qwen2_5_vl qwen2_vl_text qwen2_vl",
    ),
    (
        "; sections count pairs of channels",
        "qwen3_omni_moe_talker_text qwen4_exp_text qwen4_exp",
    ),
    ("the width does not divide into that many heads", "glm4_moe"),
    // Their attention does not rotate by default, though the module is there.
    ("is not a rotary embedding", "esm"),
    ("position_embedding_type is missing", "granitemoehybrid"),
    ("its attention does not rotate", "zamba2"),
    ("only the innermost rope object is read", "musicflamingo"),
    ("which of its full layers rotate", "cohere2_moe"),
    ("it rotates the output of attention back", "deepseek_v4"),
    (
        "its module the whole head",
        "minimax_m3_vl_text minimax_m3_vl",
    ),
    (
        "multiplied by learned factors",
        "mistral_large4_text mistral_large4",
    ),
    (
        "it rotates the first head of each layer alone",
        "qwen2_5_omni_dit",
    ),
];
/// Transformers 5 does not run them: their class no longer rotates half of each head by default, as
/// their sections need.
const ALONE: &str = "glm46v glm4v_text glm4v glmga";

#[test]
fn default_configurations_are_read_as_transformers_reads_them_or_refused() {
    let fixture = fixture();
    let mut tally = Tally::default();
    for row in &fixture.defaults {
        let config = Value::Object(row.config.clone());
        for (component, computed) in [("text", &row.text), ("vision", &row.vision)] {
            tally.add(row.name(), outcome(&fixture, &config, component, computed));
        }
    }
    tally.check(351, REFUSED, ALONE);
}

/// Transformers 4.36 to 4.51 wrote nested configurations as differences from their classes: those of
/// default configurations are their model types.
#[test]
fn model_types_alone_are_read_as_transformers_reads_them_or_refused() {
    let fixture = fixture();
    let mut tally = Tally::default();
    for row in &fixture.defaults {
        for (component, computed) in [("text", &row.text), ("vision", &row.vision)] {
            if row.bare.iter().any(|of| of == component) {
                let outcome = outcome(&fixture, &bare(&row.config), component, computed);
                tally.add(row.name(), outcome);
            }
        }
    }
    for (name, error) in &tally.refused {
        let is_missing = error.contains(" is missing");
        let is_refused = REFUSED.iter().any(|(part, _)| error.contains(part));
        assert!(is_missing || is_refused, "{name}: {error}");
    }
    assert_eq!((tally.agree, tally.refused.len()), (157, 211));
}

const REFUSED_FILES: Refused = &[
    (
        "it rotates the output of attention back",
        "deepseek-ai--DeepSeek-V4-Flash deepseek-ai--DeepSeek-V4-Pro \
         nvidia--DeepSeek-V4-Flash-NVFP4 nvidia--DeepSeek-V4-Pro-NVFP4",
    ),
    ("its module the whole head", "nvidia--MiniMax-M3-NVFP4"),
    // Cut down to the keys that their holders read: the rest would be defaults of classes.
    (
        "vision component of model type llama4",
        "meta-llama--Llama-4-Maverick-17B-128E-Instruct \
         meta-llama--Llama-4-Scout-17B-16E-Instruct",
    ),
    (
        "component of model type step3p7",
        "stepfun-ai--Step-3.7-Flash-FP8 stepfun-ai--Step-3.7-Flash-FP8 \
         stepfun-ai--Step-3.7-Flash stepfun-ai--Step-3.7-Flash",
    ),
    (
        "rope_theta is missing",
        "command_r_35b qwen3_5_27b qwen3_5_35b_a3b",
    ),
    // Its language model lies beside its other keys; transformers takes the default of the class.
    ("text component of model type llava", "llava_v1.5_7b"),
];
/// Transformers has no class for them without code of their own.
const ALONE_FILES: &str = "moonshotai--Kimi-K2-Instruct janus_1.3b";

#[test]
fn published_configurations_are_read_as_transformers_reads_them_or_refused() {
    let fixture = fixture();
    let mut tally = Tally::default();
    for row in &fixture.published {
        let (_, name) = row.path.rsplit_once('/').expect("a path");
        let name = name.trim_end_matches(".json").trim_end_matches("_config");
        for (component, computed) in [("text", &row.text), ("vision", &row.vision)] {
            let outcome = outcome(&fixture, &row.config, component, computed);
            tally.add(name, outcome);
        }
    }
    tally.check(142, REFUSED_FILES, ALONE_FILES);
}

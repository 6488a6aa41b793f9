//! Reads configurations, one JSON object `{"component", "config"}` per line, and writes their
//! rotations, one JSON object per line: `{"rotations": [...]}`, or `{"error"}`. A configuration is
//! an object, or a string with the text of a file.
//!
//! `tests/fixtures/generate/rotations.py` compares the output with Hugging Face's modules.

use std::error::Error;
use std::io::{BufRead, stdin};

use rope_core::RotarySpec;
use rope_core::hf::{Component, LayerSpecs};
use serde_json::{Value, json};

fn main() -> Result<(), Box<dyn Error>> {
    for line in stdin().lock().lines() {
        let request: Value = serde_json::from_str(&line?)?;
        let component = request["component"].as_str().unwrap_or_default();
        let component = component.parse::<Component>()?;
        let config = match &request["config"] {
            Value::String(text) => text.clone(),
            config => config.to_string(),
        };
        let found = match rotations(component, &config) {
            Ok(rotations) => json!({ "rotations": rotations }),
            Err(error) => json!({ "error": error.to_string() }),
        };
        println!("{found}");
    }
    Ok(())
}

fn rotations(component: Component, config: &str) -> rope_core::Result<Vec<Value>> {
    match component {
        Component::Text => {
            let specs = LayerSpecs::from_hf_config(config)?;
            specs
                .specs()
                .map(|(name, spec)| rotation(name, spec))
                .collect()
        }
        Component::Vision => {
            let spec = RotarySpec::from_hf_vision_config(config)?;
            Ok(vec![rotation("vision", &spec)?])
        }
    }
}

fn rotation(name: &str, spec: &RotarySpec) -> rope_core::Result<Value> {
    Ok(json!({
        "name": name,
        "head_dim": spec.head_dim(),
        "rotary_dim": spec.rotary_dim(),
        "rotary_offset": spec.rotary_offset(),
        "pairing": spec.pairing(),
        "lanes": spec.lane_map().lanes(),
        "inv_freq": spec.inv_freq(None)?,
        "attention_scaling": spec.attention_scaling(),
    }))
}

//! Qwen2 and Qwen2.5.

use serde_json::{Value, json};

use crate::family::{Family, Names};
use crate::qwen2_vl;

pub(crate) const ROW: Family = Family {
    name: "Qwen2.5",
    model_type: "qwen2",
    rotation: "qwen2",
    vision: None,
    names: Names {
        visual: None,
        text: "model.",
        parts: &[],
        unread: None,
    },
    defaults,
    ..qwen2_vl::ROW
};

fn defaults() -> Value {
    json!({
        "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6, "sliding_window": 4096, "max_window_layers": 28
    })
}

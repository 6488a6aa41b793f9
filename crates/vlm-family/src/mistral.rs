//! Mistral, dense.

use serde_json::{Value, json};

use crate::family::{AttentionBias, Family, TextParts, WindowedLayers};
use crate::qwen2;

pub(crate) const ROW: Family = Family {
    name: "Mistral",
    model_type: "mistral",
    rotation: "mistral",
    text: TextParts {
        bias: AttentionBias::IfStated,
        windows: WindowedLayers::All,
        ..qwen2::ROW.text
    },
    defaults,
    ..qwen2::ROW
};

fn defaults() -> Value {
    json!({
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6, "sliding_window": 4096
    })
}

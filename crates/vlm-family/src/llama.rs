//! Llama 2 and 3, and the many models of their architecture.

use serde_json::{Value, json};

use crate::family::{AttentionBias, Family, TextParts, WindowedLayers};
use crate::qwen2;

pub(crate) const ROW: Family = Family {
    name: "Llama",
    model_type: "llama",
    rotation: "llama",
    text: TextParts {
        bias: AttentionBias::IfStated,
        windows: WindowedLayers::None,
        ..qwen2::ROW.text
    },
    defaults,
    ..qwen2::ROW
};

fn defaults() -> Value {
    json!({
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-6
    })
}

//! Qwen3 with experts, such as Qwen3-30B-A3B.

use serde_json::{Value, json};

use crate::family::{ExpertParts, Family, RouterRule, TextParts};
use crate::qwen3;

pub(crate) const ROW: Family = Family {
    name: "Qwen3-MoE",
    model_type: "qwen3_moe",
    rotation: "qwen3",
    text: TextParts {
        experts: Some(ExpertParts {
            router: RouterRule::Softmax {
                is_normalised: false,
            },
            shared: None,
        }),
        ..qwen3::ROW.text
    },
    defaults,
    ..qwen3::ROW
};

fn defaults() -> Value {
    json!({
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6, "sliding_window": 4096, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768
    })
}

//! Qwen3.5 with experts, such as Qwen3.5-35B-A3B.

use serde_json::Value;

use crate::family::{ExpertParts, Family, RouterRule, SharedRule, TextParts};
use crate::qwen3_5;

pub(crate) const ROW: Family = Family {
    name: "Qwen3.5-MoE",
    model_type: "qwen3_5_moe",
    other_types: &[],
    text: TextParts {
        experts: Some(ExpertParts {
            router: RouterRule::Softmax {
                is_normalised: true,
            },
            shared: Some(SharedRule::Gated),
        }),
        ..qwen3_5::ROW.text
    },
    defaults,
    ..qwen3_5::ROW
};

fn defaults() -> Value {
    let mut defaults = (qwen3_5::ROW.defaults)();
    for (key, value) in [
        ("hidden_size", 2048),
        ("num_hidden_layers", 40),
        ("num_key_value_heads", 2),
        ("num_experts", 256),
        ("num_experts_per_tok", 8),
        ("moe_intermediate_size", 512),
        ("shared_expert_intermediate_size", 512),
    ] {
        defaults["text_config"][key] = value.into();
    }
    defaults
}

//! Qwen3-VL with experts, such as Qwen3-VL-30B-A3B.

use serde_json::Value;

use crate::family::{ExpertParts, Family, RouterRule, TextParts};
use crate::{qwen3_moe, qwen3_vl};

pub(crate) const ROW: Family = Family {
    name: "Qwen3-VL-MoE",
    model_type: "qwen3_vl_moe",
    other_types: &[],
    text: TextParts {
        experts: Some(ExpertParts {
            router: RouterRule::Softmax {
                is_normalised: true,
            },
            shared: None,
        }),
        ..qwen3_vl::ROW.text
    },
    defaults,
    ..qwen3_vl::ROW
};

fn defaults() -> Value {
    let mut defaults = (qwen3_vl::ROW.defaults)();
    let mut text = (qwen3_moe::ROW.defaults)();
    for (key, value) in [
        ("intermediate_size", 5632),
        ("num_attention_heads", 16),
        ("num_key_value_heads", 16),
        ("num_experts", 60),
        ("num_experts_per_tok", 4),
        ("moe_intermediate_size", 1408),
    ] {
        text[key] = value.into();
    }
    defaults["text_config"] = text;
    defaults
}

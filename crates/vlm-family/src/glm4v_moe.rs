//! GLM-4.5V: GLM-4.1V's tower, and a decoder with experts.

use serde_json::Value;

use crate::family::{
    AttentionBias, ExpertParts, Family, Names, Rename, RouterRule, SharedRule, TextParts,
};
use crate::{glm4v, qwen2_vl};

const PARTS: [Rename; 7] = glm4v::parts("mlp.shared_experts.", "mlp.shared_expert.0.");

pub(crate) const ROW: Family = Family {
    name: "GLM-4.5V",
    model_type: "glm4v_moe",
    other_types: &[],
    rotation: "glm4v_moe",
    names: Names {
        parts: &PARTS,
        ..glm4v::ROW.names
    },
    text: TextParts {
        bias: AttentionBias::OfInputsIfStated,
        windows: glm4v::ROW.text.windows,
        experts: Some(ExpertParts {
            router: RouterRule::Sigmoid,
            shared: Some(SharedRule::Plain),
        }),
        ..qwen2_vl::ROW.text
    },
    defaults,
    ..glm4v::ROW
};

fn defaults() -> Value {
    let mut defaults = (glm4v::ROW.defaults)();
    defaults["image_token_id"] = 151_363.into();
    defaults["video_token_id"] = 151_364.into();
    for (key, value) in [
        ("vocab_size", 151_424),
        ("intermediate_size", 10_944),
        ("num_hidden_layers", 46),
        ("num_attention_heads", 96),
        ("num_key_value_heads", 8),
        ("moe_intermediate_size", 1408),
        ("num_experts_per_tok", 8),
        ("n_routed_experts", 128),
        ("n_shared_experts", 1),
        ("n_group", 1),
        ("topk_group", 1),
        ("first_k_dense_replace", 1),
    ] {
        defaults["text_config"][key] = value.into();
    }
    for (key, value) in [("attention_bias", true), ("norm_topk_prob", true)] {
        defaults["text_config"][key] = value.into();
    }
    defaults["text_config"]["router_aux_loss_coef"] = 1e-4.into();
    defaults
}

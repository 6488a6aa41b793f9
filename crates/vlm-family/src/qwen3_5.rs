//! Qwen3.5, dense.

use serde_json::{Value, json};

use crate::family::{Family, Names, Rename, TextParts};
use crate::qwen3_vl;

pub(crate) const ROW: Family = Family {
    name: "Qwen3.5",
    model_type: "qwen3_5",
    other_types: &[],
    rotation: "qwen3_5",
    // The checkpoints have a layer for multi-token prediction, which transformers does not read
    // either.
    names: Names {
        parts: &[
            Rename::new(Rename::LAYERS, "linear_attn.A_log", "linear_attn.a_log"),
            Rename::new(Rename::LAYERS, "mlp.shared_expert.", "mlp.shared_expert.0."),
            Rename::new(
                Rename::LAYERS,
                "mlp.shared_expert_gate.",
                "mlp.shared_expert_gate.0.",
            ),
            Rename::new(Rename::BLOCKS, "mlp.linear_fc1.", "mlp.up_proj."),
            Rename::new(Rename::BLOCKS, "mlp.linear_fc2.", "mlp.down_proj."),
            Rename::new(Rename::MERGERS, "linear_fc1.", "mlp.up_proj."),
            Rename::new(Rename::MERGERS, "linear_fc2.", "mlp.down_proj."),
        ],
        unread: Some("mtp."),
        ..qwen3_vl::ROW.names
    },
    text: TextParts {
        has_states: true,
        ..qwen3_vl::ROW.text
    },
    defaults,
    ..qwen3_vl::ROW
};

fn defaults() -> Value {
    // A model with states ignores the blocks of DeepStack.
    let vision = (qwen3_vl::ROW.defaults)()["vision_config"].take();
    json!({
        "image_token_id": 248_056, "video_token_id": 248_057,
        "text_config": {
            "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288,
            "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "full_attention_interval": 4
        },
        "vision_config": vision
    })
}

//! Qwen3-VL.

use serde_json::{Value, json};

use crate::family::{
    AttentionBias, BoxForm, Family, HALF, MediaStyle, Names, ProcessorClass, Rename, ResizeRule,
    TextParts, TowerParts, VisionParts, WindowedLayers,
};
use crate::qwen2_vl;

pub(crate) const VISION: VisionParts = VisionParts {
    patch_size: 16,
    limits: [65_536, 16_777_216],
    colours: HALF,
    // Its limits apply to all frames together, as GLM's do.
    videos: ProcessorClass {
        names: &["Qwen3VLVideoProcessor"],
        rule: ResizeRule::Glm,
        limits: [131_072, 786_432],
        reads_pixels: false,
        patch_size: 16,
        colours: HALF,
    },
    boxes: BoxForm::Thousandths,
    style: MediaStyle::Qwen3,
    tower: TowerParts {
        patch_bias: true,
        ..qwen2_vl::VISION.tower
    },
    ..qwen2_vl::VISION
};

pub(crate) const ROW: Family = Family {
    name: "Qwen3-VL",
    model_type: "qwen3_vl",
    other_types: &[],
    rotation: "qwen3_vl",
    vision: Some(VISION),
    names: Names {
        visual: Some("model.visual."),
        text: "model.language_model.",
        parts: &[
            Rename::new(Rename::BLOCKS, "mlp.linear_fc1.", "mlp.up_proj."),
            Rename::new(Rename::BLOCKS, "mlp.linear_fc2.", "mlp.down_proj."),
            Rename::new(Rename::MERGERS, "linear_fc1.", "mlp.up_proj."),
            Rename::new(Rename::MERGERS, "linear_fc2.", "mlp.down_proj."),
        ],
        unread: None,
    },
    text: TextParts {
        bias: AttentionBias::IfStated,
        windows: WindowedLayers::None,
        qk_norm: true,
        ..qwen2_vl::ROW.text
    },
    defaults,
};

fn defaults() -> Value {
    json!({
        "image_token_id": 151_655, "video_token_id": 151_656,
        "text_config": {
            "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
            "rms_norm_eps": 1e-6
        },
        "vision_config": {
            "depth": 27, "hidden_size": 1152, "out_hidden_size": 3584, "intermediate_size": 4304,
            "num_heads": 16, "in_channels": 3, "patch_size": 16, "temporal_patch_size": 2,
            "spatial_merge_size": 2, "hidden_act": "gelu_pytorch_tanh",
            "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]
        }
    })
}

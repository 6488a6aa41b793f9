//! Qwen2-VL.

use serde_json::{Value, json};

use crate::family::{
    AttentionBias, BoxForm, CLIP, Family, MediaStyle, Names, ProcessorClass, Rename, ResizeRule,
    TextParts, TowerParts, VisionParts, WindowedLayers,
};

pub(crate) const VISION: VisionParts = VisionParts {
    patch_size: 14,
    limits: [3136, 12_845_056],
    colours: CLIP,
    pictures: ProcessorClass {
        names: &[
            "Qwen2VLImageProcessor",
            "Qwen2_5_VLImageProcessor",
            "Qwen3VLImageProcessor",
        ],
        rule: ResizeRule::Qwen,
        limits: [3136, 1_003_520],
        reads_pixels: true,
        patch_size: 14,
        colours: CLIP,
    },
    videos: ProcessorClass {
        names: &["Qwen2VLVideoProcessor", "Qwen2_5_VLVideoProcessor"],
        rule: ResizeRule::Qwen,
        limits: [100_352, 602_112],
        reads_pixels: true,
        patch_size: 14,
        colours: CLIP,
    },
    boxes: BoxForm::Marked,
    style: MediaStyle::Qwen2,
    tower: TowerParts {
        rms_norm: false,
        gated: false,
        patch_bias: false,
        bias: true,
        downsamples: false,
    },
};

pub(crate) const ROW: Family = Family {
    name: "Qwen2-VL",
    model_type: "qwen2_vl",
    other_types: &[],
    rotation: "qwen2_vl",
    vision: Some(VISION),
    names: Names {
        visual: Some("visual."),
        text: "model.",
        parts: &[
            Rename::new(Rename::BLOCKS, "mlp.fc1.", "mlp.up_proj."),
            Rename::new(Rename::BLOCKS, "mlp.fc2.", "mlp.down_proj."),
            Rename::new(Rename::MERGERS, "ln_q.", "norm."),
            Rename::new(Rename::MERGERS, "mlp.0.", "mlp.up_proj."),
            Rename::new(Rename::MERGERS, "mlp.2.", "mlp.down_proj."),
        ],
        unread: None,
    },
    text: TextParts {
        bias: AttentionBias::OfInputs,
        windows: WindowedLayers::Listed,
        qk_norm: false,
        output_norms: false,
        joined_gate: false,
        experts: None,
        has_states: false,
    },
    defaults,
};

fn defaults() -> Value {
    json!({
        "image_token_id": 151_655, "video_token_id": 151_656,
        "text_config": {
            "vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568,
            "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5
        },
        "vision_config": {
            "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "num_heads": 16,
            "in_channels": 3, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2,
            "hidden_act": "quick_gelu"
        }
    })
}

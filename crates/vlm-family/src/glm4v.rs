//! GLM-4.1V.

use serde_json::{Value, json};

use crate::family::{
    BoxForm, CLIP, Family, MediaStyle, Names, ProcessorClass, Rename, ResizeRule, TextParts,
    TowerParts, VisionParts, WindowedLayers,
};
use crate::{qwen2_vl, qwen3_vl};

const PICTURES: ProcessorClass = ProcessorClass {
    names: &["Glm4vImageProcessor", "Glm46VImageProcessor"],
    rule: ResizeRule::Glm,
    limits: [12_544, 11_760_000],
    reads_pixels: false,
    patch_size: 14,
    colours: CLIP,
};

const PARTS: [Rename; 7] = parts("mlp.gate_up_proj.", "mlp.up_proj.");

/// The names of the tower, and one of the layers.
pub(crate) const fn parts(checkpoint: &'static str, module: &'static str) -> [Rename; 7] {
    [
        Rename::new(Rename::LAYERS, checkpoint, module),
        Rename::new(
            Rename::TOWER,
            "embeddings.position_embedding.",
            "pos_embed.",
        ),
        Rename::new(Rename::TOWER, "post_layernorm.", "merger.post_layernorm."),
        Rename::new(Rename::TOWER, "downsample.", "merger.downsample."),
        Rename::new(Rename::MERGERS, "gate_proj.", "mlp.gate_proj."),
        Rename::new(Rename::MERGERS, "up_proj.", "mlp.up_proj."),
        Rename::new(Rename::MERGERS, "down_proj.", "mlp.down_proj."),
    ]
}

pub(crate) const ROW: Family = Family {
    name: "GLM-4.1V",
    model_type: "glm4v",
    other_types: &["glm46v"],
    rotation: "glm4v",
    vision: Some(VisionParts {
        limits: PICTURES.limits,
        pictures: PICTURES,
        videos: ProcessorClass {
            names: &["Glm4vVideoProcessor", "Glm46VVideoProcessor"],
            limits: [12_544, 47_040_000],
            ..PICTURES
        },
        boxes: BoxForm::Thousandths,
        style: MediaStyle::Glm,
        tower: TowerParts {
            rms_norm: true,
            gated: true,
            patch_bias: true,
            bias: false,
            downsamples: true,
        },
        ..qwen2_vl::VISION
    }),
    names: Names {
        parts: &PARTS,
        ..qwen3_vl::ROW.names
    },
    text: TextParts {
        output_norms: true,
        joined_gate: true,
        windows: WindowedLayers::None,
        ..qwen2_vl::ROW.text
    },
    defaults,
};

fn defaults() -> Value {
    json!({
        "image_token_id": 151_343, "video_token_id": 151_344,
        "image_start_token_id": 151_339, "image_end_token_id": 151_340,
        "video_start_token_id": 151_341, "video_end_token_id": 151_342,
        "text_config": {
            "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 13_696,
            "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5
        },
        "vision_config": {
            "depth": 24, "hidden_size": 1536, "out_hidden_size": 4096, "intermediate_size": 13_696,
            "num_heads": 12, "in_channels": 3, "patch_size": 14, "temporal_patch_size": 2,
            "spatial_merge_size": 2, "hidden_act": "silu", "image_size": 336, "rms_norm_eps": 1e-5,
            "attention_bias": false
        }
    })
}

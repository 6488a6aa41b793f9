//! Qwen2.5-VL.

use serde_json::{Value, json};

use crate::family::{BoxForm, Family, Names, Rename, TowerParts, VisionParts};
use crate::qwen2_vl;

pub(crate) const ROW: Family = Family {
    name: "Qwen2.5-VL",
    model_type: "qwen2_5_vl",
    rotation: "qwen2_5_vl",
    vision: Some(VisionParts {
        boxes: BoxForm::Pixels,
        tower: TowerParts {
            rms_norm: true,
            gated: true,
            ..qwen2_vl::VISION.tower
        },
        ..qwen2_vl::VISION
    }),
    names: Names {
        parts: &[
            Rename::new(Rename::MERGERS, "ln_q.", "norm."),
            Rename::new(Rename::MERGERS, "mlp.0.", "mlp.up_proj."),
            Rename::new(Rename::MERGERS, "mlp.2.", "mlp.down_proj."),
        ],
        ..qwen2_vl::ROW.names
    },
    defaults,
    ..qwen2_vl::ROW
};

fn defaults() -> Value {
    let text = (qwen2_vl::ROW.defaults)()["text_config"].take();
    json!({
        "image_token_id": 151_655, "video_token_id": 151_656,
        "text_config": text,
        "vision_config": {
            "depth": 32, "hidden_size": 3584, "out_hidden_size": 3584, "intermediate_size": 3420,
            "num_heads": 16, "in_channels": 3, "patch_size": 14, "temporal_patch_size": 2,
            "spatial_merge_size": 2, "hidden_act": "silu", "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31]
        }
    })
}

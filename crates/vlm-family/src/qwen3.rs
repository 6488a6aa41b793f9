//! Qwen3, dense.

use crate::family::{AttentionBias, Family, TextParts};
use crate::qwen2;

pub(crate) const ROW: Family = Family {
    name: "Qwen3",
    model_type: "qwen3",
    rotation: "qwen3",
    text: TextParts {
        bias: AttentionBias::IfStated,
        qk_norm: true,
        ..qwen2::ROW.text
    },
    ..qwen2::ROW
};

//! The shapes of which plans are compared with counts.

use std::fmt;

use burn::tensor::DType;
use vlm_models::ModelPart;

use crate::common::ALL;
use Trains::{Adapters, Whole};

/// The trained parts: adapters of a rank, or the weights.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Trains {
    Adapters(&'static [ModelPart], usize),
    Whole(&'static [ModelPart]),
}

/// A model, a recipe and data.
pub(crate) struct Row {
    pub(crate) family: &'static str,
    /// Channels, heads, key heads, inner channels, layers, vocabulary.
    pub(crate) text: [usize; 6],
    /// Heads of 16 channels, inner channels, blocks.
    pub(crate) tower: [usize; 3],
    pub(crate) dtype: DType,
    pub(crate) trains: Trains,
    pub(crate) recomputes: bool,
    /// Samples of a micro-batch, tokens of text of each, pictures in each and their sides in
    /// patches, and frames of the pictures.
    pub(crate) data: [usize; 5],
    /// Micro-batches of a step.
    pub(crate) micros: usize,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.recomputes { "" } else { ", one graph" };
        write!(
            f,
            "{} {:?} {:?} {:?} {:?}{how} {:?} x {}",
            self.family, self.text, self.tower, self.dtype, self.trains, self.data, self.micros
        )
    }
}

#[expect(clippy::too_many_arguments, reason = "a row of a table")]
const fn row(
    family: &'static str,
    text: [usize; 6],
    tower: [usize; 3],
    dtype: DType,
    trains: Trains,
    recomputes: bool,
    data: [usize; 5],
    micros: usize,
) -> Row {
    Row {
        family,
        text,
        tower,
        dtype,
        trains,
        recomputes,
        data,
        micros,
    }
}

const TOWER: &[ModelPart] = &[ModelPart::Tower];
const DECODER: &[ModelPart] = &[ModelPart::Decoder];
const BOTH: &[ModelPart] = &[ModelPart::Tower, ModelPart::Decoder];
const F32: DType = DType::F32;
const BF16: DType = DType::BF16;
const F16: DType = DType::F16;

/// Forty shapes.
#[rustfmt::skip]
pub(crate) const ROWS: &[Row] = &[
    row("qwen2_vl_tiny", [128, 4, 2, 256, 4, 1000], [4, 128, 3], F32, Adapters(&ALL, 4), true, [6, 90, 0, 0, 1], 2),
    row("qwen2_5_vl_tiny", [256, 8, 2, 512, 6, 2000], [8, 256, 4], BF16, Whole(TOWER), true, [4, 40, 1, 12, 1], 2),
    row("qwen3_vl_tiny", [64, 2, 1, 128, 24, 1000], [2, 64, 6], F16, Whole(TOWER), true, [3, 60, 2, 8, 1], 1),
    row("qwen3_5_tiny", [64, 4, 4, 96, 2, 50000], [6, 160, 3], BF16, Whole(DECODER), true, [2, 50, 1, 8, 4], 1),
    row("glm4v_tiny", [512, 8, 4, 1024, 2, 1000], [4, 128, 3], F16, Whole(TOWER), false, [4, 40, 1, 12, 1], 1),
    row("qwen2_vl_tiny", [320, 8, 2, 640, 3, 4000], [2, 64, 6], F32, Whole(&ALL), false, [4, 40, 1, 12, 1], 1),
    row("qwen2_5_vl_tiny", [64, 2, 2, 128, 2, 150000], [6, 160, 3], F16, Adapters(BOTH, 8), true, [3, 60, 2, 8, 1], 2),
    row("qwen3_vl_tiny", [128, 4, 2, 256, 4, 1000], [4, 128, 3], F32, Whole(&ALL), true, [2, 50, 1, 8, 4], 2),
    row("qwen3_5_tiny", [256, 8, 2, 512, 6, 2000], [8, 256, 4], BF16, Adapters(&ALL, 4), true, [1, 400, 0, 0, 1], 1),
    row("glm4v_tiny", [64, 2, 1, 128, 24, 1000], [2, 64, 6], F32, Adapters(&ALL, 4), true, [6, 90, 0, 0, 1], 1),
    row("qwen2_vl_tiny", [512, 8, 4, 1024, 2, 1000], [4, 128, 3], BF16, Adapters(DECODER, 16), false, [3, 60, 2, 8, 1], 1),
    row("qwen2_5_vl_tiny", [96, 4, 2, 192, 3, 20000], [8, 256, 4], F16, Whole(DECODER), false, [2, 50, 1, 8, 4], 2),
    row("qwen3_vl_tiny", [320, 8, 2, 640, 3, 4000], [2, 64, 6], BF16, Whole(&ALL), true, [1, 400, 0, 0, 1], 2),
    row("qwen3_5_tiny", [64, 2, 2, 128, 2, 150000], [6, 160, 3], F16, Whole(&ALL), true, [6, 90, 0, 0, 1], 1),
    row("glm4v_tiny", [128, 4, 2, 256, 4, 1000], [4, 128, 3], F32, Whole(&ALL), true, [4, 40, 1, 12, 1], 2),
    row("qwen2_vl_tiny", [64, 2, 1, 128, 24, 1000], [2, 64, 6], F16, Whole(&ALL), true, [2, 50, 1, 8, 4], 1),
    row("qwen2_5_vl_tiny", [64, 4, 4, 96, 2, 50000], [6, 160, 3], F32, Adapters(DECODER, 16), false, [1, 400, 0, 0, 1], 1),
    row("qwen3_vl_tiny", [512, 8, 4, 1024, 2, 1000], [4, 128, 3], BF16, Whole(&ALL), false, [6, 90, 0, 0, 1], 1),
    row("qwen3_5_tiny", [96, 4, 2, 192, 3, 20000], [8, 256, 4], F32, Whole(&ALL), true, [4, 40, 1, 12, 1], 1),
    row("glm4v_tiny", [320, 8, 2, 640, 3, 4000], [2, 64, 6], BF16, Adapters(BOTH, 8), true, [3, 60, 2, 8, 1], 2),
    row("qwen2_vl_tiny", [128, 4, 2, 256, 4, 1000], [4, 128, 3], F16, Whole(&ALL), true, [1, 400, 0, 0, 1], 1),
    row("qwen2_5_vl_tiny", [256, 8, 2, 512, 6, 2000], [8, 256, 4], BF16, Whole(&ALL), true, [6, 90, 0, 0, 1], 1),
    row("qwen3_vl_tiny", [64, 2, 1, 128, 24, 1000], [2, 64, 6], F16, Whole(DECODER), false, [4, 40, 1, 12, 1], 2),
    row("qwen3_5_tiny", [64, 4, 4, 96, 2, 50000], [6, 160, 3], F32, Adapters(DECODER, 16), false, [3, 60, 2, 8, 1], 2),
    row("glm4v_tiny", [512, 8, 4, 1024, 2, 1000], [4, 128, 3], F16, Whole(DECODER), true, [2, 50, 1, 8, 4], 1),
    row("qwen2_vl_tiny", [320, 8, 2, 640, 3, 4000], [2, 64, 6], F32, Whole(&ALL), true, [6, 90, 0, 0, 1], 2),
    row("qwen2_5_vl_tiny", [64, 2, 2, 128, 2, 150000], [6, 160, 3], BF16, Adapters(DECODER, 16), true, [4, 40, 1, 12, 1], 2),
    row("qwen3_vl_tiny", [128, 4, 2, 256, 4, 1000], [4, 128, 3], F32, Adapters(BOTH, 8), true, [3, 60, 2, 8, 1], 1),
    row("qwen3_5_tiny", [256, 8, 2, 512, 6, 2000], [8, 256, 4], BF16, Adapters(&ALL, 4), false, [2, 50, 1, 8, 4], 2),
    row("glm4v_tiny", [64, 2, 1, 128, 24, 1000], [2, 64, 6], F16, Adapters(DECODER, 16), false, [1, 400, 0, 0, 1], 2),
    row("qwen2_vl_tiny", [512, 8, 4, 1024, 2, 1000], [4, 128, 3], BF16, Adapters(BOTH, 8), true, [4, 40, 1, 12, 1], 2),
    row("qwen2_5_vl_tiny", [96, 4, 2, 192, 3, 20000], [8, 256, 4], F16, Whole(DECODER), true, [3, 60, 2, 8, 1], 2),
    row("qwen3_vl_tiny", [320, 8, 2, 640, 3, 4000], [2, 64, 6], F32, Whole(&ALL), true, [2, 50, 1, 8, 4], 2),
    row("qwen3_5_tiny", [64, 2, 2, 128, 2, 150000], [6, 160, 3], F16, Whole(DECODER), true, [1, 400, 0, 0, 1], 1),
    row("glm4v_tiny", [128, 4, 2, 256, 4, 1000], [4, 128, 3], F32, Adapters(DECODER, 16), false, [6, 90, 0, 0, 1], 2),
    row("qwen2_vl_tiny", [64, 2, 1, 128, 24, 1000], [2, 64, 6], BF16, Adapters(DECODER, 16), false, [3, 60, 2, 8, 1], 2),
    row("qwen2_5_vl_tiny", [64, 4, 4, 96, 2, 50000], [6, 160, 3], F32, Whole(DECODER), true, [2, 50, 1, 8, 4], 1),
    row("qwen3_vl_tiny", [512, 8, 4, 1024, 2, 1000], [4, 128, 3], BF16, Adapters(&ALL, 4), true, [1, 400, 0, 0, 1], 2),
    row("qwen3_5_tiny", [96, 4, 2, 192, 3, 20000], [8, 256, 4], F16, Adapters(BOTH, 8), true, [6, 90, 0, 0, 1], 2),
    row("glm4v_tiny", [320, 8, 2, 640, 3, 4000], [2, 64, 6], BF16, Adapters(&ALL, 4), true, [4, 40, 1, 12, 1], 1),
];

//! The prompt of a model folder.

use rope_core::position_ids::{Prompt, Rows};

use crate::golden::GoldenError;
use crate::golden::tensors::{Kind, Tensors, Values};

/// A prompt's lists.
pub(super) struct OwnedPrompt {
    input_ids: Vec<i64>,
    pub(super) rows: usize,
    /// Of each row.
    tokens: usize,
    pub(super) attended: Vec<bool>,
    types: Option<Vec<i64>>,
    pub(super) image_grids: Vec<[usize; 3]>,
    pub(super) video_grids: Vec<[usize; 3]>,
    seconds_per_grid: Option<Vec<f64>>,
}

impl OwnedPrompt {
    pub(super) fn read(inputs: &Tensors) -> Result<Self, GoldenError> {
        let optional = |name| inputs.find(name, Kind::Numbers);
        let grids = |name| -> Result<_, GoldenError> {
            let values = optional(name)?.map_or(&[][..], |tensor| &tensor.values);
            let grid = |grid: &[f64]| [0, 1, 2].map(|axis| grid[axis] as usize);
            Ok(values.chunks_exact(3).map(grid).collect())
        };
        let ids = inputs.get("input_ids")?;
        let [rows @ (1..), tokens @ (1..)] = ids.shape[..] else {
            return Err(ids.misshapen("[B,S], samples of one token or more"));
        };
        let attended = match optional("attention_mask")? {
            None => vec![true; rows * tokens],
            Some(mask) if mask.shape == ids.shape => {
                mask.values.iter().map(|x| *x == 1.0).collect()
            }
            Some(mask) => return Err(mask.misshapen(format!("[{rows},{tokens}], as input_ids"))),
        };
        Ok(Self {
            input_ids: ids.integers(),
            rows,
            tokens,
            attended,
            types: optional("mm_token_type_ids")?.map(Values::integers),
            image_grids: grids("image_grid_thw")?,
            video_grids: grids("video_grid_thw")?,
            seconds_per_grid: optional("second_per_grid_ts")?.map(|tensor| tensor.values.clone()),
        })
    }

    /// A predicate of a tensor's elements: true for those of tokens that are attended to.
    ///
    /// # Errors
    /// If it is not `[B,S,..]` (`seq_axis` 1) or `[B,H,S,..]` (2) of this prompt.
    pub(super) fn attended_elements(
        &self,
        tensor: &Values,
        seq_axis: usize,
    ) -> Result<impl Fn(usize) -> bool, GoldenError> {
        let (rows, tokens, shape) = (self.rows, self.tokens, &tensor.shape);
        if shape.first() != Some(&rows) || shape.get(seq_axis) != Some(&tokens) {
            let heads = if seq_axis == 2 { "H," } else { "" };
            return Err(tensor.misshapen(format!(
                "[{rows},{heads}{tokens},..], of the samples and tokens of input_ids"
            )));
        }
        let row: usize = shape[1..].iter().product();
        let inner: usize = shape[seq_axis + 1..].iter().product();
        Ok(move |i: usize| self.attended[i / row * tokens + i / inner % tokens])
    }

    pub(super) fn prompt(&self) -> Prompt<'_> {
        Prompt {
            input_ids: &self.input_ids,
            rows: Rows::Batch(self.rows),
            attention_mask: Some(&self.attended),
            mm_token_type_ids: self.types.as_deref(),
            image_grids: &self.image_grids,
            video_grids: &self.video_grids,
            seconds_per_grid: self.seconds_per_grid.as_deref(),
        }
    }
}

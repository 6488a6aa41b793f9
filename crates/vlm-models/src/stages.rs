//! Layers that mix tokens, where ranks divide these: stages with exchanges between them.

use burn::tensor::Tensor;

use crate::error::{Result, VlmError};
use crate::shares::TokenPart;
use crate::step::Common;
use crate::trace::Trace;

/// Tensors of a layer between two of its stages.
#[derive(Clone, Default)]
pub(crate) struct Stage {
    /// For each exchange that follows, the elements for each rank in turn; after it, those of each
    /// rank for this one.
    pub(crate) flats: Vec<Tensor<1>>,
    /// What stays on this rank.
    pub(crate) kept: Vec<Tensor<3>>,
}

impl Stage {
    pub(crate) fn of(kept: Vec<Tensor<3>>) -> Self {
        let flats = Vec::new();
        Self { flats, kept }
    }

    /// The output of the last stage.
    ///
    /// # Errors
    /// [`VlmError::Walk`] without one.
    pub(crate) fn output(mut self) -> Result<Tensor<3>> {
        let reason = || VlmError::Walk("the last stage of a layer has no output".to_owned());
        self.kept.pop().ok_or_else(reason)
    }
}

/// The part of a layer that mixes tokens, in stages, between which ranks exchange elements.
pub(crate) trait Mixing {
    /// For each stage but the last and each exchange after it, true for numbers at least in f32.
    fn exchanges(&self) -> &'static [&'static [bool]];

    /// The elements that go from a rank to another in each exchange after a stage.
    fn elements(&self, stage: usize, part: &TokenPart, ranks: [usize; 2]) -> Vec<usize>;

    /// Runs a stage. The first has the normalised input of this rank's tokens, `[rows, tokens,
    /// hidden_size]`, and the last returns the output for them.
    ///
    /// # Errors
    /// Those of the layer.
    fn run(
        &self,
        stage: usize,
        from: Stage,
        common: Common,
        part: &TokenPart,
        at: (usize, &mut Trace),
    ) -> Result<Stage>;
}

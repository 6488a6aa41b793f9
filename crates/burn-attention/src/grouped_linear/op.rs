//! The operation as backends implement it.

use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn_fused::{accumulator, expect};

use super::composed;
use crate::error::{AttentionError, Result, equal};

/// The groups of rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupedLinearOp {
    /// The rows of each group.
    pub rows: Vec<usize>,
}

impl GroupedLinearOp {
    /// Checks the shapes and types of the tensors, for every backend.
    ///
    /// # Errors
    /// Those of [`grouped_linear`](crate::grouped_linear).
    pub fn check<T: TensorMetadata>(&self, x: &T, weight: &T) -> Result<()> {
        accumulator(x.dtype())?;
        expect("weight", weight, x.dtype(), x)?;
        let [_, inputs] = x.shape().dims();
        let [groups, _, weight_inputs] = weight.shape().dims();
        equal(["x", "weight"], "inputs", inputs, weight_inputs)?;
        equal(["rows", "weight"], "groups", self.rows.len(), groups)?;
        self.check_rows(x)?;
        if inputs == 0 {
            return Err(AttentionError::NoChannels);
        }
        Ok(())
    }

    /// Checks that the groups divide the rows of a matrix.
    pub(super) fn check_rows<T: TensorMetadata>(&self, x: &T) -> Result<()> {
        let mut rows = self.rows.iter();
        let grouped = rows.try_fold(0_usize, |sum, rows| sum.checked_add(*rows));
        let grouped = grouped.unwrap_or(usize::MAX);
        equal(["x", "the groups"], "rows", x.shape()[0], grouped)
    }
}

operation! {
    /// Linear layers of groups of rows, as a backend implements them.
    ///
    /// Both methods have a default body of ordinary operations. The implementation for
    /// [`Autodiff`](burn::backend::Autodiff) adds the backward.
    ///
    /// # Shapes
    /// - x: `[rows, inputs]`; weight: `[groups, outputs, inputs]`; out: `[rows, outputs]`
    ///
    /// # Panics
    /// If shapes or types disagree; [`GroupedLinearOp::check`] reports the reason.
    pub trait GroupedLinearOps {
        /// Computes the output.
        fn grouped_linear_forward(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            op: GroupedLinearOp,
        ) -> FloatTensor<Self> {
            composed::forward::<Self>(x, weight, &op)
        }

        /// Computes the gradient of x from the output's gradient.
        fn grouped_linear_x_gradient(
            weight: FloatTensor<Self>,
            gradient: FloatTensor<Self>,
            op: GroupedLinearOp,
        ) -> FloatTensor<Self> {
            composed::x_gradient::<Self>(weight, gradient, &op)
        }

        /// Computes the gradient of the weight from the output's gradient.
        fn grouped_linear_weight_gradient(
            x: FloatTensor<Self>,
            gradient: FloatTensor<Self>,
            op: GroupedLinearOp,
        ) -> FloatTensor<Self> {
            composed::weight_gradient::<Self>(x, gradient, &op)
        }
    }
}

/// Ordinary operations.
#[cfg(feature = "cube")]
impl GroupedLinearOps for burn::backend::Cube {}

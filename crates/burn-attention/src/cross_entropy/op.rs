//! The operation as backends implement it.

use std::sync::Arc;

use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn_fused::{accumulator, expect};

use super::blocks;
use crate::error::{Result, equal};

/// The target of each row, and the size of blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CrossEntropyOp {
    /// Target and row, in the order of the targets: those of a block follow each other.
    pub(super) targets: Arc<[(usize, usize)]>,
    pub(super) vocabulary: usize,
    /// The logits of a block, unless they are the default number.
    pub(super) blocks: Option<usize>,
    /// True for the loss of each row instead of their mean.
    pub(super) by_row: bool,
}

impl CrossEntropyOp {
    pub(super) fn new(targets: &[usize], vocabulary: usize) -> Self {
        let rows = targets.iter().enumerate();
        let mut targets: Vec<_> = rows.map(|(row, &target)| (target, row)).collect();
        targets.sort_unstable();
        Self {
            targets: targets.into(),
            vocabulary,
            blocks: None,
            by_row: false,
        }
    }

    /// The number of rows.
    pub(super) fn rows(&self) -> usize {
        self.targets.len()
    }

    /// Checks the shapes and types of the tensors, for every backend.
    ///
    /// # Errors
    /// Those of [`CrossEntropy::try_forward`](crate::CrossEntropy::try_forward).
    pub fn check<T: TensorMetadata>(&self, hidden: &T, weight: &T) -> Result<()> {
        accumulator(hidden.dtype())?;
        expect("weight", weight, hidden.dtype(), hidden)?;
        let [rows, channels] = hidden.shape().dims();
        let [vocabulary, weight_channels] = weight.shape().dims();
        let targets = "the list of targets";
        equal(["hidden", targets], "rows", rows, self.rows())?;
        equal(["hidden", "weight"], "channels", channels, weight_channels)?;
        equal(
            ["weight", targets],
            "vocabulary",
            vocabulary,
            self.vocabulary,
        )
    }
}

operation! {
    /// Cross-entropy of a head, as a backend implements it.
    ///
    /// Both methods have a default body of ordinary operations on blocks of the vocabulary. The
    /// implementation for [`Autodiff`](burn::backend::Autodiff) adds the backward.
    ///
    /// # Shapes
    /// - hidden: `[rows, channels]`; weight: `[vocabulary, channels]`
    /// - loss, gradient: `[1]`, or `[rows]` by row; f32, or f64 for f64 tensors
    /// - log_sum_exp: `[rows]`, of the type of the loss
    ///
    /// # Panics
    /// If shapes or types disagree; [`CrossEntropyOp::check`] reports the reason.
    pub trait CrossEntropyOps {
        /// Computes the mean loss or that of each row, and the logarithm of the sum of the
        /// exponentials of each row of logits.
        fn cross_entropy_forward(
            hidden: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            op: CrossEntropyOp,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            blocks::forward::<Self>(hidden, weight, &op)
        }

        /// Computes the gradients of hidden and, if `weight_wanted`, of the weight, from the loss's
        /// gradient.
        fn cross_entropy_backward(
            hidden: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            log_sum_exp: FloatTensor<Self>,
            gradient: FloatTensor<Self>,
            weight_wanted: bool,
            op: CrossEntropyOp,
        ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
            let tensors = [hidden, weight, log_sum_exp, gradient];
            blocks::backward::<Self>(tensors, weight_wanted, &op)
        }
    }
}

/// Blocks of ordinary operations.
#[cfg(feature = "flex")]
impl CrossEntropyOps for burn::backend::Flex {}

/// Blocks of ordinary operations.
#[cfg(feature = "cube")]
impl CrossEntropyOps for burn::backend::Cube {}

/// Blocks of ordinary operations, each sent separately: their tensors stay on the device.
#[cfg(feature = "remote")]
impl CrossEntropyOps for burn::backend::Remote {}

//! Cross-entropy of a language model's head, without storing its logits.

mod backward;
mod blocks;
mod composed;
mod op;

use burn::backend::{Dispatch, TensorMetadata};
use burn::tensor::{Int, Tensor, TensorData};
use burn_fused::{Implementation, or_panic};

use crate::backends;
use crate::error::{AttentionError, Result, equal};

pub use op::{CrossEntropyOp, CrossEntropyOps};

/// Computes the mean of -log softmax(hidden weight^T)\[target\] over the rows that have a target,
/// in nats. Build it once per step.
///
/// The logits, rows x vocabulary, are the largest tensor of a language model's step. Here they
/// exist only in blocks of the vocabulary, forward and backward.
///
/// # Shapes
/// - hidden: `[rows, channels]`; weight: `[vocabulary, channels]`, of any strides: an embedding
///   table, or the transposed weight of a `Linear`
/// - out: `[1]`, in f32, or f64 for f64 tensors
///
/// # Numerics
/// Softmax and sums are computed in the output's type, for f16 the products too: each gradient is
/// rounded once. For bf16, products round the logits, and the gradient of the logits is rounded
/// before its products. A logit of -inf is a word of probability 0.
///
/// # Memory
/// The autodiff graph keeps hidden and weight, which others hold too, and one number per row. The
/// logits are computed twice.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_attention::{CrossEntropy, IGNORED};
///
/// let device = Device::flex().autodiff();
/// let random = |shape| Tensor::<2>::random(shape, Distribution::Default, &device).require_grad();
/// let (hidden, embeddings) = (random([3, 16]), random([1000, 16]));
/// let loss = CrossEntropy::new(&[7, IGNORED, 999], 1000)?;
/// let gradients = loss.forward(hidden, embeddings.clone()).backward();
/// assert_eq!(embeddings.grad(&gradients).unwrap().dims(), [1000, 16]);
/// # Ok::<(), burn_attention::AttentionError>(())
/// ```
#[derive(Clone, Debug)]
pub struct CrossEntropy {
    op: CrossEntropyOp,
    implementation: Implementation,
    /// Rows with and without a target.
    rows: usize,
    /// The rows that have a target, unless all have one.
    counted: Option<Vec<i64>>,
}

/// The target of a row that the loss ignores.
pub const IGNORED: i64 = -100;

impl CrossEntropy {
    /// Creates the loss of rows with these targets. Rows with the target [`IGNORED`] do not count.
    ///
    /// # Errors
    /// [`AttentionError::Target`] for a target beyond the vocabulary; [`AttentionError::NoTargets`]
    /// if none counts.
    pub fn new(targets: &[i64], vocabulary: usize) -> Result<Self> {
        let mut counted = Vec::new();
        let mut kept = Vec::new();
        for (row, &found) in targets.iter().enumerate() {
            if found == IGNORED {
                continue;
            }
            match usize::try_from(found) {
                Ok(target) if target < vocabulary => kept.push(target),
                _ => {
                    return Err(AttentionError::Target {
                        row,
                        found,
                        vocabulary,
                    });
                }
            }
            counted.push(row as i64);
        }
        if kept.is_empty() {
            let rows = targets.len();
            return Err(AttentionError::NoTargets { rows });
        }
        let all = kept.len() == targets.len();
        Ok(Self {
            op: CrossEntropyOp::new(&kept, vocabulary),
            implementation: Implementation::Fused,
            rows: targets.len(),
            counted: (!all).then_some(counted),
        })
    }

    /// Sets the implementation. No backend has kernels, so `Fused` means blocks.
    #[must_use]
    pub fn with_implementation(mut self, implementation: Implementation) -> Self {
        self.implementation = implementation;
        self
    }

    /// Sets the size of blocks to about `logits` logits, or to that number of weight elements if
    /// there are more channels than rows; `None` restores the default.
    #[must_use]
    pub fn with_blocks(mut self, logits: impl Into<Option<usize>>) -> Self {
        self.op.blocks = logits.into();
        self
    }

    /// Computes the loss.
    ///
    /// # Panics
    /// If the tensors do not fit; see [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward(&self, hidden: Tensor<2>, weight: Tensor<2>) -> Tensor<1> {
        or_panic(self.try_forward(hidden, weight))
    }

    /// Computes the loss of each row that has a target, `[counted rows]`, instead of their mean.
    ///
    /// # Errors
    /// Those of [`try_forward`](Self::try_forward).
    pub fn by_row(&self, hidden: Tensor<2>, weight: Tensor<2>) -> Result<Tensor<1>> {
        let mut loss = self.clone();
        loss.op.by_row = true;
        loss.try_forward(hidden, weight)
    }

    /// Computes the loss.
    ///
    /// # Errors
    /// [`Size`](AttentionError::Size), [`Op`](AttentionError::Op).
    pub fn try_forward(&self, hidden: Tensor<2>, weight: Tensor<2>) -> Result<Tensor<1>> {
        let [rows, _] = hidden.dims();
        equal(["hidden", "the list of targets"], "rows", rows, self.rows)?;
        let hidden = match &self.counted {
            Some(counted) => {
                let data = TensorData::new(counted.clone(), [counted.len()]);
                let counted = Tensor::<1, Int>::from_data(data, &hidden.device());
                hidden.select(0, counted)
            }
            None => hidden,
        };
        let op = self.op.clone();
        let (hidden, weight) = (hidden.into_dispatch(), weight.into_dispatch());
        op.check(&hidden, &weight)?;
        let loss = if self.implementation == Implementation::Composed {
            composed::cross_entropy::<Dispatch>(hidden, weight, &op)
        } else if backends::reaches(&hidden.device()) {
            Dispatch::cross_entropy_forward(hidden, weight, op).0
        } else {
            blocks::forward::<Dispatch>(hidden, weight, &op).0
        };
        Ok(Tensor::from_dispatch(loss))
    }
}

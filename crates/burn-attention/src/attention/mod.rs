//! Attention as one operation.

mod backward;
pub mod blocks;
mod composed;
#[cfg(feature = "flex")]
pub(crate) mod flex;
mod mask;
mod op;
#[cfg(feature = "remote")]
pub(crate) mod wire;

use burn::backend::{Dispatch, TensorMetadata};
use burn::tensor::{Shape, Tensor};
use burn_fused::primitive::zeros_from;
use burn_fused::{Implementation, or_panic};

use crate::backends;
use crate::error::Result;

use op::Sizes;

pub use mask::{AttentionMask, MaskRules, Pattern, Window};
pub use op::{AttentionGradients, AttentionOp, AttentionOps, Bias, Kept};

/// Computes softmax(scale * q k^T + bias) v over the keys that each query sees. Build it once per
/// step.
///
/// See the [example](crate#example). A query that sees no key has the output 0, and neither
/// receives nor contributes a gradient.
///
/// # Shapes
/// - q: `[batch, heads, queries, head_dim]`; k: `[batch, kv_heads, keys, head_dim]`; v: `[batch,
///   kv_heads, keys, value_dim]`, of any strides; `heads` is a multiple of `kv_heads`, and head `h`
///   of q reads head `h / (heads / kv_heads)` of k and v
/// - bias: `[batch, heads, queries, keys]`, any of them 1
/// - out: `[batch, heads, queries, value_dim]`
///
/// # Numerics
/// For every [`Implementation`]:
/// - 16-bit tensors are computed in f32, products included, and each result is rounded once; f64 is
///   computed in f64. The bias has the computation type.
/// - A mask hides keys regardless of the bias. A score below -1e20 counts as hidden too. A score of
///   +inf or NaN makes its query's output NaN.
/// - Keys that no query of a sample sees, such as padding, and queries that see no key may hold
///   anything, even NaN: it reaches no result. A key that some queries see must be finite for the
///   others too, because 0 times NaN is NaN.
/// - Gradients are correct for scores of any size.
/// - The same tensors give the same bits in every run.
///
/// # Memory
/// The autodiff graph keeps q, k, v, the bias, the output and two numbers per row of scores. Scores
/// exist only in blocks, forward and backward.
#[derive(Clone, Debug)]
pub struct Attention {
    mask: AttentionMask,
    scale: Option<f64>,
    bias: Option<Tensor<4>>,
    implementation: Implementation,
    blocks: Option<usize>,
}

impl Attention {
    /// Creates attention over the keys that a mask shows, with the scale 1 / sqrt(head_dim).
    pub fn new(mask: AttentionMask) -> Self {
        Self {
            mask,
            scale: None,
            bias: None,
            implementation: Implementation::Fused,
            blocks: None,
        }
    }

    /// Sets the scale, the factor of q k^T.
    #[must_use]
    pub fn with_scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Sets the bias of the scores, or none. A layer with a separate bias clones the step's
    /// attention, which shares the mask.
    #[must_use]
    pub fn with_bias(mut self, bias: impl Into<Option<Tensor<4>>>) -> Self {
        self.bias = bias.into();
        self
    }

    /// Sets the implementation.
    #[must_use]
    pub fn with_implementation(mut self, implementation: Implementation) -> Self {
        self.implementation = implementation;
        self
    }

    /// Computes attention in blocks of ordinary operations instead of kernels, each of about
    /// `scores` scores over all samples and heads; with `None`, only if there are no kernels.
    #[must_use]
    pub fn with_blocks(mut self, scores: impl Into<Option<usize>>) -> Self {
        self.blocks = scores.into();
        self
    }

    /// Returns the number of queries.
    pub fn queries(&self) -> usize {
        self.mask.queries()
    }

    /// Computes the attention.
    ///
    /// # Panics
    /// If the tensors do not fit; see [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
        or_panic(self.try_forward(q, k, v))
    }

    /// Computes the attention.
    ///
    /// # Errors
    /// [`Size`](crate::AttentionError::Size), [`HeadGroups`](crate::AttentionError::HeadGroups),
    /// [`NoChannels`](crate::AttentionError::NoChannels), [`Op`](crate::AttentionError::Op),
    /// [`BiasShape`](crate::AttentionError::BiasShape), [`Scale`](crate::AttentionError::Scale).
    pub fn try_forward(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Result<Tensor<4>> {
        let [_, _, _, head_dim] = q.dims();
        let op = AttentionOp {
            mask: self.mask.clone(),
            scale: self.scale.unwrap_or(1.0 / (head_dim as f64).sqrt()),
            blocks: self.blocks,
        };
        let (q, k, v) = (q.into_dispatch(), k.into_dispatch(), v.into_dispatch());
        let bias = self.bias.clone().map(Tensor::into_dispatch);
        op.check(&q, &k, &v, bias.as_ref())?;
        let sizes = Sizes::of(&q, &k, &v);
        if sizes.are_empty() {
            let shape = [sizes.batch, sizes.heads, sizes.queries, sizes.value_dim];
            let dtype = q.dtype().into();
            let inputs = [q, k, v].into_iter().chain(bias).collect();
            let zeros = zeros_from::<Dispatch>(Shape::new(shape), dtype, inputs);
            return Ok(Tensor::from_dispatch(zeros));
        }
        let out = if self.implementation == Implementation::Composed {
            composed::attention::<Dispatch>(q, k, v, bias, &op)
        } else if backends::reaches(&q.device()) {
            Dispatch::attention_forward(q, k, v, bias.into(), op).0
        } else {
            blocks::forward::<Dispatch>(q, k, v, bias, &op).0
        };
        Ok(Tensor::from_dispatch(out))
    }
}

//! The operation as backends implement it.

use burn::backend::{Backend, ExtensionType, TensorMetadata, tensor::FloatTensor};
use burn_fused::{accumulator, expect, rounded};

use super::blocks;
use super::mask::AttentionMask;
use crate::error::{AttentionError, Result, equal};

/// One attention: its mask, its scale, and whether kernels compute it.
#[derive(Clone, Debug)]
pub struct AttentionOp {
    /// The keys that each query sees.
    pub mask: AttentionMask,
    /// The scores are `scale * q k^T + bias`.
    pub scale: f64,
    /// The scores per block over all samples and heads, to compute blocks of ordinary operations
    /// instead of kernels; a few queries may have more.
    pub blocks: Option<usize>,
}

/// A bias, or none.
#[derive(Clone, Debug, ExtensionType)]
pub enum Bias<B: Backend> {
    /// No bias.
    Absent,
    /// Added to the scores.
    Added(FloatTensor<B>),
}

impl<B: Backend> Bias<B> {
    pub(crate) fn into_option(self) -> Option<FloatTensor<B>> {
        match self {
            Self::Absent => None,
            Self::Added(bias) => Some(bias),
        }
    }
}

impl<B: Backend> From<Option<FloatTensor<B>>> for Bias<B> {
    fn from(bias: Option<FloatTensor<B>>) -> Self {
        bias.map_or(Self::Absent, Self::Added)
    }
}

/// The gradients of q, k, v and, if it is wanted, of the bias.
pub type AttentionGradients<B> = (
    FloatTensor<B>,
    FloatTensor<B>,
    FloatTensor<B>,
    Option<FloatTensor<B>>,
);

/// The state of an attention's node: the tensors of the forward, and its results.
#[derive(Clone, Debug, ExtensionType)]
pub struct Kept<B: Backend> {
    /// The queries.
    pub q: FloatTensor<B>,
    /// The keys.
    pub k: FloatTensor<B>,
    /// The values.
    pub v: FloatTensor<B>,
    /// The bias.
    #[extension_type]
    pub bias: Bias<B>,
    /// The output.
    pub out: FloatTensor<B>,
    /// The largest score of each row, and the sum of e^(score - largest) over the row. One number,
    /// the logarithm of the sum of all e^score, would lose the sum beside a large score.
    pub softmax: FloatTensor<B>,
}

/// Sizes of an attention, taken from tensors that [`AttentionOp::check`] accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    pub(crate) head_dim: usize,
    /// Channels of a head of v.
    pub(crate) value_dim: usize,
}

impl Sizes {
    pub(crate) fn of<T: TensorMetadata>(q: &T, k: &T, v: &T) -> Self {
        let [batch, heads, queries, head_dim] = q.shape().dims();
        let [_, kv_heads, keys, _] = k.shape().dims();
        let [_, _, _, value_dim] = v.shape().dims();
        Self {
            batch,
            heads,
            kv_heads,
            queries,
            keys,
            head_dim,
            value_dim,
        }
    }

    /// True if there is no query or no key: the output is zeros. A product of sizes could overflow,
    /// for a tensor without elements may have any.
    pub(crate) fn are_empty(&self) -> bool {
        [self.batch, self.heads, self.queries, self.keys].contains(&0)
    }

    /// Query heads for each key head.
    pub(crate) fn group(&self) -> usize {
        self.heads / self.kv_heads.max(1)
    }
}

impl AttentionOp {
    /// Checks the shapes and types of an attention's tensors, for every backend.
    ///
    /// # Errors
    /// Those of [`Attention::try_forward`](crate::Attention::try_forward).
    pub fn check<T: TensorMetadata>(&self, q: &T, k: &T, v: &T, bias: Option<&T>) -> Result<()> {
        let expected = q.dtype();
        let accumulator = accumulator(expected)?;
        expect("k", k, expected, q)?;
        expect("v", v, expected, q)?;
        if !rounded(self.scale, accumulator).is_finite() {
            return Err(AttentionError::Scale { found: self.scale });
        }
        let sizes = Sizes::of(q, k, v);
        let [k_batch, _, _, k_dim] = k.shape().dims();
        let [v_batch, v_heads, v_keys, _] = v.shape().dims();
        equal(["q", "k"], "batch", sizes.batch, k_batch)?;
        equal(["q", "k"], "head_dim", sizes.head_dim, k_dim)?;
        if k_dim == 0 {
            return Err(AttentionError::NoChannels);
        }
        equal(["k", "v"], "batch", k_batch, v_batch)?;
        equal(["k", "v"], "heads", sizes.kv_heads, v_heads)?;
        equal(["k", "v"], "tokens", sizes.keys, v_keys)?;
        let (heads, kv_heads) = (sizes.heads, sizes.kv_heads);
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(AttentionError::HeadGroups { heads, kv_heads });
        }
        let (queries, keys) = (self.mask.queries(), self.mask.keys());
        equal(["q", "the mask"], "tokens", sizes.queries, queries)?;
        equal(["k", "the mask"], "tokens", sizes.keys, keys)?;
        if let Some(flags) = self.mask.padding() {
            let samples = flags.len() / sizes.keys.max(1);
            equal(["q", "the mask's padding"], "batch", sizes.batch, samples)?;
        }
        if let Some(bias) = bias {
            expect("the bias", bias, accumulator.into(), q)?;
            let found = bias.shape().dims();
            let expected = [sizes.batch, heads, sizes.queries, sizes.keys];
            let fits = |(found, expected): (&usize, &usize)| *found == 1 || found == expected;
            if !found.iter().zip(&expected).all(fits) {
                return Err(AttentionError::BiasShape { found, expected });
            }
        }
        Ok(())
    }
}

operation! {
    /// Attention, as a backend implements it.
    ///
    /// Both methods have a default body of ordinary operations on blocks of queries; a backend with
    /// kernels overrides them. The implementation for [`Autodiff`](burn::backend::Autodiff) adds
    /// the backward.
    ///
    /// # Shapes
    /// - q: `[batch, heads, queries, head_dim]`; k: `[batch, kv_heads, keys, head_dim]`; v:
    ///   `[batch, kv_heads, keys, value_dim]`, where `heads` is a multiple of `kv_heads`
    /// - bias: `[batch, heads, queries, keys]`, any of them 1; f32, or f64 for f64 tensors
    /// - out: `[batch, heads, queries, value_dim]`
    /// - softmax: `[batch, heads, queries, 2]`, of the type of the bias
    ///
    /// # Panics
    /// If shapes or types disagree. [`AttentionOp::check`] reports the reason;
    /// [`Attention`](crate::Attention) calls it before a backend.
    pub trait AttentionOps {
        /// Computes the output, and for each row of scores the largest and the sum of e^(score -
        /// largest).
        fn attention_forward(
            q: FloatTensor<Self>,
            k: FloatTensor<Self>,
            v: FloatTensor<Self>,
            #[extension_type] bias: Bias<Self>,
            op: AttentionOp,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            blocks::forward::<Self>(q, k, v, bias.into_option(), &op)
        }

        /// Computes the gradients of q, k, v and, if there is a bias and `bias_wanted`, of the
        /// bias, from the output's gradient.
        #[allow(
            clippy::type_complexity,
            reason = "the macro reads tuples of tensors alone"
        )]
        fn attention_backward(
            #[extension_type] kept: Kept<Self>,
            gradient: FloatTensor<Self>,
            bias_wanted: bool,
            op: AttentionOp,
        ) -> (
            FloatTensor<Self>,
            FloatTensor<Self>,
            FloatTensor<Self>,
            Option<FloatTensor<Self>>,
        ) {
            blocks::backward::<Self>(kept, gradient, bias_wanted, &op)
        }
    }
}

/// Blocks of ordinary operations.
#[cfg(feature = "cube")]
impl AttentionOps for burn::backend::Cube {}

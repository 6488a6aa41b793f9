//! The operation as backends implement it.

use burn::backend::{Backend, ExtensionType, TensorMetadata, tensor::FloatTensor};
use burn_fused::{accumulator, expect};

use super::{chunks, gradients};
use crate::error::{AttentionError, Result, equal};
use crate::sequences::Sequences;

/// One pass of the gated delta rule: its sequences, and options of its computation.
#[derive(Clone, Debug, PartialEq)]
pub struct GatedDeltaOp {
    /// The division of tokens into sequences.
    pub sequences: Sequences,
    /// True to return the states before all chunks, which the backward needs; false to return only
    /// the last state.
    pub keeps_states: bool,
    /// The elements of a block's tensors, or `None` for the default; a chunk may have more.
    pub blocks: Option<usize>,
}

/// The tensors that a gated delta rule's node keeps: those of the forward, and its states.
#[derive(Clone, Debug, ExtensionType)]
pub struct KeptStates<B: Backend> {
    /// The queries before normalisation.
    pub q: FloatTensor<B>,
    /// The keys before normalisation.
    pub k: FloatTensor<B>,
    /// The values.
    pub v: FloatTensor<B>,
    /// The logarithms of the decays.
    pub g: FloatTensor<B>,
    /// The rates of writing.
    pub beta: FloatTensor<B>,
    /// The state before each chunk, and after the last.
    pub states: FloatTensor<B>,
}

/// Sizes, taken from tensors that [`GatedDeltaOp::check`] accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) tokens: usize,
    /// Heads of q and k.
    pub(super) key_heads: usize,
    /// Heads of v.
    pub(super) heads: usize,
    pub(super) key_dim: usize,
    pub(super) value_dim: usize,
}

impl Sizes {
    pub(super) fn of<T: TensorMetadata>(q: &T, v: &T) -> Self {
        let [batch, tokens, key_heads, key_dim] = q.shape().dims();
        let [_, _, heads, value_dim] = v.shape().dims();
        Self {
            batch,
            tokens,
            key_heads,
            heads,
            key_dim,
            value_dim,
        }
    }

    /// True if the output has no element.
    pub(super) fn are_empty(&self) -> bool {
        [self.batch, self.tokens, self.heads, self.value_dim].contains(&0)
    }

    /// Heads of v for each head of k.
    pub(super) fn group(&self) -> usize {
        self.heads / self.key_heads.max(1)
    }

    /// The states that there are at a time.
    pub(super) fn matrices(&self) -> usize {
        self.batch * self.heads
    }
}

impl GatedDeltaOp {
    /// Checks the shapes and types of the tensors, for every backend.
    ///
    /// # Errors
    /// Those of [`GatedDelta::try_forward`](crate::GatedDelta::try_forward).
    pub fn check<T: TensorMetadata>(&self, [q, k, v, g, beta]: [&T; 5]) -> Result<()> {
        let wide = accumulator(q.dtype())?.into();
        expect("k", k, q.dtype(), q)?;
        expect("v", v, q.dtype(), q)?;
        expect("g", g, wide, q)?;
        expect("beta", beta, wide, q)?;
        let shapes = |left, right, left_shape: &[usize], right_shape: &[usize]| {
            if left_shape == right_shape {
                return Ok(());
            }
            Err(AttentionError::Shapes {
                left,
                right,
                left_shape: left_shape.to_vec(),
                right_shape: right_shape.to_vec(),
            })
        };
        shapes("q", "k", &q.shape(), &k.shape())?;
        shapes("g", "beta", &g.shape(), &beta.shape())?;
        shapes("v but its channels", "g", &v.shape()[..3], &g.shape())?;
        let sizes = Sizes::of(q, v);
        let [batch, tokens, ..] = v.shape().dims::<4>();
        equal(["q", "v"], "batch", sizes.batch, batch)?;
        equal(["q", "v"], "tokens", sizes.tokens, tokens)?;
        equal(
            ["q", "the sequences"],
            "tokens",
            tokens,
            self.sequences.tokens(),
        )?;
        if sizes.key_dim == 0 {
            return Err(AttentionError::NoChannels);
        }
        let (heads, key_heads) = (sizes.heads, sizes.key_heads);
        if key_heads == 0 || !heads.is_multiple_of(key_heads) {
            return Err(AttentionError::ValueHeads { heads, key_heads });
        }
        Ok(())
    }
}

operation! {
    /// The gated delta rule, as a backend implements it.
    ///
    /// All methods have a default body of ordinary operations, on chunks of tokens. The
    /// implementation for [`Autodiff`](burn::backend::Autodiff) adds the backward.
    ///
    /// # Shapes
    /// - q, k: `[batch, tokens, key_heads, key_dim]`; v, out: `[batch, tokens, heads, value_dim]`;
    ///   g, beta: `[batch, tokens, heads]`, f32, or f64 for f64 tensors
    /// - states: `[chunks + 1, batch * heads, key_dim, value_dim]`, or only the last, in the type
    ///   of g
    ///
    /// # Panics
    /// If shapes or types disagree; [`GatedDeltaOp::check`] reports the reason.
    pub trait GatedDeltaOps {
        /// Computes the output and the states.
        fn gated_delta_forward(
            q: FloatTensor<Self>,
            k: FloatTensor<Self>,
            v: FloatTensor<Self>,
            g: FloatTensor<Self>,
            beta: FloatTensor<Self>,
            op: GatedDeltaOp,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            chunks::forward::<Self>([q, k, v, g, beta], &op)
        }

        /// Computes the output of one token, and the state after it, `[1, batch * heads, key_dim,
        /// value_dim]`, from that before it, `[batch, heads, key_dim, value_dim]`.
        fn gated_delta_step(
            q: FloatTensor<Self>,
            k: FloatTensor<Self>,
            v: FloatTensor<Self>,
            g: FloatTensor<Self>,
            beta: FloatTensor<Self>,
            state: FloatTensor<Self>,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            chunks::step::<Self>([q, k, v, g, beta], state)
        }

        /// Computes the gradients of q, k, v, g and beta from the output's gradient.
        #[allow(
            clippy::type_complexity,
            reason = "the macro reads tuples of tensors alone"
        )]
        fn gated_delta_backward(
            #[extension_type] kept: KeptStates<Self>,
            gradient: FloatTensor<Self>,
            op: GatedDeltaOp,
        ) -> (
            FloatTensor<Self>,
            FloatTensor<Self>,
            FloatTensor<Self>,
            FloatTensor<Self>,
            FloatTensor<Self>,
        ) {
            let [q, k, v, g, beta] = gradients::backward::<Self>(kept, gradient, &op);
            (q, k, v, g, beta)
        }
    }
}

/// Chunks of ordinary operations.
#[cfg(feature = "cube")]
impl GatedDeltaOps for burn::backend::Cube {}

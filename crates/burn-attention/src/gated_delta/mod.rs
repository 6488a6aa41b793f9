//! The gated delta rule as one operation.

mod backward;
mod chunks;
#[cfg(feature = "flex")]
mod flex;
mod gradients;
mod op;
#[cfg(feature = "remote")]
pub(crate) mod wire;

use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Dispatch, TensorMetadata};
use burn::tensor::{DType, Tensor};
use burn_fused::primitive::zeros_from;
use burn_fused::{accumulator, expect, or_panic};

use crate::backends;
use crate::error::{AttentionError, Result};
use crate::sequences::Sequences;

use op::Sizes;

pub use op::{GatedDeltaOp, GatedDeltaOps, KeptStates};

/// The operation on chunks of tokens, composed of ordinary tensor operations.
pub mod composed {
    pub use super::NORM_EPSILON;
    pub use super::chunks::{blocks_of, forward};
    pub use super::gradients::backward;
}

/// Tokens of a chunk, unless there are fewer.
const CHUNK: usize = 64;

/// The tokens of a chunk of a pass.
fn chunk_tokens(tokens: usize) -> usize {
    tokens.next_power_of_two().min(CHUNK)
}

/// Added to the sum of the squares of q and of k before its root.
pub const NORM_EPSILON: f64 = 1e-6;

/// Computes linear attention with the gated delta rule: as matrix products over chunks of 64 tokens,
/// and forward on the CPU backend token by token. Build it once per step.
///
/// The state of each head is a matrix, which starts at 0 in each sequence. A token first decays the
/// state, then writes the difference between its value and the value that its key reads, and
/// finally reads with its query:
///
/// S <- e^g S; S <- S + k (beta (v - S^T k))^T; out = S^T q / sqrt(key_dim)
///
/// with q and k divided by sqrt(sum of squares + 1e-6).
///
/// # Shapes
/// - q, k: `[batch, tokens, key_heads, key_dim]`; v, out: `[batch, tokens, heads, value_dim]`;
///   `heads` is a multiple of `key_heads`, and head `h` of v reads head `h / (heads / key_heads)`
///   of q and k
/// - g (at most 0) and beta: `[batch, tokens, heads]`
///
/// # Numerics
/// g and beta are f32. 16-bit q, k and v are computed in f32, and each result is rounded once; f64
/// is computed in f64. On the CPU backend, a token's bits depend on the tokens before it in its
/// sequence alone, and [`gated_delta_step`] has them too.
///
/// # Memory
/// The autodiff graph keeps q, k, v, g, beta and one state per chunk. Intermediates of the chunks
/// exist only in blocks, forward and backward.
///
/// # Source
/// Yang, Kautz, Hatamizadeh: Gated Delta Networks: Improving Mamba2 with Delta Rule, ICLR 2025
///
/// # Example
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_attention::{GatedDelta, Sequences};
///
/// // Two sequences of 3 and 5 tokens, packed.
/// let rule = GatedDelta::new(Sequences::packed(&[0, 3, 8], 8)?);
/// let device = Device::flex().autodiff();
/// let random = |heads| {
///     Tensor::<4>::random([1, 8, heads, 16], Distribution::Default, &device).require_grad()
/// };
/// let (q, k, v) = (random(2), random(2), random(4));
/// let g = Tensor::<3>::full([1, 8, 4], -0.1, &device);
/// let beta = Tensor::<3>::full([1, 8, 4], 0.5, &device);
/// let (out, state) = rule.forward(q, k.clone(), v, g, beta);
/// assert_eq!((out.dims(), state.dims()), ([1, 8, 4, 16], [1, 4, 16, 16]));
/// let gradients = out.sum().backward();
/// assert_eq!(k.grad(&gradients).unwrap().dims(), [1, 8, 2, 16]);
/// # Ok::<(), burn_attention::AttentionError>(())
/// ```
#[derive(Clone, Debug)]
pub struct GatedDelta {
    sequences: Sequences,
    blocks: Option<usize>,
}

impl GatedDelta {
    /// Creates the rule over these sequences.
    pub fn new(sequences: Sequences) -> Self {
        Self {
            sequences,
            blocks: None,
        }
    }

    /// Sets the size of blocks to about `elements` elements of a tensor; `None` restores the
    /// default.
    #[must_use]
    pub fn with_blocks(mut self, elements: impl Into<Option<usize>>) -> Self {
        self.blocks = elements.into();
        self
    }

    /// Computes the output, and the state after the last token, `[batch, heads, key_dim,
    /// value_dim]`, in the type of g. No gradient flows through the state.
    ///
    /// # Panics
    /// If the tensors do not fit; see [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward(
        &self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        g: Tensor<3>,
        beta: Tensor<3>,
    ) -> (Tensor<4>, Tensor<4>) {
        or_panic(self.try_forward(q, k, v, g, beta))
    }

    /// Computes the same as [`forward`](Self::forward).
    ///
    /// # Errors
    /// [`Shapes`](AttentionError::Shapes), [`Size`](AttentionError::Size),
    /// [`ValueHeads`](AttentionError::ValueHeads), [`NoChannels`](AttentionError::NoChannels),
    /// [`Op`](AttentionError::Op).
    pub fn try_forward(
        &self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        g: Tensor<3>,
        beta: Tensor<3>,
    ) -> Result<(Tensor<4>, Tensor<4>)> {
        let tracked = [&q, &k, &v].into_iter().any(Tensor::is_tracked);
        let op = GatedDeltaOp {
            sequences: self.sequences.clone(),
            keeps_states: tracked || g.is_tracked() || beta.is_tracked(),
            blocks: self.blocks,
        };
        let (device, wide) = (q.device(), accumulator(q.dtype())?);
        let [q, k, v] = [q, k, v].map(Tensor::into_dispatch);
        let [g, beta] = [g, beta].map(Tensor::into_dispatch);
        op.check([&q, &k, &v, &g, &beta])?;
        let sizes = Sizes::of(&q, &v);
        let state = [sizes.batch, sizes.heads, sizes.key_dim, sizes.value_dim];
        if sizes.are_empty() {
            let (shape, dtype) = (v.shape(), q.dtype().into());
            let zeros = zeros_from::<Dispatch>(shape, dtype, vec![q, k, v, g, beta]);
            return Ok((
                Tensor::from_dispatch(zeros),
                Tensor::zeros(state, (&device, DType::from(wide))),
            ));
        }
        let (out, states) = if backends::reaches(&q.device()) {
            Dispatch::gated_delta_forward(q, k, v, g, beta, op)
        } else {
            chunks::forward::<Dispatch>([q, k, v, g, beta], &op)
        };
        let states = Tensor::<4>::from_dispatch(states);
        let [count, ..] = states.dims();
        let last = states.narrow(0, count - 1, 1).reshape(state);
        Ok((Tensor::from_dispatch(out), last))
    }
}

/// Applies the rule to one token, from the state before it. Returns the output, `[batch, heads,
/// value_dim]`, and the state after it.
///
/// # Shapes
/// - q, k: `[batch, key_heads, key_dim]`; v: `[batch, heads, value_dim]`; g, beta: `[batch,
///   heads]`; state: `[batch, heads, key_dim, value_dim]`, in the type of g
///
/// # Errors
/// Those of [`GatedDelta::try_forward`].
pub fn gated_delta_step(
    [q, k, v]: [Tensor<3>; 3],
    [g, beta]: [Tensor<2>; 2],
    state: Tensor<4>,
) -> Result<(Tensor<3>, Tensor<4>)> {
    let (dims, wide) = (v.dims(), accumulator(q.dtype())?);
    let op = GatedDeltaOp {
        sequences: Sequences::whole(1),
        keeps_states: false,
        blocks: None,
    };
    let [q, k, v_token] = [&q, &k, &v].map(with_token);
    let [g, beta] = [&g, &beta].map(with_token);
    op.check([&q, &k, &v_token, &g, &beta])?;
    let sizes = Sizes::of(&q, &v_token);
    let state = state.into_dispatch();
    expect("the state", &state, wide.into(), &q)?;
    let expected = [sizes.batch, sizes.heads, sizes.key_dim, sizes.value_dim];
    if state.shape().dims() != expected {
        return Err(AttentionError::Shapes {
            left: "the state",
            right: "that of q and v",
            left_shape: state.shape().to_vec(),
            right_shape: expected.to_vec(),
        });
    }
    if sizes.are_empty() {
        return Ok((v, Tensor::from_dispatch(state)));
    }
    let (out, state) = match backends::reaches(&q.device()) {
        true => Dispatch::gated_delta_step(q, k, v_token, g, beta, state),
        false => chunks::step::<Dispatch>([q, k, v_token, g, beta], state),
    };
    let (out, state) = (
        Tensor::<4>::from_dispatch(out),
        Tensor::<4>::from_dispatch(state),
    );
    Ok((out.reshape(dims), state.reshape(expected)))
}

/// The tensor with a dimension of one token after the first. burn's `unsqueeze_dim` panics where a
/// size is 0, which its `reshape` takes for the size before.
fn with_token<const D: usize>(x: &Tensor<D>) -> FloatTensor<Dispatch> {
    let mut shape = x.dims().to_vec();
    shape.insert(1, 1);
    Dispatch::float_reshape(x.clone().into_dispatch(), shape.into())
}

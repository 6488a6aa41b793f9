//! The gate of a network whose gate and up come from one product, as one operation: a slice's
//! backward would write a whole gradient for each half, and add the two.

use burn::backend::AutodiffBackend;
use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::Tensor;
use burn_fused::{accumulator, node, parts};

use super::swiglu;
use crate::error::{Result, equal};

burn_fused::reaches!(Flex: cfg(feature = "flex"));

/// silu(gate) * up as a backend with kernels implements it, where gate is the first half of each
/// row and up the second.
///
/// # Shapes
/// both: `[rows, 2 * hidden]`; out: `[rows, hidden]`
#[backend_extension(Flex: cfg(feature = "flex"), Autodiff)]
pub trait SwiGluHalvesOps: Backend {
    /// Computes the output.
    fn swiglu_halves_forward(both: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Computes the gradient of both halves from the output's gradient.
    fn swiglu_halves_backward(
        both: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

impl<B: SwiGluHalvesOps, C: CheckpointStrategy> SwiGluHalvesOps for Autodiff<B, C> {
    fn swiglu_halves_forward(both: FloatTensor<Self>) -> FloatTensor<Self> {
        let ([both], nodes) = parts([both]);
        node::<B, C, _, 1>(
            nodes,
            both,
            |both| B::swiglu_halves_forward(both),
            |both, gradient, _| [Some(B::swiglu_halves_backward(both, gradient))],
        )
    }

    fn swiglu_halves_backward(
        both: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let [both, gradient] = [both, gradient].map(Self::inner);
        Self::from_inner(B::swiglu_halves_backward(both, gradient))
    }
}

/// Computes [`swiglu`] of the two halves of each row: gate first, then up.
///
/// # Shapes
/// both: `[rows, 2 * hidden]`; out: `[rows, hidden]`
///
/// # Errors
/// [`Op`](crate::AttentionError::Op), [`Size`](crate::AttentionError::Size).
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
///
/// let both = Tensor::<2>::from_floats([[0.0, 100.0, 1.0, 2.0]], &Device::flex());
/// let y = burn_attention::swiglu_halves(both)?;
/// assert_eq!(y.into_data().iter::<f32>().collect::<Vec<_>>(), [0.0, 200.0]);
/// # Ok::<(), burn_attention::AttentionError>(())
/// ```
pub fn swiglu_halves(both: Tensor<2>) -> Result<Tensor<2>> {
    accumulator(both.dtype())?;
    let [rows, columns] = both.dims();
    let hidden = columns / 2;
    equal(["gate", "up"], "channels", hidden, columns - hidden)?;
    if rows * columns == 0 {
        return Ok(both.reshape([rows, hidden]));
    }
    if !reaches(both.device().as_dispatch()) {
        let gate = both.clone().narrow(1, 0, hidden);
        return swiglu(gate, both.narrow(1, hidden, hidden));
    }
    let out = Dispatch::swiglu_halves_forward(both.into_dispatch());
    Ok(Tensor::from_dispatch(out))
}

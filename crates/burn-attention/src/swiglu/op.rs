//! The operation as backends implement it.

use burn::backend::{Backend, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn_fused::primitive::{cast, widen};

/// silu(gate) * up, as a backend implements it.
///
/// Both methods have a default body of ordinary operations. The implementation for
/// [`Autodiff`](burn::backend::Autodiff) adds the backward.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait SwiGluOps: Backend {
    /// Computes the output, in the shape and type of both inputs.
    fn swiglu_forward(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        forward::<Self>(gate, up)
    }

    /// Computes the gradients of gate and up from the output's gradient.
    fn swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        // With s = sigmoid(gate): dup = gradient gate s, and
        // dgate = gradient (s + gate s (1 - s)) up = gradient (s + silu (1 - s)) up. The slope comes
        // before up: where it is small, gradient times up can overflow and the result not.
        let dtype = gate.dtype().into();
        let [gate, up, gradient] = [gate, up, gradient].map(widen::<Self>);
        let s = Self::sigmoid(gate.clone());
        let silu = Self::float_mul(gate, s.clone());
        let dup = Self::float_mul(gradient.clone(), silu.clone());
        let rest = Self::float_add_scalar(Self::float_neg(s.clone()), 1.0.into());
        let slope = Self::float_add(s, Self::float_mul(silu, rest));
        let dgate = Self::float_mul(Self::float_mul(gradient, slope), up);
        (cast::<Self>(dgate, dtype), cast::<Self>(dup, dtype))
    }
}

/// As [`SwiGluOps::swiglu_forward`].
pub(super) fn forward<B: Backend>(gate: FloatTensor<B>, up: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = gate.dtype().into();
    let [gate, up] = [gate, up].map(widen::<B>);
    let silu = B::float_mul(gate.clone(), B::sigmoid(gate));
    cast::<B>(B::float_mul(silu, up), dtype)
}

/// Ordinary operations.
#[cfg(feature = "cube")]
impl SwiGluOps for burn::backend::Cube {}

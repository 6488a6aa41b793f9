//! The gate composed of ordinary operations.

use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn_fused::primitive::{cast, widen};

/// Computes the same as [`SwiGluOps::swiglu_forward`](crate::SwiGluOps::swiglu_forward).
///
/// # Panics
/// If a tensor has an unsupported element type.
pub fn forward<B: Backend>(gate: FloatTensor<B>, up: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = gate.dtype().into();
    let [gate, up] = [gate, up].map(widen::<B>);
    let silu = B::float_mul(gate.clone(), B::sigmoid(gate));
    cast::<B>(B::float_mul(silu, up), dtype)
}

/// Computes the same as [`SwiGluOps::swiglu_backward`](crate::SwiGluOps::swiglu_backward).
///
/// # Panics
/// As [`forward`].
pub fn backward<B: Backend>(
    gate: FloatTensor<B>,
    up: FloatTensor<B>,
    gradient: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    // With s = sigmoid(gate): dup = gradient gate s, and
    // dgate = gradient (s + gate s (1 - s)) up = gradient (s + silu (1 - s)) up. The slope comes
    // before up: where it is small, gradient times up can overflow and the result not.
    let dtype = gate.dtype().into();
    let [gate, up, gradient] = [gate, up, gradient].map(widen::<B>);
    let s = B::sigmoid(gate.clone());
    let silu = B::float_mul(gate, s.clone());
    let dup = B::float_mul(gradient.clone(), silu.clone());
    let rest = B::float_add_scalar(B::float_neg(s.clone()), 1.0.into());
    let slope = B::float_add(s, B::float_mul(silu, rest));
    let dgate = B::float_mul(B::float_mul(gradient, slope), up);
    (cast::<B>(dgate, dtype), cast::<B>(dup, dtype))
}

//! The tanh approximation, composed of ordinary operations in the computation type.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn_fused::primitive::{cast, widen};

/// c, and c times the factor of the third power.
const FACTORS: [f64; 2] = [C, 0.044_715 * C];
const C: f64 = FRAC_2_SQRT_PI * FRAC_1_SQRT_2;

/// a x^2 + b.
fn line<B: Backend>(squares: FloatTensor<B>, a: f64, b: f64) -> FloatTensor<B> {
    B::float_add_scalar(B::float_mul_scalar(squares, a.into()), b.into())
}

/// tanh(c (x + 0.044715 x^3)), from x and its squares.
fn tanh<B: Backend>(x: FloatTensor<B>, squares: FloatTensor<B>) -> FloatTensor<B> {
    B::float_tanh(B::float_mul(line::<B>(squares, FACTORS[1], FACTORS[0]), x))
}

pub(super) fn forward<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = x.dtype().into();
    let x = widen::<B>(x);
    let squares = B::float_mul(x.clone(), x.clone());
    let half = line::<B>(tanh::<B>(x.clone(), squares), 0.5, 0.5);
    cast::<B>(B::float_mul(half, x), dtype)
}

/// With t = tanh(u): (1 + t) / 2 + x / 2 (1 - t^2) u', times the gradient.
pub(super) fn gradient<B: Backend>(x: FloatTensor<B>, gradient: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = x.dtype().into();
    let [x, gradient] = [x, gradient].map(widen::<B>);
    let squares = B::float_mul(x.clone(), x.clone());
    let t = tanh::<B>(x.clone(), squares.clone());
    let of_inner = line::<B>(squares, 1.5 * FACTORS[1], 0.5 * FACTORS[0]);
    let of_tanh = line::<B>(B::float_mul(t.clone(), t.clone()), -1.0, 1.0);
    let through = B::float_mul(B::float_mul(of_tanh, of_inner), x);
    let slope = B::float_add(line::<B>(t, 0.5, 0.5), through);
    cast::<B>(B::float_mul(gradient, slope), dtype)
}

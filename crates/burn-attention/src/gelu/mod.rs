//! GELU with a hand-written gradient.

mod backward;
mod op;
mod tanh;

#[cfg(any(feature = "cube", test))]
use burn::backend::{Backend, tensor::FloatTensor};
use burn::backend::{Dispatch, TensorMetadata};
use burn::tensor::Tensor;
#[cfg(any(feature = "cube", test))]
use burn_fused::primitive::{cast, widen};

use crate::backends;

pub use op::GeluOps;

/// Computes x times the standard normal distribution function of x.
///
/// burn's GELU differs in its gradient, which on some backends is that of an approximation.
///
/// # Memory
/// The autodiff graph keeps x.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<1>::from_floats([1.0], &device).require_grad();
/// let y = burn_attention::gelu(x.clone());
/// let slope = x.grad(&y.backward()).unwrap().into_scalar::<f32>();
/// assert!((slope - 1.083_315_5).abs() < 1e-6);
/// ```
pub fn gelu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let x = x.into_dispatch();
    if backends::reaches(&x.device()) {
        Tensor::from_dispatch(Dispatch::gelu_forward(x))
    } else {
        burn::tensor::activation::gelu(Tensor::from_dispatch(x))
    }
}

/// Computes x / 2 (1 + tanh(c (x + 0.044715 x^3))), c = sqrt(2 / pi): an approximation of [`gelu`].
///
/// # Numerics
/// 16-bit tensors are computed in f32 and each result is rounded once.
///
/// # Memory
/// The autodiff graph keeps x.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
///
/// let x = Tensor::<1>::from_floats([1.0], &Device::flex());
/// let y = burn_attention::gelu_tanh(x).into_scalar::<f32>();
/// assert!((y - 0.841_192).abs() < 1e-6);
/// ```
pub fn gelu_tanh<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let x = x.into_dispatch();
    Tensor::from_dispatch(match backends::reaches(&x.device()) {
        true => Dispatch::gelu_tanh_forward(x),
        false => tanh::forward::<Dispatch>(x),
    })
}

/// With F the distribution function: (F(x) + x F'(x)) times the gradient.
#[cfg(any(feature = "cube", test))]
fn gradient<B: Backend>(x: FloatTensor<B>, gradient: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = x.dtype().into();
    let [x, gradient] = [x, gradient].map(widen::<B>);
    let error = B::float_erf(B::float_mul_scalar(
        x.clone(),
        std::f64::consts::FRAC_1_SQRT_2.into(),
    ));
    let distribution = B::float_add_scalar(B::float_mul_scalar(error, 0.5.into()), 0.5.into());
    let squares = B::float_mul(x.clone(), x.clone());
    let density = B::float_exp(B::float_mul_scalar(squares, (-0.5).into()));
    let root = 1.0 / (2.0 * std::f64::consts::PI).sqrt();
    let density = B::float_mul_scalar(density, root.into());
    let slope = B::float_add(distribution, B::float_mul(x, density));
    cast::<B>(B::float_mul(gradient, slope), dtype)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::{DType, Device};

    use super::*;

    /// Both gradients, by finite differences in f64.
    #[test]
    fn gradients_are_those_of_the_function() {
        let device = Device::flex();
        let values: Vec<f64> = (-40..=40).map(|i| f64::from(i) / 8.0).collect();
        let of = |by: f64, device: &Device| {
            let moved: Vec<f64> = values.iter().map(|x| x + by).collect();
            Tensor::<1>::from_data(&moved[..], (device, DType::F64))
        };
        let numbers = |x: Tensor<1>| -> Vec<f64> { x.into_data().iter().collect() };
        let step = 1e-5;
        for (function, has_composed) in [(gelu as fn(_) -> _, true), (gelu_tanh, false)] {
            let [above, below] = [step, -step].map(|by| numbers(function(of(by, &device))));
            let x = of(0.0, &device.clone().autodiff()).require_grad();
            let slopes = x.grad(&function(x.clone()).sum().backward());
            let mut found = vec![slopes.expect("a gradient")];
            if has_composed {
                let x = of(0.0, &device).into_dispatch();
                let ones = Tensor::<1>::ones([values.len()], (&device, DType::F64));
                let composed = gradient::<Dispatch>(x, ones.into_dispatch());
                found.push(Tensor::from_dispatch(composed));
            }
            for slopes in found {
                for ((above, below), slope) in above.iter().zip(&below).zip(numbers(slopes)) {
                    let expected = (above - below) / (2.0 * step);
                    assert!((expected - slope).abs() < 1e-8, "{slope} for {expected}");
                }
            }
        }
    }
}

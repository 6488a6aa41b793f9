//! Products on the CPU whose rows have the same bits however many there are.
//!
//! gemm, the library of burn's CPU backend, adds in another order where a product has few rows:
//! the generation of a token, or a short answer that is scored, would differ from training. A kernel
//! computes products of all sizes in the order of large ones, each sum over stretches of inputs, and
//! mostly faster. On a processor without fused multiply-adds, rows of zeros make a product large
//! enough.

#[cfg(feature = "flex")]
pub(crate) mod kernel;
#[cfg(feature = "flex")]
pub(crate) mod target;

use std::any::Any;

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, DispatchDevice, TensorMetadata};
use burn::tensor::{DType, Shape};
use burn_fused::primitive::slice;
use burn_fused::{node, parts};

burn_fused::reaches!(Flex: cfg(feature = "flex"));

operation! {
    /// Products as a backend computes them.
    pub(crate) trait ProductOps {
        /// Computes x weight; where rows could depend on their number, so that they do not.
        ///
        /// # Shapes
        /// - x: `[rows, inputs]`; weight: `[inputs, outputs]`; out: `[rows, outputs]`
        fn product(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
            product::<Self>(x, weight)
        }
    }
}

#[cfg(feature = "flex")]
impl ProductOps for burn::backend::Flex {}
#[cfg(feature = "cube")]
impl ProductOps for burn::backend::Cube {}
#[cfg(feature = "remote")]
impl ProductOps for burn::backend::Remote {}

impl<B: ProductOps, C: CheckpointStrategy> ProductOps for Autodiff<B, C> {
    fn product(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        let needed = [weight.is_tracked(), x.is_tracked()];
        let ([x, weight], nodes) = parts([x, weight]);
        let out = B::product(x.clone(), weight.clone());
        let [keeps_x, keeps_weight] = needed;
        let kept = (keeps_x.then_some(x), keeps_weight.then_some(weight));
        node::<B, C, _, 2>(
            nodes,
            kept,
            |_| out,
            |(x, weight), gradient, _| {
                [
                    weight.map(|weight| x_gradient::<B>(weight, gradient.clone())),
                    x.map(|x| B::float_matmul(B::float_transpose(x), gradient)),
                ]
            },
        )
    }
}

/// The gradient of x, `[.., inputs]`, from that of x weight, `[.., outputs]`.
pub(crate) fn x_gradient<B: Backend>(
    weight: FloatTensor<B>,
    gradient: FloatTensor<B>,
) -> FloatTensor<B> {
    if !is_cpu(&gradient.device()) {
        return B::linear_x_backward(weight, gradient);
    }
    let [inputs, outputs] = weight.shape().dims();
    let mut shape = gradient.shape();
    let rows = shape.num_elements() / outputs.max(1);
    let last = shape.num_dims() - 1;
    shape[last] = inputs;
    let gradient = B::float_reshape(gradient, Shape::new([rows, outputs]));
    let dx = product::<B>(gradient, B::float_transpose(weight));
    B::float_reshape(dx, shape)
}

/// Up to this many elements of the product, gemm sums in vectors along the inputs.
const SMALL_PRODUCT: usize = 256;
/// Up to these rows and outputs, its stretches have other lengths.
const SMALL_SIDE: usize = 64;
/// The longest stretch of inputs of one sum.
const STRETCH: usize = 512;

/// The fewest rows with which gemm adds as with many.
pub(crate) fn fewest([inputs, outputs]: [usize; 2]) -> usize {
    let least = SMALL_PRODUCT / outputs.max(1) + 1;
    if inputs > STRETCH && outputs <= SMALL_SIDE {
        return least.max(SMALL_SIDE + 1);
    }
    least.max(2)
}

/// True for a device of burn's CPU backend, in its own type or in that of burn's dispatch.
pub(crate) fn is_cpu<D: 'static>(device: &D) -> bool {
    let device: &dyn Any = device;
    #[cfg(feature = "flex")]
    if device.is::<burn::backend::flex::FlexDevice>() {
        return true;
    }
    device.downcast_ref::<DispatchDevice>().is_some_and(reaches)
}

/// Computes x weight.
///
/// # Shapes
/// - x: `[rows, inputs]`; weight: `[inputs, outputs]`; out: `[rows, outputs]`
pub(crate) fn product<B: Backend>(x: FloatTensor<B>, weight: FloatTensor<B>) -> FloatTensor<B> {
    let ([rows, inputs], sizes) = (x.shape().dims(), weight.shape().dims());
    let is_empty = rows * inputs * sizes[1] == 0;
    // gemm rounds f16 after each stretch.
    if is_empty || x.dtype() == DType::F16 || !is_cpu(&x.device()) {
        return B::float_matmul(x, weight);
    }
    #[cfg(feature = "flex")]
    {
        let pair: [&dyn Any; 2] = [&x, &weight];
        if let [Some(x), Some(weight)] = pair.map(<dyn Any>::downcast_ref)
            && let Some(out) = kernel::product(x, weight)
            && let Ok(out) = (Box::new(out) as Box<dyn Any>).downcast()
        {
            return *out;
        }
    }
    let [_, outputs] = sizes;
    // One output would be a product of a matrix and a vector, which adds in another order.
    let (x, weight) = (
        with_zeros::<B>(x, 0, fewest([inputs, outputs.max(2)])),
        with_zeros::<B>(weight, 1, 2),
    );
    let out = slice::<B>(B::float_matmul(x, weight), 0, 0..rows);
    slice::<B>(out, 1, 0..outputs)
}

/// A matrix with zeros at the end of a dimension, to at least a size.
fn with_zeros<B: Backend>(x: FloatTensor<B>, dim: usize, least: usize) -> FloatTensor<B> {
    let mut shape: [usize; 2] = x.shape().dims();
    if shape[dim] >= least {
        return x;
    }
    shape[dim] = least - shape[dim];
    let zeros = B::float_zeros(Shape::new(shape), &x.device(), x.dtype().into());
    B::float_cat(vec![x, zeros], dim)
}

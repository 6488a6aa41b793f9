//! Products on the CPU whose rows have the same bits however many there are.
//!
//! gemm, the library of burn's CPU backend, adds in another order where a product has few rows:
//! the generation of a token, or a short answer that is scored, would differ from training. A kernel
//! computes small products in the order of large ones, each sum over stretches of inputs, and many
//! times faster; for tensors with gradients, rows of zeros make a product large enough.

#[cfg(feature = "flex")]
mod few;

use std::any::Any;

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, DispatchDevice, TensorMetadata};
use burn::tensor::{DType, Shape};
use burn_fused::primitive::slice;

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

/// With burn's own gradients.
impl<B: ProductOps, C: CheckpointStrategy> ProductOps for Autodiff<B, C> {}

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

/// True if gemm alone computes a product, with the bits that its rows have in a larger one.
#[cfg(feature = "flex")]
pub(crate) fn is_large(rows: usize, sizes: [usize; 2]) -> bool {
    rows >= fewest(sizes) && sizes[1] > 1 && !few::is_better(rows, sizes)
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
    if few::is_better(rows, sizes) {
        let pair: [&dyn Any; 2] = [&x, &weight];
        if let [Some(x), Some(weight)] = pair.map(<dyn Any>::downcast_ref)
            && let Some(out) = few::product(x, weight)
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

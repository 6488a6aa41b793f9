//! Backward passes that start from a gradient.

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::{
    AutodiffBackend, Backend, Dispatch, TensorMetadata, backend_extension, tensor::FloatTensor,
};
use burn::tensor::{Gradients, Shape, Tensor};
use burn_fused::{node, parts};

use crate::backends;

/// A scalar whose backward starts from a gradient.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
trait SourceOps: Backend {
    /// Returns any number; for the backward it is (output * gradient).sum().
    fn gradient_source(
        output: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let _of_backward = gradient;
        Self::float_empty(Shape::new([1]), &output.device(), output.dtype().into())
    }
}

#[cfg(feature = "flex")]
impl SourceOps for burn::backend::Flex {}

#[cfg(feature = "cube")]
impl SourceOps for burn::backend::Cube {}

#[cfg(feature = "remote")]
impl SourceOps for burn::backend::Remote {}

impl<B: SourceOps, C: CheckpointStrategy> SourceOps for Autodiff<B, C> {
    fn gradient_source(
        output: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let gradient = Self::inner(gradient);
        let ([output], nodes) = parts([output]);
        node::<B, C, _, 1>(
            nodes,
            gradient.clone(),
            |_| B::gradient_source(output, gradient),
            // The scalar is the last of its graph: its gradient is 1.
            |gradient, _, _| [Some(gradient)],
        )
    }
}

/// Computes the gradients of all tensors from those of some outputs.
///
/// # Shapes
/// A gradient has the shape and type of its output, and is not tracked.
///
/// # Panics
/// If no output is tracked, as [`Tensor::backward`].
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<1>::from_floats([1.0, 2.0], &device).require_grad();
/// let of_square = Tensor::from_floats([10.0, 100.0], &device.clone().inner());
/// let gradients = burn_attention::backward_from([(x.clone() * x.clone(), of_square)]);
/// let gradient = x.grad(&gradients).unwrap().into_data();
/// assert_eq!(gradient.iter::<f32>().collect::<Vec<_>>(), [20.0, 400.0]);
/// ```
pub fn backward_from<const D: usize>(
    outputs: impl IntoIterator<Item = (Tensor<D>, Tensor<D>)>,
) -> Gradients {
    let source = |(output, gradient): (Tensor<D>, Tensor<D>)| -> Tensor<1> {
        let gradient = Tensor::from_inner(gradient);
        if !backends::reaches(output.device().as_dispatch()) {
            return (output * gradient).sum();
        }
        let (output, gradient) = (output.into_dispatch(), gradient.into_dispatch());
        Tensor::from_dispatch(Dispatch::gradient_source(output, gradient))
    };
    let sources = outputs.into_iter().map(source);
    let sum = sources.reduce(|sum, source| sum + source);
    sum.expect("at least one output").backward()
}

//! The operation as backends implement it.

use burn::backend::{Backend, backend_extension, tensor::FloatTensor};

use crate::gradients::any_number;

/// A bf16 linear layer with an f32 adapter beside its weight, as a backend with kernels implements
/// it.
///
/// # Shapes
/// x: `[rows, inputs]`; weight: `[inputs, outputs]`, of any strides; bias: `[outputs]`; a:
/// `[inputs, rank]`; b: `[rank, outputs]`. The rank may be 0.
#[backend_extension(Flex: cfg(all(feature = "flex", target_arch = "x86_64")), Autodiff)]
pub trait LinearOps: Backend {
    /// Computes x weight + bias + x a b, rounded once: `[rows, outputs]`.
    fn linear_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// Returns any number in the place of the output; its backward starts from the output's gradient.
    fn linear_source(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let _of_backward = (weight, bias, a, b, gradient);
        any_number::<Self>(&x)
    }

    /// Computes the gradient of x from the output's gradient.
    fn linear_x_gradient(
        gradient: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// Computes the gradients of a and b from the output's gradient.
    fn linear_adapter_gradients(
        x: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

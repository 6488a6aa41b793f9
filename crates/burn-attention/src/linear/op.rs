//! The operation as backends implement it.

use burn::backend::{Backend, backend_extension, tensor::FloatTensor};

/// A linear layer of bf16, with an adapter of f32 beside its weight, on a backend with kernels.
///
/// # Shapes
/// x: `[rows, inputs]`; weight: `[inputs, outputs]`, of any strides; bias: `[outputs]`; a:
/// `[inputs, rank]`; b: `[rank, outputs]`. The rank may be 0.
#[backend_extension(Flex: cfg(all(feature = "flex", target_arch = "x86_64")), Autodiff)]
pub trait LinearOps: Backend {
    /// x weight + bias + x a b, rounded once: `[rows, outputs]`.
    fn linear_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// The gradient of x, from that of the output.
    fn linear_x_gradient(
        gradient: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// The gradients of a and b, from that of the output.
    fn linear_adapter_gradients(
        x: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

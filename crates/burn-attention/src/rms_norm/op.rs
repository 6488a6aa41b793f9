//! The operation as backends implement it.

use burn::backend::{Backend, backend_extension, tensor::FloatTensor};

use super::composed;

/// RMSNorm over the last dimension, on a backend.
///
/// Both methods have a body of ordinary operations; a backend overrides them if it has an operator.
/// The implementation for [`Autodiff`](burn::backend::Autodiff) adds the backward.
///
/// # Shapes
/// - x, out, gradient: `[.., channels]`; weight: `[channels]`, of the type of x
/// - rstd: `[.., 1]`, f32, for f64 tensors f64
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait RmsNormOps: Backend {
    /// The output, and rstd = 1 / sqrt(mean(x^2) + epsilon) of each row.
    fn rms_norm_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        composed::forward::<Self>(x, weight, epsilon)
    }

    /// The gradients of x and the weight, from that of the output.
    fn rms_norm_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        rstd: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        composed::backward::<Self>(x, weight, rstd, gradient)
    }
}

/// Ordinary operations.
#[cfg(feature = "flex")]
impl RmsNormOps for burn::backend::Flex {}

/// Ordinary operations.
#[cfg(feature = "cube")]
impl RmsNormOps for burn::backend::Cube {}

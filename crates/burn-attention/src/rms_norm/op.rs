//! The operation as backends implement it.

use burn::backend::tensor::FloatTensor;

use super::composed;

operation! {
    /// RMSNorm over the last dimension, as a backend implements it.
    ///
    /// Both methods have a default body of ordinary operations; a backend with an operator
    /// overrides them. The implementation for [`Autodiff`](burn::backend::Autodiff) adds the
    /// backward.
    ///
    /// # Shapes
    /// - x, out, gradient: `[.., channels]`; weight: `[channels]`, in the type of x or of rstd
    /// - rstd: `[.., 1]`, f32, or f64 for f64 tensors
    pub trait RmsNormOps {
        /// Computes the output, and rstd = 1 / sqrt(mean(x^2) + epsilon) of each row.
        fn rms_norm_forward(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            epsilon: f64,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            composed::forward::<Self>(x, weight, epsilon)
        }

        /// Computes the gradients of x, and of the weight in the type of rstd, from the output's
        /// gradient.
        fn rms_norm_backward(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            rstd: FloatTensor<Self>,
            gradient: FloatTensor<Self>,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            composed::backward::<Self>(x, weight, rstd, gradient)
        }
    }
}

/// Ordinary operations.
#[cfg(feature = "flex")]
impl RmsNormOps for burn::backend::Flex {}

/// Ordinary operations.
#[cfg(feature = "cube")]
impl RmsNormOps for burn::backend::Cube {}

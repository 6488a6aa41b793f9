//! The operation as backends implement it.

use burn::backend::tensor::FloatTensor;

use super::composed;

operation! {
    /// LayerNorm over the last dimension, as a backend implements it.
    ///
    /// Both methods have a default body of ordinary operations; a backend with an operator
    /// overrides them. The implementation for [`Autodiff`](burn::backend::Autodiff) adds the
    /// backward.
    ///
    /// # Shapes
    /// - x, out, gradient: `[.., channels]`; weight, bias: `[channels]`, in the type of x
    /// - mean, rstd: `[.., 1]`, f32, or f64 for f64 tensors
    pub trait LayerNormOps {
        /// Computes the output, and mean(x) and rstd = 1 / sqrt(variance(x) + epsilon) of each row.
        fn layer_norm_forward(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            bias: FloatTensor<Self>,
            epsilon: f64,
        ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
            composed::forward::<Self>(x, weight, bias, epsilon)
        }

        /// Computes the gradients of x, and of the weight and the bias in the type of rstd, from
        /// the output's gradient.
        fn layer_norm_backward(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            mean: FloatTensor<Self>,
            rstd: FloatTensor<Self>,
            gradient: FloatTensor<Self>,
        ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
            composed::backward::<Self>(x, weight, mean, rstd, gradient)
        }
    }
}

/// Ordinary operations.
#[cfg(feature = "flex")]
impl LayerNormOps for burn::backend::Flex {}

/// Ordinary operations.
#[cfg(feature = "cube")]
impl LayerNormOps for burn::backend::Cube {}

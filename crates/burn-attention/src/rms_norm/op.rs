//! The operation as backends implement it.

#[cfg(feature = "fusion")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::FloatTensor;

use super::composed;
#[cfg(feature = "fusion")]
use super::rows;

operation! {
    Fusion;
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
        #[fusion(meta = |x, _, _| {
            let (shape, dtype) = rows(&x.shape, x.dtype);
            (x.clone(), TensorSpec::new(shape, dtype))
        })]
        fn rms_norm_forward(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            epsilon: f64,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            composed::forward::<Self>(x, weight, epsilon)
        }

        /// Computes the gradients of x, and of the weight in the type of rstd, from the output's
        /// gradient.
        #[fusion(meta = |x, weight, rstd, _| {
            (x.clone(), TensorSpec::new(weight.shape.clone(), rstd.dtype))
        })]
        fn rms_norm_backward(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            rstd: FloatTensor<Self>,
            gradient: FloatTensor<Self>,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            composed::backward::<Self>(x, weight, rstd, gradient)
        }

        /// Computes the gradient of x alone.
        #[fusion(dtype = x, shape = x)]
        fn rms_norm_input_gradient(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            rstd: FloatTensor<Self>,
            gradient: FloatTensor<Self>,
        ) -> FloatTensor<Self> {
            Self::rms_norm_backward(x, weight, rstd, gradient).0
        }
    }
}

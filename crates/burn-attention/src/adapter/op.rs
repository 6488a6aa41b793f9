//! The operations as backends implement them.

use burn::backend::tensor::FloatTensor;

use super::composed;
use crate::attention::Bias;
use crate::gradients::any_number;

operation! {
    /// The products of a linear layer with a low-rank adapter, as a backend implements them.
    ///
    /// All methods have a default body of ordinary operations; a backend with kernels overrides the
    /// first three. The implementation for [`Autodiff`](burn::backend::Autodiff) adds the backward.
    ///
    /// # Shapes
    /// - x: `[rows, inputs]`; weight: `[inputs, outputs]`; bias: `[outputs]`; y, gradient:
    ///   `[rows, outputs]`, all of one type
    /// - a: `[rank, inputs]`, b: `[rank, outputs]`, in f32, or f64 for f64 tensors
    /// - factor: `[parts * rank, channels]`, in the type of x, one or two parts whose sum it is
    /// - h: `[parts * rank, rows]`, in the type of b
    pub trait AdapterOps {
        /// Computes h = factor x^T. The autodiff backend does not track it.
        fn adapter_inner(factor: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
            composed::inner::<Self>(factor, x)
        }

        /// Computes y + h^T b with h summed over its parts, rounded once, and that sum in the type
        /// of y: `[rank, rows]`.
        fn adapter_add(
            y: FloatTensor<Self>,
            h: FloatTensor<Self>,
            b: FloatTensor<Self>,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            composed::add::<Self>(y, h, b)
        }

        /// Computes h x: the gradient of b from h and the output's gradient, of a, or of a weight.
        /// `h`: `[rank, rows]`, in the type of `x`; the result is in that of b.
        fn adapter_gradient(h: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
            composed::gradient::<Self>(h, x)
        }

        /// Computes x weight + bias. The gradient of the weight is in f32, or f64 for f64 tensors.
        fn wide_linear(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            #[extension_type] bias: Bias<Self>,
        ) -> FloatTensor<Self> {
            Self::linear(x, weight, bias.into_option())
        }

        /// Returns any number in the place of x weight + bias; its backward starts from the
        /// output's gradient.
        fn wide_linear_source(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            #[extension_type] bias: Bias<Self>,
            gradient: FloatTensor<Self>,
        ) -> FloatTensor<Self> {
            let _of_backward = (weight, bias, gradient);
            any_number::<Self>(&x)
        }

        /// Computes x weight + bias + h^T b. `factor` is that of the gradient of h, as h = factor'
        /// x^T is that of a.
        fn adapted_linear(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            #[extension_type] bias: Bias<Self>,
            h: FloatTensor<Self>,
            a: FloatTensor<Self>,
            b: FloatTensor<Self>,
            factor: FloatTensor<Self>,
        ) -> FloatTensor<Self> {
            let _of_backward = (a, factor);
            let y = Self::linear(x, weight, bias.into_option());
            Self::adapter_add(y, h, b).0
        }

        /// Returns any number in the place of an [`adapted_linear`](Self::adapted_linear); its
        /// backward starts from the output's gradient.
        #[allow(clippy::too_many_arguments, reason = "the macro reads tensors one by one")]
        fn adapted_linear_source(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            #[extension_type] bias: Bias<Self>,
            h: FloatTensor<Self>,
            a: FloatTensor<Self>,
            b: FloatTensor<Self>,
            factor: FloatTensor<Self>,
            gradient: FloatTensor<Self>,
        ) -> FloatTensor<Self> {
            let _of_backward = (weight, bias, h, a, b, factor, gradient);
            any_number::<Self>(&x)
        }
    }
}

/// Ordinary operations.
#[cfg(feature = "flex")]
impl AdapterOps for burn::backend::Flex {}

/// Ordinary operations.
#[cfg(feature = "cube")]
impl AdapterOps for burn::backend::Cube {}

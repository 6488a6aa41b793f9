//! The operations as backends implement them.

use burn::backend::tensor::FloatTensor;
#[cfg(feature = "fusion")]
use {
    burn::backend::fusion::custom::TensorSpec,
    burn::tensor::{DType, Shape},
    burn_fused::accumulator,
};

use super::composed;
use crate::attention::Bias;
use crate::gradients::any_number;

operation! {
    Fusion;
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
        #[fusion(meta = |factor, x| wide_matrix([factor.shape[0], x.shape[0]], x.dtype))]
        fn adapter_inner(factor: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
            composed::inner::<Self>(factor, x)
        }

        /// Computes y + h^T b with h summed over its parts, rounded once, and that sum in the type
        /// of y: `[rank, rows]`.
        #[fusion(meta = |y, _, b| {
            let inner = Shape::new([b.shape[0], y.shape[0]]);
            (y.clone(), TensorSpec::new(inner, y.dtype))
        })]
        fn adapter_add(
            y: FloatTensor<Self>,
            h: FloatTensor<Self>,
            b: FloatTensor<Self>,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            composed::add::<Self>(y, h, b)
        }

        /// Computes x weight + bias + h^T b as [`adapter_add`](Self::adapter_add) does.
        #[fusion(meta = |x, weight, _, _, b| {
            let matrix = |dims: [usize; 2]| TensorSpec::new(Shape::new(dims), x.dtype);
            let (rows, outputs) = (x.shape[0], weight.shape[1]);
            (matrix([rows, outputs]), matrix([b.shape[0], rows]))
        })]
        fn adapter_add_biased(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            bias: FloatTensor<Self>,
            h: FloatTensor<Self>,
            b: FloatTensor<Self>,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            Self::adapter_add(Self::linear(x, weight, Some(bias)), h, b)
        }

        /// Computes y + x weight, rounded once where the device can.
        #[fusion(default)]
        fn product_add(
            y: FloatTensor<Self>,
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
        ) -> FloatTensor<Self> {
            Self::float_add(y, Self::linear(x, weight, None))
        }

        /// Computes h x: the gradient of b from h and the output's gradient, of a, or of a weight.
        /// `h`: `[rank, rows]`, in the type of `x`; the result is in that of b.
        #[fusion(meta = |h, x| wide_matrix([h.shape[0], x.shape[1]], x.dtype))]
        fn adapter_gradient(h: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
            composed::gradient::<Self>(h, x)
        }

        /// Computes x weight + bias. The gradient of the weight is in f32, or f64 for f64 tensors.
        /// `mark` is of the layers with this x alone, whose gradients of it are summed by
        /// [`product_add`](Self::product_add).
        #[fusion(default)]
        fn wide_linear(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            #[extension_type] bias: Bias<Self>,
            #[extension_type] mark: Bias<Self>,
        ) -> FloatTensor<Self> {
            let _of_backward = mark;
            Self::linear(x, weight, bias.into_option())
        }

        /// Computes y + x weight with the gradients of [`wide_linear`](Self::wide_linear).
        #[fusion(default)]
        fn wide_linear_onto(
            y: FloatTensor<Self>,
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
        ) -> FloatTensor<Self> {
            Self::product_add(y, x, weight)
        }

        /// Returns any number in the place of x weight + bias; its backward starts from the
        /// output's gradient.
        #[fusion(default)]
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
        /// x^T is that of a. `mark` is as in [`wide_linear`](Self::wide_linear).
        #[allow(clippy::too_many_arguments, reason = "the macro reads tensors one by one")]
        #[fusion(default)]
        fn adapted_linear(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            #[extension_type] bias: Bias<Self>,
            h: FloatTensor<Self>,
            a: FloatTensor<Self>,
            b: FloatTensor<Self>,
            factor: FloatTensor<Self>,
            #[extension_type] mark: Bias<Self>,
        ) -> FloatTensor<Self> {
            let _of_backward = (a, factor, mark);
            match bias.into_option() {
                Some(bias) => Self::adapter_add_biased(x, weight, bias, h, b).0,
                None => Self::adapter_add(Self::linear(x, weight, None), h, b).0,
            }
        }

        /// Returns any number in the place of an [`adapted_linear`](Self::adapted_linear); its
        /// backward starts from the output's gradient.
        #[allow(clippy::too_many_arguments, reason = "the macro reads tensors one by one")]
        #[fusion(default)]
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

/// A matrix in the type that one is computed in.
#[cfg(feature = "fusion")]
fn wide_matrix(dims: [usize; 2], dtype: DType) -> TensorSpec {
    let wide = accumulator(dtype).map_or(dtype, DType::from);
    TensorSpec::new(Shape::new(dims), wide)
}

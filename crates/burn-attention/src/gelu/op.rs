//! The operation as backends implement it.

use burn::backend::tensor::FloatTensor;

operation! {
    /// x times the standard normal distribution function of x, as a backend implements it.
    ///
    /// The methods are burn's on backends whose backward belongs to this function. The
    /// implementation for [`Autodiff`](burn::backend::Autodiff) adds the backward.
    pub trait GeluOps {
        /// Computes the output.
        fn gelu_forward(x: FloatTensor<Self>) -> FloatTensor<Self> {
            Self::gelu(x)
        }

        /// Computes the gradient of x from the output's gradient.
        fn gelu_gradient(x: FloatTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self> {
            Self::gelu_backward(x, gradient)
        }

        /// Computes the output of the tanh approximation.
        fn gelu_tanh_forward(x: FloatTensor<Self>) -> FloatTensor<Self> {
            super::tanh::forward::<Self>(x)
        }

        /// Computes the gradient of x of the tanh approximation from the output's gradient.
        fn gelu_tanh_gradient(
            x: FloatTensor<Self>,
            gradient: FloatTensor<Self>,
        ) -> FloatTensor<Self> {
            super::tanh::gradient::<Self>(x, gradient)
        }
    }
}

#[cfg(feature = "flex")]
impl GeluOps for burn::backend::Flex {}

/// burn 0.22.1 has the gradient of the tanh approximation; its error is about 4e-4 of a layer's
/// gradient.
#[cfg(feature = "cube")]
impl GeluOps for burn::backend::Cube {
    fn gelu_gradient(x: FloatTensor<Self>, gradient: FloatTensor<Self>) -> FloatTensor<Self> {
        super::gradient::<Self>(x, gradient)
    }
}

#[cfg(feature = "remote")]
impl GeluOps for burn::backend::Remote {}

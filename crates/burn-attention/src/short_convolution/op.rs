//! The operation as backends implement it.

use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn_fused::{accumulator, expect};

use super::composed;
use crate::error::{AttentionError, Result, equal};
use crate::sequences::Sequences;

/// One convolution: its sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShortConvolutionOp {
    /// The division of tokens into sequences.
    pub sequences: Sequences,
}

impl ShortConvolutionOp {
    /// Checks the shapes and types of the tensors, for every backend.
    ///
    /// # Errors
    /// Those of [`short_convolution`](crate::short_convolution).
    pub fn check<T: TensorMetadata>(&self, x: &T, weight: &T) -> Result<()> {
        accumulator(x.dtype())?;
        expect("weight", weight, x.dtype(), x)?;
        let [_, tokens, channels] = x.shape().dims();
        let [weight_channels, taps] = weight.shape().dims();
        equal(["x", "weight"], "channels", channels, weight_channels)?;
        equal(
            ["x", "the sequences"],
            "tokens",
            tokens,
            self.sequences.tokens(),
        )?;
        if taps == 0 {
            return Err(AttentionError::NoChannels);
        }
        Ok(())
    }
}

operation! {
    /// A short causal convolution of each channel, and SiLU, as a backend implements it.
    ///
    /// Both methods have a default body of ordinary operations. The implementation for
    /// [`Autodiff`](burn::backend::Autodiff) adds the backward.
    ///
    /// # Shapes
    /// - x, out: `[batch, tokens, channels]`; weight: `[channels, taps]`, in the type of x
    ///
    /// # Panics
    /// If shapes or types disagree; [`ShortConvolutionOp::check`] reports the reason.
    pub trait ShortConvolutionOps {
        /// Computes the output.
        fn short_convolution_forward(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            op: ShortConvolutionOp,
        ) -> FloatTensor<Self> {
            composed::forward::<Self>(x, weight, &op)
        }

        /// Computes the gradients of x and the weight from the output's gradient.
        fn short_convolution_backward(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            gradient: FloatTensor<Self>,
            op: ShortConvolutionOp,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            composed::backward::<Self>(x, weight, gradient, &op)
        }
    }
}

/// Ordinary operations.
#[cfg(feature = "flex")]
impl ShortConvolutionOps for burn::backend::Flex {}

/// Ordinary operations.
#[cfg(feature = "cube")]
impl ShortConvolutionOps for burn::backend::Cube {}

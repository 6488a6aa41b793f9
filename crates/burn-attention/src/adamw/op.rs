//! The operation as backends implement it.

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
#[cfg(feature = "fusion")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{Backend, tensor::FloatTensor};
use burn::tensor::FloatDType;
use burn_fused::primitive::cast;

use super::composed;
#[cfg(feature = "fusion")]
use super::{shape_of_sums, type_of_sums};
use crate::error::{AttentionError, Result};

/// The numbers of an AdamW update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWOp {
    /// The learning rate.
    pub rate: f64,
    /// The weight decay: an update removes the share `rate * decay` of a value.
    pub decay: f64,
    /// The share of each moment that is kept.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// The number of updates, including this one.
    pub steps: u64,
    /// Multiplies the gradient first, to clip it.
    pub scale: f64,
}

/// The numbers that the tensors of an update are computed with.
#[derive(Clone, Copy, Debug)]
pub struct AdamWFactors {
    /// Multiplies the gradient.
    pub scale: f64,
    /// The share of the gradient in the first moment.
    pub of_gradient: f64,
    /// The share of its square in the second moment.
    pub of_square: f64,
    /// The share of the second moment that is kept.
    pub kept: f64,
    /// Divides the root of the second moment.
    pub correction: f64,
    /// Added to that quotient.
    pub epsilon: f64,
    /// The share of a value that does not decay.
    pub stay: f64,
    /// The size of the step.
    pub step: f64,
}

impl AdamWOp {
    /// The factors of the tensors.
    pub fn factors(self) -> AdamWFactors {
        let [beta_1, beta_2] = self.betas;
        let steps = self.steps as f64;
        AdamWFactors {
            scale: self.scale,
            of_gradient: 1.0 - beta_1,
            of_square: 1.0 - beta_2,
            kept: beta_2,
            correction: (1.0 - beta_2.powf(steps)).sqrt(),
            epsilon: self.epsilon,
            stay: 1.0 - self.rate * self.decay,
            step: self.rate / (1.0 - beta_1.powf(steps)),
        }
    }

    /// # Errors
    /// [`AttentionError::Update`].
    pub(super) fn check(self) -> Result<()> {
        let [beta_1, beta_2] = self.betas;
        let is_real = |number: f64| number.is_finite() && number >= 0.0;
        let is_beta = |beta: f64| (0.0..1.0).contains(&beta);
        let (real, beta) = ("a finite number, at least 0", "at least 0 and below 1");
        for (what, found, is_right, expected) in [
            ("the rate", self.rate, is_real(self.rate), real),
            ("the decay", self.decay, is_real(self.decay), real),
            ("the first beta", beta_1, is_beta(beta_1), beta),
            ("the second beta", beta_2, is_beta(beta_2), beta),
            ("epsilon", self.epsilon, is_real(self.epsilon), real),
            ("the scale", self.scale, is_real(self.scale), real),
            (
                "the number of updates",
                self.steps as f64,
                self.steps > 0,
                "at least 1: this one is among them",
            ),
        ] {
            if !is_right {
                return Err(AttentionError::Update {
                    what,
                    expected,
                    found,
                });
            }
        }
        Ok(())
    }
}

operation! {
    Fusion;
    /// One AdamW update, and the sums of squares that clipping needs, as a backend implements them.
    /// All tensors of an update have one shape and type, but that a gradient beside f32 may have
    /// 16 bits.
    pub trait AdamWOps {
        /// Computes the new values, and the new moments of the gradients and of their squares.
        #[fusion(meta = |value, _, first, second, _| {
            (value.clone(), first.clone(), second.clone())
        })]
        fn adamw(
            value: FloatTensor<Self>,
            gradient: FloatTensor<Self>,
            first: FloatTensor<Self>,
            second: FloatTensor<Self>,
            op: AdamWOp,
        ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
            composed::update::<Self>(value, gradient, first, second, op)
        }

        /// Computes the sums of the squares of each [`SQUARES`](super::SQUARES) elements of a flat
        /// x, in f32 for one of 16 bits.
        #[fusion(meta = |x| TensorSpec::new(shape_of_sums(&x.shape), type_of_sums(x.dtype)))]
        fn square_sums(x: FloatTensor<Self>) -> FloatTensor<Self> {
            composed::square_sums::<Self>(x)
        }

        /// Writes the sums of the squares of x into others, from number `start` on.
        #[fusion(dtype = sums, shape = sums)]
        fn square_sums_into(
            sums: FloatTensor<Self>,
            x: FloatTensor<Self>,
            start: usize,
        ) -> FloatTensor<Self> {
            composed::square_sums_into::<Self>(sums, x, start)
        }

        /// Computes the new values, their copy in another type, and the new moments.
        #[fusion(meta = |value, _, first, second, _, dtype| {
            let rounded = TensorSpec::new(value.shape.clone(), (*dtype).into());
            (value.clone(), rounded, first.clone(), second.clone())
        })]
        fn adamw_rounded(
            value: FloatTensor<Self>,
            gradient: FloatTensor<Self>,
            first: FloatTensor<Self>,
            second: FloatTensor<Self>,
            op: AdamWOp,
            dtype: FloatDType,
        ) -> (
            FloatTensor<Self>,
            FloatTensor<Self>,
            FloatTensor<Self>,
            FloatTensor<Self>,
        ) {
            rounded::<Self>(Self::adamw(value, gradient, first, second, op), dtype)
        }
    }
}

/// New values, their copy in another type, and new moments.
pub type AdamWRounded<B> = (
    FloatTensor<B>,
    FloatTensor<B>,
    FloatTensor<B>,
    FloatTensor<B>,
);

/// The results of an update, with the values in another type too.
pub(super) fn rounded<B: Backend>(
    (value, first, second): (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>),
    dtype: FloatDType,
) -> AdamWRounded<B> {
    let rounded = cast::<B>(value.clone(), dtype);
    (value, rounded, first, second)
}

/// Ordinary operations, which autodiff follows.
impl<B: AdamWOps, C: CheckpointStrategy> AdamWOps for Autodiff<B, C> {}

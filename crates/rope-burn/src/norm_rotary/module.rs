//! The module for a model, and the operation for models that already have the weights.

use burn::backend::Dispatch;
use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_fused::or_panic;
use rope_core::{Direction, HeadNorm};

use super::composed;
use super::{NormRotaryOp, NormRotaryOps};
use crate::angles::RotaryAngles;
use crate::error::Result;
use crate::rotary::{self, Rotary, RotaryConfig};

impl Rotary {
    /// Normalises each head of q and k, before or after the rotation as `norm` states, and rotates
    /// them, for models whose weights are not in a [`NormRotary`].
    ///
    /// # Panics
    /// If shapes, types, weights or angles disagree; see
    /// [`try_forward_norm`](Self::try_forward_norm).
    #[track_caller]
    pub fn forward_norm<const D: usize>(
        &self,
        q: Tensor<D>,
        k: Tensor<D>,
        weights: [Tensor<1>; 2],
        norm: HeadNorm,
        angles: &RotaryAngles,
    ) -> (Tensor<D>, Tensor<D>) {
        or_panic(self.try_forward_norm(q, k, weights, norm, angles))
    }

    /// Normalises each head of q and k, before or after the rotation as `norm` states, and rotates
    /// them, in one pass over both.
    ///
    /// # Shapes
    /// q and k in the order of the layout; weights `[head_dim]`, in any float type.
    ///
    /// # Memory
    /// The autodiff graph keeps q, k and the step's angles. Without gradients, tensors that nothing
    /// else holds are overwritten.
    ///
    /// # Errors
    /// Those of [`try_forward`](Self::try_forward); [`RopeError::NormWeight`] if a weight is not
    /// `[head_dim]`.
    ///
    /// [`RopeError::NormWeight`]: rope_core::RopeError::NormWeight
    pub fn try_forward_norm<const D: usize>(
        &self,
        q: Tensor<D>,
        k: Tensor<D>,
        [q_weight, k_weight]: [Tensor<1>; 2],
        norm: HeadNorm,
        angles: &RotaryAngles,
    ) -> Result<(Tensor<D>, Tensor<D>)> {
        let angle_dtype = FloatDType::from(angles.dtype());
        let weights = [q_weight, k_weight].map(|weight| weight.cast(angle_dtype).into_dispatch());
        let outputs = self.apply(
            Direction::Forward,
            [q, k],
            angles,
            |forward, [q, k], angles| {
                let op = NormRotaryOp {
                    geometry: forward.geometry,
                    layout: forward.layout,
                    norm,
                    skips_weight: false,
                };
                let [q_weight, k_weight] = weights;
                forward.check(&q, Some(&k), &angles)?;
                op.check_weight("the weight of q's norm", &q_weight, &q)?;
                op.check_weight("the weight of k's norm", &k_weight, &k)?;
                if self.fuses(&q) {
                    let pair = Dispatch::norm_rotary_pair(q, k, q_weight, k_weight, angles, op);
                    return Ok(pair.into());
                }
                let compose = |x, weight, angles| {
                    let rotate = rotary::composed::rotate::<Dispatch>;
                    composed::norm_rotate::<Dispatch>(x, weight, angles, op, rotate)
                };
                let q = compose(q, q_weight, angles.clone());
                Ok([q, compose(k, k_weight, angles)])
            },
        );
        Ok(outputs?.into())
    }
}

/// Configuration of a [`NormRotary`].
#[derive(Config, Debug)]
pub struct NormRotaryConfig {
    /// The rotation.
    pub rotary: RotaryConfig,
    /// The norm of each head; its epsilon is `rms_norm_eps` in configurations.
    pub norm: HeadNorm,
}

impl NormRotaryConfig {
    /// Creates the module with weights that multiply by 1.
    ///
    /// # Panics
    /// If the frequencies cannot be computed; see [`try_init`](Self::try_init).
    #[track_caller]
    pub fn init(&self, device: &Device) -> NormRotary {
        or_panic(self.try_init(device))
    }

    /// Creates the module with weights that multiply by 1.
    ///
    /// # Errors
    /// Those of [`RotaryConfig::try_init`].
    pub fn try_init(&self, device: &Device) -> Result<NormRotary> {
        let rotary = self.rotary.try_init()?;
        let head_dim = rotary.spec().head_dim();
        let weight = || {
            let weight = if self.norm.unit_offset() {
                Tensor::zeros([head_dim], device)
            } else {
                Tensor::ones([head_dim], device)
            };
            NormWeight {
                weight: Param::from_tensor(weight),
            }
        };
        Ok(NormRotary {
            q_norm: weight(),
            k_norm: weight(),
            norm: self.norm,
            rotary,
        })
    }
}

/// The weight of a norm, `[head_dim]`.
#[derive(Module, Debug)]
pub struct NormWeight {
    /// The factors of channels, minus 1 with a unit offset.
    pub weight: Param<Tensor<1>>,
}

/// Normalises each head of q and k and rotates it, with the parameters `q_norm.weight` and
/// `k_norm.weight`, named as in Qwen3, Gemma 3 and most other models.
#[derive(Module, Debug)]
pub struct NormRotary {
    /// The weight of q.
    pub q_norm: NormWeight,
    /// The weight of k.
    pub k_norm: NormWeight,
    #[module(skip)]
    norm: HeadNorm,
    rotary: Rotary,
}

impl NormRotary {
    /// Returns the rotation, which computes the angles of a step.
    pub fn rotary(&self) -> &Rotary {
        &self.rotary
    }

    /// Normalises and rotates q and k.
    ///
    /// # Errors
    /// As [`Rotary::try_forward_norm`].
    pub fn try_forward<const D: usize>(
        &self,
        q: Tensor<D>,
        k: Tensor<D>,
        angles: &RotaryAngles,
    ) -> Result<(Tensor<D>, Tensor<D>)> {
        let weights = [&self.q_norm, &self.k_norm].map(|norm| norm.weight.val());
        self.rotary
            .try_forward_norm(q, k, weights, self.norm, angles)
    }

    /// Normalises and rotates q and k.
    ///
    /// # Panics
    /// If shapes, types or angles disagree; see [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(
        &self,
        q: Tensor<D>,
        k: Tensor<D>,
        angles: &RotaryAngles,
    ) -> (Tensor<D>, Tensor<D>) {
        or_panic(self.try_forward(q, k, angles))
    }
}

//! Inverse frequencies and their scaling.

use serde::{Deserialize, Serialize};

use crate::error::{Result, RopeError};

/// Theta and its scaling.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Frequencies {
    theta: f64,
}

impl Frequencies {
    /// Unscaled frequencies theta^(-2i/dims).
    ///
    /// # Errors
    /// [`RopeError::Theta`] if theta is NaN, infinite or not positive.
    pub fn new(theta: f64) -> Result<Self> {
        if !(theta.is_finite() && theta > 0.0) {
            return Err(RopeError::Theta { found: theta });
        }
        Ok(Self { theta })
    }

    /// The factor on cos and sin.
    pub fn attention_scaling(&self) -> f64 {
        1.0
    }

    /// Inverse frequencies in radians per token for a rotation over `dims` channels, `dims / 2` of them.
    ///
    /// # Errors
    /// None for unscaled frequencies.
    pub fn inv_freq(&self, dims: usize, _seq_len: Option<u64>) -> Result<Vec<f64>> {
        Ok((0..dims / 2)
            .map(|i| self.theta.powf(-2.0 * i as f64 / dims as f64))
            .collect())
    }
}

//! Inverse frequencies: the base `theta`, its context-extension scaling, and the attention scaling
//! that goes with it.
//!
//! Every scaling of the field is one number per frequency: `inv_freq[j] = theta^(-2j / dims) *
//! multiplier[j]`. The scaling decides the multiplier and nothing else, so a new one is a new arm
//! in one function.

mod scaling;

pub use scaling::{Llama3Scaling, LongRopeScaling, Scaling, YarnScaling};

use serde::{Deserialize, Serialize};

use crate::error::{Result, RopeError};

/// The frequencies of a rotary embedding: `theta` and how it is scaled, validated once.
///
/// # Examples
/// ```
/// use rope_core::{Frequencies, Scaling};
///
/// let plain = Frequencies::new(10_000.0)?;
/// assert_eq!(plain.inv_freq(4, None)?, [1.0, 0.01]);
///
/// let stretched = plain.with_scaling(Scaling::Linear { factor: 4.0 })?;
/// assert_eq!(stretched.inv_freq(4, None)?, [0.25, 0.0025]);
/// # Ok::<(), rope_core::RopeError>(())
/// ```
///
/// # Source
/// Su et al. 2021, RoFormer, section 3.2.2, <https://arxiv.org/abs/2104.09864>; scalings: see
/// [`Scaling`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct Frequencies {
    theta: f64,
    scaling: Scaling,
}

/// What a serialized [`Frequencies`] holds before its values have been checked.
#[derive(Deserialize)]
struct Unchecked {
    theta: f64,
    scaling: Scaling,
}

impl TryFrom<Unchecked> for Frequencies {
    type Error = RopeError;

    fn try_from(unchecked: Unchecked) -> Result<Self> {
        Self::new(unchecked.theta)?.with_scaling(unchecked.scaling)
    }
}

impl Frequencies {
    /// Frequencies of the base `theta`, without scaling.
    ///
    /// # Errors
    /// [`RopeError::Theta`] if `theta` is not finite and above 0.
    pub fn new(theta: f64) -> Result<Self> {
        if !(theta.is_finite() && theta > 0.0) {
            return Err(RopeError::Theta { found: theta });
        }
        Ok(Self {
            theta,
            scaling: Scaling::Default,
        })
    }

    /// The same base under another scaling.
    ///
    /// # Errors
    /// [`RopeError::ScalingParameter`] if a parameter is outside its range.
    pub fn with_scaling(self, scaling: Scaling) -> Result<Self> {
        scaling.validate(self.theta)?;
        Ok(Self { scaling, ..self })
    }

    /// The base of the geometric progression of wavelengths.
    pub fn theta(&self) -> f64 {
        self.theta
    }

    /// The context-extension scaling.
    pub fn scaling(&self) -> &Scaling {
        &self.scaling
    }

    /// Inverse frequencies of a rotation over `dims` channels: `dims / 2` values, fastest first.
    ///
    /// `seq_len` is the length of the sequence that is rotated. Only [`Scaling::Dynamic`] and
    /// [`Scaling::LongRope`] look at it; without it they take the frequencies of a sequence that
    /// fits the original context, as Hugging Face transformers does when it builds a model.
    ///
    /// # Units
    /// radians per token; `seq_len` in tokens
    /// # Numerics
    /// f64 throughout
    /// # Errors
    /// [`RopeError::OddRotaryDim`] if `dims` is odd or 0; [`RopeError::FactorCount`] if a list of
    /// LongRoPE does not hold `dims / 2` factors.
    pub fn inv_freq(&self, dims: usize, seq_len: Option<u64>) -> Result<Vec<f64>> {
        if dims == 0 || !dims.is_multiple_of(2) {
            return Err(RopeError::OddRotaryDim { found: dims });
        }
        let mut inv_freq: Vec<f64> = (0..dims / 2)
            .map(|pair| self.theta.powf(-((2 * pair) as f64) / dims as f64))
            .collect();
        self.scaling.apply(&mut inv_freq, self.theta, seq_len)?;
        Ok(inv_freq)
    }

    /// The factor on cos and sin that goes with the scaling: 1 except under YaRN and LongRoPE.
    ///
    /// It multiplies the rotated values, and so their gradients, once each for q and k.
    pub fn attention_scaling(&self) -> f64 {
        self.scaling.attention_scaling()
    }

    /// Whether the frequencies change with the length of the sequence.
    pub fn depends_on_seq_len(&self) -> bool {
        matches!(self.scaling, Scaling::Dynamic { .. } | Scaling::LongRope(_))
    }
}

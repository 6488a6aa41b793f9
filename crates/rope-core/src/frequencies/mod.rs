//! Inverse frequencies: the base `theta`, its context-extension scaling, and the matching attention
//! scaling.
//!
//! Every known scaling is one number per frequency: `inv_freq[j] = theta^(-2j / dims) *
//! multiplier[j]`. A scaling determines only the multiplier, so a new one is a new arm in one
//! function.

mod scaling;

pub use scaling::{Llama3Scaling, LongRopeScaling, Scaling, YarnScaling};

use serde::{Deserialize, Serialize};

use crate::error::{Result, RopeError};
use crate::limits::MAX_HEAD_DIM;

/// The frequencies of a rotary embedding: `theta` with a scaling, or a list. They are validated
/// once.
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
#[serde(try_from = "Values", into = "Values")]
pub struct Frequencies {
    values: Values,
}

/// The contents of a [`Frequencies`] and of its serialized form, before validation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum Values {
    Progression { theta: f64, scaling: Scaling },
    List { inv_freq: Vec<f64> },
}

impl TryFrom<Values> for Frequencies {
    type Error = RopeError;

    fn try_from(unchecked: Values) -> Result<Self> {
        match unchecked {
            Values::Progression { theta, scaling } => Self::new(theta)?.with_scaling(scaling),
            Values::List { inv_freq } => Self::listed(inv_freq),
        }
    }
}

impl From<Frequencies> for Values {
    fn from(frequencies: Frequencies) -> Self {
        frequencies.values
    }
}

impl Frequencies {
    /// Creates frequencies with the base `theta`, without scaling.
    ///
    /// # Errors
    /// [`RopeError::Theta`] if `theta` is not finite and above 0.
    pub fn new(theta: f64) -> Result<Self> {
        if !(theta.is_finite() && theta > 0.0) {
            return Err(RopeError::Theta { found: theta });
        }
        let scaling = Scaling::Default;
        let values = Values::Progression { theta, scaling };
        Ok(Self { values })
    }

    /// Takes a list of frequencies: one per lane, or any number with
    /// [`AxisLayout::Lanes`](crate::AxisLayout), which selects from the list.
    ///
    /// A lane of frequency 0 does not rotate; one of negative frequency rotates in the opposite
    /// direction, as all lanes of nanochat do.
    ///
    /// # Units
    /// radians per token, or per unit of real positions
    /// # Errors
    /// [`RopeError::Frequency`] if a frequency is NaN or too large for finite angles.
    pub fn listed(inv_freq: Vec<f64>) -> Result<Self> {
        expect_finite_angles(&inv_freq)?;
        let values = Values::List { inv_freq };
        Ok(Self { values })
    }

    /// Sets the scaling and keeps the base.
    ///
    /// # Errors
    /// [`RopeError::ScalingParameter`] if a parameter is outside its range;
    /// [`RopeError::ListScaled`] for a list.
    pub fn with_scaling(self, scaling: Scaling) -> Result<Self> {
        let theta = self.theta().ok_or_else(|| RopeError::ListScaled {
            rope_type: scaling.rope_type(),
        })?;
        scaling.validate(theta)?;
        let values = Values::Progression { theta, scaling };
        Ok(Self { values })
    }

    /// The base of the geometric progression of wavelengths; `None` for a list.
    pub fn theta(&self) -> Option<f64> {
        match &self.values {
            Values::Progression { theta, .. } => Some(*theta),
            Values::List { .. } => None,
        }
    }

    /// The context-extension scaling; [`Scaling::Default`] for a list.
    pub fn scaling(&self) -> &Scaling {
        match &self.values {
            Values::Progression { scaling, .. } => scaling,
            Values::List { .. } => &Scaling::Default,
        }
    }

    /// The number of listed frequencies.
    pub(crate) fn listed_count(&self) -> Option<usize> {
        match &self.values {
            Values::Progression { .. } => None,
            Values::List { inv_freq } => Some(inv_freq.len()),
        }
    }

    /// Inverse frequencies of a rotation over `dims` channels: `dims / 2` values, fastest first.
    ///
    /// `seq_len` is the length of the rotated sequence. Only [`Scaling::Dynamic`] and
    /// [`Scaling::LongRope`] read it. Without it, they use the frequencies of a sequence that fits
    /// the original context, as Hugging Face transformers does when it builds a model.
    ///
    /// # Units
    /// radians per token; `seq_len` in tokens
    /// # Numerics
    /// f64 throughout
    /// # Errors
    /// [`RopeError::HeadDim`] if `dims` is above [`MAX_HEAD_DIM`](crate::MAX_HEAD_DIM);
    /// [`RopeError::OddRotaryDim`] if it is odd or 0; [`RopeError::FactorCount`] if a LongRoPE list
    /// does not hold `dims / 2` factors; [`RopeError::FrequencyCount`] if a list of frequencies has
    /// a different length; [`RopeError::Frequency`] if theta or a scaling's parameters are too
    /// extreme for finite angles.
    pub fn inv_freq(&self, dims: usize, seq_len: Option<u64>) -> Result<Vec<f64>> {
        // Checked before anything is allocated.
        if dims > MAX_HEAD_DIM {
            return Err(RopeError::HeadDim {
                found: dims,
                max: MAX_HEAD_DIM,
            });
        }
        if dims == 0 || !dims.is_multiple_of(2) {
            return Err(RopeError::OddRotaryDim { found: dims });
        }
        let pairs = dims / 2;
        match &self.values {
            Values::Progression { theta, scaling } => {
                let unscaled = |pair| theta.powf(-((2 * pair) as f64) / dims as f64);
                let mut inv_freq: Vec<f64> = (0..pairs).map(unscaled).collect();
                scaling.apply(&mut inv_freq, *theta, seq_len)?;
                expect_finite_angles(&inv_freq)?;
                Ok(inv_freq)
            }
            Values::List { inv_freq } if inv_freq.len() == pairs => Ok(inv_freq.clone()),
            Values::List { inv_freq } => Err(RopeError::FrequencyCount {
                expected: pairs,
                found: inv_freq.len(),
            }),
        }
    }

    /// The factor on cos and sin that the scaling implies: 1 except under YaRN and LongRoPE.
    ///
    /// It multiplies the rotated values of q and of k, and their gradients, once each.
    pub fn attention_scaling(&self) -> f64 {
        self.scaling().attention_scaling()
    }

    /// True if the frequencies change with the length of the sequence.
    pub fn depends_on_seq_len(&self) -> bool {
        matches!(
            self.scaling(),
            Scaling::Dynamic { .. } | Scaling::LongRope(_)
        )
    }
}

/// The highest frequency for which the product with any position, summed over all axes, is finite.
const MAX_FREQUENCY: f64 = 1e280;

/// Rejects frequencies that give any position a non-finite angle.
pub(crate) fn expect_finite_angles(inv_freq: &[f64]) -> Result<()> {
    let refused = |value: &f64| !(-MAX_FREQUENCY..=MAX_FREQUENCY).contains(value);
    match inv_freq.iter().position(refused) {
        None => Ok(()),
        Some(index) => Err(RopeError::Frequency {
            index,
            found: inv_freq[index],
        }),
    }
}

//! The scalings: their parameters with permitted ranges, and the multiplier of each frequency.

use std::f64::consts::TAU;

use serde::{Deserialize, Serialize};

use crate::error::{Result, RopeError};

/// A change of the frequencies that extends a model beyond its original training context.
///
/// Serialized under the names of Hugging Face's `rope_type`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
#[non_exhaustive]
pub enum Scaling {
    /// Unchanged frequencies.
    #[default]
    Default,
    /// Every frequency divided by `factor` (position interpolation).
    ///
    /// # Source
    /// Chen et al. 2023, <https://arxiv.org/abs/2306.15595>
    Linear {
        /// Stretch of the context, above 0.
        factor: f64,
    },
    /// NTK-aware scaling that grows with the sequence: past `max_position_embeddings` tokens, theta
    /// is multiplied by `(factor * seq_len / max_position_embeddings - (factor - 1))^(dims / (dims
    /// - 2))`.
    ///
    /// # Source
    /// Peng et al. 2023, appendix B.1 "dynamic scaling", <https://arxiv.org/abs/2309.00071>
    Dynamic {
        /// Stretch of the context, at least 1.
        factor: f64,
        /// Length of the original context, in tokens.
        max_position_embeddings: u64,
    },
    /// NTK-aware scaling by a fixed `alpha`: theta is multiplied by `alpha^(dims / (dims - 2))`
    /// (Hunyuan).
    #[serde(rename = "ntk_alpha")]
    NtkAlpha {
        /// Factor on the wavelength of the slowest frequency, above 0.
        alpha: f64,
    },
    /// YaRN: fast frequencies kept, slow ones interpolated, a ramp between.
    Yarn(YarnScaling),
    /// LongRoPE: a searched divisor for each frequency.
    LongRope(LongRopeScaling),
    /// Llama 3.1: frequencies kept, interpolated or blended by their wavelength.
    Llama3(Llama3Scaling),
    /// Gemma 4: the first `partial_rotary_factor` of the pairs rotate, with exponents over the
    /// whole head. The other pairs have frequency 0.
    Proportional {
        /// Share of the pairs that rotate, in (0, 1\].
        partial_rotary_factor: f64,
        /// Divisor of every frequency, above 0.
        factor: f64,
    },
}

/// Parameters of YaRN.
///
/// # Source
/// Peng et al. 2023, section 3.4, <https://arxiv.org/abs/2309.00071>; `mscale` as in DeepSeek-V2,
/// <https://arxiv.org/abs/2405.04434>
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct YarnScaling {
    /// Stretch of the context, above 0.
    pub factor: f64,
    /// Length of the original context, in tokens.
    pub original_max_position_embeddings: u64,
    /// Rotations within the original context at and above which a frequency is unchanged. Usually
    /// 32.
    pub beta_fast: f64,
    /// Rotations within the original context up to which a frequency is divided by `factor`.
    /// Usually 1.
    pub beta_slow: f64,
    /// True if the ends of the ramp are rounded outwards to whole pairs. Usually true; false for
    /// gpt-oss.
    pub truncate: bool,
    /// Attention scaling, if the configuration states it.
    pub attention_factor: Option<f64>,
    /// With `mscale_all_dim`, sets the attention scaling to the ratio of the two temperatures.
    pub mscale: Option<f64>,
    /// See `mscale`.
    pub mscale_all_dim: Option<f64>,
}

impl YarnScaling {
    /// Creates YaRN parameters with the paper's constants: `beta_fast` 32, `beta_slow` 1, ramp
    /// rounded to whole pairs.
    pub fn new(factor: f64, original_max_position_embeddings: u64) -> Self {
        Self {
            factor,
            original_max_position_embeddings,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
        }
    }

    fn attention_scaling(&self) -> f64 {
        let temperature = |mscale: f64| 0.1 * mscale * self.factor.ln().max(0.0) + 1.0;
        // A zero mscale means "not stated" in the checkpoints that carry it.
        let stated = |mscale: Option<f64>| mscale.filter(|mscale| *mscale != 0.0);
        self.attention_factor.unwrap_or_else(|| {
            match (stated(self.mscale), stated(self.mscale_all_dim)) {
                (Some(mscale), Some(all_dim)) => temperature(mscale) / temperature(all_dim),
                _ => temperature(1.0),
            }
        })
    }

    /// Weight of interpolation for each of `pairs` frequencies: 0 keeps a frequency, 1 divides it
    /// by `factor`.
    fn interpolation(&self, pairs: usize, theta: f64) -> impl Fn(usize) -> f64 {
        let dims = (2 * pairs) as f64;
        // The (fractional) pair with `turns` rotations within the original context.
        let pair_of = |turns: f64| {
            dims * (self.original_max_position_embeddings as f64 / (turns * TAU)).ln()
                / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (pair_of(self.beta_fast), pair_of(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, high) = (low.max(0.0), high.min(dims - 1.0));
        // The published code widens an empty ramp by this much instead of dividing by 0;
        // checkpoints were trained with it.
        let width = if low == high { 0.001 } else { high - low };
        move |pair| ((pair as f64 - low) / width).clamp(0.0, 1.0)
    }
}

/// Parameters of LongRoPE.
///
/// # Source
/// Ding et al. 2024, <https://arxiv.org/abs/2402.13753>; attention scaling: Abdin et al. 2024
/// (Phi-3), <https://arxiv.org/abs/2404.14219>
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LongRopeScaling {
    /// Divisor of each frequency for sequences that fit the original context.
    pub short_factor: Vec<f64>,
    /// Divisor of each frequency for longer sequences.
    pub long_factor: Vec<f64>,
    /// Length of the original context, in tokens.
    pub original_max_position_embeddings: u64,
    /// Stretch of the context, above 0; sets the attention scaling `sqrt(1 + ln factor / ln
    /// original)`.
    pub factor: f64,
    /// Attention scaling, if the configuration states it.
    pub attention_factor: Option<f64>,
}

impl LongRopeScaling {
    fn attention_scaling(&self) -> f64 {
        self.attention_factor.unwrap_or_else(|| {
            let original = self.original_max_position_embeddings as f64;
            (1.0 + self.factor.ln().max(0.0) / original.ln()).sqrt()
        })
    }

    fn divisors(&self, seq_len: Option<u64>) -> (&'static str, &[f64]) {
        if seq_len.is_some_and(|seq_len| seq_len > self.original_max_position_embeddings) {
            ("long_factor", &self.long_factor)
        } else {
            ("short_factor", &self.short_factor)
        }
    }
}

/// Parameters of the scaling of Llama 3.1.
///
/// # Source
/// Grattafiori et al. 2024, <https://arxiv.org/abs/2407.21783>; the blend is in the code published
/// with the model, `apply_scaling` in <https://github.com/meta-llama/llama-models>
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Llama3Scaling {
    /// Divisor of the slow frequencies, above 0.
    pub factor: f64,
    /// Rotations within the original context below which a frequency is divided by `factor`.
    pub low_freq_factor: f64,
    /// Rotations within the original context above which a frequency is unchanged; at least
    /// `low_freq_factor`. If the two are equal, as in Llama 4 Scout, no frequency is blended.
    pub high_freq_factor: f64,
    /// Length of the original context, in tokens.
    pub original_max_position_embeddings: u64,
}

impl Scaling {
    /// The name of this scaling in a Hugging Face configuration.
    pub fn rope_type(&self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Linear { .. } => "linear",
            Self::Dynamic { .. } => "dynamic",
            Self::NtkAlpha { .. } => "ntk_alpha",
            Self::Yarn(_) => "yarn",
            Self::LongRope(_) => "longrope",
            Self::Llama3(_) => "llama3",
            Self::Proportional { .. } => "proportional",
        }
    }

    pub(super) fn attention_scaling(&self) -> f64 {
        match self {
            Self::Yarn(yarn) => yarn.attention_scaling(),
            Self::LongRope(longrope) => longrope.attention_scaling(),
            _ => 1.0,
        }
    }

    /// Multiplies each unscaled frequency by its multiplier under this scaling.
    pub(super) fn apply(
        &self,
        inv_freq: &mut [f64],
        theta: f64,
        seq_len: Option<u64>,
    ) -> Result<()> {
        let pairs = inv_freq.len();
        // theta * ratio^(dims / (dims - 2)) lengthens the slowest wavelength by `ratio` and keeps
        // the fastest. A single pair is the fastest one.
        let ntk = |ratio: f64| {
            move |pair: usize, _| ratio.powf(-(pair as f64) / (pairs - 1).max(1) as f64)
        };
        match self {
            Self::Default => {}
            Self::Linear { factor } => multiply(inv_freq, |_, _| 1.0 / factor),
            Self::Dynamic {
                factor,
                max_position_embeddings,
            } => {
                let context = *max_position_embeddings as f64;
                let seq_len = seq_len.map_or(context, |seq_len| (seq_len as f64).max(context));
                multiply(inv_freq, ntk(factor * seq_len / context - (factor - 1.0)));
            }
            Self::NtkAlpha { alpha } => multiply(inv_freq, ntk(*alpha)),
            Self::Yarn(yarn) => {
                let interpolation = yarn.interpolation(pairs, theta);
                multiply(inv_freq, |pair, _| {
                    let weight = interpolation(pair);
                    weight / yarn.factor + (1.0 - weight)
                });
            }
            Self::LongRope(longrope) => {
                let (list, divisors) = longrope.divisors(seq_len);
                expect_factors(list, pairs, divisors.len())?;
                multiply(inv_freq, |pair, _| 1.0 / divisors[pair]);
            }
            Self::Llama3(llama3) => multiply(inv_freq, |_, inv_freq| {
                let turns = llama3.original_max_position_embeddings as f64 * inv_freq / TAU;
                let (low, high) = (llama3.low_freq_factor, llama3.high_freq_factor);
                let keep = if turns < high {
                    // Without a band, low rotation counts give minus infinity here, never 0 / 0.
                    ((turns - low) / (high - low)).max(0.0)
                } else {
                    1.0
                };
                (1.0 - keep) / llama3.factor + keep
            }),
            Self::Proportional {
                partial_rotary_factor,
                factor,
            } => {
                let turning = (partial_rotary_factor * pairs as f64) as usize;
                multiply(
                    inv_freq,
                    |pair, _| if pair < turning { 1.0 / factor } else { 0.0 },
                );
            }
        }
        Ok(())
    }

    /// Checks every parameter against its range.
    pub(super) fn validate(&self, theta: f64) -> Result<()> {
        let rope_type = self.rope_type();
        let check = |parameter, valid: bool, expected, found: f64| {
            if valid && found.is_finite() {
                return Ok(());
            }
            Err(RopeError::ScalingParameter {
                rope_type,
                parameter,
                expected,
                found,
            })
        };
        let above_0 = |parameter, found: f64| check(parameter, found > 0.0, "above 0", found);
        let optional_above_0 =
            |parameter, found: Option<f64>| found.map_or(Ok(()), |found| above_0(parameter, found));
        let context =
            |parameter, found: u64| check(parameter, found > 1, "at least 2 tokens", found as f64);
        let original = |tokens| context("original_max_position_embeddings", tokens);
        let at_least = |parameter, found: f64, least: f64, expected| {
            check(parameter, found >= least, expected, found)
        };
        match self {
            Self::Default => Ok(()),
            Self::Linear { factor } => above_0("factor", *factor),
            Self::Dynamic {
                factor,
                max_position_embeddings,
            } => {
                at_least("factor", *factor, 1.0, "at least 1")?;
                context("max_position_embeddings", *max_position_embeddings)
            }
            Self::NtkAlpha { alpha } => above_0("alpha", *alpha),
            Self::Yarn(yarn) => {
                check("rope_theta", theta > 1.0, "above 1", theta)?;
                above_0("factor", yarn.factor)?;
                above_0("beta_slow", yarn.beta_slow)?;
                let fast = yarn.beta_fast;
                at_least("beta_fast", fast, yarn.beta_slow, "at least beta_slow")?;
                original(yarn.original_max_position_embeddings)?;
                optional_above_0("attention_factor", yarn.attention_factor)?;
                let (mscale, all_dim) = (yarn.mscale, yarn.mscale_all_dim);
                at_least("mscale", mscale.unwrap_or(0.0), 0.0, "at least 0")?;
                at_least("mscale_all_dim", all_dim.unwrap_or(0.0), 0.0, "at least 0")
            }
            Self::LongRope(longrope) => {
                original(longrope.original_max_position_embeddings)?;
                above_0("factor", longrope.factor)?;
                optional_above_0("attention_factor", longrope.attention_factor)?;
                let (short, long) = (&longrope.short_factor, &longrope.long_factor);
                for (list, divisors) in [("short_factor", short), ("long_factor", long)] {
                    divisors
                        .iter()
                        .try_for_each(|divisor| above_0(list, *divisor))?;
                }
                expect_factors("long_factor", short.len(), long.len())
            }
            Self::Llama3(llama3) => {
                above_0("factor", llama3.factor)?;
                above_0("low_freq_factor", llama3.low_freq_factor)?;
                let (low, high) = (llama3.low_freq_factor, llama3.high_freq_factor);
                at_least("high_freq_factor", high, low, "at least low_freq_factor")?;
                original(llama3.original_max_position_embeddings)
            }
            Self::Proportional {
                partial_rotary_factor,
                factor,
            } => {
                let (share, parameter) = (*partial_rotary_factor, "partial_rotary_factor");
                check(parameter, share > 0.0 && share <= 1.0, "in (0, 1]", share)?;
                above_0("factor", *factor)
            }
        }
    }
}

fn expect_factors(list: &'static str, expected: usize, found: usize) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(RopeError::FactorCount {
        list,
        expected,
        found,
    })
}

/// Multiplies each frequency by `multiplier(pair, inv_freq)`.
fn multiply(inv_freq: &mut [f64], multiplier: impl Fn(usize, f64) -> f64) {
    for (pair, inv_freq) in inv_freq.iter_mut().enumerate() {
        *inv_freq *= multiplier(pair, *inv_freq);
    }
}

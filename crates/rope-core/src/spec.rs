//! The rotation of a configuration, validated once.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Result, RopeError};
use crate::frequencies::Frequencies;
use crate::lanes::{AxisLayout, LaneMap};
use crate::limits::MAX_HEAD_DIM;

/// The channels of the rotated part that pair; R is `rotary_dim`, P = R/2 the number of pairs.
///
/// The pairing is independent of the axis that drives each pair ([`AxisLayout`]). Both are called
/// "interleaved" in other code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pairing {
    /// Channel j with j + P (GPT-NeoX, Llama, Qwen).
    Half,
    /// Channel 2j with 2j + 1 (GPT-J, GLM, ERNIE, Flux).
    Adjacent,
    /// Each half of the rotated part is paired by halves: j with j + R/4, and R/2 + j with 3R/4 + j
    /// (CANN mode 2). Needs R divisible by 4.
    Quarter,
    /// Reads 2j with 2j + 1, writes j and j + P: the output is de-interleaved (CANN mode 3,
    /// DeepSeek's rotation). The adjoint reads j with j + P and writes 2j and 2j + 1.
    InterleaveHalf,
}

impl Pairing {
    /// All pairings.
    pub const ALL: [Pairing; 4] = [
        Self::Half,
        Self::Adjacent,
        Self::Quarter,
        Self::InterleaveHalf,
    ];
}

/// The rotated channels of a head and their pairing. Kernels know nothing else about a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "RawGeometry", into = "RawGeometry")]
pub struct Geometry {
    raw: RawGeometry,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct RawGeometry {
    head_dim: usize,
    rotary_dim: usize,
    rotary_offset: usize,
    pairing: Pairing,
    per_channel: bool,
}

impl TryFrom<RawGeometry> for Geometry {
    type Error = RopeError;
    fn try_from(raw: RawGeometry) -> Result<Self> {
        Geometry::new(
            raw.head_dim,
            raw.rotary_dim,
            raw.rotary_offset,
            raw.pairing,
            raw.per_channel,
        )
    }
}

impl From<Geometry> for RawGeometry {
    fn from(geometry: Geometry) -> Self {
        geometry.raw
    }
}

impl Geometry {
    /// Creates and validates the geometry of a rotation.
    ///
    /// With `per_channel`, the two members of a pair have separate angles.
    ///
    /// # Errors
    /// [`RopeError::HeadDim`], [`RopeError::OddRotaryDim`], [`RopeError::RotaryOutsideHead`],
    /// [`RopeError::PairingDivisibility`].
    pub fn new(
        head_dim: usize,
        rotary_dim: usize,
        rotary_offset: usize,
        pairing: Pairing,
        per_channel: bool,
    ) -> Result<Self> {
        if head_dim == 0 || head_dim > MAX_HEAD_DIM {
            return Err(RopeError::HeadDim {
                found: head_dim,
                max: MAX_HEAD_DIM,
            });
        }
        if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
            return Err(RopeError::OddRotaryDim { found: rotary_dim });
        }
        if rotary_dim
            .checked_add(rotary_offset)
            .is_none_or(|end| end > head_dim)
        {
            return Err(RopeError::RotaryOutsideHead {
                rotary_dim,
                offset: rotary_offset,
                head_dim,
            });
        }
        if pairing == Pairing::Quarter && !rotary_dim.is_multiple_of(4) {
            return Err(RopeError::PairingDivisibility {
                pairing,
                divisor: 4,
                found: rotary_dim,
            });
        }
        Ok(Self {
            raw: RawGeometry {
                head_dim,
                rotary_dim,
                rotary_offset,
                pairing,
                per_channel,
            },
        })
    }

    /// Channels of a head.
    pub fn head_dim(&self) -> usize {
        self.raw.head_dim
    }
    /// Rotated channels of a head.
    pub fn rotary_dim(&self) -> usize {
        self.raw.rotary_dim
    }
    /// First rotated channel of a head.
    pub fn rotary_offset(&self) -> usize {
        self.raw.rotary_offset
    }
    /// The channels that pair.
    pub fn pairing(&self) -> Pairing {
        self.raw.pairing
    }
    /// True if the members of a pair have separate angles.
    pub fn per_channel(&self) -> bool {
        self.raw.per_channel
    }
    /// Pairs of channels, `rotary_dim / 2`.
    pub fn pairs(&self) -> usize {
        self.raw.rotary_dim / 2
    }
    /// The number of lanes of a token: `pairs`, or `rotary_dim` (first members, then second ones)
    /// with angles per channel.
    pub fn lane_count(&self) -> usize {
        if self.raw.per_channel {
            self.raw.rotary_dim
        } else {
            self.pairs()
        }
    }
}

/// The complete rotation of a model's configuration.
///
/// Built by [`RotarySpec::builder`] or read from a Hugging Face configuration; validated once.
///
/// # Examples
/// ```
/// use rope_core::{AxisLayout, Pairing, RotarySpec};
/// // Qwen2-VL's text decoder
/// let spec = RotarySpec::builder(128)
///     .pairing(Pairing::Half)
///     .axis_layout(AxisLayout::Contiguous(vec![16, 24, 24]))
///     .theta(1_000_000.0)
///     .build()?;
/// assert_eq!(spec.axis_count(), 3);
/// # Ok::<(), rope_core::RopeError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "RotarySpecBuilder", into = "RotarySpecBuilder")]
pub struct RotarySpec {
    geometry: Geometry,
    axis_layout: AxisLayout,
    frequencies: Frequencies,
    attention_scaling: f64,
    lane_map: Arc<LaneMap>,
}

/// Prints the rotation on one line, without its lanes, which `Debug` lists.
impl fmt::Display for RotarySpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} channels rotated, {:?} pairs, axes {:?}, {:?}",
            self.rotary_dim(),
            self.head_dim(),
            self.pairing(),
            self.axis_layout(),
            self.frequencies(),
        )
    }
}

impl RotarySpec {
    /// Starts a specification for heads of `head_dim` channels. By default, all channels rotate,
    /// paired by halves, on one axis, with theta 10,000.
    pub fn builder(head_dim: usize) -> RotarySpecBuilder {
        RotarySpecBuilder {
            head_dim,
            rotary_dim: None,
            rotary_offset: 0,
            pairing: Pairing::Half,
            axis_layout: AxisLayout::Single,
            theta: None,
            frequencies: None,
            attention_scaling: None,
        }
    }

    /// The geometry, the part of the specification that kernels need.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }
    /// Channels of a head.
    pub fn head_dim(&self) -> usize {
        self.geometry.head_dim()
    }
    /// Rotated channels of a head.
    pub fn rotary_dim(&self) -> usize {
        self.geometry.rotary_dim()
    }
    /// First rotated channel of a head.
    pub fn rotary_offset(&self) -> usize {
        self.geometry.rotary_offset()
    }
    /// The channels that pair.
    pub fn pairing(&self) -> Pairing {
        self.geometry.pairing()
    }
    /// The axis of each lane.
    pub fn axis_layout(&self) -> &AxisLayout {
        &self.axis_layout
    }
    /// The number of position axes.
    pub fn axis_count(&self) -> usize {
        self.axis_layout.axis_count()
    }
    /// Theta and its scaling, or a list.
    pub fn frequencies(&self) -> &Frequencies {
        &self.frequencies
    }
    /// The factor on cos and sin, and thus on the gradients of q and k.
    pub fn attention_scaling(&self) -> f64 {
        self.attention_scaling
    }
    /// Axis and frequency of each lane.
    pub fn lane_map(&self) -> &Arc<LaneMap> {
        &self.lane_map
    }

    /// The distinct inverse frequencies in radians per token, indexed by
    /// [`Lane::frequency`](crate::Lane).
    ///
    /// `seq_len` affects scalings that depend on the length (dynamic, longrope). `None` means a
    /// length within the original context.
    ///
    /// # Errors
    /// Those of [`Frequencies::inv_freq`].
    pub fn inv_freq(&self, seq_len: Option<u64>) -> Result<Vec<f64>> {
        let mut inv_freq = Vec::with_capacity(self.lane_map.frequency_count());
        for dims in self.lane_map.frequency_dims() {
            inv_freq.extend(self.frequencies.inv_freq(*dims, seq_len)?);
        }
        Ok(inv_freq)
    }
}

/// Builder of a [`RotarySpec`]; [`build`](Self::build) validates it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RotarySpecBuilder {
    head_dim: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rotary_dim: Option<usize>,
    #[serde(default)]
    rotary_offset: usize,
    pairing: Pairing,
    axis_layout: AxisLayout,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    theta: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    frequencies: Option<Frequencies>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attention_scaling: Option<f64>,
}

impl RotarySpecBuilder {
    /// Rotates `rotary_dim` channels of each head; the others pass through bit for bit.
    pub fn rotary_dim(mut self, rotary_dim: usize) -> Self {
        self.rotary_dim = Some(rotary_dim);
        self
    }
    /// Rotates the channels from `rotary_offset` on.
    pub fn rotary_offset(mut self, rotary_offset: usize) -> Self {
        self.rotary_offset = rotary_offset;
        self
    }
    /// Sets the pairing of channels.
    pub fn pairing(mut self, pairing: Pairing) -> Self {
        self.pairing = pairing;
        self
    }
    /// Sets the axis of each lane.
    pub fn axis_layout(mut self, axis_layout: AxisLayout) -> Self {
        self.axis_layout = axis_layout;
        self
    }
    /// Sets unscaled frequencies with this base.
    pub fn theta(mut self, theta: f64) -> Self {
        self.theta = Some(theta);
        self.frequencies = None;
        self
    }
    /// Sets the frequencies, with a scaling or from a list.
    pub fn frequencies(mut self, frequencies: Frequencies) -> Self {
        self.frequencies = Some(frequencies);
        self.theta = None;
        self
    }
    /// Replaces the factor on cos and sin that the frequency scaling implies.
    pub fn attention_scaling(mut self, attention_scaling: f64) -> Self {
        self.attention_scaling = Some(attention_scaling);
        self
    }

    /// Checks everything and compiles the lane map.
    ///
    /// # Errors
    /// Those of [`Geometry::new`], [`RopeError::SectionCount`], [`RopeError::SectionSum`],
    /// [`RopeError::SectionsNotRealisable`], [`RopeError::LaneCount`],
    /// [`RopeError::LaneOutOfRange`], [`RopeError::FrequencyCount`], [`RopeError::Frequency`],
    /// [`RopeError::Theta`], [`RopeError::AttentionScaling`].
    pub fn build(self) -> Result<RotarySpec> {
        let rotary_dim = self
            .rotary_dim
            .unwrap_or_else(|| self.head_dim.saturating_sub(self.rotary_offset));
        let per_channel = match &self.axis_layout {
            AxisLayout::PerChannel(_) => true,
            AxisLayout::Lanes(lanes) => lanes.len() == rotary_dim,
            _ => false,
        };
        let geometry = Geometry::new(
            self.head_dim,
            rotary_dim,
            self.rotary_offset,
            self.pairing,
            per_channel,
        )?;
        let frequencies = match self.frequencies {
            Some(frequencies) => frequencies,
            None => Frequencies::new(self.theta.unwrap_or(10_000.0))?,
        };
        let listed = frequencies.listed_count();
        let lane_map = LaneMap::new(&self.axis_layout, geometry.pairs(), listed)?;
        let attention_scaling = self
            .attention_scaling
            .unwrap_or_else(|| frequencies.attention_scaling());
        if !(attention_scaling.is_finite() && attention_scaling > 0.0) {
            return Err(RopeError::AttentionScaling {
                found: attention_scaling,
            });
        }
        let spec = RotarySpec {
            geometry,
            axis_layout: self.axis_layout,
            frequencies,
            attention_scaling,
            lane_map: Arc::new(lane_map),
        };
        // Rejects a scaling with factor lists that do not fit the lanes here rather than at the
        // first step.
        spec.inv_freq(None)?;
        Ok(spec)
    }
}

impl TryFrom<RotarySpecBuilder> for RotarySpec {
    type Error = RopeError;
    fn try_from(builder: RotarySpecBuilder) -> Result<Self> {
        builder.build()
    }
}

impl From<RotarySpec> for RotarySpecBuilder {
    fn from(spec: RotarySpec) -> Self {
        Self {
            head_dim: spec.head_dim(),
            rotary_dim: Some(spec.rotary_dim()),
            rotary_offset: spec.rotary_offset(),
            pairing: spec.pairing(),
            axis_layout: spec.axis_layout,
            theta: None,
            frequencies: Some(spec.frequencies),
            attention_scaling: Some(spec.attention_scaling),
        }
    }
}

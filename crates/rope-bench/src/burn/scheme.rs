//! The ways to rotate in burn.

use std::error::Error;

use crate::names;
use burn::nn::{RotaryEncoding, RotaryEncodingConfig};
use burn::tensor::{Device, Tensor};
use rope_burn::{Implementation, Rotary, RotaryAngles};
use rope_core::{Layout, Positions, RotarySpec};

/// A way to rotate tensors `[batch, heads, seq, head_dim]`.
#[allow(clippy::large_enum_variant, reason = "one of each in a run")]
pub(super) enum Scheme {
    /// rope-burn's.
    Rotary(Rotary, RotaryAngles),
    /// burn's own: adjacent pairs, the whole head, positions from 0.
    Encoding(RotaryEncoding),
}

/// A scheme by name; none where it cannot rotate the shape, or where nothing is to be rotated.
pub(super) type NamedScheme = (&'static str, Option<Scheme>);

impl Scheme {
    /// The schemes that are compared. burn's own is absent where it cannot rotate the shape.
    ///
    /// # Errors
    /// If the positions do not fit the specification.
    pub(super) fn all(
        spec: &RotarySpec,
        positions: &Positions,
        device: &Device,
    ) -> Result<Vec<NamedScheme>, Box<dyn Error>> {
        let rotary = Rotary::new(spec.clone(), Layout::Bnsd);
        let angles = rotary.try_angles(positions, device)?;
        let ours = |implementation| {
            let rotary = rotary.clone().with_implementation(implementation);
            Some(Self::Rotary(rotary, angles.clone()))
        };
        let encoding = || {
            let config = RotaryEncodingConfig::new(positions.tokens(), spec.head_dim());
            Self::Encoding(config.with_theta(THETA).init(device))
        };
        let whole = spec.rotary_dim() == spec.head_dim();
        Ok(vec![
            (names::FUSED, ours(Implementation::Fused)),
            (names::COMPOSED, ours(Implementation::Composed)),
            (names::ROTARY_ENCODING, whole.then(encoding)),
        ])
    }

    /// Rotates q and k.
    pub(super) fn pair(&self, q: Tensor<4>, k: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
        match self {
            Self::Rotary(rotary, angles) => rotary.forward(q, k, angles),
            Self::Encoding(encoding) => (encoding.forward(q), encoding.forward(k)),
        }
    }

    /// Rotates one tensor.
    pub(super) fn single(&self, x: Tensor<4>) -> Tensor<4> {
        match self {
            Self::Rotary(rotary, angles) => rotary.forward_single(x, angles),
            Self::Encoding(encoding) => encoding.forward(x),
        }
    }
}

/// The base of the frequencies of [`crate::shapes::Shape::spec`].
const THETA: f32 = 1e6;

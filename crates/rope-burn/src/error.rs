//! The crate's error type.

use burn::tensor::DType;
use burn_fused::OpError;
use rope_core::{Layout, RopeError};

/// The result of this crate's functions.
pub type Result<T, E = RotaryError> = std::result::Result<T, E>;

/// Errors of a call. [`RopeError`] has those of shapes, angles and positions, [`OpError`] those of
/// types and devices.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RotaryError {
    /// An invalid specification, shape or position.
    #[error(transparent)]
    Rope(#[from] RopeError),
    /// Types, devices, or numbers from another version.
    #[error(transparent)]
    Op(#[from] OpError),
    /// Angles in a type that would lose precision, or that the kernels do not support.
    #[error(
        "{what}: found {found:?}, expected {expected:?}: angles have the type of the computation; \
         Rotary::try_angles_for computes them for a type"
    )]
    AngleDType {
        /// The angles, or the part of them.
        what: &'static str,
        /// Their type.
        found: DType,
        /// The type required for the tensors to rotate.
        expected: DType,
    },
    /// A tensor whose rank differs from its layout's.
    #[error("{what} has {found} dimensions, layout {layout:?} has {expected}")]
    Rank {
        /// The tensor.
        what: &'static str,
        /// The layout.
        layout: Layout,
        /// The layout's number of dimensions.
        expected: usize,
        /// The tensor's number of dimensions.
        found: usize,
    },
    /// Batches or tokens that disagree, with the sizes read from the layout.
    #[error("{source}; {reading}")]
    Layout {
        /// The disagreement.
        source: Box<RopeError>,
        /// The heads and tokens that the layout implies for the shapes.
        reading: String,
    },
    /// Position ids on a device that could not be read back.
    #[error("the position ids could not be read from their device: {reason}")]
    Positions {
        /// The backend's message.
        reason: String,
    },
}

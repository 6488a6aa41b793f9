//! The crate's error type.

use burn::tensor::DType;
use burn_fused::OpError;
use rope_core::{Layout, RopeError};

/// What this crate returns.
pub type Result<T, E = RotaryError> = std::result::Result<T, E>;

/// What can be wrong with a call beyond what [`RopeError`] says of shapes, angles and positions, and
/// [`OpError`] of types and devices.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RotaryError {
    /// A specification, a shape or positions are wrong.
    #[error(transparent)]
    Rope(#[from] RopeError),
    /// Types, devices, or numbers from another version.
    #[error(transparent)]
    Op(#[from] OpError),
    /// Angles in a type that would lose precision, or that the kernels do not compute in.
    #[error(
        "{what}: found {found:?}, expected {expected:?}: angles keep the type that is computed in; \
         Rotary::try_angles_for makes them for a type"
    )]
    AngleDType {
        /// The angles, or a part of them.
        what: &'static str,
        /// Their type.
        found: DType,
        /// The type that they must have for the tensors to rotate.
        expected: DType,
    },
    /// A tensor of another rank than its layout.
    #[error("{what} has {found} dimensions, layout {layout:?} has {expected}")]
    Rank {
        /// Which tensor.
        what: &'static str,
        /// The layout.
        layout: Layout,
        /// Its dimensions.
        expected: usize,
        /// The tensor's dimensions.
        found: usize,
    },
    /// Position ids on a device that could not be read back.
    #[error("the position ids could not be read from their device: {reason}")]
    Positions {
        /// What the backend said.
        reason: String,
    },
}

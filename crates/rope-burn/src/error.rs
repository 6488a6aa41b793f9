//! The crate's error type.

use burn::tensor::DType;
use rope_core::{Layout, RopeError};

/// What this crate returns.
pub type Result<T, E = RotaryError> = std::result::Result<T, E>;

/// What can be wrong with a call beyond what [`RopeError`] says of shapes, angles and positions.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RotaryError {
    /// A specification, a shape or positions are wrong.
    #[error(transparent)]
    Rope(#[from] RopeError),
    /// q and k of two types: burn does not promote types, and neither does this operation.
    #[error("q is {q:?}, k is {k:?}; cast one of them: q and k must have one type")]
    MixedDTypes {
        /// Type of q.
        q: DType,
        /// Type of k.
        k: DType,
    },
    /// Tensors on several devices.
    #[error("{what} is on {found}, expected {expected}; move it there by `to_device`")]
    Device {
        /// The tensor.
        what: &'static str,
        /// Its device.
        found: String,
        /// The device of the other tensors.
        expected: String,
    },
    /// A type without kernels.
    #[error("{found:?} cannot be rotated; expected F32, F16, BF16 or F64")]
    UnsupportedDType {
        /// The type found.
        found: DType,
    },
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
    /// A norm's weight in a type that the kernels do not compute in.
    #[error("{what}: found {found:?}, expected {expected:?}, the type of the angles; cast it")]
    NormWeightDType {
        /// Which weight.
        what: &'static str,
        /// Its type.
        found: DType,
        /// The type that it must have for the tensors to normalise.
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
    /// An operation arrived that this version does not know.
    #[cfg(feature = "remote")]
    #[error(
        "a rotation cannot be read: {what} is {found}, expected {expected}; \
         build client and server from one release"
    )]
    Wire {
        /// Which number.
        what: &'static str,
        /// What this version reads.
        expected: String,
        /// The number found.
        found: String,
    },
    /// Position ids on a device that could not be read back.
    #[error("the position ids could not be read from their device: {reason}")]
    Positions {
        /// What the backend said.
        reason: String,
    },
}

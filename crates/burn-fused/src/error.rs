//! Errors of a call of any operation.

use std::fmt::Display;

use burn::tensor::DType;

/// The value, or a panic with the error as its message: for methods that have a `try_` twin. The
/// panic names the caller's line where that method is `#[track_caller]` too.
///
/// # Panics
/// If there is an error.
#[track_caller]
pub fn or_panic<T, E: Display>(result: Result<T, E>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}

/// An error of a call, whatever the operation computes. The error of a crate with
/// operations contains it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OpError {
    /// Tensors of several types: burn does not promote types, and neither do these operations.
    #[error("{what} is {found:?}, expected {expected:?}; cast it")]
    MixedDTypes {
        /// The tensor.
        what: &'static str,
        /// Its type.
        found: DType,
        /// The type that it must have.
        expected: DType,
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
    /// A type that nothing is computed in.
    #[error("{found:?} is not computed with; expected F32, F16, BF16 or F64")]
    UnsupportedDType {
        /// The type found.
        found: DType,
    },
    /// An operation that came from a client of another version, or damaged.
    #[error("{what} is {found}, expected {expected}; client and server must be of one release")]
    Wire {
        /// The number, or the tensor.
        what: &'static str,
        /// The value that fits.
        expected: String,
        /// The value given.
        found: String,
    },
}

//! Errors common to all operations.

use std::fmt::Display;

use burn::tensor::DType;

/// Returns the value, or panics with the error as its message; for methods with a `try_` twin. The
/// panic reports the caller's line if that method is `#[track_caller]` as well.
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

/// An error of a call to any operation. The error type of each crate with operations contains it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OpError {
    /// Tensors of different types: like burn, these operations do not promote types.
    #[error("{what} is {found:?}, expected {expected:?}; cast it")]
    MixedDTypes {
        /// The tensor.
        what: &'static str,
        /// Its type.
        found: DType,
        /// The type required.
        expected: DType,
    },
    /// Tensors on different devices.
    #[error("{what} is on {found}, expected {expected}; move it there by `to_device`")]
    Device {
        /// The tensor.
        what: &'static str,
        /// Its device.
        found: String,
        /// The device of the other tensors.
        expected: String,
    },
    /// An unsupported element type.
    #[error("element type {found:?} is not supported; expected F32, F16, BF16 or F64")]
    UnsupportedDType {
        /// The type found.
        found: DType,
    },
    /// An operation from a client of a different version, or damaged in transit.
    #[error("{what} is {found}, expected {expected}; client and server must be of one release")]
    Wire {
        /// The number, or the tensor.
        what: &'static str,
        /// The value expected.
        expected: String,
        /// The value found.
        found: String,
    },
}

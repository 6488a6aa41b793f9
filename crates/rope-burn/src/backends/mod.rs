//! The backends of burn's dispatch.

#[cfg(feature = "flex")]
mod flex;

/// CubeCL backends compose the rotation; a kernel of their own is to come.
#[cfg(feature = "cube")]
impl crate::RotaryOps for burn::backend::Cube {}

#[cfg(feature = "remote")]
impl crate::RotaryOps for burn::backend::Remote {}

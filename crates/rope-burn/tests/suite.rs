//! Errors, and rotations on a served device. One program: each would link all of burn.

mod errors;
#[cfg(feature = "remote-server")]
mod remote;

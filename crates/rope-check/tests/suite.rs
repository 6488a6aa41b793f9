//! Kernels against the oracle, and dumps. One program: each would link all of burn.

mod differential;
mod dumps;
mod properties;

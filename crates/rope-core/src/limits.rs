//! Limits on the sizes in specifications.

/// The widest head that the kernels index.
pub const MAX_HEAD_DIM: usize = 1 << 16;
/// The most position axes that a lane map carries.
pub const MAX_AXES: usize = 4;

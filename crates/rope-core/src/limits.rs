//! Limits on the sizes in specifications.

/// The largest number of channels per head that the kernels support.
pub const MAX_HEAD_DIM: usize = 1 << 16;
/// The largest number of position axes of a lane map.
pub const MAX_AXES: usize = 4;

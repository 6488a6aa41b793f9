//! The backends of burn's dispatch.

burn_fused::reaches!(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Remote: cfg(feature = "remote"),
);

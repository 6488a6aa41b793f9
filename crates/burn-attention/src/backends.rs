//! The backends of burn's dispatch.

burn_fused::reaches!();

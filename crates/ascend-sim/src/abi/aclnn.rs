//! The operator library's functions: descriptors and stock operators.
pub(crate) fn table() -> Vec<crate::abi::Export> { Vec::new() }

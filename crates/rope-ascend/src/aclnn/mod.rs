//! The stock operators.

//! Benchmarks as a user runs them.

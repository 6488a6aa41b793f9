//! The suites that share a process, since each program links all of burn. Suites that count memory,
//! or calls of the simulator or a GPU, are separate programs.
#![allow(clippy::disallowed_methods, reason = "test code")]

mod batches;
mod extremes;
#[path = "../crates/vlm-data/tests/folder/mod.rs"]
mod folder;
mod frequencies;
mod golden;
mod gradients;
mod padded_loss;
mod position_ids;
mod random;
mod save;
mod served_attention;
mod shards;
mod small_shapes;
mod towers;

//! The suites that share a process: each program would link all of burn. Those that count memory,
//! the simulator's calls or a GPU's are programs of their own.

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

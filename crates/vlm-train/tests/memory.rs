//! The memory of training steps, in a separate program: the allocator counts the whole process.

#![allow(clippy::unwrap_used, reason = "test code")]

use std::sync::Mutex;

use rope_check::alloc::CountingAllocator;

mod common;
mod pairs_memory;
mod plan;
mod plan_rows;
mod recompute;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// One test at a time: a neighbour's allocations would be counted, and what is freed of its graphs.
static ALONE: Mutex<()> = Mutex::new(());

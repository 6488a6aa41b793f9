//! `mrope bench memory`.

mod measure;
mod plan;
mod table;

pub(super) use plan::{MemoryArgs, run};

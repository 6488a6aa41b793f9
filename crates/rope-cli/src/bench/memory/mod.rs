//! `mrope bench memory`.

mod attention;
mod plan;
mod table;

pub(super) use plan::{MemoryArgs, run};

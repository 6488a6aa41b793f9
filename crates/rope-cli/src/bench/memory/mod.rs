//! `mrope bench memory`.

mod attention;
mod measure;
mod plan;
mod table;

pub(super) use measure::float;
pub(super) use plan::{MemoryArgs, run};

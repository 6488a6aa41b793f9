//! What `mrope verify`, `mrope gradcheck` and the tests share: the implementations under test
//! under one trait, and the checks that run over all of them.

pub mod alloc;
#[cfg(feature = "ascend")]
pub mod ascend;
pub mod buffer;
pub mod cases;
pub mod engine;
mod fixtures;
pub mod golden;
#[cfg(feature = "burn")]
pub mod gradcheck;
#[cfg(feature = "models")]
pub mod model;
pub mod names;
pub mod tolerance;

pub use fixtures::fixtures;

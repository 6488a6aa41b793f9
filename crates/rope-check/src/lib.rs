//! What `mrope verify`, `mrope gradcheck` and the tests share: the implementations under test behind one trait, and the
//! checks that run over all of them.

pub mod alloc;
#[cfg(feature = "ascend")]
pub mod ascend;
pub mod buffer;
pub mod cases;
pub mod engine;
pub mod golden;
#[cfg(feature = "burn")]
pub mod gradcheck;
pub mod tolerance;

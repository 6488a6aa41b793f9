//! The cases: a file per trait, and the methods that several kinds of tensors have.

pub(crate) mod activation;
pub(crate) mod boolean;
pub(crate) mod common;
mod families;
pub(crate) mod float;
pub(crate) mod int;
pub(crate) mod module;
pub(crate) mod quantized;
pub(crate) mod shapes;
pub(crate) mod transaction;

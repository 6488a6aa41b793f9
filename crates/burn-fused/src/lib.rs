#![doc = include_str!("../README.md")]

mod apply;
#[cfg(feature = "cube")]
pub mod cube;
mod dtype;
mod error;
#[cfg(feature = "flex")]
mod flex;
mod node;
pub mod openings;
pub mod primitive;
pub mod rms_norm;
#[cfg(feature = "serve")]
pub mod serve;
#[cfg(feature = "remote")]
mod wire;

pub use apply::Implementation;
pub use dtype::{accumulator, expect, expect_device, least, rounded};
pub use error::{OpError, or_panic};
#[cfg(feature = "flex")]
pub use flex::{elements, is_free, zeros};
pub use node::{Gradients, node, parts, sibling_node};
#[cfg(feature = "remote")]
pub use wire::{
    NoNumbers, Reader, WireOp, Writer, decode, encode, expect_rank, expect_shape, like, send,
    send_all,
};
#[cfg(feature = "remote-server")]
pub use wire::{Operands, handle, handle_with_indices};

#[doc(hidden)]
pub use half;

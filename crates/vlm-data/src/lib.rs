#![doc = include_str!("../README.md")]

mod error;
pub mod picture;
pub mod text;

pub use error::{Result, VlmDataError};

#[cfg(doctest)]
#[doc = include_str!("../../../docs/data-text.md")]
mod page_of_text {}

#[cfg(doctest)]
#[doc = include_str!("../../../docs/data.md")]
mod page_of_pictures {}

#![doc = include_str!("../README.md")]

mod error;
pub mod picture;
pub mod text;

pub use error::{Result, VlmDataError};

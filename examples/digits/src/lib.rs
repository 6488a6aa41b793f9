//! A small vision-language model that finds a digit by time, height and width.
//!
//! A clip is frames of rows of columns of handwritten digits. A question names a frame, a row and a
//! column, and the answer is the digit there, so the model answers well only if attention knows
//! positions on three axes. `mrope train` runs it.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "test code"))]

mod clip;
mod config;
mod data;
mod error;
mod file;
mod model;
mod trainer;

pub use clip::{Axes, Clip};
pub use config::Config;
pub use data::{CLASSES, Digits, Question, SIDE};
pub use error::{DigitsError, Result};
pub use file::is_model;
pub use model::Model;
pub use trainer::{Answer, History, Test, Trainer};

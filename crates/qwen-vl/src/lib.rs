#![doc = include_str!("../README.md")]
//!
//! # Modules
//!
//! [`QwenVlConfig`] reads a checkpoint folder and loads a [`QwenVl`]. [`QwenVl::batch`] turns a
//! prompt with its grids and patches into a [`Batch`], computing position ids, angles and masks
//! once; [`QwenVl::train_step`] trains on it and [`QwenVl::generate`] continues it. Both towers
//! rotate with [`rope_burn::Rotary`].
//!
//! | module | contents |
//! |---|---|
//! | `config` | the contents of a `config.json`, and the differences between the families |
//! | `names` | the checkpoints' parameter names and this crate's |
//! | `load` | reading and writing checkpoints |
//! | `file` | safetensors files, by ranges of elements |
//! | `pieces` | tensors of any size to and from a device |
//! | `patches` | cutting pictures into patches |
//! | `batch` | turning a prompt into tensors |
//! | `layers` | attention, feed-forward network and norm, shared by both towers |
//! | `vision`, `decoder` | the two towers |
//! | `model` | both together |
//! | `train`, `generate` | training and generation |
//! | `trace` | activations by name, for comparison with another implementation |

mod batch;
mod config;
mod decoder;
mod error;
mod file;
mod generate;
mod layers;
mod load;
mod model;
mod names;
mod patches;
mod pieces;
mod trace;
mod train;
mod vision;

pub use batch::{Batch, Inputs};
pub use config::{QwenVlConfig, TextConfig, VisionConfig, VisionWindows};
pub use error::{QwenVlError, Result};
pub use generate::KvCache;
pub use layers::Activation;
pub use model::QwenVl;
pub use pieces::{Moved, Pieces};
pub use rope_burn::{Implementation, rope_core};
pub use trace::Trace;

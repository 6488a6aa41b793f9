//! Qwen2-VL, Qwen2.5-VL and Qwen3-VL in burn: one model, whose families differ in data.
//!
//! A checkpoint folder becomes a [`QwenVlConfig`] and a [`QwenVl`]; a prompt with its grids and patches becomes a
//! [`Batch`], with position ids, angles and masks made once; [`QwenVl::train_step`] learns from it and
//! [`QwenVl::generate`] continues it. Rotation is [`rope_burn::Rotary`] in both towers.
//!
//! | module | what it holds |
//! |---|---|
//! | `config` | what a `config.json` says, and what tells the families apart |
//! | `names` | the checkpoints' parameter names and this crate's |
//! | `load` | reading and writing checkpoints |
//! | `patches` | from pictures to patches |
//! | `batch` | from a prompt to tensors |
//! | `layers` | attention, feed-forward network and norm, shared by both towers |
//! | `vision`, `decoder` | the two towers |
//! | `model` | both together |
//! | `train`, `generate` | learning and continuing |
//! | `trace` | activations by name, for comparison with another implementation |

mod batch;
mod config;
mod decoder;
mod error;
mod generate;
mod layers;
mod load;
mod model;
mod names;
mod patches;
mod trace;
mod train;
mod vision;

pub use batch::{Batch, Inputs};
pub use config::{QwenVlConfig, TextConfig, VisionConfig, VisionWindows};
pub use error::{QwenVlError, Result};
pub use generate::KvCache;
pub use layers::Activation;
pub use model::QwenVl;
pub use rope_burn::{Implementation, rope_core};
pub use trace::Trace;

/// The code of the page on models compiles.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/models.md")]
struct ModelsPage;

#![doc = include_str!("../README.md")]
//!
//! # Modules
//!
//! [`VlmConfig`] reads a checkpoint folder and loads a [`Vlm`]. [`Vlm::batch`] converts a prompt
//! with its grids and patches to a [`Batch`], computing position ids, angles and masks once;
//! [`Vlm::train_step`] trains on it and [`Vlm::generate`] continues it. Both towers rotate with
//! [`rope_burn::Rotary`].
//!
//! | module | contents |
//! |---|---|
//! | `config` | the contents of a `config.json` |
//! | `names` | parameter names of checkpoints and of this crate |
//! | `load` | reading and writing checkpoints |
//! | `file` | safetensors files, by ranges of elements |
//! | `tensors` | small helpers |
//! | `transfer` | tensors of any size to and from a device |
//! | `patches` | cutting pictures into patches |
//! | `inputs`, `batch` | converting a prompt to tensors |
//! | `step` | the data of a pass that its layers share |
//! | `layers` | attention, feed-forward network and norm, shared by both towers |
//! | `vision`, `decoder` | the two towers |
//! | `delta`, `recurrence` | decoder layers with a state instead of keys and values; its sequences |
//! | `experts`, `divided` | feed-forward networks of experts, of which a token passes some; on several ranks |
//! | `shares`, `stages`, `context` | where ranks divide tokens: those and the heads of a rank; layers in stages; passes |
//! | `model` | both together |
//! | `linear` | a linear layer, and the adapter beside its weight |
//! | `trained`, `whole`, `lora`, `peft` | what is trained: whole weights; adapters; their files |
//! | `merge`, `streamed` | merging adapters into a checkpoint's files; its logits, one layer at a time |
//! | `random` | random numbers that are equal on all devices |
//! | `train`, `backward`, `generate` | training, gradients layer by layer, and generation |
//! | `walk` | the order in which a pass needs weights and completes gradients |
//! | `trace` | activations by name, whole or sampled, for comparison with another implementation |

mod backward;
mod balance;
mod batch;
mod config;
mod context;
mod decoder;
mod delta;
mod divided;
mod error;
mod experts;
pub mod file;
mod generate;
mod inputs;
mod layers;
mod linear;
mod load;
mod lora;
mod merge;
mod model;
mod names;
mod patches;
mod peft;
mod random;
mod recurrence;
mod shares;
mod sizes;
mod stages;
mod step;
mod streamed;
mod tensors;
mod trace;
mod train;
mod trained;
mod transfer;
mod vision;
mod walk;
mod whole;

pub use backward::Backward;
pub use balance::{RouterLoads, RouterLoss};
pub use batch::Batch;
pub use burn_attention::has_linear_kernel;
pub use config::{
    DeltaConfig, ExpertConfig, ExpertGroups, Interpolation, SlidingWindow, TextConfig,
    VisionConfig, VisionWindows, VlmConfig,
};
pub use divided::{ExpertPass, ExpertShare};
pub use error::{Result, VlmError};
pub use generate::{
    Choice, GenerateOptions, GenerationConfig, KvCache, LogProbabilities, Sampling,
};
pub use inputs::Inputs;
pub use layers::Activation;
pub use linear::ExpertAxis;
pub use lora::{AdaptedLayer, Parameter};
pub use merge::{Merge, MergeCheck, MergedTensor};
pub use model::Vlm;
pub use rope_burn::{Implementation, rope_core};
pub use shares::TokenShare;
pub use trace::{Sampled, Segment, Trace, sampled_elements};
pub use trained::{LoraConfig, ModelPart, TrainedWeights};
pub use transfer::{Progress, Transfer};
pub use walk::{Block, Visit, Walk, Weights};

#![doc = include_str!("../README.md")]
//!
//! # Items
//!
//! | item | what it is |
//! |---|---|
//! | [`AscendDevice`] | an NPU; [`device`](AscendDevice::device) makes it an ordinary burn `Device` |
//! | [`AscendHost`] | what serves such devices to this process |
//! | [`serve`], [`operations`] | the same for other processes and hosts |
//! | [`Ranks`] | NPUs of several processes that burn's `all_reduce` sums over |
//! | [`Ascend`], [`AscendTensor`] | the backend, a view of an NPU's memory |
//! | [`fallbacks`] | the operations that ran on the host or on the AI CPU, counted |
//! | [`attention_runs`] | which code attended, counted |
//!
//! burn's dispatch knows no backends from outside, so [`AscendDevice::device`] reaches the NPU
//! through a server in the same process: autodiff runs on the client's side, tensors stay in device
//! memory, and only descriptions of operations cross.
//!
//! # Errors
//! Operations of a burn backend cannot return an error. A tensor whose computation failed carries
//! the failure: what is computed from it fails alike without running, and reading it returns the
//! first cause as burn's [`ExecutionError`](burn::backend::ExecutionError), with the operator's
//! name and code. Other tensors of the device are not affected.
//! [`Backend::sync`](burn::backend::Backend::sync) reports failures that no read has reported. (A
//! panic would end a burn-remote session, and its client would see a closed connection, not the
//! cause.)

mod backend;
mod collective;
mod context;
mod device;
mod error;
mod fallback;
#[cfg(all(test, feature = "ascend-sim"))]
mod faults;
mod fused;
mod npu;
mod ops;
mod quantized;
mod tensor;

pub use backend::Ascend;
pub use burn_fused::serve;
pub use collective::Ranks;
pub use device::{AscendHost, DeviceError, operations};
pub use fallback::{Fallback, Processor, fallbacks, reset_fallbacks};
pub use fused::{AttentionRuns, attention_runs, reset_attention_runs};
pub use npu::AscendDevice;
pub use quantized::AscendQTensor;
pub use rope_ascend::AscendError;
pub use tensor::AscendTensor;

#![doc = include_str!("../README.md")]
//!
//! # Items
//!
//! | item | meaning |
//! |---|---|
//! | [`AscendDevice`] | an NPU; [`device`](AscendDevice::device) returns an ordinary burn `Device` for it |
//! | [`AscendHost`] | serves such devices to this process |
//! | [`serve`], [`operations`] | serve them to other processes and hosts |
//! | [`Ranks`] | NPUs of several processes that burn's `all_reduce` sums over |
//! | [`Ascend`], [`AscendTensor`] | the backend, a view of an NPU's memory |
//! | [`fallbacks`] | counts of operations that ran on the host or on the AI CPU |
//! | [`attention_runs`] | counts of attention calls by implementation |
//!
//! burn's dispatch supports no external backends, so [`AscendDevice::device`] reaches the NPU
//! through a server in the same process: autodiff runs on the client's side, tensors stay in device
//! memory, and only descriptions of operations are sent.
//!
//! # Errors
//! Operations of a burn backend cannot return an error. A tensor whose computation failed carries
//! the failure: operations on it fail with the same cause without running, and reading it returns
//! the first cause as burn's [`ExecutionError`](burn::backend::ExecutionError), with the operator's
//! name and code. Other tensors of the device are not affected.
//! [`Backend::sync`](burn::backend::Backend::sync) reports failures that no read has reported. (A
//! panic would end a burn-remote session, and its client would see a closed connection instead of
//! the cause.)
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "test code"))]

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
pub use collective::{InFlight, Ranks};
pub use device::{AscendHost, DeviceError, operations};
pub use fallback::{Fallback, Processor, fallbacks, reset_fallbacks};
pub use fused::{AttentionRuns, attention_runs, reset_attention_runs};
pub use npu::AscendDevice;
pub use quantized::AscendQTensor;
pub use rope_ascend::AscendError;
pub use tensor::AscendTensor;

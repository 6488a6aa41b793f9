//! A [burn](https://burn.dev) backend whose tensors live on Ascend NPUs.
//!
//! - [`Ascend`] is the backend, [`AscendDevice`] names an NPU, [`AscendTensor`] is a view of a block of its memory.
//! - [`device`] gives an NPU as an ordinary burn `Device`, for `Tensor` code that names no backend. burn's dispatch is
//!   closed to backends from outside, so it goes through a server in the same process ([`AscendHost`]); with autodiff on
//!   the client's side, only descriptions of operations cross.
//! - rope-burn's rotation runs by rope-ascend's kernels, on the tensors' own memory.
//! - Operators run through the vendor's operator library, on one stream per device, and nothing waits but a read.
//! - What the operator library does not do, or does not do in some element type, goes to the host and back through
//!   [Flex](burn::backend::Flex); [`fallbacks`] counts each such trip, so nothing is silently slow.
//!
//! # Errors
//! Operations of a burn backend have no error to return. Here a tensor whose computation failed carries the failure: what
//! is computed from it fails alike without running, and reading it returns the first cause as burn's
//! [`ExecutionError`](burn::backend::ExecutionError), with the operator's name and code. Other tensors of the device are
//! not touched by that. [`Backend::sync`](burn::backend::Backend::sync) reports the failures that nobody has read. (A panic
//! instead would end a burn-remote session, and its client would learn of a closed connection, not of the cause.)

mod backend;
mod context;
mod device;
mod error;
mod fallback;
#[cfg(all(test, feature = "ascend-sim"))]
mod faults;
mod npu;
mod ops;
mod quantized;
mod rotary;
pub mod server;
mod tensor;

pub use backend::Ascend;
pub use device::{AscendHost, DeviceError, close, device, device_simulated, simulated};
pub use fallback::{Fallback, fallbacks, reset_fallbacks};
pub use npu::AscendDevice;
pub use quantized::AscendQTensor;
pub use rope_ascend::AscendError;
pub use tensor::AscendTensor;

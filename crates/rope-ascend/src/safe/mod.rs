//! Owned handles.
//!
//! Each handle holds its dependency by reference count: a buffer its stream, a stream its device,
//! and a device the runtime; the libraries stay mapped until the process ends. Each call first sets
//! the calling thread's current device, so handles may move between threads. `Drop` never panics:
//! the runtime keeps the first teardown failure, and the next call through any of its handles, or
//! [`Runtime::close`], returns it.
#![allow(
    unsafe_code,
    reason = "calls through `result` with handles that these types own"
)]

mod buffer;
mod communicator;
mod device;
mod event;
mod machine;
mod module;
mod pinned;
mod pool;
mod runtime;
mod staging;
mod stream;

pub use crate::loader::Pooling;
pub use crate::result::LaunchWay;
pub use buffer::{DeviceBuffer, DeviceMemory, Element};
pub use communicator::{
    Communicator, CommunicatorOptions, Pending, RootInfo, Span, SumType, Traffic,
};
pub use device::Device;
pub(crate) use machine::{Architecture, Machine};
pub(crate) use module::{Kernel, Module};
pub use pool::MemoryUse;
pub use runtime::Runtime;
pub use stream::Stream;

const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Runtime>();
    shared::<Device>();
    shared::<Stream>();
    shared::<Module>();
    shared::<Communicator>();
    shared::<pinned::PinnedBuffer>();
    shared::<DeviceBuffer<f32>>();
};

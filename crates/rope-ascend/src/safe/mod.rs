//! Owned handles.
//!
//! Each handle holds what it depends on by reference count: a buffer its stream, a stream its
//! device, and a device the runtime; the libraries stay mapped until the process ends. Before
//! each call the calling thread's current device is set, so handles may move between threads.
//! `Drop` never panics: the first failure of a teardown is kept by the runtime and returned by
//! the next call through any of its handles, or by [`Runtime::close`].
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

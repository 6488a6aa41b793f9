//! Kernel binaries.

use std::ffi::CStr;
use std::sync::Arc;

use super::device::Device;
use super::stream::Stream;
use crate::error::{Cores, Result};
use crate::result::{self, LaunchWay, Launched};
use crate::sys::{aclrtBinHandle, aclrtFuncHandle};

#[derive(Debug)]
struct ModuleInner {
    raw: aclrtBinHandle,
    device: Device,
}

// SAFETY: the runtime lets any thread use the handle while its device is the thread's current one;
// `enter` sets it before each call.
unsafe impl Send for ModuleInner {}
// SAFETY: the runtime's functions on binaries are documented as usable from several threads.
unsafe impl Sync for ModuleInner {}

impl Drop for ModuleInner {
    fn drop(&mut self) {
        let inner = &self.device.inner;
        // SAFETY: kernels hold the module, so none is left; `Stream`s that ran them have been
        // synchronised or have waited for them in their own teardown.
        inner.teardown(|| unsafe { result::unload(inner.rt(), inner.library(), self.raw) });
    }
}

/// A loaded binary of kernels. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Module {
    inner: Arc<ModuleInner>,
}

/// One kernel of a module.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    raw: aclrtFuncHandle,
    name: String,
    way: LaunchWay,
    module: Module,
}

// SAFETY: the runtime lets any thread use the handle while the device of its module, which it
// holds, is the thread's current one; `enter` sets it before each call.
unsafe impl Send for Kernel {}
// SAFETY: the runtime's launches are documented as usable from several threads.
unsafe impl Sync for Kernel {}

impl Module {
    #[doc(alias = "aclrtBinaryLoadFromData")]
    pub(super) fn load(device: Device, binary: &[u8]) -> Result<Self> {
        device.inner.enter()?;
        let raw = result::load(device.inner.rt(), device.inner.library(), binary)?;
        Ok(Self {
            inner: Arc::new(ModuleInner { raw, device }),
        })
    }

    /// The kernel of this name, which runs on `cores` and has `parameters` parameters.
    ///
    /// # Errors
    /// Those of the runtime, if the kernel does not exist;
    /// [`NoLaunch`](crate::AscendError::NoLaunch) if the runtime cannot launch such a kernel.
    #[doc(alias = "aclrtBinaryGetFunction")]
    pub(crate) fn kernel(&self, name: &CStr, cores: Cores, parameters: usize) -> Result<Kernel> {
        let inner = &self.inner.device.inner;
        inner.enter()?;
        let (rt, library) = (inner.rt(), inner.library());
        // SAFETY: the binary is loaded as long as `self` lives.
        let raw = unsafe { result::kernel(rt, library, self.inner.raw, name) }?;
        let name = name.to_string_lossy().into_owned();
        // SAFETY: found just now in the binary, which is loaded.
        let way = unsafe { result::launch_way(rt, library, &name, raw, cores, parameters) }?;
        Ok(Kernel {
            raw,
            name,
            way,
            module: self.clone(),
        })
    }
}

impl Kernel {
    /// Its launch method.
    pub(crate) fn way(&self) -> LaunchWay {
        self.way
    }

    /// Queues the kernel on `stream` with `blocks` blocks.
    ///
    /// # Errors
    /// [`Launch`](crate::AscendError::Launch) if the runtime refuses it.
    ///
    /// # Safety
    /// - `parameters` are the kernel's, in the order of its declaration and with its sizes. Their
    ///   number is that passed to [`Module::kernel`], which was also passed the kernel's kind of
    ///   cores.
    /// - The device memory that the arguments name belongs to buffers of `stream`, and is large
    ///   enough for what the kernel does with it.
    /// - The module outlives the queued work: it is dropped after a synchronisation of `stream`.
    pub(crate) unsafe fn launch(
        &self,
        stream: &Stream,
        blocks: u32,
        parameters: &mut [&mut [u8]],
    ) -> Result<()> {
        let inner = &self.module.inner.device.inner;
        inner.enter()?;
        let launched = Launched {
            kernel: self.raw,
            name: &self.name,
            way: self.way,
        };
        // SAFETY: live handles, `way` is that of this kernel; parameters and memory are the
        // caller's.
        unsafe {
            result::launch(
                inner.rt(),
                inner.library(),
                launched,
                blocks,
                stream.raw(),
                parameters,
            )
        }
    }
}

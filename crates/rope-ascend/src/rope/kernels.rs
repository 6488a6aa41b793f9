//! The loaded kernels.
#![allow(unsafe_code, reason = "launches the kernels with checked arguments")]

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Mutex, PoisonError};

use super::args::{ADDRESS_BYTES, ArgumentBlock};
use super::compile::Compilation;
use super::kernel_files::KernelFile;
use crate::error::{Cores, Result};
use crate::safe::{Kernel, LaunchWay, Machine, Module, Stream};

/// The rotary kernels on one device.
#[derive(Debug)]
pub struct Kernels {
    module: Module,
    machine: Machine,
    found: Mutex<HashMap<String, Kernel>>,
}

impl Kernels {
    /// Loads a compiled `kernels/rope/rope.cpp`: a device object of the architecture, or the
    /// simulator's equivalent.
    ///
    /// # Errors
    /// Those of the runtime.
    pub fn load(stream: &Stream, binary: &[u8]) -> Result<Self> {
        let machine = stream.device().machine()?;
        Ok(Self {
            module: stream.load(binary)?,
            machine,
            found: Mutex::default(),
        })
    }

    /// Compiles the kernels with the installation's run-time compiler and loads them. The binary is
    /// cached for later processes in the folder of the variable `ROPE_ASCEND_CACHE`, otherwise in
    /// the user's cache folder (`off` disables the cache). It is reused while source, options and
    /// toolkit are unchanged.
    ///
    /// # Errors
    /// [`AscendError::Load`](crate::AscendError::Load) if the compiler's library is missing,
    /// [`AscendError::Compile`](crate::AscendError::Compile) with its log; otherwise as
    /// [`Self::load`].
    pub fn compile(stream: &Stream) -> Result<Self> {
        let runtime = stream.device().runtime();
        let api = runtime.api();
        let compilation = Compilation::of(stream.device().machine()?.architecture);
        let toolkit = match (&api.rtc, api.compiler_identity()) {
            (Ok(_), Some(compiler)) => Some(format!("ACL {:?}, {compiler}", runtime.version()?)),
            _ => None,
        };
        let file = toolkit.and_then(|toolkit| {
            KernelFile::of(&compilation.source, &compilation.options, &toolkit)
        });
        // A cached binary that does not load is rebuilt; the error is that of the new one.
        let kept = file.as_ref().and_then(KernelFile::read);
        if let Some(Ok(kernels)) = kept.map(|binary| Self::load(stream, &binary)) {
            return Ok(kernels);
        }
        let binary = compilation.run(api)?;
        if let Some(file) = file {
            file.write(&binary);
        }
        Self::load(stream, &binary)
    }

    /// The launch method of the kernel called `name`; `None` before its first launch.
    pub fn launch_way(&self, name: &str) -> Option<LaunchWay> {
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        found.get(name).map(Kernel::way)
    }

    /// The machine for which the kernels are tiled.
    pub(super) fn machine(&self) -> Machine {
        self.machine
    }

    /// Queues a kernel. The kernels must live until the stream has been synchronised.
    ///
    /// # Safety
    /// `args` mirrors the kernel's parameters, and its cores are the kernel's. Its addresses are
    /// null or those of memory of this stream, large enough for what the kernel does with it.
    pub(super) unsafe fn launch<A: ArgumentBlock>(
        &self,
        stream: &Stream,
        kernel: &str,
        blocks: u32,
        mut args: A,
    ) -> Result<()> {
        let kernel = self.get(kernel, A::CORES, A::ADDRESSES + 1)?;
        // SAFETY: a live value without padding (`ArgumentBlock`), so all its bytes are initialised.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut((&raw mut args).cast::<u8>(), size_of::<A>()) };
        let (addresses, tiling) = bytes.split_at_mut(A::ADDRESSES * ADDRESS_BYTES);
        let addresses = addresses.chunks_exact_mut(ADDRESS_BYTES);
        let mut parameters: Vec<&mut [u8]> = addresses.chain([tiling]).collect();
        // SAFETY: the caller guarantees the parameters. Dropped buffers return to the stream's
        // pool, so none is reused before the kernel is done.
        unsafe { kernel.launch(stream, blocks, &mut parameters) }
    }

    /// The kernel of this name, which runs on `cores` and has `parameters` parameters.
    fn get(&self, name: &str, cores: Cores, parameters: usize) -> Result<Kernel> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = found.get(name) {
            return Ok(kernel.clone());
        }
        let c_name = CString::new(name).unwrap_or_default();
        let kernel = self.module.kernel(&c_name, cores, parameters)?;
        found.insert(name.to_owned(), kernel.clone());
        Ok(kernel)
    }
}

//! The loaded kernels.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Mutex, PoisonError};

use super::tiling::Machine;
use crate::error::Result;
use crate::safe::{Kernel, Module, Stream};

/// The rotary kernels on one device.
#[derive(Debug)]
pub struct Kernels {
    module: Module,
    machine: Machine,
    found: Mutex<HashMap<String, Kernel>>,
}

impl Kernels {
    /// Loads a compiled `kernels/rope/rope.cpp`: a device object of the architecture, or what the
    /// simulator takes in its place.
    ///
    /// # Errors
    /// The runtime's.
    pub fn load(stream: &Stream, binary: &[u8]) -> Result<Self> {
        let machine = stream.device().machine()?;
        Ok(Self {
            module: stream.load(binary)?,
            machine,
            found: Mutex::default(),
        })
    }

    /// Compiles the kernels with the installation's run-time compiler and loads them.
    ///
    /// # Errors
    /// [`AscendError::Load`](crate::AscendError::Load) where the compiler's library is missing,
    /// [`AscendError::Compile`](crate::AscendError::Compile) with its log; else as [`Self::load`].
    pub fn compile(stream: &Stream) -> Result<Self> {
        let architecture = stream.device().machine()?.architecture;
        let binary = super::compile(stream.device().runtime().api(), architecture)?;
        Self::load(stream, &binary)
    }

    /// What the kernels are tiled for.
    pub(super) fn machine(&self) -> Machine {
        self.machine
    }

    pub(super) fn get(&self, name: &str) -> Result<Kernel> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = found.get(name) {
            return Ok(kernel.clone());
        }
        let c_name = CString::new(name).unwrap_or_default();
        let kernel = self.module.kernel(&c_name)?;
        found.insert(name.to_owned(), kernel.clone());
        Ok(kernel)
    }
}

//! A small host program around the C ABI, for tests.
#![allow(unsafe_code, reason = "the tests call the C ABI, as programs do")]
#![allow(dead_code, reason = "each test uses a part")]

use std::ffi::{CString, c_void};
use std::ptr::null_mut;

use ascend_sim::abi::runtime::*;
use ascend_sim::{Machine, Session, control};

pub(crate) const HOST_TO_DEVICE: i32 = 1;
pub(crate) const DEVICE_TO_HOST: i32 = 2;

/// The runtime's last message on this thread.
pub(crate) fn recent_message() -> String {
    // SAFETY: the function returns a C string that is valid until the next failure on this thread.
    unsafe { std::ffi::CStr::from_ptr(aclGetRecentErrMsg()) }
        .to_string_lossy()
        .into_owned()
}

/// Asserts that exactly one violation was found, of a kind and with these words.
#[track_caller]
pub(crate) fn one_violation(kind: &str, says: &str) {
    let found = control::take_violations();
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(found[0].kind, kind, "{}", found[0]);
    assert!(found[0].message.contains(says), "{}", found[0]);
}

fn ok(code: i32) -> Result<(), (i32, String)> {
    if code == 0 {
        Ok(())
    } else {
        Err((code, recent_message()))
    }
}

/// Compiles a kernel source of the tests for dav-2201.
#[cfg(feature = "host-kernels")]
pub(crate) fn compile(source: &str, kernels: &[&str]) -> Vec<u8> {
    compile_for(source, kernels, 2201, &[]).expect("the kernel compiles")
}

#[cfg(feature = "host-kernels")]
pub(crate) fn compile_for(
    source: &str,
    kernels: &[&str],
    architecture: u32,
    defines: &[&str],
) -> ascend_sim::build::Result<Vec<u8>> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/kernels")
        .join(source);
    let source = ascend_sim::build::KernelSource::new(path)
        .kernels(kernels.iter().copied())
        .architecture(architecture);
    defines
        .iter()
        .fold(source, |source, define| source.define(*define))
        .compile()
}

/// An initialised runtime with device 0 current and one stream.
pub(crate) struct Device {
    pub(crate) stream: *mut c_void,
    _session: Session,
}

impl Device {
    pub(crate) fn new() -> Self {
        Self::on(Machine::default())
    }

    pub(crate) fn on(machine: Machine) -> Self {
        let session = Session::with_machine(machine);
        let mut stream = null_mut();
        // SAFETY: plain calls with valid out parameters.
        unsafe {
            assert_eq!(aclInit(std::ptr::null()), 0);
            assert_eq!(aclrtSetDevice(0), 0);
            assert_eq!(aclrtCreateStream(&raw mut stream), 0);
        }
        Self {
            stream,
            _session: session,
        }
    }

    pub(crate) fn alloc(&self, bytes: usize) -> u64 {
        let mut address = null_mut();
        // SAFETY: a valid out parameter.
        let code = unsafe { aclrtMalloc(&raw mut address, bytes, 0) };
        assert_eq!(code, 0, "{}", recent_message());
        address as u64
    }

    pub(crate) fn free(&self, address: u64) -> Result<(), (i32, String)> {
        // SAFETY: device memory is named by address; a wrong one is an error.
        ok(unsafe { aclrtFree(address as *mut c_void) })
    }

    pub(crate) fn upload<T: Copy>(&self, data: &[T]) -> u64 {
        let bytes = size_of_val(data);
        let address = self.alloc(bytes);
        // SAFETY: the source is a slice of `bytes` bytes.
        ok(unsafe {
            aclrtMemcpy(
                address as *mut c_void,
                bytes,
                data.as_ptr().cast(),
                bytes,
                HOST_TO_DEVICE,
            )
        })
        .expect("upload");
        address
    }

    pub(crate) fn download<T: Copy + Default>(&self, address: u64, len: usize) -> Vec<T> {
        let mut data = vec![T::default(); len];
        let bytes = size_of_val(data.as_slice());
        // SAFETY: the target is a vector of `bytes` bytes of plain numbers.
        ok(unsafe {
            aclrtMemcpy(
                data.as_mut_ptr().cast(),
                bytes,
                address as *const c_void,
                bytes,
                DEVICE_TO_HOST,
            )
        })
        .expect("download");
        data
    }

    pub(crate) fn load(&self, library: &[u8]) -> Result<*mut c_void, (i32, String)> {
        let mut binary = null_mut();
        // SAFETY: the slice is readable; a valid out parameter.
        ok(unsafe {
            aclrtBinaryLoadFromData(
                library.as_ptr().cast(),
                library.len(),
                std::ptr::null(),
                &raw mut binary,
            )
        })?;
        Ok(binary)
    }

    pub(crate) fn function(
        &self,
        binary: *mut c_void,
        kernel: &str,
    ) -> Result<*mut c_void, (i32, String)> {
        let name = CString::new(kernel).expect("no zero byte");
        let mut function = null_mut();
        // SAFETY: a C string and a valid out parameter.
        ok(unsafe { aclrtBinaryGetFunction(binary, name.as_ptr(), &raw mut function) })?;
        Ok(function)
    }

    pub(crate) fn submit(
        &self,
        function: *mut c_void,
        blocks: u32,
        args: &[u64],
    ) -> Result<(), (i32, String)> {
        let mut args = args.to_vec();
        // SAFETY: the arguments are a vector of that many bytes.
        ok(unsafe {
            aclrtLaunchKernelWithHostArgs(
                function,
                blocks,
                self.stream,
                null_mut(),
                args.as_mut_ptr().cast(),
                args.len() * 8,
                null_mut(),
                0,
            )
        })
    }

    /// The same, in a list that the runtime completes.
    pub(crate) fn submit_completed(
        &self,
        function: *mut c_void,
        blocks: u32,
        args: &[u64],
    ) -> Result<(), (i32, String)> {
        let (mut list, mut place) = (null_mut(), null_mut());
        // SAFETY: a valid out parameter.
        ok(unsafe { aclrtKernelArgsInit(function, &raw mut list) })?;
        for mut arg in args.iter().copied() {
            let param = (&raw mut arg).cast();
            // SAFETY: eight readable bytes, and a valid out parameter.
            ok(unsafe { aclrtKernelArgsAppend(list, param, 8, &raw mut place) })?;
        }
        // SAFETY: a list of this thread; no configuration.
        unsafe {
            ok(aclrtKernelArgsFinalize(list))?;
            ok(aclrtLaunchKernelWithConfig(
                function,
                blocks,
                self.stream,
                null_mut(),
                list,
                null_mut(),
            ))
        }
    }

    /// The same, one pointer for each parameter.
    pub(crate) fn submit_array(
        &self,
        function: *mut c_void,
        blocks: u32,
        args: &[u64],
    ) -> Result<(), (i32, String)> {
        let mut args = args.to_vec();
        let mut pointers: Vec<*mut c_void> = args
            .iter_mut()
            .map(|arg| std::ptr::from_mut(arg).cast())
            .collect();
        // SAFETY: a pointer to eight bytes for each parameter.
        ok(unsafe {
            aclrtLaunchKernelWithArgsArray(
                function,
                blocks,
                self.stream,
                null_mut(),
                pointers.as_mut_ptr(),
            )
        })
    }

    pub(crate) fn synchronize(&self) -> Result<(), (i32, String)> {
        // SAFETY: the stream is this device's.
        ok(unsafe { aclrtSynchronizeStream(self.stream) })
    }

    /// Loads, launches and waits; each argument takes eight bytes.
    pub(crate) fn launch(
        &self,
        library: &[u8],
        kernel: &str,
        blocks: u32,
        args: &[u64],
    ) -> Result<(), (i32, String)> {
        let binary = self.load(library)?;
        let function = self.function(binary, kernel)?;
        self.submit_completed(function, blocks, args)?;
        self.synchronize()
    }
}

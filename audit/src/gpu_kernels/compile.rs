//! NVIDIA's compilers, from wheels: NVRTC turns CUDA C++ into PTX and ptxas turns that into machine
//! code, as CubeCL and the driver do it on a GPU.
#![allow(unsafe_code, reason = "NVRTC is called by its C interface")]

use std::ffi::{CString, c_char, c_int, c_void};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;

use libloading::Library;

use super::{KernelError, Result, cannot_access};
use crate::wheels;

/// Of one release of CUDA: NVRTC, ptxas, the disassembler, and the headers that CubeCL includes.
const WHEELS: [&str; 5] = [
    "nvidia-cuda-nvrtc==13.2.78",
    "nvidia-cuda-nvcc==13.2.78",
    "nvidia-cuda-nvdisasm==13.2.78",
    "nvidia-cuda-runtime==13.2.75",
    "nvidia-cuda-crt==13.2.78",
];
const PLATFORM: &str = "manylinux2014_x86_64";
/// In each wheel.
const ROOT: &str = "nvidia/cu13";

/// What ptxas says about a kernel, and its machine code as text.
pub(super) struct Compiled {
    pub(super) ptx: String,
    pub(super) report: String,
    pub(super) code: String,
}

type Program = *mut c_void;

/// NVRTC's functions, of which all return 0 on success.
struct Nvrtc {
    library: Library,
}

impl Nvrtc {
    /// PTX of a source.
    fn compile(&self, source: &str, options: &[String]) -> Result<String> {
        let text = |text: &str| CString::new(text).map_err(|_| KernelError::Zero);
        let source = text(source)?;
        let options: Vec<CString> = options.iter().map(|o| text(o)).collect::<Result<_>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program: Program = ptr::null_mut();
        // SAFETY: the types are those of nvrtc.h; source and options are strings that outlive the
        // calls, and NVRTC writes as many bytes as it has said, into buffers of that size.
        unsafe {
            let create = self.library.get::<unsafe extern "C" fn(
                *mut Program,
                *const c_char,
                *const c_char,
                c_int,
                *const *const c_char,
                *const *const c_char,
            ) -> c_int>(b"nvrtcCreateProgram\0")?;
            let compile =
                self.library
                    .get::<unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int>(
                        b"nvrtcCompileProgram\0",
                    )?;
            let destroy = self
                .library
                .get::<unsafe extern "C" fn(*mut Program) -> c_int>(b"nvrtcDestroyProgram\0")?;
            let none = ptr::null();
            let created = create(&mut program, source.as_ptr(), ptr::null(), 0, none, none);
            if created != 0 {
                return Err(KernelError::Nvrtc(format!("error {created}")));
            }
            let status = compile(program, pointers.len() as c_int, pointers.as_ptr());
            let result = match status {
                0 => self.written(program, b"nvrtcGetPTXSize\0", b"nvrtcGetPTX\0"),
                _ => self
                    .written(
                        program,
                        b"nvrtcGetProgramLogSize\0",
                        b"nvrtcGetProgramLog\0",
                    )
                    .and_then(|log| Err(KernelError::Nvrtc(log))),
            };
            destroy(&mut program);
            result
        }
    }

    /// What two functions of NVRTC give: the size of a text, zero byte included, and the text.
    ///
    /// # Safety
    /// - `program` is one that NVRTC has compiled
    /// - the functions have these types
    unsafe fn written(&self, program: Program, size: &[u8], text: &[u8]) -> Result<String> {
        // SAFETY: as above; the buffer has the size that NVRTC said.
        let bytes = unsafe {
            let size_of = self
                .library
                .get::<unsafe extern "C" fn(Program, *mut usize) -> c_int>(size)?;
            let get = self
                .library
                .get::<unsafe extern "C" fn(Program, *mut c_char) -> c_int>(text)?;
            let mut size = 0;
            size_of(program, &mut size);
            let mut bytes = vec![0u8; size];
            get(program, bytes.as_mut_ptr().cast());
            bytes
        };
        Ok(String::from_utf8_lossy(&bytes)
            .trim_end_matches('\0')
            .to_owned())
    }
}

/// The compilers.
pub(super) struct Compilers {
    nvrtc: Nvrtc,
    ptxas: PathBuf,
    nvdisasm: PathBuf,
    includes: Vec<PathBuf>,
    work: PathBuf,
}

impl Compilers {
    /// From PyPI, or as an earlier run has unpacked them.
    pub(super) fn fetch(work: &Path) -> Result<Self> {
        let mut folders = Vec::new();
        for wheel in WHEELS {
            folders.push(wheels::unpack(work, wheel, PLATFORM)?.join(ROOT));
        }
        let [nvrtc, nvcc, nvdisasm, ..] = &folders[..] else {
            unreachable!("a folder for each wheel")
        };
        // NVRTC loads its builtins by their name alone: from what is loaded already.
        let library = |name: &str| {
            let path = nvrtc.join("lib").join(name);
            // SAFETY: NVIDIA's libraries, whose initialisation asks nothing of the caller.
            unsafe { Library::new(path) }
        };
        std::mem::forget(library("libnvrtc-builtins.so.13.2")?);
        let program = |folder: &Path, name: &str| {
            let path = folder.join("bin").join(name);
            // A wheel's files have lost the permission to be executed.
            let permissions = fs::Permissions::from_mode(0o755);
            fs::set_permissions(&path, permissions).map_err(cannot_access(&path))?;
            Ok::<_, KernelError>(path)
        };
        Ok(Self {
            nvrtc: Nvrtc {
                library: library("libnvrtc.so.13")?,
            },
            ptxas: program(nvcc, "ptxas")?,
            nvdisasm: program(nvdisasm, "nvdisasm")?,
            includes: folders
                .iter()
                .map(|folder| folder.join("include"))
                .collect(),
            work: work.to_owned(),
        })
    }

    /// `source` for an architecture such as `sm_90a`, with the options that CubeCL gives; by files
    /// of a name that no other thread uses.
    pub(super) fn compile(&self, source: &str, architecture: &str, name: &str) -> Result<Compiled> {
        let mut options = vec![
            format!("--gpu-architecture={architecture}"),
            "-lineinfo".into(),
        ];
        let includes = self.includes.iter();
        options.extend(includes.map(|folder| format!("--include-path={}", folder.display())));
        let ptx = self.nvrtc.compile(source, &options)?;
        let (input, output) = (
            self.work.join(format!("{name}.ptx")),
            self.work.join(format!("{name}.cubin")),
        );
        fs::write(&input, &ptx).map_err(cannot_access(&input))?;
        let mut ptxas = Command::new(&self.ptxas);
        ptxas
            .args(["-v", "-arch", architecture])
            .arg(&input)
            .arg("-o")
            .arg(&output);
        let report = wheels::output_of(&mut ptxas)?;
        let code = wheels::output_of(Command::new(&self.nvdisasm).arg("-c").arg(&output))?;
        Ok(Compiled { ptx, report, code })
    }
}

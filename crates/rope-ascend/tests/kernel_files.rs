//! Compiled kernels kept from one process to the next. One test, because it sets a variable of the
//! process.
#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    missing_docs,
    reason = "test code"
)]
#![allow(
    unsafe_code,
    reason = "a compiler of our own, by the vendor's interface"
)]

mod support;

use std::ffi::{CStr, c_char, c_void};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::{env, fs};

use ascend_sim::{Machine, Session};
use rope_ascend::loader::Api;
use rope_ascend::rope::Kernels;
use rope_ascend::safe::Runtime;
use support::kernel_binary;

static COMPILATIONS: AtomicU32 = AtomicU32::new(0);
/// True if the compiler knows no words for kinds of cores.
static OLD: AtomicBool = AtomicBool::new(false);
/// True if the source that the compiler has now has such words.
static QUALIFIED: AtomicBool = AtomicBool::new(false);
/// The binary of the last compilation.
static BINARY: Mutex<Vec<u8>> = Mutex::new(Vec::new());

extern "C" fn create(
    program: *mut *mut c_void,
    source: *const c_char,
    _name: *const c_char,
    _headers: i32,
    _header_sources: *const *const c_char,
    _header_names: *const *const c_char,
) -> i32 {
    // SAFETY: a nul-terminated text that lives through the call, by the function's declaration.
    let source = unsafe { CStr::from_ptr(source) }.to_str().unwrap();
    let unqualified = source.starts_with("#define ROPE_NO_QUALIFIERS\n");
    QUALIFIED.store(!unqualified, Ordering::Relaxed);
    // SAFETY: a local of the caller, by the function's declaration.
    unsafe { program.write(std::ptr::without_provenance_mut(1)) };
    0
}

extern "C" fn compile(_program: *mut c_void, count: i32, options: *const *const c_char) -> i32 {
    assert_eq!(count, 1);
    if OLD.load(Ordering::Relaxed) && QUALIFIED.load(Ordering::Relaxed) {
        return 1;
    }
    // SAFETY: one option, by the count.
    let option = unsafe { CStr::from_ptr(*options) }.to_str().unwrap();
    let architecture = option.strip_prefix("--npu-arch=dav-").unwrap();
    *BINARY.lock().unwrap() = kernel_binary(architecture.parse().unwrap());
    COMPILATIONS.fetch_add(1, Ordering::Relaxed);
    0
}

extern "C" fn binary_bytes(_program: *mut c_void, bytes: *mut usize) -> i32 {
    // SAFETY: a local of the caller, by the function's declaration.
    unsafe { bytes.write(BINARY.lock().unwrap().len()) };
    0
}

extern "C" fn binary(_program: *mut c_void, data: *mut c_char) -> i32 {
    let binary = BINARY.lock().unwrap();
    // SAFETY: the caller's buffer has the size that `binary_bytes` gave.
    unsafe {
        data.cast::<u8>()
            .copy_from_nonoverlapping(binary.as_ptr(), binary.len())
    };
    0
}

extern "C" fn no_log(_program: *mut c_void, _bytes: *mut usize) -> i32 {
    1
}

extern "C" fn no_text(_program: *mut c_void, _text: *mut c_char) -> i32 {
    1
}

extern "C" fn destroy(_program: *mut *mut c_void) -> i32 {
    0
}

/// The simulator with a run-time compiler.
fn api(origin: &str) -> Api {
    let resolve = |name: &CStr| match name.to_str().unwrap() {
        "aclrtcCreateProg" => create as *const c_void,
        "aclrtcCompileProg" => compile as *const c_void,
        "aclrtcGetBinDataSize" => binary_bytes as *const c_void,
        "aclrtcGetBinData" => binary as *const c_void,
        "aclrtcGetCompileLogSize" => no_log as *const c_void,
        "aclrtcGetCompileLog" => no_text as *const c_void,
        "aclrtcDestroyProg" => destroy as *const c_void,
        _ => ascend_sim::symbol(name),
    };
    // SAFETY: the simulator's functions, and those above, which have the vendor's signatures.
    unsafe { Api::from_resolver(origin, resolve) }.unwrap()
}

/// Compilations of one runtime, as a process has it.
fn compilations(origin: &str, architecture: u32) -> u32 {
    let machine = match architecture {
        2201 => Machine::default(),
        _ => Machine::ascend_950(),
    };
    let _session = Session::with_machine(machine);
    let before = COMPILATIONS.load(Ordering::Relaxed);
    let runtime = Runtime::start(api(origin)).unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    Kernels::compile(&stream).unwrap();
    drop(stream);
    runtime.close().unwrap();
    COMPILATIONS.load(Ordering::Relaxed) - before
}

fn set(folder: &Path) {
    // SAFETY: the only test of its process; the harness reads no variable meanwhile.
    unsafe { env::set_var("ROPE_ASCEND_CACHE", folder) };
}

#[test]
fn a_second_runtime_compiles_nothing_unless_something_changed() {
    let folder = env::temp_dir().join(format!("rope-ascend-kernels-{}", std::process::id()));
    set(&folder);
    assert_eq!(compilations("toolkit 1", 2201), 1);
    assert_eq!(compilations("toolkit 1", 2201), 0);
    assert_eq!(compilations("toolkit 1", 3510), 1, "another architecture");
    assert_eq!(compilations("toolkit 2", 2201), 1, "another toolkit");
    assert_eq!(compilations("toolkit 1", 2201), 0);

    for file in fs::read_dir(&folder).unwrap() {
        let path = file.unwrap().path();
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    }
    assert_eq!(compilations("toolkit 1", 2201), 1, "a damaged file");
    assert_eq!(compilations("toolkit 1", 2201), 0);

    // A folder that cannot be written to costs a compilation each time, and nothing else.
    set(Path::new("/proc/none"));
    assert_eq!([1, 1], [(); 2].map(|()| compilations("toolkit 1", 2201)));
    set(Path::new("off"));
    assert_eq!([1, 1], [(); 2].map(|()| compilations("toolkit 1", 2201)));
    assert!(QUALIFIED.load(Ordering::Relaxed));

    // A compiler that does not know the qualifiers gets the source without them.
    OLD.store(true, Ordering::Relaxed);
    assert_eq!(compilations("toolkit 1", 2201), 1);
    assert!(!QUALIFIED.load(Ordering::Relaxed));
    fs::remove_dir_all(&folder).unwrap();
}

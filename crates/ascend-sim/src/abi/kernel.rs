//! The C interface of compiled kernel libraries (mirror of `include/ascend_sim/launch.h`).

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::abi::sys::{Engine, Library};
use crate::codes::{Failure, Outcome, RT_FEATURE_NOT_SUPPORTED, RT_PARAM_INVALID};
use crate::conflicts::Access;
use crate::machine::Machine;
use crate::trace::{Counted, Counters, Violation};

const INTERFACE_VERSION: u32 = 4;
const ELF_MAGIC: &[u8] = b"\x7fELF";
const ELF_MACHINE_OFFSET: usize = 18;
/// `e_machine` of an object for the device.
const ELF_MACHINE_DEVICE: u16 = 0x1029;
const ELF_MACHINE_HOST: u16 = if cfg!(target_arch = "aarch64") {
    183
} else {
    62
};

#[repr(C)]
pub(crate) struct Region {
    pub(crate) device_address: u64,
    pub(crate) size_bytes: u64,
    pub(crate) bytes: *mut u8,
}

#[repr(C)]
struct GmAccess {
    start: u64,
    length: u64,
    stride: u64,
    count: u64,
    operation: *const c_char,
    file: *const c_char,
    line: u32,
    epoch: u32,
    seen: [u32; 15],
    pipe: u8,
    is_write: u8,
    is_atomic: u8,
    reserved: [u8; 1],
}

type Report =
    unsafe extern "C" fn(*mut c_void, u32, *const c_char, *const c_char, u32, *const c_char);
type Accesses = unsafe extern "C" fn(*mut c_void, u32, *const GmAccess, u64);

#[repr(C)]
struct RawCounted {
    what: *const c_char,
    types: *const c_char,
    amount: u64,
    times: u64,
}

type CountedList = unsafe extern "C" fn(*mut c_void, *const RawCounted, u64);

#[repr(C)]
struct Launch {
    interface_version: u32,
    block_count: u32,
    ub_capacity_bytes: u64,
    saturate: u8,
    late_if_mix: u8,
    reserved: [u8; 6],
    regions: *const Region,
    region_count: u64,
    host: *mut c_void,
    report: Report,
    accesses: Accesses,
    counted: CountedList,
}

#[repr(C)]
struct KernelEntry {
    name: *const c_char,
    args_bytes: u64,
    call: *const c_void,
    parameter_bytes: *const u64,
    parameter_count: u64,
}

#[repr(C)]
struct KernelTable {
    interface_version: u32,
    architecture: u32,
    entries: *const KernelEntry,
    entry_count: u64,
    run_block: unsafe extern "C" fn(*const Launch, u64, *const u8, u32, *mut Counters) -> i32,
}

const _: () = assert!(size_of::<Region>() == 24);
const _: () = assert!(size_of::<GmAccess>() == 120);
const _: () = assert!(size_of::<Counters>() == 192);
const _: () = assert!(size_of::<Launch>() == 72);
const _: () = assert!(size_of::<RawCounted>() == 32);
const _: () = assert!(size_of::<KernelEntry>() == 40);
const _: () = assert!(size_of::<KernelTable>() == 32);

/// A kernel of a loaded library.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    pub(crate) args_bytes: u64,
    /// The bytes of each parameter.
    pub(crate) parameters: Vec<usize>,
}

/// A loaded library of host-compiled kernels.
pub(crate) struct KernelLibrary {
    table: *const KernelTable,
    pub(crate) kernels: Vec<Kernel>,
    // Dropped last: the table is inside the library.
    _library: Library,
}

// SAFETY: the table is constant data of the library, which lives as long as this value.
unsafe impl Send for KernelLibrary {}
// SAFETY: the table is constant data, and its `run_block` keeps its state on the calling thread.
unsafe impl Sync for KernelLibrary {}

/// The record of one launch.
#[derive(Default)]
pub(crate) struct LaunchOutput {
    pub(crate) violations: Vec<Violation>,
    pub(crate) accesses: Vec<(u32, Vec<Access>)>,
    /// The operations and files that accesses refer to by index.
    pub(crate) locations: Vec<String>,
    location_ids: HashMap<(usize, usize), usize>,
    pub(crate) counters: Counters,
    pub(crate) first_block: Vec<Counted>,
}

/// A launch to run.
#[derive(Clone, Copy)]
pub(crate) struct Task<'a> {
    /// The kernel's number in its library.
    pub(crate) kernel: usize,
    pub(crate) blocks: u32,
    pub(crate) args: &'a [u8],
    /// True if nobody gave the arguments a sync address, which a MIX kernel then lacks.
    pub(crate) late_if_mix: bool,
}

struct Collector<'a> {
    kernel: &'a str,
    inner: Mutex<LaunchOutput>,
}

impl Collector<'_> {
    fn lock(&self) -> MutexGuard<'_, LaunchOutput> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An owned copy of a C string.
///
/// # Safety
/// - `text` is a C string.
unsafe fn text(text: *const c_char) -> String {
    // SAFETY: by the function's own condition.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

/// Takes a violation from the kernel side.
///
/// # Safety
/// - `host` is the `Collector` of the running launch.
/// - `kind`, `file` and `message` are C strings.
unsafe extern "C" fn report(
    host: *mut c_void,
    block: u32,
    kind: *const c_char,
    file: *const c_char,
    line: u32,
    message: *const c_char,
) {
    // SAFETY: `host` is the collector that `run` put into the launch, alive until `run` returns.
    let collector = unsafe { &*host.cast::<Collector<'_>>() };
    // SAFETY: the kernel side passes C strings, valid during the call.
    let (kind, file, message) = unsafe { (text(kind), text(file), text(message)) };
    let violation = Violation {
        kind,
        kernel: Some(collector.kernel.to_owned()),
        block: Some(block),
        file: (!file.is_empty()).then_some(file),
        line: (line != 0).then_some(line),
        message,
    };
    collector.lock().violations.push(violation);
}

/// Takes the global-memory accesses of a block from the kernel side.
///
/// # Safety
/// - `host` is the `Collector` of the running launch.
/// - `list` is valid for `count` records.
unsafe extern "C" fn accesses(host: *mut c_void, block: u32, list: *const GmAccess, count: u64) {
    if count == 0 {
        return;
    }
    // SAFETY: `host` is the collector that `run` put into the launch, alive until `run` returns.
    let collector = unsafe { &*host.cast::<Collector<'_>>() };
    // SAFETY: the kernel side passes `count` records, valid during the call; `count` is not zero.
    let list = unsafe { std::slice::from_raw_parts(list, count as usize) };
    let mut inner = collector.lock();
    let converted = list
        .iter()
        .map(|record| {
            let key = (record.operation as usize, record.file as usize);
            let known = inner.location_ids.get(&key).copied();
            let location = known.unwrap_or_else(|| {
                // SAFETY: operation and file are string literals of the loaded library.
                let (operation, file) = unsafe { (text(record.operation), text(record.file)) };
                inner.locations.push(format!("{operation} at {file}"));
                let id = inner.locations.len() - 1;
                inner.location_ids.insert(key, id);
                id
            });
            Access {
                start: record.start,
                length: record.length,
                stride: record.stride,
                count: record.count,
                location,
                line: record.line,
                epoch: record.epoch,
                seen: record.seen,
                pipe: record.pipe,
                write: record.is_write != 0,
                atomic: record.is_atomic != 0,
            }
        })
        .collect();
    inner.accesses.push((block, converted));
}

/// Takes what block 0 did from the kernel side.
///
/// # Safety
/// - `host` is the `Collector` of the running launch.
/// - `list` is valid for `count` records.
unsafe extern "C" fn counted(host: *mut c_void, list: *const RawCounted, count: u64) {
    if count == 0 {
        return;
    }
    // SAFETY: `host` is the collector that `run` put into the launch, alive until `run` returns.
    let collector = unsafe { &*host.cast::<Collector<'_>>() };
    // SAFETY: the kernel side passes `count` records, valid during the call; `count` is not zero.
    let list = unsafe { std::slice::from_raw_parts(list, count as usize) };
    let convert = |record: &RawCounted| Counted {
        // SAFETY: both are C strings of the loaded library.
        what: unsafe { text(record.what) },
        // SAFETY: as above.
        types: unsafe { text(record.types) },
        amount: record.amount,
        times: record.times,
    };
    collector.lock().first_block = list.iter().map(convert).collect();
}

/// The bytes of each parameter of a kernel; none where the library does not say.
///
/// # Safety
/// - `entry` is one of a loaded table of this version of the interface.
unsafe fn parameters(entry: &KernelEntry) -> Vec<usize> {
    if entry.parameter_bytes.is_null() {
        return Vec::new();
    }
    let count = entry.parameter_count as usize;
    // SAFETY: not null, and constant data of `count` numbers of the loaded library.
    let bytes = unsafe { std::slice::from_raw_parts(entry.parameter_bytes, count) };
    bytes.iter().map(|bytes| *bytes as usize).collect()
}

impl KernelLibrary {
    /// Loads a library that `build` made, for this host and this machine's architecture.
    pub(crate) fn load(bytes: &[u8], machine: &Machine) -> Outcome<Self> {
        let refuse = |message: String| Err(Failure::new(RT_PARAM_INVALID, message));
        let field = bytes.get(ELF_MACHINE_OFFSET..ELF_MACHINE_OFFSET + 2);
        let Some([low, high]) = field.filter(|_| bytes.starts_with(ELF_MAGIC)) else {
            return refuse(format!("{} bytes are not an ELF object", bytes.len()));
        };
        match u16::from_le_bytes([*low, *high]) {
            ELF_MACHINE_HOST => {}
            ELF_MACHINE_DEVICE => {
                return refuse(
                    "the binary is compiled for the device; the simulator loads kernels that \
                     ascend_sim::build compiled for this host"
                        .to_owned(),
                );
            }
            other => {
                return refuse(format!(
                    "the binary is for ELF machine {other}, this host is {ELF_MACHINE_HOST}"
                ));
            }
        }
        let library = Library::from_bytes(bytes)?;
        let Some(table) = library.symbol(c"ascend_sim_kernels") else {
            return refuse(
                "the binary has no kernel table: compile it with ascend_sim::build".to_owned(),
            );
        };
        let table = table.cast::<KernelTable>().as_ptr().cast_const();
        // SAFETY: the symbol is the table that `ASCEND_SIM_LIBRARY` defines; every version of the
        // interface begins with these two fields.
        let (version, architecture) =
            unsafe { ((*table).interface_version, (*table).architecture) };
        if version != INTERFACE_VERSION {
            return refuse(format!(
                "the binary has kernel interface {version}, the simulator has {INTERFACE_VERSION}"
            ));
        }
        if architecture != machine.architecture {
            let message = format!(
                "the binary is compiled for dav-{architecture}, the device is dav-{}",
                machine.architecture
            );
            return Err(Failure::new(RT_FEATURE_NOT_SUPPORTED, message));
        }
        // SAFETY: the version was checked, so the table holds `entry_count` entries with C strings.
        let kernels = unsafe {
            std::slice::from_raw_parts((*table).entries, (*table).entry_count as usize)
                .iter()
                .map(|entry| Kernel {
                    name: text(entry.name),
                    args_bytes: entry.args_bytes,
                    parameters: parameters(entry),
                })
                .collect()
        };
        Ok(Self {
            table,
            kernels,
            _library: library,
        })
    }

    /// Runs all blocks of a launch on threads and waits for them.
    ///
    /// The caller keeps the allocations of `regions` alive and holds the engine, so that nothing
    /// else touches device memory.
    pub(crate) fn run(
        &self,
        _engine: &mut Engine<'_>,
        task: &Task<'_>,
        regions: &[Region],
        machine: &Machine,
    ) -> LaunchOutput {
        let Task {
            kernel,
            blocks,
            args,
            late_if_mix,
        } = *task;
        let collector = Collector {
            kernel: &self.kernels[kernel].name,
            inner: Mutex::default(),
        };
        let launch = Launch {
            interface_version: INTERFACE_VERSION,
            block_count: blocks,
            ub_capacity_bytes: machine.ub_usable_bytes,
            saturate: machine.saturate.into(),
            late_if_mix: late_if_mix.into(),
            reserved: [0; 6],
            regions: regions.as_ptr(),
            region_count: regions.len() as u64,
            host: (&raw const collector).cast_mut().cast(),
            report,
            accesses,
            counted,
        };
        let job = Job {
            table: self.table,
            launch: &launch,
            kernel,
            args,
        };
        let next = AtomicU32::new(0);
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        std::thread::scope(|scope| {
            for _ in 0..cores.min(blocks as usize) {
                scope.spawn(|| {
                    loop {
                        let block = next.fetch_add(1, Ordering::Relaxed);
                        if block >= blocks {
                            break;
                        }
                        let counters = job.run_block(block);
                        collector.lock().counters.add(&counters);
                    }
                });
            }
        });
        let collected = collector.inner.into_inner();
        let mut collected = collected.unwrap_or_else(PoisonError::into_inner);
        // Threads finish in any order; reports are in block order.
        collected.violations.sort_by_key(|found| found.block);
        collected.accesses.sort_by_key(|(block, _)| *block);
        collected
    }
}

struct Job<'a> {
    table: *const KernelTable,
    launch: &'a Launch,
    kernel: usize,
    args: &'a [u8],
}

// SAFETY: the table and the launch are constant while the job runs; the collector that
// `launch.host` points to has a lock; the regions' bytes are the kernel's to touch, as on a device.
unsafe impl Sync for Job<'_> {}

impl Job<'_> {
    fn run_block(&self, block: u32) -> Counters {
        let mut counters = Counters::default();
        // SAFETY: the table's library is loaded (`KernelLibrary` is borrowed by the caller); the
        // launch and the arguments outlive the call; `args` is as long as the kernel's parameters
        // (checked when the launch was made); `counters` is this thread's own.
        unsafe {
            ((*self.table).run_block)(
                self.launch,
                self.kernel as u64,
                self.args.as_ptr(),
                block,
                &raw mut counters,
            );
        }
        counters
    }
}

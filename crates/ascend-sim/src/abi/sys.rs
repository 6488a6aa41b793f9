//! Memory and libraries of the host: the raw operations below everything else.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ffi::{CStr, CString, c_void};
use std::hash::{DefaultHasher, Hasher};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::codes::{Failure, INTERNAL_ERROR, Outcome, RT_FEATURE_NOT_SUPPORTED};

/// A range of the process's address space that nothing can read or write. Device addresses come
/// from it, so that following one on the host faults instead of returning bytes.
pub(crate) struct Reservation {
    start: u64,
    size: u64,
}

impl Reservation {
    /// Reserves as much as the process may, up to `size` bytes.
    pub(crate) fn new(mut size: u64) -> Outcome<Self> {
        while size >= 1 << 30 {
            // SAFETY: an anonymous mapping at an address that the kernel picks; no memory that the
            // process uses is replaced, and no access is ever made through it.
            let start = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    usize::try_from(size).unwrap_or(usize::MAX),
                    libc::PROT_NONE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                    -1,
                    0,
                )
            };
            if start != libc::MAP_FAILED {
                let start = start as u64;
                return Ok(Self { start, size });
            }
            size /= 2;
        }
        Err(Failure::new(
            INTERNAL_ERROR,
            "no address space left for device addresses",
        ))
    }

    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: `start` and `size` are those of the mapping made in `new`, unmapped once.
        unsafe { libc::munmap(self.start as *mut c_void, self.size as usize) };
    }
}

/// Proof that the holder is the only one that accesses device memory now: mutably, to write;
/// shared, to read.
pub(crate) struct Engine<'a>(
    #[allow(dead_code, reason = "held, not read")] pub(crate) std::sync::MutexGuard<'a, ()>,
);

const POISON: u8 = 0xff;
const BYTES_ALIGNMENT: usize = 512;

/// From this size on, memory is mapped: the system has it back when it is freed. The host's
/// allocator would keep it for each thread that had it, and a server has a thread for each session.
const MAPPED_BYTES: usize = 1 << 20;

/// From this size on, pages are made when they are touched: so that a test can have offsets beyond 32
/// bits. It reads as zero.
const SPARSE_BYTES: usize = 4 << 30;

/// Alignment of mapped memory, at least.
const PAGE_BYTES: usize = 4096;

/// Memory of the host's allocator, or mapped if it is large; freed when dropped.
struct RawBytes {
    start: NonNull<u8>,
    layout: Layout,
}

impl RawBytes {
    /// New memory of at least one byte, every byte `fill`.
    fn new(size: usize, alignment: usize, fill: u8) -> Outcome<Self> {
        let layout = Layout::from_size_align(size.max(1), alignment).map_err(|_| {
            Failure::new(INTERNAL_ERROR, format!("{size} bytes cannot be laid out"))
        })?;
        if is_mapped(layout) {
            // SAFETY: an anonymous mapping at an address that the kernel picks; no memory that the
            // process uses is replaced.
            let start = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    layout.size(),
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                    -1,
                    0,
                )
            };
            let start = match NonNull::new(start.cast::<u8>()) {
                Some(mapped) if start != libc::MAP_FAILED => mapped,
                _ => {
                    let message = format!("{size} bytes cannot be mapped");
                    return Err(Failure::new(INTERNAL_ERROR, message));
                }
            };
            if layout.size() < SPARSE_BYTES {
                // SAFETY: `start` was just mapped for writing with `layout.size()` bytes.
                unsafe { start.write_bytes(fill, layout.size()) };
            }
            return Ok(Self { start, layout });
        }
        // SAFETY: the layout has a size of at least one byte.
        let Some(start) = NonNull::new(unsafe { alloc(layout) }) else {
            handle_alloc_error(layout)
        };
        // SAFETY: `start` was just allocated with `layout.size()` bytes.
        unsafe { start.write_bytes(fill, layout.size()) };
        Ok(Self { start, layout })
    }
}

fn is_mapped(layout: Layout) -> bool {
    layout.size() >= MAPPED_BYTES && layout.align() <= PAGE_BYTES
}

impl Drop for RawBytes {
    fn drop(&mut self) {
        if is_mapped(self.layout) {
            // SAFETY: mapped in `new` with the same size, unmapped once; that it succeeds is not
            // needed for anything.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.layout.size()) };
            return;
        }
        // SAFETY: allocated in `new` with the same layout, freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// Memory that kernels and copies share. Reads and writes need the [`Engine`].
pub(crate) struct SharedBytes(RawBytes);

// SAFETY: the bytes are only accessed through methods that require the engine, of which there is
// one, or by kernel threads that run while their launch holds it.
unsafe impl Send for SharedBytes {}
// SAFETY: a shared reference gives access only together with the engine, of which there is one.
unsafe impl Sync for SharedBytes {}

impl SharedBytes {
    /// New memory, every byte 0xff, so that a float read before it was written is NaN.
    pub(crate) fn new(size: usize) -> Outcome<Self> {
        RawBytes::new(size, BYTES_ALIGNMENT, POISON).map(Self)
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.0.start.as_ptr()
    }

    fn check(&self, offset: usize, len: usize) {
        assert!(
            offset
                .checked_add(len)
                .is_some_and(|end| end <= self.0.layout.size()),
            "device range outside its allocation"
        );
    }

    pub(crate) fn write(&self, engine: &mut Engine<'_>, offset: usize, from: &[u8]) {
        self.slice_mut(engine, offset, from.len())
            .copy_from_slice(from);
    }

    /// The bytes themselves: readable as long as the engine is only read through.
    pub(crate) fn slice<'a>(
        &'a self,
        _engine: &'a Engine<'_>,
        offset: usize,
        len: usize,
    ) -> &'a [u8] {
        self.check(offset, len);
        // SAFETY: `check` keeps the range inside the allocation, which `self` keeps alive and which
        // was filled when it was made. Writing takes the one engine mutably, which the returned
        // slice borrows.
        unsafe { std::slice::from_raw_parts(self.as_ptr().add(offset), len) }
    }

    /// The bytes themselves, for writing: the engine is held mutably as long as they are.
    #[allow(
        clippy::mut_from_ref,
        reason = "what is unique is the engine, as a lock's guard is"
    )]
    pub(crate) fn slice_mut<'a>(
        &'a self,
        _engine: &'a mut Engine<'_>,
        offset: usize,
        len: usize,
    ) -> &'a mut [u8] {
        self.check(offset, len);
        // SAFETY: `check` keeps the range inside the allocation, which `self` keeps alive and which
        // was filled when it was made. The one engine is borrowed mutably as long as the slice
        // lives, so that no other slice of device memory exists.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr().add(offset), len) }
    }
}

const HOST_GUARD_BYTES: usize = 64;
const HOST_CANARY: u8 = 0xc5;

/// Page-locked host memory, as `aclrtMallocHost` returns it, with guard bytes on both sides.
pub(crate) struct HostBlock {
    bytes: RawBytes,
    size: usize,
}

// SAFETY: the block is plain memory; when it is accessed is up to the program, as on a device.
unsafe impl Send for HostBlock {}
// SAFETY: the methods only read the address, the size, and guard bytes that nothing writes.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    pub(crate) fn new(size: usize) -> Outcome<Self> {
        let whole = size.saturating_add(2 * HOST_GUARD_BYTES);
        let bytes = RawBytes::new(whole, HOST_GUARD_BYTES, HOST_CANARY)?;
        // SAFETY: `bytes` has `size` bytes between its two guards.
        unsafe {
            let block = bytes.start.add(HOST_GUARD_BYTES);
            block.write_bytes(POISON, size);
        }
        Ok(Self { bytes, size })
    }

    pub(crate) fn address(&self) -> usize {
        self.bytes.start.as_ptr() as usize + HOST_GUARD_BYTES
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// A number that differs when the bytes `[start, start + len)` do, which the caller has found
    /// to be inside the block.
    pub(crate) fn hash(&self, start: usize, len: usize) -> u64 {
        debug_assert!(start + len <= self.size);
        // SAFETY: inside the block, which is initialised; that nothing writes these bytes while a
        // copy from them is queued is the program's duty, and what the hash is there to check.
        let bytes = unsafe {
            let block = self.bytes.start.as_ptr().add(HOST_GUARD_BYTES);
            std::slice::from_raw_parts(block.add(start), len)
        };
        let mut hasher = DefaultHasher::new();
        hasher.write(bytes);
        hasher.finish()
    }

    /// True if the guards are as they were made.
    pub(crate) fn guards_intact(&self) -> bool {
        let guard = |offset: usize| {
            // SAFETY: both guards are inside the allocation, and only this type touches them,
            // unless the program overruns its block, which the comparison is there to find.
            let bytes = unsafe {
                std::slice::from_raw_parts(self.bytes.start.as_ptr().add(offset), HOST_GUARD_BYTES)
            };
            bytes.iter().all(|byte| *byte == HOST_CANARY)
        };
        guard(0) && guard(HOST_GUARD_BYTES + self.size)
    }
}

/// Bytes at a host address that a program named.
///
/// # Safety
/// - `address` is valid for `len` bytes and nothing writes them during the call.
pub(crate) unsafe fn read_host(address: usize, len: usize) -> Vec<u8> {
    // SAFETY: by the function's own condition.
    unsafe { std::slice::from_raw_parts(address as *const u8, len) }.to_vec()
}

/// Writes bytes at a host address that a program named.
///
/// # Safety
/// - `address` is valid for writing `bytes.len()` bytes, and nothing else touches them during the
///   call.
pub(crate) unsafe fn write_host(address: usize, bytes: &[u8]) {
    // SAFETY: by the function's own condition; `bytes` is a Rust slice of other memory.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
}

unsafe extern "C" {
    safe fn erf(x: f64) -> f64;
}

/// The error function, 2/sqrt(pi) times the integral of exp(-t²) from 0 to `x`.
pub(crate) fn error_function(x: f64) -> f64 {
    erf(x)
}

/// A loaded shared object.
pub(crate) struct Library(NonNull<c_void>);

// SAFETY: the handle is an opaque token of the loader, which is thread-safe.
unsafe impl Send for Library {}
// SAFETY: the handle is an opaque token, and `dlsym`, which `symbol` calls, is thread-safe.
unsafe impl Sync for Library {}

impl Library {
    /// Loads a shared object from its bytes.
    #[cfg(target_os = "linux")]
    pub(crate) fn from_bytes(bytes: &[u8]) -> Outcome<Self> {
        use std::io::Write;
        use std::os::fd::{AsRawFd, FromRawFd};

        let broken = |error: &dyn std::fmt::Display| Failure::new(INTERNAL_ERROR, error);
        // SAFETY: the name is a C string; the flag is a documented one.
        let descriptor =
            unsafe { libc::memfd_create(c"ascend-sim-kernels".as_ptr(), libc::MFD_CLOEXEC) };
        if descriptor < 0 {
            return Err(broken(&std::io::Error::last_os_error()));
        }
        // SAFETY: the descriptor was just made and belongs to nobody else.
        let mut file = unsafe { std::fs::File::from_raw_fd(descriptor) };
        file.write_all(bytes).map_err(|error| broken(&error))?;
        // The loader takes two equal paths for one library, also for a while after `dlclose`, and
        // the next library may get this descriptor: so each path has a spelling of its own.
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let bits = (0..u32::BITS).map(|bit| serial >> bit & 1);
        let spelling: String = bits.map(|bit| ["/.", "//"][bit as usize]).collect();
        let path = format!("/proc/self/fd{spelling}/{}", file.as_raw_fd());
        let path = CString::new(path);
        let path = path.map_err(|error| broken(&error))?;
        // SAFETY: the path is a C string. Loading runs the object's initialisers: the caller hands
        // over code to be run, which is what loading a kernel means.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        NonNull::new(handle).map(Self).ok_or_else(|| {
            // SAFETY: `dlerror` takes nothing; its result is used before this thread loads again.
            let message = unsafe { libc::dlerror() };
            if message.is_null() {
                return Failure::new(RT_FEATURE_NOT_SUPPORTED, "the object cannot be loaded");
            }
            // SAFETY: not null, and a C string by the loader's contract.
            let message = unsafe { CStr::from_ptr(message) };
            Failure::new(RT_FEATURE_NOT_SUPPORTED, message.to_string_lossy())
        })
    }

    /// Loads a shared object from its bytes.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn from_bytes(_bytes: &[u8]) -> Outcome<Self> {
        Err(Failure::new(
            RT_FEATURE_NOT_SUPPORTED,
            "kernels are loaded from memory, which the simulator does on Linux",
        ))
    }

    pub(crate) fn symbol(&self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle is live until `drop`; the name is a C string.
        NonNull::new(unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) })
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: the handle came from `dlopen` and is closed once; users of its code hold the
        // library.
        unsafe { libc::dlclose(self.0.as_ptr()) };
    }
}

//! A stream, and the device memory that belongs to it.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::buffer::{DeviceBuffer, DeviceMemory, Element, bytes_of, bytes_of_mut};
use super::device::Device;
use super::event::Event;
use super::module::Module;
use super::pinned::PinnedBuffer;
use super::pool::{Block, Pool, Segment};
use super::staging::Staging;
use crate::error::{AscendError, Result};
use crate::loader::Pooling;
use crate::result;
use crate::sys::{aclrtMemcpyKind, aclrtStream};

#[derive(Debug)]
pub(super) struct StreamInner {
    pub(super) raw: aclrtStream,
    /// True if the handle goes with this structure rather than stay with its owner.
    owned: bool,
    pool: Arc<Mutex<Pool>>,
    staging: Mutex<Staging>,
    /// Events that queued work waits for.
    retired: Mutex<Vec<Event>>,
    /// True if a wait has returned a failure: it stays with the stream, and its teardown need not
    /// report it again.
    reported: AtomicBool,
    pub(super) device: Device,
}

// SAFETY: the runtime lets any thread use a stream while the stream's device is the thread's
// current one (ACL documentation of aclrtSetDevice: threads of a process share a device's default
// context); `enter` sets it before each call. The pool has its own lock.
unsafe impl Send for StreamInner {}
// SAFETY: the runtime's stream functions are documented as usable from several threads, each of
// which sets the device before (`enter`); pool and staging have locks.
unsafe impl Sync for StreamInner {}

impl StreamInner {
    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn staging(&self) -> MutexGuard<'_, Staging> {
        self.staging.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn retired(&self) -> MutexGuard<'_, Vec<Event>> {
        self.retired.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the stream's work; the device is current.
    fn wait(&self) -> Result<()> {
        // Taken before the wait: events added during the wait may still be needed after it.
        let mut passed = std::mem::take(&mut *self.retired());
        // Held through the wait, so that no copy is queued between it and `passed`.
        let mut staging = self.staging();
        // SAFETY: `raw` lives as long as `self`; the caller has entered the device.
        let outcome = unsafe { result::synchronize(self.device.inner.rt(), self.raw) };
        match &outcome {
            Ok(()) => staging.passed(),
            Err(_) => {
                self.reported.store(true, Ordering::Relaxed);
                self.retired().append(&mut passed);
            }
        }
        outcome
    }

    /// Waits for the stream's work and frees the segments of which nothing was in use before; the
    /// device is current. After a failed wait they stay cached.
    fn free_cached(&self) -> Result<()> {
        // Taken before the wait: memory that another thread frees during the wait may still be in
        // use.
        let segments = self.pool().take_whole(&self.device.inner.counters);
        if let Err(error) = self.wait() {
            self.pool().restore(segments, &self.device.inner.counters);
            return Err(error);
        }
        // SAFETY: all work that was queued before the last block of each came back is done.
        unsafe { self.free(segments) }
    }

    /// Frees segments; the device is current. Goes on after a failure and returns the first.
    ///
    /// # Safety
    /// Nothing uses the segments, and no queued work will.
    unsafe fn free(&self, segments: Vec<(u64, Segment)>) -> Result<()> {
        let inner = &self.device.inner;
        let mut outcome = Ok(());
        for (_, segment) in segments {
            inner.counters.segment_freed(segment.bytes);
            // SAFETY: the pool owned the segment, and the caller guarantees that it is not in use.
            let freed = unsafe { result::free(inner.rt(), segment.pointer) };
            outcome = outcome.and(freed);
        }
        outcome
    }

    /// Memory for `bytes`. If the device has none left, cached segments are freed and the
    /// allocation tried once more.
    pub(super) fn block(&self, bytes: usize) -> Result<Block> {
        let counters = &self.device.inner.counters;
        // A cached block needs no call of the runtime.
        if let Some(block) = self.pool().take(bytes, counters) {
            return Ok(block);
        }
        let too_large = || {
            let expected = "within the address space";
            AscendError::argument("allocate", "bytes", expected, bytes)
        };
        let [segment_bytes, least_bytes] =
            self.pool().segment_bytes(bytes).ok_or_else(too_large)?;
        self.device.inner.enter()?;
        if self.pool().should_shrink(segment_bytes, counters) {
            self.free_cached()?;
        }
        let (pointer, segment_bytes) = self.segment(segment_bytes, least_bytes)?;
        let mut pool = self.pool();
        let block = pool.grow(pointer, segment_bytes, bytes, counters);
        block.ok_or_else(too_large)
    }

    /// New memory of the first size, or of the second if the first is not available; the device is
    /// current.
    fn segment(&self, bytes: usize, least_bytes: usize) -> Result<(*mut c_void, usize)> {
        let inner = &self.device.inner;
        let allocate = |bytes| {
            let pointer = match inner.runtime.inner.api.pooling {
                Pooling::Segments => result::malloc_unpadded(inner.rt(), bytes),
                Pooling::Blocks => result::malloc(inner.rt(), bytes),
            };
            pointer.map(|pointer| (pointer, bytes))
        };
        let ran_out = |outcome: &Result<_>| matches!(outcome, Err(AscendError::OutOfMemory { .. }));
        let mut outcome = allocate(bytes);
        if ran_out(&outcome) {
            self.free_cached()?;
            outcome = allocate(bytes);
        }
        if ran_out(&outcome) && least_bytes < bytes {
            outcome = allocate(least_bytes);
        }
        outcome.map_err(|mut error| {
            if let AscendError::OutOfMemory {
                live_bytes,
                cached_bytes,
                largest_cached_bytes,
                ..
            } = &mut error
            {
                let memory = inner.memory_use();
                *live_bytes = memory.live_bytes;
                *cached_bytes = memory.cached_bytes;
                *largest_cached_bytes = memory.largest_cached_bytes;
            }
            error
        })
    }

    pub(super) fn give_back(&self, block: Block) {
        self.pool().put(block, &self.device.inner.counters);
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        let inner = &self.device.inner;
        inner.teardown(|| {
            let reported = self.reported.load(Ordering::Relaxed);
            let waited = self
                .wait()
                .or_else(|error| if reported { Ok(()) } else { Err(error) });
            // A stream after a failed wait runs no more work that could wait for an event.
            self.retired().clear();
            // All of them: buffers hold the stream, so none is left.
            let segments = self.pool().take_whole(&inner.counters);
            // SAFETY: the last handle: nothing is queued any more, and a stream whose wait failed
            // runs nothing more.
            let freed = unsafe { self.free(segments) };
            let mut destroyed = Ok(());
            if self.owned {
                // SAFETY: the last handle; buffers and events hold the stream, so none is left.
                destroyed = unsafe { result::destroy_stream(inner.rt(), self.raw) };
            }
            waited.and(freed).and(destroyed)
        });
    }
}

/// A queue of work on a device, with its own pool of device memory. Clones share it.
///
/// Work runs asynchronously, in queue order; the next synchronisation returns its errors. A buffer
/// is used on the stream that allocated it.
#[derive(Clone, Debug)]
pub struct Stream {
    pub(super) inner: Arc<StreamInner>,
}

impl Stream {
    #[doc(alias = "aclrtCreateStream")]
    pub(super) fn create(device: Device) -> Result<Self> {
        device.inner.enter()?;
        let raw = result::create_stream(device.inner.rt())?;
        Ok(Self::new(raw, true, device))
    }

    fn new(raw: aclrtStream, owned: bool, device: Device) -> Self {
        Self {
            inner: Arc::new(StreamInner {
                raw,
                owned,
                pool: device.inner.new_pool(),
                staging: Mutex::default(),
                retired: Mutex::default(),
                reported: AtomicBool::new(false),
                device,
            }),
        }
    }

    /// Borrows a stream with another owner, such as another framework's current stream. Work is
    /// interleaved with the owner's, and the handle never destroys the stream. Its buffers come
    /// from a separate pool and return to the device with the last handle, which waits for the
    /// stream.
    ///
    /// # Safety
    /// `raw` is a stream of `device`, and outlives this handle, its clones and everything created
    /// with them.
    pub unsafe fn borrowed(device: &Device, raw: aclrtStream) -> Self {
        Self::new(raw, false, device.clone())
    }

    /// The stream's device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// The raw handle, valid while this stream lives.
    pub(crate) fn raw(&self) -> aclrtStream {
        self.inner.raw
    }

    /// Waits until all queued work is done.
    ///
    /// # Errors
    /// [`AscendError::Execution`] if some of it failed, otherwise those of the runtime.
    #[doc(alias = "aclrtSynchronizeStream")]
    pub fn synchronize(&self) -> Result<()> {
        self.inner.device.inner.enter()?;
        self.inner.wait()
    }

    /// Returns cached memory to the device, and pinned memory to the host.
    ///
    /// # Errors
    /// As [`Self::synchronize`]; those of the runtime.
    pub fn trim(&self) -> Result<()> {
        self.inner.device.inner.enter()?;
        let freed = self.inner.free_cached();
        drop(self.inner.staging().free());
        freed
    }

    /// Allocates a buffer of `len` elements with undefined contents.
    ///
    /// # Errors
    /// [`AscendError::OutOfMemory`], otherwise those of the runtime.
    pub fn alloc<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        DeviceBuffer::new(self.clone(), len)
    }

    /// Allocates a buffer of `len` zeros.
    ///
    /// # Errors
    /// As [`Self::alloc`].
    #[doc(alias = "aclrtMemsetAsync")]
    pub fn zeros<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        let buffer = self.alloc::<T>(len)?;
        if len > 0 {
            self.make_current()?;
            // SAFETY: the buffer's extent; it stays allocated until the stream has passed this,
            // since a dropped buffer goes back to this stream's pool.
            unsafe {
                result::set_async(
                    self.inner.device.inner.rt(),
                    buffer.pointer(),
                    0,
                    buffer.bytes(),
                    self.inner.raw,
                )
            }?;
        }
        Ok(buffer)
    }

    /// Allocates a buffer and copies `values` to it. Returns when the copy is complete.
    ///
    /// # Errors
    /// As [`Self::alloc`] and [`Self::synchronize`].
    pub fn upload<T: Element>(&self, values: &[T]) -> Result<DeviceBuffer<T>> {
        let mut buffer = self.alloc(values.len())?;
        self.write(&mut buffer, values)?;
        Ok(buffer)
    }

    /// Allocates a buffer and queues a copy of `bytes` to it. Returns when they are in pinned
    /// memory; the copies to the device, one per 16 MiB, are queued. Waits for the stream when 64
    /// MiB are in queued copies.
    ///
    /// # Errors
    /// As [`Self::alloc`] and [`Self::synchronize`].
    #[doc(alias = "aclrtMemcpyAsync")]
    pub fn upload_queued(&self, bytes: &[u8]) -> Result<DeviceBuffer<u8>> {
        let buffer = self.alloc::<u8>(bytes.len())?;
        let mut first = 0;
        for piece in bytes.chunks(Staging::PIECE_BYTES) {
            self.queue_piece(buffer.pointer().wrapping_byte_add(first), piece)?;
            first += piece.len();
        }
        Ok(buffer)
    }

    /// Queues a copy of `piece` to `target`, which has the same length in a buffer of this stream.
    fn queue_piece(&self, target: *mut c_void, piece: &[u8]) -> Result<()> {
        self.make_current()?;
        if self.inner.staging().is_full() {
            self.synchronize()?;
        }
        let mut staging = self.inner.staging();
        let block_bytes = Staging::block_bytes(piece.len());
        let mut block = match staging.take(block_bytes) {
            Some(block) => block,
            None => PinnedBuffer::new(self.device().clone(), block_bytes)?,
        };
        block[..piece.len()].copy_from_slice(piece);
        // SAFETY: the caller's part of a buffer and as many bytes of the block. The block is
        // neither written nor freed before the stream has passed the copy (`Staging`); a dropped
        // buffer goes back to this stream's pool.
        let queued = unsafe {
            result::copy_async(
                self.inner.device.inner.rt(),
                target,
                block.as_ptr().cast(),
                piece.len(),
                aclrtMemcpyKind::HOST_TO_DEVICE,
                self.inner.raw,
            )
        };
        staging.queued(block);
        queued
    }

    /// Overwrites `buffer` with `values`, after the work queued before. Returns when the copy is
    /// complete.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] if the lengths differ or the buffer belongs to another
    /// stream; otherwise as [`Self::synchronize`].
    #[doc(alias = "aclrtMemcpy")]
    pub fn write<T: Element>(&self, buffer: &mut DeviceBuffer<T>, values: &[T]) -> Result<()> {
        self.same_length("write", buffer.len(), values.len())?;
        self.owns("write", buffer)?;
        let source = bytes_of(values);
        self.wait_and_copy(
            buffer.pointer(),
            source.as_ptr().cast(),
            source.len(),
            aclrtMemcpyKind::HOST_TO_DEVICE,
        )
    }

    /// Copies `buffer` into `values`, after the work queued before. Returns when the copy is
    /// complete.
    ///
    /// # Errors
    /// As [`Self::write`].
    #[doc(alias = "aclrtMemcpyAsync")]
    pub fn read<T: Element>(&self, buffer: &DeviceBuffer<T>, values: &mut [T]) -> Result<()> {
        self.same_length("read", buffer.len(), values.len())?;
        self.read_from(buffer, 0, values)
    }

    /// As [`Self::read`], for `values.len()` elements from `first` on.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn read_from<T: Element>(
        &self,
        buffer: &DeviceBuffer<T>,
        first: usize,
        values: &mut [T],
    ) -> Result<()> {
        if first.saturating_add(values.len()) > buffer.len() {
            return Err(AscendError::argument(
                "read",
                "elements",
                format!("within the buffer's {}", buffer.len()),
                format!("{} from {first}", values.len()),
            ));
        }
        self.owns("read", buffer)?;
        let target = bytes_of_mut(values);
        self.wait_and_copy(
            target.as_mut_ptr().cast(),
            buffer.pointer().cast::<T>().wrapping_add(first).cast(),
            target.len(),
            aclrtMemcpyKind::DEVICE_TO_HOST,
        )
    }

    /// Copies the contents of `buffer` to a new vector.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn download<T: Element>(&self, buffer: &DeviceBuffer<T>) -> Result<Vec<T>> {
        let mut values = vec![T::default(); buffer.len()];
        self.read(buffer, &mut values)?;
        Ok(values)
    }

    /// Queues a copy between buffers of this stream.
    ///
    /// # Errors
    /// As [`Self::write`].
    #[doc(alias = "aclrtMemcpyAsync")]
    pub fn copy<T: Element>(&self, from: &DeviceBuffer<T>, to: &mut DeviceBuffer<T>) -> Result<()> {
        self.same_length("copy", to.len(), from.len())?;
        self.owns("copy", from)?;
        self.owns("copy", to)?;
        let inner = &self.inner.device.inner;
        inner.enter()?;
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: both buffers hold as many elements, whatever their memory has beyond those; both
        // stay allocated until the stream has passed the copy, since dropped buffers go back to
        // this stream's pool.
        unsafe {
            result::copy_async(
                inner.rt(),
                to.pointer(),
                from.pointer(),
                from.len() * size_of::<T>(),
                aclrtMemcpyKind::DEVICE_TO_DEVICE,
                self.inner.raw,
            )
        }
    }

    /// Loads a binary of vector kernels.
    ///
    /// # Errors
    /// Those of the runtime.
    pub(crate) fn load(&self, binary: &[u8]) -> Result<Module> {
        Module::load(self.inner.device.clone(), binary)
    }

    /// True if both handles are of one stream.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Makes the stream's device the thread's current one, for calls outside this module.
    pub(crate) fn make_current(&self) -> Result<()> {
        self.inner.device.inner.enter()
    }

    /// Waits for the stream; a failure is kept for the next call.
    pub(crate) fn finish_quietly(&self) {
        self.inner.device.inner.teardown(|| self.inner.wait());
    }

    /// Keeps events until all queued work that waits for them is done.
    pub(super) fn retire<const N: usize>(&self, events: [Event; N]) {
        self.inner.retired().extend(events);
    }

    /// Rejects memory of another stream.
    pub(crate) fn owns(&self, operation: &'static str, memory: &DeviceMemory) -> Result<()> {
        if self.is(memory.stream()) {
            return Ok(());
        }
        Err(AscendError::argument(
            operation,
            "buffer",
            "made by this stream",
            "another stream's",
        ))
    }

    fn same_length(&self, operation: &'static str, expected: usize, found: usize) -> Result<()> {
        if expected == found {
            return Ok(());
        }
        Err(AscendError::argument(
            operation,
            "length",
            format!("{expected} elements"),
            found,
        ))
    }

    fn wait_and_copy(
        &self,
        dst: *mut c_void,
        src: *const c_void,
        bytes: usize,
        kind: aclrtMemcpyKind,
    ) -> Result<()> {
        let inner = &self.inner.device.inner;
        inner.enter()?;
        if bytes == 0 {
            return Ok(());
        }
        // Queued copies want pinned host memory, and this one may follow work on the buffer.
        self.inner.wait()?;
        // SAFETY: the callers pass a buffer's extent and a slice of the same length, borrowed
        // through the call; the stream, the only one that uses the buffer, is idle.
        unsafe { result::copy(inner.rt(), dst, src, bytes, kind) }
    }
}

//! Sums over several devices.

use std::borrow::Borrow;
use std::ffi::c_char;
use std::fmt;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use super::buffer::DeviceMemory;
use super::device::Device;
use super::event::Event;
use super::stream::Stream;
use crate::error::{AscendError, Result};
use crate::result::collective::{Caller, Exchange, Settings, Transfer};
use crate::sys::{HCCL_ROOT_INFO_BYTES, HcclComm, HcclDataType, HcclRootInfo};

/// The rendezvous data of one communicator's ranks, created by the device of rank 0 and sent
/// unchanged to the others.
#[derive(Clone)]
pub struct RootInfo(Box<HcclRootInfo>);

impl RootInfo {
    /// Returns its bytes, to be sent to another process.
    pub fn to_bytes(&self) -> Vec<u8> {
        // C's char is signed on x86-64 and unsigned on AArch64.
        let bytes = self.0.internal.iter().map(|c| c.to_ne_bytes()[0]);
        bytes.collect()
    }

    /// Creates the root info from the bytes of another process.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] if the number of bytes is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let internal: [u8; HCCL_ROOT_INFO_BYTES] = bytes.try_into().map_err(|_| {
            let expected = format!("{HCCL_ROOT_INFO_BYTES} bytes");
            AscendError::argument("read root info", "length", expected, bytes.len())
        })?;
        let internal = internal.map(|byte| c_char::from_ne_bytes([byte]));
        Ok(Self(Box::new(HcclRootInfo { internal })))
    }
}

impl fmt::Debug for RootInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RootInfo(..)")
    }
}

/// The options of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommunicatorOptions {
    /// The number of devices.
    pub ranks: u32,
    /// The rank of this device, from 0.
    pub rank: u32,
    /// Size in MiB of each of its two buffers in device memory.
    pub buffer_mib: u32,
    /// True if sums have a fixed order, so that runs on the same devices are bit-identical.
    pub deterministic: bool,
    /// The time limit in seconds for an operation to wait for the other ranks, if the installation
    /// supports it.
    pub timeout_s: u32,
}

impl CommunicatorOptions {
    /// Creates options for rank `rank` of `ranks`, from the library's variables `HCCL_BUFFSIZE`,
    /// `HCCL_DETERMINISTIC` and `HCCL_EXEC_TIMEOUT`. The defaults are 200 MiB per buffer, as in the
    /// library, a fixed order, and ten minutes.
    pub fn new(ranks: u32, rank: u32) -> Self {
        let number = |name: &str, default| {
            let text = std::env::var(name).ok();
            text.and_then(|text| text.parse().ok()).unwrap_or(default)
        };
        Self {
            ranks,
            rank,
            buffer_mib: number("HCCL_BUFFSIZE", 200),
            deterministic: std::env::var("HCCL_DETERMINISTIC").as_deref() != Ok("false"),
            timeout_s: number("HCCL_EXEC_TIMEOUT", 600),
        }
    }

    /// Bytes of device memory used by the communicator.
    pub fn bytes(&self) -> usize {
        (2 * (self.buffer_mib as usize)) << 20
    }
}

/// Element types of collective operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumType {
    /// 32-bit float.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// bfloat16, which not every product supports.
    Bf16,
}

impl SumType {
    fn dtype(self) -> (HcclDataType, usize) {
        match self {
            Self::F32 => (HcclDataType::FP32, 4),
            Self::F16 => (HcclDataType::FP16, 2),
            Self::Bf16 => (HcclDataType::BF16, 2),
        }
    }
}

/// Elements of device memory in an operation, held until it is done.
#[derive(Clone, Copy, Debug)]
pub struct Span<M> {
    /// The memory.
    pub memory: M,
    /// Byte offset of the elements.
    pub first_byte: usize,
    /// The number of elements.
    pub count: usize,
}

/// Counts of the requests to a communicator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// The number of operations.
    pub calls: u64,
    /// Bytes of the tensors passed to them.
    pub bytes: u64,
    /// The minimum bytes that a rank must send: with n ranks, (n - 1) / n of a tensor for
    /// reduce-scatter and all-gather, and twice that for all-reduce; for all-to-all, the elements of
    /// other ranks.
    pub least_sent_bytes: u64,
}

#[derive(Debug, Default)]
struct Counters {
    calls: AtomicU64,
    bytes: AtomicU64,
    least_sent_bytes: AtomicU64,
}

/// The kind of an operation, for its bounds and its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    AllReduce,
    ReduceScatter,
    AllGather,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllGather => "all-gather",
        }
    }
}

/// One device's handle on a group of devices, each with a separate thread.
///
/// All ranks call the same operations in the same order with numbers of elements that agree. An
/// operation is queued on a stream of the communicator, after the work on the device's stream. Work
/// queued later on the device's stream waits for the operation once its [`Pending`] is dropped.
#[derive(Debug)]
pub struct Communicator {
    raw: HcclComm,
    options: CommunicatorOptions,
    is_fixed: bool,
    counters: Counters,
    /// The stream of the memory.
    compute: Stream,
    /// After the communicator, which its drop destroys.
    stream: Stream,
}

// SAFETY: the library lets any thread of the process use a communicator while its device is the
// thread's current one, one call of a device at a time: `call` holds the device's lock.
unsafe impl Send for Communicator {}
// SAFETY: every call of the library is made with the device's lock held.
unsafe impl Sync for Communicator {}

impl Device {
    /// Creates the root info by which other ranks find this device, which becomes rank 0 of one
    /// communicator.
    ///
    /// # Errors
    /// [`AscendError::Load`] if the collective library is missing; those of the library.
    #[doc(alias = "HcclGetRootInfo")]
    pub fn root_info(&self) -> Result<RootInfo> {
        self.call(0, |caller| caller.root_info()).map(RootInfo)
    }

    /// Calls the collective library, alone on this device.
    fn call<T>(&self, rank: u32, work: impl FnOnce(Caller<'_>) -> Result<T>) -> Result<T> {
        self.inner.enter()?;
        self.call_entered(rank, work)
    }

    /// As [`call`](Self::call), for a device that is current.
    fn call_entered<T>(&self, rank: u32, work: impl FnOnce(Caller<'_>) -> Result<T>) -> Result<T> {
        let api = &self.inner.runtime.inner.api;
        let hccl = api.hccl.as_ref().map_err(Clone::clone)?;
        let calls = self.inner.collective_calls.lock();
        let _alone = calls.unwrap_or_else(PoisonError::into_inner);
        work(Caller {
            rt: &api.rt,
            hccl,
            rank,
        })
    }
}

impl Communicator {
    /// Makes the device of a stream a rank, for memory of that stream. Returns when all ranks have
    /// joined, or after the library's `HCCL_CONNECT_TIMEOUT`.
    ///
    /// # Errors
    /// [`AscendError::Load`] if the collective library is missing; [`AscendError::InvalidArgument`]
    /// if the rank is out of range; [`AscendError::Collective`] if another rank does not join;
    /// those of the runtime.
    #[doc(alias = "HcclCommInitRootInfoConfig")]
    pub fn join(stream: &Stream, root: &RootInfo, options: CommunicatorOptions) -> Result<Self> {
        let CommunicatorOptions { ranks, rank, .. } = options;
        if rank >= ranks {
            let expected = format!("below {ranks}");
            return Err(AscendError::argument("join ranks", "rank", expected, rank));
        }
        let device = stream.device().clone();
        let own = device.stream()?;
        let settings = Settings {
            buffer_mb: options.buffer_mib,
            deterministic: options.deterministic,
            timeout_s: options.timeout_s,
        };
        let (raw, is_fixed) = device.call(rank, |caller| caller.join(ranks, &root.0, settings))?;
        device.inner.counters.communicator_made(options.bytes());
        Ok(Self {
            raw,
            options,
            is_fixed,
            counters: Counters::default(),
            compute: stream.clone(),
            stream: own,
        })
    }

    /// The options of its creation.
    pub fn options(&self) -> CommunicatorOptions {
        self.options
    }

    /// True if sums have a fixed order: runs on the same devices are then bit-identical.
    pub fn is_deterministic(&self) -> bool {
        self.is_fixed
    }

    /// The requests to it so far.
    pub fn traffic(&self) -> Traffic {
        Traffic {
            calls: self.counters.calls.load(Ordering::Relaxed),
            bytes: self.counters.bytes.load(Ordering::Relaxed),
            least_sent_bytes: self.counters.least_sent_bytes.load(Ordering::Relaxed),
        }
    }

    /// Queues an all-reduce: replaces elements by their sum over all ranks.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] for memory of another stream or elements outside of it;
    /// [`AscendError::Collective`]; those of the runtime. A missing rank surfaces at the next
    /// synchronisation of the stream.
    #[doc(alias = "HcclAllReduce")]
    pub fn all_reduce<M>(&self, of: Span<M>, dtype: SumType) -> Result<Pending<M>>
    where
        M: Borrow<DeviceMemory>,
    {
        let address = self.address(Operation::AllReduce.name(), &of, of.count, dtype)?;
        let event = self.queue(Operation::AllReduce, (address, address), of.count, dtype)?;
        Ok(self.pending(of.memory, event))
    }

    /// Queues a reduce-scatter: writes this rank's shard of the sum over all ranks to `to`. `from`
    /// has a shard of `to.count` elements per rank, in rank order.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce). The caller must ensure that the spans do not overlap.
    #[doc(alias = "HcclReduceScatter")]
    pub fn reduce_scatter<M, N>(
        &self,
        from: Span<M>,
        to: Span<N>,
        dtype: SumType,
    ) -> Result<Pending<(M, N)>>
    where
        M: Borrow<DeviceMemory>,
        N: Borrow<DeviceMemory>,
    {
        let operation = Operation::ReduceScatter;
        let name = operation.name();
        let send = self.address(name, &from, self.total_elems(to.count), dtype)?;
        let receive = self.address(name, &to, to.count, dtype)?;
        let event = self.queue(operation, (send, receive), to.count, dtype)?;
        Ok(self.pending((from.memory, to.memory), event))
    }

    /// Queues an all-gather: writes the elements of all ranks to `to` in rank order, `from.count`
    /// of each.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    #[doc(alias = "HcclAllGather")]
    pub fn all_gather<M, N>(
        &self,
        from: Span<M>,
        to: Span<N>,
        dtype: SumType,
    ) -> Result<Pending<(M, N)>>
    where
        M: Borrow<DeviceMemory>,
        N: Borrow<DeviceMemory>,
    {
        let operation = Operation::AllGather;
        let name = operation.name();
        let send = self.address(name, &from, from.count, dtype)?;
        let receive = self.address(name, &to, self.total_elems(from.count), dtype)?;
        let event = self.queue(operation, (send, receive), from.count, dtype)?;
        Ok(self.pending((from.memory, to.memory), event))
    }

    /// Queues an all-to-all: gives each rank its elements of `from`, as many as the first list of
    /// `counts` says for it, and writes those that the ranks give to this one to `to`, as many as
    /// the second list says; both in rank order. Each rank must expect what the others give.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter); [`AscendError::InvalidArgument`] for lists that
    /// have no number for each rank, or do not add up to the elements of the spans.
    #[doc(alias = "HcclAlltoAllV")]
    pub fn all_to_all<M, N>(
        &self,
        from: Span<M>,
        to: Span<N>,
        counts: [&[usize]; 2],
        dtype: SumType,
    ) -> Result<Pending<(M, N)>>
    where
        M: Borrow<DeviceMemory>,
        N: Borrow<DeviceMemory>,
    {
        let operation = "all-to-all";
        for list in counts {
            if list.len() != self.options.ranks as usize {
                let expected = format!("one for each of {} ranks", self.options.ranks);
                let found = list.len();
                return Err(AscendError::argument(operation, "counts", expected, found));
            }
        }
        let totals = counts.map(|list| list.iter().fold(0_usize, |sum, n| sum.saturating_add(*n)));
        let send = self.address(operation, &from, totals[0], dtype)?;
        let receive = self.address(operation, &to, totals[1], dtype)?;
        let of_memory = |address: usize, total: usize| match total {
            0 => std::ptr::null_mut(),
            _ => address as *mut _,
        };
        let counts = counts.map(|list| list.iter().map(|n| *n as u64).collect::<Vec<_>>());
        let displacements = counts.each_ref().map(|list| {
            let first = |end: &mut u64, count: &u64| {
                *end += count;
                Some(*end - count)
            };
            list.iter().scan(0, first).collect::<Vec<_>>()
        });
        let (hccl_dtype, size) = dtype.dtype();
        let exchange = Exchange {
            buffers: [of_memory(send, totals[0]), of_memory(receive, totals[1])],
            counts: counts.each_ref().map(|list| &list[..]),
            displacements: displacements.each_ref().map(|list| &list[..]),
            dtype: hccl_dtype,
            stream: self.stream.raw(),
        };
        // SAFETY: a communicator and a stream that live as long as `self`, of the device that
        // `call` enters; the lists have a number for each rank, and their elements were checked to
        // lie in memory that `Pending` holds until the device's stream waits for the operation.
        let events = self.queued(|caller| unsafe { caller.all_to_all(self.raw, exchange) })?;
        let own = counts[0][self.options.rank as usize] as usize;
        let bytes = totals[0].max(totals[1]) * size;
        self.add_traffic(bytes as u64, ((totals[0] - own) * size) as u64);
        Ok(self.pending((from.memory, to.memory), Some(events)))
    }

    /// Elements of all ranks together.
    fn total_elems(&self, count: usize) -> usize {
        count.saturating_mul(self.options.ranks as usize)
    }

    /// Where a span of `expected` elements begins, if it lies in its memory and that is of the
    /// device's stream.
    fn address<M: Borrow<DeviceMemory>>(
        &self,
        operation: &'static str,
        span: &Span<M>,
        expected: usize,
        dtype: SumType,
    ) -> Result<usize> {
        let memory = span.memory.borrow();
        self.compute.owns(operation, memory)?;
        if span.count != expected {
            let expected = format!("{expected}");
            return Err(AscendError::argument(
                operation, "elements", expected, span.count,
            ));
        }
        let (_, size) = dtype.dtype();
        let end = span.count.checked_mul(size);
        let end = end.and_then(|bytes| bytes.checked_add(span.first_byte));
        if end.is_none_or(|end| end > memory.bytes()) || !span.first_byte.is_multiple_of(size) {
            return Err(AscendError::argument(
                operation,
                "elements",
                format!(
                    "aligned, and within the {} bytes of their buffer",
                    memory.bytes()
                ),
                format!(
                    "{} of {size} bytes from byte {}",
                    span.count, span.first_byte
                ),
            ));
        }
        Ok(memory.pointer() as usize + span.first_byte)
    }

    /// Queues an operation after the work on the device's stream, with an event at its end. Nothing
    /// is queued without elements.
    fn queue(
        &self,
        operation: Operation,
        (send, receive): (usize, usize),
        count: usize,
        dtype: SumType,
    ) -> Result<Option<[Event; 2]>> {
        if count == 0 {
            return Ok(None);
        }
        let (dtype, size) = dtype.dtype();
        let transfer = Transfer {
            send: send as *mut _,
            receive: receive as *mut _,
            count: count as u64,
            dtype,
            stream: self.stream.raw(),
        };
        // SAFETY: a communicator and a stream that live as long as `self`, of the device that
        // `call` enters; the callers checked that the elements lie in memory that `Pending` holds
        // until the device's stream waits for the end of the operation.
        let events = self.queued(|caller| unsafe {
            match operation {
                Operation::AllReduce => caller.all_reduce(self.raw, transfer),
                Operation::ReduceScatter => caller.reduce_scatter(self.raw, transfer),
                Operation::AllGather => caller.all_gather(self.raw, transfer),
            }
        })?;
        let ranks = u64::from(self.options.ranks);
        let (rounds, parts) = match operation {
            Operation::AllReduce => (2, 1),
            _ => (1, ranks),
        };
        let bytes = (count * size) as u64 * parts;
        self.add_traffic(bytes, rounds * bytes / ranks * (ranks - 1));
        Ok(Some(events))
    }

    /// Queues a call after the work on the device's stream, between two events.
    fn queued(&self, call: impl FnOnce(Caller<'_>) -> Result<()>) -> Result<[Event; 2]> {
        let begin = Event::record(&self.compute)?;
        begin.let_wait(&self.stream)?;
        if let Err(error) = self.stream.device().call(self.options.rank, call) {
            // The stream waits for the event still.
            self.stream.retire([begin]);
            return Err(error);
        }
        match Event::record(&self.stream) {
            Ok(end) => Ok([begin, end]),
            Err(error) => {
                // Nothing but the host can wait for the operation then.
                self.stream.finish_quietly();
                Err(error)
            }
        }
    }

    fn add_traffic(&self, bytes: u64, least: u64) {
        self.counters.calls.fetch_add(1, Ordering::Relaxed);
        self.counters.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.counters
            .least_sent_bytes
            .fetch_add(least, Ordering::Relaxed);
    }

    fn pending<M>(&self, memory: M, events: Option<[Event; 2]>) -> Pending<M> {
        Pending {
            events,
            stream: self.compute.clone(),
            memory: Some(memory),
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let inner = &self.stream.device().inner;
        // A communicator in use cannot be destroyed.
        self.stream.finish_quietly();
        // SAFETY: the last handle; nothing of it is queued any more.
        let destroy = |caller: Caller<'_>| unsafe { caller.destroy(self.raw) };
        let device = self.stream.device();
        inner.teardown(|| device.call_entered(self.options.rank, destroy));
        inner.counters.communicator_dropped(self.options.bytes());
    }
}

/// A queued operation with its memory. Dropping it makes the device's stream, not the caller, wait
/// for the operation.
#[derive(Debug)]
#[must_use = "what is queued next waits for the operation when this is dropped"]
pub struct Pending<M> {
    events: Option<[Event; 2]>,
    stream: Stream,
    memory: Option<M>,
}

impl<M> Pending<M> {
    /// Makes the device's stream wait for the operation and returns the memory.
    ///
    /// # Errors
    /// Those of the runtime.
    pub fn finish(mut self) -> Result<M> {
        self.let_wait()?;
        self.memory
            .take()
            .ok_or_else(|| AscendError::argument("finish an operation", "memory", "held", "none"))
    }

    fn let_wait(&mut self) -> Result<()> {
        let Some([begin, end]) = self.events.take() else {
            return Ok(());
        };
        let waits = end.let_wait(&self.stream);
        // Once the host has waited for this stream, it has passed both events.
        self.stream.retire([begin, end]);
        waits
    }
}

impl<M> Drop for Pending<M> {
    fn drop(&mut self) {
        let stream = self.stream.clone();
        if let Err(error) = self.let_wait() {
            // The operation may still use the memory, so it is leaked.
            std::mem::forget(self.memory.take());
            stream.device().inner.runtime.inner.record(Err(error));
        }
    }
}

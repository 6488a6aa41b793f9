//! The collective functions: `Hccl*`.
#![allow(non_snake_case, reason = "the vendor's spelling")]

use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::abi::export::export;
use crate::abi::runtime::put;
use crate::aclnn::DataType;
use crate::clock::Actor;
use crate::codes::*;
use crate::collective::{
    self, Communicator, Config, Hub, InCall, Operation, Product, Queued, Reduction, Request,
    RootInfo,
};
use crate::state::{Sim, sim};
use crate::stream::{TaskContext, Work, engine};
use crate::trace::Violation;

/// Offsets in the configuration of version 10, and what it says at its beginning.
const CONFIG_BYTES: usize = 2240;
const CONFIG_MAGIC: u32 = 0xf0f0_f0f0;
const CONFIG_VERSION: u32 = 10;
const OFFSET_MAGIC: usize = 8;
const OFFSET_VERSION: usize = 12;
const OFFSET_BUFFER: usize = 24;
const OFFSET_DETERMINISTIC: usize = 28;
const OFFSET_EXEC_TIMEOUT: usize = 316;
const NOT_SET: u32 = u32::MAX;
/// The number of features that a configuration may set.
const CAPABILITY: u32 = 12;
const CONFIG_DETERMINISTIC: i32 = 0;
/// Largest code of the library; those above are the runtime's.
const LARGEST_CODE: i32 = 1041;

/// The library's texts for its codes.
const TEXTS: [(i32, &std::ffi::CStr); 10] = [
    (SUCCESS, c"no error"),
    (HCCL_E_PARA, c"parameter error"),
    (HCCL_E_PTR, c"empty pointer"),
    (HCCL_E_MEMORY, c"memory error"),
    (HCCL_E_INTERNAL, c"internal error"),
    (HCCL_E_NOT_SUPPORT, c"not support feature"),
    (HCCL_E_TIMEOUT, c"timeout"),
    (HCCL_E_TCP_CONNECT, c"tcp connect fail"),
    (HCCL_E_RUNTIME, c"call runtime api fail"),
    (HCCL_E_AGAIN, c"return again"),
];

fn wrong<T>(message: impl std::fmt::Display) -> Outcome<T> {
    Err(Failure::new(HCCL_E_PARA, message))
}

/// Gives failures of the runtime a code of the library.
fn library<T>(outcome: Outcome<T>) -> Outcome<T> {
    outcome.map_err(|failure| match failure.code {
        code if code <= LARGEST_CODE => failure,
        RT_INVALID_HANDLE => Failure::new(HCCL_E_PARA, failure.message),
        _ => Failure::new(HCCL_E_RUNTIME, failure.message),
    })
}

fn not_null<T>(pointer: *const T, name: &str) -> Outcome {
    if pointer.is_null() {
        return Err(Failure::new(HCCL_E_PTR, format!("{name} is null")));
    }
    Ok(())
}

/// The root info that a program hands over.
///
/// # Safety
/// - `root` is null or valid for reading as many bytes as a root info has.
unsafe fn read_root(root: *const c_void) -> Outcome<RootInfo> {
    not_null(root, "rootInfo")?;
    // SAFETY: not null, and readable by the function's own condition.
    let bytes = unsafe { std::slice::from_raw_parts(root.cast::<u8>(), RootInfo::BYTES) };
    RootInfo::from_bytes(bytes)
}

/// The configuration that a program hands over.
///
/// # Safety
/// - `config` is null or valid for reading as many bytes as a configuration has.
unsafe fn read_config(config: *const c_void, of_process: Config) -> Outcome<Config> {
    not_null(config, "config")?;
    // SAFETY: not null, and readable by the function's own condition.
    let bytes = unsafe { std::slice::from_raw_parts(config.cast::<u8>(), CONFIG_BYTES) };
    let word = |offset: usize| {
        let mut raw = [0; 4];
        raw.copy_from_slice(&bytes[offset..offset + 4]);
        u32::from_le_bytes(raw)
    };
    let (size, magic) = (word(0), word(OFFSET_MAGIC));
    if size as usize != CONFIG_BYTES || word(4) != 0 || magic != CONFIG_MAGIC {
        return wrong(format!(
            "a configuration of {size} bytes with the mark 0x{magic:x}; expected {CONFIG_BYTES} \
             and 0x{CONFIG_MAGIC:x}"
        ));
    }
    if word(OFFSET_VERSION) != CONFIG_VERSION {
        return wrong(format!(
            "a configuration of version {}",
            word(OFFSET_VERSION)
        ));
    }
    let mut found = of_process;
    match word(OFFSET_BUFFER) {
        NOT_SET => {}
        0 => return wrong("hcclBufferSize is 0"),
        mb => found.buffer_bytes = (2 * u64::from(mb)) << 20,
    }
    match word(OFFSET_DETERMINISTIC) {
        NOT_SET => {}
        value @ 0..=2 => found.deterministic = value > 0,
        value => return wrong(format!("hcclDeterministic is {value}")),
    }
    match word(OFFSET_EXEC_TIMEOUT).cast_signed() {
        seconds if seconds < 0 || sim().collectives.timeouts_are_set => {}
        seconds => found.exec_timeout = Duration::from_secs(seconds.unsigned_abs().into()),
    }
    Ok(found)
}

/// Makes the thread's device a rank.
fn join(ranks: u32, root: RootInfo, rank: u32, config: Config, comm: *mut *mut c_void) -> Outcome {
    not_null(comm, "comm")?;
    if rank >= ranks {
        return wrong(format!("rank {rank} of {ranks} ranks"));
    }
    let device = sim().current_device()?;
    let _call = InCall::begin(device)?;
    let bytes = config.buffer_bytes;
    {
        let mut state = sim();
        let free = state.allocation_limit(device);
        let used = state.memory.used_bytes(device);
        if bytes > free.saturating_sub(used) {
            let message = format!(
                "the buffers of a communicator take {bytes} bytes, {} of device {device} are free",
                free.saturating_sub(used)
            );
            return Err(Failure::new(HCCL_E_MEMORY, message));
        }
        state.collectives.take_memory(device, bytes);
    }
    let joined = Communicator::join(&root, (ranks, rank), device, config);
    let mut state = sim();
    // Its root info is of no use any more.
    state.collectives.hubs.remove(&root.id);
    match joined {
        Ok(communicator) => {
            let handle = state.communicators.insert(Arc::new(communicator));
            // SAFETY: not null, and valid for writing by the C declaration.
            unsafe { put(comm, handle as *mut c_void, "comm") }
        }
        Err(failure) => {
            state.collectives.give_memory(device, bytes);
            Err(failure)
        }
    }
}

/// One of the two tensors of an operation.
#[derive(Clone, Copy)]
struct Tensor {
    address: u64,
    bytes: u64,
}

impl Tensor {
    /// Refuses what is no memory of the device for as many elements.
    fn check(self, state: &Sim, device: u32, element: u64, name: &str) -> Outcome {
        let Self { address, bytes } = self;
        if address == 0 {
            return Err(Failure::new(HCCL_E_PTR, format!("{name} is null")));
        }
        if !address.is_multiple_of(element) {
            return wrong(format!(
                "{name} 0x{address:x} is not aligned to {element} bytes"
            ));
        }
        let found = state.memory.find(address, bytes);
        let allocation = found
            .map_err(|failure| Failure::new(HCCL_E_PARA, format!("{name}: {}", failure.message)))?;
        if allocation.device != device {
            return wrong(format!(
                "{name} 0x{address:x} is memory of device {}, the communicator is of device \
                 {device}",
                allocation.device
            ));
        }
        Ok(())
    }

    fn overlaps(self, other: Self) -> bool {
        self.address < other.address + other.bytes && other.address < self.address + self.bytes
    }
}

/// A call's request, by the numbers of its parameters.
struct Asked {
    operation: Operation,
    send: *mut c_void,
    receive: *mut c_void,
    count: u64,
    dtype: i32,
    how: i32,
    comm: *mut c_void,
    stream: *mut c_void,
}

/// A call's communicator, of the current device.
fn communicator(state: &Sim, handle: *mut c_void, device: u32) -> Outcome<Arc<Communicator>> {
    let of = Arc::clone(state.communicators.get(handle as u64)?);
    if of.device != device {
        return wrong(format!(
            "the communicator is of device {}, the thread's current device is {device}",
            of.device
        ));
    }
    Ok(of)
}

fn element(dtype: i32) -> Outcome<DataType> {
    match collective::number(dtype) {
        Some(number) => Ok(number),
        None => wrong(format!("element type {dtype} does not exist")),
    }
}

/// Checks a call and puts its operation on the stream.
fn call(asked: Asked) -> Outcome {
    let Asked {
        operation, count, ..
    } = asked;
    let device = sim().current_device()?;
    let _call = InCall::begin(device)?;
    let mut state = sim();
    let of = communicator(&state, asked.comm, device)?;
    let number = element(asked.dtype)?;
    let Some(how) = Reduction::from_code(asked.how) else {
        return wrong(format!("reduction {} does not exist", asked.how));
    };
    if operation.reduces() && !Product::of(&state.machine).reduces(number, how) {
        let product = state.machine.soc_name.to_string_lossy();
        let message = format!("{product} does not combine {number:?} by {how:?}");
        return Err(Failure::new(HCCL_E_NOT_SUPPORT, message));
    }
    if count == 0 {
        return wrong("0 elements");
    }
    let size = number.bytes();
    let [send, receive] = operation
        .elements(count, of.ranks)
        .map(|n| n.saturating_mul(size));
    let send = Tensor {
        address: asked.send as u64,
        bytes: send,
    };
    let receive = Tensor {
        address: asked.receive as u64,
        bytes: receive,
    };
    send.check(&state, device, size, "sendBuf")?;
    receive.check(&state, device, size, "recvBuf")?;
    let in_place = operation == Operation::AllReduce && send.address == receive.address;
    if !in_place && send.overlaps(receive) {
        return wrong("sendBuf and recvBuf overlap");
    }
    let request = Request {
        sequence: 0,
        operation,
        number,
        how,
        count,
        pairs: Vec::new(),
        data: Vec::new(),
    };
    submit(
        &mut state,
        &of,
        asked.stream,
        request,
        [vec![send], vec![receive]],
    )?;
    state.collectives.count(operation, &of, count, size);
    Ok(())
}

/// Puts an operation on the stream, with the memory that it reads and writes.
fn submit(
    state: &mut Sim,
    of: &Arc<Communicator>,
    stream: *mut c_void,
    mut request: Request,
    memory: [Vec<Tensor>; 2],
) -> Outcome {
    let stream = state.stream_handle(stream as u64)?;
    match of.stream.swap(stream, Ordering::AcqRel) {
        0 => {}
        before if before == stream => {}
        before => {
            let message = format!(
                "the communicator's operations were on stream 0x{before:x} and are on \
                 0x{stream:x} now, which is not simulated"
            );
            return Err(Failure::new(HCCL_E_NOT_SUPPORT, message));
        }
    }
    let queued = of.queue();
    request.sequence = queued.sequence;
    let function = request.operation.function();
    let addresses: Vec<u64> = memory.iter().flatten().map(|part| part.address).collect();
    let work = Work::Meet(Box::new(move |context| {
        run(&queued, request, &memory, context)
    }));
    state
        .submit_using(stream, work, function, addresses)
        .map(drop)
}

/// One side of an exchange between pairs of ranks, by the parameters of the call.
#[derive(Clone, Copy)]
struct Side {
    name: &'static str,
    buffer: *const c_void,
    counts: *const c_void,
    displacements: *const c_void,
}

impl Side {
    /// The elements of each rank, and their memory.
    ///
    /// # Safety
    /// - Both lists are null or have a number for each of `ranks`.
    unsafe fn read(
        self,
        state: &Sim,
        of: &Communicator,
        size: u64,
    ) -> Outcome<(Vec<u64>, Vec<Tensor>)> {
        let name = self.name;
        let list = |list: *const c_void, what: &str| -> Outcome<Vec<u64>> {
            not_null(list, &format!("the list of {what} of {name}"))?;
            let list = list.cast::<u64>();
            // SAFETY: not null, and a number for each rank by the function's own condition.
            Ok((0..of.ranks as usize)
                .map(|rank| unsafe { list.add(rank).read_unaligned() })
                .collect())
        };
        let counts = list(self.counts, "counts")?;
        let displacements = list(self.displacements, "displacements")?;
        let mut memory = Vec::new();
        for (rank, (count, at)) in counts.iter().zip(displacements).enumerate() {
            let place = |elements: u64| elements.checked_mul(size);
            let address = place(at).and_then(|at| (self.buffer as u64).checked_add(at));
            let (Some(address), Some(bytes)) = (address, place(*count)) else {
                return wrong(format!(
                    "{name} has {count} elements of rank {rank} at {at}"
                ));
            };
            let part = Tensor { address, bytes };
            if *count > 0 {
                not_null(self.buffer, name)?;
                part.check(state, of.device, size, &format!("{name} of rank {rank}"))?;
                memory.push(part);
            }
        }
        Ok((counts, memory))
    }
}

/// Checks an exchange between pairs of ranks and puts it on the stream.
///
/// # Safety
/// - The lists of the sides are null or have a number for each rank.
unsafe fn exchange(
    sides: [Side; 2],
    dtypes: [i32; 2],
    comm: *mut c_void,
    stream: *mut c_void,
) -> Outcome {
    let device = sim().current_device()?;
    let _call = InCall::begin(device)?;
    let mut state = sim();
    let of = communicator(&state, comm, device)?;
    let number = element(dtypes[0])?;
    if element(dtypes[1])? != number {
        return wrong(format!("sendType is {}, recvType {}", dtypes[0], dtypes[1]));
    }
    if !Product::of(&state.machine).exchanges(number) {
        let product = state.machine.soc_name.to_string_lossy();
        let message = format!("{product} does not exchange {number:?}");
        return Err(Failure::new(HCCL_E_NOT_SUPPORT, message));
    }
    let size = number.bytes();
    // SAFETY: by the function's own condition.
    let [given, received] = sides.map(|side| unsafe { side.read(&state, &of, size) });
    let ((given, send), (received, receive)) = (given?, received?);
    let mut in_order = receive.clone();
    in_order.sort_unstable_by_key(|part| part.address);
    if in_order.windows(2).any(|pair| pair[0].overlaps(pair[1])) {
        return wrong("the elements of two ranks overlap in recvBuf");
    }
    if send
        .iter()
        .any(|from| receive.iter().any(|to| from.overlaps(*to)))
    {
        return wrong("sendBuf and recvBuf overlap");
    }
    let pairs: Vec<[u64; 2]> = given
        .into_iter()
        .zip(received)
        .map(<[u64; 2]>::from)
        .collect();
    let request = Request {
        sequence: 0,
        operation: Operation::AllToAll,
        number,
        how: Reduction::Sum,
        // The ranks differ in their counts.
        count: 0,
        pairs: pairs.clone(),
        data: Vec::new(),
    };
    submit(&mut state, &of, stream, request, [send, receive])?;
    state.collectives.count_pairs(&pairs, &of, size);
    Ok(())
}

/// An operation on its stream.
fn run(
    queued: &Queued,
    mut request: Request,
    [send, receive]: &[Vec<Tensor>; 2],
    context: &TaskContext,
) -> Outcome {
    let function = request.operation.function();
    let fault = sim().stream_faults.next(function);
    fault.map_or(Ok(()), |fault| fault.strike(function))?;
    {
        let mut state = sim();
        for part in send {
            state.task_touch(part.address, part.bytes, false, context, function);
        }
        for part in receive {
            state.task_touch(part.address, part.bytes, true, context, function);
        }
    }
    for part in send {
        let engine = engine();
        let (bytes, offset) = sim().memory.share(part.address, part.bytes)?;
        request
            .data
            .extend(bytes.slice(&engine, offset, part.bytes as usize));
    }
    let received = queued.of.exchange(request).inspect_err(|failure| {
        if failure.code == RT_COLLECTIVE_MISMATCH {
            let Actor::Stream(stream) = context.actor else {
                return;
            };
            let message = format!("{}, on stream 0x{stream:x}", failure.message);
            sim().violate(Violation::host("collective", message));
        }
    })?;
    let mut rest = &received[..];
    for part in receive {
        let (own, next) = rest.split_at(part.bytes as usize);
        let mut engine = engine();
        let (target, offset) = sim().memory.share(part.address, part.bytes)?;
        target.write(&mut engine, offset, own);
        rest = next;
    }
    Ok(())
}

export! {
    status {
        fn HcclGetRootInfo(rootInfo: *mut c_void) {
            library((|| {
                not_null(rootInfo, "rootInfo")?;
                let (device, any_order) = {
                    let state = sim();
                    let product = Product::of(&state.machine);
                    (state.current_device()?, product.adds_in_any_order())
                };
                let _call = InCall::begin(device)?;
                let (root, hub) = Hub::open(any_order)?;
                sim().collectives.hubs.insert(root.id, hub);
                let bytes = root.to_bytes();
                // SAFETY: not null, and valid for writing a root info by the C declaration.
                unsafe { rootInfo.copy_from_nonoverlapping(bytes.as_ptr().cast(), bytes.len()) };
                Ok(())
            })())
        }
        fn HcclCommInitRootInfo(
            nRanks: u32, rootInfo: *const c_void, rank: u32, comm: *mut *mut c_void,
        ) {
            let config = Config::of_process(&sim().collectives);
            // SAFETY: null or a root info by the C declaration.
            let root = unsafe { read_root(rootInfo) }?;
            library(join(nRanks, root, rank, config, comm))
        }
        fn HcclCommInitRootInfoConfig(
            nRanks: u32, rootInfo: *const c_void, rank: u32, config: *const c_void,
            comm: *mut *mut c_void,
        ) {
            let of_process = Config::of_process(&sim().collectives);
            // SAFETY: null, or a root info and a configuration by the C declaration.
            let (root, config) = unsafe { (read_root(rootInfo)?, read_config(config, of_process)?) };
            library(join(nRanks, root, rank, config, comm))
        }
        fn HcclCommDestroy(comm: *mut c_void) {
            library((|| {
                let device = sim().current_device()?;
                let _call = InCall::begin(device)?;
                let mut state = sim();
                let found = Arc::clone(state.communicators.get(comm as u64)?);
                if found.is_busy() {
                    let message = "the communicator is in use: wait for its stream first";
                    return Err(Failure::new(HCCL_E_AGAIN, message));
                }
                state.communicators.remove(comm as u64)?;
                state.collectives.give_memory(found.device, found.config.buffer_bytes);
                drop(state);
                found.close();
                Ok(())
            })())
        }
        fn HcclSetConfig(config: i32, configValue: i32) {
            if config != CONFIG_DETERMINISTIC || !(0..=2).contains(&configValue) {
                return wrong(format!("configuration {config} of value {configValue}"));
            }
            sim().collectives.deterministic = configValue > 0;
            Ok(())
        }
        fn HcclAllReduce(
            sendBuf: *mut c_void, recvBuf: *mut c_void, count: u64, dataType: i32, op: i32,
            comm: *mut c_void, stream: *mut c_void,
        ) {
            library(call(Asked {
                operation: Operation::AllReduce,
                send: sendBuf, receive: recvBuf, count, dtype: dataType, how: op, comm, stream,
            }))
        }
        fn HcclReduceScatter(
            sendBuf: *mut c_void, recvBuf: *mut c_void, recvCount: u64, dataType: i32, op: i32,
            comm: *mut c_void, stream: *mut c_void,
        ) {
            library(call(Asked {
                operation: Operation::ReduceScatter, count: recvCount,
                send: sendBuf, receive: recvBuf, dtype: dataType, how: op, comm, stream,
            }))
        }
        fn HcclAllGather(
            sendBuf: *mut c_void, recvBuf: *mut c_void, sendCount: u64, dataType: i32,
            comm: *mut c_void, stream: *mut c_void,
        ) {
            library(call(Asked {
                operation: Operation::AllGather, count: sendCount, how: Reduction::Sum as i32,
                send: sendBuf, receive: recvBuf, dtype: dataType, comm, stream,
            }))
        }
        fn HcclAlltoAllV(
            sendBuf: *const c_void, sendCounts: *const c_void, sdispls: *const c_void,
            sendType: i32, recvBuf: *const c_void, recvCounts: *const c_void,
            rdispls: *const c_void, recvType: i32, comm: *mut c_void, stream: *mut c_void,
        ) {
            let sides = [
                Side {
                    name: "sendBuf", buffer: sendBuf, counts: sendCounts, displacements: sdispls,
                },
                Side {
                    name: "recvBuf", buffer: recvBuf, counts: recvCounts, displacements: rdispls,
                },
            ];
            // SAFETY: null, or a number for each rank by the C declaration.
            library(unsafe { exchange(sides, [sendType, recvType], comm, stream) })
        }
    }
    value {
        fn HcclGetErrorString(code: i32) -> *const c_char {
            let found = TEXTS.iter().find(|(known, _)| *known == code);
            found.map_or(c"unknown error", |(_, text)| text).as_ptr()
        }
        fn HcclGetCommConfigCapability() -> u32 {
            CAPABILITY
        }
    }
}

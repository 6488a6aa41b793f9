//! The state of the simulator: one simulated machine per process.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ffi::CString;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::abi::kernel::KernelLibrary;
use crate::abi::sys::HostBlock;
use crate::aclnn::Descriptors;
use crate::clock::{Actor, Clock};
use crate::codes::{
    Failure, Outcome, RT_CONTEXT_NULL, RT_PARAM_INVALID, RT_STREAM_CONTEXT, SUCCESS, UNINITIALIZED,
};
use crate::collective::{Collectives, Communicator};
use crate::fault::{Faults, PlannedFaults, RunFault};
use crate::machine::Machine;
use crate::memory::{Memory, Toucher};
use crate::registry::Registry;
use crate::stream::{Stream, TaskContext, Ticket, Work};
use crate::trace::{Call, LaunchReport, Violation};

/// Violations after this many are not kept.
const VIOLATIONS_KEPT: usize = 1000;
/// The last calls and launches are kept: a server makes any number.
const CALLS_KEPT: usize = 1 << 16;
const LAUNCHES_KEPT: usize = 1 << 14;
/// Names of functions, separated by commas, that succeed without doing anything.
const IGNORED_VARIABLE: &str = "ASCEND_SIM_IGNORE";
/// A function and a number, FUNCTION:N: the process ends at its Nth call, as if it was killed.
const ABORT_VARIABLE: &str = "ASCEND_SIM_ABORT";
/// Faults of calls and of runs on the stream ([`PlannedFaults::parse`]).
const FAULTS_VARIABLE: &str = "ASCEND_SIM_FAULTS";

pub(crate) struct Event {
    /// The last record: its ticket and the clock that holds once it is fulfilled.
    pub(crate) recorded: Option<(Arc<Ticket>, Clock)>,
    /// The last task of each stream that completes it or waits for it.
    pub(crate) uses: BTreeMap<Actor, u64>,
}

#[derive(Clone)]
pub(crate) struct Function {
    pub(crate) library: Arc<KernelLibrary>,
    pub(crate) kernel: usize,
    pub(crate) binary: u64,
}

/// The argument list of a launch, as a program fills it.
pub(crate) struct Arguments {
    /// The kernel that it was begun for.
    pub(crate) function: u64,
    pub(crate) block: Vec<u8>,
    pub(crate) count: usize,
    pub(crate) completed: bool,
}

pub(crate) struct HostAllocation {
    pub(crate) block: Arc<HostBlock>,
    /// The last asynchronous copy of each stream that uses it.
    pub(crate) uses: BTreeMap<Actor, u64>,
    /// The last of them that writes it.
    pub(crate) written: BTreeMap<Actor, u64>,
    /// The bytes that queued copies read from it.
    pub(crate) sources: Vec<Source>,
}

/// Page-locked bytes that a queued copy reads, and their hash when it was queued.
#[derive(Clone)]
pub(crate) struct Source {
    pub(crate) actor: Actor,
    pub(crate) epoch: u64,
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) hash: u64,
    pub(crate) block: Arc<HostBlock>,
}

impl Source {
    pub(crate) fn is_rewritten(&self) -> bool {
        self.block.hash(self.start, self.len) != self.hash
    }

    pub(crate) fn fault(&self) -> Violation {
        let (len, at) = (self.len, self.block.address() + self.start);
        let message = format!(
            "{len} page-locked bytes at 0x{at:x} were changed after aclrtMemcpyAsync on {} was \
             queued and before the host waited for it",
            self.actor
        );
        Violation::host("host-rewritten", message)
    }
}

#[derive(Default)]
pub(crate) struct Sim {
    /// Raised by every reset; what a thread set before a reset no longer counts.
    pub(crate) generation: u64,
    pub(crate) machine: Machine,
    pub(crate) memory_limit: Option<u64>,
    pub(crate) initialized: bool,
    pub(crate) device_users: HashMap<u32, u32>,
    pub(crate) default_streams: HashMap<u32, u64>,
    pub(crate) memory: Memory,
    pub(crate) host_blocks: BTreeMap<usize, HostAllocation>,
    pub(crate) streams: Registry<Stream>,
    pub(crate) events: Registry<Event>,
    pub(crate) binaries: Registry<Arc<KernelLibrary>>,
    /// The last launch of each binary on each stream, and its kernel.
    pub(crate) launched: HashMap<u64, BTreeMap<Actor, (u64, String)>>,
    pub(crate) functions: Registry<Function>,
    pub(crate) arguments: Registry<Arguments>,
    pub(crate) descriptors: Descriptors,
    pub(crate) communicators: Registry<Arc<Communicator>>,
    pub(crate) collectives: Collectives,
    pub(crate) host_clock: Clock,
    /// Failures of calls, by function.
    pub(crate) faults: Faults,
    /// Calls that end the process.
    aborts: Faults,
    /// Functions that succeed without doing anything.
    pub(crate) ignored: BTreeSet<String>,
    /// Faults on the stream, by operator.
    pub(crate) stream_faults: Faults<RunFault>,
    /// How often each operator was put on a stream.
    pub(crate) operator_runs: BTreeMap<&'static str, u64>,
    pub(crate) calls: VecDeque<Call>,
    pub(crate) violations: Vec<Violation>,
    pub(crate) launches: VecDeque<LaunchReport>,
}

static SIM: LazyLock<Mutex<Sim>> = LazyLock::new(|| Mutex::new(Sim::new(Machine::default(), 1)));

thread_local! {
    static CURRENT_DEVICE: Cell<Option<(u64, u32)>> = const { Cell::new(None) };
    static RECENT_MESSAGE: RefCell<CString> = RefCell::default();
    static ARGUMENTS: OwnArguments = const { OwnArguments(Cell::new(None)) };
}

/// The argument list of a thread: the runtime has one, which a thread begins anew, and which ends
/// with the thread.
struct OwnArguments(Cell<Option<u64>>);

impl OwnArguments {
    fn begin(&self, state: &mut Sim, list: Option<u64>) {
        if let Some(former) = self.0.replace(list) {
            // A reset of the machine has removed it already.
            let _removed = state.arguments.remove(former);
        }
    }
}

impl Drop for OwnArguments {
    fn drop(&mut self) {
        if self.0.get().is_some() {
            self.begin(&mut sim(), None);
        }
    }
}

/// The one simulated machine.
pub(crate) fn sim() -> MutexGuard<'static, Sim> {
    SIM.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds to what is kept, of which the oldest goes where there is more than `most`.
fn keep<T>(kept: &mut VecDeque<T>, one: T, most: usize) {
    if kept.len() == most {
        kept.pop_front();
    }
    kept.push_back(one);
}

impl Sim {
    fn new(machine: Machine, generation: u64) -> Self {
        let ignored = std::env::var(IGNORED_VARIABLE).unwrap_or_default();
        let ignored = ignored.split(',').filter(|name| !name.is_empty());
        let mut aborts = Faults::default();
        if let Ok(call) = std::env::var(ABORT_VARIABLE) {
            let parts = call.split_once(':');
            let parts = parts.and_then(|(function, nth)| Some((function, nth.parse().ok()?)));
            let (function, nth) = parts.expect("ASCEND_SIM_ABORT is FUNCTION:N");
            aborts.plan(function, nth, 0);
        }
        let planned = std::env::var(FAULTS_VARIABLE).unwrap_or_default();
        let planned =
            PlannedFaults::parse(&planned).unwrap_or_else(|expected| panic!("{expected}"));
        Self {
            faults: planned.calls,
            stream_faults: planned.runs,
            memory_limit: planned.memory,
            generation,
            machine,
            ignored: ignored.map(str::to_owned).collect(),
            aborts,
            ..Self::default()
        }
    }

    pub(crate) fn violate(&mut self, violation: Violation) {
        if self.violations.len() < VIOLATIONS_KEPT {
            self.violations.push(violation);
        }
    }

    pub(crate) fn log(&mut self, function: &'static str, code: i32) {
        keep(&mut self.calls, Call { function, code }, CALLS_KEPT);
    }

    pub(crate) fn report(&mut self, launch: LaunchReport) {
        keep(&mut self.launches, launch, LAUNCHES_KEPT);
    }

    /// Adds the argument list that the calling thread begins, instead of its former one.
    pub(crate) fn begin_arguments(&mut self, list: Arguments) -> u64 {
        let begun = self.arguments.insert(list);
        ARGUMENTS.with(|own| own.begin(self, Some(begun)));
        begun
    }

    pub(crate) fn require_initialized(&self) -> Outcome {
        if self.initialized {
            Ok(())
        } else {
            Err(Failure::new(UNINITIALIZED, "aclInit was not called"))
        }
    }

    /// The calling thread's device.
    pub(crate) fn current_device(&self) -> Outcome<u32> {
        self.require_initialized()?;
        CURRENT_DEVICE
            .get()
            .filter(|(generation, device)| {
                *generation == self.generation && self.device_users.contains_key(device)
            })
            .map(|(_, device)| device)
            .ok_or_else(|| {
                Failure::new(
                    RT_CONTEXT_NULL,
                    "this thread has no current device: call aclrtSetDevice on it",
                )
            })
    }

    pub(crate) fn set_current_device(&self, device: u32) {
        CURRENT_DEVICE.set(Some((self.generation, device)));
    }

    /// The most bytes that may be allocated on a device.
    pub(crate) fn memory_limit(&self) -> u64 {
        self.memory_limit.unwrap_or(self.machine.memory_bytes)
    }

    /// The most bytes that the program itself may have allocated on a device: communicators hold
    /// the rest.
    pub(crate) fn allocation_limit(&self, device: u32) -> u64 {
        let held = self.collectives.memory(device);
        self.memory_limit().saturating_sub(held)
    }

    /// The stream of a handle, which must be of the thread's device. Null is the device's default
    /// stream.
    pub(crate) fn stream_handle(&mut self, handle: u64) -> Outcome<u64> {
        let device = self.current_device()?;
        let handle = match (handle, self.default_streams.get(&device)) {
            (0, Some(default)) => *default,
            (0, None) => {
                let default = self.streams.insert(Stream::new(device)?);
                self.default_streams.insert(device, default);
                default
            }
            _ => handle,
        };
        let stream = self.streams.get(handle)?;
        if stream.device != device {
            return Err(Failure::new(
                RT_STREAM_CONTEXT,
                format!(
                    "stream 0x{handle:x} belongs to device {}, \
                     the thread's current device is {device}",
                    stream.device
                ),
            ));
        }
        Ok(handle)
    }

    /// Appends work to a stream (its real handle), ordered after what the host and the stream did
    /// before; its epoch.
    pub(crate) fn submit(&mut self, handle: u64, work: Work) -> Outcome<u64> {
        let host = self.host_clock.clone();
        let stream = self.streams.get_mut(handle)?;
        stream.clock.join(&host);
        Ok(stream.submit(Actor::Stream(handle), work))
    }

    /// Appends work that names memory: what is at these addresses may not be freed until the host
    /// has waited for the work.
    pub(crate) fn submit_using(
        &mut self,
        handle: u64,
        work: Work,
        what: &str,
        addresses: impl IntoIterator<Item = u64>,
    ) -> Outcome<u64> {
        let epoch = self.submit(handle, work)?;
        let what = Arc::from(what);
        for address in addresses {
            let actor = Actor::Stream(handle);
            self.memory.reserve(address, actor, epoch, &what);
        }
        Ok(epoch)
    }

    /// Notes that the host has waited for what is in `clock`. Copies that are done are compared
    /// with what their page-locked source held when they were queued.
    pub(crate) fn host_waited(&mut self, clock: &Clock) {
        self.host_clock.join(clock);
        let mut rewritten = Vec::new();
        for allocation in self.host_blocks.values_mut() {
            let known = &self.host_clock;
            let (done, pending) = std::mem::take(&mut allocation.sources)
                .into_iter()
                .partition(|source| known.get(source.actor) >= source.epoch);
            allocation.sources = pending;
            let done: Vec<Source> = done;
            rewritten.extend(
                done.iter()
                    .filter(|source| source.is_rewritten())
                    .map(Source::fault),
            );
        }
        rewritten.into_iter().for_each(|fault| self.violate(fault));
    }

    /// Notes that the host touches device memory now.
    pub(crate) fn host_touch(&mut self, address: u64, len: u64, write: bool, what: &str) {
        let epoch = self.host_clock.get(Actor::Host) + 1;
        self.host_clock.raise(Actor::Host, epoch);
        let clock = self.host_clock.clone();
        self.touch(
            address,
            len,
            write,
            &Toucher {
                actor: Actor::Host,
                epoch,
                clock: &clock,
                what,
            },
        );
    }

    /// Notes that a task touches device memory now.
    pub(crate) fn task_touch(
        &mut self,
        address: u64,
        len: u64,
        write: bool,
        context: &TaskContext,
        what: &str,
    ) {
        self.touch(
            address,
            len,
            write,
            &Toucher {
                actor: context.actor,
                epoch: context.epoch,
                clock: &context.clock,
                what,
            },
        );
    }

    fn touch(&mut self, address: u64, len: u64, write: bool, by: &Toucher<'_>) {
        if let Some(message) = self.memory.touch(address, len, write, by) {
            self.violate(Violation::host("stream-order", message));
        }
    }

    /// The page-locked block that holds `[address, address + len)`.
    pub(crate) fn host_block(
        &mut self,
        address: usize,
        len: usize,
        what: &str,
    ) -> Outcome<&mut HostAllocation> {
        self.host_blocks
            .range_mut(..=address)
            .next_back()
            .map(|(_, allocation)| allocation)
            .filter(|a| address - a.block.address() + len <= a.block.size())
            .ok_or_else(|| {
                Failure::new(
                    RT_PARAM_INVALID,
                    format!(
                        "{what}: {len} host bytes at 0x{address:x} are not inside one block of \
                         aclrtMallocHost, which asynchronous copies need"
                    ),
                )
            })
    }
}

/// Stops all streams and starts over with a fresh machine.
pub(crate) fn reset(machine: Machine) {
    let (communicators, hubs) = {
        let mut state = sim();
        let hubs: Vec<_> = state.collectives.hubs.drain().map(|(_, hub)| hub).collect();
        (state.communicators.drain(), hubs)
    };
    communicators
        .iter()
        .for_each(|communicator| communicator.abort());
    hubs.iter().for_each(|hub| hub.abort());
    let streams = sim().streams.drain();
    // Each stream begins to close before any is waited for: one may wait for an event of another.
    streams.iter().for_each(|stream| stream.begin_close(true));
    streams.into_iter().for_each(|stream| stream.close(true));
    let mut state = sim();
    *state = Sim::new(machine, state.generation + 1);
}

/// Keeps a message for `aclGetRecentErrMsg` on this thread.
pub(crate) fn set_recent_message(message: &str) {
    let text = CString::new(message.replace('\0', " ")).unwrap_or_default();
    RECENT_MESSAGE.set(text);
}

/// The address of this thread's last message, valid until the next failure on the thread.
pub(crate) fn recent_message() -> *const std::ffi::c_char {
    RECENT_MESSAGE.with_borrow(|message| message.as_ptr())
}

/// Runs the body of an exported function: injected faults first, then the body; logs the result.
pub(crate) fn boundary(function: &'static str, body: impl FnOnce() -> Outcome) -> i32 {
    let (injected, ignored) = {
        let mut state = sim();
        if state.aborts.next(function).is_some() {
            std::process::abort();
        }
        let injected = state.faults.next(function);
        (injected, state.ignored.contains(function))
    };
    let outcome = match injected {
        Some(code) => Err(Failure::new(code, "this failure was injected")),
        None if ignored => Ok(()),
        None => std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or_else(|_| {
            Err(Failure::new(
                crate::codes::INTERNAL_ERROR,
                "the simulator panicked",
            ))
        }),
    };
    let code = match outcome {
        Ok(()) => SUCCESS,
        Err(failure) => {
            set_recent_message(&format!("{function}: {}", failure.message));
            failure.code
        }
    };
    sim().log(function, code);
    code
}

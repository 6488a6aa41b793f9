//! Controls and reads the simulator from Rust.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::aclnn::executor::STUBBED;
use crate::collective::Collective;
use crate::fault::RunFault;
use crate::machine::Machine;
use crate::state::{self, sim};
use crate::stream::HELD;
use crate::trace::{Call, LaunchReport, Violation};

static SESSION: Mutex<()> = Mutex::new(());

/// Exclusive use of the simulated machine, which is one per process: tests that run side by side
/// take turns. The machine is fresh when the session begins and reset when it ends.
#[derive(Debug)]
#[must_use = "the machine is shared with others again when the session is dropped"]
pub struct Session(#[allow(dead_code, reason = "held, not read")] MutexGuard<'static, ()>);

impl Session {
    /// Waits for its turn and starts with the default machine.
    pub fn begin() -> Self {
        Self::with_machine(Machine::default())
    }

    /// Waits for its turn and starts with the given machine.
    pub fn with_machine(machine: Machine) -> Self {
        let guard = SESSION.lock().unwrap_or_else(PoisonError::into_inner);
        hold_streams(false);
        stub_operators(false);
        state::reset(machine);
        Self(guard)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        reset();
    }
}

/// Drops every object, counter and planned fault, and starts over with the default machine. Work
/// that has not started is discarded.
pub fn reset() {
    hold_streams(false);
    stub_operators(false);
    state::reset(Machine::default());
}

/// Limits the device memory that can be allocated; `None` lifts the limit to the machine's memory.
pub fn set_memory_limit(bytes: Option<u64>) {
    sim().memory_limit = bytes;
}

/// Makes the `nth` call from now on (counting from 1) of a function return `code` without doing
/// anything.
pub fn inject_fault(function: &str, nth: u64, code: i32) {
    sim().faults.plan(function, nth, code);
}

/// Makes the `nth` run from now on (counting from 1) of an operator such as `aclnnAdd` fail on its
/// stream with `code`, which the next synchronisation returns. Its calls succeed. To fail a call,
/// [`inject_fault`] takes the name of either phase.
pub fn inject_stream_fault(operator: &str, nth: u64, code: i32) {
    let effect = RunFault::Code(code);
    sim().stream_faults.plan(operator, nth, effect);
}

/// Makes a function succeed without doing anything, so that a program which calls it stands for one
/// that forgot to. The variable `ASCEND_SIM_IGNORE` does so for a whole process: names, separated
/// by commas.
pub fn ignore_calls(function: &str) {
    sim().ignored.insert(function.to_owned());
}

/// Forgets injected faults that have not happened yet, and which calls were ignored.
pub fn clear_faults() {
    let mut state = sim();
    state.ignored.clear();
    state.faults.clear();
    state.stream_faults.clear();
}

/// How often each operator was put on a stream, by the name of its second phase.
pub fn operator_runs() -> BTreeMap<&'static str, u64> {
    sim().operator_runs.clone()
}

/// Counts operators from zero again.
pub fn clear_operator_runs() {
    sim().operator_runs.clear();
}

/// Gives the machine at least this many devices.
pub fn provide_devices(devices: u32) {
    let mut state = sim();
    state.machine.devices = state.machine.devices.max(devices);
}

/// Lets ranks wait for others at most for `connect` when a communicator is made, and for `execute`
/// in an operation, whatever environment and program say.
pub fn set_collective_timeouts(connect: Duration, execute: Duration) {
    let mut state = sim();
    let collectives = &mut state.collectives;
    collectives.connect_timeout = connect;
    collectives.exec_timeout = execute;
    collectives.timeouts_are_set = true;
}

/// The transfers of this process's collectives so far, by function.
pub fn collectives() -> BTreeMap<&'static str, Collective> {
    sim().collectives.counts.clone()
}

/// Counts collectives from zero again.
pub fn clear_collectives() {
    sim().collectives.counts.clear();
}

/// Stubs operators: they are checked, launched and counted, and compute nothing, so that only the
/// cost of calling them remains. Their outputs keep their values.
pub fn stub_operators(stub: bool) {
    STUBBED.store(stub, Ordering::Relaxed);
}

/// Holds all streams: they start no task until they are released.
pub fn hold_streams(hold: bool) {
    HELD.store(hold, Ordering::Relaxed);
}

/// The last kernel launches that have finished, in order: at most 16,384.
pub fn launches() -> Vec<LaunchReport> {
    sim().launches.iter().cloned().collect()
}

/// Forgets the launches seen so far.
pub fn clear_launches() {
    sim().launches.clear();
}

/// The violations found so far, in order; only the first thousand are kept.
pub fn violations() -> Vec<Violation> {
    sim().violations.clone()
}

/// The violations found so far, which are then forgotten.
pub fn take_violations() -> Vec<Violation> {
    std::mem::take(&mut sim().violations)
}

/// The last calls, in order, with their results: at most 65,536.
pub fn calls() -> Vec<Call> {
    sim().calls.iter().cloned().collect()
}

/// Forgets the calls made so far.
pub fn clear_calls() {
    sim().calls.clear();
}

/// Objects that are alive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// Device allocations.
    pub allocations: usize,
    /// Bytes in device allocations.
    pub bytes: u64,
    /// Most bytes that were ever in device allocations at once.
    pub peak_bytes: u64,
    /// Blocks of page-locked host memory.
    pub host_blocks: usize,
    /// Streams, without the default streams of the devices.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Loaded kernel binaries.
    pub binaries: usize,
    /// Operator descriptors: tensors, lists, arrays, scalars, executors.
    pub descriptors: usize,
    /// Communicators.
    pub communicators: usize,
}

/// The objects that are alive now.
pub fn live() -> Live {
    let state = sim();
    Live {
        allocations: state.memory.live().count(),
        bytes: state.memory.live_bytes(),
        peak_bytes: state.memory.peak_bytes(),
        host_blocks: state.host_blocks.len(),
        streams: state.streams.len() - state.default_streams.len(),
        events: state.events.len(),
        binaries: state.binaries.len(),
        descriptors: state.descriptors.live(),
        communicators: state.communicators.len(),
    }
}

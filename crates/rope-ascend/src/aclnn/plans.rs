//! Planned calls, and the ones that are kept.
//!
//! A call that comes a second time with the same shapes, strides, types and attributes is planned as a repeatable one and
//! kept: from then on only the addresses are set before each run. Calls are kept from their second time on, because a call
//! with a number that changes in every step of training comes once.
//!
//! The first time is planned as a repeatable one too, and destroyed once it is queued. Otherwise the operator library would put
//! it into a cache of its own, and answer the second time with an entry of that cache, which it does not repeat.
//!
//! Not kept are calls
//!
//! - on views with an offset: no document says whether the address to be set is that of the block or of the first element;
//! - with a tensor that is read and written, or with a list of tensors: their places in the executor's order of inputs and
//!   outputs are not documented;
//! - that the operator library refuses to repeat, such as those with random numbers.

use super::call::meta;
use super::operators::{Argument, Names, Number, Objects, Raw};
use crate::error::Result;
use crate::result::check;
use crate::safe::{DeviceBuffer, Stream};
use crate::sys::{Run, aclOpExecutor, code};
use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher};

/// Most calls that are kept; beyond it the one not used for longest goes.
const KEPT: usize = 1024;

/// Number of calls, by their hash, that are remembered as seen once.
const SEEN: usize = 4096;

/// How many of the operators queued last are remembered, for messages about failures that surface later.
const RECENT: usize = 8;

/// A planned call: its executor, and the objects that it refers to.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) objects: Objects,
    pub(super) executor: *mut aclOpExecutor,
    pub(super) workspace_bytes: u64,
}

/// What tells calls apart: the operator, and every argument but the addresses.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key(Vec<u64>);

/// What is known of a call that came twice.
#[derive(Debug)]
struct Entry {
    /// None for a call that the operator library does not repeat.
    plan: Option<Plan>,
    used: u64,
}

/// What one stream's calls leave behind.
#[derive(Debug)]
pub(super) struct Plans {
    kept: HashMap<Key, Entry, BuildHasherDefault<Mixer>>,
    seen: Vec<u64>,
    clock: u64,
    recent: [&'static str; RECENT],
    next: usize,
}

// SAFETY: executors and descriptors are host objects that any thread may use, one at a time (both phases of a call may run on
// different threads if they are ordered, `docs` of nnopbase); they are reached only through the lock around this value.
unsafe impl Send for Plans {}

impl Default for Plans {
    fn default() -> Self {
        Self {
            kept: HashMap::default(),
            seen: vec![0; SEEN],
            clock: 0,
            recent: [""; RECENT],
            next: 0,
        }
    }
}

/// What to do with a call.
pub(super) enum Kept<'p> {
    /// Run this plan with the call's addresses.
    Plan(&'p Plan),
    /// Plan it, and keep the plan if it can be repeated.
    Keep(Key),
    /// Plan it as one that is kept, so that its next time can be, and destroy it.
    First,
    /// Plan it for once.
    Once,
}

impl Plans {
    pub(super) fn note(&mut self, operator: &'static str) {
        self.recent[self.next % RECENT] = operator;
        self.next += 1;
    }

    pub(super) fn recent(&self) -> Vec<&'static str> {
        (self.next.saturating_sub(RECENT)..self.next)
            .map(|place| self.recent[place % RECENT])
            .collect()
    }

    /// What to do with this call.
    pub(super) fn find(&mut self, names: Names, arguments: &[Argument<'_>]) -> Kept<'_> {
        let Some(key) = Key::new(names, arguments) else {
            return Kept::Once;
        };
        self.clock += 1;
        let clock = self.clock;
        if !self.kept.contains_key(&key) {
            let hash = self.kept.hasher().hash_one(&key).max(1);
            let place = (hash % SEEN as u64) as usize;
            if std::mem::replace(&mut self.seen[place], hash) == hash {
                return Kept::Keep(key);
            }
            return Kept::First;
        }
        match self.kept.get_mut(&key) {
            Some(entry) => {
                entry.used = clock;
                entry.plan.as_ref().map_or(Kept::Once, Kept::Plan)
            }
            None => Kept::Once,
        }
    }

    /// Keeps what is known of a call.
    pub(super) fn keep(&mut self, key: Key, plan: Option<Plan>) {
        if self.kept.len() >= KEPT {
            let oldest = self.kept.iter().min_by_key(|(_, entry)| entry.used);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                self.kept.remove(&oldest);
            }
        }
        let used = self.clock;
        self.kept.insert(key, Entry { plan, used });
    }

    /// Number of kept plans.
    pub(super) fn len(&self) -> usize {
        self.kept
            .values()
            .filter(|entry| entry.plan.is_some())
            .count()
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(plan) = self.plan.take() {
            plan.give_up();
        }
    }
}

impl Key {
    /// None for a call that is not to be kept.
    fn new(names: Names, arguments: &[Argument<'_>]) -> Option<Self> {
        let mut words = Vec::with_capacity(8 + 16 * arguments.len());
        words.push(names.run.as_ptr() as u64);
        let mut addresses: Vec<*const u8> = Vec::with_capacity(arguments.len());
        for argument in arguments {
            match *argument {
                Argument::In(view) | Argument::Out(view) => {
                    if view.offset != 0 {
                        return None;
                    }
                    // A result over an input is another call than one beside it.
                    let address = view.buffer.pointer().cast_const().cast();
                    let alias = addresses.iter().position(|&other| other == address);
                    words.push(alias.unwrap_or(addresses.len()) as u64);
                    addresses.push(address);
                    words.push(
                        u64::from(view.dtype.0.cast_unsigned()) << 32 | view.dims.len() as u64,
                    );
                    words.push(view.buffer.len() as u64);
                    words.extend(view.dims.iter().chain(view.strides).map(|&n| n as u64));
                }
                Argument::Ref(_) | Argument::Ins(_) => return None,
                Argument::Number(number) => words.extend(match number {
                    Number::Float(value) => [1, value.to_bits()],
                    Number::Int(value) => [2, value.cast_unsigned()],
                    Number::Bool(value) => [3, u64::from(value)],
                }),
                Argument::Ints(values) => {
                    words.push(values.len() as u64);
                    words.extend(values.iter().map(|value| value.cast_unsigned()));
                }
                Argument::Text(text) => words.push(text.as_ptr() as u64),
                Argument::Bits(bits) => words.push(bits),
                Argument::Absent => words.push(u64::MAX),
            }
        }
        Some(Self(words))
    }
}

/// A hash of words: multiply and rotate.
#[derive(Debug, Default)]
pub(super) struct Mixer(u64);

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_ne_bytes(word));
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl Plan {
    /// Makes the call repeatable, if the operator library can.
    pub(super) fn repeatable(&self) -> bool {
        let meta = &self.objects.meta;
        let complete = meta.aclSetInputTensorAddr.is_some()
            && meta.aclSetOutputTensorAddr.is_some()
            && meta.aclDestroyAclOpExecutor.is_some();
        // SAFETY: planned and not run.
        complete
            && meta
                .aclSetAclOpExecutorRepeatable
                .is_some_and(|set| unsafe { set(self.executor) } == code::SUCCESS)
    }

    /// Points the kept call at the memory of another one with the same key.
    pub(super) fn set_addresses(&self, stream: &Stream, arguments: &[Argument<'_>]) -> Result<()> {
        let meta = meta(stream)?;
        let (mut inputs, mut outputs) = (0, 0);
        for (argument, raw) in arguments.iter().zip(&self.objects.raw) {
            let (view, index, name, set) = match argument {
                Argument::In(view) => (
                    view,
                    &mut inputs,
                    "aclSetInputTensorAddr",
                    meta.aclSetInputTensorAddr,
                ),
                Argument::Out(view) => (
                    view,
                    &mut outputs,
                    "aclSetOutputTensorAddr",
                    meta.aclSetOutputTensorAddr,
                ),
                _ => continue,
            };
            if let (Raw::Tensor(tensor), Some(set)) = (raw, set) {
                // SAFETY: the executor is kept, and the descriptor is the one that it was planned with. Absent tensors
                // come last among an operator's inputs and outputs, so the count is the place.
                let status = unsafe { set(self.executor, *index, *tensor, view.buffer.pointer()) };
                check(&stream.device().runtime().api().rt, name, status)?;
            }
            *index += 1;
        }
        Ok(())
    }

    /// Memory that the call works in.
    fn workspace(&self, stream: &Stream) -> Result<Option<DeviceBuffer<u8>>> {
        match usize::try_from(self.workspace_bytes).unwrap_or(usize::MAX) {
            0 => Ok(None),
            bytes => stream.alloc(bytes).map(Some),
        }
    }

    /// Queues a repeatable call.
    pub(super) fn run(&self, stream: &Stream, name: &'static str, run: Run) -> Result<()> {
        let workspace = self.workspace(stream)?;
        self.run_in(workspace, stream, name, run)
    }

    /// Queues a call that is made once, which gives it up.
    pub(super) fn run_once(self, stream: &Stream, name: &'static str, run: Run) -> Result<()> {
        match self.workspace(stream) {
            Ok(workspace) => self.run_in(workspace, stream, name, run),
            Err(error) => {
                self.give_up();
                Err(error)
            }
        }
    }

    fn run_in(
        &self,
        workspace: Option<DeviceBuffer<u8>>,
        stream: &Stream,
        name: &'static str,
        run: Run,
    ) -> Result<()> {
        let pointer = workspace
            .as_ref()
            .map_or(std::ptr::null_mut(), |workspace| workspace.pointer());
        // SAFETY: the workspace has the size that was asked for; dropped below, it returns to this stream's cache, so that
        // later work gets it only behind the operator. `self` keeps the executor's objects alive.
        let status = unsafe { run(pointer, self.workspace_bytes, self.executor, stream.raw()) };
        check(&stream.device().runtime().api().rt, name, status)
    }

    /// Destroys the executor of a call that will not run again.
    pub(super) fn give_up(self) {
        if let Some(destroy) = self.objects.meta.aclDestroyAclOpExecutor {
            // SAFETY: planned and not run, or repeatable; nothing else holds it. A failure leaks a host object.
            let _ = unsafe { destroy(self.executor) };
        }
    }
}

//! Planned calls and the cache of repeatable ones.
//!
//! A call that occurs a second time with the same shapes, strides, offsets, types and attributes is
//! planned as repeatable and kept: from then on, only the addresses are set before each run. Calls
//! are not kept on first use, because a call with a number that changes in every training step
//! occurs only once.
//!
//! The first call is planned as repeatable too, and destroyed once it is queued. Otherwise the
//! operator library would cache it and answer the second call with the cache entry, which cannot be
//! repeated.
//!
//! The address to set is that of the memory, not of a view's first element: it is documented as the
//! storage address, and the library adds the view's planned offset (`GetData` and `RecordAddrRule`
//! of opbase at aa3cd74). A tensor that is read and written counts as an input and as an output,
//! and is set as both.
//!
//! Calls that the operator library refuses to repeat, such as those with random numbers, are not
//! kept.

use std::collections::VecDeque;
use std::hash::BuildHasher;
use std::num::NonZeroUsize;
use std::ops::Deref;

use lru::LruCache;
use rustc_hash::FxBuildHasher;

use super::call::{Argument, Names, Number, Objects, Raw, View};
use crate::error::Result;
use crate::result::check;
use crate::safe::{DeviceBuffer, Stream};
use crate::sys::{Run, aclOpExecutor, code};

/// The limit on kept calls; beyond it, the least recently used one is removed.
const KEPT: NonZeroUsize = NonZeroUsize::new(1024).unwrap();

/// The number of calls remembered, by hash, as seen once.
const SEEN: NonZeroUsize = NonZeroUsize::new(4096).unwrap();

/// The number of recent operators remembered for messages about later failures.
const RECENT: usize = 8;

/// A planned call: its executor, and the objects that it refers to.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) objects: Objects,
    pub(super) executor: *mut aclOpExecutor,
    pub(super) workspace_bytes: u64,
    /// True if it runs on the AI CPU.
    pub(super) ai_cpu: bool,
}

/// The identity of a call: the operator and all arguments except addresses.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key(Vec<u64>);

/// A planned call that can be run again. Dropping it destroys its executor.
#[derive(Debug)]
pub(super) struct Repeatable(Plan);

impl Deref for Repeatable {
    type Target = Plan;

    fn deref(&self) -> &Plan {
        &self.0
    }
}

impl Drop for Repeatable {
    fn drop(&mut self) {
        self.0.destroy();
    }
}

/// The plans and the history of one stream's calls.
#[derive(Debug)]
pub(super) struct Plans {
    /// Plans by call; `None` for a call that the operator library does not repeat.
    kept: LruCache<Key, Option<Repeatable>, FxBuildHasher>,
    /// Hashes of calls seen.
    seen: LruCache<u64, (), FxBuildHasher>,
    recent: VecDeque<&'static str>,
}

// SAFETY: executors and descriptors are host objects that any thread may use, one at a time (both
// phases of a call may run on different threads if they are ordered, `docs` of nnopbase); they are
// reached only through the lock around this value.
unsafe impl Send for Plans {}

impl Default for Plans {
    fn default() -> Self {
        Self {
            kept: LruCache::with_hasher(KEPT, FxBuildHasher),
            seen: LruCache::with_hasher(SEEN, FxBuildHasher),
            recent: VecDeque::with_capacity(RECENT),
        }
    }
}

/// The way to run a call.
pub(super) enum Kept<'p> {
    /// Run this plan with the call's addresses.
    Plan(&'p Repeatable),
    /// Plan the call, and keep the plan if it can be repeated.
    Keep(Key),
    /// Plan the call as repeatable, so that its next plan can be kept, and destroy the plan.
    First,
    /// Plan the call for one run.
    Once,
}

impl Plans {
    pub(super) fn note(&mut self, operator: &'static str) {
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(operator);
    }

    pub(super) fn recent(&self) -> Vec<&'static str> {
        self.recent.iter().copied().collect()
    }

    /// The way to run this call.
    pub(super) fn find(&mut self, names: Names, arguments: &[Argument<'_>]) -> Kept<'_> {
        let key = Key::new(names, arguments);
        if !self.kept.contains(&key) {
            let hash = FxBuildHasher.hash_one(&key);
            return match self.seen.put(hash, ()) {
                Some(()) => Kept::Keep(key),
                None => Kept::First,
            };
        }
        match self.kept.get(&key) {
            Some(Some(plan)) => Kept::Plan(plan),
            _ => Kept::Once,
        }
    }

    /// Stores the plan of a call, or that it cannot be repeated.
    pub(super) fn keep(&mut self, key: Key, plan: Option<Repeatable>) {
        self.kept.put(key, plan);
    }

    /// Number of kept plans.
    pub(super) fn len(&self) -> usize {
        self.kept.iter().filter(|(_, plan)| plan.is_some()).count()
    }
}

impl Key {
    fn new(names: Names, arguments: &[Argument<'_>]) -> Self {
        let mut words = Vec::with_capacity(8 + 16 * arguments.len());
        words.push(names.run.as_ptr() as u64);
        let mut addresses: Vec<*const u8> = Vec::with_capacity(arguments.len());
        let mut tensor = |words: &mut Vec<u64>, view: View<'_>| {
            // A call with the result over an input differs from one with separate memory.
            let address = view.buffer.pointer().cast_const().cast();
            let alias = addresses.iter().position(|&other| other == address);
            words.push(alias.unwrap_or(addresses.len()) as u64);
            addresses.push(address);
            words.push(u64::from(view.dtype.0.cast_unsigned()) << 32 | view.dims.len() as u64);
            words.push(view.buffer.bytes() as u64);
            words.push(view.offset as u64);
            words.extend(view.dims.iter().chain(view.strides).map(|&n| n as u64));
        };
        for argument in arguments {
            match *argument {
                Argument::In(view) | Argument::Out(view) | Argument::Ref(view) => {
                    tensor(&mut words, view);
                }
                Argument::Ins(views) | Argument::Outs(views) => {
                    words.push(views.len() as u64);
                    views.iter().for_each(|view| tensor(&mut words, *view));
                }
                Argument::Number(number) => words.extend(match number {
                    Number::Float(value) => [1, value.to_bits()],
                    Number::Int(value) => [2, value.cast_unsigned()],
                    Number::Element(dtype, bits) => {
                        [u64::from(dtype.0.cast_unsigned()) << 32 | 3, bits]
                    }
                }),
                Argument::Ints(values) => {
                    words.push(values.len() as u64);
                    words.extend(values.iter().map(|value| value.cast_unsigned()));
                }
                Argument::Text(text) => words.push(text.as_ptr() as u64),
                Argument::Bits(bits) => words.push(bits),
                Argument::NoInput | Argument::NoOutput | Argument::Absent => {
                    words.push(u64::MAX);
                }
            }
        }
        Self(words)
    }
}

impl Plan {
    /// Makes the call repeatable if requested and supported by the operator library; otherwise
    /// returns it.
    #[allow(
        clippy::result_large_err,
        reason = "the error is the call itself, which then runs once"
    )]
    pub(super) fn into_repeatable(self, wanted: bool) -> Result<Repeatable, Self> {
        let meta = &self.objects.meta;
        let complete = meta.aclSetInputTensorAddr.is_some()
            && meta.aclSetOutputTensorAddr.is_some()
            && (meta.aclSetDynamicInputTensorAddr.is_some() || !self.objects.has_list())
            && !self.objects.writes_list
            && meta.aclDestroyAclOpExecutor.is_some();
        match meta.aclSetAclOpExecutorRepeatable {
            // SAFETY: the executor was planned and has not run.
            Some(set) if wanted && complete && unsafe { set(self.executor) } == code::SUCCESS => {
                Ok(Repeatable(self))
            }
            _ => Err(self),
        }
    }

    /// Sets the addresses of the kept call to those of another call with the same key.
    pub(super) fn set_addresses(&self, stream: &Stream, arguments: &[Argument<'_>]) -> Result<()> {
        let meta = &self.objects.meta;
        let check = |name, status| check(&stream.device().runtime().api().rt, name, status);
        let as_input = |index, tensor, view: &View<'_>| match meta.aclSetInputTensorAddr {
            // SAFETY: the executor is kept, and the descriptor is the one that it was planned with.
            Some(set) => check("aclSetInputTensorAddr", unsafe {
                set(self.executor, index, tensor, view.buffer.pointer())
            }),
            None => Ok(()),
        };
        let as_output = |index, tensor, view: &View<'_>| match meta.aclSetOutputTensorAddr {
            // SAFETY: as for inputs.
            Some(set) => check("aclSetOutputTensorAddr", unsafe {
                set(self.executor, index, tensor, view.buffer.pointer())
            }),
            None => Ok(()),
        };
        let (mut inputs, mut outputs) = (0, 0);
        for (argument, raw) in arguments.iter().zip(&self.objects.raw) {
            match (argument, raw) {
                (Argument::In(view), Raw::Tensor(tensor)) => as_input(inputs, *tensor, view)?,
                (Argument::Out(view), Raw::Tensor(tensor)) => as_output(outputs, *tensor, view)?,
                (Argument::Ref(view), Raw::Tensor(tensor)) => {
                    as_input(inputs, *tensor, view)?;
                    as_output(outputs, *tensor, view)?;
                }
                (Argument::Ins(views), Raw::Tensors(list)) => {
                    for (member, view) in views.iter().enumerate() {
                        let Some(set) = meta.aclSetDynamicInputTensorAddr else {
                            continue;
                        };
                        // SAFETY: the executor is kept, and the list is the one that it was planned
                        // with; the key holds how many members it has.
                        let status = unsafe {
                            set(self.executor, inputs, member, *list, view.buffer.pointer())
                        };
                        check("aclSetDynamicInputTensorAddr", status)?;
                    }
                }
                _ => {}
            }
            inputs += usize::from(matches!(
                argument,
                Argument::In(_) | Argument::Ref(_) | Argument::Ins(_) | Argument::NoInput
            ));
            outputs += usize::from(matches!(
                argument,
                Argument::Out(_) | Argument::Ref(_) | Argument::NoOutput
            ));
        }
        Ok(())
    }

    /// The workspace of the call.
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

    /// Queues a non-repeatable call and consumes it.
    pub(super) fn run_once(self, stream: &Stream, name: &'static str, run: Run) -> Result<()> {
        match self.workspace(stream) {
            Ok(workspace) => self.run_in(workspace, stream, name, run),
            Err(error) => {
                self.destroy();
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
        // SAFETY: the workspace has the size that was asked for; dropped below, it returns to this
        // stream's pool, so that later work gets it only after the operator. `self` keeps the
        // executor's objects alive.
        let status = unsafe { run(pointer, self.workspace_bytes, self.executor, stream.raw()) };
        check(&stream.device().runtime().api().rt, name, status)
    }

    /// Destroys the executor of a call that will not run again.
    fn destroy(&self) {
        if let Some(destroy) = self.objects.meta.aclDestroyAclOpExecutor {
            // SAFETY: the executor was planned and has not run, or is repeatable; its owner is
            // being dropped, so this happens once. A failure leaks a host object.
            let _ = unsafe { destroy(self.executor) };
        }
    }
}

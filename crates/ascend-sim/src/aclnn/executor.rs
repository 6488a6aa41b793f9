//! The second phase of an operator call: it puts a planned operator on a stream with its workspace.
//! An executor runs once, unless it was made repeatable.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::call::{Access, Kernel, Slot, named};
use super::data::Data;
use super::descriptor::{Descriptors, Tensor};
use super::element::Strided;
use super::refuse;
use crate::abi::sys::Engine;
use crate::codes::{ACLNN_INNER_ERROR, ACLNN_NULLPTR, Failure, Outcome, RT_AICORE_EXCEPTION};
use crate::fault::RunFault;
use crate::state::sim;
use crate::stream::Work;
use crate::trace::Violation;

/// While true, operators are checked and launched, and do nothing on the stream.
pub(crate) static STUBBED: AtomicBool = AtomicBool::new(false);

/// The part of a call that goes onto the stream.
#[derive(Clone)]
pub(crate) struct Launch {
    pub(crate) operator: &'static str,
    pub(crate) slots: Vec<Slot>,
    pub(crate) kernel: Kernel,
    pub(crate) workspace: u64,
    pub(crate) device: u32,
    /// True if outputs may share memory with another tensor not even as the same view.
    pub(crate) distinct: bool,
}

/// A planned operator.
pub(crate) struct Executor {
    launch: Launch,
    held: Vec<(u64, &'static str)>,
    repeatable: bool,
    unrepeatable: Option<&'static str>,
}

/// The list of parameters that an index counts in.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Numbering {
    Inputs,
    Outputs,
}

impl Executor {
    pub(crate) fn new(
        launch: Launch,
        held: Vec<(u64, &'static str)>,
        unrepeatable: Option<&'static str>,
    ) -> Self {
        Self {
            launch,
            held,
            repeatable: false,
            unrepeatable,
        }
    }

    pub(crate) fn make_repeatable(&mut self) -> Outcome {
        if let Some(why) = self.unrepeatable {
            let message = format!("{} cannot be repeatable: {why}", self.launch.operator);
            return Err(Failure::new(ACLNN_INNER_ERROR, message));
        }
        self.repeatable = true;
        Ok(())
    }

    /// Gives a tensor parameter another address, which holds for the runs that follow.
    pub(crate) fn set_address(
        &mut self,
        by: Numbering,
        index: usize,
        handle: u64,
        address: u64,
    ) -> Outcome {
        let operator = self.launch.operator;
        if !self.repeatable {
            return refuse(format!(
                "{operator}: only a repeatable executor takes new addresses"
            ));
        }
        let slot = self.launch.slots.iter_mut().find(|slot| {
            let counted = match by {
                Numbering::Inputs => slot.input,
                Numbering::Outputs => slot.output,
            };
            counted == Some(index)
        });
        let Some(slot) = slot else {
            return refuse(format!(
                "{operator} has no tensor at index {index} of its {by:?}, \
                 or it was null in the first phase"
            ));
        };
        if handle != slot.handle {
            return refuse(format!(
                "{operator} was planned with another {} than the tensor given now",
                slot.name
            ));
        }
        Arc::make_mut(&mut slot.view).data = address;
        Ok(())
    }

    /// Gives a member of a list another address, which holds for the runs that follow. Returns the
    /// member's handle.
    pub(crate) fn set_member_address(
        &mut self,
        index: usize,
        member: usize,
        list: u64,
        address: u64,
    ) -> Outcome<u64> {
        let operator = self.launch.operator;
        if !self.repeatable {
            return refuse(format!(
                "{operator}: only a repeatable executor takes new addresses"
            ));
        }
        let mut slots = self.launch.slots.iter_mut();
        let Some(slot) = slots.find(|slot| slot.member == Some((list, index, member))) else {
            return refuse(format!(
                "{operator} was not planned with this list at index {index} of its inputs, \
                 or the list has no member {member}"
            ));
        };
        Arc::make_mut(&mut slot.view).data = address;
        Ok(slot.handle)
    }

    /// A descriptor that the operator was planned with and that was destroyed since.
    fn lost_descriptor(&self, descriptors: &Descriptors) -> Option<String> {
        let slots = self.launch.slots.iter().map(|s| (s.handle, s.name));
        let mut planned = slots.chain(self.held.iter().copied());
        planned.find_map(|(handle, name)| {
            let failure = descriptors.expect_alive(handle).err()?;
            Some(format!(
                "{}: {name} has to live until the second phase has returned: {}",
                self.launch.operator, failure.message
            ))
        })
    }
}

/// The second phase of every operator.
pub(crate) fn execute(
    operator: &'static str,
    workspace: u64,
    workspace_bytes: u64,
    executor: u64,
    stream: u64,
) -> Outcome {
    if executor == 0 {
        return Err(Failure::new(ACLNN_NULLPTR, "the executor is null"));
    }
    let mut state = sim();
    let stream = state.stream_handle(stream)?;
    let planned = state.descriptors.executors.get(executor)?;
    if planned.launch.operator != operator {
        return refuse(format!(
            "the executor was planned by {}GetWorkspaceSize",
            planned.launch.operator
        ));
    }
    let launch = planned.launch.clone();
    let lost = planned.lost_descriptor(&state.descriptors);
    // One that is not repeatable is used up from here on, whether it gets onto the stream or not.
    if !planned.repeatable {
        state.descriptors.executors.remove(executor)?;
    }
    if let Some(message) = lost {
        state.violate(Violation::host("descriptor-lifetime", &message));
        return refuse(message);
    }
    let wanted = launch.workspace;
    if workspace_bytes < wanted {
        return refuse(format!(
            "a workspace of {workspace_bytes} bytes was given, {wanted} were asked for"
        ));
    }
    if workspace == 0 && workspace_bytes != 0 {
        let message = format!("the workspace is null, {wanted} bytes were asked for");
        return Err(Failure::new(ACLNN_NULLPTR, message));
    }
    if wanted != 0 {
        let found = state.memory.find(workspace, workspace_bytes);
        found.map_err(named("workspace"))?;
    }
    *state.operator_runs.entry(operator).or_default() += 1;
    let slots = launch.slots.iter().map(|slot| slot.view.address());
    let workspace_used = (wanted != 0).then_some(workspace);
    let named: Vec<u64> = slots.chain(workspace_used).collect();
    let work = Work::Run(Box::new(move |engine, context| {
        let fault = {
            let mut state = sim();
            if wanted != 0 {
                state.task_touch(workspace, wanted, true, context, operator);
            }
            state.stream_faults.next(operator)
        };
        fault.map_or(Ok(()), |fault| fault.strike(operator))?;
        if STUBBED.load(Ordering::Relaxed) {
            return Ok(());
        }
        expect_apart(&launch)?;
        (launch.kernel)(&mut Data::new(engine, context, &launch))?;
        if let Some(RunFault::Wrong) = fault {
            alter(engine, &launch)?;
        }
        Ok(())
    }));
    state.submit_using(stream, work, operator, named).map(drop)
}

/// Alters the first element of the first output: a value of another magnitude, or another truth.
fn alter(engine: &mut Engine<'_>, launch: &Launch) -> Outcome {
    let written = launch.slots.iter().find(|slot| slot.access != Access::Read);
    let Some(slot) = written else { return Ok(()) };
    let size = slot.view.dtype.bytes();
    let (bytes, offset) = sim().memory.share(slot.view.address(), size)?;
    let element = bytes.slice_mut(engine, offset, size as usize);
    let (last, flipped) = (element.len() - 1, if size == 1 { 1 } else { 0x40 });
    element[last] ^= flipped;
    Ok(())
}

/// Refuses an output that shares memory with another tensor and is not the same view.
fn expect_apart(launch: &Launch) -> Outcome {
    for (i, out) in launch.slots.iter().enumerate() {
        if out.access == Access::Read {
            continue;
        }
        for (j, other) in launch.slots.iter().enumerate() {
            // A pair of two outputs is judged once, at the first of them.
            let judged_before = other.access != Access::Read && j < i;
            if i == j || judged_before || !share_memory(&out.view, &other.view, launch.distinct) {
                continue;
            }
            let unless = if launch.distinct {
                ""
            } else {
                " unless they are the same view"
            };
            let message = format!(
                "{}: {} and {} share memory: the result is undefined{unless}",
                launch.operator, out.name, other.name
            );
            sim().violate(Violation::host("overlap", &message));
            return Err(Failure::new(RT_AICORE_EXCEPTION, message));
        }
    }
    Ok(())
}

/// True if two views touch a common byte. The same view counts only if `distinct`.
fn share_memory(a: &Tensor, b: &Tensor, distinct: bool) -> bool {
    let located = |tensor: &Tensor| {
        let at = Strided::new(&tensor.dims, &tensor.strides)?;
        let size = tensor.dtype.bytes();
        let start = tensor.address();
        let end = start + (at.last() as u64 + 1) * size;
        Some((at, size, start, end))
    };
    let (Some((at, size_a, start_a, end_a)), Some((bt, size_b, start_b, end_b))) =
        (located(a), located(b))
    else {
        return false;
    };
    let (start, end) = (start_a.max(start_b), end_a.min(end_b));
    if start >= end {
        return false;
    }
    if start_a == start_b && size_a == size_b && at == bt && a.elements() == b.elements() {
        return distinct;
    }
    // The bytes of the common span that `a` touches; `b` shares memory if it touches one of them.
    let mut taken = vec![false; (end - start) as usize];
    let bytes = |first: u64, offset: usize, size: u64| {
        let element = first + offset as u64 * size;
        let common = element.max(start)..(element + size).min(end);
        (common.start < common.end)
            .then(|| (common.start - start) as usize..(common.end - start) as usize)
    };
    at.offsets(|offset| {
        if let Some(common) = bytes(start_a, offset, size_a) {
            taken[common].fill(true);
        }
    });
    let mut found = false;
    bt.offsets(|offset| {
        let common = bytes(start_b, offset, size_b);
        found |= common.is_some_and(|common| taken[common].contains(&true));
    });
    found
}

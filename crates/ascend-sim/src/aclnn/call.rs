//! The two phases of an operator call.
//!
//! The first takes the parameters, checks the documented limits and makes an executor; the second
//! puts it on a stream with its workspace. An executor runs once, unless it was made repeatable.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::data::Data;
use super::descriptor::{Scalar, Tensor, data_type};
use super::dtype::{DataType, Types};
use super::refuse;
use crate::codes::{
    ACLNN_INNER_ERROR, ACLNN_NULLPTR, ACLNN_PARAM_INVALID, Failure, Outcome, RT_AICORE_EXCEPTION,
};
use crate::registry::Kind;
use crate::state::sim;
use crate::stream::Work;
use crate::trace::Violation;

/// Workspace that every operator asks for: not zero, so that a program which passes none is found.
const WORKSPACE_BYTES: u64 = 1024;
/// Blocks of a workspace begin at multiples of this.
const WORKSPACE_ALIGNMENT: u64 = 512;
/// More axes than this are refused, except where an operator says otherwise.
const MAX_RANK: usize = 8;

/// While true, operators are checked and launched, and do nothing on the stream.
pub(crate) static STUBBED: AtomicBool = AtomicBool::new(false);

/// What an operator does on the stream.
pub(crate) type Kernel = Arc<dyn Fn(&mut Data<'_, '_>) -> Outcome + Send + Sync>;

/// Wraps the work of an operator whose parameters are in order.
pub(crate) fn kernel(
    run: impl Fn(&mut Data<'_, '_>) -> Outcome + Send + Sync + 'static,
) -> Outcome<Kernel> {
    Ok(Arc::new(run))
}

/// How an operator uses a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Read,
    Write,
    Both,
}

/// A tensor parameter of a planned operator.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub(crate) name: &'static str,
    handle: u64,
    /// As described in the first phase; its address may change between runs.
    pub(crate) view: Arc<Tensor>,
    access: Access,
    /// The position among inputs, outputs and all tensor parameters; of a list, with the position in it.
    input: Option<usize>,
    output: Option<usize>,
    parameter: usize,
    member: Option<usize>,
}

/// A tensor parameter, as the checks and the kernel name it.
#[derive(Clone, Debug)]
pub(crate) struct Operand {
    pub(crate) slot: usize,
    pub(crate) name: &'static str,
    view: Arc<Tensor>,
}

impl Deref for Operand {
    type Target = Tensor;
    fn deref(&self) -> &Tensor {
        &self.view
    }
}

impl Operand {
    /// Refuses other element types.
    pub(crate) fn expect_type(&self, types: Types) -> Outcome {
        if types.has(self.dtype) {
            return Ok(());
        }
        refuse(format!(
            "{} is {:?}, one of {:?} is expected",
            self.name,
            self.dtype,
            types.list()
        ))
    }

    /// Refuses another element type.
    pub(crate) fn expect_dtype(&self, dtype: DataType) -> Outcome {
        self.expect_type(Types::of(&[dtype]))
    }

    /// Refuses another shape.
    pub(crate) fn expect_dims(&self, dims: &[usize]) -> Outcome {
        if self.dims == dims {
            return Ok(());
        }
        refuse(format!(
            "{} has shape {:?}, {dims:?} is expected",
            self.name, self.dims
        ))
    }

    /// Refuses a rank outside the range.
    pub(crate) fn expect_rank(&self, ranks: std::ops::RangeInclusive<usize>) -> Outcome {
        if ranks.contains(&self.rank()) {
            return Ok(());
        }
        refuse(format!(
            "{} has rank {}, {} to {} is expected",
            self.name,
            self.rank(),
            ranks.start(),
            ranks.end()
        ))
    }

    /// Refuses a view that is not dense, where the operator does not take strides.
    pub(crate) fn expect_contiguous(&self) -> Outcome {
        if self.is_contiguous() {
            return Ok(());
        }
        refuse(format!(
            "{} has strides {:?} for shape {:?}, a contiguous tensor is expected",
            self.name, self.strides, self.dims
        ))
    }
}

/// The first phase of a call while it runs.
pub(crate) struct Call {
    operator: &'static str,
    slots: Vec<Slot>,
    /// Scalars, arrays and lists, which have to live as long as the tensors.
    held: Vec<(u64, &'static str)>,
    inputs: usize,
    outputs: usize,
    parameters: usize,
    distinct: bool,
    transposed: bool,
    unrepeatable: Option<&'static str>,
    extra_workspace: u64,
}

/// A parameter that was not given.
fn missing<T>(name: &str) -> Outcome<T> {
    Err(Failure::new(ACLNN_NULLPTR, format!("{name} is null")))
}

/// A parameter of which the handle is wrong.
fn named(name: &str) -> impl Fn(Failure) -> Failure {
    move |failure| Failure::new(ACLNN_PARAM_INVALID, format!("{name}: {}", failure.message))
}

impl Call {
    pub(crate) fn new(operator: &'static str) -> Self {
        Self {
            operator,
            slots: Vec::with_capacity(4),
            held: Vec::new(),
            inputs: 0,
            outputs: 0,
            parameters: 0,
            distinct: false,
            transposed: false,
            unrepeatable: None,
            extra_workspace: 0,
        }
    }

    pub(crate) fn operator(&self) -> &'static str {
        self.operator
    }

    /// Says that no output may share memory with another tensor, not even exactly.
    pub(crate) fn distinct(&mut self) {
        self.distinct = true;
    }

    /// Says why the executor cannot be made repeatable.
    pub(crate) fn unrepeatable(&mut self, why: &'static str) {
        self.unrepeatable = Some(why);
    }

    /// Says that a matrix stored transposed needs no copy.
    pub(crate) fn takes_transposed(&mut self) {
        self.transposed = true;
    }

    /// Asks for room for `bytes` more.
    pub(crate) fn workspace(&mut self, bytes: u64) {
        self.extra_workspace += bytes.next_multiple_of(WORKSPACE_ALIGNMENT);
    }

    fn count(&mut self, access: Access) -> (Option<usize>, Option<usize>, usize) {
        let mut next = |counter: fn(&mut Self) -> &mut usize, used: bool| {
            used.then(|| {
                let counter = counter(self);
                *counter += 1;
                *counter - 1
            })
        };
        let input = next(|c| &mut c.inputs, access != Access::Write);
        let output = next(|c| &mut c.outputs, access != Access::Read);
        self.parameters += 1;
        (input, output, self.parameters - 1)
    }

    fn tensor(
        &mut self,
        handle: u64,
        name: &'static str,
        access: Access,
    ) -> Outcome<Option<Operand>> {
        let (input, output, parameter) = self.count(access);
        if handle == 0 {
            return Ok(None);
        }
        let view = Arc::clone(sim().descriptors.tensors.get(handle).map_err(named(name))?);
        Ok(Some(self.push(Slot {
            name,
            handle,
            view,
            access,
            input,
            output,
            parameter,
            member: None,
        })))
    }

    fn push(&mut self, slot: Slot) -> Operand {
        let operand = Operand {
            slot: self.slots.len(),
            name: slot.name,
            view: Arc::clone(&slot.view),
        };
        self.slots.push(slot);
        operand
    }

    pub(crate) fn input(&mut self, handle: u64, name: &'static str) -> Outcome<Operand> {
        self.tensor(handle, name, Access::Read)?
            .map_or_else(|| missing(name), Ok)
    }

    pub(crate) fn optional_input(
        &mut self,
        handle: u64,
        name: &'static str,
    ) -> Outcome<Option<Operand>> {
        self.tensor(handle, name, Access::Read)
    }

    pub(crate) fn output(&mut self, handle: u64, name: &'static str) -> Outcome<Operand> {
        self.tensor(handle, name, Access::Write)?
            .map_or_else(|| missing(name), Ok)
    }

    pub(crate) fn optional_output(
        &mut self,
        handle: u64,
        name: &'static str,
    ) -> Outcome<Option<Operand>> {
        self.tensor(handle, name, Access::Write)
    }

    pub(crate) fn optional_in_place(
        &mut self,
        handle: u64,
        name: &'static str,
    ) -> Outcome<Option<Operand>> {
        self.tensor(handle, name, Access::Both)
    }

    pub(crate) fn in_place(&mut self, handle: u64, name: &'static str) -> Outcome<Operand> {
        self.tensor(handle, name, Access::Both)?
            .map_or_else(|| missing(name), Ok)
    }

    pub(crate) fn input_list(&mut self, handle: u64, name: &'static str) -> Outcome<Vec<Operand>> {
        let (input, output, parameter) = self.count(Access::Read);
        if handle == 0 {
            return missing(name);
        }
        self.held.push((handle, name));
        let members: Vec<(u64, Arc<Tensor>)> = {
            let state = sim();
            let found = state.descriptors.lists.get(handle).map_err(named(name))?;
            let view = |member: &u64| {
                let tensor = state
                    .descriptors
                    .tensors
                    .get(*member)
                    .map_err(named(name))?;
                Ok((*member, Arc::clone(tensor)))
            };
            found.iter().map(view).collect::<Outcome<_>>()?
        };
        let slot = |(member, (handle, view))| {
            self.push(Slot {
                name,
                handle,
                view,
                access: Access::Read,
                input,
                output,
                parameter,
                member: Some(member),
            })
        };
        Ok(members.into_iter().enumerate().map(slot).collect())
    }

    pub(crate) fn scalar(&mut self, handle: u64, name: &'static str) -> Outcome<Scalar> {
        self.optional_scalar(handle, name)?
            .map_or_else(|| missing(name), Ok)
    }

    pub(crate) fn optional_scalar(
        &mut self,
        handle: u64,
        name: &'static str,
    ) -> Outcome<Option<Scalar>> {
        if handle == 0 {
            return Ok(None);
        }
        self.held.push((handle, name));
        let state = sim();
        let found = state.descriptors.scalars.get(handle).map_err(named(name))?;
        Ok(Some(*found))
    }

    pub(crate) fn ints(&mut self, handle: u64, name: &'static str) -> Outcome<Vec<i64>> {
        self.optional_ints(handle, name)?
            .map_or_else(|| missing(name), Ok)
    }

    pub(crate) fn optional_ints(
        &mut self,
        handle: u64,
        name: &'static str,
    ) -> Outcome<Option<Vec<i64>>> {
        if handle == 0 {
            return Ok(None);
        }
        self.held.push((handle, name));
        let state = sim();
        let found = state.descriptors.ints.get(handle).map_err(named(name))?;
        Ok(Some(found.clone()))
    }

    pub(crate) fn bools(&mut self, handle: u64, name: &'static str) -> Outcome<Vec<bool>> {
        if handle == 0 {
            return missing(name);
        }
        self.held.push((handle, name));
        let state = sim();
        let found = state.descriptors.bools.get(handle).map_err(named(name))?;
        Ok(found.clone())
    }

    pub(crate) fn dtype(&self, code: i32, name: &str) -> Outcome<DataType> {
        data_type(code).map_err(named(name))
    }

    /// Makes the executor: how much workspace it wants, and its handle.
    pub(crate) fn finish(self, kernel: Kernel) -> Outcome<(u64, u64)> {
        for slot in &self.slots {
            let view = &slot.view;
            if view.rank() > MAX_RANK {
                return refuse(format!(
                    "{} has rank {}, at most {MAX_RANK} is expected",
                    slot.name,
                    view.rank()
                ));
            }
            let twice = |(dim, stride): (&usize, &i64)| *dim > 1 && *stride == 0;
            if slot.access != Access::Read && view.dims.iter().zip(&view.strides).any(twice) {
                return refuse(format!(
                    "{} is written and has strides {:?} for shape {:?}: elements share memory",
                    slot.name, view.strides, view.dims
                ));
            }
        }
        let copies = |slot: &Slot| {
            let view = &slot.view;
            let bytes = view.elements() as u64 * view.dtype.bytes();
            let direct = if self.transposed {
                view.is_matrix()
            } else {
                view.is_contiguous()
            };
            (!direct).then_some(bytes.next_multiple_of(WORKSPACE_ALIGNMENT))
        };
        let workspace = if self.slots.iter().any(|slot| slot.view.is_empty()) {
            0
        } else {
            let strided: u64 = self.slots.iter().filter_map(copies).sum();
            WORKSPACE_BYTES + strided + self.extra_workspace
        };
        let mut state = sim();
        let device = state.current_device()?;
        let handle = state.descriptors.executors.insert(Executor {
            launch: Launch {
                operator: self.operator,
                slots: self.slots,
                kernel,
                workspace,
                device,
                distinct: self.distinct,
            },
            held: self.held,
            repeatable: false,
            unrepeatable: self.unrepeatable,
        });
        Ok((workspace, handle))
    }
}

/// What goes onto the stream.
#[derive(Clone)]
struct Launch {
    operator: &'static str,
    slots: Vec<Slot>,
    kernel: Kernel,
    workspace: u64,
    device: u32,
    distinct: bool,
}

/// An operator that was planned.
pub(crate) struct Executor {
    launch: Launch,
    held: Vec<(u64, &'static str)>,
    repeatable: bool,
    unrepeatable: Option<&'static str>,
}

/// Which numbering an address is set by.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Numbering {
    Inputs,
    Outputs,
    Parameters,
}

impl Executor {
    pub(crate) fn make_repeatable(&mut self) -> Outcome {
        if let Some(why) = self.unrepeatable {
            return Err(Failure::new(
                ACLNN_INNER_ERROR,
                format!("{} cannot be repeatable: {why}", self.launch.operator),
            ));
        }
        self.repeatable = true;
        Ok(())
    }

    /// Gives a tensor parameter another address, which holds for the runs that follow.
    pub(crate) fn set_address(
        &mut self,
        by: Numbering,
        index: usize,
        member: Option<usize>,
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
            let at = match by {
                Numbering::Inputs => slot.input,
                Numbering::Outputs => slot.output,
                Numbering::Parameters => Some(slot.parameter),
            };
            at == Some(index) && slot.member == member
        });
        let Some(slot) = slot else {
            return refuse(format!(
                "{operator} has no tensor at index {index} of its {by:?}, or it was null in the first phase"
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
    // What is not repeatable is used up from here on, whether it gets onto the stream or not.
    let (launch, lost) = if planned.repeatable {
        let lost = lost_descriptor(&state.descriptors, planned);
        (planned.launch.clone(), lost)
    } else {
        let planned = state.descriptors.executors.remove(executor)?;
        let lost = lost_descriptor(&state.descriptors, &planned);
        (planned.launch, lost)
    };
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
        return Err(Failure::new(
            ACLNN_NULLPTR,
            format!("the workspace is null, {wanted} bytes were asked for"),
        ));
    }
    if wanted != 0 {
        state
            .memory
            .find(workspace, workspace_bytes)
            .map_err(named("workspace"))?;
    }
    *state.operator_runs.entry(operator).or_default() += 1;
    let work = Work::Run(Box::new(move |engine, context| {
        {
            let mut state = sim();
            if wanted != 0 {
                state.task_touch(workspace, wanted, true, context, operator);
            }
            if let Some(code) = state.stream_faults.next(operator) {
                let message = format!("{operator}: this failure on the stream was injected");
                return Err(Failure::new(code, message));
            }
        }
        if STUBBED.load(Ordering::Relaxed) {
            return Ok(());
        }
        expect_apart(&launch)?;
        (launch.kernel)(&mut Data::new(
            engine,
            context,
            operator,
            launch.device,
            &launch.slots,
        ))
    }));
    state.submit(stream, work).map(drop)
}

/// What an executor was planned with and that is no more.
fn lost_descriptor(descriptors: &super::Descriptors, planned: &Executor) -> Option<String> {
    let operator = planned.launch.operator;
    let slots = planned.launch.slots.iter().map(|s| (s.handle, s.name));
    slots
        .chain(planned.held.iter().copied())
        .find_map(|(handle, name)| {
            debug_assert!(Kind::of(handle).is_some());
            let failure = descriptors.expect_alive(handle).err()?;
            Some(format!(
                "{operator}: {name} has to live until the second phase has returned: {}",
                failure.message
            ))
        })
}

/// Refuses outputs that share memory with another tensor other than exactly.
fn expect_apart(launch: &Launch) -> Outcome {
    for (i, out) in launch.slots.iter().enumerate() {
        if out.access == Access::Read {
            continue;
        }
        for (j, other) in launch.slots.iter().enumerate() {
            let judged_before = other.access != Access::Read && j < i;
            if i == j || judged_before || !share_memory(&out.view, &other.view, launch.distinct) {
                continue;
            }
            let message = format!(
                "{}: {} and {} share memory: the result is undefined{}",
                launch.operator,
                out.name,
                other.name,
                if launch.distinct {
                    ""
                } else {
                    " unless they are the same view"
                }
            );
            sim().violate(Violation::host("overlap", &message));
            return Err(Failure::new(RT_AICORE_EXCEPTION, message));
        }
    }
    Ok(())
}

/// Whether two views touch a common byte, the same view not counting unless `exactly` does.
fn share_memory(a: &Tensor, b: &Tensor, exactly: bool) -> bool {
    use super::element::Strided;
    let (Some(at), Some(bt)) = (
        Strided::new(&a.dims, &a.strides),
        Strided::new(&b.dims, &b.strides),
    ) else {
        return false;
    };
    let (sa, sb) = (a.dtype.bytes(), b.dtype.bytes());
    let span = |t: &Tensor, at: &Strided, size: u64| {
        (t.address(), t.address() + (at.last() as u64 + 1) * size)
    };
    let ((a0, a1), (b0, b1)) = (span(a, &at, sa), span(b, &bt, sb));
    if a1 <= b0 || b1 <= a0 {
        return false;
    }
    if a0 == b0 && sa == sb && at == bt && a.elements() == b.elements() {
        return exactly;
    }
    if at.is_one_run() || bt.is_one_run() {
        // One of the two fills its span; whether the other has an element in it is a search.
        let (start, end, other, other_at, size) = if at.is_one_run() {
            (a0, a1, b0, &bt, sb)
        } else {
            (b0, b1, a0, &at, sa)
        };
        let mut found = false;
        other_at.offsets(|offset| {
            let address = other + offset as u64 * size;
            found |= address < end && start < address + size;
        });
        return found;
    }
    let mut taken = vec![false; (a1 - a0) as usize];
    at.offsets(|offset| taken[offset * sa as usize..][..sa as usize].fill(true));
    let mut found = false;
    bt.offsets(|offset| {
        let address = b0 + offset as u64 * sb;
        found |= (address..address + sb)
            .any(|byte| byte >= a0 && taken.get((byte - a0) as usize).copied().unwrap_or(false));
    });
    found
}

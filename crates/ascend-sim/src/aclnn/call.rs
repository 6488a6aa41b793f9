//! The first phase of an operator call: it takes the parameters, checks the documented limits and
//! makes an executor.

use std::ops::{Deref, RangeInclusive};
use std::sync::Arc;

use super::data::Data;
use super::descriptor::{Descriptors, Tensor, data_type};
use super::dtype::{DataType, Types, UNSIGNED};
use super::executor::{Executor, Launch};
use super::{inner, refuse};
use crate::codes::{ACLNN_NULLPTR, ACLNN_PARAM_INVALID, Failure, Outcome};
use crate::registry::{Object, Registry};
use crate::state::sim;

/// Workspace that every operator asks for: not zero, so that a program which passes none is found.
const WORKSPACE_BYTES: u64 = 1024;
/// Each block of a workspace starts at a multiple of this.
const WORKSPACE_ALIGNMENT: u64 = 512;
/// Tensors of a higher rank are refused, except where an operator states another limit.
pub(crate) const MAX_RANK: usize = 8;

/// The work of an operator on the stream.
pub(crate) type Kernel = Arc<dyn Fn(&mut Data<'_, '_>) -> Outcome + Send + Sync>;

/// Wraps the work of an operator whose parameters have been checked.
pub(crate) fn kernel(
    run: impl Fn(&mut Data<'_, '_>) -> Outcome + Send + Sync + 'static,
) -> Outcome<Kernel> {
    Ok(Arc::new(run))
}

/// How an operator uses a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
    Both,
}

/// A tensor parameter of a planned operator.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub(crate) name: &'static str,
    pub(crate) handle: u64,
    /// As described in the first phase; its address may change between runs.
    pub(crate) view: Arc<Tensor>,
    pub(crate) access: Access,
    /// The index among the inputs and among the outputs; members of a list have none.
    pub(crate) input: Option<usize>,
    pub(crate) output: Option<usize>,
    /// The list that the tensor is a member of: its handle, its index among the inputs, and the
    /// tensor's index in it.
    pub(crate) member: Option<(u64, usize, usize)>,
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
        let (found, expected) = (self.dtype, types.list());
        refuse(format!(
            "{} is {found:?}, one of {expected:?} is expected",
            self.name
        ))
    }

    /// Refuses another element type.
    pub(crate) fn expect_dtype(&self, dtype: DataType) -> Outcome {
        self.expect_type(Types::of(&[dtype]))
    }

    /// Refuses another element type or shape than the result has that is copied to this tensor. The
    /// vendor finds it there only, so not where `x` has no elements and the call ends before.
    pub(crate) fn expect_copy_of(&self, x: &Self, dtype: DataType, dims: &[usize]) -> Outcome {
        for tensor in [self, x] {
            tensor.expect_rank(0..=MAX_RANK)?;
        }
        if x.is_empty() {
            return Ok(());
        }
        inner(
            self.expect_dtype(dtype)
                .and_then(|()| self.expect_dims(dims)),
        )
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

    /// Refuses another element type or shape than `x` has.
    pub(crate) fn expect_like(&self, x: &Self, dims: &[usize]) -> Outcome {
        self.expect_dtype(x.dtype)?;
        self.expect_dims(dims)
    }

    /// Refuses a rank outside the range.
    pub(crate) fn expect_rank(&self, ranks: RangeInclusive<usize>) -> Outcome {
        if ranks.contains(&self.rank()) {
            return Ok(());
        }
        let (least, most) = ranks.into_inner();
        refuse(format!(
            "{} has rank {}, {least} to {most} is expected",
            self.name,
            self.rank()
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

/// Refuses a null where the operator needs the parameter.
pub(crate) fn required<T>(parameter: Option<T>, name: &str) -> Outcome<T> {
    parameter.ok_or_else(|| Failure::new(ACLNN_NULLPTR, format!("{name} is null")))
}

/// Turns a wrong handle into a parameter error that names the parameter.
pub(crate) fn named(name: &str) -> impl Fn(Failure) -> Failure {
    move |failure| Failure::new(ACLNN_PARAM_INVALID, format!("{name}: {}", failure.message))
}

/// The first phase of a call while it runs.
pub(crate) struct Call {
    operator: &'static str,
    slots: Vec<Slot>,
    /// Scalars, arrays and lists, which have to live as long as the tensors.
    held: Vec<(u64, &'static str)>,
    inputs: usize,
    outputs: usize,
    distinct: bool,
    transposed: bool,
    unrepeatable: Option<&'static str>,
}

impl Call {
    pub(crate) fn new(operator: &'static str) -> Self {
        Self {
            operator,
            slots: Vec::with_capacity(4),
            held: Vec::new(),
            inputs: 0,
            outputs: 0,
            distinct: false,
            transposed: false,
            unrepeatable: None,
        }
    }

    pub(crate) fn operator(&self) -> &'static str {
        self.operator
    }

    /// States that no output may share memory with another tensor, not even as the same view.
    pub(crate) fn distinct(&mut self) {
        self.distinct = true;
    }

    /// States why the executor cannot be made repeatable.
    pub(crate) fn unrepeatable(&mut self, why: &'static str) {
        self.unrepeatable = Some(why);
    }

    /// States that a matrix stored transposed needs no copy.
    pub(crate) fn takes_transposed(&mut self) {
        self.transposed = true;
    }

    /// Counts a parameter; its index among the inputs and among the outputs.
    fn count(&mut self, access: Access) -> (Option<usize>, Option<usize>) {
        let next = |count: &mut usize| {
            *count += 1;
            *count - 1
        };
        (
            (access != Access::Write).then(|| next(&mut self.inputs)),
            (access != Access::Read).then(|| next(&mut self.outputs)),
        )
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

    /// A tensor parameter, absent where the handle is null.
    pub(crate) fn tensor(
        &mut self,
        handle: u64,
        name: &'static str,
        access: Access,
    ) -> Outcome<Option<Operand>> {
        self.tensor_counted(handle, name, access, access)
    }

    /// As [`tensor`](Self::tensor), for one that is counted among the inputs and the outputs as
    /// `counted` says.
    pub(crate) fn tensor_counted(
        &mut self,
        handle: u64,
        name: &'static str,
        access: Access,
        counted: Access,
    ) -> Outcome<Option<Operand>> {
        let (input, output) = self.count(counted);
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
            member: None,
        })))
    }

    /// A list of tensors that are read or written, absent where the handle is null.
    pub(crate) fn tensors(
        &mut self,
        list: u64,
        name: &'static str,
        access: Access,
    ) -> Outcome<Option<Vec<Operand>>> {
        let (input, _) = self.count(access);
        let Some(members) = self.held(list, name, |all| &all.lists)? else {
            return Ok(None);
        };
        let slot = |(index, handle): (usize, &u64)| {
            let state = sim();
            let view = state.descriptors.tensors.get(*handle);
            Ok(Slot {
                name,
                handle: *handle,
                view: Arc::clone(view.map_err(named(name))?),
                access,
                input: None,
                output: None,
                member: input.map(|input| (list, input, index)),
            })
        };
        let slots = members
            .iter()
            .enumerate()
            .map(slot)
            .collect::<Outcome<Vec<_>>>()?;
        Ok(Some(
            slots.into_iter().map(|slot| self.push(slot)).collect(),
        ))
    }

    /// A scalar, array or list, absent where the handle is null.
    pub(crate) fn held<T: Clone + Object>(
        &mut self,
        handle: u64,
        name: &'static str,
        registry: impl Fn(&Descriptors) -> &Registry<T>,
    ) -> Outcome<Option<T>> {
        if handle == 0 {
            return Ok(None);
        }
        self.held.push((handle, name));
        let state = sim();
        let found = registry(&state.descriptors).get(handle);
        found.cloned().map(Some).map_err(named(name))
    }

    pub(crate) fn dtype(&self, code: i32, name: &str) -> Outcome<DataType> {
        data_type(code).map_err(named(name))
    }

    /// Makes the executor: how much workspace it wants, and its handle.
    pub(crate) fn finish(self, kernel: Kernel) -> Outcome<(u64, u64)> {
        for slot in &self.slots {
            expect_usable(slot)?;
        }
        let copy_bytes = |slot: &Slot| {
            let view = &slot.view;
            let direct = if self.transposed {
                view.is_matrix()
            } else {
                view.is_contiguous()
            };
            let bytes = view.elements() as u64 * view.dtype.bytes();
            (!direct).then_some(bytes.next_multiple_of(WORKSPACE_ALIGNMENT))
        };
        let workspace = if self.slots.iter().any(|slot| slot.view.is_empty()) {
            0
        } else {
            WORKSPACE_BYTES + self.slots.iter().filter_map(copy_bytes).sum::<u64>()
        };
        let mut state = sim();
        let device = state.current_device()?;
        let launch = Launch {
            operator: self.operator,
            slots: self.slots,
            kernel,
            workspace,
            device,
            distinct: self.distinct,
        };
        let planned = Executor::new(launch, self.held, self.unrepeatable);
        Ok((workspace, state.descriptors.executors.insert(planned)))
    }
}

/// Refuses what no operator takes: too many axes, outputs whose elements share memory, and outputs
/// whose strides no kernel writes in their type.
fn expect_usable(slot: &Slot) -> Outcome {
    let Slot { name, view, .. } = slot;
    if view.rank() > MAX_RANK {
        return refuse(format!(
            "{name} has rank {}, at most {MAX_RANK} is expected",
            view.rank()
        ));
    }
    let copied = slot.access != Access::Read && !view.is_empty() && !view.is_dense();
    if copied && UNSIGNED.has(view.dtype) && !view.is_written_by_ai_core() {
        return inner(refuse(format!(
            "{name} is {:?} and has strides {:?} for shape {:?}, which only the AI CPU writes, \
             and not in this type",
            view.dtype, view.strides, view.dims
        )));
    }
    let mut axes = view.dims.iter().zip(&view.strides);
    if slot.access != Access::Read && axes.any(|(dim, stride)| *dim > 1 && *stride == 0) {
        return refuse(format!(
            "{name} is written and has strides {:?} for shape {:?}: elements share memory",
            view.strides, view.dims
        ));
    }
    Ok(())
}

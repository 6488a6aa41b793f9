//! Operator descriptors and the stock rotary operators, from their documentation, in plain loops.
//!
//! An operator call has two phases. The first checks the documented limits and makes an executor;
//! the second puts it on a stream with its workspace, once.

pub(crate) mod apply;
pub(crate) mod cache;
pub(crate) mod descriptor;
pub(crate) mod rotary;

use crate::abi::sys::Engine;
use crate::codes::{ACLNN_NULLPTR, ACLNN_PARAM_INVALID, Failure, Outcome};
use crate::registry::{Kind, Registry};
use crate::state::sim;
use crate::stream::{TaskContext, Work};

pub(crate) use descriptor::{DataType, Tensor};

/// Workspace that every operator asks for: not zero, so that a program which passes none is found.
pub(crate) const WORKSPACE_BYTES: u64 = 1024;

type Run = Box<dyn FnOnce(&Engine<'_>, &TaskContext) -> Outcome + Send>;

/// An operator that was planned and not yet run.
pub(crate) struct Executor {
    operator: &'static str,
    run: Run,
}

pub(crate) struct Descriptors {
    pub(crate) tensors: Registry<Tensor>,
    pub(crate) arrays: Registry<Vec<i64>>,
    pub(crate) scalars: Registry<Vec<u8>>,
    pub(crate) lists: Registry<Vec<u64>>,
    pub(crate) executors: Registry<Executor>,
}

impl Descriptors {
    pub(crate) fn new() -> Self {
        Self {
            tensors: Registry::new(Kind::Tensor),
            arrays: Registry::new(Kind::IntArray),
            scalars: Registry::new(Kind::Scalar),
            lists: Registry::new(Kind::TensorList),
            executors: Registry::new(Kind::Executor),
        }
    }

    pub(crate) fn live(&self) -> usize {
        self.tensors.len()
            + self.arrays.len()
            + self.scalars.len()
            + self.lists.len()
            + self.executors.len()
    }
}

/// A refusal: a limit of the documentation that a parameter breaks.
pub(crate) fn refuse<T>(message: impl std::fmt::Display) -> Outcome<T> {
    Err(Failure::new(ACLNN_PARAM_INVALID, message))
}

/// A tensor parameter that must be given.
pub(crate) fn tensor(handle: u64, name: &str) -> Outcome<Tensor> {
    optional_tensor(handle, name)?
        .ok_or_else(|| Failure::new(ACLNN_NULLPTR, format!("{name} is null")))
}

/// A tensor parameter that may be null.
pub(crate) fn optional_tensor(handle: u64, name: &str) -> Outcome<Option<Tensor>> {
    if handle == 0 {
        return Ok(None);
    }
    let state = sim();
    let found = state.descriptors.tensors.get(handle);
    found.cloned().map(Some).map_err(|failure| {
        Failure::new(ACLNN_PARAM_INVALID, format!("{name}: {}", failure.message))
    })
}

/// Keeps a planned operator; its handle.
pub(crate) fn plan(operator: &'static str, run: Run) -> Outcome<u64> {
    let mut state = sim();
    state.current_device()?;
    Ok(state
        .descriptors
        .executors
        .insert(Executor { operator, run }))
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
    let planned = state.descriptors.executors.get(executor)?.operator;
    if planned != operator {
        return refuse(format!(
            "the executor was planned by {planned}GetWorkspaceSize"
        ));
    }
    if workspace_bytes < WORKSPACE_BYTES {
        return refuse(format!(
            "a workspace of {workspace_bytes} bytes was given, {WORKSPACE_BYTES} were asked for"
        ));
    }
    if workspace == 0 {
        return Err(Failure::new(
            ACLNN_NULLPTR,
            format!("the workspace is null, {WORKSPACE_BYTES} bytes were asked for"),
        ));
    }
    state
        .memory
        .find(workspace, workspace_bytes)
        .map_err(|failure| {
            Failure::new(
                ACLNN_PARAM_INVALID,
                format!("workspace: {}", failure.message),
            )
        })?;
    let run = state.descriptors.executors.remove(executor)?.run;
    let work: Run = Box::new(move |engine, context| {
        sim().task_touch(workspace, WORKSPACE_BYTES, true, context, operator);
        run(engine, context)
    });
    state.submit(stream, Work::Run(work)).map(drop)
}

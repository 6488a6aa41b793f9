//! The two phases of an operator.

use crate::error::{AscendError, Result};
use crate::result::recent_message;
use crate::safe::Stream;
use crate::sys::{AclMeta, Run, aclOpExecutor, aclnnStatus, code};

/// The table of descriptor functions of the stream's runtime.
pub(super) fn meta(stream: &Stream) -> Result<&AclMeta> {
    stream
        .device()
        .runtime()
        .api()
        .meta
        .as_ref()
        .map_err(|error| AscendError::Load(error.clone()))
}

/// The two functions of an operator, or an error that names the missing one.
pub(super) fn both<P>(
    stream: &Stream,
    plan: Option<P>,
    plan_name: &'static str,
    run: Option<Run>,
    run_name: &'static str,
) -> Result<(P, Run)> {
    let missing = |symbol| AscendError::SymbolUnavailable {
        symbol,
        library: format!(
            "the operator library of {}",
            stream.device().runtime().api().origin
        ),
        purpose: "this stock operator",
    };
    Ok((
        plan.ok_or_else(|| missing(plan_name))?,
        run.ok_or_else(|| missing(run_name))?,
    ))
}

fn check(stream: &Stream, function: &'static str, status: aclnnStatus) -> Result<()> {
    if status == code::SUCCESS {
        return Ok(());
    }
    Err(AscendError::Call {
        function,
        code: status,
        meaning: code::meaning(status),
        detail: recent_message(&stream.device().runtime().api().rt),
    })
}

/// Plans an operator, gives it its workspace, and queues it.
///
/// # Safety
/// - `plan` calls the first phase with live descriptors, which stay alive until this returns.
/// - `run` is the second phase of the same operator.
pub(super) unsafe fn run_operator(
    stream: &Stream,
    plan_name: &'static str,
    plan: impl FnOnce(*mut u64, *mut *mut aclOpExecutor) -> aclnnStatus,
    run_name: &'static str,
    run: Run,
) -> Result<()> {
    stream.make_current()?;
    let mut workspace_bytes = 0;
    let mut executor = std::ptr::null_mut();
    check(
        stream,
        plan_name,
        plan(&raw mut workspace_bytes, &raw mut executor),
    )?;
    let workspace = stream.alloc::<u8>(usize::try_from(workspace_bytes).unwrap_or(usize::MAX));
    let workspace = match workspace {
        Ok(workspace) => workspace,
        Err(error) => {
            if let Some(destroy) = meta(stream)?.aclDestroyAclOpExecutor {
                // SAFETY: planned above and not run; nothing else holds it. The first error
                // matters more than one of this call.
                let _ = unsafe { destroy(executor) };
            }
            return Err(error);
        }
    };
    let pointer = if workspace.is_empty() {
        std::ptr::null_mut()
    } else {
        workspace.pointer()
    };
    // SAFETY: the workspace has the size that was asked for. Dropped below, it returns to this
    // stream's cache, so later work gets it only behind the operator. The executor is used once.
    let status = unsafe { run(pointer, workspace_bytes, executor, stream.raw()) };
    check(stream, run_name, status)
}

//! Planned calls.

use super::call::meta;
use super::operators::Objects;
use crate::error::Result;
use crate::result::check;
use crate::safe::Stream;
use crate::sys::{Run, aclOpExecutor};

/// A planned call: its executor, and the objects that it refers to.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) objects: Objects,
    pub(super) executor: *mut aclOpExecutor,
    pub(super) workspace_bytes: u64,
}

/// How many of the operators queued last are remembered, for messages about failures that surface later.
const RECENT: usize = 8;

/// What one stream's calls leave behind.
#[derive(Debug, Default)]
pub(super) struct Plans {
    recent: [&'static str; RECENT],
    next: usize,
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
}

impl Plan {
    /// Queues the call, which gives the executor up.
    pub(super) fn run_once(self, stream: &Stream, name: &'static str, run: Run) -> Result<()> {
        let bytes = usize::try_from(self.workspace_bytes).unwrap_or(usize::MAX);
        let workspace = match stream.alloc::<u8>(bytes) {
            Ok(workspace) => workspace,
            Err(error) => {
                if let Some(destroy) = meta(stream)?.aclDestroyAclOpExecutor {
                    // SAFETY: planned and not run; nothing else holds it. The first error matters more than one of
                    // this call.
                    let _ = unsafe { destroy(self.executor) };
                }
                return Err(error);
            }
        };
        let pointer = if workspace.is_empty() {
            std::ptr::null_mut()
        } else {
            workspace.pointer()
        };
        // SAFETY: the workspace has the size that was asked for; dropped below, it returns to this stream's cache, so that
        // later work gets it only behind the operator. The executor is used once. `self` keeps its objects alive.
        let status = unsafe { run(pointer, self.workspace_bytes, self.executor, stream.raw()) };
        check(&stream.device().runtime().api().rt, name, status)
    }
}

//! Threads: as many as PyTorch uses, also in a process that was forked.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rope_core::Parallelism;

/// Split as rope-core does, over at most as many tasks as PyTorch has threads.
pub(crate) fn parallelism(threads: usize) -> Parallelism {
    Parallelism::new(256 << 10, threads)
}

/// Runs `work` where its tasks find threads.
///
/// A forked process, such as a worker of a data loader, lacks the threads of its parent's pool:
/// tasks for them would wait for ever. A forked process gets a pool of its own.
pub(crate) fn with_threads<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    static FIRST: AtomicU32 = AtomicU32::new(0);
    static FORKED: Mutex<Option<(u32, Arc<rayon::ThreadPool>)>> = Mutex::new(None);
    let process = std::process::id();
    let first = FIRST.compare_exchange(0, process, Ordering::Relaxed, Ordering::Relaxed);
    if first.is_ok() || first == Err(process) {
        return work();
    }
    let mut forked = FORKED.lock().unwrap_or_else(PoisonError::into_inner);
    if forked.as_ref().is_none_or(|(of, _)| *of != process) {
        // Never dropped in the child: its drop would wait for threads that are not there.
        std::mem::forget(forked.take());
        match rayon::ThreadPoolBuilder::new().build() {
            Ok(pool) => *forked = Some((process, Arc::new(pool))),
            // Without threads to be had, the calling one alone.
            Err(_) => return work(),
        }
    }
    let pool = forked.as_ref().map(|(_, pool)| Arc::clone(pool));
    drop(forked);
    match pool {
        Some(pool) => pool.install(work),
        None => work(),
    }
}

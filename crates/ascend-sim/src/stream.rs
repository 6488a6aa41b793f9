//! Streams: work submitted now, run later by the stream's own thread, in order.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::abi::sys::Engine;
use crate::clock::{Actor, Clock};
use crate::codes::{Failure, INTERNAL_ERROR, Outcome};

/// How often a waiting worker checks whether streams are still held.
const HELD_POLL: Duration = Duration::from_millis(1);

/// While true, no stream starts a task, so that a test can see that work is deferred.
pub(crate) static HELD: AtomicBool = AtomicBool::new(false);

static ENGINE: Mutex<()> = Mutex::new(());

/// The right to touch device memory.
pub(crate) fn engine() -> Engine<'static> {
    Engine(ENGINE.lock().unwrap_or_else(PoisonError::into_inner))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until `changed` is notified, or at most for `timeout`.
fn wait_for<'a, T>(
    changed: &Condvar,
    guard: MutexGuard<'a, T>,
    timeout: Option<Duration>,
) -> MutexGuard<'a, T> {
    match timeout {
        None => changed.wait(guard).unwrap_or_else(PoisonError::into_inner),
        Some(timeout) => {
            let waited = changed.wait_timeout(guard, timeout);
            waited.unwrap_or_else(PoisonError::into_inner).0
        }
    }
}

/// Fulfilled when the work before a point of a stream is complete, with the failure it met, if any.
#[derive(Default)]
pub(crate) struct Ticket {
    state: Mutex<Option<Option<Failure>>>,
    changed: Condvar,
}

impl Ticket {
    fn fulfil(&self, failure: Option<Failure>) {
        *lock(&self.state) = Some(failure);
        self.changed.notify_all();
    }

    /// Waits for the point; the failure that the stream met before it.
    pub(crate) fn wait(&self) -> Option<Failure> {
        let mut state = lock(&self.state);
        loop {
            if let Some(done) = state.as_ref() {
                return done.clone();
            }
            state = wait_for(&self.changed, state, None);
        }
    }
}

/// The stream and the order of a task.
pub(crate) struct TaskContext {
    pub(crate) actor: Actor,
    pub(crate) epoch: u64,
    pub(crate) clock: Clock,
}

type Run = Box<dyn FnOnce(&mut Engine<'_>, &TaskContext) -> Outcome + Send>;

/// Work that waits for other devices.
type Meet = Box<dyn FnOnce(&TaskContext) -> Outcome + Send>;

pub(crate) enum Work {
    Run(Run),
    /// Without the engine, which it takes for a moment at a time.
    Meet(Meet),
    Record(Arc<Ticket>),
    Wait(Arc<Ticket>),
}

struct Task {
    work: Work,
    context: TaskContext,
}

#[derive(Default)]
struct Inner {
    queue: VecDeque<Task>,
    submitted: u64,
    completed: u64,
    failure: Option<Failure>,
    closing: bool,
}

#[derive(Default)]
struct Shared {
    inner: Mutex<Inner>,
    changed: Condvar,
}

/// A stream and its thread.
pub(crate) struct Stream {
    pub(crate) device: u32,
    /// The work that the stream's next task is ordered after.
    pub(crate) clock: Clock,
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
}

/// Waits for what was submitted so far.
pub(crate) struct StreamWaiter {
    shared: Arc<Shared>,
    target: u64,
}

impl StreamWaiter {
    /// The task count that is complete when the wait returns.
    pub(crate) fn target(&self) -> u64 {
        self.target
    }

    /// `None` when `timeout` passed first; otherwise the failure of the stream, if it has one.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> Option<Option<Failure>> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let mut inner = lock(&self.shared.inner);
        while inner.completed < self.target {
            let left = match deadline {
                None => None,
                Some(deadline) => Some(deadline.checked_duration_since(Instant::now())?),
            };
            inner = wait_for(&self.shared.changed, inner, left);
        }
        Some(inner.failure.clone())
    }
}

impl Stream {
    pub(crate) fn new(device: u32) -> Outcome<Self> {
        let shared = Arc::new(Shared::default());
        let worker_shared = Arc::clone(&shared);
        let worker = std::thread::Builder::new()
            .name("ascend-sim-stream".to_owned())
            .spawn(move || work(&worker_shared))
            .map_err(|error| Failure::new(INTERNAL_ERROR, error))?;
        Ok(Self {
            device,
            clock: Clock::default(),
            shared,
            worker: Some(worker),
        })
    }

    /// Appends a task that is ordered after everything in the stream's clock; its epoch.
    pub(crate) fn submit(&mut self, actor: Actor, work: Work) -> u64 {
        let mut inner = lock(&self.shared.inner);
        inner.submitted += 1;
        let epoch = inner.submitted;
        inner.queue.push_back(Task {
            work,
            context: TaskContext {
                actor,
                epoch,
                clock: self.clock.clone(),
            },
        });
        self.clock.raise(actor, epoch);
        drop(inner);
        self.shared.changed.notify_all();
        epoch
    }

    pub(crate) fn waiter(&self) -> StreamWaiter {
        let target = lock(&self.shared.inner).submitted;
        StreamWaiter {
            shared: Arc::clone(&self.shared),
            target,
        }
    }

    /// Asks the thread to end; `discard` drops work that has not started.
    pub(crate) fn begin_close(&self, discard: bool) {
        {
            let mut inner = lock(&self.shared.inner);
            inner.closing = true;
            if discard {
                let dropped = std::mem::take(&mut inner.queue);
                inner.completed += dropped.len() as u64;
                for task in dropped {
                    if let Work::Record(ticket) = task.work {
                        ticket.fulfil(None);
                    }
                }
            }
        }
        self.shared.changed.notify_all();
    }

    /// Ends the thread and waits for it.
    pub(crate) fn close(mut self, discard: bool) {
        self.begin_close(discard);
        if let Some(worker) = self.worker.take() {
            // A worker that panicked has nothing left to give back.
            let _ = worker.join();
        }
    }
}

fn work(shared: &Shared) {
    loop {
        let mut inner = lock(&shared.inner);
        let task = loop {
            let held = HELD.load(Ordering::Relaxed) && !inner.closing;
            if !held && let Some(task) = inner.queue.pop_front() {
                break task;
            }
            if inner.closing && inner.queue.is_empty() {
                return;
            }
            inner = wait_for(&shared.changed, inner, held.then_some(HELD_POLL));
        };
        let failed = inner.failure.clone();
        drop(inner);
        let result = match (task.work, failed) {
            // After a failure the rest of the stream's work is discarded.
            (Work::Run(_) | Work::Meet(_), Some(_)) => Ok(()),
            (Work::Meet(meet), None) => catch_unwind(AssertUnwindSafe(|| meet(&task.context)))
                .unwrap_or_else(|_| Err(Failure::new(INTERNAL_ERROR, "the simulator panicked"))),
            // A fault of the simulator must not leave the program waiting.
            (Work::Run(run), None) => {
                catch_unwind(AssertUnwindSafe(|| run(&mut engine(), &task.context)))
                    .unwrap_or_else(|_| Err(Failure::new(INTERNAL_ERROR, "the simulator panicked")))
            }
            (Work::Record(ticket), failed) => {
                ticket.fulfil(failed);
                Ok(())
            }
            (Work::Wait(ticket), _) => ticket.wait().map_or(Ok(()), Err),
        };
        let mut inner = lock(&shared.inner);
        inner.completed += 1;
        if let Err(failure) = result {
            inner.failure.get_or_insert(failure);
        }
        drop(inner);
        shared.changed.notify_all();
    }
}

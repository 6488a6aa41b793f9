//! Threads that prepare samples ahead of the training thread.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::order::{Plan, Turn};
use crate::dataset::{DataSet, DataSetReader};
use crate::sample::{SampleEncoder, TrainingSample};
use crate::{Result, VlmDataError};

/// A sample or its error, with its place in the order and its record.
pub(super) type Made = (Turn, usize, Result<TrainingSample>);

/// The threads, which end when this is dropped.
#[derive(Debug)]
pub(super) struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    waited: Duration,
    since: Option<Instant>,
}

#[derive(Debug)]
struct Shared {
    encoder: Arc<SampleEncoder>,
    set: Arc<DataSet>,
    most_bytes: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    plan: Plan,
    /// The numbers of samples started and taken.
    begun: u64,
    taken: u64,
    is_planned: bool,
    is_stopped: bool,
    /// Samples built but not yet taken, and their bytes.
    made: BTreeMap<u64, Made>,
    bytes: usize,
}

impl Workers {
    pub(super) fn new(
        encoder: Arc<SampleEncoder>,
        set: Arc<DataSet>,
        plan: Plan,
        threads: usize,
        most_bytes: usize,
    ) -> Result<Self> {
        let state = State {
            plan,
            begun: 0,
            taken: 0,
            is_planned: false,
            is_stopped: false,
            made: BTreeMap::new(),
            bytes: 0,
        };
        let shared = Arc::new(Shared {
            encoder,
            set,
            most_bytes,
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        // If a thread cannot be started, this is dropped and its threads stop.
        let mut workers = Self {
            shared,
            threads: Vec::with_capacity(threads),
            waited: Duration::ZERO,
            since: None,
        };
        for number in 0..threads {
            let shared = Arc::clone(&workers.shared);
            let thread = std::thread::Builder::new().name(format!("vlm-data {number}"));
            let thread = thread.spawn(move || shared.work());
            workers
                .threads
                .push(thread.map_err(|error| VlmDataError::Thread {
                    reason: error.to_string(),
                })?);
        }
        Ok(workers)
    }

    /// Takes the next sample in order; `None` after the last.
    pub(super) fn take(&mut self) -> Option<Made> {
        let start = Instant::now();
        self.since.get_or_insert(start);
        let mut state = self.shared.state.lock();
        let made = loop {
            let next = state.taken;
            if let Some(made) = state.made.remove(&next) {
                break Some(made);
            }
            if state.is_planned && state.taken == state.begun {
                break None;
            }
            self.shared.changed.wait(&mut state);
        };
        if let Some((_, _, sample)) = &made {
            state.taken += 1;
            state.bytes -= bytes(sample);
            self.shared.changed.notify_all();
        }
        self.waited += start.elapsed();
        made
    }

    /// The share of time spent waiting for samples since the first one was requested.
    pub(super) fn waiting_share(&self) -> f64 {
        let all = self
            .since
            .map_or(0.0, |since| since.elapsed().as_secs_f64());
        if all > 0.0 {
            self.waited.as_secs_f64() / all
        } else {
            0.0
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.state.lock().is_stopped = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            // A panic of a sample is caught where the sample is built.
            _ = thread.join();
        }
    }
}

impl Shared {
    fn work(&self) {
        let mut reader = None;
        while let Some((number, turn, record)) = self.begin() {
            let made = catch_unwind(AssertUnwindSafe(|| self.make(&mut reader, record)));
            let sample = made.unwrap_or_else(|panic| {
                let reason = panic
                    .downcast_ref::<String>()
                    .map(String::as_str)
                    .or_else(|| panic.downcast_ref::<&str>().copied());
                Err(VlmDataError::Panic {
                    line: self.set.line(record),
                    reason: reason.unwrap_or("without a message").to_owned(),
                })
            });
            let mut state = self.state.lock();
            state.bytes += bytes(&sample);
            state.made.insert(number, (turn, record, sample));
            self.changed.notify_all();
        }
    }

    /// Waits until there is room for another sample, or until the next sample to be taken has not
    /// been started.
    fn begin(&self) -> Option<(u64, Turn, usize)> {
        let mut state = self.state.lock();
        loop {
            if state.is_stopped || state.is_planned {
                return None;
            }
            if state.bytes < self.most_bytes || state.begun == state.taken {
                break;
            }
            self.changed.wait(&mut state);
        }
        let next = state.plan.next();
        let Some((turn, record)) = next else {
            state.is_planned = true;
            self.changed.notify_all();
            return None;
        };
        state.begun += 1;
        Some((state.begun - 1, turn, record))
    }

    fn make<'a>(
        &'a self,
        reader: &mut Option<DataSetReader<'a>>,
        record: usize,
    ) -> Result<TrainingSample> {
        let reader = reader.get_or_insert_with(|| self.set.reader());
        let sample = self.encoder.encode_record(reader, record, true);
        sample.map_err(|error| self.set.named(record, error))
    }
}

/// The bytes of a sample; an error counts as small.
fn bytes(sample: &Result<TrainingSample>) -> usize {
    1024 + sample.as_ref().map_or(0, TrainingSample::bytes)
}

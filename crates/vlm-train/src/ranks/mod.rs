//! The ranks of a run: threads of this and other processes, each with a device and a shard of every
//! batch.
//!
//! Ranks meet before and after each step: each sends some bytes and receives those of all ranks. A
//! rank that fails reports it there, and all others end with its cause.

mod frame;
mod peers;
mod rendezvous;
mod server;
mod sums;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::{Result, VlmTrainError};
pub(crate) use peers::{NoSum, Peers, expect_done};
pub use rendezvous::{Rendezvous, RendezvousError};
pub use sums::{Begun, Collective, HostSums};

/// The time within which the other ranks of a process must notice a failure.
const GRACE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(100);

/// The failure that ended a run of several ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankFailure {
    pub(crate) rank: usize,
    pub(crate) cause: String,
}

impl From<RankFailure> for VlmTrainError {
    fn from(failure: RankFailure) -> Self {
        Self::Rank {
            rank: failure.rank,
            cause: failure.cause,
        }
    }
}

/// The parts sent by all ranks in a round, in rank order.
type Parts = Arc<Vec<Vec<u8>>>;

#[derive(Default)]
struct Meeting {
    round: u64,
    given: Vec<Option<Vec<u8>>>,
    /// True if all ranks of this process have sent their parts and wait for those of other
    /// processes.
    is_away: bool,
    received: Parts,
    failure: Option<RankFailure>,
}

/// The connection to the ranks of other processes.
trait Link: Send + Sync {
    /// Sends the parts of this process and receives those of all.
    fn exchange(&self, parts: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, RankFailure>;
    /// Reports the failure of a rank of this process to the others.
    fn fail(&self, failure: &RankFailure);
    /// Ends the connection without a failure.
    fn finish(&self);
}

struct Shared {
    first: usize,
    all: usize,
    timeout: Duration,
    meeting: Mutex<Meeting>,
    changed: Condvar,
    link: Option<Box<dyn Link>>,
}

impl Shared {
    /// Ends the run of every rank; the first cause counts.
    fn fail(&self, failure: RankFailure, is_ours: bool) {
        let mut meeting = self.meeting.lock();
        let is_first = meeting.failure.is_none();
        let failure = meeting.failure.get_or_insert(failure).clone();
        drop(meeting);
        self.changed.notify_all();
        if let Some(link) = self.link.as_ref().filter(|_| is_ours && is_first) {
            link.fail(&failure);
        }
    }
}

/// The ranks of this process, and the connection to those of other processes.
#[derive(Clone)]
pub struct RankGroup {
    shared: Arc<Shared>,
}

impl fmt::Debug for RankGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let local = self.shared.meeting.lock().given.len();
        let first = self.shared.first;
        write!(
            f,
            "RankGroup({first}..{} of {})",
            first + local,
            self.shared.all
        )
    }
}

impl RankGroup {
    /// Creates a group of `ranks` threads of this process only, which wait for each other at most
    /// for `timeout`.
    pub fn of_process(ranks: usize, timeout: Duration) -> Self {
        Self::new(0, ranks, ranks, timeout, None)
    }

    fn new(
        first: usize,
        local: usize,
        all: usize,
        timeout: Duration,
        link: Option<Box<dyn Link>>,
    ) -> Self {
        let meeting = Meeting {
            given: vec![None; local],
            ..Meeting::default()
        };
        Self {
            shared: Arc::new(Shared {
                first,
                all,
                timeout,
                meeting: Mutex::new(meeting),
                changed: Condvar::new(),
                link,
            }),
        }
    }

    /// Returns the ranks of this process, in order.
    pub fn ranks(&self) -> Vec<Rank> {
        let local = self.shared.meeting.lock().given.len();
        let rank = |local| Rank {
            local,
            group: self.clone(),
        };
        (0..local).map(rank).collect()
    }

    /// Runs `work` on a thread for each rank of this process and returns the results. If one fails
    /// or panics, all ranks of all processes end with its cause. A thread that does not notice
    /// within ten seconds, because its device waits for others, is abandoned, and the process
    /// should exit.
    ///
    /// # Errors
    /// [`VlmTrainError::Rank`] with the first rank that failed and its cause.
    pub fn run<T: Send + 'static>(
        &self,
        work: impl Fn(&Rank) -> Result<T, String> + Send + Sync + 'static,
    ) -> Result<Vec<T>> {
        let work = Arc::new(work);
        let (sender, receiver) = channel();
        let ranks = self.ranks();
        let mut ended: Vec<Option<T>> = ranks.iter().map(|_| None).collect();
        for rank in ranks {
            let (work, sender, index) = (work.clone(), sender.clone(), rank.local);
            let name = format!("rank-{}", rank.rank());
            let begun = thread::Builder::new().name(name).spawn(move || {
                let outcome = catch_unwind(AssertUnwindSafe(|| work(&rank)));
                let outcome = outcome.unwrap_or_else(|panic| Err(panic_text(&*panic)));
                if let Err(cause) = &outcome {
                    rank.fail(cause.clone());
                }
                // The receiver is gone if this rank was abandoned.
                let _ = sender.send((index, outcome));
            });
            if let Err(error) = begun {
                let cause = format!("no thread: {error}");
                self.ranks()[index].fail(cause);
            }
        }
        drop(sender);
        let mut limit = None;
        while let Some((index, outcome)) = self.next_end(&receiver, &mut limit) {
            ended[index] = outcome.ok();
        }
        if let Some(failure) = self.shared.meeting.lock().failure.clone() {
            return Err(failure.into());
        }
        if let Some(link) = &self.shared.link {
            link.finish();
        }
        Ok(ended.into_iter().flatten().collect())
    }

    /// The result of the next thread that ends; `None` once all have ended, or when the run has
    /// failed and the grace period is over.
    fn next_end<T>(&self, ends: &Receiver<T>, limit: &mut Option<Instant>) -> Option<T> {
        loop {
            match ends.recv_timeout(POLL) {
                Ok(end) => return Some(end),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => {}
            }
            if self.shared.meeting.lock().failure.is_some()
                && Instant::now() >= *limit.get_or_insert(Instant::now() + GRACE)
            {
                return None;
            }
        }
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
    format!("its thread panicked: {}", text.unwrap_or_default())
}

/// One rank.
#[derive(Clone, Debug)]
pub struct Rank {
    local: usize,
    group: RankGroup,
}

impl Rank {
    /// Its number, from 0.
    pub fn rank(&self) -> usize {
        self.group.shared.first + self.local
    }

    /// Its number among those of this process, from 0.
    pub fn local(&self) -> usize {
        self.local
    }

    /// The number of ranks in all processes.
    pub fn ranks(&self) -> usize {
        self.group.shared.all
    }

    /// Ends the run of all ranks with a cause, unless a rank has already failed.
    fn fail(&self, cause: String) {
        let rank = self.rank();
        self.group.shared.fail(RankFailure { rank, cause }, true);
    }

    /// Sends bytes, waits until every rank has sent its own, and returns those of all ranks in
    /// order.
    ///
    /// # Errors
    /// [`VlmTrainError::Rank`] if a rank has failed or does not arrive in time.
    pub fn exchange(&self, bytes: Vec<u8>) -> Result<Arc<Vec<Vec<u8>>>> {
        let shared = &*self.group.shared;
        let mut meeting = shared.meeting.lock();
        if let Some(failure) = &meeting.failure {
            return Err(failure.clone().into());
        }
        let round = meeting.round;
        meeting.given[self.local] = Some(bytes);
        if meeting.given.iter().all(Option::is_some) {
            let parts = meeting.given.iter_mut().filter_map(Option::take).collect();
            meeting.is_away = true;
            drop(meeting);
            let received = match &shared.link {
                None => Ok(parts),
                Some(link) => link.exchange(parts),
            };
            let received = received.inspect_err(|failure| shared.fail(failure.clone(), false))?;
            meeting = shared.meeting.lock();
            meeting.received = Arc::new(received);
            meeting.is_away = false;
            meeting.round += 1;
            shared.changed.notify_all();
            return Ok(meeting.received.clone());
        }
        let limit = Instant::now() + shared.timeout;
        loop {
            // A complete round counts even if a rank has failed since.
            if meeting.round > round {
                return Ok(meeting.received.clone());
            }
            if let Some(failure) = &meeting.failure {
                return Err(failure.clone().into());
            }
            let left = limit.saturating_duration_since(Instant::now());
            // The connection to other processes has separate limits.
            if left.is_zero() && !meeting.is_away {
                let missing = meeting.given.iter().position(Option::is_none);
                let rank = shared.first + missing.unwrap_or_default();
                drop(meeting);
                let failure = RankFailure {
                    rank,
                    cause: slow(shared.timeout),
                };
                shared.fail(failure.clone(), true);
                return Err(failure.into());
            }
            let left = left.max(Duration::from_millis(50));
            shared.changed.wait_for(&mut meeting, left);
        }
    }

    /// As [`exchange`](Self::exchange), for numbers, the same count from each rank.
    pub(crate) fn exchange_numbers<const N: usize>(&self, own: [u64; N]) -> Result<Vec<[u64; N]>> {
        let bytes = own.iter().flat_map(|number| number.to_le_bytes()).collect();
        let parts = self.exchange(bytes)?;
        let numbers = parts.iter().enumerate().map(|(rank, part)| {
            let mut numbers = [0; N];
            if part.len() != 8 * N {
                return Err(VlmTrainError::Rank {
                    rank,
                    cause: "it is at another point of the run".to_owned(),
                });
            }
            for (number, bytes) in numbers.iter_mut().zip(part.chunks_exact(8)) {
                let mut raw = [0; 8];
                raw.copy_from_slice(bytes);
                *number = u64::from_le_bytes(raw);
            }
            Ok(numbers)
        });
        numbers.collect()
    }
}

/// The cause of a rank that does not arrive.
fn slow(timeout: Duration) -> String {
    format!(
        "it did not reach the end of the step within {} s of the first that did; if it is only \
         slow, give more time",
        timeout.as_secs_f64()
    )
}

//! Where the ranks of a communicator meet.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::number::combine;
use super::{Operation, Reduction, RootInfo, wire};
use crate::aclnn::DataType;
use crate::codes::{
    Failure, HCCL_E_PARA, HCCL_E_TIMEOUT, Outcome, RT_COLLECTIVE_MISMATCH, RT_COLLECTIVE_TIMEOUT,
};

/// How long the end of a communicator waits for answers to other processes to leave.
const FINISH_LIMIT: Duration = Duration::from_secs(5);

/// A rank as it joins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) process: u32,
    pub(crate) device: u32,
    pub(crate) ranks: u32,
    pub(crate) rank: u32,
    pub(crate) deterministic: bool,
}

/// A rank's part of an operation.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// The operation's number in its communicator.
    pub(crate) sequence: u64,
    pub(crate) operation: Operation,
    pub(crate) number: DataType,
    pub(crate) how: Reduction,
    pub(crate) count: u64,
    /// Elements for each rank, and from it, of an operation on pairs of ranks.
    pub(crate) pairs: Vec<[u64; 2]>,
    /// What the rank gives, in rank order.
    pub(crate) data: Vec<u8>,
}

impl Request {
    /// The properties that all ranks must share, in words.
    fn words(&self) -> String {
        let how = if self.operation.reduces() {
            format!(", {:?}", self.how)
        } else {
            String::new()
        };
        format!(
            "{} of {} {:?}{how}",
            self.operation.function(),
            self.count,
            self.number
        )
    }
}

#[derive(Default)]
struct Round {
    requests: BTreeMap<u32, Request>,
    results: Option<Outcome<Vec<Vec<u8>>>>,
    taken: u32,
}

#[derive(Default)]
struct State {
    ranks: u32,
    members: BTreeMap<u32, Member>,
    rounds: BTreeMap<u64, Round>,
    /// Answers to other processes that are due.
    due: usize,
    aborted: bool,
}

pub(crate) struct Hub {
    /// True if the product chooses the order of a sum, unless all ranks ask for a fixed one.
    any_order: bool,
    state: Mutex<State>,
    changed: Condvar,
    /// True once no rank can join any more.
    closed: AtomicBool,
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hub(..)")
    }
}

fn list(ranks: impl Iterator<Item = u32>) -> String {
    let ranks: Vec<String> = ranks.map(|rank| rank.to_string()).collect();
    ranks.join(", ")
}

fn aborted() -> Failure {
    Failure::new(RT_COLLECTIVE_TIMEOUT, "the simulator was reset")
}

impl Hub {
    /// A hub that other processes reach by the root info.
    pub(crate) fn open(any_order: bool) -> Outcome<(RootInfo, Arc<Self>)> {
        let hub = Arc::new(Self {
            any_order,
            state: Mutex::default(),
            changed: Condvar::new(),
            closed: AtomicBool::new(false),
        });
        let random = || RandomState::new().hash_one(std::process::id());
        let mut id = [0; 16];
        id[..8].copy_from_slice(&random().to_le_bytes());
        id[8..].copy_from_slice(&random().to_le_bytes());
        let port = wire::listen(id, &hub)?;
        Ok((RootInfo { id, port }, hub))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a change, at most until `deadline`; false when that has passed.
    fn wait<'a>(
        &self,
        state: MutexGuard<'a, State>,
        deadline: Option<Instant>,
    ) -> (MutexGuard<'a, State>, bool) {
        let Some(deadline) = deadline else {
            let state = self.changed.wait(state);
            return (state.unwrap_or_else(PoisonError::into_inner), true);
        };
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout(state, left);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        (state, !left.is_zero())
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Adds a rank, and waits until all have come.
    pub(crate) fn join(&self, member: &Member, timeout: Option<Duration>) -> Outcome {
        let refuse = |message: String| Err(Failure::new(HCCL_E_PARA, message));
        let mut state = self.lock();
        if self.is_closed() {
            return refuse("the root info was used before: it is of one communicator".to_owned());
        }
        if state.members.is_empty() {
            state.ranks = member.ranks;
        }
        if state.ranks != member.ranks {
            return refuse(format!(
                "rank {} says that there are {} ranks, others say {}",
                member.rank, member.ranks, state.ranks
            ));
        }
        if member.rank >= member.ranks {
            return refuse(format!("rank {} of {} ranks", member.rank, member.ranks));
        }
        let mut others = state.members.values();
        if let Some(other) = others.find(|other| {
            other.rank == member.rank
                || (other.process, other.device) == (member.process, member.device)
        }) {
            return refuse(format!(
                "rank {} on device {} comes beside rank {} on device {}: ranks and devices may not \
                 be repeated",
                member.rank, member.device, other.rank, other.device
            ));
        }
        state.members.insert(member.rank, member.clone());
        self.changed.notify_all();
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        while (state.members.len() as u32) < state.ranks {
            let (next, in_time) = self.wait(state, deadline);
            state = next;
            if state.aborted {
                return Err(aborted());
            }
            if !in_time {
                let missing = (0..state.ranks).filter(|rank| !state.members.contains_key(rank));
                let message = format!("ranks {} did not connect", list(missing));
                self.closed.store(true, Ordering::Release);
                return Err(Failure::new(HCCL_E_TIMEOUT, message));
            }
        }
        self.closed.store(true, Ordering::Release);
        Ok(())
    }

    /// Gives a rank's part of an operation, and waits for the parts of all others.
    pub(crate) fn exchange(
        &self,
        rank: u32,
        request: Request,
        timeout: Option<Duration>,
    ) -> Outcome<Vec<u8>> {
        let sequence = request.sequence;
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = self.lock();
        let ranks = state.ranks;
        let is_fixed = !self.any_order || state.members.values().all(|member| member.deterministic);
        let round = state.rounds.entry(sequence).or_default();
        round.requests.insert(rank, request);
        if round.requests.len() as u32 == ranks {
            round.results = Some(meet(&round.requests, is_fixed));
            round.requests.clear();
            self.changed.notify_all();
        }
        loop {
            if state.aborted {
                return Err(aborted());
            }
            if let Some(round) = state.rounds.get_mut(&sequence)
                && let Some(results) = &mut round.results
            {
                let result = match results {
                    Ok(results) => Ok(std::mem::take(&mut results[rank as usize])),
                    Err(failure) => Err(failure.clone()),
                };
                round.taken += 1;
                if round.taken == ranks {
                    state.rounds.remove(&sequence);
                }
                return result;
            }
            let (next, in_time) = self.wait(state, deadline);
            state = next;
            if !in_time {
                let here = state.rounds.get(&sequence);
                let is_here = |rank: &u32| here.is_some_and(|r| r.requests.contains_key(rank));
                let missing = (0..ranks).filter(|rank| !is_here(rank));
                let message = format!(
                    "ranks {} did not join operation {sequence} of the communicator",
                    list(missing)
                );
                return Err(Failure::new(RT_COLLECTIVE_TIMEOUT, message));
            }
        }
    }

    /// Notes that an answer to another process is due, or has left.
    pub(crate) fn answer_is_due(&self, is_due: bool) {
        let mut state = self.lock();
        if is_due {
            state.due += 1;
        } else {
            state.due -= 1;
        }
        self.changed.notify_all();
    }

    /// Lets answers leave that are due because their operation is complete.
    pub(crate) fn finish(&self) {
        let deadline = Some(Instant::now() + FINISH_LIMIT);
        let mut state = self.lock();
        // Operations that wait for other ranks have no answer yet.
        while state.due
            > state
                .rounds
                .values()
                .map(|round| round.requests.len())
                .sum()
        {
            let (next, in_time) = self.wait(state, deadline);
            state = next;
            if !in_time {
                return;
            }
        }
    }

    /// Ends everything that waits.
    pub(crate) fn abort(&self) {
        self.closed.store(true, Ordering::Release);
        self.lock().aborted = true;
        self.changed.notify_all();
    }
}

/// The bytes that each rank receives.
fn meet(requests: &BTreeMap<u32, Request>, is_fixed: bool) -> Outcome<Vec<Vec<u8>>> {
    let mut all = requests.iter();
    let Some((_, first)) = all.next() else {
        return Ok(Vec::new());
    };
    if let Some((rank, other)) = all.find(|(_, other)| other.words() != first.words()) {
        let message = format!(
            "the ranks differ in operation {}: rank 0 calls {}, rank {rank} calls {}",
            first.sequence,
            first.words(),
            other.words()
        );
        return Err(Failure::new(RT_COLLECTIVE_MISMATCH, message));
    }
    let ranks = requests.len();
    if first.operation == Operation::AllToAll {
        return exchanged(requests);
    }
    if first.operation == Operation::AllGather {
        let all: Vec<u8> = requests.values().flat_map(|r| r.data.clone()).collect();
        return Ok(vec![all; ranks]);
    }
    let mut order: Vec<&Request> = requests.values().collect();
    if !is_fixed {
        let turns = RandomState::new().hash_one(first.sequence) as usize % ranks;
        order.rotate_left(turns);
    }
    let mut sum = order[0].data.clone();
    for other in &order[1..] {
        combine(first.number, first.how, &mut sum, &other.data);
    }
    if first.operation == Operation::AllReduce {
        return Ok(vec![sum; ranks]);
    }
    let part = (first.count * first.number.bytes()) as usize;
    Ok(sum.chunks(part.max(1)).map(<[u8]>::to_vec).collect())
}

/// The bytes that each rank receives from all, in rank order.
fn exchanged(requests: &BTreeMap<u32, Request>) -> Outcome<Vec<Vec<u8>>> {
    let mut received = vec![Vec::new(); requests.len()];
    for (from, request) in requests {
        let mut rest = &request.data[..];
        for (to, target) in requests {
            let pair = |of: &Request, rank: u32| of.pairs.get(rank as usize).copied();
            let given = pair(request, *to).map(|[given, _]| given);
            let expected = pair(target, *from).map(|[_, expected]| expected);
            let bytes = given.unwrap_or(0).saturating_mul(request.number.bytes()) as usize;
            let part = rest.split_at_checked(bytes);
            let (Some((part, next)), true) = (part, given == expected) else {
                let message = format!(
                    "the ranks differ in operation {}: rank {from} gives {} elements to rank {to}, \
                     which expects {}",
                    request.sequence,
                    given.unwrap_or(0),
                    expected.unwrap_or(0)
                );
                return Err(Failure::new(RT_COLLECTIVE_MISMATCH, message));
            };
            received[*to as usize].extend(part);
            rest = next;
        }
    }
    Ok(received)
}

//! The collective library's double: communicators of devices of this process and, over the loopback
//! interface, of other processes of this host.
//!
//! The process that made the root info has the hub, where the ranks' operations meet. An operation
//! runs on its stream like a kernel, without the right to touch device memory while it waits.

mod hub;
mod number;
mod wire;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

pub(crate) use hub::{Hub, Member, Request};
pub(crate) use number::{Reduction, code, number};
pub(crate) use wire::Remote;

use crate::aclnn::DataType;
use crate::codes::{Failure, HCCL_E_INTERNAL, HCCL_E_PARA, Outcome};
use crate::machine::Machine;
use crate::state::sim;
use crate::trace::Violation;

/// The vendor's defaults.
const CONNECT_TIMEOUT_S: u64 = 120;
const EXEC_TIMEOUT_S: u64 = 1836;
const BUFFER_MB: u64 = 200;

/// The operations on the elements of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Operation {
    AllReduce,
    ReduceScatter,
    AllGather,
    /// Of counts for each pair of ranks.
    AllToAll,
}

impl Operation {
    pub(crate) const ALL: [Self; 4] = [
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::AllToAll,
    ];

    pub(crate) fn function(self) -> &'static str {
        match self {
            Self::AllReduce => "HcclAllReduce",
            Self::ReduceScatter => "HcclReduceScatter",
            Self::AllGather => "HcclAllGather",
            Self::AllToAll => "HcclAlltoAllV",
        }
    }

    pub(crate) fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter)
    }

    /// Elements that a rank gives and receives, by the count of a call that has one.
    pub(crate) fn elements(self, count: u64, ranks: u32) -> [u64; 2] {
        let all = count.saturating_mul(ranks.into());
        match self {
            Self::AllReduce | Self::AllToAll => [count, count],
            Self::ReduceScatter => [all, count],
            Self::AllGather => [count, all],
        }
    }

    /// Elements that a rank sends if the ranks form a ring.
    fn sent(self, count: u64, ranks: u32, rank: u32) -> u64 {
        let ranks = u64::from(ranks);
        match self {
            Self::AllReduce => {
                let own = count / ranks + u64::from(u64::from(rank) < count % ranks);
                2 * (count - own)
            }
            Self::ReduceScatter | Self::AllGather => count * (ranks - 1),
            Self::AllToAll => 0,
        }
    }
}

/// The traffic of operations of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collective {
    /// Calls that were queued.
    pub calls: u64,
    /// Bytes of the larger of the two tensors.
    pub bytes: u64,
    /// Bytes that the devices of this process send if the ranks form a ring; of an all-to-all, those
    /// for other ranks.
    pub sent_bytes: u64,
}

/// The library's state in this process.
#[derive(Debug)]
pub(crate) struct Collectives {
    pub(crate) hubs: HashMap<[u8; 16], Arc<Hub>>,
    /// Devices with a call in progress.
    in_call: BTreeSet<u32>,
    /// Memory of communicators, by device.
    memory: BTreeMap<u32, u64>,
    pub(crate) counts: BTreeMap<&'static str, Collective>,
    /// True if the process asked for sums in a fixed order.
    pub(crate) deterministic: bool,
    pub(crate) connect_timeout: Duration,
    pub(crate) exec_timeout: Duration,
    /// True if a test set the timeouts, so that no configuration changes them.
    pub(crate) timeouts_are_set: bool,
}

impl Default for Collectives {
    fn default() -> Self {
        let seconds = |name: &str, default| {
            let text = std::env::var(name).ok();
            Duration::from_secs(text.and_then(|text| text.parse().ok()).unwrap_or(default))
        };
        let deterministic = std::env::var("HCCL_DETERMINISTIC");
        Self {
            hubs: HashMap::new(),
            in_call: BTreeSet::new(),
            memory: BTreeMap::new(),
            counts: BTreeMap::new(),
            deterministic: deterministic.is_ok_and(|value| value != "false"),
            connect_timeout: seconds("HCCL_CONNECT_TIMEOUT", CONNECT_TIMEOUT_S),
            exec_timeout: seconds("HCCL_EXEC_TIMEOUT", EXEC_TIMEOUT_S),
            timeouts_are_set: false,
        }
    }
}

impl Collectives {
    /// Bytes that communicators hold of a device.
    pub(crate) fn memory(&self, device: u32) -> u64 {
        self.memory.get(&device).copied().unwrap_or(0)
    }

    pub(crate) fn take_memory(&mut self, device: u32, bytes: u64) {
        *self.memory.entry(device).or_default() += bytes;
    }

    pub(crate) fn give_memory(&mut self, device: u32, bytes: u64) {
        if let Some(held) = self.memory.get_mut(&device) {
            *held -= bytes;
        }
    }

    pub(crate) fn count(&mut self, operation: Operation, of: &Communicator, count: u64, size: u64) {
        let counted = self.counts.entry(operation.function()).or_default();
        let [send, receive] = operation.elements(count, of.ranks);
        counted.calls += 1;
        counted.bytes += send.max(receive) * size;
        counted.sent_bytes += operation.sent(count, of.ranks, of.rank) * size;
    }

    /// Counts a call with the elements that it gives to each rank, and receives from it.
    pub(crate) fn count_pairs(&mut self, pairs: &[[u64; 2]], of: &Communicator, size: u64) {
        let operation = Operation::AllToAll;
        let counted = self.counts.entry(operation.function()).or_default();
        let [given, received] = [0, 1].map(|way| pairs.iter().map(|pair| pair[way]).sum::<u64>());
        let own = pairs.get(of.rank as usize).map_or(0, |[own, _]| *own);
        counted.calls += 1;
        counted.bytes += given.max(received) * size;
        counted.sent_bytes += (given - own) * size;
    }
}

/// A call of the library on a device, which makes no other until this is dropped.
pub(crate) struct InCall(u32);

impl InCall {
    pub(crate) fn begin(device: u32) -> Outcome<Self> {
        let mut state = sim();
        if state.collectives.in_call.insert(device) {
            return Ok(Self(device));
        }
        let message = format!(
            "device {device} is in a call of the collective library already, on another thread: a \
             device makes one at a time"
        );
        state.violate(Violation::host("collective", &message));
        Err(Failure::new(HCCL_E_INTERNAL, message))
    }
}

impl Drop for InCall {
    fn drop(&mut self) {
        sim().collectives.in_call.remove(&self.0);
    }
}

/// The options of a rank's communicator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Config {
    pub(crate) buffer_bytes: u64,
    pub(crate) deterministic: bool,
    pub(crate) exec_timeout: Duration,
}

impl Config {
    /// The defaults.
    pub(crate) fn of_process(collectives: &Collectives) -> Self {
        Self {
            buffer_bytes: (2 * BUFFER_MB) << 20,
            deterministic: collectives.deterministic,
            exec_timeout: collectives.exec_timeout,
        }
    }
}

enum Link {
    Local(Arc<Hub>),
    Remote(Remote),
}

/// One rank's end of a group of devices.
pub(crate) struct Communicator {
    pub(crate) ranks: u32,
    pub(crate) rank: u32,
    pub(crate) device: u32,
    pub(crate) config: Config,
    /// Operations queued so far.
    next: AtomicU64,
    /// Operations queued that have not run.
    pending: AtomicUsize,
    /// The stream of its operations; 0 before the first.
    pub(crate) stream: AtomicU64,
    link: Link,
}

/// An operation that is queued and has not run.
pub(crate) struct Queued {
    pub(crate) sequence: u64,
    pub(crate) of: Arc<Communicator>,
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.of.pending.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Communicator {
    /// Joins the hub of a root info, in this process or in another, and waits for all ranks.
    pub(crate) fn join(
        root: &RootInfo,
        (ranks, rank): (u32, u32),
        device: u32,
        config: Config,
    ) -> Outcome<Self> {
        let (local, timeout) = {
            let state = sim();
            let local = state.collectives.hubs.get(&root.id).cloned();
            (local, state.collectives.connect_timeout)
        };
        let member = Member {
            process: std::process::id(),
            device,
            ranks,
            rank,
            deterministic: config.deterministic,
        };
        let link = match local {
            Some(hub) => {
                hub.join(&member, Some(timeout))?;
                Link::Local(hub)
            }
            None => Link::Remote(Remote::join(root, &member, timeout)?),
        };
        Ok(Self {
            ranks,
            rank,
            device,
            config,
            next: AtomicU64::new(0),
            pending: AtomicUsize::new(0),
            stream: AtomicU64::new(0),
            link,
        })
    }

    pub(crate) fn queue(self: &Arc<Self>) -> Queued {
        self.pending.fetch_add(1, Ordering::AcqRel);
        Queued {
            sequence: self.next.fetch_add(1, Ordering::AcqRel),
            of: Arc::clone(self),
        }
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.pending.load(Ordering::Acquire) > 0
    }

    /// Meets the other ranks; what this rank receives.
    pub(crate) fn exchange(&self, request: Request) -> Outcome<Vec<u8>> {
        let timeout = self.config.exec_timeout;
        match &self.link {
            Link::Local(hub) => hub.exchange(self.rank, request, Some(timeout)),
            Link::Remote(remote) => remote.exchange(&request, timeout),
        }
    }

    /// Ends what waits for other ranks.
    pub(crate) fn abort(&self) {
        match &self.link {
            Link::Local(hub) => hub.abort(),
            Link::Remote(remote) => remote.abort(),
        }
    }

    /// Lets the answers to other processes leave before this one may end.
    pub(crate) fn close(&self) {
        if let Link::Local(hub) = &self.link {
            hub.finish();
        }
    }
}

/// The contents of the root's bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RootInfo {
    pub(crate) id: [u8; 16],
    pub(crate) port: u16,
}

impl RootInfo {
    pub(crate) const BYTES: usize = 4108;
    const MAGIC: &'static [u8; 10] = b"ascend-sim";

    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let mut bytes = [&Self::MAGIC[..], &self.id, &self.port.to_le_bytes()].concat();
        bytes.resize(Self::BYTES, 0);
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Outcome<Self> {
        let rest = bytes.strip_prefix(&Self::MAGIC[..]);
        let parsed = rest.and_then(|rest| {
            let (id, rest) = rest.split_first_chunk::<16>()?;
            let (port, _) = rest.split_first_chunk::<2>()?;
            Some(Self {
                id: *id,
                port: u16::from_le_bytes(*port),
            })
        });
        parsed.ok_or_else(|| {
            Failure::new(
                HCCL_E_PARA,
                "the root info is not what HcclGetRootInfo wrote: its bytes have to reach every \
                 rank unchanged",
            )
        })
    }
}

/// Products by what they sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Product {
    A2,
    Ascend950,
    Training910,
    Duo300I,
}

impl Product {
    pub(crate) fn of(machine: &Machine) -> Self {
        let name = machine.soc_name.to_string_lossy();
        match () {
            () if name.starts_with("Ascend910B") || name.starts_with("Ascend910_93") => Self::A2,
            () if name.starts_with("Ascend910") => Self::Training910,
            () if name.starts_with("Ascend310P") => Self::Duo300I,
            () => Self::Ascend950,
        }
    }

    /// True if the order of a sum differs between runs unless the program asks for a fixed one.
    pub(crate) fn adds_in_any_order(self) -> bool {
        self == Self::A2
    }

    /// True if the product exchanges elements of a type between pairs of ranks.
    pub(crate) fn exchanges(self, number: DataType) -> bool {
        number != DataType::Bf16 || matches!(self, Self::A2 | Self::Ascend950)
    }

    /// True if the product reduces elements of a type this way.
    pub(crate) fn reduces(self, number: DataType, how: Reduction) -> bool {
        use DataType::*;
        let is_product = how == Reduction::Product;
        match (self, number) {
            (_, Int8 | Int32 | Float16 | Float) => true,
            (Self::A2 | Self::Ascend950, Int16 | Bf16) => !is_product,
            (Self::Duo300I, Int16) => how == Reduction::Sum,
            (Self::A2 | Self::Ascend950 | Self::Training910, Int64) => true,
            (Self::Ascend950, Double | Uint64) => true,
            _ => false,
        }
    }
}

//! Collectives over devices. Each device has a separate thread: the session of a served device.

mod parts;

use std::any::Any;
use std::borrow::Borrow;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use burn::backend::distributed::{CollectiveTensor, DistributedOps, ReduceOperation};
use burn::backend::ops::FloatTensorOps;
use burn::backend::{DType, Device as _, DeviceId, ExecutionError, Scalar, Shape, TensorMetadata};
use rope_ascend::safe::{
    Communicator, CommunicatorOptions, DeviceMemory, RootInfo, Span, SumType, Traffic,
};
use rope_ascend::{AscendError, Result};

use crate::Ascend;
use crate::context::Context;
use crate::error::execution;
use crate::npu::AscendDevice;
use crate::ops::movement;
use crate::tensor::AscendTensor;

pub use parts::InFlight;
pub(crate) use parts::register;

/// The time limit of a device waiting for the root info of another in its process.
const ROOT_TIMEOUT: Duration = Duration::from_secs(120);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A valid tensor as the memory of an operation.
#[derive(Debug)]
struct Held(AscendTensor);

impl Borrow<DeviceMemory> for Held {
    fn borrow(&self) -> &DeviceMemory {
        match self.0.buffer() {
            Ok(buffer) => buffer,
            Err(_) => unreachable!("queue returns failures as they are"),
        }
    }
}

/// A device's communicators.
#[derive(Debug, Default)]
pub(crate) struct Memberships(Mutex<Vec<Membership>>);

struct Membership {
    /// Its devices in this process, in the order of their numbers.
    local: Vec<AscendDevice>,
    /// Queued operations with their tensors, by the address of the result. Declared before the
    /// communicator, so that they are dropped first.
    pending: Vec<(u64, Box<dyn Any + Send>)>,
    communicator: Communicator,
}

impl fmt::Debug for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Membership")
            .field("local", &self.local)
            .field("pending", &self.pending.len())
            .field("communicator", &self.communicator)
            .finish()
    }
}

impl Memberships {
    /// Makes the device's stream wait for all operations, after which their tensors are ordinary
    /// ones.
    pub(crate) fn finish(&self) {
        for membership in lock(&self.0).iter_mut() {
            membership.pending.clear();
        }
    }

    /// Makes the device's stream wait for the operation with this result.
    fn finish_of(&self, result: &AscendTensor) {
        let Ok(address) = result.address() else {
            return;
        };
        for membership in lock(&self.0).iter_mut() {
            membership.pending.retain(|(other, _)| *other != address);
        }
    }

    /// The number of ranks in the communicator of some devices of this process, if it exists.
    fn ranks(&self, devices: &[AscendDevice]) -> Option<usize> {
        let (all, local) = (lock(&self.0), sorted(devices));
        let found = all.iter().find(|membership| membership.local == local);
        found.map(|membership| membership.communicator.options().ranks as usize)
    }

    fn traffic(&self) -> Traffic {
        let mut all = Traffic::default();
        for membership in lock(&self.0).iter() {
            let of_one = membership.communicator.traffic();
            all.calls += of_one.calls;
            all.bytes += of_one.bytes;
            all.least_sent_bytes += of_one.least_sent_bytes;
        }
        all
    }
}

fn sorted(devices: &[AscendDevice]) -> Vec<AscendDevice> {
    let mut devices = devices.to_vec();
    devices.sort_by_key(AscendDevice::to_id);
    devices
}

/// NPUs of this process as ranks of a communicator shared with other processes.
#[derive(Clone, Debug)]
pub struct Ranks<'a> {
    /// The NPUs, in the order of their ranks.
    pub npus: &'a [AscendDevice],
    /// The rank of the first.
    pub first: u32,
    /// The number of ranks in all processes.
    pub all: u32,
}

impl Ranks<'_> {
    /// Joins the other processes' ranks, with the root info of the NPU of rank 0
    /// ([`AscendDevice::root_info`]). Returns when all have joined. burn's `all_reduce` over the
    /// burn devices of these NPUs then sums over all ranks, until they are closed.
    ///
    /// # Errors
    /// Those of [`Communicator::join`] for one of the NPUs; none of them has then joined.
    pub fn join(&self, root: &RootInfo) -> Result<()> {
        let local = sorted(self.npus);
        let contexts = self.npus.iter().map(AscendDevice::context);
        let contexts = contexts.collect::<Result<Vec<_>>>()?;
        let joined = thread::scope(|scope| {
            let join = |(index, context): (usize, &Arc<Context>)| {
                let options = CommunicatorOptions::new(self.all, self.first + index as u32);
                let context = context.clone();
                scope.spawn(move || Communicator::join(context.stream(), root, options))
            };
            let threads: Vec<_> = contexts.iter().enumerate().map(join).collect();
            let ended = threads.into_iter().map(|thread| match thread.join() {
                Ok(joined) => joined,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            ended.collect::<Vec<_>>()
        });
        let joined = joined.into_iter().collect::<Result<Vec<_>>>()?;
        for (context, communicator) in contexts.iter().zip(joined) {
            let memberships = context.cache::<Memberships>();
            let mut memberships = lock(&memberships.0);
            // A communicator of an earlier run would only hold memory.
            memberships.retain(|membership| membership.local != local);
            memberships.push(Membership {
                local: local.clone(),
                pending: Vec::new(),
                communicator,
            });
        }
        Ok(())
    }
}

impl AscendDevice {
    /// Creates the root info by which the ranks of other processes find this NPU, which becomes
    /// rank 0.
    ///
    /// # Errors
    /// [`AscendError::Load`] if the collective library is missing; those of [`open`](Self::open).
    pub fn root_info(&self) -> Result<RootInfo> {
        self.context()?.stream().device().root_info()
    }

    /// Counts of the requests to its communicators; zero while it is not open.
    pub fn traffic(&self) -> Traffic {
        let memberships = self.opened().map(|context| context.cache::<Memberships>());
        memberships.map_or_else(Traffic::default, |memberships| memberships.traffic())
    }

    /// True if all its communicators sum in a fixed order, so that runs on the same devices are
    /// bit-identical.
    pub fn is_deterministic(&self) -> bool {
        let memberships = self.opened().map(|context| context.cache::<Memberships>());
        memberships.is_none_or(|memberships| {
            let all = lock(&memberships.0);
            all.iter()
                .all(|membership| membership.communicator.is_deterministic())
        })
    }
}

/// A root info, and the number of ranks that have yet to fetch it.
type Awaited = (Result<RootInfo>, usize);

/// Root infos in transit from the device of rank 0 to the others of a group, all in this process.
#[derive(Default)]
struct Roots {
    infos: Mutex<HashMap<Vec<AscendDevice>, Awaited>>,
    changed: Condvar,
}

static ROOTS: std::sync::LazyLock<Roots> = std::sync::LazyLock::new(Roots::default);

impl Roots {
    /// The root info of a group for the device of a rank.
    fn exchange(&self, context: &Context, local: &[AscendDevice], rank: usize) -> Result<RootInfo> {
        if rank == 0 {
            let root = context.stream().device().root_info();
            if local.len() > 1 {
                let entry = (root.clone(), local.len() - 1);
                lock(&self.infos).insert(local.to_vec(), entry);
                self.changed.notify_all();
            }
            return root;
        }
        let limit = Instant::now() + ROOT_TIMEOUT;
        let mut infos = lock(&self.infos);
        loop {
            if let Some((root, left)) = infos.get_mut(local) {
                *left -= 1;
                let (root, is_last) = (root.clone(), *left == 0);
                if is_last {
                    infos.remove(local);
                }
                return root;
            }
            let left = limit.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(AscendError::Collective {
                    function: "HcclGetRootInfo",
                    rank: rank as u32,
                    code: 9,
                    meaning: "timeout".to_owned(),
                    detail: format!("{} did not begin in time", local[0]),
                });
            }
            let waited = self.changed.wait_timeout(infos, left);
            infos = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// An operation of the ranks of a communicator on a tensor of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    /// All receive the sum.
    AllReduce,
    /// Each receives its shard of the sum.
    ReduceScatter,
    /// All receive the tensors of all ranks, in rank order.
    AllGather,
}

impl Operation {
    /// Elements of the result on one of `ranks`, from those of the tensor.
    fn elements(self, count: usize, ranks: usize) -> usize {
        match self {
            Self::AllReduce => count,
            Self::ReduceScatter => count / ranks.max(1),
            Self::AllGather => count.saturating_mul(ranks),
        }
    }
}

/// An operation on a tensor, in the type of the collective library.
type Queue<'a> = &'a dyn Fn(
    &mut Membership,
    &Arc<Context>,
    AscendTensor,
    SumType,
) -> Result<AscendTensor, ExecutionError>;

/// Queues an operation of the ranks of a device's communicator with `devices`, which is created at
/// the first call of a group in this process.
fn queue(
    operation: Operation,
    tensor: AscendTensor,
    devices: &[AscendDevice],
) -> Result<AscendTensor, ExecutionError> {
    // Others may read the block while it is summed in place.
    let is_free = operation != Operation::AllReduce || tensor.is_unique();
    queue_with(
        (tensor, is_free),
        devices,
        &|membership, context, tensor, dtype| membership.queue(operation, context, tensor, dtype),
    )
}

/// As [`queue`], of a tensor that is copied unless it is free.
fn queue_with(
    (tensor, is_free): (AscendTensor, bool),
    devices: &[AscendDevice],
    call: Queue<'_>,
) -> Result<AscendTensor, ExecutionError> {
    let context = tensor.context()?.clone();
    let dtype = match tensor.dtype() {
        DType::F32 => SumType::F32,
        DType::F16 => SumType::F16,
        DType::BF16 => SumType::Bf16,
        other => {
            let message = format!("NPUs sum f32, f16 and bf16 over devices, not {other:?}");
            return Err(ExecutionError::with_context(message));
        }
    };
    let tensor = if tensor.is_contiguous() && is_free {
        tensor
    } else {
        movement::copy(&tensor)
    };
    if let Some(failure) = tensor.failure() {
        return Err(failure.clone());
    }
    let local = sorted(devices);
    let memberships = context.cache::<Memberships>();
    let mut all = lock(&memberships.0);
    if !all.iter().any(|membership| membership.local == local) {
        // The next operation of this device follows this one, in this thread.
        drop(all);
        let communicator = form(&context, &local).map_err(|error| execution(&error))?;
        all = lock(&memberships.0);
        all.push(Membership {
            local: local.clone(),
            pending: Vec::new(),
            communicator,
        });
    }
    let membership = all.iter_mut().find(|membership| membership.local == local);
    let Some(membership) = membership else {
        unreachable!("pushed above");
    };
    call(membership, &context, tensor, dtype)
}

/// The elements of a tensor in an operation.
fn span(tensor: &AscendTensor) -> Span<Held> {
    Span {
        first_byte: tensor.offset() * tensor.dtype().size(),
        count: tensor.len(),
        memory: Held(tensor.clone()),
    }
}

impl Membership {
    fn queue(
        &mut self,
        operation: Operation,
        context: &Arc<Context>,
        tensor: AscendTensor,
        dtype: SumType,
    ) -> Result<AscendTensor, ExecutionError> {
        let communicator = &self.communicator;
        let ranks = communicator.options().ranks as usize;
        let result = match operation {
            Operation::AllReduce => tensor.clone(),
            Operation::ReduceScatter | Operation::AllGather => {
                let shape = Shape::from([operation.elements(tensor.len(), ranks)]);
                AscendTensor::empty_in(context, shape, tensor.dtype())
            }
        };
        if let Some(failure) = result.failure() {
            return Err(failure.clone());
        }
        let (from, to) = (span(&tensor), span(&result));
        let queued = match operation {
            Operation::AllReduce => communicator
                .all_reduce(to, dtype)
                .map(|pending| Box::new(pending) as Box<dyn Any + Send>),
            Operation::ReduceScatter => communicator
                .reduce_scatter(from, to, dtype)
                .map(|pending| Box::new(pending) as _),
            Operation::AllGather => communicator
                .all_gather(from, to, dtype)
                .map(|pending| Box::new(pending) as _),
        };
        self.keep(result, queued)
    }

    /// Queues an all-to-all, of as many elements for each rank and from it as the lists say.
    fn exchange(
        &mut self,
        context: &Arc<Context>,
        tensor: AscendTensor,
        counts: [&[usize]; 2],
        dtype: SumType,
    ) -> Result<AscendTensor, ExecutionError> {
        let shape = Shape::from([counts[1].iter().sum::<usize>()]);
        let result = AscendTensor::empty_in(context, shape, tensor.dtype());
        if let Some(failure) = result.failure() {
            return Err(failure.clone());
        }
        let (from, to) = (span(&tensor), span(&result));
        let queued = self.communicator.all_to_all(from, to, counts, dtype);
        self.keep(result, queued.map(|pending| Box::new(pending) as _))
    }

    /// Keeps a queued operation until its result is waited for.
    fn keep(
        &mut self,
        result: AscendTensor,
        queued: Result<Box<dyn Any + Send>>,
    ) -> Result<AscendTensor, ExecutionError> {
        let address = result.address()?;
        let queued = queued.map_err(|error| execution(&error))?;
        self.pending.push((address, queued));
        Ok(result)
    }
}

/// Creates a communicator of devices of this process, each of which joins from a separate thread.
fn form(context: &Context, local: &[AscendDevice]) -> Result<Communicator> {
    let rank = local.iter().position(|device| *device == context.device());
    let Some(rank) = rank else {
        return Err(AscendError::InvalidArgument {
            operation: "all_reduce",
            argument: "devices",
            expected: format!("with the tensor's, {}", context.device()),
            found: format!("{local:?}"),
        });
    };
    let root = ROOTS.exchange(context, local, rank)?;
    let options = CommunicatorOptions::new(local.len() as u32, rank as u32);
    Communicator::join(context.stream(), &root, options)
}

/// The sum over devices. burn 0.23 calls once for all devices of a group, from one thread; here,
/// the same operation runs for each device on its own thread.
impl DistributedOps<Ascend> for Ascend {
    fn all_reduce(
        tensor: AscendTensor,
        op: ReduceOperation,
        device_ids: Vec<DeviceId>,
    ) -> CollectiveTensor<Ascend> {
        let (device, shape, dtype) = (tensor.device(), tensor.shape(), tensor.dtype());
        let ids = device_ids.into_iter();
        let devices: Vec<AscendDevice> = ids.map(AscendDevice::from_id).collect();
        let sum = queue(Operation::AllReduce, tensor, &devices).unwrap_or_else(|error| {
            if let Some(context) = device.opened() {
                context.failed(&error);
            }
            AscendTensor::failed(&device, shape, dtype, error)
        });
        CollectiveTensor::new(match op {
            ReduceOperation::Sum => sum,
            ReduceOperation::Mean => {
                Self::sync_collective(&device);
                // Other processes may have ranks too. A failed sum has no communicator.
                let joined = device.opened().and_then(|context| {
                    let memberships = context.cache::<Memberships>();
                    memberships.ranks(&devices)
                });
                let ranks = joined.unwrap_or(1) as f64;
                Self::float_mul_scalar(sum, Scalar::Float(1.0 / ranks))
            }
        })
    }

    fn sync_collective(device: &AscendDevice) {
        if let Some(context) = device.opened() {
            context.cache::<Memberships>().finish();
        }
    }
}

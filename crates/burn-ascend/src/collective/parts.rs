//! Reduce-scatter, all-gather and all-to-all. burn has no interface for them: they are sent to the
//! device's session as custom operations.

use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Backend, DType, Device as _, DeviceId, Dispatch, DispatchDevice, ExecutionError, Remote, Shape,
    TensorMetadata, backend_extension,
};
use burn::tensor::Tensor;
use burn_fused::{OpError, Reader, WireOp, Writer, handle, send};
use burn_remote::server::CustomOpRegistry;
use rope_ascend::{AscendError, Result};

use super::{Memberships, Operation, Ranks, queue, queue_with};
use crate::Ascend;
use crate::npu::AscendDevice;
use crate::tensor::AscendTensor;

/// The operations' names for clients and servers.
const ID: &str = "ascend.parts";
const EXCHANGE: &str = "ascend.exchange";
const AWAIT: &str = "ascend.await";
/// The limit on NPUs of a process.
const MOST_LOCAL: usize = 1024;
const MOST_RANKS: usize = u32::MAX as usize;
const OPERATIONS: [Operation; 2] = [Operation::ReduceScatter, Operation::AllGather];

/// An operation of the joined ranks of this and other processes, which [`Await`] waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Parts {
    operation: Operation,
    local: Vec<AscendDevice>,
    ranks: usize,
}

/// An all-to-all of the joined ranks, which [`Await`] waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Exchange {
    local: Vec<AscendDevice>,
    /// Elements for each rank, and from it.
    counts: [Vec<usize>; 2],
}

/// Makes the device's stream wait for an operation, given its result.
#[derive(Clone, Copy, Debug)]
struct Await;

impl WireOp for Await {
    const VERSION: u64 = 1;
    type Error = OpError;

    fn write(&self, _numbers: &mut Writer) {}

    fn read(_numbers: &mut Reader<'_>) -> Result<Self, OpError> {
        Ok(Self)
    }
}

impl WireOp for Parts {
    const VERSION: u64 = 2;
    type Error = OpError;

    fn write(&self, numbers: &mut Writer) {
        numbers.one_of(&OPERATIONS, &self.operation);
        numbers.size(self.ranks);
        write_npus(&self.local, numbers);
    }

    fn read(numbers: &mut Reader<'_>) -> Result<Self, OpError> {
        let operation = numbers.one_of("the operation", &OPERATIONS)?;
        let ranks = numbers.size("the number of ranks", MOST_RANKS)?;
        Ok(Self {
            operation,
            local: read_npus(numbers)?,
            ranks,
        })
    }
}

impl WireOp for Exchange {
    const VERSION: u64 = 1;
    type Error = OpError;

    fn write(&self, numbers: &mut Writer) {
        write_npus(&self.local, numbers);
        numbers.size(self.counts[0].len());
        self.counts.iter().flatten().for_each(|n| numbers.size(*n));
    }

    fn read(numbers: &mut Reader<'_>) -> Result<Self, OpError> {
        let local = read_npus(numbers)?;
        let ranks = numbers.size("the number of ranks", MOST_RANKS)?;
        let mut counts = [Vec::new(), Vec::new()];
        for list in &mut counts {
            for _ in 0..ranks {
                list.push(numbers.size("the elements of a rank", usize::MAX)?);
            }
        }
        Ok(Self { local, counts })
    }
}

fn write_npus(npus: &[AscendDevice], numbers: &mut Writer) {
    numbers.size(npus.len());
    for id in npus.iter().map(AscendDevice::to_id) {
        numbers.size(id.type_id.into());
        numbers.size(id.index_id.into());
    }
}

fn read_npus(numbers: &mut Reader<'_>) -> Result<Vec<AscendDevice>, OpError> {
    let count = numbers.size("the number of NPUs", MOST_LOCAL)?;
    let mut npus = Vec::with_capacity(count);
    for _ in 0..count {
        let kind = numbers.size("the kind of an NPU", u16::MAX.into())?;
        let index = numbers.size("the number of an NPU", u16::MAX.into())?;
        let id = DeviceId::new(kind as u16, index as u16);
        npus.push(AscendDevice::from_id(id));
    }
    Ok(npus)
}

#[backend_extension(Remote)]
trait PartsOps: Backend {
    /// The result of an operation, flat.
    fn parts(x: FloatTensor<Self>, op: Parts) -> FloatTensor<Self>;
    /// The elements that all ranks give to this one, flat.
    fn exchanged(x: FloatTensor<Self>, op: Exchange) -> FloatTensor<Self>;
    /// The result of an operation that the device's stream did not wait for.
    fn awaited(x: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl PartsOps for Remote {
    fn parts(x: FloatTensor<Self>, op: Parts) -> FloatTensor<Self> {
        let elements = op.operation.elements(x.shape().num_elements(), op.ranks);
        let output = (Shape::from([elements]), x.dtype());
        let [result] = send(ID, &op, vec![x], [output]);
        result
    }

    fn exchanged(x: FloatTensor<Self>, op: Exchange) -> FloatTensor<Self> {
        let output = (Shape::from([op.counts[1].iter().sum::<usize>()]), x.dtype());
        let [result] = send(EXCHANGE, &op, vec![x], [output]);
        result
    }

    fn awaited(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let output = (x.shape(), x.dtype());
        let [result] = send(AWAIT, &Await, vec![x], [output]);
        result
    }
}

/// Lets the sessions of this process's NPUs run the operation.
pub(crate) fn register(operations: &mut CustomOpRegistry<Ascend>) {
    let check = |op: &Parts, [x]: &[AscendTensor; 1]| op.check(x);
    handle(operations, ID, check, |op: Parts, [x]| [op.run(x)]);
    let check = |op: &Exchange, [x]: &[AscendTensor; 1]| op.check(x);
    handle(operations, EXCHANGE, check, |op: Exchange, [x]| [op.run(x)]);
    let any = |_: &Await, _: &[AscendTensor; 1]| Ok(());
    handle(operations, AWAIT, any, |_: Await, [x]| {
        if let Some(context) = x.device().opened() {
            context.cache::<Memberships>().finish_of(&x);
        }
        [x]
    });
}

fn wrong(what: &'static str, expected: String, found: &impl ToString) -> OpError {
    OpError::Wire {
        what,
        expected,
        found: found.to_string(),
    }
}

/// Checks the number of ranks of the communicator of a tensor's NPU.
fn expect_joined(x: &AscendTensor, local: &[AscendDevice], ranks: usize) -> Result<(), OpError> {
    let joined = x.device().opened();
    let joined = joined.and_then(|context| context.cache::<Memberships>().ranks(local));
    if joined == Some(ranks) {
        return Ok(());
    }
    let joined = joined.map_or("none".to_owned(), |ranks| ranks.to_string());
    Err(wrong("the number of ranks", joined, &ranks))
}

/// The result of an operation, or the failure in its place.
fn ended(
    device: AscendDevice,
    (shape, dtype): (Shape, DType),
    queued: Result<AscendTensor, ExecutionError>,
) -> AscendTensor {
    queued.unwrap_or_else(|error| {
        if let Some(context) = device.opened() {
            context.failed(&error);
        }
        AscendTensor::failed(&device, shape, dtype, error)
    })
}

impl Parts {
    /// Checks a tensor against the operation and the ranks of its NPU's communicator.
    fn check(&self, x: &AscendTensor) -> Result<(), OpError> {
        expect_joined(x, &self.local, self.ranks)?;
        let elements = x.len();
        if self.operation == Operation::ReduceScatter && !elements.is_multiple_of(self.ranks) {
            let expected = format!("a multiple of {} ranks", self.ranks);
            return Err(wrong("the number of elements", expected, &elements));
        }
        Ok(())
    }

    fn run(&self, x: AscendTensor) -> AscendTensor {
        let (device, dtype) = (x.device(), x.dtype());
        let shape = Shape::from([self.operation.elements(x.len(), self.ranks)]);
        ended(
            device,
            (shape, dtype),
            queue(self.operation, x, &self.local),
        )
    }
}

impl Exchange {
    /// Checks a tensor against the counts, and these against the ranks of its NPU's communicator.
    fn check(&self, x: &AscendTensor) -> Result<(), OpError> {
        expect_joined(x, &self.local, self.counts[0].len())?;
        let add = |sum: usize, count: &usize| sum.checked_add(*count);
        let [given, received] = self
            .counts
            .each_ref()
            .map(|list| list.iter().try_fold(0, add));
        if given != Some(x.len()) {
            let expected = given.map_or("fewer".to_owned(), |given| given.to_string());
            return Err(wrong("the number of elements", expected, &x.len()));
        }
        if received.is_none() {
            let expected = "a number".to_owned();
            return Err(wrong("the elements of all ranks", expected, &"more"));
        }
        Ok(())
    }

    fn run(&self, x: AscendTensor) -> AscendTensor {
        let (device, dtype) = (x.device(), x.dtype());
        let shape = Shape::from([self.counts[1].iter().sum::<usize>()]);
        let counts = self.counts.each_ref().map(|list| &list[..]);
        let queued = queue_with((x, true), &self.local, &|membership, context, x, dtype| {
            membership.exchange(context, x, counts, dtype)
        });
        ended(device, (shape, dtype), queued)
    }
}

/// The result of an operation that has begun, beside which the device computes.
#[derive(Debug)]
#[must_use = "the other ranks wait for nothing, but the result is lost"]
pub struct InFlight(Tensor<1>);

impl InFlight {
    /// Returns the result: what is computed from it waits for the operation.
    pub fn wait(self) -> Tensor<1> {
        Tensor::from_dispatch(Dispatch::awaited(self.0.into_dispatch()))
    }
}

impl Ranks<'_> {
    /// Returns this rank's shard of the sum over all joined ranks. The tensor must be on the burn
    /// device of one of these NPUs and consist of shards of equal length, one per rank, in rank
    /// order.
    ///
    /// Every rank must call the same operations in the same order, each NPU from a separate thread.
    /// If a rank is missing or the device fails, the result carries the error.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] if the ranks have not [`join`](Self::join)ed, or the tensor
    /// is on another device or cannot be divided.
    pub fn reduce_scatter(&self, x: Tensor<1>) -> Result<Tensor<1>> {
        Ok(self.begin_reduce_scatter(x)?.wait())
    }

    /// Begins a [`reduce_scatter`](Self::reduce_scatter).
    ///
    /// # Errors
    /// Those of [`reduce_scatter`](Self::reduce_scatter).
    pub fn begin_reduce_scatter(&self, x: Tensor<1>) -> Result<InFlight> {
        let [elements] = x.dims();
        if !elements.is_multiple_of(self.all.max(1) as usize) {
            let expected = format!("a multiple of {} ranks", self.all);
            let found = elements.to_string();
            return Err(invalid("reduce-scatter", "elements", expected, found));
        }
        self.begin("reduce-scatter", Operation::ReduceScatter, x)
    }

    /// Concatenates the tensors of all joined ranks in rank order. They must have equal length and
    /// type; otherwise as [`reduce_scatter`](Self::reduce_scatter).
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] if the ranks have not joined, or the tensor is on another
    /// device.
    pub fn all_gather(&self, x: Tensor<1>) -> Result<Tensor<1>> {
        Ok(self.begin_all_gather(x)?.wait())
    }

    /// Begins an [`all_gather`](Self::all_gather).
    ///
    /// # Errors
    /// Those of [`all_gather`](Self::all_gather).
    pub fn begin_all_gather(&self, x: Tensor<1>) -> Result<InFlight> {
        self.begin("all-gather", Operation::AllGather, x)
    }

    /// Gives each joined rank its elements, as many as the first list says for it, and returns those
    /// that the ranks give to this one, as many as the second list says; both in rank order. Each
    /// rank must expect what the others give; otherwise as [`reduce_scatter`](Self::reduce_scatter).
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] if the ranks have not joined, the tensor is on another
    /// device, or the lists have no number for each rank or do not add up to its elements.
    pub fn all_to_all(&self, x: Tensor<1>, counts: [&[usize]; 2]) -> Result<Tensor<1>> {
        const NAME: &str = "all-to-all";
        let [elements] = x.dims();
        let totals = counts.map(|list| list.iter().try_fold(0_usize, |sum, n| sum.checked_add(*n)));
        if counts.iter().any(|list| list.len() != self.all as usize) {
            let expected = format!("two lists, of a number for each of {} ranks", self.all);
            return Err(invalid(NAME, "counts", expected, format!("{counts:?}")));
        }
        if totals[0] != Some(elements) || totals[1].is_none() {
            let expected = "numbers that add up to the elements".to_owned();
            let found = format!("{counts:?}, and {elements} elements");
            return Err(invalid(NAME, "counts", expected, found));
        }
        let x = self.ready(NAME, x)?;
        let op = Exchange {
            local: self.npus.to_vec(),
            counts: counts.map(<[usize]>::to_vec),
        };
        Ok(sent(Dispatch::exchanged(x, op)).wait())
    }

    fn begin(&self, name: &'static str, operation: Operation, x: Tensor<1>) -> Result<InFlight> {
        let x = self.ready(name, x)?;
        let op = Parts {
            operation,
            local: self.npus.to_vec(),
            ranks: self.all as usize,
        };
        Ok(sent(Dispatch::parts(x, op)))
    }

    /// Refuses mistakes that would end the device's session.
    fn ready(&self, name: &'static str, x: Tensor<1>) -> Result<FloatTensor<Dispatch>> {
        let x = x.into_dispatch();
        if !matches!(x.device(), DispatchDevice::Remote(_)) {
            let expected = "on the burn device of an NPU, without autodiff".to_owned();
            let found = format!("{:?}", x.device());
            return Err(invalid(name, "tensor", expected, found));
        }
        let first = self.npus.first().and_then(AscendDevice::opened);
        let joined = first.and_then(|first| first.cache::<Memberships>().ranks(self.npus));
        if joined != Some(self.all as usize) {
            let found = format!("{self:?}");
            return Err(invalid(name, "ranks", "joined before".to_owned(), found));
        }
        Ok(x)
    }
}

fn invalid(
    operation: &'static str,
    argument: &'static str,
    expected: String,
    found: String,
) -> AscendError {
    AscendError::InvalidArgument {
        operation,
        argument,
        expected,
        found,
    }
}

/// Sends an operation now: a client sends operations in groups, and other ranks wait for this one.
fn sent(result: FloatTensor<Dispatch>) -> InFlight {
    let result = Tensor::from_dispatch(result);
    // A failed device reports it when the result is read.
    let _sent = result.device().flush();
    InFlight(result)
}

#[cfg(test)]
mod tests {
    use burn_fused::{decode, encode};

    use super::*;

    #[test]
    fn an_operation_comes_back_from_the_wire_and_others_are_refused() {
        let sent = Parts {
            operation: Operation::AllGather,
            local: vec![AscendDevice::new(0), AscendDevice::new(7)],
            ranks: 4,
        };
        let numbers = encode(&sent);
        assert_eq!(decode::<Parts>(&numbers, &[]), Ok(sent));
        let short = decode::<Parts>(&numbers[..5], &[]).expect_err("it is cut off");
        assert!(
            short.to_string().contains("the number of an NPU"),
            "{short}"
        );
    }
}

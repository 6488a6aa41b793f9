//! Reduce-scatter and all-gather. burn has no interface for them: they are sent to the device's
//! session as a custom operation.

use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Backend, Device as _, DeviceId, Dispatch, DispatchDevice, Remote, Shape, TensorMetadata,
    backend_extension,
};
use burn::tensor::Tensor;
use burn_fused::{OpError, Reader, WireOp, Writer, handle, send};
use burn_remote::server::CustomOpRegistry;
use rope_ascend::{AscendError, Result};

use super::{Memberships, Operation, Ranks, queue};
use crate::Ascend;
use crate::npu::AscendDevice;
use crate::tensor::AscendTensor;

/// The operations' names for clients and servers.
const ID: &str = "ascend.parts";
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
        numbers.size(self.local.len());
        for id in self.local.iter().map(AscendDevice::to_id) {
            numbers.size(id.type_id.into());
            numbers.size(id.index_id.into());
        }
    }

    fn read(numbers: &mut Reader<'_>) -> Result<Self, OpError> {
        let operation = numbers.one_of("the operation", &OPERATIONS)?;
        let ranks = numbers.size("the number of ranks", MOST_RANKS)?;
        let count = numbers.size("the number of NPUs", MOST_LOCAL)?;
        let mut local = Vec::with_capacity(count);
        for _ in 0..count {
            let kind = numbers.size("the kind of an NPU", u16::MAX.into())?;
            let index = numbers.size("the number of an NPU", u16::MAX.into())?;
            local.push(AscendDevice::from_id(DeviceId::new(
                kind as u16,
                index as u16,
            )));
        }
        Ok(Self {
            operation,
            local,
            ranks,
        })
    }
}

#[backend_extension(Remote)]
trait PartsOps: Backend {
    /// The result of an operation, flat.
    fn parts(x: FloatTensor<Self>, op: Parts) -> FloatTensor<Self>;
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
    let any = |_: &Await, _: &[AscendTensor; 1]| Ok(());
    handle(operations, AWAIT, any, |_: Await, [x]| {
        if let Some(context) = x.device().opened() {
            context.cache::<Memberships>().finish_of(&x);
        }
        [x]
    });
}

impl Parts {
    /// Checks a tensor against the operation and the ranks of its NPU's communicator.
    fn check(&self, x: &AscendTensor) -> Result<(), OpError> {
        let wrong = |what, expected: String, found: String| {
            Err(OpError::Wire {
                what,
                expected,
                found,
            })
        };
        let context = x.device().opened();
        let joined = context.and_then(|context| {
            let memberships = context.cache::<Memberships>();
            memberships.ranks(&self.local)
        });
        if joined != Some(self.ranks) {
            let joined = joined.map_or("none".to_owned(), |ranks| ranks.to_string());
            return wrong("the number of ranks", joined, self.ranks.to_string());
        }
        let elements = x.len();
        if self.operation == Operation::ReduceScatter && !elements.is_multiple_of(self.ranks) {
            let expected = format!("a multiple of {} ranks", self.ranks);
            return wrong("the number of elements", expected, elements.to_string());
        }
        Ok(())
    }

    fn run(&self, x: AscendTensor) -> AscendTensor {
        let (device, dtype) = (x.device(), x.dtype());
        let shape = Shape::from([self.operation.elements(x.len(), self.ranks)]);
        queue(self.operation, x, &self.local).unwrap_or_else(|error| {
            if let Some(context) = device.opened() {
                context.failed(&error);
            }
            AscendTensor::failed(&device, shape, dtype, error)
        })
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
            return Err(AscendError::InvalidArgument {
                operation: "reduce-scatter",
                argument: "elements",
                expected: format!("a multiple of {} ranks", self.all),
                found: elements.to_string(),
            });
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

    fn begin(&self, name: &'static str, operation: Operation, x: Tensor<1>) -> Result<InFlight> {
        // The error for mistakes that would end the device's session.
        let wrong = |argument, expected: &str, found: String| {
            Err(AscendError::InvalidArgument {
                operation: name,
                argument,
                expected: expected.to_owned(),
                found,
            })
        };
        let x = x.into_dispatch();
        if !matches!(x.device(), DispatchDevice::Remote(_)) {
            let expected = "on the burn device of an NPU, without autodiff";
            return wrong("tensor", expected, format!("{:?}", x.device()));
        }
        let first = self.npus.first().and_then(AscendDevice::opened);
        let joined = first.and_then(|first| first.cache::<Memberships>().ranks(self.npus));
        if joined != Some(self.all as usize) {
            return wrong("ranks", "joined before", format!("{self:?}"));
        }
        let op = Parts {
            operation,
            local: self.npus.to_vec(),
            ranks: self.all as usize,
        };
        let result = Tensor::from_dispatch(Dispatch::parts(x, op));
        // A client sends operations in groups, and other ranks wait for this one. A failed device
        // reports it when the result is read.
        let _sent = result.device().flush();
        Ok(InFlight(result))
    }
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

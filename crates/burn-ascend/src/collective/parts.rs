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

/// The operation's name for clients and servers.
const ID: &str = "ascend.parts";
/// The limit on NPUs of a process.
const MOST_LOCAL: usize = 1024;
const MOST_RANKS: usize = u32::MAX as usize;
const OPERATIONS: [Operation; 2] = [Operation::ReduceScatter, Operation::AllGather];

/// An operation of the joined ranks of this and other processes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Parts {
    operation: Operation,
    local: Vec<AscendDevice>,
    ranks: usize,
}

impl WireOp for Parts {
    const VERSION: u64 = 1;
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
}

impl PartsOps for Remote {
    fn parts(x: FloatTensor<Self>, op: Parts) -> FloatTensor<Self> {
        let elements = op.operation.elements(x.shape().num_elements(), op.ranks);
        let output = (Shape::from([elements]), x.dtype());
        let [result] = send(ID, &op, vec![x], [output]);
        result
    }
}

/// Lets the sessions of this process's NPUs run the operation.
pub(crate) fn register(operations: &mut CustomOpRegistry<Ascend>) {
    let check = |op: &Parts, [x]: &[AscendTensor; 1]| op.check(x);
    handle(operations, ID, check, |op: Parts, [x]| [op.run(x)]);
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
        let result = queue(self.operation, x, &self.local).unwrap_or_else(|error| {
            if let Some(context) = device.opened() {
                context.failed(&error);
            }
            AscendTensor::failed(&device, shape, dtype, error)
        });
        if let Some(context) = device.opened() {
            context.cache::<Memberships>().finish();
        }
        result
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
        let [elements] = x.dims();
        if !elements.is_multiple_of(self.all.max(1) as usize) {
            return Err(AscendError::InvalidArgument {
                operation: "reduce-scatter",
                argument: "elements",
                expected: format!("a multiple of {} ranks", self.all),
                found: elements.to_string(),
            });
        }
        self.parts("reduce-scatter", Operation::ReduceScatter, x)
    }

    /// Concatenates the tensors of all joined ranks in rank order. They must have equal length and
    /// type; otherwise as [`reduce_scatter`](Self::reduce_scatter).
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] if the ranks have not joined, or the tensor is on another
    /// device.
    pub fn all_gather(&self, x: Tensor<1>) -> Result<Tensor<1>> {
        self.parts("all-gather", Operation::AllGather, x)
    }

    fn parts(&self, name: &'static str, operation: Operation, x: Tensor<1>) -> Result<Tensor<1>> {
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
        Ok(Tensor::from_dispatch(Dispatch::parts(x, op)))
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

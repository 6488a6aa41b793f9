//! Sums of tensors over ranks.

use std::fmt;
use std::sync::Arc;

use burn::tensor::{Bytes, DType, Device, Tensor, TensorData};

use super::Rank;

/// The collective operations of a run's ranks. Each rank calls the same operations in the same
/// order, with flat tensors of equal length.
pub trait Collective: fmt::Debug + Send + Sync {
    /// Sums the ranks' tensors in f32; every rank receives the sum.
    ///
    /// # Errors
    /// A description of the failure.
    fn all_reduce(&self, x: Tensor<1>) -> Result<Tensor<1>, String>;

    /// Begins to sum the ranks' tensors in f32, for this rank's shard of the sum. The tensors consist
    /// of shards of equal length, one per rank, in rank order.
    ///
    /// # Errors
    /// A description of the failure.
    fn begin_scatter(&self, x: Tensor<1>) -> Result<Begun, String>;

    /// Begins to concatenate the ranks' tensors, which have the same type, in rank order; every rank
    /// receives the result.
    ///
    /// # Errors
    /// A description of the failure.
    fn begin_gather(&self, x: Tensor<1>) -> Result<Begun, String>;

    /// Sums the ranks' tensors in f32 and returns this rank's shard of the sum.
    ///
    /// # Errors
    /// A description of the failure.
    fn reduce_scatter(&self, x: Tensor<1>) -> Result<Tensor<1>, String> {
        self.begin_scatter(x)?.wait()
    }

    /// Concatenates the ranks' tensors in rank order; every rank receives the result.
    ///
    /// # Errors
    /// A description of the failure.
    fn all_gather(&self, x: Tensor<1>) -> Result<Tensor<1>, String> {
        self.begin_gather(x)?.wait()
    }
}

/// A collective operation that has begun, beside which the device may compute.
pub struct Begun(Box<dyn FnOnce() -> Result<Tensor<1>, String>>);

impl fmt::Debug for Begun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Begun")
    }
}

impl Begun {
    /// An operation whose result a function returns: what is computed from it waits for the
    /// operation.
    pub fn new(result: impl FnOnce() -> Result<Tensor<1>, String> + 'static) -> Self {
        Self(Box::new(result))
    }

    /// Returns the result.
    ///
    /// # Errors
    /// A description of the failure.
    pub fn wait(self) -> Result<Tensor<1>, String> {
        self.0()
    }
}

/// Collectives through host memory, with sums in rank order, for threads of one process on any
/// device.
#[derive(Clone, Debug)]
pub struct HostSums(pub Rank);

impl HostSums {
    /// The bytes of all ranks' tensors, and the type and device of this rank's.
    #[allow(clippy::type_complexity, reason = "what three operations begin with")]
    fn exchange(&self, x: Tensor<1>) -> Result<(Arc<Vec<Vec<u8>>>, DType, Device), String> {
        let device = x.device();
        let own = x
            .try_into_data()
            .map_err(|error| error.reason().to_owned())?;
        let all = self.0.exchange(own.bytes().to_vec());
        let all = all.map_err(|error| error.to_string())?;
        let expected = own.bytes().len();
        if let Some((rank, other)) = all.iter().enumerate().find(|(_, o)| o.len() != expected) {
            let found = other.len();
            return Err(format!(
                "rank {rank} gave {found} bytes, this one {expected}"
            ));
        }
        Ok((all, own.dtype(), device))
    }

    /// Part `part` of the sum of the ranks' tensors, each divided into `parts`.
    fn sum(&self, x: Tensor<1>, [part, parts]: [usize; 2]) -> Result<Tensor<1>, String> {
        let (all, _, device) = self.exchange(x)?;
        let bytes = all[0].len() / parts;
        let mut sum = vec![0.0_f32; bytes / size_of::<f32>()];
        for one in all.iter() {
            let one = &one[part * bytes..(part + 1) * bytes];
            for (sum, bytes) in sum.iter_mut().zip(one.chunks_exact(4)) {
                let mut raw = [0; 4];
                raw.copy_from_slice(bytes);
                *sum += f32::from_ne_bytes(raw);
            }
        }
        let elements = sum.len();
        let data = TensorData::new(sum, [elements]);
        Ok(Tensor::from_data(data, (&device, DType::F32)))
    }
}

impl Collective for HostSums {
    fn all_reduce(&self, x: Tensor<1>) -> Result<Tensor<1>, String> {
        self.sum(x, [0, 1])
    }

    fn begin_scatter(&self, x: Tensor<1>) -> Result<Begun, String> {
        let sum = self.sum(x, [self.0.rank(), self.0.ranks()])?;
        Ok(Begun::new(|| Ok(sum)))
    }

    fn begin_gather(&self, x: Tensor<1>) -> Result<Begun, String> {
        let (all, dtype, device) = self.exchange(x)?;
        let bytes = all.concat();
        let elements = bytes.len() / dtype.size();
        let data = TensorData::from_bytes(Bytes::from_bytes_vec(bytes), [elements], dtype);
        let all = Tensor::from_data(data, (&device, dtype));
        Ok(Begun::new(|| Ok(all)))
    }
}

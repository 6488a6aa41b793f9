//! Sums over ranks, of tensors.

use std::fmt;

use burn::tensor::distributed::{ReduceOperation, all_reduce};
use burn::tensor::{DType, Device, Tensor, TensorData};

use super::Rank;

/// Sums a tensor over the ranks of a run.
pub trait Collective: fmt::Debug + Send + Sync {
    /// The sum of the ranks' tensors, of one length and in f32, on each of them.
    ///
    /// # Errors
    /// What failed, in words.
    fn all_reduce(&self, x: Tensor<1>) -> Result<Tensor<1>, String>;
}

/// Sums through the memory of the host, in the order of the ranks: for threads of one process on
/// any device.
#[derive(Clone, Debug)]
pub struct HostSums(pub Rank);

impl Collective for HostSums {
    fn all_reduce(&self, x: Tensor<1>) -> Result<Tensor<1>, String> {
        let device = x.device();
        let own = x.try_into_data().map_err(|error| error.to_string())?;
        let parts = self.0.exchange(own.bytes().to_vec());
        let parts = parts.map_err(|error| error.to_string())?;
        let mut sum = vec![0.0_f32; own.num_elements()];
        for part in parts.iter() {
            for (sum, bytes) in sum.iter_mut().zip(part.chunks_exact(4)) {
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

/// Sums by burn's collective operation: on NPUs and GPUs that have one.
#[derive(Clone, Debug)]
pub struct DeviceSums {
    /// The devices of this process, without autodiff.
    pub devices: Vec<Device>,
}

impl Collective for DeviceSums {
    fn all_reduce(&self, x: Tensor<1>) -> Result<Tensor<1>, String> {
        Ok(all_reduce(x, ReduceOperation::Sum, self.devices.clone()).resolve())
    }
}

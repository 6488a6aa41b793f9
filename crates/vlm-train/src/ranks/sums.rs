//! Sums of tensors over ranks, and exchanges between them.

use std::fmt;
use std::sync::Arc;

use burn::tensor::{Bytes, DType, Device, Tensor, TensorData};

use super::Rank;

/// The collective operations of a run's ranks. Each rank calls the same operations in the same
/// order, with flat tensors, which have equal length unless it says otherwise.
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

    /// Gives each rank its elements of the tensor, as many as the first list says for it, and returns
    /// those that the ranks give to this one, as many as the second list says; both in rank order.
    /// Each rank must expect what the others give. The tensors have the same type.
    ///
    /// # Errors
    /// A description of the failure.
    fn all_to_all(&self, x: Tensor<1>, counts: [&[usize]; 2]) -> Result<Tensor<1>, String>;

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

    fn all_to_all(
        &self,
        x: Tensor<1>,
        [given, expected]: [&[usize]; 2],
    ) -> Result<Tensor<1>, String> {
        let (device, dtype, [elements]) = (x.device(), x.dtype(), x.dims());
        let ranks = self.0.ranks();
        let add = |sum: usize, count: &usize| sum.checked_add(*count);
        let total = given.iter().try_fold(0, add);
        if [given, expected].iter().any(|list| list.len() != ranks) || total != Some(elements) {
            return Err(format!(
                "an exchange needs two numbers for each of {ranks} ranks, the first ones of \
                 {elements} elements in all; found {given:?} and {expected:?}"
            ));
        }
        let own = x.try_into_data();
        let own = own.map_err(|error| error.reason().to_owned())?;
        let mut said = Vec::with_capacity(8 * ranks + own.bytes().len());
        given
            .iter()
            .for_each(|count| said.extend((*count as u64).to_le_bytes()));
        said.extend_from_slice(own.bytes());
        let all = self.0.exchange(said).map_err(|error| error.to_string())?;
        let mut received = Vec::new();
        for (rank, (said, expected)) in all.iter().zip(expected).enumerate() {
            let part = part_of(said, self.0.rank(), (ranks, dtype.size()));
            let found = part.map_or(0, |part| part.len() / dtype.size());
            let Some(part) = part.filter(|_| found == *expected) else {
                return Err(format!(
                    "rank {rank} gave {found} elements to rank {}, which expected {expected}",
                    self.0.rank()
                ));
            };
            received.extend(part);
        }
        let elements = received.len() / dtype.size();
        let data = TensorData::from_bytes(Bytes::from_bytes_vec(received), [elements], dtype);
        Ok(Tensor::from_data(data, (&device, dtype)))
    }
}

/// The elements for a rank in what another said: a count for each of `ranks`, and the elements of
/// all, of `size` bytes each.
fn part_of(said: &[u8], rank: usize, (ranks, size): (usize, usize)) -> Option<&[u8]> {
    let (counts, elements) = said.split_at_checked(8 * ranks)?;
    let (counts, _) = counts.as_chunks::<8>();
    let bytes = |counts: &[[u8; 8]]| -> Option<usize> {
        let mut counts = counts
            .iter()
            .map(|count| u64::from_le_bytes(*count) as usize);
        counts.try_fold(0_usize, |sum, count| {
            sum.checked_add(count.checked_mul(size)?)
        })
    };
    let (start, end) = (bytes(&counts[..rank])?, bytes(&counts[..=rank])?);
    elements.get(start..end)
}

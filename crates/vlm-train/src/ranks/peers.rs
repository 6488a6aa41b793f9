//! The other ranks, as a step of one of them needs them: counts, losses and gradients together.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use qwen_vl::Parameter;

use super::{Collective, Rank};
use crate::error::{Result, VlmTrainError};
use crate::sums::GradientSums;

/// The other ranks of a run, as one of them sees them.
#[derive(Clone, Debug)]
pub(crate) struct Peers {
    pub(crate) rank: Rank,
    pub(crate) collective: Arc<dyn Collective>,
}

/// Why there is no sum.
pub(crate) enum NoSum {
    Rank(VlmTrainError),
    Device(String),
}

impl NoSum {
    pub(crate) fn of_step(self, step: usize) -> VlmTrainError {
        match self {
            Self::Rank(error) => error,
            Self::Device(reason) => VlmTrainError::Device { step, reason },
        }
    }
}

impl Peers {
    /// The number of this rank, and of all.
    pub(crate) fn place(&self) -> [usize; 2] {
        [self.rank.rank(), self.rank.ranks()]
    }

    /// Numbers, added over all ranks.
    pub(crate) fn add<const N: usize>(&self, own: [usize; N]) -> Result<[usize; N]> {
        let all = self
            .rank
            .exchange_numbers(own.map(|number| number as u64))?;
        let add = |sum: [usize; N], of_one: [u64; N]| {
            std::array::from_fn(|index| sum[index] + of_one[index] as usize)
        };
        Ok(all.into_iter().fold([0; N], add))
    }

    /// A sum of losses and a number of tokens, over all ranks.
    pub(crate) fn add_loss(&self, sum: f64, tokens: usize) -> Result<(f64, usize)> {
        let all = self.rank.exchange_numbers([sum.to_bits(), tokens as u64])?;
        let all = all.into_iter();
        Ok(all.fold((0.0, 0), |(sum, tokens), [bits, count]| {
            (sum + f64::from_bits(bits), tokens + count as usize)
        }))
    }

    /// Loss and gradients of all ranks together: their sums, by one collective. A parameter that has
    /// a gradient on one rank has one on all.
    pub(crate) fn sum(
        &self,
        loss: f64,
        mut gradients: GradientSums,
        parameters: &[Parameter],
        device: &Device,
    ) -> Result<(f64, GradientSums), NoSum> {
        let own: Vec<bool> = parameters.iter().map(|p| gradients.has(p.id)).collect();
        let mut flat = flatten(parameters.iter().filter_map(|p| gradients.take(p.id)));
        // Before the others wait for this rank on their devices, its own work is known to be done.
        if let Some(flat) = &flat {
            let first = flat.clone().slice(0..1).try_into_data();
            first.map_err(|error| NoSum::Device(error.to_string()))?;
        }
        let mut said = loss.to_bits().to_le_bytes().to_vec();
        said.extend(own.iter().map(|has| u8::from(*has)));
        let parts = self.rank.exchange(said).map_err(NoSum::Rank)?;
        let (mut loss, mut is_present) = (0.0, vec![false; parameters.len()]);
        for part in parts.iter() {
            let (bits, present) = part.split_at(8.min(part.len()));
            let mut raw = [0; 8];
            raw[..bits.len()].copy_from_slice(bits);
            loss += f64::from_bits(u64::from_le_bytes(raw));
            for (any, has) in is_present.iter_mut().zip(present) {
                *any |= *has != 0;
            }
        }
        if is_present != own {
            // Those of other ranks are zeros here.
            let mut start = 0;
            let of_one = |((parameter, any), has): ((&Parameter, &bool), &bool)| {
                let elements = parameter.elements();
                if let Some(flat) = flat.as_ref().filter(|_| *has) {
                    start += elements;
                    return Some(flat.clone().slice(start - elements..start));
                }
                any.then(|| Tensor::zeros([elements], (device, DType::F32)))
            };
            let all = parameters.iter().zip(&is_present).zip(&own);
            flat = flatten(all.filter_map(of_one));
        }
        let mut summed = GradientSums::default();
        let Some(flat) = flat else {
            return Ok((loss, summed));
        };
        let flat = self.collective.all_reduce(flat);
        let flat = flat.map_err(NoSum::Device)?;
        let mut start = 0;
        let present = parameters.iter().zip(is_present);
        for (parameter, _) in present.filter(|(_, any)| *any) {
            let end = start + parameter.elements();
            summed.add(parameter.id, flat.clone().slice(start..end));
            start = end;
        }
        Ok((loss, summed))
    }
}

/// Tensors end to end, in f32; none if there are none.
fn flatten(parts: impl Iterator<Item = Tensor<1>>) -> Option<Tensor<1>> {
    let parts: Vec<Tensor<1>> = parts.map(|part| part.cast(DType::F32)).collect();
    (!parts.is_empty()).then(|| Tensor::cat(parts, 0))
}

//! The other ranks from the view of one rank's step: counts, losses and gradients combined.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use vlm_models::Parameter;

use super::{Collective, Rank};
use crate::error::{Result, VlmTrainError};
use crate::experts::ExpertRanks;
use crate::passes::Summed;
use crate::shards::Shards;
use crate::sums::GradientSums;

/// The other ranks of a run, from the view of one.
#[derive(Clone, Debug)]
pub(crate) struct Peers {
    pub(crate) rank: Rank,
    pub(crate) collective: Arc<dyn Collective>,
    /// What is in shards, if anything is.
    pub(crate) shards: Option<Shards>,
    /// The division of experts, if they are divided.
    pub(crate) experts: Option<ExpertRanks>,
    /// The ranks that divide the tokens of a micro-batch.
    pub(crate) context: usize,
}

/// The failure of a sum.
pub(crate) enum NoSum {
    Rank(VlmTrainError),
    Device(String),
}

impl NoSum {
    pub(crate) fn step_error(self, step: usize) -> VlmTrainError {
        match self {
            Self::Rank(error) => error,
            Self::Device(reason) => VlmTrainError::Device { step, reason },
        }
    }
}

impl Peers {
    /// The index of this rank and the number of ranks.
    pub(crate) fn place(&self) -> [usize; 2] {
        [self.rank.rank(), self.rank.ranks()]
    }

    /// Numbers, added over all ranks.
    pub(crate) fn add<const N: usize>(&self, own: [usize; N]) -> Result<[usize; N]> {
        let all = self
            .rank
            .exchange_numbers(own.map(|number| number as u64))?;
        let add = |sum: [usize; N], rank_numbers: [u64; N]| {
            std::array::from_fn(|index| sum[index] + rank_numbers[index] as usize)
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

    /// Sums, over all ranks.
    pub(crate) fn add_numbers<const N: usize>(&self, own: [f64; N]) -> Result<[f64; N]> {
        let all = self.rank.exchange_numbers(own.map(f64::to_bits))?;
        let add = |sums: [f64; N], rank_bits: [u64; N]| {
            std::array::from_fn(|index| sums[index] + f64::from_bits(rank_bits[index]))
        };
        Ok(all.into_iter().fold([0.0; N], add))
    }

    /// The truths of all ranks, as numbers.
    pub(crate) fn hear(&self, own: &[bool]) -> Result<Arc<Vec<Vec<u8>>>> {
        self.rank
            .exchange(own.iter().map(|truth| u8::from(*truth)).collect())
    }

    /// Sums loss and gradients over all ranks with one collective, unless the gradients have been
    /// summed block by block. With shards, it returns this rank's part of the sums. A parameter with
    /// a gradient on one rank gets one on all.
    pub(crate) fn sum(
        &self,
        loss: f64,
        summed: Summed,
        parameters: &[Parameter],
        device: &Device,
    ) -> Result<(f64, GradientSums), NoSum> {
        let Summed {
            gradients,
            computed,
            exchanged: _,
        } = summed;
        let has = |id| match &computed {
            Some(computed) => computed.contains(&id),
            None => gradients.has(id),
        };
        let own: Vec<bool> = parameters.iter().map(|p| has(p.id)).collect();
        match &self.shards {
            Some(shards) => self.sum_sharded(shards, (loss, &own), gradients, parameters, device),
            None => self.sum_replicated((loss, &own), gradients, parameters, device),
        }
    }

    fn sum_sharded(
        &self,
        shards: &Shards,
        (loss, own): (f64, &[bool]),
        mut gradients: GradientSums,
        parameters: &[Parameter],
        device: &Device,
    ) -> Result<(f64, GradientSums), NoSum> {
        let flat = (!shards.is_by_block()).then(|| shards.flatten(0, &mut gradients, device));
        if let Some(flat) = &flat {
            expect_done(flat)?;
        }
        let (loss, is_present) = self.agree(loss, own).map_err(NoSum::Rank)?;
        let mut parts = match flat {
            Some(flat) => {
                let part = self.collective.reduce_scatter(flat);
                shards.cut_own(0, &part.map_err(NoSum::Device)?)
            }
            None => {
                let ids = parameters.iter().map(|parameter| parameter.id);
                ids.filter_map(|id| Some((id, gradients.take(id)?)))
                    .collect()
            }
        };
        let mut summed = GradientSums::default();
        let present = parameters.iter().zip(is_present);
        for (parameter, _) in present.filter(|(_, any)| *any) {
            match parts.remove(&parameter.id) {
                Some(part) => summed.add(parameter.id, part),
                None => summed.add_elsewhere(parameter.id),
            }
        }
        Ok((loss, summed))
    }

    fn sum_replicated(
        &self,
        (loss, own): (f64, &[bool]),
        mut gradients: GradientSums,
        parameters: &[Parameter],
        device: &Device,
    ) -> Result<(f64, GradientSums), NoSum> {
        let is_divided = |parameter: &Parameter| {
            let experts = self.experts.as_ref();
            experts.is_some_and(|experts| experts.axis(parameter.id).is_some())
        };
        // Those of all ranks, and those of the ranks with the same experts.
        let mut flats = [false, true].map(|divided| {
            let parameters = parameters.iter().filter(|p| is_divided(p) == divided);
            flatten(parameters.filter_map(|p| gradients.take(p.id)))
        });
        for flat in flats.iter().flatten() {
            expect_done(flat)?;
        }
        let (loss, is_present) = self.agree(loss, own).map_err(NoSum::Rank)?;
        let mut summed = GradientSums::default();
        for (divided, flat) in flats.iter_mut().enumerate() {
            let of_kind = parameters.iter().zip(&is_present).zip(own);
            let of_kind = of_kind.filter(|((p, _), _)| is_divided(p) == (divided == 1));
            let of_kind: Vec<_> = of_kind.map(|((p, any), has)| (p, *any, *has)).collect();
            if of_kind.iter().any(|(_, any, has)| any != has) {
                *flat = with_zeros(flat.take(), &of_kind, device);
            }
            let Some(flat) = flat.take() else {
                continue;
            };
            let flat = match &self.experts {
                Some(experts) if divided == 1 => experts.sum(self, flat),
                _ => self.collective.all_reduce(flat),
            };
            let flat = flat.map_err(NoSum::Device)?;
            let mut start = 0;
            for (parameter, ..) in of_kind.iter().filter(|(_, any, _)| *any) {
                let end = start + parameter.elements();
                summed.add(parameter.id, flat.clone().slice(start..end));
                start = end;
            }
        }
        Ok((loss, summed))
    }

    /// The sum of the ranks' losses, and which parameters have a gradient on any rank.
    fn agree(&self, loss: f64, own: &[bool]) -> Result<(f64, Vec<bool>)> {
        let mut said = loss.to_bits().to_le_bytes().to_vec();
        said.extend(own.iter().map(|has| u8::from(*has)));
        let parts = self.rank.exchange(said)?;
        let (mut loss, mut is_present) = (0.0, vec![false; own.len()]);
        for part in parts.iter() {
            let (bits, present) = part.split_at(8.min(part.len()));
            let mut raw = [0; 8];
            raw[..bits.len()].copy_from_slice(bits);
            loss += f64::from_bits(u64::from_le_bytes(raw));
            for (any, has) in is_present.iter_mut().zip(present) {
                *any |= *has != 0;
            }
        }
        Ok((loss, is_present))
    }
}

/// Waits until a tensor is computed, so that this rank's work is known to be done before other
/// ranks wait for it on their devices.
pub(crate) fn expect_done(x: &Tensor<1>) -> Result<(), NoSum> {
    let first = x.clone().slice(0..1).try_into_data();
    first
        .map(drop)
        .map_err(|error| NoSum::Device(error.reason().to_owned()))
}

/// Puts zeros into concatenated gradients for parameters with a gradient on other ranks only.
fn with_zeros(
    flat: Option<Tensor<1>>,
    parameters: &[(&Parameter, bool, bool)],
    device: &Device,
) -> Option<Tensor<1>> {
    let mut start = 0;
    let flat_part = |(parameter, any, has): &(&Parameter, bool, bool)| {
        let elements = parameter.elements();
        if let Some(flat) = flat.as_ref().filter(|_| *has) {
            start += elements;
            return Some(flat.clone().slice(start - elements..start));
        }
        any.then(|| Tensor::zeros([elements], (device, DType::F32)))
    };
    flatten(parameters.iter().filter_map(flat_part))
}

/// Concatenates tensors in f32; `None` without tensors.
fn flatten(parts: impl Iterator<Item = Tensor<1>>) -> Option<Tensor<1>> {
    let parts: Vec<Tensor<1>> = parts.map(|part| part.cast(DType::F32)).collect();
    (!parts.is_empty()).then(|| Tensor::cat(parts, 0))
}

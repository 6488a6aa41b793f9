//! The optimizer's state in shards: each rank has the state of its part of the trained elements,
//! updates this part, and receives the updates of the others.
//!
//! The parameters are concatenated and divided into parts of equal length, one per rank. Each
//! parameter and each part begins at a multiple of [`ALIGNMENT`] elements; zeros fill the gaps.

use std::collections::HashMap;
use std::ops::Range;

use burn::module::{Module, ParamId};
use burn::tensor::{DType, Device, Tensor};
use vlm_models::Parameter;

use crate::checkpoint::Values;
use crate::error::Result;
use crate::optimizer::Step;
use crate::ranks::{NoSum, Peers, expect_done};
use crate::sums::GradientSums;
use crate::trainer::Trainer;

/// With this alignment, a parameter that is a view of the whole is as aligned on a device as
/// separate memory.
const ALIGNMENT: usize = 64;

/// The placement of the optimizer's state on ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OptimizerState {
    /// Each rank keeps the whole state: one all-reduce of gradients per step.
    #[default]
    Replicated,
    /// Each rank keeps the state of its shard of the parameters: gradients are reduce-scattered and
    /// updated parameters all-gathered.
    Sharded,
}

/// The place of a parameter among the elements of all.
#[derive(Clone, Debug)]
struct Place {
    id: ParamId,
    dtype: DType,
    all: Range<usize>,
}

/// The division of the trained elements among ranks.
#[derive(Clone, Debug)]
pub(crate) struct Shards {
    rank: usize,
    ranks: usize,
    /// Elements of a part.
    part: usize,
    places: Vec<Place>,
}

impl Shards {
    /// The shards of rank `rank` of `ranks`.
    pub(crate) fn new(parameters: &[Parameter], [rank, ranks]: [usize; 2]) -> Self {
        let sizes = parameters.iter().map(|p| (p.id, p.dtype, p.elements()));
        Self::of(sizes, [rank, ranks])
    }

    fn of(sizes: impl Iterator<Item = (ParamId, DType, usize)>, [rank, ranks]: [usize; 2]) -> Self {
        let mut end: usize = 0;
        let places = sizes.map(|(id, dtype, elements)| {
            let first = end.next_multiple_of(ALIGNMENT);
            end = first + elements;
            let all = first..end;
            Place { id, dtype, all }
        });
        let places = places.collect();
        Self {
            rank,
            ranks,
            part: part(end, ranks),
            places,
        }
    }

    /// The elements of a parameter with state on this rank; `None` if there are none.
    pub(crate) fn own(&self, id: ParamId) -> Option<Range<usize>> {
        let place = self.places.iter().find(|place| place.id == id)?;
        let own = self.own_of(place);
        let first = place.all.start;
        (!own.is_empty()).then(|| own.start - first..own.end - first)
    }

    fn own_of(&self, place: &Place) -> Range<usize> {
        let (first, end) = (self.rank * self.part, (self.rank + 1) * self.part);
        let start = place.all.start.clamp(first, end);
        start..place.all.end.clamp(start, end)
    }

    /// The type in which all parameters are exchanged: their common type, or one that represents
    /// each exactly.
    fn dtype(&self) -> DType {
        let mut dtypes = self.places.iter().map(|place| place.dtype);
        let first = dtypes.next().unwrap_or(DType::F32);
        if dtypes.all(|dtype| dtype == first) {
            first
        } else {
            DType::F32
        }
    }

    /// Takes whole gradients, concatenated in f32.
    pub(crate) fn flatten(&self, gradients: &mut GradientSums, device: &Device) -> Tensor<1> {
        let gradient = |place: &Place| Some((place.all.start, gradients.take(place.id)?));
        let parts = self.places.iter().filter_map(gradient);
        laid(parts, self.part * self.ranks, (device, DType::F32))
    }

    /// Splits a tensor of this rank's shard into the parts of its parameters.
    pub(crate) fn cut_own(&self, part: &Tensor<1>) -> HashMap<ParamId, Tensor<1>> {
        let first = self.rank * self.part;
        let owned = self.places.iter().filter_map(|place| {
            let own = self.own_of(place);
            let cut = || part.clone().slice(own.start - first..own.end - first);
            (!own.is_empty()).then(|| (place.id, cut()))
        });
        owned.collect()
    }

    /// Joins this rank's parts of parameters to its shard, in a type.
    fn lay_own(&self, mut own: HashMap<ParamId, Tensor<1>>, like: (&Device, DType)) -> Tensor<1> {
        let first = self.rank * self.part;
        let of_place = |place: &Place| {
            let tensor = own.remove(&place.id)?;
            Some((self.own_of(place).start - first, tensor))
        };
        laid(self.places.iter().filter_map(of_place), self.part, like)
    }

    /// Splits a tensor of all ranks' shards into parameters.
    fn cut_all(&self, all: &Tensor<1>) -> HashMap<ParamId, Tensor<1>> {
        let cut = |place: &Place| (place.id, all.clone().slice(place.all.clone()));
        self.places.iter().map(cut).collect()
    }
}

/// The number of elements per rank, of `elements`.
pub(crate) fn part(elements: usize, ranks: usize) -> usize {
    let part = elements.div_ceil(ranks).next_multiple_of(ALIGNMENT);
    part.max(ALIGNMENT)
}

/// Concatenates tensors, each at its offset (ascending), and fills the gaps and the rest with zeros.
fn laid(
    parts: impl Iterator<Item = (usize, Tensor<1>)>,
    elements: usize,
    (device, dtype): (&Device, DType),
) -> Tensor<1> {
    let zeros = |elements| Tensor::<1>::zeros([elements], (device, dtype));
    let (mut laid, mut end) = (Vec::new(), 0);
    for (start, part) in parts {
        if start > end {
            laid.push(zeros(start - end));
        }
        end = start + part.dims()[0];
        laid.push(part.cast(dtype));
    }
    if elements > end {
        laid.push(zeros(elements - end));
    }
    Tensor::cat(laid, 0)
}

impl Trainer {
    /// The shards and the other ranks, if the optimizer's state is sharded.
    pub(crate) fn shards(&self) -> Option<(&Shards, &Peers)> {
        let peers = self.peers.as_ref()?;
        Some((peers.shards.as_ref()?, peers))
    }

    /// Updates this rank's shard of the parameters, at `factor` times the peak rates, and receives
    /// the others'. Returns the number of updates without effect on all ranks, and of all updates
    /// counted.
    pub(crate) fn update_shards(
        &mut self,
        gradients: GradientSums,
        step: Step,
    ) -> Result<[usize; 2], NoSum> {
        let Some(peers) = &self.peers else {
            return Ok([0, 0]);
        };
        let Some(shards) = &peers.shards else {
            return Ok([0, 0]);
        };
        let mut values = Values::default();
        self.model.visit(&mut values);
        let own = values.0.into_iter();
        let own = own.filter_map(|(id, value)| Some((id, value.slice(shards.own(id)?))));
        let (own, lost) = self.optimizer.step_parts(
            own.collect(),
            &self.parameters,
            gradients,
            &self.recipe,
            step,
        );
        let device = self.model.device().inner();
        let part = shards.lay_own(own, (&device, shards.dtype()));
        expect_done(&part)?;
        // A failed rank does not keep others waiting on their devices.
        let lost = peers.add(lost).map_err(NoSum::Rank)?;
        let all = peers.collective.all_gather(part).map_err(NoSum::Device)?;
        let mut values = shards.cut_all(&all);
        for place in &shards.places {
            if let Some(value) = values.get_mut(&place.id) {
                *value = value.clone().cast(place.dtype);
            }
        }
        self.model = self.model.clone().with_values(values);
        Ok(lost)
    }

    /// Gathers whole tensors of the optimizer's state from the shards of all ranks, which must all
    /// call this.
    pub(crate) fn gather(
        &self,
        own: HashMap<ParamId, Tensor<1>>,
    ) -> Result<HashMap<ParamId, Tensor<1>>, NoSum> {
        let Some((shards, peers)) = self.shards() else {
            return Ok(own);
        };
        let device = self.model.device().inner();
        let part = shards.lay_own(own, (&device, DType::F32));
        let all = peers.collective.all_gather(part).map_err(NoSum::Device)?;
        Ok(shards.cut_all(&all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every element is of one rank; what the ranks cut out of a tensor of all, laid and gathered
    /// again, is that tensor.
    #[test]
    fn parts_divide_the_parameters_and_make_them_again() {
        let device = Device::flex();
        for (sizes, ranks) in [
            (vec![1], 1),
            (vec![200, 3, 64, 1, 500], 2),
            (vec![200, 3, 64, 1, 500], 5),
            // More ranks than elements.
            (vec![5, 7], 8),
        ] {
            let ids: Vec<ParamId> = sizes.iter().map(|_| ParamId::new()).collect();
            let elements = || {
                let all = ids.iter().zip(&sizes);
                all.map(|(id, size)| (*id, DType::F32, *size))
            };
            let mut gradients = GradientSums::default();
            for (id, _, size) in elements() {
                let numbers: Vec<f32> = (1..=size).map(|n| n as f32).collect();
                gradients.add(id, Tensor::from_floats(&numbers[..], &device));
            }
            let of_rank = |rank| Shards::of(elements(), [rank, ranks]);
            let flat = of_rank(0).flatten(&mut gradients, &device);
            assert_eq!(flat.dims(), [of_rank(0).part * ranks]);
            let mut counted: HashMap<ParamId, usize> = HashMap::new();
            let parts = (0..ranks).map(|rank| {
                let shards = of_rank(rank);
                let (first, end) = (rank * shards.part, (rank + 1) * shards.part);
                let own = shards.cut_own(&flat.clone().slice(first..end));
                for (id, cut) in &own {
                    let range = shards.own(*id).expect("cut");
                    assert_eq!(cut.dims(), [range.len()]);
                    *counted.entry(*id).or_default() += range.len();
                }
                shards.lay_own(own, (&device, DType::F32))
            });
            let again = Tensor::cat(parts.collect(), 0);
            assert_eq!(again.to_data(), flat.to_data());
            for (id, cut) in of_rank(0).cut_all(&again) {
                let last: f32 = cut.max().into_scalar();
                assert_eq!(last as usize, counted[&id]);
            }
        }
    }
}

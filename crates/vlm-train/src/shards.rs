//! Optimizer's state, gradients and weights in shards: each rank has its part of the elements,
//! updates this part, and receives the others' when they are needed.
//!
//! The elements are in flats: one of all trained parameters, or one or more per block of the model,
//! so that a block's gradients are summed, and its weights gathered, without those of others. A flat
//! is divided into parts of equal length, one per rank. Each parameter and each part begins at a
//! multiple of [`ALIGNMENT`] elements; zeros fill the gaps.

use std::collections::HashMap;
use std::ops::Range;

use burn::module::ParamId;
use burn::tensor::{DType, Device, Tensor};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use vlm_models::{Block, Parameter, Sampled, Vlm, VlmError};

use crate::checkpoint::{Kind, values};
use crate::error::{Result, VlmTrainError};
use crate::experts::ExpertRanks;
use crate::optimizer::Step;
use crate::ranks::{NoSum, Peers, expect_done};
use crate::recipe::Recipe;
use crate::sums::{GradientSums, is_narrow, joined};
use crate::trainer::Trainer;

/// With this alignment, a parameter that is a view of the whole is as aligned on a device as
/// separate memory.
const ALIGNMENT: usize = 64;

/// The tensors of which each device keeps a shard: each line adds to those before.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum Sharding {
    /// None: one all-reduce of gradients per step
    #[default]
    None,
    /// Masters and moments; updated weights are gathered
    Optimizer,
    /// Gradients, block by block as the backward completes them
    Gradients,
    /// Weights, frozen ones too, gathered block by block
    All,
}

impl Sharding {
    /// Rejects what a run in shards cannot do.
    ///
    /// # Errors
    /// [`VlmTrainError::Options`]
    pub(crate) fn check(self, recipe: &Recipe) -> Result<()> {
        let refused = |option: &str, remedy: &str| {
            let name = format!("{self:?}").to_lowercase();
            let text = format!("--shard {name} {option}; {remedy}");
            Err(VlmTrainError::Options(text))
        };
        if self >= Self::Gradients && !recipe.recompute {
            return refused(
                "computes activations again, block by block",
                "leave out --no-recompute, or shard the optimizer alone",
            );
        }
        if self == Self::All && recipe.preference.is_some() {
            return refused(
                "has no loss of preferences, which reads the weights out of turn",
                "shard gradients at most",
            );
        }
        if self == Self::All && recipe.policy.is_some() {
            return refused(
                "samples no answers, for which a device needs the whole weights",
                "shard gradients at most",
            );
        }
        Ok(())
    }
}

/// A parameter to be divided.
struct Piece {
    id: ParamId,
    dtype: DType,
    elements: usize,
    block: Option<Block>,
    is_trained: bool,
}

/// The place of a parameter in a flat.
#[derive(Clone, Debug)]
struct Place {
    id: ParamId,
    dtype: DType,
    all: Range<usize>,
}

/// Parameters, end to end.
#[derive(Clone, Debug)]
pub(crate) struct Flat {
    /// The block of its parameters; `None` for those of all.
    block: Option<Block>,
    is_trained: bool,
    /// The type of its elements: the common type of its parameters, or one that represents each
    /// exactly.
    dtype: DType,
    places: Vec<Place>,
    /// Elements of a part.
    part: usize,
    /// This rank's part of the weights, if they are in shards.
    weights: Option<Tensor<1>>,
    /// The type of that part: f32 if the masters are the weights, which are rounded when they are
    /// gathered.
    kept: DType,
}

/// The division of elements among ranks.
#[derive(Clone, Debug)]
pub(crate) struct Shards {
    pub(crate) sharding: Sharding,
    rank: usize,
    ranks: usize,
    flats: Vec<Flat>,
}

impl Shards {
    /// The shards of rank `rank` of `ranks`. `masters`: weights in shards are kept in f32.
    pub(crate) fn new(model: &Vlm, sharding: Sharding, masters: bool, place: [usize; 2]) -> Self {
        let mut parameters = model.all_parameters();
        parameters.retain(|(_, is_trained)| *is_trained || sharding == Sharding::All);
        let pieces = parameters.into_iter().map(|(parameter, is_trained)| Piece {
            id: parameter.id,
            dtype: parameter.dtype,
            elements: parameter.elements(),
            block: (sharding >= Sharding::Gradients).then_some(parameter.block),
            is_trained,
        });
        let mut shards = Self::of(pieces, sharding, place);
        if sharding == Sharding::All {
            for flat in shards.flats.iter_mut().filter(|flat| flat.is_trained) {
                if masters && is_narrow(flat.dtype) {
                    flat.kept = DType::F32;
                }
            }
            let cut = |(id, value): (ParamId, Tensor<1>)| {
                let part = value.slice(shards.own(id)?);
                // A view would keep the whole.
                let copy = part.zeros_like().slice_assign(0..part.dims()[0], part);
                Some((id, copy))
            };
            let own = values(model, true).into_iter().filter_map(cut).collect();
            shards.set_weights(own, &model.device().inner());
        }
        shards
    }

    fn of(
        pieces: impl Iterator<Item = Piece>,
        sharding: Sharding,
        [rank, ranks]: [usize; 2],
    ) -> Self {
        let mut flats: Vec<Flat> = Vec::new();
        for piece in pieces {
            let joins = |flat: &&mut Flat| {
                let is_like = sharding < Sharding::All || flat.dtype == piece.dtype;
                let is_near = flat.block == piece.block && flat.is_trained == piece.is_trained;
                // Alone, the head's gradient is its flat, without a copy.
                is_near && is_like && flat.block != Some(Block::Head)
            };
            let flat = match flats.iter_mut().find(joins) {
                Some(flat) => flat,
                None => flats.push_mut(Flat {
                    block: piece.block,
                    is_trained: piece.is_trained,
                    dtype: piece.dtype,
                    places: Vec::new(),
                    part: 0,
                    weights: None,
                    kept: piece.dtype,
                }),
            };
            if flat.dtype != piece.dtype {
                (flat.dtype, flat.kept) = (DType::F32, DType::F32);
            }
            let end = flat.places.last().map_or(0, |place| place.all.end);
            let first = end.next_multiple_of(ALIGNMENT);
            let end = first + piece.elements;
            flat.part = part(end, ranks);
            flat.places.push(Place {
                id: piece.id,
                dtype: piece.dtype,
                all: first..end,
            });
        }
        Self {
            sharding,
            rank,
            ranks,
            flats,
        }
    }

    /// True if gradients are summed block by block, within the backward pass.
    pub(crate) fn is_by_block(&self) -> bool {
        self.sharding >= Sharding::Gradients
    }

    /// True if the weights are in shards.
    pub(crate) fn has_weights(&self) -> bool {
        self.sharding == Sharding::All
    }

    /// The flats of a block, by index.
    pub(crate) fn of_block(&self, block: Block) -> impl Iterator<Item = usize> {
        let flats = self.flats.iter().enumerate();
        let flats = flats.filter(move |(_, flat)| flat.block == Some(block));
        flats.map(|(index, _)| index)
    }

    /// The trained flats, by index.
    fn trained(&self) -> impl Iterator<Item = usize> {
        let flats = self.flats.iter().enumerate();
        flats.filter_map(|(index, flat)| flat.is_trained.then_some(index))
    }

    /// True if a flat is trained.
    pub(crate) fn is_trained(&self, flat: usize) -> bool {
        self.flats[flat].is_trained
    }

    /// The parameters of a flat.
    pub(crate) fn ids(&self, flat: usize) -> impl Iterator<Item = ParamId> {
        self.flats[flat].places.iter().map(|place| place.id)
    }

    /// This rank's part of a flat's weights in their type, if they are in shards.
    pub(crate) fn weights(&self, flat: usize) -> Option<Tensor<1>> {
        let flat = &self.flats[flat];
        Some(flat.weights.clone()?.cast(flat.dtype))
    }

    /// This rank's parts of the weights in shards, as they are kept.
    fn kept(&self, flats: impl Iterator<Item = usize>) -> HashMap<ParamId, Tensor<1>> {
        let cut = |flat: usize| Some(self.cut_own(flat, self.flats[flat].weights.as_ref()?));
        flats.filter_map(cut).flatten().collect()
    }

    /// The flats whose weights are masters, by index.
    fn of_masters(&self) -> impl Iterator<Item = usize> {
        let flats = self.flats.iter().enumerate();
        flats.filter_map(|(index, flat)| (flat.kept != flat.dtype).then_some(index))
    }

    /// True if weights in shards are masters.
    pub(crate) fn has_masters(&self) -> bool {
        self.of_masters().next().is_some()
    }

    /// The index of a parameter's flat, and its place there.
    fn find(&self, id: ParamId) -> Option<(usize, &Place)> {
        self.flats.iter().enumerate().find_map(|(index, flat)| {
            let place = flat.places.iter().find(|place| place.id == id)?;
            Some((index, place))
        })
    }

    /// The elements of a parameter that this rank has; `None` if there are none.
    pub(crate) fn own(&self, id: ParamId) -> Option<Range<usize>> {
        let (index, place) = self.find(id)?;
        let own = self.own_of(index, place);
        let first = place.all.start;
        (!own.is_empty()).then(|| own.start - first..own.end - first)
    }

    fn own_of(&self, flat: usize, place: &Place) -> Range<usize> {
        let part = self.flats[flat].part;
        let (first, end) = (self.rank * part, (self.rank + 1) * part);
        let start = place.all.start.clamp(first, end);
        start..place.all.end.clamp(start, end)
    }

    /// Takes the whole gradients of a flat, concatenated in f32.
    pub(crate) fn flatten(
        &self,
        flat: usize,
        gradients: &mut GradientSums,
        device: &Device,
    ) -> Tensor<1> {
        let flat = &self.flats[flat];
        let gradient = |place: &Place| Some((place.all.start, gradients.take(place.id)?));
        let parts = flat.places.iter().filter_map(gradient);
        laid(parts, flat.part * self.ranks, (device, DType::F32))
    }

    /// Splits a tensor of this rank's part of a flat into the parts of its parameters.
    pub(crate) fn cut_own(&self, flat: usize, part: &Tensor<1>) -> HashMap<ParamId, Tensor<1>> {
        let first = self.rank * self.flats[flat].part;
        let owned = self.flats[flat].places.iter().filter_map(|place| {
            let own = self.own_of(flat, place);
            let cut = || part.clone().slice(own.start - first..own.end - first);
            (!own.is_empty()).then(|| (place.id, cut()))
        });
        owned.collect()
    }

    /// Joins this rank's parts of a flat's parameters, in a type.
    fn lay_own(
        &self,
        flat: usize,
        mut own: HashMap<ParamId, Tensor<1>>,
        like: (&Device, DType),
    ) -> Tensor<1> {
        let Flat { part, places, .. } = &self.flats[flat];
        let first = self.rank * part;
        let of_place = |place: &Place| {
            let tensor = own.remove(&place.id)?;
            Some((self.own_of(flat, place).start - first, tensor))
        };
        laid(places.iter().filter_map(of_place), *part, like)
    }

    /// Splits a tensor of all ranks' parts of a flat into parameters, in their types.
    pub(crate) fn cut_all(&self, flat: usize, all: &Tensor<1>) -> HashMap<ParamId, Tensor<1>> {
        let cut = |place: &Place| {
            let value = all.clone().slice(place.all.clone());
            (place.id, value.cast(place.dtype))
        };
        self.flats[flat].places.iter().map(cut).collect()
    }

    /// Sets this rank's parts of some parameters, whose weights are in shards.
    pub(crate) fn set_weights(&mut self, mut own: HashMap<ParamId, Tensor<1>>, device: &Device) {
        for index in 0..self.flats.len() {
            if let Some(before) = &self.flats[index].weights {
                for (id, part) in self.cut_own(index, before) {
                    own.entry(id).or_insert(part);
                }
            }
            let part = self.part_of(index, &mut own, device);
            self.flats[index].weights = Some(part);
        }
    }

    /// Samples a parameter from this rank's parts of all flats, repeated for every rank: the
    /// elements as they were if the part was another rank's.
    ///
    /// # Errors
    /// Those of [`Parameter::sample_at`].
    pub(crate) fn sample(
        &self,
        parameter: &Parameter,
        parts: &[Tensor<1>],
        count: usize,
    ) -> vlm_models::Result<Option<Sampled>> {
        let Some((flat, place)) = self.find(parameter.id) else {
            return Ok(None);
        };
        let (first, length) = (place.all.start, self.flats[flat].part);
        let index = |element| (first + element) % length;
        let sampled = parameter.sample_at(parts[flat].clone(), count, index);
        sampled.map(Some)
    }

    /// This rank's parts of all flats' weights, if they are in shards.
    pub(crate) fn all_weights(&self) -> Vec<Tensor<1>> {
        let flats = 0..self.flats.len();
        flats.filter_map(|flat| self.weights(flat)).collect()
    }

    /// The rank of each sampled element of a parameter.
    pub(crate) fn ranks_of(&self, parameter: &Parameter, count: usize) -> Vec<usize> {
        let found = self.find(parameter.id).into_iter();
        let ranks = found.flat_map(|(flat, place)| {
            let part = self.flats[flat].part;
            let elements = parameter.sampled(count);
            elements.map(move |element| (place.all.start + element) / part)
        });
        ranks.collect()
    }

    /// This rank's parts of all flats' gradients.
    pub(crate) fn gradients(&self, gradients: &GradientSums, device: &Device) -> Vec<Tensor<1>> {
        let of_flat = |index: usize| {
            let own = self
                .ids(index)
                .filter_map(|id| Some((id, gradients.get(id)?)));
            self.lay_own(index, own.collect(), (device, DType::F32))
        };
        (0..self.flats.len()).map(of_flat).collect()
    }

    /// Takes this rank's part of a flat out of the parts of parameters.
    fn part_of(
        &self,
        flat: usize,
        own: &mut HashMap<ParamId, Tensor<1>>,
        device: &Device,
    ) -> Tensor<1> {
        let part = self
            .ids(flat)
            .filter_map(|id| Some((id, own.remove(&id)?)))
            .collect();
        self.lay_own(flat, part, (device, self.flats[flat].kept))
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
    joined(laid)
}

/// Whole tensors, of which each rank may have a part. They are gathered a flat at a time when they
/// are asked for, by all ranks in the same order.
pub(crate) struct Wholes<'a> {
    divided: Option<(&'a Shards, &'a Peers)>,
    experts: Option<(&'a ExpertRanks, &'a Peers)>,
    device: Device,
    kind: Kind,
    /// This rank's parts.
    own: HashMap<ParamId, Tensor<1>>,
    whole: HashMap<ParamId, Tensor<1>>,
}

impl Wholes<'_> {
    /// The tensor of a parameter, flat; `None` if there is none, or at a second call. That of all
    /// experts is on the first rank alone, and the others have another number of elements.
    pub(crate) fn take(&mut self, id: ParamId) -> Result<Option<Tensor<1>>, NoSum> {
        if let Some((experts, peers)) = self.experts
            && let Some(axis) = experts.axis(id)
            && let Some(own) = self.whole.remove(&id)
        {
            let all = experts.gather(peers, axis, own).map_err(NoSum::Device)?;
            return Ok(Some(all));
        }
        if let Some((shards, peers)) = self.divided
            && !self.whole.contains_key(&id)
            && let Some((flat, _)) = shards.find(id)
        {
            let own = shards
                .ids(flat)
                .filter_map(|id| Some((id, self.own.remove(&id)?)));
            let dtype = self.kind.dtype(shards.flats[flat].dtype);
            let part = shards.lay_own(flat, own.collect(), (&self.device, dtype));
            let all = peers.collective.all_gather(part).map_err(NoSum::Device)?;
            let cut = |place: &Place| (place.id, all.clone().slice(place.all.clone()));
            self.whole.extend(shards.flats[flat].places.iter().map(cut));
        }
        Ok(self.whole.remove(&id))
    }

    /// As [`take`](Self::take), of a parameter that has a tensor.
    pub(crate) fn lend(&mut self, id: ParamId) -> vlm_models::Result<Tensor<1>> {
        let taken = self.take(id).map_err(|failure| match failure {
            NoSum::Device(reason) => VlmError::Walk(reason),
            NoSum::Rank(error) => VlmError::Walk(error.to_string()),
        });
        taken?.ok_or_else(|| VlmError::Walk("a parameter is in no shard".to_owned()))
    }
}

impl Trainer {
    /// The shards and the other ranks, if anything is in shards.
    pub(crate) fn shards(&self) -> Option<(&Shards, &Peers)> {
        let peers = self.peers.as_ref()?;
        Some((peers.shards.as_ref()?, peers))
    }

    /// True if the model holds stand-ins, and each rank a part of the weights.
    pub(crate) fn has_weight_shards(&self) -> bool {
        self.shards()
            .is_some_and(|(shards, _)| shards.has_weights())
    }

    /// True if no rank has all weights: they are in shards, or the experts are divided.
    pub(crate) fn has_parts(&self) -> bool {
        self.has_weight_shards() || self.expert_ranks().is_some()
    }

    /// The trained elements that this rank updates, by parameter.
    fn own_values(&self, shards: &Shards) -> HashMap<ParamId, Tensor<1>> {
        if shards.has_weights() {
            return shards.kept(shards.trained());
        }
        let own = values(&self.model, false).into_iter();
        let own = own.filter_map(|(id, value)| Some((id, value.slice(shards.own(id)?))));
        own.collect()
    }

    /// Updates this rank's shard of the parameters, at `factor` times the peak rates, and receives
    /// the others' unless the weights are in shards. Returns the number of updates without effect
    /// on all ranks, and of all updates counted.
    pub(crate) fn update_shards(
        &mut self,
        gradients: GradientSums,
        step: Step,
    ) -> Result<[usize; 2], NoSum> {
        let Some(peers) = self.peers.as_ref() else {
            return Ok([0, 0]);
        };
        let Some(shards) = peers.shards.as_ref() else {
            return Ok([0, 0]);
        };
        let own = self.own_values(shards);
        let (parameters, recipe) = (&self.parameters, &self.recipe);
        let stepped = self
            .optimizer
            .step_parts(own, parameters, gradients, recipe, step);
        let (mut own, lost) = stepped;
        let device = self.model.device().inner();
        let flats = shards.trained().collect::<Vec<_>>();
        let part = |flat: &usize| shards.part_of(*flat, &mut own, &device);
        let parts: Vec<Tensor<1>> = flats.iter().map(part).collect();
        if let Some(last) = parts.last() {
            expect_done(last)?;
        }
        // A failed rank does not keep others waiting on their devices.
        let lost = peers.add(lost).map_err(NoSum::Rank)?;
        let has_weights = shards.has_weights();
        for (flat, part) in flats.into_iter().zip(parts) {
            if has_weights {
                if let Some(shards) = self.peers.as_mut().and_then(|peers| peers.shards.as_mut()) {
                    shards.flats[flat].weights = Some(part);
                }
            } else if let Some((shards, peers)) = self.shards() {
                let all = peers.collective.all_gather(part).map_err(NoSum::Device)?;
                let values = shards.cut_all(flat, &all);
                self.model = self.model.clone().with_values(values);
            }
        }
        Ok(lost)
    }

    /// The tensors of a kind, whole and flat, those of frozen parameters too if weights are in
    /// shards. All ranks must ask for the same ones in the same order.
    pub(crate) fn wholes(&self, kind: Kind) -> Wholes<'_> {
        let (mut own, mut whole) = (HashMap::new(), HashMap::new());
        let mut divided = self.shards();
        match (kind, divided) {
            (Kind::Parameter, Some((shards, _))) if shards.has_weights() => {
                own = shards.kept(0..shards.flats.len());
            }
            (Kind::Master, Some((shards, _))) if shards.has_masters() => {
                own = shards.kept(shards.of_masters());
            }
            (Kind::Parameter, _) => {
                divided = None;
                whole = values(&self.model, self.expert_ranks().is_some());
            }
            _ => {
                let states = self.optimizer.states.iter();
                let kept = states.filter_map(|(id, state)| Some((*id, kind.of(state)?)));
                *(if divided.is_some() {
                    &mut own
                } else {
                    &mut whole
                }) = kept.collect();
            }
        }
        Wholes {
            divided,
            experts: self.expert_ranks(),
            device: self.model.device().inner(),
            kind,
            own,
            whole,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every element is of one rank; what the ranks cut out of a flat, laid and gathered again, is
    /// that flat.
    #[test]
    fn parts_divide_the_parameters_and_make_them_again() {
        let device = Device::flex();
        let halves = [Block::Layer(0), Block::Layer(1)];
        for (sizes, ranks, sharding) in [
            (vec![1], 1, Sharding::Optimizer),
            (vec![200, 3, 64, 1, 500], 2, Sharding::Optimizer),
            (vec![200, 3, 64, 1, 500], 5, Sharding::Optimizer),
            // More ranks than elements.
            (vec![5, 7], 8, Sharding::Optimizer),
            (vec![200, 3, 64, 1, 500], 3, Sharding::Gradients),
        ] {
            let ids: Vec<ParamId> = sizes.iter().map(|_| ParamId::new()).collect();
            let pieces = || {
                ids.iter()
                    .zip(&sizes)
                    .enumerate()
                    .map(|(index, (id, size))| Piece {
                        id: *id,
                        dtype: DType::F32,
                        elements: *size,
                        block: (sharding == Sharding::Gradients).then_some(halves[index % 2]),
                        is_trained: true,
                    })
            };
            let mut gradients = GradientSums::default();
            for Piece { id, elements, .. } in pieces() {
                let numbers: Vec<f32> = (1..=elements).map(|n| n as f32).collect();
                gradients.add(id, Tensor::from_floats(&numbers[..], &device));
            }
            let of_rank = |rank| Shards::of(pieces(), sharding, [rank, ranks]);
            let flats = of_rank(0).flats.len();
            assert_eq!(flats, [1, 2][usize::from(sharding == Sharding::Gradients)]);
            let mut counted: HashMap<ParamId, usize> = HashMap::new();
            let mut found = HashMap::new();
            for index in 0..flats {
                let flat = of_rank(0).flatten(index, &mut gradients, &device);
                let part = of_rank(0).flats[index].part;
                assert_eq!(flat.dims(), [part * ranks]);
                let parts = (0..ranks).map(|rank| {
                    let shards = of_rank(rank);
                    let own = flat.clone().slice(rank * part..(rank + 1) * part);
                    let own = shards.cut_own(index, &own);
                    for (id, cut) in &own {
                        let range = shards.own(*id).expect("cut");
                        assert_eq!(cut.dims(), [range.len()]);
                        *counted.entry(*id).or_default() += range.len();
                    }
                    shards.lay_own(index, own, (&device, DType::F32))
                });
                let again = Tensor::cat(parts.collect(), 0);
                assert_eq!(again.to_data(), flat.to_data());
                found.extend(of_rank(0).cut_all(index, &again));
            }
            assert_eq!(found.len(), sizes.len());
            for (id, cut) in found {
                let last: f32 = cut.max().into_scalar();
                assert_eq!(last as usize, counted[&id]);
            }
        }
    }
}

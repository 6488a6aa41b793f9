//! Expert parallelism: ranks that follow each other are a group, which has one copy of the experts.
//!
//! Each rank of a group has a share of the experts of every layer, and passes through them the
//! tokens of the whole group. The gradients of an expert are thus complete on its rank, but for those
//! of other groups.

use std::collections::HashMap;
use std::ops::Range;

use burn::module::ParamId;
use burn::tensor::{Device, Int, Tensor, TensorData};
use vlm_models::{ExpertAxis, ExpertPass, ExpertShare, Vlm, VlmError, Walk};

use crate::context::Divided;
use crate::error::{Result, VlmTrainError};
use crate::optimizer::Step;
use crate::ranks::{NoSum, Peers};
use crate::recipe::Recipe;
use crate::shards::Sharding;
use crate::sums::GradientSums;
use crate::trainer::Trainer;

/// A run whose experts `size` ranks divide.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertDivision {
    pub(crate) size: usize,
    pub(crate) ranks: usize,
    /// The experts of a layer, if the model has some.
    pub(crate) experts: Option<usize>,
    pub(crate) sharding: Sharding,
}

impl ExpertDivision {
    /// Rejects a division that a run cannot have.
    ///
    /// # Errors
    /// [`VlmTrainError::Options`]
    pub(crate) fn check(&self, recipe: &Recipe) -> Result<()> {
        let option = Divided("--expert-parallel", self.size);
        let Some(experts) = self.experts else {
            return option.refused("divides experts, and the model has none; leave it out");
        };
        option.divides(self.ranks, "devices")?;
        option.divides(experts, "experts of a layer")?;
        if self.sharding > Sharding::None {
            return option.refused("does not go with --shard; leave one of them out");
        }
        option.expect_cut_layers(recipe)
    }
}

/// The place of a rank among those that divide the experts.
#[derive(Clone, Debug)]
pub(crate) struct ExpertRanks {
    /// The ranks of a group.
    size: usize,
    rank: usize,
    ranks: usize,
    /// The experts of a layer, and the channels of their inputs.
    sizes: [usize; 2],
    /// The parameters of experts: of all of them.
    axes: HashMap<ParamId, ExpertAxis>,
}

impl ExpertRanks {
    /// The ranks of this one's group.
    fn group(&self) -> Range<usize> {
        let first = self.rank / self.size * self.size;
        first..first + self.size
    }

    fn share_of(&self, rank: usize) -> ExpertShare {
        ExpertShare {
            index: rank % self.size,
            count: self.size,
        }
    }

    /// The number of ranks that have one copy of the experts.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// The experts of a rank.
    fn own(&self, rank: usize) -> Range<usize> {
        let own = self.sizes[0] / self.size;
        let first = self.share_of(rank).index * own;
        first..first + own
    }

    /// The place of all experts in a parameter, if it is one of theirs.
    pub(crate) fn axis(&self, id: ParamId) -> Option<ExpertAxis> {
        self.axes.get(&id).copied()
    }

    /// The elements that this rank has of a parameter of all experts, of which an expert's are
    /// adjacent; of another parameter, all.
    pub(crate) fn own_of(&self, id: ParamId, elements: usize) -> Range<usize> {
        match self.axis(id) {
            Some(axis) => {
                let own = self.own(self.rank);
                own.start * axis.inner..own.end * axis.inner
            }
            None => 0..elements,
        }
    }

    /// Cuts this rank's elements out of those of all experts.
    ///
    /// # Errors
    /// If these are not the elements.
    pub(crate) fn cut(&self, axis: ExpertAxis, all: Tensor<1>) -> vlm_models::Result<Tensor<1>> {
        axis.cut(all, self.share_of(self.rank))
    }

    /// A number of elements for each rank of some, and 0 for the others.
    fn counts(
        &self,
        of: impl Fn(usize) -> usize,
        ranks: impl Iterator<Item = usize>,
    ) -> Vec<usize> {
        let mut counts = vec![0; self.ranks];
        ranks.for_each(|rank| counts[rank] = of(rank));
        counts
    }

    /// Sums a tensor in f32 over the ranks with the same experts, one of each group, in their order.
    ///
    /// # Errors
    /// A description of the failure.
    pub(crate) fn sum(&self, peers: &Peers, own: Tensor<1>) -> Result<Tensor<1>, String> {
        let groups = self.ranks / self.size;
        if groups == 1 {
            return Ok(own);
        }
        // Each sums a part, and gives it to the others.
        let [elements] = own.dims();
        let part = elements.div_ceil(groups);
        let like = (&own.device(), own.dtype());
        let rest = Tensor::zeros([part * groups - elements], like);
        let replicas = || (self.rank % self.size..self.ranks).step_by(self.size);
        let counts = self.counts(|_| part, replicas());
        let counts = [&counts[..], &counts[..]];
        // The parts are dropped before the sum is repeated.
        let sum = {
            let parts = Tensor::cat(vec![own, rest], 0);
            let parts = peers.collective.all_to_all(parts, counts)?;
            let parts = parts.reshape([groups, part]);
            let later = (1..groups).map(|group| parts.clone().narrow(0, group, 1));
            later.fold(parts.clone().narrow(0, 0, 1), |sum, next| sum + next)
        };
        let all = sum.repeat_dim(0, groups).reshape([part * groups]);
        let all = peers.collective.all_to_all(all, counts)?;
        Ok(all.slice(0..elements))
    }

    /// The elements of all experts, on the first rank, from those of each rank; nothing of use on
    /// the others. All ranks must call it.
    ///
    /// # Errors
    /// A description of the failure.
    pub(crate) fn gather(
        &self,
        peers: &Peers,
        axis: ExpertAxis,
        own: Tensor<1>,
    ) -> Result<Tensor<1>, String> {
        let [elements] = own.dims();
        let is_first_group = self.rank < self.size;
        let to = (0..1).filter(|_| is_first_group);
        let from = (0..self.size).filter(|_| self.rank == 0);
        let counts = [
            self.counts(|_| elements, to),
            self.counts(|_| elements, from),
        ];
        let given = if is_first_group { elements } else { 0 };
        let own = own.slice(0..given);
        let all = peers.collective.all_to_all(own, [&counts[0], &counts[1]])?;
        if self.rank > 0 {
            return Ok(all);
        }
        let share = |index: usize| all.clone().slice(index * elements..(index + 1) * elements);
        let all = axis.join((0..self.size).map(share).collect());
        all.map_err(|error| error.to_string())
    }

    /// Sums a number of each rank over the ranks of its group. Groups have the same sums, unless
    /// their experts differ.
    ///
    /// # Errors
    /// [`VlmTrainError::Rank`]
    pub(crate) fn add(&self, peers: &Peers, own: f64) -> Result<f64> {
        let all = peers.rank.exchange_numbers([own.to_bits()])?;
        let own = self.group().map(|rank| f64::from_bits(all[rank][0]));
        Ok(own.sum())
    }
}

/// The rows that ranks exchange in a pass through a layer's experts.
#[derive(Debug)]
struct Route {
    layer: usize,
    /// Rows that this rank gives to each, and receives from each.
    counts: [Vec<usize>; 2],
    /// Rows of each expert of this rank.
    of_experts: Vec<usize>,
    /// The received row of each row in the order of experts, and the reverse; `None` if the rows
    /// come in this order.
    orders: Option<[Tensor<1, Int>; 2]>,
}

impl Route {
    /// The route of the rows of each expert, which all ranks state.
    fn new(ranks: &ExpertRanks, layer: usize, all: &[Vec<usize>], device: &Device) -> Self {
        let of = |counts: &[usize], rank: usize| counts[ranks.own(rank)].iter().sum::<usize>();
        let given = ranks.counts(|rank| of(&all[ranks.rank], rank), ranks.group());
        let received = ranks.counts(|rank| of(&all[rank], ranks.rank), ranks.group());
        // Received rows are sorted by rank, and those of a rank by expert.
        let mut places: Vec<Vec<usize>> = vec![Vec::new(); ranks.own(ranks.rank).len()];
        let mut next = 0;
        for rank in ranks.group() {
            let counts = &all[rank][ranks.own(ranks.rank)];
            for (places, count) in places.iter_mut().zip(counts) {
                places.extend(next..next + count);
                next += count;
            }
        }
        let of_experts = places.iter().map(Vec::len).collect();
        let order: Vec<usize> = places.concat();
        let orders = (!order.is_sorted()).then(|| {
            let mut back = vec![0; order.len()];
            for (place, row) in order.iter().enumerate() {
                back[*row] = place;
            }
            [order, back].map(|list| {
                let list: Vec<i64> = list.into_iter().map(|index| index as i64).collect();
                let count = list.len();
                Tensor::from_data(TensorData::new(list, [count]), device)
            })
        });
        Self {
            layer,
            counts: [given, received],
            of_experts,
            orders,
        }
    }

    /// Sorts received rows by expert, or the reverse.
    fn sort(&self, rows: Tensor<2>, way: usize) -> Tensor<2> {
        match &self.orders {
            Some(orders) => rows.select(0, orders[way].clone()),
            None => rows,
        }
    }
}

/// What the ranks of a group do together in the passes of a batch.
pub(crate) struct ExpertExchange<'a> {
    ranks: &'a ExpertRanks,
    peers: &'a Peers,
    model: Vlm,
    device: Device,
    /// The last pass with gradients.
    kept: Option<(Route, ExpertPass)>,
}

impl<'a> ExpertExchange<'a> {
    pub(crate) fn new(ranks: &'a ExpertRanks, peers: &'a Peers, model: Vlm) -> Self {
        Self {
            ranks,
            peers,
            device: model.device().inner(),
            model,
            kept: None,
        }
    }

    /// Passes the rows of all ranks of the group through the experts of a layer. `own`: those of
    /// this rank, sorted by expert, and their number of each expert; `None` for none.
    ///
    /// # Errors
    /// [`VlmError::Walk`]
    pub(crate) fn forward(
        &mut self,
        layer: usize,
        own: Option<(Tensor<2>, &[usize])>,
        with_gradients: bool,
    ) -> vlm_models::Result<Tensor<2>> {
        let none = vec![0; self.ranks.sizes[0]];
        let (rows, counts) = match own {
            Some((rows, counts)) => (rows, counts),
            None => (self.no_rows(), &none[..]),
        };
        let all = self
            .counts_of_all(counts)
            .map_err(|error| VlmError::Walk(error.to_string()))?;
        let route = Route::new(self.ranks, layer, &all, &self.device);
        let rows = self.exchange(rows, &route.counts, false)?;
        let rows = route.sort(rows, 0);
        let model = &self.model;
        let pass = model.pass_experts(layer, rows, &route.of_experts, with_gradients)?;
        let outputs = route.sort(pass.outputs(), 1);
        let outputs = self.exchange(outputs, &route.counts, true)?;
        self.kept = with_gradients.then_some((route, pass));
        Ok(outputs)
    }

    /// Passes the gradients of the outputs of the last pass back. `walk` receives those of this
    /// rank's experts.
    ///
    /// # Errors
    /// [`VlmError::Walk`]
    pub(crate) fn backward(
        &mut self,
        layer: usize,
        own: Option<Tensor<2>>,
        walk: &mut dyn Walk,
    ) -> vlm_models::Result<Tensor<2>> {
        let kept = self.kept.take().filter(|(route, _)| route.layer == layer);
        let (route, pass) = kept.ok_or_else(|| {
            let text = format!("layer {layer} has no pass whose gradients are due");
            VlmError::Walk(text)
        })?;
        let gradient = own.unwrap_or_else(|| self.no_rows());
        let gradient = self.exchange(gradient, &route.counts, false)?;
        let gradient = route.sort(gradient, 0);
        let gradient = pass.backward(gradient, walk)?;
        let gradient = route.sort(gradient, 1);
        self.exchange(gradient, &route.counts, true)
    }

    fn no_rows(&self) -> Tensor<2> {
        let [_, channels] = self.ranks.sizes;
        Tensor::zeros([0, channels], (&self.device, self.model.dtype()))
    }

    /// The rows of each expert on each rank.
    fn counts_of_all(&self, own: &[usize]) -> Result<Vec<Vec<usize>>> {
        /// More than a rank has in a micro-batch.
        const MOST_ROWS: u64 = 1 << 28;
        let said = own.iter().flat_map(|count| (*count as u64).to_le_bytes());
        let all = self.peers.rank.exchange(said.collect())?;
        let read = |(rank, said): (usize, &Vec<u8>)| match said.as_chunks::<8>() {
            (counts, []) if counts.len() == own.len() => {
                let counts = counts.iter().map(|count| u64::from_le_bytes(*count));
                let sum = counts.clone().fold(0, u64::saturating_add);
                if sum > MOST_ROWS {
                    let cause =
                        format!("it states {sum} rows of experts; expected at most {MOST_ROWS}");
                    return Err(VlmTrainError::Rank { rank, cause });
                }
                Ok(counts.map(|count| count as usize).collect())
            }
            _ => Err(VlmTrainError::Rank {
                rank,
                cause: "it is at another point of the pass".to_owned(),
            }),
        };
        all.iter().enumerate().map(read).collect()
    }

    /// Gives rows to the ranks of their experts, or back.
    fn exchange(
        &self,
        rows: Tensor<2>,
        [given, received]: &[Vec<usize>; 2],
        is_back: bool,
    ) -> vlm_models::Result<Tensor<2>> {
        let [count, channels] = rows.dims();
        let elements = |rows: &Vec<usize>| rows.iter().map(|rows| rows * channels).collect();
        let mut counts: [Vec<usize>; 2] = [elements(given), elements(received)];
        if is_back {
            counts.reverse();
        }
        let flat = rows.reshape([count * channels]);
        let counts = [&counts[0][..], &counts[1][..]];
        let flat = self
            .peers
            .collective
            .all_to_all(flat, counts)
            .map_err(VlmError::Walk)?;
        let [elements] = flat.dims();
        Ok(flat.reshape([elements / channels, channels]))
    }
}

impl Trainer {
    /// Divides the experts of every layer among `size` ranks that follow each other, of those of
    /// [`with_ranks`](Self::with_ranks): each has a share, and passes through it the tokens of all
    /// of them. [`model`](Self::model) has that share alone from then on. Call it before
    /// [`resume`](Self::resume), which continues a run of any division.
    ///
    /// # Errors
    /// [`VlmTrainError::Options`] for ranks or experts that `size` does not divide, and for a run
    /// that cannot have its experts divided.
    pub fn with_expert_parallel(mut self, size: usize) -> Result<Self> {
        if size == 1 {
            return Ok(self);
        }
        let [rank, ranks] = self.peers.as_ref().map_or([0, 1], Peers::place);
        let sizes = self.model.expert_sizes();
        let division = ExpertDivision {
            size,
            ranks,
            experts: sizes.map(|[experts, _]| experts),
            sharding: self
                .shards()
                .map_or(Sharding::None, |(shards, _)| shards.sharding),
        };
        division.check(&self.recipe)?;
        let (Some(peers), Some(sizes)) = (&mut self.peers, sizes) else {
            return Ok(self);
        };
        let experts = ExpertRanks {
            size,
            rank,
            ranks,
            sizes,
            axes: self.model.expert_axes(),
        };
        self.model = self.model.with_expert_share(experts.share_of(rank))?;
        peers.experts = Some(experts);
        self.parameters = self.model.parameters();
        Ok(self)
    }

    /// The elements of the trained parameters, on all ranks together.
    pub fn trained_elements(&self) -> usize {
        let parameters = self.parameters.iter();
        parameters
            .map(|parameter| self.whole_elements(parameter))
            .sum()
    }

    /// Updates without effect and all updates counted: of experts, on all ranks that divide them.
    pub(crate) fn lost_updates(
        &self,
        lost: &[(ParamId, [usize; 2])],
        step: Step,
    ) -> Result<[usize; 2]> {
        let experts = self.expert_ranks();
        let add = |is_of_experts: bool| {
            let of = |id: &ParamId| experts.is_some_and(|(of, _)| of.axis(*id).is_some());
            let lost = lost.iter().filter(|(id, _)| of(id) == is_of_experts);
            lost.fold([0; 2], |[lost, all], (_, [a, b])| [lost + a, all + b])
        };
        let mut sum = add(false);
        if let Some((experts, peers)) = experts.filter(|_| step.is_watched) {
            for (sum, own) in sum.iter_mut().zip(add(true)) {
                *sum += experts.add(peers, own as f64)? as usize;
            }
        }
        Ok(sum)
    }

    /// The ranks that divide the experts, and all others, if they are divided.
    pub(crate) fn expert_ranks(&self) -> Option<(&ExpertRanks, &Peers)> {
        let peers = self.peers.as_ref()?;
        Some((peers.experts.as_ref()?, peers))
    }

    /// The sum of the squares of all trained parameters' elements in some sums: of those of experts,
    /// on all ranks that divide them.
    pub(crate) fn squares(&self, sums: &GradientSums) -> Result<f64, NoSum> {
        let ids = || self.parameters.iter().map(|parameter| parameter.id);
        let Some((experts, peers)) = self.expert_ranks() else {
            return sums.squares(ids()).map_err(NoSum::Device);
        };
        let mut shared = sums.clone();
        let mut own = GradientSums::default();
        for id in ids().filter(|id| experts.axis(*id).is_some()) {
            if let Some(sum) = shared.take(id) {
                own.add(id, sum);
            }
        }
        let [shared, own] = [shared, own].map(|sums| sums.squares(ids()).map_err(NoSum::Device));
        Ok(shared? + experts.add(peers, own?).map_err(NoSum::Rank)?)
    }
}

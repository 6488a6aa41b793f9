//! The passes of a batch's micro-batches, and between them the collectives of what is in shards and
//! of divided experts and tokens.
//!
//! Ranks have different micro-batches, some without pictures, and some ranks fewer of them. So that
//! all run the same collectives in the same order, each round, of one micro-batch per rank, follows
//! the visits of a pass with everything that a rank's micro-batch has. A rank runs in passing the
//! collectives of visits that its own pass lacks.

use std::collections::{HashSet, VecDeque};

use burn::module::{Module, ParamId};
use burn::tensor::{Device, Tensor};
use vlm_models::{Block, Visit, Vlm, VlmError, Walk, Weights};

use crate::error::Result;
use crate::experts::ExpertExchange;
use crate::ranks::{Begun, Peers};
use crate::record::Exchanged;
use crate::shards::Shards;
use crate::sums::GradientSums;
use crate::trainer::Trainer;

/// The gradients of a batch so far, and the walk that adds to them.
pub(crate) struct Passes<'a> {
    sums: GradientSums,
    /// What ranks do together within a pass.
    rounds: Option<Rounds<'a>>,
}

/// The sums of a batch's gradients: with gradients in shards, this rank's parts of all ranks' sums.
pub(crate) struct Summed {
    pub(crate) gradients: GradientSums,
    /// The parameters of which this rank computed gradients, if sums are of all ranks.
    pub(crate) computed: Option<HashSet<ParamId>>,
    /// What this rank gave and received, if it is recorded.
    pub(crate) exchanged: Option<Exchanged>,
}

struct Rounds<'a> {
    model: Vlm,
    /// What is in shards, if they are summed or gathered block by block.
    shards: Option<&'a Shards>,
    experts: Option<ExpertExchange<'a>>,
    peers: &'a Peers,
    device: Device,
    /// For each round to come, true if a rank has pictures.
    rounds: VecDeque<bool>,
    /// The rest of the round.
    visits: VecDeque<Visit>,
    /// The weights of the next block, on their way, by flat.
    ahead: Option<Vec<(usize, Begun)>>,
    /// The sums of a block's gradients, on their way, by flat.
    behind: Vec<(usize, Begun)>,
    /// This rank's gradients of blocks that are not complete.
    gradients: GradientSums,
    computed: HashSet<ParamId>,
    exchanged: Option<Exchanged>,
}

impl Trainer {
    /// The passes of a batch, of which `sees` states for each micro-batch if it has pictures. All
    /// ranks must call this.
    pub(crate) fn passes(&self, sees: &[bool]) -> Result<Passes<'_>> {
        let mut passes = Passes {
            sums: self.empty_sums(),
            rounds: self.rounds(self.model.clone()),
        };
        if let Some(rounds) = &mut passes.rounds {
            let all = rounds.peers.hear(sees)?;
            let most = all.iter().map(Vec::len).max().unwrap_or(0);
            let sees = |round: usize| all.iter().any(|sees| sees.get(round) == Some(&1));
            rounds.rounds = (0..most).map(sees).collect();
        }
        Ok(passes)
    }

    /// The passes of a validation, each of which [`hears`](Passes::hears) the others before. Only
    /// if the weights are in shards or experts divided.
    pub(crate) fn validation_passes(&self) -> Option<Passes<'_>> {
        // Its passes complete no gradients.
        let rounds = self.rounds(self.model.clone().no_grad())?;
        (rounds.has_weights() || rounds.experts.is_some() || rounds.peers.context > 1).then(|| {
            Passes {
                sums: GradientSums::default(),
                rounds: Some(rounds),
            }
        })
    }

    fn rounds(&self, model: Vlm) -> Option<Rounds<'_>> {
        let peers = self.peers.as_ref()?;
        let shards = peers.shards.as_ref().filter(|shards| shards.is_by_block());
        let experts = peers.experts.as_ref();
        let experts = experts.map(|ranks| ExpertExchange::new(ranks, peers, model.clone()));
        let mut gradients = GradientSums::default();
        // Converted when a block has dropped its weights.
        gradients.keeps_types = true;
        (shards.is_some() || experts.is_some() || peers.context > 1).then(|| Rounds {
            device: model.device().inner(),
            model,
            shards,
            experts,
            peers,
            rounds: VecDeque::new(),
            visits: VecDeque::new(),
            ahead: None,
            behind: Vec::new(),
            gradients,
            computed: HashSet::new(),
            exchanged: None,
        })
    }
}

impl Passes<'_> {
    /// Keeps what this rank gives, of gradients that are `scale` times those of the loss, and
    /// receives.
    pub(crate) fn record(&mut self, scale: f64) {
        if let Some(rounds) = &mut self.rounds {
            rounds.exchanged = Some(Exchanged::new(&rounds.model, scale));
        }
    }

    /// Runs the next pass.
    pub(crate) fn run<T>(
        &mut self,
        pass: impl FnOnce(&mut dyn Walk) -> vlm_models::Result<T>,
    ) -> vlm_models::Result<T> {
        if let Some(rounds) = &mut self.rounds {
            rounds.begin();
        }
        let done = pass(self)?;
        if let Some(rounds) = &mut self.rounds {
            rounds.end(&mut self.sums)?;
        }
        Ok(done)
    }

    /// Runs what other ranks need of this one after its last pass.
    pub(crate) fn finish(mut self) -> vlm_models::Result<Summed> {
        let (mut computed, mut exchanged) = (None, None);
        if let Some(mut rounds) = self.rounds {
            while !rounds.rounds.is_empty() {
                rounds.begin();
                rounds.end(&mut self.sums)?;
            }
            computed = rounds.shards.map(|_| rounds.computed);
            exchanged = rounds.exchanged;
        }
        Ok(Summed {
            gradients: self.sums,
            computed,
            exchanged,
        })
    }

    /// Prepares a round for a micro-batch with or without pictures, or for none. False if no rank
    /// has one.
    pub(crate) fn hears(&mut self, sees: Option<bool>) -> Result<bool> {
        let Some(rounds) = &mut self.rounds else {
            return Ok(false);
        };
        let own: Vec<bool> = sees.into_iter().collect();
        let all = rounds.peers.hear(&own)?;
        let has = all.iter().any(|sees| !sees.is_empty());
        let sees = all.iter().flatten().any(|sees| *sees == 1);
        rounds.rounds = has.then_some(sees).into_iter().collect();
        Ok(has)
    }

    /// Runs the passes of other ranks in the round that was prepared.
    pub(crate) fn rest(&mut self) -> vlm_models::Result<()> {
        self.run(|_| Ok(()))
    }

    /// The model, without its weights.
    pub(crate) fn model(&self) -> Option<Vlm> {
        self.rounds.as_ref().map(|rounds| rounds.model.clone())
    }
}

impl Walk for Passes<'_> {
    fn add(&mut self, id: ParamId, gradient: Tensor<1>) {
        match &mut self.rounds {
            Some(rounds) if rounds.shards.is_some() => {
                rounds.computed.insert(id);
                rounds.gradients.add(id, gradient);
            }
            _ => self.sums.add(id, gradient),
        }
    }

    fn complete(&mut self, block: Block) -> vlm_models::Result<()> {
        match &mut self.rounds {
            Some(rounds) if rounds.is_due(Visit::Complete(block)) => {
                rounds.reach(Visit::Complete(block), &mut self.sums)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn provides(&self) -> bool {
        let rounds = self.rounds.as_ref();
        rounds.is_some_and(Rounds::has_weights)
    }

    fn enter(&mut self, block: Block) -> vlm_models::Result<Weights> {
        match &mut self.rounds {
            Some(rounds) => rounds.reach(Visit::Enter(block), &mut self.sums),
            None => Ok(Weights::new()),
        }
    }

    fn pass_experts(
        &mut self,
        layer: usize,
        rows: Tensor<2>,
        counts: &[usize],
    ) -> vlm_models::Result<Tensor<2>> {
        let rounds = self.rounds.as_mut().ok_or_else(no_rounds)?;
        rounds.skip_to(Visit::Experts(layer), &mut self.sums)?;
        rounds.pass_experts(layer, Some((rows, counts)))
    }

    fn pass_expert_gradients(
        &mut self,
        layer: usize,
        gradient: Tensor<2>,
    ) -> vlm_models::Result<Tensor<2>> {
        let rounds = self.rounds.as_mut().ok_or_else(no_rounds)?;
        rounds.skip_to(Visit::ExpertGradients(layer), &mut self.sums)?;
        rounds.pass_expert_gradients(layer, Some(gradient), &mut self.sums)
    }

    fn exchange(
        &mut self,
        visit: Visit,
        given: Tensor<1>,
        counts: [&[usize]; 2],
    ) -> vlm_models::Result<Tensor<1>> {
        let rounds = self.rounds.as_mut().ok_or_else(no_rounds)?;
        rounds.skip_to(visit, &mut self.sums)?;
        rounds.peers.exchange_tokens(given, counts)
    }
}

fn no_rounds() -> VlmError {
    VlmError::Walk("the ranks are in no pass together".to_owned())
}

impl<'a> Rounds<'a> {
    fn begin(&mut self) {
        let sees = self.rounds.pop_front().unwrap_or(false);
        let visits = match self.peers.context {
            1 => self.model.visits(sees),
            _ => self.model.visits_of_parts(sees),
        };
        let visits = visits.into_iter();
        self.visits = visits.filter(|visit| self.is_due(*visit)).collect();
    }

    /// True if ranks do something together at a visit.
    fn is_due(&self, visit: Visit) -> bool {
        match visit {
            Visit::Enter(_) => self.has_weights(),
            Visit::Complete(block) => self.trained_flats(block).next().is_some(),
            Visit::Experts(_) | Visit::ExpertGradients(_) => self.experts.is_some(),
            Visit::Exchange { .. } => true,
        }
    }

    /// True if the weights are in shards.
    fn has_weights(&self) -> bool {
        self.shards.is_some_and(Shards::has_weights)
    }

    /// The flats of a block whose gradients are summed.
    fn trained_flats(&self, block: Block) -> impl Iterator<Item = usize> + use<'a> {
        let shards = self.shards.into_iter();
        shards.flat_map(move |shards| {
            let flats = shards.of_block(block);
            flats.filter(|flat| shards.is_trained(*flat))
        })
    }

    /// Runs the visits up to and with this one, and returns its weights.
    fn reach(&mut self, visit: Visit, sums: &mut GradientSums) -> vlm_models::Result<Weights> {
        self.skip_to(visit, sums)?;
        self.visit(visit, sums)
    }

    /// Runs the visits before this one, which is then no longer among those to come.
    fn skip_to(&mut self, visit: Visit, sums: &mut GradientSums) -> vlm_models::Result<()> {
        while let Some(next) = self.visits.pop_front() {
            if next == visit {
                return Ok(());
            }
            self.visit(next, sums)?;
        }
        let text = format!("{visit:?} is not among the visits of the pass");
        Err(VlmError::Walk(text))
    }

    /// Passes the rows of all ranks through a layer's experts: this rank's, or none.
    fn pass_experts(
        &mut self,
        layer: usize,
        own: Option<(Tensor<2>, &[usize])>,
    ) -> vlm_models::Result<Tensor<2>> {
        let with_gradients = self.visits.front() == Some(&Visit::ExpertGradients(layer));
        let experts = self.experts.as_mut().ok_or_else(no_rounds)?;
        experts.forward(layer, own, with_gradients)
    }

    /// Passes the gradients of the outputs back: this rank's, or none.
    fn pass_expert_gradients(
        &mut self,
        layer: usize,
        own: Option<Tensor<2>>,
        sums: &mut GradientSums,
    ) -> vlm_models::Result<Tensor<2>> {
        let experts = self.experts.as_mut().ok_or_else(no_rounds)?;
        experts.backward(layer, own, &mut |id, gradient| sums.add(id, gradient))
    }

    /// Runs the visits that this rank's pass did not reach.
    fn end(&mut self, sums: &mut GradientSums) -> vlm_models::Result<()> {
        while let Some(next) = self.visits.pop_front() {
            self.visit(next, sums)?;
        }
        self.add_sums(sums)
    }

    fn visit(&mut self, visit: Visit, sums: &mut GradientSums) -> vlm_models::Result<Weights> {
        match visit {
            Visit::Enter(block) => self.gather(block),
            Visit::Complete(block) => {
                self.scatter(block, sums)?;
                Ok(Weights::new())
            }
            Visit::Experts(layer) => {
                self.pass_experts(layer, None)?;
                Ok(Weights::new())
            }
            Visit::ExpertGradients(layer) => {
                self.pass_expert_gradients(layer, None, sums)?;
                Ok(Weights::new())
            }
            Visit::Exchange { is_wide, .. } => {
                let like = (&self.device, self.model.dtype());
                self.peers.exchange_none(is_wide, like)?;
                Ok(Weights::new())
            }
        }
    }

    /// Returns the weights of a block, and lets those of the next follow meanwhile.
    fn gather(&mut self, block: Block) -> vlm_models::Result<Weights> {
        let gathered = match self.ahead.take() {
            Some(ahead) => ahead,
            None => self.begin_gather(block)?,
        };
        let mut weights = Weights::new();
        for (flat, gathering) in gathered {
            let all = gathering.wait().map_err(VlmError::Walk)?;
            let shards = self.shards.into_iter();
            weights.extend(shards.flat_map(|shards| shards.cut_all(flat, &all)));
        }
        if let Some(exchanged) = &mut self.exchanged {
            exchanged.receives(&weights)?;
        }
        let next = self.visits.iter().find_map(|visit| match visit {
            Visit::Enter(block) => Some(*block),
            _ => None,
        });
        self.ahead = next.map(|next| self.begin_gather(next)).transpose()?;
        Ok(weights)
    }

    fn begin_gather(&self, block: Block) -> vlm_models::Result<Vec<(usize, Begun)>> {
        let Some(shards) = self.shards else {
            return Ok(Vec::new());
        };
        let begin = |flat| {
            let part = shards.weights(flat)?;
            let gathering = self.peers.collective.begin_gather(part);
            Some(gathering.map(|gathering| (flat, gathering)))
        };
        let flats = shards.of_block(block).filter_map(begin);
        flats.collect::<Result<_, _>>().map_err(VlmError::Walk)
    }

    /// Begins to sum the gradients of a block over all ranks, and adds this rank's parts of those of
    /// the block before.
    fn scatter(&mut self, block: Block, sums: &mut GradientSums) -> vlm_models::Result<()> {
        self.add_sums(sums)?;
        let Some(shards) = self.shards else {
            return Ok(());
        };
        for flat in self.trained_flats(block) {
            if let Some(exchanged) = &mut self.exchanged {
                for id in shards.ids(flat) {
                    if let Some(gradient) = self.gradients.get(id) {
                        exchanged.gives(id, gradient)?;
                    }
                }
            }
            let own = shards.flatten(flat, &mut self.gradients, &self.device);
            let begun = self.peers.collective.begin_scatter(own);
            self.behind.push((flat, begun.map_err(VlmError::Walk)?));
        }
        match block {
            // Those of a vocabulary are the largest, and are not kept beside those of layers.
            Block::Words | Block::Head => self.add_sums(sums),
            _ => Ok(()),
        }
    }

    fn add_sums(&mut self, sums: &mut GradientSums) -> vlm_models::Result<()> {
        for (flat, begun) in std::mem::take(&mut self.behind) {
            let part = begun.wait().map_err(VlmError::Walk)?;
            let shards = self.shards.into_iter();
            for (id, part) in shards.flat_map(|shards| shards.cut_own(flat, &part)) {
                sums.add(id, part);
            }
        }
        Ok(())
    }
}

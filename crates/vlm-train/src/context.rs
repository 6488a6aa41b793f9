//! Context parallelism: ranks that follow each other are a group, which divides the tokens of each of
//! its micro-batches.

use std::ops::Range;

use burn::tensor::{DType, Device, Tensor};
use vlm_data::MicroBatch;
use vlm_models::{Batch, TokenShare, Vlm, VlmError};

use crate::batch::{inputs, prompt, tokens};
use crate::error::{Result, VlmTrainError};
use crate::ranks::Peers;
use crate::recipe::Recipe;
use crate::trainer::Trainer;

/// An option that divides something among ranks within a layer, and its number of ranks.
#[derive(Clone, Copy)]
pub(crate) struct Divided(pub(crate) &'static str, pub(crate) usize);

impl Divided {
    /// # Errors
    /// [`VlmTrainError::Options`]
    pub(crate) fn refused(self, text: &str) -> Result<()> {
        let Self(option, size) = self;
        Err(VlmTrainError::Options(format!("{option} {size} {text}")))
    }

    /// Rejects a number of ranks that does not divide another.
    ///
    /// # Errors
    /// [`VlmTrainError::Options`]
    pub(crate) fn divides(self, number: usize, what: &str) -> Result<()> {
        if self.1 > 0 && number.is_multiple_of(self.1) {
            return Ok(());
        }
        self.refused(&format!(
            "does not divide the {number} {what}; choose a number that does"
        ))
    }

    /// Rejects a run that cannot cut its layers where ranks meet.
    ///
    /// # Errors
    /// [`VlmTrainError::Options`]
    pub(crate) fn expect_cut_layers(self, recipe: &Recipe) -> Result<()> {
        if !recipe.recompute {
            let text = "computes activations again, layer by layer; leave out --no-recompute";
            return self.refused(text);
        }
        // Devices compute references and answers alone.
        if recipe.preference.is_some() || recipe.policy.is_some() {
            let text = "does not go with a loss of preferences or rewards; leave one of them out";
            return self.refused(text);
        }
        Ok(())
    }
}

/// A run of which `size` ranks divide each micro-batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ContextDivision {
    pub(crate) size: usize,
    pub(crate) ranks: usize,
    /// The ranks that divide the experts.
    pub(crate) expert_parallel: usize,
}

impl ContextDivision {
    /// Rejects a division that a run cannot have.
    ///
    /// # Errors
    /// [`VlmTrainError::Options`]
    pub(crate) fn check(&self, recipe: &Recipe) -> Result<()> {
        let option = Divided("--context", self.size);
        option.divides(self.ranks, "devices")?;
        if self.expert_parallel != 1 {
            return option.refused("does not go with --expert-parallel; leave one of them out");
        }
        option.expect_cut_layers(recipe)
    }
}

impl Peers {
    /// The ranks that divide the micro-batches of this one.
    fn context_group(&self) -> Range<usize> {
        let [rank, _] = self.place();
        let first = rank / self.context * self.context;
        first..first + self.context
    }

    /// This rank's share of the tokens, if ranks divide them.
    fn token_share(&self) -> Option<TokenShare> {
        let [rank, _] = self.place();
        (self.context > 1).then_some(TokenShare {
            index: rank % self.context,
            count: self.context,
        })
    }

    /// Gives elements to the ranks of the group, and returns theirs.
    ///
    /// # Errors
    /// [`VlmError::Walk`]
    pub(crate) fn exchange_tokens(
        &self,
        given: Tensor<1>,
        counts: [&[usize]; 2],
    ) -> vlm_models::Result<Tensor<1>> {
        let [_, ranks] = self.place();
        let counts = counts.map(|of_group| {
            let mut of_all = vec![0; ranks];
            of_all[self.context_group()].copy_from_slice(of_group);
            of_all
        });
        let counts = [&counts[0][..], &counts[1][..]];
        let received = self.collective.all_to_all(given, counts);
        received.map_err(VlmError::Walk)
    }

    /// Takes part in an exchange of other groups.
    ///
    /// # Errors
    /// [`VlmError::Walk`]
    pub(crate) fn exchange_none(
        &self,
        is_wide: bool,
        (device, dtype): (&Device, DType),
    ) -> vlm_models::Result<()> {
        let wide = match dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let dtype = if is_wide { wide } else { dtype };
        let none = vec![0; self.context];
        self.exchange_tokens(Tensor::zeros([0], (device, dtype)), [&none, &none])?;
        Ok(())
    }
}

impl Trainer {
    /// Divides the tokens of each micro-batch among `size` ranks that follow each other, of those of
    /// [`with_ranks`](Self::with_ranks). These get the same micro-batches. Call it before
    /// [`resume`](Self::resume), which continues a run of any division.
    ///
    /// # Errors
    /// [`VlmTrainError::Options`] for ranks that `size` does not divide, and for a run that cannot
    /// have its tokens divided.
    pub fn with_context(mut self, size: usize) -> Result<Self> {
        if size == 1 {
            return Ok(self);
        }
        let [_, ranks] = self.peers.as_ref().map_or([0, 1], Peers::place);
        let experts = self.expert_ranks();
        let division = ContextDivision {
            size,
            ranks,
            expert_parallel: experts.map_or(1, |(experts, _)| experts.size()),
        };
        division.check(&self.recipe)?;
        if let Some(peers) = &mut self.peers {
            peers.context = size;
        }
        Ok(self)
    }

    /// This rank's share of the tokens of its micro-batches, if ranks divide them.
    pub(crate) fn token_share(&self) -> Option<TokenShare> {
        self.peers.as_ref().and_then(Peers::token_share)
    }

    /// The first of the ranks that divide its micro-batches.
    pub(crate) fn context_first(&self) -> Option<usize> {
        let peers = self.peers.as_ref()?;
        Some(peers.context_group().start)
    }

    /// True if this rank speaks for those that divide its micro-batches.
    pub(crate) fn leads(&self) -> bool {
        self.token_share().is_none_or(|share| share.index == 0)
    }

    /// This rank's tokens of a micro-batch.
    pub(crate) fn own_batch(&self, model: &Vlm, micro: &MicroBatch) -> vlm_models::Result<Batch> {
        let inputs = inputs(micro, &model.device());
        match self.token_share() {
            Some(share) => model.batch_part(&inputs, share),
            None => model.batch(&inputs),
        }
    }

    /// The number of this rank's tokens of a micro-batch, without padding.
    pub(crate) fn own_tokens(&self, micro: &MicroBatch) -> usize {
        tokens(micro, self.token_share().unwrap_or(TokenShare::ALL))
    }

    /// The labelled tokens of a micro-batch, and those of this rank.
    pub(crate) fn labelled_part(&self, micro: &MicroBatch) -> vlm_models::Result<[usize; 2]> {
        let share = self.token_share().unwrap_or(TokenShare::ALL);
        self.model
            .labelled_part(&prompt(micro), &micro.labels, share)
    }
}

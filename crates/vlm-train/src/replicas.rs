//! Trainers of several ranks, each with a replica of the model.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use vlm_data::Fingerprint;
use vlm_models::VlmConfig;

use crate::checkpoint::{Identity, same, value, values};
use crate::error::{Result, VlmTrainError};
use crate::experts::ExpertRanks;
use crate::ranks::{Collective, Peers, Rank};
use crate::shards::{Sharding, Shards};
use crate::sums::GradientSums;
use crate::trainer::Trainer;

impl Trainer {
    /// Makes this trainer one of several ranks, with gradients summed by `collective`. Each rank
    /// has a replica of what is not in shards. With all in shards, [`model`](Self::model) has no
    /// weights from then on. Call it before [`resume`](Self::resume), which continues a run of any
    /// number of ranks in any shards.
    ///
    /// # Errors
    /// [`VlmTrainError::Options`] for a recipe that a run in these shards cannot follow.
    pub fn with_ranks(
        mut self,
        rank: Rank,
        collective: Arc<dyn Collective>,
        sharding: Sharding,
    ) -> Result<Self> {
        sharding.check(&self.recipe)?;
        let place = [rank.rank(), rank.ranks()];
        let shards = || Shards::new(&self.model, sharding, self.recipe.masters, place);
        let shards = (sharding > Sharding::None).then(shards);
        if sharding == Sharding::All {
            self.model = self.model.with_stand_ins(|_| true);
        }
        self.peers = Some(Peers {
            shards,
            rank,
            collective,
            experts: None,
            context: 1,
        });
        Ok(self)
    }

    /// Reads this rank's parts of the weights from a folder, for a trainer of
    /// [stand-ins](VlmConfig::load_stand_ins) with all in shards, or with divided experts. Weights
    /// that an adapter's folder has are kept.
    ///
    /// # Errors
    /// Those of [`VlmConfig::load_parts`].
    pub fn with_parts_of(mut self, config: &VlmConfig, folder: &Path) -> Result<Self> {
        let kept = match self.keeps_trained {
            true => self
                .parameters
                .iter()
                .map(|parameter| parameter.id)
                .collect(),
            false => HashSet::new(),
        };
        let device = self.model.device().inner();
        if let Some((experts, _)) = self.expert_ranks() {
            let whole = self.model.clone().with_whole_experts();
            let sizes = whole.all_parameters().into_iter();
            let sizes = sizes.map(|(parameter, _)| (parameter.id, parameter.elements()));
            let sizes: HashMap<_, _> = sizes.collect();
            let own = |id| match kept.contains(&id) {
                true => None,
                false => Some(experts.own_of(id, *sizes.get(&id)?)),
            };
            let parts = config.load_parts(folder, &whole, &own)?;
            self.model = self.model.clone().with_values(parts);
        } else if let Some(shards) = self.peers.as_mut().and_then(|peers| peers.shards.as_mut()) {
            let own = |id| shards.own(id).filter(|_| !kept.contains(&id));
            let parts = config.load_parts(folder, &self.model, &own)?;
            shards.set_weights(parts, &device);
        }
        Ok(self)
    }

    /// True if this is the only rank, or the first of several.
    pub(crate) fn is_first(&self) -> bool {
        self.peers
            .as_ref()
            .is_none_or(|peers| peers.place()[0] == 0)
    }

    /// The words of all ranks, in their order.
    pub(crate) fn hear<T: Serialize + DeserializeOwned>(&self, own: T) -> Result<Vec<T>> {
        let Some(peers) = &self.peers else {
            return Ok(vec![own]);
        };
        let said = serde_json::to_vec(&own).unwrap_or_default();
        let all = peers.rank.exchange(said)?;
        let heard = all.iter().enumerate().map(|(rank, said)| {
            serde_json::from_slice(said).map_err(|error| VlmTrainError::Rank {
                rank,
                cause: format!("its message cannot be read: {error}"),
            })
        });
        heard.collect()
    }

    /// Rejects ranks that differ in recipe, data, model, weights or step.
    ///
    /// # Errors
    /// [`VlmTrainError::OtherRank`]
    pub(crate) fn expect_same_run(&self, identity: &Identity) -> Result<()> {
        let Some(peers) = &self.peers else {
            return Ok(());
        };
        let parameters = self.parameters.iter();
        let parameters = parameters.map(|p| format!("{} {:?} {:?}", p.name, p.shape, p.dtype));
        let parameters: Vec<String> = parameters.collect();
        // Objects are compared in the order of their names: first the options, from which the
        // others follow.
        let own = serde_json::json!({
            "version": env!("CARGO_PKG_VERSION"),
            "options": value(identity),
            "recipe": value(&self.recipe),
            "steps": self.steps,
            "expert-parallel": peers.experts.as_ref().map_or(1, ExpertRanks::size),
            "context": peers.context,
            "sharding": peers.shards.as_ref().map_or(Sharding::None, |shards| shards.sharding),
            "trained": {
                "parameters": fingerprint(&parameters.join("\n")),
                "weights": self.weights_norm()?,
            },
        });
        let all: Vec<Value> = self.hear(own)?;
        let first = all.first().cloned().unwrap_or_default();
        for (rank, said) in all.iter().enumerate() {
            same("run", &first, said).map_err(|error| match error {
                VlmTrainError::OtherRun {
                    option,
                    expected,
                    found,
                } => VlmTrainError::OtherRank {
                    rank,
                    option,
                    expected,
                    found,
                },
                other => other,
            })?;
        }
        Ok(())
    }

    /// The norm of all trained values, to seven digits; replicas have equal norms, and shards none.
    fn weights_norm(&self) -> Result<String> {
        if self.has_weight_shards() {
            return Ok(String::new());
        }
        let mut sums = GradientSums::default();
        for (id, value) in values(&self.model, false) {
            sums.add(id, value);
        }
        let squares = self
            .squares(&sums)
            .map_err(|failure| failure.step_error(self.steps))?;
        Ok(format!("{:.6e}", squares.sqrt()))
    }
}

/// A hash by which to compare texts.
fn fingerprint(text: &str) -> String {
    let mut hash = Fingerprint::default();
    hash.add(text.as_bytes());
    format!("{:016x}", hash.value())
}

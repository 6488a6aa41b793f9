//! Trainers of several ranks, each with a replica of the model.

use std::sync::Arc;

use burn::module::Module;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use vlm_data::Fingerprint;

use crate::checkpoint::{Identity, Values, same, value};
use crate::error::{Result, VlmTrainError};
use crate::ranks::{Collective, Peers, Rank};
use crate::shards::{OptimizerState, Shards};
use crate::sums::GradientSums;
use crate::trainer::Trainer;

impl Trainer {
    /// Makes this trainer one of several ranks, with gradients summed by `collective`. Each rank
    /// has a replica of the model, and the optimizer's state or a shard of it. Call it before
    /// [`resume`](Self::resume), which continues a run of any number of ranks.
    #[must_use]
    pub fn with_ranks(
        mut self,
        rank: Rank,
        collective: Arc<dyn Collective>,
        state: OptimizerState,
    ) -> Self {
        let place = [rank.rank(), rank.ranks()];
        let shards = || Shards::new(&self.parameters, place);
        self.peers = Some(Peers {
            shards: (state == OptimizerState::Sharded).then(shards),
            rank,
            collective,
        });
        self
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
            "optimizer's state": if peers.shards.is_some() { "sharded" } else { "replicated" },
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

    /// The norm of all trained values, to seven digits; replicas have equal norms.
    fn weights_norm(&self) -> Result<String> {
        let mut values = Values::default();
        self.model.visit(&mut values);
        let mut sums = GradientSums::default();
        for (id, value) in values.0 {
            sums.add(id, value);
        }
        let ids = self.parameters.iter().map(|parameter| parameter.id);
        let norm = sums.norm(ids).map_err(|reason| VlmTrainError::Device {
            step: self.steps,
            reason,
        })?;
        Ok(format!("{norm:.6e}"))
    }
}

/// A hash by which to compare texts.
fn fingerprint(text: &str) -> String {
    let mut hash = Fingerprint::default();
    hash.add(text.as_bytes());
    format!("{:016x}", hash.value())
}

//! The records of a run over several ranks: one file each, and what a rank gives and receives.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};

use burn::module::ParamId;
use burn::tensor::{Device, Tensor};
use serde::{Deserialize, Serialize};
use vlm_models::{Parameter, Sampled, Vlm, Weights, sampled_elements};

use super::{Recording, SAMPLES, StepRecord};
use crate::compare::{Stage, parsed};
use crate::error::{Result, VlmTrainError};
use crate::shards::{Sharding, Shards};
use crate::sums::GradientSums;

/// The rank that recorded a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordRank {
    /// Its number, from 0.
    pub rank: usize,
    /// The number of ranks.
    pub ranks: usize,
    /// The state in shards.
    pub sharding: Sharding,
    /// The number of ranks that divide the tokens of each micro-batch.
    #[serde(default = "one")]
    pub context: usize,
    /// The labelled tokens of its samples, or of its tokens.
    pub labelled: usize,
    /// The stages whose parameters are in parts: of an element that `part/NAME` states for another
    /// rank, the record has the value at its place in this rank's part.
    pub in_parts: Vec<Stage>,
}

fn one() -> usize {
    1
}

impl fmt::Display for RecordRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sharding = format!("{:?}", self.sharding).to_lowercase();
        write!(f, "{}, shard {sharding}", self.ranks)?;
        match self.context {
            1 => Ok(()),
            size => write!(f, ", context {size}"),
        }
    }
}

impl StepRecord {
    /// Reads a record, and those of the other ranks of its run, which must be in the same folder.
    ///
    /// # Errors
    /// Those of [`read`](Self::read); [`VlmTrainError::NoRecord`] for a record that is missing, or
    /// of another run or step.
    pub fn read_ranks(path: &Path) -> Result<Vec<Self>> {
        let first = Self::read(path)?;
        let Some(RecordRank { rank, ranks, .. }) = first.header.rank else {
            return Ok(vec![first]);
        };
        let (step, loss) = (first.header.step, first.header.loss);
        let mut records = Vec::new();
        for other in 0..ranks {
            let path = sibling(path, rank, other);
            let refused = |reason: String| VlmTrainError::NoRecord {
                path: path.clone(),
                reason: format!("{reason}; expected rank {other} of {ranks} at step {step}"),
            };
            let record = match other == rank {
                true => first.clone(),
                false if !path.exists() => return Err(refused("it is not there".to_owned())),
                false => Self::read(&path)?,
            };
            let found = &record.header;
            let of = found.rank.as_ref();
            let is_expected = of.is_some_and(|of| (of.rank, of.ranks) == (other, ranks));
            // Ranks of a run have one loss, that of all of them.
            if !is_expected || found.step != step || found.loss.to_bits() != loss.to_bits() {
                return Err(refused("it is of another run".to_owned()));
            }
            records.push(record);
        }
        Ok(records)
    }

    /// The rank that has each kept element of an item; `None` if each rank has all of them.
    pub(crate) fn owners_of(&self, name: &str) -> Option<Cow<'_, [f32]>> {
        let (stage, line, item) = parsed(name)?;
        if line.is_empty() {
            return self.owners(stage, item).map(Cow::Borrowed);
        }
        let of_tokens = self.items.get(&format!("part/{line}/tokens"))?;
        let shape = self.header.shapes.get(name)?;
        let (count, all) = (self.items.get(name)?.len(), shape.iter().product());
        let width: usize = shape.iter().skip(1).product::<usize>().max(1);
        let owner = |token: usize| of_tokens.get(token).copied();
        // Inputs are whole, logits of a few tokens.
        let few: Vec<usize> = match item {
            "logits" => sampled_elements(of_tokens.len(), shape[0]).collect(),
            _ => Vec::new(),
        };
        let token = |place: usize| match (stage, item) {
            (Stage::Input, "position_ids") => Some(place % of_tokens.len().max(1)),
            (Stage::Input, "input_ids" | "targets") => Some(place),
            (Stage::Input, _) => None,
            (_, "logits") => few.get(place / width).copied(),
            _ => Some(place / width),
        };
        sampled_elements(all, count)
            .map(|place| owner(token(place)?))
            .collect()
    }

    /// The rank that has each kept element of a parameter; `None` if each rank has all of them.
    pub(crate) fn owners(&self, stage: Stage, name: &str) -> Option<&[f32]> {
        let rank = self.header.rank.as_ref()?;
        let is_in_parts = rank.in_parts.contains(&stage);
        is_in_parts
            .then(|| self.items.get(&format!("part/{name}")))?
            .map(Vec::as_slice)
    }
}

/// The path of the record of a rank: that of rank 0 has no number.
pub(crate) fn rank_path(path: &Path, rank: usize) -> PathBuf {
    match rank {
        0 => path.to_owned(),
        rank => path.with_extension(format!("rank-{rank}.safetensors")),
    }
}

/// The path of the record of rank `other`, from that of `rank`.
fn sibling(path: &Path, rank: usize, other: usize) -> PathBuf {
    let stem = path.file_stem().and_then(OsStr::to_str).unwrap_or_default();
    let stem = stem.strip_suffix(&format!(".rank-{rank}")).unwrap_or(stem);
    rank_path(&path.with_file_name(format!("{stem}.safetensors")), other)
}

/// What a rank gives to sums of gradients, and receives of weights, block by block.
#[derive(Debug)]
pub(crate) struct Exchanged {
    parameters: HashMap<ParamId, Parameter>,
    /// The factor on the gradients.
    scale: f64,
    items: BTreeMap<String, Sampled>,
}

impl Exchanged {
    pub(crate) fn new(model: &Vlm, scale: f64) -> Self {
        let parameters = model.all_parameters().into_iter();
        Self {
            parameters: parameters
                .map(|(parameter, _)| (parameter.id, parameter))
                .collect(),
            scale,
            items: BTreeMap::new(),
        }
    }

    /// Adds this rank's gradient to those that it gave before.
    pub(crate) fn gives(&mut self, id: ParamId, gradient: Tensor<1>) -> vlm_models::Result<()> {
        let Some(parameter) = self.parameters.get(&id) else {
            return Ok(());
        };
        let mut sampled = parameter.sample(gradient, SAMPLES)?;
        for value in &mut sampled.values {
            *value = (f64::from(*value) / self.scale) as f32;
        }
        match self.items.get_mut(&format!("given/{}", parameter.name)) {
            Some(earlier) => {
                let pairs = earlier.values.iter_mut().zip(sampled.values);
                pairs.for_each(|(earlier, value)| *earlier += value);
            }
            None => {
                _ = self
                    .items
                    .insert(format!("given/{}", parameter.name), sampled)
            }
        }
        Ok(())
    }

    /// Keeps the weights of a block as they are received for the first time, which is for the
    /// forward pass, and for the second time, for the backward pass.
    pub(crate) fn receives(&mut self, weights: &Weights) -> vlm_models::Result<()> {
        for (id, weight) in weights {
            let Some(parameter) = self.parameters.get(id) else {
                continue;
            };
            let names = ["received", "received-again"];
            let mut names = names
                .map(|name| format!("{name}/{}", parameter.name))
                .into_iter();
            if let Some(name) = names.find(|name| !self.items.contains_key(name)) {
                let sampled = parameter.sample(weight.clone(), SAMPLES)?;
                self.items.insert(name, sampled);
            }
        }
        Ok(())
    }
}

impl Recording {
    pub(super) fn insert(&mut self, name: String, sampled: Sampled) {
        self.items.insert(name, sampled);
    }

    /// Adds this rank's gradients before they are summed over ranks.
    pub(crate) fn add_given(
        &mut self,
        parameters: &[Parameter],
        gradients: &GradientSums,
        exchanged: Option<Exchanged>,
    ) -> Result<()> {
        if let Some(exchanged) = exchanged {
            self.items.extend(exchanged.items);
            return Ok(());
        }
        for parameter in parameters {
            if let Some(gradient) = gradients.get(parameter.id) {
                let sampled = parameter.sample(gradient, SAMPLES)?;
                self.insert(format!("given/{}", parameter.name), sampled);
            }
        }
        Ok(())
    }

    /// Adds gradients of which this rank has its parts.
    pub(crate) fn add_parts(
        &mut self,
        parameters: &[Parameter],
        gradients: &GradientSums,
        (shards, device): (&Shards, &Device),
    ) -> Result<()> {
        let parts = shards.gradients(gradients, device);
        let has = |parameter: &&Parameter| gradients.is_anywhere(parameter.id);
        for parameter in parameters.iter().filter(has) {
            if let Some(sampled) = shards.sample(parameter, &parts, SAMPLES)? {
                self.insert(format!("backward/{}", parameter.name), sampled);
            }
        }
        Ok(())
    }

    /// Adds the rank of each element that is kept of parameters in parts.
    pub(crate) fn add_ranks(&mut self, parameters: &[Parameter], shards: &Shards) {
        for parameter in parameters {
            let ranks = shards.ranks_of(parameter, SAMPLES);
            let values: Vec<f32> = ranks.into_iter().map(|rank| rank as f32).collect();
            if !values.is_empty() {
                let shape = vec![parameter.elements()];
                let sampled = Sampled { shape, values };
                self.insert(format!("part/{}", parameter.name), sampled);
            }
        }
    }
}

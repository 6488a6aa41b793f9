//! A step, validation, and the proof that the cut of a batch has no effect.

use std::fmt;
use std::path::Path;

use burn::module::{Module, ParamId};
use burn::tensor::TensorData;
use serde::{Deserialize, Serialize};
use vlm_data::{Cut, DataPosition, MicroBatch, TrainingSample};
use vlm_models::{Backward, Parameter, RouterLoads, RouterLoss, Trace, Vlm, VlmError};

use crate::batch::{inputs, lines, seeds, sees};
use crate::checkpoint::Validations;
use crate::error::{Result, VlmTrainError};
use crate::groups::PolicyReport;
use crate::loss_scale::LossScale;
use crate::optimizer::{AdamW, Step};
use crate::pairs::{PreferenceReport, Reference};
use crate::passes::Passes;
use crate::ranks::Peers;
use crate::recipe::{LossRule, Recipe, TrainedParts};
use crate::record::Recording;
use crate::sums::GradientSums;

/// Steps between measurements of the share of updates without effect.
const WATCHED_EVERY: usize = 100;

/// A model in training.
#[derive(Clone, Debug)]
pub struct Trainer {
    pub(crate) model: Vlm,
    pub(crate) recipe: Recipe,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) optimizer: AdamW,
    pub(crate) steps: usize,
    pub(crate) loss_scale: Option<LossScale>,
    /// The position in the data after the last step.
    pub(crate) position: Option<DataPosition>,
    pub(crate) validations: Validations,
    /// The other ranks of the run.
    pub(crate) peers: Option<Peers>,
    pub(crate) reference: Reference,
    /// True if the trained weights are those of an adapter's folder.
    pub(crate) keeps_trained: bool,
}

/// The metrics of a step, bit-identical in each run of a recipe over the same batches on the same
/// device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// The step, from 1.
    pub step: usize,
    /// The loss before the update, in nats per labelled token, with the auxiliary loss of routers
    /// times its factor.
    pub loss: f64,
    /// The auxiliary loss of routers, before its factor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub router_loss: Option<f64>,
    /// The norm of all gradients together, before clipping.
    pub gradient_norm: f64,
    /// The factor on the peak rates.
    pub rate_factor: f64,
    /// The learning rate of the decoder.
    pub learning_rate: f64,
    /// Tokens read, without padding.
    pub tokens: usize,
    /// Labelled tokens among them.
    pub labelled: usize,
    /// The loss scale, in f16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// True if gradients overflowed in f16, so that no update was taken.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// The share of updates below the resolution of 16-bit weights without masters, which thus had
    /// no effect. It is measured in the first step after the warm-up and in every hundredth step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_updates: Option<f64>,
    /// The means of the pairs, with a loss of preferences.
    #[serde(flatten)]
    pub preference: Option<PreferenceReport>,
    /// The means of the answers, with a loss of rewarded ones.
    #[serde(flatten)]
    pub policy: Option<PolicyReport>,
}

/// The dependence of a step on the cut of its batch: the largest differences relative to the first
/// cut.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CutDifference {
    /// The difference of the loss.
    pub loss: f64,
    /// The difference of the gradient's norm.
    pub gradient_norm: f64,
    /// The norm of the gradient's difference.
    pub gradient: f64,
}

impl fmt::Display for CutDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "largest relative difference of the loss {:.1e}, of the gradient's norm {:.1e}, of the \
             gradient {:.1e}",
            self.loss, self.gradient_norm, self.gradient
        )
    }
}

/// The results of the backward passes of a batch.
pub(crate) struct Pass {
    pub(crate) loss: f64,
    pub(crate) labelled: usize,
    pub(crate) tokens: usize,
    pub(crate) gradients: GradientSums,
    pub(crate) norm: f64,
    pub(crate) router_loss: Option<f64>,
    pub(crate) preference: Option<PreferenceReport>,
    pub(crate) policy: Option<PolicyReport>,
}

impl Trainer {
    /// Prepares a checkpoint's model, which must be on a device with autodiff.
    ///
    /// # Errors
    /// [`VlmTrainError::Recipe`], [`VlmTrainError::NothingTrained`]; those of
    /// [`Vlm::with_lora`] and [`Vlm::train_weights`].
    pub fn new(model: Vlm, recipe: Recipe) -> Result<Self> {
        recipe.check()?;
        let model = match &recipe.trained {
            TrainedParts::Lora(config) => model.with_lora(config, recipe.seed)?,
            TrainedParts::Full(weights) => model.train_weights(weights)?,
        };
        // New adapters change nothing, so that the reference is the model without them.
        let at_start = recipe.keeps_reference().then(|| model.clone());
        let trainer = Self::ready(model, recipe)?;
        Ok(match at_start {
            Some(model) => trainer.with_reference(&model.without_lora()),
            None => trainer,
        })
    }

    /// As [`new`](Self::new), but starts from the adapter in a folder and the weights trained whole
    /// beside it. Its configuration, [`VlmConfig::adapter_config`], replaces the recipe's.
    ///
    /// [`VlmConfig::adapter_config`]: vlm_models::VlmConfig::adapter_config
    ///
    /// # Errors
    /// [`VlmTrainError::Recipe`]; those of [`Vlm::load_adapter`].
    pub fn from_adapter(model: Vlm, mut recipe: Recipe, folder: &Path) -> Result<Self> {
        recipe.check()?;
        let model = model.load_adapter(folder)?;
        if let Some(config) = model.adapter_config() {
            // Some that can be loaded cannot be trained.
            model.clone().adapted_layers(config)?;
            recipe.trained = TrainedParts::Lora(config.clone());
        }
        let at_start = recipe.has_reference().then(|| model.clone());
        let mut trainer = Self::ready(model, recipe)?;
        trainer.keeps_trained = true;
        Ok(match at_start {
            Some(model) => trainer.with_reference(&model),
            None => trainer,
        })
    }

    fn ready(model: Vlm, recipe: Recipe) -> Result<Self> {
        if let Some(factor) = recipe.router_loss.filter(|_| !model.has_experts()) {
            return Err(VlmTrainError::Recipe {
                key: "router_loss",
                found: factor.to_string(),
                expected: "none, for a model without experts",
            });
        }
        let parameters = model.parameters();
        if parameters.is_empty() {
            return Err(VlmTrainError::NothingTrained);
        }
        let loss_scale = recipe.loss_scale.map(LossScale::new);
        let optimizer = AdamW::new(&parameters);
        Ok(Self {
            model,
            recipe,
            parameters,
            optimizer,
            steps: 0,
            loss_scale,
            position: None,
            validations: Validations::default(),
            peers: None,
            reference: Reference::default(),
            keeps_trained: false,
        })
    }

    /// The model in its current state.
    pub fn model(&self) -> &Vlm {
        &self.model
    }

    /// The recipe of the run.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// The trained parameters.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The number of steps completed.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// The position in the data after the last step of [`run`](crate::run()), for the
    /// [`Loader`](vlm_data::Loader) that continues it.
    pub fn position(&self) -> Option<DataPosition> {
        self.position
    }

    /// Runs one step over a batch: the gradients of all its micro-batches, then one update. With
    /// several ranks, each has its shard of the batch, which may be empty.
    ///
    /// # Errors
    /// [`VlmTrainError::NoLabels`], [`VlmTrainError::Diverged`], [`VlmTrainError::Device`]; those
    /// of [`Vlm::backward`]; [`VlmTrainError::Rank`]. After an error, the model is the one before
    /// the step.
    pub fn step(&mut self, batch: &[MicroBatch]) -> Result<StepReport> {
        self.step_recording(batch, None)
    }

    /// As [`step`](Self::step), but also records intermediate results.
    pub(crate) fn step_recording(
        &mut self,
        batch: &[MicroBatch],
        recording: Option<&mut Recording>,
    ) -> Result<StepReport> {
        let pass = self.pass(batch, recording)?;
        let report = self.apply(pass)?;
        self.steps = report.step;
        Ok(report)
    }

    /// Updates the model by the gradients of a pass, in the current step.
    pub(crate) fn apply(&mut self, pass: Pass) -> Result<StepReport> {
        let recipe = &self.recipe;
        let factor = recipe.factor(self.steps);
        let mut report = StepReport {
            step: self.steps + 1,
            loss: pass.loss,
            router_loss: pass.router_loss,
            gradient_norm: pass.norm,
            rate_factor: factor,
            learning_rate: recipe.rates.decoder * factor,
            tokens: pass.tokens,
            labelled: pass.labelled,
            loss_scale: self.loss_scale.map(|scale| scale.factor),
            skipped: !pass.norm.is_finite(),
            lost_updates: None,
            preference: pass.preference,
            policy: pass.policy,
        };
        if report.skipped {
            self.loss_scale = self.loss_scale.and_then(LossScale::overflowed);
            return Ok(report);
        }
        if let Some(scale) = &mut self.loss_scale {
            scale.fitted();
        }
        let step = report.step;
        let update = Step {
            rate: factor,
            // As in torch's clip_grad_norm_.
            scale: recipe
                .max_norm
                .map_or(1.0, |most| (most / (pass.norm + 1e-6)).min(1.0)),
            is_watched: step == recipe.warmup_steps + 1 || step.is_multiple_of(WATCHED_EVERY),
        };
        let [lost, watched] = if self.shards().is_some() {
            let updated = self.update_shards(pass.gradients, update);
            updated.map_err(|failure| failure.step_error(step))?
        } else {
            let (model, lost) = self.optimizer.step(
                self.model.clone(),
                &self.parameters,
                pass.gradients,
                recipe,
                update,
            );
            self.model = model;
            self.lost_updates(&lost, update)?
        };
        report.lost_updates = (watched > 0).then(|| lost as f64 / watched as f64);
        Ok(report)
    }

    /// Loss and gradients of a batch.
    fn pass(&self, batch: &[MicroBatch], mut recording: Option<&mut Recording>) -> Result<Pass> {
        if let Some(preference) = &self.recipe.preference {
            return self.pass_over_pairs(batch, preference);
        }
        if self.recipe.policy.is_some() {
            let text = "a step with a loss of rewarded answers is over groups of sampled answers";
            return Err(VlmTrainError::Options(text.to_owned()));
        }
        let step = self.steps + 1;
        let labelled = batch.iter().map(|micro| self.labelled_part(micro));
        let labelled = labelled.collect::<vlm_models::Result<Vec<_>>>()?;
        let counts = [
            labelled.iter().map(|[_, own]| own).sum(),
            match self.leads() {
                true => labelled.iter().filter(|[all, _]| *all > 0).count(),
                false => 0,
            },
            batch.iter().map(|micro| self.own_tokens(micro)).sum(),
        ];
        let [all, counted, read] = match &self.peers {
            Some(peers) => peers.add(counts)?,
            None => counts,
        };
        if all == 0 {
            let lines = lines(batch);
            return Err(VlmTrainError::NoLabels { step, lines });
        }
        let learned = || {
            batch
                .iter()
                .zip(&labelled)
                .filter(|(_, [of_micro, _])| *of_micro > 0)
        };
        let router_loss = match self.recipe.router_loss {
            Some(factor) => Some((
                self.router_loads(learned().map(|(micro, _)| micro))?,
                factor,
            )),
            None => None,
        };
        let seen: Vec<bool> = learned().map(|(micro, _)| sees(micro)).collect();
        let (mut loss, mut passes) = (0.0, self.passes(&seen)?);
        let scale = self.loss_scale.map_or(1.0, |scale| scale.factor);
        if recording.is_some() {
            passes.record(scale);
        }
        for (micro, [of_micro, own]) in learned() {
            // Of the mean over this rank's tokens.
            let weight = match self.recipe.loss_rule {
                LossRule::Tokens => *own as f64 / all as f64,
                LossRule::MicroBatches => *own as f64 / (of_micro * counted) as f64,
            };
            let recording = recording.as_deref_mut();
            let seeds = seeds(micro, self.recipe.seed, self.steps);
            let how = Backward {
                recompute: self.recipe.recompute,
                weight: weight * scale,
                seeds: Some(&seeds),
                temperature: 1.0,
                router_loss: router_loss.as_ref().map(|(loads, factor)| RouterLoss {
                    loads,
                    factor: factor * scale,
                }),
            };
            loss += weight * self.micro_pass(micro, (how, scale), &mut passes, recording)?;
        }
        let (mut loss, gradients, norm) = self.summed(batch, (loss, passes), recording)?;
        let router_loss = router_loss.map(|(loads, factor)| (loads.loss(), factor));
        if let Some((router_loss, factor)) = router_loss {
            loss += factor * router_loss;
        }
        Ok(Pass {
            loss,
            router_loss: router_loss.map(|(loss, _)| loss),
            labelled: all,
            tokens: read,
            gradients,
            norm,
            preference: None,
            policy: None,
        })
    }

    /// True if small gradients are computed together.
    fn joins(&self) -> bool {
        burn_attention::concatenates_at_once(&self.model.device()) && self.shards().is_none()
    }

    /// Sums for the gradients of a batch's micro-batches.
    pub(crate) fn empty_sums(&self) -> GradientSums {
        let mut gradients = GradientSums::default();
        gradients.keeps_types = self.peers.is_none();
        gradients
    }

    /// The loss and gradients of a batch over all ranks, without the loss scale, and their norm.
    pub(crate) fn summed(
        &self,
        batch: &[MicroBatch],
        (mut loss, passes): (f64, Passes<'_>),
        mut recording: Option<&mut Recording>,
    ) -> Result<(f64, GradientSums, f64)> {
        let mut summed = passes.finish().map_err(|error| self.walked(error))?;
        let gradients = &mut summed.gradients;
        // Norms of experts' gradients are added over ranks, apart from the others.
        let experts = self.expert_ranks().map(|(experts, _)| experts);
        let is_shared = |id: &ParamId| experts.is_none_or(|experts| experts.axis(*id).is_none());
        let ids = || {
            self.parameters
                .iter()
                .map(|parameter| parameter.id)
                .filter(is_shared)
        };
        if self.joins() && self.peers.is_none() {
            gradients.join(ids());
        }
        if let Some(scale) = self.loss_scale.filter(|scale| scale.factor != 1.0) {
            gradients.scale(1.0 / scale.factor);
        }
        let gradients = if let Some(peers) = &self.peers {
            let device = self.model.device().inner();
            if let Some(recording) = &mut recording {
                let exchanged = summed.exchanged.take();
                recording.add_given(&self.parameters, &summed.gradients, exchanged)?;
            }
            let over_ranks = peers.sum(loss, summed, &self.parameters, &device);
            let step = self.steps + 1;
            let mut gradients;
            (loss, gradients) = over_ranks.map_err(|failure| failure.step_error(step))?;
            if self.joins() {
                gradients.join(ids());
            }
            gradients
        } else {
            summed.gradients
        };
        let norm = self.norm(&gradients, batch)?;
        if let Some(recording) = recording {
            let device = self.model.device().inner();
            let shards = self.shards().map(|(shards, _)| (shards, &device));
            recording.add_gradients(&self.parameters, &gradients, shards)?;
        }
        Ok((loss, gradients, norm))
    }

    /// The error of a pass: of the device, if what ranks do together failed.
    pub(crate) fn walked(&self, error: VlmError) -> VlmTrainError {
        match error {
            VlmError::Walk(reason) => VlmTrainError::Device {
                step: self.steps + 1,
                reason,
            },
            other => other.into(),
        }
    }

    /// The tokens of experts in a batch, over all ranks.
    fn router_loads<'a>(&self, batch: impl Iterator<Item = &'a MicroBatch>) -> Result<RouterLoads> {
        let mut passes = self.validation_passes();
        let model = passes.as_ref().and_then(Passes::model);
        // With autodiff, a backend may compute with other roundings.
        let model = model.unwrap_or_else(|| self.model.clone());
        let mut loads = RouterLoads::default();
        for micro in batch {
            let ready = self.own_batch(&model, micro)?;
            let seeds = seeds(micro, self.recipe.seed, self.steps);
            let how = Backward {
                seeds: Some(&seeds),
                ..Backward::default()
            };
            let labels = &micro.labels;
            let of_micro = match &mut passes {
                Some(passes) => {
                    passes.hears(Some(sees(micro)))?;
                    passes.run(|walk| model.router_loads(&ready, labels, how, walk))
                }
                None => model.router_loads(&ready, labels, how, &mut |_, _| ()),
            };
            loads.add(&of_micro.map_err(|error| self.walked(error))?);
        }
        if let Some(passes) = &mut passes {
            while passes.hears(None)? {
                passes.rest().map_err(|error| self.walked(error))?;
            }
        }
        let mut all = RouterLoads::default();
        self.hear(loads)?
            .iter()
            .for_each(|of_rank| all.add(of_rank));
        Ok(all)
    }

    /// Returns the mean loss of a micro-batch, and adds its gradients times the weight and the loss
    /// scale.
    fn micro_pass(
        &self,
        micro: &MicroBatch,
        (how, scale): (Backward<'_>, f64),
        passes: &mut Passes<'_>,
        recording: Option<&mut Recording>,
    ) -> Result<f64> {
        let ready = self.own_batch(&self.model, micro)?;
        let mut trace = match &recording {
            Some(recording) => recording.trace(&self.model, micro, self.token_share())?,
            None => Trace::off(),
        };
        let labels = &micro.labels;
        let model = &self.model;
        let mean = passes
            .run(|walk| model.backward_traced(&ready, labels, how, &mut trace, walk))
            .map_err(|error| self.walked(error))?;
        if let Some(recording) = recording {
            let tokens = self.token_share().zip(self.context_first());
            recording.add_pass(&self.model, (micro, &ready), tokens, (trace, scale))?;
        }
        self.expect_finite(mean, micro)?;
        Ok(mean)
    }

    /// # Errors
    /// [`VlmTrainError::Diverged`] if the mean loss of a micro-batch is not finite.
    pub(crate) fn expect_finite(&self, mean: f64, micro: &MicroBatch) -> Result<()> {
        if mean.is_finite() {
            return Ok(());
        }
        Err(VlmTrainError::Diverged {
            quantity: "loss",
            value: mean,
            step: self.steps + 1,
            lines: lines(std::slice::from_ref(micro)),
            place: self.first_not_finite(micro)?,
        })
    }

    /// The norm of a batch's gradients, finite unless the step can be skipped.
    fn norm(&self, gradients: &GradientSums, batch: &[MicroBatch]) -> Result<f64> {
        let step = self.steps + 1;
        let squares = self.squares(gradients);
        let mut squares = squares.map_err(|failure| failure.step_error(step))?;
        if let Some((_, peers)) = self.shards() {
            [squares] = peers.add_numbers([squares])?;
        }
        let norm = squares.sqrt();
        let can_skip = self
            .loss_scale
            .is_some_and(|scale| scale.overflowed().is_some());
        if norm.is_finite() || can_skip {
            return Ok(norm);
        }
        Err(VlmTrainError::Diverged {
            quantity: "gradient norm",
            value: norm,
            step,
            lines: lines(batch),
            place: "the loss is finite".to_owned(),
        })
    }

    /// Names the first activation, in the order of a forward pass, that has an infinite element or
    /// NaN, as [`Trace`] does.
    fn first_not_finite(&self, micro: &MicroBatch) -> Result<String> {
        if self.has_parts() || self.token_share().is_some() {
            let text = "no rank has all weights and tokens, so no activation was examined";
            return Ok(text.to_owned());
        }
        let model = self.model.valid();
        let mut trace = Trace::recording();
        let ready = model.batch(&inputs(micro, &model.device()))?;
        model.forward_traced(&ready, &mut trace)?;
        let blocks = (0..trace.names().count()).map(|index| format!("vision.block.{index}.out"));
        let layers = (0..trace.names().count())
            .flat_map(|index| [format!("attn.{index}.out"), format!("hidden.{index}.out")]);
        let names = std::iter::once("vision.patch_embed".to_owned())
            .chain(blocks)
            .chain(["vision.merged".to_owned(), "inputs_embeds".to_owned()])
            .chain(layers)
            .chain(["hidden.final_norm".to_owned(), "logits".to_owned()]);
        for name in names {
            let activation = trace.get(&name)?;
            let is_finite = |data: &TensorData| data.iter::<f64>().all(f64::is_finite);
            if activation.is_some_and(|data| !is_finite(data)) {
                return Ok(format!("first in {name}"));
            }
        }
        Ok("every activation is finite".to_owned())
    }

    /// Computes the loss over micro-batches, in nats per labelled token, without dropout or an
    /// update. One of them is held at a time. With several ranks, each computes its own.
    ///
    /// # Errors
    /// [`VlmTrainError::NoLabels`]; [`VlmTrainError::Data`]; those of [`Vlm::loss`].
    pub fn validate(
        &self,
        micro_batches: impl IntoIterator<Item = vlm_data::Result<MicroBatch>>,
    ) -> Result<f64> {
        let step = self.steps;
        let mut passes = self.validation_passes();
        let model = passes.as_ref().and_then(Passes::model);
        let model = model.unwrap_or_else(|| self.model.valid());
        let (mut sum, mut all, mut without) = (0.0, 0, Vec::new());
        for micro in micro_batches {
            let micro = micro.map_err(|source| VlmTrainError::Data { step, source })?;
            let [labelled, own] = self.labelled_part(&micro)?;
            if labelled == 0 {
                without.extend(micro.lines);
                continue;
            }
            let ready = self.own_batch(&model, &micro)?;
            let mean = match &mut passes {
                Some(passes) => {
                    passes.hears(Some(sees(&micro)))?;
                    let how = Backward::default();
                    let labels = &micro.labels;
                    let mean = passes.run(|walk| model.backward(&ready, labels, how, walk));
                    mean.map_err(|error| self.walked(error))?
                }
                None => {
                    let mean = model.loss(&ready, &micro.labels)?.try_into_scalar::<f32>();
                    let mean = mean.map_err(|error| VlmTrainError::Device {
                        step,
                        reason: error.to_string(),
                    })?;
                    f64::from(mean)
                }
            };
            sum += mean * own as f64;
            all += own;
        }
        if let Some(passes) = &mut passes {
            while passes.hears(None)? {
                passes.rest().map_err(|error| self.walked(error))?;
            }
        }
        if let Some(peers) = &self.peers {
            (sum, all) = peers.add_loss(sum, all)?;
        }
        if all == 0 {
            let lines = crate::batch::listed(&without);
            return Err(VlmTrainError::NoLabels { step, lines });
        }
        Ok(sum / all as f64)
    }

    /// Computes a step over samples cut in four ways, without an update, and compares each with the
    /// first: all packed into one micro-batch, all padded into one, packed into several, and one
    /// sample each.
    ///
    /// # Errors
    /// Those of [`step`](Self::step) and [`MicroBatch::new`].
    pub fn prove_cut(&self, samples: &[TrainingSample]) -> Result<CutDifference> {
        let rooms = |cut| samples.iter().map(move |sample| sample.room(cut));
        let packed = rooms(Cut::Packed { tokens: 0 });
        let all: usize = packed.clone().sum();
        let most = packed.max().unwrap_or(0);
        let longest = rooms(Cut::Padded { tokens: 0 }).max().unwrap_or(0);
        let cuts = [
            Cut::Packed { tokens: all },
            Cut::Padded {
                tokens: longest * samples.len(),
            },
            Cut::Packed {
                tokens: most.max(all.div_ceil(2)),
            },
            // Each sample in a separate micro-batch.
            Cut::Padded { tokens: longest },
        ];
        let cut = |(index, cut): (usize, &Cut)| {
            let parts = match index {
                3 => (0..samples.len()).map(|sample| vec![sample]).collect(),
                _ => cut.divide(&rooms(*cut).collect::<Vec<_>>()),
            };
            let micro = |part: Vec<usize>| {
                let part = part.into_iter().map(|sample| samples[sample].clone());
                MicroBatch::new(part.collect(), *cut)
            };
            parts.into_iter().map(micro).collect::<Result<Vec<_>, _>>()
        };
        let cuts = cuts
            .iter()
            .enumerate()
            .map(cut)
            .collect::<Result<Vec<_>, _>>();
        let step = self.steps + 1;
        let cuts = cuts.map_err(|source| VlmTrainError::Data { step, source })?;
        self.compare_cuts(&cuts)
    }

    /// Computes a step over one batch with several cuts and compares each with the first.
    fn compare_cuts(&self, cuts: &[Vec<MicroBatch>]) -> Result<CutDifference> {
        let mut largest = CutDifference::default();
        let mut cuts = cuts.iter();
        let Some(first) = cuts.next() else {
            return Ok(largest);
        };
        let step = self.steps + 1;
        let failed = |reason| VlmTrainError::Device { step, reason };
        let first = self.pass(first, None)?;
        for cut in cuts {
            let pass = self.pass(cut, None)?;
            let relative = |left: f64, right: f64| (left - right).abs() / left.abs().max(1e-30);
            let mut difference = pass.gradients;
            difference.scale(-1.0);
            for parameter in &self.parameters {
                if let Some(gradient) = first.gradients.get(parameter.id) {
                    difference.add(parameter.id, gradient);
                }
            }
            let ids = self.parameters.iter().map(|parameter| parameter.id);
            let apart = difference.norm(ids).map_err(failed)? / first.norm.max(1e-30);
            largest = CutDifference {
                loss: largest.loss.max(relative(first.loss, pass.loss)),
                gradient_norm: largest.gradient_norm.max(relative(first.norm, pass.norm)),
                gradient: largest.gradient.max(apart),
            };
        }
        Ok(largest)
    }
}

//! Steps over pairs of answers.
//!
//! The loss of a sample depends on the log-probabilities of its answers, sums over tokens. Its
//! gradient is thus a weight for each token's loss, and a micro-batch holds both answers of a sample:
//! each is one forward pass of the reference without a graph, and one pass of the model.

use std::fmt;
use std::ops::Range;

use burn::module::Module;
use serde::{Deserialize, Serialize};
use vlm_data::text::IGNORED;
use vlm_data::{MicroBatch, SampleRows};
use vlm_models::{Backward, Trace, Vlm};

use crate::batch::{inputs, lines, seeds, sees};
use crate::error::{Result, VlmTrainError};
use crate::passes::Passes;
use crate::preference::{AnswerScores, Preference};
use crate::trainer::{Pass, Trainer};

/// The model that scores are relative to.
#[derive(Clone, Debug, Default)]
pub(crate) enum Reference {
    /// The model without its adapters, or none.
    #[default]
    Base,
    /// Another one, without a graph.
    Model(Box<Vlm>),
}

/// The means of a batch of preferences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PreferenceReport {
    /// The reward of the preferred, or good, answers: beta times their scores.
    pub reward_chosen: f64,
    /// The reward of the other, or bad, answers.
    pub reward_rejected: f64,
    /// The difference of the two.
    pub reward_margin: f64,
    /// The share of pairs whose preferred answer has the larger reward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward_accuracy: Option<f64>,
    /// The log-probability of the preferred, or good, answers, in nats.
    pub logp_chosen: f64,
    /// The log-probability of the other, or bad, answers.
    pub logp_rejected: f64,
    /// The mean loss of the preferred answers' tokens, if it is a part of the loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nll: Option<f64>,
    /// The mean log-ratio of marked answers to other prompts, at least 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl: Option<f64>,
}

impl fmt::Display for PreferenceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "margin {:.3}", self.reward_margin)?;
        match self.reward_accuracy {
            Some(accuracy) => write!(f, " accuracy {:.0} %", 100.0 * accuracy),
            None => Ok(()),
        }
    }
}

/// A labelled token.
#[derive(Clone, Copy, Debug)]
struct LabelPlace {
    sample: usize,
    /// 0 for the first sequence of the sample, 1 for the second.
    side: usize,
    in_answer: bool,
}

/// Sums over samples.
#[derive(Clone, Copy, Debug, Default)]
struct PreferenceSums {
    loss: f64,
    nll: f64,
    /// Of preferred or good answers, and of the others: rewards, log-probabilities, answers.
    rewards: [f64; 2],
    logps: [f64; 2],
    counts: [f64; 2],
    won: f64,
}

impl PreferenceSums {
    fn add(&mut self, preference: &Preference, of: &AnswerScores, mismatch: f64) -> [f64; 2] {
        let value = preference.value(of, mismatch);
        self.loss += value.loss;
        let row = preference.loss.row();
        let answers = match of.is_good {
            Some(is_good) => &[(0, usize::from(!is_good))][..],
            None => &[(0, 0), (1, 1)],
        };
        for &(answer, kind) in answers {
            self.rewards[kind] += value.rewards[answer];
            self.logps[kind] += of.model[answer] / row.logged_length(of.tokens[answer]);
            self.counts[kind] += 1.0;
        }
        self.won += f64::from(u8::from(value.rewards[0] > value.rewards[1]));
        value.slopes
    }

    /// The sums over all ranks.
    fn over_ranks(self, trainer: &Trainer) -> Result<Self> {
        let Some(peers) = &trainer.peers else {
            return Ok(self);
        };
        let ([r0, r1], [l0, l1], [c0, c1]) = (self.rewards, self.logps, self.counts);
        let own = [self.loss, self.nll, r0, r1, l0, l1, c0, c1, self.won];
        let [loss, nll, r0, r1, l0, l1, c0, c1, won] = peers.add_numbers(own)?;
        Ok(Self {
            loss,
            nll,
            rewards: [r0, r1],
            logps: [l0, l1],
            counts: [c0, c1],
            won,
        })
    }

    fn report(&self, preference: &Preference, imitated: usize, mismatch: f64) -> PreferenceReport {
        let mean = |sums: [f64; 2], kind: usize| sums[kind] / self.counts[kind].max(1.0);
        let [chosen, rejected] = [mean(self.rewards, 0), mean(self.rewards, 1)];
        let is_of_marks = preference.loss.is_of_marks();
        PreferenceReport {
            reward_chosen: chosen,
            reward_rejected: rejected,
            reward_margin: chosen - rejected,
            reward_accuracy: (!is_of_marks).then(|| self.won / self.counts[0].max(1.0)),
            logp_chosen: mean(self.logps, 0),
            logp_rejected: mean(self.logps, 1),
            nll: (preference.imitation > 0.0).then(|| self.nll / imitated.max(1) as f64),
            kl: is_of_marks.then_some(mismatch),
        }
    }
}

impl Trainer {
    /// Sets the model that the scores of a loss of preferences are relative to, instead of the one
    /// at the start.
    #[must_use]
    pub fn with_reference(mut self, model: &Vlm) -> Self {
        self.reference = Reference::Model(Box::new(model.valid()));
        self
    }

    /// Loss and gradients of a batch of pairs.
    pub(crate) fn pass_over_pairs(
        &self,
        batch: &[MicroBatch],
        preference: &Preference,
    ) -> Result<Pass> {
        batch.iter().try_for_each(expect_pairs)?;
        let places: Vec<_> = batch.iter().map(label_places).collect();
        let is_imitated = |place: &&LabelPlace| place.side == 0;
        let imitated = places.iter().flatten().filter(is_imitated).count();
        let mut counts = [
            batch.iter().map(|micro| micro.pairs.len()).sum(),
            imitated,
            places.iter().map(Vec::len).sum(),
            batch.iter().map(|micro| self.own_tokens(micro)).sum(),
        ];
        if let Some(peers) = &self.peers {
            counts = peers.add(counts)?;
        }
        let [samples, imitated, labelled, read] = counts;
        if samples == 0 {
            let (step, lines) = (self.steps + 1, lines(batch));
            return Err(VlmTrainError::NoLabels { step, lines });
        }
        let references = batch.iter().zip(&places);
        let references = references.map(|(micro, places)| self.reference_losses(micro, places));
        let references = references.collect::<Result<Vec<_>>>()?;
        let mut mismatch = 0.0;
        if preference.loss.is_of_marks() {
            let mut scores = Vec::new();
            let model = self.model.valid();
            for ((micro, places), references) in batch.iter().zip(&places).zip(&references) {
                scores.extend(scored(&losses(&model, micro)?, references, places, micro));
            }
            mismatch = self.mismatch(&scores)?;
        }
        let seen: Vec<bool> = batch.iter().map(sees).collect();
        let mut passes = self.passes(&seen)?;
        let mut sums = PreferenceSums::default();
        let scale = self.loss_scale.map_or(1.0, |scale| scale.factor);
        let imitation = preference.imitation / imitated.max(1) as f64;
        for ((micro, places), references) in batch.iter().zip(&places).zip(&references) {
            let mut weigh = |losses: &[f32]| -> Vec<f32> {
                let scores = scored(losses, references, places, micro);
                let slope = |of: &AnswerScores| sums.add(preference, of, mismatch);
                let slopes: Vec<[f64; 2]> = scores.iter().map(slope).collect();
                let weights = losses.iter().zip(places).map(|(loss, place)| {
                    let mut weight = 0.0;
                    if place.in_answer {
                        // The loss of a token is its negative log-probability.
                        weight -= slopes[place.sample][place.side] / samples as f64;
                    }
                    if place.side == 0 {
                        sums.nll += f64::from(*loss);
                        weight += imitation;
                    }
                    (weight * scale) as f32
                });
                weights.collect()
            };
            self.weighed_pass(micro, &mut weigh, &mut passes)?;
        }
        let loss = sums.loss / samples as f64 + imitation * sums.nll;
        let (loss, gradients, norm) = self.summed(batch, (loss, passes), None)?;
        let sums = sums.over_ranks(self)?;
        Ok(Pass {
            loss,
            labelled,
            tokens: read,
            gradients,
            norm,
            router_loss: None,
            policy: None,
            preference: Some(sums.report(preference, imitated, mismatch)),
        })
    }

    /// Adds the gradients of a micro-batch whose tokens' losses have the weights of a function.
    pub(crate) fn weighed_pass(
        &self,
        micro: &MicroBatch,
        weigh: &mut dyn FnMut(&[f32]) -> Vec<f32>,
        passes: &mut Passes<'_>,
    ) -> Result<()> {
        let how = Backward {
            recompute: self.recipe.recompute,
            seeds: Some(&seeds(micro, self.recipe.seed, self.steps)),
            temperature: self.recipe.policy.map_or(1.0, |policy| policy.temperature),
            ..Backward::default()
        };
        let ready = self.model.batch(&inputs(micro, &self.model.device()))?;
        let (labels, mut trace) = (&micro.labels, Trace::off());
        let model = &self.model;
        let mean = passes
            .run(|walk| model.backward_weighed(&ready, labels, how, weigh, &mut trace, walk))
            .map_err(|error| self.walked(error))?;
        self.expect_finite(mean, micro)
    }

    /// The losses of a micro-batch's labelled tokens by the reference; zeros without one.
    fn reference_losses(&self, micro: &MicroBatch, places: &[LabelPlace]) -> Result<Vec<f32>> {
        let has_reference = |preference: &Preference| preference.loss.has_reference();
        if !self.recipe.preference.as_ref().is_some_and(has_reference) {
            return Ok(vec![0.0; places.len()]);
        }
        losses(&self.reference_model(), micro)
    }

    /// The model that a loss is relative to, without a graph.
    pub(crate) fn reference_model(&self) -> Vlm {
        match &self.reference {
            Reference::Base => self.model.valid().without_lora(),
            Reference::Model(model) => (**model).clone(),
        }
    }

    /// The mean log-ratio of the second answers, which are those of other records, over all ranks;
    /// at least 0.
    fn mismatch(&self, scores: &[AnswerScores]) -> Result<f64> {
        let ratios = scores.iter().map(|of| of.model[1] - of.reference[1]);
        let mut sums = [ratios.sum(), scores.len() as f64];
        if let Some(peers) = &self.peers {
            sums = peers.add_numbers(sums)?;
        }
        let [sum, count] = sums;
        Ok((sum / count.max(1.0)).max(0.0))
    }

    /// Computes the loss of preferences and its means over micro-batches, without dropout or an
    /// update. One of them is held at a time. With several ranks, each computes its own.
    ///
    /// # Errors
    /// [`VlmTrainError::NoLabels`] without a pair, or for a recipe without a loss of preferences;
    /// [`VlmTrainError::Options`] for samples of one answer; [`VlmTrainError::Data`]; those of [`Vlm::token_losses`].
    pub fn validate_pairs(
        &self,
        micro_batches: impl IntoIterator<Item = vlm_data::Result<MicroBatch>>,
    ) -> Result<(f64, PreferenceReport)> {
        let (step, model) = (self.steps, self.model.valid());
        let (mut scores, mut nll, mut imitated) = (Vec::new(), 0.0, 0);
        for micro in micro_batches {
            let micro = micro.map_err(|source| VlmTrainError::Data { step, source })?;
            expect_pairs(&micro)?;
            let places = label_places(&micro);
            let references = self.reference_losses(&micro, &places)?;
            let found = losses(&model, &micro)?;
            for (loss, _) in found
                .iter()
                .zip(&places)
                .filter(|(_, place)| place.side == 0)
            {
                nll += f64::from(*loss);
                imitated += 1;
            }
            scores.extend(scored(&found, &references, &places, &micro));
        }
        let mut all = [scores.len(), imitated];
        if let Some(peers) = &self.peers {
            all = peers.add(all)?;
        }
        let ([samples, imitated], Some(preference)) = (all, &self.recipe.preference) else {
            let lines = String::new();
            return Err(VlmTrainError::NoLabels { step, lines });
        };
        if samples == 0 {
            let lines = String::new();
            return Err(VlmTrainError::NoLabels { step, lines });
        }
        let mismatch = match preference.loss.is_of_marks() {
            true => self.mismatch(&scores)?,
            false => 0.0,
        };
        let mut sums = PreferenceSums {
            nll,
            ..PreferenceSums::default()
        };
        for of in &scores {
            sums.add(preference, of, mismatch);
        }
        let sums = sums.over_ranks(self)?;
        let imitation = preference.imitation * sums.nll / imitated.max(1) as f64;
        let loss = sums.loss / samples as f64 + imitation;
        Ok((loss, sums.report(preference, imitated, mismatch)))
    }
}

/// # Errors
/// [`VlmTrainError::Options`] for sequences that are not in pairs.
fn expect_pairs(micro: &MicroBatch) -> Result<()> {
    let (sequences, pairs) = (micro.lines.len(), micro.pairs.len());
    if sequences == 2 * pairs {
        return Ok(());
    }
    Err(VlmTrainError::Options(format!(
        "a loss of preferences is of samples with two answers, and a micro-batch has {sequences} \
         sequences in {pairs} pairs; read the data with its answers"
    )))
}

/// The losses of a micro-batch's labelled tokens, without a graph.
fn losses(model: &Vlm, micro: &MicroBatch) -> Result<Vec<f32>> {
    let ready = model.batch(&inputs(micro, &model.device()))?;
    Ok(model.token_losses(&ready, &micro.labels)?)
}

/// The labelled tokens of a micro-batch, in order.
fn label_places(micro: &MicroBatch) -> Vec<LabelPlace> {
    let ranges: Vec<Range<usize>> = match &micro.rows {
        SampleRows::Packed { cu_seqlens } => {
            let pairs = cu_seqlens.windows(2);
            pairs.map(|pair| pair[0]..pair[1]).collect()
        }
        SampleRows::Padded { rows, .. } => {
            let length = micro.input_ids.len() / (*rows).max(1);
            let row = |row| row * length..(row + 1) * length;
            (0..*rows).map(row).collect()
        }
    };
    let of_sequence = |(sequence, range): (usize, Range<usize>)| {
        let (sample, side) = (sequence / 2, sequence % 2);
        let start = micro.pairs.get(sample).map_or(0, |pair| pair.answers[side]);
        let labelled = range.filter(|token| micro.labels[*token] != IGNORED);
        labelled.map(move |token| LabelPlace {
            sample,
            side,
            in_answer: token >= start,
        })
    };
    ranges
        .into_iter()
        .enumerate()
        .flat_map(of_sequence)
        .collect()
}

/// The log-probabilities of a micro-batch's answers, from the losses of its tokens by the model and
/// by the reference.
fn scored(
    losses: &[f32],
    references: &[f32],
    places: &[LabelPlace],
    micro: &MicroBatch,
) -> Vec<AnswerScores> {
    let mut scores: Vec<AnswerScores> = micro
        .pairs
        .iter()
        .map(|pair| AnswerScores {
            model: [0.0; 2],
            reference: [0.0; 2],
            tokens: [0; 2],
            is_good: pair.is_good,
        })
        .collect();
    let tokens = losses.iter().zip(references).zip(places);
    for ((loss, reference), place) in tokens.filter(|(_, place)| place.in_answer) {
        let (of, side) = (&mut scores[place.sample], place.side);
        of.model[side] -= f64::from(*loss);
        of.reference[side] -= f64::from(*reference);
        of.tokens[side] += 1;
    }
    scores
}

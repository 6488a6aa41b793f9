//! Steps over groups of rewarded answers.
//!
//! The answers to a prompt are sequences of one micro-batch, or of several, and see the same pictures.
//! The first update's ratios are to the log-probabilities that its own passes compute, and so exactly
//! 1; those of later updates are to the same ones.

use std::fmt;

use serde::{Deserialize, Serialize};
use vlm_data::text::IGNORED;
use vlm_data::{Cut, MicroBatch, TrainingSample};

use crate::batch::{inputs, lines, sees};
use crate::error::{Result, VlmTrainError};
use crate::policy::{Counts, Policy, Spread, TokenScores};
use crate::trainer::{Pass, StepReport, Trainer};

/// A prompt with answers that a model sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct AnswerGroup {
    /// The prompt, up to the first token of an answer.
    pub prompt: TrainingSample,
    /// The answers.
    pub answers: Vec<RewardedAnswer>,
}

/// An answer and its reward.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RewardedAnswer {
    /// The tokens, with that which ends it; without any, it counts with its reward alone.
    pub tokens: Vec<i64>,
    /// The log-probabilities of the tokens as they were sampled; empty if unknown.
    pub log_probabilities: Vec<f32>,
    /// The reward.
    pub reward: f64,
    /// True if it reached the limit of tokens.
    pub is_cut: bool,
}

/// The means of a step over rewarded answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PolicyReport {
    /// The mean reward.
    pub reward: f64,
    /// The standard deviation of all rewards.
    pub reward_std: f64,
    /// The share of groups whose rewards are equal, and have no gradient but the reference's.
    pub groups_without_signal: f64,
    /// The mean number of tokens of an answer.
    pub answer_tokens: f64,
    /// The share of answers that reached the limit of tokens.
    pub answers_cut: f64,
    /// The entropy of a token, estimated by the sampled ones: their mean negative log-probability.
    pub entropy: f64,
    /// The mean divergence from the reference per token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl: Option<f64>,
    /// The share of tokens whose ratio is clipped from below.
    pub clipped_low: f64,
    /// The share of tokens whose ratio is clipped from above.
    pub clipped_high: f64,
    /// The least ratio of a token's probability to that before the first update.
    pub ratio_min: f64,
    /// The largest one.
    pub ratio_max: f64,
    /// The largest difference of a token's log-probability in the first update's pass from that as
    /// it was sampled; 0 if all have the same bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampled_apart: Option<f64>,
}

impl fmt::Display for PolicyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (reward, std) = (self.reward, self.reward_std);
        write!(f, "reward {reward:.3} (std {std:.3})")?;
        match 100.0 * self.groups_without_signal {
            0.0 => Ok(()),
            share => write!(f, ", equal in {share:.0} % of groups"),
        }
    }
}

impl PolicyReport {
    /// The means of updates, with those of the next one, which has a share of them.
    pub(crate) fn and(self, next: Self, share: f64) -> Self {
        let mean = |one: f64, next: f64| one + (next - one) * share;
        Self {
            entropy: mean(self.entropy, next.entropy),
            kl: both(self.kl, next.kl, mean),
            clipped_low: mean(self.clipped_low, next.clipped_low),
            clipped_high: mean(self.clipped_high, next.clipped_high),
            ratio_min: self.ratio_min.min(next.ratio_min),
            ratio_max: self.ratio_max.max(next.ratio_max),
            ..self
        }
    }
}

/// What a rank says of its groups.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct BatchFacts {
    rewards: Spread,
    groups: f64,
    without_signal: f64,
    cut: f64,
    /// Tokens of answers, and all that are read.
    answer_tokens: usize,
    read: usize,
}

impl BatchFacts {
    fn and(self, other: &Self) -> Self {
        Self {
            rewards: self.rewards.and(other.rewards),
            groups: self.groups + other.groups,
            without_signal: self.without_signal + other.without_signal,
            cut: self.cut + other.cut,
            answer_tokens: self.answer_tokens + other.answer_tokens,
            read: self.read + other.read,
        }
    }
}

/// What a rank says of the tokens of an update.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct TokenSums {
    loss: f64,
    nll: f64,
    kl: f64,
    clipped: [f64; 2],
    /// The least and the largest ratio, if the rank has tokens.
    ratios: Option<[f64; 2]>,
    /// The largest difference from a log-probability as it was sampled.
    sampled_apart: Option<f64>,
}

/// The larger one, where NaN is above all.
fn larger(one: f64, other: f64) -> f64 {
    if one > other || one.is_nan() {
        one
    } else {
        other
    }
}

/// What two values give, or the one that is there.
pub(crate) fn both<T>(one: Option<T>, other: Option<T>, join: impl FnOnce(T, T) -> T) -> Option<T> {
    match (one, other) {
        (Some(one), Some(other)) => Some(join(one, other)),
        (one, other) => one.or(other),
    }
}

impl TokenSums {
    fn and(self, other: &Self) -> Self {
        let [low, high] = [0, 1].map(|side| self.clipped[side] + other.clipped[side]);
        Self {
            loss: self.loss + other.loss,
            nll: self.nll + other.nll,
            kl: self.kl + other.kl,
            clipped: [low, high],
            ratios: both(self.ratios, other.ratios, |[a, b], [c, d]| {
                [a.min(c), b.max(d)]
            }),
            sampled_apart: both(self.sampled_apart, other.sampled_apart, larger),
        }
    }
}

/// The sequences of groups in micro-batches.
struct GroupBatch {
    micro_batches: Vec<MicroBatch>,
    /// The answers of each micro-batch's sequences.
    sequences: Vec<Vec<Sequence>>,
    facts: BatchFacts,
}

/// An answer in a micro-batch.
struct Sequence {
    advantage: f64,
    tokens: usize,
    sampled: Vec<f32>,
}

impl GroupBatch {
    /// The slopes of a micro-batch's loss by the log-probabilities of its tokens, from their losses
    /// now, before the first update and by the reference. Adds to the sums.
    fn slopes(
        &self,
        number: usize,
        policy: &Policy,
        (losses, [before, reference]): (&[f32], [Option<&[f32]>; 2]),
        sums: &mut TokenSums,
    ) -> Vec<f64> {
        let places = self.sequences[number].iter().flat_map(|sequence| {
            (0..sequence.tokens).map(move |token| (sequence, sequence.sampled.get(token)))
        });
        let slope = |(index, ((sequence, sampled), nll)): (usize, ((&Sequence, _), &f32))| {
            let sampled: Option<&f32> = sampled;
            let of = |losses: Option<&[f32]>| -f64::from(losses.map_or(*nll, |of| of[index]));
            let value = policy.value(&TokenScores {
                model: of(None),
                before: of(before),
                reference: of(reference),
                advantage: sequence.advantage,
            });
            let weight = policy.weight(&Counts {
                own: sequence.tokens,
                tokens: self.facts.answer_tokens,
                answers: self.facts.rewards.count as usize,
                limit: policy.max_new,
            });
            *sums = sums.and(&TokenSums {
                loss: weight * value.loss,
                nll: f64::from(*nll),
                kl: value.kl,
                clipped: value
                    .clipped
                    .map(|is_clipped| f64::from(u8::from(is_clipped))),
                ratios: Some([value.ratio; 2]),
                sampled_apart: sampled.map(|sampled| f64::from((sampled + nll).abs())),
            });
            weight * value.slope
        };
        places.zip(losses).enumerate().map(slope).collect()
    }
}

impl Trainer {
    /// Runs a step over groups of rewarded answers: as many updates as the policy says, at the rate
    /// of one step. With several ranks, each has groups of its own, or none. Returns the report of
    /// each update.
    ///
    /// # Errors
    /// [`VlmTrainError::Options`] for a recipe without a policy, a prompt without a token and an
    /// answer that exceeds a micro-batch; those of [`step`](Self::step), where after an update the
    /// model is that of the last one.
    pub fn step_over_groups(
        &mut self,
        groups: &[AnswerGroup],
        cut: Cut,
    ) -> Result<Vec<StepReport>> {
        let Some(policy) = self.recipe.policy else {
            let text = "the recipe has no loss of rewarded answers";
            return Err(VlmTrainError::Options(text.to_owned()));
        };
        let batch = self.batch_of_groups(groups, cut, &policy)?;
        let references = self.references(&batch, &policy)?;
        let (mut before, mut reports) = (None, Vec::with_capacity(policy.updates));
        for _update in 0..policy.updates {
            let (pass, losses) =
                self.pass_over_groups(&batch, &policy, &references, before.as_deref())?;
            before.get_or_insert(losses);
            reports.push(self.apply(pass)?);
        }
        self.steps += 1;
        Ok(reports)
    }

    /// Joins the answers to micro-batches, and computes their advantages.
    fn batch_of_groups(
        &self,
        groups: &[AnswerGroup],
        cut: Cut,
        policy: &Policy,
    ) -> Result<GroupBatch> {
        let rewards_of = |group: &AnswerGroup| -> Vec<f64> {
            group.answers.iter().map(|answer| answer.reward).collect()
        };
        let answers = || groups.iter().flat_map(|group| &group.answers);
        let is_equal = |group: &&AnswerGroup| {
            let rewards = rewards_of(group);
            rewards.iter().all(|reward| *reward == rewards[0])
        };
        let mut own = BatchFacts {
            rewards: Spread::of(&answers().map(|answer| answer.reward).collect::<Vec<_>>()),
            groups: groups.len() as f64,
            without_signal: groups.iter().filter(is_equal).count() as f64,
            cut: answers().filter(|answer| answer.is_cut).count() as f64,
            answer_tokens: answers().map(|answer| answer.tokens.len()).sum(),
            read: 0,
        };
        let (mut sequences, mut samples) = (Vec::new(), Vec::new());
        for (number, group) in groups.iter().enumerate() {
            if group.prompt.text.input_ids.is_empty() {
                let line = group.prompt.line;
                let text = format!("the prompt at line {line} has no token, so no answer follows");
                return Err(VlmTrainError::Options(text));
            }
            for (place, answer) in group.answers.iter().enumerate() {
                if !answer.tokens.is_empty() {
                    samples.push(answered(&group.prompt, &answer.tokens));
                    sequences.push((number, place));
                }
            }
        }
        own.read = samples.iter().map(TrainingSample::tokens).sum();
        let facts = self
            .hear(own)?
            .iter()
            .fold(BatchFacts::default(), |sum, of| sum.and(of));
        let deviation = facts.rewards.deviation();
        let advantages: Vec<Vec<f64>> = groups
            .iter()
            .map(|group| policy.advantages(&rewards_of(group), deviation))
            .collect();
        let lengths: Vec<usize> = samples.iter().map(TrainingSample::tokens).collect();
        let mut batch = GroupBatch {
            micro_batches: Vec::new(),
            sequences: Vec::new(),
            facts,
        };
        let prompts: Vec<&TrainingSample> = groups.iter().map(|group| &group.prompt).collect();
        let mut samples: Vec<_> = samples.into_iter().map(Some).collect();
        for part in cut.divide(&lengths) {
            let of = |index: &usize| {
                let (group, place) = sequences[*index];
                let answer = &groups[group].answers[place];
                Sequence {
                    advantage: advantages[group][place],
                    tokens: answer.tokens.len(),
                    sampled: answer.log_probabilities.clone(),
                }
            };
            batch.sequences.push(part.iter().map(of).collect());
            let taken = part.iter().filter_map(|index| {
                let (group, _) = sequences[*index];
                Some((group, samples[*index].take()?))
            });
            let step = self.steps + 1;
            let micro = joined(taken.collect(), &prompts, cut, step)?;
            batch.micro_batches.push(micro);
        }
        Ok(batch)
    }

    /// The losses of all tokens of answers by the reference; none without one.
    fn references(&self, batch: &GroupBatch, policy: &Policy) -> Result<Vec<Vec<f32>>> {
        if policy.beta == 0.0 {
            return Ok(Vec::new());
        }
        let model = self.reference_model();
        let losses = |micro: &MicroBatch| {
            let ready = model.batch(&inputs(micro, &model.device()))?;
            Ok(model.tempered_losses(&ready, &micro.labels, policy.temperature)?)
        };
        batch.micro_batches.iter().map(losses).collect()
    }

    /// Loss and gradients of an update, and the losses of its tokens.
    fn pass_over_groups(
        &self,
        batch: &GroupBatch,
        policy: &Policy,
        references: &[Vec<f32>],
        before: Option<&[Vec<f32>]>,
    ) -> Result<(Pass, Vec<Vec<f32>>)> {
        let (micro_batches, facts) = (&batch.micro_batches, &batch.facts);
        if facts.answer_tokens == 0 {
            let (step, lines) = (self.steps + 1, lines(micro_batches));
            return Err(VlmTrainError::NoLabels { step, lines });
        }
        let seen: Vec<bool> = micro_batches.iter().map(sees).collect();
        let mut passes = self.passes(&seen)?;
        let scale = self.loss_scale.map_or(1.0, |scale| scale.factor);
        let (mut sums, mut found) = (TokenSums::default(), Vec::new());
        for (number, micro) in micro_batches.iter().enumerate() {
            let others = [before, Some(references)];
            let others = others.map(|of| of.and_then(|of| of.get(number)).map(Vec::as_slice));
            let mut weigh = |losses: &[f32]| -> Vec<f32> {
                found.push(losses.to_vec());
                let slopes = batch.slopes(number, policy, (losses, others), &mut sums);
                // The loss of a token is its negative log-probability.
                let weight = |slope: f64| (-slope * scale) as f32;
                slopes.into_iter().map(weight).collect()
            };
            self.weighed_pass(micro, &mut weigh, &mut passes)?;
        }
        let loss = sums.loss;
        let (loss, gradients, norm) = self.summed(micro_batches, (loss, passes), None)?;
        let sums = self
            .hear(sums)?
            .iter()
            .fold(TokenSums::default(), |all, of| all.and(of));
        let pass = Pass {
            loss,
            labelled: facts.answer_tokens,
            tokens: facts.read,
            gradients,
            norm,
            router_loss: None,
            preference: None,
            policy: Some(report(facts, &sums, policy)),
        };
        Ok((pass, found))
    }
}

/// The report of an update.
fn report(facts: &BatchFacts, sums: &TokenSums, policy: &Policy) -> PolicyReport {
    let of_tokens = |sum: f64| sum / facts.answer_tokens.max(1) as f64;
    let answers = facts.rewards.count.max(1.0);
    let [ratio_min, ratio_max] = sums.ratios.unwrap_or([1.0; 2]);
    PolicyReport {
        reward: facts.rewards.mean,
        reward_std: facts.rewards.deviation(),
        groups_without_signal: facts.without_signal / facts.groups.max(1.0),
        answer_tokens: facts.answer_tokens as f64 / answers,
        answers_cut: facts.cut / answers,
        entropy: of_tokens(sums.nll),
        kl: (policy.beta > 0.0).then(|| of_tokens(sums.kl)),
        clipped_low: of_tokens(sums.clipped[0]),
        clipped_high: of_tokens(sums.clipped[1]),
        ratio_min,
        ratio_max,
        sampled_apart: sums.sampled_apart,
    }
}

/// Joins answers, each with the number of its prompt, in the order of the prompts. Those to one see
/// the same pictures, which are given once.
pub(crate) fn joined(
    answers: Vec<(usize, TrainingSample)>,
    prompts: &[&TrainingSample],
    cut: Cut,
    step: usize,
) -> Result<MicroBatch> {
    let (mut last, mut all) = (None, [0; 2]);
    let mut shown = [Vec::new(), Vec::new()];
    let mut samples = Vec::with_capacity(answers.len());
    for (prompt, mut sample) in answers {
        let grids = [sample.image_grids.len(), sample.video_grids.len()];
        if last != Some(prompt) {
            last = Some(prompt);
            let prompt = prompts[prompt];
            sample.image_patches.clone_from(&prompt.image_patches);
            sample.video_patches.clone_from(&prompt.video_patches);
            all = [0, 1].map(|kind| all[kind] + grids[kind]);
        }
        for kind in [0, 1] {
            shown[kind].extend(all[kind] - grids[kind]..all[kind]);
        }
        samples.push(sample);
    }
    let joined = MicroBatch::new(samples, cut);
    let mut micro = joined.map_err(|source| VlmTrainError::Data { step, source })?;
    micro.shown = Some(shown);
    Ok(micro)
}

/// The prompt with an answer, which is labelled, without its patches.
pub(crate) fn answered(prompt: &TrainingSample, answer: &[i64]) -> TrainingSample {
    let mut text = prompt.text.clone();
    text.labels = vec![IGNORED; text.input_ids.len()];
    text.labels.extend(answer);
    text.input_ids.extend(answer);
    TrainingSample {
        line: prompt.line,
        text,
        image_grids: prompt.image_grids.clone(),
        image_patches: Vec::new(),
        video_grids: prompt.video_grids.clone(),
        video_patches: Vec::new(),
        seconds_per_grid: prompt.seconds_per_grid.clone(),
    }
}

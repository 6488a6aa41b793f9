//! Answers that the model in training samples, and their rewards.

use std::fmt;
use std::sync::Arc;

use burn::module::Module;
use vlm_data::text::json::Json;
use vlm_data::text::{IGNORED, Message, Role, Sample};
use vlm_data::{Cut, DataSet, Fingerprint, GlobalBatch, MicroBatch, SampleEncoder, TrainingSample};
use vlm_models::{GenerateOptions, Sampling};

use crate::answer::{answer_text, before_stop, last_labelled};
use crate::batch::inputs;
use crate::error::{Result, VlmTrainError};
use crate::groups::{AnswerGroup, RewardedAnswer, answered, both, joined};
use crate::policy::Policy;
use crate::reward::{Completion, Reward, Scorer};
use crate::run::Batches;
use crate::trainer::{StepReport, Trainer};

/// Samples answers to the prompts of batches, and rewards them.
pub struct Rollouts {
    encoder: Arc<SampleEncoder>,
    /// The tokens that end an answer.
    stop: Vec<i64>,
    scorer: Scorer,
    cut: Cut,
    train: Arc<DataSet>,
    validation: Option<Arc<DataSet>>,
}

impl fmt::Debug for Rollouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut of = f.debug_struct("Rollouts");
        of.field("stop", &self.stop).finish_non_exhaustive()
    }
}

/// A prompt of the data, with what rewards its answers.
struct Asked {
    record: usize,
    prompt: TrainingSample,
    expected: String,
    /// The record's keys with the prompt's text, for a command.
    columns: Vec<(String, Json)>,
}

impl Rollouts {
    /// Prepares rewards for the answers to prompts of data; a command is started. An answer ends
    /// with a token in `stop`. No micro-batch, and no batch of answers that are sampled at once, has
    /// more tokens than `cut` says.
    ///
    /// # Errors
    /// [`VlmTrainError::Reward`] for a command that does not start; [`VlmTrainError::Options`] for a
    /// reward that the model cannot have.
    pub fn new(
        encoder: Arc<SampleEncoder>,
        stop: Vec<i64>,
        reward: &Reward,
        cut: Cut,
        train: Arc<DataSet>,
        validation: Option<Arc<DataSet>>,
    ) -> Result<Self> {
        let boxes = encoder.media().map(|media| media.boxes);
        Ok(Self {
            scorer: Scorer::new(reward, boxes)?,
            encoder,
            stop,
            cut,
            train,
            validation,
        })
    }

    /// Samples answers to a batch of prompts, and takes a step over them.
    pub(crate) fn step(&self, trainer: &mut Trainer, batch: &GlobalBatch) -> Result<StepReport> {
        let policy = policy_of(trainer)?;
        let step = trainer.steps + 1;
        let asked = self.asked(&self.train, batch, step)?;
        let answers = self.sample(trainer, &asked, policy.group, Some(&policy))?;
        let rewards = self.rewards(&asked, &answers, policy.group)?;
        let mut answers = answers
            .into_iter()
            .zip(rewards)
            .map(|(mut answer, reward)| {
                answer.reward = reward;
                answer
            });
        let groups = asked.into_iter().map(|asked| AnswerGroup {
            prompt: asked.prompt,
            answers: answers.by_ref().take(policy.group).collect(),
        });
        let groups: Vec<AnswerGroup> = groups.collect();
        let reports = trainer.step_over_groups(&groups, self.cut)?;
        whole(reports)
    }

    /// The mean reward of the likeliest answers to prompts of the validation data.
    pub(crate) fn validate(&self, trainer: &Trainer, batches: &mut Batches<'_>) -> Result<f64> {
        let step = trainer.steps;
        let set = self.validation.as_ref().unwrap_or(&self.train);
        let mut sums = [0.0; 2];
        for batch in batches {
            let batch = batch.map_err(|source| VlmTrainError::Data { step, source })?;
            let asked = self.asked(set, &batch, step)?;
            let answers = self.sample(trainer, &asked, 1, None)?;
            let rewards = self.rewards(&asked, &answers, 1)?;
            sums = [
                sums[0] + rewards.iter().sum::<f64>(),
                sums[1] + rewards.len() as f64,
            ];
        }
        if let Some(peers) = &trainer.peers {
            sums = peers.add_numbers(sums)?;
        }
        let [sum, count] = sums;
        Ok(sum / count.max(1.0))
    }

    /// The prompts of a batch, whose micro-batches have a sample each.
    fn asked(&self, set: &DataSet, batch: &GlobalBatch, step: usize) -> Result<Vec<Asked>> {
        let failed = |source| VlmTrainError::Data { step, source };
        let mut reader = self.scorer.reads_columns().then(|| set.reader());
        let samples = batch.micro_batches.iter().zip(&batch.records);
        let asked = samples.map(|(micro, record)| {
            let (prompt, expected) = self.prompt(micro)?;
            let columns = match &mut reader {
                Some(reader) => {
                    let asked = reader.read(*record).map_err(failed)?;
                    let is_user = |message: &&Message| message.role == Role::User;
                    let last = asked.messages.iter().rfind(is_user);
                    let text = last.map(Message::text).unwrap_or_default();
                    columns(reader.json(*record).map_err(failed)?, text)
                }
                None => Vec::new(),
            };
            Ok(Asked {
                record: *record,
                prompt,
                expected,
                columns,
            })
        });
        asked.collect()
    }

    /// The prompt of a sample, up to its last labelled turn, and the text of that turn.
    fn prompt(&self, micro: &MicroBatch) -> Result<(TrainingSample, String)> {
        let turn = last_labelled(&micro.labels);
        let line = micro.lines.first().copied().unwrap_or_default();
        // A template may end a turn with a token or two.
        if micro.labels.len() - turn.end > 4 {
            return Err(VlmTrainError::Options(format!(
                "the last answer of the conversation at line {line} is not trained; leave `loss` \
                 out of its messages, or leave out the record"
            )));
        }
        let (start, expected) = (turn.start, self.text(&micro.labels[turn])?);
        let prompt = TrainingSample {
            line,
            text: Sample {
                input_ids: micro.input_ids[..start].to_vec(),
                labels: vec![IGNORED; start],
                ..Sample::default()
            },
            image_grids: micro.image_grids.clone(),
            image_patches: micro.image_patches.clone(),
            video_grids: micro.video_grids.clone(),
            video_patches: micro.video_patches.clone(),
            seconds_per_grid: micro.seconds_per_grid.clone(),
        };
        Ok((prompt, expected))
    }

    fn text(&self, tokens: &[i64]) -> Result<String> {
        let tokenizer = self.encoder.text().tokenizer();
        answer_text(tokenizer, before_stop(tokens, &self.stop))
    }

    /// Answers prompts, `copies` times each: with a policy by sampling, otherwise by the likeliest
    /// tokens.
    fn sample(
        &self,
        trainer: &Trainer,
        asked: &[Asked],
        copies: usize,
        sampled: Option<&Policy>,
    ) -> Result<Vec<RewardedAnswer>> {
        let policy = policy_of(trainer)?;
        let model = trainer.model.valid();
        let prompts: Vec<&TrainingSample> = asked.iter().map(|asked| &asked.prompt).collect();
        let rows: Vec<usize> = (0..asked.len()).flat_map(|row| vec![row; copies]).collect();
        let mut answers = Vec::with_capacity(rows.len());
        while answers.len() < rows.len() {
            let first = answers.len();
            let next = &rows[first..first + self.room(&prompts, &rows[first..], policy.max_new)];
            let samples = next.iter().map(|row| (*row, answered(prompts[*row], &[])));
            let cut = Cut::Padded { tokens: usize::MAX };
            let micro = joined(samples.collect(), &prompts, cut, trainer.steps + 1)?.padded_left();
            let batch = model.batch(&inputs(&micro, &model.device()))?;
            // A row's numbers depend on its record, on whatever rank that is.
            let place = |index: usize| (asked[rows[index]].record * copies + index % copies) as u64;
            let options = GenerateOptions {
                count: policy.max_new,
                stop: self.stop.clone(),
                sampling: sampled.map(|policy| Sampling {
                    temperature: policy.temperature,
                    top_k: None,
                    top_p: 1.0,
                    seed: sampling_seed(trainer),
                    rows: (first..first + next.len()).map(place).collect(),
                }),
                likeliest: sampled.filter(|of| of.temperature == 1.0).map(|_| 0),
                ..GenerateOptions::default()
            };
            let mut log_probabilities = vec![Vec::new(); next.len()];
            let found = model.generate_with(&batch, &options, &mut |choice| {
                let of = choice.log_probabilities.map(|of| of.chosen);
                log_probabilities[choice.row].extend(of);
            })?;
            for (tokens, mut log_probabilities) in found.into_iter().zip(log_probabilities) {
                let ends = tokens.last().is_some_and(|last| self.stop.contains(last));
                // No prompt goes on after a placeholder of a picture that is not there.
                let kept = before_stop(&tokens, self.encoder.text().pads());
                log_probabilities.truncate(kept.len());
                answers.push(RewardedAnswer {
                    is_cut: !ends && tokens.len() == policy.max_new,
                    tokens: kept.to_vec(),
                    log_probabilities,
                    reward: 0.0,
                });
            }
        }
        Ok(answers)
    }

    /// The number of rows that are answered at once, at least one.
    fn room(&self, prompts: &[&TrainingSample], rows: &[usize], max_new: usize) -> usize {
        let mut longest = 0;
        let fits = |(index, row): &(usize, &usize)| {
            longest = longest.max(prompts[**row].tokens() + max_new);
            longest.saturating_mul(index + 1) <= self.cut.tokens()
        };
        rows.iter().enumerate().take_while(fits).count().max(1)
    }

    fn rewards(
        &self,
        asked: &[Asked],
        answers: &[RewardedAnswer],
        copies: usize,
    ) -> Result<Vec<f64>> {
        let completions = answers.iter().enumerate().map(|(index, answer)| {
            let asked = &asked[index / copies];
            Ok(Completion {
                line: asked.prompt.line,
                expected: &asked.expected,
                found: self.text(&answer.tokens)?,
                columns: &asked.columns,
            })
        });
        self.scorer
            .rewards(&completions.collect::<Result<Vec<_>>>()?)
    }
}

/// The keys of a record, with the text of its prompt.
fn columns(record: Json, prompt: String) -> Vec<(String, Json)> {
    const PROMPT: &str = "prompt";
    let mut columns = match record {
        Json::Object(columns) => columns,
        _ => Vec::new(),
    };
    columns.retain(|(key, _)| key != PROMPT);
    columns.push((PROMPT.to_owned(), Json::String(prompt)));
    columns
}

fn policy_of(trainer: &Trainer) -> Result<Policy> {
    trainer.recipe.policy.ok_or_else(|| {
        let text = "the recipe has no loss of rewarded answers";
        VlmTrainError::Options(text.to_owned())
    })
}

/// The seed of a step's answers.
fn sampling_seed(trainer: &Trainer) -> u64 {
    let mut hash = Fingerprint::default();
    hash.add(b"answers");
    for number in [trainer.recipe.seed, trainer.steps as u64] {
        hash.add(&number.to_le_bytes());
    }
    hash.value()
}

/// The report of a step: of several updates, the means of losses, norms and tokens.
fn whole(reports: Vec<StepReport>) -> Result<StepReport> {
    let join = |(all, _): (StepReport, u32), (next, count): (StepReport, u32)| {
        let share = 1.0 / f64::from(count);
        let mean = |one: f64, next: f64| one + (next - one) * share;
        let joined = StepReport {
            loss: mean(all.loss, next.loss),
            // That of an update that overflowed, and was skipped, is infinite.
            gradient_norm: match [all.gradient_norm, next.gradient_norm] {
                [one, next] if one.is_finite() && next.is_finite() => mean(one, next),
                [one, next] => one.min(next),
            },
            policy: both(all.policy, next.policy, |one, next| one.and(next, share)),
            skipped: all.skipped || next.skipped,
            lost_updates: next.lost_updates.or(all.lost_updates),
            ..all
        };
        (joined, count)
    };
    let whole = reports.into_iter().zip(1..).reduce(join);
    whole.map(|(report, _)| report).ok_or_else(|| {
        let text = "a step over rewarded answers has at least one update";
        VlmTrainError::Options(text.to_owned())
    })
}

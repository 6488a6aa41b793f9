//! The loop around the steps: log, validation, checkpoints.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use vlm_data::GlobalBatch;

use crate::answer::{Answer, Questions};
use crate::checkpoint::{Identity, expect_free};
use crate::error::{Result, VlmTrainError};
use crate::folder::RunFolder;
use crate::log::Log;
use crate::pairs::PreferenceReport;
use crate::rollout::Rollouts;
use crate::trainer::{StepReport, Trainer};

/// The folder of the result with the least validation loss, in that of the run.
const BEST: &str = "best";
/// The longest wait for the first checkpoint.
const FIRST_SAVE: Duration = Duration::from_secs(30);
/// The least time between saves by time, in durations of the last one.
const SAVES_APART: u32 = 20;

/// Batches of a data file, in order.
pub type Batches<'a> = Box<dyn Iterator<Item = vlm_data::Result<GlobalBatch>> + 'a>;

/// The options of a run besides its recipe.
#[derive(Clone, Copy)]
pub struct RunOptions<'a> {
    /// The folder of log and checkpoints.
    pub folder: &'a RunFolder,
    /// The options that determine the run's numbers besides its recipe. A run with others cannot
    /// continue it.
    pub identity: &'a Identity,
    /// The folder of the model at the start.
    pub base: &'a Path,
    /// The records of an epoch, to log its fraction.
    pub records: usize,
    /// When to save, and how many checkpoints to keep.
    pub checkpoints: Checkpoints,
    /// Opens the batches of validation; `None` for no validation.
    pub validation: Option<&'a (dyn Fn() -> vlm_data::Result<Batches<'a>> + 'a)>,
    /// Samples and rewards answers to prompts, for a loss of rewarded answers.
    pub rollouts: Option<&'a Rollouts>,
    /// The number of validations without a lower loss after which the run ends.
    pub patience: Option<usize>,
    /// The questions to answer before the first step and after each validation.
    pub questions: Option<&'a Questions>,
    /// Steps between validations.
    pub validate_every: usize,
    /// The step to record in `step-N.safetensors`, and of rank R above 0 in
    /// `step-N.rank-R.safetensors`.
    pub record_step: Option<usize>,
    /// The memory in use, in bytes, for the log.
    pub memory: &'a (dyn Fn() -> Option<u64> + 'a),
    /// Once true, the run saves a checkpoint after the current step and returns.
    pub stop: &'a AtomicBool,
}

/// When to save checkpoints, and how many to keep. The first one comes after half a minute at the
/// latest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Checkpoints {
    /// Steps between checkpoints; 0 for none by steps.
    pub every: usize,
    /// Time between checkpoints. They are further apart where saving takes more than a twentieth
    /// of it.
    pub interval: Duration,
    /// The number of checkpoints that stay, at least 1.
    pub keep: usize,
}

/// An event reported during a run.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// The log of an earlier run without a checkpoint was renamed.
    EarlierLog(&'a Path),
    /// A step is done.
    Step(&'a StepReport),
    /// Records that give no sample were left out of a step.
    Skipped {
        /// The step.
        step: usize,
        /// Their errors.
        errors: &'a [vlm_data::VlmDataError],
    },
    /// The validation loss after a step.
    Validation {
        /// The step.
        step: usize,
        /// The loss in nats per labelled token, or that of preferences; of rewarded answers, the
        /// mean reward of the likeliest ones, negative.
        loss: f64,
        /// The mean reward, with a loss of rewarded answers.
        reward: Option<f64>,
        /// The means of the pairs, with a loss of preferences.
        pairs: Option<PreferenceReport>,
    },
    /// Questions were answered after a step, or before the first.
    Answers {
        /// The step, or 0.
        step: usize,
        /// The answers, in the order of the questions.
        answers: &'a [Answer],
    },
}

/// The end of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ending {
    /// All steps are done.
    Finished,
    /// The validation loss has not fallen for a number of validations.
    Settled {
        /// The step with the least loss, whose result is in the folder `best`.
        best: usize,
    },
    /// The run was stopped on request.
    Stopped,
}

/// A line of the log about a step. All but its last two fields are the same in each run of a
/// recipe over the same batches on the same device.
#[derive(Serialize)]
struct StepLine<'a> {
    #[serde(flatten)]
    report: &'a StepReport,
    /// Epochs completed after the step.
    epoch: f64,
    /// The lines of its samples in the data file.
    lines: Vec<u64>,
    /// Tokens per second, waiting for data included.
    tokens_per_second: f64,
    memory_bytes: Option<u64>,
}

/// A line of the log about a validation.
#[derive(Serialize)]
struct Validation {
    step: usize,
    validation_loss: f64,
    /// The mean reward, with a loss of rewarded answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    validation_reward: Option<f64>,
    /// The means of the pairs, with a loss of preferences.
    #[serde(skip_serializing_if = "Option::is_none")]
    validation: Option<PreferenceReport>,
}

/// A line of the log about answers.
#[derive(Serialize)]
struct Answers<'a> {
    step: usize,
    answers: &'a [Answer],
}

/// The word of a rank to the others after a step.
#[derive(Serialize, Deserialize)]
struct Word {
    stop: bool,
    save: bool,
    lines: Vec<u64>,
}

/// Trains until the recipe's last step, the request to stop, or an error. `batches` must continue
/// at the trainer's [`position`](Trainer::position). The folder's log has a line per step, which
/// `report` receives as well.
///
/// With several ranks, each calls this with its share of the same batches and the same options; the
/// first one writes the log and the checkpoints, and the request of any rank stops all.
///
/// # Errors
/// [`VlmTrainError::Taken`], [`VlmTrainError::Locked`]; those of [`Trainer::step`], after
/// which the previous checkpoint is the last; [`VlmTrainError::Data`], [`VlmTrainError::NoData`],
/// [`VlmTrainError::File`]; with several ranks, [`VlmTrainError::Rank`] and
/// [`VlmTrainError::OtherRank`].
pub fn run(
    trainer: &mut Trainer,
    batches: &mut dyn Iterator<Item = vlm_data::Result<GlobalBatch>>,
    options: RunOptions<'_>,
    report: &mut dyn FnMut(Event<'_>),
) -> Result<Ending> {
    let answers = options.questions.is_some() || options.rollouts.is_some();
    if answers && trainer.has_parts() {
        let text = "no rank has the weights to answer questions; shard gradients at most, and divide \
                    no experts";
        return Err(VlmTrainError::Options(text.to_owned()));
    }
    if options.record_step.is_some() && trainer.expert_ranks().is_some() {
        let text = "a step whose experts are divided is not recorded; leave one of both out";
        return Err(VlmTrainError::Options(text.to_owned()));
    }
    let folder = options.folder.path();
    let is_first = trainer.is_first();
    let unlocked = is_first && !options.folder.is_own();
    let _own = unlocked.then(|| RunFolder::own(folder)).transpose()?;
    let mut log = None;
    if is_first {
        if trainer.steps() == 0 {
            expect_free(folder)?;
        }
        let (opened, aside) = Log::open(folder, trainer.steps())?;
        log = Some(opened);
        if let Some(aside) = aside {
            report(Event::EarlierLog(&aside));
        }
    }
    trainer.expect_same_run(options.identity)?;
    let all = trainer.recipe().steps;
    let is_due =
        |step: usize, every: usize| step == all || (every > 0 && step.is_multiple_of(every));
    if trainer.steps() == 0 {
        answer(trainer, &options, log.as_mut(), report)?;
    }
    let mut clock = SaveClock::new(options.checkpoints);
    let mut ending = settled(trainer, &options);
    while trainer.steps() < all && ending.is_none() {
        let started = Instant::now();
        let (done, batch) = step(trainer, batches, &options)?;
        let seconds = started.elapsed().as_secs_f64();
        report(Event::Step(&done));
        if !batch.skipped.is_empty() {
            let (step, errors) = (done.step, &batch.skipped[..]);
            report(Event::Skipped { step, errors });
        }
        let words = trainer.hear(Word {
            stop: options.stop.load(Ordering::Relaxed),
            save: is_first && clock.is_due(),
            lines: match trainer.leads() {
                true => batch
                    .micro_batches
                    .iter()
                    .flat_map(vlm_data::MicroBatch::sample_lines)
                    .collect(),
                false => Vec::new(),
            },
        })?;
        if let Some(log) = &mut log {
            let mut lines: Vec<u64> = words.iter().flat_map(|word| &word.lines).copied().collect();
            lines.sort_unstable();
            log.add(&StepLine {
                report: &done,
                epoch: epoch(&batch, options.records),
                lines,
                tokens_per_second: rounded(done.tokens as f64 / seconds.max(1e-9), 10.0),
                memory_bytes: (options.memory)(),
            })?;
        }
        drop(batch);
        if is_due(done.step, options.validate_every) {
            look(trainer, &options, log.as_mut(), report)?;
        }
        ending = settled(trainer, &options);
        let stop = words.iter().any(|word| word.stop);
        let by_time = words.iter().any(|word| word.save);
        let by_step = is_due(done.step, options.checkpoints.every);
        if stop || by_time || by_step || ending.is_some() {
            let started = Instant::now();
            if let Some(log) = &log {
                log.sync()?;
            }
            let keep = options.checkpoints.keep;
            trainer.save(folder, options.identity, options.base, keep)?;
            clock.saved(started);
        }
        if stop && done.step < all {
            ending = Some(Ending::Stopped);
        }
    }
    // No rank ends before the last checkpoint is complete.
    trainer.hear(true)?;
    Ok(ending.unwrap_or(Ending::Finished))
}

/// Takes the next batch and a step over it.
fn step(
    trainer: &mut Trainer,
    batches: &mut dyn Iterator<Item = vlm_data::Result<GlobalBatch>>,
    options: &RunOptions<'_>,
) -> Result<(StepReport, GlobalBatch)> {
    let steps = trainer.recipe().steps;
    let step = trainer.steps();
    let Some(batch) = batches.next() else {
        return Err(VlmTrainError::NoData { step, steps });
    };
    let step = step + 1;
    let batch = batch.map_err(|source| VlmTrainError::Data { step, source })?;
    let done = if options.record_step == Some(step) {
        let folder = options.folder.path();
        std::fs::create_dir_all(folder).map_err(VlmTrainError::file("create", folder))?;
        let path = folder.join(format!("step-{step}.safetensors"));
        trainer.record_step(&batch.micro_batches, &path)?
    } else if let Some(rollouts) = options.rollouts {
        rollouts.step(trainer, &batch)?
    } else {
        trainer.step(&batch.micro_batches)?
    };
    trainer.position = Some(batch.next);
    Ok((done, batch))
}

/// Epochs completed after a batch, to four decimals.
fn epoch(batch: &GlobalBatch, records: usize) -> f64 {
    let part = batch.next.samples as f64 / records.max(1) as f64;
    rounded(batch.next.epoch as f64 + part, 1e4)
}

/// A number in whole parts of one.
fn rounded(number: f64, parts: f64) -> f64 {
    (number * parts).round() / parts
}

/// The end of a run whose validation loss has not fallen for long.
fn settled(trainer: &Trainer, options: &RunOptions<'_>) -> Option<Ending> {
    let validations = trainer.validations;
    let (best, _) = validations.best?;
    let is_settled = options
        .patience
        .is_some_and(|most| validations.since >= most);
    is_settled.then_some(Ending::Settled { best })
}

/// The time of the next checkpoint.
struct SaveClock {
    checkpoints: Checkpoints,
    last: Instant,
    wait: Duration,
}

impl SaveClock {
    fn new(checkpoints: Checkpoints) -> Self {
        Self {
            checkpoints,
            last: Instant::now(),
            wait: checkpoints.interval.min(FIRST_SAVE),
        }
    }

    fn is_due(&self) -> bool {
        self.last.elapsed() >= self.wait
    }

    fn saved(&mut self, started: Instant) {
        self.last = Instant::now();
        let taken = started.elapsed().saturating_mul(SAVES_APART);
        self.wait = self.checkpoints.interval.max(taken);
    }
}

/// Validates and answers.
fn look(
    trainer: &mut Trainer,
    options: &RunOptions<'_>,
    mut log: Option<&mut Log>,
    report: &mut dyn FnMut(Event<'_>),
) -> Result<()> {
    if let Some(open) = options.validation {
        let step = trainer.steps();
        let mut batches = open().map_err(|source| VlmTrainError::Data { step, source })?;
        let reward = options
            .rollouts
            .map(|of| of.validate(trainer, &mut batches));
        let reward = reward.transpose()?;
        let micro_batches = batches.flat_map(|batch| match batch {
            Ok(batch) => batch.micro_batches.into_iter().map(Ok).collect(),
            Err(error) => vec![Err(error)],
        });
        let (loss, pairs) = match (reward, trainer.recipe().preference) {
            (Some(reward), _) => (-reward, None),
            (None, Some(_)) => {
                let (loss, pairs) = trainer.validate_pairs(micro_batches)?;
                (loss, Some(pairs))
            }
            (None, None) => (trainer.validate(micro_batches)?, None),
        };
        if let Some(log) = &mut log {
            log.add(&Validation {
                step,
                validation_loss: loss,
                validation_reward: reward,
                validation: pairs,
            })?;
        }
        report(Event::Validation {
            step,
            loss,
            reward,
            pairs,
        });
        // NaN is not lower.
        let best = trainer.validations.best;
        if loss.is_finite() && best.is_none_or(|(_, least)| loss < least) {
            trainer.validations.best = Some((step, loss));
            trainer.validations.since = 0;
            let best: PathBuf = options.folder.path().join(BEST);
            trainer.replace_result(&best, options.base)?;
        } else {
            trainer.validations.since += 1;
        }
    }
    answer(trainer, options, log, report)
}

/// Answers, on the first rank.
fn answer(
    trainer: &Trainer,
    options: &RunOptions<'_>,
    log: Option<&mut Log>,
    report: &mut dyn FnMut(Event<'_>),
) -> Result<()> {
    let (Some(questions), Some(log)) = (options.questions, log) else {
        return Ok(());
    };
    let (step, answers) = (trainer.steps(), &trainer.answers(questions)?[..]);
    log.add(&Answers { step, answers })?;
    report(Event::Answers { step, answers });
    Ok(())
}

//! The loop around the steps: log, validation, checkpoints.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;
use vlm_data::{GlobalBatch, MicroBatch};

use crate::answer::{Answer, Questions};
use crate::checkpoint::expect_free;
use crate::error::{Result, VlmTrainError};
use crate::log::Log;
use crate::trainer::{StepReport, Trainer};

/// The options of a run besides its recipe.
#[derive(Clone, Copy, Debug)]
pub struct RunOptions<'a> {
    /// The folder of log and checkpoints.
    pub folder: &'a Path,
    /// The identity of the run, by name: the model, the data. A run with a different identity
    /// cannot continue it.
    pub identity: &'a BTreeMap<String, String>,
    /// Steps between checkpoints.
    pub checkpoint_every: usize,
    /// The batches of validation; empty for no validation.
    pub validation: &'a [MicroBatch],
    /// The questions to answer before the first step and after each validation.
    pub questions: Option<&'a Questions>,
    /// Steps between validations.
    pub validate_every: usize,
    /// The step to record in `step-N.safetensors`.
    pub record_step: Option<usize>,
    /// Once true, the run saves a checkpoint after the current step and returns.
    pub stop: &'a AtomicBool,
}

/// An event reported during a run.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A step is done.
    Step(&'a StepReport),
    /// The validation loss after a step.
    Validation {
        /// The step.
        step: usize,
        /// The loss in nats per labelled token.
        loss: f64,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// All steps are done.
    Finished,
    /// The run was stopped on request.
    Stopped,
}

/// A line of the log about a validation.
#[derive(Serialize)]
struct Validation {
    step: usize,
    validation_loss: f64,
}

/// A line of the log with answers.
#[derive(Serialize)]
struct Answers<'a> {
    step: usize,
    answers: &'a [Answer],
}

/// Runs the remaining steps of a run and saves a checkpoint at its end. With several ranks, each
/// has its shard of the batches, all have the same `validation`, and the first writes and answers.
/// `batches` must continue at [`Trainer::position`], as those of a [`Loader`](vlm_data::Loader) do.
///
/// # Errors
/// [`VlmTrainError::Taken`] if a new run would replace another; those of [`Trainer::step`], after
/// which the previous checkpoint is the last; [`VlmTrainError::Data`], [`VlmTrainError::NoData`],
/// [`VlmTrainError::File`]; with several ranks, [`VlmTrainError::Rank`] and
/// [`VlmTrainError::OtherRank`].
pub fn run(
    trainer: &mut Trainer,
    batches: &mut dyn Iterator<Item = vlm_data::Result<GlobalBatch>>,
    options: RunOptions<'_>,
    report: &mut dyn FnMut(Event<'_>),
) -> Result<Ending> {
    let folder = options.folder;
    let is_first = trainer.is_first();
    let mut log = None;
    if is_first {
        std::fs::create_dir_all(folder).map_err(VlmTrainError::file("create", folder))?;
        if trainer.steps() == 0 {
            expect_free(folder)?;
        }
        log = Some(Log::open(folder, trainer.steps())?);
    }
    trainer.expect_same_run(options.identity)?;
    let all = trainer.recipe().steps;
    let is_due =
        |step: usize, every: usize| step == all || (every > 0 && step.is_multiple_of(every));
    if trainer.steps() == 0 {
        answer(trainer, &options, log.as_mut(), report)?;
    }
    while trainer.steps() < all {
        let step = trainer.steps();
        let Some(batch) = batches.next() else {
            return Err(VlmTrainError::NoData { step, steps: all });
        };
        let step = step + 1;
        let batch = batch.map_err(|source| VlmTrainError::Data { step, source })?;
        let done = if is_first && options.record_step == Some(step) {
            let path = folder.join(format!("step-{step}.safetensors"));
            trainer.record_step(&batch.micro_batches, &path)?
        } else {
            trainer.step(&batch.micro_batches)?
        };
        trainer.position = Some(batch.next);
        if let Some(log) = &mut log {
            log.add(&done)?;
        }
        report(Event::Step(&done));
        if is_due(done.step, options.validate_every) {
            look(trainer, &options, log.as_mut(), report)?;
        }
        let stop = trainer.does_any(options.stop.load(Ordering::Relaxed))?;
        if stop || is_due(done.step, options.checkpoint_every) {
            if let Some(log) = &log {
                log.sync()?;
            }
            trainer.save(folder, options.identity)?;
        }
        if stop && done.step < all {
            trainer.does_any(false)?;
            return Ok(Ending::Stopped);
        }
    }
    // No rank ends before the last checkpoint is complete.
    trainer.does_any(false)?;
    Ok(Ending::Finished)
}

/// Validates and answers.
fn look(
    trainer: &Trainer,
    options: &RunOptions<'_>,
    mut log: Option<&mut Log>,
    report: &mut dyn FnMut(Event<'_>),
) -> Result<()> {
    if !options.validation.is_empty() {
        let (step, loss) = (trainer.steps(), trainer.validate(options.validation)?);
        let validation_loss = loss;
        if let Some(log) = &mut log {
            log.add(&Validation {
                step,
                validation_loss,
            })?;
        }
        report(Event::Validation { step, loss });
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

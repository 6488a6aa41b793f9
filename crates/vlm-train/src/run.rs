//! The loop around the steps: log, validation, checkpoints.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;
use vlm_data::{GlobalBatch, MicroBatch};

use crate::checkpoint::expect_free;
use crate::error::{Result, VlmTrainError};
use crate::log::Log;
use crate::trainer::{StepReport, Trainer};

/// What a run does besides its steps.
#[derive(Clone, Copy, Debug)]
pub struct RunOptions<'a> {
    /// The folder of log and checkpoints.
    pub folder: &'a Path,
    /// What the run is of, by name: the model, the data. Another does not continue it.
    pub identity: &'a BTreeMap<String, String>,
    /// Steps between checkpoints.
    pub checkpoint_every: usize,
    /// What is validated on; nothing if empty.
    pub validation: &'a [MicroBatch],
    /// Steps between validations.
    pub validate_every: usize,
    /// Once true, the run saves a checkpoint after the step that it is in, and returns.
    pub stop: &'a AtomicBool,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// All steps are done.
    Finished,
    /// It was asked to stop.
    Stopped,
}

/// A line of the log about a validation.
#[derive(Serialize)]
struct Validation {
    step: usize,
    validation_loss: f64,
}

/// Takes the steps of a run that are left, and saves a checkpoint at its end. `batches` go on where
/// [`Trainer::position`] says, as those of a [`Loader`](vlm_data::Loader) do. `report` receives
/// each step, and the validation loss after it if there is one.
///
/// # Errors
/// [`VlmTrainError::Taken`] if a new run would replace another; those of [`Trainer::step`], after
/// which the last checkpoint is the one before; [`VlmTrainError::Data`], [`VlmTrainError::NoData`],
/// [`VlmTrainError::File`].
pub fn run(
    trainer: &mut Trainer,
    batches: &mut dyn Iterator<Item = vlm_data::Result<GlobalBatch>>,
    options: RunOptions<'_>,
    report: &mut dyn FnMut(&StepReport, Option<f64>),
) -> Result<Ending> {
    let folder = options.folder;
    std::fs::create_dir_all(folder).map_err(VlmTrainError::file("create", folder))?;
    if trainer.steps() == 0 {
        expect_free(folder)?;
    }
    let mut log = Log::open(folder, trainer.steps())?;
    let all = trainer.recipe().steps;
    let is_due =
        |step: usize, every: usize| step == all || (every > 0 && step.is_multiple_of(every));
    while trainer.steps() < all {
        let step = trainer.steps();
        let Some(batch) = batches.next() else {
            return Err(VlmTrainError::NoData { step, steps: all });
        };
        let step = step + 1;
        let batch = batch.map_err(|source| VlmTrainError::Data { step, source })?;
        let done = trainer.step(&batch.micro_batches)?;
        trainer.position = Some(batch.next);
        log.add(&done)?;
        let mut validation = None;
        if !options.validation.is_empty() && is_due(done.step, options.validate_every) {
            let loss = trainer.validate(options.validation)?;
            log.add(&Validation {
                step: done.step,
                validation_loss: loss,
            })?;
            validation = Some(loss);
        }
        report(&done, validation);
        let stop = options.stop.load(Ordering::Relaxed);
        if stop || is_due(done.step, options.checkpoint_every) {
            log.sync()?;
            trainer.save(folder, options.identity)?;
        }
        if stop && done.step < all {
            return Ok(Ending::Stopped);
        }
    }
    Ok(Ending::Finished)
}

//! Saving a run, so that it can be stopped at any moment and continued with the same numbers.
//!
//! A checkpoint is a folder `checkpoint-<steps>` with the weights and the optimizer's moments in
//! burnpack, which keeps the parameter ids that link them, and the configuration and history in
//! JSON. It is written under a temporary name and renamed when it is complete. A checkpoint that it
//! replaces is then renamed and removed; one of its own name is renamed before. So a folder with
//! the final name is complete, and a run that is stopped while saving keeps the checkpoint before.
//!
//! Other programs use the same names (Hugging Face's `checkpoint-500`). A folder without our three
//! files is left alone.

use std::fs;
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::store::ModuleRecord;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use vlm_data::Fingerprint;

use super::error::{Result, TrainError};
use super::model::Model;
use super::options::RunConfig;

const PREFIX: &str = "checkpoint-";
const PARTIAL: &str = "mrope-checkpoint.partial";
const REPLACED: &str = "mrope-checkpoint.replaced";
const MODEL: &str = "model.bpk";
const OPTIMIZER: &str = "optimizer.bpk";
const RUN: &str = "run.json";

/// The JSON of a checkpoint.
#[derive(Serialize, Deserialize)]
struct Run<C, H> {
    config: C,
    history: H,
    /// Checksums of the other files: burn's reader of optimizers panics on damaged ones. Earlier
    /// releases wrote none.
    #[serde(default)]
    checksums: Option<[u64; 2]>,
}

/// The results so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct History {
    /// Loss of each step: mean cross entropy in nats.
    pub(crate) losses: Vec<f32>,
    /// Share of right answers in each step.
    pub(crate) accuracies: Vec<f32>,
    /// Tests on unseen digits.
    pub(crate) tests: Vec<Test>,
    /// Time spent in steps.
    pub(crate) seconds: f64,
}

/// A test on unseen digits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Test {
    /// Steps trained before it.
    pub(crate) step: usize,
    /// Share of right answers.
    pub(crate) accuracy: f32,
    /// Mean cross entropy in nats.
    pub(crate) loss: f32,
}

/// Saves a checkpoint in `folder` and removes the earlier ones, of this run or another.
pub(crate) fn save(
    folder: &Path,
    config: &RunConfig,
    history: &History,
    model: &Model,
    optimizer: &ModuleOptimizer,
) -> Result<PathBuf> {
    let partial = folder.join(PARTIAL);
    remove(&partial)?;
    fs::create_dir_all(&partial).map_err(TrainError::file("create", &partial))?;
    let file = |name: &str| partial.join(name);
    model
        .clone()
        .save_file(file(MODEL))
        .map_err(TrainError::file("write", file(MODEL)))?;
    optimizer
        .save(file(OPTIMIZER))
        .map_err(TrainError::file("write", file(OPTIMIZER)))?;
    let run = Run {
        config,
        history,
        checksums: Some([checksum(&file(MODEL))?, checksum(&file(OPTIMIZER))?]),
    };
    let run = serde_json::to_string(&run).map_err(TrainError::file("write", file(RUN)))?;
    fs::write(file(RUN), run).map_err(TrainError::file("write", file(RUN)))?;

    let whole = folder.join(name(history.losses.len()));
    let replaced = folder.join(REPLACED);
    let replace = |path: &PathBuf| {
        remove(&replaced)?;
        rename(path, &replaced)
    };
    let (same, others): (Vec<_>, Vec<_>) = list(folder)?.into_iter().partition(|p| *p == whole);
    same.iter().try_for_each(replace)?;
    rename(&partial, &whole)?;
    others.iter().try_for_each(replace)?;
    remove(&replaced)?;
    Ok(whole)
}

/// Makes the folder that [`save`] begins with, and removes it.
///
/// # Errors
/// [`TrainError::File`] if a checkpoint could not be saved in `folder`.
pub(crate) fn probe(folder: &Path) -> Result<()> {
    let partial = folder.join(PARTIAL);
    remove(&partial)?;
    fs::create_dir_all(&partial).map_err(TrainError::file("create", &partial))?;
    remove(&partial)
}

/// Reads the last checkpoint in `folder` into `model` and `optimizer`.
///
/// # Errors
/// [`TrainError::NoCheckpoint`]; [`TrainError::OtherRun`] if it is not one of `config`;
/// [`TrainError::File`] if it cannot be read.
pub(crate) fn load(
    folder: &Path,
    config: &RunConfig,
    model: Model,
    optimizer: ModuleOptimizer,
) -> Result<(History, Model, ModuleOptimizer)> {
    let Some(path) = last(folder)? else {
        return Err(TrainError::NoCheckpoint {
            folder: folder.to_owned(),
        });
    };
    let file = |name: &str| path.join(name);
    let text = plain_files::read_text(&file(RUN), plain_files::MAX_TEXT_BYTES)?;
    let run: Run<RunConfig, History> =
        serde_json::from_str(&text).map_err(TrainError::file("read", file(RUN)))?;
    same_run(config, &run.config)?;
    let steps = run.history.losses.len();
    // One that was renamed to make way for another has no number.
    let stated = named(folder)?.into_iter().find(|(_, found)| *found == path);
    if stated.is_some_and(|(number, _)| number != steps) || run.history.accuracies.len() != steps {
        let damaged = format!(
            "it is damaged: it has {steps} losses and {} accuracies, and belongs to {}",
            run.history.accuracies.len(),
            path.display()
        );
        return Err(TrainError::file("read", file(RUN))(damaged));
    }
    for (name, expected) in [MODEL, OPTIMIZER]
        .iter()
        .zip(run.checksums.into_iter().flatten())
    {
        if checksum(&file(name))? != expected {
            let damaged = "it is damaged: these are not the bytes that were saved";
            return Err(TrainError::file("read", file(name))(damaged));
        }
    }
    let record = ModuleRecord::load(file(MODEL)).map_err(TrainError::file("read", file(MODEL)))?;
    let model = model
        .try_load_record(record)
        .map_err(TrainError::file("read", file(MODEL)))?;
    let optimizer = optimizer
        .load(file(OPTIMIZER))
        .map_err(TrainError::file("read", file(OPTIMIZER)))?;
    Ok((run.history, model, optimizer))
}

/// The checkpoint in `folder` that [`load`] would read.
pub(crate) fn last(folder: &Path) -> Result<Option<PathBuf>> {
    // Alone if a run was stopped between renaming it and giving its name to another.
    let replaced = Some(folder.join(REPLACED)).filter(|path| is_ours(path));
    Ok(list(folder)?.pop().or(replaced))
}

/// Refuses a folder in which a run of `steps` steps would overwrite what another program made.
///
/// # Errors
/// [`TrainError::NotOurs`] with its path.
pub(crate) fn refuse_others(folder: &Path, steps: usize) -> Result<()> {
    let taken = named(folder)?
        .into_iter()
        .find(|(number, path)| *number <= steps && path.ends_with(name(*number)) && !is_ours(path));
    match taken {
        Some((_, path)) => Err(TrainError::NotOurs { path }),
        None => Ok(()),
    }
}

fn name(steps: usize) -> String {
    format!("{PREFIX}{steps:06}")
}

/// The checkpoints in `folder`, in the order of their steps.
fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    let paths = named(folder)?.into_iter().map(|(_, path)| path);
    Ok(paths.filter(|path| is_ours(path)).collect())
}

fn is_ours(path: &Path) -> bool {
    [MODEL, OPTIMIZER, RUN]
        .iter()
        .all(|file| path.join(file).is_file())
}

/// The entries of `folder` that are named like a checkpoint, whichever program made them, by
/// number.
fn named(folder: &Path) -> Result<Vec<(usize, PathBuf)>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(TrainError::file("read", folder)(e)),
    };
    let mut found: Vec<(usize, PathBuf)> = entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let steps = path.file_name()?.to_str()?.strip_prefix(PREFIX)?;
            Some((steps.parse().ok()?, path))
        })
        .collect();
    found.sort();
    Ok(found)
}

/// The hash of a file.
fn checksum(path: &Path) -> Result<u64> {
    let bytes = plain_files::read(path, u64::MAX)?;
    let mut hash = Fingerprint::default();
    hash.add(&bytes);
    Ok(hash.value())
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(TrainError::file("rename", from))
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(TrainError::file("remove", path)(e))
        }
        _ => Ok(()),
    }
}

/// Compares the options of two runs.
///
/// # Errors
/// [`TrainError::OtherRun`] with the first option in which they differ.
fn same_run(expected: &RunConfig, found: &RunConfig) -> Result<()> {
    let differs = fields(expected)
        .into_iter()
        .zip(fields(found))
        .find(|(expected, found)| expected != found);
    match differs {
        None => Ok(()),
        Some(((option, expected), (_, found))) => Err(TrainError::OtherRun {
            option,
            expected: expected.to_string(),
            found: found.to_string(),
        }),
    }
}

/// The options of a run by name.
pub(crate) fn fields(config: &RunConfig) -> Map<String, Value> {
    match serde_json::to_value(config) {
        Ok(Value::Object(fields)) => fields,
        _ => Map::new(),
    }
}

//! Saving a run so that it can be stopped at any moment and go on with the same numbers.
//!
//! A checkpoint is a folder `checkpoint-<steps>` with the weights and the optimizer's moments in burnpack,
//! which keeps the parameter ids that tie them, and the configuration and history in JSON. It is written
//! under another name and renamed when whole, so a run that is stopped while saving keeps the one before.

use std::fs;
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::store::ModuleRecord;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::error::{Result, TrainError};
use super::model::Model;
use super::options::RunConfig;
use super::trainer::History;

const PREFIX: &str = "checkpoint-";
const PARTIAL: &str = "checkpoint.partial";
const MODEL: &str = "model.bpk";
const OPTIMIZER: &str = "optimizer.bpk";
const RUN: &str = "run.json";

/// What a checkpoint says in JSON.
#[derive(Serialize, Deserialize)]
struct Run<C, H> {
    config: C,
    history: H,
}

/// Saves a checkpoint in `folder` and removes those before it.
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
    let run = serde_json::to_string(&Run { config, history })
        .map_err(TrainError::file("write", file(RUN)))?;
    fs::write(file(RUN), run).map_err(TrainError::file("write", file(RUN)))?;

    let older = list(folder)?;
    let whole = folder.join(format!("{PREFIX}{:06}", history.losses.len()));
    remove(&whole)?;
    fs::rename(&partial, &whole).map_err(TrainError::file("rename", &partial))?;
    for path in older.iter().filter(|path| **path != whole) {
        remove(path)?;
    }
    Ok(whole)
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
    let checkpoints = list(folder)?;
    let Some(path) = checkpoints.last() else {
        return Err(TrainError::NoCheckpoint {
            folder: folder.to_owned(),
        });
    };
    let file = |name: &str| path.join(name);
    let text = fs::read_to_string(file(RUN)).map_err(TrainError::file("read", file(RUN)))?;
    let run: Run<RunConfig, History> =
        serde_json::from_str(&text).map_err(TrainError::file("read", file(RUN)))?;
    same_run(config, &run.config)?;
    let record = ModuleRecord::load(file(MODEL)).map_err(TrainError::file("read", file(MODEL)))?;
    let model = model
        .try_load_record(record)
        .map_err(TrainError::file("read", file(MODEL)))?;
    let optimizer = optimizer
        .load(file(OPTIMIZER))
        .map_err(TrainError::file("read", file(OPTIMIZER)))?;
    Ok((run.history, model, optimizer))
}

/// Removes all checkpoints from `folder`.
pub(crate) fn clear(folder: &Path) -> Result<()> {
    list(folder)?.iter().try_for_each(|path| remove(path))
}

/// The checkpoints in `folder`, the last one last.
fn list(folder: &Path) -> Result<Vec<PathBuf>> {
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
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(TrainError::file("remove", path)(e))
        }
        _ => Ok(()),
    }
}

/// Names the first option in which two runs differ.
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

//! Saving a run, so that it can be stopped at any moment and continued to the bit.
//!
//! A checkpoint is a folder `checkpoint-<steps>` with `state.safetensors`, the trained parameters
//! with their masters and moments, and `run.json`, everything else. Both are written, down to the
//! disk, into a folder of another name, which is then renamed; of an earlier checkpoint `run.json`
//! is removed first. So a folder of that name with a `run.json` is complete, whenever a run was
//! killed, and there is one from the first save on.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Device, Tensor, TensorData};
use qwen_vl::QwenVl;
use qwen_vl::file::{Entry, Sink, TensorFile, write_whole};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use vlm_data::{DataPosition, Fingerprint};

use crate::error::{Result, VlmTrainError};
use crate::loss_scale::LossScale;
use crate::recipe::Recipe;
use crate::trainer::Trainer;

const PREFIX: &str = "checkpoint-";
const PARTIAL: &str = "checkpoint.partial";
const STATE: &str = "state.safetensors";
const RUN: &str = "run.json";
/// Elements that cross to or from a device at once.
const PIECE: usize = 1 << 24;

/// What a run is of, by name: the model, the data. Runs of other ones do not continue it.
pub(crate) type Identity = BTreeMap<String, String>;

#[derive(Serialize, Deserialize)]
struct Run {
    recipe: Recipe,
    identity: Identity,
    steps: usize,
    /// Where the data go on.
    position: Option<DataPosition>,
    /// What losses are multiplied with, in f16.
    loss_scale: Option<LossScale>,
    /// Updates of each parameter.
    updates: BTreeMap<String, u64>,
    /// FNV-1a of the tensors' bytes, in their order.
    checksum: u64,
}

impl Trainer {
    /// Saves a checkpoint in a folder, and then removes the earlier ones.
    ///
    /// # Errors
    /// [`VlmTrainError::File`], [`VlmTrainError::Model`], [`VlmTrainError::Device`]; the earlier
    /// checkpoint is then still there.
    pub(crate) fn save(&self, folder: &Path, identity: &Identity) -> Result<PathBuf> {
        let whole = folder.join(format!("{PREFIX}{:08}", self.steps));
        let earlier = complete(folder)?;
        if earlier.iter().any(|(_, path)| *path == whole) {
            return Ok(whole);
        }
        let partial = folder.join(PARTIAL);
        remove(&partial)?;
        remove(&whole)?;
        fs::create_dir_all(&partial).map_err(VlmTrainError::file("create", &partial))?;
        let checksum = self.write_state(&partial.join(STATE))?;
        let updates = self.parameters.iter().map(|parameter| {
            let state = self.optimizer.states.get(&parameter.id);
            let steps = state.map_or(0, |state| state.steps);
            (parameter.name.clone(), steps)
        });
        let run = Run {
            recipe: self.recipe.clone(),
            identity: identity.clone(),
            steps: self.steps,
            position: self.position,
            loss_scale: self.loss_scale,
            updates: updates.collect(),
            checksum,
        };
        let path = partial.join(RUN);
        let json = serde_json::to_vec(&run).map_err(VlmTrainError::file("write", &path))?;
        write_whole(&path, &json).map_err(VlmTrainError::file("write", &path))?;
        sync(&partial)?;
        fs::rename(&partial, &whole).map_err(VlmTrainError::file("rename", &partial))?;
        sync(folder)?;
        for (_, path) in earlier {
            let marker = path.join(RUN);
            fs::remove_file(&marker).map_err(VlmTrainError::file("remove", &marker))?;
            remove(&path)?;
        }
        Ok(whole)
    }

    /// Continues the run in a folder, from its last checkpoint; `model` is the one that it began
    /// with, and `identity` states what else it was of.
    ///
    /// # Errors
    /// [`VlmTrainError::NoCheckpoint`], [`VlmTrainError::OtherRun`], [`VlmTrainError::Damaged`],
    /// [`VlmTrainError::File`]; those of [`new`](Self::new).
    pub fn resume(
        model: QwenVl,
        recipe: Recipe,
        folder: impl AsRef<Path>,
        identity: &BTreeMap<String, String>,
    ) -> Result<Self> {
        let folder = folder.as_ref();
        let Some((_, path)) = complete(folder)?.pop() else {
            let folder = folder.to_owned();
            return Err(VlmTrainError::NoCheckpoint { folder });
        };
        let file = path.join(RUN);
        let text = fs::read_to_string(&file).map_err(VlmTrainError::file("read", &file))?;
        let damaged = |path: &Path, reason: String| VlmTrainError::Damaged {
            path: path.to_owned(),
            reason,
        };
        let run: Run = serde_json::from_str(&text).map_err(|e| damaged(&file, e.to_string()))?;
        same("recipe", &value(&recipe), &value(&run.recipe))?;
        same("run", &value(identity), &value(&run.identity))?;
        let mut trainer = Self::new(model, recipe)?;
        trainer.steps = run.steps;
        trainer.position = run.position;
        trainer.loss_scale = run.loss_scale;
        let state = path.join(STATE);
        trainer.read_state(&state, &run)?;
        Ok(trainer)
    }

    /// The tensors of the state: name, elements, and the tensor.
    fn state(&self) -> Vec<(String, Tensor<1>)> {
        let mut values = Values::default();
        self.model.visit(&mut values);
        let mut state = Vec::new();
        for parameter in &self.parameters {
            let name = &parameter.name;
            let mut keep = |what: &str, tensor: &Tensor<1>| {
                state.push((format!("{what}.{name}"), tensor.clone()));
            };
            if let Some(value) = values.0.get(&parameter.id) {
                keep("parameter", value);
            }
            let Some(of_optimizer) = self.optimizer.states.get(&parameter.id) else {
                continue;
            };
            if let Some(master) = &of_optimizer.master {
                keep("master", master);
            }
            if let Some([first, second]) = &of_optimizer.moments {
                keep("first", first);
                keep("second", second);
            }
        }
        state
    }

    /// Writes the state, and returns its checksum.
    fn write_state(&self, path: &Path) -> Result<u64> {
        let step = self.steps;
        let state = self.state();
        let entries: Vec<Entry> = state
            .iter()
            .map(|(name, tensor)| Entry {
                name: name.clone(),
                shape: tensor.dims().to_vec(),
                dtype: tensor.dtype(),
            })
            .collect();
        let mut sink = Sink::create(path, &entries)?;
        let mut checksum = Fingerprint::default();
        for (_, tensor) in state {
            let [elements] = tensor.dims();
            for start in (0..elements).step_by(PIECE) {
                let piece = tensor.clone().slice(start..elements.min(start + PIECE));
                let data = piece.try_into_data();
                let data = data.map_err(|error| VlmTrainError::Device {
                    step,
                    reason: error.to_string(),
                })?;
                checksum.add(data.bytes());
                sink.write(data.bytes())?;
            }
        }
        sink.commit()?;
        Ok(checksum.value())
    }

    /// Takes the state from a file.
    fn read_state(&mut self, path: &Path, run: &Run) -> Result<()> {
        let damaged = |reason: String| VlmTrainError::Damaged {
            path: path.to_owned(),
            reason,
        };
        let source = TensorFile::open(path)?;
        let stored = source.tensors();
        let device = self.model.device().inner();
        let mut checksum = Fingerprint::default();
        let mut used = 0;
        let mut read = |what: &str, name: &str, elements: usize, dtype: DType| {
            let Some(stored) = stored.get(&format!("{what}.{name}")) else {
                return Ok(None);
            };
            if stored.shape != [elements] || stored.dtype() != Some(dtype) {
                let expected = format!("{elements} of {dtype:?}");
                return Err(damaged(format!("{what}.{name} is not {expected}")));
            }
            used += 1;
            let mut pieces = Vec::new();
            for start in (0..elements).step_by(PIECE) {
                let data = source.read(stored, dtype, start..elements.min(start + PIECE))?;
                checksum.add(data.bytes());
                pieces.push(upload(data, &device, dtype));
            }
            Ok(Some(Tensor::cat(pieces, 0)))
        };
        let mut values = HashMap::new();
        for parameter in &self.parameters {
            let (name, elements) = (&parameter.name, parameter.elements());
            let wide = match parameter.dtype {
                DType::F64 => DType::F64,
                _ => DType::F32,
            };
            let Some(state) = self.optimizer.states.get_mut(&parameter.id) else {
                continue;
            };
            let missing = |what| damaged(format!("it lacks {what}.{name}"));
            let of_model = read("parameter", name, elements, parameter.dtype)?;
            values.insert(parameter.id, of_model.ok_or_else(|| missing("parameter"))?);
            if state.master.is_some() {
                let master = read("master", name, elements, wide)?;
                state.master = Some(master.ok_or_else(|| missing("master"))?);
            }
            state.steps = run.updates.get(name).copied().unwrap_or_default();
            if state.steps > 0 {
                let first = read("first", name, elements, wide)?;
                let second = read("second", name, elements, wide)?;
                let (first, second) = first.zip(second).ok_or_else(|| missing("moments"))?;
                state.moments = Some([first, second]);
            }
        }
        if used != stored.len() || checksum.value() != run.checksum {
            return Err(damaged(
                "these are not the bytes that were saved".to_owned(),
            ));
        }
        self.model = self.model.clone().map(&mut Fill { values });
        Ok(())
    }
}

/// Refuses a folder that has a run.
///
/// # Errors
/// [`VlmTrainError::Taken`], [`VlmTrainError::File`]
pub(crate) fn expect_free(folder: &Path) -> Result<()> {
    match complete(folder)?.pop() {
        Some((_, path)) => Err(VlmTrainError::Taken { path }),
        None => Ok(()),
    }
}

fn upload(data: TensorData, device: &Device, dtype: DType) -> Tensor<1> {
    Tensor::from_data(data, (device, dtype))
}

/// The trained parameters, flat.
#[derive(Default)]
pub(crate) struct Values(pub(crate) HashMap<ParamId, Tensor<1>>);

impl ModuleVisitor for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.val();
        if tensor.is_require_grad() {
            let elements = tensor.dims().iter().product::<usize>();
            self.0.insert(param.id, tensor.inner().reshape([elements]));
        }
    }
}

/// Replaces parameters.
struct Fill {
    values: HashMap<ParamId, Tensor<1>>,
}

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.values.remove(&param.id) {
            Some(value) => {
                param.map(|tensor| Tensor::from_inner(value.reshape(tensor.dims())).require_grad())
            }
            None => param,
        }
    }
}

/// The complete checkpoints of a folder, in the order of their steps.
fn complete(folder: &Path) -> Result<Vec<(usize, PathBuf)>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(VlmTrainError::file("read", folder)(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(VlmTrainError::file("read", folder))?.path();
        let steps = path
            .file_name()
            .and_then(|name| name.to_str()?.strip_prefix(PREFIX)?.parse().ok());
        if let Some(steps) = steps
            && path.join(RUN).is_file()
            && path.join(STATE).is_file()
        {
            found.push((steps, path));
        }
    }
    found.sort();
    Ok(found)
}

fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(VlmTrainError::file("remove", folder)(error))
        }
        _ => Ok(()),
    }
}

/// Writes a folder's entries down to the disk, where the system can.
fn sync(folder: &Path) -> Result<()> {
    if cfg!(unix) {
        let sync = File::open(folder).and_then(|folder| folder.sync_all());
        sync.map_err(VlmTrainError::file("write", folder))?;
    }
    Ok(())
}

pub(crate) fn value(of: &impl Serialize) -> Value {
    serde_json::to_value(of).unwrap_or_default()
}

/// Compares two runs' options.
///
/// # Errors
/// [`VlmTrainError::OtherRun`] with the first that differs.
pub(crate) fn same(name: &str, expected: &Value, found: &Value) -> Result<()> {
    match (expected, found) {
        (Value::Object(expected), Value::Object(found)) => {
            for key in expected.keys().chain(found.keys()) {
                let of = |object: &serde_json::Map<String, Value>| {
                    object.get(key).cloned().unwrap_or_default()
                };
                same(key, &of(expected), &of(found))?;
            }
            Ok(())
        }
        _ if expected == found => Ok(()),
        _ => Err(VlmTrainError::OtherRun {
            option: name.to_owned(),
            expected: expected.to_string(),
            found: found.to_string(),
        }),
    }
}

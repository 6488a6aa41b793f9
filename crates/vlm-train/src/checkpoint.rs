//! Saves a run, so that it can be stopped at any moment and continued bit-exactly.
//!
//! A checkpoint is a folder `checkpoint-<steps>` with `state.safetensors`, the trained parameters
//! with their masters and moments, and `run.json`, everything else. Both are written and synced to
//! disk in a folder of another name, which is then renamed; removing an earlier checkpoint starts
//! with its `run.json`. A folder of that name with a `run.json` is therefore complete, whenever the
//! run was killed, and from the first save on there always is one. Adapters are beside them in
//! PEFT's files, so that a checkpoint is also an adapter.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Device, Tensor};
use burn_attention::flattened;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use vlm_data::{DataPosition, Fingerprint};
use vlm_models::file::{Entry, Sink, Stored, TensorFile};
use vlm_models::{Parameter, Vlm};

use crate::error::{Result, VlmTrainError};
use crate::loss_scale::LossScale;
use crate::optimizer::State;
use crate::recipe::{Recipe, TrainedParts};
use crate::shards::Shards;
use crate::trainer::Trainer;

const PREFIX: &str = "checkpoint-";
const PARTIAL: &str = "checkpoint.partial";
const STATE: &str = "state.safetensors";
const RUN: &str = "run.json";
/// Elements transferred to or from a device at a time.
const PIECE: usize = 1 << 24;

/// The tensors of a parameter in files, in the order in which they are written: all parameters,
/// then all masters, and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Parameter,
    Master,
    First,
    Second,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Parameter, Self::Master, Self::First, Self::Second];

    /// The name of a parameter's tensor.
    fn tensor(self, parameter: &str) -> String {
        let kind = match self {
            Self::Parameter => "parameter",
            Self::Master => "master",
            Self::First => "first",
            Self::Second => "second",
        };
        format!("{kind}.{parameter}")
    }

    /// The type of a parameter's tensor.
    pub(crate) fn dtype(self, parameter: DType) -> DType {
        match (self, parameter) {
            (Self::Parameter, _) | (_, DType::F64) => parameter,
            _ => DType::F32,
        }
    }

    /// True if the optimizer's state has such a tensor.
    fn is_kept(self, state: &State, dtype: DType, recipe: &Recipe) -> bool {
        match self {
            Self::Parameter => true,
            Self::Master => state.keeps(dtype, recipe),
            Self::First | Self::Second => state.steps > 0,
        }
    }

    /// The tensor in the optimizer's state.
    pub(crate) fn of(self, state: &State) -> Option<Tensor<1>> {
        let moments = state.moments.clone();
        match self {
            Self::Parameter => None,
            Self::Master => state.master.clone(),
            Self::First => moments.map(|[first, _]| first),
            Self::Second => moments.map(|[_, second]| second),
        }
    }
}

/// The identity of a run: the options and fingerprints that determine its numbers besides the
/// recipe, by name. A run with a different identity cannot continue it.
pub type Identity = BTreeMap<String, Value>;

/// The format of a checkpoint. Version 0 had no digest, and texts in its identity; up to version 1,
/// the first matrix of an adapter was stored transposed.
const VERSION: u32 = 2;
const FIRST_OF_ADAPTER: &str = ".lora_A.weight";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Run {
    #[serde(default)]
    version: u32,
    recipe: Recipe,
    identity: Identity,
    steps: usize,
    /// The position in the data.
    position: Option<DataPosition>,
    /// The loss scale, in f16.
    loss_scale: Option<LossScale>,
    /// The validations so far.
    #[serde(default)]
    validations: Validations,
    /// The number of updates of each parameter.
    updates: BTreeMap<String, u64>,
    /// The FNV-1a hash of the tensors' bytes, in order.
    checksum: u64,
    /// The FNV-1a hash of the other fields.
    #[serde(default)]
    digest: u64,
}

impl Run {
    /// The hash of all fields but itself.
    fn hashed(mut self) -> std::result::Result<Self, serde_json::Error> {
        self.digest = 0;
        let mut hash = Fingerprint::default();
        hash.add(&serde_json::to_vec(&self)?);
        self.digest = hash.value();
        Ok(self)
    }

    /// Reads the run of a checkpoint, and checks what must agree.
    ///
    /// # Errors
    /// [`VlmTrainError::File`], [`VlmTrainError::Damaged`]
    fn read(folder: &Path, steps: usize) -> Result<Self> {
        let path = folder.join(RUN);
        let text = plain_files::read_text(&path, plain_files::MAX_TEXT_BYTES)?;
        let damaged = |reason: String| VlmTrainError::Damaged {
            path: path.clone(),
            reason,
        };
        let mut run: Self = serde_json::from_str(&text).map_err(|e| damaged(e.to_string()))?;
        if run.version > VERSION {
            let found = run.version;
            return Err(damaged(format!("version {found} is of a later release")));
        }
        if run.version == 0 {
            run.identity = identity_of_0(run.identity);
        } else {
            let digest = run.digest;
            run = run.hashed().map_err(|error| damaged(error.to_string()))?;
            if run.digest != digest {
                return Err(damaged("this is not the text that was saved".to_owned()));
            }
        }
        let most = run.updates.values().copied().max().unwrap_or(0);
        let of_recipe = run.recipe.steps;
        let reason = if run.steps != steps {
            format!(
                "it is of step {}, and its folder of step {steps}",
                run.steps
            )
        } else if steps > of_recipe {
            format!("it is of step {steps} of {of_recipe}")
        } else if most > steps.saturating_mul(run.recipe.updates()) as u64 {
            format!("a parameter has {most} updates in {steps} steps")
        } else {
            return Ok(run);
        };
        Err(damaged(reason))
    }

    /// Expects a recipe and an identity that continue this run.
    ///
    /// # Errors
    /// [`VlmTrainError::OtherRun`], [`VlmTrainError::OtherRates`]
    fn expect_continued(&self, recipe: &Recipe, identity: &Identity) -> Result<()> {
        // Options come first: the recipe follows from them.
        let mut found = self.identity.clone();
        if self.version == 0 {
            found.retain(|name, _| identity.contains_key(name));
            for (name, value) in identity {
                found.entry(name.clone()).or_insert_with(|| value.clone());
            }
        }
        same("run", &value(identity), &value(&found))?;
        if !recipe.had_rates_of(&self.recipe, self.steps) && recipe.steps != self.recipe.steps {
            return Err(VlmTrainError::OtherRates {
                expected: recipe.steps,
                found: self.recipe.steps,
                done: self.steps,
            });
        }
        let mut found = self.recipe.clone();
        // Activations computed anew have the same bits.
        found.recompute = recipe.recompute;
        if recipe.had_rates_of(&found, self.steps) {
            // More steps, whose rates so far were the same.
            (found.steps, found.warmup_steps) = (recipe.steps, recipe.warmup_steps);
            found.decay_steps = recipe.decay_steps;
        }
        same("recipe", &value(recipe), &value(&found))
    }
}

/// The identity of a run in the names and types of version 1.
fn identity_of_0(identity: Identity) -> Identity {
    let mut found = Identity::new();
    for (name, value) in identity {
        let text = value.as_str().unwrap_or_default();
        let number = |prefix: &str| -> Option<Value> {
            let digits = text.strip_prefix(prefix)?.strip_suffix(')')?;
            Some(digits.parse::<u64>().ok()?.into())
        };
        let (name, value) = match &name[..] {
            "precision" => (name, text.to_lowercase().into()),
            "batch" => match number("Tokens(") {
                Some(tokens) => ("batch-tokens".to_owned(), tokens),
                None => (name, number("Samples(").unwrap_or_default()),
            },
            "pixels" => ("max-pixels".to_owned(), number("Some(").unwrap_or_default()),
            "weights" | "data" => (name, value),
            // The path of the model, and the cut: they change no number.
            _ => continue,
        };
        found.insert(name, value);
    }
    found
}

/// The validations of a run so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Validations {
    /// The step with the least loss, and the loss.
    pub(crate) best: Option<(usize, f64)>,
    /// Validations since then.
    pub(crate) since: usize,
}

impl Trainer {
    /// Saves a checkpoint in a folder, and then removes the earlier ones but the last `keep - 1`.
    /// With several ranks, the first one writes and the others send their shards of the optimizer's
    /// state, so all must call this.
    ///
    /// # Errors
    /// [`VlmTrainError::File`], [`VlmTrainError::Model`], [`VlmTrainError::Device`]; the earlier
    /// checkpoint then still exists.
    pub(crate) fn save(
        &self,
        folder: &Path,
        identity: &Identity,
        base: &Path,
        keep: usize,
    ) -> Result<()> {
        if !self.is_first() {
            return self.lend(base);
        }
        let whole = folder.join(format!("{PREFIX}{:08}", self.steps));
        let mut earlier = complete(folder)?;
        if earlier.iter().any(|(_, path)| *path == whole) {
            return self.lend(base);
        }
        let partial = folder.join(PARTIAL);
        remove(&partial)?;
        remove(&whole)?;
        fs::create_dir_all(&partial).map_err(VlmTrainError::file("create", &partial))?;
        let checksum = self.write_state(&partial.join(STATE))?;
        if matches!(self.recipe.trained, TrainedParts::Lora(_)) {
            self.save_result(&partial, base)?;
        }
        let updates = self.parameters.iter().map(|parameter| {
            let state = self.optimizer.states.get(&parameter.id);
            let steps = state.map_or(0, |state| state.steps);
            (parameter.name.clone(), steps)
        });
        let run = Run {
            version: VERSION,
            recipe: self.recipe.clone(),
            identity: identity.clone(),
            steps: self.steps,
            position: self.position,
            loss_scale: self.loss_scale,
            validations: self.validations,
            updates: updates.collect(),
            checksum,
            digest: 0,
        };
        let path = partial.join(RUN);
        let json = run.hashed().and_then(|run| serde_json::to_vec(&run));
        let json = json.map_err(VlmTrainError::file("write", &path))?;
        plain_files::write_whole(&path, &json)?;
        sync(&partial)?;
        fs::rename(&partial, &whole).map_err(VlmTrainError::file("rename", &partial))?;
        sync(folder)?;
        earlier.truncate((earlier.len() + 1).saturating_sub(keep.max(1)));
        for (_, path) in earlier {
            let marker = path.join(RUN);
            fs::remove_file(&marker).map_err(VlmTrainError::file("remove", &marker))?;
            remove(&path)?;
        }
        Ok(())
    }

    /// Sends this rank's shards to the rank that writes.
    fn lend(&self, base: &Path) -> Result<()> {
        for kind in Kind::ALL {
            let mut tensors = self.wholes(kind);
            for parameter in self.kept(kind) {
                let lent = tensors.take(parameter.id);
                lent.map_err(|failure| failure.step_error(self.steps))?;
            }
        }
        if matches!(self.recipe.trained, TrainedParts::Lora(_)) {
            self.save_result(Path::new(""), base)?;
        }
        Ok(())
    }

    /// Continues the run in a folder from its last checkpoint, on any number of ranks. The trainer
    /// must hold the model with which the run started; `identity` states the run's other parts. The
    /// recipe may have more steps, if the rates of all completed steps are the same.
    ///
    /// # Errors
    /// [`VlmTrainError::NoCheckpoint`], [`VlmTrainError::OtherRun`],
    /// [`VlmTrainError::OtherRates`], [`VlmTrainError::Damaged`], [`VlmTrainError::File`].
    pub fn resume(mut self, folder: impl AsRef<Path>, identity: &Identity) -> Result<Self> {
        let folder = folder.as_ref();
        let Some((steps, path)) = complete(folder)?.pop() else {
            let folder = folder.to_owned();
            return Err(VlmTrainError::NoCheckpoint { folder });
        };
        let run = Run::read(&path, steps)?;
        run.expect_continued(&self.recipe, identity)?;
        let mut names: Vec<&String> = self.parameters.iter().map(|p| &p.name).collect();
        names.sort();
        if !run.updates.keys().eq(names) {
            let (path, reason) = (path.join(RUN), "it names other parameters".to_owned());
            return Err(VlmTrainError::Damaged { path, reason });
        }
        self.steps = run.steps;
        self.position = run.position;
        self.loss_scale = run.loss_scale;
        self.validations = run.validations;
        self.read_state(&path.join(STATE), &run)?;
        Ok(self)
    }

    /// The elements of a parameter on all ranks together.
    pub(crate) fn whole_elements(&self, parameter: &Parameter) -> usize {
        let axis = self
            .expert_ranks()
            .and_then(|(experts, _)| experts.axis(parameter.id));
        axis.map_or(parameter.elements(), |axis| axis.elements())
    }

    /// The parameters with tensors of a kind in files.
    fn kept(&self, kind: Kind) -> Vec<&Parameter> {
        let is_kept = |parameter: &&Parameter| {
            let state = self.optimizer.states.get(&parameter.id);
            state.is_some_and(|state| kind.is_kept(state, parameter.dtype, &self.recipe))
        };
        self.parameters.iter().filter(is_kept).collect()
    }

    /// Writes the state, and returns its checksum.
    fn write_state(&self, path: &Path) -> Result<u64> {
        let step = self.steps;
        let mut entries = Vec::new();
        for kind in Kind::ALL {
            entries.extend(self.kept(kind).into_iter().map(|parameter| Entry {
                name: kind.tensor(&parameter.name),
                shape: vec![self.whole_elements(parameter)],
                dtype: kind.dtype(parameter.dtype),
            }));
        }
        let mut sink = Sink::create(path, &entries)?;
        let mut checksum = Fingerprint::default();
        for kind in Kind::ALL {
            let kept = self.kept(kind);
            let mut tensors = self.wholes(kind);
            for parameter in kept {
                let tensor = tensors.take(parameter.id);
                let Some(tensor) = tensor.map_err(|failure| failure.step_error(step))? else {
                    continue;
                };
                let elements = self.whole_elements(parameter);
                for start in (0..elements).step_by(PIECE) {
                    let piece = tensor.clone().slice(start..elements.min(start + PIECE));
                    let data = piece.try_into_data();
                    let data = data.map_err(|error| VlmTrainError::Device {
                        step,
                        reason: error.reason().to_owned(),
                    })?;
                    checksum.add(data.bytes());
                    sink.write(data.bytes())?;
                }
            }
        }
        sink.commit()?;
        Ok(checksum.value())
    }

    /// Reads the state from a file, of what is in shards this rank's parts.
    fn read_state(&mut self, path: &Path, run: &Run) -> Result<()> {
        let damaged = |reason: String| VlmTrainError::Damaged {
            path: path.to_owned(),
            reason,
        };
        let source = TensorFile::open(path)?;
        let mut stored = source.tensors();
        let device = self.model.device().inner();
        let peers = self.peers.as_ref();
        let shards = peers.and_then(|peers| peers.shards.as_ref());
        let experts = peers.and_then(|peers| peers.experts.as_ref());
        let mut found = Vec::new();
        for parameter in &self.parameters {
            let Some(state) = self.optimizer.states.get_mut(&parameter.id) else {
                continue;
            };
            state.steps = run.updates.get(&parameter.name).copied().unwrap_or(0);
            for kind in Kind::ALL {
                let name = kind.tensor(&parameter.name);
                match stored.remove(&name) {
                    Some(stored) => found.push((stored, kind, parameter)),
                    None if kind.is_kept(state, parameter.dtype, &self.recipe) => {
                        return Err(damaged(format!("it lacks {name}")));
                    }
                    None => {}
                }
            }
        }
        // The checksum covers the bytes in file order.
        found.sort_by_key(|(stored, ..)| stored.bytes().start);
        let mut checksum = Fingerprint::default();
        let mut values = HashMap::new();
        let mut moments: HashMap<ParamId, [Option<Tensor<1>>; 2]> = HashMap::new();
        for (stored, kind, parameter) in found {
            let axis = experts.and_then(|experts| Some((experts, experts.axis(parameter.id)?)));
            let elements = axis.map_or(parameter.elements(), |(_, axis)| axis.elements());
            let dtype = kind.dtype(parameter.dtype);
            if stored.shape != [elements] || stored.dtype() != Some(dtype) {
                let name = kind.tensor(&parameter.name);
                return Err(damaged(format!("{name} is not {elements} of {dtype:?}")));
            }
            let divided = |shards: &&Shards| kind != Kind::Parameter || shards.has_weights();
            let own = match shards.filter(divided) {
                Some(shards) => shards.own(parameter.id).unwrap_or(0..0),
                None => 0..elements,
            };
            let is_old = run.version < 2 && parameter.name.ends_with(FIRST_OF_ADAPTER);
            let transposed = is_old.then(|| parameter.shape.clone());
            let whole = Whole {
                source: &source,
                stored,
                elements,
                dtype,
            };
            let Some(tensor) = whole.read(own, transposed, &device, &mut checksum)? else {
                continue;
            };
            let tensor = match axis {
                Some((experts, axis)) => experts.cut(axis, tensor)?,
                None => tensor,
            };
            let id = parameter.id;
            match kind {
                Kind::Parameter => {
                    values.insert(id, tensor);
                }
                Kind::Master => self.optimizer.states.entry(id).or_default().master = Some(tensor),
                Kind::First => moments.entry(id).or_default()[0] = Some(tensor),
                Kind::Second => moments.entry(id).or_default()[1] = Some(tensor),
            }
        }
        let shards = self.peers.as_mut().and_then(|peers| peers.shards.as_mut());
        if shards.as_ref().is_some_and(|shards| shards.has_masters()) {
            let states = self.optimizer.states.iter_mut();
            values.extend(states.filter_map(|(id, state)| Some((*id, state.master.take()?))));
        }
        for (id, moments) in moments {
            let [Some(first), Some(second)] = moments else {
                return Err(damaged(
                    "one of a parameter's two moments is missing".to_owned(),
                ));
            };
            self.optimizer.states.entry(id).or_default().moments = Some([first, second]);
        }
        if !stored.is_empty() || checksum.value() != run.checksum {
            return Err(damaged(
                "these are not the bytes that were saved".to_owned(),
            ));
        }
        match shards {
            Some(shards) if shards.has_weights() => shards.set_weights(values, &device),
            _ => self.model = self.model.clone().with_values(values),
        }
        Ok(())
    }
}

/// A tensor of a checkpoint's file.
struct Whole<'a> {
    source: &'a TensorFile,
    stored: Stored,
    elements: usize,
    dtype: DType,
}

impl Whole<'_> {
    /// Reads all bytes into the checksum, and returns the elements of a rank, if it has any. They
    /// count in the parameter's shape where the file has its transpose, as before version 2.
    fn read(
        &self,
        own: Range<usize>,
        transposed: Option<Vec<usize>>,
        device: &Device,
        checksum: &mut Fingerprint,
    ) -> Result<Option<Tensor<1>>> {
        let kept = match &transposed {
            Some(_) => 0..self.elements,
            None => own.clone(),
        };
        let mut pieces = Vec::new();
        for part in [0..kept.start, kept.clone(), kept.end..self.elements] {
            for start in part.clone().step_by(PIECE) {
                let range = start..part.end.min(start + PIECE);
                let data = self.source.read(&self.stored, self.dtype, range)?;
                checksum.add(data.bytes());
                if part == kept {
                    pieces.push(Tensor::<1>::from_data(data, (device, self.dtype)));
                }
            }
        }
        if pieces.is_empty() || own.is_empty() {
            return Ok(None);
        }
        let tensor = Tensor::cat(pieces, 0);
        Ok(Some(match transposed.as_deref() {
            Some([rank, inputs]) => {
                let matrix = tensor.reshape([*inputs, *rank]).transpose();
                matrix.reshape([self.elements]).slice(own)
            }
            _ => tensor,
        }))
    }
}

/// Rejects a folder that contains a run.
///
/// # Errors
/// [`VlmTrainError::Taken`], [`VlmTrainError::File`]
pub(crate) fn expect_free(folder: &Path) -> Result<()> {
    match complete(folder)?.pop() {
        Some((_, path)) => Err(VlmTrainError::Taken { path }),
        None => Ok(()),
    }
}

/// The values of a model's trained parameters, flat and without autodiff; with `frozen`, of all.
pub(crate) fn values(model: &Vlm, frozen: bool) -> HashMap<ParamId, Tensor<1>> {
    struct Values(bool, Vec<(ParamId, DispatchTensor)>);
    impl ModuleVisitor for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let tensor = param.val();
            if self.0 || tensor.is_require_grad() {
                self.1.push((param.id, tensor.inner().into_dispatch()));
            }
        }
    }
    let mut values = Values(frozen, Vec::new());
    model.visit(&mut values);
    let (ids, values): (Vec<ParamId>, Vec<DispatchTensor>) = values.1.into_iter().unzip();
    ids.into_iter().zip(flattened(values)).collect()
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

pub(crate) fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(VlmTrainError::file("remove", folder)(error))
        }
        _ => Ok(()),
    }
}

/// Syncs a folder's entries to disk, if the system supports it.
pub(crate) fn sync(folder: &Path) -> Result<()> {
    Ok(plain_files::sync_folder(folder)?)
}

pub(crate) fn value(of: &impl Serialize) -> Value {
    serde_json::to_value(of).unwrap_or_default()
}

/// Compares two runs' options; those in objects, which follow from others, last.
///
/// # Errors
/// [`VlmTrainError::OtherRun`] with the first option that differs.
pub(crate) fn same(name: &str, expected: &Value, found: &Value) -> Result<()> {
    match (expected, found) {
        (Value::Object(expected), Value::Object(found)) => {
            let of = |object: &serde_json::Map<String, Value>, key: &String| {
                object.get(key).cloned().unwrap_or_default()
            };
            let keys = expected.keys().chain(found.keys());
            let pairs = keys.map(|key| (key, of(expected, key), of(found, key)));
            let (nested, flat): (Vec<_>, Vec<_>) = pairs.partition(|(_, own, _)| own.is_object());
            let mut pairs = flat.iter().chain(&nested);
            pairs.try_for_each(|(key, own, other)| same(key, own, other))
        }
        _ if expected == found => Ok(()),
        _ => Err(VlmTrainError::OtherRun {
            option: name.to_owned(),
            expected: expected.to_string(),
            found: found.to_string(),
        }),
    }
}

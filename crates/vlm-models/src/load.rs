//! Reading and writing checkpoints.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_store::KeyRemapper;
use plain_files::Fingerprint;
use serde::Deserialize;

use crate::config::VlmConfig;
use crate::error::{Result, VlmError};
use crate::experts::EXPERT_MATRICES;
use crate::file::{self, Entry, Sink, Stored, TensorFile};
use crate::model::Vlm;
use crate::names::{ModulePath, Remap as _, rename};
use crate::transfer::Transfer;
use crate::walk::{self, stand_in};

pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// The index of a sharded checkpoint.
#[derive(Deserialize)]
struct Index {
    /// The shard of each tensor.
    weight_map: BTreeMap<String, String>,
}

impl VlmConfig {
    /// Loads a model with the weights of a checkpoint folder: `model.safetensors`, or if it does
    /// not exist, the tensors in `model.safetensors.index.json`, each from the shard stated there.
    /// Other tensors of the shards are not read. Weights are converted to the device's float type.
    ///
    /// # Errors
    /// [`VlmError::File`], [`VlmError::NotInShard`], [`VlmError::TwoSpellings`],
    /// [`VlmError::MissingTensors`], [`VlmError::UnusedTensors`], [`VlmError::TensorShape`],
    /// [`VlmError::TensorUnreadable`]; [`VlmError::Transfer`] if the device fails before it has the
    /// whole model; those of [`init`](Self::init).
    pub fn load(&self, folder: impl AsRef<Path>, device: &Device) -> Result<Vlm> {
        self.load_with(folder, device, Transfer::default())
    }

    /// As [`load`](Self::load), with a chosen chunk size and a progress report after each chunk.
    ///
    /// # Errors
    /// Those of [`load`](Self::load).
    pub fn load_with(
        &self,
        folder: impl AsRef<Path>,
        device: &Device,
        transfer: Transfer<'_>,
    ) -> Result<Vlm> {
        let model = self.init(device)?;
        let files = weights(folder.as_ref())?;
        let found = self.found(&files)?;
        let dtype = DType::from(device.settings().float_dtype);
        let mut model = model.fill(Kind::Base, &files, &found, dtype, transfer)?;
        model.fingerprint = Some(fingerprint(&files, &found)?);
        Ok(model)
    }

    /// Creates the model of a checkpoint folder, which is checked as by [`load`](Self::load), with
    /// stand-ins for its weights: none is read. [`load_parts`](Self::load_parts) reads them.
    ///
    /// # Errors
    /// Those of [`load`](Self::load).
    pub fn load_stand_ins(&self, folder: impl AsRef<Path>, device: &Device) -> Result<Vlm> {
        let mut model = self.init(device)?.map(&mut Hollow::default());
        let files = weights(folder.as_ref())?;
        let found = self.found(&files)?;
        model.plan(Kind::Base, &found)?;
        model.fingerprint = Some(fingerprint(&files, &found)?);
        Ok(model)
    }

    /// Reads from a checkpoint folder the elements of a model's weights that `own` names, in the
    /// order of the module. The device has one whole weight at a time.
    ///
    /// # Errors
    /// Those of [`load`](Self::load).
    pub fn load_parts(
        &self,
        folder: impl AsRef<Path>,
        model: &Vlm,
        own: &dyn Fn(ParamId) -> Option<Range<usize>>,
    ) -> Result<walk::Weights> {
        let files = weights(folder.as_ref())?;
        let found = self.found(&files)?;
        let uses = model.plan(Kind::Base, &found)?;
        let (dtype, transfer) = (model.dtype(), Transfer::default());
        let load = Load::new(&files, uses, dtype, transfer, Some(own));
        Ok(model.clone().fill_with(load)?.1)
    }

    /// The tensors of a checkpoint, by the names of their parameters.
    ///
    /// # Errors
    /// [`VlmError::TwoSpellings`]; for experts in parts, [`VlmError::MissingTensors`],
    /// [`VlmError::TensorShape`], [`VlmError::TensorUnreadable`].
    pub(crate) fn found(&self, files: &[Weights]) -> Result<BTreeMap<String, Found>> {
        let to_module = self.family.names.to_module();
        // A tied head may be stored, older checkpoints store the frequencies, and some have parts
        // that no model reads.
        let is_no_parameter = |path: &str| {
            (self.tied && path == "lm_head.weight")
                || path.ends_with("rotary_emb.inv_freq")
                || self.family.names.is_unread(path)
        };
        let mut found: BTreeMap<String, Found> = BTreeMap::new();
        for (file, weights) in files.iter().enumerate() {
            for (name, stored) in &weights.tensors {
                let path = rename(&to_module, name);
                if is_no_parameter(&path) {
                    continue;
                }
                let tensor = Found::new(name.clone(), file, stored.clone());
                if let Some(other) = found.insert(path, tensor) {
                    return Err(VlmError::TwoSpellings {
                        names: [other.name, name.clone()],
                        files: [other.file, file].map(|file| files[file].source.path().to_owned()),
                    });
                }
            }
        }
        if let Some(experts) = &self.text.experts {
            join_experts(&mut found, experts.experts)?;
        }
        Ok(found)
    }
}

/// Joins the matrices of single experts, as many checkpoints store them, to one tensor for each
/// parameter.
///
/// # Errors
/// [`VlmError::MissingTensors`], [`VlmError::TensorShape`], [`VlmError::TensorUnreadable`]
fn join_experts(found: &mut BTreeMap<String, Found>, experts: usize) -> Result<()> {
    const EXPERTS: &str = ".mlp.experts.";
    // The networks with single experts, in the module and in the file.
    let single = found.iter().filter_map(|(path, stored)| {
        let (network, rest) = path.split_once(EXPERTS)?;
        let (expert, _) = rest.split_once('.')?;
        let _number: usize = expert.parse().ok()?;
        let (name, _) = stored.name.split_once(EXPERTS)?;
        Some((format!("{network}{EXPERTS}"), format!("{name}{EXPERTS}")))
    });
    let networks: BTreeMap<String, String> = single.collect();
    let mut missing = Vec::new();
    for (network, name) in networks {
        for (parameter, matrices) in EXPERT_MATRICES {
            let mut pieces = Vec::with_capacity(matrices.len());
            for expert in 0..experts {
                for matrix in matrices {
                    let path = |of: &str| format!("{of}{expert}.{matrix}.weight");
                    match found.remove(&path(&network)) {
                        Some(piece) => pieces.push(piece),
                        None => missing.push(path(&name)),
                    }
                }
            }
            let Some(first) = pieces.first().filter(|_| missing.is_empty()) else {
                continue;
            };
            let [rows, columns] = first.stored.shape[..] else {
                let (name, found) = (first.name.clone(), first.stored.shape.clone());
                let reason = format!("expected the matrix of an expert, found {found:?}");
                return Err(VlmError::TensorUnreadable { name, reason });
            };
            let dtype = first.float()?;
            for piece in &pieces {
                piece.expect_like(&[rows, columns], dtype)?;
            }
            let mut whole = first.clone();
            whole.stored.shape = vec![experts, matrices.len() * rows, columns];
            whole.pieces = pieces;
            found.insert(format!("{network}{parameter}"), whole);
        }
    }
    match missing.is_empty() {
        true => Ok(()),
        false => Err(VlmError::MissingTensors { names: missing }),
    }
}

/// A file of weights, and the tensors to read from it.
#[derive(Debug)]
pub(crate) struct Weights {
    pub(crate) source: TensorFile,
    pub(crate) tensors: BTreeMap<String, Stored>,
}

/// A tensor of the checkpoint.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    /// Its name in the file.
    pub(crate) name: String,
    /// Index of the file.
    pub(crate) file: usize,
    pub(crate) stored: Stored,
    /// The tensors that it joins, of equal shape and type; none if it is one in the file.
    pub(crate) pieces: Vec<Found>,
    /// Its elements, if they were computed from others of the file.
    pub(crate) values: Option<Arc<TensorData>>,
}

impl Found {
    pub(crate) fn new(name: String, file: usize, stored: Stored) -> Self {
        Self {
            name,
            file,
            stored,
            pieces: Vec::new(),
            values: None,
        }
    }

    /// The tensor with these elements in place of its own.
    pub(crate) fn with_values(mut self, values: TensorData) -> Self {
        self.stored.shape = values.shape().to_vec();
        self.values = Some(Arc::new(values));
        self
    }

    /// Reads elements; `dtype` must be its type.
    ///
    /// # Errors
    /// [`VlmError::File`]
    pub(crate) fn read(
        &self,
        files: &[Weights],
        dtype: DType,
        elements: Range<usize>,
    ) -> Result<TensorData> {
        if let Some(values) = &self.values {
            let bytes = elements.start * dtype.size()..elements.end * dtype.size();
            let bytes = values.bytes()[bytes].to_vec();
            return Ok(TensorData::from_bytes_vec(bytes, [elements.len()], dtype));
        }
        let Some(first) = self.pieces.first() else {
            return files[self.file].source.read(&self.stored, dtype, elements);
        };
        let (length, end) = (first.stored.elements(), elements.end);
        let (mut bytes, mut next) = (Vec::new(), elements.start);
        while next < end {
            let (piece, start) = (&self.pieces[next / length], next % length);
            let part = start..length.min(start + end - next);
            next += part.len();
            bytes.extend_from_slice(piece.read(files, dtype, part)?.bytes());
        }
        Ok(TensorData::from_bytes_vec(bytes, [elements.len()], dtype))
    }

    /// As [`read`](Self::read), with the last two of three dimensions exchanged.
    ///
    /// # Errors
    /// [`VlmError::File`]
    pub(crate) fn read_swapped(
        &self,
        files: &[Weights],
        dtype: DType,
        elements: Range<usize>,
    ) -> Result<TensorData> {
        let [rows, columns] = [self.stored.shape[1], self.stored.shape[2]];
        let (length, width) = (rows * columns, dtype.size());
        let (mut bytes, mut next) = (Vec::with_capacity(elements.len() * width), elements.start);
        while next < elements.end {
            let (matrix, start) = (next / length, next % length);
            let part = start..length.min(start + elements.end - next);
            next += part.len();
            let stored = self.read(files, dtype, matrix * length..(matrix + 1) * length)?;
            for element in part {
                let from = (element % rows * columns + element / rows) * width;
                bytes.extend_from_slice(&stored.bytes()[from..from + width]);
            }
        }
        Ok(TensorData::from_bytes_vec(bytes, [elements.len()], dtype))
    }

    /// The type of its elements, which must be floats.
    ///
    /// # Errors
    /// [`VlmError::TensorUnreadable`]
    pub(crate) fn float(&self) -> Result<DType> {
        self.stored.dtype().ok_or_else(|| {
            let (name, found) = (self.name.clone(), self.stored.dtype);
            let reason = format!("it holds {found:?}, expected floats");
            VlmError::TensorUnreadable { name, reason }
        })
    }

    /// As [`float`](Self::float), for a tensor that must have a shape.
    ///
    /// # Errors
    /// [`VlmError::TensorShape`], [`VlmError::TensorUnreadable`]
    pub(crate) fn expect(&self, shape: &[usize]) -> Result<DType> {
        let dtype = self.float()?;
        if self.stored.shape == shape {
            return Ok(dtype);
        }
        Err(VlmError::TensorShape {
            name: self.name.clone(),
            expected: shape.to_vec(),
            found: self.stored.shape.clone(),
        })
    }

    /// As [`expect`](Self::expect), for one of several that are joined.
    ///
    /// # Errors
    /// [`VlmError::TensorShape`], [`VlmError::TensorUnreadable`]
    pub(crate) fn expect_like(&self, shape: &[usize], dtype: DType) -> Result<()> {
        let found = self.expect(shape)?;
        if found == dtype {
            return Ok(());
        }
        let reason = format!("expected {dtype:?}, as of other experts, found {found:?}");
        let name = self.name.clone();
        Err(VlmError::TensorUnreadable { name, reason })
    }
}

/// The parameters that a file has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind<'a> {
    /// All but those of adapters.
    Base,
    /// Those of adapters.
    Adapter,
    /// Those with these names in the module, trained whole beside adapters.
    Whole(&'a BTreeSet<String>),
}

impl Kind<'_> {
    /// True if the parameter at `path` is one of them.
    pub(crate) fn holds(self, path: &ModulePath) -> bool {
        match self {
            Self::Base => !path.is_adapter(),
            Self::Adapter => path.is_adapter(),
            Self::Whole(names) => names.contains(&path.name()),
        }
    }
}

/// A tensor of the checkpoint for a parameter.
#[derive(Clone, Copy)]
pub(crate) struct Part<'a> {
    pub(crate) found: &'a Found,
    pub(crate) dtype: DType,
    /// True if the last two of its three dimensions are exchanged in the file: the experts of
    /// Qwen3-VL, as transformers 4 saved them. As in transformers 5, the shape decides: of equal
    /// dimensions, a file is taken to be of transformers 5.
    pub(crate) is_swapped: bool,
}

impl Part<'_> {
    fn bytes(&self) -> usize {
        self.found.stored.shape.iter().product::<usize>() * self.dtype.size()
    }
}

/// Finds the tensor of each parameter before any elements are read.
struct Plan<'a> {
    kind: Kind<'a>,
    found: &'a BTreeMap<String, Found>,
    to_checkpoint: KeyRemapper,
    path: ModulePath,
    /// The tensors, by the parameter's name in the module.
    uses: BTreeMap<String, Part<'a>>,
    /// Missing tensors, by their names in the checkpoint.
    missing: Vec<String>,
    error: Option<VlmError>,
}

impl ModuleVisitor for Plan<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.path.exit(container);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.kind.holds(&self.path) {
            return;
        }
        let path = self.path.name();
        let Some(found) = self.found.get(&path) else {
            self.missing
                .push(self.path.checkpoint_name(&self.to_checkpoint));
            return;
        };
        let mut expected = param.lazy_shape().to_vec();
        if self.path.is_transposed() {
            expected.reverse();
        }
        let mut swapped = expected.clone();
        swapped.reverse();
        swapped.rotate_right(1);
        let is_swapped = D == 3 && found.stored.shape != expected && found.stored.shape == swapped;
        match found.expect(if is_swapped { &swapped } else { &expected }) {
            Ok(dtype) => {
                let part = Part {
                    found,
                    dtype,
                    is_swapped,
                };
                self.uses.insert(path, part);
            }
            Err(error) => _ = self.error.get_or_insert(error),
        }
    }
}

/// Replaces parameters by stand-ins, without drawing their values.
#[derive(Default)]
struct Hollow {
    path: ModulePath,
}

impl ModuleMapper for Hollow {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.path.exit(container);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, device) = (param.id, param.lazy_device());
        let dtype = self.path.dtype(device.settings().float_dtype.into());
        let like = (&device.clone().inner(), dtype);
        let tensor = stand_in::<D>(param.lazy_shape().dims(), like);
        param.transform_for_load(Tensor::from_inner(tensor), id)
    }
}

/// Fills parameters from files.
pub(crate) struct Load<'a, 'p> {
    files: &'a [Weights],
    uses: BTreeMap<String, Part<'a>>,
    /// The type of parameters on the device.
    dtype: DType,
    path: ModulePath,
    transfer: Transfer<'p>,
    /// The elements to keep apart, instead of filling parameters.
    own: Option<&'a dyn Fn(ParamId) -> Option<Range<usize>>>,
    parts: walk::Weights,
    error: Option<VlmError>,
}

impl<'a, 'p> Load<'a, 'p> {
    pub(crate) fn new(
        files: &'a [Weights],
        uses: BTreeMap<String, Part<'a>>,
        dtype: DType,
        transfer: Transfer<'p>,
        own: Option<&'a dyn Fn(ParamId) -> Option<Range<usize>>>,
    ) -> Self {
        Self {
            files,
            uses,
            dtype,
            path: ModulePath::default(),
            transfer,
            own,
            parts: walk::Weights::new(),
            error: None,
        }
    }
}

impl ModuleMapper for Load<'_, '_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.path.exit(container);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let part = self.uses.get(&self.path.name());
        let (Some(part), None) = (part, &self.error) else {
            return param;
        };
        let Part { found, dtype, .. } = part;
        let own = match self.own.map(|own| own(param.id)) {
            Some(None) => return param,
            Some(own) => own,
            None => None,
        };
        let dims: [usize; D] = param.lazy_shape().dims();
        let device = param.lazy_device();
        let to = (&device, self.path.dtype(self.dtype));
        let read = |elements| match part.is_swapped {
            true => found.read_swapped(self.files, *dtype, elements),
            false => found.read(self.files, *dtype, elements),
        };
        let tensor = if self.path.is_transposed() {
            let matrix = [dims[0], dims[1]];
            let tensor = self
                .transfer
                .upload_transposed(&found.name, matrix, to, read);
            tensor.map(|tensor| tensor.reshape(dims))
        } else {
            self.transfer.upload(&found.name, dims, to, read)
        };
        let id = param.id;
        match (tensor, own) {
            (Ok(tensor), None) => param.transform_for_load(tensor, id),
            (Ok(tensor), Some(own)) => {
                let elements: usize = dims.iter().product();
                let part = tensor.inner().reshape([elements]).slice(own);
                // A view would keep the whole.
                let copy = part.zeros_like().slice_assign(0..part.dims()[0], part);
                self.parts.insert(id, copy);
                param
            }
            (Err(error), _) => {
                self.error = Some(error);
                param
            }
        }
    }
}

impl Vlm {
    /// Fills the parameters of a kind from files, by the parameters' names.
    ///
    /// # Errors
    /// [`VlmError::File`], [`VlmError::MissingTensors`], [`VlmError::UnusedTensors`],
    /// [`VlmError::TensorShape`], [`VlmError::TensorUnreadable`], [`VlmError::Transfer`].
    pub(crate) fn fill(
        self,
        kind: Kind<'_>,
        files: &[Weights],
        found: &BTreeMap<String, Found>,
        dtype: DType,
        transfer: Transfer<'_>,
    ) -> Result<Self> {
        let uses = self.plan(kind, found)?;
        let load = Load::new(files, uses, dtype, transfer, None);
        Ok(self.fill_with(load)?.0)
    }

    /// The tensor for each parameter of a kind, with no elements read yet.
    ///
    /// # Errors
    /// [`VlmError::MissingTensors`], [`VlmError::UnusedTensors`],
    /// [`VlmError::TensorShape`], [`VlmError::TensorUnreadable`].
    pub(crate) fn plan<'a>(
        &self,
        kind: Kind<'a>,
        found: &'a BTreeMap<String, Found>,
    ) -> Result<BTreeMap<String, Part<'a>>> {
        let mut plan = Plan {
            kind,
            found,
            to_checkpoint: self.names(kind),
            path: ModulePath::default(),
            uses: BTreeMap::new(),
            missing: Vec::new(),
            error: None,
        };
        self.visit(&mut plan);
        let Plan {
            uses,
            missing,
            error,
            ..
        } = plan;
        error.map_or(Ok(()), Err)?;
        if !missing.is_empty() {
            return Err(VlmError::MissingTensors { names: missing });
        }
        let unused = found.iter().filter(|(path, _)| !uses.contains_key(*path));
        let mut unused: Vec<String> = unused.map(|(_, tensor)| tensor.name.clone()).collect();
        if !unused.is_empty() {
            unused.sort();
            return Err(VlmError::UnusedTensors { names: unused });
        }
        Ok(uses)
    }

    /// Fills parameters and leaves the others unchanged. Returns what is kept apart, too.
    ///
    /// # Errors
    /// [`VlmError::File`], [`VlmError::Transfer`].
    pub(crate) fn fill_with(self, mut load: Load<'_, '_>) -> Result<(Self, walk::Weights)> {
        let device = self.device();
        let total = load.uses.values().map(|part| part.bytes() as u64).sum();
        load.transfer.begin(total);
        let model = self.map(&mut load);
        load.error.map_or(Ok(()), Err)?;
        // Until the device confirms the last chunk, part of the model may be lost.
        load.transfer.confirm(SINGLE, &device)?;
        Ok((model, load.parts))
    }

    /// The map from module names to the names in a file of a kind.
    fn names(&self, kind: Kind<'_>) -> KeyRemapper {
        match kind {
            Kind::Base => self.family.names.to_checkpoint(),
            Kind::Adapter | Kind::Whole(_) => self.family.names.to_class(),
        }
    }

    /// Writes `model.safetensors` into a folder, with the names of the family's checkpoints. An
    /// existing file is replaced once the new one is complete.
    ///
    /// Then `model.safetensors.index.json` is removed, so that it cannot refer to older weights.
    /// Its shards are kept: they belong to the caller.
    ///
    /// # Errors
    /// [`VlmError::File`]; [`VlmError::Transfer`] if the device fails. The existing file is then
    /// kept.
    pub fn save(&self, folder: impl AsRef<Path>) -> Result<()> {
        self.save_with(folder, Transfer::default())
    }

    /// As [`save`](Self::save), with a chosen chunk size and a progress report after each chunk.
    ///
    /// # Errors
    /// Those of [`save`](Self::save).
    pub fn save_with(&self, folder: impl AsRef<Path>, transfer: Transfer<'_>) -> Result<()> {
        self.write(folder.as_ref(), transfer, None)
    }

    /// As [`save`](Self::save), with the elements of each parameter from a function, flat and without
    /// autodiff. It is called in the order of the module.
    ///
    /// # Errors
    /// Those of [`save`](Self::save) and of the function.
    pub fn save_of(
        &self,
        folder: impl AsRef<Path>,
        of: &mut dyn FnMut(ParamId) -> Result<Tensor<1>>,
    ) -> Result<()> {
        self.write(folder.as_ref(), Transfer::default(), Some(of))
    }

    fn write(
        &self,
        folder: &Path,
        mut transfer: Transfer<'_>,
        of: Option<&mut Elements<'_>>,
    ) -> Result<()> {
        let path = folder.join(SINGLE);
        let entries = self.entries(Kind::Base);
        transfer.begin(entries.iter().map(|entry| entry.bytes() as u64).sum());
        let mut sink = Sink::create(&path, &entries)?;
        self.read_of(Kind::Base, &mut transfer, of, |_, data| {
            sink.write(data.bytes())
        })?;
        sink.commit()?;
        let index = folder.join(INDEX);
        match std::fs::remove_file(&index) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(VlmError::file("remove", &index)(error))
            }
            _ => Ok(()),
        }
    }

    /// Reads every parameter, with its name and shape in a checkpoint.
    ///
    /// # Errors
    /// [`VlmError::Transfer`] if a tensor cannot be read from its device.
    pub fn checkpoint_tensors(&self) -> Result<BTreeMap<String, TensorData>> {
        let entries = self.entries(Kind::Base);
        let mut bytes: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        self.read(Kind::Base, &mut Transfer::default(), |name, data| {
            bytes
                .entry(name.to_owned())
                .or_default()
                .extend_from_slice(data.bytes());
            Ok(())
        })?;
        let named = entries.into_iter().map(|Entry { name, shape, dtype }| {
            let bytes = bytes.remove(&name).unwrap_or_default();
            (name, TensorData::from_bytes_vec(bytes, shape, dtype))
        });
        Ok(named.collect())
    }

    /// Reads the gradient of every parameter, with its name and shape in a checkpoint. Missing
    /// gradients are zeros.
    ///
    /// # Errors
    /// [`VlmError::Transfer`] if a tensor cannot be read from its device.
    pub fn checkpoint_gradients(
        &self,
        gradients: GradientsParams,
    ) -> Result<BTreeMap<String, TensorData>> {
        self.valid()
            .map(&mut TakeGradients { gradients })
            .checkpoint_tensors()
    }

    /// Every parameter of a kind in its form in a file, in the order of [`read`](Self::read).
    pub(crate) fn entries(&self, kind: Kind<'_>) -> Vec<Entry> {
        let mut list = List {
            kind,
            to_checkpoint: self.names(kind),
            path: ModulePath::default(),
            entries: Vec::new(),
        };
        self.visit(&mut list);
        list.entries
    }

    /// Reads every parameter of a kind from its device and passes each chunk to `write`, with the
    /// parameter's name in a file.
    pub(crate) fn read(
        &self,
        kind: Kind<'_>,
        transfer: &mut Transfer<'_>,
        write: impl FnMut(&str, TensorData) -> Result<()>,
    ) -> Result<()> {
        self.read_of(kind, transfer, None, write)
    }

    fn read_of(
        &self,
        kind: Kind<'_>,
        transfer: &mut Transfer<'_>,
        of: Option<&mut Elements<'_>>,
        write: impl FnMut(&str, TensorData) -> Result<()>,
    ) -> Result<()> {
        let mut read = Read {
            kind,
            to_checkpoint: self.names(kind),
            path: ModulePath::default(),
            transfer,
            of: match of {
                Some(of) => Some(of),
                None => None,
            },
            write,
            result: Ok(()),
        };
        self.visit(&mut read);
        read.result
    }
}

/// Returns the elements of a parameter.
type Elements<'a> = dyn FnMut(ParamId) -> Result<Tensor<1>> + 'a;

/// Lists parameters.
struct List<'a> {
    kind: Kind<'a>,
    to_checkpoint: KeyRemapper,
    path: ModulePath,
    entries: Vec<Entry>,
}

impl ModuleVisitor for List<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.path.exit(container);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.kind.holds(&self.path) {
            return;
        }
        let mut shape = param.lazy_shape().to_vec();
        if self.path.is_transposed() {
            shape.reverse();
        }
        self.entries.push(Entry {
            name: self.path.checkpoint_name(&self.to_checkpoint),
            shape,
            dtype: param.val().dtype(),
        });
    }
}

/// Reads parameters from their device.
struct Read<'a, 'p, W> {
    kind: Kind<'a>,
    to_checkpoint: KeyRemapper,
    path: ModulePath,
    transfer: &'a mut Transfer<'p>,
    of: Option<&'a mut Elements<'a>>,
    write: W,
    result: Result<()>,
}

impl<W: FnMut(&str, TensorData) -> Result<()>> ModuleVisitor for Read<'_, '_, W> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.path.exit(container);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.result.is_err() || !self.kind.holds(&self.path) {
            return;
        }
        let name = self.path.checkpoint_name(&self.to_checkpoint);
        let tensor = match &mut self.of {
            Some(of) => match of(param.id) {
                Ok(elements) => elements.reshape(param.lazy_shape().dims::<D>()),
                Err(error) => {
                    self.result = Err(error);
                    return;
                }
            },
            None => param.val(),
        };
        let write = |data| (self.write)(&name, data);
        self.result = if self.path.is_transposed() {
            let dims = tensor.dims();
            let matrix = tensor.reshape([dims[0], dims[1]]);
            self.transfer.download_transposed(&name, matrix, write)
        } else {
            self.transfer.download(&name, tensor, write)
        };
    }
}

/// Replaces parameters by their gradients.
struct TakeGradients {
    gradients: GradientsParams,
}

impl ModuleMapper for TakeGradients {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let gradient = self.gradients.remove::<D>(param.id);
        let gradient = gradient.unwrap_or_else(|| param.val().zeros_like());
        Param::initialized(param.id, gradient)
    }
}

/// A fingerprint of a checkpoint: a hash of the names, shapes and first elements of all its
/// tensors, independent of their division into files.
///
/// # Errors
/// [`VlmError::File`]
pub(crate) fn fingerprint(files: &[Weights], found: &BTreeMap<String, Found>) -> Result<u64> {
    /// Bytes of each tensor in the hash.
    const READ: u64 = 1024;
    let mut hash = Fingerprint::default();
    for (path, tensor) in found {
        hash.add(path.as_bytes());
        for size in &tensor.stored.shape {
            hash.add(&(*size as u64).to_le_bytes());
        }
        let bytes = tensor.stored.bytes();
        let end = bytes.end.min(bytes.start + READ);
        hash.add(&files[tensor.file].source.bytes(bytes.start..end)?);
    }
    Ok(hash.value())
}

/// The files of a folder's weights.
///
/// # Errors
/// [`VlmError::File`]; those of [`indexed`].
pub(crate) fn weights(folder: &Path) -> Result<Vec<Weights>> {
    let (single, index) = (folder.join(SINGLE), folder.join(INDEX));
    // As in transformers: if both exist, the single file was saved into a folder of shards.
    if single.exists() || !index.exists() {
        if !single.exists() && has_pickled(folder) {
            let reason = "the weights are in pytorch_model*.bin, which is not read; save them as \
                          safetensors, with save_pretrained of transformers";
            return Err(VlmError::file("read", &single)(reason));
        }
        let source = TensorFile::open(&single)?;
        let tensors = source.tensors();
        return Ok(vec![Weights { source, tensors }]);
    }
    let text = file::text(&index)?;
    let parsed: Index = serde_json::from_str(&text).map_err(VlmError::file("read", &index))?;
    let mut shards: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (name, shard) in parsed.weight_map {
        let inside = |part| matches!(part, Component::Normal(_));
        if !Path::new(&shard).components().all(inside) {
            let reason = format!("it has {name} in {shard:?}, expected a file of this folder");
            return Err(VlmError::file("read", &index)(reason));
        }
        shards.entry(shard).or_default().insert(name);
    }
    let shards = shards.into_iter();
    shards
        .map(|(shard, names)| indexed(folder.join(shard), &names))
        .collect()
}

/// True if a folder has weights in the format of older checkpoints.
fn has_pickled(folder: &Path) -> bool {
    let mut names = ["pytorch_model.bin", "pytorch_model.bin.index.json"].iter();
    names.any(|name| folder.join(name).exists())
}

/// A shard, with its tensors according to the index. It may hold others: stale copies of another
/// shard's tensors, or parts that no model reads.
///
/// # Errors
/// [`VlmError::NotInShard`]
fn indexed(shard: PathBuf, names: &BTreeSet<String>) -> Result<Weights> {
    let source = TensorFile::open(&shard)?;
    let mut tensors = source.tensors();
    tensors.retain(|name, _| names.contains(name));
    let missing = names.iter().filter(|name| !tensors.contains_key(*name));
    let missing: Vec<String> = missing.cloned().collect();
    if !missing.is_empty() {
        let names = missing;
        return Err(VlmError::NotInShard { shard, names });
    }
    Ok(Weights { source, tensors })
}

//! Reading and writing checkpoints.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_store::{
    ApplyError, BurnToPyTorchAdapter, FloatCastAdapter, ModuleAdapter, ModuleContext,
    ModuleSnapshot, ModuleStore, PyTorchToBurnAdapter, SafetensorsStore, bridge,
};
use serde::Deserialize;

use crate::config::QwenVlConfig;
use crate::error::{QwenVlError, Result};
use crate::model::QwenVl;
use crate::names::rename;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The index of a sharded checkpoint.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl QwenVlConfig {
    /// A model with the weights of a checkpoint folder: `model.safetensors`, or without it the
    /// shards that `model.safetensors.index.json` names. Weights are converted to the device's
    /// float type.
    ///
    /// # Errors
    /// [`QwenVlError::File`], [`QwenVlError::MissingTensors`], [`QwenVlError::UnusedTensors`],
    /// [`QwenVlError::TensorShape`], [`QwenVlError::TensorUnreadable`]; those of
    /// [`init`](Self::init).
    pub fn load(&self, folder: impl AsRef<Path>, device: &Device) -> Result<QwenVl> {
        let mut model = self.init(device)?;
        let to_checkpoint = self.family.names.to_checkpoint();
        let dtype = DType::from(device.settings().float_dtype);
        let (mut applied, mut missing, mut unused) = (BTreeSet::new(), None, Vec::new());
        for path in weight_files(folder.as_ref())? {
            let mut store = SafetensorsStore::from_file(&path)
                .remap(self.family.names.to_module())
                .with_from_adapter(PyTorchToBurnAdapter.chain(FloatCastAdapter::to(dtype)))
                .skip_enum_variants(true)
                .allow_partial(true)
                .validate(false);
            let result = model
                .load_from(&mut store)
                .map_err(QwenVlError::file("read", &path))?;
            if let Some(error) = result.errors.into_iter().next() {
                return Err(tensor_error(error, &mut store, |name| {
                    rename(&to_checkpoint, name)
                }));
            }
            applied.extend(result.applied);
            missing.get_or_insert(result.missing);
            unused.extend(result.unused);
        }
        let missing: Vec<String> = missing
            .unwrap_or_default()
            .into_iter()
            .filter(|(name, _)| !applied.contains(name))
            .map(|(name, _)| rename(&to_checkpoint, &as_in_pytorch(&name)))
            .collect();
        if !missing.is_empty() {
            return Err(QwenVlError::MissingTensors { names: missing });
        }
        // A tied head may be written out, and older checkpoints store the frequencies.
        let is_known = |name: &str| {
            (self.tied && name == "lm_head.weight") || name.ends_with("rotary_emb.inv_freq")
        };
        unused.retain(|name| !is_known(name));
        if !unused.is_empty() {
            let names = unused
                .iter()
                .map(|name| rename(&to_checkpoint, name))
                .collect();
            return Err(QwenVlError::UnusedTensors { names });
        }
        Ok(model)
    }
}

impl QwenVl {
    /// Writes `model.safetensors` into a folder, with the names of the family's checkpoints; an
    /// existing one is replaced once the new one is complete.
    ///
    /// Then `model.safetensors.index.json` is removed, so that nobody reads older weights by it.
    /// The shards that it named stay: they belong to the caller.
    ///
    /// # Errors
    /// [`QwenVlError::File`].
    pub fn save(&self, folder: impl AsRef<Path>) -> Result<()> {
        let path = folder.as_ref().join(SINGLE);
        let mut store = SafetensorsStore::from_file(&path)
            .remap(self.family.names.to_checkpoint())
            .with_to_adapter(BurnToPyTorchAdapter)
            .skip_enum_variants(true)
            // transformers asks for it.
            .metadata("format", "pt")
            .overwrite(true);
        self.save_into(&mut store)
            .map_err(QwenVlError::file("write", &path))?;
        let index = folder.as_ref().join(INDEX);
        match std::fs::remove_file(&index) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(QwenVlError::file("remove", &index)(error))
            }
            _ => Ok(()),
        }
    }

    /// Every parameter with its checkpoint's name, in the checkpoint's shape.
    ///
    /// # Errors
    /// [`QwenVlError::TensorUnreadable`] if one cannot be read back from its device.
    pub fn checkpoint_tensors(&self) -> Result<BTreeMap<String, TensorData>> {
        let mut read = Read::default();
        self.visit(&mut read);
        let to_checkpoint = self.family.names.to_checkpoint();
        let named = read.tensors.into_iter().map(|(path, data)| {
            let name = rename(&to_checkpoint, &as_in_pytorch(&path));
            match data {
                Ok(data) => Ok((name, data)),
                Err(reason) => Err(QwenVlError::TensorUnreadable { name, reason }),
            }
        });
        named.collect()
    }

    /// The gradient of every parameter with its checkpoint's name, in the checkpoint's shape; zeros
    /// where there is none.
    ///
    /// # Errors
    /// [`QwenVlError::TensorUnreadable`] if one cannot be read back from its device.
    pub fn checkpoint_gradients(
        &self,
        gradients: GradientsParams,
    ) -> Result<BTreeMap<String, TensorData>> {
        self.valid()
            .map(&mut TakeGradients { gradients })
            .checkpoint_tensors()
    }
}

/// Reads parameters back from their device, in the shape of the checkpoint, each with its path in
/// the module.
///
/// [`ModuleSnapshot::collect`] does the same, but reads by a function that panics where the device
/// is gone.
#[derive(Default)]
struct Read {
    tensors: Vec<(String, std::result::Result<TensorData, String>)>,
    path: Vec<String>,
    containers: Vec<String>,
}

impl ModuleVisitor for Read {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.containers.push(container.to_owned());
        if !is_variant(container) {
            self.path.push(name.to_owned());
        }
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.containers.pop();
        if !is_variant(container) {
            self.path.pop();
        }
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        let data = param.transform_for_save().val().try_into_data();
        let data = data.map_err(|error| error.to_string()).and_then(|data| {
            let tensor = bridge::from_data(data, path.clone(), None);
            let context = ModuleContext::new(&self.containers);
            bridge::into_data(BurnToPyTorchAdapter.adapt(tensor, context))
                .map_err(|error| error.to_string())
        });
        self.tensors.push((path, data));
    }
}

/// Variants of enums are no part of a checkpoint's names.
fn is_variant(container: &str) -> bool {
    container.starts_with("Enum:")
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

/// The files that hold a folder's weights.
fn weight_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let (single, index) = (folder.join(SINGLE), folder.join(INDEX));
    // As transformers does: where both exist, the single file was saved into a folder of shards.
    if single.exists() || !index.exists() {
        return Ok(vec![single]);
    }
    let text = std::fs::read_to_string(&index).map_err(QwenVlError::file("read", &index))?;
    let parsed: Index = serde_json::from_str(&text).map_err(QwenVlError::file("read", &index))?;
    let shards: BTreeSet<String> = parsed.weight_map.into_values().collect();
    Ok(shards.iter().map(|shard| folder.join(shard)).collect())
}

/// burn's names of norm parameters are `gamma` and `beta`.
fn as_in_pytorch(name: &str) -> String {
    match name.rsplit_once('.') {
        Some((module, "gamma")) => format!("{module}.weight"),
        Some((module, "beta")) => format!("{module}.bias"),
        _ => name.to_owned(),
    }
}

fn tensor_error(
    error: ApplyError,
    store: &mut SafetensorsStore,
    to_checkpoint: impl Fn(&str) -> String,
) -> QwenVlError {
    match error {
        ApplyError::ShapeMismatch {
            path,
            expected,
            found,
        } => {
            let path = as_in_pytorch(&path);
            let (mut expected, found) = (expected.to_vec(), found.to_vec());
            // A matrix that was transposed on loading is reported with its shape in the file.
            let in_file = match store.get_tensor(&path) {
                Ok(Some(tensor)) => tensor.shape.to_vec(),
                _ => found.clone(),
            };
            if in_file != found {
                expected.reverse();
            }
            QwenVlError::TensorShape {
                name: to_checkpoint(&path),
                expected,
                found: in_file,
            }
        }
        ApplyError::DTypeMismatch {
            path,
            expected,
            found,
        } => QwenVlError::TensorUnreadable {
            name: to_checkpoint(&as_in_pytorch(&path)),
            reason: format!("it holds {found:?}, expected {expected:?}"),
        },
        ApplyError::AdapterError { path, message } | ApplyError::LoadError { path, message } => {
            QwenVlError::TensorUnreadable {
                name: to_checkpoint(&as_in_pytorch(&path)),
                reason: message,
            }
        }
    }
}

//! Saves the result of a run. Of an adapter, it proves that the saved one equals the trained one and
//! has an effect.

use std::collections::HashSet;
use std::path::Path;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{DType, Tensor};
use serde_json::Value;
use vlm_data::MicroBatch;
use vlm_models::{Vlm, Weights};

use crate::batch::inputs;
use crate::checkpoint::{Kind, remove, sync};
use crate::error::{Result, VlmTrainError};
use crate::recipe::TrainedParts;
use crate::trainer::Trainer;

/// The largest allowed difference of logits between the trained model and the model with the saved
/// adapter, relative to the largest logit. On a device with reproducible sums, the difference is 0.
const ALLOWED: f64 = 1e-5;

/// Files of a model's folder that hold weights, or say where they are.
const WEIGHTS: [&str; 3] = [".safetensors", ".safetensors.index.json", ".bin"];

impl Trainer {
    /// Writes the trained adapter in PEFT's format, or the trained model with the other files of its
    /// base's folder. With several ranks, the first one writes; if no rank has all weights, the others
    /// send theirs, so all must call this.
    ///
    /// # Errors
    /// [`VlmTrainError::File`]; those of [`Vlm::save_adapter`] and [`Vlm::save`].
    pub fn save_result(&self, folder: &Path, base: &Path) -> Result<()> {
        if self.is_first() {
            std::fs::create_dir_all(folder).map_err(VlmTrainError::file("create", folder))?;
        }
        match &self.recipe.trained {
            TrainedParts::Lora(_) => {
                let model = self.with_trained()?;
                if self.is_first() {
                    model.save_adapter(folder, &base.display().to_string())?;
                }
            }
            TrainedParts::Full(_) if self.is_first() => {
                copy_others(base, folder)?;
                state_dtype(folder, self.model.dtype())?;
                if self.has_parts() {
                    let mut weights = self.wholes(Kind::Parameter);
                    let model = self.model.clone().with_whole_experts();
                    model.save_of(folder, &mut |id| weights.lend(id))?;
                } else {
                    self.model.save(folder)?;
                }
            }
            TrainedParts::Full(_) => {
                let mut weights = self.wholes(Kind::Parameter);
                for (parameter, _) in self.model.all_parameters() {
                    weights.lend(parameter.id)?;
                }
            }
        }
        Ok(())
    }

    /// The model with its trained weights, gathered if they are in shards or of divided experts.
    fn with_trained(&self) -> Result<Vlm> {
        let (mut values, mut model) = (Weights::new(), self.model.clone());
        if self.has_parts() {
            let mut weights = self.wholes(Kind::Parameter);
            for parameter in &self.parameters {
                values.insert(parameter.id, weights.lend(parameter.id)?);
            }
        }
        if self.expert_ranks().is_some() {
            // Only the first rank has all experts.
            if !self.is_first() {
                return Ok(model);
            }
            model = model.with_whole_experts();
        }
        Ok(model.with_values(values))
    }

    /// Replaces the result in a folder by the current one: that in the folder is whole, whenever the
    /// process ends.
    ///
    /// # Errors
    /// Those of [`save_result`](Self::save_result).
    pub(crate) fn replace_result(&self, folder: &Path, base: &Path) -> Result<()> {
        let (new, old) = (folder.with_extension("new"), folder.with_extension("old"));
        if !self.is_first() {
            return match self.has_parts() {
                true => self.save_result(&new, base),
                false => Ok(()),
            };
        }
        remove(&new)?;
        self.save_result(&new, base)?;
        sync(&new)?;
        remove(&old)?;
        if folder.exists() {
            std::fs::rename(folder, &old).map_err(VlmTrainError::file("rename", folder))?;
        }
        std::fs::rename(&new, folder).map_err(VlmTrainError::file("rename", &new))?;
        remove(&old)
    }

    /// Writes the adapter in PEFT's format, loads it into the model without adapters, and with zeros
    /// for the weights trained whole, and compares the logits after each sample of `probe`. `base`
    /// names the base checkpoint. If no rank has all weights, it compares nothing.
    ///
    /// # Errors
    /// [`VlmTrainError::NoEffect`] if an adapter alone changes no logit, [`VlmTrainError::OtherAdapter`]
    /// if the saved adapter differs from the trained one; those of [`Vlm::save_adapter`] and
    /// [`Vlm::load_adapter`].
    pub fn save_adapter(&self, folder: &Path, base: &Path, probe: &MicroBatch) -> Result<()> {
        self.save_result(folder, base)?;
        if self.has_parts() {
            return Ok(());
        }
        let trained = self.model.valid();
        let plain = trained.clone().without_lora();
        let mut blank = Blank {
            trained: self.parameters.iter().map(|p| p.id).collect(),
            blanked: 0,
        };
        let loaded = plain.clone().map(&mut blank).load_adapter(folder)?;
        let [trained, plain, loaded] =
            [trained, plain, loaded].map(|model| self.logits(&model, probe));
        let (trained, plain, loaded) = (trained?, plain?, loaded?);
        let path = || folder.to_owned();
        let largest = trained
            .iter()
            .fold(0.0_f64, |most, logit| most.max(logit.abs()));
        let differences = trained.iter().zip(&loaded);
        let differences = differences.map(|(left, right)| (left - right).abs());
        // NaN is not within.
        let within = |difference: &f64| *difference <= ALLOWED * largest;
        if let Some(difference) = differences.clone().find(|difference| !within(difference)) {
            return Err(VlmTrainError::OtherAdapter {
                path: path(),
                difference,
            });
        }
        // The base's own weights are gone where whole ones were trained.
        if trained == plain && blank.blanked == 0 {
            return Err(VlmTrainError::NoEffect {
                path: path(),
                logits: trained.len(),
            });
        }
        Ok(())
    }

    fn logits(&self, model: &Vlm, probe: &MicroBatch) -> Result<Vec<f64>> {
        let batch = model.batch(&inputs(probe, &model.device()))?;
        let logits = model.last_logits(&batch)?.try_into_data();
        let logits = logits.map_err(|error| VlmTrainError::Device {
            step: self.steps,
            reason: error.reason().to_owned(),
        })?;
        Ok(logits.iter::<f64>().collect())
    }
}

/// Copies the contents of a model's folder besides weights.
fn copy_others(from: &Path, to: &Path) -> Result<()> {
    let failed = || VlmTrainError::file::<std::io::Error>("read", from);
    for entry in std::fs::read_dir(from).map_err(failed())? {
        let path = entry.map_err(failed())?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        if path.is_file() && !WEIGHTS.iter().any(|end| name.ends_with(end)) {
            std::fs::copy(&path, to.join(name)).map_err(VlmTrainError::file("copy", &path))?;
        }
    }
    Ok(())
}

/// Replaces trained parameters by zeros.
struct Blank {
    trained: HashSet<ParamId>,
    blanked: usize,
}

impl ModuleMapper for Blank {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.trained.contains(&param.id) {
            return param;
        }
        self.blanked += 1;
        param.map(|tensor| tensor.zeros_like())
    }
}

/// Writes the type of the saved weights wherever a folder's configuration states one: transformers
/// loads weights in the type stated there.
fn state_dtype(folder: &Path, dtype: DType) -> Result<()> {
    let path = folder.join("config.json");
    let text = plain_files::read_text(&path, plain_files::MAX_TEXT_BYTES)?;
    let config = serde_json::from_str(&text);
    let mut config: Value = config.map_err(VlmTrainError::file("read", &path))?;
    let name = match dtype {
        DType::F64 => "float64",
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    };
    let mut is_other = false;
    let mut state = |part: &mut Value| {
        for key in ["dtype", "torch_dtype"] {
            if let Some(stated) = part.get_mut(key).filter(|stated| stated.is_string()) {
                is_other |= *stated != name;
                *stated = name.into();
            }
        }
    };
    state(&mut config);
    for part in ["text_config", "vision_config"] {
        config.get_mut(part).into_iter().for_each(&mut state);
    }
    if is_other {
        let text = format!("{config:#}\n");
        plain_files::write_whole(&path, text.as_bytes())?;
    }
    Ok(())
}

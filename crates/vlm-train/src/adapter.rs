//! Saves an adapter, and proves that the saved one equals the trained one and has an effect.

use std::path::Path;

use burn::module::Module;
use vlm_data::MicroBatch;
use vlm_models::Vlm;

use crate::batch::inputs;
use crate::error::{Result, VlmTrainError};
use crate::trainer::Trainer;

/// The largest allowed difference of logits between the trained model and the model with the saved
/// adapter, relative to the largest logit. On a device with reproducible sums, the difference is 0.
const ALLOWED: f64 = 1e-5;

impl Trainer {
    /// Writes the adapter in PEFT's format, loads it into the model without adapters, and compares
    /// the logits after each sample of `probe`. `base` names the base checkpoint.
    ///
    /// # Errors
    /// [`VlmTrainError::NoEffect`] if the adapter changes no logit, [`VlmTrainError::OtherAdapter`]
    /// if the saved adapter differs from the trained one; those of [`Vlm::save_adapter`] and
    /// [`Vlm::load_adapter`].
    pub fn save_adapter(&self, folder: &Path, base: &str, probe: &MicroBatch) -> Result<()> {
        std::fs::create_dir_all(folder).map_err(VlmTrainError::file("create", folder))?;
        self.model.save_adapter(folder, base)?;
        let trained = self.model.valid();
        let plain = trained.clone().without_lora();
        let loaded = plain.clone().load_adapter(folder)?;
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
        if trained == plain {
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

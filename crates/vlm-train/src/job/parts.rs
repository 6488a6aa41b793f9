//! The trained parts of a run: adapters, new or of a folder, and weights.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::path::Path;
use std::str::FromStr;

use burn::tensor::Device;
use serde::Serialize;
use vlm_models::{LoraConfig, ModelPart, TrainedWeights, VlmConfig};

use super::config::{FinetuneConfig, PartChoice, targets};
use crate::error::VlmTrainError;
use crate::recipe::TrainedParts;

/// Layers by index; to the last one without an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LayerRange {
    first: usize,
    last: Option<usize>,
}

impl FromStr for LayerRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let index = |text: &str| {
            text.parse::<usize>()
                .map_err(|_| "expected layers such as 3, 8-27 or 24-".to_owned())
        };
        let (first, last) = match text.split_once('-') {
            Some((first, "")) => (index(first)?, None),
            Some((first, last)) => (index(first)?, Some(index(last)?)),
            None => (index(text)?, Some(index(text)?)),
        };
        match last {
            Some(last) if last < first => Err(format!("{last} is below {first}")),
            _ => Ok(Self { first, last }),
        }
    }
}

impl FinetuneConfig {
    /// The trained parts of a model. Puts into the options what they left out, which the identity of
    /// the run has.
    ///
    /// # Errors
    /// [`VlmTrainError::Options`] for layers that the decoder does not have, parts named twice, and
    /// options that contradict an adapter; those of the adapter.
    pub(super) fn choose(&mut self, model: &VlmConfig) -> crate::Result<TrainedParts> {
        let wrong = |reason: &str| Err(VlmTrainError::Options(reason.to_owned()));
        let given = &self.trained;
        let mut parts = sorted(&given.parts);
        if parts.is_empty() {
            parts.push(ModelPart::Decoder);
        }
        let layers = self.layers(model.text.layers)?;
        let full_parts = sorted(&given.full_parts);
        let of_tower = |part: &ModelPart| *part != ModelPart::Decoder;
        if model.vision.is_none() && parts.iter().chain(&full_parts).any(of_tower) {
            return wrong(
                "the model reads text alone: it has no tower and no merger, so leave them out of \
                 --parts and --full-parts",
            );
        }
        if given.adapter.is_none() {
            if !layers.is_empty() && !parts.contains(&ModelPart::Decoder) {
                return wrong("--layers is of the decoder; add decoder to --parts");
            }
            if full_parts.iter().any(|part| parts.contains(part)) {
                return wrong(
                    "--full-parts has a part of --parts (decoder without it), which has adapters; \
                     name each part in one of them",
                );
            }
        }
        let mut whole = TrainedWeights::from(full_parts);
        if given.train_embeddings {
            let embeddings = TrainedWeights::EMBEDDINGS;
            whole.modules.extend(embeddings.map(str::to_owned));
        }
        let chosen = if let Some(folder) = &given.adapter {
            let config = model.adapter_config(folder)?;
            self.expect_adapter(&config, folder, (model, &layers, &whole))?;
            TrainedParts::Lora(config)
        } else if given.full {
            if !layers.is_empty() {
                parts.retain(|part| *part != ModelPart::Decoder);
                whole.modules.extend(TrainedWeights::decoder_layers(layers));
            }
            whole.parts = parts;
            TrainedParts::Full(whole)
        } else {
            let rank = given.rank.unwrap_or(LoraConfig::default().rank);
            TrainedParts::Lora(LoraConfig {
                rank,
                alpha: given.alpha.unwrap_or(2.0 * rank as f64),
                dropout: given.dropout.unwrap_or(0.0),
                rslora: given.rslora,
                parts,
                targets: targets(&given.targets),
                layers,
                whole,
                ..LoraConfig::default()
            })
        };
        let none = LoraConfig::default();
        let config = match &chosen {
            TrainedParts::Lora(config) => config,
            TrainedParts::Full(_) => &none,
        };
        let given = &mut self.trained;
        (given.rank, given.dropout) = (Some(config.rank), Some(config.dropout));
        (given.alpha, given.rslora) = (Some(config.alpha), config.rslora);
        if given.parts.is_empty() {
            let parts = config.parts.iter().map(|part| match part {
                ModelPart::Tower => PartChoice::Tower,
                ModelPart::Merger => PartChoice::Merger,
                ModelPart::Decoder => PartChoice::Decoder,
            });
            given.parts = parts.collect();
        }
        Ok(chosen)
    }

    /// The chosen layers of a decoder, or none for all.
    fn layers(&self, depth: usize) -> crate::Result<Vec<usize>> {
        let mut layers = BTreeSet::new();
        for LayerRange { first, last } in &self.trained.layers {
            let last = last.unwrap_or(depth - 1).max(*first);
            if last >= depth {
                let most = depth - 1;
                return Err(VlmTrainError::Options(format!(
                    "--layers has layer {last}; those of the decoder are 0 to {most}"
                )));
            }
            layers.extend(*first..=last);
        }
        Ok(layers.into_iter().collect())
    }

    /// Rejects options that contradict an adapter.
    fn expect_adapter(
        &self,
        config: &LoraConfig,
        folder: &Path,
        (model, layers, whole): (&VlmConfig, &[usize], &TrainedWeights),
    ) -> crate::Result<()> {
        let options = &self.trained;
        let differs = |option: &str, found: &dyn Display| {
            let folder = folder.display();
            Err(VlmTrainError::Options(format!(
                "{option} differs from the adapter in {folder}, which has {found}; leave it out"
            )))
        };
        if options.rank.is_some_and(|rank| rank != config.rank) {
            return differs("--rank", &config.rank);
        }
        if options.alpha.is_some_and(|alpha| alpha != config.alpha) {
            return differs("--alpha", &config.alpha);
        }
        if options
            .dropout
            .is_some_and(|dropout| dropout != config.dropout)
        {
            return differs("--dropout", &config.dropout);
        }
        if options.rslora && !config.rslora {
            return differs("--rslora", &"the scale alpha / rank");
        }
        if !options.parts.is_empty() && sorted(&options.parts) != config.parts {
            return differs("--parts", &format!("{:?}", config.parts).to_lowercase());
        }
        let mut blank = model.init(&Device::flex())?;
        let own = blank.adapted_layers(config)?;
        let given_targets = targets(&options.targets);
        for (option, is_given, targets, layers) in [
            (
                "--targets",
                !options.targets.is_empty(),
                &given_targets[..],
                &[][..],
            ),
            ("--layers", !layers.is_empty(), &config.targets, layers),
        ] {
            let given = LoraConfig {
                targets: targets.to_vec(),
                layers: layers.to_vec(),
                ..config.clone()
            };
            if is_given && blank.adapted_layers(&given).ok().as_ref() != Some(&own) {
                return differs(option, &format!("{} adapted layers", own.len()));
            }
        }
        let (own, given) = (
            blank.whole_weights(&config.whole)?,
            blank.whole_weights(whole)?,
        );
        if !given.iter().all(|weight| own.contains(weight)) {
            let option = match options.full_parts.is_empty() {
                true => "--train-embeddings",
                false => "--full-parts",
            };
            return differs(option, &format!("{} weights trained whole", own.len()));
        }
        Ok(())
    }
}

fn sorted(parts: &[PartChoice]) -> Vec<ModelPart> {
    let parts = parts.iter().map(|part| match part {
        PartChoice::Tower => ModelPart::Tower,
        PartChoice::Merger => ModelPart::Merger,
        PartChoice::Decoder => ModelPart::Decoder,
    });
    parts.collect::<BTreeSet<_>>().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_indices_and_ranges() {
        for (text, expected) in [
            ("3", Some((3, Some(3)))),
            ("8-27", Some((8, Some(27)))),
            ("24-", Some((24, None))),
            ("5-4", None),
            ("-4", None),
            ("a", None),
            ("1-2-3", None),
        ] {
            let found = text.parse().ok();
            let found = found.map(|LayerRange { first, last }| (first, last));
            assert_eq!(found, expected, "{text}");
        }
    }
}

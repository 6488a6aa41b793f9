//! What `mrope finetune` trains: adapters, new or of a folder, and weights.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use burn::tensor::Device;
use clap::{Args, ValueHint};
use serde::Serialize;
use vlm_models::{LoraConfig, ModelPart, TrainedWeights, VlmConfig};
use vlm_train::TrainedParts;

use super::options::{FinetuneArgs, PartChoice, targets};

/// Options of `mrope finetune` besides those of new adapters.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct TrainedArgs {
    /// Start from the adapter in this folder, whose rank, alpha, dropout and layers are kept; the
    /// optimizer starts anew
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    #[arg(conflicts_with = "random_weights")]
    #[serde(skip)]
    pub(super) adapter: Option<PathBuf>,

    /// Accept an --adapter that records another checkpoint; its names and shapes must still fit
    #[arg(long, requires = "adapter")]
    #[serde(skip)]
    pub(super) any_base: bool,

    /// Decoder layers to train, or to give adapters, from 0: 8-27, 24- or 0,4-7. With --full, word
    /// embeddings, last norm and head are frozen [default: all]
    #[arg(long, value_name = "LAYERS", value_delimiter = ',', value_parser = layer_range)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    layers: Vec<LayerRange>,

    /// Train word embeddings and output head too
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    train_embeddings: bool,

    /// Parts to train whole beside the adapters, comma-separated; they are saved with them
    #[arg(long, value_name = "PARTS", value_enum, value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    full_parts: Vec<PartChoice>,

    /// What these and the other options name.
    #[arg(skip = TrainedParts::Lora(LoraConfig::default()))]
    #[serde(skip)]
    pub(super) trained: TrainedParts,
}

/// Layers by index; to the last one without an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct LayerRange {
    first: usize,
    last: Option<usize>,
}

fn layer_range(text: &str) -> Result<LayerRange, String> {
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
        _ => Ok(LayerRange { first, last }),
    }
}

impl FinetuneArgs {
    /// The options with what is trained in a model.
    ///
    /// # Errors
    /// For layers that the decoder does not have, and parts named twice; those of the adapter.
    pub(super) fn with_trained(&self, model: &VlmConfig) -> Result<Self, Box<dyn Error>> {
        let mut args = self.clone();
        let mut parts = sorted(&self.parts);
        if parts.is_empty() {
            parts.push(ModelPart::Decoder);
        }
        let layers = self.layers(model.text.layers)?;
        let full_parts = sorted(&self.what.full_parts);
        if self.what.adapter.is_none() {
            if !layers.is_empty() && !parts.contains(&ModelPart::Decoder) {
                return Err("--layers is of the decoder; add decoder to --parts".into());
            }
            if full_parts.iter().any(|part| parts.contains(part)) {
                return Err(
                    "--full-parts has a part of --parts (decoder without it), which has adapters; \
                     name each part in one of them"
                        .into(),
                );
            }
        }
        let mut whole = TrainedWeights::from(full_parts);
        if self.what.train_embeddings {
            let embeddings = TrainedWeights::EMBEDDINGS;
            whole.modules.extend(embeddings.map(str::to_owned));
        }
        args.what.trained = if let Some(folder) = &self.what.adapter {
            let config = model.adapter_config(folder)?;
            self.expect_adapter(&config, folder, (model, &layers, &whole))?;
            TrainedParts::Lora(config)
        } else if self.full {
            if !layers.is_empty() {
                parts.retain(|part| *part != ModelPart::Decoder);
                whole.modules.extend(TrainedWeights::decoder_layers(layers));
            }
            whole.parts = parts;
            TrainedParts::Full(whole)
        } else {
            let rank = self.rank.unwrap_or(LoraConfig::default().rank);
            TrainedParts::Lora(LoraConfig {
                rank,
                alpha: self.alpha.unwrap_or(2.0 * rank as f64),
                dropout: self.dropout.unwrap_or(0.0),
                rslora: self.rslora,
                parts,
                targets: targets(&self.targets),
                layers,
                whole,
            })
        };
        args.show_trained();
        Ok(args)
    }

    /// Puts what was left out into the options, and in those that are written: the identity of a run
    /// has them.
    fn show_trained(&mut self) {
        let none = LoraConfig::default();
        let config = match &self.what.trained {
            TrainedParts::Lora(config) => config,
            TrainedParts::Full(_) => &none,
        };
        (self.rank, self.dropout) = (Some(config.rank), Some(config.dropout));
        (self.alpha, self.rslora) = (Some(config.alpha), config.rslora);
        if self.parts.is_empty() {
            let parts = config.parts.iter().map(|part| match part {
                ModelPart::Tower => PartChoice::Tower,
                ModelPart::Merger => PartChoice::Merger,
                ModelPart::Decoder => PartChoice::Decoder,
            });
            self.parts = parts.collect();
        }
        // Of adapters alone: beside --full they are refused.
        if !self.full
            && let Ok(mut table) = self.written.parse::<toml::Table>()
        {
            let mut show = |name: &str, value: toml::Value| {
                table.entry(name.to_owned()).or_insert(value);
            };
            show("rank", (config.rank as i64).into());
            show("alpha", config.alpha.into());
            show("dropout", config.dropout.into());
            self.written = table.to_string();
        }
    }

    /// The chosen layers of a decoder, or none for all.
    fn layers(&self, depth: usize) -> Result<Vec<usize>, String> {
        let mut layers = BTreeSet::new();
        for LayerRange { first, last } in &self.what.layers {
            let last = last.unwrap_or(depth - 1).max(*first);
            if last >= depth {
                return Err(format!(
                    "--layers has layer {last}; those of the decoder are 0 to {}",
                    depth - 1
                ));
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
    ) -> Result<(), Box<dyn Error>> {
        let differs = |option: &str, found: &dyn Display| {
            let folder = folder.display();
            Err(format!(
                "{option} differs from the adapter in {folder}, which has {found}; leave it out"
            )
            .into())
        };
        if self.rank.is_some_and(|rank| rank != config.rank) {
            return differs("--rank", &config.rank);
        }
        if self.alpha.is_some_and(|alpha| alpha != config.alpha) {
            return differs("--alpha", &config.alpha);
        }
        if self
            .dropout
            .is_some_and(|dropout| dropout != config.dropout)
        {
            return differs("--dropout", &config.dropout);
        }
        if self.rslora && !config.rslora {
            return differs("--rslora", &"the scale alpha / rank");
        }
        if !self.parts.is_empty() && sorted(&self.parts) != config.parts {
            return differs("--parts", &format!("{:?}", config.parts).to_lowercase());
        }
        let mut blank = model.init(&Device::flex())?;
        let own = blank.adapted_layers(config)?;
        let given_targets = targets(&self.targets);
        for (option, is_given, targets, layers) in [
            (
                "--targets",
                !self.targets.is_empty(),
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
            let option = match self.what.full_parts.is_empty() {
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
            let found = layer_range(text).ok();
            let found = found.map(|LayerRange { first, last }| (first, last));
            assert_eq!(found, expected, "{text}");
        }
    }
}

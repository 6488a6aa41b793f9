//! Adapters in PEFT's files: `adapter_config.json` and `adapter_model.safetensors`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use burn_store::KeyRemapper;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::{Result, VlmError};
use crate::file::{self, Sink, TensorFile};
use crate::linear::adapter_dtype;
use crate::load::{Found, Kind, Weights};
use crate::lora::{LoraConfig, ModelPart, class_name};
use crate::model::Vlm;
use crate::names::rename;
use crate::transfer::Transfer;

const CONFIG: &str = "adapter_config.json";
/// The header key of the base checkpoint's fingerprint. PEFT ignores it.
const BASE: &str = "mrope_base_fingerprint";
const WEIGHTS: &str = "adapter_model.safetensors";
/// The prefix of the adapted layer's name.
const PREFIX: &str = "base_model.model.";
/// The suffixes of A and B, in the module and in a file.
const SUFFIXES: [(&str, &str); 2] = [
    (".adapter.a", ".lora_A.weight"),
    (".adapter.b", ".lora_B.weight"),
];

/// The keys that determine the computation of an adapter.
#[derive(Deserialize)]
struct Raw {
    peft_type: String,
    r: usize,
    lora_alpha: f64,
    #[serde(default)]
    lora_dropout: f64,
    #[serde(default)]
    use_rslora: bool,
    /// The other keys. Some change the computation of an adapter.
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// Keys that change the computation of an adapter, with the supported values other than null, false
/// and empty ones. Other initialisations subtract from the base weights.
const FIXED: [(&str, &str); 13] = [
    ("init_lora_weights", "true, \"gaussian\" or \"eva\""),
    ("bias", "\"none\""),
    ("fan_in_fan_out", "false"),
    ("use_dora", "false"),
    ("lora_bias", "false"),
    ("rank_pattern", "{}"),
    ("alpha_pattern", "{}"),
    ("modules_to_save", "null"),
    ("trainable_token_indices", "null"),
    ("layer_replication", "null"),
    ("target_parameters", "null"),
    ("use_qalora", "false"),
    ("use_bdlora", "null"),
];

impl Vlm {
    /// Writes the adapters into a folder in PEFT's format. Each file replaces an existing one once
    /// it is complete. `base` is the name or folder of the base checkpoint.
    ///
    /// # Errors
    /// [`VlmError::NoAdapter`]; [`VlmError::File`]; [`VlmError::Transfer`] if the device fails.
    pub fn save_adapter(&self, folder: impl AsRef<Path>, base: &str) -> Result<()> {
        let Some(config) = &self.lora else {
            return Err(VlmError::NoAdapter);
        };
        let folder = folder.as_ref();
        let path = folder.join(WEIGHTS);
        let entries = self.entries(Kind::Adapter);
        let mut transfer = Transfer::default();
        transfer.begin(entries.iter().map(|entry| entry.bytes() as u64).sum());
        let base_text = self.fingerprint.map(|base| format!("{base:016x}"));
        let texts: Vec<(&str, &str)> = base_text.iter().map(|text| (BASE, &text[..])).collect();
        let mut sink = Sink::create_with(&path, &entries, &texts)?;
        self.read(Kind::Adapter, &mut transfer, |_, data| {
            sink.write(data.bytes())
        })?;
        sink.commit()?;

        let targets = self.target_modules();
        // The keys of PEFT 0.21.2 that concern LoRA without extensions.
        let text = json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "inference_mode": true,
            "r": config.rank,
            "lora_alpha": config.alpha,
            "lora_dropout": config.dropout,
            "use_rslora": config.rslora,
            "target_modules": targets,
            "bias": "none",
            "fan_in_fan_out": false,
            "init_lora_weights": true,
            "modules_to_save": null,
            "use_dora": false,
            "rank_pattern": {},
            "alpha_pattern": {}
        });
        let path = folder.join(CONFIG);
        Ok(plain_files::write_whole(
            &path,
            format!("{text:#}\n").as_bytes(),
        )?)
    }

    /// Freezes the model, removes earlier adapters and loads those of a folder written by PEFT or
    /// [`save_adapter`](Self::save_adapter). Names of transformers before 4.52 (`model.layers`) and
    /// later ones are read. An adapter that records a different checkpoint is an error, unless the
    /// model is [`of_any_base`](Self::of_any_base).
    ///
    /// # Errors
    /// [`VlmError::File`]; [`VlmError::Config`] and [`VlmError::Unsupported`] for its
    /// configuration; [`VlmError::AdapterKeys`] for names that match no linear layer of this model,
    /// or a layer that lacks one of its two tensors; [`VlmError::OtherBase`];
    /// [`VlmError::TensorShape`], [`VlmError::TensorUnreadable`]; [`VlmError::Transfer`] if the
    /// device fails.
    pub fn load_adapter(self, folder: impl AsRef<Path>) -> Result<Self> {
        let mut model = self.train_parts(&[]);
        let layers: BTreeSet<String> = model.linears().into_iter().map(|(path, _)| path).collect();
        let to_module = model.family.names.to_module();
        let folder = folder.as_ref();
        let file = AdapterFile::open(folder, &to_module, |path| layers.contains(path))?;
        if let Some(base) = model.fingerprint {
            file.expect_base(folder, base)?;
        }
        let parts: BTreeSet<ModelPart> =
            file.layers.keys().map(|path| ModelPart::of(path)).collect();
        let config = LoraConfig {
            parts: parts.into_iter().collect(),
            ..file.config
        };
        model.adapt(&config, 0, |path| file.layers.contains_key(path));
        let targets = model.target_modules();
        model.lora = Some(LoraConfig { targets, ..config });
        let found = file.layers.into_iter().flat_map(|(layer, tensors)| {
            let named = SUFFIXES.iter().zip(tensors);
            named.map(move |((end, _), tensor)| (format!("{layer}{end}"), tensor))
        });
        let found: BTreeMap<String, Found> = found.collect();
        let tensors = file.source.tensors();
        let files = [Weights {
            source: file.source,
            tensors,
        }];
        let dtype = adapter_dtype(model.dtype());
        model.fill(Kind::Adapter, &files, &found, dtype, Transfer::default())
    }

    /// Discards the fingerprint of the checkpoint, so that adapters that record a different one are
    /// accepted.
    #[must_use]
    pub fn of_any_base(mut self) -> Self {
        self.fingerprint = None;
        self
    }

    /// The adapted layers as targets of a configuration: by the ends of their names if these match
    /// no other layer, else in full.
    fn target_modules(&self) -> Vec<String> {
        let mut model = self.clone();
        let names = model.linear_names();
        let adapted: BTreeSet<String> = model
            .linears()
            .into_iter()
            .filter_map(|(path, linear)| linear.adapter.is_some().then_some(path))
            .collect();
        let (mut full, mut ends, mut others) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
        for (path, name) in names {
            let end = name.rsplit('.').next().unwrap_or_default().to_owned();
            if adapted.contains(&path) {
                full.push(name);
                ends.insert(end);
            } else {
                others.insert(end);
            }
        }
        let is_name = |end: &String| end.parse::<usize>().is_err() && !others.contains(end);
        if ends.iter().all(is_name) {
            ends.into_iter().collect()
        } else {
            full
        }
    }
}

/// The files of an adapter, with only names read so far.
#[derive(Debug)]
pub(crate) struct AdapterFile {
    /// Without parts and targets.
    pub(crate) config: LoraConfig,
    pub(crate) source: TensorFile,
    /// A and B of each layer, by the layer's name in the module.
    pub(crate) layers: BTreeMap<String, [Found; 2]>,
}

impl AdapterFile {
    /// Reads a configuration and the names of tensors. Each must belong to a layer accepted by
    /// `is_linear`.
    ///
    /// # Errors
    /// [`VlmError::File`], [`VlmError::Config`], [`VlmError::Unsupported`],
    /// [`VlmError::AdapterKeys`].
    pub(crate) fn open(
        folder: &Path,
        to_module: &KeyRemapper,
        is_linear: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        let raw = raw_config(&file::text(&folder.join(CONFIG))?)?;
        let path = folder.join(WEIGHTS);
        let source = TensorFile::open(&path)?;
        let (mut unknown, mut halves) = (Vec::new(), BTreeMap::<String, [Option<Found>; 2]>::new());
        for (name, stored) in source.tensors() {
            let known = name.strip_prefix(PREFIX).and_then(|rest| {
                let half = SUFFIXES.iter().position(|(_, end)| rest.ends_with(end))?;
                let layer = rename(to_module, &rest.replace(SUFFIXES[half].1, ".weight"));
                let layer = layer.strip_suffix(".weight")?.to_owned();
                is_linear(&layer).then_some((layer, half))
            });
            let Some((layer, half)) = known else {
                unknown.push(name);
                continue;
            };
            let file = 0;
            halves.entry(layer).or_default()[half] = Some(Found { name, file, stored });
        }
        let keys = |names, reason| VlmError::AdapterKeys {
            path: path.clone(),
            names,
            reason,
        };
        if !unknown.is_empty() {
            let reason = "fit no linear layer of this model; they may be of another model's";
            return Err(keys(unknown, reason));
        }
        let (mut layers, mut single) = (BTreeMap::new(), Vec::new());
        for (layer, halves) in halves {
            match halves {
                [Some(a), Some(b)] => _ = layers.insert(layer, [a, b]),
                _ => single.push(layer),
            }
        }
        if !single.is_empty() || layers.is_empty() {
            return Err(keys(single, "lack lora_A or lora_B"));
        }
        let config = LoraConfig {
            rank: raw.r,
            alpha: raw.lora_alpha,
            dropout: raw.lora_dropout,
            rslora: raw.use_rslora,
            parts: Vec::new(),
            targets: Vec::new(),
        };
        config.check()?;
        Ok(Self {
            config,
            source,
            layers,
        })
    }

    /// Rejects an adapter that records a base checkpoint with a different fingerprint.
    ///
    /// # Errors
    /// [`VlmError::OtherBase`]
    pub(crate) fn expect_base(&self, folder: &Path, fingerprint: u64) -> Result<()> {
        let expected = format!("{fingerprint:016x}");
        match self.source.metadata(BASE) {
            Some(found) if found != expected => Err(VlmError::OtherBase {
                folder: folder.to_owned(),
                found: found.to_owned(),
                expected,
            }),
            _ => Ok(()),
        }
    }
}

/// The name of an adapter's parameter in a file; `None` for other parameters.
pub(crate) fn adapter_name(to_class: &KeyRemapper, path: &str) -> Option<String> {
    SUFFIXES.iter().find_map(|(end, suffix)| {
        let layer = class_name(to_class, path.strip_suffix(end)?);
        Some(format!("{PREFIX}{layer}{suffix}"))
    })
}

/// # Errors
/// [`VlmError::Config`], [`VlmError::Unsupported`]
fn raw_config(text: &str) -> Result<Raw> {
    let raw: Raw = serde_json::from_str(text).map_err(|error| VlmError::Config {
        part: CONFIG,
        detail: error.to_string(),
    })?;
    if raw.peft_type != "LORA" {
        return Err(VlmError::Unsupported {
            key: "peft_type",
            found: format!("{:?}", raw.peft_type),
            expected: "\"LORA\"",
        });
    }
    for (key, expected) in FIXED {
        let found = raw.others.get(key).map(Value::to_string);
        let is_supported = |found: &String| {
            let mut supported = expected.split(", ").flat_map(|text| text.split(" or "));
            let empty = ["null", "false", "{}", "[]"];
            supported.any(|text| text == found) || empty.contains(&&**found)
        };
        if let Some(found) = found.filter(|found| !is_supported(found)) {
            return Err(VlmError::Unsupported {
                key,
                found,
                expected,
            });
        }
    }
    Ok(raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_change_an_adapter_are_refused_by_name() {
        let config = |key: &str, value: Value| {
            let mut config = json!({ "peft_type": "LORA", "r": 8, "lora_alpha": 16 });
            config[key] = value;
            raw_config(&config.to_string())
        };
        for (key, value) in [
            ("peft_type", json!("IA3")),
            ("use_dora", json!(true)),
            ("bias", json!("lora_only")),
            ("rank_pattern", json!({ "q_proj": 4 })),
            ("modules_to_save", json!(["lm_head"])),
            ("init_lora_weights", json!("pissa_niter_4")),
            ("init_lora_weights", json!("olora")),
        ] {
            let error = config(key, value.clone()).map(drop).unwrap_err();
            let VlmError::Unsupported {
                key: named, found, ..
            } = error
            else {
                panic!("{key} = {value}: {error}");
            };
            assert_eq!((named, found), (key, value.to_string()));
        }
        for (key, value) in [
            ("bias", json!("none")),
            ("rank_pattern", json!({})),
            ("use_dora", json!(null)),
            ("init_lora_weights", json!(true)),
            ("init_lora_weights", json!("gaussian")),
            ("init_lora_weights", json!(false)),
            ("layers_to_transform", json!([0, 1])),
        ] {
            config(key, value.clone()).unwrap_or_else(|error| panic!("{key} = {value}: {error}"));
        }
    }
}

//! Adapters in PEFT's files: `adapter_config.json` and `adapter_model.safetensors`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use burn::tensor::Device;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::config::VlmConfig;
use crate::error::{Result, VlmError};
use crate::file::{self, Entry, Sink, TensorFile};
use crate::linear::adapter_dtype;
use crate::load::{Found, Kind, Weights};
use crate::model::{HEAD, TABLE, Vlm};
use crate::names::{PREFIX, Remap as _, SUFFIXES, rename};
use crate::trained::{LoraConfig, ModelPart, TrainedWeights};
use crate::transfer::Transfer;

const CONFIG: &str = "adapter_config.json";
/// The header key of the base checkpoint's fingerprint. PEFT ignores it.
const BASE: &str = "mrope_base_fingerprint";
const WEIGHTS: &str = "adapter_model.safetensors";

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
    modules_to_save: Option<Vec<String>>,
    #[serde(default)]
    ensure_weight_tying: bool,
    /// The other keys. Some change the computation of an adapter.
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// Keys that change the computation of an adapter, with the supported values other than null, false
/// and empty ones. Other initialisations subtract from the base weights.
const FIXED: [(&str, &str); 12] = [
    ("init_lora_weights", "true, \"gaussian\" or \"eva\""),
    ("bias", "\"none\""),
    ("fan_in_fan_out", "false"),
    ("use_dora", "false"),
    ("lora_bias", "false"),
    ("rank_pattern", "{}"),
    ("alpha_pattern", "{}"),
    ("trainable_token_indices", "null"),
    ("layer_replication", "null"),
    ("target_parameters", "null"),
    ("use_qalora", "false"),
    ("use_bdlora", "null"),
];

impl Vlm {
    /// Writes the adapters, and the weights trained whole beside them, into a folder in PEFT's
    /// format. Each file replaces an existing one once it is complete. `base` is the name or folder
    /// of the base checkpoint.
    ///
    /// # Errors
    /// [`VlmError::NoAdapter`]; [`VlmError::File`]; [`VlmError::NoModule`];
    /// [`VlmError::Transfer`] if the device fails.
    pub fn save_adapter(&self, folder: impl AsRef<Path>, base: &str) -> Result<()> {
        let Some(config) = &self.lora else {
            return Err(VlmError::NoAdapter);
        };
        let folder = folder.as_ref();
        let path = folder.join(WEIGHTS);
        let whole = self.whole(&config.whole)?;
        let modules = self.modules_of(&whole).map_err(keys(&path, APART))?;
        let table = BTreeSet::from([TABLE.to_owned()]);
        let is_tied = self.lm_head.is_none() && whole.contains(TABLE);
        // PEFT writes the weight of a tied head twice.
        let mut kinds = vec![Kind::Adapter, Kind::Whole(&whole)];
        kinds.extend(is_tied.then_some(Kind::Whole(&table)));
        let mut entries = Vec::new();
        for (copy, kind) in kinds.iter().enumerate() {
            entries.extend(self.entries(*kind).into_iter().map(|entry| Entry {
                name: match copy {
                    0 => entry.name,
                    1 => format!("{PREFIX}{}", entry.name),
                    _ => format!("{PREFIX}{HEAD}"),
                },
                ..entry
            }));
        }
        let mut transfer = Transfer::default();
        transfer.begin(entries.iter().map(|entry| entry.bytes() as u64).sum());
        let base_text = self.fingerprint.map(|base| format!("{base:016x}"));
        let texts: Vec<(&str, &str)> = base_text.iter().map(|text| (BASE, &text[..])).collect();
        let mut sink = Sink::create_with(&path, &entries, &texts)?;
        for kind in kinds {
            self.read(kind, &mut transfer, |_, data| sink.write(data.bytes()))?;
        }
        sink.commit()?;

        let mut model = self.clone();
        let linears = model.linears().into_iter();
        let adapted = linears.filter(|(_, linear)| linear.adapter.is_some());
        let adapted: BTreeSet<String> = adapted.map(|(path, _)| path).collect();
        let targets = model.target_modules(&adapted);
        // The keys of PEFT 0.21.2 that concern LoRA without extensions.
        let mut text = json!({
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
            "modules_to_save": (!modules.is_empty()).then_some(modules),
            "use_dora": false,
            "rank_pattern": {},
            "alpha_pattern": {}
        });
        if is_tied {
            // Of no older PEFT, so only where it is needed.
            text["ensure_weight_tying"] = true.into();
        }
        let path = folder.join(CONFIG);
        Ok(plain_files::write_whole(
            &path,
            format!("{text:#}\n").as_bytes(),
        )?)
    }

    /// Freezes the model, removes earlier adapters and loads those of a folder written by PEFT or
    /// [`save_adapter`](Self::save_adapter), with the weights trained whole beside them. Names of transformers before 4.52 (`model.layers`) and
    /// later ones are read. An adapter that records a different checkpoint is an error, unless the
    /// model is [`of_any_base`](Self::of_any_base).
    ///
    /// # Errors
    /// [`VlmError::File`]; [`VlmError::Config`] and [`VlmError::Unsupported`] for its
    /// configuration; [`VlmError::AdapterKeys`] for names that match nothing in this model, tensors
    /// that are missing, or a tied head that was trained apart; [`VlmError::OtherBase`];
    /// [`VlmError::TensorShape`], [`VlmError::TensorUnreadable`]; [`VlmError::Transfer`] if the
    /// device fails.
    pub fn load_adapter(self, folder: impl AsRef<Path>) -> Result<Self> {
        let mut model = self.without_lora();
        let folder = folder.as_ref();
        let file = AdapterFile::open(folder, &mut model)?;
        if let Some(base) = model.fingerprint {
            file.expect_base(folder, base)?;
        }
        model.adapt(&file.config, 0, |path| file.layers.contains_key(path));
        let found = file.layers.into_iter().flat_map(|(layer, tensors)| {
            let named = SUFFIXES.iter().zip(tensors);
            named.map(move |((end, _), tensor)| (format!("{layer}{end}"), tensor))
        });
        let found: BTreeMap<String, Found> = found.collect();
        let (files, names) = ([file.weights], file.whole.keys().cloned().collect());
        let dtype = model.dtype();
        let wide = adapter_dtype(dtype);
        let transfer = Transfer::default;
        let model = model.fill(Kind::Adapter, &files, &found, wide, transfer())?;
        let kind = Kind::Whole(&names);
        let model = model.fill(kind, &files, &file.whole, dtype, transfer())?;
        Ok(model.train_only(&names))
    }

    /// The configuration of the adapters, if there are any.
    pub fn adapter_config(&self) -> Option<&LoraConfig> {
        self.lora.as_ref()
    }

    /// Discards the fingerprint of the checkpoint, so that adapters that record a different one are
    /// accepted.
    #[must_use]
    pub fn of_any_base(mut self) -> Self {
        self.fingerprint = None;
        self
    }

    /// The adapted layers as targets of a configuration: by the ends of their names if these match
    /// no other module of the checkpoint, such as a convolution, else in full.
    fn target_modules(&mut self, adapted: &BTreeSet<String>) -> Vec<String> {
        let names = self.linear_names();
        let (mut full, mut ends) = (BTreeSet::new(), BTreeSet::new());
        let end = |name: &str| name.rsplit('.').next().unwrap_or_default().to_owned();
        for (path, name) in names {
            if adapted.contains(&path) {
                ends.insert(end(&name));
                full.insert(name);
            }
        }
        // Lazy weights stay so.
        let weights = self.weights();
        let modules = weights
            .iter()
            .filter_map(|weight| Some(weight.name.rsplit_once('.')?.0));
        let others = modules.filter(|module| !full.contains(*module));
        let others: BTreeSet<String> = others.map(end).collect();
        let is_name = |end: &String| end.parse::<usize>().is_err() && !others.contains(end);
        if ends.iter().all(is_name) {
            ends.into_iter().collect()
        } else {
            full.into_iter().collect()
        }
    }
}

impl VlmConfig {
    /// Reads the configuration of the adapter in a folder, and from the names of its tensors the
    /// layers that have adapters and the weights trained whole. No weight is read.
    ///
    /// # Errors
    /// Those of [`init`](Self::init); [`VlmError::File`], [`VlmError::Config`],
    /// [`VlmError::Unsupported`], [`VlmError::AdapterKeys`].
    pub fn adapter_config(&self, folder: impl AsRef<Path>) -> Result<LoraConfig> {
        let mut model = self.init(&Device::flex())?;
        Ok(AdapterFile::open(folder.as_ref(), &mut model)?.config)
    }
}

/// The files of an adapter, with only names read so far.
#[derive(Debug)]
pub(crate) struct AdapterFile {
    pub(crate) config: LoraConfig,
    pub(crate) weights: Weights,
    /// A and B of each layer, by the layer's name in the module.
    pub(crate) layers: BTreeMap<String, [Found; 2]>,
    /// The weights trained whole, by name in the module.
    pub(crate) whole: BTreeMap<String, Found>,
}

/// Reasons against tensors of an adapter.
const UNKNOWN: &str = "fit nothing in this model; they may be of another model's";
const SINGLE: &str = "lack lora_A or lora_B";
const MISSING: &str = "are missing, though modules_to_save has their modules";
const APART: &str = "are trained without the rest of their modules, as PEFT cannot";
const UNTIED: &str = "train the output head apart from the word embeddings, with which it shares a \
                      weight in this model; train both with PEFT's ensure_weight_tying";

fn keys(path: &Path, reason: &'static str) -> impl FnOnce(Vec<String>) -> VlmError {
    let path = path.to_owned();
    move |names| VlmError::AdapterKeys {
        path,
        names,
        reason,
    }
}

impl AdapterFile {
    /// Reads a configuration and the names of tensors, each of which must belong to `model`, which
    /// may be one of lazy weights.
    ///
    /// # Errors
    /// [`VlmError::File`], [`VlmError::Config`], [`VlmError::Unsupported`],
    /// [`VlmError::AdapterKeys`].
    pub(crate) fn open(folder: &Path, model: &mut Vlm) -> Result<Self> {
        let raw = raw_config(&file::text(&folder.join(CONFIG))?)?;
        let path = folder.join(WEIGHTS);
        let source = TensorFile::open(&path)?;
        let to_module = model.family.names.to_module();
        let linears: BTreeSet<String> = model.linears().into_iter().map(|(path, _)| path).collect();
        let paths: BTreeSet<String> = model.weights().into_iter().map(|w| w.path).collect();
        let (mut unknown, mut halves) = (Vec::new(), BTreeMap::<String, [Option<Found>; 2]>::new());
        let (mut whole, mut head) = (BTreeMap::new(), None);
        let tensors = source.tensors();
        for (name, stored) in &tensors {
            let found = Found {
                name: name.clone(),
                file: 0,
                stored: stored.clone(),
                pieces: Vec::new(),
            };
            let rest = name.strip_prefix(PREFIX).unwrap_or_default();
            match SUFFIXES.iter().position(|(_, end)| rest.ends_with(end)) {
                Some(half) => {
                    let weight = rename(&to_module, &rest.replace(SUFFIXES[half].1, ".weight"));
                    match weight.strip_suffix(".weight") {
                        Some(layer) if linears.contains(layer) => {
                            halves.entry(layer.to_owned()).or_default()[half] = Some(found);
                        }
                        _ => unknown.push(name.clone()),
                    }
                }
                None => match rename(&to_module, rest) {
                    path if paths.contains(&path) => _ = whole.insert(path, found),
                    path if path == HEAD => head = Some(found),
                    _ => unknown.push(name.clone()),
                },
            }
        }
        if !unknown.is_empty() {
            return Err(keys(&path, UNKNOWN)(unknown));
        }
        let (mut layers, mut single) = (BTreeMap::new(), Vec::new());
        for (layer, halves) in halves {
            match halves {
                [Some(a), Some(b)] => _ = layers.insert(layer, [a, b]),
                _ => single.push(layer),
            }
        }
        if !single.is_empty() || layers.is_empty() {
            return Err(keys(&path, SINGLE)(single));
        }
        let weights = Weights { source, tensors };
        raw.expect_modules(&weights, model, (&whole, head.as_ref()))?;
        let config = raw.config(model, &layers, &whole);
        let config = config.map_err(keys(&path, APART))?;
        config.check()?;
        Ok(Self {
            config,
            weights,
            layers,
            whole,
        })
    }

    /// Rejects an adapter that records a base checkpoint with a different fingerprint.
    ///
    /// # Errors
    /// [`VlmError::OtherBase`]
    pub(crate) fn expect_base(&self, folder: &Path, fingerprint: u64) -> Result<()> {
        let expected = format!("{fingerprint:016x}");
        match self.weights.source.metadata(BASE) {
            Some(found) if found != expected => Err(VlmError::OtherBase {
                folder: folder.to_owned(),
                found: found.to_owned(),
                expected,
            }),
            _ => Ok(()),
        }
    }
}

impl Raw {
    /// Rejects a file without all weights of `modules_to_save`, and a tied head with a weight of
    /// its own.
    ///
    /// # Errors
    /// [`VlmError::AdapterKeys`], [`VlmError::File`].
    fn expect_modules(
        &self,
        weights: &Weights,
        model: &Vlm,
        (whole, head): (&BTreeMap<String, Found>, Option<&Found>),
    ) -> Result<()> {
        let path = weights.source.path();
        let saved = self.modules_to_save.as_deref().unwrap_or_default();
        let missing = model.weights().into_iter().filter(|weight| {
            // As PEFT finds them: the end of a name need not begin at a dot.
            let mut modules = weight.modules();
            !whole.contains_key(&weight.path)
                && modules.any(|module| saved.iter().any(|end| module.ends_with(&**end)))
        });
        let missing: Vec<String> = missing.map(|weight| weight.name).collect();
        if model.lm_head.is_none() {
            let is_one = match (whole.get(TABLE), head) {
                (None, None) => true,
                (Some(_), None) => saved.is_empty() || self.ensure_weight_tying,
                (Some(table), Some(head)) => {
                    weights.source.are_equal(&table.stored, &head.stored)?
                }
                (None, Some(_)) => false,
            };
            if !is_one {
                return Err(keys(path, UNTIED)(vec![format!("{PREFIX}{HEAD}")]));
            }
        }
        if missing.is_empty() {
            Ok(())
        } else {
            Err(keys(path, MISSING)(missing))
        }
    }

    /// The configuration with these layers and weights, by name in the module.
    ///
    /// # Errors
    /// Weights that no module holds alone.
    fn config(
        &self,
        model: &mut Vlm,
        layers: &BTreeMap<String, [Found; 2]>,
        whole: &BTreeMap<String, Found>,
    ) -> Result<LoraConfig, Vec<String>> {
        let parts: BTreeSet<ModelPart> = layers.keys().map(|path| ModelPart::of(path)).collect();
        Ok(LoraConfig {
            rank: self.r,
            alpha: self.lora_alpha,
            dropout: self.lora_dropout,
            rslora: self.use_rslora,
            parts: parts.into_iter().collect(),
            targets: model.target_modules(&layers.keys().cloned().collect()),
            layers: Vec::new(),
            whole: TrainedWeights {
                parts: Vec::new(),
                modules: model.modules_of(&whole.keys().cloned().collect())?,
            },
        })
    }
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
            ("modules_to_save", json!(["lm_head"])),
        ] {
            config(key, value.clone()).unwrap_or_else(|error| panic!("{key} = {value}: {error}"));
        }
    }
}

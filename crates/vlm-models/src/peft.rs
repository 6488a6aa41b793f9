//! Adapters in PEFT's files: `adapter_config.json` and `adapter_model.safetensors`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use burn::tensor::{Device, TensorData};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::config::VlmConfig;
use crate::error::{Result, VlmError};
use crate::experts::{EXPERT_MATRICES, PARAMETERS};
use crate::file::{self, Entry, Sink, TensorFile};
use crate::linear::{Adaptable, adapter_dtype};
use crate::load::{Found, Kind, Weights};
use crate::model::{HEAD, TABLE, Vlm};
use crate::names::{PREFIX, Remap as _, SUFFIXES, class_name, rename};
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
    rank_pattern: Option<BTreeMap<String, usize>>,
    alpha_pattern: Option<BTreeMap<String, f64>>,
    target_parameters: Option<Vec<String>>,
    modules_to_save: Option<Vec<String>>,
    #[serde(default)]
    ensure_weight_tying: bool,
    /// The other keys. Some change the computation of an adapter.
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// Keys that change the computation of an adapter, with the supported values other than null, false
/// and empty ones. Other initialisations subtract from the base weights.
const FIXED: [(&str, &str); 9] = [
    ("init_lora_weights", "true, \"gaussian\" or \"eva\""),
    ("bias", "\"none\""),
    ("fan_in_fan_out", "false"),
    ("use_dora", "false"),
    ("lora_bias", "false"),
    ("trainable_token_indices", "null"),
    ("layer_replication", "null"),
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
        let mut model = self.clone();
        let mut adapted = [BTreeSet::new(), BTreeSet::new()];
        for (path, mut layer) in model.adaptable() {
            let is_linear = matches!(layer, Adaptable::Linear(_));
            if layer.adapter().is_some() {
                adapted[usize::from(!is_linear)].insert(path);
            }
        }
        let [linears, others] = adapted;
        let mut entries = Vec::new();
        for (copy, kind) in kinds.iter().enumerate() {
            entries.extend(self.entries(*kind).into_iter().map(|entry| Entry {
                name: match copy {
                    0 => nested(&entry.name, &others),
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

        let targets = (!linears.is_empty()).then(|| model.target_ends(&linears));
        let parameters = (!others.is_empty()).then(|| model.target_parameters(&others));
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
            "rank_pattern": config.rank_pattern,
            "alpha_pattern": config.alpha_pattern
        });
        if parameters.is_some() {
            // Of no older PEFT, so only where it is needed.
            text["target_parameters"] = json!(parameters);
        }
        if is_tied {
            text["ensure_weight_tying"] = true.into();
        }
        let path = folder.join(CONFIG);
        Ok(plain_files::write_whole(
            &path,
            format!("{text:#}\n").as_bytes(),
        )?)
    }

    /// Freezes the model, removes earlier adapters and loads those of a folder written by PEFT or
    /// [`save_adapter`](Self::save_adapter), with the weights trained whole beside them. Names of
    /// transformers before 4.52 (`model.layers`) and later ones are read, and adapters of single
    /// experts. An adapter that records a different checkpoint is an error, unless the model is
    /// [`of_any_base`](Self::of_any_base).
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
    fn target_ends(&mut self, adapted: &BTreeSet<String>) -> Vec<String> {
        let names = self.layer_names();
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

    /// The parameters of experts and routers with adapters, as PEFT targets them: by the ends of
    /// their names if all layers have them, else in full.
    fn target_parameters(&mut self, adapted: &BTreeSet<String>) -> Vec<String> {
        let to_class = self.family.names.to_class();
        let mut layers: BTreeMap<String, [BTreeSet<String>; 2]> = BTreeMap::new();
        for (path, layer) in self.adaptable() {
            let mut name = class_name(&to_class, &path);
            match layer {
                Adaptable::Linear(_) => continue,
                Adaptable::Gate(_) => name += ".weight",
                Adaptable::Experts(_) => {}
            }
            let end = name.rfind(".mlp.").map_or(0, |dot| dot + 1);
            let with_it = adapted.contains(&path);
            layers.entry(name[end..].to_owned()).or_default()[usize::from(with_it)].insert(name);
        }
        let targets = layers.into_iter().flat_map(|(end, [without, with])| {
            match (without.is_empty(), with.is_empty()) {
                (true, false) => vec![end],
                _ => with.into_iter().collect(),
            }
        });
        targets.collect()
    }
}

/// PEFT's name for a tensor of an adapter: those of two parameters of one module are nested, the
/// later one outside.
fn nested(name: &str, adapted: &BTreeSet<String>) -> String {
    let Some((module, half)) = name.split_once(".experts.") else {
        return name.to_owned();
    };
    let Some((parameter, half)) = half.split_once('.') else {
        return name.to_owned();
    };
    let layer = module
        .rsplit_once(".layers.")
        .map_or(module, |(_, layer)| layer);
    let down = format!(".layers.{layer}.experts.{}", PARAMETERS[1]);
    let is_inner = parameter == PARAMETERS[0] && adapted.iter().any(|path| path.ends_with(&down));
    match is_inner {
        true => format!("{module}.experts.{INNER}.{half}"),
        false => format!("{module}.experts.{half}"),
    }
}

/// PEFT's name for a module below an adapter.
const INNER: &str = "base_layer";

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
    /// The factor of each layer's product B A.
    pub(crate) scales: BTreeMap<String, f64>,
    /// The weights trained whole, by name in the module.
    pub(crate) whole: BTreeMap<String, Found>,
}

/// Reasons against tensors of an adapter.
const UNKNOWN: &str = "fit nothing in this model; they may be of another model's";
const SINGLE: &str = "lack lora_A or lora_B";
const MISSING: &str = "are missing, though modules_to_save has their modules";
const EITHER: &str = "may be beside either parameter of the experts; name it in target_parameters";
const WITHOUT: &str = "are named in target_parameters, but have no tensors";
const PARTIAL: &str = "lack the adapters of other experts or matrices, beside which PEFT has some";
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
        let mut raw = raw_config(&file::text(&folder.join(CONFIG))?)?;
        let path = folder.join(WEIGHTS);
        let source = TensorFile::open(&path)?;
        let to_module = model.family.names.to_module();
        let paths: BTreeSet<String> = model.weights().into_iter().map(|w| w.path).collect();
        let (mut unknown, mut halves) = (Vec::new(), BTreeMap::<String, [Option<Found>; 2]>::new());
        let (mut whole, mut head) = (BTreeMap::new(), None);
        let tensors = source.tensors();
        for (name, stored) in &tensors {
            let found = Found::new(name.clone(), 0, stored.clone());
            let rest = name.strip_prefix(PREFIX).unwrap_or_default();
            let half =
                |(half, (_, end)): (usize, &(_, &str))| Some((rest.strip_suffix(end)?, half));
            match SUFFIXES.iter().enumerate().find_map(half) {
                Some((layer, half)) => {
                    halves.entry(layer.to_owned()).or_default()[half] = Some(found);
                }
                None => match rename(&to_module, rest) {
                    path if paths.contains(&path) => _ = whole.insert(path, found),
                    path if path == HEAD => head = Some(found),
                    _ => unknown.push(name.clone()),
                },
            }
        }
        let (mut pairs, mut single) = (BTreeMap::new(), Vec::new());
        for (layer, halves) in halves {
            match halves {
                [Some(a), Some(b)] => _ = pairs.insert(layer, [a, b]),
                _ => single.push(layer),
            }
        }
        if unknown.is_empty() && (!single.is_empty() || pairs.is_empty()) {
            return Err(keys(&path, SINGLE)(single));
        }
        let weights = Weights { source, tensors };
        let pairs = raw.joined(pairs, &weights, model)?;
        let sizes = model.adaptable().into_iter();
        let sizes = sizes.map(|(path, layer)| (path, (layer.sizes(), layer.count())));
        let sizes: BTreeMap<String, ([usize; 2], usize)> = sizes.collect();
        let inner: BTreeSet<String> = pairs.keys().filter_map(|layer| outside(layer)).collect();
        let mut layers = BTreeMap::new();
        for (layer, pair) in pairs {
            let name = match outside(&layer) {
                Some(experts) => format!("{experts}.{}", PARAMETERS[0]),
                None if inner.contains(&layer) => format!("{layer}.{}", PARAMETERS[1]),
                None if layer.ends_with(".experts") => {
                    let named = PARAMETERS.map(|parameter| format!("{layer}.{parameter}"));
                    let named = named.into_iter().filter(|name| raw.is_parameter(name));
                    match &named.collect::<Vec<_>>()[..] {
                        [name] => name.clone(),
                        _ => return Err(keys(&path, EITHER)(pair.map(|half| half.name).into())),
                    }
                }
                None => layer,
            };
            let weight = rename(&to_module, &format!("{name}.weight"));
            match weight.strip_suffix(".weight") {
                Some(path) if sizes.contains_key(path) => _ = layers.insert(path.to_owned(), pair),
                _ => unknown.extend(pair.map(|half| half.name)),
            }
        }
        if !unknown.is_empty() {
            return Err(keys(&path, UNKNOWN)(unknown));
        }
        raw.expect_modules(&weights, model, (&whole, head.as_ref()))?;
        let config = raw.config(model, &layers, &whole);
        let config = config.map_err(keys(&path, APART))?;
        config.check()?;
        let to_class = model.family.names.to_class();
        let mut without = raw.target_parameters.unwrap_or_default();
        let mut scales = BTreeMap::new();
        for (path, [a, b]) in &layers {
            let name = class_name(&to_class, path);
            let ([inputs, outputs], count) = sizes[path];
            config.expect_one(&name)?;
            let (rank, scale) = config.of(&name);
            scales.insert(path.clone(), scale);
            let rows = rank * count;
            a.expect(&[rows, inputs])?;
            b.expect(&[outputs, rows])?;
            without.retain(|target| {
                !ends_with(&name, target) && !ends_with(&format!("{name}.weight"), target)
            });
        }
        if !without.is_empty() {
            return Err(keys(&path, WITHOUT)(without));
        }
        Ok(Self {
            config,
            weights,
            layers,
            scales,
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

/// True if a name is `end`, or ends with it from a dot on.
fn ends_with(name: &str, end: &str) -> bool {
    let rest = name.strip_suffix(end);
    rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// The experts of a layer in PEFT's files that another adapter of them is outside of.
fn outside(layer: &str) -> Option<String> {
    let experts = layer.strip_suffix(INNER)?.strip_suffix('.')?;
    Some(experts.to_owned())
}

/// The adapters of one matrix of an expert, as PEFT with transformers 4 names them: the name of all
/// experts, the expert, the matrix.
fn of_expert(layer: &str) -> Option<(&str, usize, &str)> {
    let (rest, matrix) = layer.rsplit_once('.')?;
    let (experts, expert) = rest.rsplit_once('.')?;
    let is_experts = experts.ends_with(".experts");
    Some((experts, expert.parse().ok().filter(|_| is_experts)?, matrix))
}

impl Raw {
    /// True if a parameter, by its name in transformers, is a target.
    fn is_parameter(&self, name: &str) -> bool {
        let mut targets = self.target_parameters.iter().flatten();
        targets.any(|target| ends_with(name, target))
    }

    /// Joins the adapters of single experts to one of each parameter, as PEFT does with transformers
    /// 5: those of gate and up become one of both, of twice the rank and with the same scale.
    ///
    /// # Errors
    /// [`VlmError::AdapterKeys`], [`VlmError::TensorShape`], [`VlmError::TensorUnreadable`],
    /// [`VlmError::File`].
    fn joined(
        &mut self,
        pairs: BTreeMap<String, [Found; 2]>,
        weights: &Weights,
        model: &mut Vlm,
    ) -> Result<BTreeMap<String, [Found; 2]>> {
        let counts = model
            .adaptable()
            .into_iter()
            .map(|(_, layer)| layer.count());
        let experts = counts.max().unwrap_or(1);
        let mut joined = BTreeMap::new();
        let mut single: BTreeMap<String, BTreeMap<(usize, &str), [Found; 2]>> = BTreeMap::new();
        for (layer, pair) in &pairs {
            match of_expert(layer) {
                Some((network, expert, matrix)) => {
                    let of_network = single.entry(network.to_owned()).or_default();
                    of_network.insert((expert, matrix), pair.clone());
                }
                None => _ = joined.insert(layer.clone(), pair.clone()),
            }
        }
        let files = std::slice::from_ref(weights);
        for (network, mut of_network) in single {
            let mut outer = network.clone();
            for (parameter, matrices) in EXPERT_MATRICES.iter().rev() {
                let places = (0..experts).flat_map(|expert| {
                    let places = matrices.iter();
                    places.map(move |matrix| (expert, *matrix))
                });
                let pieces = places.map(|place| of_network.remove(&place));
                let pieces: Vec<Option<[Found; 2]>> = pieces.collect();
                let found: Vec<[Found; 2]> = pieces.iter().flatten().cloned().collect();
                let Some(first) = found.first() else {
                    continue;
                };
                if found.len() < pieces.len() {
                    let names = found.into_iter().map(|[a, _]| a.name).collect();
                    return Err(keys(weights.source.path(), PARTIAL)(names));
                }
                let name = format!("{network}.{parameter}");
                self.state(&name, (experts, matrices))?;
                self.target_parameters.get_or_insert_default().push(name);
                let pair = first.clone();
                joined.insert(outer.clone(), join(pair, &found, experts, files)?);
                outer = format!("{network}.{INNER}");
            }
            if !of_network.is_empty() {
                let rest = of_network.into_values().flatten();
                let names = rest.map(|half| half.name).collect();
                return Err(keys(weights.source.path(), UNKNOWN)(names));
            }
        }
        Ok(joined)
    }

    /// States rank and alpha of the joined adapters of a parameter where they differ from those of
    /// others.
    ///
    /// # Errors
    /// [`VlmError::Unsupported`] if not all of its matrices have one rank and one scale.
    fn state(&mut self, name: &str, (experts, matrices): (usize, &[&str])) -> Result<()> {
        let lora = self.lora();
        let (network, parameter) = name.rsplit_once('.').unwrap_or(("", name));
        let places = (0..experts).flat_map(|expert| matrices.iter().map(move |m| (expert, m)));
        let mut of_matrices =
            places.map(|(expert, matrix)| lora.of(&format!("{network}.{expert}.{matrix}")));
        let first = of_matrices.next().unwrap_or_else(|| lora.of(name));
        let key = format!("experts.{parameter}");
        let (rank, scale) = (first.0 * matrices.len(), first.1);
        let alpha = match self.use_rslora {
            true => scale * (rank as f64).sqrt(),
            false => scale * rank as f64,
        };
        let mut is_one = of_matrices.all(|of_matrix| of_matrix == first);
        if lora.of(name) != (rank, scale) {
            let ranks = self.rank_pattern.get_or_insert_default();
            is_one &= ranks
                .insert(key.clone(), rank)
                .is_none_or(|other| other == rank);
            let alphas = self.alpha_pattern.get_or_insert_default();
            is_one &= alphas.insert(key, alpha).is_none_or(|other| other == alpha);
        }
        match is_one {
            true => Ok(()),
            false => Err(VlmError::Unsupported {
                key: "rank_pattern or alpha_pattern",
                found: format!("several ranks or scales of the matrices of {name}"),
                expected: "one of all experts",
            }),
        }
    }

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
            parts: parts.into_iter().collect(),
            targets: model.target_ends(&layers.keys().cloned().collect()),
            whole: TrainedWeights {
                parts: Vec::new(),
                modules: model.modules_of(&whole.keys().cloned().collect())?,
            },
            ..self.lora()
        })
    }

    /// The configuration without layers.
    fn lora(&self) -> LoraConfig {
        LoraConfig {
            rank: self.r,
            alpha: self.lora_alpha,
            dropout: self.lora_dropout,
            rslora: self.use_rslora,
            rank_pattern: self.rank_pattern.clone().unwrap_or_default(),
            alpha_pattern: self.alpha_pattern.clone().unwrap_or_default(),
            ..LoraConfig::default()
        }
    }
}

/// Joins A and B of matrices of experts, those of an expert together.
///
/// # Errors
/// [`VlmError::TensorShape`], [`VlmError::TensorUnreadable`], [`VlmError::File`].
fn join(
    first: [Found; 2],
    pairs: &[[Found; 2]],
    experts: usize,
    files: &[Weights],
) -> Result<[Found; 2]> {
    let [a, b] = &first;
    let dtypes = [a.float()?, b.float()?];
    let shapes = [&a.stored.shape[..], &b.stored.shape[..]];
    let ([rank, inputs], [outputs, _]) = (shapes[0], shapes[1]) else {
        let (name, found) = (a.name.clone(), a.stored.shape.clone());
        let reason = format!("expected a matrix, found {found:?}");
        return Err(VlmError::TensorUnreadable { name, reason });
    };
    for [a, b] in pairs {
        a.expect_like(&[*rank, *inputs], dtypes[0])?;
        b.expect_like(&[*outputs, *rank], dtypes[1])?;
    }
    let of_expert = pairs.len() / experts;
    let (ranks, widths) = (of_expert * rank, dtypes.map(|dtype| dtype.size()));
    let mut of_a = Vec::new();
    let mut of_b = vec![0; of_expert * outputs * ranks * experts * widths[1]];
    for (index, pair) in pairs.iter().enumerate() {
        let (expert, matrix) = (index / of_expert, index % of_expert);
        let read = |half: usize| {
            let elements = 0..pair[half].stored.elements();
            pair[half].read(files, dtypes[half], elements)
        };
        of_a.extend_from_slice(read(0)?.bytes());
        let values = read(1)?;
        for (element, value) in values.bytes().chunks_exact(widths[1]).enumerate() {
            let (output, of_rank) = (element / rank, element % rank);
            let row = matrix * outputs + output;
            let to = (row * ranks + matrix * rank + of_rank) * experts + expert;
            of_b[to * widths[1]..][..widths[1]].copy_from_slice(value);
        }
    }
    let shapes = [
        [experts * ranks, *inputs],
        [of_expert * outputs, ranks * experts],
    ];
    let [of_a, of_b] = [(of_a, 0), (of_b, 1)]
        .map(|(bytes, half)| TensorData::from_bytes_vec(bytes, shapes[half], dtypes[half]));
    let [a, b] = first.clone();
    Ok([a.with_values(of_a), b.with_values(of_b)])
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

//! The trained parameters, and low-rank adapters beside linear layers and experts.

use std::collections::{BTreeMap, BTreeSet};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Tensor};
use burn_store::KeyRemapper;

use crate::error::{Result, VlmError};
use crate::linear::{Adaptable, Adapter, AdapterConfig, Linear, prepare};
use crate::model::Vlm;
use crate::names::{ModulePath, Remap as _, class_name};
use crate::random::Stream;
use crate::trace::{Sampled, sampled_elements};
use crate::trained::{LoraConfig, ModelPart, Target, TrainedWeights};
use crate::vision::VisionTower;
use crate::walk::Block;
use crate::whole::Weight;

/// A parameter of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Its identity in the module.
    pub id: ParamId,
    /// Its name in transformers, or in PEFT for an adapter.
    pub name: String,
    /// The part that it belongs to.
    pub part: ModelPart,
    /// The block that it belongs to.
    pub block: Block,
    /// Its shape in the module.
    pub shape: Vec<usize>,
    /// Its type.
    pub dtype: DType,
    /// True if it is transposed in files.
    pub(crate) is_transposed: bool,
}

impl Parameter {
    /// True if weight decay applies, as to matrices but not to norms and biases.
    pub fn decays(&self) -> bool {
        self.shape.len() > 1
    }

    /// The number of its elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Samples at most `count` elements of the parameter or of its gradient. `flat` is in the
    /// module's order, the result in the order of files.
    ///
    /// # Errors
    /// [`VlmError::TensorUnreadable`] if `flat` has the wrong number of elements, or cannot be read
    /// from the device.
    pub fn sample(&self, flat: Tensor<1>, count: usize) -> Result<Sampled> {
        let [found] = flat.dims();
        if found != self.elements() {
            return Err(self.unreadable(format!(
                "expected {} elements, found {found}",
                self.elements()
            )));
        }
        self.sample_at(flat, count, |element| element)
    }

    /// As [`sample`](Self::sample), of a tensor that has the element `e` of the module's order at
    /// `index(e)`, such as a part of the parameter.
    ///
    /// # Errors
    /// [`VlmError::TensorUnreadable`] if an index is not below the tensor's length, or if it cannot
    /// be read from the device.
    pub fn sample_at(
        &self,
        tensor: Tensor<1>,
        count: usize,
        index: impl Fn(usize) -> usize,
    ) -> Result<Sampled> {
        let [length] = tensor.dims();
        let mut wrong = self.sampled(count).map(&index);
        if let Some(index) = wrong.find(|index| *index >= length) {
            let reason = format!("expected indices below {length}, found {index}");
            return Err(self.unreadable(reason));
        }
        let shape = match (self.is_transposed, &self.shape[..]) {
            (true, [inputs, outputs]) => vec![*outputs, *inputs],
            _ => self.shape.clone(),
        };
        let index = |element| index(self.index_of(element));
        Sampled::take(&self.name, tensor, &shape, count, |element| {
            Some(index(element))
        })
    }

    fn unreadable(&self, reason: String) -> VlmError {
        let name = self.name.clone();
        VlmError::TensorUnreadable { name, reason }
    }

    /// The elements that are sampled, in the order of files, each by its index in the module's
    /// order.
    pub fn sampled(&self, count: usize) -> impl Iterator<Item = usize> {
        sampled_elements(self.elements(), count).map(|element| self.index_of(element))
    }

    /// The index in the module's order of an element in the order of files.
    fn index_of(&self, element: usize) -> usize {
        match (self.is_transposed, &self.shape[..]) {
            (true, [inputs, outputs]) => element % inputs * outputs + element / inputs,
            _ => element,
        }
    }
}

impl Vlm {
    /// The trained parameters, in the order of the module.
    pub fn parameters(&self) -> Vec<Parameter> {
        let all = self.all_parameters().into_iter();
        let trained = all.filter(|(_, is_trained)| *is_trained);
        trained.map(|(parameter, _)| parameter).collect()
    }

    /// Every parameter in the order of the module, and true if it is trained.
    pub fn all_parameters(&self) -> Vec<(Parameter, bool)> {
        let mut parameters = Vec::new();
        self.each_parameter(|parameter, is_trained, _| parameters.push((parameter, is_trained)));
        parameters
    }

    /// Samples at most `count` elements of every parameter, or of every trained one, by its name in
    /// transformers.
    ///
    /// # Errors
    /// [`VlmError::TensorUnreadable`] if a parameter cannot be read from the device.
    pub fn sample_parameters(
        &self,
        count: usize,
        trained_only: bool,
    ) -> Result<BTreeMap<String, Sampled>> {
        let mut found = BTreeMap::new();
        let mut result = Ok(());
        self.each_parameter(|parameter, is_trained, flat| {
            if result.is_err() || (trained_only && !is_trained) {
                return;
            }
            match parameter.sample(flat, count) {
                Ok(sampled) => _ = found.insert(parameter.name, sampled),
                Err(error) => result = Err(error),
            }
        });
        result.map(|()| found)
    }

    /// Calls `each` with every parameter, true if it is trained, and its elements, flat in the
    /// module's order.
    fn each_parameter(&self, each: impl FnMut(Parameter, bool, Tensor<1>)) {
        self.visit(&mut Parameters {
            to_class: self.family.names.to_class(),
            path: ModulePath::default(),
            each,
        });
    }

    /// The block and the number of elements of each weight, in the order of the module. It does not
    /// initialise lazy weights.
    pub fn weight_sizes(&self) -> Vec<(Block, usize)> {
        let weights = self.weights().into_iter();
        let size = |weight: Weight| (Block::of(&weight.path), weight.elements);
        weights.map(size).collect()
    }

    /// Trains some weights, without adapters, and freezes the others.
    ///
    /// # Errors
    /// [`VlmError::NoModule`] if a name matches no module.
    pub fn train_weights(mut self, chosen: &TrainedWeights) -> Result<Self> {
        self.remove_adapters();
        let whole = self.whole(chosen)?;
        Ok(self.train_only(&whole))
    }

    /// Freezes the model but for the weights that are trained whole, removes earlier adapters and
    /// adds new ones, which have no effect yet. A is drawn from `seed`.
    ///
    /// # Errors
    /// [`VlmError::Unsupported`], also if a layer with an adapter is trained whole;
    /// [`VlmError::NoTarget`] if a target matches no linear layer of the parts;
    /// [`VlmError::NoModule`].
    pub fn with_lora(self, config: &LoraConfig, seed: u64) -> Result<Self> {
        let mut model = self.train_weights(&config.whole)?;
        let chosen = model.adapted(config)?;
        model.adapt(config, seed, |path| {
            chosen.iter().any(|chosen| chosen == path)
        });
        Ok(model)
    }

    /// The layers with adapters under a configuration, and their sizes. It does not initialise lazy
    /// weights.
    ///
    /// # Errors
    /// Those of [`with_lora`](Self::with_lora).
    pub fn adapters(&mut self, config: &LoraConfig) -> Result<Vec<AdaptedLayer>> {
        let chosen = self.adapted(config)?;
        let to_class = self.family.names.to_class();
        let layers = self.adaptable().into_iter();
        let layers = layers.filter(|(path, _)| chosen.contains(path));
        Ok(layers
            .map(|(path, layer)| {
                let [inputs, outputs] = layer.sizes();
                let (rank, scale) = config.of(&class_name(&to_class, &path));
                AdaptedLayer {
                    rank,
                    scale,
                    matrices: layer.count(),
                    inputs,
                    outputs,
                    path,
                }
            })
            .collect())
    }

    /// The layers that a configuration selects, by name in transformers.
    ///
    /// # Errors
    /// Those of [`with_lora`](Self::with_lora).
    pub fn adapted_layers(&mut self, config: &LoraConfig) -> Result<Vec<String>> {
        let chosen = self.adapted(config)?;
        let names = self.layer_names().into_iter();
        let names = names.filter(|(path, _)| chosen.contains(path));
        Ok(names.map(|(_, name)| name).collect())
    }

    /// The layers that a configuration selects, by name in the module.
    fn adapted(&mut self, config: &LoraConfig) -> Result<Vec<String>> {
        config.check()?;
        let depth = self.language_model.depth();
        if let Some(layer) = config.layers.iter().find(|layer| **layer >= depth) {
            return Err(VlmError::NoLayer {
                layer: *layer,
                depth,
            });
        }
        let names = self.layer_names();
        let by_default = self.adaptable().into_iter().filter_map(|(path, layer)| {
            let is_linear = matches!(layer, Adaptable::Linear(_));
            is_linear.then_some(path)
        });
        let by_default: BTreeSet<String> = by_default.collect();
        let is_in_layers = |path: &str| match layer_of(path) {
            Some(layer) => config.layers.is_empty() || config.layers.contains(&layer),
            None => true,
        };
        let is_in_parts = |(path, _): &&(String, String)| {
            config.parts.contains(&ModelPart::of(path)) && is_in_layers(path)
        };
        let candidates: Vec<_> = names.iter().filter(is_in_parts).collect();
        let targets: Vec<_> = config
            .targets
            .iter()
            .map(|text| Target::new(text))
            .collect();
        let no_target = |target: &str| VlmError::NoTarget {
            target: target.to_owned(),
            layers: {
                let ends = candidates.iter().map(|(_, name)| end_of(name).to_owned());
                ends.collect::<BTreeSet<_>>().into_iter().collect()
            },
        };
        for target in &targets {
            if !candidates.iter().any(|(_, name)| target.matches(name)) {
                return Err(no_target(target.text));
            }
        }
        let is_target = |path: &str, name: &str| match targets.is_empty() {
            true => by_default.contains(path),
            false => targets.iter().any(|target| target.matches(name)),
        };
        let chosen = candidates
            .iter()
            .filter(|(path, name)| is_target(path, name));
        let chosen: Vec<String> = chosen.map(|(path, _)| path.clone()).collect();
        if config.dropout > 0.0 && !chosen.iter().all(|path| by_default.contains(path)) {
            return Err(VlmError::Unsupported {
                key: "dropout",
                found: config.dropout.to_string(),
                expected: "0 for adapters beside experts and routers, as in PEFT",
            });
        }
        if chosen.is_empty() {
            return Err(no_target("all linear layers"));
        }
        for (_, name) in names.iter().filter(|(path, _)| chosen.contains(path)) {
            config.expect_one(name)?;
        }
        let whole = self.whole(&config.whole)?;
        if let Some(layer) = chosen
            .iter()
            .find(|path| whole.contains(*path) || whole.contains(&format!("{path}.weight")))
        {
            return Err(VlmError::Unsupported {
                key: "a layer trained whole",
                found: layer.clone(),
                expected: "one without an adapter",
            });
        }
        Ok(chosen)
    }

    /// The model for one pass: its adapters in the form of the device's kernels, if it has any.
    pub(crate) fn for_pass(&self, wide_gradients: bool) -> Self {
        let mut model = self.clone();
        prepare(model.linears(), wide_gradients);
        model.language_model.prepare(wide_gradients);
        model
    }

    /// Removes the adapters. Weights trained whole beside them stay as they are.
    #[must_use]
    pub fn without_lora(mut self) -> Self {
        self.remove_adapters();
        self
    }

    fn remove_adapters(&mut self) {
        self.lora = None;
        for (_, mut layer) in self.adaptable() {
            *layer.adapter() = None;
        }
    }

    /// Adds adapters to the layers that `is_target` selects by their names in the module.
    pub(crate) fn adapt(
        &mut self,
        config: &LoraConfig,
        seed: u64,
        is_target: impl Fn(&str) -> bool,
    ) {
        let stream = Stream::new(seed);
        let to_class = self.family.names.to_class();
        for (index, (path, mut layer)) in self.adaptable().into_iter().enumerate() {
            if is_target(&path) {
                let (rank, scale) = config.of(&class_name(&to_class, &path));
                let settings = AdapterConfig {
                    rows: rank * layer.count(),
                    scale,
                    dropout: config.dropout,
                };
                let (device, dtype) = layer.like();
                let drawn = (stream, index as u64);
                let adapter = Adapter::new(layer.sizes(), settings, (&device, dtype), drawn);
                *layer.adapter() = Some(adapter);
            }
        }
        self.lora = Some(config.clone());
    }

    /// The layers that adapters may be beside, by name in the module. Those that are adapted only if
    /// a target names them are last.
    pub(crate) fn adaptable(&mut self) -> Vec<(String, Adaptable<'_>)> {
        let visual = self.visual.iter_mut().flat_map(VisionTower::linears);
        let visual =
            visual.map(|(name, linear)| (format!("visual.{name}"), Adaptable::Linear(linear)));
        let layers = self.language_model.layers.iter_mut().enumerate();
        let decoder = layers.flat_map(|(index, layer)| {
            let prefix = format!("language_model.layers.{index}");
            let layers = layer.adaptable();
            layers.map(move |(name, layer)| (format!("{prefix}.{name}"), layer))
        });
        let mut found: Vec<_> = visual.chain(decoder).collect();
        found.sort_by_key(|(_, layer)| !matches!(layer, Adaptable::Linear(_)));
        found
    }

    /// The linear layers that adapters are beside by default.
    fn linears(&mut self) -> Vec<&mut Linear> {
        let layers = self.adaptable().into_iter();
        let linears = layers.filter_map(|(_, layer)| match layer {
            Adaptable::Linear(linear) => Some(linear),
            _ => None,
        });
        linears.collect()
    }

    /// The layers that adapters may be beside, by name in the module and in transformers.
    pub(crate) fn layer_names(&mut self) -> Vec<(String, String)> {
        let to_class = self.family.names.to_class();
        let layers = self.adaptable().into_iter();
        layers
            .map(|(path, _)| {
                let name = class_name(&to_class, &path);
                (path, name)
            })
            .collect()
    }
}

/// A layer with an adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct AdaptedLayer {
    /// Its name in the module.
    pub path: String,
    /// Rows of A and of B for each matrix.
    pub rank: usize,
    /// The factor of the product of A and B.
    pub scale: f64,
    /// The number of matrices: the experts, or 1.
    pub matrices: usize,
    /// Columns of A.
    pub inputs: usize,
    /// Columns of B.
    pub outputs: usize,
}

/// The part of a layer's name after the number of its block, or of all of it.
fn end_of(name: &str) -> &str {
    let number = name.split('.').rfind(|part| part.parse::<usize>().is_ok());
    let after = number.and_then(|number| name.rsplit_once(&format!(".{number}.")));
    after.map_or(name, |(_, end)| end)
}

/// The index of the decoder layer of a linear layer, by its name in the module.
fn layer_of(path: &str) -> Option<usize> {
    let layer = path.strip_prefix("language_model.layers.")?;
    let (index, _) = layer.split_once('.')?;
    index.parse().ok()
}

/// Visits the parameters.
struct Parameters<F> {
    to_class: KeyRemapper,
    path: ModulePath,
    each: F,
}

impl<F: FnMut(Parameter, bool, Tensor<1>)> ModuleVisitor for Parameters<F> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.path.exit(container);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.val();
        let parameter = Parameter {
            id: param.id,
            name: self.path.checkpoint_name(&self.to_class),
            part: ModelPart::of(&self.path.name()),
            block: Block::of(&self.path.name()),
            shape: tensor.dims().to_vec(),
            dtype: tensor.dtype(),
            is_transposed: self.path.is_transposed(),
        };
        let (is_trained, elements) = (tensor.is_require_grad(), parameter.elements());
        (self.each)(parameter, is_trained, tensor.reshape([elements]));
    }
}

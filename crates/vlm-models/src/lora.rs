//! The trained parameters, and low-rank adapters beside linear layers.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Tensor};
use burn_store::KeyRemapper;

use crate::error::{Result, VlmError};
use crate::linear::{AdapterConfig, Linear, prepare};
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
        Sampled::take(&self.name, tensor, &shape, count, index)
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

    /// The linear layers with adapters under a configuration: the name in the module, inputs and
    /// outputs. It does not initialise lazy weights.
    ///
    /// # Errors
    /// Those of [`with_lora`](Self::with_lora).
    pub fn adapted_linears(&mut self, config: &LoraConfig) -> Result<Vec<(String, [usize; 2])>> {
        let chosen = self.adapted(config)?;
        let linears = self.linears().into_iter();
        let linears = linears.filter(|(path, _)| chosen.contains(path));
        Ok(linears
            .map(|(path, linear)| (path, linear.sizes()))
            .collect())
    }

    /// The linear layers that a configuration selects, by name in transformers.
    ///
    /// # Errors
    /// Those of [`with_lora`](Self::with_lora).
    pub fn adapted_layers(&mut self, config: &LoraConfig) -> Result<Vec<String>> {
        let chosen = self.adapted(config)?;
        let names = self.linear_names().into_iter();
        let names = names.filter(|(path, _)| chosen.contains(path));
        Ok(names.map(|(_, name)| name).collect())
    }

    /// The linear layers that a configuration selects, by name in the module.
    fn adapted(&mut self, config: &LoraConfig) -> Result<Vec<String>> {
        config.check()?;
        let depth = self.language_model.depth();
        if let Some(layer) = config.layers.iter().find(|layer| **layer >= depth) {
            return Err(VlmError::NoLayer {
                layer: *layer,
                depth,
            });
        }
        let names = self.linear_names();
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
            layers: candidates.iter().map(|(_, name)| name.clone()).collect(),
        };
        for target in &targets {
            if !candidates.iter().any(|(_, name)| target.matches(name)) {
                return Err(no_target(target.text));
            }
        }
        let is_target = |name: &str| targets.is_empty() || targets.iter().any(|t| t.matches(name));
        let chosen = candidates.iter().filter(|(_, name)| is_target(name));
        let chosen: Vec<String> = chosen.map(|(path, _)| path.clone()).collect();
        if chosen.is_empty() {
            return Err(no_target("all linear layers"));
        }
        let whole = self.whole(&config.whole)?;
        if let Some(layer) = chosen
            .iter()
            .find(|path| whole.contains(&format!("{path}.weight")))
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
        let linears = model.linears().into_iter();
        prepare(linears.map(|(_, linear)| linear).collect(), wide_gradients);
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
        for (_, linear) in self.linears() {
            linear.adapter = None;
        }
    }

    /// Adds adapters to the linear layers that `is_target` selects by their names in the module.
    pub(crate) fn adapt(
        &mut self,
        config: &LoraConfig,
        seed: u64,
        is_target: impl Fn(&str) -> bool,
    ) {
        let shared = AdapterConfig {
            rank: config.rank,
            scale: config.scale(),
            dropout: config.dropout,
        };
        let stream = Stream::new(seed);
        for (index, (path, linear)) in self.linears().into_iter().enumerate() {
            if is_target(&path) {
                linear.adapt(shared, index as u64, stream);
            }
        }
        self.lora = Some(config.clone());
    }

    /// The linear layers except the output head, by name in the module.
    pub(crate) fn linears(&mut self) -> Vec<(String, &mut Linear)> {
        let visual = self.visual.iter_mut().flat_map(VisionTower::linears);
        let visual = visual.map(|(name, linear)| (format!("visual.{name}"), linear));
        let layers = self.language_model.layers.iter_mut().enumerate();
        let decoder = layers.flat_map(|(index, layer)| {
            let prefix = format!("language_model.layers.{index}");
            let linears = layer.linears();
            linears.map(move |(name, linear)| (format!("{prefix}.{name}"), linear))
        });
        visual.chain(decoder).collect()
    }

    /// The linear layers except the output head, by name in the module and in transformers.
    pub(crate) fn linear_names(&mut self) -> Vec<(String, String)> {
        let to_class = self.family.names.to_class();
        let linears = self.linears().into_iter();
        linears
            .map(|(path, _)| {
                let name = class_name(&to_class, &path);
                (path, name)
            })
            .collect()
    }
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

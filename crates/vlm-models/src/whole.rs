//! Weights that are trained whole: alone, or beside adapters as PEFT's `modules_to_save`.

use std::collections::BTreeSet;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn_store::KeyRemapper;

use crate::error::{Result, VlmError};
use crate::load::Kind;
use crate::model::{TABLE, Vlm};
use crate::names::{ModulePath, Remap as _, rename};
use crate::trained::{ModelPart, Target, TrainedWeights};

/// A weight of the model without adapters. Lazy weights stay so.
#[derive(Debug)]
pub(crate) struct Weight {
    /// Its name in the module.
    pub(crate) path: String,
    /// Its name in transformers.
    pub(crate) name: String,
    pub(crate) elements: usize,
    /// True if the output head has it too.
    is_tied: bool,
}

impl Weight {
    /// The modules of transformers that hold it, from the outermost.
    pub(crate) fn modules(&self) -> impl Iterator<Item = &str> {
        let ends = self.name.match_indices('.');
        let outer = ends.map(|(end, _)| &self.name[..end]);
        outer.chain(self.is_tied.then_some(TrainedWeights::EMBEDDINGS[1]))
    }
}

impl Vlm {
    /// The weights without those of adapters, in the order of the module.
    pub(crate) fn weights(&self) -> Vec<Weight> {
        let mut list = Weights {
            to_class: self.family.names.to_class(),
            path: ModulePath::default(),
            is_tied: self.lm_head.is_none(),
            found: Vec::new(),
        };
        self.visit(&mut list);
        list.found
    }

    /// Names in transformers, and numbers of elements, of the weights that are trained whole, in
    /// the order of the module. It does not initialise lazy weights.
    ///
    /// # Errors
    /// [`VlmError::NoModule`] if a name matches no module.
    pub fn whole_weights(&self, chosen: &TrainedWeights) -> Result<Vec<(String, usize)>> {
        let whole = self.whole(chosen)?;
        let weights = self.weights().into_iter();
        let weights = weights.filter(|weight| whole.contains(&weight.path));
        Ok(weights
            .map(|weight| (weight.name, weight.elements))
            .collect())
    }

    /// As [`whole_weights`](Self::whole_weights), by name in the module.
    ///
    /// # Errors
    /// [`VlmError::NoModule`]
    pub fn whole_paths(&self, chosen: &TrainedWeights) -> Result<Vec<(String, usize)>> {
        let whole = self.whole(chosen)?;
        let weights = self.weights().into_iter();
        let weights = weights.filter(|weight| whole.contains(&weight.path));
        Ok(weights
            .map(|weight| (weight.path, weight.elements))
            .collect())
    }

    /// The names in the module of the weights that are trained whole.
    ///
    /// # Errors
    /// [`VlmError::NoModule`]
    pub(crate) fn whole(&self, chosen: &TrainedWeights) -> Result<BTreeSet<String>> {
        let weights = self.weights();
        let targets = chosen.modules.iter().map(|text| Target::new(text));
        let targets: Vec<Target> = targets.collect();
        let is_in = |weight: &Weight, target: &Target| {
            weight.modules().any(|module| target.matches(module))
        };
        for target in &targets {
            if !weights.iter().any(|weight| is_in(weight, target)) {
                let modules = weights.iter().flat_map(Weight::modules);
                let modules: BTreeSet<&str> = modules.collect();
                return Err(VlmError::NoModule {
                    module: target.text.to_owned(),
                    modules: modules.into_iter().map(str::to_owned).collect(),
                });
            }
        }
        let is_chosen = |weight: &&Weight| {
            let part = ModelPart::of(&weight.path);
            chosen.parts.contains(&part) || targets.iter().any(|target| is_in(weight, target))
        };
        let whole = weights.iter().filter(is_chosen);
        Ok(whole.map(|weight| weight.path.clone()).collect())
    }

    /// The modules of transformers that hold these weights and no others, the outermost that PEFT
    /// can replace: it replaces no list, and the decoder is called by keywords alone.
    ///
    /// # Errors
    /// The weights in no such module.
    pub(crate) fn modules_of(&self, whole: &BTreeSet<String>) -> Result<Vec<String>, Vec<String>> {
        const NEVER: [&str; 2] = ["model", "model.language_model"];
        let weights = self.weights();
        let (mut others, mut lists) = (BTreeSet::new(), BTreeSet::new());
        for weight in &weights {
            for module in weight.modules() {
                if !whole.contains(&weight.path) {
                    others.insert(module);
                }
                if let Some((list, index)) = module.rsplit_once('.')
                    && index.parse::<usize>().is_ok()
                {
                    lists.insert(list);
                }
            }
        }
        let is_replaced = |module: &&str| {
            !others.contains(module) && !lists.contains(module) && !NEVER.contains(module)
        };
        let whole = weights.iter().filter(|weight| whole.contains(&weight.path));
        let (mut modules, mut alone) = (BTreeSet::new(), Vec::new());
        for weight in whole {
            match weight.modules().find(is_replaced) {
                Some(module) => _ = modules.insert(module),
                None => alone.push(weight.name.clone()),
            }
        }
        if alone.is_empty() {
            Ok(modules.into_iter().map(str::to_owned).collect())
        } else {
            Err(alone)
        }
    }

    /// Trains some weights, by name in the module, and freezes the others, but no adapters.
    pub(crate) fn train_only(self, whole: &BTreeSet<String>) -> Self {
        self.map(&mut Train {
            whole,
            path: ModulePath::default(),
        })
    }
}

/// Lists all weights.
struct Weights {
    to_class: KeyRemapper,
    path: ModulePath,
    is_tied: bool,
    found: Vec<Weight>,
}

impl ModuleVisitor for Weights {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.path.exit(container);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !Kind::Base.holds(&self.path) || self.path.is_constant() {
            return;
        }
        let path = self.path.name();
        self.found.push(Weight {
            name: rename(&self.to_class, &path),
            is_tied: self.is_tied && path == TABLE,
            elements: param.lazy_shape().num_elements(),
            path,
        });
    }
}

/// Trains some weights and freezes the others.
struct Train<'a> {
    whole: &'a BTreeSet<String>,
    path: ModulePath,
}

impl ModuleMapper for Train<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.path.exit(container);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if Kind::Base.holds(&self.path) {
            param.set_require_grad(self.whole.contains(&self.path.name()))
        } else {
            param
        }
    }
}

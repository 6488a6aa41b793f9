//! AdamW with f32 masters and moments.
//!
//! The update is computed in f32 and rounded once, to the parameter's type; with masters, what the
//! rounding loses stays in the master. A parameter without a gradient in a batch, as the tower's in
//! one without pictures, is left alone, its decay and the count of its steps too, as PyTorch does.
//!
//! # Source
//! Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019, algorithm 2, in the order
//! of operations of torch 2.15 `torch.optim.AdamW` for one tensor

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{DType, Int, Tensor};
use vlm_models::{Parameter, Vlm};

use crate::recipe::Recipe;
use crate::sums::GradientSums;

/// The state of all parameters that are trained.
#[derive(Clone, Debug)]
pub(crate) struct AdamW {
    pub(crate) states: HashMap<ParamId, State>,
}

/// The state of a parameter, flat; of several ranks that share the state, of their part of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct State {
    /// Updates so far.
    pub(crate) steps: u64,
    /// The parameter in f32, where it is not itself; absent before the first update.
    pub(crate) master: Option<Tensor<1>>,
    /// Moving means of the gradient and of its square; absent before the first update.
    pub(crate) moments: Option<[Tensor<1>; 2]>,
}

impl AdamW {
    /// Without updates so far.
    pub(crate) fn new(parameters: &[Parameter]) -> Self {
        let states = parameters.iter().map(|p| (p.id, State::default()));
        Self {
            states: states.collect(),
        }
    }

    /// Updates the model by the gradients of a batch, at `factor` times the peak rates; if the step
    /// is watched, returns of the updates of weights of 16 bits without masters those that rounding
    /// undid, and all.
    pub(crate) fn step(
        &mut self,
        model: Vlm,
        parameters: &[Parameter],
        gradients: GradientSums,
        recipe: &Recipe,
        at: (f64, bool),
    ) -> (Vlm, [usize; 2]) {
        let mut update = Update::new(self, parameters, gradients, recipe, at);
        let model = model.map(&mut update);
        (model, update.lost())
    }

    /// As [`step`](Self::step), of parts of the parameters, flat and in their types, whose state
    /// this is.
    pub(crate) fn step_parts(
        &mut self,
        parts: HashMap<ParamId, Tensor<1>>,
        parameters: &[Parameter],
        gradients: GradientSums,
        recipe: &Recipe,
        at: (f64, bool),
    ) -> (HashMap<ParamId, Tensor<1>>, [usize; 2]) {
        // All ranks count the updates of all parameters.
        for id in gradients.elsewhere() {
            if let Some(state) = self.states.get_mut(&id) {
                state.steps += 1;
            }
        }
        let mut update = Update::new(self, parameters, gradients, recipe, at);
        let mut updated = HashMap::new();
        for (id, part) in parts {
            let new = update.elements(id, part.clone());
            updated.insert(id, new.unwrap_or(part));
        }
        (updated, update.lost())
    }
}

/// What differs between parameters.
struct Rule {
    rate: f64,
    decay: f64,
}

struct Update<'a> {
    rules: HashMap<ParamId, Rule>,
    adam: &'a mut AdamW,
    gradients: GradientSums,
    recipe: &'a Recipe,
    is_watched: bool,
    /// Updates without effect of each parameter, and all updates looked at.
    lost: Vec<Tensor<1, Int>>,
    watched: usize,
}

impl<'a> Update<'a> {
    fn new(
        adam: &'a mut AdamW,
        parameters: &[Parameter],
        gradients: GradientSums,
        recipe: &'a Recipe,
        (factor, is_watched): (f64, bool),
    ) -> Self {
        let rules = parameters.iter().map(|parameter| {
            let rule = Rule {
                rate: recipe.rates.of(parameter.part) * factor,
                decay: if parameter.decays() {
                    recipe.weight_decay
                } else {
                    0.0
                },
            };
            (parameter.id, rule)
        });
        Self {
            rules: rules.collect(),
            adam,
            gradients,
            recipe,
            is_watched,
            lost: Vec::new(),
            watched: 0,
        }
    }

    /// The updated elements of a parameter, in its type; none without a gradient.
    fn elements(&mut self, id: ParamId, before: Tensor<1>) -> Option<Tensor<1>> {
        let (dtype, [elements]) = (before.dtype(), before.dims());
        let rule = self.rules.get(&id)?;
        let state = self.adam.states.get_mut(&id)?;
        let gradient = self.gradients.take(id)?;
        let before = match state.master.take() {
            Some(master) => master,
            None => wide(before),
        };
        state.steps += 1;
        let keeps = state.keeps(dtype, self.recipe);
        let watched = (self.is_watched && is_narrow(dtype) && !keeps).then(|| before.clone());
        let value = state.update(before, gradient, rule, self.recipe);
        if let Some(before) = watched {
            let rounded = wide(value.clone().cast(dtype));
            let lost = rounded
                .equal(before.clone())
                .bool_and(value.clone().not_equal(before));
            self.lost.push(lost.int().sum());
            self.watched += elements;
        }
        let rounded = value.clone().cast(dtype);
        state.master = keeps.then_some(value);
        Some(rounded)
    }

    /// Updates without effect, and all that were looked at.
    fn lost(self) -> [usize; 2] {
        if self.lost.is_empty() {
            return [0, 0];
        }
        let lost = Tensor::cat(self.lost, 0).try_into_data();
        // A device that failed says so at its next use.
        lost.map_or([0, 0], |lost| {
            [lost.iter::<f64>().sum::<f64>() as usize, self.watched]
        })
    }
}

impl ModuleMapper for Update<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let id = param.id;
        if !self.gradients.has(id) {
            return param;
        }
        param.map(|tensor| {
            let dims = tensor.dims();
            let flat = tensor
                .clone()
                .inner()
                .reshape([dims.iter().product::<usize>()]);
            match self.elements(id, flat) {
                Some(new) => Tensor::from_inner(new.reshape(dims)).require_grad(),
                None => tensor,
            }
        })
    }
}

impl State {
    /// True if the parameter's f32 value is kept beside it, from the first update on.
    pub(crate) fn keeps(&self, dtype: DType, recipe: &Recipe) -> bool {
        self.steps > 0 && recipe.masters && is_narrow(dtype)
    }

    /// The value after the update of this number, in the type of `value`.
    fn update(
        &mut self,
        value: Tensor<1>,
        gradient: Tensor<1>,
        rule: &Rule,
        recipe: &Recipe,
    ) -> Tensor<1> {
        let [beta_1, beta_2] = recipe.betas;
        let steps = self.steps as f64;
        let (first, second) = match self.moments.take() {
            Some([first, second]) => {
                let first = first.clone() + (gradient.clone() - first) * (1.0 - beta_1);
                let square = gradient.clone() * gradient * (1.0 - beta_2);
                (first, second * beta_2 + square)
            }
            None => {
                let first = gradient.clone() * (1.0 - beta_1);
                (first, gradient.clone() * gradient * (1.0 - beta_2))
            }
        };
        self.moments = Some([first.clone(), second.clone()]);
        let correction = (1.0 - beta_2.powf(steps)).sqrt();
        let root = second.sqrt() / correction + recipe.epsilon;
        let step_size = rule.rate / (1.0 - beta_1.powf(steps));
        let value = match rule.decay {
            0.0 => value,
            decay => value * (1.0 - rule.rate * decay),
        };
        value - first / root * step_size
    }
}

fn is_narrow(dtype: DType) -> bool {
    !matches!(dtype, DType::F32 | DType::F64)
}

fn wide(x: Tensor<1>) -> Tensor<1> {
    if is_narrow(x.dtype()) {
        x.cast(DType::F32)
    } else {
        x
    }
}

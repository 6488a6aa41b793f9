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
use qwen_vl::{Parameter, QwenVl};

use crate::recipe::Recipe;
use crate::sums::GradientSums;

/// The state of all parameters that are trained.
#[derive(Clone, Debug)]
pub(crate) struct AdamW {
    pub(crate) states: HashMap<ParamId, State>,
}

/// The state of a parameter, flat.
#[derive(Clone, Debug)]
pub(crate) struct State {
    /// Updates so far.
    pub(crate) steps: u64,
    /// The parameter in f32, where it is not itself.
    pub(crate) master: Option<Tensor<1>>,
    /// Moving means of the gradient and of its square; absent before the first update.
    pub(crate) moments: Option<[Tensor<1>; 2]>,
}

impl AdamW {
    /// Moments of 0, and where `masters` says so the masters of 16-bit parameters.
    pub(crate) fn new(model: &QwenVl, parameters: &[Parameter], masters: bool) -> Self {
        let states = parameters.iter().map(|parameter| {
            let state = State {
                steps: 0,
                master: None,
                moments: None,
            };
            (parameter.id, state)
        });
        let mut adam = Self {
            states: states.collect(),
        };
        if masters {
            model.visit(&mut TakeMasters { adam: &mut adam });
        }
        adam
    }

    /// Updates the model by the gradients of a batch, at `factor` times the peak rates; if the step
    /// is watched and there are weights of 16 bits without masters, returns the share of their
    /// updates that rounding undid.
    pub(crate) fn step(
        &mut self,
        model: QwenVl,
        parameters: &[Parameter],
        gradients: GradientSums,
        recipe: &Recipe,
        (factor, is_watched): (f64, bool),
    ) -> (QwenVl, Option<f64>) {
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
        let mut update = Update {
            rules: rules.collect(),
            adam: self,
            gradients,
            recipe,
            is_watched,
            lost: Vec::new(),
            watched: 0,
        };
        let model = model.map(&mut update);
        (model, update.lost_share())
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

impl Update<'_> {
    fn lost_share(self) -> Option<f64> {
        if self.lost.is_empty() {
            return None;
        }
        let lost = Tensor::cat(self.lost, 0).try_into_data().ok()?;
        Some(lost.iter::<f64>().sum::<f64>() / self.watched as f64)
    }
}

impl ModuleMapper for Update<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let rule = self.rules.get(&param.id);
        let (Some(rule), Some(state), Some(gradient)) = (
            rule,
            self.adam.states.get_mut(&param.id),
            self.gradients.take(param.id),
        ) else {
            return param;
        };
        param.map(|tensor| {
            let (dims, dtype) = (tensor.dims(), tensor.dtype());
            let elements: usize = dims.iter().product();
            let before = match state.master.take() {
                Some(master) => master,
                None => wide(tensor.inner().reshape([elements])),
            };
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
            let rounded = value.clone().cast(dtype).reshape(dims);
            state.master = keeps.then_some(value);
            Tensor::from_inner(rounded).require_grad()
        })
    }
}

impl State {
    /// Whether the parameter's f32 value is kept beside it.
    fn keeps(&self, dtype: DType, recipe: &Recipe) -> bool {
        recipe.masters && is_narrow(dtype)
    }

    /// The updated value, in the type of `value`.
    fn update(
        &mut self,
        value: Tensor<1>,
        gradient: Tensor<1>,
        rule: &Rule,
        recipe: &Recipe,
    ) -> Tensor<1> {
        let [beta_1, beta_2] = recipe.betas;
        self.steps += 1;
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

/// Copies 16-bit parameters in f32.
struct TakeMasters<'a> {
    adam: &'a mut AdamW,
}

impl burn::module::ModuleVisitor for TakeMasters<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(state) = self.adam.states.get_mut(&param.id) {
            let tensor = param.val();
            if is_narrow(tensor.dtype()) {
                let elements: usize = tensor.dims().iter().product();
                state.master = Some(wide(tensor.inner().reshape([elements])));
            }
        }
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

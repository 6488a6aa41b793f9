//! AdamW with f32 masters and moments.
//!
//! [`adamw`] computes an update in f32 and rounds it once, to the parameter's type; a master keeps
//! the digits that the rounding loses. As in PyTorch, a parameter without a gradient in a batch
//! (such as the tower's, in a batch without pictures) is unchanged: it does not decay, and its step
//! count stays.

use std::collections::HashMap;

use burn::module::ParamId;
use burn::tensor::{DType, Int, Tensor};
use burn_attention::{AdamWOp, adamw};
use vlm_models::{Parameter, Vlm};

use crate::checkpoint::values;
use crate::recipe::Recipe;
use crate::sums::{GradientSums, is_narrow, joined, parts, widened};

/// The state of all trained parameters.
#[derive(Clone, Debug)]
pub(crate) struct AdamW {
    pub(crate) states: HashMap<ParamId, State>,
}

/// The state of a parameter, flat; with a sharded state, of this rank's shard.
#[derive(Clone, Debug, Default)]
pub(crate) struct State {
    /// Updates so far.
    pub(crate) steps: u64,
    /// The parameter in f32, if it has another type; absent before the first update.
    pub(crate) master: Option<Tensor<1>>,
    /// Moving averages of the gradient and of its square; absent before the first update.
    pub(crate) moments: Option<[Tensor<1>; 2]>,
}

/// What all updates of a step have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    /// Multiplies the peak rates.
    pub(crate) rate: f64,
    /// Multiplies the gradients, to clip them.
    pub(crate) scale: f64,
    /// True to count the updates that rounding loses.
    pub(crate) is_watched: bool,
}

impl AdamW {
    /// Creates the state before any update.
    pub(crate) fn new(parameters: &[Parameter]) -> Self {
        let states = parameters.iter().map(|p| (p.id, State::default()));
        Self {
            states: states.collect(),
        }
    }

    /// Updates the model with the gradients of a batch. If the step is watched, it returns two counts
    /// for each 16-bit weight without master: the updates lost to rounding, and all updates.
    pub(crate) fn step(
        &mut self,
        model: Vlm,
        parameters: &[Parameter],
        gradients: GradientSums,
        recipe: &Recipe,
        step: Step,
    ) -> (Vlm, Vec<(ParamId, [usize; 2])>) {
        let mut update = Update::new(self, parameters, gradients, recipe, step);
        let values = update.all(values(&model, false), parameters);
        (model.with_values(values), update.lost())
    }

    /// As [`step`](Self::step), for shards of the parameters, flat and in their types, with this
    /// state.
    pub(crate) fn step_parts(
        &mut self,
        parts: HashMap<ParamId, Tensor<1>>,
        parameters: &[Parameter],
        gradients: GradientSums,
        recipe: &Recipe,
        step: Step,
    ) -> (HashMap<ParamId, Tensor<1>>, [usize; 2]) {
        // All ranks count the updates of all parameters.
        for id in gradients.elsewhere() {
            if let Some(state) = self.states.get_mut(&id) {
                state.steps += 1;
            }
        }
        let mut update = Update::new(self, parameters, gradients, recipe, step);
        let mut updated = parts.clone();
        updated.extend(update.all(parts, parameters));
        let lost = update.lost().into_iter();
        let lost = lost.fold([0; 2], |[lost, all], (_, [a, b])| [lost + a, all + b]);
        (updated, lost)
    }
}

/// The settings that differ between parameters.
struct Rule {
    rate: f64,
    decay: f64,
}

/// What the parameters of one update have in common.
#[derive(PartialEq)]
struct Group {
    rate: f64,
    decay: f64,
    steps: u64,
    has_moments: bool,
    has_master: bool,
    dtype: DType,
}

struct Update<'a> {
    rules: HashMap<ParamId, Rule>,
    adam: &'a mut AdamW,
    gradients: GradientSums,
    recipe: &'a Recipe,
    step: Step,
    /// Updates without effect, per parameter, and all updates counted.
    lost: Vec<(ParamId, Tensor<1, Int>, usize)>,
}

impl<'a> Update<'a> {
    fn new(
        adam: &'a mut AdamW,
        parameters: &[Parameter],
        gradients: GradientSums,
        recipe: &'a Recipe,
        step: Step,
    ) -> Self {
        let rules = parameters.iter().map(|parameter| {
            let rule = Rule {
                rate: recipe.rates.of(parameter.part) * step.rate,
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
            step,
            lost: Vec::new(),
        }
    }

    /// The updated elements of the parameters with gradients, in their types.
    fn all(
        &mut self,
        mut values: HashMap<ParamId, Tensor<1>>,
        parameters: &[Parameter],
    ) -> HashMap<ParamId, Tensor<1>> {
        let mut updated = HashMap::new();
        let mut groups: Vec<(Group, Vec<ParamId>)> = Vec::new();
        for id in parameters.iter().map(|parameter| parameter.id) {
            let Some(value) = values.remove(&id) else {
                continue;
            };
            match self.group(id, &value) {
                Some(group) => {
                    values.insert(id, value);
                    match groups.iter_mut().find(|(other, _)| *other == group) {
                        Some((_, ids)) => ids.push(id),
                        None => groups.push((group, vec![id])),
                    }
                }
                None => updated.extend(self.elements(id, value).map(|new| (id, new))),
            }
        }
        for (_, ids) in groups {
            let values = ids.iter().filter_map(|id| values.remove(id)).collect();
            updated.extend(self.together(&ids, values));
        }
        updated
    }

    /// The parameters that are updated together with one, if any.
    fn group(&self, id: ParamId, value: &Tensor<1>) -> Option<Group> {
        let (rule, state) = (self.rules.get(&id)?, self.adam.states.get(&id)?);
        let dtype = value.dtype();
        // The lost updates of weights without masters are counted for each.
        let is_counted = is_narrow(dtype) && !self.recipe.masters;
        let is_joined = self.gradients.is_joined(id) && !is_counted;
        is_joined.then_some(Group {
            rate: rule.rate,
            decay: rule.decay,
            steps: state.steps,
            has_moments: state.moments.is_some(),
            has_master: state.master.is_some(),
            dtype,
        })
    }

    /// The updated elements of the parameters of a group.
    fn together(&mut self, ids: &[ParamId], values: Vec<Tensor<1>>) -> Vec<(ParamId, Tensor<1>)> {
        let Some(rule) = ids.first().and_then(|id| self.rules.get(id)) else {
            return Vec::new();
        };
        let lengths: Vec<usize> = values.iter().map(|value| value.dims()[0]).collect();
        let gradients = ids
            .iter()
            .filter_map(|id| self.gradients.take(*id))
            .collect();
        let mut all = State::default();
        let (mut moments, mut masters) = ([Vec::new(), Vec::new()], Vec::new());
        for id in ids {
            let Some(state) = self.adam.states.get_mut(id) else {
                continue;
            };
            state.steps += 1;
            all.steps = state.steps;
            masters.extend(state.master.take());
            for (of_all, own) in moments
                .iter_mut()
                .zip(state.moments.take().into_iter().flatten())
            {
                of_all.push(own);
            }
        }
        if moments.iter().all(|moments| moments.len() == ids.len()) {
            all.moments = Some(moments.map(joined));
        }
        let dtype = values[0].dtype();
        let before = if masters.len() == ids.len() {
            joined(masters)
        } else {
            widened(joined(values))
        };
        let keeps = all.keeps(dtype, self.recipe);
        let tensors = [before, joined(gradients)];
        let op = all.op(rule, self.recipe, self.step);
        let [value, rounded] = all.update(tensors, op, dtype);
        if keeps {
            for (id, master) in ids.iter().zip(parts(&value, &lengths)) {
                if let Some(state) = self.adam.states.get_mut(id) {
                    state.master = Some(master);
                }
            }
        }
        if let Some(moments) = all.moments {
            let [first, second] = moments.map(|moments| parts(&moments, &lengths));
            for (id, moments) in ids.iter().zip(first.into_iter().zip(second)) {
                if let Some(state) = self.adam.states.get_mut(id) {
                    state.moments = Some(moments.into());
                }
            }
        }
        ids.iter().copied().zip(parts(&rounded, &lengths)).collect()
    }

    /// The updated elements of a parameter, in its type; none without a gradient.
    fn elements(&mut self, id: ParamId, before: Tensor<1>) -> Option<Tensor<1>> {
        let (dtype, [elements]) = (before.dtype(), before.dims());
        let rule = self.rules.get(&id)?;
        let state = self.adam.states.get_mut(&id)?;
        let gradient = self.gradients.take(id)?;
        let before = match state.master.take() {
            Some(master) => master,
            None => widened(before),
        };
        state.steps += 1;
        let keeps = state.keeps(dtype, self.recipe);
        let watched = (self.step.is_watched && is_narrow(dtype) && !keeps).then(|| before.clone());
        let op = state.op(rule, self.recipe, self.step);
        let [value, rounded] = state.update([before, gradient], op, dtype);
        if let Some(before) = watched {
            let lost = widened(rounded.clone())
                .equal(before.clone())
                .bool_and(value.clone().not_equal(before));
            self.lost.push((id, lost.int().sum(), elements));
        }
        state.master = keeps.then_some(value);
        Some(rounded)
    }

    /// Updates without effect, and all updates counted, of each parameter.
    fn lost(self) -> Vec<(ParamId, [usize; 2])> {
        if self.lost.is_empty() {
            return Vec::new();
        }
        let counts = self.lost.iter().map(|(_, lost, _)| lost.clone());
        let counts = Tensor::cat(counts.collect(), 0).try_into_data();
        // A failed device reports it at its next use.
        let Ok(counts) = counts else {
            return Vec::new();
        };
        let each = self.lost.iter().zip(counts.iter::<f64>());
        each.map(|((id, _, all), lost)| (*id, [lost as usize, *all]))
            .collect()
    }
}

impl State {
    /// True if an f32 copy of the parameter is kept from the first update on.
    pub(crate) fn keeps(&self, dtype: DType, recipe: &Recipe) -> bool {
        self.steps > 0 && recipe.masters && is_narrow(dtype)
    }

    /// The numbers of the update with this number.
    fn op(&self, rule: &Rule, recipe: &Recipe, step: Step) -> AdamWOp {
        AdamWOp {
            rate: rule.rate,
            decay: rule.decay,
            betas: recipe.betas,
            epsilon: recipe.epsilon,
            steps: self.steps,
            scale: step.scale,
        }
    }

    /// The value after an update, in its type and in that of the parameter.
    fn update(
        &mut self,
        [value, gradient]: [Tensor<1>; 2],
        op: AdamWOp,
        dtype: DType,
    ) -> [Tensor<1>; 2] {
        let moments = self.moments.take();
        let moments = moments.unwrap_or_else(|| [value.zeros_like(), value.zeros_like()]);
        let updated = adamw(value, gradient, moments, op, dtype.into())
            .expect("a recipe that was checked, and tensors of one parameter");
        self.moments = Some(updated.moments);
        [updated.value, updated.rounded]
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};
    use serde_json::Value;

    use super::*;

    const FIXTURE: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/fixtures/finetune/adamw.json"
    );

    fn numbers(found: &Value) -> Vec<f64> {
        let numbers = found.as_array().expect("a list").iter();
        numbers.map(|x| x.as_f64().expect("a number")).collect()
    }

    fn steps(found: &Value) -> Vec<Vec<f64>> {
        found
            .as_array()
            .expect("steps")
            .iter()
            .map(numbers)
            .collect()
    }

    /// The parameter after each step, and with a master also that.
    fn run(fixture: &Value, decay: f64, dtype: DType) -> Vec<[Vec<f64>; 2]> {
        let recipe = Recipe {
            betas: numbers(&fixture["betas"]).try_into().expect("two"),
            epsilon: fixture["epsilon"].as_f64().expect("a number"),
            ..Recipe::default()
        };
        let id = ParamId::new();
        let states = HashMap::from([(id, State::default())]);
        let mut adam = AdamW { states };
        let tensor =
            |numbers: &[f64], dtype| Tensor::<1>::from_data(numbers, (&Device::flex(), dtype));
        let mut value = tensor(&numbers(&fixture["value"]), dtype);
        let wide = if dtype == DType::F64 {
            dtype
        } else {
            DType::F32
        };
        let rates = numbers(&fixture["rates"]).into_iter();
        let steps = rates
            .zip(steps(&fixture["gradients"]))
            .map(|(rate, gradient)| {
                let mut gradients = GradientSums::default();
                gradients.add(id, tensor(&gradient, wide));
                let mut update = Update {
                    rules: HashMap::from([(id, Rule { rate, decay })]),
                    adam: &mut adam,
                    gradients,
                    recipe: &recipe,
                    step: Step {
                        rate: 1.0,
                        scale: 1.0,
                        is_watched: false,
                    },
                    lost: Vec::new(),
                };
                value = update.elements(id, value.clone()).expect("a gradient");
                let master = adam.states[&id].master.clone();
                [value.clone(), master.unwrap_or_else(|| value.clone())]
                    .map(|x| x.into_data().iter().collect())
            });
        steps.collect()
    }

    /// Against the parameters that tests/fixtures/generate/adamw.py wrote. torch fuses a product
    /// with a sum where it adds to a moment, so that last bits differ.
    #[test]
    fn parameters_and_masters_follow_those_of_torch() {
        let text = std::fs::read_to_string(FIXTURE).expect("the fixture");
        let fixture: Value = serde_json::from_str(&text).expect("JSON");
        for case in fixture["cases"].as_array().expect("cases") {
            let decay = case["decay"].as_f64().expect("a number");
            for (dtype, reference, tolerance) in [
                (DType::F64, "f64", 1e-14),
                (DType::F32, "f32", 2e-7),
                (DType::F32, "f64", 4e-7),
                (DType::BF16, "f32", 2e-7),
            ] {
                let found = run(&fixture, decay, dtype);
                for (step, (expected, [value, master])) in
                    steps(&case[reference]).into_iter().zip(found).enumerate()
                {
                    let apart = expected.iter().zip(&master).map(|(x, y)| (x - y).abs());
                    let apart = apart.fold(0.0, f64::max);
                    println!("{dtype:?}, decay {decay}, step {step}: {apart:e} from {reference}");
                    assert!(apart <= tolerance);
                    let rounded = TensorData::from(&expected[..]).convert_dtype(dtype);
                    if dtype == DType::BF16 {
                        assert_eq!(value, rounded.iter::<f64>().collect::<Vec<_>>());
                    }
                }
            }
        }
    }
}

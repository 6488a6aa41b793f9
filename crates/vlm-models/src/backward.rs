//! Gradients, one layer at a time.
//!
//! The forward pass keeps the input of each layer and no graph. The backward pass visits the layers
//! from last to first: it reruns a layer from its input, with the same random numbers, and
//! propagates the gradient of its output through this layer's graph. The tensors kept for the
//! backward thus exist for one layer at a time, at the cost of a second forward pass.
//!
//! The gradients are bit-identical to those of one graph of the whole model if the backend repeats
//! an operation with the same result: the sums over the uses of a tensor have the same terms.

use std::borrow::Cow;

use burn::module::Module;
use burn::tensor::{Gradients, IndexingUpdateOp, Tensor, TensorData};
use burn_attention::{GradientSource, backward_from};

use crate::balance::{Balance, RouterLoads, RouterLoss};
use crate::batch::Batch;
use crate::decoder::Layer;
use crate::error::{Result, VlmError};
use crate::linear::adapter_dtype;
use crate::model::{Vlm, logits_by_blocks};
use crate::random::Draws;
use crate::step::{Common, Deepstack};
use crate::tensors::leaf;
use crate::trace::Trace;
use crate::vision::{VisionInputs, VisionTower, onward};
use crate::walk::{Block, Walk, collect, flat};

/// Options of [`Vlm::backward`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backward<'a> {
    /// True to recompute each layer in the backward pass instead of keeping its activations.
    pub recompute: bool,
    /// The factor on the loss before its gradient is computed: the share of this batch in a larger
    /// one.
    pub weight: f64,
    /// A dropout seed for each sequence, in order; `None` disables dropout. The seed alone
    /// determines the dropout of a sequence, whatever other sequences the batch has.
    pub seeds: Option<&'a [u64]>,
    /// The auxiliary loss of routers, whose gradient is added; [`weight`](Self::weight) has no
    /// effect on it, and the loss that is returned is without it.
    pub router_loss: Option<RouterLoss<'a>>,
    /// The divisor of the logits from which [`Vlm::backward_weighed`] computes losses.
    pub temperature: f64,
}

impl Default for Backward<'_> {
    /// Recomputes, with weight and temperature 1, no dropout and no auxiliary loss.
    fn default() -> Self {
        Self {
            recompute: true,
            weight: 1.0,
            seeds: None,
            router_loss: None,
            temperature: 1.0,
        }
    }
}

/// The layers' inputs, kept between the forward and the backward pass.
struct Tape<'a> {
    common: Common<'a>,
    deepstack: Option<Deepstack<'a>>,
    inputs: Vec<Tensor<3>>,
    /// True for each layer, and for the head, if the gradient of its input is needed.
    wanted: Vec<bool>,
}

impl Tape<'_> {
    /// Keeps the input of a layer, and computes its output.
    fn forward(
        &mut self,
        index: usize,
        layer: &Layer,
        hidden: Tensor<3>,
        trace: &mut Trace,
        walk: &mut dyn Walk,
    ) -> Result<Tensor<3>> {
        self.inputs.push(hidden.clone());
        trace.record(|| format!("hidden.{index}.in"), &hidden);
        let common = Common {
            balance: self.common.balance.filter(|balance| balance.counts()),
            ..self.common
        };
        let output = match (common.part, layer.is_divided()) {
            (Some(part), _) => layer.forward_part(hidden, common, part, index, (trace, walk))?,
            (None, true) => layer.forward_divided(hidden, common, index, trace, walk)?,
            (None, false) => layer.forward(hidden, common, None, index, trace)?,
        };
        trace.record(|| format!("hidden.{index}.out"), &output);
        Ok(match &self.deepstack {
            Some(deepstack) => deepstack.add(index, output),
            None => output,
        })
    }

    /// Reruns the last layer that has not been visited, and returns the gradient of its input.
    fn backward(
        &mut self,
        index: usize,
        layer: &Layer,
        output_gradient: Tensor<3>,
        walk: &mut dyn Walk,
    ) -> Result<Option<Tensor<3>>> {
        let Some(input) = self.inputs.pop() else {
            return Ok(None);
        };
        let input = leaf(input, self.wanted[index]);
        if let Some(part) = self.common.part {
            let ahead = (output_gradient, walk);
            return layer.backward_part(input, self.common, part, index, ahead);
        }
        if layer.is_divided() {
            return layer.backward_divided(input, self.common, index, output_gradient, walk);
        }
        let source = layer.source(input.clone(), self.common, index, output_gradient)?;
        let source = match self.common.balance {
            Some(balance) => balance.join(source)?,
            None => source,
        };
        let mut gradients = backward_from([source]);
        collect(layer, &mut gradients, walk);
        Ok(input.grad_remove(&mut gradients))
    }

    /// The number of layers to whose outputs features are added.
    fn features(&self) -> usize {
        self.deepstack
            .as_ref()
            .map_or(0, |deepstack| deepstack.features.len())
    }

    /// The gradient of the features that are added to an output.
    fn feature_gradient(&self, output_gradient: &Tensor<3>) -> Option<Tensor<2>> {
        let deepstack = self.deepstack.as_ref()?;
        let placeholders = deepstack.placeholders.clone().inner();
        let [rows, seq, channels] = output_gradient.dims();
        let flat = output_gradient.clone().reshape([rows * seq, channels]);
        let gradient = flat.select(0, placeholders);
        let Some(merged) = deepstack.merged else {
            return Some(gradient);
        };
        // A picture that several sequences show.
        let [features, _] = deepstack.features.first()?.dims();
        let sums = Tensor::zeros([features, channels], (&gradient.device(), gradient.dtype()));
        let add = IndexingUpdateOp::Add;
        Some(sums.select_assign(0, merged.clone().inner(), gradient, add))
    }
}

/// The loss whose gradients are computed.
enum Objective<'a> {
    /// The mean over tokens, times a weight.
    Mean(f64),
    /// A function of the losses of all tokens at a temperature, by its gradients.
    Tokens(Weigh<'a>, f64),
}

/// Returns the gradient of an objective with respect to each token's loss.
type Weigh<'a> = &'a mut dyn FnMut(&[f32]) -> Vec<f32>;

impl Objective<'_> {
    /// The mean loss of the tokens, and the gradients from normalised hidden states on, if any are
    /// needed.
    fn backward(
        self,
        model: &Vlm,
        hidden: Tensor<3>,
        batch: &Batch,
        labels: &[i64],
        balance: Option<&Balance<'_>>,
    ) -> Result<(f64, Option<Gradients>)> {
        if batch.part.is_some() && model.own_labelled(batch, labels)? == 0 {
            // Those of other ranks depend on these tokens.
            let zeros = hidden.clone().inner().zeros_like();
            let source = GradientSource::new(hidden, zeros)?;
            return Ok((0.0, source.is_tracked().then(|| backward_from([source]))));
        }
        let (weigh, temperature) = match self {
            Self::Mean(weight) => {
                let loss = model.loss_of(hidden, batch, labels)?;
                let gradients = match balance.filter(|_| loss.is_tracked()) {
                    Some(balance) => {
                        let like = (&loss.device().inner(), loss.dtype());
                        let gradient = Tensor::full(loss.dims(), weight, like);
                        let source = GradientSource::new(loss.clone(), gradient)?;
                        Some(backward_from([balance.join(source)?]))
                    }
                    None => loss
                        .is_tracked()
                        .then(|| (loss.clone() * weight).backward()),
                };
                return Ok((number(loss)?, gradients));
            }
            Self::Tokens(weigh, temperature) => (weigh, temperature),
        };
        let losses = model.losses_of(hidden, batch, labels, temperature)?;
        let read = numbers(losses.clone())?;
        let mean = read.iter().copied().map(f64::from).sum::<f64>() / read.len() as f64;
        let weights = weigh(&read);
        let mut source = GradientSource::new(losses.clone(), {
            let data = TensorData::new(weights, [read.len()]);
            Tensor::from_data(data, (&losses.device().inner(), losses.dtype()))
        })?;
        if let Some(balance) = balance {
            source = balance.join(source)?;
        }
        let gradients = source.is_tracked().then(|| backward_from([source]));
        Ok((mean, gradients))
    }
}

impl Vlm {
    /// Computes the mean [`loss`](Self::loss), converted from the device's f32 to f64, and the
    /// gradient of each trained parameter. `walk` receives every gradient, flattened, as soon as it
    /// is complete, and may be a closure.
    ///
    /// # Errors
    /// Those of [`loss`](Self::loss); [`VlmError::SeedCount`]; [`VlmError::TensorUnreadable`] if
    /// the loss cannot be read from the device.
    pub fn backward(
        &self,
        batch: &Batch,
        labels: &[i64],
        how: Backward<'_>,
        walk: &mut dyn Walk,
    ) -> Result<f64> {
        self.backward_traced(batch, labels, how, &mut Trace::off(), walk)
    }

    /// As [`backward`](Self::backward), but also records activations and, with recompute, the
    /// gradients `gradient.hidden.N.out` of the decoder layers' outputs. For this, it computes the
    /// logits of a few tokens.
    ///
    /// # Errors
    /// Those of [`backward`](Self::backward).
    pub fn backward_traced(
        &self,
        batch: &Batch,
        labels: &[i64],
        how: Backward<'_>,
        trace: &mut Trace,
        walk: &mut dyn Walk,
    ) -> Result<f64> {
        let objective = Objective::Mean(how.weight);
        self.backward_of(batch, labels, how, objective, trace, walk)
    }

    /// Computes the gradients of a function of the labelled tokens' losses. `weigh` receives these
    /// losses, in nats, in the order of the tokens, and returns the function's gradient with respect
    /// to each; [`Backward::weight`] has no effect. Returns the mean loss.
    ///
    /// # Errors
    /// Those of [`backward`](Self::backward).
    pub fn backward_weighed(
        &self,
        batch: &Batch,
        labels: &[i64],
        how: Backward<'_>,
        weigh: &mut dyn FnMut(&[f32]) -> Vec<f32>,
        trace: &mut Trace,
        walk: &mut dyn Walk,
    ) -> Result<f64> {
        let objective = Objective::Tokens(weigh, how.temperature);
        self.backward_of(batch, labels, how, objective, trace, walk)
    }

    /// Counts the tokens of the experts in a batch, by a forward pass. The dropout is that of
    /// [`backward`](Self::backward).
    ///
    /// # Errors
    /// Those of [`backward`](Self::backward).
    pub fn router_loads(
        &self,
        batch: &Batch,
        labels: &[i64],
        how: Backward<'_>,
        walk: &mut dyn Walk,
    ) -> Result<RouterLoads> {
        let draws = how.seeds.map(|seeds| batch.draws(seeds)).transpose()?;
        let draws = draws.as_ref();
        let balance = Balance::counting(batch.own_attended());
        let common = Common {
            balance: Some(&balance),
            ..batch.common(draws)
        };
        let trace = &mut Trace::off();
        if walk.provides() {
            let (model, objective) = (self.clone().no_grad(), Objective::Mean(1.0));
            model.backward_by_layer(batch, labels, (objective, (common, draws)), trace, walk)?;
        } else {
            // As the pass that learns from them.
            let model = self.for_pass(true).no_grad();
            if model.has_divided_experts() || batch.part.is_some() {
                let objective = Objective::Mean(1.0);
                model.backward_by_layer(
                    batch,
                    labels,
                    (objective, (common, draws)),
                    trace,
                    walk,
                )?;
            } else {
                model.hidden_of(batch, common, &mut [], (draws, trace))?;
            }
        }
        Ok(balance.into_loads())
    }

    fn backward_of(
        &self,
        batch: &Batch,
        labels: &[i64],
        how: Backward<'_>,
        objective: Objective<'_>,
        trace: &mut Trace,
        walk: &mut dyn Walk,
    ) -> Result<f64> {
        let draws = how.seeds.map(|seeds| batch.draws(seeds)).transpose()?;
        let draws = draws.as_ref();
        let like = (&self.device().inner(), adapter_dtype(self.dtype()));
        let balance = how.router_loss;
        let balance = balance.map(|loss| Balance::learning(batch.own_attended(), loss, like));
        let common = Common {
            balance: balance.as_ref(),
            ..batch.common(draws)
        };
        let shared = (common, draws);
        if walk.provides() {
            // Each block is prepared when its weights are there.
            return self.backward_by_layer(batch, labels, (objective, shared), trace, walk);
        }
        let model = self.for_pass(true);
        if how.recompute {
            return model.backward_by_layer(batch, labels, (objective, shared), trace, walk);
        }
        let hidden = model.hidden_of(batch, common, &mut [], (draws, trace))?;
        self.trace_logits(&hidden, trace);
        let balance = common.balance;
        let (loss, gradients) = objective.backward(self, hidden, batch, labels, balance)?;
        if let Some(mut gradients) = gradients {
            collect(self, &mut gradients, walk);
        }
        Ok(loss)
    }

    fn backward_by_layer(
        &self,
        batch: &Batch,
        labels: &[i64],
        (objective, (common, draws)): (Objective<'_>, (Common<'_>, Option<&Draws>)),
        trace: &mut Trace,
        walk: &mut dyn Walk,
    ) -> Result<f64> {
        let quiet = &self.clone().no_grad();
        let decoder = &self.language_model;
        let layers = &decoder.layers;

        let wanted = self.wanted(batch.sees());
        let tower_wanted = wanted.tower;
        let seen = match (&quiet.visual, &batch.vision) {
            (Some(tower), Some(vision)) => {
                Some(tower.see(&vision.inputs, draws, tower_wanted, trace, walk)?)
            }
            _ => None,
        };

        let features = seen.as_ref().map(|seen| seen.features.clone());
        let deepstack = batch.deepstack(features.unwrap_or_default());
        let merged = seen.as_ref().map(|seen| seen.merged.clone());
        let words = quiet.at(&[Block::Words], walk)?;
        let mut hidden = words.embeddings(batch, merged.clone());
        drop(words);
        trace.record(|| "inputs_embeds".into(), &hidden);
        let mut tape = Tape {
            common,
            deepstack,
            inputs: Vec::with_capacity(layers.len()),
            wanted: wanted.inputs,
        };
        for (index, layer) in quiet.language_model.layers.iter().enumerate() {
            let layer = &*layer.at(index, walk)?;
            hidden = tape.forward(index, layer, hidden, trace, walk)?;
        }

        // The final norm, the head and the loss.
        let input = leaf(hidden, tape.wanted[layers.len()]);
        let head = self.at(self.head_blocks(), walk)?;
        let last = head.language_model.last(input.clone())?;
        trace.record(|| "hidden.final_norm".into(), &last);
        head.trace_logits(&last, trace);
        let (loss, gradients) = objective.backward(&head, last, batch, labels, None)?;
        let Some(mut gradients) = gradients else {
            return Ok(loss);
        };
        // The gradient of a tied head has a second term and is not complete yet.
        let table_gradient = match &self.lm_head {
            Some(_) => None,
            None => {
                let table = &head.language_model.embed_tokens.weight;
                table.grad_remove(&mut gradients)
            }
        };
        collect(&*head, &mut gradients, walk);
        let mut gradient = input.grad_remove(&mut gradients);
        drop((input, gradients, head));
        walk.complete(Block::Head)?;

        let mut feature_gradients = vec![None; tape.features()];
        for (index, layer) in layers.iter().enumerate().rev() {
            let Some(output_gradient) = gradient.take() else {
                break;
            };
            trace.record(|| format!("gradient.hidden.{index}.out"), &output_gradient);
            if let Some(feature_gradient) =
                feature_gradients.get_mut(index).filter(|_| tower_wanted)
            {
                *feature_gradient = tape.feature_gradient(&output_gradient);
            }
            let layer = layer.at(index, walk)?;
            gradient = tape.backward(index, &layer, output_gradient, walk)?;
            drop(layer);
            walk.complete(Block::Layer(index))?;
        }

        let (word_gradient, merged_gradient) = match gradient {
            Some(gradient) => {
                let merged = merged.map(|merged| leaf(merged, tower_wanted));
                self.backward_of_embeddings(batch, merged, gradient)?
            }
            None => (None, None),
        };
        let table_gradient = match (table_gradient, word_gradient) {
            (Some(head_gradient), Some(word_gradient)) => Some(head_gradient + word_gradient),
            (head_gradient, word_gradient) => head_gradient.or(word_gradient),
        };
        if let Some(table_gradient) = table_gradient {
            walk.add(decoder.embed_tokens.weight.id, flat(table_gradient));
        }
        walk.complete(Block::Words)?;
        if let (Some(tower), Some(vision), Some(seen), Some(merged_gradient)) =
            (&self.visual, &batch.vision, seen, merged_gradient)
        {
            let output_gradients = (merged_gradient, feature_gradients);
            tower.backward(&vision.inputs, seen.inputs, output_gradients, draws, walk)?;
        }
        Ok(loss)
    }

    /// The gradients of the word embeddings and of the tower's output, where needed. They do not
    /// depend on the embeddings, which may be stand-ins.
    fn backward_of_embeddings(
        &self,
        batch: &Batch,
        merged: Option<Tensor<2>>,
        gradient: Tensor<3>,
    ) -> Result<(Option<Tensor<2>>, Option<Tensor<2>>)> {
        let words = &self.language_model.embed_tokens.weight;
        let embeddings = self.embeddings(batch, merged.clone());
        let source = GradientSource::new(embeddings, gradient)?;
        if !source.is_tracked() {
            // Pictures are at tokens of other ranks.
            return Ok((None, None));
        }
        let mut gradients = backward_from([source]);
        let merged = merged.and_then(|merged| merged.grad_remove(&mut gradients));
        Ok((words.grad_remove(&mut gradients), merged))
    }

    /// Samples the logits of a few tokens of each sample.
    fn trace_logits(&self, hidden: &Tensor<3>, trace: &mut Trace) {
        if trace.is_sampling() {
            let head = self.head().inner();
            let logits = |few| logits_by_blocks(&few, head.clone());
            trace.record_few(|| "logits".into(), hidden, logits);
        }
    }
}

impl VisionTower {
    /// Computes the tower's output, and with `keeps` also the inputs of its blocks and of the
    /// merger.
    fn see(
        &self,
        inputs: &VisionInputs,
        draws: Option<&Draws>,
        keeps: bool,
        trace: &mut Trace,
        walk: &mut dyn Walk,
    ) -> Result<Seen> {
        let (mut kept, mut features) = (Vec::with_capacity(self.depth() + 1), Vec::new());
        let tower = self.at(Block::Tower, walk)?;
        let mut hidden = tower.first(inputs, trace)?;
        for index in 0..self.depth() {
            if keeps {
                kept.push(hidden.clone());
            }
            let block = tower.at(Block::TowerBlock(index), walk)?;
            hidden = block.block(index, hidden, inputs, draws)?;
            drop(block);
            trace.record(|| format!("vision.block.{index}.out"), &hidden);
            if let Some(which) = self.feature_of(index) {
                features.push(tower.feature(which, hidden.clone(), draws)?);
            }
        }
        if keeps {
            kept.push(hidden.clone());
        }
        let merged = tower.merged(hidden, inputs, draws)?;
        trace.record(|| "vision.merged".into(), &merged);
        Ok(Seen {
            inputs: kept,
            merged,
            features,
        })
    }

    /// The gradients of the tower's parameters, from its blocks' inputs and the gradients of its
    /// outputs.
    fn backward(
        &self,
        inputs: &VisionInputs,
        mut kept: Vec<Tensor<2>>,
        (merged_gradient, feature_gradients): (Tensor<2>, Vec<Option<Tensor<2>>>),
        draws: Option<&Draws>,
        walk: &mut dyn Walk,
    ) -> Result<()> {
        let wanted = self.wanted();
        let tower = self.at(Block::Tower, walk)?;
        let mut gradient = Some(merged_gradient);
        // Level `index` is the input of block `index`, or of the merger after the last block. The
        // feature of the previous block reads it too.
        for index in (0..=self.depth()).rev() {
            let Some(input) = kept.pop() else {
                break;
            };
            let input = leaf(input, wanted[index]);
            let which = index
                .checked_sub(1)
                .and_then(|block| self.feature_of(block));
            let feature_gradient =
                which.and_then(|which| Some((which, feature_gradients.get(which)?.clone()?)));
            let of_feature = match feature_gradient {
                Some((which, feature_gradient)) => {
                    let feature = tower.feature(which, input.clone(), draws)?;
                    Some(GradientSource::new(feature, feature_gradient)?)
                }
                None => None,
            };
            let read = match &of_feature {
                Some(_) => onward(input.clone()),
                None => input.clone(),
            };
            let mut module = Cow::Borrowed(&*tower);
            let of_output = match gradient.take() {
                Some(output_gradient) if index == self.depth() => {
                    let merged = tower.merged(read, inputs, draws)?;
                    Some(GradientSource::new(merged, output_gradient)?)
                }
                Some(output_gradient) => {
                    module = tower.at(Block::TowerBlock(index), walk)?;
                    Some(module.block_source(index, read, inputs, draws, output_gradient)?)
                }
                None => None,
            };
            let sources = of_feature.into_iter().chain(of_output);
            let tracked: Vec<_> = sources.filter(GradientSource::is_tracked).collect();
            if !tracked.is_empty() {
                let mut gradients = backward_from(tracked);
                collect(&*module, &mut gradients, walk);
                gradient = input.grad_remove(&mut gradients);
            }
            drop(module);
            if index < self.depth() {
                walk.complete(Block::TowerBlock(index))?;
            }
        }
        if let Some(output_gradient) = gradient {
            let output = tower.first(inputs, &mut Trace::off())?;
            let mut gradients = backward_from([GradientSource::new(output, output_gradient)?]);
            collect(&*tower, &mut gradients, walk);
        }
        walk.complete(Block::Tower)
    }
}

/// The tensors kept from a pass through the tower.
struct Seen {
    /// The inputs of the blocks and the output of the last; or empty.
    inputs: Vec<Tensor<2>>,
    merged: Tensor<2>,
    features: Vec<Tensor<2>>,
}

fn number(loss: Tensor<1>) -> Result<f64> {
    let loss = loss.try_into_scalar::<f32>();
    let loss = loss.map_err(|error| VlmError::TensorUnreadable {
        name: "loss".to_owned(),
        reason: error.to_string(),
    })?;
    Ok(f64::from(loss))
}

/// The losses of tokens, on the host.
pub(crate) fn numbers(losses: Tensor<1>) -> Result<Vec<f32>> {
    let losses = losses.try_into_data();
    let losses = losses.map_err(|error| VlmError::TensorUnreadable {
        name: "losses".to_owned(),
        reason: error.reason().to_owned(),
    })?;
    Ok(losses.iter::<f32>().collect())
}

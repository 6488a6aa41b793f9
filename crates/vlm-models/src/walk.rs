//! A pass through the blocks of a model: the order in which it needs their weights and completes
//! their gradients. With gradients and weights divided among devices, this order is that of their
//! collectives.

use std::borrow::Cow;
use std::collections::HashMap;

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Device, Gradients, Shape, Tensor};
use burn_attention::{flattened, reshaped};

use crate::decoder::Layer;
use crate::error::{Result, VlmError};
use crate::linear::prepare;
use crate::model::{TABLE, Vlm};
use crate::stages::Mixing;
use crate::tensors::{trains, wanted_inputs};
use crate::vision::VisionTower;

/// A part of a model whose weights a pass uses together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Block {
    /// The vision tower except its blocks, with the merger. A pass keeps it from the first block to
    /// the last.
    Tower,
    /// A block of the vision tower, by index.
    TowerBlock(usize),
    /// The word embeddings, which a tied output head shares.
    Words,
    /// A layer of the decoder, by index.
    Layer(usize),
    /// The norm after the last layer, and the output head.
    Head,
}

impl Block {
    /// The block of a parameter, by its name in the module.
    pub fn of(path: &str) -> Self {
        let index = |list: &str| {
            let (index, _) = path.strip_prefix(list)?.split_once('.')?;
            index.parse().ok()
        };
        if let Some(index) = index("visual.blocks.") {
            Self::TowerBlock(index)
        } else if let Some(index) = index("language_model.layers.") {
            Self::Layer(index)
        } else if path.starts_with("visual.") {
            Self::Tower
        } else if path == TABLE {
            Self::Words
        } else {
            Self::Head
        }
    }
}

/// An event of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visit {
    /// The pass needs the weights of a block.
    Enter(Block),
    /// The gradients of a block are complete.
    Complete(Block),
    /// The ranks that divide a layer's experts exchange the inputs and outputs of these.
    Experts(usize),
    /// The same ranks exchange the gradients of these outputs and inputs, of the last
    /// [`Experts`](Self::Experts) of the layer.
    ExpertGradients(usize),
    /// The ranks that divide the tokens exchange those of a layer.
    Exchange {
        /// The layer.
        layer: usize,
        /// True for numbers at least in f32, false for the model's type.
        is_wide: bool,
    },
}

/// Weights by parameter, flat and without autodiff.
pub type Weights = HashMap<ParamId, Tensor<1>>;

/// Receives the gradients of a pass, and may provide its weights.
pub trait Walk {
    /// Receives a gradient, flat.
    fn add(&mut self, id: ParamId, gradient: Tensor<1>);

    /// Called when the gradients of a block are complete: of this micro-batch, no more follow.
    ///
    /// # Errors
    /// [`VlmError::Walk`](crate::VlmError::Walk) to end the pass.
    fn complete(&mut self, _block: Block) -> Result<()> {
        Ok(())
    }

    /// True if the model holds stand-ins, and [`enter`](Self::enter) provides its weights. The pass
    /// then recomputes, whatever [`Backward::recompute`](crate::Backward::recompute) says.
    fn provides(&self) -> bool {
        false
    }

    /// Returns the weights of a block that the pass needs next, all of them.
    ///
    /// # Errors
    /// [`VlmError::Walk`](crate::VlmError::Walk) to end the pass.
    fn enter(&mut self, _block: Block) -> Result<Weights> {
        Ok(Weights::new())
    }

    /// Passes rows through the experts of a layer, which are divided among ranks, and returns their
    /// outputs.
    ///
    /// # Shapes
    /// rows and outputs: `[rows, hidden_size]`, without autodiff, sorted by expert; counts: the rows
    /// of each expert of all ranks
    ///
    /// # Errors
    /// [`VlmError::Walk`](crate::VlmError::Walk) to end the pass, as by default.
    fn pass_experts(
        &mut self,
        _layer: usize,
        _rows: Tensor<2>,
        _counts: &[usize],
    ) -> Result<Tensor<2>> {
        Err(no_ranks())
    }

    /// Returns the gradient of the rows last passed, which were of this layer, from that of their
    /// outputs, and receives those of the experts' parameters.
    ///
    /// # Errors
    /// Those of [`pass_experts`](Self::pass_experts).
    fn pass_expert_gradients(&mut self, _layer: usize, _gradient: Tensor<2>) -> Result<Tensor<2>> {
        Err(no_ranks())
    }

    /// Gives elements to the ranks that divide the tokens, as many as the first list says for each,
    /// and returns those that they give to this one, as many as the second list says.
    ///
    /// # Errors
    /// [`VlmError::Walk`](crate::VlmError::Walk) to end the pass, as by default.
    fn exchange(
        &mut self,
        _visit: Visit,
        _given: Tensor<1>,
        _counts: [&[usize]; 2],
    ) -> Result<Tensor<1>> {
        Err(no_ranks())
    }
}

fn no_ranks() -> VlmError {
    let reason = "ranks divide experts or tokens, and this pass reaches none of the others";
    VlmError::Walk(reason.to_owned())
}

impl<F: FnMut(ParamId, Tensor<1>)> Walk for F {
    fn add(&mut self, id: ParamId, gradient: Tensor<1>) {
        self(id, gradient);
    }
}

/// For each part of a model, true if a pass needs the gradient of its input.
pub(crate) struct Wanted {
    /// Of the tower's output.
    pub(crate) tower: bool,
    /// Of each layer's input, and of the head's.
    pub(crate) inputs: Vec<bool>,
}

impl Vlm {
    /// What a pass needs gradients of. `sees`: it has pictures.
    pub(crate) fn wanted(&self, sees: bool) -> Wanted {
        let decoder = &self.language_model;
        let tower = sees && trains(&self.visual);
        let words = trains(&decoder.embed_tokens);
        Wanted {
            tower,
            inputs: wanted_inputs(tower || words, decoder.layers.iter().map(trains)),
        }
    }

    /// The events of [`backward`](Self::backward) with recomputation, in order. `sees`: the batch
    /// has pictures or videos.
    pub fn visits(&self, sees: bool) -> Vec<Visit> {
        self.visits_of(sees, false)
    }

    /// As [`visits`](Self::visits), of ranks that divide the tokens.
    pub fn visits_of_parts(&self, sees: bool) -> Vec<Visit> {
        self.visits_of(sees, true)
    }

    fn visits_of(&self, sees: bool, in_parts: bool) -> Vec<Visit> {
        let mut visits = self.visits_of_loss(sees, in_parts);
        let wanted = self.wanted(sees);
        let depth = self.language_model.depth();
        visits.push(Visit::Complete(Block::Head));
        let visited = (0..depth).rev().filter(|index| wanted.inputs[index + 1]);
        for index in visited {
            visits.push(Visit::Enter(Block::Layer(index)));
            if in_parts {
                let exchanges = self.language_model.layers[index].exchanges(index);
                visits.extend(exchanges.concat());
            }
            if self.language_model.layers[index].is_divided() {
                visits.extend([Visit::Experts(index), Visit::ExpertGradients(index)]);
            }
            visits.push(Visit::Complete(Block::Layer(index)));
        }
        visits.push(Visit::Complete(Block::Words));
        if let Some(tower) = self.visual.as_ref().filter(|_| wanted.tower) {
            visits.push(Visit::Enter(Block::Tower));
            let inputs = tower.wanted();
            for (index, block) in (0..tower.depth()).map(|i| (i, Block::TowerBlock(i))).rev() {
                visits.extend(inputs[index + 1].then_some(Visit::Enter(block)));
                visits.push(Visit::Complete(block));
            }
            visits.push(Visit::Complete(Block::Tower));
        }
        visits
    }

    /// The events of the forward pass and the loss, in order.
    fn visits_of_loss(&self, sees: bool, in_parts: bool) -> Vec<Visit> {
        let tower = self.visual.as_ref().filter(|_| sees);
        let tower = tower.map(|tower| (0..tower.depth()).map(Block::TowerBlock));
        let tower = tower.map(|blocks| std::iter::once(Block::Tower).chain(blocks));
        let layers = self.language_model.layers.iter().enumerate();
        let layers = layers.flat_map(|(index, layer)| {
            let [exchanges, _] = layer.exchanges(index);
            let exchanges = exchanges.into_iter().filter(move |_| in_parts);
            let experts = layer.is_divided().then_some(Visit::Experts(index));
            let entered = std::iter::once(Visit::Enter(Block::Layer(index)));
            entered.chain(exchanges).chain(experts)
        });
        let first = tower.into_iter().flatten().chain([Block::Words]);
        let last = self.head_blocks().iter().copied();
        let first = first.map(Visit::Enter);
        first.chain(layers).chain(last.map(Visit::Enter)).collect()
    }

    /// The model with values in place of those of some parameters, which may be stand-ins.
    #[must_use]
    pub fn with_values(self, values: Weights) -> Self {
        filled(self, values)
    }

    /// The model with stand-ins of one element for some parameters: they keep shape, type and
    /// device, and what is computed from them is not a number.
    #[must_use]
    pub fn with_stand_ins(self, of: impl Fn(ParamId) -> bool) -> Self {
        self.map(&mut Empty { of })
    }

    /// The model with the weights of some blocks from a walk, if it provides them.
    pub(crate) fn at(&self, blocks: &[Block], walk: &mut dyn Walk) -> Result<Cow<'_, Self>> {
        if !walk.provides() {
            return Ok(Cow::Borrowed(self));
        }
        let mut values = Weights::new();
        for block in blocks {
            values.extend(walk.enter(*block)?);
        }
        Ok(Cow::Owned(self.clone().with_values(values)))
    }

    /// The blocks of the norm after the last layer and of the output head.
    pub(crate) fn head_blocks(&self) -> &'static [Block] {
        match &self.lm_head {
            Some(_) => &[Block::Head],
            None => &[Block::Head, Block::Words],
        }
    }
}

impl Layer {
    /// The exchanges of ranks that divide the tokens: in a forward pass, and those of gradients.
    fn exchanges(&self, layer: usize) -> [Vec<Visit>; 2] {
        let stages = self.mixing().map_or(&[][..], Mixing::exchanges);
        let are_wide = stages.iter().copied().flatten().copied();
        let visit = |is_wide| Visit::Exchange { layer, is_wide };
        let there: Vec<Visit> = are_wide.map(visit).collect();
        let back = there.iter().rev().copied().collect();
        [there, back]
    }

    /// The layer with its weights from a walk, if it provides them.
    pub(crate) fn at(&self, index: usize, walk: &mut dyn Walk) -> Result<Cow<'_, Self>> {
        if !walk.provides() {
            return Ok(Cow::Borrowed(self));
        }
        let values = walk.enter(Block::Layer(index))?;
        let mut layer = filled(self.clone(), values);
        prepare(layer.linears().collect(), true);
        Ok(Cow::Owned(layer))
    }
}

impl VisionTower {
    /// The tower with the weights of a block from a walk, if it provides them.
    pub(crate) fn at(&self, block: Block, walk: &mut dyn Walk) -> Result<Cow<'_, Self>> {
        if !walk.provides() {
            return Ok(Cow::Borrowed(self));
        }
        let values = walk.enter(block)?;
        let mut tower = filled(self.clone(), values);
        let linears = tower.linears();
        let of_block = linears.filter(|(name, _)| Block::of(&format!("visual.{name}")) == block);
        prepare(of_block.map(|(_, linear)| linear).collect(), true);
        Ok(Cow::Owned(tower))
    }
}

/// The module with values in place of those of some parameters.
fn filled<M: Module>(module: M, values: Weights) -> M {
    let mut shapes = Shapes {
        values,
        found: Vec::new(),
    };
    module.visit(&mut shapes);
    let mut ids = Vec::new();
    let (mut values, mut shapes_of) = (Vec::new(), Vec::new());
    for (id, value, shape) in shapes.found {
        ids.push(id);
        values.push(value);
        shapes_of.push(shape);
    }
    let values = reshaped(values, shapes_of).expect("values of these parameters");
    let values = ids.into_iter().zip(values).collect();
    module.map(&mut Fill { values })
}

/// Finds the parameters that have values, and their shapes.
struct Shapes {
    values: Weights,
    found: Vec<(ParamId, Tensor<1>, Shape)>,
}

impl ModuleVisitor for Shapes {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(value) = self.values.remove(&param.id) {
            self.found.push((param.id, value, param.lazy_shape()));
        }
    }
}

/// Replaces parameters by values in their shapes.
struct Fill {
    values: HashMap<ParamId, DispatchTensor>,
}

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.values.remove(&param.id) {
            Some(value) => param.map(|tensor| {
                let filled = Tensor::from_inner(Tensor::<D>::from_dispatch(value));
                filled.set_require_grad(tensor.is_require_grad())
            }),
            None => param,
        }
    }
}

/// Replaces parameters by stand-ins.
struct Empty<F> {
    of: F,
}

impl<F: Fn(ParamId) -> bool> ModuleMapper for Empty<F> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !(self.of)(param.id) {
            return param;
        }
        param.map(|tensor| {
            let like = (&tensor.device().inner(), tensor.dtype());
            let stand_in = Tensor::from_inner(stand_in(tensor.dims(), like));
            stand_in.set_require_grad(tensor.is_require_grad())
        })
    }
}

/// A tensor of one element, which is not a number, in a shape.
pub(crate) fn stand_in<const D: usize>(dims: [usize; D], like: (&Device, DType)) -> Tensor<D> {
    Tensor::<D>::full([1; D], f32::NAN, like).expand(dims)
}

/// Passes the gradients of a module's parameters to a walk.
pub(crate) fn collect(module: &impl Module, gradients: &mut Gradients, walk: &mut dyn Walk) {
    let mut found = Collect {
        gradients,
        found: Vec::new(),
    };
    module.visit(&mut found);
    let (ids, found): (Vec<ParamId>, Vec<DispatchTensor>) = found.found.into_iter().unzip();
    for (id, gradient) in ids.into_iter().zip(flattened(found)) {
        walk.add(id, gradient);
    }
}

struct Collect<'a> {
    gradients: &'a mut Gradients,
    found: Vec<(ParamId, DispatchTensor)>,
}

impl ModuleVisitor for Collect<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = param.val().grad_remove(self.gradients) {
            self.found.push((param.id, gradient.into_dispatch()));
        }
    }
}

/// The elements of a tensor.
pub(crate) fn flat<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    let elements: usize = x.dims().iter().product();
    x.reshape([elements])
}

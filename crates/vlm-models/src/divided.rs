//! Experts divided among ranks: each has a share of those of every layer.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::Tensor;
use burn_attention::{GradientSource, backward_from};

use crate::batch::Batch;
use crate::decoder::Layer;
use crate::error::{Result, VlmError};
use crate::experts::{ExpertNetwork, Experts};
use crate::linear::ExpertAxis;
use crate::model::Vlm;
use crate::step::Common;
use crate::tensors::leaf;
use crate::trace::Trace;
use crate::walk::{Walk, collect, flat, stand_in};

/// The experts of a rank: part `index` of `count` equal parts of those of each layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShare {
    /// The part, from 0.
    pub index: usize,
    /// The number of parts.
    pub count: usize,
}

impl ExpertAxis {
    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.outer * self.experts * self.inner
    }

    /// The same parameter of `experts` experts.
    #[must_use]
    pub fn of(self, experts: usize) -> Self {
        Self { experts, ..self }
    }

    /// Cuts the elements of a share out of those of all experts, flat.
    ///
    /// # Errors
    /// [`VlmError::Unsupported`] if these are not the elements, or the shares do not divide the
    /// experts.
    pub fn cut(&self, all: Tensor<1>, share: ExpertShare) -> Result<Tensor<1>> {
        self.expect(all.dims()[0], self.elements())?;
        self.expect_shares(share)?;
        Ok(self.cut_fitting(all, share))
    }

    fn cut_fitting(&self, all: Tensor<1>, share: ExpertShare) -> Tensor<1> {
        let own = self.of(self.experts / share.count);
        let shaped = all.reshape([self.outer, self.experts, self.inner]);
        let cut = shaped.narrow(1, share.index * own.experts, own.experts);
        let elements = own.elements();
        // A view would keep the whole.
        let cut = cut.reshape([elements]);
        cut.zeros_like().slice_assign(0..elements, cut)
    }

    /// Joins the elements of all shares, in order and flat.
    ///
    /// # Errors
    /// As [`cut`](Self::cut).
    pub fn join(&self, shares: Vec<Tensor<1>>) -> Result<Tensor<1>> {
        let count = shares.len();
        self.expect_shares(ExpertShare { index: 0, count })?;
        let own = self.of(self.experts / count);
        for share in &shares {
            self.expect(share.dims()[0], own.elements())?;
            let (found, expected) = (share.dtype(), shares[0].dtype());
            if found != expected {
                return Err(VlmError::Unsupported {
                    key: "the types of shares",
                    found: format!("{found:?} and {expected:?}"),
                    expected: "one type",
                });
            }
        }
        let shaped = |share: Tensor<1>| share.reshape([own.outer, own.experts, own.inner]);
        let all = Tensor::cat(shares.into_iter().map(shaped).collect(), 1);
        Ok(all.reshape([self.elements()]))
    }

    fn expect(&self, found: usize, elements: usize) -> Result<()> {
        if found == elements && elements > 0 {
            return Ok(());
        }
        Err(VlmError::Unsupported {
            key: "the elements of a parameter of experts",
            found: format!("{found}, of {self:?}"),
            expected: "those of its experts, at least one",
        })
    }

    fn expect_shares(&self, share: ExpertShare) -> Result<()> {
        if share.index < share.count && self.experts.is_multiple_of(share.count) {
            return Ok(());
        }
        Err(VlmError::Unsupported {
            key: "the number of experts",
            found: self.experts.to_string(),
            expected: "a multiple of the ranks that divide them",
        })
    }
}

impl Vlm {
    /// The number of experts of each layer that has some, on all ranks, and of the channels of their
    /// inputs.
    pub fn expert_sizes(&self) -> Option<[usize; 2]> {
        let mut networks = self.language_model.layers.iter().filter_map(Layer::experts);
        networks.next().map(ExpertNetwork::sizes)
    }

    /// The parameters of experts, among them adapters, with the experts that this rank has.
    pub fn expert_axes(&self) -> HashMap<ParamId, ExpertAxis> {
        let networks = self.language_model.layers.iter().filter_map(Layer::experts);
        let matrices = networks.flat_map(|network| network.experts().matrices());
        matrices.flat_map(|matrices| matrices.axes()).collect()
    }

    /// True if other ranks have some of the experts.
    pub fn has_divided_experts(&self) -> bool {
        self.language_model.layers.iter().any(Layer::is_divided)
    }

    /// The model with a share of the experts of each layer. The share's passes go through a
    /// [`Walk`], which exchanges tokens with the ranks of the other shares.
    ///
    /// # Errors
    /// [`VlmError::Unsupported`] if the model has no experts, or the shares do not divide them.
    pub fn with_expert_share(self, share: ExpertShare) -> Result<Self> {
        let experts = self.expert_sizes().map_or(0, |[experts, _]| experts);
        if share.index >= share.count || experts == 0 || !experts.is_multiple_of(share.count) {
            return Err(VlmError::Unsupported {
                key: "the number of experts",
                found: experts.to_string(),
                expected: "a multiple of the ranks that divide them",
            });
        }
        let axes = self.expert_axes();
        Ok(self.map(&mut Cut { axes, share }))
    }

    /// The model with stand-ins of all experts for the parameters of those that this rank has.
    #[must_use]
    pub fn with_whole_experts(self) -> Self {
        let axes = self.expert_axes();
        let experts = self.expert_sizes().map_or(0, |[experts, _]| experts);
        self.map(&mut Whole { axes, experts })
    }

    /// Passes hidden states through the experts of a layer alone, without the norm before them: for
    /// measurements.
    ///
    /// # Shapes
    /// x and the output: `[batch, seq, hidden_size]`, of the tokens of the batch
    ///
    /// # Errors
    /// [`VlmError::Walk`] if the layer has no experts, or other ranks have some; those of the
    /// device.
    #[doc(hidden)]
    pub fn through_experts(&self, layer: usize, x: Tensor<3>, batch: &Batch) -> Result<Tensor<3>> {
        let layer = self.language_model.layers.get(layer);
        let network = layer.and_then(Layer::experts);
        let network = network.ok_or_else(|| VlmError::Walk("no layer with experts".to_owned()))?;
        network.forward(x, batch.common(None))
    }

    /// Passes rows through the experts of a layer that this rank has. With gradients, the result
    /// keeps what [`ExpertPass::backward`] needs.
    ///
    /// # Shapes
    /// rows: `[rows, hidden_size]`, without autodiff, sorted by expert; counts: the rows of each
    /// expert of this rank
    ///
    /// # Errors
    /// [`VlmError::Walk`] if the layer has no experts, or other shapes; those of the device.
    pub fn pass_experts(
        &self,
        layer: usize,
        rows: Tensor<2>,
        counts: &[usize],
        with_gradients: bool,
    ) -> Result<ExpertPass> {
        let network = self.language_model.layers.get(layer);
        let network = network.and_then(Layer::experts).ok_or_else(|| {
            VlmError::Walk(format!("layer {layer} has no experts to pass rows through"))
        })?;
        let ([_, channels], own) = (network.sizes(), network.experts().count());
        let sum = counts
            .iter()
            .try_fold(0_usize, |sum, count| sum.checked_add(*count));
        if counts.len() != own || Some(rows.dims()[0]) != sum || rows.dims()[1] != channels {
            return Err(VlmError::Walk(format!(
                "{own} experts pass rows of {channels} channels, as many as {counts:?} add up to; \
                 found {:?}",
                rows.dims()
            )));
        }
        let experts = match with_gradients {
            true => network.experts().clone(),
            false => network.experts().clone().no_grad(),
        };
        let mut pass = ExpertPass {
            experts,
            rows: Tensor::from_inner(rows),
            outputs: None,
        };
        if with_gradients {
            pass.rows = pass.rows.require_grad();
        }
        // Nothing is computed from no rows.
        if pass.rows.dims()[0] > 0 {
            pass.outputs = Some(pass.experts.pass(pass.rows.clone(), counts)?);
        }
        Ok(pass)
    }
}

impl Layer {
    /// As [`forward`](Self::forward), of a layer whose experts are divided: `walk` passes the rows
    /// of all of them.
    pub(crate) fn forward_divided(
        &self,
        hidden: Tensor<3>,
        common: Common,
        index: usize,
        trace: &mut Trace,
        walk: &mut dyn Walk,
    ) -> Result<Tensor<3>> {
        let (hidden, normalised) = self.summed(hidden, common, None, index, trace)?;
        trace.record(|| format!("norm.{index}.mlp"), &normalised);
        let network = self.divided()?;
        let routed = network.route(normalised.clone(), common)?;
        let rows = routed.rows(normalised.clone())?.inner();
        let outputs = walk.pass_experts(index, rows, &routed.counts)?;
        let outputs = Tensor::from_inner(outputs);
        let changed = network.combine(normalised, outputs, routed, common)?;
        Ok(hidden + self.changed(changed)?)
    }

    /// The gradient of the input of a layer whose experts are divided, from that of the output.
    /// `walk` receives the gradients of the parameters.
    ///
    /// What ranks do together is outside of the graph, which is cut there: the gradient of the
    /// experts' outputs goes through `walk` and comes back as that of their inputs.
    pub(crate) fn backward_divided(
        &self,
        input: Tensor<3>,
        common: Common,
        index: usize,
        gradient: Tensor<3>,
        walk: &mut dyn Walk,
    ) -> Result<Option<Tensor<3>>> {
        let network = self.divided()?;
        let (hidden, normalised) =
            self.summed(input.clone(), common, None, index, &mut Trace::off())?;
        let x = leaf(normalised.clone(), true);
        let routed = network.route(x.clone(), common)?;
        let rows = routed.rows(x.clone())?;
        let outputs = walk.pass_experts(index, rows.clone().inner(), &routed.counts)?;
        let outputs = Tensor::from_inner(outputs).require_grad();
        let changed = network.combine(x.clone(), outputs.clone(), routed, common)?;
        let mut source = GradientSource::new(self.changed(changed)?, gradient.clone())?;
        if let Some(balance) = common.balance {
            source = balance.join(source)?;
        }
        let mut gradients = backward_from([source]);
        collect(self, &mut gradients, walk);
        let of_outputs = outputs.grad_remove(&mut gradients);
        let of_outputs = of_outputs.unwrap_or_else(|| outputs.inner().zeros_like());
        let of_rows = walk.pass_expert_gradients(index, of_outputs)?;
        let of_router = x.grad_remove(&mut gradients);
        let mut gradients = backward_from([GradientSource::new(rows, of_rows)?]);
        let parts = [of_router, x.grad_remove(&mut gradients)];
        let of_x = parts.into_iter().flatten().reduce(|a, b| a + b);
        let of_x = of_x.unwrap_or_else(|| normalised.clone().inner().zeros_like());
        let source = GradientSource::new(normalised, of_x)?.with(hidden, gradient)?;
        if !source.is_tracked() {
            return Ok(None);
        }
        let mut gradients = backward_from([source]);
        collect(self, &mut gradients, walk);
        Ok(input.grad_remove(&mut gradients))
    }

    fn divided(&self) -> Result<&ExpertNetwork> {
        let reason = || VlmError::Walk("a layer without experts divides none".to_owned());
        self.experts().ok_or_else(reason)
    }
}

/// A pass of rows through some of a layer's experts.
#[derive(Debug)]
pub struct ExpertPass {
    experts: Experts,
    rows: Tensor<2>,
    /// `None` without rows.
    outputs: Option<Tensor<2>>,
}

impl ExpertPass {
    /// The outputs for the rows, `[rows, hidden_size]`, without autodiff.
    pub fn outputs(&self) -> Tensor<2> {
        let outputs = self.outputs.as_ref().unwrap_or(&self.rows);
        outputs.clone().inner()
    }

    /// Computes the gradient of the rows from that of the outputs, both without autodiff. `walk`
    /// receives the gradients of the experts' parameters, none without rows.
    ///
    /// # Errors
    /// [`VlmError::Walk`] without gradients; if the gradient is not one of the outputs.
    pub fn backward(self, gradient: Tensor<2>, walk: &mut dyn Walk) -> Result<Tensor<2>> {
        let Some(outputs) = self.outputs else {
            if gradient.dims() != self.rows.dims() {
                let found = gradient.dims();
                let reason = format!("no rows have outputs with a gradient of {found:?}");
                return Err(VlmError::Walk(reason));
            }
            return Ok(gradient);
        };
        let source = GradientSource::new(outputs, gradient)?;
        if !source.is_tracked() {
            return Err(VlmError::Walk("the pass keeps no gradients".to_owned()));
        }
        let mut gradients = backward_from([source]);
        collect(&self.experts, &mut gradients, walk);
        let of_rows = self.rows.grad_remove(&mut gradients);
        of_rows.ok_or_else(|| VlmError::Walk("the rows of experts have no gradient".to_owned()))
    }
}

/// Replaces the parameters of all experts by those of a share.
struct Cut {
    axes: HashMap<ParamId, ExpertAxis>,
    share: ExpertShare,
}

impl ModuleMapper for Cut {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(axis) = self.axes.get(&param.id) else {
            return param;
        };
        param.map(|tensor| {
            let mut dims = tensor.dims();
            dims[0] /= self.share.count;
            let cut = axis.cut_fitting(flat(tensor.clone().inner()), self.share);
            let cut = Tensor::from_inner(cut.reshape(dims));
            cut.set_require_grad(tensor.is_require_grad())
        })
    }
}

/// Replaces the parameters of some experts by stand-ins of all.
struct Whole {
    axes: HashMap<ParamId, ExpertAxis>,
    experts: usize,
}

impl ModuleMapper for Whole {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(axis) = self.axes.get(&param.id) else {
            return param;
        };
        param.map(|tensor| {
            let mut dims = tensor.dims();
            dims[0] = dims[0] / axis.experts * self.experts;
            let like = (&tensor.device().inner(), tensor.dtype());
            let whole = Tensor::from_inner(stand_in(dims, like));
            whole.set_require_grad(tensor.is_require_grad())
        })
    }
}

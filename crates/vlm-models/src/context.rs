//! Passes of ranks that divide the tokens of a batch: each has a part of every row. For attention,
//! it gets all tokens of some heads; for layers with a state, the state after the tokens before.
//!
//! # Source
//! Jacobs et al. 2023, DeepSpeed Ulysses, <https://arxiv.org/abs/2309.14509>

use burn::tensor::{Gradients, Tensor};
use burn_attention::{GradientSource, backward_from};

use crate::decoder::Layer;
use crate::error::{Result, VlmError};
use crate::shares::TokenPart;
use crate::stages::{Mixing, Stage};
use crate::step::Common;
use crate::tensors::leaf;
use crate::trace::Trace;
use crate::walk::{Visit, Walk, collect};

/// A layer of a rank in a pass.
struct Pass<'a> {
    mixing: &'a dyn Mixing,
    common: Common<'a>,
    part: &'a TokenPart,
    layer: usize,
}

impl Pass<'_> {
    /// The number of stages, but for the last.
    fn exchanged(&self) -> usize {
        self.mixing.exchanges().len()
    }

    fn run(&self, stage: usize, from: Stage, trace: &mut Trace) -> Result<Stage> {
        let at = (self.layer, trace);
        self.mixing.run(stage, from, self.common, self.part, at)
    }

    /// Exchange `at` after a stage, or the way back of its gradients.
    fn exchange(
        &self,
        (stage, at): (usize, usize),
        flat: Tensor<1>,
        is_back: bool,
        walk: &mut dyn Walk,
    ) -> Result<Tensor<1>> {
        let (own, ranks) = (self.part.share.index, self.part.share.count);
        let elements = |from, to| self.mixing.elements(stage, self.part, [from, to])[at];
        let given: Vec<usize> = (0..ranks).map(|rank| elements(own, rank)).collect();
        let received: Vec<usize> = (0..ranks).map(|rank| elements(rank, own)).collect();
        let counts = match is_back {
            true => [&received[..], &given],
            false => [&given[..], &received],
        };
        let visit = Visit::Exchange {
            layer: self.layer,
            is_wide: self.mixing.exchanges()[stage][at],
        };
        walk.exchange(visit, flat, counts)
    }
}

/// What several outputs have of a backward.
#[derive(Default)]
struct Sources(Option<GradientSource>);

impl Sources {
    fn add<const D: usize>(&mut self, output: Tensor<D>, gradient: Tensor<D>) -> Result<()> {
        self.0 = Some(match self.0.take() {
            Some(sources) => sources.with(output, gradient)?,
            None => GradientSource::new(output, gradient)?,
        });
        Ok(())
    }

    /// The gradients, of which `walk` receives those of a layer; `None` if nothing needs one.
    fn backward(self, layer: &Layer, walk: &mut dyn Walk) -> Option<Gradients> {
        let tracked = self.0.filter(GradientSource::is_tracked)?;
        let mut gradients = backward_from([tracked]);
        collect(layer, &mut gradients, walk);
        Some(gradients)
    }
}

impl Layer {
    fn in_parts<'a>(
        &'a self,
        common: Common<'a>,
        part: &'a TokenPart,
        layer: usize,
    ) -> Result<Pass<'a>> {
        let reason = || VlmError::Walk("a layer that mixes no tokens exchanges none".to_owned());
        Ok(Pass {
            mixing: self.mixing().ok_or_else(reason)?,
            common,
            part,
            layer,
        })
    }

    /// As [`forward`](Self::forward), of a part of the tokens: `walk` exchanges them.
    pub(crate) fn forward_part(
        &self,
        hidden: Tensor<3>,
        common: Common,
        part: &TokenPart,
        index: usize,
        (trace, walk): (&mut Trace, &mut dyn Walk),
    ) -> Result<Tensor<3>> {
        let pass = self.in_parts(common, part, index)?;
        let mut stage = Stage::of(vec![self.input(hidden.clone(), index, trace)?]);
        for number in 0..pass.exchanged() {
            stage = pass.run(number, stage, trace)?;
            for (at, flat) in stage.flats.iter_mut().enumerate() {
                let received = pass.exchange((number, at), flat.clone().inner(), false, walk)?;
                *flat = Tensor::from_inner(received);
            }
        }
        let mixed = pass.run(pass.exchanged(), stage, trace)?.output()?;
        self.after_mixing(hidden, mixed, common, index, trace)
    }

    /// The gradient of the input of a part of the tokens, from that of the output. `walk` exchanges
    /// them, and receives the gradients of the parameters.
    ///
    /// What ranks do together is outside of the graph, which is cut there, also at what stays on a
    /// rank meanwhile.
    pub(crate) fn backward_part(
        &self,
        input: Tensor<3>,
        common: Common,
        part: &TokenPart,
        index: usize,
        (gradient, walk): (Tensor<3>, &mut dyn Walk),
    ) -> Result<Option<Tensor<3>>> {
        let pass = self.in_parts(common, part, index)?;
        let trace = &mut Trace::off();
        let mut stage = Stage::of(vec![self.input(input.clone(), index, trace)?]);
        // The end of each stage, and the beginning of the next.
        let mut cuts = Vec::with_capacity(pass.exchanged());
        for number in 0..pass.exchanged() {
            let end = pass.run(number, stage, trace)?;
            let kept = end.kept.iter().map(|x| leaf(x.clone(), x.is_tracked()));
            let mut next = Stage::of(kept.collect());
            for (at, flat) in end.flats.iter().enumerate() {
                let received = pass.exchange((number, at), flat.clone().inner(), false, walk)?;
                next.flats.push(Tensor::from_inner(received).require_grad());
            }
            stage = next.clone();
            cuts.push((end, next));
        }
        let mixed = pass.run(pass.exchanged(), stage, trace)?.output()?;
        let hidden = leaf(input.clone(), input.is_require_grad());
        let source = self.source_after(hidden.clone(), mixed, common, gradient)?;
        let source = match common.balance {
            Some(balance) => balance.join(source)?,
            None => source,
        };
        let mut gradients = Sources(Some(source)).backward(self, walk);
        let of_hidden = gradients.as_mut().and_then(|all| hidden.grad_remove(all));

        for (number, (end, next)) in cuts.into_iter().enumerate().rev() {
            let mut sources = Sources::default();
            let flats = end.flats.into_iter().zip(next.flats).enumerate();
            for (at, (given, received)) in flats.rev() {
                let found = gradients.as_mut().and_then(|all| received.grad_remove(all));
                let found = found.unwrap_or_else(|| received.inner().zeros_like());
                let returned = pass.exchange((number, at), found, true, walk)?;
                sources.add(given, returned)?;
            }
            for (kept, ahead) in end.kept.into_iter().zip(next.kept) {
                let found = gradients.as_mut().and_then(|all| ahead.grad_remove(all));
                if let Some(found) = found {
                    sources.add(kept, found)?;
                }
            }
            gradients = sources.backward(self, walk);
        }
        let of_mixing = gradients.and_then(|mut all| input.grad_remove(&mut all));
        Ok(match (of_hidden, of_mixing) {
            (Some(of_hidden), Some(of_mixing)) => Some(of_hidden + of_mixing),
            (of_hidden, of_mixing) => of_hidden.or(of_mixing),
        })
    }
}

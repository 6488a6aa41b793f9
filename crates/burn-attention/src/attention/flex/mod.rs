//! Flex, burn's CPU backend: kernels on the tensors' storage, on all threads of rayon's pool.

mod kernel;
pub(crate) mod matrix;
pub(crate) mod number;

use burn::backend::flex::{Flex, FlexTensor};
use burn::backend::{Element, tensor::FloatTensor};
use burn::tensor::Shape;
use burn_fused::{for_dtype, zeros};

use crate::attention::blocks;
use crate::attention::op::{AttentionGradients, AttentionOp, AttentionOps, Bias, Kept, Sizes};
use kernel::{Backward, BiasView, Gradients, HeadsView, Problem};
use number::{Number, Real};

impl AttentionOps for Flex {
    fn attention_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        bias: Bias<Self>,
        op: AttentionOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        if op.blocks.is_some() {
            return blocks::forward::<Self>(q, k, v, bias.into_option(), &op);
        }
        for_dtype!(q.dtype(), E => forward::<E>(q, k, v, bias, &op))
    }

    fn attention_backward(
        kept: Kept<Self>,
        gradient: FloatTensor<Self>,
        bias_wanted: bool,
        op: AttentionOp,
    ) -> AttentionGradients<Self> {
        if op.blocks.is_some() {
            return blocks::backward::<Self>(kept, gradient, bias_wanted, &op);
        }
        for_dtype!(gradient.dtype(), E => backward::<E>(kept, gradient, bias_wanted, &op))
    }
}

/// q, k, v and the bias with channels and strides that the kernels can follow.
struct Operands {
    q: FlexTensor,
    k: FlexTensor,
    v: FlexTensor,
    bias: Option<FlexTensor>,
}

impl Operands {
    fn new(q: FlexTensor, k: FlexTensor, v: FlexTensor, bias: Bias<Flex>) -> Self {
        Self {
            q: readable(q),
            k: readable(k),
            v: readable(v),
            bias: bias.into_option().map(readable),
        }
    }

    fn problem<'a, E: Number>(&'a self, op: &'a AttentionOp) -> Problem<'a, E> {
        Problem {
            sizes: Sizes::of(&self.q, &self.k, &self.v),
            mask: &op.mask,
            scale: E::Wide::of(op.scale),
            q: heads(&self.q),
            k: heads(&self.k),
            v: heads(&self.v),
            bias: self.bias.as_ref().map(|bias| BiasView {
                data: &bias.storage::<E::Wide>()[bias.layout().start_offset()..],
                strides: broadcast(bias, &strides(bias)),
            }),
        }
    }
}

/// The tensor itself if its strides are not negative and its last one is 1, else a copy.
fn readable(x: FlexTensor) -> FlexTensor {
    let strides = x.layout().strides();
    if strides.last() == Some(&1) && strides.iter().all(|stride| *stride >= 0) {
        x
    } else {
        x.to_contiguous()
    }
}

fn strides(x: &FlexTensor) -> [usize; 4] {
    std::array::from_fn(|dim| x.layout().strides()[dim].unsigned_abs())
}

/// Strides of 0 along dimensions of size 1, which are shared.
fn broadcast(x: &FlexTensor, strides: &[usize; 4]) -> [usize; 4] {
    let shape = x.layout().shape();
    std::array::from_fn(|dim| if shape[dim] == 1 { 0 } else { strides[dim] })
}

fn heads<E: Element + bytemuck::Pod>(x: &FlexTensor) -> HeadsView<'_, E> {
    let [batch, heads, tokens, _] = strides(x);
    HeadsView {
        data: &x.storage::<E>()[x.layout().start_offset()..],
        strides: [batch, heads, tokens],
        channels: x.layout().shape()[3],
    }
}

fn forward<E: Number>(
    q: FlexTensor,
    k: FlexTensor,
    v: FlexTensor,
    bias: Bias<Flex>,
    op: &AttentionOp,
) -> (FlexTensor, FlexTensor) {
    let operands = Operands::new(q, k, v, bias);
    let problem = operands.problem::<E>(op);
    let Sizes {
        batch,
        heads,
        queries,
        value_dim,
        ..
    } = problem.sizes;
    // In memory, tokens come before heads: what follows joins the heads of a token.
    let mut out = zeros(Shape::new([batch, queries, heads, value_dim]), E::dtype());
    let mut softmax = zeros(Shape::new([batch, queries, heads, 2]), E::Wide::dtype());
    problem.forward(out.storage_mut::<E>(), softmax.storage_mut::<E::Wide>());
    (out.transpose(1, 2), softmax.transpose(1, 2))
}

fn backward<E: Number>(
    kept: Kept<Flex>,
    gradient: FlexTensor,
    bias_wanted: bool,
    op: &AttentionOp,
) -> (FlexTensor, FlexTensor, FlexTensor, Option<FlexTensor>) {
    let operands = Operands::new(kept.q, kept.k, kept.v, kept.bias);
    let problem = operands.problem::<E>(op);
    let (gradient, out) = (readable(gradient), readable(kept.out));
    let softmax = readable(kept.softmax);
    let like = |x: &FlexTensor| zeros(x.layout().shape().clone(), x.dtype());
    let (mut dq, mut dk) = (like(&operands.q), like(&operands.k));
    let mut dv = like(&operands.v);
    let mut dbias = operands.bias.as_ref().filter(|_| bias_wanted).map(like);
    Backward::new(problem, &heads(&out), heads(&gradient), &heads(&softmax)).run(Gradients {
        dq: dq.storage_mut::<E>(),
        dk: dk.storage_mut::<E>(),
        dv: dv.storage_mut::<E>(),
        dbias: dbias.as_mut().map(|dbias| {
            let strides = broadcast(dbias, &strides(dbias));
            (dbias.storage_mut::<E::Wide>(), strides)
        }),
    });
    (dq, dk, dv, dbias)
}

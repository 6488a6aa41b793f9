//! The backward, for autodiff over any backend: the node keeps weight, a and b, which others hold
//! too, and x if a gradient needs it.

use burn::backend::AutodiffBackend;
use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::tensor::FloatTensor;
use burn_fused::{Gradients, node, parts};

use super::op::LinearOps;
use crate::gradients::any_number;

/// The tensors of the node: x where a gradient is computed from it, and weight, a, b.
type Kept<B> = (Option<FloatTensor<B>>, [FloatTensor<B>; 3]);

fn gradients<B: LinearOps>(
    (x, [weight, a, b]): Kept<B>,
    gradient: FloatTensor<B>,
    [wants_x, wants_weight, wants_bias, wants_a, wants_b]: [bool; 5],
) -> Gradients<B, 5> {
    let dx = wants_x.then(|| B::linear_x_gradient(gradient.clone(), weight, a.clone(), b.clone()));
    let dbias = wants_bias.then(|| B::linear_bias_backward(gradient.clone()));
    let Some(x) = x else {
        return [dx, None, dbias, None, None];
    };
    let dweight = wants_weight.then(|| B::linear_weight_backward(x.clone(), gradient.clone()));
    let adapter = (wants_a || wants_b).then(|| B::linear_adapter_gradients(x, a, b, gradient));
    let (da, db) = adapter.unzip();
    [dx, dweight, dbias, da, db]
}

impl<B: LinearOps, C: CheckpointStrategy> LinearOps for Autodiff<B, C> {
    fn linear_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let keeps_x = [&weight, &a, &b].iter().any(|tensor| tensor.is_tracked());
        let ([x, weight, bias, a, b], nodes) = parts([x, weight, bias, a, b]);
        let kept = (keeps_x.then(|| x.clone()), [weight, a, b]);
        node::<B, C, _, 5>(
            nodes,
            kept,
            |(_, [weight, a, b])| B::linear_forward(x, weight, bias, a, b),
            gradients::<B>,
        )
    }

    fn linear_source(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let keeps_x = [&weight, &a, &b].iter().any(|tensor| tensor.is_tracked());
        let ([x, weight, _, a, b], nodes) = parts([x, weight, bias, a, b]);
        let number = any_number::<B>(&x);
        let kept = (keeps_x.then_some(x), [weight, a, b]);
        node::<B, C, _, 5>(
            nodes,
            (kept, Self::inner(gradient)),
            |_| number,
            |(kept, gradient), _, wanted| gradients::<B>(kept, gradient, wanted),
        )
    }

    fn linear_x_gradient(
        gradient: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let [gradient, weight, a, b] = [gradient, weight, a, b].map(Self::inner);
        Self::from_inner(B::linear_x_gradient(gradient, weight, a, b))
    }

    fn linear_adapter_gradients(
        x: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [x, a, b, gradient] = [x, a, b, gradient].map(Self::inner);
        let (da, db) = B::linear_adapter_gradients(x, a, b, gradient);
        (Self::from_inner(da), Self::from_inner(db))
    }
}

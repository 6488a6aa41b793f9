//! The backward, for autodiff over any backend: the node keeps x, the weight, a, b, its factor and
//! h in the type of x.

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::tensor::FloatTensor;
use burn::backend::{AutodiffBackend, TensorMetadata};
use burn_fused::primitive::cast;
use burn_fused::{Gradients, node, parts, sibling_node};

use super::composed;
use super::op::AdapterOps;
use crate::attention::Bias;
use crate::gradients::any_number;

/// x, weight, a, b's factor and h.
type Kept<B> = [FloatTensor<B>; 5];

/// The gradient of x, or its sum with an earlier one.
fn x_gradient<B: AdapterOps>(
    weight: FloatTensor<B>,
    gradient: FloatTensor<B>,
    earlier: Option<FloatTensor<B>>,
) -> FloatTensor<B> {
    match earlier {
        Some(earlier) => B::product_add(earlier, gradient, B::float_transpose(weight)),
        None => B::linear_x_backward(weight, gradient),
    }
}

/// The gradients of x, the weight and the bias. x is kept where that of the weight is computed.
pub(crate) fn linear_gradients<B: AdapterOps>(
    (x, weight): (Option<FloatTensor<B>>, FloatTensor<B>),
    gradient: FloatTensor<B>,
    earlier: Option<FloatTensor<B>>,
    [wants_x, _, wants_bias]: [bool; 3],
) -> Gradients<B, 3> {
    [
        wants_x.then(|| x_gradient::<B>(weight, gradient.clone(), earlier)),
        x.map(|x| B::adapter_gradient(B::float_transpose(x), gradient.clone())),
        wants_bias.then(|| B::linear_bias_backward(gradient)),
    ]
}

/// The gradients of x, the weight, the bias, a and b.
fn gradients<B: AdapterOps>(
    [x, weight, a, factor, h]: Kept<B>,
    gradient: FloatTensor<B>,
    earlier: Option<FloatTensor<B>>,
    [wants_x, wants_weight, wants_bias, wants_a, wants_b]: [bool; 5],
) -> Gradients<B, 5> {
    let dweight = wants_weight.then(|| B::linear_weight_backward(x.clone(), gradient.clone()));
    let dbias = wants_bias.then(|| B::linear_bias_backward(gradient.clone()));
    let db = wants_b.then(|| B::adapter_gradient(h, gradient.clone()));
    if !wants_x && !wants_a {
        return [None, dweight, dbias, None, db];
    }
    let dh = B::adapter_inner(factor, gradient.clone());
    let dx = x_gradient::<B>(weight, gradient, earlier);
    let (dx, dh) = B::adapter_add(dx, dh, a);
    let da = wants_a.then(|| B::adapter_gradient(dh, x));
    [Some(dx), dweight, dbias, da, db]
}

impl<B: AdapterOps, C: CheckpointStrategy> AdapterOps for Autodiff<B, C> {
    fn adapter_inner(factor: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        let [factor, x] = [factor, x].map(Self::inner);
        Self::from_inner(B::adapter_inner(factor, x))
    }

    fn adapter_add(
        y: FloatTensor<Self>,
        h: FloatTensor<Self>,
        b: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [y, h, b] = [y, h, b].map(Self::inner);
        let (y, h) = B::adapter_add(y, h, b);
        (Self::from_inner(y), Self::from_inner(h))
    }

    fn adapter_add_biased(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        h: FloatTensor<Self>,
        b: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [x, weight, bias, h, b] = [x, weight, bias, h, b].map(Self::inner);
        let (y, h) = B::adapter_add_biased(x, weight, bias, h, b);
        (Self::from_inner(y), Self::from_inner(h))
    }

    fn product_add(
        y: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let [y, x, weight] = [y, x, weight].map(Self::inner);
        Self::from_inner(B::product_add(y, x, weight))
    }

    fn adapter_gradient(h: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        let [h, x] = [h, x].map(Self::inner);
        Self::from_inner(B::adapter_gradient(h, x))
    }

    fn wide_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Bias<Self>,
        mark: Bias<Self>,
    ) -> FloatTensor<Self> {
        wide_node::<B, C>([x, weight], bias, mark, None)
    }

    fn wide_linear_onto(
        y: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let keeps_x = weight.is_tracked();
        let ([y, x, weight], nodes) = parts([y, x, weight]);
        let kept = (keeps_x.then(|| x.clone()), weight);
        node::<B, C, _, 3>(
            nodes,
            kept,
            |(_, weight)| B::product_add(y, x, weight),
            |kept, gradient, [_, wants_x, wants_weight]| {
                let wanted = [wants_x, wants_weight, false];
                let [dx, dweight, _] = linear_gradients::<B>(kept, gradient.clone(), None, wanted);
                [Some(gradient), dx, dweight]
            },
        )
    }

    fn wide_linear_source(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Bias<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        wide_node::<B, C>([x, weight], bias, Bias::Absent, Some(Self::inner(gradient)))
    }

    fn adapted_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Bias<Self>,
        h: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        mark: Bias<Self>,
    ) -> FloatTensor<Self> {
        let untracked = [h, factor].map(Self::inner);
        adapted_node::<B, C>([x, weight, a, b], untracked, [bias, mark], None)
    }

    fn adapted_linear_source(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Bias<Self>,
        h: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let [h, factor, gradient] = [h, factor, gradient].map(Self::inner);
        let biased = [bias, Bias::Absent];
        adapted_node::<B, C>([x, weight, a, b], [h, factor], biased, Some(gradient))
    }
}

/// The node of x weight + bias, or with the output's gradient the source of its backward.
fn wide_node<B: AdapterOps, C: CheckpointStrategy>(
    [x, weight]: [FloatTensor<Autodiff<B, C>>; 2],
    bias: Bias<Autodiff<B, C>>,
    mark: Bias<Autodiff<B, C>>,
    source: Option<FloatTensor<B>>,
) -> FloatTensor<Autodiff<B, C>> {
    let bias = bias.into_option().map(|bias| bias.into_parts());
    let (bias, bias_node) = bias.unzip();
    let mark = mark.into_option();
    let keeps_x = weight.is_tracked();
    let ([x, weight], [x_node, weight_node]) = parts([x, weight]);
    let y = match source {
        None => B::linear(x.clone(), weight.clone(), bias),
        Some(_) => any_number::<B>(&x),
    };
    let kept = ((keeps_x.then_some(x), weight), source);
    match bias_node {
        Some(bias_node) => sibling_node::<B, C, _, 3>(
            [x_node, weight_node, bias_node],
            mark,
            kept,
            |_| y,
            |(kept, source), gradient, earlier, wanted| {
                linear_gradients::<B>(kept, source.unwrap_or(gradient), earlier, wanted)
            },
        ),
        None => sibling_node::<B, C, _, 2>(
            [x_node, weight_node],
            mark,
            kept,
            |_| y,
            |(kept, source), gradient, earlier, [wants_x, wants_weight]| {
                let gradient = source.unwrap_or(gradient);
                let wanted = [wants_x, wants_weight, false];
                let [dx, dweight, _] = linear_gradients::<B>(kept, gradient, earlier, wanted);
                [dx, dweight]
            },
        ),
    }
}

/// The node of a layer with its adapter, or with the output's gradient the source of its backward.
fn adapted_node<B: AdapterOps, C: CheckpointStrategy>(
    tracked: [FloatTensor<Autodiff<B, C>>; 4],
    [h, factor]: [FloatTensor<B>; 2],
    [bias, mark]: [Bias<Autodiff<B, C>>; 2],
    source: Option<FloatTensor<B>>,
) -> FloatTensor<Autodiff<B, C>> {
    let mark = mark.into_option();
    let bias = bias.into_option().map(|bias| bias.into_parts());
    let (bias, bias_node) = bias.unzip();
    let ([x, weight, a, b], [x_node, weight_node, a_node, b_node]) = parts(tracked);
    let (y, h) = match source {
        None => match bias {
            Some(bias) => B::adapter_add_biased(x.clone(), weight.clone(), bias, h, b),
            None => B::adapter_add(B::linear(x.clone(), weight.clone(), None), h, b),
        },
        Some(_) => {
            let h = composed::whole_inner::<B>(h, b.shape()[0]);
            (any_number::<B>(&x), cast::<B>(h, x.dtype().into()))
        }
    };
    let kept = ([x, weight, a, factor, h], source);
    match bias_node {
        Some(bias_node) => sibling_node::<B, C, _, 5>(
            [x_node, weight_node, bias_node, a_node, b_node],
            mark,
            kept,
            |_| y,
            |(kept, source), gradient, earlier, wanted| {
                gradients::<B>(kept, source.unwrap_or(gradient), earlier, wanted)
            },
        ),
        None => sibling_node::<B, C, _, 4>(
            [x_node, weight_node, a_node, b_node],
            mark,
            kept,
            |_| y,
            |(kept, source), gradient, earlier, [wants_x, wants_weight, wants_a, wants_b]| {
                let gradient = source.unwrap_or(gradient);
                let wanted = [wants_x, wants_weight, false, wants_a, wants_b];
                let [dx, dweight, _, da, db] = gradients::<B>(kept, gradient, earlier, wanted);
                [dx, dweight, da, db]
            },
        ),
    }
}

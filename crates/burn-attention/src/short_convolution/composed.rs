//! A short convolution composed of ordinary tensor operations, for every backend.
//!
//! With z(t) = sum over j of weight(j) x(t - j') for the taps of its own sequence, y = z
//! sigmoid(z): dx(t - j') gathers weight(j) dz(t), and dweight(j) is the sum over all t of dz(t)
//! x(t - j').

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::Shape;
use burn_fused::primitive::{cast, not, slice, widen};

use super::op::ShortConvolutionOp;

/// Computes the same as [`ShortConvolutionOps`](super::ShortConvolutionOps)' forward.
pub fn forward<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    op: &ShortConvolutionOp,
) -> FloatTensor<B> {
    let dtype = x.dtype().into();
    let z = convolved::<B>(widen::<B>(x), &widen::<B>(weight), op);
    cast::<B>(B::float_mul(z.clone(), B::sigmoid(z)), dtype)
}

/// Computes the same as [`ShortConvolutionOps`](super::ShortConvolutionOps)' backward.
pub fn backward<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    gradient: FloatTensor<B>,
    op: &ShortConvolutionOp,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let dtype = x.dtype().into();
    let [x, weight, gradient] = [x, weight, gradient].map(widen::<B>);
    let z = convolved::<B>(x.clone(), &weight, op);
    let s = B::sigmoid(z.clone());
    let rest = B::float_add_scalar(B::float_neg(s.clone()), 1.0.into());
    let slope = B::float_add(s.clone(), B::float_mul(B::float_mul(z, s), rest));
    let dz = B::float_mul(gradient, slope);
    let [batch, tokens, channels] = x.shape().dims();
    let rows = Shape::new([batch * tokens, channels]);
    let (mut dx, mut dweight) = (None, Vec::new());
    for (back, factor) in taps::<B>(&weight).into_iter() {
        let dz = masked::<B>(dz.clone(), back, op);
        let products = B::float_mul(dz.clone(), shifted::<B>(x.clone(), back as isize));
        let products = B::float_reshape(products, rows.clone());
        let sum = B::float_sum_dim(products, 0);
        dweight.push(B::float_reshape(sum, Shape::new([channels, 1])));
        let part = B::float_mul(shifted::<B>(dz, -(back as isize)), factor);
        dx = Some(match dx {
            Some(sum) => B::float_add(sum, part),
            None => part,
        });
    }
    let dx = dx.unwrap_or_else(|| unreachable!("the check wants a tap"));
    (
        cast::<B>(dx, dtype),
        cast::<B>(B::float_cat(dweight, 1), dtype),
    )
}

/// The sum over the taps.
fn convolved<B: Backend>(
    x: FloatTensor<B>,
    weight: &FloatTensor<B>,
    op: &ShortConvolutionOp,
) -> FloatTensor<B> {
    let taps = taps::<B>(weight).into_iter().map(|(back, factor)| {
        let shifted = shifted::<B>(x.clone(), back as isize);
        B::float_mul(masked::<B>(shifted, back, op), factor)
    });
    let sum = taps.reduce(B::float_add);
    sum.unwrap_or_else(|| unreachable!("the check wants a tap"))
}

/// Each tap: how many tokens it lies back, and its factor of each channel, `[1, 1, channels]`.
fn taps<B: Backend>(weight: &FloatTensor<B>) -> Vec<(usize, FloatTensor<B>)> {
    let [channels, taps] = weight.shape().dims();
    let tap = |tap| {
        let factor = slice::<B>(weight.clone(), 1, tap..tap + 1);
        let factor = B::float_reshape(factor, Shape::new([1, 1, channels]));
        (taps - 1 - tap, factor)
    };
    (0..taps).map(tap).collect()
}

/// At each token the one `back` tokens before it, or after it if negative, and 0 beyond the row.
fn shifted<B: Backend>(x: FloatTensor<B>, back: isize) -> FloatTensor<B> {
    if back == 0 {
        return x;
    }
    let shape = x.shape();
    let (tokens, by) = (shape[1], back.unsigned_abs().min(shape[1]));
    let mut missing = shape.clone();
    missing[1] = by;
    let zeros = B::float_zeros(missing, &x.device(), x.dtype().into());
    let parts = if back > 0 {
        vec![zeros, slice::<B>(x, 1, 0..tokens - by)]
    } else {
        vec![slice::<B>(x, 1, by..tokens), zeros]
    };
    B::float_cat(parts, 1)
}

/// Zeros at the tokens whose tap `back` lies in another sequence.
fn masked<B: Backend>(x: FloatTensor<B>, back: usize, op: &ShortConvolutionOp) -> FloatTensor<B> {
    let Some(sequences) = op.sequences.token_sequences() else {
        return x;
    };
    if back == 0 {
        return x;
    }
    let same = |token: usize| token >= back && sequences[token - back] == sequences[token];
    let same: Vec<bool> = (0..sequences.len()).map(same).collect();
    let other = not::<B>(&same, [1, same.len(), 1], &x.device());
    B::float_mask_fill(x, other, 0.0.into())
}

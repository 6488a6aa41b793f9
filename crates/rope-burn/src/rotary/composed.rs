//! The rotation composed of ordinary tensor operations, for every backend; tests compare the fused
//! kernels with it.

use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;
use burn_fused::primitive::{cast, slice};
use rope_core::{Direction, HeadsLayout, Layout, Pairing};

use super::RotaryOp;

/// Rotates `x`: (y1, y2) = (c1 x1 - s1 x2, c2 x2 + s2 x1), or by the adjoint,
/// (c1 x1 + s2 x2, c2 x2 - s1 x1).
///
/// # Panics
/// If `x` has another rank than the layout, or shapes disagree: [`RotaryOp::check`] reports that.
pub fn rotate<B: Backend>(
    x: FloatTensor<B>,
    angles: FloatTensor<B>,
    op: RotaryOp,
) -> FloatTensor<B> {
    let heads = heads(&op, &x.shape());
    // Backends differ in whether they broadcast to nothing.
    if x.shape().num_elements() == 0 {
        return x;
    }
    let (dtype, angle_dtype) = (x.dtype().into(), angles.dtype().into());
    let (read, write) = accesses(&op);
    let last = x.shape().num_dims() - 1;
    let rotated = rotated_channels(&op);
    let (before, after) = (
        slice::<B>(x.clone(), last, 0..rotated.start),
        slice::<B>(x.clone(), last, rotated.end..heads.head_dim),
    );
    let middle = cast::<B>(slice::<B>(x, last, rotated.clone()), angle_dtype);
    let (x1, x2) = split::<B>(middle, read);
    let [c1, c2] = members::<B>(&angles, 0, &op, &heads);
    let [s1, s2] = members::<B>(&angles, op.geometry.lane_count(), &op, &heads);
    let (y1, y2) = match op.direction {
        Direction::Forward => (
            B::float_sub(B::float_mul(c1, x1.clone()), B::float_mul(s1, x2.clone())),
            B::float_add(B::float_mul(c2, x2), B::float_mul(s2, x1)),
        ),
        Direction::Adjoint => (
            B::float_add(B::float_mul(c1, x1.clone()), B::float_mul(s2, x2.clone())),
            B::float_sub(B::float_mul(c2, x2), B::float_mul(s1, x1)),
        ),
    };
    let middle = cast::<B>(join::<B>(y1, y2, write), dtype);
    if rotated.len() == heads.head_dim {
        return middle;
    }
    let parts = [before, middle, after];
    B::float_cat(
        parts
            .into_iter()
            .filter(|part| part.shape().num_elements() > 0)
            .collect(),
        last,
    )
}

/// The gradient of the angles: for a pair, (g1 x1, g2 x2) of c and (-g1 x2, g2 x1) of s, summed
/// over heads and over whatever shares the angle.
///
/// # Panics
/// As [`rotate`].
pub fn angle_gradients<B: Backend>(
    x: FloatTensor<B>,
    gradient: FloatTensor<B>,
    angles: FloatTensor<B>,
    op: RotaryOp,
) -> FloatTensor<B> {
    let heads = heads(&op, &x.shape());
    let (read, write) = accesses(&op);
    let (last, rotated) = (x.shape().num_dims() - 1, rotated_channels(&op));
    let part = |x, access| {
        let middle = slice::<B>(x, last, rotated.clone());
        split::<B>(cast::<B>(middle, angles.dtype().into()), access)
    };
    let ((x1, x2), (g1, g2)) = (part(x, read), part(gradient, write));
    let adjoint = op.direction == Direction::Adjoint;
    let (dc1, dc2) = (
        B::float_mul(g1.clone(), x1.clone()),
        B::float_mul(g2.clone(), x2.clone()),
    );
    // Forward: y1 has -s1 x2 and y2 has s2 x1. Adjoint: y1 has s2 x2 and y2 has -s1 x1.
    let (cross12, cross21) = (B::float_mul(g1, x2), B::float_mul(g2, x1));
    let (ds1, ds2) = if adjoint {
        (B::float_neg(cross21), cross12)
    } else {
        (B::float_neg(cross12), cross21)
    };
    let rows = angles.shape().as_slice()[0];
    let columns = if op.geometry.per_channel() {
        vec![dc1, dc2, ds1, ds2]
    } else {
        vec![B::float_add(dc1, dc2), B::float_add(ds1, ds2)]
    };
    let columns = columns.into_iter();
    let columns = columns.map(|x| sum_to_rows::<B>(x, &op, &heads, rows));
    B::float_cat(columns.collect(), 1)
}

fn heads(op: &RotaryOp, shape: &Shape) -> HeadsLayout {
    op.heads("x", shape)
        .unwrap_or_else(|error| panic!("{error}"))
}

fn rotated_channels(op: &RotaryOp) -> core::ops::Range<usize> {
    op.geometry.rotary_offset()..op.geometry.rotary_offset() + op.geometry.rotary_dim()
}

/// How the pairs of the rotated part are read and written: as `[outer, 2, inner]`, the members of
/// pairs along the middle dimension.
fn accesses(op: &RotaryOp) -> ([usize; 3], [usize; 3]) {
    let pairs = op.geometry.pairs();
    let (split, zipped) = ([1, 2, pairs], [pairs, 2, 1]);
    let (read, write) = match op.geometry.pairing() {
        Pairing::Half => (split, split),
        Pairing::Adjacent => (zipped, zipped),
        Pairing::Quarter => ([2, 2, pairs / 2], [2, 2, pairs / 2]),
        Pairing::InterleaveHalf => (zipped, split),
    };
    if op.direction == Direction::Forward {
        (read, write)
    } else {
        (write, read)
    }
}

fn with_last(shape: &Shape, last: &[usize]) -> Shape {
    let dims = shape.as_slice();
    Shape::from([&dims[..dims.len() - 1], last].concat())
}

fn split<B: Backend>(
    x: FloatTensor<B>,
    [outer, two, inner]: [usize; 3],
) -> (FloatTensor<B>, FloatTensor<B>) {
    let shape = x.shape();
    let (last, pairs) = (shape.num_dims() - 1, outer * inner);
    let x = B::float_reshape(x, with_last(&shape, &[outer, two, inner]));
    let member = |x, m| {
        B::float_reshape(
            slice::<B>(x, last + 1, m..m + 1),
            with_last(&shape, &[pairs]),
        )
    };
    (member(x.clone(), 0), member(x, 1))
}

fn join<B: Backend>(
    first: FloatTensor<B>,
    second: FloatTensor<B>,
    [outer, _, inner]: [usize; 3],
) -> FloatTensor<B> {
    let shape = first.shape();
    let last = shape.num_dims() - 1;
    let member = |x| B::float_reshape(x, with_last(&shape, &[outer, 1, inner]));
    let joined = B::float_cat(vec![member(first), member(second)], last + 1);
    B::float_reshape(joined, with_last(&shape, &[2 * outer * inner]))
}

/// The angles of the first and second members from column `first` on, shaped to broadcast over the
/// heads.
fn members<B: Backend>(
    angles: &FloatTensor<B>,
    first: usize,
    op: &RotaryOp,
    heads: &HeadsLayout,
) -> [FloatTensor<B>; 2] {
    let pairs = op.geometry.pairs();
    let rows = angles.shape().as_slice()[0];
    let batch = if rows == heads.seq { 1 } else { heads.batch };
    let broadcast = |x| {
        let seq = heads.seq;
        match op.layout {
            Layout::Bsnd => B::float_reshape(x, Shape::from([batch, seq, 1, pairs])),
            Layout::Bnsd => B::float_reshape(x, Shape::from([batch, 1, seq, pairs])),
            Layout::Sbnd => {
                let x = B::float_reshape(x, Shape::from([batch, seq, 1, pairs]));
                B::float_swap_dims(x, 0, 1)
            }
            Layout::Tnd => B::float_reshape(x, Shape::from([seq, 1, pairs])),
        }
    };
    let columns = |first| broadcast(slice::<B>(angles.clone(), 1, first..first + pairs));
    if op.geometry.per_channel() {
        [columns(first), columns(first + pairs)]
    } else {
        let shared = columns(first);
        [shared.clone(), shared]
    }
}

/// Sums over heads, and over the batch if it shares its angles: the transpose of the broadcast in
/// [`members`].
fn sum_to_rows<B: Backend>(
    mut x: FloatTensor<B>,
    op: &RotaryOp,
    heads: &HeadsLayout,
    rows: usize,
) -> FloatTensor<B> {
    let (batch_dim, head_dim) = match op.layout {
        Layout::Bsnd => (Some(0), 2),
        Layout::Bnsd => (Some(0), 1),
        Layout::Sbnd => (Some(1), 2),
        Layout::Tnd => (None, 1),
    };
    x = B::float_sum_dim(x, head_dim);
    if let Some(dim) = batch_dim {
        if rows == heads.seq {
            x = B::float_sum_dim(x, dim);
        }
        if dim == 1 {
            x = B::float_swap_dims(x, 0, 1);
        }
    }
    B::float_reshape(x, Shape::from([rows, op.geometry.pairs()]))
}

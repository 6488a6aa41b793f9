//! Operators that move elements without changing them.

use super::call::{Call, Kernel, Operand, kernel};
use super::data::Part;
use super::dtype::{ARITH, expect_castable, promote};
use super::element::{dense_strides, with_lane};
use super::{inner, refuse};
use crate::codes::Outcome;

/// Repeats above 1 that the operator takes: with the first axis among them, and without.
const REPEATS_WITH_FIRST: usize = 4;
const REPEATS_WITHOUT_FIRST: usize = 3;

/// Copies of the tensor along each axis.
pub(crate) fn repeat(
    call: &mut Call,
    x: Operand,
    repeats: &[i64],
    out: Operand,
) -> Outcome<Kernel> {
    call.distinct();
    let rank = repeats.len();
    if rank < x.rank() || rank > 8 || repeats.iter().any(|times| *times < 0) {
        return refuse(format!(
            "repeats is {repeats:?}, {} to 8 numbers, none negative, are expected",
            x.rank()
        ));
    }
    let lead = rank - x.rank();
    let (mut dims, mut strides, mut result) = (Vec::new(), Vec::new(), Vec::new());
    for (axis, times) in repeats.iter().enumerate() {
        let (dim, stride) = match axis.checked_sub(lead) {
            Some(axis) => (x.dims[axis], x.strides[axis]),
            None => (1, 0),
        };
        dims.extend([*times as usize, dim]);
        strides.extend([0, stride]);
        result.push(*times as usize * dim);
    }
    out.expect_like(&x, &result)?;
    let most = if repeats.first().is_some_and(|times| *times > 1) {
        REPEATS_WITH_FIRST
    } else {
        REPEATS_WITHOUT_FIRST
    };
    if repeats.iter().filter(|times| **times > 1).count() > most {
        return inner(refuse(format!(
            "repeats is {repeats:?}, at most {most} of them above 1 are expected"
        )));
    }
    kernel(move |data| {
        with_lane!(x.dtype.class(), L => {
            let values = data.read_part::<L>(&x, &Part::new(&dims, &strides, 0))?;
            data.write(&out, &values)
        })
    })
}

/// Joins tensors along an axis.
pub(crate) fn concatenate(
    call: &mut Call,
    tensors: Vec<Operand>,
    dim: i64,
    out: Operand,
) -> Outcome<Kernel> {
    call.distinct();
    out.expect_contiguous()?;
    // Tensors of shape [0] are left out, whatever the shape of the others.
    let (empty, tensors): (Vec<_>, Vec<_>) = tensors.into_iter().partition(|t| t.dims == [0]);
    let Some(first) = tensors.first().or(empty.first()) else {
        return refuse("tensors is empty, one tensor at least is expected");
    };
    out.expect_type(ARITH)?;
    first.expect_rank(1..=8)?;
    let axis = first.axis(dim, "dim")?;
    let mut dims = first.dims.clone();
    dims[axis] = 0;
    let mut dtype = first.dtype;
    for (i, tensor) in tensors.iter().enumerate() {
        tensor.expect_type(ARITH)?;
        dtype = promote(dtype, tensor.dtype)?;
        let fits = tensor.rank() == dims.len()
            && (0..dims.len())
                .all(|other| other == axis || tensor.dims[other] == first.dims[other]);
        if !fits {
            return refuse(format!(
                "tensors[{i}] has shape {:?}, which differs from {:?} outside of axis {axis}",
                tensor.dims, first.dims
            ));
        }
        dims[axis] += tensor.dims[axis];
    }
    expect_castable(dtype, out.dtype, out.name)?;
    // The vendor copies a single tensor, and checks the shape there.
    if tensors.iter().filter(|tensor| !tensor.is_empty()).count() == 1 {
        inner(out.expect_dims(&dims))?;
    }
    out.expect_dims(&dims)?;
    kernel(move |data| {
        let mut start = 0;
        for tensor in tensors.iter().filter(|tensor| !tensor.is_empty()) {
            let part = Part::new(&tensor.dims, &out.strides, start * out.strides[axis]);
            start += tensor.dims[axis] as i64;
            with_lane!(dtype.class(), L => {
                let values = data.read::<L>(tensor)?;
                data.write_part(&out, &part, &values)?;
            });
        }
        Ok(())
    })
}

/// Reverses the order of the elements along some axes.
pub(crate) fn flip(call: &mut Call, x: Operand, axes: &[i64], out: Operand) -> Outcome<Kernel> {
    call.distinct();
    x.expect_type(ARITH)?;
    x.expect_rank(1..=8)?;
    out.expect_contiguous()?;
    out.expect_like(&x, &x.dims)?;
    let axes = if axes.is_empty() {
        Vec::new()
    } else {
        x.axes(axes, "dims")?
    };
    kernel(move |data| {
        let dense = dense_strides(&x.dims);
        with_lane!(x.dtype.class(), L => {
            let values = data.read::<L>(&x)?;
            let reversed = |i: usize| {
                let from = axes.iter().fold(i, |from, axis| {
                    let (dim, stride) = (x.dims[*axis], dense[*axis] as usize);
                    let index = i / stride % dim;
                    from - index * stride + (dim - 1 - index) * stride
                });
                values[from]
            };
            let flipped: Vec<L> = (0..values.len()).map(reversed).collect();
            data.write(&out, &flipped)
        })
    })
}

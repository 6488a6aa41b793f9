//! Operators that move elements without changing them.

use super::call::{Call, Kernel, Operand, kernel};
use super::data::{Part, spread};
use super::descriptor::Scalar;
use super::dtype::{ANY, ARITH, DataType, FLT, Types, expect_castable, promote};
use super::element::{Lane, dense_strides, with_lane};
use super::refuse;
use crate::codes::{ACLNN_INNER_NULLPTR, Failure, Outcome};

/// Repeats above 1 that the operator takes: with the first axis among them, and without.
const REPEATS_WITH_FIRST: usize = 4;
const REPEATS_WITHOUT_FIRST: usize = 3;

/// Refuses an output of another type or shape.
pub(crate) fn expect_like(out: &Operand, x: &Operand, dims: &[usize]) -> Outcome {
    out.expect_dtype(x.dtype)?;
    out.expect_dims(dims)
}

/// Writes what `part` of `x` holds, in its order.
fn move_part(
    call: &mut Call,
    x: &Operand,
    dims: Vec<usize>,
    strides: Vec<i64>,
    start: i64,
    out: &Operand,
) -> Outcome<Kernel> {
    call.distinct();
    let (x, out) = (x.clone(), out.clone());
    kernel(move |data| {
        with_lane!(x.dtype.class(), L => {
            let part = Part { dims: &dims, strides: &strides, start };
            let values = data.read_part::<L>(&x, &part)?;
            data.write(&out, &values)
        })
    })
}

/// The axes in another order.
pub(crate) fn permute(
    call: &mut Call,
    x: &Operand,
    axes: &[i64],
    out: &Operand,
) -> Outcome<Kernel> {
    let order = axes
        .iter()
        .map(|axis| x.axis(*axis, "dims"))
        .collect::<Outcome<Vec<_>>>()?;
    let mut sorted = order.clone();
    sorted.sort_unstable();
    if order.len() != x.rank() || sorted.into_iter().ne(0..x.rank()) {
        return refuse(format!(
            "dims is {axes:?}, each of the {} axes of self once is expected",
            x.rank()
        ));
    }
    let (dims, strides): (Vec<_>, Vec<_>) =
        order.iter().map(|i| (x.dims[*i], x.strides[*i])).unzip();
    expect_like(out, x, &dims)?;
    move_part(call, x, dims, strides, 0, out)
}

/// Every `step`th element of an axis.
pub(crate) fn slice(
    call: &mut Call,
    x: &Operand,
    dim: i64,
    [start, end, step]: [i64; 3],
    out: &Operand,
) -> Outcome<Kernel> {
    x.expect_rank(1..=8)?;
    let axis = x.axis(dim, "dim")?;
    if step <= 0 {
        return refuse(format!("step is {step}, more than 0 is expected"));
    }
    let size = x.dims[axis] as i64;
    let bound = |at: i64| if at < 0 { at + size } else { at }.clamp(0, size);
    let (start, end) = (bound(start), bound(end));
    let (mut dims, mut strides) = (x.dims.clone(), x.strides.clone());
    dims[axis] = ((end - start).max(0) as usize).div_ceil(step as usize);
    let first = start * strides[axis];
    strides[axis] *= step;
    expect_like(out, x, &dims)?;
    move_part(call, x, dims, strides, first, out)
}

/// Copies of the tensor along each axis.
pub(crate) fn repeat(
    call: &mut Call,
    x: &Operand,
    repeats: &[i64],
    out: &Operand,
) -> Outcome<Kernel> {
    let rank = repeats.len();
    if rank < x.rank() || rank > 8 || repeats.iter().any(|times| *times < 0) {
        return refuse(format!(
            "repeats is {repeats:?}, {} to 8 numbers from 0 on are expected",
            x.rank()
        ));
    }
    let many = repeats.iter().filter(|times| **times > 1).count();
    let most = if repeats.first().is_some_and(|times| *times > 1) {
        REPEATS_WITH_FIRST
    } else {
        REPEATS_WITHOUT_FIRST
    };
    if many > most {
        return refuse(format!(
            "repeats is {repeats:?}, at most {most} of them above 1 are expected"
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
    expect_like(out, x, &result)?;
    move_part(call, x, dims, strides, 0, out)
}

/// The tensor broadcast to a shape; -1 keeps an axis.
pub(crate) fn expand(call: &mut Call, x: &Operand, size: &[i64], out: &Operand) -> Outcome<Kernel> {
    use DataType::*;
    x.expect_type(FLT.and(Types::of(&[Uint8, Int8, Int32, Int64, Bool])))?;
    let mismatch = || {
        refuse(format!(
            "size is {size:?}, to which {:?} of self does not broadcast",
            x.dims
        ))
    };
    let Some(lead) = size.len().checked_sub(x.rank()) else {
        return mismatch();
    };
    let mut dims = Vec::with_capacity(size.len());
    for (axis, wanted) in size.iter().enumerate() {
        let own = axis.checked_sub(lead).map(|axis| x.dims[axis]);
        dims.push(match (own, *wanted) {
            (Some(own), -1) => own,
            (Some(own), wanted) if own != 1 && own as i64 != wanted => return mismatch(),
            (_, wanted) if wanted >= 0 => wanted as usize,
            _ => return mismatch(),
        });
    }
    let strides = spread(&x.dims, &x.strides, &dims);
    expect_like(out, x, &dims)?;
    move_part(call, x, dims, strides, 0, out)
}

/// Tensors one behind the other along an axis.
pub(crate) fn concatenate(
    call: &mut Call,
    tensors: Vec<Operand>,
    dim: i64,
    out: &Operand,
) -> Outcome<Kernel> {
    call.distinct();
    out.expect_contiguous()?;
    let Some(first) = tensors.iter().find(|t| !t.is_empty()).or(tensors.first()) else {
        return refuse("tensors is empty, one tensor at least is expected");
    };
    first.expect_rank(1..=8)?;
    let axis = first.axis(dim, "dim")?;
    let mut dims = first.dims.clone();
    dims[axis] = 0;
    let mut dtype = first.dtype;
    let parts: Vec<Operand> = tensors.iter().filter(|t| !t.is_empty()).cloned().collect();
    for (i, tensor) in tensors.iter().enumerate() {
        tensor.expect_type(ARITH)?;
        dtype = promote(dtype, tensor.dtype)?;
        if tensor.is_empty() {
            continue;
        }
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
    out.expect_dims(&dims)?;
    expect_castable(dtype, out.dtype, out.name)?;
    let out = out.clone();
    kernel(move |data| {
        let mut at = 0;
        for tensor in &parts {
            let part = Part {
                dims: &tensor.dims,
                strides: &out.strides,
                start: at * out.strides[axis],
            };
            at += tensor.dims[axis] as i64;
            with_lane!(dtype.class(), L => {
                let values = data.read::<L>(tensor)?;
                data.write_part(&out, &part, &values)?;
            });
        }
        Ok(())
    })
}

/// The elements of some axes in reverse order.
pub(crate) fn flip(call: &mut Call, x: &Operand, axes: &[i64], out: &Operand) -> Outcome<Kernel> {
    call.distinct();
    x.expect_rank(1..=8)?;
    out.expect_contiguous()?;
    expect_like(out, x, &x.dims)?;
    let axes = if axes.is_empty() {
        Vec::new()
    } else {
        x.axes(axes, "dims")?
    };
    let (x, out) = (x.clone(), out.clone());
    kernel(move |data| {
        let dense = dense_strides(&x.dims);
        with_lane!(x.dtype.class(), L => {
            let values = data.read::<L>(&x)?;
            let turned: Vec<L> = (0..values.len())
                .map(|i| {
                    let from = axes.iter().fold(i, |from, axis| {
                        let (dim, stride) = (x.dims[*axis], dense[*axis] as usize);
                        let here = i / stride % dim;
                        from - here * stride + (dim - 1 - here) * stride
                    });
                    values[from]
                })
                .collect();
            data.write(&out, &turned)
        })
    })
}

/// The tensor inside a frame of one number; pairs of widths count from the last axis, negative ones cut.
pub(crate) fn pad(
    call: &mut Call,
    x: &Operand,
    pad: &[i64],
    value: Scalar,
    out: &Operand,
) -> Outcome<Kernel> {
    call.distinct();
    let unsupported = |message: String| Err(Failure::new(ACLNN_INNER_NULLPTR, message));
    let rank = x.rank();
    if !pad.len().is_multiple_of(2) || pad.len() > 2 * rank {
        return unsupported(format!(
            "pad has {} numbers, an even count up to {} is expected",
            pad.len(),
            2 * rank
        ));
    }
    let mut before = vec![0; rank];
    let mut dims = x.dims.clone();
    for (pair, axis) in pad.chunks_exact(2).zip((0..rank).rev()) {
        let size = dims[axis] as i64 + pair[0] + pair[1];
        if size < 0 {
            return unsupported(format!(
                "pad is {pad:?}, which leaves {size} of axis {axis}"
            ));
        }
        before[axis] = pair[0];
        dims[axis] = size as usize;
    }
    if out.dtype != x.dtype || out.dims != dims {
        return unsupported(format!(
            "out is {:?} {:?}, {:?} {dims:?} is expected",
            out.dtype, out.dims, x.dtype
        ));
    }
    let (x, out) = (x.clone(), out.clone());
    kernel(move |data| {
        // What is left of the tensor: where it begins in it and in the output, and how long it is.
        let kept: Vec<(i64, i64, usize)> = (0..rank)
            .map(|axis| {
                let (from, to) = ((-before[axis]).max(0), before[axis].max(0));
                let left = (x.dims[axis] as i64 - from).min(out.dims[axis] as i64 - to);
                (from, to, left.max(0) as usize)
            })
            .collect();
        let lengths: Vec<usize> = kept.iter().map(|axis| axis.2).collect();
        let start = |strides: &[i64], of: fn(&(i64, i64, usize)) -> i64| {
            kept.iter()
                .zip(strides)
                .map(|(axis, stride)| of(axis) * stride)
                .sum()
        };
        let source = Part {
            dims: &lengths,
            strides: &x.strides,
            start: start(&x.strides, |axis| axis.0),
        };
        let target = Part {
            dims: &lengths,
            strides: &out.strides,
            start: start(&out.strides, |axis| axis.1),
        };
        with_lane!(x.dtype.class(), L => {
            data.write(&out, &vec![value.lane::<L>(); out.elements()])?;
            let values = data.read_part::<L>(&x, &source)?;
            data.write_part(&out, &target, &values)
        })
    })
}

/// The part of each matrix on and below a diagonal, or on and above it; zeros elsewhere.
pub(crate) fn triangle(x: &Operand, diagonal: i64, lower: bool, out: &Operand) -> Outcome<Kernel> {
    x.expect_type(ANY)?;
    x.expect_rank(2..=8)?;
    expect_like(out, x, &x.dims)?;
    let (x, out) = (x.clone(), out.clone());
    kernel(move |data| {
        let (rows, columns) = (x.dims[x.rank() - 2], x.dims[x.rank() - 1]);
        with_lane!(x.dtype.class(), L => {
            let mut values = data.read::<L>(&x)?;
            for (i, value) in values.iter_mut().enumerate() {
                let beyond = (i % columns) as i64 - (i / columns % rows) as i64 - diagonal;
                if (lower && beyond > 0) || (!lower && beyond < 0) {
                    *value = L::default();
                }
            }
            data.write(&out, &values)
        })
    })
}

/// Rows in order with the positions they came from.
pub(crate) fn sort(
    call: &mut Call,
    x: &Operand,
    dim: i64,
    descending: bool,
    values: &Operand,
    indices: &Operand,
) -> Outcome<Kernel> {
    call.distinct();
    x.expect_type(ARITH)?;
    if x.dtype == DataType::Double || x.dtype == DataType::Int16 {
        x.expect_type(FLT)?;
    }
    if !x.dtype.is_float() {
        call.unrepeatable("integers are sorted by the AI CPU");
    }
    let axis = x.axis(dim, "dim")?;
    if x.dtype == DataType::Bf16 && x.dims.get(axis) == Some(&1) {
        return refuse("self is Bf16 and the sorted axis has one element, which is not offered");
    }
    ranked(x, axis, None, descending, values, indices)
}

/// The `k` largest or smallest of each row, in order, with the positions they came from.
pub(crate) fn top(
    call: &mut Call,
    x: &Operand,
    [k, dim]: [i64; 2],
    largest: bool,
    sorted: bool,
    values: &Operand,
    indices: &Operand,
) -> Outcome<Kernel> {
    call.distinct();
    x.expect_type(ARITH)?;
    if !sorted {
        return refuse("sorted is false, only true is offered");
    }
    let axis = x.axis(dim, "dim")?;
    let size = x.dims.get(axis).copied().unwrap_or(1);
    let Some(count) = usize::try_from(k).ok().filter(|k| *k <= size) else {
        return refuse(format!("k is {k}, 0 to {size} is expected"));
    };
    ranked(x, axis, Some(count), largest, values, indices)
}

fn ranked(
    x: &Operand,
    axis: usize,
    count: Option<usize>,
    descending: bool,
    values: &Operand,
    indices: &Operand,
) -> Outcome<Kernel> {
    let mut dims = x.dims.clone();
    if let (Some(count), Some(dim)) = (count, dims.get_mut(axis)) {
        *dim = count;
    }
    expect_like(values, x, &dims)?;
    indices.expect_dtype(DataType::Int64)?;
    indices.expect_dims(&dims)?;
    let (x, values, indices) = (x.clone(), values.clone(), indices.clone());
    kernel(move |data| {
        let axes: Vec<usize> = (0..x.rank()).filter(|other| *other == axis).collect();
        let (order, row) = super::reduce::rows_last(&x, &axes);
        let count = count.unwrap_or(row);
        with_lane!(x.dtype.class(), L => {
            let all = data.read_order::<L>(&x, &order)?;
            let (mut best, mut places) = (Vec::new(), Vec::new());
            for row in all.chunks_exact(row.max(1)) {
                let mut places_here: Vec<usize> = (0..row.len()).collect();
                places_here.sort_by(|a, b| {
                    // NaN counts as larger than all; equals keep their order.
                    let (a, b) = (row[*a], row[*b]);
                    let rising = match (a.is_nan(), b.is_nan()) {
                        (false, false) => a.partial_cmp(&b).unwrap_or(std::cmp::Ordering::Equal),
                        (a, b) => a.cmp(&b),
                    };
                    if descending { rising.reverse() } else { rising }
                });
                places_here.truncate(count);
                best.extend(places_here.iter().map(|i| row[*i]));
                places.extend(places_here.into_iter().map(|i| i as i64));
            }
            data.write_order(&values, &order, &best)?;
            data.write_order(&indices, &order, &places)
        })
    })
}

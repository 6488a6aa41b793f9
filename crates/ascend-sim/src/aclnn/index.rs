//! Operators that take positions from a tensor. The host cannot check them: a wrong one is an
//! exception on the device.

use super::call::{Call, Kernel, Operand, kernel};
use super::data::{Data, Part};
use super::descriptor::Scalar;
use super::dtype::{ARITH, FLT, INDEX, INTS};
use super::element::{Lane, Strided, dense_strides, with_lane};
use super::movement::expect_like;
use super::refuse;
use crate::codes::Outcome;

/// The shape that an index is used with: axes of 1 where the tensor has none.
fn expect_index(index: &Operand, x: &Operand) -> Outcome {
    index.expect_type(INDEX)?;
    if index.rank() != x.rank() {
        return refuse(format!(
            "{} has rank {}, {} of {} is expected",
            index.name,
            index.rank(),
            x.rank(),
            x.name
        ));
    }
    Ok(())
}

fn expect_within(small: &Operand, large: &Operand, except: Option<usize>) -> Outcome {
    let beyond = (0..small.rank())
        .find(|axis| Some(*axis) != except && small.dims[*axis] > large.dims[*axis]);
    match beyond {
        None => Ok(()),
        Some(axis) => refuse(format!(
            "{} has shape {:?}, which exceeds {:?} of {} in axis {axis}",
            small.name, small.dims, large.dims, large.name
        )),
    }
}

/// For each element of an index, the element of a dense tensor that it names.
fn targets(
    data: &Data<'_, '_>,
    x: &Operand,
    axis: usize,
    index: &Operand,
    negative: bool,
) -> Outcome<Vec<usize>> {
    let mut strides = dense_strides(&x.dims);
    let (size, step) = match strides.get_mut(axis) {
        Some(stride) => (x.dims[axis] as i64, std::mem::take(stride)),
        None => (1, 0),
    };
    let at = data.read::<i64>(index)?;
    let mut found = Vec::with_capacity(at.len());
    let Some(lines) = Strided::new(&index.dims, &strides) else {
        return Ok(found);
    };
    lines.offsets(|offset| {
        let i = at[found.len()];
        let i = if negative && i < 0 { i + size } else { i };
        found.push(offset.wrapping_add((i * step) as usize));
    });
    check_indices(
        data,
        index,
        &at,
        if negative { -size..size } else { 0..size },
    )?;
    Ok(found)
}

/// Whether a device would read or write outside a tensor.
fn check_indices(
    data: &Data<'_, '_>,
    index: &Operand,
    values: &[i64],
    range: std::ops::Range<i64>,
) -> Outcome {
    match values.iter().find(|i| !range.contains(i)) {
        None => Ok(()),
        Some(i) => Err(data.exception(format!(
            "{} {i} is outside of {}..{}; the device does not check and reaches other memory",
            index.name, range.start, range.end
        ))),
    }
}

/// `out[.., i, ..] = self[.., index[.., i, ..], ..]`.
pub(crate) fn gather(
    call: &mut Call,
    x: &Operand,
    dim: i64,
    index: &Operand,
    out: &Operand,
) -> Outcome<Kernel> {
    call.distinct();
    let axis = x.axis(dim, "dim")?;
    expect_index(index, x)?;
    expect_within(index, x, Some(axis))?;
    expect_like(out, x, &index.dims)?;
    let (x, index, out) = (x.clone(), index.clone(), out.clone());
    kernel(move |data| {
        let from = targets(data, &x, axis, &index, true)?;
        with_lane!(x.dtype.class(), L => {
            let values = data.read::<L>(&x)?;
            let taken: Vec<L> = from.iter().map(|i| values[*i]).collect();
            data.write(&out, &taken)
        })
    })
}

/// What a scatter does where it meets an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meets {
    Replace,
    Add,
    Multiply,
}

/// The meaning of `reduce`.
pub(crate) fn meets(reduce: i64) -> Outcome<Meets> {
    match reduce {
        0 => Ok(Meets::Replace),
        1 => Ok(Meets::Add),
        2 => Ok(Meets::Multiply),
        _ => refuse(format!(
            "reduce is {reduce}, 0 (replace), 1 (add) or 2 (multiply) is expected"
        )),
    }
}

/// What is scattered.
#[derive(Clone)]
pub(crate) enum Source {
    Tensor(Operand),
    Scalar(Scalar),
}

/// `out = self`, then `out[.., index[.., i, ..], ..]` meets `src[.., i, ..]`.
pub(crate) fn scatter(
    x: &Operand,
    dim: i64,
    index: &Operand,
    source: Source,
    meets: Meets,
    out: &Operand,
) -> Outcome<Kernel> {
    x.expect_type(ARITH)?;
    let axis = x.axis(dim, "dim")?;
    expect_index(index, x)?;
    expect_within(index, x, Some(axis))?;
    expect_like(out, x, &x.dims)?;
    if let Source::Tensor(source) = &source {
        source.expect_dtype(x.dtype)?;
        source.expect_rank(x.rank()..=x.rank())?;
        expect_within(index, source, None)?;
    }
    let (x, index, out) = (x.clone(), index.clone(), out.clone());
    kernel(move |data| {
        let to = targets(data, &x, axis, &index, false)?;
        with_lane!(x.dtype.class(), L => {
            let mut values = data.read::<L>(&x)?;
            let given = match &source {
                Source::Tensor(source) => {
                    let part = Part { dims: &index.dims, strides: &source.strides, start: 0 };
                    data.read_part::<L>(source, &part)?
                }
                Source::Scalar(scalar) => vec![scalar.lane(); to.len()],
            };
            for (i, given) in to.into_iter().zip(given) {
                let value = &mut values[i];
                *value = match meets {
                    Meets::Replace => given,
                    Meets::Add => Lane::add(*value, given),
                    Meets::Multiply => Lane::mul(*value, given),
                };
            }
            data.write(&out, &values)
        })
    })
}

/// Scatter by adding, of which source and output are not offered with strides.
pub(crate) fn scatter_add(
    x: &Operand,
    dim: i64,
    index: &Operand,
    source: &Operand,
    out: &Operand,
) -> Outcome<Kernel> {
    source.expect_contiguous()?;
    out.expect_contiguous()?;
    let source = Source::Tensor(source.clone());
    scatter(x, dim, index, source, Meets::Add, out)
}

/// Shape of the slices that an index picks along an axis, and the axis.
fn picked(x: &Operand, dim: i64, index: &Operand) -> Outcome<(usize, Vec<usize>)> {
    index.expect_type(INDEX)?;
    index.expect_rank(0..=1)?;
    let axis = x.axis(dim, "dim")?;
    let mut dims = x.dims.clone();
    if let Some(dim) = dims.get_mut(axis) {
        *dim = index.elements();
    }
    Ok((axis, dims))
}

/// The lengths before an axis, of it, and behind it.
fn around(dims: &[usize], axis: usize) -> [usize; 3] {
    [
        dims[..axis.min(dims.len())].iter().product(),
        dims.get(axis).copied().unwrap_or(1),
        dims.get(axis + 1..).map_or(1, |rest| rest.iter().product()),
    ]
}

/// `out = self[.., index, ..]`.
pub(crate) fn index_select(
    call: &mut Call,
    x: &Operand,
    dim: i64,
    index: &Operand,
    out: &Operand,
) -> Outcome<Kernel> {
    call.distinct();
    let (axis, dims) = picked(x, dim, index)?;
    index.expect_contiguous()?;
    out.expect_contiguous()?;
    expect_like(out, x, &dims)?;
    let (x, index, out) = (x.clone(), index.clone(), out.clone());
    kernel(move |data| {
        let at = data.read::<i64>(&index)?;
        let [before, size, behind] = around(&x.dims, axis);
        check_indices(data, &index, &at, 0..size as i64)?;
        with_lane!(x.dtype.class(), L => {
            let values = data.read::<L>(&x)?;
            let mut taken = Vec::with_capacity(out.elements());
            for outer in 0..before {
                for i in &at {
                    taken.extend_from_slice(&values[(outer * size + *i as usize) * behind..][..behind]);
                }
            }
            data.write(&out, &taken)
        })
    })
}

/// `out = self`, then `out[.., index[i], ..] += alpha·source[.., i, ..]`.
pub(crate) fn index_add(
    x: &Operand,
    dim: i64,
    index: &Operand,
    source: &Operand,
    alpha: Scalar,
    out: &Operand,
) -> Outcome<Kernel> {
    x.expect_type(ARITH)?;
    let (axis, dims) = picked(x, dim, index)?;
    source.expect_dtype(x.dtype)?;
    source.expect_dims(&dims)?;
    source.expect_contiguous()?;
    expect_like(out, x, &x.dims)?;
    let operands = (x.clone(), index.clone(), source.clone(), out.clone());
    kernel(move |data| {
        let (x, index, source, out) = &operands;
        let at = data.read::<i64>(index)?;
        let [before, size, behind] = around(&x.dims, axis);
        check_indices(data, index, &at, 0..size as i64)?;
        with_lane!(x.dtype.class(), L => {
            let (mut values, terms) = (data.read::<L>(x)?, data.read::<L>(source)?);
            let alpha = alpha.lane::<L>();
            for outer in 0..before {
                for (row, i) in at.iter().enumerate() {
                    let to = &mut values[(outer * size + *i as usize) * behind..][..behind];
                    let from = &terms[(outer * at.len() + row) * behind..][..behind];
                    to.iter_mut().zip(from).for_each(|(x, term)| *x = Lane::add(*x, Lane::mul(alpha, *term)));
                }
            }
            data.write(out, &values)
        })
    })
}

/// `out[i] = weight[indices[i]]`.
pub(crate) fn embedding(
    call: &mut Call,
    weight: &Operand,
    indices: &Operand,
    out: &Operand,
) -> Outcome<Kernel> {
    call.distinct();
    weight.expect_rank(2..=2)?;
    indices.expect_type(INDEX)?;
    let mut dims = indices.dims.clone();
    dims.push(weight.dims[1]);
    expect_like(out, weight, &dims)?;
    let (weight, indices, out) = (weight.clone(), indices.clone(), out.clone());
    kernel(move |data| {
        let at = data.read::<i64>(&indices)?;
        let (rows, width) = (weight.dims[0], weight.dims[1]);
        check_indices(data, &indices, &at, 0..rows as i64)?;
        with_lane!(weight.dtype.class(), L => {
            let values = data.read::<L>(&weight)?;
            let mut taken = Vec::with_capacity(out.elements());
            for i in at {
                taken.extend_from_slice(&values[i as usize * width..][..width]);
            }
            data.write(&out, &taken)
        })
    })
}

/// `out[j] = Σ grad[i]` over the `i` of which `indices[i] = j`, without the padding row.
pub(crate) fn embedding_backward(
    call: &mut Call,
    gradient: &Operand,
    indices: &Operand,
    [rows, padding]: [u64; 2],
    by_frequency: bool,
    out: &Operand,
) -> Outcome<Kernel> {
    call.distinct();
    gradient.expect_type(FLT)?;
    indices.expect_type(INTS)?;
    let width = gradient.dims.last().copied().unwrap_or(1);
    if gradient.rank() != indices.rank() + 1 || gradient.dims[..indices.rank()] != indices.dims {
        return refuse(format!(
            "grad has shape {:?}, {:?} of indices and one more axis is expected",
            gradient.dims, indices.dims
        ));
    }
    expect_like(out, gradient, &[rows as usize, width])?;
    let (gradient, indices, out) = (gradient.clone(), indices.clone(), out.clone());
    kernel(move |data| {
        let at = data.read::<i64>(&indices)?;
        check_indices(data, &indices, &at, 0..rows as i64)?;
        let terms = data.read::<f32>(&gradient)?;
        let mut counts = vec![0_u32; rows as usize];
        at.iter().for_each(|i| counts[*i as usize] += 1);
        let mut sums = vec![0.0_f32; rows as usize * width];
        for (i, terms) in at.iter().zip(terms.chunks_exact(width.max(1))) {
            // -1 as an unsigned number stands for no padding row.
            if *i as u64 == padding {
                continue;
            }
            let scale = if by_frequency {
                1.0 / counts[*i as usize] as f32
            } else {
                1.0
            };
            let to = &mut sums[*i as usize * width..][..width];
            to.iter_mut()
                .zip(terms)
                .for_each(|(sum, term)| *sum += scale * term);
        }
        data.write(&out, &sums)
    })
}

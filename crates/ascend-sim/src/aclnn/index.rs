//! Operators that take indices from a tensor. The host cannot check them: a wrong one is an
//! exception on the device.

use std::ops::Range;

use super::call::{Call, Kernel, Operand, kernel};
use super::data::{Data, Part};
use super::descriptor::Scalar;
use super::dtype::{ARITH, BOOL, DataType, FLT, INDEX, INTS, Types};
use super::element::{Lane, Strided, dense_strides, with_lane};
use super::{refuse, tiling};
use crate::codes::Outcome;

/// The types of the row numbers that the gradient of an embedding takes.
const ROWS: Types = Types::of(&[DataType::Float, DataType::Float16, DataType::Double])
    .and(INTS)
    .and(BOOL);

/// Refuses an index that is longer than a tensor, other than along an axis.
fn expect_within(index: &Operand, x: &Operand, except: Option<usize>) -> Outcome {
    let mut axes = 0..index.rank();
    let beyond = axes.find(|axis| Some(*axis) != except && index.dims[*axis] > x.dims[*axis]);
    match beyond {
        None => Ok(()),
        Some(axis) => refuse(format!(
            "{} has shape {:?}, which exceeds {:?} of {} in axis {axis}",
            index.name, index.dims, x.dims, x.name
        )),
    }
}

/// The axis of a gather or scatter, and the check of its index.
fn indexed_axis(x: &Operand, dim: i64, index: &Operand) -> Outcome<usize> {
    let axis = x.axis(dim, "dim")?;
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
    expect_within(index, x, Some(axis))?;
    Ok(axis)
}

/// For each element of an index, the offset of the element of a dense tensor that it selects.
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
    let indices = data.read::<i64>(index)?;
    let mut found = Vec::with_capacity(indices.len());
    let Some(lines) = Strided::new(&index.dims, &strides) else {
        return Ok(found);
    };
    lines.offsets(|offset| {
        let i = indices[found.len()];
        let i = if negative && i < 0 { i + size } else { i };
        found.push(offset.wrapping_add((i * step) as usize));
    });
    let least = if negative { -size } else { 0 };
    expect_indices(data, index, &indices, least..size)?;
    Ok(found)
}

/// Reports an index with which a device would read or write outside of a tensor.
fn expect_indices(
    data: &Data<'_, '_>,
    index: &Operand,
    values: &[i64],
    range: Range<i64>,
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
    x: Operand,
    dim: i64,
    index: Operand,
    out: Operand,
) -> Outcome<Kernel> {
    call.distinct();
    let axis = indexed_axis(&x, dim, &index)?;
    out.expect_like(&x, &index.dims)?;
    if !index.is_empty() && x.dims.get(axis) == Some(&0) {
        return refuse(format!(
            "{} of shape {:?} has nothing to select in axis {axis}",
            x.name, x.dims
        ));
    }
    kernel(move |data| {
        let from = targets(data, &x, axis, &index, true)?;
        with_lane!(x.dtype.class(), L => {
            let values = data.read::<L>(&x)?;
            let taken: Vec<L> = from.iter().map(|i| values[*i]).collect();
            data.write(&out, &taken)
        })
    })
}

/// The effect of a scatter on the element that it meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meets {
    Replace,
    Add,
    Multiply,
}

impl Meets {
    /// The meaning of `reduce`.
    pub(crate) fn from_code(reduce: i64) -> Outcome<Self> {
        match reduce {
            0 => Ok(Self::Replace),
            1 => Ok(Self::Add),
            2 => Ok(Self::Multiply),
            _ => refuse(format!(
                "reduce is {reduce}, 0 (replace), 1 (add) or 2 (multiply) is expected"
            )),
        }
    }
}

/// `out = self`, then `out[.., index[.., i, ..], ..]` meets `src[.., i, ..]`.
pub(crate) fn scatter(
    x: Operand,
    dim: i64,
    index: Operand,
    source: Operand,
    meets: Meets,
    out: Operand,
) -> Outcome<Kernel> {
    x.expect_type(ARITH)?;
    let axis = indexed_axis(&x, dim, &index)?;
    out.expect_like(&x, &x.dims)?;
    source.expect_dtype(x.dtype)?;
    source.expect_rank(x.rank()..=x.rank())?;
    expect_within(&index, &source, None)?;
    kernel(move |data| {
        let to = targets(data, &x, axis, &index, false)?;
        with_lane!(x.dtype.class(), L => {
            let mut values = data.read::<L>(&x)?;
            let part = Part::new(&index.dims, &source.strides, 0);
            for (i, given) in to.into_iter().zip(data.read_part::<L>(&source, &part)?) {
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

/// Scatters by adding; strided sources and outputs are not offered.
pub(crate) fn scatter_add(
    x: Operand,
    dim: i64,
    index: Operand,
    source: Operand,
    out: Operand,
) -> Outcome<Kernel> {
    source.expect_contiguous()?;
    out.expect_contiguous()?;
    scatter(x, dim, index, source, Meets::Add, out)
}

/// The axis of an index with one axis, and the shape of the slices that it selects.
fn selected(x: &Operand, dim: i64, index: &Operand) -> Outcome<(usize, Vec<usize>)> {
    index.expect_type(INDEX)?;
    index.expect_rank(0..=1)?;
    let axis = x.axis(dim, "dim")?;
    if x.rank() == 0 && index.elements() != 1 {
        return refuse(format!(
            "{} has {} elements, {} of rank 0 takes one",
            index.name,
            index.elements(),
            x.name
        ));
    }
    let mut dims = x.dims.clone();
    if let Some(dim) = dims.get_mut(axis) {
        *dim = index.elements();
    }
    Ok((axis, dims))
}

/// The product of the lengths before an axis, its length, and the product of those after it.
fn around(dims: &[usize], axis: usize) -> [usize; 3] {
    [
        dims[..axis.min(dims.len())].iter().product(),
        dims.get(axis).copied().unwrap_or(1),
        dims.get(axis + 1..).map_or(1, |rest| rest.iter().product()),
    ]
}

/// `out[.., i, ..] = self[.., index[i], ..]`.
pub(crate) fn index_select(
    call: &mut Call,
    x: Operand,
    dim: i64,
    index: Operand,
    out: Operand,
) -> Outcome<Kernel> {
    call.distinct();
    let (axis, dims) = selected(&x, dim, &index)?;
    index.expect_contiguous()?;
    out.expect_contiguous()?;
    out.expect_like(&x, &dims)?;
    select_rows(x, axis, index, out)
}

/// `out[i] = weight[indices[i]]`.
pub(crate) fn embedding(
    call: &mut Call,
    weight: Operand,
    indices: Operand,
    out: Operand,
) -> Outcome<Kernel> {
    call.distinct();
    weight.expect_type(ARITH)?;
    indices.expect_type(INDEX)?;
    out.expect_dtype(weight.dtype)?;
    // The vendor checks the shape of a row where it copies the rows.
    let rank = indices.rank();
    out.expect_rank(rank + 1..=rank + 1)?;
    let mut dims = indices.dims.clone();
    dims.push(out.dims[rank]);
    out.expect_dims(&dims)?;
    dims.truncate(rank);
    dims.extend(weight.dims.iter().skip(1));
    out.expect_copy_of(&weight, weight.dtype, &dims)?;
    select_rows(weight, 0, indices, out)
}

/// Writes, for each index, the elements of `x` that have it along an axis.
fn select_rows(x: Operand, axis: usize, index: Operand, out: Operand) -> Outcome<Kernel> {
    kernel(move |data| {
        let indices = data.read::<i64>(&index)?;
        let [before, size, after] = around(&x.dims, axis);
        expect_indices(data, &index, &indices, 0..size as i64)?;
        with_lane!(x.dtype.class(), L => {
            let values = data.read::<L>(&x)?;
            let mut taken = Vec::with_capacity(out.elements());
            for outer in 0..before {
                for i in &indices {
                    let row = outer * size + *i as usize;
                    taken.extend_from_slice(&values[row * after..][..after]);
                }
            }
            data.write(&out, &taken)
        })
    })
}

/// `out = self`, then `out[.., index[i], ..] += alpha·source[.., i, ..]`.
pub(crate) fn index_add(
    x: Operand,
    dim: i64,
    index: Operand,
    source: Operand,
    alpha: Scalar,
    out: Operand,
) -> Outcome<Kernel> {
    x.expect_type(ARITH)?;
    let (axis, dims) = selected(&x, dim, &index)?;
    source.expect_like(&x, &dims)?;
    source.expect_contiguous()?;
    out.expect_like(&x, &x.dims)?;
    kernel(move |data| {
        let indices = data.read::<i64>(&index)?;
        let [before, size, after] = around(&x.dims, axis);
        expect_indices(data, &index, &indices, 0..size as i64)?;
        with_lane!(x.dtype.class(), L => {
            let (mut values, terms) = (data.read::<L>(&x)?, data.read::<L>(&source)?);
            let alpha = alpha.lane::<L>(x.dtype);
            for outer in 0..before {
                for (row, i) in indices.iter().enumerate() {
                    let to = &mut values[(outer * size + *i as usize) * after..][..after];
                    let from = &terms[(outer * indices.len() + row) * after..][..after];
                    for (x, term) in to.iter_mut().zip(from) {
                        *x = Lane::add(*x, Lane::mul(alpha, *term));
                    }
                }
            }
            data.write(&out, &values)
        })
    })
}

/// `out[j] = Σ grad[i]` over the `i` with `indices[i] = j`, without the padding row.
pub(crate) fn embedding_backward(
    call: &mut Call,
    gradient: Operand,
    indices: Operand,
    [rows, padding]: [u64; 2],
    by_frequency: bool,
    out: Operand,
) -> Outcome<Kernel> {
    call.distinct();
    gradient.expect_type(FLT)?;
    indices.expect_type(ROWS)?;
    let width = gradient.dims.last().copied().unwrap_or(1);
    let lead = gradient.rank().saturating_sub(1);
    if gradient.dims[..lead].iter().product::<usize>() != indices.elements() {
        return refuse(format!(
            "grad has shape {:?}, {} rows, one for each element of indices, are expected",
            gradient.dims,
            indices.elements()
        ));
    }
    out.expect_like(&gradient, &[rows as usize, width])?;
    kernel(move |data| {
        let at = data.read::<i64>(&indices)?;
        expect_indices(data, &indices, &at, 0..rows as i64)?;
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
            for (sum, term) in to.iter_mut().zip(terms) {
                *sum += scale * term;
            }
        }
        data.write(&out, &sums)
    })
}

/// The most places that a token may have.
const MOST_PLACES: i64 = 512;

/// The factor of each place of a token.
pub(crate) enum Weights {
    /// `[tokens, places]`.
    Given(Operand),
    /// 1, with the number of places.
    Ones(i64),
}

impl Weights {
    fn given(&self) -> Option<&Operand> {
        match self {
            Self::Given(probs) => Some(probs),
            Self::Ones(_) => None,
        }
    }

    /// Checks the rows that experts had, `permuted`, against their tokens. Returns the places of a
    /// token.
    ///
    /// The vendor's tiling refuses too many places and empty tensors, and that in the gradient of
    /// Unpermute only. The other shapes are the documented ones: nothing checks them, and with
    /// different ones the kernels reach other memory. Fewer or more rows than places are taken.
    fn expect_fit(
        &self,
        [permuted, tokens, indices]: [&Operand; 3],
        (is_padded, restored): (bool, Vec<i64>),
    ) -> Outcome<usize> {
        if is_padded || !restored.is_empty() {
            return refuse(format!(
                "paddedMode is {is_padded} and restoreShapeOptional {restored:?}, false and null \
                 are expected"
            ));
        }
        permuted.expect_type(FLT)?;
        tokens.expect_dtype(permuted.dtype)?;
        indices.expect_dtype(DataType::Int32)?;
        let places = match self {
            Self::Ones(places) => *places,
            Self::Given(probs) => {
                probs.expect_type(FLT)?;
                tiling(probs.expect_rank(2..=2))?;
                probs.dims[1] as i64
            }
        };
        for (tensor, rank) in [(permuted, 2), (tokens, 2), (indices, 1)] {
            tiling(tensor.expect_rank(rank..=rank))?;
            if tensor.is_empty() {
                return tiling(refuse(format!("{} has no elements", tensor.name)));
            }
        }
        if !(1..=MOST_PLACES).contains(&places) {
            return tiling(refuse(format!(
                "a token has {places} places, 1 to {MOST_PLACES} are expected"
            )));
        }
        let (count, places) = (tokens.dims[0], places as usize);
        tiling(indices.expect_dims(&[count.saturating_mul(places)]))?;
        tiling(tokens.expect_dims(&[count, permuted.dims[1]]))?;
        if let Some(probs) = self.given() {
            tiling(probs.expect_dims(&[count, places]))?;
        }
        Ok(places)
    }
}

/// The row of each place; none where there are not as many rows, which drops the place.
///
/// The documentation excludes a row with two places: in the gradient the later one wins.
fn kept_rows(data: &Data<'_, '_>, indices: &Operand, rows: usize) -> Outcome<Vec<Option<usize>>> {
    let named = data.read::<i64>(indices)?;
    expect_indices(data, indices, &named, 0..i64::from(i32::MAX) + 1)?;
    let mut taken = vec![false; rows];
    let mut kept = Vec::with_capacity(named.len());
    for row in named {
        let row = row as usize;
        let Some(taken) = taken.get_mut(row) else {
            kept.push(None);
            continue;
        };
        if std::mem::replace(taken, true) {
            return Err(data.exception(format!("{} has row {row} twice", indices.name)));
        }
        kept.push(Some(row));
    }
    Ok(kept)
}

/// `out[t] = Σ weights[t, k]·permuted[indices[t·places + k]]`: tokens from the rows that experts
/// had of them.
///
/// Source: `moe/moe_token_unpermute` and `moe/moe_token_permute_grad` of hicann/ops-transformer at
/// c29bc1069d32: their `README.md`, types in `op_host/*_def.cpp`, and the sums of
/// `op_kernel/moe_token_unpermute.h`, which both have.
pub(crate) fn unpermute(
    call: &mut Call,
    permuted: Operand,
    indices: Operand,
    weights: Weights,
    padding: (bool, Vec<i64>),
    out: Operand,
) -> Outcome<Kernel> {
    call.distinct();
    let places = weights.expect_fit([&permuted, &out, &indices], padding)?;
    out.expect_contiguous()?;
    kernel(move |data| {
        let width = permuted.dims[1];
        let rows = kept_rows(data, &indices, permuted.dims[0])?;
        let values = data.read::<f32>(&permuted)?;
        let factors = weights.given().map(|probs| data.read::<f32>(probs));
        let factors = factors.transpose()?;
        let mut sums = vec![0.0_f32; out.elements()];
        for (place, row) in rows.into_iter().enumerate() {
            let factor = factors.as_ref().map_or(1.0, |factors| factors[place]);
            // The kernel leaves a place with a factor of 0 out, even if its row is not finite.
            let Some(row) = row.filter(|_| factor != 0.0) else {
                continue;
            };
            let to = &mut sums[place / places * width..][..width];
            for (sum, x) in to.iter_mut().zip(&values[row * width..]) {
                let term = x * factor;
                // The first place is stored and not added, which keeps its -0.
                *sum = if place % places == 0 {
                    term
                } else {
                    *sum + term
                };
            }
        }
        data.write(&out, &sums)
    })
}

/// The gradients of [`unpermute`] by the rows and, where they were given, by the weights.
///
/// Source: `moe/moe_token_unpermute_grad` of hicann/ops-transformer at c29bc1069d32: its
/// `README.md`, types in `op_host/moe_token_unpermute_grad_def.cpp`, limits in
/// `op_host/moe_token_unpermute_grad_tiling.cpp`, and `op_kernel/*_prob_none.h` and
/// `*_prob_not_none.h`.
pub(crate) fn unpermute_backward(
    call: &mut Call,
    [permuted, gradient, indices]: [Operand; 3],
    weights: Weights,
    padding: (bool, Vec<i64>),
    [to_permuted, to_probs]: [Operand; 2],
) -> Outcome<Kernel> {
    call.distinct();
    let places = weights.expect_fit([&permuted, &gradient, &indices], padding)?;
    to_permuted.expect_dtype(permuted.dtype)?;
    tiling(to_permuted.expect_dims(&permuted.dims))?;
    // Without probs it is mandatory and nothing is written to it.
    to_probs.expect_type(FLT)?;
    if let Some(probs) = weights.given() {
        to_probs.expect_dtype(probs.dtype)?;
        tiling(to_probs.expect_dims(&probs.dims))?;
    }
    to_permuted.expect_contiguous()?;
    to_probs.expect_contiguous()?;
    kernel(move |data| {
        let width = permuted.dims[1];
        let rows = kept_rows(data, &indices, permuted.dims[0])?;
        let slopes = data.read::<f32>(&gradient)?;
        let given = match weights.given() {
            Some(probs) => Some((data.read::<f32>(probs)?, data.read::<f32>(&permuted)?)),
            None => None,
        };
        // The kernel reads zeros in place of a dropped row.
        let dropped = vec![0.0; width];
        let mut sums = Vec::with_capacity(rows.len());
        for (place, row) in rows.into_iter().enumerate() {
            let slope = &slopes[place / places * width..][..width];
            if let Some((_, values)) = &given {
                let x = row.map_or(&dropped[..], |row| &values[row * width..]);
                let products: Vec<f32> = slope.iter().zip(x).map(|(g, x)| x * g).collect();
                sums.push(Lane::sum(&products));
            }
            // A row without a place keeps what its memory held.
            if let Some(row) = row {
                let factor = given.as_ref().map_or(1.0, |(factors, _)| factors[place]);
                let scaled: Vec<f32> = slope.iter().map(|g| g * factor).collect();
                let (dims, start) = ([width], (row * width) as i64);
                data.write_part(&to_permuted, &Part::new(&dims, &[1], start), &scaled)?;
            }
        }
        match given {
            Some(_) => data.write(&to_probs, &sums),
            None => Ok(()),
        }
    })
}

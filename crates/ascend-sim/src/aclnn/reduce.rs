//! Operators along axes: sums, extremes, running sums.
//!
//! Each reads its tensor with the reduced axes last and works on rows.

use super::call::{Call, Kernel, Operand, kernel};
use super::data::cast;
use super::dtype::{ANY, ARITH, DataType, FLT, INDEX, NUMBERS, Types, expect_castable};
use super::element::{Lane, with_lane};
use super::refuse;
use crate::codes::Outcome;

/// The reduction of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fold {
    Sum,
    Mean,
    Max,
    Min,
    Prod,
    Any,
    All,
}

impl Fold {
    /// One number of a row: floats accumulate in f64, integers in i64.
    fn row<L: Lane>(self, row: &[L]) -> L {
        let extreme = |f: fn(L, L) -> L| row.iter().copied().reduce(f).unwrap_or_default();
        match self {
            Self::Sum => L::sum(row),
            Self::Mean => {
                let total: f64 = row.iter().map(|x| x.to_f64()).sum();
                L::from_f64(total / row.len() as f64)
            }
            Self::Max => extreme(L::larger),
            Self::Min => extreme(L::smaller),
            Self::Prod => row.iter().fold(L::one(), |product, x| product.mul(*x)),
            Self::Any => L::from_i64(i64::from(row.iter().any(|x| x.truth()))),
            Self::All => L::from_i64(i64::from(row.iter().all(|x| x.truth()))),
        }
    }
}

/// The order of the axes with the reduced ones last, and the length of a row.
pub(crate) fn rows_last(x: &Operand, axes: &[usize]) -> (Vec<usize>, usize) {
    let kept = (0..x.rank()).filter(|axis| !axes.contains(axis));
    let order = kept.chain(axes.iter().copied()).collect();
    (order, axes.iter().map(|axis| x.dims[*axis]).product())
}

/// One axis, and the list of it, which is empty for a tensor of rank 0.
pub(crate) fn axis_alone(x: &Operand, dim: i64) -> Outcome<(usize, Vec<usize>)> {
    let axis = x.axis(dim, "dim")?;
    Ok((axis, (0..x.rank()).filter(|i| *i == axis).collect()))
}

/// The shape without the reduced axes, or with 1 instead of each.
fn reduced_dims(x: &Operand, axes: &[usize], keep: bool) -> Vec<usize> {
    let kept = (0..x.rank()).filter(|axis| keep || !axes.contains(axis));
    let size = |axis: usize| {
        if axes.contains(&axis) {
            1
        } else {
            x.dims[axis]
        }
    };
    kept.map(size).collect()
}

/// `out = f(rows of self)`, computed in the given type.
fn fold_rows(
    f: Fold,
    x: Operand,
    axes: Vec<usize>,
    computed: DataType,
    out: Operand,
) -> Outcome<Kernel> {
    kernel(move |data| {
        let (order, row) = rows_last(&x, &axes);
        with_lane!(computed.class(), L => {
            let values = cast(data.read_order::<L>(&x, &order)?, x.dtype, computed);
            let results: Vec<L> = if row == 0 {
                vec![f.row::<L>(&[]); out.elements()]
            } else {
                values.chunks_exact(row).map(|row| f.row(row)).collect()
            };
            data.write_cast(&out, results, computed)
        })
    })
}

/// Sum, mean and product: converts to `dtype` and reduces.
pub(crate) fn fold_as(
    f: Fold,
    x: Operand,
    dims: &[i64],
    keep: bool,
    dtype: DataType,
    out: Operand,
) -> Outcome<Kernel> {
    let (from, to) = match f {
        Fold::Mean => (NUMBERS, NUMBERS),
        Fold::Prod => (ARITH, ANY),
        _ => (ARITH, ARITH),
    };
    x.expect_type(from)?;
    out.expect_type(to)?;
    if f == Fold::Mean {
        if !NUMBERS.has(dtype) {
            let expected = NUMBERS.list();
            return refuse(format!(
                "dtype is {dtype:?}, one of {expected:?} is expected"
            ));
        }
        expect_castable(x.dtype, dtype, "dtype")?;
        expect_castable(dtype, out.dtype, out.name)?;
    } else {
        out.expect_dtype(dtype)?;
    }
    let axes = x.axes(dims, "dim")?;
    expect_reduced(f, &out, &reduced_dims(&x, &axes, keep))?;
    // f16 and bf16 are summed in f32 or better, also where the documentation does not state it.
    fold_rows(f, x, axes, dtype, out)
}

/// Refuses another shape, except that some operators take a single number with any shape.
fn expect_reduced(f: Fold, out: &Operand, dims: &[usize]) -> Outcome {
    let single = |dims: &[usize]| dims.iter().product::<usize>() == 1;
    let loose = matches!(f, Fold::Sum | Fold::Mean | Fold::Any);
    if loose && single(&out.dims) && single(dims) {
        return Ok(());
    }
    out.expect_dims(dims)
}

/// The product along one axis, which has to exist.
pub(crate) fn product(
    x: Operand,
    dim: i64,
    keep: bool,
    dtype: DataType,
    out: Operand,
) -> Outcome<Kernel> {
    let axis = x.axis(dim, "dim")? as i64;
    fold_as(Fold::Prod, x, &[axis], keep, dtype, out)
}

/// Extremes, which have the input's type, and truth of any or all.
pub(crate) fn fold(f: Fold, x: Operand, dims: &[i64], keep: bool, out: Operand) -> Outcome<Kernel> {
    let extreme = matches!(f, Fold::Max | Fold::Min);
    x.expect_type(ARITH)?;
    if extreme {
        out.expect_dtype(x.dtype)?;
    } else {
        out.expect_type(Types::of(&[DataType::Bool, DataType::Uint8]))?;
    }
    let mut dims = dims.to_vec();
    if f == Fold::Any {
        for dim in &mut dims {
            *dim = x.axis(*dim, "dim")? as i64;
        }
        dims.sort_unstable();
        dims.dedup();
    }
    let axes = x.axes(&dims, "dim")?;
    expect_reduced(f, &out, &reduced_dims(&x, &axes, keep))?;
    if extreme && axes.iter().any(|axis| x.dims[*axis] == 0) {
        return refuse(format!("{} of shape {:?} has no extreme", x.name, x.dims));
    }
    let dtype = x.dtype;
    fold_rows(f, x, axes, dtype, out)
}

/// The first index of a row's extreme; NaN counts as more extreme than all.
fn extreme_index<L: Lane>(row: &[L], f: Fold) -> usize {
    let mut best = 0;
    for (i, x) in row.iter().enumerate().skip(1) {
        let before = row[best];
        let better = if f == Fold::Max {
            *x > before
        } else {
            *x < before
        };
        if !before.is_nan() && (better || x.is_nan()) {
            best = i;
        }
    }
    best
}

/// Extremes along an axis with their indices, or the indices alone.
pub(crate) fn extreme(
    f: Fold,
    x: Operand,
    dim: i64,
    keep: bool,
    out: Option<Operand>,
    indices: Operand,
) -> Outcome<Kernel> {
    use DataType::*;
    x.expect_type(match out {
        Some(_) => FLT.and(Types::of(&[Int64, Bool])),
        None => NUMBERS,
    })?;
    x.expect_rank(usize::from(out.is_some())..=8)?;
    indices.expect_type(INDEX)?;
    let (axis, axes) = axis_alone(&x, dim)?;
    let dims = reduced_dims(&x, &axes, keep);
    indices.expect_dims(&dims)?;
    if let Some(out) = &out {
        out.expect_like(&x, &dims)?;
    }
    if x.dims.get(axis) == Some(&0) {
        return refuse(format!("{} of shape {:?} has no extreme", x.name, x.dims));
    }
    kernel(move |data| {
        let (order, row) = rows_last(&x, &axes);
        with_lane!(x.dtype.class(), L => {
            let values = data.read_order::<L>(&x, &order)?;
            let rows = values.chunks_exact(row);
            let found: Vec<usize> = rows.clone().map(|row| extreme_index(row, f)).collect();
            if let Some(out) = &out {
                let best: Vec<L> = found.iter().zip(rows).map(|(i, row)| row[*i]).collect();
                data.write(out, &best)?;
            }
            let found: Vec<i64> = found.into_iter().map(|i| i as i64).collect();
            data.write(&indices, &found)
        })
    })
}

/// Running sums along an axis.
pub(crate) fn cumulate(
    call: &mut Call,
    x: Operand,
    dim: i64,
    dtype: DataType,
    out: Operand,
) -> Outcome<Kernel> {
    call.distinct();
    x.expect_type(ARITH)?;
    out.expect_type(NUMBERS)?;
    out.expect_dtype(dtype)?;
    out.expect_dims(&x.dims)?;
    let (_, axes) = axis_alone(&x, dim)?;
    kernel(move |data| {
        let (order, row) = rows_last(&x, &axes);
        with_lane!(dtype.class(), L => {
            let mut values = cast(data.read_order::<L>(&x, &order)?, x.dtype, dtype);
            for row in values.chunks_exact_mut(row.max(1)) {
                let mut total = L::default();
                let mut precise = 0.0;
                for x in row {
                    total = total.add(*x);
                    precise += x.to_f64();
                    *x = if dtype.is_float() { L::from_f64(precise) } else { total };
                }
            }
            data.write_order(&out, &order, &values)
        })
    })
}

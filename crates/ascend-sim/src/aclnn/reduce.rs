//! Operators along axes: sums, extremes, running sums.
//!
//! Each reads its tensor with the reduced axes last and works on rows.

use super::call::{Call, Kernel, Operand, kernel};
use super::dtype::{ARITH, BOOL, DataType, FLOATS, FLT, INDEX, INTS, Types, expect_castable};
use super::element::{Lane, with_lane};
use super::refuse;
use crate::codes::Outcome;

/// What a row becomes.
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

    fn types(self) -> Types {
        match self {
            Self::Max | Self::Min => FLOATS.and(INTS).and(BOOL),
            _ => ARITH,
        }
    }
}

/// The axes of a tensor: those that stay, then those that are reduced; how long a row is.
pub(crate) fn rows_last(x: &Operand, axes: &[usize]) -> (Vec<usize>, usize) {
    let kept = (0..x.rank()).filter(|axis| !axes.contains(axis));
    let order = kept.chain(axes.iter().copied()).collect();
    (order, axes.iter().map(|axis| x.dims[*axis]).product())
}

/// The shape without the reduced axes, or with 1 in their place.
pub(crate) fn reduced_dims(x: &Operand, axes: &[usize], keep: bool) -> Vec<usize> {
    (0..x.rank())
        .filter(|axis| keep || !axes.contains(axis))
        .map(|axis| {
            if axes.contains(&axis) {
                1
            } else {
                x.dims[axis]
            }
        })
        .collect()
}

/// `out = f(rows of self)`, computed in the given type.
fn fold_rows(
    f: Fold,
    x: &Operand,
    axes: Vec<usize>,
    computed: DataType,
    out: &Operand,
) -> Outcome<Kernel> {
    let (x, out) = (x.clone(), out.clone());
    kernel(move |data| {
        let (order, row) = rows_last(&x, &axes);
        with_lane!(computed.class(), L => {
            let values = data.read_order::<L>(&x, &order)?;
            let count = out.elements();
            let results: Vec<L> = if row == 0 {
                vec![f.row::<L>(&[]); count]
            } else {
                values.chunks_exact(row).map(|row| f.row(row)).collect()
            };
            data.write(&out, &results)
        })
    })
}

/// Sum and mean: converts to `dtype`, which is the output's, and reduces.
pub(crate) fn fold_as(
    f: Fold,
    x: &Operand,
    dims: &[i64],
    keep: bool,
    dtype: DataType,
    out: &Operand,
) -> Outcome<Kernel> {
    x.expect_type(f.types())?;
    out.expect_dtype(dtype)?;
    if f == Fold::Mean {
        out.expect_type(FLOATS)?;
    }
    let axes = x.axes(dims, "dim")?;
    out.expect_dims(&reduced_dims(x, &axes, keep))?;
    // Halves are summed in f32 or better, also where the vendor says nothing.
    fold_rows(f, x, axes, dtype, out)
}

/// Extremes: the output has the input's type.
pub(crate) fn fold(
    f: Fold,
    x: &Operand,
    dims: &[i64],
    keep: bool,
    out: &Operand,
) -> Outcome<Kernel> {
    x.expect_type(f.types())?;
    if matches!(f, Fold::Any | Fold::All) {
        out.expect_type(Types::of(&[DataType::Bool, DataType::Uint8]))?;
    } else {
        out.expect_dtype(x.dtype)?;
    }
    let axes = x.axes(dims, "dim")?;
    out.expect_dims(&reduced_dims(x, &axes, keep))?;
    if matches!(f, Fold::Max | Fold::Min) && axes.iter().any(|axis| x.dims[*axis] == 0) {
        return refuse(format!("{} of shape {:?} has no extreme", x.name, x.dims));
    }
    fold_rows(f, x, axes, x.dtype, out)
}

/// The extreme of a whole tensor.
pub(crate) fn whole_extreme(f: Fold, x: &Operand, out: &Operand) -> Outcome<Kernel> {
    if out.elements() != 1 {
        out.expect_dims(&[])?;
    }
    x.expect_type(f.types())?;
    if x.is_empty() {
        return refuse(format!("{} of shape {:?} has no extreme", x.name, x.dims));
    }
    expect_castable(x.dtype, out.dtype, out.name)?;
    fold_rows(f, x, (0..x.rank()).collect(), x.dtype, out)
}

/// The product of a whole tensor, in `dtype`.
pub(crate) fn whole_product(x: &Operand, dtype: DataType, out: &Operand) -> Outcome<Kernel> {
    x.expect_type(ARITH)?;
    out.expect_dtype(dtype)?;
    if out.elements() != 1 {
        out.expect_dims(&[1])?;
    }
    fold_rows(Fold::Prod, x, (0..x.rank()).collect(), dtype, out)
}

/// The products along one axis.
pub(crate) fn product(
    x: &Operand,
    dim: i64,
    keep: bool,
    dtype: DataType,
    out: &Operand,
) -> Outcome<Kernel> {
    fold_as(
        Fold::Prod,
        x,
        &[x.axis(dim, "dim")? as i64],
        keep,
        dtype,
        out,
    )
}

/// The first position of a row's extreme; NaN counts as more extreme than all.
fn position<L: Lane>(row: &[L], f: Fold) -> usize {
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

/// Extremes along an axis with their positions, or the positions alone.
pub(crate) fn extreme(
    f: Fold,
    x: &Operand,
    dim: i64,
    keep: bool,
    out: Option<&Operand>,
    indices: &Operand,
) -> Outcome<Kernel> {
    use DataType::*;
    x.expect_type(match out {
        Some(_) => FLT.and(Types::of(&[Int64, Bool])),
        None => FLOATS.and(INTS),
    })?;
    x.expect_rank(usize::from(out.is_some())..=8)?;
    indices.expect_type(INDEX)?;
    let axis = x.axis(dim, "dim")?;
    let axes: Vec<usize> = (0..x.rank()).filter(|other| *other == axis).collect();
    let dims = reduced_dims(x, &axes, keep);
    indices.expect_dims(&dims)?;
    if let Some(out) = out {
        out.expect_dtype(x.dtype)?;
        out.expect_dims(&dims)?;
    }
    if x.dims.get(axis) == Some(&0) {
        return refuse(format!("{} of shape {:?} has no extreme", x.name, x.dims));
    }
    let (x, out, indices) = (x.clone(), out.cloned(), indices.clone());
    kernel(move |data| {
        let (order, row) = rows_last(&x, &axes);
        with_lane!(x.dtype.class(), L => {
            let values = data.read_order::<L>(&x, &order)?;
            let found: Vec<usize> = values.chunks_exact(row).map(|row| position(row, f)).collect();
            if let Some(out) = &out {
                let best: Vec<L> = found.iter().zip(values.chunks_exact(row)).map(|(i, row)| row[*i]).collect();
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
    x: &Operand,
    dim: i64,
    dtype: DataType,
    out: &Operand,
) -> Outcome<Kernel> {
    call.distinct();
    x.expect_type(ARITH)?;
    out.expect_dtype(dtype)?;
    out.expect_dims(&x.dims)?;
    let axis = x.axis(dim, "dim")?;
    let axes: Vec<usize> = (0..x.rank()).filter(|other| *other == axis).collect();
    let (x, out) = (x.clone(), out.clone());
    kernel(move |data| {
        let (order, row) = rows_last(&x, &axes);
        with_lane!(dtype.class(), L => {
            let mut values = data.read_order::<L>(&x, &order)?;
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

//! Matrix products, accumulated in f32.

use super::call::{Call, Kernel, Operand, kernel};
use super::data::{Data, Part, spread};
use super::descriptor::Scalar;
use super::dtype::{DataType, FLT, promote};
use super::refuse;
use crate::codes::Outcome;
use half::f16;

/// Columns of the second matrix that one pass works on: a block of 64 rows stays in the cache.
const BLOCK_COLUMNS: usize = 256;
const BLOCK_DEPTH: usize = 64;

/// Adds the product of two dense matrices, `[rows, depth]` and `[depth, columns]`.
pub(crate) fn multiply_add(
    a: &[f32],
    b: &[f32],
    out: &mut [f32],
    [rows, depth, columns]: [usize; 3],
) {
    for first in (0..columns).step_by(BLOCK_COLUMNS) {
        let width = BLOCK_COLUMNS.min(columns - first);
        for top in (0..depth).step_by(BLOCK_DEPTH) {
            let bottom = depth.min(top + BLOCK_DEPTH);
            for row in 0..rows {
                let sums = &mut out[row * columns + first..][..width];
                for k in top..bottom {
                    let factor = a[row * depth + k];
                    let terms = &b[k * columns + first..][..width];
                    for (sum, term) in sums.iter_mut().zip(terms) {
                        *sum += factor * term;
                    }
                }
            }
        }
    }
}

/// Which of the matrix operators checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Product {
    /// Any rank to 6, vectors and batches broadcast.
    General,
    /// Two axes.
    Matrix,
    /// Three axes, a batch of 1 broadcasts.
    Batch,
}

/// How f32 inputs are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Inputs {
    Kept,
    Halved,
}

/// What cubeMathType allows.
fn inputs(kind: Product, code: i8, dtype: DataType) -> Outcome<Inputs> {
    let most = if kind == Product::Batch { 3 } else { 4 };
    match (code, dtype) {
        (2, DataType::Bf16) => {
            refuse("cubeMathType is 2 (USE_FP16), which is not offered for Bf16")
        }
        (2, DataType::Float) => Ok(Inputs::Halved),
        (3, DataType::Float16 | DataType::Bf16) if kind != Product::Batch => refuse(format!(
            "cubeMathType is 3 (USE_HF32), which takes Float and not {dtype:?}"
        )),
        // The shorter mantissa of HF32 is not modelled: its rounding is not documented.
        _ if (0..=most).contains(&code) => Ok(Inputs::Kept),
        _ => refuse(format!(
            "cubeMathType is {code}, one of 0 to {most} is expected"
        )),
    }
}

/// The type of a product; bfloat16 goes with itself only.
pub(crate) fn product_type(a: &Operand, b: &Operand) -> Outcome<DataType> {
    a.expect_type(FLT)?;
    b.expect_type(FLT)?;
    if (a.dtype == DataType::Bf16) != (b.dtype == DataType::Bf16) {
        return refuse(format!(
            "{} is {:?} and {} is {:?}: Bf16 is only multiplied with Bf16",
            a.name, a.dtype, b.name, b.dtype
        ));
    }
    promote(a.dtype, b.dtype)
}

/// Two operands as batches of matrices.
#[derive(Clone)]
struct Shape {
    batch: Vec<usize>,
    a: Side,
    b: Side,
    /// The output's dimensions.
    out: Vec<usize>,
}

/// A matrix operand, with an axis of 1 where it is a vector.
#[derive(Clone)]
struct Side {
    dims: Vec<usize>,
    strides: Vec<i64>,
    rows: usize,
    columns: usize,
}

fn side(x: &Operand, as_row: bool) -> Side {
    let (mut dims, mut strides) = (x.dims.clone(), x.strides.clone());
    if dims.len() == 1 {
        let at = usize::from(!as_row);
        dims.insert(at, 1);
        strides.insert(at, 0);
    }
    let rank = dims.len();
    Side {
        rows: dims[rank - 2],
        columns: dims[rank - 1],
        dims,
        strides,
    }
}

fn shape(kind: Product, a: &Operand, b: &Operand) -> Outcome<Shape> {
    let ranks = match kind {
        Product::General => 1..=6,
        Product::Matrix => 2..=2,
        Product::Batch => 3..=3,
    };
    a.expect_rank(ranks.clone())?;
    b.expect_rank(ranks)?;
    let (left, right) = (side(a, true), side(b, false));
    if left.columns != right.rows {
        return refuse(format!(
            "{} of {:?} and {} of {:?} do not multiply: {} columns, {} rows",
            a.name, a.dims, b.name, b.dims, left.columns, right.rows
        ));
    }
    let (la, lb) = (
        &left.dims[..left.dims.len() - 2],
        &right.dims[..right.dims.len() - 2],
    );
    let rank = la.len().max(lb.len());
    let mut batch = vec![1; rank];
    for dims in [la, lb] {
        let lead = rank - dims.len();
        for (target, dim) in batch[lead..].iter_mut().zip(dims) {
            if *target == 1 {
                *target = *dim;
            } else if *dim != 1 && dim != target {
                return refuse(format!(
                    "the batches of {} of {:?} and {} of {:?} do not broadcast",
                    a.name, a.dims, b.name, b.dims
                ));
            }
        }
    }
    let mut out = batch.clone();
    if a.rank() > 1 {
        out.push(left.rows);
    }
    if b.rank() > 1 {
        out.push(right.columns);
    }
    Ok(Shape {
        batch,
        a: left,
        b: right,
        out,
    })
}

impl Shape {
    fn matrix(&self) -> [usize; 3] {
        [self.a.rows, self.a.columns, self.b.columns]
    }

    /// The product, one matrix after the other.
    fn multiply(
        &self,
        data: &Data<'_, '_>,
        a: &Operand,
        b: &Operand,
        inputs: Inputs,
    ) -> Outcome<Vec<f32>> {
        let read = |x: &Operand, side: &Side| -> Outcome<Vec<f32>> {
            let mut values = data.read_part(
                x,
                &Part {
                    dims: &side.dims,
                    strides: &side.strides,
                    start: 0,
                },
            )?;
            if inputs == Inputs::Halved {
                values
                    .iter_mut()
                    .for_each(|x| *x = f16::from_f32(*x).to_f32());
            }
            Ok(values)
        };
        let (x, y) = (read(a, &self.a)?, read(b, &self.b)?);
        let [rows, depth, columns] = self.matrix();
        let batches: usize = self.batch.iter().product();
        let mut out = vec![0.0; batches * rows * columns];
        if out.is_empty() {
            return Ok(out);
        }
        let starts = |side: &Side, size: usize| {
            let dims = &side.dims[..side.dims.len() - 2];
            let strides: Vec<i64> = super::element::dense_strides(dims)
                .iter()
                .map(|stride| stride * size as i64)
                .collect();
            let strides = spread(dims, &strides, &self.batch);
            let mut starts = Vec::with_capacity(batches);
            if let Some(at) = super::element::Strided::new(&self.batch, &strides) {
                at.offsets(|offset| starts.push(offset));
            }
            starts
        };
        let (left, right) = (
            starts(&self.a, rows * depth),
            starts(&self.b, depth * columns),
        );
        for ((left, right), out) in left
            .iter()
            .zip(&right)
            .zip(out.chunks_exact_mut(rows * columns))
        {
            let (a, b) = (&x[*left..][..rows * depth], &y[*right..][..depth * columns]);
            multiply_add(a, b, out, [rows, depth, columns]);
        }
        Ok(out)
    }
}

/// `out = self @ mat2`.
pub(crate) fn product(
    call: &mut Call,
    kind: Product,
    a: &Operand,
    b: &Operand,
    out: &Operand,
    cube_math_type: i8,
) -> Outcome<Kernel> {
    let dtype = product_type(a, b)?;
    let inputs = inputs(kind, cube_math_type, dtype)?;
    let shape = shape(kind, a, b)?;
    out.expect_dims(&shape.out)?;
    if kind == Product::Matrix {
        out.expect_dtype(dtype)?;
    } else {
        out.expect_type(FLT)?;
    }
    out.expect_contiguous()?;
    call.takes_transposed();
    call.distinct();
    let (a, b, out) = (a.clone(), b.clone(), out.clone());
    kernel(move |data| {
        let values = shape.multiply(data, &a, &b, inputs)?;
        data.write(&out, &values)
    })
}

/// What is added to a product, and the factors.
pub(crate) struct Added<'a> {
    pub(crate) term: &'a Operand,
    pub(crate) beta: Scalar,
    pub(crate) alpha: Scalar,
}

/// `out = beta·self + alpha·(mat1 @ mat2)`.
pub(crate) fn add_product(
    call: &mut Call,
    kind: Product,
    added: Added<'_>,
    a: &Operand,
    b: &Operand,
    out: &Operand,
    cube_math_type: i8,
) -> Outcome<Kernel> {
    let dtype = product_type(a, b)?;
    let inputs = inputs(kind, cube_math_type, dtype)?;
    let shape = shape(kind, a, b)?;
    out.expect_dims(&shape.out)?;
    out.expect_type(FLT)?;
    out.expect_contiguous()?;
    added.term.expect_type(FLT)?;
    let fits = added.term.rank() <= shape.out.len()
        && added
            .term
            .dims
            .iter()
            .rev()
            .zip(shape.out.iter().rev())
            .all(|(dim, out)| *dim == 1 || dim == out);
    if !fits {
        return refuse(format!(
            "{} of {:?} does not broadcast to {:?}",
            added.term.name, added.term.dims, shape.out
        ));
    }
    call.takes_transposed();
    let (alpha, beta) = (added.alpha.lane::<f32>(), added.beta.lane::<f32>());
    let (a, b, out, term) = (a.clone(), b.clone(), out.clone(), added.term.clone());
    kernel(move |data| {
        let mut values = shape.multiply(data, &a, &b, inputs)?;
        // By the rule of linear algebra libraries a factor of 0 does not even read its term.
        if beta == 0.0 {
            values.iter_mut().for_each(|x| *x *= alpha);
        } else {
            let terms = data.read_as::<f32>(&term, &out.dims)?;
            values
                .iter_mut()
                .zip(terms)
                .for_each(|(x, term)| *x = alpha * *x + beta * term);
        }
        data.write(&out, &values)
    })
}

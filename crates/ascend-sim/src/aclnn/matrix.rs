//! Matrix products, accumulated in f32.

use half::f16;

use super::call::{Call, Kernel, Operand, kernel};
use super::descriptor::Scalar;
use super::dtype::{DataType, FLT, promote};
use super::refuse;
use crate::codes::Outcome;

/// Columns of the second matrix that one pass works on: a block of 64 rows stays in the cache.
const BLOCK_COLUMNS: usize = 256;
const BLOCK_DEPTH: usize = 64;

/// Adds the product of two dense matrices, `[rows, depth]` and `[depth, columns]`.
fn multiply_add(a: &[f32], b: &[f32], out: &mut [f32], [rows, depth, columns]: [usize; 3]) {
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

/// beta·self beside alpha·(mat1 @ mat2).
pub(crate) struct Addend {
    pub(crate) tensor: Operand,
    pub(crate) beta: Scalar,
    pub(crate) alpha: Scalar,
}

/// The one of the operators that checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Product {
    /// Two axes.
    Matrix,
    /// Three axes; a batch of 1 broadcasts.
    Batch,
}

/// True if the inputs are rounded to f16, by what cubeMathType allows.
fn rounds_to_f16(kind: Product, code: i8, dtype: DataType) -> Outcome<bool> {
    let most = if kind == Product::Batch { 3 } else { 4 };
    match (code, dtype) {
        (2, DataType::Bf16) if kind != Product::Batch => {
            refuse("cubeMathType is 2 (USE_FP16), which is not offered for Bf16")
        }
        (3, DataType::Float16 | DataType::Bf16) if kind != Product::Batch => refuse(format!(
            "cubeMathType is 3 (USE_HF32), which takes Float and not {dtype:?}"
        )),
        // The shorter mantissa of HF32 is not modelled: its rounding is not documented.
        _ if (0..=most).contains(&code) => Ok(code == 2 && dtype == DataType::Float),
        _ => refuse(format!(
            "cubeMathType is {code}, one of 0 to {most} is expected"
        )),
    }
}

/// Batch, rows and columns of a matrix or of a batch of them.
fn sizes(x: &Operand) -> [usize; 3] {
    let rank = x.rank();
    let batch = if rank == 3 { x.dims[0] } else { 1 };
    [batch, x.dims[rank - 2], x.dims[rank - 1]]
}

/// `out = self @ mat2`.
pub(crate) fn product(
    call: &mut Call,
    kind: Product,
    [a, b, out]: [Operand; 3],
    addend: Option<Addend>,
    cube_math_type: i8,
) -> Outcome<Kernel> {
    a.expect_type(FLT)?;
    b.expect_type(FLT)?;
    let dtype = promote(a.dtype, b.dtype)?;
    let halved = rounds_to_f16(kind, cube_math_type, dtype)?;
    let rank = if kind == Product::Batch { 3 } else { 2 };
    a.expect_rank(rank..=rank)?;
    b.expect_rank(rank..=rank)?;
    let ([batch_a, rows, depth], [batch_b, depth_b, columns]) = (sizes(&a), sizes(&b));
    if depth != depth_b {
        return refuse(format!(
            "{} of {:?} and {} of {:?} do not multiply: {depth} columns, {depth_b} rows",
            a.name, a.dims, b.name, b.dims
        ));
    }
    let batch = if batch_a == 1 { batch_b } else { batch_a };
    if batch_b != 1 && batch_b != batch {
        return refuse(format!(
            "the batches of {} of {:?} and {} of {:?} do not broadcast",
            a.name, a.dims, b.name, b.dims
        ));
    }
    out.expect_dims(&[batch, rows, columns][3 - rank..])?;
    if kind == Product::Matrix {
        out.expect_dtype(dtype)?;
    } else {
        out.expect_type(FLT)?;
    }
    if let Some(Addend { tensor, .. }) = &addend {
        tensor.expect_dtype(dtype)?;
        tensor.expect_rank(1..=2)?;
        let [first, last] = match tensor.dims[..] {
            [last] => [1, last],
            [first, last] => [first, last],
            _ => [0, 0],
        };
        if ![1, rows].contains(&first) || ![1, columns].contains(&last) {
            return refuse(format!(
                "self of {:?} does not broadcast to [{rows}, {columns}]",
                tensor.dims
            ));
        }
    }
    out.expect_contiguous()?;
    call.takes_transposed();
    call.distinct();
    kernel(move |data| {
        let read = |x: &Operand| -> Outcome<Vec<f32>> {
            let mut values = data.read(x)?;
            if halved {
                for x in &mut values {
                    *x = f16::from_f32(*x).to_f32();
                }
            }
            Ok(values)
        };
        let (x, y) = (read(&a)?, read(&b)?);
        let mut values = vec![0.0; batch * rows * columns];
        let (size_a, size_b) = (rows * depth, depth * columns);
        for (i, out) in values.chunks_exact_mut((rows * columns).max(1)).enumerate() {
            // A batch of 1 is the same matrix every time.
            let (a_batch, b_batch) = (i.min(batch_a - 1), i.min(batch_b - 1));
            let (x, y) = (
                &x[a_batch * size_a..][..size_a],
                &y[b_batch * size_b..][..size_b],
            );
            multiply_add(x, y, out, [rows, depth, columns]);
        }
        if let Some(Addend {
            tensor,
            beta,
            alpha,
        }) = &addend
        {
            let term: Vec<f32> = data.read(tensor)?;
            let (beta, alpha) = (beta.real() as f32, alpha.real() as f32);
            let wide = if tensor.dims.last() == Some(&1) { 0 } else { 1 };
            let long = tensor.rank() == 2 && tensor.dims[0] != 1;
            let pitch = tensor.dims.last().copied().unwrap_or(1);
            for (index, value) in values.iter_mut().enumerate() {
                let (row, column) = (index / columns, index % columns);
                let at = if long { row * pitch } else { 0 } + column * wide;
                *value = alpha * *value + beta * term[at];
            }
        }
        data.write(&out, &values)
    })
}

/// The numbers of a grouped product, by the vendor's names.
#[allow(non_snake_case, reason = "the vendor's spelling")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grouping {
    pub(crate) splitItem: i64,
    pub(crate) groupType: i64,
    pub(crate) groupListType: i64,
    pub(crate) actType: i64,
}

/// The most groups, and the longest last axis of a matrix in memory.
const MOST_GROUPS: usize = 1024;
const LONGEST_AXIS: usize = 65_535;

/// True if memory has the columns of a matrix one after the other.
fn is_transposed(x: &Operand) -> bool {
    let rank = x.rank();
    let [rows, columns] = [x.dims[rank - 2], x.dims[rank - 1]];
    let [row, column] = [x.strides[rank - 2], x.strides[rank - 1]];
    row == 1 && column == rows as i64 && (rows, columns) != (1, 1)
}

/// Products of groups of rows (`groupType` 0) or of columns and rows (2), in one tensor each.
///
/// Source: `gmm/grouped_matmul` of hicann/ops-transformer at c29bc1069d32: the checks of
/// `aclnn_grouped_matmul.cpp`; groups without rows have products of zeros (`EmptyTensorCompute`).
pub(crate) fn grouped(
    call: &mut Call,
    [x, weight, out]: [Vec<Operand>; 3],
    absent: [Option<Vec<Operand>>; 11],
    groups: Option<Operand>,
    numbers: Grouping,
) -> Outcome<Kernel> {
    let Grouping {
        splitItem,
        groupType,
        groupListType,
        actType,
    } = numbers;
    if absent.iter().any(Option::is_some) {
        return refuse("biases, scales, offsets and activations are not modelled");
    }
    let ([x], [weight], [out]) = (&x[..], &weight[..], &out[..]) else {
        return refuse("x, weight and out have several tensors each, which is not modelled");
    };
    let (x, weight, out) = (x.clone(), weight.clone(), out.clone());
    if ![2, 3].contains(&splitItem) {
        return refuse(format!(
            "splitItem is {splitItem}, 2 or 3 is expected for one out"
        ));
    }
    if ![0, 2].contains(&groupType) || ![0, 1].contains(&groupListType) || actType != 0 {
        return refuse(format!(
            "groupType is {groupType}, groupListType {groupListType}, actType {actType}: 0 or 2, 0 \
             or 1, and 0 are expected"
        ));
    }
    x.expect_type(FLT)?;
    weight.expect_dtype(x.dtype)?;
    out.expect_dtype(x.dtype)?;
    let by_rows = groupType == 0;
    let [x_rank, weight_rank, out_rank] = if by_rows { [2, 3, 2] } else { [2, 2, 3] };
    x.expect_rank(x_rank..=x_rank)?;
    weight.expect_rank(weight_rank..=weight_rank)?;
    out.expect_rank(out_rank..=out_rank)?;
    let ([_, rows, depth], [batch, weight_depth, columns]) = (sizes(&x), sizes(&weight));
    if depth != weight_depth {
        return refuse(format!(
            "x of {:?} and weight of {:?} do not multiply",
            x.dims, weight.dims
        ));
    }
    let Some(groups) = groups else {
        return refuse("groupListOptional is null, the sizes of the groups are expected");
    };
    groups.expect_dtype(DataType::Int64)?;
    groups.expect_rank(1..=1)?;
    let count = groups.dims[0];
    let expected = if by_rows { batch } else { out.dims[0] };
    if count > MOST_GROUPS || count != expected || count == 0 {
        return refuse(format!(
            "groupListOptional has {count} elements, {expected} and at most {MOST_GROUPS} are \
             expected"
        ));
    }
    if by_rows {
        out.expect_dims(&[rows, columns])?;
    } else {
        out.expect_dims(&[count, rows, columns])?;
    }
    let is_transposed_x = is_transposed(&x) || !by_rows && x.dims == [1, 1];
    if by_rows == is_transposed_x {
        let how = if by_rows { "not " } else { "" };
        return refuse(format!(
            "x has strides {:?} for shape {:?}, and is expected to be {how}transposed",
            x.strides, x.dims
        ));
    }
    if !by_rows && is_transposed(&weight) && weight.dims[1] != 1 {
        return refuse("x and weight are transposed, at most one of them is expected");
    }
    let last = [
        if by_rows { depth } else { rows },
        if by_rows && is_transposed(&weight) {
            0
        } else {
            columns
        },
    ];
    if last.iter().any(|axis| *axis > LONGEST_AXIS) {
        return refuse(format!(
            "the last axes in memory have {last:?} elements, at most {LONGEST_AXIS} are expected"
        ));
    }
    out.expect_contiguous()?;
    call.takes_transposed();
    call.distinct();
    kernel(move |data| {
        let listed: Vec<i64> = data.read(&groups)?;
        let mut last = 0;
        // Wide, for any numbers may lie in memory.
        let counts = listed.into_iter().map(|number| match groupListType {
            0 => i128::from(number) - std::mem::replace(&mut last, i128::from(number)),
            _ => i128::from(number),
        });
        let counts: Vec<i128> = counts.collect();
        let all = if by_rows { rows } else { depth } as i128;
        if counts.iter().any(|count| *count < 0) || counts.iter().sum::<i128>() > all {
            return refuse(format!("the groups have {counts:?} of {all} rows"));
        }
        let (left, right): (Vec<f32>, Vec<f32>) = (data.read(&x)?, data.read(&weight)?);
        let mut values = vec![0.0; out.dims.iter().product()];
        let mut first = 0;
        for (group, count) in counts.into_iter().enumerate() {
            let count = count as usize;
            if by_rows {
                let matrix = &right[group * depth * columns..][..depth * columns];
                let products = &mut values[first * columns..][..count * columns];
                let of_group = &left[first * depth..][..count * depth];
                multiply_add(of_group, matrix, products, [count, depth, columns]);
            } else {
                let part = |row: usize| &left[row * depth + first..][..count];
                let of_group: Vec<f32> = (0..rows).flat_map(part).copied().collect();
                let matrix = &right[first * columns..][..count * columns];
                let products = &mut values[group * rows * columns..][..rows * columns];
                multiply_add(&of_group, matrix, products, [rows, count, columns]);
            }
            first += count;
        }
        data.write(&out, &values)
    })
}

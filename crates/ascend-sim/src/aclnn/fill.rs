//! Operators that write what they are told: fills, copies, casts, ranges.

use super::call::{Call, Kernel, Operand, kernel};
use super::descriptor::Scalar;
use super::dtype::{ANY, DataType, FLOATS, INDEX, Types, expect_castable};
use super::element::{Lane, with_lane};
use super::{broadcast, refuse};
use crate::codes::Outcome;

/// Writes one number everywhere.
pub(crate) fn fill(target: &Operand, types: Types, value: Scalar) -> Outcome<Kernel> {
    target.expect_type(types)?;
    expect_castable(value.dtype, target.dtype, target.name)?;
    let target = target.clone();
    kernel(move |data| {
        let count = target.elements();
        with_lane!(target.dtype.class(), L => data.write(&target, &vec![value.lane::<L>(); count]))
    })
}

/// Writes the one element of a tensor everywhere.
pub(crate) fn fill_tensor(target: &Operand, value: &Operand) -> Outcome<Kernel> {
    for tensor in [target, value] {
        if tensor.dtype == DataType::Double {
            return refuse(format!("{} is Double, which is not offered", tensor.name));
        }
    }
    if value.rank() > 1 || value.elements() != 1 {
        return refuse(format!(
            "value has shape {:?}, one element is expected",
            value.dims
        ));
    }
    let (target, value) = (target.clone(), value.clone());
    kernel(move |data| {
        with_lane!(target.dtype.class(), L => {
            let one = data.read::<L>(&value)?;
            data.write(&target, &vec![one[0]; target.elements()])
        })
    })
}

/// The strided, broadcasting, converting copy.
pub(crate) fn copy(call: &mut Call, target: &Operand, source: &Operand) -> Outcome<Kernel> {
    call.distinct();
    for tensor in [target, source] {
        tensor.expect_rank(1..=8)?;
    }
    target.expect_dims(&broadcast(&[target, source])?)?;
    let (target, source) = (target.clone(), source.clone());
    kernel(move |data| {
        with_lane!(source.dtype.class(), L => {
            let values = data.read_as::<L>(&source, &target.dims)?;
            data.write(&target, &values)
        })
    })
}

/// The same elements in another type.
pub(crate) fn cast(x: &Operand, dtype: DataType, out: &Operand) -> Outcome<Kernel> {
    out.expect_dtype(dtype)?;
    out.expect_dims(&x.dims)?;
    if x.dtype == DataType::Bool {
        x.expect_contiguous()?;
    }
    let (x, out) = (x.clone(), out.clone());
    kernel(move |data| {
        with_lane!(x.dtype.class(), L => {
            let values = data.read::<L>(&x)?;
            data.write(&out, &values)
        })
    })
}

/// start, start + step, ... below end.
pub(crate) fn arange(start: Scalar, end: Scalar, step: Scalar, out: &Operand) -> Outcome<Kernel> {
    out.expect_type(FLOATS.and(INDEX))?;
    out.expect_rank(1..=1)?;
    if step.real() == 0.0 {
        return refuse("step is 0");
    }
    if (end.real() - start.real()) * step.real() < 0.0 {
        return refuse(format!(
            "start {}, end {} and step {}: the step leads away from the end",
            start.real(),
            end.real(),
            step.real()
        ));
    }
    // By the documentation a length other than ceil((end - start) / step) only warns.
    let out = out.clone();
    kernel(move |data| {
        with_lane!(out.dtype.class(), L => {
            let (start, step) = (start.lane::<L>(), step.lane::<L>());
            let values: Vec<L> = (0..out.elements() as i64)
                .map(|i| start.add(L::from_i64(i).mul(step)))
                .collect();
            data.write(&out, &values)
        })
    })
}

/// Types that zeros and ones are offered for.
pub(crate) const ZERO_TYPES: Types = super::dtype::ARITH.and(Types::of(&[DataType::Uint16]));
/// All types.
pub(crate) const FILL_TYPES: Types = ANY;

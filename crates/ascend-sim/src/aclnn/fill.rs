//! Operators that fill, copy, convert or count.

use super::call::{Call, Kernel, Operand, kernel};
use super::descriptor::Scalar;
use super::dtype::{ANY, DataType, FLOATS, INDEX, expect_castable};
use super::element::{Lane, with_lane};
use super::{broadcast, refuse};
use crate::codes::Outcome;

/// Writes one number everywhere.
pub(crate) fn fill(target: Operand, value: Scalar) -> Outcome<Kernel> {
    target.expect_type(ANY)?;
    expect_castable(value.dtype, target.dtype, target.name)?;
    kernel(move |data| {
        let count = target.elements();
        with_lane!(target.dtype.class(), L => data.write(&target, &vec![value.lane::<L>(); count]))
    })
}

/// Copies with strides, broadcasting and conversion.
pub(crate) fn copy(call: &mut Call, target: Operand, source: Operand) -> Outcome<Kernel> {
    call.distinct();
    for tensor in [&target, &source] {
        tensor.expect_rank(1..=8)?;
    }
    target.expect_dims(&broadcast(&[&target, &source])?)?;
    kernel(move |data| {
        with_lane!(source.dtype.class(), L => {
            let values = data.read_as::<L>(&source, &target.dims)?;
            data.write(&target, &values)
        })
    })
}

/// Converts to another type.
pub(crate) fn cast(x: Operand, dtype: DataType, out: Operand) -> Outcome<Kernel> {
    out.expect_dtype(dtype)?;
    out.expect_dims(&x.dims)?;
    if x.dtype == DataType::Bool {
        x.expect_contiguous()?;
    }
    kernel(move |data| {
        with_lane!(x.dtype.class(), L => {
            let values = data.read::<L>(&x)?;
            data.write(&out, &values)
        })
    })
}

/// start, start + step, ... below end.
pub(crate) fn arange(start: Scalar, end: Scalar, step: Scalar, out: Operand) -> Outcome<Kernel> {
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

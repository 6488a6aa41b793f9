//! Operators that fill, copy, convert or count.

use super::call::{Call, Kernel, Operand, kernel};
use super::descriptor::Scalar;
use super::dtype::{ANY, ARITH, Class, DataType, FLOATS, INDEX, promote};
use super::element::{Lane, with_lane};
use super::{broadcast, refuse};
use crate::codes::Outcome;

/// Writes one number everywhere.
pub(crate) fn fill(target: Operand, value: Scalar) -> Outcome<Kernel> {
    target.expect_type(ANY)?;
    promote(target.dtype, value.dtype)?;
    kernel(move |data| {
        let (dtype, count) = (target.dtype, target.elements());
        with_lane!(dtype.class(), L => data.write(&target, &vec![value.lane::<L>(dtype); count]))
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
    out.expect_dims(&x.dims)?;
    out.expect_copy_of(&x, dtype, &x.dims)?;
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
    for (number, name) in [(&start, "start"), (&end, "end"), (&step, "step")] {
        if !ARITH.has(number.dtype) {
            return refuse(format!("{name} is {:?}, which is not taken", number.dtype));
        }
    }
    let [from, to, by] = [&start, &end, &step].map(|number| match out.dtype.class() {
        Class::F32 => number.lane::<f64>(DataType::Float),
        Class::F64 => number.real(),
        Class::I64 => number.lane::<i64>(DataType::Int64) as f64,
    });
    if by.is_nan() || by == 0.0 || (by > 0.0 && from > to) || (by < 0.0 && from < to) {
        return refuse(format!(
            "start {from}, end {to} and step {by}: the step does not lead to the end"
        ));
    }
    // By the documentation a length other than ceil((end - start) / step) only warns.
    let whole = out.dtype == DataType::Int64;
    let computed = if whole {
        DataType::Int64
    } else {
        DataType::Double
    };
    kernel(move |data| {
        with_lane!(computed.class(), L => {
            let (start, step) = (start.lane::<L>(computed), step.lane::<L>(computed));
            let values: Vec<L> = (0..out.elements() as i64)
                .map(|i| start.add(L::from_i64(i).mul(step)))
                .collect();
            data.write(&out, &values)
        })
    })
}

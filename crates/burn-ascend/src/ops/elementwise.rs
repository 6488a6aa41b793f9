//! Operators on each element.

use burn::backend::{BoolDType, DType, Scalar, Shape, TensorMetadata, bf16};
use rope_ascend::Result;
use rope_ascend::aclnn::{Number, Operators, View};
use rope_ascend::sys::aclDataType;

use super::launch::{Out, Types, compute, data_type, is_free, number};
use super::movement::unless;
use super::views::{self, narrow_repeats};
use crate::tensor::AscendTensor;

pub(crate) type Unary = fn(&Operators, View<'_>, View<'_>) -> Result<()>;
pub(crate) type Binary = fn(&Operators, View<'_>, View<'_>, View<'_>) -> Result<()>;
pub(crate) type ByNumber = fn(&Operators, View<'_>, Number, View<'_>) -> Result<()>;

/// Largest integer that operators with a number represent exactly: they compute in 32-bit floats.
const EXACT: u64 = 1 << 24;

/// x + other, as the operator with a factor.
pub(crate) fn plus(ops: &Operators, x: View<'_>, other: View<'_>, out: View<'_>) -> Result<()> {
    ops.add(x, other, Number::Int(1), out)
}

/// x - other, as the operator with a factor.
pub(crate) fn minus(ops: &Operators, x: View<'_>, other: View<'_>, out: View<'_>) -> Result<()> {
    ops.sub(x, other, Number::Int(1), out)
}

/// x + number, as the operator with a factor.
pub(crate) fn plus_number(ops: &Operators, x: View<'_>, n: Number, out: View<'_>) -> Result<()> {
    ops.adds(x, n, Number::Int(1), out)
}

/// x · number, with a 16-bit number passed in 64 bits: with a bf16 number, the operator would
/// multiply in 32 bits, with a cast before and after.
pub(crate) fn times_number(ops: &Operators, x: View<'_>, n: Number, out: View<'_>) -> Result<()> {
    let n = match n {
        Number::Element(aclDataType::BF16, bits) => {
            Number::Float(bf16::from_bits(bits as u16).to_f64())
        }
        other => other,
    };
    ops.muls(x, n, out)
}

/// Error unit by the error function, as burn defines it.
pub(crate) fn gelu(ops: &Operators, x: View<'_>, out: View<'_>) -> Result<()> {
    ops.gelu(x, 0, out)
}

/// Gradient of [`gelu`].
pub(crate) fn gelu_backward(
    ops: &Operators,
    grad: View<'_>,
    x: View<'_>,
    out: View<'_>,
) -> Result<()> {
    ops.gelu_backward(grad, x, c"none", out)
}

/// One operator on each element.
pub(crate) fn unary(operator: Unary, x: AscendTensor) -> AscendTensor {
    let out = Out::over_or_like(&x);
    compute([&x], out, |ops, [x], out| operator(ops, x, out))
}

/// As [`unary`], through 32-bit floats for a type that the operator lacks.
pub(crate) fn unary_in_f32(operator: Unary, lacking: DType, x: AscendTensor) -> AscendTensor {
    let dtype = x.dtype();
    if dtype == lacking {
        cast(unary(operator, cast(x, DType::F32)), dtype)
    } else {
        unary(operator, x)
    }
}

/// One operator on pairs of elements, axes of length 1 repeated.
pub(crate) fn binary(operator: Binary, x: AscendTensor, y: AscendTensor) -> AscendTensor {
    let shape = broadcast(x.dims(), y.dims());
    let dtype = x.dtype();
    let out = [&x, &y]
        .into_iter()
        .find(|t| is_free(t) && *t.dims() == *shape && t.dtype() == dtype)
        .map_or(Out::New(shape, dtype), |t| Out::Over(t.clone()));
    pairwise(operator, &x, &y, out)
}

/// One operator on two tensors of one shape, which it does not repeat.
pub(crate) fn paired(operator: Binary, x: &AscendTensor, y: &AscendTensor) -> AscendTensor {
    let out = Out::New(x.shape(), x.dtype());
    compute([x, y], out, |ops, [x, y], out| operator(ops, x, y, out))
}

/// One operator on pairs of elements that gives truth values.
pub(crate) fn compare(
    operator: Binary,
    x: AscendTensor,
    y: AscendTensor,
    dtype: BoolDType,
) -> AscendTensor {
    let [x, y] = [x, y].map(widened);
    let out = Out::New(broadcast(x.dims(), y.dims()), DType::Bool(dtype));
    pairwise(operator, &x, &y, out)
}

/// 16-bit integers in 32 bits: the AI Core does not compute with the former.
fn widened(x: AscendTensor) -> AscendTensor {
    match x.dtype() {
        DType::I16 => cast(x, DType::I32),
        _ => x,
    }
}

fn pairwise(operator: Binary, x: &AscendTensor, y: &AscendTensor, out: Out) -> AscendTensor {
    // Axes that burn repeats with a stride of 0 are passed to the operator without a copy.
    let x = narrow_repeats(x, |axis| views::is_long(y, x.dims().len(), axis));
    let y = narrow_repeats(y, |axis| views::is_long(&x, y.dims().len(), axis));
    compute([&x, &y], out, |ops, [x, y], out| operator(ops, x, y, out))
}

/// One operator with a number.
pub(crate) fn by_number(operator: ByNumber, x: AscendTensor, value: Scalar) -> AscendTensor {
    let number = number(value, x.dtype());
    let out = Out::over_or_like(&x);
    compute([&x], out, |ops, [x], out| operator(ops, x, number, out))
}

/// x divided by a number.
///
/// In 32-bit floats, the number is a tensor of one element: an operator with a number is planned
/// again for each number, and Adam divides by different numbers in every step.
pub(crate) fn divide(x: AscendTensor, value: Scalar) -> AscendTensor {
    if x.dtype() != DType::F32 {
        return by_number(Operators::divs, x, value);
    }
    let out = Out::over_or_like(&x);
    let context = x.context().cloned();
    compute([&x], out, |ops, [x], out| {
        let Ok(context) = context else {
            unreachable!("a tensor with a view is in an open device");
        };
        let divisor = context.number(value.elem())?;
        let divisor = View {
            buffer: &divisor,
            dtype: x.dtype,
            dims: &[1],
            strides: &[1],
            offset: 0,
        };
        ops.div(x, divisor, out)
    })
}

/// A number as a tensor of one element that goes with `x`.
fn one(x: &AscendTensor, value: Scalar) -> AscendTensor {
    let shape = Shape::from(vec![1; x.dims().len()]);
    super::movement::full(&x.device(), shape, value, x.dtype())
}

/// One operator on pairs of integers. 16-bit integers are computed in 32 bits, and the results are
/// the lower halves.
pub(crate) fn integers(operator: Binary, x: AscendTensor, y: AscendTensor) -> AscendTensor {
    if x.dtype() != DType::I16 {
        return binary(operator, x, y);
    }
    lower_halves(&binary(operator, widened(x), widened(y)))
}

/// Integers to a power, modulo 2^bits.
pub(crate) fn power(mut x: AscendTensor, mut exponent: u32) -> AscendTensor {
    let mut product = one(&x, Scalar::Int(1));
    loop {
        if exponent & 1 == 1 {
            product = integers(Operators::mul, product, x.clone());
        }
        exponent >>= 1;
        if exponent == 0 {
            let shape = x.shape();
            return unless(x.failure().cloned(), views::expand(&product, &shape));
        }
        x = integers(Operators::mul, x.clone(), x);
    }
}

/// Rounded towards zero.
pub(crate) fn truncate(x: AscendTensor) -> AscendTensor {
    let dtype = BoolDType::Native;
    let negative = compare_number(Operators::lt_scalar, x.clone(), Scalar::Int(0), dtype);
    let up = unary(Operators::ceil, x.clone());
    mask_where(unary(Operators::floor, x), negative, up)
}

/// 32-bit integers modulo 2^16, densely.
pub(crate) fn lower_halves(x: &AscendTensor) -> AscendTensor {
    let halves = x.split(DType::I16);
    let strides = halves.strides()[..x.dims().len()].to_vec();
    halves
        .view(x.shape(), strides, halves.offset())
        .contiguous()
}

/// An integer operation with a number: with its operator if that is exact, otherwise with a tensor
/// of that number.
pub(crate) fn by_integer(
    operator: Option<ByNumber>,
    exact: Binary,
    x: AscendTensor,
    value: Scalar,
) -> AscendTensor {
    match operator {
        Some(operator)
            if x.dtype() != DType::I16 && value.elem::<i64>().unsigned_abs() <= EXACT =>
        {
            by_number(operator, x, value)
        }
        _ => {
            let other = one(&x, value);
            integers(exact, x, other)
        }
    }
}

/// A comparison with a number.
pub(crate) fn compare_number(
    operator: ByNumber,
    x: AscendTensor,
    value: Scalar,
    dtype: BoolDType,
) -> AscendTensor {
    let value = match x.dtype() {
        DType::I16 => Scalar::Int((value.elem::<i64>() as i16).into()),
        _ => value,
    };
    let x = widened(x);
    let number = number(value, x.dtype());
    let out = Out::New(x.shape(), DType::Bool(dtype));
    compute([&x], out, |ops, [x], out| operator(ops, x, number, out))
}

/// x within bounds.
pub(crate) fn clamp(x: AscendTensor, low: Option<Scalar>, high: Option<Scalar>) -> AscendTensor {
    let [low, high] = [low, high].map(|bound| bound.map(|b| number(b, x.dtype())));
    let out = Out::over_or_like(&x);
    compute([&x], out, |ops, [x], out| ops.clamp(x, low, high, out))
}

/// x where the mask does not hold, else value.
pub(crate) fn mask_where(x: AscendTensor, mask: AscendTensor, value: AscendTensor) -> AscendTensor {
    if x.dtype() == DType::I16 {
        return lower_halves(&mask_where(widened(x), mask, widened(value)));
    }
    let shape = broadcast(&broadcast(x.dims(), mask.dims()), value.dims());
    let dtype = x.dtype();
    let out = [&x, &value]
        .into_iter()
        .find(|t| is_free(t) && *t.dims() == *shape)
        .map_or(Out::New(shape, dtype), |t| Out::Over(t.clone()));
    compute([&mask, &value, &x], out, |ops, [mask, value, x], out| {
        ops.select_where(mask, value, x, out)
    })
}

/// x with a number where the mask holds.
pub(crate) fn mask_fill(x: AscendTensor, mask: &AscendTensor, value: Scalar) -> AscendTensor {
    // The operator refuses the narrower integers, and fills those of 64 bits on the AI CPU.
    if Types::INT.contains(x.dtype()) && x.dtype() != DType::I32 {
        let value = one(&x, value);
        return mask_where(x, mask.clone(), value);
    }
    let shape = broadcast(x.dims(), mask.dims());
    let number = number(value, x.dtype());
    let x = if is_free(&x) && *x.dims() == *shape {
        x
    } else {
        super::movement::copy(&views::expand(&x, &shape))
    };
    // The operator repeats the mask; its document does not promise to take other strides.
    let mask = narrow_repeats(mask, |_| true).contiguous();
    let out = Out::Over(x.clone());
    drop(x);
    compute([&mask], out, |ops, [mask], out| {
        ops.masked_fill(out, mask, number)
    })
}

/// x in another element type.
pub(crate) fn cast(x: AscendTensor, dtype: DType) -> AscendTensor {
    match (x.dtype(), dtype) {
        (from, to) if from == to => return x,
        // The AI Core casts between these by way of another type, exactly.
        (DType::I16, DType::BF16) => return cast(cast(x, DType::F32), dtype),
        (from, DType::I16) if from.is_bool() => return cast(x.reinterpret(DType::U8), dtype),
        _ => {}
    }
    // Repeated elements are cast once.
    let once = narrow_repeats(&x, |_| true);
    if once.len() < x.len() {
        return views::expand(&cast(once, dtype), &x.shape());
    }
    // Truth values must be dense for this operator.
    let x = if x.dtype().is_bool() {
        x.contiguous()
    } else {
        x
    };
    let out = Out::New(x.shape(), dtype);
    compute([&x], out, |ops, [x], out| {
        ops.cast(x, data_type(dtype)?, out)
    })
}

/// The common shape of two shapes; if they do not broadcast, one that the operator rejects.
pub(crate) fn broadcast(a: &[usize], b: &[usize]) -> Shape {
    let rank = a.len().max(b.len());
    let dim = |dims: &[usize], axis: usize| {
        (axis + dims.len())
            .checked_sub(rank)
            .map_or(1, |own| dims[own])
    };
    let dims: Vec<usize> = (0..rank)
        .map(|axis| match (dim(a, axis), dim(b, axis)) {
            (1, other) => other,
            (own, _) => own,
        })
        .collect();
    Shape::from(dims)
}

//! Operators of one element at a time: arithmetic, activations and their gradients, comparisons,
//! logic, selection.

use super::call::{Kernel, Operand, kernel};
use super::data::Data;
use super::descriptor::Scalar;
use super::dtype::{
    ANY, ARITH, BOOL, Class, DataType, FLOATS, FLT, INDEX, INTS, NUMBERS, Types, UNSIGNED,
    expect_castable, promote, promote_number,
};
use super::element::{Lane, Real, with_lane, with_real};
use super::{broadcast, inner, refuse};
use crate::codes::{ACLNN_NULLPTR, Failure, Outcome};
use crate::state::sim;

/// Types that a remainder is computed in.
const REMAINDERS: Types = FLOATS.and(INDEX);

/// Types in which a broadcast over more than [`FEW_AXES_MAX`] separate axes is not offered.
const FEW_AXES: Types = Types::of(&[DataType::Double, DataType::Int16]);
const FEW_AXES_MAX: usize = 5;

const SQRT_2: f64 = std::f64::consts::SQRT_2;
/// sqrt(2/pi), of the tanh approximation of gelu.
const GELU_SCALE: f64 = 0.797_884_560_802_865_4;
const GELU_CUBIC: f64 = 0.044_715;

/// Functions of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unary {
    Neg,
    Abs,
    Sign,
    Sqrt,
    Reciprocal,
    Exp,
    Log,
    Log1p,
    Erf,
    Tanh,
    Sin,
    Cos,
    Floor,
    Ceil,
    Round,
    Sigmoid,
    Gelu,
    GeluTanh,
    Relu,
}

use Unary::*;

/// The type of a function's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gives {
    /// The input's type, which may be converted.
    Own,
    /// The input's type and no other.
    Same,
    /// A float, also of integers.
    Float,
}

impl Unary {
    /// Types taken, the result's type, the least rank.
    fn limits(self) -> (Types, Gives, usize) {
        use DataType::*;
        let whole = INTS.and(BOOL);
        match self {
            Neg => (FLOATS.and(Types::of(&[Int8, Int32, Int64])), Gives::Own, 0),
            Abs => (ARITH, Gives::Same, 0),
            Sign => (FLOATS.and(Types::of(&[Int32, Int64, Bool])), Gives::Same, 1),
            Sqrt | Reciprocal | Log | Log1p | Sin | Cos => (FLOATS.and(whole), Gives::Float, 0),
            Exp => (FLOATS.and(Types::of(&[Bool, Int64])), Gives::Float, 0),
            Erf => {
                // bfloat16 is documented for A3 and not for A2.
                let a2 = sim().machine.soc_name.to_bytes().starts_with(b"Ascend910B");
                let floats = Types::of(&[Double, Float, Float16]);
                let floats = if a2 { floats } else { FLOATS };
                (floats.and(Types::of(&[Bool, Int64])), Gives::Float, 0)
            }
            Tanh => (FLT.and(whole), Gives::Float, 0),
            Floor => (NUMBERS.and(UNSIGNED), Gives::Same, 0),
            Ceil => (FLOATS, Gives::Same, 0),
            Round => (FLOATS.and(Types::of(&[Int32, Int64])), Gives::Same, 0),
            Sigmoid => (FLT, Gives::Float, 0),
            Relu => {
                let whole = Types::of(&[Int8, Int32, Int64, Uint8]);
                (FLT.and(whole), Gives::Same, 0)
            }
            Gelu | GeluTanh => (FLT, Gives::Same, 0),
        }
    }

    /// The gelu of a code.
    pub(crate) fn gelu(approximate: i64) -> Outcome<Self> {
        match approximate {
            0 => Ok(Gelu),
            1 => Ok(GeluTanh),
            _ => refuse(format!(
                "approximate is {approximate}, 0 (none) or 1 (tanh) is expected"
            )),
        }
    }

    fn lanes<L: Lane>(self, x: &mut [L]) {
        match self {
            Neg => each(x, L::neg),
            Abs => each(x, L::abs),
            Sign => each(x, L::sign),
            Relu => each(x, |x| x.larger(L::default())),
            // The others are identities of integers.
            _ => {}
        }
    }

    fn reals<R: Real>(self, x: &mut [R]) {
        match self {
            Neg | Abs | Sign | Relu => self.lanes(x),
            Sqrt => each(x, R::sqrt),
            Reciprocal => each(x, |x| R::one().div(x)),
            Exp => each(x, R::exp),
            Log => each(x, R::ln),
            Log1p => each(x, R::ln_1p),
            Erf => each(x, R::erf),
            Tanh => each(x, R::tanh),
            Sin => each(x, R::sin),
            Cos => each(x, R::cos),
            Floor => each(x, R::floor),
            Ceil => each(x, R::ceil),
            Round => each(x, R::round),
            Sigmoid => each(x, |x| R::one().div(R::one().add(x.neg().exp()))),
            Gelu => each(x, |x| x.mul(normal_cdf(x))),
            GeluTanh => each(x, |x| {
                let half = R::from_f64(0.5);
                x.mul(half).mul(R::one().add(gelu_inner(x).tanh()))
            }),
        }
    }
}

fn each<L: Copy>(x: &mut [L], f: impl Fn(L) -> L) {
    for value in x {
        *value = f(*value);
    }
}

/// The distribution function of the standard normal distribution.
fn normal_cdf<R: Real>(x: R) -> R {
    R::from_f64(0.5).mul(R::one().add(x.div(R::from_f64(SQRT_2)).erf()))
}

/// sqrt(2/pi) (x + 0.044715 x³).
fn gelu_inner<R: Real>(x: R) -> R {
    let cubic = R::from_f64(GELU_CUBIC).mul(x).mul(x).mul(x);
    R::from_f64(GELU_SCALE).mul(x.add(cubic))
}

/// `out = f(self)`.
pub(crate) fn unary(f: Unary, x: Operand, out: Operand) -> Outcome<Kernel> {
    let (types, gives, least) = f.limits();
    x.expect_type(types)?;
    x.expect_rank(least..=8)?;
    out.expect_dims(&x.dims)?;
    let mut computed = x.dtype;
    match gives {
        // The vendor checks the type of this one where it copies the result.
        Gives::Same if f == Sign && x.dtype == DataType::Bf16 => {
            out.expect_copy_of(&x, x.dtype, &x.dims)?
        }
        Gives::Same => out.expect_dtype(x.dtype)?,
        Gives::Own => expect_castable(x.dtype, out.dtype, out.name)?,
        Gives::Float => {
            out.expect_type(if f == Tanh { FLT } else { FLOATS })?;
            if !computed.is_float() && out.dtype == DataType::Double {
                computed = DataType::Double;
            } else if !computed.is_float() {
                computed = DataType::Float;
            }
        }
    }
    kernel(move |data| match computed.class() {
        Class::I64 => {
            let mut values = data.read::<i64>(&x)?;
            f.lanes(&mut values);
            data.write_cast(&out, values, computed)
        }
        class => with_real!(class, R => {
            let mut values = data.read::<R>(&x)?;
            f.reals(&mut values);
            data.write_cast(&out, values, computed)
        }),
    })
}

/// The second operand: a tensor that broadcasts, or a number.
pub(crate) enum Other {
    Tensor(Operand),
    Scalar(Scalar),
}

impl From<Operand> for Other {
    fn from(tensor: Operand) -> Self {
        Self::Tensor(tensor)
    }
}

impl From<Scalar> for Other {
    fn from(scalar: Scalar) -> Self {
        Self::Scalar(scalar)
    }
}

impl Other {
    fn read<L: Lane>(
        &self,
        data: &Data<'_, '_>,
        dims: &[usize],
        computed: DataType,
    ) -> Outcome<Vec<L>> {
        match self {
            Self::Tensor(tensor) => data.read_cast(tensor, dims, computed),
            Self::Scalar(scalar) => Ok(vec![scalar.lane(computed); dims.iter().product()]),
        }
    }
}

/// The types that an operator of two operands takes.
struct Limits {
    tensors: Types,
    numbers: Types,
    out: Types,
}

/// Shape and type in which two operands are combined; `beside` chooses the type that a tensor and
/// a number are combined in.
fn common(
    a: &Operand,
    b: &Other,
    out: &Operand,
    limits: &Limits,
    beside: impl Fn(&Scalar) -> Outcome<DataType>,
) -> Outcome<(Vec<usize>, DataType)> {
    a.expect_type(limits.tensors)?;
    out.expect_type(limits.out)?;
    match b {
        Other::Tensor(b) => {
            b.expect_type(limits.tensors)?;
            let dims = broadcast(&[a, b])?;
            out.expect_dims(&dims)?;
            let promoted = promote(a.dtype, b.dtype)?;
            expect_few_axes(promoted, &[a, b], &dims)?;
            Ok((dims, promoted))
        }
        Other::Scalar(b) => {
            if !limits.numbers.has(b.dtype) {
                let (found, expected) = (b.dtype, limits.numbers.list());
                return refuse(format!(
                    "the number is {found:?}, one of {expected:?} is expected"
                ));
            }
            out.expect_dims(&a.dims)?;
            Ok((a.dims.clone(), beside(b)?))
        }
    }
}

/// Refuses a broadcast of too many axes in the types for which it is limited.
fn expect_few_axes(computed: DataType, tensors: &[&Operand], dims: &[usize]) -> Outcome {
    if !FEW_AXES.has(computed) {
        return Ok(());
    }
    let spreads = |axis: usize| -> Vec<bool> {
        let spread = |tensor: &&Operand| {
            let own = (axis + tensor.rank()).checked_sub(dims.len());
            own.is_none_or(|own| tensor.dims[own] != dims[axis])
        };
        tensors.iter().map(spread).collect()
    };
    let all: Vec<Vec<bool>> = (0..dims.len()).map(spreads).collect();
    let any = all.iter().flatten().any(|spread| *spread);
    let merged = all.len().min(1) + all.windows(2).filter(|pair| pair[0] != pair[1]).count();
    if any && merged > FEW_AXES_MAX {
        return refuse(format!(
            "a broadcast over {merged} axes in {computed:?}, at most {FEW_AXES_MAX} are expected"
        ));
    }
    Ok(())
}

/// Functions of two numbers; those with alpha multiply the second by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Remainder,
    Pow,
}

impl Binary {
    fn limits(self) -> Limits {
        Limits {
            tensors: ARITH,
            numbers: if matches!(self, Self::Div | Self::Pow) {
                ARITH
            } else {
                ANY
            },
            out: if self == Self::Mul { ARITH } else { ANY },
        }
    }

    /// The type that a tensor and a number are combined in.
    fn beside(self, tensor: DataType, number: DataType, out: DataType) -> Outcome<DataType> {
        use DataType::*;
        let narrow = number == Double && out == Float;
        match self {
            Self::Mul if tensor == Bf16 => Ok(Float),
            Self::Mul if tensor == Bool && number == Double => Ok(Float),
            Self::Add | Self::Sub | Self::Mul if narrow && !tensor.is_float() => Ok(Float),
            Self::Mul => inner(promote_number(tensor, number)),
            Self::Pow if narrow => Ok(Float),
            // Both 16-bit floats meet the other floats in f32, except f16 and f64.
            Self::Div if matches!(tensor, Float16 | Bf16) && number.is_float() => {
                let alone = tensor == number || (tensor, number) == (Float16, Double);
                Ok(if alone { tensor } else { Float })
            }
            _ => promote_number(tensor, number),
        }
    }

    fn lanes<L: Lane>(self, a: Vec<L>, b: &[L], alpha: L) -> Vec<L> {
        match self {
            Self::Add => zip(a, b, |a, b| a.add(alpha.mul(b))),
            Self::Sub => zip(a, b, |a, b| a.sub(alpha.mul(b))),
            Self::Mul => zip(a, b, L::mul),
            Self::Div => zip(a, b, L::div),
            Self::Remainder => zip(a, b, L::rem_floor),
            Self::Pow => zip(a, b, L::pow),
        }
    }
}

fn zip<L: Copy>(mut a: Vec<L>, b: &[L], f: impl Fn(L, L) -> L) -> Vec<L> {
    for (a, b) in a.iter_mut().zip(b) {
        *a = f(*a, *b);
    }
    a
}

/// `out = f(self, other)`, or `f(self, alpha·other)`.
pub(crate) fn binary(
    f: Binary,
    a: Operand,
    b: impl Into<Other>,
    alpha: Option<Scalar>,
    out: Operand,
) -> Outcome<Kernel> {
    let b = b.into();
    let beside = |number: &Scalar| f.beside(a.dtype, number.dtype, out.dtype);
    let (dims, promoted) = common(&a, &b, &out, &f.limits(), beside)?;
    let other = match &b {
        Other::Tensor(b) => b.dtype,
        Other::Scalar(b) => b.dtype,
    };
    match (f, &b) {
        (Binary::Pow, _) if a.dtype == DataType::Bool && other == a.dtype => {
            return refuse(format!("{} and its exponent are both Bool", a.name));
        }
        (Binary::Pow, Other::Scalar(b)) if !promoted.is_float() && b.real() < 0.0 => {
            return refuse(format!(
                "the exponent is {}, of integers 0 or more is expected",
                b.real()
            ));
        }
        (Binary::Remainder, _) if !REMAINDERS.has(promoted) => {
            return refuse(format!(
                "{} of {:?} and {other:?} compute in {promoted:?}, one of {:?} is expected",
                a.name,
                a.dtype,
                REMAINDERS.list()
            ));
        }
        _ => {}
    }
    expect_castable(promoted, out.dtype, out.name)?;
    if let Some(alpha) = alpha.filter(|alpha| alpha.dtype.is_float() && !promoted.is_float()) {
        return refuse(format!(
            "alpha is {:?} and does not convert to {promoted:?}",
            alpha.dtype
        ));
    }
    // True division of integers gives floats.
    let computed = if f == Binary::Div && !promoted.is_float() {
        DataType::Float
    } else {
        promoted
    };
    kernel(move |data| {
        with_lane!(computed.class(), L => {
            let x = data.read_cast::<L>(&a, &dims, computed)?;
            let y = b.read::<L>(data, &dims, computed)?;
            let alpha = alpha.map_or(L::one(), |alpha| alpha.lane(computed));
            data.write_cast(&out, f.lanes(x, &y, alpha), computed)
        })
    })
}

/// Gradients of activations: of the gradient given and the saved input or output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backward {
    Sigmoid,
    Gelu,
    GeluTanh,
}

impl Backward {
    /// The gelu of a name.
    pub(crate) fn gelu(approximate: &str) -> Outcome<Self> {
        match approximate {
            "none" => Ok(Self::Gelu),
            "tanh" => Ok(Self::GeluTanh),
            _ => refuse(format!(
                "approximate is `{approximate}`, `none` or `tanh` is expected"
            )),
        }
    }

    fn number<R: Real>(self, g: R, x: R) -> R {
        let number = R::from_f64;
        match self {
            Self::Sigmoid => g.mul(x).mul(R::one().sub(x)),
            Self::Gelu => {
                let density = x.mul(x).mul(number(-0.5)).exp();
                let slope = x.mul(number(0.5 * GELU_SCALE)).mul(density);
                g.mul(normal_cdf(x).add(slope))
            }
            Self::GeluTanh => {
                let t = gelu_inner(x).tanh();
                let cubic = number(3.0 * GELU_CUBIC).mul(x).mul(x);
                let inner = number(GELU_SCALE).mul(R::one().add(cubic));
                let bend = x.mul(R::one().sub(t.mul(t))).mul(inner);
                g.mul(number(0.5)).mul(R::one().add(t).add(bend))
            }
        }
    }
}

/// `out = f(gradient, saved)`.
pub(crate) fn backward(
    f: Backward,
    gradient: Operand,
    saved: Operand,
    out: Operand,
) -> Outcome<Kernel> {
    let types = if f == Backward::Sigmoid { FLOATS } else { FLT };
    for tensor in [&gradient, &saved, &out] {
        tensor.expect_type(types)?;
    }
    let computed = promote(gradient.dtype, saved.dtype)?;
    if f != Backward::Sigmoid {
        out.expect_dtype(computed)?;
    }
    let dims = broadcast(&[&gradient, &saved])?;
    out.expect_dims(&dims)?;
    kernel(move |data| {
        with_real!(computed.class(), R => {
            let g = data.read_cast::<R>(&gradient, &dims, computed)?;
            let saved = data.read_cast::<R>(&saved, &dims, computed)?;
            data.write_cast(&out, zip(g, &saved, |g, saved| f.number(g, saved)), computed)
        })
    })
}

/// Comparisons and logic: two numbers to a truth value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Test {
    Eq,
    Ne,
    Gt,
    Ge,
    Lt,
    Le,
    And,
    Or,
    Xor,
}

impl Test {
    fn holds<L: Lane>(self, a: L, b: L) -> bool {
        match self {
            Self::Eq => a == b,
            Self::Ne => a != b,
            Self::Gt => a > b,
            Self::Ge => a >= b,
            Self::Lt => a < b,
            Self::Le => a <= b,
            Self::And => a.truth() && b.truth(),
            Self::Or => a.truth() || b.truth(),
            Self::Xor => a.truth() != b.truth(),
        }
    }

    fn limits(self) -> Limits {
        let types = match self {
            Self::Gt | Self::Ge | Self::Lt => ANY,
            Self::Le => ARITH.and(Types::of(&[DataType::Uint16])),
            _ => ARITH,
        };
        Limits {
            tensors: types,
            numbers: types,
            out: types,
        }
    }

    /// The type that a tensor and a number are compared in.
    fn beside(self, tensor: DataType, number: &Scalar) -> Outcome<DataType> {
        use DataType::*;
        match self {
            Self::Lt | Self::Le if tensor.is_float() => Ok(tensor),
            Self::Le if number.dtype == Double => Ok(Float),
            Self::Lt if number.dtype == Double => promote(tensor, Float),
            Self::Gt | Self::Ge if tensor.is_float() && number.dtype == Double => {
                let loss = number.lane::<f64>(tensor) - number.real();
                // Also for infinity, whose difference is NaN.
                let keeps = loss.abs() <= f64::from(f32::EPSILON);
                Ok(if keeps { tensor } else { Double })
            }
            Self::Lt | Self::Le | Self::Gt | Self::Ge => promote(tensor, number.dtype),
            _ => promote_number(tensor, number.dtype),
        }
    }
}

/// `out = whether f holds of self and other`.
pub(crate) fn test(f: Test, a: Operand, b: impl Into<Other>, out: Operand) -> Outcome<Kernel> {
    let b = b.into();
    let beside = |number: &Scalar| f.beside(a.dtype, number);
    let (dims, computed) = common(&a, &b, &out, &f.limits(), beside)?;
    kernel(move |data| {
        with_lane!(computed.class(), L => {
            let mut x = data.read_cast::<L>(&a, &dims, computed)?;
            let mut y = b.read::<L>(data, &dims, computed)?;
            if computed == DataType::Uint64 {
                // Its upper half is negative in a lane: moved, all are in order.
                for values in [&mut x, &mut y] {
                    each(values, |x| x.sub(L::from_i64(i64::MIN)));
                }
            }
            let holds = x.iter().zip(&y).map(|(x, y)| i64::from(f.holds(*x, *y)));
            data.write(&out, &holds.collect::<Vec<_>>())
        })
    })
}

/// `out = !self`.
pub(crate) fn logical_not(x: Operand, out: Operand) -> Outcome<Kernel> {
    x.expect_type(ARITH)?;
    out.expect_type(ARITH)?;
    out.expect_dims(&x.dims)?;
    kernel(move |data| {
        with_lane!(x.dtype.class(), L => {
            let values = data.read::<L>(&x)?;
            let flags: Vec<i64> = values.iter().map(|x| i64::from(!x.truth())).collect();
            data.write(&out, &flags)
        })
    })
}

/// `out = condition ? self : other`.
pub(crate) fn select(condition: Operand, a: Operand, b: Operand, out: Operand) -> Outcome<Kernel> {
    condition.expect_type(Types::of(&[DataType::Bool, DataType::Uint8]))?;
    let dims = broadcast(&[&condition, &a, &b])?;
    out.expect_dims(&dims)?;
    out.expect_rank(0..=8)?;
    let computed = inner(promote(a.dtype, b.dtype))?;
    if computed == DataType::Bool {
        out.expect_copy_of(&a, computed, &dims)?;
    }
    kernel(move |data| {
        with_lane!(computed.class(), L => {
            let chosen = data.read_as::<i64>(&condition, &dims)?;
            let mut x = data.read_cast::<L>(&a, &dims, computed)?;
            let y = data.read_cast::<L>(&b, &dims, computed)?;
            for ((x, y), chosen) in x.iter_mut().zip(y).zip(chosen) {
                if chosen == 0 {
                    *x = y;
                }
            }
            data.write_cast(&out, x, computed)
        })
    })
}

/// Writes `value` where the mask is true.
pub(crate) fn masked_fill(target: Operand, mask: Operand, value: Scalar) -> Outcome<Kernel> {
    use DataType::*;
    target.expect_type(FLT.and(Types::of(&[Bool, Int8, Int32, Int64])))?;
    mask.expect_dtype(Bool)?;
    let dims = broadcast(&[&target, &mask])?;
    target.expect_dims(&dims)?;
    if value.dtype.is_float() && !target.dtype.is_float() {
        return refuse(format!(
            "value is {:?} and does not convert to {:?} of {}",
            value.dtype, target.dtype, target.name
        ));
    }
    kernel(move |data| {
        with_lane!(target.dtype.class(), L => {
            let mut values = data.read::<L>(&target)?;
            let masked = data.read_as::<i64>(&mask, &dims)?;
            for (x, masked) in values.iter_mut().zip(masked) {
                if masked != 0 {
                    *x = value.lane(target.dtype);
                }
            }
            data.write(&target, &values)
        })
    })
}

/// `out = max(min(self, high), low)`, either bound absent.
pub(crate) fn clamp(
    x: Operand,
    low: Option<Scalar>,
    high: Option<Scalar>,
    out: Operand,
) -> Outcome<Kernel> {
    if low.is_none() && high.is_none() {
        let message = "clipValueMin and clipValueMax are both null";
        return Err(Failure::new(ACLNN_NULLPTR, message));
    }
    x.expect_type(NUMBERS)?;
    x.expect_rank(1..=8)?;
    out.expect_type(NUMBERS)?;
    out.expect_dims(&x.dims)?;
    // The bounds have no part in it: they become numbers of the output's type, too.
    let computed = out.dtype;
    expect_castable(x.dtype, computed, out.name)?;
    kernel(move |data| {
        with_lane!(computed.class(), L => {
            let mut values = data.read_cast::<L>(&x, &x.dims, computed)?;
            let bound = |bound: Option<Scalar>| bound.map(|s| s.lane::<L>(computed));
            let (low, high) = (bound(low), bound(high));
            each(&mut values, |x| {
                let x = high.map_or(x, |high| x.smaller(high));
                low.map_or(x, |low| x.larger(low))
            });
            data.write(&out, &values)
        })
    })
}

//! Operators of one element at a time: arithmetic, activations and their gradients, comparisons,
//! logic, selection.

use super::call::{Kernel, Operand, kernel};
use super::data::Data;
use super::descriptor::Scalar;
use super::dtype::{
    ARITH, BOOL, Class, DataType, FLOATS, FLT, INTS, Types, expect_castable, promote,
    promote_scalar,
};
use super::element::{Lane, Real, with_lane, with_real};
use super::{broadcast, refuse};
use crate::codes::{ACLNN_NULLPTR, Failure, Outcome};
use crate::state::sim;

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
            Abs => (ARITH, Gives::Own, 0),
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
            Floor => (FLOATS.and(INTS), Gives::Same, 0),
            Ceil => (FLOATS, Gives::Same, 0),
            Round => (FLOATS.and(Types::of(&[Int32, Int64])), Gives::Same, 0),
            Sigmoid => (FLT, Gives::Own, 0),
            Relu => (FLT.and(INTS), Gives::Own, 0),
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
            data.write(&out, &values)
        }
        class => with_real!(class, R => {
            let mut values = data.read::<R>(&x)?;
            f.reals(&mut values);
            data.write(&out, &values)
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
    fn dtype(&self) -> DataType {
        match self {
            Self::Tensor(tensor) => tensor.dtype,
            Self::Scalar(scalar) => scalar.dtype,
        }
    }

    fn read<L: Lane>(&self, data: &Data<'_, '_>, dims: &[usize]) -> Outcome<Vec<L>> {
        match self {
            Self::Tensor(tensor) => data.read_as(tensor, dims),
            Self::Scalar(scalar) => Ok(vec![scalar.lane(); dims.iter().product()]),
        }
    }
}

/// Shape and type in which two operands are combined. `float` is the type of an integer tensor
/// with a float scalar, where that is f32 or f64.
fn common(
    a: &Operand,
    b: &Other,
    out: &Operand,
    types: Types,
    float: DataType,
) -> Outcome<(Vec<usize>, DataType)> {
    a.expect_type(ARITH)?;
    let (dims, promoted) = match b {
        Other::Tensor(b) => {
            b.expect_type(ARITH)?;
            let dims = broadcast(&[a, b])?;
            let promoted = promote(a.dtype, b.dtype)?;
            expect_few_axes(promoted, &[a, b], &dims)?;
            (dims, promoted)
        }
        Other::Scalar(b) => (a.dims.clone(), promote_scalar(a.dtype, b.dtype, float)?),
    };
    out.expect_dims(&dims)?;
    if !types.has(promoted) {
        return refuse(format!(
            "{} of {:?} and other of {:?} compute in {promoted:?}, one of {:?} is expected",
            a.name,
            a.dtype,
            b.dtype(),
            types.list()
        ));
    }
    Ok((dims, promoted))
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
    /// Types that the promoted type must be one of.
    fn types(self) -> Types {
        match self {
            Self::Remainder => FLOATS.and(Types::of(&[DataType::Int32, DataType::Int64])),
            _ => ARITH,
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
    let (dims, promoted) = common(&a, &b, &out, f.types(), out.dtype)?;
    match (f, &b) {
        (Binary::Pow, Other::Tensor(b)) if a.dtype == DataType::Bool && b.dtype == a.dtype => {
            return refuse(format!("{} and {} are both Bool", a.name, b.name));
        }
        (Binary::Pow, Other::Scalar(b)) if !promoted.is_float() && b.real() < 0.0 => {
            return refuse(format!(
                "the exponent is {}, of integers 0 or more is expected",
                b.real()
            ));
        }
        _ => {}
    }
    let mut computed = promoted;
    // True division of integers gives floats.
    if f == Binary::Div && !promoted.is_float() {
        out.expect_type(FLOATS)?;
        computed = DataType::Float;
    }
    if let Some(alpha) = alpha.filter(|alpha| alpha.dtype.is_float() && !computed.is_float()) {
        return refuse(format!(
            "alpha is {:?} and does not convert to {computed:?}",
            alpha.dtype
        ));
    }
    expect_castable(computed, out.dtype, out.name)?;
    kernel(move |data| {
        with_lane!(computed.class(), L => {
            let (x, y) = (data.read_as::<L>(&a, &dims)?, b.read::<L>(data, &dims)?);
            let alpha = alpha.map_or(L::one(), |alpha| alpha.lane());
            data.write(&out, &wrapped(f.lanes(x, &y, alpha), computed))
        })
    })
}

/// Wraps integers to the computed type, where the output is wider.
fn wrapped<L: Lane>(mut values: Vec<L>, computed: DataType) -> Vec<L> {
    if computed.class() == Class::I64 && computed != DataType::Int64 {
        each(&mut values, |x| {
            let whole = x.to::<i64>();
            L::from_i64(match computed {
                DataType::Int8 => i64::from(whole as i8),
                DataType::Int16 => i64::from(whole as i16),
                DataType::Int32 => i64::from(whole as i32),
                DataType::Uint8 => i64::from(whole as u8),
                DataType::Bool => i64::from(whole != 0),
                _ => whole,
            })
        });
    }
    values
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

    fn number(self, g: f32, saved: f32) -> f32 {
        let (x, y) = (saved, saved);
        match self {
            Self::Sigmoid => g * y * (1.0 - y),
            Self::Gelu => {
                let density = (-(x * x * 0.5)).exp();
                g * (normal_cdf(x) + x * (0.5 * GELU_SCALE) as f32 * density)
            }
            Self::GeluTanh => {
                let t = gelu_inner(x).tanh();
                let slope = 1.0 + (3.0 * GELU_CUBIC) as f32 * x * x;
                let inner = GELU_SCALE as f32 * slope;
                g * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner)
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
    for tensor in [&gradient, &saved, &out] {
        tensor.expect_type(FLT)?;
    }
    // Only the gradient of gelu is documented to promote and broadcast.
    let dims = if f == Backward::Sigmoid {
        saved.expect_like(&gradient, &gradient.dims)?;
        out.expect_dtype(gradient.dtype)?;
        gradient.dims.clone()
    } else {
        broadcast(&[&gradient, &saved])?
    };
    out.expect_dims(&dims)?;
    kernel(move |data| {
        let g = data.read_as::<f32>(&gradient, &dims)?;
        let saved = data.read_as::<f32>(&saved, &dims)?;
        data.write(&out, &zip(g, &saved, |g, saved| f.number(g, saved)))
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
}

/// `out = whether f holds of self and other`.
pub(crate) fn test(f: Test, a: Operand, b: impl Into<Other>, out: Operand) -> Outcome<Kernel> {
    let b = b.into();
    let (dims, computed) = common(&a, &b, &out, ARITH, DataType::Float)?;
    out.expect_type(ARITH)?;
    kernel(move |data| {
        with_lane!(computed.class(), L => {
            let (x, y) = (data.read_as::<L>(&a, &dims)?, b.read::<L>(data, &dims)?);
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
    a.expect_type(ARITH)?;
    b.expect_type(ARITH)?;
    let dims = broadcast(&[&condition, &a, &b])?;
    out.expect_dims(&dims)?;
    let computed = promote(a.dtype, b.dtype)?;
    expect_castable(computed, out.dtype, out.name)?;
    kernel(move |data| {
        with_lane!(computed.class(), L => {
            let chosen = data.read_as::<i64>(&condition, &dims)?;
            let (mut x, y) = (data.read_as::<L>(&a, &dims)?, data.read_as::<L>(&b, &dims)?);
            for ((x, y), chosen) in x.iter_mut().zip(y).zip(chosen) {
                if chosen == 0 {
                    *x = y;
                }
            }
            data.write(&out, &x)
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
                    *x = value.lane();
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
    x.expect_type(FLOATS.and(INTS))?;
    x.expect_rank(1..=8)?;
    out.expect_dims(&x.dims)?;
    let mut computed = x.dtype;
    for bound in low.iter().chain(&high) {
        computed = promote(computed, promote_scalar(x.dtype, bound.dtype, out.dtype)?)?;
    }
    expect_castable(computed, out.dtype, out.name)?;
    kernel(move |data| {
        with_lane!(computed.class(), L => {
            let mut values = data.read::<L>(&x)?;
            let (low, high) = (low.map(|s| s.lane::<L>()), high.map(|s| s.lane::<L>()));
            each(&mut values, |x| {
                let x = high.map_or(x, |high| x.smaller(high));
                low.map_or(x, |low| x.larger(low))
            });
            data.write(&out, &values)
        })
    })
}

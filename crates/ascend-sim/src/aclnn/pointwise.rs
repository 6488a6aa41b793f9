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

/// Computed types that some broadcasts are not offered for.
const FEW_AXES: Types = Types::of(&[DataType::Double, DataType::Int16]);
const FEW_AXES_MAX: usize = 5;

const SQRT_2: f64 = std::f64::consts::SQRT_2;
/// sqrt(2/pi), of the tanh approximation of gelu.
const GELU_SCALE: f64 = 0.797_884_560_802_865_4;
const GELU_CUBIC: f64 = 0.044_715;

/// Functions of one number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Unary {
    Neg,
    Abs,
    Sign,
    Sqrt,
    Rsqrt,
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
    Silu,
    Swish(f64),
    Gelu,
    GeluTanh,
    Relu,
}

use Unary::*;

/// What a function gives out.
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
            Sqrt | Rsqrt | Reciprocal | Log | Log1p | Sin | Cos => {
                (FLOATS.and(whole), Gives::Float, 0)
            }
            Exp => (FLOATS.and(Types::of(&[Bool, Int64])), Gives::Float, 0),
            Erf => {
                let taken = Types::of(&[Double, Float, Float16, Bool, Int64]);
                // bfloat16 is documented for A3 and not for A2.
                let a2 = sim().machine.soc_name.to_bytes().starts_with(b"Ascend910B");
                let bf16 = if a2 {
                    Types::of(&[])
                } else {
                    Types::of(&[Bf16])
                };
                (taken.and(bf16), Gives::Float, 0)
            }
            Tanh => (FLT.and(whole), Gives::Float, 0),
            Floor => (FLOATS.and(INTS), Gives::Same, 0),
            Ceil => (FLOATS, Gives::Same, 0),
            Round => (FLOATS.and(Types::of(&[Int32, Int64])), Gives::Same, 0),
            Sigmoid | Relu => (
                FLT.and(if self == Relu { INTS } else { FLT }),
                Gives::Own,
                0,
            ),
            Silu | Swish(_) | Gelu | GeluTanh => (FLT, Gives::Same, 0),
        }
    }

    fn lanes<L: Lane>(self, x: &mut [L]) {
        match self {
            Neg => each(x, L::neg),
            Abs => each(x, L::abs),
            Sign => each(x, L::sign),
            Relu => each(x, |x| x.larger(L::default())),
            // The rest are identities of integers.
            _ => {}
        }
    }

    fn reals<R: Real>(self, x: &mut [R]) {
        match self {
            Neg | Abs | Sign | Relu => self.lanes(x),
            Sqrt => each(x, R::sqrt),
            Rsqrt => each(x, |x| R::one().div(x.sqrt())),
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
            Sigmoid => each(x, logistic),
            Silu => each(x, |x| x.mul(logistic(x))),
            Swish(beta) => {
                let beta = R::from_f64(beta);
                each(x, |x| x.mul(logistic(x.mul(beta))))
            }
            Gelu => each(x, |x| x.mul(normal_cdf(x))),
            GeluTanh => each(x, |x| {
                x.mul(half::<R>()).mul(R::one().add(gelu_inner(x).tanh()))
            }),
        }
    }
}

fn each<L: Copy>(x: &mut [L], f: impl Fn(L) -> L) {
    for value in x {
        *value = f(*value);
    }
}

fn half<R: Real>() -> R {
    R::from_f64(0.5)
}

/// 1 / (1 + exp(-x)).
fn logistic<R: Real>(x: R) -> R {
    R::one().div(R::one().add(x.neg().exp()))
}

/// The distribution function of the standard normal distribution.
fn normal_cdf<R: Real>(x: R) -> R {
    half::<R>().mul(R::one().add(x.div(R::from_f64(SQRT_2)).erf()))
}

/// sqrt(2/pi) (x + 0.044715 x³).
fn gelu_inner<R: Real>(x: R) -> R {
    let cubic = R::from_f64(GELU_CUBIC).mul(x).mul(x).mul(x);
    R::from_f64(GELU_SCALE).mul(x.add(cubic))
}

/// `out = f(self)`.
pub(crate) fn unary(f: Unary, x: &Operand, out: &Operand) -> Outcome<Kernel> {
    let (types, gives, least) = f.limits();
    x.expect_type(types)?;
    x.expect_rank(least..=8)?;
    out.expect_dims(&x.dims)?;
    let computed = match gives {
        Gives::Same => {
            out.expect_dtype(x.dtype)?;
            x.dtype
        }
        Gives::Own => {
            expect_castable(x.dtype, out.dtype, out.name)?;
            x.dtype
        }
        Gives::Float => {
            out.expect_type(if f == Tanh { FLT } else { FLOATS })?;
            match (x.dtype.is_float(), out.dtype) {
                (true, _) => x.dtype,
                (false, DataType::Double) => DataType::Double,
                (false, _) => DataType::Float,
            }
        }
    };
    let (x, out) = (x.clone(), out.clone());
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

/// Functions of two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Binary {
    Mul,
    Div,
    DivTrunc,
    DivFloor,
    Remainder,
    Pow,
    Maximum,
    Minimum,
}

impl Binary {
    /// Types that the promoted type must be one of.
    fn types(self) -> Types {
        use DataType::*;
        match self {
            Self::Remainder => FLOATS.and(Types::of(&[Int32, Int64])),
            _ => ARITH,
        }
    }

    fn lanes<L: Lane>(self, a: Vec<L>, b: &[L]) -> Vec<L> {
        match self {
            Self::Mul => zip(a, b, L::mul),
            Self::Div => zip(a, b, L::div),
            Self::DivTrunc => zip(a, b, L::div_trunc),
            Self::DivFloor => zip(a, b, L::div_floor),
            Self::Remainder => zip(a, b, L::rem_floor),
            Self::Pow => zip(a, b, L::pow),
            Self::Maximum => zip(a, b, L::larger),
            Self::Minimum => zip(a, b, L::smaller),
        }
    }

    /// True division leaves the integers.
    fn computed(self, promoted: DataType, out: &Operand) -> Outcome<DataType> {
        if self != Self::Div || promoted.is_float() {
            return Ok(promoted);
        }
        out.expect_type(FLOATS)?;
        Ok(DataType::Float)
    }
}

fn zip<L: Copy>(mut a: Vec<L>, b: &[L], f: impl Fn(L, L) -> L) -> Vec<L> {
    for (a, b) in a.iter_mut().zip(b) {
        *a = f(*a, *b);
    }
    a
}

/// What a tensor is combined with.
#[derive(Clone)]
enum Other {
    Tensor(Operand),
    Scalar(Scalar),
}

impl Other {
    fn read<L: Lane>(&self, data: &Data<'_, '_>, dims: &[usize]) -> Outcome<Vec<L>> {
        match self {
            Self::Tensor(tensor) => data.read_as(tensor, dims),
            Self::Scalar(scalar) => Ok(vec![scalar.lane(); dims.iter().product()]),
        }
    }
}

/// Refuses a broadcast of too many axes, for the types for which it is limited.
fn expect_few_axes(computed: DataType, tensors: &[&Operand], dims: &[usize]) -> Outcome {
    if !FEW_AXES.has(computed) {
        return Ok(());
    }
    let spreads = |axis: usize| -> Vec<bool> {
        tensors
            .iter()
            .map(|t| {
                let lead = dims.len() - t.rank();
                axis < lead || t.dims[axis - lead] != dims[axis]
            })
            .collect()
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

/// `out = f(self, other)` with broadcasting.
pub(crate) fn binary(f: Binary, a: &Operand, b: &Operand, out: &Operand) -> Outcome<Kernel> {
    let (dims, computed) = common(a, b, out, f.types())?;
    if f == Binary::Pow && a.dtype == DataType::Bool && b.dtype == DataType::Bool {
        return refuse(format!("{} and {} are both Bool", a.name, b.name));
    }
    let computed = f.computed(computed, out)?;
    expect_castable(computed, out.dtype, out.name)?;
    combine(f, a, Other::Tensor(b.clone()), out, dims, computed, false)
}

/// `out = f(self, scalar)`, or `f(scalar, self)` when `turned`.
pub(crate) fn binary_scalar(
    f: Binary,
    a: &Operand,
    b: &Scalar,
    out: &Operand,
    turned: bool,
) -> Outcome<Kernel> {
    a.expect_type(ARITH)?;
    out.expect_dims(&a.dims)?;
    let promoted = promote_scalar(a.dtype, b.dtype, out.dtype)?;
    if !f.types().has(promoted) {
        return refuse(format!(
            "{} of {:?} and a scalar of {:?} compute in {promoted:?}, one of {:?} is expected",
            a.name,
            a.dtype,
            b.dtype,
            f.types().list()
        ));
    }
    if f == Binary::Pow && !turned && !promoted.is_float() && b.real() < 0.0 {
        return refuse(format!(
            "the exponent is {}, of integers 0 or more is expected",
            b.real()
        ));
    }
    let computed = f.computed(promoted, out)?;
    expect_castable(computed, out.dtype, out.name)?;
    let dims = a.dims.clone();
    combine(f, a, Other::Scalar(*b), out, dims, computed, turned)
}

fn combine(
    f: Binary,
    a: &Operand,
    b: Other,
    out: &Operand,
    dims: Vec<usize>,
    computed: DataType,
    turned: bool,
) -> Outcome<Kernel> {
    let (a, out) = (a.clone(), out.clone());
    kernel(move |data| {
        with_lane!(computed.class(), L => {
            let (x, y) = (data.read_as::<L>(&a, &dims)?, b.read::<L>(data, &dims)?);
            let result = if turned { f.lanes(y, &x) } else { f.lanes(x, &y) };
            data.write(&out, &wrapped(result, computed))
        })
    })
}

/// Integers as the computed type keeps them, where the output is wider.
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

/// Shape and type of a binary operator.
fn common(
    a: &Operand,
    b: &Operand,
    out: &Operand,
    types: Types,
) -> Outcome<(Vec<usize>, DataType)> {
    a.expect_type(ARITH)?;
    b.expect_type(ARITH)?;
    let dims = broadcast(&[a, b])?;
    out.expect_dims(&dims)?;
    let promoted = promote(a.dtype, b.dtype)?;
    if !types.has(promoted) {
        return refuse(format!(
            "{} of {:?} and {} of {:?} compute in {promoted:?}, one of {:?} is expected",
            a.name,
            a.dtype,
            b.name,
            b.dtype,
            types.list()
        ));
    }
    expect_few_axes(promoted, &[a, b], &dims)?;
    Ok((dims, promoted))
}

/// `out = left·self + right·other`, where alpha is one of the two factors.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Sum {
    /// self + alpha·other
    Add,
    /// self - alpha·other
    Sub,
    /// other - alpha·self
    Rsub,
}

impl Sum {
    fn lanes<L: Lane>(self, a: Vec<L>, b: &[L], alpha: L) -> Vec<L> {
        match self {
            Self::Add => zip(a, b, |a, b| a.add(alpha.mul(b))),
            Self::Sub => zip(a, b, |a, b| a.sub(alpha.mul(b))),
            Self::Rsub => zip(a, b, |a, b| b.sub(alpha.mul(a))),
        }
    }
}

/// alpha, which has to convert to the type that is computed in.
fn expect_alpha(alpha: &Scalar, computed: DataType) -> Outcome {
    if alpha.dtype.is_float() && !computed.is_float() {
        return refuse(format!(
            "alpha is {:?} and does not convert to {computed:?}",
            alpha.dtype
        ));
    }
    Ok(())
}

pub(crate) fn sum(
    f: Sum,
    a: &Operand,
    b: &Operand,
    alpha: &Scalar,
    out: &Operand,
) -> Outcome<Kernel> {
    let (dims, computed) = common(a, b, out, ARITH)?;
    sum_with(f, a, Other::Tensor(b.clone()), alpha, out, dims, computed)
}

pub(crate) fn sum_scalar(
    f: Sum,
    a: &Operand,
    b: &Scalar,
    alpha: &Scalar,
    out: &Operand,
) -> Outcome<Kernel> {
    a.expect_type(ARITH)?;
    out.expect_dims(&a.dims)?;
    let computed = promote_scalar(a.dtype, b.dtype, out.dtype)?;
    let dims = a.dims.clone();
    sum_with(f, a, Other::Scalar(*b), alpha, out, dims, computed)
}

fn sum_with(
    f: Sum,
    a: &Operand,
    b: Other,
    alpha: &Scalar,
    out: &Operand,
    dims: Vec<usize>,
    computed: DataType,
) -> Outcome<Kernel> {
    expect_alpha(alpha, computed)?;
    expect_castable(computed, out.dtype, out.name)?;
    let (a, alpha, out) = (a.clone(), *alpha, out.clone());
    kernel(move |data| {
        with_lane!(computed.class(), L => {
            let (x, y) = (data.read_as::<L>(&a, &dims)?, b.read::<L>(data, &dims)?);
            let result = f.lanes(x, &y, alpha.lane());
            data.write(&out, &wrapped(result, computed))
        })
    })
}

/// The quotient's rounding, by its number.
pub(crate) fn division(mode: i32) -> Outcome<Binary> {
    match mode {
        0 => Ok(Binary::Div),
        1 => Ok(Binary::DivTrunc),
        2 => Ok(Binary::DivFloor),
        _ => refuse(format!(
            "mode is {mode}, 0 (none), 1 (trunc) or 2 (floor) is expected"
        )),
    }
}

/// Gradients of activations: of the gradient given and the saved input or output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Backward {
    Sigmoid,
    Tanh,
    Silu,
    Swish(f64),
    Gelu,
    GeluTanh,
}

impl Backward {
    fn reals<R: Real>(self, g: Vec<R>, saved: &[R]) -> Vec<R> {
        let one = R::one();
        let swish = |g: R, x: R, beta: R| {
            let s = logistic(beta.mul(x));
            g.mul(s).mul(one.add(beta.mul(x).mul(one.sub(s))))
        };
        match self {
            Self::Sigmoid => zip(g, saved, |g, y| g.mul(y).mul(one.sub(y))),
            Self::Tanh => zip(g, saved, |g, y| g.mul(one.sub(y.mul(y)))),
            Self::Silu => zip(g, saved, |g, x| swish(g, x, one)),
            Self::Swish(beta) => zip(g, saved, |g, x| swish(g, x, R::from_f64(beta))),
            Self::Gelu => zip(g, saved, |g, x| {
                let density = x.mul(x).mul(half::<R>()).neg().exp();
                let scale = R::from_f64(0.5 * GELU_SCALE);
                g.mul(normal_cdf(x).add(x.mul(scale).mul(density)))
            }),
            Self::GeluTanh => zip(g, saved, |g, x| {
                let t = gelu_inner(x).tanh();
                let slope = one.add(R::from_f64(3.0 * GELU_CUBIC).mul(x).mul(x));
                let inner = R::from_f64(GELU_SCALE).mul(slope);
                let first = half::<R>().mul(one.add(t));
                let second = half::<R>().mul(x).mul(one.sub(t.mul(t))).mul(inner);
                g.mul(first.add(second))
            }),
        }
    }
}

/// Which gelu a text names.
pub(crate) fn gelu_backward(approximate: &str) -> Outcome<Backward> {
    match approximate {
        "none" => Ok(Backward::Gelu),
        "tanh" => Ok(Backward::GeluTanh),
        _ => refuse(format!(
            "approximate is `{approximate}`, `none` or `tanh` is expected"
        )),
    }
}

/// Which gelu a number names.
pub(crate) fn gelu(approximate: i64) -> Outcome<Unary> {
    match approximate {
        0 => Ok(Gelu),
        1 => Ok(GeluTanh),
        _ => refuse(format!(
            "approximate is {approximate}, 0 (none) or 1 (tanh) is expected"
        )),
    }
}

pub(crate) fn backward(
    f: Backward,
    gradient: &Operand,
    saved: &Operand,
    out: &Operand,
) -> Outcome<Kernel> {
    let types = if f == Backward::Tanh { FLOATS } else { FLT };
    for tensor in [gradient, saved, out] {
        tensor.expect_type(types)?;
    }
    // Only the gradient of gelu is documented to promote and broadcast.
    let dims = if matches!(f, Backward::Gelu | Backward::GeluTanh) {
        broadcast(&[gradient, saved])?
    } else {
        saved.expect_dtype(gradient.dtype)?;
        saved.expect_dims(&gradient.dims)?;
        out.expect_dtype(gradient.dtype)?;
        gradient.dims.clone()
    };
    out.expect_dims(&dims)?;
    let class = promote(gradient.dtype, saved.dtype)?.class();
    let (gradient, saved, out) = (gradient.clone(), saved.clone(), out.clone());
    kernel(move |data| {
        with_real!(class, R => {
            let (g, saved) = (data.read_as::<R>(&gradient, &dims)?, data.read_as::<R>(&saved, &dims)?);
            data.write(&out, &f.reals(g, &saved))
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
    fn lanes<L: Lane>(self, a: &[L], b: &[L]) -> Vec<i64> {
        fn all<L: Copy>(a: &[L], b: &[L], f: impl Fn(L, L) -> bool) -> Vec<i64> {
            a.iter().zip(b).map(|(a, b)| i64::from(f(*a, *b))).collect()
        }
        match self {
            Self::Eq => all(a, b, |a, b| a == b),
            Self::Ne => all(a, b, |a, b| a != b),
            Self::Gt => all(a, b, |a, b| a > b),
            Self::Ge => all(a, b, |a, b| a >= b),
            Self::Lt => all(a, b, |a, b| a < b),
            Self::Le => all(a, b, |a, b| a <= b),
            Self::And => all(a, b, |a, b| a.truth() && b.truth()),
            Self::Or => all(a, b, |a, b| a.truth() || b.truth()),
            Self::Xor => all(a, b, |a, b| a.truth() != b.truth()),
        }
    }
}

pub(crate) fn test(f: Test, a: &Operand, b: &Operand, out: &Operand) -> Outcome<Kernel> {
    let (dims, computed) = common(a, b, out, ARITH)?;
    test_with(f, a, Other::Tensor(b.clone()), out, dims, computed)
}

pub(crate) fn test_scalar(f: Test, a: &Operand, b: &Scalar, out: &Operand) -> Outcome<Kernel> {
    a.expect_type(ARITH)?;
    out.expect_dims(&a.dims)?;
    let computed = promote_scalar(a.dtype, b.dtype, DataType::Float)?;
    test_with(f, a, Other::Scalar(*b), out, a.dims.clone(), computed)
}

fn test_with(
    f: Test,
    a: &Operand,
    b: Other,
    out: &Operand,
    dims: Vec<usize>,
    computed: DataType,
) -> Outcome<Kernel> {
    out.expect_type(ARITH)?;
    let (a, out) = (a.clone(), out.clone());
    kernel(move |data| {
        with_lane!(computed.class(), L => {
            let (x, y) = (data.read_as::<L>(&a, &dims)?, b.read::<L>(data, &dims)?);
            data.write(&out, &f.lanes(&x, &y))
        })
    })
}

/// `out = !self`, or whether each element is finite.
pub(crate) fn truth(x: &Operand, out: &Operand, finite: bool) -> Outcome<Kernel> {
    x.expect_type(ARITH)?;
    out.expect_type(if finite { BOOL } else { ARITH })?;
    out.expect_dims(&x.dims)?;
    let (x, out) = (x.clone(), out.clone());
    kernel(move |data| {
        with_lane!(x.dtype.class(), L => {
            let values = data.read::<L>(&x)?;
            let holds = |x: &L| if finite { x.is_finite() } else { !x.truth() };
            let flags: Vec<i64> = values.iter().map(|x| i64::from(holds(x))).collect();
            data.write(&out, &flags)
        })
    })
}

/// `out = condition ? self : other`.
pub(crate) fn select(
    condition: &Operand,
    a: &Operand,
    b: &Operand,
    out: &Operand,
) -> Outcome<Kernel> {
    condition.expect_type(Types::of(&[DataType::Bool, DataType::Uint8]))?;
    a.expect_type(ARITH)?;
    b.expect_type(ARITH)?;
    let dims = broadcast(&[condition, a, b])?;
    out.expect_dims(&dims)?;
    let computed = promote(a.dtype, b.dtype)?;
    expect_castable(computed, out.dtype, out.name)?;
    let operands = (condition.clone(), a.clone(), b.clone(), out.clone());
    kernel(move |data| {
        let (condition, a, b, out) = &operands;
        with_lane!(computed.class(), L => {
            let chosen = data.read_as::<i64>(condition, &dims)?;
            let (mut x, y) = (data.read_as::<L>(a, &dims)?, data.read_as::<L>(b, &dims)?);
            for ((x, y), chosen) in x.iter_mut().zip(y).zip(chosen) {
                if chosen == 0 {
                    *x = y;
                }
            }
            data.write(out, &x)
        })
    })
}

/// The value of a masked fill.
#[derive(Clone)]
pub(crate) enum Value {
    Scalar(Scalar),
    Tensor(Operand),
}

impl Value {
    fn read<L: Lane>(&self, data: &Data<'_, '_>) -> Outcome<L> {
        match self {
            Self::Scalar(scalar) => Ok(scalar.lane()),
            Self::Tensor(tensor) => data
                .read::<L>(tensor)
                .map(|values| values.first().copied().unwrap_or_default()),
        }
    }
}

/// Writes `value` where the mask is true.
pub(crate) fn masked_fill(target: &Operand, mask: &Operand, value: Value) -> Outcome<Kernel> {
    use DataType::*;
    target.expect_type(FLT.and(Types::of(&[Bool, Int8, Int32, Int64])))?;
    mask.expect_dtype(Bool)?;
    let dims = broadcast(&[target, mask])?;
    target.expect_dims(&dims)?;
    let dtype = match &value {
        Value::Scalar(scalar) => scalar.dtype,
        Value::Tensor(tensor) => {
            tensor.expect_rank(0..=0)?;
            tensor.dtype
        }
    };
    if dtype.is_float() && !target.dtype.is_float() {
        return refuse(format!(
            "value is {dtype:?} and does not convert to {:?} of {}",
            target.dtype, target.name
        ));
    }
    let (target, mask) = (target.clone(), mask.clone());
    kernel(move |data| {
        with_lane!(target.dtype.class(), L => {
            let mut values = data.read::<L>(&target)?;
            let masked = data.read_as::<i64>(&mask, &dims)?;
            let value = value.read::<L>(data)?;
            for (x, masked) in values.iter_mut().zip(masked) {
                if masked != 0 {
                    *x = value;
                }
            }
            data.write(&target, &values)
        })
    })
}

/// `out = max(min(self, high), low)`, either bound absent.
pub(crate) fn clamp(
    x: &Operand,
    low: Option<Scalar>,
    high: Option<Scalar>,
    out: &Operand,
) -> Outcome<Kernel> {
    if low.is_none() && high.is_none() {
        return Err(Failure::new(
            ACLNN_NULLPTR,
            "clipValueMin and clipValueMax are both null",
        ));
    }
    x.expect_type(FLOATS.and(INTS))?;
    x.expect_rank(1..=8)?;
    out.expect_dims(&x.dims)?;
    let mut computed = x.dtype;
    for bound in low.iter().chain(&high) {
        computed = promote(computed, promote_scalar(x.dtype, bound.dtype, out.dtype)?)?;
    }
    expect_castable(computed, out.dtype, out.name)?;
    let (x, out) = (x.clone(), out.clone());
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

//! Methods of one form, for floats and whole numbers: a table names each with the values that it
//! gets.

use burn::backend::{Backend, Scalar};

use super::shapes::{Empty, PAIRS, SAMPLES};
use crate::support::compare::Tolerance;
use crate::support::input::{Range, Value, View::Transposed};
use crate::support::suite::{Args, Suite};

type Call<B> = fn(&mut Args<B>) -> Vec<Value<B>>;
type CallWith<B, T> = fn(&mut Args<B>, T) -> Vec<Value<B>>;

impl<B: Backend> Suite<B> {
    /// One tensor of each sample that `accepts` its shape.
    pub(super) fn unary(
        &mut self,
        op: &'static str,
        ranges: &[Range],
        tolerance: Tolerance,
        accepts: fn(&[usize]) -> bool,
        f: Call<B>,
    ) {
        for range in ranges {
            for (shape, view) in SAMPLES.iter().filter(|(shape, _)| accepts(shape)) {
                let x = self.input(shape, *view, range);
                self.push(op, "", vec![x], tolerance, f);
            }
        }
    }

    pub(super) fn with_scalar(
        &mut self,
        op: &'static str,
        scalars: &[Scalar],
        range: &Range,
        tolerance: Tolerance,
        f: CallWith<B, Scalar>,
    ) {
        for (k, (shape, view)) in SAMPLES.iter().enumerate() {
            let scalar = scalars[k % scalars.len()];
            let x = self.input(shape, *view, range);
            let note = format!("{scalar:?}");
            self.push(op, note, vec![x], tolerance, move |a| f(a, scalar));
        }
    }

    /// Operands that broadcast.
    pub(super) fn pairs(
        &mut self,
        op: &'static str,
        [left, right]: [&Range; 2],
        tolerance: Tolerance,
        f: Call<B>,
    ) {
        for ((shape_l, view_l), (shape_r, view_r)) in PAIRS {
            let l = self.input(shape_l, *view_l, left);
            let r = self.input(shape_r, *view_r, right);
            self.push(op, "", vec![l, r], tolerance, f);
        }
    }

    /// [`pairs`](Self::pairs), and a tensor with itself.
    pub(super) fn binary(
        &mut self,
        op: &'static str,
        ranges: [&Range; 2],
        tolerance: Tolerance,
        f: Call<B>,
    ) {
        self.pairs(op, ranges, tolerance, f);
        let x = self.input(&[3, 5], Transposed, ranges[1]);
        let note = "of one tensor with itself";
        self.push(op, note, vec![x], tolerance, move |a| {
            let x = a.v();
            f(&mut Args::new(vec![x.clone(), x], a.device.clone()))
        });
    }

    /// Reduces over every dimension of every sample; `empty` says whether over no elements too.
    pub(super) fn along(
        &mut self,
        op: &'static str,
        range: &Range,
        tolerance: Tolerance,
        empty: Empty,
        f: CallWith<B, usize>,
    ) {
        for (shape, view) in SAMPLES {
            for dim in (0..shape.len()).filter(|&dim| empty.allows(shape, dim)) {
                let x = self.input(shape, *view, range);
                let note = format!("dim {dim}");
                self.push(op, note, vec![x], tolerance, move |a| f(a, dim));
            }
        }
    }
}

macro_rules! unary {
    ($s:ident, $kind:ident $take:ident; $($op:ident: $ranges:expr, $tolerance:expr;)*) => {$(
        $s.unary(stringify!($op), &$ranges, $tolerance, |_| true, |a| {
            vec![Value::$kind(B::$op(a.$take()))]
        });
    )*};
}
macro_rules! with_scalar {
    ($s:ident, $kind:ident $take:ident; $($op:ident: $scalars:expr, $range:expr, $tolerance:expr;)*) => {$(
        $s.with_scalar(stringify!($op), &$scalars, &$range, $tolerance, |a, scalar| {
            vec![Value::$kind(B::$op(a.$take(), scalar))]
        });
    )*};
}
macro_rules! binary {
    ($s:ident, $kind:ident $take:ident; $($op:ident: $left:expr, $right:expr, $tolerance:expr;)*) => {$(
        $s.binary(stringify!($op), [&$left, &$right], $tolerance, |a| {
            vec![Value::$kind(B::$op(a.$take(), a.$take()))]
        });
    )*};
}
/// Comparisons of two tensors, both of each range, and of a tensor with a scalar.
macro_rules! compared {
    ($s:ident, $take:ident, $ranges:expr, $scalars:ident; $($op:ident)*; $($scalar:ident)*) => {
        for range in &$ranges {
            $($s.pairs(stringify!($op), [range, range], Exact, |a| {
                vec![Value::Bool(B::$op(a.$take(), a.$take(), BoolDType::Native))]
            });)*
        }
        $($s.$scalars(stringify!($scalar), |a, scalar| {
            vec![Value::Bool(B::$scalar(a.$take(), scalar, BoolDType::Native))]
        });)*
    };
}
/// One output, or several, for a call with a dimension.
macro_rules! along {
    ($s:ident, $take:ident; $($op:ident: $range:expr, $tolerance:expr, $empty:expr,
     |$x:ident, $dim:ident| $($kind:ident($out:expr)),+;)*) => {$(
        $s.along(stringify!($op), &$range, $tolerance, $empty, |a, $dim| {
            let $x = a.$take();
            vec![$(Value::$kind($out)),+]
        });
    )*};
}
/// Values with their indices, in mixed order.
macro_rules! indexed {
    ($s:ident, $kind:ident $take:ident; $($op:ident: $empty:expr, |$x:ident, $dim:ident| $out:expr;)*) => {$(
        $s.along(stringify!($op), &Range::Distinct, Exact, $empty, |a, $dim| {
            let $x = a.$take();
            let (values, indices) = $out;
            vec![Value::$kind(values), Value::Int(indices)]
        });
    )*};
}
/// Over the whole tensor; `true` where a tensor without elements has a result too.
macro_rules! whole {
    ($s:ident, $take:ident; $($op:ident: $range:expr, $tolerance:expr, $empty:expr,
     |$x:ident| $kind:ident($out:expr);)*) => {$(
        $s.unary(
            stringify!($op), std::slice::from_ref(&$range), $tolerance, |shape| $empty || !shape.contains(&0),
            |a| { let $x = a.$take(); vec![Value::$kind($out)] },
        );
    )*};
}
/// Calls of several methods with the same inputs.
macro_rules! ops {
    ($s:expr, $tolerance:expr, $inputs:expr, $note:expr, |$a:ident|
     $($kind:ident::$op:ident $args:tt;)*) => {{
        let inputs = Vec::from($inputs);
        $(op!($s, $tolerance, inputs.clone(), $note, |$a| $kind::$op $args);)*
    }};
}
pub(super) use {along, binary, compared, indexed, ops, unary, whole, with_scalar};

//! `BoolTensorOps`, except for the methods in `common`.

use burn::backend::tensor::BoolTensor;
use burn::backend::{Backend, FloatDType, IntDType, Scalar, read_sync};

use super::common::{self, flags};
use super::families::ops;
use super::shapes::{Empty, SAMPLES};
use crate::support::compare::Tolerance::Exact;
use crate::support::input::{
    FLAGS, Range, Value,
    View::{Contiguous, Transposed},
};
use crate::support::suite::{Suite, op};

type Binary<B> = fn(BoolTensor<B>, BoolTensor<B>) -> BoolTensor<B>;

/// In the bool type of the suite.
pub(crate) fn all<B: Backend>(s: &mut Suite<B>) {
    common::creation(s);
    common::joining(s);
    common::movement(s);
    common::masks(s);
    let binary: [(_, Binary<B>); 5] = [
        ("bool_and", B::bool_and),
        ("bool_or", B::bool_or),
        ("bool_xor", B::bool_xor),
        ("bool_equal", B::bool_equal),
        ("bool_not_equal", B::bool_not_equal),
    ];
    for (op, f) in binary {
        for ((shape_l, view_l), (shape_r, view_r)) in super::shapes::PAIRS {
            let l = s.input(shape_l, *view_l, &FLAGS);
            let r = s.input(shape_r, *view_r, &FLAGS);
            s.push(op, "", vec![l, r], Exact, move |a| {
                vec![Value::Bool(f(a.b(), a.b()))]
            });
        }
    }
    for (shape, view) in SAMPLES {
        let x = s.input(shape, *view, &FLAGS);
        for to in [IntDType::I32, IntDType::I64, IntDType::I16, IntDType::U8] {
            ops!(s, Exact, [x.clone()], format!("to {to:?}"), |a| Int::bool_into_int(a.b(), to););
        }
        for to in [FloatDType::F32, FloatDType::F16, FloatDType::BF16] {
            ops!(s, Exact, [x.clone()], format!("to {to:?}"), |a|
                Float::bool_into_float(a.b(), to););
        }
        for flag in [true, false].map(Scalar::Bool) {
            ops!(s, Exact, [x.clone()], format!("{flag:?}"), |a|
                Bool::bool_equal_elem(a.b(), flag);
                Bool::bool_not_equal_elem(a.b(), flag);
            );
        }
        ops!(s, Exact, [x.clone()], "", |a|
            Bool::bool_not(a.b());
            Bool::bool_any(a.b());
            Bool::bool_all(a.b());
        );
        for dim in (0..shape.len()).filter(|&dim| Empty::Unnamed.allows(shape, dim)) {
            ops!(s, Exact, [x.clone()], format!("dim {dim}"), |a|
                Bool::bool_any_dim(a.b(), dim);
                Bool::bool_all_dim(a.b(), dim);
            );
        }
        let mask = s.input(shape, Contiguous, &FLAGS);
        s.push("bool_mask_select", "", vec![x.clone(), mask], Exact, |a| {
            flags::<B>(read_sync(B::bool_mask_select(a.b(), a.b())))
        });
        for to in [IntDType::I32, IntDType::I64] {
            let note = format!("to {to:?}");
            s.push("bool_argwhere", note, vec![x.clone()], Exact, move |a| {
                vec![Value::Int(read_sync(B::bool_argwhere(a.b(), to)))]
            });
        }
    }
    for value in [0.0, 1.0] {
        let uniform = s.input(&[3, 4], Transposed, &Range::Listed(vec![value; 12]));
        ops!(s, Exact, [uniform], "uniform", |a|
            Bool::bool_any(a.b());
            Bool::bool_all(a.b());
            Bool::bool_any_dim(a.b(), 1);
            Bool::bool_all_dim(a.b(), 0);
        );
    }
}

//! `QTensorOps`: each case quantises its inputs, calls the method, and compares what the result
//! stands for.

use burn::backend::quantization::QuantizationParametersPrimitive;
use burn::backend::{Backend, BoolDType, DType, FloatDType, IntDType, TensorPrimitive, read_sync};
use burn::tensor::quantization::{QuantScheme, QuantStore};
use burn::tensor::{Shape, Slice};

use crate::support::compare::Tolerance;
use crate::support::input::{
    POSITIVE, Range, SPREAD, UNIT, Value,
    View::{Contiguous, Transposed},
};
use crate::support::suite::Suite;

/// Two steps of the eight-bit grid of the largest value: a method may quantise its result anew.
const GRID: Tolerance = Tolerance::Scaled(1 << 17);
const BOOL: BoolDType = BoolDType::Native;
const FLOAT: FloatDType = FloatDType::F32;
const INT: IntDType = IntDType::I32;

fn scheme() -> QuantScheme {
    QuantScheme::default().with_store(QuantStore::Native)
}

/// Results as plain values, by the method's return type.
macro_rules! values {
    (quantised, $out:expr) => {
        vec![Value::Float(B::dequantize($out, FLOAT))]
    };
    (primitive, $out:expr) => {
        vec![Value::Float($out.tensor())]
    };
    (int, $out:expr) => {
        vec![Value::Int($out)]
    };
    (bool, $out:expr) => {
        vec![Value::Bool($out)]
    };
    (pair, $out:expr) => {{
        let (values, indices) = $out;
        vec![
            Value::Float(B::dequantize(values, FLOAT)),
            Value::Int(indices),
        ]
    }};
}

/// `method(arguments) => what it returns;` with `x` and `y` the quantised inputs, `i` whole numbers
/// below 3.
macro_rules! cases {
    ($s:ident, $range:expr, |$x:ident, $y:ident, $i:ident| $($op:ident($($arg:expr),*) => $kind:ident;)*) => {$(
        for view in [Contiguous, Transposed] {
            let x = $s.input(&[3, 3], view, &$range);
            let y = $s.input(&[3, 3], view, &POSITIVE);
            let i = $s.typed(&[3, 3], Contiguous, INT.into(), &Range::Whole(0, 3));
            $s.push(stringify!($op), "", vec![x, y, i], GRID, |a| {
                let $x = B::quantize_dynamic(a.f(), &scheme());
                let $y = B::quantize_dynamic(a.f(), &scheme());
                let $i = a.i();
                let _ = (&$x, &$y, &$i);
                values!($kind, B::$op($($arg),*))
            });
        }
    )*};
}

pub(crate) fn all<B: Backend>(s: &mut Suite<B>) {
    cases!(s, SPREAD, |x, y, i|
        q_reshape(x, Shape::new([9, 1])) => quantised;
        q_detach(x) => quantised;
        q_set_require_grad(x, true) => quantised;
        q_expand(x, Shape::new([2, 3, 3])) => quantised;
        q_transpose(x) => quantised;
        q_swap_dims(x, 0, 1) => quantised;
        q_permute(x, &[1, 0]) => quantised;
        q_flip(x, &[1]) => quantised;
        q_select(x, 1, B::int_reshape(i, Shape::new([9]))) => quantised;
        q_slice(x, &[Slice::new(1, Some(3), 1), Slice::new(0, None, 2)]) => quantised;
        q_gather(1, x, i) => quantised;
        q_repeat_dim(x, 0, 2) => quantised;
        q_add(x, y) => primitive;
        q_sub(x, y) => primitive;
        q_mul(x, y) => primitive;
        q_div(x, y) => primitive;
        q_add_scalar(x, 1.5.into()) => primitive;
        q_sub_scalar(x, 1.5.into()) => primitive;
        q_mul_scalar(x, 1.5.into()) => primitive;
        q_div_scalar(x, 1.5.into()) => primitive;
        q_clamp_min(x, 0.5.into()) => primitive;
        q_clamp_max(x, 0.5.into()) => primitive;
        q_clamp(x, (-0.5).into(), 0.5.into()) => primitive;
        q_matmul(TensorPrimitive::QFloat(x), TensorPrimitive::QFloat(y)) => primitive;
        q_neg(x) => primitive;
        q_sum(x) => primitive;
        q_sum_dim(x, 1) => primitive;
        q_prod(x) => primitive;
        q_prod_dim(x, 1) => primitive;
        q_mean(x) => primitive;
        q_mean_dim(x, 1) => primitive;
        q_cumsum(x, 1) => primitive;
        q_cumprod(x, 1) => primitive;
        q_cummin(x, 1) => primitive;
        q_cummax(x, 1) => primitive;
        q_exp(x) => primitive;
        q_powi_scalar(x, 2.into()) => primitive;
        q_abs(x) => quantised;
        q_cos(x) => primitive;
        q_sin(x) => primitive;
        q_cosh(x) => primitive;
        q_sinh(x) => primitive;
        q_tanh(x) => primitive;
        q_erf(x) => primitive;
        q_cat(vec![x, y], 0) => quantised;
        q_max(x) => quantised;
        q_max_dim(x, 1) => quantised;
        q_min(x) => quantised;
        q_min_dim(x, 1) => quantised;
        q_max_abs(x) => quantised;
        q_max_abs_dim(x, 1) => quantised;
        q_any(x, BOOL) => bool;
        q_any_dim(x, 1, BOOL) => bool;
        q_all(x, BOOL) => bool;
        q_all_dim(x, 1, BOOL) => bool;
        q_sort(x, 1, false) => quantised;
        q_topk(x, 1, 2) => quantised;
    );
    cases!(s, POSITIVE, |x, y, i|
        q_recip(x) => primitive;
        q_log(x) => primitive;
        q_log1p(x) => primitive;
        q_sqrt(x) => primitive;
        q_powf(x, y) => primitive;
        q_powi(x, i) => primitive;
        q_powf_scalar(x, 1.5.into()) => primitive;
    );
    cases!(s, UNIT, |x, y, i| q_tan(x) => primitive;);
    // Values that stay apart on the eight-bit grid.
    cases!(s, Range::Distinct, |x, y, i|
        q_argmax(x, 1, INT) => int;
        q_argmin(x, 1, INT) => int;
        q_argsort(x, 1, true, INT) => int;
        q_argtopk(x, 1, 2, INT) => int;
        q_topk_with_indices(x, 1, 2, INT) => pair;
        q_max_dim_with_indices(x, 1, INT) => pair;
        q_min_dim_with_indices(x, 1, INT) => pair;
        q_sort_with_indices(x, 1, false, INT) => pair;
    );
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for view in [Contiguous, Transposed] {
            let x = s.typed(&[3, 4], view, dtype, &SPREAD);
            s.push("quantize_dynamic", "", vec![x.clone()], GRID, |a| {
                vec![Value::Float(B::dequantize(
                    B::quantize_dynamic(a.f(), &scheme()),
                    FLOAT,
                ))]
            });
            s.push(
                "dequantize",
                format!("to {}", dtype.name()),
                vec![x],
                GRID,
                move |a| {
                    vec![Value::Float(B::dequantize(
                        B::quantize_dynamic(a.f(), &scheme()),
                        dtype.into(),
                    ))]
                },
            );
        }
    }
    let scale = s.plain(&[1], &Range::Listed(vec![0.03125]));
    let x = s.plain(&[3, 4], &Range::Quarters);
    s.push("quantize", "", vec![x.clone(), scale], GRID, |a| {
        let x = a.f();
        let scales = QuantizationParametersPrimitive {
            scales: a.f(),
            global: None,
        };
        vec![Value::Float(B::dequantize(
            B::quantize(x, &scheme(), scales),
            FLOAT,
        ))]
    });
    s.push("q_is_require_grad", "", vec![x.clone()], GRID, |a| {
        let tracked = B::q_is_require_grad(&B::quantize_dynamic(a.f(), &scheme()));
        let value = if tracked { 1.0 } else { 0.0 };
        vec![Value::Float(B::float_full(
            Shape::new([1]),
            value.into(),
            &a.device,
            FLOAT,
        ))]
    });
    s.push("q_to_device", "", vec![x.clone()], GRID, |a| {
        let q = B::quantize_dynamic(a.f(), &scheme());
        vec![Value::Float(B::dequantize(
            B::q_to_device(q, &a.device),
            FLOAT,
        ))]
    });
    // There and back, and the bytes in between.
    for op in ["q_into_data", "q_from_data"] {
        s.push(op, "", vec![x.clone()], GRID, |a| {
            let data =
                read_sync(B::q_into_data(B::quantize_dynamic(a.f(), &scheme()))).expect("reads");
            vec![Value::Float(B::dequantize(
                B::q_from_data(data, &a.device),
                FLOAT,
            ))]
        });
    }
}

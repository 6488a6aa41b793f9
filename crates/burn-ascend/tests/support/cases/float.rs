//! `FloatTensorOps`, except for the methods in `common`.

use burn::backend::ops::{GridSampleOptions, GridSamplePaddingMode, InterpolateMode};
use burn::backend::{Backend, BoolDType, DType, FloatDType, IntDType, Scalar, read_sync};
use burn::tensor::Shape;

use super::common::{self, FLAG};
use super::families::{along, binary, compared, indexed, ops, unary, whole, with_scalar};
use super::shapes::{Empty, PAIRS, SAMPLES};
use crate::support::compare::Tolerance::{Exact, Scaled, Ulps};
use crate::support::input::{
    FLAGS, POSITIVE, Range, SPREAD, UNIT, Value,
    View::{Contiguous, Expanded, Sliced, Stepped, Transposed},
};
use crate::support::suite::{Args, Suite, op};

const BOOL: BoolDType = BoolDType::Native;
const FLOATS: [FloatDType; 4] = [
    FloatDType::F32,
    FloatDType::F16,
    FloatDType::BF16,
    FloatDType::F64,
];
const INTS: [IntDType; 2] = [IntDType::I32, IntDType::I64];
const INT: DType = DType::I32;
impl<B: Backend> Suite<B> {
    fn float_scalars(&mut self, op: &'static str, f: fn(&mut Args<B>, Scalar) -> Vec<Value<B>>) {
        for scalar in [
            Scalar::Float(0.25),
            Scalar::Int(1),
            Scalar::Float(f64::INFINITY),
        ] {
            let ranges = [Range::Quarters, Range::Special];
            for (range, (shape, view)) in ranges.iter().cycle().zip(SAMPLES) {
                let x = self.input(shape, *view, range);
                let note = format!("{scalar:?}");
                self.push(op, note, vec![x], Exact, move |a| f(a, scalar));
            }
        }
        // Most of these change when they are rounded to the tensor's type; the last one rounds up
        // to f16, and by way of 32 bits down.
        let tie = 1.0 + 2.0_f64.powi(-11) + 2.0_f64.powi(-30);
        let numbers = [
            0.1,
            1e5,
            12345.678,
            1e39,
            f64::INFINITY,
            f64::NAN,
            -0.0,
            tie,
        ];
        let values: Vec<f64> = numbers
            .iter()
            .flat_map(|&n| [n, -n, n * 1.01, n * 0.99])
            .collect();
        for number in numbers.into_iter().flat_map(|n| [n, -n]) {
            let x = self.plain(&[values.len()], &Range::Listed(values.clone()));
            let note = format!("{number:?}");
            self.push(op, note, vec![x], Exact, move |a| {
                f(a, Scalar::Float(number))
            });
        }
    }
}

/// Creation, transfer and casts.
pub(crate) fn creation<B: Backend>(s: &mut Suite<B>) {
    common::creation(s);
    let dtype = s.float_dtype();
    let values = [
        Scalar::Float(-2.75),
        Scalar::Int(3),
        Scalar::UInt(2),
        Scalar::Bool(true),
    ];
    for value in values {
        ops!(s, Exact, [], format!("{value:?}"), |a|
            Float::float_full(Shape::from(vec![2, 3]), value, &a.device, dtype););
    }
    for (shape, view) in SAMPLES {
        for to in FLOATS {
            let x = s.input(shape, *view, &SPREAD);
            ops!(s, Exact, [x], format!("to {to:?}"), |a| Float::float_cast(a.f(), to););
        }
        for to in INTS {
            // Halves and thirds of both signs: a cast truncates.
            for range in [Range::Quarters, Range::Uniform(-100.0, 100.0)] {
                let x = s.input(shape, *view, &range);
                ops!(s, Exact, [x], format!("to {to:?}"), |a| Int::float_into_int(a.f(), to););
            }
        }
    }
    let x = s.plain(&[9], &Range::Special);
    ops!(s, Exact, [x], "special", |a| Float::float_cast(a.f(), FloatDType::F32););
    // Around the ends of the half types: values that round down, overflow or underflow.
    let ends = vec![65504.0, 65519.0, 65520.0, -1e6, 3.4e38, 6e-8, 2e-8, -1e-40];
    for to in FLOATS {
        let x = s.plain(&[8], &Range::Listed(ends.clone()));
        ops!(s, Exact, [x], format!("the ends to {to:?}"), |a| Float::float_cast(a.f(), to););
    }
    unary!(s, Float f; float_detach: [SPREAD], Exact;);
    let x = s.plain(&[2, 3], &SPREAD);
    ops!(s, Exact, [x.clone()], "", |a| Float::float_set_require_grad(a.f(), true););
    s.push("float_is_require_grad", "", vec![x], Exact, |a| {
        let tracked = B::float_is_require_grad(&a.f());
        vec![Value::Float(B::float_full(
            Shape::from(vec![1]),
            Scalar::Float(f64::from(u8::from(tracked))),
            &a.device,
            FloatDType::F32,
        ))]
    });
}

/// Arithmetic and functions of single elements, comparisons, masks.
pub(crate) fn elementwise<B: Backend>(s: &mut Suite<B>) {
    common::masks(s);
    binary!(s, Float f;
        float_add: SPREAD, SPREAD, Ulps(1);
        float_sub: SPREAD, SPREAD, Ulps(1);
        float_mul: SPREAD, SPREAD, Ulps(1);
        float_div: SPREAD, Range::NonZeroQuarters, Ulps(2);
        float_remainder: Range::Quarters, Range::NonZeroQuarters, Exact;
        float_powf: POSITIVE, Range::Uniform(-2.0, 2.0), Ulps(16);
        float_hypot: SPREAD, SPREAD, Ulps(8);
        float_atan2: SPREAD, SPREAD, Ulps(8);
    );
    let special = [0, 1].map(|_| s.plain(&[81], &Range::Special));
    ops!(s, Exact, special, "special values", |a|
        Float::float_add(a.f(), a.f());
        Float::float_sub(a.f(), a.f());
        Float::float_mul(a.f(), a.f());
        Float::float_div(a.f(), a.f());
    );
    // A scalar may be rounded to the tensor's type or not: where it cancels, the sum shows it.
    let scalars = [Scalar::Float(1.5), Scalar::Int(-2), Scalar::Float(-0.1)];
    with_scalar!(s, Float f;
        float_add_scalar: scalars, SPREAD, Scaled(1);
        float_sub_scalar: scalars, SPREAD, Scaled(1);
        float_mul_scalar: scalars, SPREAD, Ulps(2);
        float_div_scalar: scalars, SPREAD, Ulps(2);
        float_remainder_scalar: [Scalar::Float(1.5), Scalar::Int(2), Scalar::Float(-0.5)], Range::Quarters, Exact;
        float_clamp_min: [Scalar::Float(0.5), Scalar::Int(-1)], SPREAD, Exact;
        float_clamp_max: [Scalar::Float(0.5), Scalar::Int(-1)], SPREAD, Exact;
        float_powf_scalar: [Scalar::Float(0.5), Scalar::Float(-1.5), Scalar::Float(2.5)], POSITIVE, Ulps(16);
        float_powf_scalar_impl: [Scalar::Float(0.5), Scalar::Float(-1.5), Scalar::Int(2)], POSITIVE, Ulps(16);
        float_powi_scalar: [Scalar::Int(2), Scalar::Int(3), Scalar::Int(-1), Scalar::Int(0), Scalar::Int(1)],
            Range::NonZeroQuarters, Ulps(8);
        float_powi_scalar_impl: [Scalar::Int(2), Scalar::Int(3), Scalar::Int(-2)], Range::NonZeroQuarters, Ulps(8);
    );
    // Products and powers past the largest half and below the smallest.
    let x = s.plain(&[4], &Range::Listed(vec![300.0, -300.0, 1e-4, -1e-4]));
    ops!(s, Ulps(2), [x.clone(), x.clone()], "ends", |a| Float::float_mul(a.f(), a.f()););
    op!(s, Ulps(2), [x], "ends", |a| Float::float_exp(a.f()));
    // Squares of negative numbers, as a variance takes them.
    with_scalar!(s, Float f; float_powf_scalar: [Scalar::Float(2.0), Scalar::Int(2)], SPREAD, Ulps(4););
    for (shape, view) in SAMPLES {
        let x = s.input(shape, *view, &SPREAD);
        ops!(s, Exact, [x], "", |a|
            Float::float_clamp(a.f(), Scalar::Float(-0.5), Scalar::Int(2)););
    }
    for ((shape_l, view_l), (shape_r, view_r)) in PAIRS {
        let l = s.input(shape_l, *view_l, &Range::NonZeroQuarters);
        let r = s.typed(shape_r, *view_r, INT, &Range::Whole(-1, 4));
        op!(s, Ulps(8), [l, r], |a| Float::float_powi(a.f(), a.i()));
    }
    unary!(s, Float f;
        float_neg: [SPREAD, Range::Special], Exact;
        float_abs: [SPREAD, Range::Special], Exact;
        float_recip: [Range::NonZeroQuarters, Range::Special], Ulps(2);
        float_exp: [SPREAD, Range::Special], Ulps(8);
        float_log: [POSITIVE, Range::Special], Scaled(4);
        float_log1p: [POSITIVE, UNIT], Scaled(4);
        float_sqrt: [POSITIVE, Range::Special], Ulps(2);
        float_cos: [SPREAD], Scaled(4);
        float_sin: [SPREAD], Scaled(4);
        float_tan: [UNIT], Ulps(16);
        float_cosh: [SPREAD], Ulps(16);
        float_sinh: [SPREAD], Scaled(8);
        float_tanh: [SPREAD, Range::Special], Scaled(4);
        float_acos: [UNIT], Scaled(4);
        float_acosh: [Range::Uniform(1.05, 4.0)], Scaled(8);
        float_asin: [UNIT], Scaled(4);
        float_asinh: [SPREAD], Scaled(8);
        float_atan: [SPREAD, Range::Special], Scaled(4);
        float_atanh: [UNIT], Scaled(8);
        float_erf: [SPREAD], Scaled(4);
        float_round: [Range::Quarters, SPREAD], Exact;
        float_floor: [Range::Quarters, SPREAD], Exact;
        float_ceil: [Range::Quarters, SPREAD], Exact;
        float_trunc: [Range::Quarters, SPREAD, Range::Special], Exact;
        float_sign: [Range::Quarters], Exact;
    );
    // A backend may store flags in another type where burn asks for it.
    for (shape, view) in SAMPLES {
        let x = s.input(shape, *view, &Range::Quarters);
        let (one, byte) = (Scalar::Float(1.0), BoolDType::U8);
        ops!(s, Exact, [x.clone(), x.clone()], "u8", |a| Bool::float_equal(a.f(), a.f(), byte););
        ops!(s, Exact, [x.clone()], "u8", |a| Bool::float_greater_elem(a.f(), one, byte););
        op!(s, Exact, [x], "u8", |a| Bool::float_is_nan(a.f(), byte));
    }
    compared!(s, f, [Range::Quarters, Range::Special], float_scalars;
        float_equal float_not_equal float_greater float_greater_equal float_lower float_lower_equal;
        float_equal_elem float_not_equal_elem float_greater_elem float_greater_equal_elem float_lower_elem
        float_lower_equal_elem
    );
    for (shape, view) in SAMPLES {
        let x = s.input(shape, *view, &Range::Special);
        op!(s, Exact, [x.clone()], |a| Bool::float_is_nan(a.f(), BOOL));
        op!(s, Exact, [x], |a| Bool::float_is_inf(a.f(), BOOL));
    }
    for (shape, view) in SAMPLES {
        let x = s.input(shape, *view, &SPREAD);
        let mask = s.typed(shape, Contiguous, FLAG, &FLAGS);
        s.push("float_mask_select", "", vec![x, mask], Exact, |a| {
            vec![Value::Float(read_sync(B::float_mask_select(a.f(), a.b())))]
        });
    }
}

/// Reductions, scans, order.
pub(crate) fn reductions<B: Backend>(s: &mut Suite<B>) {
    whole!(s, f;
        float_sum: SPREAD, Scaled(16), true, |x| Float(B::float_sum(x));
        float_mean: SPREAD, Scaled(16), false, |x| Float(B::float_mean(x));
        float_prod: Range::Factors, Scaled(32), true, |x| Float(B::float_prod(x));
        float_max: SPREAD, Exact, false, |x| Float(B::float_max(x));
        float_min: SPREAD, Exact, false, |x| Float(B::float_min(x));
        float_max_abs: SPREAD, Exact, false, |x| Float(B::float_max_abs(x));
        float_any: FLAGS, Exact, true, |x| Bool(B::float_any(x, BOOL));
        float_all: FLAGS, Exact, true, |x| Bool(B::float_all(x, BOOL));
    );
    // NaN and infinities reach the result.
    let rows = [
        [1.0, f64::NAN, 2.0],
        [1.0, f64::INFINITY, 2.0],
        [f64::NEG_INFINITY, f64::INFINITY, 0.0],
    ];
    let x = s.plain(&[3, 3], &Range::Listed(rows.concat()));
    ops!(s, Scaled(1), [x.clone()], "special values", |a|
        Float::float_sum_dim(a.f(), 1);
        Float::float_mean_dim(a.f(), 1);
        Float::float_sum(a.f());
    );
    ops!(s, Exact, [x], "special values", |a|
        Float::float_max_dim(a.f(), 1);
        Float::float_min_dim(a.f(), 1);
        Float::float_max(a.f());
        Float::float_clamp(a.f(), Scalar::Int(-1), Scalar::Int(1));
        Float::float_clamp_min(a.f(), Scalar::Int(-1));
        Float::float_clamp_max(a.f(), Scalar::Int(1));
        Float::float_floor(a.f());
        Bool::float_any(a.f(), BOOL);
    );
    let zeros = s.plain(&[3, 4], &Range::Listed(vec![0.0; 12]));
    op!(s, Exact, [zeros], "zeros", |a| Bool::float_any(a.f(), BOOL));
    let ones = s.plain(&[3, 4], &Range::Listed(vec![-1.0; 12]));
    ops!(s, Exact, [ones], "no zeros", |a| Bool::float_all(a.f(), BOOL););
    along!(s, f;
        float_sum_dim: SPREAD, Scaled(16), Empty::Reduces, |x, dim| Float(B::float_sum_dim(x, dim));
        float_mean_dim: SPREAD, Scaled(16), Empty::Refused, |x, dim| Float(B::float_mean_dim(x, dim));
        float_prod_dim: Range::Factors, Scaled(32), Empty::Reduces, |x, dim| Float(B::float_prod_dim(x, dim));
        float_max_dim: SPREAD, Exact, Empty::Refused, |x, dim| Float(B::float_max_dim(x, dim));
        float_min_dim: SPREAD, Exact, Empty::Refused, |x, dim| Float(B::float_min_dim(x, dim));
        float_max_abs_dim: SPREAD, Exact, Empty::Refused, |x, dim| Float(B::float_max_abs_dim(x, dim));
        float_any_dim: FLAGS, Exact, Empty::Unnamed, |x, dim| Bool(B::float_any_dim(x, dim, BOOL));
        float_all_dim: FLAGS, Exact, Empty::Unnamed, |x, dim| Bool(B::float_all_dim(x, dim, BOOL));
        float_argmax: Range::Distinct, Exact, Empty::Refused, |x, dim| Int(B::float_argmax(x, dim, INT.into()));
        float_argmin: Range::Distinct, Exact, Empty::Refused, |x, dim| Int(B::float_argmin(x, dim, INT.into()));
        float_cumsum: SPREAD, Scaled(16), Empty::Reduces, |x, dim| Float(B::float_cumsum(x, dim));
        float_cumprod: Range::Factors, Scaled(32), Empty::Reduces, |x, dim| Float(B::float_cumprod(x, dim));
        float_cummin: SPREAD, Exact, Empty::Reduces, |x, dim| Float(B::float_cummin(x, dim));
        float_cummax: SPREAD, Exact, Empty::Reduces, |x, dim| Float(B::float_cummax(x, dim));
        float_sort: SPREAD, Exact, Empty::Reduces, |x, dim| Float(B::float_sort(x.clone(), dim, false)), Float(B::float_sort(x, dim, true));
        float_argsort: Range::Distinct, Exact, Empty::Reduces,
            |x, dim| Int(B::float_argsort(x.clone(), dim, false, INT.into())), Int(B::float_argsort(x, dim, true, INT.into()));
        float_topk: SPREAD, Exact, Empty::Refused, |x, dim| Float(B::float_topk(x, dim, 1));
        float_argtopk: Range::Distinct, Exact, Empty::Refused, |x, dim| Int(B::float_argtopk(x, dim, 1, INT.into()));
    );
    indexed!(s, Float f;
        float_max_dim_with_indices: Empty::Refused,
            |x, dim| B::float_max_dim_with_indices(x, dim, INT.into());
        float_min_dim_with_indices: Empty::Refused,
            |x, dim| B::float_min_dim_with_indices(x, dim, INT.into());
        float_sort_with_indices: Empty::Reduces,
            |x, dim| B::float_sort_with_indices(x, dim, true, INT.into());
        float_topk_with_indices: Empty::Refused,
            |x, dim| B::float_topk_with_indices(x, dim, 1, INT.into());
    );
    for view in [Contiguous, Transposed, Stepped] {
        let x = s.input(&[4, 9], view, &Range::Distinct);
        ops!(s, Exact, [x.clone()], "k 3", |a| Float::float_topk(a.f(), 1, 3););
        ops!(s, Exact, [x.clone()], "k 3", |a| Int::float_argtopk(a.f(), 1, 3, IntDType::I64););
        ops!(s, Exact, [x.clone()], "to i64", |a| Int::float_argmax(a.f(), 0, IntDType::I64););
        ops!(s, Exact, [x.clone()], "to i64", |a| Int::float_argmin(a.f(), 0, IntDType::I64););
        ops!(s, Exact, [x], "to i64", |a| Int::float_argsort(a.f(), 0, false, IntDType::I64););
    }
    // Of equal values the first counts, as in every backend of burn.
    let ties = s.plain(
        &[2, 4],
        &Range::Listed(vec![1.0, 3.0, 3.0, 0.0, -1.0, -1.0, -2.0, -1.0]),
    );
    ops!(s, Exact, [ties.clone()], "ties", |a| Int::float_argmax(a.f(), 1, IntDType::I32););
    ops!(s, Exact, [ties], "ties", |a| Int::float_argmin(a.f(), 1, IntDType::I32););
    let dims: [(&[usize], &[usize]); 5] = [
        (&[3, 4], &[0, 1]),
        (&[2, 3, 4], &[0, 2]),
        (&[2, 3, 4], &[1]),
        (&[2, 1, 3, 2], &[0, 1, 3]),
        (&[2, 3], &[]),
    ];
    for (shape, dims) in dims {
        for view in [Contiguous, Transposed] {
            let x = s.input(shape, view, &SPREAD);
            ops!(s, Scaled(16), [x], format!("dims {dims:?}"), |a|
                Float::float_sum_dims(a.f(), dims););
        }
    }
    // Long enough for a sum in half precision to drift if it is not kept in f32.
    let long = s.plain(&[4, 1024], &Range::Uniform(0.0, 1.0));
    ops!(s, Scaled(16), [long.clone()], "long", |a| Float::float_sum_dim(a.f(), 1););
    ops!(s, Scaled(16), [long.clone()], "long", |a| Float::float_mean_dim(a.f(), 1););
    op!(s, Scaled(16), [long], "long", |a| Float::float_sum(a.f()));
}

/// Products of matrices and vectors.
pub(crate) fn products<B: Backend>(s: &mut Suite<B>) {
    let operands: [(&[usize], &[usize]); 14] = [
        (&[1, 1], &[1, 1]),
        (&[3, 4], &[4, 5]),
        (&[1, 7], &[7, 1]),
        (&[5, 1], &[1, 3]),
        (&[2, 3, 4], &[2, 4, 5]),
        (&[2, 3, 4], &[1, 4, 5]),
        (&[1, 3, 4], &[2, 4, 5]),
        (&[2, 1, 3, 4], &[1, 3, 4, 2]),
        (&[2, 3, 3, 4], &[2, 3, 4, 2]),
        (&[2, 1, 2, 3, 4], &[1, 2, 2, 4, 2]),
        (&[17, 33], &[33, 9]),
        (&[0, 4], &[4, 5]),
        (&[3, 0], &[0, 5]),
        (&[2, 3, 4], &[2, 4, 0]),
    ];
    // Transposed here exchanges first and last dimension: for matrices that is the transpose that a
    // backward pass multiplies by; for batches the last two are exchanged below.
    for (left, right) in operands {
        for (view_l, view_r) in [
            (Contiguous, Contiguous),
            (Transposed, Contiguous),
            (Contiguous, Transposed),
            (Transposed, Transposed),
            (Sliced, Stepped),
            (Contiguous, Expanded(0)),
        ] {
            // An expanded dimension of no elements has nothing to read again.
            if right[0] == 0 && view_r == Expanded(0) {
                continue;
            }
            let l = s.input(left, view_l, &UNIT);
            let r = s.input(right, view_r, &UNIT);
            op!(s, Scaled(16), [l, r], |a| Float::float_matmul(a.f(), a.f()));
        }
        let rank = left.len();
        let mut exchanged = left.to_vec();
        exchanged.swap(rank - 1, rank - 2);
        let l = s.plain(&exchanged, &UNIT);
        let r = s.plain(right, &UNIT);
        ops!(s, Scaled(16), [l, r], "left with its last two dimensions exchanged", |a|
            Float::float_matmul(B::float_swap_dims(a.f(), rank - 1, rank - 2), a.f()););
        let mut exchanged = right.to_vec();
        exchanged.swap(rank - 1, rank - 2);
        let l = s.plain(left, &UNIT);
        let r = s.plain(&exchanged, &UNIT);
        ops!(s, Scaled(16), [l, r], "right with its last two dimensions exchanged", |a|
            Float::float_matmul(a.f(), B::float_swap_dims(a.f(), rank - 1, rank - 2)););
    }
    let x = s.plain(&[4, 4], &UNIT);
    s.push(
        "float_matmul",
        "with its own transpose",
        vec![x],
        Scaled(16),
        |a| {
            let x = a.f();
            vec![Value::Float(B::float_matmul(
                x.clone(),
                B::float_swap_dims(x, 0, 1),
            ))]
        },
    );
    for (shape, dim) in [
        (vec![3], 0),
        (vec![4, 3], 1),
        (vec![3, 4], 0),
        (vec![2, 3, 2], 1),
    ] {
        for view in [Contiguous, Transposed, Stepped] {
            let l = s.input(&shape, view, &SPREAD);
            let r = s.input(&shape, Contiguous, &SPREAD);
            ops!(s, Scaled(8), [l, r], format!("dim {dim}"), |a|
                Float::float_cross(a.f(), a.f(), dim););
        }
    }
}

/// Movement of data: views, indexing, joining.
pub(crate) fn movement<B: Backend>(s: &mut Suite<B>) {
    common::joining(s);
    common::movement(s);
    // As a vision tower sorts pixels into merged patches.
    for (shape, axes) in [
        (vec![1, 2, 3, 2, 2, 2], vec![0, 1, 3, 2, 4, 5]),
        (vec![1, 2, 2, 1, 3, 2, 1, 2], vec![0, 4, 2, 6, 1, 3, 5, 7]),
    ] {
        let x = s.plain(&shape, &SPREAD);
        let to = Shape::from(vec![4, shape.iter().product::<usize>() / 4]);
        let permuted = axes.clone();
        ops!(s, Exact, [x.clone()], format!("{permuted:?}"), |a|
            Float::float_permute(a.f(), &permuted););
        ops!(s, Exact, [x.clone()], format!("of a permutation {axes:?}"), |a|
            Float::float_reshape(B::float_permute(a.f(), &axes), to.clone()););
        ops!(s, Exact, [x], "rank 6 and 8", |a|
            Float::float_neg(B::float_swap_dims(a.f(), 1, 4)););
    }
    for mode in [InterpolateMode::Bilinear, InterpolateMode::Nearest] {
        for padding in [GridSamplePaddingMode::Zeros, GridSamplePaddingMode::Border] {
            let x = s.plain(&[2, 2, 4, 5], &SPREAD);
            let grid = s.plain(&[2, 3, 2, 2], &UNIT);
            let options = GridSampleOptions::new(mode.clone()).with_padding_mode(padding);
            ops!(s, Scaled(16), [x, grid], format!("{mode:?} {padding:?}"), |a|
                Float::float_grid_sample_2d(a.f(), a.f(), options.clone()););
        }
    }
}

//! `IntTensorOps`, except for the methods in `common`.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, BoolDType, DType, FloatDType, IntDType, Scalar, read_sync};
use burn::tensor::Shape;

use super::common::{self, FLAG};
use super::families::{along, binary, compared, indexed, ops, unary, whole, with_scalar};
use super::shapes::{Empty, SAMPLES};
use crate::support::compare::Tolerance::Exact;
use crate::support::input::{
    FLAGS, Range, Value,
    View::{Contiguous, Sliced, Stepped, Transposed},
};
use crate::support::suite::{Args, Suite, op};

const BOOL: BoolDType = BoolDType::Native;
const EVERY: [IntDType; 8] = [
    IntDType::I64,
    IntDType::I32,
    IntDType::I16,
    IntDType::I8,
    IntDType::U64,
    IntDType::U32,
    IntDType::U16,
    IntDType::U8,
];

/// Indices in one type: of which type they are is the backend's choice where the method does not
/// say.
fn wide<B: Backend>(indices: IntTensor<B>) -> IntTensor<B> {
    B::int_cast(indices, IntDType::I64)
}

impl<B: Backend> Suite<B> {
    fn int_scalars(&mut self, op: &'static str, f: fn(&mut Args<B>, Scalar) -> Vec<Value<B>>) {
        for (shape, view) in SAMPLES {
            let x = self.input(shape, *view, &Range::Whole(0, 4));
            self.push(op, "", vec![x], Exact, move |a| f(a, Scalar::Int(2)));
        }
        // Beyond the integers that f32 and f64 represent, and beyond the narrower types.
        let numbers = [
            (1 << 24) + 1,
            (1 << 53) + 1,
            i64::MAX,
            -(1 << 53) - 1,
            i64::MIN,
        ];
        // Flex takes no negative number for unsigned integers of 64 bits.
        let signed = self.dtype != DType::U64;
        for number in numbers.into_iter().filter(|number| signed || *number >= 0) {
            let around = [-1.0, 0.0, 1.0].map(|by| number as f64 + by);
            let values = [&around[..], &[0.0, 1.0, (1_u64 << 53) as f64 + 2.0]].concat();
            let x = self.plain(&[values.len()], &Range::Listed(values));
            let note = format!("{number}");
            self.push(op, note, vec![x], Exact, move |a| f(a, Scalar::Int(number)));
        }
    }
}

/// The operations of every width: transfer, casts, arithmetic, comparison, joins.
pub(crate) fn every_width<B: Backend>(s: &mut Suite<B>) {
    common::creation(s);
    common::joining(s);
    let dtype = s.int_dtype();
    let numbers = s.ordinary();
    let ends: Vec<f64> = match s.dtype {
        DType::I64 => vec![-(2f64.powi(53)), 2f64.powi(53)],
        DType::I32 => vec![f64::from(i32::MIN), f64::from(i32::MAX)],
        DType::I16 => vec![f64::from(i16::MIN), f64::from(i16::MAX)],
        DType::I8 => vec![f64::from(i8::MIN), f64::from(i8::MAX)],
        DType::U64 => vec![0.0, 2f64.powi(53)],
        DType::U32 => vec![0.0, f64::from(u32::MAX)],
        DType::U16 => vec![0.0, f64::from(u16::MAX)],
        _ => vec![0.0, f64::from(u8::MAX)],
    };
    let extremes = s.plain(&[2], &Range::Listed(ends));
    ops!(s, Exact, [extremes], "the type's ends", |a|
        Int::int_reshape(a.i(), Shape::from(vec![2, 1]));
        Int::int_to_device(a.i(), &a.device.clone());
    );
    for (shape, view) in SAMPLES {
        let x = s.input(shape, *view, &numbers);
        for to in [FloatDType::F32, FloatDType::F16, FloatDType::BF16] {
            ops!(s, Exact, [x.clone()], format!("to {to:?}"), |a|
                Float::int_into_float(a.i(), to););
        }
        let positive = s.input(shape, *view, &Range::Whole(0, 100));
        for to in EVERY {
            ops!(s, Exact, [positive.clone()], format!("to {to:?}"), |a|
                Int::int_cast(a.i(), to););
        }
        if dtype == IntDType::I64 {
            for to in [IntDType::I32, IntDType::I16, IntDType::I8] {
                ops!(s, Exact, [x.clone()], format!("to {to:?}"), |a| Int::int_cast(a.i(), to););
            }
        }
    }
    let scalars = [3, 0, 7].map(Scalar::Int);
    binary!(s, Int i;
        int_add: numbers, numbers, Exact;
        int_sub: Range::Whole(20, 40), Range::Whole(0, 20), Exact;
        int_mul: numbers, numbers, Exact;
    );
    with_scalar!(s, Int i;
        int_add_scalar: scalars, numbers, Exact;
        int_mul_scalar: scalars, numbers, Exact;
    );
    compared!(s, i, [Range::Whole(0, 4)], int_scalars;
        int_equal int_not_equal int_greater int_greater_equal int_lower int_lower_equal;
        int_equal_elem int_not_equal_elem int_greater_elem int_greater_equal_elem int_lower_elem
        int_lower_equal_elem
    );
}

/// Arithmetic, bits, comparisons with masks.
pub(crate) fn elementwise<B: Backend>(s: &mut Suite<B>) {
    common::masks(s);
    let numbers = Range::Whole(-9, 9);
    let positive = Range::Whole(1, 5);
    binary!(s, Int i;
        int_div: numbers, positive, Exact;
        int_remainder: numbers, positive, Exact;
        int_powi: Range::Whole(-3, 4), Range::Whole(0, 4), Exact;
        bitwise_and: numbers, numbers, Exact;
        bitwise_or: numbers, numbers, Exact;
        bitwise_xor: numbers, numbers, Exact;
        bitwise_left_shift: Range::Whole(0, 9), Range::Whole(0, 5), Exact;
        bitwise_right_shift: Range::Whole(0, 900), Range::Whole(0, 5), Exact;
    );
    // Signs of dividend and divisor apart.
    let dividends = vec![7.0, -7.0, 7.0, -7.0, 6.0, -6.0, 0.0, -1.0];
    let divisors = vec![3.0, 3.0, -3.0, -3.0, 3.0, -3.0, -3.0, 3.0];
    let operands = [dividends, divisors].map(|values| s.plain(&[8], &Range::Listed(values)));
    ops!(s, Exact, operands, "signs", |a|
        Int::int_div(a.i(), a.i());
        Int::int_remainder(a.i(), a.i());
    );
    // Past 2^24, where a device that computes whole numbers in f32 loses units.
    let large = vec![16_777_217.0, 33_554_433.0, -16_777_219.0, 100_000_001.0];
    let large = s.plain(&[4], &Range::Listed(large));
    let small = s.plain(&[4], &Range::Listed(vec![1.0, 2.0, 3.0, 5.0]));
    ops!(s, Exact, [large.clone(), small], "past 2^24", |a|
        Int::int_add(a.i(), a.i());
        Int::int_sub(a.i(), a.i());
        Int::int_mul(a.i(), a.i());
        Int::int_div(a.i(), a.i());
        Int::int_remainder(a.i(), a.i());
        Bool::int_greater(a.i(), a.i(), BOOL);
    );
    for scalar in [Scalar::Int(1), Scalar::Int(3)] {
        ops!(s, Exact, [large.clone()], "past 2^24", |a|
            Int::int_add_scalar(a.i(), scalar);
            Int::int_sub_scalar(a.i(), scalar);
            Int::int_mul_scalar(a.i(), scalar);
            Int::int_div_scalar(a.i(), scalar);
            Int::int_remainder_scalar(a.i(), scalar);
        );
    }
    ops!(s, Exact, [large], "past 2^24", |a|
        Int::int_sum(a.i());
        Int::int_sum_dim(a.i(), 0);
        Int::int_max(a.i());
        Int::int_cumsum(a.i(), 0);
        Bool::int_equal_elem(a.i(), Scalar::Int(16_777_216), BOOL);
    );
    if s.dtype == DType::I64 {
        // Past 2^31, and as far as f64 counts in ones.
        let huge = vec![4_294_967_297.0, -4_294_967_299.0, 1e15 + 1.0, -1e15 - 3.0];
        let huge = s.plain(&[4], &Range::Listed(huge));
        ops!(s, Exact, [huge.clone(), huge.clone()], "past 2^31", |a|
            Int::int_add(a.i(), a.i()););
        ops!(s, Exact, [huge], "past 2^31", |a|
            Int::int_add_scalar(a.i(), Scalar::Int(5));
            Int::int_mul_scalar(a.i(), Scalar::Int(3));
            Int::int_div_scalar(a.i(), Scalar::Int(3));
            Int::int_remainder_scalar(a.i(), Scalar::Int(7));
            Int::int_sum(a.i());
            Int::int_neg(a.i());
            Int::int_sort(a.i(), 0, true);
            Bool::int_lower_elem(a.i(), Scalar::Int(4_294_967_297), BOOL);
        );
    }
    let (few, divisors, bits) = (
        [3, -2, 7].map(Scalar::Int),
        [3, 2, -7].map(Scalar::Int),
        [6, -2].map(Scalar::Int),
    );
    let (powers, bounds, shifts) = (
        [2, 0, 3].map(Scalar::Int),
        [3, -2].map(Scalar::Int),
        [1, 4].map(Scalar::Int),
    );
    with_scalar!(s, Int i;
        int_sub_scalar: few, numbers, Exact;
        int_div_scalar: few, numbers, Exact;
        int_remainder_scalar: divisors, numbers, Exact;
        int_powi_scalar: powers, numbers, Exact;
        int_powi_scalar_impl: powers, numbers, Exact;
        int_clamp_min: bounds, numbers, Exact;
        int_clamp_max: bounds, numbers, Exact;
        bitwise_and_scalar: bits, numbers, Exact;
        bitwise_or_scalar: bits, numbers, Exact;
        bitwise_xor_scalar: bits, numbers, Exact;
        bitwise_left_shift_scalar: shifts, numbers, Exact;
        bitwise_right_shift_scalar: shifts, Range::Whole(0, 900), Exact;
    );
    let ranges = [numbers.clone()];
    unary!(s, Int i;
        int_neg: ranges, Exact;
        int_abs: ranges, Exact;
        int_sign: ranges, Exact;
        int_square: ranges, Exact;
        bitwise_not: ranges, Exact;
    );
    for (shape, view) in SAMPLES {
        let x = s.input(shape, *view, &numbers);
        ops!(s, Exact, [x.clone()], "", |a|
            Int::int_clamp(a.i(), Scalar::Int(-2), Scalar::Int(5)););
        let mask = s.typed(shape, Contiguous, FLAG, &FLAGS);
        s.push("int_mask_select", "", vec![x, mask], Exact, |a| {
            vec![Value::Int(read_sync(B::int_mask_select(a.i(), a.b())))]
        });
    }
}

/// Reductions, scans, order, products.
pub(crate) fn reductions<B: Backend>(s: &mut Suite<B>) {
    let numbers = Range::Whole(-9, 9);
    let factors = Range::Whole(1, 3);
    whole!(s, i;
        int_sum: numbers, Exact, true, |x| Int(B::int_sum(x));
        int_mean: numbers, Exact, false, |x| Int(B::int_mean(x));
        int_max: numbers, Exact, false, |x| Int(B::int_max(x));
        int_min: numbers, Exact, false, |x| Int(B::int_min(x));
        int_max_abs: numbers, Exact, false, |x| Int(B::int_max_abs(x));
        int_any: FLAGS, Exact, true, |x| Bool(B::int_any(x, BOOL));
        int_all: FLAGS, Exact, true, |x| Bool(B::int_all(x, BOOL));
    );
    // A product of all the samples' elements would overflow.
    for (shape, view) in [
        (vec![5], Stepped),
        (vec![2, 4], Transposed),
        (vec![1], Contiguous),
        (vec![0], Contiguous),
    ] {
        let x = s.input(&shape, view, &factors);
        op!(s, Exact, [x], |a| Int::int_prod(a.i()));
    }
    for (shape, view) in SAMPLES
        .iter()
        .filter(|(shape, _)| shape.iter().all(|&size| size < 20))
    {
        for dim in 0..shape.len() {
            let x = s.input(shape, *view, &factors);
            ops!(s, Exact, [x.clone()], format!("dim {dim}"), |a| Int::int_prod_dim(a.i(), dim););
            ops!(s, Exact, [x], format!("dim {dim}"), |a| Int::int_cumprod(a.i(), dim););
        }
    }
    along!(s, i;
        int_sum_dim: numbers, Exact, Empty::Reduces, |x, dim| Int(B::int_sum_dim(x, dim));
        int_mean_dim: numbers, Exact, Empty::Refused, |x, dim| Int(B::int_mean_dim(x, dim));
        int_cumsum: numbers, Exact, Empty::Reduces, |x, dim| Int(B::int_cumsum(x, dim));
        int_cummin: numbers, Exact, Empty::Reduces, |x, dim| Int(B::int_cummin(x, dim));
        int_cummax: numbers, Exact, Empty::Reduces, |x, dim| Int(B::int_cummax(x, dim));
        int_argmax: Range::Distinct, Exact, Empty::Refused, |x, dim| Int(B::int_argmax(x, dim));
        int_argmin: Range::Distinct, Exact, Empty::Refused, |x, dim| Int(B::int_argmin(x, dim));
        int_max_dim: numbers, Exact, Empty::Refused, |x, dim| Int(B::int_max_dim(x, dim));
        int_min_dim: numbers, Exact, Empty::Refused, |x, dim| Int(B::int_min_dim(x, dim));
        int_max_abs_dim: numbers, Exact, Empty::Refused, |x, dim| Int(B::int_max_abs_dim(x, dim));
        int_any_dim: FLAGS, Exact, Empty::Unnamed, |x, dim| Bool(B::int_any_dim(x, dim, BOOL));
        int_all_dim: FLAGS, Exact, Empty::Unnamed, |x, dim| Bool(B::int_all_dim(x, dim, BOOL));
        int_sort: numbers, Exact, Empty::Reduces, |x, dim| Int(B::int_sort(x.clone(), dim, false)), Int(B::int_sort(x, dim, true));
        int_argsort: Range::Distinct, Exact, Empty::Reduces,
            |x, dim| Int(wide::<B>(B::int_argsort(x.clone(), dim, false))), Int(wide::<B>(B::int_argsort(x, dim, true)));
        int_topk: numbers, Exact, Empty::Refused, |x, dim| Int(B::int_topk(x, dim, 1));
        int_argtopk: Range::Distinct, Exact, Empty::Refused, |x, dim| Int(wide::<B>(B::int_argtopk(x, dim, 1)));
    );
    indexed!(s, Int i;
        int_max_dim_with_indices: Empty::Refused, |x, dim| B::int_max_dim_with_indices(x, dim);
        int_min_dim_with_indices: Empty::Refused, |x, dim| B::int_min_dim_with_indices(x, dim);
        int_sort_with_indices: Empty::Reduces, |x, dim| {
            let (values, indices) = B::int_sort_with_indices(x, dim, true);
            (values, wide::<B>(indices))
        };
        int_topk_with_indices: Empty::Refused, |x, dim| {
            let (values, indices) = B::int_topk_with_indices(x, dim, 1);
            (values, wide::<B>(indices))
        };
    );
    let operands: [(&[usize], &[usize]); 5] = [
        (&[3, 4], &[4, 5]),
        (&[1, 1], &[1, 1]),
        (&[2, 3, 4], &[1, 4, 5]),
        (&[2, 1, 3, 4], &[1, 3, 4, 2]),
        (&[0, 4], &[4, 5]),
    ];
    for (left, right) in operands {
        for (view_l, view_r) in [
            (Contiguous, Contiguous),
            (Transposed, Stepped),
            (Sliced, Transposed),
        ] {
            let l = s.input(left, view_l, &numbers);
            let r = s.input(right, view_r, &numbers);
            op!(s, Exact, [l, r], |a| Int::int_matmul(a.i(), a.i()));
        }
    }
}

/// Movement of data, and sequences.
pub(crate) fn movement<B: Backend>(s: &mut Suite<B>) {
    common::movement(s);
    let dtype = s.int_dtype();
    for range in [0..7, 3..4, -5..6, 4..4] {
        let stepped = range.clone();
        ops!(s, Exact, [], format!("{range:?}"), |a|
            Int::int_arange(range.clone(), &a.device, dtype););
        ops!(s, Exact, [], format!("{stepped:?} by 3"), |a|
            Int::int_arange_step(stepped.clone(), 3, &a.device, dtype););
    }
}

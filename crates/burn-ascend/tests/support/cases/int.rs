//! `IntTensorOps`.

use burn::backend::ops::PadMode;
use burn::backend::tensor::{BoolTensor, IndexingUpdateOp, IntTensor};
use burn::backend::{
    Backend, BoolDType, BoolStore, DType, FloatDType, IntDType, Scalar, read_sync,
};
use burn::tensor::Shape;

use super::shapes::{Empty, GATHERS, PAIRS, SAMPLES, SELECTS, concatenations, sliced, slices};
use crate::support::compare::Tolerance::Exact;
use crate::support::input::{
    FLAGS, Range, Value,
    View::{Contiguous, Sliced, Stepped, Transposed},
};
use crate::support::suite::{Suite, op};

const BOOL: BoolDType = BoolDType::Native;
const FLAG: DType = DType::Bool(BoolStore::Native);
const INDEX: DType = DType::I32;
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
/// Written back in any order the result is the same.
const UPDATES: [IndexingUpdateOp; 4] = [
    IndexingUpdateOp::Add,
    IndexingUpdateOp::Mul,
    IndexingUpdateOp::Min,
    IndexingUpdateOp::Max,
];

type I<B> = IntTensor<B>;

/// Indices in one type: of which type they are is the backend's choice where the method does not
/// say.
fn wide<B: Backend>(indices: I<B>) -> I<B> {
    B::int_cast(indices, IntDType::I64)
}

impl<B: Backend> Suite<B> {
    /// Whole numbers that the type holds: negative ones only if it has a sign.
    fn whole_numbers(&self) -> Range {
        if self.dtype.is_uint() {
            Range::Whole(0, 9)
        } else {
            Range::Whole(-9, 9)
        }
    }

    fn int_unary(&mut self, op: &'static str, range: &Range, f: fn(I<B>) -> I<B>) {
        for (shape, view) in SAMPLES {
            let x = self.input(shape, *view, range);
            self.push(op, "", vec![x], Exact, move |a| vec![Value::Int(f(a.i()))]);
        }
    }

    fn int_scalar(
        &mut self,
        op: &'static str,
        scalars: &[i64],
        range: &Range,
        f: fn(I<B>, Scalar) -> I<B>,
    ) {
        for (k, (shape, view)) in SAMPLES.iter().enumerate() {
            let scalar = Scalar::Int(scalars[k % scalars.len()]);
            let x = self.input(shape, *view, range);
            self.push(op, format!("{scalar:?}"), vec![x], Exact, move |a| {
                vec![Value::Int(f(a.i(), scalar))]
            });
        }
    }

    fn int_binary(
        &mut self,
        op: &'static str,
        left: &Range,
        right: &Range,
        f: fn(I<B>, I<B>) -> I<B>,
    ) {
        for ((shape_l, view_l), (shape_r, view_r)) in PAIRS {
            let l = self.input(shape_l, *view_l, left);
            let r = self.input(shape_r, *view_r, right);
            self.push(op, "", vec![l, r], Exact, move |a| {
                vec![Value::Int(f(a.i(), a.i()))]
            });
        }
        let x = self.input(&[3, 5], Transposed, right);
        self.push(op, "of one tensor with itself", vec![x], Exact, move |a| {
            let x = a.i();
            vec![Value::Int(f(x.clone(), x))]
        });
    }

    fn int_compared(&mut self, op: &'static str, f: fn(I<B>, I<B>, BoolDType) -> BoolTensor<B>) {
        for ((shape_l, view_l), (shape_r, view_r)) in PAIRS {
            let l = self.input(shape_l, *view_l, &Range::Whole(0, 4));
            let r = self.input(shape_r, *view_r, &Range::Whole(0, 4));
            self.push(op, "", vec![l, r], Exact, move |a| {
                vec![Value::Bool(f(a.i(), a.i(), BOOL))]
            });
        }
    }

    fn int_compared_scalar(
        &mut self,
        op: &'static str,
        f: fn(I<B>, Scalar, BoolDType) -> BoolTensor<B>,
    ) {
        for (shape, view) in SAMPLES {
            let x = self.input(shape, *view, &Range::Whole(0, 4));
            self.push(op, "", vec![x], Exact, move |a| {
                vec![Value::Bool(f(a.i(), Scalar::Int(2), BOOL))]
            });
        }
        // Beyond what floats of 32 and of 64 bits represent, and beyond the narrower types.
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
            self.push(op, format!("{number}"), vec![x], Exact, move |a| {
                vec![Value::Bool(f(a.i(), Scalar::Int(number), BOOL))]
            });
        }
    }

    fn int_along(
        &mut self,
        op: &'static str,
        range: &Range,
        empty: Empty,
        f: fn(I<B>, usize) -> Vec<Value<B>>,
    ) {
        for (shape, view) in SAMPLES {
            for dim in (0..shape.len()).filter(|&dim| empty.allows(shape, dim)) {
                let x = self.input(shape, *view, range);
                self.push(op, format!("dim {dim}"), vec![x], Exact, move |a| {
                    f(a.i(), dim)
                });
            }
        }
    }

    fn int_whole(
        &mut self,
        op: &'static str,
        range: &Range,
        empty: bool,
        f: fn(I<B>) -> Vec<Value<B>>,
    ) {
        for (shape, view) in SAMPLES
            .iter()
            .filter(|(shape, _)| empty || !shape.contains(&0))
        {
            let x = self.input(shape, *view, range);
            self.push(op, "", vec![x], Exact, move |a| f(a.i()));
        }
    }
}

macro_rules! unary {
    ($s:ident, $($op:ident: $range:expr;)*) => { $($s.int_unary(stringify!($op), &$range, B::$op);)* };
}
macro_rules! scalar {
    ($s:ident, $($op:ident: $scalars:expr, $range:expr;)*) => {
        $($s.int_scalar(stringify!($op), &$scalars, &$range, B::$op);)*
    };
}
macro_rules! binary {
    ($s:ident, $($op:ident: $left:expr, $right:expr;)*) => {
        $($s.int_binary(stringify!($op), &$left, &$right, B::$op);)*
    };
}
macro_rules! compared {
    ($s:ident, $($op:ident)*; $($scalar:ident)*) => {
        $($s.int_compared(stringify!($op), B::$op);)*
        $($s.int_compared_scalar(stringify!($scalar), B::$scalar);)*
    };
}
macro_rules! along {
    ($s:ident, $($op:ident: $range:expr, $empty:expr, |$x:ident, $dim:ident| $($kind:ident($out:expr)),+;)*) => {
        $($s.int_along(stringify!($op), &$range, $empty, |$x, $dim| vec![$(Value::$kind($out)),+]);)*
    };
}
macro_rules! whole {
    ($s:ident, $($op:ident: $range:expr, $empty:expr, |$x:ident| $kind:ident($out:expr);)*) => {
        $($s.int_whole(stringify!($op), &$range, $empty, |$x| vec![Value::$kind($out)]);)*
    };
}

/// What every width has: transfer, casts, arithmetic, comparison, movement.
pub(crate) fn every_width<B: Backend>(s: &mut Suite<B>) {
    let dtype = s.int_dtype();
    let numbers = s.whole_numbers();
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
    op!(s, Exact, [extremes.clone()], "the type's ends", |a| {
        Int::int_reshape(a.i(), Shape::from(vec![2, 1]))
    });
    op!(s, Exact, [extremes], "the type's ends", |a| {
        Int::int_to_device(a.i(), &a.device.clone())
    });
    for (shape, view) in SAMPLES {
        let x = s.input(shape, *view, &numbers);
        let data = x.data();
        let of = Shape::from(shape.to_vec());
        let (zeros, ones, full, empty) = (of.clone(), of.clone(), of.clone(), of);
        op!(s, Exact, [], |a| Int::int_from_data(
            data.clone(),
            &a.device
        ));
        op!(s, Exact, [], |a| Int::int_zeros(
            zeros.clone(),
            &a.device,
            dtype
        ));
        op!(s, Exact, [], |a| Int::int_ones(
            ones.clone(),
            &a.device,
            dtype
        ));
        op!(s, Exact, [], |a| Int::int_full(
            full.clone(),
            Scalar::Int(77),
            &a.device,
            dtype
        ));
        s.push("int_empty", "", vec![], Exact, move |a| {
            let all = B::bool_ones(empty.clone(), &a.device, BOOL);
            let empty = B::int_empty(empty.clone(), &a.device, dtype);
            vec![Value::Int(B::int_mask_fill(empty, all, Scalar::Int(0)))]
        });
        s.push("int_into_data", "", vec![x.clone()], Exact, |a| {
            let read = read_sync(B::int_into_data(a.i())).expect("reads");
            vec![Value::Int(B::int_from_data(read, &a.device))]
        });
        op!(s, Exact, [x.clone()], |a| Int::int_to_device(
            a.i(),
            &a.device.clone()
        ));
        for to in [FloatDType::F32, FloatDType::F16, FloatDType::BF16] {
            op!(s, Exact, [x.clone()], format!("to {to:?}"), |a| {
                Float::int_into_float(a.i(), to)
            });
        }
        let positive = s.input(shape, *view, &Range::Whole(0, 100));
        for to in EVERY {
            op!(s, Exact, [positive.clone()], format!("to {to:?}"), |a| {
                Int::int_cast(a.i(), to)
            });
        }
        if dtype == IntDType::I64 {
            for to in [IntDType::I32, IntDType::I16, IntDType::I8] {
                op!(s, Exact, [x.clone()], format!("to {to:?}"), |a| {
                    Int::int_cast(a.i(), to)
                });
            }
        }
    }
    binary!(s,
        int_add: numbers, numbers;
        int_sub: Range::Whole(20, 40), Range::Whole(0, 20);
        int_mul: numbers, numbers;
    );
    scalar!(s, int_add_scalar: [3, 0, 7], numbers; int_mul_scalar: [3, 0, 7], numbers;);
    compared!(s,
        int_equal int_not_equal int_greater int_greater_equal int_lower int_lower_equal;
        int_equal_elem int_not_equal_elem int_greater_elem int_greater_equal_elem int_lower_elem int_lower_equal_elem
    );
    for (shape, slices, view) in slices() {
        let x = s.input(&shape, view, &numbers);
        let value = s.input(&sliced(&shape, &slices), Transposed, &numbers);
        let note = format!("{slices:?}");
        let (cut, put) = (slices.clone(), slices);
        op!(s, Exact, [x.clone()], note.clone(), |a| Int::int_slice(
            a.i(),
            &cut
        ));
        op!(s, Exact, [x, value], note, |a| Int::int_slice_assign(
            a.i(),
            &put,
            a.i()
        ));
    }
    for (dim, parts) in concatenations() {
        let inputs: Vec<_> = parts
            .iter()
            .map(|(shape, view)| s.input(shape, *view, &numbers))
            .collect();
        let count = inputs.len();
        op!(s, Exact, inputs, format!("dim {dim}"), |a| Int::int_cat(
            (0..count).map(|_| a.i()).collect(),
            dim
        ));
    }
    for ((shape, view), dim, (indices, index_view)) in SELECTS {
        let (dim, bound) = (*dim, shape[*dim] as i64);
        let x = s.input(shape, *view, &numbers);
        let at = s.typed(indices, *index_view, INDEX, &Range::Whole(0, bound));
        op!(
            s,
            Exact,
            [x, at],
            format!("dim {dim}"),
            |a| Int::int_select(a.i(), dim, a.i())
        );
    }
}

/// Arithmetic, bits, comparisons with masks.
pub(crate) fn elementwise<B: Backend>(s: &mut Suite<B>) {
    let numbers = Range::Whole(-9, 9);
    let positive = Range::Whole(1, 5);
    binary!(s,
        int_div: numbers, positive;
        int_remainder: numbers, positive;
        int_powi: Range::Whole(-3, 4), Range::Whole(0, 4);
        bitwise_and: numbers, numbers;
        bitwise_or: numbers, numbers;
        bitwise_xor: numbers, numbers;
        bitwise_left_shift: Range::Whole(0, 9), Range::Whole(0, 5);
        bitwise_right_shift: Range::Whole(0, 900), Range::Whole(0, 5);
    );
    // Signs of dividend and divisor apart.
    let signs = |s: &mut Suite<B>| {
        let l = s.plain(
            &[8],
            &Range::Listed(vec![7.0, -7.0, 7.0, -7.0, 6.0, -6.0, 0.0, -1.0]),
        );
        let r = s.plain(
            &[8],
            &Range::Listed(vec![3.0, 3.0, -3.0, -3.0, 3.0, -3.0, -3.0, 3.0]),
        );
        [l, r]
    };
    let operands = signs(s);
    op!(s, Exact, operands.clone(), "signs", |a| Int::int_div(
        a.i(),
        a.i()
    ));
    op!(s, Exact, operands, "signs", |a| Int::int_remainder(
        a.i(),
        a.i()
    ));
    // Past 2^24, where a device that computes whole numbers in f32 loses units.
    let large = s.plain(
        &[4],
        &Range::Listed(vec![
            16_777_217.0,
            33_554_433.0,
            -16_777_219.0,
            100_000_001.0,
        ]),
    );
    let one = s.plain(&[4], &Range::Listed(vec![1.0, 2.0, 3.0, 5.0]));
    op!(s, Exact, [large.clone(), one.clone()], "past 2^24", |a| {
        Int::int_add(a.i(), a.i())
    });
    op!(s, Exact, [large.clone(), one.clone()], "past 2^24", |a| {
        Int::int_sub(a.i(), a.i())
    });
    op!(s, Exact, [large.clone(), one.clone()], "past 2^24", |a| {
        Int::int_mul(a.i(), a.i())
    });
    op!(s, Exact, [large.clone(), one.clone()], "past 2^24", |a| {
        Int::int_div(a.i(), a.i())
    });
    op!(s, Exact, [large.clone(), one.clone()], "past 2^24", |a| {
        Int::int_remainder(a.i(), a.i())
    });
    op!(s, Exact, [large.clone(), one], "past 2^24", |a| {
        Bool::int_greater(a.i(), a.i(), BOOL)
    });
    for scalar in [Scalar::Int(1), Scalar::Int(3)] {
        op!(s, Exact, [large.clone()], "past 2^24", |a| {
            Int::int_add_scalar(a.i(), scalar)
        });
        op!(s, Exact, [large.clone()], "past 2^24", |a| {
            Int::int_sub_scalar(a.i(), scalar)
        });
        op!(s, Exact, [large.clone()], "past 2^24", |a| {
            Int::int_mul_scalar(a.i(), scalar)
        });
        op!(s, Exact, [large.clone()], "past 2^24", |a| {
            Int::int_div_scalar(a.i(), scalar)
        });
        op!(s, Exact, [large.clone()], "past 2^24", |a| {
            Int::int_remainder_scalar(a.i(), scalar)
        });
    }
    op!(s, Exact, [large.clone()], "past 2^24", |a| Int::int_sum(
        a.i()
    ));
    op!(
        s,
        Exact,
        [large.clone()],
        "past 2^24",
        |a| Int::int_sum_dim(a.i(), 0)
    );
    op!(s, Exact, [large.clone()], "past 2^24", |a| Int::int_max(
        a.i()
    ));
    op!(s, Exact, [large.clone()], "past 2^24", |a| Int::int_cumsum(
        a.i(),
        0
    ));
    op!(s, Exact, [large], "past 2^24", |a| Bool::int_equal_elem(
        a.i(),
        Scalar::Int(16_777_216),
        BOOL
    ));
    if s.dtype == DType::I64 {
        // Past 2^31, and as far as f64 counts in ones.
        let huge = s.plain(
            &[4],
            &Range::Listed(vec![
                4_294_967_297.0,
                -4_294_967_299.0,
                1e15 + 1.0,
                -1e15 - 3.0,
            ]),
        );
        op!(s, Exact, [huge.clone(), huge.clone()], "past 2^31", |a| {
            Int::int_add(a.i(), a.i())
        });
        op!(s, Exact, [huge.clone()], "past 2^31", |a| {
            Int::int_add_scalar(a.i(), Scalar::Int(5))
        });
        op!(s, Exact, [huge.clone()], "past 2^31", |a| {
            Int::int_mul_scalar(a.i(), Scalar::Int(3))
        });
        op!(s, Exact, [huge.clone()], "past 2^31", |a| {
            Int::int_div_scalar(a.i(), Scalar::Int(3))
        });
        op!(s, Exact, [huge.clone()], "past 2^31", |a| {
            Int::int_remainder_scalar(a.i(), Scalar::Int(7))
        });
        op!(s, Exact, [huge.clone()], "past 2^31", |a| Int::int_sum(
            a.i()
        ));
        op!(s, Exact, [huge.clone()], "past 2^31", |a| Int::int_neg(
            a.i()
        ));
        op!(s, Exact, [huge.clone()], "past 2^31", |a| Int::int_sort(
            a.i(),
            0,
            true
        ));
        op!(s, Exact, [huge], "past 2^31", |a| Bool::int_lower_elem(
            a.i(),
            Scalar::Int(4_294_967_297),
            BOOL
        ));
    }
    scalar!(s,
        int_sub_scalar: [3, -2, 7], numbers;
        int_div_scalar: [3, -2, 7], numbers;
        int_remainder_scalar: [3, 2, -7], numbers;
        int_powi_scalar: [2, 0, 3], numbers;
        int_powi_scalar_impl: [2, 0, 3], numbers;
        int_clamp_min: [3, -2], numbers;
        int_clamp_max: [3, -2], numbers;
        bitwise_and_scalar: [6, -2], numbers;
        bitwise_or_scalar: [6, -2], numbers;
        bitwise_xor_scalar: [6, -2], numbers;
        bitwise_left_shift_scalar: [1, 4], numbers;
        bitwise_right_shift_scalar: [1, 4], Range::Whole(0, 900);
    );
    unary!(s,
        int_neg: numbers;
        int_abs: numbers;
        int_sign: numbers;
        int_square: numbers;
        bitwise_not: numbers;
    );
    for (shape, view) in SAMPLES {
        let x = s.input(shape, *view, &numbers);
        op!(s, Exact, [x.clone()], |a| Int::int_clamp(
            a.i(),
            Scalar::Int(-2),
            Scalar::Int(5)
        ));
        let mask = s.typed(shape, Contiguous, FLAG, &FLAGS);
        s.push("int_mask_select", "", vec![x, mask], Exact, |a| {
            vec![Value::Int(read_sync(B::int_mask_select(a.i(), a.b())))]
        });
    }
    for ((shape_l, view_l), (shape_r, view_r)) in PAIRS {
        let full: Vec<usize> = shape_l
            .iter()
            .zip(*shape_r)
            .map(|(&l, &r)| if l == 1 { r } else { l })
            .collect();
        let x = s.input(&full, *view_l, &numbers);
        let mask = s.typed(shape_l, *view_l, FLAG, &FLAGS);
        let value = s.input(shape_r, *view_r, &numbers);
        op!(s, Exact, [x.clone(), mask.clone(), value], |a| {
            Int::int_mask_where(a.i(), a.b(), a.i())
        });
        op!(s, Exact, [x, mask], |a| Int::int_mask_fill(
            a.i(),
            a.b(),
            Scalar::Int(-5)
        ));
    }
}

/// Reductions, scans, order, products.
pub(crate) fn reductions<B: Backend>(s: &mut Suite<B>) {
    let numbers = Range::Whole(-9, 9);
    let factors = Range::Whole(1, 3);
    whole!(s,
        int_sum: numbers, true, |x| Int(B::int_sum(x));
        int_mean: numbers, false, |x| Int(B::int_mean(x));
        int_max: numbers, false, |x| Int(B::int_max(x));
        int_min: numbers, false, |x| Int(B::int_min(x));
        int_max_abs: numbers, false, |x| Int(B::int_max_abs(x));
        int_any: FLAGS, true, |x| Bool(B::int_any(x, BOOL));
        int_all: FLAGS, true, |x| Bool(B::int_all(x, BOOL));
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
            op!(s, Exact, [x.clone()], format!("dim {dim}"), |a| {
                Int::int_prod_dim(a.i(), dim)
            });
            op!(s, Exact, [x], format!("dim {dim}"), |a| Int::int_cumprod(
                a.i(),
                dim
            ));
        }
    }
    along!(s,
        int_sum_dim: numbers, Empty::Reduces, |x, dim| Int(B::int_sum_dim(x, dim));
        int_mean_dim: numbers, Empty::Refused, |x, dim| Int(B::int_mean_dim(x, dim));
        int_cumsum: numbers, Empty::Reduces, |x, dim| Int(B::int_cumsum(x, dim));
        int_cummin: numbers, Empty::Reduces, |x, dim| Int(B::int_cummin(x, dim));
        int_cummax: numbers, Empty::Reduces, |x, dim| Int(B::int_cummax(x, dim));
        int_argmax: Range::Distinct, Empty::Refused, |x, dim| Int(B::int_argmax(x, dim));
        int_argmin: Range::Distinct, Empty::Refused, |x, dim| Int(B::int_argmin(x, dim));
        int_max_dim: numbers, Empty::Refused, |x, dim| Int(B::int_max_dim(x, dim));
        int_min_dim: numbers, Empty::Refused, |x, dim| Int(B::int_min_dim(x, dim));
        int_max_abs_dim: numbers, Empty::Refused, |x, dim| Int(B::int_max_abs_dim(x, dim));
        int_any_dim: FLAGS, Empty::Unnamed, |x, dim| Bool(B::int_any_dim(x, dim, BOOL));
        int_all_dim: FLAGS, Empty::Unnamed, |x, dim| Bool(B::int_all_dim(x, dim, BOOL));
        int_sort: numbers, Empty::Reduces, |x, dim| Int(B::int_sort(x.clone(), dim, false)), Int(B::int_sort(x, dim, true));
        int_argsort: Range::Distinct, Empty::Reduces,
            |x, dim| Int(wide::<B>(B::int_argsort(x.clone(), dim, false))), Int(wide::<B>(B::int_argsort(x, dim, true)));
        int_topk: numbers, Empty::Refused, |x, dim| Int(B::int_topk(x, dim, 1));
        int_argtopk: Range::Distinct, Empty::Refused, |x, dim| Int(wide::<B>(B::int_argtopk(x, dim, 1)));
    );
    s.int_along(
        "int_max_dim_with_indices",
        &Range::Distinct,
        Empty::Refused,
        |x, dim| {
            let (values, indices) = B::int_max_dim_with_indices(x, dim);
            vec![Value::Int(values), Value::Int(indices)]
        },
    );
    s.int_along(
        "int_min_dim_with_indices",
        &Range::Distinct,
        Empty::Refused,
        |x, dim| {
            let (values, indices) = B::int_min_dim_with_indices(x, dim);
            vec![Value::Int(values), Value::Int(indices)]
        },
    );
    s.int_along(
        "int_sort_with_indices",
        &Range::Distinct,
        Empty::Reduces,
        |x, dim| {
            let (values, indices) = B::int_sort_with_indices(x, dim, true);
            vec![Value::Int(values), Value::Int(wide::<B>(indices))]
        },
    );
    s.int_along(
        "int_topk_with_indices",
        &Range::Distinct,
        Empty::Refused,
        |x, dim| {
            let (values, indices) = B::int_topk_with_indices(x, dim, 1);
            vec![Value::Int(values), Value::Int(wide::<B>(indices))]
        },
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
    let dtype = s.int_dtype();
    let numbers = Range::Whole(-99, 99);
    for range in [0..7, 3..4, -5..6, 4..4] {
        let stepped = range.clone();
        op!(s, Exact, [], format!("{range:?}"), |a| Int::int_arange(
            range.clone(),
            &a.device,
            dtype
        ));
        op!(s, Exact, [], format!("{stepped:?} by 3"), |a| {
            Int::int_arange_step(stepped.clone(), 3, &a.device, dtype)
        });
    }
    for (shape, view) in SAMPLES {
        let rank = shape.len();
        let x = s.input(shape, *view, &numbers);
        let axes: Vec<usize> = (0..rank).map(|d| (d + 1) % rank).collect();
        op!(s, Exact, [x.clone()], |a| Int::int_swap_dims(
            a.i(),
            0,
            rank - 1
        ));
        op!(s, Exact, [x.clone()], |a| Int::int_permute(a.i(), &axes));
        op!(s, Exact, [x.clone()], |a| Int::int_flip(a.i(), &[rank - 1]));
        if rank >= 2 {
            op!(s, Exact, [x.clone()], |a| Int::int_transpose(a.i()));
        }
        let to = Shape::from(vec![1, shape.iter().product(), 1]);
        op!(s, Exact, [x.clone()], |a| Int::int_reshape(
            a.i(),
            to.clone()
        ));
        for (dim, times) in (0..rank).flat_map(|dim| [1, 3].map(|times| (dim, times))) {
            op!(
                s,
                Exact,
                [x.clone()],
                format!("dim {dim} times {times}"),
                |a| Int::int_repeat_dim(a.i(), dim, times)
            );
        }
    }
    let expansions: [(&[usize], &[usize]); 4] = [
        (&[1], &[5]),
        (&[3, 1], &[3, 4]),
        (&[3, 4], &[2, 3, 4]),
        (&[2, 1, 3, 1], &[2, 4, 3, 2]),
    ];
    for (from, to) in expansions {
        for view in [Contiguous, Transposed, Stepped] {
            let x = s.input(from, view, &numbers);
            let to = Shape::from(to.to_vec());
            op!(s, Exact, [x], format!("to {to:?}"), |a| Int::int_expand(
                a.i(),
                to.clone()
            ));
        }
    }
    for ((shape, view), dim, (indices, index_view)) in GATHERS {
        let (dim, bound) = (*dim, shape[*dim]);
        let x = s.input(shape, *view, &numbers);
        let at = s.typed(indices, *index_view, INDEX, &Range::Whole(0, bound as i64));
        op!(
            s,
            Exact,
            [x.clone(), at.clone()],
            format!("dim {dim}"),
            |a| Int::int_gather(dim, a.i(), a.i())
        );
        let value = s.input(indices, Contiguous, &numbers);
        for update in UPDATES {
            op!(
                s,
                Exact,
                [x.clone(), at.clone(), value.clone()],
                format!("dim {dim} {update:?}"),
                |a| Int::int_scatter(dim, a.i(), a.i(), a.i(), update)
            );
        }
        if indices[dim] <= bound {
            let at = s.distinct_along(indices, *index_view, dim, bound);
            let update = IndexingUpdateOp::Assign;
            op!(
                s,
                Exact,
                [x, at, value],
                format!("dim {dim} {update:?}"),
                |a| Int::int_scatter(dim, a.i(), a.i(), a.i(), update)
            );
        }
    }
    for ((shape, view), dim, (indices, index_view)) in SELECTS {
        let (dim, bound) = (*dim, shape[*dim]);
        let x = s.input(shape, *view, &numbers);
        let mut values = shape.to_vec();
        values[dim] = indices[0];
        let value = s.input(&values, Transposed, &numbers);
        let at = s.typed(indices, *index_view, INDEX, &Range::Whole(0, bound as i64));
        for update in UPDATES {
            op!(
                s,
                Exact,
                [x.clone(), at.clone(), value.clone()],
                format!("dim {dim} {update:?}"),
                |a| Int::int_select_assign(a.i(), dim, a.i(), a.i(), update)
            );
        }
        if indices[0] <= bound {
            let at = s.distinct_along(indices, *index_view, 0, bound);
            let update = IndexingUpdateOp::Assign;
            op!(
                s,
                Exact,
                [x, at, value],
                format!("dim {dim} {update:?}"),
                |a| Int::int_select_assign(a.i(), dim, a.i(), a.i(), update)
            );
        }
    }
    for view in [Contiguous, Transposed, Stepped] {
        let x = s.input(&[3, 4, 2], view, &numbers);
        let rows = s.typed(
            &[3, 2],
            view,
            INDEX,
            &Range::Listed(vec![0.0, 3.0, 2.0, 1.0, 1.0, 0.0]),
        );
        op!(s, Exact, [x.clone(), rows.clone()], |a| Int::int_gather_nd(
            a.i(),
            a.i()
        ));
        for update in UPDATES.into_iter().chain([IndexingUpdateOp::Assign]) {
            let value = s.input(&[3, 2], view, &numbers);
            op!(
                s,
                Exact,
                [x.clone(), rows.clone(), value],
                format!("{update:?}"),
                |a| Int::int_scatter_nd(a.i(), a.i(), a.i(), update)
            );
        }
        let x = s.input(&[4, 5], view, &numbers);
        op!(s, Exact, [x.clone()], |a| Int::int_unfold(a.i(), 1, 2, 2));
        for mode in [PadMode::Constant(3.0), PadMode::Reflect, PadMode::Edge] {
            op!(
                s,
                Exact,
                [x.clone()],
                format!("{mode:?}"),
                |a| Int::int_pad(a.i(), &[(1, 0), (0, 2)], mode)
            );
        }
    }
}

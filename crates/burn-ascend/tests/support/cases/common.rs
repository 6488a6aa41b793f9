//! Methods that tensors of several kinds have, each by its kind's name.

use burn::backend::ops::PadMode;
use burn::backend::tensor::{BoolTensor, IndexingUpdateOp};
use burn::backend::{Backend, BoolDType, BoolStore, DType, IntDType, Scalar};
use burn::tensor::Shape;

use super::shapes::{GATHERS, PAIRS, SAMPLES, SELECTS, concatenations, sliced, slices};
use crate::support::compare::Tolerance::{self, Exact, Scaled};
use crate::support::input::{
    FLAGS, Input, Range, SPREAD, Value,
    View::{self, Contiguous, Sliced, Stepped, Transposed},
};
use crate::support::suite::{Args, Kind, Suite};

/// Adds a case of the method that the suite's kind has, of three names or, where flags have none,
/// of two: `own(a)` is the next input of the kind.
macro_rules! each {
    ($s:expr, $tolerance:expr, $inputs:expr, $note:expr, |$a:ident, $own:ident|
     [$float:ident $int:ident $($bool:ident)?] $args:tt) => {{
        let (inputs, note) = (Vec::from($inputs), String::from($note));
        match $s.kind() {
            Kind::Float => each!(@ $s, $tolerance, inputs, note, |$a, $own| Float f $float $args),
            Kind::Int => each!(@ $s, $tolerance, inputs, note, |$a, $own| Int i $int $args),
            Kind::Bool => {
                $(each!(@ $s, $tolerance, inputs, note, |$a, $own| Bool b $bool $args);)?
            }
        }
    }};
    (@ $s:expr, $tolerance:expr, $inputs:ident, $note:ident, |$a:ident, $own:ident|
     $kind:ident $take:ident $op:ident ($($arg:expr),* $(,)?)) => {
        $s.push(stringify!($op), $note, $inputs, $tolerance, move |$a| {
            #[allow(unused, reason = "creation takes no input")]
            let $own = Args::<B>::$take;
            vec![Value::$kind(B::$op($($arg),*))]
        })
    };
}

pub(super) const FLAG: DType = DType::Bool(BoolStore::Native);
const INDICES: [DType; 2] = [DType::I32, DType::I64];
const UPDATES: [IndexingUpdateOp; 5] = [
    IndexingUpdateOp::Assign,
    IndexingUpdateOp::Add,
    IndexingUpdateOp::Mul,
    IndexingUpdateOp::Min,
    IndexingUpdateOp::Max,
];

/// The flags as whole numbers: Flex marks what it gathers and selects as `u8` instead of a bool
/// type.
pub(super) fn flags<B: Backend>(x: BoolTensor<B>) -> Vec<Value<B>> {
    vec![Value::Int(B::bool_into_int(x, IntDType::I32))]
}

impl<B: Backend> Suite<B> {
    /// Ordinary values: negative ones only if the type has a sign.
    pub(super) fn ordinary(&self) -> Range {
        match self.kind() {
            Kind::Float => SPREAD,
            Kind::Int if self.dtype.is_uint() => Range::Whole(0, 9),
            Kind::Int => Range::Whole(-9, 9),
            Kind::Bool => FLAGS,
        }
    }

    /// The type of masks: flags' own.
    fn flag(&self) -> DType {
        match self.kind() {
            Kind::Bool => self.dtype,
            _ => FLAG,
        }
    }

    fn scalar(&self, value: i64) -> Scalar {
        match self.kind() {
            Kind::Bool => Scalar::Bool(value != 0),
            _ => Scalar::Int(value),
        }
    }

    /// For sums and products of a few values.
    fn summed(&self, units: u32) -> Tolerance {
        match self.kind() {
            Kind::Float => Scaled(units),
            _ => Exact,
        }
    }

    pub(super) fn indices(
        &mut self,
        (shape, view): (&[usize], View),
        dtype: DType,
        bound: usize,
    ) -> Input {
        self.typed(shape, view, dtype, &Range::Whole(0, bound as i64))
    }

    /// Indices that differ from each other along `dim`.
    fn distinct_along(&mut self, shape: &[usize], view: View, dim: usize, bound: usize) -> Input {
        let inner: usize = shape[dim + 1..].iter().product();
        let index = |k: usize| (bound - 1 - k / inner % shape[dim]) as f64;
        let values = (0..shape.iter().product()).map(index).collect();
        self.typed(shape, view, INDICES[0], &Range::Listed(values))
    }

    /// The updates, each with the indices that it is compared at: where two meet, `Assign` keeps
    /// either, so it gets distinct ones, if there are as many.
    fn updates(
        &mut self,
        (shape, view): (&[usize], View),
        dim: usize,
        bound: usize,
    ) -> Vec<(IndexingUpdateOp, Input, Tolerance)> {
        let at = self.indices((shape, view), INDICES[0], bound);
        let mut updates = Vec::new();
        for update in UPDATES {
            if update != IndexingUpdateOp::Assign {
                updates.push((update, at.clone(), self.summed(4)));
            } else if shape[dim] <= bound {
                let at = self.distinct_along(shape, view, dim, bound);
                updates.push((update, at, Exact));
            }
        }
        updates
    }
}

/// Creation and transfer.
pub(crate) fn creation<B: Backend>(s: &mut Suite<B>) {
    let dtype = s.dtype;
    let (mask, zero, seven) = (BoolDType::from(s.flag()), s.scalar(0), s.scalar(7));
    let ranges = match s.kind() {
        Kind::Float => vec![SPREAD, Range::Special],
        _ => vec![s.ordinary()],
    };
    /// The contents of an empty tensor are not defined: only its shape and type are.
    macro_rules! emptied {
        ($shape:ident, $kind:ident $empty:ident $fill:ident) => {
            s.push(stringify!($empty), "", vec![], Exact, move |a| {
                let all = B::bool_ones($shape.clone(), &a.device, mask);
                let empty = B::$empty($shape.clone(), &a.device, dtype.into());
                vec![Value::$kind(B::$fill(empty, all, zero))]
            })
        };
    }
    for (shape, view) in SAMPLES {
        let of = Shape::from(shape.to_vec());
        let (zeros, ones, full, empty) = (of.clone(), of.clone(), of.clone(), of);
        each!(s, Exact, [], "", |a, own| [float_zeros int_zeros bool_zeros]
            (zeros.clone(), &a.device, dtype.into()));
        each!(s, Exact, [], "", |a, own| [float_ones int_ones bool_ones]
            (ones.clone(), &a.device, dtype.into()));
        each!(s, Exact, [], "", |a, own| [float_full int_full]
            (full.clone(), seven, &a.device, dtype.into()));
        match s.kind() {
            Kind::Float => emptied!(empty, Float float_empty float_mask_fill),
            Kind::Int => emptied!(empty, Int int_empty int_mask_fill),
            Kind::Bool => emptied!(empty, Bool bool_empty bool_mask_fill),
        }
        for range in &ranges {
            let x = s.input(shape, *view, range);
            let data = x.data();
            each!(s, Exact, [], "data", |a, own| [float_from_data int_from_data bool_from_data]
                (data.clone(), &a.device));
            let name = match s.kind() {
                Kind::Float => "float_into_data",
                Kind::Int => "int_into_data",
                Kind::Bool => "bool_into_data",
            };
            s.push(name, "", vec![x.clone()], Exact, |a| {
                vec![Value::upload(a.v().read().expect("reads"), &a.device)]
            });
            each!(s, Exact, [x], "", |a, own| [float_to_device int_to_device bool_to_device]
                (own(a), &a.device.clone()));
        }
    }
}

/// Slices, joins and selections.
pub(crate) fn joining<B: Backend>(s: &mut Suite<B>) {
    let ordinary = s.ordinary();
    for (shape, slices, view) in slices() {
        let x = s.input(&shape, view, &ordinary);
        let note = format!("{slices:?}");
        for view in [Contiguous, Transposed] {
            let value = s.input(&sliced(&shape, &slices), view, &ordinary);
            let put = slices.clone();
            each!(s, Exact, [x.clone(), value], &*note, |a, own|
                [float_slice_assign int_slice_assign bool_slice_assign](own(a), &put, own(a)));
        }
        each!(s, Exact, [x], note, |a, own| [float_slice int_slice bool_slice](own(a), &slices));
    }
    for (dim, parts) in concatenations() {
        let inputs = parts
            .iter()
            .map(|(shape, view)| s.input(shape, *view, &ordinary));
        let inputs: Vec<_> = inputs.collect();
        let count = inputs.len();
        each!(s, Exact, inputs, format!("dim {dim}"), |a, own| [float_cat int_cat bool_cat]
            ((0..count).map(|_| own(a)).collect(), dim));
    }
    for ((shape, view), dim, at) in SELECTS {
        let (dim, bound) = (*dim, shape[*dim]);
        let x = s.input(shape, *view, &ordinary);
        let note = format!("dim {dim}");
        for dtype in INDICES {
            let inputs = [x.clone(), s.indices(*at, dtype, bound)];
            if s.kind() == Kind::Bool {
                s.push("bool_select", &*note, inputs.into(), Exact, move |a| {
                    flags::<B>(B::bool_select(a.b(), dim, a.i()))
                });
            } else {
                each!(s, Exact, inputs, &*note, |a, own| [float_select int_select]
                    (own(a), dim, a.i()));
            }
        }
    }
}

/// Views, indexing, padding.
pub(crate) fn movement<B: Backend>(s: &mut Suite<B>) {
    let ordinary = s.ordinary();
    for (shape, view) in SAMPLES {
        let rank = shape.len();
        let x = s.input(shape, *view, &ordinary);
        for (i, j) in (0..rank).flat_map(|i| (0..rank).map(move |j| (i, j))) {
            each!(s, Exact, [x.clone()], format!("{i} and {j}"), |a, own|
                [float_swap_dims int_swap_dims bool_swap_dims](own(a), i, j));
        }
        if rank >= 2 {
            each!(s, Exact, [x.clone()], "", |a, own|
                [float_transpose int_transpose bool_transpose](own(a)));
        }
        let axes: Vec<usize> = (0..rank).map(|d| (d + 1) % rank).collect();
        each!(s, Exact, [x.clone()], format!("{axes:?}"), |a, own|
            [float_permute int_permute bool_permute](own(a), &axes));
        for axes in [vec![0], vec![rank - 1], (0..rank).collect()] {
            each!(s, Exact, [x.clone()], format!("{axes:?}"), |a, own|
                [float_flip int_flip bool_flip](own(a), &axes));
        }
        let count: usize = shape.iter().product();
        let reversed = shape.iter().rev().copied().collect();
        for to in [vec![count], vec![1, count, 1], reversed] {
            let to = Shape::from(to);
            each!(s, Exact, [x.clone()], format!("{to:?}"), |a, own|
                [float_reshape int_reshape bool_reshape](own(a), to.clone()));
        }
        for (dim, times) in (0..rank).flat_map(|dim| [1, 3].map(|times| (dim, times))) {
            each!(s, Exact, [x.clone()], format!("dim {dim} times {times}"), |a, own|
                [float_repeat_dim int_repeat_dim bool_repeat_dim](own(a), dim, times));
        }
    }
    let expansions: [(&[usize], &[usize]); 8] = [
        (&[1], &[5]),
        (&[1, 4], &[3, 4]),
        (&[3, 1], &[3, 4]),
        (&[3, 4], &[2, 3, 4]),
        (&[2, 1, 3, 1], &[2, 4, 3, 2]),
        (&[1, 1], &[2, 3, 4, 5]),
        (&[3, 4], &[3, 4]),
        (&[1, 3], &[0, 3]),
    ];
    for (from, to) in expansions {
        for view in [Contiguous, Transposed, Stepped] {
            let x = s.input(from, view, &ordinary);
            let to = Shape::from(to.to_vec());
            each!(s, Exact, [x], format!("to {to:?}"), |a, own|
                [float_expand int_expand bool_expand](own(a), to.clone()));
        }
    }
    for ((shape, view), dim, at) in GATHERS {
        let (dim, bound) = (*dim, shape[*dim]);
        let x = s.input(shape, *view, &ordinary);
        let value = s.input(at.0, Contiguous, &ordinary);
        let note = format!("dim {dim}");
        for dtype in INDICES {
            let inputs = [x.clone(), s.indices(*at, dtype, bound)];
            if s.kind() == Kind::Bool {
                s.push("bool_gather", &*note, inputs.into(), Exact, move |a| {
                    flags::<B>(B::bool_gather(dim, a.b(), a.i()))
                });
            } else {
                each!(s, Exact, inputs, &*note, |a, own| [float_gather int_gather]
                    (dim, own(a), a.i()));
            }
        }
        if s.kind() == Kind::Bool {
            let inputs = vec![x, s.indices(*at, INDICES[0], bound), value];
            s.push("bool_scatter_or", note, inputs, Exact, move |a| {
                vec![Value::Bool(B::bool_scatter_or(dim, a.b(), a.i(), a.b()))]
            });
            continue;
        }
        for (update, at, tolerance) in s.updates(*at, dim, bound) {
            let note = format!("dim {dim} {update:?}");
            each!(s, tolerance, [x.clone(), at, value.clone()], note, |a, own|
                [float_scatter int_scatter](dim, own(a), a.i(), own(a), update));
        }
    }
    for ((shape, view), dim, at) in SELECTS {
        let (dim, bound) = (*dim, shape[*dim]);
        let x = s.input(shape, *view, &ordinary);
        let mut values = shape.to_vec();
        values[dim] = at.0[0];
        for view in [Contiguous, Transposed] {
            let value = s.input(&values, view, &ordinary);
            if s.kind() == Kind::Bool {
                let inputs = vec![x.clone(), s.indices(*at, INDICES[0], bound), value];
                s.push(
                    "bool_select_or",
                    format!("dim {dim}"),
                    inputs,
                    Exact,
                    move |a| vec![Value::Bool(B::bool_select_or(a.b(), dim, a.i(), a.b()))],
                );
                continue;
            }
            for (update, at, tolerance) in s.updates(*at, 0, bound) {
                let note = format!("dim {dim} {update:?}");
                each!(s, tolerance, [x.clone(), at, value.clone()], note, |a, own|
                    [float_select_assign int_select_assign](own(a), dim, a.i(), own(a), update));
            }
        }
    }
    // Coordinates in the indices' last dimension: two of [3, 4, 2] give rows of 2, three give
    // elements.
    let coordinates: [(&[usize], _, &[usize]); 2] = [
        (&[3, 2], vec![0.0, 3.0, 2.0, 1.0, 1.0, 0.0], &[3, 2]),
        (&[2, 3], vec![0.0, 1.0, 1.0, 1.0, 0.0, 0.0], &[2]),
    ];
    for view in [Contiguous, Transposed, Stepped] {
        let x = s.input(&[3, 4, 2], view, &ordinary);
        for (shape, at, values) in &coordinates {
            let at = s.typed(shape, view, INDICES[0], &Range::Listed(at.clone()));
            each!(s, Exact, [x.clone(), at.clone()], "", |a, own|
                [float_gather_nd int_gather_nd](own(a), a.i()));
            for update in UPDATES {
                let value = s.input(values, view, &ordinary);
                let (tolerance, inputs) = (s.summed(2), [x.clone(), at.clone(), value]);
                each!(s, tolerance, inputs, format!("{update:?}"), |a, own|
                    [float_scatter_nd int_scatter_nd](own(a), a.i(), own(a), update));
            }
        }
    }
    for (shape, dim, size, step) in [
        (vec![7], 0, 3, 2),
        (vec![4, 5], 1, 2, 1),
        (vec![4, 5], 0, 4, 1),
        (vec![2, 6, 3], 1, 3, 3),
    ] {
        for view in [Contiguous, Transposed, Stepped] {
            let x = s.input(&shape, view, &ordinary);
            let note = format!("dim {dim} size {size} step {step}");
            each!(s, Exact, [x], note, |a, own|
                [float_unfold int_unfold bool_unfold](own(a), dim, size, step));
        }
    }
    let constant = if s.kind() == Kind::Float { 1.5 } else { 3.0 };
    for mode in [PadMode::Constant(constant), PadMode::Reflect, PadMode::Edge] {
        for view in [Contiguous, Transposed, Sliced] {
            let x = s.input(&[3, 4], view, &ordinary);
            for padding in [[(0, 0), (1, 2)], [(2, 1), (0, 3)]] {
                each!(s, Exact, [x.clone()], format!("{mode:?}"), |a, own|
                    [float_pad int_pad](own(a), &padding, mode));
            }
        }
    }
}

/// Masks and values that broadcast to the tensor.
pub(crate) fn masks<B: Backend>(s: &mut Suite<B>) {
    let (ordinary, flag) = (s.ordinary(), s.flag());
    let fills = match s.kind() {
        Kind::Float => vec![Scalar::Float(-1.5), Scalar::Float(f64::NEG_INFINITY)],
        Kind::Int => vec![Scalar::Int(-5)],
        Kind::Bool => vec![Scalar::Bool(true)],
    };
    for ((shape_l, view_l), (shape_r, view_r)) in PAIRS {
        let sizes = shape_l.iter().zip(*shape_r);
        let full: Vec<usize> = sizes.map(|(&l, &r)| if l == 1 { r } else { l }).collect();
        let x = s.input(&full, *view_l, &ordinary);
        let mask = s.typed(shape_l, *view_l, flag, &FLAGS);
        let value = s.input(shape_r, *view_r, &ordinary);
        each!(s, Exact, [x.clone(), mask.clone(), value], "", |a, own|
            [float_mask_where int_mask_where bool_mask_where](own(a), a.b(), own(a)));
        for &fill in &fills {
            each!(s, Exact, [x.clone(), mask.clone()], format!("{fill:?}"), |a, own|
                [float_mask_fill int_mask_fill bool_mask_fill](own(a), a.b(), fill));
        }
    }
}

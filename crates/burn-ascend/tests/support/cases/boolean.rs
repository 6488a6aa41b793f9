//! `BoolTensorOps`.

use burn::backend::tensor::BoolTensor;
use burn::backend::{Backend, BoolDType, DType, FloatDType, IntDType, Scalar, read_sync};
use burn::tensor::Shape;

use super::shapes::{Empty, GATHERS, PAIRS, SAMPLES, SELECTS, concatenations, sliced, slices};
use crate::support::compare::Tolerance::Exact;
use crate::support::input::{
    FLAGS, Range, Value,
    View::{Contiguous, Stepped, Transposed},
};
use crate::support::suite::{Suite, op};

const INDEX: DType = DType::I32;

type L<B> = BoolTensor<B>;

/// The flags as whole numbers: Flex marks what it gathers and selects as `u8` instead of a bool
/// type.
fn flags<B: Backend>(x: L<B>) -> Vec<Value<B>> {
    vec![Value::Int(B::bool_into_int(x, IntDType::I32))]
}

impl<B: Backend> Suite<B> {
    fn bool_binary(&mut self, op: &'static str, f: fn(L<B>, L<B>) -> L<B>) {
        for ((shape_l, view_l), (shape_r, view_r)) in PAIRS {
            let l = self.input(shape_l, *view_l, &FLAGS);
            let r = self.input(shape_r, *view_r, &FLAGS);
            self.push(op, "", vec![l, r], Exact, move |a| {
                vec![Value::Bool(f(a.b(), a.b()))]
            });
        }
    }
}

macro_rules! binary {
    ($s:ident, $($op:ident)*) => { $($s.bool_binary(stringify!($op), B::$op);)* };
}

/// In the bool type of the suite.
pub(crate) fn all<B: Backend>(s: &mut Suite<B>) {
    let dtype = BoolDType::from(s.dtype);
    binary!(s, bool_and bool_or bool_xor bool_equal bool_not_equal);
    for (shape, view) in SAMPLES {
        let of = Shape::from(shape.to_vec());
        let (zeros, ones, empty) = (of.clone(), of.clone(), of);
        let rank = shape.len();
        let x = s.input(shape, *view, &FLAGS);
        let data = x.data();
        op!(s, Exact, [], |a| Bool::bool_from_data(
            data.clone(),
            &a.device
        ));
        op!(s, Exact, [], |a| Bool::bool_zeros(
            zeros.clone(),
            &a.device,
            dtype
        ));
        op!(s, Exact, [], |a| Bool::bool_ones(
            ones.clone(),
            &a.device,
            dtype
        ));
        s.push("bool_empty", "", vec![], Exact, move |a| {
            let all = B::bool_ones(empty.clone(), &a.device, dtype);
            let empty = B::bool_empty(empty.clone(), &a.device, dtype);
            vec![Value::Bool(B::bool_mask_fill(
                empty,
                all,
                Scalar::Bool(false),
            ))]
        });
        s.push("bool_into_data", "", vec![x.clone()], Exact, |a| {
            let read = read_sync(B::bool_into_data(a.b())).expect("reads");
            vec![Value::Bool(B::bool_from_data(read, &a.device))]
        });
        op!(s, Exact, [x.clone()], |a| Bool::bool_to_device(
            a.b(),
            &a.device.clone()
        ));
        for to in [IntDType::I32, IntDType::I64, IntDType::I16, IntDType::U8] {
            op!(s, Exact, [x.clone()], format!("to {to:?}"), |a| {
                Int::bool_into_int(a.b(), to)
            });
        }
        for to in [FloatDType::F32, FloatDType::F16, FloatDType::BF16] {
            op!(s, Exact, [x.clone()], format!("to {to:?}"), |a| {
                Float::bool_into_float(a.b(), to)
            });
        }
        for flag in [true, false] {
            let flag = Scalar::Bool(flag);
            op!(s, Exact, [x.clone()], format!("{flag:?}"), |a| {
                Bool::bool_equal_elem(a.b(), flag)
            });
            op!(s, Exact, [x.clone()], format!("{flag:?}"), |a| {
                Bool::bool_not_equal_elem(a.b(), flag)
            });
        }
        op!(s, Exact, [x.clone()], |a| Bool::bool_not(a.b()));
        op!(s, Exact, [x.clone()], |a| Bool::bool_any(a.b()));
        op!(s, Exact, [x.clone()], |a| Bool::bool_all(a.b()));
        for dim in 0..rank {
            op!(s, Exact, [x.clone()], format!("dim {dim}"), |a| {
                Bool::bool_repeat_dim(a.b(), dim, 3)
            });
        }
        for dim in (0..rank).filter(|&dim| Empty::Unnamed.allows(shape, dim)) {
            op!(s, Exact, [x.clone()], format!("dim {dim}"), |a| {
                Bool::bool_any_dim(a.b(), dim)
            });
            op!(s, Exact, [x.clone()], format!("dim {dim}"), |a| {
                Bool::bool_all_dim(a.b(), dim)
            });
        }
        let axes: Vec<usize> = (0..rank).map(|d| (d + 1) % rank).collect();
        op!(s, Exact, [x.clone()], |a| Bool::bool_swap_dims(
            a.b(),
            0,
            rank - 1
        ));
        op!(s, Exact, [x.clone()], |a| Bool::bool_permute(a.b(), &axes));
        op!(s, Exact, [x.clone()], |a| Bool::bool_flip(
            a.b(),
            &[rank - 1]
        ));
        if rank >= 2 {
            op!(s, Exact, [x.clone()], |a| Bool::bool_transpose(a.b()));
        }
        let to = Shape::from(vec![1, shape.iter().product(), 1]);
        op!(s, Exact, [x.clone()], |a| Bool::bool_reshape(
            a.b(),
            to.clone()
        ));
        let mask = s.input(shape, Contiguous, &FLAGS);
        s.push("bool_mask_select", "", vec![x.clone(), mask], Exact, |a| {
            flags::<B>(read_sync(B::bool_mask_select(a.b(), a.b())))
        });
        for to in [IntDType::I32, IntDType::I64] {
            s.push(
                "bool_argwhere",
                format!("to {to:?}"),
                vec![x.clone()],
                Exact,
                move |a| vec![Value::Int(read_sync(B::bool_argwhere(a.b(), to)))],
            );
        }
    }
    for value in [0.0, 1.0] {
        let uniform = s.input(&[3, 4], Transposed, &Range::Listed(vec![value; 12]));
        op!(s, Exact, [uniform.clone()], "uniform", |a| Bool::bool_any(
            a.b()
        ));
        op!(s, Exact, [uniform.clone()], "uniform", |a| Bool::bool_all(
            a.b()
        ));
        op!(s, Exact, [uniform.clone()], "uniform", |a| {
            Bool::bool_any_dim(a.b(), 1)
        });
        op!(s, Exact, [uniform], "uniform", |a| Bool::bool_all_dim(
            a.b(),
            0
        ));
    }
    let expansions: [(&[usize], &[usize]); 4] = [
        (&[1], &[5]),
        (&[3, 1], &[3, 4]),
        (&[3, 4], &[2, 3, 4]),
        (&[2, 1, 3, 1], &[2, 4, 3, 2]),
    ];
    for (from, to) in expansions {
        let x = s.input(from, Stepped, &FLAGS);
        let to = Shape::from(to.to_vec());
        op!(s, Exact, [x], format!("to {to:?}"), |a| Bool::bool_expand(
            a.b(),
            to.clone()
        ));
    }
    for ((shape_l, view_l), (shape_r, view_r)) in PAIRS {
        let full: Vec<usize> = shape_l
            .iter()
            .zip(*shape_r)
            .map(|(&l, &r)| if l == 1 { r } else { l })
            .collect();
        let x = s.input(&full, *view_l, &FLAGS);
        let mask = s.input(shape_l, *view_l, &FLAGS);
        let value = s.input(shape_r, *view_r, &FLAGS);
        op!(s, Exact, [x.clone(), mask.clone(), value], |a| {
            Bool::bool_mask_where(a.b(), a.b(), a.b())
        });
        op!(s, Exact, [x, mask], |a| Bool::bool_mask_fill(
            a.b(),
            a.b(),
            Scalar::Bool(true)
        ));
    }
    for (shape, slices, view) in slices() {
        let x = s.input(&shape, view, &FLAGS);
        let value = s.input(&sliced(&shape, &slices), Transposed, &FLAGS);
        let note = format!("{slices:?}");
        let (cut, put) = (slices.clone(), slices);
        op!(s, Exact, [x.clone()], note.clone(), |a| Bool::bool_slice(
            a.b(),
            &cut
        ));
        op!(s, Exact, [x, value], note, |a| Bool::bool_slice_assign(
            a.b(),
            &put,
            a.b()
        ));
    }
    for (dim, parts) in concatenations() {
        let inputs: Vec<_> = parts
            .iter()
            .map(|(shape, view)| s.input(shape, *view, &FLAGS))
            .collect();
        let count = inputs.len();
        op!(s, Exact, inputs, format!("dim {dim}"), |a| Bool::bool_cat(
            (0..count).map(|_| a.b()).collect(),
            dim
        ));
    }
    for ((shape, view), dim, (indices, index_view)) in GATHERS {
        let (dim, bound) = (*dim, shape[*dim] as i64);
        let x = s.input(shape, *view, &FLAGS);
        let at = s.typed(indices, *index_view, INDEX, &Range::Whole(0, bound));
        let value = s.input(indices, Contiguous, &FLAGS);
        s.push(
            "bool_gather",
            format!("dim {dim}"),
            vec![x.clone(), at.clone()],
            Exact,
            move |a| flags::<B>(B::bool_gather(dim, a.b(), a.i())),
        );
        op!(s, Exact, [x, at, value], format!("dim {dim}"), |a| {
            Bool::bool_scatter_or(dim, a.b(), a.i(), a.b())
        });
    }
    for ((shape, view), dim, (indices, index_view)) in SELECTS {
        let (dim, bound) = (*dim, shape[*dim] as i64);
        let x = s.input(shape, *view, &FLAGS);
        let at = s.typed(indices, *index_view, INDEX, &Range::Whole(0, bound));
        let mut values = shape.to_vec();
        values[dim] = indices[0];
        let value = s.input(&values, Transposed, &FLAGS);
        s.push(
            "bool_select",
            format!("dim {dim}"),
            vec![x.clone(), at.clone()],
            Exact,
            move |a| flags::<B>(B::bool_select(a.b(), dim, a.i())),
        );
        op!(s, Exact, [x, at, value], format!("dim {dim}"), |a| {
            Bool::bool_select_or(a.b(), dim, a.i(), a.b())
        });
    }
    for view in [Contiguous, Transposed, Stepped] {
        let x = s.input(&[4, 5], view, &FLAGS);
        op!(s, Exact, [x], |a| Bool::bool_unfold(a.b(), 1, 2, 2));
    }
}

//! `ActivationOps`.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Scalar};

use super::families::ops;
use super::shapes::{PAIRS, SAMPLES};
use crate::support::compare::Tolerance::{self, Exact, Scaled};
use crate::support::input::{Range, SPREAD, UNIT, Value};
use crate::support::suite::{Suite, op};

type F<B> = FloatTensor<B>;

impl<B: Backend> Suite<B> {
    fn activation(&mut self, op: &'static str, tolerance: Tolerance, f: fn(F<B>) -> F<B>) {
        for (shape, view) in SAMPLES {
            let x = self.input(shape, *view, &SPREAD);
            self.push(op, "", vec![x], tolerance, move |a| {
                vec![Value::Float(f(a.f()))]
            });
        }
    }

    /// A gradient takes the output (or input) and the gradient of the output, of one shape.
    fn activation_backward(
        &mut self,
        op: &'static str,
        of: &Range,
        tolerance: Tolerance,
        f: fn(F<B>, F<B>) -> F<B>,
    ) {
        for ((shape, view), (other, grad_view)) in PAIRS.iter().filter(|((l, _), (r, _))| l == r) {
            let x = self.input(shape, *view, of);
            let grad = self.input(other, *grad_view, &SPREAD);
            self.push(op, "", vec![x, grad], tolerance, move |a| {
                vec![Value::Float(f(a.f(), a.f()))]
            });
        }
    }

    fn normalised(&mut self, op: &'static str, tolerance: Tolerance, f: fn(F<B>, usize) -> F<B>) {
        for (shape, view) in SAMPLES {
            for dim in (0..shape.len()).filter(|&dim| shape[dim] > 0) {
                let x = self.input(shape, *view, &SPREAD);
                self.push(op, format!("dim {dim}"), vec![x], tolerance, move |a| {
                    vec![Value::Float(f(a.f(), dim))]
                });
            }
        }
        // A masked score and one that overflows if the largest is not taken off first.
        let rows = vec![f64::NEG_INFINITY, 1.0, 2.0, 3.0, 1000.0, 1000.5, 999.0, 0.0];
        let x = self.plain(&[2, 4], &Range::Listed(rows));
        self.push(op, "masked and large", vec![x], tolerance, move |a| {
            vec![Value::Float(f(a.f(), 1))]
        });
    }
}

macro_rules! activation {
    ($s:ident, $method:ident, $($op:ident: $tolerance:expr;)*) => {
        $($s.$method(stringify!($op), $tolerance, B::$op);)*
    };
}

pub(crate) fn all<B: Backend>(s: &mut Suite<B>) {
    activation!(s, activation,
        relu: Exact;
        gelu: Scaled(8);
        sigmoid: Scaled(4);
        log_sigmoid: Scaled(8);
    );
    s.activation_backward("relu_backward", &SPREAD, Exact, B::relu_backward);
    s.activation_backward("gelu_backward", &SPREAD, Scaled(16), B::gelu_backward);
    s.activation_backward("sigmoid_backward", &UNIT, Scaled(8), B::sigmoid_backward);
    s.activation_backward(
        "log_sigmoid_backward",
        &SPREAD,
        Scaled(8),
        B::log_sigmoid_backward,
    );
    // Infinities and NaN go where the functions' limits say.
    for (op, f) in [
        ("relu", B::relu as fn(F<B>) -> F<B>),
        ("sigmoid", B::sigmoid),
        ("gelu", B::gelu),
    ] {
        let x = s.plain(&[32], &Range::Special);
        s.push(op, "special values", vec![x], Scaled(8), move |a| {
            vec![Value::Float(f(a.f()))]
        });
    }
    activation!(s, normalised,
        softmax: Scaled(8);
        log_softmax: Scaled(8);
        softmin: Scaled(8);
    );
    for (shape, view) in SAMPLES {
        let x = s.input(shape, *view, &SPREAD);
        ops!(s, Scaled(2), [x.clone()], "", |a| Float::leaky_relu(a.f(), Scalar::Float(0.125)););
        ops!(s, Scaled(4), [x.clone()], "", |a|
            Float::hard_sigmoid(a.f(), Scalar::Float(0.2), Scalar::Float(0.5)););
        // One slope for all channels, of the tensor's rank.
        let alpha = s.plain(&vec![1; shape.len()], &UNIT);
        op!(s, Scaled(2), [x, alpha], |a| Float::prelu(a.f(), a.f()));
    }
}

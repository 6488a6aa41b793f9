//! Updates of optimizers.

use std::ptr::null_mut;

use ascend_sim::abi::aclnn::{aclOpExecutor, aclTensor};
use ascend_sim::abi::operators::*;
use ascend_sim::control;

use crate::harness::*;
use crate::support::{Device, recent_message};

const COUNT: usize = 12;
const DIMS: [i64; 2] = [3, 4];
const LR: f64 = 0.125;
const BETAS: [f64; 2] = [0.75, 0.9375];
const DECAY: f64 = 0.5;
const EPS: f64 = 0.0625;

/// Values, both moments, and the largest second moment.
type State = [Vec<f64>; 4];

fn start() -> State {
    let squares = |seed| numbers(COUNT, seed).iter().map(|x| x * x).collect();
    [numbers(COUNT, 1), numbers(COUNT, 2), squares(3), squares(4)]
}

/// The update number `t` in f64.
fn updated(state: &State, grad: &[f64], t: i32, [amsgrad, maximize]: [bool; 2]) -> State {
    let [mut var, mut m, mut v, mut most] = state.clone();
    let ([beta1, beta2], sign) = (BETAS, if maximize { -1.0 } else { 1.0 });
    for i in 0..COUNT {
        let g = sign * grad[i];
        m[i] = beta1 * m[i] + (1.0 - beta1) * g;
        v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
        if amsgrad {
            most[i] = most[i].max(v[i]);
        }
        let square = if amsgrad { most[i] } else { v[i] };
        let mean = m[i] / (1.0 - beta1.powi(t));
        let root = (square / (1.0 - beta2.powi(t))).sqrt() + EPS;
        var[i] -= LR * (DECAY * var[i] + mean / root);
    }
    [var, m, v, most]
}

fn update(
    state: &[Tensor<'_>; 4],
    grad: &Tensor<'_>,
    step: &Tensor<'_>,
    [amsgrad, maximize]: [bool; 2],
) {
    let [var, m, v, most] = state.each_ref().map(|tensor| tensor.raw);
    let most = if amsgrad { most } else { null_mut() };
    let ([beta1, beta2], [lr, decay, eps]) = (BETAS, [LR, DECAY, EPS].map(|x| x as f32));
    let (beta1, beta2, grad, step) = (beta1 as f32, beta2 as f32, grad.raw, step.raw);
    let done = run!(
        *state[0].device,
        aclnnApplyAdamWV2(
            var, m, v, most, grad, step, lr, beta1, beta2, decay, eps, amsgrad, maximize
        )
    );
    done.expect("an update");
}

#[test]
fn adam_w_updates_in_place_and_counts_the_updates_before() {
    let device = Device::new();
    let (start, grad) = (start(), numbers(COUNT, 5));
    for (step, step_type, flags) in [
        (0, F32, [false, false]),
        (1, I64, [false, true]),
        (6, F32, [true, false]),
        (2, I64, [true, true]),
    ] {
        let state = start.each_ref().map(|x| device.tensor(F32, &DIMS, x));
        let gradient = device.tensor(F32, &DIMS, &grad);
        let count = device.tensor(step_type, &[1], &[f64::from(step)]);
        update(&state, &gradient, &count, flags);
        let expected = updated(&start, &grad, step + 1, flags);
        for (found, expected) in state.iter().zip(&expected) {
            assert_close(
                &found.values(),
                expected,
                2e-6,
                &format!("{step} {flags:?}"),
            );
        }
    }
    // A gradient in 16 bits beside a state in 32, and all in 16 bits.
    for (wide, tolerance) in [(F32, 2e-6), (Bf16, Bf16.step())] {
        let state = start.each_ref().map(|x| device.tensor(wide, &DIMS, x));
        let gradient = device.tensor(Bf16, &DIMS, &grad);
        let before = state.each_ref().map(Tensor::values);
        update(
            &state,
            &gradient,
            &device.tensor(F32, &[], &[2.0]),
            [false; 2],
        );
        let expected = updated(&before, &gradient.values(), 3, [false; 2]);
        for (found, expected) in state.iter().zip(&expected) {
            assert_close(&found.values(), expected, tolerance, "16 bits");
        }
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn adam_w_refuses_what_the_vendor_refuses() {
    let device = Device::new();
    let tensor = |dtype, dims: &[i64]| {
        let count = dims.iter().product::<i64>() as usize;
        device.tensor(dtype, dims, &vec![1.0; count]).raw
    };
    let (x, one) = (tensor(F32, &[2, 3]), tensor(F32, &[1]));
    let (other, double) = (tensor(F32, &[3, 2]), tensor(F64, &[2, 3]));
    let (two, int) = (tensor(F32, &[2]), tensor(I32, &[1]));
    let none: *mut aclTensor = null_mut();
    for (tensors, amsgrad, code, says) in [
        (
            [none, x, x, none, x, one],
            false,
            NULL_POINTER,
            "varRef is null",
        ),
        (
            [x, x, x, none, none, one],
            false,
            NULL_POINTER,
            "grad is null",
        ),
        (
            [x, x, x, none, x, none],
            false,
            NULL_POINTER,
            "step is null",
        ),
        (
            [x, x, x, none, x, one],
            true,
            NULL_POINTER,
            "maxGradNormOptionalRef is null",
        ),
        (
            [x, double, x, none, x, one],
            false,
            PARAM_INVALID,
            "mRef is Double",
        ),
        (
            [x, x, x, none, x, int],
            false,
            PARAM_INVALID,
            "step is Int32",
        ),
        (
            [x, x, other, none, x, one],
            false,
            PARAM_INVALID,
            "vRef has shape [3, 2]",
        ),
        (
            [x, x, x, other, x, one],
            false,
            PARAM_INVALID,
            "Ref has shape [3, 2]",
        ),
        (
            [x, x, x, none, other, one],
            false,
            PARAM_INVALID,
            "grad has shape [3, 2]",
        ),
        (
            [x, x, x, none, x, two],
            false,
            PARAM_INVALID,
            "step has 2 elements",
        ),
    ] {
        let [var, m, v, most, grad, step] = tensors;
        let outcome = plan!(aclnnApplyAdamWV2(
            var, m, v, most, grad, step, 0.1, 0.5, 0.5, 0.1, 1e-8, amsgrad, false
        ));
        assert_refused(outcome, code, says);
    }
    assert_eq!(control::violations(), []);
}

//! The update equals ordinary operations bit by bit, and a plain computation in f64.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_attention::{AdamWOp, AdamWUpdate, SQUARES, adamw, square_sums};

/// Value, gradient and both moments.
type State = [Tensor<1>; 4];

fn op(decay: f64, steps: u64) -> AdamWOp {
    AdamWOp {
        rate: 1e-2,
        decay,
        betas: [0.9, 0.99],
        epsilon: 1e-8,
        steps,
        scale: 0.7,
    }
}

/// Numbers between -1 and 1 that are the same in every run.
fn numbers(seed: usize, count: usize) -> Vec<f64> {
    let value = |index: usize| ((index * 7919 + seed * 104_729) % 2003) as f64 / 1001.0 - 1.0;
    (0..count).map(value).collect()
}

fn tensor(numbers: &[f64], dtype: DType) -> Tensor<1> {
    Tensor::from_data(numbers, (&Device::flex(), dtype))
}

fn state(count: usize, dtype: DType) -> State {
    let squares: Vec<f64> = numbers(4, count).iter().map(|x| x * x).collect();
    let [value, gradient, first] = [1, 2, 3].map(|seed| tensor(&numbers(seed, count), dtype));
    [value, gradient, first, tensor(&squares, dtype)]
}

fn bits(x: &Tensor<1>) -> Vec<u32> {
    x.to_data().iter::<f32>().map(f32::to_bits).collect()
}

/// The update from burn's own operations.
fn ordinary([value, gradient, first, second]: State, op: AdamWOp) -> [Tensor<1>; 3] {
    let ([beta_1, beta_2], steps) = (op.betas, op.steps as f64);
    let gradient = gradient * op.scale;
    let first = first.clone() + (gradient.clone() - first) * (1.0 - beta_1);
    let second = second * beta_2 + gradient.clone() * gradient * (1.0 - beta_2);
    let root = second.clone().sqrt() / (1.0 - beta_2.powf(steps)).sqrt() + op.epsilon;
    let step = first.clone() / root * (op.rate / (1.0 - beta_1.powf(steps)));
    let value = match op.decay {
        0.0 => value,
        decay => value * (1.0 - op.rate * decay),
    };
    [value - step, first, second]
}

/// With the bits of the new values in bf16, which are those of a cast.
fn updated([value, gradient, first, second]: State, op: AdamWOp) -> [Tensor<1>; 3] {
    let moments = [first, second];
    let updated = adamw(value, gradient, moments, op, FloatDType::BF16);
    let AdamWUpdate {
        value,
        rounded,
        moments: [first, second],
    } = updated.expect("they fit");
    assert_eq!(bits(&rounded), bits(&value.clone().cast(DType::BF16)));
    [value, first, second]
}

#[test]
fn the_kernel_computes_the_bits_of_ordinary_operations() {
    // The last is more than a task of the kernel.
    for count in [0, 1, 7, 40_001] {
        for decay in [0.0, 0.1] {
            for steps in [1, 3] {
                let op = op(decay, steps);
                let expected = ordinary(state(count, DType::F32), op);
                let expected = expected.each_ref().map(bits);
                let found = updated(state(count, DType::F32), op);
                assert_eq!(found.each_ref().map(bits), expected, "{count} {op:?}");
            }
        }
    }
    // With autodiff they are ordinary operations.
    let tracked = state(7, DType::F32).map(Tensor::from_inner);
    let [value, ..] = ordinary(state(7, DType::F32), op(0.1, 2));
    assert_eq!(
        bits(&updated(tracked, op(0.1, 2))[0].clone().inner()),
        bits(&value)
    );
}

#[test]
fn a_gradient_of_16_bits_is_widened() {
    let op = op(0.1, 2);
    for dtype in [DType::BF16, DType::F16] {
        for count in [0, 7, 40_001] {
            let narrow = || {
                let [value, gradient, first, second] = state(count, DType::F32);
                [value, gradient.cast(dtype), first, second]
            };
            let [value, gradient, first, second] = narrow();
            let wide = gradient.cast(DType::F32);
            let expected = ordinary([value, wide, first, second], op);
            let expected = expected.each_ref().map(bits);
            assert_eq!(updated(narrow(), op).each_ref().map(bits), expected);
            // With autodiff they are ordinary operations.
            let tracked = updated(narrow().map(Tensor::from_inner), op);
            let found = tracked.map(|x| bits(&x.inner()));
            assert_eq!(found, expected);
        }
    }
    let [value, gradient, first, second] = state(3, DType::F64);
    let gradient = gradient.cast(DType::BF16);
    let refused = adamw(value, gradient, [first, second], op, FloatDType::F64).map(drop);
    let message = "the gradient is BF16, expected F64";
    assert!(refused.expect_err(message).to_string().contains(message));
}

#[test]
fn tensors_that_something_holds_stay_as_they_were() {
    let (count, op) = (100, op(0.1, 2));
    let expected = ordinary(state(count, DType::F32), op);
    let expected = expected.each_ref().map(bits);
    // By the bits of a number, each set of held tensors.
    for held in 0..16 {
        let state = state(count, DType::F32);
        let before = state.each_ref().map(bits);
        let is_held = |index: &usize| held >> index & 1 == 1;
        let kept = (0..4)
            .filter(is_held)
            .map(|index| (index, state[index].clone()));
        let kept: Vec<_> = kept.collect();
        let found = updated(state, op);
        assert_eq!(found.each_ref().map(bits), expected, "{held:b}");
        for (index, tensor) in kept {
            assert_eq!(bits(&tensor), before[index], "{index} of {held:b}");
        }
    }
    // Parts of a larger tensor, at both ends of it, and every second element.
    let wide = |x: Tensor<1>| Tensor::cat(vec![x.clone(), x * 2.0], 0);
    let first_half = state(count, DType::F32).map(|x| wide(x).slice(0..count));
    assert_eq!(updated(first_half, op).each_ref().map(bits), expected);
    let second_half = state(count, DType::F32).map(|x| Tensor::cat(vec![x.clone(), x], 0));
    let second_half = second_half.map(|x| x.slice(count..2 * count));
    assert_eq!(updated(second_half, op).each_ref().map(bits), expected);
    let strided = state(count, DType::F32).map(|x| {
        let pairs = Tensor::<1>::stack::<2>(vec![x.clone(), x * 3.0], 1);
        pairs.slice([0..count, 0..1]).reshape([count])
    });
    assert_eq!(updated(strided, op).each_ref().map(bits), expected);
}

/// Ten updates, with the moments from 0.
#[test]
fn updates_follow_a_plain_computation() {
    let count = 50;
    for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F64, 1e-14)] {
        for decay in [0.0, 0.1] {
            let mut value = tensor(&numbers(1, count), dtype);
            let mut moments = [value.zeros_like(), value.zeros_like()];
            let mut plain: Vec<[f64; 3]> = (value.to_data().iter::<f64>())
                .map(|value| [value, 0.0, 0.0])
                .collect();
            for steps in 1..=10 {
                let gradient = tensor(&numbers(9 + steps as usize, count), dtype);
                let op = op(decay, steps);
                let data = gradient.to_data();
                let of_step: Vec<f64> = data.iter::<f64>().map(|x| op.scale * x).collect();
                let updated = adamw(value, gradient, moments, op, dtype.into()).expect("it fits");
                assert_eq!(updated.rounded.to_data(), updated.value.to_data());
                (value, moments) = (updated.value, updated.moments);
                for ([value, first, second], gradient) in plain.iter_mut().zip(of_step) {
                    let [beta_1, beta_2] = op.betas;
                    *first = beta_1 * *first + (1.0 - beta_1) * gradient;
                    *second = beta_2 * *second + (1.0 - beta_2) * gradient * gradient;
                    let mean = *first / (1.0 - beta_1.powi(steps as i32));
                    let square = *second / (1.0 - beta_2.powi(steps as i32));
                    *value -= op.rate * decay * *value;
                    *value -= op.rate * mean / (square.sqrt() + op.epsilon);
                }
            }
            assert_eq!(value.dtype(), dtype);
            for (found, [expected, ..]) in value.to_data().iter::<f64>().zip(plain) {
                assert!(
                    (found - expected).abs() <= tolerance,
                    "{dtype:?}: {found}, expected {expected}"
                );
            }
        }
    }
}

#[test]
fn wrong_inputs_are_refused() {
    let zeros = |count, dtype| tensor(&vec![0.0; count], dtype);
    let refused = |state: State, op: AdamWOp, message: &str| {
        let [value, gradient, first, second] = state;
        let error = adamw(value, gradient, [first, second], op, FloatDType::F32).map(drop);
        let error = error.expect_err(message).to_string();
        assert!(error.contains(message), "{error}");
    };
    let right = || [3, 3, 3, 3].map(|count| zeros(count, DType::F32));
    for (index, count, dtype, message) in [
        (
            0,
            3,
            DType::BF16,
            "the value is BF16, expected F32; cast it",
        ),
        (1, 3, DType::F64, "the gradient is F64, expected F32"),
        (2, 3, DType::F64, "the first moment is F64, expected F32"),
        (
            1,
            4,
            DType::F32,
            "the value has shape [3], the gradient has [4]",
        ),
        (
            3,
            2,
            DType::F32,
            "the value has shape [3], the second moment has [2]",
        ),
    ] {
        let mut state = right();
        state[index] = zeros(count, dtype);
        refused(state, op(0.0, 1), message);
    }
    let right_op = op(0.1, 1);
    let real = "expected a finite number, at least 0";
    for (op, message) in [
        (
            AdamWOp {
                steps: 0,
                ..right_op
            },
            "the number of updates is 0, expected at least 1".to_owned(),
        ),
        (
            AdamWOp {
                rate: -0.1,
                ..right_op
            },
            format!("the rate is -0.1, {real}"),
        ),
        (
            AdamWOp {
                decay: f64::NAN,
                ..right_op
            },
            format!("the decay is NaN, {real}"),
        ),
        (
            AdamWOp {
                epsilon: f64::INFINITY,
                ..right_op
            },
            format!("epsilon is inf, {real}"),
        ),
        (
            AdamWOp {
                scale: f64::NAN,
                ..right_op
            },
            format!("the scale is NaN, {real}"),
        ),
        (
            AdamWOp {
                betas: [1.0, 0.9],
                ..right_op
            },
            "the first beta is 1, expected at least 0 and below 1".to_owned(),
        ),
        (
            AdamWOp {
                betas: [0.9, -0.1],
                ..right_op
            },
            "the second beta is -0.1, expected at least 0 and below 1".to_owned(),
        ),
    ] {
        refused(right(), op, &message);
    }
}

#[test]
fn squares_are_summed_by_chunks_of_all_lengths() {
    for count in [0, 1, SQUARES - 1, SQUARES, 2 * SQUARES + 17] {
        let x = numbers(5, count);
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F64, 1e-14), (DType::BF16, 1e-6)] {
            let x = tensor(&x, dtype);
            let read: Vec<f64> = x.to_data().iter().collect();
            let found = square_sums(vec![x]).expect("of a tensor");
            let found: Vec<f64> = found.into_data().iter().collect();
            let chunks = read.chunks(SQUARES);
            assert_eq!(found.len(), chunks.len());
            for (found, chunk) in found.iter().zip(chunks) {
                let expected: f64 = chunk.iter().map(|x| x * x).sum();
                let apart = (found - expected).abs();
                assert!(
                    apart <= tolerance * expected,
                    "{dtype:?}: {found}, {expected}"
                );
            }
        }
    }
}

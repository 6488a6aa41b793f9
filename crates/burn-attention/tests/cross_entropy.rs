//! The loss and its gradients equal a plain computation in f64, by every method.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_attention::{AttentionError, CrossEntropy, IGNORED, Implementation};

use crate::numbers;

/// The implementation, and the size of its blocks.
type Method = (Implementation, Option<usize>);

const CHANNELS: usize = 5;
/// Three blocks of the smallest size, the last not full.
const VOCABULARY: usize = 1100;
/// Targets at the edges of blocks, twice the same, and rows that do not count.
const TARGETS: [i64; 9] = [0, 511, IGNORED, 512, 1099, 1023, 512, IGNORED, 1];
/// The factor of the loss before the backward.
const FACTOR: f64 = 2.5;
const METHODS: [Method; 3] = [
    (Implementation::Fused, None),
    (Implementation::Fused, Some(1)),
    (Implementation::Composed, None),
];

fn hidden(dtype: DType) -> Vec<f64> {
    numbers(1, TARGETS.len() * CHANNELS, dtype)
}

/// Large, so that some rows are sure of a word and others not.
fn weight(dtype: DType) -> Vec<f64> {
    let numbers = numbers(2, VOCABULARY * CHANNELS, dtype);
    numbers.into_iter().map(|x| 4.0 * x).collect()
}

/// The loss, and FACTOR times its gradients of hidden and weight, by the definition.
fn expected(hidden: &[f64], weight: &[f64]) -> [Vec<f64>; 3] {
    let counted = TARGETS.iter().filter(|target| **target != IGNORED).count() as f64;
    let (mut loss, mut dhidden) = (0.0, vec![0.0; hidden.len()]);
    let mut dweight = vec![0.0; weight.len()];
    for (row, target) in TARGETS.iter().enumerate() {
        let Ok(target) = usize::try_from(*target) else {
            continue;
        };
        let h = &hidden[row * CHANNELS..][..CHANNELS];
        let words = weight.chunks(CHANNELS);
        let logits: Vec<f64> = words
            .map(|w| h.iter().zip(w).map(|(h, w)| h * w).sum())
            .collect();
        let sum: f64 = logits.iter().map(|l| l.exp()).sum();
        loss += (sum.ln() - logits[target]) / counted;
        for (word, logit) in logits.iter().enumerate() {
            let one = if word == target { 1.0 } else { 0.0 };
            let dlogit = FACTOR * (logit.exp() / sum - one) / counted;
            for channel in 0..CHANNELS {
                dhidden[row * CHANNELS + channel] += dlogit * weight[word * CHANNELS + channel];
                dweight[word * CHANNELS + channel] += dlogit * h[channel];
            }
        }
    }
    [vec![loss], dhidden, dweight]
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

/// The crate's results, in the order of [`expected`]. `swapped`: the weight lies in memory as that
/// of a `Linear`.
fn found(
    hidden: &[f64],
    weight: &[f64],
    dtype: DType,
    method: Method,
    swapped: bool,
) -> [Vec<f64>; 3] {
    let device = Device::flex().autodiff();
    let tensor = |values: &[f64], rows: usize| {
        let data = TensorData::new(values.to_vec(), [rows, CHANNELS]);
        Tensor::<2>::from_data(data, (&device, dtype))
    };
    let hidden = tensor(hidden, TARGETS.len()).require_grad();
    let weight = tensor(weight, VOCABULARY);
    let leaf = if swapped {
        let memory = weight.transpose().into_data();
        Tensor::<2>::from_data(memory, (&device, dtype))
    } else {
        weight
    };
    let leaf = leaf.require_grad();
    let words_first = |x: Tensor<2>| if swapped { x.transpose() } else { x };
    let loss = CrossEntropy::new(&TARGETS, VOCABULARY)
        .expect("valid targets")
        .with_implementation(method.0)
        .with_blocks(method.1)
        .try_forward(hidden.clone(), words_first(leaf.clone()))
        .expect("it fits");
    let wide = if dtype == DType::F64 {
        dtype
    } else {
        DType::F32
    };
    assert_eq!((loss.dims(), loss.dtype()), ([1], wide));
    let gradients = (loss.clone() * FACTOR).backward();
    let dhidden = hidden.grad(&gradients).expect("a gradient of hidden");
    let dweight = leaf.grad(&gradients).expect("a gradient of the weight");
    assert_eq!((dhidden.dtype(), dweight.dtype()), (dtype, dtype));
    [values(loss), values(dhidden), values(words_first(dweight))]
}

/// Roundings of the accumulator; of f16 that of the result, and of bf16 those of logits, of about 8,
/// too.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 64.0 * f64::EPSILON,
        DType::F32 => 64.0 * f64::from(f32::EPSILON),
        DType::F16 => 2f64.powi(-11),
        _ => 8.0 * 2f64.powi(-8),
    }
}

#[test]
fn loss_and_gradients_equal_the_plain_computation() {
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        let (hidden, weight) = (hidden(dtype), weight(dtype));
        let expected = expected(&hidden, &weight);
        for method in METHODS {
            for swapped in [false, true] {
                let found = found(&hidden, &weight, dtype, method, swapped);
                for (name, (expected, found)) in ["the loss", "dhidden", "dweight"]
                    .iter()
                    .zip(expected.iter().zip(&found))
                {
                    let largest = expected.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
                    assert!(largest > 0.1, "{name} has nothing to compare");
                    assert_eq!(expected.len(), found.len());
                    for (index, (expected, found)) in expected.iter().zip(found).enumerate() {
                        assert!(
                            (expected - found).abs() <= largest * tolerance(dtype),
                            "{dtype:?}, {method:?}, swapped {swapped}: {name}[{index}] is {found}, \
                             expected {expected}"
                        );
                    }
                }
            }
        }
    }
}

/// The derivative of the loss along each input, by central differences in f64.
#[test]
fn gradients_are_the_slopes_of_the_loss() {
    let dtype = DType::F64;
    let inputs = [hidden(dtype), weight(dtype)];
    for method in [
        (Implementation::Fused, None),
        (Implementation::Fused, Some(1)),
    ] {
        let loss = |inputs: &[Vec<f64>; 2]| {
            let [loss, ..] = found(&inputs[0], &inputs[1], dtype, method, false);
            FACTOR * loss[0]
        };
        let [_, dhidden, dweight] = found(&inputs[0], &inputs[1], dtype, method, false);
        for (input, gradient) in [dhidden, dweight].iter().enumerate() {
            // Every channel of some words is enough: those at the edges of blocks among them.
            let words = [0, 1, 511, 512, 1023, 1024, 1099];
            let is_checked = |index: &usize| input == 0 || words.contains(&(index / CHANNELS));
            for index in (0..gradient.len()).filter(is_checked) {
                let step = 1e-5;
                let moved = |by: f64| {
                    let mut inputs = inputs.clone();
                    inputs[input][index] += by;
                    loss(&inputs)
                };
                let slope = (moved(step) - moved(-step)) / (2.0 * step);
                assert!(
                    (slope - gradient[index]).abs() <= 1e-8,
                    "{method:?}: gradient {input}[{index}] is {}, the slope {slope}",
                    gradient[index]
                );
            }
        }
    }
}

#[test]
fn untracked_inputs_get_no_gradient() {
    let device = Device::flex().autodiff();
    let ones = |rows| Tensor::<2>::ones([rows, 3], &device);
    let loss = CrossEntropy::new(&[1, 0], 4).expect("valid");
    let (hidden, weight) = (ones(2).require_grad(), ones(4));
    let gradients = loss
        .try_forward(hidden.clone(), weight.clone())
        .expect("fits")
        .backward();
    assert!(hidden.grad(&gradients).is_some() && weight.grad(&gradients).is_none());
    let (hidden, weight) = (ones(2), ones(4).require_grad());
    let gradients = loss
        .try_forward(hidden.clone(), weight.clone())
        .expect("fits")
        .backward();
    assert!(hidden.grad(&gradients).is_none() && weight.grad(&gradients).is_some());
}

#[test]
fn wrong_inputs_are_refused() {
    let refused = |targets: &[i64], message: &str| {
        let error = CrossEntropy::new(targets, 7)
            .expect_err(message)
            .to_string();
        assert!(error.contains(message), "{message} is not in {error}");
    };
    refused(
        &[6, 7],
        "the target of row 1 is 7, expected a token id below 7",
    );
    refused(&[-1], "the target of row 0 is -1");
    refused(&[IGNORED; 2], "none of 2 rows has a target");
    refused(&[], "none of 0 rows has a target");

    let device = Device::flex();
    let zeros = |shape, dtype| Tensor::<2>::zeros(shape, (&device, dtype));
    let loss = CrossEntropy::new(&[6, IGNORED], 7).expect("valid");
    let f32 = DType::F32;
    for (hidden, weight, dtype, message) in [
        (
            [3, 4],
            [7, 4],
            f32,
            "hidden has 3 in rows, the list of targets has 2",
        ),
        (
            [2, 4],
            [7, 5],
            f32,
            "hidden has 4 in channels, weight has 5",
        ),
        (
            [2, 4],
            [8, 4],
            f32,
            "weight has 8 in vocabulary, the list of targets has 7",
        ),
        ([2, 4], [7, 4], DType::F16, "weight is F16, expected F32"),
    ] {
        let error = loss.try_forward(zeros(hidden, f32), zeros(weight, dtype));
        let error: AttentionError = error.map(drop).expect_err(message);
        assert!(error.to_string().contains(message), "{error}");
    }
}

/// Losses by row, in the order of the rows, each with a gradient of its own.
#[test]
fn rows_have_losses_and_gradients_of_their_own() {
    let dtype = DType::F64;
    let device = Device::flex().autodiff();
    let tensor = |values: Vec<f64>, rows: usize| {
        let data = TensorData::new(values, [rows, CHANNELS]);
        Tensor::<2>::from_data(data, (&device, dtype)).require_grad()
    };
    let counted: Vec<usize> = (0..TARGETS.len())
        .filter(|row| TARGETS[*row] != IGNORED)
        .collect();
    for method in METHODS {
        let hidden = tensor(hidden(dtype), TARGETS.len());
        let weight = tensor(weight(dtype), VOCABULARY);
        let loss = |targets: &[i64]| {
            CrossEntropy::new(targets, VOCABULARY)
                .expect("valid targets")
                .with_implementation(method.0)
                .with_blocks(method.1)
        };
        let losses = loss(&TARGETS).by_row(hidden.clone(), weight.clone());
        let losses = losses.expect("it fits");
        let factors: Vec<f64> = (0..counted.len()).map(|row| 1.5 - row as f64).collect();
        let data = TensorData::new(factors.clone(), [counted.len()]);
        let sum = (losses.clone() * Tensor::from_data(data, (&device, dtype))).sum();
        let gradients = sum.backward();
        let found = values(losses);
        let mut expected = vec![0.0; VOCABULARY * CHANNELS];
        for ((row, factor), found) in counted.iter().zip(&factors).zip(found) {
            let mut only = [IGNORED; TARGETS.len()];
            only[*row] = TARGETS[*row];
            let alone = loss(&only).forward(hidden.clone(), weight.clone());
            assert!(
                (values(alone.clone())[0] - found).abs() < 1e-12,
                "{method:?}"
            );
            let alone = values(weight.grad(&alone.backward()).expect("a gradient"));
            for (sum, part) in expected.iter_mut().zip(alone) {
                *sum += factor * part;
            }
        }
        let found = values(weight.grad(&gradients).expect("a gradient"));
        let pairs = found.iter().zip(&expected);
        assert!(pairs.map(|(x, y)| (x - y).abs()).fold(0.0, f64::max) < 1e-12);
    }
}

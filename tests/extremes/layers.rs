//! SwiGLU, RMSNorm and the loss of a large vocabulary.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_attention::{CrossEntropy, Implementation, rms_norm, swiglu};

use super::on_each_device;

/// The implementation that computes, and the size of its blocks.
type Method = (Implementation, Option<usize>);

fn values<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

/// gate, up and the gradient of the output; the output and the gradients of gate and up by the
/// definition.
#[test]
fn factors_that_overflow_with_each_other_are_not_multiplied_first() {
    on_each_device(|place| {
        for (dtype, [gate, up, dy]) in [
            // dy up overflows f16, the sigmoid of -20 is below its numbers.
            (DType::F16, [-20.0, 300.0, 300.0]),
            (DType::F16, [0.01, 65504.0, 1.5]),
            (DType::BF16, [-80.0, 1e30, 1e20]),
            (DType::F32, [-80.0, 1e30, 1e20]),
        ] {
            if !place.has(dtype) {
                continue;
            }
            let rounded = |x: f64| TensorData::new(vec![x], [1]).convert_dtype(dtype);
            let device = &place.device;
            let tensor = |x| Tensor::<1>::from_data(rounded(x), (device, dtype)).require_grad();
            let tensors = [gate, up, dy].map(tensor);
            let value = |x: Tensor<1>| x.into_data().iter::<f64>().next().expect("one");
            let [gate, up, dy] = tensors.clone().map(value);
            let s = 1.0 / (1.0 + (-gate).exp());
            let slope = s + gate * s * (1.0 - s);
            let expected = [gate * s * up, dy * slope * up, dy * gate * s];
            let [gate_leaf, up_leaf, dy_leaf] = tensors;
            let y = swiglu(gate_leaf.clone(), up_leaf.clone()).expect("it fits");
            let gradients = (y.clone() * dy_leaf.detach()).sum().backward();
            let found = [
                value(y.inner()),
                value(gate_leaf.grad(&gradients).expect("tracked")),
                value(up_leaf.grad(&gradients).expect("tracked")),
            ];
            // 1e-5 has 8 bits in f16, where it is subnormal.
            for (found, expected) in found.iter().zip(expected) {
                let error = (found - expected).abs();
                assert!(
                    error <= 0.005 * expected.abs(),
                    "{}: {dtype:?}: {found}, expected {expected}",
                    place.name
                );
            }
        }
    });
}

/// The output, dx and dweight of one row with weights of 1 and a gradient of 1, 0, 0, ..
fn row(device: &Device, x: &[f64], dtype: DType, epsilon: f64) -> [Vec<f64>; 3] {
    let data = TensorData::new(x.to_vec(), [1, x.len()]);
    let x = Tensor::<2>::from_data(data, (device, dtype)).require_grad();
    let weight = Tensor::<1>::ones([x.dims()[1]], (device, dtype)).require_grad();
    let y = rms_norm(x.clone(), weight.clone(), epsilon).expect("it fits");
    let gradients = y.clone().slice([0..1, 0..1]).sum().backward();
    let values = |data: TensorData| data.iter::<f64>().collect();
    [
        values(y.inner().into_data()),
        values(x.grad(&gradients).expect("tracked").into_data()),
        values(weight.grad(&gradients).expect("tracked").into_data()),
    ]
}

#[test]
fn rows_whose_squares_leave_the_type_are_right_or_nan_and_not_0() {
    on_each_device(|place| {
        let (f32, f64) = (DType::F32, DType::F64);
        for (size, dtype, epsilon, fits) in [
            (1e18, f32, 1e-6, true),
            (1e20, f32, 1e-6, false),
            (1e20, DType::BF16, 1e-6, false),
            (1e20, f64, 1e-6, true),
            (1e-18, f32, 0.0, true),
            // Squares that are subnormal, and 0.
            (1e-21, f32, 0.0, false),
            (1e-25, f32, 0.0, false),
            (1e-25, f64, 0.0, true),
            (1e200, f64, 1e-6, false),
            (0.0, f32, 1e-6, true),
        ] {
            if !place.has(dtype) {
                continue;
            }
            // Of 3 and 4 times a size, without an epsilon: 0.6 and 0.8 times the root of 2, and the
            // slopes of the first are 0.64 and -0.48 times that, over 5 sizes.
            let found = row(&place.device, &[3.0 * size, 4.0 * size], dtype, epsilon);
            let root = 2f64.sqrt();
            let mut expected = [
                vec![0.6 * root, 0.8 * root],
                vec![0.128 * root / size, -0.096 * root / size],
                vec![0.6 * root, 0.0],
            ];
            if size == 0.0 {
                expected = [vec![0.0; 2], vec![1e3, 0.0], vec![0.0; 2]];
            }
            let tolerance = if dtype == DType::BF16 { 4e-3 } else { 1e-5 };
            for (found, expected) in found.iter().zip(&expected) {
                let largest = expected.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
                let right = |(found, expected): (&f64, &f64)| {
                    (found - expected).abs() <= tolerance * largest
                };
                // An operator may compute in a wider type than the tensors'.
                assert!(
                    found.iter().zip(expected).all(right) || !fits && found[0].is_nan(),
                    "{}: {size:e}, {dtype:?}: {found:?}, {expected:?}",
                    place.name
                );
            }
        }
    });
}

#[test]
fn a_norm_of_no_rows_is_tracked_to_x_and_the_weight() {
    on_each_device(|place| {
        let device = &place.device;
        let x = Tensor::<2>::zeros([0, 4], device).require_grad();
        let weight = Tensor::<1>::ones([4], device).require_grad();
        let y = rms_norm(x.clone(), weight.clone(), 1e-6).expect("nothing to do");
        assert_eq!(y.dims(), [0, 4]);
        let gradients = y.sum().backward();
        assert_eq!(x.grad(&gradients).expect("tracked").dims(), [0, 4]);
        let dweight = weight.grad(&gradients).expect("tracked").into_data();
        assert_eq!(dweight.iter::<f32>().collect::<Vec<_>>(), [0.0; 4]);
    });
}

/// Where the model is sure of the target, its gradient is what 1 - p leaves: in bf16, p itself
/// would be rounded to 1 and the gradient lost.
#[test]
fn a_small_gradient_in_16_bits_keeps_its_digits() {
    on_each_device(|place| {
        if !place.has(DType::BF16) {
            return;
        }
        let device = &place.device;
        let tensor = |values: Vec<f32>, shape: [usize; 2]| {
            let data = TensorData::new(values, shape);
            Tensor::<2>::from_data(data, (device, DType::BF16)).require_grad()
        };
        let (hidden, weight) = (tensor(vec![1.0], [1, 1]), tensor(vec![8.0, 0.0], [2, 1]));
        let loss = CrossEntropy::new(&[0], 2).expect("valid");
        let loss = loss.try_forward(hidden, weight.clone()).expect("it fits");
        let gradient = weight.grad(&loss.backward()).expect("tracked");
        let expected = 1.0 / (1.0 + 8f64.exp());
        let found = values(gradient);
        assert!(
            (found[0] + expected).abs() < 0.01 * expected,
            "{}: {found:?}",
            place.name
        );
        assert!(
            (found[1] - expected).abs() < 0.01 * expected,
            "{}: {found:?}",
            place.name
        );
    });
}

/// The loss and its gradients, of one channel.
fn one_channel_loss(
    device: &Device,
    [hidden, weight]: [&[f64]; 2],
    targets: &[i64],
    dtype: DType,
    method: Method,
) -> [Vec<f64>; 3] {
    let tensor = |values: &[f64]| {
        let data = TensorData::new(values.to_vec(), [values.len(), 1]);
        Tensor::<2>::from_data(data, (device, dtype)).require_grad()
    };
    let [hidden, weight] = [hidden, weight].map(tensor);
    let loss = CrossEntropy::new(targets, weight.dims()[0]).expect("valid");
    let loss = loss.with_implementation(method.0).with_blocks(method.1);
    let loss = loss
        .try_forward(hidden.clone(), weight.clone())
        .expect("it fits");
    let gradients = loss.clone().backward();
    let of = |x: Tensor<2>| values(x.grad(&gradients).expect("tracked"));
    [values(loss), of(hidden), of(weight)]
}

const BLOCKS: [Method; 4] = [
    (Implementation::Fused, None),
    (Implementation::Fused, Some(0)),
    (Implementation::Fused, Some(1)),
    (Implementation::Composed, None),
];

const WORDS: usize = 300;

/// All words of the first block, and then all but one, have a logit of -1e40, -inf in f32.
#[test]
fn a_block_of_words_without_probability_changes_nothing() {
    on_each_device(|place| {
        for none in [128, 299] {
            let mut weight = vec![-1e20; WORDS];
            weight[none..].fill(1e-20);
            let left = (WORDS - none) as f64;
            for method in BLOCKS {
                let [loss, dhidden, dweight] = one_channel_loss(
                    &place.device,
                    [&[1e20], &weight],
                    &[299],
                    DType::F32,
                    method,
                );
                assert!(
                    (loss[0] - left.ln()).abs() < 1e-5,
                    "{}: {method:?}: {loss:?}",
                    place.name
                );
                assert!(
                    dhidden[0].abs() < 1e-25,
                    "{}: {method:?}: {dhidden:?}",
                    place.name
                );
                for (word, found) in dweight.iter().enumerate() {
                    let p = if word < none { 0.0 } else { 1.0 / left };
                    let expected = 1e20 * (p - if word == 299 { 1.0 } else { 0.0 });
                    assert!(
                        (found - expected).abs() <= 1e15,
                        "{}: {method:?}: {found}, {expected}",
                        place.name
                    );
                }
            }
        }
    });
}

/// p / rows is 1e-6, of which f16 has 4 bits.
#[test]
fn gradients_of_many_rows_keep_their_digits_in_f16() {
    on_each_device(|place| {
        if !place.has(DType::F16) {
            return;
        }
        let (rows, words) = (512, 2001);
        let hidden: Vec<f64> = (0..rows).map(|row| 1.0 + (row % 8) as f64 / 8.0).collect();
        let weight: Vec<f64> = (0..words).map(|word| (word % 64) as f64 / 64.0).collect();
        let targets: Vec<i64> = (0..rows as i64)
            .map(|row| row * 37 % words as i64)
            .collect();
        let (mut dhidden, mut dweight) = (vec![0.0; rows], vec![0.0; words]);
        for (row, h) in hidden.iter().enumerate() {
            let sum: f64 = weight.iter().map(|w| (h * w).exp()).sum();
            for (word, w) in weight.iter().enumerate() {
                let one = if targets[row] == word as i64 {
                    1.0
                } else {
                    0.0
                };
                let dlogit = ((h * w).exp() / sum - one) / rows as f64;
                dhidden[row] += dlogit * w;
                dweight[word] += dlogit * h;
            }
        }
        for method in BLOCKS {
            let found = one_channel_loss(
                &place.device,
                [&hidden, &weight],
                &targets,
                DType::F16,
                method,
            );
            for (expected, found) in [&dhidden, &dweight].into_iter().zip(&found[1..]) {
                for (expected, found) in expected.iter().zip(found) {
                    // Half a unit of f16, which has steps of 2^-24 below 2^-14.
                    let bound = 6e-4 * expected.abs() + 2f64.powi(-25);
                    let error = (found - expected).abs();
                    assert!(
                        error <= bound,
                        "{}: {method:?}: {found}, expected {expected}",
                        place.name
                    );
                }
            }
        }
    });
}

/// A logit of 90,000 and one of 89,700.
#[test]
fn logits_beyond_f16_are_computed() {
    on_each_device(|place| {
        if !place.has(DType::F16) {
            return;
        }
        for method in BLOCKS {
            let [loss, dhidden, dweight] = one_channel_loss(
                &place.device,
                [&[300.0], &[300.0, 299.0]],
                &[1],
                DType::F16,
                method,
            );
            assert_eq!(
                (loss[0], dhidden[0]),
                (300.0, 1.0),
                "{}: {method:?}",
                place.name
            );
            assert_eq!(dweight, [300.0, -300.0], "{}: {method:?}", place.name);
        }
    });
}

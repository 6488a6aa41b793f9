//! The norms and their gradients equal a plain computation in f64.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_attention::{layer_norm, rms_norm};

use crate::numbers;

const SHAPE: [usize; 3] = [2, 3, 21];
const CHANNELS: usize = SHAPE[2];
const EPSILON: f64 = 1e-2;

/// x, the weight, the bias and the gradient of the output.
fn inputs(dtype: DType) -> [Vec<f64>; 4] {
    let elems = SHAPE.iter().product();
    [(1, elems), (2, CHANNELS), (4, CHANNELS), (3, elems)]
        .map(|(seed, count)| numbers(seed, count, dtype))
}

/// The output by the definition: of an RMSNorm, or with a bias of a LayerNorm.
fn normalised(x: &[f64], weight: &[f64], bias: Option<&[f64]>) -> Vec<f64> {
    let mean = |row: &[f64]| row.iter().sum::<f64>() / CHANNELS as f64;
    let row = |row: &[f64]| -> Vec<f64> {
        let center = bias.map_or(0.0, |_| mean(row));
        let centred: Vec<f64> = row.iter().map(|x| x - center).collect();
        let squares: Vec<f64> = centred.iter().map(|x| x * x).collect();
        let root = (mean(&squares) + EPSILON).sqrt();
        (0..CHANNELS)
            .map(|i| centred[i] / root * weight[i] + bias.map_or(0.0, |bias| bias[i]))
            .collect()
    };
    x.chunks(CHANNELS).flat_map(row).collect()
}

/// The derivative of <output, dy> along each element of a list, by central differences.
fn slopes(values: &[f64], dy: &[f64], output: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    let step = 1e-5;
    let product = |values: &[f64]| -> f64 {
        let output = output(values);
        output.iter().zip(dy).map(|(y, dy)| y * dy).sum()
    };
    let slope = |index: usize| {
        let moved = |by: f64| {
            let mut values = values.to_vec();
            values[index] += by;
            product(&values)
        };
        (moved(step) - moved(-step)) / (2.0 * step)
    };
    (0..values.len()).map(slope).collect()
}

#[test]
fn the_norms_and_their_gradients_equal_the_plain_computation() {
    for (dtype, tolerance) in [
        (DType::F64, 1e-9),
        (DType::F32, 1e-6),
        (DType::BF16, 2f64.powi(-7)),
        (DType::F16, 2f64.powi(-10)),
    ] {
        for has_bias in [false, true] {
            equals_the_plain_computation([dtype; 2], tolerance, has_bias);
        }
        // A weight of 1 plus another is given in f32, for 16 bits would round it.
        if dtype.size() < 4 {
            equals_the_plain_computation([dtype, DType::F32], tolerance, false);
        }
    }
}

fn equals_the_plain_computation([dtype, of_weight]: [DType; 2], tolerance: f64, has_bias: bool) {
    let [x, _, bias, dy] = inputs(dtype);
    let [_, weight, ..] = inputs(of_weight);
    let given = has_bias.then_some(&bias[..]);
    let mut expected = vec![
        normalised(&x, &weight, given),
        slopes(&x, &dy, |x| normalised(x, &weight, given)),
        slopes(&weight, &dy, |weight| normalised(&x, weight, given)),
    ];
    if has_bias {
        expected.push(slopes(&bias, &dy, |bias| {
            normalised(&x, &weight, Some(bias))
        }));
    }
    let device = Device::flex().autodiff();
    let tensor = |values: &[f64]| {
        let data = TensorData::new(values.to_vec(), SHAPE);
        Tensor::<3>::from_data(data, (&device, dtype))
    };
    let [weight, bias] = [(weight, of_weight), (bias, dtype)].map(|(values, dtype)| {
        let data = TensorData::new(values, [CHANNELS]);
        Tensor::<1>::from_data(data, (&device, dtype)).require_grad()
    });
    let x = tensor(&x).require_grad();
    let y = if has_bias {
        layer_norm(x.clone(), weight.clone(), bias.clone(), EPSILON)
    } else {
        rms_norm(x.clone(), weight.clone(), EPSILON)
    };
    let y = y.expect("it fits");
    let gradients = (y.clone() * tensor(&dy)).sum().backward();
    let mut found = vec![
        y.inner().into_data(),
        x.grad(&gradients).expect("tracked").into_data(),
        weight.grad(&gradients).expect("tracked").into_data(),
    ];
    found.extend(bias.grad(&gradients).map(Tensor::into_data));
    assert_eq!(found.len(), expected.len());
    for (name, (found, expected)) in ["y", "dx", "dweight", "dbias"]
        .iter()
        .zip(found.iter().zip(&expected))
    {
        let type_expected = if *name == "dweight" { of_weight } else { dtype };
        assert_eq!(found.dtype(), type_expected, "{name}");
        let found: Vec<f64> = found.iter().collect();
        assert_eq!(found.len(), expected.len());
        let largest = expected.iter().fold(1.0, |max: f64, x| max.max(x.abs()));
        for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
            assert!(
                (found - expected).abs() <= tolerance * largest,
                "{dtype:?}: {name}[{index}] is {found}, expected {expected}"
            );
        }
    }
}

#[test]
fn wrong_inputs_are_refused() {
    let device = Device::flex();
    let x = || Tensor::<2>::zeros([2, 4], &device);
    let refused = |weight: Tensor<1>, epsilon, message: &str| {
        let error = rms_norm(x(), weight, epsilon).map(drop).expect_err(message);
        assert!(error.to_string().contains(message), "{error}");
    };
    let ones = |channels, dtype| Tensor::<1>::ones([channels], (&device, dtype));
    let (f32, f16) = (DType::F32, DType::F16);
    refused(ones(5, f32), 1e-6, "x has 4 in channels, weight has 5");
    refused(ones(4, f16), 1e-6, "weight is F16, expected F32");
    let wider = rms_norm(x().cast(f16), ones(4, DType::F64), 1e-6).map(drop);
    let message = wider.expect_err("f64 beside f16").to_string();
    assert!(message.contains("weight is F64, expected F16"), "{message}");
    refused(ones(4, f32), -1.0, "epsilon is -1");
    refused(ones(4, f32), f64::NAN, "epsilon is NaN");
    // Infinite and 0 in f32, in which rows of f32 are computed.
    refused(ones(4, f32), 1e300, "epsilon is 1e300, expected 0 or");
    refused(ones(4, f32), 1e-60, "epsilon is 1e-60, expected 0 or");
    for (dtype, epsilon) in [(DType::F64, 1e300), (DType::F64, 1e-60), (DType::F64, 0.0)] {
        let x = x().cast(dtype);
        rms_norm(x, ones(4, dtype), epsilon).expect("f64 holds it");
    }
    let bias = |channels| layer_norm(x(), ones(4, f32), ones(channels, f32), 1e-6);
    let error = bias(5).map(drop).expect_err("a bias of another size");
    let message = error.to_string();
    assert!(
        message.contains("x has 4 in channels, bias has 5"),
        "{message}"
    );
    let none = || Tensor::<2>::zeros([0, 4], &device);
    for nothing in [
        rms_norm(none(), ones(4, f32), 1e-6),
        layer_norm(none(), ones(4, f32), ones(4, f32), 1e-6),
    ] {
        assert_eq!(nothing.expect("nothing to do").dims(), [0, 4]);
    }
}

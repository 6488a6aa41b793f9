//! The norm and its gradients equal a plain computation in f64.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_attention::rms_norm;

const SHAPE: [usize; 3] = [2, 3, 5];
const CHANNELS: usize = SHAPE[2];
const EPSILON: f64 = 1e-2;

/// Numbers between -1 and 1 that are the same in every run, rounded to a type.
fn numbers(seed: usize, count: usize, dtype: DType) -> Vec<f64> {
    let value = |index: usize| ((index * 7919 + seed * 104_729) % 2003) as f64 / 1001.0 - 1.0;
    let data = TensorData::new((0..count).map(value).collect::<Vec<f64>>(), [count]);
    data.convert_dtype(dtype).iter::<f64>().collect()
}

/// x, the weight and the gradient of the output.
fn inputs(dtype: DType) -> [Vec<f64>; 3] {
    let elems = SHAPE.iter().product();
    [(1, elems), (2, CHANNELS), (3, elems)].map(|(seed, count)| numbers(seed, count, dtype))
}

/// The output by the definition.
fn normalised(x: &[f64], weight: &[f64]) -> Vec<f64> {
    let row = |row: &[f64]| -> Vec<f64> {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / CHANNELS as f64;
        let root = (mean + EPSILON).sqrt();
        row.iter().zip(weight).map(|(x, w)| x / root * w).collect()
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
fn the_norm_and_its_gradients_equal_the_plain_computation() {
    for (dtype, tolerance) in [
        (DType::F64, 1e-9),
        (DType::F32, 1e-6),
        (DType::BF16, 2f64.powi(-7)),
        (DType::F16, 2f64.powi(-10)),
    ] {
        let [x, weight, dy] = inputs(dtype);
        let expected = [
            normalised(&x, &weight),
            slopes(&x, &dy, |x| normalised(x, &weight)),
            slopes(&weight, &dy, |weight| normalised(&x, weight)),
        ];
        let device = Device::flex().autodiff();
        let tensor = |values: &[f64]| {
            let data = TensorData::new(values.to_vec(), SHAPE);
            Tensor::<3>::from_data(data, (&device, dtype))
        };
        let data = TensorData::new(weight, [CHANNELS]);
        let weight = Tensor::<1>::from_data(data, (&device, dtype)).require_grad();
        let x = tensor(&x).require_grad();
        let y = rms_norm(x.clone(), weight.clone(), EPSILON).expect("it fits");
        assert_eq!(y.dtype(), dtype);
        let gradients = (y.clone() * tensor(&dy)).sum().backward();
        let found = [
            y.inner().into_data(),
            x.grad(&gradients).expect("tracked").into_data(),
            weight.grad(&gradients).expect("tracked").into_data(),
        ];
        for (name, (found, expected)) in ["y", "dx", "dweight"]
            .iter()
            .zip(found.iter().zip(&expected))
        {
            assert_eq!(found.dtype(), dtype, "{name}");
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
    refused(ones(4, f32), -1.0, "epsilon is -1");
    refused(ones(4, f32), f64::NAN, "epsilon is NaN");
    // Infinite and 0 in f32, in which rows of f32 are computed.
    refused(ones(4, f32), 1e300, "epsilon is 1e300, expected 0 or");
    refused(ones(4, f32), 1e-60, "epsilon is 1e-60, expected 0 or");
    for (dtype, epsilon) in [(DType::F64, 1e300), (DType::F64, 1e-60), (DType::F64, 0.0)] {
        let x = x().cast(dtype);
        rms_norm(x, ones(4, dtype), epsilon).expect("f64 holds it");
    }
    let nothing = rms_norm(Tensor::<2>::zeros([0, 4], &device), ones(4, f32), 1e-6);
    assert_eq!(nothing.expect("nothing to do").dims(), [0, 4]);
}

/// The output, dx and dweight of one row with weights of 1 and a gradient of 1, 0, 0, ..
fn row(x: &[f64], dtype: DType, epsilon: f64) -> [Vec<f64>; 3] {
    let device = Device::flex().autodiff();
    let data = TensorData::new(x.to_vec(), [1, x.len()]);
    let x = Tensor::<2>::from_data(data, (&device, dtype)).require_grad();
    let weight = Tensor::<1>::ones([x.dims()[1]], (&device, dtype)).require_grad();
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
fn rows_whose_squares_leave_the_type_are_nan_and_not_0() {
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
        // Of 3 and 4 times a size, without an epsilon: 0.6 and 0.8 times the root of 2, and the
        // slopes of the first are 0.64 and -0.48 times that, over 5 sizes.
        let found = row(&[3.0 * size, 4.0 * size], dtype, epsilon);
        let root = 2f64.sqrt();
        let mut expected = [
            vec![0.6 * root, 0.8 * root],
            vec![0.128 * root / size, -0.096 * root / size],
            vec![0.6 * root, 0.0],
        ];
        if size == 0.0 {
            expected = [vec![0.0; 2], vec![1e3, 0.0], vec![0.0; 2]];
        }
        for (found, expected) in found.iter().zip(&expected) {
            let largest = expected.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
            for (found, expected) in found.iter().zip(expected) {
                if fits {
                    let error = (found - expected).abs();
                    assert!(
                        error <= 1e-5 * largest,
                        "{size:e}, {dtype:?}: {found}, {expected}"
                    );
                }
            }
            assert!(fits || found[0].is_nan(), "{size:e}, {dtype:?}: {found:?}");
        }
    }
}

#[test]
fn a_norm_of_no_rows_is_tracked_to_x_and_the_weight() {
    let device = Device::flex().autodiff();
    let x = Tensor::<2>::zeros([0, 4], &device).require_grad();
    let weight = Tensor::<1>::ones([4], &device).require_grad();
    let y = rms_norm(x.clone(), weight.clone(), 1e-6).expect("nothing to do");
    assert_eq!(y.dims(), [0, 4]);
    let gradients = y.sum().backward();
    assert_eq!(x.grad(&gradients).expect("tracked").dims(), [0, 4]);
    let dweight = weight.grad(&gradients).expect("tracked").into_data();
    assert_eq!(dweight.iter::<f32>().collect::<Vec<_>>(), [0.0; 4]);
}

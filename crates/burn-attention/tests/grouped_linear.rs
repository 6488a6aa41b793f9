//! Linear layers of groups of rows and their gradients equal a plain computation in f64.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_attention::{AttentionError, grouped_linear};

use crate::numbers;

const INPUTS: usize = 6;
const OUTPUTS: usize = 4;

/// The output, and the gradients of x and the weight.
fn expected(
    [x, weight, gradient]: [&[f64]; 3],
    groups: &[usize],
    [inputs, outputs]: [usize; 2],
) -> [Vec<f64>; 3] {
    let mut results = [
        vec![0.0; gradient.len()],
        vec![0.0; x.len()],
        vec![0.0; weight.len()],
    ];
    let of_row = groups.iter().enumerate();
    let of_row = of_row.flat_map(|(group, rows)| std::iter::repeat_n(group, *rows));
    for (row, group) in of_row.enumerate() {
        for output in 0..outputs {
            for input in 0..inputs {
                let w = (group * outputs + output) * inputs + input;
                let (to, from) = (row * outputs + output, row * inputs + input);
                results[0][to] += x[from] * weight[w];
                results[1][from] += gradient[to] * weight[w];
                results[2][w] += gradient[to] * x[from];
            }
        }
    }
    results
}

#[test]
fn all_equals_a_plain_computation() {
    let small = [INPUTS, OUTPUTS];
    for (groups, [inputs, outputs]) in [
        (&[3, 1, 2][..], small),
        (&[0, 5, 0], small),
        (&[0, 0, 1, 0], small),
        (&[4], small),
        (&[0, 2, 0, 0, 7], small),
        (&[70, 0, 5, 600], [64, 40]),
        (&[35, 300], [33, 70]),
    ] {
        let rows: usize = groups.iter().sum();
        for (dtype, within) in [(DType::F64, 1e-13), (DType::F32, 1e-5), (DType::BF16, 0.02)] {
            let x = numbers(1, rows * inputs, dtype);
            let weight = numbers(2, groups.len() * outputs * inputs, dtype);
            let gradient = numbers(3, rows * outputs, dtype);
            let expected = expected([&x, &weight, &gradient], groups, [inputs, outputs]);

            let device = Device::flex().autodiff();
            let matrix = |values: Vec<f64>, columns: usize| {
                let data = TensorData::new(values, [rows, columns]);
                Tensor::<2>::from_data(data, (&device, dtype))
            };
            let x = matrix(x, inputs).require_grad();
            let weight = TensorData::new(weight, [groups.len(), outputs, inputs]);
            let weight = Tensor::<3>::from_data(weight, (&device, dtype)).require_grad();
            let y = grouped_linear(x.clone(), weight.clone(), groups).expect("it fits");
            assert_eq!(y.dtype(), dtype);
            let gradients = (y.clone() * matrix(gradient, outputs)).sum().backward();
            let found = [
                y.into_data(),
                x.grad(&gradients).expect("a gradient").into_data(),
                weight.grad(&gradients).expect("a gradient").into_data(),
            ];
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!(found.iter::<f64>().count(), expected.len());
                for (found, expected) in found.iter::<f64>().zip(expected) {
                    let apart = (found - expected).abs();
                    let allowed = within * expected.abs().max((rows as f64).sqrt());
                    assert!(apart <= allowed, "{groups:?} {dtype:?}: {apart:e}");
                }
            }
        }
    }
}

/// A frozen weight has no gradient, and x has one; and the other way round.
#[test]
fn gradients_are_those_that_are_wanted() {
    let device = Device::flex().autodiff();
    let x = Tensor::<2>::ones([3, INPUTS], &device);
    let weight = Tensor::<3>::ones([2, OUTPUTS, INPUTS], &device);
    for (wants_x, wants_weight) in [(true, false), (false, true)] {
        let (x, weight) = (
            x.clone().set_require_grad(wants_x),
            weight.clone().set_require_grad(wants_weight),
        );
        let y = grouped_linear(x.clone(), weight.clone(), &[1, 2]).expect("it fits");
        let gradients = y.sum().backward();
        assert_eq!(x.grad(&gradients).is_some(), wants_x);
        assert_eq!(weight.grad(&gradients).is_some(), wants_weight);
    }
}

#[test]
fn groups_that_do_not_fit_are_refused() {
    let device = Device::flex();
    let x = Tensor::<2>::ones([3, INPUTS], &device);
    let weight = Tensor::<3>::ones([2, OUTPUTS, INPUTS], &device);
    for groups in [&[1, 1][..], &[3], &[1, 1, 1], &[usize::MAX, 4]] {
        let refused = grouped_linear(x.clone(), weight.clone(), groups);
        assert!(
            matches!(refused, Err(AttentionError::Size { .. })),
            "{groups:?}"
        );
    }
    let narrow = Tensor::<2>::ones([3, INPUTS - 1], &device);
    assert!(grouped_linear(narrow, weight, &[1, 2]).is_err());
}

//! The gate and its gradients equal a plain computation in f64.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_attention::{swiglu, swiglu_halves};

const SHAPE: [usize; 2] = [3, 5];
const ELEMS: usize = SHAPE[0] * SHAPE[1];

/// Numbers between -4 and 4 that are the same in every run, rounded to a type.
fn numbers(seed: usize, dtype: DType) -> Vec<f64> {
    let value = |index: usize| ((index * 7919 + seed * 104_729) % 2003) as f64 / 250.0 - 4.0;
    let data = TensorData::new((0..ELEMS).map(value).collect::<Vec<f64>>(), [ELEMS]);
    data.convert_dtype(dtype).iter::<f64>().collect()
}

fn expected(gate: f64, up: f64) -> f64 {
    gate / (1.0 + (-gate).exp()) * up
}

#[test]
fn the_gate_and_its_gradients_equal_the_plain_computation() {
    for (dtype, tolerance) in [
        (DType::F64, 1e-8),
        (DType::F32, 1e-5),
        // Half a unit in the last place of 16 to 32.
        (DType::BF16, 0.0625),
        (DType::F16, 0.0079),
    ] {
        let [gate, up, dy] = [1, 2, 3].map(|seed| numbers(seed, dtype));
        let step = 1e-6;
        let slope = |f: &dyn Fn(f64) -> f64| (f(step) - f(-step)) / (2.0 * step);
        let of = |f: &dyn Fn(usize) -> f64| (0..ELEMS).map(f).collect::<Vec<f64>>();
        let results = [
            of(&|i| expected(gate[i], up[i])),
            of(&|i| dy[i] * slope(&|by| expected(gate[i] + by, up[i]))),
            of(&|i| dy[i] * slope(&|by| expected(gate[i], up[i] + by))),
        ];
        let device = Device::flex().autodiff();
        let tensor = |values: &[f64]| {
            let data = TensorData::new(values.to_vec(), SHAPE);
            Tensor::<2>::from_data(data, (&device, dtype)).require_grad()
        };
        let (gate, up) = (tensor(&gate), tensor(&up));
        let y = swiglu(gate.clone(), up.clone()).expect("it fits");
        let gradients = (y.clone() * tensor(&dy).detach()).sum().backward();
        let found = [
            y.inner(),
            gate.grad(&gradients).expect("tracked"),
            up.grad(&gradients).expect("tracked"),
        ];
        for (name, (found, expected)) in ["y", "dgate", "dup"]
            .iter()
            .zip(found.into_iter().zip(&results))
        {
            assert_eq!(found.dtype(), dtype, "{name}");
            let found: Vec<f64> = found.into_data().iter().collect();
            assert_eq!(found.len(), ELEMS);
            for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
                assert!(
                    (found - expected).abs() <= tolerance,
                    "{dtype:?}: {name}[{index}] is {found}, expected {expected}"
                );
            }
        }
    }
}

#[test]
fn wrong_inputs_are_refused() {
    let device = Device::flex();
    let zeros = |shape, dtype| Tensor::<2>::zeros(shape, (&device, dtype));
    for (shape, dtype, message) in [
        ([2, 4], DType::F32, "gate has shape [2, 3], up has [2, 4]"),
        ([2, 3], DType::F16, "up is F16, expected F32"),
    ] {
        let error = swiglu(zeros([2, 3], DType::F32), zeros(shape, dtype));
        let error = error.map(drop).expect_err(message).to_string();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn halves_have_the_bits_of_two_tensors() {
    let device = Device::flex().autodiff();
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        // The second has more than one task.
        for [rows, hidden] in [[3, 5], [70, 1100]] {
            let matrix = |seed, columns| {
                let numbers = crate::numbers(seed, rows * columns, dtype);
                let data = TensorData::new(numbers, [rows, columns]);
                Tensor::<2>::from_data(data, (&device, dtype)) * 4.0
            };
            let both = matrix(1, 2 * hidden).detach().require_grad();
            let gradient = matrix(2, hidden);
            let half = |first| both.clone().narrow(1, first, hidden).detach();
            let [gate, up] = [0, hidden].map(|first| half(first).require_grad());
            let expected = swiglu(gate.clone(), up.clone()).expect("it fits");
            let found = swiglu_halves(both.clone()).expect("it fits");
            assert_eq!(found.to_data(), expected.to_data());
            let of_pair = (expected * gradient.clone()).sum().backward();
            let of_both = (found * gradient).sum().backward();
            let expected = [gate, up].map(|x| x.grad(&of_pair).expect("a gradient"));
            let found = both.grad(&of_both).expect("a gradient");
            let expected = Tensor::cat(expected.into(), 1);
            assert_eq!(found.into_data(), expected.into_data());
        }
    }
    let empty = swiglu_halves(Tensor::ones([0, 8], &device)).expect("it fits");
    assert_eq!(empty.dims(), [0, 4]);
    assert!(swiglu_halves(Tensor::ones([2, 3], &device)).is_err());
}

//! A linear layer with an adapter, and its gradients, equal a plain computation in f64.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_attention::{
    Adapter, AttentionError, GradientSource, adapted_linear_source, adapted_linears, backward_from,
    gated_linear, gated_linear_source, has_linear_kernel, linear, linear_source, scaled_parts,
    stand_in, swiglu, wide_linear, wide_linear_onto, wide_linear_source, wide_linears,
};

use crate::numbers;

fn product(x: &[f64], y: &[f64], inner: usize) -> Vec<f64> {
    let (rows, columns) = (x.len() / inner, y.len() / inner);
    let mut out = vec![0.0; rows * columns];
    for (row, out) in out.chunks_exact_mut(columns).enumerate() {
        for k in 0..inner {
            for (column, out) in out.iter_mut().enumerate() {
                *out += x[row * inner + k] * y[k * columns + column];
            }
        }
    }
    out
}

fn transposed(x: &[f64], columns: usize) -> Vec<f64> {
    let rows = x.len() / columns;
    let element = |index: usize| x[index % rows * columns + index / rows];
    (0..x.len()).map(element).collect()
}

fn sum(x: Vec<f64>, y: &[f64]) -> Vec<f64> {
    let both = x.into_iter().zip(y.iter().cycle());
    both.map(|(x, y)| x + y).collect()
}

/// Asserts that each element is within a rounding of its own, and one of the largest in a sum.
fn near(name: &str, found: &Tensor<2>, expected: &[f64], [unit, share]: [f64; 2]) {
    let largest = expected.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    let found: Vec<f64> = found.clone().into_data().iter().collect();
    assert_eq!(found.len(), expected.len(), "{name}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let allowed = unit * expected.abs() + share * largest;
        assert!(
            (found - expected).abs() <= allowed,
            "{name}[{index}]: {found} for {expected}"
        );
    }
}

#[test]
fn the_layer_and_its_gradients_equal_the_plain_computation() {
    // One block and less; more than one of rows, columns and channels, none of them whole; an odd
    // size, which no kernel has.
    for [rows, inputs, outputs] in [[1, 2, 2], [13, 40, 34], [1030, 386, 290], [5, 7, 6]] {
        for (dtype, unit) in [(DType::BF16, 1.0 / 256.0), (DType::F32, 1e-6)] {
            for rank in [None, Some(3)] {
                check([rows, inputs, outputs], rank, dtype, unit);
            }
        }
    }
}

fn check([rows, inputs, outputs]: [usize; 3], rank: Option<usize>, dtype: DType, unit: f64) {
    let device = Device::flex().autodiff();
    let tensor = |values: &[f64], columns: usize, dtype| {
        let shape = [values.len() / columns, columns];
        let data = TensorData::new(values.to_vec(), shape);
        Tensor::<2>::from_data(data, (&device, dtype)).require_grad()
    };
    let [x, weight, bias, dy] = [rows * inputs, inputs * outputs, outputs, rows * outputs]
        .map(|count| numbers(count as u64, count, dtype));
    let rank_of = rank.unwrap_or(1);
    let [a, b] =
        [inputs * rank_of, rank_of * outputs].map(|count| numbers(count as u64, count, DType::F32));

    let [x_of, weight_of, dy_of] = [(&x, inputs), (&weight, outputs), (&dy, outputs)]
        .map(|(values, columns)| tensor(values, columns, dtype));
    let bias_of = tensor(&bias, outputs, dtype).reshape([outputs]);
    let [a_of, b_of] =
        [(&a, rank_of), (&b, outputs)].map(|(v, columns)| tensor(v, columns, DType::F32));
    let adapter = rank.map(|_| [a_of.clone(), b_of.clone()]);
    let y = linear(x_of.clone(), weight_of.clone(), Some(bias_of), adapter).expect("it fits");
    assert_eq!(y.dtype(), dtype);
    let gradients = (y.clone() * dy_of.detach()).sum().backward();
    let gradient = |of: &Tensor<2>| of.grad(&gradients).expect("tracked");

    let mut expected = sum(product(&x, &weight, inputs), &bias);
    let mut dx = product(&dy, &transposed(&weight, outputs), outputs);
    if rank.is_some() {
        let (u, v) = (
            product(&x, &a, inputs),
            product(&dy, &transposed(&b, outputs), outputs),
        );
        expected = sum(expected, &product(&u, &b, rank_of));
        dx = sum(dx, &product(&v, &transposed(&a, rank_of), rank_of));
        let da = product(&transposed(&x, inputs), &v, rows);
        let db = product(&transposed(&u, rank_of), &dy, rows);
        near("da", &gradient(&a_of), &da, [0.0, 1e-5]);
        near("db", &gradient(&b_of), &db, [0.0, 1e-5]);
    }
    // Of ordinary operations the terms of a sum may be rounded too.
    let is_kernel = inputs % 2 == 0 && has_linear_kernel(&device, dtype);
    let within = [unit, if is_kernel { 1e-5 } else { unit }];
    near("y", &y.inner(), &expected, within);
    near("dx", &gradient(&x_of), &dx, within);
    let dweight = product(&transposed(&x, inputs), &dy, rows);
    near("dweight", &gradient(&weight_of), &dweight, [unit, unit]);
}

#[test]
fn layers_with_adapters_and_one_input_equal_the_plain_computation() {
    for (dtype, unit) in [
        (DType::BF16, 1.0 / 256.0),
        (DType::F16, 1e-3),
        (DType::F32, 1e-6),
    ] {
        check_together([13, 40], [34, 6], dtype, unit);
    }
}

fn check_together([rows, inputs]: [usize; 2], outputs: [usize; 2], dtype: DType, unit: f64) {
    const RANK: usize = 3;
    const SCALE: f64 = 2.0;
    let device = Device::flex().autodiff();
    let tensor = |values: &[f64], columns: usize, dtype| {
        let shape = [values.len() / columns, columns];
        let data = TensorData::new(values.to_vec(), shape);
        Tensor::<2>::from_data(data, (&device, dtype)).require_grad()
    };
    let x = numbers(1, rows * inputs, dtype);
    let x_of = tensor(&x, inputs, dtype);
    let layer = |outputs: usize| {
        let [weight, bias, dy] = [inputs * outputs, outputs, rows * outputs]
            .map(|count| numbers(count as u64, count, dtype));
        let [a, b] = [RANK * inputs, RANK * outputs]
            .map(|count| numbers(count as u64 + 1, count, DType::F32));
        // Beside a small product, the adapter's term shows its digits.
        let weight: Vec<f64> = weight.iter().map(|x| x / 256.0).collect();
        (weight, bias, dy, a, b)
    };
    let plain = outputs.map(layer);
    let mut leaves = Vec::new();
    let layers = plain.each_ref().map(|(weight, bias, _, a, b)| {
        let outputs = bias.len();
        let (a, b) = (
            tensor(a, inputs, DType::F32),
            tensor(b, outputs, DType::F32),
        );
        let factors = [&a, &b].map(|x| scaled_parts(x.clone().detach(), SCALE, dtype));
        let weight = tensor(weight, outputs, dtype);
        leaves.push((weight.clone(), a.clone(), b.clone()));
        let bias = (outputs == 34).then(|| tensor(bias, outputs, dtype).reshape([outputs]));
        (weight, bias, Adapter { a, b, factors })
    });
    let y = adapted_linears(x_of.clone(), layers).expect("they fit");
    let scalars = y.each_ref().map(|y| y.clone());
    let scalars = scalars.into_iter().zip(&plain);
    let scalars =
        scalars.map(|(y, (_, bias, dy, ..))| (y * tensor(dy, bias.len(), dtype).detach()).sum());
    let gradients = scalars.reduce(|x, y| x + y).expect("two").backward();
    let mut dx = vec![0.0; x.len()];
    for ((y, (weight, bias, dy, a, b)), leaves) in y.into_iter().zip(plain).zip(leaves) {
        let outputs = bias.len();
        let scaled = |x: Vec<f64>| -> Vec<f64> { x.iter().map(|x| x * SCALE).collect() };
        let h = scaled(product(&x, &transposed(&a, inputs), inputs));
        let dh = scaled(product(&dy, &transposed(&b, outputs), outputs));
        let mut expected = sum(product(&x, &weight, inputs), &product(&h, &b, RANK));
        if outputs == 34 {
            expected = sum(expected, &bias);
        }
        dx = sum(dx, &product(&dy, &transposed(&weight, outputs), outputs));
        dx = sum(dx, &product(&dh, &a, RANK));
        let da = product(&transposed(&dh, RANK), &x, rows);
        let db = product(&transposed(&h, RANK), &dy, rows);
        let dweight = product(&transposed(&x, inputs), &dy, rows);
        near("y", &y.inner(), &expected, [unit, unit * 0.03 + 1e-6]);
        let gradient = |of: &Tensor<2>| of.grad(&gradients).expect("tracked");
        let (weight_of, a_of, b_of) = leaves;
        near("dweight", &gradient(&weight_of), &dweight, [unit, unit]);
        // h and dh are rounded to the type of x.
        near("da", &gradient(&a_of), &da, [unit, unit]);
        near("db", &gradient(&b_of), &db, [unit, unit]);
    }
    let dx_of = x_of.grad(&gradients).expect("tracked");
    near("dx", &dx_of, &dx, [unit, 2.0 * unit]);
}

#[test]
fn the_gradient_of_a_wide_layers_weight_keeps_its_digits() {
    let device = Device::flex().autodiff();
    let of = |values: [f64; 2], shape: [usize; 2]| {
        let data = TensorData::new(values.to_vec(), shape);
        Tensor::<2>::from_data(data, (&device, DType::BF16)).require_grad()
    };
    let (x, weight) = (of([1.0, 1.0 / 512.0], [2, 1]), of([3.0, 4.0], [1, 2]));
    let bias = of([5.0, 6.0], [1, 2]).reshape([2]).detach().require_grad();
    let y = wide_linear(x.clone(), weight.clone(), Some(bias.clone())).expect("it fits");
    let found: Vec<f32> = y.clone().inner().into_data().iter().collect();
    assert_eq!(found, [8.0, 10.0, 5.0, 6.0]);
    let gradients = y.sum().backward();
    let gradient = weight.grad(&gradients).expect("tracked");
    assert_eq!(gradient.dtype(), DType::F32);
    let sum = 1.0 + 1.0 / 512.0;
    assert_eq!(
        gradient.into_data().iter::<f32>().collect::<Vec<_>>(),
        [sum; 2]
    );
    let of_bias = bias.grad(&gradients).expect("tracked").into_data();
    assert_eq!(of_bias.iter::<f32>().collect::<Vec<_>>(), [2.0; 2]);
    let of_x = x.grad(&gradients).expect("tracked").into_data();
    assert_eq!(of_x.iter::<f32>().collect::<Vec<_>>(), [7.0; 2]);
}

/// The layers' gradients of x are summed, whichever outputs a backward starts from, and whether x is
/// a leaf or not.
#[test]
fn layers_of_one_x_have_the_gradients_of_single_layers() {
    const LAYERS: usize = 3;
    let device = Device::flex().autodiff();
    let matrix = |seed: u64, dims: [usize; 2]| {
        let data = TensorData::new(numbers(seed, dims[0] * dims[1], DType::F64), dims);
        Tensor::<2>::from_data(data, (&device, DType::F64)).require_grad()
    };
    // The outputs that each of the backward passes starts from.
    let all: &[&[&[usize]]] = &[
        &[&[0, 1, 2]],
        &[&[2, 0]],
        &[&[1]],
        &[&[0], &[1, 2]],
        &[&[2], &[1], &[0]],
    ];
    for is_leaf in [true, false] {
        // What is below a tensor goes back once.
        let possible = all.iter().filter(|passes| is_leaf || passes.len() == 1);
        for passes in possible {
            let run = |together: bool| -> Vec<Option<Vec<f64>>> {
                let leaf = matrix(1, [5, 4]);
                let x = if is_leaf {
                    leaf.clone()
                } else {
                    leaf.clone() * 2.0
                };
                let weights: [_; LAYERS] =
                    std::array::from_fn(|i| matrix(2 + i as u64, [4, 3 + i]));
                let ys = if together {
                    let layers = weights.each_ref().map(|weight| (weight.clone(), None));
                    wide_linears(x, layers).expect("they fit")
                } else {
                    let single = |weight: &Tensor<2>| wide_linear(x.clone(), weight.clone(), None);
                    weights
                        .each_ref()
                        .map(|weight| single(weight).expect("it fits"))
                };
                let mut found = Vec::new();
                for pass in *passes {
                    let squares = pass.iter().map(|&i| ys[i].clone().powi_scalar(2).sum());
                    let gradients = squares.reduce(|a, b| a + b).expect("outputs").backward();
                    for tensor in weights.iter().chain([&leaf]) {
                        let gradient = tensor.grad(&gradients);
                        found.push(gradient.map(|x| x.into_data().iter::<f64>().collect()));
                    }
                }
                found
            };
            let (found, expected) = (run(true), run(false));
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                let (Some(found), Some(expected)) = (found, expected) else {
                    assert_eq!(found, expected, "{passes:?}");
                    continue;
                };
                for (found, expected) in found.iter().zip(expected) {
                    assert!(
                        (found - expected).abs() < 1e-12,
                        "{passes:?}, leaf: {is_leaf}"
                    );
                }
            }
        }
    }
}

/// With and without a sum; the gated values are in no graph, and any tensor may be frozen.
#[test]
fn a_gated_layer_has_the_values_and_gradients_of_its_parts() {
    let device = Device::flex().autodiff();
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        let tensor = |seed: u64, dims: [usize; 2], tracked: bool| {
            let data = TensorData::new(numbers(seed, dims[0] * dims[1], dtype), dims);
            let x = Tensor::<2>::from_data(data, (&device, dtype));
            if tracked { x.require_grad() } else { x }
        };
        for frozen in 0..5 {
            let of = |index: usize, dims| tensor(index as u64 + 1, dims, index != frozen);
            let leaves = [of(0, [6, 4]), of(1, [6, 4]), of(2, [4, 8]), of(3, [6, 8])];
            let [gate, up, weight, y] = leaves.clone();
            let gradient = tensor(7, [6, 8], false);
            for is_sum in [true, false] {
                let base = || is_sum.then(|| y.clone());
                let found = gated_linear(gate.clone(), up.clone(), weight.clone(), base());
                let found = found.expect("it fits");
                let x = swiglu(gate.clone(), up.clone()).expect("it fits");
                let expected = match base() {
                    Some(y) => wide_linear_onto(y, x, weight.clone()),
                    None => wide_linear(x, weight.clone(), None),
                };
                let expected = expected.expect("it fits");
                assert_eq!(found.to_data(), expected.to_data());
                let of_output = |out: Tensor<2>| (out * gradient.clone()).sum().backward();
                let (found, expected) = (of_output(found), of_output(expected));
                for leaf in &leaves {
                    let [found, expected] = [&found, &expected].map(|all| leaf.grad(all));
                    assert_eq!(
                        found.map(Tensor::into_data),
                        expected.map(Tensor::into_data)
                    );
                }
                if !is_sum && frozen != 3 {
                    let [gate, up, weight] = [&gate, &up, &weight].map(Tensor::clone);
                    let source = gated_linear_source(gate, up, weight, gradient.clone().inner());
                    let found = backward_from([source.expect("it fits")]);
                    for leaf in &leaves[..3] {
                        let [found, expected] = [&found, &expected].map(|all| leaf.grad(all));
                        assert_eq!(
                            found.map(Tensor::into_data),
                            expected.map(Tensor::into_data)
                        );
                    }
                }
            }
        }
    }
}

/// All kinds of layers, with and without a bias and an adapter, of which any tensor may be frozen.
#[test]
fn a_source_gives_the_gradients_of_the_output_that_it_spares() {
    const SIZES: [usize; 3] = [6, 4, 8];
    let [rows, inputs, outputs] = SIZES;
    let device = Device::flex().autodiff();
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let wide = if dtype == DType::F64 {
            dtype
        } else {
            DType::F32
        };
        let tensor = |seed: u64, dims: [usize; 2], dtype: DType, tracked: bool| {
            let data = TensorData::new(numbers(seed, dims[0] * dims[1], dtype), dims);
            let x = Tensor::<2>::from_data(data, (&device, dtype));
            if tracked { x.require_grad() } else { x }
        };
        for frozen in 0..6 {
            let tracked = |index: usize| index != frozen;
            let x = tensor(1, [rows, inputs], dtype, tracked(0));
            let weight = tensor(2, [inputs, outputs], dtype, tracked(1));
            let bias = Tensor::<1>::from_data(&numbers(3, outputs, dtype)[..], (&device, dtype));
            let bias = if tracked(2) {
                bias.require_grad()
            } else {
                bias
            };
            let [a, b] = [
                tensor(4, [inputs, 2], wide, tracked(3)),
                tensor(5, [2, outputs], wide, tracked(4)),
            ];
            let gradient = tensor(6, [rows, outputs], dtype, false).inner();
            let leaves = [&x, &weight, &a, &b];
            let adapter = || {
                let [a, b] = [a.clone().transpose(), b.clone()];
                let factors = [&a, &b].map(|x| scaled_parts(x.clone().detach(), 1.0, dtype));
                Adapter { a, b, factors }
            };
            for has_bias in [false, true] {
                let input = || (x.clone(), weight.clone(), has_bias.then(|| bias.clone()));
                let pairs = |has_adapter: bool| {
                    let adapter = || has_adapter.then(|| [a.clone(), b.clone()]);
                    let (x, weight, bias) = input();
                    let y = linear(x, weight, bias, adapter()).unwrap();
                    let (x, weight, bias) = input();
                    let source = linear_source(x, weight, bias, adapter(), gradient.clone());
                    (y, source.unwrap())
                };
                let (x, weight, bias) = input();
                let wide = wide_linear(x, weight, bias).unwrap();
                let (x, weight, bias) = input();
                let of_wide = wide_linear_source(x, weight, bias, gradient.clone()).unwrap();
                let (x, weight, bias) = input();
                let [adapted] = adapted_linears(x, [(weight, bias, adapter())]).unwrap();
                let (x, weight, bias) = input();
                let layer = (weight, bias, adapter());
                let of_adapted = adapted_linear_source(x, layer, gradient.clone()).unwrap();
                let all = [
                    pairs(false),
                    pairs(true),
                    (wide, of_wide),
                    (adapted, of_adapted),
                ];
                for (kind, (output, source)) in all.into_iter().enumerate() {
                    let expected =
                        backward_from([GradientSource::new(output, gradient.clone()).unwrap()]);
                    let found = backward_from([source]);
                    for (which, leaf) in leaves.iter().enumerate() {
                        let [found, expected] = [&found, &expected]
                            .map(|gradients| leaf.grad(gradients).map(Tensor::into_data));
                        assert_eq!(found, expected, "{dtype:?} {kind} {frozen} {which}");
                    }
                }
            }
        }
    }
    let x = Tensor::<2>::ones([2, 3], &device).require_grad();
    let weight = Tensor::<2>::ones([3, 4], &device);
    let gradient = Tensor::<2>::ones([2, 3], &device.clone().inner());
    let other = GradientSource::new(x.clone(), Tensor::ones([2, 4], &device.clone().inner()));
    assert!(matches!(other, Err(AttentionError::Shapes { .. })));
    let narrow = Tensor::<2>::ones([2, 3], (&device.clone().inner(), DType::BF16));
    let other = GradientSource::new(x.clone(), narrow);
    assert!(matches!(other, Err(AttentionError::Op(_))));
    let other = stand_in(x.clone(), Tensor::ones([1, 3], &device));
    assert!(matches!(other, Err(AttentionError::Shapes { .. })));
    let refused = linear_source(x, weight, None, None, gradient);
    assert!(
        matches!(refused, Err(AttentionError::Shapes { .. })),
        "{refused:?}"
    );
}

#[test]
fn an_infinite_or_missing_number_stays_one() {
    let device = Device::flex();
    for value in [f32::NAN, f32::INFINITY] {
        let mut x = vec![0.0f32; 26];
        x[1] = value;
        let x = Tensor::<2>::from_data(TensorData::new(x, [13, 2]), (&device, DType::BF16));
        let weight = Tensor::<2>::ones([2, 4], (&device, DType::BF16));
        let y = linear(x, weight, None, None).expect("it fits").into_data();
        let wrong = y.iter::<f32>().filter(|y| !y.is_finite()).count();
        assert_eq!(wrong, 4, "one row");
    }
}

#[test]
fn sizes_and_types_that_do_not_fit_are_named() {
    let device = Device::flex();
    let of = |shape: [usize; 2], dtype| Tensor::<2>::zeros(shape, (&device, dtype));
    let (x, weight) = (of([3, 4], DType::BF16), of([4, 6], DType::BF16));
    let pair = |a, b, dtype| Some([of(a, dtype), of(b, dtype)]);
    for (weight, adapter, expected) in [
        (of([5, 6], DType::BF16), None, "inputs"),
        (of([4, 6], DType::F32), None, "weight"),
        (weight.clone(), pair([4, 2], [3, 6], DType::F32), "rank"),
        (weight.clone(), pair([4, 2], [2, 5], DType::F32), "outputs"),
        (weight.clone(), pair([4, 2], [2, 6], DType::BF16), "a"),
    ] {
        let error = linear(x.clone(), weight, None, adapter).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
    let adapter = |a, b, parts| {
        let (a, b) = (of(a, DType::F32), of(b, DType::F32));
        let factor = |x: &Tensor<2>| of([parts * x.dims()[0], x.dims()[1]], DType::BF16);
        let factors = [factor(&a), factor(&b)];
        Adapter { a, b, factors }
    };
    for (layer, expected) in [
        (adapter([2, 5], [2, 6], 2), "a has"),
        (adapter([2, 4], [3, 6], 2), "b has"),
        (adapter([2, 4], [2, 6], 1), "the factor of a"),
        (adapter([0, 4], [0, 6], 2), "rank"),
    ] {
        let error = adapted_linears(x.clone(), [(of([4, 6], DType::BF16), None, layer)]);
        let error = error.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

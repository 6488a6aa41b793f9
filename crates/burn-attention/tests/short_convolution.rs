//! The short convolution and its gradients equal a plain computation in f64.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_attention::{AttentionError, Sequences, short_convolution};

use crate::numbers;

const BATCH: usize = 2;
const CHANNELS: usize = 3;

/// The output, and the gradients of x and the weight.
fn expected(
    [x, weight, gradient]: [&[f64]; 3],
    cu_seqlens: &[usize],
    taps: usize,
) -> [Vec<f64>; 3] {
    let tokens = cu_seqlens[cu_seqlens.len() - 1];
    let mut results = [
        vec![0.0; x.len()],
        vec![0.0; x.len()],
        vec![0.0; weight.len()],
    ];
    for row in 0..BATCH {
        for sequence in cu_seqlens.windows(2) {
            for token in sequence[0]..sequence[1] {
                for channel in 0..CHANNELS {
                    let at = |token: usize| (row * tokens + token) * CHANNELS + channel;
                    let inside = (0..taps).filter_map(|tap| {
                        let source = (token + tap + 1).checked_sub(taps)?;
                        (source >= sequence[0]).then_some((at(source), channel * taps + tap))
                    });
                    let inside: Vec<_> = inside.collect();
                    let z: f64 = inside.iter().map(|(x_at, w)| x[*x_at] * weight[*w]).sum();
                    let s = 1.0 / (1.0 + (-z).exp());
                    results[0][at(token)] = z * s;
                    let dz = gradient[at(token)] * (s + z * s * (1.0 - s));
                    for (x_at, w) in inside {
                        results[1][x_at] += dz * weight[w];
                        results[2][w] += dz * x[x_at];
                    }
                }
            }
        }
    }
    results
}

#[test]
fn all_equals_a_plain_computation() {
    for (cu_seqlens, taps) in [
        (&[0, 9][..], 4),
        (&[0, 1], 4),
        (&[0, 2], 3),
        (&[0, 1, 2, 2, 5, 12], 4),
        (&[0, 3, 6], 1),
    ] {
        let tokens = cu_seqlens[cu_seqlens.len() - 1];
        for (dtype, within) in [(DType::F64, 1e-13), (DType::F32, 1e-5), (DType::BF16, 0.02)] {
            let x = numbers(1, BATCH * tokens * CHANNELS, dtype);
            let weight = numbers(2, CHANNELS * taps, dtype);
            let gradient = numbers(3, x.len(), dtype);
            let expected = expected([&x, &weight, &gradient], cu_seqlens, taps);

            let device = Device::flex().autodiff();
            let tokens_tensor = |values: Vec<f64>| {
                let data = TensorData::new(values, [BATCH, tokens, CHANNELS]);
                Tensor::<3>::from_data(data, (&device, dtype))
            };
            let x = tokens_tensor(x).require_grad();
            let weight = TensorData::new(weight, [CHANNELS, taps]);
            let weight = Tensor::<2>::from_data(weight, (&device, dtype)).require_grad();
            let sequences = Sequences::packed(cu_seqlens, tokens).expect("valid lengths");
            let y = short_convolution(x.clone(), weight.clone(), &sequences).expect("it fits");
            assert_eq!(y.dtype(), dtype);
            let gradients = (y.clone() * tokens_tensor(gradient)).sum().backward();
            let found = [
                y.into_data(),
                x.grad(&gradients).expect("a gradient").into_data(),
                weight.grad(&gradients).expect("a gradient").into_data(),
            ];
            for (found, expected) in found.iter().zip(&expected) {
                for (found, expected) in found.iter::<f64>().zip(expected) {
                    let apart = (found - expected).abs();
                    let allowed = within * expected.abs().max(1.0);
                    assert!(apart <= allowed, "{cu_seqlens:?} {dtype:?}: {apart:e}");
                }
            }
        }
    }
}

#[test]
fn no_token_of_another_sequence_is_read() {
    let device = Device::flex();
    let values = [f32::NAN, f32::INFINITY, 1.0, 2.0];
    let x = Tensor::<1>::from_floats(values, &device).reshape([1, 4, 1]);
    let weight = Tensor::<2>::ones([1, 4], &device);
    let sequences = Sequences::packed(&[0, 2, 4], 4).expect("valid lengths");
    let y = short_convolution(x, weight, &sequences).expect("it fits");
    let y: Vec<f32> = y.into_data().iter().collect();
    let silu = |z: f32| z / (1.0 + (-z).exp());
    assert!(
        (y[2] - silu(1.0)).abs() < 1e-6 && (y[3] - silu(3.0)).abs() < 1e-6,
        "{y:?}"
    );
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let device = Device::flex();
    let run = |x: [usize; 3], weight: [usize; 2]| {
        let (x, weight) = (Tensor::zeros(x, &device), Tensor::zeros(weight, &device));
        short_convolution(x, weight, &Sequences::whole(4)).map(|y| y.dims())
    };
    assert_eq!(run([2, 4, 3], [3, 4]), Ok([2, 4, 3]));
    assert_eq!(run([0, 4, 3], [3, 4]), Ok([0, 4, 3]));
    for (result, dimension) in [
        (run([2, 4, 3], [2, 4]), "channels"),
        (run([2, 5, 3], [3, 4]), "tokens"),
    ] {
        let error = result.expect_err("sizes differ");
        assert!(
            matches!(error, AttentionError::Size { dimension: found, .. } if found == dimension),
            "{error}"
        );
    }
    assert_eq!(run([2, 4, 3], [3, 0]), Err(AttentionError::NoChannels));
}

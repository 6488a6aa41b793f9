//! Layers of networks, their gradients, and what trains them.

use std::ptr::{null, null_mut};

use ascend_sim::abi::aclnn::*;
use ascend_sim::abi::operators::*;
use ascend_sim::control;

use crate::harness::*;
use crate::support::{Device, recent_message};

#[test]
fn softmax_and_its_gradient() {
    let device = Device::new();
    let (x, g) = (numbers(12, 6), numbers(12, 7));
    // Along the first axis of [3, 4].
    let soft = |x: &[f64]| -> Vec<f64> {
        let total = |column: usize| (0..3).map(|row| x[row * 4 + column].exp()).sum::<f64>();
        (0..12).map(|i| x[i].exp() / total(i % 4)).collect()
    };
    let log = |x: &[f64]| -> Vec<f64> { soft(x).into_iter().map(f64::ln).collect() };
    let slope = |f: &dyn Fn(&[f64]) -> Vec<f64>| -> Vec<f64> {
        (0..12)
            .map(|i| {
                let at = |d: f64| {
                    let mut x = x.clone();
                    x[i] += d;
                    f(&x).iter().zip(&g).map(|(y, g)| y * g).sum::<f64>()
                };
                (at(1e-5) - at(-1e-5)) / 2e-5
            })
            .collect()
    };
    let dims = [3, 4];
    let (input, gradient) = (device.tensor(F32, &dims, &x), device.tensor(F32, &dims, &g));
    let (out, dx) = (device.out(F32, &dims), device.out(F32, &dims));
    check! { device;
        aclnnSoftmax aclnnSoftmaxGetWorkspaceSize(input.raw, 0, out.raw) => out near soft(&x), 1e-6;
        aclnnSoftmaxBackward aclnnSoftmaxBackwardGetWorkspaceSize(gradient.raw, out.raw, 0, dx.raw) => dx near slope(&soft), 1e-6;
        aclnnLogSoftmax aclnnLogSoftmaxGetWorkspaceSize(input.raw, -2, out.raw) => out near log(&x), 1e-6;
        aclnnLogSoftmaxBackward aclnnLogSoftmaxBackwardGetWorkspaceSize(gradient.raw, out.raw, 0, out.raw) => out near slope(&log), 1e-6;
    }
    // Large numbers do not overflow.
    let (input, out) = (
        device.tensor(F32, &[2], &[1000.0, 999.0]),
        device.out(F32, &[2]),
    );
    check! { device;
        aclnnSoftmax aclnnSoftmaxGetWorkspaceSize(input.raw, 0, out.raw) => out near [sigmoid(1.0), sigmoid(-1.0)], 1e-6;
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn normalisations_and_their_gradients() {
    let device = Device::new();
    let (rows, width, eps) = (3, 4, 1e-3);
    let (x, g, w, b) = (
        numbers(12, 8),
        numbers(12, 9),
        numbers(4, 10),
        numbers(4, 11),
    );
    let layer = |x: &[f64], w: &[f64], b: &[f64]| -> Vec<f64> {
        x.chunks(width)
            .flat_map(|row| {
                let mean = row.iter().sum::<f64>() / width as f64;
                let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
                row.iter()
                    .zip(w.iter().zip(b))
                    .map(move |(x, (w, b))| (x - mean) / (variance + eps).sqrt() * w + b)
                    .collect::<Vec<_>>()
            })
            .collect()
    };
    let rms = |x: &[f64], w: &[f64]| -> Vec<f64> {
        x.chunks(width)
            .flat_map(|row| {
                let square = row.iter().map(|x| x * x).sum::<f64>() / width as f64;
                row.iter()
                    .zip(w)
                    .map(move |(x, w)| x / (square + eps).sqrt() * w)
                    .collect::<Vec<_>>()
            })
            .collect()
    };
    let dims = [rows as i64, width as i64];
    let (input, gradient) = (device.tensor(F32, &dims, &x), device.tensor(F32, &dims, &g));
    let (weight, bias) = (device.tensor(F32, &[4], &w), device.tensor(F32, &[4], &b));
    let (out, dx) = (device.out(F32, &dims), device.out(F32, &dims));
    let (mean, rstd) = (device.out(F32, &[3, 1]), device.out(F32, &[3, 1]));
    let (dw, db) = (device.out(F32, &[4]), device.out(F32, &[4]));
    check! { device;
        aclnnLayerNorm aclnnLayerNormGetWorkspaceSize(input.raw, ints(&[4]), weight.raw, bias.raw, eps, out.raw, mean.raw, rstd.raw) => out near layer(&x, &w, &b), 1e-6;
        aclnnLayerNormBackward aclnnLayerNormBackwardGetWorkspaceSize(gradient.raw, input.raw, ints(&[4]), mean.raw, rstd.raw, weight.raw, bias.raw, bools(&[true; 3]), dx.raw, dw.raw, db.raw) => dx near numeric(&|x| layer(x, &w, &b), &x, &g), 1e-5;
    }
    assert_close(
        &dw.values(),
        &numeric(&|w| layer(&x, w, &b), &w, &g),
        1e-5,
        "dw",
    );
    assert_close(
        &db.values(),
        &numeric(&|b| layer(&x, &w, b), &b, &g),
        1e-5,
        "db",
    );
    check! { device;
        aclnnLayerNormBackwardGetWorkspaceSize(gradient.raw, input.raw, ints(&[4]), mean.raw, rstd.raw, weight.raw, bias.raw, bools(&[true; 3]), dx.raw, null_mut(), db.raw) refuses NULL_POINTER, "gradWeightOut is null";
    }
    let gamma = device.out(F32, &[4]);
    check! { device;
        aclnnRmsNorm aclnnRmsNormGetWorkspaceSize(input.raw, weight.raw, eps, out.raw, rstd.raw) => out near rms(&x, &w), 1e-6;
        aclnnRmsNormGrad aclnnRmsNormGradGetWorkspaceSize(gradient.raw, input.raw, rstd.raw, weight.raw, dx.raw, gamma.raw) => dx near numeric(&|x| rms(x, &w), &x, &g), 1e-5;
    }
    assert_close(
        &gamma.values(),
        &numeric(&|w| rms(&x, w), &w, &g),
        1e-5,
        "dgamma",
    );
    let wide = device.tensor(F32, &[3], &[1.0; 3]);
    check! { device;
        aclnnRmsNormGetWorkspaceSize(input.raw, wide.raw, eps, out.raw, rstd.raw) refuses TILING, "gamma has shape [3]";
    }
    let half = device.out(Bf16, &[4]);
    check! { device;
        aclnnRmsNormGradGetWorkspaceSize(gradient.raw, input.raw, rstd.raw, weight.raw, dx.raw, half.raw) refuses PARAM_INVALID, "dgammaOut is Bf16";
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn losses_and_the_optimiser() {
    let device = Device::new();
    let x = [-0.1, -2.0, -3.0, -0.5, -1.0, -4.0];
    let (input, target) = (
        device.tensor(F32, &[3, 2], &x),
        device.tensor(I64, &[3], &[1.0, -100.0, 0.0]),
    );
    let weight = device.tensor(F32, &[2], &[0.5, 2.0]);
    let (total, dx) = (device.out(F32, &[1]), device.out(F32, &[3, 2]));
    for (reduction, dims, expected, gradient) in [
        (
            0,
            vec![3],
            vec![4.0, 0.0, 0.5],
            [0.0, -2.0, 0.0, 0.0, -0.5, 0.0],
        ),
        (1, vec![1], vec![1.8], [0.0, -0.8, 0.0, 0.0, -0.2, 0.0]),
        (2, vec![1], vec![4.5], [0.0, -2.0, 0.0, 0.0, -0.5, 0.0]),
    ] {
        let out = device.out(F32, &dims);
        check! { device;
            aclnnNLLLoss aclnnNLLLossGetWorkspaceSize(input.raw, target.raw, weight.raw, reduction, -100, out.raw, total.raw) => out near expected, 1e-6;
        }
        assert_close(&total.values(), &[2.5], 0.0, "total");
        let ones = device.tensor(F32, &dims, &vec![1.0; expected.len()]);
        check! { device;
            aclnnNLLLossBackward aclnnNLLLossBackwardGetWorkspaceSize(ones.raw, input.raw, target.raw, weight.raw, reduction, -100, total.raw, dx.raw) => dx near gradient, 1e-6;
        }
    }
    check! { device;
        aclnnNLLLossGetWorkspaceSize(input.raw, target.raw, null(), 1, -100, dx.raw, total.raw) refuses NULL_POINTER, "weight is null";
    }

    // Two steps by hand; the operator takes the number of steps done before.
    let (lr, beta1, beta2, decay, eps) = (0.1, 0.9, 0.99, 0.01, 1e-8);
    let (mut p, mut m, mut v, g) = (2.0_f64, 0.0, 0.0, 0.5);
    let tensors = [p, m, v].map(|x| device.tensor(F32, &[1], &[x]));
    let gradient = device.tensor(F32, &[1], &[g]);
    for t in 1..=2 {
        let step = device.tensor(I64, &[1], &[f64::from(t - 1)]);
        check! { device;
            aclnnApplyAdamWV2 aclnnApplyAdamWV2GetWorkspaceSize(tensors[0].raw, tensors[1].raw, tensors[2].raw, null_mut(), gradient.raw, step.raw, lr as f32, beta1 as f32, beta2 as f32, decay as f32, eps as f32, false, false);
        }
        p *= 1.0 - lr * decay;
        m = beta1 * m + (1.0 - beta1) * g;
        v = beta2 * v + (1.0 - beta2) * g * g;
        p -= lr * (m / (1.0 - beta1.powi(t))) / ((v / (1.0 - beta2.powi(t))).sqrt() + eps);
        for (tensor, expected) in tensors.iter().zip([p, m, v]) {
            assert_close(&tensor.values(), &[expected], 1e-6, "adamw");
        }
    }
    assert_eq!(control::violations(), []);
}

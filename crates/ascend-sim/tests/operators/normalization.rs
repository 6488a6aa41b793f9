//! Softmax, the normalisations and their gradients.

use std::ptr::null_mut;

use ascend_sim::abi::aclnn::*;
use ascend_sim::abi::operators::*;
use ascend_sim::control;

use crate::harness::*;
use crate::support::{Device, recent_message};

const WIDTH: usize = 4;
const EPS: f64 = 1e-3;

#[test]
fn softmax_and_its_logarithm() {
    let device = Device::new();
    let x = numbers(12, 6);
    // Along the first axis of [3, 4].
    let total = |column: usize| (0..3).map(|row| x[row * 4 + column].exp()).sum::<f64>();
    let soft: Vec<f64> = (0..12).map(|i| x[i].exp() / total(i % 4)).collect();
    let log: Vec<f64> = soft.iter().map(|y| y.ln()).collect();
    let (input, out) = (device.tensor(F32, &[3, 4], &x), device.out(F32, &[3, 4]));
    check! { device;
        aclnnSoftmax(input.raw, 0, out.raw) => out near soft, 1e-6;
        aclnnLogSoftmax(input.raw, -2, out.raw) => out near log, 1e-6;
    }
    let half = device.out(F16, &[3, 4]);
    check! { device;
        aclnnLogSoftmax(input.raw, 0, half.raw) => half near log, F16.step();
    }
    // Large numbers do not overflow.
    let (input, out) = (
        device.tensor(F32, &[2], &[1000.0, 999.0]),
        device.out(F32, &[2]),
    );
    check! { device;
        aclnnSoftmax(input.raw, 0, out.raw) => out near [sigmoid(1.0), sigmoid(-1.0)], 1e-6;
    }
    assert_eq!(control::violations(), []);
}

/// Row by row, (x - mean) / sqrt(variance + eps) · w + b.
fn layer(x: &[f64], w: &[f64], b: &[f64]) -> Vec<f64> {
    let row = |row: &[f64]| -> Vec<f64> {
        let mean = row.iter().sum::<f64>() / WIDTH as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / WIDTH as f64;
        let scale = (variance + EPS).sqrt();
        (0..WIDTH)
            .map(|i| (row[i] - mean) / scale * w[i] + b[i])
            .collect()
    };
    x.chunks(WIDTH).flat_map(row).collect()
}

/// Row by row, x / sqrt(mean(x²) + eps) · w.
fn rms(x: &[f64], w: &[f64]) -> Vec<f64> {
    let row = |row: &[f64]| -> Vec<f64> {
        let square = row.iter().map(|x| x * x).sum::<f64>() / WIDTH as f64;
        (0..WIDTH)
            .map(|i| row[i] / (square + EPS).sqrt() * w[i])
            .collect()
    };
    x.chunks(WIDTH).flat_map(row).collect()
}

#[test]
fn normalisations_and_their_gradients() {
    let device = Device::new();
    let (x, g, w, b) = (
        numbers(12, 8),
        numbers(12, 9),
        numbers(4, 10),
        numbers(4, 11),
    );
    let dims = [3, WIDTH as i64];
    let (input, gradient) = (device.tensor(F32, &dims, &x), device.tensor(F32, &dims, &g));
    let (weight, bias) = (device.tensor(F32, &[4], &w), device.tensor(F32, &[4], &b));
    let (out, dx) = (device.out(F32, &dims), device.out(F32, &dims));
    let (mean, rstd) = (device.out(F32, &[3, 1]), device.out(F32, &[3, 1]));
    let means: Vec<f64> = x
        .chunks(WIDTH)
        .map(|row| row.iter().sum::<f64>() / 4.0)
        .collect();
    check! { device;
        aclnnLayerNorm(
            input.raw, ints(&[4]), weight.raw, bias.raw, EPS, out.raw, mean.raw, rstd.raw,
        ) => out near layer(&x, &w, &b), 1e-6;
    }
    assert_close(&mean.values(), &means, 1e-6, "mean");
    let flat = device.out(F32, &[3]);
    check! { device;
        aclnnLayerNorm(
            input.raw, ints(&[4]), weight.raw, bias.raw, EPS, out.raw, mean.raw, flat.raw,
        ) refuses INNER, "rstdOutOptional has shape [3]";
    }
    let (dgamma, by_x) = (device.out(F32, &[4]), numeric(&|x| rms(x, &w), &x, &g));
    check! { device;
        aclnnRmsNorm(input.raw, weight.raw, EPS, out.raw, rstd.raw) => out near rms(&x, &w), 1e-6;
        aclnnRmsNormGrad(gradient.raw, input.raw, rstd.raw, weight.raw, dx.raw, dgamma.raw)
            => dx near by_x, 1e-5;
    }
    let by_gamma = numeric(&|w| rms(&x, w), &w, &g);
    assert_close(&dgamma.values(), &by_gamma, 1e-5, "dgamma");
    let (wide, half) = (device.tensor(F32, &[3], &[1.0; 3]), device.out(Bf16, &[4]));
    check! { device;
        aclnnRmsNorm(input.raw, wide.raw, EPS, out.raw, rstd.raw)
            refuses TILING, "gamma has shape [3]";
        aclnnRmsNormGrad(gradient.raw, input.raw, rstd.raw, weight.raw, dx.raw, half.raw)
            refuses PARAM_INVALID, "dgammaOut is Bf16";
    }
    assert_eq!(control::violations(), []);
}

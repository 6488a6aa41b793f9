//! Gradients against finite differences, and through burn's autodiff: the suite of `mrope
//! gradcheck`, as far as an unoptimised build is quick enough.

use burn::tensor::{DType, Device, Tensor, TensorData};
use rope_burn::{Implementation, Rotary, RotaryAngles, RotaryConfig};
use rope_check::cases;
use rope_check::gradcheck::{Depth, check, quick_suite};
use rope_core::{AxisLayout, Layout, Pairing, RotarySpec};

/// One test per pairing, so that they run side by side.
fn suite_of(pairing: &str) {
    let (mut full, mut rows) = (0, 0);
    for (named, depth) in quick_suite().expect("the cases are valid") {
        if named.group().0 != pairing {
            continue;
        }
        full += usize::from(depth == Depth::Full);
        for row in check(&named, depth) {
            rows += 1;
            assert!(row.pass, "{row:?}");
        }
    }
    assert!(full >= 10, "only {full} cases of {pairing} in full");
    assert!(rows >= 20 * full, "only {rows} checks of {full} cases");
}

#[test]
fn half() {
    suite_of("half");
}

#[test]
fn adjacent() {
    suite_of("adjacent");
}

#[test]
fn quarter() {
    suite_of("quarter");
}

#[test]
fn interleave_half() {
    suite_of("interleave_half");
}

fn f64_tensor<const D: usize>(values: &[f64], shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(
        TensorData::new(values.to_vec(), shape),
        (device, DType::F64),
    )
}

/// Frequencies that are learned: angles from a parameter, shared by two layers, which both send
/// gradients back.
struct Learned {
    rotary: Rotary,
    device: Device,
    tokens: usize,
}

impl Learned {
    fn new(implementation: Implementation) -> Self {
        let spec = RotarySpec::builder(12)
            .pairing(Pairing::Adjacent)
            .axes(AxisLayout::PerChannel(vec![2, 4]))
            .build()
            .expect("a valid specification");
        let config = RotaryConfig::new(spec).with_layout(Layout::Bnsd);
        Self {
            rotary: config.with_implementation(implementation).init(),
            device: Device::flex().autodiff(),
            tokens: 5,
        }
    }

    fn loss(&self, inv_freq: Tensor<2>) -> Tensor<1> {
        let (tokens, shape) = (self.tokens, [2, 3, self.tokens, 12]);
        let positions: Vec<f64> = (0..tokens).map(|t| t as f64).collect();
        let angle = f64_tensor(&positions, [tokens, 1], &self.device) * inv_freq;
        let angles = RotaryAngles::from_cos_sin(angle.clone().cos(), angle.sin());
        let angles = angles.expect("one shape and type");
        let mut x: Tensor<4> =
            f64_tensor(&cases::values(1, 2 * 3 * tokens * 12), shape, &self.device);
        let weights: Tensor<4> =
            f64_tensor(&cases::values(2, 2 * 3 * tokens * 12), shape, &self.device);
        for _ in 0..2 {
            x = self.rotary.forward_single(x, &angles) * weights.clone();
        }
        (x.clone() * x).sum()
    }

    fn gradient(&self, inv_freq: &[f64]) -> Vec<f64> {
        let inv_freq: Tensor<2> =
            f64_tensor(inv_freq, [1, inv_freq.len()], &self.device).require_grad();
        let gradients = self.loss(inv_freq.clone()).backward();
        let gradient = inv_freq.grad(&gradients).expect("frequencies are tracked");
        gradient.into_data().try_to_vec().expect("f64 values")
    }

    fn value(&self, inv_freq: &[f64]) -> f64 {
        let inv_freq = f64_tensor(inv_freq, [1, inv_freq.len()], &self.device);
        let loss = self.loss(inv_freq).into_data();
        loss.try_to_vec::<f64>().expect("f64 values")[0]
    }
}

#[test]
fn learned_frequencies_receive_the_gradients_of_all_layers() {
    let (fused, composed) = (
        Learned::new(Implementation::Fused),
        Learned::new(Implementation::Composed),
    );
    let inv_freq: Vec<f64> = (0..12).map(|j| 0.8f64.powi(j)).collect();
    let (found, other) = (fused.gradient(&inv_freq), composed.gradient(&inv_freq));
    assert!(
        found.iter().any(|g| g.abs() > 0.1),
        "{found:?} says nothing"
    );
    for lane in 0..inv_freq.len() {
        let central = |h: f64| {
            let at = |h: f64| {
                let mut inv_freq = inv_freq.clone();
                inv_freq[lane] += h;
                fused.value(&inv_freq)
            };
            (at(h) - at(-h)) / (2.0 * h)
        };
        let h = 1.0 / 512.0;
        let expected = (4.0 * central(h / 2.0) - central(h)) / 3.0;
        // The fourth power of the step, times angles of up to 4 rad a unit.
        let tolerance = (4.0 * h).powi(4) * 10.0;
        assert!(
            (found[lane] - expected).abs() < tolerance,
            "lane {lane}: {} instead of {expected}",
            found[lane]
        );
        assert!(
            (found[lane] - other[lane]).abs() < 1e-12,
            "lane {lane}: fused {} composed {}",
            found[lane],
            other[lane]
        );
    }
}

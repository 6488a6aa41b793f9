//! Gradients against finite differences, and through burn's autodiff: the part of
//! `mrope gradcheck` that is fast enough in an unoptimised build.

use burn::tensor::{DType, Device, Tensor, TensorData};
use half::bf16;
use rope_burn::{Implementation, Rotary, RotaryAngles, RotaryConfig};
use rope_check::cases;
use rope_check::gradcheck::{Depth, check, quick_suite};
use rope_core::{AxisLayout, Layout, Pairing, RotarySpec};
use safetensors::SafeTensors;

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
            .axis_layout(AxisLayout::PerChannel(vec![2, 4]))
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

/// A tensor of a golden file: its shape and its values, which are f64 or bf16.
fn golden(file: &SafeTensors, name: &str) -> (Vec<usize>, Vec<f64>) {
    let view = file.tensor(name).expect("the tensor is there");
    let (wide, narrow) = (
        view.data().as_chunks::<8>().0,
        view.data().as_chunks::<2>().0,
    );
    let values = match view.dtype() {
        safetensors::Dtype::F64 => wide.iter().map(|b| f64::from_le_bytes(*b)).collect(),
        _ => narrow
            .iter()
            .map(|b| bf16::from_le_bytes(*b).to_f64())
            .collect(),
    };
    (view.shape().to_vec(), values)
}

#[test]
fn frequencies_of_heads_receive_the_gradients_of_the_models_they_come_from() {
    for (name, layout) in [
        ("mochi_learned", Layout::Bsnd),
        ("rope_mixed", Layout::Bnsd),
    ] {
        let folder = rope_check::fixtures().expect("the test runs in the workspace");
        let bytes = std::fs::read(folder.join(format!("{name}.safetensors"))).expect("it is there");
        let file = SafeTensors::deserialize(&bytes).expect("it parses");
        let device = Device::flex().autodiff();
        let four = |name: &str| -> Tensor<4> {
            let (shape, values) = golden(&file, name);
            let shape = <[usize; 4]>::try_from(shape).expect("four dimensions");
            f64_tensor(&values, shape, &device)
        };
        let (axes, positions) = golden(&file, "position_ids");
        let positions = f64_tensor(&positions, [axes[0], axes[1]], &device);
        let (sizes, frequencies) = golden(&file, "head_frequencies.f64");
        let frequencies = f64_tensor(&frequencies, [sizes[0], sizes[1], sizes[2]], &device);
        let frequencies = frequencies.require_grad();
        let (_, expected) = golden(&file, "dhead_frequencies.f64");
        let spec = RotarySpec::builder(64).pairing(Pairing::Adjacent).build();
        let rotary = RotaryConfig::new(spec.expect("valid")).with_layout(layout);
        for implementation in [Implementation::Fused, Implementation::Composed] {
            let rotary = rotary.clone().with_implementation(implementation).init();
            let angles = RotaryAngles::from_frequencies(positions.clone(), frequencies.clone());
            let angles = angles.expect("valid");
            let (q, k) = rotary.forward(four("q.bf16"), four("k.bf16"), &angles);
            let loss = (q * four("gq.bf16")).sum() + (k * four("gk.bf16")).sum();
            let gradients = loss.backward();
            let found = frequencies.grad(&gradients).expect("it is tracked");
            let found: Vec<f64> = found.into_data().iter::<f64>().collect();
            assert_eq!(found.len(), expected.len());
            let largest = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
            assert!(largest > 1.0, "{name}: the gradients say nothing");
            // Angles of some 1000 rad in f64, sums over 6 tokens.
            for (found, expected) in found.iter().zip(&expected) {
                let error = (found - expected).abs() / largest;
                assert!(
                    error < 1e-11,
                    "{name} {implementation:?}: {found} instead of {expected}"
                );
            }
        }
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

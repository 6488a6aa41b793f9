//! The ways to normalise and rotate in burn.

use std::error::Error;

use crate::names;
use crate::norm::{EPS, weight};
use burn::module::Param;
use burn::nn::RmsNorm;
use burn::tensor::{Device, Tensor};
use rope_burn::{Implementation, Rotary, RotaryAngles};
use rope_check::buffer::DType;
use rope_core::{HeadNorm, Layout, Positions, RotarySpec};

use super::float;

/// A way to normalise q and k head by head, and to rotate them.
pub(super) struct NormScheme {
    /// burn's own norm; none where one operation does both.
    norms: Option<[RmsNorm; 2]>,
    norm: HeadNorm,
    /// Parameters, of q and of k.
    weights: [Tensor<1>; 2],
    rotary: Rotary,
    angles: RotaryAngles,
}

impl NormScheme {
    /// The schemes that are compared, by name.
    ///
    /// # Errors
    /// If the positions do not fit the specification.
    pub(super) fn all(
        spec: &RotarySpec,
        layout: Layout,
        positions: &Positions,
        dtype: DType,
        device: &Device,
    ) -> Result<[(&'static str, Self); 3], Box<dyn Error>> {
        let rotary = Rotary::new(spec.clone(), layout);
        let angles = rotary.try_angles(positions, device)?;
        let values: Vec<f32> = (0..spec.head_dim()).map(weight).collect();
        let parameter = || {
            let weight = Tensor::<1>::from_floats(&values[..], device).cast(float(dtype));
            Param::from_tensor(weight.detach()).val()
        };
        let norm = HeadNorm::new(EPS)?;
        let scheme = |is_one: bool, rotation| {
            let weights = [parameter(), parameter()];
            let rms_norm = |weight: Tensor<1>| RmsNorm {
                gamma: Param::from_tensor(weight),
                epsilon: EPS,
            };
            Self {
                norms: (!is_one).then(|| weights.clone().map(rms_norm)),
                norm,
                weights,
                rotary: rotary.clone().with_implementation(rotation),
                angles: angles.clone(),
            }
        };
        Ok([
            (names::FUSED, scheme(true, Implementation::Fused)),
            (names::FUSED_ROTATION, scheme(false, Implementation::Fused)),
            (names::COMPOSED, scheme(false, Implementation::Composed)),
        ])
    }

    /// Normalises and rotates q and k.
    pub(super) fn pair(&self, q: Tensor<4>, k: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
        let Some([q_norm, k_norm]) = &self.norms else {
            let done =
                self.rotary
                    .try_forward_norm(q, k, self.weights.clone(), self.norm, &self.angles);
            return done.unwrap_or_else(|error| panic!("{error}"));
        };
        let (q, k) = (q_norm.forward(q), k_norm.forward(k));
        self.rotary.forward(q, k, &self.angles)
    }
}

#[cfg(test)]
mod tests {
    use crate::rotation::positions;
    use crate::shapes::QWEN3_VL_8B;
    use burn::tensor::{Distribution, Tolerance};
    use rope_core::{AxisLayout, Pairing};

    use super::*;

    #[test]
    fn every_scheme_computes_the_same() {
        let device = Device::flex().autodiff();
        let shape = QWEN3_VL_8B.at(5);
        let spec = shape.spec(Pairing::Half, AxisLayout::Single).unwrap();
        let positions = positions(1, 5).unwrap();
        let schemes =
            NormScheme::all(&spec, Layout::Bsnd, &positions, DType::F32, &device).unwrap();
        let random = |heads| {
            let shape = [1, 5, heads, shape.head_dim];
            Tensor::<4>::random(shape, Distribution::Default, &device).require_grad()
        };
        let (q, k) = (random(32), random(8));
        let mut expected: Option<Vec<_>> = None;
        for (name, scheme) in schemes {
            let (q_out, k_out) = scheme.pair(q.clone(), k.clone());
            let loss = q_out.clone().powi_scalar(3).sum() + k_out.clone().powi_scalar(3).sum();
            let gradients = loss.backward();
            let mut found = vec![q_out.into_data(), k_out.into_data()];
            for x in [&q, &k] {
                found.push(x.grad(&gradients).unwrap().into_data());
            }
            let expected = expected.get_or_insert_with(|| found.clone());
            for (found, expected) in found.iter().zip(expected) {
                expected.assert_approx_eq::<f32>(found, Tolerance::absolute(2e-5));
            }
            assert_eq!(scheme.norms.is_none(), name == names::FUSED);
        }
    }
}

//! Gradients of learned frequencies, and of the positions beside them, against differences of the
//! loss: the whole way from them by cos and sin to the rotated q and k.

use burn::tensor::{Device, Tensor};
use rope_burn::{Implementation, RotaryAngles};

use super::{Part, Worst, f64_tensor, no_q, parts, with_autodiff};
use crate::buffer::{Buffer, DType};
use crate::engine::{self, Case, EngineError};

/// Unlike [`super::STEP`]: cos and sin have derivatives of every order.
const STEP: f64 = 1.0 / 512.0;

/// Positions and frequencies, and their sizes.
struct Inputs {
    values: [Vec<f64>; 2],
    shapes: [Vec<usize>; 2],
}

impl Inputs {
    /// The case's, or with one head of frequencies for all of its heads.
    fn new(case: &Case, frequencies: &[f64], shared: bool) -> Self {
        let (axes, tokens) = (case.positions.axis_count(), case.positions.tokens());
        let lanes = frequencies.len() / axes / case.heads;
        let heads = if shared { 1 } else { case.heads };
        let at = |i: usize| case.positions.value(i / tokens, i % tokens);
        let axis_rows = frequencies.chunks(case.heads * lanes);
        let frequencies = axis_rows.flat_map(|axis| &axis[..heads * lanes]);
        Self {
            values: [
                (0..axes * tokens).map(at).collect(),
                frequencies.copied().collect(),
            ],
            shapes: [vec![axes, tokens], vec![axes, heads, lanes]],
        }
    }

    fn tensors(&self, device: &Device) -> (Tensor<2>, Tensor<3>) {
        let ([positions, frequencies], [position_dims, frequency_dims]) =
            (&self.values, &self.shapes);
        (
            f64_tensor(positions, position_dims.clone(), device),
            f64_tensor(frequencies, frequency_dims.clone(), device),
        )
    }
}

/// True if a device has cos and sin in f64. Shader languages have them in at most 32 bits, and
/// drivers answer anything for f64.
fn has_cos_sin(device: &Device) -> Result<bool, EngineError> {
    let x = || f64_tensor::<1>(&[1.0], vec![1], device);
    let (cos, sin) = (engine::read(x().cos())?, engine::read(x().sin())?);
    let error = |found: &Buffer, exact: f64| (found.to_f64()[0] - exact).abs();
    Ok(error(&cos, 1f64.cos()) < 1e-12 && error(&sin, 1f64.sin()) < 1e-12)
}

/// burn's gradients of positions and of frequencies, which have a head each or one for all.
pub(super) fn gradients<const D: usize>(
    device: &Device,
    case: &Case,
    frequencies: &[f64],
    implementation: Implementation,
    shared: bool,
) -> Result<Worst, EngineError> {
    if !has_cos_sin(device)? {
        return Err(EngineError::Unsupported {
            engine: engine::engine_name(implementation),
            dtype: DType::F64,
        });
    }
    let (device, parts) = (with_autodiff(device, false), parts(case));
    let rotary = engine::rotary(case, implementation)?;
    let loss = |positions: Tensor<2>, frequencies: Tensor<3>| {
        let angles = RotaryAngles::from_frequencies(positions, frequencies);
        let angles = angles.map_err(engine::burn_error)?;
        let of = |part: &Part| -> Result<Tensor<1>, EngineError> {
            let [x, w, v] = [&part.x, &part.loss.w, &part.loss.v]
                .map(|x| engine::place::<D>(case, &Buffer::F64(x.clone()), part.heads, &device));
            let y = rotary.try_forward_single(x, &angles);
            let y = y.map_err(engine::burn_error)?;
            Ok(engine::sum((w * 0.5 * y.clone() + v) * y))
        };
        let losses = parts.iter().map(of).collect::<Result<Vec<_>, _>>()?;
        losses.into_iter().reduce(|a, b| a + b).ok_or_else(no_q)
    };
    let mut inputs = Inputs::new(case, frequencies, shared);
    let (positions, frequencies) = inputs.tensors(&device);
    let (positions, frequencies) = (positions.require_grad(), frequencies.require_grad());
    let all = loss(positions.clone(), frequencies.clone())?.backward();
    let missing = || EngineError::Burn("positions or frequencies got no gradient".into());
    let found = [
        engine::read(positions.grad(&all).ok_or_else(missing)?)?.to_f64(),
        engine::read(frequencies.grad(&all).ok_or_else(missing)?)?.to_f64(),
    ];
    let mut worst = Worst::NONE;
    let terms = parts.iter().map(|part| part.x.len()).sum::<usize>() as f64;
    // Rounding, weighted by Richardson; and the fifth derivative, of positions and frequencies
    // below 1, times the fourth power of the step.
    let tolerance = terms * (f64::EPSILON * 16.0 / STEP + 32.0 * STEP.powi(4));
    for (which, found) in found.iter().enumerate() {
        for (i, found) in found.iter().enumerate() {
            let given = inputs.values[which][i];
            let mut central = |h: f64| -> Result<f64, EngineError> {
                let mut at = |value: f64| -> Result<f64, EngineError> {
                    inputs.values[which][i] = value;
                    let (positions, frequencies) = inputs.tensors(&device);
                    Ok(engine::read(loss(positions, frequencies)?)?.to_f64()[0])
                };
                Ok((at(given + h)? - at(given - h)?) / (2.0 * h))
            };
            let (wide, narrow) = (central(STEP)?, central(STEP / 2.0)?);
            inputs.values[which][i] = given;
            worst.see(*found, (4.0 * narrow - wide) / 3.0, tolerance);
        }
    }
    Ok(worst)
}

//! Gradients of the norm with the rotation: of x and of the weight, against differences of the
//! loss.

use burn::tensor::{Device, Tensor};
use rope_burn::Implementation;
use rope_core::{HeadNorm, HeadsMut, HeadsRef, NormGradient, NormInput, NormOrder, Rotator};

use super::{Part, Worst, f64_tensor, no_q, parts, with_autodiff};
use crate::buffer::Buffer;
use crate::cases;
use crate::engine::{self, Case, EngineError, Placed};

/// The largest of [`STEPS`] steps, each half of the one before. The root of the mean of the squares
/// has derivatives of every order.
const STEP: f64 = 1.0 / 32.0;
const STEPS: usize = 4;
/// Large, so that even a short head is far from where the root has none.
const EPS: f64 = 0.1;

/// q and k, and then the weight of each.
type Values = [Vec<Vec<f64>>; 2];

/// The order in which a case is checked by burn; rope-core is checked in both.
pub(super) fn order_of_burn(name: &str) -> NormOrder {
    [NormOrder::BeforeRotation, NormOrder::AfterRotation][name.len() / 2 % 2]
}

/// The norm that a case is checked with: 1 + weight in every second case.
pub(super) fn case_norm(name: &str, order: NormOrder) -> Result<HeadNorm, EngineError> {
    let unit_offset = (name.len() + order as usize) % 2 == 1;
    Ok(HeadNorm::new(EPS)?
        .with_order(order)
        .with_unit_offset(unit_offset))
}

/// rope-core's.
pub(super) fn cpu(case: &Case, norm: HeadNorm) -> Result<Worst, EngineError> {
    let angles = case.angles::<f64>()?;
    let rotator = Rotator::new(case.spec.geometry(), angles.angles())?;
    let parts = parts(case);
    let forward = |[x, weights]: &Values| {
        let mut y = x.clone();
        for ((part, y), weight) in parts.iter().zip(&mut y).zip(weights) {
            let x = HeadsMut::new(y, case.contiguous(part.heads))?.into();
            let weight = Some(&weight[..]);
            rotator.norm_rotate(&norm, NormInput { x, weight }, None)?;
        }
        Ok(y)
    };
    let gradients = |[x, weights]: &Values, y: &[Vec<f64>]| -> Result<Values, EngineError> {
        let (mut x_gradients, mut weight_gradients) = (Vec::new(), Vec::new());
        for (((part, x), weight), y) in parts.iter().zip(x).zip(weights).zip(y) {
            let x = Placed::new(case, part.heads, x);
            let mut dy = Placed::new(case, part.heads, &part.loss.gradient(y));
            // Overwritten, whatever it holds.
            let mut channel_gradients = vec![f64::NAN; weight.len()];
            let gradient = NormGradient {
                x: HeadsRef::new(&x.source, x.layout)?,
                weight: Some(weight),
                gradient: dy.operand()?,
                weight_gradient: Some(&mut channel_gradients),
            };
            rotator.norm_rotate_backward(&norm, gradient, None)?;
            x_gradients.push(dy.result());
            weight_gradients.push(channel_gradients);
        }
        Ok([x_gradients, weight_gradients])
    };
    check(case, &parts, forward, gradients)
}

/// burn's, by autodiff.
pub(super) fn burn<const D: usize>(
    device: &Device,
    case: &Case,
    norm: HeadNorm,
    implementation: Implementation,
) -> Result<Worst, EngineError> {
    let (device, parts) = (with_autodiff(device, false), parts(case));
    let rotary = engine::rotary(case, implementation)?;
    let angles = engine::angle_tensors::<f64>(case, &device)?;
    let place =
        |x: &[f64], heads| engine::place::<D>(case, &Buffer::F64(x.to_vec()), heads, &device);
    let tensors = |[x, weights]: &Values| {
        let x = parts.iter().zip(x).map(|(part, x)| place(x, part.heads));
        let weights = weights.iter();
        let weights = weights.map(|w| f64_tensor::<1>(w, vec![w.len()], &device).require_grad());
        let x: Vec<Tensor<D>> = x.map(Tensor::require_grad).collect();
        (x, weights.collect::<Vec<_>>())
    };
    let apply = |x: &[Tensor<D>], weights: &[Tensor<1>]| -> Result<_, EngineError> {
        let (q, q_weight) = (&x[0], &weights[0]);
        // Where there is no k, another q.
        let (k, k_weight) = (x.get(1).unwrap_or(q), weights.get(1).unwrap_or(q_weight));
        let weights = [q_weight.clone(), k_weight.clone()];
        let y = rotary.try_forward_norm(q.clone(), k.clone(), weights, norm, &angles);
        let (q, k) = y.map_err(engine::burn_error)?;
        Ok([q, k])
    };
    let forward = |values: &Values| {
        let (x, weights) = tensors(values);
        let y = apply(&x, &weights)?.into_iter().take(parts.len());
        y.map(|y| Ok(engine::read(y)?.to_f64())).collect()
    };
    let gradients = |values: &Values, _: &[Vec<f64>]| -> Result<Values, EngineError> {
        let (x, weights) = tensors(values);
        let y = parts.iter().zip(apply(&x, &weights)?);
        let losses = y.map(|(part, y)| {
            let [w, v] = [&part.loss.w, &part.loss.v].map(|x| place(x, part.heads));
            engine::sum((w * 0.5 * y.clone() + v) * y)
        });
        let all = losses.reduce(|a, b| a + b).ok_or_else(no_q)?.backward();
        let missing = || EngineError::Burn("x or a weight got no gradient".into());
        let x_gradients = x.iter().map(|x| {
            let gradient = x.grad(&all).ok_or_else(missing)?;
            Ok(engine::read(gradient)?.to_f64())
        });
        let weight_gradients = weights.iter().map(|weight| {
            let gradient = weight.grad(&all).ok_or_else(missing)?;
            Ok(engine::read(gradient)?.to_f64())
        });
        let x_gradients: Result<_, EngineError> = x_gradients.collect();
        let weight_gradients: Result<_, EngineError> = weight_gradients.collect();
        Ok([x_gradients?, weight_gradients?])
    };
    check(case, &parts, forward, gradients)
}

/// The derivatives at 0 of the values of `f`: central differences, and Richardson's extrapolation.
fn derivatives(
    mut f: impl FnMut(f64) -> Result<Vec<f64>, EngineError>,
) -> Result<Vec<f64>, EngineError> {
    let mut rows: Vec<Vec<f64>> = Vec::with_capacity(STEPS);
    for step in 0..STEPS {
        let h = STEP / f64::from(1 << step);
        let (up, down) = (f(h)?, f(-h)?);
        let central = |(up, down): (&f64, f64)| (up - down) / (2.0 * h);
        rows.push(up.iter().zip(down).map(central).collect());
        // Errors in h^2, h^4, ... vanish one after another.
        for (order, i) in (1..).zip((0..step).rev()) {
            let factor = 4f64.powi(order);
            let finer = rows[i + 1].clone();
            for (value, finer) in rows[i].iter_mut().zip(finer) {
                *value = finer + (finer - *value) / (factor - 1.0);
            }
        }
    }
    Ok(rows.swap_remove(0))
}

/// The largest error of a derivative by rounding, of `terms` terms of order 4.
fn tolerance(terms: usize) -> f64 {
    let smallest = STEP / f64::from(1 << (STEPS - 1));
    f64::EPSILON * 4.0 * terms as f64 * 4.0 / smallest
}

fn check(
    case: &Case,
    parts: &[Part],
    forward: impl Fn(&Values) -> Result<Vec<Vec<f64>>, EngineError>,
    gradients: impl FnOnce(&Values, &[Vec<f64>]) -> Result<Values, EngineError>,
) -> Result<Worst, EngineError> {
    let head_dim = case.spec.head_dim();
    let weights = (0..parts.len()).map(|i| cases::values(20 + i as u64, head_dim));
    let given = [
        parts.iter().map(|part| part.x.clone()).collect(),
        weights.collect(),
    ];
    let [x_gradients, weight_gradients] = gradients(&given, &forward(&given)?)?;
    let row_losses = |values: &Values| -> Result<Vec<Vec<f64>>, EngineError> {
        let y = forward(values)?;
        let part_loss = |(part, y): (&Part, &Vec<f64>)| {
            let rows = part.rows.iter();
            rows.map(|(_, start)| part.loss.over(y, *start..start + head_dim))
                .collect()
        };
        Ok(parts.iter().zip(&y).map(part_loss).collect())
    };
    let mut worst = Worst::NONE;
    let mut displaced = given.clone();
    for channel in 0..head_dim {
        // A displacement for all rows: the loss of a row answers to its own.
        let found = derivatives(|h| {
            for (i, part) in parts.iter().enumerate() {
                for (row, (_, start)) in part.rows.iter().enumerate() {
                    let at = start + channel;
                    displaced[0][i][at] = part.x[at] + h * super::row_factor(row);
                }
            }
            Ok(row_losses(&displaced)?.concat())
        })?;
        displaced[0].clone_from(&given[0]);
        let mut found = found.into_iter();
        for (part, x_gradients) in parts.iter().zip(&x_gradients) {
            for (row, (_, start)) in part.rows.iter().enumerate() {
                let expected = found.next().unwrap_or(f64::NAN) / super::row_factor(row);
                let found = x_gradients
                    .get(start + channel)
                    .copied()
                    .unwrap_or(f64::NAN);
                worst.see(found, expected, tolerance(head_dim));
            }
        }
        // The loss has no third derivative by a weight.
        let mut losses = |h: f64| -> Result<Vec<f64>, EngineError> {
            for (weight, given) in displaced[1].iter_mut().zip(&given[1]) {
                weight[channel] = given[channel] + h;
            }
            let losses = row_losses(&displaced)?;
            Ok(losses.iter().map(|rows| rows.iter().sum()).collect())
        };
        let (up, down) = (losses(STEP)?, losses(-STEP)?);
        let expected = up
            .iter()
            .zip(down)
            .map(|(up, down)| (up - down) / (2.0 * STEP));
        displaced[1].clone_from(&given[1]);
        for ((part, channel_gradients), expected) in
            parts.iter().zip(&weight_gradients).zip(expected)
        {
            worst.see(
                channel_gradients[channel],
                expected,
                tolerance(part.x.len()),
            );
        }
    }
    Ok(worst)
}

//! The AdamW update by the vendor's operator, and by ordinary operations beyond its limits.

use burn::backend::tensor::FloatTensor;
use burn::backend::{DType, TensorMetadata};
use burn_attention::composed::adamw as composed;
use burn_attention::{AdamWOp, AdamWOps};
use burn_fused::like;
use rope_ascend::aclnn::View;

use super::{Outcome, Outputs, Refusal};
use crate::Ascend;
use crate::ops::launch;
use crate::ops::movement::copy;
use crate::tensor::AscendTensor;

impl AdamWOps for Ascend {
    fn adamw(
        value: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        op: AdamWOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = Outputs::new(&value, [like(&value), like(&first), like(&second)]);
        let outcome = update([value, first, second], &gradient, op);
        let updated = outputs.or_composed(outcome, |[value, first, second]| {
            composed::update::<Self>(value, gradient, first, second, op).into()
        });
        updated.into()
    }
}

/// Updates the value and both moments in place, or copies of those that something else holds.
#[expect(
    clippy::result_large_err,
    reason = "a refusal gives the inputs back to be composed"
)]
fn update(
    state: [AscendTensor; 3],
    gradient: &AscendTensor,
    op: AdamWOp,
) -> Outcome<[AscendTensor; 3], 3> {
    if !is_within(&state[0], op) {
        return Err((Refusal::Limit, state));
    }
    let state = state.map(|x| if launch::is_free(&x) { x } else { copy(&x) });
    match run(&state, gradient, op) {
        Ok(()) => Ok(state),
        Err(refusal) => Err((refusal, state)),
    }
}

/// The operator's limits. It takes its numbers in f32 and subtracts them from 1, although a beta
/// may round to 1 in f32.
fn is_within(value: &AscendTensor, op: AdamWOp) -> bool {
    let is_below_one = |beta: f64| (beta as f32) < 1.0;
    value.dtype() == DType::F32
        && (1..=8).contains(&value.dims().len())
        && op.betas.into_iter().all(is_below_one)
}

fn run(state: &[AscendTensor; 3], gradient: &AscendTensor, op: AdamWOp) -> Result<(), Refusal> {
    let [value, first, second] = state;
    let context = value.context()?;
    let [value, first, second, gradient] = launch::views([value, first, second, gradient])?;
    if value.dims.contains(&0) {
        return Ok(());
    }
    // It adds 1: the count is that of the updates before this one.
    let before = context.number((op.steps - 1) as f32)?;
    let before = View {
        buffer: &before,
        dtype: value.dtype,
        dims: &[1],
        strides: &[1],
        offset: 0,
    };
    let [beta_1, beta_2] = op.betas.map(|beta| beta as f32);
    let (rate, decay, epsilon) = (op.rate as f32, op.decay as f32, op.epsilon as f32);
    let operators = context.operators();
    let done = operators.adam_w(
        value, first, second, None, gradient, before, rate, beta_1, beta_2, decay, epsilon, false,
        false,
    );
    done.map_err(Refusal::operator)
}

#[cfg(all(test, feature = "ascend-sim"))]
mod tests {
    use ascend_sim::control;
    use burn::backend::ops::FloatTensorOps;
    use burn::backend::{FloatDType, Shape};

    use super::*;
    use crate::faults::{Alone, message, values};

    const OPERATOR: &str = "aclnnApplyAdamWV2";
    const COUNT: usize = 40;
    const OP: AdamWOp = AdamWOp {
        rate: 1e-2,
        decay: 0.1,
        betas: [0.9, 0.999],
        epsilon: 1e-8,
        steps: 1,
    };

    fn numbers(seed: usize) -> Vec<f32> {
        let value = |index: usize| ((index * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0;
        (0..COUNT).map(value).collect()
    }

    fn runs() -> u64 {
        control::operator_runs().get(OPERATOR).copied().unwrap_or(0)
    }

    /// Value and both moments before the first update, with the gradient of one.
    fn first(alone: &Alone) -> [AscendTensor; 4] {
        let zeros = || alone.vector(&[0.0; COUNT]);
        [
            alone.vector(&numbers(1)),
            alone.vector(&numbers(2)),
            zeros(),
            zeros(),
        ]
    }

    fn update(
        [value, gradient, first, second]: [AscendTensor; 4],
        op: AdamWOp,
    ) -> [AscendTensor; 3] {
        Ascend::adamw(value, gradient, first, second, op).into()
    }

    /// Values after an update of each gradient in f64.
    fn plain(gradients: &[Vec<f32>], op: AdamWOp) -> Vec<f64> {
        let value = |index: usize| {
            let (mut value, mut first, mut second) = (f64::from(numbers(1)[index]), 0.0, 0.0);
            for (step, gradient) in gradients.iter().enumerate() {
                let (gradient, [beta_1, beta_2]) = (f64::from(gradient[index]), op.betas);
                first = beta_1 * first + (1.0 - beta_1) * gradient;
                second = beta_2 * second + (1.0 - beta_2) * gradient * gradient;
                let steps = step as i32 + 1;
                let (mean, square): (f64, f64) = (
                    first / (1.0 - beta_1.powi(steps)),
                    second / (1.0 - beta_2.powi(steps)),
                );
                value -= op.rate * (op.decay * value + mean / (square.sqrt() + op.epsilon));
            }
            value
        };
        (0..COUNT).map(value).collect()
    }

    /// The largest difference from the plain computation.
    fn apart(found: AscendTensor, expected: &[f64]) -> f64 {
        let found = values(found).expect("it was computed").into_iter();
        let apart = found.zip(expected).map(|(x, y)| (f64::from(x) - y).abs());
        apart.fold(0.0, f64::max)
    }

    #[test]
    fn the_operator_updates_where_the_tensors_lie() {
        let alone = Alone::new();
        control::clear_operator_runs();
        let [mut value, _, mut first, mut second] = first(&alone);
        let address = |x: &AscendTensor| x.address().expect("memory");
        let before = [&value, &first, &second].map(address);
        let gradients: Vec<_> = (2..22).map(numbers).collect();
        for (step, gradient) in gradients.iter().enumerate() {
            let op = AdamWOp {
                steps: step as u64 + 1,
                ..OP
            };
            let state = [value, alone.vector(gradient), first, second];
            [value, first, second] = update(state, op);
            let expected = plain(&gradients[..=step], OP);
            let apart = apart(value.clone(), &expected);
            println!("step {}: {apart:e} of a step of {:e}", step + 1, OP.rate);
            // Numbers in f32 of which 1 is subtracted, and the roundings of values up to 1.
            assert!(apart < 3e-5 * OP.rate * (step + 1) as f64 + 1e-7);
        }
        assert_eq!([&value, &first, &second].map(address), before);
        assert_eq!(runs(), 20);
    }

    #[test]
    fn tensors_that_something_holds_stay_as_they_were() {
        let alone = Alone::new();
        let state = first(&alone);
        let held = state.clone();
        let before = held.clone().map(|x| values(x).expect("memory"));
        let [value, ..] = update(state, OP);
        assert!(apart(value, &plain(&[numbers(2)], OP)) < 4e-7);
        assert_eq!(held.map(|x| values(x).expect("memory")), before);
    }

    #[test]
    fn what_the_operator_does_not_take_is_composed() {
        let alone = Alone::new();
        let expected = plain(&[numbers(2)], OP);
        control::clear_operator_runs();
        control::inject_fault("aclnnApplyAdamWV2GetWorkspaceSize", 1, 161_002);
        let [value, ..] = update(first(&alone), OP);
        assert!(apart(value, &expected) < 2e-7, "refused");
        // In f32 the beta is 1.
        let op = AdamWOp {
            betas: [0.9, 1.0 - 1e-9],
            ..OP
        };
        let [value, ..] = update(first(&alone), op);
        assert!(apart(value, &expected) < 2e-7, "a beta of nearly 1");
        let state = first(&alone).map(|x| Ascend::float_cast(x, FloatDType::F64));
        let [value, ..] = update(state, OP);
        let value = Ascend::float_cast(value, FloatDType::F32);
        assert!(apart(value, &expected) < 2e-7, "f64");
        assert_eq!(runs(), 0);
        // No elements: nothing to do.
        let empty = || Ascend::float_zeros(Shape::from([0]), &alone.0, FloatDType::F32);
        let [value, ..] = update([empty(), empty(), empty(), empty()], OP);
        assert!(values(value).expect("no elements").is_empty());
        assert_eq!(runs(), 0);
    }

    #[test]
    fn a_failed_gradient_fails_the_parameter() {
        let alone = Alone::new();
        let mut state = first(&alone);
        control::inject_fault("aclnnExpGetWorkspaceSize", 1, 561_003);
        state[1] = Ascend::float_exp(state[1].clone());
        for x in update(state, OP) {
            assert!(message(x).contains("aclnnExp"));
        }
    }
}

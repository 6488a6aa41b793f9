//! The AdamW update and the sums of squares by rope-ascend's kernels, and by ordinary operations
//! beyond their limits.

use burn::backend::tensor::FloatTensor;
use burn::backend::{DType, FloatDType, TensorMetadata};
use burn_attention::composed::adamw as composed;
use burn_attention::{AdamWOp, AdamWOps, AdamWRounded, SQUARES};
use burn_fused::primitive::cast;
use burn_fused::{accumulator, like};
use rope_ascend::rope::{KernelType, Update, UpdateFactors};

use super::{Outputs, Refusal, kernel_type, layer_kernels, read, write};
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
        let dtype = FloatDType::F32;
        let (value, _, first, second) =
            Self::adamw_rounded(value, gradient, first, second, op, dtype);
        (value, first, second)
    }

    fn adamw_rounded(
        value: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        op: AdamWOp,
        dtype: FloatDType,
    ) -> AdamWRounded<Self> {
        let narrow = (value.shape(), dtype.into());
        let described = [like(&value), narrow, like(&first), like(&second)];
        let outputs = Outputs::new(&value, described);
        let outcome = update([value, first, second], &gradient, op, dtype);
        let updated = outputs.or_composed(outcome, |[value, first, second]| {
            let (value, first, second) =
                composed::update::<Self>(value, gradient, first, second, op);
            let rounded = cast::<Self>(value.clone(), dtype);
            [value, rounded, first, second]
        });
        updated.into()
    }

    fn square_sums(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let dtype = accumulator(x.dtype()).map_or(x.dtype(), DType::from);
        let sums = ([x.len().div_ceil(SQUARES)].into(), dtype);
        let outputs = Outputs::new(&x, [sums]);
        let outcome = square_sums(&x).map_err(|refusal| (refusal, ()));
        let [sums] = outputs.or_composed(outcome, |()| [composed::square_sums::<Self>(x)]);
        sums
    }
}

/// Updates the value and both moments in place, or copies of those that something else holds.
/// Returns the value, the value in `dtype`, and the moments.
#[expect(
    clippy::result_large_err,
    reason = "a refusal gives the inputs back to be composed"
)]
fn update(
    state: [AscendTensor; 3],
    gradient: &AscendTensor,
    op: AdamWOp,
    dtype: FloatDType,
) -> Result<[AscendTensor; 4], (Refusal, [AscendTensor; 3])> {
    if state[0].dtype() != DType::F32 || kernel_type(dtype.into()).is_err() {
        return Err((Refusal::Limit, state));
    }
    let mut state = state.map(|x| if launch::is_free(&x) { x } else { copy(&x) });
    match run(&mut state, gradient, op, dtype) {
        Ok(rounded) => {
            let [value, first, second] = state;
            let rounded = rounded.unwrap_or_else(|| value.clone());
            Ok([value, rounded, first, second])
        }
        Err(refusal) => Err((refusal, state)),
    }
}

fn run(
    [value, first, second]: &mut [AscendTensor; 3],
    gradient: &AscendTensor,
    op: AdamWOp,
    dtype: FloatDType,
) -> Result<Option<AscendTensor>, Refusal> {
    let element = kernel_type(dtype.into())?;
    let context = value.context()?.clone();
    let kernels = layer_kernels(&context)?;
    let gradient = gradient.clone().contiguous();
    // The kernels take a gradient in the type of the rounded values.
    let gradient = match kernel_type(gradient.dtype())? {
        narrow if narrow != element => cast::<Ascend>(gradient, FloatDType::F32),
        _ => gradient,
    };
    let elements = value.len();
    let mut rounded = (element != KernelType::F32)
        .then(|| AscendTensor::empty_in(&context, value.shape(), dtype.into()));
    let by = op.factors();
    kernels.update(Update {
        elements,
        factors: UpdateFactors {
            scale: by.scale as f32,
            of_gradient: by.of_gradient as f32,
            of_square: by.of_square as f32,
            kept: by.kept as f32,
            correction: by.correction as f32,
            epsilon: by.epsilon as f32,
            stay: by.stay as f32,
            step: by.step as f32,
        },
        value: write(value)?,
        gradient: (kernel_type(gradient.dtype())?, read(&gradient)?),
        moments: [write(first)?, write(second)?],
        rounded: match &mut rounded {
            Some(rounded) => Some((element, write(rounded)?)),
            None => None,
        },
    })?;
    Ok(rounded)
}

fn square_sums(x: &AscendTensor) -> Result<[AscendTensor; 1], Refusal> {
    let element = kernel_type(x.dtype())?;
    let context = x.context()?;
    let kernels = layer_kernels(context)?;
    let x = x.clone().contiguous();
    let shape = [x.len().div_ceil(SQUARES)].into();
    let mut sums = AscendTensor::empty_in(context, shape, DType::F32);
    kernels.square_sums(x.len(), SQUARES, (element, read(&x)?), write(&mut sums)?)?;
    Ok([sums])
}

#[cfg(all(test, feature = "ascend-sim"))]
mod tests {
    use ascend_sim::control;
    use burn::backend::ops::FloatTensorOps;
    use burn::backend::{FloatDType, Shape};

    use super::*;
    use crate::faults::{Alone, message, values};

    const COUNT: usize = 40;
    const OP: AdamWOp = AdamWOp {
        rate: 1e-2,
        decay: 0.1,
        betas: [0.9, 0.999],
        epsilon: 1e-8,
        steps: 1,
        scale: 0.5,
    };

    fn numbers(seed: usize) -> Vec<f32> {
        let value = |index: usize| ((index * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0;
        (0..COUNT).map(value).collect()
    }

    fn runs() -> usize {
        let launches = control::launches().into_iter();
        launches
            .filter(|launch| launch.kernel.starts_with("rope_adamw"))
            .count()
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
                let (gradient, [beta_1, beta_2]) =
                    (op.scale * f64::from(gradient[index]), op.betas);
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
    fn the_kernel_updates_where_the_tensors_lie() {
        let alone = Alone::new();
        control::clear_launches();
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
            // The roundings of values up to 1.
            assert!(apart < 1e-7 * (step + 2) as f64);
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
        assert!(apart(value, &plain(&[numbers(2)], OP)) < 2e-7);
        assert_eq!(held.map(|x| values(x).expect("memory")), before);
    }

    #[test]
    fn values_are_rounded_once() {
        let alone = Alone::new();
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            let [value, gradient, moment, other] = first(&alone);
            let (value, rounded, ..) =
                Ascend::adamw_rounded(value, gradient, moment, other, OP, dtype);
            assert_eq!(rounded.dtype(), dtype.into());
            let expected = Ascend::float_cast(value, dtype);
            let [rounded, expected] =
                [rounded, expected].map(|x| values(Ascend::float_cast(x, FloatDType::F32)));
            assert_eq!(rounded.expect("values"), expected.expect("values"));
        }
    }

    #[test]
    fn a_gradient_of_16_bits_is_one_launch_in_the_type_of_the_values() {
        let alone = Alone::new();
        let types = [FloatDType::F16, FloatDType::BF16];
        for (of_gradient, dtype) in types.iter().flat_map(|x| types.map(|y| (*x, y))) {
            let gradient = || Ascend::float_cast(first(&alone)[1].clone(), of_gradient);
            let [value, _, moment, other] = first(&alone);
            let wide = Ascend::float_cast(gradient(), FloatDType::F32);
            let of = |updated: AdamWRounded<Ascend>| {
                <[_; 4]>::from(updated).map(|x| {
                    let x = Ascend::float_cast(x, FloatDType::F32);
                    values(x).expect("values")
                })
            };
            let expected = of(Ascend::adamw_rounded(value, wide, moment, other, OP, dtype));
            let [value, _, moment, other] = first(&alone);
            control::clear_launches();
            let found = Ascend::adamw_rounded(value, gradient(), moment, other, OP, dtype);
            assert_eq!(of(found), expected);
            assert_eq!(runs(), 1);
            control::clear_launches();
            let sums = values(Ascend::square_sums(gradient())).expect("sums");
            let squares = values(Ascend::float_cast(gradient(), FloatDType::F32)).expect("values");
            let expected: f32 = squares.iter().map(|x| x * x).sum();
            assert!(
                (sums[0] - expected).abs() <= 1e-6 * expected,
                "{sums:?}, {expected}"
            );
            assert!(
                control::launches()
                    .iter()
                    .any(|launch| launch.kernel.contains("square_sums_"))
            );
        }
    }

    #[test]
    fn squares_are_summed_by_chunks() {
        let alone = Alone::new();
        for count in [1, SQUARES, SQUARES + 3] {
            let x: Vec<f32> = (0..count).map(|index| (index % 7) as f32).collect();
            let expected: Vec<f32> = x
                .chunks(SQUARES)
                .map(|chunk| chunk.iter().map(|x| x * x).sum())
                .collect();
            control::clear_launches();
            let found = Ascend::square_sums(alone.vector(&x));
            assert_eq!(values(found).expect("sums"), expected);
            assert_eq!(control::launches().len(), 1);
        }
        let empty = Ascend::square_sums(alone.vector(&[]));
        assert!(values(empty).expect("no elements").is_empty());
    }

    #[test]
    fn f64_is_composed_and_no_elements_are_nothing_to_do() {
        let alone = Alone::new();
        let expected = plain(&[numbers(2)], OP);
        control::clear_launches();
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

//! Random tensors: their statistics, and reproducibility by a seed.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use burn::backend::tensor::Device;
use burn::backend::{Backend, DType, Distribution, TensorData};
use burn::tensor::Shape;

use super::input::Value;
use super::suite::{Failures, caught};

/// A backend's generator is one for all threads: draws that follow a seed must not meet another
/// test's. So only this file may seed one.
static GENERATOR: Mutex<()> = Mutex::new(());

const COUNT: usize = 20_000;

/// A distribution with its mean, variance and bounds.
struct Expected {
    distribution: Distribution,
    mean: f64,
    variance: f64,
    low: f64,
    high: f64,
}

fn floats() -> [Expected; 4] {
    let infinite = f64::INFINITY;
    [
        Expected {
            distribution: Distribution::Default,
            mean: 0.5,
            variance: 1.0 / 12.0,
            low: 0.0,
            high: 1.0,
        },
        Expected {
            distribution: Distribution::Uniform(-2.0, 3.0),
            mean: 0.5,
            variance: 25.0 / 12.0,
            low: -2.0,
            high: 3.0,
        },
        Expected {
            distribution: Distribution::Normal(1.0, 2.0),
            mean: 1.0,
            variance: 4.0,
            low: -infinite,
            high: infinite,
        },
        Expected {
            distribution: Distribution::Bernoulli(0.3),
            mean: 0.3,
            variance: 0.21,
            low: 0.0,
            high: 1.0,
        },
    ]
}

fn ints() -> [Expected; 2] {
    [
        Expected {
            distribution: Distribution::Uniform(-5.0, 5.0),
            mean: -0.5,
            variance: 99.0 / 12.0,
            low: -5.0,
            high: 4.0,
        },
        Expected {
            distribution: Distribution::Bernoulli(0.3),
            mean: 0.3,
            variance: 0.21,
            low: 0.0,
            high: 1.0,
        },
    ]
}

impl Expected {
    fn check(&self, dtype: DType, data: &TensorData) -> Result<(), String> {
        let values: Vec<f64> = data.iter::<f64>().collect();
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / count;
        let outside = values.iter().find(|v| !(self.low..=self.high).contains(v));
        let what = format!("{:?} {}", self.distribution, dtype.name());
        if values.len() != COUNT || data.dtype() != dtype {
            return Err(format!(
                "{what}: found {} values of {}",
                values.len(),
                data.dtype().name()
            ));
        }
        if let Some(value) = outside {
            return Err(format!(
                "{what}: {value} is not in [{}, {}]",
                self.low, self.high
            ));
        }
        // Six standard errors; a half type's rounding adds a part of its unit.
        let error = 6.0 * (self.variance / count).sqrt() + 2e-3 * (1.0 + self.mean.abs());
        if (mean - self.mean).abs() > error {
            return Err(format!(
                "{what}: expected mean {} within {error}, found {mean}",
                self.mean
            ));
        }
        if (variance / self.variance - 1.0).abs() > 0.08 {
            return Err(format!(
                "{what}: expected variance {}, found {variance}",
                self.variance
            ));
        }
        Ok(())
    }
}

/// A seeded draw: its data.
fn draw<B: Backend>(
    device: &Device<B>,
    dtype: DType,
    distribution: Distribution,
    seed: Option<u64>,
) -> Result<TensorData, String> {
    caught(|| {
        if let Some(seed) = seed {
            B::seed(device, seed);
        }
        let shape = Shape::from(vec![COUNT / 100, 100]);
        let value = if dtype.is_float() {
            Value::<B>::Float(B::float_random(shape, distribution, device, dtype.into()))
        } else {
            Value::<B>::Int(B::int_random(shape, distribution, device, dtype.into()))
        };
        value
            .read()
            .map_err(|error| format!("read failed: {error:?}"))
    })?
}

/// No four numbers of a draw come again in a later one, in whatever place: counters of draws that
/// follow each other do not overlap.
pub(crate) fn later_draws_do_not_overlap<B: Backend>(device: &Device<B>) {
    let _alone = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    for distribution in [Distribution::Default, Distribution::Normal(0.0, 1.0)] {
        B::seed(device, 11);
        let mut seen = HashMap::new();
        // Lengths that are no multiples of a counter's four numbers, too.
        for (draw, count) in [4001, 1001, 7, 4002, 5, 4003].into_iter().enumerate() {
            let read = caught(|| {
                let shape = Shape::from(vec![count]);
                let dtype = DType::F32.into();
                Value::<B>::Float(B::float_random(shape, distribution, device, dtype)).read()
            });
            let data = read.expect("no panic").expect("a draw is read");
            let bits: Vec<u32> = data.iter::<f32>().map(f32::to_bits).collect();
            assert_eq!(bits.len(), count);
            for (at, four) in bits.windows(4).enumerate() {
                let earlier = seen.insert(four.to_vec(), (draw, at));
                assert_eq!(
                    earlier,
                    None,
                    "{distribution:?} on {}: the numbers of draw {draw} from {at} came before, in \
                     that draw from that place",
                    B::name(device)
                );
            }
        }
    }
}

/// Mean, variance and bounds of every distribution; equal seeds give equal values, other seeds and
/// later draws others.
pub(crate) fn distributions<B: Backend>(device: &Device<B>) {
    let _alone = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    let mut failures = Failures::default();
    let floats =
        [DType::F32, DType::F16, DType::BF16].map(|dtype| ("float_random", dtype, floats().into()));
    let ints = [DType::I32, DType::I64].map(|dtype| ("int_random", dtype, ints().into()));
    let all: Vec<(_, _, Vec<Expected>)> = floats.into_iter().chain(ints).collect();
    for (op, dtype, expected) in all {
        for expected in expected {
            let draw = |seed| draw::<B>(device, dtype, expected.distribution, seed);
            failures.check(
                op,
                draw(Some(7)).and_then(|data| expected.check(dtype, &data)),
            );
            let seeds = || {
                let (first, later, again, other) =
                    (draw(Some(7))?, draw(None)?, draw(Some(7))?, draw(Some(8))?);
                let what = format!("{:?} {}", expected.distribution, dtype.name());
                match () {
                    () if first.as_bytes() != again.as_bytes() => {
                        Err(format!("{what}: one seed, two results"))
                    }
                    () if first.as_bytes() == later.as_bytes() => {
                        Err(format!("{what}: two draws, one result"))
                    }
                    () if first.as_bytes() == other.as_bytes() => {
                        Err(format!("{what}: two seeds, one result"))
                    }
                    () => Ok(()),
                }
            };
            failures.check(op, seeds());
        }
        for shape in [vec![0], vec![1], vec![2, 0, 3]] {
            let read = caught(|| {
                let shape = Shape::from(shape.clone());
                let value = if dtype.is_float() {
                    Value::<B>::Float(B::float_random(
                        shape,
                        Distribution::Default,
                        device,
                        dtype.into(),
                    ))
                } else {
                    Value::<B>::Int(B::int_random(
                        shape,
                        Distribution::Bernoulli(0.5),
                        device,
                        dtype.into(),
                    ))
                };
                value
                    .read()
                    .map_err(|error| format!("read failed: {error:?}"))
            });
            let shape_of =
                read.and_then(|read| read)
                    .and_then(|data| match data.shape().to_vec() {
                        found if found == shape => Ok(()),
                        found => Err(format!("expected shape {shape:?}, found {found:?}")),
                    });
            failures.check(op, shape_of);
        }
    }
    failures.report(&B::name(device));
}

//! Learning rates over the steps.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// The decay of the learning rate after its warm-up, from its peak to its least share of it, except
/// for [`Constant`](Self::Constant).
///
/// # Source
/// transformers 5.24.0, `optimization.py`: a step's factor is that of its index, so the first step
/// of a warm-up has a rate of 0
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// No decay.
    Constant,
    /// Linear decay.
    Linear,
    /// Decay along half a cosine.
    Cosine,
    /// Warm-up, stable, decay: the peak rate, then linear decay in the last steps.
    Wsd,
}

/// The steps of a [`Schedule`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Span {
    /// Steps of warm-up.
    pub(crate) warmup: usize,
    /// Steps of decay at the end, for [`Schedule::Wsd`].
    pub(crate) decay: usize,
    /// All steps.
    pub(crate) all: usize,
    /// The share of the peak rate at which decay ends.
    pub(crate) least: f64,
}

impl Schedule {
    /// Computes the factor on the peak rate in a step, counted from 0.
    pub(crate) fn factor(self, step: usize, span: Span) -> f64 {
        if step < span.warmup {
            return step as f64 / span.warmup as f64;
        }
        let start = match self {
            Self::Wsd => span.all.saturating_sub(span.decay).max(span.warmup),
            _ => span.warmup,
        };
        let left = span.all.saturating_sub(start).max(1) as f64;
        let gone = step.saturating_sub(start) as f64 / left;
        if gone == 0.0 {
            return 1.0;
        }
        let factor = match self {
            Self::Constant => return 1.0,
            Self::Linear | Self::Wsd => 1.0 - gone,
            Self::Cosine => 0.5 * (1.0 + (PI * gone).cos()),
        };
        factor.max(0.0) * (1.0 - span.least) + span.least
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_those_of_transformers() {
        // transformers 5.24.0, optimization.py: get_constant_schedule_with_warmup,
        // get_linear_schedule_with_warmup, get_cosine_schedule_with_warmup, get_wsd_schedule with 6
        // steps of decay, and get_cosine_with_min_lr_schedule_with_warmup with min_lr_rate 0.1;
        // 4 steps of warm-up, 20 in all: the factors in steps 0, 2, 4, 9, 12, 14, 15 and 19.
        let steps = [0, 2, 4, 9, 12, 14, 15, 19];
        let cosine = [
            0.0,
            0.5,
            1.0,
            0.777_785_116_509_801,
            0.5,
            COS_14,
            COS_15,
            COS_19,
        ];
        let cosine_least = cosine.map(|factor| factor * 0.9 + 0.1);
        let wsd = [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 5.0 / 6.0, 1.0 / 6.0];
        for (schedule, least, expected) in [
            (
                Schedule::Constant,
                0.0,
                [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
            ),
            (
                Schedule::Linear,
                0.0,
                [0.0, 0.5, 1.0, 0.6875, 0.5, 0.375, 0.3125, 0.0625],
            ),
            (Schedule::Cosine, 0.0, cosine),
            // The warm-up knows no least rate.
            (
                Schedule::Cosine,
                0.1,
                [[0.0, 0.5].as_slice(), &cosine_least[2..]]
                    .concat()
                    .try_into()
                    .expect("eight"),
            ),
            (Schedule::Wsd, 0.0, wsd),
        ] {
            let span = Span {
                warmup: 4,
                decay: 6,
                all: 20,
                least,
            };
            let factors = steps.map(|step| schedule.factor(step, span));
            for (factor, expected) in factors.into_iter().zip(expected) {
                assert!(
                    (factor - expected).abs() < 1e-15,
                    "{schedule:?} {factors:?}"
                );
            }
        }
    }

    const COS_14: f64 = 0.308_658_283_817_455_14;
    const COS_15: f64 = 0.222_214_883_490_199;
    const COS_19: f64 = 0.009_607_359_798_384_785;
}

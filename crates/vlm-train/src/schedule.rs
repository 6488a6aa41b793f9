//! Learning rates over the steps.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// The decay of the learning rate after its warm-up, from its peak to 0, except for
/// [`Constant`](Self::Constant).
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
}

impl Schedule {
    /// Computes the factor on the peak rate in a step, counted from 0.
    pub fn factor(self, step: usize, warmup_steps: usize, steps: usize) -> f64 {
        if step < warmup_steps {
            return step as f64 / warmup_steps as f64;
        }
        let left = steps.saturating_sub(warmup_steps).max(1) as f64;
        let gone = (step - warmup_steps) as f64 / left;
        match self {
            Self::Constant => 1.0,
            Self::Linear => (1.0 - gone).max(0.0),
            Self::Cosine => (0.5 * (1.0 + (PI * gone).cos())).max(0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_those_of_transformers() {
        // transformers 5.24.0, get_*_schedule(optimizer, 4, 20): steps 0, 2, 4, 9, 12, 19.
        let steps = [0, 2, 4, 9, 12, 19];
        for (schedule, expected) in [
            (Schedule::Constant, [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]),
            (Schedule::Linear, [0.0, 0.5, 1.0, 0.6875, 0.5, 0.0625]),
            (
                Schedule::Cosine,
                [
                    0.0,
                    0.5,
                    1.0,
                    0.777_785_116_509_801,
                    0.5,
                    0.009_607_359_798_384_785,
                ],
            ),
        ] {
            let factors = steps.map(|step| schedule.factor(step, 4, 20));
            for (factor, expected) in factors.into_iter().zip(expected) {
                assert!(
                    (factor - expected).abs() < 1e-15,
                    "{schedule:?} {factors:?}"
                );
            }
        }
    }
}

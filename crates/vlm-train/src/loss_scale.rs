//! The factor of losses in f16, so that small gradients do not vanish.

use serde::{Deserialize, Serialize};

/// Steps without an overflow after which the factor is doubled.
const PATIENCE: u32 = 2000;
/// The smallest factor; if it still overflows, the gradients themselves are infinite.
const LEAST: f64 = 1.0;

/// The current factor, and the steps since its last change.
///
/// # Source
/// Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2; steps and factors as
/// torch 2.15 `torch.amp.GradScaler` has them
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LossScale {
    pub(crate) factor: f64,
    steps: u32,
}

impl LossScale {
    pub(crate) fn new(factor: f64) -> Self {
        Self { factor, steps: 0 }
    }

    /// Updates the factor after a step with finite gradients.
    pub(crate) fn fitted(&mut self) {
        self.steps += 1;
        if self.steps == PATIENCE {
            *self = Self::new(2.0 * self.factor);
        }
    }

    /// The factor after a step with infinite gradients; `None` if it cannot be reduced.
    pub(crate) fn overflowed(self) -> Option<Self> {
        (self.factor > LEAST).then(|| Self::new((self.factor / 2.0).max(LEAST)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_factor_is_halved_at_once_and_doubled_after_many_steps() {
        let mut scale = LossScale::new(1024.0);
        for _ in 1..PATIENCE {
            scale.fitted();
        }
        assert_eq!(scale.factor, 1024.0);
        scale.fitted();
        assert_eq!(scale, LossScale::new(2048.0));
        scale.fitted();
        assert_eq!(scale.overflowed(), Some(LossScale::new(1024.0)));
        assert_eq!(LossScale::new(LEAST).overflowed(), None);
    }
}

//! Cases of every kind and element type, and those that are timed in turns.

use half::{bf16, f16};
use rope_check::buffer::DType;

use crate::cases::{Group, TimedCase};
use crate::norm::TimedNorm;
use crate::rotation::{CaseError, Timed, TimedElement, TimedRotation};
use crate::sample::Contest;

/// Cases to time in turns with each other. Of their contestants, `2 i` is the baseline of case i
/// and `2 i + 1` its rotation.
pub struct Together(Vec<Box<dyn Timed>>);

impl Together {
    /// Checks all cases, as [`TimedRotation::check`].
    ///
    /// # Errors
    /// As [`TimedRotation::new`] and [`TimedRotation::check`].
    pub fn checked(cases: &[TimedCase], tokens: usize) -> Result<Self, CaseError> {
        let check = |case: &TimedCase| {
            let mut timed = timed(case)?;
            timed.check(tokens)?;
            Ok(timed)
        };
        cases.iter().map(check).collect::<Result<_, _>>().map(Self)
    }

    /// As [`TimedRotation::baseline`], of a case.
    pub fn baseline(&self, case: usize) -> &'static str {
        self.0[case].baseline()
    }
}

impl Contest for Together {
    fn contestants(&self) -> usize {
        2 * self.0.len()
    }
    fn prepare(&mut self, contestant: usize) {
        self.0[contestant / 2].prepare(contestant % 2);
    }
    fn run(&mut self, contestant: usize, iterations: usize) {
        self.0[contestant / 2].run(contestant % 2, iterations);
    }
}

/// A case with its tensors.
///
/// # Errors
/// As [`TimedRotation::new`]; [`CaseError::NotTimed`] for f64.
pub fn timed(case: &TimedCase) -> Result<Box<dyn Timed>, CaseError> {
    match case.dtype {
        DType::F32 => timed_as::<f32>(case),
        DType::Bf16 => timed_as::<bf16>(case),
        DType::F16 => timed_as::<f16>(case),
        DType::F64 => Err(CaseError::NotTimed { case: case.name() }),
    }
}

fn timed_as<E: TimedElement>(case: &TimedCase) -> Result<Box<dyn Timed>, CaseError> {
    Ok(match case.group {
        Group::Norm => Box::new(TimedNorm::<E>::new(case)?),
        _ => Box::new(TimedRotation::<E>::new(case)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::{Selection, cases};
    use crate::rotation::BASELINE;

    #[test]
    fn every_case_is_the_oracles_on_small_tensors() {
        for case in cases(Selection::Quick) {
            let mut timed = timed(&case).unwrap();
            timed.check(4).unwrap_or_else(|error| panic!("{error}"));
            timed.prepare(BASELINE);
            timed.run(BASELINE, 1);
        }
    }
}

//! Cases that are timed in turns, round by round, and their rows.

use std::error::Error;
use std::time::Duration;

use burn::tensor::Device;

use crate::burn::{gpu, norm, speed};
use crate::cases::{Group, TimedCase};
use crate::names;
use crate::rotation::{BASELINE, ROTATION};
use crate::rows::SpeedRow;
use crate::sample::{Plan, Timing, samples};
use crate::timed::Together;

/// Tokens that are compared with the oracle.
const CHECKED_TOKENS: usize = 8;
/// Shortest sample of lengths whose costs per token are compared: the longest length takes about
/// this, and a shorter one would be over before threads, processor and memory are at their pace.
const SUSTAINED: Duration = Duration::from_millis(100);

/// Cases that are timed in turns, and what was found.
pub struct Series<'a> {
    cases: &'a [TimedCase],
    gpu: Option<&'a Device>,
    /// Of each case, what it is compared with, and the samples of both.
    taken: Vec<(&'static str, [Vec<f64>; 2])>,
    /// Samples of ordinary operations beside the first case, if any.
    composed: Vec<f64>,
    through_burn: Vec<SpeedRow>,
}

impl<'a> Series<'a> {
    /// A series of cases that [are compared](TimedCase::is_compared_with) with each other, on the
    /// CPU or a GPU.
    pub fn new(cases: &'a [TimedCase], gpu: Option<&'a Device>) -> Self {
        Self {
            cases,
            gpu,
            taken: Vec::new(),
            composed: Vec::new(),
            through_burn: Vec::new(),
        }
    }

    /// The cases.
    pub fn cases(&self) -> &'a [TimedCase] {
        self.cases
    }

    /// Checks the cases, and takes their samples of a round, counted from 0. Cases through burn are
    /// timed in the first round alone.
    ///
    /// # Errors
    /// If a result is not the oracle's, or the device fails.
    pub fn sample(&mut self, round: usize, mut plan: Plan) -> Result<(), Box<dyn Error>> {
        let Some(case) = self.cases.first() else {
            return Ok(());
        };
        if matches!(case.group, Group::Burn | Group::Gpu) {
            if round == 0 {
                self.through_burn = match self.gpu {
                    Some(device) if case.group == Group::Gpu => gpu::time(case, device, &plan)?,
                    device => speed::time(case, device, &plan)?,
                };
            }
            return Ok(());
        }
        plan.budget = plan.budget.saturating_mul(self.cases.len() as u32);
        if self.cases.len() > 1 {
            plan.shortest_sample = SUSTAINED;
        }
        let mut together = Together::checked(self.cases, CHECKED_TOKENS)?;
        let baseline = |case| (together.baseline(case), Default::default());
        if round == 0 {
            self.taken = (0..self.cases.len()).map(baseline).collect();
        }
        let is_composed = case.group == Group::Norm && norm::is_composed(case);
        let mut samples = if is_composed && round == 0 {
            let mut baseline = norm::ComposedBaseline::new(case, &mut together)?;
            let mut all = samples(&mut baseline, &plan);
            self.composed = all.pop().unwrap_or_default();
            all
        } else {
            samples(&mut together, &plan)
        }
        .into_iter();
        for (_, taken) in &mut self.taken {
            for (taken, samples) in taken.iter_mut().zip(samples.by_ref()) {
                taken.extend(samples);
            }
        }
        Ok(())
    }

    /// The rows of all rounds.
    pub fn into_rows(self) -> Vec<SpeedRow> {
        let mut rows = Vec::new();
        for (case, (baseline, samples)) in self.cases.iter().zip(self.taken) {
            let timings = samples.map(Timing::of);
            let baseline = (baseline, timings[BASELINE]);
            let kernels = SpeedRow::new(case, names::KERNELS, baseline, timings[ROTATION]);
            rows.push(kernels);
            if !self.composed.is_empty() {
                let timing = Timing::of(self.composed.clone());
                rows.push(SpeedRow::new(case, names::COMPOSED, baseline, timing));
            }
        }
        rows.extend(self.through_burn);
        rows
    }
}

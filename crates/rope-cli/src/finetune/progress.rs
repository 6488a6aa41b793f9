//! What a run says of its steps.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use vlm_train::StepReport;

use crate::stdio::note;

/// A bar on a terminal, elsewhere a line after every twentieth of the steps; on standard error.
pub(super) struct Progress {
    bar: ProgressBar,
    line_every: usize,
    started: Instant,
    tokens: usize,
}

impl Progress {
    pub(super) fn new(steps: usize, done: usize) -> Self {
        let bar = ProgressBar::new(steps as u64).with_position(done as u64);
        if let Ok(style) = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg} {eta} left") {
            bar.set_style(style);
        }
        bar.reset_eta();
        bar.enable_steady_tick(Duration::from_millis(200));
        Self {
            bar,
            line_every: steps.div_ceil(20),
            started: Instant::now(),
            tokens: 0,
        }
    }

    pub(super) fn show(&mut self, report: &StepReport, validation: Option<f64>) {
        self.tokens += report.tokens;
        let seconds = self.started.elapsed().as_secs_f64();
        let mut message = format!(
            "loss {:.4} norm {:.3} rate {:.2e} {:.0} tokens/s, {:.0} % labelled",
            report.loss,
            report.gradient_norm,
            report.learning_rate,
            self.tokens as f64 / seconds.max(1e-9),
            100.0 * report.labelled as f64 / report.tokens.max(1) as f64,
        );
        if let Some(loss) = validation {
            message += &format!(", validation {loss:.4}");
        }
        let due = report.step.is_multiple_of(self.line_every) || validation.is_some();
        if self.bar.is_hidden() && due {
            let all = self.bar.length().unwrap_or_default();
            note(format_args!("step {}/{all} {message}", report.step));
        }
        self.bar.set_message(message);
        self.bar.set_position(report.step as u64);
    }

    pub(super) fn finish(&self) {
        self.bar.finish();
    }
}

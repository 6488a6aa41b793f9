//! Messages of a run about its steps.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use vlm_train::{Answer, Event, StepReport};

use crate::stdio::{note, plain};

/// The share of lost updates above which they are reported.
const MUCH: f64 = 0.1;

/// A bar on a terminal, elsewhere a line after every twentieth of the steps; on standard error. If
/// quiet, only warnings.
pub(super) struct Progress {
    bar: ProgressBar,
    line_every: usize,
    quiet: bool,
    started: Instant,
    tokens: usize,
}

impl Progress {
    pub(super) fn new(steps: usize, done: usize, quiet: bool) -> Self {
        let bar = ProgressBar::new(steps as u64).with_position(done as u64);
        if quiet {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        let template = "{bar:24} {pos}/{len} {eta} left  {wide_msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.reset_eta();
        bar.enable_steady_tick(Duration::from_millis(200));
        Self {
            bar,
            line_every: steps.div_ceil(20),
            quiet,
            started: Instant::now(),
            tokens: 0,
        }
    }

    /// Shows an event of a run.
    pub(super) fn show(&mut self, event: Event<'_>) {
        match event {
            Event::Step(report) => self.step(report),
            Event::EarlierLog(path) => self.bar.suspend(|| {
                note(format_args!(
                    "the log of an earlier run without a checkpoint is kept as {}",
                    path.display()
                ));
            }),
            Event::Skipped { step, errors } => {
                for error in errors {
                    self.line(step, &format!("warning: left out: {error}"));
                }
            }
            _ if self.quiet => {}
            Event::Validation { step, loss } => self.line(step, &format!("validation {loss:.4}")),
            Event::Answers { step, answers } => self.answers(step, answers),
        }
    }

    /// A line that stays, above the bar.
    fn line(&self, step: usize, message: &str) {
        let all = self.bar.length().unwrap_or_default();
        let line = format!("step {step}/{all} {message}");
        self.bar.suspend(|| note(line));
    }

    fn answers(&self, step: usize, answers: &[Answer]) {
        let right = answers.iter().filter(|answer| answer.is_right()).count();
        self.line(
            step,
            &format!("{right} of {} answers are right:", answers.len()),
        );
        for answer in answers {
            let Answer {
                line,
                expected,
                found,
            } = answer;
            let text = if answer.is_right() {
                format!("  line {line}: {found:?}, right")
            } else {
                format!("  line {line}: {found:?}, expected {expected:?}")
            };
            self.bar.suspend(|| note(plain(&text)));
        }
    }

    fn step(&mut self, report: &StepReport) {
        self.tokens += report.tokens;
        let seconds = self.started.elapsed().as_secs_f64();
        let message = format!(
            "loss {:.4} norm {:.3} rate {:.2e} {:.0} tokens/s, {:.0} % labelled",
            report.loss,
            report.gradient_norm,
            report.learning_rate,
            self.tokens as f64 / seconds.max(1e-9),
            100.0 * report.labelled as f64 / report.tokens.max(1) as f64,
        );
        if report.skipped {
            let scale = report.loss_scale.unwrap_or(1.0);
            let message = format!("skipped: a gradient overflowed at {scale} times the loss");
            self.line(report.step, &message);
        }
        if let Some(lost) = report.lost_updates.filter(|lost| *lost > MUCH) {
            let message = format!(
                "{:.0} % of the updates are below the resolution of the weights and lost; masters \
                 keep them (leave out --no-masters)",
                100.0 * lost
            );
            self.line(report.step, &message);
        }
        if self.bar.is_hidden() && !self.quiet && report.step.is_multiple_of(self.line_every) {
            self.line(report.step, &message);
        }
        self.bar.set_message(message);
        self.bar.set_position(report.step as u64);
    }

    /// Removes the bar. What it showed of the last step stays as a line.
    pub(super) fn finish(&self) {
        let (step, message) = (self.bar.position() as usize, self.bar.message());
        let is_shown = !self.bar.is_hidden() && !message.is_empty();
        self.bar.finish_and_clear();
        if is_shown {
            self.line(step, &message);
        }
    }
}

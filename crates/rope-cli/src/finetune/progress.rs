//! Messages of a run about its steps.

use std::fmt::Display;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use parking_lot::Mutex;
use vlm_train::job::Notice;
use vlm_train::{Answer, Event, StepReport};

use crate::arguments::complaint;
use crate::stdio::{note, plain};

/// The share of lost updates above which they are reported.
const MUCH: f64 = 0.1;

/// Between two lines of progress, where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);
const TEMPLATE: &str = "{bar:24} {pos}/{len} {eta} left  {wide_msg}";

/// Messages before the first step: warnings, and a bar over the records of each data set.
pub(super) struct Reading {
    quiet: bool,
    state: Mutex<(Option<ProgressBar>, Instant)>,
}

impl Reading {
    pub(super) fn new(quiet: bool) -> Self {
        Self {
            quiet,
            state: Mutex::new((None, Instant::now())),
        }
    }

    pub(super) fn show(&self, notice: Notice<'_>) {
        match notice {
            Notice::Warning(text) => note(format_args!("warning: {}", complaint(&text))),
            Notice::Reading { .. } if self.quiet => {}
            Notice::Reading { data, done, all } => self.read(data, done, all),
        }
    }

    fn read(&self, data: &str, done: usize, all: usize) {
        let mut state = self.state.lock();
        let (bar, last) = &mut *state;
        if done == all {
            if let Some(bar) = bar.take() {
                bar.finish_and_clear();
            }
            return;
        }
        let bar = bar.get_or_insert_with(|| {
            *last = Instant::now();
            bar_of(all).with_message(format!("reading the {data} data"))
        });
        bar.set_position(done as u64);
        if bar.is_hidden() && last.elapsed() >= LINE_EVERY {
            *last = Instant::now();
            note(format_args!("read {done} of {all} {data} records"));
        }
    }
}

fn bar_of(length: usize) -> ProgressBar {
    let bar = ProgressBar::new(length as u64);
    if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
        bar.set_style(style);
    }
    bar
}

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
        let bar = bar_of(steps).with_position(done as u64);
        if quiet {
            bar.set_draw_target(ProgressDrawTarget::hidden());
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
            Event::Validation {
                step,
                loss,
                reward,
                pairs,
            } => {
                let message = match reward {
                    Some(reward) => format!("validation reward {reward:.4}"),
                    None => format!("validation {loss:.4}{}", text(pairs.as_ref())),
                };
                self.line(step, &message);
            }
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
            let text = format!("  {answer}");
            self.bar.suspend(|| note(plain(&text)));
        }
    }

    fn step(&mut self, report: &StepReport) {
        self.tokens += report.tokens;
        let seconds = self.started.elapsed().as_secs_f64();
        let means = text(report.preference.as_ref()) + &text(report.policy.as_ref());
        let message = format!(
            "loss {:.4}{means}, norm {:.3} rate {:.2e} {:.0} tokens/s, {:.0} % labelled",
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
                "{:.0} % of the updates are below the resolution of the weights and lost; master \
                 weights keep them (leave out --no-master-weights)",
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

fn text(means: Option<&impl Display>) -> String {
    means.map_or(String::new(), |means| format!(" {means}"))
}

//! A run from the first step to the last file.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use mrope_digits::Trainer;

use super::error::{Result, TrainError};
use super::options::TrainArgs;
use super::plots;
use super::report::{Files, Report};
use crate::device::Compute;
use crate::memory;
use crate::stdio::{note, stdout};

const MODEL: &str = "model.safetensors";
const CURVES: &str = "curves.svg";
const ATTENTION: &str = "attention.svg";
/// A file that is written and removed, to know that the folder takes files.
const PROBE: &str = "mrope-train.probe";
/// Questions of each test during training.
const PROBE_QUESTIONS: usize = 512;
/// Steps between the tests during training.
const PROBE_EVERY: usize = 100;
/// Steps that the shown loss and accuracy are averaged over.
const SHOWN_STEPS: usize = 50;

/// Trains, tests, saves and reports.
///
/// # Errors
/// [`TrainError`]: see its variants.
pub(crate) fn run(args: &TrainArgs) -> Result<()> {
    let out = args.out();
    expect_memory(args)?;
    expect_writable(&out)?;
    let compute = Compute::open(&args.device, &args.token).map_err(TrainError::Open)?;
    let device = compute.device();
    let mut trainer = Trainer::new(args.run.config(), device)?;
    compute.start_counting()?;
    let steps = args.run.steps;
    let progress = Progress::new(steps, args.quiet);
    while trainer.steps() < steps {
        trainer.step()?;
        let done = trainer.steps();
        if done % PROBE_EVERY == 0 && done < steps {
            trainer.record_test(PROBE_QUESTIONS)?;
        }
        progress.show(&trainer);
    }
    progress.finish();
    // Also reports a failure of the last backward, before anything is written.
    let usage = compute.usage()?;

    // Before the test: what was trained is not lost with it.
    let files = Files {
        model: out.join(MODEL),
        curves: out.join(CURVES),
        attention: out.join(ATTENTION),
    };
    trainer.save(&files.model, &args.run)?;
    let (test, blind) = trainer.test(args.test_questions)?;
    // The report does not depend on the plots, nor they on its reader.
    let curves = plots::curves(&files.curves, trainer.history(), &test, blind);
    let attention = plots::attention(&files.attention, &trainer, &trainer.first_test_question()?);

    let report = Report::new(
        &trainer,
        args.run.clone(),
        args.device.to_string(),
        usage,
        test,
        blind,
        files,
    );
    let text = if args.json {
        report
            .json()
            .map_err(|error| TrainError::Output(error.into()))?
    } else {
        report.to_string()
    };
    writeln!(stdout(), "{text}").map_err(TrainError::Output)?;
    curves.and(attention)
}

/// Refuses a run whose steps need more memory than there is.
fn expect_memory(args: &TrainArgs) -> Result<()> {
    let config = args.run.config();
    let what = format!(
        "a step of --batch {} with {} tokens each",
        config.batch,
        config.clip.tokens()
    );
    let instead = "choose a smaller --batch, or fewer --frames, --rows and --columns";
    memory::expect(&args.device, config.least_step_bytes(), &what, instead)
        .map_err(TrainError::Memory)
}

/// Makes the folder, and refuses one that does not take the files that the run ends with, or has
/// the model of another program.
fn expect_writable(out: &Path) -> Result<()> {
    fs::create_dir_all(out).map_err(TrainError::file("create", out))?;
    let probe = out.join(PROBE);
    plain_files::write_whole(&probe, b"")?;
    fs::remove_file(&probe).map_err(TrainError::file("remove", &probe))?;
    for file in [MODEL, CURVES, ATTENTION].map(|file| out.join(file)) {
        if file.is_dir() {
            return Err(TrainError::file("write", file)(
                "it is a folder; move it away, or choose another --out",
            ));
        }
    }
    let model = out.join(MODEL);
    if model.exists() && !mrope_digits::is_model(&model) {
        return Err(TrainError::NotOurs { path: model });
    }
    Ok(())
}

/// A bar on a terminal, elsewhere a line after every twentieth of the steps; always on standard
/// error. Nothing if quiet.
struct Progress {
    bar: ProgressBar,
    line_every: usize,
    quiet: bool,
}

impl Progress {
    fn new(steps: usize, quiet: bool) -> Self {
        let bar = ProgressBar::new(steps as u64);
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
        }
    }

    fn show(&self, trainer: &Trainer) {
        let history = trainer.history();
        let message = format!(
            "loss {:.3}, accuracy {:.1} % over the last {} steps, {:.0} tokens/s",
            mean_of_last(&history.losses),
            100.0 * mean_of_last(&history.accuracies),
            history.losses.len().min(SHOWN_STEPS),
            trainer.tokens_per_second(),
        );
        let done = trainer.steps();
        if self.bar.is_hidden() && !self.quiet && done.is_multiple_of(self.line_every) {
            note(format_args!(
                "step {done}/{} {message}",
                trainer.config().steps
            ));
        }
        self.bar.set_message(message);
        self.bar.set_position(done as u64);
    }

    fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

fn mean_of_last(values: &[f32]) -> f32 {
    let last = &values[values.len().saturating_sub(SHOWN_STEPS)..];
    last.iter().sum::<f32>() / last.len().max(1) as f32
}

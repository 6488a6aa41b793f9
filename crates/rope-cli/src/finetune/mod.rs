//! `mrope finetune`: options, printing and exit codes around `vlm_train::job`.

mod curves;
pub(crate) mod file;
mod memory;
mod options;
mod progress;
mod several;
mod stop;

use std::error::Error;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use burn::tensor::Device as BurnDevice;
use vlm_models::VlmError;
use vlm_train::job::{Finetune, Job, JobEnd, Watch};
use vlm_train::{Ending, Event, SameProof, Trainer, VlmTrainError};

use crate::device::{Compute, Device, explained_reason};
use crate::stdio::{note, stdout};

use memory::StepMeter;
pub(crate) use options::FinetuneArgs;
use progress::{Progress, Reading};
use stop::Stop;

/// Loss, gradient norm and rate over the steps.
const CURVES: &str = "curves.svg";
/// The options of the run, for the next one.
const OPTIONS: &str = "options.toml";

/// Fine-tunes, saves and reports. The exit code reports a signal.
///
/// # Errors
/// Those of the device, the model, the data and the run, each with what to do.
pub(crate) fn run(args: &FinetuneArgs) -> Result<ExitCode, Box<dyn Error>> {
    let args = args.with_variables(|name| std::env::var(name).ok())?;
    let run = Finetune::open(args.run.clone())?.with_ranks(args.ranks())?;
    if args.plan {
        memory::print(&args, &run)?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.is_several() && args.proves() {
        let option = if args.prove_cut {
            "--prove-cut"
        } else {
            "--prove-same"
        };
        return Err(format!("{option} computes on one device; name one").into());
    }
    let stop = Stop::new()?;
    let written = args.written(run.trained());
    let reading = Reading::new(args.quiet);
    let job = run.prepare(&|notice| reading.show(notice), stop.request())?;
    drop(reading);
    let Some(job) = job else {
        note("stopped before the first step");
        return Ok(stop.code());
    };
    if args.proves() {
        let compute = Compute::open(&args.device[0], &args.token)?;
        match args.prove_cut {
            true => prove_cut(&job, compute.device())?,
            false => prove_same(&job, compute.device())?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    if args.host == 0 {
        let path = args.run.output.out.join(OPTIONS);
        plain_files::replace(&path, written.as_bytes())?;
    }
    let trained = match args.is_several() {
        true => several::train(&args, job)?,
        false => alone(&args, &job)?,
    };
    match trained {
        JobEnd::Saved(folder) => writeln!(stdout(), "{}", folder.display())?,
        JobEnd::Elsewhere => {}
        JobEnd::Stopped => return Ok(stop.code()),
    }
    Ok(ExitCode::SUCCESS)
}

/// Trains on one device.
fn alone(args: &FinetuneArgs, job: &Job) -> Result<JobEnd, Box<dyn Error>> {
    let compute = Compute::open(&args.device[0], &args.token)?;
    compute.start_counting()?;
    let mut shown = Shown::new(args, true);
    let is_cpu = args.device[0] == Device::Cpu;
    shown.meter = args
        .is_planned()
        .then(|| StepMeter::start(job.plan().clone(), is_cpu));
    shown.memory = Box::new(|| compute.memory_bytes());
    let trained = job.train(compute.device(), &mut shown).map_err(told)?;
    if matches!(trained, JobEnd::Saved(_)) && !args.quiet {
        for (name, value) in compute.usage()?.iter().flat_map(|usage| usage.rows()) {
            note(format_args!("{name}: {value}"));
        }
    }
    Ok(trained)
}

/// Prints the events of a rank.
struct Shown<'a> {
    out: PathBuf,
    quiet: bool,
    is_first: bool,
    progress: Option<Progress>,
    /// Of several ranks, the first one's, if they are NPUs.
    meter: Option<StepMeter>,
    /// Bytes that the devices have in use.
    memory: Box<dyn Fn() -> Option<u64> + 'a>,
}

impl<'a> Shown<'a> {
    fn new(args: &FinetuneArgs, is_first: bool) -> Self {
        Self {
            out: args.run.output.out.clone(),
            quiet: args.quiet,
            is_first,
            progress: None,
            meter: None,
            memory: Box::new(|| None),
        }
    }
}

impl Watch for Shown<'_> {
    fn begins(&mut self, trainer: &Trainer, records: usize) {
        if let Some(meter) = &mut self.meter {
            meter.model_is_held();
        }
        if !self.is_first {
            return;
        }
        let steps = trainer.recipe().steps;
        let trained = trainer.trained_elements();
        if !self.quiet {
            note(format_args!(
                "training {trained} parameters on {records} conversations in {steps} steps"
            ));
        }
        self.progress = Some(Progress::new(steps, trainer.steps(), self.quiet));
    }

    fn batch(&mut self, batch: &vlm_data::GlobalBatch) {
        if let Some(meter) = &mut self.meter {
            meter.begin(batch);
        }
    }

    fn event(&mut self, event: Event<'_>) {
        if let (Some(meter), Event::Step(_)) = (&mut self.meter, event) {
            meter.end();
        }
        if let Some(progress) = &mut self.progress {
            progress.show(event);
        }
    }

    fn ends(&mut self, ending: Ending, steps: usize, waiting: f64) {
        if let Some(progress) = self.progress.take() {
            progress.finish();
        }
        let (log, curves) = (self.out.join("log.jsonl"), self.out.join(CURVES));
        if let Err(error) = curves::draw(&log, &curves) {
            let path = curves.display();
            note(format_args!("warning: {path} was not drawn: {error}"));
        }
        match ending {
            Ending::Stopped => note(format_args!(
                "stopped after step {steps}; --resume continues"
            )),
            Ending::Settled { best } => note(format_args!(
                "the validation loss has not fallen since step {best}, whose result is in best/"
            )),
            Ending::Finished => {}
        }
        if ending != Ending::Stopped && !self.quiet {
            let share = 100.0 * waiting;
            note(format_args!(
                "{share:.1} % of the time was spent waiting for data"
            ));
            if let Some(meter) = &self.meter {
                meter.report(self.memory());
            }
        }
    }

    fn memory(&self) -> Option<u64> {
        (self.memory)()
    }
}

/// Prints the differences of a step over the first conversations in four cuts.
fn prove_cut(job: &Job, device: &BurnDevice) -> Result<(), Box<dyn Error>> {
    let (conversations, found) = job.prove_cut(device)?;
    writeln!(
        stdout(),
        "one step over {conversations} conversations: packed into one micro-batch, padded into one, \
         packed into several, and one by one\n\
         {found}"
    )?;
    Ok(())
}

/// Prints the differences between log-probabilities of answers to the first conversations.
fn prove_same(job: &Job, device: &BurnDevice) -> Result<(), Box<dyn Error>> {
    let SameProof { generated, trained } = job.prove_same(device)?;
    writeln!(
        stdout(),
        "log-probabilities of answers\n\
         generated and scored: {generated}\n\
         scored and trained on: {trained}"
    )?;
    Ok(())
}

/// An error of a run; of a device that failed, as `mrope train` reports it.
fn told(error: VlmTrainError) -> Box<dyn Error> {
    let reason = match &error {
        VlmTrainError::Device { reason, .. }
        | VlmTrainError::Model(VlmError::TensorUnreadable { reason, .. }) => reason,
        _ => return error.into(),
    };
    // burn's errors begin with a line that only says that there is one.
    let cause = reason.rsplit("Caused by:").next().unwrap_or(reason).trim();
    format!(
        "the device failed: {}; --resume continues from the last checkpoint, if there is one",
        explained_reason(cause)
    )
    .into()
}

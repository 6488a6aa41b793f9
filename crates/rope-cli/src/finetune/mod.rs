//! `mrope finetune`: a thin user of `vlm-train`.

mod curves;
mod data;
pub(crate) mod file;
mod memory;
mod model;
mod options;
mod progress;
mod several;
mod stop;
mod trained;

use std::cell::RefCell;
use std::error::Error;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Device;
use vlm_data::{BatchSize, DataSet, Loader, LoaderOptions, SampleEncoder};
use vlm_models::{GenerationConfig, VlmConfig, VlmError};
use vlm_train::{
    Batches, Checkpoints, Collective, Ending, Event, Identity, MemoryPlan, Questions, Rank, Recipe,
    RunFolder, RunOptions, TrainedParts, Trainer, VlmTrainError, stop_tokens,
};

use crate::device::{Compute, explained_reason};
use crate::files::replace;
use crate::stdio::{note, stdout};

use data::{Files, RunData};
use memory::{Metered, StepMeter};
pub(crate) use options::{FinetuneArgs, Precision, headed};
use progress::Progress;
use stop::Stop;

/// The folder of the adapter, and that of a model that was trained whole.
const ADAPTER: &str = "adapter";
const MODEL: &str = "model";
/// Loss, gradient norm and rate over the steps.
const CURVES: &str = "curves.svg";
/// The options of the run, for the next one.
const OPTIONS: &str = "options.toml";
/// Bytes of validation samples that are made ahead.
const AHEAD_BYTES: usize = 64 << 20;

/// The inputs that all devices of a run share.
struct Job {
    args: FinetuneArgs,
    config: VlmConfig,
    encoder: Arc<SampleEncoder>,
    data: RunData,
    recipe: Recipe,
    plan: MemoryPlan,
    questions: Option<Questions>,
    identity: Identity,
    folder: RunFolder,
    stop: Stop,
}

/// The membership of a device in a group: its rank, and the sums over all ranks.
type Membership<'a> = (&'a Rank, Arc<dyn Collective>);

/// The result of a device's training.
enum Trained {
    /// Not the first rank.
    Elsewhere,
    /// In this folder.
    Saved(PathBuf),
    /// By a signal.
    Stopped,
}

/// Fine-tunes, saves and reports. The exit code tells of a run that a signal stopped.
///
/// # Errors
/// Those of the device, the model, the data and the run, each with what to do.
pub(crate) fn run(args: &FinetuneArgs) -> Result<ExitCode, Box<dyn Error>> {
    let args = args.with_variables(|name| std::env::var(name).ok())?;
    let args = args.resolved()?;
    let config = args.position_rule.of(VlmConfig::from_folder(&args.folder)?);
    let args = args.with_trained(&config)?;
    let samples = args.records.samples(Some(&args.labels));
    let encoder = Arc::new(SampleEncoder::from_folder(&args.folder, samples)?);
    let files = Files::open(&args)?;
    let ranks = args.hosts * args.device.len();
    if args.shard_optimizer && ranks == 1 {
        return Err(
            "--shard-optimizer divides the optimizer's state among devices; name several \
                    with --device, or leave it out"
                .into(),
        );
    }
    let plan = |recipe: &Recipe| -> Result<MemoryPlan, VlmTrainError> {
        let plan = MemoryPlan::new(&config, recipe, args.dtype())?;
        Ok(plan.with_ranks(ranks, args.optimizer_state()))
    };
    if args.plan {
        // The number of steps changes no memory.
        let plan = plan(&args.recipe(usize::MAX >> 16))?;
        memory::print(&args, &plan, &encoder, &files.train)?;
        return Ok(ExitCode::SUCCESS);
    }
    let folder = match args.host {
        _ if args.prove_cut => RunFolder::shared(&args.out),
        0 => RunFolder::own(&args.out)?,
        _ => RunFolder::shared(&args.out),
    };
    let stop = Stop::new()?;
    let parts = args.recipe(1 << 40);
    let Some(data) = files.survey(&args, &encoder, &parts, stop.flag())? else {
        note("stopped before the first step");
        return Ok(stop.code());
    };
    let steps = match args.steps {
        Some(steps) => steps,
        None => usize::try_from(args.loader_options().batches(&data.lengths))?,
    };
    let recipe = args.recipe(steps);
    let job = Job {
        plan: plan(&recipe)?,
        config,
        recipe,
        questions: questions(&args, &encoder, &data)?,
        identity: identity(&args, &data.train)?,
        data,
        encoder,
        folder,
        stop,
        args,
    };
    job.run()
}

impl Job {
    /// Trains on the devices of the options, or compares cuts.
    fn run(self) -> Result<ExitCode, Box<dyn Error>> {
        let (quiet, stop) = (self.args.quiet, self.stop.clone());
        if self.args.is_several() && self.args.prove_cut {
            return Err("--prove-cut computes on one device; name one".into());
        }
        let trained = if self.args.is_several() {
            self.write_options()?;
            several::train(self)?
        } else {
            let compute = Compute::open(&self.args.device[0], &self.args.token)?;
            if self.args.prove_cut {
                let recipe = self.recipe.clone();
                let trainer = model::trainer(&self.args, &self.config, recipe, compute.device())?;
                self.prove_cut(&trainer)?;
                return Ok(ExitCode::SUCCESS);
            }
            self.write_options()?;
            compute.start_counting()?;
            let memory = || compute.memory_bytes();
            let trained = self.train(compute.device(), None, &memory).map_err(told)?;
            if matches!(trained, Trained::Saved(_))
                && !quiet
                && let Some(usage) = compute.usage()?
            {
                for (name, value) in usage.rows() {
                    note(format_args!("{name}: {value}"));
                }
            }
            trained
        };
        match trained {
            Trained::Saved(folder) => writeln!(stdout(), "{}", folder.display())?,
            Trained::Elsewhere => {}
            Trained::Stopped => return Ok(stop.code()),
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Writes the options of the run beside its results.
    fn write_options(&self) -> Result<(), Box<dyn Error>> {
        let path = self.args.out.join(OPTIONS);
        if self.args.host == 0 {
            replace(&path, self.args.written.as_bytes())
                .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        }
        Ok(())
    }

    /// Trains on one device; `memory` tells the bytes in use.
    fn train(
        &self,
        device: &Device,
        membership: Option<Membership<'_>>,
        memory: &dyn Fn() -> Option<u64>,
    ) -> Result<Trained, Box<dyn Error>> {
        let args = &self.args;
        let alone = membership.is_none();
        let mut meter = alone.then(|| StepMeter::start(self.plan.clone(), &args.device[0]));
        let mut trainer = model::trainer(args, &self.config, self.recipe.clone(), device)?;
        let mut loading = args.loader_options();
        if let (Some(steps), BatchSize::Samples(samples)) = (args.steps, loading.batch) {
            // Threads make no sample ahead that no step takes.
            let epoch_steps = self.data.train.len().div_ceil(samples);
            loading.epochs = steps.div_ceil(epoch_steps.max(1)) as u64;
        }
        if let Some((rank, collective)) = membership {
            (loading.rank, loading.ranks) = (rank.rank(), rank.ranks());
            loading.threads = loading.threads.div_ceil(args.device.len());
            loading.ahead_bytes /= args.device.len();
            trainer = trainer.with_ranks(rank.clone(), collective, args.optimizer_state());
        }
        if args.resume {
            trainer = trainer.resume(&args.out, &self.identity)?;
        }
        if let Some(meter) = &mut meter {
            meter.model_is_held();
        }
        let is_first = loading.rank == 0;
        let trained: usize = trainer.parameters().iter().map(|p| p.elements()).sum();
        let steps = self.recipe.steps;
        if is_first && !args.quiet {
            note(format_args!(
                "training {trained} parameters on {} conversations in {steps} steps",
                self.data.train.len()
            ));
        }
        let position = trainer.position();
        let (encoding, reading) = (self.encoder.clone(), self.data.train.clone());
        let validating = LoaderOptions {
            // Of one micro-batch; several ranks would each build the samples of all.
            batch: match loading.ranks {
                1 => BatchSize::Tokens(args.micro_tokens),
                _ => loading.batch,
            },
            seed: None,
            epochs: 1,
            ahead_bytes: AHEAD_BYTES.min(loading.ahead_bytes),
            ..loading.clone()
        };
        let mut loader = Loader::new(encoding, reading, loading, position)?;
        let validation = || -> vlm_data::Result<Batches<'_>> {
            let (encoder, set) = (self.encoder.clone(), self.data.validation.clone());
            let set = set.unwrap_or_else(|| self.data.train.clone());
            Ok(Box::new(Loader::new(
                encoder,
                set,
                validating.clone(),
                None,
            )?))
        };
        let mut progress = is_first.then(|| Progress::new(steps, trainer.steps(), args.quiet));
        let meter = RefCell::new(meter);
        let mut batches = Metered {
            batches: &mut loader,
            meter: &meter,
        };
        let options = RunOptions {
            folder: &self.folder,
            identity: &self.identity,
            base: &args.folder,
            records: self.data.train.len(),
            checkpoints: Checkpoints {
                every: args.checkpoint_every,
                interval: Duration::from_secs_f64(60.0 * args.checkpoint_minutes),
                keep: args.keep,
            },
            validation: self.data.validation.is_some().then_some(&validation),
            patience: args.patience,
            questions: self.questions.as_ref(),
            validate_every: args.validate_every,
            record_step: args.record_step,
            memory,
            stop: self.stop.flag(),
        };
        let ending = vlm_train::run(&mut trainer, &mut batches, options, &mut |event| {
            if let Some(meter) = meter.borrow_mut().as_mut()
                && matches!(event, Event::Step(_))
            {
                meter.end();
            }
            if let Some(progress) = &mut progress {
                progress.show(event);
            }
        })?;
        let Some(progress) = progress else {
            return Ok(match ending {
                Ending::Stopped => Trained::Stopped,
                _ => Trained::Elsewhere,
            });
        };
        progress.finish();
        curves::draw(&args.out.join("log.jsonl"), &args.out.join(CURVES))?;
        match ending {
            Ending::Stopped => {
                note(format_args!(
                    "stopped after step {}; --resume continues",
                    trainer.steps()
                ));
                return Ok(Trained::Stopped);
            }
            Ending::Settled { best } => note(format_args!(
                "the validation loss has not fallen since step {best}, whose result is in best/"
            )),
            Ending::Finished => {}
        }
        let saved = self.save(&trainer)?;
        if args.quiet {
            return Ok(Trained::Saved(saved));
        }
        let waiting = 100.0 * loader.waiting_share();
        note(format_args!(
            "{waiting:.1} % of the time was spent waiting for data"
        ));
        if let Some(meter) = meter.borrow().as_ref() {
            meter.report();
        }
        Ok(Trained::Saved(saved))
    }

    /// Saves what was trained, and returns its folder.
    fn save(&self, trainer: &Trainer) -> Result<PathBuf, Box<dyn Error>> {
        let args = &self.args;
        Ok(match &trainer.recipe().trained {
            TrainedParts::Lora(_) => {
                let folder = args.out.join(ADAPTER);
                let probe = self.data.probe(args, &self.encoder)?;
                trainer.save_adapter(&folder, &args.folder, &probe)?;
                folder
            }
            TrainedParts::Full(_) => {
                let folder = args.out.join(MODEL);
                trainer.save_result(&folder, &args.folder)?;
                folder
            }
        })
    }

    /// Compares a step over the first conversations in four cuts.
    fn prove_cut(&self, trainer: &Trainer) -> Result<(), Box<dyn Error>> {
        let mut reader = self.data.train.reader();
        let mut samples = Vec::new();
        for record in 0..self.data.train.len().min(self.args.batch) {
            samples.push(self.encoder.encode(&reader.read(record)?)?);
        }
        let found = trainer.prove_cut(&samples)?;
        writeln!(
            stdout(),
            "one step over {} conversations: packed into one micro-batch, padded into one, packed \
             into several, and one by one\n\
             largest relative difference of the loss {:.1e}, of the gradient's norm {:.1e}, of the \
             gradient {:.1e}",
            samples.len(),
            found.loss,
            found.gradient_norm,
            found.gradient
        )?;
        Ok(())
    }
}

/// An error of a run; of a device that failed, as `mrope train` reports it.
fn told(error: Box<dyn Error>) -> Box<dyn Error> {
    let reason = match error.downcast_ref() {
        Some(VlmTrainError::Device { reason, .. }) => reason,
        Some(VlmTrainError::Model(VlmError::TensorUnreadable { reason, .. })) => reason,
        _ => return error,
    };
    // burn's errors begin with a line that only says that there is one.
    let cause = reason.rsplit("Caused by:").next().unwrap_or(reason).trim();
    format!(
        "the device failed: {}; --resume continues from the last checkpoint, if there is one",
        explained_reason(cause)
    )
    .into()
}

/// The identity of the run: a checkpoint of another identity is refused.
fn identity(args: &FinetuneArgs, data: &DataSet) -> Result<Identity, Box<dyn Error>> {
    let weights = model::fingerprint(&fs::canonicalize(&args.folder)?)?;
    let mut identity = args.identity();
    for (name, number) in [("weights", weights), ("data", data.fingerprint())] {
        identity.insert(name.to_owned(), format!("{number:016x}").into());
    }
    if let Some(adapter) = &args.what.adapter {
        let number = model::fingerprint(adapter)?;
        identity.insert("adapter".to_owned(), format!("{number:016x}").into());
    }
    Ok(identity)
}

/// The first conversations of the validation data, or of the data, to be answered.
fn questions(
    args: &FinetuneArgs,
    encoder: &Arc<SampleEncoder>,
    data: &RunData,
) -> Result<Option<Questions>, Box<dyn Error>> {
    if args.samples == 0 {
        return Ok(None);
    }
    let set = data.validation.as_ref().unwrap_or(&data.train);
    let mut reader = set.reader();
    let conversations = (0..set.len().min(args.samples)).map(|record| reader.read(record));
    let conversations = conversations.collect::<Result<Vec<_>, _>>()?;
    let stop = stop_tokens(&GenerationConfig::from_folder(&args.folder)?, encoder);
    Ok(Some(Questions::new(encoder.clone(), &conversations, stop)?))
}

//! `mrope finetune`: a thin user of `vlm-train`.

mod curves;
mod memory;
mod model;
mod options;
mod progress;
mod several;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use burn::tensor::Device;
use signal_hook::consts::SIGINT;
use signal_hook::flag;
use vlm_data::text::{DataIndex, FileOptions};
use vlm_data::{BatchSize, Cut, Loader, LoaderOptions, MicroBatch, SampleEncoder, SampleOptions};
use vlm_models::{VlmConfig, VlmError};
use vlm_train::{
    Collective, Ending, Event, MemoryPlan, Questions, Rank, Recipe, RunOptions, TrainedParts,
    Trainer, VlmTrainError,
};

use crate::device::{Compute, explained_reason};
use crate::stdio::{note, stdout};

use memory::{Metered, StepMeter};
pub(crate) use options::{FinetuneArgs, Precision};
use progress::Progress;

/// The folder of the adapter, and that of a model that was trained whole.
const ADAPTER: &str = "adapter";
const MODEL: &str = "model";
/// Loss, gradient norm and rate over the steps.
const CURVES: &str = "curves.svg";
/// The exit code that a shell reports for a process that SIGINT ended.
const INTERRUPTED: i32 = 128 + 2;

/// The inputs that all devices of a run share.
struct Job {
    args: FinetuneArgs,
    config: VlmConfig,
    encoder: Arc<SampleEncoder>,
    index: Arc<DataIndex>,
    recipe: Recipe,
    plan: MemoryPlan,
    validation: Vec<MicroBatch>,
    questions: Option<Questions>,
    identity: BTreeMap<String, String>,
    stop: Arc<AtomicBool>,
}

/// The membership of a device in a group: its rank, and the sums over all ranks.
type Membership<'a> = (&'a Rank, Arc<dyn Collective>);

/// Fine-tunes, saves and reports.
///
/// # Errors
/// Those of the device, the model, the data and the run, each with what to do.
pub(crate) fn run(args: &FinetuneArgs) -> Result<(), Box<dyn Error>> {
    let args = &args.with_variables(|name| std::env::var(name).ok())?;
    let config = VlmConfig::from_folder(&args.folder)?;
    let mut samples = SampleOptions {
        max_pixels: args.max_pixels,
        ..SampleOptions::default()
    };
    samples.encode.max_tokens = Some(args.micro_tokens);
    let encoder = Arc::new(SampleEncoder::from_folder(&args.folder, samples)?);
    let index = open_data(&args.data)?;
    let steps = match args.steps {
        Some(steps) => steps,
        None => steps_of_epochs(args, &encoder, &index)?,
    };
    let recipe = args.recipe(steps);
    let ranks = args.hosts * args.device.len();
    let plan = MemoryPlan::new(&config, &recipe, args.dtype())?;
    let plan = plan.with_ranks(ranks, args.optimizer_state());
    if args.shard_optimizer && ranks == 1 {
        return Err(
            "--shard-optimizer divides the optimizer's state among devices; name several \
                    with --device, or leave it out"
                .into(),
        );
    }
    if args.plan {
        return memory::print(args, &plan, &encoder, &index);
    }
    let job = Job {
        args: args.clone(),
        config,
        recipe,
        plan,
        validation: validation(args, &encoder)?,
        questions: questions(args, &encoder, &index)?,
        identity: identity(args, &index)?,
        encoder,
        index,
        stop: interrupted()?,
    };
    let saved = if args.is_several() {
        if args.prove_cut {
            return Err("--prove-cut computes on one device; name one".into());
        }
        several::train(job)?
    } else {
        let compute = Compute::open(&args.device[0], &args.token)?;
        if args.prove_cut {
            let model = model::load(args, &job.config, compute.device())?;
            let trainer = Trainer::new(model, job.recipe)?;
            return prove_cut(&trainer, &job.encoder, &job.index, args.batch);
        }
        compute.start_counting()?;
        let saved = job.train(compute.device(), None).map_err(told)?;
        if saved.is_some()
            && !args.quiet
            && let Some(usage) = compute.usage()?
        {
            for (name, value) in usage.rows() {
                note(format_args!("{name}: {value}"));
            }
        }
        saved
    };
    if let Some(saved) = saved {
        writeln!(stdout(), "{}", saved.display())?;
    }
    Ok(())
}

impl Job {
    /// Trains on one device. Returns the folder of what was saved, on the first rank of a run that
    /// is finished.
    fn train(
        &self,
        device: &Device,
        membership: Option<Membership<'_>>,
    ) -> Result<Option<PathBuf>, Box<dyn Error>> {
        let args = &self.args;
        let alone = membership.is_none();
        let mut meter = alone.then(|| StepMeter::start(self.plan.clone(), &args.device[0]));
        let model = model::load(args, &self.config, device)?;
        let mut trainer = Trainer::new(model, self.recipe.clone())?;
        let mut loading = args.loader_options();
        if let (Some(steps), BatchSize::Samples(samples)) = (args.steps, loading.batch) {
            // Threads make no sample ahead that no step takes.
            let epoch_steps = self.index.len().div_ceil(samples);
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
                self.index.len()
            ));
        }
        let position = trainer.position();
        let (encoding, reading) = (self.encoder.clone(), self.index.clone());
        let mut loader = Loader::new(encoding, reading, loading, position)?;
        let mut progress = is_first.then(|| Progress::new(steps, trainer.steps(), args.quiet));
        let meter = RefCell::new(meter);
        let mut batches = Metered {
            batches: &mut loader,
            meter: &meter,
        };
        let ending = vlm_train::run(&mut trainer, &mut batches, self.options(), &mut |event| {
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
            return Ok(None);
        };
        progress.finish();
        curves::draw(&args.out.join("log.jsonl"), &args.out.join(CURVES))?;
        if ending == Ending::Stopped {
            note(format_args!(
                "stopped after step {}; --resume continues",
                trainer.steps()
            ));
            return Ok(None);
        }
        let saved = save(args, &trainer, &self.encoder, &self.index)?;
        if args.quiet {
            return Ok(Some(saved));
        }
        let waiting = 100.0 * loader.waiting_share();
        note(format_args!(
            "{waiting:.1} % of the time was spent waiting for data"
        ));
        if let Some(meter) = meter.borrow().as_ref() {
            meter.report();
        }
        Ok(Some(saved))
    }

    fn options(&self) -> RunOptions<'_> {
        RunOptions {
            folder: &self.args.out,
            identity: &self.identity,
            checkpoint_every: self.args.checkpoint_every,
            validation: &self.validation,
            questions: self.questions.as_ref(),
            validate_every: self.args.validate_every,
            record_step: self.args.record_step,
            stop: &self.stop,
        }
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

/// Saves what was trained, and returns its folder.
fn save(
    args: &FinetuneArgs,
    trainer: &Trainer,
    encoder: &SampleEncoder,
    index: &DataIndex,
) -> Result<PathBuf, Box<dyn Error>> {
    Ok(match &trainer.recipe().trained {
        TrainedParts::Lora(_) => {
            let folder = args.out.join(ADAPTER);
            // The first conversation shows the adapter's effect.
            let first = encoder.encode(&index.reader()?.read(0)?)?;
            let tokens = args.micro_tokens;
            let probe = MicroBatch::new(vec![first], Cut::Packed { tokens })?;
            trainer.save_adapter(&folder, &args.folder.display().to_string(), &probe)?;
            folder
        }
        TrainedParts::Full(_) => {
            let folder = args.out.join(MODEL);
            fs::create_dir_all(&folder)?;
            model::copy_others(&args.folder, &folder)?;
            trainer.model().save(&folder)?;
            folder
        }
    })
}

/// Compares a step over the first conversations in four cuts.
fn prove_cut(
    trainer: &Trainer,
    encoder: &SampleEncoder,
    index: &DataIndex,
    batch: usize,
) -> Result<(), Box<dyn Error>> {
    let mut reader = index.reader()?;
    let mut samples = Vec::new();
    for record in 0..index.len().min(batch) {
        samples.push(encoder.encode(&reader.read(record)?)?);
    }
    let found = trainer.prove_cut(&samples)?;
    writeln!(
        stdout(),
        "one step over {} conversations: packed into one micro-batch, padded into one, packed into \
         several, and one by one\n\
         largest relative difference of the loss {:.1e}, of the gradient's norm {:.1e}, of the \
         gradient {:.1e}",
        samples.len(),
        found.loss,
        found.gradient_norm,
        found.gradient
    )?;
    Ok(())
}

/// The steps of all epochs; where tokens decide, by the lengths of all conversations.
fn steps_of_epochs(
    args: &FinetuneArgs,
    encoder: &SampleEncoder,
    index: &DataIndex,
) -> Result<usize, Box<dyn Error>> {
    let lengths = match args.batch_size() {
        BatchSize::Samples(_) => vec![0; index.len()],
        BatchSize::Tokens(_) => {
            let mut reader = index.reader()?;
            let measure = |record| -> Result<usize, Box<dyn Error>> {
                Ok(encoder.measure(&reader.read(record)?)?.tokens())
            };
            (0..index.len()).map(measure).collect::<Result<_, _>>()?
        }
    };
    Ok(usize::try_from(args.loader_options().batches(&lengths))?)
}

/// The identity of the run: a checkpoint of another identity is refused.
fn identity(
    args: &FinetuneArgs,
    index: &DataIndex,
) -> Result<BTreeMap<String, String>, Box<dyn Error>> {
    let folder = fs::canonicalize(&args.folder)?;
    let weights = model::fingerprint(&folder)?;
    let of = [
        ("model", folder.display().to_string()),
        ("weights", format!("{weights:016x}")),
        ("precision", format!("{:?}", args.precision)),
        ("cut", format!("{:?}", args.loader_options().cut)),
        ("batch", format!("{:?}", args.batch_size())),
        ("pixels", format!("{:?}", args.max_pixels)),
        ("data", format!("{:016x}", index.fingerprint())),
    ];
    Ok(of.map(|(name, value)| (name.to_owned(), value)).into())
}

/// The first conversations of what is validated on, or of the data, to be answered.
fn questions(
    args: &FinetuneArgs,
    encoder: &Arc<SampleEncoder>,
    index: &Arc<DataIndex>,
) -> Result<Option<Questions>, Box<dyn Error>> {
    if args.samples == 0 {
        return Ok(None);
    }
    let index = match &args.val {
        Some(path) => open_data(path)?,
        None => index.clone(),
    };
    let mut reader = index.reader()?;
    let mut samples = Vec::new();
    for record in 0..index.len().min(args.samples) {
        samples.push(encoder.encode(&reader.read(record)?)?);
    }
    Ok(Some(Questions::new(encoder.clone(), samples)?))
}

fn open_data(path: &Path) -> Result<Arc<DataIndex>, Box<dyn Error>> {
    Ok(Arc::new(DataIndex::open(path, FileOptions::default())?))
}

/// All micro-batches of the file that is validated on.
fn validation(
    args: &FinetuneArgs,
    encoder: &Arc<SampleEncoder>,
) -> Result<Vec<MicroBatch>, Box<dyn Error>> {
    let Some(path) = &args.val else {
        return Ok(Vec::new());
    };
    let options = LoaderOptions {
        seed: None,
        epochs: 1,
        ..args.loader_options()
    };
    let loader = Loader::new(encoder.clone(), open_data(path)?, options, None)?;
    let mut all = Vec::new();
    for batch in loader {
        all.extend(batch?.micro_batches);
    }
    Ok(all)
}

/// A flag that Ctrl+C raises; a second one ends the process at once.
fn interrupted() -> Result<Arc<AtomicBool>, Box<dyn Error>> {
    let flag = Arc::new(AtomicBool::new(false));
    flag::register_conditional_shutdown(SIGINT, INTERRUPTED, flag.clone())?;
    flag::register(SIGINT, flag.clone())?;
    Ok(flag)
}

//! `mrope finetune`: a thin user of `vlm-train`.

mod curves;
mod memory;
mod model;
mod options;
mod progress;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use qwen_vl::QwenVlConfig;
use signal_hook::consts::SIGINT;
use signal_hook::flag;
use vlm_data::text::{DataIndex, FileOptions};
use vlm_data::{BatchSize, Cut, Loader, LoaderOptions, MicroBatch, SampleEncoder, SampleOptions};
use vlm_train::{Ending, Event, MemoryPlan, Questions, RunOptions, TrainedParts, Trainer};

use crate::device::Compute;
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

/// Fine-tunes, saves and reports.
///
/// # Errors
/// Those of the device, the model, the data and the run, each with what to do.
pub(crate) fn run(args: &FinetuneArgs) -> Result<(), Box<dyn Error>> {
    let config = QwenVlConfig::from_folder(&args.folder)?;
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
    let plan = MemoryPlan::new(&config, &recipe, args.dtype())?;
    if args.plan {
        return memory::print(args, &plan, &encoder, &index);
    }
    let validation = validation(args, &encoder)?;
    let questions = questions(args, &encoder, &index)?;
    let identity = identity(args, &index)?;

    let compute = Compute::open(&args.device, &args.token)?;
    let mut meter = StepMeter::start(plan, &args.device);
    let model = model::load(args, &config, compute.device())?;
    if args.prove_cut {
        return prove_cut(&Trainer::new(model, recipe)?, &encoder, &index, args.batch);
    }
    let mut trainer = if args.resume {
        Trainer::resume(model, recipe, &args.out, &identity)?
    } else {
        Trainer::new(model, recipe)?
    };
    meter.model_is_held();
    let trained: usize = trainer.parameters().iter().map(|p| p.elements()).sum();
    note(format_args!(
        "{trained} parameters are trained, on {} conversations in {steps} steps",
        index.len()
    ));
    let position = trainer.position();
    let (encoding, reading) = (encoder.clone(), index.clone());
    let mut loader = Loader::new(encoding, reading, args.loader_options(), position)?;
    let stop = interrupted()?;
    let options = RunOptions {
        record_step: None,
        folder: &args.out,
        identity: &identity,
        checkpoint_every: args.checkpoint_every,
        validation: &validation,
        questions: questions.as_ref(),
        validate_every: args.validate_every,
        stop: &stop,
    };
    let mut progress = Progress::new(steps, trainer.steps());
    let meter = RefCell::new(meter);
    let mut batches = Metered {
        batches: &mut loader,
        meter: &meter,
    };
    let ending = vlm_train::run(&mut trainer, &mut batches, options, &mut |event| {
        if matches!(event, Event::Step(_)) {
            meter.borrow_mut().end();
        }
        progress.show(event);
    })?;
    progress.finish();
    curves::draw(&args.out.join("log.jsonl"), &args.out.join(CURVES))?;
    if ending == Ending::Stopped {
        note(format_args!(
            "stopped after step {}; --resume continues",
            trainer.steps()
        ));
        return Ok(());
    }
    let saved = save(args, &trainer, &encoder, &index)?;
    let waiting = 100.0 * loader.waiting_share();
    note(format_args!(
        "{waiting:.1} % of the time was spent waiting for data"
    ));
    meter.borrow().report();
    writeln!(stdout(), "{}", saved.display())?;
    Ok(())
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
        "one step over {} conversations, packed into one, padded into one, packed into more and \
         one by one:\nlargest relative difference of the loss {:.1e}, of the gradient's norm \
         {:.1e}, of the gradient {:.1e}",
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

/// What the run is of: another does not continue it.
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

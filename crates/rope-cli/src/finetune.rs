//! `mrope finetune`: a thin user of `vlm-train`.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device as HostDevice, FloatDType, Tensor};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use qwen_vl::{LoraConfig, ModelPart, QwenVl, QwenVlConfig};
use signal_hook::consts::SIGINT;
use signal_hook::flag;
use vlm_data::text::{DataIndex, FileOptions};
use vlm_data::{BatchSize, Cut, Loader, LoaderOptions, MicroBatch, SampleEncoder, SampleOptions};
use vlm_train::{
    Ending, LossRule, Rates, Recipe, RunOptions, Schedule, StepReport, TrainedParts, Trainer,
};

use crate::arguments::{count_in, seed};
use crate::device::{Compute, Device, TokenArgs};
use crate::stdio::{note, stdout};

/// The folder of the adapter, and that of a model that was trained whole.
const ADAPTER: &str = "adapter";
const MODEL: &str = "model";
/// Files of a model's folder that hold weights, or say where they are.
const WEIGHTS: [&str; 3] = [".safetensors", ".safetensors.index.json", ".bin"];
/// The exit code that a shell reports for a process that SIGINT ended.
const INTERRUPTED: i32 = 128 + 2;
/// The data are gone through this often where --steps decides.
const ENDLESS: u64 = u64::MAX;

/// Options of `mrope finetune`.
#[derive(Clone, Debug, Args)]
pub(crate) struct FinetuneArgs {
    /// Folder of the model: config.json, weights, tokenizer, chat template, preprocessor
    folder: PathBuf,

    /// File of conversations: JSON lines or an array, in any of the five formats that are read
    #[arg(long, value_name = "FILE")]
    data: PathBuf,

    /// Conversations that the loss is measured on, and that are not trained on
    #[arg(long, value_name = "FILE")]
    val: Option<PathBuf>,

    /// Folder for log.jsonl, the checkpoint, and at the end the adapter (in adapter/) or the model
    /// (in model/)
    #[arg(long, value_name = "DIR")]
    out: PathBuf,

    /// Continue from the checkpoint in the folder; the other options must be those of its run
    #[arg(long)]
    resume: bool,

    /// What computes: cpu, gpu (the first GPU), gpu:N, ascend (the first NPU), ascend:N, ascend-sim
    /// (a simulated NPU), or remote:ws://HOST:PORT (a device that `mrope serve` serves)
    #[arg(long, default_value = "cpu")]
    device: Device,

    #[command(flatten)]
    token: TokenArgs,

    /// The type of weights and activations; adapters, masters and moments are f32
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    precision: Precision,

    /// How often the data are gone through, unless --steps says when to stop
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    epochs: u64,

    /// Steps, each over one batch
    #[arg(long, value_parser = count_in(1..=100_000_000))]
    steps: Option<usize>,

    /// Conversations in a batch; they are one batch however it is cut
    #[arg(long, default_value_t = 8, value_parser = count_in(1..=1_000_000))]
    batch: usize,

    /// The most tokens that pass through the model at once; a longer conversation is an error
    #[arg(long, value_name = "TOKENS", default_value_t = 4096)]
    #[arg(value_parser = count_in(1..=16_777_216))]
    micro_tokens: usize,

    /// How conversations share a pass
    #[arg(long, value_enum, default_value_t = CutChoice::Packed)]
    cut: CutChoice,

    /// The largest area of a resized picture in pixels [default: the folder's]
    #[arg(long, value_name = "PIXELS", value_parser = clap::value_parser!(u64).range(1..))]
    max_pixels: Option<u64>,

    /// Train weights, and not adapters beside them
    #[arg(long)]
    full: bool,

    /// Parts of the model that are trained, with commas
    #[arg(long, value_enum, value_delimiter = ',', default_value = "decoder")]
    parts: Vec<PartChoice>,

    /// Rank of the adapters
    #[arg(long, default_value_t = 8, value_parser = count_in(1..=65_536))]
    rank: usize,

    /// Their scale is alpha / rank, or with --rslora alpha / sqrt(rank) [default: twice the rank]
    #[arg(long)]
    alpha: Option<f64>,

    /// The probability with which an adapter's input is dropped
    #[arg(long, default_value_t = 0.0)]
    dropout: f64,

    /// Rank-stabilised scale
    #[arg(long)]
    rslora: bool,

    /// Linear layers that have adapters, with commas: ends of names, as q_proj, or regular
    /// expressions of whole names [default: all of the parts]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    targets: Vec<String>,

    /// Highest learning rate [default: 1e-4, with --full 1e-5]
    #[arg(long, value_name = "RATE")]
    learning_rate: Option<f64>,

    /// That of the vision tower [default: --learning-rate]
    #[arg(long, value_name = "RATE")]
    tower_rate: Option<f64>,

    /// That of the merger [default: --learning-rate]
    #[arg(long, value_name = "RATE")]
    merger_rate: Option<f64>,

    /// How the rate falls
    #[arg(long, value_enum, default_value_t = ScheduleChoice::Cosine)]
    schedule: ScheduleChoice,

    /// The share of the steps in which the rate rises
    #[arg(long, value_name = "SHARE", default_value_t = 0.03, value_parser = share)]
    warmup: f64,

    /// Weight decay of matrices
    #[arg(long, default_value_t = 0.0)]
    weight_decay: f64,

    /// The norm that all gradients together are clipped at; 0 clips nothing
    #[arg(long, default_value_t = 1.0)]
    max_norm: f64,

    /// What losses are divided by: tokens (of the whole batch) or micro-batches (each by its own
    /// tokens, then their mean, as transformers does)
    #[arg(long, value_enum, default_value_t = RuleChoice::Tokens)]
    loss_rule: RuleChoice,

    /// Keep what each layer's backward needs, instead of running the layer again
    #[arg(long)]
    no_recompute: bool,

    /// Update weights of 16 bits in place, without a copy in f32
    #[arg(long)]
    no_masters: bool,

    /// Start from random weights, drawn from --seed; the folder needs none
    #[arg(long)]
    random_weights: bool,

    /// Seed of the order of the data, of adapters and of dropout
    #[arg(long, default_value_t = 0, value_parser = seed())]
    seed: u64,

    /// Save a checkpoint each time this many steps are done
    #[arg(long, value_name = "STEPS", default_value_t = 100)]
    #[arg(value_parser = count_in(1..=100_000_000))]
    checkpoint_every: usize,

    /// Measure the loss on --val each time this many steps are done, and at the end
    #[arg(long, value_name = "STEPS", default_value_t = 100)]
    #[arg(value_parser = count_in(1..=100_000_000))]
    validate_every: usize,

    /// Train nothing: compute one step whose batch is cut in four ways, and print how far apart
    /// they are
    #[arg(long)]
    prove_cut: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Precision {
    F32,
    Bf16,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum CutChoice {
    /// End to end in one row
    Packed,
    /// Rows of like lengths
    Padded,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PartChoice {
    Tower,
    Merger,
    Decoder,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ScheduleChoice {
    Constant,
    Linear,
    Cosine,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum RuleChoice {
    Tokens,
    MicroBatches,
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("a number from 0 to 1 is expected".to_owned()),
    }
}

impl FinetuneArgs {
    fn recipe(&self, steps: usize) -> Recipe {
        let mut parts: Vec<ModelPart> = Vec::new();
        for part in &self.parts {
            parts.push(match part {
                PartChoice::Tower => ModelPart::Tower,
                PartChoice::Merger => ModelPart::Merger,
                PartChoice::Decoder => ModelPart::Decoder,
            });
        }
        parts.sort_unstable();
        parts.dedup();
        let default = if self.full { 1e-5 } else { 1e-4 };
        let rate = self.learning_rate.unwrap_or(default);
        Recipe {
            steps,
            trained: if self.full {
                TrainedParts::Full(parts)
            } else {
                TrainedParts::Lora(LoraConfig {
                    rank: self.rank,
                    alpha: self.alpha.unwrap_or(2.0 * self.rank as f64),
                    dropout: self.dropout,
                    rslora: self.rslora,
                    parts,
                    targets: self.targets.clone(),
                })
            },
            rates: Rates {
                tower: self.tower_rate.unwrap_or(rate),
                merger: self.merger_rate.unwrap_or(rate),
                decoder: rate,
            },
            schedule: match self.schedule {
                ScheduleChoice::Constant => Schedule::Constant,
                ScheduleChoice::Linear => Schedule::Linear,
                ScheduleChoice::Cosine => Schedule::Cosine,
            },
            warmup_steps: (self.warmup * steps as f64).ceil() as usize,
            weight_decay: self.weight_decay,
            max_norm: (self.max_norm != 0.0).then_some(self.max_norm),
            loss_rule: match self.loss_rule {
                RuleChoice::Tokens => LossRule::Tokens,
                RuleChoice::MicroBatches => LossRule::MicroBatches,
            },
            masters: !self.no_masters,
            recompute: !self.no_recompute,
            seed: self.seed,
            ..Recipe::default()
        }
    }

    fn loader_options(&self) -> LoaderOptions {
        let tokens = self.micro_tokens;
        let cut = match self.cut {
            CutChoice::Packed => Cut::Packed { tokens },
            CutChoice::Padded => Cut::Padded { tokens },
        };
        LoaderOptions {
            seed: Some(self.seed),
            epochs: match self.steps {
                Some(_) => ENDLESS,
                None => self.epochs,
            },
            ..LoaderOptions::new(BatchSize::Samples(self.batch), cut)
        }
    }

    /// The model in its precision, on a device that it configures.
    fn load(&self, config: &QwenVlConfig, device: &HostDevice) -> Result<QwenVl, Box<dyn Error>> {
        let mut device = device.clone();
        // Drawn on the host, whose generator is the same everywhere.
        let mut host = HostDevice::flex();
        if self.precision == Precision::Bf16 {
            device.configure(FloatDType::BF16)?;
            if self.random_weights && self.device != Device::Cpu {
                host.configure(FloatDType::BF16)?;
            }
        }
        if !self.random_weights {
            return Ok(config.load(&self.folder, &device.autodiff())?);
        }
        host.seed(self.seed);
        let model = config.init(&host)?.map(&mut DrawWeights::default());
        Ok(model.fork(&device).train())
    }

    fn open_data(&self, path: &Path) -> Result<Arc<DataIndex>, Box<dyn Error>> {
        Ok(Arc::new(DataIndex::open(path, FileOptions::default())?))
    }

    /// All micro-batches of the file that is validated on.
    fn validation(&self, encoder: &Arc<SampleEncoder>) -> Result<Vec<MicroBatch>, Box<dyn Error>> {
        let Some(path) = &self.val else {
            return Ok(Vec::new());
        };
        let options = LoaderOptions {
            seed: None,
            epochs: 1,
            ..self.loader_options()
        };
        let loader = Loader::new(encoder.clone(), self.open_data(path)?, options, None)?;
        let mut all = Vec::new();
        for batch in loader {
            all.extend(batch?.micro_batches);
        }
        Ok(all)
    }
}

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
    let index = args.open_data(&args.data)?;
    let per_epoch = index.len().div_ceil(args.batch);
    let steps = args
        .steps
        .unwrap_or(per_epoch.saturating_mul(args.epochs as usize));
    let recipe = args.recipe(steps);
    let validation = args.validation(&encoder)?;
    let identity = BTreeMap::from([
        (
            "model".to_owned(),
            fs::canonicalize(&args.folder)?.display().to_string(),
        ),
        ("precision".to_owned(), format!("{:?}", args.precision)),
        ("cut".to_owned(), format!("{:?}", args.loader_options().cut)),
        ("batch".to_owned(), args.batch.to_string()),
        ("pixels".to_owned(), format!("{:?}", args.max_pixels)),
        ("data".to_owned(), format!("{:016x}", index.fingerprint())),
    ]);

    let compute = Compute::open(&args.device, &args.token)?;
    let model = args.load(&config, compute.device())?;
    if args.prove_cut {
        return prove_cut(&Trainer::new(model, recipe)?, &encoder, &index, args.batch);
    }
    let mut trainer = if args.resume {
        Trainer::resume(model, recipe, &args.out, &identity)?
    } else {
        Trainer::new(model, recipe)?
    };
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
        folder: &args.out,
        identity: &identity,
        checkpoint_every: args.checkpoint_every,
        validation: &validation,
        validate_every: args.validate_every,
        stop: &stop,
    };
    let mut progress = Progress::new(steps, trainer.steps());
    let ending = vlm_train::run(
        &mut trainer,
        &mut loader,
        options,
        &mut |report, validation| {
            progress.show(report, validation);
        },
    )?;
    progress.finish();
    if ending == Ending::Stopped {
        note(format_args!(
            "stopped after step {}; --resume continues",
            trainer.steps()
        ));
        return Ok(());
    }
    let saved = match &trainer.recipe().trained {
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
            copy_others(&args.folder, &folder)?;
            trainer.model().save(&folder)?;
            folder
        }
    };
    let waiting = 100.0 * loader.waiting_share();
    note(format_args!(
        "{waiting:.1} % of the time was spent waiting for data"
    ));
    writeln!(stdout(), "{}", saved.display())?;
    Ok(())
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

/// Copies what a folder of a model holds besides weights.
fn copy_others(from: &Path, to: &Path) -> Result<(), Box<dyn Error>> {
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        if path.is_file() && !WEIGHTS.iter().any(|end| name.ends_with(end)) {
            fs::copy(&path, to.join(name))?;
        }
    }
    Ok(())
}

/// A flag that Ctrl+C raises; a second one ends the process at once.
fn interrupted() -> Result<Arc<AtomicBool>, Box<dyn Error>> {
    let flag = Arc::new(AtomicBool::new(false));
    flag::register_conditional_shutdown(SIGINT, INTERRUPTED, flag.clone())?;
    flag::register(SIGINT, flag.clone())?;
    Ok(flag)
}

/// Draws the weights now; otherwise each is drawn at first use, in an order that the first forward
/// pass decides. Word embeddings, which may also be the head, are made as small as transformers
/// draws them, or the first losses would be far above those of a guess.
#[derive(Default)]
struct DrawWeights {
    is_table: bool,
}

impl ModuleMapper for DrawWeights {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.is_table = name == "embed_tokens" || (self.is_table && name == "weight");
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let scale = if self.is_table { 0.02 } else { 1.0 };
        param.map(|drawn| drawn * scale)
    }
}

/// A bar on a terminal, elsewhere a line after every twentieth of the steps; on standard error.
struct Progress {
    bar: ProgressBar,
    line_every: usize,
    started: Instant,
    tokens: usize,
}

impl Progress {
    fn new(steps: usize, done: usize) -> Self {
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

    fn show(&mut self, report: &StepReport, validation: Option<f64>) {
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

    fn finish(&self) {
        self.bar.finish();
    }
}

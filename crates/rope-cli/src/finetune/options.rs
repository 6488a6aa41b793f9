//! The options of `mrope finetune`, and the recipe that they spell.

use std::path::PathBuf;

use burn::tensor::DType;
use clap::{Args, Command, ValueEnum, ValueHint};
use rope_ascend::safe::CommunicatorOptions;
use serde::Serialize;
use serde_json::Value;
use vlm_data::{BatchSize, Cut, HeldOut, LoaderOptions, OnError};
use vlm_train::{Identity, LossRule, OptimizerState, Rates, Recipe, Schedule};

use crate::arguments::{count_in, seed};
use crate::data::options::{DataFile, LabelArgs, OnFault, RecordArgs, TooLong};
use crate::device::{Device, TokenArgs};
use crate::positions::PositionRule;

use super::trained::TrainedArgs;

/// The initial loss scale in f16.
const LOSS_SCALE: f64 = 65_536.0;
const MOST_HOSTS: usize = 4096;
/// The --rendezvous of which a launcher's variables say the rest.
const BY_VARIABLES: &str = "env";
/// The number of epochs if --steps decides.
const ENDLESS: u64 = u64::MAX;

/// The headings of `--help`, and the options below each.
const HEADINGS: [(&str, &str); 7] = [
    (
        "Data",
        "data val split_validation media format max_tokens too_long on_error allow_truncated max_pixels \
         video_max_pixels fps position_rule train_turns label_rule survey",
    ),
    (
        "Batch",
        "epochs steps batch batch_tokens micro_tokens cut loss_rule no_recompute",
    ),
    (
        "Trained parts",
        "full parts layers train_embeddings full_parts adapter any_base rank alpha dropout rslora \
         targets random_weights",
    ),
    (
        "Optimizer",
        "learning_rate tower_rate merger_rate schedule warmup warmup_steps decay_steps least_rate \
         betas epsilon weight_decay max_norm precision no_masters seed",
    ),
    (
        "Devices",
        "device token_file path hosts host rendezvous rank_timeout shard_optimizer",
    ),
    (
        "Output",
        "out resume checkpoint_every checkpoint_minutes keep validate_every patience samples \
         record_step options quiet",
    ),
    ("Dry runs", "plan memory prove_cut"),
];

/// The command with its options below headings.
pub(crate) fn headed(command: Command) -> Command {
    command.mut_args(|arg| {
        let id = arg.get_id().to_string();
        let mut headings = HEADINGS.iter();
        let found = headings.find(|(_, ids)| ids.split(' ').any(|listed| listed == id));
        match found {
            Some((heading, _)) => arg.help_heading(*heading),
            None => arg,
        }
    })
}

/// Options of `mrope finetune`. Those that are not serialised change no number of a run.
#[derive(Clone, Debug, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct FinetuneArgs {
    /// Model folder: config.json, weights, tokenizer, chat template, preprocessor
    #[arg(value_hint = ValueHint::DirPath)]
    #[serde(skip)]
    pub(super) folder: PathBuf,

    /// Conversations: JSON lines or an array, in any of five formats. Repeatable; FILE#500 takes a
    /// file's first 500 records, FILE#0.5x half of them and FILE#3x each three times an epoch
    #[arg(long, value_name = "FILE", required = true)]
    #[serde(skip)]
    pub(super) data: Vec<DataFile>,

    /// Conversations for the validation loss. Repeatable
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    #[serde(skip)]
    pub(super) val: Vec<PathBuf>,

    /// Hold out this share of --data (below 1), or this number of records, for the validation loss
    #[arg(long, value_name = "SHARE", conflicts_with = "val", value_parser = held_out)]
    #[serde(skip)]
    pub(super) split_validation: Option<HeldOut>,

    #[command(flatten)]
    #[serde(flatten)]
    pub(super) records: RecordArgs,

    #[command(flatten)]
    #[serde(flatten)]
    pub(super) position_rule: PositionRule,

    #[command(flatten)]
    #[serde(flatten)]
    pub(super) labels: LabelArgs,

    /// Part of a record that is read before step 1: pixels find damage, headers are faster
    #[arg(long, value_enum, default_value_t = Survey::Pixels)]
    #[serde(skip)]
    pub(super) survey: Survey,

    /// File of options, in TOML: names without dashes in front, such as micro-tokens = 2048; options
    /// given here win. Each run writes its own, options.toml
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    #[serde(skip)]
    pub(super) options: Option<PathBuf>,

    /// Folder for log.jsonl, the checkpoint, and at the end the adapter (in adapter/) or the model
    /// (in model/)
    #[arg(long, value_name = "DIR")]
    #[serde(skip)]
    pub(super) out: PathBuf,

    /// Continue from the checkpoint in --out, with its options
    #[arg(long)]
    #[serde(skip)]
    pub(super) resume: bool,

    /// Device: cpu, gpu (the first GPU), gpu:N, ascend (the first NPU), ascend:N, ascend-sim (a
    /// simulated NPU), ascend-sim:N, or remote:ws://HOST:PORT (a device that `mrope serve` serves).
    /// Repeatable; each device takes a part of every batch
    #[arg(long, default_value = "cpu")]
    #[serde(skip)]
    pub(super) device: Vec<Device>,

    #[command(flatten)]
    #[serde(skip)]
    pub(super) token: TokenArgs,

    /// Number of hosts; run one command with the same options on each
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count_in(1..=MOST_HOSTS))]
    #[arg(requires = "rendezvous")]
    #[serde(skip)]
    pub(super) hosts: usize,

    /// Index of this host, from 0
    #[arg(long, value_name = "R", default_value_t = 0)]
    #[serde(skip)]
    pub(super) host: usize,

    /// Rendezvous: address and free port of host 0; env: from a launcher's MASTER_ADDR and
    /// MASTER_PORT, with --hosts from WORLD_SIZE and --host from RANK
    #[arg(long, value_name = "HOST:PORT")]
    #[serde(skip)]
    pub(super) rendezvous: Option<String>,

    /// Longest wait for other ranks in a step
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = count_in(1..=86_400))]
    #[serde(skip)]
    pub(super) rank_timeout: usize,

    /// Shard the optimizer's state over the devices, for whole models
    #[arg(long, conflicts_with = "record_step")]
    #[serde(skip)]
    pub(super) shard_optimizer: bool,

    /// Type of weights and activations; adapters, masters and moments are f32
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub(super) precision: Precision,

    /// Passes over the data, unless --steps is given
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    #[serde(skip)]
    pub(super) epochs: u64,

    /// Steps, each over one batch
    #[arg(long, value_parser = count_in(1..=100_000_000))]
    #[serde(skip)]
    pub(super) steps: Option<usize>,

    /// Conversations per batch, whatever its cut
    #[arg(long, default_value_t = 8, value_parser = count_in(1..=1_000_000))]
    pub(super) batch: usize,

    /// Tokens per batch, without padding, instead of --batch
    #[arg(long, value_name = "TOKENS", conflicts_with = "batch")]
    #[arg(value_parser = count_in(1..=1_073_741_824))]
    pub(super) batch_tokens: Option<usize>,

    /// Most tokens per micro-batch
    #[arg(long, value_name = "TOKENS", default_value_t = 4096)]
    #[arg(value_parser = count_in(1..=16_777_216))]
    #[serde(skip)]
    pub(super) micro_tokens: usize,

    /// Samples end to end in one row, or in padded rows
    #[arg(long, value_enum, default_value_t = CutChoice::Packed)]
    #[serde(skip)]
    pub(super) cut: CutChoice,

    /// Train the weights instead of adapters
    #[arg(long)]
    #[arg(conflicts_with_all = ["rank", "alpha", "dropout", "rslora", "targets", "adapter", "full_parts"])]
    pub(super) full: bool,

    /// Parts of the model to train, separated by commas [default: decoder]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(super) parts: Vec<PartChoice>,

    #[command(flatten)]
    #[serde(flatten)]
    pub(super) what: TrainedArgs,

    /// Rank of the adapters [default: 8]
    #[arg(long, value_parser = count_in(1..=65_536))]
    pub(super) rank: Option<usize>,

    /// Adapters are scaled by alpha / rank, with --rslora alpha / sqrt(rank) [default: twice the
    /// rank]
    #[arg(long)]
    pub(super) alpha: Option<f64>,

    /// Dropout before the adapters [default: 0]
    #[arg(long)]
    pub(super) dropout: Option<f64>,

    /// Use the rank-stabilised scale
    #[arg(long)]
    pub(super) rslora: bool,

    /// Linear layers with adapters, comma-separated: name suffixes like q_proj, or regular
    /// expressions of whole names; all-linear: all in the parts [default: all-linear]
    #[arg(long, value_name = "NAMES")]
    pub(super) targets: Vec<String>,

    /// Peak learning rate [default: 1e-4, with --full 1e-5]
    #[arg(long, value_name = "RATE")]
    pub(super) learning_rate: Option<f64>,

    /// Learning rate of the vision tower [default: --learning-rate]
    #[arg(long, value_name = "RATE")]
    pub(super) tower_rate: Option<f64>,

    /// Learning rate of the merger [default: --learning-rate]
    #[arg(long, value_name = "RATE")]
    pub(super) merger_rate: Option<f64>,

    /// Decay of the learning rate
    #[arg(long, value_enum, default_value_t = ScheduleChoice::Cosine)]
    pub(super) schedule: ScheduleChoice,

    /// Steps of linear decay at the end, for --schedule wsd [default: a tenth of the steps]
    #[arg(long, value_name = "STEPS")]
    #[serde(skip)]
    pub(super) decay_steps: Option<usize>,

    /// Least learning rate after decay, as a share of the peak
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = share)]
    pub(super) least_rate: f64,

    /// Steps of warm-up [default: --warmup]
    #[arg(long, value_name = "STEPS", conflicts_with = "warmup")]
    #[serde(skip)]
    pub(super) warmup_steps: Option<usize>,

    /// Share of the steps for the warm-up
    #[arg(long, value_name = "SHARE", default_value_t = 0.03, value_parser = share)]
    #[serde(skip)]
    pub(super) warmup: f64,

    /// Decay of the optimizer's two moments per step
    #[arg(long, num_args = 2, value_names = ["FIRST", "SECOND"], default_values_t = [0.9, 0.999])]
    pub(super) betas: Vec<f64>,

    /// Number added to the root of the second moment
    #[arg(long, default_value_t = 1e-8)]
    pub(super) epsilon: f64,

    /// Weight decay of matrices
    #[arg(long, default_value_t = 0.0)]
    pub(super) weight_decay: f64,

    /// Clip the global gradient norm at this; 0: never
    #[arg(long, default_value_t = 1.0)]
    pub(super) max_norm: f64,

    /// Divisor of losses: the tokens of the whole batch, or micro-batches (each by its tokens, then
    /// their mean, as in transformers)
    #[arg(long, value_enum, default_value_t = RuleChoice::Tokens)]
    pub(super) loss_rule: RuleChoice,

    /// Keep activations instead of recomputing layers
    #[arg(long)]
    #[serde(skip)]
    pub(super) no_recompute: bool,

    /// Update 16-bit weights in place, without f32 masters
    #[arg(long)]
    pub(super) no_masters: bool,

    /// Start from random weights, drawn from --seed
    #[arg(long)]
    pub(super) random_weights: bool,

    /// Seed of order, adapters and dropout
    #[arg(long, default_value_t = 0, value_parser = seed())]
    pub(super) seed: u64,

    /// Save a checkpoint every STEPS steps
    #[arg(long, value_name = "STEPS", default_value_t = 100)]
    #[arg(value_parser = count_in(1..=100_000_000))]
    #[serde(skip)]
    pub(super) checkpoint_every: usize,

    /// Also save a checkpoint every MINUTES minutes, and the first one after half a minute
    #[arg(long, value_name = "MINUTES", default_value_t = 10.0, value_parser = above_0)]
    #[serde(skip)]
    pub(super) checkpoint_minutes: f64,

    /// Number of checkpoints to keep
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = count_in(1..=100_000))]
    #[serde(skip)]
    pub(super) keep: usize,

    /// Stop after this number of validations without a lower loss
    #[arg(long, value_name = "NUMBER", value_parser = count_in(1..=100_000))]
    #[serde(skip)]
    pub(super) patience: Option<usize>,

    /// Measure the validation loss and answer --samples every STEPS steps, and at the end
    #[arg(long, value_name = "STEPS", default_value_t = 100)]
    #[arg(value_parser = count_in(1..=100_000_000))]
    #[serde(skip)]
    pub(super) validate_every: usize,

    /// Record step N in --out, for `mrope compare`
    #[arg(long, value_name = "N", value_parser = count_in(1..=100_000_000))]
    #[serde(skip)]
    pub(super) record_step: Option<usize>,

    /// Train nothing: compute one step with its batch cut in four ways, and print the largest
    /// differences
    #[arg(long)]
    #[serde(skip)]
    pub(super) prove_cut: bool,

    /// Train nothing: print the memory of a step, from shapes alone, and the largest micro-batch
    /// that fits
    #[arg(long, conflicts_with = "prove_cut")]
    #[serde(skip)]
    pub(super) plan: bool,

    /// Memory of the device, for --plan [default: what this machine has available]
    #[arg(long, value_name = "GIB", requires = "plan", value_parser = above_0)]
    #[serde(skip)]
    pub(super) memory: Option<f64>,

    /// Answer the first NUMBER conversations of the validation data, else of --data, before the first step, after
    /// each validation and at the end
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    #[arg(value_parser = count_in(0..=1000))]
    #[serde(skip)]
    pub(super) samples: usize,

    /// Print no progress; warnings and errors remain
    #[arg(long)]
    #[serde(skip)]
    pub(super) quiet: bool,

    /// All of these as a file of options.
    #[arg(skip)]
    #[serde(skip)]
    pub(crate) written: String,
}

/// The reading of records before the first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Survey {
    /// Decode every picture once
    Pixels,
    /// Read headers of pictures alone
    Headers,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Precision {
    F32,
    Bf16,
    /// With a dynamic loss scale
    F16,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum CutChoice {
    /// End to end in one row
    Packed,
    /// Padded rows of similar lengths
    Padded,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PartChoice {
    Tower,
    Merger,
    Decoder,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum ScheduleChoice {
    Constant,
    Linear,
    Cosine,
    /// Warm-up, stable, decay
    Wsd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum RuleChoice {
    Tokens,
    MicroBatches,
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("a number from 0 to 1 is expected".to_owned()),
    }
}

fn held_out(text: &str) -> Result<HeldOut, String> {
    let share = text
        .parse::<f64>()
        .ok()
        .filter(|share| 0.0 < *share && *share < 1.0);
    let records = text.parse::<usize>().ok().filter(|records| *records > 0);
    share
        .map(HeldOut::Share)
        .or(records.map(HeldOut::Records))
        .ok_or_else(|| "a share between 0 and 1 or a number of records is expected".to_owned())
}

fn above_0(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("a number above 0 is expected".to_owned()),
    }
}

/// The names that all linear layers have in other programs.
const ALL_LINEAR: [&str; 2] = ["all-linear", "all"];

/// The targets of a list, cut at the commas that are in no bracket of a regular expression.
pub(super) fn targets(given: &[String]) -> Vec<String> {
    let mut targets = Vec::new();
    for text in given {
        let (mut depth, mut is_escaped, mut start) = (0_usize, false, 0);
        for (place, letter) in text.char_indices() {
            match letter {
                _ if is_escaped => is_escaped = false,
                '\\' => is_escaped = true,
                '(' | '[' | '{' => depth += 1,
                ')' | ']' | '}' => depth = depth.saturating_sub(1),
                ',' if depth == 0 => {
                    targets.push(text[start..place].to_owned());
                    start = place + 1;
                }
                _ => {}
            }
        }
        targets.push(text[start..].to_owned());
    }
    targets.retain(|target| !target.is_empty());
    if targets
        .iter()
        .any(|target| ALL_LINEAR.contains(&&target[..]))
    {
        targets.clear();
    }
    targets
}

impl FinetuneArgs {
    /// The type of weights and activations.
    pub(super) fn dtype(&self) -> DType {
        match self.precision {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F16 => DType::F16,
        }
    }

    /// The options with the defaults that others decide.
    ///
    /// # Errors
    /// For options that contradict each other.
    pub(super) fn resolved(mut self) -> Result<Self, String> {
        let default = if self.full { 1e-5 } else { 1e-4 };
        let rate = *self.learning_rate.get_or_insert(default);
        self.tower_rate.get_or_insert(rate);
        self.merger_rate.get_or_insert(rate);
        let (most, micro) = (self.records.max_tokens, self.micro_tokens);
        if let Some(most) = most.filter(|most| *most > micro) {
            return Err(format!(
                "--max-tokens {most} is above --micro-tokens {micro}, which holds at least one \
                 conversation; raise --micro-tokens"
            ));
        }
        self.records.max_tokens = Some(most.unwrap_or(micro));
        if self.decay_steps.is_some() && self.schedule != ScheduleChoice::Wsd {
            return Err("--decay-steps is for --schedule wsd; leave it out".to_owned());
        }
        if self.patience.is_some() && self.val.is_empty() && self.split_validation.is_none() {
            return Err("--patience needs validation data: --val or --split-validation".to_owned());
        }
        Ok(self)
    }

    /// The options that determine the numbers of a run, by name.
    pub(super) fn identity(&self) -> Identity {
        let Ok(Value::Object(options)) = serde_json::to_value(self) else {
            return Identity::new();
        };
        let mut options: Identity = options.into_iter().collect();
        if self.records.too_long != TooLong::DropTurns {
            // The fingerprint of the data knows which records are left out.
            options.remove("max-tokens");
        }
        // Those that follow from others, or matter by others, are compared after them.
        let derived = ["alpha", "learning-rate", "tower-rate", "merger-rate"];
        let derived =
            derived.map(|name| (name.to_owned(), options.remove(name).unwrap_or_default()));
        let mut derived: serde_json::Map<String, Value> = derived.into_iter().collect();
        if self.loss_rule == RuleChoice::MicroBatches {
            derived.insert("micro-tokens".to_owned(), self.micro_tokens.into());
            derived.insert(
                "cut".to_owned(),
                format!("{:?}", self.cut).to_lowercase().into(),
            );
        }
        options.insert("derived".to_owned(), Value::Object(derived));
        options
    }

    /// The size of the batch of one update.
    pub(super) fn batch_size(&self) -> BatchSize {
        match self.batch_tokens {
            Some(tokens) => BatchSize::Tokens(tokens),
            None => BatchSize::Samples(self.batch),
        }
    }

    /// True if more than one device computes.
    pub(super) fn is_several(&self) -> bool {
        self.device.len() > 1 || self.hosts > 1
    }

    /// The options with what variables say of `--rendezvous env`: those that torchrun sets, and
    /// launchers like it. Each process is a host; LOCAL_RANK is added to the number of its NPU.
    ///
    /// # Errors
    /// For a variable that is missing or no number, and options that say the same.
    pub(super) fn with_variables(
        &self,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, String> {
        if self.rendezvous.as_deref() != Some(BY_VARIABLES) {
            return Ok(self.clone());
        }
        if self.hosts != 1 || self.host != 0 {
            return Err(
                "--rendezvous env takes hosts and host from WORLD_SIZE and RANK; leave --hosts and \
                 --host out"
                    .to_owned(),
            );
        }
        let text = |name: &str| {
            variable(name).ok_or_else(|| {
                format!("--rendezvous env needs the variable {name}, which launchers set")
            })
        };
        let number = |name: &str, text: String, most: usize| match text.parse::<usize>() {
            Ok(number) if number <= most => Ok(number),
            _ => Err(format!(
                "{name} is {text:?}, expected a number of at most {most}"
            )),
        };
        let required = |name: &str, most: usize| number(name, text(name)?, most);
        let port = required("MASTER_PORT", usize::from(u16::MAX) - 1)?;
        // torchrun's own store is at MASTER_PORT then.
        let is_taken = variable("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
        let address = text("MASTER_ADDR")?;
        let address = if address.contains(':') {
            format!("[{address}]")
        } else {
            address
        };
        let mut args = self.clone();
        args.rendezvous = Some(format!("{address}:{}", port + usize::from(is_taken)));
        args.hosts = required("WORLD_SIZE", MOST_HOSTS)?.max(1);
        args.host = required("RANK", MOST_HOSTS)?;
        let refuses = |device| args.token.expect_used(device).is_err();
        if args.hosts == 1 && args.device.iter().all(refuses) {
            // The command is the same for any number of hosts, and one has nobody to meet.
            args.token = TokenArgs::default();
        }
        let Some(local) = variable("LOCAL_RANK") else {
            return Ok(args);
        };
        let local = number("LOCAL_RANK", local, MOST_HOSTS)? as u16;
        match &mut args.device[..] {
            [Device::Ascend(npu) | Device::AscendSim(npu)] => *npu = npu.saturating_add(local),
            [_] => {}
            several if local > 0 => {
                return Err(format!(
                    "LOCAL_RANK is {local}, and each process has {} devices; start one process per \
                     host, or name one --device",
                    several.len()
                ));
            }
            _ => {}
        }
        Ok(args)
    }

    /// The part of the optimizer's state that each of several devices keeps.
    pub(super) fn optimizer_state(&self) -> OptimizerState {
        if self.shard_optimizer {
            OptimizerState::Sharded
        } else {
            OptimizerState::Replicated
        }
    }

    /// Bytes that HCCL takes of each NPU for itself.
    pub(super) fn hccl_bytes(&self) -> usize {
        let is_npu = matches!(self.device[0], Device::Ascend(_) | Device::AscendSim(_));
        if is_npu && self.is_several() {
            CommunicatorOptions::new(1, 0).bytes()
        } else {
            0
        }
    }

    pub(super) fn recipe(&self, steps: usize) -> Recipe {
        let rate = self.learning_rate.unwrap_or_default();
        Recipe {
            steps,
            trained: self.what.trained.clone(),
            rates: Rates {
                tower: self.tower_rate.unwrap_or(rate),
                merger: self.merger_rate.unwrap_or(rate),
                decoder: rate,
            },
            schedule: match self.schedule {
                ScheduleChoice::Constant => Schedule::Constant,
                ScheduleChoice::Linear => Schedule::Linear,
                ScheduleChoice::Cosine => Schedule::Cosine,
                ScheduleChoice::Wsd => Schedule::Wsd,
            },
            warmup_steps: self.warmup_steps.unwrap_or_else(|| {
                let steps_of_share = (self.warmup * steps as f64).ceil() as usize;
                // A share below all leaves a step whose rate is not 0.
                match self.warmup < 1.0 {
                    true => steps_of_share.min(steps.saturating_sub(1)),
                    false => steps_of_share,
                }
            }),
            decay_steps: match self.schedule {
                ScheduleChoice::Wsd => self.decay_steps.unwrap_or(steps.div_ceil(10)),
                _ => 0,
            },
            least_share: self.least_rate,
            betas: [self.betas[0], self.betas[1]],
            epsilon: self.epsilon,
            weight_decay: self.weight_decay,
            max_norm: (self.max_norm != 0.0).then_some(self.max_norm),
            loss_rule: match self.loss_rule {
                RuleChoice::Tokens => LossRule::Tokens,
                RuleChoice::MicroBatches => LossRule::MicroBatches,
            },
            masters: !self.no_masters,
            loss_scale: (self.precision == Precision::F16).then_some(LOSS_SCALE),
            recompute: !self.no_recompute,
            seed: self.seed,
        }
    }

    pub(super) fn loader_options(&self) -> LoaderOptions {
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
            on_error: match self.records.on_error {
                OnFault::Stop => OnError::Stop,
                OnFault::Skip => OnError::Skip,
            },
            ..LoaderOptions::new(self.batch_size(), cut)
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: FinetuneArgs,
    }

    fn read(options: &str, variables: &[(&str, &str)]) -> Result<FinetuneArgs, String> {
        let fixed = "finetune model --data data --out out --rendezvous env";
        let line = fixed.split_whitespace().chain(options.split_whitespace());
        let args = Line::try_parse_from(line).expect("it parses").args;
        args.with_variables(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn targets_are_cut_at_commas_outside_of_brackets() {
        for (given, expected) in [
            (
                r"layers\.[0-9]{1,2}\.q_proj",
                &[r"layers\.[0-9]{1,2}\.q_proj"][..],
            ),
            ("q_proj,v_proj", &["q_proj", "v_proj"]),
            (r"(a,b)\,c,[,x],d\{,e", &[r"(a,b)\,c", "[,x]", r"d\{", "e"]),
            ("all-linear", &[]),
            ("all", &[]),
            ("q_proj,", &["q_proj"]),
        ] {
            assert_eq!(targets(&[given.to_owned()]), expected, "{given}");
        }
    }

    #[test]
    fn a_launchers_variables_say_who_meets_where() {
        let two = [
            ("MASTER_ADDR", "fe80::1"),
            ("MASTER_PORT", "29500"),
            ("WORLD_SIZE", "4"),
            ("RANK", "3"),
        ];
        let args = read("--device ascend:2", &two).expect("complete");
        assert_eq!((args.hosts, args.host), (4, 3));
        assert_eq!(args.rendezvous.as_deref(), Some("[fe80::1]:29500"));
        assert_eq!(args.device, [Device::Ascend(2)]);
        let torchrun_variables = [
            &two[..],
            &[
                ("LOCAL_RANK", "1"),
                ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ],
        ];
        let args = read("--device ascend:2", &torchrun_variables.concat()).expect("complete");
        assert_eq!(args.rendezvous.as_deref(), Some("[fe80::1]:29501"));
        assert_eq!(args.device, [Device::Ascend(3)]);
        let alone = [&two[..2], &[("WORLD_SIZE", "1"), ("RANK", "0")]].concat();
        for (device, has_token) in [("ascend", false), ("remote:ws://h:1", true)] {
            let options = format!("--device {device} --token-file f");
            let args = read(&options, &alone).expect("complete");
            assert_eq!(args.token != TokenArgs::default(), has_token, "{device}");
        }
        for (options, variables, says) in [
            ("", &two[..3], "needs the variable RANK"),
            ("--hosts 2", &two[..], "leave --hosts and --host out"),
            (
                "",
                &[&[("MASTER_PORT", "x")], &two[..]].concat(),
                "MASTER_PORT is \"x\", expected a number of at most 65534",
            ),
            (
                "--device ascend --device ascend:1",
                &torchrun_variables.concat(),
                "each process has 2 devices",
            ),
        ] {
            let error = read(options, variables).map(drop).expect_err(says);
            assert!(error.contains(says), "{error}");
        }
    }
}

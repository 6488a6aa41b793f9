//! The options of a fine-tuning run.

use std::path::PathBuf;

use burn::tensor::DType;
use clap::{Args, Parser, ValueEnum, ValueHint};
use serde::Serialize;
use serde_json::{Map, Value};
use vlm_data::{BatchSize, Cut, HeldOut, LoaderOptions, OnError, Share};
use vlm_models::VlmConfig;
use vlm_models::rope_core::position_ids::Compatibility;

use super::loss::{LossChoice, LossOptions};
use super::parse::{above_0, count_in, seed};
use super::parts::LayerRange;
use super::records::{DataFile, Faulty, LabelOptions, RecordOptions, TooLong};
use crate::checkpoint::Identity;
use crate::error::{Result, VlmTrainError};
use crate::recipe::{LossRule, Rates, Recipe, TrainedParts};
use crate::schedule::Schedule;

/// The initial loss scale in f16.
const LOSS_SCALE: f64 = 65_536.0;
/// The number of epochs if the number of steps decides.
const ENDLESS: u64 = u64::MAX;

/// The options of a fine-tuning run, which a program may flatten into its own.
///
/// Serialised, it has the options that determine the numbers of a run: a checkpoint of others is
/// refused.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct FinetuneConfig {
    /// Model folder: config.json, weights, tokenizer, chat template, preprocessor
    #[arg(value_hint = ValueHint::DirPath)]
    #[serde(skip)]
    pub folder: PathBuf,

    /// The data.
    #[command(flatten, next_help_heading = "Data")]
    #[serde(flatten)]
    pub data: DataOptions,

    /// The batches.
    #[command(flatten, next_help_heading = "Batch")]
    #[serde(flatten)]
    pub batch: BatchOptions,

    /// The loss.
    #[command(flatten, next_help_heading = "Loss")]
    #[serde(flatten)]
    pub loss: LossOptions,

    /// The trained parts.
    #[command(flatten, next_help_heading = "Trained parts")]
    #[serde(flatten)]
    pub trained: TrainedOptions,

    /// The optimizer.
    #[command(flatten, next_help_heading = "Optimizer")]
    #[serde(flatten)]
    pub optimizer: OptimizerOptions,

    /// The folder of the run.
    #[command(flatten, next_help_heading = "Output")]
    #[serde(flatten)]
    pub output: OutputOptions,
}

/// The data of a run, and its reading.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct DataOptions {
    /// Conversations: JSON lines or an array, in any of six formats. Repeatable; FILE#500 takes a
    /// file's first 500 records, FILE#0.5x half of them and FILE#3x each three times an epoch
    #[arg(long, value_name = "FILE", required = true)]
    #[serde(skip)]
    pub data: Vec<DataFile>,

    /// Conversations for the validation loss. Repeatable
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    #[serde(skip)]
    pub val: Vec<PathBuf>,

    /// Fraction (below 1) or number of the records of --data to hold out for the validation loss
    #[arg(long, value_name = "SHARE", conflicts_with = "val", value_parser = held_out)]
    #[serde(skip)]
    pub split_validation: Option<HeldOut>,

    #[command(flatten)]
    #[serde(flatten)]
    /// Records and media.
    pub records: RecordOptions,

    #[command(flatten)]
    #[serde(flatten)]
    /// Position ids.
    pub position_rule: PositionRule,

    #[command(flatten)]
    #[serde(flatten)]
    /// Labels.
    pub labels: LabelOptions,

    /// Part of a record that is read before step 1; headers are faster
    #[arg(long, value_enum, default_value_t = SurveyDepth::Pixels)]
    #[serde(skip)]
    pub survey: SurveyDepth,
}

/// Batches and their cut.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct BatchOptions {
    /// Passes over the data, unless --steps is given
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    #[serde(skip)]
    pub epochs: u64,

    /// Number of optimizer steps, instead of --epochs
    #[arg(long, value_parser = count_in(1..=100_000_000))]
    #[serde(skip)]
    pub steps: Option<usize>,

    /// Conversations per optimizer step
    #[arg(long, default_value_t = 8, value_parser = count_in(1..=1_000_000))]
    pub batch: usize,

    /// Tokens per optimizer step, without padding, instead of --batch
    #[arg(long, value_name = "TOKENS", conflicts_with = "batch")]
    #[arg(value_parser = count_in(1..=1_073_741_824))]
    pub batch_tokens: Option<usize>,

    /// Maximum tokens per micro-batch
    #[arg(long, value_name = "TOKENS", default_value_t = 4096)]
    #[arg(value_parser = count_in(1..=16_777_216))]
    #[serde(skip)]
    pub micro_tokens: usize,

    /// Pack samples into one row, or pad them
    #[arg(long = "batching", alias = "cut", value_name = "BATCHING")]
    #[arg(value_enum, default_value_t = CutChoice::Packed)]
    #[serde(skip)]
    pub cut: CutChoice,

    /// How to average the loss: over all labelled tokens, or as the mean of the means of
    /// micro-batches (transformers' rule)
    #[arg(long, value_enum, default_value_t = RuleChoice::Tokens)]
    pub loss_rule: RuleChoice,

    /// Keep activations instead of recomputing layers
    #[arg(long)]
    #[serde(skip)]
    pub no_recompute: bool,
}

/// The trained parts of the model.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct TrainedOptions {
    /// Train the weights instead of adapters
    #[arg(long)]
    #[arg(conflicts_with_all = ["rank", "alpha", "dropout", "rslora", "targets", "adapter", "full_parts"])]
    pub full: bool,

    /// Trained parts, comma-separated: vision tower, merger (projector), decoder [default:
    /// decoder]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub parts: Vec<PartChoice>,

    /// Decoder layers to train, or to give adapters, from 0: 8-27, 24- or 0,4-7. With --full, word
    /// embeddings, last norm and head are frozen [default: all]
    #[arg(long, value_name = "LAYERS", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerRange>,

    /// Train word embeddings and output head too
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub train_embeddings: bool,

    /// Parts to train whole beside the adapters, comma-separated; they are saved with them
    #[arg(long, value_name = "PARTS", value_enum, value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub full_parts: Vec<PartChoice>,

    /// Start from the adapter in this folder, whose rank, alpha, dropout and layers are kept; the
    /// optimizer starts anew
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    #[arg(conflicts_with = "random_weights")]
    #[serde(skip)]
    pub adapter: Option<PathBuf>,

    /// Accept an --adapter that records another checkpoint; its names and shapes must still fit
    #[arg(long, requires = "adapter")]
    #[serde(skip)]
    pub any_base: bool,

    /// LoRA rank of the adapters [default: 8]
    #[arg(long, value_parser = count_in(1..=65_536))]
    pub rank: Option<usize>,

    /// LoRA alpha: adapters are scaled by alpha / rank, or alpha / sqrt(rank) with --rslora [default:
    /// twice the rank]
    #[arg(long)]
    pub alpha: Option<f64>,

    /// Dropout before the adapters [default: 0]
    #[arg(long)]
    pub dropout: Option<f64>,

    /// Use the rank-stabilised scale
    #[arg(long)]
    pub rslora: bool,

    /// Layers with adapters, comma-separated: name suffixes like q_proj or experts.down_proj, or
    /// regular expressions of whole names; all-linear: all linear ones in the parts
    /// [default: all-linear]
    #[arg(long, value_name = "NAMES")]
    pub targets: Vec<String>,

    /// Start from random weights, drawn from --seed
    #[arg(long)]
    pub random_weights: bool,
}

/// The optimizer.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct OptimizerOptions {
    /// Peak learning rate [default: 1e-4, with --full 1e-5]
    #[arg(long, value_name = "RATE")]
    pub learning_rate: Option<f64>,

    /// Learning rate of the vision tower [default: --learning-rate]
    #[arg(long, value_name = "RATE")]
    pub tower_rate: Option<f64>,

    /// Rate of the merger (projector) [default: --learning-rate]
    #[arg(long, alias = "projector-rate", value_name = "RATE")]
    pub merger_rate: Option<f64>,

    /// Decay of the learning rate
    #[arg(long, value_enum, default_value_t = ScheduleChoice::Cosine)]
    pub schedule: ScheduleChoice,

    /// Warm-up, as a fraction of all steps
    #[arg(long, value_name = "SHARE", default_value_t = 0.03, value_parser = share)]
    #[serde(skip)]
    pub warmup: f64,

    /// Warm-up in steps, instead of --warmup
    #[arg(long, value_name = "STEPS", conflicts_with = "warmup")]
    #[serde(skip)]
    pub warmup_steps: Option<usize>,

    /// Steps of the decay of --schedule wsd [default: a tenth of all]
    #[arg(long, value_name = "STEPS")]
    #[serde(skip)]
    pub decay_steps: Option<usize>,

    /// Final learning rate, as a fraction of the peak
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = share)]
    pub least_rate: f64,

    /// Decay of both moments per step
    #[arg(long, num_args = 2, value_names = ["FIRST", "SECOND"], default_values_t = [0.9, 0.999])]
    pub betas: Vec<f64>,

    /// Number added to the root of the second moment
    #[arg(long, default_value_t = 1e-8)]
    pub epsilon: f64,

    /// Weight decay of matrices
    #[arg(long, default_value_t = 0.0)]
    pub weight_decay: f64,

    /// Clip the global gradient norm at this; 0: never
    #[arg(long, default_value_t = 1.0)]
    pub max_norm: f64,

    /// Type of weights and activations; adapters stay in f32
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub precision: Precision,

    /// Update 16-bit weights in place, without f32 master weights
    #[arg(long = "no-master-weights", alias = "no-masters")]
    pub no_masters: bool,

    /// Seed of order, adapters and dropout
    #[arg(long, default_value_t = 0, value_parser = seed())]
    pub seed: u64,
}

/// The folder of a run.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct OutputOptions {
    /// Folder for log.jsonl, the checkpoint, and at the end the adapter (in adapter/) or the model
    /// (in model/)
    #[arg(long, value_name = "DIR")]
    #[serde(skip)]
    pub out: PathBuf,

    /// Continue from the checkpoint in --out, with its options
    #[arg(long)]
    #[serde(skip)]
    pub resume: bool,

    /// Save a checkpoint every STEPS steps
    #[arg(long, value_name = "STEPS", default_value_t = 100)]
    #[arg(value_parser = count_in(1..=100_000_000))]
    #[serde(skip)]
    pub checkpoint_every: usize,

    /// Also save one every MINUTES minutes
    #[arg(long, value_name = "MINUTES", default_value_t = 10.0, value_parser = above_0)]
    #[serde(skip)]
    pub checkpoint_minutes: f64,

    /// Number of checkpoints to keep
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = count_in(1..=100_000))]
    #[serde(skip)]
    pub keep: usize,

    /// Measure the validation loss and answer --samples every STEPS steps, and at the end
    #[arg(long, value_name = "STEPS", default_value_t = 100)]
    #[arg(value_parser = count_in(1..=100_000_000))]
    #[serde(skip)]
    pub validate_every: usize,

    /// Stop after this number of validations without a lower loss
    #[arg(long, value_name = "NUMBER", value_parser = count_in(1..=100_000))]
    #[serde(skip)]
    pub patience: Option<usize>,

    /// Answer the first NUMBER conversations (of the validation data if there are any) before step
    /// 1, after each validation and at the end
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    #[arg(value_parser = count_in(0..=1000))]
    #[serde(skip)]
    pub samples: usize,

    /// Record step N in --out, for `mrope compare`
    #[arg(long, value_name = "N", value_parser = count_in(1..=100_000_000))]
    #[serde(skip)]
    pub record_step: Option<usize>,
}

/// The reading of records before the first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SurveyDepth {
    /// Decode every picture once
    Pixels,
    /// Read headers of pictures alone
    Headers,
}

/// The type of weights and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
#[expect(missing_docs, reason = "names that --help lists in one line")]
pub enum Precision {
    F32,
    Bf16,
    /// With a dynamic loss scale
    F16,
}

/// The cut of a batch into micro-batches.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum CutChoice {
    /// End to end in one row
    Packed,
    /// Padded rows of similar lengths
    Padded,
}

/// A part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
#[expect(missing_docs, reason = "names that --help lists in one line")]
pub enum PartChoice {
    Tower,
    #[value(alias = "projector")]
    Merger,
    Decoder,
}

/// The learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
#[expect(missing_docs, reason = "names that --help lists in one line")]
pub enum ScheduleChoice {
    Constant,
    Linear,
    Cosine,
    /// Warm-up, stable, decay
    Wsd,
}

/// The divisor of losses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
#[expect(missing_docs, reason = "names that --help lists in one line")]
pub enum RuleChoice {
    Tokens,
    MicroBatches,
}

/// The rule or release whose ids are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
pub enum Version {
    /// The rule by which the models were designed
    Default,
    /// transformers 4.57
    #[value(name = "4.57", alias = "4.57.6")]
    V4_57,
    /// transformers 5.23 and 5.24
    #[value(name = "5.23", aliases = ["5.23.0", "5.24", "5.24.0"])]
    V5_23,
}

/// The rule of position ids of a model.
#[derive(Args, Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct PositionRule {
    /// Rule of position ids: as designed, or that of a release of transformers, to continue its
    /// runs
    #[arg(long, value_enum, default_value_t = Version::Default)]
    position_rule: Version,
}

impl PositionRule {
    /// A model's configuration with this rule.
    pub fn of(self, config: VlmConfig) -> VlmConfig {
        config.with_compatibility(self.position_rule.into())
    }
}

impl From<Version> for Compatibility {
    fn from(version: Version) -> Self {
        match version {
            Version::Default => Self::Exact,
            Version::V4_57 => Self::Transformers4_57,
            Version::V5_23 => Self::Transformers5_23,
        }
    }
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

/// Options as a program's arguments, which state the defaults.
#[derive(Parser)]
struct Line {
    #[command(flatten)]
    config: FinetuneConfig,
}

impl FinetuneConfig {
    /// The default options for a model's folder, a file of conversations and the folder of a run.
    ///
    /// # Errors
    /// [`VlmTrainError::Options`] if the name of the file has a share (`FILE#0.5x`) that none can
    /// have.
    pub fn new(
        folder: impl Into<PathBuf>,
        data: impl Into<PathBuf>,
        out: impl Into<PathBuf>,
    ) -> Result<Self> {
        let data: PathBuf = data.into();
        let file = match data.to_str() {
            Some(text) => text.parse().map_err(VlmTrainError::Options)?,
            None => DataFile {
                path: data,
                share: Share::Whole,
            },
        };
        let parsed = Line::try_parse_from(["run", "--data", "data", "--out", "out", "folder"]);
        let parsed = parsed.map_err(|error| VlmTrainError::Options(error.to_string()))?;
        let mut config = parsed.config;
        config.folder = folder.into();
        config.data.data = vec![file];
        config.output.out = out.into();
        Ok(config)
    }

    /// The type of weights and activations.
    pub fn dtype(&self) -> DType {
        match self.optimizer.precision {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F16 => DType::F16,
        }
    }

    /// The options with the defaults that others decide.
    ///
    /// # Errors
    /// [`VlmTrainError::Options`] for options that contradict each other.
    pub(super) fn resolved(mut self) -> Result<Self> {
        let wrong = |reason: &str| Err(VlmTrainError::Options(reason.to_owned()));
        let default = if self.trained.full { 1e-5 } else { 1e-4 };
        let optimizer = &mut self.optimizer;
        let rate = *optimizer.learning_rate.get_or_insert(default);
        optimizer.tower_rate.get_or_insert(rate);
        optimizer.merger_rate.get_or_insert(rate);
        let (most, micro) = (self.data.records.max_tokens, self.batch.micro_tokens);
        if let Some(most) = most.filter(|most| *most > micro) {
            return wrong(&format!(
                "--max-tokens {most} is above --micro-tokens {micro}, which holds at least one \
                 conversation; raise --micro-tokens"
            ));
        }
        // A sampled answer follows the prompt.
        let most_new = self.loss.policy().map_or(0, |policy| policy.max_new);
        let room = micro.saturating_sub(most_new);
        if room == 0 || most.is_some_and(|most| most > room) {
            let most = most.map_or(String::new(), |most| format!(", --max-tokens {most}"));
            return wrong(&format!(
                "--micro-tokens {micro} holds at least one conversation and a sampled answer of \
                 --max-new {most_new} tokens{most}; raise --micro-tokens"
            ));
        }
        self.data.records.max_tokens = Some(most.unwrap_or(room));
        if optimizer.decay_steps.is_some() && optimizer.schedule != ScheduleChoice::Wsd {
            return wrong("--decay-steps is for --schedule wsd; leave it out");
        }
        if self.output.patience.is_some() && !self.validates() {
            return wrong("--patience needs validation data: --val or --split-validation");
        }
        self.loss.check()?;
        if self.loss.loss != LossChoice::Sft {
            for (is_given, option) in [
                (
                    self.batch.loss_rule == RuleChoice::MicroBatches,
                    "--loss-rule micro-batches",
                ),
                (self.output.record_step.is_some(), "--record-step"),
                (
                    self.data.records.too_long == TooLong::DropTurns,
                    "--too-long drop-turns",
                ),
            ] {
                if is_given {
                    return wrong(&format!("{option} is for --loss sft; leave it out"));
                }
            }
        }
        if self.optimizer.betas.len() != 2 {
            return wrong("--betas has two numbers: the decay of each moment");
        }
        Ok(self)
    }

    /// The factor on the auxiliary loss of routers that a model asks for, unless the options state
    /// one.
    ///
    /// # Errors
    /// [`VlmTrainError::Options`] for a loss that the run cannot have.
    pub(super) fn choose_router_loss(&mut self, config: &VlmConfig) -> Result<()> {
        let experts = config.text.experts.as_ref();
        let of_model = experts.and_then(|experts| experts.router_loss);
        let factor = self.loss.router_loss.or(of_model);
        let factor = factor.filter(|factor| *factor != 0.0);
        let wrong = |reason: &str| Err(VlmTrainError::Options(reason.to_owned()));
        if factor.is_some() && experts.is_none() {
            return wrong("--router-loss is for models with experts; leave it out");
        }
        if factor.is_some() && self.loss.loss != LossChoice::Sft {
            return wrong(
                "--router-loss, or output_router_logits of config.json, is for --loss sft; give \
                 --router-loss 0",
            );
        }
        self.loss.router_loss = factor;
        Ok(())
    }

    /// True with validation data.
    pub fn validates(&self) -> bool {
        !self.data.val.is_empty() || self.data.split_validation.is_some()
    }

    /// The configuration of the model, with the rule of position ids.
    ///
    /// # Errors
    /// Those of [`VlmConfig::from_folder`].
    pub(super) fn model(&self) -> Result<VlmConfig> {
        let config = VlmConfig::from_folder(&self.folder)?;
        Ok(self.data.position_rule.of(config))
    }

    /// The options that determine the numbers of a run, by name.
    pub(super) fn identity(&self) -> Identity {
        let Ok(Value::Object(options)) = serde_json::to_value(self) else {
            return Identity::new();
        };
        let mut options: Identity = options.into_iter().collect();
        if self.data.records.too_long != TooLong::DropTurns {
            // The fingerprint of the data knows which records are left out.
            options.remove("max-tokens");
        }
        // Those that follow from others, or matter by others, are compared after them.
        let derived = ["alpha", "learning-rate", "tower-rate", "merger-rate"];
        let derived =
            derived.map(|name| (name.to_owned(), options.remove(name).unwrap_or_default()));
        let mut derived: Map<String, Value> = derived.into_iter().collect();
        if self.batch.loss_rule == RuleChoice::MicroBatches {
            derived.insert("micro-tokens".to_owned(), self.batch.micro_tokens.into());
            derived.insert(
                "cut".to_owned(),
                format!("{:?}", self.batch.cut).to_lowercase().into(),
            );
        }
        options.insert("derived".to_owned(), Value::Object(derived));
        options
    }

    /// The size of the batch of one update.
    fn batch_size(&self) -> BatchSize {
        match self.batch.batch_tokens {
            Some(tokens) => BatchSize::Tokens(tokens),
            None => BatchSize::Samples(self.batch.batch),
        }
    }

    /// The recipe of a run of a number of steps.
    pub(super) fn recipe(&self, trained: &TrainedParts, steps: usize) -> Recipe {
        let optimizer = &self.optimizer;
        let rate = optimizer.learning_rate.unwrap_or_default();
        Recipe {
            steps,
            trained: trained.clone(),
            rates: Rates {
                tower: optimizer.tower_rate.unwrap_or(rate),
                merger: optimizer.merger_rate.unwrap_or(rate),
                decoder: rate,
            },
            schedule: match optimizer.schedule {
                ScheduleChoice::Constant => Schedule::Constant,
                ScheduleChoice::Linear => Schedule::Linear,
                ScheduleChoice::Cosine => Schedule::Cosine,
                ScheduleChoice::Wsd => Schedule::Wsd,
            },
            warmup_steps: optimizer.warmup_steps.unwrap_or_else(|| {
                let steps_of_share = (optimizer.warmup * steps as f64).ceil() as usize;
                // A share below all leaves a step whose rate is not 0.
                match optimizer.warmup < 1.0 {
                    true => steps_of_share.min(steps.saturating_sub(1)),
                    false => steps_of_share,
                }
            }),
            decay_steps: match optimizer.schedule {
                ScheduleChoice::Wsd => optimizer.decay_steps.unwrap_or(steps.div_ceil(10)),
                _ => 0,
            },
            least_share: optimizer.least_rate,
            betas: [optimizer.betas[0], optimizer.betas[1]],
            epsilon: optimizer.epsilon,
            weight_decay: optimizer.weight_decay,
            max_norm: (optimizer.max_norm != 0.0).then_some(optimizer.max_norm),
            loss_rule: match self.batch.loss_rule {
                RuleChoice::Tokens => LossRule::Tokens,
                RuleChoice::MicroBatches => LossRule::MicroBatches,
            },
            masters: !optimizer.no_masters,
            loss_scale: (optimizer.precision == Precision::F16).then_some(LOSS_SCALE),
            recompute: !self.batch.no_recompute,
            seed: optimizer.seed,
            router_loss: self.loss.router_loss,
            preference: self.loss.preference(),
            policy: self.loss.policy(),
        }
    }

    /// The options of the loader of training batches.
    pub fn loader_options(&self) -> LoaderOptions {
        let tokens = self.batch.micro_tokens;
        let cut = match self.batch.cut {
            CutChoice::Packed => Cut::Packed { tokens },
            CutChoice::Padded => Cut::Padded { tokens },
        };
        LoaderOptions {
            is_alone: self.loss.policy().is_some(),
            seed: Some(self.optimizer.seed),
            epochs: match self.batch.steps {
                Some(_) => ENDLESS,
                None => self.batch.epochs,
            },
            on_error: match self.data.records.on_error {
                Faulty::Stop => OnError::Stop,
                Faulty::Skip => OnError::Skip,
            },
            ..LoaderOptions::new(self.batch_size(), cut)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}

//! A fine-tuning run as a call: from a model's folder and data files to a saved adapter or model.

mod config;
mod data;
mod keys;
mod loss;
pub mod parse;
mod parts;
mod policy;
mod records;
mod team;
mod weights;

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use burn::tensor::Device;
use vlm_data::text::Trained;
use vlm_data::{BatchSize, DataSet, GlobalBatch, Loader, LoaderOptions, SampleEncoder};
use vlm_models::{GenerationConfig, VlmConfig};

pub use self::config::{
    BatchOptions, CutChoice, DataOptions, FinetuneConfig, OptimizerOptions, OutputOptions,
    PartChoice, PositionRule, Precision, RuleChoice, ScheduleChoice, SurveyDepth, TrainedOptions,
    Version,
};
use self::data::{Files, RunData};
pub use self::keys::in_options;
pub use self::loss::{LossChoice, LossOptions};
pub use self::parts::LayerRange;
pub use self::policy::PolicyOptions;
pub use self::records::{DataFile, Faulty, LabelOptions, RecordOptions, TooLong};
pub use self::team::{HostTeam, Team};
use crate::answer::{Questions, stop_tokens};
use crate::checkpoint::Identity;
use crate::context::ContextDivision;
use crate::error::{Result, VlmTrainError};
use crate::experts::ExpertDivision;
use crate::folder::RunFolder;
use crate::plan::{MemoryPlan, MicroShape};
use crate::ranks::{Collective, Rank, RankGroup};
use crate::recipe::{Recipe, TrainedParts};
use crate::rollout::Rollouts;
use crate::run::{Batches, Checkpoints, Ending, Event, RunOptions, run};
use crate::score::SameProof;
use crate::shards::Sharding;
use crate::trainer::{CutDifference, Trainer};

/// The folder of the adapter, and that of a model that was trained whole.
const ADAPTER: &str = "adapter";
const MODEL: &str = "model";
/// Bytes of validation samples that are made ahead.
const AHEAD_BYTES: usize = 64 << 20;
/// Records of which shares of patches and labels are taken.
const LOOKED_AT: usize = 1000;
/// More steps than any run has.
const MOST_STEPS: usize = 1 << 40;

/// An event before the first step.
#[derive(Clone, Copy, Debug)]
pub enum Notice<'a> {
    /// Something that is not as one would expect, but stops nothing.
    Warning(&'a str),
    /// Records of the data were read.
    Reading {
        /// `training` or `validation`.
        data: &'a str,
        /// Records read.
        done: usize,
        /// All records.
        all: usize,
    },
}

/// Receives events before the first step, from several threads.
pub type Notify<'a> = &'a (dyn Fn(Notice<'_>) + Sync);

/// Follows the training of a rank. Each method has a default that does nothing.
pub trait Watch {
    /// The model is loaded, with the optimizer's state of a continued run.
    fn begins(&mut self, _trainer: &Trainer, _records: usize) {}

    /// A step over this batch begins.
    fn batch(&mut self, _batch: &GlobalBatch) {}

    /// An event of the run.
    fn event(&mut self, _event: Event<'_>) {}

    /// The last step is done, and the result not yet saved. `waiting` is the share of time that was
    /// spent waiting for data.
    fn ends(&mut self, _ending: Ending, _steps: usize, _waiting: f64) {}

    /// The memory in use in bytes, for the log.
    fn memory(&self) -> Option<u64> {
        None
    }
}

/// Follows nothing.
#[derive(Clone, Copy, Debug)]
pub struct Unwatched;

impl Watch for Unwatched {}

/// The number of ranks of a run, and the place of this process among them.
#[derive(Clone, Copy, Debug)]
pub struct RunRanks {
    /// The devices of all processes.
    pub all: usize,
    /// The tensors in shards.
    pub sharding: Sharding,
    /// The devices that divide the experts of a layer; 1 if each has all of them.
    pub expert_parallel: usize,
    /// The devices that divide the tokens of a micro-batch; 1 if each has its own micro-batches.
    pub context: usize,
    /// True for the process with the first rank, which writes the folder of the run.
    pub writes: bool,
}

impl Default for RunRanks {
    fn default() -> Self {
        Self {
            all: 1,
            sharding: Sharding::None,
            expert_parallel: 1,
            context: 1,
            writes: true,
        }
    }
}

/// The end of the training of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobEnd {
    /// This is not the first rank, which saves.
    Elsewhere,
    /// The result is in this folder.
    Saved(PathBuf),
    /// The run stopped on request after a checkpoint.
    Stopped,
}

/// A run whose options, model configuration and data files have been opened.
///
/// ```no_run
/// use burn::tensor::Device;
/// use vlm_train::job::{Finetune, FinetuneConfig};
///
/// let mut config = FinetuneConfig::new("model", "train.jsonl", "out")?;
/// config.batch.epochs = 1;
/// let saved = Finetune::open(config)?.run(&Device::flex())?;
/// println!("{}", saved.display());
/// # Ok::<(), vlm_train::VlmTrainError>(())
/// ```
#[derive(Debug)]
pub struct Finetune {
    options: FinetuneConfig,
    config: VlmConfig,
    trained: TrainedParts,
    encoder: Arc<SampleEncoder>,
    files: Files,
    ranks: RunRanks,
}

/// A run that is ready for its first step: all its records have been read.
#[derive(Debug)]
pub struct Job {
    options: FinetuneConfig,
    config: VlmConfig,
    encoder: Arc<SampleEncoder>,
    data: RunData,
    recipe: Recipe,
    plan: MemoryPlan,
    questions: Option<Questions>,
    identity: Identity,
    folder: RunFolder,
    ranks: RunRanks,
    stop: Arc<AtomicBool>,
}

/// A rank among others.
struct Member {
    rank: Rank,
    sums: Arc<dyn Collective>,
    /// The ranks of this process.
    locals: usize,
}

impl Finetune {
    /// Opens the model's folder and the data files of a run, and checks its options.
    ///
    /// # Errors
    /// [`VlmTrainError::Options`] for options that contradict each other, the model or an adapter;
    /// those of the folder and the files.
    pub fn open(options: FinetuneConfig) -> Result<Self> {
        let mut options = options.resolved()?;
        let config = options.model()?;
        options.choose_router_loss(&config)?;
        let trained = options.choose(&config)?;
        let mut samples = options.data.records.samples(Some(&options.data.labels));
        if options.loss.policy().is_some() {
            if samples.encode.trained == Trained::Everything {
                let text =
                    "--train-turns everything is for answers that the data have; leave it out";
                return Err(VlmTrainError::Options(text.to_owned()));
            }
            // The prompt ends where the last turn begins.
            samples.encode.trained = Trained::LastTurn;
        }
        let encoder = Arc::new(SampleEncoder::from_folder(&options.folder, samples)?);
        let files = Files::open(&options)?;
        Ok(Self {
            options,
            config,
            trained,
            encoder,
            files,
            ranks: RunRanks::default(),
        })
    }

    /// The same run on several devices.
    ///
    /// # Errors
    /// [`VlmTrainError::Options`] for shards or experts divided on one device, or of a run that
    /// cannot have them.
    pub fn with_ranks(mut self, ranks: RunRanks) -> Result<Self> {
        let refused = |text: &str| Err(VlmTrainError::Options(text.to_owned()));
        if ranks.all == 1 && ranks.sharding > Sharding::None {
            return refused(
                "--shard divides tensors among devices; name several with --device, or leave it \
                 out",
            );
        }
        ranks
            .sharding
            .check(&self.options.recipe(&self.trained, MOST_STEPS))?;
        if ranks.sharding == Sharding::All && self.options.output.samples > 0 {
            return refused(
                "--shard all answers no questions, for which a device needs the whole weights; \
                 leave out --samples, or shard gradients at most",
            );
        }
        if ranks.expert_parallel != 1 {
            let division = ExpertDivision {
                size: ranks.expert_parallel,
                ranks: ranks.all,
                experts: self.config.text.experts.as_ref().map(|of| of.experts),
                sharding: ranks.sharding,
            };
            division.check(&self.options.recipe(&self.trained, MOST_STEPS))?;
            let output = &self.options.output;
            for (option, is_given) in [
                ("--samples", output.samples > 0),
                ("--record-step", output.record_step.is_some()),
            ] {
                if is_given {
                    let text = format!(
                        "--expert-parallel leaves no device with all weights, which {option} needs; \
                         leave one of them out"
                    );
                    return Err(VlmTrainError::Options(text));
                }
            }
        }
        if ranks.context != 1 {
            let division = ContextDivision {
                size: ranks.context,
                ranks: ranks.all,
                expert_parallel: ranks.expert_parallel,
            };
            division.check(&self.options.recipe(&self.trained, MOST_STEPS))?;
        }
        self.ranks = ranks;
        Ok(self)
    }

    /// The options, with the defaults that others and the model decide.
    pub fn options(&self) -> &FinetuneConfig {
        &self.options
    }

    /// What is trained.
    pub fn trained(&self) -> &TrainedParts {
        &self.trained
    }

    /// Plans the memory of a step on each device. The number of steps changes none.
    ///
    /// # Errors
    /// Those of [`MemoryPlan::new`].
    pub fn plan(&self) -> Result<MemoryPlan> {
        let recipe = self.options.recipe(&self.trained, MOST_STEPS);
        plan(&self.options, &self.config, &recipe, self.ranks)
    }

    /// Measures the first records: the sizes of all of them together, and the tokens of the longest.
    ///
    /// # Errors
    /// Those of the records.
    pub fn measure(&self) -> Result<(MicroShape, usize)> {
        let (mut all, mut longest) = (MicroShape::default(), 0);
        let mut reader = self.files.train.reader();
        for record in 0..self.files.train.len().min(LOOKED_AT) {
            let sample = self.encoder.encode_record(&mut reader, record, false)?;
            let shape = MicroShape::of_sample(&sample);
            longest = longest.max(shape.tokens);
            all.tokens += shape.tokens;
            all.patches += shape.patches;
            all.labelled += shape.labelled;
            all.sequences += shape.sequences;
        }
        Ok((all, longest))
    }

    /// Locks the folder of the run and reads every record once. `None` once `stop` is true, which
    /// also ends the training.
    ///
    /// # Errors
    /// [`VlmTrainError::Options`] for records that give no sample, unless the options leave them out;
    /// [`VlmTrainError::Locked`]; those of files and recipe.
    pub fn prepare(self, notify: Notify<'_>, stop: Arc<AtomicBool>) -> Result<Option<Job>> {
        // The recipe is refused before the records are read.
        self.plan()?;
        let Self {
            options,
            config,
            trained,
            encoder,
            files,
            ranks,
        } = self;
        let folder = match ranks.writes {
            true => RunFolder::own(&options.output.out)?,
            false => RunFolder::shared(&options.output.out),
        };
        let watch = (notify, &*stop);
        let data = files.survey(&options, &encoder, &trained, ranks.writes, watch)?;
        let Some(data) = data else {
            return Ok(None);
        };
        let least = data.lengths.iter().min().copied().unwrap_or(ranks.context);
        if least < ranks.context {
            return Err(VlmTrainError::Options(format!(
                "--context {} divides the tokens of each micro-batch, and a record has {least}; \
                 choose at most as many devices as tokens, or leave the record out",
                ranks.context
            )));
        }
        let steps = match options.batch.steps {
            Some(steps) => steps,
            None => {
                let batches = options.loader_options().batches(&data.lengths);
                usize::try_from(batches).unwrap_or(MOST_STEPS)
            }
        };
        let recipe = options.recipe(&trained, steps);
        Ok(Some(Job {
            plan: plan(&options, &config, &recipe, ranks)?,
            questions: questions(&options, &encoder, &data)?,
            identity: identity(&options, &data.train)?,
            recipe,
            data,
            folder,
            stop,
            options,
            config,
            encoder,
            ranks,
        }))
    }

    /// Trains on one device, and returns the folder of the adapter or the model.
    ///
    /// # Errors
    /// Those of [`prepare`](Self::prepare) and [`Job::train`].
    pub fn run(self, device: &Device) -> Result<PathBuf> {
        let job = self.prepare(&|_| {}, Arc::default())?;
        let trained = job.map(|job| job.train(device, &mut Unwatched));
        match trained.transpose()? {
            Some(JobEnd::Saved(folder)) => Ok(folder),
            _ => Err(VlmTrainError::Options("the run was stopped".to_owned())),
        }
    }
}

impl Job {
    /// The plan of the run's memory.
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// Trains on one device and saves the result.
    ///
    /// # Errors
    /// Those of the model, the data, the run and the device.
    pub fn train(&self, device: &Device, watch: &mut dyn Watch) -> Result<JobEnd> {
        self.train_rank(device, None, watch)
    }

    /// Trains on the devices of a team, one rank of `group` each. `watch` makes what follows a rank.
    ///
    /// # Errors
    /// [`VlmTrainError::Rank`] with the first rank that failed, on any host. A device may still wait
    /// for a rank that is gone then, and closing it would wait, too.
    pub fn train_ranks<W: Watch>(
        self,
        team: Arc<dyn Team>,
        group: &RankGroup,
        watch: impl Fn(&Rank) -> W + Send + Sync + 'static,
    ) -> Result<JobEnd> {
        let ended = group.run(move |rank| {
            let trained = team.join(rank).and_then(|sums| {
                let device = &team.devices()[rank.local()];
                let member = Member {
                    rank: rank.clone(),
                    sums,
                    locals: team.devices().len(),
                };
                self.train_rank(device, Some(member), &mut watch(rank))
            });
            trained.map_err(|error| error.to_string())
        })?;
        let first = ended.into_iter().find(|end| *end != JobEnd::Elsewhere);
        Ok(first.unwrap_or(JobEnd::Elsewhere))
    }

    fn train_rank(
        &self,
        device: &Device,
        member: Option<Member>,
        watch: &mut dyn Watch,
    ) -> Result<JobEnd> {
        let options = &self.options;
        let has_parts = self.ranks.sharding == Sharding::All || self.ranks.expert_parallel > 1;
        let in_parts = member.is_some() && has_parts && !options.trained.random_weights;
        let mut trainer = self.trainer(device, in_parts)?;
        let mut loading = options.loader_options();
        if let (Some(steps), BatchSize::Samples(samples)) = (options.batch.steps, loading.batch) {
            // Threads make no sample ahead that no step takes.
            let epoch_steps = self.data.train.len().div_ceil(samples);
            loading.epochs = steps.div_ceil(epoch_steps.max(1)) as u64;
        }
        if let Some(Member { rank, sums, locals }) = member {
            // Ranks that divide micro-batches have the same.
            let context = self.ranks.context;
            (loading.rank, loading.ranks) = (rank.rank() / context, rank.ranks() / context);
            loading.threads = loading.threads.div_ceil(locals);
            loading.ahead_bytes /= locals;
            trainer = trainer
                .with_ranks(rank, sums, self.ranks.sharding)?
                .with_expert_parallel(self.ranks.expert_parallel)?
                .with_context(self.ranks.context)?;
            if in_parts {
                trainer = trainer.with_parts_of(&self.config, &options.folder)?;
            }
        }
        let out = &options.output;
        if out.resume {
            trainer = trainer.resume(&out.out, &self.identity)?;
        }
        let rollouts = self.rollouts()?;
        watch.begins(&trainer, self.data.train.len());
        let is_first = trainer.is_first();
        let validating = LoaderOptions {
            // Of one micro-batch; several ranks would each build the samples of all.
            batch: match loading.ranks {
                1 => BatchSize::Tokens(options.batch.micro_tokens),
                _ => loading.batch,
            },
            seed: None,
            epochs: 1,
            ahead_bytes: AHEAD_BYTES.min(loading.ahead_bytes),
            ..loading.clone()
        };
        let loader = |set: &Arc<DataSet>, options, position| {
            Loader::new(self.encoder.clone(), set.clone(), options, position)
        };
        let mut loader_of_run = loader(&self.data.train, loading, trainer.position())?;
        let validation = || -> vlm_data::Result<Batches<'_>> {
            let set = self.data.validation.as_ref().unwrap_or(&self.data.train);
            Ok(Box::new(loader(set, validating.clone(), None)?))
        };
        let watch = RefCell::new(watch);
        let mut batches = loader_of_run.by_ref().inspect(|batch| {
            if let Ok(batch) = batch {
                watch.borrow_mut().batch(batch);
            }
        });
        let run_options = RunOptions {
            folder: &self.folder,
            identity: &self.identity,
            base: &options.folder,
            records: self.data.train.len(),
            checkpoints: Checkpoints {
                every: out.checkpoint_every,
                interval: Duration::from_secs_f64(60.0 * out.checkpoint_minutes),
                keep: out.keep,
            },
            validation: self.data.validation.is_some().then_some(&validation),
            rollouts: rollouts.as_ref(),
            patience: out.patience,
            questions: self.questions.as_ref(),
            validate_every: out.validate_every,
            record_step: out.record_step,
            memory: &|| watch.borrow().memory(),
            stop: &self.stop,
        };
        let mut report = |event: Event<'_>| watch.borrow_mut().event(event);
        let ending = run(&mut trainer, &mut batches, run_options, &mut report)?;
        if is_first {
            let (steps, waiting) = (trainer.steps(), loader_of_run.waiting_share());
            watch.borrow_mut().ends(ending, steps, waiting);
        }
        match ending {
            Ending::Stopped => Ok(JobEnd::Stopped),
            _ if is_first => self.save(&trainer).map(JobEnd::Saved),
            _ => {
                if trainer.has_parts() {
                    trainer.save_result(&out.out, &options.folder)?;
                }
                Ok(JobEnd::Elsewhere)
            }
        }
    }

    /// The rewards of sampled answers, if the loss is of them.
    fn rollouts(&self) -> Result<Option<Rollouts>> {
        let options = &self.options;
        let reward = options.loss.rewarded()?;
        let rollouts = reward.map(|reward| {
            let config = GenerationConfig::from_folder(&options.folder)?;
            let stop = stop_tokens(&config, &self.encoder);
            let cut = options.loader_options().cut;
            let RunData {
                train, validation, ..
            } = &self.data;
            let (train, validation) = (train.clone(), validation.clone());
            Rollouts::new(self.encoder.clone(), stop, &reward, cut, train, validation)
        });
        rollouts.transpose()
    }

    fn trainer(&self, device: &Device, in_parts: bool) -> Result<Trainer> {
        let recipe = self.recipe.clone();
        let placed = (device, in_parts);
        let trainer = weights::trainer(&self.options, &self.config, recipe, placed)?;
        let Some(folder) = &self.options.loss.reference else {
            return Ok(trainer);
        };
        let config = VlmConfig::from_folder(folder)?;
        let [expected, found] = [&self.config, &config].map(|config| config.text.vocab_size);
        if expected != found {
            return Err(VlmTrainError::Options(format!(
                "--reference has a vocabulary of {found} tokens, and the model of {expected}; name \
                 a model of the same tokenizer"
            )));
        }
        let config = self.options.data.position_rule.of(config);
        let model = config.load(folder, &device.clone().autodiff())?;
        Ok(trainer.with_reference(&model))
    }

    /// Saves the result, and returns its folder.
    fn save(&self, trainer: &Trainer) -> Result<PathBuf> {
        let (out, base) = (&self.options.output.out, &self.options.folder);
        Ok(match &trainer.recipe().trained {
            TrainedParts::Lora(_) => {
                let folder = out.join(ADAPTER);
                let probe = self.data.probe(&self.options, &self.encoder)?;
                trainer.save_adapter(&folder, base, &probe)?;
                folder
            }
            TrainedParts::Full(_) => {
                let folder = out.join(MODEL);
                trainer.save_result(&folder, base)?;
                folder
            }
        })
    }

    /// Computes one step over the first conversations in four cuts, and trains nothing. Returns the
    /// number of conversations and the largest differences.
    ///
    /// # Errors
    /// Those of the model, the data and the device.
    pub fn prove_cut(&self, device: &Device) -> Result<(usize, CutDifference)> {
        if self.recipe.policy.is_some() {
            let text = "--prove-cut is for losses of answers that the data have; leave it out";
            return Err(VlmTrainError::Options(text.to_owned()));
        }
        let trainer = self.trainer(device, false)?;
        let mut reader = self.data.train.reader();
        let mut samples = Vec::new();
        for record in 0..self.data.train.len().min(self.options.batch.batch) {
            samples.push(self.encoder.encode_record(&mut reader, record, true)?);
        }
        Ok((samples.len(), trainer.prove_cut(&samples)?))
    }

    /// Answers the first conversations, and compares the log-probabilities of the answers as they
    /// are generated, scored and trained on. Trains nothing.
    ///
    /// # Errors
    /// Those of the model, the data and the device.
    pub fn prove_same(&self, device: &Device) -> Result<SameProof> {
        let trainer = self.trainer(device, false)?;
        let count = self.options.batch.batch;
        trainer.prove_same(&first_questions(
            &self.options,
            &self.encoder,
            &self.data.train,
            count,
        )?)
    }
}

fn plan(
    options: &FinetuneConfig,
    config: &VlmConfig,
    recipe: &Recipe,
    ranks: RunRanks,
) -> Result<MemoryPlan> {
    let (dtype, divided) = (options.dtype(), ranks.expert_parallel);
    let mut plan = MemoryPlan::with_expert_parallel(config, recipe, dtype, divided)?;
    if options.loss.reference.is_some() {
        plan = plan.with_other_reference();
    }
    let plan = plan.with_ranks(ranks.all, ranks.sharding);
    Ok(plan.with_context(ranks.context))
}

/// The identity of the run: a checkpoint of another identity is refused.
fn identity(options: &FinetuneConfig, data: &DataSet) -> Result<Identity> {
    let mut identity = options.identity();
    let mut add = |name: &str, number: u64| {
        identity.insert(name.to_owned(), format!("{number:016x}").into());
    };
    add("weights", weights::fingerprint(&real(&options.folder)?)?);
    add("data", data.fingerprint());
    if let Some(adapter) = &options.trained.adapter {
        add("adapter", weights::fingerprint(adapter)?);
    }
    if let Some(reference) = &options.loss.reference {
        add("reference", weights::fingerprint(&real(reference)?)?);
    }
    Ok(identity)
}

fn real(folder: &Path) -> Result<PathBuf> {
    fs::canonicalize(folder).map_err(VlmTrainError::file("read", folder))
}

/// The first conversations of the validation data, or of the data, to be answered.
fn questions(
    options: &FinetuneConfig,
    encoder: &Arc<SampleEncoder>,
    data: &RunData,
) -> Result<Option<Questions>> {
    if options.output.samples == 0 {
        return Ok(None);
    }
    let set = data.validation.as_ref().unwrap_or(&data.train);
    first_questions(options, encoder, set, options.output.samples).map(Some)
}

/// The first conversations of a set, to be answered.
fn first_questions(
    options: &FinetuneConfig,
    encoder: &Arc<SampleEncoder>,
    set: &DataSet,
    count: usize,
) -> Result<Questions> {
    let mut reader = set.reader();
    let first = 0..set.len().min(count);
    let conversations = first.map(|record| reader.read(record));
    let conversations = conversations.collect::<vlm_data::Result<Vec<_>>>()?;
    let stop = stop_tokens(&GenerationConfig::from_folder(&options.folder)?, encoder);
    Questions::new(encoder.clone(), &conversations, stop)
}

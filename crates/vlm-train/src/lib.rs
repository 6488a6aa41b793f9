#![doc = include_str!("../README.md")]
//!
//! ## Modules
//!
//! | module | contents |
//! |---|---|
//! | `batch` | micro-batches as the model's input |
//! | `recipe` | everything that determines the numbers of a run |
//! | `schedule` | learning rates over the steps |
//! | `sums` | gradients summed in f32, their norm, clipping |
//! | `loss_scale` | the factor of losses in f16 |
//! | `optimizer` | AdamW with f32 masters and moments |
//! | `replicas` | a trainer that is one of several |
//! | `shards` | optimizer's state, gradients and weights divided among ranks |
//! | `experts` | experts divided among ranks, and the exchange of their tokens |
//! | `passes` | the passes of a batch, and the collectives within them |
//! | `trainer` | a step, validation, and the proof that the cut has no effect |
//! | `preference` | losses of preferences, one row each |
//! | `pairs` | steps over pairs of answers |
//! | `policy` | losses of rewarded answers, one row each |
//! | `groups` | steps over groups of rewarded answers |
//! | `reward` | rewards of answers: rules, one row each, or a command |
//! | `rollout` | answers that the model in training samples |
//! | `plan` | the memory of a step, from shapes alone |
//! | `checkpoint` | saving, and bit-exact continuation |
//! | `folder` | the folder of a run, and its lock |
//! | `log` | `log.jsonl` |
//! | `adapter` | saving a result, and proving that an adapter has an effect |
//! | `answer` | greedy answers of the model in training |
//! | `record` | a step as a file: samples of activations, gradients, weights and update |
//! | [`compare`] | two such files: their first difference and its likely cause |
//! | `ranks` | several devices and hosts: messages between ranks, and sums over them |
//! | `run` | the loop |
//! | [`job`] | a run as a call: options, data, model, devices, result |
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "test code"))]

mod adapter;
mod answer;
mod batch;
mod checkpoint;
pub mod compare;
mod context;
mod error;
mod experts;
mod folder;
mod groups;
pub mod job;
mod log;
mod loss_scale;
mod optimizer;
mod pairs;
mod passes;
mod plan;
mod policy;
mod preference;
mod ranks;
mod recipe;
mod record;
mod replicas;
mod reward;
mod rollout;
mod run;
mod schedule;
mod score;
mod shards;
mod sums;
mod system;
mod trainer;

pub use answer::{
    Answer, AnswerStream, Questions, answer_text, before_stop, last_answer, stop_tokens,
};
pub use batch::inputs;
pub use checkpoint::Identity;
pub use error::{Result, VlmTrainError};
pub use folder::RunFolder;
pub use groups::{AnswerGroup, PolicyReport, RewardedAnswer};
pub use pairs::PreferenceReport;
pub use plan::{MemoryPlan, MicroShape, StepMemory};
pub use policy::{Policy, PolicyLoss, RewardScale};
pub use preference::{Preference, PreferenceLoss};
pub use ranks::{Begun, Collective, HostSums, Rank, RankGroup, Rendezvous, RendezvousError};
pub use recipe::{LossRule, Rates, Recipe, TrainedParts};
pub use record::{RecordHeader, RecordRank, StepRecord};
pub use reward::{Reward, RewardRule};
pub use rollout::Rollouts;
pub use run::{Batches, Checkpoints, Ending, Event, RunOptions, run};
pub use schedule::Schedule;
pub use score::{SameProof, Score, ScoreDifference, score};
pub use shards::Sharding;
pub use system::{available_memory, resident_memory};
pub use trainer::{CutDifference, StepReport, Trainer};

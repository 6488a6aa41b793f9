//! The options of the loss.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use serde::{Serialize, Serializer};
use vlm_data::text::format::Answers;

use super::parse::{at_least_0, one_of};
use super::policy::PolicyOptions;
use crate::error::{Result, VlmTrainError};
use crate::policy::{Policy, PolicyLoss};
use crate::preference::{Preference, PreferenceLoss};
use crate::reward::Reward;

/// The loss, and the options of losses of preferences and of rewarded answers.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LossOptions {
    /// Loss: sft imitates answers; kto learns from answers with a label; grpo, dapo, bnpo and dr-grpo
    /// from answers that the model samples, by their rewards; the others from pairs of a chosen and a
    /// rejected answer
    #[arg(long, default_value = "sft", value_parser = one_of(&CHOICES, LossChoice::name))]
    #[serde(serialize_with = "name_of", skip_serializing_if = "LossChoice::is_sft")]
    pub loss: LossChoice,

    /// Factor on the auxiliary loss of routers; 0 saves a forward pass [default: as config.json
    /// says, or 0]
    #[arg(long, value_name = "FACTOR", value_parser = at_least_0)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_loss: Option<f64>,

    /// Factor on the rewards of preferences [default: 0.1], or on the divergence from the reference
    /// [default: 0]
    #[arg(long, value_name = "NUMBER", value_parser = at_least_0)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beta: Option<f64>,

    /// Probability that a preference is the wrong way round, for dpo, dpo-norm, dpo-robust, cpo and
    /// simpo [default: 0]
    #[arg(long, value_name = "SHARE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_smoothing: Option<f64>,

    /// Margin of the rewards that simpo wants [default: 0.5]
    #[arg(long, value_name = "NUMBER")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gamma: Option<f64>,

    /// Factor on the mean loss of the chosen answers' tokens, which is added [default: 1 for orpo and
    /// cpo, otherwise 0]
    #[arg(long, value_name = "FACTOR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub imitation: Option<f64>,

    /// Factors on the losses of good and of bad answers, for kto [default: 1 1]
    #[arg(long, num_args = 2, value_names = ["GOOD", "BAD"])]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub label_weights: Vec<f64>,

    /// Reference of dpo, dpo-norm, dpo-robust, hinge, ipo and kto, and with rewards: a model folder
    /// [default: the model at the start]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    #[serde(skip)]
    pub reference: Option<PathBuf>,

    /// Rewards.
    #[command(flatten, next_help_heading = "Rewards")]
    #[serde(flatten)]
    pub policy: PolicyOptions,
}

/// A loss by its name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LossChoice {
    /// Imitates answers.
    #[default]
    Sft,
    /// A loss of preferences.
    Preference(PreferenceLoss),
    /// A loss of sampled answers with rewards.
    Policy(PolicyLoss),
}

const PAIRS: usize = PreferenceLoss::ALL.len();
const CHOICES: [LossChoice; 1 + PAIRS + PolicyLoss::ALL.len()] = {
    let mut choices = [LossChoice::Sft; 1 + PAIRS + PolicyLoss::ALL.len()];
    let mut index = 1;
    while index < choices.len() {
        choices[index] = match index {
            1..=PAIRS => LossChoice::Preference(PreferenceLoss::ALL[index - 1]),
            _ => LossChoice::Policy(PolicyLoss::ALL[index - 1 - PAIRS]),
        };
        index += 1;
    }
    choices
};

impl LossChoice {
    fn name(self) -> &'static str {
        match self {
            Self::Sft => "sft",
            Self::Preference(loss) => loss.name(),
            Self::Policy(loss) => loss.name(),
        }
    }

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
    fn is_sft(&self) -> bool {
        *self == Self::Sft
    }

    /// The answers that a record must have.
    pub fn answers(self) -> Answers {
        match self {
            Self::Sft | Self::Policy(_) => Answers::One,
            Self::Preference(loss) if loss.is_of_marks() => Answers::Marked,
            Self::Preference(_) => Answers::Pair,
        }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn name_of<S: Serializer>(choice: &LossChoice, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(choice.name())
}

impl LossOptions {
    /// Checks that the options are those of the loss.
    ///
    /// # Errors
    /// [`VlmTrainError::Options`] with the option that needs another loss, or another value.
    pub(super) fn check(&self) -> Result<()> {
        let of_pairs = [
            ("--label-smoothing", self.label_smoothing.is_some()),
            ("--gamma", self.gamma.is_some()),
            ("--imitation", self.imitation.is_some()),
            ("--label-weights", !self.label_weights.is_empty()),
        ];
        let of_both = [
            ("--beta", self.beta.is_some()),
            ("--reference", self.reference.is_some()),
        ];
        let given = |options: &[(&'static str, bool)]| {
            let given = options.iter().find(|(_, is_given)| *is_given);
            given.map(|(name, _)| *name)
        };
        let (of_pairs, of_both) = (given(&of_pairs), given(&of_both));
        let of_rewards = self.policy.given();
        let name = self.loss.name();
        let wrong = |option: &str, kind: &str| {
            let text =
                format!("{option} is for losses of {kind}, and --loss is {name}; leave it out");
            Err(VlmTrainError::Options(text))
        };
        let without_reference = || {
            let text = format!("--reference has no effect on {name}; leave it out");
            Err(VlmTrainError::Options(text))
        };
        match self.loss {
            LossChoice::Sft => match (of_both.or(of_pairs), of_rewards) {
                (Some(option), _) => wrong(option, "preferences"),
                (None, Some(option)) => wrong(option, "rewarded answers"),
                (None, None) => Ok(()),
            },
            LossChoice::Preference(loss) => match of_rewards {
                Some(option) => wrong(option, "rewarded answers"),
                None if self.reference.is_some() && !loss.has_reference() => without_reference(),
                None => self.preference().map_or(Ok(()), |of| of.check()),
            },
            LossChoice::Policy(_) => match of_pairs {
                Some(option) => wrong(option, "preferences"),
                None => {
                    self.rewarded()?;
                    let policy = self.policy();
                    if self.reference.is_some() && policy.is_some_and(|of| of.beta == 0.0) {
                        let text = "--reference has no effect without --beta; give a factor on the \
                                    divergence from it, or leave it out";
                        return Err(VlmTrainError::Options(text.to_owned()));
                    }
                    let clips_nothing =
                        !self.policy.clip.is_empty() && policy.is_some_and(|of| of.updates == 1);
                    match policy.map_or(Ok(()), |of| of.check()) {
                        Ok(()) if clips_nothing => {
                            let text = "--clip has no effect on the first update of a step, whose \
                                        ratios are 1; raise --updates, or leave it out";
                            Err(VlmTrainError::Options(text.to_owned()))
                        }
                        checked => checked,
                    }
                }
            },
        }
        .map_err(|error| match error {
            VlmTrainError::Recipe {
                key,
                found,
                expected,
            } => {
                let option = match key {
                    "mark_weights" => "label-weights".to_owned(),
                    key => key.replace('_', "-"),
                };
                VlmTrainError::Options(format!("--{option} is {found}; expected {expected}"))
            }
            other => other,
        })
    }

    /// The loss of rewarded answers, if it is one.
    pub(super) fn policy(&self) -> Option<Policy> {
        match self.loss {
            LossChoice::Policy(loss) => Some(self.policy.policy(loss, self.beta)),
            _ => None,
        }
    }

    /// What rewards answers, if anything does.
    ///
    /// # Errors
    /// [`VlmTrainError::Options`] for a loss of rewarded answers without a reward.
    pub(super) fn rewarded(&self) -> Result<Option<Reward>> {
        match self.loss {
            LossChoice::Policy(_) => {
                let reward = self.policy.rewarded().map_err(VlmTrainError::Options)?;
                Ok(Some(reward))
            }
            _ => Ok(None),
        }
    }

    /// The loss of preferences, if it is one.
    pub(super) fn preference(&self) -> Option<Preference> {
        let LossChoice::Preference(loss) = self.loss else {
            return None;
        };
        let mut preference = loss.with_defaults();
        preference.beta = self.beta.unwrap_or(preference.beta);
        preference.label_smoothing = self.label_smoothing.unwrap_or(preference.label_smoothing);
        preference.gamma = self.gamma.unwrap_or(preference.gamma);
        preference.imitation = self.imitation.unwrap_or(preference.imitation);
        if let [good, bad] = self.label_weights[..] {
            preference.mark_weights = [good, bad];
        }
        Some(preference)
    }
}

//! The options of losses of rewarded answers.

use clap::Args;
use serde::Serialize;

use super::parse::{MAX_TOKENS, above_0, at_least_0, count_in, one_of};
use crate::policy::{Policy, PolicyLoss, RewardScale};
use crate::reward::{Reward, RewardRule};

/// The wait for a line of a reward command, in seconds.
const WAIT: f64 = 60.0;
/// How far numbers may be apart.
const TOLERANCE: f64 = 1e-6;

/// The options of losses of rewarded answers.
#[derive(Args, Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct PolicyOptions {
    /// Reward: the answer equals the data's, its last number does, or the overlap of boxes
    #[arg(long, value_parser = one_of(&RewardRule::ALL, RewardRule::name))]
    #[arg(conflicts_with = "reward_command")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward: Option<RewardRule>,

    /// Command, started once by a shell, that reads an answer per line, as JSON, and writes a
    /// number per line
    #[arg(long, value_name = "COMMAND")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward_command: Option<String>,

    /// Longest wait for a line of --reward-command [default: 60]
    #[arg(long, value_name = "SECONDS", requires = "reward_command", value_parser = above_0)]
    #[serde(skip)]
    pub reward_timeout: Option<f64>,

    /// Largest difference of numbers that count as equal [default: 1e-6]
    #[arg(long, value_name = "NUMBER", value_parser = at_least_0)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tolerance: Option<f64>,

    /// Answers sampled for each conversation [default: 8]
    #[arg(long, value_name = "N", value_parser = count_in(2..=4096))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<usize>,

    /// Maximum tokens per sampled answer [default: 256]
    #[arg(long, value_name = "TOKENS", value_parser = count_in(1..=MAX_TOKENS))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_new: Option<usize>,

    /// Divisor of the logits from which answers are sampled [default: 1]
    #[arg(long, value_name = "NUMBER", value_parser = above_0)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f64>,

    /// Optimizer updates over the answers of a step [default: 1]
    #[arg(long, value_name = "N", value_parser = count_in(1..=1000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub updates: Option<usize>,

    /// How far a ratio of probabilities counts [default: 0.2 0.2]
    #[arg(long, num_args = 2, value_names = ["BELOW", "ABOVE"])]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub clip: Vec<f64>,

    /// Deviation that divides a reward [default: group]
    #[arg(long, value_name = "OF", value_parser = one_of(&RewardScale::ALL, RewardScale::name))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale_rewards: Option<RewardScale>,
}

impl PolicyOptions {
    /// The first option that is given.
    pub(super) fn given(&self) -> Option<&'static str> {
        let given = [
            ("--reward", self.reward.is_some()),
            ("--reward-command", self.reward_command.is_some()),
            ("--tolerance", self.tolerance.is_some()),
            ("--group", self.group.is_some()),
            ("--max-new", self.max_new.is_some()),
            ("--temperature", self.temperature.is_some()),
            ("--updates", self.updates.is_some()),
            ("--clip", !self.clip.is_empty()),
            ("--scale-rewards", self.scale_rewards.is_some()),
        ];
        let given = given.iter().find(|(_, is_given)| *is_given);
        given.map(|(name, _)| *name)
    }

    /// The loss with these options.
    pub(super) fn policy(&self, loss: PolicyLoss, beta: Option<f64>) -> Policy {
        let default = loss.with_defaults();
        Policy {
            loss,
            group: self.group.unwrap_or(default.group),
            max_new: self.max_new.unwrap_or(default.max_new),
            temperature: self.temperature.unwrap_or(default.temperature),
            updates: self.updates.unwrap_or(default.updates),
            clip: match self.clip[..] {
                [below, above] => [below, above],
                _ => default.clip,
            },
            beta: beta.unwrap_or(default.beta),
            scale: self.scale_rewards.unwrap_or(default.scale),
        }
    }

    /// What rewards answers.
    ///
    /// # Errors
    /// Without a reward, or with a tolerance of what is not a number.
    pub(super) fn rewarded(&self) -> Result<Reward, String> {
        if self.tolerance.is_some() && self.reward != Some(RewardRule::Number) {
            return Err("--tolerance is for --reward number; leave it out".to_owned());
        }
        let is_tolerance = |tolerance| (0.0..f64::INFINITY).contains(&tolerance);
        if let Some(tolerance) = self.tolerance.filter(|of| !is_tolerance(*of)) {
            return Err(format!(
                "--tolerance is {tolerance}; expected a number from 0 on"
            ));
        }
        if !matches!(self.clip.len(), 0 | 2) {
            let found = self.clip.len();
            return Err(format!(
                "--clip has {found} numbers; expected two, below and above"
            ));
        }
        match (self.reward, &self.reward_command) {
            (Some(rule), _) => Ok(Reward::Rule {
                rule,
                tolerance: self.tolerance.unwrap_or(TOLERANCE),
            }),
            (None, Some(command)) => Ok(Reward::Command {
                command: command.clone(),
                seconds: self.reward_timeout.unwrap_or(WAIT),
            }),
            (None, None) => {
                let names = RewardRule::ALL.map(RewardRule::name).join(", ");
                Err(format!(
                    "a loss of rewarded answers needs --reward ({names}) or --reward-command"
                ))
            }
        }
    }
}

//! The options of the loss.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use serde::{Serialize, Serializer};
use vlm_data::text::format::Answers;

use super::parse::{above_0, at_least_0, one_of};
use crate::error::VlmTrainError;
use crate::preference::{Preference, PreferenceLoss};

/// The loss, and the options of losses of preferences.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LossOptions {
    /// Loss: sft imitates answers; kto learns from answers with a label, the others from pairs of a
    /// chosen and a rejected answer
    #[arg(long, default_value = "sft", value_parser = one_of(&CHOICES, LossChoice::name))]
    #[serde(serialize_with = "name_of", skip_serializing_if = "LossChoice::is_sft")]
    pub loss: LossChoice,

    /// Factor on the auxiliary loss of the routers of experts, over the whole batch; 0: none, which
    /// saves a forward pass [default: router_aux_loss_coef of a config.json with
    /// output_router_logits, otherwise 0]
    #[arg(long, value_name = "FACTOR", value_parser = at_least_0)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_loss: Option<f64>,

    /// Strength of the preference: the factor on its rewards [default: 0.1]
    #[arg(long, value_name = "NUMBER", value_parser = above_0)]
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

    /// Reference of dpo, dpo-norm, dpo-robust, hinge, ipo and kto: a model folder [default: the model
    /// at the start]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    #[serde(skip)]
    pub reference: Option<PathBuf>,
}

/// A loss by its name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LossChoice(pub Option<PreferenceLoss>);

const CHOICES: [LossChoice; 1 + PreferenceLoss::ALL.len()] = {
    let mut choices = [LossChoice(None); 1 + PreferenceLoss::ALL.len()];
    let mut index = 0;
    while index < PreferenceLoss::ALL.len() {
        choices[index + 1] = LossChoice(Some(PreferenceLoss::ALL[index]));
        index += 1;
    }
    choices
};

impl LossChoice {
    fn name(self) -> &'static str {
        self.0.map_or("sft", PreferenceLoss::name)
    }

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
    fn is_sft(&self) -> bool {
        self.0.is_none()
    }

    /// The answers that a record must have.
    pub fn answers(self) -> Answers {
        match self.0 {
            None => Answers::One,
            Some(loss) if loss.is_of_marks() => Answers::Marked,
            Some(_) => Answers::Pair,
        }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn name_of<S: Serializer>(choice: &LossChoice, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(choice.name())
}

impl LossOptions {
    /// The loss of preferences, if it is one.
    ///
    /// # Errors
    /// The option that needs another loss, or another value.
    pub(super) fn preference(&self) -> Result<Option<Preference>, String> {
        let mut preference = self.loss.0.map(PreferenceLoss::with_defaults);
        let has_reference = self.loss.0.is_some_and(PreferenceLoss::has_reference);
        let given = [
            ("--beta", self.beta.is_some()),
            ("--label-smoothing", self.label_smoothing.is_some()),
            ("--gamma", self.gamma.is_some()),
            ("--imitation", self.imitation.is_some()),
            ("--label-weights", !self.label_weights.is_empty()),
            ("--reference", self.reference.is_some() && !has_reference),
        ];
        let Some(preference) = &mut preference else {
            return match given.iter().find(|(_, given)| *given) {
                Some((name, _)) => Err(format!(
                    "{name} is for losses of preferences, and --loss is sft; leave it out"
                )),
                None => Ok(None),
            };
        };
        if self.reference.is_some() && !has_reference {
            let name = self.loss.name();
            return Err(format!("--reference has no effect on {name}; leave it out"));
        }
        preference.beta = self.beta.unwrap_or(preference.beta);
        preference.label_smoothing = self.label_smoothing.unwrap_or(preference.label_smoothing);
        preference.gamma = self.gamma.unwrap_or(preference.gamma);
        preference.imitation = self.imitation.unwrap_or(preference.imitation);
        if let [good, bad] = self.label_weights[..] {
            preference.mark_weights = [good, bad];
        }
        preference.check().map_err(|error| match error {
            VlmTrainError::Recipe {
                key,
                found,
                expected,
            } => {
                let option = match key {
                    "mark_weights" => "label-weights".to_owned(),
                    key => key.replace('_', "-"),
                };
                format!("--{option} is {found}; expected {expected}")
            }
            other => other.to_string(),
        })?;
        Ok(Some(*preference))
    }
}

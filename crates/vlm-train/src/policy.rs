//! Losses of rewarded answers (GRPO): one row each.
//!
//! The answers to one prompt form a group. An answer's advantage is its reward above the group's
//! mean. The loss of a token is a function of its log-probability p, of that before the first update
//! and of the reference's; the losses differ in the weights of tokens. Gradients are closed forms.

use serde::{Deserialize, Serialize};

use crate::error::{Result, VlmTrainError};

/// A loss of rewarded answers, by the weights of tokens. Batches are those of a whole step, whatever
/// their cut.
///
/// # Source
/// TRL 1.16, `GRPOTrainer` (`loss_type`)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyLoss {
    /// The mean over answers of means over tokens, <https://arxiv.org/abs/2402.03300>.
    Grpo,
    /// The mean over the tokens of the batch, <https://arxiv.org/abs/2503.14476>.
    Dapo,
    /// The same, which is that of TRL for micro-batches of a whole batch.
    Bnpo,
    /// The sum over tokens by the number of answers and the limit of their tokens,
    /// <https://arxiv.org/abs/2503.20783>.
    DrGrpo,
}

/// The divisor of an answer's reward above the mean of its group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RewardScale {
    /// The standard deviation of the group.
    #[default]
    Group,
    /// That of the rewards of the batch.
    Batch,
    /// 1.
    None,
}

/// A loss of rewarded answers with its options.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Policy {
    /// The loss.
    pub loss: PolicyLoss,
    /// The answers to each prompt.
    pub group: usize,
    /// The limit of an answer's tokens.
    pub max_new: usize,
    /// The divisor of the logits, of which answers are sampled and log-probabilities computed.
    pub temperature: f64,
    /// The updates over the answers of a batch.
    pub updates: usize,
    /// How far below and above 1 a ratio of probabilities may be before it is clipped.
    pub clip: [f64; 2],
    /// The factor on the divergence from the reference; 0 for none, which needs no reference.
    pub beta: f64,
    /// The divisor of advantages.
    pub scale: RewardScale,
}

/// A row of the table.
struct LossRow {
    loss: PolicyLoss,
    /// The name as an option.
    name: &'static str,
    /// The weight of a token of an answer.
    weight: fn(&Counts) -> f64,
}

/// What the weight of a token depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    /// The tokens of the answer.
    pub(crate) own: usize,
    /// The tokens of all answers of the batch, over all ranks.
    pub(crate) tokens: usize,
    /// The answers of the batch, over all ranks.
    pub(crate) answers: usize,
    /// The limit of an answer's tokens.
    pub(crate) limit: usize,
}

const LOSSES: [LossRow; 4] = [
    LossRow {
        loss: PolicyLoss::Grpo,
        name: "grpo",
        weight: |of| 1.0 / (of.answers as f64 * of.own as f64),
    },
    LossRow {
        loss: PolicyLoss::Dapo,
        name: "dapo",
        weight: |of| 1.0 / of.tokens as f64,
    },
    LossRow {
        loss: PolicyLoss::Bnpo,
        name: "bnpo",
        weight: |of| 1.0 / of.tokens as f64,
    },
    LossRow {
        loss: PolicyLoss::DrGrpo,
        name: "dr-grpo",
        weight: |of| 1.0 / (of.answers as f64 * of.limit as f64),
    },
];

/// The number added to a standard deviation.
const LEAST_DEVIATION: f64 = 1e-4;

/// The log-probabilities of a token, and the advantage of its answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenScores {
    /// By the model.
    pub(crate) model: f64,
    /// By the model before the first update.
    pub(crate) before: f64,
    /// By the reference.
    pub(crate) reference: f64,
    pub(crate) advantage: f64,
}

/// The loss of a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TokenValue {
    pub(crate) loss: f64,
    /// Its derivative by the log-probability.
    pub(crate) slope: f64,
    /// The estimated divergence from the reference.
    pub(crate) kl: f64,
    /// The probability over that before the first update.
    pub(crate) ratio: f64,
    /// True for a ratio clipped from below, and from above.
    pub(crate) clipped: [bool; 2],
}

impl PolicyLoss {
    /// All of them.
    pub const ALL: [Self; 4] = {
        let mut all = [Self::Grpo; 4];
        let mut row = 0;
        while row < LOSSES.len() {
            all[row] = LOSSES[row].loss;
            row += 1;
        }
        all
    };

    fn row(self) -> &'static LossRow {
        const ROWS: &[LossRow; 4] = &LOSSES;
        ROWS.iter().find(|row| row.loss == self).unwrap_or(&ROWS[0])
    }

    /// The name as an option.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// The loss with TRL's default options.
    pub fn with_defaults(self) -> Policy {
        Policy {
            loss: self,
            group: 8,
            max_new: 256,
            temperature: 1.0,
            updates: 1,
            clip: [0.2; 2],
            beta: 0.0,
            scale: RewardScale::Group,
        }
    }
}

impl RewardScale {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Group, Self::Batch, Self::None];

    /// The name as an option.
    pub fn name(self) -> &'static str {
        match self {
            Self::Group => "group",
            Self::Batch => "batch",
            Self::None => "none",
        }
    }
}

impl Policy {
    /// # Errors
    /// [`VlmTrainError::Recipe`] for an option out of range.
    pub(crate) fn check(&self) -> Result<()> {
        let [below, above] = self.clip;
        let is_factor = |x: f64| x.is_finite() && x >= 0.0;
        for (key, found, is_right, expected) in [
            (
                "group",
                self.group as f64,
                self.group >= 2,
                "at least 2, since an answer's advantage is relative to its group",
            ),
            (
                "max_new",
                self.max_new as f64,
                self.max_new > 0,
                "at least 1",
            ),
            (
                "temperature",
                self.temperature,
                is_factor(self.temperature) && self.temperature > 0.0,
                "a finite number above 0",
            ),
            (
                "updates",
                self.updates as f64,
                self.updates > 0,
                "at least 1",
            ),
            (
                "clip",
                below,
                (0.0..=1.0).contains(&below),
                "a number from 0 to 1 below the ratio 1",
            ),
            (
                "clip",
                above,
                is_factor(above),
                "a finite number of at least 0 above the ratio 1",
            ),
            (
                "beta",
                self.beta,
                is_factor(self.beta),
                "a finite number of at least 0",
            ),
        ] {
            if !is_right {
                return Err(VlmTrainError::Recipe {
                    key,
                    found: found.to_string(),
                    expected,
                });
            }
        }
        Ok(())
    }

    /// The weight of a token's loss in that of the batch.
    pub(crate) fn weight(&self, of: &Counts) -> f64 {
        (self.loss.row().weight)(of)
    }

    /// The advantages of a group's answers. `deviation` is that of the batch's rewards.
    pub(crate) fn advantages(&self, rewards: &[f64], deviation: f64) -> Vec<f64> {
        // Their mean may be another number.
        if rewards.iter().all(|reward| *reward == rewards[0]) {
            return vec![0.0; rewards.len()];
        }
        let own = Spread::of(rewards);
        let scale = match self.scale {
            RewardScale::Group => own.deviation() + LEAST_DEVIATION,
            RewardScale::Batch => deviation + LEAST_DEVIATION,
            RewardScale::None => 1.0,
        };
        let advantage = |reward: &f64| (reward - own.mean) / scale;
        rewards.iter().map(advantage).collect()
    }

    /// The loss of a token: the clipped ratio times the advantage, negative, and the divergence from
    /// the reference, which is weighed by the ratio, as the answers are of the model before.
    pub(crate) fn value(&self, of: &TokenScores) -> TokenValue {
        let ratio = (of.model - of.before).exp();
        let bounds = [1.0 - self.clip[0], 1.0 + self.clip[1]];
        let (free, bound) = (
            ratio * of.advantage,
            ratio.clamp(bounds[0], bounds[1]) * of.advantage,
        );
        let clipped = [
            ratio < bounds[0] && of.advantage < 0.0,
            ratio > bounds[1] && of.advantage > 0.0,
        ];
        let mut value = TokenValue {
            loss: -free.min(bound),
            slope: match clipped {
                [false, false] => -free,
                _ => 0.0,
            },
            kl: 0.0,
            ratio,
            clipped,
        };
        if self.beta > 0.0 {
            let apart = of.reference - of.model;
            let divergence = apart.exp_m1() - apart;
            value.kl = ratio * divergence;
            value.loss += self.beta * value.kl;
            value.slope += self.beta * ratio * (divergence - apart.exp_m1());
        }
        value
    }
}

/// Mean and deviation of numbers, which those of parts add up to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Spread {
    pub(crate) count: f64,
    pub(crate) mean: f64,
    /// The sum of squares of the differences from the mean.
    squares: f64,
}

impl Spread {
    pub(crate) fn of(numbers: &[f64]) -> Self {
        let count = numbers.len() as f64;
        let mean = numbers.iter().sum::<f64>() / count.max(1.0);
        let squares = numbers.iter().map(|x| (x - mean).powi(2)).sum();
        Self {
            count,
            mean,
            squares,
        }
    }

    /// That of both.
    pub(crate) fn and(self, other: Self) -> Self {
        let count = self.count + other.count;
        let (apart, share) = (other.mean - self.mean, other.count / count.max(1.0));
        Self {
            count,
            mean: self.mean + apart * share,
            squares: self.squares + other.squares + apart * apart * self.count * share,
        }
    }

    /// The standard deviation of a population of which these are a sample; 0 of one number.
    pub(crate) fn deviation(self) -> f64 {
        (self.squares / (self.count - 1.0).max(1.0)).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The slope is the difference quotient of the loss, on each side of each bound.
    #[test]
    fn slopes_are_those_of_the_losses() {
        let mut policy = PolicyLoss::Grpo.with_defaults();
        policy.clip = [0.1, 0.3];
        let mut clipped = [0; 2];
        for beta in [0.0, 0.3] {
            policy.beta = beta;
            for advantage in [-1.5, 0.0, 0.7] {
                for model in [-2.3, -2.05, -1.9, -1.6] {
                    let of = TokenScores {
                        model,
                        before: -2.0,
                        reference: -2.5,
                        advantage,
                    };
                    let at = |step: f64| {
                        let model = model + step;
                        policy.value(&TokenScores { model, ..of }).loss
                    };
                    let found = policy.value(&of);
                    let expected = (at(1e-5) - at(-1e-5)) / 2e-5;
                    assert!((found.slope - expected).abs() < 1e-9, "{of:?} {found:?}");
                    for (count, clipped) in clipped.iter_mut().zip(found.clipped) {
                        *count += usize::from(clipped);
                    }
                }
            }
        }
        assert_eq!(clipped, [2, 2]);
    }

    #[test]
    fn spreads_of_parts_add_up() {
        let numbers = [1.0, 4.0, 4.0, -2.0, 0.5];
        let all = Spread::of(&numbers);
        assert!((all.deviation() - 2.5495).abs() < 1e-4, "{all:?}");
        for at in 0..=numbers.len() {
            let (one, other) = numbers.split_at(at);
            let both = Spread::of(one).and(Spread::of(other));
            let apart = (both.mean - all.mean).abs() + (both.squares - all.squares).abs();
            assert!(apart < 1e-12 && both.count == 5.0, "{at}: {both:?}");
        }
    }

    #[test]
    fn equal_rewards_have_no_advantage() {
        let policy = PolicyLoss::Grpo.with_defaults();
        assert_eq!(policy.advantages(&[0.25; 4], 1.0), [0.0; 4]);
        assert_eq!(policy.advantages(&[0.1; 3], 1.0), [0.0; 3]);
    }

    #[test]
    fn options_out_of_range_are_refused() {
        type Change = fn(&mut Policy);
        let cases: [(&str, Change); 7] = [
            ("group", |of| of.group = 1),
            ("max_new", |of| of.max_new = 0),
            ("temperature", |of| of.temperature = 0.0),
            ("updates", |of| of.updates = 0),
            ("below", |of| of.clip[0] = 1.5),
            ("above", |of| of.clip[1] = f64::NAN),
            ("beta", |of| of.beta = -0.1),
        ];
        for (says, change) in cases {
            let mut policy = PolicyLoss::Grpo.with_defaults();
            change(&mut policy);
            let error = policy.check().expect_err(says).to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}

//! Losses of preferences: one row each.
//!
//! An answer has the score s = ln p(answer) - ln p_reference(answer), or ln p alone. A loss of pairs
//! is a function of the margin, the preferred answer's score less the other's; a loss of marked
//! answers is a function of one score. Gradients are closed forms of their definitions.

use serde::{Deserialize, Serialize};

use crate::error::{Result, VlmTrainError};

/// A loss of preferences.
///
/// # Source
/// TRL 1.16, whose defaults the options have: `DPOTrainer` (`loss_type`), `KTOTrainer`,
/// `ORPOTrainer`, `CPOTrainer`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PreferenceLoss {
    /// Direct preference optimization, <https://arxiv.org/abs/2305.18290>.
    Dpo,
    /// DPO of mean log-probabilities per token.
    DpoNorm,
    /// DPO whose loss does not expect noise in the preferences to average out,
    /// <https://arxiv.org/abs/2403.00409>.
    DpoRobust,
    /// The hinge of the margin, <https://arxiv.org/abs/2305.10425>.
    Hinge,
    /// Identity preference optimization, <https://arxiv.org/abs/2310.12036>.
    Ipo,
    /// Contrastive preference optimization, <https://arxiv.org/abs/2401.08417>.
    Cpo,
    /// Simple preference optimization, <https://arxiv.org/abs/2405.14734>.
    Simpo,
    /// Odds-ratio preference optimization, <https://arxiv.org/abs/2403.07691>.
    Orpo,
    /// Kahneman-Tversky optimization, <https://arxiv.org/abs/2402.01306>.
    Kto,
}

/// A loss of preferences with its options.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Preference {
    /// The loss.
    pub loss: PreferenceLoss,
    /// The factor on margins and rewards; of ORPO, on its loss.
    pub beta: f64,
    /// The probability that a preference is the wrong way round.
    pub label_smoothing: f64,
    /// The margin, times beta, that SimPO wants.
    pub gamma: f64,
    /// The factor on the mean loss of the preferred answers' tokens, which is added.
    pub imitation: f64,
    /// The factors on KTO's losses of good and of bad answers.
    pub mark_weights: [f64; 2],
}

/// A row of the table.
pub(crate) struct LossRow {
    loss: PreferenceLoss,
    /// The name as an option.
    pub(crate) name: &'static str,
    /// True if scores are relative to the reference.
    pub(crate) has_reference: bool,
    /// True if scores are means over tokens instead of sums.
    pub(crate) by_length: bool,
    /// The score and its derivative by the log-probability.
    score: fn(f64) -> [f64; 2],
    curve: Curve,
    /// The default of [`Preference::imitation`].
    imitation: f64,
    /// True if [`Preference::label_smoothing`] and [`Preference::gamma`] have an effect.
    smooths: bool,
    has_gamma: bool,
}

impl LossRow {
    /// The divisor of an answer's log-probability in the log, as TRL's: relative to a reference, the
    /// sum is logged even where the loss has the mean.
    pub(crate) fn logged_length(&self, tokens: usize) -> f64 {
        match self.by_length && !self.has_reference {
            true => tokens.max(1) as f64,
            false => 1.0,
        }
    }
}

/// A loss with its derivative.
enum Curve {
    /// Of the margin.
    Margin(fn(f64, &Preference) -> [f64; 2]),
    /// Of the reward above the mean of mismatched answers, for a good one.
    Marked(fn(f64) -> [f64; 2]),
}

const PAIR: LossRow = LossRow {
    loss: PreferenceLoss::Dpo,
    name: "dpo",
    has_reference: true,
    by_length: false,
    score: |x| [x, 1.0],
    curve: Curve::Margin(sigmoid),
    imitation: 0.0,
    smooths: true,
    has_gamma: false,
};

/// All losses.
pub(crate) const LOSSES: [LossRow; 9] = [
    PAIR,
    LossRow {
        loss: PreferenceLoss::DpoNorm,
        name: "dpo-norm",
        by_length: true,
        ..PAIR
    },
    LossRow {
        loss: PreferenceLoss::DpoRobust,
        name: "dpo-robust",
        curve: Curve::Margin(robust),
        ..PAIR
    },
    LossRow {
        loss: PreferenceLoss::Hinge,
        name: "hinge",
        curve: Curve::Margin(hinge),
        smooths: false,
        ..PAIR
    },
    LossRow {
        loss: PreferenceLoss::Ipo,
        name: "ipo",
        by_length: true,
        curve: Curve::Margin(squared),
        smooths: false,
        ..PAIR
    },
    LossRow {
        loss: PreferenceLoss::Cpo,
        name: "cpo",
        has_reference: false,
        imitation: 1.0,
        ..PAIR
    },
    LossRow {
        loss: PreferenceLoss::Simpo,
        name: "simpo",
        has_reference: false,
        by_length: true,
        has_gamma: true,
        ..PAIR
    },
    LossRow {
        loss: PreferenceLoss::Orpo,
        name: "orpo",
        has_reference: false,
        by_length: true,
        score: log_odds,
        curve: Curve::Margin(odds),
        imitation: 1.0,
        smooths: false,
        ..PAIR
    },
    LossRow {
        loss: PreferenceLoss::Kto,
        name: "kto",
        curve: Curve::Marked(|reward| {
            let p = logistic(reward);
            [1.0 - p, -p * (1.0 - p)]
        }),
        smooths: false,
        ..PAIR
    },
];

/// -(1 - e) ln sigmoid(z) - e ln sigmoid(-z), with z = beta m - gamma.
fn sigmoid(margin: f64, options: &Preference) -> [f64; 2] {
    let (z, e) = (
        options.beta * margin - options.gamma,
        options.label_smoothing,
    );
    [
        (1.0 - e) * softplus(-z) + e * softplus(z),
        options.beta * (e * logistic(z) - (1.0 - e) * logistic(-z)),
    ]
}

/// The loss whose mean over preferences, a share e of them turned round, is that of the true ones.
fn robust(margin: f64, options: &Preference) -> [f64; 2] {
    let (z, e) = (options.beta * margin, options.label_smoothing);
    let scale = 1.0 / (1.0 - 2.0 * e);
    [
        scale * ((1.0 - e) * softplus(-z) - e * softplus(z)),
        -scale * options.beta * ((1.0 - e) * logistic(-z) + e * logistic(z)),
    ]
}

fn hinge(margin: f64, options: &Preference) -> [f64; 2] {
    let short = 1.0 - options.beta * margin;
    match short > 0.0 {
        true => [short, -options.beta],
        false => [0.0, 0.0],
    }
}

fn squared(margin: f64, options: &Preference) -> [f64; 2] {
    let short = margin - 0.5 / options.beta;
    [short * short, 2.0 * short]
}

/// -beta ln sigmoid(m).
fn odds(margin: f64, options: &Preference) -> [f64; 2] {
    let beta = options.beta;
    [beta * softplus(-margin), -beta * logistic(-margin)]
}

/// The log-odds of an event of log-probability x.
fn log_odds(x: f64) -> [f64; 2] {
    let others = -x.exp_m1();
    [x - others.ln(), 1.0 / others]
}

fn logistic(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// ln(1 + e^x).
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// The log-probabilities of a sample's two answers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AnswerScores {
    /// By the model.
    pub(crate) model: [f64; 2],
    /// By the reference, or 0.
    pub(crate) reference: [f64; 2],
    pub(crate) tokens: [usize; 2],
    /// The mark of the first answer; the second is then another record's.
    pub(crate) is_good: Option<bool>,
}

/// The loss of a sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PreferenceValue {
    pub(crate) loss: f64,
    /// Its derivatives by the log-probabilities of the answers.
    pub(crate) slopes: [f64; 2],
    /// Beta times the scores.
    pub(crate) rewards: [f64; 2],
}

impl PreferenceLoss {
    /// All of them.
    pub const ALL: [Self; 9] = {
        let mut all = [Self::Dpo; 9];
        let mut row = 0;
        while row < LOSSES.len() {
            all[row] = LOSSES[row].loss;
            row += 1;
        }
        all
    };

    pub(crate) fn row(self) -> &'static LossRow {
        const ROWS: &[LossRow; 9] = &LOSSES;
        ROWS.iter().find(|row| row.loss == self).unwrap_or(&ROWS[0])
    }

    /// The name as an option.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// True if scores are relative to a reference.
    pub fn has_reference(self) -> bool {
        self.row().has_reference
    }

    /// True if it is of marked answers instead of pairs.
    pub fn is_of_marks(self) -> bool {
        matches!(self.row().curve, Curve::Marked(_))
    }

    /// The loss with TRL's default options.
    pub fn with_defaults(self) -> Preference {
        let row = self.row();
        Preference {
            loss: self,
            beta: 0.1,
            label_smoothing: 0.0,
            gamma: if row.has_gamma { 0.5 } else { 0.0 },
            imitation: row.imitation,
            mark_weights: [1.0; 2],
        }
    }
}

impl Preference {
    /// # Errors
    /// [`VlmTrainError::Recipe`] for an option out of range, or without an effect on the loss.
    pub(crate) fn check(&self) -> Result<()> {
        let row = self.loss.row();
        let wrong = |key, found: f64, expected| {
            let found = found.to_string();
            Err(VlmTrainError::Recipe {
                key,
                found,
                expected,
            })
        };
        let is_factor = |x: &f64| x.is_finite() && *x >= 0.0;
        if !is_factor(&self.beta) || self.beta == 0.0 {
            return wrong("beta", self.beta, "a finite number above 0");
        }
        let e = self.label_smoothing;
        if !(0.0..0.5).contains(&e) || (e > 0.0 && !row.smooths) {
            let expected = match row.smooths {
                true => "at least 0 and below 0.5",
                false => "0, for this loss knows no label smoothing",
            };
            return wrong("label_smoothing", e, expected);
        }
        if !is_factor(&self.gamma) || (self.gamma > 0.0 && !row.has_gamma) {
            return wrong("gamma", self.gamma, "0, or a number above 0 for simpo");
        }
        if !is_factor(&self.imitation) || (self.imitation > 0.0 && self.loss.is_of_marks()) {
            let expected = "0, or a number above 0 for a loss of pairs";
            return wrong("imitation", self.imitation, expected);
        }
        if let Some(weight) = self.mark_weights.iter().find(|weight| !is_factor(weight)) {
            return wrong("mark_weights", *weight, "finite numbers of at least 0");
        }
        Ok(())
    }

    /// The score of an answer relative to the reference, and its derivative by the log-probability.
    fn score(&self, of: &AnswerScores, answer: usize) -> [f64; 2] {
        let row = self.loss.row();
        let share = match row.by_length {
            true => 1.0 / of.tokens[answer].max(1) as f64,
            false => 1.0,
        };
        let [score, slope] = (row.score)((of.model[answer] - of.reference[answer]) * share);
        [score, slope * share]
    }

    /// The loss of a sample. `mismatch` is the mean log-ratio of answers to other prompts, for marked
    /// ones.
    pub(crate) fn value(&self, of: &AnswerScores, mismatch: f64) -> PreferenceValue {
        let row = self.loss.row();
        let rewards = [0, 1].map(|answer| {
            let ratio = of.model[answer] - of.reference[answer];
            self.beta * ratio / row.logged_length(of.tokens[answer])
        });
        match row.curve {
            Curve::Margin(curve) => {
                let [(first, first_slope), (second, second_slope)] =
                    [0, 1].map(|answer| self.score(of, answer).into());
                let [loss, slope] = curve(first - second, self);
                PreferenceValue {
                    loss,
                    slopes: [slope * first_slope, -slope * second_slope],
                    rewards,
                }
            }
            Curve::Marked(curve) => {
                let is_good = of.is_good.unwrap_or(true);
                let (sign, weight) = match is_good {
                    true => (1.0, self.mark_weights[0]),
                    false => (-1.0, self.mark_weights[1]),
                };
                let [score, score_slope] = self.score(of, 0);
                let [loss, slope] = curve(sign * self.beta * (score - mismatch));
                PreferenceValue {
                    loss: weight * loss,
                    slopes: [weight * sign * self.beta * slope * score_slope, 0.0],
                    rewards,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each slope is the difference quotient of its loss.
    #[test]
    fn slopes_are_those_of_the_losses() {
        for loss in PreferenceLoss::ALL {
            let mut options = loss.with_defaults();
            options.beta = 0.3;
            options.mark_weights = [1.25, 0.75];
            if loss.row().smooths {
                options.label_smoothing = 0.2;
            }
            options.check().expect("options in range");
            for is_good in [true, false] {
                let of = AnswerScores {
                    model: [-6.5, -9.0],
                    reference: match loss.has_reference() {
                        true => [-7.0, -8.0],
                        false => [0.0; 2],
                    },
                    tokens: [3, 5],
                    is_good: loss.is_of_marks().then_some(is_good),
                };
                let found = options.value(&of, 0.1).slopes;
                for answer in 0..2 {
                    let at = |step: f64| {
                        let mut moved = of;
                        moved.model[answer] += step;
                        options.value(&moved, 0.1).loss
                    };
                    let expected = (at(1e-5) - at(-1e-5)) / 2e-5;
                    let apart = (found[answer] - expected).abs();
                    assert!(apart < 1e-9, "{loss:?} {answer}: {found:?} {expected}");
                }
                assert!(found != [0.0; 2], "{loss:?}");
            }
        }
    }

    #[test]
    fn options_without_an_effect_are_refused() {
        let of = |loss: PreferenceLoss, change: fn(&mut Preference)| {
            let mut options = loss.with_defaults();
            change(&mut options);
            options.check().expect_err("refused").to_string()
        };
        for (error, expected) in [
            (of(PreferenceLoss::Dpo, |o| o.beta = 0.0), "beta"),
            (of(PreferenceLoss::Dpo, |o| o.gamma = 1.0), "gamma"),
            (
                of(PreferenceLoss::Ipo, |o| o.label_smoothing = 0.1),
                "no label smoothing",
            ),
            (
                of(PreferenceLoss::Dpo, |o| o.label_smoothing = 0.5),
                "below 0.5",
            ),
            (of(PreferenceLoss::Kto, |o| o.imitation = 1.0), "pairs"),
            (
                of(PreferenceLoss::Kto, |o| o.mark_weights = [1.0, -1.0]),
                "mark_weights",
            ),
        ] {
            assert!(error.contains(expected), "{error}");
        }
    }
}

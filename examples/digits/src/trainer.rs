//! The training loop and the test.

use std::time::Instant;

use burn::module::{ModuleVisitor, Param};
use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use rope_burn::{Rotary, RotaryAngles};
use rope_core::{Layout, Positions};
use serde::Serialize;

use crate::clip::{Clip, TEXT_TOKENS};
use crate::config::Config;
use crate::data::{Digits, Draw, PIXELS, Question, Split, rng};
use crate::error::{DigitsError, Result};
use crate::model::{Model, ModelConfig, Output, attention_mask};

/// Seed of the test's questions: every run answers the same ones.
const TEST_SEED: u64 = 0;
/// Most questions in a batch of a test.
const TEST_BATCH: usize = 256;
/// Most scores of a head in such a batch: 16 MiB.
const TEST_SCORES: usize = 1 << 22;

/// The results so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct History {
    /// Loss of each step: mean cross entropy in nats.
    pub losses: Vec<f32>,
    /// Share of right answers in each step.
    pub accuracies: Vec<f32>,
    /// Tests on unseen digits.
    pub tests: Vec<Test>,
    /// Time spent in steps.
    pub seconds: f64,
}

/// A test on unseen digits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Test {
    /// Steps trained before it.
    pub step: usize,
    /// Share of right answers.
    pub accuracy: f32,
    /// Mean cross entropy in nats.
    pub loss: f32,
}

/// A model in training.
pub struct Trainer {
    config: Config,
    clip: Clip,
    digits: Digits,
    model: Model,
    optimizer: ModuleOptimizer,
    loss: CrossEntropyLoss,
    training: Context,
    testing: Context,
    history: History,
}

/// The inputs of the model besides the questions, the same in each step; on one device.
struct Context {
    device: Device,
    mask: Tensor<4>,
    angles: Option<RotaryAngles>,
}

impl Context {
    fn new(
        device: Device,
        clip: Clip,
        rotary: Option<&Rotary>,
        positions: &Positions,
    ) -> Result<Self> {
        Ok(Self {
            mask: attention_mask(clip, &device),
            angles: rotary
                .map(|rotary| rotary.try_angles(positions, &device))
                .transpose()?,
            device,
        })
    }
}

/// Questions as tensors.
struct Batch {
    patches: Tensor<3>,
    words: Tensor<2, Int>,
    answers: Tensor<1, Int>,
}

impl Trainer {
    /// Draws a fresh model.
    ///
    /// # Errors
    /// [`DigitsError::Rotary`] if the rotation is refused.
    pub fn new(config: Config, device: &Device) -> Result<Self> {
        let clip = config.clip;
        let sizes = ModelConfig::new(clip.vocabulary());
        let spec = config.spec(sizes.head_dim)?;
        let positions = Positions::new(spec.axis_count(), &clip.position_ids(config.axes))?;
        let rotary = |implementation| {
            Rotary::new(spec.clone(), Layout::Bsnd).with_implementation(implementation)
        };
        let rotary = config.rotary.map(rotary);
        let context = |device| Context::new(device, clip, rotary.as_ref(), &positions);
        let training = context(device.clone().autodiff())?;
        let testing = context(device.clone())?;

        // Drawn on the host, whose generator is the same everywhere: a run starts with the same
        // weights on every device.
        let host = Device::flex().autodiff();
        host.seed(config.seed);
        let model = sizes.init(rotary, &host);
        model.visit(&mut DrawWeights);
        let model = model.fork(&training.device);
        Ok(Self {
            clip,
            digits: Digits::load()?,
            model,
            optimizer: AdamWConfig::new()
                .with_beta_2(0.98)
                .with_epsilon(1e-8)
                .with_weight_decay(0.01)
                .init(),
            loss: CrossEntropyLossConfig::new().init(&training.device),
            training,
            testing,
            history: History::default(),
            config,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The digits.
    pub fn digits(&self) -> &Digits {
        &self.digits
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The results so far.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// Steps that are done.
    pub fn steps(&self) -> usize {
        self.history.losses.len()
    }

    /// Tokens read in a second, over all steps.
    pub fn tokens_per_second(&self) -> f64 {
        (self.steps() * self.config.batch * self.clip.tokens()) as f64 / self.history.seconds
    }

    /// One step: forward, backward, AdamW.
    ///
    /// # Errors
    /// [`DigitsError::Diverged`] if the loss is not finite; [`DigitsError::Device`], also for the
    /// step before, whose backward may still run when its call returns.
    pub fn step(&mut self) -> Result<()> {
        let started = Instant::now();
        let step = self.steps();
        let mut rng = rng(self.config.seed, Draw::Step(step));
        let questions = self
            .digits
            .questions(Split::Train, self.clip, self.config.batch, &mut rng);
        let batch = self.batch(&questions, &self.training.device);
        let answers = batch.answers.clone();
        let output = forward(&self.model, batch, &self.training);
        let loss = self.loss.forward(output.logits.clone(), answers.clone());
        let value = number(loss.clone())?;
        if !value.is_finite() {
            return Err(DigitsError::Diverged {
                step: step + 1,
                loss: value,
            });
        }
        let right = right_answers(output.logits.inner(), answers.inner())?;
        let gradients = GradientsParams::from_grads(loss.backward(), &self.model);
        let rate = self.config.learning_rate_at(step);
        self.model = self.optimizer.step(rate, self.model.clone(), gradients);

        self.history.losses.push(value);
        self.history
            .accuracies
            .push(right as f32 / questions.len() as f32);
        self.history.seconds += started.elapsed().as_secs_f64();
        Ok(())
    }

    /// The first question of the test.
    ///
    /// # Errors
    /// [`DigitsError::Read`]; none is expected.
    pub fn first_test_question(&self) -> Result<Question> {
        let mut rng = rng(TEST_SEED, Draw::Test);
        let mut one = self.digits.questions(Split::Test, self.clip, 1, &mut rng);
        let missing = DigitsError::Read {
            expected: 1,
            found: 0,
        };
        one.pop().ok_or(missing)
    }

    /// Answers the first `count` questions of the test, all about digits that training never
    /// shows, and compares with the right answers. Also returns the best accuracy on them that is
    /// possible without positions.
    ///
    /// # Errors
    /// [`DigitsError::Device`].
    pub fn test(&self, count: usize) -> Result<(Test, f64)> {
        let model = self.model.valid();
        let tokens = self.clip.tokens();
        let most = (TEST_SCORES / (tokens * tokens)).clamp(1, TEST_BATCH);
        // Drawn batch by batch: a million questions about large clips are gigabytes.
        let mut rng = rng(TEST_SEED, Draw::Test);
        let (mut answered, mut right, mut loss, mut blind) = (0, 0, 0.0, 0.0);
        while answered < count {
            let drawn = most.min(count - answered);
            let questions = self
                .digits
                .questions(Split::Test, self.clip, drawn, &mut rng);
            let batch = self.batch(&questions, &self.testing.device);
            let answers = batch.answers.clone();
            let output = forward(&model, batch, &self.testing);
            let mean = self.loss.forward(output.logits.clone(), answers.clone());
            loss += number(mean)? * drawn as f32;
            right += right_answers(output.logits, answers)?;
            blind += self.digits.accuracy_without_position(&questions) * drawn as f64;
            answered += drawn;
        }
        let test = Test {
            step: self.steps(),
            accuracy: right as f32 / count as f32,
            loss: loss / count as f32,
        };
        Ok((test, blind / count as f64))
    }

    /// Tests by the first `count` questions and keeps the result in the history.
    ///
    /// # Errors
    /// [`DigitsError::Device`].
    pub fn record_test(&mut self, count: usize) -> Result<()> {
        let (test, _) = self.test(count)?;
        self.history.tests.push(test);
        Ok(())
    }

    /// Answers one question, with the attention of the last token.
    ///
    /// # Errors
    /// [`DigitsError::Device`].
    pub fn answer(&self, question: &Question) -> Result<Answer> {
        let batch = self.batch(std::slice::from_ref(question), &self.testing.device);
        let output = forward(&self.model.valid(), batch, &self.testing);
        let probabilities = floats(burn::tensor::activation::softmax(output.logits, 1))?;
        let (digit, probability) = probabilities
            .iter()
            .copied()
            .enumerate()
            .max_by(|a, b| a.1.total_cmp(&b.1))
            .unwrap_or_default();
        let attention = output
            .attention
            .into_iter()
            .map(|weights| {
                let [_, heads, tokens, _] = weights.dims();
                // The row of the last token, over the cells, which follow `<start>`.
                let cells = weights
                    .narrow(2, tokens - 1, 1)
                    .narrow(3, 1, self.clip.cells());
                let cells = floats(cells)?;
                let heads = cells.chunks(self.clip.cells()).take(heads);
                Ok(heads.map(<[f32]>::to_vec).collect())
            })
            .collect::<Result<_>>()?;
        Ok(Answer {
            digit: digit as u8,
            probability,
            attention,
        })
    }

    fn batch(&self, questions: &[Question], device: &Device) -> Batch {
        let pixels: Vec<f32> = questions
            .iter()
            .flat_map(|q| (0..self.clip.cells()).flat_map(|cell| self.digits.cell(q, cell)))
            .collect();
        let words: Vec<i64> = questions
            .iter()
            .flat_map(|q| self.clip.words(q.cell))
            .collect();
        let answers: Vec<i64> = questions
            .iter()
            .map(|q| i64::from(self.digits.answer(q)))
            .collect();
        let count = questions.len();
        Batch {
            patches: Tensor::from_data(
                TensorData::new(pixels, [count, self.clip.cells(), PIXELS]),
                device,
            ),
            words: Tensor::from_data(TensorData::new(words, [count, TEXT_TOKENS]), device),
            answers: Tensor::from_data(TensorData::new(answers, [count]), device),
        }
    }
}

/// Draws the weights now. Otherwise each is drawn at first use, in an order that the first forward
/// pass decides.
struct DrawWeights;

impl ModuleVisitor for DrawWeights {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        param.val();
    }
}

/// The model's answer to one question.
pub struct Answer {
    /// The digit.
    pub digit: u8,
    /// Its probability.
    pub probability: f32,
    /// Attention of the last token to each cell, by layer and head.
    pub attention: Vec<Vec<Vec<f32>>>,
}

fn forward(model: &Model, batch: Batch, context: &Context) -> Output {
    model.forward(
        batch.patches,
        batch.words,
        &context.mask,
        context.angles.as_ref(),
    )
}

fn right_answers(logits: Tensor<2>, answers: Tensor<1, Int>) -> Result<usize> {
    let right = logits.argmax(1).squeeze_dim::<1>(1).equal(answers);
    let right = right.int().sum().try_into_data()?;
    let right: i64 = right.iter::<i64>().sum();
    Ok(right.max(0).cast_unsigned() as usize)
}

fn floats<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>> {
    Ok(tensor.try_into_data()?.iter::<f32>().collect())
}

fn number(tensor: Tensor<1>) -> Result<f32> {
    let values = floats(tensor)?;
    let found = values.len();
    let wrong = DigitsError::Read { expected: 1, found };
    values.first().copied().ok_or(wrong)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use rope_burn::Implementation;
    use rope_core::Pairing;

    use super::*;

    /// burn's generator is one for the whole process.
    static SEED: Mutex<()> = Mutex::new(());

    fn trainer(config: Config) -> Trainer {
        let _held = SEED.lock().unwrap();
        Trainer::new(config, &Device::flex()).unwrap()
    }

    fn losses(trainer: &mut Trainer, steps: usize) -> Vec<f32> {
        (0..steps).for_each(|_| trainer.step().unwrap());
        trainer.history.losses.clone()
    }

    #[test]
    fn fused_and_composed_follow_the_same_losses_and_none_does_not() {
        for pairing in [
            Pairing::Half,
            Pairing::Adjacent,
            Pairing::Quarter,
            Pairing::InterleaveHalf,
        ] {
            let run = |rotary| {
                let config = Config {
                    rotary,
                    pairing,
                    steps: 4,
                    batch: 4,
                    ..Config::default()
                };
                losses(&mut trainer(config), 4)
            };
            let (fused, composed, none) = (
                run(Some(Implementation::Fused)),
                run(Some(Implementation::Composed)),
                run(None),
            );
            let apart = |a: &[f32], b: &[f32]| {
                a.iter()
                    .zip(b)
                    .map(|(a, b)| (a - b).abs())
                    .fold(0.0, f32::max)
            };
            assert!(apart(&fused, &composed) < 1e-3, "{fused:?} {composed:?}");
            assert!(apart(&fused, &none) > 1e-3, "{fused:?} {none:?}");
        }
    }

    #[test]
    fn without_rotation_the_place_of_a_digit_makes_no_difference() {
        let chance = |rotary| {
            let trainer = trainer(Config {
                rotary,
                ..Config::default()
            });
            let question = |digits: [usize; 8]| Question {
                digits: digits.to_vec(),
                nudges: vec![[0, 0]; 8],
                cell: 3,
            };
            [[0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0]]
                .map(|digits| trainer.answer(&question(digits)).unwrap().probability)
        };
        let [a, b] = chance(None);
        assert!((a - b).abs() < 1e-5, "{a} {b}");
        let [a, b] = chance(Some(Implementation::Fused));
        assert!((a - b).abs() > 1e-4, "{a} {b}");
    }

    #[test]
    fn attention_to_cells_is_a_part_of_one() {
        let trainer = trainer(Config {
            clip: Clip {
                frames: 1,
                rows: 2,
                columns: 3,
            },
            ..Config::default()
        });
        let question = &trainer.first_test_question().unwrap();
        let answer = trainer.answer(question).unwrap();
        for head in answer.attention.iter().flatten() {
            assert_eq!(head.len(), 6);
            let sum: f32 = head.iter().sum();
            assert!(sum > 0.0 && sum < 1.0, "{sum}");
        }
    }

    #[test]
    fn the_learning_rate_rises_then_falls_to_zero() {
        let config = Config {
            steps: 1000,
            learning_rate: 0.01,
            ..Config::default()
        };
        let rate = |step| config.learning_rate_at(step);
        assert!(rate(0) < 2e-4 && rate(50) < rate(99));
        assert!(rate(100) == 0.01 && rate(400) == 0.01 && rate(600) > rate(900));
        assert!(rate(999) < 1e-6);
    }
}

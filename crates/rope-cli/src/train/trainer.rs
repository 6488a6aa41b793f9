//! The training loop and the test.

use std::path::{Path, PathBuf};
use std::time::Instant;

use burn::module::{ModuleVisitor, Param};
use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use rope_burn::{Implementation, Rotary, RotaryAngles};
use rope_core::{Layout, Positions};

use super::checkpoint::{self, History, Test};
use super::clip::{Clip, TEXT_TOKENS};
use super::data::{Digits, Draw, PIXELS, Question, Split, rng};
use super::error::{Result, TrainError};
use super::model::{Model, ModelConfig, Output, attention_mask};
use super::options::{RotaryChoice, RunConfig};

/// Seed of the test's questions: every run answers the same ones.
const TEST_SEED: u64 = 0;
/// Most questions in a batch of a test.
const TEST_BATCH: usize = 256;
/// Most scores of a head in such a batch: 16 MiB.
const TEST_SCORES: usize = 1 << 22;

/// A model in training.
pub(crate) struct Trainer {
    config: RunConfig,
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
    /// [`TrainError::Rotary`] if the rotation is refused.
    pub(crate) fn new(config: RunConfig, device: &Device) -> Result<Self> {
        let clip = config.clip();
        let sizes = ModelConfig::new(clip.vocabulary());
        let spec = config.spec(sizes.head_dim)?;
        let positions = Positions::new(spec.axis_count(), &clip.position_ids(config.axes))?;
        let rotary = |implementation| {
            Rotary::new(spec.clone(), Layout::Bsnd).with_implementation(implementation)
        };
        let rotary = match config.rotary {
            RotaryChoice::Fused => Some(rotary(Implementation::Fused)),
            RotaryChoice::Composed => Some(rotary(Implementation::Composed)),
            RotaryChoice::None => None,
        };
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

    /// Continues from the last checkpoint in `folder`.
    ///
    /// # Errors
    /// Those of [`checkpoint::load`].
    pub(crate) fn resume(config: RunConfig, device: &Device, folder: &Path) -> Result<Self> {
        let mut trainer = Self::new(config, device)?;
        (trainer.history, trainer.model, trainer.optimizer) =
            checkpoint::load(folder, &trainer.config, trainer.model, trainer.optimizer)?;
        Ok(trainer)
    }

    /// Saves a checkpoint in `folder`.
    pub(crate) fn save(&self, folder: &Path) -> Result<PathBuf> {
        checkpoint::save(
            folder,
            &self.config,
            &self.history,
            &self.model,
            &self.optimizer,
        )
    }

    pub(crate) fn config(&self) -> &RunConfig {
        &self.config
    }

    pub(crate) fn digits(&self) -> &Digits {
        &self.digits
    }

    pub(crate) fn model(&self) -> &Model {
        &self.model
    }

    pub(crate) fn history(&self) -> &History {
        &self.history
    }

    /// Steps that are done.
    pub(crate) fn steps(&self) -> usize {
        self.history.losses.len()
    }

    /// Tokens read in a second, over all steps.
    pub(crate) fn tokens_per_second(&self) -> f64 {
        (self.steps() * self.config.batch * self.clip.tokens()) as f64 / self.history.seconds
    }

    /// One step: forward, backward, AdamW.
    ///
    /// # Errors
    /// [`TrainError::Diverged`] if the loss is not finite; [`TrainError::Device`], also for the
    /// step before, whose backward may still run when its call returns.
    pub(crate) fn step(&mut self) -> Result<()> {
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
            return Err(TrainError::Diverged {
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
    /// [`TrainError::Read`]; none is expected.
    pub(crate) fn first_test_question(&self) -> Result<Question> {
        let mut rng = rng(TEST_SEED, Draw::Test);
        let mut one = self.digits.questions(Split::Test, self.clip, 1, &mut rng);
        let missing = TrainError::Read {
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
    /// [`TrainError::Device`].
    pub(crate) fn test(&self, count: usize) -> Result<(Test, f64)> {
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
    /// [`TrainError::Device`].
    pub(crate) fn record_test(&mut self, count: usize) -> Result<()> {
        let (test, _) = self.test(count)?;
        self.history.tests.push(test);
        Ok(())
    }

    /// Answers one question, with the attention of the last token.
    ///
    /// # Errors
    /// [`TrainError::Device`].
    pub(crate) fn answer(&self, question: &Question) -> Result<Answer> {
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
pub(crate) struct Answer {
    pub(crate) digit: u8,
    pub(crate) probability: f32,
    /// Attention of the last token to each cell, by layer and head.
    pub(crate) attention: Vec<Vec<Vec<f32>>>,
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
    let wrong = TrainError::Read { expected: 1, found };
    values.first().copied().ok_or(wrong)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Mutex;

    use clap::Parser;

    use super::*;

    /// burn's generator is one for the whole process.
    static SEED: Mutex<()> = Mutex::new(());

    #[derive(Parser)]
    struct Options {
        #[command(flatten)]
        run: RunConfig,
    }

    pub(crate) fn options(text: &str) -> RunConfig {
        let arguments = text.split_whitespace();
        Options::parse_from(std::iter::once("train").chain(arguments)).run
    }

    fn trainer(text: &str) -> Trainer {
        let _held = SEED.lock().unwrap();
        Trainer::new(options(text), &Device::flex()).unwrap()
    }

    fn losses(trainer: &mut Trainer, steps: usize) -> Vec<f32> {
        (0..steps).for_each(|_| trainer.step().unwrap());
        trainer.history.losses.clone()
    }

    #[test]
    fn fused_and_composed_follow_the_same_losses_and_none_does_not() {
        for pairing in ["half", "adjacent", "quarter", "interleave-half"] {
            let run = |rotary: &str| {
                let text = format!("--steps 4 --batch 4 --rotary {rotary} --pairing {pairing}");
                losses(&mut trainer(&text), 4)
            };
            let (fused, composed, none) = (run("fused"), run("composed"), run("none"));
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
    fn a_resumed_run_has_the_losses_of_an_uninterrupted_one() {
        let folder = std::env::temp_dir().join(format!("mrope-resume-{}", std::process::id()));
        let text = "--steps 6 --batch 4 --seed 9";
        let expected = losses(&mut trainer(text), 6);

        let mut first = trainer(text);
        losses(&mut first, 2);
        first.save(&folder).unwrap();
        losses(&mut first, 1);
        first.save(&folder).unwrap();
        let resume = |text: &str| {
            let _held = SEED.lock().unwrap();
            Trainer::resume(options(text), &Device::flex(), &folder)
        };
        let mut second = resume(text).unwrap();
        assert_eq!(second.steps(), 3);
        assert_eq!(losses(&mut second, 3), expected);

        let error = resume("--steps 6 --batch 4 --seed 8").err().unwrap();
        let TrainError::OtherRun {
            option,
            expected,
            found,
        } = error
        else {
            panic!("{error}");
        };
        assert_eq!((&*option, &*expected, &*found), ("seed", "8", "9"));
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(matches!(resume(text), Err(TrainError::NoCheckpoint { .. })));
    }

    #[test]
    fn without_rotation_the_place_of_a_digit_makes_no_difference() {
        let chance = |rotary: &str| {
            let trainer = trainer(&format!("--rotary {rotary}"));
            let question = |digits: [usize; 8]| Question {
                digits: digits.to_vec(),
                nudges: vec![[0, 0]; 8],
                cell: 3,
            };
            [[0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0]]
                .map(|digits| trainer.answer(&question(digits)).unwrap().probability)
        };
        let [a, b] = chance("none");
        assert!((a - b).abs() < 1e-5, "{a} {b}");
        let [a, b] = chance("fused");
        assert!((a - b).abs() > 1e-4, "{a} {b}");
    }

    #[test]
    fn attention_to_cells_is_a_part_of_one() {
        let trainer = trainer("--frames 1 --rows 2 --columns 3");
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
        let config = options("--steps 1000 --learning-rate 0.01");
        let rate = |step| config.learning_rate_at(step);
        assert!(rate(0) < 2e-4 && rate(50) < rate(99));
        assert!(rate(100) == 0.01 && rate(400) == 0.01 && rate(600) > rate(900));
        assert!(rate(999) < 1e-6);
    }
}

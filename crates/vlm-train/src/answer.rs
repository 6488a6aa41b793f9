//! Greedy answers of the model in training, with the data's answers.

use std::sync::Arc;

use burn::module::Module;
use serde::Serialize;
use vlm_data::text::IGNORED;
use vlm_data::{Cut, MicroBatch, SampleEncoder, TrainingSample};

use crate::batch::inputs;
use crate::error::{Result, VlmTrainError};
use crate::trainer::Trainer;

/// The token limit of an answer.
const MOST: usize = 64;

/// Samples truncated before their first answers, as prompts for the model in training.
#[derive(Clone, Debug)]
pub struct Questions {
    encoder: Arc<SampleEncoder>,
    list: Vec<Question>,
}

#[derive(Clone, Debug)]
struct Question {
    line: u64,
    prompt: MicroBatch,
    expected: String,
}

/// The expected and the generated answer to a question.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Answer {
    /// The line of the sample in its file.
    pub line: u64,
    /// The answer of the data.
    pub expected: String,
    /// The answer of the model.
    pub found: String,
}

impl Answer {
    /// True if the two answers agree.
    pub fn is_right(&self) -> bool {
        self.expected == self.found
    }
}

impl Questions {
    /// Creates the questions of samples encoded by `encoder`.
    ///
    /// # Errors
    /// [`VlmTrainError::Data`] if a sample cannot be truncated or a text cannot be decoded.
    pub fn new(encoder: Arc<SampleEncoder>, samples: Vec<TrainingSample>) -> Result<Self> {
        let mut questions = Self {
            encoder,
            list: Vec::new(),
        };
        for sample in samples {
            let (line, labels) = (sample.line, sample.text.labels.clone());
            let is_trained = |label: &&i64| **label != IGNORED;
            let Some(start) = labels.iter().position(|label| *label != IGNORED) else {
                continue;
            };
            let expected: Vec<i64> = labels[start..]
                .iter()
                .take_while(is_trained)
                .copied()
                .collect();
            let cut = Cut::Padded { tokens: start };
            let prompt = MicroBatch::new(vec![questions.until(sample, start)], cut);
            questions.list.push(Question {
                line,
                prompt: prompt.map_err(data_error)?,
                expected: questions.text(&expected)?,
            });
        }
        Ok(questions)
    }

    /// A sample's first tokens, with the pictures in them.
    fn until(&self, mut sample: TrainingSample, tokens: usize) -> TrainingSample {
        sample.text.input_ids.truncate(tokens);
        sample.text.labels = vec![IGNORED; tokens];
        let merge = self.encoder.text().merge() as usize;
        let [image, video] = self.encoder.text().pads();
        let ids = &sample.text.input_ids;
        let kept = |pad: i64, grids: &[[usize; 3]]| {
            let mut left = ids.iter().filter(|id| **id == pad).count() * merge * merge;
            let fits = |grid: &&[usize; 3]| {
                let patches = grid.iter().product::<usize>();
                let fits = patches <= left;
                left = left.saturating_sub(patches);
                fits
            };
            grids.iter().take_while(fits).count()
        };
        let (images, videos) = (
            kept(image, &sample.image_grids),
            kept(video, &sample.video_grids),
        );
        shorten(&mut sample.image_grids, &mut sample.image_patches, images);
        shorten(&mut sample.video_grids, &mut sample.video_patches, videos);
        sample.seconds_per_grid.truncate(videos);
        sample
    }

    /// The text of an answer, without its end mark.
    fn text(&self, ids: &[i64]) -> Result<String> {
        let stop = self.stop();
        let ids: Vec<u32> = ids
            .iter()
            .take_while(|id| Some(**id) != stop)
            .filter_map(|id| u32::try_from(*id).ok())
            .collect();
        let text = self.encoder.text().tokenizer().decode(&ids);
        text.map_err(|error| data_error(error.into()))
    }

    /// The token that ends a turn.
    fn stop(&self) -> Option<i64> {
        let tokenizer = self.encoder.text().tokenizer();
        let named = tokenizer.named_tokens().iter();
        let mut ends = named.filter(|(name, _)| name == "eos_token");
        let end = ends.find_map(|(_, token)| tokenizer.token_id(token));
        end.map(i64::from)
    }
}

impl Trainer {
    /// Answers questions greedily, in at most 64 tokens each.
    ///
    /// # Errors
    /// Those of [`Vlm::generate`](vlm_models::Vlm::generate); [`VlmTrainError::Data`].
    pub fn answers(&self, questions: &Questions) -> Result<Vec<Answer>> {
        let model = self.model.valid();
        let stop: Vec<i64> = questions.stop().into_iter().collect();
        let answer = |question: &Question| {
            let batch = model.batch(&inputs(&question.prompt, &model.device()))?;
            let rows = model.generate(&batch, MOST, &stop)?;
            Ok(Answer {
                line: question.line,
                expected: question.expected.clone(),
                found: questions.text(&rows.concat())?,
            })
        };
        questions.list.iter().map(answer).collect()
    }
}

/// Keeps the patches of the first grids.
fn shorten(grids: &mut Vec<[usize; 3]>, patches: &mut Vec<f32>, kept: usize) {
    let rows = |grids: &[[usize; 3]]| grids.iter().map(|g| g.iter().product::<usize>()).sum();
    let (all, left): (usize, usize) = (rows(grids), rows(&grids[..kept]));
    patches.truncate(patches.len() / all.max(1) * left);
    grids.truncate(kept);
}

/// An error in the data before any step.
fn data_error(source: vlm_data::VlmDataError) -> VlmTrainError {
    VlmTrainError::Data { step: 0, source }
}

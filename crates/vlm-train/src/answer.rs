//! Greedy answers of the model in training, with the data's answers.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::module::Module;
use serde::Serialize;
use vlm_data::text::{Conversation, IGNORED, Part, Tokenizer};
use vlm_data::{Cut, MicroBatch, SampleEncoder, TrainingSample, VlmDataError};
use vlm_models::GenerationConfig;

use crate::batch::inputs;
use crate::error::{Result, VlmTrainError};
use crate::trainer::Trainer;

/// The token limit of an answer.
pub(crate) const MOST: usize = 64;

/// Samples truncated before their first answers, as prompts for the model in training.
#[derive(Clone, Debug)]
pub struct Questions {
    encoder: Arc<SampleEncoder>,
    /// The tokens that end an answer.
    stop: Vec<i64>,
    list: Vec<Question>,
}

#[derive(Clone, Debug)]
struct Question {
    line: u64,
    prompt: TrainingSample,
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

/// `line 7: "red", right`
impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (line, found) = (self.line, &self.found);
        match self.is_right() {
            true => write!(f, "line {line}: {found:?}, right"),
            false => write!(f, "line {line}: {found:?}, expected {:?}", self.expected),
        }
    }
}

/// The last answer of a conversation, of a pair the first one, as a model is trained to write it:
/// with boxes in the family's form, up to a token in `stop`.
///
/// # Errors
/// Those of [`SampleEncoder::measure`].
pub fn last_answer(
    encoder: &SampleEncoder,
    conversation: &Conversation,
    stop: &[i64],
) -> std::result::Result<String, VlmDataError> {
    let first = Conversation {
        other: None,
        ..conversation.clone()
    };
    let labels = encoder.measure(&first)?.text.labels;
    let answer = before_stop(&labels[last_labelled(&labels)], stop);
    decoded(encoder.text().tokenizer(), answer)
}

/// The last tokens in a row that have labels.
pub(crate) fn last_labelled(labels: &[i64]) -> Range<usize> {
    let end = labels.iter().rposition(|label| *label != IGNORED);
    let end = end.map_or(0, |last| last + 1);
    let start = labels[..end].iter().rposition(|label| *label == IGNORED);
    start.map_or(0, |last| last + 1)..end
}

/// The tokens that end an answer: those of the folder's `generation_config.json`, and those with
/// which its chat template and its tokenizer end a turn.
pub fn stop_tokens(config: &GenerationConfig, encoder: &SampleEncoder) -> Vec<i64> {
    let mut stop = config.stop.clone();
    for token in encoder.text().ends() {
        if !stop.contains(&token) {
            stop.push(token);
        }
    }
    stop
}

/// The tokens of an answer before its end.
pub fn before_stop<'a>(tokens: &'a [i64], stop: &[i64]) -> &'a [i64] {
    let end = tokens.iter().position(|token| stop.contains(token));
    &tokens[..end.unwrap_or(tokens.len())]
}

/// The text of an answer's tokens.
///
/// # Errors
/// [`VlmTrainError::Data`]
pub fn answer_text(tokenizer: &Tokenizer, tokens: &[i64]) -> Result<String> {
    decoded(tokenizer, tokens).map_err(data_error)
}

fn decoded(tokenizer: &Tokenizer, tokens: &[i64]) -> std::result::Result<String, VlmDataError> {
    let ids = tokens.iter().filter_map(|id| u32::try_from(*id).ok());
    Ok(tokenizer.decode(&ids.collect::<Vec<_>>())?)
}

/// The character that a decoder puts in the place of bytes that are no text yet.
const UNFINISHED: char = '\u{fffd}';
/// Tokens that may be waited for until they are text: a character has at most four bytes.
const WAITED: usize = 8;

/// The text of an answer as its tokens come, a whole character at a time.
#[derive(Debug)]
pub struct AnswerStream<'a> {
    tokenizer: &'a Tokenizer,
    stop: &'a [i64],
    /// The tokens of the last text, after which some decoders write the next ones otherwise.
    before: Vec<i64>,
    waiting: Vec<i64>,
}

impl<'a> AnswerStream<'a> {
    /// Starts an answer that ends with one of the tokens in `stop`.
    pub fn new(tokenizer: &'a Tokenizer, stop: &'a [i64]) -> Self {
        Self {
            tokenizer,
            stop,
            before: Vec::new(),
            waiting: Vec::new(),
        }
    }

    /// The text that a token completes; empty in the middle of a character.
    ///
    /// # Errors
    /// [`VlmTrainError::Data`]
    pub fn push(&mut self, token: i64) -> Result<String> {
        if self.stop.contains(&token) {
            return Ok(String::new());
        }
        self.waiting.push(token);
        let text = self.text()?;
        if text.ends_with(UNFINISHED) && self.waiting.len() < WAITED {
            return Ok(String::new());
        }
        self.before = std::mem::take(&mut self.waiting);
        Ok(text)
    }

    /// The text of the waiting tokens after those before: Mistral's decoder strips a space at the
    /// start.
    fn text(&self) -> Result<String> {
        let before = answer_text(self.tokenizer, &self.before)?;
        let all = [&self.before[..], &self.waiting].concat();
        match answer_text(self.tokenizer, &all)?.strip_prefix(&before) {
            Some(text) => Ok(text.to_owned()),
            None => answer_text(self.tokenizer, &self.waiting),
        }
    }

    /// The rest of the text.
    ///
    /// # Errors
    /// [`VlmTrainError::Data`]
    pub fn finish(self) -> Result<String> {
        self.text()
    }
}

impl Questions {
    /// Creates the questions of conversations, whose answers end with the tokens in `stop`.
    ///
    /// # Errors
    /// [`VlmTrainError::Data`] if a conversation cannot be encoded or a text not be decoded.
    pub fn new(
        encoder: Arc<SampleEncoder>,
        conversations: &[Conversation],
        stop: Vec<i64>,
    ) -> Result<Self> {
        let mut questions = Self {
            encoder,
            stop,
            list: Vec::new(),
        };
        for conversation in conversations {
            let sample = questions
                .encoder
                .encode_first(conversation)
                .map_err(data_error)?;
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
            questions.list.push(Question {
                line,
                prompt: questions.until(conversation, sample, start),
                expected: questions.text(&expected)?,
            });
        }
        Ok(questions)
    }

    /// A sample's first tokens, with the pictures and videos in them: in the order of the
    /// conversation, each has as many pads as its grid has merged patches.
    fn until(
        &self,
        conversation: &Conversation,
        mut sample: TrainingSample,
        tokens: usize,
    ) -> TrainingSample {
        sample.text.input_ids.truncate(tokens);
        sample.text.labels = vec![IGNORED; tokens];
        let square = (self.encoder.text().merge() as usize).pow(2);
        let pads = self.encoder.text().pads();
        let ids = &sample.text.input_ids;
        let mut left = ids.iter().filter(|id| pads.contains(id)).count();
        let (mut images, mut videos) = (0, 0);
        let parts = conversation
            .messages
            .iter()
            .flat_map(|message| &message.parts);
        for part in parts {
            let (kept, of, grids, count) = match part {
                Part::Text(_) => continue,
                Part::Image(index) => {
                    (&sample.text.images, index, &sample.image_grids, &mut images)
                }
                Part::Video(index) => {
                    (&sample.text.videos, index, &sample.video_grids, &mut videos)
                }
            };
            // Those of dropped turns are gone.
            let Some(grid) = kept
                .iter()
                .position(|kept| kept == of)
                .and_then(|at| grids.get(at))
            else {
                continue;
            };
            let own = grid.iter().product::<usize>() / square;
            if own > left {
                break;
            }
            left -= own;
            *count += 1;
        }
        shorten(&mut sample.image_grids, &mut sample.image_patches, images);
        shorten(&mut sample.video_grids, &mut sample.video_patches, videos);
        sample.seconds_per_grid.truncate(videos);
        sample
    }

    /// The prompts, and the tokens that end an answer.
    pub(crate) fn prompts(&self) -> (Vec<TrainingSample>, &[i64]) {
        let prompts = self.list.iter().map(|question| question.prompt.clone());
        (prompts.collect(), &self.stop)
    }

    /// The tokens of an answer before a placeholder of a picture or video, after which no answer
    /// goes on as it was generated.
    pub(crate) fn before_media<'a>(&self, tokens: &'a [i64]) -> &'a [i64] {
        before_stop(tokens, self.encoder.text().pads())
    }

    /// The text of an answer, without its end mark.
    fn text(&self, ids: &[i64]) -> Result<String> {
        answer_text(
            self.encoder.text().tokenizer(),
            before_stop(ids, &self.stop),
        )
    }
}

impl Trainer {
    /// Answers questions greedily, in at most 64 tokens each.
    ///
    /// # Errors
    /// Those of [`Vlm::generate`](vlm_models::Vlm::generate); [`VlmTrainError::Data`].
    pub fn answers(&self, questions: &Questions) -> Result<Vec<Answer>> {
        let model = self.model.valid();
        let answer = |question: &Question| {
            let micro = padded(vec![question.prompt.clone()])?;
            let batch = model.batch(&inputs(&micro, &model.device()))?;
            let rows = model.generate(&batch, MOST, &questions.stop)?;
            Ok(Answer {
                line: question.line,
                expected: question.expected.clone(),
                found: questions.text(&rows.concat())?,
            })
        };
        questions.list.iter().map(answer).collect()
    }
}

/// Samples as one batch of padded rows.
pub(crate) fn padded(samples: Vec<TrainingSample>) -> Result<MicroBatch> {
    let tokens = usize::MAX;
    MicroBatch::new(samples, Cut::Padded { tokens }).map_err(data_error)
}

/// Keeps the patches of the first grids.
fn shorten(grids: &mut Vec<[usize; 3]>, patches: &mut Vec<f32>, kept: usize) {
    let rows = |grids: &[[usize; 3]]| grids.iter().map(|g| g.iter().product::<usize>()).sum();
    let (all, left): (usize, usize) = (rows(grids), rows(&grids[..kept]));
    patches.truncate(patches.len() / all.max(1) * left);
    grids.truncate(kept);
}

/// An error in the data before any step.
pub(crate) fn data_error(source: VlmDataError) -> VlmTrainError {
    VlmTrainError::Data { step: 0, source }
}

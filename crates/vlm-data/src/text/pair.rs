//! Two answers to one prompt as one sample of two sequences.

use super::error::{RecordProblem, Result};
use super::expand::Grids;
use super::format::{Conversation, Message, OtherAnswer, Role};
use super::labels::{EncodeOptions, IGNORED, Overlong, Sample, TextEncoder, Trained};

/// The second sequence of a sample, and the answers in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerPair {
    /// The token at which the second sequence begins.
    pub second: usize,
    /// The first token of each answer. The labels from there to the end of the sequence are those
    /// of the answer.
    pub answers: [usize; 2],
    /// The mark of the first answer, if the record has one: the second sequence is then the prompt
    /// with the answer of another record.
    pub is_good: Option<bool>,
}

impl TextEncoder {
    /// Encodes the prompt of a conversation with each of its two answers, end to end, as two
    /// sequences. Labels are those of the answers; with [`Trained::Everything`], those of the prompt
    /// too.
    ///
    /// # Errors
    /// Those of [`TextEncoder::encode`], of each answer; [`RecordProblem::TooLong`] if two sequences
    /// of the longer one's length exceed the limit; [`RecordProblem::Answers`] without a second
    /// answer.
    pub fn encode_pair(
        &self,
        conversation: &Conversation,
        grids: Grids<'_>,
        options: &EncodeOptions,
    ) -> Result<Sample> {
        let at_line = |problem: RecordProblem| problem.at(conversation.line);
        let Some(other) = &conversation.other else {
            return Err(at_line(RecordProblem::Answers {
                expected: "two answers",
                found: "one".to_owned(),
            }));
        };
        let mut options = options.clone();
        // Of a pair, no turn is dropped: both answers must see the same prompt.
        options.overlong = Overlong::Refuse;
        let (prompt, answer) = conversation.messages.split_at(other.prompt);
        let of_answer = |answer: &[Message]| {
            self.encode_answer(conversation, [prompt, answer], grids, &options)
        };
        let (mut sample, start) = of_answer(answer)?;
        let (second, second_start) = of_answer(&other.messages)?;
        let tokens = 2 * sample.input_ids.len().max(second.input_ids.len());
        if let Some(max_tokens) = options.max_tokens.filter(|most| tokens > *most) {
            return Err(at_line(RecordProblem::TooLong {
                tokens,
                max_tokens,
                dropped: 0,
            }));
        }
        let begin = sample.input_ids.len();
        sample.input_ids.extend(second.input_ids);
        sample.labels.extend(second.labels);
        sample.pair = Some(AnswerPair {
            second: begin,
            answers: [start, begin + second_start],
            is_good: conversation.is_good,
        });
        Ok(sample)
    }

    /// A prompt with an answer, and the first token of the answer.
    fn encode_answer(
        &self,
        conversation: &Conversation,
        [prompt, answer]: [&[Message]; 2],
        grids: Grids<'_>,
        options: &EncodeOptions,
    ) -> Result<(Sample, usize)> {
        let mut whole = Conversation {
            messages: prompt.iter().chain(answer).cloned().collect(),
            other: None,
            ..conversation.clone()
        };
        let everything = match options.trained {
            Trained::Everything => Some(self.encode(&whole, grids, options)?),
            Trained::AllTurns | Trained::LastTurn => None,
        };
        let of_prompt = whole.messages.iter_mut().take(prompt.len());
        for message in of_prompt.filter(|message| message.role == Role::Assistant) {
            message.loss = Some(false);
        }
        let options = EncodeOptions {
            trained: Trained::AllTurns,
            ..options.clone()
        };
        let sample = self.encode(&whole, grids, &options)?;
        let start = sample.labels.iter().position(|label| *label != IGNORED);
        Ok((everything.unwrap_or(sample), start.unwrap_or_default()))
    }
}

impl Conversation {
    /// Makes the answer of another conversation the second one.
    pub(crate) fn borrow_answer(&mut self, from: &Self) {
        let prompt = self.answer_start();
        self.other = Some(OtherAnswer {
            prompt,
            messages: from.messages[from.answer_start()..].to_vec(),
        });
    }

    /// The first message after the last one that is not the assistant's or a tool's.
    fn answer_start(&self) -> usize {
        let asks = |message: &Message| matches!(message.role, Role::System | Role::User);
        self.messages
            .iter()
            .rposition(asks)
            .map_or(0, |last| last + 1)
    }
}

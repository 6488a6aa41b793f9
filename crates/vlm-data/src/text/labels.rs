//! Converts conversations to token ids and labels.
//!
//! A label is the token's id if the token is trained on, and [`IGNORED`] otherwise; the loss shifts
//! by one. The template's marks, which no message may contain, identify the assistant's turns in
//! the rendered text. Trainers differ in the trained part of a turn; see [`LabelRule`].

use std::ops::Range;
use std::path::Path;

use vlm_family::{Family, MediaStyle};

use super::account::account;
use super::chat::{Chat, Turn, added};
use super::error::{RecordProblem, Result, TextError};
use super::expand::{Grid, Grids, Padded, VideoGrid, pad};
use super::format::{Conversation, Message, Part, Role};
use super::json::Json;
use super::pair::AnswerPair;
use super::template::{ChatTemplate, RenderOptions, each_string};
use super::tokenizer::{Tokenizer, read_json};

/// The label of a token that is not trained on.
pub const IGNORED: i64 = -100;

/// A token count beyond the context of any model; rejected before memory is allocated.
const MAX_TOKENS: usize = 1 << 24;

/// The rule that selects the trained tokens of the assistant's turns.
///
/// In ChatML (Qwen) a turn is `<|im_start|>assistant`, a line break, the answer, `<|im_end|>` and a
/// line break. All rules train on the answer and on both tokens after it. They differ for an answer
/// that begins with a line break: the first rule encodes the whole text, so the two breaks may be
/// one untrained token; the other two encode the answer separately.
///
/// Llama 3's and Mistral's templates end an answer with one token, on which all rules train.
///
/// In GLM's template, only the role token of the next turn ends a turn. The rules differ in the
/// tokens trained in its place and in the token after the last answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LabelRule {
    /// The rule of Qwen's fine-tuning code. For GLM, which that code does not support, it is
    /// ms-swift's rule.
    #[default]
    Qwen,
    /// The rule of LLaMA-Factory. For GLM, training starts at the line break before the answer; the
    /// role token after the answer has the label of `eos_token`, which is also appended to the last
    /// answer.
    LlamaFactory,
    /// The rule of ms-swift. For GLM, `<|user|>` after an answer is trained on and appended to the
    /// last answer. As in ms-swift, the end of a last answer with `"loss": false` is still trained
    /// on.
    Swift,
    /// The template's `{% generation %}` tags, as read by transformers and TRL's
    /// `assistant_only_loss`.
    Generation,
}

/// The turns that are trained on. The `loss` of a message overrides this.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trained {
    /// All turns.
    #[default]
    AllTurns,
    /// The last turn. With [`LabelRule::Swift`], all turns after the last user message, which
    /// differs if tools were called.
    LastTurn,
    /// The prompts as well: all tokens but those of pictures and videos.
    Everything,
}

/// The treatment of a conversation above the token limit. No turn, and thus no picture, is ever
/// cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overlong {
    /// The conversation is an error.
    #[default]
    Refuse,
    /// Whole turns are dropped with their pictures, oldest first. A turn is a user message and all
    /// messages up to the next one. The system's turn and the last turn are kept.
    DropOldestTurns,
}

/// Options of [`TextEncoder::encode`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct EncodeOptions {
    /// The rule that selects the trained tokens of a turn.
    pub rule: LabelRule,
    /// The turns that are trained on.
    pub trained: Trained,
    /// The token limit, pads included; `None` allows 16,777,216.
    pub max_tokens: Option<usize>,
    /// The treatment of a conversation above the limit.
    pub overlong: Overlong,
    /// The inputs of the template besides the messages.
    pub render: RenderOptions,
}

/// A tokenized and labelled conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The token ids, pads included, \[tokens\].
    pub input_ids: Vec<i64>,
    /// The id of each trained token, [`IGNORED`] for the others, \[tokens\].
    pub labels: Vec<i64>,
    /// The remaining pictures, as indices into [`Conversation::images`].
    pub images: Vec<usize>,
    /// The remaining videos, as indices into [`Conversation::videos`].
    pub videos: Vec<usize>,
    /// The number of dropped turns.
    pub dropped_turns: usize,
    /// The number of thoughts that the template left out of earlier turns.
    pub dropped_thoughts: usize,
    /// The second of two sequences, if ids and labels are of two answers, end to end.
    pub pair: Option<AnswerPair>,
}

/// The purpose of encoding a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// Its answers have labels.
    Training,
    /// The model continues it.
    Prompt,
}

/// Encoder of conversations to token ids and labels: a tokenizer, a chat template and a family's
/// style.
#[derive(Debug)]
pub struct TextEncoder {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    style: Option<MediaStyle>,
    merge: u32,
    /// The marks of turns, if known.
    chat: Option<&'static Chat>,
    reserved: Vec<String>,
    /// The pads of pictures and videos, if the model sees.
    pads: Vec<i64>,
    /// The first mark that ends an answer, and the `eos_token` of the configuration.
    ends: Vec<u32>,
}

impl TextEncoder {
    /// Reads tokenizer, chat template and model type of a checkpoint folder.
    ///
    /// # Errors
    /// Those of [`Tokenizer::from_folder`], [`ChatTemplate::from_folder`] and [`TextEncoder::new`];
    /// [`TextError::File`] if config.json is missing or of an unsupported family.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let path = folder.join("config.json");
        let error = |reason: String| TextError::File {
            path: path.clone(),
            reason,
        };
        let config = read_json(&path)?.ok_or_else(|| error("it does not exist".to_owned()))?;
        let model_type = config
            .get("model_type")
            .and_then(Json::as_str)
            .unwrap_or("");
        let family = Family::of(model_type).map_err(|unknown| error(unknown.to_string()))?;
        let merge = config
            .get("vision_config")
            .and_then(|vision| vision.get("spatial_merge_size"));
        let merge = match merge {
            None => 2,
            Some(Json::Int(merge @ 1..=64)) => *merge as u32,
            Some(other) => return Err(error(format!("spatial_merge_size is {other:?}"))),
        };
        let template = ChatTemplate::from_folder(folder)?;
        Self::new(
            Tokenizer::from_folder(folder)?,
            template,
            family.vision.as_ref().map(|vision| vision.style),
            merge,
        )
    }

    /// Combines the parts. `style` is that of the pictures and videos, `None` for a model of text
    /// alone; `merge` is the side of the square of patches that becomes one token.
    ///
    /// # Errors
    /// [`TextError::MissingToken`] if the tokenizer lacks a mark of the family or of the template.
    pub fn new(
        tokenizer: Tokenizer,
        template: ChatTemplate,
        style: impl Into<Option<MediaStyle>>,
        merge: u32,
    ) -> Result<Self> {
        let style = style.into();
        let chat = Chat::of(style, &template);
        let mut named = tokenizer.named_tokens().iter();
        let eos = named.find(|(name, _)| name == "eos_token");
        let eos = eos.and_then(|(_, token)| tokenizer.token_id(token));
        let mut ends = Vec::new();
        if let Some(chat) = chat {
            let end = chat.end(&tokenizer)?;
            ends = vec![end, eos.unwrap_or(end)];
            if chat.is_open() && eos.is_none() {
                ends[1] = added(&tokenizer, "<|endoftext|>", "ends a text")?;
            }
        }
        ends.extend(eos.filter(|_| chat.is_none()));
        let mut pads = Vec::new();
        if let Some(style) = style {
            for (pad, purpose) in [
                (style.image_pad(), "stands for a part of a picture"),
                (style.video_pad(), "stands for a part of a video"),
            ] {
                pads.push(i64::from(added(&tokenizer, pad, purpose)?));
            }
        }
        Ok(Self {
            reserved: Chat::reserved(chat, &tokenizer),
            tokenizer,
            template,
            style,
            merge,
            chat,
            pads,
            ends,
        })
    }

    /// The tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The notation of pictures and videos; `None` for a model of text alone.
    #[must_use]
    pub fn style(&self) -> Option<MediaStyle> {
        self.style
    }

    /// The ids of the pads of pictures and videos; none for a model of text alone.
    #[must_use]
    pub fn pads(&self) -> &[i64] {
        &self.pads
    }

    /// The tokens that end a turn: the template's mark after an answer, and `eos_token`.
    pub fn ends(&self) -> impl Iterator<Item = i64> {
        self.ends.iter().copied().map(i64::from)
    }

    /// The side of the square of patches that becomes one token.
    #[must_use]
    pub fn merge(&self) -> u32 {
        self.merge
    }

    /// The chat template.
    #[must_use]
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// Renders, encodes and labels a conversation.
    ///
    /// `grids` has one entry per picture and video of the conversation, in order; each picture
    /// becomes `grid.tokens(merge)` pads.
    ///
    /// # Errors
    /// [`TextError::Record`] with the conversation's line, if a text contains a special token, the
    /// template fails or prints other turns or pads than the conversation has, grids do not match,
    /// the token limit is exceeded, or no token is trained on. [`TextError::Encode`] from the
    /// tokenizer.
    pub fn encode(
        &self,
        conversation: &Conversation,
        grids: Grids<'_>,
        options: &EncodeOptions,
    ) -> Result<Sample> {
        self.encode_for(conversation, grids, options, Purpose::Training)
    }

    /// Renders and encodes a prompt for generation: the messages without a final assistant message,
    /// followed by the start of an answer. No token has a label.
    ///
    /// # Errors
    /// Those of [`TextEncoder::encode`]; [`RecordProblem::NoPrompt`] if no message precedes the
    /// answer.
    pub fn encode_prompt(
        &self,
        conversation: &Conversation,
        grids: Grids<'_>,
        options: &EncodeOptions,
    ) -> Result<Sample> {
        let mut options = options.clone();
        options.render.add_generation_prompt = true;
        let mut prompt = conversation.clone();
        prompt.messages.pop_if(|last| last.role == Role::Assistant);
        if prompt.messages.is_empty() {
            return Err(RecordProblem::NoPrompt.at(conversation.line));
        }
        self.encode_for(&prompt, grids, &options, Purpose::Prompt)
    }

    fn encode_for(
        &self,
        conversation: &Conversation,
        grids: Grids<'_>,
        options: &EncodeOptions,
        purpose: Purpose,
    ) -> Result<Sample> {
        let at_line = |problem: RecordProblem| problem.at(conversation.line);
        for (kind, media, grids) in [
            ("images", conversation.images.len(), grids.images.len()),
            ("videos", conversation.videos.len(), grids.videos.len()),
        ] {
            if media != grids {
                return Err(at_line(RecordProblem::Grids { kind, media, grids }));
            }
        }
        if !conversation.plain {
            self.check_text(conversation).map_err(at_line)?;
        }
        let limit = options.max_tokens.unwrap_or(MAX_TOKENS).min(MAX_TOKENS);
        let groups = groups(&conversation.messages);
        let dropped = |turns: usize| {
            let after = groups
                .get(turns)
                .map_or(conversation.messages.len(), |group| group.start);
            let system = usize::from(conversation.messages[0].role == Role::System);
            let (head, tail) = (
                &conversation.messages[..system],
                &conversation.messages[after..],
            );
            let messages: Vec<Message> = head.iter().chain(tail).cloned().collect();
            self.try_encode(conversation, &messages, grids, options, (limit, purpose))
        };
        let too_long = |tokens, dropped| {
            at_line(RecordProblem::TooLong {
                tokens,
                max_tokens: limit,
                dropped,
            })
        };
        let tokens = match self.try_encode(
            conversation,
            &conversation.messages,
            grids,
            options,
            (limit, purpose),
        )? {
            Attempt::Fits(sample) => return Ok(sample),
            Attempt::TooLong(tokens) => tokens,
        };
        if options.overlong == Overlong::Refuse || groups.len() < 2 {
            return Err(too_long(tokens, 0));
        }
        // The smallest number of turns to drop, between `short`, which is too small, and `enough`.
        let (mut short, mut enough) = (0, groups.len() - 1);
        let mut best = match dropped(enough)? {
            Attempt::Fits(sample) => sample,
            Attempt::TooLong(tokens) => return Err(too_long(tokens, enough)),
        };
        while enough - short > 1 {
            let middle = usize::midpoint(short, enough);
            match dropped(middle)? {
                Attempt::Fits(sample) => (enough, best) = (middle, sample),
                Attempt::TooLong(_) => short = middle,
            }
        }
        best.dropped_turns = enough;
        Ok(best)
    }

    /// Rejects texts that contain a mark of the template.
    fn check_text(&self, conversation: &Conversation) -> Result<(), RecordProblem> {
        let mut problem = None;
        let mut check = |message: usize, text: &str| {
            if problem.is_none()
                && let Some(token) = self.reserved.iter().find(|token| text.contains(*token))
            {
                let token = token.clone();
                problem = Some(RecordProblem::SpecialToken { message, token });
            }
        };
        for (index, message) in conversation.messages.iter().enumerate() {
            for part in &message.parts {
                if let Part::Text(text) = part {
                    check(index + 1, text);
                }
            }
            for (_, json) in &message.extra {
                each_string(json, &mut |text: &str| check(index + 1, text));
            }
        }
        if let Some(tools) = &conversation.tools {
            each_string(tools, &mut |text: &str| check(0, text));
        }
        problem.map_or(Ok(()), Err)
    }

    /// Encodes a subset of a conversation's messages.
    fn try_encode(
        &self,
        conversation: &Conversation,
        messages: &[Message],
        grids: Grids<'_>,
        options: &EncodeOptions,
        (limit, purpose): (usize, Purpose),
    ) -> Result<Attempt> {
        let at_line = |problem: RecordProblem| problem.at(conversation.line);
        let media = Media::new(messages, grids).map_err(at_line)?;
        if conversation.plain {
            return self.encode_plain(conversation, options.trained, limit);
        }
        let (tools, named) = (conversation.tools.as_ref(), self.tokenizer.named_tokens());
        let rendered = self
            .template
            .render(messages, tools, named, &options.render);
        let rendered = rendered.map_err(at_line)?;
        let padded = pad(
            &rendered.text,
            self.style,
            self.merge,
            &media.image_grids,
            &media.video_grids,
            rendered.generated,
        );
        let padded = padded.map_err(at_line)?;
        let (ids, labels) = match purpose {
            Purpose::Training => self.label(messages, &padded, options, at_line)?,
            Purpose::Prompt => {
                let ids = self.tokenizer.encode(&padded.text)?;
                let labels = vec![IGNORED; ids.len()];
                (ids, labels)
            }
        };
        let dropped_thoughts = account(messages, tools, &rendered.text).map_err(at_line)?;
        let tokens = ids.len().saturating_add(padded.added_tokens());
        if tokens > limit {
            return Ok(Attempt::TooLong(tokens));
        }
        if purpose == Purpose::Training && labels.iter().all(|&label| label == IGNORED) {
            let reason = "every answer is masked, by \"loss\": false or by the choice of turns";
            return Err(at_line(RecordProblem::NothingToTrain { reason }));
        }
        let (input_ids, labels) = self.expanded(&ids, &labels, &padded.runs);
        Ok(Attempt::Fits(Sample {
            input_ids,
            labels,
            images: media.images,
            videos: media.videos,
            dropped_turns: 0,
            dropped_thoughts,
            pair: None,
        }))
    }

    fn is_pad(&self, id: u32) -> bool {
        self.pads.contains(&i64::from(id))
    }

    /// Ids and labels with each pad repeated as often as its picture has tokens.
    fn expanded(&self, ids: &[u32], labels: &[i64], runs: &[usize]) -> (Vec<i64>, Vec<i64>) {
        let mut runs = runs.iter().copied();
        let pairs = ids.iter().zip(labels).flat_map(|(id, label)| {
            let run = match self.is_pad(*id) {
                true => runs.next().unwrap_or(1),
                false => 1,
            };
            std::iter::repeat_n((i64::from(*id), *label), run)
        });
        pairs.unzip()
    }

    /// Encodes texts without the template: the last and `eos_token` after it are trained on.
    ///
    /// # Source
    /// TRL 1.16, `SFTTrainer`: tokens of the prompt, and of prompt and completion together
    fn encode_plain(
        &self,
        conversation: &Conversation,
        trained: Trained,
        limit: usize,
    ) -> Result<Attempt> {
        let at_line = |problem: RecordProblem| problem.at(conversation.line);
        let mut texts: Vec<String> = conversation.messages.iter().map(Message::text).collect();
        let mut text = texts.pop().unwrap_or_default();
        let prompt = texts.concat();
        let named = self.tokenizer.named_tokens().iter();
        let mut eos = named
            .filter(|(name, _)| name == "eos_token")
            .map(|(_, token)| token);
        if let Some(eos) = eos.next_back().filter(|eos| !text.ends_with(*eos)) {
            text.push_str(eos);
        }
        let begin = self.tokenizer.begin();
        let encode = |text: &str| -> Result<Vec<u32>> {
            Ok([begin, &self.tokenizer.encode(text)?].concat())
        };
        let ids = encode(&(prompt.clone() + &text))?;
        // The end of the prompt may become other tokens before the completion.
        let untrained = match prompt.is_empty() || trained == Trained::Everything {
            true => 0,
            false => {
                let alone = encode(&prompt)?;
                let pairs = alone.iter().zip(&ids);
                pairs.take_while(|(one, other)| one == other).count()
            }
        };
        if ids.len() > limit {
            return Ok(Attempt::TooLong(ids.len()));
        }
        if let Some(style) = self.style
            && ids.iter().any(|id| self.is_pad(*id))
        {
            let token = style.image_pad().to_owned();
            return Err(at_line(RecordProblem::SpecialToken { message: 1, token }));
        }
        let mut labels = vec![IGNORED; ids.len()];
        label(&mut labels, &ids, untrained..ids.len());
        if untrained >= ids.len() {
            let reason = "nothing follows the prompt";
            return Err(at_line(RecordProblem::NothingToTrain { reason }));
        }
        Ok(Attempt::Fits(Sample {
            input_ids: ids.into_iter().map(i64::from).collect(),
            labels,
            ..Sample::default()
        }))
    }

    /// The labels of all tokens but those that have a label, and those of pictures and videos.
    fn all_but(&self, ids: &[u32], labels: &[i64]) -> Vec<i64> {
        let pairs = ids.iter().zip(labels);
        let label = |(id, label): (&u32, &i64)| match *label == IGNORED && !self.is_pad(*id) {
            true => i64::from(*id),
            false => IGNORED,
        };
        pairs.map(label).collect()
    }

    /// Labels the tokens of a range that have no label, without those of pictures and videos.
    fn fill(&self, labels: &mut [i64], ids: &[u32], range: Range<usize>) {
        for index in range {
            if labels[index] == IGNORED && !self.is_pad(ids[index]) {
                labels[index] = i64::from(ids[index]);
            }
        }
    }

    /// The ids and labels of a rendered text, in which each pad is one token.
    fn label(
        &self,
        messages: &[Message],
        padded: &Padded,
        options: &EncodeOptions,
        at_line: impl Fn(RecordProblem) -> TextError,
    ) -> Result<(Vec<u32>, Vec<i64>)> {
        let (ids, labels) = self.label_turns(messages, padded, options, at_line)?;
        let labels = match options.trained {
            Trained::Everything => self.all_but(&ids, &labels),
            Trained::AllTurns | Trained::LastTurn => labels,
        };
        Ok((ids, labels))
    }

    /// As [`label`](Self::label); if everything is trained on, the labels are of the answers that are
    /// not.
    fn label_turns(
        &self,
        messages: &[Message],
        padded: &Padded,
        options: &EncodeOptions,
        at_line: impl Fn(RecordProblem) -> TextError,
    ) -> Result<(Vec<u32>, Vec<i64>)> {
        let answers: Vec<&Message> = messages
            .iter()
            .filter(|message| message.role == Role::Assistant)
            .collect();
        let chosen = trained(messages, options);
        let mut trained = chosen.clone();
        if options.trained == Trained::Everything {
            for train in &mut trained {
                *train = match train {
                    Train::All => Train::None,
                    Train::End | Train::None => Train::All,
                };
            }
        }
        match options.rule {
            LabelRule::Generation => {
                if !self.template.has_generation() {
                    return Err(at_line(RecordProblem::NoGenerationTag));
                }
                expect_turns(padded.ranges.len(), answers.len()).map_err(at_line)?;
                self.label_generated(&padded.text, &padded.ranges, &trained)
            }
            rule => {
                let chat = self
                    .chat
                    .ok_or_else(|| at_line(RecordProblem::UnknownChat))?;
                let turns = chat.turns(&padded.text).and_then(|turns| {
                    expect_turns(turns.len(), answers.len())?;
                    Ok(turns)
                });
                let turns = turns.map_err(&at_line)?;
                expect_answers(messages, &padded.text, &turns, &chosen).map_err(at_line)?;
                let through = through(messages, &chosen, options);
                let parts = Parts {
                    turns: &turns,
                    trained: &trained,
                    through: &through,
                };
                if chat.is_open() {
                    self.label_open(&padded.text, parts, rule)
                } else {
                    self.label_closed(&padded.text, parts, (chat.trained_after, rule))
                }
            }
        }
    }

    /// Encodes the pieces of a text between `cuts` separately.
    fn encode_pieces(&self, text: &str, cuts: &[usize]) -> Result<(Vec<u32>, Vec<usize>)> {
        let (mut ids, mut starts, mut from) = (Vec::new(), Vec::new(), 0);
        for to in cuts.iter().copied().chain([text.len()]) {
            let (piece_ids, piece_starts) = self.tokenizer.encode_with_starts(&text[from..to])?;
            ids.extend(piece_ids);
            starts.extend(piece_starts.into_iter().map(|start| from + start));
            from = to;
        }
        Ok((ids, starts))
    }

    fn label_closed(
        &self,
        text: &str,
        parts: Parts<'_>,
        (trained_after, rule): (usize, LabelRule),
    ) -> Result<(Vec<u32>, Vec<i64>)> {
        let (turns, trained) = (parts.turns, parts.trained);
        let cuts: Vec<usize> = match rule {
            LabelRule::Qwen | LabelRule::Generation => Vec::new(),
            LabelRule::LlamaFactory => turns.iter().map(|turn| turn.answer.start).collect(),
            LabelRule::Swift => trained_starts(turns, trained),
        };
        let (ids, starts) = self.encode_pieces(text, &cuts)?;
        let mut labels = vec![IGNORED; ids.len()];
        let mut before = 0;
        for ((turn, train), through) in turns.iter().zip(trained).zip(parts.through) {
            let first = starts.partition_point(|&start| start < turn.answer.start);
            let end = starts.partition_point(|&start| start < turn.answer.end);
            let after = (end + trained_after).min(ids.len());
            let last = after == ids.len();
            match train {
                Train::All => label(&mut labels, &ids, first..after),
                Train::End if last && rule == LabelRule::Swift => {
                    label(&mut labels, &ids, end..after);
                }
                Train::End | Train::None => {}
            }
            if *through {
                self.fill(&mut labels, &ids, before..first);
            }
            before = after;
        }
        Ok((ids, labels))
    }

    fn label_open(
        &self,
        text: &str,
        Parts {
            turns,
            trained,
            through,
        }: Parts<'_>,
        rule: LabelRule,
    ) -> Result<(Vec<u32>, Vec<i64>)> {
        let factory = rule == LabelRule::LlamaFactory;
        let start = |turn: &Turn| {
            if factory {
                turn.header_end
            } else {
                turn.answer.start
            }
        };
        let cuts: Vec<usize> = if factory {
            turns.iter().map(start).collect()
        } else {
            trained_starts(turns, trained)
        };
        let (mut ids, starts) = self.encode_pieces(text, &cuts)?;
        let mut labels = vec![IGNORED; ids.len()];
        let &[end_id, eos_id] = &self.ends[..] else {
            unreachable!("a chat has both");
        };
        let last_end = if factory { eos_id } else { end_id };
        let mut before = 0;
        for (index, (turn, train)) in turns.iter().zip(trained).enumerate() {
            let first = starts.partition_point(|&place| place < start(turn));
            let end = starts.partition_point(|&place| place < turn.answer.end);
            if *train == Train::All {
                label(&mut labels, &ids, first..end);
                if end < starts.len() && factory {
                    labels[end] = i64::from(eos_id);
                } else if end < starts.len() && ids[end] == end_id {
                    labels[end] = i64::from(end_id);
                }
            }
            if through.get(index) == Some(&true) {
                self.fill(&mut labels, &ids, before..first);
            }
            before = end;
            if index + 1 == turns.len() && end == starts.len() {
                let ends =
                    *train == Train::All || (*train == Train::End && rule == LabelRule::Swift);
                ids.push(last_end);
                labels.push(if ends { i64::from(last_end) } else { IGNORED });
            }
        }
        Ok((ids, labels))
    }

    fn label_generated(
        &self,
        text: &str,
        ranges: &[Range<usize>],
        trained: &[Train],
    ) -> Result<(Vec<u32>, Vec<i64>)> {
        let (ids, starts) = self.tokenizer.encode_with_starts(text)?;
        let mut labels = vec![IGNORED; ids.len()];
        // The first of the tokens that hold a byte, as transformers' char_to_token.
        let holding = |byte: usize| {
            let after = starts.partition_point(|&start| start <= byte);
            let start = after.checked_sub(1).map_or(0, |last| starts[last]);
            starts.partition_point(|&other| other < start)
        };
        for (range, train) in ranges.iter().zip(trained) {
            if *train != Train::All || range.is_empty() {
                continue;
            }
            let last = text[range.clone()]
                .char_indices()
                .next_back()
                .map_or(0, |(at, _)| at);
            let to = (holding(range.start + last) + 1).min(ids.len());
            label(&mut labels, &ids, holding(range.start).min(to)..to);
        }
        Ok((ids, labels))
    }
}

/// The pictures and videos that messages name, in their order.
struct Media<'a> {
    images: Vec<usize>,
    videos: Vec<usize>,
    image_grids: Vec<Grid>,
    video_grids: Vec<&'a VideoGrid>,
}

impl<'a> Media<'a> {
    fn new(messages: &[Message], grids: Grids<'a>) -> Result<Self, RecordProblem> {
        let (mut images, mut videos) = (Vec::new(), Vec::new());
        for part in messages.iter().flat_map(|message| &message.parts) {
            match part {
                Part::Image(index) => images.push(*index),
                Part::Video(index) => videos.push(*index),
                Part::Text(_) => {}
            }
        }
        // A conversation built by hand may name pictures that it lacks.
        let missing = |kind, media, grids| RecordProblem::Grids { kind, media, grids };
        let image_grids = images.iter().map(|&index| grids.images.get(index).copied());
        let video_grids = videos.iter().map(|&index| grids.videos.get(index));
        Ok(Self {
            image_grids: image_grids
                .collect::<Option<_>>()
                .ok_or_else(|| missing("images", images.len(), grids.images.len()))?,
            video_grids: video_grids
                .collect::<Option<_>>()
                .ok_or_else(|| missing("videos", videos.len(), grids.videos.len()))?,
            images,
            videos,
        })
    }
}

enum Attempt {
    Fits(Sample),
    /// With as many tokens.
    TooLong(usize),
}

/// The assistant's turns in a text, and of each: the part that is trained on, and whether the
/// messages before it are trained on, too.
#[derive(Clone, Copy, Debug)]
struct Parts<'a> {
    turns: &'a [Turn],
    trained: &'a [Train],
    through: &'a [bool],
}

/// The part of a turn that is trained on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Train {
    All,
    /// Only the end of the answer, as in ms-swift.
    End,
    None,
}

/// The part of each of the assistant's turns that is trained on.
fn trained(messages: &[Message], options: &EncodeOptions) -> Vec<Train> {
    let answers = messages
        .iter()
        .enumerate()
        .filter(|(_, m)| m.role == Role::Assistant);
    let last_answer = messages
        .iter()
        .rposition(|message| message.role == Role::Assistant);
    let last_user = messages
        .iter()
        .rposition(|message| message.role == Role::User);
    answers
        .map(|(index, message)| {
            let chosen = match (options.trained, options.rule) {
                (Trained::AllTurns | Trained::Everything, _) => true,
                (Trained::LastTurn, LabelRule::Swift) => Some(index) > last_user,
                (Trained::LastTurn, _) => Some(index) == last_answer,
            };
            match message.loss {
                Some(true) => Train::All,
                None if chosen => Train::All,
                Some(false) if chosen => Train::End,
                _ => Train::None,
            }
        })
        .collect()
}

/// True for each answer that is trained on together with the messages since the answer before:
/// within a completion of TRL.
fn through(messages: &[Message], trained: &[Train], options: &EncodeOptions) -> Vec<bool> {
    let (mut out, mut says) = (Vec::with_capacity(trained.len()), false);
    for message in messages {
        if message.role != Role::Assistant {
            says = message.loss == Some(true);
            continue;
        }
        let here = out.len();
        let both = here > 0 && trained[here - 1..].iter().take(2).all(|t| *t == Train::All);
        out.push(says && both && options.trained != Trained::Everything);
        says = false;
    }
    out
}

/// The starts of the trained answers: ms-swift joins the other answers to the prompt before
/// encoding.
fn trained_starts(turns: &[Turn], trained: &[Train]) -> Vec<usize> {
    let trained = turns
        .iter()
        .zip(trained)
        .filter(|(_, train)| **train == Train::All);
    trained.map(|(turn, _)| turn.answer.start).collect()
}

fn expect_turns(found: usize, expected: usize) -> Result<(), RecordProblem> {
    if found == expected {
        Ok(())
    } else {
        Err(RecordProblem::Turns { expected, found })
    }
}

/// Refuses a trained answer that the template renders empty.
fn expect_answers(
    messages: &[Message],
    text: &str,
    turns: &[Turn],
    trained: &[Train],
) -> Result<(), RecordProblem> {
    let is_answer = |(_, message): &(usize, &Message)| message.role == Role::Assistant;
    let answers = messages.iter().enumerate().filter(is_answer);
    for (((index, message), turn), train) in answers.zip(turns).zip(trained) {
        if *train == Train::All && text[turn.answer.clone()].trim().is_empty() {
            return Err(RecordProblem::NotRendered {
                message: index + 1,
                what: "the answer",
                text: message.text().chars().take(60).collect(),
            });
        }
    }
    Ok(())
}

fn label(labels: &mut [i64], ids: &[u32], range: Range<usize>) {
    for index in range {
        labels[index] = i64::from(ids[index]);
    }
}

/// The turns of a conversation: each begins with a user message that follows another role's
/// message.
fn groups(messages: &[Message]) -> Vec<Range<usize>> {
    let begins = |index: &usize| {
        let is_user = |message: &Message| message.role == Role::User;
        match index.checked_sub(1) {
            None => messages[0].role != Role::System,
            Some(before) if messages[before].role == Role::System => true,
            Some(before) => is_user(&messages[*index]) && !is_user(&messages[before]),
        }
    };
    let starts: Vec<usize> = (0..messages.len()).filter(begins).collect();
    let ends = starts.iter().skip(1).copied().chain([messages.len()]);
    starts
        .iter()
        .copied()
        .zip(ends)
        .map(|(start, end)| start..end)
        .collect()
}

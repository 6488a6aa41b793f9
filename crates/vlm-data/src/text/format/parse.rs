//! Converts one record to a conversation.

use std::borrow::Cow;
use std::path::Path;

use super::answers::{self, Answers, Side};
use super::keys::{self, Place, account};
use super::limits::PictureLimits;
use super::media::{self, MediaSource, Video, wrong};
use super::objects::Objects;
use super::{Conversation, Format, Message, Part, Role, turns};
use crate::text::error::RecordProblem;
use crate::text::json::Json;

type Result<T> = std::result::Result<T, RecordProblem>;

const IMAGE: &str = "<image>";
const VIDEO: &str = "<video>";

/// Reads a record, whose pictures are relative to `folder`.
pub(super) fn conversation(
    line: u64,
    record: &Json,
    (format, expected): (Format, Answers),
    folder: &Path,
) -> Result<Conversation> {
    let mut unread = Vec::new();
    account(Place::Record, record, "", &mut unread)?;
    let format = match format {
        Format::Recognised => recognise(record)?,
        stated => stated,
    };
    // Keys of a second format beside the one that is read.
    let main = main_keys(format, record)?;
    let all = MAIN.iter().chain(&QUESTIONS).chain(&ANSWERS);
    for key in all.filter(|key| !main.contains(key)) {
        if record.get(key).is_some() {
            keys::note((*key).to_owned(), &mut unread);
        }
    }
    let is_good = answers::check(record, expected, &mut unread)?;
    let first = read(record, format, folder, (Side::First, unread))?;
    let mut other = None;
    if answers::has_second(record) {
        let second = read(record, format, folder, (Side::Second, Vec::new()))?;
        if first.media.images != second.media.images || first.media.videos != second.media.videos {
            return Err(RecordProblem::PairMedia);
        }
        other = Some(answers::other(
            &first.messages,
            second.messages,
            first.prompt,
        )?);
    }
    let (messages, mut media) = (first.messages, first.media);
    let objects = record.get("objects").map(|objects| {
        account(Place::Objects, objects, "objects", &mut media.unread)?;
        Objects::read(objects, media.images.len())
    });
    let objects = objects.transpose()?;
    Ok(Conversation {
        line,
        messages,
        images: media.images,
        image_limits: media.limits,
        videos: media.videos,
        objects,
        tools: tools(record)?,
        other,
        is_good,
        plain: first.plain,
        unread: media.unread,
    })
}

/// The messages of a record up to one of its answers.
struct Messages<'a> {
    messages: Vec<Message>,
    media: Media<'a>,
    plain: bool,
    /// The number of messages before the answer, if the record states it.
    prompt: Option<usize>,
}

fn read<'a>(
    record: &Json,
    format: Format,
    folder: &'a Path,
    (side, unread): (Side, Vec<String>),
) -> Result<Messages<'a>> {
    let mut media = Media::read(record, folder, unread)?;
    let (mut plain, mut prompt) = (false, None);
    let one_answer = [Format::Pairs, Format::Completion, Format::Text];
    if side == Side::Second && one_answer.contains(&format) {
        return Err(RecordProblem::NoSharedPrompt);
    }
    let mut messages = match format {
        Format::Messages | Format::ShareGpt | Format::Llava | Format::Recognised => {
            let mut messages = dialogue(record, format, side, &mut media)?;
            if let Some(answer) = answer_of_pair(record, side) {
                prompt = Some(messages.len());
                messages.extend(answer_messages(answer, side.key(), &mut media)?);
            }
            messages
        }
        Format::Preference => match answers::plain(record, side) {
            Some([prompt, _]) if prompt.is_empty() => return Err(RecordProblem::NoSharedPrompt),
            Some(texts) => {
                plain = true;
                prompt = Some(1);
                plain_messages(texts)
            }
            None => pair(record, side, &mut media, &mut prompt)?,
        },
        Format::Alpaca => alpaca(record, side, &mut media)?,
        Format::Query => query(record, side, &mut media)?,
        Format::Completion => match completion(record, &mut media)? {
            Some(messages) => messages,
            None => {
                plain = true;
                plain_text(record, &["prompt", "completion"])?
            }
        },
        Format::Text => {
            plain = true;
            plain_text(record, &["text"])?
        }
        Format::Pairs => turns_of(record, "conversation", &mut media, false)?,
    };
    if let Some(system) = system(record)? {
        if plain
            || messages
                .first()
                .is_some_and(|first| first.role == Role::System)
        {
            return Err(RecordProblem::SystemTwice);
        }
        messages.insert(0, system);
        prompt = prompt.map(|prompt| prompt + 1);
    }
    media.finish()?;
    turns::check(&messages)?;
    Ok(Messages {
        messages,
        media,
        plain,
        prompt,
    })
}

/// The list of messages of a record; that of its second answer may be a list of its own, or its last
/// message.
fn dialogue(
    record: &Json,
    format: Format,
    side: Side,
    media: &mut Media<'_>,
) -> Result<Vec<Message>> {
    if format != Format::Messages {
        return turns_of(record, "conversations", media, format != Format::ShareGpt);
    }
    let is_second = side == Side::Second;
    if is_second && record.get("rejected_messages").is_some() {
        return turns_of(record, "rejected_messages", media, false);
    }
    let mut messages = turns_of(record, "messages", media, false)?;
    if is_second && let Some(answer) = record.get("rejected_response") {
        messages.pop_if(|last| last.role == Role::Assistant);
        messages.extend(answer_messages(answer, "rejected_response", media)?);
    }
    Ok(messages)
}

/// The answer of a pair that follows its prompt.
fn answer_of_pair(record: &Json, side: Side) -> Option<&Json> {
    record.get("rejected")?;
    record.get(side.key())
}

/// An answer: a text, a message or a list of messages.
fn answer_messages(answer: &Json, key: &str, media: &mut Media<'_>) -> Result<Vec<Message>> {
    let messages = match answer {
        Json::String(text) => {
            let mut messages = Vec::new();
            say(&mut messages, Role::Assistant, text, media);
            messages
        }
        Json::Array(items) => turns::read(items, key, media, false)?,
        message => turns::read(std::slice::from_ref(message), key, media, false)?,
    };
    match messages.first().map(|first| first.role) {
        Some(Role::Assistant) => Ok(messages),
        found => Err(RecordProblem::Value {
            key: key.to_owned(),
            expected: "an answer, \"assistant\"",
            found: format!("{:?}", found.map_or("nothing", Role::name)),
        }),
    }
}

/// `prompt` and an answer to it, or a conversation that begins with the prompt.
fn pair(
    record: &Json,
    side: Side,
    media: &mut Media<'_>,
    prompt: &mut Option<usize>,
) -> Result<Vec<Message>> {
    let key = side.key();
    let answer = record.get(key).unwrap_or(&Json::Null);
    let items = answer.as_array().unwrap_or_default();
    let role = |item: &Json| {
        item.get("role")
            .or(item.get("from"))
            .and_then(Json::as_str)
            .map(str::to_owned)
    };
    let is_whole = items
        .first()
        .and_then(role)
        .is_some_and(|role| ["user", "human", "system"].contains(&&role[..]));
    if is_whole {
        return turns::read(items, key, media, false);
    }
    let mut messages = match record.get("prompt") {
        Some(Json::String(text)) => {
            let mut messages = Vec::new();
            say(&mut messages, Role::User, text, media);
            messages
        }
        None | Some(Json::Null) => return Err(RecordProblem::NoSharedPrompt),
        Some(_) => turns::read(array(record, "prompt")?, "prompt", media, false)?,
    };
    *prompt = Some(messages.len());
    messages.extend(answer_messages(answer, key, media)?);
    Ok(messages)
}

/// The keys that hold a record's text.
const MAIN: [&str; 4] = ["messages", "conversations", "conversation", "history"];
/// The names of a question and of an answer: ms-swift's ResponsePreprocessor.
const QUESTIONS: [&str; 6] = [
    "query",
    "prompt",
    "input",
    "instruction",
    "question",
    "problem",
];
const ANSWERS: [&str; 11] = [
    "response",
    "answer",
    "output",
    "targets",
    "target",
    "answer_key",
    "answers",
    "solution",
    "text",
    "completion",
    "content",
];

/// The name of a record's question or answer: `first` if it is there, or the only one.
fn name_of(
    record: &Json,
    names: &[&'static str],
    first: &'static str,
) -> Result<Option<&'static str>> {
    if record.get(first).is_some() {
        return Ok(Some(first));
    }
    let has = |name: &&&str| record.get(name).is_some();
    let mut found = names.iter().filter(has);
    match (found.next(), found.next()) {
        (Some(name), Some(other)) => Err(RecordProblem::Value {
            key: (*name).to_owned(),
            expected: "the only key of its kind",
            found: format!("{other:?} beside it"),
        }),
        (name, _) => Ok(name.copied()),
    }
}

/// The name of a record's question, and that of its answer.
fn question_of(record: &Json) -> Result<Option<&'static str>> {
    name_of(record, &QUESTIONS, "query")
}

fn answer_of(record: &Json, format: Format) -> Result<Option<&'static str>> {
    let first = if format == Format::Alpaca {
        "output"
    } else {
        "response"
    };
    name_of(record, &ANSWERS, first)
}

fn main_keys(format: Format, record: &Json) -> Result<Vec<&'static str>> {
    let mut main = match format {
        Format::Recognised | Format::ShareGpt | Format::Llava => return Ok(vec!["conversations"]),
        Format::Messages => return Ok(vec!["messages"]),
        Format::Pairs => return Ok(vec!["conversation"]),
        Format::Completion => return Ok(vec!["prompt", "completion"]),
        Format::Text => return Ok(vec!["text"]),
        Format::Preference => return Ok(vec!["prompt"]),
        Format::Alpaca => vec!["instruction", "input"],
        Format::Query => question_of(record)?.into_iter().collect(),
    };
    main.extend(answer_of(record, format)?);
    main.push("history");
    Ok(main)
}

fn recognise(record: &Json) -> Result<Format> {
    let has = |key: &str| record.get(key).is_some();
    let stated = |key: &str| matches!(record, Json::Object(pairs) if pairs.iter().any(|(name, _)| name == key));
    let asks = QUESTIONS.iter().any(|key| has(key));
    let answers = |names: &[&str]| names.iter().any(|key| has(key));
    Ok(match () {
        () if has("messages") => Format::Messages,
        () if answers::is_pair(record) => Format::Preference,
        () if has("conversations") && (stated("image") || stated("video")) => Format::Llava,
        () if has("conversations") => Format::ShareGpt,
        () if has("conversation") => Format::Pairs,
        () if has("instruction") => Format::Alpaca,
        () if has("response") => Format::Query,
        () if has("prompt") && has("completion") => Format::Completion,
        () if has("text") && !asks => Format::Text,
        () if asks && answers(&ANSWERS) || answers(&ANSWERS[..8]) => Format::Query,
        () => {
            let found = match record {
                Json::Object(pairs) => pairs.iter().map(|(key, _)| key.clone()).collect(),
                _ => Vec::new(),
            };
            return Err(RecordProblem::UnknownFormat { found });
        }
    })
}

/// The files of a record, and those that the messages have named so far.
pub(super) struct Media<'a> {
    pub(super) folder: Cow<'a, Path>,
    /// From the record's own keys, in order; each mark takes the next.
    listed_images: Vec<(MediaSource, PictureLimits)>,
    listed_videos: Vec<Video>,
    image_marks: usize,
    video_marks: usize,
    images: Vec<MediaSource>,
    /// Of the pictures with limits of their own, and those before them.
    limits: Vec<PictureLimits>,
    videos: Vec<Video>,
    /// Keys that are not read.
    pub(super) unread: Vec<String>,
}

/// The values under either key of a record, each alone or in a list.
fn listed<T>(
    record: &Json,
    keys: [&str; 2],
    unread: &mut Vec<String>,
    read: impl Fn(&Json, &str) -> Result<T>,
) -> Result<Vec<T>> {
    let mut found = Vec::new();
    let mut read = |item: &Json, key: &str| {
        account(Place::Part, item, key, unread)?;
        read(item, key)
    };
    for key in keys {
        match record.get(key) {
            None => {}
            // LLaVA: no picture.
            Some(Json::String(path)) if path.is_empty() => {}
            Some(Json::Array(items)) => {
                for (index, item) in items.iter().enumerate() {
                    found.push(read(item, &format!("{key}[{index}]"))?);
                }
            }
            Some(item) => found.push(read(item, key)?),
        }
    }
    Ok(found)
}

impl<'a> Media<'a> {
    fn read(record: &Json, folder: &'a Path, mut unread: Vec<String>) -> Result<Self> {
        let folder = match record.get("data_path") {
            None => Cow::Borrowed(folder),
            Some(Json::String(path)) => Cow::Owned(folder.join(path)),
            Some(other) => return Err(wrong("data_path", "a folder", other)),
        };
        let listed_images = listed(record, ["images", "image"], &mut unread, |item, key| {
            Ok((
                media::source(item, key, &folder)?,
                PictureLimits::read(item, key)?,
            ))
        })?;
        let mut listed_videos = listed(record, ["videos", "video"], &mut unread, |item, key| {
            media::video(item, key, &folder)
        })?;
        // A rate for all videos without a separate rate.
        if let Some(fps) = record.get("fps") {
            let fps = media::fps(fps, "the record")?;
            for video in &mut listed_videos {
                if video.choice.frames.is_none() {
                    video.fps.get_or_insert(fps);
                }
            }
        }
        Ok(Self {
            folder,
            listed_images,
            listed_videos,
            image_marks: 0,
            video_marks: 0,
            images: Vec::new(),
            limits: Vec::new(),
            videos: Vec::new(),
            unread,
        })
    }

    /// The part of the next `<image>` mark. Marks without a file are counted and rejected at the
    /// end.
    pub(super) fn next_image(&mut self) -> Part {
        if let Some((image, limits)) = self.listed_images.get(self.image_marks).cloned() {
            self.images.push(image);
            self.limit(limits);
        }
        self.image_marks += 1;
        Part::Image(self.images.len().saturating_sub(1))
    }

    pub(super) fn next_video(&mut self) -> Part {
        if let Some(video) = self.listed_videos.get(self.video_marks) {
            self.videos.push(video.clone());
        }
        self.video_marks += 1;
        Part::Video(self.videos.len().saturating_sub(1))
    }

    pub(super) fn own_image(&mut self, image: MediaSource) -> Part {
        self.images.push(image);
        Part::Image(self.images.len() - 1)
    }

    /// Sets the limits of the last picture.
    pub(super) fn limit(&mut self, limits: PictureLimits) {
        if limits != PictureLimits::default() && !self.images.is_empty() {
            self.limits
                .resize(self.images.len(), PictureLimits::default());
            let last = self.images.len() - 1;
            self.limits[last] = limits;
        }
    }

    pub(super) fn own_video(&mut self, video: Video) -> Part {
        self.videos.push(video);
        Part::Video(self.videos.len() - 1)
    }

    /// Changes the last video.
    pub(super) fn last_video(
        &mut self,
        change: impl FnOnce(&mut Video) -> Result<()>,
    ) -> Result<()> {
        self.videos.last_mut().map_or(Ok(()), change)
    }

    fn finish(&self) -> Result<()> {
        for (mark, marks, files) in [
            (IMAGE, self.image_marks, self.listed_images.len()),
            (VIDEO, self.video_marks, self.listed_videos.len()),
        ] {
            if marks != files {
                return Err(RecordProblem::MarkCount { mark, marks, files });
            }
        }
        Ok(())
    }

    /// Splits a text at its marks. `strip` removes white space around pieces, and pieces that
    /// consist of white space.
    pub(super) fn split(&mut self, text: &str, strip: bool) -> Vec<Part> {
        let mut parts = Vec::new();
        let mut rest = text;
        loop {
            let image = rest.find(IMAGE);
            let video = rest.find(VIDEO);
            let (at, mark) = match (image, video) {
                (Some(at), other) if other.is_none_or(|other| at < other) => (at, IMAGE),
                (_, Some(at)) => (at, VIDEO),
                _ => (rest.len(), ""),
            };
            // Removes the same characters as Python's str.strip.
            let piece = &rest[..at];
            let piece = if strip {
                piece.trim_matches(is_python_space)
            } else {
                piece
            };
            if !piece.is_empty() {
                parts.push(Part::Text(piece.to_owned()));
            }
            match mark {
                IMAGE => parts.push(self.next_image()),
                VIDEO => parts.push(self.next_video()),
                // An empty text counts as a text, unlike a missing one.
                _ if parts.is_empty() => return vec![Part::Text(String::new())],
                _ => return parts,
            }
            rest = &rest[at + mark.len()..];
        }
    }
}

/// White space of Python's `str.strip`: Rust's, and four separators.
pub(super) fn is_python_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn say(messages: &mut Vec<Message>, role: Role, text: &str, media: &mut Media<'_>) {
    let mut message = Message::new(role);
    message.parts = media.split(text, false);
    messages.push(message);
}

/// The turns before the last, `history`: pairs of a question and an answer.
fn history(record: &Json, media: &mut Media<'_>) -> Result<Vec<Message>> {
    let mut messages = Vec::new();
    let Some(history) = record.get("history") else {
        return Ok(messages);
    };
    let items = history
        .as_array()
        .ok_or_else(|| wrong("history", "a list", history))?;
    for (index, pair) in items.iter().enumerate() {
        let Some([Json::String(question), Json::String(answer)]) = pair.as_array() else {
            return Err(wrong(&format!("history[{index}]"), "a pair of texts", pair));
        };
        say(&mut messages, Role::User, question, media);
        say(&mut messages, Role::Assistant, answer, media);
    }
    Ok(messages)
}

fn alpaca(record: &Json, side: Side, media: &mut Media<'_>) -> Result<Vec<Message>> {
    let mut messages = history(record, media)?;
    let mut prompt = string(record, "instruction", "the record")?.to_owned();
    if let Some(input) = record.get("input") {
        let input = input
            .as_str()
            .ok_or_else(|| wrong("input", "a text", input))?;
        // LLaMA-Factory joins non-empty texts by a line break.
        if !prompt.is_empty() && !input.is_empty() {
            prompt.push('\n');
        }
        prompt.push_str(input);
    }
    say(&mut messages, Role::User, &prompt, media);
    if let Some(answer) = answer_of_pair(record, side) {
        messages.extend(answer_messages(answer, side.key(), media)?);
        return Ok(messages);
    }
    let answer = answer(record, Format::Alpaca)?;
    say(&mut messages, Role::Assistant, answer, media);
    Ok(messages)
}

/// A question and an answer, with `history`: ms-swift's ResponsePreprocessor.
fn query(record: &Json, side: Side, media: &mut Media<'_>) -> Result<Vec<Message>> {
    let mut messages = history(record, media)?;
    if let Some(name) = question_of(record)? {
        let question = string(record, name, "the record")?;
        say(&mut messages, Role::User, question, media);
    }
    let key = "rejected_response";
    if let Some(answer) = record.get(key).filter(|_| side == Side::Second) {
        messages.extend(answer_messages(answer, key, media)?);
        return Ok(messages);
    }
    let answer = answer(record, Format::Query)?;
    say(&mut messages, Role::Assistant, answer, media);
    Ok(messages)
}

/// The answer, a text or a list of one.
fn answer(record: &Json, format: Format) -> Result<&str> {
    let name = answer_of(record, format)?.unwrap_or("output");
    match record.get(name).and_then(Json::as_array) {
        Some([Json::String(text)]) => Ok(text),
        _ => string(record, name, "the record"),
    }
}

/// A list of messages, or of ms-swift's pairs of a question and an answer.
fn turns_of(record: &Json, list: &str, media: &mut Media<'_>, strip: bool) -> Result<Vec<Message>> {
    let items = array(record, list)?;
    let has = |name: &&str| items.first().is_some_and(|item| item.get(name).is_some());
    let is_pair = ["human", "user", "assistant", "gpt", "bot"].iter().any(has);
    if !is_pair || ["role", "content", "from", "value"].iter().any(has) {
        return turns::read(items, list, media, strip);
    }
    let mut messages = Vec::new();
    for (index, item) in items.iter().enumerate() {
        let key = format!("{list}[{index}]");
        account(Place::Message, item, &key, &mut media.unread)?;
        for (role, names) in [
            (Role::System, &["system"][..]),
            (Role::User, &["human", "user"]),
            (Role::Assistant, &["assistant", "gpt", "bot"]),
        ] {
            let name = names.iter().find(|name| item.get(name).is_some());
            if role != Role::System || name.is_some() {
                let text = string(item, name.unwrap_or(&names[0]), &key)?;
                say(&mut messages, role, text, media);
            }
        }
    }
    Ok(messages)
}

/// `prompt` and `completion` as lists of messages; `None` if they are texts.
fn completion(record: &Json, media: &mut Media<'_>) -> Result<Option<Vec<Message>>> {
    if record
        .get("completion")
        .is_some_and(|value| value.as_str().is_some())
    {
        return Ok(None);
    }
    let mut messages = turns::read(array(record, "prompt")?, "prompt", media, false)?;
    // TRL trains on the completion alone, and on all of its messages.
    for message in messages
        .iter_mut()
        .filter(|message| message.role == Role::Assistant)
    {
        message.loss = Some(false);
    }
    let answers = array(record, "completion")?;
    let mut completion = turns::read(answers, "completion", media, false)?;
    if let Some(first) = completion.first()
        && first.role != Role::Assistant
    {
        return Err(RecordProblem::Value {
            key: "completion[0].role".to_owned(),
            expected: "an answer, \"assistant\"",
            found: format!("{:?}", first.role.name()),
        });
    }
    for message in completion
        .iter_mut()
        .filter(|message| message.role != Role::Assistant)
    {
        message.loss = Some(true);
    }
    messages.extend(completion);
    Ok(Some(messages))
}

/// Texts that are tokenized as they are, without the template: the last is trained on.
fn plain_text(record: &Json, keys: &[&str]) -> Result<Vec<Message>> {
    let texts = keys.iter().map(|key| string(record, key, "the record"));
    Ok(plain_messages(texts.collect::<Result<Vec<_>>>()?))
}

fn plain_messages<T: Into<String>>(texts: impl IntoIterator<Item = T>) -> Vec<Message> {
    let message = |text: T| {
        let mut message = Message::new(Role::User);
        message.parts.push(Part::Text(text.into()));
        message
    };
    let mut messages: Vec<Message> = texts.into_iter().map(message).collect();
    if let Some(last) = messages.last_mut() {
        last.role = Role::Assistant;
    }
    messages
}

/// The record's own `system` key.
fn system(record: &Json) -> Result<Option<Message>> {
    let keys = ["system", "system_prompt"];
    let Some(key) = keys.into_iter().find(|key| record.get(key).is_some()) else {
        return Ok(None);
    };
    let text = string(record, key, "the record")?;
    let mut message = Message::new(Role::System);
    message.parts.push(Part::Text(text.to_owned()));
    Ok((!text.is_empty()).then_some(message))
}

/// `tools`, a list or its text.
fn tools(record: &Json) -> Result<Option<Json>> {
    let tools = match record.get("tools") {
        None => return Ok(None),
        Some(Json::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(Json::String(text)) => {
            Json::parse(text.as_bytes()).map_err(|error| RecordProblem::Value {
                key: "tools".to_owned(),
                expected: "a list of tools",
                found: format!("text that is not JSON ({error})"),
            })?
        }
        Some(tools) => tools.clone(),
    };
    match &tools {
        Json::Array(items) if items.is_empty() => Ok(None),
        Json::Array(_) => Ok(Some(tools)),
        other => Err(wrong("tools", "a list of tools", other)),
    }
}

fn array<'a>(record: &'a Json, key: &str) -> Result<&'a [Json]> {
    let value = record.get(key).unwrap_or(&Json::Null);
    value
        .as_array()
        .ok_or_else(|| wrong(key, "a list of messages", value))
}

fn string<'a>(record: &'a Json, name: &str, key: &str) -> Result<&'a str> {
    let value = record.get(name).unwrap_or(&Json::Null);
    value
        .as_str()
        .ok_or_else(|| wrong(&format!("{key}.{name}"), "a text", value))
}

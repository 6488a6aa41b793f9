//! Converts one record to a conversation.

use std::path::Path;

use super::media::{self, MediaSource, Video, wrong};
use super::objects::Objects;
use super::{Conversation, Format, Message, Part, Role};
use crate::text::error::RecordProblem;
use crate::text::json::Json;

type Result<T> = std::result::Result<T, RecordProblem>;

const IMAGE: &str = "<image>";
const VIDEO: &str = "<video>";

/// Reads a record, whose pictures are relative to `folder`.
pub(super) fn conversation(
    line: u64,
    record: &Json,
    format: Format,
    folder: &Path,
) -> Result<Conversation> {
    let format = match format {
        Format::Recognised => recognise(record)?,
        stated => stated,
    };
    let mut media = Media::read(record, folder)?;
    let messages = match format {
        Format::Messages => messages(record, &mut media)?,
        Format::Alpaca => alpaca(record, &mut media)?,
        Format::ShareGpt => turns(record, &mut media, false)?,
        Format::Llava | Format::Recognised => turns(record, &mut media, true)?,
    };
    let tools = tools(record)?;
    media.finish()?;
    check(&messages)?;
    let objects = record
        .get("objects")
        .map(|objects| Objects::read(objects, media.images.len()));
    let objects = objects.transpose()?;
    let Media { images, videos, .. } = media;
    Ok(Conversation {
        line,
        messages,
        images,
        videos,
        objects,
        tools,
    })
}

fn recognise(record: &Json) -> Result<Format> {
    if record.get("messages").is_some() {
        return Ok(Format::Messages);
    }
    if record.get("conversations").is_some() {
        let llava = record.get("image").is_some() || record.get("video").is_some();
        return Ok(if llava {
            Format::Llava
        } else {
            Format::ShareGpt
        });
    }
    if record.get("instruction").is_some() {
        return Ok(Format::Alpaca);
    }
    let Json::Object(pairs) = record else {
        return Err(RecordProblem::UnknownFormat { found: Vec::new() });
    };
    let found = pairs.iter().map(|(key, _)| key.clone()).collect();
    Err(RecordProblem::UnknownFormat { found })
}

/// The files of a record, and those that the messages have named so far.
struct Media<'a> {
    folder: &'a Path,
    /// From the record's own keys, in order; each mark takes the next.
    listed_images: Vec<MediaSource>,
    listed_videos: Vec<Video>,
    image_marks: usize,
    video_marks: usize,
    images: Vec<MediaSource>,
    videos: Vec<Video>,
}

/// The values under either key of a record, each alone or in a list.
fn listed<T>(
    record: &Json,
    keys: [&str; 2],
    folder: &Path,
    read: fn(&Json, &str, &Path) -> Result<T>,
) -> Result<Vec<T>> {
    let mut found = Vec::new();
    for key in keys {
        match record.get(key) {
            None => {}
            Some(Json::Array(items)) => {
                for (index, item) in items.iter().enumerate() {
                    found.push(read(item, &format!("{key}[{index}]"), folder)?);
                }
            }
            Some(item) => found.push(read(item, key, folder)?),
        }
    }
    Ok(found)
}

impl<'a> Media<'a> {
    fn read(record: &Json, folder: &'a Path) -> Result<Self> {
        let listed_images = listed(record, ["images", "image"], folder, media::source)?;
        let mut listed_videos = listed(record, ["videos", "video"], folder, media::video)?;
        // A rate for all videos without a separate rate.
        if let Some(fps) = record.get("fps") {
            let fps = media::fps(fps, "the record")?;
            for video in &mut listed_videos {
                video.fps.get_or_insert(fps);
            }
        }
        Ok(Self {
            folder,
            listed_images,
            listed_videos,
            image_marks: 0,
            video_marks: 0,
            images: Vec::new(),
            videos: Vec::new(),
        })
    }

    /// The part of the next `<image>` mark. Marks without a file are counted and rejected at the
    /// end.
    fn next_image(&mut self) -> Part {
        if let Some(image) = self.listed_images.get(self.image_marks) {
            self.images.push(image.clone());
        }
        self.image_marks += 1;
        Part::Image(self.images.len().saturating_sub(1))
    }

    fn next_video(&mut self) -> Part {
        if let Some(video) = self.listed_videos.get(self.video_marks) {
            self.videos.push(video.clone());
        }
        self.video_marks += 1;
        Part::Video(self.videos.len().saturating_sub(1))
    }

    fn own_image(&mut self, image: MediaSource) -> Part {
        self.images.push(image);
        Part::Image(self.images.len() - 1)
    }

    fn own_video(&mut self, video: Video) -> Part {
        self.videos.push(video);
        Part::Video(self.videos.len() - 1)
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
    fn split(&mut self, text: &str, strip: bool) -> Vec<Part> {
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
fn is_python_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn messages(record: &Json, media: &mut Media<'_>) -> Result<Vec<Message>> {
    let known = &[
        "system",
        "user",
        "assistant",
        "tool",
        "tool_call",
        "tool_response",
    ];
    let items = array(record, "messages")?;
    let mut messages = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        let key = format!("messages[{index}]");
        let name = string(item, "role", &key)?;
        let (role, is_call) = match name {
            "system" => (Role::System, false),
            "user" => (Role::User, false),
            "assistant" => (Role::Assistant, false),
            "tool" | "tool_response" => (Role::Tool, false),
            "tool_call" => (Role::Assistant, true),
            _ => {
                let (message, found) = (index + 1, name.to_owned());
                return Err(RecordProblem::UnknownRole {
                    message,
                    found,
                    known,
                });
            }
        };
        let content_key = format!("{key}.content");
        let mut message = Message {
            role,
            parts: Vec::new(),
            loss: None,
            extra: Vec::new(),
        };
        match item.get("content") {
            Some(Json::String(text)) if is_call => message.extra.push(tool_call(text, &key)?),
            Some(Json::String(text)) => message.parts = media.split(text, false),
            Some(Json::Array(parts)) => {
                for (part, value) in parts.iter().enumerate() {
                    let part = self::part(value, &format!("{content_key}[{part}]"), media)?;
                    message.parts.push(part);
                }
            }
            None if item.get("tool_calls").is_some() => {}
            Some(other) => return Err(wrong(&content_key, "a text or a list of parts", other)),
            None => {
                return Err(wrong(
                    &content_key,
                    "a text or a list of parts",
                    &Json::Null,
                ));
            }
        }
        if let Some(loss) = item.get("loss") {
            message.loss = Some(match loss {
                Json::Bool(loss) => *loss,
                Json::Int(0) => false,
                Json::Int(1) => true,
                other => return Err(wrong(&format!("{key}.loss"), "true or false", other)),
            });
        }
        if let Json::Object(pairs) = item {
            // As transformers does, null is no value.
            let others = pairs.iter().filter(|(key, value)| {
                !["role", "content", "loss"].contains(&key.as_str()) && *value != Json::Null
            });
            message.extra.extend(others.cloned());
        }
        messages.push(message);
    }
    Ok(messages)
}

/// A part of a message's content.
fn part(value: &Json, key: &str, media: &mut Media<'_>) -> Result<Part> {
    if let Json::String(text) = value {
        return Ok(Part::Text(text.clone()));
    }
    let kind = match value.get("type") {
        Some(Json::String(kind)) => kind.as_str(),
        Some(other) => return Err(wrong(&format!("{key}.type"), "a text", other)),
        None if value.get("text").is_some() => "text",
        None if value.get("image").is_some() => "image",
        None if value.get("image_url").is_some() => "image_url",
        None if value.get("video").is_some() => "video",
        None => return Err(wrong(key, "a part with \"type\"", value)),
    };
    let payload = |names: [&str; 4]| names.iter().find_map(|name| value.get(name));
    match kind {
        "text" | "input_text" | "output_text" => {
            let text = value.get("text").unwrap_or(&Json::Null);
            let found = || wrong(&format!("{key}.text"), "a text", text);
            Ok(Part::Text(text.as_str().ok_or_else(found)?.to_owned()))
        }
        "image" | "image_url" => match payload(["image", "image_url", "path", "url"]) {
            Some(image) => Ok(media.own_image(media::source(image, key, media.folder)?)),
            None if value.get("base64").is_some() => {
                Ok(media.own_image(media::source(value, key, media.folder)?))
            }
            // TRL's form: the files are in the record's images.
            None => Ok(media.next_image()),
        },
        "video" | "video_url" => match payload(["video", "video_url", "path", "frames"]) {
            Some(video) => {
                let mut video = media::video(video, key, media.folder)?;
                for name in ["fps", "sample_fps"] {
                    if let Some(fps) = value.get(name) {
                        video.fps = Some(media::fps(fps, key)?);
                    }
                }
                Ok(media.own_video(video))
            }
            None => Ok(media.next_video()),
        },
        other => {
            let (key, found) = (format!("{key}.type"), format!("{other:?}"));
            let expected = "\"text\", \"image\", \"image_url\" or \"video\"";
            Err(RecordProblem::Value {
                key,
                expected,
                found,
            })
        }
    }
}

/// `conversations` of `from` and `value`.
fn turns(record: &Json, media: &mut Media<'_>, llava: bool) -> Result<Vec<Message>> {
    let known = &[
        "system",
        "human",
        "user",
        "gpt",
        "assistant",
        "observation",
        "function_call",
    ];
    let items = array(record, "conversations")?;
    let mut messages = Vec::with_capacity(items.len() + 1);
    messages.extend(system(record)?);
    for (index, item) in items.iter().enumerate() {
        let key = format!("conversations[{index}]");
        let name = string(item, "from", &key)?;
        let text = string(item, "value", &key)?;
        let (mut extra, mut parts) = (Vec::new(), Vec::new());
        let role = match name {
            "system" => Role::System,
            "human" | "user" => Role::User,
            "gpt" | "assistant" => Role::Assistant,
            "observation" => Role::Tool,
            "function_call" => {
                extra.push(tool_call(text, &key)?);
                Role::Assistant
            }
            _ => {
                let (message, found) = (index + 1, name.to_owned());
                return Err(RecordProblem::UnknownRole {
                    message,
                    found,
                    known,
                });
            }
        };
        if extra.is_empty() {
            parts = media.split(text, llava && role == Role::User);
        }
        messages.push(Message {
            role,
            parts,
            loss: None,
            extra,
        });
    }
    Ok(messages)
}

/// A call of a tool as text: `{"name": ..., "arguments": ...}` or a list of them.
fn tool_call(text: &str, key: &str) -> Result<(String, Json)> {
    let expected = "a tool call {\"name\": ..., \"arguments\": ...}";
    let call = Json::parse(text.as_bytes()).map_err(|error| RecordProblem::Value {
        key: key.to_owned(),
        expected,
        found: format!("text that is no JSON ({error})"),
    })?;
    let calls = match call {
        Json::Array(calls) => calls,
        call => vec![call],
    };
    let calls = calls.into_iter().map(|call| match call.get("name") {
        Some(Json::String(_)) => Ok(Json::Object(vec![
            ("type".to_owned(), Json::String("function".to_owned())),
            ("function".to_owned(), call),
        ])),
        _ => Err(wrong(key, expected, &call)),
    });
    Ok((
        "tool_calls".to_owned(),
        Json::Array(calls.collect::<Result<_>>()?),
    ))
}

fn alpaca(record: &Json, media: &mut Media<'_>) -> Result<Vec<Message>> {
    let mut messages: Vec<Message> = system(record)?.into_iter().collect();
    let mut say = |role, text: &str, media: &mut Media<'_>| {
        let parts = media.split(text, false);
        messages.push(Message {
            role,
            parts,
            loss: None,
            extra: Vec::new(),
        });
    };
    if let Some(history) = record.get("history") {
        let items = history
            .as_array()
            .ok_or_else(|| wrong("history", "a list", history))?;
        for (index, pair) in items.iter().enumerate() {
            let Some([Json::String(question), Json::String(answer)]) = pair.as_array() else {
                return Err(wrong(&format!("history[{index}]"), "a pair of texts", pair));
            };
            say(Role::User, question, media);
            say(Role::Assistant, answer, media);
        }
    }
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
    say(Role::User, &prompt, media);
    say(
        Role::Assistant,
        string(record, "output", "the record")?,
        media,
    );
    Ok(messages)
}

/// The record's own `system` key.
fn system(record: &Json) -> Result<Option<Message>> {
    let Some(system) = record.get("system") else {
        return Ok(None);
    };
    let text = system
        .as_str()
        .ok_or_else(|| wrong("system", "a text", system))?;
    let parts = vec![Part::Text(text.to_owned())];
    let message = Message {
        role: Role::System,
        parts,
        loss: None,
        extra: Vec::new(),
    };
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
                found: format!("text that is no JSON ({error})"),
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

/// Checks the rules for every conversation, whatever its format.
fn check(messages: &[Message]) -> Result<()> {
    for (index, message) in messages.iter().enumerate() {
        let number = index + 1;
        if message.role == Role::System && index > 0 {
            return Err(RecordProblem::SystemNotFirst { message: number });
        }
        let has_media = message
            .parts
            .iter()
            .any(|part| !matches!(part, Part::Text(_)));
        if has_media && matches!(message.role, Role::System | Role::Assistant) {
            let role = message.role.name();
            return Err(RecordProblem::MediaNotFromUser {
                message: number,
                role,
            });
        }
        let speaks = message.extra.iter().any(|(key, _)| key == "tool_calls")
            || !message.text().trim_matches(is_python_space).is_empty();
        if message.role == Role::Assistant && !speaks {
            return Err(RecordProblem::EmptyAnswer { message: number });
        }
    }
    match messages.last() {
        Some(last) if last.role == Role::Assistant => Ok(()),
        last => {
            let last = last.map_or("none", |message| message.role.name());
            Err(RecordProblem::NoAnswer {
                messages: messages.len(),
                last,
            })
        }
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

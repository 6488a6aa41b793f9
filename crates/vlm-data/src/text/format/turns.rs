//! Messages of any spelling: `role` and `content`, or `from` and `value`.

use super::keys::{self, Place, account};
use super::limits::{FrameChoice, PictureLimits};
use super::media::{self, wrong};
use super::parse::{Media, is_python_space};
use super::{Message, Part, Role};
use crate::text::error::RecordProblem;
use crate::text::json::Json;

type Result<T> = std::result::Result<T, RecordProblem>;

const CALLS: &str = "tool_calls";
const THOUGHT: &str = "reasoning_content";

/// Reads the list of messages under `list`. `strip` removes white space around a user's marks.
pub(super) fn read(
    items: &[Json],
    list: &str,
    media: &mut Media<'_>,
    strip: bool,
) -> Result<Vec<Message>> {
    let mut messages = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        turn(item, list, index, media, strip, &mut messages)?;
    }
    Ok(messages)
}

fn turn(
    item: &Json,
    list: &str,
    index: usize,
    media: &mut Media<'_>,
    strip: bool,
    messages: &mut Vec<Message>,
) -> Result<()> {
    let key = format!("{list}[{index}]");
    account(Place::Message, item, &key, &mut media.unread)?;
    let is_sharegpt =
        item.get("role").is_none() && (list != "messages" || item.get("from").is_some());
    let [role_key, content_key] = match is_sharegpt {
        true => ["from", "value"],
        false => ["role", "content"],
    };
    let found = item.get(role_key).unwrap_or(&Json::Null);
    let name = found
        .as_str()
        .ok_or_else(|| wrong(&format!("{key}.{role_key}"), "a text", found))?;
    let (role, is_call) = role(name, is_sharegpt, index)?;
    let mut message = Message::new(role);
    let content_name = format!("{key}.{content_key}");
    let content = item.get(content_key).or_else(|| item.get("content"));
    match content {
        Some(call @ (Json::String(_) | Json::Object(_) | Json::Array(_))) if is_call => {
            message.add(CALLS, tool_call(call, &key)?);
        }
        Some(Json::String(text)) => {
            message.parts = media.split(text, strip && role == Role::User);
        }
        Some(Json::Array(parts)) => {
            let rest = results(parts, &content_name, media, role, messages)?;
            if rest.is_empty() && !parts.is_empty() {
                return Ok(());
            }
            for (part, value) in rest {
                let at = format!("{content_name}[{part}]");
                self::part(value, &at, media, &mut message)?;
            }
        }
        None if item.get(CALLS).is_some() || item.get("function_call").is_some() => {}
        other => {
            let found = other.unwrap_or(&Json::Null);
            return Err(wrong(&content_name, "a text or a list of parts", found));
        }
    }
    message.loss = loss(item, &key, role)?;
    extras(item, &key, &mut message)?;
    let joins = is_call || (message.has_calls() && message.text().trim().is_empty());
    match messages.last_mut() {
        Some(last) if joins && last.role == Role::Assistant => join(last, message, &key),
        _ => {
            messages.push(message);
            Ok(())
        }
    }
}

/// Adds Anthropic's results of tools at the start of a user's parts as messages, in the order of
/// their calls as ms-swift does, and returns the other parts with their indices.
fn results<'a>(
    parts: &'a [Json],
    key: &str,
    media: &mut Media<'_>,
    role: Role,
    messages: &mut Vec<Message>,
) -> Result<Vec<(usize, &'a Json)>> {
    let mut rest: Vec<_> = parts.iter().enumerate().collect();
    let text = |value: &'a Json, name: &str| value.get(name).and_then(Json::as_str);
    let is_result = |&(_, part): &(usize, &'a Json)| {
        role == Role::User && text(part, "type") == Some("tool_result")
    };
    let count = rest.iter().take_while(|part| is_result(part)).count();
    let mut found: Vec<_> = rest.drain(..count).collect();
    let calls = messages.last().map_or(&[][..], Message::calls);
    let call_of = |&(_, part): &(usize, &Json)| {
        let id = part.get("tool_use_id").filter(|id| **id != Json::Null)?;
        calls.iter().position(|call| call.get("id") == Some(id))
    };
    let mut order: Vec<_> = found.iter().filter_map(call_of).collect();
    order.sort_unstable();
    if order.len() == count && order.into_iter().eq(0..calls.len()) {
        found.sort_by_key(call_of);
    }
    for (index, part) in found {
        let at = format!("{key}[{index}]");
        account(Place::Part, part, &at, &mut media.unread)?;
        let mut message = Message::new(Role::Tool);
        match part.get("content").unwrap_or(&Json::Null) {
            Json::String(text) => message.parts.push(Part::Text(text.clone())),
            Json::Array(parts) => {
                for (index, value) in parts.iter().enumerate() {
                    self::part(
                        value,
                        &format!("{at}.content[{index}]"),
                        media,
                        &mut message,
                    )?;
                }
            }
            other => {
                return Err(wrong(
                    &format!("{at}.content"),
                    "a text or a list of parts",
                    other,
                ));
            }
        }
        messages.push(message);
    }
    Ok(rest)
}

fn role(name: &str, is_sharegpt: bool, index: usize) -> Result<(Role, bool)> {
    Ok(match name {
        "system" => (Role::System, false),
        "user" | "human" => (Role::User, false),
        "assistant" | "gpt" | "bot" => (Role::Assistant, false),
        "tool" | "tool_response" | "observation" | "observations" | "function_response"
        | "function-response" => (Role::Tool, false),
        "tool_call" | "function_call" | "function-call" => (Role::Assistant, true),
        _ => {
            let known: &[&str] = match is_sharegpt {
                true => &[
                    "system",
                    "human",
                    "user",
                    "gpt",
                    "assistant",
                    "observation",
                    "function_call",
                ],
                false => &[
                    "system",
                    "user",
                    "assistant",
                    "tool",
                    "tool_call",
                    "tool_response",
                ],
            };
            let (message, found) = (index + 1, name.to_owned());
            return Err(RecordProblem::UnknownRole {
                message,
                found,
                known,
            });
        }
    })
}

/// The keys that state whether a message is trained on.
const LOSS: [&str; 6] = [
    "loss",
    "train",
    "training",
    "weight",
    "loss_scale",
    "loss_weight",
];

/// Whether the message is trained on, by whichever key states it.
fn loss(item: &Json, key: &str, role: Role) -> Result<Option<bool>> {
    let mut stated = None;
    for name in LOSS {
        let Some(value) = item.get(name) else {
            continue;
        };
        let found = match value {
            Json::Bool(loss) => *loss,
            number if number.as_f64() == Some(0.0) => false,
            number if number.as_f64() == Some(1.0) => true,
            Json::Int(_) | Json::Uint(_) | Json::Float(_) => {
                return Err(RecordProblem::Value {
                    key: format!("{key}.{name}"),
                    expected: "true or false, 1 or 0",
                    found: format!("the weight {}", value.as_f64().unwrap_or_default()),
                });
            }
            other => return Err(wrong(&format!("{key}.{name}"), "true or false", other)),
        };
        if stated.is_some_and(|stated| stated != found) {
            return Err(RecordProblem::Value {
                key: format!("{key}.{name}"),
                expected: "the same as the other keys that say if the message is trained on",
                found: found.to_string(),
            });
        }
        stated = Some(found);
    }
    if stated == Some(true) && role != Role::Assistant {
        return Err(RecordProblem::NotApplied {
            key: format!("{key}.loss"),
            remedy: "only answers are trained on, so write it there alone",
        });
    }
    Ok(stated)
}

/// The keys for the chat template.
fn extras(item: &Json, key: &str, message: &mut Message) -> Result<()> {
    const OWN: [&str; 5] = ["role", "content", "from", "value", "function_call"];
    let Json::Object(pairs) = item else {
        return Ok(());
    };
    if let Some(call) = item.get("function_call") {
        message.add(CALLS, tool_call(call, key)?);
    }
    // As transformers does, null is no value.
    for (name, value) in pairs.iter().filter(|(_, value)| *value != Json::Null) {
        if !OWN.iter().chain(&LOSS).any(|own| own == name) {
            message.add(name, value.clone());
        }
    }
    Ok(())
}

impl Message {
    pub(super) fn new(role: Role) -> Self {
        Self {
            role,
            parts: Vec::new(),
            loss: None,
            extra: Vec::new(),
        }
    }

    fn has_calls(&self) -> bool {
        self.extra.iter().any(|(key, _)| key == CALLS)
    }

    fn calls(&self) -> &[Json] {
        let calls = self.extra.iter().find(|(key, _)| key == CALLS);
        calls.and_then(|(_, calls)| calls.as_array()).unwrap_or(&[])
    }

    /// Adds a value for the template: to the list or text of the same key, if there is one.
    fn add(&mut self, name: &str, value: Json) {
        let old = self.extra.iter_mut().find(|(key, _)| key == name);
        match (old, value) {
            (Some((_, Json::Array(old))), Json::Array(new)) => old.extend(new),
            (Some((_, Json::String(old))), Json::String(new)) => old.push_str(&new),
            (Some((_, old)), value) => *old = value,
            (None, value) => self.extra.push((name.to_owned(), value)),
        }
    }
}

/// Adds a call to the answer before it: both are one turn, as in ms-swift (template/base.py,
/// `_preprocess_tool_call`) and in templates, which print several `tool_calls` of one message.
fn join(answer: &mut Message, call: Message, key: &str) -> Result<()> {
    if answer.loss != call.loss {
        return Err(RecordProblem::Value {
            key: format!("{key}.loss"),
            expected: "the same as in the message before, which is of the same turn",
            found: call
                .loss
                .map_or("nothing".to_owned(), |loss| loss.to_string()),
        });
    }
    for (name, value) in call.extra {
        answer.add(&name, value);
    }
    Ok(())
}

/// Keys of a video's part alone, and of pictures and videos.
const VIDEO_KEYS: [&str; 6] = [
    "video",
    "video_url",
    "frames",
    "fps",
    "sample_fps",
    "total_pixels",
];
const SIZE_KEYS: [&str; 4] = [
    "min_pixels",
    "max_pixels",
    "resized_height",
    "resized_width",
];

/// The text of a part, under the names of OpenAI and LLaMA-Factory v1.
fn text_of<'a>(value: &'a Json, key: &str) -> Result<&'a str> {
    let names = ["text", "value", "reasoning", "thinking"];
    let text = names.iter().find_map(|name| value.get(name));
    let text = text.unwrap_or(&Json::Null);
    let found = || wrong(&format!("{key}.text"), "a text", text);
    text.as_str().ok_or_else(found)
}

/// A part of a message's content.
fn part(value: &Json, key: &str, media: &mut Media<'_>, message: &mut Message) -> Result<()> {
    if let Json::String(text) = value {
        message.parts.push(Part::Text(text.clone()));
        return Ok(());
    }
    account(Place::Part, value, key, &mut media.unread)?;
    let kinds = ["text", "image", "image_url", "video", "video_url"];
    let kind = match value.get("type") {
        Some(Json::String(kind)) => kind.as_str(),
        Some(other) => return Err(wrong(&format!("{key}.type"), "a text", other)),
        None => *kinds
            .iter()
            .find(|kind| value.get(kind).is_some())
            .ok_or_else(|| wrong(key, "a part with \"type\"", value))?,
    };
    // What a part of one kind says for another kind.
    let of_videos = [&VIDEO_KEYS[..], &FrameChoice::KEYS].concat();
    let other: Vec<&str> = match kind {
        "image" | "image_url" | "input_image" => [&["text"], &of_videos[..]].concat(),
        "video" | "video_url" => vec!["text", "image", "image_url"],
        _ => [&["image", "image_url"], &SIZE_KEYS[..], &of_videos].concat(),
    };
    let is_stated = |name: &&&str| value.get(name).is_some_and(|value| !keys::is_empty(value));
    for name in other.iter().filter(is_stated) {
        keys::note(format!("{key}.{name}"), &mut media.unread);
    }
    let payload = |names: &[&str]| names.iter().find_map(|name| value.get(name));
    match kind {
        // Calls are written after the text of their answer.
        "text" | "input_text" | "output_text" if message.has_calls() => {
            return Err(RecordProblem::Value {
                key: key.to_owned(),
                expected: "a call, since the answer's text comes before its calls",
                found: "text".to_owned(),
            });
        }
        "tool_use" if message.role == Role::Assistant => {
            let name = value.get("name").unwrap_or(&Json::Null);
            if name.as_str().is_none() {
                return Err(wrong(&format!("{key}.name"), "a text", name));
            }
            let arguments = value.get("input").cloned();
            let function = vec![
                ("name".to_owned(), name.clone()),
                (
                    "arguments".to_owned(),
                    arguments.unwrap_or(Json::Object(Vec::new())),
                ),
            ];
            let mut call = vec![
                ("type".to_owned(), Json::String("function".to_owned())),
                ("function".to_owned(), Json::Object(function)),
            ];
            let id = value.get("id").map(|id| ("id".to_owned(), id.clone()));
            call.extend(id);
            message.add(CALLS, Json::Array(vec![Json::Object(call)]));
        }
        "text" | "input_text" | "output_text" => {
            let text = text_of(value, key)?.to_owned();
            message.parts.push(Part::Text(text));
        }
        "reasoning" | "thinking" if message.role == Role::Assistant => {
            message.add(THOUGHT, Json::String(text_of(value, key)?.to_owned()));
        }
        "tool_call" if message.role == Role::Assistant => {
            let call = Json::String(text_of(value, key)?.to_owned());
            message.add(CALLS, tool_call(&call, key)?);
        }
        "image" | "image_url" | "input_image" => {
            let limits = PictureLimits::read(value, key)?;
            let image = payload(&["image", "image_url", "path", "url", "value", "source"]);
            let image = match image {
                Some(image) => media.own_image(media::source(image, key, &media.folder)?),
                None if value.get("base64").is_some() => {
                    media.own_image(media::source(value, key, &media.folder)?)
                }
                // TRL's form: the files are in the record's images.
                None => media.next_image(),
            };
            media.limit(limits);
            message.parts.push(image);
        }
        "video" | "video_url" => {
            let video = match payload(&["video", "video_url", "path", "frames", "url", "value"]) {
                Some(video) => media.own_video(media::video(video, key, &media.folder)?),
                None => media.next_video(),
            };
            media.last_video(|video| video.read_keys(value, key))?;
            message.parts.push(video);
        }
        "audio" | "audio_url" | "input_audio" => {
            return Err(RecordProblem::OtherData {
                key: format!("{key}.type"),
                what: "sound",
            });
        }
        other => {
            return Err(RecordProblem::Value {
                key: format!("{key}.type"),
                expected: "\"text\", \"image\", \"image_url\", \"video\", \"tool_use\" in an answer, or \
                           \"tool_result\" at the start of a question",
                found: format!("{other:?}"),
            });
        }
    }
    Ok(())
}

/// A call of a tool, or its text: `{"name": ..., "arguments": ...}` or a list of them.
fn tool_call(call: &Json, key: &str) -> Result<Json> {
    let expected = "a tool call {\"name\": ..., \"arguments\": ...}";
    let parsed = match call {
        Json::String(text) => {
            Json::parse(text.as_bytes()).map_err(|error| RecordProblem::Value {
                key: key.to_owned(),
                expected,
                found: format!("text that is not JSON ({error})"),
            })?
        }
        call => call.clone(),
    };
    let calls = match parsed {
        Json::Array(calls) => calls,
        call => vec![call],
    };
    let calls = calls.into_iter().map(|call| {
        let inner = call.get("function").cloned().unwrap_or(call);
        match inner.get("name") {
            Some(Json::String(_)) => Ok(Json::Object(vec![
                ("type".to_owned(), Json::String("function".to_owned())),
                ("function".to_owned(), inner),
            ])),
            _ => Err(wrong(key, expected, &inner)),
        }
    });
    Ok(Json::Array(calls.collect::<Result<_>>()?))
}

/// Checks the rules for every conversation, whatever its format.
pub(super) fn check(messages: &[Message]) -> Result<()> {
    for (index, message) in messages.iter().enumerate() {
        let number = index + 1;
        if message.role == Role::System && index > 0 {
            return Err(RecordProblem::SystemNotFirst { message: number });
        }
        let mut parts = message.parts.iter();
        let has_media = parts.any(|part| !matches!(part, Part::Text(_)));
        if has_media && matches!(message.role, Role::System | Role::Assistant) {
            let role = message.role.name();
            return Err(RecordProblem::MediaNotFromUser {
                message: number,
                role,
            });
        }
        let speaks =
            message.has_calls() || !message.text().trim_matches(is_python_space).is_empty();
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

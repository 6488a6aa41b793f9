//! Accounts for the content of a conversation: all of it is in the rendered text.
//!
//! A template silently skips what it does not know, such as tool calls; the model would then learn
//! an empty answer. White space is ignored, because templates trim and indent.

use super::error::RecordProblem;
use super::format::{Message, Part, Role};
use super::json::{Json, Style, dumps};

/// The keys of a thought, which templates drop from turns before the last question.
const THOUGHTS: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

/// Looks for all content of `messages` and `tools` in `rendered`, and returns the number of
/// thoughts that the template left out of earlier turns.
///
/// # Errors
/// [`RecordProblem::NotRendered`] for the first text, call, argument, tool or thought that is not
/// there.
pub(super) fn account(
    messages: &[Message],
    tools: Option<&Json>,
    rendered: &str,
) -> Result<usize, RecordProblem> {
    let text = bare(rendered);
    for tool in tools.and_then(Json::as_array).unwrap_or_default() {
        let function = tool.get("function").unwrap_or(tool);
        let mut search = Search::new(&text, 0, 0);
        for key in ["name", "description"] {
            if let Some(value) = function.get(key) {
                search.value(value, "the tool")?;
            }
        }
        if let Some(Json::Object(pairs)) = function
            .get("parameters")
            .and_then(|all| all.get("properties"))
        {
            for (name, _) in pairs {
                search.text(name, "a parameter of the tool")?;
            }
        }
    }
    let last_question = messages
        .iter()
        .rposition(|message| message.role == Role::User);
    let (mut from, mut dropped) = (0, 0);
    for (index, message) in messages.iter().enumerate() {
        let mut search = Search::new(&text, from, index + 1);
        let is_earlier = last_question.is_some_and(|last| index < last);
        let thought = message
            .extra
            .iter()
            .find(|(key, _)| THOUGHTS.contains(&key.as_str()));
        if let Some(thought) = thought.and_then(|(_, value)| value.as_str()) {
            dropped += search.thought(thought, is_earlier)?;
        }
        for part in &message.parts {
            let Part::Text(part) = part else { continue };
            match part.split_once("</think>") {
                Some((thought, answer)) if message.role == Role::Assistant && !search.has(part) => {
                    dropped += search.thought(
                        thought.trim_start().trim_start_matches("<think>"),
                        is_earlier,
                    )?;
                    search.text(answer, "the text")?;
                }
                _ => search.text(part, "the text")?,
            }
        }
        let calls = message.extra.iter().find(|(key, _)| key == "tool_calls");
        for call in calls
            .and_then(|(_, calls)| calls.as_array())
            .unwrap_or_default()
        {
            search.call(call.get("function").unwrap_or(call))?;
        }
        // Mistral's template writes the system text in the last question.
        if message.role != Role::System {
            from = search.end;
        }
    }
    Ok(dropped)
}

/// A text without white space.
fn bare(text: &str) -> String {
    text.chars().filter(|c| !c.is_whitespace()).collect()
}

/// A search for the content of one message, behind that of the messages before.
struct Search<'a> {
    text: &'a str,
    from: usize,
    /// The end of all content found.
    end: usize,
    message: usize,
}

impl<'a> Search<'a> {
    fn new(text: &'a str, from: usize, message: usize) -> Self {
        Self {
            text,
            from,
            end: from,
            message,
        }
    }

    /// The end of the first occurrence, written plainly or as in JSON.
    fn find(&self, wanted: &str) -> Option<usize> {
        let plain = bare(wanted);
        let rest = &self.text[self.from..];
        let found = |wanted: &str| rest.find(wanted).map(|at| self.from + at + wanted.len());
        if let Some(end) = found(&plain) {
            return Some(end);
        }
        [false, true].into_iter().find_map(|ensure_ascii| {
            let mut style = Style::new(None);
            style.ensure_ascii = ensure_ascii;
            let json = dumps(&Json::String(wanted.to_owned()), &style);
            found(&bare(&json[1..json.len() - 1]))
        })
    }

    fn has(&self, wanted: &str) -> bool {
        self.find(wanted).is_some()
    }

    fn text(&mut self, wanted: &str, what: &'static str) -> Result<(), RecordProblem> {
        match self.find(wanted) {
            Some(end) => {
                self.end = self.end.max(end);
                Ok(())
            }
            None => Err(RecordProblem::NotRendered {
                message: self.message,
                what,
                text: wanted.trim().chars().take(60).collect(),
            }),
        }
    }

    /// Returns 1 if the thought is missing and may be.
    fn thought(&mut self, wanted: &str, may_miss: bool) -> Result<usize, RecordProblem> {
        if may_miss && !self.has(wanted) {
            return Ok(1);
        }
        self.text(wanted, "the reasoning").map(|()| 0)
    }

    fn call(&mut self, function: &Json) -> Result<(), RecordProblem> {
        if let Some(name) = function.get("name").and_then(Json::as_str) {
            self.text(name, "the call")?;
        }
        match function.get("arguments") {
            // A text, which the template may print, parse, or quote.
            Some(Json::String(arguments)) if !self.has(arguments) => {
                match Json::parse(arguments.as_bytes()) {
                    Ok(parsed @ (Json::Object(_) | Json::Array(_))) => {
                        self.value(&parsed, "an argument")
                    }
                    _ => self.text(arguments, "an argument"),
                }
            }
            Some(arguments) => self.value(arguments, "an argument"),
            None => Ok(()),
        }
    }

    /// Each text and number of a value, keys included.
    fn value(&mut self, value: &Json, what: &'static str) -> Result<(), RecordProblem> {
        match value {
            Json::String(text) => self.text(text, what),
            Json::Int(_) | Json::Uint(_) | Json::Float(_) => {
                self.text(&dumps(value, &Style::new(None)), what)
            }
            Json::Array(items) => items.iter().try_for_each(|item| self.value(item, what)),
            Json::Object(pairs) => pairs.iter().try_for_each(|(key, value)| {
                self.text(key, what)?;
                self.value(value, what)
            }),
            Json::Null | Json::Bool(_) => Ok(()),
        }
    }
}

//! The chat template of a checkpoint folder: Jinja, as transformers runs it.
//!
//! The engine is minijinja. This module adds the features of transformers that minijinja lacks:
//! `tojson` as Python's `json.dumps`, `raise_exception`, `strftime_now`, the tag `generation`,
//! Python's string methods, and Python's spelling of printed values (`True`, `None`, `1e-05`). A
//! template is untrusted: its steps, its memory, its time and its output are limited. minijinja 3.1.0
//! does not count the elements of nested or added lists; they are counted where they are stored
//! (`adapt`) and where filters visit them (`budget`).

use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State};
use time::OffsetDateTime;

use super::budget::{self, MAX_DEPTH, charge, charge_filters};
use super::error::{RecordProblem, Result, TextError};
use super::format::{Conversation, Message, Part};
use super::json::{Json, Style, dumps, float_repr};
use super::tokenizer::{read_file, read_json};

/// The step limit of one rendering, at about 64 bytes of memory per step. A conversation of 1,000
/// turns takes about 50,000 steps.
const FUEL: u64 = 1_000_000;

/// The longest text that a template may print.
const MAX_OUTPUT_BYTES: usize = 64 << 20;

/// The longest template.
const MAX_TEMPLATE_BYTES: usize = 1 << 20;

/// The name under which the engine keeps the template.
const NAME: &str = "chat_template";

/// The inputs of a template besides the messages.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RenderOptions {
    /// True to end the text with the start of an answer, for generation.
    pub add_generation_prompt: bool,
    /// Additional variables, such as `enable_thinking`.
    pub variables: Vec<(String, Json)>,
    /// The time of `strftime_now`, in UTC; the epoch by default, so that data do not change from
    /// day to day.
    pub now: SystemTime,
}

impl Default for RenderOptions {
    fn default() -> Self {
        Self {
            add_generation_prompt: false,
            variables: Vec::new(),
            now: UNIX_EPOCH,
        }
    }
}

/// A rendered conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// Byte ranges of the text between `{% generation %}` and `{% endgeneration %}`.
    pub generated: Vec<Range<usize>>,
}

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    has_generation: bool,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "ChatTemplate of {} bytes", self.source.len())
    }
}

impl ChatTemplate {
    /// Reads the template of a folder from the first of `chat_template.json`, `chat_template.jinja`
    /// and `tokenizer_config.json` that exists. From a list of templates it takes `default`.
    ///
    /// # Errors
    /// [`TextError::NoTemplate`]; [`TextError::File`] if a file cannot be read;
    /// [`TextError::Template`] if it is not Jinja.
    ///
    /// # Source
    /// transformers 5.24.0, `processing_utils.py`, whose processors prefer the files in this order.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let legacy = read_json(&folder.join("chat_template.json"))?;
        if let Some(source) = legacy.as_ref().and_then(template_of) {
            return Self::new(source);
        }
        let path = folder.join("chat_template.jinja");
        if let Some(bytes) = read_file(&path)? {
            let error = |error: std::string::FromUtf8Error| TextError::File {
                path: path.clone(),
                reason: error.to_string(),
            };
            return Self::new(&String::from_utf8(bytes).map_err(error)?);
        }
        let config = read_json(&folder.join("tokenizer_config.json"))?;
        match config.as_ref().and_then(template_of) {
            Some(source) => Self::new(source),
            None => Err(TextError::NoTemplate {
                folder: folder.to_owned(),
            }),
        }
    }

    /// Compiles a template.
    ///
    /// # Errors
    /// [`TextError::Template`] if it is not Jinja, or longer than 1 MiB.
    pub fn new(source: &str) -> Result<Self> {
        let refused = |reason: String| TextError::Template { reason };
        if source.len() > MAX_TEMPLATE_BYTES {
            return Err(refused(format!(
                "expected at most {MAX_TEMPLATE_BYTES} bytes, found {}",
                source.len()
            )));
        }
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build();
        environment.set_syntax(syntax.map_err(|error| refused(error.to_string()))?);
        environment.set_fuel(Some(FUEL));
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_formatter(|out, state, value| {
            charge(state, value)?;
            let text = python_text(value)?;
            out.write_str(&text).map_err(Error::from)
        });
        environment.set_unknown_method_callback(python_method);
        environment.add_filter("tojson", to_json);
        environment.add_filter("string", |state: &State, value: &Value| {
            charge(state, value)?;
            python_text(value)
        });
        environment.add_function(
            "raise_exception",
            |state: &State, message: &Value| -> Result<Value, Error> {
                charge(state, message)?;
                let message = python_text(message)?;
                Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("it says: {message}"),
                ))
            },
        );
        environment.add_filter(COUNTED, counted);
        charge_filters(&mut environment);
        let (body, has_generation) = adapt(source);
        let compiled = environment.add_template_owned(NAME, body);
        compiled.map_err(|error| refused(describe(&error)))?;
        Ok(Self {
            environment,
            source: source.to_owned(),
            has_generation,
        })
    }

    /// The template's text.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// True if the template marks the assistant's text with the tag `generation`.
    #[must_use]
    pub fn has_generation(&self) -> bool {
        self.has_generation
    }

    /// Renders messages.
    ///
    /// `named_tokens` are those of [`Tokenizer::named_tokens`](super::Tokenizer::named_tokens),
    /// which a template may print. A message with a single text is passed as text, any other as a
    /// list of parts.
    ///
    /// # Errors
    /// [`RecordProblem::Render`] if the template rejects the messages, fails, or exceeds its limits
    /// on steps, memory or output.
    pub fn render(
        &self,
        messages: &[Message],
        tools: Option<&Json>,
        named_tokens: &[(String, String)],
        options: &RenderOptions,
    ) -> Result<Rendered, RecordProblem> {
        let render_error = |detail: String| RecordProblem::Render { detail };
        let marks = self.marks(messages).ok_or_else(|| {
            render_error("the messages use all of the characters U+FDD0 to U+FDEF".to_owned())
        })?;
        let now = options.now;
        let strftime = move |format: &str| strftime(format, now);
        let mut context: Vec<(String, Value)> = named_tokens
            .iter()
            .map(|(name, token)| (name.clone(), Value::from(token)))
            .collect();
        context.extend(
            options
                .variables
                .iter()
                .map(|(name, json)| (name.clone(), value(json))),
        );
        let messages: Vec<Value> = messages.iter().map(message_value).collect();
        context.extend([
            ("messages".to_owned(), Value::from(messages)),
            ("tools".to_owned(), tools.map_or(Value::from(()), value)),
            ("documents".to_owned(), Value::from(())),
            (
                "add_generation_prompt".to_owned(),
                Value::from(options.add_generation_prompt),
            ),
            ("strftime_now".to_owned(), Value::from_function(strftime)),
            (
                GENERATION_START.to_owned(),
                Value::from(marks[0].to_string()),
            ),
            (GENERATION_END.to_owned(), Value::from(marks[1].to_string())),
        ]);
        let template = self
            .environment
            .get_template(NAME)
            .map_err(|error| render_error(describe(&error)))?;
        let mut out = Limited { bytes: Vec::new() };
        budget::start();
        let rendered = template.render_captured_to(Value::from_pairs(context), &mut out);
        rendered.map_err(|error| render_error(describe(&error)))?;
        let text = String::from_utf8(out.bytes).map_err(|error| render_error(error.to_string()))?;
        Ok(if self.has_generation {
            unmark(&text, marks)
        } else {
            Rendered {
                text,
                generated: Vec::new(),
            }
        })
    }

    /// Renders a conversation; see [`ChatTemplate::render`].
    ///
    /// # Errors
    /// As [`ChatTemplate::render`], with the conversation's line.
    pub fn render_conversation(
        &self,
        conversation: &Conversation,
        named_tokens: &[(String, String)],
        options: &RenderOptions,
    ) -> Result<Rendered> {
        let tools = conversation.tools.as_ref();
        let rendered = self.render(&conversation.messages, tools, named_tokens, options);
        rendered.map_err(|problem| problem.at(conversation.line))
    }

    /// Two characters that no message contains: Unicode noncharacters, reserved for internal use.
    fn marks(&self, messages: &[Message]) -> Option<[char; 2]> {
        let mut used = [false; 32];
        let mut note = |text: &str| {
            for c in text
                .chars()
                .filter(|c| ('\u{fdd0}'..='\u{fdef}').contains(c))
            {
                used[c as usize - 0xfdd0] = true;
            }
        };
        note(&self.source);
        for message in messages {
            for part in &message.parts {
                if let Part::Text(text) = part {
                    note(text);
                }
            }
            message
                .extra
                .iter()
                .for_each(|(_, json)| each_string(json, &mut note));
        }
        let mut free = ('\u{fdd0}'..='\u{fdef}').filter(|&c| !used[c as usize - 0xfdd0]);
        Some([free.next()?, free.next()?])
    }
}

/// Calls `note` with each text of `json`, keys included.
pub(super) fn each_string(json: &Json, note: &mut impl FnMut(&str)) {
    match json {
        Json::String(text) => note(text),
        Json::Array(items) => items.iter().for_each(|item| each_string(item, note)),
        Json::Object(pairs) => {
            for (key, value) in pairs {
                note(key);
                each_string(value, note);
            }
        }
        _ => {}
    }
}

/// The template in a JSON file: a text, or a list of named ones.
fn template_of(file: &Json) -> Option<&str> {
    let template = file.get("chat_template")?;
    if let Some(items) = template.as_array() {
        let named = |item: &&Json| item.get("name").and_then(Json::as_str) == Some("default");
        return items.iter().find(named)?.get("template")?.as_str();
    }
    template.as_str()
}

/// The message and its causes, with the line of the template.
fn describe(error: &Error) -> String {
    let mut text = match error.kind() {
        ErrorKind::OutOfFuel => format!("it took more than {FUEL} steps, or as much memory"),
        _ => error.to_string(),
    };
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}

/// The rendered text, up to the limit.
struct Limited {
    bytes: Vec<u8>,
}

impl Write for Limited {
    fn write(&mut self, piece: &[u8]) -> std::io::Result<usize> {
        if self.bytes.len() + piece.len() > MAX_OUTPUT_BYTES {
            let message = format!("it prints more than {MAX_OUTPUT_BYTES} bytes");
            return Err(std::io::Error::other(message));
        }
        self.bytes.extend_from_slice(piece);
        Ok(piece.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

const GENERATION_START: &str = "_generation_start";
const GENERATION_END: &str = "_generation_end";

/// The filter that bounds lists where they are stored.
const COUNTED: &str = "_counted";

/// The longest list that a template may store.
const MAX_ITEMS: usize = 1 << 20;

/// Adapts a template to the engine; returns true if it has the tag `generation`.
///
/// - The tag `generation`, which the engine does not know, becomes tags that print a mark. `with`
///   gives the block a separate scope, as transformers' tag does.
/// - Values stored by `set` and arguments of macros are counted. The engine adds lists lazily and
///   does not charge for it, so a list added to itself would double with each step, and its copy
///   would exhaust memory.
///
/// Dashes of a tag stay at its outer ends, so white space is trimmed as before.
fn adapt(source: &str) -> (String, bool) {
    let mut out = String::with_capacity(source.len());
    let (mut rest, mut found) = (source, false);
    while let Some(open) = rest.find('{') {
        let (before, tag) = rest.split_at(open);
        out.push_str(before);
        let length = match tag.as_bytes().get(1) {
            Some(b'#') => tag.find("#}").map(|end| end + 2),
            Some(b'{') => tag_length(tag, "}}"),
            Some(b'%') => tag_length(tag, "%}"),
            _ => Some(1),
        };
        // The engine's parser rejects an unclosed tag.
        let (tag, after) = tag.split_at(length.unwrap_or(tag.len()));
        rest = after;
        let Some(tag_text) = tag
            .strip_prefix("{%")
            .and_then(|text| text.strip_suffix("%}"))
        else {
            out.push_str(tag);
            continue;
        };
        let dash = |c: char| c == '-' || c == '+';
        let inner = tag_text.strip_prefix(dash).unwrap_or(tag_text);
        let left = &tag_text[..tag_text.len() - inner.len()];
        let body = inner.strip_suffix(dash).unwrap_or(inner);
        let right = &inner[body.len()..];
        let (word, arguments) = body
            .trim()
            .split_once([' ', '\t', '\n', '\r'])
            .unwrap_or((body.trim(), ""));
        match word {
            "raw" => {
                // Nothing in a raw block is a tag.
                let end = rest.find("endraw").unwrap_or(rest.len());
                out.push_str(tag);
                out.push_str(&rest[..end]);
                rest = &rest[end..];
            }
            "generation" if arguments.is_empty() => {
                found = true;
                let start = GENERATION_START;
                out.push_str(&format!(
                    "{{%{left} with %}}{{{{ {start} }}}}{{% if true {right}%}}"
                ));
            }
            "endgeneration" if arguments.is_empty() => {
                let end = GENERATION_END;
                out.push_str(&format!(
                    "{{%{left} endif %}}{{{{ {end} }}}}{{% endwith {right}%}}"
                ));
            }
            "set" if arguments.contains('=') => {
                let (name, value) = arguments.split_once('=').unwrap_or((arguments, ""));
                out.push_str(&format!(
                    "{{%{left} set {name} = ({value}) | {COUNTED} {right}%}}"
                ));
            }
            "macro" if !parameters(arguments).is_empty() => {
                let names = parameters(arguments);
                out.push_str(&format!("{{%{left} macro {arguments} %}}"));
                for (index, name) in names.iter().enumerate() {
                    let right = if index + 1 == names.len() { right } else { "" };
                    out.push_str(&format!("{{% set {name} = {name} | {COUNTED} {right}%}}"));
                }
            }
            "for" | "with" => {
                let list = format!("({arguments})");
                let names = match word {
                    "for" => loop_names(arguments),
                    _ => parameters(&list),
                };
                let inner = if names.is_empty() { right } else { "" };
                out.push_str(&format!("{{%{left} {word} {arguments} {inner}%}}"));
                for (index, name) in names.iter().enumerate() {
                    let right = if index + 1 == names.len() { right } else { "" };
                    out.push_str(&format!("{{% set {name} = {name} | {COUNTED} {right}%}}"));
                }
            }
            _ => out.push_str(tag),
        }
    }
    out.push_str(rest);
    (out, found)
}

/// The length of the tag at the start of `text`, up to `close` outside of strings.
fn tag_length(text: &str, close: &str) -> Option<usize> {
    let (mut quote, mut escaped) = (None, false);
    for (at, c) in text.char_indices().skip(2) {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if c == '\\' => escaped = true,
            Some(open) if c == open => quote = None,
            Some(_) => {}
            None if text[at..].starts_with(close) => return Some(at + close.len()),
            None if c == '"' || c == '\'' => quote = Some(c),
            None => {}
        }
    }
    None
}

/// The names in `macro_name(a, b=1)`.
fn parameters(arguments: &str) -> Vec<&str> {
    let Some((_, list)) = arguments.split_once('(') else {
        return Vec::new();
    };
    let (mut names, mut depth, mut quote, mut from) = (Vec::new(), 0usize, None, Some(0));
    for (at, c) in list.char_indices() {
        if let Some(open) = quote {
            quote = if c == open { None } else { quote };
            continue;
        }
        match c {
            '"' | '\'' => quote = Some(c),
            '=' | ',' | ')' if depth == 0 => {
                names.extend(from.take().map(|from| list[from..at].trim()));
                from = (c == ',').then_some(at + 1);
            }
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

/// The filter [`COUNTED`]: returns its value, unless the list is too long.
fn counted(state: &State, value: Value) -> Result<Value, Error> {
    let is_list = matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
    match value.len() {
        Some(items) if is_list && items > MAX_ITEMS => {
            let message = format!("a list of more than {MAX_ITEMS} items");
            Err(Error::new(ErrorKind::InvalidOperation, message))
        }
        _ => charge(state, &value).map(|()| value),
    }
}

/// The names of `x, y` in `x, y in list`.
fn loop_names(arguments: &str) -> Vec<&str> {
    let (names, _) = arguments.split_once(" in ").unwrap_or(("", ""));
    let names = names
        .split(',')
        .map(|name| name.trim_matches([' ', '(', ')', '\n', '\t']));
    let is_name =
        |name: &&str| !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_');
    names.filter(is_name).collect()
}

/// Removes the marks from a text and returns the ranges between them.
fn unmark(text: &str, [start, end]: [char; 2]) -> Rendered {
    let mut out = String::with_capacity(text.len());
    let (mut generated, mut open) = (Vec::new(), None);
    for c in text.chars() {
        if c == start {
            open = Some(out.len());
        } else if c == end {
            generated.extend(open.take().map(|from| from..out.len()));
        } else {
            out.push(c);
        }
    }
    Rendered {
        text: out,
        generated,
    }
}

/// A message as a template sees it.
fn message_value(message: &Message) -> Value {
    let content = match &message.parts[..] {
        // transformers drops a null key, as in messages with tool calls.
        [] => None,
        [Part::Text(text)] => Some(Value::from(text)),
        parts => {
            let part = |part: &Part| match part {
                Part::Text(text) => {
                    Value::from_pairs([("type", Value::from("text")), ("text", Value::from(text))])
                }
                Part::Image(index) => {
                    let (kind, index) = (Value::from("image"), Value::from(index.to_string()));
                    Value::from_pairs([("type", kind), ("image", index)])
                }
                Part::Video(index) => {
                    let (kind, index) = (Value::from("video"), Value::from(index.to_string()));
                    Value::from_pairs([("type", kind), ("video", index)])
                }
            };
            Some(Value::from(parts.iter().map(part).collect::<Vec<_>>()))
        }
    };
    let mut pairs = vec![("role".to_owned(), Value::from(message.role.name()))];
    pairs.extend(content.map(|content| ("content".to_owned(), content)));
    // Transformers reads a thought under three names and passes it under two.
    let thought = ["reasoning_content", "thinking", "reasoning"]
        .iter()
        .find_map(|name| message.extra.iter().find(|(key, _)| key == name));
    for (key, json) in &message.extra {
        pairs.push((key.clone(), value(json)));
    }
    if let Some((_, thought)) = thought {
        for name in ["thinking", "reasoning_content"] {
            if !message.extra.iter().any(|(key, _)| key == name) {
                pairs.push((name.to_owned(), value(thought)));
            }
        }
    }
    Value::from_pairs(pairs)
}

/// JSON as a value of the engine.
fn value(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(flag) => Value::from(*flag),
        Json::Int(number) => Value::from(*number),
        Json::Uint(number) => Value::from(*number),
        Json::Float(number) => Value::from(*number),
        Json::String(text) => Value::from(text),
        Json::Array(items) => Value::from(items.iter().map(value).collect::<Vec<_>>()),
        Json::Object(pairs) => {
            Value::from_pairs(pairs.iter().map(|(key, json)| (key.clone(), value(json))))
        }
    }
}

/// A value of the engine as JSON, with keys converted as in Python.
fn json(value: &Value, depth: usize) -> Result<Json, Error> {
    let refused = |what: String| Error::new(ErrorKind::BadSerialization, what);
    if depth > MAX_DEPTH {
        return Err(refused(format!("values nest deeper than {MAX_DEPTH}")));
    }
    Ok(match value.kind() {
        ValueKind::None => Json::Null,
        ValueKind::Bool => Json::Bool(value.is_true()),
        ValueKind::Number => number(value),
        ValueKind::String => Json::String(value.as_str().unwrap_or_default().to_owned()),
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.try_iter()?.map(|item| json(&item, depth + 1));
            Json::Array(items.collect::<Result<_, _>>()?)
        }
        ValueKind::Map => {
            let mut pairs = Vec::new();
            for key in value.try_iter()? {
                let inner = json(&value.get_item(&key)?, depth + 1)?;
                let key = match json(&key, depth + 1)? {
                    Json::String(text) => text,
                    other => dumps(&other, &Style::new(None)),
                };
                pairs.push((key, inner));
            }
            Json::Object(pairs)
        }
        kind => return Err(refused(format!("{kind} is not JSON"))),
    })
}

fn number(value: &Value) -> Json {
    if value.is_integer() {
        if let Some(number) = value.as_i64() {
            return Json::Int(number);
        }
        if let Ok(number) = u64::try_from(value.clone()) {
            return Json::Uint(number);
        }
    }
    Json::Float(f64::try_from(value.clone()).unwrap_or(f64::NAN))
}

/// The filter `tojson`: Python's `json.dumps` with `ensure_ascii=False` by default.
fn to_json(state: &State, value: &Value, options: Kwargs) -> Result<String, Error> {
    charge(state, value)?;
    let value = json(value, 0)?;
    let indent = match options.get::<Option<Value>>("indent")? {
        None => None,
        Some(none) if none.is_none() => None,
        Some(text) if text.kind() == ValueKind::String => text.as_str().map(str::to_owned),
        Some(spaces) => {
            let spaces = spaces
                .as_usize()
                .filter(|&spaces| spaces <= 64)
                .ok_or_else(|| {
                    Error::new(
                        ErrorKind::InvalidOperation,
                        "indent is not between 0 and 64",
                    )
                })?;
            Some(" ".repeat(spaces))
        }
    };
    let mut style = Style::new(indent);
    if let Some(separators) = options.get::<Option<Value>>("separators")?
        && !separators.is_none()
    {
        let pair: Vec<String> = separators
            .try_iter()?
            .map(|text| text.to_string())
            .collect();
        let [item, key] = <[String; 2]>::try_from(pair).map_err(|_| {
            Error::new(
                ErrorKind::InvalidOperation,
                "separators are not a pair of texts",
            )
        })?;
        (style.item_separator, style.key_separator) = (item, key);
    }
    style.sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    style.ensure_ascii = options
        .get::<Option<bool>>("ensure_ascii")?
        .unwrap_or(false);
    options.assert_all_used()?;
    let text = dumps(&value, &style);
    state.consume_fuel(text.len() as u64 / 64)?;
    Ok(text)
}

/// The result of Python's `str`.
fn python_text(value: &Value) -> Result<String, Error> {
    Ok(match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::Seq | ValueKind::Map => {
            let mut out = String::new();
            write_repr(&mut out, &json(value, 0)?);
            out
        }
        _ => value.to_string(),
    })
}

/// Appends the result of Python's `repr`.
fn write_repr(out: &mut String, value: &Json) {
    match value {
        Json::Null => out.push_str("None"),
        Json::Bool(true) => out.push_str("True"),
        Json::Bool(false) => out.push_str("False"),
        Json::Int(number) => out.push_str(&number.to_string()),
        Json::Uint(number) => out.push_str(&number.to_string()),
        Json::Float(number) if number.is_nan() => out.push_str("nan"),
        Json::Float(number) if number.is_infinite() => {
            out.push_str(if *number > 0.0 { "inf" } else { "-inf" });
        }
        Json::Float(number) => out.push_str(&float_repr(*number)),
        Json::String(text) => {
            let quote = if text.contains('\'') && !text.contains('"') {
                '"'
            } else {
                '\''
            };
            out.push(quote);
            for c in text.chars() {
                match c {
                    '\\' => out.push_str("\\\\"),
                    '\n' => out.push_str("\\n"),
                    '\r' => out.push_str("\\r"),
                    '\t' => out.push_str("\\t"),
                    c if c == quote => out.extend(['\\', c]),
                    '\0'..='\u{1f}' | '\u{7f}'..='\u{a0}' | '\u{ad}' => {
                        out.push_str(&format!("\\x{:02x}", c as u32));
                    }
                    c => out.push(c),
                }
            }
            out.push(quote);
        }
        Json::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                write_repr(out, item);
            }
            out.push(']');
        }
        Json::Object(pairs) => {
            out.push('{');
            for (index, (key, value)) in pairs.iter().enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                write_repr(out, &Json::String(key.clone()));
                out.push_str(": ");
                write_repr(out, value);
            }
            out.push('}');
        }
    }
}

/// Python's methods of strings, lists and dictionaries.
fn python_method(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        match method {
            "removeprefix" => {
                let (prefix,): (&str,) = from_args(args)?;
                return Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)));
            }
            "removesuffix" => {
                let (suffix,): (&str,) = from_args(args)?;
                return Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)));
            }
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

/// Python's `strftime` of a time in UTC, for the directives that templates use.
fn strftime(format: &str, now: SystemTime) -> Result<String, Error> {
    let time = OffsetDateTime::from(now);
    let (year, month, day) = (time.year(), u8::from(time.month()), time.day());
    let (hour, minute, second) = time.to_hms();
    let (month_name, day_name) = (time.month().to_string(), time.weekday().to_string());
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        // GNU's dash: without leading zeros.
        let bare = directive == Some('-');
        if bare {
            directive = chars.next();
        }
        let two = |number: u8| {
            if bare {
                number.to_string()
            } else {
                format!("{number:02}")
            }
        };
        match directive {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&two(year.rem_euclid(100) as u8)),
            Some('m') => out.push_str(&two(month)),
            Some('d') => out.push_str(&two(day)),
            Some('H') => out.push_str(&two(hour)),
            Some('I') => out.push_str(&two((hour + 11) % 12 + 1)),
            Some('M') => out.push_str(&two(minute)),
            Some('S') => out.push_str(&two(second)),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('B') => out.push_str(&month_name),
            Some('b') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(&day_name),
            Some('a') => out.push_str(&day_name[..3]),
            Some('F') => out.push_str(&format!("{year}-{month:02}-{day:02}")),
            Some('%') => out.push('%'),
            other => {
                let directive = other.map_or("%".to_owned(), |c| format!("%{c}"));
                let message = format!("strftime_now does not know {directive}");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
    }
    Ok(out)
}

//! JSON as Python's `json` writes and reads it, a superset of JSON.

use serde_json::{Value, json};

use super::error::ConfigError;

/// The only key of the object with which transformers 5 writes a number that JSON cannot represent.
/// Its value is the number's name in Python.
const FLOAT: &str = "__float__";
/// Lists and objects nested deeper are read as null: no key in use lies there, and the parser's
/// limit is 128.
const DEEPEST: usize = 100;

/// Parses a text as JSON.
///
/// Besides JSON, Python writes and reads `Infinity`, `-Infinity`, `NaN`, numbers out of range,
/// halves of surrogate pairs and deep nesting. They are ignored under unused keys and are invalid
/// values under keys in use.
pub(crate) fn parse(text: &str) -> Result<Value, ConfigError> {
    serde_json::from_str(text).or_else(|error| {
        let replaced = in_json(text);
        if replaced == text {
            let detail = error.to_string();
            return Err(ConfigError::Json { detail });
        }
        serde_json::from_str(&replaced).map_err(|error| {
            // Columns are those of the text with replacements; lines are those of the file.
            let detail = error.to_string();
            let line = detail.rsplit_once(" column ").map(|(line, _)| line);
            ConfigError::Json {
                detail: line.unwrap_or(&detail).to_owned(),
            }
        })
    })
}

/// The name of a number that JSON cannot represent.
pub(super) fn float(value: &Value) -> Option<&str> {
    value.get(FLOAT)?.as_str()
}

/// True if the value is an object and does not represent a number.
pub(super) fn is_object(value: &Value) -> bool {
    value.is_object() && float(value).is_none()
}

/// Replaces Python's extensions by JSON and keeps line breaks.
fn in_json(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let (mut rest, mut depth) = (text, 0_usize);
    while let Some(first) = rest.chars().next() {
        let len = match first {
            '"' => string_len(rest),
            _ if is_word(first) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            _ => first.len_utf8(),
        };
        let (token, after) = rest.split_at(len);
        rest = after;
        if matches!(first, '[' | '{') {
            depth += 1;
            if depth == DEEPEST + 1 {
                out.push_str("null");
            }
        }
        match first {
            '\n' => out.push('\n'),
            _ if depth > DEEPEST => {}
            '"' => push_string(&mut out, token),
            _ if is_word(first) && is_float_of_python(token) => {
                out.push_str(&json!({ FLOAT: token }).to_string());
            }
            _ => out.push_str(token),
        }
        if matches!(first, ']' | '}') {
            depth = depth.saturating_sub(1);
        }
    }
    out
}

/// True if the character is one of numbers and constants.
fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || "+-.".contains(c)
}

/// A constant of Python, or a number that f64 does not hold.
fn is_float_of_python(word: &str) -> bool {
    let is_out_of_range = || {
        let read = serde_json::from_str::<Value>(word);
        read.is_err_and(|error| error.to_string().starts_with("number out of range"))
    };
    ["Infinity", "-Infinity", "NaN"].contains(&word) || is_out_of_range()
}

/// Bytes of the string that the text begins with, quotes included.
fn string_len(text: &str) -> usize {
    let mut is_escaped = false;
    let end = text.bytes().skip(1).position(|byte| {
        let ends = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        ends
    });
    end.map_or(text.len(), |end| end + 2)
}

/// Writes a string; the halves of surrogate pairs that stand alone become U+FFFD.
fn push_string(out: &mut String, string: &str) {
    let unit = |text: &str| u16::from_str_radix(text.strip_prefix("\\u")?.get(..4)?, 16).ok();
    let mut rest = string;
    while let Some(at) = rest.find('\\') {
        let (before, escape) = rest.split_at(at);
        out.push_str(before);
        let pair = (unit(escape), escape.get(6..).and_then(unit));
        let len = match pair {
            (Some(0xD800..=0xDBFF), Some(0xDC00..=0xDFFF)) => 12,
            (Some(0xD800..=0xDFFF), _) => {
                out.push_str("\\ufffd");
                rest = &escape[6..];
                continue;
            }
            _ => escape.chars().take(2).map(char::len_utf8).sum(),
        };
        let (kept, after) = escape.split_at(len);
        out.push_str(kept);
        rest = after;
    }
    out.push_str(rest);
}

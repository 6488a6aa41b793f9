//! JSON with ordered objects, written as Python writes it.
//!
//! A chat template prints tools and tool calls with `tojson`, which is Python's `json.dumps`. The
//! ids equal those of transformers only if keys keep the order of the file, and separators, escapes
//! and numbers are written like Python's.

use std::fmt::Write as _;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// A JSON value. Objects keep the order of their keys, and the last of two equal keys wins.
#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A whole number that fits 64 bits.
    Int(i64),
    /// A whole number above the largest of [`Json::Int`].
    Uint(u64),
    /// Any other number.
    Float(f64),
    /// A string.
    String(String),
    /// An array.
    Array(Vec<Json>),
    /// An object, in the order of the file.
    Object(Vec<(String, Json)>),
}

impl Json {
    /// Parses one value, which only white space may follow.
    ///
    /// # Errors
    /// Those of serde_json, also for values nested deeper than 128 levels.
    pub fn parse(text: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(text).or_else(|error| {
            // Python's json.dumps writes numbers that JSON lacks.
            match with_numbers(text) {
                Some(text) => serde_json::from_slice(&text).map_err(|_| error),
                None => Err(error),
            }
        })
    }

    /// The value of `key`, if `self` is an object with this key and the value is not `null`.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Json> {
        let Json::Object(pairs) = self else {
            return None;
        };
        let (_, value) = pairs.iter().find(|(name, _)| name == key)?;
        (!matches!(value, Json::Null)).then_some(value)
    }

    /// The string, if `self` is one.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Json::String(text) => Some(text),
            _ => None,
        }
    }

    /// The elements, if `self` is an array.
    #[must_use]
    pub fn as_array(&self) -> Option<&[Json]> {
        match self {
            Json::Array(items) => Some(items),
            _ => None,
        }
    }

    /// The number, if `self` is one.
    #[must_use]
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Json::Int(number) => Some(number as f64),
            Json::Uint(number) => Some(number as f64),
            Json::Float(number) => Some(number),
            _ => None,
        }
    }

    /// The kind of `self`, for an error message.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Json::Null => "null",
            Json::Bool(_) => "a boolean",
            Json::Int(_) | Json::Uint(_) | Json::Float(_) => "a number",
            Json::String(_) => "a string",
            Json::Array(_) => "an array",
            Json::Object(_) => "an object",
        }
    }
}

/// The key of an object that stands for a number: a character reserved for internal use.
const NUMBER: &str = "\u{fdd0}";

/// The text with each `NaN`, `Infinity` and `-Infinity` outside of strings as an object; `None`
/// without any.
fn with_numbers(text: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len());
    let (mut in_string, mut escaped, mut found, mut at) = (false, false, false, 0);
    while at < text.len() {
        let byte = text[at];
        if !in_string
            && let Some(word) = ["NaN", "-Infinity", "Infinity"]
                .into_iter()
                .find(|word| text[at..].starts_with(word.as_bytes()))
        {
            out.extend(format!("{{\"{NUMBER}\":\"{word}\"}}").bytes());
            (found, at) = (true, at + word.len());
            continue;
        }
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            _ => {}
        }
        out.push(byte);
        at += 1;
    }
    found.then_some(out)
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Json;

            fn expecting(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                out.write_str("a JSON value")
            }
            fn visit_unit<E>(self) -> Result<Json, E> {
                Ok(Json::Null)
            }
            fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
                Ok(Json::Bool(value))
            }
            fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
                Ok(Json::Int(value))
            }
            fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
                Ok(i64::try_from(value).map_or(Json::Uint(value), Json::Int))
            }
            fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
                Ok(Json::Float(value))
            }
            fn visit_str<E>(self, value: &str) -> Result<Json, E> {
                Ok(Json::String(value.to_owned()))
            }
            fn visit_string<E>(self, value: String) -> Result<Json, E> {
                Ok(Json::String(value))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Json, A::Error> {
                let mut array = Vec::new();
                while let Some(item) = items.next_element()? {
                    array.push(item);
                }
                Ok(Json::Array(array))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Json, A::Error> {
                let mut pairs: Vec<(String, Json)> = Vec::new();
                // Many keys are searched with a map, few linearly.
                let mut places = std::collections::HashMap::new();
                while let Some((key, value)) = entries.next_entry::<String, Json>()? {
                    match places.get(&key) {
                        Some(&place) => {
                            let (_, old): &mut (String, Json) = &mut pairs[place];
                            *old = value;
                        }
                        None => {
                            places.insert(key.clone(), pairs.len());
                            pairs.push((key, value));
                        }
                    }
                }
                if let [(key, Json::String(word))] = &pairs[..]
                    && key == NUMBER
                    && let Ok(number) = word.parse()
                {
                    return Ok(Json::Float(number));
                }
                Ok(Json::Object(pairs))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

/// How [`dumps`] writes: the arguments of Python's `json.dumps`.
pub(crate) struct Style {
    /// The text of one level of indentation; `None` writes one line.
    pub(crate) indent: Option<String>,
    /// Between items.
    pub(crate) item_separator: String,
    /// Between a key and its value.
    pub(crate) key_separator: String,
    /// Objects by key.
    pub(crate) sort_keys: bool,
    /// Characters above ASCII as `\uXXXX`.
    pub(crate) ensure_ascii: bool,
}

impl Style {
    /// The defaults of `json.dumps` with `ensure_ascii=False`, which are those of `tojson`.
    pub(crate) fn new(indent: Option<String>) -> Self {
        let item_separator = if indent.is_some() { "," } else { ", " };
        Self {
            indent,
            item_separator: item_separator.to_owned(),
            key_separator: ": ".to_owned(),
            sort_keys: false,
            ensure_ascii: false,
        }
    }
}

/// One line, as `json.dumps` with `ensure_ascii=False`.
impl std::fmt::Display for Json {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&dumps(self, &Style::new(None)))
    }
}

/// Writes `value` as Python's `json.dumps` does.
pub(crate) fn dumps(value: &Json, style: &Style) -> String {
    let mut out = String::new();
    write_value(&mut out, value, style, 0);
    out
}

fn write_value(out: &mut String, value: &Json, style: &Style, depth: usize) {
    match value {
        Json::Null => out.push_str("null"),
        Json::Bool(true) => out.push_str("true"),
        Json::Bool(false) => out.push_str("false"),
        Json::Int(number) => _ = write!(out, "{number}"),
        Json::Uint(number) => _ = write!(out, "{number}"),
        Json::Float(number) if number.is_nan() => out.push_str("NaN"),
        Json::Float(number) if number.is_infinite() => {
            out.push_str(if *number > 0.0 {
                "Infinity"
            } else {
                "-Infinity"
            });
        }
        Json::Float(number) => out.push_str(&float_repr(*number)),
        Json::String(text) => write_string(out, text, style.ensure_ascii),
        Json::Array(items) => {
            write_items(out, style, depth, ['[', ']'], items.iter(), |out, item| {
                write_value(out, item, style, depth + 1);
            });
        }
        Json::Object(pairs) => {
            let mut pairs: Vec<_> = pairs.iter().collect();
            if style.sort_keys {
                pairs.sort_by(|left, right| left.0.cmp(&right.0));
            }
            let write_pair = |out: &mut String, (key, value): &(String, Json)| {
                write_string(out, key, style.ensure_ascii);
                out.push_str(&style.key_separator);
                write_value(out, value, style, depth + 1);
            };
            write_items(out, style, depth, ['{', '}'], pairs.into_iter(), write_pair);
        }
    }
}

fn write_items<'a, T: 'a>(
    out: &mut String,
    style: &Style,
    depth: usize,
    [open, close]: [char; 2],
    items: impl ExactSizeIterator<Item = &'a T>,
    mut write_item: impl FnMut(&mut String, &T),
) {
    out.push(open);
    let empty = items.len() == 0;
    let break_line = |out: &mut String, depth: usize| {
        if let Some(indent) = &style.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    };
    for (index, item) in items.enumerate() {
        if index > 0 {
            out.push_str(&style.item_separator);
        }
        break_line(out, depth + 1);
        write_item(out, item);
    }
    if !empty {
        break_line(out, depth);
    }
    out.push(close);
}

fn write_string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\0'..='\u{1f}' => _ = write!(out, "\\u{:04x}", c as u32),
            // With ensure_ascii, Python does not escape DEL but all characters above it.
            '\u{80}'.. if ensure_ascii => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    _ = write!(out, "\\u{unit:04x}");
                }
            }
            _ => out.push(c),
        }
    }
    out.push('"');
}

/// Python's `repr` of a finite float: the shortest digits that read back as the same number, with
/// an exponent below 1e-4 and from 1e16.
pub(crate) fn float_repr(number: f64) -> String {
    if number == 0.0 || (1e-4..1e16).contains(&number.abs()) {
        return format!("{number:?}");
    }
    let text = format!("{number:e}");
    let Some((digits, exponent)) = text.split_once('e') else {
        return text;
    };
    match exponent.strip_prefix('-') {
        Some(exponent) => format!("{digits}e-{exponent:0>2}"),
        None => format!("{digits}e+{exponent:0>2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{Json, Style, dumps, float_repr};

    /// Expected: Python 3's `json.dumps` and `repr`.
    #[test]
    fn python_writes_the_same() {
        let text = r#"{"b": [1, -2, 0.5, 1e22, 18446744073709551615], "a": {}, "é": "\u0001\"\\/é<>&'😀\u007f"}"#;
        let value = Json::parse(text.as_bytes()).expect("JSON");
        let plain = dumps(&value, &Style::new(None));
        let same = "{\"b\": [1, -2, 0.5, 1e+22, 18446744073709551615], \"a\": {}, \
                    \"é\": \"\\u0001\\\"\\\\/é<>&'😀\u{7f}\"}";
        assert_eq!(plain, same);
        let mut style = Style::new(Some("  ".to_owned()));
        (style.sort_keys, style.ensure_ascii) = (true, true);
        let indented = "{\n  \"a\": {},\n  \"b\": [\n    1,\n    -2,\n    0.5,\n    1e+22,\n    \
                        18446744073709551615\n  ],\n  \
                        \"\\u00e9\": \"\\u0001\\\"\\\\/\\u00e9<>&'\\ud83d\\ude00\u{7f}\"\n}";
        assert_eq!(dumps(&value, &style), indented);
        for (number, repr) in [
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (-1.5e-300, "-1.5e-300"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
        ] {
            assert_eq!(float_repr(number), repr);
        }
    }

    #[test]
    fn deep_nesting_is_an_error() {
        assert!(Json::parse("[".repeat(100_000).as_bytes()).is_err());
        let value = Json::parse(br#"{"a": 1, "b": 2, "a": 3}"#).expect("JSON");
        assert_eq!(value.get("a"), Some(&Json::Int(3)));
    }
}

//! Splits a data file into records, with one record in memory.

use std::io::BufRead;

use crate::text::error::{RecordProblem, TextError};
use crate::text::json::Json;

/// The records of a JSONL file or of a JSON array, with the line where each begins.
///
/// The first character decides: `[` opens an array. Memory is bounded by `max_bytes` for the
/// current record; the rest of a longer one is skipped and an error is returned.
pub(super) struct Records<R> {
    input: R,
    max_bytes: usize,
    line: u64,
    /// Bytes taken.
    offset: u64,
    state: State,
    buffer: Vec<u8>,
    too_large: bool,
}

/// The first bytes of files that hold records in another way: one error instead of one per line.
const BINARY: [(&[u8], &str); 5] = [
    (b"PAR1", "Parquet"),
    (b"ARROW1", "Arrow"),
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"PK\x03\x04", "zip"),
];

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum State {
    Start,
    Lines,
    /// After `[`.
    FirstItem,
    /// After an item.
    NextItem,
    Done,
}

/// Where a record begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// From 1.
    pub(super) line: u64,
    /// In bytes.
    pub(super) offset: u64,
}

impl<R: BufRead> Records<R> {
    pub(super) fn new(input: R, max_bytes: usize) -> Self {
        let place = Place { line: 1, offset: 0 };
        Self::starting_at(input, max_bytes, place, State::Start)
    }

    /// Continues in the middle of a file, at `place`.
    pub(super) fn starting_at(input: R, max_bytes: usize, place: Place, state: State) -> Self {
        Self {
            input,
            max_bytes,
            line: place.line,
            offset: place.offset,
            state,
            buffer: Vec::new(),
            too_large: false,
        }
    }

    pub(super) fn state(&self) -> State {
        self.state
    }

    pub(super) fn into_input(self) -> R {
        self.input
    }

    fn place(&self) -> Place {
        Place {
            line: self.line,
            offset: self.offset,
        }
    }

    fn peek(&mut self) -> Result<Option<u8>, TextError> {
        loop {
            match self.input.fill_buf() {
                Ok(bytes) => return Ok(bytes.first().copied()),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.state = State::Done;
                    return Err(self.stream(error.to_string()));
                }
            }
        }
    }

    /// Takes the byte that `peek` returned.
    fn take(&mut self, byte: u8) {
        self.input.consume(1);
        self.offset += 1;
        if byte == b'\n' {
            self.line += 1;
        }
    }

    fn keep(&mut self, byte: u8) {
        if self.buffer.len() < self.max_bytes {
            self.buffer.push(byte);
        } else {
            self.too_large = true;
        }
    }

    fn stream(&self, reason: String) -> TextError {
        TextError::Stream {
            line: self.line,
            reason,
        }
    }

    fn skip_space(&mut self) -> Result<Option<u8>, TextError> {
        while let Some(byte) = self.peek()? {
            if !byte.is_ascii_whitespace() {
                return Ok(Some(byte));
            }
            self.take(byte);
        }
        Ok(None)
    }

    fn start(&mut self) -> Result<(), TextError> {
        if self.peek()?.is_some() {
            // `peek` has read it.
            let begin = self.input.fill_buf().unwrap_or_default();
            let other = BINARY.iter().find(|(magic, _)| begin.starts_with(magic));
            if let Some((_, name)) = other {
                self.state = State::Done;
                return Err(self.stream(format!(
                    "expected JSONL or a JSON array, found a file of {name}; convert it to JSONL"
                )));
            }
        }
        for expected in *b"\xef\xbb\xbf" {
            // A byte order mark; the parser rejects a partial one.
            match self.peek()? {
                Some(byte) if byte == expected => self.take(byte),
                _ => break,
            }
        }
        self.state = match self.skip_space()? {
            Some(b'[') => {
                self.take(b'[');
                State::FirstItem
            }
            _ => State::Lines,
        };
        Ok(())
    }

    /// The next line that is not blank, in the buffer.
    fn read_line(&mut self) -> Result<Option<Place>, TextError> {
        if self.skip_space()?.is_none() {
            return Ok(None);
        }
        let place = self.place();
        while self.peek()?.is_some() {
            // The bytes that `peek` has read; it would have returned any error.
            let bytes = self.input.fill_buf().unwrap_or_default();
            let end = bytes
                .iter()
                .position(|&byte| byte == b'\n')
                .unwrap_or(bytes.len());
            let room = (self.max_bytes - self.buffer.len()).min(end);
            self.buffer.extend_from_slice(&bytes[..room]);
            self.too_large |= room < end;
            let is_whole = end < bytes.len();
            self.input.consume(end);
            self.offset += end as u64;
            if is_whole {
                break;
            }
        }
        Ok(Some(place))
    }

    /// The next item of the array, in the buffer.
    fn read_item(&mut self) -> Result<Option<Place>, TextError> {
        let mut next = self.skip_space()?;
        if self.state == State::NextItem && next == Some(b',') {
            self.take(b',');
            next = self.skip_space()?;
        } else if next == Some(b']') {
            self.take(b']');
            self.state = State::Done;
            return match self.skip_space()? {
                None => Ok(None),
                Some(_) => Err(self.stream("expected the end of the file after ']'".to_owned())),
            };
        } else if self.state == State::NextItem {
            self.state = State::Done;
            return Err(self.stream("expected ',' or ']' after a record".to_owned()));
        }
        let place = self.place();
        let (mut depth, mut in_string, mut escaped) = (0usize, false, false);
        while let Some(byte) = next {
            if depth == 0 && !in_string && matches!(byte, b',' | b']') {
                break;
            }
            self.take(byte);
            self.keep(byte);
            match byte {
                _ if escaped => escaped = false,
                b'\\' if in_string => escaped = true,
                b'"' => in_string = !in_string,
                b'{' | b'[' if !in_string => depth += 1,
                b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth == 0 && byte == b'}' && !in_string {
                self.state = State::NextItem;
                return Ok(Some(place));
            }
            next = self.peek()?;
        }
        if next.is_none() {
            self.state = State::Done;
            return Err(self.stream("the array is cut off; expected ']'".to_owned()));
        }
        self.state = State::NextItem;
        Ok(Some(place))
    }

    /// Puts the next record into the buffer, as far as the limit allows, and returns its place.
    pub(super) fn next_place(&mut self) -> Result<Option<Place>, TextError> {
        self.buffer.clear();
        self.too_large = false;
        if self.state == State::Start {
            self.start()?;
        }
        let place = match self.state {
            State::Done => None,
            State::Start | State::Lines => self.read_line()?,
            State::FirstItem | State::NextItem => self.read_item()?,
        };
        if place.is_none() {
            self.state = State::Done;
        }
        Ok(place)
    }

    fn read(&mut self) -> Result<Option<(u64, Json)>, TextError> {
        let Some(Place { line, .. }) = self.next_place()? else {
            return Ok(None);
        };
        let problem = if self.too_large {
            RecordProblem::TooLarge {
                max_bytes: self.max_bytes,
            }
        } else {
            match Json::parse(&self.buffer) {
                Ok(value @ Json::Object(_)) => return Ok(Some((line, value))),
                Ok(value) => RecordProblem::Json {
                    detail: value.kind().to_owned(),
                },
                Err(error) => {
                    let is_open = error.is_eof()
                        && self.state == State::Lines
                        && self.buffer.trim_ascii_end().ends_with(b"{");
                    if is_open && self.skip_space()?.is_some_and(|next| next != b'{') {
                        self.state = State::Done;
                        return Err(TextError::Stream {
                            line,
                            reason:
                                "a JSON object over several lines is not a data file; write each \
                                     record on one line, or all as one array"
                                    .to_owned(),
                        });
                    }
                    RecordProblem::Json {
                        detail: error.to_string(),
                    }
                }
            }
        };
        Err(TextError::Record {
            line,
            problem: Box::new(problem),
        })
    }
}

impl<R: BufRead> Iterator for Records<R> {
    type Item = Result<(u64, Json), TextError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}

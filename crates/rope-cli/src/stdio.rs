//! Standard output and standard error.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, StdoutLock, Write, stderr};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Standard output, whose errors say that they are its own.
pub(crate) fn stdout() -> Stdout {
    Stdout(io::stdout().lock())
}

/// See [`stdout`].
pub(crate) struct Stdout(StdoutLock<'static>);

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(named)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(named)
    }
}

fn named(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::Interrupted {
        // Callers try again.
        return error;
    }
    let message = format!("cannot write to standard output: {error}");
    io::Error::new(error.kind(), message)
}

/// Writes a line on standard error. A reader that has gone, or a full disk, must not end a run, as
/// `eprintln!` would by its panic.
pub(crate) fn note(line: impl Display) {
    let _unwritten = writeln!(stderr(), "{line}");
}

/// How long a wait goes on without a word.
const SILENCE: Duration = Duration::from_secs(1);

/// Writes a line on standard error if the returned value lives for a second.
pub(crate) fn note_if_slow(line: String) -> Sender<()> {
    let (done, waiting) = channel();
    std::thread::spawn(move || {
        if waiting.recv_timeout(SILENCE) == Err(RecvTimeoutError::Timeout) {
            note(line);
        }
    });
    done
}

/// Most characters of a message; a file can put any number into one.
const LONGEST: usize = 4000;
/// Characters of a longer message that are shown of its head and of its tail.
const SHOWN: usize = 1000;

/// A message for a terminal: what a file put into it neither floods nor commands it.
pub(crate) fn plain(message: &impl ToString) -> String {
    let message = message.to_string();
    let count = message.chars().count();
    let text: Cow<'_, str> = if count > LONGEST {
        let head: String = message.chars().take(SHOWN).collect();
        let tail: String = message.chars().skip(count - SHOWN).collect();
        let left_out = count - 2 * SHOWN;
        format!("{head} [... {left_out} characters ...] {tail}").into()
    } else {
        message.into()
    };
    let escaped = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    text.chars().fold(String::new(), |mut plain, c| {
        if escaped(c) {
            plain.extend(c.escape_default());
        } else {
            plain.push(c);
        }
        plain
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_says_neither_floods_nor_commands_a_terminal() {
        assert_eq!(plain(&"a\u{1b}[31mb\n\u{7f}"), "a\\u{1b}[31mb\n\\u{7f}");
        assert_eq!(plain(&"a".repeat(LONGEST)).len(), LONGEST);
        let long = plain(&"é".repeat(1_000_000));
        assert!(long.contains("é [... 998000 characters ...] é"));
        assert!(long.chars().count() < LONGEST);
    }
}

//! A line for each launch, in a file: for comparing two runs of one program.

use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hasher};
use std::io::Write as _;
use std::sync::LazyLock;

/// Variable that names the file, to which lines are added.
const VARIABLE: &str = "ASCEND_SIM_LAUNCHES";

static FILE: LazyLock<Option<std::path::PathBuf>> =
    LazyLock::new(|| std::env::var_os(VARIABLE).map(Into::into));

/// Whether launches are recorded.
pub(crate) fn is_on() -> bool {
    FILE.is_some()
}

/// Adds a line: `what`, then length and hash of each range of memory that the launch wrote.
pub(crate) fn add<'a>(what: &str, written: impl Iterator<Item = &'a [u8]>) {
    let Some(path) = &*FILE else { return };
    let mut line = what.to_owned();
    for bytes in written {
        // The same in every process, as its keys are fixed.
        let mut hasher = DefaultHasher::new();
        hasher.write(bytes);
        // Writing to a string does not fail.
        let _ = write!(line, " {}:{:016x}", bytes.len(), hasher.finish());
    }
    line.push('\n');
    let file = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path);
    if let Err(error) = file.and_then(|mut file| file.write_all(line.as_bytes())) {
        eprintln!("{VARIABLE} is {}: {error}", path.display());
    }
}

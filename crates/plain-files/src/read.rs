//! Opening and reading.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::path::Path;

use crate::error::{Cause, FileError, Result};

/// A limit for configurations and other texts.
pub const MAX_TEXT_BYTES: u64 = 256 << 20;

/// Opens a regular file, or the one that a link leads to, for reading.
///
/// # Errors
/// [`Cause::Irregular`] for a pipe, device, socket or folder, without waiting for a writer;
/// [`Cause::System`]
pub fn open(path: &Path) -> Result<File> {
    open_with(path, std::fs::metadata(path), 0)
}

/// As [`open`], but refuses a link. The folders of the path may be links.
///
/// # Errors
/// As [`open`]; [`Cause::System`] for a link, on Unix.
pub fn open_no_link(path: &Path) -> Result<File> {
    #[cfg(unix)]
    let flags = libc::O_NOFOLLOW;
    #[cfg(not(unix))]
    let flags = 0;
    open_with(path, std::fs::symlink_metadata(path), flags)
}

fn open_with(path: &Path, seen: std::io::Result<std::fs::Metadata>, flags: i32) -> Result<File> {
    let seen = seen.map_err(FileError::of("read", path))?;
    let irregular = || FileError::of("read", path)(Cause::Irregular);
    // Opening a device can act on it, and no socket can be opened. A link is left to `open`.
    if !seen.is_file() && !seen.is_symlink() {
        return Err(irregular());
    }
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        // What was a file may be a pipe by now. Reading a regular file is the same with this flag.
        options.custom_flags(flags | libc::O_NONBLOCK | libc::O_NOCTTY);
    }
    #[cfg(not(unix))]
    let _without_flags = flags;
    let file = options.open(path).map_err(FileError::of("read", path))?;
    // The type of the opened file counts: another may have taken its name since.
    let found = file.metadata().map_err(FileError::of("read", path))?;
    if found.is_file() {
        Ok(file)
    } else {
        Err(irregular())
    }
}

/// Reads a regular file of at most `limit_bytes`. The limit is checked before memory is reserved,
/// and holds for a file that grows meanwhile.
///
/// # Errors
/// As [`open`]; [`Cause::TooLarge`]; [`Cause::Memory`]
pub fn read(path: &Path, limit_bytes: u64) -> Result<Vec<u8>> {
    read_opened(&open(path)?, path, limit_bytes)
}

/// As [`read`], of a file that has been opened, from where it stands.
///
/// # Errors
/// [`Cause::TooLarge`]; [`Cause::Memory`]; [`Cause::System`]
pub fn read_opened(file: &File, path: &Path, limit_bytes: u64) -> Result<Vec<u8>> {
    contents(file, limit_bytes).map_err(FileError::of("read", path))
}

/// As [`read`], of a file of UTF-8 text.
///
/// # Errors
/// As [`read`]; [`Cause::NotText`]
pub fn read_text(path: &Path, limit_bytes: u64) -> Result<String> {
    String::from_utf8(read(path, limit_bytes)?).map_err(|error| {
        let offset = error.utf8_error().valid_up_to();
        FileError::of("read", path)(Cause::NotText { offset })
    })
}

fn contents(file: &File, limit_bytes: u64) -> std::result::Result<Vec<u8>, Cause> {
    let within = |bytes: u64| match bytes <= limit_bytes {
        true => Ok(bytes),
        false => Err(Cause::TooLarge { bytes, limit_bytes }),
    };
    let bytes = within(file.metadata()?.len())?;
    let mut content = Vec::new();
    let memory = |_| Cause::Memory { bytes };
    content
        .try_reserve_exact(usize::try_from(bytes).unwrap_or(usize::MAX))
        .map_err(memory)?;
    // One more than the limit shows that the file is longer than it was.
    file.take(limit_bytes.saturating_add(1))
        .read_to_end(&mut content)?;
    within(content.len() as u64)?;
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of /proc has no size, so it stands for one that grew from nothing since it was seen.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_file_that_grows_stays_within_the_limit() {
        let file = File::open("/proc/self/status").unwrap();
        assert_eq!(file.metadata().unwrap().len(), 0);
        let error = contents(&file, 100).unwrap_err();
        assert_eq!(error.to_string(), "it has 101 bytes, expected at most 100");
    }
}

//! Files that cannot be read or written.

use std::io;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
#[error("cannot access {}: {source}", path.display())]
pub(crate) struct FileError {
    path: PathBuf,
    source: io::Error,
}

/// For `map_err`: the file that cannot be accessed.
pub(crate) fn cannot_access(path: &Path) -> impl FnOnce(io::Error) -> FileError {
    let path = path.to_path_buf();
    move |source| FileError { path, source }
}

//! Writing: a file gets its name once it is complete.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use crate::error::{FileError, Result};

/// A file that is written under its name with `.partial` at the end, and removed when it is
/// dropped before [`NewFile::commit`].
#[derive(Debug)]
pub struct NewFile {
    path: PathBuf,
    partial: PathBuf,
    file: File,
}

impl NewFile {
    /// Starts an empty file. It replaces the partial file of an interrupted process.
    ///
    /// # Errors
    /// [`Cause::System`](crate::Cause::System)
    pub fn create(path: &Path) -> Result<Self> {
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        // A link of that name would lead elsewhere.
        let removed = std::fs::remove_file(&partial).or_else(|error| match error.kind() {
            ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        });
        let file = removed.and_then(|()| File::create_new(&partial));
        Ok(Self {
            file: file.map_err(FileError::of("write", &partial))?,
            path: path.to_owned(),
            partial,
        })
    }

    /// The partial file.
    #[must_use]
    pub fn partial(&self) -> &Path {
        &self.partial
    }

    /// Writes the contents to disk and gives the file its name, replacing an older one.
    ///
    /// # Errors
    /// [`Cause::System`](crate::Cause::System)
    pub fn commit(self) -> Result<()> {
        let commit = self.file.sync_all();
        let commit = commit.and_then(|()| std::fs::rename(&self.partial, &self.path));
        commit.map_err(FileError::of("write", &self.path))
    }
}

impl Write for NewFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        // Already gone if it was renamed; an incomplete file is useless.
        let _gone = std::fs::remove_file(&self.partial);
    }
}

/// Writes a file by [`NewFile`]: an older one stays as it is until the new one is on disk.
///
/// # Errors
/// [`Cause::System`](crate::Cause::System)
pub fn write_whole(path: &Path, content: &[u8]) -> Result<()> {
    let mut file = NewFile::create(path)?;
    let written = file.write_all(content);
    written.map_err(FileError::of("write", &file.partial))?;
    file.commit()
}

/// Writes the names in a folder to disk, where the system supports it: Unix.
///
/// # Errors
/// [`Cause::System`](crate::Cause::System)
pub fn sync_folder(folder: &Path) -> Result<()> {
    if cfg!(unix) {
        let synced = File::open(folder).and_then(|folder| folder.sync_all());
        synced.map_err(FileError::of("write", folder))?;
    }
    Ok(())
}

//! The folder of a run, which one process at a time may write.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};

use crate::error::{Result, VlmTrainError};

const LOCK: &str = "run.lock";
/// More than a host name and a process number take.
const MOST_BYTES: u64 = 1024;

/// The folder of a run's log and checkpoints.
///
/// The process that writes it holds a lock, which the system gives up when the process ends,
/// however it ends. The file of the lock names host and process for the message to others.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    lock: Option<File>,
}

impl RunFolder {
    /// Creates the folder if it does not exist, and locks it until this is dropped.
    ///
    /// # Errors
    /// [`VlmTrainError::Locked`] if another run writes the folder; [`VlmTrainError::File`].
    pub fn own(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        fs::create_dir_all(&path).map_err(VlmTrainError::file("create", &path))?;
        let lock = lock(&path)?;
        Ok(Self {
            path,
            lock: Some(lock),
        })
    }

    /// The folder for a rank that reads it while the first rank writes.
    pub fn shared(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            lock: None,
        }
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// True if this process holds the lock.
    pub(crate) fn is_own(&self) -> bool {
        self.lock.is_some()
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        if self.lock.is_some() {
            // Before the lock is given up, so that no other process loses its file.
            let _stays = fs::remove_file(self.path.join(LOCK));
        }
    }
}

/// Locks a folder's file of that purpose.
fn lock(folder: &Path) -> Result<File> {
    let path = folder.join(LOCK);
    let failed = |action| VlmTrainError::file::<std::io::Error>(action, &path);
    loop {
        let options = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path);
        let mut file = options.map_err(failed("create"))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(locked(folder, &mut file)),
            Err(TryLockError::Error(error)) => return Err(failed("lock")(error)),
        }
        // The holder before may have removed the file after it was opened here.
        if !is_at(&file, &path) {
            continue;
        }
        let written = file
            .set_len(0)
            .and_then(|()| write!(file, "{} {}", host(), std::process::id()))
            .and_then(|()| file.flush());
        written.map_err(failed("write"))?;
        return Ok(file);
    }
}

fn locked(folder: &Path, file: &mut File) -> VlmTrainError {
    let mut text = String::new();
    let read = file
        .rewind()
        .and_then(|()| file.take(MOST_BYTES).read_to_string(&mut text));
    let holder = match (read, text.trim().rsplit_once(' ')) {
        (Ok(_), Some((host, process))) => format!("process {process} on {host}"),
        _ => "another process".to_owned(),
    };
    VlmTrainError::Locked {
        folder: folder.to_owned(),
        holder,
    }
}

/// True if a path still names an open file.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let same = |found: fs::Metadata| {
        let own = file.metadata().ok()?;
        Some((own.dev(), own.ino()) == (found.dev(), found.ino()))
    };
    fs::metadata(path).ok().and_then(same) == Some(true)
}

/// True if a path still names an open file; an open file cannot be removed here.
#[cfg(not(unix))]
fn is_at(_file: &File, _path: &Path) -> bool {
    true
}

/// The name of this host.
fn host() -> String {
    let name = plain_files::read_text(Path::new("/proc/sys/kernel/hostname"), 4096).ok();
    let name = name.or_else(|| std::env::var("HOSTNAME").ok());
    name.map_or("this host".to_owned(), |name| name.trim().to_owned())
}

/// Moves a file that a new run would replace to the first free name with a number.
///
/// # Errors
/// [`VlmTrainError::File`]
pub(crate) fn set_aside(path: &Path) -> Result<PathBuf> {
    let mut number = 1_u32;
    loop {
        let to = path.with_extension(format!("{number}.jsonl"));
        match fs::symlink_metadata(&to) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                fs::rename(path, &to).map_err(VlmTrainError::file("rename", path))?;
                return Ok(to);
            }
            _ => number += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_owner_at_a_time_and_a_dead_owner_is_none() {
        let path = std::env::temp_dir().join(format!("vlm-train-lock-{}", std::process::id()));
        let first = RunFolder::own(&path).expect("free");
        let error = RunFolder::own(&path).expect_err("taken").to_string();
        let holder = format!("process {} on ", std::process::id());
        assert!(error.contains(&holder), "{error}");
        drop(first);
        assert!(!path.join(LOCK).exists());
        // Left by a process that was killed.
        fs::write(path.join(LOCK), "elsewhere 4194303").expect("a file");
        drop(RunFolder::own(&path).expect("nobody holds it"));
        fs::remove_dir_all(&path).expect("removes");
    }
}

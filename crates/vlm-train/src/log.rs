//! `log.jsonl`: one line per step, validation and set of answers.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Result, VlmTrainError};
use crate::folder::set_aside;

const LOG: &str = "log.jsonl";

/// The log of a run.
pub(crate) struct Log {
    path: PathBuf,
    file: File,
}

/// The field common to all lines.
#[derive(Deserialize)]
struct Line {
    step: usize,
}

impl Log {
    /// Opens the log of a folder and removes the lines after `steps`, which the run will write
    /// again. At the start of a run, a log with lines, of a run that ended before its first
    /// checkpoint, is renamed; its new path is returned, too.
    ///
    /// # Errors
    /// [`VlmTrainError::File`]
    pub(crate) fn open(folder: &Path, steps: usize) -> Result<(Self, Option<PathBuf>)> {
        let path = folder.join(LOG);
        let has_lines = std::fs::metadata(&path).is_ok_and(|data| data.len() > 0);
        let aside = (steps == 0 && has_lines)
            .then(|| set_aside(&path))
            .transpose()?;
        let text = match plain_files::read(&path, u64::MAX) {
            Err(error) if error.is_missing() => Vec::new(),
            read => read?,
        };
        let kept = text
            .split_inclusive(|byte| *byte == b'\n')
            .take_while(|line| {
                let step = serde_json::from_slice(line).map(|Line { step }| step);
                line.ends_with(b"\n") && step.is_ok_and(|step| step <= steps)
            });
        let kept: Vec<u8> = kept.flatten().copied().collect();
        plain_files::write_whole(&path, &kept)?;
        let file = OpenOptions::new().append(true).open(&path);
        let file = file.map_err(VlmTrainError::file("write", &path))?;
        Ok((Self { path, file }, aside))
    }

    /// Adds a line.
    ///
    /// # Errors
    /// [`VlmTrainError::File`]
    pub(crate) fn add(&mut self, line: &impl Serialize) -> Result<()> {
        let failed = VlmTrainError::file::<std::io::Error>("write", &self.path);
        let mut write = || {
            let mut text = serde_json::to_vec(line)?;
            text.push(b'\n');
            self.file.write_all(&text)
        };
        write().map_err(failed)
    }

    /// Syncs the log to disk.
    ///
    /// # Errors
    /// [`VlmTrainError::File`]
    pub(crate) fn sync(&self) -> Result<()> {
        let synced = self.file.sync_all();
        synced.map_err(VlmTrainError::file("write", &self.path))
    }
}

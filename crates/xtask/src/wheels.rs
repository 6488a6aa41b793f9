//! Wheels of PyPI, of which only the files are wanted.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(Debug, thiserror::Error)]
pub(crate) enum WheelError {
    #[error("{command} failed: {output}")]
    Command { command: String, output: String },
    #[error("cannot access {path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("no wheel of {requirement} in {}", folder.display())]
    NoWheel {
        requirement: String,
        folder: PathBuf,
    },
}

/// Unpacks the wheel of `requirement` for `platform` below `work`, unless an earlier run has;
/// returns where. pip brings it, whatever the host is.
pub(crate) fn unpack(
    work: &Path,
    requirement: &str,
    platform: &str,
) -> Result<PathBuf, WheelError> {
    let folder = work.join(requirement);
    let unpacked = folder.join("unpacked");
    if unpacked.exists() {
        return Ok(unpacked);
    }
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--no-deps"]);
    pip.args(["--only-binary=:all:", "--platform", platform]);
    pip.args(["--python-version", "3.11", "--implementation", "cp"]);
    output_of(pip.args([requirement, "--dest"]).arg(&folder))?;
    let wheel = fs::read_dir(&folder)
        .map_err(|source| WheelError::File {
            path: folder.clone(),
            source,
        })?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .ok_or_else(|| WheelError::NoWheel {
            requirement: requirement.to_owned(),
            folder: folder.clone(),
        })?;
    // By another name until it is complete.
    let partial = folder.join("partial");
    let mut unzip = Command::new("python3");
    output_of(
        unzip
            .args(["-m", "zipfile", "-e"])
            .arg(&wheel)
            .arg(&partial),
    )?;
    fs::rename(&partial, &unpacked).map_err(|source| WheelError::File {
        path: unpacked.clone(),
        source,
    })?;
    Ok(unpacked)
}

/// The output of a command.
///
/// # Errors
/// [`WheelError::Command`] with it, if the command fails.
pub(crate) fn output_of(command: &mut Command) -> Result<String, WheelError> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| WheelError::Command {
        command: name.clone(),
        output: error.to_string(),
    })?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        Ok(text)
    } else {
        Err(WheelError::Command {
            command: name,
            output: text,
        })
    }
}

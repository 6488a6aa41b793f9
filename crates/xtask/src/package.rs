//! The published packages, and what the checks of them share.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{fs, io};

use serde::Deserialize;

#[derive(Debug, thiserror::Error)]
pub(crate) enum PackageError {
    #[error("cannot run {command}: {source}")]
    Start { command: String, source: io::Error },
    #[error("{0} failed; its messages are above")]
    Failed(String),
    #[error("cannot access {path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("cannot read the output of cargo metadata: {0}")]
    Metadata(#[from] serde_json::Error),
    #[error(
        "public items differ from docs/api; if that is meant, `cargo xtask api --write` and a \
         line in the changelog:\n{}",
        .0.join("\n")
    )]
    Api(Vec<String>),
}

pub(crate) type Result<T, E = PackageError> = std::result::Result<T, E>;

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    target_directory: PathBuf,
    workspace_root: PathBuf,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    /// The registries that may take it; none for "no registry", absent for "any".
    publish: Option<Vec<String>>,
}

/// The published packages, and the folders of the workspace.
pub(crate) struct Published {
    pub(crate) packages: Vec<Package>,
    pub(crate) target: PathBuf,
    pub(crate) root: PathBuf,
}

impl Published {
    /// Those that no manifest key keeps from being published.
    pub(crate) fn find() -> Result<Self> {
        let arguments = ["metadata", "--no-deps", "--offline", "--format-version=1"];
        let metadata: Metadata =
            serde_json::from_str(&output(crate::cargo::cargo().args(arguments))?)?;
        let mut packages = metadata.packages;
        packages.retain(|package| package.publish.is_none());
        Ok(Self {
            packages,
            target: metadata.target_directory,
            root: metadata.workspace_root,
        })
    }
}

/// The files below a folder, by their paths from it.
pub(crate) fn files(folder: &Path) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next).map_err(cannot_access(&next))? {
            let path = entry.map_err(cannot_access(&next))?.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(folder).unwrap_or(&path);
                found.insert(name.to_string_lossy().replace('\\', "/"));
            }
        }
    }
    Ok(found)
}

pub(crate) fn cannot_access(path: &Path) -> impl FnOnce(io::Error) -> PackageError {
    |source| PackageError::File {
        path: path.to_owned(),
        source,
    }
}

pub(crate) fn read(path: &Path) -> Result<String> {
    plain_files::read_text(path, u64::MAX).map_err(|error| cannot_access(path)(error.cause.into()))
}

pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(cannot_access(path))
}

/// A command as its program and first argument, for messages.
fn name(command: &Command) -> String {
    let program = Path::new(command.get_program())
        .file_name()
        .unwrap_or_default();
    let argument = command.get_args().next().unwrap_or_default();
    format!("{} {}", program.display(), argument.display())
}

pub(crate) fn finish(command: &mut Command) -> Result<()> {
    output(command.stdout(Stdio::inherit())).map(drop)
}

/// The output of a command, unless its standard output was given elsewhere.
fn output(command: &mut Command) -> Result<String> {
    let output = command.stderr(Stdio::inherit()).output();
    let output = output.map_err(|source| PackageError::Start {
        command: name(command),
        source,
    })?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(PackageError::Failed(name(command))),
    }
}

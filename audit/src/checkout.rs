//! Checkouts of the vendor's repositories.

use std::path::Path;
use std::process::Command;

/// The commit of a checkout, such as `commit 82b89a15f of 2026-07-30`; none if the folder is none.
pub(crate) fn commit_of(folder: &Path) -> Option<String> {
    let git = |arguments: &[&str]| {
        let output = Command::new("git")
            .arg("-C")
            .arg(folder)
            .args(arguments)
            .output()
            .ok()?;
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        output.status.success().then_some(text)
    };
    // Of this folder, not of a repository around it.
    let top = git(&["rev-parse", "--show-toplevel"])?;
    (Path::new(&top) == folder).then(|| git(&["log", "-1", "--format=commit %h of %cs"]))?
}

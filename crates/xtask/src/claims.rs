//! `cargo xtask claims`: the commands of docs/claims.md whose output a row states are run, and
//! their output is searched for it.
//!
//! The others are timed, want what this machine may not have, or are run by `cargo test
//! --workspace`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::{fs, io};

#[derive(Debug, thiserror::Error)]
pub(crate) enum ClaimsError {
    #[error("cannot use {path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("{0} of the claims are not shown; the table above says which")]
    NotShown(usize),
    #[error("`cargo build --release -p rope-cli` failed; its errors are above")]
    Build,
}

/// A row of docs/claims.md.
#[derive(Debug, PartialEq)]
struct Claim<'a> {
    name: &'a str,
    command: &'a str,
    /// What the output contains.
    says: Vec<&'a str>,
}

/// Runs them, each once; returns what was done.
pub(crate) fn run() -> Result<String, ClaimsError> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = root.join("docs/claims.md");
    let text =
        fs::read_to_string(&page).map_err(|source| ClaimsError::Io { path: page, source })?;
    let program = program(&root)?;
    let mut outputs = BTreeMap::new();
    let (mut shown, mut failed, mut rows) = (0, 0, Vec::new());
    for Claim {
        name,
        command,
        says,
    } in claims(&text)
    {
        if says.is_empty() {
            rows.push(format!("-      {name}: {command}"));
            continue;
        }
        if !outputs.contains_key(command) {
            println!("{command}");
            outputs.insert(command, output(&root, &program, command)?);
        }
        rows.push(match fault(&outputs[command], &says) {
            None => {
                shown += 1;
                format!("ok     {name}: {command}")
            }
            Some(fault) => {
                failed += 1;
                format!("FAILS  {name}: {command}: {fault}")
            }
        });
    }
    println!("\n{}\n", rows.join("\n"));
    match failed {
        0 => Ok(format!(
            "{shown} claims are shown, {} are not run",
            rows.len() - shown
        )),
        failed => Err(ClaimsError::NotShown(failed)),
    }
}

/// Builds `mrope` as the page's commands do.
fn program(root: &Path) -> Result<PathBuf, ClaimsError> {
    let mut build = crate::cargo::cargo();
    let arguments = ["build", "--release", "--locked", "--package=rope-cli"];
    build.current_dir(root).args(arguments);
    let io = |path: &str, source| ClaimsError::Io {
        path: path.into(),
        source,
    };
    let status = build.status().map_err(|source| io("cargo", source))?;
    // Beside the folder of this program's profile.
    let here = std::env::current_exe().map_err(|source| io("this program", source))?;
    let release = here.with_file_name("../release/mrope");
    match status.success() {
        true => Ok(release.with_extension(std::env::consts::EXE_EXTENSION)),
        false => Err(ClaimsError::Build),
    }
}

/// The rows of the table.
fn claims(page: &str) -> Vec<Claim<'_>> {
    let rows = page.lines().filter(|line| line.starts_with("| ")).skip(1);
    rows.filter_map(|row| {
        let mut cells = row.split('|').skip(1).map(str::trim);
        let (name, command) = (cells.next()?, cells.next()?.trim_matches('`'));
        let _what = cells.next()?;
        let says = cells.next()?.split('`').skip(1).step_by(2).collect();
        Some(Claim {
            name,
            command,
            says,
        })
    })
    .collect()
}

/// Runs a command, `mrope` as the program at this path.
fn output(root: &Path, mrope: &Path, command: &str) -> Result<Output, ClaimsError> {
    let mut words = command.split(' ');
    let mut process = match words.next() {
        Some("mrope") => Command::new(mrope),
        _ => crate::cargo::cargo(),
    };
    let path = process.get_program().into();
    // Progress is for who waits.
    process
        .current_dir(root)
        .args(words)
        .stderr(Stdio::inherit());
    process
        .output()
        .map_err(|source| ClaimsError::Io { path, source })
}

/// Why an output does not show a claim.
fn fault(output: &Output, says: &[&str]) -> Option<String> {
    if !output.status.success() {
        return Some(output.status.to_string());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let missing = says.iter().find(|part| !text.contains(**part))?;
    Some(format!("its output does not say {missing:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_read() {
        let page = "| claim | command | what it shows | it says |\n|---|---|---|---|\n\
                    | Memory | `mrope bench memory` | bytes | `535 MiB`, `0 MiB` |\n\
                    | Time | `mrope bench speed` | `a` | |\n";
        let claim = |name, command, says: &[&'static str]| Claim {
            name,
            command,
            says: says.to_vec(),
        };
        let expected = [
            claim("Memory", "mrope bench memory", &["535 MiB", "0 MiB"]),
            claim("Time", "mrope bench speed", &[]),
        ];
        assert_eq!(claims(page), expected);
    }

    #[test]
    fn a_failure_and_a_missing_figure_are_faults() {
        let found = |command, says| {
            let cargo = Path::new(env!("CARGO"));
            fault(
                &output(Path::new("."), cargo, command).expect("it runs"),
                &[says],
            )
        };
        assert_eq!(found("mrope --version", "cargo "), None);
        let missing = found("cargo --version", "mrope ").expect("a fault");
        assert!(missing.contains("\"mrope \""), "{missing}");
        assert!(found("cargo --no-such-option", "").is_some());
    }
}

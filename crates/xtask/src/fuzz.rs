//! `cargo xtask fuzz`: the targets of `fuzz/` under libFuzzer.
//!
//! Without the address sanitizer, under which rope-core alone takes three times as long to compile
//! as all of this: `cargo xtask sanitize` has it. Debug assertions of the kernels compare what they
//! are given with what they demand.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::{fs, io};

use crate::sanitize::{SanitizeError, host};

/// Coverage that libFuzzer reads, by LLVM's own options: the stable compiler has them too.
const COVERAGE: &str = "-Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=3 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table";

#[derive(Debug, thiserror::Error)]
pub(crate) enum FuzzError {
    #[error(transparent)]
    Build(#[from] SanitizeError),
    #[error("no target {found}: there are {known}")]
    Target { found: String, known: String },
    #[error("cannot use {path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error(
        "{target} failed: the input is in {path}; make it a test, and see it fail again by \
         {program} FILE"
    )]
    Found {
        target: String,
        path: PathBuf,
        program: String,
    },
}

/// How long each target runs after its kept inputs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Limit {
    Seconds(u32),
    Runs(u64),
}

/// The limit and the targets that the words after `fuzz` name; none is all of them.
pub(crate) fn parse<'a>(words: &'a [&'a str]) -> Option<(Limit, &'a [&'a str])> {
    match words {
        ["--seconds", count, targets @ ..] => Some((Limit::Seconds(count.parse().ok()?), targets)),
        ["--runs", count, targets @ ..] => Some((Limit::Runs(count.parse().ok()?), targets)),
        targets => Some((Limit::Seconds(5), targets)),
    }
    .filter(|(_, targets)| targets.iter().all(|target| !target.starts_with('-')))
}

/// Runs them one after the other; returns what was done.
pub(crate) fn run(limit: Limit, names: &[&str]) -> Result<String, FuzzError> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let known = known(&root)?;
    if let Some(found) = names.iter().find(|name| !known.iter().any(|k| k == *name)) {
        return Err(FuzzError::Target {
            found: (*found).to_owned(),
            known: known.join(", "),
        });
    }
    let host = host()?;
    let folder = root.join("target/fuzz");
    build(&root, &folder, &host)?;
    let chosen = known
        .iter()
        .filter(|target| names.is_empty() || names.contains(&target.as_str()));
    let mut inputs = 0;
    let mut count = 0;
    for target in chosen {
        inputs += fuzz(&root, &folder, &host, target, limit)?;
        count += 1;
    }
    Ok(format!("nothing found: {inputs} inputs, {count} targets"))
}

/// The targets, by their files.
fn known(root: &Path) -> Result<Vec<String>, FuzzError> {
    let path = root.join("fuzz/targets");
    let failed = |source| FuzzError::Io {
        path: path.clone(),
        source,
    };
    let mut found = Vec::new();
    for entry in fs::read_dir(&path).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        found.extend(
            path.file_stem()
                .map(|name| name.to_string_lossy().into_owned()),
        );
    }
    found.sort();
    Ok(found)
}

fn build(root: &Path, folder: &Path, host: &str) -> Result<(), FuzzError> {
    let mut command = crate::cargo::cargo();
    command
        .current_dir(root.join("fuzz"))
        .env("RUSTFLAGS", format!("{COVERAGE} --cfg fuzzing"))
        // With --target, cargo builds build scripts and macros without these flags.
        .args(["build", "--release", "--locked", "--bins", "--target", host])
        .arg("--target-dir")
        .arg(folder);
    let status = ended(&mut command, "cargo build")?;
    if !status.success() {
        return Err(SanitizeError::Found("cargo build in fuzz/".to_owned()).into());
    }
    Ok(())
}

fn ended(command: &mut Command, name: &str) -> Result<ExitStatus, FuzzError> {
    let failed = |source| SanitizeError::Start {
        command: name.to_owned(),
        source,
    };
    Ok(command.status().map_err(failed)?)
}

/// Runs one target; returns the inputs that it was given.
fn fuzz(
    root: &Path,
    folder: &Path,
    host: &str,
    target: &str,
    limit: Limit,
) -> Result<u64, FuzzError> {
    let program = folder.join(host).join("release").join(target);
    // New inputs go to the first folder; the kept ones are only read.
    let found = folder.join("found").join(target);
    let artifacts = folder.join("artifacts").join(target);
    for path in [&found, &artifacts] {
        fs::create_dir_all(path).map_err(|source| FuzzError::Io {
            path: path.clone(),
            source,
        })?;
    }
    let log = folder.join(format!("{target}.log"));
    let failed = |source| FuzzError::Io {
        path: log.clone(),
        source,
    };
    let output = fs::File::create(&log).map_err(failed)?;
    let errors = output.try_clone().map_err(failed)?;
    let mut command = Command::new(&program);
    command
        .stdout(output)
        .stderr(errors)
        .args(["-print_final_stats=1", "-timeout=60", "-rss_limit_mb=2048"])
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .arg(match limit {
            Limit::Seconds(count) => format!("-max_total_time={count}"),
            Limit::Runs(count) => format!("-runs={count}"),
        });
    let words = root.join("fuzz/words").join(target);
    if words.exists() {
        command.arg(format!("-dict={}", words.display()));
    }
    command
        .arg(found)
        .arg(root.join("fuzz/corpus").join(target));
    println!("fuzz {target}");
    let status = ended(&mut command, &program.display().to_string())?;
    let text = fs::read_to_string(&log).map_err(failed)?;
    if !status.success() {
        let tail: Vec<&str> = text.lines().rev().take(60).collect();
        tail.iter().rev().for_each(|line| eprintln!("{line}"));
        return Err(FuzzError::Found {
            target: target.to_owned(),
            path: artifacts,
            program: program.display().to_string(),
        });
    }
    let stated = text.lines().find_map(|line| {
        let count = line.strip_prefix("stat::number_of_executed_units:")?;
        count.trim().parse().ok()
    });
    let inputs: u64 = stated.unwrap_or(0);
    println!("     {inputs} inputs");
    Ok(inputs)
}

//! `cargo xtask deep`: the checks that continuous integration leaves out, one after the other, with
//! the outcome of each in docs/deep.md as soon as it is known.

mod steps;
mod table;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use std::{fs, io};

use steps::{Parts, STEPS, Step, parts};
use table::{CHANGED, Outcome, Row};

/// The page that holds the table, from the root of the repository.
const PAGE: &str = "docs/deep.md";

#[derive(Debug, thiserror::Error)]
pub(crate) enum DeepError {
    #[error("cannot access {}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{PAGE} has no line {0:?} where the table should be")]
    NoTable(&'static str),
    #[error("{PAGE}:{line}: {reason} in {text:?}")]
    Row {
        line: usize,
        text: String,
        reason: String,
    },
    #[error("no step {found}: there are {known}")]
    Step { found: String, known: String },
    #[error("{0} reads the vendor's repositories: name their folder by --vendor FOLDER")]
    NoVendor(&'static str),
    #[error("cannot run {command}: {source}")]
    Start { command: String, source: io::Error },
    #[error("{command} failed: {output}")]
    Command { command: String, output: String },
    #[error("failed: {0}; the messages are above")]
    Failed(String),
}

type Result<T, E = DeepError> = std::result::Result<T, E>;

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    list: bool,
    resume: bool,
    vendor: Option<PathBuf>,
    /// All if empty.
    steps: Vec<String>,
}

impl Options {
    /// The options in the words of a command line.
    pub(crate) fn parse(words: &[&str]) -> Option<Self> {
        let mut options = Self::default();
        let mut words = words.iter();
        while let Some(word) = words.next() {
            match *word {
                "--list" => options.list = true,
                "--resume" => options.resume = true,
                "--vendor" => options.vendor = Some(words.next()?.into()),
                word if word.starts_with('-') => return None,
                word => options.steps.push(word.to_owned()),
            }
        }
        Some(options)
    }

    /// The steps that were asked for.
    fn chosen(&self) -> Result<Vec<&'static Step>> {
        for name in &self.steps {
            let Some(step) = STEPS.iter().find(|step| step.name == name) else {
                let known: Vec<&str> = STEPS.iter().map(|step| step.name).collect();
                return Err(DeepError::Step {
                    found: name.clone(),
                    known: known.join(", "),
                });
            };
            if step.wants_vendor() && self.vendor.is_none() && !self.list {
                return Err(DeepError::NoVendor(step.name));
            }
        }
        let is_chosen =
            |step: &&Step| self.steps.is_empty() || self.steps.iter().any(|name| name == step.name);
        Ok(STEPS.iter().filter(is_chosen).collect())
    }
}

/// Runs the steps; returns how many passed.
///
/// # Errors
/// [`DeepError::Failed`] with the names of those that failed, after all have run.
pub(crate) fn run(options: &Options) -> Result<String> {
    let chosen = options.chosen()?;
    if options.list {
        return Ok(list(&chosen));
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = root.join(PAGE);
    let vendor = options
        .vendor
        .as_deref()
        .map(|folder| fs::canonicalize(folder).map_err(cannot_access(folder)));
    let vendor = vendor.transpose()?;
    // Unreadable rows are errors before anything runs.
    table::read(&read(&page)?)?;
    let (mut passed, mut done, mut left_out, mut failed) = (0, 0, 0, Vec::new());
    for step in chosen {
        let text = read(&page)?;
        let rows = table::read(&text)?;
        let earlier = rows.iter().find(|row| row.step == step.name);
        if options.resume && table::is_done(earlier, |commit| is_present(&root, commit)) {
            println!("\n== {}: passed with these files, not run again", step.name);
            done += 1;
            continue;
        }
        let (commit, start) = (commit(&root)?, Instant::now());
        let outcome = if step.wants_vendor() && vendor.is_none() {
            println!("\n== {}: left out, it wants --vendor FOLDER", step.name);
            left_out += 1;
            if earlier.is_some() {
                continue;
            }
            Outcome::LeftOut
        } else if run_all(step, &root, vendor.as_deref())? {
            passed += 1;
            Outcome::Passed
        } else {
            failed.push(step.name);
            Outcome::Failed
        };
        let row = Row {
            step: step.name,
            date: output(&root, "date", &["-u", "+%F"])?,
            commit,
            machine: machine(),
            seconds: start.elapsed().as_secs(),
            outcome,
        };
        println!(
            "== {}: {} after {} s",
            row.step,
            row.outcome.word(),
            row.seconds
        );
        // It may have changed meanwhile.
        let text = table::with(&read(&page)?, row)?;
        fs::write(&page, text).map_err(cannot_access(&page))?;
    }
    if failed.is_empty() {
        Ok(format!(
            "{passed} passed, {done} had passed before, {left_out} left out; {PAGE} has the table"
        ))
    } else {
        Err(DeepError::Failed(failed.join(", ")))
    }
}

/// The steps with their commands.
fn list(steps: &[&Step]) -> String {
    let of = |step: &&Step| {
        let commands = step.commands.iter().map(|text| format!("\n      {text}"));
        format!(
            "{}   {}{}",
            step.name,
            step.about,
            commands.collect::<String>()
        )
    };
    steps.iter().map(of).collect::<Vec<_>>().join("\n")
}

/// Runs the commands of a step up to one that fails; whether none did.
fn run_all(step: &Step, root: &Path, vendor: Option<&Path>) -> Result<bool> {
    for text in step.commands {
        println!("\n== {}: {text}", step.name);
        let Parts {
            variables,
            program,
            arguments,
        } = parts(text, vendor);
        let mut command = match program.as_str() {
            "cargo" => crate::cargo::cargo(),
            other => Command::new(other),
        };
        let status = command
            .current_dir(root)
            .args(arguments)
            .envs(variables)
            .status()
            .map_err(|source| DeepError::Start {
                command: (*text).to_owned(),
                source,
            })?;
        if !status.success() {
            eprintln!("error: {status}: {text}");
            return Ok(false);
        }
    }
    Ok(true)
}

fn cannot_access(path: &Path) -> impl FnOnce(io::Error) -> DeepError {
    let path = path.to_path_buf();
    move |source| DeepError::File { path, source }
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(cannot_access(path))
}

/// What a command prints.
fn output(root: &Path, program: &str, arguments: &[&str]) -> Result<String> {
    let name = || format!("{program} {}", arguments.join(" "));
    let mut command = Command::new(program);
    let output = command.current_dir(root).args(arguments).output();
    let output = output.map_err(|source| DeepError::Start {
        command: name(),
        source,
    })?;
    let text = |bytes| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    Err(DeepError::Command {
        command: name(),
        output: text(&output.stderr),
    })
}

/// All files but the page, which every step changes.
fn others() -> [String; 3] {
    ["--".to_owned(), ".".to_owned(), format!(":!{PAGE}")]
}

/// Whether files differ from the last commit, or are not in it.
fn is_changed(root: &Path) -> Result<bool> {
    let others = others();
    let [separator, all, page] = others.each_ref().map(String::as_str);
    let text = output(
        root,
        "git",
        &["status", "--porcelain", separator, all, page],
    )?;
    Ok(!text.is_empty())
}

/// The last commit, marked if files differ from it.
fn commit(root: &Path) -> Result<String> {
    let mut commit = output(root, "git", &["rev-parse", "--short=12", "HEAD"])?;
    if is_changed(root)? {
        commit.push(CHANGED);
    }
    Ok(commit)
}

/// Whether all files are as in a commit. Commits of the page alone are the same in that.
fn is_present(root: &Path, commit: &str) -> bool {
    let others = others();
    let [separator, all, page] = others.each_ref().map(String::as_str);
    let same = ["diff", "--quiet", commit, separator, all, page];
    is_changed(root).is_ok_and(|changed| !changed) && output(root, "git", &same).is_ok()
}

/// The processor and its cores.
fn machine() -> String {
    let about = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = about.lines().find(|line| line.starts_with("model name"));
    let model = model.and_then(|line| line.split_once(':'));
    let model = model.map_or(std::env::consts::ARCH, |(_, model)| model.trim());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{}, {cores} cores", model.replace('|', "/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_or_refused() {
        let options = Options::parse(&["--resume", "fuzz", "--vendor", "a", "abi"]);
        let options = options.expect("valid");
        assert!(options.resume && !options.list);
        assert_eq!(options.vendor.as_deref(), Some(Path::new("a")));
        let names: Vec<&str> = options
            .chosen()
            .expect("steps")
            .iter()
            .map(|s| s.name)
            .collect();
        assert_eq!(names, ["abi", "fuzz"]);
        let all = Options::parse(&[]).expect("valid").chosen();
        assert_eq!(all.expect("steps").len(), STEPS.len());
        for wrong in [&["--vendor"][..], &["--fast"]] {
            assert_eq!(Options::parse(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn unknown_steps_and_a_missing_folder_are_errors() {
        let fault = |words: &[&str]| {
            let chosen = Options::parse(words).expect("valid").chosen();
            chosen.expect_err("a fault").to_string()
        };
        assert!(fault(&["none"]).contains("no step none: there are "));
        assert!(fault(&["vendor-headers"]).contains("--vendor FOLDER"));
    }

    #[test]
    fn a_step_ends_at_the_first_command_that_fails() {
        let step = |commands| Step {
            name: "test",
            about: "",
            commands,
        };
        let run = |commands| run_all(&step(commands), Path::new("."), None).expect("it starts");
        assert!(run(&["A=1 cargo --version", "cargo --version"]));
        assert!(!run(&["cargo --no-such-option", "none"]));
        assert!(run_all(&step(&["no-such-program"]), Path::new("."), None).is_err());
    }

    #[test]
    fn what_a_machine_and_a_commit_are_called_is_readable() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let row = Row {
            step: "fuzz",
            date: output(&root, "date", &["-u", "+%F"]).expect("a date"),
            commit: commit(&root).expect("a commit"),
            machine: machine(),
            seconds: 0,
            outcome: Outcome::Passed,
        };
        let page = include_str!("../../../../docs/deep.md");
        let page = table::with(page, row.clone()).expect("a page");
        assert!(table::read(&page).expect("rows").contains(&row));
        assert!(!is_present(&root, "0000000"));
    }
}

//! `cargo xtask benchmarks`: measures everything, and writes the pages of results.

mod environment;
mod page;

use std::path::{Path, PathBuf};
use std::{fs, io};

use environment::{Environment, Environments};
use rope_bench::rows::{RowError, read_csv};

/// Where results are kept, from the workspace's root.
const FOLDER: &str = "docs/benchmarks";
const ENVIRONMENTS: &str = "environment.json";
/// The pages, and the templates in [`FOLDER`] that they are made of.
const PAGES: [(&str, &str); 2] = [
    ("docs/benchmarks.md", "template.md"),
    ("docs/benchmarks/tables.md", "tables.template.md"),
];

#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchmarkError {
    #[error("cannot access {path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("{path}: {source}; `cargo xtask benchmarks` measures again")]
    Rows { path: PathBuf, source: RowError },
    #[error("{path}: {source}; `cargo xtask benchmarks` measures again")]
    Environment {
        path: PathBuf,
        source: serde_json::Error,
    },
    #[error(
        "{path} does not say on what {part} was measured; \
         `cargo xtask benchmarks {part}` measures it again"
    )]
    Unstamped { path: PathBuf, part: &'static str },
    #[error("{command} failed")]
    Command { command: String },
    #[error("there is no measurement {name:?}; there are {known}")]
    Name { name: String, known: String },
    #[error("a chart cannot be drawn: {0}")]
    Chart(String),
    #[error("a template {problem}")]
    Template { problem: String },
}

type Result<T> = std::result::Result<T, BenchmarkError>;

/// cargo's arguments up to those of `mrope bench`.
const MROPE: &[&str] = &[
    "run",
    "--release",
    "-p",
    "rope-cli",
    "--features",
    "ascend-sim,rayon",
    "--",
    "bench",
];
/// cargo's arguments up to those of the comparison with other projects.
const PEERS: &[&str] = &[
    "bench",
    "-p",
    "rope-peers",
    "--features",
    "candle",
    "--bench",
    "peers",
    "--",
];

/// The parts that are measured: the name of the file of rows, the program that writes it, and its
/// arguments.
const RUNS: [(&str, &[&str], &[&str]); 5] = [
    ("memory", MROPE, &["memory"]),
    ("memory_npu", MROPE, &["memory", "--device", "ascend-sim"]),
    // More samples over more time than the program's defaults, because these figures are published.
    (
        "speed",
        MROPE,
        &["speed", "--samples", "9", "--rounds", "8"],
    ),
    ("step", MROPE, &["step"]),
    ("peers", PEERS, &[]),
];

/// What to measure before the pages are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Measure {
    /// Nothing: write the pages from the results that are there.
    Nothing,
    /// What has a bound.
    Default,
    /// Every combination.
    Full,
}

/// Measures the parts that `names` lists (`speed`, `step`, ...), or all if it is empty, and writes
/// the pages and their pictures; returns what was written.
pub(crate) fn run(measure: Measure, names: &[&str]) -> Result<String> {
    let root = root();
    let known = RUNS.map(|(part, ..)| part);
    if let Some(name) = names.iter().find(|name| !known.contains(name)) {
        return Err(BenchmarkError::Name {
            name: (*name).to_owned(),
            known: known.join(", "),
        });
    }
    if measure != Measure::Nothing {
        let folder = root.join(FOLDER);
        fs::create_dir_all(&folder).map_err(file(&folder))?;
        // Read first: the measurements would raise the load.
        let environment = Environment::read(&root);
        let mut environments = match environments(&folder) {
            // All are measured anew.
            Err(_) if names.is_empty() => Environments::default(),
            read => read?,
        };
        let chosen = |(part, ..): &(&str, _, _)| names.is_empty() || names.contains(part);
        for (part, program, arguments) in RUNS.into_iter().filter(chosen) {
            let arguments = [program, arguments].concat();
            let mut command = crate::cargo::cargo();
            command.current_dir(&root).args(&arguments);
            if part == "speed" && measure == Measure::Full {
                command.arg("--full");
            }
            command.arg("--csv").arg(rows_of(&folder, part));
            eprintln!("== {}", arguments.join(" "));
            let status = command.status().map_err(file(Path::new("cargo")))?;
            if !status.success() {
                let command = format!("cargo {}", arguments.join(" "));
                return Err(BenchmarkError::Command { command });
            }
            // After each part, because a later one may fail.
            environments.insert(part.to_owned(), environment.clone());
            write_environments(&folder, &environments)?;
        }
    }
    let made = Results::read(&root)?.files()?;
    for (path, text) in &made {
        let path = root.join(path);
        fs::write(&path, text).map_err(file(&path))?;
    }
    let names: Vec<&str> = made.iter().map(|(path, _)| path.as_str()).collect();
    Ok(format!("written: {}", names.join(", ")))
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn file(path: &Path) -> impl FnOnce(io::Error) -> BenchmarkError {
    let path = path.to_owned();
    move |source| BenchmarkError::File { path, source }
}

fn rows_of(folder: &Path, part: &str) -> PathBuf {
    folder.join(part).with_extension("csv")
}

/// The machine and commit of each part.
fn environments(folder: &Path) -> Result<Environments> {
    let path = folder.join(ENVIRONMENTS);
    let text = fs::read_to_string(&path).map_err(file(&path))?;
    serde_json::from_str(&text).map_err(|source| BenchmarkError::Environment { path, source })
}

fn write_environments(folder: &Path, environments: &Environments) -> Result<()> {
    let path = folder.join(ENVIRONMENTS);
    let text = serde_json::to_string_pretty(environments).map_err(|source| {
        let path = path.clone();
        BenchmarkError::Environment { path, source }
    })?;
    fs::write(&path, text + "\n").map_err(file(&path))
}

/// Everything that the pages are made of.
struct Results {
    /// By part, all of them.
    environments: Vec<(&'static str, Environment)>,
    memory: Vec<rope_bench::rows::MemoryRow>,
    memory_npu: Vec<rope_bench::rows::MemoryRow>,
    speed: Vec<rope_bench::rows::SpeedRow>,
    step: Vec<rope_bench::rows::StepRow>,
    peers: Vec<rope_bench::rows::SpeedRow>,
    /// In the order of [`PAGES`].
    templates: Vec<String>,
}

impl Results {
    fn read(root: &Path) -> Result<Self> {
        let folder = root.join(FOLDER);
        let text = |name: &str| {
            let path = folder.join(name);
            fs::read_to_string(&path).map_err(file(&path))
        };
        fn rows<R: serde::de::DeserializeOwned>(folder: &Path, part: &str) -> Result<Vec<R>> {
            let path = rows_of(folder, part);
            let from = fs::File::open(&path).map_err(file(&path))?;
            read_csv(from).map_err(|source| BenchmarkError::Rows { path, source })
        }
        let mut environments = environments(&folder)?;
        let stamp = |(part, ..): (&'static str, _, _)| match environments.remove(part) {
            Some(environment) => Ok((part, environment)),
            None => {
                let path = folder.join(ENVIRONMENTS);
                Err(BenchmarkError::Unstamped { path, part })
            }
        };
        Ok(Self {
            environments: RUNS.into_iter().map(stamp).collect::<Result<_>>()?,
            memory: rows(&folder, "memory")?,
            memory_npu: rows(&folder, "memory_npu")?,
            speed: rows(&folder, "speed")?,
            step: rows(&folder, "step")?,
            peers: rows(&folder, "peers")?,
            templates: PAGES
                .iter()
                .map(|(_, name)| text(name))
                .collect::<Result<_>>()?,
        })
    }

    /// The pages and their pictures, by their paths from the root.
    fn files(&self) -> Result<Vec<(String, String)>> {
        use rope_bench::chart;
        let charts = [
            ("memory.svg", chart::memory(&self.memory)),
            ("speed.svg", chart::speed(&self.speed)),
            ("step.svg", chart::step(&self.step)),
        ];
        let paths = PAGES.map(|(path, _)| path.to_owned());
        let mut made: Vec<_> = paths.into_iter().zip(page::pages(self)?).collect();
        for (name, chart) in charts {
            let svg = chart
                .svg()
                .map_err(|error| BenchmarkError::Chart(error.to_string()))?;
            made.push((format!("{FOLDER}/{name}"), svg));
        }
        Ok(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pages_follow_from_the_committed_results() {
        let root = root();
        let made = Results::read(&root).and_then(|results| results.files());
        for (path, text) in made.unwrap_or_else(|error| panic!("{error}")) {
            let committed = fs::read_to_string(root.join(&path)).unwrap();
            assert!(
                committed == text,
                "{path} differs from its results; `cargo xtask benchmarks --page` writes it again"
            );
        }
    }

    #[test]
    fn a_part_measured_again_keeps_the_others_dates_and_one_without_a_date_is_refused() {
        let root = std::env::temp_dir().join(format!("xtask-benchmarks-{}", std::process::id()));
        let folder = root.join(FOLDER);
        fs::create_dir_all(&folder).unwrap();
        for entry in super::root().join(FOLDER).read_dir().unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
        }
        let mut old = environments(&folder).unwrap()["memory"].clone();
        old.commit = "first".to_owned();
        let mut all: Environments = (RUNS.iter())
            .map(|(part, ..)| ((*part).to_owned(), old.clone()))
            .collect();
        let mut new = old;
        new.commit = "second".to_owned();
        all.insert("speed".to_owned(), new);
        write_environments(&folder, &all).unwrap();
        let (_, page) = Results::read(&root).unwrap().files().unwrap().remove(0);
        let table = page.split_once("## Measured on").unwrap().1;
        let lines: Vec<&str> = table.lines().skip(2).take(3).collect();
        assert_eq!(lines[0], "|  | memory, memory_npu, step, peers | speed |");
        assert_eq!(lines[1], "|---|---|---|");
        assert!(
            lines[2].contains("first | ") && lines[2].ends_with("second |"),
            "{lines:?}"
        );

        all.remove("step");
        write_environments(&folder, &all).unwrap();
        let error = Results::read(&root).err().unwrap().to_string();
        assert!(
            error.contains("environment.json does not say on what step was measured"),
            "{error}"
        );
        fs::remove_dir_all(&root).unwrap();
    }
}

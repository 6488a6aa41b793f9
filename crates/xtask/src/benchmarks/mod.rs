//! `cargo xtask benchmarks`: measures everything, and makes docs/benchmarks.md of it.

mod environment;
mod page;

use std::path::{Path, PathBuf};
use std::{fs, io};

use environment::Environment;
use rope_benches::rows::{RowError, read_csv};

/// Where results are kept, from the workspace's root.
const FOLDER: &str = "docs/benchmarks";
const PAGE: &str = "docs/benchmarks.md";

#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchmarkError {
    #[error("cannot access {path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("{path}: {source}; `cargo xtask benchmarks` measures anew")]
    Rows { path: PathBuf, source: RowError },
    #[error("{path}: {source}; `cargo xtask benchmarks` measures anew")]
    Environment {
        path: PathBuf,
        source: serde_json::Error,
    },
    #[error("{command} failed")]
    Command { command: String },
    #[error("there is no measurement {name:?}; there are {known}")]
    Name { name: String, known: String },
    #[error("a chart cannot be drawn: {0}")]
    Chart(String),
    #[error("the template {problem}")]
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
    "ascend-sim",
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

/// What is measured: a file of rows, the program that writes it, and its arguments.
const RUNS: [(&str, &[&str], &[&str]); 5] = [
    ("memory.csv", MROPE, &["memory"]),
    (
        "memory_npu.csv",
        MROPE,
        &["memory", "--device", "ascend-sim"],
    ),
    // More samples than one needs at a desk, over more time: the page's figures are to last.
    (
        "speed.csv",
        MROPE,
        &["speed", "--samples", "9", "--rounds", "4"],
    ),
    ("step.csv", MROPE, &["step"]),
    ("peers.csv", PEERS, &[]),
];

/// What to do besides making the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Measure {
    /// Nothing: the results are there.
    Nothing,
    /// What is held to a bar.
    Default,
    /// Every combination.
    Full,
}

/// Measures those of `names` (`speed`, `step`, ...), or all if there are none, and writes the page and its pictures; returns
/// what was written.
pub(crate) fn run(measure: Measure, names: &[&str]) -> Result<String> {
    let root = root();
    let stem = |file: &'static str| file.trim_end_matches(".csv");
    let known = RUNS.map(|(file, ..)| stem(file));
    if let Some(name) = names.iter().find(|name| !known.contains(name)) {
        return Err(BenchmarkError::Name {
            name: (*name).to_owned(),
            known: known.join(", "),
        });
    }
    if measure != Measure::Nothing {
        let folder = root.join(FOLDER);
        fs::create_dir_all(&folder).map_err(file(&folder))?;
        // Before the load of the measurements themselves.
        let environment = Environment::read(&root);
        let chosen =
            |(file, ..): &(&'static str, _, _)| names.is_empty() || names.contains(&stem(file));
        for (name, program, arguments) in RUNS.into_iter().filter(chosen) {
            let arguments = [program, arguments].concat();
            let mut command = crate::cargo();
            command.current_dir(&root).args(&arguments);
            if name == "speed.csv" && measure == Measure::Full {
                command.arg("--full");
            }
            command.arg("--csv").arg(folder.join(name));
            eprintln!("== {}", arguments.join(" "));
            let status = command.status().map_err(file(Path::new("cargo")))?;
            if !status.success() {
                let command = format!("cargo {}", arguments.join(" "));
                return Err(BenchmarkError::Command { command });
            }
        }
        let path = folder.join("environment.json");
        let mut text = serde_json::to_string_pretty(&environment).map_err(|source| {
            BenchmarkError::Environment {
                path: path.clone(),
                source,
            }
        })?;
        text.push('\n');
        fs::write(&path, text).map_err(file(&path))?;
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

/// Everything that the page is made of.
struct Results {
    environment: Environment,
    memory: Vec<rope_benches::rows::MemoryRow>,
    memory_npu: Vec<rope_benches::rows::MemoryRow>,
    speed: Vec<rope_benches::rows::SpeedRow>,
    step: Vec<rope_benches::rows::StepRow>,
    peers: Vec<rope_benches::rows::SpeedRow>,
    template: String,
    tuning: String,
}

impl Results {
    fn read(root: &Path) -> Result<Self> {
        let folder = root.join(FOLDER);
        let text = |name: &str| {
            let path = folder.join(name);
            fs::read_to_string(&path).map_err(file(&path))
        };
        fn rows<R: serde::de::DeserializeOwned>(folder: &Path, name: &str) -> Result<Vec<R>> {
            let path = folder.join(name);
            let from = fs::File::open(&path).map_err(file(&path))?;
            read_csv(from).map_err(|source| BenchmarkError::Rows { path, source })
        }
        let environment = serde_json::from_str(&text("environment.json")?).map_err(|source| {
            BenchmarkError::Environment {
                path: folder.join("environment.json"),
                source,
            }
        })?;
        Ok(Self {
            environment,
            memory: rows(&folder, "memory.csv")?,
            memory_npu: rows(&folder, "memory_npu.csv")?,
            speed: rows(&folder, "speed.csv")?,
            step: rows(&folder, "step.csv")?,
            peers: rows(&folder, "peers.csv")?,
            template: text("template.md")?,
            tuning: text("tuning.md")?,
        })
    }

    /// The page and its pictures, by their paths from the root.
    fn files(&self) -> Result<Vec<(String, String)>> {
        use rope_benches::chart;
        let charts = [
            ("memory.svg", chart::memory(&self.memory)),
            ("speed.svg", chart::speed(&self.speed)),
            ("step.svg", chart::step(&self.step)),
        ];
        let mut made = vec![(PAGE.to_owned(), page::page(self)?)];
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
    fn the_page_is_what_the_committed_results_make_of_it() {
        let root = root();
        let made = Results::read(&root).and_then(|results| results.files());
        for (path, text) in made.unwrap_or_else(|error| panic!("{error}")) {
            let committed = fs::read_to_string(root.join(&path)).unwrap();
            assert!(
                committed == text,
                "{path} is not what its results make of it; `cargo xtask benchmarks --page` writes it anew"
            );
        }
    }
}

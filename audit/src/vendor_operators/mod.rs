//! `cargo xaudit vendor-operators`: the operators held to the vendor's own first phases.
//!
//! The vendor publishes what checks an operator's arguments and chooses its kernels. It is compiled
//! for the host with g++; platform, log, shape inference and launches are the harness's
//! (`audit/vendor-operators`), so a call ends with the list of the kernels that it would
//! launch. Calls are generated from the operator table and recorded from the suites; each is asked
//! of the vendor's code and of the simulator.

mod ask;
mod build;
mod call;
mod cases;
mod compare;
mod definitions;
mod engines;
mod explained;
mod faults;
mod replay;

use std::collections::BTreeMap;
use std::path::PathBuf;

use rope_ascend::aclnn::OPERATORS;
use serde::Serialize;

use crate::file::{FileError, cannot_access};
use crate::report::judge;
pub(crate) use ask::{WORD as ASK, answer};
use build::{Builder, Library};
use compare::Comparison;
use engines::Placement;
use faults::FaultRow;
use replay::ReplayRow;

/// A device that the vendor's code asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Soc {
    /// Atlas A2.
    A2,
    /// Atlas A3.
    A3,
}

impl Soc {
    const ALL: [Self; 2] = [Self::A2, Self::A3];

    /// As the vendor names it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::A2 => "910B",
            Self::A3 => "910_93",
        }
    }
}

/// What may be asked for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    /// The folder of the checkouts.
    pub(crate) folder: PathBuf,
    /// Devices; both if empty.
    pub(crate) socs: Vec<Soc>,
    /// C functions of operators to sweep; all if empty.
    pub(crate) operators: Vec<String>,
    /// Leave out what needs burn.
    pub(crate) quick: bool,
    /// Print one JSON object instead of tables.
    pub(crate) json: bool,
}

impl Options {
    /// The options in the words of a command line.
    pub(crate) fn parse(words: &[&str]) -> Option<Self> {
        let mut options = Self::default();
        let mut words = words.iter();
        while let Some(word) = words.next() {
            match *word {
                "--soc" => {
                    let name = words.next()?;
                    options
                        .socs
                        .push(Soc::ALL.into_iter().find(|soc| soc.name() == *name)?);
                }
                "--operator" => {
                    let name = words.next()?;
                    OPERATORS
                        .iter()
                        .find(|operator| operator.function == *name)?;
                    options.operators.push((*name).to_owned());
                }
                "--quick" => options.quick = true,
                "--json" => options.json = true,
                word if word.starts_with('-') => return None,
                word if options.folder.as_os_str().is_empty() => options.folder = word.into(),
                _ => return None,
            }
        }
        if options.socs.is_empty() {
            options.socs = Soc::ALL.to_vec();
        }
        (!options.folder.as_os_str().is_empty()).then_some(options)
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum VendorError {
    #[error(
        "{} is no folder: name one that holds checkouts of opbase, metadef, runtime, ops-math, \
         ops-nn and ops-transformer (github.com/hicann)", folder.display()
    )]
    NoFolder { folder: PathBuf },
    #[error(
        "{} holds no {name}: `git clone https://github.com/hicann/{name}` there", folder.display()
    )]
    NoCheckout { folder: PathBuf, name: &'static str },
    #[error("no compiler {0}: `apt install g++`, or set CXX")]
    NoCompiler(String),
    #[error("no nlohmann/json.hpp: `apt install nlohmann-json3-dev`")]
    NoJson,
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{} does not compile: {first}", source_file.display())]
    Compile { source_file: PathBuf, first: String },
    #[error(
        "the text of the fault {name:?} is not once in crates/burn-ascend/src/{file}: mend it in \
         faults.rs"
    )]
    Fault {
        name: &'static str,
        file: &'static str,
    },
    #[error("{0}")]
    Failed(String),
}

type Result<T> = std::result::Result<T, VendorError>;

/// What was shown.
#[derive(Serialize)]
struct Report {
    commits: Vec<(&'static str, String)>,
    compiler: String,
    /// Sources of the vendor that were compiled, and symbols that were filled.
    sources: usize,
    filled: usize,
    /// Operators without a public first phase.
    absent: Vec<String>,
    sweeps: Vec<Sweep>,
    replays: Vec<ReplayRow>,
    faults: Vec<FaultRow>,
}

/// The sweep of one device.
#[derive(Serialize)]
struct Sweep {
    soc: &'static str,
    comparison: Comparison,
    placement: Placement,
    /// Functions that a verdict passed through and that the harness fills, with the calls.
    filled: BTreeMap<String, usize>,
}

/// Runs what was asked for, with progress on standard error; returns tables or JSON.
pub(crate) fn run(options: &Options) -> Result<String> {
    let builder = Builder::find(&options.folder)?;
    for (name, commit) in &builder.commits {
        eprintln!("{name}: {commit}");
    }
    let library = builder.build()?;
    let mut report = Report {
        commits: builder.commits.clone(),
        compiler: builder.compiler_version.clone(),
        sources: library.sources,
        filled: library.filled,
        absent: library.absent.clone(),
        sweeps: Vec::new(),
        replays: Vec::new(),
        faults: Vec::new(),
    };
    for soc in &options.socs {
        report
            .sweeps
            .push(sweep(&builder, &library, *soc, &options.operators)?);
    }
    if !options.quick && options.operators.is_empty() {
        report.replays = replay::replay(&builder, &library, &options.socs)?;
        report.faults = faults::faults(&builder, &library, |row| {
            eprintln!("{}: {}", row.fault, row.words());
        })?;
    }
    let tables = (!options.json).then(|| report.tables());
    judge(&report, tables, &report.failures()).map_err(VendorError::Failed)
}

fn sweep(builder: &Builder, library: &Library, soc: Soc, chosen: &[String]) -> Result<Sweep> {
    let mut calls = Vec::new();
    for operator in OPERATORS {
        let is_chosen = chosen.is_empty() || chosen.iter().any(|name| name == operator.function);
        if is_chosen && !library.absent.iter().any(|name| name == operator.function) {
            calls.extend(cases::cases(operator)?);
        }
    }
    eprintln!("{}: sweeping {} calls", soc.name(), calls.len());
    let answers = ask::ask(&library.path, soc, &calls, &builder.work)?;
    let mut comparison = compare::compare(&calls, &answers);
    let placement = engines::place(&calls, &answers);
    if !chosen.is_empty() {
        // The rows are of all operators.
        comparison.stale.clear();
    }
    let mut filled = BTreeMap::new();
    for name in answers.into_iter().flat_map(|answer| answer.filled) {
        *filled.entry(name).or_default() += 1;
    }
    Ok(Sweep {
        soc: soc.name(),
        comparison,
        placement,
        filled,
    })
}

impl Report {
    /// What is not as it should be.
    fn failures(&self) -> Vec<String> {
        let of = |sweep: &Sweep| {
            let mut failures = sweep.comparison.failures();
            failures.extend(sweep.placement.failures());
            let with_soc = |failure| format!("{}: {failure}", sweep.soc);
            failures.into_iter().map(with_soc).collect::<Vec<_>>()
        };
        let replays = self.replays.iter().flat_map(ReplayRow::failures);
        let missed = self.faults.iter().filter(|row| row.refused == 0);
        let missed = missed.map(|row| format!("not refused with the fault {:?}", row.fault));
        self.sweeps
            .iter()
            .flat_map(of)
            .chain(replays)
            .chain(missed)
            .collect()
    }

    fn tables(&self) -> String {
        let mut text = String::new();
        for (name, commit) in &self.commits {
            text += &format!("{name}: {commit}\n");
        }
        text += &format!(
            "Compiler: {}\nSources compiled: {}, symbols filled: {}\n",
            self.compiler, self.sources, self.filled
        );
        if !self.absent.is_empty() {
            text += &format!("Without a public first phase: {}\n", self.absent.join(", "));
        }
        for sweep in &self.sweeps {
            text += &format!("\nDevice {}\n\n{}", sweep.soc, sweep.comparison.tables());
            text += &sweep.placement.table();
            for (name, calls) in &sweep.filled {
                text += &format!("filled, called in {calls} calls: {name}\n");
            }
        }
        if !self.replays.is_empty() {
            text += &replay::tables(&self.replays);
            text += &faults::table(&self.faults);
        }
        text.trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn options_are_read_or_refused() {
        let words = [
            "--soc",
            "910_93",
            "--operator",
            "aclnnAdd",
            "--quick",
            "somewhere",
        ];
        let options = Options::parse(&words).expect("valid");
        assert_eq!(options.folder, Path::new("somewhere"));
        assert_eq!((options.socs, options.quick), (vec![Soc::A3], true));
        assert_eq!(options.operators, ["aclnnAdd"]);
        let both = Options::parse(&["somewhere"]).expect("valid");
        assert_eq!(both.socs, Soc::ALL);
        for wrong in [
            &[][..],
            &["--soc", "910B"],
            &["--soc", "910", "a"],
            &["--operator", "aclnnNo", "a"],
            &["a", "b"],
            &["--fast", "a"],
        ] {
            assert_eq!(Options::parse(wrong), None, "{wrong:?}");
        }
    }
}

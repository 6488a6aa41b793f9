//! `cargo xaudit time`: how long the kernels would take on Atlas A2 by two tables of the vendor.
//!
//! The simulator writes what the first block of a launch does; each instruction takes the cycles
//! that a judge gives it, on its pipe and after the instructions that it has to follow. Transfers
//! share the chip's memory. Scalar code is in neither table and takes no time here. Nothing of this
//! was measured on a device.

mod faults;
mod judges;
mod launch;
mod trace;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use serde::Serialize;

use crate::checkout::commit_of;
use crate::file::{FileError, cannot_access};
use crate::report::judge;
use faults::{FAULTS, FaultRow};
use judges::{BYTES_PER_CYCLE, PtoModel, by_mskpp, has_both};
pub(crate) use launch::{WORD as LAUNCH, launch};
use trace::{Time, Trace};

/// What a rotation may take of its memory's time.
const MOST: f64 = 1.10;
const ROTATION: &str = "rope_rotate";

#[derive(Debug, thiserror::Error)]
pub(crate) enum TimeError {
    #[error("{0}")]
    File(#[from] FileError),
    #[error(
        "{} holds no include/pto/costmodel: name a clone of github.com/PTO-ISA/pto-isa",
        .0.display()
    )]
    NoModel(PathBuf),
    #[error("{compiler} does not compile PTO-ISA's model, which needs C++20: {first}")]
    Compile { compiler: String, first: String },
    #[error("no figure for {what} {types}: add its row to audit/src/time/judges.rs")]
    NoFigure { what: String, types: String },
    #[error("the fault {0:?} changes nothing in the kernels: mend its text in faults.rs")]
    Fault(&'static str),
    #[error("{0}")]
    Failed(String),
}

type Result<T> = std::result::Result<T, TimeError>;

/// What may be asked for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Options {
    /// The clone of pto-isa.
    folder: PathBuf,
    /// Print one JSON object instead of tables.
    json: bool,
}

impl Options {
    /// The options in the words of a command line.
    pub(crate) fn parse(words: &[&str]) -> Option<Self> {
        let (json, folder) = match *words {
            ["--json", folder] => (true, folder),
            [folder] => (false, folder),
            _ => return None,
        };
        let folder = (!folder.starts_with('-')).then(|| folder.into())?;
        Some(Self { folder, json })
    }
}

/// The tables' last columns: a judge's view of a kernel, all in shares of the memory's time.
#[derive(Clone, Debug, Serialize)]
struct Verdict {
    vector: f64,
    all: f64,
    /// What takes longest.
    bound: String,
    /// Of a rotation over the limit: the instructions that explain it, by which the other judge's
    /// cycles bring it below, and to what.
    explained: Option<(Vec<String>, f64)>,
}

#[derive(Debug, Serialize)]
struct Row {
    kernel: String,
    /// Cycles of the transfers of a core at its share of the chip's memory.
    memory: f64,
    mskpp: Verdict,
    pto: Verdict,
}

#[derive(Serialize)]
struct Report {
    model: String,
    rows: Vec<Row>,
    faults: Vec<FaultRow>,
}

/// Judges the kernels, and slow ones that have to be noticed.
pub(crate) fn run(options: &Options) -> Result<String> {
    let root = crate::root();
    let root = fs::canonicalize(&root).map_err(cannot_access(&root))?;
    let work = root.join("target/time");
    fs::create_dir_all(&work).map_err(cannot_access(&work))?;
    let folder = &options.folder;
    let folder = fs::canonicalize(folder).map_err(cannot_access(folder))?;
    let pto = PtoModel::compile(&folder, &work)?;
    let commit = commit_of(&folder).unwrap_or_else(|| "no commit known".to_owned());
    eprintln!("launching the kernels");
    let rows = rows(&pto, launches(&work, None)?)?;
    let mut report = Report {
        model: format!("pto-isa, {commit}"),
        rows,
        faults: Vec::new(),
    };
    for fault in &FAULTS {
        eprintln!("slow kernel: {}", fault.name);
        let source = fault.seed(&root, &work.join("slow"))?;
        let rows = self::rows(&pto, launches(&work, Some(&source))?)?;
        report.faults.push(fault.judge(&rows));
    }
    let tables = (!options.json).then(|| report.tables());
    judge(&report, tables, &report.failures()).map_err(TimeError::Failed)
}

/// The traces of the launches, with the names that the table gives them.
fn launches(work: &Path, source: Option<&Path>) -> Result<Vec<(String, Trace)>> {
    let record = work.join("trace");
    if record.exists() {
        fs::remove_file(&record).map_err(cannot_access(&record))?;
    }
    let program = env::current_exe().map_err(cannot_access("this program".as_ref()))?;
    let output = Command::new(&program)
        .arg(LAUNCH)
        .args(source)
        .env("ASCEND_SIM_TRACE", &record)
        .output()
        .map_err(cannot_access(&program))?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(TimeError::Failed(error));
    }
    let text = fs::read_to_string(&record).map_err(cannot_access(&record))?;
    let pairings = String::from_utf8_lossy(&output.stdout).into_owned();
    // The outcome is printed as a line.
    let pairings: Vec<&str> = pairings.trim_end_matches('\n').split('\n').collect();
    let traces = Trace::read(&text).unwrap_or_default();
    if traces.is_empty() || traces.len() < pairings.len() {
        let (found, expected) = (traces.len(), pairings.len());
        return Err(TimeError::Failed(format!(
            "{} holds {found} launches, {expected} were made",
            record.display()
        )));
    }
    let pairings = pairings.into_iter().chain(std::iter::repeat(""));
    let named = traces.into_iter().zip(pairings).map(|(trace, pairing)| {
        let name = format!("{} {pairing}", trace.kernel);
        (name.trim_end().to_owned(), trace)
    });
    Ok(named.collect())
}

fn rows(pto: &PtoModel, launches: Vec<(String, Trace)>) -> Result<Vec<Row>> {
    let row = |(kernel, trace): (String, Trace)| {
        let cycles = [by_mskpp(&trace)?, pto.cycles(&trace)?];
        let times = [&cycles[0], &cycles[1]].map(|cycles| trace.run(cycles, BYTES_PER_CYCLE));
        let limited = kernel.starts_with(ROTATION);
        let verdict = |own: usize| {
            let time = &times[own];
            let all = time.all / time.memory;
            Verdict {
                vector: time.vector / time.memory,
                all,
                bound: bound(time),
                explained: (limited && all > MOST)
                    .then(|| explain(&trace, &cycles[own], &cycles[1 - own], time))
                    .flatten(),
            }
        };
        Ok(Row {
            memory: times[0].memory,
            mskpp: verdict(0),
            pto: verdict(1),
            kernel,
        })
    };
    launches.into_iter().map(row).collect()
}

/// The busiest of what a kernel uses.
fn bound(time: &Time) -> String {
    let most = time.vector.max(time.loads).max(time.stores);
    if most < time.memory {
        "memory".to_owned()
    } else if time.vector < most {
        "one core's transfers".to_owned()
    } else {
        let costs = &time.by_instruction;
        let first = costs.iter().max_by(|a, b| a.1.total_cmp(b.1));
        first.map_or_else(String::new, |(name, cycles)| {
            format!("{name}, {:.0} %", cycles / time.vector * 100.0)
        })
    }
}

/// The fewest instructions, by what they cost, with whose cycles of the other judge the kernel
/// stays below the limit.
fn explain(trace: &Trace, own: &[f64], other: &[f64], time: &Time) -> Option<(Vec<String>, f64)> {
    let mut cycles = own.to_vec();
    let mut names = Vec::new();
    loop {
        // What the other judge would save, by instruction.
        let mut saved = std::collections::BTreeMap::<&str, f64>::new();
        for (index, step) in trace.steps.iter().enumerate() {
            if has_both(step) {
                *saved.entry(&step.what).or_default() += cycles[index] - other[index];
            }
        }
        let (name, most) = saved.into_iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
        if most <= 0.0 {
            return None;
        }
        for (index, step) in trace.steps.iter().enumerate() {
            if step.what == name {
                cycles[index] = other[index];
            }
        }
        names.push(name.to_owned());
        let ratio = trace.run(&cycles, BYTES_PER_CYCLE).all / time.memory;
        if ratio <= MOST {
            return Some((names, ratio));
        }
    }
}

impl Row {
    /// Over the limit under a judge, without an instruction that explains it.
    fn is_slow(&self) -> [bool; 2] {
        [&self.mskpp, &self.pto].map(|verdict| {
            self.kernel.starts_with(ROTATION) && verdict.all > MOST && verdict.explained.is_none()
        })
    }
}

impl Report {
    fn failures(&self) -> Vec<String> {
        let slow = self.rows.iter().filter(|row| row.is_slow() != [false; 2]);
        let slow = slow.map(|row| {
            format!(
                "{} takes {:.3} and {:.3} of its memory's time, at most {MOST} is allowed",
                row.kernel, row.mskpp.all, row.pto.all
            )
        });
        let missed = self.faults.iter().filter(|row| row.reported_by.is_empty());
        let missed = missed.map(|row| format!("not reported: {}", row.fault));
        slow.chain(missed).collect()
    }

    /// Markdown, as docs/tables/time.md has it.
    fn tables(&self) -> String {
        let mut text = format!("Model: {}\n", self.model);
        text += "\n| kernel | memory, cycles | msKPP: vector unit | whole | bound by | PTO-ISA: \
                 vector unit | whole | bound by | over 1.10 because of |\n\
                 |---|---|---|---|---|---|---|---|---|\n";
        for row in &self.rows {
            let (mskpp, pto) = (&row.mskpp, &row.pto);
            let why = match (&mskpp.explained, &pto.explained) {
                (None, None) if row.is_slow() == [false; 2] => String::new(),
                (None, None) => "NOT EXPLAINED".to_owned(),
                (Some((names, ratio)), _) => {
                    format!("{}; {ratio:.2} by PTO-ISA's figures", names.join(", "))
                }
                (None, Some((names, ratio))) => {
                    format!("{}; {ratio:.2} by msKPP's figures", names.join(", "))
                }
            };
            text += &format!(
                "| {} | {:.0} | {:.2} | {:.3} | {} | {:.2} | {:.3} | {} | {why} |\n",
                row.kernel,
                row.memory,
                mskpp.vector,
                mskpp.all,
                mskpp.bound,
                pto.vector,
                pto.all,
                pto.bound
            );
        }
        text += "\n| worst | msKPP | PTO-ISA |\n|---|---|---|\n";
        for (name, only) in [("of the rotations", ROTATION), ("of all kernels", "")] {
            let rows = self.rows.iter().filter(|row| row.kernel.starts_with(only));
            let rows: Vec<&Row> = rows.collect();
            let worst = |of: fn(&Row) -> f64| {
                let first = rows.iter().max_by(|a, b| of(a).total_cmp(&of(b)));
                first.map_or_else(String::new, |row| format!("{:.3}, {}", of(row), row.kernel))
            };
            let (mskpp, pto) = (worst(|row| row.mskpp.all), worst(|row| row.pto.all));
            text += &format!("| {name} | {mskpp} | {pto} |\n");
        }
        text += "\n| slow kernel | msKPP | PTO-ISA | reported by |\n|---|---|---|---|\n";
        for row in &self.faults {
            let [mskpp, pto] = row.all;
            let by = match row.reported_by.join(", ") {
                by if by.is_empty() => "NOBODY".to_owned(),
                by => by,
            };
            text += &format!("| {} | {mskpp:.3} | {pto:.3} | {by} |\n", row.fault);
        }
        text.trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_or_refused() {
        let options = Options::parse(&["--json", "somewhere"]).expect("valid");
        assert_eq!(options.folder, Path::new("somewhere"));
        assert!(options.json);
        for wrong in [&[][..], &["--json"], &["--fast", "a"], &["a", "b"]] {
            assert_eq!(Options::parse(wrong), None, "{wrong:?}");
        }
    }
}

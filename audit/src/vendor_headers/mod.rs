//! `cargo xaudit vendor-headers`: the kernels held to the vendor's own Ascend C headers.
//!
//! The headers are compiled for the host with clang. What Huawei's compiler supplies by itself is
//! in `audit/vendor-headers`: keywords, address spaces, types, and the intrinsics, which
//! execute and check what they are given. The compiled kernels run in the simulator's runtime, so
//! the suites of the workspace go through the vendor's queues, masks and copies.

mod compile;
mod counts;
mod faults;
mod probes;
mod rules;
mod suites;

use std::path::PathBuf;

use serde::Serialize;

use crate::file::{FileError, cannot_access};
use crate::report::judge;
use compile::{Compiled, Harness};
use counts::TileRow;
pub(crate) use counts::{WORD as LAUNCH, launch};
use faults::{Caught, FaultRow};
pub(crate) use rules::{WORD as PROBE, probe, run as run_rules};
use suites::{SUITES, SuiteRow};

/// What may be asked for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    /// The checkout of asc-devkit, or the installed CANN.
    pub(crate) folder: PathBuf,
    /// Architectures; both if empty.
    pub(crate) architectures: Vec<u32>,
    /// Only compile.
    pub(crate) compile_only: bool,
    /// Leave out the suite that needs burn.
    pub(crate) quick: bool,
    /// Print one JSON object instead of tables.
    pub(crate) json: bool,
}

/// The architectures that the kernels are for, as `__NPU_ARCH__`.
const ARCHITECTURES: [u32; 2] = [2201, 3510];

/// The kernels' sources by the path that the suites compile them by: a symbolic link is in it, and
/// clang replaces a file by its name.
const KERNELS: &str = "crates/rope-ascend/kernels/rope";

impl Options {
    /// Those of `vendor-rules`, which has the architecture of the rules alone.
    pub(crate) fn parse_rules(words: &[&str]) -> Option<Self> {
        let others = ["--arch", "--compile"];
        let none = !words.iter().any(|word| others.contains(word));
        none.then(|| Self::parse(words))?
    }

    /// The options in the words of a command line.
    pub(crate) fn parse(words: &[&str]) -> Option<Self> {
        let mut options = Self::default();
        let mut words = words.iter();
        while let Some(word) = words.next() {
            match *word {
                "--arch" => {
                    let number = words.next()?.parse().ok()?;
                    ARCHITECTURES.contains(&number).then_some(())?;
                    options.architectures.push(number);
                }
                "--compile" => options.compile_only = true,
                "--quick" => options.quick = true,
                "--json" => options.json = true,
                word if word.starts_with('-') => return None,
                word if options.folder.as_os_str().is_empty() => options.folder = word.into(),
                _ => return None,
            }
        }
        if options.architectures.is_empty() {
            options.architectures = ARCHITECTURES.to_vec();
        }
        (!options.folder.as_os_str().is_empty()).then_some(options)
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum VendorError {
    #[error(
        "the harness addresses the unified buffer by a segment register of x86-64 Linux, this is \
         {0}: run it there"
    )]
    Host(String),
    #[error(
        "{} holds no include/basic_api/kernel_basic_intf.h beside impl/, itself or in asc/ or \
         include/asc/: name a checkout of asc-devkit (github.com/hicann/asc-devkit) or an \
         installed CANN", .0.display()
    )]
    NoHeaders(PathBuf),
    #[error("no clang 15 or later, tried {tried}: `apt install clang-15`, or set CLANG")]
    NoClang { tried: String },
    #[error(transparent)]
    File(#[from] FileError),
    #[error("the path {} holds white space, at which CXXFLAGS is cut: use another", .0.display())]
    Space(PathBuf),
    #[error("dav-{architecture}: {count} errors, of which the first is\n{first}")]
    Compile {
        architecture: u32,
        count: usize,
        first: String,
    },
    #[error("{command} ended without a result of its tests:\n{output}")]
    Tests { command: String, output: String },
    #[error("the fault {name:?} changes nothing in {KERNELS}/{file}: mend its text in faults.rs")]
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
    headers: String,
    compiler: String,
    compiled: Vec<Compiled>,
    suites: Vec<SuiteRow>,
    tiles: Vec<TileRow>,
    faults: Vec<FaultRow>,
}

/// Runs what was asked for, with progress on standard error; returns tables or JSON.
pub(crate) fn run(options: &Options) -> Result<String> {
    let harness = Harness::find(&options.folder)?;
    let (headers, compiler) = harness.title();
    eprintln!("headers: {headers}\ncompiler: {compiler}");
    let mut report = Report {
        headers,
        compiler,
        compiled: Vec::new(),
        suites: Vec::new(),
        tiles: Vec::new(),
        faults: Vec::new(),
    };
    for &architecture in &options.architectures {
        eprintln!("dav-{architecture}: compiling the kernels");
        report.compiled.push(harness.compile(architecture)?);
    }
    for compiled in report.compiled.iter().filter(|_| !options.compile_only) {
        let architecture = compiled.architecture;
        let suites = SUITES.iter().filter(|suite| {
            suite.architectures.contains(&architecture) && !(options.quick && suite.is_large)
        });
        for suite in suites {
            eprintln!("dav-{architecture}: {}", suite.name);
            let row = harness.suite(suite, architecture, &harness.environment()?)?;
            report.suites.push(row);
        }
        eprintln!("dav-{architecture}: counting");
        report.tiles.extend(harness.counts(compiled)?);
        let faults = harness.faults(architecture, |row| {
            eprintln!("dav-{architecture}: {}: {}", row.fault, row.caught.words());
        })?;
        report.faults.extend(faults);
    }
    let tables = (!options.json).then(|| report.tables());
    judge(&report, tables, &report.failures()).map_err(VendorError::Failed)
}

impl Report {
    /// What is not as it should be.
    fn failures(&self) -> Vec<String> {
        let suites = self.suites.iter().filter(|row| !row.is_good());
        let suites = suites.map(|row| {
            format!(
                "{} on dav-{}: {} of {} tests failed, memory differs after {} of {} launches",
                row.suite,
                row.architecture,
                row.failed,
                row.passed + row.failed,
                row.different,
                row.launches
            )
        });
        let faults = self
            .faults
            .iter()
            .filter(|row| row.caught == Caught::Missed);
        let faults =
            faults.map(|row| format!("not caught on dav-{}: {}", row.architecture, row.fault));
        suites.chain(faults).collect()
    }

    /// Markdown, as docs/tables/simulator.md has it.
    fn tables(&self) -> String {
        let mut text = format!("Headers: {}\nCompiler: {}\n", self.headers, self.compiler);
        text += "\n| architecture | kernels | errors | intrinsics without a body |\n|---|---|---|---|\n";
        for row in &self.compiled {
            let (architecture, kernels, absent) = (row.architecture, row.kernels.len(), row.absent);
            text += &format!("| dav-{architecture} | {kernels} | 0 | {absent} |\n");
        }
        if !self.suites.is_empty() {
            text += "\n| suite | architecture | tests passed | launches | other memory than the simulator |\n|---|---|---|---|---|\n";
        }
        for row in &self.suites {
            text += &format!(
                "| {} | dav-{} | {} | {} | {} |\n",
                row.suite, row.architecture, row.passed, row.launches, row.different
            );
        }
        if !self.tiles.is_empty() {
            text += "\n| a tile of | architecture | tokens | vector instructions | of which | V \
                     barriers | transfers in, out | by the simulator's headers |\n\
                     |---|---|---|---|---|---|---|---|\n";
        }
        for row in &self.tiles {
            let names: Vec<String> = (row.instructions.iter())
                .map(|(name, count)| format!("{count} {name}"))
                .collect();
            let (vendor, simulator) = (row.vendor, row.simulator);
            text += &format!(
                "| {} | dav-{} | {} | {} | {} | {} | {}, {} | {}; {}; {}, {} |\n",
                row.kernel,
                row.architecture,
                row.tokens,
                vendor.vector,
                names.join(", "),
                vendor.barriers,
                vendor.transfers_in,
                vendor.transfers_out,
                simulator.vector,
                simulator.barriers,
                simulator.transfers_in,
                simulator.transfers_out
            );
        }
        if !self.faults.is_empty() {
            text += "\n| seeded fault | architecture | caught by |\n|---|---|---|\n";
        }
        for row in &self.faults {
            let caught = row.caught.words();
            text += &format!("| {} | dav-{} | {caught} |\n", row.fault, row.architecture);
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
        let options = Options::parse(&["--arch", "3510", "somewhere"]).expect("valid");
        assert_eq!(options.folder, Path::new("somewhere"));
        assert_eq!(options.architectures, [3510]);
        let both = Options::parse(&["somewhere"]).expect("valid");
        assert_eq!(both.architectures, ARCHITECTURES);
        for wrong in [
            &[][..],
            &["--arch", "2201"],
            &["--arch", "9", "a"],
            &["a", "b"],
            &["--fast", "a"],
        ] {
            assert_eq!(Options::parse(wrong), None, "{wrong:?}");
        }
    }
}

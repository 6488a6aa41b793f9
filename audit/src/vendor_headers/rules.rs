//! `cargo xaudit vendor-rules`: the vendor's checks of each call, of asc-tools, over the kernels.
//!
//! The headers of asc-devkit have a mode for the host, in which each call is checked before it
//! runs. The checks are sources of asc-tools; `audit/vendor-rules` supplies the rest. The kernels
//! are compiled so, and the suites run through it; calls that break a rule have to be found.

use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::{env, error, fs};

use ascend_sim::build::KernelSource;
use ascend_sim::{Machine, Session};
use rope_ascend::loader::Api;
use rope_ascend::rope::{KernelType, Kernels, LayerKernels, MemoryPart};
use rope_ascend::safe::Runtime;
use serde::Serialize;

use super::compile::{Harness, hash_sources};
use super::probes::PROBES;
use super::suites::{SUITES, SuiteRow};
use super::{ARCHITECTURES, Options, Result, VendorError, cannot_access};
use crate::checkout::commit_of;
use crate::report::judge;

/// The hidden word of the command line for [`probe`].
pub(crate) const WORD: &str = "vendor-rules-probe";
/// The kind of violation that a check of the vendor makes (`audit/vendor-rules/stub_def.h`).
const RULE: &str = "vendor-rule";
/// The checks, in the checkout of asc-tools.
const CHECKS: &str = "cpudebug/src/api_check";
/// Both define the same two constants.
const SORT: &str = "kernel_vec_sort_check.cpp";
const OF_SORT: &str = "#define ONE_REPEAT_CAL_NUM ONE_REPEAT_CAL_NUM_OF_SORT\n\
                       #define PROPOSAL_SIZE PROPOSAL_SIZE_OF_SORT\n";
/// The architecture whose rules these are. The kernels of the other one are compiled without them.
const ARCHITECTURE: u32 = 2201;

/// What became of a call that breaks a rule.
#[derive(Serialize)]
struct ProbeRow {
    call: &'static str,
    fault: &'static str,
    /// Whose checks find it.
    by: Vec<&'static str>,
    /// What the first one says; empty if none says anything.
    found: String,
    /// The same call without the fault, if something was found in it.
    false_alarm: String,
}

#[derive(Serialize)]
struct Report {
    headers: String,
    checks: String,
    compiler: String,
    sources: usize,
    suites: Vec<SuiteRow>,
    probes: Vec<ProbeRow>,
}

/// Runs the suites and the probes; returns tables or JSON.
pub(crate) fn run(options: &Options) -> Result<String> {
    let harness = Harness::find(&options.folder.join("asc-devkit"))?;
    let tools = options.folder.join("asc-tools");
    let tools = fs::canonicalize(&tools).map_err(|_| {
        VendorError::Failed(format!(
            "{} holds no asc-tools: name a folder of checkouts of asc-devkit and asc-tools \
             (github.com/hicann)",
            options.folder.display()
        ))
    })?;
    let checks = tools.join(CHECKS);
    let sources = sources(&checks)?;
    for architecture in ARCHITECTURES {
        eprintln!("dav-{architecture}: compiling the kernels without the checks");
        harness.compile(architecture)?;
    }
    let environment = environment(&harness, &checks, &sources)?;
    let (headers, compiler) = harness.title();
    let commit = commit_of(&tools).unwrap_or_else(|| "no commit known".to_owned());
    let mut report = Report {
        headers,
        checks: format!("asc-tools ({commit})"),
        compiler,
        sources: sources.len(),
        suites: Vec::new(),
        probes: Vec::new(),
    };
    eprintln!("calls that break a rule");
    report.probes = probes(&harness, &environment)?;
    for suite in SUITES
        .iter()
        .filter(|suite| !(options.quick && suite.is_large))
    {
        eprintln!("dav-{ARCHITECTURE}: {}", suite.name);
        let row = harness.suite(suite, ARCHITECTURE, &environment)?;
        report.suites.push(row);
    }
    let tables = (!options.json).then(|| report.tables());
    judge(&report, tables, &report.failures()).map_err(VendorError::Failed)
}

/// The sources of the checks.
fn sources(checks: &Path) -> Result<Vec<PathBuf>> {
    let list = fs::read_dir(checks).map_err(cannot_access(checks))?;
    let mut sources = Vec::new();
    for entry in list {
        let path = entry.map_err(cannot_access(checks))?.path();
        if path.extension().is_some_and(|ending| ending == "cpp") {
            sources.push(path);
        }
    }
    sources.sort();
    Ok(sources)
}

/// The environment in which the simulator compiles kernels with the checks.
fn environment(
    harness: &Harness,
    checks: &Path,
    sources: &[PathBuf],
) -> Result<Vec<(&'static str, String)>> {
    let mut text = String::new();
    for source in sources {
        if source.ends_with(SORT) {
            text += OF_SORT;
        }
        // Writing to a string does not fail.
        let _ = writeln!(text, "#include \"{}\"", source.display());
    }
    harness.write("rules.h", &text)?;
    let ours = harness.root.join("audit/vendor-rules");
    let mut hasher = DefaultHasher::new();
    hash_sources(&ours, &mut hasher)?;
    hash_sources(checks, &mut hasher)?;
    let mut environment = harness.environment()?;
    for (name, value) in &mut environment {
        if *name == "CXXFLAGS" {
            // Before the other folders, which have a header of the same name.
            *value = format!(
                "-DASCENDC_CPU_DEBUG=1 -I{} {value} -isystem {} -isystem {} -w \
                 -DHARNESS_RULES=0x{:x}",
                ours.display(),
                checks.join("inc").display(),
                checks.display(),
                hasher.finish()
            );
        }
    }
    Ok(environment)
}

/// Launches each probe, without its fault and with it.
fn probes(harness: &Harness, environment: &[(&'static str, String)]) -> Result<Vec<ProbeRow>> {
    let tiling = harness.root.join("kernels/rope/rope_tiling.h");
    let source = harness.write("probes.cpp", &super::probes::source(&tiling))?;
    let program = env::current_exe().map_err(cannot_access("this program".as_ref()))?;
    let output = Command::new(&program)
        .arg(WORD)
        .arg(&source)
        .envs(environment.iter().map(|(name, value)| (*name, value)))
        .output()
        .map_err(cannot_access(&program))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    if !output.status.success() || lines.len() < 2 * PROBES.len() {
        let error = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(VendorError::Failed(format!("the probes: {error}")));
    }
    let rows = PROBES
        .iter()
        .zip(lines.chunks_exact(2))
        .map(|(probe, lines)| {
            let (by, found) = rules(lines[1]);
            ProbeRow {
                call: probe.call,
                fault: probe.fault,
                false_alarm: lines[0].to_owned(),
                by,
                found,
            }
        });
    Ok(rows.collect())
}

/// Of the violations of a line, whose checks made some, and what the first one says. The headers'
/// checks say where they stand, those of asc-tools do not.
fn rules(line: &str) -> (Vec<&'static str>, String) {
    const PLACE: &str = "[ERROR][";
    let found = line.split('\t').filter_map(|one| one.strip_prefix(RULE));
    let found: Vec<&str> = found
        .map(|text| text.trim_start_matches([':', ' ']))
        .collect();
    let headers = found.iter().filter(|text| text.starts_with(PLACE)).count();
    let mut by = Vec::new();
    if headers < found.len() {
        by.push("asc-tools");
    }
    if headers > 0 {
        by.push("asc-devkit");
    }
    let first = found.first().copied().unwrap_or_default();
    let text = match first.strip_prefix(PLACE) {
        Some(text) => text.split_once("] ").map_or(text, |(_, text)| text),
        None => first.trim_start_matches("[ERROR]"),
    };
    let text = text.split("[ERROR]").next().unwrap_or_default();
    (by, text.trim().to_owned())
}

/// Launches the probes of a source; a line for each: its violations, separated by tabs. In a
/// process of its own, because the environment says how the kernel is compiled.
pub(crate) fn probe(words: &[&str]) -> std::result::Result<String, Box<dyn error::Error>> {
    let [source] = words else {
        return Err("a source is expected".into());
    };
    // A kernel that the crate launches with two tensors and a number, which says the probe.
    let kernel = "rope_square_sums_f32";
    let source = KernelSource::new(*source).kernels([kernel]);
    let binary = source.architecture(ARCHITECTURE).compile()?;
    let _session = Session::with_machine(Machine::ascend_910b());
    let runtime = Runtime::start(Api::simulated()?)?;
    let mut lines = String::new();
    for number in 1..=2 * PROBES.len() {
        // What a launch breaks ends its stream.
        let stream = runtime.device(0)?.stream()?;
        let kernels = Arc::new(Kernels::load(&stream, &binary)?);
        let (x, mut y) = (stream.zeros::<f32>(4_096)?, stream.zeros::<f32>(4_096)?);
        let (from, to) = (
            MemoryPart {
                memory: &*x,
                offset: 0,
            },
            MemoryPart {
                memory: &mut *y,
                offset: 0,
            },
        );
        let x = (KernelType::F32, from);
        LayerKernels::new(&stream, kernels).square_sums(number, 128, x, to)?;
        // The violations say why it failed.
        let _ = stream.synchronize();
        let violations = ascend_sim::control::take_violations();
        let texts = violations.iter().map(|violation| {
            let text = format!("{}: {}", violation.kind, violation.message);
            text.replace(['\t', '\n'], " ")
        });
        lines += &texts.collect::<Vec<_>>().join("\t");
        lines.push('\n');
    }
    Ok(lines)
}

impl Report {
    fn failures(&self) -> Vec<String> {
        let suites = self.suites.iter().filter(|row| !row.is_good());
        let suites = suites.map(|row| {
            format!(
                "{}: {} tests failed, {} of {} launches left other memory",
                row.suite, row.failed, row.different, row.launches
            )
        });
        let missed = self.probes.iter().filter(|row| row.found.is_empty());
        let missed = missed.map(|row| format!("not found: {}, {}", row.call, row.fault));
        let wrong = self.probes.iter().filter(|row| !row.false_alarm.is_empty());
        let wrong = wrong.map(|row| format!("{} without a fault: {}", row.call, row.false_alarm));
        suites.chain(missed).chain(wrong).collect()
    }

    /// Markdown; docs/tables/simulator.md has it without the vendor's words.
    fn tables(&self) -> String {
        let mut text = format!(
            "Headers: {}\nChecks: {}, {} sources\nCompiler: {}\n",
            self.headers, self.checks, self.sources, self.compiler
        );
        if !self.suites.is_empty() {
            text += "\n| suite | tests passed | failed | launches | breaking a rule | other memory \
                     than the simulator |\n|---|---|---|---|---|---|\n";
        }
        for row in &self.suites {
            text += &format!(
                "| {} | {} | {} | {} | {} | {} |\n",
                row.suite, row.passed, row.failed, row.launches, row.violating, row.different
            );
        }
        text += "\n| call | fault | found by the checks of | which say |\n|---|---|---|---|\n";
        for row in &self.probes {
            let by = match row.by.join(", ") {
                by if by.is_empty() => "NOBODY".to_owned(),
                by => by,
            };
            let (call, fault, found) = (row.call, row.fault, &row.found);
            text += &format!("| `{call}` | {fault} | {by} | {found} |\n");
        }
        text.trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vendors_words_are_told_from_the_harness() {
        let line = "ub-misaligned: dst\tvendor-rule: [ERROR]Failed a. [ERROR][a.h:1] again\t\
                    vendor-rule: [ERROR][a.h:1][Add] Failed b.";
        let (by, found) = rules(line);
        assert_eq!(
            (by, &*found),
            (vec!["asc-tools", "asc-devkit"], "Failed a.")
        );
        let (by, found) = rules("vendor-rule: [ERROR][Block_0][a.h:1][Add][7] Failed b. ");
        assert_eq!((by, &*found), (vec!["asc-devkit"], "Failed b."));
        assert_eq!(rules("ub-misaligned: dst"), (Vec::new(), String::new()));
    }
}

//! The suites of the workspace through the vendor's headers, and what their launches leave in
//! memory compared with the simulator's own run.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde::Serialize;

use super::compile::Harness;
use super::{Result, VendorError, cannot_access};

/// A test target.
pub(super) struct Suite {
    pub(super) name: &'static str,
    /// cargo's, after `test`.
    arguments: &'static [&'static str],
    pub(super) architectures: &'static [u32],
    /// Tests that are left out on an architecture.
    left_out: &'static [(u32, &'static str)],
    /// Its dependencies include burn, which takes long to build.
    pub(super) is_large: bool,
}

/// Tests with this in their names launch kernels with a cube core, which are compiled with the
/// vendor's headers and not run.
const WITH_CUBE: [(u32, &str); 2] = [(2201, "cube"), (3510, "cube")];

/// The numbers of traffic.rs are of dav-2201. What failures.rs launches has a cube core.
pub(super) const SUITES: [Suite; 6] = [
    Suite {
        name: "rope-ascend differential",
        arguments: DIFFERENTIAL,
        architectures: &[2201, 3510],
        left_out: &[WITH_CUBE[0], WITH_CUBE[1]],
        is_large: false,
    },
    Suite {
        name: "rope-ascend norm",
        arguments: &["-p", "rope-ascend", "--test", "norm"],
        architectures: &[2201, 3510],
        left_out: &[],
        is_large: false,
    },
    Suite {
        name: "rope-ascend layer",
        arguments: &["-p", "rope-ascend", "--test", "layer"],
        architectures: &[2201, 3510],
        left_out: &[],
        is_large: false,
    },
    Suite {
        name: "rope-ascend traffic",
        arguments: &["-p", "rope-ascend", "--test", "traffic"],
        architectures: &[2201],
        left_out: &[WITH_CUBE[0]],
        is_large: false,
    },
    // What the harness's conversions compute, compared with another implementation.
    Suite {
        name: "ascend-sim numeric",
        arguments: &[
            "-p",
            "ascend-sim",
            "--features",
            "host-kernels",
            "--test",
            "numeric",
        ],
        architectures: &[2201],
        left_out: &[
            // It has no barriers between dependent vector instructions.
            (2201, "vector_instructions_compute_what_they_say"),
        ],
        is_large: false,
    },
    Suite {
        name: "rope-tests ascend",
        // Of the whole workspace: with `-p`, burn would be built again with other features.
        arguments: &["--workspace", "--test", "ascend"],
        architectures: &[2201, 3510],
        left_out: &[
            WITH_CUBE[0],
            WITH_CUBE[1],
            // It lists the limits of Atlas A2.
            (
                3510,
                "stock_operators_are_checked_or_name_the_limit_that_keeps_them",
            ),
        ],
        is_large: true,
    },
];
pub(super) const DIFFERENTIAL: &[&str] = &["-p", "rope-ascend", "--test", "differential"];

/// What a suite showed.
#[derive(Serialize)]
pub(super) struct SuiteRow {
    pub(super) suite: &'static str,
    pub(super) architecture: u32,
    pub(super) passed: u64,
    pub(super) failed: u64,
    pub(super) launches: usize,
    /// Launches after which the memory that was written differs from the simulator's run, or that
    /// only one of the two runs has.
    pub(super) different: usize,
    /// Launches with violations.
    pub(super) violating: usize,
}

impl SuiteRow {
    pub(super) fn is_good(&self) -> bool {
        self.failed == 0
            && self.passed > 0
            && self.launches > 0
            && self.different == 0
            && self.violating == 0
    }
}

/// A run of a test target.
pub(super) struct Run {
    pub(super) passed: u64,
    pub(super) failed: u64,
    /// What the tests printed.
    pub(super) output: String,
    /// A line for each launch of a kernel: architecture, kernel, blocks, kinds of violations, and
    /// hashes of what was written. Sorted, as streams may take turns.
    pub(super) launches: Vec<String>,
}

/// Runs a test target, one test at a time. `record` is the file that takes the launches.
pub(super) fn run(
    root: &Path,
    arguments: &[&str],
    tests: &[&str],
    architecture: u32,
    environment: &[(&'static str, String)],
    record: &Path,
) -> Result<Run> {
    if record.exists() {
        fs::remove_file(record).map_err(cannot_access(record))?;
    }
    let mut command = crate::cargo::cargo();
    command
        .current_dir(root)
        .args(["test", "--quiet", "--locked"])
        .args(arguments)
        .args(["--", "--test-threads=1"])
        .args(tests)
        .env("ASCEND_SIM_LAUNCHES", record)
        .env("ASCEND_SIM_MACHINE", machine(architecture))
        .env("RUST_BACKTRACE", "0")
        .envs(environment.iter().map(|(name, value)| (*name, value)));
    let name = format!("cargo test {}", arguments.join(" "));
    let (passed, failed, output) = tests_of(&name, &mut command)?;
    let lines = fs::read_to_string(record).unwrap_or_default();
    let mut launches: Vec<String> = lines.lines().map(str::to_owned).collect();
    launches.sort_unstable();
    Ok(Run {
        passed,
        failed,
        output,
        launches,
    })
}

/// What `ASCEND_SIM_MACHINE` names.
fn machine(architecture: u32) -> &'static str {
    if architecture == 3510 {
        "ascend_950"
    } else {
        "ascend_910b"
    }
}

/// Tests that passed and failed, and what was printed.
fn tests_of(name: &str, command: &mut Command) -> Result<(u64, u64, String)> {
    let output = command
        .output()
        .map_err(cannot_access(Path::new("cargo")))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    match count_tests(&text) {
        // A test that ends the process has no result.
        None => Err(VendorError::Tests {
            command: name.to_owned(),
            output: text,
        }),
        Some((passed, failed)) => Ok((passed, failed, text)),
    }
}

/// Sums over lines such as `test result: ok. 7 passed; 0 failed; 1 ignored; ...`.
fn count_tests(text: &str) -> Option<(u64, u64)> {
    let results = text
        .lines()
        .filter_map(|line| line.split_once("test result: "));
    let counts = results.map(|(_, result)| {
        let number = |word: &str| -> Option<u64> {
            let part = result.split([';', '.']).find(|part| part.ends_with(word))?;
            part.trim_end_matches(word).trim().parse().ok()
        };
        Some((number(" passed")?, number(" failed")?))
    });
    counts.collect::<Option<Vec<_>>>().and_then(|counts| {
        let sum = |(p, f): (u64, u64), (passed, failed)| (p + passed, f + failed);
        (!counts.is_empty()).then(|| counts.into_iter().fold((0, 0), sum))
    })
}

/// Lines that only one of two sorted lists has, counted in the longer direction.
pub(super) fn differences(ours: &[String], theirs: &[String]) -> usize {
    let (mut i, mut j, mut equal) = (0, 0, 0);
    while let (Some(a), Some(b)) = (ours.get(i), theirs.get(j)) {
        match a.cmp(b) {
            std::cmp::Ordering::Equal => (i, j, equal) = (i + 1, j + 1, equal + 1),
            std::cmp::Ordering::Less => i += 1,
            std::cmp::Ordering::Greater => j += 1,
        }
    }
    ours.len().max(theirs.len()) - equal
}

/// Launches with violations.
fn violating(run: &Run) -> usize {
    let kinds = run.launches.iter().map(|line| line.split(' ').nth(3));
    kinds.filter(|kinds| *kinds != Some("-")).count()
}

impl Harness {
    /// Runs a suite through the vendor's headers, which the environment names, and through the
    /// simulator's.
    pub(super) fn suite(
        &self,
        suite: &Suite,
        architecture: u32,
        environment: &[(&'static str, String)],
    ) -> Result<SuiteRow> {
        let left_out = suite.left_out.iter().filter(|(of, _)| *of == architecture);
        let tests: Vec<&str> = left_out.flat_map(|(_, name)| ["--skip", *name]).collect();
        let go = |environment: &[(&'static str, String)], record: &str| {
            let record = self.work.join(record);
            run(
                &self.root,
                suite.arguments,
                &tests,
                architecture,
                environment,
                &record,
            )
        };
        let simulator = go(&[], "launches-simulator")?;
        let vendor = go(environment, "launches-vendor")?;
        for run in [&simulator, &vendor] {
            if run.failed > 0 {
                eprintln!("{}", run.output);
            }
        }
        Ok(SuiteRow {
            suite: suite.name,
            architecture,
            passed: vendor.passed,
            failed: vendor.failed + simulator.failed,
            launches: vendor.launches.len(),
            different: differences(&simulator.launches, &vendor.launches),
            // Of a suite that seeds none: what the harness finds and the simulator does not.
            violating: violating(&vendor).saturating_sub(violating(&simulator)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_tests_are_summed() {
        let line = |passed, failed| {
            format!("\ntest result: ok. {passed} passed; {failed} failed; 1 ignored; 0 measured\n")
        };
        assert_eq!(count_tests(&(line(7, 0) + &line(3, 2))), Some((10, 2)));
        assert_eq!(count_tests("error: could not compile"), None);
    }

    #[test]
    fn differing_launches_are_counted() {
        let list = |lines: &[&str]| {
            lines
                .iter()
                .map(|line| (*line).to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(differences(&list(&["a", "b"]), &list(&["a", "b"])), 0);
        assert_eq!(differences(&list(&["a", "b"]), &list(&["a", "c"])), 1);
        assert_eq!(differences(&list(&["a"]), &list(&["a", "a", "b"])), 2);
        assert_eq!(differences(&[], &list(&["a"])), 1);
    }
}

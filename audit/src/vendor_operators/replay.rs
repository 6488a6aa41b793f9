//! The calls that suites and programs of the workspace make, asked of the vendor's code.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use serde::Serialize;

use super::ask::{Answer, ask};
use super::build::{Builder, Library};
use super::call::{Call, ParseError, type_name};
use super::compare::{place, reason};
use super::engines;
use super::{Result, Soc, VendorError, cannot_access};

/// What is run with the simulator recording.
struct Program {
    name: &'static str,
    /// cargo's arguments if they begin with `test`, else those of `mrope`.
    arguments: &'static [&'static str],
    /// A step of training, which is to stay on the AI Core.
    is_step: bool,
}

/// The test that no operation of the models' steps goes to the host, with either rotation.
pub(super) const MODELS: &str =
    "ascend_training::no_step_of_the_models_of_transformers_leaves_the_ai_core";

/// The folder of what programs write, below the tool's own.
const OUT: &str = "OUT";

const PROGRAMS: [Program; 7] = [
    Program {
        name: "tests of burn-ascend",
        // Of the whole workspace: with `-p`, burn would be built again with other features.
        arguments: &[
            "test",
            "--workspace",
            "--test",
            "backend",
            "--test",
            "rotary",
        ],
        is_step: false,
    },
    Program {
        name: "tests/ascend.rs",
        arguments: &["test", "--workspace", "--test", "ascend"],
        is_step: false,
    },
    Program {
        name: "mrope train",
        arguments: &[
            "train",
            "--json",
            "--device",
            "ascend-sim",
            "--steps",
            "3",
            "--batch",
            "4",
            "--test-questions",
            "4",
            "--out",
            OUT,
        ],
        is_step: true,
    },
    Program {
        name: "Qwen2-VL, forward and backward",
        arguments: &[
            "verify",
            "--device",
            "ascend-sim",
            "tests/fixtures/models/qwen2_vl_tiny",
        ],
        is_step: true,
    },
    Program {
        name: "Qwen2.5-VL, forward and backward",
        arguments: &[
            "verify",
            "--device",
            "ascend-sim",
            "tests/fixtures/models/qwen2_5_vl_tiny",
        ],
        is_step: true,
    },
    Program {
        name: "Qwen3-VL, forward and backward",
        arguments: &[
            "verify",
            "--device",
            "ascend-sim",
            "tests/fixtures/models/qwen3_vl_tiny",
        ],
        is_step: true,
    },
    Program {
        name: "test of the models' steps",
        arguments: &[
            "test",
            "--workspace",
            "--test",
            "suite",
            "--",
            "--exact",
            MODELS,
        ],
        is_step: true,
    },
];

/// What became of a program's calls.
#[derive(Serialize)]
pub(super) struct ReplayRow {
    program: &'static str,
    soc: &'static str,
    /// First phases that the simulator accepted, and how many differ.
    calls: usize,
    distinct: usize,
    /// Of the distinct ones, those that the vendor accepts.
    accepted: usize,
    refused: Vec<Refusal>,
    /// Kernels of the distinct calls by where they run.
    kernels: BTreeMap<String, usize>,
    /// Operators with types whose kernels run on the AI CPU, with the distinct calls.
    ai_cpu: BTreeMap<String, usize>,
    /// Distinct calls of which the tables of `rope-ascend` say another processor.
    misplaced: Vec<String>,
    /// Operations that the program says it ran on the host, if it does.
    on_host: Option<usize>,
    /// Operators outside of the table, whose first phases are generated or not modelled, with
    /// calls.
    uncovered: BTreeMap<String, usize>,
    is_step: bool,
}

/// A call that only the simulator accepts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Refusal {
    pub(super) code: i32,
    pub(super) place: String,
    pub(super) message: String,
    pub(super) call: String,
}

/// Recorded calls.
#[derive(Default)]
pub(super) struct Recording {
    /// Calls that the simulator accepted.
    accepted: usize,
    /// Each once.
    distinct: Vec<Call>,
    /// Those that it refused too, each once.
    pub(super) all: Vec<Call>,
    uncovered: BTreeMap<String, usize>,
    /// What the program wrote to its standard output.
    output: String,
}

impl Recording {
    /// Reads what the simulator recorded: a code and a call in each line.
    fn parse(text: &str) -> Result<Self> {
        let mut recording = Self::default();
        let mut seen = BTreeSet::new();
        for line in text.lines() {
            let (code, call) = line.split_once(' ').unwrap_or_default();
            let is_accepted = code == "0";
            match Call::parse(call) {
                Ok(parsed) => {
                    recording.accepted += usize::from(is_accepted);
                    if seen.insert(call) {
                        recording
                            .distinct
                            .extend(is_accepted.then(|| parsed.clone()));
                        recording.all.push(parsed);
                    }
                }
                Err(ParseError::Operator(name)) => {
                    *recording.uncovered.entry(name).or_default() += 1;
                }
                Err(error) => return Err(VendorError::Failed(format!("recorded: {error}"))),
            }
        }
        Ok(recording)
    }
}

/// Runs a command with the simulator recording; unless it has to succeed, it may fail.
pub(super) fn recorded(command: &mut Command, file: &Path, succeeds: bool) -> Result<Recording> {
    if file.exists() {
        fs::remove_file(file).map_err(cannot_access(file))?;
    }
    let output = command
        .env("ASCEND_SIM_OPERATORS", file)
        .env("RUST_BACKTRACE", "0")
        .output();
    let output = output.map_err(cannot_access(Path::new(command.get_program())))?;
    if succeeds && !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        return Err(VendorError::Failed(format!(
            "{command:?} failed:\n{errors}"
        )));
    }
    let text = fs::read_to_string(file).map_err(cannot_access(file))?;
    Ok(Recording {
        output: String::from_utf8_lossy(&output.stdout).into_owned(),
        ..Recording::parse(&text)?
    })
}

/// The calls of `recording` that the vendor's code refuses.
pub(super) fn refusals(calls: &[Call], answers: &[Answer]) -> Vec<Refusal> {
    let refused = calls
        .iter()
        .zip(answers)
        .filter(|(_, answer)| answer.vendor.code != 0);
    let refusal = |(call, answer): (&Call, &Answer)| Refusal {
        code: answer.vendor.code,
        place: place(&answer.vendor.message).to_owned(),
        message: reason(&answer.vendor.message).to_owned(),
        call: call.to_string(),
    };
    refused.map(refusal).collect()
}

/// The features of continuous integration, with which the tests are compiled once and the program
/// has the simulated NPU.
pub(super) fn features(root: &Path) -> Result<String> {
    let file = root.join(".ci/run");
    let text = fs::read_to_string(&file).map_err(cannot_access(&file))?;
    let features = text.lines().find_map(|line| line.strip_prefix("features="));
    let missing = || VendorError::Failed(format!("{} has no line features=", file.display()));
    features.map(str::to_owned).ok_or_else(missing)
}

/// Records every program and asks about its calls.
pub(super) fn replay(builder: &Builder, library: &Library, socs: &[Soc]) -> Result<Vec<ReplayRow>> {
    eprintln!("building mrope");
    let mut build = crate::cargo::cargo();
    let features = features(&builder.root)?;
    build.args(["test", "--features", &features, "--quiet", "--workspace"]);
    build.args(["--test", "suite", "--no-run"]);
    let status = build.current_dir(&builder.root).status();
    if !status.map_err(cannot_access(Path::new("cargo")))?.success() {
        return Err(VendorError::Failed("mrope does not build".to_owned()));
    }
    let mut rows = Vec::new();
    for program in &PROGRAMS {
        eprintln!("recording {}", program.name);
        let out = builder.work.join("out");
        if out.exists() {
            fs::remove_dir_all(&out).map_err(cannot_access(&out))?;
        }
        let mut command = match program.arguments {
            ["test", ..] => crate::cargo::cargo(),
            _ => Command::new(builder.root.join("target/debug/mrope")),
        };
        command.current_dir(&builder.root);
        for argument in program.arguments {
            match *argument {
                OUT => command.arg(&out),
                "test" => command.args(["test", "--features", &features]),
                argument => command.arg(argument),
            };
        }
        let recording = recorded(&mut command, &builder.work.join("recorded"), true)?;
        if recording.all.is_empty() && recording.uncovered.is_empty() {
            return Err(VendorError::Failed(format!(
                "{} recorded no call",
                program.name
            )));
        }
        for soc in socs {
            let answers = ask(&library.path, *soc, &recording.distinct, &builder.work)?;
            rows.push(row(program, *soc, &recording, &answers));
        }
    }
    Ok(rows)
}

/// How many operations ran on the host, if `output` is the report of `mrope train --json`.
fn operations_on_host(output: &str) -> Option<usize> {
    let report: serde_json::Value = serde_json::from_str(output).ok()?;
    let fallbacks = report["usage"]["fallbacks"].as_array()?;
    let on_host = fallbacks.iter().filter(|each| each["processor"] == "host");
    Some(on_host.count())
}

fn row(program: &Program, soc: Soc, recording: &Recording, answers: &[Answer]) -> ReplayRow {
    let refused = refusals(&recording.distinct, answers);
    let mut kernels: BTreeMap<String, usize> = BTreeMap::new();
    let mut ai_cpu: BTreeMap<String, usize> = BTreeMap::new();
    let mut misplaced = Vec::new();
    for (call, answer) in recording.distinct.iter().zip(answers) {
        if answer.vendor.code == 0 && engines::is_misplaced(call, answer) {
            misplaced.push(call.to_string());
        }
        let engines = answer
            .kernels
            .iter()
            .filter_map(|kernel| kernel.split_once(':'));
        for (_, engine) in engines.clone() {
            *kernels.entry(engine.to_owned()).or_default() += 1;
        }
        let slow: BTreeSet<&str> = engines
            .filter(|(_, engine)| *engine == "AI CPU")
            .map(|(kernel, _)| kernel)
            .collect();
        if !slow.is_empty() {
            let tensors = call
                .arguments
                .iter()
                .flat_map(|argument| argument.tensors());
            let types: Vec<String> = tensors.map(|tensor| type_name(tensor.dtype)).collect();
            let slow: Vec<&str> = slow.into_iter().collect();
            let function = call.operator.function;
            let name = format!("{function} of {}: {}", types.join(", "), slow.join(", "));
            *ai_cpu.entry(name).or_default() += 1;
        }
    }
    ReplayRow {
        program: program.name,
        soc: soc.name(),
        calls: recording.accepted,
        distinct: recording.distinct.len(),
        accepted: recording.distinct.len() - refused.len(),
        refused,
        kernels,
        ai_cpu,
        misplaced,
        on_host: operations_on_host(&recording.output),
        uncovered: recording.uncovered.clone(),
        is_step: program.is_step,
    }
}

impl ReplayRow {
    fn on(&self, engine: &str) -> usize {
        self.kernels.get(engine).copied().unwrap_or(0)
    }

    /// What is not as it should be.
    pub(super) fn failures(&self) -> Vec<String> {
        let refused = self.refused.first().map(|first| {
            let refused = self.refused.len();
            format!(
                "{} on {}: the vendor refuses {refused} calls, such as {} ({} {} {})",
                self.program, self.soc, first.call, first.code, first.place, first.message
            )
        });
        let slow = (self.is_step && !self.ai_cpu.is_empty()).then(|| {
            format!(
                "{} on {}: kernels run on the AI CPU",
                self.program, self.soc
            )
        });
        let misplaced = self.misplaced.first().map(|first| {
            let misplaced = self.misplaced.len();
            format!(
                "{} on {}: the tables of rope-ascend say another processor for {misplaced} calls, \
                 such as {first}",
                self.program, self.soc
            )
        });
        let moved = self.on_host.filter(|operations| *operations > 0);
        let moved = moved
            .map(|operations| format!("{}: {operations} operations run on the host", self.program));
        refused
            .into_iter()
            .chain(slow)
            .chain(misplaced)
            .chain(moved)
            .collect()
    }
}

pub(super) fn tables(rows: &[ReplayRow]) -> String {
    let mut text =
        "\n| calls of | device | first phases | distinct | accepted | AI Core kernels | \
                    AI CPU | calls with one |\n|---|---|---|---|---|---|---|---|\n"
            .to_owned();
    for row in rows {
        text += &format!(
            "| {} | {} | {} | {} | {} | {} | {} | {} |\n",
            row.program,
            row.soc,
            row.calls,
            row.distinct,
            row.accepted,
            row.on("AI Core"),
            row.on("AI CPU"),
            row.ai_cpu.values().sum::<usize>()
        );
    }
    for row in rows {
        for call in &row.misplaced {
            text += &format!(
                "on another processor, {} on {}: {call}\n",
                row.program, row.soc
            );
        }
        for refusal in &row.refused {
            text += &format!(
                "refused, {} on {}: {} {} {}\n  {}\n",
                row.program, row.soc, refusal.code, refusal.place, refusal.message, refusal.call
            );
        }
    }
    let mut slow: BTreeMap<&String, usize> = BTreeMap::new();
    let mut uncovered: BTreeMap<&String, usize> = BTreeMap::new();
    for row in rows {
        row.ai_cpu
            .iter()
            .for_each(|(name, calls)| *slow.entry(name).or_default() += calls);
        row.uncovered
            .iter()
            .for_each(|(name, calls)| *uncovered.entry(name).or_default() += calls);
    }
    if !slow.is_empty() {
        text += "\n| on the AI CPU | distinct calls |\n|---|---|\n";
    }
    slow.iter()
        .for_each(|(name, calls)| text += &format!("| {name} | {calls} |\n"));
    if !uncovered.is_empty() {
        text += "\n| without a first phase here | calls |\n|---|---|\n";
    }
    uncovered
        .iter()
        .for_each(|(name, calls)| text += &format!("| {name} | {calls} |\n"));
    text
}

#[cfg(test)]
mod tests {
    use super::super::ask::Verdict;
    use super::*;

    #[test]
    fn recordings_are_read_and_judged() {
        let text = "0 aclnnNeg f64[2] f64[2]\n161002 aclnnNeg f32[2] f32[3]\n\
                    0 aclnnNeg f64[2] f64[2]\n0 aclnnRmsNorm f32[2] f32[2] 1 f32[2] f32[2]\n\
                    0 aclnnNeg u8[2] u8[2]\n";
        let mut recording = Recording::parse(text).expect("valid");
        assert_eq!((recording.accepted, recording.distinct.len()), (3, 2));
        assert_eq!(recording.uncovered["aclnnRmsNorm"], 1);
        let usage = r#"{"usage": {"fallbacks": [{"processor": "host"}, {"processor": "AI CPU"}]}}"#;
        recording.output = usage.to_owned();
        let message = "[aclnn_neg.cpp:70][NNOP][Check][98] errno[161002] No DT_UINT8.".to_owned();
        let mut answers = [
            Answer {
                kernels: vec!["Neg:AI CPU".to_owned(), "Cast:AI Core".to_owned()],
                ..Answer::default()
            },
            Answer {
                vendor: Verdict {
                    code: 161002,
                    message,
                },
                ..Answer::default()
            },
        ];
        let judged = |answers: &[Answer]| row(&PROGRAMS[2], Soc::A2, &recording, answers);
        let row = judged(&answers);
        assert_eq!(
            (row.accepted, row.on("AI Core"), row.on("AI CPU")),
            (1, 1, 1)
        );
        assert_eq!(row.ai_cpu["aclnnNeg of f64, f64: Neg"], 1);
        assert_eq!((row.misplaced.len(), row.on_host), (0, Some(1)));
        let failures = row.failures();
        assert_eq!(failures.len(), 3, "{failures:?}");
        assert!(
            failures[0].contains("aclnn_neg.cpp:70 No DT_UINT8."),
            "{failures:?}"
        );
        answers[0].kernels.remove(0);
        assert_eq!(judged(&answers).misplaced, ["aclnnNeg f64[2] f64[2]"]);
        assert!(Recording::parse("0 aclnnNeg f32[2]").is_err());
    }
}

//! `mrope accept`: a report of each device, whatever fails on it.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::path::Path;
use std::process::ExitStatus;

use ascend_sim::control;
use burn::tensor::DType;
use rope_check::operators::check_operations;
use serde_json::Value;

use crate::common::{host, npus};
use crate::program::{command, mrope, text};

/// A fault of the simulated device, and its row in the report.
struct Fault {
    variables: &'static [(&'static str, &'static str)],
    /// A part in which it shows, the verdict of a row there, and words of that row.
    row: [&'static str; 3],
    /// Parts that pass all the same.
    unharmed: &'static [&'static str],
}

const LACKS: &str = "ASCEND_SIM_LACKS";
const FAULTS: &str = "ASCEND_SIM_FAULTS";
const ABORT: &str = "ASCEND_SIM_ABORT";
const IGNORE: &str = "ASCEND_SIM_IGNORE";

const INSTALLATION: &str = "installation";
const GOLDEN: &str = "golden vectors";
const GRADIENTS: &str = "gradients";
const OPERATIONS: &str = "operations";
const WHOLE: &str = "training, f32";
const ADAPTERS: &str = "training, bf16";
const SEVERAL: &str = "several devices";
/// Parts without the vendor's operators.
const ROTATIONS: &[&str] = &[INSTALLATION, GOLDEN, GRADIENTS];
/// All but the operations.
const ELSEWHERE: &[&str] = &[
    INSTALLATION,
    GOLDEN,
    GRADIENTS,
    WHOLE,
    ADAPTERS,
    SEVERAL,
    "memory",
];
/// All but those of several devices.
const ALONE: &[&str] = &[INSTALLATION, GOLDEN, GRADIENTS, OPERATIONS, WHOLE, ADAPTERS];

const fn fault(
    variables: &'static [(&'static str, &'static str)],
    row: [&'static str; 3],
    unharmed: &'static [&'static str],
) -> Fault {
    Fault {
        variables,
        row,
        unharmed,
    }
}

const SEEDED: &[Fault] = &[
    // Functions and operators that an installation lacks.
    fault(
        &[(LACKS, "aclnnErf")],
        [OPERATIONS, "fail", "aclnnErf"],
        ELSEWHERE,
    ),
    fault(&[(LACKS, "aclnnMm")], [WHOLE, "fail", "aclnnMm"], ROTATIONS),
    fault(
        &[(LACKS, "aclnnProdDim")],
        [OPERATIONS, "fail", "aclnnProdDim"],
        ELSEWHERE,
    ),
    fault(&[(LACKS, "aclInit")], [GOLDEN, "fail", "aclInit"], &[]),
    fault(
        &[(
            LACKS,
            "aclrtLaunchKernelWithHostArgs,aclrtLaunchKernelWithArgsArray",
        )],
        [INSTALLATION, "fail", "missing"],
        &[GOLDEN, WHOLE],
    ),
    fault(
        &[(LACKS, "HcclAllReduce")],
        [SEVERAL, "fail", "HcclAllReduce"],
        ALONE,
    ),
    // One element is wrong.
    fault(
        &[(FAULTS, "wrong:aclnnErf:1")],
        [OPERATIONS, "fail", "error"],
        ELSEWHERE,
    ),
    fault(
        &[(FAULTS, "wrong:aclnnMm:1")],
        [OPERATIONS, "fail", "error"],
        ROTATIONS,
    ),
    fault(
        &[(FAULTS, "wrong:aclnnCat:1")],
        [OPERATIONS, "fail", "error"],
        ROTATIONS,
    ),
    fault(
        &[(FAULTS, "wrong:aclnnEqTensor:1")],
        [OPERATIONS, "fail", "error"],
        ROTATIONS,
    ),
    fault(
        &[(FAULTS, "wrong:aclnnMaxDim:1")],
        [OPERATIONS, "fail", ""],
        ROTATIONS,
    ),
    // A call has no effect.
    fault(
        &[(IGNORE, "aclrtLaunchKernelWithArgsArray")],
        [GOLDEN, "fail", ""],
        &[OPERATIONS],
    ),
    fault(
        &[(IGNORE, "HcclAllReduce")],
        [SEVERAL, "fail", "largest difference"],
        ALONE,
    ),
    fault(
        &[(IGNORE, "aclrtMemcpyAsync")],
        [OPERATIONS, "fail", ""],
        &[],
    ),
    // Slow, hanging, crashing.
    fault(
        &[(FAULTS, "slow:aclnnErf:0:3000")],
        [OPERATIONS, "slow", " s"],
        ELSEWHERE,
    ),
    fault(
        &[(FAULTS, "hang:aclnnErf:1")],
        [OPERATIONS, "hang", "60 s"],
        ELSEWHERE,
    ),
    fault(
        &[(FAULTS, "hang:HcclAllReduce:2")],
        [SEVERAL, "hang", "120 s"],
        ALONE,
    ),
    fault(
        &[(ABORT, "aclnnErf:1")],
        [OPERATIONS, "crash", "signal"],
        ELSEWHERE,
    ),
    fault(
        &[(ABORT, "HcclAllReduce:3")],
        [SEVERAL, "crash", "signal"],
        ALONE,
    ),
    fault(&[(ABORT, "aclInit:1")], [GOLDEN, "crash", "signal"], &[]),
    // Errors of the device.
    fault(
        &[(FAULTS, "run:aclnnErf:1:507015")],
        [OPERATIONS, "fail", "507015"],
        ELSEWHERE,
    ),
    fault(
        &[(FAULTS, "call:aclrtSynchronizeStream:3:507899")],
        [WHOLE, "fail", "507899"],
        &[],
    ),
    fault(
        &[(FAULTS, "call:aclrtSetDevice:1:507033")],
        [GOLDEN, "fail", "507033"],
        &[],
    ),
    fault(
        &[(FAULTS, "memory:1000000")],
        [WHOLE, "fail", "out of memory"],
        ROTATIONS,
    ),
    // The second device is in use: its communicator cannot be made.
    fault(
        &[(FAULTS, "call:HcclCommInitRootInfoConfig:0:19")],
        [SEVERAL, "fail", "HcclCommInitRootInfoConfig"],
        ALONE,
    ),
];

/// The exit status, the verdict and the report.
fn accepted(out: &str, device: &str, variables: &[(&str, &str)]) -> (ExitStatus, String, Value) {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("accept")
        .join(out);
    let mut command = command(&["accept", "--device", device, "--out"]);
    let ran = command.arg(&out).envs(variables.iter().copied());
    let output = ran.output().expect("the program starts");
    let printed = text(&output.stdout);
    let verdict = printed.lines().last().unwrap_or_default().to_owned();
    let report = std::fs::read_to_string(out.join("report.json")).expect("a report");
    let report = serde_json::from_str(&report).expect("an object");
    (output.status, verdict, report)
}

fn part<'a>(report: &'a Value, name: &str) -> &'a Value {
    let parts = report["parts"].as_array().expect("parts");
    let found = parts.iter().find(|part| part["name"] == name);
    found.unwrap_or_else(|| panic!("{name} was not run"))
}

/// The complaint about a report that does not show a fault.
fn hidden(fault: &Fault, report: &Value) -> Option<String> {
    let [name, verdict, words] = fault.row;
    let rows = part(report, name)["rows"].as_array().expect("rows");
    let shows = |row: &&Value| {
        let said = format!("{} {}", row["name"], row["detail"]);
        row["verdict"] == verdict && said.contains(words)
    };
    if !rows.iter().any(|row| shows(&row)) {
        return Some(format!(
            "{:?}: no such row in {name}: {rows:?}",
            fault.variables
        ));
    }
    let harmed = fault.unharmed.iter().find(|name| {
        let verdict = &part(report, name)["verdict"];
        verdict != "pass" && verdict != "found"
    });
    if let Some(name) = harmed {
        let rows = &part(report, name)["rows"];
        return Some(format!("{:?}: {name} failed, too: {rows}", fault.variables));
    }
    // Everything has run.
    let count = report["parts"].as_array().map_or(0, Vec::len);
    (count != 10).then(|| format!("{:?}: {count} of 10 parts", fault.variables))
}

#[test]
fn a_crash_is_a_row_of_the_report_and_everything_else_passes() {
    let crash = fault(
        &[(ABORT, "aclnnErf:1")],
        [OPERATIONS, "crash", "signal"],
        ELSEWHERE,
    );
    let (status, verdict, report) = accepted("crash", "ascend-sim", crash.variables);
    assert_eq!(status.code(), Some(1), "{report:#}");
    assert_eq!(verdict, "not accepted: 1 of 10 parts failed: operations");
    assert_eq!(report["verdict"], verdict);
    assert_eq!(hidden(&crash, &report), None);
    let json = report.to_string();
    assert!(!json.contains(env!("CARGO_MANIFEST_DIR")), "{json}");
}

#[test]
fn what_cannot_be_accepted_is_refused_in_a_line() {
    for (option, value, words) in [
        ("--device", "remote:ws://127.0.0.1:9", "on the server"),
        ("--device", "npu", "expected cpu, gpu"),
        ("--minutes", "0", "1"),
    ] {
        let output = mrope(&["accept", option, value]);
        assert!(!output.status.success(), "{value}");
        assert!(text(&output.stderr).contains(words), "{value}");
    }
}

/// Operators that no row needs, and the reason.
const UNUSED: [(&str, &str); 0] = [];

/// The operators of docs/tables/ascend-operations.md, which the tests of burn-ascend write.
#[test]
fn every_operator_of_the_backend_runs() {
    let table = include_str!("../../../docs/tables/ascend-operations.md");
    let named: BTreeSet<&str> = table
        .split('`')
        .filter(|word| word.starts_with("aclnn") && !word.ends_with(".md"))
        .collect();
    assert!(named.len() > 80, "{named:?}");
    let (_held, [npu, _]) = npus();
    let (_host, device) = host(npu);
    control::clear_operator_runs();
    let dtypes = [DType::F32, DType::BF16, DType::F16];
    let begin = |_, _| Ok(());
    let checked: Result<(), Infallible> = check_operations(&device, &dtypes, 0, begin, |row| {
        assert!(row.pass, "{row:?}");
        Ok(())
    });
    let Ok(()) = checked;
    let runs = control::operator_runs();
    let missing: Vec<&str> = named
        .into_iter()
        .filter(|name| !runs.contains_key(name))
        .filter(|name| UNUSED.iter().all(|(unused, _)| unused != name))
        .collect();
    assert!(
        missing.is_empty(),
        "no operation runs {missing:?}, of {runs:?}"
    );
}

#[test]
#[ignore = "a quarter of an hour: a part of `cargo xtask deep accept`"]
fn each_fault_of_a_device_is_its_row_and_everything_else_runs() {
    assert_eq!(SEEDED.len(), 25);
    let mut complaints = Vec::new();
    for (index, fault) in SEEDED.iter().enumerate() {
        let (status, verdict, report) =
            accepted(&format!("fault-{index}"), "ascend-sim", fault.variables);
        println!("{:?}: {verdict}", fault.variables);
        if status.code() != Some(1) {
            complaints.push(format!("{:?}: {status}, {verdict}", fault.variables));
        }
        complaints.extend(hidden(fault, &report));
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
#[ignore = "three minutes: a part of `cargo xtask deep accept`"]
fn every_kind_of_device_is_accepted() {
    let older = [("ASCEND_SIM_MACHINE", "ascend_950")];
    let devices = [
        ("cpu", &[][..]),
        ("ascend-sim", &[]),
        ("ascend-sim", &older),
        ("gpu", &[]),
    ];
    for (device, variables) in devices {
        if device == "gpu" && !cfg!(feature = "wgpu") {
            continue;
        }
        let (status, verdict, report) = accepted("kinds", device, variables);
        assert!(status.success(), "{device}: {verdict}\n{report:#}");
    }
}

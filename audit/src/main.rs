//! The kernels and operators held to the vendors' own code: `cargo xaudit gpu-kernels`,
//! `vendor-headers`, `vendor-rules`, `time` and `vendor-operators`.

#[path = "../../crates/xtask/src/cargo.rs"]
mod cargo;
mod checkout;
mod file;
mod gpu_kernels;
#[path = "../../crates/xtask/src/outcome.rs"]
mod outcome;
mod report;
mod time;
mod vendor_headers;
mod vendor_operators;
#[path = "../../crates/xtask/src/wheels.rs"]
mod wheels;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use vendor_headers::Options;

const USAGE: &str = "usage: cargo xaudit gpu-kernels
       cargo xaudit vendor-headers [--arch 2201|3510] [--compile | --quick] [--json] FOLDER
       cargo xaudit vendor-rules [--quick] [--json] FOLDER
       cargo xaudit time [--json] FOLDER
       cargo xaudit vendor-operators [--soc 910B|910_93] [--operator aclnnNAME] [--quick] [--json]
           FOLDER

From the repository's root.

gpu-kernels   compiles the kernels for GPUs as CUDA C++ with NVIDIA's compilers, which need no GPU and
      come from PyPI, for compute capability 8.0, 9.0 and 12.0, and prints what their machine code
      says. Spilled registers, local memory, narrow accesses and 64-bit divisions are errors. On
      x86-64 Linux; 25 minutes with building, 5 without.
vendor-headers   holds the kernels to the vendor's Ascend C headers in FOLDER, a checkout of asc-devkit
      or an installed CANN, with clang 15 or later on x86-64 Linux: compiles them, runs the suites
      of Ascend through them, compares all memory with the simulator's run, counts the instructions
      of a tile, and seeds faults that it has to notice. Ten minutes. --arch takes one architecture,
      --compile stops after compiling, --quick leaves out the suite that needs burn.
vendor-rules   holds each call of the kernels to the vendor's own checks, with the same compiler, on
      dav-2201. FOLDER holds checkouts of asc-devkit and asc-tools. Makes calls that break a rule,
      which have to be found, then runs the suites. A quarter of an hour. --quick as above.
time   prints how long the kernels would take on Atlas A2 by msKPP's figures and by the cycle model
      of FOLDER, a checkout of github.com/PTO-ISA/pto-isa, which the C++ compiler compiles. A
      rotation above 1.10 of its memory's time that no instruction explains is an error, as is a
      slow kernel that is not reported. Two minutes.
vendor-operators   holds the operators to the vendor's own first phases: argument checks, promotion
      and choice of kernels. FOLDER holds checkouts of opbase, metadef, runtime, ops-math, ops-nn
      and ops-transformer (github.com/hicann), which g++ compiles for the host into the target
      folder. Asks that code and the simulator about calls made from the operator table, about 2000
      an operator, and about the calls that the suites make, as they are and with faults seeded into
      burn-ascend. Differences without an explanation are errors. Half an hour with building. --soc
      takes one device, --operator sweeps one operator, --quick leaves out what needs burn.";

/// The root of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let text = |error: &dyn std::error::Error| error.to_string();
    let outcome = match words.as_slice() {
        ["gpu-kernels"] => gpu_kernels::run().map_err(|error| text(&error)),
        ["vendor-headers", words @ ..] if let Some(options) = Options::parse(words) => {
            vendor_headers::run(&options).map_err(|error| text(&error))
        }
        [vendor_headers::LAUNCH, words @ ..] => {
            vendor_headers::launch(words).map_err(|error| error.to_string())
        }
        ["time", words @ ..] if let Some(options) = time::Options::parse(words) => {
            time::run(&options).map_err(|error| text(&error))
        }
        [time::LAUNCH, words @ ..] => time::launch(words).map_err(|error| error.to_string()),
        ["vendor-rules", words @ ..] if let Some(options) = Options::parse_rules(words) => {
            vendor_headers::run_rules(&options).map_err(|error| text(&error))
        }
        [vendor_headers::PROBE, words @ ..] => {
            vendor_headers::probe(words).map_err(|error| error.to_string())
        }
        ["vendor-operators", words @ ..]
            if let Some(options) = vendor_operators::Options::parse(words) =>
        {
            vendor_operators::run(&options).map_err(|error| text(&error))
        }
        [vendor_operators::ASK, words @ ..] => {
            vendor_operators::answer(words).map_err(|error| text(&error))
        }
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    outcome::print(outcome)
}

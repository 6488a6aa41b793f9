//! Checks and measurements of the workspace: `cargo xtask abi`, `api`, `benchmarks`, `claims`,
//! `fuzz`, `gpu-kernels`, `package`, `sanitize`, `vendor-headers` and `vendor-operators`.

mod abi;
mod api;
mod benchmarks;
mod checkout;
mod claims;
mod fuzz;
mod gpu_kernels;
mod package;
mod sanitize;
mod vendor_headers;
mod vendor_operators;
mod wheels;

use std::process::{Command, ExitCode};

use benchmarks::Measure;
use vendor_headers::Options;

const USAGE: &str = "usage: cargo xtask abi [--headers FOLDER]
       cargo xtask api [--write]
       cargo xtask benchmarks [--full | --page] [NAME ...]
       cargo xtask claims
       cargo xtask fuzz [--seconds COUNT | --runs COUNT] [TARGET ...]
       cargo xtask gpu-kernels
       cargo xtask package
       cargo xtask sanitize
       cargo xtask vendor-headers [--arch 2201|3510] [--compile | --quick] [--json] FOLDER
       cargo xtask vendor-operators [--soc 910B|910_93] [--operator aclnnNAME] [--quick] [--json]
           FOLDER

abi   checks the declarations of rope-ascend and of the simulator against the vendor's headers.
      FOLDER holds `acl/acl.h`; without it the headers are taken from the PyPI wheel
      torch-npu 2.14.0, downloaded with pip into the target folder.
api   compares the public items of the published crates, as `cargo doc` shows them, with docs/api,
      and names what was added and removed; --write writes them there.
benchmarks   measures everything, for half an hour after building, and writes docs/benchmarks.md and
      docs/benchmarks/tables.md from the results. --full measures every combination, --page nothing.
      NAMEs choose among memory, memory_npu, speed, step and peers. Nothing else should run
      meanwhile.
claims   runs the commands of docs/claims.md that count, and checks that their output says what the
      page states. It shares what `cargo test --workspace` has built.
fuzz   runs the targets of fuzz/ on their kept inputs, then each on new ones for a number of seconds
      or inputs, 5 seconds by default; two minutes with building. What it finds is in target/fuzz.
gpu-kernels   compiles the kernels for GPUs as CUDA C++ with NVIDIA's compilers, which need no GPU and
      come from PyPI, for compute capability 8.0, 9.0 and 12.0, and prints what their machine code
      says. Spilled registers, local memory, narrow accesses and 64-bit divisions are errors. On
      x86-64 Linux; 25 minutes with building, 5 without.
package   checks the published crates' manifests and packages them without the network; then a crate
      outside the workspace that depends on the packages runs the examples of their READMEs. A
      minute after `cargo test --workspace`, whose external crates it shares.
sanitize   runs the tests of unsafe code under the address, leak and undefined-behaviour sanitizers,
      in target/sanitize; ten minutes with building.
vendor-headers   holds the kernels to the vendor's Ascend C headers in FOLDER, a checkout of asc-devkit
      or an installed CANN, with clang 15 or later on x86-64 Linux: compiles them, runs the suites
      of Ascend through them, compares all memory with the simulator's run, counts the instructions
      of a tile, and seeds faults that it has to notice. Ten minutes. --arch takes one architecture,
      --compile stops after compiling, --quick leaves out the suite that needs burn.
vendor-operators   holds the operators to the vendor's own first phases: argument checks, promotion
      and choice of kernels. FOLDER holds checkouts of opbase, metadef, runtime, ops-math, ops-nn
      and ops-transformer (github.com/hicann), which g++ compiles for the host into the target
      folder. Asks that code and the simulator about calls made from the operator table, about 2000
      an operator, and about the calls that the suites make, as they are and with faults seeded into
      burn-ascend. Differences without an explanation are errors. Half an hour with building. --soc
      takes one device, --operator sweeps one operator, --quick leaves out what needs burn.";

/// cargo with the environment that a user starts it with. The variables that cargo sets for this
/// package would make it build other packages again, for minutes.
fn cargo() -> Command {
    let mut command = Command::new(env!("CARGO"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let text = |error: &dyn std::error::Error| error.to_string();
    let abi = |headers| abi::run(headers).map_err(|error| text(&error));
    let benchmarks = |measure, names| benchmarks::run(measure, names).map_err(|error| text(&error));
    let outcome = match words.as_slice() {
        ["abi"] => abi(None),
        ["abi", "--headers", folder] => abi(Some(folder.as_ref())),
        ["benchmarks", "--page"] => benchmarks(Measure::Nothing, &[]),
        ["benchmarks", "--full", names @ ..] => benchmarks(Measure::Full, names),
        ["benchmarks", names @ ..] => benchmarks(Measure::Default, names),
        ["vendor-headers", words @ ..] if let Some(options) = Options::parse(words) => {
            vendor_headers::run(&options).map_err(|error| text(&error))
        }
        [vendor_headers::LAUNCH, words @ ..] => {
            vendor_headers::launch(words).map_err(|error| error.to_string())
        }
        ["vendor-operators", words @ ..]
            if let Some(options) = vendor_operators::Options::parse(words) =>
        {
            vendor_operators::run(&options).map_err(|error| text(&error))
        }
        [vendor_operators::ASK, words @ ..] => {
            vendor_operators::answer(words).map_err(|error| text(&error))
        }
        ["claims"] => claims::run().map_err(|error| text(&error)),
        ["api"] => api::run(false).map_err(|error| text(&error)),
        ["api", "--write"] => api::run(true).map_err(|error| text(&error)),
        ["gpu-kernels"] => gpu_kernels::run().map_err(|error| text(&error)),
        ["package"] => package::run().map_err(|error| text(&error)),
        ["fuzz", words @ ..] if let Some((limit, targets)) = fuzz::parse(words) => {
            fuzz::run(limit, targets).map_err(|error| text(&error))
        }
        ["sanitize"] => sanitize::run().map_err(|error| text(&error)),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(summary) => {
            println!("{summary}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

//! Checks of the workspace, and archives for a release: `cargo xtask abi`, `api`, `claims`, `deep`,
//! `dist`, `fuzz`, `gpu-kit`, `package` and `sanitize`.

mod abi;
mod api;
mod cargo;
mod outcome;
mod package;
mod wheels;

use std::path::Path;
use std::process::{Command, ExitCode};

use api::Run;

const USAGE: &str = "usage: cargo xtask abi [--headers FOLDER]
       cargo xtask api [--rendered | --write]
       cargo xtask claims
       cargo xtask deep [--list] [--resume] [--vendor FOLDER] [STEP ...]
       cargo xtask dist [TARGET ...]
       cargo xtask fuzz [--seconds COUNT | --runs COUNT] [TARGET ...]
       cargo xtask gpu-kit
       cargo xtask package
       cargo xtask sanitize

abi   checks the declarations of rope-ascend and of the simulator against the vendor's headers.
      FOLDER holds `acl/acl.h`; without it the headers are taken from the PyPI wheel
      torch-npu 2.14.0, downloaded with pip into the target folder.
api   compares the public items of the published crates, as `cargo doc` shows them, with docs/api,
      and names what was added and removed; --write writes them there, --rendered takes the pages
      below the target folder as they are.
claims   runs the commands of docs/dev/evidence.md that count, and checks that their output says
      what the page states. It shares what `cargo test --workspace` has built.
deep   runs the checks that continuous integration leaves out, STEPs or all of them, and writes the
      outcome of each to docs/tables/deep.md as soon as it is known. A step that fails stops no other.
      --list prints the steps with their commands and runs none, --resume leaves out those that have
      passed with the present files, all of them committed. --vendor names a folder of checkouts of
      the vendor's repositories; without it the steps that read them are left out. Hours.
dist   builds static programs and wheels for Linux, by default for x86_64 and aarch64, tries them
      (under qemu where it must, wheels in a Python that apt-get downloads into the target folder),
      and writes archives, wheels and checksums to target/dist.
fuzz   runs the targets of fuzz/ on their kept inputs, then each on new ones for a number of seconds
      or inputs, 5 seconds by default; two minutes with building. What it finds is in target/fuzz.
gpu-kit   builds the program and the GPU suites for CUDA and Vulkan, and packs them with a script that
      runs them on a machine without Rust: target/gpu-kit/mrope-gpu-kit.tar.xz. An hour on two cores.
package   checks the published crates' manifests and packages them without the network; then a crate
      outside the workspace that depends on the packages runs the examples of their READMEs. A
      minute after `cargo test --workspace`, whose external crates it shares.
sanitize   runs the tests of unsafe code under the address, leak and undefined-behaviour sanitizers,
      in target/sanitize; ten minutes with building.";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let text = |error: &dyn std::error::Error| error.to_string();
    let abi = |headers| abi::run(headers).map_err(|error| text(&error));
    let outcome = match words.as_slice() {
        ["abi"] => abi(None),
        ["abi", "--headers", folder] => abi(Some(folder.as_ref())),
        ["api"] => api::run(Run::Compare).map_err(|error| text(&error)),
        ["api", "--rendered"] => api::run(Run::CompareRendered).map_err(|error| text(&error)),
        ["api", "--write"] => api::run(Run::Write).map_err(|error| text(&error)),
        ["package"] => script("python3", "package.py", &[]),
        [
            name @ ("claims" | "deep" | "dist" | "fuzz" | "gpu-kit" | "sanitize"),
            words @ ..,
        ] => script("bash", &format!("{name}.sh"), words),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    outcome::print(outcome)
}

/// Runs a script of `crates/xtask/scripts`, whose messages say what failed.
fn script(program: &str, name: &str, words: &[&str]) -> Result<String, String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("scripts")
        .join(name);
    match Command::new(program).arg(&path).args(words).status() {
        Ok(status) if status.success() => Ok(format!("{name}: done")),
        Ok(status) => Err(format!("{name}: {status}")),
        Err(error) => Err(format!("cannot run {program} {}: {error}", path.display())),
    }
}

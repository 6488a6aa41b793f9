//! `cargo xtask sanitize`: the tests of unsafe code under the address sanitizer, which also finds
//! leaks. The simulator compiles the device kernels with the undefined-behaviour sanitizer.

use std::path::Path;
use std::process::Command;
use std::{env, io};

#[derive(Debug, thiserror::Error)]
pub(crate) enum SanitizeError {
    #[error("cannot run {command}: {source}")]
    Start { command: String, source: io::Error },
    #[error("`rustc -vV` names no host")]
    Host,
    #[error("the sanitizers run on Linux on x86-64 and AArch64, this is {0}")]
    Unsupported(String),
    #[error("{0} failed; its findings are above")]
    Found(String),
}

/// What is compiled: the crates with `unsafe`, without burn, which takes longer to build than all
/// of these. rope-core's kernels take many minutes to compile if they are optimised or have checks
/// in place instead of checks that are calls; the simulator's tests, with either, many minutes to
/// run.
const BUILD: [&str; 9] = [
    "--config=profile.dev.package.rope-core.opt-level=0",
    "-Zprofile-rustflags",
    "--config=profile.dev.package.rope-core.rustflags=\
     ['-Cllvm-args=-asan-instrumentation-with-call-threshold=0']",
    "--package=rope-check",
    "--package=rope-ascend",
    "--package=ascend-sim",
    "--no-default-features",
    "--locked",
    "--target",
];

/// The tests that reach it; rope-core has no unit tests.
const TESTS: [&[&str]; 2] = [&["--package=rope-core", "--test=*"], &["--lib"]];

/// Tests that reach nothing that the others do not: of how values are rounded, of how many bytes
/// kernels move, and of what is found in wrong kernels. They would take a third of the time.
const SKIPPED: [&str; 3] = [
    "every_pattern_is_rounded_once",
    "qwen3_vl_8b",
    "every_fault_in_the_kernels_is_caught",
];

/// Runs them; returns what was done.
pub(crate) fn run() -> Result<String, SanitizeError> {
    let host = host()?;
    if !matches!(
        host.as_str(),
        "x86_64-unknown-linux-gnu" | "aarch64-unknown-linux-gnu"
    ) {
        return Err(SanitizeError::Unsupported(host));
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for tests in TESTS {
        let mut command = crate::cargo::cargo();
        command
            .current_dir(&root)
            // The stable compiler includes the sanitizer's library, but accepts the option only so.
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTFLAGS", "-Zsanitizer=address")
            // An allocation beyond memory fails, as it does without the sanitizer: tests try some.
            .env("ASAN_OPTIONS", "allocator_may_return_null=1")
            .env(
                "CXXFLAGS",
                "-fsanitize=undefined -fno-sanitize-recover=undefined",
            )
            // With --target, cargo builds build scripts and macros without these flags.
            .arg("test")
            .args(BUILD)
            .args([&host, "--target-dir"])
            .arg(root.join("target/sanitize"))
            .args(tests)
            .arg("--")
            .args(SKIPPED.map(|test| format!("--skip={test}")));
        let name = format!("cargo test {}", tests.join(" "));
        match command.status() {
            Ok(status) if status.success() => {}
            Ok(_) => return Err(SanitizeError::Found(name)),
            Err(source) => {
                return Err(SanitizeError::Start {
                    command: name,
                    source,
                });
            }
        }
    }
    Ok("nothing found".to_owned())
}

/// The target triple of this machine.
pub(crate) fn host() -> Result<String, SanitizeError> {
    let rustc = env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let output =
        Command::new(&rustc)
            .arg("-vV")
            .output()
            .map_err(|source| SanitizeError::Start {
                command: rustc,
                source,
            })?;
    let text = String::from_utf8_lossy(&output.stdout);
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).ok_or(SanitizeError::Host)
}

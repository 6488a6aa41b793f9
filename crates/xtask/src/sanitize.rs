//! `cargo xtask sanitize`: the tests of unsafe code under the address sanitizer, which finds leaks too, with device
//! kernels compiled for the simulator under that of undefined behaviour.

use std::path::Path;
use std::process::Command;
use std::{env, io};

#[derive(Debug, thiserror::Error)]
pub(crate) enum SanitizeError {
    #[error("cannot run {command}: {source}")]
    Start { command: String, source: io::Error },
    #[error("`rustc -vV` names no host")]
    Host,
    #[error("sanitizers are there for Linux on x86-64 and AArch64, this is {0}")]
    Unsupported(String),
    #[error("{0} failed; what was found stands above")]
    Found(String),
}

/// cargo's arguments after `test`: whatever holds `unsafe`, with the tests that lead there. burn is left out, as it
/// takes longer to build than all of this.
const TESTS: [&[&str]; 2] = [
    &["-p", "rope-ascend", "-p", "ascend-sim", "--lib", "--tests"],
    &[
        "-p",
        "rope-core",
        "-p",
        "rope-check",
        "--no-default-features",
        "--features",
        "rope-core/rayon",
        "--lib",
        "--tests",
    ],
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
        let mut command = crate::cargo();
        command
            .current_dir(&root)
            // The stable compiler brings the sanitizer's library and lacks only the leave to name it.
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTFLAGS", "-Zsanitizer=address")
            .env(
                "CXXFLAGS",
                "-fsanitize=undefined -fno-sanitize-recover=undefined",
            )
            // Given a target, build scripts and macros are left as they are.
            .args(["test", "--locked", "--target", &host, "--target-dir"])
            .arg(root.join("target/sanitize"))
            .args(tests);
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

fn host() -> Result<String, SanitizeError> {
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

//! The steps: the checks that take long and rarely fail, which continuous integration leaves out.

use std::path::Path;

/// A check of one name.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    /// As a reader would type them in the root of the repository: `NAME=VALUE` sets a variable,
    /// [`VENDOR`] stands for the folder of `--vendor`.
    pub(super) commands: &'static [&'static str],
}

/// The folder that holds checkouts of the vendor's repositories.
const VENDOR: &str = "FOLDER";

pub(super) const STEPS: [Step; 17] = [
    Step {
        name: "readme",
        about: "the README's test command, without a feature",
        commands: &["cargo test --workspace --locked"],
    },
    Step {
        name: "features",
        about: "lints and documentation with other sets of features",
        commands: &[
            "cargo clippy --workspace --all-targets --locked -- -D warnings",
            "RUSTDOCFLAGS=-Dwarnings cargo doc --workspace --no-deps --locked",
            "cargo clippy -p rope-cli --all-targets --locked -- -D warnings",
            "cargo clippy -p rope-burn -p rope-cli -p rope-tests --all-targets --locked \
             --features rope-burn/remote,rope-cli/wgpu,rope-cli/fusion,rope-tests/wgpu,\
             rope-tests/fusion -- -D warnings",
            "cargo check -p rope-core --no-default-features --locked",
            "cargo clippy -p rope-burn -p burn-attention --no-default-features --locked \
             -- -D warnings",
        ],
    },
    Step {
        name: "device",
        about: "devices of the program as a user builds it",
        // rope-tests has no such test. It has features of dependencies that the other tests were
        // compiled with.
        commands: &["cargo test -p rope-cli -p rope-tests --locked --test device"],
    },
    Step {
        name: "gpu",
        about: "the GPU kernels' gradients of the other pairings",
        commands: &[
            // Mesa asks for the variable.
            "XDG_RUNTIME_DIR=/tmp cargo test --workspace --test gpu --locked \
             --features rope-tests/wgpu -- --ignored",
        ],
    },
    Step {
        name: "fusion",
        about: "the GPU kernels through burn's fusion, with gradients of one pairing",
        commands: &[
            "XDG_RUNTIME_DIR=/tmp cargo test --workspace --test gpu --test gpu_memory --locked \
             --features rope-tests/wgpu,rope-tests/fusion",
        ],
    },
    Step {
        name: "wire",
        about: "a million openings of strangers, and 100,000 damaged operations of each kind",
        commands: &[
            "cargo test --workspace --locked --test serve --test wire -- --ignored --nocapture",
        ],
    },
    Step {
        name: "cores",
        about: "the kernels on simulated machines of 2 and 3 vector cores",
        commands: &[
            "ASCEND_SIM_CORES=2 cargo test -p rope-ascend --locked --test differential --test norm",
            "ASCEND_SIM_CORES=3 cargo test -p rope-ascend --locked --test differential --test norm",
        ],
    },
    Step {
        name: "candle",
        about: "the benchmark beside candle, once on small tensors",
        commands: &["cargo test -p rope-peers --features candle --locked --bench peers"],
    },
    Step {
        name: "package",
        about: "the packages of the published crates, used outside the workspace",
        // What follows runs without the network.
        commands: &["cargo fetch --locked", "cargo xtask package"],
    },
    Step {
        name: "abi",
        about: "our declarations against the vendor's headers",
        commands: &["cargo xtask abi"],
    },
    Step {
        name: "claims",
        about: "the commands of docs/claims.md that count",
        commands: &["cargo xtask claims"],
    },
    Step {
        name: "fuzz",
        about: "the fuzz targets, 5 seconds each after their kept inputs",
        commands: &["cargo xtask fuzz"],
    },
    Step {
        name: "sanitize",
        about: "the tests of unsafe code under sanitizers",
        commands: &["cargo xtask sanitize"],
    },
    Step {
        name: "audit",
        about: "format, lints and tests of the workspace audit/",
        commands: &[
            "cargo fmt --all --check --manifest-path audit/Cargo.toml",
            "cargo clippy --workspace --all-targets --locked --manifest-path audit/Cargo.toml \
             --target-dir target -- -D warnings",
            "cargo test --locked --manifest-path audit/Cargo.toml --target-dir target",
        ],
    },
    Step {
        name: "gpu-kernels",
        about: "the GPU kernels in NVIDIA's compilers",
        commands: &["cargo xaudit gpu-kernels"],
    },
    Step {
        name: "vendor-headers",
        about: "the kernels through the vendor's Ascend C headers",
        commands: &["cargo xaudit vendor-headers FOLDER/asc-devkit"],
    },
    Step {
        name: "vendor-operators",
        about: "the operators against the vendor's first phases",
        commands: &["cargo xaudit vendor-operators FOLDER"],
    },
];

/// A command, split into what a process is started with.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Parts {
    pub(super) variables: Vec<(String, String)>,
    pub(super) program: String,
    pub(super) arguments: Vec<String>,
}

impl Step {
    /// Whether it reads checkouts of the vendor's repositories.
    pub(super) fn wants_vendor(&self) -> bool {
        self.commands.iter().any(|text| text.contains(VENDOR))
    }
}

/// The parts of a command. Names of folders may hold spaces.
pub(super) fn parts(command: &str, vendor: Option<&Path>) -> Parts {
    let mut words = command.split_whitespace().peekable();
    let mut variables = Vec::new();
    while let Some((name, value)) = words.peek().and_then(|word| word.split_once('=')) {
        variables.push((name.to_owned(), value.to_owned()));
        words.next();
    }
    let folder = vendor.map(|folder| folder.display().to_string());
    let mut words = words.map(|word| match &folder {
        Some(folder) => word.replace(VENDOR, folder),
        None => word.to_owned(),
    });
    Parts {
        variables,
        program: words.next().unwrap_or_default(),
        arguments: words.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_read_as_a_shell_reads_them() {
        let text = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        let expected = Parts {
            variables: vec![("A".to_owned(), "1".to_owned())],
            program: "cargo".to_owned(),
            arguments: text(&["xaudit", "--b=c", "a b/asc-devkit"]),
        };
        let folder = Some(Path::new("a b"));
        assert_eq!(
            parts("A=1 cargo xaudit --b=c FOLDER/asc-devkit", folder),
            expected
        );
    }

    #[test]
    fn steps_have_names_of_their_own_and_commands_of_cargo() {
        for (index, step) in STEPS.iter().enumerate() {
            let earlier = &STEPS[..index];
            assert!(earlier.iter().all(|other| other.name != step.name));
            assert!(!step.commands.is_empty(), "{}", step.name);
            assert!(!step.name.contains(['|', ' ']) && !step.about.contains('|'));
            for command in step.commands {
                assert_eq!(parts(command, None).program, "cargo", "{command}");
                // Otherwise a lock file could change while it is checked.
                let is_ours = ["xtask", "xaudit", "fmt"]
                    .iter()
                    .any(|x| command.contains(x));
                assert!(is_ours || command.contains("--locked"), "{command}");
            }
        }
    }
}

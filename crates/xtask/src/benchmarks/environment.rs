//! What a measurement depends on besides the code.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use rope_core::InstructionSet;
use serde::{Deserialize, Serialize};

/// Where and with what the results were measured. Unknown parts are empty.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Environment {
    /// Day of the measurement, UTC.
    pub(super) date: String,
    /// The commit, with `+` if files other than documents, results among them, differed from it.
    pub(super) commit: String,
    pub(super) processor: String,
    pub(super) cores: usize,
    /// The instructions that the kernels chose.
    pub(super) instructions: String,
    /// Other vector extensions of the processor that matter for rotation.
    pub(super) features: Vec<String>,
    pub(super) memory_gib: f64,
    /// Whether memory comes in large pages.
    pub(super) large_pages: String,
    pub(super) system: String,
    pub(super) rustc: String,
    /// Processes that wanted a core in the minute before, as the system's load average.
    pub(super) load: String,
}

/// By the part that was measured.
pub(super) type Environments = BTreeMap<String, Environment>;

const FEATURES: [&str; 6] = [
    "avx2",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_bf16",
    "avx512_fp16",
];

impl Environment {
    pub(super) fn read(root: &Path) -> Self {
        let output = |program: &str, arguments: &[&str]| {
            let output = Command::new(program)
                .current_dir(root)
                .args(arguments)
                .output();
            let text =
                output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
            text.unwrap_or_default()
        };
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let value = |text: &str, key: &str| {
            let line = text.lines().find(|line| line.starts_with(key));
            let value = line.and_then(|line| line.split_once(':'));
            value.map_or_else(String::new, |(_, value)| value.trim().to_owned())
        };
        let cpu = text("/proc/cpuinfo");
        let flags = value(&cpu, "flags");
        let number = |key| value(&cpu, key);
        let memory = value(&text("/proc/meminfo"), "MemTotal");
        let memory_kib: f64 = memory.trim_end_matches(" kB").parse().unwrap_or_default();
        let status = ["status", "--porcelain", "--untracked-files=no"];
        let changed = !output("git", &[&status[..], &["--", ":!docs"]].concat()).is_empty();
        let pages = text("/sys/kernel/mm/transparent_hugepage/enabled");
        let chosen = pages
            .split_once('[')
            .and_then(|(_, rest)| rest.split_once(']'));
        Self {
            date: output("date", &["-u", "+%F"]),
            commit: output("git", &["rev-parse", "--short=12", "HEAD"])
                + if changed { "+" } else { "" },
            processor: format!(
                "{}, family {} model {}",
                number("model name"),
                number("cpu family"),
                number("model\t")
            ),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            instructions: InstructionSet::best().name().to_owned(),
            features: FEATURES
                .into_iter()
                .filter(|feature| flags.split(' ').any(|flag| flag == *feature))
                .map(str::to_owned)
                .collect(),
            memory_gib: (memory_kib / 1024.0 / 102.4).round() / 10.0,
            large_pages: chosen.map_or_else(String::new, |(chosen, _)| chosen.to_owned()),
            system: output("uname", &["-srm"]),
            rustc: output("rustc", &["--version"]),
            load: text("/proc/loadavg")
                .split(' ')
                .next()
                .unwrap_or_default()
                .to_owned(),
        }
    }
}

//! The acceptance of a device: one report of a machine that its maker has never seen.
//!
//! Each part is a process of its own with time limits, so that a hang, a crash or a refusal is a
//! row of the report and everything else still runs.

mod child;
mod judge;
mod kit;
mod report;

use std::io;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use plain_files::{MAX_TEXT_BYTES, read_text};
use serde::Serialize;
use serde_json::{Value, json};

use self::child::{End, Ended, Limits, run};
pub use self::report::AcceptanceReport;

/// A device to accept, and the program that uses it.
#[derive(Clone, Debug)]
pub struct Acceptance {
    /// `mrope`.
    pub program: PathBuf,
    /// The name of the device, as `--device` takes it.
    pub device: String,
    /// The folder of the report.
    pub out: PathBuf,
    /// The time for all parts.
    pub limit: Duration,
}

/// The result of one check or measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The check or measurement.
    pub name: String,
    /// How it ended.
    pub verdict: Verdict,
    /// The figure or the reason.
    pub detail: String,
}

/// How a check or a part ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// A finding that is neither right nor wrong.
    Found,
    /// As expected.
    Pass,
    /// Not run, for the reason in the row.
    Skipped,
    /// Right, but much slower than its kind.
    Slow,
    /// Wrong, or refused with an error.
    Fail,
    /// It ran into a time limit.
    Hang,
    /// The process was ended by a signal.
    Crash,
}

impl Verdict {
    /// True if the device is not accepted with it.
    #[must_use]
    pub fn is_failure(self) -> bool {
        self >= Self::Slow
    }
}

/// A part that has run.
#[derive(Clone, Debug, Serialize)]
pub struct PartReport {
    /// The part.
    pub name: &'static str,
    /// What it looks at.
    pub about: &'static str,
    /// The worst verdict of its rows.
    pub verdict: Verdict,
    /// Its time.
    pub seconds: f64,
    /// Its checks.
    pub rows: Vec<Row>,
}

/// Devices that a part is for.
#[derive(Clone, Copy, PartialEq)]
enum For {
    All,
    Npus,
    Several,
}

/// The rows of a part's processes.
type Judge = fn(&Path, &[Ended]) -> Vec<Row>;

/// Command lines of the program, and the rows of their output.
struct Part {
    name: &'static str,
    about: &'static str,
    devices: For,
    /// Of each process, in seconds: in all, and without a line of output.
    limits: [u64; 2],
    /// Run one after the other, as long as each succeeds. `{device}`, `{first}`, `{second}`,
    /// `{kit}` and `{runs}` stand for devices and folders; words are separated by spaces.
    commands: &'static [&'static str],
    judge: Judge,
}

/// A run of the tiny model, on the device and on the CPU.
const TRAIN: &str = "finetune {kit}/model --random-weights --data {kit}/train.jsonl --steps 6 \
                     --batch 4 --learning-rate 2e-3";

/// All parts, in their order.
const PARTS: &[Part] = &[
    Part {
        name: "machine",
        about: "versions and sizes",
        devices: For::All,
        limits: [60, 60],
        commands: &["accept --part machine --device {device}"],
        judge: judge::machine,
    },
    Part {
        name: "installation",
        about: "libraries, functions, kernels and paths that were found",
        devices: For::Npus,
        limits: [120, 120],
        commands: &["doctor --json --device {kind}"],
        judge: judge::doctor,
    },
    Part {
        name: "golden vectors",
        about: "rotations and gradients of transformers",
        devices: For::All,
        limits: [180, 180],
        commands: &["verify {kit}/golden --json --device {device}"],
        judge: judge::checks,
    },
    Part {
        name: "gradients",
        about: "finite differences of chosen rotations",
        devices: For::All,
        limits: [150, 120],
        commands: &["gradcheck --json --filter half/striped[8,5,5] --device {device}"],
        judge: judge::checks,
    },
    Part {
        name: "operations",
        about: "each operation of tensors once, against the CPU",
        devices: For::All,
        limits: [240, 60],
        commands: &["accept --part operations --device {device}"],
        judge: judge::checks,
    },
    Part {
        name: "training, f32",
        about: "losses of a whole model in f32, against the CPU",
        devices: For::All,
        limits: [150, 120],
        commands: &[
            "{train} --full --out {runs}/whole-device --device {device}",
            "{train} --full --batching padded --out {runs}/whole-cpu --device cpu",
        ],
        judge: |runs, ended| judge::losses(runs, ended, "whole", 1e-4),
    },
    Part {
        name: "training, bf16",
        about: "losses of adapters on a model in bf16, against the CPU",
        devices: For::All,
        limits: [150, 120],
        commands: &[
            "{train} --precision bf16 --out {runs}/adapters-device --device {device}",
            "{train} --precision bf16 --batching padded --out {runs}/adapters-cpu --device cpu",
        ],
        judge: |runs, ended| judge::losses(runs, ended, "adapters", 2e-2),
    },
    Part {
        name: "several devices",
        about: "losses of a whole model on two devices, against the CPU",
        devices: For::Several,
        limits: [150, 120],
        commands: &[
            "{train} --full --out {runs}/two-device --device {first} --device {second}",
            "{train} --full --batching padded --out {runs}/two-cpu --device cpu",
        ],
        judge: |runs, ended| judge::losses(runs, ended, "two", 1e-4),
    },
    Part {
        name: "times",
        about: "rotation, norm, attention and a layer against a copy and products",
        devices: For::All,
        limits: [150, 120],
        commands: &["accept --part times --device {device}"],
        judge: judge::measurements,
    },
    Part {
        name: "memory",
        about: "bytes that the backward keeps",
        devices: For::All,
        limits: [150, 120],
        commands: &[
            "bench memory --json --dtype f32 --shape qwen3-vl-8b --layers 4 --checkpointing without \
                     --device {device}",
        ],
        judge: judge::memory,
    },
];

/// Facts about the program and its machine, without names, beside the name of a device.
pub fn facts(device: &str) -> Value {
    let file = |path: &str| read_text(Path::new(path), MAX_TEXT_BYTES).unwrap_or_default();
    let line = |text: &str, start: &str| {
        let line = text.lines().find(|line| line.starts_with(start))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let graphics = file("/proc/driver/nvidia/version");
    json!({
        "program": env!("CARGO_PKG_VERSION"),
        "system": format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        "kernel": file("/proc/sys/kernel/osrelease").trim(),
        "processor": line(&file("/proc/cpuinfo"), "model name"),
        "cores": thread::available_parallelism().map_or(1, NonZero::get),
        "memory": line(&file("/proc/meminfo"), "MemTotal"),
        "graphics driver": graphics.lines().next(),
        "device": device,
    })
}

impl Acceptance {
    /// Runs all parts, and writes `report.md` and `report.json` after each.
    ///
    /// # Errors
    /// If the folder of the report cannot be written. Everything else is a row.
    pub fn run(&self, mut each: impl FnMut(&PartReport)) -> io::Result<AcceptanceReport> {
        std::fs::create_dir_all(&self.out)?;
        let started = Instant::now();
        // A folder of its own, for it is removed.
        let files = self.out.join(format!("accept-{}", std::process::id()));
        std::fs::create_dir(&files)?;
        let (kit, runs) = (files.join("kit"), files.join("runs"));
        std::fs::create_dir(&runs)?;
        kit::write(&kit)?;
        let mut report = AcceptanceReport::new(&self.device);
        for part in PARTS {
            let left = self.limit.saturating_sub(started.elapsed());
            let began = Instant::now();
            let rows = match self.reason_against(part, &report) {
                Some(reason) => vec![Row::new(part.name, Verdict::Skipped, reason)],
                None if left.is_zero() => {
                    let reason = "not run: the time for all parts was over";
                    vec![Row::new(part.name, Verdict::Fail, reason)]
                }
                None => self.rows(part, left, &kit, &runs),
            };
            let worst = rows.iter().map(|row| row.verdict).max();
            let part = PartReport {
                name: part.name,
                about: part.about,
                verdict: worst.unwrap_or(Verdict::Fail),
                seconds: began.elapsed().as_secs_f64(),
                rows,
            };
            each(&part);
            report.add(part);
            report.write(&self.out)?;
        }
        std::fs::remove_dir_all(&files)?;
        Ok(report)
    }

    /// The reason why a part is not for this device.
    fn reason_against(&self, part: &Part, report: &AcceptanceReport) -> Option<&'static str> {
        // This process loads no driver: the installation's part has counted.
        let count = report.figure(judge::DEVICES);
        let is_alone = self.kind() == "ascend" && count.is_none_or(|count| count < 2);
        match part.devices {
            For::Npus if !self.kind().starts_with("ascend") => Some("for NPUs"),
            For::Several if self.peers().is_none() || is_alone => Some("there is one device"),
            _ => None,
        }
    }

    fn rows(&self, part: &Part, left: Duration, kit: &Path, runs: &Path) -> Vec<Row> {
        let [total, silence] = part.limits.map(Duration::from_secs);
        let limits = Limits {
            total: total.min(left),
            silence: silence.min(left),
        };
        let started = Instant::now();
        let mut ended = Vec::new();
        for line in part.commands {
            let line = line.replace("{train}", TRAIN);
            let words: Vec<String> = line
                .split(' ')
                .map(|word| self.filled(word, kit, runs))
                .collect();
            ended.push(run(self.command(&words), limits));
            // Another process runs the operations after the one that ended this process.
            while let Some(next) = judge::begun_at_end(&ended)
                && started.elapsed() < limits.total
            {
                let next = (next + 1).to_string();
                let words = words.iter().map(String::as_str).chain(["--from", &next]);
                ended.push(run(self.command(&words.collect::<Vec<_>>()), limits));
            }
            let last = ended.last().map(|ended| &ended.end);
            if !matches!(last, Some(End::Exit(0))) {
                break;
            }
        }
        (part.judge)(runs, &ended)
    }

    fn command(&self, words: &[impl AsRef<std::ffi::OsStr>]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(words);
        command
    }

    /// The name without an index.
    fn kind(&self) -> &str {
        self.device.split(':').next().unwrap_or_default()
    }

    /// The names of two devices of this kind, if this is the first. The processor is several ranks
    /// to try that out.
    fn peers(&self) -> Option<[String; 2]> {
        let kind = self.kind();
        let is_first = self.device == kind || self.device == format!("{kind}:0");
        match kind {
            "cpu" => Some([kind, kind].map(str::to_owned)),
            "ascend" | "ascend-sim" if is_first => Some([format!("{kind}:0"), format!("{kind}:1")]),
            _ => None,
        }
    }

    /// A word of a command line with devices and folders in their places.
    fn filled(&self, word: &str, kit: &Path, runs: &Path) -> String {
        let [first, second] = self.peers().unwrap_or_default();
        word.replace("{device}", &self.device)
            // `doctor` looks at all devices of a kind.
            .replace("{kind}", self.kind())
            .replace("{first}", &first)
            .replace("{second}", &second)
            .replace("{kit}", &kit.to_string_lossy())
            .replace("{runs}", &runs.to_string_lossy())
    }
}

impl Row {
    fn new(name: impl Into<String>, verdict: Verdict, detail: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            verdict,
            detail: detail.into(),
        }
    }
}

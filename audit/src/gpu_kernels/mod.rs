//! `cargo xaudit gpu-kernels`: the kernels for GPUs, compiled by NVIDIA's compilers without a GPU.
//!
//! `audit/cuda-source` launches them on a device that only compiles; here what it wrote is
//! compiled to machine code, and what that says is counted and checked.

mod compile;
mod count;

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::Deserialize;

use crate::file::{FileError, cannot_access};
use crate::wheels::{self, WheelError};
use compile::Compilers;
use count::{Accesses, Counts};

/// Architectures as CubeCL names them to NVRTC: Ampere, Hopper, Blackwell.
const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90a", "sm_120a"];

/// Kernels that also read or write sums, one number at a time.
const SUMS: [&str; 6] = [
    "angle_sums",
    "norm_rotate_back",
    "squares",
    "normalise",
    "gradient_of_rows",
    "sums_of_columns",
];
/// Those that write nothing else.
const SUMS_ALONE: [&str; 2] = ["angle_sums", "squares"];
/// Bytes of a sum.
const SUM_BYTES: usize = 4;

#[derive(Debug, thiserror::Error)]
pub(crate) enum KernelError {
    #[error(transparent)]
    Wheel(#[from] WheelError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error("cannot load NVRTC: {0}")]
    Load(#[from] libloading::Error),
    #[error("NVRTC refuses the kernel: {0}")]
    Nvrtc(String),
    #[error("the source holds a zero byte")]
    Zero,
    #[error("kernels.json of cuda-source has another form: {0}")]
    List(#[from] serde_json::Error),
    #[error("ptxas reports in a form that is not known:\n{0}")]
    Report(String),
    #[error("{0}")]
    Failed(String),
}

type Result<T> = std::result::Result<T, KernelError>;

/// A launch, as `audit/cuda-source` lists it.
#[derive(Deserialize)]
struct Kernel {
    case: String,
    dtype: String,
    kernel: String,
    entry: String,
    file: PathBuf,
    /// Bytes of one access to the tensors, and to cos and sin.
    access_bytes: [usize; 2],
}

impl Kernel {
    /// What is wrong with it on an architecture.
    fn faults(&self, counts: &Counts) -> Vec<String> {
        let zeros = [
            ("bytes spilled", counts.spilled),
            ("bytes of stack", counts.stack),
            ("accesses to local memory", counts.local),
            ("divisions of 64 bits", counts.wide_divisions),
        ];
        let zeros = zeros.into_iter().filter(|(_, count)| *count > 0);
        let mut faults: Vec<String> = zeros
            .map(|(what, count)| format!("{count} {what}"))
            .collect();
        let sums = SUMS.contains(&self.kernel.as_str()).then_some(SUM_BYTES);
        let expected: Vec<usize> = self.access_bytes.into_iter().chain(sums).collect();
        for (what, found) in [("loads", &counts.loads), ("stores", &counts.stores)] {
            let others = found.keys().filter(|bytes| !expected.contains(bytes));
            faults.extend(others.map(|bytes| format!("{what} of {bytes} bytes")));
            let tensors = self.access_bytes[0];
            let stores_sums = SUMS_ALONE.contains(&self.kernel.as_str()) && what == "stores";
            if !found.contains_key(&tensors) && !stores_sums {
                faults.push(format!("no {what} of {tensors} bytes"));
            }
        }
        faults
    }
}

/// Compiles and checks; returns a table.
pub(crate) fn run() -> Result<String> {
    let root = crate::root();
    let work = root.join("target/gpu-kernels");
    fs::create_dir_all(&work).map_err(cannot_access(&work))?;
    let compilers = Compilers::fetch(&work)?;
    let source = work.join("source");
    let mut launch = crate::cargo::cargo();
    launch.current_dir(&root);
    launch.args(["run", "--quiet", "--locked", "--target-dir", "target"]);
    launch.args(["--manifest-path", "audit/cuda-source/Cargo.toml", "--"]);
    wheels::output_of(launch.arg(&source))?;
    let list = source.join("kernels.json");
    let kernels = fs::read_to_string(&list).map_err(cannot_access(&list))?;
    let kernels: Vec<Kernel> = serde_json::from_str(&kernels)?;
    let mut table = "| kernel | case | type | bytes of an access | registers | loads + stores | \
                     of which in the loop |\n|---|---|---|---|---|---|---|\n"
        .to_owned();
    let mut failures = Vec::new();
    let kernels = distinct(kernels);
    for (kernel, counts) in kernels
        .iter()
        .zip(count_all(&compilers, &source, &kernels)?)
    {
        for (architecture, counts) in ARCHITECTURES.iter().zip(&counts) {
            let (name, case, dtype) = (&kernel.kernel, &kernel.case, &kernel.dtype);
            let place = format!("{name}, {case} in {dtype}, {architecture}");
            let faults = kernel.faults(counts);
            failures.extend(faults.iter().map(|fault| format!("{place}: {fault}")));
        }
        table += &row(kernel, &counts);
    }
    table += &format!(
        "\n{} kernels, each for {}.",
        kernels.len(),
        ARCHITECTURES.join(", ")
    );
    if failures.is_empty() {
        Ok(table)
    } else {
        println!("{table}");
        Err(KernelError::Failed(failures.join("\n")))
    }
}

/// Kernels of one name have the same source: the name ends with a hash of all that it is made for.
fn distinct(mut kernels: Vec<Kernel>) -> Vec<Kernel> {
    let mut known = HashSet::new();
    kernels.retain(|kernel| known.insert(kernel.entry.clone()));
    kernels
}

/// What is counted in each kernel for each architecture, by a thread for each processor.
fn count_all(compilers: &Compilers, folder: &Path, kernels: &[Kernel]) -> Result<Vec<Vec<Counts>>> {
    let count = |kernel: &Kernel, architecture: &str| {
        let path = folder.join(&kernel.file);
        let text = fs::read_to_string(&path).map_err(cannot_access(&path))?;
        let compiled = compilers.compile(&text, architecture, &kernel.entry)?;
        Counts::of(&compiled).ok_or(KernelError::Report(compiled.report))
    };
    let next = AtomicUsize::new(0);
    let work = || {
        let mut counted = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(kernel) = kernels.get(at) else {
                return counted;
            };
            eprintln!("{}, {} in {}", kernel.kernel, kernel.case, kernel.dtype);
            let counts = ARCHITECTURES.iter().map(|name| count(kernel, name));
            counted.push((at, counts.collect::<Result<Vec<Counts>>>()));
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut counted: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined
            .flat_map(|counted| counted.expect("no thread panics"))
            .collect()
    });
    counted.sort_by_key(|(at, _)| *at);
    counted.into_iter().map(|(_, counts)| counts).collect()
}

/// A row of the table; accesses are those of the first architecture.
fn row(kernel: &Kernel, counts: &[Counts]) -> String {
    let registers: Vec<String> = counts.iter().map(|c| c.registers.to_string()).collect();
    let first = &counts[0];
    format!(
        "| `{}` | {} | {} | {} | {} | {} + {} | {} + {} |\n",
        kernel.kernel,
        kernel.case,
        kernel.dtype,
        kernel.access_bytes[0],
        registers.join(", "),
        words(&first.loads),
        words(&first.stores),
        words(&first.loop_loads),
        words(&first.loop_stores),
    )
}

/// Such as `8 x 16 B`.
fn words(accesses: &Accesses) -> String {
    let words = accesses
        .iter()
        .rev()
        .map(|(bytes, count)| format!("{count} x {bytes} B"));
    let words: Vec<String> = words.collect();
    if words.is_empty() {
        "0".to_owned()
    } else {
        words.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(name: &str) -> Kernel {
        Kernel {
            case: String::new(),
            dtype: "bf16".to_owned(),
            kernel: name.to_owned(),
            entry: name.to_owned(),
            file: PathBuf::new(),
            access_bytes: [16, 16],
        }
    }

    #[test]
    fn what_a_kernel_must_not_do_is_a_fault() {
        let good = || Counts {
            registers: 40,
            loads: [(16, 8)].into(),
            stores: [(16, 8)].into(),
            ..Counts::default()
        };
        assert_eq!(kernel("rotate_pair").faults(&good()), Vec::<String>::new());
        let bad = [
            Counts {
                spilled: 4,
                ..good()
            },
            Counts { stack: 8, ..good() },
            Counts { local: 1, ..good() },
            Counts {
                wide_divisions: 1,
                ..good()
            },
            Counts {
                loads: [(16, 8), (8, 1)].into(),
                ..good()
            },
            Counts {
                stores: [(4, 8)].into(),
                ..good()
            },
            Counts {
                loads: Accesses::new(),
                ..good()
            },
        ];
        for counts in bad {
            assert!(
                !kernel("rotate_pair").faults(&counts).is_empty(),
                "{counts:?}"
            );
        }
        let sums = Counts {
            stores: [(4, 8)].into(),
            ..good()
        };
        assert_eq!(kernel("angle_sums").faults(&sums), Vec::<String>::new());
    }
}

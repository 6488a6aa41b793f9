//! What an instruction costs, in cycles: by the figures of Huawei's msKPP and by the cycle model of
//! PTO-ISA. Neither is a measurement of these kernels.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use super::trace::{BARRIER, Step, Trace, WAIT};
use super::{Result, TimeError};
use crate::file::cannot_access;

/// Of Atlas A2: cycles a second, and bytes a second of the chip's memory over its vector cores.
const CYCLES: f64 = 1.85e9;
pub(super) const BYTES_PER_CYCLE: f64 = 1.6e12 / 40.0 / CYCLES;
const GIB: f64 = 1_073_741_824.0;

/// An instruction of the trace, what PTO-ISA calls it, and its cycles by msKPP.
struct Figure {
    what: &'static str,
    types: &'static str,
    intrinsic: &'static str,
    cycles: Cycles,
}

/// Cycles by msKPP, of its commit 8573151 (`csrc/prof_data/resource910b.cpp`, 910B1).
enum Cycles {
    /// At least the first number, and the second for each repeat after the third.
    Repeats(f64, f64, f64),
    /// A transfer: KiB and GiB/s, one core alone.
    Curve(&'static [(f64, f64)]),
    /// Bytes or products a cycle.
    Rate(f64),
    /// The figures have none.
    Nothing,
}
use Cycles::{Curve, Nothing, Rate, Repeats};

const LOADS: &[(f64, f64)] = &[
    (1.0, 7.29),
    (2.0, 13.48),
    (4.0, 23.6),
    (8.0, 42.74),
    (16.0, 67.99),
    (24.0, 77.12),
    (64.0, 77.5),
    (128.0, 78.49),
];
const STORES: &[(f64, f64)] = &[
    (1.0, 11.4),
    (2.0, 22.1),
    (4.0, 37.9),
    (8.0, 57.8),
    (16.0, 86.8),
    (24.0, 106.9),
    (64.0, 110.7),
];
const LOADS_OF_L1: &[(f64, f64)] = &[
    (1.0, 9.93),
    (2.0, 17.86),
    (4.0, 29.33),
    (8.0, 57.98),
    (16.0, 93.19),
    (32.0, 147.37),
    (64.0, 176.28),
    (128.0, 232.51),
    (256.0, 261.36),
];

const fn row(
    what: &'static str,
    types: &'static str,
    intrinsic: &'static str,
    cycles: Cycles,
) -> Figure {
    Figure {
        what,
        types,
        intrinsic,
        cycles,
    }
}

const FIGURES: [Figure; 35] = [
    row("Add", "f32", "vadd", Repeats(3.0, 2.0, 0.0)),
    row("Sub", "f32", "vsub", Repeats(3.0, 2.0, 0.0)),
    row("Mul", "f32", "vmul", Repeats(3.0, 2.0, 0.0)),
    row("MulAddDst", "f32", "vmla", Repeats(6.0, 6.0, 0.0)),
    row("Div", "f32", "vdiv", Repeats(4.0, 4.0, 0.0)),
    row("Sqrt", "f32", "vsqrt", Repeats(3.0, 2.0, 0.0)),
    row("Exp", "f32", "vexp", Repeats(3.0, 2.0, 0.0)),
    row("Adds", "f32", "vadds", Repeats(3.0, 1.0, 0.0)),
    row("Muls", "f32", "vmuls", Repeats(3.0, 1.0, 0.0)),
    row("Adds", "i32", "vadds", Repeats(4.0, 1.0, 0.0)),
    row("Duplicate", "f32", "vector_dup", Repeats(4.0, 1.0, 0.0)),
    row("WholeReduceSum", "f32", "vcadd", Repeats(3.0, 3.0, 0.0)),
    row("Brcb", "f32", "vbrcb", Repeats(3.0, 1.0, 0.0)),
    row("Gather", "f32", "vgather", Repeats(14.0, 12.0, 3.0)),
    row("Copy", "u16", "vcopy", Repeats(3.0, 1.0, 0.0)),
    row("Or", "u16", "vor", Repeats(3.0, 2.0, 0.0)),
    row("ShiftLeft", "u32", "vshl", Repeats(4.0, 1.0, 0.0)),
    row("ShiftRight", "u32", "vshr", Repeats(4.0, 1.0, 0.0)),
    row("ShiftRight", "i32", "vshr", Repeats(4.0, 1.0, 0.0)),
    row(
        "Cast",
        "bf16 -> f32",
        "vconv_bf162f32",
        Repeats(3.0, 1.0, 0.0),
    ),
    row(
        "Cast",
        "f16 -> f32",
        "vconv_f162f32",
        Repeats(3.0, 1.0, 0.0),
    ),
    row(
        "Cast",
        "f32 -> bf16",
        "vconv_f322bf16r",
        Repeats(3.0, 1.0, 0.0),
    ),
    row(
        "Cast",
        "f32 -> f16",
        "vconv_f322f16r",
        Repeats(3.0, 0.5, 1.0),
    ),
    row(
        "Cast",
        "i16 -> f32",
        "vconv_s162f32",
        Repeats(3.0, 1.0, 0.0),
    ),
    row(
        "Cast",
        "f32 -> i32",
        "vconv_f322s32r",
        Repeats(3.0, 1.0, 0.0),
    ),
    // msKPP has no figure for it, and 1 for the other conversions of 32 bits.
    row(
        "Cast",
        "i32 -> i16",
        "vconv_s322s16",
        Repeats(3.0, 1.0, 0.0),
    ),
    // Its figures are of a stream of independent instructions.
    row(BARRIER, "", "pipe_barrier", Nothing),
    row(WAIT, "", "wait_flag", Nothing),
    row("GM -> UB", "", "copy_gm_to_ubuf_align_b16", Curve(LOADS)),
    row("UB -> GM", "", "copy_ubuf_to_gm_align_b16", Curve(STORES)),
    row(
        "GM -> L1",
        "",
        "copy_gm_to_cbuf_multi_nd2nz_b16",
        Curve(LOADS_OF_L1),
    ),
    row("LoadData(L0A, L1)", "", "load_cbuf_to_ca", Rate(256.0)),
    row("LoadData(L0B, L1)", "", "load_cbuf_to_cb", Rate(128.0)),
    // 16 x 16 x 16 products.
    row("Mmad", "", "mad", Rate(4_096.0)),
    row("L0C -> GM", "", "copy_matrix_cc_to_gm", Rate(128.0)),
];

impl Figure {
    fn of(step: &Step) -> Result<&'static Self> {
        let found = FIGURES.iter().find(|figure| {
            figure.what == step.what && (figure.types.is_empty() || figure.types == step.types)
        });
        found.ok_or_else(|| TimeError::NoFigure {
            what: step.what.clone(),
            types: step.types.clone(),
        })
    }
}

/// Whether both judges have a figure for an instruction.
pub(super) fn has_both(step: &Step) -> bool {
    Figure::of(step).is_ok_and(|figure| matches!(figure.cycles, Repeats(..)))
}

/// The cycles of each step by msKPP's figures.
pub(super) fn by_mskpp(trace: &Trace) -> Result<Vec<f64>> {
    let steps = trace.steps.iter();
    steps
        .map(|step| {
            let amount = step.amount as f64;
            Ok(match &Figure::of(step)?.cycles {
                Repeats(least, each, start) => least.max(start + each * amount),
                Curve(points) => amount / rate(points, amount),
                Rate(rate) => amount / rate,
                Nothing => 0.0,
            })
        })
        .collect()
}

/// Bytes a cycle of a transfer, between the points of a curve as msKPP has it. Below the first
/// point the time is that of the point.
fn rate(points: &[(f64, f64)], bytes: f64) -> f64 {
    let size = bytes / 1024.0;
    let after = points.partition_point(|(kib, _)| *kib <= size);
    let speed = match (after.checked_sub(1).map(|i| points[i]), points.get(after)) {
        (None, Some((kib, speed))) => speed * size / kib,
        (Some((kib, speed)), Some((next, faster))) => {
            speed + (faster - speed) * (size - kib) / (next - kib)
        }
        (last, None) => last.map_or(1.0, |(_, speed)| speed),
    };
    speed * GIB / CYCLES
}

/// PTO-ISA's cycle model, compiled from the headers below `folder` into `work`.
pub(super) struct PtoModel {
    program: std::path::PathBuf,
    input: std::path::PathBuf,
}

impl PtoModel {
    pub(super) fn compile(folder: &Path, work: &Path) -> Result<Self> {
        let include = folder.join("include");
        if !include.join("pto/costmodel/runtime_stub.hpp").is_file() {
            return Err(TimeError::NoModel(folder.to_owned()));
        }
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        let program = work.join("cost");
        let output = Command::new(&compiler)
            .args(["-std=c++20", "-O1", "-D__NPU_ARCH__=2201", "-isystem"])
            .arg(&include)
            .arg("-o")
            .arg(&program)
            .arg(crate::root().join("audit/time/cost.cpp"))
            .stdin(Stdio::null())
            .output()
            .map_err(cannot_access(Path::new(&compiler)))?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            let first = text.lines().find(|line| line.contains("error"));
            let first = first.unwrap_or_default().to_owned();
            return Err(TimeError::Compile { compiler, first });
        }
        let input = work.join("cost-input");
        Ok(Self { program, input })
    }

    /// The cycles of each step by the model.
    pub(super) fn cycles(&self, trace: &Trace) -> Result<Vec<f64>> {
        let mut text = "kernel\n".to_owned();
        for step in &trace.steps {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{} {}", Figure::of(step)?.intrinsic, step.amount);
        }
        std::fs::write(&self.input, text).map_err(cannot_access(&self.input))?;
        let output = Command::new(&self.program)
            .arg(&self.input)
            .output()
            .map_err(cannot_access(&self.program))?;
        let numbers: Option<Vec<f64>> = String::from_utf8_lossy(&output.stdout)
            .lines()
            .map(|line| line.parse().ok())
            .collect();
        let right =
            |numbers: &Vec<f64>| output.status.success() && numbers.len() == trace.steps.len();
        numbers.filter(right).ok_or_else(|| {
            let error = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            TimeError::Failed(format!("PTO-ISA's model of {}: {error}", trace.kernel))
        })
    }
}

//! `mrope accept`: one report of a device that has not been seen before.

use std::error::Error;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use burn::tensor::DType;
use clap::{Args, ValueEnum};
use rope_bench::burn::device::{LayerSizes, time_layer};
use rope_bench::sample::Plan;
use rope_check::accept::{Acceptance, facts};
use rope_check::operators::check_operations;
use serde_json::json;

use crate::arguments::count_in;
use crate::device::{Compute, Device, TokenArgs};
use crate::gpu::{self, note_software};
use crate::stdio::{note, stdout};

/// Accept a device: check and time everything on it, and write one report
///
/// Runs in ten minutes at most: versions, installation, golden vectors, gradients, each operation
/// against the CPU, training against the CPU, several devices, times and memory. Each part is a
/// process of its own, so a hang or a crash is a row of the report. The report has no names of hosts,
/// users or folders. The last line is the verdict; the exit code is 1 if the device is not accepted.
#[derive(Args, Clone, Debug)]
pub(crate) struct AcceptArgs {
    /// Device: cpu, gpu (the first GPU), gpu:N, ascend (the first NPU), ascend:N, or ascend-sim (a
    /// simulated NPU).
    #[arg(long, default_value = "cpu")]
    device: Device,
    /// Folder for report.md and report.json.
    #[arg(long, value_name = "DIR", default_value = "out/accept")]
    out: PathBuf,
    /// The time for all parts, in minutes.
    #[arg(long, value_name = "NUMBER", default_value = "10", value_parser = count_in(1..=60))]
    minutes: usize,
    /// Run one part in this process.
    #[arg(long, hide = true)]
    part: Option<Inner>,
    /// Skip the operations before this one.
    #[arg(long, hide = true, default_value_t = 0)]
    from: usize,
}

/// Parts that are no command of their own.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Inner {
    Machine,
    Operations,
    Times,
}

/// Runs all parts, or one in this process.
///
/// # Errors
/// If the device is none of this machine, or the report cannot be written.
pub(crate) fn run(args: &AcceptArgs) -> Result<ExitCode, Box<dyn Error>> {
    let inner = match args.part {
        Some(Inner::Machine) => machine,
        Some(Inner::Operations) => operations,
        Some(Inner::Times) => times,
        None => return accept(args),
    };
    inner(args).map(|()| ExitCode::SUCCESS)
}

fn accept(args: &AcceptArgs) -> Result<ExitCode, Box<dyn Error>> {
    if matches!(args.device, Device::Remote { .. }) {
        return Err("expected a device of this machine; run `mrope accept` on the server".into());
    }
    let acceptance = Acceptance {
        program: std::env::current_exe()?,
        device: args.device.to_string(),
        out: args.out.clone(),
        limit: Duration::from_secs(60 * args.minutes as u64),
    };
    let report = acceptance.run(|part| note(part))?;
    let (out, verdict) = (args.out.join("report.md"), &report.verdict);
    writeln!(stdout(), "{}\n{verdict}", out.display())?;
    Ok(match report.is_accepted() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Prints facts about program, machine and device.
fn machine(args: &AcceptArgs) -> Result<(), Box<dyn Error>> {
    let device = match args.device {
        Device::Gpu(index) => format!("{:?}", gpu::open(index)?),
        ref other => other.to_string(),
    };
    Ok(writeln!(stdout(), "{}", facts(&device))?)
}

/// Runs each operation, and says before each which one it is.
fn operations(args: &AcceptArgs) -> Result<(), Box<dyn Error>> {
    let compute = Compute::open(&args.device, &TokenArgs::default())?;
    // A GPU may have neither 16-bit type.
    let mut dtypes = vec![DType::F32, DType::BF16, DType::F16];
    dtypes.retain(|dtype| compute.device().supports_dtype(*dtype));
    let begin = |begin, case| -> Result<(), Box<dyn Error>> {
        let step = json!({ "begin": begin, "case": case });
        Ok(writeln!(stdout(), "{step}")?)
    };
    check_operations(compute.device(), &dtypes, args.from, begin, |row| {
        Ok(writeln!(stdout(), "{}", serde_json::to_string(&row)?)?)
    })
}

/// Times the operations of a layer.
fn times(args: &AcceptArgs) -> Result<(), Box<dyn Error>> {
    let compute = Compute::open(&args.device, &TokenArgs::default())?;
    let is_software = note_software(compute.device(), &args.device);
    let simulated = is_software || matches!(args.device, Device::AscendSim(_));
    let (tokens, heads, dtype) = match args.device {
        _ if simulated => (16, 4, DType::F32),
        Device::Cpu => (512, 8, DType::F32),
        _ => (8192, 32, DType::BF16),
    };
    let sizes = LayerSizes { tokens, heads };
    let plan = if simulated {
        Plan::ONCE
    } else {
        Plan::default()
    };
    for row in time_layer(sizes, compute.device(), dtype, &plan)? {
        let (milliseconds, times) = (row.timing.median_ns / 1e6, row.times);
        let found = match simulated {
            true => "ran; a simulated device has no times".to_owned(),
            false => format!("{milliseconds:.3} ms, {times:.2} of {}", row.baseline),
        };
        writeln!(stdout(), "{}", json!({ "name": row.name, "found": found }))?;
    }
    let sizes = format!("{tokens} tokens, {heads} heads of 128, {}", dtype.name());
    Ok(writeln!(
        stdout(),
        "{}",
        json!({ "name": "sizes", "found": sizes })
    )?)
}

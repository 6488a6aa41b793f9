//! `mrope doctor`: the parts of CANN on this machine, and remedies for those that are missing.

use std::error::Error;
use std::io::{BufWriter, Write};

use clap::Args;
use rope_ascend::diagnosis::Diagnosis;
use rope_check::ascend::doctor::{print, to_json};

use crate::device::Device;
use crate::stdio::stdout;

/// Report which parts of CANN and which rotation paths work, and how to fix the others
///
/// Missing parts are a result, not an error: the exit code is 0 without CANN and without a device.
#[derive(Args, Clone, Debug)]
pub(crate) struct DoctorArgs {
    /// Device: ascend (the installed CANN), or ascend-sim (the simulated NPU).
    #[arg(long, default_value = "ascend")]
    device: Device,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Looks, and prints what was found.
///
/// # Errors
/// If this program has no simulator and it was asked for, or standard output cannot be written.
pub(crate) fn run(args: &DoctorArgs) -> Result<(), Box<dyn Error>> {
    let diagnosis = match args.device {
        Device::AscendSim(_) => Diagnosis::of(&args.device.npu()?),
        Device::Ascend(0) => Diagnosis::of_installation(),
        Device::Ascend(_) | Device::Cpu | Device::Gpu(_) | Device::Remote { .. } => {
            return Err(format!(
                "expected --device ascend (all NPUs of this machine) or --device ascend-sim, found \
                 --device {}",
                args.device
            )
            .into());
        }
    };
    let mut out = BufWriter::new(stdout());
    if args.json {
        writeln!(out, "{}", to_json(&diagnosis))?;
    } else {
        let hint = match cfg!(feature = "ascend-sim") {
            true => "--device ascend-sim is a simulated NPU",
            false => "--features ascend-sim adds a simulated NPU",
        };
        print(&mut out, &diagnosis, hint)?;
    }
    Ok(out.flush()?)
}

//! `--device` and `--path`.

use std::error::Error;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use rope_ascend::rope::Npu;
use rope_check::ascend;

/// What rotates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Device {
    /// The engines of this machine.
    #[default]
    Cpu,
    /// An NPU, through the installed CANN.
    Ascend(u32),
    /// The simulated NPU.
    AscendSim,
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("expected cpu, ascend, ascend:N or ascend-sim, found {text:?}");
        match text {
            "cpu" => Ok(Self::Cpu),
            "ascend" => Ok(Self::Ascend(0)),
            "ascend-sim" => Ok(Self::AscendSim),
            _ => {
                let ordinal = text.strip_prefix("ascend:").ok_or_else(expected)?;
                ordinal.parse().map(Self::Ascend).map_err(|_| expected())
            }
        }
    }
}

/// Which code of the NPU rotates.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Path {
    /// This project's kernels.
    Kernels,
    /// The operators that CANN ships, as far as they go.
    Aclnn,
}

/// Where to run.
#[derive(Args, Clone, Debug)]
pub(crate) struct DeviceArgs {
    /// What rotates: cpu, ascend (the first NPU), ascend:N, or ascend-sim (a simulated NPU).
    #[arg(long, default_value = "cpu")]
    device: Device,
    /// On an NPU: this project's kernels (the default), or the stock operators.
    #[arg(long, value_enum)]
    path: Option<Path>,
}

impl DeviceArgs {
    /// The path of the NPU.
    pub(crate) fn path(&self) -> ascend::Path {
        match self.path {
            None | Some(Path::Kernels) => ascend::Path::Kernels,
            Some(Path::Aclnn) => ascend::Path::Aclnn,
        }
    }

    /// The NPU that was asked for, ready for its path.
    ///
    /// # Errors
    /// If there is none, it has no kernels, or a path was chosen for the CPU.
    pub(crate) fn npu(&self) -> Result<Option<Npu>, Box<dyn Error>> {
        let npu = match self.device {
            Device::Cpu if self.path.is_some() => {
                return Err("--path chooses among the ways to rotate on an NPU; add --device ascend or --device ascend-sim".into());
            }
            Device::Cpu => return Ok(None),
            Device::Ascend(ordinal) => Npu::open(ordinal)?,
            Device::AscendSim => simulated()?,
        };
        if self.path() == ascend::Path::Kernels {
            // Without kernels every case would fail for the same reason.
            npu.kernels()?;
        }
        Ok(Some(npu))
    }
}

/// The simulated NPU.
///
/// # Errors
/// If this program was built without it; the message has the command that builds one.
pub(crate) fn simulated() -> Result<Npu, Box<dyn Error>> {
    ascend::simulated().map_err(|error| {
        if error.is::<ascend::NoSimulator>() {
            let arguments: Vec<String> = std::env::args().skip(1).collect();
            let command = arguments.join(" ");
            return format!("{error}: cargo run --features ascend-sim -- {command}").into();
        }
        error as Box<dyn Error>
    })
}

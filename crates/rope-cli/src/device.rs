//! `--device`, `--path` and `--token-file`.

use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use burn::backend::ExecutionError;
use burn::tensor::Device as BurnDevice;
use burn_ascend::server::Token;
use burn_ascend::{AscendDevice, AscendHost, DeviceError, Fallback, fallbacks, reset_fallbacks};
use clap::{Args, ValueEnum};
use rope_ascend::AscendError;
use rope_ascend::rope::Npu;
use rope_check::ascend;
use serde::Serialize;

/// Environment variable with the token of a server.
pub(crate) const TOKEN_VARIABLE: &str = "MROPE_TOKEN";

/// What computes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Device {
    /// This machine's processor.
    #[default]
    Cpu,
    /// An NPU, through the installed CANN.
    Ascend(u16),
    /// The simulated NPU.
    AscendSim,
    /// A device that `mrope serve` serves.
    Remote {
        /// Of the server.
        url: String,
        /// Its place in the server's list.
        index: usize,
    },
}

const EXPECTED: &str = "cpu, ascend, ascend:N, ascend-sim or remote:ws://HOST:PORT";

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("expected {EXPECTED}, found {text:?}");
        match text {
            "cpu" => return Ok(Self::Cpu),
            "ascend" => return Ok(Self::Ascend(0)),
            "ascend-sim" => return Ok(Self::AscendSim),
            _ => {}
        }
        if let Some(ordinal) = text.strip_prefix("ascend:") {
            return ordinal.parse().map(Self::Ascend).map_err(|_| expected());
        }
        let url = text.strip_prefix("remote:").ok_or_else(expected)?;
        let (url, index) = match url.split_once('#') {
            Some((url, index)) => (url, index.parse().map_err(|_| expected())?),
            None => (url, 0),
        };
        if !url.starts_with("ws://") {
            return Err(expected());
        }
        Ok(Self::Remote {
            url: url.to_owned(),
            index,
        })
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Ascend(ordinal) => write!(f, "ascend:{ordinal}"),
            Self::AscendSim => f.write_str("ascend-sim"),
            Self::Remote { url, index: 0 } => write!(f, "remote:{url}"),
            Self::Remote { url, index } => write!(f, "remote:{url}#{index}"),
        }
    }
}

/// The token of a server.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct TokenArgs {
    /// For --device remote: the file with the server's token [default: the variable MROPE_TOKEN]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

impl TokenArgs {
    fn token(&self, url: &str) -> Result<Token, Box<dyn Error>> {
        if let Some(path) = &self.token_file {
            return read_token(path);
        }
        let text = std::env::var(TOKEN_VARIABLE).map_err(|_| {
            format!(
                "{url} wants the token that its `mrope serve` wrote: name the file with --token-file, or set \
                 {TOKEN_VARIABLE} to what is in it"
            )
        })?;
        Token::new(&text).map_err(|_| format!("{TOKEN_VARIABLE} is set, but empty").into())
    }
}

/// The token in a file.
///
/// # Errors
/// If it cannot be read, or has nothing in it.
pub(crate) fn read_token(path: &Path) -> Result<Token, Box<dyn Error>> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("the token file {}: {error}", path.display()))?;
    Token::new(&text).map_err(|_| format!("the token file {} is empty", path.display()).into())
}

/// A device that models compute on, until it is dropped.
pub(crate) struct Compute {
    device: BurnDevice,
    host: Option<AscendHost>,
}

impl Compute {
    /// Opens a device.
    ///
    /// # Errors
    /// If it is not there, with what is missing and what to do.
    pub(crate) fn open(device: &Device, token: &TokenArgs) -> Result<Self, Box<dyn Error>> {
        let (device, host) = match device {
            Device::Cpu => (BurnDevice::flex(), None),
            Device::Remote { url, index } => {
                let host = token.token(url)?.host(url);
                let device = BurnDevice::remote_options(&host).device_index(*index);
                (
                    device.init().map_err(|error| format!("{url}: {error}"))?,
                    None,
                )
            }
            Device::Ascend(_) | Device::AscendSim => {
                let npu = npu_of(device)?;
                open(npu)?;
                let host = AscendHost::start(&[npu])?;
                (host.devices()[0].clone(), Some(host))
            }
        };
        Ok(Self { device, host })
    }

    /// The device, without autodiff.
    pub(crate) fn device(&self) -> &BurnDevice {
        &self.device
    }

    /// Starts counting what [`usage`](Self::usage) reports.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn start_counting(&self) -> Result<(), ExecutionError> {
        self.device.sync()?;
        reset_fallbacks();
        for npu in self.npus() {
            npu.reset_peak_memory()
                .map_err(|error| ExecutionError::with_context(error.to_string()))?;
        }
        Ok(())
    }

    /// What an NPU of this process did since then; nothing for other devices.
    ///
    /// # Errors
    /// The device's, also of work that is not read.
    pub(crate) fn usage(&self) -> Result<Option<Usage>, ExecutionError> {
        self.device.sync()?;
        let Some(npu) = self.npus().first() else {
            return Ok(None);
        };
        let memory = npu
            .memory()
            .map_err(|error| ExecutionError::with_context(error.to_string()))?;
        Ok(Some(Usage {
            peak_bytes: memory.peak_bytes,
            fallbacks: fallbacks().into_iter().map(Into::into).collect(),
        }))
    }

    fn npus(&self) -> &[AscendDevice] {
        self.host.as_ref().map_or(&[], AscendHost::npus)
    }
}

/// What training took from an NPU.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Usage {
    /// Most bytes in the device's tensors at once.
    pub(crate) peak_bytes: usize,
    /// Operations that ran on the host instead.
    pub(crate) fallbacks: Vec<HostOperation>,
}

/// An operation that ran on the host.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct HostOperation {
    op: &'static str,
    calls: u64,
    bytes: u64,
}

impl From<Fallback> for HostOperation {
    fn from(Fallback { op, calls, bytes }: Fallback) -> Self {
        Self { op, calls, bytes }
    }
}

impl Usage {
    /// As a table has it: a row for each operation, or one that there was none.
    pub(crate) fn rows(&self) -> Vec<(String, String)> {
        let mut rows = vec![(
            "peak device memory".to_owned(),
            bytes(self.peak_bytes as u64),
        )];
        if self.fallbacks.is_empty() {
            rows.push(("operations on the host".to_owned(), "none".to_owned()));
        }
        for HostOperation {
            op,
            calls,
            bytes: moved,
        } in &self.fallbacks
        {
            let moved = bytes(*moved);
            rows.push((
                format!("on the host: {op}"),
                format!("{calls} calls, {moved}"),
            ));
        }
        rows
    }
}

fn bytes(count: u64) -> String {
    match count {
        0..10_000 => format!("{count} bytes"),
        10_000..10_000_000 => format!("{:.1} KiB", count as f64 / 1024.0),
        _ => format!("{:.1} MiB", count as f64 / (1024.0 * 1024.0)),
    }
}

/// What a device's failure is to a user.
pub(crate) fn explained(error: &ExecutionError) -> String {
    let reason = error.reason();
    // burn-remote's words for a connection that closed before the answer came.
    if reason.contains("RecvError") || reason.contains("channel closed") {
        return format!(
            "the connection to the device's server is lost: it was stopped, or an operation ended the session, and then \
             its log says why ({reason})"
        );
    }
    reason.to_owned()
}

/// The NPU that a device names.
///
/// # Errors
/// For other devices, and for the simulated one if this program has none.
pub(crate) fn npu_of(device: &Device) -> Result<AscendDevice, Box<dyn Error>> {
    match device {
        Device::Ascend(ordinal) => Ok(AscendDevice::new(*ordinal)),
        Device::AscendSim => burn_ascend::simulated(0).map_err(with_command),
        Device::Cpu | Device::Remote { .. } => {
            Err(format!("{device} is no NPU of this machine").into())
        }
    }
}

/// Opens an NPU, so that a missing one is said early.
///
/// # Errors
/// The device's, with what to do.
pub(crate) fn open(npu: AscendDevice) -> Result<(), Box<dyn Error>> {
    npu.open().map_err(|error| with_command(error.into()))
}

/// An error with what to do about it.
fn with_command(error: DeviceError) -> Box<dyn Error> {
    match error {
        DeviceError::NoSimulator => build_with_simulator(&error),
        DeviceError::Ascend(AscendError::Load(_)) => format!(
            "{error}. `mrope doctor` lists what is missing; --device cpu and --device ascend-sim need none of it"
        )
        .into(),
        other => other.into(),
    }
}

fn build_with_simulator(error: &dyn Error) -> Box<dyn Error> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let command = arguments.join(" ");
    format!("{error}: cargo run --features ascend-sim -- {command}").into()
}

/// Which code of the NPU rotates.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Kernels {
    /// This project's kernels.
    Kernels,
    /// The operators that CANN ships, as far as they go.
    Aclnn,
}

/// Where to run.
#[derive(Args, Clone, Debug)]
pub(crate) struct DeviceArgs {
    /// What computes: cpu, ascend (the first NPU), ascend:N, ascend-sim (a simulated NPU), or remote:ws://HOST:PORT (a
    /// device that `mrope serve` serves).
    #[arg(long, default_value = "cpu")]
    device: Device,
    /// On an NPU: this project's kernels (the default), or the stock operators.
    #[arg(long, value_enum)]
    path: Option<Kernels>,
    #[command(flatten)]
    token: TokenArgs,
}

impl DeviceArgs {
    /// The path of the NPU.
    pub(crate) fn path(&self) -> ascend::Path {
        match self.path {
            None | Some(Kernels::Kernels) => ascend::Path::Kernels,
            Some(Kernels::Aclnn) => ascend::Path::Aclnn,
        }
    }

    /// What was asked for.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// The device for models.
    ///
    /// # Errors
    /// As [`Compute::open`].
    pub(crate) fn compute(&self) -> Result<Compute, Box<dyn Error>> {
        Compute::open(&self.device, &self.token)
    }

    /// What was asked for, an NPU ready for its path.
    ///
    /// # Errors
    /// If there is no such NPU, it has no kernels, or a path was chosen for another device.
    pub(crate) fn place(&self) -> Result<Place, Box<dyn Error>> {
        let npu = match self.device {
            Device::Cpu | Device::Remote { .. } if self.path.is_some() => {
                return Err(format!(
                    "--path chooses among the ways to rotate on an NPU of this machine, and {} is none; \
                     add --device ascend or --device ascend-sim, or leave --path out",
                    self.device
                )
                .into());
            }
            Device::Cpu => return Ok(Place::Host),
            Device::Remote { .. } => return Ok(Place::Served),
            Device::Ascend(ordinal) => Npu::open(ordinal.into())?,
            Device::AscendSim => simulated()?,
        };
        if self.path() == ascend::Path::Kernels {
            // Without kernels every case would fail for the same reason.
            npu.kernels()?;
        }
        Ok(Place::Npu(npu))
    }
}

/// Where rotations run.
pub(crate) enum Place {
    /// On this machine's processor.
    Host,
    /// On an NPU of this machine.
    Npu(Npu),
    /// On a device of a server.
    Served,
}

/// The simulated NPU.
///
/// # Errors
/// If this program was built without it; the message has the command that builds one.
pub(crate) fn simulated() -> Result<Npu, Box<dyn Error>> {
    ascend::simulated().map_err(|error| {
        if error.is::<ascend::NoSimulator>() {
            return build_with_simulator(&*error);
        }
        error as Box<dyn Error>
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        for text in [
            "cpu",
            "ascend:3",
            "ascend-sim",
            "remote:ws://10.0.0.7:3000",
            "remote:ws://host:3000#2",
        ] {
            let device: Device = text.parse().expect(text);
            assert_eq!(device.to_string(), text);
        }
        assert_eq!("ascend".parse(), Ok(Device::Ascend(0)));
        for text in [
            "tpu",
            "ascend:x",
            "ascend:-1",
            "remote:",
            "remote:http://host",
            "remote:ws://host#x",
        ] {
            let error = Device::from_str(text).expect_err(text);
            assert!(error.contains(EXPECTED) && error.contains(text), "{error}");
        }
    }
}

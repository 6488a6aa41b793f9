//! `--device`, `--path` and `--token-file`: names of devices, and the one way from a name to a
//! device that is open.

#[cfg(feature = "ascend")]
pub(crate) mod served;
#[cfg(not(feature = "ascend"))]
#[path = "unserved.rs"]
mod served;

use std::error::Error;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, Mutex};

use burn::backend::ExecutionError;
use burn::tensor::Device as BurnDevice;
use clap::{Args, ValueEnum};
use rope_ascend::AscendError;
use rope_ascend::rope::Npu;
use rope_ascend::safe::Traffic;
use rope_bench::rows::bytes;
use rope_check::ascend;
use serde::Serialize;
use vlm_train::job::Team;
use vlm_train::{Collective, HostSums, Rank, VlmTrainError, resident_memory};

use self::served::{NpuRanks, ServedNpu};
use crate::gpu;

/// The name of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Device {
    /// This machine's processor.
    #[default]
    Cpu,
    /// A GPU of this machine, through a runtime of CubeCL.
    Gpu(usize),
    /// An NPU of this machine, through the installed CANN.
    Ascend(u16),
    /// A simulated NPU.
    AscendSim(u16),
    /// A device that `mrope serve` serves.
    Remote {
        /// Address of the server.
        url: String,
        /// Index in the server's list of devices.
        index: u32,
    },
}

const EXPECTED: &str =
    "cpu, gpu, gpu:N, ascend, ascend:N, ascend-sim, ascend-sim:N or remote:ws://HOST:PORT";

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("expected {EXPECTED}, found {text:?}");
        match text {
            "cpu" => return Ok(Self::Cpu),
            "gpu" => return Ok(Self::Gpu(0)),
            "ascend" => return Ok(Self::Ascend(0)),
            "ascend-sim" => return Ok(Self::AscendSim(0)),
            _ => {}
        }
        if let Some(index) = text.strip_prefix("gpu:") {
            return index.parse().map(Self::Gpu).map_err(|_| expected());
        }
        if let Some(ordinal) = text.strip_prefix("ascend:") {
            return ordinal.parse().map(Self::Ascend).map_err(|_| expected());
        }
        if let Some(ordinal) = text.strip_prefix("ascend-sim:") {
            return ordinal.parse().map(Self::AscendSim).map_err(|_| expected());
        }
        let url = text.strip_prefix("remote:").ok_or_else(expected)?;
        let (url, index) = match url.split_once('#') {
            Some((url, index)) => (url, index.parse().map_err(|_| expected())?),
            None => (url, 0),
        };
        let authority = url.strip_prefix("ws://").ok_or_else(expected)?;
        expect_port(authority)?;
        Ok(Self::Remote {
            url: url.to_owned(),
            index,
        })
    }
}

/// Refuses a port that no server can have: it would be tried for a while.
fn expect_port(authority: &str) -> Result<(), String> {
    let host = authority.split('/').next().unwrap_or(authority);
    // The colons of an IPv6 address are in brackets.
    let after = host.rsplit(']').next().unwrap_or(host);
    match after.rsplit_once(':') {
        Some((_, port)) if !port.parse::<u16>().is_ok_and(|port| port > 0) => Err(format!(
            "expected a port from 1 to 65535, found {port:?} in ws://{authority}"
        )),
        _ => Ok(()),
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Gpu(index) => write!(f, "gpu:{index}"),
            Self::Ascend(ordinal) => write!(f, "ascend:{ordinal}"),
            Self::AscendSim(0) => f.write_str("ascend-sim"),
            Self::AscendSim(ordinal) => write!(f, "ascend-sim:{ordinal}"),
            Self::Remote { url, index: 0 } => write!(f, "remote:{url}"),
            Self::Remote { url, index } => write!(f, "remote:{url}#{index}"),
        }
    }
}

impl Device {
    /// True for an NPU of this machine, real or simulated.
    pub(crate) fn is_npu(&self) -> bool {
        matches!(self, Self::Ascend(_) | Self::AscendSim(_))
    }

    /// Opens the NPU of this machine that has this name.
    ///
    /// # Errors
    /// If the name is not that of such an NPU, or the NPU cannot be opened; with what to do.
    pub(crate) fn npu(&self) -> Result<Npu, Box<dyn Error>> {
        match self {
            Self::Ascend(ordinal) => {
                Npu::open(u32::from(*ordinal)).map_err(|error| with_remedy(error).into())
            }
            #[cfg(feature = "ascend-sim")]
            Self::AscendSim(ordinal) => Ok(Npu::simulated_device(u32::from(*ordinal))?),
            #[cfg(not(feature = "ascend-sim"))]
            Self::AscendSim(_) => Err(built_without("a simulated device", "ascend-sim").into()),
            Self::Cpu | Self::Gpu(_) | Self::Remote { .. } => Err(format!(
                "{self} is no NPU of this machine; expected --device ascend, ascend:N or ascend-sim"
            )
            .into()),
        }
    }
}

/// A driver's error, with what to do about it.
fn with_remedy(error: AscendError) -> String {
    match error {
        AscendError::Load(_) => format!(
            "{error}. `mrope doctor` lists the missing parts; --device cpu and --device ascend-sim \
             need none of them"
        ),
        other => other.to_string(),
    }
}

/// The message about a feature that this build lacks, with the command that enables it.
pub(crate) fn built_without(what: &str, features: &str) -> String {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    format!(
        "this program was built without {what}: cargo run --release --features {features} -- {} (to \
         install it: cargo install --path crates/rope-cli --features {features})",
        arguments.join(" ")
    )
}

/// The token of a server.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub(crate) struct TokenArgs {
    /// File with the server's token for --device remote, or the hosts' for --hosts [default: the
    /// variable MROPE_TOKEN]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

impl TokenArgs {
    /// Refuses a token for a device that needs none.
    ///
    /// # Errors
    /// If there is a file, and the device is not remote.
    pub(crate) fn expect_used(&self, device: &Device) -> Result<(), String> {
        match (&self.token_file, device) {
            (None, _) | (_, Device::Remote { .. }) => Ok(()),
            (Some(file), _) => Err(format!(
                "--token-file {} is for --device remote:URL or several --hosts, found --device \
                 {device}; leave it out",
                file.display()
            )),
        }
    }
}

/// The devices of a run with a rank for each, open until this is dropped.
pub(crate) struct Devices {
    devices: Vec<BurnDevice>,
    npus: Option<NpuRanks>,
    /// Kept open; one thread closes them.
    _open: Mutex<(Option<ServedNpu>, Vec<Compute>)>,
}

impl Devices {
    /// Opens the devices: all of them NPUs of this machine, or none.
    ///
    /// # Errors
    /// Those of [`Compute::open`]; a device that is named twice, or NPUs beside others.
    pub(crate) fn open(names: &[Device], token: &TokenArgs) -> Result<Self, Box<dyn Error>> {
        for (index, name) in names.iter().enumerate() {
            // The processor may be several ranks, to try that out.
            if *name != Device::Cpu && names[..index].contains(name) {
                return Err(format!("--device {name} is named twice; each is one rank").into());
            }
        }
        let npus = names.iter().filter(|name| name.is_npu()).count();
        if npus == names.len() {
            let npus = ServedNpu::start(names)?;
            return Ok(Self {
                devices: npus.devices(),
                npus: npus.ranks(),
                _open: Mutex::new((Some(npus), Vec::new())),
            });
        }
        if npus > 0 {
            return Err("NPUs do not sum with other devices; name --device of one kind".into());
        }
        let open = |name| Compute::open(name, token);
        let others = names.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            devices: others.iter().map(|one| one.device().clone()).collect(),
            npus: None,
            _open: Mutex::new((None, others)),
        })
    }

    /// The traffic of each NPU's collectives, and true if they add in a fixed order; `None` for
    /// other devices.
    pub(crate) fn traffic(&self) -> Option<(Traffic, bool)> {
        self.npus.as_ref().map(NpuRanks::traffic)
    }

    /// Bytes in use: of the NPU that used most at most so far, of the CPU now.
    pub(crate) fn memory_bytes(&self) -> Option<u64> {
        let is_cpu = self.devices.first() == Some(&BurnDevice::flex());
        match &self.npus {
            Some(npus) => npus.peak_bytes(),
            None => resident_memory().filter(|_| is_cpu),
        }
    }
}

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.devices).finish()
    }
}

impl Team for Devices {
    fn devices(&self) -> &[BurnDevice] {
        &self.devices
    }

    /// NPUs sum by their collectives, others through the memory of the host.
    fn join(&self, rank: &Rank) -> vlm_train::Result<Arc<dyn Collective>> {
        let Some(npus) = &self.npus else {
            return Ok(Arc::new(HostSums(rank.clone())));
        };
        let failed = |error: AscendError| VlmTrainError::Rank {
            rank: rank.rank(),
            cause: error.to_string(),
        };
        let root = match rank.rank() {
            0 => npus.root_info().map_err(failed)?,
            _ => Vec::new(),
        };
        let roots = rank.exchange(root)?;
        let first = rank.rank() - rank.local();
        // One thread joins for all NPUs of the process.
        if rank.local() == 0 {
            npus.join(first, rank.ranks(), &roots[0]).map_err(failed)?;
        }
        rank.exchange(Vec::new())?;
        Ok(npus.collective(first, rank.ranks(), &self.devices))
    }
}

/// A device that models compute on, open until this is dropped.
pub(crate) struct Compute {
    device: BurnDevice,
    npu: Option<ServedNpu>,
}

impl Compute {
    /// Opens a device.
    ///
    /// # Errors
    /// If the device is not there, with what is missing and what to do.
    pub(crate) fn open(device: &Device, token: &TokenArgs) -> Result<Self, Box<dyn Error>> {
        token.expect_used(device)?;
        let device = match device {
            Device::Cpu => BurnDevice::flex(),
            Device::Gpu(index) => gpu::open(*index)?,
            Device::Remote { url, index } => served::connect(url, *index, token)?,
            Device::Ascend(_) | Device::AscendSim(_) => {
                let npu = ServedNpu::start(std::slice::from_ref(device))?;
                return Ok(Self {
                    device: npu.devices()[0].clone(),
                    npu: Some(npu),
                });
            }
        };
        Ok(Self { device, npu: None })
    }

    /// The device, without autodiff.
    pub(crate) fn device(&self) -> &BurnDevice {
        &self.device
    }

    /// The NPU of this process, if it is one.
    pub(crate) fn npu(&self) -> Option<&ServedNpu> {
        self.npu.as_ref()
    }

    /// Starts counting what [`usage`](Self::usage) reports.
    ///
    /// # Errors
    /// Those of the device.
    pub(crate) fn start_counting(&self) -> Result<(), ExecutionError> {
        self.device.sync()?;
        served::reset_elsewhere();
        self.npu()
            .map_or(Ok(()), |npu| npu.reset_peak_memory())
            .map_err(|error| ExecutionError::with_context(error.to_string()))
    }

    /// Bytes in use: of an NPU of this process at most so far, of the CPU now.
    pub(crate) fn memory_bytes(&self) -> Option<u64> {
        match self.npu() {
            Some(npu) => npu.memory().ok().map(|memory| memory.peak_bytes as u64),
            None => resident_memory().filter(|_| self.device == BurnDevice::flex()),
        }
    }

    /// The usage of an NPU of this process since then; nothing for other devices.
    ///
    /// # Errors
    /// Those of the device, also of work whose result was never read.
    pub(crate) fn usage(&self) -> Result<Option<Usage>, ExecutionError> {
        self.device.sync()?;
        let Some(npu) = self.npu() else {
            return Ok(None);
        };
        let memory = npu
            .memory()
            .map_err(|error| ExecutionError::with_context(error.to_string()))?;
        Ok(Some(Usage {
            peak_bytes: memory.peak_bytes,
            fallbacks: served::elsewhere(),
        }))
    }
}

/// The peak memory and the fallbacks of training on an NPU.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Usage {
    /// Most bytes in the device's tensors at once.
    peak_bytes: usize,
    /// Operations that ran elsewhere than on the AI Core.
    fallbacks: Vec<Elsewhere>,
}

/// An operation that ran on the host or on the AI CPU.
#[derive(Clone, Debug, Serialize)]
struct Elsewhere {
    op: &'static str,
    processor: String,
    calls: u64,
    bytes: u64,
}

impl Usage {
    /// The rows of a table: the peak, and a row for each operation or one that says there was none.
    pub(crate) fn rows(&self) -> Vec<(String, String)> {
        let peak = bytes(self.peak_bytes as f64);
        let mut rows = vec![("peak device memory".to_owned(), peak)];
        if self.fallbacks.is_empty() {
            rows.push(("on the host or the AI CPU".to_owned(), "none".to_owned()));
        }
        rows.extend(self.fallbacks.iter().map(|operation| {
            let moved = bytes(operation.bytes as f64);
            (
                format!("on the {}: {}", operation.processor, operation.op),
                format!("{} calls, {moved}", operation.calls),
            )
        }));
        rows
    }
}

/// A device's failure, as a user needs it.
pub(crate) fn explained(error: &ExecutionError) -> String {
    explained_reason(error.reason())
}

/// As [`explained`], of an error's reason.
pub(crate) fn explained_reason(reason: &str) -> String {
    // The words of burn-remote where the connection closed before the answer came.
    if reason.contains("RecvError") || reason.contains("channel closed") {
        return format!(
            "the connection to the device's server is lost: the server was stopped, or an \
             operation ended the session, and then the server's log says why ({reason})"
        );
    }
    reason.to_owned()
}

/// The rotation path of an NPU.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Rotating {
    Kernels,
    Matrix,
    Aclnn,
}

/// The device that rotates.
#[derive(Args, Clone, Debug)]
pub(crate) struct DeviceArgs {
    /// Device: cpu, gpu (the first GPU), gpu:N, ascend (the first NPU), ascend:N, ascend-sim (a
    /// simulated NPU), or, in verify, remote:ws://HOST:PORT (a device of `mrope serve`).
    #[arg(long, default_value = "cpu")]
    device: Device,
    /// Rotation path of an NPU: this project's kernels (the default), matrix (on the cube cores, f16
    /// and bf16), or aclnn (CANN's operators, within their limits).
    #[arg(long, value_enum)]
    path: Option<Rotating>,
    #[command(flatten)]
    token: TokenArgs,
}

impl DeviceArgs {
    /// The rotation path of an NPU.
    pub(crate) fn path(&self) -> ascend::Path {
        match self.path {
            None | Some(Rotating::Kernels) => ascend::Path::Kernels,
            Some(Rotating::Matrix) => ascend::Path::Matrix,
            Some(Rotating::Aclnn) => ascend::Path::Aclnn,
        }
    }

    /// The name of the device.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Opens the device for models.
    ///
    /// # Errors
    /// As [`Compute::open`].
    pub(crate) fn compute(&self) -> Result<Compute, Box<dyn Error>> {
        Compute::open(&self.device, &self.token)
    }

    /// Opens the device for rotations by themselves.
    ///
    /// # Errors
    /// If there is no such NPU, it has no kernels, or a path or token is for another device.
    pub(crate) fn place(&self) -> Result<Place, Box<dyn Error>> {
        self.token.expect_used(&self.device)?;
        let place = match self.device {
            Device::Cpu => Place::Host,
            Device::Gpu(_) => Place::Gpu,
            Device::Remote { .. } => Place::Served,
            Device::Ascend(_) | Device::AscendSim(_) => {
                let npu = self.device.npu()?;
                if self.path() != ascend::Path::Aclnn {
                    // Without kernels every case would fail for the same reason.
                    npu.kernels()?;
                }
                return Ok(Place::Npu(npu));
            }
        };
        if self.path.is_some() {
            return Err(format!(
                "--path chooses the rotation path of an NPU of this machine, and {} is \
                 none; add --device ascend or --device ascend-sim, or leave --path out",
                self.device
            )
            .into());
        }
        Ok(place)
    }
}

/// Where rotations run.
pub(crate) enum Place {
    /// On this machine's processor.
    Host,
    /// On a GPU of this machine.
    Gpu,
    /// On an NPU of this machine.
    Npu(Npu),
    /// On a device of a server.
    Served,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        for text in [
            "cpu",
            "gpu:1",
            "ascend:3",
            "ascend-sim",
            "ascend-sim:2",
            "remote:ws://10.0.0.7:3000",
            "remote:ws://host:3000#2",
            "remote:ws://[::1]:65535",
            "remote:ws://[::1]",
            "remote:ws://host",
        ] {
            let device: Device = text.parse().expect(text);
            assert_eq!(device.to_string(), text);
        }
        assert_eq!("gpu".parse(), Ok(Device::Gpu(0)));
        assert_eq!("ascend".parse(), Ok(Device::Ascend(0)));
        for text in [
            "tpu",
            "gpu:x",
            "ascend:x",
            "ascend:-1",
            "remote:",
            "remote:http://host",
            "remote:ws://host#x",
            "remote:ws://host#4294967296",
        ] {
            let error = Device::from_str(text).expect_err(text);
            assert!(error.contains(EXPECTED) && error.contains(text), "{error}");
        }
        for port in [
            "65536",
            "99999",
            "0",
            "-1",
            "",
            "3000x",
            "18446744073709551616",
        ] {
            for host in ["host", "[::1]"] {
                for end in ["", "/", "#1", "/path:3000"] {
                    let text = format!("remote:ws://{host}:{port}{end}");
                    let error = Device::from_str(&text).expect_err(&text);
                    let found = format!("from 1 to 65535, found {port:?}");
                    assert!(error.contains(&found), "{error}");
                }
            }
        }
    }
}

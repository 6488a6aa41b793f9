//! Devices that burn-remote serves: this machine's NPUs to models, and those of other machines.

use std::env::VarError;
use std::error::Error;
use std::fs::File;
use std::hash::{BuildHasher as _, RandomState};
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::remote::{ConnectError, RemoteHost};
use burn::tensor::distributed::{ReduceOperation, all_reduce};
use burn::tensor::{Device as BurnDevice, Tensor};
use burn_ascend::serve::Token;
use burn_ascend::{AscendDevice, AscendHost, Ranks, fallbacks, reset_fallbacks};
use plain_files::{Cause, FileError};
use rope_ascend::AscendError;
use rope_ascend::safe::{MemoryUse, RootInfo, Traffic};
use vlm_train::{Begun, Collective};

use super::{Device, Elsewhere, TokenArgs, with_remedy};
use crate::stdio::note_if_slow;

/// Environment variable with the token of a server.
pub(crate) const TOKEN_VARIABLE: &str = "MROPE_TOKEN";

/// The time for which a client tries again if the server closes its connections, and the longest
/// time between two tries.
const CLOSED: Duration = Duration::from_secs(20);
const LONGEST_WAIT: Duration = Duration::from_millis(500);

/// NPUs of this machine, served to this process until this is dropped.
pub(crate) struct ServedNpu(AscendHost);

impl ServedNpu {
    /// # Errors
    /// As [`open`].
    pub(super) fn start(devices: &[Device]) -> Result<Self, Box<dyn Error>> {
        let npus = devices.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        Ok(Self(AscendHost::start(&npus)?))
    }

    /// The devices, without autodiff.
    pub(super) fn devices(&self) -> Vec<BurnDevice> {
        self.0.devices().to_vec()
    }

    /// The same NPUs as ranks.
    pub(super) fn ranks(&self) -> Option<NpuRanks> {
        Some(NpuRanks(self.0.npus().to_vec()))
    }

    /// Memory of the first device's tensors.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn memory(&self) -> Result<MemoryUse, AscendError> {
        self.0.npus()[0].memory()
    }

    /// Sets the peak of [`memory`](Self::memory) to what is in use now.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn reset_peak_memory(&self) -> Result<(), AscendError> {
        self.0.npus()[0].reset_peak_memory()
    }
}

/// NPUs of this machine as ranks of a run.
#[derive(Clone, Debug)]
pub(crate) struct NpuRanks(Vec<AscendDevice>);

impl NpuRanks {
    /// By what the ranks of other processes find the first device, which is to be rank 0.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn root_info(&self) -> Result<Vec<u8>, AscendError> {
        Ok(self.0[0].root_info()?.to_bytes())
    }

    /// The largest peak of the devices' memory.
    pub(crate) fn peak_bytes(&self) -> Option<u64> {
        let peaks = self.0.iter().filter_map(|npu| npu.memory().ok());
        peaks.map(|memory| memory.peak_bytes as u64).max()
    }

    /// Makes the devices ranks from `first` on, of `all`; returns when all have come.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn join(&self, first: usize, all: usize, root: &[u8]) -> Result<(), AscendError> {
        self.ranks(first, all).join(&RootInfo::from_bytes(root)?)
    }

    fn ranks(&self, first: usize, all: usize) -> Ranks<'_> {
        Ranks {
            npus: &self.0,
            first: first as u32,
            all: all as u32,
        }
    }

    /// The operations that they compute with the others once they have joined, by their burn
    /// devices without autodiff.
    pub(crate) fn collective(
        &self,
        first: usize,
        all: usize,
        devices: &[BurnDevice],
    ) -> Arc<dyn Collective> {
        Arc::new(JoinedNpus {
            npus: self.clone(),
            first,
            all,
            devices: devices.to_vec(),
        })
    }

    /// The traffic of the first device's collectives, and whether they add in a fixed order.
    pub(crate) fn traffic(&self) -> (Traffic, bool) {
        let npu = self.0[0];
        (npu.traffic(), npu.is_deterministic())
    }
}

fn begun(begun: rope_ascend::Result<burn_ascend::InFlight>) -> Result<Begun, String> {
    let begun = begun.map_err(|error| error.to_string())?;
    Ok(Begun::new(|| Ok(begun.wait())))
}

/// NPUs that have joined the other ranks, and compute together with them.
#[derive(Debug)]
struct JoinedNpus {
    npus: NpuRanks,
    /// The rank of the first, and the number of all.
    first: usize,
    all: usize,
    devices: Vec<BurnDevice>,
}

impl Collective for JoinedNpus {
    fn all_reduce(&self, x: Tensor<1>) -> Result<Tensor<1>, String> {
        Ok(all_reduce(x, ReduceOperation::Sum, self.devices.clone()).resolve())
    }

    fn begin_scatter(&self, x: Tensor<1>) -> Result<Begun, String> {
        let ranks = self.npus.ranks(self.first, self.all);
        begun(ranks.begin_reduce_scatter(x))
    }

    fn begin_gather(&self, x: Tensor<1>) -> Result<Begun, String> {
        let ranks = self.npus.ranks(self.first, self.all);
        begun(ranks.begin_all_gather(x))
    }

    fn all_to_all(&self, x: Tensor<1>, counts: [&[usize]; 2]) -> Result<Tensor<1>, String> {
        let ranks = self.npus.ranks(self.first, self.all);
        ranks
            .all_to_all(x, counts)
            .map_err(|error| error.to_string())
    }
}

/// Opens the NPU of this machine that has this name.
///
/// # Errors
/// As [`Device::npu`].
pub(crate) fn open(device: &Device) -> Result<AscendDevice, Box<dyn Error>> {
    let npu = match device {
        Device::Ascend(ordinal) => AscendDevice::new(*ordinal),
        #[cfg(feature = "ascend-sim")]
        Device::AscendSim(ordinal) => AscendDevice::simulated(*ordinal),
        // The error says what was expected.
        _ => {
            return Err(device.npu().err().unwrap_or_else(|| "no NPU".into()));
        }
    };
    npu.open().map_err(with_remedy)?;
    Ok(npu)
}

/// A device that `mrope serve` serves.
///
/// # Errors
/// If there is no token, or the server does not take the connection.
pub(super) fn connect(
    url: &str,
    index: u32,
    token: &TokenArgs,
) -> Result<BurnDevice, Box<dyn Error>> {
    let host = token.token(url)?.host(url);
    // An address without a server is tried for some 15 seconds.
    let connecting = note_if_slow(format!("connecting to {url} ..."));
    let device = init(&host, index as usize);
    drop(connecting);
    Ok(device.map_err(|error| {
        let reason = error.to_string();
        let hint = if reason.contains("hosts only") {
            format!("; found #{index}, and devices count from #0")
        } else if reason.contains("rejected the credential") {
            format!("; {} is not the server's token", token.source())
        } else {
            String::new()
        };
        format!("{url}: {reason}{hint}")
    })?)
}

/// Connects, and again if the server closes the connection: one that many strangers call closes
/// some that have not yet shown the token.
fn init(host: &RemoteHost, index: usize) -> Result<BurnDevice, ConnectError> {
    let started = Instant::now();
    let mut wait = Duration::from_millis(20);
    loop {
        let options = BurnDevice::remote_options(host).device_index(index);
        match options.init() {
            Err(error) if is_closed(&error) && started.elapsed() < CLOSED => {
                // Clients that were closed together do not come back together.
                let part = RandomState::new().hash_one(wait) % 1000;
                std::thread::sleep(wait / 2 + wait.mul_f64(part as f64 / 1000.0));
                wait = (wait * 2).min(LONGEST_WAIT);
            }
            device => return device,
        }
    }
}

/// True if the server took the connection, and closed it without an answer.
fn is_closed(error: &ConnectError) -> bool {
    // The words of the system, of tungstenite and of burn-remote.
    const CLOSED: [&str; 6] = [
        "reset by peer",
        "Broken pipe",
        "Handshake not finished",
        "without closing handshake",
        "closed",
        "aborted",
    ];
    let (ConnectError::Unreachable { reason } | ConnectError::Handshake { reason }) = error else {
        return false;
    };
    CLOSED.iter().any(|words| reason.contains(words))
}

/// The operations that ran on the host or on the AI CPU, since the last [`reset_elsewhere`].
pub(super) fn elsewhere() -> Vec<Elsewhere> {
    let operations = fallbacks().into_iter();
    let operations = operations.map(|operation| Elsewhere {
        op: operation.op,
        processor: operation.processor.to_string(),
        calls: operation.calls,
        bytes: operation.bytes,
    });
    operations.collect()
}

/// Starts counting anew.
pub(super) fn reset_elsewhere() {
    reset_fallbacks();
}

impl TokenArgs {
    /// The place of the token, for a message.
    fn source(&self) -> String {
        match &self.token_file {
            Some(path) => format!("the token in {}", path.display()),
            None => TOKEN_VARIABLE.to_owned(),
        }
    }

    fn token(&self, url: &str) -> Result<Token, Box<dyn Error>> {
        if let Some(path) = &self.token_file {
            return read_token(path);
        }
        Ok(token_of_variable()?.ok_or_else(|| {
            format!(
                "{url} requires the token that its `mrope serve` wrote: name the file with \
                 --token-file, or set {TOKEN_VARIABLE} to its content"
            )
        })?)
    }

    /// The token that all hosts of a run share.
    ///
    /// # Errors
    /// If there is no token, others may read it, or it is too short.
    pub(crate) fn shared_token(&self) -> Result<Vec<u8>, Box<dyn Error>> {
        let (token, source) = match &self.token_file {
            Some(path) => {
                let source = format!("the token file {}", path.display());
                (own_token(path)?, source)
            }
            None => {
                let token = token_of_variable()?.ok_or_else(|| {
                    format!(
                        "--hosts needs --token-file FILE, of the same content on all hosts, or the \
                         content in {TOKEN_VARIABLE}"
                    )
                })?;
                (token, TOKEN_VARIABLE.to_owned())
            }
        };
        let found = token.reveal().chars().count();
        if found < SHORTEST_TOKEN {
            return Err(format!(
                "{source} holds a token of {found} characters, expected at least {SHORTEST_TOKEN}"
            )
            .into());
        }
        Ok(token.reveal().as_bytes().to_vec())
    }
}

/// The token in the environment, if the variable is set.
///
/// # Errors
/// If it is empty or no text.
pub(crate) fn token_of_variable() -> Result<Option<Token>, String> {
    let text = match std::env::var(TOKEN_VARIABLE) {
        Ok(text) => Some(text),
        Err(VarError::NotPresent) => None,
        Err(VarError::NotUnicode(_)) => {
            return Err(format!(
                "{TOKEN_VARIABLE} is set, but is no UTF-8 text; set it to the content of the \
                 server's token file"
            ));
        }
    };
    let token = text.map(|text| Token::new(&text)).transpose();
    token.map_err(|_| format!("{TOKEN_VARIABLE} is set, but empty"))
}

/// Fewer characters can be guessed. A new token has 64.
pub(crate) const SHORTEST_TOKEN: usize = 16;

/// The most bytes of a token and the white space around it: more do not fit into the first message
/// of a client, which the server limits.
const TOKEN_BYTES: u64 = 4096;

/// The token in a file.
///
/// # Errors
/// If the file is none, cannot be read, is empty or holds more than a token.
pub(crate) fn read_token(path: &Path) -> Result<Token, Box<dyn Error>> {
    token_of(plain_files::open(path).map_err(unopened)?, path)
}

/// The message for a token file that cannot be opened.
fn unopened(error: FileError) -> String {
    let (path, cause) = (error.path.display(), error.cause);
    match cause {
        Cause::Irregular => format!(
            "{path} is not a regular file; expected a file with a token, or the path of one to make"
        ),
        cause => format!("the token file {path}: {cause}"),
    }
}

/// As [`read_token`], of a file that is open.
fn token_of(file: File, path: &Path) -> Result<Token, Box<dyn Error>> {
    let wrong = |error| format!("the token file {}: {error}", path.display());
    let mut text = String::new();
    let read = file.take(TOKEN_BYTES + 1).read_to_string(&mut text);
    if read.map_err(wrong)? as u64 > TOKEN_BYTES {
        return Err(format!(
            "the token file {} holds more than {TOKEN_BYTES} bytes, expected a token of 16 to \
             {TOKEN_BYTES} characters",
            path.display()
        )
        .into());
    }
    Token::new(&text).map_err(|_| format!("the token file {} is empty", path.display()).into())
}

/// The token in a file of this user that nobody else can read. The file is opened once: what is
/// checked is what is read.
pub(crate) fn own_token(path: &Path) -> Result<Token, Box<dyn Error>> {
    let file = plain_files::open_no_link(path).map_err(|error| {
        let link = if path.is_symlink() {
            " (it is a link; name the file itself)"
        } else {
            ""
        };
        format!("{}{link}", unopened(error))
    })?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt as _;
        let found = file.metadata()?;
        let (path, user) = (path.display(), rustix::process::geteuid().as_raw());
        if found.uid() != user {
            return Err(format!(
                "the token file {path} belongs to user {}, not to {user}, who runs this: name a \
                 --token-file of your own",
                found.uid()
            )
            .into());
        }
        if found.mode() & 0o077 != 0 {
            return Err(format!(
                "others may read the token file {path} (mode {:o}): chmod 600 {path}",
                found.mode() & 0o777
            )
            .into());
        }
    }
    token_of(file, path)
}

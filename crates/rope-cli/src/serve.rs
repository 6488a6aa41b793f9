//! `mrope serve`: this machine's device for programs on other machines.

use std::error::Error;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use burn::backend::flex::{Flex, FlexDevice};
use burn::backend::ir::BackendIr;
use burn_ascend::serve::{self, Token};
use burn_ascend::{Ascend, AscendDevice, AscendError, fallbacks, operations};
use burn_attention::remote::ServedOps;
use clap::Args;
use rope_burn::NormRotaryOps;

use crate::device::Device;
use crate::device::served::{self, SHORTEST_TOKEN, TOKEN_VARIABLE, own_token, token_of_variable};
use crate::stdio::stdout;

const DEFAULT_TOKEN_FILE: &str = "mrope.token";

const EXAMPLES: &str = "\
On the machine with the NPU:
  mrope serve --device ascend:0 --bind 192.168.1.7:3000 --token-file npu.token
On a workstation that has a copy of npu.token:
  mrope train --device remote:ws://192.168.1.7:3000 --token-file npu.token
  mrope verify tests/fixtures/models --device remote:ws://192.168.1.7:3000 --token-file npu.token
In a burn program:
  let host = RemoteHost::websocket(\"ws://192.168.1.7:3000\").with_credential(token);
  let device = Device::remote_options(&host).init()?.autodiff();

Server and client must be of the same release. The token grants full use of the
device: its data, its memory, and ending the server.
The connection is not encrypted: whoever can read the network can read the
token. Across a shared network, use a tunnel and the default address:
  ssh -L 3000:127.0.0.1:3000 npu-host
If a device fails, the server ends with the error, and a supervisor can start it
again. Other users of this machine cannot use the device without the token.
Where the system cannot filter sockets (other than Linux, or Linux that forbids
it), they can fill the server's memory through its inner port on 127.0.0.1:
serve only among users you trust. RUST_LOG=off silences burn's log.";

/// Serve this machine's device to programs on other machines
///
/// Tensors stay in the device's memory: a client sends operations, and receives only the tensors
/// that it reads. Its program is the same as for a local device: `mrope train`, `mrope verify`, or
/// any burn program with a remote device. A client must present the server's token. Stop the server
/// with Ctrl+C.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ServeArgs {
    /// Devices to serve: ascend (the first NPU), ascend:N, ascend-sim (a simulated NPU), or cpu. A
    /// client chooses one of several by index: remote:URL#1 is the second.
    #[arg(long, default_value = "ascend")]
    device: Vec<Device>,
    /// Address to listen on. Other machines cannot reach 127.0.0.1; port 0 selects a free port.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:3000")]
    bind: SocketAddr,
    /// File with the token. If missing, it is created with a new token, readable only by its owner
    /// [default: the variable MROPE_TOKEN, else mrope.token]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

/// Serves until the process is asked to stop.
///
/// # Errors
/// If a device is not there or fails, the address is in use, or there is no token.
pub(crate) fn run(args: &ServeArgs) -> Result<(), Box<dyn Error>> {
    match &args.device[..] {
        [Device::Cpu] => serve::<Flex>(args, vec![FlexDevice], |_| None),
        devices => {
            let npus = devices.iter().map(served::open);
            serve::<Ascend>(args, npus.collect::<Result<_, _>>()?, AscendDevice::failure)?;
            let moved = fallbacks();
            let mut out = stdout();
            if !moved.is_empty() {
                writeln!(out, "operations that ran on the host or the AI CPU:")?;
            }
            for fallback in moved {
                let (processor, calls, bytes) =
                    (fallback.processor, fallback.calls, fallback.bytes);
                let op = fallback.op;
                writeln!(
                    out,
                    "  {op:<32} {processor:<6} {calls} calls, {bytes} bytes"
                )?;
            }
            Ok(())
        }
    }
}

fn serve<B: BackendIr + NormRotaryOps + ServedOps>(
    args: &ServeArgs,
    devices: Vec<B::Device>,
    failure: impl Fn(&B::Device) -> Option<AscendError>,
) -> Result<(), Box<dyn Error>> {
    let (token, file) = args.token()?;
    let listener = TcpListener::bind(args.bind).map_err(|error| {
        let hint = match error.kind() {
            ErrorKind::AddrInUse => "; another program listens there: choose another --bind",
            ErrorKind::AddrNotAvailable => "; --bind takes an address of this machine",
            _ => "",
        };
        format!("cannot listen on {}: {error}{hint}", args.bind)
    })?;
    let url = format!("ws://{}", listener.local_addr()?);
    let names: Vec<String> = args.device.iter().map(Device::to_string).collect();
    let ready = || {
        let mut out = stdout();
        writeln!(out, "serving  {} at {url}", names.join(", "))?;
        let option = match file.map(Path::display) {
            Some(file) => {
                writeln!(out, "token    in {file}")?;
                format!(" --token-file {file}")
            }
            None => {
                writeln!(out, "token    from {TOKEN_VARIABLE}")?;
                String::new()
            }
        };
        writeln!(out, "connect  mrope train --device remote:{url}{option}")?;
        if !args.bind.ip().is_loopback() {
            writeln!(
                out,
                "note     the connection is not encrypted; see mrope serve --help"
            )?;
        }
        writeln!(out, "stop     Ctrl+C")?;
        out.flush()
    };
    let operations = operations::<B>();
    Ok(serve::serve(
        devices, operations, &token, listener, failure, ready,
    )?)
}

impl ServeArgs {
    /// The token, and its file, if it is not that of the variable.
    fn token(&self) -> Result<(Token, Option<&Path>), Box<dyn Error>> {
        if self.token_file.is_none()
            && let Some(token) = token_of_variable()?
        {
            expect_long(&token, TOKEN_VARIABLE)?;
            return Ok((token, None));
        }
        if self.token_file.is_none() && !self.bind.ip().is_loopback() {
            return Err(format!(
                "{} is open to other machines: name a --token-file, or set {TOKEN_VARIABLE}",
                self.bind
            )
            .into());
        }
        let path = self
            .token_file
            .as_deref()
            .unwrap_or(Path::new(DEFAULT_TOKEN_FILE));
        Ok((token_in(path)?, Some(path)))
    }
}

/// The token in a file. A missing file is created with a new token.
fn token_in(path: &Path) -> Result<Token, Box<dyn Error>> {
    let cannot_write = |error| format!("cannot write the token file {}: {error}", path.display());
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    match options.open(path) {
        Ok(mut file) => {
            let written = Token::random().map_err(Box::<dyn Error>::from);
            let written = written.and_then(|token| {
                writeln!(file, "{}", token.reveal()).map_err(cannot_write)?;
                Ok(token)
            });
            if written.is_err() {
                // Half of a token would be the token of the next run.
                std::fs::remove_file(path).ok();
            }
            written
        }
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            let token = own_token(path)?;
            expect_long(&token, &format!("the token file {}", path.display()))?;
            Ok(token)
        }
        Err(error) => Err(cannot_write(error).into()),
    }
}

fn expect_long(token: &Token, source: &str) -> Result<(), String> {
    let found = token.reveal().chars().count();
    if found < SHORTEST_TOKEN {
        return Err(format!(
            "{source} holds a token of {found} characters, expected at least {SHORTEST_TOKEN}; \
             name a --token-file that does not exist yet, to create a new token"
        ));
    }
    Ok(())
}

//! Serves a backend's devices over a socket with burn-remote.

mod guard;

use std::error::Error;
use std::io::IsTerminal as _;
use std::net::TcpListener;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use std::{fmt, io};

use burn::backend::ir::BackendIr;
use burn::remote::{ConnectError, RemoteHost};
use burn::tensor::Device;
use burn_remote::server::{
    BackendServer, CustomOpRegistry, EmptyToken, TokenAuthorizer, WebSocketTransport,
};
use tokio::runtime::{Builder, Handle, Runtime, RuntimeFlavor};
use tokio::task::JoinHandle;
use tracing::field::Field;
use tracing::{Event, Level, Metadata};
use tracing_subscriber::filter::{FilterExt as _, LevelFilter};
use tracing_subscriber::layer::{Context, Filter, SubscriberExt as _};
use tracing_subscriber::{EnvFilter, Layer as _, fmt::layer, registry};

use guard::{Door, Inner, listen_closed};

/// Runs `work` that may wait for a device, such as a read after a sum over several devices. On a
/// server thread, it lets other threads serve the devices that it waits for.
pub fn wait<T>(work: impl FnOnce() -> T) -> T {
    let server = Handle::try_current().ok();
    match server.map(|server| server.runtime_flavor()) {
        Some(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        _ => work(),
    }
}

/// The time a server waits for its sessions to end: longer than any operation, but short enough for
/// a user with an unresponsive device.
const PATIENCE: Duration = Duration::from_secs(10);
/// A custom operation that no client sends; its handler lives as long as any session.
const ALIVE: &str = "served.alive";
/// The part of burn-remote's warning that names a client's departure.
const DEPARTURE: &str = "without closing handshake";
/// The crate that logs the address of the inner port.
const INNER: &str = "burn_communication";
/// The interval at which a server checks its devices.
const CHECKS: Duration = Duration::from_millis(500);

/// The reason why devices are not served, or no longer served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The socket could not be opened, or the threads to serve it not started.
    #[error("cannot serve on 127.0.0.1: {0}")]
    Socket(#[from] io::Error),
    /// The system provided no random numbers for a token.
    #[error("no random numbers for a token: {0}")]
    Randomness(String),
    /// A failed device, which must be reopened.
    #[error("the device failed; restart the server: {0}")]
    Failed(#[source] Box<dyn Error + Send + Sync>),
    /// An empty token.
    #[error("the token is empty")]
    Token(#[from] EmptyToken),
    /// The server rejected the connection.
    #[error(transparent)]
    Connect(#[from] ConnectError),
}

/// The secret that a client must present to a server. Debug output does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// Creates an unguessable token: 32 random bytes from the system, in hexadecimal.
    ///
    /// # Errors
    /// If the system provides no random numbers.
    pub fn random() -> Result<Self, ServeError> {
        let mut bytes = [0_u8; 32];
        getrandom::fill(&mut bytes).map_err(|error| ServeError::Randomness(error.to_string()))?;
        let digits = bytes.iter().map(|byte| format!("{byte:02x}"));
        Ok(Self(digits.collect()))
    }

    /// Creates a token from text, such as the contents of a file, without surrounding white space.
    ///
    /// # Errors
    /// If the text is empty.
    pub fn new(text: &str) -> Result<Self, EmptyToken> {
        match text.trim() {
            "" => Err(EmptyToken),
            text => Ok(Self(text.to_owned())),
        }
    }

    /// Returns the token in plain text, for a file readable only by its owner.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Returns the server at `url`, accessed with the token.
    pub fn host(&self, url: &str) -> RemoteHost {
        RemoteHost::websocket(url).with_credential(self.0.as_str())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Serves `devices` on `listener` to clients that present `token`, until Ctrl+C or SIGTERM. Calls
/// `ready` once it serves.
///
/// A connection without the token costs a few KiB for a few seconds and receives no information.
/// `operations` are custom operations that clients may run besides burn's. If `failure` reports a
/// failed device, the server ends, since a restart reopens the device.
///
/// # Errors
/// [`ServeError::Socket`], also with the error of `ready`; [`ServeError::Token`] if the token is
/// not a valid [`Token`]; [`ServeError::Failed`].
pub fn serve<B: BackendIr, E: Error + Send + Sync + 'static>(
    devices: impl IntoIterator<Item = B::Device>,
    operations: CustomOpRegistry<B>,
    token: &Token,
    listener: TcpListener,
    failure: impl Fn(&B::Device) -> Option<E>,
    ready: impl FnOnce() -> io::Result<()>,
) -> Result<(), ServeError> {
    log();
    listener.set_nonblocking(true)?;
    let devices: Vec<_> = devices.into_iter().collect();
    let (sessions, inner) = Sessions::start(devices.clone(), operations, token)?;
    sessions.threads.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let stopped = asked_to_stop()?;
        ready()?;
        let failed = async {
            loop {
                tokio::time::sleep(CHECKS).await;
                if let Some(error) = devices.iter().find_map(&failure) {
                    return error;
                }
            }
        };
        tokio::select! {
            () = guard::pass(listener, inner, |_, _| true) => Ok(()),
            () = stopped => Ok(()),
            error = failed => Err(ServeError::Failed(error.into())),
        }
    })
}

/// Logs like burn-remote's own server, by `RUST_LOG`, except the address of the inner port, through
/// which clients could bypass the guard.
fn log() {
    let quiet = || EnvFilter::new("info,wgpu=warn");
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| quiet());
    // Colours are for terminals: in a file their codes are noise.
    let lines = layer().with_ansi(io::stdout().is_terminal());
    let lines = registry().with(lines.with_filter(filter.and(Hidden)));
    // A process with an existing logger keeps it.
    let _other = tracing_subscriber::util::SubscriberInitExt::try_init(lines);
}

/// Hides the address of the inner port, whatever `RUST_LOG` says, and burn-remote's warning about a
/// client that left without WebSocket's closing handshake. Each program that ends leaves this way,
/// and the guard logs it.
struct Hidden;

impl<S> Filter<S> for Hidden {
    fn enabled(&self, metadata: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        *metadata.level() <= Level::WARN || !metadata.target().starts_with(INNER)
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        let mut is_departure = false;
        event.record(&mut |field: &Field, value: &dyn fmt::Debug| {
            is_departure |= field.name() == "message" && format!("{value:?}").contains(DEPARTURE);
        });
        !is_departure
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::TRACE)
    }
}

/// Handles the signals from now on; the future completes at the first one.
#[cfg(unix)]
fn asked_to_stop() -> io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

#[cfg(windows)]
fn asked_to_stop() -> io::Result<impl Future<Output = ()>> {
    let mut interrupt = tokio::signal::windows::ctrl_c()?;
    Ok(async move {
        interrupt.recv().await;
    })
}

/// A server in this process, on 127.0.0.1 at a port chosen by the system. It serves on separate
/// threads until dropped. Where the system can filter sockets, the port is closed but for the moments
/// of [`connect`](Self::connect).
#[derive(Debug)]
pub struct Server {
    door: Door,
    token: Token,
    /// Ended by their drop.
    _sessions: Sessions,
}

impl Server {
    /// Serves `devices` to this process, with a token that is never stored. `operations` are custom
    /// operations that clients may run besides burn's.
    ///
    /// # Errors
    /// [`ServeError::Socket`], [`ServeError::Randomness`].
    pub fn start<B: BackendIr>(
        devices: impl IntoIterator<Item = B::Device>,
        operations: CustomOpRegistry<B>,
    ) -> Result<Self, ServeError> {
        let token = Token::random()?;
        let listener = listen_closed()?;
        let door = Door::new(&listener)?;
        let (sessions, inner) = Sessions::start(devices, operations, &token)?;
        // burn's client chooses its port, which no filter can know before: the guard takes it in, and
        // nobody who connects in the same moment.
        listener.set_nonblocking(true)?;
        let listener = {
            let _of_runtime = sessions.threads.enter();
            tokio::net::TcpListener::from_std(listener)?
        };
        sessions
            .threads
            .spawn(guard::pass(listener, inner, guard::is_own));
        Ok(Self {
            door,
            token,
            _sessions: sessions,
        })
    }

    /// Connects to device `index` of the server, as a burn device.
    ///
    /// # Errors
    /// [`ServeError::Connect`].
    pub fn connect(&self, index: usize) -> Result<Device, ServeError> {
        let host = self.token.host(&self.url());
        let options = Device::remote_options(&host).device_index(index);
        let _of_its_threads = Slack::of_new_threads();
        Ok(self.door.open(|| options.init())?)
    }

    fn url(&self) -> String {
        format!("ws://{}", self.door.address())
    }
}

/// Lets the threads that this one starts wake up late from a timed wait, until dropped. A client's
/// thread waits for work, which wakes it at once, but looks around every 150 us, and ends only with
/// the process: each idle device would cost some 2 % of a core (`PARK_STEP_SERVER` of CubeCL).
struct Slack {
    #[cfg(target_os = "linux")]
    usual: libc::c_int,
}

impl Slack {
    #[cfg(target_os = "linux")]
    #[allow(unsafe_code, reason = "calls of C")]
    fn of_new_threads() -> Self {
        const NANOSECONDS: libc::c_ulong = 50_000_000;
        // SAFETY: neither request has a pointer; they read and set a number of this thread.
        let usual = unsafe { libc::prctl(libc::PR_GET_TIMERSLACK) };
        // SAFETY: as above.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, NANOSECONDS) };
        Self { usual }
    }

    #[cfg(not(target_os = "linux"))]
    fn of_new_threads() -> Self {
        Self {}
    }
}

#[cfg(target_os = "linux")]
impl Drop for Slack {
    #[allow(unsafe_code, reason = "a call of C")]
    fn drop(&mut self) {
        // Of a thread whose slack could not be read, the usual one: 0 stands for it.
        let usual = libc::c_ulong::try_from(self.usual).unwrap_or(0);
        // SAFETY: the request has no pointer; it sets a number of this thread.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, usual) };
    }
}

/// burn-remote's server with its sessions, on separate threads until dropped.
#[derive(Debug)]
struct Sessions {
    serving: JoinHandle<()>,
    threads: Handle,
    runtime: Option<Runtime>,
    /// Closed when the last session has dropped its tensors.
    ended: Receiver<()>,
}

impl Sessions {
    fn start<B: BackendIr>(
        devices: impl IntoIterator<Item = B::Device>,
        mut operations: CustomOpRegistry<B>,
        token: &Token,
    ) -> Result<(Self, Inner), ServeError> {
        let listener = listen_closed()?;
        let inner = Inner::new(&listener)?;
        let (alive, ended) = channel::<()>();
        operations.register(ALIVE, move |_, _, _| {
            let _held = &alive;
        });
        let server = BackendServer::<B>::new(devices)
            .with_authorizer(TokenAuthorizer::new(token.reveal())?)
            .with_custom_ops(operations);
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("burn-served")
            .enable_all()
            .build()?;
        let transport = WebSocketTransport::from_listener(listener);
        let serving = server.serve_async(transport);
        let serving = runtime.spawn(async move {
            // Clients notice from their connections that the server stopped.
            let _stopped = serving.await;
        });
        let sessions = Self {
            serving,
            threads: runtime.handle().clone(),
            runtime: Some(runtime),
            ended,
        };
        Ok((sessions, inner))
    }
}

impl Drop for Sessions {
    /// Ends the sessions and waits, within a limit, until they have dropped their tensors: an
    /// unresponsive device must not block the process.
    fn drop(&mut self) {
        self.serving.abort();
        let _closed_or_late = self.ended.recv_timeout(PATIENCE);
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::flex::{Flex, FlexDevice};
    use burn::tensor::Tensor;

    #[test]
    fn only_the_token_opens_a_server_and_nothing_shows_it() {
        let server =
            Server::start::<Flex>([FlexDevice], CustomOpRegistry::new()).expect("it starts");
        let stranger = Token::new("guess").expect("not empty").host(&server.url());
        let options = Device::remote_options(&stranger);
        let refused = server.door.open(|| options.init());
        assert!(
            matches!(refused, Err(ConnectError::Unauthorized)),
            "{refused:?}"
        );
        let address = server.door.address();
        assert!(address.ip().is_loopback(), "{address}");
        assert!(!format!("{server:?}").contains(server.token.reveal()));
        let device = server.connect(0).expect("it answers");
        let sum = Tensor::<1>::from_data([1.0, 2.0], &device).sum();
        assert_eq!(sum.into_scalar::<f32>(), 3.0);
    }

    /// Also in the moment when this process connects.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_server_for_this_process_answers_no_other() {
        let server =
            Server::start::<Flex>([FlexDevice], CustomOpRegistry::new()).expect("it starts");
        let port = server.door.address().port();
        let ask = format!(
            "exec 3<>/dev/tcp/127.0.0.1/{port} && printf 'GET / HTTP/1.1\\r\\n\\r\\n' >&3 && cat <&3"
        );
        let answer = || {
            let mut other = std::process::Command::new("timeout");
            let asked = other.args(["2", "bash", "-c", &ask]).output();
            asked.expect("bash is there").stdout
        };
        assert_eq!(answer(), b"");
        assert_eq!(server.door.open(answer), b"");
        server.connect(0).expect("it answers");
        assert_eq!(answer(), b"");
    }

    #[test]
    fn a_dropped_server_has_ended_its_sessions() {
        let server =
            Server::start::<Flex>([FlexDevice], CustomOpRegistry::new()).expect("it starts");
        let device = server.connect(0).expect("it answers");
        let x = Tensor::<1>::from_data([1.0, 2.0], &device);
        x.clone().into_data();
        let started = std::time::Instant::now();
        drop(server);
        assert!(started.elapsed() < PATIENCE / 2, "{:?}", started.elapsed());
        (x * 2.0).try_into_data().expect_err("nobody is there");
    }

    /// The waits of each client's thread so far.
    #[cfg(target_os = "linux")]
    #[allow(clippy::disallowed_methods, reason = "files of Linux")]
    fn waits() -> std::collections::BTreeMap<std::path::PathBuf, u64> {
        let threads = std::fs::read_dir("/proc/self/task").expect("Linux lists its threads");
        let counted = |thread: std::io::Result<std::fs::DirEntry>| {
            let path = thread.expect("listed").path().join("status");
            // A thread of another test may end.
            let status = std::fs::read_to_string(&path).ok()?;
            let line = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
            let is_client = line("Name:\tDSD-").is_some();
            let waits = line("voluntary_ctxt_switches:")?.trim().parse().ok()?;
            is_client.then_some((path, waits))
        };
        threads.filter_map(counted).collect()
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn an_idle_device_wakes_its_thread_seldom() {
        let server =
            Server::start::<Flex>([FlexDevice], CustomOpRegistry::new()).expect("it starts");
        let _device = server.connect(0).expect("it answers");
        let before = waits();
        std::thread::sleep(Duration::from_millis(500));
        let after = waits();
        // Devices of other tests may be at work.
        let least = before
            .iter()
            .filter_map(|(path, waits)| Some(after.get(path)? - waits));
        let least = least.min().expect("the device has a thread");
        assert!(least < 100, "{least} times in half a second");
    }

    #[test]
    fn tokens_differ_and_are_not_empty() {
        let [a, b] = [(); 2].map(|()| Token::random().expect("randomness"));
        assert!(a != b && a.reveal().len() == 64, "{} {}", a.0, b.0);
        assert_eq!(Token::new(" a\n").expect("a token").reveal(), "a");
        assert!(Token::new(" \n").is_err());
    }
}

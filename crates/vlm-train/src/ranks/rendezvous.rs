//! The rendezvous of processes on several hosts: a [server](super::server) in the process of host 0,
//! to which each process connects. It carries root infos, numbers and causes, but no tensors.
//!
//! Both sides prove that they know the token, and each later frame has an authentication tag.
//! Frames are not encrypted.

use std::io::{Error as IoError, ErrorKind};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};

use super::frame::{Seal, TAG, is_equal, read_plain, tag, write_plain};
use super::server::Server;
use super::{Link, RankFailure, RankGroup, Shared};

/// The heartbeat interval of each side, and the silence after which a side counts as gone.
pub(super) const ALIVE: Duration = Duration::from_secs(2);
pub(super) const SILENCE: Duration = Duration::from_secs(15);
/// The time limit of a handshake.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(10);
pub(super) const HELLO_LIMIT: usize = 4096;
pub(super) const POLL: Duration = Duration::from_millis(20);

/// The reason why the processes of a run did not meet.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// An invalid address.
    #[error("the rendezvous cannot be at {address}: {reason}; give host 0's address as HOST:PORT")]
    Address {
        /// As given.
        address: String,
        /// The message of the system.
        reason: String,
    },
    /// Host 0 does not respond.
    #[error(
        "no rendezvous at {address} within {seconds} s: {reason}; start host 0 there, and let its \
         port through the firewall"
    )]
    Unreachable {
        /// As given.
        address: String,
        /// The duration of the attempts, in seconds.
        seconds: u64,
        /// The last message of the system.
        reason: String,
    },
    /// The other side has a different token, or none.
    #[error(
        "the other side at {address} does not have this token; give all hosts a token file of the \
         same content"
    )]
    Token {
        /// The address of the rendezvous.
        address: String,
    },
    /// Host 0 rejected this process.
    #[error("host 0 refuses this process: {reason}")]
    Refused {
        /// The reason.
        reason: String,
    },
    /// Other hosts did not connect.
    #[error("hosts {missing} did not connect within {seconds} s; start them all")]
    Missing {
        /// The numbers of the missing hosts.
        missing: String,
        /// The waiting time, in seconds.
        seconds: u64,
    },
}

/// The processes of a run, one for each host.
#[derive(Clone, Debug)]
pub struct Rendezvous {
    /// Address of the server, which runs in the process of host 0: HOST:PORT.
    pub address: String,
    /// The number of hosts.
    pub hosts: usize,
    /// The number of this host, from 0.
    pub host: usize,
    /// The number of ranks of this process.
    pub local: usize,
    /// The secret shared by the processes of the run.
    pub token: Vec<u8>,
    /// The time limit for waiting for the others, here and in every step.
    pub timeout: Duration,
}

/// A process's description of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) version: String,
    pub(super) hosts: usize,
    pub(super) host: usize,
    pub(super) local: usize,
}

pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// A message after the handshake.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Message {
    /// All hosts have connected: the first rank of this host, and the number of all ranks.
    Begin { first: usize, all: usize },
    /// The parts of the ranks of a host, or of all.
    Parts(Vec<Vec<u8>>),
    /// A rank has failed.
    Failed { rank: usize, cause: String },
    /// The hosts that did not connect.
    Missing(String),
    /// A heartbeat.
    Alive,
    /// The run is over.
    Bye,
}

/// The authentication tag of one side of a handshake.
pub(super) fn proof(token: &[u8], side: &str, nonces: [&[u8]; 2], said: &[u8]) -> [u8; TAG] {
    let name = format!("mrope rendezvous, {side}");
    tag(token, &[name.as_bytes(), nonces[0], nonces[1], said])
}

/// The frames of a connection from and to the side that speaks first in the handshake.
pub(super) fn seals(token: &[u8], nonces: [&[u8]; 2]) -> [Seal; 2] {
    ["from the server", "from the client"].map(|way| Seal::new(proof(token, way, nonces, b"")))
}

pub(super) fn nonce() -> std::io::Result<[u8; TAG]> {
    let mut nonce = [0; TAG];
    getrandom::fill(&mut nonce).map_err(|error| IoError::other(error.to_string()))?;
    Ok(nonce)
}

/// The outgoing direction of a connection.
pub(super) struct Out {
    pub(super) stream: TcpStream,
    pub(super) seal: Seal,
}

impl Out {
    pub(super) fn send(&mut self, message: &Message) -> std::io::Result<()> {
        let frame = serde_json::to_vec(message)?;
        self.seal.write(&mut self.stream, &frame)
    }
}

pub(super) fn receive(stream: &mut TcpStream, seal: &mut Seal) -> std::io::Result<Message> {
    let frame = seal.read(stream)?;
    Ok(serde_json::from_slice(&frame)?)
}

/// The cause of a connection that ended.
pub(super) fn gone(error: &IoError) -> String {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => format!(
            "its host has not been heard of for {} s: is it off, or the network down?",
            SILENCE.as_secs()
        ),
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            "its process is gone".to_owned()
        }
        _ => format!("its process is gone: {error}"),
    }
}

impl Rendezvous {
    /// Connects the processes of all hosts.
    ///
    /// # Errors
    /// [`RendezvousError`]
    pub fn meet(&self) -> Result<RankGroup, RendezvousError> {
        let limit = Instant::now() + self.timeout;
        let mut addresses = self.addresses()?;
        if self.host == 0 {
            let listener = TcpListener::bind(&addresses[..]).map_err(self.at())?;
            let mut own = listener.local_addr().map_err(self.at())?;
            if own.ip().is_unspecified() {
                own.set_ip(Ipv4Addr::LOCALHOST.into());
            }
            addresses = vec![own];
            Server::start(listener, self).map_err(self.at())?;
        }
        let (stream, seals) = self.connect(&addresses, limit)?;
        self.begin(stream, seals)
    }

    fn addresses(&self) -> Result<Vec<SocketAddr>, RendezvousError> {
        let found = self.address.to_socket_addrs().map_err(self.at())?;
        Ok(found.collect())
    }

    fn at(&self) -> impl Fn(IoError) -> RendezvousError {
        let address = self.address.clone();
        move |error| RendezvousError::Address {
            address: address.clone(),
            reason: error.to_string(),
        }
    }

    /// Connects to a server that has the token and accepts this process.
    fn connect(
        &self,
        addresses: &[SocketAddr],
        limit: Instant,
    ) -> Result<(TcpStream, [Seal; 2]), RendezvousError> {
        loop {
            let mut reason = "its name has no address".to_owned();
            for address in addresses {
                let left = limit.saturating_duration_since(Instant::now());
                let wait = HANDSHAKE.min(left).max(POLL);
                match TcpStream::connect_timeout(address, wait).and_then(|s| self.greet(s, VERSION))
                {
                    Ok(outcome) => return outcome,
                    Err(error) => reason = error.to_string(),
                }
            }
            if Instant::now() >= limit {
                return Err(RendezvousError::Unreachable {
                    address: self.address.clone(),
                    seconds: self.timeout.as_secs(),
                    reason,
                });
            }
            thread::sleep(POLL * 5);
        }
    }

    /// The client's side of a handshake.
    #[allow(
        clippy::type_complexity,
        reason = "a failure to try again, and one to return"
    )]
    pub(super) fn greet(
        &self,
        mut stream: TcpStream,
        version: &str,
    ) -> std::io::Result<Result<(TcpStream, [Seal; 2]), RendezvousError>> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(HANDSHAKE))?;
        stream.set_write_timeout(Some(HANDSHAKE))?;
        let theirs = read_plain(&mut stream, TAG)?;
        let ours = nonce()?;
        let nonces = [&theirs[..], &ours[..]];
        let hello = serde_json::to_vec(&Hello {
            version: version.to_owned(),
            hosts: self.hosts,
            host: self.host,
            local: self.local,
        })?;
        let tag = proof(&self.token, "client", nonces, &hello);
        write_plain(&mut stream, &[&ours[..], &tag, &hello].concat())?;
        let answer = read_plain(&mut stream, HELLO_LIMIT)?;
        let (tag, reason) = answer.split_at(TAG.min(answer.len()));
        if !is_equal(tag, &proof(&self.token, "server", nonces, reason)) {
            let address = self.address.clone();
            return Ok(Err(RendezvousError::Token { address }));
        }
        if !reason.is_empty() {
            let reason = String::from_utf8_lossy(reason).into_owned();
            return Ok(Err(RendezvousError::Refused { reason }));
        }
        let seals = seals(&self.token, nonces);
        Ok(Ok((stream, seals)))
    }

    /// Waits for the other hosts and creates the group.
    fn begin(
        &self,
        mut stream: TcpStream,
        [mut from_server, from_client]: [Seal; 2],
    ) -> Result<RankGroup, RendezvousError> {
        let out = Out {
            stream: stream.try_clone().map_err(self.lost())?,
            seal: from_client,
        };
        let client = Arc::new(Client {
            out: Mutex::new(out),
            inbox: Mutex::default(),
            changed: Condvar::new(),
            is_over: AtomicBool::new(false),
            ended: Mutex::default(),
            changed_end: Condvar::new(),
            has_server: self.host == 0,
            group: OnceLock::new(),
        });
        // The others may come much later.
        let alive = client.clone();
        thread::spawn(move || alive.stay_alive());
        let begun = self.wait(&mut stream, &mut from_server);
        let (first, all) = begun.inspect_err(|_| client.end())?;
        let link = Box::new(client.clone());
        let group = RankGroup::new(first, self.local, all, self.timeout, Some(link));
        // It is set only here.
        let _ = client.group.set(Arc::downgrade(&group.shared));
        thread::spawn(move || client.read(stream, from_server));
        Ok(group)
    }

    /// The first rank of this host and the number of all ranks, once all hosts have connected.
    fn wait(
        &self,
        stream: &mut TcpStream,
        from_server: &mut Seal,
    ) -> Result<(usize, usize), RendezvousError> {
        stream
            .set_read_timeout(Some(SILENCE))
            .map_err(self.lost())?;
        loop {
            match receive(stream, from_server).map_err(self.lost())? {
                Message::Begin { first, all } => return Ok((first, all)),
                Message::Missing(missing) => {
                    let seconds = self.timeout.as_secs();
                    return Err(RendezvousError::Missing { missing, seconds });
                }
                _ => {}
            }
        }
    }

    fn lost(&self) -> impl Fn(IoError) -> RendezvousError {
        |error| RendezvousError::Unreachable {
            address: self.address.clone(),
            seconds: self.timeout.as_secs(),
            reason: error.to_string(),
        }
    }
}

/// The parts and the failure received from the server.
#[derive(Default)]
struct Inbox {
    parts: Option<Vec<Vec<u8>>>,
    failure: Option<RankFailure>,
}

/// A process's end of its connection.
struct Client {
    out: Mutex<Out>,
    inbox: Mutex<Inbox>,
    changed: Condvar,
    is_over: AtomicBool,
    /// True once nothing more arrives.
    ended: Mutex<bool>,
    changed_end: Condvar,
    /// True if the server is in this process.
    has_server: bool,
    group: OnceLock<Weak<Shared>>,
}

impl Client {
    fn fail(&self, failure: RankFailure) {
        self.inbox
            .lock()
            .failure
            .get_or_insert_with(|| failure.clone());
        self.changed.notify_all();
        if let Some(shared) = self.group.get().and_then(Weak::upgrade) {
            shared.fail(failure, false);
        }
    }

    fn read(&self, mut stream: TcpStream, mut seal: Seal) {
        loop {
            match receive(&mut stream, &mut seal) {
                Ok(Message::Parts(parts)) => {
                    self.inbox.lock().parts = Some(parts);
                    self.changed.notify_all();
                }
                Ok(Message::Failed { rank, cause }) => {
                    self.fail(RankFailure { rank, cause });
                    self.end();
                    return;
                }
                Ok(Message::Bye) => {
                    self.end();
                    return;
                }
                Ok(_) => {}
                Err(error) => {
                    if !self.is_over.load(Ordering::Acquire) {
                        let cause = gone(&error);
                        self.fail(RankFailure { rank: 0, cause });
                    }
                    return;
                }
            }
        }
    }

    /// Ends the connection.
    fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        // The connection may have ended already.
        let _ = self.out.lock().stream.shutdown(Shutdown::Both);
        *self.ended.lock() = true;
        self.changed_end.notify_all();
    }

    /// Waits until the server, which ends with this process, has passed the cause on to the others.
    fn wait_for_server(&self) {
        let mut ended = self.ended.lock();
        if self.has_server {
            let wait = |ended: &mut bool| !*ended;
            self.changed_end.wait_while_for(&mut ended, wait, HANDSHAKE);
        }
    }

    fn stay_alive(&self) {
        while !self.is_over.load(Ordering::Acquire) {
            if self.out.lock().send(&Message::Alive).is_err() {
                return;
            }
            thread::sleep(ALIVE);
        }
    }
}

impl Link for Arc<Client> {
    fn exchange(&self, parts: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, RankFailure> {
        let sent = self.out.lock().send(&Message::Parts(parts));
        let mut inbox = self.inbox.lock();
        loop {
            // A round that is complete counts, also if a rank has failed since.
            if let Some(parts) = inbox.parts.take() {
                return Ok(parts);
            }
            if let Some(failure) = &inbox.failure {
                return Err(failure.clone());
            }
            if let Err(error) = &sent {
                let cause = gone(error);
                return Err(RankFailure { rank: 0, cause });
            }
            // The reader ends this wait: the server sends a heartbeat every few seconds, or is
            // gone.
            self.changed.wait(&mut inbox);
        }
    }

    fn fail(&self, failure: &RankFailure) {
        let RankFailure { rank, cause } = failure.clone();
        // If the server is gone, the reader reports it to the others.
        let _ = self.out.lock().send(&Message::Failed { rank, cause });
        self.wait_for_server();
    }

    fn finish(&self) {
        self.is_over.store(true, Ordering::Release);
        // The server may have ended before.
        let _ = self.out.lock().send(&Message::Bye);
        self.wait_for_server();
    }
}

//! The rendezvous of processes on several hosts: a server in the process of host 0, to which each
//! process connects. It carries root infos, numbers and causes, but no tensors.
//!
//! Both sides prove that they know the token, and each later frame has an authentication tag.
//! Frames are not encrypted.

use std::collections::BTreeMap;
use std::io::{Error as IoError, ErrorKind};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::frame::{Seal, TAG, is_equal, read_plain, tag, write_plain};
use super::{Link, RankFailure, RankGroup, Shared, slow};

/// The heartbeat interval of each side, and the silence after which a side counts as gone.
const ALIVE: Duration = Duration::from_secs(2);
const SILENCE: Duration = Duration::from_secs(15);
/// The time limit of a handshake, and the limit on concurrent handshakes.
const HANDSHAKE: Duration = Duration::from_secs(10);
const HANDSHAKES: usize = 64;
const HELLO_LIMIT: usize = 4096;
const POLL: Duration = Duration::from_millis(20);
/// The limit on ranks of a process.
const LOCAL_LIMIT: usize = 1024;

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
    #[error("hosts {missing} did not come to the rendezvous within {seconds} s; start them all")]
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
struct Hello {
    version: String,
    hosts: usize,
    host: usize,
    local: usize,
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// A message after the handshake.
#[derive(Debug, Serialize, Deserialize)]
enum Message {
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
fn proof(token: &[u8], side: &str, nonces: [&[u8]; 2], said: &[u8]) -> [u8; TAG] {
    let name = format!("mrope rendezvous, {side}");
    tag(token, &[name.as_bytes(), nonces[0], nonces[1], said])
}

/// The frames of a connection from and to the side that speaks first in the handshake.
fn seals(token: &[u8], nonces: [&[u8]; 2]) -> [Seal; 2] {
    ["from the server", "from the client"].map(|way| Seal::new(proof(token, way, nonces, b"")))
}

fn nonce() -> std::io::Result<[u8; TAG]> {
    let mut nonce = [0; TAG];
    getrandom::fill(&mut nonce).map_err(|error| IoError::other(error.to_string()))?;
    Ok(nonce)
}

/// The outgoing direction of a connection.
struct Out {
    stream: TcpStream,
    seal: Seal,
}

impl Out {
    fn send(&mut self, message: &Message) -> std::io::Result<()> {
        let frame = serde_json::to_vec(message)?;
        self.seal.write(&mut self.stream, &frame)
    }
}

fn receive(stream: &mut TcpStream, seal: &mut Seal) -> std::io::Result<Message> {
    let frame = seal.read(stream)?;
    Ok(serde_json::from_slice(&frame)?)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The cause of a connection that ended.
fn gone(error: &IoError) -> String {
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
    fn greet(
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
        let lost = |error: IoError| RendezvousError::Unreachable {
            address: self.address.clone(),
            seconds: self.timeout.as_secs(),
            reason: error.to_string(),
        };
        stream.set_read_timeout(Some(SILENCE)).map_err(lost)?;
        let (first, all) = loop {
            match receive(&mut stream, &mut from_server).map_err(lost)? {
                Message::Begin { first, all } => break (first, all),
                Message::Missing(missing) => {
                    let seconds = self.timeout.as_secs();
                    return Err(RendezvousError::Missing { missing, seconds });
                }
                _ => {}
            }
        };
        let out = Out {
            stream: stream.try_clone().map_err(lost)?,
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
        let link = Box::new(client.clone());
        let group = RankGroup::new(first, self.local, all, self.timeout, Some(link));
        // It is set only here.
        let _ = client.group.set(Arc::downgrade(&group.shared));
        let reader = client.clone();
        thread::spawn(move || reader.read(stream, from_server));
        thread::spawn(move || client.stay_alive());
        Ok(group)
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
        lock(&self.inbox)
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
                    lock(&self.inbox).parts = Some(parts);
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
        let _ = lock(&self.out).stream.shutdown(Shutdown::Both);
        *lock(&self.ended) = true;
        self.changed_end.notify_all();
    }

    fn stay_alive(&self) {
        while !self.is_over.load(Ordering::Acquire) {
            if lock(&self.out).send(&Message::Alive).is_err() {
                return;
            }
            thread::sleep(ALIVE);
        }
    }
}

impl Link for Arc<Client> {
    fn exchange(&self, parts: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, RankFailure> {
        let sent = lock(&self.out).send(&Message::Parts(parts));
        let mut inbox = lock(&self.inbox);
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
            let waited = self.changed.wait(inbox);
            inbox = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn fail(&self, failure: &RankFailure) {
        let RankFailure { rank, cause } = failure.clone();
        // If the server is gone, the reader reports it to the others.
        let _ = lock(&self.out).send(&Message::Failed { rank, cause });
    }

    fn finish(&self) {
        self.is_over.store(true, Ordering::Release);
        // The server may have ended before.
        let _ = lock(&self.out).send(&Message::Bye);
        // The server ends with this process, and other processes may still need to hear from it.
        let ended = lock(&self.ended);
        if self.has_server {
            let wait = |ended: &mut bool| !*ended;
            drop(self.changed_end.wait_timeout_while(ended, HANDSHAKE, wait));
        }
    }
}

/// A connected host.
struct Host {
    local: usize,
    out: Out,
    given: Option<Vec<Vec<u8>>>,
    is_over: bool,
}

#[derive(Default)]
struct Hosts {
    by_number: BTreeMap<usize, Host>,
    /// The time since which the first host has waited for the others.
    waits_since: Option<Instant>,
    failure: Option<RankFailure>,
}

struct Server {
    token: Vec<u8>,
    hosts: usize,
    timeout: Duration,
    state: Mutex<Hosts>,
    handshakes: AtomicUsize,
    /// The time of its last message.
    spoke: Mutex<Option<Instant>>,
}

impl Server {
    fn start(listener: TcpListener, of: &Rendezvous) -> std::io::Result<()> {
        listener.set_nonblocking(true)?;
        let server = Arc::new(Self {
            token: of.token.clone(),
            hosts: of.hosts,
            timeout: of.timeout,
            state: Mutex::default(),
            handshakes: AtomicUsize::new(0),
            spoke: Mutex::default(),
        });
        let name = thread::Builder::new().name("rendezvous".to_owned());
        name.spawn(move || server.serve(listener)).map(drop)
    }

    /// Accepts hosts until all have connected, then sends heartbeats until the run is over.
    fn serve(self: &Arc<Self>, listener: TcpListener) {
        let limit = Instant::now() + self.timeout;
        while lock(&self.state).by_number.len() < self.hosts {
            if Instant::now() >= limit {
                self.send_all(&Message::Missing(self.missing()));
                return;
            }
            match listener.accept() {
                Ok((stream, _)) if self.handshakes.load(Ordering::Acquire) < HANDSHAKES => {
                    self.handshakes.fetch_add(1, Ordering::AcqRel);
                    let server = self.clone();
                    thread::spawn(move || server.host(stream));
                }
                // Too many concurrent connections are not from this run.
                Ok(_) => {}
                Err(_) => thread::sleep(POLL),
            }
            self.be_alive();
        }
        drop(listener);
        self.begin();
        loop {
            thread::sleep(POLL);
            let mut state = lock(&self.state);
            if state.by_number.values().all(|host| host.is_over) {
                drop(state);
                self.send_all(&Message::Bye);
                return;
            }
            let is_late = |since: Instant| since.elapsed() > self.timeout;
            if state.failure.is_none() && state.waits_since.is_some_and(is_late) {
                let missing = state
                    .by_number
                    .iter()
                    .find(|(_, host)| host.given.is_none());
                if let Some(number) = missing.map(|(number, _)| *number) {
                    let rank = first_rank(&state, number);
                    let cause = slow(self.timeout);
                    fail(&mut state, RankFailure { rank, cause });
                }
            }
            drop(state);
            self.be_alive();
        }
    }

    /// Sends heartbeats every few seconds.
    fn be_alive(&self) {
        let mut last = lock(&self.spoke);
        if last.is_none_or(|last| last.elapsed() > ALIVE) {
            *last = Some(Instant::now());
            self.send_all(&Message::Alive);
        }
    }

    fn missing(&self) -> String {
        let state = lock(&self.state);
        let missing = (0..self.hosts).filter(|host| !state.by_number.contains_key(host));
        let missing: Vec<String> = missing.map(|host| host.to_string()).collect();
        missing.join(", ")
    }

    fn send_all(&self, message: &Message) {
        for host in lock(&self.state).by_number.values_mut() {
            // The thread that reads from a host notices if it is gone.
            let _ = host.out.send(message);
        }
    }

    fn begin(&self) {
        let mut state = lock(&self.state);
        let all = state.by_number.values().map(|host| host.local).sum();
        let mut first = 0;
        for host in state.by_number.values_mut() {
            let _ = host.out.send(&Message::Begin { first, all });
            first += host.local;
        }
    }

    /// Serves one connection.
    fn host(&self, mut stream: TcpStream) {
        let shaken = self.shake(&mut stream);
        self.handshakes.fetch_sub(1, Ordering::AcqRel);
        let Ok(Some((number, mut seal))) = shaken else {
            // An unknown process, or one that was rejected with a reason.
            let _ = stream.shutdown(Shutdown::Both);
            return;
        };
        loop {
            let message = receive(&mut stream, &mut seal);
            let mut state = lock(&self.state);
            match message {
                Ok(Message::Parts(parts)) => give(&mut state, number, parts),
                Ok(Message::Failed { rank, cause }) => {
                    fail(&mut state, RankFailure { rank, cause });
                }
                Ok(Message::Bye) => {
                    if let Some(host) = state.by_number.get_mut(&number) {
                        host.is_over = true;
                    }
                    return;
                }
                Ok(_) => {}
                Err(error) => {
                    let rank = first_rank(&state, number);
                    let cause = gone(&error);
                    fail(&mut state, RankFailure { rank, cause });
                    if let Some(host) = state.by_number.get_mut(&number) {
                        host.is_over = true;
                    }
                    return;
                }
            }
        }
    }

    /// The server's side of a handshake: the number of the host, and the seal of its frames.
    fn shake(&self, stream: &mut TcpStream) -> std::io::Result<Option<(usize, Seal)>> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(HANDSHAKE))?;
        stream.set_write_timeout(Some(HANDSHAKE))?;
        let ours = nonce()?;
        write_plain(stream, &ours)?;
        let said = read_plain(stream, HELLO_LIMIT)?;
        let Some((theirs, rest)) = said.split_first_chunk::<TAG>() else {
            return Ok(None);
        };
        let nonces = [&ours[..], &theirs[..]];
        let (tag, hello) = rest.split_at(TAG.min(rest.len()));
        if !is_equal(tag, &proof(&self.token, "client", nonces, hello)) {
            // An answer without a proof.
            write_plain(stream, b"refused")?;
            return Ok(None);
        }
        let hello: Hello = serde_json::from_slice(hello)?;
        let mut state = lock(&self.state);
        let refusal = self.refusal(&state, &hello);
        let reason = refusal.clone().unwrap_or_default();
        let tag = proof(&self.token, "server", nonces, reason.as_bytes());
        write_plain(stream, &[&tag[..], reason.as_bytes()].concat())?;
        if refusal.is_some() {
            return Ok(None);
        }
        stream.set_read_timeout(Some(SILENCE))?;
        let [from_server, from_client] = seals(&self.token, nonces);
        let out = Out {
            stream: stream.try_clone()?,
            seal: from_server,
        };
        let host = Host {
            local: hello.local,
            out,
            given: None,
            is_over: false,
        };
        state.by_number.insert(hello.host, host);
        Ok(Some((hello.host, from_client)))
    }

    /// The reason for rejecting a process that has the token.
    fn refusal(&self, state: &Hosts, hello: &Hello) -> Option<String> {
        let Hello {
            version,
            hosts,
            host,
            local,
        } = hello;
        if version != VERSION {
            return Some(format!("it is of version {version}, host 0 of {VERSION}"));
        }
        if *hosts != self.hosts {
            return Some(format!(
                "it is one of {hosts} hosts, host 0 of {}",
                self.hosts
            ));
        }
        if host >= hosts || !(1..=LOCAL_LIMIT).contains(local) {
            return Some(format!("it is host {host} of {hosts}, with {local} ranks"));
        }
        let taken = state.by_number.contains_key(host);
        taken.then(|| format!("there is a host {host} already"))
    }
}

fn first_rank(state: &Hosts, number: usize) -> usize {
    let before = state.by_number.range(..number);
    before.map(|(_, host)| host.local).sum()
}

/// Stores the parts of a host; once all have arrived, sends them to all hosts.
fn give(state: &mut Hosts, number: usize, parts: Vec<Vec<u8>>) {
    if let Some(host) = state.by_number.get_mut(&number) {
        host.given = Some(parts);
    }
    state.waits_since.get_or_insert_with(Instant::now);
    if !state.by_number.values().all(|host| host.given.is_some()) {
        return;
    }
    state.waits_since = None;
    let given = state
        .by_number
        .values_mut()
        .filter_map(|host| host.given.take());
    let all = Message::Parts(given.flatten().collect());
    for host in state.by_number.values_mut() {
        let _ = host.out.send(&all);
    }
}

/// Reports the first failure to every host.
fn fail(state: &mut Hosts, failure: RankFailure) {
    if state.failure.is_some() {
        return;
    }
    let RankFailure { rank, cause } = failure.clone();
    state.failure = Some(failure);
    for host in state.by_number.values_mut() {
        let cause = cause.clone();
        let _ = host.out.send(&Message::Failed { rank, cause });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_of_another_version_is_refused_by_both() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let rendezvous = Rendezvous {
            address: address.to_string(),
            hosts: 2,
            host: 1,
            local: 1,
            token: b"a token of some length".to_vec(),
            timeout: Duration::from_secs(5),
        };
        Server::start(listener, &rendezvous).expect("it starts");
        let greet = |version| {
            let stream = TcpStream::connect(address).expect("it listens");
            rendezvous
                .greet(stream, version)
                .expect("it answers")
                .map(drop)
        };
        let refused = greet("0.0.7").expect_err("another version").to_string();
        let says = format!("it is of version 0.0.7, host 0 of {VERSION}");
        assert!(refused.contains(&says), "{refused}");
        greet(VERSION).expect("the same version");
    }
}

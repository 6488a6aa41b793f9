//! The server of a rendezvous, in the process of host 0.

use std::collections::BTreeMap;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use burn_fused::openings::Openings;
use parking_lot::Mutex;

use super::frame::{Seal, TAG, is_equal, read_plain, write_plain};
use super::rendezvous::{
    ALIVE, HANDSHAKE, HELLO_LIMIT, Hello, Message, Out, POLL, Rendezvous, SILENCE, VERSION, gone,
    nonce, proof, receive, seals,
};
use super::{RankFailure, slow};

/// The limit on concurrent handshakes, each of a thread and two sockets.
const HANDSHAKES: usize = 128;
/// Connections that are accepted at once: before the next heartbeat, and in each [`POLL`] of a run,
/// whose late comers are refused.
const ACCEPTED: usize = 256;
const LATE: usize = 4;
/// The limit on ranks of a process.
const LOCAL_LIMIT: usize = 1024;

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
    /// True once all hosts have connected.
    has_begun: bool,
    /// The time since which the first host has waited for the others.
    waits_since: Option<Instant>,
    failure: Option<RankFailure>,
    /// The last reason for rejecting a process, by its host.
    refused: BTreeMap<usize, String>,
}

pub(super) struct Server {
    token: Vec<u8>,
    hosts: usize,
    timeout: Duration,
    state: Mutex<Hosts>,
    openings: Openings<TcpStream>,
    /// The time of its last message.
    spoke: Mutex<Option<Instant>>,
}

impl Server {
    pub(super) fn start(listener: TcpListener, of: &Rendezvous) -> std::io::Result<()> {
        listener.set_nonblocking(true)?;
        let server = Arc::new(Self {
            token: of.token.clone(),
            hosts: of.hosts,
            timeout: of.timeout,
            state: Mutex::default(),
            openings: Openings::new(HANDSHAKES),
            spoke: Mutex::default(),
        });
        let name = thread::Builder::new().name("rendezvous".to_owned());
        name.spawn(move || server.serve(listener)).map(drop)
    }

    /// Accepts hosts until all have connected, then sends heartbeats until the run is over.
    fn serve(self: &Arc<Self>, listener: TcpListener) {
        let limit = Instant::now() + self.timeout;
        while !self.begin() {
            if Instant::now() >= limit {
                self.send_all(&Message::Missing(self.missing()));
                return;
            }
            if self.accept(&listener, ACCEPTED) < ACCEPTED {
                thread::sleep(POLL);
            }
            self.be_alive();
        }
        loop {
            self.accept(&listener, LATE);
            thread::sleep(POLL);
            let mut state = self.state.lock();
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

    /// Accepts the connections that wait, `most` of them; returns how many came.
    fn accept(self: &Arc<Self>, listener: &TcpListener, most: usize) -> usize {
        for late in self.openings.expire(HANDSHAKE) {
            close(&late);
        }
        for accepted in 0..most {
            let Ok((stream, client)) = listener.accept() else {
                return accepted;
            };
            // Out of sockets: the client tries again.
            let Ok(handle) = stream.try_clone() else {
                return accepted;
            };
            let server = self.clone();
            let start = |id| {
                let name = thread::Builder::new().name("rendezvous".to_owned());
                // Without a thread the stream is closed, and its opening expires.
                let _started = name.spawn(move || server.host(stream, id));
                handle
            };
            if let Some(evicted) = self.openings.add(client, start) {
                close(&evicted);
            }
        }
        most
    }

    /// Sends heartbeats every few seconds.
    fn be_alive(&self) {
        let mut last = self.spoke.lock();
        if last.is_none_or(|last| last.elapsed() > ALIVE) {
            *last = Some(Instant::now());
            self.send_all(&Message::Alive);
        }
    }

    fn missing(&self) -> String {
        let state = self.state.lock();
        let missing = (0..self.hosts).filter(|host| !state.by_number.contains_key(host));
        let missing = missing.map(|host| match state.refused.get(&host) {
            Some(reason) => format!("{host} (refused: {reason})"),
            None => host.to_string(),
        });
        let missing: Vec<String> = missing.collect();
        missing.join(", ")
    }

    fn send_all(&self, message: &Message) {
        // Host 0 comes last, because its process may end, and this server with it.
        for host in self.state.lock().by_number.values_mut().rev() {
            // The thread that reads from a host notices if it is gone.
            let _ = host.out.send(message);
        }
    }

    /// Begins the run if all hosts have connected.
    fn begin(&self) -> bool {
        let mut state = self.state.lock();
        if state.by_number.len() < self.hosts {
            return false;
        }
        state.has_begun = true;
        let all = state.by_number.values().map(|host| host.local).sum();
        let mut first = 0;
        for host in state.by_number.values_mut() {
            let _ = host.out.send(&Message::Begin { first, all });
            first += host.local;
        }
        true
    }

    /// Serves one connection.
    fn host(&self, mut stream: TcpStream, id: u64) {
        let shaken = self.shake(&mut stream, id);
        // It has ended, or was closed before.
        self.openings.finish(id);
        let Ok(Some((number, mut seal))) = shaken else {
            // An unknown process, or one that was rejected with a reason.
            close(&stream);
            return;
        };
        loop {
            let message = receive(&mut stream, &mut seal);
            let mut state = self.state.lock();
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
                // Until the run begins, it may come again.
                Err(_) if !state.has_begun => {
                    state.by_number.remove(&number);
                    return;
                }
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
    fn shake(&self, stream: &mut TcpStream, id: u64) -> std::io::Result<Option<(usize, Seal)>> {
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
        // A host that hears nothing tries again; after an answer it counts.
        if !self.openings.finish(id) {
            return Ok(None);
        }
        let mut state = self.state.lock();
        let refusal = self.refusal(&state, &hello);
        if let Some(reason) = refusal.as_ref().filter(|_| hello.host < self.hosts) {
            state.refused.insert(hello.host, reason.clone());
        }
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

fn close(stream: &TcpStream) {
    // It may have ended already.
    let _ = stream.shutdown(Shutdown::Both);
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
    // Host 0 comes last, because its process may end, and this server with it.
    for host in state.by_number.values_mut().rev() {
        let cause = cause.clone();
        let _ = host.out.send(&Message::Failed { rank, cause });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::rendezvous::RendezvousError;

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

    const TOKEN: &[u8] = b"a token of some length";

    /// A process of a run with a server of two hosts.
    fn process(address: std::net::SocketAddr, hosts: usize, host: usize) -> Rendezvous {
        Rendezvous {
            address: address.to_string(),
            hosts,
            host,
            local: 1,
            token: TOKEN.to_vec(),
            timeout: Duration::from_secs(5),
        }
    }

    fn server() -> std::net::SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        Server::start(listener, &process(address, 2, 0)).expect("it starts");
        address
    }

    fn refusal(of: &Rendezvous) -> String {
        let begun = Instant::now();
        let refused = of.meet().expect_err("refused");
        assert!(
            matches!(refused, RendezvousError::Refused { .. }),
            "{refused}"
        );
        assert!(begun.elapsed() < Duration::from_secs(2), "{refused}");
        refused.to_string()
    }

    #[test]
    fn a_host_that_is_there_or_of_another_number_of_hosts_is_refused_at_once() {
        let address = server();
        let waiting = thread::spawn(move || process(address, 2, 1).meet());
        while TcpStream::connect(address).is_err() {}
        thread::sleep(Duration::from_millis(300));
        for before_they_have_met in [true, false] {
            let twice = refusal(&process(address, 2, 1));
            assert!(twice.contains("there is a host 1 already"), "{twice}");
            for hosts in [1, 3] {
                let other = refusal(&process(address, hosts, 1));
                let says = format!("it is one of {hosts} hosts, host 0 of 2");
                assert!(other.contains(&says), "{other}");
            }
            if before_they_have_met {
                let of_server = TcpStream::connect(address).expect("it listens");
                let first = process(address, 2, 0);
                let joined = first.greet(of_server, VERSION).expect("it answers");
                assert!(joined.is_ok());
                std::mem::forget(joined);
                thread::sleep(Duration::from_millis(300));
            }
        }
        drop(waiting.join().expect("no panic").expect("they have met"));
    }

    /// Host 0 says who was refused, and why.
    #[test]
    fn a_missing_host_that_was_refused_is_named_with_the_reason() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        drop(listener);
        let first = Rendezvous {
            timeout: Duration::from_secs(3),
            ..process(address, 2, 0)
        };
        let waiting = thread::spawn(move || first.meet());
        let other = Rendezvous {
            timeout: Duration::from_secs(3),
            ..process(address, 3, 1)
        };
        other.meet().expect_err("refused");
        let missing = waiting.join().expect("no panic").expect_err("alone");
        let says = "hosts 1 (refused: it is one of 3 hosts, host 0 of 2) did not connect";
        assert!(missing.to_string().contains(says), "{missing}");
    }

    #[test]
    fn hosts_meet_when_one_is_lost_and_comes_again_after_more_than_a_silence() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        drop(listener);
        let meet = |host| {
            let timeout = 3 * SILENCE;
            let host = Rendezvous {
                timeout,
                ..process(address, 2, host)
            };
            thread::spawn(move || {
                let group = host.meet().expect("they meet");
                let exchange = |rank: &super::super::Rank| {
                    let parts = rank.exchange(vec![rank.rank() as u8]);
                    parts.map_err(|error| error.to_string())
                };
                group.run(exchange).expect("they exchange")
            })
        };
        let first = meet(0);
        let lost = loop {
            match TcpStream::connect(address) {
                Ok(stream) => break process(address, 2, 1).greet(stream, VERSION),
                Err(_) => thread::sleep(POLL),
            }
        };
        drop(lost.expect("it answers").expect("it is accepted"));
        thread::sleep(SILENCE + ALIVE);
        for host in [meet(1), first] {
            let parts = host.join().expect("no panic").remove(0);
            assert_eq!(*parts, [[0], [1]]);
        }
    }

    /// A stranger without the token that holds more connections than there may be, and opens each
    /// anew when it is closed.
    #[test]
    fn strangers_keep_no_host_from_the_rendezvous() {
        let address = server();
        let over = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let stranger = {
            let over = over.clone();
            thread::spawn(move || {
                let mut held: Vec<Option<TcpStream>> = Vec::new();
                held.resize_with(2 * HANDSHAKES, || None);
                while !over.load(std::sync::atomic::Ordering::Relaxed) {
                    for one in &mut held {
                        let is_open = one.as_ref().is_some_and(|stream| {
                            stream.set_nonblocking(true).expect("a socket");
                            let mut byte = [0; 64];
                            // Its nonce comes first; an end is an answer of no bytes, or an error.
                            match std::io::Read::read(&mut &*stream, &mut byte) {
                                Ok(bytes) => bytes > 0,
                                Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
                            }
                        });
                        if !is_open {
                            *one = TcpStream::connect(address).ok();
                        }
                    }
                    thread::sleep(Duration::from_millis(1));
                }
            })
        };
        thread::sleep(Duration::from_millis(500));
        let begun = Instant::now();
        let host = process(address, 2, 1);
        let came = loop {
            let stream = TcpStream::connect(address).expect("it listens");
            match host.greet(stream, VERSION) {
                Ok(came) => break came.is_ok(),
                Err(error) => assert!(begun.elapsed() < Duration::from_secs(4), "{error}"),
            }
        };
        assert!(came);
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        stranger.join().expect("no panic");
    }
}

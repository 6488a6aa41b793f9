//! The guard in front of burn-remote's server.
//!
//! burn-remote checks the token in a session's first message, but it reads up to 1 GiB for that
//! message and waits without limit, and its route for transfers between servers checks no token. A
//! connection therefore reaches it only as a WebSocket on the session route, through a request
//! written here, and after a first message that is small and arrives in time. Nothing else passes
//! until the server has answered that message.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use socket2::{Domain, SockRef, Socket, TcpKeepalive, Type};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader, copy_buf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tracing::info;

use crate::openings::Openings;

/// Time for the request and the first message.
const OPENING: Duration = Duration::from_secs(5);
/// The byte limit of a request or its answer; a client's request has about 200.
const HEAD_BYTES: usize = 4 << 10;
/// The byte limit of the first message: a version, an index and the token.
const FIRST_MESSAGE_BYTES: usize = 64 << 10;
/// The limit on connections being opened. Each has up to two sockets, and many systems allow a
/// process 1024.
const OPENING_AT_ONCE: usize = 256;
/// Connections that the system keeps until they are accepted.
const BACKLOG: i32 = 1024;
/// Bytes buffered in one direction of a session.
const BUFFER_BYTES: usize = 256 << 10;
/// Reads of the system's table of sockets before a client counts as of another process.
const TABLE_READS: usize = 20;
/// Time for the server to drop the tensors of a session that has ended.
const DROPPING: Duration = Duration::from_secs(1);
const SESSIONS: &str = "GET /session HTTP/1.1";
/// The first byte of a binary frame that holds a whole message (RFC 6455, section 5.2).
const WHOLE_BINARY: u8 = 0x82;

/// Listens on 127.0.0.1 at a port chosen by the system. Where the system supports filters, the port
/// is closed to everybody from its first moment.
pub(super) fn listen_closed() -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
    // Not Linux, or not permitted: a server still asks unknown clients for the token.
    let _open = admit(&socket, None);
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// burn-remote's server, at a local port that other programs on this machine could also reach.
pub(super) struct Inner {
    address: SocketAddr,
    /// Held from the binding of a connection's port until the server has accepted it.
    listener: tokio::sync::Mutex<Socket>,
}

impl Inner {
    /// The server at a [closed](listen_closed) listener.
    pub(super) fn new(listener: &std::net::TcpListener) -> io::Result<Self> {
        Ok(Self {
            address: listener.local_addr()?,
            listener: tokio::sync::Mutex::new(SockRef::from(listener).try_clone()?),
        })
    }

    /// Connects from a port and, if the system supports filters, makes the server accept packets
    /// only from this port. A connection keeps its initial filter.
    async fn connect(&self) -> io::Result<TcpStream> {
        let listener = self.listener.lock().await;
        let socket = TcpSocket::new_v4()?;
        // Otherwise each connection would keep its port for a minute after its end.
        socket.set_zero_linger()?;
        socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        // As above.
        let _open = admit(&listener, Some(socket.local_addr()?.port()));
        socket.connect(self.address).await
    }
}

/// The port of a server for its own process. It is open while a client of the process connects; the
/// [guard](pass) closes the connections of [others](is_own), and asks each for the token.
#[derive(Debug)]
pub(super) struct Door {
    address: SocketAddr,
    listener: std::sync::Mutex<Socket>,
}

impl Door {
    /// The port of a [closed](listen_closed) listener.
    pub(super) fn new(listener: &std::net::TcpListener) -> io::Result<Self> {
        Ok(Self {
            address: listener.local_addr()?,
            listener: std::sync::Mutex::new(SockRef::from(listener).try_clone()?),
        })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Opens the port while `connect` runs.
    pub(super) fn open<T>(&self, connect: impl FnOnce() -> T) -> T {
        struct Closing<'a>(&'a Socket);
        impl Drop for Closing<'_> {
            fn drop(&mut self) {
                // Where the port was closed before, it is closed again.
                let _open = admit(self.0, None);
            }
        }
        let listener = self.listener.lock();
        let listener = listener.unwrap_or_else(std::sync::PoisonError::into_inner);
        let _closing = Closing(&listener);
        open(&listener);
        connect()
    }
}

/// Drops the packets to a listening socket that come from other ports, or all.
#[cfg(target_os = "linux")]
fn admit(listener: &Socket, port: Option<u16>) -> io::Result<()> {
    use socket2::SockFilter;
    // Classic BPF over the header of TCP, which begins with the source port (linux/filter.h).
    const LOAD_HALF: u16 = 0x28;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let Some(port) = port else {
        return listener.attach_filter(&[SockFilter::new(RETURN, 0, 0, 0)]);
    };
    listener.attach_filter(&[
        SockFilter::new(LOAD_HALF, 0, 0, 0),
        SockFilter::new(JUMP_IF_EQUAL, 0, 1, port.into()),
        SockFilter::new(RETURN, 0, 0, u32::MAX),
        SockFilter::new(RETURN, 0, 0, 0),
    ])
}

#[cfg(not(target_os = "linux"))]
fn admit(_: &Socket, _: Option<u16>) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Takes the packets from all ports again.
fn open(listener: &Socket) {
    // There was no filter.
    #[cfg(target_os = "linux")]
    let _none = listener.detach_filter();
    #[cfg(not(target_os = "linux"))]
    let _none = listener;
}

/// True if the client of a connection to `server` on this machine is of this process. Where the
/// system does not say (other than Linux), true as well: each client still shows the token.
pub(super) fn is_own(client: SocketAddr, server: SocketAddr) -> bool {
    // A socket may be missing in a table read while others come and go.
    for _ in 0..TABLE_READS {
        match inode(client, server) {
            Ok(Some(inode)) => return has_open(&format!("socket:[{inode}]")),
            Ok(None) => std::thread::sleep(Duration::from_millis(1)),
            Err(_) => return true,
        }
    }
    false
}

/// The inode of a client's socket, from the system's table.
#[allow(
    clippy::disallowed_methods,
    reason = "a table of the system, no file that somebody gives"
)]
fn inode(client: SocketAddr, server: SocketAddr) -> io::Result<Option<String>> {
    // proc(5): a row of each socket has its address and that of the other side in hexadecimal as
    // second and third, and its inode as tenth word. Connections to several servers may share a
    // port.
    let sockets = std::fs::read_to_string("/proc/self/net/tcp")?;
    let [client, server] = [client, server].map(|address| match address {
        SocketAddr::V4(address) => {
            let ip = u32::from_ne_bytes(address.ip().octets());
            format!("{ip:08X}:{:04X}", address.port())
        }
        SocketAddr::V6(_) => String::new(),
    });
    let rows = sockets.lines().skip(1);
    let mut rows = rows.map(|row| row.split_whitespace().collect::<Vec<_>>());
    let row = rows.find(|row| row.get(1..3) == Some(&[client.as_str(), server.as_str()][..]));
    Ok(row.and_then(|row| row.get(9).map(|inode| (*inode).to_owned())))
}

/// True if a file descriptor of this process is a link to `target`.
fn has_open(target: &str) -> bool {
    let Ok(open) = std::fs::read_dir("/proc/self/fd") else {
        return true;
    };
    let mut links = open.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
    links.any(|found| found.as_os_str() == target)
}

/// Forwards the connections that `listener` accepts from clients that `may_come` to `server`,
/// indefinitely. They end with this future.
pub(super) async fn pass(
    listener: TcpListener,
    server: Inner,
    may_come: impl Fn(SocketAddr, SocketAddr) -> bool,
) {
    let server = Arc::new(server);
    let openings = Openings::new(OPENING_AT_ONCE);
    let mut connections = JoinSet::new();
    loop {
        let client = listener.accept().await;
        while connections.try_join_next().is_some() {}
        match client {
            Ok((client, address)) => {
                let here = client.local_addr();
                if !here.is_ok_and(|here| may_come(address, here)) {
                    continue;
                }
                let evicted = openings.add(address, |id| {
                    let (server, openings) = (server.clone(), openings.clone());
                    connections.spawn(async move {
                        connection(client, address, server, openings, id).await;
                    })
                });
                if let Some(evicted) = evicted {
                    evicted.abort();
                }
            }
            // Out of sockets, or a client that left at once: both are temporary.
            Err(_) => sleep(Duration::from_millis(50)).await,
        }
    }
}

async fn connection(
    client: TcpStream,
    address: SocketAddr,
    server: Arc<Inner>,
    openings: Openings<AbortHandle>,
    id: u64,
) {
    let advance = || openings.advance(id);
    let opened = timeout(OPENING, open_session(client, &server, advance)).await;
    if !openings.finish(id) {
        return;
    }
    if let Ok(Ok([mut client, mut server])) = opened {
        let since = Instant::now();
        info!("client {address} connected");
        let (from_client, mut to_client) = client.split();
        let (from_server, mut to_server) = server.split();
        let up = async {
            let mut from_client = BufReader::with_capacity(BUFFER_BYTES, from_client);
            let _left = copy_buf(&mut from_client, &mut to_server).await;
            // The server ends the session, and with it the other direction.
            let _closed = to_server.shutdown().await;
            std::future::pending::<()>().await;
        };
        let mut from_server = BufReader::with_capacity(BUFFER_BYTES, from_server);
        tokio::select! {
            () = up => {}
            _ended = copy_buf(&mut from_server, &mut to_client) => {}
        }
        info!(
            "client {address} left after {:.0} s",
            since.elapsed().as_secs_f64()
        );
        sleep(DROPPING).await;
        give_memory_back();
    }
}

/// Returns freed memory to the system. glibc keeps the peak of each thread that ever had a session.
#[allow(unsafe_code, reason = "a call of C")]
fn give_memory_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it takes no pointer, and any thread may call it at any time (malloc_trim(3)).
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Opens a session for a client, up to the first bytes of the server's answer. Calls `advance` after
/// each message of the client.
async fn open_session(
    mut client: TcpStream,
    server: &Inner,
    advance: impl Fn(),
) -> io::Result<[TcpStream; 2]> {
    client.set_nodelay(true)?;
    // A vanished client is detected within 30 seconds, as by burn-remote's own sockets.
    let probes = TcpKeepalive::new().with_time(Duration::from_secs(10));
    #[cfg(any(target_os = "linux", target_os = "macos", target_os = "windows"))]
    let probes = probes.with_interval(Duration::from_secs(5)).with_retries(4);
    SockRef::from(&client).set_tcp_keepalive(&probes)?;

    let Some(request) = request(&head(&mut client).await?) else {
        client
            .write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            .await?;
        return Err(io::ErrorKind::InvalidInput.into());
    };
    advance();
    let mut server = server.connect().await?;
    server.set_nodelay(true)?;
    server.write_all(request.as_bytes()).await?;
    let answer = head(&mut server).await?;
    client.write_all(&answer).await?;
    if !answer.starts_with(b"HTTP/1.1 101 ") {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let message = first_message(&mut client).await?;
    advance();
    server.write_all(&message).await?;
    let mut answer = [0; HEAD_BYTES];
    let bytes = server.read(&mut answer).await?;
    // The server answers the token with a message; a pong or a close does not open the session.
    if bytes == 0 || answer[0] != WHOLE_BINARY {
        return Err(io::ErrorKind::InvalidData.into());
    }
    client.write_all(&answer[..bytes]).await?;
    Ok([client, server])
}

/// Reads the head of a request or of an answer and nothing after it: its sender sends no more until
/// it receives a reply.
pub(super) async fn head(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut part = [0; 512];
        let bytes = from.read(&mut part).await?;
        head.extend_from_slice(&part[..bytes]);
        if bytes == 0 || head.len() > HEAD_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
    // Bytes after the first empty line, even one ended by LF alone, are not part of the head.
    let lines = &head[..head.len() - 2];
    if [&b"\n\n"[..], b"\n\r\n"]
        .iter()
        .any(|empty| lines.windows(empty.len()).any(|bytes| bytes == *empty))
    {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(head)
}

/// Builds the request that opens a session for the client that sent this head. Only the client's
/// handshake key reaches the server: no body, second request or header that the server could
/// interpret differently. `None` if the client asks for anything else.
pub(super) fn request(head: &[u8]) -> Option<String> {
    /// The length of 16 bytes in base64 (RFC 6455, section 4.1).
    const KEY: usize = 24;
    let mut lines = std::str::from_utf8(head).ok()?.lines();
    if lines.next()? != SESSIONS {
        return None;
    }
    let mut keys = lines.filter_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("sec-websocket-key")
            .then_some(value.trim())
    });
    let key = keys.next()?;
    let is_base64 = |byte: u8| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte);
    if keys.next().is_some() || key.len() != KEY || !key.bytes().all(is_base64) {
        return None;
    }
    Some(format!(
        "{SESSIONS}\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
    ))
}

/// Reads the first message: one binary frame, masked as required of clients (RFC 6455, section
/// 5.2).
pub(super) async fn first_message(client: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    const MASKED: u8 = 0x80;
    let mut frame = vec![0; 2];
    client.read_exact(&mut frame).await?;
    let length_bytes = match frame[1] ^ MASKED {
        126 => 2,
        127 => 8,
        0..126 => 0,
        _ => return Err(io::ErrorKind::InvalidData.into()),
    };
    frame.resize(2 + length_bytes, 0);
    client.read_exact(&mut frame[2..]).await?;
    let length = match length_bytes {
        0 => u64::from(frame[1] ^ MASKED),
        _ => frame[2..]
            .iter()
            .fold(0, |sum, byte| sum << 8 | u64::from(*byte)),
    };
    let fits = usize::try_from(length)
        .ok()
        .filter(|length| *length <= FIRST_MESSAGE_BYTES);
    let (Some(length), WHOLE_BINARY) = (fits, frame[0]) else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    let start = frame.len();
    let mask_bytes = 4;
    frame.resize(start + mask_bytes + length, 0);
    client.read_exact(&mut frame[start..]).await?;
    Ok(frame)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The outcome of reading `bytes`, and how many are left.
    macro_rules! read {
        ($function:ident, $bytes:expr) => {{
            let mut bytes: &[u8] = $bytes;
            let threads = tokio::runtime::Builder::new_current_thread().build();
            let found = threads.expect("a runtime").block_on($function(&mut bytes));
            (found.map_err(|error| error.kind()), bytes.len())
        }};
    }

    /// Where the system refuses the filter, a stranger is served, and asked for the token.
    #[cfg(target_os = "linux")]
    #[test]
    fn the_inner_port_takes_connections_of_the_guard_alone() {
        let listener = listen_closed().expect("a free port");
        let address = listener.local_addr().expect("bound");
        let inner = Inner::new(&listener).expect("a second handle");
        let other = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let refused = admit(&SockRef::from(&other), None).err();
        let kinds = refused.as_ref().map(io::Error::kind);
        assert!(matches!(
            kinds,
            None | Some(io::ErrorKind::PermissionDenied)
        ));
        let threads = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        threads.expect("a runtime").block_on(async {
            let is_open = || async {
                let stranger = TcpStream::connect(address);
                timeout(Duration::from_millis(300), stranger).await.is_ok()
            };
            assert_eq!(is_open().await, refused.is_some());
            let mut from_guard = inner.connect().await.expect("its own port");
            assert_eq!(is_open().await, refused.is_some());
            // An opened connection stays open, whoever is admitted next.
            inner.connect().await.expect("another port");
            let own = from_guard.local_addr().expect("bound");
            let mut accepted = loop {
                match listener.accept().expect("it came") {
                    (accepted, from) if from == own => break accepted,
                    (_, stranger) => assert!(refused.is_some(), "{stranger}"),
                }
            };
            from_guard.write_all(b"ping").await.expect("sends");
            let mut found = [0; 4];
            std::io::Read::read_exact(&mut accepted, &mut found).expect("arrives");
            assert_eq!(&found, b"ping");
        });
    }

    #[test]
    fn a_head_ends_at_its_first_empty_line() {
        let whole = b"GET /session HTTP/1.1\r\nHost: x\r\n\r\n";
        assert_eq!(read!(head, whole), (Ok(whole.to_vec()), 0));
        let refused = (Err(io::ErrorKind::InvalidData), 0);
        // A ping after the head, whose answer would pass for the one to a first message.
        for end in ["\r\n\r\n", "\r\n\n", "\n\n", "\n\r\n"] {
            let request = format!("GET /session HTTP/1.1\r\nHost: x{end}");
            let smuggled = [request.as_bytes(), b"\x89\x84\0\0\0\0\r\n\r\n"].concat();
            assert_eq!(read!(head, &smuggled), refused, "{end:?}");
        }
        assert_eq!(read!(head, b"GET /session HTTP/1.1\r\n"), refused);
        let long = [&[b'a'; HEAD_BYTES][..], b"\r\n\r\n"].concat();
        assert_eq!(read!(head, &long).0, refused.0);
    }

    #[test]
    fn a_request_is_written_anew_with_the_key_alone() {
        let key = "dGhlIHNhbXBsZSBub25jZQ==";
        let head = |lines: &str| format!("GET /session HTTP/1.1\r\n{lines}\r\n\r\n");
        let plain = request(head(&format!("Sec-WebSocket-Key: {key}")).as_bytes());
        let plain = plain.expect("a key");
        // Headers of a body, another request or another connection are not passed on.
        for more in [
            "Content-Length: 6",
            "Transfer-Encoding: chunked",
            "Upgrade: h2c",
            "Connection: keep-alive",
            "X: \u{e9}",
        ] {
            let lines = format!("{more}\r\nsec-websocket-key:{key}");
            assert_eq!(
                request(head(&lines).as_bytes()),
                Some(plain.clone()),
                "{more}"
            );
        }
        assert_eq!(plain.matches("\r\n\r\n").count(), 1);
        for wrong in [
            head("Host: x"),
            head(&format!(
                "Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Key: {key}"
            )),
            head(&format!("Sec-WebSocket-Key: {}", &key[1..])),
            head("Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=\t"),
            head(&format!("Sec-WebSocket-Key: {key}")).replace("/session", "/data"),
            head(&format!("Sec-WebSocket-Key: {key}")).replace("GET", "POST"),
            head(&format!("Sec-WebSocket-Key: {key}")).replace("1.1", "1.0"),
            String::new(),
        ] {
            assert_eq!(request(wrong.as_bytes()), None, "{wrong:?}");
        }
        assert_eq!(request(b"GET /session HTTP/1.1\r\nX: \xff\r\n\r\n"), None);
    }

    #[test]
    fn a_first_message_is_one_small_binary_frame() {
        let mask = [1, 2, 3, 4];
        let two = [&[0x82, 0x82][..], &mask, b"ab"].concat();
        let more = [&two[..], b"next"].concat();
        assert_eq!(read!(first_message, &more), (Ok(two), 4));
        let most = u16::MAX.to_be_bytes();
        let large = [&[0x82, 0xfe][..], &most, &mask, &[7; 65_535]].concat();
        assert_eq!(read!(first_message, &large), (Ok(large.clone()), 0));
        let bytes = FIRST_MESSAGE_BYTES as u64 + 1;
        let larger = [&[0x82, 0xff][..], &bytes.to_be_bytes(), &mask].concat();
        // Not whole, text, a ping, without a mask; and beyond the limit.
        for foreign in [
            &[0x02, 0x80][..],
            &[0x81, 0x80],
            &[0x89, 0x80],
            &[0x82, 0x02],
            &larger,
        ] {
            let message = [foreign, &[0; 1 << 10]].concat();
            let found = read!(first_message, &message).0;
            assert_eq!(found, Err(io::ErrorKind::InvalidData), "{foreign:?}");
        }
    }

    /// The system's table misses some while others come and go.
    #[cfg(target_os = "linux")]
    #[test]
    fn an_own_client_is_found_among_sockets_that_come_and_go() {
        let pair = || {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
            let address = listener.local_addr().expect("bound");
            let client = std::net::TcpStream::connect(address).expect("it listens");
            // Otherwise each end would stay in the table for a minute.
            let linger = Some(Duration::ZERO);
            SockRef::from(&client).set_linger(linger).expect("set");
            (client, listener.accept().expect("it waits").0)
        };
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut crowd: Vec<_> = (0..300).map(|_| pair()).collect();
                while !over.load(std::sync::atomic::Ordering::Relaxed) {
                    crowd.push(pair());
                    drop(crowd.swap_remove(0));
                }
            });
            let missed = (0..1000).filter(|_| {
                let (client, _server) = pair();
                let ends = [client.local_addr(), client.peer_addr()];
                let [client, server] = ends.map(|end| end.expect("connected"));
                !is_own(client, server)
            });
            let missed = missed.count();
            over.store(true, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(missed, 0);
        });
    }

    /// Ports of clients are shared by connections to several servers.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_client_is_found_by_both_ends_of_its_connection() {
        let listeners = [(); 2].map(|()| {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
            let address = listener.local_addr().expect("bound");
            (listener, address)
        });
        let shared = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let from = shared.local_addr().expect("bound");
        drop(shared);
        let connect = |to: SocketAddr| {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
            socket.set_reuse_address(true).expect("set");
            socket.bind(&from.into()).expect("free");
            socket.connect(&to.into()).expect("it listens");
            socket
        };
        let clients = [connect(listeners[0].1), connect(listeners[1].1)];
        let inodes = listeners.map(|(_, to)| inode(from, to).expect("a table").expect("a row"));
        for (client, inode) in clients.iter().zip(&inodes) {
            let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(client));
            let target = std::fs::read_link(link).expect("a link");
            assert_eq!(target.as_os_str(), format!("socket:[{inode}]").as_str());
        }
        assert!(!is_own(from, SocketAddr::from(([127, 0, 0, 1], 1))));
    }
}

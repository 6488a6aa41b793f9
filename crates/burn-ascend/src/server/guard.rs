//! What a stranger meets in front of burn-remote's server.
//!
//! burn-remote asks for the token in a session's first message, but reads up to 1 GiB for that
//! message and waits for it without limit, and its route for transfers between servers asks for no
//! token. So a connection reaches it only as a WebSocket on the route of sessions, whose first
//! message is small and has come in time; until the server has answered that, nothing else passes.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader, copy_buf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Time for the request and the first message.
const OPENING: Duration = Duration::from_secs(5);
/// Bytes of a request or of its answer: a client's has some 200.
const HEAD_BYTES: usize = 4 << 10;
/// Bytes of the first message, a version, an index and the token.
const FIRST_MESSAGE_BYTES: usize = 64 << 10;
/// Connections that are being opened at once; further ones wait.
const OPENING_AT_ONCE: usize = 512;
/// Bytes on their way in one direction of a session.
const BUFFER_BYTES: usize = 256 << 10;
const SESSIONS: &[u8] = b"GET /session HTTP/1.1\r\n";

/// Passes the connections that `listener` accepts on to the server at `server`, without end. They
/// end with it.
pub(super) async fn pass(listener: TcpListener, server: SocketAddr) {
    let opening = Arc::new(Semaphore::new(OPENING_AT_ONCE));
    let mut connections = JoinSet::new();
    // The semaphore is never closed.
    while let Ok(permit) = opening.clone().acquire_owned().await {
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((client, _)) => {
                connections.spawn(connection(client, server, permit));
            }
            // Out of sockets, or a client that left at once: neither is for ever.
            Err(_) => sleep(Duration::from_millis(50)).await,
        }
    }
}

async fn connection(client: TcpStream, server: SocketAddr, permit: OwnedSemaphorePermit) {
    let opened = timeout(OPENING, open(client, server)).await;
    drop(permit);
    if let Ok(Ok([mut client, mut server])) = opened {
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
    }
}

/// Opens a session for a client, up to the first bytes of the server's answer.
async fn open(mut client: TcpStream, server: SocketAddr) -> io::Result<[TcpStream; 2]> {
    client.set_nodelay(true)?;
    // A client that vanished is noticed in 30 seconds, as by burn-remote's own sockets.
    let probes = TcpKeepalive::new().with_time(Duration::from_secs(10));
    #[cfg(any(target_os = "linux", target_os = "macos", target_os = "windows"))]
    let probes = probes.with_interval(Duration::from_secs(5)).with_retries(4);
    SockRef::from(&client).set_tcp_keepalive(&probes)?;

    let request = head(&mut client).await?;
    if !request.starts_with(SESSIONS) {
        client
            .write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            .await?;
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut server = TcpStream::connect(server).await?;
    server.set_nodelay(true)?;
    server.write_all(&request).await?;
    let answer = head(&mut server).await?;
    client.write_all(&answer).await?;
    if !answer.starts_with(b"HTTP/1.1 101 ") {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    server.write_all(&first_message(&mut client).await?).await?;
    let mut answer = [0; HEAD_BYTES];
    let bytes = server.read(&mut answer).await?;
    client.write_all(&answer[..bytes]).await?;
    Ok([client, server])
}

/// The head of a request or of an answer, and nothing after it: the side that sent it sends no more
/// until it has got something back.
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
    // The server's parser ends a head at its first empty line, also one that LF alone ends, and
    // takes what follows for frames: none may reach it before the first message has been looked at.
    let lines = &head[..head.len() - 2];
    if [&b"\n\n"[..], b"\n\r\n"]
        .iter()
        .any(|empty| lines.windows(empty.len()).any(|bytes| bytes == *empty))
    {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(head)
}

/// The first message: one binary frame, masked as a client's must be (RFC 6455, section 5.2).
pub(super) async fn first_message(client: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    const WHOLE_BINARY: u8 = 0x82;
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
}

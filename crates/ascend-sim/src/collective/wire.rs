//! Ranks of other processes of this host: frames over a loopback connection to the hub's process.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::hub::{Hub, Member, Request};
use super::{Operation, Reduction, RootInfo, code, number};
use crate::codes::{
    Failure, HCCL_E_TCP_CONNECT, HCCL_E_TIMEOUT, INTERNAL_ERROR, Outcome, RT_COLLECTIVE_TIMEOUT,
    SUCCESS,
};

/// How often a listener looks whether it is still needed.
const ACCEPT_POLL: Duration = Duration::from_millis(2);
/// A frame is larger than this only by mistake.
const FRAME_LIMIT: usize = 1 << 31;

/// Accepts ranks of other processes until the hub is closed; the port.
pub(crate) fn listen(id: [u8; 16], hub: &Arc<Hub>) -> Outcome<u16> {
    let failed = |error: std::io::Error| Failure::new(HCCL_E_TCP_CONNECT, error);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
    let port = listener.local_addr().map_err(failed)?.port();
    listener.set_nonblocking(true).map_err(failed)?;
    let hub = Arc::clone(hub);
    let accept = move || {
        while !hub.is_closed() {
            let Ok((stream, _)) = listener.accept() else {
                std::thread::sleep(ACCEPT_POLL);
                continue;
            };
            let hub = Arc::clone(&hub);
            let serve = move || serve(stream, id, &hub);
            // Without a thread the connection closes, which the rank reports.
            let _ = spawn("ascend-sim-rank", serve);
        }
    };
    spawn("ascend-sim-root", accept)?;
    Ok(port)
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Outcome {
    let thread = std::thread::Builder::new().name(name.to_owned());
    let spawned = thread.spawn(work);
    spawned
        .map(drop)
        .map_err(|error| Failure::new(INTERNAL_ERROR, error))
}

/// Serves a rank until its connection ends.
fn serve(mut stream: TcpStream, id: [u8; 16], hub: &Hub) {
    let begin = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_nodelay(true));
    let Ok(first) = begin.and_then(|()| receive(&mut stream)) else {
        return;
    };
    let Some(member) = Fields(&first).member(id) else {
        return;
    };
    let joined = hub.join(&member, None).map(|()| Vec::new());
    let is_in = joined.is_ok();
    if answer(&mut stream, joined).is_err() || !is_in {
        return;
    }
    while let Ok(frame) = receive(&mut stream) {
        let Some(request) = Fields(&frame).request() else {
            return;
        };
        hub.answer_is_due(true);
        let result = hub.exchange(member.rank, request, None);
        let sent = answer(&mut stream, result);
        hub.answer_is_due(false);
        if sent.is_err() {
            return;
        }
    }
}

/// A rank's connection to a hub of another process.
pub(crate) struct Remote {
    stream: Mutex<TcpStream>,
    /// The same connection, to end it while the other is in use.
    ends: TcpStream,
    aborted: AtomicBool,
}

impl Remote {
    pub(crate) fn join(root: &RootInfo, member: &Member, timeout: Duration) -> Outcome<Self> {
        let deadline = Instant::now() + timeout;
        let address = (Ipv4Addr::LOCALHOST, root.port);
        let refused = |error: std::io::Error| {
            let message = format!("the root at 127.0.0.1:{} is not there: {error}", root.port);
            Failure::new(HCCL_E_TCP_CONNECT, message)
        };
        let mut stream = TcpStream::connect(address).map_err(refused)?;
        stream.set_nodelay(true).map_err(refused)?;
        let mut frame = root.id.to_vec();
        for number in [
            member.process,
            member.device,
            member.ranks,
            member.rank,
            member.deterministic.into(),
        ] {
            frame.extend(number.to_le_bytes());
        }
        send(&mut stream, &frame).map_err(refused)?;
        let left = deadline.saturating_duration_since(Instant::now());
        let late = || Failure::new(HCCL_E_TIMEOUT, "not all ranks came to connect");
        outcome(receive_within(&mut stream, left), refused, late)?;
        let ends = stream.try_clone().map_err(refused)?;
        Ok(Self {
            stream: Mutex::new(stream),
            ends,
            aborted: AtomicBool::new(false),
        })
    }

    pub(crate) fn exchange(&self, request: &Request, timeout: Duration) -> Outcome<Vec<u8>> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let mut frame = request.sequence.to_le_bytes().to_vec();
        frame.extend(request.count.to_le_bytes());
        let operation = Operation::ALL.iter().position(|o| *o == request.operation);
        let codes = [
            operation.unwrap_or_default() as i32,
            code(request.number).unwrap_or(-1),
            request.how as i32,
        ];
        frame.extend(codes.iter().flat_map(|code| code.to_le_bytes()));
        frame.extend((request.pairs.len() as u64).to_le_bytes());
        let pairs = request.pairs.as_flattened().iter();
        frame.extend(pairs.flat_map(|count| count.to_le_bytes()));
        frame.extend(&request.data);
        let late = || {
            let message = format!(
                "a rank did not join operation {} of the communicator",
                request.sequence
            );
            Failure::new(RT_COLLECTIVE_TIMEOUT, message)
        };
        // A connection that ends is a rank that is gone: the device would go on waiting for it.
        let deadline = Instant::now() + timeout;
        let wait = |_| {
            while Instant::now() < deadline && !self.aborted.load(Ordering::Acquire) {
                std::thread::sleep(ACCEPT_POLL);
            }
            late()
        };
        send(&mut stream, &frame).map_err(wait)?;
        outcome(receive_within(&mut stream, timeout), wait, late)
    }

    pub(crate) fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        // It may have ended by itself.
        let _ = self.ends.shutdown(Shutdown::Both);
    }
}

/// The hub's answer.
fn outcome(
    received: std::io::Result<Vec<u8>>,
    lost: impl FnOnce(std::io::Error) -> Failure,
    late: impl FnOnce() -> Failure,
) -> Outcome<Vec<u8>> {
    let frame = received.map_err(|error| match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => late(),
        _ => lost(error),
    })?;
    let short = || Failure::new(INTERNAL_ERROR, "an answer of the hub is cut off");
    let (code, rest) = frame.split_first_chunk::<4>().ok_or_else(short)?;
    match i32::from_le_bytes(*code) {
        SUCCESS => Ok(rest.to_vec()),
        code => Err(Failure::new(code, String::from_utf8_lossy(rest))),
    }
}

fn answer(stream: &mut TcpStream, result: Outcome<Vec<u8>>) -> std::io::Result<()> {
    let (code, rest) = match result {
        Ok(data) => (SUCCESS, data),
        Err(failure) => (failure.code, failure.message.into_bytes()),
    };
    send(stream, &[&code.to_le_bytes()[..], &rest].concat())
}

fn send(stream: &mut TcpStream, frame: &[u8]) -> std::io::Result<()> {
    stream.write_all(&(frame.len() as u64).to_le_bytes())?;
    stream.write_all(frame)
}

fn receive(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut length = [0; 8];
    stream.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length) as usize;
    if length > FRAME_LIMIT {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut frame = Vec::new();
    let read = stream.take(length as u64).read_to_end(&mut frame)?;
    if read < length {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(frame)
}

fn receive_within(stream: &mut TcpStream, timeout: Duration) -> std::io::Result<Vec<u8>> {
    stream.set_read_timeout(Some(timeout.max(Duration::from_millis(1))))?;
    receive(stream)
}

/// The fields of a frame.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*field)
    }

    fn member(mut self, id: [u8; 16]) -> Option<Member> {
        if self.take::<16>()? != id {
            return None;
        }
        let mut number = || self.take().map(u32::from_le_bytes);
        Some(Member {
            process: number()?,
            device: number()?,
            ranks: number()?,
            rank: number()?,
            deterministic: number()? != 0,
        })
    }

    fn request(mut self) -> Option<Request> {
        let sequence = self.take().map(u64::from_le_bytes)?;
        let count = self.take().map(u64::from_le_bytes)?;
        let mut next = || self.take().map(i32::from_le_bytes);
        let [operation, dtype, how] = [next()?, next()?, next()?];
        let listed = self.take().map(u64::from_le_bytes)?;
        let mut pairs = Vec::new();
        for _ in 0..listed {
            let mut next = || self.take().map(u64::from_le_bytes);
            pairs.push([next()?, next()?]);
        }
        Some(Request {
            sequence,
            operation: *Operation::ALL.get(operation as usize)?,
            number: number(dtype)?,
            how: Reduction::from_code(how)?,
            count,
            pairs,
            data: self.0.to_vec(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_is_cut_off_is_an_error() {
        let lost = |error: std::io::Error| Failure::new(HCCL_E_TCP_CONNECT, error);
        let late = || Failure::new(HCCL_E_TIMEOUT, "late");
        let cut = outcome(Ok(vec![0, 0]), lost, late);
        assert_eq!(cut.expect_err("cut").code, INTERNAL_ERROR);
        let late_again = || Failure::new(HCCL_E_TIMEOUT, "late");
        let result = outcome(Err(ErrorKind::TimedOut.into()), lost, late_again);
        assert_eq!(result.expect_err("late").code, HCCL_E_TIMEOUT);
    }
}

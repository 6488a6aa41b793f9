//! Bytes of a stranger to `mrope serve` before the token: read in whatever parts it comes, a head
//! ends where the server's parser ends it, and a first message is one small frame and no byte more.

#![no_main]

use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use httparse::{EMPTY_HEADER, Request, Status};
use tokio::io::{AsyncRead, ReadBuf};

// The rest of it needs sockets; its crate needs burn.
#[allow(dead_code)]
#[path = "../../crates/burn-fused/src/serve/guard.rs"]
mod guard;
#[allow(dead_code)]
#[path = "../../crates/burn-fused/src/openings.rs"]
mod openings;

const HEAD_BYTES: usize = 4 << 10;
const MESSAGE_BYTES: usize = 64 << 10;

/// A connection whose bytes come in parts of one size, and that then ends.
struct Parts<'a> {
    left: &'a [u8],
    part: usize,
}

impl AsyncRead for Parts<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let bytes = self.part.min(to.remaining()).min(self.left.len());
        let (part, left) = self.left.split_at(bytes);
        to.put_slice(part);
        self.left = left;
        Poll::Ready(Ok(()))
    }
}

fn ready<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(found) => found,
        Poll::Pending => panic!("it waits, though its bytes are there"),
    }
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let [part, sent @ ..] = bytes else { return };
    let part = 1 + usize::from(*part);
    let mut from = Parts { left: sent, part };
    let head = ready(guard::head(&mut from));
    let read = sent.len() - from.left.len();
    assert!(read <= HEAD_BYTES + 512, "{read} bytes of a head");
    if let Ok(head) = head {
        assert!(head.len() <= HEAD_BYTES && head[..] == sent[..read]);
        let mut headers = [EMPTY_HEADER; 100];
        if let Ok(Status::Complete(end)) = Request::new(&mut headers).parse(&head) {
            assert_eq!(end, head.len(), "bytes after the head");
        }
    }
    let mut from = Parts { left: sent, part };
    let message = ready(guard::first_message(&mut from));
    let read = sent.len() - from.left.len();
    assert!(read <= MESSAGE_BYTES + 14, "{read} bytes of a message");
    if let Ok(message) = message {
        assert_eq!(message, sent[..read]);
        assert_eq!(frame_bytes(sent), Some(read));
    }
});

/// The length of the frame that `sent` begins with, if it is a whole binary message with a mask
/// (RFC 6455, section 5.2).
fn frame_bytes(sent: &[u8]) -> Option<usize> {
    let (0x82, second) = (*sent.first()?, *sent.get(1)?) else {
        return None;
    };
    let (header, payload) = match second.checked_sub(0x80)? {
        126 => (
            4,
            u16::from_be_bytes(sent.get(2..4)?.try_into().ok()?).into(),
        ),
        127 => (10, u64::from_be_bytes(sent.get(2..10)?.try_into().ok()?)),
        length => (2, length.into()),
    };
    Some(header + 4 + usize::try_from(payload).ok()?)
}

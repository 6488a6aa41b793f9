//! Frames between processes that share a token. Each is authenticated and at most 1 MiB long.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use subtle::ConstantTimeEq as _;

/// The largest frame. Frames carry root infos, numbers and causes.
pub(super) const LIMIT: usize = 1 << 20;
pub(super) const TAG: usize = 32;

/// HMAC-SHA256 of the concatenated parts.
pub(super) fn tag(key: &[u8], parts: &[&[u8]]) -> [u8; TAG] {
    let any_length = |error| unreachable!("a key has any length: {error}");
    let mut mac = Hmac::<Sha256>::new_from_slice(key).unwrap_or_else(any_length);
    parts.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().into()
}

/// True if two tags are equal, in a time that does not depend on where they differ.
pub(super) fn is_equal(left: &[u8], right: &[u8]) -> bool {
    left.ct_eq(right).into()
}

fn write_raw(stream: &mut TcpStream, parts: &[&[u8]]) -> Result<()> {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    if length > LIMIT {
        return Err(Error::new(ErrorKind::InvalidInput, "a frame is too large"));
    }
    let mut frame = (length as u32).to_le_bytes().to_vec();
    parts.iter().for_each(|part| frame.extend(*part));
    stream.write_all(&frame)
}

/// Writes a frame without a tag: of the handshake.
pub(super) fn write_plain(stream: &mut TcpStream, frame: &[u8]) -> Result<()> {
    write_raw(stream, &[frame])
}

/// Reads a frame of at most `limit` bytes.
pub(super) fn read_plain(stream: &mut TcpStream, limit: usize) -> Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > limit {
        return Err(Error::new(ErrorKind::InvalidData, "a frame is too large"));
    }
    let mut frame = vec![0; length];
    stream.read_exact(&mut frame)?;
    Ok(frame)
}

/// The key and the number of a connection's frames in one direction.
#[derive(Clone, Debug)]
pub(super) struct Seal {
    key: [u8; TAG],
    count: u64,
}

impl Seal {
    pub(super) fn new(key: [u8; TAG]) -> Self {
        Self { key, count: 0 }
    }

    fn next(&mut self, frame: &[u8]) -> [u8; TAG] {
        self.count += 1;
        tag(&self.key, &[&self.count.to_le_bytes(), frame])
    }

    pub(super) fn write(&mut self, stream: &mut TcpStream, frame: &[u8]) -> Result<()> {
        let tag = self.next(frame);
        write_raw(stream, &[&tag, frame])
    }

    pub(super) fn read(&mut self, stream: &mut TcpStream) -> Result<Vec<u8>> {
        let mut sealed = read_plain(stream, LIMIT)?;
        let frame = sealed.split_off(TAG.min(sealed.len()));
        if !is_equal(&sealed, &self.next(&frame)) {
            let reason = "a frame is not of the other process";
            return Err(Error::new(ErrorKind::InvalidData, reason));
        }
        Ok(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test cases 2 and 6 of RFC 4231.
    #[test]
    fn tags_are_those_of_the_standard() {
        let hex = |tag: [u8; TAG]| tag.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let found = tag(b"Jefe", &[b"what do ya want ", b"for nothing?"]);
        let expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        assert_eq!(hex(found), expected);
        let long = [0xaa; 131];
        let text = b"Test Using Larger Than Block-Size Key - Hash Key First";
        let expected = "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54";
        assert_eq!(hex(tag(&long, &[text])), expected);
        assert!(is_equal(&found, &found) && !is_equal(&found, &found[..31]));
    }
}

//! The hash that identifies files.

/// The 64-bit FNV-1a hash of all bytes added. It detects changes and damage, not malicious edits.
///
/// # Source
/// Eastlake et al., The FNV Non-Cryptographic Hash Algorithm, IETF draft-eastlake-fnv
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint(u64);

impl Default for Fingerprint {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fingerprint {
    /// Adds bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        let hash =
            |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        self.0 = bytes.iter().fold(self.0, hash);
    }

    /// The hash.
    pub fn value(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::Fingerprint;

    #[test]
    fn the_hash_is_that_of_the_draft() {
        let mut hash = Fingerprint::default();
        hash.add(b"foo");
        hash.add(b"bar");
        assert_eq!(hash.value(), 0x8594_4171_f739_67e8);
    }
}

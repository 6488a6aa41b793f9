//! Bits of a scan, and Huffman codes.

use crate::Result;

use super::fault;
use super::segments::Codes;

/// Bits of a code that are looked up at once; longer codes are compared length by length.
const LOOKED_UP: u32 = 9;
/// Bits of a code with the value that follows it, looked up together.
const TOGETHER: u32 = 10;
/// At least this many bits are at hand for a code and a value.
const NEEDED: u32 = 32;

/// Bits of a segment of entropy-coded data. Behind its end are zeros.
pub(super) struct Bits<'a> {
    data: &'a [u8],
    /// The next byte that is not in `word`.
    at: usize,
    /// The next bits, from the highest.
    word: u64,
    /// Bits in `word`.
    left: u32,
    /// Zeros in and taken from `word` that are not in the file.
    zeros: u32,
    /// True if the data ended without a marker.
    ended: bool,
}

impl<'a> Bits<'a> {
    pub(super) fn new(data: &'a [u8], at: usize) -> Self {
        Self {
            data,
            at,
            word: 0,
            left: 0,
            zeros: 0,
            ended: false,
        }
    }

    /// The place of the next marker, or of bytes before it.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// True if bits were taken that the file does not have.
    pub(super) fn is_overrun(&self) -> bool {
        self.zeros > self.left
    }

    /// True if the file ended, rather than the segment.
    pub(super) fn is_at_file_end(&self) -> bool {
        self.ended
    }

    /// Makes sure that [`NEEDED`] bits are at hand.
    #[inline(always)]
    fn fill(&mut self) {
        if self.left < NEEDED {
            self.refill();
        }
    }

    #[inline]
    fn refill(&mut self) {
        if let Some(bytes) = self.data.get(self.at..).and_then(<[u8]>::first_chunk::<8>) {
            let next = u64::from_be_bytes(*bytes);
            // True if no byte is 0xff: none of its complement is 0.
            let inverse = !next;
            let is_plain =
                inverse.wrapping_sub(0x0101_0101_0101_0101) & next & 0x8080_8080_8080_8080 == 0;
            if is_plain {
                self.word |= next >> self.left;
                let bytes = (64 - self.left) / 8;
                self.at += bytes as usize;
                self.left += 8 * bytes;
                return;
            }
        }
        self.refill_bytes();
    }

    #[cold]
    fn refill_bytes(&mut self) {
        while self.left <= 56 {
            let byte = match self.data.get(self.at) {
                Some(0xff) => {
                    let mut next = self.at + 1;
                    while self.data.get(next) == Some(&0xff) {
                        next += 1;
                    }
                    match self.data.get(next) {
                        Some(0) => {
                            self.at = next + 1;
                            Some(0xff)
                        }
                        after => {
                            self.ended |= after.is_none();
                            None
                        }
                    }
                }
                Some(&byte) => {
                    self.at += 1;
                    Some(byte)
                }
                None => {
                    self.ended = true;
                    None
                }
            };
            self.zeros += if byte.is_none() { 8 } else { 0 };
            self.word |= u64::from(byte.unwrap_or(0)) << (56 - self.left);
            self.left += 8;
        }
    }

    #[inline(always)]
    fn peek(&self, bits: u32) -> usize {
        (self.word >> (64 - bits)) as usize
    }

    #[inline(always)]
    fn skip(&mut self, bits: u32) {
        self.word <<= bits;
        self.left -= bits;
    }

    /// Takes 1 to 16 bits.
    #[inline(always)]
    fn take(&mut self, bits: u32) -> i32 {
        let value = self.peek(bits) as i32;
        self.skip(bits);
        value
    }

    /// Takes a bit.
    #[inline(always)]
    pub(super) fn bit(&mut self) -> bool {
        self.fill();
        self.take(1) == 1
    }

    /// Takes up to 15 bits as they are.
    #[inline(always)]
    pub(super) fn number(&mut self, bits: u32) -> u32 {
        if bits == 0 {
            return 0;
        }
        self.fill();
        self.take(bits) as u32
    }

    /// Takes a value of 1 to 15 bits, whose first bit tells its sign.
    #[inline(always)]
    pub(super) fn value(&mut self, bits: u32) -> i32 {
        extend(self.take(bits), bits)
    }
}

/// A value from its bits: those that begin with 0 are negative, in ones' complement.
#[inline(always)]
fn extend(value: i32, bits: u32) -> i32 {
    if value < 1 << (bits - 1) {
        value - (1 << bits) + 1
    } else {
        value
    }
}

/// A Huffman table that is prepared for decoding.
pub(super) struct Huffman {
    /// For each start of [`LOOKED_UP`] bits, the length of the code and its symbol, or 0.
    short: Box<[u16; 1 << LOOKED_UP]>,
    /// For each start of [`TOGETHER`] bits that holds a code with its value: the value, the run of
    /// zeros before it, and the number of bits; 0 for others.
    valued: Box<[u32; 1 << TOGETHER]>,
    /// The largest code of each length, or -1.
    largest: [i32; 17],
    /// Index of a symbol less its code, of each length.
    offset: [i32; 17],
    symbols: [u8; 256],
}

impl Huffman {
    /// # Errors
    /// [`crate::VlmDataError::Decode`] if the table is missing, has more codes than bits allow, or
    /// has symbols that are none of DC
    pub(super) fn new(codes: Option<&Codes>, is_dc: bool) -> Result<Self> {
        let Codes { counts, symbols } = codes.ok_or_else(|| fault("a Huffman table is missing"))?;
        let mut table = Self {
            short: Box::new([0; 1 << LOOKED_UP]),
            valued: Box::new([0; 1 << TOGETHER]),
            largest: [-1; 17],
            offset: [0; 17],
            symbols: *symbols,
        };
        let (mut code, mut index) = (0_u32, 0_usize);
        for (length, &count) in (1..).zip(counts) {
            table.offset[length as usize] = index as i32 - code as i32;
            for _ in 0..count {
                let symbol = *symbols
                    .get(index)
                    .filter(|&&symbol| code < 1 << length && !(is_dc && symbol > 15))
                    .ok_or_else(|| fault("a Huffman table is damaged"))?;
                table.look_up(code, length, symbol);
                code += 1;
                index += 1;
            }
            if count > 0 {
                table.largest[length as usize] = code as i32 - 1;
            }
            code <<= 1;
        }
        Ok(table)
    }

    /// Enters a code.
    fn look_up(&mut self, code: u32, length: u32, symbol: u8) {
        if length <= LOOKED_UP {
            let first = (code << (LOOKED_UP - length)) as usize;
            let entry = (length as u16) << 8 | u16::from(symbol);
            self.short[first..][..1 << (LOOKED_UP - length)].fill(entry);
        }
        let (run, bits) = (u32::from(symbol >> 4), u32::from(symbol & 15));
        let total = length + bits;
        if bits > 0 && total <= TOGETHER {
            for value in 0..1 << bits {
                let first = ((code << bits | value) << (TOGETHER - total)) as usize;
                let entry = (extend(value as i32, bits) as u32) << 16 | run << 8 | total;
                self.valued[first..][..1 << (TOGETHER - total)].fill(entry);
            }
        }
    }

    /// Takes a code with its value: the run of zeros, and the value unless the symbol has none.
    #[inline(always)]
    pub(super) fn coefficient(&self, bits: &mut Bits<'_>) -> (usize, Option<i32>) {
        bits.fill();
        let entry = self.valued[bits.peek(TOGETHER)];
        if entry != 0 {
            bits.skip(entry & 0xff);
            return ((entry >> 8 & 15) as usize, Some(entry as i32 >> 16));
        }
        let symbol = self.take(bits);
        let size = u32::from(symbol & 15);
        let value = (size > 0).then(|| bits.value(size));
        (usize::from(symbol >> 4), value)
    }

    /// Takes a symbol.
    #[inline(always)]
    pub(super) fn symbol(&self, bits: &mut Bits<'_>) -> u8 {
        bits.fill();
        self.take(bits)
    }

    #[inline(always)]
    fn take(&self, bits: &mut Bits<'_>) -> u8 {
        let entry = self.short[bits.peek(LOOKED_UP)];
        if entry != 0 {
            bits.skip(u32::from(entry >> 8));
            return entry as u8;
        }
        self.take_long(bits)
    }

    /// Takes a code of more than [`LOOKED_UP`] bits. Bits that are no code are the symbol 0 of 17
    /// bits.
    #[cold]
    fn take_long(&self, bits: &mut Bits<'_>) -> u8 {
        for length in LOOKED_UP + 1..=16 {
            let code = bits.peek(length) as i32;
            if code <= self.largest[length as usize] {
                bits.skip(length);
                let index = code + self.offset[length as usize];
                return self.symbols[(index & 255) as usize];
            }
        }
        bits.skip(17);
        0
    }
}

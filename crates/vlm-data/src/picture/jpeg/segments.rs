//! Markers, tables and the frame.

use crate::Result;

use super::super::read::TRUNCATED;
use super::fault;

/// Samples in a block.
pub(super) const BLOCK: usize = 64;
/// The coefficients of a block.
pub(super) type Block = [i16; BLOCK];

/// The place in a block of each coefficient in the order of the file. A run beyond the block's end
/// falls on its last place.
pub(super) const ORDER: [u8; 128] = {
    let mut order = [63; 128];
    let (mut x, mut y, mut k) = (0, 0, 0);
    while k < BLOCK {
        order[k] = (y * 8 + x) as u8;
        // Diagonals of an even sum go up.
        if (x + y) % 2 == 0 {
            if x == 7 {
                y += 1;
            } else {
                x += 1;
                y = if y > 0 { y - 1 } else { 0 };
            }
        } else if y == 7 {
            x += 1;
        } else {
            y += 1;
            x = if x > 0 { x - 1 } else { 0 };
        }
        k += 1;
    }
    order
};

/// Second bytes of markers.
pub(super) mod marker {
    pub(in super::super) const TEM: u8 = 0x01;
    pub(in super::super) const SOF0: u8 = 0xc0;
    pub(in super::super) const SOF1: u8 = 0xc1;
    pub(in super::super) const SOF2: u8 = 0xc2;
    pub(in super::super) const DHT: u8 = 0xc4;
    pub(in super::super) const DAC: u8 = 0xcc;
    pub(in super::super) const RST0: u8 = 0xd0;
    pub(in super::super) const RST7: u8 = 0xd7;
    pub(in super::super) const EOI: u8 = 0xd9;
    pub(in super::super) const SOS: u8 = 0xda;
    pub(in super::super) const DQT: u8 = 0xdb;
    pub(in super::super) const DNL: u8 = 0xdc;
    pub(in super::super) const DRI: u8 = 0xdd;
    pub(in super::super) const APP0: u8 = 0xe0;
    pub(in super::super) const APP1: u8 = 0xe1;
    pub(in super::super) const APP14: u8 = 0xee;
    pub(in super::super) const APP15: u8 = 0xef;
    pub(in super::super) const COM: u8 = 0xfe;
}

/// A Huffman table as the file has it: the number of codes of each length, and their symbols.
#[derive(Clone, Copy)]
pub(super) struct Codes {
    pub(super) counts: [u8; 16],
    pub(super) symbols: [u8; 256],
}

/// A colour of the frame.
#[derive(Clone)]
pub(super) struct Component {
    id: u8,
    /// Samples across and down for each of the least sampled component's.
    pub(super) factors: [usize; 2],
    table: usize,
    /// The table of quantization at the component's first scan, in natural order.
    pub(super) quant: Option<[u16; BLOCK]>,
    /// Width and height in samples.
    pub(super) size: [usize; 2],
    /// Width and height in blocks.
    pub(super) blocks: [usize; 2],
    /// Width and height in blocks, completed to units of the frame.
    pub(super) padded: [usize; 2],
}

/// The frame: a picture's geometry.
#[derive(Clone)]
pub(super) struct Frame {
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) progressive: bool,
    pub(super) components: Vec<Component>,
    /// The largest factors of the components.
    pub(super) largest: [usize; 2],
    /// Width and height in units, each of `largest` blocks.
    pub(super) units: [usize; 2],
}

/// The colours that the components stand for.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Colours {
    Grey,
    Rgb,
    Ycc,
    Cmyk,
    Ycck,
}

/// A scan's parameters.
pub(super) struct Scan {
    /// Index of the component, of its DC table and of its AC table.
    pub(super) components: Vec<[usize; 3]>,
    /// First and last coefficient.
    pub(super) band: [usize; 2],
    /// Bit above the first one sent before, or 0.
    pub(super) high: u32,
    /// The lowest bit sent.
    pub(super) low: u32,
}

/// What follows a run of segments.
pub(super) enum Next {
    Scan(Scan),
    End,
}

/// A file read up to its first scan, and beyond.
pub(crate) struct Header<'a> {
    pub(super) data: &'a [u8],
    pub(super) at: usize,
    /// True if the end of the file counts as the last marker.
    pub(super) lenient: bool,
    quant: [Option<[u16; BLOCK]>; 4],
    pub(super) dc: [Option<Codes>; 4],
    pub(super) ac: [Option<Codes>; 4],
    /// Units between restart markers, or 0.
    pub(super) restart: usize,
    frame: Option<Frame>,
    pub(super) first_scan: Option<Scan>,
    is_jfif: bool,
    adobe: Option<u8>,
    exif: Vec<u8>,
    xmp: Option<&'a [u8]>,
}

impl<'a> Header<'a> {
    /// Reads the segments before the first scan.
    pub(crate) fn read(data: &'a [u8]) -> Result<Self> {
        let mut header = Self {
            data,
            at: 2,
            lenient: false,
            quant: [None; 4],
            dc: [None; 4],
            ac: [None; 4],
            restart: 0,
            frame: None,
            first_scan: None,
            is_jfif: false,
            adobe: None,
            exif: Vec::new(),
            xmp: None,
        };
        match header.segments()? {
            Next::Scan(scan) => header.first_scan = Some(scan),
            Next::End => return Err(fault("it has no scan")),
        }
        Ok(header)
    }

    /// Width and height in pixels.
    pub(crate) fn sides(&self) -> [usize; 2] {
        self.frame
            .as_ref()
            .map_or([0, 0], |frame| [frame.width, frame.height])
    }

    /// Bytes that decoding takes: RGB, and all coefficients if they come in several scans.
    pub(crate) fn memory(&self) -> u64 {
        let Some(frame) = &self.frame else {
            return 0;
        };
        let scan = self.first_scan.as_ref();
        let is_whole = scan.is_some_and(|scan| frame.is_whole(scan));
        let blocks: usize = frame.components.iter().map(Component::all_blocks).sum();
        let coefficients = if is_whole {
            0
        } else {
            blocks * size_of::<Block>()
        };
        (3 * frame.width * frame.height + coefficients) as u64
    }

    /// EXIF data, of all segments.
    pub(crate) fn exif(&self) -> Option<&[u8]> {
        (!self.exif.is_empty()).then_some(&self.exif)
    }

    /// XMP data, of the last segment.
    pub(crate) fn xmp(&self) -> Option<&[u8]> {
        self.xmp
    }

    pub(super) fn frame(&self) -> Result<Frame> {
        self.frame.clone().ok_or_else(|| fault("it has no frame"))
    }

    /// The next marker, wherever it is.
    pub(super) fn marker(&mut self) -> Result<u8> {
        loop {
            match self.data.get(self.at..) {
                Some([0xff, 0xff, ..]) => self.at += 1,
                Some([0xff, code, ..]) if *code > 0 => {
                    self.at += 2;
                    return Ok(*code);
                }
                Some([_, _, ..]) => self.at += 1,
                _ if self.lenient => return Ok(marker::EOI),
                _ => return Err(fault(TRUNCATED)),
            }
        }
    }

    /// The contents of a segment.
    fn segment(&mut self) -> Result<&'a [u8]> {
        let rest = self.data.get(self.at..).unwrap_or(&[]);
        let [high, low, ..] = *rest else {
            return Err(fault(TRUNCATED));
        };
        let length = usize::from(u16::from_be_bytes([high, low]));
        if length < 2 {
            return Err(fault(format!(
                "a segment has {length} bytes, expected 2 or more"
            )));
        }
        let contents = rest.get(2..length).ok_or_else(|| fault(TRUNCATED))?;
        self.at += length;
        Ok(contents)
    }

    /// Reads segments up to a scan or the end of the picture.
    pub(super) fn segments(&mut self) -> Result<Next> {
        loop {
            let code = self.marker()?;
            match code {
                marker::EOI => return Ok(Next::End),
                marker::RST0..=marker::RST7 | marker::TEM => continue,
                _ => {}
            }
            let contents = match self.segment() {
                // Cut off between scans.
                Err(_) if self.lenient => return Ok(Next::End),
                contents => contents?,
            };
            match code {
                marker::SOF0 | marker::SOF1 | marker::SOF2 => {
                    if self.frame.is_some() {
                        return Err(fault("it has two frames"));
                    }
                    self.frame = Some(Frame::parse(contents, code == marker::SOF2)?);
                }
                marker::DHT => self.huffman(contents)?,
                marker::DQT => self.quantization(contents)?,
                marker::DRI => match *contents {
                    [high, low] => self.restart = usize::from(u16::from_be_bytes([high, low])),
                    _ => return Err(fault("its restart interval is not a number of 16 bits")),
                },
                marker::SOS => return self.scan(contents).map(Next::Scan),
                marker::APP0..=marker::APP15 => self.application(code, contents),
                marker::COM | marker::DNL | marker::DAC => {}
                0xc3..=0xcf => {
                    let kinds = match code {
                        0xc3 | 0xc7 | 0xcb | 0xcf => "lossless",
                        0xc9 | 0xca => "arithmetic",
                        _ => "hierarchical",
                    };
                    let reason = format!("its coding is {kinds}; save it as a baseline JPEG");
                    return Err(fault(reason));
                }
                _ => return Err(fault(format!("marker {code:#04x} is unknown"))),
            }
        }
    }

    fn application(&mut self, code: u8, contents: &'a [u8]) {
        const XMP: &[u8] = b"http://ns.adobe.com/xap/1.0/\0";
        match code {
            marker::APP0 if contents.len() >= 14 && contents.starts_with(b"JFIF\0") => {
                self.is_jfif = true;
            }
            marker::APP1 => {
                // Pillow joins the segments, with one prefix.
                if let Some(exif) = contents.strip_prefix(b"Exif\0\0") {
                    self.exif.extend_from_slice(exif);
                } else if let Some(xmp) = contents.strip_prefix(XMP) {
                    self.xmp = Some(xmp);
                }
            }
            marker::APP14 if contents.len() >= 12 && contents.starts_with(b"Adobe") => {
                self.adobe = Some(contents[11]);
            }
            _ => {}
        }
    }

    fn huffman(&mut self, mut rest: &[u8]) -> Result<()> {
        let wrong = || fault("a Huffman table is damaged");
        while rest.len() > 16 {
            let (head, tail) = rest.split_at(17);
            let mut counts = [0; 16];
            counts.copy_from_slice(&head[1..]);
            let count: usize = counts.iter().map(|&count| usize::from(count)).sum();
            if count > 256 || count > tail.len() {
                return Err(wrong());
            }
            let mut symbols = [0; 256];
            symbols[..count].copy_from_slice(&tail[..count]);
            let (tables, index) = match head[0] {
                index if index >= 0x10 => (&mut self.ac, index - 0x10),
                index => (&mut self.dc, index),
            };
            let table = tables.get_mut(usize::from(index)).ok_or_else(wrong)?;
            *table = Some(Codes { counts, symbols });
            rest = &tail[count..];
        }
        if rest.is_empty() {
            Ok(())
        } else {
            Err(wrong())
        }
    }

    fn quantization(&mut self, mut rest: &[u8]) -> Result<()> {
        let wrong = || fault("a quantization table is damaged");
        while let [head, tail @ ..] = rest {
            let bytes = if *head >> 4 == 0 { 1 } else { 2 };
            let values = tail.get(..BLOCK * bytes).ok_or_else(wrong)?;
            let table = self
                .quant
                .get_mut(usize::from(head & 15))
                .ok_or_else(wrong)?;
            let table = table.insert([0; BLOCK]);
            for (k, value) in values.chunks_exact(bytes).enumerate() {
                table[usize::from(ORDER[k])] = value
                    .iter()
                    .fold(0, |sum, &byte| sum << 8 | u16::from(byte));
            }
            rest = &tail[BLOCK * bytes..];
        }
        Ok(())
    }

    fn scan(&mut self, contents: &[u8]) -> Result<Scan> {
        let wrong = || fault("the header of a scan is damaged");
        let frame = self
            .frame
            .as_ref()
            .ok_or_else(|| fault("a scan comes before the frame"))?;
        let [count, rest @ ..] = contents else {
            return Err(wrong());
        };
        let count = usize::from(*count);
        if !(1..=4).contains(&count) || rest.len() != 2 * count + 3 {
            return Err(wrong());
        }
        let mut components: Vec<[usize; 3]> = Vec::new();
        for pair in rest[..2 * count].chunks_exact(2) {
            let is_free = |index: usize| !components.iter().any(|[used, ..]| *used == index);
            let index = (0..frame.components.len())
                .find(|&index| frame.components[index].id == pair[0] && is_free(index))
                .ok_or_else(wrong)?;
            let tables = [pair[1] >> 4, pair[1] & 15].map(usize::from);
            components.push([index, tables[0], tables[1]]);
        }
        let [first, last, bits] = [0, 1, 2].map(|index| rest[2 * count + index]);
        Ok(Scan {
            components,
            band: [usize::from(first), usize::from(last)],
            high: u32::from(bits >> 4),
            low: u32::from(bits & 15),
        })
    }

    /// Fixes the quantization of the components that a scan is the first of.
    pub(super) fn latch(&self, scan: &Scan, frame: &mut Frame) -> Result<()> {
        for &[index, ..] in &scan.components {
            let component = &mut frame.components[index];
            if component.quant.is_none() {
                let table = self.quant.get(component.table).copied().flatten();
                component.quant = Some(table.ok_or_else(|| {
                    fault(format!("quantization table {} is missing", component.table))
                })?);
            }
        }
        Ok(())
    }

    /// The colours of the components.
    pub(super) fn colours(&self, frame: &Frame) -> Colours {
        let ids: Vec<u8> = frame.components.iter().map(|one| one.id).collect();
        match (ids.len(), self.adobe) {
            (1, _) => Colours::Grey,
            (3, _) if self.is_jfif => Colours::Ycc,
            (3, Some(0)) => Colours::Rgb,
            (3, None) if ids == *b"RGB" => Colours::Rgb,
            (3, _) => Colours::Ycc,
            (_, None | Some(0)) => Colours::Cmyk,
            _ => Colours::Ycck,
        }
    }
}

impl Component {
    /// Blocks of all units.
    pub(super) fn all_blocks(&self) -> usize {
        self.padded.iter().product()
    }
}

impl Frame {
    /// True if a scan has all coefficients of all components.
    pub(super) fn is_whole(&self, scan: &Scan) -> bool {
        !self.progressive && scan.components.len() >= self.components.len()
    }

    fn parse(contents: &[u8], progressive: bool) -> Result<Self> {
        let wrong = || fault("the header of its frame is damaged");
        let [bits, h1, h0, w1, w0, count, rest @ ..] = contents else {
            return Err(wrong());
        };
        if *bits != 8 {
            return Err(fault(format!("its samples have {bits} bits, expected 8")));
        }
        let count = usize::from(*count);
        if !matches!(count, 1 | 3 | 4) {
            return Err(fault(format!("it has {count} colours, expected 1, 3 or 4")));
        }
        if rest.len() != 3 * count {
            return Err(wrong());
        }
        let [height, width] = [[*h1, *h0], [*w1, *w0]].map(|b| usize::from(u16::from_be_bytes(b)));
        let factors = |byte: u8| {
            if count == 1 {
                [1, 1] // A single component is never interleaved.
            } else {
                [byte >> 4, byte & 15].map(usize::from)
            }
        };
        let mut largest = [1, 1];
        for one in rest.chunks_exact(3) {
            let found = [one[1] >> 4, one[1] & 15];
            if found.iter().any(|factor| !(1..=4).contains(factor)) {
                return Err(fault(format!("its sampling is {found:?}, expected 1 to 4")));
            }
            for (largest, factor) in largest.iter_mut().zip(factors(one[1])) {
                *largest = factor.max(*largest);
            }
        }
        let sides = [width, height];
        let units = [0, 1].map(|axis| sides[axis].div_ceil(8 * largest[axis]));
        let components = rest.chunks_exact(3).map(|one| {
            let factors = factors(one[1]);
            let scaled = [0, 1].map(|axis| (sides[axis] * factors[axis], largest[axis]));
            Component {
                id: one[0],
                factors,
                table: usize::from(one[2]),
                quant: None,
                size: scaled.map(|(side, largest)| side.div_ceil(largest)),
                blocks: scaled.map(|(side, largest)| side.div_ceil(8 * largest)),
                padded: [0, 1].map(|axis| units[axis] * factors[axis]),
            }
        });
        Ok(Self {
            width,
            height,
            progressive,
            components: components.collect(),
            largest,
            units,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_that_of_the_standard() {
        // Figure A.6: the first two and the last two diagonals.
        assert_eq!(ORDER[..6], [0, 1, 8, 16, 9, 2]);
        assert_eq!(ORDER[58..64], [61, 54, 47, 55, 62, 63]);
        let mut all = ORDER[..64].to_vec();
        all.sort_unstable();
        assert!(
            all.iter()
                .enumerate()
                .all(|(i, &place)| i == usize::from(place))
        );
        assert!(ORDER[64..].iter().all(|&place| place == 63));
    }
}

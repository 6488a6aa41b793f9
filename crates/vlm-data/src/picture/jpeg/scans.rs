//! Coefficients of sequential and progressive scans.

use crate::Result;
use crate::memory::zeros;

use super::super::read::TRUNCATED;
use super::bits::{Bits, Huffman};
use super::fault;
use super::rows::Rows;
use super::segments::{BLOCK, Block, Frame, Header, Next, ORDER, Scan, marker};
use super::smooth::{Progress, Smoothing};
use super::transform;

/// Blocks of a scan whose components are interleaved, at most.
const MAX_UNIT_BLOCKS: usize = 10;
/// Blocks that all scans of a picture may visit: so many of any picture, and so many times all of
/// its blocks. Encoders write about ten scans.
const VISITS: usize = 1 << 26;
const VISITS_PER_BLOCK: usize = 16;
/// Bytes after the last unit that Pillow's decoder takes for an end without its marker.
const SPARE_BYTES: usize = 8;

/// Decodes a file whose segments up to the first scan were read.
pub(super) fn decode(mut header: Header<'_>) -> Result<Vec<u8>> {
    let mut frame = header.frame()?;
    let rows = Rows::new(&frame, header.colours(&frame))?;
    let scan = header
        .first_scan
        .take()
        .ok_or_else(|| fault("it has no scan"))?;
    if frame.is_whole(&scan) {
        one_scan(&mut header, &mut frame, &scan, rows)
    } else {
        several_scans(&mut header, &mut frame, scan, rows)
    }
}

/// The state of a scan between its units.
struct Progression<'a> {
    bits: Bits<'a>,
    /// Units up to the next restart marker.
    left: usize,
    next_restart: u8,
    /// True if a marker cut the segment off: its other units are zeros.
    is_cut: bool,
    /// The last first coefficient of each component.
    last: [i32; 4],
    /// Blocks that follow without a coefficient.
    empty: u32,
}

impl<'a> Progression<'a> {
    fn new(header: &Header<'a>) -> Self {
        Self {
            bits: Bits::new(header.data, header.at),
            left: header.restart,
            next_restart: 0,
            is_cut: false,
            last: [0; 4],
            empty: 0,
        }
    }

    /// Reads a unit, after a restart marker if one is due.
    #[inline(always)]
    fn unit(&mut self, header: &mut Header<'a>, mut read: impl FnMut(&mut Self)) -> Result<()> {
        if header.restart > 0 {
            if self.left == 0 {
                self.restart(header)?;
            }
            self.left -= 1;
        }
        if self.is_cut {
            return Ok(());
        }
        read(self);
        if self.bits.is_overrun() {
            if self.bits.is_at_file_end() && !header.lenient {
                return Err(fault(TRUNCATED));
            }
            self.is_cut = true;
        }
        Ok(())
    }

    /// Finds the restart marker, or decides that it is lost: a marker of one of the next two
    /// segments, or of another kind, stays for its segment; one of the last two is skipped.
    fn restart(&mut self, header: &mut Header<'a>) -> Result<()> {
        header.at = self.bits.at();
        let expected = self.next_restart;
        let mut found = true;
        loop {
            let code = header.marker()?;
            let ahead = code.wrapping_sub(marker::RST0 + expected) & 7;
            match code {
                marker::RST0..=marker::RST7 if matches!(ahead, 6 | 7) => continue,
                marker::RST0..=marker::RST7 if !matches!(ahead, 1 | 2) => break,
                ..marker::SOF0 => continue,
                _ => {}
            }
            // Back to the marker, if the file has it.
            let at = header.at.saturating_sub(2);
            if header.data.get(at..) != Some(&[]) && header.data[at..].starts_with(&[0xff, code]) {
                header.at = at;
            }
            found = false;
            break;
        }
        self.bits = Bits::new(header.data, header.at);
        self.is_cut &= !found;
        self.next_restart = (expected + 1) & 7;
        self.left = header.restart;
        self.last = [0; 4];
        self.empty = 0;
        Ok(())
    }

    /// Reads a block of a sequential scan and returns true if it has more than the first
    /// coefficient.
    #[inline(always)]
    fn sequential(&mut self, slot: usize, [dc, ac]: [&Huffman; 2], block: &mut Block) -> bool {
        let (_, difference) = dc.coefficient(&mut self.bits);
        self.last[slot] = self.last[slot].wrapping_add(difference.unwrap_or(0));
        block[0] = self.last[slot] as i16;
        let mut k = 1;
        while k < BLOCK {
            match ac.coefficient(&mut self.bits) {
                (run, Some(value)) => {
                    k += run;
                    block[usize::from(ORDER[k & 127]) & 63] = value as i16;
                    k += 1;
                }
                (15, None) => k += 16,
                _ => break,
            }
        }
        k > 1
    }

    /// Reads a block's band for the first time, its values shifted by `low` bits.
    fn first_band(&mut self, ac: &Huffman, [first, last]: [usize; 2], low: u32, block: &mut Block) {
        if self.empty > 0 {
            self.empty -= 1;
            return;
        }
        let mut k = first;
        while k <= last {
            match ac.coefficient(&mut self.bits) {
                (run, Some(value)) => {
                    k += run;
                    block[usize::from(ORDER[k & 127])] = (value << low) as i16;
                    k += 1;
                }
                (15, None) => k += 16,
                (run, None) => {
                    self.empty = (1 << run) - 1 + self.bits.number(run as u32);
                    break;
                }
            }
        }
    }

    /// Reads one more bit of a block's band.
    fn refined_band(
        &mut self,
        ac: &Huffman,
        [first, last]: [usize; 2],
        low: u32,
        block: &mut Block,
    ) {
        let bit = 1_i16 << low;
        let refine = |bits: &mut Bits<'_>, value: &mut i16| {
            if bits.bit() && *value & bit == 0 {
                let step = if *value >= 0 { bit } else { -bit };
                *value = value.wrapping_add(step);
            }
        };
        let mut k = first;
        if self.empty == 0 {
            while k <= last {
                let symbol = ac.symbol(&mut self.bits);
                let (mut run, size) = (i32::from(symbol >> 4), symbol & 15);
                let mut new = 0;
                if size > 0 {
                    new = if self.bits.bit() { bit } else { -bit };
                } else if run < 15 {
                    self.empty = (1 << run) + self.bits.number(run as u32);
                    break;
                }
                while k <= last {
                    let value = &mut block[usize::from(ORDER[k])];
                    if *value != 0 {
                        refine(&mut self.bits, value);
                    } else {
                        run -= 1;
                        if run < 0 {
                            break;
                        }
                    }
                    k += 1;
                }
                if new != 0 {
                    block[usize::from(ORDER[k & 127])] = new;
                }
                k += 1;
            }
        }
        if self.empty > 0 {
            while k <= last {
                let value = &mut block[usize::from(ORDER[k])];
                if *value != 0 {
                    refine(&mut self.bits, value);
                }
                k += 1;
            }
            self.empty -= 1;
        }
    }
}

/// Prepared tables of DC and AC for each component of a scan.
fn tables(header: &Header<'_>, scan: &Scan) -> Result<Vec<[Huffman; 2]>> {
    let table = |codes: &[Option<_>; 4], index: usize, is_dc| {
        Huffman::new(codes.get(index).and_then(Option::as_ref), is_dc)
    };
    let components = scan.components.iter();
    components
        .map(|&[_, dc, ac]| Ok([table(&header.dc, dc, true)?, table(&header.ac, ac, false)?]))
        .collect()
}

fn check_units(frame: &Frame, scan: &Scan) -> Result<()> {
    let components = scan.components.iter();
    let blocks: usize = components
        .map(|&[index, ..]| frame.components[index].factors.iter().product::<usize>())
        .sum();
    if scan.components.len() > 1 && blocks > MAX_UNIT_BLOCKS {
        let reason = format!("a unit has {blocks} blocks, expected at most {MAX_UNIT_BLOCKS}");
        return Err(fault(reason));
    }
    Ok(())
}

/// Decodes a file of one sequential scan, unit by unit.
fn one_scan(
    header: &mut Header<'_>,
    frame: &mut Frame,
    scan: &Scan,
    mut rows: Rows,
) -> Result<Vec<u8>> {
    check_units(frame, scan)?;
    header.latch(scan, frame)?;
    let tables = tables(header, scan)?;
    let mut state = Progression::new(header);
    for unit_row in 0..frame.units[1] {
        for unit_column in 0..frame.units[0] {
            let mut is_read = false;
            state.unit(header, |state| {
                is_read = true;
                for (slot, (&[index, ..], [dc, ac])) in
                    scan.components.iter().zip(&tables).enumerate()
                {
                    let component = &frame.components[index];
                    let [across, down] = component.factors;
                    let quant = component.quant.as_ref().unwrap_or(&[0; BLOCK]);
                    for (y, x) in (0..down).flat_map(|y| (0..across).map(move |x| (y, x))) {
                        let mut block = [0; BLOCK];
                        let levels = if state.sequential(slot, [dc, ac], &mut block) {
                            transform::inverse(&block, quant)
                        } else {
                            [[transform::flat(block[0], quant); 8]; 8]
                        };
                        let at = [unit_column * across + x, unit_row * down + y];
                        rows.write(index, at, &levels);
                    }
                }
            })?;
            if !is_read {
                for (index, component) in frame.components.iter().enumerate() {
                    let [across, down] = component.factors;
                    for (y, x) in (0..down).flat_map(|y| (0..across).map(move |x| (y, x))) {
                        let at = [unit_column * across + x, unit_row * down + y];
                        rows.write(index, at, &[[128; 8]; 8]);
                    }
                }
            }
        }
        rows.finish_units(unit_row);
    }
    header.at = state.bits.at();
    let spare = header.data.len().saturating_sub(header.at);
    match header.segments() {
        Ok(Next::End) => {}
        Ok(Next::Scan(_)) => return Err(fault("a scan follows the last one")),
        Err(_) if spare >= SPARE_BYTES && header.at >= header.data.len().saturating_sub(1) => {}
        Err(error) => return Err(error),
    }
    Ok(rows.into_rgb())
}

/// Decodes a file of several scans: all coefficients, then all pixels.
fn several_scans(
    header: &mut Header<'_>,
    frame: &mut Frame,
    mut scan: Scan,
    mut rows: Rows,
) -> Result<Vec<u8>> {
    let mut coefficients = Vec::new();
    for component in &frame.components {
        let values = BLOCK * component.all_blocks();
        coefficients.push(zeros::<i16>("the coefficients", values as u128)?);
    }
    let all_blocks = coefficients.iter().map(Vec::len).sum::<usize>() / BLOCK;
    let mut budget = VISITS.saturating_add(VISITS_PER_BLOCK.saturating_mul(all_blocks));
    let mut progress = vec![Progress::new(); frame.components.len()];
    let (mut scans, mut last_good) = (0, 0);
    loop {
        scans += 1;
        header.latch(&scan, frame)?;
        let visits = scan
            .components
            .iter()
            .map(|&[index, ..]| coefficients[index].len() / BLOCK);
        budget = budget.checked_sub(visits.sum()).ok_or_else(|| {
            fault(format!(
                "it has {scans} scans or more, too many for its size"
            ))
        })?;
        read_scan(header, frame, &scan, &mut coefficients, &mut last_good)?;
        if frame.progressive {
            for &[index, ..] in &scan.components {
                progress[index].note(scans, scan.band, scan.low);
            }
        }
        match header.segments()? {
            Next::Scan(next) => scan = next,
            Next::End => break,
        }
    }
    let smoothing = frame
        .progressive
        .then(|| Smoothing::new(frame, &progress, scans, last_good))
        .flatten();
    for unit_row in 0..frame.units[1] {
        for (index, component) in frame.components.iter().enumerate() {
            let blocks = coefficients[index].as_chunks::<BLOCK>().0;
            let quant = component.quant.as_ref().unwrap_or(&[0; BLOCK]);
            let down = component.factors[1];
            let end = ((unit_row + 1) * down).min(component.blocks[1]);
            for row in unit_row * down..end {
                for column in 0..component.blocks[0] {
                    let at = [column, row];
                    let levels = match &smoothing {
                        Some(smoothing) => {
                            let block = smoothing.predict(frame, index, blocks, at);
                            transform::inverse(&block, quant)
                        }
                        None => {
                            transform::inverse(&blocks[row * component.padded[0] + column], quant)
                        }
                    };
                    rows.write(index, at, &levels);
                }
            }
        }
        rows.finish_units(unit_row);
    }
    Ok(rows.into_rgb())
}

/// What a scan does to a block.
enum Step {
    Sequential(Vec<[Huffman; 2]>),
    FirstDc(Vec<Huffman>),
    RefinedDc,
    FirstBand(Huffman),
    RefinedBand(Huffman),
}

impl Step {
    fn of(header: &Header<'_>, frame: &Frame, scan: &Scan) -> Result<Self> {
        if !frame.progressive {
            return Ok(Self::Sequential(tables(header, scan)?));
        }
        let [first, last] = scan.band;
        let is_band = if first == 0 {
            last == 0
        } else {
            first <= last && last < BLOCK && scan.components.len() == 1
        };
        if !is_band || scan.low > 13 || (scan.high != 0 && scan.high != scan.low + 1) {
            return Err(fault(format!(
                "a progressive scan of coefficients {first} to {last}, bits {} to {}, is none",
                scan.high, scan.low
            )));
        }
        let [_, _, ac] = scan.components[0];
        Ok(match (first, scan.high) {
            (0, 0) => Self::FirstDc(
                scan.components
                    .iter()
                    .map(|&[_, dc, _]| {
                        Huffman::new(header.dc.get(dc).and_then(Option::as_ref), true)
                    })
                    .collect::<Result<_>>()?,
            ),
            (0, _) => Self::RefinedDc,
            (_, high) => {
                let table = Huffman::new(header.ac.get(ac).and_then(Option::as_ref), false)?;
                if high == 0 {
                    Self::FirstBand(table)
                } else {
                    Self::RefinedBand(table)
                }
            }
        })
    }
}

/// Reads a scan into the coefficients.
fn read_scan<'a>(
    header: &mut Header<'a>,
    frame: &Frame,
    scan: &Scan,
    coefficients: &mut [Vec<i16>],
    last_good: &mut usize,
) -> Result<()> {
    check_units(frame, scan)?;
    let step = Step::of(header, frame, scan)?;
    let mut state = Progression::new(header);
    let mut read = |state: &mut Progression<'a>, slot: usize, index: usize, at: usize| {
        let Some(block) = coefficients[index].as_chunks_mut::<BLOCK>().0.get_mut(at) else {
            return;
        };
        match &step {
            Step::Sequential(tables) => {
                let [dc, ac] = &tables[slot];
                state.sequential(slot, [dc, ac], block);
            }
            Step::FirstDc(tables) => {
                let (_, difference) = tables[slot].coefficient(&mut state.bits);
                state.last[slot] = state.last[slot].wrapping_add(difference.unwrap_or(0));
                block[0] = (state.last[slot] << scan.low) as i16;
            }
            Step::RefinedDc => block[0] |= i16::from(state.bits.bit()) << scan.low,
            Step::FirstBand(table) => state.first_band(table, scan.band, scan.low, block),
            Step::RefinedBand(table) => state.refined_band(table, scan.band, scan.low, block),
        }
    };
    if let [[index, ..]] = scan.components[..] {
        let component = &frame.components[index];
        let [width, height] = component.blocks;
        for row in 0..height {
            for column in 0..width {
                let at = row * component.padded[0] + column;
                state.unit(header, |state| {
                    *last_good = row / component.factors[1];
                    read(state, 0, index, at);
                })?;
            }
        }
    } else {
        for unit_row in 0..frame.units[1] {
            for unit_column in 0..frame.units[0] {
                state.unit(header, |state| {
                    *last_good = unit_row;
                    for (slot, &[index, ..]) in scan.components.iter().enumerate() {
                        let component = &frame.components[index];
                        let [across, down] = component.factors;
                        for y in 0..down {
                            let row = (unit_row * down + y) * component.padded[0];
                            for x in 0..across {
                                read(state, slot, index, row + unit_column * across + x);
                            }
                        }
                    }
                })?;
            }
        }
    }
    header.at = state.bits.at();
    Ok(())
}

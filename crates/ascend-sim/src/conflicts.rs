//! Global memory that one launch touches twice without order: two blocks on the same bytes, or one
//! block whose transfers are not ordered.

/// Runs of bytes that one transfer touches, as recorded by the kernel side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    pub(crate) start: u64,
    pub(crate) length: u64,
    pub(crate) stride: u64,
    pub(crate) count: u64,
    pub(crate) location: usize,
    pub(crate) line: u32,
    pub(crate) epoch: u32,
    pub(crate) seen: [u32; 15],
    pub(crate) pipe: u8,
    pub(crate) write: bool,
    pub(crate) atomic: bool,
}

impl Access {
    pub(crate) fn end(&self) -> u64 {
        self.start + (self.count - 1) * self.stride + self.length
    }
}

/// Two accesses that touch a common byte; `first` came first where both are of one block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conflict {
    pub(crate) first: (u32, Access),
    pub(crate) second: (u32, Access),
    pub(crate) byte: u64,
}

/// Pipes of a core in `GmAccess::pipe`, which one makes scalar accesses, and what the data cache
/// writes back at once.
pub(crate) const PIPES_OF_CORE: u8 = 5;
const SCALAR_PIPE: u8 = 0;
const CACHE_LINE_BYTES: u64 = 64;

/// The number of earlier accesses that a new one may be merged with.
const MERGE_WINDOW: usize = 16;

/// Joins accesses of one block that continue one another, so that a loop over tiles becomes one.
fn merge(accesses: &[Access]) -> Vec<Access> {
    let mut merged: Vec<Access> = Vec::new();
    for next in accesses {
        let window = merged.len().saturating_sub(MERGE_WINDOW);
        let grown = merged[window..].iter_mut().find_map(|open| {
            if (open.write, open.atomic) != (next.write, next.atomic) {
                return None;
            }
            if open.count == 1 && next.count == 1 && open.start + open.length == next.start {
                open.length += next.length;
            } else if open.stride == next.stride
                && open.length == next.length
                && next.start == open.start + open.count * open.stride
                && open.count > 1
                && next.count > 1
            {
                open.count += next.count;
            } else if open.stride == next.stride
                && open.count == next.count
                && open.start + open.length == next.start
                && open.length + next.length <= open.stride
            {
                open.length += next.length;
            } else {
                return None;
            }
            Some(())
        });
        if grown.is_none() {
            merged.push(*next);
        }
    }
    merged
}

/// A byte that both accesses touch.
fn common_byte(a: &Access, b: &Access) -> Option<u64> {
    let (few, many) = if a.count <= b.count { (a, b) } else { (b, a) };
    (0..few.count).find_map(|run| {
        let start = few.start + run * few.stride;
        let end = start + few.length;
        // The runs of `many` that may reach into [start, end).
        let first = if many.stride == 0 {
            0
        } else {
            start
                .saturating_sub(many.start + many.length - 1)
                .div_ceil(many.stride)
        };
        (first..many.count.min(first + 2)).find_map(|other| {
            let other_start = many.start + other * many.stride;
            let byte = start.max(other_start);
            (byte < end && byte < other_start + many.length).then_some(byte)
        })
    })
}

/// Calls `visit` for every pair of accesses whose extents overlap and of which one writes.
fn sweep(
    items: &mut [(u32, usize, Access)],
    mut visit: impl FnMut(&(u32, usize, Access), &(u32, usize, Access)),
) {
    items.sort_by_key(|(_, _, access)| access.start);
    let mut reads: Vec<(u32, usize, Access)> = Vec::new();
    let mut writes: Vec<(u32, usize, Access)> = Vec::new();
    for item in items.iter() {
        let start = item.2.start;
        writes.retain(|other| other.2.end() > start);
        writes.iter().for_each(|other| visit(other, item));
        if item.2.write {
            reads.retain(|other| other.2.end() > start);
            reads.iter().for_each(|other| visit(other, item));
            writes.push(*item);
        } else {
            reads.push(*item);
        }
    }
}

/// Bytes that two different blocks touch, at least one writing. At most `limit` are returned.
pub(crate) fn between_blocks(blocks: &[(u32, Vec<Access>)], limit: usize) -> Vec<Conflict> {
    let mut items: Vec<(u32, usize, Access)> = blocks
        .iter()
        .flat_map(|(block, accesses)| {
            merge(accesses)
                .into_iter()
                .map(move |access| (*block, 0, access))
        })
        .collect();
    let mut found = Vec::new();
    sweep(&mut items, |a, b| {
        if found.len() >= limit || a.0 == b.0 || (a.2.atomic && b.2.atomic) {
            return;
        }
        if let Some(byte) = common_byte(&a.2, &b.2) {
            found.push(Conflict {
                first: (a.0, a.2),
                second: (b.0, b.2),
                byte,
            });
        }
    });
    found
}

/// Lines of the data cache that two blocks write, at least one by a scalar. A core writes a line
/// back whole (`GlobalTensor::SetValue`), over what others wrote beside its own bytes.
pub(crate) fn between_lines(blocks: &[(u32, Vec<Access>)], limit: usize) -> Vec<Conflict> {
    let all = || {
        let pairs = blocks.iter().map(|(block, list)| (*block, list));
        pairs.flat_map(|(block, list)| list.iter().map(move |access| (block, *access)))
    };
    let scalar = |access: &Access| access.write && access.pipe % PIPES_OF_CORE == SCALAR_PIPE;
    if !all().any(|(_, access)| scalar(&access)) {
        return Vec::new();
    }
    let mut items: Vec<(u32, usize, Access)> = all()
        .filter(|(_, access)| access.write)
        .map(|(block, mut access)| {
            if scalar(&access) {
                let end = access.end().next_multiple_of(CACHE_LINE_BYTES);
                access.start -= access.start % CACHE_LINE_BYTES;
                access.length = end - access.start;
            }
            (block, 0, access)
        })
        .collect();
    let mut found: Vec<Conflict> = Vec::new();
    sweep(&mut items, |a, b| {
        if found.len() >= limit || a.0 == b.0 || !(scalar(&a.2) || scalar(&b.2)) {
            return;
        }
        if let Some(byte) = common_byte(&a.2, &b.2) {
            found.push(Conflict {
                first: (a.0, a.2),
                second: (b.0, b.2),
                byte: byte - byte % CACHE_LINE_BYTES,
            });
        }
    });
    found
}

/// Bytes that one block touches twice, at least once writing, without order between the transfers.
pub(crate) fn inside_block(block: u32, accesses: &[Access], limit: usize) -> Vec<Conflict> {
    let mut items: Vec<(u32, usize, Access)> = accesses
        .iter()
        .enumerate()
        .map(|(index, access)| (block, index, *access))
        .collect();
    let mut found = Vec::new();
    sweep(&mut items, |a, b| {
        let (first, second) = if a.1 < b.1 { (a, b) } else { (b, a) };
        // The cores of a block run in turns here, so that the second may be the one that the first
        // was ordered after.
        let knows = |a: &Access, b: &Access| a.seen[usize::from(b.pipe)] >= b.epoch;
        let (one, other) = (&first.2, &second.2);
        let ordered = knows(other, one) || knows(one, other) || (one.atomic && other.atomic);
        if found.len() >= limit || ordered {
            return;
        }
        if let Some(byte) = common_byte(&a.2, &b.2) {
            found.push(Conflict {
                first: (block, first.2),
                second: (block, second.2),
                byte,
            });
        }
    });
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(start: u64, length: u64, stride: u64, count: u64, write: bool) -> Access {
        Access {
            start,
            length,
            stride,
            count,
            location: 0,
            line: 0,
            epoch: 1,
            seen: [0; 15],
            pipe: 2,
            write,
            atomic: false,
        }
    }

    /// Byte by byte, by definition.
    fn touches(a: &Access, byte: u64) -> bool {
        (0..a.count).any(|run| {
            (a.start + run * a.stride..a.start + run * a.stride + a.length).contains(&byte)
        })
    }

    #[test]
    fn common_byte_agrees_with_a_search_over_all_bytes() {
        let mut checked = 0;
        for (start, length, stride, count) in (0..6).flat_map(|s| {
            (1..4).flat_map(move |l| (l..9).flat_map(move |st| (1..4).map(move |c| (s, l, st, c))))
        }) {
            for (other_start, other_length, other_stride, other_count) in
                [(3, 2, 5, 3), (0, 1, 7, 4), (10, 4, 4, 2), (1, 3, 3, 1)]
            {
                let a = access(start, length, stride, count, true);
                let b = access(other_start, other_length, other_stride, other_count, false);
                let expected = (0..64).any(|byte| touches(&a, byte) && touches(&b, byte));
                assert_eq!(common_byte(&a, &b).is_some(), expected, "{a:?} {b:?}");
                checked += 1;
            }
        }
        assert!(checked > 1000);
    }

    #[test]
    fn blocks_that_write_the_same_byte_are_found_and_neighbours_are_not() {
        let rows = |block: u64| vec![access(block * 64, 32, 64, 2, true)];
        assert!(
            between_blocks(
                &[
                    (0, vec![access(0, 32, 64, 4, true)]),
                    (1, vec![access(32, 32, 64, 4, true)])
                ],
                8
            )
            .is_empty()
        );
        assert_eq!(between_blocks(&[(0, rows(0)), (1, rows(1))], 8).len(), 1);
    }
}

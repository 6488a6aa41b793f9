//! The order of samples in each epoch, and the share of a rank.

use super::{BatchSize, LoaderOptions};

/// A sample's place in the order: the epoch, and the number of samples before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Turn {
    pub(super) epoch: u64,
    pub(super) before: u64,
}

/// The records from which this rank builds samples, in order.
#[derive(Debug)]
pub(super) struct Plan {
    records: u64,
    epochs: u64,
    seed: Option<u64>,
    batch: BatchSize,
    rank: u64,
    ranks: u64,
    /// The start of the first batch.
    first: Turn,
    next: Turn,
    /// The planned epoch and the record at each of its places; empty in file order.
    order: (u64, Vec<u32>),
}

impl Plan {
    /// Creates a plan; `records` is below 2^32.
    pub(super) fn new(records: usize, options: &LoaderOptions, first: Turn) -> Self {
        let mut plan = Self {
            records: records as u64,
            epochs: options.epochs,
            seed: options.seed,
            batch: options.batch,
            rank: options.rank as u64,
            ranks: options.ranks as u64,
            first,
            next: first,
            order: (first.epoch, Vec::new()),
        };
        if plan.is_idle() {
            plan.epochs = 0;
        }
        if first.epoch < plan.epochs {
            plan.shuffle();
        }
        plan
    }

    /// True if no batch of any epoch has a sample for this rank, which would otherwise search all
    /// batches.
    fn is_idle(&self) -> bool {
        match self.batch {
            BatchSize::Samples(samples) => self.rank >= self.records.min(samples as u64),
            BatchSize::Tokens(_) => false,
        }
    }

    fn shuffle(&mut self) {
        let epoch = self.next.epoch;
        let order = self
            .seed
            .map(|seed| shuffled(self.records as u32, seed, epoch));
        self.order = (epoch, order.unwrap_or_default());
    }

    /// True if this rank needs the sample: one of every `ranks` in a batch, or all if lengths
    /// decide the ends of batches.
    fn is_needed(&self, turn: Turn) -> bool {
        let BatchSize::Samples(samples) = self.batch else {
            return true;
        };
        let start = if turn.epoch == self.first.epoch {
            self.first.before
        } else {
            0
        };
        (turn.before - start) % samples as u64 % self.ranks == self.rank
    }
}

impl Iterator for Plan {
    type Item = (Turn, usize);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let turn = self.next;
            if turn.epoch >= self.epochs || self.records == 0 {
                return None;
            }
            if turn.before >= self.records {
                self.next = Turn {
                    epoch: turn.epoch + 1,
                    before: 0,
                };
                if self.next.epoch < self.epochs {
                    self.shuffle();
                }
                continue;
            }
            self.next.before += 1;
            if self.is_needed(turn) {
                let place = turn.before as usize;
                let record = self
                    .order
                    .1
                    .get(place)
                    .map_or(place, |&record| record as usize);
                return Some((turn, record));
            }
        }
    }
}

/// The numbers below `count`, in an order that depends only on seed and epoch.
pub(crate) fn shuffled(count: u32, seed: u64, epoch: u64) -> Vec<u32> {
    let mut random = Random(mixed(mixed(seed) ^ epoch));
    let mut order: Vec<u32> = (0..count).collect();
    for last in (1..order.len()).rev() {
        order.swap(last, random.below(last as u64 + 1) as usize);
    }
    order
}

/// SplitMix64.
///
/// # Source
/// G. L. Steele, D. Lea, C. H. Flood, Fast splittable pseudorandom number generators, 2014
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        // Above the last multiple of `bound` the remainders are not equally likely.
        let limit = u64::MAX - u64::MAX % bound;
        loop {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let number = mixed(self.0);
            if number < limit {
                return number % bound;
            }
        }
    }
}

fn mixed(number: u64) -> u64 {
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_epoch_has_every_record_in_an_order_of_its_own() {
        let orders: Vec<_> = (0..3).map(|epoch| shuffled(1000, 7, epoch)).collect();
        for order in &orders {
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert!(sorted.iter().copied().eq(0..1000));
        }
        assert_ne!(orders[0], orders[1]);
        assert_ne!(orders[1], orders[2]);
        assert_ne!(orders[0], shuffled(1000, 8, 0));
        // The order is part of the format of a position and must not change.
        assert_eq!(shuffled(8, 1, 0), KEPT);
    }

    const KEPT: [u32; 8] = [2, 6, 3, 5, 1, 4, 0, 7];

    /// Every order of four is drawn about as often.
    #[test]
    fn orders_are_equally_likely() {
        let mut counts = std::collections::BTreeMap::<Vec<u32>, u32>::new();
        for seed in 0..24_000 {
            *counts.entry(shuffled(4, seed, 0)).or_default() += 1;
        }
        assert_eq!(counts.len(), 24);
        // Six standard deviations of a mean of 1000.
        assert!(
            counts.values().all(|count| count.abs_diff(1000) < 190),
            "{counts:?}"
        );
    }
}

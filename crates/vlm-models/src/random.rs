//! Counter-based random numbers, so that all devices, and recomputations of a layer, use the same
//! numbers.

/// The random numbers of a pass: a stream for each row of the layers' input tensors.
#[derive(Debug)]
pub(crate) struct Draws {
    /// The streams of the tokens, row after row.
    pub(crate) tokens: Vec<Stream>,
    /// The streams of the patches and of the merged patches, in the order of the tower's blocks.
    pub(crate) patches: Vec<Stream>,
    pub(crate) merged: Vec<Stream>,
}

/// The stream of random numbers of one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stream(u64);

impl Stream {
    pub(crate) fn new(seed: u64) -> Self {
        Self(mixed(seed))
    }

    /// A substream.
    pub(crate) fn part(self, index: u64) -> Self {
        Self(mixed(self.0 ^ mixed(index.wrapping_add(1))))
    }

    /// 64 random bits.
    fn bits(self, index: usize) -> u64 {
        mixed(self.0.wrapping_add((index as u64).wrapping_mul(GOLDEN)))
    }

    /// A number in [0, 1).
    pub(crate) fn unit(self, index: usize) -> f64 {
        (self.bits(index) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Numbers from -`most` to `most`.
    pub(crate) fn symmetric(self, count: usize, most: f64) -> Vec<f32> {
        let number = |index| ((2.0 * self.unit(index) - 1.0) * most) as f32;
        (0..count).map(number).collect()
    }

    /// `kept` with a probability of 1 - `dropped`, else 0.
    pub(crate) fn mask(self, count: usize, dropped: f64, kept: f32) -> impl Iterator<Item = f32> {
        let limit = (dropped * (1_u64 << 32) as f64) as u64;
        (0..count).map(move |index| match self.bits(index) >> 32 {
            bits if bits < limit => 0.0,
            _ => kept,
        })
    }
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// # Source
/// Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, figure 16, with
/// the constants of Stafford's variant 13
fn mixed(state: u64) -> u64 {
    let mut z = state.wrapping_add(GOLDEN);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_numbers_are_those_of_splitmix64() {
        // Vigna's splitmix64.c with the state 1234567.
        assert_eq!(mixed(1_234_567), 6_457_827_717_110_365_317);
    }

    #[test]
    fn numbers_spread_over_their_range_and_masks_drop_their_share() {
        let numbers = Stream::new(3).symmetric(10_000, 0.5);
        let mean = numbers.iter().sum::<f32>() / 1e4;
        assert!(mean.abs() < 0.01, "{mean}");
        assert!(numbers.iter().all(|number| number.abs() <= 0.5));
        assert!(numbers.iter().any(|number| *number > 0.49));
        let mask = |part| Stream::new(3).part(part).mask(10_000, 0.25, 4.0 / 3.0);
        let mask = |part| mask(part).collect::<Vec<f32>>();
        let (mask, other) = (mask(1), mask(2));
        let dropped = mask.iter().filter(|value| **value == 0.0).count();
        assert!(dropped.abs_diff(2500) < 150, "{dropped}");
        assert_ne!(mask, other);
    }
}

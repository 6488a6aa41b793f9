//! Random numbers that are a function of their place, so that every device, and a layer that runs
//! again, has the same ones.

/// What the numbers of a place are drawn from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stream(u64);

impl Stream {
    pub(crate) fn new(seed: u64) -> Self {
        Self(mixed(seed))
    }

    /// The numbers of a part of this stream.
    pub(crate) fn part(self, index: u64) -> Self {
        Self(mixed(self.0 ^ mixed(index.wrapping_add(1))))
    }

    /// 64 random bits.
    fn bits(self, index: usize) -> u64 {
        mixed(self.0.wrapping_add((index as u64).wrapping_mul(GOLDEN)))
    }

    /// A number from 0 to below 1.
    pub(crate) fn unit(self, index: usize) -> f64 {
        (self.bits(index) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Numbers from -`most` to `most`.
    pub(crate) fn symmetric(self, count: usize, most: f64) -> Vec<f32> {
        let number = |index| ((2.0 * self.unit(index) - 1.0) * most) as f32;
        (0..count).map(number).collect()
    }

    /// `kept` with a probability of 1 - `dropped`, else 0.
    pub(crate) fn mask(self, count: usize, dropped: f64, kept: f32) -> Vec<f32> {
        let limit = (dropped * (1_u64 << 32) as f64) as u64;
        let value = |index| match self.bits(index) >> 32 {
            bits if bits < limit => 0.0,
            _ => kept,
        };
        (0..count).map(value).collect()
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
        let mask = Stream::new(3).part(1).mask(10_000, 0.25, 4.0 / 3.0);
        let dropped = mask.iter().filter(|value| **value == 0.0).count();
        assert!(dropped.abs_diff(2500) < 150, "{dropped}");
        assert_ne!(mask, Stream::new(3).part(2).mask(10_000, 0.25, 4.0 / 3.0));
    }
}

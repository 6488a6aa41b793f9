//! The time of a core, from what it does.

use ascend_sim::Counted;

use super::count::VECTORS_OF_CUBE;
use super::price::{self, Chip, CubeStage};
use super::{BoundBy, TimeModelError};

/// Cycles that a barrier of the vector pipe is assumed to cost: the instruction before it has to
/// leave the pipeline. Not published; [`CoreTime::barrier_cycles`] says how much it may be.
pub const BARRIER_CYCLES: f64 = 20.0;

/// Cycles that the scalar unit is assumed to spend on one instruction, transfer or barrier: its
/// operands and its mask. Not published.
pub const ISSUE_CYCLES: f64 = 20.0;

/// What each unit of a core takes for its share of a launch, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CoreTime {
    /// The core's bytes at its share of the memory's rate.
    pub memory: f64,
    /// Vector unit.
    pub vector: f64,
    /// Of that, what instructions take beyond their repeats, and barriers.
    pub start_up: f64,
    /// Transfers from global memory.
    pub load: f64,
    /// Transfers to global memory.
    pub store: f64,
    /// Scalar unit.
    pub scalar: f64,
    /// The slowest stage of the cube core that it shares.
    pub cube: f64,
    /// Barriers of the vector pipe.
    pub barriers: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Tiles that pass one after the other.
    pub tiles: f64,
    cycle: f64,
}

impl CoreTime {
    /// The time of a vector core that does `counted`, and stores `stores_per_tile` transfers a
    /// tile; with a cube core, half of whose bytes count as its own.
    ///
    /// # Errors
    /// [`TimeModelError::NoPrice`] for an instruction that the tables lack.
    pub fn of(
        counted: &[Counted],
        chip: Chip,
        stores_per_tile: usize,
    ) -> Result<Self, TimeModelError> {
        let (mut cycles, mut work, mut issued) = (0.0, 0.0, 0);
        let (mut load, mut store, mut stores) = (0.0, 0.0, 0);
        let (mut bytes, mut barriers) = (0, 0);
        let mut stages = [0.0; 4];
        for entry in counted {
            let times = entry.times as f64;
            if let Some((stage, per_cycle)) = price::of_cube(&entry.what) {
                let amount = entry.times * entry.amount;
                stages[stage as usize] += amount as f64 / per_cycle;
                if matches!(stage, CubeStage::Load | CubeStage::Store) {
                    bytes += amount / VECTORS_OF_CUBE as u64;
                }
                continue;
            }
            issued += entry.times;
            match entry.what.as_str() {
                "GM -> UB" => {
                    load += times * price::load_seconds(entry.amount);
                    bytes += entry.times * entry.amount;
                }
                "UB -> GM" => {
                    store += times * price::store_seconds(entry.amount);
                    bytes += entry.times * entry.amount;
                    stores += entry.times;
                }
                "PipeBarrier<PIPE_V>" => barriers += entry.times,
                what => {
                    let price = price::of(what, &entry.types)?;
                    cycles += times * price.cycles(entry.amount);
                    work += times * price.work(entry.amount);
                }
            }
        }
        let waiting = barriers as f64 * BARRIER_CYCLES;
        let share = chip.memory_bytes_per_second / f64::from(chip.cores);
        Ok(Self {
            memory: bytes as f64 / share,
            vector: (cycles + waiting) / chip.hertz,
            start_up: (cycles - work + waiting) / chip.hertz,
            load,
            store,
            scalar: issued as f64 * ISSUE_CYCLES / chip.hertz,
            cube: stages.into_iter().fold(0.0, f64::max) / chip.hertz,
            barriers,
            bytes,
            tiles: stores as f64 / stores_per_tile as f64,
            cycle: 1.0 / chip.hertz,
        })
    }

    fn units(&self) -> [(BoundBy, f64); 6] {
        [
            (BoundBy::Memory, self.memory),
            (BoundBy::Vector, self.vector),
            (BoundBy::Load, self.load),
            (BoundBy::Store, self.store),
            (BoundBy::Scalar, self.scalar),
            (BoundBy::Cube, self.cube),
        ]
    }

    /// The unit that the others wait for.
    pub fn bound_by(&self) -> BoundBy {
        let longest = |a: (BoundBy, f64), b: (BoundBy, f64)| if b.1 > a.1 { b } else { a };
        let [first, rest @ ..] = self.units();
        rest.into_iter().fold(first, longest).0
    }

    /// The longest unit's time, and one tile of the others that come before and after it: three
    /// slots let a load, the arithmetic and a store run side by side.
    pub fn total(&self) -> f64 {
        let longest = self
            .units()
            .map(|(_, time)| time)
            .into_iter()
            .fold(0.0, f64::max);
        // A tile is loaded, rotated and stored.
        let passes = self.vector + self.load + self.store;
        let own = match self.bound_by() {
            BoundBy::Vector => self.vector,
            BoundBy::Load => self.load,
            BoundBy::Store => self.store,
            BoundBy::Memory | BoundBy::Scalar | BoundBy::Cube => 0.0,
        };
        // With a cube core a tile is multiplied first.
        let multiplied = match self.bound_by() {
            BoundBy::Cube => 0.0,
            _ => self.cube,
        };
        longest + (passes - own + multiplied) / self.tiles
    }

    /// What a barrier may cost, in cycles, until the vector unit alone takes `seconds`.
    pub fn barrier_cycles(&self, seconds: f64) -> f64 {
        BARRIER_CYCLES + (seconds - self.vector) / (self.barriers as f64 * self.cycle)
    }
}

#[cfg(test)]
mod tests {
    use super::super::price::ATLAS_A2;
    use super::*;

    fn counted(what: &str, types: &str, amount: u64, times: u64) -> Counted {
        Counted {
            what: what.to_owned(),
            types: types.to_owned(),
            amount,
            times,
        }
    }

    /// A tile of 16 KiB in and out, and vector work of `repeats` multiplications a tile.
    fn core(repeats: u64, tiles: u64) -> CoreTime {
        let work = [
            counted("GM -> UB", "", 16 << 10, tiles),
            counted("Mul", "f32", repeats, tiles),
            counted("PipeBarrier<PIPE_V>", "", 0, tiles),
            counted("UB -> GM", "", 16 << 10, tiles),
        ];
        CoreTime::of(&work, ATLAS_A2, 1).expect("all have prices")
    }

    #[test]
    fn the_longest_unit_bounds() {
        // 32 KiB at 40 GB/s are 0.82 us, 1515 cycles.
        let idle = core(100, 50);
        assert_eq!(idle.bound_by(), BoundBy::Memory);
        assert!((idle.memory - 50.0 * 32_768.0 / 40e9).abs() < 1e-12);
        let busy = core(1000, 50);
        assert_eq!(busy.bound_by(), BoundBy::Vector);
        assert!((busy.vector - 50.0 * 2020.0 / 1.85e9).abs() < 1e-12);
        assert!((busy.start_up - 50.0 * 20.0 / 1.85e9).abs() < 1e-12);
        // Filling the pipeline costs one load and one store.
        let fill = (busy.load + busy.store) / 50.0;
        assert!((busy.total() - busy.vector - fill).abs() < 1e-12);
        // A barrier of this many cycles takes up what is left.
        let cycles = busy.barrier_cycles(busy.vector * 1.5);
        assert!((cycles - (20.0 + 0.5 * 2020.0)).abs() < 1e-6);
    }

    #[test]
    fn an_instruction_without_a_price_is_an_error() {
        let odd = [counted("Exp", "f32", 1, 1)];
        let error = CoreTime::of(&odd, ATLAS_A2, 1).expect_err("no price");
        assert!(error.to_string().contains("Exp of f32"), "{error}");
    }
}

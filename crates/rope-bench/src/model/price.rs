//! What instructions and transfers cost on Atlas A2: figures that Huawei publishes with its
//! modelling tool msKPP (Mulan PSL v2; `csrc/prof_data/resource910b.cpp`, commit 8573151d).

use super::TimeModelError;

/// The chip.
#[derive(Clone, Copy, Debug)]
pub struct Chip {
    /// Vector cores.
    pub cores: u32,
    /// Cycles per second.
    pub hertz: f64,
    /// Global memory, for all cores together.
    pub memory_bytes_per_second: f64,
}

/// Atlas A2 with 40 vector cores (910B3). The clock is msKPP's.
pub const ATLAS_A2: Chip = Chip {
    cores: 40,
    hertz: 1.85e9,
    memory_bytes_per_second: 1.6e12,
};

/// Cycles of a vector instruction: `least`, or `fixed` and `per_repeat` for each repeat of 256
/// bytes of the widest operand.
#[derive(Clone, Copy, Debug)]
pub struct Price {
    what: &'static str,
    types: &'static str,
    per_repeat: f64,
    fixed: f64,
    least: f64,
    /// The row of msKPP's table; "assumed" where it has none.
    pub source: &'static str,
}

impl Price {
    /// Cycles of an instruction of `repeats` repeats.
    pub fn cycles(&self, repeats: u64) -> f64 {
        (self.fixed + self.per_repeat * repeats as f64).max(self.least)
    }

    /// Of those, the ones in which elements are worked on.
    pub fn work(&self, repeats: u64) -> f64 {
        self.per_repeat * repeats as f64
    }
}

macro_rules! prices {
    ($($what:literal $types:literal: $per_repeat:literal, $fixed:literal, $least:literal, $source:literal;)*) => {
        &[$(Price {
            what: $what,
            types: $types,
            per_repeat: $per_repeat,
            fixed: $fixed,
            least: $least,
            source: $source,
        }),*]
    };
}

/// Instruction, types: cycles per repeat, fixed, least, row of the table.
const PRICES: &[Price] = prices! {
    "Add" "f32": 2.0, 0.0, 3.1, "VADD_FP32";
    "Sub" "f32": 2.0, 0.0, 3.0, "VSUB_FP32";
    "Mul" "f32": 2.0, 0.0, 3.0, "VMUL_FP32";
    "Adds" "i32": 1.0, 0.0, 4.0, "VADDS_INT32";
    "Duplicate" "f32": 1.0, 0.0, 4.1, "VECTORDUP_FP32";
    "Copy" "u16": 1.0, 0.0, 3.0, "VCOPY_UINT16";
    "Or" "u16": 2.0, 0.0, 3.0, "VOR_UINT16";
    "ShiftLeft" "u32": 1.0, 0.0, 4.0, "VSHL_UINT32";
    "ShiftRight" "u32": 1.0, 0.0, 4.0, "VSHR_UINT32";
    "ShiftRight" "i32": 1.0, 0.0, 4.0, "VSHR_INT32";
    "Cast" "bf16 -> f32": 1.0, 0.0, 3.1, "VCONV_BF16_FP32";
    "Cast" "f32 -> bf16": 1.0, 0.0, 3.0, "VCONV_FP32_BF16";
    "Cast" "f16 -> f32": 1.0, 0.0, 3.0, "VCONV_FP16_FP32";
    "Cast" "f32 -> f16": 0.5, 0.0, 3.0, "VCONV_FP32_FP16";
    "Cast" "i16 -> f32": 1.0, 0.0, 3.0, "VCONV_INT16_FP32";
    "Cast" "f32 -> i32": 1.0, 0.0, 3.0, "VCONV_FP32_INT32";
    "Cast" "i32 -> i16": 1.0, 0.0, 3.0, "assumed, as VCONV_FP32_BF16";
    "Gather" "f32": 12.0, 3.0, 0.0, "VGATHER_UINT32";
};

/// The stages of a cube core, which run side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CubeStage {
    /// From global memory into L1.
    Load,
    /// From L1 into L0A and L0B.
    Feed,
    /// Products.
    Multiply,
    /// From L0C to global memory.
    Store,
}

/// The stage of an entry of a cube core's list, and how many of its units (bytes, multiply-adds)
/// pass in a cycle: ceilings of msKPP's `arch_info.cpp`, but for products its table of 910B1 at
/// 16 x 16 x 128. None where the entry is a vector core's.
pub fn of_cube(what: &str) -> Option<(CubeStage, f64)> {
    match what {
        "GM -> L1" => Some((CubeStage::Load, 256.0)),
        "LoadData(L0A, L1)" => Some((CubeStage::Feed, 256.0)),
        "LoadData(L0B, L1)" => Some((CubeStage::Feed, 128.0)),
        "Mmad" => Some((CubeStage::Multiply, 7258.0)),
        "L0C -> GM" => Some((CubeStage::Store, 128.0)),
        _ => None,
    }
}

/// The price of an instruction.
///
/// # Errors
/// [`TimeModelError::NoPrice`] where the tables have none.
pub fn of(what: &str, types: &str) -> Result<&'static Price, TimeModelError> {
    let found = PRICES.iter().find(|p| p.what == what && p.types == types);
    found.ok_or_else(|| TimeModelError::NoPrice {
        what: what.to_owned(),
        types: types.to_owned(),
    })
}

/// KiB of one transfer, and GiB/s of a core that does nothing else: `GM_TO_UB_910b3`.
const LOAD: &[(f64, f64)] = &[
    (1.0, 7.93),
    (2.0, 15.91),
    (4.0, 28.87),
    (8.0, 57.40),
    (12.0, 76.46),
    (16.0, 91.61),
    (24.0, 115.11),
    (32.0, 113.37),
    (48.0, 138.49),
    (64.0, 147.13),
    (96.0, 169.77),
    (128.0, 178.84),
];

/// `UB_TO_GM_910b1`; there is no table of 910B3.
const STORE: &[(f64, f64)] = &[
    (1.0, 11.39),
    (2.0, 22.11),
    (4.0, 37.91),
    (8.0, 57.84),
    (12.0, 75.87),
    (16.0, 86.85),
    (24.0, 106.94),
    (32.0, 108.4),
    (64.0, 110.7),
];

/// Seconds of one transfer of `bytes` from global memory.
pub fn load_seconds(bytes: u64) -> f64 {
    transfer_seconds(LOAD, bytes)
}

/// Seconds of one transfer of `bytes` to global memory.
pub fn store_seconds(bytes: u64) -> f64 {
    transfer_seconds(STORE, bytes)
}

/// The rate is interpolated between two sizes, as msKPP does. A transfer below the smallest takes
/// its time, one above the largest its rate.
fn transfer_seconds(table: &[(f64, f64)], bytes: u64) -> f64 {
    const KIB: f64 = 1024.0;
    const GIB: f64 = (1_u64 << 30) as f64;
    let kib = (bytes as f64 / KIB).max(table[0].0);
    let above = table.partition_point(|(size, _)| *size <= kib);
    let (low, low_rate) = table[above - 1];
    let rate = match table.get(above) {
        Some((high, high_rate)) => low_rate + (high_rate - low_rate) * (kib - low) / (high - low),
        None => low_rate,
    };
    kib * KIB / (rate * GIB)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_cost_what_the_table_says() {
        let mul = of("Mul", "f32").expect("in the table");
        // VMUL_FP32: 1, 2 and 16 repeats take 3.04, 4.03 and 32.04 cycles.
        for (repeats, cycles) in [(1, 3.04), (2, 4.03), (16, 32.04)] {
            assert!((mul.cycles(repeats) - cycles).abs() < 0.1, "{repeats}");
        }
        // VGATHER_UINT32: 14.03, 27.03, 195.02.
        let gather = of("Gather", "f32").expect("in the table");
        for (repeats, cycles) in [(1, 14.03), (2, 27.03), (16, 195.02)] {
            assert!((gather.cycles(repeats) - cycles).abs() < 1.1, "{repeats}");
        }
        assert!(of("Gather", "bf16").is_err());
    }

    /// Rotations of bf16 `[1, 24, 28800, 128]` by the vendor's operators, as far as their schemes
    /// are known: the published times are half as long again, for both alike.
    #[test]
    fn the_vendors_operators_are_modelled_at_two_thirds_of_their_times() {
        let elements = 28_800.0 * 24.0 * 128.0;
        // x in and out, cos and sin of every channel in bf16.
        let bytes = 2.0 * 2.0 * elements + 2.0 * 2.0 * 28_800.0 * 128.0;
        let memory = bytes / ATLAS_A2.memory_bytes_per_second;
        let cost = |what, types| of(what, types).expect("in the table").work(1);
        // To f32, two products, their sum, and back; of 64 elements.
        let half = cost("Cast", "bf16 -> f32")
            + 2.0 * cost("Mul", "f32")
            + cost("Add", "f32")
            + cost("Cast", "f32 -> bf16");
        // Also the neighbours by Gather, and cos and sin copied for every head.
        let interleave = half + cost("Gather", "f32") + 2.0 * cost("Copy", "u16");
        let seconds =
            |cycles: f64| elements / 64.0 * cycles / f64::from(ATLAS_A2.cores) / ATLAS_A2.hertz;
        // RoPE-Matrix: the cube unit reads x too, and its product is written and read, in bf16.
        let round_trip = 3.0 * 2.0 * elements / ATLAS_A2.memory_bytes_per_second;
        let matrix = half + cost("Cast", "bf16 -> f32");
        // Two buffers: copies run beside the arithmetic. One: after it.
        let modelled = [
            memory.max(seconds(half)),
            memory + seconds(interleave),
            (memory + round_trip).max(seconds(matrix)),
        ];
        for (modelled, published) in modelled.into_iter().zip([0.35e-3, 1.0e-3, 0.8e-3]) {
            let share = modelled / published;
            assert!((0.63..0.71).contains(&share), "{modelled}: {share}");
        }
    }

    #[test]
    fn small_transfers_take_the_latency_and_large_ones_the_rate() {
        assert_eq!(load_seconds(32), load_seconds(1024));
        let ns = |bytes| load_seconds(bytes) * 1e9;
        // 1 KiB takes the latency alone, 64 KiB at the table's 147.13 GiB/s.
        assert!((ns(1 << 10) - 120.3).abs() < 0.5, "{}", ns(1 << 10));
        assert!((ns(1 << 16) - 414.9).abs() < 1.0, "{}", ns(1 << 16));
        let (half, whole) = (load_seconds(1 << 20), load_seconds(1 << 21));
        assert!((whole - 2.0 * half).abs() < 1e-12);
        assert!(store_seconds(14 << 10) > store_seconds(12 << 10));
    }
}

//! The record of a run: calls, violations and launches.

use std::fmt;

/// One call of an exported function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Name of the function.
    pub function: &'static str,
    /// Its result.
    pub code: i32,
}

/// Something that a program or a kernel must not do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The kind of fault: a fixed word such as `ordering`, `gm-out-of-bounds` or `leak`.
    pub kind: String,
    /// The kernel, for faults inside one.
    pub kernel: Option<String>,
    /// The block of the launch.
    pub block: Option<u32>,
    /// Source file of the offending statement.
    pub file: Option<String>,
    /// Line of the offending statement.
    pub line: Option<u32>,
    /// The fault found, and the missing condition.
    pub message: String,
}

impl Violation {
    pub(crate) fn host(kind: &str, message: impl fmt::Display) -> Self {
        Self {
            kind: kind.to_owned(),
            kernel: None,
            block: None,
            file: None,
            line: None,
            message: message.to_string(),
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}] ", self.kind)?;
        match (&self.kernel, self.block) {
            (Some(kernel), Some(block)) => write!(f, "kernel `{kernel}` block {block}: ")?,
            (Some(kernel), None) => write!(f, "kernel `{kernel}`: ")?,
            (None, _) => {}
        }
        if let (Some(file), Some(line)) = (&self.file, self.line) {
            write!(f, "{file}:{line}: ")?;
        }
        f.write_str(&self.message)
    }
}

/// The work of a kernel launch, counted exactly and summed over all blocks.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes read from global memory.
    pub gm_bytes_read: u64,
    /// Bytes written to global memory.
    pub gm_bytes_written: u64,
    /// Transfers from global memory.
    pub gm_transfers_in: u64,
    /// Transfers to global memory.
    pub gm_transfers_out: u64,
    /// Contiguous runs in the transfers from global memory.
    pub gm_bursts_in: u64,
    /// Contiguous runs in the transfers to global memory.
    pub gm_bursts_out: u64,
    /// Scalar reads and writes of global memory.
    pub scalar_gm_accesses: u64,
    /// Scalar reads and writes of the unified buffer.
    pub scalar_ub_accesses: u64,
    /// Vector instructions.
    pub vector_instructions: u64,
    /// Repeats of 256 bytes over all vector instructions.
    pub vector_repeats: u64,
    /// Largest number of bytes of the unified buffer in use in one block. The maximum, not a sum.
    pub ub_high_water_bytes: u64,
    /// Calls of `PipeBarrier` by pipe: S, V, M, MTE1, MTE2, MTE3, ALL, FIX.
    pub barriers: [u64; 8],
    /// Bytes read from global memory by cube cores, which `gm_bytes_read` includes.
    pub cube_gm_bytes_read: u64,
    /// Bytes written to global memory by cube cores, which `gm_bytes_written` includes.
    pub cube_gm_bytes_written: u64,
    /// Products of matrices.
    pub cube_instructions: u64,
    /// Multiplications and additions in them.
    pub cube_multiply_adds: u64,
    /// Flags set for other cores.
    pub cross_core_flags: u64,
}

impl Counters {
    pub(crate) fn add(&mut self, other: &Self) {
        macro_rules! sum {
            ($($counter:ident)*) => { $( self.$counter += other.$counter; )* };
        }
        sum! {
            gm_bytes_read gm_bytes_written gm_transfers_in gm_transfers_out gm_bursts_in
            gm_bursts_out scalar_gm_accesses scalar_ub_accesses vector_instructions vector_repeats
            cube_gm_bytes_read cube_gm_bytes_written cube_instructions cube_multiply_adds
            cross_core_flags
        }
        self.ub_high_water_bytes = self.ub_high_water_bytes.max(other.ub_high_water_bytes);
        for (sum, term) in self.barriers.iter_mut().zip(other.barriers) {
            *sum += term;
        }
    }
}

/// Something that block 0 of a launch did (with a cube core, that core and its first vector core):
/// a vector instruction, a product of matrices, a transfer or a barrier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counted {
    /// The Ascend C function; for transfers where from and where to,
    /// such as `GM -> UB`.
    pub what: String,
    /// Types of the operands: one, or `source -> destination`.
    pub types: String,
    /// Repeats of a vector instruction, multiply-adds of a product, bytes of a transfer.
    pub amount: u64,
    /// How often it was done with this amount.
    pub times: u64,
}

/// One finished kernel launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchReport {
    /// Name of the kernel.
    pub kernel: String,
    /// Number of blocks.
    pub blocks: u32,
    /// The counters of all blocks together.
    pub counters: Counters,
    /// The operations of block 0, counted exactly.
    pub first_block: Vec<Counted>,
    /// Violations found in this launch.
    pub violations: usize,
}

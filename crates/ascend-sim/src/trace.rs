//! What happened: calls, violations and launches.

use std::fmt;

/// One call of an exported function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Name of the function.
    pub function: &'static str,
    /// What it returned.
    pub code: i32,
}

/// Something that a program or a kernel did and must not do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// What kind of fault: a fixed word such as `ordering`, `gm-out-of-bounds` or `leak`.
    pub kind: String,
    /// The kernel, for faults inside one.
    pub kernel: Option<String>,
    /// The block of the launch.
    pub block: Option<u32>,
    /// Source file of the offending statement.
    pub file: Option<String>,
    /// Line of the offending statement.
    pub line: Option<u32>,
    /// What was found and what is missing.
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
        if let Some(kernel) = &self.kernel {
            write!(f, "kernel `{kernel}`")?;
            if let Some(block) = self.block {
                write!(f, " block {block}")?;
            }
            write!(f, ": ")?;
        }
        if let (Some(file), Some(line)) = (&self.file, self.line) {
            write!(f, "{file}:{line}: ")?;
        }
        f.write_str(&self.message)
    }
}

/// What a kernel launch did, counted exactly. Sums over all blocks.
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
}

impl Counters {
    /// Calls of `PipeBarrier<PIPE_ALL>`.
    pub fn pipe_all_barriers(&self) -> u64 {
        self.barriers[6]
    }

    /// Calls of `PipeBarrier<PIPE_V>`.
    pub fn vector_barriers(&self) -> u64 {
        self.barriers[1]
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.gm_bytes_read += other.gm_bytes_read;
        self.gm_bytes_written += other.gm_bytes_written;
        self.gm_transfers_in += other.gm_transfers_in;
        self.gm_transfers_out += other.gm_transfers_out;
        self.gm_bursts_in += other.gm_bursts_in;
        self.gm_bursts_out += other.gm_bursts_out;
        self.scalar_gm_accesses += other.scalar_gm_accesses;
        self.scalar_ub_accesses += other.scalar_ub_accesses;
        self.vector_instructions += other.vector_instructions;
        self.vector_repeats += other.vector_repeats;
        self.ub_high_water_bytes = self.ub_high_water_bytes.max(other.ub_high_water_bytes);
        for (sum, term) in self.barriers.iter_mut().zip(other.barriers) {
            *sum += term;
        }
    }
}

/// One finished kernel launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchReport {
    /// Name of the kernel.
    pub kernel: String,
    /// Number of blocks.
    pub blocks: u32,
    /// What all blocks did together.
    pub counters: Counters,
    /// What each block did, in block order.
    pub per_block: Vec<Counters>,
    /// Violations found in this launch.
    pub violations: usize,
}

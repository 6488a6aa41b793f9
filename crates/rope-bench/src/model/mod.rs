//! How long a rotation on an NPU takes by arithmetic: what a core does is counted on the simulator,
//! what each thing costs is in tables that the vendor publishes. Nothing here was measured by us.
//!
//! | module | what |
//! |---|---|
//! | `price` | what an instruction and a transfer cost |
//! | `time` | the time of a core, and what bounds it |
//! | `count` | a core's share of a rotation, run on the simulator |
//!
//! `docs/benchmarks/model.md` has the assumptions.

#[cfg(feature = "ascend-sim")]
pub mod count;
#[cfg(feature = "ascend-sim")]
pub mod price;
#[cfg(feature = "ascend-sim")]
pub mod time;

use rope_check::buffer::DType;
use serde::{Deserialize, Serialize};

use crate::rows::Source;

/// Why there is no model of a rotation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TimeModelError {
    /// Counting needs the simulator.
    #[error("counting instructions needs the simulated NPU, which this program is built without")]
    NoSimulator,
    /// An instruction whose price is not in the tables.
    #[error("no published price for {what} of {types}: add a row to the model's table")]
    NoPrice {
        /// The instruction.
        what: String,
        /// Types of its operands.
        types: String,
    },
    /// The runtime, the kernels or the simulator failed.
    #[error("the rotation could not be counted: {0}")]
    Run(#[from] Box<dyn std::error::Error + Send + Sync>),
}

/// What is computed of a modelled rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// q and k are rotated.
    Forward,
    /// The gradients of q and k: the adjoint.
    Gradient,
    /// The gradient of cos and sin.
    Angles,
}

/// What a core waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BoundBy {
    /// Global memory, shared by all cores.
    Memory,
    /// Vector instructions, their start-up and barriers.
    Vector,
    /// This core's transfers from global memory.
    Load,
    /// This core's transfers to global memory.
    Store,
    /// The cube core that it shares with another.
    Cube,
    /// The scalar unit, which issues everything else.
    Scalar,
}

/// The modelled time of one rotation on Atlas A2. Times are microseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelRow {
    /// Shape and pairing.
    pub case: String,
    /// Which kernel: `vector`, or `matrix` with a product on the cube cores.
    pub kernel: String,
    /// The element type of q and k.
    pub dtype: DType,
    /// What is computed.
    pub direction: Pass,
    /// The longest of the times below.
    pub bound_by: BoundBy,
    /// Time of the launch on the device.
    pub modelled_us: f64,
    /// The launch's bytes at the memory's rate, what cube and vector cores exchange among them.
    pub memory_us: f64,
    /// The least possible bytes at that rate: q and k in and out, and the angles.
    pub least_us: f64,
    /// `modelled_us / memory_us`.
    pub ratio: f64,
    /// Vector unit of one core, of which `start_up_us`.
    pub vector_us: f64,
    /// What instructions take beyond their repeats, and barriers.
    pub start_up_us: f64,
    /// One core's transfers from global memory.
    pub load_us: f64,
    /// One core's transfers to global memory.
    pub store_us: f64,
    /// Scalar unit of one core.
    pub scalar_us: f64,
    /// The slowest stage of a cube core; 0 without one.
    pub cube_us: f64,
    /// What a barrier may cost, in cycles, until the ratio is 1.15.
    pub barrier_cycles_at_bar: f64,
    /// Always [`Source::Modelled`].
    pub source: Source,
}

/// Every row of the model.
///
/// # Errors
/// [`TimeModelError::NoSimulator`] without the feature `ascend-sim`; else [`TimeModelError::Run`]
/// if a launch fails, and [`TimeModelError::NoPrice`] for an instruction that the tables lack.
pub fn rows() -> Result<Vec<ModelRow>, TimeModelError> {
    #[cfg(feature = "ascend-sim")]
    return count::rows();
    #[cfg(not(feature = "ascend-sim"))]
    Err(TimeModelError::NoSimulator)
}

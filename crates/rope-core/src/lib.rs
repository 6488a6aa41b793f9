//! Rotary position embedding (RoPE, MRoPE) for training: specifications, tables, positions, and CPU kernels
//! that rotate q and k in one pass over memory, forward and backward.

mod error;
pub mod frequencies;
pub mod hf;
mod lanes;
mod spec;

pub use error::{Result, RopeError};
pub use frequencies::{Frequencies, Llama3Scaling, LongRopeScaling, Scaling, YarnScaling};
pub use lanes::{Lane, LaneMap};
pub use spec::{
    AxisLayout, Geometry, MAX_AXES, MAX_HEAD_DIM, Pairing, RotarySpec, RotarySpecBuilder,
};

//! Rotary position embedding (RoPE, MRoPE) for training: specifications, tables, positions, and CPU kernels
//! that rotate q and k in one pass over memory, forward and backward.
//!
//! The way of one step: a [`RotarySpec`] says what a model's configuration says about rotation; a
//! [`CosSinTable`] or [`TokenAngles`] turns [`Positions`] into cos and sin; a [`Rotator`] turns q and k by them, and
//! their gradients back.

mod angles;
mod element;
mod error;
pub mod frequencies;
pub mod hf;
mod kernels;
mod lanes;
mod layout;
mod parallel;
pub mod position_ids;
mod positions;
pub mod reference;
mod rotate;
mod spec;

pub use angles::{Angles, CosSinTable, DEFAULT_TABLE_BUDGET_BYTES, TokenAngles};
pub use element::{Element, Real};
pub use error::{Result, RopeError};
pub use frequencies::{Frequencies, Llama3Scaling, LongRopeScaling, Scaling, YarnScaling};
pub use kernels::InstructionSet;
pub use lanes::{Lane, LaneMap};
pub use layout::{HeadsLayout, HeadsMut, HeadsRef, Layout, Strides};
pub use parallel::Parallelism;
pub use positions::{MAX_POSITION, Positions};
pub use rotate::{Direction, Operand, Rotator};
pub use spec::{
    AxisLayout, Geometry, MAX_AXES, MAX_HEAD_DIM, Pairing, RotarySpec, RotarySpecBuilder,
};

//! Rotary embedding of q and k by this crate's own kernels.
//!
//! [`Rotary`] says what is rotated and how, [`Kernels`] holds the loaded binary, [`Rotator`] runs
//! one on the other; [`Npu`] opens a device with both. Shapes are numbers; no framework is involved.

mod args;
mod coefficients;
mod compile;
mod kernels;
mod npu;
mod rotary;
mod rotator;
mod tiling;
mod view;

pub use args::{Axes, KTensors, RotateArgs, Route, Span, TensorLayout, Tiling};
pub use compile::{KERNEL_SOURCES, compile};
pub use kernels::Kernels;
pub use npu::{KERNELS_VARIABLE, Npu};
pub use rotary::{Direction, Lane, LaneMap, Pairing, Rotary};
pub use rotator::{
    AngleGradient, Angles, KernelElement, KernelType, Operand, Positions, Rotation, Rotator, Table,
};
pub use tiling::{
    AngleSource, Architecture, Machine, Plan, Problem, plan_angle_gradient, plan_rotation,
};
pub use view::{Layout, View};

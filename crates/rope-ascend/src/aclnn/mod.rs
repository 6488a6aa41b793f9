//! The vendor's operators as safe functions.
//!
//! Each call has two phases: the operator plans and names its workspace, then runs on the stream.
//! Outputs are defined once the stream has executed the call. All operators are rows of the tables
//! in `sys`, and methods of [`Operators`].
//!
//! Operators for training (arithmetic, comparisons, reductions, data movement, matrix products)
//! check their arguments themselves. The rotary operators silently compute some calls wrongly, so
//! they are called only within their documented limits, and the error states the limit:
//!
//! | method | operator | limits |
//! |---|---|---|
//! | [`Operators::rotary_mul`] | `npu_rotary_mul` | D even, below 896; some modes on Ascend 950 |
//! | [`Operators::rotary_mul_gradient`] | its gradient | B·N at most 1024 with angles |
//! | [`Operators::rotary_mul_gradients`] | the gradient of q and k | Ascend 950; halves; not BNSD |
//! | [`Operators::mrope`] | `npu_mrope` | four section lists; aligned sizes; dense q and k |
//!
//! `npu_mrope` has no gradient. If a pair shares its angle, the gradient is the same operator with
//! negated sines: [`MropeAngles`] for the adjoint.
//!
//! # Source
//! Public documentation of the operators (hicann/ops-transformer, `posembedding`; hicann/ops-math
//! and hicann/ops-nn).
#![allow(unsafe_code, reason = "calls of the operator library")]

mod ai_cpu;
mod call;
mod operators;
mod plans;
mod rotary;

pub use ai_cpu::{
    Operand, REVISION, ai_cpu_calls, engines, reset_ai_cpu_calls, runs_on_ai_cpu, stores_on_ai_core,
};
pub use call::{Number, View};
pub use operators::{OPERATORS, OperatorInfo, Operators};
pub use rotary::{AngleGradients, Dense, MropeAngles, MropeCall};

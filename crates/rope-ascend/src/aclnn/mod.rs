//! The operators that the vendor ships, as safe functions.
//!
//! Each call has two phases: the operator plans and names its workspace, then runs on the stream.
//! Outputs are defined once the stream has passed the call. All operators are rows of the tables in
//! `sys`, and methods of [`Operators`].
//!
//! Those of training (arithmetic, comparisons, reductions, data movement, matrix products) judge
//! their arguments themselves. The rotary operators compute some calls wrongly without reporting
//! it, so they are called within their documented limits only, with the limit in the error:
//!
//! | method | operator | limits |
//! |---|---|---|
//! | [`Operators::rotary_mul`] | `npu_rotary_mul` | D even, below 896; some modes on Ascend 950 |
//! | [`Operators::rotary_mul_gradient`] | its gradient | B·N at most 1024 with angles |
//! | [`Operators::mrope`] | `npu_mrope` | four section lists; aligned sizes; dense q and k |
//!
//! `npu_mrope` has no gradient of its own. Where a pair shares its angle, the gradient is the same
//! operator with the sines negated: [`MropeAngles`] for the adjoint.
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

#![doc = include_str!("../README.md")]
//!
//! # Concepts
//!
//! | word | meaning | type |
//! |---|---|---|
//! | specification | everything that a configuration states about rotation | [`RotarySpec`] |
//! | pairing | the channels of a head that form a pair | [`Pairing`] |
//! | axis layout | the position axis (T, H, W, ...) that drives each pair | [`AxisLayout`] |
//! | frequencies | theta and its scaling, or a list: radians per token | [`Frequencies`] |
//! | lane | one angle of a token: one per pair, or two if its members differ | [`Lane`] |
//! | lane map | axis and frequency of each lane, compiled from the axis layout | [`LaneMap`] |
//! | geometry | the rotated channels and their pairing: all that a kernel knows | [`Geometry`] |
//! | positions | ids or real numbers, `[axes, tokens]` | [`Positions`] |
//! | table | cos and sin of every position from 0, grown on demand | [`CosSinTable`] |
//! | token angles | cos and sin of a step's tokens, shared by all layers | [`TokenAngles`] |
//! | layout | the order of a tensor's dimensions | [`Layout`] |
//! | view | a tensor's data with its shape and strides | [`HeadsRef`], [`HeadsMut`] |
//! | head norm | RMSNorm of each head, in the same pass as its rotation | [`HeadNorm`] |
//! | adjoint | the transposed rotation, which propagates gradients to q and k | [`Direction`] |
//!
//! [`position_ids`] computes ids for prompts with images and videos, [`hf`] reads other
//! configurations, and [`RotarySpec::builder`] builds custom specifications.
//!
//! # Numerics
//!
//! Angles are computed in f64 and rounded once, to f32 (f64 for f64 tensors). f16 and bf16 are
//! widened to f32, rotated and rounded once on store. Every instruction set, thread count and
//! layout gives the same bits. [`mod@reference`] is the oracle for the tests of the kernels: a
//! matrix in f64, computed from the formulas alone.
//!
//! # Kernels
//!
//! One algorithm serves every element type, pairing and instruction set ([`InstructionSet`]):
//! portable, AVX2, AVX-512, AVX-512 with bf16, and NEON, chosen at run time. Unsafe code is
//! confined to the kernels, to [`Rotator`], which validates before it calls them, and to views of
//! memory that another framework owns ([`HeadsRef::from_raw`]).

mod angles;
mod element;
mod error;
mod frequencies;
pub mod hf;
mod kernels;
mod lanes;
mod layout;
mod limits;
mod matrix;
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
pub use lanes::{AxisLayout, Lane, LaneMap};
pub use layout::{HeadsLayout, HeadsMut, HeadsRef, Layout, Strides};
pub use limits::{MAX_AXES, MAX_HEAD_DIM};
pub use matrix::{MatrixForm, SignedPermutation};
pub use parallel::Parallelism;
pub use positions::Positions;
pub use rotate::{Direction, HeadNorm, NormGradient, NormInput, NormOrder, Operand, Rotator};
pub use spec::{Geometry, Pairing, RotarySpec, RotarySpecBuilder};

//! Rotary position embedding (RoPE, MRoPE) for training: what a model's configuration says about
//! rotation, cos and sin for its positions, and CPU kernels that rotate q and k in one pass over
//! memory, forward and backward.
//!
//! Attention compares q and k. RoPE makes that comparison depend on how far apart two tokens are:
//! before it, each head's channels are taken in pairs, and each pair is rotated in its plane by the
//! angle `position * inv_freq[pair]`. MRoPE gives a token several positions (time, height, width)
//! and lets each drive a part of the pairs.
//!
//! This crate depends on no framework and no device. It validates once, when a value is built; a
//! wrong input is an error with the values expected and found, never a panic.
//!
//! # Concepts
//!
//! | word | meaning | type |
//! |---|---|---|
//! | specification | everything that a configuration says about rotation | [`RotarySpec`] |
//! | pairing | which channels of a head form a pair | [`Pairing`] |
//! | axis layout | which position axis (T, H, W, ...) drives which pair | [`AxisLayout`] |
//! | frequencies | theta and its scaling, or a list: radians per token | [`Frequencies`] |
//! | lane | one angle of a token: one per pair, two where its members differ | [`Lane`] |
//! | lane map | axis and frequency of each lane, compiled from the axis layout | [`LaneMap`] |
//! | geometry | which channels are rotated, and how they pair: all a kernel knows | [`Geometry`] |
//! | positions | ids or real numbers, `[axes, tokens]` | [`Positions`] |
//! | table | cos and sin of every position from 0, grown on demand | [`CosSinTable`] |
//! | token angles | cos and sin of one step's tokens, shared by all layers | [`TokenAngles`] |
//! | layout | the order of a tensor's dimensions | [`Layout`] |
//! | view | a tensor's data with its shape and strides | [`HeadsRef`], [`HeadsMut`] |
//! | head norm | RMSNorm of each head, in the same pass as its rotation | [`HeadNorm`] |
//! | adjoint | the transposed rotation: takes gradients back to q and k | [`Direction`] |
//!
//! # Examples
//!
//! One layer of Qwen2-VL, forward and backward, for a prompt of three text tokens:
//!
//! ```
//! use rope_core::{
//!     HeadsLayout, HeadsMut, Layout, Positions, RopeError, RotarySpec, Rotator, TokenAngles,
//! };
//!
//! let config = r#"{
//!     "model_type": "qwen2_vl", "hidden_size": 1536, "num_attention_heads": 12,
//!     "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}
//! }"#;
//! let spec = RotarySpec::from_hf_config(config)?;
//! assert_eq!((spec.head_dim(), spec.axis_count()), (128, 3));
//!
//! // Text takes the same id on each axis. Once a step, for all layers:
//! let positions = Positions::text(3, 0, 3)?;
//! let angles = TokenAngles::new(&spec, &positions, None)?;
//!
//! // In each layer, q and k in one pass, here in place:
//! let rotator = Rotator::new(spec.geometry(), angles.angles())?;
//! let q_layout = HeadsLayout::contiguous(Layout::Bsnd, 1, 3, 12, 128);
//! let k_layout = HeadsLayout::contiguous(Layout::Bsnd, 1, 3, 2, 128);
//! let (mut q, mut k) = (vec![1f32; q_layout.elems()], vec![1f32; k_layout.elems()]);
//! let k_view = HeadsMut::new(&mut k, k_layout)?;
//! rotator.rotate(HeadsMut::new(&mut q, q_layout)?, Some(k_view.into()))?;
//! // Token 0 is not turned; token 1 is, by one radian in its first pair (channels 0 and 64).
//! assert_eq!((q[0], q[12 * 128]), (1.0, 1f32.cos() - 1f32.sin()));
//!
//! // The backward needs neither q nor k, only their gradients:
//! let (mut dq, mut dk) = (vec![1f32; q.len()], vec![1f32; k.len()]);
//! let dk_view = HeadsMut::new(&mut dk, k_layout)?;
//! rotator.rotate_adjoint(HeadsMut::new(&mut dq, q_layout)?, Some(dk_view.into()))?;
//! # Ok::<(), RopeError>(())
//! ```
//!
//! Ids for prompts with images and videos come from [`position_ids`], other configurations through
//! [`hf`], specifications of one's own from [`RotarySpec::builder`].
//!
//! # Numerics
//!
//! Angles are computed in f64 and rounded once, to f32 (f64 for f64 tensors). f16 and bf16 are
//! widened to f32, rotated and rounded once on store. Every instruction set, thread count and
//! layout gives the same bits. [`mod@reference`] is the oracle that the kernels are tested against:
//! a matrix in f64, from the formulas alone.
//!
//! # Kernels
//!
//! One algorithm serves every element type, pairing and instruction set ([`InstructionSet`]):
//! portable, AVX2, AVX-512, AVX-512 with bf16, and NEON, chosen at run time. Unsafe code is
//! confined to the kernels and to [`Rotator`], which validates before it calls them.
//!
//! # Features
//!
//! `rayon` (default): large tensors are split over the threads of the caller's pool.

mod angles;
mod element;
mod error;
mod frequencies;
pub mod hf;
mod kernels;
mod lanes;
mod layout;
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
pub use lanes::{Lane, LaneMap};
pub use layout::{HeadsLayout, HeadsMut, HeadsRef, Layout, Strides};
pub use matrix::{MatrixForm, SignedPermutation};
pub use parallel::Parallelism;
pub use positions::Positions;
pub use rotate::{Direction, HeadNorm, NormGradient, NormInput, NormOrder, Operand, Rotator};
pub use spec::{
    AxisLayout, Geometry, MAX_AXES, MAX_HEAD_DIM, Pairing, RotarySpec, RotarySpecBuilder,
};

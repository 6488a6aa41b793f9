//! The argument block of the kernels. Mirrors `kernels/rope/rope_tiling.h`; size and offsets are
//! asserted on both sides.
#![allow(
    unsafe_code,
    reason = "states which argument blocks are their bytes alone"
)]

use crate::error::Cores;

/// Element types of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelType {
    /// 32 bits.
    F32,
    /// IEEE 754 half precision.
    F16,
    /// The upper half of 32 bits.
    Bf16,
}

impl KernelType {
    /// Name in the kernels' entry points.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// Strides of the rows (one head of one token) of a tensor in global memory, in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TensorLayout {
    /// Elements from the first to one past the last.
    pub(super) extent: u64,
    pub(super) batch_stride: u64,
    pub(super) token_stride: u64,
    pub(super) head_stride: u64,
}

/// Channels of a row that are moved together.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Span {
    /// First channel.
    pub(super) channel: u32,
    /// Channels in a run.
    pub(super) length: u32,
    /// Number of runs, one after the other.
    pub(super) pieces: u32,
}

/// The mapping of rows to transfers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Route {
    /// Axis that is contiguous with the run and joins it.
    pub(super) fold: u8,
    /// Axis that one transfer runs over.
    pub(super) count: u8,
}

impl Route {
    pub(super) const FOLD_NONE: u8 = 0;
    pub(super) const FOLD_PIECES: u8 = 1;
    pub(super) const FOLD_HEADS: u8 = 2;
    pub(super) const FOLD_TOKENS: u8 = 3;
    pub(super) const COUNT_PIECES: u8 = 0;
    pub(super) const COUNT_HEADS: u8 = 1;
    pub(super) const COUNT_TOKENS: u8 = 2;
}

/// The parameters that the host passes to a kernel; the fields are described in `rope_tiling.h`.
/// Arrays of two are of q and k.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tiling {
    pub(super) input: [TensorLayout; 2],
    pub(super) output: [TensorLayout; 2],
    pub(super) tokens: u64,
    pub(super) seq: u64,
    pub(super) angle_batch_stride: u64,
    pub(super) angle_rows: u64,
    pub(super) heads: [u32; 2],
    pub(super) head_groups: u32,
    pub(super) tokens_per_tile: u32,
    pub(super) heads_per_tile: u32,
    pub(super) slots: u32,
    pub(super) head_major: u32,
    pub(super) segments: u32,
    pub(super) segment_length: u32,
    pub(super) quarter_length: u32,
    pub(super) quarter_pitch: u32,
    pub(super) row_pitch: u32,
    pub(super) load: [Span; 3],
    pub(super) store: [Span; 3],
    pub(super) load_route: [[Route; 2]; 3],
    pub(super) store_route: [[Route; 2]; 3],
    pub(super) a_offset: [u32; 4],
    pub(super) b_offset: [u32; 4],
    pub(super) b_negative: u32,
    pub(super) angle_width: u32,
    pub(super) angle_pieces: u32,
    pub(super) angle_length: u32,
    pub(super) raw_pitch: u32,
    pub(super) coef_pitch: u32,
    pub(super) expand: u32,
    pub(super) map_words: u32,
    pub(super) products: u32,
    pub(super) reserved: u32,
}

/// The parameters that the host passes to the kernels of the norm; described in `rope_tiling.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct NormTiling {
    pub(super) rope: Tiling,
    pub(super) gradient: [TensorLayout; 2],
    pub(super) gradient_load: [Span; 3],
    pub(super) gradient_route: [[Route; 2]; 3],
    pub(super) load_start: [u32; 3],
    pub(super) store_start: [u32; 3],
    pub(super) gradient_start: [u32; 3],
    pub(super) segment_start: u32,
    pub(super) segment_pitch: u32,
    pub(super) rotary_offset: u32,
    pub(super) runs: u32,
    pub(super) run_start: [u32; 6],
    pub(super) run_length: [u32; 6],
    pub(super) adjoint_a_offset: [u32; 4],
    pub(super) adjoint_b_offset: [u32; 4],
    pub(super) adjoint_b_negative: u32,
    pub(super) head_dim: u32,
    pub(super) after: u32,
    pub(super) inv_head_dim: f32,
    pub(super) eps: f32,
    pub(super) weight_offset: f32,
    pub(super) reserved: u32,
}

/// Argument block of the kernels of the norm: eleven device addresses and the tiling. The gradient
/// of y and the sums are of `rope_norm_grad_*` alone.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct NormArgs {
    pub(super) input: [u64; 2],
    pub(super) output: [u64; 2],
    pub(super) gradient: [u64; 2],
    pub(super) weights: [u64; 2],
    pub(super) angles: u64,
    pub(super) map: u64,
    pub(super) weight_sums: u64,
    pub(super) tiling: NormTiling,
}

/// Argument block of `rope_rotate_*` and `rope_angle_grad_*`: six device addresses and the tiling.
/// Of `rope_rotate_*` these are x, y, angles and map; of `rope_angle_grad_*` x, the gradient of y,
/// the gradient of the angles and map.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Args {
    pub(super) input: [u64; 2],
    pub(super) output: [u64; 2],
    pub(super) angles: u64,
    pub(super) map: u64,
    pub(super) tiling: Tiling,
}

/// Argument block of `rope_matrix_*`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct MatrixArgs {
    pub(super) input: [u64; 2],
    pub(super) output: [u64; 2],
    pub(super) angles: u64,
    pub(super) map: u64,
    /// R, or P and R side by side, in the element type.
    pub(super) matrix: u64,
    pub(super) workspace: u64,
    pub(super) tiling: Tiling,
}

/// The parameters of the kernels of a low-rank term; described in `rope_tiling.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LowRankTiling {
    pub(super) rows: u64,
    pub(super) part_stride: u64,
    pub(super) columns: u32,
    pub(super) rank: u32,
    pub(super) parts: u32,
    pub(super) row_tile: u32,
    pub(super) column_tile: u32,
    pub(super) stores_h: u32,
}

impl LowRankTiling {
    /// Tiles in flight.
    pub(super) const SLOTS: u32 = 3;
    /// Ranks whose values are spread over blocks at once.
    pub(super) const CHUNK: u32 = 8;
    /// Products of a rank with the columns of a tile.
    pub(super) const PLANES: u32 = 2;
}

/// Argument block of `rope_low_rank_*`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct LowRankArgs {
    pub(super) y: u64,
    pub(super) h: u64,
    pub(super) b: u64,
    pub(super) rounded_h: u64,
    pub(super) tiling: LowRankTiling,
}

/// The parameters of `rope_short_convolution_*`; described in `rope_tiling.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ShortConvolutionTiling {
    pub(super) rows: u64,
    pub(super) channels: u32,
    pub(super) taps: u32,
    pub(super) sequences: u32,
    pub(super) parts: u32,
    pub(super) row_tile: u32,
    pub(super) column_tile: u32,
}

/// Argument block of `rope_short_convolution_*`, with y, and of `rope_short_convolution_grad_*`,
/// with dy, dx and the sums of the weight's gradient.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct ShortConvolutionArgs {
    pub(super) x: u64,
    pub(super) weight: u64,
    pub(super) starts: u64,
    pub(super) gradient: u64,
    pub(super) out: u64,
    pub(super) weight_sums: u64,
    pub(super) tiling: ShortConvolutionTiling,
}

/// The parameters of the kernels over dense tensors; described in `rope_tiling.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DenseTiling {
    pub(super) elements: u64,
    pub(super) tile: u32,
    pub(super) reserved: u32,
}

/// Argument block of `rope_swiglu_*`, with y, and of `rope_swiglu_grad_*`, with dy, the gradients of
/// gate and up, and y or 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct SwiGluArgs {
    pub(super) gate: u64,
    pub(super) up: u64,
    pub(super) gradient: u64,
    pub(super) outputs: [u64; 3],
    pub(super) tiling: DenseTiling,
}

/// The parameters of the kernels of an update; described in `rope_tiling.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct AdamWTiling {
    pub(super) elements: u64,
    pub(super) tile: u32,
    pub(super) factors: UpdateFactors,
    pub(super) reserved: u32,
}

/// The numbers of an AdamW update:
///
/// ```text
/// g      = gradient scale
/// first  = first + (g - first) of_gradient
/// second = second kept + g² of_square
/// root   = √second / correction + epsilon
/// value  = value stay - first / root step
/// ```
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateFactors {
    /// Multiplies the gradient.
    pub scale: f32,
    /// The share of the gradient in the first moment.
    pub of_gradient: f32,
    /// The share of its square in the second moment.
    pub of_square: f32,
    /// The share of the second moment that is kept.
    pub kept: f32,
    /// Divides the root of the second moment.
    pub correction: f32,
    /// Added to that quotient.
    pub epsilon: f32,
    /// The share of a value that does not decay.
    pub stay: f32,
    /// The size of the step.
    pub step: f32,
}

/// Argument block of `rope_adamw_*`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct AdamWArgs {
    pub(super) value: u64,
    pub(super) gradient: u64,
    pub(super) moments: [u64; 2],
    pub(super) rounded: u64,
    pub(super) tiling: AdamWTiling,
}

/// Argument block of `rope_square_sums_*`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct SquareSumsArgs {
    pub(super) x: u64,
    pub(super) sums: u64,
    pub(super) tiling: DenseTiling,
}

/// The parameters of the kernels of the gated delta rule; described in `rope_tiling.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct DeltaTiling {
    pub(super) tokens: u64,
    pub(super) units: u64,
    pub(super) matrices: u32,
    pub(super) first_chunk: u32,
    pub(super) key_heads: u32,
    pub(super) heads: u32,
    pub(super) key_dim: u32,
    pub(super) value_dim: u32,
    pub(super) row_tile: u32,
    pub(super) keeps: u32,
    pub(super) scale: f32,
    pub(super) epsilon: f32,
}

/// Argument block of `rope_delta_prepare_*`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct DeltaPrepareArgs {
    /// q, k, v, g and beta.
    pub(super) inputs: [u64; 5],
    pub(super) qk: u64,
    pub(super) driven: u64,
    pub(super) left: u64,
    pub(super) base: u64,
    pub(super) numbers: u64,
    pub(super) values: u64,
    pub(super) gradient: u64,
    pub(super) joint: u64,
    pub(super) tiling: DeltaTiling,
}

/// Argument block of `rope_delta_local_f32`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct DeltaLocalArgs {
    pub(super) products: u64,
    pub(super) numbers: u64,
    pub(super) left: u64,
    pub(super) inverse: u64,
    pub(super) decays: u64,
    pub(super) tiling: DeltaTiling,
}

/// An argument block of a kernel: device addresses, then a tiling.
///
/// # Safety
/// - The type is `repr(C)` and has no padding: [`ADDRESSES`](Self::ADDRESSES) addresses of eight
///   bytes, each a parameter of the kernel, then one parameter more, the tiling.
pub(super) unsafe trait ArgumentBlock: Copy {
    /// Addresses before the tiling.
    const ADDRESSES: usize;
    /// The cores that its kernels run on.
    const CORES: Cores;
}

/// Bytes of an address.
pub(super) const ADDRESS_BYTES: usize = 8;

// SAFETY: `repr(C)`; the sizes are asserted below, and those of the fields add up to them.
unsafe impl ArgumentBlock for Args {
    const ADDRESSES: usize = 6;
    const CORES: Cores = Cores::Vector;
}
// SAFETY: as above.
unsafe impl ArgumentBlock for MatrixArgs {
    const ADDRESSES: usize = 8;
    const CORES: Cores = Cores::CubeAndVector;
}
// SAFETY: as above.
unsafe impl ArgumentBlock for NormArgs {
    const ADDRESSES: usize = 11;
    const CORES: Cores = Cores::Vector;
}

// SAFETY: as above.
unsafe impl ArgumentBlock for LowRankArgs {
    const ADDRESSES: usize = 4;
    const CORES: Cores = Cores::Vector;
}

// SAFETY: as above.
unsafe impl ArgumentBlock for SwiGluArgs {
    const ADDRESSES: usize = 6;
    const CORES: Cores = Cores::Vector;
}

// SAFETY: as above.
unsafe impl ArgumentBlock for ShortConvolutionArgs {
    const ADDRESSES: usize = 6;
    const CORES: Cores = Cores::Vector;
}

// SAFETY: as above.
unsafe impl ArgumentBlock for AdamWArgs {
    const ADDRESSES: usize = 5;
    const CORES: Cores = Cores::Vector;
}

// SAFETY: as above.
unsafe impl ArgumentBlock for SquareSumsArgs {
    const ADDRESSES: usize = 2;
    const CORES: Cores = Cores::Vector;
}

// SAFETY: as above.
unsafe impl ArgumentBlock for DeltaPrepareArgs {
    const ADDRESSES: usize = 13;
    const CORES: Cores = Cores::Vector;
}

// SAFETY: as above.
unsafe impl ArgumentBlock for DeltaLocalArgs {
    const ADDRESSES: usize = 5;
    const CORES: Cores = Cores::Vector;
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<TensorLayout>() == 32);
    assert!(size_of::<Span>() == 12);
    assert!(size_of::<Route>() == 2);
    assert!(size_of::<Tiling>() == 376);
    assert!(align_of::<Tiling>() == 8);
    assert!(offset_of!(Tiling, tokens) == 128);
    assert!(offset_of!(Tiling, heads) == 160);
    assert!(offset_of!(Tiling, load) == 208);
    assert!(offset_of!(Tiling, load_route) == 280);
    assert!(offset_of!(Tiling, a_offset) == 304);
    assert!(offset_of!(Tiling, map_words) == 364);
    assert!(size_of::<Args>() == Args::ADDRESSES * ADDRESS_BYTES + 376);
    assert!(size_of::<MatrixArgs>() == MatrixArgs::ADDRESSES * ADDRESS_BYTES + 376);
    assert!(size_of::<NormTiling>() == 648);
    assert!(offset_of!(NormTiling, gradient) == 376);
    assert!(offset_of!(NormTiling, load_start) == 488);
    assert!(offset_of!(NormTiling, run_start) == 540);
    assert!(offset_of!(NormTiling, adjoint_a_offset) == 588);
    assert!(offset_of!(NormTiling, weight_offset) == 640);
    assert!(size_of::<NormArgs>() == NormArgs::ADDRESSES * ADDRESS_BYTES + 648);
    assert!(size_of::<LowRankTiling>() == 40);
    assert!(size_of::<DenseTiling>() == 16);
    assert!(size_of::<SwiGluArgs>() == SwiGluArgs::ADDRESSES * ADDRESS_BYTES + 16);
    assert!(size_of::<ShortConvolutionTiling>() == 32);
    assert!(offset_of!(ShortConvolutionTiling, channels) == 8);
    assert!(
        size_of::<ShortConvolutionArgs>() == ShortConvolutionArgs::ADDRESSES * ADDRESS_BYTES + 32
    );
    assert!(size_of::<AdamWTiling>() == 48);
    assert!(offset_of!(AdamWTiling, factors) == 12);
    assert!(size_of::<AdamWArgs>() == AdamWArgs::ADDRESSES * ADDRESS_BYTES + 48);
    assert!(size_of::<SquareSumsArgs>() == SquareSumsArgs::ADDRESSES * ADDRESS_BYTES + 16);
    assert!(size_of::<DeltaTiling>() == 56);
    assert!(offset_of!(DeltaTiling, scale) == 48);
    assert!(size_of::<DeltaPrepareArgs>() == DeltaPrepareArgs::ADDRESSES * ADDRESS_BYTES + 56);
    assert!(size_of::<DeltaLocalArgs>() == DeltaLocalArgs::ADDRESSES * ADDRESS_BYTES + 56);
    assert!(offset_of!(LowRankTiling, columns) == 16);
    assert!(size_of::<LowRankArgs>() == LowRankArgs::ADDRESSES * ADDRESS_BYTES + 40);
};

//! The argument blocks of the kernels. Mirrors `kernels/rope/rope_tiling.h`; size and offsets are
//! asserted on both sides.

/// Tensors of a launch: q, k.
pub type KTensors<T> = [T; 2];
/// One value for each position axis.
pub type Axes<T> = [T; 4];

/// How the rows (one head of one token) of a tensor lie in global memory; strides in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TensorLayout {
    /// Elements from the first to one past the last.
    pub extent: u64,
    /// Between batches.
    pub batch_stride: u64,
    /// Between tokens.
    pub token_stride: u64,
    /// Between heads.
    pub head_stride: u64,
}

/// Channels of a row that are moved together.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// First channel.
    pub channel: u32,
    /// Channels in a run.
    pub length: u32,
    /// Number of runs, one after the other.
    pub pieces: u32,
}

/// How rows become transfers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Route {
    /// Axis that is contiguous with the run and joins it.
    pub fold: u8,
    /// Axis that one transfer runs over.
    pub count: u8,
}

impl Route {
    pub(crate) const FOLD_NONE: u8 = 0;
    pub(crate) const FOLD_PIECES: u8 = 1;
    pub(crate) const FOLD_HEADS: u8 = 2;
    pub(crate) const FOLD_TOKENS: u8 = 3;
    pub(crate) const COUNT_PIECES: u8 = 0;
    pub(crate) const COUNT_HEADS: u8 = 1;
    pub(crate) const COUNT_TOKENS: u8 = 2;
}

/// What the host tells a kernel; the fields are described in `rope_tiling.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "described where the kernel declares them")]
pub struct Tiling {
    pub input: KTensors<TensorLayout>,
    pub output: KTensors<TensorLayout>,
    pub tokens: u64,
    pub seq: u64,
    pub angle_batch_stride: u64,
    pub angle_rows: u64,
    pub table_rows: u64,
    pub heads: KTensors<u32>,
    pub head_groups: u32,
    pub tokens_per_tile: u32,
    pub heads_per_tile: u32,
    pub work_rows: u32,
    pub slots: u32,
    pub head_major: u32,
    pub segments: u32,
    pub segment_length: u32,
    pub segment_pitch: u32,
    pub row_pitch: u32,
    pub load: [Span; 3],
    pub store: [Span; 3],
    pub load_route: [KTensors<Route>; 3],
    pub store_route: [KTensors<Route>; 3],
    pub a_offset: [u32; 4],
    pub b_offset: [u32; 4],
    pub b_negative: u32,
    pub angle_width: u32,
    pub angle_pieces: u32,
    pub angle_length: u32,
    pub raw_pitch: u32,
    pub coef_pitch: u32,
    pub expand: u32,
    pub axes: u32,
    pub axis_start: Axes<u32>,
    pub axis_length: Axes<u32>,
    pub table_width: u32,
    pub positions_per_load: u32,
    pub map_words: u32,
    pub reserved: u32,
}

/// Argument block of `rope_rotate_*`: seven device addresses and the tiling.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "named as the kernel's parameters")]
pub struct RotateArgs {
    pub q: u64,
    pub k: u64,
    pub q_out: u64,
    pub k_out: u64,
    pub angles: u64,
    pub positions: u64,
    pub map: u64,
    pub tiling: Tiling,
}

/// Argument block of `rope_angle_grad_*`: six device addresses and the tiling.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AngleGradArgs {
    pub(crate) q: u64,
    pub(crate) k: u64,
    pub(crate) q_grad: u64,
    pub(crate) k_grad: u64,
    pub(crate) angle_grad: u64,
    pub(crate) map: u64,
    pub(crate) tiling: Tiling,
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<TensorLayout>() == 32);
    assert!(size_of::<Span>() == 12);
    assert!(size_of::<Route>() == 2);
    assert!(size_of::<Tiling>() == 424);
    assert!(align_of::<Tiling>() == 8);
    assert!(offset_of!(Tiling, tokens) == 128);
    assert!(offset_of!(Tiling, heads) == 168);
    assert!(offset_of!(Tiling, load) == 216);
    assert!(offset_of!(Tiling, load_route) == 288);
    assert!(offset_of!(Tiling, a_offset) == 312);
    assert!(offset_of!(Tiling, axis_start) == 376);
    assert!(offset_of!(Tiling, map_words) == 416);
    assert!(size_of::<RotateArgs>() == 7 * 8 + 424);
    assert!(size_of::<AngleGradArgs>() == 6 * 8 + 424);
};

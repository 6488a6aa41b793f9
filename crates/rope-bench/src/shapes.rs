//! The only place where benchmark dimensions are written.

use rope_core::{AxisLayout, HeadsLayout, Layout, Pairing, RopeError, RotarySpec};

/// q and k of a named model, for one sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The name of the model.
    pub name: &'static str,
    /// Tokens.
    pub seq: usize,
    /// Heads of q.
    pub heads: usize,
    /// Heads of k; 0 for q alone.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Rotated channels of a head.
    pub rotary_dim: usize,
}

impl Shape {
    const fn new(
        name: &'static str,
        seq: usize,
        [heads, kv_heads]: [usize; 2],
        head_dim: usize,
        rotary_dim: usize,
    ) -> Self {
        Self {
            name,
            seq,
            heads,
            kv_heads,
            head_dim,
            rotary_dim,
        }
    }

    /// The same model at another number of tokens.
    pub const fn at(self, seq: usize) -> Self {
        Self { seq, ..self }
    }

    /// The dimensions and strides of q.
    pub fn q(&self, layout: Layout) -> HeadsLayout {
        HeadsLayout::contiguous(layout, 1, self.seq, self.heads, self.head_dim)
    }

    /// The dimensions and strides of k.
    pub fn k(&self, layout: Layout) -> HeadsLayout {
        HeadsLayout::contiguous(layout, 1, self.seq, self.kv_heads, self.head_dim)
    }

    /// Elements of q and k together.
    pub fn elems(&self) -> usize {
        self.seq * (self.heads + self.kv_heads) * self.head_dim
    }

    /// A rotation of this shape.
    ///
    /// # Errors
    /// Those of [`RotarySpec::builder`]; none are expected.
    pub fn spec(&self, pairing: Pairing, axes: AxisLayout) -> Result<RotarySpec, RopeError> {
        RotarySpec::builder(self.head_dim)
            .rotary_dim(self.rotary_dim)
            .pairing(pairing)
            .axis_layout(axes)
            .theta(1e6)
            .build()
    }
}

/// Qwen2.5-VL-7B: 28 heads of q, 4 of k.
pub const QWEN2_5_VL_7B: Shape = Shape::new("Qwen2.5-VL-7B", 8192, [28, 4], 128, 128);

/// Qwen3-VL-8B: 160 MiB of q and k in f32, 80 MiB in 16 bits.
pub const QWEN3_VL_8B: Shape = Shape::new("Qwen3-VL-8B", 8192, [32, 8], 128, 128);

/// Qwen3.5 as its configuration class has it by default: 64 of 256 channels turn.
pub const QWEN3_5: Shape = Shape::new("Qwen3.5", 8192, [16, 4], 256, 64);

/// FLUX and Wan-like diffusion transformers, q and k of 24 heads each: `[1, 24, 28800, 128]`.
pub const FLUX: Shape = Shape::new("FLUX", 28_800, [24, 24], 128, 128);

/// Half the tokens of [`FLUX`], one tensor: what peers that rotate one tensor at a time are
/// compared on.
pub const FLUX_SINGLE: Shape = Shape {
    seq: 14_400,
    kv_heads: 0,
    ..FLUX
};

/// q of Qwen3-VL-8B alone, which still fits in memory at 131,072 tokens.
pub const LONG: Shape = Shape {
    name: "Qwen3-VL-8B q",
    kv_heads: 0,
    ..QWEN3_VL_8B
};

/// Contexts over which the cost of a token should not change.
pub const LONG_SEQS: [usize; 4] = [4096, 16_384, 65_536, 131_072];

//! The only place where benchmark dimensions are written.

use rope_core::{HeadsLayout, Layout};

/// A shape of q and k, as a named model has it.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// What has this shape.
    pub name: &'static str,
    /// Tokens.
    pub seq: usize,
    /// Heads of q.
    pub heads: usize,
    /// Heads of k.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
}

impl Shape {
    /// How q lies in memory.
    pub fn q(&self, layout: Layout) -> HeadsLayout {
        HeadsLayout::contiguous(layout, 1, self.seq, self.heads, self.head_dim)
    }

    /// How k lies in memory.
    pub fn k(&self, layout: Layout) -> HeadsLayout {
        HeadsLayout::contiguous(layout, 1, self.seq, self.kv_heads, self.head_dim)
    }
}

/// Qwen3-VL-8B at 8192 tokens: 160 MiB of q and k in f32, 80 MiB in bf16.
pub const QWEN3_VL_8B: Shape = Shape {
    name: "Qwen3-VL-8B",
    seq: 8192,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
};

/// One token of the same model, as in decoding.
pub const QWEN3_VL_8B_DECODE: Shape = Shape {
    seq: 1,
    ..QWEN3_VL_8B
};

//! The models whose rotations are counted in memory, and their rows.

use rope_core::{AxisLayout, Pairing, RopeError, RotarySpec};

use crate::names;
use crate::rows::{MemoryRow, Source};
use crate::shapes::{FLUX, QWEN2_5_VL_7B, QWEN3_5, QWEN3_VL_8B, Shape};
use rope_check::buffer::DType;

/// A model whose q and k are rotated.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    /// The name on the command line.
    pub name: &'static str,
    shape: Shape,
    pairing: Pairing,
    axes: fn() -> AxisLayout,
}

/// The models whose memory is compared.
pub const MODELS: [Model; 4] = [
    Model::new("qwen2.5-vl-7b", QWEN2_5_VL_7B, Pairing::Half, || {
        AxisLayout::Contiguous(vec![16, 24, 24])
    }),
    Model::new("qwen3-vl-8b", QWEN3_VL_8B, Pairing::Half, || {
        AxisLayout::Striped(vec![24, 20, 20])
    }),
    Model::new("qwen3.5", QWEN3_5, Pairing::Half, || {
        AxisLayout::Striped(vec![11, 11, 10])
    }),
    Model::new("flux", FLUX, Pairing::Adjacent, || {
        AxisLayout::PerAxis(vec![8, 28, 28])
    }),
];

impl Model {
    const fn new(
        name: &'static str,
        shape: Shape,
        pairing: Pairing,
        axes: fn() -> AxisLayout,
    ) -> Self {
        Self {
            name,
            shape,
            pairing,
            axes,
        }
    }

    /// True if the model normalises the heads of q and k.
    pub fn has_norm(&self) -> bool {
        [QWEN3_VL_8B, QWEN3_5].contains(&self.shape)
    }

    /// The model's q and k at another number of tokens.
    ///
    /// # Errors
    /// Those of [`Shape::spec`]; none are expected.
    pub fn at(&self, tokens: usize, dtype: DType) -> Result<Subject, RopeError> {
        let note = if self.shape == FLUX {
            format!("scaled from {} to {tokens} tokens", self.shape.seq)
        } else {
            String::new()
        };
        Ok(Subject {
            spec: self.shape.spec(self.pairing, (self.axes)())?,
            shape: self.shape.at(tokens),
            dtype,
            note,
        })
    }
}

/// q and k, `[1, heads, tokens, head_dim]`, and the rotation that they go through.
#[derive(Clone, Debug)]
pub struct Subject {
    /// Their sizes.
    pub shape: Shape,
    /// The rotation.
    pub spec: RotarySpec,
    /// The type of their elements.
    pub dtype: DType,
    note: String,
}

impl Subject {
    fn bytes(&self, heads: usize) -> usize {
        self.shape.seq * heads * self.shape.head_dim * self.dtype.size_bytes()
    }

    /// Allocations of this size and more can hold a value per token and pair, in two bytes. The
    /// nodes of the graph are smaller.
    pub fn data_bytes(&self) -> usize {
        self.shape.seq * self.shape.rotary_dim / 2 * 2
    }

    /// Bytes of q and k.
    pub fn tensor_bytes(&self) -> usize {
        self.bytes(self.shape.heads + self.shape.kv_heads)
    }

    /// Bytes of the smaller of q and k.
    pub fn smaller_bytes(&self) -> usize {
        self.bytes(self.shape.heads.min(self.shape.kv_heads))
    }

    /// A row without figures.
    pub fn row(
        &self,
        device: &str,
        implementation: &str,
        layers: usize,
        source: Source,
    ) -> MemoryRow {
        let Shape {
            heads,
            kv_heads,
            head_dim,
            rotary_dim,
            ..
        } = self.shape;
        MemoryRow {
            shape: self.shape.name.to_owned(),
            tokens: self.shape.seq,
            heads,
            kv_heads,
            head_dim,
            rotary_dim,
            dtype: self.dtype,
            checkpointing: false,
            device: device.to_owned(),
            implementation: implementation.to_owned(),
            layers,
            source,
            gradient_bytes: self.tensor_bytes(),
            retained_bytes: None,
            retained_data_bytes: None,
            forward_peak_bytes: None,
            backward_peak_bytes: None,
            backward_large_peak_bytes: None,
            step_peak_bytes: None,
            forward_allocations: None,
            forward_large_allocations: None,
            backward_allocations: None,
            backward_large_allocations: None,
            composed_ratio: None,
            rotary_encoding_ratio: None,
            note: self.note.clone(),
        }
    }
}

/// Compares the peaks of one subject's rows with those of the composed operation and of
/// `burn::nn::RotaryEncoding`, at the same number of layers.
pub fn add_ratios(rows: &mut [MemoryRow]) {
    let peaks: Vec<(String, usize, Option<usize>)> = rows
        .iter()
        .map(|row| (row.implementation.clone(), row.layers, row.step_peak_bytes))
        .collect();
    for row in rows {
        let ratio = |implementation: &str| {
            let of = |peak: &&(String, usize, Option<usize>)| {
                peak.0 == implementation && peak.1 == row.layers
            };
            let theirs = peaks.iter().find(of)?.2?;
            Some(theirs as f64 / row.step_peak_bytes? as f64)
        };
        (row.composed_ratio, row.rotary_encoding_ratio) =
            (ratio(names::COMPOSED), ratio(names::ROTARY_ENCODING));
    }
}

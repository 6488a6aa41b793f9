//! What rotations hold in memory: the models, the rows, and formulas for schemes that do not run
//! here.

use rope_core::{AxisLayout, Pairing, RopeError, RotarySpec};

use crate::bars::names;
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
    Model {
        name: "qwen2.5-vl-7b",
        shape: QWEN2_5_VL_7B,
        pairing: Pairing::Half,
        axes: || AxisLayout::Contiguous(vec![16, 24, 24]),
    },
    Model {
        name: "qwen3-vl-8b",
        shape: QWEN3_VL_8B,
        pairing: Pairing::Half,
        axes: || AxisLayout::Striped(vec![24, 20, 20]),
    },
    Model {
        name: "qwen3.5",
        shape: QWEN3_5,
        pairing: Pairing::Half,
        axes: || AxisLayout::Striped(vec![11, 11, 10]),
    },
    Model {
        name: "flux",
        shape: FLUX,
        pairing: Pairing::Adjacent,
        axes: || AxisLayout::PerAxis(vec![8, 28, 28]),
    },
];

impl Model {
    /// Whether the model normalises the heads of q and k.
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

    /// Rows of schemes that do not run here, by the formulas in docs/benchmarks.md.
    pub fn calculated(&self, layers: &[usize]) -> Vec<MemoryRow> {
        let Shape {
            seq,
            heads,
            kv_heads,
            head_dim,
            rotary_dim,
            ..
        } = self.shape;
        let (q, k) = (self.bytes(heads), self.bytes(kv_heads));
        let (q_part, k_part) = (q / head_dim * rotary_dim, k / head_dim * rotary_dim);
        // cos or sin, as wide as the rotated channels.
        let wide = seq * rotary_dim * self.dtype.size_bytes();
        // Qwen2-VL's sections are merged again in each layer.
        let is_merged = matches!(self.spec.axis_layout(), AxisLayout::Contiguous(_));
        // diffusers, not transformers, has the models with a rotation per axis.
        let is_in_transformers = !matches!(self.spec.axis_layout(), AxisLayout::PerAxis(_));
        let mut rows = Vec::new();
        for &layers in layers {
            let mut row = |name: &str, retained: usize, temporaries: Option<usize>, note: &str| {
                rows.push(MemoryRow {
                    retained_bytes: Some(retained.cast_signed()),
                    retained_data_bytes: Some(retained.cast_signed()),
                    forward_peak_bytes: temporaries.map(|temporaries| retained + temporaries),
                    note: note.to_owned(),
                    ..self.row("any", name, layers, Source::Calculated)
                });
            };
            row(
                "torch_npu npu_rotary_mul",
                layers * (q_part + k_part),
                None,
                "keeps x of q and of k in every layer",
            );
            if is_merged {
                row(
                    "Liger qwen2vl_mrope",
                    6 * wide,
                    Some(0),
                    "keeps cos and sin of three axes, once for all layers",
                );
            }
            if is_in_transformers {
                let merged = if is_merged { 2 * wide } else { 0 };
                let joined = if rotary_dim < head_dim {
                    q_part + k_part + q + k
                } else {
                    0
                };
                let temporaries = (3 * q_part).max(q_part + 3 * k_part).max(joined);
                row(
                    "transformers, eager",
                    layers * merged,
                    Some(temporaries),
                    "three temporaries as large as the rotated part",
                );
            }
        }
        rows
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formulas_at_sizes_counted_by_hand() {
        // 28 + 4 heads x 128 x 10 tokens in bf16: q 71,680 bytes, k 10,240, cos 2,560.
        let subject = MODELS[0].at(10, DType::Bf16).unwrap();
        let kept: Vec<(String, Option<isize>, Option<usize>)> = subject
            .calculated(&[2])
            .into_iter()
            .map(|row| {
                let MemoryRow {
                    implementation,
                    retained_bytes,
                    forward_peak_bytes,
                    ..
                } = row;
                (implementation, retained_bytes, forward_peak_bytes)
            })
            .collect();
        let expected = [
            ("torch_npu npu_rotary_mul", 163_840, None),
            ("Liger qwen2vl_mrope", 15_360, Some(15_360)),
            ("transformers, eager", 10_240, Some(10_240 + 215_040)),
        ];
        let expected = expected.map(|(name, kept, peak)| (name.to_owned(), Some(kept), peak));
        assert_eq!(kept, expected);
    }
}

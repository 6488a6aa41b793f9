//! This project's kernels.

use rope_ascend::rope::{AngleGradient, AngleRows, Heads, Npu, Operand, Rotation, Unit};
use rope_ascend::safe::{DeviceBuffer, DeviceMemory, Stream};
use rope_core::{Direction, HeadsLayout, Strides};

use super::{Number, for_dtype, has_kernels, is_short, values};
use crate::buffer::{Buffer, DType};
use crate::engine::{Case, Engine, EngineError, Placed};

/// The kernels on a device, each case on a stream of its own.
#[derive(Clone, Debug)]
pub struct Kernels {
    npu: Npu,
    unit: Unit,
}

impl Kernels {
    /// The kernels of `npu` that rotate by `unit`.
    pub fn new(npu: &Npu, unit: Unit) -> Self {
        let npu = npu.clone();
        Self { npu, unit }
    }

    fn run<E: Number>(
        &self,
        case: &Case,
        direction: Direction,
        q: &Buffer,
        k: Option<&Buffer>,
    ) -> Result<(Buffer, Option<Buffer>), EngineError> {
        let stream = self.npu.stream()?;
        let mut q = Tensor::new(&stream, case, case.heads, values::<E>(self, q)?)?;
        let mut k = match k {
            Some(k) => Some(Tensor::new(
                &stream,
                case,
                case.kv_heads,
                values::<E>(self, k)?,
            )?),
            None => None,
        };
        let rotator = self.npu.rotator(&stream, case.spec.geometry())?;
        let rotator = rotator.by(self.unit);
        let angles = stream.upload(case.angles::<f32>()?.rows())?;
        let rows = case.angle_rows() / parts(case);
        for part in 0..parts(case) {
            rotator.rotate(Rotation {
                element: E::TYPE,
                direction,
                q: q.operand(case, part),
                k: k.as_mut().map(|k| k.operand(case, part)),
                angles: AngleRows {
                    memory: &angles,
                    offset_bytes: part * rows * 2 * case.spec.geometry().lane_count() * 4,
                    rows,
                },
            })?;
        }
        let q = q.result(&stream)?;
        Ok((q, k.map(|k| k.result(&stream)).transpose()?))
    }

    /// The gradients of cos and sin, `[rows of angles, lanes]` each, of q and k together: from each
    /// tensor and the gradient of its rotated self.
    ///
    /// # Errors
    /// As [`Engine::apply`].
    pub fn angle_gradients(
        &self,
        case: &Case,
        q: [&Buffer; 2],
        k: Option<[&Buffer; 2]>,
    ) -> Result<[Vec<f64>; 2], EngineError> {
        for_dtype!(self, q[0], run_angle_gradients(case, q, k))
    }

    fn run_angle_gradients<E: Number>(
        &self,
        case: &Case,
        q: [&Buffer; 2],
        k: Option<[&Buffer; 2]>,
    ) -> Result<[Vec<f64>; 2], EngineError> {
        let stream = self.npu.stream()?;
        let place = |heads, pair: [&Buffer; 2]| -> Result<[Tensor<E>; 2], EngineError> {
            Ok([
                Tensor::new(&stream, case, heads, values::<E>(self, pair[0])?)?,
                Tensor::new(&stream, case, heads, values::<E>(self, pair[1])?)?,
            ])
        };
        let q = place(case.heads, q)?;
        let k = k.map(|k| place(case.kv_heads, k)).transpose()?;
        let rotator = self.npu.rotator(&stream, case.spec.geometry())?;
        let lanes = case.spec.geometry().lane_count();
        let mut found = Vec::new();
        for part in 0..parts(case) {
            let Heads { layout, .. } = q[0].source(case, part);
            let mut gradient = stream.alloc::<f32>(layout.batch * layout.seq * 2 * lanes)?;
            rotator.angle_gradient(AngleGradient {
                element: E::TYPE,
                q: [q[0].source(case, part), q[1].source(case, part)],
                k: k.as_ref()
                    .map(|[k, dk]| [k.source(case, part), dk.source(case, part)]),
                out: &mut gradient,
            })?;
            found.extend(stream.download(&gradient)?);
        }
        let rows = case.angle_rows();
        let mut sums = [vec![0.0; rows * lanes], vec![0.0; rows * lanes]];
        // Samples that share their angles share the gradient: their rows add up.
        for (row, values) in found.chunks(2 * lanes).enumerate() {
            let start = row % rows * lanes;
            for (sum, values) in sums.iter_mut().zip(values.chunks(lanes)) {
                for (sum, value) in sum[start..start + lanes].iter_mut().zip(values) {
                    *sum += f64::from(*value);
                }
            }
        }
        Ok(sums)
    }
}

impl Engine for Kernels {
    fn name(&self) -> String {
        let kernels = match self.unit {
            Unit::Vector => "kernels",
            Unit::Cube => "matrix",
        };
        format!("{}/{kernels}", self.npu.name())
    }

    fn supports(&self, dtype: DType) -> bool {
        match self.unit {
            Unit::Vector => has_kernels(dtype),
            Unit::Cube => is_short(dtype),
        }
    }

    fn apply(
        &self,
        case: &Case,
        direction: Direction,
        q: &Buffer,
        k: Option<&Buffer>,
    ) -> Result<(Buffer, Option<Buffer>), EngineError> {
        for_dtype!(self, q, run(case, direction, q, k))
    }
}

/// The launches that a case takes: one, except that samples with angles per head of their own take
/// one each.
fn parts(case: &Case) -> usize {
    let per_sample = case.positions.tokens() != case.seq;
    if case.head_frequencies.is_some() && per_sample {
        case.batch
    } else {
        1
    }
}

/// A part of a tensor: where it starts, and its layout. The kernels know one row of angles for each
/// token: heads with angles of their own are tokens to them, samples that share these are heads.
fn part_of(case: &Case, layout: HeadsLayout, part: usize) -> (usize, HeadsLayout) {
    if case.head_frequencies.is_none() {
        return (0, layout);
    }
    let Strides { batch, seq, head } = layout.strides;
    let heads_as_tokens = HeadsLayout {
        batch: layout.seq,
        seq: layout.heads,
        heads: layout.batch / parts(case),
        head_dim: layout.head_dim,
        strides: Strides {
            batch: seq,
            seq: head,
            head: batch,
        },
    };
    (part * batch, heads_as_tokens)
}

/// q or k in device memory, placed as the case says.
struct Tensor<E: Number> {
    placed: Placed<E>,
    source: DeviceBuffer<E>,
    target: Option<DeviceBuffer<E>>,
}

impl<E: Number> Tensor<E> {
    fn new(stream: &Stream, case: &Case, heads: usize, values: &[E]) -> Result<Self, EngineError> {
        let placed = Placed::new(case, heads, values);
        let target = placed.target.as_ref();
        Ok(Self {
            source: stream.upload(&placed.source)?,
            target: target.map(|target| stream.upload(target)).transpose()?,
            placed,
        })
    }

    fn source(&self, case: &Case, part: usize) -> Heads<&DeviceMemory> {
        let (offset, layout) = part_of(case, self.placed.layout, part);
        Heads {
            memory: &self.source,
            offset,
            layout,
        }
    }

    fn operand(&mut self, case: &Case, part: usize) -> Operand<'_> {
        let (offset, layout) = part_of(case, self.placed.layout, part);
        let (to_offset, to_layout) = part_of(case, self.placed.contiguous, part);
        match &mut self.target {
            None => Operand::InPlace(Heads {
                memory: &mut self.source,
                offset,
                layout,
            }),
            Some(to) => Operand::Into {
                from: Heads {
                    memory: &self.source,
                    offset,
                    layout,
                },
                to: Heads {
                    memory: to,
                    offset: to_offset,
                    layout: to_layout,
                },
            },
        }
    }

    fn result(mut self, stream: &Stream) -> Result<Buffer, EngineError> {
        match &self.target {
            None => self.placed.source = stream.download(&self.source)?,
            Some(target) => self.placed.target = Some(stream.download(target)?),
        }
        Ok(E::wrap(self.placed.result()))
    }
}

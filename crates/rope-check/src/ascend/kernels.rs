//! This project's kernels.

use rope_ascend::rope::{
    AngleGradient, Angles, Lane, LaneMap, Npu, Operand, Positions, Rotary, Rotation, Table, View,
};
use rope_ascend::safe::{DeviceBuffer, Stream};
use rope_burn::ascend::{kernel_direction, kernel_geometry};
use rope_core::{CosSinTable, Direction, HeadsLayout, RotarySpec, TokenAngles};

use super::{Number, for_dtype, has_kernels, number, values};
use crate::buffer::{Buffer, DType};
use crate::engine::{AngleSource, Case, Engine, EngineError, Placed};

/// Positions from here on are too many for a table in device memory, and go by rows.
const TABLE_LIMIT: u32 = 1 << 16;

/// The kernels on a device, each case on a stream of its own.
#[derive(Clone, Debug)]
pub struct Kernels {
    npu: Npu,
    angles: AngleSource,
}

impl Kernels {
    /// The kernels of `npu`, with angles from `angles`.
    pub fn new(npu: &Npu, angles: AngleSource) -> Self {
        Self {
            npu: npu.clone(),
            angles,
        }
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
        let rotary = kernel_geometry(case.spec.geometry())?;
        let (rotary, angles) = match self.angles {
            AngleSource::Table if case.positions.highest() < TABLE_LIMIT => {
                let (lanes, columns) = lane_map(&case.spec)?;
                let table = table(&stream, case, &columns)?;
                (
                    rotary.with_lanes(lanes)?,
                    DeviceAngles::Table(table, positions(&stream, case)?),
                )
            }
            _ => (
                rotary.clone(),
                DeviceAngles::Tokens(token_angles(&stream, case, &rotary)?),
            ),
        };
        let rotator = self.npu.rotator(&stream, rotary)?;
        rotator.rotate(&mut Rotation {
            direction: kernel_direction(direction),
            batch: number(case.batch)?,
            seq: number(case.seq)?,
            q: q.operand(),
            k: k.as_mut().map(Tensor::operand),
            angles: angles.borrow(),
        })?;
        let q = q.result(&stream)?;
        Ok((q, k.map(|k| k.result(&stream)).transpose()?))
    }

    /// The gradients of cos and sin, `[tokens, lanes]` each, of q and k together: from each tensor and the gradient of
    /// its rotated self.
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
        let rotator = self
            .npu
            .rotator(&stream, kernel_geometry(case.spec.geometry())?)?;
        let gradient = rotator.angle_gradient(&AngleGradient {
            batch: number(case.batch)?,
            seq: number(case.seq)?,
            q: q[0].source(),
            k: k.as_ref().map(|k| k[0].source()),
            q_grad: q[1].source(),
            k_grad: k.as_ref().map(|k| k[1].source()),
        })?;
        let lanes = case.spec.geometry().lanes();
        let tokens = case.positions.tokens();
        let mut sums = [vec![0.0; tokens * lanes], vec![0.0; tokens * lanes]];
        // Samples that share their angles share the gradient: their rows add up.
        for (row, values) in stream.download(&gradient)?.chunks(2 * lanes).enumerate() {
            let start = row % tokens * lanes;
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
        let angles = match self.angles {
            AngleSource::Table => "/table",
            AngleSource::Tokens => "",
        };
        format!("{}/kernels{angles}", self.npu.name())
    }

    fn supports(&self, dtype: DType) -> bool {
        has_kernels(dtype)
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

/// Angles in device memory.
enum DeviceAngles {
    Tokens(DeviceBuffer<f32>),
    Table(Table, Positions),
}

impl DeviceAngles {
    fn borrow(&self) -> Angles<'_> {
        match self {
            Self::Tokens(rows) => Angles::PerToken(rows),
            Self::Table(table, positions) => Angles::Table(table, positions),
        }
    }
}

fn token_angles(
    stream: &Stream,
    case: &Case,
    rotary: &Rotary,
) -> Result<DeviceBuffer<f32>, EngineError> {
    let angles = TokenAngles::<f32>::new(&case.spec, &case.positions, case.seq_len)?;
    let width = rotary.angle_width() as usize;
    let rows = angles.cos().chunks(width).zip(angles.sin().chunks(width));
    let rows: Vec<f32> = rows
        .flat_map(|(cos, sin)| [cos, sin])
        .flatten()
        .copied()
        .collect();
    Ok(stream.upload(&rows)?)
}

/// The kernels' lane map, and the table's columns in the order that it wants.
fn lane_map(spec: &RotarySpec) -> Result<(LaneMap, Vec<u32>), EngineError> {
    let map = spec.lane_map();
    let lane = |lane: &rope_core::Lane| Lane {
        axis: u32::from(lane.axis),
        column: lane.frequency,
    };
    let lanes = map.lanes().iter().map(lane).collect();
    Ok(LaneMap::new(lanes, number(map.axes())?, number(map.frequencies())?)?.packed())
}

fn table(stream: &Stream, case: &Case, columns: &[u32]) -> Result<Table, EngineError> {
    let mut table = CosSinTable::<f32>::new(&case.spec, case.seq_len)?;
    let highest = case.positions.highest();
    table.grow_to(highest)?;
    let width = case.spec.lane_map().frequencies();
    let (mut cos, mut sin) = (Vec::new(), Vec::new());
    for position in 0..=highest as usize {
        let row = table.row(position).unwrap_or_default();
        cos.extend(columns.iter().map(|column| row[*column as usize]));
        sin.extend(columns.iter().map(|column| row[width + *column as usize]));
    }
    Ok(Table::new(stream, &cos, &sin, number(columns.len())?)?)
}

fn positions(stream: &Stream, case: &Case) -> Result<Positions, EngineError> {
    let axes = case.positions.axes();
    let ids: Vec<i32> = (0..axes)
        .flat_map(|axis| case.positions.axis(axis))
        .map(|id| i32::try_from(*id).unwrap_or(i32::MAX))
        .collect();
    Ok(Positions::new(stream, &ids, number(axes)?)?)
}

/// q or k in device memory, placed as the case says.
struct Tensor<E: Number> {
    placed: Placed<E>,
    source: DeviceBuffer<E>,
    target: Option<DeviceBuffer<E>>,
    views: [View; 2],
}

impl<E: Number> Tensor<E> {
    fn new(stream: &Stream, case: &Case, heads: usize, values: &[E]) -> Result<Self, EngineError> {
        let placed = Placed::new(case, heads, values);
        let view = |layout: &HeadsLayout| -> Result<View, EngineError> {
            Ok(View {
                offset: 0,
                heads: number(layout.heads)?,
                batch_stride: layout.strides.batch as u64,
                token_stride: layout.strides.seq as u64,
                head_stride: layout.strides.head as u64,
            })
        };
        let target = placed.target.as_ref();
        Ok(Self {
            source: stream.upload(&placed.source)?,
            target: target.map(|target| stream.upload(target)).transpose()?,
            views: [view(&placed.layout)?, view(&placed.contiguous)?],
            placed,
        })
    }

    fn source(&self) -> (&DeviceBuffer<E>, View) {
        (&self.source, self.views[0])
    }

    fn operand(&mut self) -> Operand<'_, E> {
        let [from_view, to_view] = self.views;
        match &mut self.target {
            None => Operand::InPlace(&mut self.source, from_view),
            Some(to) => Operand::Into {
                from: &self.source,
                from_view,
                to,
                to_view,
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

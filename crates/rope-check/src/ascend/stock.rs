//! The stock operators, where their limits allow.

use rope_ascend::AscendError;
use rope_ascend::aclnn::{
    CacheDirection, GradOutputs, Mode, MropeCall, OperatorLayout, Output, SectionOrder,
    SinCosCache, StockPositions, Tensor, rope_with_sin_cos_cache, rotary_position_embedding,
    rotary_position_embedding_grad,
};
use rope_ascend::rope::Npu;
use rope_ascend::safe::Stream;
use rope_core::{AxisLayout, CosSinTable, Direction, Layout, Pairing, TokenAngles};

use super::{Number, for_dtype, has_kernels, number, values};
use crate::buffer::{Buffer, DType};
use crate::engine::{Case, Engine, EngineError};

/// A stock operator with a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    /// `RopeWithSinCosCache`, and its gradient by negated sines.
    NpuMrope,
    /// `RotaryPositionEmbedding` and `RotaryPositionEmbeddingGrad`.
    NpuRotaryMul,
}

impl Operator {
    /// All of them.
    pub const ALL: [Operator; 2] = [Self::NpuMrope, Self::NpuRotaryMul];

    /// The name by which torch_npu calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::NpuMrope => "npu_mrope",
            Self::NpuRotaryMul => "npu_rotary_mul",
        }
    }
}

/// One of them on a device.
#[derive(Clone, Debug)]
pub struct Stock {
    npu: Npu,
    operator: Operator,
}

impl Stock {
    /// `operator` of `npu`.
    pub fn new(npu: &Npu, operator: Operator) -> Self {
        Self {
            npu: npu.clone(),
            operator,
        }
    }

    fn limit(&self, limit: &str, found: impl Into<String>) -> EngineError {
        AscendError::OperatorLimit {
            operator: self.operator.name(),
            limit: limit.into(),
            found: found.into(),
        }
        .into()
    }

    fn run<E: Number>(
        &self,
        case: &Case,
        direction: Direction,
        q: &Buffer,
        k: Option<&Buffer>,
    ) -> Result<(Buffer, Option<Buffer>), EngineError> {
        if case.strided {
            return Err(self.limit("contiguous q and k", "a view"));
        }
        if case.in_place {
            return Err(self.limit("an output of its own", "q and k to overwrite"));
        }
        let q = values::<E>(self, q)?;
        let k = k.map(|k| values::<E>(self, k)).transpose()?;
        match self.operator {
            Operator::NpuMrope => {
                let k = k.ok_or_else(|| self.limit("q and k", "q alone"))?;
                let (q, k) = self.mrope(case, direction, q, k)?;
                Ok((q, Some(k)))
            }
            Operator::NpuRotaryMul => {
                let q = self.rotary_mul(case, direction, case.heads, q)?;
                let k = k.map(|k| self.rotary_mul(case, direction, case.kv_heads, k));
                Ok((q, k.transpose()?))
            }
        }
    }

    fn mrope<E: Number>(
        &self,
        case: &Case,
        direction: Direction,
        q: &[E],
        k: &[E],
    ) -> Result<(Buffer, Buffer), EngineError> {
        let spec = &case.spec;
        if !matches!(case.layout, Layout::Bsnd | Layout::Tnd) {
            return Err(self.limit("tokens x heads x head_dim", format!("{:?}", case.layout)));
        }
        if spec.rotary_offset() != 0 {
            let found = format!("an offset of {}", spec.rotary_offset());
            return Err(self.limit("rotated channels at the start of a head", found));
        }
        let half_pairing = match spec.pairing() {
            Pairing::Half => true,
            Pairing::Adjacent => false,
            other => return Err(self.limit("pairs by halves or adjacent", format!("{other:?}"))),
        };
        let (sections, order) = match spec.axis_layout() {
            AxisLayout::Single => (&[][..], SectionOrder::Contiguous),
            AxisLayout::Contiguous(sections) => (&sections[..], SectionOrder::Contiguous),
            AxisLayout::Striped(sections) => (&sections[..], SectionOrder::Striped),
            other => return Err(self.limit("contiguous or striped sections", format!("{other:?}"))),
        };
        let sections: Vec<i64> = sections.iter().map(|section| *section as i64).collect();
        // Refused before a table of that size is made.
        if case.positions.highest() >= TABLE_LIMIT {
            let found = case.positions.highest().to_string();
            return Err(self.limit("positions of a table in device memory", found));
        }
        let stream = self.npu.stream()?;
        let mut table = CosSinTable::<f32>::new(spec, case.seq_len)?;
        table.grow_to(case.positions.highest())?;
        let pairs = spec.geometry().pairs();
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for row in (0..=case.positions.highest() as usize).filter_map(|at| table.row(at)) {
            cos.extend_from_slice(&row[..pairs]);
            sin.extend_from_slice(&row[pairs..]);
        }
        let cache = SinCosCache::<E>::new(&stream, &cos, &sin, number(pairs)?)?;
        let tokens = case.batch * case.seq;
        let ids: Vec<i64> = (0..spec.axes())
            .flat_map(|axis| case.positions.axis(axis).iter().cycle().take(tokens))
            .map(|id| i64::from(*id))
            .collect();
        let positions = StockPositions::new(&stream, &ids, number(spec.axes())?)?;
        let inputs = [stream.upload(q)?, stream.upload(k)?];
        let (mut q_out, mut k_out) = (stream.zeros::<E>(q.len())?, stream.zeros::<E>(k.len())?);
        rope_with_sin_cos_cache(&mut MropeCall {
            direction: match direction {
                Direction::Forward => CacheDirection::Forward,
                Direction::Adjoint => CacheDirection::Gradient,
            },
            cache: &cache,
            positions: &positions,
            sections: &sections,
            order,
            head_dim: number(spec.head_dim())?,
            half_pairing,
            q: &inputs[0],
            k: &inputs[1],
            q_out: &mut q_out,
            k_out: &mut k_out,
        })?;
        Ok((
            E::wrap(stream.download(&q_out)?),
            E::wrap(stream.download(&k_out)?),
        ))
    }

    fn rotary_mul<E: Number>(
        &self,
        case: &Case,
        direction: Direction,
        heads: usize,
        x: &[E],
    ) -> Result<Buffer, EngineError> {
        let spec = &case.spec;
        if spec.rotary_dim() != spec.head_dim() {
            let found = format!("{} of {} channels", spec.rotary_dim(), spec.head_dim());
            return Err(self.limit("whole heads", found));
        }
        let (mode, layout) = (mode(spec.pairing()), operator_layout(case.layout));
        let stream = self.npu.stream()?;
        let dims = sizes(&case.dims(heads));
        let x = stream.upload(x)?;
        let (angle_dims, cos, sin) = full_width_angles::<E>(case, &stream)?;
        let (cos, sin) = (
            Tensor::new(&cos, &angle_dims)?,
            Tensor::new(&sin, &angle_dims)?,
        );
        let mut out = stream.zeros::<E>(x.len())?;
        let source = Tensor::new(&x, &dims)?;
        let mut output = Output::new(&mut out, &dims)?;
        match direction {
            Direction::Forward => {
                rotary_position_embedding(&source, &cos, &sin, mode, layout, &mut output)?;
            }
            Direction::Adjoint => {
                let mut outputs = GradOutputs {
                    dx: output,
                    angles: None,
                };
                rotary_position_embedding_grad(&source, &cos, &sin, mode, layout, &mut outputs)?;
            }
        }
        Ok(E::wrap(stream.download(&out)?))
    }
}

/// Positions from here on are too many for a table in device memory.
const TABLE_LIMIT: u32 = 1 << 16;

fn mode(pairing: Pairing) -> Mode {
    match pairing {
        Pairing::Half => Mode::Half,
        Pairing::Adjacent => Mode::Interleave,
        Pairing::Quarter => Mode::Quarter,
        Pairing::InterleaveHalf => Mode::InterleaveHalf,
    }
}

fn operator_layout(layout: Layout) -> OperatorLayout {
    match layout {
        Layout::Bsnd => OperatorLayout::Bsnd,
        Layout::Bnsd => OperatorLayout::Bnsd,
        Layout::Sbnd => OperatorLayout::Sbnd,
        Layout::Tnd => OperatorLayout::Tnd,
    }
}

fn sizes(dims: &[usize]) -> Vec<u64> {
    dims.iter().map(|dim| *dim as u64).collect()
}

type FullWidth<E> = (
    Vec<u64>,
    rope_ascend::safe::DeviceBuffer<E>,
    rope_ascend::safe::DeviceBuffer<E>,
);

/// cos and sin with one head and a value for each channel, in the data's type.
fn full_width_angles<E: Number>(case: &Case, stream: &Stream) -> Result<FullWidth<E>, EngineError> {
    let angles = TokenAngles::<f32>::new(&case.spec, &case.positions, case.seq_len)?;
    let (lanes, width) = (case.spec.geometry().lanes(), case.spec.head_dim());
    let lane_of = channel_lanes(case);
    let shared = case.batch > 1 && case.positions.tokens() == case.seq;
    let batch = if shared { 1 } else { case.batch };
    let one = Case {
        batch,
        ..case.clone()
    };
    let dims = sizes(&one.dims(1));
    let mut full = [
        vec![E::default(); batch * case.seq * width],
        vec![E::default(); batch * case.seq * width],
    ];
    // Rows of a tensor with one head lie in the layout's own order.
    for (token, start) in one.rows(1) {
        for (channel, lane) in lane_of.iter().enumerate() {
            for (full, values) in full.iter_mut().zip([angles.cos(), angles.sin()]) {
                full[start + channel] = E::from_f32(values[token * lanes + lane]);
            }
        }
    }
    let [cos, sin] = full;
    Ok((dims, stream.upload(&cos)?, stream.upload(&sin)?))
}

/// The lane of each channel that is written.
fn channel_lanes(case: &Case) -> Vec<usize> {
    let geometry = case.spec.geometry();
    let mut lanes = vec![0; geometry.head_dim()];
    for pair in 0..geometry.pairs() {
        let (_, written) =
            rope_core::reference::pair_channels(geometry.pairing(), geometry.rotary_dim(), pair);
        let second = if geometry.per_channel() {
            geometry.pairs() + pair
        } else {
            pair
        };
        lanes[written[0]] = pair;
        lanes[written[1]] = second;
    }
    lanes
}

impl Engine for Stock {
    fn name(&self) -> String {
        format!("{}/{}", self.npu.name(), self.operator.name())
    }

    fn supports(&self, dtype: DType) -> bool {
        has_kernels(dtype)
    }

    fn angle_dtype(&self, dtype: DType) -> DType {
        dtype
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

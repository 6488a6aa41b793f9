//! The stock operators, where their limits allow.

use rope_ascend::AscendError;
use rope_ascend::aclnn::{Dense, MropeAngles, MropeCall, Operators};
use rope_ascend::rope::Npu;
use rope_ascend::safe::{DeviceBuffer, Stream};
use rope_core::{CosSinTable, Direction, Layout, Pairing, TokenAngles};

use super::{Number, for_dtype, has_kernels, values};
use crate::buffer::{Buffer, DType};
use crate::engine::{Case, Engine, EngineError};

/// A stock operator with a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    /// `RopeWithSinCosCache`, and its gradient by negated sines.
    NpuMrope,
    /// `RotaryPositionEmbedding` and `RotaryPositionEmbeddingGrad`; on Ascend 950
    /// `ApplyRotaryPosEmbGrad` where it serves, one call for q and k.
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
        if case.head_frequencies.is_some() {
            return Err(self.limit("angles that all heads share", "angles per head"));
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
                if let (Direction::Adjoint, Some(k)) = (direction, k)
                    && let Some((q, k)) = self.both_gradients(case, q, k)?
                {
                    return Ok((q, Some(k)));
                }
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
        if !case.positions.are_ids() {
            return Err(self.limit("position ids", "real positions"));
        }
        let stream = self.npu.stream()?;
        let mut table = CosSinTable::<f32>::new(spec, case.seq_len)?;
        let tokens = case.batch * case.seq;
        let positions = &case.positions;
        let angles = MropeAngles::new(&stream, E::ACL, &mut table, positions, tokens, direction)?;
        let inputs = [stream.upload(q)?, stream.upload(k)?];
        let outputs = [stream.zeros::<E>(q.len())?, stream.zeros::<E>(k.len())?];
        Operators::new(stream.clone()).mrope(&MropeCall {
            angles: &angles,
            axes: spec.axis_layout(),
            pairing: spec.pairing(),
            head_dim: spec.head_dim(),
            q: &inputs[0],
            k: &inputs[1],
            q_out: &outputs[0],
            k_out: &outputs[1],
        })?;
        let [q, k] = outputs.map(|out| stream.download(&out).map(E::wrap));
        Ok((q?, k?))
    }

    /// The adjoint by the operator that takes q and k, if it serves here.
    fn both_gradients<E: Number>(
        &self,
        case: &Case,
        q: &[E],
        k: &[E],
    ) -> Result<Option<(Buffer, Buffer)>, EngineError> {
        let stream = self.npu.stream()?;
        let operators = Operators::new(stream.clone());
        if case.spec.pairing() != Pairing::Half
            || case.layout == Layout::Bnsd
            || !operators.has_rotary_mul_gradients()?
        {
            return Ok(None);
        }
        self.expect_whole_heads(case)?;
        let dims = [case.heads, case.kv_heads].map(|heads| Dense::new(&case.dims(heads)));
        let (given, out) = (
            [stream.upload(q)?, stream.upload(k)?],
            [stream.zeros::<E>(q.len())?, stream.zeros::<E>(k.len())?],
        );
        let (angle_dims, angles) = full_width_angles::<E>(case, &stream)?;
        operators.rotary_mul_gradients(
            [0, 1].map(|i| dims[i].view(&given[i], E::ACL)),
            [0, 1].map(|i| angle_dims.view(&angles[i], E::ACL)),
            case.layout,
            [0, 1].map(|i| dims[i].view(&out[i], E::ACL)),
        )?;
        let [q, k] = out.map(|out| stream.download(&out).map(E::wrap));
        Ok(Some((q?, k?)))
    }

    fn expect_whole_heads(&self, case: &Case) -> Result<(), EngineError> {
        let spec = &case.spec;
        if spec.rotary_dim() == spec.head_dim() {
            return Ok(());
        }
        let found = format!("{} of {} channels", spec.rotary_dim(), spec.head_dim());
        Err(self.limit("whole heads", found))
    }

    fn rotary_mul<E: Number>(
        &self,
        case: &Case,
        direction: Direction,
        heads: usize,
        x: &[E],
    ) -> Result<Buffer, EngineError> {
        self.expect_whole_heads(case)?;
        let spec = &case.spec;
        let stream = self.npu.stream()?;
        let operators = Operators::new(stream.clone());
        let dims = Dense::new(&case.dims(heads));
        let x = stream.upload(x)?;
        let (angle_dims, angles) = full_width_angles::<E>(case, &stream)?;
        let angles = angles
            .each_ref()
            .map(|angles| angle_dims.view(angles, E::ACL));
        let out = stream.zeros::<E>(x.len())?;
        let (source, target) = (dims.view(&x, E::ACL), dims.view(&out, E::ACL));
        let (pairing, layout) = (spec.pairing(), case.layout);
        match direction {
            Direction::Forward => operators.rotary_mul(source, angles, pairing, layout, target),
            Direction::Adjoint => {
                operators.rotary_mul_gradient(source, angles, pairing, layout, target, None)
            }
        }?;
        Ok(E::wrap(stream.download(&out)?))
    }
}

/// cos and sin with one head and a value for each channel, in the data's type.
fn full_width_angles<E: Number>(
    case: &Case,
    stream: &Stream,
) -> Result<(Dense, [DeviceBuffer<E>; 2]), EngineError> {
    let angles = TokenAngles::<f32>::new(&case.spec, &case.positions, case.seq_len)?.cos_sin();
    let (lanes, width) = (case.spec.geometry().lane_count(), case.spec.head_dim());
    let lane_of = channel_lanes(case);
    let shared = case.batch > 1 && case.positions.tokens() == case.seq;
    let batch = if shared { 1 } else { case.batch };
    let one = Case {
        batch,
        ..case.clone()
    };
    let zeros = vec![E::default(); batch * case.seq * width];
    let mut full = [zeros.clone(), zeros];
    // Rows of a tensor with one head lie in the layout's own order.
    for (token, start) in one.rows(1) {
        for (channel, lane) in lane_of.iter().enumerate() {
            for (full, values) in full.iter_mut().zip(&angles) {
                full[start + channel] = E::narrow(values[token * lanes + lane]);
            }
        }
    }
    let [cos, sin] = full;
    let dims = Dense::new(&one.dims(1));
    Ok((dims, [stream.upload(&cos)?, stream.upload(&sin)?]))
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

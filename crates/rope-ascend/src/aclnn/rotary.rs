//! The stock rotary operators, each called only within its documented limits.
//!
//! Calls that an operator would refuse, or silently compute wrongly, are refused first. A limit is
//! a row: the condition, the limit's text, and the text of the value found.

use rope_core::{AxisLayout, CosSinTable, Direction, Layout, Pairing, Positions};

use super::call::View;
use super::operators::Operators;
use crate::error::{AscendError, Result};
use crate::safe::{Architecture, DeviceBuffer, DeviceMemory, Stream};
use crate::sys::aclDataType;

const ROTARY_MUL: &str = "aclnnRotaryPositionEmbedding";
const ROTARY_MUL_GRAD: &str = "aclnnRotaryPositionEmbeddingGrad";
const BOTH_GRADIENTS: &str = "aclnnApplyRotaryPosEmbGrad";
const MROPE: &str = "aclnnRopeWithSinCosCache";

/// Rejects a call that violates a limit of an operator, with the first such limit.
macro_rules! limits {
    ($operator:expr; $( $kept:expr => ($($limit:tt)*), ($($found:tt)*); )*) => { $(
        if !($kept) {
            return Err(AscendError::OperatorLimit {
                operator: $operator,
                limit: format!($($limit)*),
                found: format!($($found)*),
            });
        }
    )* };
}

/// Dimensions and strides of a dense tensor.
#[derive(Clone, Debug)]
pub struct Dense {
    dims: Vec<usize>,
    strides: Vec<usize>,
}

impl Dense {
    /// Creates the strides of a dense tensor.
    pub fn new(dims: &[usize]) -> Self {
        let mut strides = vec![1; dims.len()];
        for axis in (1..dims.len()).rev() {
            strides[axis - 1] = strides[axis] * dims[axis];
        }
        Self {
            dims: dims.to_vec(),
            strides,
        }
    }

    /// Views the tensor at the start of `buffer`.
    pub fn view<'a>(&'a self, buffer: &'a DeviceMemory, dtype: aclDataType) -> View<'a> {
        View {
            buffer,
            dtype,
            dims: &self.dims,
            strides: &self.strides,
            offset: 0,
        }
    }
}

/// A tensor with four axes, which every release of the operators takes. Three axes came later, and
/// not on every product; TND is the same memory as BSND with a batch of one.
struct FourAxes<'a> {
    tensor: View<'a>,
    dims: [usize; 4],
    strides: [usize; 4],
    layout: Layout,
}

impl<'a> FourAxes<'a> {
    fn new(operator: &'static str, layout: Layout, tensor: View<'a>) -> Result<Self> {
        let rank = if layout == Layout::Tnd { 3 } else { 4 };
        let View { dims, strides, .. } = tensor;
        limits! {
            operator;
            dims.len() == rank && strides.len() == rank =>
                ("{rank} dimensions in this layout"), ("{dims:?}");
        }
        let mut four = Self {
            tensor,
            dims: [1; 4],
            strides: [0; 4],
            layout,
        };
        four.dims[4 - rank..].copy_from_slice(dims);
        four.strides[4 - rank..].copy_from_slice(strides);
        if rank == 3 {
            four.strides[0] = dims[0] * strides[0];
        }
        Ok(four)
    }

    fn view(&self) -> View<'_> {
        View {
            dims: &self.dims,
            strides: &self.strides,
            ..self.tensor
        }
    }

    /// Batches, heads and tokens.
    fn sizes(&self) -> [usize; 3] {
        let axes = match self.layout {
            Layout::Bnsd => [0, 1, 2],
            Layout::Bsnd | Layout::Tnd => [0, 2, 1],
            Layout::Sbnd => [1, 2, 0],
        };
        axes.map(|axis| self.dims[axis])
    }

    /// Channels.
    fn width(&self) -> usize {
        self.dims[3]
    }

    fn is_like(&self, other: &Self) -> bool {
        self.dims == other.dims && self.tensor.dtype == other.tensor.dtype
    }
}

/// The gradients of cos and sin that [`Operators::rotary_mul_gradient`] can compute.
#[derive(Clone, Copy, Debug)]
pub struct AngleGradients<'a> {
    /// x before the rotation.
    pub x: View<'a>,
    /// Gradient of cos.
    pub cos: View<'a>,
    /// Gradient of sin.
    pub sin: View<'a>,
}

/// Angles of [`Operators::mrope`] in device memory: the rows of a table, and the tokens' ids.
#[derive(Debug)]
pub struct MropeAngles {
    table: DeviceBuffer<u8>,
    dtype: aclDataType,
    table_dims: Dense,
    ids: DeviceBuffer<i64>,
    ids_dims: Dense,
    axes: usize,
    tokens: usize,
}

impl MropeAngles {
    /// Uploads cosines and sines of the positions in use, rounded to the operands' type, and the
    /// ids of `tokens` tokens: those of `positions`, repeated for each further sample.
    ///
    /// For the adjoint, the sines are negated. This is exact, since a pair shares its angle here.
    ///
    /// # Errors
    /// [`AscendError::OperatorLimit`] for other than 1, 3 or 4 axes, a table without a column for
    /// each pair, an element type other than f32, f16 and bf16, or positions from 65,536 on;
    /// [`AscendError::Rope`] of the table; otherwise those of the runtime.
    pub fn new(
        stream: &Stream,
        dtype: aclDataType,
        table: &mut CosSinTable<f32>,
        positions: &Positions,
        tokens: usize,
        direction: Direction,
    ) -> Result<Self> {
        /// The limit on positions of a table in device memory.
        const MOST_POSITIONS: u32 = 1 << 16;
        let (axes, highest) = (positions.axis_count(), positions.highest());
        let (columns, lanes) = {
            let map = table.lane_map();
            (map.frequency_count(), map.lanes().len())
        };
        limits! {
            MROPE;
            [1, 3, 4].contains(&axes) => ("positions on 1, 3 or 4 axes"), ("{axes}");
            positions.are_ids() => ("position ids"), ("real positions");
            highest < MOST_POSITIONS => ("positions below {MOST_POSITIONS}"), ("{highest}");
            columns == lanes =>
                ("a frequency for each pair"), ("{columns} frequencies for {lanes} angles");
            float_bytes(dtype, 0.0).is_some() => ("f32, f16 or bf16"), ("{dtype:?}");
        }
        table.grow_to(highest)?;
        let rows = highest as usize + 1;
        let sign = match direction {
            Direction::Forward => 1.0,
            Direction::Adjoint => -1.0,
        };
        let mut bytes = Vec::new();
        for row in (0..rows).filter_map(|position| table.row(position)) {
            for (column, value) in row.iter().enumerate() {
                let sign = if column < columns { 1.0 } else { sign };
                bytes.extend(float_bytes(dtype, sign * value).unwrap_or_default());
            }
        }
        let mut ids: Vec<i64> = Vec::with_capacity(axes * tokens);
        for axis in 0..axes {
            let axis_ids = positions.axis(axis)?.iter().cycle();
            ids.extend(axis_ids.take(tokens).map(|id| i64::from(*id)));
        }
        Ok(Self {
            table: stream.upload(&bytes)?,
            dtype,
            table_dims: Dense::new(&[rows, 2 * columns]),
            ids: stream.upload(&ids)?,
            ids_dims: if axes == 1 {
                Dense::new(&[tokens])
            } else {
                Dense::new(&[axes, tokens])
            },
            axes,
            tokens,
        })
    }
}

/// `value`, rounded to a floating-point type of the rotary operators.
fn float_bytes(dtype: aclDataType, value: f32) -> Option<Vec<u8>> {
    Some(match dtype {
        aclDataType::FLOAT => value.to_le_bytes().to_vec(),
        aclDataType::FLOAT16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
        aclDataType::BF16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
        _ => return None,
    })
}

/// One call of [`Operators::mrope`] on q and k, both `[tokens, heads * head_dim]`.
#[derive(Clone, Copy, Debug)]
pub struct MropeCall<'a> {
    /// Table and position ids.
    pub angles: &'a MropeAngles,
    /// The axis that each pair follows.
    pub axes: &'a AxisLayout,
    /// Half or adjacent.
    pub pairing: Pairing,
    /// Channels of a head.
    pub head_dim: usize,
    /// q, or its gradient.
    pub q: &'a DeviceMemory,
    /// k, or its gradient.
    pub k: &'a DeviceMemory,
    /// Rotated q.
    pub q_out: &'a DeviceMemory,
    /// Rotated k.
    pub k_out: &'a DeviceMemory,
}

/// Errors are [`AscendError::OperatorLimit`] for calls that the operator rejects or computes
/// wrongly, otherwise those of every operator.
impl Operators {
    /// Computes y = x·cos + rotate(x)·sin; cos and sin have the full width of a head.
    ///
    /// # Errors
    /// [`AscendError::OperatorLimit`], otherwise as for every operator.
    #[doc(alias = "aclnnRotaryPositionEmbedding")]
    pub fn rotary_mul(
        &self,
        x: View<'_>,
        [cos, sin]: [View<'_>; 2],
        pairing: Pairing,
        layout: Layout,
        out: View<'_>,
    ) -> Result<()> {
        let four = |tensor| FourAxes::new(ROTARY_MUL, layout, tensor);
        let (x, cos, sin, out) = (four(x)?, four(cos)?, four(sin)?, four(out)?);
        self.check_rotary_mul(ROTARY_MUL, &x, &cos, &sin, &out, pairing)?;
        let (x, cos, sin, out) = (x.view(), cos.view(), sin.view(), out.view());
        self.rotary_position_embedding(x, cos, sin, mode(pairing), out)
    }

    /// Computes the exact adjoint and, if requested, the gradients of cos and sin, summed over the
    /// broadcast axes.
    ///
    /// # Errors
    /// As [`Self::rotary_mul`].
    #[doc(alias = "aclnnRotaryPositionEmbeddingGrad")]
    pub fn rotary_mul_gradient(
        &self,
        dy: View<'_>,
        [cos, sin]: [View<'_>; 2],
        pairing: Pairing,
        layout: Layout,
        dx: View<'_>,
        wanted: Option<AngleGradients<'_>>,
    ) -> Result<()> {
        const MOST_ROWS: usize = 1024;
        let four = |tensor| FourAxes::new(ROTARY_MUL_GRAD, layout, tensor);
        let (dy, cos, sin, dx) = (four(dy)?, four(cos)?, four(sin)?, four(dx)?);
        self.check_rotary_mul(ROTARY_MUL_GRAD, &dy, &cos, &sin, &dx, pairing)?;
        let [batch, heads, seq] = dy.sizes();
        let [cos_batch, cos_heads, _] = cos.sizes();
        let per_batch = batch > 1 && cos_batch == batch && cos_heads == 1;
        let wanted = match wanted {
            None => None,
            Some(AngleGradients { x, cos, sin }) => Some([four(x)?, four(cos)?, four(sin)?]),
        };
        let alike = wanted.as_ref().is_none_or(|[x, dcos, dsin]| {
            x.is_like(&dy) && dcos.is_like(&cos) && dsin.is_like(&cos)
        });
        limits! {
            ROTARY_MUL_GRAD;
            // The operator infers layouts from sizes alone and mistakes such a B for S.
            !per_batch || layout == Layout::Sbnd || batch < seq =>
                ("B below S for angles of each batch"), ("B = {batch}, S = {seq}");
            wanted.is_none() || batch * heads <= MOST_ROWS =>
                ("B*N of at most {MOST_ROWS} with gradients of cos and sin"), ("{}", batch * heads);
            alike => ("x as dy, dcos and dsin as cos"), ("other dimensions or types");
        }
        let (dy, dx, mode) = (dy.view(), dx.view(), mode(pairing));
        let (cos, sin) = (cos.view(), sin.view());
        if let Some([x, dcos, dsin]) = &wanted {
            let (x, dcos, dsin) = (Some(x.view()), dcos.view(), dsin.view());
            return self.rotary_position_embedding_grad(dy, cos, sin, x, mode, dx, dcos, dsin);
        }
        // Without x, the operator writes neither dcos nor dsin, but it rejects null for them. The
        // scratch returns to this stream's pool, so that later work gets it after the operator.
        let dims = Dense::new(cos.dims);
        let bytes = cos.dims.iter().product::<usize>() * cos.dtype.bytes();
        let scratch: [DeviceBuffer<u8>; 2] =
            [self.stream().alloc(bytes)?, self.stream().alloc(bytes)?];
        let [dcos, dsin] = [0, 1].map(|i| dims.view(&scratch[i], cos.dtype));
        self.rotary_position_embedding_grad(dy, cos, sin, None, mode, dx, dcos, dsin)
    }

    /// True if the product and the installation have [`Self::rotary_mul_gradients`]: Ascend 950,
    /// from CANN's releases of 2026.
    ///
    /// # Errors
    /// Those of the runtime.
    pub fn has_rotary_mul_gradients(&self) -> Result<bool> {
        let device = self.stream().device();
        let rotary = &device.runtime().api().rotary;
        Ok(rotary.ApplyRotaryPosEmbGrad.is_complete()
            && device.machine()?.architecture == Architecture::Dav3510)
    }

    /// Computes the exact adjoints of q and k in one call, for pairs by halves.
    ///
    /// # Errors
    /// As [`Self::rotary_mul`].
    #[doc(alias = "aclnnApplyRotaryPosEmbGrad")]
    pub fn rotary_mul_gradients(
        &self,
        dy: [View<'_>; 2],
        [cos, sin]: [View<'_>; 2],
        layout: Layout,
        dx: [View<'_>; 2],
    ) -> Result<()> {
        const MOST_CHANNELS: usize = 1024;
        let four = |tensor| FourAxes::new(BOTH_GRADIENTS, layout, tensor);
        let (cos, sin) = (four(cos)?, four(sin)?);
        let number = match layout {
            Layout::Bsnd | Layout::Tnd => Some(1),
            Layout::Sbnd => Some(2),
            Layout::Bnsd => None,
        };
        let [dq, dk] = dy;
        let [dq, dk] = [four(dq)?, four(dk)?];
        let [dq_out, dk_out] = dx;
        let [dq_out, dk_out] = [four(dq_out)?, four(dk_out)?];
        for (dy, dx) in [(&dq, &dq_out), (&dk, &dk_out)] {
            let [batch, _, seq] = dy.sizes();
            let (dim, dtype, [cos_batch, cos_heads, cos_seq]) =
                (dy.width(), dy.tensor.dtype, cos.sizes());
            let (cos_dims, sin_dims) = (cos.dims, sin.dims);
            limits! {
                BOTH_GRADIENTS;
                number.is_some() => ("BSND, SBND or TND"), ("{layout:?}");
                cos_dims == sin_dims =>
                    ("cos and sin of equal dimensions"), ("{cos_dims:?} and {sin_dims:?}");
                [&cos, &sin, &dq].iter().all(|other| other.tensor.dtype == dtype) =>
                    ("one type for all tensors"), ("another");
                dim > 0 && dim <= MOST_CHANNELS && dim.is_multiple_of(2) =>
                    ("D even and at most {MOST_CHANNELS}"), ("{dim}");
                cos.width() == dim => ("cos and sin of the full width {dim}"), ("{}", cos.width());
                cos_seq == seq && cos_heads == 1 && [1, batch].contains(&cos_batch) =>
                    ("angles of all {seq} tokens, of one head, and of 1 or {batch} batches"),
                    ("{cos_dims:?}");
                batch == dq.sizes()[0] => ("q and k of equal batches"), ("{batch}");
                dy.dims.iter().all(|axis| *axis > 0) => ("no empty tensor"), ("{:?}", dy.dims);
                dx.is_like(dy) => ("gradients like those given"), ("{:?}", dx.dims);
            }
        }
        // As for one tensor: not written without q and k.
        let dims = Dense::new(&cos.dims);
        let bytes = cos.dims.iter().product::<usize>() * cos.tensor.dtype.bytes();
        let scratch: [DeviceBuffer<u8>; 2] =
            [self.stream().alloc(bytes)?, self.stream().alloc(bytes)?];
        let [dcos, dsin] = [0, 1].map(|i| dims.view(&scratch[i], cos.tensor.dtype));
        let (dq, dk, cos, sin) = (dq.view(), dk.view(), cos.view(), sin.view());
        let (dq_out, dk_out) = (dq_out.view(), dk_out.view());
        let layout = number.unwrap_or_default();
        self.apply_rotary_pos_emb_grad(
            dq, dk, cos, sin, None, None, c"half", layout, dq_out, dk_out, dcos, dsin,
        )
    }

    /// The documented limits of forward and gradient.
    fn check_rotary_mul(
        &self,
        operator: &'static str,
        x: &FourAxes<'_>,
        cos: &FourAxes<'_>,
        sin: &FourAxes<'_>,
        out: &FourAxes<'_>,
        pairing: Pairing,
    ) -> Result<()> {
        const MOST_CHANNELS: usize = 896;
        const MOST: usize = 1000;
        let machine = self.stream().device().machine()?;
        let [batch, heads, seq] = x.sizes();
        let [cos_batch, cos_heads, cos_seq] = cos.sizes();
        let (dim, dtype, rows) = (x.width(), x.tensor.dtype, batch * heads);
        let step = if pairing == Pairing::Quarter { 4 } else { 2 };
        let everywhere = matches!(pairing, Pairing::Half | Pairing::Adjacent);
        let shared = cos_batch == 1 && cos_heads == 1;
        let per_batch = cos_batch == batch && (cos_heads == 1 || cos_heads == heads);
        let adjacent = pairing == Pairing::Adjacent;
        let bnsd = pairing == Pairing::Half && x.layout == Layout::Bnsd;
        let aligned = (dim / 2).is_multiple_of(32 / dtype.bytes());
        let share = seq.div_ceil(machine.vector_cores as usize);
        let (cos_dims, sin_dims) = (cos.dims, sin.dims);
        limits! {
            operator;
            cos_dims == sin_dims =>
                ("cos and sin of equal dimensions"), ("{cos_dims:?} and {sin_dims:?}");
            dtype == cos.tensor.dtype && dtype == sin.tensor.dtype =>
                ("cos and sin in the type of x"), ("another type");
            dim < MOST_CHANNELS && dim.is_multiple_of(step) =>
                ("D below {MOST_CHANNELS} and a multiple of {step}"), ("{dim}");
            cos.width() == dim => ("cos and sin of the full width {dim}"), ("{}", cos.width());
            everywhere || machine.architecture == Architecture::Dav3510 =>
                ("modes quarter and interleave-half on Ascend 950 only"),
                ("{}", machine.architecture.name());
            cos_seq == seq => ("angles for all {seq} tokens"), ("{cos_seq}");
            !adjacent || shared =>
                ("interleaved pairs with angles shared over batch and heads"), ("{cos_dims:?}");
            !adjacent || rows < MOST => ("B*N below {MOST} for interleaved pairs"), ("{rows}");
            adjacent || shared || per_batch =>
                ("angles of 1 or B batches, and of 1 head or all of every batch"), ("{cos_dims:?}");
            adjacent || (batch < MOST && heads < MOST) =>
                ("B and N below {MOST}"), ("{batch} and {heads}");
            !(bnsd && aligned) || rows <= 8 * seq =>
                ("B*N of at most 8*S = {} in BNSD", 8 * seq), ("{rows}");
            !bnsd || aligned || dim >= 80 || 2 * rows <= share =>
                ("2*B*N of at most S/cores = {share} for this D in BNSD"), ("{}", 2 * rows);
            out.is_like(x) =>
                ("an output of {:?} in x's type", x.dims),
                ("{:?} in {:?}", out.dims, out.tensor.dtype);
        }
        Ok(())
    }

    /// Rotates q and k with `npu_mrope`, in its second version if the installation has it.
    ///
    /// # Errors
    /// As [`Self::rotary_mul`].
    #[doc(alias = "npu_mrope")]
    #[doc(alias = "aclnnRopeWithSinCosCache")]
    #[doc(alias = "aclnnRopeWithSinCosCacheV2")]
    pub fn mrope(&self, call: &MropeCall<'_>) -> Result<()> {
        let rotary = &self.stream().device().runtime().api().rotary;
        let second = rotary.RopeWithSinCosCacheV2.is_complete();
        let (sections, striped) = self.check_mrope(call, second)?;
        let angles = call.angles;
        let (tokens, dtype) = (angles.tokens, angles.dtype);
        let flat = |x: &DeviceMemory| Dense::new(&[tokens, x.bytes() / dtype.bytes() / tokens]);
        let (q_dims, k_dims) = (flat(call.q), flat(call.k));
        let positions = angles.ids_dims.view(&angles.ids, aclDataType::INT64);
        let (q, k) = (q_dims.view(call.q, dtype), k_dims.view(call.k, dtype));
        let (q_out, k_out) = (
            q_dims.view(call.q_out, dtype),
            k_dims.view(call.k_out, dtype),
        );
        let cache = angles.table_dims.view(&angles.table, dtype);
        let head_size = call.head_dim as i64;
        let neox = call.pairing == Pairing::Half;
        // Zeros stand for no sections.
        let sections = if sections.is_empty() {
            &[0, 0, 0]
        } else {
            &sections[..]
        };
        if second {
            let mode = i64::from(striped);
            self.rope_with_sin_cos_cache_v2(
                positions, q, k, cache, sections, head_size, neox, mode, q_out, k_out,
            )
        } else {
            self.rope_with_sin_cos_cache(
                positions, q, k, cache, sections, head_size, neox, q_out, k_out,
            )
        }
    }

    /// The sections, and true if they alternate.
    fn check_mrope(&self, call: &MropeCall<'_>, second: bool) -> Result<(Vec<i64>, bool)> {
        /// The number of heads from which the operator's tiling divides by zero.
        const TOO_MANY_HEADS: usize = 43;
        const SECTIONS_V1: &[&[i64]] = &[&[16, 24, 24]];
        const SECTIONS_V2: &[&[i64]] = &[
            &[16, 24, 24],
            &[24, 20, 20],
            &[8, 12, 12],
            &[16, 16, 16, 16],
        ];
        let angles = call.angles;
        let (axes, tokens, width) = (angles.axes, angles.tokens, angles.table_dims.dims[1]);
        let (sections, known): (&[usize], bool) = match call.axes {
            AxisLayout::Single => (&[], true),
            AxisLayout::Contiguous(sections) | AxisLayout::Striped(sections) => (sections, true),
            _ => (&[], false),
        };
        let striped = matches!(call.axes, AxisLayout::Striped(_));
        let sections: Vec<i64> = sections.iter().map(|section| *section as i64).collect();
        let accepted = if second { SECTIONS_V2 } else { SECTIONS_V1 };
        let single = sections.is_empty();
        let step = 64 / angles.dtype.bytes();
        let head_bytes = call.head_dim * angles.dtype.bytes();
        let heads = [call.q, call.k].map(|x| x.bytes() / (tokens * head_bytes).max(1));
        let whole = |x: &DeviceMemory, out: &DeviceMemory, heads: usize| {
            heads > 0 && x.bytes() == heads * tokens * head_bytes && out.bytes() == x.bytes()
        };
        let shape = call.head_dim;
        limits! {
            MROPE;
            known => ("contiguous or striped sections"), ("{:?}", call.axes);
            matches!(call.pairing, Pairing::Half | Pairing::Adjacent) =>
                ("pairs by halves or adjacent"), ("{:?}", call.pairing);
            shape > 0 && width <= shape && [shape, width].iter().all(|n| n.is_multiple_of(step)) =>
                ("head_dim and rotary_dim in multiples of {step}, the second at most the first"),
                ("{shape} and {width}");
            whole(call.q, call.q_out, heads[0]) && whole(call.k, call.k_out, heads[1]) =>
                ("q, k and their outputs of whole heads for {tokens} tokens"),
                ("{} and {} bytes", call.q.bytes(), call.k.bytes());
            heads.iter().all(|heads| *heads < TOO_MANY_HEADS) =>
                ("fewer than {TOO_MANY_HEADS} heads"), ("{heads:?}");
            !single || axes == 1 => ("sections with positions on several axes"), ("none");
            single || accepted.contains(&&sections[..]) =>
                ("sections {accepted:?}"), ("{sections:?}");
            single
                || (2 * sections.iter().sum::<i64>() == width as i64 && sections.len() == axes) =>
                ("one section for each axis, rotary_dim / 2 in sum"),
                ("{sections:?} for {axes} axes and rotary_dim {width}");
            !striped || (second && sections.len() == 3) =>
                ("striped sections in its second version, three of them"), ("{sections:?}");
        }
        Ok((sections, striped))
    }
}

/// The operators' number of a pairing.
fn mode(pairing: Pairing) -> i64 {
    match pairing {
        Pairing::Half => 0,
        Pairing::Adjacent => 1,
        Pairing::Quarter => 2,
        Pairing::InterleaveHalf => 3,
    }
}

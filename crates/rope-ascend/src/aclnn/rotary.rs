//! `RotaryPositionEmbedding` and its gradient.

use super::call::{both, run_operator};
use super::operators::bytes_of;
use super::tensor::{Descriptor, Output, Tensor};
use crate::error::{AscendError, Result};
use crate::rope::Architecture;
use crate::safe::DeviceBuffer;

/// Which channels the operator pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Channel j with j + D/2.
    Half,
    /// Channel 2j with 2j + 1.
    Interleave,
    /// Half pairing within each half. Ascend 950.
    Quarter,
    /// Neighbours in, halves out. Ascend 950.
    InterleaveHalf,
}

impl Mode {
    fn number(self) -> i64 {
        match self {
            Self::Half => 0,
            Self::Interleave => 1,
            Self::Quarter => 2,
            Self::InterleaveHalf => 3,
        }
    }
}

/// Order of x's dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OperatorLayout {
    /// batch, heads, seq, head_dim.
    Bnsd,
    /// batch, seq, heads, head_dim.
    Bsnd,
    /// seq, batch, heads, head_dim.
    Sbnd,
    /// tokens, heads, head_dim. The operators are told of BSND with a batch of one.
    Tnd,
}

impl OperatorLayout {
    /// Axes of batch, heads and tokens of a tensor with four axes.
    fn axes(self) -> (usize, usize, usize) {
        match self {
            Self::Bnsd => (0, 1, 2),
            Self::Bsnd | Self::Tnd => (0, 2, 1),
            Self::Sbnd => (1, 2, 0),
        }
    }

    pub(super) fn heads_axis(self) -> usize {
        self.axes().1
    }

    /// The tensor as every release of the operators takes it. Three axes came late, and not to every product; TND is the
    /// same memory as BSND with a batch of one.
    pub(super) fn four_axes<'a>(
        self,
        operator: &'static str,
        tensor: &Tensor<'a>,
    ) -> Result<Tensor<'a>> {
        let rank = if self == Self::Tnd { 3 } else { 4 };
        if tensor.dims.len() != rank {
            return Err(limit(
                operator,
                format!("{rank} dimensions in this layout"),
                format!("{:?}", tensor.dims),
            ));
        }
        Ok(if self == Self::Tnd {
            tensor.batch_of_one()
        } else {
            tensor.clone()
        })
    }
}

const FORWARD: &str = "aclnnRotaryPositionEmbedding";
const BACKWARD: &str = "aclnnRotaryPositionEmbeddingGrad";

fn limit(
    operator: &'static str,
    limit: impl Into<String>,
    found: impl std::fmt::Display,
) -> AscendError {
    AscendError::OperatorLimit {
        operator,
        limit: limit.into(),
        found: found.to_string(),
    }
}

/// The documented limits of forward and gradient.
fn check(
    operator: &'static str,
    x: &Tensor<'_>,
    cos: &Tensor<'_>,
    sin: &Tensor<'_>,
    mode: Mode,
    layout: OperatorLayout,
) -> Result<()> {
    const LARGEST_DIM: i64 = 896;
    const LARGEST_AXIS: i64 = 1000;
    if cos.dims != sin.dims {
        return Err(limit(
            operator,
            "cos and sin of equal dimensions",
            format!("{:?} and {:?}", cos.dims, sin.dims),
        ));
    }
    if x.dtype != cos.dtype || x.dtype != sin.dtype {
        return Err(limit(
            operator,
            "cos and sin in the type of x",
            "another type",
        ));
    }
    let dim = x.last_dim();
    let even = if mode == Mode::Quarter { 4 } else { 2 };
    if dim >= LARGEST_DIM || dim % even != 0 {
        return Err(limit(
            operator,
            format!("D below {LARGEST_DIM} and a multiple of {even}"),
            dim,
        ));
    }
    if cos.last_dim() != dim {
        return Err(limit(
            operator,
            format!("cos and sin of the full width {dim}"),
            cos.last_dim(),
        ));
    }
    let machine = x.stream.device().machine()?;
    if matches!(mode, Mode::Quarter | Mode::InterleaveHalf)
        && machine.architecture != Architecture::Dav3510
    {
        return Err(limit(
            operator,
            "modes quarter and interleave-half on Ascend 950 only",
            machine.architecture.name(),
        ));
    }
    let (batch_axis, heads_axis, seq_axis) = layout.axes();
    let (batch, heads, seq) = (x.dim(batch_axis), x.dim(heads_axis), x.dim(seq_axis));
    let (cos_batch, cos_heads) = (cos.dim(batch_axis), cos.dim(heads_axis));
    if cos.dim(seq_axis) != seq {
        return Err(limit(
            operator,
            format!("angles for all {seq} tokens"),
            cos.dim(seq_axis),
        ));
    }
    let shared = cos_batch == 1 && cos_heads == 1;
    if mode == Mode::Interleave {
        if !shared {
            return Err(limit(
                operator,
                "interleaved pairs with angles shared over batch and heads",
                format!("{:?}", cos.dims),
            ));
        }
        if batch * heads >= LARGEST_AXIS {
            return Err(limit(
                operator,
                format!("B*N below {LARGEST_AXIS} for interleaved pairs"),
                batch * heads,
            ));
        }
        return Ok(());
    }
    let per_batch = cos_batch == batch && (cos_heads == 1 || cos_heads == heads);
    if !shared && !per_batch {
        return Err(limit(
            operator,
            "angles of 1 or B batches, and of 1 head or all of every batch",
            format!("{:?}", cos.dims),
        ));
    }
    if batch >= LARGEST_AXIS || heads >= LARGEST_AXIS {
        return Err(limit(
            operator,
            format!("B and N below {LARGEST_AXIS}"),
            format!("{batch} and {heads}"),
        ));
    }
    if mode == Mode::Half && layout == OperatorLayout::Bnsd {
        let in_block = 32
            / if x.dtype == crate::sys::aclDataType::FLOAT {
                4
            } else {
                2
            };
        let aligned = dim / 2 % in_block == 0;
        let cores = i64::from(machine.vector_cores);
        let rows = seq.div_euclid(cores) + i64::from(seq % cores != 0);
        if aligned && batch * heads > 8 * seq {
            return Err(limit(
                operator,
                format!("B*N of at most 8*S = {} in BNSD", 8 * seq),
                batch * heads,
            ));
        }
        if !aligned && dim < 80 && 2 * batch * heads > rows {
            return Err(limit(
                operator,
                format!("2*B*N of at most S/cores = {rows} for this D in BNSD"),
                2 * batch * heads,
            ));
        }
    }
    Ok(())
}

/// y = x·cos + rotate(x)·sin; cos and sin have the full width of a head.
///
/// # Errors
/// [`AscendError::OperatorLimit`] for what the operator does not take, else the runtime's.
#[doc(alias = "aclnnRotaryPositionEmbedding")]
pub fn rotary_position_embedding(
    x: &Tensor<'_>,
    cos: &Tensor<'_>,
    sin: &Tensor<'_>,
    mode: Mode,
    layout: OperatorLayout,
    out: &mut Output<'_>,
) -> Result<()> {
    let four_axes = |tensor| layout.four_axes(FORWARD, tensor);
    let (x, cos, sin) = (&four_axes(x)?, &four_axes(cos)?, &four_axes(sin)?);
    let out = &four_axes(&out.0)?;
    check(FORWARD, x, cos, sin, mode, layout)?;
    if out.dims != x.dims || out.dtype != x.dtype {
        return Err(limit(
            FORWARD,
            format!("an output of {:?}", x.dims),
            format!("{:?}", out.dims),
        ));
    }
    let stream = x.stream;
    let ops = &stream.device().runtime().api().ops;
    let (plan, run) = both(
        stream,
        ops.aclnnRotaryPositionEmbeddingGetWorkspaceSize,
        "aclnnRotaryPositionEmbeddingGetWorkspaceSize",
        ops.aclnnRotaryPositionEmbedding,
        FORWARD,
    )?;
    let [x, cos, sin, out] = [
        Descriptor::new(stream, x)?,
        Descriptor::new(stream, cos)?,
        Descriptor::new(stream, sin)?,
        Descriptor::new(stream, out)?,
    ];
    // SAFETY: live descriptors until the end of this function; both phases of one operator.
    unsafe {
        run_operator(
            stream,
            "aclnnRotaryPositionEmbeddingGetWorkspaceSize",
            |bytes, executor| {
                plan(
                    x.raw,
                    cos.raw,
                    sin.raw,
                    mode.number(),
                    out.raw,
                    bytes,
                    executor,
                )
            },
            FORWARD,
            run,
        )
    }
}

/// What the gradient writes.
#[derive(Debug)]
pub struct GradOutputs<'a> {
    /// Gradient of x.
    pub dx: Output<'a>,
    /// x, and the gradients of cos and sin, if they are wanted.
    pub angles: Option<(Tensor<'a>, Output<'a>, Output<'a>)>,
}

/// The true adjoint, and the gradients of cos and sin summed over the broadcast axes if wanted.
///
/// # Errors
/// As [`rotary_position_embedding`].
#[doc(alias = "aclnnRotaryPositionEmbeddingGrad")]
pub fn rotary_position_embedding_grad(
    dy: &Tensor<'_>,
    cos: &Tensor<'_>,
    sin: &Tensor<'_>,
    mode: Mode,
    layout: OperatorLayout,
    out: &mut GradOutputs<'_>,
) -> Result<()> {
    const LARGEST_ROWS: i64 = 1024;
    let four_axes = |tensor| layout.four_axes(BACKWARD, tensor);
    let (dy, cos, sin) = (&four_axes(dy)?, &four_axes(cos)?, &four_axes(sin)?);
    let dx = &four_axes(&out.dx.0)?;
    check(BACKWARD, dy, cos, sin, mode, layout)?;
    if dx.dims != dy.dims {
        return Err(limit(
            BACKWARD,
            format!("dx of {:?}", dy.dims),
            format!("{:?}", dx.dims),
        ));
    }
    let (batch_axis, heads_axis, seq_axis) = layout.axes();
    let (batch, seq) = (dy.dim(batch_axis), dy.dim(seq_axis));
    let per_batch = batch > 1 && cos.dim(batch_axis) == batch && cos.dim(heads_axis) == 1;
    // The operator tells the layouts apart by their sizes alone, and takes such a B for S.
    if per_batch && layout != OperatorLayout::Sbnd && batch >= seq {
        return Err(limit(
            BACKWARD,
            "B below S for angles of each batch",
            format!("B = {batch}, S = {seq}"),
        ));
    }
    if let Some((x, dcos, dsin)) = &out.angles {
        let rows = batch * dy.dim(heads_axis);
        if rows > LARGEST_ROWS {
            return Err(limit(
                BACKWARD,
                format!("B*N of at most {LARGEST_ROWS} with gradients of cos and sin"),
                rows,
            ));
        }
        let as_expected = four_axes(x)?.dims == dy.dims
            && four_axes(&dcos.0)?.dims == cos.dims
            && four_axes(&dsin.0)?.dims == cos.dims;
        if !as_expected {
            return Err(limit(
                BACKWARD,
                "x as dy, dcos and dsin as cos",
                "other dimensions",
            ));
        }
    }
    let stream = dy.stream;
    let ops = &stream.device().runtime().api().ops;
    let (plan, run) = both(
        stream,
        ops.aclnnRotaryPositionEmbeddingGradGetWorkspaceSize,
        "aclnnRotaryPositionEmbeddingGradGetWorkspaceSize",
        ops.aclnnRotaryPositionEmbeddingGrad,
        BACKWARD,
    )?;
    // Without x the operator writes neither dcos nor dsin, but it refuses null for them.
    let bytes = match &out.angles {
        Some(_) => 0,
        None => cos.elements() * bytes_of(cos.dtype),
    };
    let scratch: [DeviceBuffer<u8>; 2] = [stream.alloc(bytes)?, stream.alloc(bytes)?];
    let (x, dcos, dsin) = match &out.angles {
        Some((x, dcos, dsin)) => (
            Some(Descriptor::new(stream, &four_axes(x)?)?),
            four_axes(&dcos.0)?,
            four_axes(&dsin.0)?,
        ),
        None => (None, cos.like(&scratch[0]), cos.like(&scratch[1])),
    };
    let [dy, cos, sin, dx, dcos, dsin] = [
        Descriptor::new(stream, dy)?,
        Descriptor::new(stream, cos)?,
        Descriptor::new(stream, sin)?,
        Descriptor::new(stream, dx)?,
        Descriptor::new(stream, &dcos)?,
        Descriptor::new(stream, &dsin)?,
    ];
    let x = x.as_ref().map_or(std::ptr::null_mut(), |x| x.raw);
    // SAFETY: live descriptors, or null for the x that is optional, until the end of this function; both phases of one
    // operator. Dropped there, the scratch returns to this stream's cache, so that later work gets it only behind the operator.
    unsafe {
        run_operator(
            stream,
            "aclnnRotaryPositionEmbeddingGradGetWorkspaceSize",
            |bytes, executor| {
                plan(
                    dy.raw,
                    cos.raw,
                    sin.raw,
                    x,
                    mode.number(),
                    dx.raw,
                    dcos.raw,
                    dsin.raw,
                    bytes,
                    executor,
                )
            },
            BACKWARD,
            run,
        )
    }
}

//! Attention by the vendor's flash attention, and by blocks of ordinary operations beyond its
//! limits.
//!
//! A causal mask or a window costs a triangle of 4 MiB per device, which represents one of any
//! size; packed sequences cost their lengths. Other masks are a byte per query and key. Both are
//! kept from layer to layer.
//!
//! The node keeps two numbers per row of scores instead of the operator's sixteen, which are eight
//! copies of the largest score and eight of the sum.

use std::collections::VecDeque;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{DType, FloatDType, Shape, TensorData, TensorMetadata};
use burn_attention::{
    AttentionGradients, AttentionMask, AttentionOp, AttentionOps, Bias, Kept, Pattern, Window,
    composed::attention as blocks,
};
use burn_fused::like;
use rope_ascend::aclnn::View;
use rope_ascend::safe::DeviceBuffer;
use rope_ascend::sys::aclDataType;

use super::{Outputs, Refusal};
use crate::Ascend;
use crate::context::Context;
use crate::ops::{launch, views};
use crate::tensor::{AscendTensor, dense_strides};

/// Columns of the operator's statistics of a row, all equal.
const STATISTICS: usize = 8;
/// Rows and columns of the triangle that represents a mask of any size.
const TRIANGLE: usize = 2048;
/// The largest explicit mask, in bytes.
const MASK_BYTES: usize = 64 << 20;
/// Number of explicit masks kept.
const MASKS: usize = 2;
const MAX_HEADS: usize = 256;
/// The limit of the gradient of packed sequences; for sequences of one length it is 768.
const MAX_HEAD_DIM: usize = 512;
const MAX_SEQUENCES: usize = 2048;
/// The number of tokens that means no limit.
const FAR: i64 = i32::MAX as i64;

/// Counts of attention calls by implementation, forward and backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttentionRuns {
    /// Calls of the vendor's flash attention.
    pub fused: u64,
    /// Calls computed by blocks of ordinary operations on the device.
    pub blocks: u64,
}

static FUSED: AtomicU64 = AtomicU64::new(0);
static BLOCKS: AtomicU64 = AtomicU64::new(0);

/// Returns the attention calls on all devices of this process since the start or the last
/// [`reset_attention_runs`].
pub fn attention_runs() -> AttentionRuns {
    AttentionRuns {
        fused: FUSED.load(Ordering::Relaxed),
        blocks: BLOCKS.load(Ordering::Relaxed),
    }
}

/// Resets the counts of [`attention_runs`].
pub fn reset_attention_runs() {
    FUSED.store(0, Ordering::Relaxed);
    BLOCKS.store(0, Ordering::Relaxed);
}

/// A device's masks.
#[derive(Debug, Default)]
struct Masks {
    triangle: Mutex<Option<Arc<DeviceBuffer<u8>>>>,
    own: Mutex<VecDeque<(AttentionMask, Arc<DeviceBuffer<u8>>)>>,
}

impl Masks {
    /// 1 above the diagonal: hidden.
    fn triangle(&self, context: &Context) -> Result<Arc<DeviceBuffer<u8>>, Refusal> {
        let mut triangle = self.triangle.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(triangle) = &*triangle {
            return Ok(triangle.clone());
        }
        let flags = (0..TRIANGLE * TRIANGLE).map(|i| u8::from(i % TRIANGLE > i / TRIANGLE));
        let flags: Vec<u8> = flags.collect();
        let made = upload(context, &flags)?;
        Ok(triangle.insert(made).clone())
    }

    /// `[samples, 1, queries, keys]`: 1 where hidden. The operator documents no rule for rows
    /// without visible keys, so such a row sees all keys and its output is set to 0 afterwards.
    fn own(
        &self,
        context: &Context,
        mask: &AttentionMask,
        samples: usize,
    ) -> Result<Arc<DeviceBuffer<u8>>, Refusal> {
        let mut own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, flags)) = own.iter().find(|(known, _)| known == mask) {
            return Ok(flags.clone());
        }
        let mut flags = Vec::with_capacity(samples * mask.queries() * mask.keys());
        for (sample, query) in rows(mask, samples) {
            let first = flags.len();
            flags.extend((0..mask.keys()).map(|key| u8::from(!mask.sees(sample, query, key))));
            if !flags[first..].contains(&0) {
                flags[first..].fill(0);
            }
        }
        let made = upload(context, &flags)?;
        if own.len() == MASKS {
            own.pop_front();
        }
        own.push_back((mask.clone(), made.clone()));
        Ok(made)
    }
}

fn upload(context: &Context, flags: &[u8]) -> Result<Arc<DeviceBuffer<u8>>, Refusal> {
    let uploaded = context.stream().upload_queued(flags);
    uploaded.map(Arc::new).map_err(Refusal::operator)
}

/// Every query of every sample.
fn rows(mask: &AttentionMask, samples: usize) -> impl Iterator<Item = (usize, usize)> {
    let queries = mask.queries();
    (0..samples).flat_map(move |sample| (0..queries).map(move |query| (sample, query)))
}

/// The order of a tensor's axes, as the operators name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Bnsd,
    Bsnd,
    Tnd,
}

impl Layout {
    fn name(self) -> &'static CStr {
        match self {
            Self::Bnsd => c"BNSD",
            Self::Bsnd => c"BSND",
            Self::Tnd => c"TND",
        }
    }

    /// Converts a tensor of `[batch, heads, tokens, channels]` to the operators' layout.
    fn apply(self, x: &AscendTensor) -> AscendTensor {
        let swapped = || views::swap(x, 1, 2);
        match self {
            Self::Bnsd => x.clone(),
            Self::Bsnd => swapped(),
            Self::Tnd => {
                let [batch, heads, tokens, channels] = x.shape().dims();
                views::reshape(swapped(), &Shape::from([batch * tokens, heads, channels]))
            }
        }
    }

    /// Allocates a tensor of those dimensions in the operators' layout.
    fn empty(self, context: &Arc<Context>, dims: [usize; 4], dtype: DType) -> AscendTensor {
        let [batch, heads, tokens, channels] = dims;
        let shape = match self {
            Self::Bnsd => Shape::from(dims),
            Self::Bsnd => Shape::from([batch, tokens, heads, channels]),
            Self::Tnd => Shape::from([batch * tokens, heads, channels]),
        };
        AscendTensor::empty_in(context, shape, dtype)
    }

    /// The inverse of [`apply`](Self::apply).
    fn restore(
        self,
        x: AscendTensor,
        [batch, heads, tokens, channels]: [usize; 4],
    ) -> AscendTensor {
        match self {
            Self::Bnsd => x,
            Self::Bsnd => views::swap(&x, 1, 2),
            Self::Tnd => {
                let shape = Shape::from([batch, tokens, heads, channels]);
                views::swap(&views::reshape(x, &shape), 1, 2)
            }
        }
    }

    /// The layout of the statistics, which are never BSND.
    fn statistics_layout(self) -> Self {
        match self {
            Self::Bsnd => Self::Bnsd,
            other => other,
        }
    }
}

/// The arguments of an attention's operators besides its tensors.
struct Plan {
    context: Arc<Context>,
    layout: Layout,
    sparse: i64,
    /// preTokens, nextTokens.
    tokens: [i64; 2],
    mask: Option<(Arc<DeviceBuffer<u8>>, Vec<usize>)>,
    /// Running totals of the lengths of packed sequences.
    ends: Option<Vec<i64>>,
    /// 0 for each row without visible keys, `[samples, 1, queries, 1]`, if there are any.
    seen: Option<AscendTensor>,
    scale: f64,
    heads: i64,
}

impl Plan {
    fn new([q, k, v]: [&AscendTensor; 3], biased: bool, op: &AttentionOp) -> Result<Self, Refusal> {
        let [batch, heads, queries, head_dim] = q.shape().dims();
        let (keys, value_dim) = (k.dims()[2], v.dims()[3]);
        let within = heads <= MAX_HEADS
            && head_dim <= MAX_HEAD_DIM
            && value_dim <= head_dim
            && matches!(q.dtype(), DType::F32 | DType::F16 | DType::BF16);
        if biased || op.blocks.is_some() || !within {
            return Err(Refusal::Limit);
        }
        let context = q.context()?.clone();
        let swapped = [q, k, v]
            .iter()
            .all(|x| views::swap(x, 1, 2).is_contiguous());
        let mut plan = Self {
            layout: if swapped { Layout::Bsnd } else { Layout::Bnsd },
            sparse: 0,
            tokens: [FAR; 2],
            mask: None,
            ends: None,
            seen: None,
            scale: op.scale,
            heads: heads as i64,
            context,
        };
        let mask = &op.mask;
        let pattern = match mask.padding() {
            None => mask.pattern(),
            Some(_) => Pattern::Other,
        };
        match pattern {
            Pattern::All => {}
            Pattern::Band(Window { before, after }) => {
                plan.use_triangle()?;
                let causal = after == 0 && before >= keys;
                plan.sparse = if causal { 3 } else { 4 };
                let token = |tokens| i64::try_from(tokens).map_or(FAR, |tokens| tokens.min(FAR));
                plan.tokens = [before, after].map(token);
            }
            Pattern::Packed { ends, causal } if ends.len() * batch <= MAX_SEQUENCES => {
                let ends = (0..batch).flat_map(|sample| {
                    let first = sample * queries;
                    ends.iter().map(move |end| (first + end) as i64)
                });
                plan.ends = Some(ends.collect());
                plan.layout = Layout::Tnd;
                if causal {
                    plan.use_triangle()?;
                    plan.sparse = 3;
                }
            }
            Pattern::Packed { .. } | Pattern::Other => plan.use_own(mask, batch)?,
        }
        Ok(plan)
    }

    fn use_triangle(&mut self) -> Result<(), Refusal> {
        let triangle = self.context.cache::<Masks>().triangle(&self.context)?;
        self.mask = Some((triangle, vec![TRIANGLE; 2]));
        Ok(())
    }

    fn use_own(&mut self, mask: &AttentionMask, batch: usize) -> Result<(), Refusal> {
        let samples = if mask.padding().is_some() { batch } else { 1 };
        let (queries, keys) = (mask.queries(), mask.keys());
        if samples * queries * keys > MASK_BYTES {
            return Err(Refusal::Limit);
        }
        let flags = self
            .context
            .cache::<Masks>()
            .own(&self.context, mask, samples)?;
        self.mask = Some((flags, vec![samples, 1, queries, keys]));
        self.sparse = 1;
        let sees = |(sample, query)| (0..keys).any(|key| mask.sees(sample, query, key));
        let seen: Vec<f32> = rows(mask, samples)
            .map(|row| f32::from(u8::from(sees(row))))
            .collect();
        if seen.contains(&0.0) {
            let data = TensorData::new(seen, [samples, 1, queries, 1]);
            self.seen = Some(AscendTensor::upload(&self.context.device(), data));
        }
        Ok(())
    }

    /// Sets the rows without visible keys to 0.
    fn hide(&self, x: AscendTensor) -> AscendTensor {
        let Some(seen) = &self.seen else { return x };
        let seen = Ascend::float_cast(seen.clone(), FloatDType::from(x.dtype()));
        Ascend::float_mul(x, seen)
    }

    fn forward(&self, [q, k, v]: [&AscendTensor; 3]) -> Result<[AscendTensor; 2], Refusal> {
        let [batch, heads, queries, _] = q.shape().dims();
        let out_shape = [batch, heads, queries, v.dims()[3]];
        let rows_shape = [batch, heads, queries, STATISTICS];
        let layout = self.layout;
        let out = layout.empty(&self.context, out_shape, q.dtype());
        // One memory for both, so that a view has a number of each.
        let both_shape = [2 * batch, heads, queries, STATISTICS];
        let both = layout.statistics_layout();
        let both = both.empty(&self.context, both_shape, DType::F32);
        let half = both.len() / 2;
        let [max, sum] = [0, half].map(|start| {
            let mut dims = both.dims().to_vec();
            dims[0] /= 2;
            both.view(Shape::from(dims), both.strides().to_vec(), start)
        });
        let inputs = [q, k, v].map(|x| layout.apply(x));
        let strides = self.mask_strides();
        let call = self.call(&inputs, &strides)?;
        let [max_view, sum_view, out_view] = views([&max, &sum, &out])?;
        call.forward([max_view, sum_view, out_view])?;
        let max = layout.statistics_layout().restore(max, rows_shape);
        let mut strides = max.strides().to_vec();
        strides[3] = half;
        let softmax = max.view(Shape::from([batch, heads, queries, 2]), strides, 0);
        Ok([self.hide(layout.restore(out, out_shape)), softmax])
    }

    fn backward(
        &self,
        [q, k, v, out, softmax, gradient]: [&AscendTensor; 6],
    ) -> Result<[AscendTensor; 3], Refusal> {
        let layout = self.layout;
        let gradient = self.hide(gradient.clone());
        let statistics = |index| {
            let own = column(softmax, index, STATISTICS, 1);
            let own = layout.statistics_layout().apply(&own);
            if softmax.strides()[3] == own.len() && own.is_contiguous() {
                return own;
            }
            let repeated = column(softmax, index, STATISTICS, 0);
            layout.statistics_layout().apply(&repeated).contiguous()
        };
        let (max, sum) = (statistics(0), statistics(1));
        let gradients = [q, k, v].map(|x| layout.empty(&self.context, x.shape().dims(), x.dtype()));
        let [inputs @ .., dy, out] = [q, k, v, &gradient, out].map(|x| layout.apply(x));
        let strides = self.mask_strides();
        let call = self.call(&inputs, &strides)?;
        let results = views([&dy, &max, &sum, &out])?;
        call.backward(results, views(gradients.each_ref())?)?;
        let [dq, dk, dv] = gradients;
        Ok([
            layout.restore(dq, q.shape().dims()),
            layout.restore(dk, k.shape().dims()),
            layout.restore(dv, v.shape().dims()),
        ])
    }

    fn call<'a>(
        &'a self,
        inputs: &'a [AscendTensor; 3],
        mask_strides: &'a [usize],
    ) -> Result<FlashAttention<'a>, Refusal> {
        Ok(FlashAttention {
            plan: self,
            inputs: views(inputs.each_ref())?,
            mask: self.mask_view(mask_strides),
        })
    }

    fn mask_strides(&self) -> Vec<usize> {
        self.mask
            .as_ref()
            .map(|(_, dims)| dense_strides(dims))
            .unwrap_or_default()
    }

    fn mask_view<'a>(&'a self, strides: &'a [usize]) -> Option<View<'a>> {
        self.mask.as_ref().map(|(flags, dims)| View {
            buffer: flags,
            dtype: aclDataType::BOOL,
            dims,
            strides,
            offset: 0,
        })
    }
}

/// A call of the vendor's operators.
struct FlashAttention<'a> {
    plan: &'a Plan,
    /// q, k and v.
    inputs: [View<'a>; 3],
    mask: Option<View<'a>>,
}

/// Calls the operator for one length, or the one for packed sequences, which also takes their ends.
/// The macro holds the arguments common to all four calls.
macro_rules! call {
    ($call:ident, [$one:ident, $packed:ident], $($more:expr),*; $($results:expr),*; $($to:expr),*) => {{
        let Plan { context, layout, sparse, tokens: [pre, next], ends, scale, heads, .. } = $call.plan;
        let ([q, k, v], mask, ops) = ($call.inputs, $call.mask, context.operators());
        let done = match ends.as_deref() {
            None => ops.$one(
                q, k, v, $($more,)* None, None, None, mask, $($results,)* None, *scale, 1.0, *pre,
                *next, *heads, layout.name(), 0, *sparse, $($to),*
            ),
            ends => ops.$packed(
                q, k, v, $($more,)* None, None, None, mask, $($results,)* None, ends, ends, *scale,
                1.0, *pre, *next, *heads, layout.name(), 0, *sparse, $($to),*
            ),
        };
        done.map_err(Refusal::operator)
    }};
}

impl FlashAttention<'_> {
    /// Writes the largest score and the sum of each row, and the output.
    fn forward(&self, [max, sum, out]: [View<'_>; 3]) -> Result<(), Refusal> {
        call!(self, [flash_attention, flash_attention_packed], ; ; max, sum, None, out)
    }

    /// Writes the gradients of q, k and v, from the gradient of the output and the forward's
    /// results.
    fn backward(
        &self,
        [dy, max, sum, out]: [View<'_>; 4],
        [dq, dk, dv]: [View<'_>; 3],
    ) -> Result<(), Refusal> {
        call!(
            self, [flash_attention_grad, flash_attention_packed_grad],
            dy; Some(max), Some(sum), None, out; dq, dk, dv, None
        )
    }
}

fn views<const N: usize>(tensors: [&AscendTensor; N]) -> Result<[View<'_>; N], Refusal> {
    launch::views(tensors).map_err(Refusal::from)
}

/// `count` elements from a column of the last dimension on, `step` apart.
fn column(x: &AscendTensor, index: usize, count: usize, step: usize) -> AscendTensor {
    let (mut dims, mut strides) = (x.dims().to_vec(), x.strides().to_vec());
    let offset = x.offset() + index * strides[3];
    (dims[3], strides[3]) = (count, step);
    x.view(Shape::from(dims), strides, offset)
}

impl AttentionOps for Ascend {
    fn attention_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        bias: Bias<Self>,
        op: AttentionOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let bias = match bias {
            Bias::Absent => None,
            Bias::Added(bias) => Some(bias),
        };
        let [batch, heads, queries, _] = q.shape().dims();
        let out = Shape::from([batch, heads, queries, v.dims()[3]]);
        let softmax = Shape::from([batch, heads, queries, 2]);
        let outputs = Outputs::new(&q, [(out, q.dtype()), (softmax, DType::F32)]);
        let tensors = [&q, &k, &v];
        let done = Plan::new(tensors, bias.is_some(), &op).and_then(|plan| plan.forward(tensors));
        let outputs = outputs.or_composed(counted(done), |()| {
            blocks::forward::<Self>(q, k, v, bias, &op).into()
        });
        outputs.into()
    }

    fn attention_backward(
        kept: Kept<Self>,
        gradient: FloatTensor<Self>,
        bias_wanted: bool,
        op: AttentionOp,
    ) -> AttentionGradients<Self> {
        let Kept {
            q,
            k,
            v,
            bias,
            out,
            softmax,
        } = &kept;
        let biased = matches!(bias, Bias::Added(_));
        let tensors = [q, k, v, out, softmax, &gradient];
        let done = Plan::new([q, k, v], biased, &op).and_then(|plan| plan.backward(tensors));
        let outputs = Outputs::new(q, [q, k, v].map(like));
        // Calls with a bias are rejected: the blocks compute its gradient.
        let mut dbias = None;
        let [dq, dk, dv] = outputs.or_composed(counted(done), |()| {
            let gradients = blocks::backward::<Self>(kept, gradient, bias_wanted, &op);
            dbias = gradients.3;
            [gradients.0, gradients.1, gradients.2]
        });
        (dq, dk, dv, dbias)
    }
}

/// Counts an attention call by its implementation.
fn counted<T>(done: Result<T, Refusal>) -> Result<T, (Refusal, ())> {
    match &done {
        Ok(_) => FUSED.fetch_add(1, Ordering::Relaxed),
        Err(Refusal::Limit) => BLOCKS.fetch_add(1, Ordering::Relaxed),
        Err(Refusal::Failed(_)) => 0,
    };
    done.map_err(|refusal| (refusal, ()))
}

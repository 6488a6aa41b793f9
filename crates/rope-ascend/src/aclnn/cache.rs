//! `RopeWithSinCosCache` (`npu_mrope`), and a gradient for it.

use super::call::{both, run_operator};
use super::tensor::{Descriptor, IntArray, OperatorElement, Output, Tensor};
use crate::error::{AscendError, Result};
use crate::safe::{DeviceBuffer, Stream};
use crate::sys::aclDataType;

const V1: &str = "aclnnRopeWithSinCosCache";
const V2: &str = "aclnnRopeWithSinCosCacheV2";
const SECTIONS_V1: [i64; 3] = [16, 24, 24];
const SECTIONS_V2: [&[i64]; 4] = [
    &[16, 24, 24],
    &[24, 20, 20],
    &[8, 12, 12],
    &[16, 16, 16, 16],
];
/// From here on the operator's tiling divides by zero.
const TOO_MANY_HEADS: u64 = 43;

/// How sections lie over the frequencies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SectionOrder {
    /// One section after the other (Qwen2-VL).
    Contiguous,
    /// In turns (Qwen3-VL).
    Striped,
}

/// Whether to rotate or to take the gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CacheDirection {
    /// The rotation.
    Forward,
    /// Its gradient: the rotation with negated sines. Exact, as a pair shares its angle here.
    Gradient,
}

/// Cosines and sines `[rows, rotary_dim]` in the data's type, and the same with negated sines.
#[derive(Debug)]
pub struct SinCosCache<T: OperatorElement> {
    forward: DeviceBuffer<T>,
    gradient: DeviceBuffer<T>,
    rows: u64,
    rotary_dim: u64,
}

impl<T: OperatorElement> SinCosCache<T> {
    /// Rounds and uploads `cos` and `sin`, each `[rows, pairs]`.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] if they do not have `pairs` columns; else the runtime's.
    pub fn new(stream: &Stream, cos: &[f32], sin: &[f32], pairs: u32) -> Result<Self> {
        let wide = pairs as usize;
        if wide == 0 || cos.is_empty() || cos.len() != sin.len() || !cos.len().is_multiple_of(wide)
        {
            let found = format!("{} and {}", cos.len(), sin.len());
            return Err(AscendError::argument(
                "sin-cos cache",
                "cos, sin",
                format!("whole rows of {pairs}"),
                found,
            ));
        }
        let joined = |sign: f32| -> Vec<T> {
            let rows = cos.chunks(wide).zip(sin.chunks(wide));
            rows.flat_map(|(cos, sin)| cos.iter().copied().chain(sin.iter().map(move |s| sign * s)))
                .map(T::from_f32)
                .collect()
        };
        Ok(Self {
            forward: stream.upload(&joined(1.0))?,
            gradient: stream.upload(&joined(-1.0))?,
            rows: (cos.len() / wide) as u64,
            rotary_dim: 2 * u64::from(pairs),
        })
    }
}

/// Position ids for the operator: contiguous, and checked when they were uploaded.
#[derive(Debug)]
pub struct StockPositions {
    ids: DeviceBuffer<i64>,
    axes: u64,
    tokens: u64,
    largest: i64,
}

impl StockPositions {
    /// Uploads `ids`, `axes` rows one after the other.
    ///
    /// # Errors
    /// [`AscendError::OperatorLimit`] for other than 1, 3 or 4 axes;
    /// [`AscendError::InvalidArgument`] for a negative id or an incomplete row.
    pub fn new(stream: &Stream, ids: &[i64], axes: u32) -> Result<Self> {
        if ![1, 3, 4].contains(&axes) {
            return Err(AscendError::OperatorLimit {
                operator: V2,
                limit: "positions on 1, 3 or 4 axes".into(),
                found: axes.to_string(),
            });
        }
        if ids.is_empty() || !ids.len().is_multiple_of(axes as usize) {
            return Err(AscendError::argument(
                "positions",
                "ids",
                format!("{axes} equal rows"),
                ids.len(),
            ));
        }
        if let Some(negative) = ids.iter().find(|&&id| id < 0) {
            return Err(AscendError::argument(
                "positions",
                "id",
                "at least 0",
                negative,
            ));
        }
        let largest = ids.iter().copied().max().unwrap_or(0);
        Ok(Self {
            ids: stream.upload(ids)?,
            axes: u64::from(axes),
            tokens: (ids.len() / axes as usize) as u64,
            largest,
        })
    }
}

/// One call on q and k, both `[tokens, heads * head_dim]`.
#[derive(Debug)]
pub struct MropeCall<'a, T: OperatorElement> {
    /// Rotation or gradient.
    pub direction: CacheDirection,
    /// Cosines and sines.
    pub cache: &'a SinCosCache<T>,
    /// Positions of the tokens.
    pub positions: &'a StockPositions,
    /// Frequencies of each axis; empty for one axis.
    pub sections: &'a [i64],
    /// How they lie.
    pub order: SectionOrder,
    /// Channels of a head.
    pub head_dim: u32,
    /// Half pairing; otherwise adjacent.
    pub half_pairing: bool,
    /// q (or its gradient).
    pub q: &'a DeviceBuffer<T>,
    /// k (or its gradient).
    pub k: &'a DeviceBuffer<T>,
    /// Rotated q.
    pub q_out: &'a mut DeviceBuffer<T>,
    /// Rotated k.
    pub k_out: &'a mut DeviceBuffer<T>,
}

/// Rotates q and k by the stock operator, the second version where the installation has it.
///
/// # Errors
/// [`AscendError::OperatorLimit`] for what the operator does not take or gets wrong, else the
/// runtime's.
#[doc(alias = "npu_mrope")]
#[doc(alias = "aclnnRopeWithSinCosCache")]
#[doc(alias = "aclnnRopeWithSinCosCacheV2")]
pub fn rope_with_sin_cos_cache<T: OperatorElement>(call: &mut MropeCall<'_, T>) -> Result<()> {
    let stream = call.q.stream().clone();
    let ops = &stream.device().runtime().api().ops;
    let second = ops.aclnnRopeWithSinCosCacheV2GetWorkspaceSize.is_some()
        && ops.aclnnRopeWithSinCosCacheV2.is_some();
    let operator = if second { V2 } else { V1 };
    check(call, operator, second)?;
    let head_dim = u64::from(call.head_dim);
    let tokens = call.positions.tokens;
    let flat = |buffer: &DeviceBuffer<T>| [tokens, buffer.len() as u64 / tokens];
    let cache = match call.direction {
        CacheDirection::Forward => &call.cache.forward,
        CacheDirection::Gradient => &call.cache.gradient,
    };
    let position_dims: &[u64] = if call.positions.axes == 1 {
        &[tokens]
    } else {
        &[call.positions.axes, tokens]
    };
    let positions = Descriptor::new(
        &stream,
        &Tensor::typed(&call.positions.ids, position_dims, aclDataType::INT64)?,
    )?;
    let (q_dims, k_dims) = (flat(call.q), flat(call.k));
    let [q, k] = [
        Descriptor::new(&stream, &Tensor::new(call.q, &q_dims)?)?,
        Descriptor::new(&stream, &Tensor::new(call.k, &k_dims)?)?,
    ];
    let cache = Descriptor::new(
        &stream,
        &Tensor::new(cache, &[call.cache.rows, call.cache.rotary_dim])?,
    )?;
    let [q_out, k_out] = [
        Descriptor::new(&stream, &Output::new(call.q_out, &q_dims)?.0)?,
        Descriptor::new(&stream, &Output::new(call.k_out, &k_dims)?.0)?,
    ];
    // Zeros stand for no sections.
    let sections = IntArray::new(
        &stream,
        if call.sections.is_empty() {
            &[0, 0, 0]
        } else {
            call.sections
        },
    )?;
    let head_size = head_dim as i64;
    let neox = call.half_pairing;
    if second {
        const PLAN: &str = "aclnnRopeWithSinCosCacheV2GetWorkspaceSize";
        let (plan, run) = both(
            &stream,
            ops.aclnnRopeWithSinCosCacheV2GetWorkspaceSize,
            PLAN,
            ops.aclnnRopeWithSinCosCacheV2,
            V2,
        )?;
        let mode = i64::from(call.order == SectionOrder::Striped);
        // SAFETY: live descriptors until the end of this function; both phases of one operator.
        return unsafe {
            run_operator(
                &stream,
                PLAN,
                |bytes, executor| {
                    plan(
                        positions.raw,
                        q.raw,
                        k.raw,
                        cache.raw,
                        sections.raw,
                        head_size,
                        neox,
                        mode,
                        q_out.raw,
                        k_out.raw,
                        bytes,
                        executor,
                    )
                },
                V2,
                run,
            )
        };
    }
    const PLAN: &str = "aclnnRopeWithSinCosCacheGetWorkspaceSize";
    let (plan, run) = both(
        &stream,
        ops.aclnnRopeWithSinCosCacheGetWorkspaceSize,
        PLAN,
        ops.aclnnRopeWithSinCosCache,
        V1,
    )?;
    // SAFETY: as above.
    unsafe {
        run_operator(
            &stream,
            PLAN,
            |bytes, executor| {
                plan(
                    positions.raw,
                    q.raw,
                    k.raw,
                    cache.raw,
                    sections.raw,
                    head_size,
                    neox,
                    q_out.raw,
                    k_out.raw,
                    bytes,
                    executor,
                )
            },
            V1,
            run,
        )
    }
}

fn check<T: OperatorElement>(
    call: &MropeCall<'_, T>,
    operator: &'static str,
    second: bool,
) -> Result<()> {
    let limit = |limit: String, found: String| {
        Err(AscendError::OperatorLimit {
            operator,
            limit,
            found,
        })
    };
    let step = if T::DATA_TYPE == aclDataType::FLOAT {
        16
    } else {
        32
    };
    let (head_dim, rotary_dim) = (u64::from(call.head_dim), call.cache.rotary_dim);
    if head_dim == 0
        || !head_dim.is_multiple_of(step)
        || !rotary_dim.is_multiple_of(step)
        || rotary_dim > head_dim
    {
        return limit(
            format!("head_dim and rotary_dim in multiples of {step}, the second at most the first"),
            format!("{head_dim} and {rotary_dim}"),
        );
    }
    let tokens = call.positions.tokens;
    for (name, x, out) in [("q", call.q, &*call.q_out), ("k", call.k, &*call.k_out)] {
        let elements = x.len() as u64;
        if !elements.is_multiple_of(tokens * head_dim) || elements == 0 || out.len() != x.len() {
            return limit(
                format!("{name} and its output of whole heads for {tokens} tokens"),
                format!("{elements} and {} elements", out.len()),
            );
        }
        let heads = elements / tokens / head_dim;
        if heads >= TOO_MANY_HEADS {
            return limit(
                format!("fewer than {TOO_MANY_HEADS} heads"),
                format!("{heads} heads of {name}"),
            );
        }
    }
    if call.positions.largest as u64 >= call.cache.rows {
        return limit(
            format!(
                "positions below the cache's {} rows, unchecked",
                call.cache.rows
            ),
            call.positions.largest.to_string(),
        );
    }
    if call.sections.is_empty() {
        return if call.positions.axes == 1 {
            Ok(())
        } else {
            limit(
                "sections with positions on several axes".into(),
                "none".into(),
            )
        };
    }
    let known = if second {
        SECTIONS_V2.contains(&call.sections)
    } else {
        call.sections == SECTIONS_V1
    };
    if !known {
        let accepted = if second {
            format!("{SECTIONS_V2:?}")
        } else {
            format!("{SECTIONS_V1:?}")
        };
        return limit(
            format!("sections {accepted}"),
            format!("{:?}", call.sections),
        );
    }
    let sum: i64 = call.sections.iter().sum();
    if sum as u64 * 2 != rotary_dim || call.sections.len() as u64 != call.positions.axes {
        return limit(
            "one section for each axis, rotary_dim / 2 in sum".into(),
            format!(
                "{:?} for {} axes and rotary_dim {rotary_dim}",
                call.sections, call.positions.axes
            ),
        );
    }
    if call.order == SectionOrder::Striped && (!second || call.sections.len() == 4) {
        return limit(
            "striped sections in its second version, three of them".into(),
            format!("{:?}", call.sections),
        );
    }
    Ok(())
}

//! `ApplyRotaryPosEmb` and `InterleaveRope`.

use super::call::{both, run_operator};
use super::rotary::OperatorLayout;
use super::tensor::{Descriptor, Output, Tensor};
use crate::error::{AscendError, Result};
use crate::rope::Architecture;

fn limit<T>(operator: &'static str, limit: impl Into<String>, found: String) -> Result<T> {
    Err(AscendError::OperatorLimit {
        operator,
        limit: limit.into(),
        found,
    })
}

/// Checks that cos and sin are as x with one head, in x's type.
fn check_angles(
    operator: &'static str,
    x: &Tensor<'_>,
    angles: [&Tensor<'_>; 2],
    heads_axis: usize,
) -> Result<()> {
    let mut expected = x.dims.clone();
    expected[heads_axis] = 1;
    for tensor in angles {
        if tensor.dims != expected || tensor.dtype != x.dtype {
            return limit(
                operator,
                format!("cos and sin of {expected:?} in x's type"),
                format!("{:?}", tensor.dims),
            );
        }
    }
    Ok(())
}

/// Rotates q and k in place, by halves.
///
/// # Errors
/// [`AscendError::OperatorLimit`] for what the operator does not take, else the runtime's.
#[doc(alias = "aclnnApplyRotaryPosEmb")]
#[doc(alias = "aclnnApplyRotaryPosEmbV2")]
pub fn apply_rotary_pos_emb(
    q: &mut Output<'_>,
    k: &mut Output<'_>,
    cos: &Tensor<'_>,
    sin: &Tensor<'_>,
    layout: OperatorLayout,
) -> Result<()> {
    const V1: &str = "aclnnApplyRotaryPosEmb";
    const V2: &str = "aclnnApplyRotaryPosEmbV2";
    const PLAN_V1: &str = "aclnnApplyRotaryPosEmbGetWorkspaceSize";
    const PLAN_V2: &str = "aclnnApplyRotaryPosEmbV2GetWorkspaceSize";
    const BSND: i64 = 1;
    let stream = q.0.stream;
    let ops = &stream.device().runtime().api().ops;
    let second = ops.aclnnApplyRotaryPosEmbV2.is_some()
        && ops.aclnnApplyRotaryPosEmbV2GetWorkspaceSize.is_some();
    let operator = if second { V2 } else { V1 };
    let four_axes = |tensor| layout.four_axes(operator, tensor);
    let (q, k) = (&four_axes(&q.0)?, &four_axes(&k.0)?);
    let (cos, sin) = (&four_axes(cos)?, &four_axes(sin)?);
    for x in [q, k] {
        if ![64, 128].contains(&x.last_dim()) {
            return limit(operator, "D of 64 or 128", format!("{:?}", x.dims));
        }
        check_angles(operator, x, [cos, sin], layout.heads_axis())?;
    }
    let number = match layout {
        OperatorLayout::Bsnd | OperatorLayout::Tnd => BSND,
        OperatorLayout::Sbnd => 2,
        OperatorLayout::Bnsd => 3,
    };
    let architecture = stream.device().machine()?.architecture;
    // V2 documents these two everywhere; what tiles it for A2 and A3 refuses them in every release.
    if number != BSND && !(second && architecture == Architecture::Dav3510) {
        return limit(
            operator,
            "BSND or TND, but for V2 on Ascend 950",
            format!("{layout:?} on {}", architecture.name()),
        );
    }
    let [q, k, cos, sin] = [
        Descriptor::new(stream, q)?,
        Descriptor::new(stream, k)?,
        Descriptor::new(stream, cos)?,
        Descriptor::new(stream, sin)?,
    ];
    if second {
        let (plan, run) = both(
            stream,
            ops.aclnnApplyRotaryPosEmbV2GetWorkspaceSize,
            PLAN_V2,
            ops.aclnnApplyRotaryPosEmbV2,
            V2,
        )?;
        // The operator takes its mode as a mutable string.
        let mut mode = *b"half\0";
        // SAFETY: live descriptors and string until the end of this block; both phases of one
        // operator.
        return unsafe {
            run_operator(
                stream,
                PLAN_V2,
                |bytes, executor| {
                    plan(
                        q.raw,
                        k.raw,
                        cos.raw,
                        sin.raw,
                        number,
                        mode.as_mut_ptr().cast(),
                        bytes,
                        executor,
                    )
                },
                V2,
                run,
            )
        };
    }
    let (plan, run) = both(
        stream,
        ops.aclnnApplyRotaryPosEmbGetWorkspaceSize,
        PLAN_V1,
        ops.aclnnApplyRotaryPosEmb,
        V1,
    )?;
    // SAFETY: live descriptors until the end of this function; both phases of one operator.
    unsafe {
        run_operator(
            stream,
            PLAN_V1,
            |bytes, executor| plan(q.raw, k.raw, cos.raw, sin.raw, number, bytes, executor),
            V1,
            run,
        )
    }
}

/// De-interleaves, then rotates by halves: the output stays de-interleaved. BNSD, D of 64.
///
/// # Errors
/// As [`apply_rotary_pos_emb`].
#[doc(alias = "aclnnInterleaveRope")]
pub fn interleave_rope(
    x: &Tensor<'_>,
    cos: &Tensor<'_>,
    sin: &Tensor<'_>,
    out: &mut Output<'_>,
) -> Result<()> {
    const RUN: &str = "aclnnInterleaveRope";
    const PLAN: &str = "aclnnInterleaveRopeGetWorkspaceSize";
    if x.dims.len() != 4 || x.last_dim() != 64 || out.0.dims != x.dims || out.0.dtype != x.dtype {
        return limit(
            RUN,
            "BNSD with D of 64, and an output alike",
            format!("{:?} and {:?}", x.dims, out.0.dims),
        );
    }
    check_angles(RUN, x, [cos, sin], 1)?;
    let stream = x.stream;
    let ops = &stream.device().runtime().api().ops;
    let (plan, run) = both(
        stream,
        ops.aclnnInterleaveRopeGetWorkspaceSize,
        PLAN,
        ops.aclnnInterleaveRope,
        RUN,
    )?;
    let [x, cos, sin, out] = [
        Descriptor::new(stream, x)?,
        Descriptor::new(stream, cos)?,
        Descriptor::new(stream, sin)?,
        Descriptor::new(stream, &out.0)?,
    ];
    // SAFETY: live descriptors until the end of this function; both phases of one operator.
    unsafe {
        run_operator(
            stream,
            PLAN,
            |bytes, executor| plan(x.raw, cos.raw, sin.raw, out.raw, bytes, executor),
            RUN,
            run,
        )
    }
}

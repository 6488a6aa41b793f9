//! Counting the bytes of attention that really runs.

use std::error::Error;

use crate::names;
use crate::rows::AttentionRow;
use crate::shapes::{QWEN2_5_VL_7B, Shape};
use burn::tensor::{DType as BurnDType, Distribution, Tensor};
use burn_attention::{Attention, AttentionMask, Implementation, MaskRules};
use rope_check::buffer::DType;

use super::{Meter, Sizes, float};

/// Tokens by default.
pub const TOKENS: [usize; 5] = [1024, 2048, 4096, 8192, 16_384];
/// Tokens of a quick run.
pub const QUICK_TOKENS: [usize; 2] = [32, 64];
/// The largest matrix of scores that the composed attention is run with; it holds several.
const LARGEST_SCORES_BYTES: usize = 512 << 20;

/// A key head of a model and the query heads that share it. All heads together hold as many times
/// these bytes as the model has key heads.
fn one_group(shape: Shape) -> Shape {
    Shape {
        heads: shape.heads / shape.kv_heads,
        kv_heads: 1,
        ..shape
    }
}

/// Bytes that [`count`] needs at least: q, k and v, and their gradients.
pub fn least_bytes(tokens: &[usize], dtype: DType) -> f64 {
    let shape = one_group(QWEN2_5_VL_7B);
    let channels = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
    let most = tokens.iter().max().map_or(0.0, |tokens| *tokens as f64);
    2.0 * most * (channels * dtype.size_bytes()) as f64
}

/// A row for the fused and the composed causal attention at each number of tokens; `done` is called
/// after each.
///
/// # Errors
/// Those of the device.
pub fn count(
    meter: &dyn Meter,
    tokens: &[usize],
    dtype: DType,
    done: &mut dyn FnMut(),
) -> Result<Vec<AttentionRow>, Box<dyn Error>> {
    let mut rows = Vec::new();
    let implementations = [
        (names::FUSED, Implementation::Fused),
        (names::COMPOSED, Implementation::Composed),
    ];
    if meter.counts_allocations() {
        // Matrix products keep a buffer for each thread that has computed one.
        let device = meter.device();
        let product =
            || Tensor::<2>::ones([64, 64], &device).matmul(Tensor::ones([64, 64], &device));
        rayon::broadcast(|_| drop(product()));
    }
    // Memory pools and tables of kernels are made on first use.
    let warm = one_group(QWEN2_5_VL_7B).at(QUICK_TOKENS[0]);
    for (_, implementation) in implementations {
        step(meter, warm, dtype, implementation)?;
    }
    for &tokens in tokens {
        let shape = one_group(QWEN2_5_VL_7B).at(tokens);
        let first = rows.len();
        for (name, implementation) in implementations {
            let scores_bytes = shape.heads * tokens * tokens * size_of::<f32>();
            let mut row = AttentionRow {
                shape: shape.name.to_owned(),
                tokens,
                heads: shape.heads,
                kv_heads: shape.kv_heads,
                head_dim: shape.head_dim,
                dtype,
                device: meter.name().to_owned(),
                implementation: name.to_owned(),
                source: meter.source(),
                scores_bytes,
                retained_bytes: None,
                forward_peak_bytes: None,
                backward_peak_bytes: None,
                step_peak_bytes: None,
                composed_ratio: None,
            };
            if implementation == Implementation::Fused || scores_bytes <= LARGEST_SCORES_BYTES {
                let [forward, backward] = step(meter, shape, dtype, implementation)?;
                let later = forward.retained_bytes + backward.peak_bytes.cast_signed();
                let peak = forward.peak_bytes.max(later.max(0).cast_unsigned());
                row.retained_bytes = Some(forward.retained_bytes);
                row.forward_peak_bytes = Some(forward.peak_bytes);
                row.backward_peak_bytes = Some(backward.peak_bytes);
                row.step_peak_bytes = Some(peak);
            }
            rows.push(row);
            done();
        }
        let peak = |row: &AttentionRow| row.step_peak_bytes.map(|bytes| bytes as f64);
        let composed = rows.last().and_then(peak);
        rows[first].composed_ratio = composed.zip(peak(&rows[first])).map(|(c, f)| c / f);
    }
    Ok(rows)
}

/// One forward and one backward of causal attention, each counted by itself. q, k and v are there
/// before: they are what other layers compute.
fn step(
    meter: &dyn Meter,
    shape: Shape,
    dtype: DType,
    implementation: Implementation,
) -> Result<[rope_check::alloc::Usage; 2], Box<dyn Error>> {
    let device = meter.device().autodiff();
    let dtype = BurnDType::from(float(dtype));
    let random = |heads: usize| {
        let shape = [1, heads, shape.seq, shape.head_dim];
        let x = Tensor::<4>::random(shape, Distribution::Default, &device);
        x.cast(dtype).require_grad()
    };
    let (q, k, v) = (
        random(shape.heads),
        random(shape.kv_heads),
        random(shape.kv_heads),
    );
    let rules = MaskRules {
        causal: true,
        ..Default::default()
    };
    let mask = AttentionMask::new(&rules, 1, shape.seq, shape.seq)?;
    let attention = Attention::new(mask).with_implementation(implementation);
    let sizes = Sizes {
        data_bytes: usize::MAX,
        large_bytes: usize::MAX,
    };
    let (mut inputs, mut out) = (Some((q.clone(), k, v)), None);
    let forward = meter.count(sizes, &mut || {
        out = inputs.take().map(|(q, k, v)| attention.forward(q, k, v));
    })?;
    let loss = out.ok_or("nothing attended")?.sum();
    let (mut loss, mut gradients) = (Some(loss), None);
    let backward = meter.count(sizes, &mut || {
        gradients = loss.take().map(|loss| loss.backward());
    })?;
    if gradients.is_none_or(|gradients| q.grad(&gradients).is_none()) {
        return Err("the backward did not reach q".into());
    }
    Ok([forward, backward])
}

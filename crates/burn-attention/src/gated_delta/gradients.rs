//! The gradients of the gated delta rule, of ordinary tensor operations: the [chunks](super::chunks)
//! from the last to the first, whose state before each is known.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape};
use burn_fused::primitive::{cast, slice};

use super::chunks::{Local, Run, at, transpose};
use super::op::{GatedDeltaOp, KeptStates};

/// The gradients of q, k, v, g and beta.
pub(super) fn backward<B: Backend>(
    kept: KeptStates<B>,
    gradient: FloatTensor<B>,
    op: &GatedDeltaOp,
) -> [FloatTensor<B>; 5] {
    let KeptStates {
        q,
        k,
        v,
        g,
        beta,
        states,
    } = kept;
    let run = Run::<B>::new(&q, &v, op);
    let inputs = [&q, &k, &v, &g, &beta];
    let kinds: [(Shape, FloatDType); 5] = inputs.map(|x| (x.shape(), x.dtype().into()));
    let mut of_state = run.zeros();
    let mut parts: Vec<[FloatTensor<B>; 5]> = Vec::new();
    for block in run.blocks().into_iter().rev() {
        let local = run.local(&block, inputs);
        let dout = run.folded(&gradient, &block, run.sizes.heads);
        let states = slice::<B>(states.clone(), 0, block);
        let (found, before) = of_block(&run, local, states, dout, of_state);
        of_state = before;
        parts.push(found);
    }
    let mut joined: [Vec<FloatTensor<B>>; 5] = Default::default();
    for parts in parts.into_iter().rev() {
        for (joined, part) in joined.iter_mut().zip(parts) {
            joined.push(part);
        }
    }
    let mut kinds = kinds.into_iter();
    joined.map(|parts| {
        let whole = slice::<B>(B::float_cat(parts, 1), 1, 0..run.sizes.tokens);
        match kinds.next() {
            Some((shape, dtype)) => cast::<B>(B::float_reshape(whole, shape), dtype),
            None => whole,
        }
    })
}

/// A gradient that is known of a block, and what it has of the gradients that go through the state.
struct Through<B: Backend> {
    /// Of the state after each chunk.
    of_ends: FloatTensor<B>,
    /// Of X: what each token would write alone.
    of_alone: FloatTensor<B>,
    /// Of the state before the block.
    of_state: FloatTensor<B>,
}

/// From the last chunk of a block to the first.
fn through<B: Backend>(
    local: &Local<B>,
    dout: &FloatTensor<B>,
    dread: &FloatTensor<B>,
    mut of_state: FloatTensor<B>,
) -> Through<B> {
    let mul = B::float_mul;
    let weights = mul(local.scores.clone(), local.decays.clone());
    let by_output = B::float_matmul(transpose::<B>(weights), dout.clone());
    let of_states = B::float_matmul(transpose::<B>(local.q.clone()), dread.clone());
    let inverse = transpose::<B>(local.inverse.clone());
    let keys = mul(local.k.clone(), local.to_end.clone());
    let rate = mul(local.beta.clone(), local.from_start.clone());
    let reading = transpose::<B>(mul(local.k.clone(), rate));
    let (mut of_ends, mut of_alone) = (Vec::new(), Vec::new());
    for chunk in (0..dout.shape()[0]).rev() {
        let dwritten = B::float_matmul(at::<B>(&keys, chunk), of_state.clone());
        let dwritten = B::float_add(at::<B>(&by_output, chunk), dwritten);
        let dalone = B::float_matmul(at::<B>(&inverse, chunk), dwritten);
        let unread = B::float_matmul(at::<B>(&reading, chunk), dalone.clone());
        let kept = mul(of_state.clone(), at::<B>(&local.through, chunk));
        let before = B::float_add(kept, at::<B>(&of_states, chunk));
        of_ends.push(of_state);
        of_alone.push(dalone);
        of_state = B::float_sub(before, unread);
    }
    let [of_ends, of_alone] = [of_ends, of_alone].map(|mut parts| {
        parts.reverse();
        B::float_cat(parts, 0)
    });
    Through {
        of_ends,
        of_alone,
        of_state,
    }
}

/// The gradients of a block's q, k, v, g and beta, `[batch, tokens, ..]`, and of the state before
/// it, from those of its output and of the state after it; `states` are those before its chunks.
fn of_block<B: Backend>(
    run: &Run<'_, B>,
    local: Local<B>,
    states: FloatTensor<B>,
    dout: FloatTensor<B>,
    of_state: FloatTensor<B>,
) -> ([FloatTensor<B>; 5], FloatTensor<B>) {
    let mul = B::float_mul;
    let sum = |x, y| B::float_sum_dim(mul(x, y), 3);
    let dread = mul(dout.clone(), local.from_start.clone());
    let Through {
        of_ends,
        of_alone,
        of_state,
    } = through(&local, &dout, &dread, of_state);
    let Local {
        q,
        k,
        v,
        beta,
        decays,
        from_start,
        to_end,
        through,
        scores,
        products,
        inverse,
        raw: [raw_q, raw_k],
    } = local;

    // The values that the state holds, the new part of v, and the values written.
    let predicted = B::float_matmul(k.clone(), states.clone());
    let residual = B::float_sub(v, mul(predicted.clone(), from_start.clone()));
    let written = B::float_matmul(inverse, mul(residual.clone(), beta.clone()));
    let dresidual = mul(of_alone.clone(), beta.clone());
    let mut dbeta = sum(of_alone.clone(), residual);

    // The state that queries and keys read, and the one that is written.
    let dpredicted = B::float_neg(mul(dresidual.clone(), from_start.clone()));
    let read = B::float_matmul(q.clone(), states.clone());
    let dfrom_start = B::float_sub(sum(dout.clone(), read), sum(dresidual.clone(), predicted));
    let dto_end = sum(B::float_matmul(k.clone(), of_ends.clone()), written.clone());
    let dthrough = B::float_sum_dim(sum(of_ends.clone(), states.clone()), 2);
    let states = transpose::<B>(states);
    let mut dq = B::float_matmul(dread, states.clone());
    let mut dk = B::float_matmul(dpredicted, states);
    let weighed = mul(written.clone(), to_end.clone());
    dk = B::float_add(dk, B::float_matmul(weighed, transpose::<B>(of_ends)));

    // Within the chunk: the output reads what is written, and each token what those before wrote.
    let written = transpose::<B>(written);
    let dweights = B::float_matmul(dout, written.clone());
    let dscores = mul(dweights.clone(), decays.clone());
    dq = B::float_add(dq, B::float_matmul(dscores.clone(), k.clone()));
    dk = B::float_add(dk, B::float_matmul(transpose::<B>(dscores), q));
    let da = B::float_neg(B::float_matmul(of_alone, written));
    let da = mul(da, run.after.clone());
    let decayed = mul(da.clone(), decays.clone());
    dbeta = B::float_add(dbeta, sum(decayed.clone(), products.clone()));
    let dproducts = mul(decayed, beta.clone());
    let both = B::float_add(dproducts.clone(), transpose::<B>(dproducts));
    dk = B::float_add(dk, B::float_matmul(both, k));
    let ddecays = B::float_add(mul(dweights, scores), mul(mul(da, beta), products));

    // Of the logarithms of all decays to the sums of g that they are.
    let dg = of_logs(
        run,
        mul(ddecays, decays),
        mul(dto_end, to_end),
        mul(dfrom_start, from_start),
        mul(dthrough, through),
    );
    let heads = run.sizes.heads;
    let dq = B::float_mul_scalar(dq, run.scale().into());
    let gradients = [
        run.of_raw(raw_q, dq),
        run.of_raw(raw_k, dk),
        run.unfold(dresidual, heads),
        run.unfold(dg, heads),
        run.unfold(dbeta, heads),
    ];
    (gradients, of_state)
}

/// The gradient of g, from those of its sums between two tokens, up to the end of the chunk, from
/// its start, and over all of it.
fn of_logs<B: Backend>(
    run: &Run<'_, B>,
    between: FloatTensor<B>,
    to_end: FloatTensor<B>,
    from_start: FloatTensor<B>,
    through: FloatTensor<B>,
) -> FloatTensor<B> {
    let from_on = transpose::<B>(run.up_to.clone());
    let between = B::float_matmul(from_on.clone(), between);
    let between = B::float_sum_dim(B::float_mul(between, run.after.clone()), 3);
    let to_end = B::float_matmul(run.after.clone(), to_end);
    let from_start = B::float_matmul(from_on, from_start);
    B::float_add(
        B::float_add(between, to_end),
        B::float_add(from_start, through),
    )
}

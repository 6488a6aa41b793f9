//! The gradients of the gated delta rule, composed of ordinary tensor operations: over the
//! [chunks](super::chunks) from last to first, with the known state before each.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape};
use burn_fused::primitive::{cast, slice};

use super::chunks::{Local, Run, at, transpose};
use super::op::{GatedDeltaOp, KeptStates};

/// The gradients of q, k, v, g and beta.
pub fn backward<B: Backend>(
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
    let mut state_gradient = run.zeros();
    let mut parts: Vec<[FloatTensor<B>; 5]> = Vec::new();
    for block in run.blocks().into_iter().rev() {
        let local = run.local(&block, inputs);
        let dout = run.folded(&gradient, &block, run.sizes.heads);
        let states = slice::<B>(states.clone(), 0, block);
        let (found, before) = block_gradients(&run, local, states, dout, state_gradient);
        state_gradient = before;
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
    end_gradients: FloatTensor<B>,
    /// Of X: what each token would write alone.
    alone_gradients: FloatTensor<B>,
    /// Of the state before the block.
    state_gradient: FloatTensor<B>,
}

/// From the last chunk of a block to the first.
fn through<B: Backend>(
    local: &Local<B>,
    dout: &FloatTensor<B>,
    dread: &FloatTensor<B>,
    mut state_gradient: FloatTensor<B>,
) -> Through<B> {
    let mul = B::float_mul;
    let weights = mul(local.scores.clone(), local.decays.clone());
    let by_output = B::float_matmul(transpose::<B>(weights), dout.clone());
    let read_gradients = B::float_matmul(transpose::<B>(local.q.clone()), dread.clone());
    let inverse = transpose::<B>(local.inverse.clone());
    let keys = mul(local.k.clone(), local.to_end.clone());
    let rate = mul(local.beta.clone(), local.from_start.clone());
    let reading = transpose::<B>(mul(local.k.clone(), rate));
    let (mut end_gradients, mut alone_gradients) = (Vec::new(), Vec::new());
    for chunk in (0..dout.shape()[0]).rev() {
        let dwritten = B::float_matmul(at::<B>(&keys, chunk), state_gradient.clone());
        let dwritten = B::float_add(at::<B>(&by_output, chunk), dwritten);
        let dalone = B::float_matmul(at::<B>(&inverse, chunk), dwritten);
        let unread = B::float_matmul(at::<B>(&reading, chunk), dalone.clone());
        let kept = mul(state_gradient.clone(), at::<B>(&local.through, chunk));
        let before = B::float_add(kept, at::<B>(&read_gradients, chunk));
        end_gradients.push(state_gradient);
        alone_gradients.push(dalone);
        state_gradient = B::float_sub(before, unread);
    }
    let [end_gradients, alone_gradients] = [end_gradients, alone_gradients].map(|mut parts| {
        parts.reverse();
        B::float_cat(parts, 0)
    });
    Through {
        end_gradients,
        alone_gradients,
        state_gradient,
    }
}

/// The gradients of a block's q, k, v, g and beta, `[batch, tokens, ..]`, and of the state before
/// it, from those of its output and of the state after it; `states` are those before its chunks.
fn block_gradients<B: Backend>(
    run: &Run<'_, B>,
    local: Local<B>,
    states: FloatTensor<B>,
    dout: FloatTensor<B>,
    state_gradient: FloatTensor<B>,
) -> ([FloatTensor<B>; 5], FloatTensor<B>) {
    let mul = B::float_mul;
    let sum = |x, y| B::float_sum_dim(mul(x, y), 3);
    let dread = mul(dout.clone(), local.from_start.clone());
    let Through {
        end_gradients,
        alone_gradients,
        state_gradient,
    } = through(&local, &dout, &dread, state_gradient);
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
    let dresidual = mul(alone_gradients.clone(), beta.clone());
    let mut dbeta = sum(alone_gradients.clone(), residual);

    // The state that queries and keys read, and the one that is written.
    let dpredicted = B::float_neg(mul(dresidual.clone(), from_start.clone()));
    let read = B::float_matmul(q.clone(), states.clone());
    let dfrom_start = B::float_sub(sum(dout.clone(), read), sum(dresidual.clone(), predicted));
    let dto_end = sum(
        B::float_matmul(k.clone(), end_gradients.clone()),
        written.clone(),
    );
    let dthrough = B::float_sum_dim(sum(end_gradients.clone(), states.clone()), 2);
    let states = transpose::<B>(states);
    let mut dq = B::float_matmul(dread, states.clone());
    let mut dk = B::float_matmul(dpredicted, states);
    let weighed = mul(written.clone(), to_end.clone());
    dk = B::float_add(dk, B::float_matmul(weighed, transpose::<B>(end_gradients)));

    // Within the chunk: the output reads what is written, and each token what those before wrote.
    let written = transpose::<B>(written);
    let dweights = B::float_matmul(dout, written.clone());
    let dscores = mul(dweights.clone(), decays.clone());
    dq = B::float_add(dq, B::float_matmul(dscores.clone(), k.clone()));
    dk = B::float_add(dk, B::float_matmul(transpose::<B>(dscores), q));
    let da = B::float_neg(B::float_matmul(alone_gradients, written));
    let da = mul(da, run.after.clone());
    let decayed = mul(da.clone(), decays.clone());
    dbeta = B::float_add(dbeta, sum(decayed.clone(), products.clone()));
    let dproducts = mul(decayed, beta.clone());
    let both = B::float_add(dproducts.clone(), transpose::<B>(dproducts));
    dk = B::float_add(dk, B::float_matmul(both, k));
    let ddecays = B::float_add(mul(dweights, scores), mul(mul(da, beta), products));

    // Of the logarithms of all decays to the sums of g that they are.
    let dg = g_gradient(
        run,
        mul(ddecays, decays),
        mul(dto_end, to_end),
        mul(dfrom_start, from_start),
        mul(dthrough, through),
    );
    let heads = run.sizes.heads;
    let dq = B::float_mul_scalar(dq, run.scale().into());
    let gradients = [
        run.raw_gradient(raw_q, dq),
        run.raw_gradient(raw_k, dk),
        run.unfold(dresidual, heads),
        run.unfold(dg, heads),
        run.unfold(dbeta, heads),
    ];
    (gradients, state_gradient)
}

/// The gradient of g, from those of its sums between two tokens, up to the end of the chunk, from
/// its start, and over all of it.
fn g_gradient<B: Backend>(
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

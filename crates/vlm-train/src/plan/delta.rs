//! The gated delta rule and its convolution on tensors without elements: the operations of
//! `burn-attention`'s `gated_delta` and `short_convolution`, one by one.

use super::dry::{Ghost, Run, Var};
use super::ops;

/// Tokens of a chunk, and the most elements of a block of chunks, of `burn-attention`.
const CHUNK: usize = 64;
const BLOCK_ELEMS: usize = 1 << 22;

/// The sizes of a rule.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rule {
    pub(super) rows: usize,
    /// Of a row.
    pub(super) tokens: usize,
    pub(super) key_heads: usize,
    pub(super) heads: usize,
    pub(super) key_dim: usize,
    pub(super) value_dim: usize,
}

/// The elements of the tensors of a block of chunks.
#[derive(Clone, Copy)]
struct Block {
    chunks: usize,
    /// Tokens of a chunk.
    len: usize,
    /// Tokens of all matrices.
    tokens: usize,
    /// Elements of q and k as they came, of q and k of all heads, of v, and of a square.
    raw: usize,
    keys: usize,
    values: usize,
    square: usize,
    /// Of one state.
    state: usize,
    /// True if tokens are missing in the last chunk.
    is_padded: bool,
}

/// The tensors of a block without the state.
struct Local {
    q: Ghost,
    k: Ghost,
    v: Ghost,
    decays: Ghost,
    scores: Ghost,
    products: Ghost,
    inverse: Ghost,
    raw: [Ghost; 2],
}

impl Rule {
    fn blocks(&self) -> Vec<Block> {
        let len = self.tokens.next_power_of_two().min(CHUNK);
        let chunks = self.tokens.div_ceil(len);
        let matrices = self.rows * self.heads;
        let width = len.max(self.key_dim).max(self.value_dim);
        let step = (BLOCK_ELEMS / (matrices * len * width)).max(1);
        let starts = (0..chunks).step_by(step);
        let block = |start: usize| {
            let chunks = chunks.min(start + step) - start;
            let tokens = chunks * matrices * len;
            Block {
                chunks,
                len,
                tokens,
                raw: chunks * len * self.rows * self.key_heads * self.key_dim,
                keys: tokens * self.key_dim,
                values: tokens * self.value_dim,
                square: tokens * len,
                state: matrices * self.key_dim * self.value_dim,
                is_padded: (start + chunks) * len > self.tokens,
            }
        };
        starts.map(block).collect()
    }

    /// The rule over q, k, v, g and beta; the result has the elements of v.
    pub(super) fn forward(self, run: &Run, inputs: [Var; 5]) -> Var {
        let parents = inputs.each_ref().map(|input| input.node);
        let keeps = parents.iter().any(Option::is_some);
        let narrow = inputs[0].value.width;
        let kept = inputs.map(|input| input.value);
        let (value, states) = self.pass(run, &kept, keeps);
        let value = value.cast(narrow);
        run.op(parents, value, move |run, gradient, onward| {
            for (parent, gradient) in self
                .gradients(run, (kept, states), gradient)
                .into_iter()
                .enumerate()
            {
                onward.give(parent, gradient);
            }
        })
    }

    /// The rule over a rank's tokens where ranks divide them, in f32: once for what they do to a
    /// state, which goes to later ranks, and once from the state before them.
    pub(super) fn forward_part(self, run: &Run, [q, k, v, g, beta]: [Var; 5]) -> Var {
        let (narrow, wide) = (v.value.width, run.types.wide);
        let [q, k, v] = [q, k, v].map(|x| ops::cast(run, x, wide));
        let elems = self.rows * self.heads * self.tokens * self.value_dim;
        let pass = |before: Option<Var>, count: usize, value_dim: usize| {
            // Tokens that stand for states.
            let added = self.rows * count * self.key_dim;
            let more = |x: &Var, of_token: usize| {
                let rest = run.constant(run.tensor(added * of_token, wide));
                ops::cat(run, x.clone(), rest)
            };
            let keys = self.key_heads * self.key_dim;
            let wider = (value_dim > self.value_dim).then(|| {
                let rows = self.rows * self.heads * self.tokens;
                let zeros = rows * (value_dim - self.value_dim);
                ops::cat(run, v.clone(), run.constant(run.tensor(zeros, wide)))
            });
            let v = match before {
                Some(before) => ops::cat(run, before, v.clone()),
                None => more(wider.as_ref().unwrap_or(&v), self.heads * value_dim),
            };
            let inputs = [
                more(&q, keys),
                more(&k, keys),
                v,
                more(&g, self.heads),
                more(&beta, self.heads),
            ];
            let rule = Self {
                tokens: self.tokens + count * self.key_dim,
                value_dim,
                ..self
            };
            rule.forward(run, inputs)
        };
        let state = self.rows * self.heads * self.key_dim;
        let width = self.value_dim + self.key_dim;
        let all = pass(None, 2, width);
        let given = ops::scaled(run, ops::select(run, all, state * width));
        let given = ops::select(run, given, state * width * (run.context - 1));
        let received = state * width * (run.context - 1);
        let received = ops::exchanged(run, given, received);
        let before = ops::select(run, received, state * self.value_dim);
        let out = pass(Some(before), 1, self.value_dim);
        ops::cast(run, ops::narrowed(run, out, elems), narrow)
    }

    /// The output and the states, token by token.
    fn pass(&self, run: &Run, inputs: &[Ghost; 5], keeps: bool) -> (Ghost, Ghost) {
        let (narrow, wide) = (inputs[0].width, run.types.wide);
        let _in_order = inputs.clone().map(Ghost::dense);
        let values = self.rows * self.tokens * self.heads * self.value_dim;
        let blocks = self.blocks();
        let chunks: usize = blocks.iter().map(|block| block.chunks).sum();
        let states = blocks[0].state * if keeps { chunks + 1 } else { 1 };
        (run.zeros(values, narrow), run.zeros(states, wide))
    }

    /// Some tokens of an input, in f32.
    fn tokens(&self, run: &Run, block: Block, x: &Ghost, elems: usize) -> Ghost {
        let x = x.clone().view_of_rows(elems).cast(run.types.wide);
        if block.is_padded { x.copied() } else { x }
    }

    fn local(&self, run: &Run, block: Block, [q, k, v, _, _]: &[Ghost; 5]) -> Local {
        let tensor = |elems| run.tensor(elems, run.types.wide);
        let product = |elems| run.zeros(elems, run.types.wide);
        let raw = [q, k].map(|x| {
            let x = self.tokens(run, block, x, block.raw);
            drop(tensor(block.raw)); // squares
            x
        });
        let [q, k] = raw.each_ref().map(|x| {
            let mut x = tensor(x.elems);
            if self.heads > self.key_heads {
                x = tensor(block.keys);
            }
            if self.heads > 1 { x.copied() } else { x }
        });
        let small = tensor(2 * block.tokens);
        let decays = {
            let _columns = tensor(block.square);
            product(block.square)
        };
        let products = product(block.square);
        let a = tensor(block.square);
        let scores = product(block.square);
        let mut inverse = tensor(block.square);
        let mut size = 2;
        while size < block.len {
            let coupled = tensor(block.square);
            let through = product(block.square);
            drop(coupled);
            inverse = inverse.zip(product(block.square));
            drop(through);
            size *= 2;
        }
        drop((a, small));
        let v = self.tokens(run, block, v, block.values);
        let v = if self.heads > 1 { v.copied() } else { v };
        Local {
            q,
            k,
            v,
            decays,
            scores,
            products,
            inverse,
            raw,
        }
    }

    fn gradients(
        &self,
        run: &Run,
        (inputs, states): ([Ghost; 5], Ghost),
        gradient: Ghost,
    ) -> [Ghost; 5] {
        let widths = inputs.each_ref().map(|input| input.width);
        let elems = inputs.each_ref().map(|input| input.elems);
        let mut state_gradient = run.tensor(self.blocks()[0].state, run.types.wide);
        let mut joined: [Vec<Ghost>; 5] = Default::default();
        for block in self.blocks().into_iter().rev() {
            let local = self.local(run, block, &inputs);
            let dout = self.tokens(run, block, &gradient, block.values);
            let dout = if self.heads > 1 { dout.copied() } else { dout };
            let (found, before) = self.block_gradients(run, block, local, dout, state_gradient);
            state_gradient = before;
            for (joined, part) in joined.iter_mut().zip(found) {
                joined.push(part);
            }
        }
        drop((inputs, states, gradient));
        let mut kinds = widths.into_iter().zip(elems);
        joined.map(|parts| {
            let whole = Ghost::cat(parts);
            match kinds.next() {
                Some((width, elems)) if elems < whole.elems => {
                    whole.view(elems).dense().cast(width)
                }
                Some((width, _)) => whole.cast(width),
                None => whole,
            }
        })
    }

    /// From the last chunk of a block to the first: the gradients of the states after the chunks,
    /// of what each token would write alone, and of the state before the block.
    fn through(run: &Run, block: Block, mut state_gradient: Ghost) -> [Ghost; 3] {
        let tensor = |elems| run.tensor(elems, run.types.wide);
        let product = |elems| run.zeros(elems, run.types.wide);
        let by_output = {
            let _weights = tensor(block.square);
            product(block.values)
        };
        let read = product(block.chunks * block.state);
        let keys = [tensor(block.keys), tensor(block.keys)];
        let (mut ends, mut alone) = (Vec::new(), Vec::new());
        let of_chunk = block.values / block.chunks;
        for _ in 0..block.chunks {
            let dwritten = product(of_chunk);
            alone.push(product(of_chunk));
            drop(dwritten);
            let unread = product(block.state);
            let before = tensor(block.state);
            ends.push(state_gradient);
            state_gradient = before.zip(unread);
        }
        let [ends, alone] = [ends, alone].map(Ghost::cat);
        drop((by_output, read, keys));
        [ends, alone, state_gradient]
    }

    fn block_gradients(
        &self,
        run: &Run,
        block: Block,
        local: Local,
        dout: Ghost,
        state_gradient: Ghost,
    ) -> ([Ghost; 5], Ghost) {
        let tensor = |elems| run.tensor(elems, run.types.wide);
        let product = |elems| run.zeros(elems, run.types.wide);
        let dread = tensor(block.values);
        let [ends, alone, before] = Self::through(run, block, state_gradient);
        let predicted = product(block.values);
        drop(tensor(block.values)); // of v, over which the residual is written
        let written = {
            let _weighed = tensor(block.values);
            product(block.values)
        };
        let Local {
            q,
            k,
            v,
            decays,
            scores,
            products,
            inverse,
            raw,
        } = local;
        drop(inverse);
        let dresidual = tensor(block.values);
        drop(v);
        let dpredicted = tensor(block.values);
        drop(product(block.values)); // what queries read
        drop(predicted);
        drop(product(block.values)); // what keys read
        drop(tensor(block.chunks * block.state));
        let dq = product(block.keys);
        drop(dread);
        let dk = product(block.keys);
        drop(dpredicted);
        {
            let _weighed = tensor(block.values);
            drop(product(block.keys));
        }
        drop(ends);
        let dweights = product(block.square);
        drop(dout);
        {
            let _dscores = tensor(block.square);
            drop(product(block.keys));
        }
        drop(q);
        let da = product(block.square);
        drop((alone, written));
        {
            let decayed = tensor(block.square);
            drop(tensor(block.square));
            let both = tensor(block.square);
            drop(decayed);
            drop(product(block.keys));
            drop((both, k));
        }
        drop((scores, products));
        {
            let _ddecays = dweights;
            drop((da, decays));
            drop(product(block.square));
        }
        let [raw_q, raw_k] = raw;
        let dq = self.raw_gradient(run, block, raw_q, dq);
        let dk = self.raw_gradient(run, block, raw_k, dk);
        let dv = dresidual.copied();
        let small = [(); 2].map(|()| tensor(block.tokens));
        let [dg, dbeta] = small;
        ([dq, dk, dv, dg, dbeta], before)
    }

    fn raw_gradient(&self, run: &Run, block: Block, x: Ghost, gradient: Ghost) -> Ghost {
        let gradient = if self.heads > 1 {
            gradient.copied()
        } else {
            gradient
        };
        let sum = gradient.reduced(block.raw);
        drop(gradient);
        let normalised = x.map();
        drop(run.tensor(block.raw, run.types.wide)); // products
        sum.zip(normalised)
    }
}

/// The convolution of `[rows, tokens, channels]` with a few taps, and SiLU.
pub(super) fn convolution(run: &Run, x: Var, weight: Var, taps: usize, is_masked: bool) -> Var {
    let (wide, narrow) = (run.types.wide, x.value.width);
    let elems = x.value.elems;
    let parents = [x.node, weight.node];
    let (x, weight) = (x.value, weight.value);
    let convolved = move |run: &Run, x: Ghost| {
        let mut sum: Option<Ghost> = None;
        for back in (0..taps).rev() {
            let tap = shifted(run, x.clone(), back);
            let tap = if is_masked && back > 0 {
                tap.map()
            } else {
                tap
            };
            let tap = tap.map();
            sum = Some(match sum.take() {
                Some(sum) => sum.zip(tap),
                None => tap,
            });
        }
        sum.unwrap_or_else(|| run.tensor(elems, x.width))
    };
    let value = {
        let z = convolved(run, x.clone().cast(wide));
        let sigmoid = run.tensor(elems, wide);
        z.zip(sigmoid).cast(narrow)
    };
    run.op(parents, value, move |run, gradient, onward| {
        let channels = weight.elems / taps;
        let x = x.cast(wide);
        let gradient = gradient.dense().cast(wide);
        let z = convolved(run, x.clone());
        let s = run.tensor(elems, wide);
        let rest = run.tensor(elems, wide);
        let slope = z.zip(rest);
        let dz = gradient.zip(slope.zip(s));
        let mut dx: Option<Ghost> = None;
        for back in (0..taps).rev() {
            let dz = if is_masked && back > 0 {
                dz.clone().map()
            } else {
                dz.clone()
            };
            {
                let moved = shifted(run, x.clone(), back);
                drop(dz.clone().zip(moved));
            }
            let part = shifted(run, dz, back).map();
            dx = Some(match dx.take() {
                Some(sum) => sum.zip(part),
                None => part,
            });
        }
        drop((dz, x));
        if let Some(dx) = dx {
            onward.give(0, dx.cast(narrow));
        }
        onward.give(1, run.tensor(channels * taps, narrow));
    })
}

fn shifted(run: &Run, x: Ghost, back: usize) -> Ghost {
    if back == 0 {
        return x;
    }
    run.tensor(x.elems, x.width)
}

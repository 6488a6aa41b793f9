//! Flex, burn's CPU backend: token by token, in the order of a decoder, so that a token's output has
//! the same bits in any batch, pack and chunk. The gradients are those of chunks.
//!
//! A task has some columns of one head's state, which stay in the nearest cache over all tokens. The
//! columns are independent of each other.

use burn::backend::TensorMetadata;
use burn::backend::flex::{Flex, FlexTensor};
use burn::backend::tensor::FloatTensor;
use burn::tensor::Shape;
use burn_fused::{accumulator, elements, for_dtype, zeros};
use rayon::prelude::*;

use super::chunks::scale;
use super::op::{GatedDeltaOp, GatedDeltaOps, Sizes};
use super::{NORM_EPSILON, chunk_tokens};
use crate::attention::flex::number::{Number, Real};
use crate::rows::target::Target;
use crate::sequences::Sequences;

/// Columns of a task: with 128 channels of keys their state takes 16 KiB.
const COLUMNS: usize = 32;

impl GatedDeltaOps for Flex {
    fn gated_delta_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        g: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        op: GatedDeltaOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        for_dtype!(q.dtype(), E => forward::<E>([q, k, v, g, beta], None, &op))
    }

    fn gated_delta_step(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        g: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        state: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let op = GatedDeltaOp {
            sequences: Sequences::whole(1),
            keeps_states: false,
            blocks: None,
        };
        for_dtype!(q.dtype(), E => forward::<E>([q, k, v, g, beta], Some(state), &op))
    }
}

/// What a task reads.
struct Inputs<'a, E: Number> {
    q: &'a [E],
    k: &'a [E],
    v: &'a [E],
    g: &'a [E::Wide],
    beta: &'a [E::Wide],
    /// The state before the first token, unless it is 0.
    before: Option<&'a [E::Wide]>,
    sizes: Sizes,
    /// For each token, the number of its sequence, unless there is one.
    sequences: Option<&'a [u32]>,
    /// The number of tokens between states that are kept.
    chunk: usize,
    keeps_states: bool,
}

/// The results, of which each task writes columns: outputs of the heads of all tokens, and rows of
/// states.
struct Outputs<'a, E: Number> {
    out: Target<'a, E>,
    states: Target<'a, E::Wide>,
}

fn forward<E: Number>(
    tensors: [FlexTensor; 5],
    before: Option<FlexTensor>,
    op: &GatedDeltaOp,
) -> (FlexTensor, FlexTensor) {
    let [q, k, v, g, beta] = tensors.map(|x| x.to_contiguous());
    let before = before.map(|state| state.to_contiguous());
    let sizes = Sizes::of(&q, &v);
    let wide = accumulator(q.dtype()).unwrap_or_else(|error| panic!("{error}"));
    let chunk = chunk_tokens(sizes.tokens);
    let count = match op.keeps_states {
        true => sizes.tokens.div_ceil(chunk) + 1,
        false => 1,
    };
    let inputs = Inputs::<E> {
        q: elements(&q),
        k: elements(&k),
        v: elements(&v),
        g: elements(&g),
        beta: elements(&beta),
        before: before.as_ref().map(elements::<E::Wide>),
        sizes,
        sequences: op.sequences.token_sequences(),
        chunk,
        keeps_states: op.keeps_states,
    };
    let Sizes {
        batch,
        heads,
        key_dim,
        value_dim,
        ..
    } = sizes;
    let mut out = zeros(v.shape(), v.dtype());
    let shape = Shape::new([count, batch * heads, key_dim, value_dim]);
    let mut states = zeros(shape, wide.into());
    let outputs = Outputs::<E> {
        out: Target::new(out.storage_mut(), value_dim),
        states: Target::new(states.storage_mut(), value_dim),
    };
    let starts = (0..value_dim).step_by(COLUMNS);
    let tasks =
        (0..batch * heads).flat_map(|matrix| starts.clone().map(move |start| [matrix, start]));
    let tasks: Vec<[usize; 2]> = tasks.collect();
    tasks
        .into_par_iter()
        .for_each(|task| inputs.write(task, &outputs));
    (out, states)
}

impl<E: Number> Inputs<'_, E> {
    /// Writes some columns of a head, which no other task has.
    fn write(&self, task: [usize; 2], outputs: &Outputs<'_, E>) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            #[allow(unsafe_code, reason = "the function is compiled with AVX2")]
            // SAFETY: the processor has AVX2 and fused multiply-adds.
            return unsafe { self.write_avx2(task, outputs) };
        }
        match cfg!(target_arch = "aarch64") {
            true => self.compute::<true>(task, outputs),
            false => self.compute::<false>(task, outputs),
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn write_avx2(&self, task: [usize; 2], outputs: &Outputs<'_, E>) {
        self.compute::<true>(task, outputs);
    }

    #[inline(always)]
    fn compute<const FUSED: bool>(&self, [matrix, start]: [usize; 2], outputs: &Outputs<'_, E>) {
        let Sizes {
            batch,
            tokens,
            heads,
            key_heads,
            key_dim,
            value_dim,
            ..
        } = self.sizes;
        let (row, head) = (matrix / heads, matrix % heads);
        let key_head = head / self.sizes.group();
        let width = COLUMNS.min(value_dim - start);
        let mut state = vec![[E::Wide::ZERO; COLUMNS]; key_dim];
        if let Some(before) = self.before {
            let of_head = &before[matrix * key_dim * value_dim..];
            for (channel, state) in state.iter_mut().enumerate() {
                let from = &of_head[channel * value_dim + start..][..width];
                state[..width].copy_from_slice(from);
            }
        }
        let columns = start..start + width;
        let keep = |number: usize, state: &[[E::Wide; COLUMNS]]| {
            let first = (number * batch * heads + matrix) * key_dim;
            for (channel, from) in state.iter().enumerate() {
                #[allow(unsafe_code, reason = "tasks write columns of the same rows")]
                // SAFETY: no other task has these columns of this head, and this one writes one row
                // at a time.
                let to = unsafe { outputs.states.part(first + channel, columns.clone()) };
                to.copy_from_slice(&from[..width]);
            }
        };
        let (mut q, mut k) = (vec![E::Wide::ZERO; key_dim], vec![E::Wide::ZERO; key_dim]);
        let scale = E::Wide::of(scale(key_dim));
        for token in 0..tokens {
            if self.keeps_states && token.is_multiple_of(self.chunk) {
                keep(token / self.chunk, &state);
            }
            let begins = |of: &&[u32]| token > 0 && of[token] != of[token - 1];
            if self.sequences.as_ref().is_some_and(begins) {
                state.fill([E::Wide::ZERO; COLUMNS]);
            }
            let flat = row * tokens + token;
            let at = (flat * key_heads + key_head) * key_dim;
            unit(&self.q[at..at + key_dim], scale, &mut q);
            unit(&self.k[at..at + key_dim], E::Wide::ONE, &mut k);
            let at = flat * heads + head;
            let (decay, beta) = (self.g[at].exp(), self.beta[at]);
            let mut v = [E::Wide::ZERO; COLUMNS];
            let from = &self.v[at * value_dim + start..][..width];
            v.iter_mut()
                .zip(from)
                .for_each(|(v, from)| *v = from.widen());
            let out = token_of::<E::Wide, FUSED>(&mut state, [&q, &k], v, [decay, beta]);
            #[allow(unsafe_code, reason = "tasks write columns of the same rows")]
            // SAFETY: as in `keep`.
            let to = unsafe { outputs.out.part(at, columns.clone()) };
            to.iter_mut().zip(out).for_each(|(to, x)| *to = E::round(x));
        }
        let last = match self.keeps_states {
            true => tokens.div_ceil(self.chunk),
            false => 0,
        };
        keep(last, &state);
    }
}

/// Divides a vector by the root of its sum of squares, and multiplies it.
#[inline(always)]
fn unit<E: Number>(x: &[E], scale: E::Wide, to: &mut [E::Wide]) {
    let mut squares = E::Wide::of(NORM_EPSILON);
    for x in x {
        let x = x.widen();
        squares += x * x;
    }
    let factor = scale / squares.sqrt();
    for (to, x) in to.iter_mut().zip(x) {
        *to = x.widen() * factor;
    }
}

#[inline(always)]
fn add<R: Real, const FUSED: bool>(a: R, b: R, c: R) -> R {
    match FUSED {
        true => a.mul_add(b, c),
        false => a * b + c,
    }
}

/// Decays the state, writes a value and returns what the query reads.
#[inline(always)]
fn token_of<R: Real, const FUSED: bool>(
    state: &mut [[R; COLUMNS]],
    [q, k]: [&[R]; 2],
    v: [R; COLUMNS],
    [decay, beta]: [R; 2],
) -> [R; COLUMNS] {
    let mut known = [R::ZERO; COLUMNS];
    for (state, k) in state.iter_mut().zip(k) {
        for (state, known) in state.iter_mut().zip(&mut known) {
            *state *= decay;
            *known = add::<R, FUSED>(*state, *k, *known);
        }
    }
    let mut written = v;
    for (written, known) in written.iter_mut().zip(known) {
        *written = (*written - known) * beta;
    }
    let mut out = [R::ZERO; COLUMNS];
    for (state, (q, k)) in state.iter_mut().zip(q.iter().zip(k)) {
        for (state, (written, out)) in state.iter_mut().zip(written.iter().zip(&mut out)) {
            *state = add::<R, FUSED>(*k, *written, *state);
            *out = add::<R, FUSED>(*state, *q, *out);
        }
    }
    out
}

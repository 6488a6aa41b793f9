//! Flex, burn's CPU backend: one pass over the tensors' storage, on all threads of rayon's pool.

use burn::backend::flex::{Flex, FlexTensor};
use burn::backend::tensor::FloatTensor;
use burn::tensor::Shape;
use burn_fused::{elements, for_dtype, zeros};
use rayon::prelude::*;

use super::halves::SwiGluHalvesOps;
use super::op::SwiGluOps;
use crate::attention::flex::number::{Number, Real};

/// Elements of a task, and those whose exponentials are in the first cache.
const TASK: usize = 1 << 15;
const PIECE: usize = 1 << 10;
/// As an exponential in f32 is at most e^88, the sigmoid beyond is 0.
const MOST: f64 = 1.6e38;

impl SwiGluOps for Flex {
    fn swiglu_forward(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        for_dtype!(gate.dtype(), E => forward::<E>(&gate.to_contiguous(), &up.to_contiguous()))
    }

    fn swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [gate, up, gradient] = [gate, up, gradient].map(|x| x.to_contiguous());
        for_dtype!(gate.dtype(), E => backward::<E>(&gate, &up, &gradient))
    }
}

impl SwiGluHalvesOps for Flex {
    fn swiglu_halves_forward(both: FloatTensor<Self>) -> FloatTensor<Self> {
        for_dtype!(both.dtype(), E => halves_forward::<E>(&both.to_contiguous()))
    }

    fn swiglu_halves_backward(
        both: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let [both, gradient] = [both, gradient].map(|x| x.to_contiguous());
        for_dtype!(both.dtype(), E => halves_backward::<E>(&both, &gradient))
    }
}

/// Calls `each` with the index, the gate and its sigmoid of every element.
fn with_sigmoids<E: Number>(gate: &[E], each: impl FnMut(usize, E::Wide, E::Wide)) {
    with_sigmoids_in(&mut [E::Wide::ZERO; PIECE], gate, each);
}

/// As [`with_sigmoids`], with memory for the exponentials.
fn with_sigmoids_in<E: Number>(
    powers: &mut [E::Wide; PIECE],
    gate: &[E],
    mut each: impl FnMut(usize, E::Wide, E::Wide),
) {
    let (one, most) = (E::Wide::ONE, E::Wide::of(MOST));
    for (piece, gate) in gate.chunks(PIECE).enumerate() {
        let powers = &mut powers[..gate.len()];
        for (power, gate) in powers.iter_mut().zip(gate) {
            *power = E::Wide::ZERO - gate.widen();
        }
        E::Wide::exponentials(powers, E::Wide::ZERO);
        for (index, (gate, power)) in gate.iter().zip(powers).enumerate() {
            let sigmoid = if *power > most {
                E::Wide::ZERO
            } else {
                one / (one + *power)
            };
            each(piece * PIECE + index, gate.widen(), sigmoid);
        }
    }
}

fn forward<E: Number>(gate: &FlexTensor, up: &FlexTensor) -> FlexTensor {
    let mut out = zeros(gate.layout().shape().clone(), gate.dtype());
    let inputs = elements::<E>(gate)
        .par_chunks(TASK)
        .zip(elements::<E>(up).par_chunks(TASK));
    let tasks = out.storage_mut::<E>().par_chunks_mut(TASK).zip(inputs);
    tasks.for_each(|(out, (gate, up))| {
        with_sigmoids(gate, |index, gate, sigmoid| {
            out[index] = E::round(gate * sigmoid * up[index].widen());
        });
    });
    out
}

/// With s = sigmoid(gate): dup = gradient gate s, and dgate = gradient (s + gate s (1 - s)) up. The
/// slope comes before up: where it is small, gradient times up can overflow and the result not.
fn backward<E: Number>(
    gate: &FlexTensor,
    up: &FlexTensor,
    gradient: &FlexTensor,
) -> (FlexTensor, FlexTensor) {
    let new = || zeros(gate.layout().shape().clone(), gate.dtype());
    let (mut dgate, mut dup) = (new(), new());
    let inputs = [gate, up, gradient].map(|x| elements::<E>(x).par_chunks(TASK));
    let [gates, ups, gradients] = inputs;
    let outputs = dgate.storage_mut::<E>().par_chunks_mut(TASK);
    let outputs = outputs.zip(dup.storage_mut::<E>().par_chunks_mut(TASK));
    let tasks = outputs.zip(gates.zip(ups.zip(gradients)));
    tasks.for_each(|((dgate, dup), (gate, (up, gradient)))| {
        with_sigmoids(gate, |index, gate, s| {
            let (up, gradient) = (up[index].widen(), gradient[index].widen());
            let silu = gate * s;
            dup[index] = E::round(gradient * silu);
            dgate[index] = E::round(gradient * (s + silu * (E::Wide::ONE - s)) * up);
        });
    });
    (dgate, dup)
}

/// Rows of a task, of `columns` elements.
fn task_rows(columns: usize) -> usize {
    (TASK / columns).max(1)
}

fn halves_forward<E: Number>(both: &FlexTensor) -> FlexTensor {
    let [rows, columns] = both.layout().shape().dims();
    let hidden = columns / 2;
    let mut out = zeros(Shape::new([rows, hidden]), both.dtype());
    let step = task_rows(columns);
    let tasks = out.storage_mut::<E>().par_chunks_mut(step * hidden);
    let tasks = tasks.zip(elements::<E>(both).par_chunks(step * columns));
    tasks.for_each(|(out, both)| {
        let powers = &mut [E::Wide::ZERO; PIECE];
        let rows = both.chunks_exact(columns).zip(out.chunks_exact_mut(hidden));
        for (both, out) in rows {
            let (gate, up) = both.split_at(hidden);
            let (out, up) = (&mut out[..hidden], &up[..hidden]);
            with_sigmoids_in(powers, gate, |index, gate, sigmoid| {
                out[index] = E::round(gate * sigmoid * up[index].widen());
            });
        }
    });
    out
}

/// As [`backward`].
fn halves_backward<E: Number>(both: &FlexTensor, gradient: &FlexTensor) -> FlexTensor {
    let [rows, columns] = both.layout().shape().dims();
    let hidden = columns / 2;
    let mut out = zeros(Shape::new([rows, columns]), both.dtype());
    let step = task_rows(columns);
    let tasks = out.storage_mut::<E>().par_chunks_mut(step * columns);
    let both = elements::<E>(both).par_chunks(step * columns);
    let gradient = elements::<E>(gradient).par_chunks(step * hidden);
    tasks
        .zip(both.zip(gradient))
        .for_each(|(out, (both, gradient))| {
            let powers = &mut [E::Wide::ZERO; PIECE];
            let inputs = both
                .chunks_exact(columns)
                .zip(gradient.chunks_exact(hidden));
            for (out, (both, gradient)) in out.chunks_exact_mut(columns).zip(inputs) {
                let (gate, up) = both.split_at(hidden);
                let (dgate, dup) = out.split_at_mut(hidden);
                with_sigmoids_in(powers, gate, |index, gate, s| {
                    let (up, gradient) = (up[index].widen(), gradient[index].widen());
                    let silu = gate * s;
                    dup[index] = E::round(gradient * silu);
                    dgate[index] = E::round(gradient * (s + silu * (E::Wide::ONE - s)) * up);
                });
            }
        });
    out
}

//! The work channel by channel: the norm without a rotation, and its backward.

use std::ops::Range;

use super::LINE_BYTES;
use super::sums::{two, unzips};
use crate::element::{Element, Real};
use crate::kernels::portable::Portable;
use crate::kernels::vector::{Memory, Register};

/// Writes x * rstd * w for the channels from `at` to `end`.
///
/// # Safety
/// The processor has the instructions; `x` and `weight` are valid for reads and `to` for writes of
/// these channels; `to` is x, or does not overlap it.
#[inline(always)]
pub(super) unsafe fn normalise<I, O, A, B>(
    x: *const A,
    to: *mut B,
    weight: *const A::Acc,
    rstd: A::Acc,
    mut at: usize,
    end: usize,
) where
    I: Memory<A>,
    O: Memory<B, Register = I::Register>,
    A: Element,
    B: Element<Acc = A::Acc>,
{
    // SAFETY: the caller guarantees the channels, of which the loops take what is left.
    unsafe {
        let all = I::Register::splat(rstd);
        while at + I::N <= end {
            let x = I::load(x.add(at)).mul(all);
            O::store::<false>(x.mul(I::Register::load(weight.add(at))), to.add(at));
            at += I::N;
        }
        while at < end {
            let x = x.add(at).read().widen() * rstd;
            to.add(at).write(B::narrow(x * weight.add(at).read()));
            at += 1;
        }
    }
}

/// Widens or rounds the channels from `at` to `end`.
///
/// # Safety
/// The processor has the instructions; `x` is valid for reads and `to` for writes of these
/// channels, and they do not overlap.
#[inline(always)]
pub(super) unsafe fn convert<I, O, A, B>(x: *const A, to: *mut B, mut at: usize, end: usize)
where
    I: Memory<A>,
    O: Memory<B, Register = I::Register>,
    A: Element,
    B: Element<Acc = A::Acc>,
{
    // SAFETY: the caller guarantees the channels, of which the loops take what is left.
    unsafe {
        while at + I::N <= end {
            O::store::<false>(I::load(x.add(at)), to.add(at));
            at += I::N;
        }
        while at < end {
            to.add(at).write(B::narrow(x.add(at).read().widen()));
            at += 1;
        }
    }
}

/// The backward of x * rstd * w alone, for rows at a constant distance in elements: writes dx =
/// rstd * (h - n * mean(h * n)) = rstd * h + x * by_x with n = x * rstd, and adds g * n = rstd * g
/// * x to dw; h is g, or g * w if there are weights.
///
/// # Safety
/// The processor has the instructions; there are as many rows as `scales`, rstd and by_x; in
/// each row `x` and `g` are valid for reads and `to` for writes of `dim` elements; `to` is one of
/// them, or starts where `g` does and has no wider elements, or overlaps neither; there are `dim`
/// weights and gradients of weights.
#[inline(always)]
pub(super) unsafe fn norm_backward<X, G, O, A, B, C, const STREAM: bool>(
    x: (*const A, usize),
    g: (*const B, usize),
    to: (*mut C, usize),
    weight: Option<*const A::Acc>,
    dweight: *mut A::Acc,
    dim: usize,
    scales: [&[A::Acc]; 2],
) where
    X: Memory<A>,
    G: Memory<B, Register = X::Register>,
    O: Memory<C, Register = X::Register>,
    A: Element,
    B: Element<Acc = A::Acc>,
    C: Element<Acc = A::Acc>,
{
    let whole = dim - dim % X::N;
    // SAFETY: the caller guarantees rows of `dim` elements, and as many weights and gradients of
    // weights; the second loop takes what the first one leaves of them.
    unsafe {
        let fours = if unzips::<X, G, A, B>() || STREAM && 2 * X::N * size_of::<C>() < LINE_BYTES {
            dim - dim % (4 * X::N)
        } else {
            0
        };
        debug_assert!(fours == dim || !unzips::<X, G, A, B>());
        for at in (0..fours).step_by(4 * X::N) {
            channels::<X, G, O, A, B, C, 4, STREAM>(x, g, to, weight, dweight, scales, at);
        }
        let doubles = dim - dim % (2 * X::N);
        for at in (fours..doubles).step_by(2 * X::N) {
            channels::<X, G, O, A, B, C, 2, STREAM>(x, g, to, weight, dweight, scales, at);
        }
        for at in (doubles..whole).step_by(X::N) {
            channels::<X, G, O, A, B, C, 1, STREAM>(x, g, to, weight, dweight, scales, at);
        }
        if whole < dim {
            rest_of_channels(x, g, to, weight, dweight, scales, whole..dim);
        }
    }
}

/// [`norm_backward`] of a row's last channels, in a separate function, compiled once for all
/// instruction sets.
///
/// # Safety
/// As [`norm_backward`]; the channels are within `dim`.
#[inline(never)]
unsafe fn rest_of_channels<A, B, C>(
    x: (*const A, usize),
    g: (*const B, usize),
    to: (*mut C, usize),
    weight: Option<*const A::Acc>,
    dweight: *mut A::Acc,
    scales: [&[A::Acc]; 2],
    channels: Range<usize>,
) where
    A: Element,
    B: Element<Acc = A::Acc>,
    C: Element<Acc = A::Acc>,
{
    type One = Portable<1>;
    for at in channels {
        // SAFETY: the caller guarantees the channel in every row, in the weights and in their
        // gradients.
        unsafe {
            self::channels::<One, One, One, A, B, C, 1, false>(
                x, g, to, weight, dweight, scales, at,
            );
        }
    }
}

/// [`norm_backward`] of `D` times `N` channels: one, two or four; four if those at even and at odd
/// indices are apart, or if it takes as many to fill a cache line.
///
/// # Safety
/// As [`norm_backward`]; the channels from `at` on are within `dim`.
#[inline(always)]
unsafe fn channels<X, G, O, A, B, C, const D: usize, const STREAM: bool>(
    x: (*const A, usize),
    g: (*const B, usize),
    to: (*mut C, usize),
    weight: Option<*const A::Acc>,
    dweight: *mut A::Acc,
    scales: [&[A::Acc]; 2],
    at: usize,
) where
    X: Memory<A>,
    G: Memory<B, Register = X::Register>,
    O: Memory<C, Register = X::Register>,
    A: Element,
    B: Element<Acc = A::Acc>,
    C: Element<Acc = A::Acc>,
{
    // SAFETY: the caller guarantees the channels in every row, in the weights and in their
    // gradients, and the instructions.
    unsafe {
        let zero = X::Register::splat(A::Acc::ZERO);
        let (mut w, mut dw) = ([zero; D], [zero; D]);
        for d in 0..D {
            if let Some(weight) = weight {
                w[d] = X::Register::load(weight.add(at + d * X::N));
            }
            dw[d] = X::Register::load(dweight.add(at + d * X::N).cast_const());
        }
        let apart = unzips::<X, G, A, B>();
        if apart && D > 1 {
            debug_assert!(weight.is_none());
            for d in (0..D).step_by(2) {
                let both = dweight.add(at + d * X::N).cast_const();
                [dw[d], dw[d + 1]] = X::load_coefficients_double(both);
            }
        }
        for (i, (rstd, by_x)) in scales[0].iter().zip(scales[1]).enumerate() {
            let (rstd, by_x) = (X::Register::splat(*rstd), X::Register::splat(*by_x));
            let (from, of) = (x.0.add(i * x.1 + at), g.0.add(i * g.1 + at));
            let (mut x, mut g) = ([zero; D], [zero; D]);
            if D == 1 {
                (x[0], g[0]) = (X::load(from), G::load(of));
            } else {
                for d in (0..D).step_by(2) {
                    [x[d], x[d + 1]] = two::<X, A>(from.add(d * X::N), apart);
                    [g[d], g[d + 1]] = two::<G, B>(of.add(d * X::N), apart);
                }
            }
            let mut dx = [zero; D];
            for d in 0..D {
                let g = g[d].mul(rstd);
                dw[d] = g.mul_add(x[d], dw[d]);
                dx[d] = match weight {
                    Some(_) => g.mul_add(w[d], x[d].mul(by_x)),
                    None => x[d].mul_add(by_x, g),
                };
            }
            let to = to.0.add(i * to.1 + at);
            match D {
                // Not as one: AVX-512's conversion to bf16 gains nothing beside these sums.
                4 if apart => {
                    O::store_pairs::<STREAM>([dx[0], dx[1]], to);
                    O::store_pairs::<STREAM>([dx[2], dx[3]], to.add(2 * X::N));
                }
                4 => {
                    O::store_both::<STREAM>([dx[0], dx[1]], to);
                    O::store_both::<STREAM>([dx[2], dx[3]], to.add(2 * X::N));
                }
                2 => O::store_both::<STREAM>([dx[0], dx[1]], to),
                _ => O::store::<STREAM>(dx[0], to),
            }
        }
        if apart && D > 1 {
            for d in (0..D).step_by(2) {
                [dw[d], dw[d + 1]] = X::Register::zip(dw[d], dw[d + 1]);
            }
        }
        for (d, dw) in dw.into_iter().enumerate() {
            dw.write(dweight.add(at + d * X::N));
        }
    }
}

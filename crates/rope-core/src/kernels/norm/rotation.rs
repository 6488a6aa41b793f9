//! The rotation of rows by factors, which hold the weights.

use std::marker::PhantomData;
use std::ops::Range;

use super::{AHEAD, LINE_BYTES, Shape};
use crate::element::Element;
use crate::kernels::order::{Order, Split};
use crate::kernels::portable::Portable;
use crate::kernels::tile::Coefficients;
use crate::kernels::vector::{Memory, Register};

/// Rotation of a row of `A`, read by `I` in the order `Read`, into one of `B`, written by `O` in
/// the order `Write`.
///
/// A row is taken run by run, from its start: double registers of pairs, then single ones, then one
/// pair at a time. The factors of the pairs are prepared in the order of their use, so that a row
/// needs one address for them: c1, s1, c2, s2 of a register, or of both registers of a double one;
/// or, where members are swapped within a register, the factors of an element and of its neighbour.
///
/// # Safety
/// Of every function: the processor has the instructions. `from` and `to` are valid for the tile's
/// rotated channels and do not overlap, or are one and the orders are too; factors are valid for
/// `4 * pairs` values. With `STREAM` the runs start and fill cache lines.
pub(super) struct RowRotation<I, O, A, B, Read, Write>(PhantomData<(I, O, A, B, Read, Write)>);

impl<I, O, A, B, Read, Write> RowRotation<I, O, A, B, Read, Write>
where
    I: Memory<A>,
    O: Memory<B, Register = I::Register>,
    A: Element,
    B: Element<Acc = A::Acc>,
    Read: Order,
    Write: Order,
{
    const SAME_ORDER: bool = Read::ZIPPED == Write::ZIPPED;
    const SWAPS: bool = Read::ZIPPED && Write::ZIPPED && I::SWAPS && O::SWAPS;
    const DOUBLES: bool = Self::SAME_ORDER && !Self::SWAPS && I::DOUBLES && O::DOUBLES;
    /// Contiguous bytes that [`runs`](Self::runs) writes before it moves to another row.
    const WRITTEN: usize = {
        let registers = if Write::ZIPPED { 2 } else { 1 } * if Self::DOUBLES { 2 } else { 1 };
        registers * O::N * size_of::<B>()
    };

    /// Writes the factors of a row, or of the transpose if `ADJOINT`. With `WEIGHT`, the input of
    /// the forward and the output of the transpose are weighted.
    #[inline(always)]
    pub(super) unsafe fn prepare<const ADJOINT: bool, const WEIGHT: bool>(
        by: Coefficients<A::Acc>,
        weight: *const A::Acc,
        factors: *mut A::Acc,
        shape: Shape,
    ) {
        let Shape { pairs, run, .. } = shape;
        let weights = [weight, weight.wrapping_add(pairs)];
        // SAFETY: the caller guarantees coefficients and weights of all pairs, of which the loops
        // take what is left of each run, and room for four values a pair.
        unsafe {
            for start in (0..pairs).step_by(run.max(1)) {
                let mut at = start;
                while Self::DOUBLES && at + 2 * I::N <= start + run {
                    let f = Self::factors::<2, ADJOINT, WEIGHT>(by, weights, at);
                    for (i, f) in f.into_iter().enumerate() {
                        f[0].write(factors.add(4 * at + 2 * i * I::N));
                        f[1].write(factors.add(4 * at + (2 * i + 1) * I::N));
                    }
                    at += 2 * I::N;
                }
                while at + I::N <= start + run {
                    let [[c1], [s1], [c2], [s2]] =
                        Self::factors::<1, ADJOINT, WEIGHT>(by, weights, at);
                    let mut f = [c1, s1, c2, s2];
                    if Self::SWAPS {
                        let cos = I::Register::zip(c1, c2);
                        let sin = I::Register::zip(s1, s2);
                        f = [cos[0], sin[0], cos[1], sin[1]];
                    }
                    for (i, f) in f.into_iter().enumerate() {
                        f.write(factors.add(4 * at + i * I::N));
                    }
                    at += I::N;
                }
                if at < start + run {
                    RowRotation::<Portable<1>, Portable<1>, A, B, Split, Split>::prepare_rest::<
                        ADJOINT,
                        WEIGHT,
                    >(by, weights, factors, at..start + run);
                }
            }
        }
    }

    /// [`prepare`](Self::prepare) of a run's last pairs, in a separate function, compiled once for
    /// all instruction sets.
    #[inline(never)]
    unsafe fn prepare_rest<const ADJOINT: bool, const WEIGHT: bool>(
        by: Coefficients<A::Acc>,
        weights: [*const A::Acc; 2],
        factors: *mut A::Acc,
        pairs: Range<usize>,
    ) {
        for at in pairs {
            // SAFETY: the caller guarantees coefficients and weights of these pairs, and room.
            unsafe {
                let f = Self::factors::<1, ADJOINT, WEIGHT>(by, weights, at);
                for (i, [f]) in f.into_iter().enumerate() {
                    f.write(factors.add(4 * at + i));
                }
            }
        }
    }

    /// c1, -s1, c2, s2 of `D` times `N` pairs, one or two, from pair `at` on; y1 = c1 x1 - s1 x2
    /// and y2 = c2 x2 + s2 x1.
    #[inline(always)]
    unsafe fn factors<const D: usize, const ADJOINT: bool, const WEIGHT: bool>(
        by: Coefficients<A::Acc>,
        weights: [*const A::Acc; 2],
        at: usize,
    ) -> [[I::Register; D]; 4] {
        // SAFETY: the caller guarantees `D * N` values from `at` on in each; weights are read only
        // if they are wanted.
        unsafe {
            let c1 = Self::values::<D>(by.cos[0].add(at));
            let mut s1 = Self::values::<D>(by.sin[0].add(at));
            let c2 = Self::values::<D>(by.cos[1].add(at));
            let mut s2 = Self::values::<D>(by.sin[1].add(at));
            let negative = I::Register::signs(true);
            for i in 0..D {
                let minus_s1 = s1[i].flip(negative);
                (s1[i], s2[i]) = if ADJOINT {
                    (s2[i], minus_s1)
                } else {
                    (minus_s1, s2[i])
                };
            }
            let mut f = [c1, s1, c2, s2];
            if WEIGHT {
                let w1 = Self::values::<D>(weights[0].add(at));
                let w2 = Self::values::<D>(weights[1].add(at));
                let weights = if ADJOINT {
                    [w1, w1, w2, w2]
                } else {
                    [w1, w2, w2, w1]
                };
                for (f, w) in f.iter_mut().zip(weights) {
                    for i in 0..D {
                        f[i] = f[i].mul(w[i]);
                    }
                }
            }
            f
        }
    }

    /// `D * N` values, two times `N` in the order of [`Order::load_double`].
    #[inline(always)]
    unsafe fn values<const D: usize>(from: *const A::Acc) -> [I::Register; D] {
        // SAFETY: the caller guarantees `D * N` values.
        unsafe {
            let mut values = [I::Register::load(from); D];
            if D == 2 && !Read::ZIPPED {
                let double = I::load_coefficients_double(from);
                values.copy_from_slice(&double);
            } else {
                for (i, value) in values.iter_mut().enumerate().skip(1) {
                    *value = I::Register::load(from.add(i * I::N));
                }
            }
            values
        }
    }

    /// Rotates rows at a constant distance in elements, each times its scale if `SCALE`.
    #[inline(always)]
    pub(super) unsafe fn rows<const SCALE: bool, const STREAM: bool>(
        from: (*const A, usize),
        to: (*mut B, usize),
        factors: *const A::Acc,
        scales: &[A::Acc],
        shape: Shape,
    ) {
        let Shape { pairs, run, .. } = shape;
        // Lines that bypass the caches are filled before the next row is started: a processor
        // combines only a few lines at a time, and writing a half-full line costs several times as
        // much.
        let together = if STREAM && Self::WRITTEN < LINE_BYTES {
            1
        } else {
            AHEAD
        };
        for (group, scales) in scales.chunks(together).enumerate() {
            for start in (0..pairs).step_by(run.max(1)) {
                // SAFETY: the caller guarantees as many rows as scales, of `2 * pairs` elements,
                // and four factors a pair; a run's elements are contiguous in either order, from
                // twice its first pair on.
                unsafe {
                    let row = group * together;
                    let from = (from.0.add(row * from.1 + 2 * start), from.1);
                    let to = (to.0.add(row * to.1 + 2 * start), to.1);
                    let factors = factors.add(4 * start);
                    let at = Self::runs::<SCALE, STREAM>(from, to, factors, scales, 0, run);
                    if at < run {
                        RowRotation::<Portable<1>, Portable<1>, A, B, Read, Write>::rest::<SCALE>(
                            from, to, factors, scales, at, run,
                        );
                    }
                }
            }
        }
    }

    /// Rotates the pairs of each row's run from `at` on, as far as whole registers reach, and
    /// returns the end. The factors stay in registers for all rows.
    #[inline(always)]
    unsafe fn runs<const SCALE: bool, const STREAM: bool>(
        from: (*const A, usize),
        to: (*mut B, usize),
        factors: *const A::Acc,
        scales: &[A::Acc],
        mut at: usize,
        run: usize,
    ) -> usize {
        // SAFETY: the caller guarantees rows with a run of `run` pairs and four factors for each;
        // the loops take as many pairs as are left between `at` and its end.
        unsafe {
            while Self::DOUBLES && at + 2 * I::N <= run {
                let f = factors.add(4 * at);
                let [fa, fb] = [Self::four::<2>(f), Self::four::<2>(f.add(I::N))];
                for (i, scale) in scales.iter().enumerate() {
                    let scale = I::Register::splat(*scale);
                    let [a, b] = Read::load_double::<I, A>(from.0.add(i * from.1), at, run);
                    let y = [
                        Self::pairs::<SCALE>(a, fa, scale),
                        Self::pairs::<SCALE>(b, fb, scale),
                    ];
                    Write::store_double::<O, B, STREAM>(y, to.0.add(i * to.1), at, run);
                }
                at += 2 * I::N;
            }
            while at + I::N <= run {
                let f = Self::four::<1>(factors.add(4 * at));
                for (i, scale) in scales.iter().enumerate() {
                    let scale = I::Register::splat(*scale);
                    let (from, to) = (from.0.add(i * from.1), to.0.add(i * to.1));
                    if Self::SWAPS {
                        let (from, to) = (from.add(2 * at), to.add(2 * at));
                        let [a, b] = I::load_double(from);
                        let a = Self::swapped::<SCALE>(a, [f[0], f[1]], scale);
                        O::store::<STREAM>(a, to);
                        let b = Self::swapped::<SCALE>(b, [f[2], f[3]], scale);
                        O::store::<STREAM>(b, to.add(I::N));
                    } else {
                        let x = Read::load::<I, A>(from, at, run);
                        let y = Self::pairs::<SCALE>(x, f, scale);
                        Write::store::<O, B, STREAM>(y, to, at, run);
                    }
                }
                at += I::N;
            }
            at
        }
    }

    /// [`runs`](Self::runs) in a separate function, compiled once for all instruction sets.
    #[inline(never)]
    unsafe fn rest<const SCALE: bool>(
        from: (*const A, usize),
        to: (*mut B, usize),
        factors: *const A::Acc,
        scales: &[A::Acc],
        at: usize,
        run: usize,
    ) {
        // SAFETY: the caller guarantees what `runs` demands.
        unsafe { Self::runs::<SCALE, false>(from, to, factors, scales, at, run) };
    }

    /// The four factors of `N` pairs, which are `D` registers apart.
    #[inline(always)]
    unsafe fn four<const D: usize>(factors: *const A::Acc) -> [I::Register; 4] {
        // SAFETY: the caller guarantees the factors and the instructions.
        unsafe {
            let mut four = [I::Register::load(factors); 4];
            for (i, f) in four.iter_mut().enumerate().skip(1) {
                *f = I::Register::load(factors.add(i * D * I::N));
            }
            four
        }
    }

    /// Rotates `N` pairs.
    #[inline(always)]
    unsafe fn pairs<const SCALE: bool>(
        [mut x1, mut x2]: [I::Register; 2],
        [c1, s1, c2, s2]: [I::Register; 4],
        scale: I::Register,
    ) -> [I::Register; 2] {
        // SAFETY: the caller guarantees the instructions.
        unsafe {
            if SCALE {
                (x1, x2) = (x1.mul(scale), x2.mul(scale));
            }
            [x2.mul_add(s1, c1.mul(x1)), x1.mul_add(s2, c2.mul(x2))]
        }
    }

    /// Rotates the adjacent pairs of one register.
    #[inline(always)]
    unsafe fn swapped<const SCALE: bool>(
        mut x: I::Register,
        [cos, sin]: [I::Register; 2],
        scale: I::Register,
    ) -> I::Register {
        // SAFETY: the caller guarantees the instructions.
        unsafe {
            if SCALE {
                x = x.mul(scale);
            }
            x.swap().mul_add(sin, x.mul(cos))
        }
    }
}

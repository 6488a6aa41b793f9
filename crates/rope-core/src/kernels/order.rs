//! The places of pairs in a row, and how they are read and written.

use super::vector::{Memory, RegisterOf};
use crate::element::Element;

/// The places of the members of a run's pairs: [`Split`] or [`Zipped`].
///
/// # Safety
/// Of every function: the processor has the instructions of `M`. The run at `of` holds `run` pairs
/// and is valid for reads, or for writes if the function stores; `N` pairs from pair `at` on, in
/// functions named `_double` twice as many, are within it. With `STREAM` it starts a cache line,
/// and `at` is a multiple of `N`.
pub(super) trait Order: 'static {
    const ZIPPED: bool;

    /// Reads the members of `N` pairs.
    unsafe fn load<M: Memory<E>, E: Element>(
        of: *const E,
        at: usize,
        run: usize,
    ) -> [RegisterOf<M, E>; 2];

    /// Writes the members of `N` pairs.
    unsafe fn store<M: Memory<E>, E: Element, const STREAM: bool>(
        y: [RegisterOf<M, E>; 2],
        of: *mut E,
        at: usize,
        run: usize,
    );

    /// Reads the members of two times `N` pairs, split ones in the order of
    /// [`Memory::load_double`].
    unsafe fn load_double<M: Memory<E>, E: Element>(
        of: *const E,
        at: usize,
        run: usize,
    ) -> [[RegisterOf<M, E>; 2]; 2];

    /// Writes the members of two times `N` pairs in the order of
    /// [`load_double`](Self::load_double).
    unsafe fn store_double<M: Memory<E>, E: Element, const STREAM: bool>(
        y: [[RegisterOf<M, E>; 2]; 2],
        of: *mut E,
        at: usize,
        run: usize,
    );
}

/// All first members, then all second ones.
pub(super) struct Split;

impl Order for Split {
    const ZIPPED: bool = false;

    #[inline(always)]
    unsafe fn load<M: Memory<E>, E: Element>(
        of: *const E,
        at: usize,
        run: usize,
    ) -> [RegisterOf<M, E>; 2] {
        debug_assert!(at + M::N <= run);
        // SAFETY: the caller guarantees N pairs from `at` on within the run's `2 * run` elements;
        // their second members are `run` elements after the first ones.
        unsafe { [M::load(of.add(at)), M::load(of.add(at + run))] }
    }

    #[inline(always)]
    unsafe fn store<M: Memory<E>, E: Element, const STREAM: bool>(
        [first, second]: [RegisterOf<M, E>; 2],
        of: *mut E,
        at: usize,
        run: usize,
    ) {
        debug_assert!(at + M::N <= run);
        // SAFETY: the caller guarantees N writable pairs from `at` on within the run's `2 * run`
        // elements; their second members are `run` elements after the first ones. Runs that start
        // and fill cache lines keep whole registers aligned.
        unsafe {
            M::store::<STREAM>(first, of.add(at));
            M::store::<STREAM>(second, of.add(at + run));
        }
    }

    #[inline(always)]
    unsafe fn load_double<M: Memory<E>, E: Element>(
        of: *const E,
        at: usize,
        run: usize,
    ) -> [[RegisterOf<M, E>; 2]; 2] {
        debug_assert!(at + 2 * M::N <= run);
        // SAFETY: the caller guarantees 2 N pairs from `at` on within the run's `2 * run` elements;
        // their second members are `run` elements after the first ones.
        unsafe {
            let x1 = M::load_double(of.add(at));
            let x2 = M::load_double(of.add(at + run));
            [[x1[0], x2[0]], [x1[1], x2[1]]]
        }
    }

    #[inline(always)]
    unsafe fn store_double<M: Memory<E>, E: Element, const STREAM: bool>(
        [a, b]: [[RegisterOf<M, E>; 2]; 2],
        of: *mut E,
        at: usize,
        run: usize,
    ) {
        debug_assert!(at + 2 * M::N <= run);
        // SAFETY: the caller guarantees 2 N writable pairs from `at` on within the run's `2 * run`
        // elements; their second members are `run` elements after the first ones, so the two
        // destinations do not overlap. Runs that start and fill cache lines keep whole registers
        // aligned.
        unsafe {
            M::store_doubles::<STREAM>(
                [[a[0], b[0]], [a[1], b[1]]],
                [of.add(at), of.add(at + run)],
            );
        }
    }
}

/// The members of each pair adjacent.
pub(super) struct Zipped;

impl Order for Zipped {
    const ZIPPED: bool = true;

    #[inline(always)]
    unsafe fn load<M: Memory<E>, E: Element>(
        of: *const E,
        at: usize,
        run: usize,
    ) -> [RegisterOf<M, E>; 2] {
        debug_assert!(at + M::N <= run);
        // SAFETY: the caller guarantees N pairs of two elements from `at` on.
        unsafe { M::load_pairs(of.add(2 * at)) }
    }

    #[inline(always)]
    unsafe fn store<M: Memory<E>, E: Element, const STREAM: bool>(
        y: [RegisterOf<M, E>; 2],
        of: *mut E,
        at: usize,
        run: usize,
    ) {
        debug_assert!(at + M::N <= run);
        // SAFETY: the caller guarantees N writable pairs of two elements from `at` on. Runs that
        // start and fill cache lines keep whole registers aligned.
        unsafe { M::store_pairs::<STREAM>(y, of.add(2 * at)) }
    }

    #[inline(always)]
    unsafe fn load_double<M: Memory<E>, E: Element>(
        of: *const E,
        at: usize,
        run: usize,
    ) -> [[RegisterOf<M, E>; 2]; 2] {
        debug_assert!(at + 2 * M::N <= run);
        // SAFETY: the caller guarantees 2 N pairs of two elements from `at` on; each load takes N.
        unsafe {
            let first = M::load_pairs(of.add(2 * at));
            [first, M::load_pairs(of.add(2 * (at + M::N)))]
        }
    }

    #[inline(always)]
    unsafe fn store_double<M: Memory<E>, E: Element, const STREAM: bool>(
        y: [[RegisterOf<M, E>; 2]; 2],
        of: *mut E,
        at: usize,
        run: usize,
    ) {
        debug_assert!(at + 2 * M::N <= run);
        // SAFETY: the caller guarantees 2 N writable pairs of two elements from `at` on. Runs that
        // start and fill cache lines keep whole registers aligned.
        unsafe { M::store_pairs_double::<STREAM>(y, of.add(2 * at)) }
    }
}

//! Registers as arrays, for every processor, and one element at a time for row tails.

use super::vector::{Instructions, Kernel, Memory, Register};
use crate::element::{Element, Real};

/// `N` values; the compiler vectorises loops over them with the target's minimal instructions.
#[derive(Clone, Copy)]
pub(crate) struct Array<A, const N: usize>([A; N]);

impl<A: Copy, const N: usize> Array<A, N> {
    #[inline(always)]
    fn both(self, other: Self, f: impl Fn(A, A) -> A) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl<A: Real, const N: usize> Register for Array<A, N> {
    type Value = A;
    const N: usize = N;
    const COMMON_LENGTHS: bool = false;

    #[inline(always)]
    unsafe fn load(from: *const A) -> Self {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees N readable values at `from`.
        Self(std::array::from_fn(|i| unsafe { from.add(i).read() }))
    }
    #[inline(always)]
    unsafe fn write(self, to: *mut A) {
        debug_assert!(to.is_aligned());
        for (i, value) in self.0.into_iter().enumerate() {
            // SAFETY: the caller guarantees N writable values at `to`.
            unsafe { to.add(i).write(value) };
        }
    }
    #[inline(always)]
    unsafe fn splat(value: A) -> Self {
        Self([value; N])
    }
    #[inline(always)]
    unsafe fn zip(first: Self, second: Self) -> [Self; 2] {
        let from = |i: usize| if i.is_multiple_of(2) { first } else { second };
        [0, N].map(|start| Self(std::array::from_fn(|i| from(start + i).0[(start + i) / 2])))
    }
    #[inline(always)]
    unsafe fn swap(self) -> Self {
        // A single value has no neighbour and stays.
        Self(std::array::from_fn(|i| self.0[(i ^ 1).min(N - 1)]))
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.both(other, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        self.both(other, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self.both(other, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
        Self(std::array::from_fn(|i| {
            self.0[i].mul_add(factor.0[i], term.0[i])
        }))
    }
    #[inline(always)]
    unsafe fn total(mut self) -> A {
        let mut half = N / 2;
        while half > 0 {
            for i in 0..half {
                self.0[i] = self.0[i] + self.0[i + half];
            }
            half /= 2;
        }
        self.0[0]
    }
    #[inline(always)]
    unsafe fn signs(negative: bool) -> Self {
        Self([A::from_f64(if negative { -1.0 } else { 1.0 }); N])
    }
    #[inline(always)]
    unsafe fn flip(self, signs: Self) -> Self {
        self.both(signs, |a, sign| a * sign)
    }
}

/// Plain reads and writes of `N` elements.
pub(crate) struct Portable<const N: usize>;

impl<const N: usize> Instructions for Portable<N> {
    #[inline(never)]
    unsafe fn run<K: Kernel>(args: K::Args<'_>) {
        // SAFETY: every processor has the instructions; the rest the caller guarantees.
        unsafe { K::run(args) }
    }
}

impl<E: Element, const N: usize> Memory<E> for Portable<N> {
    type Register = Array<E::Acc, N>;
    type Narrower = Portable<1>;
    type Wide = Self;

    #[inline(always)]
    unsafe fn load(from: *const E) -> Array<E::Acc, N> {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees N readable elements at `from`.
        let element = |i| unsafe { from.add(i).read() };
        Array(std::array::from_fn(|i| element(i).widen()))
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(x: Array<E::Acc, N>, to: *mut E) {
        debug_assert!(to.is_aligned());
        for (i, value) in x.0.into_iter().enumerate() {
            // SAFETY: the caller guarantees N writable elements at `to`.
            unsafe { to.add(i).write(E::narrow(value)) };
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const E) -> [Array<E::Acc, N>; 2] {
        debug_assert!(from.is_aligned());
        // SAFETY: the caller guarantees 2 N readable elements at `from`.
        let element = |i| unsafe { from.add(i).read() };
        let member = |m| Array(std::array::from_fn(|i| element(2 * i + m).widen()));
        [member(0), member(1)]
    }
    #[inline(always)]
    unsafe fn store_pairs<const STREAM: bool>(pairs: [Array<E::Acc, N>; 2], to: *mut E) {
        debug_assert!(to.is_aligned());
        let [first, second] = pairs;
        for (i, (a, b)) in first.0.into_iter().zip(second.0).enumerate() {
            // SAFETY: the caller guarantees 2 N writable elements at `to`.
            unsafe {
                to.add(2 * i).write(E::narrow(a));
                to.add(2 * i + 1).write(E::narrow(b));
            }
        }
    }
}

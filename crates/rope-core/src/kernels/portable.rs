//! Vectors as arrays, for every processor, and one element at a time for the ends of rows.

use super::vector::Vector;
use crate::element::{Element, Real};

/// `N` values; the compiler vectorises loops over them with what the target has at least.
#[derive(Clone, Copy)]
pub(crate) struct Array<A, const N: usize>([A; N]);

impl<A: Copy, const N: usize> Array<A, N> {
    #[inline(always)]
    fn both(self, other: Self, f: impl Fn(A, A) -> A) -> Self {
        Self(core::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl<E: Element, const N: usize> Vector<E> for Array<E::Acc, N> {
    const N: usize = N;
    type Narrower = Array<E::Acc, 1>;

    #[inline(always)]
    unsafe fn load_acc(from: *const E::Acc) -> Self {
        // SAFETY: the caller vouches for N values at `from`.
        Self(core::array::from_fn(|i| unsafe { from.add(i).read() }))
    }
    #[inline(always)]
    unsafe fn load(from: *const E) -> Self {
        // SAFETY: the caller vouches for N elements at `from`.
        let element = |i| unsafe { from.add(i).read() };
        Self(core::array::from_fn(|i| element(i).widen()))
    }
    #[inline(always)]
    unsafe fn store<const STREAM: bool>(self, to: *mut E) {
        for (i, value) in self.0.into_iter().enumerate() {
            // SAFETY: the caller vouches for N elements at `to`.
            unsafe { to.add(i).write(E::narrow(value)) };
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const E) -> (Self, Self) {
        // SAFETY: the caller vouches for 2 N elements at `from`.
        let element = |i| unsafe { from.add(i).read() };
        let member = |m| Self(core::array::from_fn(|i| element(2 * i + m).widen()));
        (member(0), member(1))
    }
    #[inline(always)]
    unsafe fn store_pairs<const STREAM: bool>(first: Self, second: Self, to: *mut E) {
        for (i, (a, b)) in first.0.into_iter().zip(second.0).enumerate() {
            // SAFETY: the caller vouches for 2 N elements at `to`.
            unsafe {
                to.add(2 * i).write(E::narrow(a));
                to.add(2 * i + 1).write(E::narrow(b));
            }
        }
    }
    #[inline(always)]
    unsafe fn zip(first: Self, second: Self) -> [Self; 2] {
        let from = |i: usize| if i.is_multiple_of(2) { first } else { second };
        [0, N].map(|start| Self(core::array::from_fn(|i| from(start + i).0[(start + i) / 2])))
    }
    #[inline(always)]
    unsafe fn swap(self) -> Self {
        // One value has no neighbour.
        Self(core::array::from_fn(|i| self.0[(i ^ 1).min(N - 1)]))
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
    unsafe fn signs(negative: bool) -> Self {
        let sign = if negative { -1.0 } else { 1.0 };
        Self([E::Acc::from_f64(sign); N])
    }
    #[inline(always)]
    unsafe fn flip(self, signs: Self) -> Self {
        self.both(signs, |a, sign| a * sign)
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self.both(other, |a, b| a * b)
    }
}

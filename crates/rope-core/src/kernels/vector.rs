//! What the algorithm asks of a vector type.

use crate::element::Element;

/// A vector of `N` values of the type that `E` is computed in, with its loads from and stores to `E`.
///
/// No operation contracts a product and a sum: with one rounding each, every implementation gives the same
/// bits, and given the same cos and sin those of the unfused expression `x * cos + rotate_half(x) * sin`.
///
/// # Safety
/// Of every function: the processor has the instructions; pointers are valid for `N` elements, for `2 N` in
/// the `_pairs` and `_double` functions, for `4 N` in those of both names; no alignment is needed beyond the element's own.
pub(crate) trait Vector<E: Element>: Copy {
    /// Values per vector.
    const N: usize;
    /// A shorter vector for what remains of a row.
    type Narrower: Vector<E>;

    /// Reads `N` values of the computed type.
    unsafe fn load_acc(from: *const E::Acc) -> Self;
    /// Reads and widens `N` elements.
    unsafe fn load(from: *const E) -> Self;
    /// Rounds to nearest, ties to even, and writes `N` elements.
    unsafe fn store(self, to: *mut E);
    /// Reads `N` adjacent pairs: first members, second members.
    unsafe fn load_pairs(from: *const E) -> (Self, Self);
    /// Writes `N` adjacent pairs.
    unsafe fn store_pairs(first: Self, second: Self, to: *mut E);
    /// Reads and widens `2 N` elements, in an order of the type's own.
    #[inline(always)]
    unsafe fn load_double(from: *const E) -> [Self; 2] {
        // SAFETY: the caller vouches for 2 N elements.
        unsafe { [Self::load(from), Self::load(from.add(Self::N))] }
    }
    /// Reads `2 N` values of the computed type, in the order of [`load_double`](Self::load_double).
    #[inline(always)]
    unsafe fn load_acc_double(from: *const E::Acc) -> [Self; 2] {
        // SAFETY: the caller vouches for 2 N values.
        unsafe { [Self::load_acc(from), Self::load_acc(from.add(Self::N))] }
    }
    /// Rounds and writes two times `2 N` elements, each in the order of [`load_double`](Self::load_double), to places
    /// that do not overlap.
    #[inline(always)]
    unsafe fn store_doubles(values: [[Self; 2]; 2], to: [*mut E; 2]) {
        for (values, to) in values.into_iter().zip(to) {
            // SAFETY: the caller vouches for 2 N elements at each place.
            unsafe {
                values[0].store(to);
                values[1].store(to.add(Self::N));
            }
        }
    }
    /// Writes `N` adjacent pairs, and `N` more behind them.
    #[inline(always)]
    unsafe fn store_pairs_double(values: [(Self, Self); 2], to: *mut E) {
        // SAFETY: the caller vouches for 4 N elements.
        unsafe {
            Self::store_pairs(values[0].0, values[0].1, to);
            Self::store_pairs(values[1].0, values[1].1, to.add(2 * Self::N));
        }
    }
    /// Sum.
    unsafe fn add(self, other: Self) -> Self;
    /// Difference.
    unsafe fn sub(self, other: Self) -> Self;
    /// The negative.
    unsafe fn neg(self) -> Self;
    /// Product.
    unsafe fn mul(self, other: Self) -> Self;
}

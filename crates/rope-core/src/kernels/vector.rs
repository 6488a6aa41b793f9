//! What the algorithm asks of a vector type.

use crate::element::Element;

/// A vector of `N` values of the type that `E` is computed in, with its loads from and stores to `E`.
///
/// No operation contracts a product and a sum: with one rounding each, every implementation gives the same
/// bits, and given the same cos and sin those of the unfused expression `x * cos + rotate_half(x) * sin`.
///
/// # Safety
/// Of every function: the processor has the instructions; pointers are valid for `N` elements, for `2 N` in
/// the `_pairs` and `_double` functions, for `4 N` in those of both names; no alignment is needed beyond the element's
/// own, except that stores with `STREAM` start at a multiple of their length.
pub(crate) trait Vector<E: Element>: Copy {
    /// Values per vector.
    const N: usize;
    /// Whether two vectors at a time cost less than one after another.
    const DOUBLES: bool = false;
    /// Whether stores with `STREAM` go past the caches: memory then does not fetch what is overwritten, and the caches
    /// keep what they have. Other threads see them after [`fence`](Self::fence).
    const STREAMS: bool = false;
    /// Whether rows of adjacent pairs cost less if members change places, than if they are brought apart and together.
    /// [`load_double`](Self::load_double) then keeps their order.
    const SWAPS: bool = false;
    /// A shorter vector for what remains of a row.
    type Narrower: Vector<E>;

    /// Reads `N` values of the computed type.
    unsafe fn load_acc(from: *const E::Acc) -> Self;
    /// Reads and widens `N` elements.
    unsafe fn load(from: *const E) -> Self;
    /// Rounds to nearest, ties to even, and writes `N` elements.
    unsafe fn store<const STREAM: bool>(self, to: *mut E);
    /// Reads `N` adjacent pairs: first members, second members.
    unsafe fn load_pairs(from: *const E) -> (Self, Self);
    /// Writes `N` adjacent pairs.
    unsafe fn store_pairs<const STREAM: bool>(first: Self, second: Self, to: *mut E);
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
    unsafe fn store_doubles<const STREAM: bool>(values: [[Self; 2]; 2], to: [*mut E; 2]) {
        for (values, to) in values.into_iter().zip(to) {
            // SAFETY: the caller vouches for 2 N elements at each place.
            unsafe {
                values[0].store::<STREAM>(to);
                values[1].store::<STREAM>(to.add(Self::N));
            }
        }
    }
    /// Writes `N` adjacent pairs, and `N` more behind them.
    #[inline(always)]
    unsafe fn store_pairs_double<const STREAM: bool>(values: [(Self, Self); 2], to: *mut E) {
        // SAFETY: the caller vouches for 4 N elements.
        unsafe {
            Self::store_pairs::<STREAM>(values[0].0, values[0].1, to);
            Self::store_pairs::<STREAM>(values[1].0, values[1].1, to.add(2 * Self::N));
        }
    }
    /// Lets other threads see what was stored with `STREAM`.
    #[inline(always)]
    unsafe fn fence() {}
    /// Values side by side: one of the first, one of the second.
    unsafe fn zip(first: Self, second: Self) -> [Self; 2];
    /// Neighbours in each other's place.
    unsafe fn swap(self) -> Self;
    /// Sum.
    unsafe fn add(self, other: Self) -> Self;
    /// Difference.
    unsafe fn sub(self, other: Self) -> Self;
    /// What [`flip`](Self::flip) takes to leave values as they are, or to negate them.
    unsafe fn signs(negative: bool) -> Self;
    /// Negates, or not.
    unsafe fn flip(self, signs: Self) -> Self;
    /// Product.
    unsafe fn mul(self, other: Self) -> Self;
}

//! What the algorithm asks of a vector type.

use crate::element::Element;

/// A vector of `N` values of the type that `E` is computed in, with its loads from and stores to `E`.
///
/// No operation contracts a product and a sum: with one rounding each, every implementation gives the same
/// bits, and given the same cos and sin those of the unfused expression `x * cos + rotate_half(x) * sin`.
///
/// # Safety
/// Of every function: the processor has the instructions; pointers are valid for `N` elements, for `2 N` in
/// the `_pairs` functions; no alignment is needed beyond the element's own.
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
    /// Sum.
    unsafe fn add(self, other: Self) -> Self;
    /// Difference.
    unsafe fn sub(self, other: Self) -> Self;
    /// Product.
    unsafe fn mul(self, other: Self) -> Self;
}

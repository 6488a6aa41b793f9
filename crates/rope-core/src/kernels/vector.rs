//! The operations that the algorithm requires of a register, and its loads and stores for one
//! element type.

use crate::element::{Element, Real};

/// A function compiled for one set of instructions, without branches between algorithms: functions
/// of moderate length compile in a fraction of the time.
pub(crate) trait Kernel {
    /// Its arguments.
    type Args<'a>;
    /// Runs it.
    ///
    /// # Safety
    /// The processor has the instructions of the kernel, and the kernel's own conditions hold.
    unsafe fn run(args: Self::Args<'_>);
}

/// A set of instructions.
pub(crate) trait Instructions: 'static {
    /// Runs a kernel compiled with these instructions, in a separate function.
    ///
    /// # Safety
    /// The processor has these instructions, and the kernel's own conditions hold.
    unsafe fn run<K: Kernel>(args: K::Args<'_>);
}

/// A register of `N` values and its arithmetic.
///
/// Only [`mul_add`](Self::mul_add) contracts a product and a sum, so every implementation gives the
/// same bits. The rotation alone does not use it: given the same cos and sin, it is bit-identical
/// to the unfused expression `x * cos + rotate_half(x) * sin`.
///
/// # Safety
/// Of every function: the processor has the register's instructions.
pub(crate) trait Register: Copy {
    /// The type of a value.
    type Value: Real;
    /// Values per register.
    const N: usize;
    /// True if stores with `STREAM` bypass the caches: memory then does not fetch what is
    /// overwritten, and the caches keep their contents. Other threads see the stores after
    /// [`fence`](Self::fence).
    const STREAMS: bool = false;
    /// True if common lengths of rows have separate code.
    const COMMON_LENGTHS: bool = true;

    /// Reads `N` values.
    ///
    /// # Safety
    /// `from` is valid for reads of `N` values and aligned for one.
    unsafe fn load(from: *const Self::Value) -> Self;
    /// Writes `N` values.
    ///
    /// # Safety
    /// `to` is valid for writes of `N` values and aligned for one.
    unsafe fn write(self, to: *mut Self::Value);
    /// `value`, `N` times.
    unsafe fn splat(value: Self::Value) -> Self;
    /// Interleaves the values: one of the first, one of the second.
    unsafe fn zip(first: Self, second: Self) -> [Self; 2];
    /// Exchanges each value at an even index with the one after it.
    unsafe fn swap(self) -> Self;
    /// The sum.
    unsafe fn add(self, other: Self) -> Self;
    /// The difference.
    unsafe fn sub(self, other: Self) -> Self;
    /// The product.
    unsafe fn mul(self, other: Self) -> Self;
    /// The product with `factor` plus `term`, rounded once.
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self;
    /// The sum of the values: each half is added to the other until one is left.
    unsafe fn total(self) -> Self::Value;
    /// The [`total`](Self::total) of each of four.
    #[inline(always)]
    unsafe fn totals([a, b, c, d]: [Self; 4]) -> [Self::Value; 4] {
        // SAFETY: the caller guarantees the instructions.
        unsafe { [a.total(), b.total(), c.total(), d.total()] }
    }
    /// The mask with which [`flip`](Self::flip) negates values, or leaves them as they are.
    unsafe fn signs(negative: bool) -> Self;
    /// Negates the values where `signs` says so.
    unsafe fn flip(self, signs: Self) -> Self;
    /// Prefetches the cache line of an address, which need not be valid, into the first-level cache
    /// if `NEAR`, else into the second.
    #[inline(always)]
    fn prefetch<const NEAR: bool, T>(_: *const T) {}
    /// Makes stores with `STREAM` visible to other threads.
    #[inline(always)]
    unsafe fn fence() {}
}

/// The register that `M` uses for elements of type `E`.
pub(crate) type RegisterOf<M, E> = <M as Memory<E>>::Register;

/// Loads and stores of elements of type `E` by the instructions that the implementing type stands
/// for.
///
/// # Safety
/// Of every function: the processor has the instructions. Pointers are aligned for one element and
/// valid for `N` elements, for `2 N` in functions named `_both`, `_pairs` or `_double`, for `4 N`
/// in those with both names. A store with `STREAM` starts at a multiple of its length in bytes.
pub(crate) trait Memory<E: Element>: Instructions {
    /// The register that elements are widened into.
    type Register: Register<Value = E::Acc>;
    /// Shorter registers for the rest of a row.
    type Narrower: Memory<E>;
    /// Loads and stores of the type that elements are computed in.
    type Wide: Memory<E::Acc, Register = Self::Register>;
    /// Elements per register.
    const N: usize = <Self::Register as Register>::N;
    /// True if two registers at a time cost less than one after another.
    const DOUBLES: bool = false;
    /// True if rows of adjacent pairs cost less if members are swapped within a register than if
    /// they are separated and interleaved again. [`load_double`](Self::load_double) must then keep
    /// the order of the elements.
    const SWAPS: bool = false;
    /// True if the order of [`load_double`](Self::load_double) is that of
    /// [`load_pairs`](Self::load_pairs), and costs less than that of the elements.
    const UNZIPS: bool = false;
    /// True if writing and reading a widened element costs less than widening it a second time.
    const KEEPS_WIDE: bool = false;

    /// Reads and widens `N` elements.
    unsafe fn load(from: *const E) -> Self::Register;
    /// Rounds to nearest, ties to even, and writes `N` elements. Of bf16, no NaN among the values
    /// may have bits in the lower half of its word: see
    /// [`InstructionSet::for_values`](super::InstructionSet::for_values).
    unsafe fn store<const STREAM: bool>(x: Self::Register, to: *mut E);
    /// Rounds and writes `2 N` elements.
    #[inline(always)]
    unsafe fn store_both<const STREAM: bool>(x: [Self::Register; 2], to: *mut E) {
        // SAFETY: the caller guarantees `2 N` writable elements; each store takes `N` of them.
        unsafe {
            Self::store::<STREAM>(x[0], to);
            Self::store::<STREAM>(x[1], to.add(Self::N));
        }
    }
    /// Reads `N` adjacent pairs: first members, second members.
    unsafe fn load_pairs(from: *const E) -> [Self::Register; 2];
    /// Writes `N` adjacent pairs.
    unsafe fn store_pairs<const STREAM: bool>(pairs: [Self::Register; 2], to: *mut E);
    /// Reads and widens `2 N` elements, in an order of the implementation's choice.
    #[inline(always)]
    unsafe fn load_double(from: *const E) -> [Self::Register; 2] {
        // SAFETY: the caller guarantees `2 N` readable elements; each load takes `N` of them.
        unsafe { [Self::load(from), Self::load(from.add(Self::N))] }
    }
    /// Reads `2 N` coefficients in the order of [`load_double`](Self::load_double).
    #[inline(always)]
    unsafe fn load_coefficients_double(from: *const E::Acc) -> [Self::Register; 2] {
        // SAFETY: the caller guarantees `2 N` readable values; each load takes `N` of them.
        unsafe {
            [
                Self::Register::load(from),
                Self::Register::load(from.add(Self::N)),
            ]
        }
    }
    /// Rounds and writes `2 N` elements to each of two destinations that do not overlap, both in
    /// the order of [`load_double`](Self::load_double).
    #[inline(always)]
    unsafe fn store_doubles<const STREAM: bool>(x: [[Self::Register; 2]; 2], to: [*mut E; 2]) {
        for (x, to) in x.into_iter().zip(to) {
            // SAFETY: the caller guarantees `2 N` writable elements at each destination, aligned
            // for whole registers if `STREAM`; each store takes `N` of them.
            unsafe {
                Self::store::<STREAM>(x[0], to);
                Self::store::<STREAM>(x[1], to.add(Self::N));
            }
        }
    }
    /// Writes `2 N` adjacent pairs.
    #[inline(always)]
    unsafe fn store_pairs_double<const STREAM: bool>(x: [[Self::Register; 2]; 2], to: *mut E) {
        // SAFETY: the caller guarantees `4 N` writable elements, aligned for whole registers if
        // `STREAM`; each store takes `2 N` of them.
        unsafe {
            Self::store_pairs::<STREAM>(x[0], to);
            Self::store_pairs::<STREAM>(x[1], to.add(2 * Self::N));
        }
    }
}

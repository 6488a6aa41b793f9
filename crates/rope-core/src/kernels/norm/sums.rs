//! Sums over the channels of a row.

use std::hint::black_box;

use crate::element::{Element, Real};
use crate::kernels::vector::{Memory, Register};

/// Partial sums of a row: two of the widest registers, so that sums do not wait for each other.
const SUMS: usize = 32;
/// Registers that hold them, at most: those of four values.
const SUM_REGISTERS: usize = 8;

/// The registers that hold the partial sums. The compiler unrolls loops over them only where they
/// are registers of the processor: portable ones would be kilobytes of code.
#[inline(always)]
fn registers<R: Register>() -> usize {
    let registers = SUMS / R::N;
    if R::COMMON_LENGTHS {
        registers
    } else {
        black_box(registers)
    }
}

/// The partial sums in one register: each half is added to the other until one is left. If they are
/// `unzipped`, every two registers hold those of values at even and at odd indices; the last two
/// are brought into the order of the values.
///
/// # Safety
/// The processor has the instructions of `R`.
#[inline(always)]
unsafe fn total<R: Register>(mut sums: [R; SUM_REGISTERS], unzipped: bool) -> R {
    const { assert!(R::N < SUMS) };
    let mut half = SUMS / R::N / 2;
    // SAFETY: the caller guarantees the instructions.
    unsafe {
        while half > 1 {
            for i in 0..half {
                sums[i] = sums[i].add(sums[i + half]);
            }
            half /= 2;
        }
        let [first, second] = if unzipped {
            R::zip(sums[0], sums[1])
        } else {
            [sums[0], sums[1]]
        };
        first.add(second)
    }
}

/// The last elements of a row, fewer than [`SUMS`], and zeros.
///
/// # Safety
/// `from` is valid for reads of `len` elements.
#[inline(always)]
unsafe fn padded<E: Element>(from: *const E, len: usize) -> [E; SUMS] {
    let mut all = [E::narrow(E::Acc::ZERO); SUMS];
    for (i, to) in all.iter_mut().take(len).enumerate() {
        // SAFETY: the caller guarantees `len` elements.
        *to = unsafe { from.add(i).read() };
    }
    all
}

/// The sum of the squares of `len` values, as partial sums of one register.
///
/// # Safety
/// The processor has the instructions of `M`; `x` is valid for reads of `len` elements.
#[inline(always)]
pub(super) unsafe fn squares<M: Memory<E>, E: Element>(
    x: *const E,
    wide: Option<*mut E::Acc>,
    len: usize,
) -> M::Register {
    const { assert!(SUMS.is_multiple_of(M::N) && SUMS / M::N <= SUM_REGISTERS) };
    // SAFETY: the caller guarantees `len` elements, of which the loop takes what is left, and the
    // instructions.
    unsafe {
        let mut sums = [M::Register::splat(E::Acc::ZERO); SUM_REGISTERS];
        let rest = len % SUMS;
        for at in (0..len - rest).step_by(SUMS) {
            let wide = wide.map(|wide| wide.wrapping_add(at));
            add_squares::<M, E>(&mut sums, x.add(at), wide);
        }
        if rest > 0 {
            let at = len - rest;
            let x = padded(x.add(at), rest);
            let mut values = [E::Acc::ZERO; SUMS];
            add_squares::<M, E>(&mut sums, x.as_ptr(), Some(values.as_mut_ptr()));
            if let Some(wide) = wide {
                wide.add(at).copy_from_nonoverlapping(values.as_ptr(), rest);
            }
        }
        total(sums, M::UNZIPS)
    }
}

/// Adds the squares of [`SUMS`] values to the partial sums.
///
/// # Safety
/// The processor has the instructions of `M`; `x` is valid for reads of `SUMS` elements.
#[inline(always)]
unsafe fn add_squares<M: Memory<E>, E: Element>(
    sums: &mut [M::Register; SUM_REGISTERS],
    x: *const E,
    wide: Option<*mut E::Acc>,
) {
    for (k, sums) in sums[..registers::<M::Register>()]
        .chunks_exact_mut(2)
        .enumerate()
    {
        // SAFETY: the caller guarantees `SUMS` elements, and the instructions.
        unsafe {
            let x = two::<M, E>(x.add(2 * k * M::N), M::UNZIPS);
            for (i, (sum, x)) in sums.iter_mut().zip(x).enumerate() {
                if let Some(wide) = wide {
                    x.write(wide.add((2 * k + i) * M::N));
                }
                *sum = x.mul_add(x, *sum);
            }
        }
    }
}

/// The sums of x * x, and of h * x, as partial sums of one register, where h is g, or g * w if
/// there are weights; writes x widened if there is room.
///
/// # Safety
/// The processor has the instructions; `x`, `g` and `weight` are valid for reads of `len` elements,
/// `wide` for writes of as many.
#[inline(always)]
pub(super) unsafe fn products<X, G, A, B>(
    x: *const A,
    g: *const B,
    weight: Option<*const A::Acc>,
    wide: Option<*mut A::Acc>,
    len: usize,
) -> [X::Register; 2]
where
    X: Memory<A>,
    G: Memory<B, Register = X::Register>,
    A: Element,
    B: Element<Acc = A::Acc>,
{
    const { assert!(SUMS.is_multiple_of(X::N) && SUMS / X::N <= SUM_REGISTERS) };
    // SAFETY: the caller guarantees `len` elements, of which the loop takes what is left, and the
    // instructions.
    unsafe {
        let mut sums = [[X::Register::splat(A::Acc::ZERO); SUM_REGISTERS]; 2];
        let rest = len % SUMS;
        for at in (0..len - rest).step_by(SUMS) {
            let weight = weight.map(|weight| weight.wrapping_add(at));
            let wide = wide.map(|wide| wide.wrapping_add(at));
            add_products::<X, G, A, B>(&mut sums, x.add(at), g.add(at), weight, wide);
        }
        debug_assert!(rest == 0 || !unzips::<X, G, A, B>());
        if rest > 0 {
            let at = len - rest;
            let (x, g) = (padded(x.add(at), rest), padded(g.add(at), rest));
            let weight = weight.map(|weight| padded(weight.add(at), rest));
            let weight = weight.as_ref().map(|weight| weight.as_ptr());
            let mut values = [A::Acc::ZERO; SUMS];
            let to = Some(values.as_mut_ptr());
            add_products::<X, G, A, B>(&mut sums, x.as_ptr(), g.as_ptr(), weight, to);
            if let Some(wide) = wide {
                wide.add(at).copy_from_nonoverlapping(values.as_ptr(), rest);
            }
        }
        let apart = unzips::<X, G, A, B>();
        [total(sums[0], apart), total(sums[1], apart)]
    }
}

/// True if values at even and at odd indices stay apart: both operands have them so.
pub(super) const fn unzips<X: Memory<A>, G: Memory<B>, A: Element, B: Element>() -> bool {
    X::UNZIPS && G::UNZIPS
}

/// Adds [`SUMS`] values to the sums of [`products`].
///
/// # Safety
/// As [`products`] of `SUMS` elements.
#[inline(always)]
unsafe fn add_products<X, G, A, B>(
    [squares, products]: &mut [[X::Register; SUM_REGISTERS]; 2],
    x: *const A,
    g: *const B,
    weight: Option<*const A::Acc>,
    wide: Option<*mut A::Acc>,
) where
    X: Memory<A>,
    G: Memory<B, Register = X::Register>,
    A: Element,
    B: Element<Acc = A::Acc>,
{
    // By index: the compiler then keeps the sums in registers.
    for k in (0..registers::<X::Register>()).step_by(2) {
        // SAFETY: the caller guarantees `SUMS` elements, and the instructions.
        unsafe {
            let apart = unzips::<X, G, A, B>();
            let x = two::<X, A>(x.add(k * X::N), apart);
            let g = two::<G, B>(g.add(k * X::N), apart);
            for i in 0..2 {
                let at = (k + i) * X::N;
                if let Some(wide) = wide {
                    x[i].write(wide.add(at));
                }
                squares[k + i] = x[i].mul_add(x[i], squares[k + i]);
                let h = match weight {
                    Some(weight) => g[i].mul(X::Register::load(weight.add(at))),
                    None => g[i],
                };
                products[k + i] = h.mul_add(x[i], products[k + i]);
            }
        }
    }
}

/// Two registers of `2 N` elements: in their order, or those at even and at odd indices apart.
///
/// # Safety
/// The processor has the instructions; `x` is valid for reads of `2 N` elements.
#[inline(always)]
pub(super) unsafe fn two<M: Memory<E>, E: Element>(x: *const E, apart: bool) -> [M::Register; 2] {
    // SAFETY: the caller guarantees the elements and the instructions.
    unsafe {
        if apart {
            M::load_pairs(x)
        } else {
            [M::load(x), M::load(x.add(M::N))]
        }
    }
}

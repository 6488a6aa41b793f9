//! x86-64: AVX2 with F16C, and AVX-512F.

mod avx2;
mod avx512;

use super::tile::{Tile, rotate_tile};
use super::vector::Vector;
use crate::element::Element;

/// [`rotate_tile`] with AVX2.
///
/// # Safety
/// The processor has AVX2 and F16C; otherwise as [`rotate_tile`].
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn avx2_tile<E: Element<Acc = f32>>(tile: &Tile<E>)
where
    avx2::F32x8: Vector<E>,
{
    // SAFETY: passed on to the caller.
    unsafe { rotate_tile::<avx2::F32x8, E>(tile) }
}

/// [`rotate_tile`] with AVX-512F.
///
/// # Safety
/// The processor has AVX-512F, AVX2 and F16C; otherwise as [`rotate_tile`].
#[target_feature(enable = "avx512f,avx2,f16c")]
pub(super) unsafe fn avx512_tile<E: Element<Acc = f32>>(tile: &Tile<E>)
where
    avx512::F32x16: Vector<E>,
{
    // SAFETY: passed on to the caller.
    unsafe { rotate_tile::<avx512::F32x16, E>(tile) }
}

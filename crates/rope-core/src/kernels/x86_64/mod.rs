//! x86-64: AVX2 with F16C, AVX-512 (F, BW, DQ), and its conversions to bf16.

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

/// [`rotate_tile`] with AVX-512.
///
/// # Safety
/// The processor has AVX-512 F, BW and DQ, AVX2 and F16C; otherwise as [`rotate_tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx2,f16c")]
pub(super) unsafe fn avx512_tile<E: Element<Acc = f32>>(tile: &Tile<E>)
where
    avx512::F32x16: Vector<E>,
{
    // SAFETY: passed on to the caller.
    unsafe { rotate_tile::<avx512::F32x16, E>(tile) }
}

/// [`rotate_tile`] with AVX-512 and its conversions to bf16.
///
/// # Safety
/// The processor has AVX-512 F, BW, DQ and BF16, AVX2 and F16C; otherwise as [`rotate_tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16,avx2,f16c")]
pub(super) unsafe fn avx512_bf16_tile<E: Element<Acc = f32>>(tile: &Tile<E>)
where
    avx512::WithBf16: Vector<E>,
{
    // SAFETY: passed on to the caller.
    unsafe { rotate_tile::<avx512::WithBf16, E>(tile) }
}

//! x86-64: AVX2 with F16C, AVX-512 (F, BW, DQ), and its conversions to bf16.

mod avx2;
mod avx512;

pub(super) use avx2::{avx2_norm, avx2_tile};
pub(super) use avx512::{avx512_bf16_norm, avx512_bf16_tile, avx512_norm, avx512_tile};

//! x86-64: AVX2 with FMA and F16C, AVX-512 (F, BW, DQ), and its conversions to bf16.

mod avx2;
mod avx512;

pub(super) use avx2::Avx2;
pub(super) use avx512::Avx512;
